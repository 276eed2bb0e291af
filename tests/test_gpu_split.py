"""Promise: float32 multiplied as float16 parts, on Hopper, is right at every size, layout and kind of data.

At real sizes the chains of ``tests/test_gpu.py`` go this way; here is the product itself, small (`-k small`, for
compute-sanitizer), componentwise, and what is left to the kernel that takes any number.
"""

import copy

import pytest
import torch

import ops
from ops import paired_products, precision, products
from ops.backend import normfuse
from ops.matrix_products import PRODUCTS_OF_ONE, operands_of_one_matrix
from tests import gpu
from tests.accuracy import run
from tests.chains import L30, L75, L94, LINEAR, LINEAR_CHAINS, Problem, chain_id, with_layout
from tests.gpu import DEVICE, arguments_of, assert_same_bits
from tests.test_nonfinite import check_places
from triton_kernels import chains, float32_tiles
from triton_kernels.chain import Chain
from triton_kernels.float32_block_split import split_blocks
from triton_kernels.float32_tiles import LinearSplitConfig, sections_of
from triton_kernels.grid import blocks_of
from triton_kernels.hopper import runs_hopper_kernels
from triton_kernels.pointwise import ADD
from triton_kernels.row_minimum import ROW_MINIMUM, empty_tile_minimum, finish

pytestmark = [
    *gpu.MARKS,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(
        not (torch.cuda.is_available() and runs_hopper_kernels(torch.device("cuda", 0))),
        reason="operands are split on Hopper alone (compute capability 9.0)",
    ),
]

#: norm(result - exact) / norm(exact), by parts: float32's, and TF32's.
TOLERANCES = {1: 5e-4, 2: 5e-7}
ORDERS = ("depth", "rows", "strided")
by_scales = pytest.mark.parametrize("parts, in_blocks", [(1, False), (2, False), (2, True)], ids=["1", "2", "blocks"])


