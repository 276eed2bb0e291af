"""Functions behind Dynamo with their chains rewritten, beside the same without."""

import torch
from torch import nn

from ops.rewriting import rewrite

#: Shapes of inputs and of a linear layer's weight.
ROWS, IMAGES, WEIGHT = (6, 16), (2, 8, 5, 5), (32, 16)
#: What chains are called in words.
LINEAR, CONV, AFFINE = "linear -> add", "conv2d -> add", "group_norm -> mul -> add"


def compiled(function, behind="eager", **options):
    """The function behind Dynamo with its chains rewritten, and the list of these, in words."""
    found = []

    def backend(module, inputs):
        found.extend(each.chain for each in rewrite(module))
        module.graph.lint()
        return torch._dynamo.lookup_backend(behind)(module, inputs)

    return torch.compile(function, backend=backend, **{"fullgraph": True, **options}), found


def evaluated(function, arguments, parameters=()):
    """Results and gradients, with the inputs as they are afterwards."""
    given = [each.detach().clone().requires_grad_(each.requires_grad) for each in arguments]
    taken = [each * 1 if each.requires_grad else each for each in given]  # what is no leaf may be written to
    results = function(*taken)
    results = results if isinstance(results, tuple) else (results,)
    leaves = [each for each in (*given, *parameters) if each.requires_grad]
    roots = [each for each in results if each.requires_grad]
    losses = [each.float().square().mean() for each in roots]
    gradients = torch.autograd.grad(losses, leaves, allow_unused=True) if leaves else ()
    return (*results, *taken), gradients


def check(function, arguments, expected, gradient_tolerance=1e-5, **options):
    """The same results, strides and gradients as without rewriting, and these chains."""
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    results, gradients = evaluated(function, arguments, parameters)
    fused, found = compiled(function, **options)
    ours, of_ours = evaluated(fused, arguments, parameters)
    for one, other in zip(ours, results, strict=True):
        tolerance = {} if one.dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(one, other, check_stride=True, **({"rtol": 1e-4, "atol": 1e-5} | tolerance))
    for one, other in zip(of_ours, gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=gradient_tolerance)
    assert expected is None or found == expected


def draw(*shape, grad=True):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(grad)
