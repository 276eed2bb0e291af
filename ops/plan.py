"""Plans: what a call does, as data. Buffers, launches and calls of PyTorch's functions, with slots for its tensors.

A plan is made by ordinary code that runs once, on tensors of the "meta" device, which have a shape and strides but no
memory. What it launches is noted, and compiled on a GPU. Each memory that it uses becomes a slot: an argument's, a
result's or a buffer's. A plan holds no tensor. It can be run for any tensors that lie in memory as those that it was
made for: of the same shapes, strides, dtypes, device and alignment.

A plan is run as a Python function that is written for it, with a line for each allocation, launch and call. That takes
the host two thirds of the time of a loop over steps.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import triton

from autotune_configs.lookup import Found
from ops import compiling
from triton_kernels import launch as launching
from triton_kernels.device import INTERPRETED, standing_for
from triton_kernels.grid import blocks_of

#: Buffers that kernels alone use share one allocation, in which they begin at multiples of this many bytes.
_ALIGNMENT = 256


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the tensor's shape, strides and dtype, and with its address modulo 16 bytes."""
    first = tensor.data_ptr() % 16 // tensor.element_size()
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = torch.empty(first + max(extent, 1), dtype=tensor.dtype, device="meta")
    return memory.as_strided(tensor.shape, tensor.stride(), first)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place(tensor: torch.Tensor) -> int:
    """Where a tensor begins in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif hasattr(value, "block_shape"):  # a tensor descriptor, Triton's or Gluon's
        yield value.base
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors_in(each)


@dataclass
class Buffer:
    """A memory that a plan uses, as a meta tensor that stands for all of it, and the steps that use it."""

    meta: torch.Tensor
    slot: int
    first: int
    last: int = 0
    #: Whether it must be a tensor of its own: for functions of PyTorch's, and where the caller gets it.
    is_tensor: bool = False
    #: Whether the plan need not allocate it: an argument, or what a function returns.
    is_given: bool = False
    #: Where it begins in the tensor of its slot, in bytes.
    offset: int = 0

    @property
    def is_own(self) -> bool:
        """Whether its slot's tensor has nothing else in it."""
        return self.is_tensor or self.is_given

    @property
    def bytes(self) -> int:
        return int(self.meta.untyped_storage().nbytes())

    def distance(self, part: torch.Tensor) -> int:
        """Where a part of it begins in the tensor of its slot, in bytes."""
        return self.offset + _place(part) - _place(self.meta)


@dataclass(frozen=True)
class Noted:
    """A step: a kernel's launch on a grid, or a function's call.

    ``run`` is what does it: a function of the arguments, or a compiled kernel.
    """

    name: str
    run: Any
    arguments: Sequence[Any]
    results: tuple[torch.Tensor, ...] = ()
    grid: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    config: Any = None

    @property
    def takes_addresses(self) -> bool:
        """Whether its tensors are passed as addresses, which costs the host least."""
        return self.grid is not None and not INTERPRETED


