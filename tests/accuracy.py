"""The rule of accuracy: no further from float64 than PyTorch's own chain at the same dtype and setting.

    ||ours - exact|| <= 1.1 ||torch - exact|| + floor

``exact`` is the plain chain in float64 on the same, already rounded, arguments. The floor has two parts:

- one float32 epsilon of ||exact||: results are float32 sums at best, and PyTorch's may happen to be exact;
- on small problems, chance. Errors are random, and statistics and minima make a sample's errors one, so over s samples
  their norms scatter by about 1/sqrt(s) of themselves. What PyTorch's error is but for chance is seen from arguments a
  rounding away: the largest of its errors there, twice, over sqrt(s), is allowed on top. At 1000 samples that is 6%.
  Samples of few features are alike, so no more than the square of the features count; repeated ones count as one.
"""

import math

import torch

from tests.chains import BIAS_HARDTANH_MISH, L75, Chain, doubled, tensors_of

FACTOR = 1.1
_NEIGHBOURS = 3
_MANY_SAMPLES = 512


def run(function, arguments: dict, grad_output: torch.Tensor) -> dict[str, torch.Tensor]:
    """``function``'s result, under "output", and the gradient of each tensor argument, under its name."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors_of(arguments).items()}
    output = function(**{**arguments, **leaves})
    gradients = torch.autograd.grad(output, list(leaves.values()), grad_output)
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}


def unsafe_samples(chain: Chain, arguments: dict) -> torch.Tensor:
    """Which samples [samples] hold an element so near a jump that rounding decides on which side it falls.

    Near is twice the sample's largest deviation of PyTorch's value from the exact one. The jumps are hardtanh's bounds
    and, for the minimum, the next smallest element.
    """
    with torch.no_grad():
        exact = chain.before_jump(doubled(arguments))
        rounded = chain.before_jump(arguments)
    epsilon = torch.finfo(rounded.dtype).eps
    samples = exact.shape[0] if chain is not BIAS_HARDTANH_MISH else exact.numel()
    exact, rounded = exact.reshape(samples, -1), rounded.double().reshape(samples, -1)
    if exact.numel() == 0:
        return torch.zeros(samples, dtype=torch.bool, device=exact.device)
    noise = 2 * (rounded - exact).abs().amax(1, keepdim=True)
    if chain is L75:
        if exact.shape[1] == 1:
            return torch.zeros(samples, dtype=torch.bool, device=exact.device)
        least = exact.topk(2, dim=1, largest=False)[0]
        return least[:, 1] - least[:, 0] <= noise[:, 0] + epsilon * least.abs().amax(1)
    near = torch.zeros_like(exact, dtype=torch.bool)
    for bound in (arguments["min_val"], arguments["max_val"]):
        near |= (exact - bound).abs() <= noise + epsilon * abs(bound)
    return near.any(1)


def _over_output(chain: Chain, samples: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """``samples`` in a shape that broadcasts over the chain's output."""
    if chain is BIAS_HARDTANH_MISH:
        return samples.view(output.shape)
    if chain.has_images:
        return samples.view(-1, *[1] * (output.ndim - 1))
    if chain is L75:
        return samples.view(1, 1, -1, 1) if output.ndim == 4 else samples.view(-1, 1)
    return samples.view(*output.shape[:-1], 1)


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
    if chain.before_jump is not None and unsafe != "keep":
        samples = unsafe_samples(chain, arguments)
        assert unsafe == "leave out" or not samples.any(), "this problem was meant to have no element near a jump"
        # A norm spreads a gradient over its sample alone, so a sample without any touches no other.
        grad_output.masked_fill_(_over_output(chain, samples, output), 0.0)
    return grad_output.to(output.dtype)


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


def check(chain: Chain, arguments: dict, grad_output: torch.Tensor | None = None) -> None:
    """Assert the rule for the chain's result and every gradient."""
    if grad_output is None:
        grad_output = draw_grad_output(chain, arguments)
    ours = run(chain.function, arguments, grad_output)
    theirs, exact = _plain_results(chain, arguments, grad_output)
    samples = _independent_samples(chain, arguments["input"])
    seeds = range(_NEIGHBOURS if samples < _MANY_SAMPLES else 1)
    neighbours = [_plain_results(chain, neighbour(arguments, seed), grad_output) for seed in seeds]
    failures = []
    for name in exact:
        assert ours[name].dtype == theirs[name].dtype, f"{name} is {ours[name].dtype}, PyTorch's {theirs[name].dtype}"
        assert ours[name].shape == theirs[name].shape, f"{name} has shape {tuple(ours[name].shape)}"
        finite = torch.isfinite(theirs[name])  # PyTorch may have left the dtype's range; ours need not
        size = exact[name][finite].norm()
        our_error, their_error = (_error(result[name], exact[name], finite) for result in (ours, theirs))
        their_usual_error = max(_error(near[name], truth[name], finite) for near, truth in neighbours)
        chance = 2 * their_usual_error / math.sqrt(samples)
        allowed = FACTOR * their_error + torch.finfo(torch.float32).eps * size + chance
        if not our_error <= allowed:
            failures.append(
                f"{name}: error {our_error:.3e}, PyTorch's {their_error:.3e}, allowed {allowed:.3e}, size {size:.3e}"
            )
    assert not failures, "\n".join(failures)


def check_inference(chain: Chain, arguments: dict) -> None:
    """Assert the rule, but for chance, for the result without gradients: other kernels run, which save nothing."""
    with torch.no_grad():
        ours, theirs = chain.function(**arguments).double(), chain.plain(**arguments).double()
        exact = chain.plain(**doubled(arguments))
    our_error, their_error = (ours - exact).norm(), (theirs - exact).norm()
    assert our_error <= FACTOR * their_error + torch.finfo(torch.float32).eps * exact.norm()


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
    """Frobenius norm of the difference; NaN if the result is not finite."""
    return (result.double() - exact)[where].norm()
