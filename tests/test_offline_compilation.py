"""Promise: what would be launched compiles for each architecture, fits its shared memory, and spills no registers.

No GPU is needed: the launchers run on tensors of the "meta" device, and Triton compiles for the architecture asked for.
"""

import dataclasses
import json
from dataclasses import dataclass
from importlib import resources

import pytest
import torch

from autotune_configs.heuristics import WIDEST_TILE, heuristic_group_norm_config, heuristic_linear_config
from autotune_configs.offline import compile_launches
from ops import direct_convolution
from ops.convolution import ConvTranspose2dGeometry
from ops.linear_group_norm_min import WIDEST_FUSED_GROUP
from ops.precision import FLOAT32_INPUT_PRECISION
from triton_kernels import (
    bias_pointwise,
    column_sums,
    convolution,
    convolution_hopper,
    epilogues,
    group_norm,
    hopper,
    image_copy,
    image_group_norm,
    row_minimum,
    row_minimum_backward,
    weight_gradient_hopper,
    wide_group_norm,
)
from triton_kernels.convolution import ConvolutionConfig, StrideOneConvolution
from triton_kernels.image_group_norm import ImageNormConfig, PartialStatistics
from triton_kernels.linear import LinearConfig, linear
from triton_kernels.pointwise import GELU, GELU_OF, GELU_TANH, HARDTANH, HARDTANH_MISH, IDENTITY, identity
from triton_kernels.tf32 import nearest_tf32

pytestmark = pytest.mark.offline

META = torch.device("meta")
ARCHITECTURES = (80, 90, 100, 120)
DTYPES = (torch.bfloat16, torch.float32)
#: The architecture of each GPU that a table is shipped for, and the group size of each kernel at the target size, or
#: the widest that tiles of the table hold.
TABLE_ARCHITECTURES = {"nvidia_h200": 90}
TABLE_GROUPS = {"hardtanh_mish_group_norm": 32, "group_norm_row_minimum": 16, "group_norm_hardtanh": 256}
EPILOGUES = {
    "bias": epilogues.bias_epilogue,
    "hardtanh_mish_group_norm": epilogues.hardtanh_mish_group_norm_epilogue,
    "group_norm_hardtanh": epilogues.group_norm_hardtanh_epilogue,
    "group_norm_row_minimum": epilogues.group_norm_row_minimum_epilogue,
}
NORMALISING = tuple(EPILOGUES)[1:]
#: Of Ampere and later, Hopper, and Blackwell's data center GPUs.
MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
#: The fewest rows that Hopper's wgmma takes.
FEWEST_WGMMA_ROWS = 64


@dataclass(frozen=True)
class Gemm:
    """One launch of ``linear``; without a config, with the heuristic's for the architecture."""

    kernel: str
    dtype: torch.dtype
    m: int
    n: int
    k: int
    group_size: int = 1
    saved: bool = False
    config: LinearConfig | None = None

    def __str__(self) -> str:
        text = f"{self.kernel}-{self.dtype}-{self.m}x{self.n}x{self.k}-groups{self.group_size}"
        return text.replace("torch.", "") + ("-saved" if self.saved else "")

    def resolve(self) -> LinearConfig:
        return self.config or heuristic_linear_config(self.dtype, self.m, self.n, self.k, self.group_size, META)

    def launch(self) -> None:
        config = self.resolve()
        assert config.holds_groups_of(self.group_size)
        output = self.empty(self.m, self.n)
        saved = self.empty(self.m, self.n) if self.saved else None
        if self.kernel == "group_norm_row_minimum":
            tiles = -(-self.n // config.epilogue_columns)
            output, saved = row_minimum.empty_tile_minimum(tiles, self.m, self.group_size, META, self.saved)
        linear(
            self.empty(self.m, self.k),
            self.empty(self.n, self.k),
            EPILOGUES[self.kernel],
            config,
            output=output,
            saved=saved,
            vectors=tuple(self.empty(self.n) for _ in range(4)),
            scalars=(-1.0, 1.0, 1e-5),
            group_size=self.group_size,
            input_precision=FLOAT32_INPUT_PRECISION,
        )

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=META)

    def allowed_spill(self, arch: int) -> int:
        """Bytes a thread may spill. All of this is in the epilogue: once a tile, outside the loop over K."""
        if self.kernel == "group_norm_row_minimum" and self.saved:
            # Keys, columns and normalised values of a whole tile are alive at once. With these spills the tile takes
            # 1.08 of the bare product's time, the smaller tiles tried 1.2 and more (bfloat16, H200).
            return 512
        if arch == 90 and self.dtype.itemsize == 2 and self.kernel == "hardtanh_mish_group_norm" and self.saved:
            # Ten registers; the smaller tiles multiply for a tenth longer (H200).
            return 40
        if arch == 100 and self.dtype.itemsize == 2 and self.kernel != "bias":
            # The same tiles as on Hopper, where they spill less; no GPU of this kind has been measured.
            return 192
        if self.k * self.dtype.itemsize % 16 != 0:
            return 16  # the addresses of operands that come element by element; see the heuristic's tiles
        return 0


