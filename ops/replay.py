"""Calls that come again: what a function allocates and launches is noted once, and then done without the function.

Between a call and its launches lie checks, choices of kernels and configs, PyTorch's dispatcher, and Triton's own look
at each argument. They take the host longer than the GPU needs for a small problem, and come out the same for arguments
of the same shapes, strides, dtypes, alignment and numbers. So the second such call is watched, and from the third on
its allocations and launches alone are repeated, and PyTorch's own operations between them. A call that looks at a
tensor's values on the way is left as it is. No tensor is kept.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from autotune_configs import lookup, tuning
from ops import checks, precision
from triton_kernels.device import INTERPRETED
from triton_kernels.launch import current, is_watched, watched

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
#: The tensors of a call that is repeated: its arguments, then what its steps add; None where no step needs one.
Tensors = list[Any]
Step = Callable[[Tensors], object]
#: What a tensor is of its storage: offset, dtype, size and stride.
_Part = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]

#: Plans that a function has at most: a thousand batch sizes are no calls that come again.
_MOST_PLANS = 1024
_NO_PLAN_YET: Any = object()
_PLAIN_TENSORS = torch.Tensor, torch.nn.Parameter
_SCALARS = int, float, bool, str, torch.dtype, type(None)
_EMPTY = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)
#: Of operations whose calls are not repeated: what they do shows in more than new values.
_TELLING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
#: What the project's operators run; a watched call looks into them.
IMPLEMENTATIONS: dict[Any, Callable] = {}
_all: "weakref.WeakSet[Repeated]" = weakref.WeakSet()


def forget() -> None:
    """Repeat no call that was made before: what a function does has changed."""
    for repeated in _all:
        repeated.plans.clear()
        repeated.met.clear()


class Repeated:
    """A function of tensors, numbers and lists of numbers, whose calls are repeated.

    It must do the same for arguments that ``_key`` cannot tell apart. Where it is not to be called like that, as one of
    the arguments is something else, ``otherwise`` is.
    """

    def __init__(self, function: Callable, otherwise: Callable | None = None):
        self._function = function
        self._otherwise = otherwise or function
        #: Keys of calls that came once; of those that came again, how to repeat them, or None where that cannot be.
        self.met: set[tuple] = set()
        self.plans: dict[tuple, Plan | None] = {}
        _all.add(self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function or, from the third call with these arguments' key on, do what it did."""
        tensors: Tensors = []
        # A call within one that is being watched is part of that.
        key = None if is_watched() else _key(tensors, arguments, options)
        if key is None:
            return self._otherwise(*arguments, **options)
        plan = self.plans.get(key, _NO_PLAN_YET)
        if plan is not _NO_PLAN_YET:
            return self._function(*arguments, **options) if plan is None else plan.run(tensors)
        if key in self.met:
            notes = _Notes(tensors)
            with watched(notes.launched), notes:
                result = self._function(*arguments, **options)
            self.plans[key] = notes.plan(result)
            return result
        if len(self.met) >= _MOST_PLANS:
            self.met.clear()
            self.plans.clear()
        self.met.add(key)
        return self._function(*arguments, **options)

    def sharing_plans(self, otherwise: Callable) -> "Repeated":
        """The same function with the same plans, but another ``otherwise``."""
        other = Repeated(self._function, otherwise)
        other.met, other.plans = self.met, self.plans
        return other


