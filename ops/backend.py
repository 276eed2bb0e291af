"""``torch.compile(model, backend="normfuse")``: chains become calls of this project's, Inductor compiles all else."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from ops import rewriting

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

    found = rewriting.rewrite(module, compiles=True)
    _log.info("%d chains in a graph of %d nodes", len(found), len(module.graph.nodes))
    for each in found:
        _log.info("%s, in the place of %s", each.chain, ", ".join(each.nodes))
    of_mode = torch._inductor.list_mode_options(mode) if mode else {}
    return torch._inductor.compile(module, list(example_inputs), options={**of_mode, **(options or {})})
