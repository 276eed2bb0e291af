"""Promise: a plan does what the code that it was made by does, and launches on a GPU with addresses."""

import inspect
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

import ops.plan as plan_module
from ops.plan import Planner, stand_in
from ops.products import add_to, zero
from triton_kernels.image_copy import copy_image
from triton_kernels.image_tiles import ImageNormConfig
from triton_kernels.launch import call, launch


def copied(source):
    """The matrix, copied by a kernel."""
    result = torch.empty(source.shape, dtype=source.dtype, device=source.device)
    images = source.unsqueeze(0), result.unsqueeze(0)
    copy_image(*images, ImageNormConfig.fit(*images))
    return result


def plan_of(function, *tensors):
    """The plan of a function that launches kernels and calls PyTorch's functions, as this project's code does."""
    stand_ins = [stand_in(tensor) for tensor in tensors]
    planner = Planner(tensors[0].device, stand_ins)
    with torch.no_grad(), planner.planning():
        return planner.plan(function(*stand_ins))


def copy(source, target):
    target.copy_(source)


def halves(input):
    return input[:2].clone(), input[2:].clone()


def written_to(x):
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    call(copy, x[:-1], output[1:])
    call(zero, output[:1])
    call(add_to, output, copied(x)[0])
    return [output]


def freed(x):
    for addend in (1.0, 2.0, 3.0):
        x = call(torch.add, x, addend)  # what it was before has gone
    return [call(torch.mul, x, copied(x))]


def test_new_memory_in_the_deterministic_mode():
    """It is filled, as PyTorch's own is there. Before and afterwards the plan allocates as Inductor's graphs do."""
    x = torch.randn(4, 5)
    plan = plan_of(lambda x: [call(torch.neg, x), x.new_empty(5, 4, dtype=torch.bfloat16).t()], x)
    with mock.patch.object(torch, "empty_strided", side_effect=torch.empty_strided) as slow:
        for mode in (False, True, False):
            torch.use_deterministic_algorithms(mode)
            _, new = plan.run([x])
            assert (new.shape, new.stride(), new.dtype) == ((4, 5), (1, 4), torch.bfloat16)
            assert slow.call_count == mode and (not mode or new.isnan().all())
            slow.reset_mock()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [call(torch.mm, copied(x)[1:].t(), x[1:])],
        lambda x: [call(torch.cat, (x[:2], call(torch.mul, copied(x), 3)))],
        lambda x: [*call(halves, copied(x))],
        lambda x: [call(torch.amax, copied(x), 1), call(torch.add, x, x), call(torch.Tensor.to, x, torch.bfloat16)],
        lambda x: [call(torch.bitwise_and, copied(x).view(torch.int32)[1:], -2)],
        lambda x: [call(torch.add, call(torch.sum, x[:, 2:], 0), copied(x).view(6, 5)[:4, 1])],
        written_to,
        freed,
    ],
)
def test_functions_of_pytorch_between_launches(function):
    draws = [torch.randn(5, 6) for _ in range(3)]
    plan = plan_of(function, draws[0])
    assert any(step.grid is not None for step in plan.noted) and any(step.grid is None for step in plan.noted)
    for draw in draws:
        for result, expected in zip(plan.run([draw]), function(draw), strict=True):
            assert torch.equal(result, expected) and result.stride() == expected.stride()


def test_a_library_that_changes_its_layout():
    """As a convolution may, where cuDNN is switched off between two calls."""
    is_transposed = []

    def laid_out(input):
        return input.t().contiguous().t() if is_transposed else input.clone()

    def function(x):
        y = call(laid_out, x)
        return [call(torch.add, y, x[:1]), y]

    draw = torch.randn(5, 6)
    plan = plan_of(function, draw)
    expected = plan.run([draw])
    is_transposed.append(True)
    for result, other in zip(plan.run([draw]), expected, strict=True):
        assert torch.equal(result, other) and result.stride() == other.stride()


class CompiledStandIn:
    """What Triton gives for a kernel that it compiled; it notes the launches in the place of a GPU."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.launches, self.hooked = [], []

    @property
    def run(self):
        return lambda *arguments: self.launches.append(arguments)

    def __getitem__(self, grid):
        return lambda *arguments: self.hooked.append((grid, *arguments))


@pytest.fixture
def compiled(monkeypatch):
    """The GPU's way of launching, of a kernel with six parameters."""

    def kernel(source, part, pair, descriptor, target, LAST=7): ...

    compiled = CompiledStandIn()
    kernel.run = lambda *arguments, grid, warmup, **options: compiled
    kernel.signature = inspect.signature(kernel)
    kernel.arg_names = [*kernel.signature.parameters]
    kernel.params = [SimpleNamespace(is_constexpr=name == "LAST") for name in kernel.arg_names]
    compiled.kernel = kernel
    monkeypatch.setattr(plan_module, "INTERPRETED", False)
    driver = mock.Mock(get_current_stream=lambda index: f"stream of {index}")
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return compiled


def with_descriptors(compiled):
    def function(x):
        half = x[:, x.shape[1] // 2 :]
        (buffer, other), result = torch.empty(2, *x.shape, device=x.device), torch.empty_like(half)
        descriptor = TensorDescriptor.from_tensor(x, [2, 4])
        for target in (buffer, result):
            launch(compiled.kernel, (3, 2), x.device, x, half, (other, 5), descriptor, target, LAST=8)
        return [result]

    return function


def test_launches_on_a_gpu_get_addresses(compiled):
    draws = [torch.randn(4, 8) for _ in range(2)]
    plan = plan_of(with_descriptors(compiled), draws[0])
    for draw in draws:
        (result,) = plan.run([draw])
        first, second = compiled.launches
        compiled.launches.clear()
        for arguments in (first, second):
            *before, source, part, pair, descriptor, target, last = arguments
            assert before == [3, 2, 1, "stream of None", "function", "metadata", None, None, None]
            assert (source, part, last) == (draw.data_ptr(), draw.data_ptr() + 4 * 4, 8)
            assert descriptor.base.data_ptr() == draw.data_ptr()
            assert [*descriptor.shape, *descriptor.strides, *descriptor.block_shape] == [4, 8, 8, 1, 2, 4]
            assert pair == (first[-2] + 4 * draw.numel(), 5), "which lies behind the buffer, in one memory"
        assert second[-2] == result.data_ptr() != first[-2]
    assert not compiled.hooked


def test_hooks_see_launches(compiled, monkeypatch):
    """Of a profiler, which may come and go between two calls."""
    draw = torch.randn(4, 8)
    plan = plan_of(with_descriptors(compiled), draw)
    for count, hook in enumerate((None, lambda metadata: None, None)):
        monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", hook)
        plan.run([draw])
        assert (len(compiled.launches), len(compiled.hooked)) == [(2, 0), (2, 2), (4, 2)][count]
    grid, source, *_ = compiled.hooked[0]
    assert grid == (3, 2, 1) and source == draw.data_ptr()
