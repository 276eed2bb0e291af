"""Promise: float32 products of few rows, whose weight Hopper splits in registers, are right for every kind of data and
no farther off than cuBLAS's, and a row's result does not depend on the others."""

import copy

import pytest
import torch

import ops
from ops import precision, products
from ops.backend import normfuse
from tests import gpu
from tests.gpu import DEVICE
from tests.test_gpu_split import data, operand, relative_error

pytestmark = [*gpu.MARKS, gpu.on_hopper, pytest.mark.usefixtures("poisoned_memory")]

EPS = torch.finfo(torch.float32).eps
#: norm(result - exact) / norm(exact)
TOLERANCE = 3e-7
KINDS = ("normal", "positive", "rows", "spike", "holes", "dead", "gelu")


def drawn(kind, rows, depth, seed):
    if kind == "softmax":
        return (8 * data("normal", rows, depth, seed)).softmax(1)
    if kind == "gelu":
        return torch.nn.functional.gelu(data("normal", rows, depth, seed))
    return data(kind, rows, depth, seed)


@pytest.fixture(autouse=True)
def exact():
    torch.set_float32_matmul_precision("highest")


def product(input, weight, bias=None):
    assert precision.rows_in_registers(input, weight) == int(len(input) <= len(weight))
    return products.affine(input, weight, (bias,), (len(input), len(weight)))


def bounded(input, weight):
    """The result, and the weight's rows of whose results some may not be trusted."""
    from triton_kernels.linear_registers_hopper import linear_registers

    memory = torch.empty(len(weight) + 1, dtype=torch.int32, device=DEVICE)
    output = torch.empty(len(input), len(weight), device=DEVICE)
    linear_registers(input[None], weight[None], None, memory, output=output[None])
    assert memory[-1] >= (memory[:-1] != 0).any()
    return output, memory[:-1] != 0


@pytest.mark.parametrize("order", ["depth", "rows"])
@pytest.mark.parametrize("size", [(16, 2048, 2048), (33, 8192, 640), (100, 4100, 1036), (300, 1028, 8192)], ids=str)
def test_sizes(size, order):
    """Also multiples of nothing but what TMA asks for; with a bias."""
    check_sizes(size, order)


@pytest.mark.parametrize("order", ["depth", "rows"])
@pytest.mark.parametrize("size", [(32768, 40, 512), (8192, 64, 1036), (8192, 130, 640), (65536, 256, 64)], ids=str)
def test_few_columns(size, order):
    check_sizes(size, order)


def check_sizes(size, order):
    rows, columns, depth = size
    input, weight = operand(rows, depth, order, 0), operand(columns, depth, order, 1)
    bias = torch.randn(columns, device=DEVICE)
    want = input.double() @ weight.double().T
    assert relative_error(product(input, weight), want) <= TOLERANCE
    assert relative_error(product(input, weight, bias), want + bias.double()) <= TOLERANCE


@pytest.mark.parametrize("kind", ["wide", "softmax"])
def test_elements_far_apart(kind):
    """What cannot be trusted comes from the other kernel: as precise as three TF32 products."""
    input, weight = drawn(kind, 64, 4096, 0), drawn(kind, 2048, 4096, 1)
    assert bounded(input, weight)[1].any()
    assert relative_error(product(input, weight), input.double() @ weight.double().T) <= 5e-7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "size",
    [(16, 2048, 2048), (64, 8192, 8192), (256, 4096, 4096), (500, 2048, 2048), (65536, 64, 256), (16384, 1024, 64)],
    ids=str,
)
def test_at_most_the_librarys_error(size, kind):
    """In the norm, and for each element by |input| @ |weight|.T."""
    rows, columns, depth = size
    input, weight = drawn(kind, rows, depth, 0), drawn(kind, columns, depth, 1)
    want = input.double() @ weight.double().T
    scale = input.double().abs() @ weight.double().abs().T
    ours, library = product(input, weight), input @ weight.T
    assert relative_error(ours, want) <= 1.1 * relative_error(library, want)
    worst, librarys = (((each.double() - want).abs() / scale).max().item() for each in (ours, library))
    assert worst <= max(librarys, 4 * EPS)


def test_bias_of_sums():
    """What tensor cores truncate is made up for: mean signed error on positive numbers."""
    input, weight = data("positive", 128, 8192, 0), data("positive", 2048, 8192, 1)
    want = input.double() @ weight.double().T
    assert abs(((product(input, weight).double() - want) / want).mean().item()) < 5e-8


