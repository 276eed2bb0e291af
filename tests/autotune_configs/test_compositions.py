"""Chains in words, and those that a module has: what sweeps, show and check make of them."""

import sys

import pytest
import torch

from autotune_configs import tables
from autotune_configs.chains import CHAINS, PASSES
from autotune_configs.compositions import composition, kernels_of
from autotune_configs.kernels import kernel_of
from autotune_configs.precompile import Precompiler
from autotune_configs.problem import Problem
from autotune_configs.workloads import is_of_every_process, workload_of
from tests.autotune_configs.commands import CPU_TABLE, refused, run
from tests.autotune_configs.entries import GPU, entry
from triton_kernels.activations import CLAMP, SILU, SOFTPLUS
from triton_kernels.arithmetic import ADD_NUMBER
from triton_kernels.chain import Chain
from triton_kernels.pointwise import ADD, GELU, MISH, MUL

ADD_TENSOR = ADD.with_operand("tensor")
#: Of this module, for ``module:variable``.
OWN = Chain("linear", after=(SILU, ADD_TENSOR))
ALONE = Chain("linear", before=(GELU,), norm="")
NORM = Chain(after=(SILU,))


@pytest.mark.parametrize(
    "text, chain, num_groups",
    [
        ("linear -> group_norm -> silu", Chain("linear", after=(SILU,)), 32),
        ("linear->mish->group_norm(8)->mul", Chain("linear", (MISH,), after=(MUL,)), 8),
        ("linear -> layer_norm -> gelu", Chain("linear", after=(GELU,)), 1),
        ("linear -> silu -> add(2.0) -> add tensor", Chain("linear", (SILU, ADD_NUMBER, ADD_TENSOR), ""), 1),
        ("linear -> softplus(2.0, 20.0) -> add numbers", Chain("linear", (SOFTPLUS, ADD_NUMBER), ""), 1),
        ("linear -> silu -> add earlier 1", Chain("linear", (SILU, ADD.with_operand("earlier 1")), ""), 1),
        ("linear -> group_norm(16) -> row_minimum", CHAINS["l75"].chain, 16),
        ("linear -> group_norm(8, 1e-05) -> silu", Chain("linear", after=(SILU,)), 8),
        ("linear -> group_norm(8, 0.0) -> mul -> no add -> silu -> float32", Chain("linear", after=(SILU,)), 8),
        ("linear -> group_norm(8) -> mul -> add", Chain("linear", after=(MUL, ADD)), 8),
        ("linear -> clamp(-inf, 1e400) -> softplus(2.0) -> mish()", Chain("linear", (CLAMP, SOFTPLUS, MISH), ""), 1),
        (f"{__name__}:OWN", OWN, 32),
        (f"{__name__}:OWN(4)", OWN, 4),
        (f"{__name__}:ALONE", ALONE, 1),
    ],
)
def test_compositions(text, chain, num_groups):
    found = composition(text)
    assert (found.chain, found.num_groups, found.target) == (chain, num_groups, CHAINS["l94"].target)


def test_a_calls_text():
    """As ``ops.explain`` prints it: a bias, and the norm's weight and bias, are no functions of their own."""
    from ops import Chain as Callable
    from ops.calls import Call

    chain = Callable("linear", (MISH,), after=(CLAMP, MUL))
    numbers = (None, None, None, None, (0.0, 1.0), None)
    for present in (True, False):
        call = Call(chain, numbers, (present, True, True, present, True, True), 8, 1e-5)
        found = composition(call.text)
        assert (found.chain.kernel, found.num_groups) == (chain.kernel, 8)


