"""Promise: what L19 would launch, at its target size, compiles for each architecture, fits, and spills no registers.

As in ``tests/test_offline_compilation.py``, which has the other chains, and ``test_offline_compilation_norms.py``.
"""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from autotune_configs.offline import compile_launches
from ops import direct_convolution
from ops.calls import Call
from ops.convolution import Geometry
from tests.compilation import META, by_architecture, more_spills
from triton_kernels import convolution_hopper, image_copy, weight_gradient_hopper
from triton_kernels.activations import SILU
from triton_kernels.chain import Chain
from triton_kernels.chains import (
    CONV_TRANSPOSE2D_GELU_GROUP_NORM,
)
from triton_kernels.convolution_tiling import StrideOneConvolution
from triton_kernels.copies import MOST_COPIES, copy_all
from triton_kernels.grouped_products import multiply_all
from triton_kernels.image_statistics import PartialStatistics
from triton_kernels.image_tiles import ImageNormConfig
from triton_kernels.max_pool import PooledAxis, max_pool_backward
from triton_kernels.narrow_convolution import narrow_convolution
from triton_kernels.narrow_weight_gradient import ConvolvedAxis, narrow_weight_gradient
from triton_kernels.pointwise import ADD, nearest_tf32

pytestmark = pytest.mark.offline

#: [128, 64, 256, 256], 3 x 3 taps, 64 channels out.
SAMPLES, CHANNELS, SIZE = 128, 64, 256
GEOMETRY = Geometry((3, 3), (1, 1), (0, 0), (0, 0), (1, 1), 1)
CHANNELS_LAST, CONTIGUOUS = torch.channels_last, torch.contiguous_format

by_format = pytest.mark.parametrize("format", [CHANNELS_LAST, CONTIGUOUS], ids=str)


def images(dtype, format=CHANNELS_LAST, *, samples=SAMPLES, channels=CHANNELS, size=SIZE):
    return torch.empty(samples, channels, size, size, dtype=dtype, device=META, memory_format=format)


def vectors(dtype, channels=CHANNELS):
    return torch.empty(channels, dtype=dtype, device=META)


ADD_IMAGE = ADD.with_operand("tensor")


def assert_fit_without_spills(kernels, allowed_spill=0, put_aside=0):
    """``put_aside``: the bytes that a kernel may keep in memory across its loops, and not touch in them."""
    assert kernels
    for kernel in kernels:
        assert kernel.fits, (kernel.name, kernel.shared_memory)
        allowed = allowed_spill + more_spills(kernel.arch)
        puts_aside = kernel.spilled_bytes <= put_aside and not kernel.spills_in_loops
        assert puts_aside or kernel.spilled_bytes <= allowed, (kernel.name, kernel.spilled_bytes, kernel.registers)


def assert_multiplies_as_hopper_does(kernel, allowed_spill=0):
    assert_fit_without_spills([kernel], allowed_spill)
    assert "wgmma.mma_async" in kernel.ptx and "cp.async.bulk.tensor" in kernel.ptx
    assert not kernel.waits_for_products