def test_accumulator():
    """A tensor core cuts off what is below 2**-25 of a block's largest product: by that blocks were chosen. A GPU that
    adds up otherwise fails here."""
    block = [each + 8 * lane for each in range(4) for lane in range(4)]  # terms in lane order
    weight, input = torch.zeros(2048, 2048, device=DEVICE), torch.zeros(16, 2048, device=DEVICE)
    weight[:, block] = torch.exp2(-(torch.arange(2048, device=DEVICE) % 32).float())[:, None]
    weight[:, 0] = 1.0
    input[:, block] = 1.0
    sums = bounded(input, weight)[0][0, :32].double()
    assert (sums[26:] == 1.0).all() and sums[24] > 1.0
    assert ((sums - weight[:32].double().sum(1)) <= 0).all(), "truncated, not rounded"


def test_a_row_that_is_left_changes_no_other():
    input, weight = operand(64, 2048, "depth", 0), operand(2048, 2048, "depth", 1)
    plain = product(input, weight)
    input[20, 5] = torch.inf
    changed = product(input, weight)
    assert torch.equal(changed[:20], plain[:20]) and torch.equal(changed[21:], plain[21:])
    assert not changed[20].isfinite().any()


@pytest.mark.parametrize("rows", [16, 17, 64, 65, 128, 300])
@pytest.mark.parametrize("size", [(2048, 2048), (8192, 4096), (640, 8192)], ids=str)
def test_a_row_does_not_depend_on_the_others(size, rows):
    columns, depth = size
    input, weight = operand(511, depth, "depth", 0), operand(columns, depth, "depth", 1)
    assert torch.equal(product(input[:rows], weight), product(input, weight)[:rows])


def test_integers():
    """Exact, as float32's sum of them is; and so is a matrix that chooses rows, of numbers of 11 bits."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    input, weight = (
        torch.randint(-50, 51, (rows, 2048), generator=generator, device=DEVICE).float() for rows in (64, 2048)
    )
    assert torch.equal(product(input, weight).double(), input.double() @ weight.double().T)
    assert torch.equal(product(torch.eye(64, 2048, device=DEVICE), weight), weight.T[:64])


@pytest.mark.parametrize("delta", [2.0**-k for k in (1, 6, 11, 12, 18, 23)])
def test_cancellation(delta):
    """Terms that cancel but for a part of 1 + delta, side by side and far apart."""
    values = data("normal", 64, 1024, 0)
    for input in torch.cat([values, values], 1), torch.stack([values, values], 2).flatten(1):
        weight = data("normal", 2048, 1024, 1)
        pairs = (weight, -weight * (1 + delta))
        weight = torch.cat(pairs, 1) if input[0, 1] != input[0, 0] else torch.stack(pairs, 2).flatten(1)
        want = input.double() @ weight.double().T
        scale = input.double().abs() @ weight.double().abs().T
        assert ((product(input, weight).double() - want).abs() / scale).max() <= 8 * 2.0**-24


@pytest.mark.parametrize("distance", [10, 27, 33, 40, 80])
def test_elements_far_below_the_largest(distance):
    """The largest meet zeros: what is left of the others is far too small to be trusted."""
    weight = data("normal", 2048, 2048, 0)
    weight[:, ::2] *= 2.0**-distance
    weight[7] = data("normal", 1, 2048, 1)  # beside a row that has none
    input = data("normal", 64, 2048, 2)
    input[:, 1::2] = 0.0
    want = input.double() @ weight.double().T
    is_bounded = bounded(input, weight)[1]
    assert not is_bounded[7] and (is_bounded.sum() < 50 if distance == 10 else is_bounded.sum() == 2047)
    assert relative_error(product(input, weight), want) <= TOLERANCE


@pytest.mark.parametrize("size", [2.0**16, 2.0**36, 2.0**50])
@pytest.mark.parametrize("is_alone", [False, True])
def test_one_large_element_meets_zeros(size, is_alone):
    """The others of its step lose what they are, unless it is near enough."""
    input, weight = data("normal", 64, 2048, 0), data("normal", 2048, 2048, 1)
    input[:, 0] = 0.0
    weight[7, 0] = size
    if is_alone:
        weight[7, 1:] = 0.0
    _, is_bounded = bounded(input, weight)
    assert is_bounded.nonzero().flatten().tolist() == ([7] if size > 2.0**28 and not is_alone else [])
    want = input.double() @ weight.double().T
    result = product(input, weight)
    assert relative_error(result, want) <= TOLERANCE
    assert (result[:, 7].double() - want[:, 7]).norm() <= TOLERANCE * want[:, 7].norm()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 2.0**100, 2.0**-100, 1e-40])
def test_rows_that_are_left(value):
    """Of the weight and of the input, which parts cannot hold: these come from the other kernel."""
    input, weight = operand(100, 2048, "depth", 0), operand(2048, 2048, "depth", 1)
    weight[270, 9], weight[600] = value, value
    input[40, 3] = value
    assert bounded(input, weight)[1].nonzero().flatten().tolist() == [270, 600]
    want = input.double() @ weight.double().T
    fits = want.isfinite() & (want.abs() < torch.finfo(torch.float32).max)
    result = product(input, weight)
    assert torch.equal(result.isfinite(), fits)
    normal = fits & (want.abs() > 2.0**-100)
    normal[40], normal[:, 270], normal[:, 600] = False, False, False
    assert relative_error(result[normal], want[normal]) <= TOLERANCE


def test_zeros():
    input, weight = operand(32, 2048, "depth", 0), operand(2048, 2048, "depth", 1)
    weight[5], weight[6, 64:], weight[:, 1000:] = 0.0, 0.0, 0.0
    result, is_bounded = bounded(input, weight)
    assert not is_bounded.any() and not result[:, 5].any()
    assert relative_error(result, input.double() @ weight.double().T) <= TOLERANCE


def test_gradients():
    """Of a layer with few rows: the input's comes from the same kernel, rows first."""
    input, weight = operand(64, 4096, "depth", 0).requires_grad_(), operand(2048, 4096, "depth", 1).requires_grad_()
    assert precision.rows_in_registers(torch.empty(64, 2048, device=DEVICE), weight.T) == 1
    gradient = torch.randn(64, 2048, device=DEVICE)
    ours = torch.autograd.grad(ops.linear(input, weight), (input, weight), gradient)
    assert relative_error(ours[0], gradient.double() @ weight.double()) <= TOLERANCE
    assert relative_error(ours[1], gradient.double().T @ input.double()) <= TOLERANCE


