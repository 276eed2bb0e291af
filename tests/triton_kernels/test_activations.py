"""The built-in pointwise functions against PyTorch's: values, gradients, special values, in chains, and compiled."""

import inspect
import itertools
import math
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import ops
from autotune_configs.offline import compile_launches
from ops.calls import name_of, parse
from tests import test_offline_compilation
from tests.compilation import META, more_spills, norm_configs
from tests.ops.test_own_chain import check, in_float64, results
from tests.triton_kernels.test_pointwise import SPECIAL, ours, theirs
from triton_kernels import activations as a
from triton_kernels import group_norm
from triton_kernels.arithmetic import ADD_NUMBER, ARITHMETIC, DIV
from triton_kernels.built_in import NUMBERS
from triton_kernels.chain import Chain
from triton_kernels.pointwise import ADD, Pointwise
from triton_kernels.versions import VERSION

#: Each activation with numbers to call it with, PyTorch's function of them, and the largest relative errors over
#: ``everywhere``: of the value and of its gradient.
ACTIVATIONS = {
    "relu": (a.RELU, None, F.relu, 0, 0),
    "relu6": (a.RELU6, None, F.relu6, 0, 0),
    "leaky_relu": (a.LEAKY_RELU, (0.01,), lambda z: F.leaky_relu(z, 0.01), 1e-7, 1e-7),
    "leaky_relu below": (a.LEAKY_RELU, (-1.5,), lambda z: F.leaky_relu(z, -1.5), 1e-7, 1e-7),
    "elu": (a.ELU, (1.0,), F.elu, 2e-7, 3e-7),
    "elu 1.7": (a.ELU, (1.7,), lambda z: F.elu(z, 1.7), 3e-7, 3e-7),
    "silu": (a.SILU, None, F.silu, 4e-7, 6e-7),
    "tanh": (a.TANH, None, torch.tanh, 3e-7, 5e-7),
    "sigmoid": (a.SIGMOID, None, torch.sigmoid, 4e-7, 4e-7),
    "hardsigmoid": (a.HARDSIGMOID, None, F.hardsigmoid, 2e-7, 1e-7),
    "hardswish": (a.HARDSWISH, None, F.hardswish, 3e-7, 2e-7),
    "softplus": (a.SOFTPLUS, (1.0, 20.0), F.softplus, 4e-7, 4e-7),
    "softplus 2, 3": (a.SOFTPLUS, (2.0, 3.0), lambda z: F.softplus(z, 2.0, 3.0), 4e-7, 4e-7),
    "clamp": (a.CLAMP, (-1.0, 2.0), lambda z: torch.clamp(z, -1.0, 2.0), 0, 0),
    "clamp from": (a.CLAMP, (-1.0, math.inf), lambda z: torch.clamp(z, min=-1.0), 0, 0),
    "clamp to": (a.CLAMP, (-math.inf, 2.0), lambda z: torch.clamp(z, max=2.0), 0, 0),
    "clamp crossed": (a.CLAMP, (2.0, -1.0), lambda z: torch.clamp(z, 2.0, -1.0), 0, 0),
}
PLAIN_ARITHMETIC = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}
by_activation = pytest.mark.parametrize("name", ACTIVATIONS)
#: Those that every chain is made of.
EACH = [each for each, *_ in ACTIVATIONS.values() if ACTIVATIONS[each.name][0] is each]
EACH = [*dict.fromkeys(EACH), *ARITHMETIC]
TINY = torch.finfo(torch.float32).tiny


def numbers_of(step):
    """What a chain's test calls a step with."""
    return ACTIVATIONS[step.name][1] if step.name in ACTIVATIONS else (1.75,) if step.operand == "numbers" else None


def everywhere():
    """Both signs of numbers from the smallest to the largest, densely where the functions bend and in their tails."""
    positive = [torch.linspace(1e-4, 1.0, 4000), torch.linspace(1.0, 10.0, 4000), torch.linspace(10.0, 87.0, 4000)]
    positive = torch.cat([*positive, torch.logspace(-37.9, 38.4, 2000)])
    return torch.cat([-positive, positive])


def exactly(name, value):
    """The value and the derivative in float64. PyTorch's derivative of these two cancels, in float64 too."""
    _, _, function, _, _ = ACTIVATIONS[name]
    result, derivative = theirs(lambda z, _: function(z), value.double(), torch.ones_like(value).double())
    if name == "tanh":
        derivative = torch.cosh(value.double().clamp(-700, 700)) ** -2
    elif name == "sigmoid":
        derivative = torch.sigmoid(value.double()) * torch.sigmoid(-value.double())
    if name in ("tanh", "sigmoid"):
        derivative = torch.where(value.isnan(), derivative + value, derivative)
    return result, derivative


