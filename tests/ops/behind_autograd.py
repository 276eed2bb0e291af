"""Graphs behind autograd, of functions and node by node, for the passes that the backend makes there."""

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from ops import layouts


class Changed:
    """A function as the backend compiles it but for Inductor, and its graphs behind autograd, which a pass changes."""

    def __init__(self, function, change, **options):
        self.graphs, self._change = [], change
        backend = aot_autograd(
            fw_compiler=self._compile, decompositions=select_decomp_table(), partition_fn=self._partition
        )
        self._compiled = torch.compile(function, backend=backend, **options)

    def __call__(self, *arguments):
        return self._compiled(*arguments)

    @staticmethod
    def _partition(module, inputs, **options):
        layouts.lay_out(module.graph)
        return min_cut_rematerialization_partition(module, inputs, **options)

    def _compile(self, module, inputs):
        self._change(module.graph)
        module.graph.lint()
        module.recompile()
        self.graphs.append(module.graph)
        return make_boxed_func(module.forward)

    def calls(self, operator):
        """By graph, the operator's calls."""
        return [[node for node in graph.nodes if node.target is operator] for graph in self.graphs]


def compared(model, changed, *inputs, enabled=True, backward=True):
    """Under autocast where it is enabled, the result of both, and the gradients that the parameters have then."""
    found = []
    for function in (model, changed):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            result = function(*inputs)
        if backward:
            result.float().square().sum().backward()
        gradients = [each.grad for each in model.parameters()]
        found.append([result.detach(), *(None if each is None else each.clone() for each in gradients)])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            yield one, other


def graph_of(*values):
    """A graph, with a placeholder for each of these values."""
    mode, graph = torch._subclasses.FakeTensorMode(), torch.fx.Graph()
    places = [graph.placeholder(f"p{number}") for number in range(len(values))]
    for place, value in zip(places, values, strict=True):
        place.meta["val"] = mode.from_tensor(value)
    return graph, places


def called(graph, target, *arguments, **options):
    node = graph.call_function(target, arguments, options)
    node.meta["val"] = layouts.computed(node)
    return node


def run(graph, *values):
    return torch.fx.GraphModule({}, graph)(*values)
