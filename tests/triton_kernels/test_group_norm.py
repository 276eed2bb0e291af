"""Group norm in registers: tiles of every shape, functions before and after it, and its column sums."""

import pytest
import torch
import torch.nn.functional as F

from triton_kernels import chains
from triton_kernels.chain import Chain
from triton_kernels.group_norm import GroupNormConfig, column_tiles, group_norm, group_norm_backward

CONFIGS = [GroupNormConfig(1, 1, 2), GroupNormConfig(4, 32, 8), GroupNormConfig(2, 256, 64, num_warps=4)]
BOUNDS = (-0.75, 1.5)
TWO_BIASES = chains.LINEAR_HARDTANH_MISH_GROUP_NORM
#: Each chain with the operands before and after the norm's weight and bias, and what it is of z. The biases are in z
#: already, and get gradients all the same.
CHAINS = {
    "alone": (Chain("linear"), (None,), (), lambda z, norm: norm(z)),
    "mish before": (TWO_BIASES, (None, None, BOUNDS, None), (), lambda z, norm: norm(F.mish(F.hardtanh(z, *BOUNDS)))),
    "hardtanh after": (
        chains.LINEAR_GROUP_NORM_HARDTANH,
        (None,),
        (BOUNDS,),
        lambda z, norm: F.hardtanh(norm(z), *BOUNDS),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("config", CONFIGS, ids=["smallest", "middle", "wide"])
@pytest.mark.parametrize("rows, num_groups, group_size", [(1, 1, 7), (9, 3, 10), (21, 2, 16), (5, 3, 100)])
def test_against_autograd(rows, num_groups, group_size, config, name):
    generator = torch.Generator().manual_seed(rows)
    channels = num_groups * group_size
    z, gradient = torch.randn(2, rows, channels, generator=generator)
    weight, bias = torch.randn(2, channels, generator=generator)
    chain, before, after, function = CHAINS[name]
    leaves = [tensor.double().requires_grad_() for tensor in (z, weight, bias)]
    expected = function(leaves[0], lambda value: torch.group_norm(value, num_groups, leaves[1], leaves[2]))
    expected_gradients = torch.autograd.grad(expected, leaves, gradient.double())

    output, input_gradient = torch.full_like(z, torch.nan), torch.full_like(z, torch.nan)
    arguments = (z, num_groups, chain, (*before, weight, bias, *after), 1e-5, config)
    group_norm(*arguments, output=output)
    biases, sums = torch.full((len(chain.biases), channels), torch.nan), torch.full((2, channels), torch.nan)
    gradients = (*biases, *[None] * len(chain.activation), *sums, *[None] * len(after))
    group_norm_backward(gradient, *arguments, input_gradient=input_gradient, gradients=gradients)
    results = (output, input_gradient, *sums, *biases)
    truths = (expected, *expected_gradients, *[expected_gradients[0].sum(0)] * len(biases))
    for result, truth in zip(results, truths, strict=True):
        torch.testing.assert_close(result.double(), truth.detach(), rtol=1e-4, atol=1e-4)


def test_tiles_cover_all_groups():
    assert column_tiles(8192, 32, GroupNormConfig(4, 256, 8)) == 32
    assert column_tiles(90, 10, GroupNormConfig(4, 64, 8)) == 3  # a group of 10 takes 16 columns of the tile
    assert column_tiles(3000, 1000, GroupNormConfig(4, 64, 8)) == 3  # never less than a group


@pytest.mark.parametrize("wanted", [(0,), (3,), (1, 2), ()], ids=str)
@pytest.mark.parametrize("rows", [1, 21])
def test_what_is_wanted(rows, wanted):
    """Sums of one chunk of rows and of several, in any dtype: those that are wanted do not depend on others."""
    z, gradient = torch.randn(2, rows, 20, generator=torch.Generator().manual_seed(0))

    weight, bias = torch.randn(2, 20, generator=torch.Generator().manual_seed(1))
    operands = (None, None, BOUNDS, None, weight, bias)  # the product added the biases

    def sums(*vectors):
        arguments = (gradient, z, 4, TWO_BIASES, operands, 1e-5, CONFIGS[1])
        gradients = (*vectors[:2], None, None, *vectors[2:])
        group_norm_backward(*arguments, input_gradient=torch.empty_like(z), gradients=gradients)
        return vectors

    every = sums(*torch.empty(4, 20).unbind())
    assert torch.equal(every[0], every[1]) and len({tuple(each.tolist()) for each in every}) == 3
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16)
    some = sums(*(torch.empty(20, dtype=dtypes[i]) if i in wanted else None for i in range(4)))
    for i in wanted:
        assert torch.equal(some[i], every[i].to(dtypes[i]))


def test_no_rows():
    config, empty = CONFIGS[1], torch.empty(0, 20)
    weight, bias, *sums = torch.full((6, 20), torch.nan)
    arguments = (empty, 4, TWO_BIASES, (None, None, BOUNDS, None, weight, bias), 1e-5, config)
    group_norm(*arguments, output=empty)
    gradients = (*sums[:2], None, None, *sums[2:])
    group_norm_backward(empty, *arguments, input_gradient=empty, gradients=gradients)
    assert torch.equal(torch.stack(sums), torch.zeros(4, 20))
