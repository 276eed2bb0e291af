"""Promise: on a GPU, at real sizes, everything that the interpreter's tests promise at small ones.

Every test runs with uninitialised memory filled with NaN (integers: their largest value), so that whatever a kernel
leaves out, or reads before it is written, shows. `pytest -m gpu -k small` launches each kernel at sizes that
compute-sanitizer gets through:

    compute-sanitizer --tool memcheck python -m pytest -m gpu -k small

The convolutions of images are tested in ``tests/test_gpu_images.py`` and ``test_gpu_convolutions.py``.
"""

import dataclasses
import math

import pytest
import torch

import ops
from tests import gpu
from tests.accuracy import check, check_inference, draw_grad_output, run
from tests.chains import (
    BIAS_HARDTANH_MISH,
    CHAINS,
    DTYPES,
    GELU_GROUP_NORM,
    GROUP_NORM,
    GROUP_NORM_HARDTANH,
    L19,
    L30,
    L75,
    L94,
    LAYOUTS,
    LINEAR,
    LINEAR_CHAINS,
    NORMS,
    Problem,
    chain_id,
    tensors_of,
    with_layout,
)
from tests.gpu import DEVICE, arguments_of, assert_same_bits
from triton_kernels import row_minimum_order

pytestmark = [*gpu.MARKS, pytest.mark.usefixtures("poisoned_memory")]

#: x [1024, 8192], weight [8192, 8192]; the blocks are measured with the groups of the chains that they are taken from.
TARGETS = {
    L94: Problem(1024, 8192, 256, 32),
    L75: Problem(1024, 8192, 512, 16),
    L30: Problem(1024, 8192, 16, 512),
    LINEAR: Problem(1024, 8192, 8192, 1),
    BIAS_HARDTANH_MISH: Problem(1024, 8192, 8192, 1),
    GROUP_NORM: Problem(1024, 8192, 256, 32),
    GROUP_NORM_HARDTANH: Problem(1024, 8192, 16, 512),
    GELU_GROUP_NORM: Problem(1024, 8192, 256, 32),
}
TARGET_BOUNDS = {L94: (-1.0, 1.0), BIAS_HARDTANH_MISH: (-1.0, 1.0), L30: (-2.0, 2.0), GROUP_NORM_HARDTANH: (-2.0, 2.0)}
#: Rows are long here: where fewer than this share of the samples is free of elements near a jump, jumps are compared.
FEWEST_SAFE = 1 / 8

by_chain = pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
by_linear_chain = pytest.mark.parametrize("chain", LINEAR_CHAINS, ids=chain_id)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
without_float16 = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=chain_id)


def target_arguments(chain, dtype, **options):
    arguments = arguments_of(chain, TARGETS[chain], dtype, **options)
    if chain in TARGET_BOUNDS and not options:
        arguments["min_val"], arguments["max_val"] = TARGET_BOUNDS[chain]
    return arguments


def fair_grad_output(chain, arguments):
    """A gradient that reaches most samples: those without an element near a jump or, if they are few, all of them.

    A row's minimum is one jump a row, which moves all of its gradient: there the clear rows are compared, however few
    (sums that nothing cancels leave none at all in bfloat16; then the result alone is compared).
    """
    grad_output = draw_grad_output(chain, arguments)
    if chain is L75 or (grad_output != 0).float().mean() >= FEWEST_SAFE:
        return grad_output
    return draw_grad_output(chain, arguments, unsafe="keep")


def check_training(chain, arguments, **options):
    check(chain, arguments, fair_grad_output(chain, arguments), **options)


# Small sizes: each kernel, each way to load and store, for compute-sanitizer and as a quick look.


@by_dtype
@by_chain
def test_small_aligned(chain, dtype):
    """Descriptors load and store; groups lie within a tile."""
    check(chain, arguments_of(chain, Problem(rows=40, depth=48, groups=6, group_size=16), dtype))


@without_float16
@by_linear_chain
def test_small_unaligned(chain, dtype):
    """Pointers load and store; no size is a multiple of anything."""
    check(chain, arguments_of(chain, Problem(rows=35, depth=21, groups=3, group_size=1), dtype))
    check(chain, arguments_of(chain, Problem(rows=35, depth=21, groups=5, group_size=10), dtype))