def repeated_eagerly(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """``function`` repeated where nothing of PyTorch's would see the call; autograd's wish for a gradient is one that
    ``_key`` refuses."""
    repeated = Repeated(function)

    @functools.wraps(function)
    def call(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        return (repeated if is_unobserved() else function)(*arguments, **options)

    return call


def is_unobserved() -> bool:
    """Whether a call now is eager PyTorch's alone: no compiler, tracer, profiler, transform, mode or autocast."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state()
        or torch._C._autograd._profiler_enabled()
        or torch.is_autocast_enabled("cuda")
        or torch.is_autocast_enabled("cpu")
    )


def _key(tensors: Tensors, arguments: tuple, options: dict[str, Any]) -> tuple | None:
    """All that a call may depend on, with its tensors added to ``tensors``; None where it is not to be repeated.

    That is where a tensor is of a class of its own or not dense, autograd wants its gradient, or it is on no device of
    the kernels; where an argument is no number; and where configs are found as they are needed.
    """
    if tuning.is_on():
        return None
    differentiates = torch.is_grad_enabled()
    key: list[Any] = [lookup.generation(), *options]
    try:
        for value in (*arguments, *options.values()):
            kind = type(value)
            if kind in _PLAIN_TENSORS:
                if (differentiates and value.requires_grad) or value.is_neg():
                    return None
                if not tensors and not (value.is_cuda or (INTERPRETED and value.is_cpu)):
                    return None
                # Sparse and nested ones have no strides, and raise here.
                key += (value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16 == 0)
                tensors.append(value)
            elif kind in _SCALARS or (kind in (tuple, list) and all(type(each) in _SCALARS for each in value)):
                key.append(repr(value))  # which tells True from 1, and -0.0 from 0.0
            else:
                value = checks.plain(value)  # NumPy's numbers, which the function takes for the same as Python's
                numbers = value if isinstance(value, (tuple, list)) else (value,)
                if not all(type(each) in _SCALARS for each in numbers):
                    return None
                key.append(repr(value))
    except (RuntimeError, ValueError):  # an integer may be too long to be written out
        return None
    if tensors and tensors[0].dtype == torch.float32:
        key.append(precision.float32_settings())
    return tuple(key)


class Plan:
    """Steps that a call is repeated by; at their end, ``results`` says which tensors it returns."""

    def __init__(self, steps: list[Step], results: int | tuple[int, ...], device: torch.device):
        self._steps = steps
        self._results = results
        self._device = device

    def run(self, tensors: Tensors) -> Any:
        """The call's results for its tensors, in order; the list is used up."""
        with current(self._device):
            for step in self._steps:
                step(tensors)
        results = self._results
        return tensors[results] if isinstance(results, int) else tuple([tensors[place] for place in results])


class _Notes(TorchDispatchMode):
    """Notes what PyTorch does and, as ``launched``, what Triton launches while a function runs."""

    def __init__(self, tensors: Tensors):
        super().__init__()
        self._is_complete = True
        self._launches = 0
        self._argument_count = len(tensors)
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._steps: list[Step] = []
        #: Steps that do nothing but make a tensor, by its place in the list that steps work on.
        self._makers: dict[int, int] = {}
        #: Of each tensor in that list, what part of its storage it is.
        self._parts: list[Any] = []
        #: By storage, the tensors in that list which were there first: one, but for arguments that share one.
        self._owners: dict[StorageWeakRef, list[int]] = {}
        self._views: dict[tuple[int, _Part], int] = {}
        #: The last step that needs a tensor; and those that the next step needs.
        self._last_use: dict[int, int] = {}
        self._used: list[int] = []
        for tensor in tensors:
            others = [self._parts[place] for place in self._owners.get(_storage(tensor), [])]
            if any(_overlap(_part(tensor), other) for other in others):  # which one a launch means would be a guess
                self._is_complete = False
            self._add(tensor)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        implementation = IMPLEMENTATIONS.get(function)
        if implementation is not None:  # of this project: looked into
            with self:
                return implementation(*arguments, **options)
        result = function(*arguments, **options)
        if function in _EMPTY:
            size, stride, device, dtype = result.shape, result.stride(), result.device, result.dtype
            self._make(functools.partial(torch.empty_strided, size, stride, dtype=dtype, device=device))
            self._add(result)
        else:
            self._called(function, arguments, options, result)
        return result

    def launched(self, kernel, grid, arguments, options) -> None:
        """Launch; the step gives the kernel the same arguments, with the tensors of another call."""
        self._launches += 1
        with _disable_current_modes():  # the interpreter does much that is not to be noted
            compiled = kernel[grid](*arguments, **options)
        if compiled is None:
            self._call(functools.partial(kernel[grid], **options), arguments, self._address)
            return
        # As Triton passes them: every parameter in order, among them those that are compiled in.
        bound = kernel.signature.bind(*arguments, **{n: options[n] for n in options if n in kernel.arg_names})
        bound.apply_defaults()
        self._call(compiled[(*grid, 1, 1)[:3]], bound.args, self._address)

    def plan(self, result: Any) -> Plan | None:
        """What was noted, or None where that is not all that was done, or PyTorch alone did it."""
        results = result if type(result) is tuple else (result,)
        if not (self._is_complete and self._launches and all(isinstance(each, torch.Tensor) for each in results)):
            return None
        places = tuple(map(self._place, results))
        if not self._is_complete:
            return None
        kept = {*places, *range(self._argument_count)}
        unused = {step for place, step in self._makers.items() if place not in kept and place not in self._last_use}
        ended: dict[int, list[int]] = {}
        for place, step in self._last_use.items():
            if place not in kept:
                ended.setdefault(step, []).append(place)
        steps: list[Step] = []
        for number, step in enumerate(self._steps):
            steps.append(_make_nothing if number in unused else step)
            if number in ended:
                steps.append(functools.partial(_free, ended[number]))
        return Plan(steps, places if isinstance(result, tuple) else places[0], self._device)

    def _called(self, function, arguments: tuple, options: dict[str, Any], result: Any) -> None:
        """An operation of PyTorch's: new tensors, a view, which is made where it is needed, or a write."""
        many = isinstance(result, tuple | list)
        results = list(result) if many else [result]
        tensors = _tensors_in(results)
        if (
            _TELLING_TAGS & set(function.tags)
            or not tensors
            or len(tensors) < sum(each is not None for each in results)
            or _tensors_in(options)
        ):
            self._is_complete = False
            return
        storages = set(map(_storage, _tensors_in(arguments)))
        is_new = {_storage(each) not in storages for each in tensors}
        if is_new == {True}:
            layouts = [None if each is None else (each.shape, each.stride()) for each in results]

            def keep(tensors, result):
                for each, layout in zip(result if many else (result,), layouts, strict=True):
                    tensors.append(_laid_out(each, layout))

            self._call(functools.partial(function, **options), arguments, self._place, keep)
            for each in results:
                self._add(each)
        elif is_new != {False}:
            self._is_complete = False
        elif not function.is_view:
            self._call(functools.partial(function, **options), arguments, self._place)

    def _call(
        self,
        function: Callable,
        arguments: tuple,
        place_of: Callable[[torch.Tensor], int],
        keep: Callable[[Tensors, Any], None] | None = None,
    ) -> None:
        """A step that calls ``function`` with these arguments; ``keep`` adds what it returns to the tensors."""
        template = list(arguments)
        direct, made = [], []
        for number, argument in enumerate(arguments):
            fill = self._fill(argument, place_of)
            if isinstance(fill, int):
                direct.append((number, fill))
            elif fill is not None:
                made.append((number, fill))
            if fill is not None:
                template[number] = None

        def step(tensors):
            filled = template.copy()
            for number, place in direct:
                filled[number] = tensors[place]
            for number, fill in made:
                filled[number] = fill(tensors)
            result = function(*filled)
            if keep is not None:
                keep(tensors, result)

        self._last_use.update(dict.fromkeys(self._used, len(self._steps)))
        self._used.clear()
        self._steps.append(step)

    def _fill(self, argument: Any, place_of: Callable[[torch.Tensor], int]) -> int | Callable[[Tensors], Any] | None:
        """Where an argument is among the tensors, or what makes it of them; None where no tensor is in it."""
        if isinstance(argument, torch.Tensor):
            return place_of(argument)
        if hasattr(argument, "block_shape"):  # a tensor descriptor, Triton's or Gluon's
            base, kind, fields = place_of(argument.base), type(argument), vars(argument) | {"base": None}
            return lambda tensors: _descriptor(kind, fields, tensors[base])
        if isinstance(argument, tuple | list):
            fills = [self._fill(each, place_of) for each in argument]
            if any(fill is not None for fill in fills):
                constants = [each if fill is None else None for fill, each in zip(fills, argument, strict=True)]
                return lambda tensors: tuple([_filled(*pair, tensors) for pair in zip(fills, constants, strict=True)])
        return None

    def _make(self, maker: Callable[[], torch.Tensor]) -> None:
        self._makers[len(self._parts)] = len(self._steps)
        self._steps.append(lambda tensors: tensors.append(maker()))

    def _add(self, tensor: torch.Tensor | None) -> None:
        """What is next in the list, as a step has put it there."""
        if tensor is not None:
            self._owners.setdefault(_storage(tensor), []).append(len(self._parts))
        self._parts.append(None if tensor is None else _part(tensor))

    def _owner(self, tensor: torch.Tensor) -> int | None:
        """The tensor in the list that this one is a part of; None where there is none, or it cannot be told."""
        owners = self._owners.get(_storage(tensor), [])
        if len(owners) > 1:
            owners = [place for place in owners if self._parts[place][:2] == _part(tensor)[:2]]
        return owners[0] if len(owners) == 1 else None

    def _address(self, tensor: torch.Tensor) -> int:
        """As ``_place``, for a launch: where a tensor begins is all it needs."""
        owner = self._owner(tensor)
        if owner is not None and _part(tensor)[:2] == self._parts[owner][:2]:
            self._used.append(owner)
            return owner
        return self._place(tensor)

    def _place(self, tensor: torch.Tensor) -> int:
        """Where in the list ``tensor`` is when the next step runs: as it is, or made there as a view of another."""
        owner = self._owner(tensor)
        if owner is None:
            self._is_complete = False
            return 0
        part, whole = _part(tensor), self._parts[owner]
        if part != whole:
            if part[1].itemsize != whole[1].itemsize:
                self._is_complete = False
            place = self._views.get((owner, part))
            if place is None:
                self._last_use[owner] = len(self._steps)
                self._steps.append(_view_step(owner, part, whole))
                self._parts.append(part)
                place = self._views[owner, part] = len(self._parts) - 1
            owner = place
        self._used.append(owner)
        return owner


def _tensors_in(arguments: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    """By the address of what stands for the memory; while this is held, no other storage gets that address."""
    return StorageWeakRef(tensor.untyped_storage())


def _part(tensor: torch.Tensor) -> _Part:
    return int(tensor.storage_offset()), tensor.dtype, tensor.shape, tensor.stride()


def _overlap(first: _Part, second: _Part) -> bool:
    """Whether two parts of a storage may have memory in common."""

    def ends(part: _Part) -> tuple[int, int]:
        offset, dtype, size, stride = part
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        return offset * dtype.itemsize, (last + 1 if 0 not in size else offset) * dtype.itemsize

    (first_begin, first_end), (second_begin, second_end) = ends(first), ends(second)
    return first_begin < second_end and second_begin < first_end


def _view_step(owner: int, part: _Part, whole: _Part) -> Step:
    offset, dtype, size, stride = part
    distance = offset - whole[0]

    def step(tensors):
        view = tensors[owner].as_strided(size, stride, tensors[owner].storage_offset() + distance)
        tensors.append(view if dtype == whole[1] else view.view(dtype))

    return step


def _laid_out(tensor: torch.Tensor | None, layout: tuple | None) -> torch.Tensor | None:
    """The tensor as it lay when it was noted: a library may choose another layout when it is set otherwise."""
    if tensor is None or layout is None or (tensor.shape, tensor.stride()) == layout:
        return tensor
    return torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _make_nothing(tensors: Tensors) -> None:
    tensors.append(None)


def _free(places: list[int], tensors: Tensors) -> None:
    for place in places:
        tensors[place] = None


def _filled(fill: int | Callable[[Tensors], Any] | None, constant: Any, tensors: Tensors) -> Any:
    if fill is None:
        return constant
    return tensors[fill] if isinstance(fill, int) else fill(tensors)


def _descriptor(kind: type, fields: dict[str, Any], base: torch.Tensor) -> Any:
    """As one was made before, of another tensor like that one: nothing needs to be checked again."""
    descriptor: Any = object.__new__(kind)
    descriptor.__dict__.update(fields)
    descriptor.base = base
    return descriptor
