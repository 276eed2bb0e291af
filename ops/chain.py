"""Chains that can be called: every public function of ``ops`` is one of them with a signature of its own."""

import functools
import itertools
import marshal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

import triton_kernels.chain
from ops import chain_in_graph, checks, convolution, open_norms, operators, plain, plans, precision, tensor_parallel
from ops.calls import Call, register, text_of
from ops.contractions import CONTRACTIONS
from ops.operators import Prepared, is_unobserved
from triton_kernels.built_in import NUMBERS, name_of
from triton_kernels.group_norm import WIDEST_GROUP
from triton_kernels.pointwise import Pointwise

Tensor = torch.Tensor

#: Of what a call that comes again may consist, beside tensors.
_NUMBERS = frozenset((int, float, bool))
#: How the numbers of a pointwise function are checked, where they are more than numbers.
_CHECKS = {"hardtanh": checks.bounds}
_LAYOUTS = {
    "linear": tensor_parallel.LINEAR,
    "conv2d": tensor_parallel.CONV2D,
    "conv_transpose2d": tensor_parallel.CONV_TRANSPOSE2D,
}


@dataclass(frozen=True)
class Chain(triton_kernels.chain.Chain):
    """A chain as a function: contraction → ``before`` → group norm → ``after`` → reduction.

    It is called with the input, the weight where it has a contraction, and an operand for each step that takes one, in
    order: the contraction's bias, those of ``before``, the norm's weight and bias, those of ``after``, and the
    reduction's bias. Tensors among them may be None. It runs, differentiates, compiles and checks its arguments as the
    functions of ``ops`` do, which are such chains.

    Args:
        contraction: "linear", "conv2d", "conv_transpose2d", or "" for none.
        before: Pointwise functions before the norm.
        norm: "group_norm", or "" for none.
        after: Pointwise functions after the norm.
        reduction: What follows, or None.
        names: What error messages call the operands; of numbers, a tuple of names.

    Raises:
        TypeError: ``before`` or ``after`` is no tuple of pointwise functions.
        ValueError: A contraction or norm is not known, a convolution has no norm, a pointwise function has the name of
            another one, or a reduction does not follow a linear layer's norm alone.

    Example::

        chain = ops.Chain("linear", after=(SILU,))
        chain(input, weight, linear_bias, norm_weight, norm_bias, num_groups=32)
    """

    names: tuple[Any, ...] = field(default=(), kw_only=True, compare=False, repr=False)
    #: What compiled graphs call the chain.
    text: str = field(init=False, compare=False, repr=False)
    _data: triton_kernels.chain.Chain = field(init=False, compare=False, repr=False)
    _prepared: plans.Kept = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, known in (("contraction", CONTRACTIONS), ("norm", ("", "group_norm"))):
            if getattr(self, name) not in tuple(known):
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {getattr(self, name)!r}")
        for name, steps in (("before", self.before), ("after", self.after)):
            if not (isinstance(steps, tuple) and all(isinstance(step, Pointwise) for step in steps)):
                raise TypeError(f"{name} must be a tuple of Pointwise, got {steps!r}")
        if not isinstance(self.reduction, triton_kernels.chain.Reduction | None):
            raise TypeError(f"reduction must be a Reduction or None, got {self.reduction!r}")
        if self._convolves and not self.norm:
            raise ValueError("a chain with a convolution must have a norm")
        if self.reduction and self.contraction != "linear":
            raise ValueError(f"a reduction must follow a linear layer, got {self.contraction!r}")
        if self.has_rows and any(step.operand == "sample" for step in (*self.before, *self.after)):
            raise ValueError("a vector a sample must be an operand where channels have further dimensions behind them")
        register(self)
        super().__post_init__()
        given = iter(self.names)
        names = [next(given, step.name) for step in self.steps if step.is_called_with_operand]
        names += [next(given, self.reduction.name)] if self.reduction else []
        data = triton_kernels.chain.Chain(self.contraction, self.before, self.norm, self.after, self.reduction)
        text = text_of(self, list(map(name_of, self.steps)))
        vars(self).update(names=tuple(names), text=text, _data=data, _prepared=plans.Kept())  # the class is frozen
        chain_in_graph.by_text.setdefault(self.text, self)

    def _changed(self, *changes: Callable[[Pointwise], Pointwise]) -> triton_kernels.chain.Chain:
        """What kernels compute for other dtypes is no chain of a user's: its functions have no names of their own."""
        return self._data._changed(*changes)

    def __call__(
        self,
        input: Tensor,
        *operands: Any,
        num_groups: int = 1,
        eps: float = 1e-5,
        **geometry: Any,
    ) -> Tensor:
        """Apply the chain. ``geometry`` is that of a convolution, as in ``torch.nn.functional``."""
        expected = len(self.names) + bool(self.contraction)
        if len(operands) != expected:
            what = ", ".join(map(str, (*(["weight"] if self.contraction else []), *self.names)))
            raise TypeError(f"expected {expected} operands after the input ({what}), got {len(operands)}")
        is_plain = self.contraction == "conv2d"
        for name in geometry:
            if not self._convolves:
                raise TypeError(f"{name!r} is an argument of convolutions, and {self.text!r} has none")
            if name not in convolution.DEFAULTS or (is_plain and name == "output_padding"):
                raise TypeError(f"{name!r} is no argument of a {'' if is_plain else 'transposed '}convolution")
        weight, of_steps = (operands[:1], operands[1:]) if self.contraction else ((None,), operands)
        of_bias = operands[-1:] if self.reduction else (None,)
        kinds = [step.has_tensor for step in self.steps if step.is_called_with_operand]
        tensors, numbers = (
            tuple([each for each, kind in zip(of_steps, kinds, strict=False) if kind is has_tensor])
            for has_tensor in (True, False)
        )
        sizes = convolution.in_order(self.contraction, weight[0], geometry) if self._convolves else ()
        return self.apply((input, *weight, *tensors, *of_bias), numbers, num_groups, eps, sizes)

    def apply(
        self,
        row: tuple,
        numbers: tuple = (),
        num_groups: Any = 1,
        eps: Any = 0.0,
        geometry: tuple = (),
        result: str = "",
    ) -> Tensor:
        """Apply the chain to tensors in a row: input, weight, one for each step that takes one, the reduction's bias.

        ``numbers`` are those of the steps that take numbers, ``geometry`` the values of ``convolution.DEFAULTS``.
        ``result`` is the name of the result's dtype, where that is not the one that is computed in.
        """
        if torch.compiler.is_compiling() and isinstance(row[0], torch.Tensor):
            given = chain_in_graph.write(self, row, numbers, num_groups, eps, geometry, result)
            if given:
                return torch.ops.normfuse.chain.default(*given)
        return self._apply(row, numbers, num_groups, eps, geometry, result)

    def _apply(self, row, numbers, num_groups, eps, geometry, result, opens=False) -> Tensor:
        """By what was prepared at the first such call, where nothing of PyTorch's has to see it.

        ``opens``: whether an image's norm is open where a compiler traces it.
        """
        key = self._key(row, (num_groups, eps, numbers), geometry, result) if is_unobserved() else None
        prepared = None if key is None else self._prepared.get(key)
        if prepared is None:
            return self._apply_checked(row, numbers, num_groups, eps, geometry, result, key, opens)
        if not precision.autocasts(row[0].device):
            return prepared.run(row)
        row = self._cast(row)
        with precision.without_autocast(row[0].device):
            return prepared.run(row)

    def _cast(self, row: tuple) -> tuple:
        """The tensors as autocast has them: it casts what is multiplied."""
        if not (self.contraction and precision.autocasts(row[0].device)):
            return row
        dtype = precision.autocast_dtype(row[0])
        return row[0].to(dtype), row[1].to(dtype), *row[2:]

    def _key(self, row: tuple, numbers: tuple, geometry: tuple, result: str) -> tuple | None:
        """All that a call's plan may depend on, or None where it is not to be looked up: tensors of a class of their
        own, sparse or negated ones, and numbers that cannot be written out."""
        if not checks.PLAIN_TENSORS.issuperset(map(type, row)):
            return None
        wants = torch.is_grad_enabled()
        try:
            # fmt: off
            tensors = [
                each is not None and (
                    each.shape, each.stride(), each.dtype, each.device, each.data_ptr() & 15,
                    wants and each.requires_grad, each.is_neg() and _refuse(),
                )
                for each in row
            ]
            # fmt: on
            given = (*numbers[:2], *itertools.chain(*numbers[2]), *itertools.chain(*map(chain_in_graph.pair, geometry)))
            if not _NUMBERS.issuperset(map(type, given)):
                given = tuple(map(_number, given))
            convolves = self._convolves and precision.convolutions_allow_tf32()
            lengths = [len(each) if isinstance(each, (tuple, list)) else 0 for each in (*numbers[2], *geometry)]
            # In bytes True is not 1, nor -0.0 0.0. (Version 2 of the format has no references.)
            casts = precision.autocasts(row[0].device) and precision.autocast_dtype(row[0])
            return marshal.dumps((given, lengths), 2), convolves, casts, result, plans.settings(row[0]), *tensors
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return None

    def _apply_checked(self, row, numbers, num_groups, eps, geometry, result, key, opens=False) -> Tensor:
        num_groups, eps, numbers, geometry = self._check(row, numbers, num_groups, eps, geometry)
        if tensor_parallel.is_distributed(*row):
            return self._on_shards(row, numbers, num_groups, eps, geometry, result)
        row = self._cast(row)
        input = row[0]
        dtype = precision.DTYPES[result] if result and result != precision.name_of(input.dtype) else None
        channels = input.shape[1] if self.norm and not self.contraction else 1
        has_terms = row[1] is None or row[1].numel() > 0
        if not precision.runs_kernels(input) or channels == 0 or not has_terms:
            return plain.in_widest_dtype(self, row, numbers, num_groups, eps, geometry, dtype or input.dtype)
        if self.reduction and row[1].shape[0] // num_groups > WIDEST_GROUP:
            return self._reduce_after(row, num_groups, eps, result)
        call = self._call(row, numbers, num_groups, eps, geometry, dtype)
        if key is None and opens and open_norms.opens(call, input):
            with precision.without_autocast(input.device):
                return open_norms.apply(call, row)
        if key is None:
            return operators.run(call, row)
        wanted = [torch.is_grad_enabled() and each is not None and each.requires_grad for each in row]
        with precision.without_autocast(input.device):
            plan = plans.make_forward(call, row, any(wanted))
            return self._prepared.add(key, Prepared(call, row, wanted, plan)).run(row)

    def _in_pytorch(self, row, numbers, num_groups, eps, geometry, result) -> Tensor:
        num_groups, eps, numbers, geometry = self._check(row, numbers, num_groups, eps, geometry)
        row = self._cast(row)
        dtype = precision.DTYPES[result] if result else row[0].dtype
        return plain.in_widest_dtype(self, row, numbers, num_groups, eps, geometry, dtype)

    def _call(self, row, numbers, num_groups, eps, geometry, result) -> Call:
        rest, tensors = iter(numbers), iter(row[2:])
        of_steps = tuple([next(rest) if step.operand == "numbers" else None for step in self.steps])
        present = tuple([not step.has_tensor or next(tensors) is not None for step in self.steps])
        allow_tf32 = geometry is not None and precision.convolutions_allow_tf32()
        has_bias = row[-1] is not None
        return Call(self._data, of_steps, present, num_groups, eps, geometry, allow_tf32, has_bias, result)

    def _reduce_after(self, row, num_groups, eps, result) -> Tensor:
        """The row minimum by PyTorch, of groups that no program holds whole."""
        input, *_, bias = row
        plain.tell(self, input, f"of groups wider than {WIDEST_GROUP}, the row minimum alone")
        normalized = _without_reduction(self).apply((*row[:-1], None), (), num_groups, eps, (), result)
        minimum = normalized.min(dim=1, keepdim=True)[0]
        return minimum if bias is None else (minimum + bias).to(minimum.dtype)

    def _check(self, row, numbers, num_groups, eps, geometry):
        """Check the arguments; returns all that are no tensors as Python's numbers."""
        input, weight = row[0], row[1]
        required = {"input": input, "weight": weight} if self.contraction else {"input": input}
        checks.tensors(required, self._named(row))
        if self.contraction == "linear":
            checks.linear(input, weight)
            channels, shape = weight.shape[0], (*input.shape[:-1], weight.shape[0])
        elif self.contraction:
            sizes: dict[str, Any] = convolution.DEFAULTS | dict(zip(convolution.DEFAULTS, geometry, strict=False))
            geometry = convolution.check(convolution.IS_TRANSPOSED[self.contraction], input, weight, **sizes)
            channels = geometry.channels(weight)
            shape = (input.shape[0], channels, *geometry.output_size(*input.shape[2:]))
        else:
            channels, shape = self._channels(input), input.shape
        if self.norm:
            num_groups, eps = checks.groups(channels, num_groups), checks.epsilon(eps)
        for (name, step), tensor in zip(self._tensors.items(), row[2:], strict=False):
            if step and tensor is not None:
                checks.operand(name, step.operand, tensor.shape, shape, -1 if self.has_rows else 1 - len(shape))
        if self.reduction:
            if input.ndim != 2:
                raise ValueError(f"input must be 2-D (batch, in_features), got shape {tuple(input.shape)}")
            if row[-1] is not None and not checks.is_channel_axis(row[-1].shape):
                raise ValueError(f"{self.names[-1]} must have shape (1, channels, 1, 1), got {tuple(row[-1].shape)}")
        checked = tuple(_checked(*each) for each in zip(self._number_steps, numbers, strict=True))
        return num_groups, eps, checked, geometry or None

    @functools.cached_property
    def _convolves(self) -> bool:
        return self.contraction in convolution.IS_TRANSPOSED

    @functools.cached_property
    def _operand_steps(self) -> list[tuple[Pointwise, Any]]:
        """The steps that take an operand, each with its name."""
        return list(zip([step for step in self.steps if step.is_called_with_operand], self.names, strict=False))

    @functools.cached_property
    def _number_steps(self) -> list[tuple[Pointwise, Any]]:
        return [(step, name) for step, name in self._operand_steps if step.operand == "numbers"]

    @functools.cached_property
    def _tensors(self) -> dict[str, Pointwise | None]:
        """By name the steps that take a vector or a tensor, then None for the reduction's bias, as they lie in a row.

        Of equal names, which a user's chain may have, each gets a number.
        """
        found: dict[str, Pointwise | None] = {}
        for step, name in self._operand_steps:
            if step.has_tensor:
                found[name if name not in found else f"{name} {len(found)}"] = step
        return {**found, self.names[-1]: None} if self.reduction else found

    def _named(self, row) -> dict[str, Tensor | None]:
        return dict(zip(self._tensors, row[2:], strict=False))

    def _channels(self, input: Tensor) -> int:
        if self.norm:
            if input.ndim < 2:
                raise ValueError(f"input must be at least 2-D (batch, channels, *), got shape {tuple(input.shape)}")
            return input.shape[1]
        if input.ndim < 1:
            raise ValueError("input must have at least one dimension (*, channels), got a 0-D tensor")
        return input.shape[-1]

    def _on_shards(self, row, numbers, num_groups, eps, geometry, result) -> Tensor:
        named = self._named(row)
        tensors = {"input": row[0], **({"weight": row[1]} if self.contraction else {}), **named}
        bias = tensors.pop(self.names[-1]) if self.reduction else None
        sizes = tuple(geometry.sizes.values()) if geometry else ()
        layout = _LAYOUTS.get(self.contraction, tensor_parallel.NORM if self.norm else tensor_parallel.POINTWISE)

        def of_shares(input, num_groups=1, **shares):
            weight = shares.pop("weight") if self.contraction else None
            return self.apply((input, weight, *shares.values(), None), numbers, num_groups, eps, sizes, result)

        if self.reduction:
            return tensor_parallel.minimum_on_shards(of_shares, tensors, bias, num_groups)
        parts = num_groups if self.norm else None, geometry.groups if geometry else 1
        kinds = {name: step.operand for name, step in self._tensors.items() if step}
        return tensor_parallel.on_shards(of_shares, layout, tensors, *parts, kinds)


