"""Functions with open norms and laid-out images, as Inductor's graphs have them, run by PyTorch's own functions."""

from functools import partial

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from ops import layouts, narrow_convolutions, residuals
from ops.rewriting import rewrite

OPEN = "normfuse.statistics.default", "normfuse.sums.default"
POOLS = "normfuse.max_pool_backward.default"


class Opened:
    """A function behind Dynamo, rewritten for a compiler, and its graphs behind AOTAutograd.

    Attributes:
        chains: The chains in words.
        graphs: The graphs that ran, forward and backward.
    """

    def __init__(self, function, **options):
        self.chains, self.graphs = [], []
        self._compiled = torch.compile(function, backend=self._backend, **options)

    def __call__(self, *arguments):
        return self._compiled(*arguments)

    def names(self):
        """Of the operators in all graphs."""
        nodes = [node for graph in self.graphs for node in graph.graph.nodes]
        return [str(node.target) for node in nodes if node.op == "call_function"]

    def nodes(self, name):
        return [node for graph in self.graphs for node in graph.graph.nodes if str(node.target) == name]

    def arguments(self, name):
        """Of the operator's calls, with words first; tensors of random numbers that lie as theirs."""
        for node in self.nodes(name):
            words, *others = node.args
            values = [each.meta["val"] for each in others]
            yield words, *(torch.randn(each.shape).to(each) for each in values)

    def _backend(self, module, inputs):
        self.chains += [each.chain for each in rewrite(module, compiles=True)]
        compile_graph = partial(self._compile, is_inference=False)
        inference = partial(self._compile, is_inference=True)
        backend = aot_autograd(
            fw_compiler=compile_graph,
            bw_compiler=compile_graph,
            inference_compiler=inference,
            partition_fn=_partition,
            decompositions=select_decomp_table(),
        )
        return backend(module, inputs)

    def _compile(self, graph, inputs, is_inference):
        if is_inference:
            residuals.read_terms(graph.graph)
            layouts.lay_out(graph.graph)
            narrow_convolutions.take_over(graph.graph)
            graph.recompile()
        self.graphs.append(graph)
        check_images(graph)
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)


def _partition(graph, inputs, **options):
    layouts.lay_out(graph.graph)
    narrow_convolutions.take_over(graph.graph)
    layouts.hold_apart(graph.graph)
    graph.recompile()
    return min_cut_rematerialization_partition(graph, inputs, **options)


def check_images(graph):
    """What kernels of open norms are fast for: dense images of a channels_last format, where they have one."""
    names = {str(node.target) for node in graph.graph.nodes}
    for node in graph.graph.nodes if names.intersection(OPEN) else ():
        if str(node.target) in (*OPEN, POOLS):
            given = torch.utils._pytree.tree_leaves(node.meta["eager_input_vals"])
            strides = [each.stride() for each in given if isinstance(each, torch.Tensor)]
            values = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            now = [each.stride() for each in torch.utils._pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]
            assert strides == now, node
            images = [each for each in given if isinstance(each, torch.Tensor) and each.ndim > 2]
            assert images
            for value in images:
                format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.ndim, torch.contiguous_format)
                assert value.is_contiguous(memory_format=format), (node, value.stride())


def saved_bytes(function, parameters, *arguments):
    """Of the storages that autograd keeps, without parameters and inputs."""
    known = {each.untyped_storage().data_ptr() for each in (*parameters, *arguments)}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*arguments)
    return sum(found.values()), result