@pytest.mark.parametrize(
    "text, told",
    [
        ("linear -> softsign", "'softsign' in 'linear -> softsign' is not one of hardtanh, mish, "),
        ("conv2d -> group_norm", "'conv2d -> group_norm' must begin with linear"),
        ("linear -> (silu)", "is no chain in words: '(silu)'"),
        ("linear -> ", "is no chain in words: ''"),
        ("linear -> group_norm(0)", "must have a positive number of groups, got 0"),
        *(
            (f"linear -> group_norm({written})", "must have a positive number of groups, got ")
            for written in ("inf", "nan", "4.5", "4.0", "-4", "0, 1e-5", "1e1", "", " ", ",4", "four", "9" * 5000)
        ),
        *(
            (f"linear -> group_norm({written})", "takes 1 to 2 numbers")
            for written in ("4,", "4,,1e-5", "4, 1e-5, 1", "4, many")
        ),
        *((f"linear -> group_norm(4, {eps})", "must have an eps") for eps in ("-1e-5", "nan", "inf")),
        ("conv2d(1, 1) -> group_norm", "must begin with linear"),
        ("linear -> layer_norm(64)", "'layer_norm(64)' in 'linear -> layer_norm(64)' takes no numbers"),
        ("linear(3) -> silu", "'linear(3)' in 'linear(3) -> silu' takes no numbers"),
        ("linear -> mish(2.0)", "takes no numbers"),
        ("linear -> softplus(1.0, 2.0, 3.0)", "takes 0 to 2 numbers"),
        ("linear -> elu(large)", "takes a number"),
        ("linear -> add()", "takes a number"),
        ("linear -> add tensor(2.0)", "takes no numbers"),
        ("linear -> group_norm(4) -> row_minimum(2, 3)", "takes a number"),
        ("linear -> no silu", "'no silu' in 'linear -> no silu' must not be absent"),
        ("linear -> no group_norm(4)", "must not be absent"),
        ("no linear -> silu", "must not be absent"),
        ("linear -> row_minimum -> group_norm(4)", "follows a reduction"),
        ("linear -> group_norm(4) -> row_minimum -> silu", "follows a reduction"),
        ("linear -> float32 -> silu", "'float32' in "),
        ("linear -> group_norm(4) -> silu -> row_minimum", "a reduction takes the values of a norm"),
        ("linear -> group_norm -> group_norm", "'group_norm' in "),
        ("no_module:CHAIN", "cannot be imported: No module named 'no_module'"),
        (f"{__name__}:CHAIN", "cannot be imported: module"),
        (f"{__name__}:CPU_TABLE", "must be a Chain, got Gpu"),
        (f"{__name__}:NORM", "must begin with linear"),
        ("a:b:c", "is no module:variable"),
        ("..a:b", "cannot be imported: "),
        *((f"{__name__}:OWN({number})", "must have a positive number of groups") for number in ("0", "inf", "4.5", "")),
    ],
)
def test_what_is_no_composition(text, told, capsys):
    line = refused("show", "--gpu", "h200", "--names", text, capsys=capsys)
    assert line.startswith("python -m autotune_configs show: argument --names: ") and told in line


def test_problems():
    """Those of any chain that begins with a linear layer. Its groups must be whole."""
    chain = composition("linear -> mish -> group_norm(4) -> silu")
    product, norm = chain.problems((8, 32, 64), "bfloat16", PASSES)
    assert product == Problem("linear_mish_group_norm_silu", "bfloat16", (8, 64, 32, 16))
    assert norm == Problem("group_norm_backward", "bfloat16", (8, 64, 16))
    with pytest.raises(ValueError, match="^out_features must be a multiple of the 4 groups, got 66$"):
        chain.problems((8, 32, 66), "bfloat16", PASSES)
    assert kernels_of("linear -> silu") == {"linear_silu", "linear_bias"}
    assert kernels_of("linear -> group_norm(3)") == {"linear_bias", "group_norm", "group_norm_backward"}