def with_neighbours(values):
    """The numbers, and float32's next ones on both sides."""
    finite = torch.tensor([each for each in values if math.isfinite(each)])
    return torch.cat([finite, *(torch.nextafter(finite, torch.tensor(end)) for end in (math.inf, -math.inf))])


def special_values(name):
    """NaN, infinities, zeros, the smallest and the largest numbers, and both sides of each jump."""
    pointwise, numbers, *_ = ACTIVATIONS[name]
    return torch.cat([torch.tensor([*SPECIAL, 3e38, -3e38]), with_neighbours(pointwise.jumps(numbers))])


def check_special_values(name, found):
    """``found`` are the values, and their gradients for one of 3."""
    function, value = ACTIVATIONS[name][2], special_values(name)
    for place in range(value.numel()):  # one by one, as in test_pointwise.py: vectorised, PyTorch's NaN go elsewhere
        one = slice(place, place + 1)
        exact, derivative = exactly(name, value[one])
        plain = theirs(lambda z, _: function(z), value[one], torch.full((1,), 3.0))
        for result, truth, expected in zip(found, (exact, 3.0 * derivative), plain, strict=True):
            message = f"{name} of {value[place]}"
            torch.testing.assert_close(result[one], truth.float(), rtol=1e-6, atol=1e-37, equal_nan=True, msg=message)
            if name != "hardswish" or value[place] < 1e38:  # where PyTorch's float32 overflows, unlike its float64
                torch.testing.assert_close(result[one], expected, rtol=1e-6, atol=1e-6, equal_nan=True, msg=message)


def check_digits(name, found, more=0.0, times=1):
    """The relative error of values and gradients is a few of float32's last digits, wherever these are normal."""
    value, allowed = everywhere(), ACTIVATIONS[name][3:]
    for result, exact, most in zip(found, exactly(name, value), allowed, strict=True):
        assert not result.isnan().any()
        normal = (exact.abs() >= TINY) & (exact.abs() <= torch.finfo(torch.float32).max)
        size = exact.abs().clamp(min=TINY)
        if name == "silu" and result is found[1]:  # its terms, of about 0.2, cancel at -1.28
            size = size.clamp(min=0.2).where((value < -0.5) & (value > -3.0), size)
        error = ((result - exact).abs() / size).where(normal, 0.0)
        assert error.max() <= times * most + more, (error.max(), value[error.argmax()])
        assert (result[exact.abs() < TINY].abs() <= 1.0001 * TINY).all()


@by_activation
def test_special_values(name):
    pointwise, numbers, *_ = ACTIVATIONS[name]
    value = special_values(name)
    check_special_values(name, ours(pointwise, value, torch.full_like(value, 3.0), numbers))


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name.split()[0] not in ("elu", "relu", "relu6")])
def test_signs_of_zeros(name):
    """But elu's, and relu's, which PyTorch has on the CPU alone."""
    pointwise, numbers, function, *_ = ACTIVATIONS[name]
    value = torch.tensor([0.0, -0.0])
    found, _ = ours(pointwise, value, torch.ones_like(value), numbers)
    assert torch.equal(found.signbit(), function(value).signbit())


@by_activation
def test_as_many_digits_everywhere(name):
    pointwise, numbers, *_ = ACTIVATIONS[name]
    value = everywhere()
    check_digits(name, ours(pointwise, value, torch.ones_like(value), numbers))


@by_activation
@pytest.mark.parametrize("low, high", [(-1, 1), (-4, 4), (-30, 30)])
def test_as_accurate_as_pytorch(name, low, high):
    """The rule of ``tests.accuracy`` over 10000 numbers with half of its floor: no sum hides an error here."""
    pointwise, numbers, function, *_ = ACTIVATIONS[name]
    value = torch.linspace(low, high, 10001)
    gradient = torch.ones_like(value)
    found, expected = ours(pointwise, value, gradient, numbers), theirs(lambda z, _: function(z), value, gradient)
    for result, plain, exact in zip(found, expected, exactly(name, value), strict=True):
        floor = torch.finfo(torch.float32).eps / 2 * exact.norm()
        assert (result - exact).norm() <= 1.1 * (plain - exact).norm() + floor


