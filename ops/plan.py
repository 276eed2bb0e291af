"""Plans: what a call does, as data. Buffers, launches and calls of PyTorch's functions, with slots for its tensors.

A plan is made by ordinary code that runs once, on tensors of the "meta" device, which have a shape and strides but no
memory. What it launches is noted, and compiled on a GPU. Each memory that it uses becomes a slot: an argument's, a
result's or a buffer's. A plan holds no tensor. It can be run for any tensors that lie in memory as those that it was
made for: of the same shapes, strides, dtypes, device and alignment.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import triton

from autotune_configs.lookup import Found
from triton_kernels import launch as launching
from triton_kernels.device import INTERPRETED, standing_for
from triton_kernels.grid import blocks_of

#: Buffers that kernels alone use share one allocation, in which they begin at multiples of this many bytes.
_ALIGNMENT = 256

#: The tensors of a call that runs: its arguments, the buffers' shared memory, and what its steps add.
Tensors = list[Any]
Step = Callable[[Tensors], object]


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
    def bytes(self) -> int:
        return int(self.meta.untyped_storage().nbytes())

    def distance(self, part: torch.Tensor) -> int:
        """Where a part of it begins in the tensor of its slot, in bytes."""
        return self.offset + _place(part) - _place(self.meta)


@dataclass(frozen=True)
class Noted:
    """A step: a kernel's launch on a grid, or a function's call. ``run`` does it."""

    name: str
    run: Callable
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
        """Note a launch. On a GPU the kernel is compiled now."""
        if INTERPRETED:
            self._note(Noted(kernel.__name__, partial(kernel[grid], **options), arguments, (), grid, options, config))
            return
        with launching.current(self._device):
            compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
        # As Triton passes them: every parameter in order, among them those that are compiled in.
        bound = kernel.signature.bind(
            *arguments, **{name: options[name] for name in options if name in kernel.arg_names}
        )
        bound.apply_defaults()
        run = _Launch(compiled, (*grid, 1, 1)[:3], self._device)
        self._note(Noted(kernel.__name__, run, bound.args, (), grid, options, config))

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
        return Plan(self._device, self._arguments, self._buffers, self._noted, slots)

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
    """Steps that a call is done by, for tensors that lie in memory as those that it was made for."""

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
        self._blank = [None] * (1 + len(self.buffers))
        shared = [buffer for buffer in self.buffers if not (buffer.is_tensor or buffer.is_given)]
        self.shared_bytes = _share(shared, arguments)
        self._steps: list[Step] = []
        if shared:
            memory = torch.empty(self.shared_bytes, dtype=torch.uint8, device="meta")
            self._steps.append(_allocation(arguments, memory, device, {}))
        # A slot of each layout that there is at all times.
        like = {_layout(each.meta): each.slot for each in list(buffers.values())[:arguments] if _is_dense(each.meta)}
        own = [buffer for buffer in self.buffers if buffer.is_tensor or buffer.is_given]
        for number, step in enumerate(noted):
            self._steps += [
                _allocation(b.slot, b.meta, device, like) for b in own if b.first == number and not b.is_given
            ]
            self._steps.append(_step(step, buffers))
            ended = [b.slot for b in own if b.last == number and b.slot not in results]
            if ended:
                self._steps.append(partial(_free, ended))
        self._steps += [
            _allocation(b.slot, b.meta, device, like) for b in own if b.first == len(noted) and not b.is_given
        ]

    @property
    def result_bytes(self) -> list[int]:
        """The size of each result."""
        sizes = {buffer.slot: buffer.bytes for buffer in self.buffers if buffer.is_tensor or buffer.is_given}
        return [sizes[slot] for slot in self._results]

    @property
    def buffer_bytes(self) -> int:
        """The most memory that its other buffers take at one time."""
        own = [b for b in self.buffers if (b.is_tensor or b.is_given) and b.slot not in self._results]
        alive = [sum(b.bytes for b in own if b.first <= step <= b.last) for step in range(len(self.noted))]
        return self.shared_bytes + max(alive, default=0)

    def run(self, arguments: Sequence[torch.Tensor]) -> list[Any]:
        """The results for these tensors."""
        tensors = [*arguments, *self._blank]
        if launching.is_current(self._device):
            for step in self._steps:
                step(tensors)
        else:
            with launching.current(self._device):
                for step in self._steps:
                    step(tensors)
        return [tensors[slot] for slot in self._results]


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


def _layout(meta: torch.Tensor) -> tuple:
    return meta.shape, meta.stride(), meta.dtype


def _is_dense(meta: torch.Tensor) -> bool:
    """Whether ``empty_like`` has its strides."""
    return meta.stride() == torch.empty_like(meta).stride()


def _allocation(slot: int, meta: torch.Tensor, device: torch.device, like: dict[tuple, int]) -> Step:
    """What allocates a slot's tensor. Where a slot of ``like`` has one of its layout, that takes half the time."""
    shape, stride, dtype = layout = _layout(meta)
    source = like.get(layout)

    def allocate(tensors):
        tensors[slot] = torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def allocate_like(tensors):
        tensors[slot] = torch.empty_like(tensors[source])

    return allocate if source is None else allocate_like