def table_gemms():
    for file in sorted((resources.files("autotune_configs") / "tables").iterdir(), key=lambda file: file.name):
        name = file.name.removesuffix(".json")
        for entry in json.loads(file.read_text())["entries"]:
            config = LinearConfig(**entry["config"])
            group_size = min(TABLE_GROUPS.get(entry["kernel"], 1), config.epilogue_columns)
            sizes = entry["m"], entry["n"], entry["k"], group_size
            for saved in (False,) if entry["kernel"] == "bias" else (False, True):
                gemm = Gemm(entry["kernel"], getattr(torch, entry["dtype"]), *sizes, saved, config)
                yield pytest.param(name, gemm, id=f"{name}-{gemm}")


def heuristic_gemms():
    for dtype in DTYPES:
        yield Gemm("bias", dtype, 1024, 8192, 8192)
        yield Gemm("bias", dtype, 16, 8192, 8192)
        yield Gemm("bias", dtype, 1024, 8191, 77)  # nothing is aligned: pointers load and store
        for kernel in NORMALISING:
            widest = WIDEST_FUSED_GROUP if kernel == "group_norm_row_minimum" else WIDEST_TILE
            # L30's epilogue is L94's without its functions before the norm: the widest groups stand for the others.
            for group_size in (widest,) if kernel == "group_norm_hardtanh" else (16, 32, widest):
                yield Gemm(kernel, dtype, 1024, 8192, 8192, group_size)
                yield Gemm(kernel, dtype, 1024, 8192, 8192, group_size, saved=True)
            yield Gemm(kernel, dtype, 16, 8192, 8192, widest, saved=True)
            for group_size in (widest,) if kernel == "group_norm_hardtanh" else (32, widest):
                yield Gemm(kernel, dtype, 1024, 8192, 77, group_size, saved=True)


def check(gemm: Gemm, arch: int) -> None:
    configs = []

    def launch():
        configs.append(gemm.resolve())  # the heuristic asks which architecture is compiled for
        gemm.launch()

    (compiled,) = compile_launches(launch, arch)
    assert compiled.fits, f"{compiled.shared_memory} bytes of shared memory"
    assert compiled.spilled_bytes <= gemm.allowed_spill(arch), f"{compiled.registers} registers"
    # Triton may answer a tile that it cannot do with a kernel that does nothing.
    assert any(instruction in compiled.ptx for instruction in MATRIX_INSTRUCTIONS), f"{configs[0]} multiplies nothing"
    if arch == 90 and configs[0].block_m >= FEWEST_WGMMA_ROWS:
        assert "wgmma" in compiled.ptx


@pytest.mark.parametrize("table, gemm", list(table_gemms()))
def test_tables(table, gemm):
    check(gemm, TABLE_ARCHITECTURES[table])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("gemm", list(heuristic_gemms()), ids=str)