def test_subnormal_tails():
    """Of values and gradients, where PyTorch's float32 has them."""
    value = torch.linspace(-102.0, -87.5, 500)
    for name in ("elu", "silu", "sigmoid", "softplus"):
        pointwise, numbers, *_ = ACTIVATIONS[name]
        found = ours(pointwise, value, torch.ones_like(value), numbers)
        for result, exact in zip(found, exactly(name, value), strict=True):
            assert ((result - exact).abs() <= 4e-43 + 1e-5 * exact.abs() * (exact.abs() > TINY)).all(), name


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "name, cut",
    [
        ("relu", [0.0, -0.0, -1.0, -math.inf]),
        ("relu6", [0.0, -1.0, 6.0, 7.0, math.inf]),
        ("hardsigmoid", [-3.0, 3.0, -4.0, 4.0, math.inf, -math.inf, math.nan]),
        ("hardswish", [-3.0, -4.0, -math.inf]),
        ("clamp", [-1.5, 2.5, math.inf, -math.inf, math.nan]),
    ],
)
def test_gradients_are_cut_off(name, cut, special):
    """They are 0 there, though the incoming one be infinite or NaN."""
    pointwise, numbers, *_ = ACTIVATIONS[name]
    value = torch.tensor(cut)
    assert ours(pointwise, value, torch.full_like(value, special), numbers)[1].tolist() == [0.0] * len(cut)


def test_bounds():
    """The gradient of clamp passes at its bounds, unlike hardtanh's. A bound that is NaN makes all NaN."""
    value = torch.tensor([-1.0, 2.0, 0.5])
    assert ours(a.CLAMP, value, torch.ones(3), (-1.0, 2.0))[1].tolist() == [1.0] * 3
    for bounds in ((math.nan, 2.0), (-1.0, math.nan)):
        result, gradient = ours(a.CLAMP, value, torch.ones(3), bounds)
        assert result.isnan().all() and a.CLAMP.plain(value, bounds).isnan().all() and not gradient.any()
    half = torch.tensor([-math.inf, -6e4, 0.5, math.inf], dtype=torch.float16)
    assert torch.equal(a.CLAMP.plain(half, (-1e30, 1.0)), torch.tensor([-math.inf, -6e4, 0.5, 1.0]).half())


@pytest.mark.parametrize("threshold", [20.0, -1.0])
def test_softplus_of_beta_0(threshold):
    """Infinite, but for the values themselves where 0 is above the threshold."""
    value = torch.tensor([-1.0, 0.5])
    plain = theirs(lambda z, _: F.softplus(z, 0.0, threshold), value, torch.ones(2))
    for result, expected in zip(ours(a.SOFTPLUS, value, torch.ones(2), (0.0, threshold)), plain, strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("step", ARITHMETIC, ids=name_of)
def test_arithmetic(step):
    """PyTorch's bits, but for the rounding of a gradient of a divisor."""
    value, operand, gradient = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 3e38, 1e-40])
    value[:36], operand[:36] = special.repeat(6), special.repeat_interleave(6)
    function = PLAIN_ARITHMETIC[step.name]
    if step.operand == "numbers":
        for number in (1.75, -3.0, 1e30, 0.0, math.inf, math.nan):
            results_of_one = ours(step, value, gradient, (number,))
            for result, expected in zip(
                results_of_one, theirs(lambda z, x: function(z, x), value, gradient, number), strict=True
            ):
                torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(step.plain(value, (number,)).nan_to_num(7.0), function(value, number).nan_to_num(7.0))
        return
    expected = theirs(function, value, gradient, operand)
    for place, (result, plain) in enumerate(zip(ours(step, value, gradient, operand), expected, strict=True)):
        tolerance = 5e-7 if step.name == "div" and place == 2 else 0
        torch.testing.assert_close(result, plain, rtol=tolerance, atol=0, equal_nan=True)
    torch.testing.assert_close(step.plain(value, operand), expected[0], rtol=0, atol=0, equal_nan=True)


@by_activation
def test_what_each_stands_for(name):
    pointwise, numbers, function, *_ = ACTIVATIONS[name]
    assert pointwise.name == name.split()[0] and name_of(pointwise) == pointwise.name
    assert (pointwise.operand == "numbers") == (numbers is not None)
    value = torch.tensor([*SPECIAL, 0.5, -0.5, 2.5]).double()
    torch.testing.assert_close(pointwise.plain(value, numbers), function(value), rtol=0, atol=0, equal_nan=True)


