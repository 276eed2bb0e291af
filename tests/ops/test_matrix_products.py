"""Promise: ``ops.matmul``, ``addmm``, ``bmm`` and ``baddbmm`` are PyTorch's functions, in values, gradients of any
order, strides and refusals, whether their products are this project's or PyTorch's."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ops
from ops import matrix_products
from tests.ops.products import Called, taken

SHAPES = {
    "matrices": ((6, 5), (5, 7)),
    "batch by matrix": ((2, 3, 6, 5), (5, 7)),
    "matrix by batch": ((6, 5), (4, 5, 7)),
    "batches": ((4, 6, 5), (4, 5, 7)),
    "repeated": ((1, 4, 6, 5), (4, 5, 7)),
    "batch of one": ((1, 6, 5), (1, 5, 7)),
    "vector by matrix": ((5,), (5, 7)),
    "matrix by vector": ((6, 5), (5,)),
    "batch by vector": ((2, 6, 5), (5,)),
    "vectors": ((5,), (5,)),
    "nothing": ((0, 6, 5), (0, 5, 7)),
    "no terms": ((6, 0), (0, 7)),
}


@pytest.fixture(params=[True, False], ids=["ours", "PyTorch's"])
def is_ours(request, monkeypatch):
    """Where there is anything to multiply."""
    monkeypatch.setattr(matrix_products, "_is_exact", lambda tensor: tensor.dtype == torch.float32)
    monkeypatch.setattr(matrix_products, "pays", lambda given: request.param and all(each.numel() for each in given))
    return request.param


def drawn(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def check(name, given, count, **options):
    """Values, strides, gradients and their gradients, and how many operations PyTorch counts."""
    results, operations = [], []
    for module, expected in (torch, 0), (ops, count):
        with Called() as called, FlopCounterMode(display=False) as counter:
            result = getattr(module, name)(*given, **options)
            gradients = torch.autograd.grad(result.sin().sum(), given, create_graph=True)
            second = torch.autograd.grad(sum(each.sin().sum() for each in gradients), given)
        assert (taken(called.graphs)[0] > 0) == (expected > 0)
        results.append([result, *gradients, *second])
        operations.append(counter.get_total_flops())
    assert operations[0] == operations[1]
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert results[0][0].stride() == results[1][0].stride()


def test_empty_batches(monkeypatch):
    """Are PyTorch's, whatever pays."""
    monkeypatch.setattr(matrix_products, "_is_exact", lambda tensor: True)
    input, other = torch.empty(0, 600, 600), torch.empty(0, 600, 500)
    for function in (ops.bmm, ops.matmul, torch.bmm):
        with ops.faster_float32():
            assert function(input, other).shape == (0, 600, 500)


@pytest.mark.parametrize("name", SHAPES)
def test_matmul(name, is_ours):
    given = drawn(*SHAPES[name])
    check("matmul", given, is_ours and all(each.ndim > 1 and each.numel() for each in given))


def test_bmm(is_ours):
    check("bmm", drawn((4, 6, 5), (4, 5, 7)), is_ours)


@pytest.mark.parametrize("options", [{}, {"beta": 0.5}, {"alpha": 2}, {"beta": 3, "alpha": -1.5}], ids=str)
@pytest.mark.parametrize("shape", [(7,), (1,), (6, 1), (6, 7)], ids=str)
def test_addmm(shape, options, is_ours):
    check("addmm", drawn(shape, (6, 5), (5, 7)), is_ours, **options)


@pytest.mark.parametrize("options", [{}, {"beta": 0.5}, {"alpha": 2}, {"beta": 3, "alpha": -1.5}], ids=str)
@pytest.mark.parametrize("shape", [(7,), (6, 7), (4, 1, 7), (4, 6, 7)], ids=str)
def test_baddbmm(shape, options, is_ours):
    check("baddbmm", drawn(shape, (4, 6, 5), (4, 5, 7)), is_ours, **options)


@pytest.mark.parametrize("alpha", [1, 2])
def test_what_is_added_is_left_out(alpha, is_ours):
    """With beta = 0, as in PyTorch, NaN and infinities of it are not in the result."""
    added = torch.full((6, 7), torch.nan)
    with torch.no_grad():
        for name, operands in ("addmm", drawn((6, 5), (5, 7))), ("baddbmm", drawn((4, 6, 5), (4, 5, 7))):
            results = [getattr(each, name)(added, *operands, beta=0, alpha=alpha) for each in (ops, torch)]
            torch.testing.assert_close(*results)


