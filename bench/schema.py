"""The lines of a results file as plain data: a header, then each run with the rows that it measured.

Needs neither torch nor msgspec: a GPU machine may lack the one, a reader's machine the other.
"""

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar, Literal, NamedTuple

from bench.chains import CHAINS, FAMILY
from bench.sizes import sizes_of

#: The version of this format, which every file names in its header.
SCHEMA = 1
OURS, BARE = "ours", "bare"
COMPILERS = ("compile", "compile-max")
#: The whole chain as PyTorch has it.
PYTORCH = ("eager", *COMPILERS)
MODES = ("forward", "training")
#: With the forward pass of a training step, which keeps what the backward pass needs.
ALL_MODES = (*MODES, "forward_grad")
#: How a chain is called; the others are compared with the first.
CALLS = EAGER, COMPILED, CAPTURED = "eager", "compile", "graph"

#: How a whole model runs: as written, and by each of the others. Those with CUDA graphs end in ``GRAPHS``.
GRAPHS = "-graphs"
WAYS = ("eager", "fuse", "inductor", "inductor-2.15", "normfuse", f"inductor{GRAPHS}", f"normfuse{GRAPHS}")
#: How a float32 product is computed: by ``ops.linear``, by cuBLAS in float32, by Triton as three TF32 products, and by
#: cuBLAS in TF32 and bfloat16.
PRODUCT_WAYS = (OURS, "cublas", "tf32x3", "tf32", "bfloat16")
#: Kinds of kernels, by their names.
KINDS = ("convolution", "product", "attention", "Inductor's", "ours", "copy", "other")

#: By tensor, ours and PyTorch's; None for NaN or infinity.
Errors = dict[str, tuple[float | None, float | None]]

_ORDER = (*(chain.label for chain in CHAINS.values()), "bfloat16", "float16", "float32", "highest", "high", "medium")
_ORDER += ("contiguous", "channels_last", *ALL_MODES)


@dataclass(frozen=True)
class Header:
    """The first line of a file."""

    schema: int
    #: Which kind of rows follow, one of ``ROWS``.
    experiment: str
    device: str


@dataclass(frozen=True)
class Run:
    """With what the rows below it were measured."""

    date: datetime
    commit: str | None = None
    driver: str | None = None
    torch: str | None = None
    triton: str | None = None

    @property
    def versions(self) -> str:
        names = ("driver", "torch", "triton")
        return ", ".join(f"{name} {version}" for name in names if (version := getattr(self, name)))

    @property
    def state(self) -> str:
        commit, *dirty = (self.commit or "").split("-", 1)
        name = f"commit {'-'.join([commit[:10], *dirty])}" if commit else "an unknown commit"
        return f"{name}, {self.date:%Y-%m-%d}"

    def __str__(self) -> str:
        return f"{self.versions}; {self.state}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell: a chain at one shape, dtype, precision, memory format and mode.

    ``precision`` is None for dtypes other than float32, ``memory_format`` for chains without images.
    """

    #: What identifies a row: a newer one with the same values replaces it.
    KEY: ClassVar[tuple[str, ...]] = ("chain", "product", "shape", "dtype", "precision", "memory_format", "mode")

    chain: str
    product: str
    shape: str
    dtype: str
    precision: str | None = None
    memory_format: str | None = None
    mode: Literal["forward", "training", "forward_grad"]
    #: Whether a result was wrong. Nothing is timed then.
    red: bool = False
    #: With what it was measured. In a file this is a line of its own, above the rows of the run.
    run: Run | None = None

    def __post_init__(self):
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", self.shape, re.ASCII):
            raise ValueError(f"the shape {self.shape[:40]!r} is no list of positive integers, as in 8x64x64")

    @property
    def key(self) -> tuple:
        """What identifies it."""
        return tuple(getattr(self, name) for name in self.KEY)

    @property
    def failed(self) -> bool:
        """Whether a result was wrong, or there was none."""
        return self.red

    def __str__(self) -> str:
        parts = (self.chain, self.dtype, self.precision, self.mode, self.shape, self.memory_format)
        return " ".join(part for part in parts if part)

    @property
    def is_of_family(self) -> bool:
        """Whether the chain is called with steps, and none of the four with a name."""
        return self.chain in FAMILY

    @property
    def setting(self) -> str:
        """The dtype, with the precision where there is a choice."""
        return " ".join(filter(None, (self.dtype, self.precision)))

    @property
    def layout(self) -> str:
        """The setting, with the memory format where there is a choice."""
        return " ".join(filter(None, (self.setting, self.memory_format)))

    @property
    def order(self) -> tuple:
        """Sorts rows as tables list them: known names in their usual order, shapes by their numbers."""
        names = (self.dtype, self.precision, self.chain, self.memory_format, self.mode)
        places = ((_ORDER.index(name) if name in _ORDER else len(_ORDER), name or "") for name in names)
        return self.product != "GEMM", sizes_of(self.shape), *places


@dataclass(frozen=True, kw_only=True)
class CallTimes:
    """What a call takes that is timed beside others, in microseconds: a peer's, or one way to call a chain."""

    #: Of the device.
    us: float | None = None
    #: What the host needs to queue a call.
    host_us: float | None = None
    #: The wall clock of whole calls in a loop: what a person sees.
    wall_us: float | None = None
    failure: str | None = None
    #: Our time over the peer's: the median of the rounds' ratios.
    ours_over: float | None = None
    #: At the peak of a training step, beyond weights, gradients, input and output.
    added_mb: float | None = None
    #: Its time over the eager call's: the median of the rounds' ratios.
    over_eager: float | None = None