def operand(rows, depth, order, seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    if order == "rows":
        return torch.randn(depth, rows, generator=generator, device=DEVICE).T
    if order == "strided":
        return torch.randn(rows, 2 * depth + 3, generator=generator, device=DEVICE)[:, 1 : 2 * depth + 1 : 2]
    return torch.randn(rows, depth, generator=generator, device=DEVICE)


def product(input, weight, parts, bias=None, divides=False, in_blocks=False):
    output = torch.empty(input.shape[0], weight.shape[0], device=DEVICE)
    config = LinearSplitConfig(parts, divides=divides, in_blocks=in_blocks)
    products.product(input, weight, chains.LINEAR, config, (bias,), output=output)
    return output


def relative_error(result, exact):
    return ((result.double() - exact).norm() / exact.norm()).item()


@by_scales
@pytest.mark.parametrize(
    "orders", [("depth", "depth"), ("depth", "rows"), ("rows", "rows"), ("strided", "rows")], ids=str
)
@pytest.mark.parametrize("size", [(128, 256, 64), (257, 301, 131), (1, 1, 1), (5, 130, 1000)], ids=str)
def test_small_products(size, orders, parts, in_blocks):
    """Whole tiles, and sizes that are multiples of nothing; operands in every order of the three products."""
    rows, columns, depth = size
    input, weight = operand(rows, depth, orders[0], 0), operand(columns, depth, orders[1], 1)
    bias = torch.randn(columns, device=DEVICE)
    exact = input.double() @ weight.double().T + bias.double()
    size = (input.double().abs() @ weight.double().abs().T).norm() + bias.double().norm()
    result = product(input, weight, parts, bias, in_blocks=in_blocks)
    assert (result.double() - exact).norm() <= TOLERANCES[parts] * size


@by_scales
@pytest.mark.parametrize("value", [1.0, torch.nan, 2.0**100])
@pytest.mark.parametrize("size", [(1, 1, 1024), (257, 301, 5000), (2000, 2250, 1100)], ids=str)
def test_small_products_of_sections(size, value, parts, in_blocks):
    """As a weight's gradient: multiprocessors share what is left, or all tiles. A row and a column are left."""
    rows, columns, depth = size
    assert sections_of(blocks_of(rows, 128) * blocks_of(columns, 384 - 128 * parts), depth, 132, 64)[1] > 1
    input, weight = operand(rows, depth, "rows", 0), operand(columns, depth, "rows", 1)
    input[rows // 2, 3], weight[columns // 2, 9] = value, value
    bias = torch.randn(columns, device=DEVICE)
    exact = input.double() @ weight.double().T + bias.double()
    result, again = (product(input, weight, parts, bias, divides=True, in_blocks=in_blocks) for _ in range(2))
    torch.testing.assert_close(result, again, rtol=0, atol=0, equal_nan=True)
    if value == 1.0:
        assert relative_error(result, exact) <= TOLERANCES[parts]
        return
    for line in (result[rows // 2], result[:, columns // 2]):
        assert line.isnan().all() if value != value else line.isfinite().all()
    others = [[each for each in range(size) if each != size // 2] for size in (rows, columns)]
    if min(map(len, others)) > 0:
        result, exact = (each[others[0]][:, others[1]] for each in (result, exact))
        assert relative_error(result, exact) <= TOLERANCES[parts]


@by_scales
def test_small_epilogues(parts, in_blocks):
    """Group norm in registers, what is saved for the backward pass, and the minimum of each row."""
    rows, depth, columns, size = 150, 200, 400, 16
    input, weight = operand(rows, depth, "depth", 0), operand(columns, depth, "depth", 1)
    vectors = tuple(torch.randn(columns, device=DEVICE) for _ in range(4))
    config, options = LinearSplitConfig(parts, in_blocks=in_blocks), {"eps": 1e-5, "group_size": size}
    exact = input.double() @ weight.double().T + vectors[0].double() + vectors[1].double()
    affine = [vector.double() for vector in vectors[2:]]
    output, saved = torch.empty(2, rows, columns, device=DEVICE)
    chain, operands = chains.LINEAR_HARDTANH_MISH_GROUP_NORM, (*vectors[:2], (-0.5, 1.5), None, *vectors[2:])
    products.product(input, weight, chain, config, operands, output=output, saved=saved, **options)
    normalised = torch.nn.functional.mish(exact.clamp(-0.5, 1.5))
    normalised = torch.nn.functional.group_norm(normalised, columns // size, *affine)
    assert relative_error(saved, exact) <= TOLERANCES[parts]
    assert relative_error(output, normalised) <= 4 * TOLERANCES[parts]  # small deviations are scaled up
    tiles = -(-columns // config.epilogue_columns)
    keys, winners = empty_tile_minimum(tiles, rows, size, torch.device(DEVICE), True)
    chain = Chain("linear", before=(ADD,), reduction=ROW_MINIMUM)
    products.product(input, weight, chain, config, vectors, output=keys, saved=winners, **options)
    minimum = torch.empty(1, rows, device=DEVICE)
    finish(keys, None, None, minimum, None, size)
    exact_minimum = torch.nn.functional.group_norm(exact, columns // size, *affine).amin(1)
    assert relative_error(minimum[0], exact_minimum) <= 4 * TOLERANCES[parts]


@by_scales
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 2.0**100])
def test_small_rows_that_are_left(value, parts, in_blocks):
    """A row and a column that parts cannot hold: these come from the other kernel, beside what does not."""
    input, weight = operand(300, 200, "depth", 0), operand(520, 200, "rows", 1)
    input[140, 3], weight[270, 9] = value, value
    expected = input.double() @ weight.double().T
    result = product(input, weight, parts, in_blocks=in_blocks)
    finite = expected.isfinite()
    assert torch.equal(result.isfinite(), finite & (expected.abs() < torch.finfo(torch.float32).max))
    finite[140], finite[:, 270] = False, False
    assert relative_error(result[finite], expected[finite]) <= TOLERANCES[parts]
    if value == 2.0**100:
        huge = result[140, :270]
        assert relative_error(huge, expected[140, :270]) <= TOLERANCES[2]


@by_scales
@pytest.mark.parametrize("size", [(9000, 600), (600, 9000)], ids=str)
def test_small_products_in_turns(monkeypatch, size, parts, in_blocks):
    """Some rows of the larger operand at a time: the same bits as all at once, epilogue and what is left included."""
    rows, columns = size
    input, weight = operand(rows, 200, "rows", 0), operand(columns, 200, "depth", 1)
    input[-300, 3], weight[-200, 9] = torch.nan, 2.0**100
    config, options = LinearSplitConfig(parts, in_blocks=in_blocks), {"eps": 1e-5, "group_size": 8}
    chain = chains.LINEAR_HARDTANH_MISH_GROUP_NORM
    operands = (torch.randn(columns, device=DEVICE), None, (-0.5, 1.5), None, None, None)

    def run():
        output, saved = torch.empty(2, rows, columns, device=DEVICE)
        products.product(input, weight, chain, config, operands, output=output, saved=saved, **options)
        return output, saved

    whole = run()
    monkeypatch.setattr(float32_tiles, "_KEPT_BYTES", 2**18)
    turn, some = products._in_turns((input, weight), config, (None, None))
    assert turn == (0 if rows > columns else 1) and some < 9000
    torch.testing.assert_close(run(), whole, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [(9000, 600), (600, 9000)], ids=str)
def test_small_divided_products_in_turns(monkeypatch, size):
    """Each turn's last tiles are divided along their terms; a matrix may have been split before."""
    rows, columns = size
    input, weight = operand(rows, 1100, "rows", 0), operand(columns, 1100, "rows", 1)
    exact = input.double() @ weight.double().T
    monkeypatch.setattr(float32_tiles, "_KEPT_BYTES", 2**18)
    config = LinearSplitConfig(2, divides=True, in_blocks=True)
    for halves in ((None, None), (split_blocks(input), None), (None, split_blocks(weight))):
        output = torch.empty(rows, columns, device=DEVICE)
        products.product(input, weight, chains.LINEAR, config, (None,), halves=halves, output=output)
        assert relative_error(output, exact) <= TOLERANCES[2]


def test_small_minimum_in_turns(monkeypatch):
    input, weight = operand(600, 200, "depth", 0), operand(9000, 200, "depth", 1)
    monkeypatch.setattr(float32_tiles, "_KEPT_BYTES", 2**18)
    keys, winners = empty_tile_minimum(-(-9000 // 128), 600, 8, torch.device(DEVICE), True)
    chain, vectors = Chain("linear", reduction=ROW_MINIMUM), (None, None, None)
    products.product(
        input, weight, chain, LinearSplitConfig(2), vectors, output=keys, saved=winners, eps=1e-5, group_size=8
    )
    minimum = torch.empty(1, 600, device=DEVICE)
    finish(keys, None, None, minimum, None, 8)
    exact = torch.nn.functional.group_norm(input.double() @ weight.double().T, 9000 // 8).amin(1)
    assert relative_error(minimum[0], exact) <= 4 * TOLERANCES[2]


def test_memory_of_turns():
    """As many bytes of a weight's parts as are kept at a time, and not all: 64 of 256 MiB."""
    input, weight = operand(1024, 8192, "depth", 0), operand(8192, 8192, "depth", 1)
    output = torch.empty(1024, 8192, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    products.product(input, weight, chains.LINEAR, LinearSplitConfig(2), (None,), output=output)
    assert torch.cuda.max_memory_allocated() - before <= (32 + 64 + 1) * 2**20


def data(kind, rows, depth, seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    if kind == "positive":
        return torch.rand(rows, depth, generator=generator, device=DEVICE)
    values = torch.randn(rows, depth, generator=generator, device=DEVICE)
    if kind == "wide":
        exponents = torch.randint(-23, 24, (rows, depth), generator=generator, device=DEVICE)
        return values * torch.exp2(exponents.float())
    if kind == "rows":  # each row of a size of its own
        exponents = torch.randint(-50, 51, (rows, 1), generator=generator, device=DEVICE)
        return values * torch.exp2(exponents.float())
    if kind == "spike":
        values[:, 7] = 2.0**20
    if kind == "holes":  # some elements far below the row's largest
        values[:, ::5] *= 2.0**-30
    if kind == "dead":  # what is largest in a row of one operand meets zeros of the other's
        values *= 2.0**-33
        values[:, seed] = 1.0
        values[:, 1 - seed] = 0.0
    return values


@pytest.mark.parametrize("kind", ["normal", "positive", "wide", "rows", "spike", "holes", "dead"])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_every_element_is_as_good_as_the_librarys(in_blocks, kind):
    """At the target size, max |error| / (|input| @ |weight|.T), which forgives no element for what the others are."""
    torch.set_float32_matmul_precision("highest")
    input, weight = data(kind, 1024, 8192, 0), data(kind, 8192, 8192, 1)
    exact = input.double() @ weight.double().T
    size = input.double().abs() @ weight.double().abs().T
    ours, library = product(input, weight, 2, in_blocks=in_blocks), torch.mm(input, weight.T)
    worst, librarys_worst = (((result.double() - exact).abs() / size).max().item() for result in (ours, library))
    assert worst <= librarys_worst
    assert relative_error(ours, exact) <= relative_error(library, exact)


@pytest.mark.parametrize("places", ["first,first.T", "second,first", "second.T,first.T", "first.T,second.T,first"])
@pytest.mark.parametrize("value", [1.0, torch.nan])
def test_products_of_one_matrix(value, places):
    """Are those of each alone: the values of rows that are left, too."""
    matrix, n = operand(1000, 1024, "depth", 0), 900
    matrix[300, 400] = value
    others = [
        operand(*((matrix.shape[place in ("first", "second.T")], n)[:: -1 if "second" in place else 1]), "depth", seed)
        for seed, place in enumerate(places.split(","), 1)
    ]
    results = PRODUCTS_OF_ONE(places, matrix, others)
    for (a, b), result in zip(operands_of_one_matrix(places, matrix, others), results, strict=True):
        assert precision.multiplier(a, b.T, may_divide=True) == "kernel"
        exact = a.double() @ b.double()
        known = exact.isfinite()
        assert torch.equal(result.isfinite(), known)
        assert relative_error(result[known], exact[known]) <= TOLERANCES[2]


@pytest.mark.parametrize("kind", ["normal", "positive"])
@pytest.mark.parametrize("size", [(512, 512, 512), (512, 1024, 1024), (1024, 1024, 2048), (2048, 512, 4096)], ids=str)
def test_products_of_few_tiles(size, kind):
    """Where cuBLAS uses split-K, its error is smallest."""
    torch.set_float32_matmul_precision("highest")
    rows, columns, depth = size
    input, weight = data(kind, rows, depth, 0), data(kind, columns, depth, 1)
    exact = input.double() @ weight.double().T
    ours, librarys = (relative_error(result, exact) for result in (product(input, weight, 2), input @ weight.T))
    assert ours <= 1.1 * librarys + torch.finfo(torch.float32).eps


@pytest.fixture(params=["highest", "high"])
def setting(request, monkeypatch):
    """PyTorch's setting, where products are split however small they are."""
    torch.set_float32_matmul_precision(request.param)
    monkeypatch.setattr(precision, "FEWEST_TF32_LINES", 0)
    monkeypatch.setattr(precision, "FEWEST_TF32_PRODUCTS", 0)
    return request.param


def test_setting_decides_on_the_parts(setting):
    input = torch.empty(1024, 1024, device=DEVICE)
    assert not precision.multiplies_by_cublas(input, 1024)
    parts = {"highest": 2, "high": 1}[setting]
    assert products.product_config(chains.LINEAR, input, input) == LinearSplitConfig(parts)


@pytest.mark.parametrize("layout", ["transposed", "strided", "misaligned"])
@pytest.mark.parametrize("chain", [L94, L75, L30, LINEAR], ids=chain_id)
def test_layouts_give_the_same_bits(chain, layout, setting):
    """Parts are the same however operands lie in memory, and so are products, forward and backward."""
    arguments = arguments_of(chain, Problem(1030, 1034, 64, 16), torch.float32)
    laid_out = arguments | {name: with_layout(arguments[name], layout) for name in ("input", "weight")}
    grad_output = torch.randn_like(chain.function(**arguments))
    assert_same_bits(run(chain.function, laid_out, grad_output), run(chain.function, arguments, grad_output))


@pytest.mark.parametrize("chain", LINEAR_CHAINS, ids=chain_id)
def test_nonfinite_numbers(chain, setting):
    arguments = arguments_of(chain, Problem(1024, 1024, 64, 16), torch.float32)
    arguments["input"][3, 5], arguments["input"][600, 0] = torch.nan, torch.inf
    check_places(chain, arguments, gradients=False)


def test_captured_in_a_graph():
    """No step waits for the GPU to say whether rows are left: a replay does what its data ask for."""
    input, weight = operand(1024, 1024, "depth", 0), operand(1024, 1024, "depth", 1)
    ops.linear(input, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ops.linear(input, weight)
    for value in (1.0, 2.0**80, 1.0):
        input[17, 4] = value
        graph.replay()
        assert torch.equal(output, ops.linear(input, weight))
        assert relative_error(output[17], input[17].double() @ weight.double().T) <= TOLERANCES[2]


@pytest.fixture
def layers():
    """Two layers and a function, and a step: the output and all gradients, in float64, by eager PyTorch, and what makes
    a step's error at most PyTorch's."""
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1536), torch.nn.Tanh(), torch.nn.Linear(1536, 1024)).to(DEVICE)
    input = torch.randn(2048, 1024, device=DEVICE, requires_grad=True)
    exact = copy.deepcopy(model).double()

    def step(function, input):
        output = function(input)
        return output, *torch.autograd.grad(output.square().mean(), [input, *function.parameters()])

    expected = step(exact, input.detach().double().requires_grad_())
    eager = step(model, input)

    def check(results):
        for want, theirs, ours in zip(expected, eager, results, strict=True):
            assert relative_error(ours, want) <= 1.1 * relative_error(theirs, want) + 2 * torch.finfo(torch.float32).eps

    return model, lambda function: step(function, input), check


@pytest.mark.usefixtures("fresh_compiler")
def test_products_of_compiled_graphs(layers, caplog, monkeypatch):
    """Forward and backward, with Inductor: at most cuBLAS's error, and a call in the place of each product. The first
    layer and its function are a chain, which computes three of the six. Both gradients of the second are one call."""
    model, step, check = layers
    pairs, pair = [], paired_products.pair
    monkeypatch.setattr(paired_products, "pair", lambda *given: pairs.append(pair(*given)) or pairs[-1])
    with caplog.at_level("INFO", "ops.backend"), torch.compiler.config.patch(force_disable_caches=True):
        check(step(torch.compile(model, backend=normfuse)))
    assert sum(int(each.split()[0]) for each in caplog.messages if "float32 products" in each) == 3
    assert sorted(map(len, pairs)) == [0, 2]


@pytest.mark.usefixtures("fresh_compiler")
def test_sums_of_compiled_graphs(caplog):
    """Inductor makes one operator of a product and what is added to it: a residual, or another gradient of the weight.
    Both products forward are the kernels', and so are their gradients, at most with cuBLAS's error."""
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    weight = (torch.randn(1024, 1024, device=DEVICE) / 32).requires_grad_()
    input = torch.randn(2048, 1024, device=DEVICE, requires_grad=True)

    def step(function, input, weight):
        output = function(input, weight)
        return output, *torch.autograd.grad(output.square().mean(), [input, weight])

    def function(input, weight):
        return torch.tanh((input + input @ weight) @ weight)

    expected = step(function, *(each.detach().double().requires_grad_() for each in (input, weight)))
    eager = step(function, input, weight)
    with caplog.at_level("INFO", "ops.backend"), torch.compiler.config.patch(force_disable_caches=True):
        results = step(torch.compile(function, backend=normfuse), input, weight)
    for want, theirs, ours in zip(expected, eager, results, strict=True):
        assert relative_error(ours, want) <= 1.1 * relative_error(theirs, want) + 2 * torch.finfo(torch.float32).eps
    assert sum(int(each.split()[0]) for each in caplog.messages if "float32 products" in each) == 6


def test_products_of_eager_code(layers):
    """Forward and backward, where autograd runs in another thread: at most cuBLAS's error, and none of its products."""
    model, step, check = layers
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, ops.faster_float32():
        results = step(model)
    check(results)
    called = {each.key: each.count for each in profile.key_averages()}
    assert called["normfuse::product"] == 6