REFUSED = {
    "terms": ("matmul", [(6, 5), (4, 7)]),
    "terms of batches": ("matmul", [(2, 6, 5), (2, 4, 7)]),
    "batches": ("matmul", [(2, 6, 5), (3, 5, 7)]),
    "number": ("matmul", [(), (5, 7)]),
    "matrix for a batch": ("bmm", [(6, 5), (5, 7)]),
    "sizes of batches": ("bmm", [(1, 6, 5), (2, 5, 7)]),
    "what is added": ("addmm", [(5,), (6, 5), (5, 7)]),
    "added batch": ("addmm", [(1, 6, 7), (6, 5), (5, 7)]),
    "batch in addmm": ("addmm", [(7,), (2, 6, 5), (2, 5, 7)]),
    "what is added to batches": ("baddbmm", [(3, 6, 7), (2, 6, 5), (2, 5, 7)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_pytorch_refuses_is_refused(name, is_ours):
    function, shapes = REFUSED[name]
    raised = []
    for module in torch, ops:
        with pytest.raises(RuntimeError) as error:
            getattr(module, function)(*drawn(*shapes))
        raised.append(str(error.value))
    assert raised[0] == raised[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda each: each.to("meta"),
        lambda each: torch._neg_view(each),
        lambda each: each.to_sparse(),
    ],
)
def test_other_tensors_are_pytorchs(change, monkeypatch):
    monkeypatch.setattr(matrix_products, "_is_exact", lambda tensor: tensor.device.type != "meta")
    monkeypatch.setattr(matrix_products, "pays", lambda operands: True)
    given = [change(each.detach()) for each in drawn((6, 5), (5, 7))]
    with Called() as called:
        result = ops.matmul(*given)
    expected = torch.matmul(*given)
    assert taken(called.graphs)[0] == 0 and result.dtype == expected.dtype and result.device == expected.device
    if result.device.type != "meta":
        torch.testing.assert_close(result.to_dense(), expected.to_dense())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int32])
def test_other_dtypes_are_pytorchs(dtype, is_ours):
    given = [each.detach().to(dtype) for each in drawn((6, 5), (5, 7))]
    with Called() as called:
        torch.testing.assert_close(ops.matmul(*given), torch.matmul(*given))
    assert taken(called.graphs)[0] == 0


def test_transforms_and_compiled_functions(is_ours):
    """There they are PyTorch's."""
    a, b = (each.detach() for each in drawn((3, 6, 5), (5, 7)))
    torch.testing.assert_close(torch.func.vmap(lambda each: ops.matmul(each, b))(a), a @ b)
    gradient = torch.func.grad(lambda each: ops.matmul(each, b).square().sum())(a)
    torch.testing.assert_close(gradient, torch.func.grad(lambda each: (each @ b).square().sum())(a))
    compiled = torch.compile(ops.matmul, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(a, b), a @ b)
    with torch.autocast("cpu"):
        assert ops.matmul(a, b).dtype == torch.bfloat16


def test_the_operator():
    for given in drawn((6, 5), (5, 7)), drawn((6, 5), (5, 7), (7,)), drawn((4, 6, 5), (4, 5, 7)):
        torch.library.opcheck(matrix_products.PRODUCT, (given,))


