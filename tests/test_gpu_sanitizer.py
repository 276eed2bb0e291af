"""Promise: no kernel, in any dtype and memory layout that it has, touches memory that is not its own.

Small calls, each once, without the plain chains that other tests compare with, for compute-sanitizer:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1  # else a tensor's neighbours in PyTorch's pool hide what is beyond its end
    compute-sanitizer --tool memcheck --error-exitcode 1 python -m pytest -m gpu tests/test_gpu_sanitizer.py

With Triton 3.9 add ``--report-api-errors no``: its loader asks for an attribute of functions that Hopper does not have,
and goes on without.

The last test says which kernels were launched with which dtypes, and that none of the project's is missing.
"""

import importlib
import itertools
import os
from pkgutil import iter_modules

import pytest
import torch
import triton

import triton_kernels
from autotune_configs import gpus
from ops import precision, products
from ops.calls import parse
from tests import gpu
from tests.accuracy import run
from tests.chains import (
    BIAS_HARDTANH_MISH,
    DTYPES,
    L19,
    L30,
    L75,
    L94,
    LINEAR_CHAINS,
    NORMS,
    Problem,
    chain_id,
    with_layout,
)
from tests.gpu import DEVICE, arguments_of
from triton_kernels.copies import copy_all
from triton_kernels.grouped_products import multiply_all
from triton_kernels.hopper import runs_hopper_kernels
from triton_kernels.max_pool import PooledAxis, max_pool_backward
from triton_kernels.narrow_convolution import narrow_convolution
from triton_kernels.narrow_weight_gradient import ConvolvedAxis, narrow_weight_gradient

pytestmark = [*gpu.MARKS, pytest.mark.usefixtures("poisoned_memory")]


@pytest.fixture(autouse=True)
def products_of_few_results(monkeypatch):
    """Kernels compute them too, as large ones take minutes here."""
    monkeypatch.setattr(gpus, "FEWEST_FLOAT32_COLUMNS", 0)
    monkeypatch.setattr(gpus, "FEWEST_FLOAT32_RESULTS", 0)


FORMATS = (torch.contiguous_format, torch.channels_last)
#: Kernels that run on some GPUs alone, as their names begin.
HOPPER = (
    "float32_split.",
    "float32_block_split.",
    "linear_split_hopper.",
    "linear_registers_hopper.",
    "linear_registers_finish.",
    "linear.linear_rest_kernel",
    "convolution_hopper.",
    "weight_gradient_hopper.",
)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
by_precision = pytest.mark.parametrize(
    "dtype, precision",
    [(torch.bfloat16, "highest"), (torch.float16, "highest"), (torch.float32, "highest"), (torch.float32, "high")],
    ids=["bfloat16", "float16", "float32", "float32-high"],
)
by_format = pytest.mark.parametrize("format", FORMATS, ids=str)


def name_of(kernel):
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


@pytest.fixture(scope="module")
def launched():
    """Each kernel's name with the dtypes of the tensors that it was given."""
    return {}


@pytest.fixture(autouse=True)
def noted(launched, monkeypatch):
    run = triton.runtime.JITFunction.run  # in every thread: autograd's launch kernels too

    def note(kernel, *arguments, **options):
        dtypes = {str(each.dtype).removeprefix("torch.") for each in tensors_in(arguments)}
        launched.setdefault(name_of(kernel), set()).update(dtypes)
        return run(kernel, *arguments, **options)

    monkeypatch.setattr(triton.runtime.JITFunction, "run", note)


def tensors_in(arguments):
    for each in arguments:
        if isinstance(each, tuple):
            yield from tensors_in(each)
        elif isinstance(each, torch.Tensor) or hasattr(each, "block_shape"):  # or a descriptor of one
            yield getattr(each, "base", each)


def run_both_ways(function, arguments):
    """In training and in inference; what was never written shows as NaN."""
    with torch.no_grad():
        output = function(**arguments)
    results = run(function, arguments, torch.randn_like(output))
    for name, result in {**results, "inference": output}.items():
        assert result.isfinite().all(), name


def linear_arguments(chain, problem, dtype, layout="contiguous"):
    arguments = arguments_of(chain, problem, dtype)
    return {**arguments, **{name: with_layout(arguments[name], layout) for name in ("input", "weight")}}


@by_precision
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "misaligned"])
@pytest.mark.parametrize("chain", LINEAR_CHAINS, ids=chain_id)
def test_products(chain, layout, dtype, precision):
    """Tensor descriptors in both orders, and pointers; in float32 as many rows and terms as the kernels take.

    So many groups have L75's gradients in kernels of their own.
    """
    torch.set_float32_matmul_precision(precision)
    size = 520 if dtype == torch.float32 else 40
    run_both_ways(chain.function, linear_arguments(chain, Problem(size, size, 18, 16), dtype, layout))


