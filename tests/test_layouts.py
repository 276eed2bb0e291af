"""Promise: strided, transposed, misaligned and expanded tensors work, as arguments and as incoming gradients."""

import pytest
import torch

from tests.accuracy import check, draw_grad_output, run
from tests.chains import (
    BIAS_HARDTANH_MISH,
    CHAINS,
    L30,
    L75,
    L94,
    LAYOUTS,
    LINEAR,
    NORMS,
    Problem,
    chain_id,
    make_arguments,
    with_layout,
)

by_chain = pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
by_layout = pytest.mark.parametrize("layout", LAYOUTS)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=chain_id)

#: K and N are multiples of 8, so that tensor descriptors take the contiguous operands and the layouts decide.
PROBLEM = Problem(rows=24, depth=40, groups=4, group_size=16)


@by_dtype
@by_layout
@by_chain
def test_input(chain, layout, dtype):
    arguments = make_arguments(chain, PROBLEM, dtype, kind="exact" if dtype == torch.bfloat16 else "normal")
    arguments["input"] = with_layout(arguments["input"], layout)
    check(chain, arguments)


@by_dtype
@by_layout
@pytest.mark.parametrize("chain", [L94, L75, L30, LINEAR], ids=chain_id)
def test_weight(chain, layout, dtype):
    arguments = make_arguments(chain, PROBLEM, dtype)
    arguments["weight"] = with_layout(arguments["weight"], layout)
    if layout == "expanded" and chain in (L94, L75, L30):
        # All columns are then alike but for the biases; without spread among them there is nothing to normalise.
        arguments["linear_bias"] = arguments["linear_bias"] * 4
    check(chain, arguments)


@by_layout
@by_chain
def test_vectors(chain, layout):
    arguments = make_arguments(chain, PROBLEM, torch.float32)
    for name in chain.vectors:
        vector = arguments[name]
        matrix = vector.view(1, -1) if layout == "padded" else vector.view(-1, 1) if layout == "transposed" else vector
        if layout == "expanded":
            # One number for all channels; different for each vector.
            arguments[name] = vector.flatten()[:1].expand(vector.numel()).view(vector.shape)
        elif layout == "strided":
            arguments[name] = torch.stack([vector.flatten()] * 2, dim=1)[:, 0].view(vector.shape)
        else:
            arguments[name] = with_layout(matrix, layout).reshape(vector.shape)
    check(chain, arguments)


@by_layout
@by_chain
def test_grad_output(chain, layout):
    arguments = make_arguments(chain, PROBLEM, torch.float32)
    grad_output = draw_grad_output(chain, arguments, unsafe="refuse")
    if chain is L75 and layout in ("transposed", "strided", "padded"):
        # (1, C, M, 1): the sizes that count are in the middle.
        grad_output = with_layout(grad_output[0, :, :, 0], layout)[None, :, :, None]
    else:
        grad_output = with_layout(grad_output, layout)
    check(chain, arguments, grad_output)


@by_chain
def test_scalar_grad_output(chain):
    """What ``output.sum().backward()`` sends: one number at stride 0 throughout."""
    arguments = make_arguments(chain, PROBLEM, torch.float32, seed=3)
    output = chain.plain(**arguments)
    draw_grad_output(chain, arguments, unsafe="refuse")
    check(chain, arguments, torch.full((), 0.75).expand(output.shape))


@pytest.mark.parametrize("chain", NORMS, ids=chain_id)
def test_channels_last(chain):
    problem = Problem(rows=3, depth=1, groups=2, group_size=4, pixels=(5, 6))
    arguments = make_arguments(chain, problem, torch.float32)
    arguments["input"] = arguments["input"].to(memory_format=torch.channels_last)
    grad_output = draw_grad_output(chain, arguments).to(memory_format=torch.channels_last)
    check(chain, arguments, grad_output)


@pytest.mark.parametrize("chain", NORMS, ids=chain_id)
def test_strides_of_the_result(chain):
    """Those of the input, if that is dense, as element-wise operations' results have; and the gradient's are too."""
    arguments = make_arguments(chain, Problem(3, 1, 2, 4, pixels=(4, 5, 2)), torch.float32)
    input, expected = arguments["input"], chain.function(**arguments)
    for order in ((0, 1, 2, 3, 4), (0, 2, 3, 4, 1), (4, 1, 0, 3, 2), (1, 0, 4, 2, 3)):
        arguments["input"] = input.permute(order).contiguous().permute([order.index(axis) for axis in range(5)])
        results = run(chain.function, arguments, torch.randn(input.shape))
        assert results["output"].stride() == results["input"].stride() == arguments["input"].stride()
        torch.testing.assert_close(results["output"], expected, rtol=1e-6, atol=1e-6)  # sums in another order


@pytest.mark.parametrize("chain", [L94, L30, LINEAR, BIAS_HARDTANH_MISH], ids=chain_id)
def test_permuted_leading_dimensions(chain):
    """(batch, sequence, features) out of (sequence, batch, features): no view of it is a matrix."""
    arguments = make_arguments(chain, PROBLEM, torch.float32)
    arguments["input"] = arguments["input"].view(4, 6, -1).transpose(0, 1)
    check(chain, arguments)


@by_chain
def test_layout_does_not_change_arguments(chain):
    """No kernel writes into what it was given."""
    arguments = make_arguments(chain, PROBLEM, torch.float16)
    before = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    grad_output = draw_grad_output(chain, arguments)
    gradient_before = grad_output.clone()
    run(chain.function, arguments, grad_output)
    assert torch.equal(grad_output, gradient_before)
    for name, value in before.items():
        assert torch.equal(arguments[name], value) if isinstance(value, torch.Tensor) else True, name


@pytest.mark.parametrize("chain", [L94, L75, L30, LINEAR], ids=chain_id)
def test_overlapping_rows(chain):
    """A sliding window: rows share memory, as unfold makes them."""
    arguments = make_arguments(chain, PROBLEM, torch.float32)
    arguments["input"] = torch.randn(PROBLEM.rows + PROBLEM.depth - 1).unfold(0, PROBLEM.depth, 1)
    check(chain, arguments)