def test_products_of_one_matrix():
    """The operator that graphs call: its values, and what is told and counted of it."""
    matrix, *others = (each.detach() for each in drawn((6, 5), (5, 7), (6, 4), (3, 6), (8, 5)))
    places = "first,first.T,second,second.T"
    torch.library.opcheck(matrix_products.PRODUCTS_OF_ONE, (places, matrix, others))
    expected = [matrix @ others[0], matrix.T @ others[1], others[2] @ matrix, others[3] @ matrix.T]
    calls = ops.explain(lambda: matrix_products.PRODUCTS_OF_ONE(places, matrix, others)).calls
    assert [each.chain for each in calls] == ["6 x 5 @ 5 x 7, 5 x 6 @ 6 x 4, 3 x 6 @ 6 x 5, 8 x 5 @ 5 x 6"]
    with FlopCounterMode(display=False) as counter:
        results = matrix_products.PRODUCTS_OF_ONE(places, matrix, others)
    assert counter.get_total_flops() == 2 * (6 * 5 * 7 + 5 * 6 * 4 + 3 * 6 * 5 + 8 * 5 * 6)
    for got, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        assert got.is_contiguous()
    a, b, c = (torch.randn(6, 6) for _ in range(3))
    for places, wanted in (("first,first.T", (a @ b, a.T @ c)), ("first.T,first", (a.T @ b, a @ c))):
        results = matrix_products.PRODUCTS_OF_ONE(places, a, [b, c])
        torch.testing.assert_close(results, list(wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shapes", [((6, 5), (5, 7)), ((4, 6, 5), (4, 5, 7))], ids=str)
def test_derivatives_of_other_kinds(shapes, is_ours):
    """Forward-mode, several gradients at once, and what ``torch.jit`` traces."""
    a, b = drawn(*shapes)
    tangent = torch.ones_like(a)
    with torch.autograd.forward_ad.dual_level():
        result = ops.matmul(torch.autograd.forward_ad.make_dual(a, tangent), b)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(result).tangent, tangent @ b)
    jacobians = [
        torch.autograd.functional.jacobian(each, (a.detach(), b.detach()), vectorize=True)
        for each in (ops.matmul, torch.matmul)
    ]
    torch.testing.assert_close(*jacobians)
    traced = torch.jit.trace(ops.matmul, (a.detach(), b.detach()))
    assert "normfuse" not in str(traced.graph)


def test_what_is_saved(is_ours):
    """Of each operand the other one alone, where it has a gradient: an operand without one may be changed."""
    (activation, weight), bias = drawn((6, 5), (5, 7)), torch.zeros(7, requires_grad=True)
    weight.requires_grad_(False)
    hidden = activation * 2
    result = ops.matmul(hidden, weight)
    hidden.zero_()
    torch.testing.assert_close(torch.autograd.grad(result.sum(), activation)[0], 2 * weight.sum(1).expand(6, 5))
    with torch.inference_mode():
        input = torch.randn(6, 5)
    torch.testing.assert_close(
        torch.autograd.grad(ops.addmm(bias, input, weight).sum(), bias)[0], torch.full((7,), 6.0)
    )


def test_results_can_be_changed(is_ours):
    """They are no views."""
    a, b = drawn((6, 5), (5, 7))
    for given in (a, b), (a[None], b), (a.expand(2, 3, -1, -1), b.expand(2, 1, -1, -1)):
        with torch.no_grad():
            result = ops.matmul(*given)
        result.add_(a.sum())
        assert result.requires_grad


def test_how_sums_lie(is_ours):
    """As PyTorch's: not as what is added."""
    a, b, c = (each.detach() for each in drawn((4, 6, 5), (4, 5, 7), (7, 6)))
    for name, given in ("addmm", (c.T, a[0], b[0])), ("baddbmm", (c.T.expand(4, -1, -1), a, b)):
        for options in {}, {"alpha": 2}, {"beta": 0}, {"beta": 0, "alpha": 2}:
            assert getattr(ops, name)(*given, **options).is_contiguous()


def test_what_is_left_out_has_a_gradient(is_ours):
    a, b, c = drawn((6, 5), (5, 7), (6, 7))
    (gradient,) = torch.autograd.grad(ops.addmm(c, a, b, beta=0).sum(), c)
    assert not gradient.any()


def test_numbers_that_pytorch_refuses(is_ours):
    a, b, c = (each.detach() for each in drawn((6, 5), (5, 7), (6, 7)))
    for module in torch, ops:
        with pytest.raises(RuntimeError):
            module.addmm(c, a, b, beta=0, alpha=2j)


def test_batches_that_are_no_views(monkeypatch):
    """They are PyTorch's, as it knows when to copy."""
    monkeypatch.setattr(matrix_products, "_is_exact", lambda tensor: True)
    monkeypatch.setattr(matrix_products, "pays", lambda operands: True)
    for shapes, change in (((3, 6, 5), (5, 7)), True), (((3, 1, 6, 5), (4, 5, 7)), False):
        a, b = (each.detach() for each in drawn(*shapes))
        a = a.transpose(0, 1) if change else a
        with Called() as called:
            torch.testing.assert_close(ops.matmul(a, b), torch.matmul(a, b))
        assert taken(called.graphs)[0] == 0


@pytest.mark.parametrize("name", ["strided", "expanded", "transposed column"])
def test_a_bias_of_any_strides(name):
    """By the operator itself."""
    input, matrix, values = *(each.detach() for each in drawn((6, 5), (5, 8))), torch.arange(16.0)
    biases = {"strided": values[::2], "expanded": values[3:4].expand(8), "transposed column": values.view(8, 2).T[1]}
    bias = biases[name]
    result = matrix_products.PRODUCT([input, matrix, bias])
    torch.testing.assert_close(result, torch.addmm(bias, input, matrix))


@pytest.mark.usefixtures("is_ours")
def test_alpha_of_zero():
    """Leaves the product out, whatever it is, as in PyTorch's addmm."""
    input, matrix = (each.detach() for each in drawn((6, 5), (5, 8)))
    input[2, 3] = torch.nan
    for added in torch.ones(8), torch.ones(6, 8):
        assert torch.equal(ops.addmm(added, input, matrix, alpha=0), torch.ones(6, 8))


def test_a_bias_that_needs_no_gradient():
    input, matrix, bias = drawn((6, 5), (5, 8), (8,))
    bias = bias.detach()
    with Called() as called:
        torch.autograd.grad(matrix_products.PRODUCT([input, matrix, bias]).sum(), (input, matrix))
    assert torch.ops.aten.sum.dim_IntList not in called.graphs[0]