@pytest.mark.parametrize(
    "code, told",
    [
        ("1 / 0", "division by zero"),
        ("raise KeyError", "KeyError"),
        ("raise ValueError('of several\\n\\n  lines\\x0bof\\u2028text\\n')", "of several lines of text"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import sys; sys.exit('usage: this\\nor that')", "SystemExit: usage: this or that"),
        ("raise SystemExit", "SystemExit"),
        ("import pytest; pytest.skip('no GPU', allow_module_level=True)", "Skipped: no GPU"),
        ("def __getattr__(name): raise SystemExit(name)", "SystemExit: CHAIN"),
    ],
)
def test_a_module_that_fails(tmp_path, monkeypatch, capsys, code, told):
    """Whatever it raises is told in one line."""
    (tmp_path / "broken_module.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_module", raising=False)
    line = refused("show", "--gpu", "h200", "--names", "broken_module:CHAIN", capsys=capsys)
    assert line.endswith(f"'broken_module:CHAIN' cannot be imported: {told}")
    monkeypatch.delitem(sys.modules, "broken_module", raising=False)


def test_ctrl_c_in_a_module(tmp_path, monkeypatch, capsys):
    (tmp_path / "interrupted_module.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run("show", "--gpu", "h200", "--names", "interrupted_module:CHAIN", capsys=capsys)[0] == 130


def test_a_tensor_for_one_row():
    """To functions that take steps it is a vector there. A chain of a module's is what it says."""
    for text, kernel in (
        ("linear -> group_norm(4) -> add tensor", "linear_group_norm_add_vector"),
        ("linear -> mul tensor -> silu -> group_norm(4)", "linear_mul_vector_silu_group_norm"),
        (f"{__name__}:OWN(4)", "linear_group_norm_silu_add_tensor"),
    ):
        first, *_ = composition(text).problems((1, 32, 64), "bfloat16", PASSES)
        many, *_ = composition(text).problems((2, 32, 64), "bfloat16", PASSES)
        assert first.kernel == kernel and "tensor" in many.kernel
    first, *_ = composition("linear -> silu -> add tensor").problems((1, 32, 1), "bfloat16", PASSES)
    assert first.kernel == "linear_silu_add_scalar"


def test_swept_and_shown(folder, capsys):
    """By its words, beside a chain with a short name; numbers between parentheses divide no list."""
    names = "linear -> clamp(0.0, 1.0) -> group_norm(4) -> div -> leaky_relu,l30"
    line = refused("sweep", "--names", names, "--shapes", "8x32x66", capsys=capsys)
    assert line.endswith("argument --shapes: out_features must be a multiple of the 4 groups, got 66")
    command = "--names", names, "--dtypes", "bfloat16", "--passes", "forward", "--shapes", "8x32x64"
    status, output = run("sweep", *command, "--quick", capsys=capsys)
    kernel = "linear_clamp_group_norm_div_vector_leakyrelu"
    assert status == 0
    assert f"{kernel} bfloat16 8x64x32x16: " in output and "linear_group_norm_hardtanh bfloat16 8x64x32x64: " in output
    stored = {each.problem.kernel for each in tables.read(tables.user_path(CPU_TABLE), CPU_TABLE)}
    assert kernel in stored
    output = "".join(run("show", *command, capsys=capsys)[1].split())
    assert "thisproblem" in output


@pytest.mark.parametrize("text", ["linear -> softplus -> elu", "linear -> group_norm(2) -> sub -> div tensor -> clamp"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_workloads(text, dtype):
    """Functions with numbers have PyTorch's defaults, and what they compute is right."""
    problem, *_ = composition(text).problems((8, 32, 64), dtype, ("forward",))
    config = kernel_of(problem.kernel).heuristic(problem, GPU)
    assert workload_of(problem, torch.device("cpu")).fault(config) is None


@pytest.mark.offline
def test_compiled_in_a_process_of_its_own():
    """A worker knows a chain of built-in functions by its kernel's name."""
    problem, *_ = composition("linear -> silu -> mul(2.0)").problems((256, 256, 256), "bfloat16", ("forward",))
    assert is_of_every_process(problem)
    assert not is_of_every_process(Problem("linear_softsign", "bfloat16", problem.sizes))
    config = kernel_of(problem.kernel).heuristic(problem, GPU)
    with Precompiler(GPU, 1) as precompiler:
        assert precompiler.compile([(problem, config)]) == {(problem, config): (0, None)}


@pytest.mark.offline
def test_checked(folder, capsys):
    """Entries of such chains are compiled, in a process that did not sweep them."""
    problem = Problem("linear_hardswish_mul", "bfloat16", (256, 256, 256, 1))
    tables.store(tables.user_path(GPU), GPU, entry(problem=problem))
    arguments = "check", str(tables.user_path(GPU)), "--processes", "1", "--names", "linear -> hardswish -> mul(3.0)"
    status, output = run(*arguments, capsys=capsys)
    assert status == 0 and output == "1 table, 1 kernel variant compiled, 0 faults\n"
