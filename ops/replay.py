"""Calls that come again: what a function allocates and launches is noted once, and then done without the function.

Between a call and its launches lie checks, choices of kernels and configs, PyTorch's dispatcher, and Triton's own look
at each argument. They take the host longer than the GPU needs for a small problem, and come out the same for arguments
of the same shapes, strides, dtypes, alignment and numbers. So the second such call is watched, and from the third on
its allocations and launches alone are repeated, and PyTorch's own operations between them. A call that looks at a
tensor's values on the way is left as it is. No tensor is kept.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from autotune_configs import lookup, tuning
from ops import precision
from triton_kernels.device import INTERPRETED
from triton_kernels.launch import current, watched

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
#: The tensors of a call that is repeated: its arguments, then what its steps add; None where no step needs one.
Tensors = list[Any]
Step = Callable[[Tensors], object]
#: What a tensor is of its storage: offset, dtype, size and stride.
_Part = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]

#: Plans that a function has at most: a thousand batch sizes are no calls that come again.
_MOST_PLANS = 1024
_PLAIN_TENSORS = torch.Tensor, torch.nn.Parameter
_SCALARS = int, float, bool, str, type(None)
_EMPTY = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)
_LOOKS_AT_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: What the project's operators run; a watched call looks into them.
IMPLEMENTATIONS: dict[Any, Callable] = {}
#: In each thread, whether a call is being watched: one within it is part of it.
_thread = threading.local()
_all: "weakref.WeakSet[Repeated]" = weakref.WeakSet()


def forget() -> None:
    """Repeat no call that was made before: what a function does has changed."""
    for repeated in _all:
        repeated.plans.clear()


class Repeated:
    """A function of tensors, numbers and lists of numbers, whose calls are repeated.

    It must do the same for arguments that ``_key`` cannot tell apart. Where it is not to be called like that, as one of
    the arguments is something else, ``otherwise`` is.
    """

    def __init__(self, function: Callable, otherwise: Callable | None = None):
        self._function = function
        self._otherwise = otherwise or function
        #: By key: None once met, False where a call cannot be repeated.
        self.plans: dict[tuple, Plan | bool | None] = {}
        _all.add(self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function or, from the third call with these arguments' key on, do what it did."""
        tensors: Tensors = []
        key = None if getattr(_thread, "watches", False) else _key(tensors, arguments, options)
        if key is None:
            return self._otherwise(*arguments, **options)
        plan = self.plans.get(key)
        if plan:
            return plan.run(tensors)  # type: ignore[union-attr]
        if plan is False:
            return self._function(*arguments, **options)
        if key in self.plans:
            return self._watch(key, tensors, arguments, options)
        if len(self.plans) >= _MOST_PLANS:
            self.plans.clear()
        self.plans[key] = None
        return self._function(*arguments, **options)

    def _watch(self, key: tuple, tensors: Tensors, arguments: tuple, options: dict[str, Any]) -> Any:
        notes = _Notes(tensors)
        _thread.watches = True
        try:
            with watched(notes.launched), notes:
                result = self._function(*arguments, **options)
        finally:
            _thread.watches = False
        self.plans[key] = notes.plan(result) or False
        return result


def repeated_eagerly(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """``function`` repeated where autograd wants no gradient, and nothing else of PyTorch's would see the call."""
    repeated = Repeated(function)

    @functools.wraps(function)
    def call(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        return (repeated if is_unobserved() else function)(*arguments, **options)

    return call


def is_unobserved() -> bool:
    """Whether a call now is eager PyTorch's alone: no compiler, tracer, transform, mode or autocast."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state()
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
                return None
    except RuntimeError:
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
        self._arguments = len(tensors)
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._steps: list[Step] = []
        #: Steps that do nothing but make a tensor, by its place in the list that steps work on.
        self._makers: dict[int, int] = {}
        #: Of each tensor in that list, what part of its storage it is.
        self._parts: list[Any] = []
        #: By storage, the tensor in that list which was there first. Storages may be freed and come again.
        self._owners: dict[int, int] = {}
        self._views: dict[tuple[int, _Part], int] = {}
        #: The last step that needs a tensor; and those that the next step needs.
        self._last_use: dict[int, int] = {}
        self._used: list[int] = []
        for tensor in tensors:
            if _storage(tensor) in self._owners:  # which of the two a launch means would be a guess
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
        results = result if isinstance(result, tuple) else (result,)
        if not (self._is_complete and self._launches and all(isinstance(each, torch.Tensor) for each in results)):
            return None
        places = tuple(map(self._place, results))
        if not self._is_complete:
            return None
        kept = {*places, *range(self._arguments)}
        unused = {step for place, step in self._makers.items() if place not in kept and place not in self._last_use}
        steps: list[Step] = []
        for number, step in enumerate(self._steps):
            steps.append(_make_nothing if number in unused else step)
            ended = [place for place, last in self._last_use.items() if last == number and place not in kept]
            if ended:
                steps.append(functools.partial(_free, ended))
        return Plan(steps, places if isinstance(result, tuple) else places[0], self._device)

    def _called(self, function, arguments: tuple, options: dict[str, Any], result: Any) -> None:
        """An operation of PyTorch's: new tensors, a view, which is made where it is needed, or a write."""
        many = isinstance(result, tuple | list)
        results = [each for each in (result if many else (result,)) if each is not None]
        if _LOOKS_AT_VALUES & set(function.tags) or any(
            isinstance(leaf, torch.Tensor) for leaf in tree_leaves(options)
        ):
            self._is_complete = False
            return
        storages = {_storage(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)}
        is_new = {_storage(each) not in storages for each in results}
        if is_new == {True}:
            keep = list.extend if many else list.append
            self._call(functools.partial(function, **options), arguments, self._place, keep)
            for each in result if many else (result,):
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
            self._owners[_storage(tensor)] = len(self._parts)
        self._parts.append(None if tensor is None else _part(tensor))

    def _address(self, tensor: torch.Tensor) -> int:
        """As ``_place``, for a launch: where a tensor begins is all it needs."""
        owner = self._owners.get(_storage(tensor))
        if owner is not None and _part(tensor)[:2] == self._parts[owner][:2]:
            self._used.append(owner)
            return owner
        return self._place(tensor)

    def _place(self, tensor: torch.Tensor) -> int:
        """Where in the list ``tensor`` is when the next step runs: as it is, or made there as a view of another."""
        owner = self._owners.get(_storage(tensor))
        if owner is None:
            self._is_complete = False
            return 0
        part, whole = _part(tensor), self._parts[owner]
        if part != whole:
            if part[1] != whole[1]:
                self._is_complete = False
            place = self._views.get((owner, part))
            if place is None:
                self._last_use[owner] = max(self._last_use.get(owner, 0), len(self._steps))
                self._steps.append(_view_step(owner, part, whole))
                self._parts.append(part)
                place = self._views[owner, part] = len(self._parts) - 1
            owner = place
        self._used.append(owner)
        return owner


def _tensors_in(arguments: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _part(tensor: torch.Tensor) -> _Part:
    return int(tensor.storage_offset()), tensor.dtype, tensor.shape, tensor.stride()


def _view_step(owner: int, part: _Part, whole: _Part) -> Step:
    offset, _, size, stride = part
    distance = offset - whole[0]

    def step(tensors):
        tensors.append(tensors[owner].as_strided(size, stride, tensors[owner].storage_offset() + distance))

    return step


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
