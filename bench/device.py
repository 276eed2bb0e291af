"""Where the bench runs, and what it says about that."""

import os
import subprocess
from pathlib import Path

import torch

from bench.results import now
from bench.schema import Run

#: What a run without one ends with.
NO_GPU = "No GPU: the kernels ran in Triton's interpreter. Times need a GPU."

_ROOT = Path(__file__).parents[1]
#: The commit's full hash, and whether the tree differs from it.
_DESCRIBE = ("git", "-C", str(_ROOT), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


def has_gpu() -> bool:
    """Whether there is a GPU and the kernels are to run there."""
    return torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") in ("", "0")


def device_to_measure() -> torch.device:
    """The GPU, or the CPU with Triton told to interpret. Triton reads that when it is imported, so call this first."""
    if has_gpu():
        return torch.device("cuda")
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, Triton's interpreter"


def current_run(device: torch.device) -> Run:
    """With what is measured now."""
    import triton  # not before device_to_measure has decided whether it interprets

    driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return Run(
        date=now(),
        # An installed package may lie within another project's repository.
        commit=_output_of(*_DESCRIBE) if (_ROOT / ".git").exists() else None,
        driver=_output_of(*driver) if device.type == "cuda" else None,
        torch=torch.__version__,
        triton=triton.__version__,
    )


def _output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
