"""Promise: a chain of a user's own, with a pointwise function of its own, does all that the functions of ``ops`` do."""

import io
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import ops
from autotune_configs import lookup, offline, tables
from autotune_configs.chains import linear_problems
from autotune_configs.gpus import Gpu
from autotune_configs.sweep import sweep_and_store, time_on_host
from ops import plans
from ops.calls import parse
from tests.compilation import more_spills
from triton_kernels.pointwise import ADD, GELU, HARDTANH, MUL, Pointwise
from triton_kernels.row_minimum import ROW_MINIMUM


# The declaration: at most 15 lines.
@triton.jit
def silu(value, operand):
    return value * tl.sigmoid(value)


@triton.jit
def silu_gradient(gradient, value, operand):
    sigmoid = tl.sigmoid(value)
    return gradient * sigmoid * (1.0 + value * (1.0 - sigmoid))


SILU = Pointwise("own_silu", silu, silu_gradient, lambda value, _: F.silu(value))
CHAIN = ops.Chain("linear", after=(SILU,))

TEXT = "linear -> add -> group_norm(4, 1e-05) -> mul -> add -> own_silu"


def formula(input, weight, linear_bias, norm_weight, norm_bias):
    return F.silu(F.group_norm(F.linear(input, weight, linear_bias), 4, norm_weight, norm_bias))


def draw(dtype=torch.float32):
    shapes = (8, 16), (32, 16), (32,), (32,), (32,)
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def results(function, tensors):
    """The output and the gradients of all tensors, for a gradient that is no constant."""
    output = function(*tensors)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    wanted = [each for each in tensors if each is not None]
    return [output.detach(), *torch.autograd.grad(output, wanted, gradient)]


def in_float64(function, tensors):
    return results(function, [each.detach().double().requires_grad_() for each in tensors])


def check(found, expected, plain, floor=2e-7):
    """No less accurate than PyTorch in the same dtype: output, then the gradients."""
    for place, (ours, exact, theirs) in enumerate(zip(found, expected, plain, strict=True)):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        error, bar = ((each.double() - exact).norm() for each in (ours, theirs))
        assert error <= 1.1 * bar + floor * exact.norm(), place


