"""Promise: where values of 16 bits are to become results in float32, as behind a norm under autocast on a GPU, kernels
write these at once. Where autocast would cast them back, it finds them as it needs them.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ops
from bench.checking import ALLOWANCE, FLOOR
from ops import convolution, functions, precision
from ops import pointwise as p
from ops.backend import normfuse
from ops.rewriting import rewrite
from tests.chains import biased
from tests.ops.graphs import compiled, evaluated
from triton_kernels.pointwise import ADD, MUL

pytestmark = pytest.mark.usefixtures("fresh_compiler")

SILU, SOFTPLUS, GELU = (step.pointwise for step in (p.silu(), p.softplus(), p.gelu()))
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
SIXTEEN_BITS = [torch.bfloat16, torch.float16]


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


#: Of each case: the chain, its numbers, its groups, the shapes of its tensors, and the same in PyTorch, where ``r``
#: makes float32 of 16 bits.
CASES = {
    "one kernel": (
        ops.Chain("linear", after=(SILU,)), (), 8, [(96, 64), (128, 64), (128,), (128,), (128,)],
        lambda r, x, w, v, m, b: F.silu(F.group_norm(r(F.linear(x, w, v)), 8, m, b)),
    ),
    "a function before": (
        ops.Chain("linear", before=(GELU,)), (), 8, [(96, 64), (128, 64), (128,), (128,), (128,)],
        lambda r, x, w, v, m, b: F.group_norm(F.gelu(r(F.linear(x, w, v))), 8, m, b),
    ),
    "two kernels": (
        ops.Chain("linear", after=(GELU,)), (), 2, [(40, 32), (1200, 32), (1200,), (1200,), (1200,)],
        lambda r, x, w, v, m, b: F.gelu(F.group_norm(r(F.linear(x, w, v)), 2, m, b)),
    ),
    "wide groups": (
        ops.Chain("linear"), (), 1, [(3, 16), (9000, 16), (9000,), (9000,), (9000,)],
        lambda r, x, w, v, m, b: F.group_norm(r(F.linear(x, w, v)), 1, m, b),
    ),
    "row minimum": (
        functions.L75, (), 8, [(96, 64), (128, 64), (128,), (128,), (128,), (1, 128, 1, 1)],
        lambda r, x, w, v, m, b, last: F.group_norm(r(F.linear(x, w, v)), 8, m, b).min(1, keepdim=True)[0] + last,
    ),
    "row minimum of wide groups": (
        functions.L75, (), 1, [(24, 16), (8200, 16), (8200,), (8200,), (8200,), (1, 2, 1, 1)],
        lambda r, x, w, v, m, b, last: F.group_norm(r(F.linear(x, w, v)), 1, m, b).min(1, keepdim=True)[0] + last,
    ),
    "softplus": (
        ops.Chain("linear", norm="", after=(SOFTPLUS,)), ((1.0, 20.0),), 1, [(96, 64), (128, 64), (128,)],
        lambda r, x, w, v: F.softplus(r(F.linear(x, w, v))),
    ),
    "a vector": (
        ops.Chain("linear", norm="", after=(MUL,)), (), 1, [(96, 64), (128, 64), (128,), (128,)],
        lambda r, x, w, v, m: r(F.linear(x, w, v)) * m,
    ),
    "biases": (
        ops.Chain("linear", norm="", after=(ADD,)), (), 1,
        [(96, 64), (128, 64), (128,), (128,)], lambda r, x, w, v, m: r(F.linear(x, w, v)) + m,
    ),
    "a large vector": (
        ops.Chain("linear", before=(ADD,)), (), 8, [(96, 64), (128, 64), (128,), (128,), (128,), (128,)],
        lambda r, x, w, v, large, m, b: F.group_norm(r(F.linear(x, w, v)) + large, 8, m, b),
    ),
    "a large vector, two kernels": (
        ops.Chain("linear", before=(ADD, GELU)), (), 1, [(40, 32), (640, 32), (640,), (640,), (640,), (640,)],
        lambda r, x, w, v, large, m, b: F.group_norm(F.gelu(r(F.linear(x, w, v)) + large), 1, m, b),
    ),
    "a large vector behind a convolution": (
        ops.Chain("conv2d", before=(ADD,)), (), 4, [(2, 8, 9, 9), (16, 8, 3, 3), (16,), (16,), (16,), (16,)],
        lambda r, x, w, v, large, m, b: F.group_norm(r(biased(F.conv2d(x, w), v)) + large[:, None, None], 4, m, b),
    ),
    "rows": (
        ops.Chain("", before=(SILU,)), (), 8, [(96, 128), None, (128,), (128,)],
        lambda r, x, m, b: F.group_norm(r(F.silu(x)), 8, m, b),
    ),
    "a function in float32": (
        ops.Chain("", before=(GELU,)), (), 8, [(96, 128), None, (128,), (128,)],
        lambda r, x, m, b: F.group_norm(F.gelu(r(x)), 8, m, b),
    ),
    "images": (
        ops.Chain("", after=(SILU,)), (), 8, [(3, 16, 9, 7), None, (16,), (16,)],
        lambda r, x, m, b: F.silu(F.group_norm(r(x), 8, m, b)),
    ),
    "pointwise functions": (
        ops.Chain("", norm="", after=(SOFTPLUS,)), ((1.0, 20.0),), 1, [(96, 128), None],
        lambda r, x: F.softplus(r(x)),
    ),
    "conv2d": (
        ops.Chain("conv2d", after=(SILU,)), (), 4, [(2, 8, 9, 9), (16, 8, 3, 3), (16,), (16,), (16,)],
        lambda r, x, w, v, m, b: F.silu(F.group_norm(r(biased(F.conv2d(x, w), v)), 4, m, b)),
    ),
    "conv_transpose2d": (
        functions.L19["none"], (), 4, [(2, 8, 9, 9), (8, 16, 3, 3), (16,), (16,), (16,)],
        lambda r, x, w, v, m, b: F.group_norm(F.gelu(r(biased(F.conv_transpose2d(x, w), v))), 4, m, b),
    ),
}  # fmt: skip


@pytest.fixture(params=["kernels", "reference"])
def way(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr(precision, "runs_kernels", lambda tensor: False)


def gradients(result, leaves):
    gradient = drawn(*result.shape).to(result)
    return torch.autograd.grad(result, leaves, gradient)


def check_case(name, dtype, device):
    """No further from float64 than PyTorch is, where what is multiplied has 16 bits, and what follows is in float32."""
    chain, numbers, num_groups, shapes, plain = CASES[name]
    row = [None if shape is None else drawn(*shape).to(device, dtype).float() for shape in shapes]
    if not chain.contraction:
        row[0] = row[0].to(dtype)
    if "large" in name:
        row[3] += 30
    leaves = [each.requires_grad_() for each in row if each is not None]
    geometry = tuple(convolution.DEFAULTS.values()) if "conv" in chain.contraction else ()
    of_bias = () if chain.reduction else (None,)
    with torch.autocast(device, dtype):
        for _ in range(3):  # the third time as it was prepared
            result = chain.apply((*row, *of_bias), numbers, num_groups, 1e-5, geometry, "float32")
    assert result.dtype == torch.float32
    ours = [result, *gradients(result, leaves)]
    assert [each.dtype for each in ours[1:]] == [each.dtype for each in leaves]

    def in_dtypes(multiplied, others):
        copies = [each.detach().to(others).requires_grad_() for each in leaves]
        cast = [each.to(multiplied) for each in copies[: 3 if chain.contraction else 1]]
        result = plain(lambda value: value.to(others), *cast, *copies[len(cast) :])
        return [result, *gradients(result, copies)]

    exact, theirs = in_dtypes(torch.float64, torch.float64), in_dtypes(dtype, torch.float32)
    for one, other, expected in zip(ours, theirs, exact, strict=True):
        allowed = ALLOWANCE * (other.double() - expected).norm() + FLOOR * expected.norm()
        assert (one.double() - expected).norm() <= allowed


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, dtype, way):
    check_case(name, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_on_a_gpu(name, dtype):
    check_case(name, dtype, "cuda")


@pytest.mark.parametrize(
    "function, chain",
    [
        (lambda x, w, v: F.silu(F.linear(x, w) * v), "linear -> add -> mul -> silu"),
        (lambda x, w, v: F.group_norm(F.linear(x, w) + v, 4, v), "linear -> add -> add -> group_norm -> mul -> add"),
        (lambda x, w, v: F.linear(F.relu(F.linear(x, w) + v), w.T), "linear -> add -> add -> relu"),
    ],
)  # fmt: skip
def test_promotion(function, chain, way):
    """As of products of 16 bits and a vector in float32."""

    def under_autocast(*arguments):
        with torch.autocast("cpu", torch.bfloat16):
            return function(*arguments)

    arguments = [drawn(6, 16).requires_grad_(), drawn(32, 16).requires_grad_(), drawn(32).requires_grad_()]
    fused, found = compiled(under_autocast)
    ours, theirs = ([*results, *of] for results, of in (evaluated(each, arguments) for each in (fused, under_autocast)))
    assert found == [chain]
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert (one.float() - other.float()).norm() <= 4 * torch.finfo(torch.bfloat16).eps * other.norm()


LINEAR_NORM = nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU()
NORM_CONV = nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1)
ROWS, IMAGES = (16, 64), (2, 32, 16, 16)


@pytest.mark.parametrize(
    "layers, shape, dtypes",
    [
        (LINEAR_NORM, ROWS, {"linear": FLOAT32}),
        ((*LINEAR_NORM, nn.Linear(128, 8)), ROWS, {"linear": BFLOAT16}),
        ((*LINEAR_NORM, nn.Linear(128, 8), nn.LayerNorm(8)), ROWS, {"linear": BFLOAT16, "linear ": FLOAT32}),
        ((*LINEAR_NORM, nn.Softmax(1), nn.Linear(128, 8)), ROWS, {"linear": FLOAT32}),
        ((nn.Linear(64, 128), nn.ReLU()), ROWS, {"linear": BFLOAT16}),
        ((nn.Linear(64, 128), nn.Softplus()), ROWS, {"linear": FLOAT32}),
        (NORM_CONV, IMAGES, {"group_norm": BFLOAT16}),
        ((*NORM_CONV, nn.GroupNorm(8, 32)), IMAGES, {"group_norm": BFLOAT16, "conv2d": FLOAT32}),
        ((nn.GroupNorm(8, 32), nn.SiLU(), nn.MaxPool2d(2)), IMAGES, {"group_norm": FLOAT32}),
    ],
)  # fmt: skip
def test_dtypes_under_a_gpus_autocast(layers, shape, dtypes):
    """The dtype of each chain's result, and of the model's: what a GPU's autocast makes of fake tensors."""
    found = []

    def backend(module, inputs):
        rewrite(module, everything=True)
        chains = module.graph.find_nodes(op="call_function", target=torch.ops.normfuse.chain.default)
        found.extend([(each.args[0].split()[0], each.meta["example_value"].dtype) for each in chains])
        (output,) = module.graph.find_nodes(op="output")
        (result,) = output.args[0]
        found.append(result.meta["example_value"].dtype)
        return module.forward

    with FakeTensorMode(allow_non_fake_inputs=True):
        image = torch.empty(shape, dtype=torch.bfloat16 if shape == IMAGES else torch.float32, device="cuda")
        model = nn.Sequential(*map(on_fake_gpu, layers))
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with torch.no_grad():
            expected = model(image).dtype
            torch.compile(model, backend=backend, fullgraph=True)(image)
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
    assert found == [*((name.strip(), dtype) for name, dtype in dtypes.items()), expected]


