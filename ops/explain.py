"""``explain``: tells which kernels a call runs, with which configs, and what memory it takes."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autotune_configs.lookup import Found
from ops import operators, plain, precision
from ops.plan import Plan
from triton_kernels.chain import Chain

_PLANS: dict[Any, tuple[str, Callable[..., Plan]]] = {
    torch.ops.normfuse.forward.default: ("forward", operators.forward_plan),
    torch.ops.normfuse.backward.default: ("backward", operators.backward_plan),
}


@dataclass(frozen=True)
class ExplainedStep:
    """A kernel's launch, or a call of a function of PyTorch's.

    Args:
        name: The kernel's or the function's.
        grid: The kernel's grid. None for functions.
        config: What the launch follows, as a dataclass. None where there is nothing to choose.
        source: Where the config is from: a table's path, with the kernel whose entry it is if that is another one,
            "heuristic", or "fixed" where the kernel has no table.
    """

    name: str
    grid: tuple[int, ...] | None = None
    config: Any = None
    source: str = ""

    @property
    def _columns(self) -> tuple[str, ...]:
        grid = "PyTorch" if self.grid is None else " x ".join(map(str, self.grid))
        settings = dataclasses.asdict(self.config) if self.config is not None else {}
        return self.name, grid, " ".join(f"{name}={value}" for name, value in settings.items()), self.source


@dataclass(frozen=True)
class ExplainedCall:
    """A chain's forward or backward pass.

    Args:
        chain: The chain with the call's numbers.
        direction: "forward" or "backward".
        device: Where it runs.
        steps: What runs, in order.
        result_bytes: Memory of the result, or of the gradients.
        kept_bytes: Memory that the backward pass needs, beside the call's own tensors.
        buffer_bytes: The most that other buffers take at one time, without what cuBLAS and cuDNN take themselves.
        reason: Why it runs as plain PyTorch, of which no steps are told; "" where it does not.
    """

    chain: str
    direction: str
    device: torch.device
    steps: tuple[ExplainedStep, ...] = ()
    result_bytes: int = 0
    kept_bytes: int = 0
    buffer_bytes: int = 0
    reason: str = ""

    def __str__(self) -> str:
        title = f"{self.direction} on {self.device}: {self.chain}"
        if self.reason:
            return f"{title}\n  plain PyTorch: {self.reason}"
        rows = [step._columns for step in self.steps]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
        sizes = ("results", self.result_bytes), ("kept", self.kept_bytes), ("buffers", self.buffer_bytes)
        memory = ", ".join(f"{name} {size / 2**20:.3f} MiB" for name, size in sizes)
        return "\n  ".join([title, *map(str.rstrip, lines), memory])


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found: ``calls`` in the order in which they ran. Printed, it is a text."""

    calls: tuple[ExplainedCall, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.calls)) or "no chain of ops ran"


class _Watch(TorchDispatchMode):
    """Asks for the plan of each call that it sees. A backward pass has it too, in any thread."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[ExplainedCall] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in _PLANS:
            direction, make_plan = _PLANS[function]
            self.calls.append(_explained(args[0], direction, make_plan(*args), result[0].device))
        return result

    def note(self, chain: Chain, input: torch.Tensor) -> None:
        """A chain that runs as plain PyTorch, forward and backward."""
        reason = "there are no channels" if input.device.type == "cuda" else "kernels run on GPUs"
        if input.dtype not in precision.KERNEL_DTYPES:
            reason = f"kernels take float32, bfloat16 and float16, not {str(input.dtype).removeprefix('torch.')}"
        self.calls.append(ExplainedCall(chain.kernel, "forward", input.device, reason=reason))


def _explained(text: str, direction: str, plan: Plan, device: torch.device) -> ExplainedCall:
    # A kernel without a config has no source, and one whose config was not looked up has no table.
    sources = {id(None): "", **{id(each.config): _source(each) for each in plan.lookups}}
    steps = [
        ExplainedStep(each.name, each.grid, each.config, sources.get(id(each.config), "fixed")) for each in plan.noted
    ]
    sizes = plan.result_bytes
    kept = sum(sizes[1:]) if direction == "forward" else 0
    return ExplainedCall(text, direction, device, tuple(steps), sum(sizes) - kept, kept, plan.buffer_bytes)


def _source(found: Found) -> str:
    return f"{found.table}, of {found.kin}" if found.kin else found.table or "heuristic"


def explain(model_or_function: Callable[..., Any], *inputs: Any, **options: Any) -> Explanation:
    """Tell which kernels and which functions of PyTorch's the chains of a call run, and with what memory.

    The model or function is called once, with these arguments. Where tensors of its result require a gradient, a
    backward pass with ones follows. It leaves every ``.grad`` as it is, and a graph behind the arguments.

    Only calls of this project's chains are told of: functions and modules of ``ops``, a fused model's, a ``Chain``'s.

    Args:
        model_or_function: What to call: a module, or any function of tensors.
        inputs: Its positional arguments.
        options: Its keyword arguments.

    Returns:
        Each call with its steps, their configs, where these are from, and its memory. ``print`` it.

    Raises:
        TypeError: ``model_or_function`` cannot be called.

    Example::

        print(ops.explain(ops.linear_group_norm_hardtanh, x, weight, bias, 32, norm_weight, norm_bias))
    """
    if not callable(model_or_function):
        raise TypeError(f"model_or_function must be callable, got {type(model_or_function).__name__}")
    watch = _Watch()
    before = plain.watcher.set(watch.note)
    try:
        with watch:
            roots = _differentiable(model_or_function(*inputs, **options))
            leaves = _leaves(roots, _differentiable((inputs, options)))
            if leaves:
                torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True)
    finally:
        plain.watcher.reset(before)
    return Explanation(tuple(watch.calls))


def _differentiable(values: Any) -> list[torch.Tensor]:
    """The tensors among the values that require gradients."""
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and each.requires_grad]


def _leaves(roots: list[torch.Tensor], arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a backward pass is to end at: the arguments, and the parameters that the results come from."""
    found = {id(each): each for each in arguments}
    nodes = [root.grad_fn for root in roots]
    seen = {each.grad_fn for each in arguments}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # of a leaf
            found[id(node.variable)] = node.variable
        nodes += [each for each, _ in node.next_functions]
    return list(found.values())
