"""Steps around a contraction and a norm: as functions of ``ops``, and written by hand in plain PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from typing import Any

import torch
import torch.nn.functional as F

import ops
from ops import pointwise as p
from tests.chains import Chain, note

#: name → (step of an operand, the same of a value in PyTorch, the operand's kind)
STEPS: dict[str, tuple[Callable, Callable, str]] = {
    "mish": (lambda _: p.mish(), lambda value, _: F.mish(value), ""),
    "gelu": (lambda _: p.gelu(), lambda value, _: F.gelu(value), ""),
    "gelu_tanh": (lambda _: p.gelu("tanh"), lambda value, _: F.gelu(value, approximate="tanh"), ""),
    "hardtanh": (lambda _: p.hardtanh(-0.75, 0.5), lambda value, _: F.hardtanh(value, -0.75, 0.5), ""),
    "relu": (lambda _: p.relu(), lambda value, _: F.relu(value), ""),
    "relu6": (lambda _: p.relu6(), lambda value, _: F.relu6(value), ""),
    "leaky_relu": (lambda _: p.leaky_relu(0.2), lambda value, _: F.leaky_relu(value, 0.2), ""),
    "elu": (lambda _: p.elu(1.3), lambda value, _: F.elu(value, 1.3), ""),
    "silu": (lambda _: p.silu(), lambda value, _: F.silu(value), ""),
    "tanh": (lambda _: p.tanh(), lambda value, _: torch.tanh(value), ""),
    "sigmoid": (lambda _: p.sigmoid(), lambda value, _: torch.sigmoid(value), ""),
    "clamp": (lambda _: p.clamp(max=0.6), lambda value, _: torch.clamp(value, max=0.6), ""),
    "hardsigmoid": (lambda _: p.hardsigmoid(), lambda value, _: F.hardsigmoid(value), ""),
    "hardswish": (lambda _: p.hardswish(), lambda value, _: F.hardswish(value), ""),
    "softplus": (lambda _: p.softplus(2.0, 3.0), lambda value, _: F.softplus(value, 2.0, 3.0), ""),
    "sub_number": (lambda _: p.sub(0.3), lambda value, _: value - 0.3, ""),
    "div_number": (lambda _: p.div(-1.7), lambda value, _: value / -1.7, ""),
    "sub_vector": (p.sub, lambda value, other: value - other, "vector"),
    "div_vector": (lambda other: p.div(other.abs() + 0.5), lambda value, other: value / (other.abs() + 0.5), "vector"),
    "sub_tensor": (p.sub, lambda value, other: value - other, "tensor"),
    "div_tensor": (lambda other: p.div(other.abs() + 0.5), lambda value, other: value / (other.abs() + 0.5), "tensor"),
    "add_number": (lambda _: p.add(0.3), lambda value, _: value + 0.3, ""),
    "mul_number": (lambda _: p.mul(-1.7), lambda value, _: value * -1.7, ""),
    "add_vector": (p.add, lambda value, other: value + other, "vector"),
    "mul_vector": (p.mul, lambda value, other: value * other, "vector"),
    "add_tensor": (p.add, lambda value, other: value + other, "tensor"),
    "mul_tensor": (p.mul, lambda value, other: value * other, "tensor"),
    "mul_scalar": (p.mul, lambda value, other: value * other, "scalar"),
    "div_scalar": (lambda other: p.div(other.abs() + 0.5), lambda value, other: value / (other.abs() + 0.5), "scalar"),
    "add_scalar": (p.add, lambda value, other: value + other, "scalar"),
    "sub_scalar": (p.sub, lambda value, other: value - other, "scalar"),
    "sub_sample": (p.sub, lambda value, other: value - other, "sample"),
    "div_sample": (lambda other: p.div(other.abs() + 0.5), lambda value, other: value / (other.abs() + 0.5), "sample"),
    "add_sample": (p.add, lambda value, other: value + other, "sample"),
    "mul_sample": (p.mul, lambda value, other: value * other, "sample"),
    "add_earlier": (lambda _: p.add(p.earlier()), lambda value, other: value + other, "earlier"),
    "sub_earlier": (lambda _: p.sub(p.earlier()), lambda value, other: value - other, "earlier"),
    "mul_earlier": (lambda _: p.mul(p.earlier()), lambda value, other: value * other, "earlier"),
}


#: By the kind of an operand its shape, and the shape in which it broadcasts over values.
OPERANDS: dict[str, tuple[Callable, Callable]] = {
    "vector": (
        lambda head: (head.channels,),
        lambda head, value: (-1, *[1] * (value.ndim - 2)) if head.has_images else (-1,),
    ),
    "tensor": (lambda head: head.shape, lambda head, value: value.shape),
    "scalar": (lambda head: (), lambda head, value: ()),
    # Of images. Elsewhere a sample is a row, and this a tensor.
    "sample": (
        lambda head: (*head.sizes.lead, head.channels) if head.has_images else head.shape,
        lambda head, value: (*value.shape[:2], *[1] * (value.ndim - 2)) if head.has_images else value.shape,
    ),
}


def _group_norm(z, head, weight, bias, eps):
    weight = torch.ones_like(bias) if weight is None and bias is not None else weight
    samples = z if head.has_images else z.reshape(-1, z.shape[-1])
    return torch.group_norm(samples, head.sizes.groups, weight, bias, eps).view(z.shape)


def _layer_norm(z, head, weight, bias, eps):
    return F.layer_norm(z, (head.channels,), weight, bias, eps)


@dataclass(frozen=True)
class Sizes:
    """Of the input, ``lead`` × ``depth`` or, for images, ``lead`` × ``depth`` × ``pixels``, and of the channels.

    Without a contraction, the input has ``groups * group_size`` channels in place of ``depth``.
    """

    lead: tuple[int, ...] = (2, 7)
    depth: int = 5
    groups: int = 2
    group_size: int = 6
    pixels: tuple[int, ...] = ()


@dataclass(frozen=True)
class Contraction:
    """A function of PyTorch, its weight's shape from the channels of its input and its output, and its arguments."""

    plain: Callable[..., torch.Tensor]
    weight: Callable[[int, int], tuple[int, ...]]
    bias: str
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Head:
    """A function of the family without steps."""

    contraction: Contraction | None
    norm: Callable[..., torch.Tensor] | None
    sizes: Sizes = Sizes()

    @property
    def has_images(self) -> bool:
        """Whether the channels are the second axis."""
        return bool(self.sizes.pixels)

    @property
    def axis(self) -> int:
        return 1 if self.has_images else -1

    @property
    def channels(self) -> int:
        return self.sizes.groups * self.sizes.group_size

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that the function takes, in order, but for the steps' operands."""
        depth, vectors = self.channels, ["weight", "bias"] if self.norm else []
        shapes = {}
        if self.contraction:
            depth, vectors = self.sizes.depth, [f"norm_{name}" for name in vectors]
            shapes["weight"] = self.contraction.weight(depth, self.channels)
            vectors = [self.contraction.bias if self.norm else "bias", *vectors]
        input = (*self.sizes.lead, depth, *self.sizes.pixels)
        return {"input": input, **shapes, **dict.fromkeys(vectors, (self.channels,))}

    @property
    def numbers(self) -> dict[str, Any]:
        """The function's other arguments."""
        numbers = dict(self.contraction.numbers) if self.contraction else {}
        if self.norm is _group_norm:
            numbers["num_groups"] = self.sizes.groups
        elif self.norm and not self.contraction:
            numbers["normalized_shape"] = self.channels
        return numbers

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        tensors = [torch.empty(shape, device="meta") for shape in self.shapes.values()]
        return tuple(self.contract(tensors)[0].shape)

    def contract(self, tensors: list[torch.Tensor | None]) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """The values that the steps before the norm take, and the tensors that are left: the norm's vectors.

        As PyTorch does on a GPU: there it adds the bias to images that cuDNN has rounded. On the CPU it rounds once.
        """
        if self.contraction is None:
            return tensors[0], tensors[1:]
        input, weight, bias, *vectors = tensors
        if not self.has_images:
            return self.contraction.plain(input, weight, bias), vectors
        value = self.contraction.plain(input, weight, None, **self.contraction.numbers)
        return value if bias is None else value + bias.view(-1, 1, 1), vectors


