"""Promise: of a product whose weight is split in registers, the parts of sums are added up in order, results that
cannot be trusted are computed again, and nothing else is changed.

``tests/test_gpu_registers.py`` runs the product itself, which Triton's interpreter does not know.
"""

import math

import pytest
import torch

from triton_kernels.linear import LinearConfig
from triton_kernels.linear_registers_finish import finish_kernel

CONFIG = LinearConfig(16, 16, 16)
B, M, N, K = 3, 37, 20, 41


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def finish(
    output, input, weight, input_scale, bounds, *, parts=None, bias=None, transposed=False, programs=3, part_count=1
):
    is_any = bool(input_scale.isnan().any() or (bounds != 0).any())
    finish_kernel[(programs,)](
        parts,
        (input, *input.stride()[1:]),
        (weight, *weight.stride()[1:]),
        output,
        (input_scale, bounds.view(torch.int32)),
        bias,
        torch.tensor([is_any], dtype=torch.int32),
        part_count,
        len(weight),
        input.shape[1],
        weight.shape[1],
        input.shape[2],
        input.stride(0) if len(input) == len(weight) else 0,
        weight.stride(0),
        int(len(input) == len(weight)),
        PARTS=0 if parts is None else len(parts),
        TRANSPOSED=transposed,
        INPUT_PRECISION="ieee",
        CONFIG=CONFIG,
    )


@pytest.mark.parametrize("programs", [1, 3, 50])
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("order", ["depth", "rows"])
def test_results_that_cannot_be_trusted(order, transposed, is_own, programs):
    """Those of a row without a scale, and of a weight's row with a bound or none the ones below."""
    input, weight = drawn(B if is_own else 1, M, K), drawn(B, N, K)
    input, weight = (each if order == "depth" else each.mT.contiguous().mT for each in (input, weight))
    bias = drawn(M if transposed else N)
    output = torch.full((B, N, M) if transposed else (B, M, N), 7.0)
    result = output.mT if transposed else output
    input_scale, bounds = torch.ones(len(input), M), torch.zeros(B, N)
    untouched = result.clone()
    finish(output, input, weight, input_scale, bounds, bias=bias, transposed=transposed, programs=programs)
    assert torch.equal(result, untouched)
    bounds[1, 5] = 4.0
    least = 4.0 * 2.0**-9
    result[1, :9, 5], result[1, 9, 5], result[1, 10, 5] = -0.9 * least, -1.1 * least, torch.nan
    input_scale[0, 36], bounds[1, 3] = torch.nan, torch.nan
    is_left = (input_scale.isnan().expand(B, M)[:, :, None] | bounds.isnan()[:, None]).clone()
    is_left[1, :9, 5] = is_left[1, 10, 5] = True
    product = input.double() @ weight.double().mT + (bias[:, None] if transposed else bias)
    want = torch.where(is_left, product, result.double())
    finish(output, input, weight, input_scale, bounds, bias=bias, transposed=transposed, programs=programs)
    torch.testing.assert_close(result.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(result[~is_left], want[~is_left].float())


@pytest.mark.parametrize("part_count", [1, 3])
@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**20])
def test_what_is_trusted(scale, part_count):
    """A result of which at most 2**-19 can be lost: by the row's scale, of which its elements are at most 2**15, and
    the greatest bound of a part."""
    bound = 8.0
    lost = part_count * 64 * bound * 2.0**-49 * scale * 2.0**15
    output = torch.tensor([[[0.99, 1.01]]]) * lost * 2.0**19
    trusted = output[0, 0, 1].item()
    bounds = torch.full((1, 2), bound)
    ones = torch.ones(1, 2, K)
    finish(output, ones[:, :1], ones, torch.full((1, 1), scale), bounds, part_count=part_count)
    assert output[0, 0].tolist() == [K, trusted]


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_parts_in_order(transposed, has_bias, parts):
    values = drawn(parts, B, N, M) if transposed else drawn(parts, B, M, N)
    bias = drawn(values.shape[-1]) if has_bias else None
    output = torch.full_like(values[0], math.nan)
    input, weight = drawn(B, M, K), drawn(B, N, K)
    bounds = torch.zeros(B, N)
    finish(output, input, weight, torch.ones(B, M), bounds, parts=values, bias=bias, transposed=transposed)
    want = values[0] + bias if has_bias else values[0]
    for each in values[1:]:
        want = want + each
    assert torch.equal(output, want)
    bounds[2, 3] = math.inf
    finish(output, input, weight, torch.ones(B, M), bounds, parts=values, bias=bias, transposed=transposed)
    of_column = 0 if bias is None else bias if transposed else bias[3]
    (want.mT if transposed else want)[2, :, 3] = input[2] @ weight[2, 3] + of_column
    torch.testing.assert_close(output, want)