def on_fake_gpu(layer):
    """A copy with fake parameters."""
    copied = copy.copy(layer)
    copied._parameters = {
        name: nn.Parameter(torch.empty(each.shape, device="cuda"), requires_grad=False)
        for name, each in layer._parameters.items()
    }
    return copied


@pytest.mark.gpu
@pytest.mark.parametrize("behind", ["fuse", "compile"])
@pytest.mark.parametrize(
    "layers, shape", [(LINEAR_NORM, ROWS), ((*LINEAR_NORM, nn.Linear(128, 8)), ROWS), (NORM_CONV, IMAGES)]
)
def test_training_on_a_gpu(layers, shape, behind):
    """As PyTorch under autocast: the same dtypes, and errors against float64 that are no larger."""
    plain = nn.Sequential(*copy.deepcopy(layers)).cuda()
    exact, ours = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    if behind == "fuse":
        ops.fuse(ours)
    else:
        ours = torch.compile(ours, backend=normfuse, fullgraph=True)
    input = drawn(*shape).cuda()

    def trained(model, dtype, autocasts=True):
        given = input.to(dtype).requires_grad_()
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocasts):
                result = model(given)
        leaves = [given, *model.parameters()]
        return [result, *gradients(result, leaves)]

    expected = trained(exact, torch.float64, False)
    results = trained(ours, torch.float32), trained(plain, torch.float32)
    for one, other, value in zip(*results, expected, strict=True):
        assert one.dtype == other.dtype
        allowed = ALLOWANCE * (other.double() - value).norm() + FLOOR * value.norm()
        assert (one.double() - value).norm() <= allowed