class Planner:
    """Notes what code on meta tensors launches and calls, and makes a plan of it."""

    def __init__(self, device: torch.device, arguments: Sequence[torch.Tensor]):
        self._device = device
        self._noted: list[Noted] = []
        self._arguments = len(arguments)
        self._buffers = {_storage(each): Buffer(each, slot, 0, is_given=True) for slot, each in enumerate(arguments)}

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Within this context, this thread's launches are noted, and meta tensors stand for ones on the device."""
        with standing_for(self._device), launching.noted_in(self):
            yield

    def launch(self, kernel, grid: tuple[int, ...], arguments: tuple, options: dict[str, Any], config: Any) -> None:
        """Note a launch. On a GPU the kernel is compiled meanwhile."""
        if INTERPRETED:
            self._note(Noted(kernel.__name__, partial(kernel[grid], **options), arguments, (), grid, options, config))
            return
        stand_ins = launching.with_counters(arguments, lambda each: each.stand_in)
        compiled = compiling.begin(self._device, kernel, grid, stand_ins, options)
        # As Triton passes them: every parameter in order, among them those that are compiled in.
        bound = kernel.signature.bind(
            *arguments, **{name: options[name] for name in options if name in kernel.arg_names}
        )
        bound.apply_defaults()
        self._note(Noted(kernel.__name__, compiled, bound.args, (), grid, options, config))

    def call(self, function: Callable, arguments: tuple, options: dict[str, Any]) -> Any:
        """Note a call of a function of tensors, and return what stands for its result."""
        result = function(*arguments, **options)
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        if results and {_storage(each) for each in results} <= {_storage(each) for each in _tensors_in(arguments)}:
            return result  # a view, which is made where it is used
        name = getattr(function, "__name__", str(function))
        self._note(Noted(name, partial(function, **options) if options else function, arguments, results))
        return result

    def plan(self, results: Sequence[torch.Tensor]) -> "Plan":
        """The plan of all that was noted. It returns ``results``, each of which is all of its memory."""
        for result in results:
            self._use(result, len(self._noted), True).meta = result
        slots = [self._buffers[_storage(result)].slot for result in results]
        runs = compiling.finished(each.run for each in self._noted)
        noted = [replace(each, run=run) for each, run in zip(self._noted, runs, strict=True)]
        return Plan(self._device, self._arguments, self._buffers, noted, slots)

    def _note(self, noted: Noted) -> None:
        step = len(self._noted)
        self._noted.append(noted)
        for tensor in _tensors_in(noted.arguments):
            self._use(tensor, step, not noted.takes_addresses)
        for result in noted.results:
            self._use(result, step, True).is_given = True

    def _use(self, tensor: torch.Tensor, step: int, is_tensor: bool) -> Buffer:
        buffer = self._buffers.get(_storage(tensor))
        if buffer is None:
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            whole = tensor if tensor.numel() == size else tensor.new_empty(size)
            buffer = self._buffers[_storage(tensor)] = Buffer(whole, len(self._buffers) + 1, step)
        buffer.last = step
        buffer.is_tensor |= is_tensor
        return buffer


class Plan:
    """What a call does, for tensors that lie in memory as those that it was made for."""

    #: What the lookups of configs found while it was made.
    lookups: Sequence[Found] = ()

    def __init__(
        self,
        device: torch.device,
        arguments: int,
        buffers: dict[int, Buffer],
        noted: list[Noted],
        results: list[int],
    ):
        self.noted = noted
        self.buffers = list(buffers.values())[arguments:]
        self._device = device
        self._results = results
        self._arguments = arguments
        self._all_buffers = buffers
        shared = [buffer for buffer in self.buffers if not buffer.is_own]
        self.shared_bytes = _share(shared, arguments)
        #: Once it is needed, for launches with Triton's hooks or without, and for PyTorch's deterministic mode or not.
        self._function = cache(self._written)

    @property
    def function(self) -> Callable[..., list[Any]]:
        """``run`` for tensors in a row on the current device, without Triton's hooks."""
        return self._function(False, torch.are_deterministic_algorithms_enabled())

    @property
    def result_bytes(self) -> list[int]:
        """The size of each result."""
        sizes = {buffer.slot: buffer.bytes for buffer in self.buffers if buffer.is_own}
        return [sizes[slot] for slot in self._results]

    @property
    def buffer_bytes(self) -> int:
        """The most memory that its other buffers take at one time."""
        own = [b for b in self.buffers if b.is_own and b.slot not in self._results]
        alive = [sum(b.bytes for b in own if b.first <= step <= b.last) for step in range(len(self.noted))]
        return self.shared_bytes + max(alive, default=0)

    def run(self, arguments: Sequence[torch.Tensor]) -> list[Any]:
        """The results for these tensors."""
        hooks = triton.knobs.runtime
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        # A profiler may set one at any time. They are None, or chains of hooks that may be empty.
        has_hooks = bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
        options = has_hooks, torch.are_deterministic_algorithms_enabled()
        if launching.is_current(self._device):
            return self._function(*options)(*arguments)
        with launching.current(self._device):  # where kernels are loaded too
            return self._function(*options)(*arguments)

    def _written(self, has_hooks: bool, is_deterministic: bool) -> Callable[..., list[Any]]:
        source = _Source(self._all_buffers, self._device, has_hooks, is_deterministic)
        if self.shared_bytes:
            memory = torch.empty(self.shared_bytes, dtype=torch.uint8, device="meta")
            source.allocate(self._arguments, memory)
        own = [buffer for buffer in self.buffers if buffer.is_own]
        for number, noted in enumerate([*self.noted, None]):  # at last, results that no step writes to
            for buffer in own:
                if buffer.first == number and not buffer.is_given:
                    source.allocate(buffer.slot, buffer.meta)
            if noted:
                source.do(noted)
            for buffer in own:
                if buffer.last == number and buffer.slot not in self._results:
                    source.line(f"t{buffer.slot} = None")
        return source.function(self._arguments, self._results)