@pytest.mark.parametrize("chain", [L94, L75, LINEAR], ids=chain_id)
def test_small_transposed(chain):
    """Descriptors of operands that are stored depth first."""
    arguments = arguments_of(chain, Problem(rows=40, depth=48, groups=6, group_size=16), torch.bfloat16)
    arguments["input"] = with_layout(arguments["input"], "transposed")
    arguments["weight"] = with_layout(arguments["weight"], "transposed")
    check(chain, arguments)


@by_dtype
@pytest.mark.parametrize("chain", NORMS, ids=chain_id)
def test_small_pixels(chain, dtype):
    """Partial statistics and their merge."""
    check(chain, arguments_of(chain, Problem(rows=5, depth=1, groups=3, group_size=4, pixels=(5, 3)), dtype))
    check(chain, arguments_of(chain, Problem(rows=2, depth=1, groups=1, group_size=3, pixels=(41, 37)), dtype))


@by_linear_chain
def test_small_inference(chain):
    check_inference(chain, arguments_of(chain, Problem(rows=40, depth=48, groups=6, group_size=16), torch.bfloat16))


# Real sizes.


@pytest.mark.parametrize(
    "dtype, precision",
    [(torch.bfloat16, "highest"), (torch.float16, "highest"), (torch.float32, "highest"), (torch.float32, "high")],
    ids=["bfloat16", "float16", "float32", "float32-high"],
)
@by_chain
def test_target_size(chain, dtype, precision):
    torch.set_float32_matmul_precision(precision)
    arguments = target_arguments(chain, dtype)
    check_training(chain, arguments)
    check_inference(chain, arguments)


@pytest.mark.parametrize("kind", ["wide", "spike", "positive"])
@by_dtype
@by_linear_chain
def test_kinds_of_data_at_target_size(chain, dtype, kind):
    """Elements spread over 2**-23...2**23, one huge element a row, and sums that nothing cancels.

    Where a few elements are huge, so are a few errors, and which ones meet is chance: the worst of PyTorch's in a row
    says nothing of another's (of 7e7 elements, ten were beyond the bound for single ones, one by 4.2).
    """
    check_training(chain, target_arguments(chain, dtype, kind=kind), by_element=kind != "spike")


@pytest.mark.parametrize("kind", ["wide", "positive"])
@by_linear_chain
def test_kinds_of_data_as_tf32(chain, kind):
    torch.set_float32_matmul_precision("high")
    check_training(chain, target_arguments(chain, torch.float32, kind=kind))


@without_float16
@by_linear_chain
def test_one_row(chain, dtype):
    problem = dataclasses.replace(TARGETS[chain], rows=1)
    for seed in range(8):  # the first whose row has a clear minimum, if that is the chain
        arguments = arguments_of(chain, problem, dtype, seed=seed)
        if chain.has_bounds:  # of one row's jumps too few would be compared for their number to even out
            arguments["min_val"], arguments["max_val"] = -100.0, 100.0
        if draw_grad_output(chain, arguments).any():
            break
    check(chain, arguments, draw_grad_output(chain, arguments, unsafe="refuse"))
    check_inference(chain, arguments)


