"""Promise: where values are rounded to 16 bits, a function's form for that dtype is as good as the function."""

import pytest
import torch

from tests.triton_kernels.test_activations import SPECIAL, ours, theirs
from triton_kernels import activations as a
from triton_kernels.arithmetic import DIV_NUMBER

FORMS = [(each, dtype) for each in (a.SILU, a.SIGMOID, a.TANH) for dtype in (torch.bfloat16, torch.float16)]
by_form = pytest.mark.parametrize("pointwise, dtype", FORMS, ids=lambda each: getattr(each, "name", str(each)))


def check_form(pointwise, dtype, device):
    """Rounded to the dtype, it is as accurate as PyTorch's, and agrees on what is not finite."""
    form = pointwise.form(dtype)
    assert form != pointwise
    for low, high in ((-1, 1), (-4, 4), (-30, 30)):
        value = torch.linspace(low, high, 10001).to(dtype).to(device)
        found = [each.to(dtype) for each in ours(form, value.float(), torch.ones_like(value, dtype=torch.float32))]
        plain = theirs(pointwise.plain, value, torch.ones_like(value))
        exact = theirs(pointwise.plain, value.double(), torch.ones_like(value, dtype=torch.float64))
        for result, expected, truth in zip(found, plain, exact, strict=True):
            assert (result - truth).norm() <= 1.1 * (expected - truth).norm()
    value = torch.tensor([*SPECIAL, 2e4, -2e4]).to(dtype).float().to(device)
    expected = theirs(pointwise.plain, value, torch.ones_like(value))
    for result, plain in zip(ours(form, value, torch.ones_like(value)), expected, strict=True):
        torch.testing.assert_close(result, plain, rtol=1e-3, atol=1e-6, equal_nan=True)


def check_quotients(device):
    """A quotient that is a number of float32 comes out as that: a function that follows may jump there."""
    form = DIV_NUMBER.form(torch.bfloat16)
    for number in (7.0, 41.0, -49.0, 1.5, 5 * 2.0**100, -7 * 2.0**-120):
        quotients = torch.arange(-128.0, 129, device=device)
        result, _ = ours(form, quotients * number, torch.ones_like(quotients), (number,))
        assert torch.equal(result, quotients)
        assert torch.equal(result.signbit(), quotients.signbit())


def test_quotients():
    check_quotients("cpu")


@pytest.mark.gpu
def test_quotients_on_a_gpu():
    check_quotients("cuda")


@by_form
def test_forms(pointwise, dtype):
    check_form(pointwise, dtype, "cpu")


@pytest.mark.gpu
@by_form
def test_forms_on_a_gpu(pointwise, dtype):
    check_form(pointwise, dtype, "cuda")
