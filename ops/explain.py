"""``explain``: tells which kernels a call runs, with which configs, what memory it takes, and what it leaves to
PyTorch."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autotune_configs.lookup import Found
from ops import backend, inductor, operators, plain, precision, rewriting
from ops.calls import Call, parse
from ops.capture import in_parts
from ops.graph_nodes import CONTRACTIONS, NORMS, REFUSAL, bound, example, name_of
from ops.inductor import tensors_in
from ops.plan import Plan
from triton_kernels.chain import Chain


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
        direction: "forward" or "backward"; of matrices without a chain, "product"; of an open norm in a compiled
            graph, which is Inductor's beside these, "statistics" or "sums"; of a convolution of few channels there, or
            its input's gradient, "convolution"; of its weight, or a max pooling, "gradient"; of weights and their
            gradients there, "copies".
        device: Where it runs.
        steps: What runs, in order.
        result_bytes: Memory of the result, or of the gradients.
        kept_bytes: Memory that the backward pass needs, beside the call's own tensors.
        buffer_bytes: The most that other buffers take at one time, without what cuBLAS and cuDNN take themselves.
        reason: Why it runs as plain PyTorch, of which no steps are told; "" where it does not.
        seconds: Of one run behind others, where that was asked for.
        pytorch_seconds: The same of PyTorch's functions in eager mode, one after another. None where they refuse the
            dtypes, which are mixed under autocast, and of an open norm.
    """

    chain: str
    direction: str
    device: torch.device
    steps: tuple[ExplainedStep, ...] = ()
    result_bytes: int = 0
    kept_bytes: int = 0
    buffer_bytes: int = 0
    reason: str = ""
    seconds: float | None = None
    pytorch_seconds: float | None = None

    @property
    def _times(self) -> str:
        if self.seconds is None:
            return ""
        ours = f"{self.seconds * 1e6:.1f} us"
        if self.pytorch_seconds is None:
            return ours
        return f"{ours}, PyTorch {self.pytorch_seconds * 1e6:.1f} us: {self.seconds / self.pytorch_seconds:.2f}"

    def __str__(self) -> str:
        title = f"{self.direction} on {self.device}: {self.chain}"
        if self.reason:
            return f"{title}\n  plain PyTorch: {self.reason}"
        rows = [step._columns for step in self.steps]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
        sizes = ("results", self.result_bytes), ("kept", self.kept_bytes), ("buffers", self.buffer_bytes)
        memory = ", ".join(f"{name} {size / 2**20:.3f} MiB" for name, size in sizes)
        return "\n  ".join(filter(None, [title, *map(str.rstrip, lines), memory, self._times]))


