"""Promise: on a GPU that the kernels do not run on, PyTorch's own functions do, and one sentence says so."""

import sys
import types
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ops
from autotune_configs import tables
from triton_kernels import device

REASON = "the kernels need an NVIDIA GPU of compute capability 8.0 or newer, and cuda:0"


@pytest.fixture(params=["old", "another maker's"])
def reason(request, monkeypatch):
    """As on such a GPU. What is said of it."""
    major, hip = {"old": (7, None), "another maker's": (9, "6.4")}[request.param]
    properties = types.SimpleNamespace(name="Some GPU", major=major, minor=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(device, "_cuda_properties", lambda index: properties)
    monkeypatch.setattr(tables, "_told", set())
    device.why_unsupported.cache_clear()
    yield f"{REASON} is Some GPU" if hip else f"{REASON}, Some GPU, has 7.5"
    device.why_unsupported.cache_clear()


def fakes():
    """An input and the vectors of a norm, which have no values."""
    return torch.empty(2, 8, 5, 6, device="cuda"), *(torch.empty(8, device="cuda") for _ in range(2))


def test_pytorch_runs_instead(reason):
    with FakeTensorMode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        input, weight, bias = fakes()
        for _ in range(2):
            result = ops.group_norm(input, 4, weight, bias, after=(ops.pointwise.silu(),))
            assert (result.shape, result.device.type) == (input.shape, "cuda")
    assert [str(each.message) for each in caught] == [f"{reason}: PyTorch's own functions run instead"]


def test_explain_says_so(reason, monkeypatch):
    monkeypatch.setattr(sys.modules["ops.explain"], "is_fake", lambda tensor: False)  # which these are
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        input, weight, bias = fakes()
        (call,) = ops.explain(ops.group_norm, input, 4, weight, bias).calls
    assert call.reason == reason and f"plain PyTorch: {reason}" in str(call)


def test_nothing_is_said_where_kernels_run(monkeypatch):
    for major, available in ((8, True), (7, False)):  # without a GPU, tensors are a compiler's
        monkeypatch.setattr(torch.cuda, "is_available", lambda answer=available: answer)
        monkeypatch.setattr(
            device,
            "_cuda_properties",
            lambda index, number=major: types.SimpleNamespace(name="Some GPU", major=number, minor=0),
        )
        device.why_unsupported.cache_clear()
        assert device.why_unsupported(0) == ""
    device.why_unsupported.cache_clear()