@by_architecture
@by_format
@pytest.mark.parametrize("kernel, stride", [(3, 2), (2, 1), (3, 1)])
def test_max_pool_backward(kernel, stride, format, arch):
    axis = PooledAxis(112, (112 + 2 - kernel) // stride + 1, kernel, stride, 1)

    def launch():
        for dtype in (torch.bfloat16, torch.float32):
            gradient, chosen = (images(each, format, size=axis.outputs).flatten(2) for each in (dtype, torch.int8))
            target = images(dtype, format, size=axis.size).flatten(2)
            max_pool_backward(gradient, chosen, target, (PooledAxis(1, 1, 1, 1, 0), axis, axis))

    kernels = compile_launches(launch, arch)
    assert len(kernels) == 2
    assert_fit_without_spills(kernels)


@by_architecture
@pytest.mark.parametrize("C, O, taps", [(1, 32, (3, 3, 3)), (8, 8, (3, 3, 3)), (3, 64, (1, 7, 7)), (4, 320, (1, 3, 3))])
def test_narrow_weight_gradient(C, O, taps, arch):  # noqa: E741
    """An image's columns are on their way while others are multiplied, unless its channels are odd in number."""
    sizes = 1 if taps[0] == 1 else 96, 96, 96
    pixels = sizes[0] * sizes[1] * sizes[2]
    axes = tuple(ConvolvedAxis(size, size, tap, 1, tap // 2) for size, tap in zip(sizes, taps, strict=True))

    def launch():
        for dtype in (torch.bfloat16, torch.float16):
            gradient, image = (torch.empty(2, pixels, each, dtype=dtype, device=META).mT for each in (O, C))
            target = torch.empty(O, taps[0] * taps[1] * taps[2], C, dtype=dtype, device=META)
            narrow_weight_gradient(gradient, image, target, axes)

    kernels = [each for each in compile_launches(launch, arch) if each.name == "narrow_weight_gradient_kernel"]
    assert len(kernels) == 2
    assert_fit_without_spills(kernels)
    assert all("cp.async" in kernel.ptx for kernel in kernels)


@pytest.mark.parametrize(
    "C, O, taps, run",
    [
        (1, 32, (3, 3, 3), 1),
        (8, 8, (3, 3, 3), 8),
        (3, 64, (1, 7, 7), 1),
        (4, 320, (1, 3, 3), 4),
        (16, 32, (3, 3, 3), 16),
        (12, 12, (1, 3, 3), 4),
        (3, 768, (1, 16, 16), 1),
        (1, 128, (3, 3, 3), 1),
        (3, 128, (1, 7, 7), 1),
        (2, 64, (1, 5, 5), 2),
        (1, 8, (1, 1, 2), 1),
    ],
)
def test_narrow_convolution(C, O, taps, run):  # noqa: E741
    """A run of channels is one load. The kernel runs on Hopper alone."""
    sizes = 1 if taps[0] == 1 else 96, 96, 96
    axes = tuple(ConvolvedAxis(size, size, tap, 1, tap // 2) for size, tap in zip(sizes, taps, strict=True))
    pixels, count = sizes[0] * sizes[1] * sizes[2], taps[0] * taps[1] * taps[2]

    def launch():
        for dtype in (torch.bfloat16, torch.float16):
            shapes = (2, pixels, C), (count * C, O), (2 * pixels, O)
            narrow_convolution(*[torch.empty(shape, dtype=dtype, device=META) for shape in shapes], axes)

    kernels = compile_launches(launch, 90)
    assert len(kernels) == 2
    assert_fit_without_spills(kernels)
    loads = {
        1: "ld.global.b16",
        2: "ld.global.b32",
        4: "ld.global.v2.b32",
        8: "ld.global.v4.b32",
        16: "ld.global.v4.b32",
    }
    assert all(loads[run] in kernel.ptx for kernel in kernels)
    assert run == 1 or not any("ld.global.b16" in kernel.ptx for kernel in kernels)


@by_architecture
@pytest.mark.parametrize("size", [SIZE, 47], ids=["target", "odd"])
@pytest.mark.parametrize("source, target", [(CHANNELS_LAST, CONTIGUOUS), (CONTIGUOUS, CHANNELS_LAST)], ids=str)
def test_image_copy(source, target, size, arch):
    def launch():
        for dtype in (torch.bfloat16, torch.float32):
            views = [images(dtype, format, size=size).flatten(2) for format in (source, target)]
            image_copy.copy_image(*views, ImageNormConfig.fit(*views))
            if dtype == torch.float32:
                image_copy.copy_image(*views, ImageNormConfig.fit(*views), nearest_tf32)
                image_copy.split_image(views[0], views[1].bfloat16(), views[1].bfloat16(), ImageNormConfig.fit(*views))

    kernels = compile_launches(launch, arch)
    assert len(kernels) == 4
    assert_fit_without_spills(kernels)


@by_architecture
def test_copies(arch):
    """One kernel for any number of weights, which threads take several elements of at once."""

    def launch():
        for dtype, target_dtype in (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32):
            for count in 3, MOST_COPIES:
                weights = [images(dtype, CONTIGUOUS, size=size + 1) for size in range(count)]
                copies = [torch.empty_like(each, dtype=target_dtype, memory_format=CHANNELS_LAST) for each in weights]
                copy_all(weights, copies)

    kernels = {kernel.ptx: kernel for kernel in compile_launches(launch, arch)}
    assert len(kernels) == 2
    assert_fit_without_spills(kernels.values())
    for kernel in kernels.values():
        assert "ld.global.v4.b32" in kernel.ptx and "st.global.v4.b32" in kernel.ptx


@by_architecture
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows, depth", [(2, 1280), (154, 768), (512, 32)], ids=["few rows", "rows", "many rows"])
def test_grouped_products(rows, depth, dtype, arch):
    """One kernel for any number of products, which threads load several elements for at once: forward, and of weights'
    gradients."""

    def matrices(count, rows, columns):
        return [torch.empty(rows, columns + 16 * place, dtype=dtype, device=META) for place in range(count)]

    def launch():
        for count in 3, 60:
            others, results = matrices(count, depth, 320), matrices(count, rows, 320)
            turned = [torch.empty(*reversed(each.shape), dtype=dtype, device=META).T for each in others]
            biases = [each[0] for each in results]
            multiply_all(torch.empty(rows, depth, dtype=dtype, device=META), turned, biases, results)
            results = [torch.empty(*reversed(each.shape), dtype=dtype, device=META).T for each in results]
            multiply_all(torch.empty(depth, rows, dtype=dtype, device=META).T, others, [], results)

    kernels = {kernel.ptx: kernel for kernel in compile_launches(launch, arch)}
    assert len(kernels) == 2
    assert_fit_without_spills(kernels.values())
    for kernel in kernels.values():
        assert "cp.async.cg.shared.global" in kernel.ptx or "cp.async.bulk" in kernel.ptx


#: Bytes a thread that the convolution's epilogue may spill. With tiles of 256 pixels it has 112 registers; that some
#: are spilled in float16 costs less than smaller tiles would (1.36 ms, 1.49).
EPILOGUE_SPILLS = {torch.bfloat16: 8, torch.float16: 96, torch.float32: 16}


@dataclass(frozen=True)
class HopperConvolution:
    """One launch of ``convolution_hopper``."""

    taps: StrideOneConvolution = direct_convolution.forward_convolution(GEOMETRY)
    in_channels: int = CHANNELS
    out_channels: int = CHANNELS
    out_size: int = SIZE + 2
    format: torch.memory_format = CHANNELS_LAST
    statistics: bool = True
    bias: bool = True

    def __str__(self) -> str:
        text = f"{self.in_channels}-{self.out_channels}-{self.taps.kernel_size}-{self.taps.dilation}-{self.format}"
        options = (self.statistics and "statistics", self.bias and "bias", str(self.out_size))
        return "-".join(filter(None, (text, *options))).replace("torch.", "").replace(" ", "")

    def launch(self, dtype: torch.dtype) -> None:
        input = images(dtype, channels=self.in_channels)
        output = images(dtype, self.format, channels=self.out_channels, size=self.out_size)
        assert convolution_hopper.supports(input, output, self.taps)
        places = convolution_hopper.partial_count(input, output, self.taps)
        partials = PartialStatistics.empty(SAMPLES, places, self.out_channels, META) if self.statistics else None
        convolution_hopper.convolution_hopper(
            input,
            torch.empty(*self.taps.kernel_size, self.out_channels, self.in_channels, dtype=dtype, device=META),
            vectors(dtype, self.out_channels) if self.bias else None,
            self.taps,
            output=output,
            partials=partials,
            chain=CONV_TRANSPOSE2D_GELU_GROUP_NORM.of_dtype(dtype) if self.statistics else None,
            operands=(None,) * 4,
        )


#: What the target's own launches (test_direct_convolution) are without.
VARIANTS = [
    HopperConvolution(statistics=False),
    HopperConvolution(bias=False),
    HopperConvolution(format=CONTIGUOUS, out_size=SIZE),
]
#: What tests/test_gpu_images.py launches.
SMALLER = [
    HopperConvolution(StrideOneConvolution((2, 3), (1, 1), (0, 0)), 40, 72),
    HopperConvolution(StrideOneConvolution((3, 2), (2, 1), (0, 0)), 40, 72),
    HopperConvolution(StrideOneConvolution((3, 3), (2, 2), (0, 0))),
    HopperConvolution(StrideOneConvolution((1, 1), (1, 1), (0, 0)), 128, 64),
    HopperConvolution(StrideOneConvolution((1, 5), (1, 1), (0, 0))),
    # Pixels of 16 to 64 bytes.
    HopperConvolution(in_channels=8, out_channels=32),
    HopperConvolution(in_channels=16, out_channels=8, statistics=False),
    HopperConvolution(in_channels=8, format=CONTIGUOUS, out_size=SIZE, statistics=False),
]
#: float16 differs from bfloat16 by the epilogue's GELU alone.
HOPPER_CONVOLUTIONS = [
    *((problem, dtype) for problem in VARIANTS for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    *((problem, dtype) for problem in SMALLER for dtype in (torch.bfloat16, torch.float32)),
]


@pytest.mark.parametrize("problem, dtype", HOPPER_CONVOLUTIONS, ids=str)
def test_convolution_hopper(problem, dtype):
    (kernel,) = compile_launches(lambda: problem.launch(dtype), 90)
    assert_multiplies_as_hopper_does(kernel, EPILOGUE_SPILLS[dtype] if problem.statistics else 0)


@pytest.mark.parametrize("problem", [HopperConvolution(format=CONTIGUOUS), HopperConvolution(out_channels=44)], ids=str)
def test_convolution_hopper_without_staging(problem):
    """Rows and channels of any number, which the copy engine does not take: float32 is stored thread by thread."""
    (kernel,) = compile_launches(lambda: problem.launch(torch.float32), 90)
    assert_multiplies_as_hopper_does(kernel)


#: What accumulates loads in addition, and float16 takes bfloat16's instructions. With taps 2 and 6 apart, boxes fill
#: the shared memory.
WEIGHT_GRADIENTS = [
    *((taps, 1, True, torch.bfloat16) for taps in ((1, 1), (2, 3), (3, 2), (3, 3))),
    *(((3, 3), dilation, True, torch.bfloat16) for dilation in (2, 6)),
    ((3, 3), 1, False, torch.bfloat16),
    ((3, 3), 1, True, torch.float16),
]


@pytest.mark.parametrize("kernel_size, dilation, accumulate, dtype", WEIGHT_GRADIENTS, ids=str)
def test_weight_gradient_hopper(kernel_size, dilation, accumulate, dtype):
    def launch():
        input = torch.empty(SAMPLES, SIZE, SIZE, CHANNELS, dtype=dtype, device=META)
        gradient = torch.empty(SAMPLES, SIZE + 2, SIZE + 2, CHANNELS, dtype=dtype, device=META)
        assert weight_gradient_hopper.supports(input, gradient, kernel_size, (dilation, dilation))
        partials = torch.empty(weight_gradient_hopper.partials_shape(input, gradient, kernel_size), device=META)
        weight_gradient_hopper.convolution_weight_gradient(
            input,
            gradient,
            partials,
            input_first=0,
            gradient_first=0,
            count=SAMPLES,
            kernel_size=kernel_size,
            dilation=(dilation, dilation),
            shift=(-2, -2),
            accumulate=accumulate,
        )

    (kernel,) = compile_launches(launch, 90)
    assert_multiplies_as_hopper_does(kernel)


@by_format
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_direct_convolution(dtype, format):
    """Forward and backward at the target size."""
    check_direct_convolution(dtype, format)


#: Channels, samples and size of what models of images have.
PLAIN_CONVOLUTIONS = [(64, 8, 128), (128, 1, 512)]


@by_format
@pytest.mark.parametrize("channels, samples, size", PLAIN_CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("with_image", [False, True])
def test_plain_convolution(with_image, channels, samples, size, format):
    """3 x 3 taps and padding 1: the same kernels with other shifts, and the statistics of what is not activated.

    With an image before the norm there are two biases and no statistics.
    """
    chain = Chain("conv2d", before=(ADD, ADD_IMAGE) if with_image else (), after=(SILU,))
    geometry = dataclasses.replace(GEOMETRY, padding=(1, 1), transposed=False)
    problem = images(torch.bfloat16, format, samples=samples, channels=channels, size=size), geometry
    check_direct_convolution(torch.bfloat16, format, *problem, chain)


@pytest.mark.parametrize("arch", [80, 100, 120])
def test_convolutions_elsewhere(arch):
    """cuDNN's, plain and transposed."""
    input, weight = images(torch.bfloat16), torch.empty(CHANNELS, CHANNELS, 3, 3, dtype=torch.bfloat16, device=META)
    taken = []

    def ask():
        plain = dataclasses.replace(GEOMETRY, transposed=False)
        taken.append([direct_convolution.takes(input, weight, each, True) for each in (plain, GEOMETRY)])

    compile_launches(ask, arch)
    assert taken == [[False, False]]


def check_direct_convolution(dtype, format, input=None, geometry=GEOMETRY, chain=CONV_TRANSPOSE2D_GELU_GROUP_NORM):
    input = images(dtype, format) if input is None else input
    samples, channels, size, _ = input.shape
    out_size, _ = geometry.output_size(size, size)
    weight = torch.empty(channels, channels, 3, 3, dtype=dtype, device=META)
    biases, steps = len(chain.biases), len(chain.steps)
    presence = (*[True] * biases, *[False] * (steps - biases))
    call = Call(chain.of_dtype(dtype), (None,) * steps, presence, geometry=geometry)

    def forward():
        assert direct_convolution.takes(input, weight, geometry, True)
        operands = (*[vectors(dtype, channels)] * biases, *[None] * (steps - biases))
        z, partials = direct_convolution.forward(call, input, weight, operands)
        assert z.shape == (samples, channels, out_size, out_size) and z.stride(1) == 1
        assert direct_convolution.differentiates(z, input, geometry)

    def backward():
        z = images(dtype, samples=samples, channels=channels, size=out_size)
        gradients = direct_convolution.backward(lambda *_: None, z, input, weight, geometry, (True, True))
        for gradient, of in zip(gradients, (input, weight), strict=True):
            assert gradient.shape == of.shape and gradient.stride() == of.stride()

    for launch in (forward, backward):
        kernels = compile_launches(launch, 90)
        specialised = [kernel for kernel in kernels if "cp.async.bulk.tensor" in kernel.ptx]
        assert specialised
        for kernel in specialised:
            assert_multiplies_as_hopper_does(kernel, EPILOGUE_SPILLS[dtype] if launch is forward else 0)
        if others := [kernel for kernel in kernels if kernel not in specialised]:
            assert_fit_without_spills(others)
