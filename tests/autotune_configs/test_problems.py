"""The problems that a sweep lists are those that a call looks up, forward and backward."""

import dataclasses

import pytest
import torch

import ops
from autotune_configs import gpus, lookup, sweep, tables, tuning
from autotune_configs.chains import CHAINS, PASSES
from autotune_configs.compositions import composition
from autotune_configs.gpus import Gpu
from autotune_configs.kernels import kernel_of
from autotune_configs.problem import Problem
from autotune_configs.sweep import sweep_and_store
from ops import pointwise as p
from tests.autotune_configs.entries import entry
from triton_kernels.linear import LinearConfig

CPU = torch.device("cpu")


@pytest.fixture
def asked(folder, monkeypatch):
    """The problems that calls would tune."""
    found = []
    monkeypatch.setattr(tuning, "is_on", lambda: True)
    monkeypatch.setattr(tuning, "tune_unseen", lambda problem, device: found.append(problem))
    return found


def looked_up(asked, call, *tensors):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    call(*leaves).sum().backward()
    return set(asked)


def linear_norm(groups, before=(), after=()):
    def call(input, weight, *last):
        steps = {"before": before, "after": (*after, *map(p.add, last))}
        if groups is None:
            return ops.linear_layer_norm(input, weight, None, **steps)
        return ops.linear_group_norm(input, weight, None, groups, **steps)

    return call


def minimum(groups):
    return lambda input, weight: ops.linear_group_norm_min(input, weight, None, groups)


def activated(input, weight):
    return ops.linear(input, weight, None, after=(p.silu(),))


CALLS = {
    "linear -> silu": activated,
    "linear -> group_norm(8) -> silu": linear_norm(8, after=(p.silu(),)),
    "linear -> mish -> group_norm(2)": linear_norm(2, before=(p.mish(),)),
    "linear -> layer_norm -> gelu": linear_norm(None, after=(p.gelu(),)),
    "linear -> group_norm(1) -> relu": linear_norm(1, after=(p.relu(),)),
    "linear -> group_norm(16) -> row_minimum": minimum(16),
    "linear -> group_norm(2) -> row_minimum": minimum(2),
    "linear -> group_norm(1) -> row_minimum": minimum(1),
    "linear -> group_norm(4) -> add tensor": linear_norm(4),
}
SIZES = [(16, 24, 256), (1, 32, 64), (5, 16, 96)]
#: On few multiprocessors the product's tiles hold the groups of the first size, on many they do not.
FEW, MANY = None, 132


