"""``torch.compile(model, backend="normfuse")``: chains become calls of this project's, Inductor compiles all else."""

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule

from ops import (
    copies,
    float32_products,
    grouped_products,
    inductor,
    layouts,
    narrow_convolutions,
    precision,
    residuals,
    rewriting,
)
from triton_kernels.device import INTERPRETED

_log = logging.getLogger(__name__)


def normfuse(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **_: Any,
) -> Callable:
    """Compile a graph as Inductor does, after a call has taken the place of each chain.

    ``torch.compile`` finds it by its name. ``mode`` and ``options`` are Inductor's. The logger ``ops.backend`` tells,
    at level INFO, which chains it found in each graph.

    Args:
        module: A graph of Dynamo's.
        example_inputs: Its inputs, as fake tensors.
        mode: As in ``torch.compile``.
        options: As in ``torch.compile``.

    Returns:
        A function of the graph's inputs.

    Example::

        compiled = torch.compile(model, backend="normfuse")
    """
    import torch._inductor  # which takes a second to import

    of_mode = torch._inductor.list_mode_options(mode) if mode else {}
    given = {**of_mode, **{name.replace("-", "_"): value for name, value in (options or {}).items()}}
    replays = given.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs)
    found = rewriting.rewrite(module, compiles=True, replays=replays)
    _log.info("%d chains in a graph of %d nodes", len(found), len(module.graph.nodes))
    for each in found:
        _log.info("%s%s, in the place of %s", "open " if each.is_open else "", each.chain, ", ".join(each.nodes))
    return compiled(module, example_inputs, given)


def compiled(module: GraphModule, example_inputs: Sequence[Any], options: dict[str, Any]) -> Callable:
    """A graph of Dynamo's, rewritten, as Inductor compiles it with these options and the passes behind autograd."""
    import torch._inductor

    passes = {name: _behind(options.get(name), name, changes) for name, changes in _PASSES.items()}
    return torch._inductor.compile(module, list(example_inputs), options=options | passes)


#: By the name of Inductor's option the passes over graphs behind autograd.
_PASSES: dict[str, Sequence[Callable[[Graph], None]]] = {
    "joint_custom_pre_pass": [layouts.complete, residuals.read_terms, layouts.lay_out, narrow_convolutions.take_over],
    "joint_custom_post_pass": [layouts.hold_apart],
    "post_grad_custom_post_pass": [
        *([float32_products.take_over] if float32_products.IS_ON else []),
        grouped_products.join,
        copies.join,
    ],
}


def _behind(others: Any, name: str, changes: Sequence[Callable[[Graph], None]]) -> Any:
    """A pass that makes these changes behind the user's own. PyTorch's caches know it by its uuid."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    others = getattr(config, name) if others is None else others
    passes = [others] if callable(others) else list(others or ())

    modules = [sys.modules[each.__module__] for each in changes]
    values = [each for module in modules for each in vars(module).values()]
    used = [each for each in values if inspect.ismodule(each) and each.__name__.startswith("ops.")]

    class Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            for each in (*passes, *changes, inductor.begin):
                each(graph)

        def uuid(self) -> Any:
            known = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in passes]
            settings = *(each.__name__ for each in changes), precision.convolutions_allow_tf32(), INTERPRETED
            sources = map(inspect.getsource, dict.fromkeys([*modules, *used]))  # from an archive, too
            return (*settings, *sources, *known) if all(known) else None

    return Pass()


#: ``torch._dynamo.reset`` calls it.
normfuse.reset = inductor.reset  # type: ignore[attr-defined]
