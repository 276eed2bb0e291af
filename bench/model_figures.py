"""What one process finds out about a model: the costs of one way to run it, or the times of several, interleaved."""

import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bench.model_ways import listening, prepare
from bench.model_zoo import MODELS, SETTINGS, Problem, make_problem
from bench.recording import reason
from bench.schema import GRAPHS, KINDS, KernelTimes
from bench.timing import device_clock, median_ratio, time_loops, time_rounds

#: Until all is compiled, tuned and captured.
_WARM_UP_STEPS = 4
#: Cycles that the device waits ahead of a step, 0.2 s: the host needs tens of milliseconds for some. Behind a shorter
#: wait the device runs dry within the step.
_WAIT = 400_000_000
#: Bytes of the tensor by whose copy the memory's speed is measured.
_COPIED = 1 << 30
#: Parameters whose gradient is smaller than this share of a usual one's are not asked for the worst error: that of a
#: bias before a norm is zero but for rounding.
_LEAST_GRADIENT = 1e-3


@dataclass(frozen=True)
class Cell:
    """A model in one setting and memory format, on a device."""

    model: str
    setting: str
    memory_format: str | None
    device: str
    tiny: bool = False

    @property
    def mode(self) -> str:
        return SETTINGS[self.setting][0]

    @property
    def dtype(self) -> str:
        return SETTINGS[self.setting][1]

    @property
    def shape(self) -> str:
        return MODELS[self.model].tiny_shape if self.tiny else MODELS[self.model].shape

    @property
    def identity(self) -> dict[str, Any]:
        """What rows have of it."""
        of_row = {"chain": self.model, "product": MODELS[self.model].library, "shape": self.shape}
        return of_row | {"dtype": self.dtype, "mode": self.mode, "memory_format": self.memory_format}

    def make_problem(self) -> Problem:
        return make_problem(MODELS[self.model], self.setting, self.memory_format, torch.device(self.device), self.tiny)


class Step:
    """A step: the forward pass alone, or with the backward pass, which leaves the parameters' gradients."""

    def __init__(self, cell: Cell, way: str, problem: Problem):
        self.problem, self._cell, self._way = problem, cell, way
        self._function: Callable | None = None
        self._gradient: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._cell.mode == "training":
            self.problem.model.zero_grad(set_to_none=True)
        output = self.forward()
        if self._cell.mode == "training":
            output.backward(self._output_gradient(output))
        return output.detach()

    def forward(self) -> Tensor:
        """Without the backward pass."""
        if self._function is None:
            self._function = prepare(self._way, self.problem.model, torch.device(self._cell.device))
        if self._way.endswith(GRAPHS):
            torch.compiler.cudagraph_mark_step_begin()
        autocast = torch.autocast(self._cell.device, torch.bfloat16, enabled=self._cell.dtype == "autocast")
        with torch.set_grad_enabled(self._cell.mode == "training"), autocast:
            output = self._function(*self.problem.inputs)
            return output if isinstance(output, Tensor) else output[0]

    def _output_gradient(self, output: Tensor) -> Tensor:
        """The same values, of few bits, for every dtype, with the output's strides. Drawn once."""
        if self._gradient is None:
            torch.manual_seed(1)
            drawn = torch.randn(output.shape).bfloat16()
            self._gradient = torch.empty_like(output, requires_grad=False).copy_(drawn)
        return self._gradient

    def values(self, output: Tensor) -> dict[str, dict[str, Tensor]]:
        """The output, and the gradients by parameter, on the CPU."""
        named = self.problem.model.named_parameters() if self._cell.mode == "training" else ()
        gradients = {name: each.grad.cpu() for name, each in named if each.grad is not None}
        return {"output": {"": output.cpu()}} | ({"gradients": gradients} if gradients else {})


# The costs of one way


def costs(cell: Cell, way: str) -> dict[str, Any]:
    """First call, memory, errors, and what this project took over: fields of a row's ``WayFigures``."""
    synchronize = torch.cuda.synchronize if cell.device == "cuda" else lambda: None
    expected = _expected(cell)
    step = Step(cell, way, cell.make_problem())
    synchronize()
    with listening() as taken:
        start = time.perf_counter()
        output = step()
        synchronize()
        first_call_s = time.perf_counter() - start
        for _ in range(_WARM_UP_STEPS):
            output = step()
    found: dict[str, Any] = {"errors": errors(step.values(output), expected)}
    if way.startswith("normfuse"):
        found |= {"chains": len(taken.chains), "open_norms": len(taken.open_norms)}
    elif way == "fuse":
        found["chains"] = _fused_chains(step.problem.model)
    del output
    if cell.mode == "training" and not way.endswith(GRAPHS):  # a graph's tensors are all there all the time
        found["saved_mb"] = saved_bytes(step) / 1e6
    if cell.device == "cuda":
        step.problem.model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step()
        found |= {"first_call_s": first_call_s, "peak_mb": torch.cuda.max_memory_allocated() / 1e6}
    return found


