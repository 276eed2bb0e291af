"""Where a call runs and how float32 is multiplied, by PyTorch's own settings."""

from functools import partial

import pytest
import torch

import autotune_configs
from autotune_configs import gpus
from ops import precision, products
from triton_kernels.chains import LINEAR


def test_kernels_take_three_dtypes():
    """On the CPU, because Triton interprets here."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert precision.runs_kernels(torch.empty(0, dtype=dtype))
    assert not precision.runs_kernels(torch.empty(0, dtype=torch.float64))
    assert not precision.runs_kernels(torch.empty(0, device="meta"))


def test_without_the_interpreter_the_cpu_takes_the_reference(monkeypatch):
    monkeypatch.setattr(precision, "INTERPRETED", False)
    assert not precision.runs_kernels(torch.empty(0))


def rows_of(rows, depth, dtype=torch.float32):
    return torch.empty(rows, depth, dtype=dtype, device="meta")


@pytest.mark.parametrize("setting, by_cublas", [("highest", False), ("high", True), ("medium", True)])
def test_cublas_multiplies_tf32(setting, by_cublas):
    """Where nothing is split, as in the interpreter."""
    torch.set_float32_matmul_precision(setting)
    assert precision.multiplies_by_cublas(rows_of(1024, 8192), 8192) is by_cublas
    for dtype in (torch.bfloat16, torch.float16):
        assert not precision.multiplies_by_cublas(rows_of(1024, 8192, dtype), 8192)


def test_cublas_is_asked_for_in_terms_of_the_product(monkeypatch):
    """Rows, columns, depth: M, N, K."""
    monkeypatch.setattr(
        autotune_configs, "prefers_cublas", lambda *sizes_and_device: sizes_and_device[:3] == (8, 16, 32)
    )
    assert precision.multiplies_by_cublas(rows_of(8, 32, torch.bfloat16), 16)
    assert not precision.multiplies_by_cublas(rows_of(8, 16, torch.bfloat16), 32)


def test_large_products_are_split_for_tf32(monkeypatch):
    monkeypatch.setattr(precision, "runs_hopper_kernels", lambda device: True)
    torch.set_float32_matmul_precision("high")
    assert not precision.multiplies_by_cublas(rows_of(1024, 4096), 4096)
    assert precision.multiplies_by_cublas(rows_of(1024, 4096), 4095)  # few products
    assert precision.multiplies_by_cublas(rows_of(1023, 8192), 8192)  # few rows
    assert precision.multiplies_by_cublas(rows_of(8192, 8192), 1023)  # few columns
    torch.set_float32_matmul_precision("highest")
    assert not precision.multiplies_by_cublas(rows_of(8, 512), 1)


@pytest.mark.parametrize("setting, parts", [("highest", 2), ("high", 1), ("medium", 1)])
def test_parts_follow_the_setting(setting, parts):
    torch.set_float32_matmul_precision(setting)
    assert precision.float32_parts() == parts


def test_small_float32_products_are_cublass(monkeypatch):
    monkeypatch.setattr(gpus, "SHALLOWEST_FLOAT32", 512)
    monkeypatch.setattr(gpus, "FEWEST_FLOAT32_ROWS", 8)
    assert precision.multiplies_by_cublas(rows_of(8, 511), 64)
    assert precision.multiplies_by_cublas(rows_of(7, 512), 64)
    assert not precision.multiplies_by_cublas(rows_of(8, 512), 64)
    assert not precision.multiplies_by_cublas(rows_of(1, 8, torch.bfloat16), 64)


def test_a_transposed_input_may_have_fewer_results(monkeypatch):
    """Where the kernel may divide the depth: on Hopper, of many terms, and not in a chain, whose rows depend on no
    layout."""
    monkeypatch.setattr(gpus, "FEWEST_FLOAT32_RESULTS", 2**12)
    monkeypatch.setattr(gpus, "FEWEST_DIVIDED_RESULTS", 2**11)
    for module in (precision, products):
        monkeypatch.setattr(module, "runs_hopper_kernels", lambda device: True)
    weight, transposed = rows_of(64, 2048), rows_of(2048, 32).T
    for input, may_divide in ((transposed, True), (transposed, False), (rows_of(32, 2048), True)):
        divides = input is transposed and may_divide
        assert (precision.multiplier(input, weight, may_divide=may_divide) == "kernel") is divides
        assert products.product_config(LINEAR, input, weight, may_divide=may_divide).divides is divides
    assert precision.multiplier(rows_of(2047, 32).T, rows_of(64, 2047), may_divide=True) != "kernel"
    monkeypatch.setattr(precision, "runs_hopper_kernels", lambda device: False)
    assert precision.multiplier(transposed, weight, may_divide=True) != "kernel"


@pytest.fixture
def cudnn():
    """Its settings, set back whatever happens. Those of float32 may hang on one that stands for more than cuDNN's."""
    cudnn = torch.backends.cudnn
    generic = torch.backends.fp32_precision
    with cudnn.flags(enabled=True, allow_tf32=True):
        yield cudnn
        torch.backends.fp32_precision = generic


def test_convolutions_follow_cudnns_setting(cudnn):
    """In its old spelling, and in the new one, mixed with which the old one cannot be read."""
    for allowed in (True, False):
        cudnn.allow_tf32 = allowed
        assert precision.convolutions_allow_tf32() is allowed
    for setting, allowed in (("tf32", True), ("ieee", False)):
        cudnn.allow_tf32 = not allowed
        cudnn.conv.fp32_precision = setting
        with pytest.raises(RuntimeError):
            cudnn.allow_tf32  # noqa: B018
        assert precision.convolutions_allow_tf32() is allowed
    cudnn.conv.fp32_precision = "none"
    for setting, allowed in (("tf32", True), ("ieee", False)):
        torch.backends.fp32_precision = setting
        assert precision.convolutions_allow_tf32() is allowed
    cudnn.allow_tf32 = True
    with cudnn.flags(enabled=False, allow_tf32=True):
        assert not precision.convolutions_allow_tf32()