_LINEAR = Contraction(F.linear, lambda depth, channels: (channels, depth), "linear_bias")
_CONV_TRANSPOSE2D = Contraction(
    F.conv_transpose2d, lambda depth, channels: (depth, channels, 3, 3), "conv_bias", {"stride": 2, "padding": 1}
)
_CONV2D = Contraction(
    F.conv2d, lambda depth, channels: (channels, depth, 3, 3), "conv_bias", {"padding": "same", "dilation": (1, 2)}
)
HEADS = {
    "linear": Head(_LINEAR, None),
    "linear_group_norm": Head(_LINEAR, _group_norm),
    "linear_layer_norm": Head(_LINEAR, _layer_norm),
    "conv2d_group_norm": Head(_CONV2D, _group_norm, Sizes((3,), 4, pixels=(5, 4))),
    "conv_transpose2d_group_norm": Head(_CONV_TRANSPOSE2D, _group_norm, Sizes((3,), 4, pixels=(5, 4))),
    "group_norm": Head(None, _group_norm, Sizes((9,), pixels=(5,))),
    "layer_norm": Head(None, _layer_norm),
}


@dataclass(frozen=True)
class Composition(Chain):
    """A head with steps by their names in ``STEPS``. Its function takes the operands as arguments of their own."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    #: None for those of ``HEADS``.
    sizes: Sizes | None = None

    @property
    def head(self) -> Head:
        head = HEADS[self.name]
        return replace(head, sizes=self.sizes) if self.sizes else head

    @property
    def has_images(self) -> bool:
        return self.head.has_images

    @property
    def function(self) -> Callable[..., torch.Tensor]:
        return self.of(getattr(ops, self.name))

    @property
    def operands(self) -> dict[str, str]:
        """The kinds of the operands by their names."""
        steps = [("before", self.before), ("after", self.after)]
        kinds = {f"{name}{i}": STEPS[each][2] for name, names in steps for i, each in enumerate(names)}
        return {name: kind for name, kind in kinds.items() if kind in OPERANDS}

    def of(self, public: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A function of ``ops`` or of ``ops.reference`` with these steps."""

        def function(**arguments):
            steps = {}
            for name, names in (("before", self.before), ("after", self.after)):
                if names:
                    made = [STEPS[each][0](arguments.pop(f"{name}{i}", None)) for i, each in enumerate(names)]
                    steps[name] = tuple(made)
            return public(**arguments, **steps)

        return function

    def by_hand(self, **arguments) -> torch.Tensor:
        head = self.head
        value, vectors = head.contract([arguments[name] for name in head.shapes])
        value = self._apply("before", self.before, value, arguments)
        if head.norm:
            value = head.norm(value, head, *vectors, arguments.get("eps", 1e-5))
        return self._apply("after", self.after, value, arguments)

    def _apply(self, name, steps, value, arguments):
        values = []
        for i, each in enumerate(steps):
            step, plain, kind = STEPS[each]
            operand = arguments.get(f"{name}{i}")
            function, numbers = step(operand)
            if kind in OPERANDS:
                operand = operand.view(OPERANDS[kind][1](self.head, value))
            elif kind == "earlier":
                operand = values[-1]
            values.append(note(value, function.jumps(numbers)))
            value = plain(values[-1], operand)
        return value

    def arguments(self, dtype=torch.float32, absent=(), seed: int = 0) -> dict[str, Any]:
        """Random arguments. Those in ``absent`` are None."""
        generator = torch.Generator().manual_seed(seed)
        shapes = self.head.shapes | {name: OPERANDS[kind][0](self.head) for name, kind in self.operands.items()}
        drawn = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        return {**drawn, **dict.fromkeys(absent), **self.head.numbers}


def compose(
    name: str, before: tuple[str, ...] = (), after: tuple[str, ...] = (), sizes: Sizes | None = None
) -> Composition:
    """The composition, whose plain form is that by hand. A step that takes an earlier value cannot be the first."""
    before, after = (tuple(dropwhile(lambda each: STEPS[each][2] == "earlier", steps)) for steps in (before, after))
    empty = Composition(name, torch.clone, before=before, after=after, sizes=sizes)
    return replace(empty, plain=empty.by_hand)