def test_numbers_and_defaults():
    """They are PyTorch's, in order."""
    modules = {"leaky_relu": torch.nn.LeakyReLU, "elu": torch.nn.ELU, "softplus": torch.nn.Softplus}
    for name, module in modules.items():
        parameters = inspect.signature(module).parameters
        given = {each: parameters[each].default for each in parameters if each != "inplace"}
        assert NUMBERS[name] == given
    value = torch.randn(9)
    assert torch.equal(torch.clamp(value, **NUMBERS["clamp"]), value)
    taking = {each.name for each in (*a.ACTIVATIONS, *ARITHMETIC) if each.operand == "numbers"}
    assert taking == set(NUMBERS)


def test_names():
    """Texts and tables tell each function from all others."""
    built_in = (*a.ACTIVATIONS, *ARITHMETIC)
    for names in (map(name_of, built_in), [Chain(before=(each,)).kernel for each in built_in if not each.adds_vector]):
        assert max(Counter(names).values()) == 1
    for each in built_in:
        numbers = numbers_of(each)
        text = f"linear -> add -> group_norm(4, 1e-05) -> mul -> add -> {name_of(each)}{numbers or ''}".replace(
            ",)", ")"
        )
        assert parse(text).text == text and parse(text).chain.after == (each,) and parse(text).numbers[-1] == numbers


@pytest.mark.parametrize(
    "step, message",
    [
        (a.SOFTPLUS, r"softplus must be 2 numbers \(beta, threshold\), got \(1.0, 2.0, 3.0\)"),
        (a.ELU, r"elu must be one number \(alpha\), got"),
        (ADD_NUMBER, r"add must be one number \(other\), got"),
    ],
)
def test_numbers_are_counted(step, message):
    with pytest.raises(ValueError, match=message):
        ops.Chain(after=(step,))(torch.ones(2, 8), None, None, (1.0, 2.0, 3.0), num_groups=2)


def shape_of(step, values):
    """That of a step's operand, for values of a shape."""
    return {"scalar": (), "vector": values[1:2], "sample": values[:2], "tensor": values}[step.operand]


#: Without what cannot be. The error of one number's gradient is chance: compositions (tests/ops) allow for it.
IN_CHAINS = [
    (step, contraction, is_before)
    for step, contraction, is_before in itertools.product(EACH, ("linear", ""), (True, False))
    if not (step.operand == "sample" and contraction) and step.operand != "scalar"
]


def tensors_of(contraction, step, is_before, channels):
    """Those of a chain, and the place of the step's operand among them."""
    generator = torch.Generator().manual_seed(5)
    shape = (6, channels) if contraction else (2, channels, 3, 5)
    shapes = [(6, 16), (channels, 16), *[(channels,)] * 3] if contraction else [shape, *[(channels,)] * 2]
    tensors = [
        3.0 * torch.randn(each, generator=generator) if each == shape else torch.randn(each, generator=generator)
        for each in shapes
    ]
    place = len(tensors) - 2 if is_before else len(tensors)
    if step.has_tensor:
        operand = torch.rand(shape_of(step, shape), generator=generator) + 0.5
        tensors.insert(place, operand)
    return tensors, place


@pytest.mark.parametrize("channels, dtype", [(32, torch.float32), (20, torch.float32), (32, torch.bfloat16)])
@pytest.mark.parametrize(
    "step, contraction, is_before", IN_CHAINS, ids=lambda each: name_of(each) if isinstance(each, Pointwise) else each
)
def test_in_a_chain(step, contraction, is_before, channels, dtype):
    """Values and all gradients, around the norm of a linear layer and of images. Groups of five are padded."""
    chain = ops.Chain(contraction, **{"before" if is_before else "after": (step,)})
    tensors, place = tensors_of(contraction, step, is_before, channels)
    tensors = [each.to(dtype).requires_grad_() for each in tensors]
    numbers = numbers_of(step)

    def own(*tensors):
        given = list(tensors)
        given[place:place] = [numbers] if numbers else []
        return chain(*given, num_groups=4)

    def plain(*tensors):
        given = list(tensors)
        operand = given.pop(place) if step.has_tensor else numbers
        z = F.linear(*given[:3]) if contraction else given[0]
        if step.operand in ("vector", "sample"):
            operand = operand.view(*operand.shape, *[1] * (z.ndim - 2))
        z = step.plain(z, operand) if is_before else z
        z = F.group_norm(z, 4, *given[-2:])
        return z if is_before else step.plain(z, operand)

    floor = 2e-7 if dtype == torch.float32 else 2**-9
    check(results(own, tensors), in_float64(plain, tensors), results(plain, tensors), floor)