@dataclass(frozen=True, kw_only=True)
class TimesRow(Row):
    """A row of ``python -m bench``: errors, and the times of every peer, ours among them."""

    errors: Errors = field(default_factory=dict)
    #: The share of the output's gradient that is away from jumps.
    away_from_jumps: float | None = None
    rounds: int | None = None
    peers: dict[str, CallTimes] = field(default_factory=dict)

    def peer(self, name: str) -> CallTimes:
        """Empty where the peer was not measured."""
        return self.peers.get(name, CallTimes())

    @property
    def us(self) -> float | None:
        return self.peer(OURS).us

    @property
    def worst_tensor(self) -> str | None:
        """The one whose error is the largest multiple of PyTorch's."""
        ratios = {tensor: ours / torch for tensor, (ours, torch) in self.errors.items() if ours and torch}
        return max(ratios, key=lambda tensor: ratios[tensor], default=None)

    def closest(self, names: tuple[str, ...] = PYTORCH) -> tuple[str, float] | None:
        """Of these peers, the one that we are least ahead of, and our time over its."""
        ratios = {name: ratio for name in names if (ratio := self.peer(name).ours_over) is not None}
        return max(ratios.items(), key=lambda item: item[1], default=None)


@dataclass(frozen=True, kw_only=True)
class CapturedRow(Row):
    """A row of ``python -m bench captured``: each way to call a chain."""

    rounds: int | None = None
    calls: dict[str, CallTimes] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(call.failure for call in self.calls.values())

    def call(self, name: str) -> CallTimes:
        """Empty where there was no such call."""
        return self.calls.get(name, CallTimes())


@dataclass(frozen=True, kw_only=True)
class FirstCallRow(Row):
    """A row of ``python -m bench first-call``: a process that had nothing compiled."""

    import_s: float | None = None
    first_call_s: float | None = None
    kernels: list[str] = field(default_factory=list)
    #: Of the compiled kernels, those that no later call runs; None where no profiler could tell.
    kernels_not_run: list[str] | None = None
    later_call_us: float | None = None
    failure: str | None = None

    @property
    def failed(self) -> bool:
        return self.failure is not None