def test_captured_in_a_graph():
    """A replay finds itself whether rows are left."""
    input, weight = operand(64, 2048, "depth", 0), operand(2048, 2048, "depth", 1)
    ops.linear(input, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ops.linear(input, weight)
    for value in (1.0, 2.0**80, 1.0):
        weight[17, 4] = value
        graph.replay()
        assert torch.equal(output, ops.linear(input, weight))
        assert relative_error(output[:, 17], input.double() @ weight[17].double()) <= TOLERANCE


def test_the_same_bits_each_time():
    input, weight = operand(128, 8192, "depth", 0), operand(4096, 8192, "depth", 1)
    expected = product(input, weight)
    assert all(torch.equal(product(input, weight), expected) for _ in range(20))


@pytest.mark.usefixtures("fresh_compiler")
def test_products_of_compiled_graphs(caplog):
    model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 2048)).to(DEVICE)
    input = torch.randn(64, 2048, device=DEVICE)
    want = copy.deepcopy(model).double()(input.double())
    with (
        caplog.at_level("INFO", "ops.backend"),
        torch.compiler.config.patch(force_disable_caches=True),
        torch.no_grad(),
    ):
        result = torch.compile(model, backend=normfuse)(input)
    assert sum(int(each.split()[0]) for each in caplog.messages if "float32 products" in each) >= 1
    assert relative_error(result, want) <= 2 * TOLERANCE


#: Matrices, rows, columns, terms: attention's, as it is and its gradients', and sizes that are multiples of nothing.
BATCHES = [
    (96, 512, 512, 64),
    (192, 516, 500, 36),
    (12, 1024, 1024, 128),
    (256, 512, 64, 512),
    (96, 64, 512, 2048),
    (33, 130, 260, 1036),
]


def is_ours(input, matrix):
    return precision.rows_in_registers(input, matrix.mT) is not None


@pytest.mark.parametrize("orders", ["depth depth", "rows depth", "depth rows", "rows rows"])
@pytest.mark.parametrize("size", [*BATCHES, (192, 516, 500, 36)], ids=str)
def test_batches(size, orders):
    B, M, N, K = size
    input, weight = (
        torch.randn(B, rows, K, device=DEVICE) if order == "depth" else torch.randn(B, K, rows, device=DEVICE).mT
        for rows, order in zip((M, N), orders.split(), strict=True)
    )
    matrix = weight.mT
    assert precision.rows_in_registers(input, weight) == (0 if M > N and order_fits(input) else 1)
    want = input.double() @ matrix.double()
    error = relative_error(ops.bmm(input, matrix), want)
    assert error <= TOLERANCE and error <= 1.1 * relative_error(input @ matrix, want)


def order_fits(input):
    """Whether TMA can copy it: rows of 130 do not begin at multiples of 16 bytes."""
    return sorted(input.stride())[1] % 4 == 0