@pytest.mark.parametrize("rows", [8, 16, 64])
@pytest.mark.parametrize("chain, group_size", [(L94, 32), (L75, 16), (L30, 512)], ids=["L94", "L75", "L30"])
def test_few_rows_in_float32(chain, group_size, rows):
    """The library is most accurate where it adds a product up in several parts; ours must not be off in one direction,
    which the norm forgives a whole row of, but no gradient."""
    check_training(chain, arguments_of(chain, Problem(rows, 2048, 2048 // group_size, group_size), torch.float32))


@without_float16
@pytest.mark.parametrize(
    "chain, groups, group_size", [(L94, 255, 32), (L75, 510, 16), (L30, 16, 510)], ids=["L94", "L75", "L30"]
)
def test_sizes_that_fill_no_tile(chain, groups, group_size, dtype):
    check_training(chain, arguments_of(chain, Problem(1000, 8184, groups, group_size), dtype))


@without_float16
@pytest.mark.parametrize(
    "chain, groups, group_size", [(L94, 64, 32), (L75, 128, 16), (L30, 8, 256)], ids=["L94", "L75", "L30"]
)
def test_odd_depth(chain, groups, group_size, dtype):
    """Rows of 77 elements begin at no multiple of 16 bytes: no descriptor takes them."""
    arguments = arguments_of(chain, Problem(500, 77, groups, group_size), dtype)
    check_training(chain, arguments)
    check_inference(chain, arguments)


@pytest.mark.parametrize(
    "group_size, dtype", [(10, torch.bfloat16), (48, torch.float32), (960, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("chain", [*LINEAR_CHAINS, GROUP_NORM], ids=chain_id)
def test_groups_that_no_tile_holds(chain, group_size, dtype):
    check_training(chain, arguments_of(chain, Problem(2000, 256, 960 // group_size, group_size), dtype))


@by_linear_chain
def test_group_wider_than_registers(chain):
    check_training(chain, arguments_of(chain, Problem(200, 64, 1, 8200), torch.bfloat16))


@by_dtype
@pytest.mark.parametrize(
    "problem",
    [
        Problem(32, 1, 8, 8, pixels=(56, 56)),
        Problem(64, 1, 2, 10000),
        Problem(600, 1, 3, 1, pixels=(7, 5, 3)),
        Problem(2, 1, 1, 24, pixels=(301, 299)),
    ],
    ids=["32x64x56x56", "64x20000", "600x3x7x5x3", "2x24x301x299"],
)
@pytest.mark.parametrize("chain", NORMS, ids=chain_id)
def test_group_norm_of_images(chain, problem, dtype):
    check_training(chain, arguments_of(chain, problem, dtype))


def test_group_of_more_blocks_than_y_takes():
    """65536 blocks of 4096 values, and a last one that is not full."""
    input = torch.randn(1, 1, 2**28 + 999, device=DEVICE, dtype=torch.bfloat16).add_(3.0)
    output = ops.group_norm(input, 1)
    std, mean = torch.std_mean(output[0, 0], correction=0)
    assert mean.abs() < 1e-2 and (std - 1).abs() < 1e-2 and output[0, 0, -1].isfinite()


def test_many_rows_of_minima():
    """More rows than are ranked by counting: they are sorted."""
    rows = row_minimum_order._MOST_RANKED_ROWS + 100
    check_training(L75, arguments_of(L75, Problem(rows, 64, 32, 16), torch.bfloat16))
    column = torch.randint(0, 512, (rows,), device=DEVICE, dtype=torch.int32)
    gradient = torch.zeros(1, rows, device=DEVICE)
    _, order, offsets = row_minimum_order.sums_and_order(gradient, column, 32, 16, None)
    groups = (column // 16).long()
    assert torch.equal(order.long(), groups.argsort(stable=True))
    assert torch.equal(offsets[1:].long(), groups.bincount(minlength=32).cumsum(0))


@pytest.mark.parametrize("chain", [L94, L75], ids=chain_id)
def test_more_elements_than_int32_counts(chain):
    """The last rows of a result of 2**31 elements and some are those of the same rows alone."""
    rows, last = 2**18 + 3, 40
    alone = arguments_of(chain, Problem(last, 16, 256, 32), torch.bfloat16)
    grad_output = draw_grad_output(chain, alone, unsafe="keep")
    expected = run(chain.function, alone, grad_output)
    input = torch.randn(rows, 16, device=DEVICE).to(torch.bfloat16)
    input[-last:] = alone["input"]
    leaf = input.requires_grad_()
    output = chain.function(**{**alone, "input": leaf})
    sample_dim = 2 if chain is L75 else 0
    torch.testing.assert_close(output.narrow(sample_dim, rows - last, last), expected["output"])
    full_grad_output = torch.zeros_like(output)
    full_grad_output.narrow(sample_dim, rows - last, last).copy_(grad_output)
    (gradient,) = torch.autograd.grad(output, leaf, full_grad_output)
    torch.testing.assert_close(gradient[-last:], expected["input"])
    assert not gradient[:-last].any()


# How arguments lie in memory, and where and how often a call runs.


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize(
    "chain, dtype",
    [(L94, torch.bfloat16), (L75, torch.bfloat16), (L30, torch.float32), (LINEAR, torch.float32)]
    + [(chain, torch.bfloat16) for chain in (BIAS_HARDTANH_MISH, GROUP_NORM_HARDTANH)],
    ids=chain_id,
)
def test_layouts(chain, dtype, layout):
    """Of the input, the weight (not all of its rows alike) and the gradient."""
    groups = 600 if chain in (LINEAR, BIAS_HARDTANH_MISH) else 20
    arguments = arguments_of(chain, Problem(2200, 264, groups, 640 // groups), dtype)
    arguments["input"] = with_layout(arguments["input"], layout)
    if layout != "expanded" and chain.is_linear:
        arguments["weight"] = with_layout(arguments["weight"], layout)
    check(chain, arguments, with_layout(fair_grad_output(chain, arguments), layout))


@by_dtype
@by_chain
def test_repeats_are_equal_bit_by_bit(chain, dtype):
    """On clean memory and on poisoned memory."""
    arguments = target_arguments(chain, dtype)
    grad_output = draw_grad_output(chain, arguments, unsafe="keep")
    poisoned = run(chain.function, arguments, grad_output)
    torch.use_deterministic_algorithms(False)
    for _ in range(2):
        assert_same_bits(run(chain.function, arguments, grad_output), poisoned)


@pytest.mark.parametrize("chain", [*CHAINS, L19], ids=chain_id)
def test_another_stream(chain):
    """The arguments come late on a stream of their own: a kernel on any other stream would read NaN."""
    problem = Problem(20, 64, 8, 8, pixels=(31, 33)) if chain is L19 else Problem(700, 256, 32, 16)
    arguments = arguments_of(chain, problem, torch.bfloat16 if chain is L19 else torch.float32)
    grad_output = draw_grad_output(chain, arguments)
    expected = run(chain.function, arguments, grad_output)
    late = {name: torch.full_like(tensor, math.nan) for name, tensor in tensors_of(arguments).items()}
    late_grad_output = torch.full_like(grad_output, math.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
        for name, tensor in late.items():
            tensor.copy_(arguments[name])
        late_grad_output.copy_(grad_output)
        results = run(chain.function, {**arguments, **late}, late_grad_output)
        torch.cuda.current_stream().synchronize()
    assert_same_bits(results, expected)


@pytest.mark.parametrize("chain", [*LINEAR_CHAINS, L19], ids=chain_id)
def test_compiled_as_one_graph(chain):
    arguments = arguments_of(chain, Problem(64, 48, 6, 16), torch.bfloat16)
    grad_output = draw_grad_output(chain, arguments)
    expected = run(chain.function, arguments, grad_output)
    torch.use_deterministic_algorithms(False)  # it is no concern of the compiler's
    torch.compiler.reset()
    assert_same_bits(run(torch.compile(chain.function, fullgraph=True), arguments, grad_output), expected)


@pytest.mark.parametrize("chain", [*LINEAR_CHAINS, LINEAR], ids=chain_id)
def test_autocast(chain):
    """float32 parameters and data under bfloat16 autocast: the result is bfloat16, the gradients are float32.

    PyTorch's autocast leaves the norms' results in float32; rounded to bfloat16, they are what ours is held against.
    """

    def plain(**arguments):
        output = chain.plain(**arguments)
        return output if output.dtype == torch.float64 else output.to(torch.bfloat16)

    arguments = arguments_of(chain, Problem(2000, 256, 32, 32), torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        grad_output = fair_grad_output(chain, arguments).to(torch.bfloat16)
        check(dataclasses.replace(chain, plain=plain), arguments, grad_output)


@by_linear_chain
def test_module_trains(chain):
    """A step of the module, in place of the plain one: its loss falls."""
    torch.manual_seed(0)
    if chain is L94:
        module = ops.LinearHardtanhMishGroupNorm(256, 512, (512,), 16)
    elif chain is L75:
        module = ops.LinearGroupNormMin(256, 512, 32, (1, 512, 1, 1))
    else:
        module = ops.LinearGroupNormHardtanh(256, 512, 16, -2.0, 2.0)
    module = module.to(DEVICE)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    input = torch.randn(300, 256, device=DEVICE)
    target = torch.randn_like(module(input))
    losses = []
    for _ in range(5):
        loss = (module(input) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
