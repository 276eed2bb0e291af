"""Arguments that PyTorch takes are taken: sizes in a tuple of one, layers without inputs, groups of one value."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ops
from ops import pointwise as p

ONE = pytest.mark.parametrize("one", [lambda value: (value,), lambda value: [value]], ids=["tuple", "list"])
SIZES = {"stride": 2, "padding": 1, "dilation": 2}


@ONE
@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_one_number(name, one):
    x, weight, transposed = torch.randn(2, 4, 9, 8), torch.randn(8, 4, 3, 3), torch.randn(4, 8, 3, 3)
    size, written = {name: SIZES[name]}, {name: one(SIZES[name])}
    for function, kernel, plain in (
        (ops.conv2d_group_norm, weight, F.conv2d),
        (ops.conv_transpose2d_group_norm, transposed, F.conv_transpose2d),
    ):
        for _ in range(2):  # by what was prepared, too
            found = function(x, kernel, None, 2, **written)
            torch.testing.assert_close(found, F.group_norm(plain(x, kernel, **written), 2), rtol=1e-4, atol=1e-4)
            assert torch.equal(found, function(x, kernel, None, 2, **size))
    found = ops.conv_transpose2d_gelu_group_norm(x, transposed, None, 2, **written)
    assert torch.equal(found, ops.conv_transpose2d_gelu_group_norm(x, transposed, None, 2, **size))


def test_sizes_in_tensors_are_refused():
    """PyTorch's functions take a tensor of one integer, and wait for it where it is on a GPU."""
    x, weight = torch.randn(2, 4, 9, 8), torch.randn(8, 4, 3, 3)
    assert ops.conv2d_group_norm(x, weight, None, 2, stride=torch.Size([2])).shape == (2, 8, 4, 3)
    for tensors in (torch.tensor(2), torch.tensor([2, 2]), (torch.tensor(2), 2)):
        with pytest.raises(TypeError, match="stride must be an int, got Tensor"):
            ops.conv2d_group_norm(x, weight, None, 2, stride=tensors)


@ONE
def test_an_output_padding_of_one_number(one):
    x, weight = torch.randn(2, 4, 5, 6), torch.randn(4, 8, 3, 3)
    found = ops.conv_transpose2d_group_norm(x, weight, None, 2, stride=one(2), output_padding=one(1))
    assert torch.equal(found, ops.conv_transpose2d_group_norm(x, weight, None, 2, stride=2, output_padding=1))


@ONE
def test_words_of_padding_with_sizes_of_one_number(one):
    x, weight = torch.randn(2, 4, 5, 6), torch.randn(8, 4, 3, 3)
    found = ops.conv2d_group_norm(x, weight, None, 2, stride=one(1), padding="same", dilation=one(2))
    assert torch.equal(found, ops.conv2d_group_norm(x, weight, None, 2, padding="same", dilation=2))


@ONE
def test_modules_with_sizes_of_one_number(one):
    """A kernel's size is none: PyTorch's module makes a weight of three dimensions of that, and fails."""
    torch.manual_seed(0)
    layer = ops.Conv2dGroupNorm(4, 8, 3, 2, stride=one(2), padding=one(1), dilation=one(1))
    torch.manual_seed(0)
    other = ops.Conv2dGroupNorm(4, 8, 3, 2, stride=2, padding=1)
    x = torch.randn(2, 4, 5, 6)
    assert torch.equal(layer(x), other(x))
    with pytest.raises(ValueError, match="kernel_size must be an int or a pair of ints"):
        ops.Conv2dGroupNorm(4, 8, one(3), 2)


def test_compiled_with_sizes_of_one_number(fresh_compiler):
    x, weight = torch.randn(2, 4, 5, 6), torch.randn(8, 4, 3, 3)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x, weight):
        return ops.conv2d_group_norm(x, weight, None, 2, stride=(2,), padding=[1])

    assert torch.equal(compiled(x, weight), ops.conv2d_group_norm(x, weight, None, 2, stride=2, padding=1))


WITHOUT_INPUTS = {
    "linear": lambda of, x, w, b: of.linear(x, w, b, after=(p.silu(),)),
    "linear alone": lambda of, x, w, b: of.linear(x, w, b),
    "group norm": lambda of, x, w, b: of.linear_group_norm(x, w, b, 2, before=(p.mish(),)),
    "layer norm": lambda of, x, w, b: of.linear_layer_norm(x, w, b),
    "L94": lambda of, x, w, b: of.linear_hardtanh_mish_group_norm(x, w, b, b, 2),
    "L75": lambda of, x, w, b: of.linear_group_norm_min(x, w, b, 2),
    "L30": lambda of, x, w, b: of.linear_group_norm_hardtanh(x, w, b, 2),
}