def _checked(named: tuple[Pointwise, Any], given: tuple) -> tuple[float, ...]:
    """A step's numbers as Python's."""
    step, name = named
    if not isinstance(given, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of numbers, got {given!r}")
    if step.name in _CHECKS:
        if len(given) != 2:
            raise ValueError(f"{name} must be two numbers, got {given!r}")
        return _CHECKS[step.name](*given)
    known = NUMBERS.get(step.name, given)
    if len(given) != len(known):
        count = "one number" if len(known) == 1 else f"{len(known)} numbers"
        raise ValueError(f"{name} must be {count} ({', '.join(known)}), got {given!r}")
    names = name if isinstance(name, tuple) else (name,) * len(given)
    return tuple(float(checks.real(*pair)) for pair in zip(names, given, strict=True))


def call_in_graph(*given: Any) -> Tensor:
    """The operator ``normfuse::chain``, without the dispatcher."""
    chain, arguments = chain_in_graph.read(*given)
    return chain._apply(*arguments)


def decompositions() -> dict[torch._ops.OpOverload, Callable[..., Tensor]]:
    """What lets an exported program have PyTorch's own operators in the place of each chain.

    Such a program is loaded and run where this project is not installed. It launches no kernel of this project's.

    Returns:
        By operator a function that computes the same, for ``torch.export.ExportedProgram.run_decompositions``.

    Example::

        program = torch.export.export(layer, (torch.randn(16, 32),))
        program = program.run_decompositions({**torch.export.default_decompositions(), **ops.decompositions()})
    """

    def in_pytorch(*given: Any) -> Tensor:
        chain, arguments = chain_in_graph.read(*given)
        return chain._in_pytorch(*arguments[:-1])

    return {torch.ops.normfuse.chain.default: in_pytorch}


torch.library.define(
    "normfuse::chain",
    "(str chain, Tensor?[] row, float[] scalars, SymInt num_groups, float eps, SymInt[] sizes) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl("normfuse::chain", "CompositeImplicitAutograd", call_in_graph)


@functools.cache
def _without_reduction(chain: Chain) -> Chain:
    return Chain(chain.contraction, chain.before, chain.norm, chain.after)


def _refuse() -> NoReturn:
    raise ValueError("kernels read memory as it is")


def _number(value: Any) -> Any:
    """Another library's number as Python's."""
    number = checks.plain(value)
    if type(number) not in _NUMBERS:
        raise TypeError(f"{value!r} is no number")
    return number
