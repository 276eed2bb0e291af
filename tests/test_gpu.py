"""Promise: on a GPU, at real sizes, everything that the interpreter's tests promise at small ones.

Every test runs with uninitialised memory filled with NaN (integers: their largest value), so that whatever a kernel
leaves out, or reads before it is written, shows. `pytest -m gpu -k small` launches each kernel at sizes that
compute-sanitizer gets through:

    compute-sanitizer --tool memcheck python -m pytest -m gpu -k small
"""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

import ops
from ops import direct_convolution, precision
from ops.convolution import check_conv_transpose2d
from tests.accuracy import FACTOR, check, draw_grad_output, run
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
    doubled,
    make_arguments,
    tensors_of,
    with_layout,
)
from triton_kernels import convolution, convolution_hopper, row_minimum_backward, weight_gradient_hopper
from triton_kernels.convolution import ConvolutionConfig, StrideOneConvolution
from triton_kernels.hopper import runs_hopper_kernels
from triton_kernels.image_group_norm import PartialStatistics
from triton_kernels.pointwise import FLOAT16_GELU, GELU
from triton_kernels.tf32 import round_to_tf32
from triton_kernels.weight_gradient_hopper import WeightGradientConfig

DEVICE = "cuda"
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

FORMATS = (torch.contiguous_format, torch.channels_last)
#: L19's problems and the rest of their geometry: 64 channels are a block of Hopper's kernels, and 3 x 3 the target's
#: taps; 37 channels are no multiple of 16 bytes, and strides and groups are the library's. Of float32 images in
#: contiguous format, only "64-64-3x3" and those of its size are so many pixels and channels that PyTorch takes TF32.
CONVOLUTIONS = {
    "64-64-3x3": (Problem(4, 64, 8, 8, pixels=(64, 72)), {}),
    "40-72-2x3-padding": (Problem(4, 40, 9, 8, pixels=(40, 56), kernel=(2, 3)), {"padding": (1, 2)}),
    "128-64-1x1": (Problem(4, 128, 8, 8, pixels=(33, 40), kernel=(1, 1)), {"approximate": "tanh"}),
    "dilation": (Problem(4, 64, 8, 8, pixels=(37, 48)), {"dilation": 2}),
    "odd-size": (Problem(5, 64, 4, 16, pixels=(61, 47)), {}),
    "odd-channels": (Problem(4, 37, 4, 11, pixels=(29, 31)), {"padding": 1}),
    "64-64-1x1": (Problem(4, 64, 8, 8, pixels=(64, 72), kernel=(1, 1)), {}),
    "wide-taps": (Problem(4, 64, 8, 8, pixels=(64, 72), kernel=(1, 5)), {}),
    "5x5": (Problem(4, 64, 8, 8, pixels=(64, 72), kernel=(5, 5)), {"padding": 2}),
    "32-40-4x4": (Problem(3, 32, 4, 10, pixels=(21, 27), kernel=(4, 4)), {"padding": 1}),
    "64-136-2x2": (Problem(2, 64, 8, 17, pixels=(91, 93), kernel=(2, 2)), {}),
    "output-padding": (Problem(4, 64, 8, 8, pixels=(64, 72)), {"dilation": 2, "output_padding": (1, 0)}),
    "stride": (Problem(4, 64, 8, 8, pixels=(24, 31)), {"stride": 2, "padding": 1, "output_padding": (0, 1)}),
    "groups": (Problem(4, 64, 8, 8, pixels=(33, 34), conv_groups=2), {}),
}
#: One image, of fewer pixels than most tiles have.
SMALL_CONVOLUTIONS = {
    "64-64-3x3": (Problem(1, 64, 8, 8, pixels=(9, 11)), {}),
    "40-72-2x3-padding": (Problem(1, 40, 9, 8, pixels=(5, 16), kernel=(2, 3)), {"padding": (1, 2)}),
    "128-64-1x1": (Problem(1, 128, 8, 8, pixels=(3, 2), kernel=(1, 1)), {}),
    "odd-channels": (Problem(1, 3, 1, 5, pixels=(7, 5)), {"dilation": (1, 2)}),
    # Their strides are those of both memory formats, and not what the copy engine takes.
    "single-pixel": (Problem(4, 64, 8, 8, pixels=(1, 1)), {}),
}

