"""``fuse``: chains of the family in a model that runs without a compiler become calls of this project's.

What becomes of a module's calls is said in ``ops.fusion``.
"""

from dataclasses import dataclass, field

from torch import nn

from ops import fusion
from ops.capture import Attempts
from ops.fusion import Fusion


@dataclass(frozen=True)
class FusedChain:
    """A chain that runs fused.

    Attributes:
        module: Path of the module whose call holds it; ``""`` for the model itself.
        chain: The chain in words.
    """

    module: str
    chain: str

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.chain}"


@dataclass(frozen=True)
class LeftChain(FusedChain):
    """A chain that is left to PyTorch.

    Attributes:
        reason: Why.
    """

    reason: str

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.reason}"


@dataclass(frozen=True)
class ModuleCalls:
    """How often a module in which chains are looked for, or were found, was called.

    Attributes:
        module: Its path; ``""`` for the model itself.
        fused: The calls in which a chain ran fused.
        as_written: The calls that ran as it was written, by why they did.
    """

    module: str
    fused: int
    as_written: dict[str, int]

    def __str__(self) -> str:
        reasons = "; ".join([f"{count} as written: {reason}" for reason, count in self.as_written.items()])
        return f"{self.module or 'the model'}: {self.fused} calls fused, {reasons}"


@dataclass(frozen=True)
class FusionReport:
    """What runs fused in a model, as of when it is read. ``print`` shows it as a list."""

    model: nn.Module = field(repr=False)
    #: The modules whose forward had been set on them when ``fuse`` was called.
    _passed_over: tuple[nn.Module, ...] = field(default=(), repr=False, compare=False)

    @property
    def chains(self) -> tuple[FusedChain, ...]:
        """Those of each module's last call: a chain is found when it is first called."""
        return tuple([FusedChain(path, chain) for path, each in self._fusions for chain in each.chains])

    @property
    def left(self) -> tuple[LeftChain, ...]:
        """Those that would not be faster, at the sizes that they were captured with, and why."""
        found = [(path, left) for path, each in self._fusions for left in each.left]
        return tuple(
            dict.fromkeys(LeftChain(".".join(filter(None, [path, within])), *of) for path, (within, *of) in found)
        )

    @property
    def calls(self) -> tuple[ModuleCalls, ...]:
        """How often each module ran fused and as it was written, without those that hold no chain."""
        records = [(path, each.record) for path, each in self._fusions]
        return tuple(
            [ModuleCalls(path, each.fused, dict(each.as_written)) for path, each in records if each.is_counted]
        )

    @property
    def _fusions(self) -> list[tuple[str, Fusion]]:
        return [(path, each) for path, module in self.model.named_modules() if (each := fusion.of(module))]

    def __str__(self) -> str:
        fusions, chains = self._fusions, self.chains
        reached = [each for _, each in fusions if each.is_reached]
        if reached and not any(each.looked or each.record.is_counted for each in reached):
            return "chains are found in the model's first call"
        count = f"{len(chains)} chain{'' if len(chains) == 1 else 's'}"
        calls = [each for each in self.calls if each.as_written]
        return "\n  ".join([count, *map(str, (*chains, *self.left, *calls)), *self._missed])

    @property
    def _missed(self) -> list[str]:
        """The modules whose calls are not looked at, themselves or as a part of others, and why."""
        missed: list[str] = []
        captured: set[nn.Module] = set()  # with what is around it
        for path, module in self.model.named_modules():
            found, why = fusion.of(module), ""
            if found and not found.is_reached:
                why = "nothing of it ran fused since its forward was set or removed"
            elif not found and module in self._passed_over:
                why = "not looked at, as its forward was set on it"
            if why and module not in captured:
                missed.append(f"{path or 'the model'}: {why}")
            if found and found.holds:
                captured.update(module.modules())
        return missed


def fuse(model: nn.Module, *, everything: bool = False) -> FusionReport:
    """Let the chains of the family in a model run fused, in place.

    Chains are found when the model, or a part of it, is first called, in training and in evaluation. The smallest
    modules whose call holds a whole chain are captured by Dynamo, as ``torch.compile`` does it, and run without a
    compiler: with other shapes, dtypes or modes, and after a change of what they read, they are captured again.
    Parameters, state_dict, optimisers and hooks stay what they are.

    On a GPU a chain is fused if that is faster at the sizes of its first call: if it saves more of the GPU's time than
    the captured call takes the host. On the CPU, where no kernel runs, all chains are.

    Results, their strides and gradients are the plain model's up to rounding.

    Args:
        model: The model to change.
        everything: Whether to fuse the chains that would not be faster, too.

    Returns:
        A report that tells, whenever it is read, which chains run fused, and what does not, and why.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.

    Example::

        model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU())
        report = ops.fuse(model)
        model(torch.randn(16, 64))
        print(report)
    """
    _require_module(model)
    modules = [each for each in model.modules() if fusion.of(each) or fusion.may_hold(each)]
    unfuse(model)
    attempts = Attempts()
    for module in modules:
        fusion.install(module, everything, attempts)
    return FusionReport(model, tuple([each for each in model.modules() if fusion.is_passed_over(each)]))


def unfuse(model: nn.Module) -> None:
    """Undo ``fuse``, in place: every module runs its class's forward again.

    A model that was never fused stays as it is.

    Args:
        model: The model to change.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.
    """
    _require_module(model)
    for module in model.modules():
        fusion.remove(module)


def _require_module(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
