"""The way from a problem to its config: exact entry, nearest entry, heuristic."""

import dataclasses

import pytest
import torch

import autotune_configs
from autotune_configs import lookup
from autotune_configs.heuristics import heuristic_linear_config
from autotune_configs.lookup import linear_config, shipped_table
from triton_kernels.linear import LinearConfig

CPU = torch.device("cpu")
FIRST = LinearConfig(16, 128, 32, num_stages=2)
SECOND = LinearConfig(32, 64, 32, num_stages=2)


def entry(config, m=1024, n=8192, k=8192, kernel="bias", dtype="bfloat16"):
    return {"kernel": kernel, "dtype": dtype, "m": m, "n": n, "k": k, "config": dataclasses.asdict(config)}


@pytest.fixture
def table(monkeypatch):
    """What ships for the device that the tests run on is this list."""
    entries = []
    monkeypatch.setattr(lookup, "shipped_table", lambda name: tuple(entries))
    linear_config.cache_clear()
    yield entries
    linear_config.cache_clear()


def find(M=1024, N=8192, K=8192, group_size=1, kernel="bias", dtype=torch.bfloat16):
    return linear_config(kernel, dtype, M, N, K, group_size, CPU)


def test_exact_entry(table):
    table += [entry(SECOND, m=512), entry(FIRST), entry(SECOND, m=2048)]
    assert find() == FIRST


def test_nearest_entry(table):
    """By doublings: 1500 lies nearer to 2048 than to 1024."""
    table += [entry(FIRST), entry(SECOND, m=2048)]
    assert find(M=1400) == FIRST
    assert find(M=1500) == SECOND
    assert find(M=4096) == SECOND


def test_far_entries_say_nothing(table):
    table += [entry(FIRST)]
    heuristic = heuristic_linear_config(torch.bfloat16, 64, 256, 8192, 1, CPU)
    assert find(M=64, N=256) == heuristic
    assert find(M=0) == heuristic_linear_config(torch.bfloat16, 0, 8192, 8192, 1, CPU)


def test_other_kernels_and_dtypes_do_not_count(table):
    table += [entry(FIRST, kernel="group_norm_hardtanh"), entry(FIRST, dtype="float16")]
    assert find() == heuristic_linear_config(torch.bfloat16, 1024, 8192, 8192, 1, CPU)
    assert find(dtype=torch.float16) == FIRST
    assert find(kernel="group_norm_hardtanh") == FIRST


def test_tiles_hold_groups_where_they_can(table):
    table += [entry(SECOND), entry(FIRST, m=4096)]
    assert find(group_size=64) == SECOND
    assert find(group_size=128) == FIRST, "further away, but it holds the groups"
    assert find(group_size=256).holds_groups_of(256)
    assert find(group_size=48) == SECOND, "no tile holds these"


def test_entries_that_do_not_fit_are_passed_over(table, monkeypatch):
    table += [entry(FIRST)]
    monkeypatch.setattr(lookup, "shared_memory_limit", lambda device: FIRST.shared_memory(2) - 1)
    assert find() == heuristic_linear_config(torch.bfloat16, 1024, 8192, 8192, 1, CPU)


def test_rows_that_descriptors_do_not_take(table):
    """The tables are measured with descriptors: K = 8191 in bfloat16 is read otherwise."""
    table += [entry(FIRST, k=8191)]
    assert find(K=8191) == heuristic_linear_config(torch.bfloat16, 1024, 8192, 8191, 1, CPU)


def test_unknown_gpu_has_no_table():
    assert shipped_table("NVIDIA GeForce GT 710") == ()


def test_public_names():
    assert autotune_configs.__all__ == ["group_norm_config", "linear_config"]