@dataclass(frozen=True)
class LeftStep:
    """A contraction or a norm of a model that is in no chain.

    Args:
        module: Path of the module that calls it; "" for the model itself.
        name: What it is: "linear", "conv2d", "conv_transpose2d", "group_norm" or "layer_norm".
        reason: Why it is in none.
    """

    module: str
    name: str
    reason: str

    def __str__(self) -> str:
        return f"left: {self.name} of {self.module or 'the model'}: {self.reason}"


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found: ``calls`` in the order in which they ran, and of a model what is ``left`` to PyTorch.
    Printed, it is a text."""

    calls: tuple[ExplainedCall, ...]
    left: tuple[LeftStep, ...] = ()

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.calls, *self.left))) or "no chain of ops ran"

    def __rich__(self) -> Any:
        """A table, for ``rich.print``."""
        from rich.markup import escape
        from rich.table import Table

        table = Table("what", "pass", "runs as", "time", box=None, pad_edge=False)
        for call in self.calls:
            steps = ", ".join([step.name for step in call.steps]) or f"plain PyTorch: {call.reason}"
            table.add_row(call.chain, call.direction, steps, call._times)
        for step in self.left:
            what = f"{step.name} of {step.module or 'the model'}"
            table.add_row(what, "", escape(f"left: {step.reason}"), "", style="yellow")
        return table


class _Watch(TorchDispatchMode):
    """Asks for the plan of each call that it sees. A backward pass has it too, in any thread."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.calls: list[ExplainedCall] = []
        #: By place in ``calls``, where it ``keeps`` them: a call's plan, and what the operator was given.
        self._given: dict[int, tuple[Plan, tuple]] = {}
        self._keeps = keeps

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.__name__
        if function.namespace == "normfuse" and name in inductor.PLANS:
            self.note_call(name, args, inductor.PLANS[name](*args))
        return result

    def note_call(self, name: str, arguments: Sequence[Any], plan: Plan) -> None:
        """A call of an operator."""
        if self._keeps:
            self._given[len(self.calls)] = plan, tuple(arguments)
        direction, title = operators.TITLES[name]
        self.calls.append(_explained(title(*arguments), direction, plan, tensors_in(arguments)[0].device))

    def measure(self) -> None:
        """Time each call that was kept, and the same in PyTorch's functions."""
        rows: dict[str, list[list]] = {}
        for place, (plan, arguments) in self._given.items():
            text, *given = arguments
            row, gradient = None, None
            if self.calls[place].direction == "forward":
                row = operators.spread(parse(text), given[0])
                if given[1]:
                    rows.setdefault(text, []).append(row)
            elif self.calls[place].direction == "backward":
                _, gradient, tensors, _ = given
                row = _row_with(tensors, rows.get(text, []))
            seconds = _seconds(functools.partial(plan.run, tensors_in(arguments)))
            theirs = _in_pytorch(parse(text), row, gradient) if row else None
            self.calls[place] = dataclasses.replace(self.calls[place], seconds=seconds, pytorch_seconds=theirs)

    def note(self, chain: Chain, input: torch.Tensor, reason: str) -> None:
        """A chain that runs as plain PyTorch, forward and backward."""
        if is_fake(input):  # a compiler's
            return
        self.calls.append(ExplainedCall(chain.kernel, "forward", input.device, reason=reason))


def _row_with(tensors: list[torch.Tensor], rows: list[list]) -> list | None:
    """The last forward pass's tensors of which these are some; None where that was not watched."""
    memory = {each.data_ptr() for each in tensors}
    return next((row for row in rows[::-1] if memory <= {each.data_ptr() for each in row if each is not None}), None)


def _seconds(run: Callable[[], Any]) -> float:
    """Of one run of many, one behind the other."""
    from torch.utils.benchmark import Timer

    return Timer("run()", globals={"run": run}).blocked_autorange(min_run_time=0.05).median


def _in_pytorch(call: Call, row: list, gradient: torch.Tensor | None) -> float | None:
    """The time of the call's forward pass, or of the backward pass from a gradient, in PyTorch's functions."""
    numbers = [each for each in call.numbers if each is not None]
    geometry = call.geometry.arguments if call.geometry else {}
    leaves = [None if each is None else each.detach().requires_grad_(gradient is not None) for each in row]
    try:
        with torch.set_grad_enabled(gradient is not None), precision.without_autocast(row[0].device):
            run = functools.partial(plain.apply, call.chain, leaves, numbers, call.num_groups, call.eps, geometry)
            if gradient is not None:
                wanted = [each for each in leaves if each is not None]
                run = functools.partial(torch.autograd.grad, run(), wanted, gradient, retain_graph=True)
            run()
            return _seconds(run)
    except RuntimeError:
        return None


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