def _fused_chains(model: nn.Module) -> int:
    from ops.fuse import FusionReport

    return len(FusionReport(model).chains)


def _expected(cell: Cell) -> dict[str, dict[str, Tensor]]:
    """The values of the model as it is written, in float32 without TF32; for a float32 model, in float64."""
    dtype = torch.float64 if cell.dtype == "float32" else torch.float32
    given = cell.make_problem()

    def precise(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    problem = Problem(given.model._apply(precise), tuple(map(precise, given.inputs)))
    setting = "float32" if cell.mode == "training" else "inference"  # without autocast
    step = Step(Cell(cell.model, setting, None, cell.device), "eager", problem)
    with _no_tf32():
        values = step.values(step())
    step.problem.model.zero_grad(set_to_none=True)
    del step, problem, given
    gc.collect()
    if cell.device == "cuda":
        torch.cuda.empty_cache()
    return values


@contextmanager
def _no_tf32() -> Iterator[None]:
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, convolution.allow_tf32
    matmul.allow_tf32 = convolution.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = before


def errors(
    values: Mapping[str, Mapping[str, Tensor]], expected: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, tuple[float, float]]:
    """Of the output and of the gradients, in float64: the norm of the error over that of the values, all tensors
    together; and the worst: of an output the largest difference over the largest value, of gradients the first ratio
    of the parameter where it is largest."""
    found = {}
    for name, tensors in expected.items():
        got = {key: values[name][key].double() for key in tensors}
        right = {key: tensor.double() for key, tensor in tensors.items()}
        of_error = {key: (got[key] - right[key]).norm().item() for key in right}
        of_value = {key: tensor.norm().item() for key, tensor in right.items()}
        whole = _norm(of_error.values()) / _norm(of_value.values())
        if name == "output":
            worst = (got[""] - right[""]).abs().max().item() / right[""].abs().max().item()
        else:
            size = {key: of_value[key] / tensor.numel() ** 0.5 for key, tensor in right.items()}
            least = _LEAST_GRADIENT * statistics.median(size.values())
            worst = max(of_error[key] / of_value[key] for key in right if size[key] > least)
        found[name] = (whole, worst)
    return found


def _norm(parts: Iterable[float]) -> float:
    return sum(part * part for part in parts) ** 0.5


def saved_bytes(step: Step) -> int:
    """What the forward pass saves for the backward pass, each storage once; not parameters, buffers and inputs."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    step.problem.model.zero_grad(set_to_none=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step.forward()
    model = step.problem.model
    for tensor in (*model.parameters(), *model.buffers(), *step.problem.inputs):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


# The times of several ways


def times(cell: Cell, ways: Iterable[str], rounds: int) -> dict[str, Any]:
    """By way, fields of ``WayFigures``; and with what the bytes of the norms allow, fields of ``ModelRow``."""
    limits = ("recompile_limit", "accumulated_recompile_limit")  # beyond them, Dynamo runs another way's code
    with torch._dynamo.config.patch(dict.fromkeys(limits, 1 << 20)):
        return _times(cell, ways, rounds)


def _times(cell: Cell, ways: Iterable[str], rounds: int) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for way in ways:
        try:
            step = Step(cell, way, cell.make_problem())
            for _ in range(_WARM_UP_STEPS):
                step()
            torch.cuda.synchronize()
            steps[way] = step
        except Exception as error:
            found[way] = {"failure": reason(error)}
    gc.collect()
    device = torch.device(cell.device)
    clock = device_clock(device, _WAIT)
    on_device = time_rounds(steps, rounds, clock)
    _, wall = time_loops(steps, torch.cuda.synchronize)
    for way, step in steps.items():
        over = {other: (median_ratio(on_device, way, other), median_ratio(wall, way, other)) for other in steps}
        found[way] = {
            "us": statistics.median(on_device[way]),
            "wall_us": statistics.median(wall[way]),
            "over": {other: ratios for other, ratios in over.items() if other != way},
            "kernels": {kind: asdict(times) for kind, times in by_kind(_profile(step)).items()},
        }
    copy_bytes_us = _copy_speed(clock, device)
    norms = norm_bytes(cell) / copy_bytes_us
    return {"ways": found, "rounds": rounds, "norms_us": norms, "copy_gb_s": copy_bytes_us / 1e3}


def _copy_speed(clock: Callable, device: torch.device) -> float:
    """Bytes that a copy of a large tensor reads and writes, in a microsecond."""
    source = torch.zeros(_COPIED, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * _COPIED / statistics.median(clock(lambda: copy.copy_(source)) for _ in range(5))


class _NormElements(TorchFunctionMode):
    """Counts the elements that norms read."""

    def __init__(self, norms: tuple[str, ...]) -> None:
        super().__init__()
        self.norms, self.elements = norms, 0

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if getattr(function, "__name__", "") in self.norms:
            image = arguments[0] if arguments else options["input"]
            self.elements += image.numel()
        return function(*arguments, **options)


def norm_bytes(cell: Cell) -> int:
    """What the norms of a step must move: forward an image is read twice and written once; backward, it and its
    gradient are read twice and the input's gradient written. A batch norm in inference is a scale, and moves nothing
    by itself."""
    problem, training = cell.make_problem(), cell.mode == "training"
    norms = ("group_norm", "layer_norm", "instance_norm", "rms_norm", *(["batch_norm"] if training else []))
    with _NormElements(norms) as counted, torch.no_grad():
        problem.model(*problem.inputs)
    size = 4 if cell.dtype == "float32" else 2
    return counted.elements * size * (8 if training else 3)


def _profile(step: Callable[[], Any]) -> list[tuple[str, float]]:
    """The kernels of a step, and copies by the driver: name and microseconds. Empty where profiling is forbidden."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        events = [each for each in profiler.events() if each.device_type == torch.autograd.DeviceType.CUDA]
        kernels = [each for each in events if not getattr(each, "is_user_annotation", False)]
        return [(each.name, each.time_range.elapsed_us()) for each in kernels]
    except RuntimeError as error:
        print(f"no profile: {error}", file=sys.stderr)
        return []


#: What the names of a kind's kernels match; the first that does counts, and ours stand between.
_NAMES = {
    "Inductor's": r"^triton_",
    "copy": r"memcpy|copy|nchwtonhwc|nhwctonchw|converttensor|generictranspose",
    "ours": "",
    "attention": r"flash|fmha|attention|mha_|sdpa",
    "convolution": r"cudnn|conv|fprop|dgrad|wgrad|winograd|implicit",
    "product": r"gemm|gemv|nvjet|cublas|cutlass|splitk",
}
assert {*_NAMES, "other"} == set(KINDS)


def kind_of(kernel: str, ours: set[str]) -> str:
    """Which of ``KINDS`` a kernel is of, by its name."""
    for kind, pattern in _NAMES.items():
        if kernel in ours if kind == "ours" else re.search(pattern, kernel.lower()):
            return kind
    return "other"


def by_kind(kernels: Iterable[tuple[str, float]]) -> dict[str, KernelTimes]:
    """The time and number of the kernels of each kind."""
    ours = our_kernels()
    kinds: dict[str, list[float]] = {}
    for name, us in kernels:
        kinds.setdefault(kind_of(name, ours), []).append(us)
    return {kind: KernelTimes(sum(kinds[kind]), len(kinds[kind])) for kind in KINDS if kind in kinds}


def our_kernels() -> set[str]:
    """The names of this project's kernels, of those modules that were imported."""
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith("triton_kernels")]
    values = [value for module in modules for value in vars(module).values()]
    return {value.__name__ for value in values if isinstance(value, JITFunction)}


#: Each way's first call, memory and errors, in a process of its own; and all ways' times, in one process.
PARTS: dict[str, Callable[..., dict[str, Any]]] = {"costs": costs, "times": times}


def main(words: list[str]) -> None:
    """The process: ``python -m bench.model_figures CELL PART MORE`` prints one line of JSON; CELL and MORE are JSON."""
    cell, part, more = Cell(**json.loads(words[0])), words[1], json.loads(words[2])
    try:
        found = PARTS[part](cell, **more)
    except Exception as error:
        found = {"failure": reason(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