@pytest.mark.parametrize("batch", [3, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("call", WITHOUT_INPUTS.values(), ids=WITHOUT_INPUTS)
def test_a_linear_layer_without_inputs(call, dtype, batch):
    """Its result is its bias, forward and backward."""
    given = [torch.randn(*shape, dtype=dtype) for shape in ((batch, 0), (8, 0), (8,))]
    found, expected = ([each.clone().requires_grad_() for each in given] for _ in range(2))
    result, reference = call(ops, *found), call(ops.reference, *expected)
    torch.testing.assert_close(result, reference)
    for each in (result, reference):
        (each.float() * 0.5).sum().backward()
    for leaf, other in zip(found, expected, strict=True):
        torch.testing.assert_close(leaf.grad, other.grad)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_modules_without_inputs():
    x = torch.randn(3, 0)
    for module in (
        ops.Linear(0, 8, after=(p.silu(),)),
        ops.LinearGroupNorm(0, 8, 2),
        ops.LinearLayerNorm(0, 8),
        ops.LinearGroupNormHardtanh(0, 8, 2, -1.0, 1.0),
        ops.LinearGroupNormMin(0, 8, 2, (1, 8, 1, 1)),
        ops.LinearHardtanhMishGroupNorm(0, 8, (8,), 2),
    ):
        assert module(x).isfinite().all() and module(x).numel() == 24
    with pytest.raises(ValueError, match="in_features must be at least 0, got -1"):
        ops.LinearGroupNorm(-1, 8, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_groups_of_one_value(dtype):
    """A batch of one gives what the same sample gives within a larger one. PyTorch raises an error for it."""
    x, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((2, 6), (6,), (6,)))
    larger = ops.group_norm(x, 6, weight, bias)
    torch.testing.assert_close(larger, F.group_norm(x, 6, weight, bias), rtol=1e-2, atol=1e-4)
    alone = ops.group_norm(x[:1], 6, weight, bias)
    torch.testing.assert_close(alone[0], bias, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(alone, larger[:1], rtol=1e-12, atol=1e-12)
    assert ops.GroupNorm(6, 6, dtype=dtype)(x[:1]).abs().max() < 1e-12
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        nn.GroupNorm(6, 6, dtype=dtype)(x[:1])


OF_ONE_VALUE = {
    "linear_group_norm": lambda x, norm: ops.linear_group_norm(x[:, :, 0, 0], torch.randn(6, 4), None, 6, *norm),
    "conv2d_group_norm": lambda x, norm: ops.conv2d_group_norm(x, torch.randn(6, 4, 3, 3), None, 6, *norm),
    "conv_transpose2d_group_norm": lambda x, norm: ops.conv_transpose2d_group_norm(
        x[:, :, :1, :1], torch.randn(4, 6, 1, 1), None, 6, *norm
    ),
    "linear_hardtanh_mish_group_norm": lambda x, norm: ops.linear_hardtanh_mish_group_norm(
        x[:, :, 0, 0], torch.randn(6, 4), None, None, 6, *norm
    ),
    "linear_group_norm_hardtanh": lambda x, norm: ops.linear_group_norm_hardtanh(
        x[:, :, 0, 0], torch.randn(6, 4), None, 6, *norm, min_val=-9.0, max_val=9.0
    ),
    "linear_group_norm_min": lambda x, norm: ops.linear_group_norm_min(
        x[:, :, 0, 0], torch.randn(6, 4), None, 6, *norm
    ),
    "conv_transpose2d_gelu_group_norm": lambda x, norm: ops.conv_transpose2d_gelu_group_norm(
        x[:, :, :1, :1], torch.randn(4, 6, 1, 1), None, 6, *norm
    ),
    "group_norm": lambda x, norm: ops.group_norm(torch.randn(len(x), 6), 6, *norm),
}


@pytest.mark.parametrize("name", OF_ONE_VALUE)
def test_groups_of_one_value_behind_a_layer(name):
    """The norm's bias, whatever the batch, as the docstring says."""
    weight, bias = torch.randn(6), torch.randn(6)
    expected = bias.min() if name == "linear_group_norm_min" else bias
    for batch in (1, 2):
        found = OF_ONE_VALUE[name](torch.randn(batch, 4, 3, 3), (weight, bias)).flatten(1)
        torch.testing.assert_close(found, expected.expand(found.shape), rtol=1e-4, atol=1e-4)
    assert "Groups of one value are 0 before ``" in " ".join(getattr(ops, name).__doc__.split())