def explain(
    model_or_function: Callable[..., Any], *inputs: Any, measure_times: bool = False, **options: Any
) -> Explanation:
    """Tell which kernels and which functions of PyTorch's the chains of a call run, and with what memory.

    The model or function is called once, with these arguments. Where tensors of its result require a gradient, a
    backward pass with ones follows. It leaves every ``.grad`` as it is, and a graph behind the arguments.

    Of a module, whether ``fuse`` changed it or not, it tells what ``fuse`` would run, and which contractions and norms
    it leaves. Of one that ``torch.compile`` returned, it tells what the backend ``"normfuse"`` runs beside Inductor's
    kernels, without CUDA graphs, after it has compiled the model for this call. Of a function, it tells the calls of
    this project's chains alone.

    Args:
        model_or_function: What to call: a module, or any function of tensors.
        inputs: Its positional arguments.
        measure_times: Whether to time each chain's passes too, beside PyTorch's functions. Each is run for some 0.1
            seconds. On a GPU, what takes the host longer than the device has the host's time.
        options: Its keyword arguments.

    Returns:
        Each call with its steps, their configs, where these are from, and its memory; what is left, and why. ``print``
        it, or ``rich.print`` it as a table.

    Raises:
        TypeError: ``model_or_function`` cannot be called.

    Example::

        print(ops.explain(ops.linear_group_norm_hardtanh, x, weight, bias, 32, norm_weight, norm_bias))
    """
    if not callable(model_or_function):
        raise TypeError(f"model_or_function must be callable, got {type(model_or_function).__name__}")
    watch = _Watch(keeps=measure_times)
    capture = _Capture(model_or_function, watch) if isinstance(model_or_function, nn.Module) else None
    before = plain.watcher.set(watch.note)
    try:
        with inductor.watched(watch.note_call):
            if capture:
                result = capture.call(*inputs, **options)
            else:
                with watch:
                    result = model_or_function(*inputs, **options)
            roots = _differentiable(result)
            leaves = _leaves(roots, _differentiable((inputs, options)))
            if leaves:
                with watch:
                    torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True)
    finally:
        plain.watcher.reset(before)
    watch.measure()
    return Explanation(tuple(watch.calls), tuple(capture.left) if capture else ())


class _Capture:
    """Rewrites the graphs of a model's call, tells what is left in them, and has their calls watched."""

    def __init__(self, model: nn.Module, watch: _Watch) -> None:
        self._compiles = isinstance(model, torch._dynamo.OptimizedModule)
        self._model: nn.Module = model._orig_mod if self._compiles else model  # type: ignore[assignment]
        self._watch = watch
        self._paths = {str(id(module)): path for path, module in self._model.named_modules()}
        self.left: list[LeftStep] = []

    def call(self, *inputs: Any, **options: Any) -> Any:
        """The model's call. Behind a graph break Dynamo counts it as one more of the model's own code, and runs that as
        it is beyond a limit."""
        limits = ("recompile_limit", "accumulated_recompile_limit")
        with torch._dynamo.config.patch({name: 2**31 for name in limits}):
            return in_parts(self)(type(self._model).forward, self._model, *inputs, **options)

    def take(self, graph: GraphModule) -> Callable:
        """What is to be called in the graph's place."""
        rewriting.rewrite(graph, compiles=self._compiles)
        for each in rewriting.graphs(graph):
            self.left += self._left_in(each)
        function: Callable = graph
        if self._compiles:
            inputs = [example(node) for node in graph.graph.find_nodes(op="placeholder")]
            function = backend.compiled(graph, inputs, options={})

        def run(*arguments: Any) -> Any:
            with self._watch:
                return function(*arguments)

        return run

    def _left_in(self, graph: GraphModule) -> Iterator[LeftStep]:
        for node in graph.graph.nodes:
            kind, given = bound(node)
            if kind in CONTRACTIONS or kind in NORMS:
                keys = [key.partition("@")[0] for key in rewriting.calls(node)]
                paths = [self._paths[key] for key in keys if key in self._paths]
                yield LeftStep(paths[-1] if paths else "", kind, _reason(node, given))


def _reason(node: Node, given: dict[str, Any]) -> str:
    """Why a contraction or a norm is in no chain."""
    dtype = getattr(example(given["input"]), "dtype", None)
    if dtype not in precision.KERNEL_DTYPES:
        return precision.other_dtype(dtype)
    if REFUSAL in node.meta:
        return node.meta[REFUSAL]
    while len(node.users) == 1 and bound(user := next(iter(node.users)))[0] == "same":
        node = user
    users = [_name(user) for user in node.users]
    if users in ([], ["the model's result"]):
        return "nothing follows it"
    if len(users) > 1:
        return f"its result is used more than once: by {', '.join(users)}"
    return f"{users[0]} follows, and there is no chain of that"


def _name(user: Node) -> str:
    if user.op == "output":
        return "the model's result"
    if user.target is torch.ops.normfuse.chain.default:
        return "another chain"
    return name_of(user) or str(user.target)


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
