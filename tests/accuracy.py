"""The rule of accuracy: no further from float64 than PyTorch's own chain at the same dtype and setting.

    ||ours - exact|| <= 1.1 ||torch - exact|| + floor

``exact`` is the plain chain in float64 on the same, already rounded, arguments. The rule is held in three ways:

- **One case, as a whole** (``check``): the norms of the result and of each gradient. The floor is one float32 epsilon
  of ||exact||: results are float32 sums at best, and PyTorch's may happen to be exact. On top comes chance. Errors are
  random, and statistics and minima make a sample's errors one, so over s samples their norms scatter by about 1/sqrt(s)
  of themselves. What PyTorch's error is but for chance is seen from arguments a rounding away: the largest of its
  errors there, twice, over sqrt(s), is allowed. At 1000 samples that is 6%, at 13 it is 55%. Samples of few features
  are alike, so no more than the square of the features count; repeated ones count as one. Nothing evens out in the
  gradient of one number, whatever the samples.
- **One case, element by element** (``check`` too), and row by row and column by column, as a norm hides one among many.
- **Many cases together** (``Together``), as chance evens out over them: none is allowed for.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.checking import ALLOWANCE, FLOOR, allowed
from tests.chains import BIAS_HARDTANH_MISH, L75, Chain, doubled, tensors_of

_NEIGHBOURS = 3
_MANY_SAMPLES = 512
#: An element, and a line, may be so many times as wrong as PyTorch's worst beside it. Of a hundred normal errors the
#: largest is about three standard deviations; those of lines are nearly alike, so that a few tell the worst.
_ELEMENT_FACTOR, _LINE_FACTOR = 3.0, 1.5
_FEWEST_LINES = 16
#: Where all of a line is 0, errors are absolute.
_TINY = 1e-100


def run(function, arguments: dict, grad_output: torch.Tensor) -> dict[str, torch.Tensor]:
    """``function``'s result, under "output", and the gradient of each tensor argument, under its name."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors_of(arguments).items()}
    output = function(**{**arguments, **leaves})
    gradients = torch.autograd.grad(output, list(leaves.values()), grad_output)
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}


