"""Promise: on a GPU, the kernels of stride-1 convolutions agree with float64, and write nothing elsewhere.

As in ``tests/test_gpu.py``, uninitialised memory is NaN, and what is "small" is for compute-sanitizer.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from tests import gpu
from tests.chains import DTYPES, Problem, chain_id
from tests.gpu import DEVICE, FORMATS, on_hopper
from tests.images import round_to_tf32
from triton_kernels import column_sums, convolution_hopper, weight_gradient_hopper
from triton_kernels.chains import CONV_TRANSPOSE2D_GELU_GROUP_NORM
from triton_kernels.convolution_tiling import StrideOneConvolution
from triton_kernels.image_statistics import PartialStatistics

pytestmark = [*gpu.MARKS, pytest.mark.usefixtures("poisoned_memory")]

#: A convolution adds its bias by itself, and the norm's weight and bias follow the statistics.
NO_OPERANDS = (None,) * len(CONV_TRANSPOSE2D_GELU_GROUP_NORM.steps)

by_short_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=chain_id)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)


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
        mean, rstd = partials.merge(problem.groups, 1e-5).double()
        activated = F.gelu(output.double()).reshape(len(mean), -1)
        torch.testing.assert_close(mean, activated.mean(1), rtol=0, atol=5e-6)
        torch.testing.assert_close(rstd, (activated.var(1, correction=0) + 1e-5).rsqrt(), rtol=2e-5, atol=0)
    return output


def launch_hopper(input, weight, bias, taps, *, output, partials):
    assert convolution_hopper.supports(input, output, taps)
    precise = torch.float32 if input.dtype == torch.float32 else torch.float16
    chain = CONV_TRANSPOSE2D_GELU_GROUP_NORM.of_dtype(precise)
    options = {"output": output, "partials": partials, "chain": chain, "operands": NO_OPERANDS}
    convolution_hopper.convolution_hopper(input, weight, bias, taps, **options)


#: (problem, geometry). Contiguous results go through the copy engine where rows are whole multiples of 16 bytes.
HOPPER_CONVOLUTIONS = {
    "small": (Problem(2, 64, 4, 16, pixels=(6, 14)), {}),
    "small-wide-taps": (Problem(3, 64, 4, 16, pixels=(3, 12), kernel=(1, 5)), {}),
    "3x3": (Problem(3, 64, 4, 16, pixels=(21, 30)), {}),
    "40-72-2x3-padding": (Problem(3, 40, 6, 12, pixels=(21, 40), kernel=(2, 3)), {"padding": (1, 1)}),
    "40-72-3x2-dilation": (Problem(3, 40, 6, 12, pixels=(21, 39), kernel=(3, 2)), {"dilation": (2, 1)}),
    "128-64-1x1": (Problem(3, 128, 4, 16, pixels=(21, 40), kernel=(1, 1)), {}),
    # As plain convolutions have them: an output of the input's size, or smaller.
    "3x3-same": (Problem(3, 64, 4, 16, pixels=(21, 32)), {"padding": (1, 1)}),
    "128-128-3x3-inside": (Problem(2, 128, 8, 16, pixels=(21, 34)), {"padding": (2, 2)}),
    "32-48-3x3-wide": (Problem(2, 32, 4, 12, pixels=(9, 14)), {"dilation": (2, 3), "padding": (4, 6)}),
    "8-32-3x3": (Problem(3, 8, 4, 8, pixels=(21, 30)), {}),
    "16-8-3x2-dilation": (Problem(3, 16, 2, 4, pixels=(21, 39), kernel=(3, 2)), {"dilation": (2, 1)}),
    "more-tiles-than-programs": (Problem(5, 64, 4, 16, pixels=(254, 254)), {}),
}
#: Problems whose weights fit into shared memory in 16 bits alone.
HOPPER_IN_16_BITS = {"128-128-3x3-inside"}


def check_hopper_convolution(problem, geometry, dtype, out_format, **options):
    launcher = launch_hopper, convolution_hopper.partial_count
    return check_convolution(problem, geometry, dtype, out_format, *launcher, tf32=dtype == torch.float32, **options)


@on_hopper
@pytest.mark.parametrize("out_format", FORMATS, ids=str)
@pytest.mark.parametrize(
    "name, dtype",
    [
        (name, dtype)
        for name in HOPPER_CONVOLUTIONS
        for dtype in DTYPES
        if dtype != torch.float32 or name not in HOPPER_IN_16_BITS
    ],
    ids=str,
)
def test_convolution_hopper(name, out_format, dtype):
    problem = (*HOPPER_CONVOLUTIONS[name], dtype, out_format)
    output = check_hopper_convolution(*problem)
    assert torch.equal(check_hopper_convolution(*problem), output)
    assert torch.equal(check_hopper_convolution(*problem, statistics=False), output)
    check_hopper_convolution(*problem, bias=False)


@on_hopper
@pytest.mark.parametrize("out_format", FORMATS, ids=str)
@pytest.mark.parametrize("pixels", [(21, 25), (7, 5)], ids=["21x25", "small"])
@pytest.mark.parametrize("channels", [64, 44])
def test_convolution_hopper_of_odd_sizes(channels, pixels, out_format):
    """float32 results, which the copy engine does not write, may have any size and any number of channels."""
    problem = Problem(3, 64, 4, channels // 4, pixels=pixels)
    check_hopper_convolution(problem, {}, torch.float32, out_format)


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
    "same-size": (Problem(3, 64, 1, 64, pixels=(33, 40)), {"padding": (1, 1)}),
    "128-128-same-size": (Problem(1, 128, 1, 128, pixels=(21, 33)), {"padding": (1, 1)}),
}


@on_hopper
@by_short_dtype
@pytest.mark.parametrize("name", WEIGHT_GRADIENTS)
def test_weight_gradient_hopper(name, dtype):
    """At once and a few samples at a time, from the whole gradient and from a scratch of those samples alone."""
    problem, geometry = WEIGHT_GRADIENTS[name]
    taps = forward_taps(problem, geometry)
    generator = torch.Generator(DEVICE).manual_seed(0)
    images = random_images((problem.rows, problem.depth, *problem.pixels), dtype, generator)
    weight = torch.zeros(problem.depth, problem.channels, *problem.kernel, dtype=torch.float64, device=DEVICE)
    output = F.conv_transpose2d(images.double(), weight.requires_grad_(), **geometry)
    z_gradient = random_images(output.shape, dtype, generator)
    (exact,) = torch.autograd.grad(output, weight, z_gradient.double())
    exact = exact.flip(2, 3).permute(2, 3, 1, 0)
    input, gradient = images.permute(0, 2, 3, 1), z_gradient.permute(0, 2, 3, 1)
    assert weight_gradient_hopper.supports(input, gradient, problem.kernel, taps.dilation)

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
            )
        sums, shapes = column_sums.column_sums(partials), (input.shape, gradient.shape)
        return weight_gradient_hopper.by_taps(sums, *shapes, kernel_size=problem.kernel)

    for samples, scratch in ((problem.rows, None), (2, None), (2, torch.empty_like(gradient[:2]))):
        sums = result(samples, scratch)
        assert sums.dtype == torch.float32 and sums.shape == exact.shape
        assert (sums - exact).norm() <= 2e-5 * exact.norm()  # float32 sums of thousands of terms
        assert torch.equal(result(samples, scratch), sums)


@on_hopper
def test_small_weight_gradient_of_no_samples():
    """It zeroes the sums, or leaves them as they are."""
    input = torch.randn(2, 4, 5, 64, device=DEVICE).to(torch.bfloat16)
    partials = torch.full(weight_gradient_hopper.partials_shape(input, input, (1, 1)), math.nan, device=DEVICE)
    options = {"kernel_size": (1, 1), "dilation": (1, 1), "shift": (0, 0)}
    for accumulate in (False, True):
        weight_gradient_hopper.convolution_weight_gradient(
            input, input, partials, input_first=0, gradient_first=0, count=0, accumulate=accumulate, **options
        )
        assert not partials.any()