by_format = pytest.mark.parametrize("format", FORMATS, ids=str)
by_short_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=chain_id)
by_chain = pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
by_linear_chain = pytest.mark.parametrize("chain", LINEAR_CHAINS, ids=chain_id)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
without_float16 = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=chain_id)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """PyTorch fills what ``torch.empty`` and its like return; only its deterministic mode does so."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


pytestmark = [
    pytest.mark.gpu,
    # cuBLAS's note on its workspace, and operations of the plain chains; ours are deterministic without the mode.
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]


def arguments_of(chain, problem, dtype, **options):
    return make_arguments(chain, problem, dtype, device=DEVICE, **options)


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


def check_training(chain, arguments):
    check(chain, arguments, fair_grad_output(chain, arguments))


def check_inference(chain, arguments):
    """The accuracy rule without gradients: other kernels run, which save nothing."""
    with torch.no_grad():
        ours, theirs = chain.function(**arguments).double(), chain.plain(**arguments).double()
        exact = chain.plain(**doubled(arguments))
    our_error, their_error = (ours - exact).norm(), (theirs - exact).norm()
    assert our_error <= FACTOR * their_error + torch.finfo(torch.float32).eps * exact.norm()


def image_arguments(problem, geometry, dtype, format, **options):
    arguments = {**arguments_of(L19, problem, dtype, **options), **geometry}
    return {**arguments, "input": arguments["input"].to(memory_format=format)}


def check_images(arguments, format):
    """The accuracy rule for L19, with a gradient in either memory format, and the formats of what it returns."""
    for gradient_format in FORMATS:
        grad_output = draw_grad_output(L19, arguments).contiguous(memory_format=gradient_format)
        check(L19, arguments, grad_output)
    check_inference(L19, arguments)
    results = run(L19.function, arguments, grad_output)
    for name in ("output", "input"):
        assert results[name].is_contiguous(memory_format=format), name


def assert_same_bits(results, expected):
    for name in expected:
        assert not results[name].isnan().any(), name
        assert torch.equal(results[name], expected[name]), name


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


@by_dtype
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("geometry", [{}, {"stride": 2, "padding": 1, "approximate": "tanh"}], ids=str)
def test_small_images(geometry, format, dtype):
    """Statistics of several blocks of a group, in both memory formats."""
    arguments = arguments_of(L19, Problem(rows=6, depth=16, groups=4, group_size=8, pixels=(19, 23)), dtype)
    arguments.update(geometry, input=arguments["input"].contiguous(memory_format=format))
    check(L19, arguments)
    check_inference(L19, arguments)
    assert L19.function(**arguments).is_contiguous(memory_format=format)


@by_dtype
@by_format
@pytest.mark.parametrize("name", SMALL_CONVOLUTIONS)
def test_small_convolutions(name, format, dtype):
    check_images(image_arguments(*SMALL_CONVOLUTIONS[name], dtype, format), format)


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
    """Elements spread over 2**-23...2**23, one huge element a row, and sums that nothing cancels."""
    check_training(chain, target_arguments(chain, dtype, kind=kind))


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
    rows = row_minimum_backward._MOST_RANKED_ROWS + 100
    check_training(L75, arguments_of(L75, Problem(rows, 64, 32, 16), torch.bfloat16))
    column = torch.randint(0, 512, (rows,), device=DEVICE, dtype=torch.int32)
    order, offsets = row_minimum_backward.rows_by_group(column, 32, 16)
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


# Convolutions.


@by_dtype
@by_format
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, format, dtype):
    check_images(image_arguments(*CONVOLUTIONS[name], dtype, format), format)


@by_dtype
@by_format
def test_images_of_the_target_size(format, dtype):
    """More than are copied or differentiated at a time."""
    arguments = image_arguments(Problem(20, 64, 8, 8, pixels=(256, 256)), {}, dtype, format)
    check(L19, arguments, draw_grad_output(L19, arguments).contiguous(memory_format=format))


@by_format
@pytest.mark.parametrize("name", ["64-64-3x3", "64-64-1x1"])
def test_float32_images_take_the_kernels_for_hopper(on_hopper, name, format):
    """In either format, where PyTorch allows TF32; at these sizes its own contiguous convolutions are TF32 too."""
    problem, options = CONVOLUTIONS[name]
    input, weight = (image_arguments(problem, {}, torch.float32, format)[each] for each in ("input", "weight"))
    geometry = check_conv_transpose2d(input, weight, 1, 0, 0, 1, 1)
    assert not options and precision.convolutions_allow_tf32()
    assert direct_convolution.takes(input, weight, geometry, True)
    assert not direct_convolution.takes(input, weight, geometry, False)


@by_format
def test_convolutions_in_float32(format):
    """Where PyTorch is set to use no TF32, as in its own convolutions; what is set later changes no gradient."""
    arguments = image_arguments(*CONVOLUTIONS["64-64-3x3"], torch.float32, format)
    grad_output = draw_grad_output(L19, arguments)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        check_images(arguments, format)
        in_float32 = run(L19.function, arguments, grad_output)
    as_tf32 = run(L19.function, arguments, grad_output)
    difference = (as_tf32["output"] - in_float32["output"]).norm() / in_float32["output"].norm()
    assert 1e-5 < difference < 1e-3

    def set_later(**arguments):
        output = L19.function(**arguments)
        torch.backends.cudnn.allow_tf32 = False
        return output

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        results = run(set_later, arguments, grad_output)
    if runs_hopper_kernels(torch.device(DEVICE, torch.cuda.current_device())):
        assert_same_bits(results, as_tf32)


@by_format
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_float32_images_that_are_not_finite(format, value):
    """They show in the same samples, and in the same gradients, as PyTorch's."""
    arguments = image_arguments(*CONVOLUTIONS["64-64-3x3"], torch.float32, format)
    grad_output = draw_grad_output(L19, arguments)
    for name in ("input", "grad_output"):
        changed, incoming = {**arguments, "input": arguments["input"].clone()}, grad_output.clone()
        (changed["input"] if name == "input" else incoming)[1, 2, 3, 4] = value
        ours, theirs = (run(function, changed, incoming) for function in (L19.function, L19.plain))
        for each in theirs:
            assert torch.equal(ours[each].isfinite(), theirs[each].isfinite()), f"{each} for {value} in {name}"