@dataclass(frozen=True)
class Traffic:
    """What one kind of collective sent."""

    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class TensorParallelRow(Row):
    """A row of ``python -m bench tensor-parallel``: shards on several GPUs, beside one GPU. Times in microseconds."""

    KEY: ClassVar[tuple[str, ...]] = (*Row.KEY, "divided", "gpus")

    divided: str
    gpus: int
    #: The worst tensor's, of all ranks.
    error_tensor: str | None = None
    error_ours: float | None = None
    error_torch: float | None = None
    us: float | None = None
    alone_us: float | None = None
    #: The median of the rounds' ratios.
    speedup: float | None = None
    #: By the host's clock, calls in a row.
    in_a_row_us: float | None = None
    alone_in_a_row_us: float | None = None
    rounds: int | None = None
    #: By the collective's name.
    collectives: dict[str, Traffic] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CommitsRow(Row):
    """Our own time at two commits, called in turn: the run's commit and one before it. Times in microseconds."""

    before: str
    before_us: float
    after_us: float
    #: After over before: of the device's time, and of whole calls in a loop.
    device_ratio: float
    wall_ratio: float
    rounds: int


@dataclass(frozen=True, kw_only=True)
class TritonsRow(CommitsRow):
    """The same with two Tritons: the run's, and the one that ``before`` names."""


@dataclass(frozen=True)
class KernelTimes:
    """What the kernels of one kind take in a step."""

    us: float
    launches: int


@dataclass(frozen=True, kw_only=True)
class WayFigures:
    """What one way to run a model takes for a step, in microseconds and MB."""

    failure: str | None = None
    #: Of the device, queued ahead.
    us: float | None = None
    #: The wall clock of whole steps in a loop.
    wall_us: float | None = None
    #: By another way, its times over that one's: the device's and the wall clock's, medians of the rounds' ratios.
    over: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    #: Of a process with empty caches: until its first step is done, seconds.
    first_call_s: float | None = None
    #: All that is allocated at the peak of a step.
    peak_mb: float | None = None
    #: Saved for the backward pass, without parameters, buffers and inputs.
    saved_mb: float | None = None
    #: By "output" and "gradients": the error's norm over the value's, and the worst.
    errors: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    #: What this project took over.
    chains: int | None = None
    open_norms: int | None = None
    #: By kind.
    kernels: dict[str, KernelTimes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelRow(Row):
    """A row of ``python -m bench models``: a whole model, each way to run it. The model is the row's chain, its library
    the product."""

    rounds: int | None = None
    ways: dict[str, WayFigures] = field(default_factory=dict)
    #: What the bytes of the norms' images take at the speed of a copy, in microseconds, and that speed.
    norms_us: float | None = None
    copy_gb_s: float | None = None

    @property
    def failed(self) -> bool:
        return any(way.failure for way in self.ways.values())

    @property
    def order(self) -> tuple:
        return self.chain, *super().order

    def way(self, name: str) -> WayFigures:
        """Empty where it was not measured."""
        return self.ways.get(name, WayFigures())

    @property
    def lines(self) -> list["WayLine"]:
        """One for each way."""
        return [WayLine(self, name) for name in self.ways]


class WayLine(NamedTuple):
    """One way to run a row's model."""

    row: ModelRow
    name: str

    def __str__(self) -> str:
        return f"{self.row} {self.name}"

    @property
    def figures(self) -> WayFigures:
        return self.row.way(self.name)

    @property
    def failed(self) -> bool:
        return self.figures.failure is not None


@dataclass(frozen=True)
class ProductFigures:
    """One way to compute a product. Errors are against float64."""

    #: Microseconds of the device, and our time over it: the median of the rounds' ratios.
    us: float | None = None
    ours_over: float | None = None
    #: The norm of the difference over that of the product, of normally distributed numbers and of positive ones.
    error: float | None = None
    positive_error: float | None = None
    #: The mean of the relative differences, of positive numbers.
    bias: float | None = None


@dataclass(frozen=True, kw_only=True)
class ProductRow(Row):
    """A row of ``python -m bench products``: a product without a chain, each way to compute it."""

    rounds: int | None = None
    ways: dict[str, ProductFigures] = field(default_factory=dict)

    def way(self, name: str) -> ProductFigures:
        """Empty where it was not measured."""
        return self.ways.get(name, ProductFigures())


ROWS: dict[str, type[Row]] = {
    "times": TimesRow,
    "captured": CapturedRow,
    "first_call": FirstCallRow,
    "tensor_parallel": TensorParallelRow,
    "commits": CommitsRow,
    "tritons": TritonsRow,
    "models": ModelRow,
    "products": ProductRow,
}