def call(*tensors):
    return CHAIN(*tensors, num_groups=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forward_and_backward(dtype):
    tensors = draw(dtype)
    check(results(call, tensors), in_float64(formula, tensors), results(formula, tensors))
    with torch.no_grad():
        output = call(*tensors)
    assert torch.equal(output, results(call, tensors)[0])


def test_kernels():
    """One does all of the forward pass, one all of the backward pass but the products."""
    forward, backward = ops.explain(call, *draw()).calls
    assert forward.chain == backward.chain == TEXT
    assert [step.name for step in forward.steps] == ["linear_kernel"]
    assert backward.steps[0].name == "group_norm_backward_kernel"


def test_absent_vectors():
    input, weight, *_ = draw()
    exact = F.silu(F.group_norm(F.linear(input.double(), weight.double()), 4))
    torch.testing.assert_close(call(input, weight, None, None, None).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled(dtype):
    """The bits of the eager call."""
    tensors = draw(dtype)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for found, expected in zip(results(compiled, tensors), results(call, tensors), strict=True):
        assert torch.equal(found, expected)


def test_autocast():
    """It computes in autocast's dtype and returns it; gradients have the dtype of what they belong to."""
    tensors = draw()
    with torch.autocast("cpu", torch.bfloat16):
        found, plain = results(call, tensors), results(formula, tensors)
    assert found[0].dtype == torch.bfloat16
    assert [each.dtype for each in found[1:]] == [torch.float32] * 5
    check(found, in_float64(formula, tensors), plain, floor=2**-9)


def test_plain():
    """float64 runs as PyTorch: to the bit."""
    tensors = draw(torch.float64)
    for found, expected in zip(results(call, tensors), results(formula, tensors), strict=True):
        assert torch.equal(found, expected)
    explained = ops.explain(call, *tensors).calls[0]
    assert (explained.chain, explained.reason[-7:]) == ("linear_group_norm_ownsilu", "float64")
    torch.autograd.gradcheck(call, [each[:2] if each.ndim == 2 and len(each) == 8 else each for each in tensors])


def test_vector_after_a_function():
    """A bias is an argument at any place, and has a gradient."""
    chain = ops.Chain("linear", before=(SILU, ADD), after=(SILU, ADD), names=("a", "b", "c", "d", "e"))
    tensors = draw()
    tensors[3:3] = [torch.randn(32, generator=torch.Generator().manual_seed(2)).requires_grad_()]
    tensors.append(torch.randn(32, generator=torch.Generator().manual_seed(3)).requires_grad_())

    def by_hand(input, weight, a, b, c, d, e):
        return F.silu(F.group_norm(F.silu(F.linear(input, weight, a)) + b, 4, c, d)) + e

    found = results(lambda *tensors: chain(*tensors, num_groups=4), tensors)
    check(found, in_float64(by_hand, tensors), results(by_hand, tensors))
    with pytest.raises(ValueError, match=r"^b must have shape \(32,\), got \(31,\)"):
        chain(*tensors[:3], torch.randn(31), *tensors[4:], num_groups=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor(dtype):
    """A residual addition: an operand of the values' shape."""
    chain = ops.Chain("linear", after=(SILU, replace(ADD, operand="tensor")))
    residual = torch.randn(8, 32, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    tensors = [*draw(dtype), residual]

    def by_hand(*tensors):
        return formula(*tensors[:-1]) + tensors[-1]

    def own(*tensors):
        return chain(*tensors, num_groups=4)

    check(results(own, tensors), in_float64(by_hand, tensors), results(by_hand, tensors))
    compiled = torch.compile(own, backend="aot_eager", fullgraph=True)
    for found, expected in zip(results(compiled, tensors), results(own, tensors), strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match=r"must have shape \(8, 32\) or \(32,\), got \(1, 32\)"):
        own(*tensors[:-1], residual[:1])


def images(*shape, format=torch.contiguous_format):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(memory_format=format).requires_grad_()


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("is_before", [False, True])
def test_tensor_of_images(is_before, format):
    """Around a norm of images, in formats of their own."""
    add = replace(ADD, operand="tensor")
    chain = ops.Chain(before=(add, SILU)) if is_before else ops.Chain(after=(SILU, add))
    input, residual = images(2, 16, 5, 4, format=format), images(2, 16, 5, 4)
    vectors = images(16), images(16)
    tensors = [input, residual, *vectors] if is_before else [input, *vectors, residual]

    def by_hand(input, *others):
        if is_before:
            return F.group_norm(F.silu(input + others[0]), 4, *others[1:])
        return F.silu(F.group_norm(input, 4, *others[:2])) + others[2]

    def own(*tensors):
        return chain(*tensors, num_groups=4)

    check(results(own, tensors), in_float64(by_hand, tensors), results(by_hand, tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_before", [False, True])
def test_tensor_after_a_convolution(is_before, dtype):
    """By PyTorch's convolution and by the project's, whose statistics are of z alone."""
    add = replace(ADD, operand="tensor")
    chain = ops.Chain("conv_transpose2d", **({"before": (add, SILU)} if is_before else {"after": (SILU, add)}))
    shapes = [(2, 6, 5, 4), (6, 16, 3, 3), (16,), (16,), (16,)]
    shapes.insert(3 if is_before else 5, (2, 16, 7, 6))
    tensors = [images(*shape).detach().to(dtype).requires_grad_() for shape in shapes]

    def by_hand(input, weight, bias, *others):
        z = F.conv_transpose2d(input, weight, bias)
        if is_before:
            return F.group_norm(F.silu(z + others[0]), 4, *others[1:])
        return F.silu(F.group_norm(z, 4, *others[:2])) + others[2]

    def own(*tensors):
        return chain(*tensors, num_groups=4)

    check(results(own, tensors), in_float64(by_hand, tensors), results(by_hand, tensors))


def test_tensor_of_any_batch():
    """From the second batch on, a compiler takes its size for a symbol."""
    chain = ops.Chain("linear", after=(SILU, replace(ADD, operand="tensor")))

    def own(*tensors):
        return chain(*tensors, num_groups=4)

    compiled = torch.compile(own, backend="aot_eager", fullgraph=True)
    for batch in (8, 5, 3):
        tensors = [images(batch, 16), *draw()[1:], images(batch, 32)]
        for found, expected in zip(results(compiled, tensors), results(own, tensors), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("contraction", ["", "linear"])
def test_functions_after_no_norm(contraction):
    """They follow those before it."""
    own = ops.Chain(contraction, before=(SILU,), norm="", after=(MUL, GELU))
    vectors = [torch.randn(32, requires_grad=True) for _ in range(2 if contraction else 1)]
    tensors = [*draw()[:2], *vectors] if contraction else [torch.randn(8, 32, requires_grad=True), *vectors]

    def plain(input, *others):
        z = F.linear(input, *others[:2]) if contraction else input
        return F.gelu(F.silu(z) * others[-1])

    check(results(own, tensors), in_float64(plain, tensors), results(plain, tensors))


def test_norm_vectors_of_two_dimensions():
    """With leading ones, in every dtype."""
    input, weight = torch.randn(3, 8), torch.randn(1, 8)
    expected = ops.group_norm(input.double(), 2, weight.double(), weight.double())
    torch.testing.assert_close(ops.group_norm(input, 2, weight, weight), expected.float())


def test_operands_are_counted():
    with pytest.raises(TypeError, match=r"expected 4 operands after the input \(weight, add, mul, add\), got 2"):
        CHAIN(*draw()[:3])


def test_a_convolutions_arguments_are_refused():
    with pytest.raises(TypeError, match="'stride' is an argument of convolutions, and 'linear -> "):
        CHAIN(*draw(), num_groups=4, stride=2)


def test_each_argument_of_a_convolution():
    """Calls that differ in a convolution's arguments alone have plans of their own."""
    chain = ops.Chain("conv_transpose2d", before=(SILU,))
    input, weight = torch.randn(1, 4, 6, 5), torch.randn(4, 4, 3, 3)
    vectors = torch.zeros(4), torch.ones(4), torch.zeros(4)
    for geometry in ({"stride": 2}, {"dilation": 2}, {"padding": 2}, {"stride": 2, "padding": 1}, {}):
        expected = F.group_norm(F.silu(F.conv_transpose2d(input, weight, **geometry)), 2)
        torch.testing.assert_close(chain(input, weight, *vectors, num_groups=2, **geometry), expected)
    with pytest.raises(TypeError, match="'strides' is no argument of a transposed convolution"):
        chain(input, weight, *vectors, num_groups=2, strides=2)


@pytest.mark.parametrize(
    "parts, message",
    [
        (
            {"contraction": "conv3d"},
            "contraction must be one of '', 'linear', 'conv2d', 'conv_transpose2d', got 'conv3d'",
        ),
        ({"norm": "layer_norm"}, "norm must be one of '', 'group_norm', got 'layer_norm'"),
        ({"contraction": "conv_transpose2d", "norm": ""}, "a chain with a convolution must have a norm"),
        ({"contraction": "", "reduction": ROW_MINIMUM}, "a reduction must follow a linear layer, got ''"),
        ({"contraction": "linear", "norm": "", "reduction": ROW_MINIMUM}, "a reduction takes the values of a norm"),
        ({"contraction": ["linear"]}, "contraction must be one of .*, got \\['linear'\\]"),
        ({"before": (replace(SILU, name="no add"),)}, "must be a lower-case identifier, got 'no add'"),
        ({"before": (replace(SILU, name="group_norm"),)}, "cannot be called 'group_norm'"),
        ({"before": [SILU]}, "before must be a tuple of Pointwise, got \\[Pointwise"),
        ({"after": (torch.relu,)}, "after must be a tuple of Pointwise"),
        (
            {"contraction": "linear", "reduction": "row_minimum"},
            "reduction must be a Reduction or None, got 'row_minimum'",
        ),
    ],
)
def test_chains_that_there_are_not(parts, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ops.Chain(**parts)


def test_operands_that_there_are_not():
    with pytest.raises(ValueError, match="operand must be one of '', 'numbers', .*'tensor' or 'earlier N', got 'foo'"):
        replace(SILU, operand="foo")


@pytest.mark.parametrize(
    "bounds, message",
    [
        (None, "hardtanh must be a tuple of numbers, got None"),
        (1.0, "hardtanh must be a tuple of numbers, got 1.0"),
        ((0.0, 1.0, 2.0), "hardtanh must be two numbers, got"),
        (("a", 1.0), "min_val"),
    ],
)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_numbers(bounds, message, is_compiled):
    own = ops.Chain(after=(SILU, HARDTANH))
    function = torch.compile(own, backend="eager") if is_compiled else own
    expected = F.hardtanh(F.silu(F.group_norm(torch.ones(2, 8), 2)), -0.1, 0.2)
    torch.testing.assert_close(function(torch.ones(2, 8), None, None, (-0.1, 0.2), num_groups=2), expected)
    with pytest.raises((TypeError, ValueError), match=message):
        own(torch.ones(2, 8), None, None, bounds, num_groups=2)


def test_sizes_that_are_no_pairs():
    """Also after a call with the same numbers that are."""
    own = ops.Chain("conv_transpose2d", before=(SILU,))
    tensors = torch.randn(1, 4, 5, 6), torch.randn(4, 8, 3, 3), None, None, None
    for _ in range(2):
        own(*tensors, num_groups=2, stride=(1, 1), padding=(0, 0))
        with pytest.raises(ValueError, match="stride must be an int or a pair of ints"):
            own(*tensors, num_groups=2, stride=(1, 1, 0), padding=(0, 0))
        with pytest.raises(TypeError, match="groups must be an int"):
            own(*tensors, num_groups=2, groups=(1, 1))


def test_other_functions_of_one_name():
    """Compiled graphs and tables know a function by its name. The right one works afterwards."""
    other = replace(SILU, gradient=GELU.gradient)
    with pytest.raises(ValueError, match="the pointwise function 'own_silu' is another one's name already"):
        ops.Chain("linear", before=(other, other))
    assert ops.Chain("linear", before=(SILU, SILU)).kernel == "linear_ownsilu_ownsilu_group_norm"
    assert ops.Chain("linear", after=(SILU,)) == CHAIN


def test_text():
    """A call is a text that names the function; a process without the function says what it lacks."""
    assert parse(TEXT).text == TEXT and parse(TEXT).chain.after == (SILU,)
    with pytest.raises(ValueError, match="names the pointwise function 'unknown', which this process does not have"):
        parse(TEXT.replace("own_silu", "unknown"))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(16, 32), torch.nn.GroupNorm(4, 32)

    def forward(self, input):
        linear, norm = self.linear, self.norm
        return CHAIN(input, linear.weight, linear.bias, norm.weight, norm.bias, num_groups=4)


def test_exported():
    """The saved program names the chain, for batches of any size."""
    layer, input = Layer(), torch.randn(8, 16)
    program = torch.export.export(layer, (input,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert "own_silu" in str(program.graph)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for batch in (8, 5, 3):
        input = torch.randn(batch, 16)
        assert torch.equal(loaded(input), layer(input))


def test_a_graph_of_another_process():
    tensors = draw()
    with pytest.raises(ValueError, match="'linear -> unknown' is no chain of this process: make it first"):
        torch.ops.normfuse.chain("linear -> unknown", tensors, [], 4, 1e-5, [])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_swept(tmp_path, monkeypatch, dtype):
    """What a sweep finds is what a call runs with."""
    monkeypatch.setenv(tables.FOLDER_VARIABLE, str(tmp_path))
    lookup.forget()
    problems = linear_problems(CHAIN, (8, 16, 32), dtype, group_size=8)
    interpreted = {"prepare": lambda call: call, "clock": time_on_host, "resources": None}
    for result in sweep_and_store(problems, torch.device("cpu"), is_quick=True, **interpreted):
        assert not result.is_red
    (forward, backward) = ops.explain(call, *draw(getattr(torch, dtype))).calls
    table = str(tables.user_path(Gpu.of(torch.device("cpu"))))
    assert forward.steps[0].source == backward.steps[0].source == table


@pytest.mark.offline
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_offline(dtype, arch):
    """Both plans are made without a GPU. No kernel spills more than it may for the project's own chains."""
    text = TEXT.replace("(4,", "(32,")

    def empty(*shape):
        return torch.empty(shape, dtype=dtype, device="meta")

    M, K, N = 1024, 512, 1024
    row = [empty(M, K), empty(N, K), empty(N), empty(N), empty(N), None]

    def make_plans():
        plans.make_forward(parse(text), row, True)
        output = empty(M, N)
        wanted = [((), dtype), ((), dtype), *[((N,), dtype)] * 3, None]
        read = plans.places_read(parse(text), row, [True] * 5)
        spread = [each if place in read else None for place, each in enumerate(row)]
        plans.make_backward(parse(text), output, [output], spread, wanted)

    compiled = offline.compile_launches(make_plans, arch)
    product = "linear_split_kernel" if arch == 90 and dtype == torch.float32 else "linear_kernel"
    assert {product, "group_norm_backward_kernel"} <= {each.name for each in compiled}
    # linear_registers_kernel: once a part, not in its steps (test_offline_compilation_registers.py)
    allowed = {"split_kernel": 8, "linear_kernel": 192 if arch == 100 else 0, "linear_registers_kernel": 48}
    for each in compiled:
        assert each.fits and each.spilled_bytes <= allowed.get(each.name, 0) + more_spills(arch), each.name