@by_format
def test_more_pixels_than_int32_counts(format):
    """The last images of a batch whose result has more than 2**31 elements are those of the same images alone."""
    batch, last, needed = 520, 3, 60 * 2**30
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed} bytes of free GPU memory, has {torch.cuda.mem_get_info()[0]}")
    alone = image_arguments(Problem(last, 64, 8, 8, pixels=(256, 256)), {}, torch.bfloat16, format)
    check_inference(L19, alone)
    grad_output = draw_grad_output(L19, alone)
    expected = run(L19.function, alone, grad_output)
    shape = (batch, *alone["input"].shape[1:])
    input = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE, memory_format=format).normal_()
    input[-last:] = alone["input"]
    leaf = input.requires_grad_()
    output = L19.function(**{**alone, "input": leaf})
    assert output.numel() > 2**31
    assert torch.equal(output[-last:], expected["output"])
    full_grad_output = torch.zeros_like(output)
    full_grad_output[-last:] = grad_output
    (gradient,) = torch.autograd.grad(output, leaf, full_grad_output)
    assert torch.equal(gradient[-last:], expected["input"])
    assert not gradient[:-last].any()


@pytest.fixture
def on_hopper():
    if not runs_hopper_kernels(torch.device(DEVICE, torch.cuda.current_device())):
        pytest.skip("needs compute capability 9.0 and a Triton with its copies")


def among_others(shape, dtype, format, *, fill=math.nan):
    """Memory for images of this shape between two more, all of them filled; and those between."""
    memory = torch.full((shape[0] + 2, *shape[1:]), fill, dtype=dtype, device=DEVICE)
    memory = memory.contiguous(memory_format=format)
    return memory, memory[1:-1]


def random_images(shape, dtype, generator, format=torch.channels_last):
    """Between images of NaN, which nothing may read."""
    _, images = among_others(shape, dtype, format)
    return images.copy_(torch.randn(shape, generator=generator, device=DEVICE))