def gpu_of(multiprocessors):
    """What the interpreter stands for, with so many multiprocessors."""
    gpu = Gpu.of(CPU)
    return dataclasses.replace(gpu, multiprocessors=multiprocessors or gpu.multiprocessors)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("multiprocessors", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("text", CALLS)
def test_of_linear_chains(asked, monkeypatch, text, dtype, sizes, multiprocessors):
    """A float32 norm's pass is listed in any case: with TF32, cuBLAS multiplies."""
    gpu = gpu_of(multiprocessors)
    monkeypatch.setattr(Gpu, "of", lambda device: gpu)
    M, K, N = sizes
    shapes = [(M, K), (N, K), *([(M, N)] if "tensor" in text else [])]
    called = looked_up(asked, CALLS[text], *(torch.randn(shape, dtype=getattr(torch, dtype)) for shape in shapes))
    listed = set(composition(text).problems(sizes, dtype, PASSES, gpu))
    possible = {problem for problem in listed if dtype == "float32" and problem.kernel == "group_norm"}
    assert listed - possible <= called <= listed


@pytest.mark.parametrize("num_groups", [1, 4])
def test_of_groups_that_no_program_holds(asked, num_groups):
    """Three passes, as over images of one pixel."""
    sizes = (2, 16, 16400)
    calls = {"silu": linear_norm(num_groups, after=(p.silu(),)), "row_minimum": minimum(num_groups)}
    for last, call in calls.items():
        asked.clear()
        called = looked_up(asked, call, torch.randn(2, 16).bfloat16(), torch.randn(16400, 16).bfloat16())
        chain = composition(f"linear -> group_norm({num_groups}) -> {last}")
        assert called == set(chain.problems(sizes, "bfloat16", PASSES, Gpu.of(CPU)))
        assert ("image_statistics" in {problem.kernel for problem in called}) == (num_groups == 1)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_of_the_chain_of_images(asked, dtype, memory_format):
    """A sweep lists both memory formats."""
    sizes = (2, 16, 16, 5, 6, 3)
    image = torch.randn(2, 16, 5, 6, dtype=getattr(torch, dtype)).contiguous(memory_format=memory_format)
    weight = torch.randn(16, 16, 3, 3, dtype=image.dtype)
    called = looked_up(asked, lambda *tensors: ops.conv_transpose2d_gelu_group_norm(*tensors, None, 2), image, weight)
    assert called and called <= set(CHAINS["l19"].problems(sizes, dtype, PASSES, Gpu.of(CPU)))


def test_of_gradients_in_the_other_memory_format(asked):
    """A pass over images of both formats is what a gradient of channels_last and PyTorch's contiguous product ask."""
    image = torch.randn(2, 16, 5, 6, requires_grad=True)
    result = ops.conv_transpose2d_gelu_group_norm(image, torch.randn(16, 16, 3, 3), None, 2)
    result.backward(torch.randn_like(result).contiguous(memory_format=torch.channels_last))
    listed = CHAINS["l19"].problems((2, 16, 16, 5, 6, 3), "float32", PASSES, Gpu.of(CPU))
    assert "contiguous to channels_last" in {problem.layout for problem in asked if problem.kernel == "image_sums"}
    assert set(asked) <= set(listed)


def test_an_entry_that_holds_groups(asked, monkeypatch):
    """Where the heuristic's tiles hold none, a table's may. Then one kernel does the chain, as a call has it."""
    gpu, sizes, text = gpu_of(MANY), (16, 24, 256), "linear -> group_norm(2) -> relu"
    monkeypatch.setattr(Gpu, "of", lambda device: gpu)
    problem, product, *_ = composition(text).problems(sizes, "bfloat16", ("forward",), gpu)
    assert problem.sizes == (16, 256, 24, 128) and product.kernel == "linear_bias"
    tables.store(tables.user_path(gpu), gpu, entry(LinearConfig(16, 128, 64, num_warps=4), problem))
    lookup.forget()
    assert composition(text).problems(sizes, "bfloat16", ("forward",), gpu) == [problem]
    with torch.no_grad():
        linear_norm(2, after=(p.relu(),))(torch.randn(16, 24).bfloat16(), torch.randn(256, 24).bfloat16())
    assert asked == [problem]


@pytest.mark.parametrize("group_size", [96, 512, 128])
def test_what_two_kernels_do_is_not_swept(folder, monkeypatch, group_size):
    """A tile that holds no whole groups cannot be right, and is no base to compare others with."""
    gpu = gpu_of(MANY)
    monkeypatch.setattr(Gpu, "of", lambda device: gpu)
    monkeypatch.setattr(sweep, "workload_of", lambda *_: pytest.fail("it is launched"))
    problem = Problem("linear_group_norm_relu", "bfloat16", (16, 2 * group_size, 24, group_size))
    assert not kernel_of(problem.kernel).does_whole(problem, gpu)
    (result,) = sweep_and_store([problem], CPU, again=True)
    assert result.entry is None and "two kernels" in result.skipped and not result.is_red and result.is_whole
    assert not tables.user_path(gpu).exists()


def test_few_rows_or_terms_in_float32_are_cublass(monkeypatch):
    """On a GPU, in any precision. The products of the backward pass have other depths."""
    monkeypatch.setattr(gpus, "SHALLOWEST_FLOAT32", 512)
    monkeypatch.setattr(gpus, "FEWEST_FLOAT32_ROWS", 512)
    monkeypatch.setattr(gpus, "FEWEST_FLOAT32_RESULTS", 2**18)
    a100 = Gpu.called("NVIDIA A100-SXM4-40GB")

    def kernels(*sizes):
        return [problem.kernel for problem in CHAINS["l94"].problems(sizes, "float32", PASSES, a100)]

    alone = ["group_norm", "group_norm_backward"]
    assert kernels(511, 1024, 1024) == alone and kernels(512, 511, 1024)[:2] == alone
    assert kernels(512, 512, 1024)[0] == "linear_hardtanh_mish_group_norm"
    assert kernels(512, 512, 1024)[-2:] == ["linear_bias"] * 2 and kernels(511, 512, 1024)[-1] != "linear_bias"
    assert kernels(512, 512, 256)[-1] == "group_norm_backward", "few terms of one, few rows of the other"