def _share(buffers: list[Buffer], slot: int) -> int:
    """Give each buffer a place in one memory, which those used at other times may have too; returns its size."""
    size = 0
    placed: list[Buffer] = []
    for buffer in buffers:
        length = blocks_of(buffer.bytes, _ALIGNMENT) * _ALIGNMENT
        others = [each for each in placed if each.last >= buffer.first and buffer.last >= each.first]
        offset = 0
        for other in sorted(others, key=lambda each: each.offset):
            if offset + length <= other.offset:
                break
            offset = max(offset, other.offset + blocks_of(other.bytes, _ALIGNMENT) * _ALIGNMENT)
        buffer.slot, buffer.offset = slot, offset
        placed.append(buffer)
        size = max(size, offset + length)
    return size


class _Source:
    """Python source that is being written: t<slot> is a slot's tensor, a<slot> its address, v<number> a value."""

    def __init__(self, buffers: dict[int, Buffer], device: torch.device, has_hooks: bool, is_deterministic: bool):
        self._buffers = buffers
        self._has_hooks = has_hooks
        self._lines: list[str] = []
        self._values: dict[str, Any] = {}
        self._device = self._value(device)
        # As Inductor's graphs allocate on the current device, in half the time: PyTorch's deterministic mode, which
        # fills what is new, is not asked.
        empty = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
        self._empty = None if is_deterministic or empty is None else self._value(empty)
        self._addressed: set[int] = set()
        if not INTERPRETED:
            stream_of = triton.runtime.driver.active.get_current_stream
            self.line(f"stream = {self._value(stream_of)}({device.index})")

    def line(self, text: str) -> None:
        """Write a line."""
        self._lines.append(f"    {text}\n")

    def allocate(self, slot: int, meta: torch.Tensor) -> None:
        """Write a slot's allocation."""
        shape, stride, dtype = tuple(meta.shape), meta.stride(), self._value(meta.dtype)
        if self._empty:
            self.line(f"t{slot} = {self._empty}({shape}, {stride}, {dtype})")
        else:
            empty = self._value(torch.empty_strided)
            self.line(f"t{slot} = {empty}({shape}, {stride}, dtype={dtype}, device={self._device})")

    def do(self, noted: Noted) -> None:
        """Write a launch or a call."""
        arguments = "".join([f"{self._expression(each, noted.takes_addresses)}, " for each in noted.arguments])
        grid = (*(noted.grid or ()), 1, 1)[:3]
        if not noted.takes_addresses:
            call = f"{self._value(noted.run)}({arguments})"
        elif self._has_hooks:
            call = f"{self._value(noted.run[grid])}({arguments})"
        else:
            # As ``compiled[grid](*arguments)`` does it, without what hooks alone read.
            run, function, metadata = map(self._value, (noted.run.run, noted.run.function, noted.run.packed_metadata))
            before = f"{grid[0]}, {grid[1]}, {grid[2]}, stream, {function}, {metadata}, None, None, None"
            call = f"{run}({before}, {arguments})"
        if noted.results:
            slots = "".join([f"t{self._buffers[_storage(each)].slot}, " for each in noted.results])
            layouts = self._value([(each.shape, each.stride()) for each in noted.results])
            call = f"{slots}= {self._value(_laid_out)}({call}, {layouts})"
        self.line(call)

    def function(self, arguments: int, results: list[int]) -> Callable[..., list[Any]]:
        """The lines as a function of the tensors of the first slots, which returns those of the slots ``results``."""
        names = ", ".join([f"t{slot}" for slot in range(arguments)])
        returned = ", ".join([f"t{slot}" for slot in results])
        source = f"def run({names}):\n{''.join(self._lines)}    return [{returned}]\n"
        exec(compile(source, "<plan>", "exec"), self._values)
        return self._values["run"]

    def _value(self, value: Any) -> str:
        if value is None or type(value) in (bool, int):
            return repr(value)
        name = f"v{len(self._values)}"
        self._values[name] = value
        return name

    def _expression(self, value: Any, as_address: bool) -> str:
        if isinstance(value, torch.Tensor):
            return self._address(value) if as_address else self._view(value)
        if isinstance(value, launching.Counters):
            if as_address:
                return f"{self._value(value.address)}({self._device}, stream)"
            return f"{self._value(value.on)}({self._device})"
        if hasattr(value, "block_shape"):
            describe = partial(_describe, type(value), {**vars(value), "base": None})
            return f"{self._value(describe)}({self._expression(value.base, as_address)})"
        if isinstance(value, (tuple, list)) and any(True for _ in _tensors_in(value)):
            return f"({''.join([f'{self._expression(each, as_address)}, ' for each in value])})"
        return self._value(value)

    def _address(self, part: torch.Tensor) -> str:
        buffer = self._buffers[_storage(part)]
        slot, distance = buffer.slot, buffer.distance(part)
        if slot not in self._addressed:
            self._addressed.add(slot)
            self.line(f"a{slot} = t{slot}.data_ptr()")
        return f"a{slot} + {distance}" if distance else f"a{slot}"

    def _view(self, part: torch.Tensor) -> str:
        buffer = self._buffers[_storage(part)]
        layout, distance = _layout(part), buffer.distance(part)
        if distance == 0 and layout == _layout(buffer.meta):
            return f"t{buffer.slot}"
        if distance == 0 and part.ndim == 2 == buffer.meta.ndim and layout == _layout(buffer.meta.t()):
            return f"t{buffer.slot}.t()"
        return f"{self._value(partial(_part, distance, *layout))}(t{buffer.slot})"