def _free(slots: list[int], tensors: Tensors) -> None:
    for slot in slots:
        tensors[slot] = None


def _step(noted: Noted, buffers: dict[int, Buffer]) -> Step:
    """What fills the tensors of a call in, and then does the step."""
    run, template = noted.run, list(noted.arguments)
    pointers: list[tuple[int, int, int]] = []
    fills: list[tuple[int, Step]] = []
    for place, each in enumerate(template):
        if isinstance(each, torch.Tensor) and noted.takes_addresses:
            buffer = buffers[_storage(each)]
            pointers.append((place, buffer.slot, buffer.distance(each)))
        else:
            fill = _filler(each, buffers, _address if noted.takes_addresses else _view)
            if fill is not None:
                fills.append((place, fill))
    results = [(buffers[_storage(each)].slot, each.shape, each.stride()) for each in noted.results]

    def launch(tensors):
        arguments = template.copy()
        for place, slot, distance in pointers:
            arguments[place] = tensors[slot].data_ptr() + distance
        for place, fill in fills:
            arguments[place] = fill(tensors)
        return run(*arguments)

    def call(tensors):
        result = launch(tensors)
        found = result if type(result) is tuple else (result,)
        for (slot, shape, stride), each in zip(results, found, strict=True):
            # A library may choose another layout than it does for meta tensors.
            as_planned = each.shape == shape and each.stride() == stride
            tensors[slot] = each if as_planned else each.new_empty_strided(shape, stride).copy_(each)

    return call if results else launch


def _filler(value: Any, buffers: dict[int, Buffer], fill_of: Callable) -> Step | None:
    """What makes an argument of a call's tensors; None where no tensor is in it."""
    if isinstance(value, torch.Tensor):
        return fill_of(buffers[_storage(value)], value)
    if hasattr(value, "block_shape"):
        kind, fields, fill = type(value), dict(vars(value)), fill_of(buffers[_storage(value.base)], value.base)

        def describe(tensors):
            # As one was made before, of another tensor like that one: nothing needs to be checked again.
            descriptor = object.__new__(kind)
            descriptor.__dict__.update(fields)
            base = fill(tensors)
            descriptor.base = _Address(base) if type(base) is int else base
            return descriptor

        return describe
    if isinstance(value, (tuple, list)):
        fills = [_filler(each, buffers, fill_of) for each in value]
        if any(fills):
            pairs = list(zip(fills, value, strict=True))
            return lambda tensors: tuple([each if fill is None else fill(tensors) for fill, each in pairs])
    return None


def _address(buffer: Buffer, part: torch.Tensor) -> Step:
    slot, distance = buffer.slot, buffer.distance(part)
    return lambda tensors: tensors[slot].data_ptr() + distance


def _view(buffer: Buffer, part: torch.Tensor) -> Step:
    slot, distance, shape, stride, dtype = buffer.slot, buffer.distance(part), part.shape, part.stride(), part.dtype
    if distance == 0 and (shape, stride, dtype) == _layout(buffer.meta):
        return lambda tensors: tensors[slot]
    if distance == 0 and len(shape) == 2 == buffer.meta.ndim and (shape, stride, dtype) == _layout(buffer.meta.t()):
        return lambda tensors: tensors[slot].t()

    def view(tensors):
        whole = tensors[slot]
        first = (_place(whole) + distance) // dtype.itemsize
        if whole.dtype == dtype:
            return whole.as_strided(shape, stride, first)
        return torch.empty(0, dtype=dtype, device=whole.device).set_(whole.untyped_storage(), first, shape, stride)

    return view


class _Address(int):
    """An address where a descriptor has its tensor."""

    def data_ptr(self) -> int:
        return int(self)


class _Launch:
    """A compiled kernel on a grid; called with its arguments. Its module is loaded at the first call."""

    def __init__(self, compiled, grid: tuple[int, ...], device: torch.device):
        self.compiled = compiled
        self._grid = grid
        self._index = device.index
        self._stream_of = triton.runtime.driver.active.get_current_stream
        self._loaded: tuple | None = None

    def __call__(self, *arguments: Any) -> None:
        compiled, hooks = self.compiled, triton.knobs.runtime
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        # A profiler may set one at any time. They are None, or chains of hooks that may be empty.
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            compiled[self._grid](*arguments)
            return
        if self._loaded is None:
            run = compiled.run  # which loads the module
            self._loaded = run, *self._grid, compiled.function, compiled.packed_metadata
        # As ``compiled[grid](*arguments)`` does it, without what hooks alone read.
        run, x, y, z, function, metadata = self._loaded
        run(x, y, z, self._stream_of(self._index), function, metadata, None, None, None, *arguments)
