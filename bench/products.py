"""``python -m bench products``: float32 products without a chain, beside what else computes them."""

import statistics
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from autotune_configs.command_line import Parser, positive
from bench.cells import Call
from bench.columns import PRODUCTS, console_table, number
from bench.compositions import attribute
from bench.recording import Recording, has_gpu
from bench.schema import OURS, ProductFigures, ProductRow
from bench.sizes import FORMS, MATRICES, sizes_of
from bench.timing import device_clock, median_ratio, time_rounds, warm_up

_BATCHES, _FEATURES = "16,64,128,256,512,1024,4096,8192", "512,2048,8192"
#: A result with a larger error is no float32 result.
_LARGEST_ERROR = 1e-6

Tensor = torch.Tensor


def _numbers(text: str) -> list[int]:
    return [positive(each) for each in text.split(",")]


def _shapes(text: str) -> list[str]:
    """Of products of batches."""
    found = list(filter(None, text.split(",")))
    for each in found:
        if len(list(map(positive, each.split("x")))) != 4:
            raise ArgumentTypeError(f"{each!r} is not {FORMS['batch']}")
    return found


def main(arguments: list[str], prog: str) -> int:
    parser = Parser(
        prog=prog,
        description='Time ops.linear without steps and ops.bmm for float32 at the precision "highest", and the same by '
        "cuBLAS in float32 (cublas), TF32 (tf32) and bfloat16, and by Triton as three TF32 products (tf32x3, of one "
        "matrix). Errors are against "
        "float64, of normally distributed numbers and of positive ones. Needs a GPU. Exit status: 0, 1 if ours is "
        "wrong, 2 for a bad argument or without a GPU.",
    )
    parser.add_argument("--batches", type=_numbers, default=_BATCHES, help="rows of the input")
    parser.add_argument("--features", type=_numbers, default=_FEATURES, help="in and out, each with every batch")
    matrices = f"products of batches, {FORMS['batch']}"
    parser.add_argument("--matrices", type=_shapes, default=",".join(MATRICES), help=matrices)
    parser.add_argument("--rounds", type=positive, default=20, help="timed calls of each, interleaved")
    parser.add_argument("--output", type=Path, metavar="FILE", help="keep the rows here, as JSON Lines, as they come")
    options = parser.parse_args(arguments)
    if not has_gpu():
        parser.error("needs a GPU")
    device = torch.device("cuda")
    shapes = [f"{batch}x{features}x{features}" for features in options.features for batch in options.batches]
    shapes += options.matrices
    recording = Recording(options.output, "products", device, show, len(shapes))
    clock = device_clock(device)
    return recording.run(shapes, partial(measure, device=device, rounds=options.rounds, clock=clock), _summary)


def measure(shape: str, device: torch.device, rounds: int, clock: Callable[[Call], float]) -> ProductRow:
    """Errors first; where ours is wrong, nothing is timed."""
    *matrices, rows, terms, columns = sizes_of(shape)
    product = "batch" if matrices else "GEMM"
    row = ProductRow(
        chain="linear",
        product=product,
        shape=shape,
        dtype="float32",
        precision="highest",
        mode="forward",
        rounds=rounds,
    )
    generator = torch.Generator(device).manual_seed(rows + terms + columns)

    def draw(rows: int) -> Tensor:
        return torch.randn(*matrices, rows, terms, device=device, generator=generator)

    with torch.no_grad(), _fp32_precision("ieee"):
        input, weight = draw(rows), draw(columns)
        above = input.abs(), weight.abs()
        calls = _calls(input, weight)
        errors, positive = _errors(calls, input, weight), _errors(_calls(*above), *above)
        ways = {
            name: ProductFigures(error=errors[name][0], positive_error=positive[name][0], bias=positive[name][1])
            for name in calls
        }
        if not all(error <= _LARGEST_ERROR for error in (errors[OURS][0], positive[OURS][0])):  # nor where it is NaN
            return replace(row, ways=ways, red=True)
        for call in calls.values():
            warm_up(call)
        times = time_rounds(calls, rounds, clock)
    for name, found in times.items():
        figures = {"us": statistics.median(found), "ours_over": median_ratio(times, OURS, name)}
        ways[name] = replace(ways[name], **figures)
    return replace(row, ways=ways)


def _fp32_precision(name: str) -> AbstractContextManager:
    return attribute(torch.backends.cuda.matmul, "fp32_precision", name)


def _calls(input: Tensor, weight: Tensor) -> dict[str, Call]:
    """By the way's name, of ``PRODUCT_WAYS``."""
    import ops

    ours, theirs = (ops.linear, F.linear) if input.ndim == 2 else (_by_rows(ops.bmm), _by_rows(torch.bmm))
    narrow = input.bfloat16(), weight.bfloat16()

    def tf32() -> Tensor:
        with _fp32_precision("tf32"):
            return theirs(input, weight)

    calls = {OURS: lambda: ours(input, weight), "cublas": lambda: theirs(input, weight)}
    if input.ndim == 2:
        calls["tf32x3"] = _tf32x3(input, weight)
    return calls | {"tf32": tf32, "bfloat16": lambda: theirs(*narrow)}


def _by_rows(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A product of batches, of which the second has its matrices' columns as rows."""
    return lambda input, weight: product(input, weight.mT)


def _tf32x3(input: Tensor, weight: Tensor) -> Call:
    from autotune_configs import linear_config
    from triton_kernels.chains import LINEAR
    from triton_kernels.linear import linear

    (M, K), N = input.shape, len(weight)
    config = linear_config(LINEAR.kernel, torch.float32, M, N, K, 1, input.device, None)

    def tf32x3() -> Tensor:
        output = torch.empty(M, N, device=input.device)
        linear(input, weight, LINEAR, config, [None], output=output, input_precision="tf32x3")
        return output

    return tf32x3


def _errors(calls: Mapping[str, Call], input: Tensor, weight: Tensor) -> dict[str, tuple[float, float]]:
    """By the way's name: the norm of the difference from float64 over that of the product, and the mean of the relative
    differences."""
    exact = input.double() @ weight.double().mT
    differences = {name: call().double() - exact for name, call in calls.items()}
    return {
        name: (float(each.norm() / exact.norm()), float((each / exact).mean())) for name, each in differences.items()
    }


def show(rows: Sequence[ProductRow]) -> list:
    shapes = f"{FORMS['GEMM']}, or {FORMS['batch']}"
    caption = f"{shapes}; µs on the device; errors: ours / cuBLAS, of normal and of positive numbers"
    return [console_table("Float32 products at the precision highest", PRODUCTS, rows, caption)]


def _summary(row: ProductRow) -> str:
    ours, cublas = row.way(OURS), row.way("cublas")
    if row.red:
        return f"{row.shape}: wrong: an error of {number(ours.error, '.1e')}, {number(ours.positive_error, '.1e')}"
    return f"{row.shape}: {number(ours.us)} µs, {number(cublas.ours_over, '.2f')} of cuBLAS's {number(cublas.us)}"
