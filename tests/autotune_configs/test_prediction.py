"""Predicted times of products: beside those measured on an H200, and the choice of cuBLAS."""

import pytest
import torch

import autotune_configs
from autotune_configs import gpus
from autotune_configs.prediction import cublas_is_faster, product_seconds
from tests.autotune_configs.entries import GPU

PROCESSORS = GPU.multiprocessors


@pytest.mark.parametrize(
    "tile, sizes, microseconds",
    [
        ((128, 256), (1024, 8192, 8192), 177),
        ((128, 128), (256, 8192, 8192), 59),
        ((128, 256), (1024, 4096, 4096), 54),
        ((64, 128), (256, 4096, 4096), 26),
        ((128, 64), (512, 5120, 5120), 71),
        ((128, 256), (640, 3072, 4096), 50),
        ((128, 128), (256, 9216, 8192), 112),
    ],
)
def test_what_was_measured(tile, sizes, microseconds):
    """Products of L94, or with a bias, in bfloat16."""
    assert 1e6 * product_seconds(tile, *sizes, PROCESSORS) == pytest.approx(microseconds, rel=0.25)


def test_no_faster_than_memory():
    assert product_seconds((16, 64), 16, 8192, 8192, PROCESSORS) > 8192 * 8192 * 2 / 4.1e12


def test_a_last_tile_takes_another_wave():
    even, odd = (product_seconds((128, 256), 512, 64 * tiles, 8192, PROCESSORS) for tiles in (132, 136))
    assert odd > 1.9 * even


@pytest.mark.parametrize(
    "sizes, is_faster",
    [
        ((1024, 8192, 8192), False),
        ((4096, 16384, 16384), False),
        ((1, 8192, 8192), False),
        ((256, 4096, 4096), False),
        ((1024, 2048, 2048), False),
        ((256, 8192, 8192), True),
        ((512, 5120, 5120), True),
        ((256, 9216, 8192), True),
        ((0, 8192, 8192), False),
    ],
)
def test_who_computes_the_product(sizes, is_faster, monkeypatch):
    """The choice is made on Hopper, where it was measured."""
    assert cublas_is_faster(*sizes, PROCESSORS) is is_faster
    cpu = torch.device("cpu")
    assert not autotune_configs.prefers_cublas(*sizes, cpu)
    monkeypatch.setattr(gpus.Gpu, "of", lambda device: GPU)
    monkeypatch.setattr(gpus, "takes_hopper_kernels", lambda architecture: architecture == 90)
    assert autotune_configs.prefers_cublas(*sizes, cpu) is is_faster
