"""Promise: of a product whose weight is split in registers, the rows that are left are computed, and nothing else is
changed; and the parts of sums are added up in order.

``tests/test_gpu_registers.py`` runs the product itself, which Triton's interpreter does not know.
"""

import pytest
import torch

from triton_kernels.linear import LinearConfig
from triton_kernels.linear_registers_hopper import add_parts_kernel, left_tiles_kernel

CONFIG = LinearConfig(16, 16, 16)


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("programs", [1, 3, 50])
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("order", ["depth", "rows"])
def test_rows_that_are_left(order, transposed, is_own, programs):
    B, M, N, K = 3, 37, 20, 41
    input, weight = drawn(B if is_own else 1, M, K), drawn(B, N, K)
    input, weight = (each if order == "depth" else each.mT.contiguous().mT for each in (input, weight))
    bias = None if transposed else drawn(N)
    output = torch.full((B, N, M) if transposed else (B, M, N), 7.0)
    result = output.mT if transposed else output
    input_scale, weight_scale = torch.ones(len(input), M), torch.zeros(B, N)
    input_scale[0, 36] = weight_scale[1, 3] = torch.nan
    is_left = input_scale.isnan().expand(B, M)[:, :, None] | weight_scale.isnan()[:, None]
    want = torch.where(is_left, input.double() @ weight.double().mT + (0 if bias is None else bias), 7.0)
    for any_left in 0, 1:
        left_tiles_kernel[(programs,)](
            (input, *input.stride()[1:]),
            (weight, *weight.stride()[1:]),
            output,
            (input_scale, weight_scale),
            bias,
            torch.tensor([any_left], dtype=torch.int32),
            B,
            M,
            N,
            K,
            input.stride(0) * is_own,
            weight.stride(0),
            int(is_own),
            TRANSPOSED=transposed,
            INPUT_PRECISION="ieee",
            CONFIG=CONFIG,
        )
        expected = want if any_left else torch.full_like(want, 7.0)
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("has_bias", [True, False])
def test_parts_in_order(parts, has_bias):
    rows, N = 3, 37
    values, bias = drawn(parts, rows, N), drawn(N) if has_bias else None
    output = torch.full((rows, N), torch.nan)
    add_parts_kernel[(3, rows)](values, output, bias, rows, N, PARTS=parts, BLOCK=16)
    want = values[0] if bias is None else values[0] + bias
    for each in values[1:]:
        want = want + each
    assert torch.equal(output, want)