@pytest.mark.parametrize("size", BATCHES, ids=str)
def test_gradients_of_batches(size):
    B, M, N, K = size
    input, matrix = torch.randn(B, M, K, device=DEVICE), torch.randn(B, K, N, device=DEVICE)
    gradient = torch.randn(B, M, N, device=DEVICE)
    assert is_ours(gradient, matrix.mT) and is_ours(input.mT, gradient)
    leaves = input.requires_grad_(), matrix.requires_grad_()
    of_input, of_matrix = torch.autograd.grad(ops.bmm(*leaves), leaves, gradient)
    assert relative_error(of_input, gradient.double() @ matrix.double().mT) <= TOLERANCE
    assert relative_error(of_matrix, input.double().mT @ gradient.double()) <= TOLERANCE


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 2.0**100, 2.0**-100])
def test_matrices_with_rows_that_are_left(value, transposed):
    """Each in its own matrix, and nothing else changes."""
    input, weight = torch.randn(64, 130, 1024, device=DEVICE), torch.randn(64, 260, 1024, device=DEVICE)
    if transposed:
        input, weight = weight, input
    assert precision.rows_in_registers(input, weight) == int(not transposed)
    plain = ops.bmm(input, weight.mT)
    weight[3, 70, 9], weight[5, 90], input[7, 40, 3] = value, value, value
    result, want = ops.bmm(input, weight.mT), input.double() @ weight.double().mT
    fits = want.isfinite() & (want.abs() < torch.finfo(torch.float32).max)
    assert torch.equal(result.isfinite(), fits)
    changed = torch.zeros_like(fits)
    changed[3, :, 70], changed[5, :, 90], changed[7, 40] = True, True, True
    assert torch.equal(result[~changed], plain[~changed])
    normal = fits & (want.abs() > 2.0**-80)
    assert relative_error(result[normal], want[normal]) <= 5e-7


@pytest.mark.parametrize("scale", [1, 4, 8])
def test_attention(scale):
    """A sharp softmax's elements are far apart, but what meets them is not: also beside values that are 0 where the
    largest are."""
    query, key, value = (torch.randn(48, 512, 128, device=DEVICE) for _ in range(3))
    probabilities = (scale * ops.matmul(query, key.mT) / 128**0.5).softmax(-1)
    value[3, 100:] = 0.0
    assert is_ours(query, key.mT) and is_ours(probabilities, value)
    want = probabilities.double() @ value.double()
    result = ops.matmul(probabilities, value)
    assert relative_error(result, want) <= TOLERANCE
    assert ((result.double() - want).norm(dim=-1) <= 1e-6 * want.norm(dim=-1)).all()


def test_one_matrix_for_all():
    """It is split once."""
    weight, images = torch.randn(64, 512, device=DEVICE), torch.randn(32, 512, 3000, device=DEVICE)
    weight[3, ::2] *= 2.0**-40
    assert precision.rows_in_registers(weight.expand(32, -1, -1), images.mT) == 1
    result, want = ops.matmul(weight, images), weight.double() @ images.double()
    assert relative_error(result, want) <= TOLERANCE


def test_many_matrices():
    """More than a grid's second dimension has programs."""
    input, matrix = torch.randn(65541, 32, 32, device=DEVICE), torch.randn(65541, 32, 128, device=DEVICE)
    assert is_ours(input, matrix)
    result = ops.bmm(input, matrix)
    for places in (0, 70000 % 65541, 65540):
        want = input[places].double() @ matrix[places].double()
        assert relative_error(result[places], want) <= TOLERANCE


def test_an_element_of_the_input_that_meets_alone():
    """It is far below the others of its row, which meet zeros: the row is computed again."""
    input, weight = data("normal", 64, 2048, 0), torch.zeros(2048, 2048, device=DEVICE)
    input[5, 100] = 1.2345678 * 2.0**-36
    weight[7, 100] = 1.0
    result, is_bounded = product(input, weight), bounded(input, weight)[1]
    assert not is_bounded.any()
    assert result[5, 7] == input[5, 100]
    assert ((result[:, 7] - input[:, 100]).abs() <= 2.0**-19 * input[:, 100].abs()).all()


def test_rows_of_zeros_beside_a_bound():
    """Are zeros."""
    input, weight = data("normal", 64, 2048, 0), data("normal", 2048, 2048, 1)
    input[:32], weight[:, ::2] = 0.0, 2.0**-40
    result = product(input, weight)
    assert not result[:32].any()
    assert relative_error(result[32:], input[32:].double() @ weight.double().T) <= TOLERANCE