def test_heuristics(gemm, arch):
    check(gemm, arch)


def group_norm_launches(dtype, M, C, group_size, *functions):
    """A norm with each of these functions around it, forward and backward, and one that ends in the row minimum."""
    config = heuristic_group_norm_config(M, C, group_size)
    num_groups = C // group_size
    matrix = torch.empty(M, C, dtype=dtype, device=META)
    vector = torch.empty(C, dtype=dtype, device=META)
    arguments = (matrix, num_groups, vector, vector, 1e-5, config)
    for options in functions:
        options = {**options, "bounds": (-1.0, 1.0)}
        group_norm.group_norm(*arguments, output=matrix, **options)
        group_norm.group_norm_backward(matrix, *arguments, input_gradient=matrix, **options)
    tiles = group_norm.column_tiles(C, group_size, config)
    for save in (False, True):
        keys, saved = row_minimum.empty_tile_minimum(tiles, M, group_size, META, save)
        group_norm.group_norm(*arguments, output=keys, saved=saved, finish=group_norm.finish_row_minimum)


def wide_group_norm_launches(dtype):
    images = torch.empty(32, 64, 56 * 56, dtype=dtype, device=META)
    vector = torch.empty(64, dtype=dtype, device=META)
    for activation, final in ((IDENTITY, IDENTITY), (IDENTITY, HARDTANH), (GELU, IDENTITY), (GELU_TANH, IDENTITY)):
        options = {"activation": activation, "final": final, "bounds": (-1.0, 1.0)}
        wide_group_norm.wide_group_norm(images, 8, vector, vector, 1e-5, output=images, **options)
        wide_group_norm.wide_group_norm_backward(
            images, images, 8, vector, vector, 1e-5, input_gradient=images, **options
        )
    huge = torch.empty(1, 2, 2**30, dtype=dtype, device=META)  # places in its group are 64-bit numbers
    wide_group_norm.wide_group_norm(huge, 1, None, None, 1e-5, output=huge)
    wide_group_norm.wide_group_norm_backward(huge, huge, 1, None, None, 1e-5, input_gradient=huge)


def pointwise_launches(dtype):
    matrix = torch.empty(1024, 8192, dtype=dtype, device=META)
    vector = torch.empty(8192, dtype=dtype, device=META)
    bias_pointwise.bias_pointwise(matrix, vector, HARDTANH_MISH, (-1.0, 1.0), output=matrix)
    bias_pointwise.bias_pointwise_backward(matrix, matrix, vector, HARDTANH_MISH, (-1.0, 1.0), input_gradient=matrix)
    column_sums.column_sums(torch.empty(3, 16, 8192, device=META))


