"""Where a call runs and how float32 is multiplied, by PyTorch's own settings."""

import pytest
import torch

from ops import precision


def test_kernels_take_three_dtypes():
    """On the CPU, because Triton interprets here."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert precision.runs_kernels(torch.empty(0, dtype=dtype))
    assert not precision.runs_kernels(torch.empty(0, dtype=torch.float64))
    assert not precision.runs_kernels(torch.empty(0, device="meta"))


def test_without_the_interpreter_the_cpu_takes_the_reference(monkeypatch):
    monkeypatch.setattr(precision, "INTERPRETED", False)
    assert not precision.runs_kernels(torch.empty(0))


@pytest.mark.parametrize("setting, library", [("highest", False), ("high", True), ("medium", True)])
def test_the_library_multiplies_tf32(setting, library):
    torch.set_float32_matmul_precision(setting)
    assert precision.library_multiplies(torch.float32, 8192) is library
    assert not precision.library_multiplies(torch.bfloat16, 8192)
    assert not precision.library_multiplies(torch.float16, 8192)


def test_shallow_float32_products_are_the_librarys(monkeypatch):
    monkeypatch.setattr(precision, "SHALLOWEST_FLOAT32", 512)
    assert precision.library_multiplies(torch.float32, 511)
    assert not precision.library_multiplies(torch.float32, 512)
    assert not precision.library_multiplies(torch.bfloat16, 8)


def test_autocast_dtype():
    tensor = torch.empty(0)
    assert precision.autocast_dtype(tensor) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert precision.autocast_dtype(tensor) == torch.bfloat16
        assert precision.autocast_dtype(tensor.double()) == torch.float64
        assert precision.autocast_dtype(tensor.half()) == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert precision.autocast_dtype(tensor) == torch.float32


def test_gradient_is_needed_where_autograd_will_ask():
    parameter = torch.empty(1, requires_grad=True)
    assert precision.needs_gradient(None, torch.empty(1), parameter)
    assert not precision.needs_gradient(None, torch.empty(1))
    with torch.no_grad():
        assert not precision.needs_gradient(parameter)
