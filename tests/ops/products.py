"""What multiplies, in graphs behind autograd and in eager code."""

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils._python_dispatch import TorchDispatchMode

from ops import float32_products
from ops.matrix_products import PRODUCT, PRODUCTS_OF_ONE


class Called(TorchDispatchMode):
    """Keeps what is called."""

    def __init__(self):
        super().__init__()
        self.graphs = [[]]

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.graphs[0].append(function)
        return function(*arguments, **(options or {}))


class Compiler:
    """Compiles functions as the backend does, but for Inductor, and keeps the targets of their graphs' nodes."""

    def __init__(self, **options):
        self.graphs, self._options = [], options

    def __call__(self, function, **options):
        backend = aot_autograd(fw_compiler=self._compile, decompositions=select_decomp_table())
        return torch.compile(function, backend=backend, **self._options, **options)

    def _compile(self, module, inputs):
        float32_products.take_over(module.graph)
        module.graph.lint()
        module.recompile()
        self.graphs.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return make_boxed_func(module.forward)


def taken(graphs):
    """The number of products that are ours, by graph. Those of one matrix are two."""
    return [graph.count(PRODUCT) + 2 * graph.count(PRODUCTS_OF_ONE) for graph in graphs]


def left(graphs):
    """The number of products that are PyTorch's."""
    products = torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default
    return sum(graph.count(each) for graph in graphs for each in products)