def _by_sample(chain: Chain, values: torch.Tensor) -> torch.Tensor:
    """[samples, ...]"""
    if chain.name == BIAS_HARDTANH_MISH.name:
        return values.reshape(values.numel(), 1)
    samples = values.shape[0] if chain.has_images else math.prod(values.shape[:-1])
    return values.reshape(samples, values.numel() // max(1, samples))


def _unsafe_samples(exact: torch.Tensor, rounded: torch.Tensor, jumps: tuple[float, ...] | None) -> torch.Tensor:
    """Which samples [samples] hold an element so near a jump that rounding decides on which side it falls.

    Near is twice the sample's largest deviation of PyTorch's value, ``rounded``, from the exact one. What is the same
    in both does not deviate, a NaN neither; where it is the jump itself, as behind a ReLU, it stays there.
    The minimum's jump is at the next smallest element.
    """
    epsilon = torch.finfo(rounded.dtype).eps
    if exact.numel() == 0:
        return exact.new_zeros(len(exact), dtype=torch.bool)
    same = (rounded == exact) | (rounded.isnan() & exact.isnan())
    noise = 2 * (rounded.double() - exact).abs().nan_to_num(nan=math.inf).masked_fill(same, 0.0).amax(1, keepdim=True)
    still = same & (jumps is not None)  # equal smallest elements are a jump
    places = [exact.new_tensor(place) for place in filter(math.isfinite, jumps or ())]
    if jumps is None:
        exact, *places = exact.topk(min(2, exact.shape[1]), dim=1, largest=False)[0].split(1, dim=1)
    near = ~noise.isfinite()
    for place in places:
        near = near | (((exact - place).abs() <= noise + epsilon * place.abs()) & ~(still & (exact == place)))
    return near.any(1)


def _over_output(chain: Chain, samples: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """``samples`` in a shape that broadcasts over the chain's output."""
    if chain.name == BIAS_HARDTANH_MISH.name:
        return samples.view(output.shape)
    if chain.has_images:
        return samples.view(-1, *[1] * (output.ndim - 1))
    if chain.name == L75.name:
        return samples.view(1, 1, -1, 1) if output.ndim == 4 else samples.view(-1, 1)
    return samples.view(*output.shape[:-1], 1)


def away_from_jumps(chain: Chain, arguments: dict, grad_output: torch.Tensor) -> torch.Tensor:
    """``grad_output`` with 0 for samples with an element near a jump of any of the chain's steps.

    A norm spreads a gradient over its sample alone, so a sample without any touches no other.
    """
    rounded = chain.before_jumps(arguments)
    exact = chain.before_jumps(doubled(arguments)) if rounded else []
    for (theirs, jumps), (values, _) in zip(rounded, exact, strict=True):
        unsafe = _unsafe_samples(_by_sample(chain, values), _by_sample(chain, theirs), jumps)
        grad_output = grad_output.masked_fill(_over_output(chain, unsafe, grad_output), 0.0)
    return grad_output


def draw_grad_output(
    chain: Chain, arguments: dict, seed: int = 1, *, unsafe: str = "leave out", kind: str = "normal"
) -> torch.Tensor:
    """A random gradient for the output that is 0 for unsafe samples, so that no jump is compared.

    ``unsafe`` says otherwise: "keep" compares the jumps too, for problems with so many that their number evens out;
    "refuse" fails if there are any.
    """
    with torch.no_grad():
        output = chain.plain(**arguments)
    generator = torch.Generator(output.device).manual_seed(seed)
    grad_output = torch.randn(output.shape, generator=generator, device=output.device)
    if kind == "wide":
        grad_output *= torch.exp2(torch.rand(output.shape, generator=generator, device=output.device) * 16 - 8)
    if unsafe == "keep":
        return grad_output.to(output.dtype)
    safe = away_from_jumps(chain, arguments, grad_output)
    assert unsafe == "leave out" or torch.equal(safe, grad_output), (
        "this problem was meant to have no element near a jump"
    )
    return safe.to(output.dtype)


def neighbour(arguments: dict, seed: int) -> dict:
    """The arguments with each number at, above or below its place by one step of its dtype."""
    result = dict(arguments)
    for name, tensor in tensors_of(arguments).items():
        generator = torch.Generator(tensor.device).manual_seed(seed)
        # What is repeated at stride 0 stays so.
        shape = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        steps = torch.randint(-1, 2, shape, generator=generator, device=tensor.device)
        result[name] = (tensor.double() * (1 + torch.finfo(tensor.dtype).eps * steps)).to(tensor.dtype)
    return result


@dataclass(frozen=True)
class Errors:
    """One tensor's errors as a whole: ours, PyTorch's, and the largest of PyTorch's a rounding away; and its size."""

    ours: float
    theirs: float
    their_usual: float
    size: float


def gradient_nearby(chain: Chain, near: dict, grad_output: torch.Tensor) -> torch.Tensor:
    """``grad_output`` for a neighbour's arguments, without the samples that are unsafe there alone.

    A flip in these is no rounding error of PyTorch's. What is left grows in proportion, so that errors keep their size.
    """
    safe = away_from_jumps(chain, near, grad_output)
    lost = int(grad_output.count_nonzero()) / max(1, int(safe.count_nonzero()))
    return safe * math.sqrt(lost) if lost > 1 else safe


def check(chain: Chain, arguments: dict, grad_output: torch.Tensor | None = None, *, by_element: bool = True) -> None:
    """Assert the rule for the chain's result and every gradient, as a whole and, if asked, element by element."""
    compared, wrong_parts = _compare(chain, arguments, grad_output)
    failures = wrong_parts if by_element else []
    samples = _independent_samples(chain, arguments["input"])
    for name, errors in compared.items():
        is_one_number = name != "output" and arguments[name].numel() == 1
        scatter = 2 * errors.their_usual / math.sqrt(1 if is_one_number else samples)
        most = allowed(errors.theirs, errors.size) + scatter
        if not errors.ours <= most:
            failures.append(f"{name}: {errors}, allowed {most:.3e}")
    assert not failures, "\n".join(failures)


def _compare(
    chain: Chain, arguments: dict, grad_output: torch.Tensor | None = None, slack: float = 1.0
) -> tuple[dict[str, Errors], list[str]]:
    """The errors of each tensor as a whole, and what is wrong of its parts, those of a ``slack``-th of their errors.

    Gradients that are compared across jumps (``draw_grad_output(unsafe="keep")``) are so as a whole alone: a flip moves
    single elements by as much as they are.
    """
    if grad_output is None:
        grad_output = draw_grad_output(chain, arguments)
    ours = run(chain.function, arguments, grad_output)
    theirs, exact = _plain_results(chain, arguments, grad_output)
    samples = _independent_samples(chain, arguments["input"])
    across_jumps = not torch.equal(away_from_jumps(chain, arguments, grad_output), grad_output)
    neighbours = []
    for seed in range(_NEIGHBOURS if samples < _MANY_SAMPLES else 1):
        near = neighbour(arguments, seed)
        near_gradient = grad_output if across_jumps else gradient_nearby(chain, near, grad_output)
        neighbours.append(_plain_results(chain, near, near_gradient))
    compared, failures = {}, []
    for name, truth in exact.items():
        assert ours[name].dtype == theirs[name].dtype, f"{name} is {ours[name].dtype}, PyTorch's {theirs[name].dtype}"
        assert ours[name].shape == theirs[name].shape, f"{name} has shape {tuple(ours[name].shape)}"
        finite = torch.isfinite(theirs[name])  # PyTorch may have left the dtype's range; ours need not
        our_error, their_error = (_error(result[name], truth, finite) for result in (ours, theirs))
        near_errors = [_error(near[name], there[name], finite & near[name].isfinite()) for near, there in neighbours]
        their_usual_error = max(float(error.norm()) for error in near_errors)
        compared[name] = Errors(
            float(our_error.norm()), float(their_error.norm()), their_usual_error, float(truth[finite].norm())
        )
        if truth.numel() > 1 and not (across_jumps and name != "output"):  # one number is a whole
            failures += _wrong_parts(name, our_error / slack, truth, [their_error, *near_errors], ours[name].dtype)
    return compared, failures


def _wrong_parts(name, our_error, exact, their_errors, dtype) -> list[str]:
    """What is wrong of a tensor's elements and lines. A line has one index in common: a row, a column."""
    failures = []
    axes = [axis for axis, length in enumerate(exact.shape) if length > 1]
    bound = torch.zeros_like(exact)
    for kept in axes if len(axes) > 1 else [None]:  # a vector is one line
        others = [axis for axis in range(exact.ndim) if axis != kept]
        bound = torch.maximum(bound, _bound(exact, their_errors, dtype, others, _ELEMENT_FACTOR))
        if kept is not None and exact.shape[kept] >= _FEWEST_LINES:
            ours, size, *theirs = (each.square().mean(others).sqrt() for each in (our_error, exact, *their_errors))
            line_bound = _bound(size, theirs, dtype, [0], _LINE_FACTOR)
            failures += [
                f"{name}: line {index} along {kept} is wrong, error {ours[index]:.3e}, allowed {line_bound[index]:.3e}"
                for index in (~(ours <= line_bound)).nonzero().flatten().tolist()[:3]
            ]
    wrong = (~(our_error.abs() <= bound)).nonzero().tolist()
    return failures + [
        f"{name}: element {place} is wrong, one of {len(wrong)}, error {our_error[tuple(place)]:.3e}, "
        f"allowed {bound[tuple(place)]:.3e}, exactly {exact[tuple(place)]:.6g}"
        for place in wrong[:3]
    ]


def _bound(exact, their_errors, dtype, others: list[int], factor: float) -> torch.Tensor:
    """``factor`` times PyTorch's worst error along ``others``, at these arguments and a rounding away.

    It is taken relative to an element's size plus the mean one, as part of the errors grows with the element. On top
    comes the element's own rounding to ``dtype``; PyTorch's error is taken for no less than the rule's floor adds.
    """
    size = exact.abs()
    scale = size + exact.square().mean(others, keepdim=True).sqrt() + _TINY
    worst = torch.stack([(error.abs() / scale).amax(others, keepdim=True) for error in their_errors]).amax(0)
    return factor * (worst + FLOOR) * scale + torch.finfo(dtype).eps / 2 * size


class Together:
    """Many small cases as one: the rule over all of them, with a quarter of its floor and nothing for chance.

    Each case counts by its error in units of PyTorch's usual one, so none outweighs the others.
    """

    def __init__(self):
        self._cases: dict[str, list[Errors]] = defaultdict(list)
        self._numbers: set[str] = set()  # gradients of one number

    def add(self, chain: Chain, arguments: dict, slack: float = 1.0) -> None:
        """One case, of which the elements are checked at once."""
        compared, failures = _compare(chain, arguments, slack=slack)
        assert not failures, "\n".join(failures)
        for name, errors in compared.items():
            if errors.their_usual > 0:  # else PyTorch is exact
                self._cases[name].append(errors)
            if name != "output" and arguments[name].numel() == 1:
                self._numbers.add(name)

    def ratios(self) -> dict[str, tuple[float, float]]:
        """Our error by name and the largest allowed one, over PyTorch's."""
        result = {}
        for name, cases in self._cases.items():
            if name in self._numbers:
                result[name] = _ratio_of_numbers(cases)
                continue
            ours, theirs, floor = (
                math.sqrt(sum((error / each.their_usual) ** 2 for each, error in zip(cases, errors, strict=True)))
                for errors in (
                    [each.ours for each in cases],
                    [each.theirs for each in cases],
                    [FLOOR / 4 * each.size for each in cases],
                )
            )
            result[name] = ours / theirs, (ALLOWANCE * theirs + floor) / theirs
        return result

    def judge(self) -> None:
        failures = [
            f"{name}: {ours:.3f} of PyTorch's error, allowed {most:.3f}"
            for name, (ours, most) in self.ratios().items()
            if not ours <= most
        ]
        assert not failures, "\n".join(failures)


def _ratio_of_numbers(cases: list[Errors]) -> tuple[float, float]:
    """Our error in one number over PyTorch's, by the geometric mean, as either may be tiny by chance, and the largest
    allowed one: the logarithm of the ratio of two normal errors scatters by 1.6."""
    floors = [FLOOR / 4 * each.size + _TINY for each in cases]
    logs = [math.log((each.ours + floor) / (each.theirs + floor)) for each, floor in zip(cases, floors, strict=True)]
    return math.exp(sum(logs) / len(logs)), ALLOWANCE * math.exp(1.6 / math.sqrt(len(logs)))


def check_draws(chain: Chain, draw: Callable[[int], dict], draws: int = 60) -> None:
    """Assert the rule for ``draw(0)``; where that is red, for so many draws as one, it among them.

    Of thousands of cases chance makes some red: of vectors of few elements, or where one sample outweighs the others,
    PyTorch's error may be a third of its usual one. An error of five times the usual one is no chance and stays red,
    and so does an element or a line of twice what is allowed.
    """
    try:
        return check(chain, draw(0))
    except AssertionError as error:
        red = error
    together = Together()
    try:
        for seed in range(draws):
            together.add(chain, draw(seed), slack=2.0)
        together.judge()
    except AssertionError as confirmed:
        raise AssertionError(f"{red}\nand of {draws} draws\n{confirmed}") from None


def check_inference(chain: Chain, arguments: dict) -> None:
    """Assert the rule, but for chance, for the result without gradients: other kernels run, which save nothing."""
    with torch.no_grad():
        ours, theirs = chain.function(**arguments), chain.plain(**arguments)
        exact = chain.plain(**doubled(arguments))
    our_error, their_error = ours.double() - exact, theirs.double() - exact
    assert our_error.norm() <= allowed(their_error.norm(), exact.norm())
    failures = _wrong_parts("output", our_error, exact, [their_error], ours.dtype)
    assert not failures, "\n".join(failures)


def check_not_finite(chain: Chain, arguments: dict, grad_output: torch.Tensor, value: float) -> None:
    """Assert that ``value`` in an image, and in its gradient, leaves as much of each result finite as of PyTorch's."""
    for name in ("input", "grad_output"):
        changed, incoming = {**arguments, "input": arguments["input"].clone()}, grad_output.clone()
        (changed["input"] if name == "input" else incoming)[1, 2, 3, 4] = value
        ours, theirs = (run(function, changed, incoming) for function in (chain.function, chain.plain))
        for each in theirs:
            assert torch.equal(ours[each].isfinite(), theirs[each].isfinite()), f"{each} for {value} in {name}"


def _independent_samples(chain: Chain, input: torch.Tensor) -> int:
    if 0 in input.stride()[:-1]:
        return 1
    if chain.has_images:
        return max(1, input.shape[0])
    rows = max(1, math.prod(input.shape[:-1]))
    return min(rows, input.shape[-1] ** 2) if chain.is_linear else rows


def _plain_results(chain, arguments, grad_output):
    return run(chain.plain, arguments, grad_output), run(chain.plain, doubled(arguments), grad_output.double())


def _error(result: torch.Tensor, exact: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The difference, and 0 elsewhere."""
    return torch.where(where, result.double() - exact, 0.0)