@pytest.mark.parametrize("allowed", [True, False])
def test_torch_compile_reads_cudnns_setting(cudnn, allowed):
    cudnn.allow_tf32 = allowed
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + precision.convolutions_allow_tf32(), fullgraph=True, backend="eager")
    assert compiled(torch.zeros(2)).tolist() == [allowed] * 2
    torch._dynamo.reset()


def test_autocast_dtype():
    tensor = torch.empty(0)
    assert precision.autocast_dtype(tensor) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert precision.autocast_dtype(tensor) == torch.bfloat16
        assert precision.autocast_dtype(tensor.double()) == torch.float64
        assert precision.autocast_dtype(tensor.half()) == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert precision.autocast_dtype(tensor) == torch.float32


@pytest.fixture
def few_rows_on_hopper(monkeypatch):
    monkeypatch.setattr(precision, "runs_hopper_kernels", lambda device: True)
    monkeypatch.setattr(precision, "float32_by_cublas", lambda *sizes: True)


@pytest.mark.usefixtures("few_rows_on_hopper")
@pytest.mark.parametrize("setting, expected", [("highest", 1), ("high", None)])
def test_the_setting_decides_on_registers(setting, expected):
    torch.set_float32_matmul_precision(setting)
    place = precision.rows_in_registers
    assert place(rows_of(64, 2048), rows_of(2048, 2048)) == expected
    assert place(rows_of(64, 2048, torch.bfloat16), rows_of(2048, 2048, torch.bfloat16)) is None


@pytest.mark.usefixtures("few_rows_on_hopper")
def test_what_is_split_in_registers():
    """The larger operand in either order, as TMA copies it, and any other one."""
    torch.set_float32_matmul_precision("highest")
    place, input, weight = precision.rows_in_registers, rows_of(64, 2048), rows_of(2048, 2048)
    assert place(input, weight.T) == 1 and place(rows_of(8192, 2048), input) == 0
    assert place(rows_of(64, 4096)[:, :2048], rows_of(2048, 4096)[:, :2048]) == 1
    assert place(rows_of(2048, 64).T, weight) == 1
    assert place(input[:1].expand(64, 2048), weight) == 1
    assert place(input, rows_of(2048, 4096)[:, ::2]) is None
    assert place(input, rows_of(2048, 2049)[:, 1:]) is None  # neither begins nor goes on aligned
    assert place(rows_of(1024, 2048), rows_of(2048, 2049)[:, 1:]) is None
    assert (
        place(weight, rows_of(2048, 2049)[:, 1:]) == 0 and place(weight, weight) == 1
    )  # results are stored by rows of the weight
    assert place(rows_of(15, 2048), weight) is None


@pytest.mark.usefixtures("few_rows_on_hopper")
def test_which_of_a_batch_is_split_in_registers():
    """The larger operand, or of two of one size the one that TMA can copy, if its products pay."""
    torch.set_float32_matmul_precision("highest")
    place, batch = precision.rows_in_registers, partial(torch.empty, device="meta")
    small, large = batch(64, 256, 512), batch(64, 512, 512)
    assert place(small, large) == 1 and place(large, small) == 0
    assert place(small.mT.contiguous().mT, large.mT) == 1
    assert place(small, batch(64, 1024, 512)[:, ::2]) == 1  # every second row
    assert place(large, batch(64, 512, 1024)[..., ::2]) == 0  # every second column
    assert place(batch(128, 512, 512)[::2], batch(1, 512, 512).expand(64, -1, -1)) == 0  # one matrix repeated
    assert place(small, batch(1, 512, 512).expand(64, -1, -1)) == 0
    assert place(batch(64, 256, 1024)[..., ::2], batch(64, 512, 1024)[..., ::2]) is None
    narrow, wide = batch(95, 64, 512), batch(95, 512, 512)  # few, which may be of a sharp softmax
    assert place(wide, narrow) is None and place(wide, narrow[:1].expand(95, -1, -1)) == 0
    assert place(small[:1], large[:1]) is None and place(small.bfloat16(), large.bfloat16()) is None
    torch.set_float32_matmul_precision("high")
    assert place(small, large) is None


@pytest.mark.usefixtures("few_rows_on_hopper")
def test_the_chains_kernel_comes_first(monkeypatch):
    """Where both operands may be split in memory. It has no batches."""
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(precision, "float32_by_cublas", lambda *sizes: False)
    large = torch.empty(2, 2048, 2048, device="meta")
    assert precision.rows_in_registers(large[0], large[0]) is None
    assert precision.rows_in_registers(large[:1], large[:1]) is None
    assert precision.rows_in_registers(large, large) == 1


@pytest.mark.parametrize(
    "rows, features, by_cublas",
    [(16, 8192, True), (63, 8192, True), (64, 8192, False), (64, 1024, False), (64, 1023, True), (511, 8192, False)]
    + [(512, 8192, True)],
)
def test_who_adds_the_bias(rows, features, by_cublas):
    torch.set_float32_matmul_precision("highest")
    assert precision.cublas_adds_bias(rows_of(rows, features), features) is by_cublas
    torch.set_float32_matmul_precision("high")
    assert precision.cublas_adds_bias(rows_of(rows, features), features)