@pytest.mark.parametrize("chain", [L94, L75, L30], ids=chain_id)
def test_products_as_tf32(chain):
    """Large enough for one float16 part a product."""
    torch.set_float32_matmul_precision("high")
    run_both_ways(chain.function, linear_arguments(chain, Problem(1024, 4096, 256, 16), torch.float32))


@pytest.mark.parametrize("chain", [L94, L75, L30], ids=chain_id)
def test_products_that_float16_cannot_hold(chain):
    """Tiles that are done again as TF32, as their rows have elements too far apart."""
    arguments = linear_arguments(chain, Problem(520, 520, 6, 16), torch.float32)
    arguments["input"][3, ::2] *= 2.0**-40
    run_both_ways(chain.function, arguments)


@gpu.on_hopper
def test_products_of_sections():
    """As a weight's gradient; one row of it is left."""
    rows, columns, depth = 520, 140, 1100
    input, other = torch.randn(depth, rows, device=DEVICE).T, torch.randn(depth, columns, device=DEVICE)
    input[3, ::2] *= 2.0**-40
    result = products.multiply(input, other, (rows, columns))
    torch.testing.assert_close(result.double(), input.double() @ other.double(), rtol=1e-5, atol=1e-4)


@gpu.on_hopper
@pytest.mark.parametrize("order", ["depth", "rows"])
@pytest.mark.parametrize("size", [(17, 516, 1036), (100, 1000, 520)], ids=str)
def test_products_of_few_rows(size, order, monkeypatch):
    """Whose weight is split in registers; one row of it is left."""
    monkeypatch.setattr(gpus, "FEWEST_WEIGHTS", 0)
    rows, columns, depth = size
    input, bias = torch.randn(rows, depth, device=DEVICE), torch.randn(columns, device=DEVICE)
    weight = with_layout(
        torch.randn(columns, depth, device=DEVICE), {"depth": "contiguous", "rows": "transposed"}[order]
    )
    weight[3, ::2] *= 2.0**-40
    assert precision.rows_in_registers(input, weight) == 1
    result = products.affine(input, weight, (bias,), (rows, columns))
    expected = input.double() @ weight.double().T + bias
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-4)


@by_dtype
@pytest.mark.parametrize("groups, group_size", [(5, 10), (3, 1), (2, 300), (1, 8200)], ids=str)
@pytest.mark.parametrize("chain", [L94, L75, L30], ids=chain_id)
def test_groups(chain, groups, group_size, dtype):
    """Groups that no tile holds, of one channel, and wider than a program takes; no size is a multiple of anything."""
    run_both_ways(chain.function, arguments_of(chain, Problem(35, 21, groups, group_size), dtype))


@by_dtype
@pytest.mark.parametrize("pixels", [(), (5, 3), (41, 37)], ids=str)
@pytest.mark.parametrize("chain", [*NORMS, BIAS_HARDTANH_MISH], ids=chain_id)
def test_blocks(chain, pixels, dtype):
    run_both_ways(chain.function, arguments_of(chain, Problem(5, 1, 3, 4, pixels=pixels), dtype))


#: Of 64 channels, which Hopper's kernels take as they are; of few and odd ones; and what cuDNN convolves.
CONVOLUTIONS = {
    "8-32-3x3": (Problem(2, 8, 8, 4, pixels=(20, 24)), {}),
    "64-64-3x3": (Problem(4, 64, 8, 8, pixels=(64, 72)), {}),
    "40-72-2x3": (Problem(2, 40, 9, 8, pixels=(20, 16), kernel=(2, 3)), {"padding": (1, 2)}),
    "128-64-1x1": (Problem(2, 128, 8, 8, pixels=(33, 40), kernel=(1, 1)), {"approximate": "tanh"}),
    "odd-channels": (Problem(2, 3, 1, 5, pixels=(7, 5)), {"dilation": (1, 2)}),
    "stride": (Problem(2, 16, 4, 8, pixels=(9, 11)), {"stride": 2, "padding": 1}),
}


@by_dtype
@by_format
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, format, dtype):
    problem, geometry = CONVOLUTIONS[name]
    arguments = {**arguments_of(L19, problem, dtype), **geometry}
    run_both_ways(L19.function, {**arguments, "input": arguments["input"].contiguous(memory_format=format)})


@by_dtype
@by_format
def test_max_pooling(format, dtype):
    """No size is a multiple of anything; windows begin before the image and end behind it."""
    axes = PooledAxis(1, 1, 1, 1, 0), PooledAxis(13, 8, 3, 2, 2), PooledAxis(7, 8, 2, 1, 1)
    gradient = torch.randn(3, 5, 8, 8, device=DEVICE).to(dtype).contiguous(memory_format=format)
    chosen = torch.randint_like(gradient, 6).to(torch.int8)
    target = torch.empty(3, 5, 13, 7, dtype=dtype, device=DEVICE, memory_format=format)
    max_pool_backward(*(each.view(3, 5, -1) for each in (gradient, chosen, target)), axes)
    assert target.isfinite().all()