def row_minimum_launches(dtype, group_size):
    """What follows the minima of the tiles, forward and backward, of L75 at 1024 x 8192 x 8192."""
    M, N, K = 1024, 8192, 8192
    vector, input, weight = (torch.empty(*shape, dtype=dtype, device=META) for shape in ((N,), (M, K), (N, K)))
    for save in (False, True):
        keys, tile_saved = row_minimum.empty_tile_minimum(32, M, group_size, META, save)
        winner = row_minimum.empty_winner(M, group_size, META) if save else None
        row_minimum.finish(keys, tile_saved, vector, weight[:, :M], winner, group_size)
    column = winner[0]
    minimum_gradient, _ = row_minimum_backward.output_gradient_sums(torch.empty(N, M, dtype=dtype, device=META))
    z_gradient = row_minimum_backward.winner_backward(minimum_gradient, winner, vector, group_size)
    order, offsets = row_minimum_backward.rows_by_group(column, N // group_size, group_size)
    row_minimum_backward.column_gradients(minimum_gradient, winner, z_gradient, order, offsets)
    row_minimum_backward.input_gradient(z_gradient, column, order, weight, input)
    row_minimum_backward.weight_gradient(z_gradient, order, offsets, input, weight)


WIDEST = "groups8192"
PLAIN, BEFORE, AFTER = {}, {"activation": HARDTANH_MISH}, {"final": HARDTANH}

OTHERS = {
    "groups10": lambda dtype: group_norm_launches(dtype, 1000, 8190, 10, PLAIN, BEFORE, AFTER),
    "groups32": lambda dtype: group_norm_launches(dtype, 1024, 8192, 32, BEFORE),
    "groups512": lambda dtype: group_norm_launches(dtype, 1024, 8192, 512, AFTER),
    WIDEST: lambda dtype: group_norm_launches(dtype, 1024, 8192, 8192, BEFORE),
    "wide-groups": wide_group_norm_launches,
    "pointwise": pointwise_launches,
    "minimum16": lambda dtype: row_minimum_launches(dtype, 16),
    "minimum128": lambda dtype: row_minimum_launches(dtype, 128),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels(name, arch):
    """They load and then compute in float32, whatever the dtype; the products of the row minimum's backward do not."""
    for dtype in DTYPES if name.startswith("minimum") else DTYPES[:1]:
        kernels = compile_launches(lambda dtype=dtype: OTHERS[name](dtype), arch)
        assert kernels and all(kernel.fits for kernel in kernels)
        for kernel in kernels:
            # 16 elements of eight matrices a thread, for which 512 threads leave 128 registers: a little too few.
            allowed = 128 if name == WIDEST and kernel.name == "group_norm_backward_kernel" else 0
            assert kernel.spilled_bytes <= allowed, (kernel.name, kernel.registers)


# Images, at L19's target size: [128, 64, 256, 256], 3 x 3 taps, 64 channels out.

CHANNELS_LAST, CONTIGUOUS = torch.channels_last, torch.contiguous_format
SAMPLES, CHANNELS, SIZE = 128, 64, 256
GEOMETRY = ConvTranspose2dGeometry((3, 3), (1, 1), (0, 0), (0, 0), (1, 1), 1)

with_copies = pytest.mark.skipif(not hopper.has_copies(), reason="this Triton has no such copies: nothing calls them")
by_architecture = pytest.mark.parametrize("arch", ARCHITECTURES)
by_short_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
by_format = pytest.mark.parametrize("format", [CHANNELS_LAST, CONTIGUOUS], ids=str)


def images(dtype, format=CHANNELS_LAST, *, samples=SAMPLES, channels=CHANNELS, size=SIZE):
    return torch.empty(samples, channels, size, size, dtype=dtype, device=META, memory_format=format)


def vectors(dtype, channels=CHANNELS):
    return torch.empty(channels, dtype=dtype, device=META)


def assert_fit_without_spills(kernels, allowed_spill=0):
    assert kernels
    for kernel in kernels:
        assert kernel.fits, (kernel.name, kernel.shared_memory)
        assert kernel.spilled_bytes <= allowed_spill, (kernel.name, kernel.spilled_bytes, kernel.registers)


def assert_multiplies_as_hopper_does(kernel, allowed_spill=0):
    assert_fit_without_spills([kernel], allowed_spill)
    assert "wgmma.mma_async" in kernel.ptx and "cp.async.bulk.tensor" in kernel.ptx


@by_architecture
@by_format
@pytest.mark.parametrize(
    "dtype, direct",
    [(torch.bfloat16, True), (torch.float16, True), (torch.float32, True), (torch.float32, False)],
    ids=["bfloat16", "float16", "tf32", "float32"],
)
def test_image_group_norm(dtype, direct, format, arch):
    """As L19 calls it: where z is made directly it is always channels_last, else of its input's format, as the result.

    The gradient comes in z's format, and the library's z is without the convolution's bias.
    """
    z = images(dtype, CHANNELS_LAST if direct else format, size=SIZE + 2).flatten(2)
    stored = nearest_tf32 if direct and dtype == torch.float32 else identity
    output = images(dtype, format, size=SIZE + 2).flatten(2)
    vector = vectors(dtype)
    B, C, S = z.shape
    alone, both = ImageNormConfig.fit(z), ImageNormConfig.fit(z, output)
    norm_sums = torch.empty(2, B, alone.strips(S), C, device=META)
    bias_sums = torch.empty(B, alone.strips(S), C, device=META)

    def launch():
        for activation in (GELU_OF[dtype], GELU_TANH):
            options = {"activation": activation, "input_bias": None if direct else vector}
            statistics = image_group_norm.image_statistics(z, 8, 1e-5, alone, **options)
            arguments = (statistics, vector, vector)
            image_group_norm.image_group_norm(z, *arguments, both, output=output, **options)
            options = {**options, "norm_sums": norm_sums, "bias_sums": bias_sums, "stored": stored}
            image_group_norm.image_group_norm_backward(z, z, *arguments, alone, input_gradient=z, **options)

    kernels = compile_launches(launch, arch)
    assert len(kernels) == 2 * 6
    assert_fit_without_spills(kernels)


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
@by_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("channels", [(CHANNELS, CHANNELS), (37, 44)], ids=["target", "odd"])
def test_convolution(channels, dtype, format, arch):
    """Of either format, with statistics and without."""
    in_channels, out_channels = channels
    input = images(dtype, format, channels=in_channels)
    output = images(dtype, channels=out_channels, size=SIZE + 2)
    config = ConvolutionConfig.fit(*channels)
    tiles = config.tiles((SIZE + 2) ** 2)
    weight = torch.empty(3, 3, out_channels, in_channels, dtype=dtype, device=META)

    def launch():
        for partials in (None, PartialStatistics.empty(SAMPLES, tiles, out_channels, META)):
            convolution.convolution(
                input,
                weight,
                vectors(dtype, out_channels),
                direct_convolution.forward_convolution(GEOMETRY),
                config,
                output=output,
                partials=partials,
                activation=GELU_OF[dtype],
                input_precision=FLOAT32_INPUT_PRECISION,
            )

    kernels = compile_launches(launch, arch)
    assert len(kernels) == 2
    # Rows at no multiple of 16 bytes come element by element: each has an address and a mask of its own.
    assert_fit_without_spills(kernels, allowed_spill=0 if channels == (CHANNELS, CHANNELS) else 16)
    for kernel in kernels:
        assert any(instruction in kernel.ptx for instruction in MATRIX_INSTRUCTIONS), kernel.name


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
            activation=GELU_OF[dtype] if self.statistics else IDENTITY,
        )


@with_copies
@pytest.mark.parametrize(
    "problem",
    [
        HopperConvolution(),
        HopperConvolution(statistics=False),
        HopperConvolution(bias=False),
        HopperConvolution(format=CONTIGUOUS, out_size=SIZE),
        # The input's gradient, as L19 calls it.
        HopperConvolution(out_size=SIZE, statistics=False, bias=False),
        HopperConvolution(format=CONTIGUOUS, out_size=SIZE, statistics=False, bias=False),
        # What tests/test_gpu.py launches.
        HopperConvolution(StrideOneConvolution((2, 3), (1, 1), (0, 0)), 40, 72),
        HopperConvolution(StrideOneConvolution((3, 2), (2, 1), (0, 0)), 40, 72),
        HopperConvolution(StrideOneConvolution((3, 3), (2, 2), (0, 0))),
        HopperConvolution(StrideOneConvolution((1, 1), (1, 1), (0, 0)), 128, 64),
        HopperConvolution(StrideOneConvolution((1, 5), (1, 1), (0, 0))),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_convolution_hopper(problem, dtype):
    (kernel,) = compile_launches(lambda: problem.launch(dtype), 90)
    assert_multiplies_as_hopper_does(kernel, EPILOGUE_SPILLS[dtype] if problem.statistics else 0)


@with_copies
@pytest.mark.parametrize("problem", [HopperConvolution(format=CONTIGUOUS), HopperConvolution(out_channels=44)], ids=str)
def test_convolution_hopper_without_staging(problem):
    """Rows and channels of any number, which the copy engine does not take: float32 is stored thread by thread."""
    (kernel,) = compile_launches(lambda: problem.launch(torch.float32), 90)
    assert_multiplies_as_hopper_does(kernel)


@with_copies
@by_short_dtype
@pytest.mark.parametrize("accumulate", [False, True], ids=["first", "accumulate"])
@pytest.mark.parametrize("columns", [8, 16, 32])
@pytest.mark.parametrize("kernel_size", [(1, 1), (2, 3), (3, 2), (3, 3)], ids=str)
def test_weight_gradient_hopper(kernel_size, columns, accumulate, dtype):
    def launch():
        input = torch.empty(SAMPLES, SIZE, SIZE, CHANNELS, dtype=dtype, device=META)
        gradient = torch.empty(SAMPLES, SIZE + 2, SIZE + 2, CHANNELS, dtype=dtype, device=META)
        config = weight_gradient_hopper.WeightGradientConfig(columns)
        taps = (kernel_size, (1, 1))
        assert weight_gradient_hopper.supports(input, gradient, *taps, config)
        partials = torch.empty(weight_gradient_hopper.partials_shape(input, gradient, kernel_size), device=META)
        weight_gradient_hopper.convolution_weight_gradient(
            input,
            gradient,
            partials,
            input_first=0,
            gradient_first=0,
            count=SAMPLES,
            kernel_size=kernel_size,
            dilation=(1, 1),
            shift=(-2, -2),
            accumulate=accumulate,
            config=config,
        )

    (kernel,) = compile_launches(launch, 90)
    assert_multiplies_as_hopper_does(kernel)


@by_architecture
@by_format
@by_short_dtype
def test_direct_convolution(dtype, format, arch):
    """Forward and backward at the target size: on Hopper by its own kernels, elsewhere by the portable one."""
    check_direct_convolution(dtype, format, arch, arch == 90 and hopper.has_copies())


@with_copies
@by_format
def test_direct_convolution_of_float32(format):
    check_direct_convolution(torch.float32, format, 90, True)


def check_direct_convolution(dtype, format, arch, on_hopper):
    input = images(dtype, format)
    weight = torch.empty(CHANNELS, CHANNELS, 3, 3, dtype=dtype, device=META)

    def forward():
        assert direct_convolution.takes(input, weight, GEOMETRY, True)
        z, partials = direct_convolution.forward(input, weight, vectors(dtype), GEOMETRY, GELU_OF[dtype])
        assert z.shape == (SAMPLES, CHANNELS, SIZE + 2, SIZE + 2) and z.stride(1) == 1
        assert direct_convolution.differentiates(z, input, GEOMETRY) == on_hopper

    def backward():
        z = images(dtype, size=SIZE + 2)
        gradients = direct_convolution.backward(lambda *_: None, z, input, weight, GEOMETRY, (True, True))
        for gradient, of in zip(gradients, (input, weight), strict=True):
            assert gradient.shape == of.shape and gradient.stride() == of.stride()

    for launch in (forward, backward) if on_hopper else (forward,):
        kernels = compile_launches(launch, arch)
        specialised = [kernel for kernel in kernels if "cp.async.bulk.tensor" in kernel.ptx]
        assert bool(specialised) == on_hopper
        for kernel in specialised:
            assert_multiplies_as_hopper_does(kernel, EPILOGUE_SPILLS[dtype] if launch is forward else 0)
        if others := [kernel for kernel in kernels if kernel not in specialised]:
            assert_fit_without_spills(others)


@by_architecture
def test_float32_is_direct_on_hopper_alone(arch):
    input, weight = images(torch.float32), torch.empty(CHANNELS, CHANNELS, 3, 3, device=META)
    taken = answer(lambda: direct_convolution.takes(input, weight, GEOMETRY, True), arch)
    assert taken == (arch == 90 and hopper.has_copies())


def answer(question, arch):
    """What a question of what is supported answers on this architecture."""
    answers = []
    compile_launches(lambda: answers.append(question()), arch)
    return answers[0]


@with_copies
@by_architecture
def test_kernels_for_hopper_are_for_it_alone(arch):
    taps, config = direct_convolution.forward_convolution(GEOMETRY), weight_gradient_hopper.WeightGradientConfig()
    input, output = images(torch.bfloat16), images(torch.bfloat16, size=SIZE + 2)
    nhwc = input.permute(0, 2, 3, 1), output.permute(0, 2, 3, 1)
    assert answer(lambda: convolution_hopper.supports(input, output, taps), arch) == (arch == 90)
    assert answer(lambda: weight_gradient_hopper.supports(*nhwc, (3, 3), (1, 1), config), arch) == (arch == 90)


#: What is wrong with each: (input, output, taps) of a convolution.
UNSUPPORTED_CONVOLUTIONS = {
    "contiguous input": (images(torch.bfloat16, CONTIGUOUS), images(torch.bfloat16), GEOMETRY),
    "odd channels in": (images(torch.bfloat16, channels=37), images(torch.bfloat16), GEOMETRY),
    "odd channels out": (images(torch.bfloat16), images(torch.bfloat16, channels=44), GEOMETRY),
    "odd rows out": (images(torch.bfloat16), images(torch.bfloat16, CONTIGUOUS, size=SIZE + 2), GEOMETRY),
    "two dtypes": (images(torch.bfloat16), images(torch.float32), GEOMETRY),
    "odd channels in, float32": (images(torch.float32, channels=38), images(torch.float32), GEOMETRY),
    "more weights than fit": (images(torch.bfloat16, channels=512), images(torch.bfloat16), GEOMETRY),
    "more weights than fit, float32": (images(torch.float32, channels=128), images(torch.float32), GEOMETRY),
    "taps too far apart": (
        images(torch.bfloat16),
        images(torch.bfloat16),
        dataclasses.replace(GEOMETRY, dilation=(9, 1)),
    ),
    "no samples": (images(torch.bfloat16, samples=0), images(torch.bfloat16, samples=0), GEOMETRY),
}


@pytest.mark.parametrize("name", UNSUPPORTED_CONVOLUTIONS)
def test_what_the_convolution_for_hopper_refuses(name):
    input, output, geometry = UNSUPPORTED_CONVOLUTIONS[name]
    taps = direct_convolution.forward_convolution(geometry)
    assert not answer(lambda: convolution_hopper.supports(input, output, taps), 90)


@pytest.mark.parametrize(
    "changes",
    [
        {"channels": 37},
        {"out_channels": 44},
        {"dtype": torch.float32},
        {"gradient_dtype": torch.float16},
        {"kernel_size": (4, 3)},
        {"kernel_size": (1, 5)},
        {"dilation": (20, 20)},
        {"samples": 0},
    ],
    ids=str,
)
def test_what_the_weight_gradient_for_hopper_refuses(changes):
    problem = {
        "channels": CHANNELS,
        "out_channels": CHANNELS,
        "dtype": torch.bfloat16,
        "kernel_size": (3, 3),
        "dilation": (1, 1),
        "samples": SAMPLES,
        **changes,
    }
    input = images(problem["dtype"], channels=problem["channels"], samples=problem["samples"])
    dtype = problem.get("gradient_dtype", problem["dtype"])
    gradient = images(dtype, channels=problem["out_channels"], samples=problem["samples"], size=SIZE + 2)
    nhwc = input.permute(0, 2, 3, 1), gradient.permute(0, 2, 3, 1)
    taps = problem["kernel_size"], problem["dilation"]
    config = weight_gradient_hopper.WeightGradientConfig(columns=32)
    assert not answer(lambda: weight_gradient_hopper.supports(*nhwc, *taps, config), 90)