def _layout(meta: torch.Tensor) -> tuple:
    return meta.shape, meta.stride(), meta.dtype


def _laid_out(result: Any, layouts: list[tuple]) -> list[torch.Tensor]:
    """What a function returned. A library may choose another layout than it does for meta tensors."""
    found = result if type(result) is tuple else (result,)
    return [
        each if each.shape == shape and each.stride() == stride else each.new_empty_strided(shape, stride).copy_(each)
        for each, (shape, stride) in zip(found, layouts, strict=True)
    ]


def _describe(kind: type, fields: dict[str, Any], base: Any) -> Any:
    """A tensor descriptor as one was made before, of another tensor like that one: nothing is checked again."""
    descriptor: Any = object.__new__(kind)
    descriptor.__dict__.update(fields)
    descriptor.base = _Address(base) if type(base) is int else base
    return descriptor


def _part(distance: int, shape: torch.Size, stride: tuple, dtype: torch.dtype, whole: torch.Tensor) -> torch.Tensor:
    """The part of a slot's tensor that begins ``distance`` bytes after it."""
    first = (_place(whole) + distance) // dtype.itemsize
    if whole.dtype == dtype:
        return whole.as_strided(shape, stride, first)
    return torch.empty(0, dtype=dtype, device=whole.device).set_(whole.untyped_storage(), first, shape, stride)


class _Address(int):
    """An address where a descriptor has its tensor."""

    def data_ptr(self) -> int:
        return int(self)