@pytest.mark.parametrize("target_dtype", DTYPES, ids=chain_id)
@by_dtype
def test_copies(dtype, target_dtype):
    """Of weights in either layout into either; no block is whole but one."""
    shapes = (1, 3, 3, 3), (4, 5, 1, 1), (7, 99, 3, 3), (4096, 1, 1, 1)
    sources, targets = [], []
    for shape, format, target_format in itertools.product(shapes, FORMATS, FORMATS):
        sources.append(torch.randn(shape, device=DEVICE).to(dtype).contiguous(memory_format=format))
        targets.append(torch.empty(shape, dtype=target_dtype, device=DEVICE, memory_format=target_format))
    copy_all(sources, targets)
    assert all(torch.equal(target, source.to(target_dtype)) for source, target in zip(sources, targets, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=chain_id)
def test_grouped_products(dtype):
    """In both tiles and all layouts, of no whole tile, and of sizes that are multiples of nothing."""
    for rows, depth, widths in (3, 48, (16, 80)), (70, 16, (32, 48)), (3, 7, (5, 1, 33)), (17, 65, (65, 3)):
        for turned in itertools.product((False, True), repeat=2):
            matrix, given = torch.randn(rows, depth, device=DEVICE).to(dtype), []
            for is_turned, height in zip(turned, (depth, rows), strict=True):
                shapes = [(width, height) if is_turned else (height, width) for width in widths]
                given.append([torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes])
                given[-1] = [each.T for each in given[-1]] if is_turned else given[-1]
            biases = [each[0].clone() for each in given[0]]
            multiply_all(matrix, given[0], biases, given[1])
            multiply_all(matrix.T.contiguous().T, given[0], [], given[1])
            assert all(each.isfinite().all() for each in given[1])


@by_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=chain_id)
def test_statistics_of_sums(dtype, format):
    """Of images in both formats, no size a multiple of a tile's."""
    first = torch.randn(2, 24, 9, 7, device=DEVICE).to(dtype).contiguous(memory_format=format)
    second, third = torch.randn(2, *first.shape, device=DEVICE).to(dtype)
    text = parse("add tensor -> add tensor -> group_norm(8, 1e-05) -> no mul -> no add").text_in_graph
    assert torch.ops.normfuse.statistics(text, [first, second, third], False).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=chain_id)
def test_narrow_weight_gradients(dtype):
    """Taps begin before the image and end behind it, lines before a tile's end."""
    image, gradient = (
        torch.randn(2, 5, 9, 67, device=DEVICE).to(dtype),
        torch.randn(2, 7, 5, 67, device=DEVICE).to(dtype),
    )
    image, gradient = (each.contiguous(memory_format=torch.channels_last) for each in (image, gradient))
    axes = ConvolvedAxis(1, 1), ConvolvedAxis(9, 5, 3, 2, 1), ConvolvedAxis(67, 67, 3, 1, 1)
    target = torch.empty(7, 9, 5, dtype=dtype, device=DEVICE)
    narrow_weight_gradient(gradient.flatten(2), image.flatten(2), target, axes)
    assert target.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=chain_id)
@pytest.mark.parametrize("channels", [3, 8, 12])
def test_narrow_convolutions(channels, dtype):
    """Taps begin before the image and end behind it, pixels before a tile's end."""
    image = torch.randn(2, 9 * 67, channels, device=DEVICE).to(dtype)
    weight = torch.randn(9 * channels, 7, device=DEVICE).to(dtype)
    axes = ConvolvedAxis(1, 1), ConvolvedAxis(9, 5, 3, 2, 1), ConvolvedAxis(67, 67, 3, 1, 1)
    target = torch.empty(2 * 5 * 67, 7, dtype=dtype, device=DEVICE)
    narrow_convolution(image, weight, target, axes)
    assert target.isfinite().all()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="each of several processes launches a part")
def test_no_kernel_is_missing(launched):
    """Prints what was launched (pytest -rP)."""
    for name in sorted(launched):
        print(f"{name}: {', '.join(sorted(launched[name]))}")
    modules = [importlib.import_module(f"triton_kernels.{each.name}") for each in iter_modules(triton_kernels.__path__)]
    kernels = {name_of(each) for module in modules for each in vars(module).values() if is_kernel(each)}
    device = torch.device(DEVICE, torch.cuda.current_device())
    elsewhere = () if runs_hopper_kernels(device) else HOPPER
    missing = {name for name in kernels - set(launched) if not name.startswith(elsewhere)}
    assert not missing


def is_kernel(value):
    return isinstance(value, triton.runtime.JITFunction) and value.fn.__name__.endswith("_kernel")
