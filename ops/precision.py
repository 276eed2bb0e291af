"""Where and in which precision a call runs: kernels or reference, PyTorch's float32 setting, autocast."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

import autotune_configs
from autotune_configs.gpus import float32_by_cublas, float32_in_registers
from autotune_configs.tables import warn_once
from triton_kernels.device import INTERPRETED, architecture, why_unsupported
from triton_kernels.float32_split import is_transposed
from triton_kernels.hopper import is_matrix_copyable, runs_hopper_kernels

#: What the kernels take, by name.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KERNEL_DTYPES = tuple(DTYPES.values())
#: At TF32's precision, splitting the operands pays from this many rows and columns and this many multiplications on.
#: (H200: 0.99 of cuBLAS's time at 1024 x 4096 x 4096, 0.88 at 4096 x 2048 x 2048, 1.2 at 512 x 8192 x 8192.)
FEWEST_TF32_LINES, FEWEST_TF32_PRODUCTS = 1024, 2**34


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name in ``torch``."""
    return str(dtype).removeprefix("torch.")


def other_dtype(dtype: Any) -> str:
    """That the kernels take other dtypes than this."""
    return f"kernels take float32, bfloat16 and float16, not {name_of(dtype)}"


def why_no_kernels(tensor: torch.Tensor) -> str:
    """Why the kernels do not take this tensor, or nothing where they do: float32, bfloat16 or float16, on a GPU. In
    Triton's interpreter also on the CPU."""
    if tensor.dtype not in KERNEL_DTYPES:
        return other_dtype(tensor.dtype)
    if tensor.device.type == "cuda":
        return why_unsupported(tensor.device.index)
    return "" if INTERPRETED and tensor.device.type == "cpu" else "kernels run on GPUs"


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Whether the kernels take this tensor. Where its GPU is none that they are compiled for, one warning says so."""
    reason = why_no_kernels(tensor)
    if reason and tensor.device.type == "cuda" and tensor.dtype in KERNEL_DTYPES:
        warn_once(tensor.device, f"{reason}: PyTorch's own functions run instead")
    return not reason


def is_16_bits_on_hopper(tensor: torch.Tensor) -> bool:
    """Whether the kernels take this tensor, and it is where some of them were measured alone."""
    return tensor.dtype.itemsize == 2 and runs_kernels(tensor) and architecture(tensor.device) == 90


def float32_parts() -> int:
    """The number of float16 operands that a float32 operand is split into (``triton_kernels.float32_split``). One is
    as precise as TF32."""
    return 1 if torch.backends.cuda.matmul.fp32_precision == "tf32" else 2


def multiplies_by_cublas(
    input: torch.Tensor, columns: int, *biases: torch.Tensor | None, may_divide: bool = False
) -> bool:
    """Whether cuBLAS computes the product of input [M, K] and a matrix [K, columns], to which biases are added, unless
    ``rows_in_registers``. ``may_divide`` as in ``multiplier``.

    For 16-bit inputs: where cuBLAS is predicted to be faster, as its tiles waste less of the last wave (wave
    quantisation). Not where a bias has a wider dtype, as under autocast: cuBLAS would round the bias first. PyTorch
    adds L94's second bias after the product and does not round it.

    For float32, in three cases:

    - The product has few terms. Tensor cores have an error of about 2e-7 at any depth. cuBLAS's float32 sum has less
      below some hundred terms (6e-7 at 1024).
    - The product has few rows, columns or results. There cuBLAS splits the sum into several parts (split-K), which is
      faster and with few rows more precise (an error of 9e-8 in a bias's gradient at 16 x 2048 x 2048).
    - PyTorch is set to use TF32, unless operands are split and the product is large enough for that to pay. The tensor
      cores truncate float32 to TF32 where cuBLAS rounds it: an error of 5.6e-4 against 2.9e-4 at depth 8192 (H200).
    """
    rows, depth = input.shape
    if input.dtype != torch.float32:
        are_alike = all(bias is None or bias.dtype == input.dtype for bias in biases)
        return are_alike and autotune_configs.prefers_cublas(rows, columns, depth, input.device)
    divides = may_divide and runs_hopper_kernels(input.device) and is_transposed(input)
    if float32_by_cublas(rows, columns, depth, divides):
        return True
    if float32_parts() == 2:
        return False
    pays = min(rows, columns) >= FEWEST_TF32_LINES and rows * columns * depth >= FEWEST_TF32_PRODUCTS
    return not (pays and runs_hopper_kernels(input.device))


def rows_in_registers(input: torch.Tensor, weight: torch.Tensor) -> int | None:
    """Whose rows are split in registers by ``linear_registers_hopper``, the input's (0) or the weight's (1), where it
    makes the float32 product of input [M, K] and weight [N, K], or of batches of these, instead of cuBLAS: in PyTorch's
    own precision, with an error of 1e-7 to 2.5e-7. It is the larger operand, or beside one matrix for all the other, if
    TMA can copy it. Else None."""
    B = input.shape[0] if input.ndim == 3 else 1
    (M, K), N = input.shape[-2:], weight.shape[-2]
    if not is_exact(input) or (B == 1 and not float32_by_cublas(M, N, K)):
        return None
    is_shared = B > 1 and 0 in (input.stride(0), weight.stride(0))
    if float32_in_registers(B, M, N, K, is_shared):
        for place, rows, others in sorted([(1, N, M), (0, M, N)], key=lambda each: each[1], reverse=True):
            if (rows >= others or is_shared) and is_matrix_copyable((input, weight)[place]):
                return place
    return None


def is_exact(input: torch.Tensor) -> bool:
    """Whether the operand is float32, at full precision, and on Hopper."""
    return input.dtype == torch.float32 and float32_parts() == 2 and runs_hopper_kernels(input.device)


Multiplier = Literal["kernel", "registers", "cuBLAS"]


def multiplier(
    input: torch.Tensor, weight: torch.Tensor, *biases: torch.Tensor | None, may_divide: bool = False
) -> Multiplier:
    """What multiplies input [M, K] and weight [N, K]: the chains' kernel, ``linear_registers_hopper`` or cuBLAS.

    ``may_divide``: the chains' kernel may add up K in sections where the input is transposed, so that its layout
    decides how results are rounded. (In registers the weight's does: whether K is its last dimension decides in which
    order terms are added.)
    """
    if not multiplies_by_cublas(input, weight.shape[0], *biases, may_divide=may_divide):
        return "kernel"
    return "cuBLAS" if rows_in_registers(input, weight) is None else "registers"


def cublas_adds_bias(input: torch.Tensor, columns: int) -> bool:
    """Whether cuBLAS adds the bias within the product of input [M, K] and a matrix [K, columns].

    In float32 (not TF32) with some hundred rows that is slower and less precise, because cuBLAS then does not split the
    sum. At 64 x 8192 x 8192 (H200) it takes 352 us, the product alone 209 us, product and a separate addition 214 us;
    the errors are 9.7e-7 and 5.2e-7. With fewer rows the product without a bias can be the less precise one: 3.7e-7
    against 2.1e-7 at 16 x 8192 x 8192.
    """
    rows, weights = input.shape[0], columns * input.shape[1]
    is_slower = 64 <= rows < 512 and weights >= 2**20
    return input.dtype != torch.float32 or float32_parts() == 1 or not is_slower


def convolutions_allow_tf32() -> bool:
    """Whether PyTorch may convolve float32 images in TF32: cuDNN is enabled and set to allow it.

    ``torch.backends.cudnn.allow_tf32`` sets the value that is read here. Reading that property itself raises an error
    where RNNs are set otherwise. torch.compile keeps the answer that it got when it compiled.
    """
    cudnn: Any = torch.backends.cudnn  # whose annotations lack conv
    return cudnn.enabled and cudnn.conv.fp32_precision == "tf32"


# This is what torch.compiler.assume_constant_result does. Calling that would load the compiler, which takes seconds.
convolutions_allow_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for this kind of device. (PyTorch raises an error when asked about "meta".)"""
    return device.type in ("cuda", "cpu") and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Turn autocast off for this kind of device. Where it is off already, PyTorch's context would cost the host 10
    us."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of a matrix product with this tensor: autocast's where autocast is on. float64 stays float64."""
    if autocasts(tensor.device) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(tensor.device.type)
    return tensor.dtype
