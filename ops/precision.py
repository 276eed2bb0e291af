"""Where and in which precision a call runs: the kernels or the reference, PyTorch's float32 setting, autocast."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import autotune_configs
from triton_kernels.device import INTERPRETED
from triton_kernels.hopper import runs_hopper_kernels
from triton_kernels.linear import FLOAT32_INPUT_PRECISION as FLOAT32_INPUT_PRECISION

#: From this depth and these rows on float32 products are the kernel's; in the interpreter, all are.
SHALLOWEST_FLOAT32, FEWEST_FLOAT32_ROWS = (0, 0) if INTERPRETED else (512, 512)
#: At TF32's precision, splitting the operands pays from these rows and columns on and this many multiplications (H200:
#: 0.99 of the library's time at 1024 x 4096 x 4096, 0.88 at 4096 x 2048 x 2048, 1.2 at 512 x 8192 x 8192).
FEWEST_TF32_LINES, FEWEST_TF32_PRODUCTS = 1024, 2**34


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Whether kernels take it: float32, bfloat16 or float16, on a GPU or, where Triton interprets, the CPU."""
    on_device = tensor.device.type == "cuda" or (INTERPRETED and tensor.device.type == "cpu")
    return on_device and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)


def float32_parts() -> int:
    """Of how many float16 parts float32 operands are made (``triton_kernels.float32_split``): 1 is as good as TF32."""
    return 1 if torch.backends.cuda.matmul.fp32_precision == "tf32" else 2


def splits_float32(device: torch.device) -> bool:
    """Whether float32 is multiplied as float16 parts: on Hopper."""
    return runs_hopper_kernels(device)


def library_multiplies(input: torch.Tensor, columns: int, *biases: torch.Tensor | None) -> bool:
    """Whether products of input [M, K] and a matrix [K, columns], with biases to be added, are the library's.

    Those of 16-bit numbers, where its tiles come out so much more even that it is faster; but not where a bias is
    wider, as under autocast: the library would round it, and PyTorch, which adds L94's second one after its product,
    does not. float32 ones, in three cases.

    Where few terms are added: tensor cores are wrong by about 2e-7 at any depth, the library's sum of float32 products
    by less than that below some hundred terms (6e-7 at 1024). For few rows, where the library adds a product up in
    several parts, and so more exactly (9e-8 in a bias's gradient at 16 x 2048 x 2048), and is faster too. And where
    PyTorch is set to use TF32, unless operands are split and the product is large enough for that to pay: the tensor
    cores cut float32 off to TF32 where the library rounds it, 5.6e-4 against 2.9e-4 of error at depth 8192 (H200).
    """
    rows, depth = input.shape
    if input.dtype != torch.float32:
        are_alike = all(bias is None or bias.dtype == input.dtype for bias in biases)
        return are_alike and autotune_configs.prefers_cublas(rows, columns, depth, input.device)
    if rows < FEWEST_FLOAT32_ROWS or depth < SHALLOWEST_FLOAT32:
        return True
    if float32_parts() == 2:
        return False
    pays = min(rows, columns) >= FEWEST_TF32_LINES and rows * columns * depth >= FEWEST_TF32_PRODUCTS
    return not (pays and splits_float32(input.device))


def library_adds_bias(input: torch.Tensor, columns: int) -> bool:
    """Whether a bias is to be added by the library's product of input [M, K] and a matrix [K, columns] itself.

    Its float32 products (not those of TF32) of some hundred rows are slower for it, and less exact, as they are then
    not added up in parts: 352 us for 209 at 64 x 8192 x 8192, where the product and an addition take 214, and 9.7e-7 of
    error for 5.2e-7 (H200). With fewer rows it may be the product without a bias that is less exact: 3.7e-7 for 2.1e-7
    at 16 x 8192 x 8192.
    """
    rows, weights = input.shape[0], columns * input.shape[1]
    is_slower = 64 <= rows < 512 and weights >= 2**20
    return input.dtype != torch.float32 or float32_parts() == 1 or not is_slower


def convolutions_allow_tf32() -> bool:
    """Whether PyTorch, as it is set, may convolve float32 images as TF32: where cuDNN convolves and is set to.

    ``torch.backends.cudnn.allow_tf32`` sets what is read here, but raises when read where RNNs are set otherwise.
    torch.compile keeps the answer that it got while it compiled.
    """
    cudnn: Any = torch.backends.cudnn  # whose annotations lack conv
    return cudnn.enabled and cudnn.conv.fp32_precision == "tf32"


# As torch.compiler.assume_constant_result would mark it, for the seconds that it takes to load the compiler.
convolutions_allow_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def float32_settings() -> tuple[str, bool]:
    """All that float32 work depends on of how PyTorch is set."""
    return torch.backends.cuda.matmul.fp32_precision, convolutions_allow_tf32()


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for this kind of device ("meta" has none and would raise)."""
    return device.type in ("cuda", "cpu") and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Turns autocast off for this kind of device; making PyTorch's context where it is off takes the host 10 us."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype a matrix product of this tensor runs in: autocast's where it is on (it leaves float64 alone)."""
    if autocasts(tensor.device) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(tensor.device.type)
    return tensor.dtype


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd will ask for a gradient of any of these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
