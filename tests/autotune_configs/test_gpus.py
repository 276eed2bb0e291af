"""GPUs by name and by tensor."""

import pytest
import torch

from autotune_configs.gpus import Gpu
from triton_kernels.device import SHARED_MEMORY


def test_called():
    gpu = Gpu.called("nvidia h200")
    assert gpu == Gpu("NVIDIA H200", 90, 132, SHARED_MEMORY[90])
    assert gpu.file_name == "nvidia_h200"


def test_unknown_name():
    with pytest.raises(ValueError, match="unknown GPU 'GT 710': it must be one of 'NVIDIA A100"):
        Gpu.called("GT 710")


def test_without_a_gpu():
    assert Gpu.of(torch.device("cpu")).name == "cpu"


def test_file_name_has_no_folder():
    assert "/" not in Gpu("AMD/NVIDIA X", 90, 1, 1).file_name
