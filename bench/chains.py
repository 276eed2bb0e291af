"""The chains that are measured: each is a declaration, from which all else follows.

Needs neither torch nor the kernels.
"""

from dataclasses import dataclass
from functools import cached_property

from bench.sizes import TARGET

#: What a chain begins with, and the name that rows have for it.
PRODUCTS = {"linear": "GEMM", "conv2d": "convolution", "conv_transpose2d": "convolution", "": "norm"}
NORMS = ("group_norm", "layer_norm")
ROW_MINIMUM = "row_minimum"


@dataclass(frozen=True)
class Part:
    """One word of a composition.

    ``mul(scale)`` has the name "mul" and the arguments ("scale",), and ``conv_transpose2d(padding=1)`` the options
    (("padding", 1),).
    """

    name: str
    arguments: tuple[float | str, ...] = ()
    options: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Chain:
    """A chain, and where it is measured. A new one needs an entry in ``CHAINS`` and nothing else.

    Args:
        name: What the command line calls it.
        composition: What it computes, in order. Pointwise functions have the names and numbers of ``ops.pointwise``.
            Where one takes a tensor, that is named as in ``bench.compositions.OPERANDS``. A group norm may have its
            number of groups.
        sizes: The shapes that are measured by default on a GPU, as in ``bench.sizes.FORMS``.
        memory_formats: Those that are measured by default, of images; none for a chain without images.
        group_size: Channels of a group, where the composition has no number of groups.
        function: The function of ``ops`` that is this chain alone. Without one, it is called by that which takes steps.
    """

    name: str
    composition: str
    sizes: tuple[str, ...]
    memory_formats: tuple[str, ...] = ()
    group_size: int = 0
    function: str = ""

    @property
    def label(self) -> str:
        """What rows call it."""
        return self.name if self.is_composed else self.name.upper()

    @property
    def is_composed(self) -> bool:
        """Whether it is one of the family that is called with steps, and none of the four with a name."""
        return not self.function

    @property
    def product(self) -> str:
        return PRODUCTS[self.contraction]

    @property
    def contraction(self) -> str:
        first = self._words[0].name
        return first if first in PRODUCTS else ""

    @property
    def geometry(self) -> dict[str, int]:
        """The options of the contraction: a convolution's padding."""
        return dict(self._words[0].options)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What follows the contraction."""
        return self._words[bool(self.contraction) :]

    @cached_property
    def _words(self) -> tuple[Part, ...]:
        return tuple(map(_part, self.composition.split(" -> ")))

    @cached_property
    def norm(self) -> Part:
        return next((part for part in self.parts if part.name in NORMS), Part(""))

    @cached_property
    def steps(self) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        """The pointwise functions before the norm, and those after it. Without a norm, all are after."""
        place = self.parts.index(self.norm) if self.norm.name else -1
        after = tuple(part for part in self.parts[place + 1 :] if part.name != ROW_MINIMUM)
        return self.parts[: max(place, 0)], after

    @property
    def has_row_minimum(self) -> bool:
        return self.parts[-1].name == ROW_MINIMUM

    @property
    def sample_dimension(self) -> int:
        """Which dimension of the output is the batch. Row minima with a bias are (1, channels, batch, 1)."""
        return 2 if self.has_row_minimum else 0


def _part(word: str) -> Part:
    name, _, inside = word.removesuffix(")").partition("(")
    given = [each.rpartition("=") for each in inside.split(", ") if each]
    options = tuple((key, int(value)) for key, _, value in given if key)
    return Part(name, tuple(_argument(value) for key, _, value in given if not key), options)


def _argument(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


_IMAGES = ("contiguous", "channels_last")
_LINEAR_NORM = ("8192x4096x4096", "4096x1024x4096")

#: By name, in the order in which tables list them.
CHAINS = {
    chain.name: chain
    for chain in (
        Chain(
            "l94",
            "linear -> add(bias) -> hardtanh(-1, 1) -> mish -> group_norm",
            (TARGET["GEMM"],),
            group_size=32,
            function="linear_hardtanh_mish_group_norm",
        ),
        Chain(
            "l75",
            "linear -> group_norm -> row_minimum(bias)",
            (TARGET["GEMM"],),
            group_size=16,
            function="linear_group_norm_min",
        ),
        Chain(
            "l30",
            "linear -> group_norm -> hardtanh(-2, 2)",
            (TARGET["GEMM"],),
            group_size=512,
            function="linear_group_norm_hardtanh",
        ),
        Chain(
            "l19",
            "conv_transpose2d -> gelu -> group_norm",
            (TARGET["convolution"],),
            _IMAGES,
            group_size=8,
            function="conv_transpose2d_gelu_group_norm",
        ),
        Chain("linear_group_norm_silu", "linear -> group_norm(32) -> silu", _LINEAR_NORM),
        Chain("linear_layer_norm_gelu", "linear -> layer_norm -> gelu", _LINEAR_NORM),
        Chain(
            "group_norm_silu",
            "group_norm(32) -> silu",
            ("2x320x64x64", "8x640x32x32", "1x128x512x512", "8x256x128x128", "1x128x20x256x256"),
            _IMAGES,
        ),
        Chain(
            "conv2d_group_norm_silu",
            "conv2d(padding=1) -> group_norm(32) -> silu",
            ("8x320x320x64x64x3", "8x64x64x128x128x3", "1x128x128x512x512x3"),
            ("channels_last",),
        ),
        Chain(
            "conv2d_add_mul_sigmoid_group_norm",
            "conv2d -> add(bias) -> mul(scale) -> sigmoid -> group_norm(8)",
            ("128x8x32x256x256x3",),
            ("contiguous",),
        ),
        Chain("linear_relu_mul_add", "linear -> relu -> mul(2) -> add(residual)", (TARGET["GEMM"],)),
        Chain("linear_silu_mul_add", "linear -> silu -> mul(scale) -> add(bias)", (TARGET["GEMM"],)),
    )
}
#: The four that have a function of their own.
NAMED = tuple(name for name, chain in CHAINS.items() if not chain.is_composed)
#: The labels of the others.
FAMILY = tuple(chain.label for chain in CHAINS.values() if chain.is_composed)
