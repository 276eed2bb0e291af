"""A user's own chain, with a pointwise function of its own: problems, sweeps, tables and lookups."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import autotune_configs
import ops
from autotune_configs import lookup, tables
from autotune_configs.chains import linear_problems
from autotune_configs.gpus import Gpu
from autotune_configs.kernels import kernel_of
from autotune_configs.problem import Problem
from autotune_configs.sweep import sweep_and_store, time_on_host
from autotune_configs.workloads import workload_of
from ops import pointwise as p
from tests.autotune_configs.commands import run
from tests.autotune_configs.entries import GPU, SECOND, entry, linear_problem
from triton_kernels.chain import Chain, chain_of
from triton_kernels.chains import LINEAR, LINEAR_GROUP_NORM_HARDTANH
from triton_kernels.pointwise import ADD, GELU, HARDTANH, MUL, Pointwise
from triton_kernels.row_minimum import ROW_MINIMUM

CPU = torch.device("cpu")


@triton.jit
def silu(value, operand):
    return value * tl.sigmoid(value)


@triton.jit
def silu_gradient(gradient, value, operand):
    sigmoid = tl.sigmoid(value)
    return gradient * sigmoid * (1.0 + value * (1.0 - sigmoid)), None


SILU = Pointwise("swish", silu, silu_gradient, lambda value, _: F.silu(value))
CHAIN = Chain("linear", after=(MUL, SILU, HARDTANH, replace(ADD, operand="tensor")))
KERNEL = "linear_group_norm_mul_vector_swish_hardtanh_add_tensor"
SIZES = (8, 32, 64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("step", [p.silu, p.gelu, p.sigmoid, p.tanh, p.mish], ids=lambda step: step.__name__)
def test_chains_of_operators_in_every_dtype(step, dtype):
    """A sweep's workload has the functions that a call of this dtype has, of other names than theirs in words."""
    chain = ops.Chain("linear", after=(step()[0],))
    problem = Problem(chain.kernel, dtype, (16, 64, 64, 16), "highest" if dtype == "float32" else None)
    assert workload_of(problem, torch.device("meta"))


def test_problems():
    """As of any chain: the product with all of it, and the norm's pass; without a norm, that needs none."""
    assert CHAIN.kernel == KERNEL and chain_of(KERNEL) is CHAIN
    product, norm = linear_problems(CHAIN, SIZES, "bfloat16", group_size=16)
    assert product == Problem(KERNEL, "bfloat16", (8, 64, 32, 16))
    assert norm == Problem("group_norm_backward", "bfloat16", (8, 64, 16))
    alone = Chain("linear", before=(SILU,), norm="")
    assert linear_problems(alone, SIZES, "bfloat16") == [Problem("linear_swish", "bfloat16", (8, 64, 32, 1))]
    kinds = [problem.kernel for problem in linear_problems(alone, SIZES, "float32")]
    assert kinds == ["linear_swish", LINEAR.kernel, LINEAR.kernel]
    with pytest.raises(ValueError, match="unknown kernel 'swish'"):
        kernel_of("swish")
    assert kernel_of("linear_swish").takes(linear_problem(kernel="linear_swish"))
    assert not kernel_of("linear_swish").takes(linear_problem(kernel="linear_swish", group_size=16)), "it has no groups"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_is_swept_where_it_is_known(folder, dtype):
    """Here, and not in worker processes; what is found is used from then on."""
    product, *_ = linear_problems(CHAIN, SIZES, dtype, group_size=16)
    workers = object()  # nothing may be asked of them
    interpreted = {"prepare": lambda call: call, "clock": time_on_host, "resources": workers}
    (result,) = sweep_and_store([product], CPU, is_quick=True, **interpreted)
    assert not result.is_red and result.entry.problem == product
    found = lookup.find(product, Gpu.of(CPU))
    assert found.entry == result.entry and found.is_of(Gpu.of(CPU))
    config = autotune_configs.linear_config(KERNEL, getattr(torch, dtype), 8, 64, 32, 16, CPU)
    assert config == found.config


def test_other_functions_of_one_name():
    """Tables know a kernel by its name alone. The same functions, and the forms of one for a dtype, are no others."""
    assert Chain("linear", before=(SILU,), norm="") == Chain("linear", before=(SILU,), norm="")
    other = replace(SILU, gradient=GELU.gradient)
    Chain("linear", before=(SILU,))
    with pytest.raises(ValueError, match="linear_swish_group_norm: a chain of this name has other functions"):
        Chain("linear", before=(other,))
    assert Chain("linear", before=(ADD, SILU)).kernel == "linear_swish_group_norm", "a bias is no other function"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert Chain("linear", before=(GELU,)).of_dtype(dtype).kernel == "linear_gelu_group_norm"


@pytest.mark.parametrize(
    "wrong", [{"norm": ""}, {"before": (SILU,)}, {"after": (SILU,)}], ids=["norm", "before", "after"]
)
def test_what_a_reduction_follows(wrong):
    with pytest.raises(ValueError, match="a reduction takes the values of a norm"):
        Chain("linear", reduction=ROW_MINIMUM, **wrong)


def test_a_chain_of_another_process(folder):
    """Its entries are valid, and serve the process that has it; its tensors are not known here."""
    problem = linear_problem(kernel="linear_softsign_group_norm", group_size=16)
    tables.store(tables.user_path(GPU), GPU, entry(SECOND, problem))
    lookup.forget()
    assert lookup.find(problem, GPU).config == SECOND
    with pytest.raises(ValueError, match="no chain of this process has the kernel linear_softsign_group_norm"):
        workload_of(problem, CPU)


@pytest.mark.offline
def test_check_leaves_it_to_its_program(folder, capsys):
    problem = linear_problem(kernel=KERNEL, group_size=16)
    tables.store(tables.user_path(GPU), GPU, entry(SECOND, problem))
    status, output = run("check", str(tables.user_path(GPU)), "--processes", "1", capsys=capsys)
    assert status == 0 and output == (
        f"1 table, 0 kernel variants compiled, 0 faults\n{KERNEL}: compiled by the program with its chain\n"
    )


def test_numbers_of_the_named_chains():
    """A workload has the bounds of the chain that the bench measures."""
    problem = linear_problem(m=8, n=64, k=32, group_size=16, kernel=LINEAR_GROUP_NORM_HARDTANH.kernel)
    assert workload_of(problem, CPU).operands[-1] == (-2.0, 2.0)
