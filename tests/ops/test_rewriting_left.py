"""Promise: what a chain's call would not give is left to PyTorch: other values, writes between steps, other tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.ops.graphs import AFFINE, LINEAR, ROWS, WEIGHT, check, compiled, draw

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def linear_norm(x, w):
    return F.group_norm(F.linear(x, w), 4)


def written_between(x, w, v):
    z = F.linear(x, w)
    v.add_(1)
    return F.group_norm(z + v, 4)


def written_behind(x, w, v):
    """PyTorch keeps no summand for the backward pass."""
    h = x.flip(0).repeat(1, 2)
    y = F.relu(F.linear(x, w))
    h += F.silu(y + h)
    return h


def input_written_behind(x, w, v):
    x = x * 1
    x += F.group_norm(x + 1, 4)
    return x


def alias_written_between(x, w, v):
    """A dropout that is off returns its input."""
    y = F.group_norm(x, 2)
    z = F.linear(y, w.detach())
    F.dropout(y, 0.5, False).add_(1)
    return z + v


def bias_written_between(x, w, v):
    z = F.linear(x, w, v)
    v.add_(1)
    return F.relu(z) + v


def set_between(x, w, v):
    z = linear_norm(x, w)
    v[0] = 7.0
    return z + v


def written_and_read(x, w, v):
    z = F.linear(x, w)
    y = z.mul_(2)
    return F.group_norm(y, 4) + z


def added_to_another(x, w, v):
    y = linear_norm(x, w)
    z = y
    z += F.linear(x, w)
    return y * v


def written_by_another(write):
    """Something writes to the bias between the layer and its function."""

    def function(x, w, v):
        z = F.linear(x, w, v)
        other = write(v)
        return F.relu(z) * other

    return function


@torch.library.custom_op("normfuse_tests::add_one", mutates_args={"v"})
def add_one(v: torch.Tensor) -> None:
    v.add_(1)


def in_checkpoint(v):
    return checkpoint(lambda v: v.add_(1) * 2, v, use_reentrant=False)


def as_running_mean(v):
    ones = torch.ones(32)
    return torch.batch_norm(
        v.detach() * torch.ones(4, 1), ones, ones, v.detach(), torch.ones(32), True, 0.1, 1e-5, True
    ).sum()


def view_is_written(x, w, v):
    z = linear_norm(x, w)
    part = z[:2]
    part.zero_()
    return F.relu(z)


def input_is_written(x, w, v):
    return F.group_norm(x.relu_(), 4)


def output_is_written(x, w, v):
    z = torch.empty(6, 32)
    torch.add(F.linear(x.detach(), w.detach()), 1, out=z)
    return z


#: name → (function of input, weight and a vector; the chains)
LEFT = {
    "vector is written before": (written_between, [f"{LINEAR} -> add -> {AFFINE}"]),
    "operand is written behind": (written_behind, [f"{LINEAR} -> relu"]),
    "input is written behind": (input_written_behind, [AFFINE]),
    "alias is written": (alias_written_between, [AFFINE]),
    "bias is written": (bias_written_between, []),
    "element is set before": (set_between, [f"{LINEAR} -> {AFFINE} -> add"]),
    "value is written and read": (written_and_read, [f"{AFFINE} -> add tensor"]),
    "another is written": (added_to_another, [f"{LINEAR} -> {AFFINE}"]),
    "view is written": (view_is_written, [f"{LINEAR} -> {AFFINE}"]),
    "input is written": (input_is_written, [AFFINE]),
    "out": (output_is_written, []),
    "bias by a special method": (written_by_another(lambda v: v.__iadd__(1)), []),
    "bias by a checkpoint": (written_by_another(in_checkpoint), []),
    "bias by a custom operator": (written_by_another(lambda v: torch.ops.normfuse_tests.add_one(v) or v), []),
    "bias by a batch norm": (written_by_another(as_running_mean), []),
    "deprecated alpha": (lambda x, w, v: torch.add(linear_norm(x, w), 2, v.detach()), [f"{LINEAR} -> {AFFINE}"]),
    "nothing to norm": (lambda x, w, v: F.layer_norm(x[:, :0], (0,)).relu(), None),
    "vectors": (lambda x, w, v: F.linear(x[0], w[0]).relu(), None),
    "value used twice": (lambda x, w, v: (z := F.linear(x, w), F.group_norm(z, 4)), [AFFINE]),
    "norm used twice": (lambda x, w, v: (y := linear_norm(x, w), F.relu(y)), [f"{LINEAR} -> {AFFINE}"]),
    "itself": (lambda x, w, v: (lambda z: z * z)(F.linear(x, w)), []),
    "alpha": (lambda x, w, v: torch.add(linear_norm(x, w), v, alpha=2), [f"{LINEAR} -> {AFFINE}"]),
    "rounded": (lambda x, w, v: linear_norm(x, w).div(2, rounding_mode="floor"), [f"{LINEAR} -> {AFFINE}"]),
    "other dtype": (lambda x, w, v: F.linear(x, w) + v.double(), []),
    "larger": (lambda x, w, v: linear_norm(x, w) + v.expand(2, 6, 32), [f"{LINEAR} -> {AFFINE}"]),
    "divided by": (lambda x, w, v: 1 / F.linear(x, w), []),
    "bound is a tensor": (lambda x, w, v: F.linear(x, w).clamp(min=v), []),
    "smallest everywhere": (lambda x, w, v: linear_norm(x, w).amin(1, keepdim=True), [f"{LINEAR} -> {AFFINE}"]),
    "index of the smallest": (lambda x, w, v: linear_norm(x, w).min(1, keepdim=True)[1], [f"{LINEAR} -> {AFFINE}"]),
    "float64": (lambda x, w, v: linear_norm(x.double(), w.double()), []),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name):
    function, expected = LEFT[name]
    check(function, [draw(*ROWS), draw(*WEIGHT), draw(32)], expected)


def test_along_the_width():
    """A vector of as many elements as an image is wide lies along that, not along the channels."""
    function = lambda x, w, v: F.group_norm(F.conv2d(x, w) + v, 4)  # noqa: E731
    check(function, [draw(2, 8, 4, 8), draw(8, 8, 1, 1), draw(8)], [AFFINE])
    torch._dynamo.reset()
    check(function, [draw(2, 8, 8, 8), draw(8, 8, 1, 1), draw(8, 8)], [AFFINE])


def inference_then_more(x, w):
    with torch.inference_mode():
        y = F.linear(x, w).relu()
    return y * 2


def test_inference_mode_within():
    fused, found = compiled(inference_then_more)
    assert not fused(draw(*ROWS), draw(*WEIGHT)).requires_grad
    assert found == [f"{LINEAR} -> relu"]


def test_region_compiled_once():
    @torch.compiler.nested_compile_region
    def region(x, w):
        return F.relu(F.linear(x, w))

    check(lambda x, w: region(x, w) + region(x * 2, w), [draw(*ROWS), draw(16, 16)], None, behind="aot_eager")


class TwoOf(torch.Tensor):
    """A tensor of a class of its own."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        return super().__torch_function__(function, types, arguments, options or {})


def test_subclasses():
    x, w = draw(*ROWS, grad=False), draw(*WEIGHT, grad=False)
    function = lambda x, w: F.relu(F.linear(x, w))  # noqa: E731
    fused, _ = compiled(function)
    torch.testing.assert_close(fused(x.as_subclass(TwoOf), w).as_subclass(torch.Tensor), function(x, w))
    torch._dynamo.reset()
    nested = torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)
    torch.testing.assert_close(fused(nested, w).values(), function(nested, w).values())


def test_torch_func():
    """It does not know the chains."""
    vmapped = torch.func.vmap(lambda x, w: F.relu(F.group_norm(F.linear(x, w), 4)), (0, None))
    check(vmapped, [draw(2, 6, 16, grad=False), draw(*WEIGHT, grad=False)], [])