def forward_taps(problem, geometry) -> StrideOneConvolution:
    """A transposed convolution as a convolution by its taps in reverse."""
    dilation, padding = geometry.get("dilation", (1, 1)), geometry.get("padding", (0, 0))
    sizes = zip(problem.kernel, dilation, padding, strict=True)
    return StrideOneConvolution(problem.kernel, dilation, tuple(pad - (size - 1) * step for size, step, pad in sizes))


def check_convolution(
    problem, geometry, dtype, out_format, launch, tiles_of, *, bias=True, statistics=True, tf32=False, **options
):
    """The convolution and its partial statistics against float64, with nothing written elsewhere.

    ``launch(input, weight, bias, taps, output=, partials=)`` is what is tested; ``tiles_of(input, output, taps)`` are
    its partial statistics of a sample. The sums are float32's; rounding them is within half an epsilon of each. With
    ``tf32`` float32 operands hold TF32's numbers, of which the products are exact.
    """
    generator = torch.Generator(DEVICE).manual_seed(0)
    input = random_images((problem.rows, problem.depth, *problem.pixels), dtype, generator, **options)
    if tf32:
        input.copy_(round_to_tf32(input))
    shape = (problem.depth, problem.channels, *problem.kernel)
    weight = torch.randn(shape, generator=generator, device=DEVICE) / math.sqrt(problem.depth * math.prod(shape[2:]))
    weight = round_to_tf32(weight) if tf32 else weight.to(dtype)
    vector = torch.randn(problem.channels, generator=generator, device=DEVICE).to(dtype) if bias else None
    exact = F.conv_transpose2d(*(t if t is None else t.double() for t in (input, weight, vector)), **geometry)
    taps = weight.flip(2, 3).permute(2, 3, 1, 0).contiguous()
    memory, output = among_others(exact.shape, dtype, out_format)
    convolved = forward_taps(problem, geometry)
    partials = None
    if statistics:
        tiles = tiles_of(input, output, convolved)
        partials = PartialStatistics.empty(problem.rows, tiles, problem.channels, output.device)
        for each in (partials.counts, partials.means, partials.m2s):
            each.fill_(math.nan)
    launch(input, taps, vector, convolved, output=output, partials=partials)
    rounding = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    torch.testing.assert_close(output.double(), exact, rtol=1.01 * rounding, atol=5e-5)
    assert memory[0].isnan().all() and memory[-1].isnan().all()
    if statistics:
        pixels = exact[0, 0].numel()
        assert torch.equal(partials.counts.sum(1), torch.full_like(partials.counts[:, 0], pixels))
        mean, rstd = partials.merge(problem.groups, pixels, 1e-5).double()
        activated = F.gelu(output.double()).reshape(len(mean), -1)
        torch.testing.assert_close(mean, activated.mean(1), rtol=0, atol=5e-6)
        torch.testing.assert_close(rstd, (activated.var(1, correction=0) + 1e-5).rsqrt(), rtol=2e-5, atol=0)
    return output


def launch_hopper(input, weight, bias, taps, *, output, partials):
    assert convolution_hopper.supports(input, output, taps)
    activation = GELU if input.dtype == torch.float32 else FLOAT16_GELU
    options = {"output": output, "partials": partials, "activation": activation}
    convolution_hopper.convolution_hopper(input, weight, bias, taps, **options)


#: (problem, geometry). Contiguous results go through the copy engine where rows are whole multiples of 16 bytes.
HOPPER_CONVOLUTIONS = {
    "small": (Problem(2, 64, 4, 16, pixels=(6, 14)), {}),
    "small-wide-taps": (Problem(3, 64, 4, 16, pixels=(3, 12), kernel=(1, 5)), {}),
    "3x3": (Problem(3, 64, 4, 16, pixels=(21, 30)), {}),
    "40-72-2x3-padding": (Problem(3, 40, 6, 12, pixels=(21, 40), kernel=(2, 3)), {"padding": (1, 1)}),
    "40-72-3x2-dilation": (Problem(3, 40, 6, 12, pixels=(21, 39), kernel=(3, 2)), {"dilation": (2, 1)}),
    "128-64-1x1": (Problem(3, 128, 4, 16, pixels=(21, 40), kernel=(1, 1)), {}),
    "more-tiles-than-programs": (Problem(5, 64, 4, 16, pixels=(254, 254)), {}),
}


