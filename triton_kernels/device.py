"""What launchers need to know of a tensor's device."""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar

import torch
import triton
import triton.language as tl

from triton_kernels.interpreter import repair_interpreter

#: True where TRITON_INTERPRET=1 was set before triton was imported. Kernels then run on CPU tensors, in numpy.
INTERPRETED = bool(triton.knobs.runtime.interpret)
#: The same for kernels.
IN_INTERPRETER = tl.constexpr(INTERPRETED)
if INTERPRETED:
    repair_interpreter()

#: Persistent kernels launch at most this many programs in the interpreter: so few that each of them loops.
_INTERPRETED_MULTIPROCESSORS = 3
#: Bytes of shared memory one block may use, by architecture (CUDA C++ Programming Guide, compute capabilities).
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
#: The oldest architecture that the kernels are compiled for in the tests.
OLDEST_ARCHITECTURE = 80

_meant: ContextVar[torch.device | None] = ContextVar("_meant", default=None)


@contextlib.contextmanager
def standing_for(device: torch.device | None) -> Iterator[None]:
    """Within this context, this thread's tensors of the "meta" device stand for ones on ``device``, or for none."""
    before = _meant.set(device)
    try:
        yield
    finally:
        _meant.reset(before)


def meant(device: torch.device) -> torch.device:
    """The device, or the one that "meta" stands for."""
    return _meant.get() or device if device.type == "meta" else device


@functools.cache
def _cuda_properties(index: int):
    return torch.cuda.get_device_properties(index)


def multiprocessor_count(device: torch.device) -> int:
    """Number of multiprocessors. For tensors that are not on a GPU (interpreter, offline compilation), a fixed
    number."""
    device = meant(device)
    if device.type == "cuda":
        return _cuda_properties(device.index).multi_processor_count
    return _INTERPRETED_MULTIPROCESSORS


def device_name(device: torch.device) -> str:
    """The GPU's name, or the device's type where there is no GPU."""
    device = meant(device)
    return _cuda_properties(device.index).name if device.type == "cuda" else device.type


def shared_memory_limit(device: torch.device) -> int:
    device = meant(device)
    if device.type == "cuda":
        return _cuda_properties(device.index).shared_memory_per_block_optin
    return SHARED_MEMORY[architecture(device)]


def architecture(device: torch.device) -> int:
    """Compute capability as one number: 90 for 9.0. In the interpreter it is 90."""
    device = meant(device)
    if device.type == "cuda":
        properties = _cuda_properties(device.index)
        return 10 * properties.major + properties.minor
    return 90 if INTERPRETED else triton.runtime.driver.active.get_current_target().arch


@functools.cache
def why_unsupported(index: int) -> str:
    """Why the kernels do not run on a CUDA device, in a sentence, or nothing. Without a GPU there is nothing to say: a
    compiler's tensors may still be of one."""
    if not torch.cuda.is_available():
        return ""
    properties = _cuda_properties(index)
    needed = "the kernels need an NVIDIA GPU of compute capability 8.0 or newer"
    if torch.version.hip:
        return f"{needed}, and cuda:{index} is {properties.name}"
    if 10 * properties.major + properties.minor < OLDEST_ARCHITECTURE:
        return f"{needed}, and cuda:{index}, {properties.name}, has {properties.major}.{properties.minor}"
    return ""


def has_tensor_descriptors(device: torch.device) -> bool:
    """Whether the hardware has TMA for tensor descriptors."""
    return architecture(device) >= 90
