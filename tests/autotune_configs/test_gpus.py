"""GPUs by name and by tensor."""

import pytest
import torch

from autotune_configs import gpus
from autotune_configs.gpus import KNOWN, Gpu
from triton_kernels.device import SHARED_MEMORY


def test_called():
    gpu = Gpu.called("nvidia h200")
    assert gpu == Gpu("NVIDIA H200", 90, 132, SHARED_MEMORY[90])
    assert gpu.file_name == "nvidia_h200"


@pytest.mark.parametrize(
    "text, name",
    [
        ("h200", "NVIDIA H200"),
        ("nvidia_h200", "NVIDIA H200"),
        ("L4", "NVIDIA L4"),  # a whole word of one name, a part of another
        ("l40", "NVIDIA L40S"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("A100 40GB", "NVIDIA A100-SXM4-40GB"),
        ("pcie a100", "NVIDIA A100 80GB PCIe"),
        *((name, name) for name in KNOWN),
    ],
)
def test_called_by_a_part_of_its_name(text, name):
    assert Gpu.called(text).name == name


@pytest.mark.parametrize(
    "text, message",
    [
        ("GT 710", "'GT 710' is none of NVIDIA A100-SXM4-40GB, .*NVIDIA GeForce RTX 5090$"),
        (
            "a100",
            "'a100' may be any of NVIDIA A100-SXM4-40GB, NVIDIA A100-SXM4-80GB, NVIDIA A100 80GB PCIe$",
        ),
        ("h100", "'h100' may be any of NVIDIA H100 80GB HBM3, NVIDIA H100 PCIe$"),
        ("", "no GPU is named by ''$"),
    ],
)
def test_a_name_of_no_gpu_or_of_several(text, message):
    with pytest.raises(ValueError, match=message):
        Gpu.called(text)


#: CUDA cores, as NVIDIA's data sheets have them, and how many of them a multiprocessor of the architecture has.
CUDA_CORES = {
    "NVIDIA A100-SXM4-40GB": (6912, 64),
    "NVIDIA A100-SXM4-80GB": (6912, 64),
    "NVIDIA A100 80GB PCIe": (6912, 64),
    "NVIDIA GeForce RTX 3090": (10496, 128),
    "NVIDIA GeForce RTX 4090": (16384, 128),
    "NVIDIA L4": (7424, 128),
    "NVIDIA L40S": (18176, 128),
    "NVIDIA H100 80GB HBM3": (16896, 128),
    "NVIDIA H100 PCIe": (14592, 128),
    "NVIDIA H200": (16896, 128),
    "NVIDIA B200": (18944, 128),
    "NVIDIA GeForce RTX 5090": (21760, 128),
}


def test_known_gpus():
    """Multiprocessors agree with CUDA cores. Shared memory is at least what a block may use on any architecture.

    (CUDA C++ Programming Guide)
    """
    assert list(CUDA_CORES) == list(KNOWN)
    for name, (cores, of_one) in CUDA_CORES.items():
        gpu = Gpu.called(name)
        assert gpu.multiprocessors * of_one == cores, name
        assert gpu.shared_memory >= 99 * 1024, name


def test_without_a_gpu():
    """The stand-in has few multiprocessors, so that persistent kernels loop."""
    assert Gpu.of(torch.device("cpu")) == Gpu("cpu", 90, 3, SHARED_MEMORY[90])


def test_file_name_has_no_folder():
    assert "/" not in Gpu("AMD/NVIDIA X", 90, 1, 1).file_name


def test_float32_products_of_few_rows_or_terms(monkeypatch):
    monkeypatch.setattr(gpus, "FEWEST_FLOAT32_ROWS", 512)
    monkeypatch.setattr(gpus, "SHALLOWEST_FLOAT32", 256)
    monkeypatch.setattr(gpus, "FEWEST_FLOAT32_COLUMNS", 128)
    monkeypatch.setattr(gpus, "FEWEST_FLOAT32_RESULTS", 2**17)
    assert not gpus.float32_by_cublas(512, 256, 256) and not gpus.float32_by_cublas(1024, 128, 256)
    assert gpus.float32_by_cublas(511, 512, 256) and gpus.float32_by_cublas(512, 256, 255)
    assert gpus.float32_by_cublas(2048, 127, 256) and gpus.float32_by_cublas(512, 255, 256)


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ((384, 192, 2**14), False),
        ((192, 1024, 2**13), False),
        ((384, 191, 2**14), True),
        ((192, 1025, 2**14), True),
        ((384, 192, 2**13), True),  # few multiplications
    ],
)
def test_deep_products_of_few_lines(sizes, expected, monkeypatch):
    """Are the kernel's where it divides the terms."""
    monkeypatch.setattr(gpus, "FEWEST_FLOAT32_RESULTS", 2**20)
    monkeypatch.setattr(gpus, "FEWEST_FLOAT32_ROWS", 512)
    assert gpus.float32_by_cublas(*sizes, divides=True) is expected
    assert gpus.float32_by_cublas(*sizes)


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ((1, 16, 2048, 2048), True),
        ((1, 15, 8192, 8192), False),
        ((1, 16, 2048, 2047), False),  # few weights
        ((1, 511, 8192, 512), True),
        ((1, 31, 1024, 2**20), True),
        ((1, 31, 2**20, 511), False),
        ((1, 31, 511, 2**20), False),
        ((1, 32, 2**14, 1024), True),  # in any order
        ((1, 2**14, 32, 1024), True),
        ((1, 2**14, 32, 1023), False),  # few multiplications
        ((1, 2**16, 31, 2**16), False),
        ((1, 127, 120, 2**24), False),
        ((1, 256, 256, 2**14), False),  # few results
        ((1, 512, 512, 2**11), True),
        ((1, 2**16, 128, 64), True),
        ((1, 2**16, 2**10, 31), False),
        ((1, 2**16, 130, 64), False),  # which TMA cannot store
        ((1, 2**16, 130, 512), True),
        ((64, 256, 256, 128), True),
        ((64, 256, 256, 127), False),
        ((95, 512, 64, 512), False),  # may be of a softmax
        ((95, 512, 64, 512, True), True),
        ((96, 512, 64, 512), True),
        ((256, 512, 64, 512), True),
        ((8, 64, 512, 2048), True),
    ],
)
def test_float32_products_in_registers(sizes, expected):
    assert gpus.float32_in_registers(*sizes) is expected