def check_hopper_convolution(problem, geometry, dtype, out_format, **options):
    launcher = launch_hopper, convolution_hopper.partial_count
    return check_convolution(problem, geometry, dtype, out_format, *launcher, tf32=dtype == torch.float32, **options)


@by_dtype
@pytest.mark.parametrize("out_format", FORMATS, ids=str)
@pytest.mark.parametrize("name", HOPPER_CONVOLUTIONS)
def test_convolution_hopper(on_hopper, name, out_format, dtype):
    problem = (*HOPPER_CONVOLUTIONS[name], dtype, out_format)
    output = check_hopper_convolution(*problem)
    assert torch.equal(check_hopper_convolution(*problem), output)
    assert torch.equal(check_hopper_convolution(*problem, statistics=False), output)
    check_hopper_convolution(*problem, bias=False)


@pytest.mark.parametrize("out_format", FORMATS, ids=str)
@pytest.mark.parametrize("pixels", [(21, 25), (7, 5)], ids=["21x25", "small"])
@pytest.mark.parametrize("channels", [64, 44])
def test_convolution_hopper_of_odd_sizes(on_hopper, channels, pixels, out_format):
    """float32 results, which the copy engine does not write, may have any size and any number of channels."""
    problem = Problem(3, 64, 4, channels // 4, pixels=pixels)
    check_hopper_convolution(problem, {}, torch.float32, out_format)


@by_dtype
@pytest.mark.parametrize("out_format", FORMATS, ids=str)
@by_format
@pytest.mark.parametrize("pixels", [(21, 25), (3, 2)], ids=["21x25", "small"])
def test_portable_convolution(pixels, format, out_format, dtype):
    problem = Problem(3, 37, 4, 11, pixels=pixels, kernel=(2, 3))
    config = ConvolutionConfig.fit(problem.depth, problem.channels)

    def launch(*arguments, **options):
        convolution.convolution(*arguments, config, activation=GELU, **options)

    def tiles_of(input, output, taps):
        return config.tiles(output[0, 0].numel())

    geometry = {"padding": (1, 0), "dilation": (1, 2)}
    check_convolution(problem, geometry, dtype, out_format, launch, tiles_of, format=format)


#: (problem, geometry): which operand has fewer tiles, and so which is cut into them, differs.
WEIGHT_GRADIENTS = {
    "small": (Problem(2, 64, 1, 64, pixels=(4, 5)), {}),
    "3x3": (Problem(3, 64, 1, 64, pixels=(20, 27)), {}),
    "64x32": (Problem(3, 64, 1, 64, pixels=(64, 32)), {}),
    "40-72-dilation": (Problem(3, 40, 1, 72, pixels=(20, 27)), {"dilation": (2, 2), "padding": (1, 2)}),
    "128-64-2x3": (Problem(3, 128, 1, 64, pixels=(20, 27), kernel=(2, 3)), {"padding": (1, 1)}),
    "72-40-1x1": (Problem(3, 72, 1, 40, pixels=(20, 27), kernel=(1, 1)), {}),
    "64-128-3x1-dilation": (Problem(5, 64, 1, 128, pixels=(20, 27), kernel=(3, 1)), {"dilation": (2, 1)}),
    "8-136-3x2": (Problem(1, 8, 1, 136, pixels=(20, 27), kernel=(3, 2)), {}),
    "smaller-gradient": (Problem(3, 64, 1, 64, pixels=(33, 40)), {"padding": (2, 2)}),
}


@by_short_dtype
@pytest.mark.parametrize("columns", [8, 16, 32])
@pytest.mark.parametrize("name", WEIGHT_GRADIENTS)
def test_weight_gradient_hopper(on_hopper, name, columns, dtype):
    """At once and a few samples at a time, from the whole gradient and from a scratch of those samples alone."""
    problem, geometry = WEIGHT_GRADIENTS[name]
    config = WeightGradientConfig(columns)
    taps = forward_taps(problem, geometry)
    generator = torch.Generator(DEVICE).manual_seed(0)
    images = random_images((problem.rows, problem.depth, *problem.pixels), dtype, generator)
    weight = torch.zeros(problem.depth, problem.channels, *problem.kernel, dtype=torch.float64, device=DEVICE)
    output = F.conv_transpose2d(images.double(), weight.requires_grad_(), **geometry)
    z_gradient = random_images(output.shape, dtype, generator)
    (exact,) = torch.autograd.grad(output, weight, z_gradient.double())
    exact = exact.flip(2, 3).permute(2, 3, 1, 0)
    input, gradient = images.permute(0, 2, 3, 1), z_gradient.permute(0, 2, 3, 1)
    assert weight_gradient_hopper.supports(input, gradient, problem.kernel, taps.dilation, config)

    def result(samples, scratch):
        """``samples`` at a time; where there is a ``scratch``, the gradient's are copied to its beginning."""
        shape = weight_gradient_hopper.partials_shape(input, gradient, problem.kernel)
        partials = torch.full(shape, math.nan, device=DEVICE)
        for first in range(0, problem.rows, samples):
            count = min(samples, problem.rows - first)
            if scratch is not None:
                scratch.fill_(math.nan)[:count] = gradient[first : first + count]
            weight_gradient_hopper.convolution_weight_gradient(
                input,
                gradient if scratch is None else scratch,
                partials,
                input_first=first,
                gradient_first=first if scratch is None else 0,
                count=count,
                kernel_size=problem.kernel,
                dilation=taps.dilation,
                shift=taps.shift,
                accumulate=first > 0,
                config=config,
            )
        return weight_gradient_hopper.finish(partials, input, gradient, kernel_size=problem.kernel, config=config)

    for samples, scratch in ((problem.rows, None), (2, None), (2, torch.empty_like(gradient[:2]))):
        sums = result(samples, scratch)
        assert sums.dtype == torch.float32 and sums.shape == exact.shape
        assert (sums - exact).norm() <= 2e-5 * exact.norm()  # float32 sums of thousands of terms
        assert torch.equal(result(samples, scratch), sums)


def test_small_weight_gradient_of_no_samples(on_hopper):
    """It zeroes the sums, or leaves them as they are."""
    input = torch.randn(2, 4, 5, 64, device=DEVICE).to(torch.bfloat16)
    partials = torch.full(weight_gradient_hopper.partials_shape(input, input, (1, 1)), math.nan, device=DEVICE)
    options = {"kernel_size": (1, 1), "dilation": (1, 1), "shift": (0, 0), "config": WeightGradientConfig()}
    for accumulate in (False, True):
        weight_gradient_hopper.convolution_weight_gradient(
            input, input, partials, input_first=0, gradient_first=0, count=0, accumulate=accumulate, **options
        )
        assert not partials.any()


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


@by_dtype
@by_format
@pytest.mark.parametrize("name", ["64-64-3x3", "odd-size", "odd-channels", "stride"])
def test_repeated_convolutions_are_equal_bit_by_bit(name, format, dtype):
    """Of more images, so that all of a GPU has work."""
    problem, geometry = CONVOLUTIONS[name]
    arguments = image_arguments(dataclasses.replace(problem, rows=24), geometry, dtype, format)
    grad_output = draw_grad_output(L19, arguments)
    poisoned = run(L19.function, arguments, grad_output)
    torch.use_deterministic_algorithms(False)
    for _ in range(2):
        assert_same_bits(run(L19.function, arguments, grad_output), poisoned)


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


@by_format
@pytest.mark.parametrize("allowed", [True, False])
def test_float32_images_compiled_as_one_graph(allowed, format):
    """With TF32 or without, as it is set while the graph is compiled."""
    arguments = image_arguments(*CONVOLUTIONS["64-64-3x3"], torch.float32, format)
    grad_output = draw_grad_output(L19, arguments)
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed, deterministic=True):
        expected = run(L19.function, arguments, grad_output)
        results = run(torch.compile(L19.function, fullgraph=True), arguments, grad_output)
    assert_same_bits(results, expected)
    for name in expected:
        assert results[name].stride() == expected[name].stride(), name


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


def test_image_module_trains():
    torch.manual_seed(0)
    module = ops.ConvTranspose2dGeluGroupNorm(64, 64, 3, 1, 8, 8).to(DEVICE, torch.bfloat16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    input = torch.randn(8, 64, 32, 32, device=DEVICE).to(torch.bfloat16)
    target = torch.randn_like(module(input))
    losses = []
    for _ in range(5):
        loss = (module(input) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