def operands_of(chain, rows, channels, dtype):
    shape = rows, channels
    return tuple(
        torch.empty(shape_of(step, shape), dtype=dtype, device=META) if step.has_tensor else numbers_of(step)
        for step in chain.steps
    )


def passes(chain, dtype):
    """The norm's passes, forward and backward."""
    chain, rows, channels, group_size = chain.of_rows, 1024, 8192, 32
    matrix = torch.empty(rows, channels, dtype=dtype, device=META)
    operands = operands_of(chain, rows, channels, dtype)
    forward, backward = norm_configs(dtype, rows, channels, group_size)
    arguments = matrix, channels // group_size, chain, operands, 1e-5
    gradients = test_offline_compilation.gradients_of(operands)
    group_norm.group_norm(*arguments, forward, output=matrix)
    group_norm.group_norm_backward(matrix, *arguments, backward, input_gradient=matrix, gradients=gradients)


@pytest.mark.offline
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("step", EACH, ids=name_of)
def test_compiled_offline(step, arch):
    """In a norm's passes no function spills registers, and none drops a NaN, as the plain minimum and maximum do."""
    chain = Chain(before=(step,), after=(step,))
    compiled = compile_launches(lambda: passes(chain, torch.bfloat16), arch)
    assert {"group_norm_kernel", "group_norm_backward_kernel"} <= {each.name for each in compiled}
    for each in compiled:
        assert each.fits and each.spilled_bytes <= more_spills(arch), each.name
        assert not re.search(r"\b(min|max)(\.ftz)?\.f32", each.ptx), each.name
        if each.name == "group_norm_kernel" and step not in (a.TANH, a.ELU):  # from these exponentials 1 is subtracted
            assert "ex2.approx.ftz" not in each.ptx, "what is subnormal would be 0"


@pytest.mark.offline
@pytest.mark.parametrize("step", [each for each in EACH if each.name == "mul" and each.has_tensor], ids=name_of)
def test_products_before_a_norm(step):
    """The last one is rounded, and not fused with the subtraction of the mean. Where it is not the last, it may be."""
    for steps, is_rounded in (((step,), True), ((step, ADD), True), ((step, ADD_NUMBER), False)):
        chain = Chain(before=steps)
        forward, *_ = compile_launches(lambda chain=chain: passes(chain, torch.float32), 90)
        assert ("mul.rn.f32" in forward.ptx) == is_rounded


@pytest.mark.offline
@pytest.mark.parametrize("step", [a.ELU, a.SILU, a.TANH, a.HARDSWISH, a.SOFTPLUS, DIV], ids=name_of)
def test_compiled_in_a_product(step, monkeypatch):
    """Nor do those with the most instructions in the widest tiles, whose sums take half of the registers."""
    monkeypatch.setattr(test_offline_compilation, "operands_of", operands_of)
    for chain in (Chain("linear", before=(step,)), Chain("linear", after=(step,))):
        gemm = test_offline_compilation.Gemm(chain, torch.bfloat16, 1024, 8192, 8192, 32, saved=True)
        (compiled,) = compile_launches(gemm.launch, 90)
        # Once a tile, outside the loop over K. From Triton 3.7 on tanh alone spills.
        allowed = 80 if step is a.TANH else 112 if VERSION < (3, 7) else 0
        assert compiled.fits and compiled.spilled_bytes <= allowed + more_spills(90)


@pytest.mark.gpu
@by_activation
def test_on_a_gpu(name):
    """There exponentials and reciprocals are approximate, with up to twice the error."""
    pointwise, numbers, *_ = ACTIVATIONS[name]
    for value, gradient, check_them in (
        (special_values(name), 3.0, check_special_values),
        (everywhere(), 1.0, lambda name, found: check_digits(name, found, 1e-7, times=2)),
    ):
        found = ours(pointwise, value.cuda(), torch.full_like(value, gradient).cuda(), numbers)
        check_them(name, [each.cpu() for each in found])


@pytest.mark.gpu
@pytest.mark.parametrize("step", EACH, ids=name_of)
def test_equal_values_leave_nothing(step):
    """A function's rounding error in a group of equal values would become noise, if it were fused into the norm."""
    chain = ops.Chain("", before=(step,))
    value = torch.linspace(-4.0, 4.0, 999, device="cuda")[:, None].expand(999, 256).contiguous()
    operand = numbers_of(step)
    if step.has_tensor:
        operand = torch.full(shape_of(step, value.shape), 1.7, device="cuda")
    result = chain(value, *([operand] if step.operand else []), None, None, num_groups=8)
    assert not result.any()
