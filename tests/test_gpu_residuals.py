"""Promise: on a GPU, statistics of sums of images are exact, and models with them as near to float32 as Inductor's."""

import itertools

import pytest
import torch

from ops import backend
from ops.calls import parse
from tests import gpu
from tests.gpu import DEVICE, FORMATS, by_format
from tests.ops.test_residuals import Residuals

pytestmark = [*gpu.MARKS, pytest.mark.usefixtures("poisoned_memory", "fresh_compiler")]

#: Of whole tiles, of parts of them, and of rows that no vector takes.
SHAPES = [(2, 64, 32, 32), (1, 32, 129, 65), (3, 24, 7, 7), (64, 256, 8, 8)]


@pytest.mark.parametrize("are_apart", [False, True])
@pytest.mark.parametrize("formats", list(itertools.product(FORMATS, repeat=2)), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics(shape, dtype, formats, are_apart):
    torch.manual_seed(0)
    samples, channels = shape[:2]
    first, second = (torch.randn(shape, device=DEVICE).to(dtype).contiguous(memory_format=each) for each in formats)
    third, vector = torch.randn_like(second), torch.randn(channels, 1, 1, device=DEVICE).to(dtype)
    text = parse("add tensor -> add tensor -> add -> group_norm(8, 1e-05) -> no mul -> no add").text_in_graph
    found = torch.ops.normfuse.statistics(text, [first, second, third, vector], are_apart)
    values = sum(each.double() for each in (first, second, third, vector)).reshape(samples, 8, -1)
    means, rstds = values.mean(2), (values.var(2, correction=0) + 1e-5).rsqrt()
    result = found[: 16 * samples].view(2, samples, 8).double()
    torch.testing.assert_close(result, torch.stack([means, rstds]), rtol=2e-6, atol=2e-6)
    centre, scale = (each.repeat_interleave(channels // 8, 1) for each in (means, rstds))
    expected = torch.stack([centre - vector.double().view(-1) if are_apart else centre, scale])
    of_channels = found[16 * samples :].view(2, samples, channels).double()
    torch.testing.assert_close(of_channels, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@by_format
def test_models(format, mode):
    """Convolutions have biases, which Inductor adds behind them."""
    torch.manual_seed(0)
    model = Residuals(8, 64).to(DEVICE).bfloat16().to(memory_format=format)
    images = torch.randn(3, 4, 3, 32, 32, device=DEVICE).bfloat16()
    errors = {}
    with torch.no_grad():
        expected = [model.float()(image.float()).double() for image in images]
        model.bfloat16()
        for name, compiler in (("inductor", "inductor"), ("normfuse", backend.normfuse)):
            torch._dynamo.reset()
            compiled = torch.compile(model, backend=compiler, mode=mode)
            found = [compiled(image.contiguous(memory_format=format)).double() for image in images]
            errors[name] = sum((one - other).norm() / other.norm() for one, other in zip(found, expected, strict=True))
    assert errors["normfuse"] <= 1.05 * errors["inductor"], errors
