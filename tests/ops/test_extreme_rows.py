"""Promise: rows of huge values, and rows without a variance and an eps, give what PyTorch gives on a GPU.

PyTorch's values were measured there (H200, torch 2.11): its running means do not overflow, its sums of squares do, and
then the row is its bias. What it gives on a CPU differs.
"""

import copy
import math

import pytest
import torch
from torch import nn

import ops
from tests.chains import L75, Problem, make_arguments

#: Channels and groups: a group of a power of two, one that is padded, both in a tile of the product, a group alone.
GROUPINGS = ((32, 4), (40, 4), (100, 1), (4, 4))
#: Wider than a tile: groups by parts, a row by parts.
WIDE = ((20000, 2), (9001, 1))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = 3  # of which the second is extreme


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def among(value, others, width):
    row = torch.full((width,), others)
    row[width // 2] = value
    return row


#: ``(width, largest) -> row``, largest being the dtype's largest number.
HUGE = {
    "least": lambda width, largest: torch.full((width,), -largest),
    "most": lambda width, largest: torch.full((width,), largest),
    "nearly equal": lambda width, largest: largest / 4 * (1.0 + drawn(width) / 100.0),
    "one among zeros": lambda width, largest: among(largest, 0.0, width),
    "half of them": lambda width, largest: torch.where(torch.arange(width) < width // 2, 0.9 * largest, 0.0),
    "1e35": lambda width, largest: torch.full((width,), min(1e35, largest)),
    "3e19": lambda width, largest: (3e19 + 3e18 * drawn(width)).clamp(max=largest),
}


def exact(x, groups, weight, bias, eps):
    """The norm in float64; where float32's sum of squares is infinite, the deviation's reciprocal is 0."""
    grouped = x.double().unflatten(1, (groups, -1))
    centred = grouped - grouped.mean(2, keepdim=True)
    squares = centred.square().sum(2, keepdim=True)
    rstd = torch.where(squares > torch.finfo(torch.float32).max, 0.0, (squares / grouped.shape[2] + eps).rsqrt())
    return (centred * rstd).flatten(1) * weight.double() + bias.double()


def matrices(row, channels, groups, dtype):
    """x with a row whose second half of the groups is as usual, the norm's weight and bias, and a gradient."""
    x = drawn(ROWS, channels, seed=1).to(dtype)
    x[1, : channels // groups] = row(channels // groups, torch.finfo(dtype).max).to(dtype)
    return [x, *(drawn(channels, seed=seed).to(dtype) for seed in (2, 3)), drawn(ROWS, channels, seed=4).to(dtype)]


def differentiated(function, *arguments):
    *leaves, gradient = (each.clone().requires_grad_() for each in arguments)
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient.detach().to(output.dtype))]


def in_float64(groups, eps, *arguments):
    """Value and gradients of ``exact``."""
    return differentiated(lambda *each: exact(each[0], groups, *each[1:], eps), *(each.double() for each in arguments))


def close(results, expected, dtype):
    for name, result, truth in zip(("output", "input", "weight", "bias"), results, expected, strict=True):
        assert result.isfinite().all(), name
        size = torch.finfo(dtype).eps * (8 + 4 * truth.abs().max())
        torch.testing.assert_close(result.double(), truth, rtol=8 * torch.finfo(dtype).eps, atol=float(size), msg=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels, groups", [*GROUPINGS, *WIDE])
@pytest.mark.parametrize("name", HUGE)
def test_huge_rows(name, channels, groups, dtype):
    """Value and gradients, of that row and of the sums that it is part of."""
    if name == "3e19" and dtype != torch.float32:
        return  # of 16 bits, these are some few values
    arguments = matrices(HUGE[name], channels, groups, dtype)
    expected = in_float64(groups, 1e-5, *arguments)
    close(differentiated(lambda x, *affine: ops.group_norm(x, groups, *affine), *arguments), expected, dtype)
    if groups == 1:
        close(differentiated(lambda x, *affine: ops.layer_norm(x, channels, *affine), *arguments), expected, dtype)


class Layers(nn.Sequential):
    """A linear layer that changes nothing, a group norm and a hardtanh far away."""

    def __init__(self, channels, groups):
        super().__init__(nn.Linear(channels, channels), nn.GroupNorm(groups, channels), nn.Hardtanh(-1e3, 1e3))
        with torch.no_grad():
            self[0].weight.copy_(torch.eye(channels))
            for place, each in enumerate((self[0].bias, self[1].weight, self[1].bias)):
                each.copy_(drawn(channels, seed=place) * (place > 0))


def as_module(layers):
    norm = layers[1]
    module = ops.LinearGroupNormHardtanh(norm.num_channels, norm.num_channels, norm.num_groups, -1e3, 1e3)
    with torch.no_grad():
        for ours, theirs in zip(module.parameters(), layers.parameters(), strict=True):
            ours.copy_(theirs)
    return module


def as_fused(layers):
    ops.fuse(layers)
    return layers


DOORS = {
    "module": as_module,
    "fuse": as_fused,
    "backend": lambda layers: torch.compile(layers, backend="normfuse"),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("channels, groups", [(32, 4), (40, 4)])
def test_huge_products(channels, groups, door):
    layers = Layers(channels, groups)
    norm = layers[1]
    x, _, _, gradient = matrices(HUGE["least"], channels, groups, torch.float32)
    function = DOORS[door](copy.deepcopy(layers))
    expected = in_float64(groups, 1e-5, x, norm.weight.detach(), norm.bias.detach(), gradient)
    for result, truth in zip(differentiated(function, x, gradient), expected[:2], strict=True):
        torch.testing.assert_close(result.double(), truth, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("channels, groups", GROUPINGS[:3])
def test_huge_rows_of_a_minimum(channels, groups):
    x, weight, bias, _ = matrices(HUGE["least"], channels, groups, torch.float32)
    arguments = [x, torch.eye(channels), weight, bias]
    own = differentiated(
        lambda x, matrix, *affine: ops.linear_group_norm_min(x, matrix, None, groups, *affine),
        *arguments,
        torch.ones(ROWS, 1),
    )
    expected = exact(x, groups, weight, bias, 1e-5).min(1, keepdim=True)[0]
    torch.testing.assert_close(own[0].double(), expected, rtol=1e-5, atol=1e-5)
    assert all(each.isfinite().all() for each in (own[1], *own[3:]))  # the matrix's is the row times 316


#: Rows without an eps: finite where float32 has their variance, if only as a subnormal number.
SUBNORMAL = {"1e-19": 1e-19, "1e-20": 1e-20, "3e-22": 3e-22}


@pytest.mark.parametrize("channels, groups", [*GROUPINGS[:3], *WIDE])
@pytest.mark.parametrize("name", SUBNORMAL)
def test_subnormal_variance(name, channels, groups):
    arguments = matrices(lambda width, _: drawn(width) * SUBNORMAL[name], channels, groups, torch.float32)
    results = differentiated(lambda x, *affine: ops.group_norm(x, groups, *affine, eps=0.0), *arguments)
    expected = in_float64(groups, 0.0, *arguments)
    for result, truth in zip(results, expected, strict=True):
        # Subnormal squares have few digits, in PyTorch too.
        torch.testing.assert_close(result.double(), truth, rtol=1e-1, atol=float(5e-2 * truth.abs().max()))


@pytest.mark.parametrize("channels, groups", [*GROUPINGS[:3], *WIDE])
@pytest.mark.parametrize("size", [1e-23, 1e-30])
def test_no_variance(size, channels, groups):
    """Values that differ are infinite, of the sign of their distance to the mean; ones equal to it NaN."""
    members = channels // groups
    x, weight, bias, _ = matrices(lambda width, _: drawn(width) * size, channels, groups, torch.float32)
    output = ops.group_norm(x, groups, weight, bias, eps=0.0)
    signs = (x[1, :members] - x[1, :members].double().mean()).sign() * weight[:members].sign()
    assert torch.equal(output[1, :members], (signs * math.inf).float())
    assert output[[0, 2]].isfinite().all() and output[1, members:].isfinite().all()
    for value in (0.0, 2.0, 0.1, -torch.finfo(torch.float32).max):
        x[1, :members] = value
        results = differentiated(
            lambda x, *affine: ops.group_norm(x, groups, *affine, eps=0.0), x, weight, bias, torch.ones(ROWS, channels)
        )
        assert results[0][1, :members].isnan().all() and results[1][1, :members].isnan().all()
        for each in results[:2]:
            assert each[[0, 2]].isfinite().all() and each[1, members:].isfinite().all()
        assert results[2][members:].isfinite().all() and results[3].isfinite().all()


@pytest.mark.parametrize(
    "shape, groups",
    [((2, 4), 1), ((2, 96), 1), ((2, 512), 1), ((2, 9000), 1), ((2, 6, 5, 7), 3), ((2, 8, 33, 65), 2)],
    ids=lambda shape: "x".join(map(str, shape)) if isinstance(shape, tuple) else "",
)
@pytest.mark.parametrize("value", [1.3e-38, 1e-36, 1e-33, 0.1, 2.0])
def test_equal_values_whose_mean_is_rounded(value, shape, groups):
    """As docs/special_values.md has it: a group is all NaN; or of one infinity, if tiny; or finite, if merged."""
    output = ops.group_norm(torch.full(shape, value), groups, eps=0.0).reshape(2 * groups, -1)
    is_merged = len(shape) > 2 or shape[1] > 8192
    for row in output:
        finite = row.isfinite().all()
        infinite = row.isinf().all() and (row == row[0]).all()
        assert row.isnan().all() or (infinite and value < 1e-34) or (finite and is_merged)


@pytest.mark.parametrize("differentiates", [False, True])
@pytest.mark.parametrize("groups, group_size", [(6, 4), (5, 8), (513, 4)])
def test_minimum_without_eps(groups, group_size, differentiates):
    """The zeros past the last column, which have no variance, are no part of the minimum."""
    for without in ((), ("norm_weight",), ("norm_bias",), ("linear_bias", "norm_weight", "norm_bias")):
        arguments = make_arguments(L75, Problem(5, 16, groups, group_size), torch.float32)
        arguments |= {"eps": 0.0, **dict.fromkeys(without)}
        arguments["weight"].requires_grad_(differentiates)
        expected = L75.plain(**arguments)
        torch.testing.assert_close(L75.function(**arguments), expected, rtol=1e-4, atol=1e-4)
