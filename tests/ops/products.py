"""What multiplies, in graphs behind autograd and in eager code."""

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils._python_dispatch import TorchDispatchMode

from ops import float32_products, joined_products
from ops.matrix_products import PRODUCT


class Called(TorchDispatchMode):
    """Keeps what is called."""

    def __init__(self):
        super().__init__()
        self.graphs = [[]]

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.graphs[0].append(function)
        return function(*arguments, **(options or {}))


class Compiler:
    """Compiles functions as the backend does, but for Inductor, and keeps the targets of their graphs' nodes. Of
    inference where ``trains`` is false."""

    def __init__(self, trains=True, **options):
        self.graphs, self._trains, self._options = [], trains, options

    def __call__(self, function, **options):
        table = select_decomp_table()
        backend = aot_autograd(fw_compiler=self._compile, partition_fn=self._partition, decompositions=table)
        return torch.compile(function, backend=backend, **self._options, **options)

    def _partition(self, module, inputs, **options):
        joined_products.join(module.graph)
        return min_cut_rematerialization_partition(module, inputs, **options)

    def _compile(self, module, inputs):
        if not self._trains:
            joined_products.join(module.graph)
        float32_products.take_over(module.graph)
        module.graph.lint()
        module.recompile()
        self.graphs.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return make_boxed_func(module.forward)


def taken(graphs):
    """The number of products that are ours, by graph."""
    return [graph.count(PRODUCT) for graph in graphs]
