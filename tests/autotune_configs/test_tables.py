"""The shipped tables: whole, and each entry the one that is found at its problem."""

import json
from importlib import resources

import pytest
import torch
import triton

from autotune_configs import lookup
from autotune_configs.lookup import linear_config, shipped_table
from triton_kernels.device import SHARED_MEMORY
from triton_kernels.linear import LinearConfig

#: GPU's name as its driver gives it, and its architecture, of each table.
GPUS = {"nvidia_h200": ("NVIDIA H200", 90)}
KERNELS = {"bias", "hardtanh_mish_group_norm", "group_norm_hardtanh", "group_norm_row_minimum"}
TABLES = sorted(
    file.name.removesuffix(".json")
    for file in (resources.files("autotune_configs") / "tables").iterdir()
    if file.name.endswith(".json")
)


@pytest.mark.parametrize("name", TABLES)
def test_entries(name):
    gpu, arch = GPUS[name]
    entries = shipped_table(gpu)
    assert entries
    problems = [(entry["kernel"], entry["dtype"], entry["m"], entry["n"], entry["k"]) for entry in entries]
    assert len(set(problems)) == len(problems), "two entries for one problem"
    for entry in entries:
        assert set(entry) >= {"kernel", "dtype", "m", "n", "k", "config"}
        assert entry["kernel"] in KERNELS
        config, dtype = LinearConfig(**entry["config"]), getattr(torch, entry["dtype"])
        assert config.shared_memory(dtype.itemsize) <= SHARED_MEMORY[arch]
        for size in (config.block_m, config.block_n, config.block_k, config.num_warps, config.epilogue_strips):
            assert triton.next_power_of_2(size) == size
        assert entry["k"] * dtype.itemsize % 16 == 0, "never found: tables are for operands that descriptors take"


@pytest.mark.parametrize("name", TABLES)
def test_each_entry_is_found_at_its_problem(name, monkeypatch):
    gpu, arch = GPUS[name]
    monkeypatch.setattr(lookup, "device_name", lambda device: gpu)
    monkeypatch.setattr(lookup, "shared_memory_limit", lambda device: SHARED_MEMORY[arch])
    linear_config.cache_clear()
    for entry in shipped_table(gpu):
        dtype = getattr(torch, entry["dtype"])
        found = linear_config(entry["kernel"], dtype, entry["m"], entry["n"], entry["k"], 1, torch.device("cpu"))
        assert found == LinearConfig(**entry["config"]), entry
    linear_config.cache_clear()


def test_tables_are_packaged():
    """``python -m json.tool`` reads them, and the package brings them."""
    assert TABLES == sorted(GPUS)
    for name in TABLES:
        json.loads((resources.files("autotune_configs") / "tables" / f"{name}.json").read_text())
