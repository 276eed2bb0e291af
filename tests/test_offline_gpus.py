"""Promise: the table of GPUs in docs/limits.md says what each known GPU gets."""

from pathlib import Path

import pytest
import torch

from autotune_configs import tables
from autotune_configs.chains import LINEAR_TARGET
from autotune_configs.gpus import KNOWN, Gpu
from autotune_configs.offline import compile_launches
from ops import direct_convolution
from tests.test_offline_compilation import Gemm
from tests.test_offline_compilation_images import GEOMETRY, images
from triton_kernels import chains

pytestmark = pytest.mark.offline

ROOT = Path(__file__).parents[1]
#: What multiplies, by its instruction in PTX.
INSTRUCTIONS = ("wgmma", "tcgen05.mma", "mma.sync")


def rows():
    """Each row's cells, of the table that begins with the GPUs."""
    lines = (ROOT / "docs/limits.md").read_text().partition("| GPU | capability |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()[2:]]


def test_every_known_gpu_is_in_one_row():
    listed = [name for names, *_ in rows() for name in names.split(", ")]
    assert [Gpu.called(name).name for name in listed] == list(KNOWN)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[1])
def test_what_a_gpu_gets(row, monkeypatch):
    names, capability, products, float32_products, convolutions, configs = row
    for gpu in map(Gpu.called, names.split(", ")):
        arch = gpu.architecture
        assert f"{arch // 10}.{arch % 10}" == capability
        shipped = [path.stem for path, _ in tables.searched(gpu) if path.parent == tables.shipped_folder()]
        assert configs == ("tables" if shipped else "heuristic")
    monkeypatch.setattr(tables, "searched", lambda gpu: [])
    taken = []

    def convolve():
        weight = torch.empty(64, 64, 3, 3, dtype=torch.bfloat16, device="meta")
        taken.append(direct_convolution.takes(images(torch.bfloat16), weight, GEOMETRY, True))

    compile_launches(convolve, arch)
    assert convolutions == ("Gluon, or cuDNN and passes" if taken[0] else "cuDNN and passes")
    assert instruction(torch.bfloat16, arch) in products
    if gpu.splits_float32:
        assert float32_products == "split into float16, `wgmma`"
    else:
        assert float32_products == f"three of TF32, `{instruction(torch.float32, arch)}`"


def instruction(dtype, arch):
    """That of the product of L30's target size in the heuristic's tiles, which fit."""
    (kernel,) = compile_launches(Gemm(chains.LINEAR, dtype, *LINEAR_TARGET).launch, arch)
    assert kernel.fits
    return next(each for each in INSTRUCTIONS if each in kernel.ptx)
