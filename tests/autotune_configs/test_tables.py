"""Tables: the shipped ones whole, the user's safe from damage, and each entry the one that is found at its problem."""

import json
import multiprocessing
import warnings

import pytest
import triton

from autotune_configs import lookup, tables
from autotune_configs.chains import CHAINS, DTYPES, PASSES
from autotune_configs.gpus import Gpu
from autotune_configs.kernels import KERNELS
from tests.autotune_configs.entries import FIRST, GPU, SECOND, entry

SHIPPED = sorted(tables.shipped_folder().glob("*.json"))
by_table = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)


@by_table
def test_shipped_entries(path):
    name, entries = tables.read_strictly(path)
    gpu = Gpu.called(name)
    assert path == tables.shipped_path(gpu)
    problems = [entry.problem for entry in entries]
    assert entries and len(set(problems)) == len(problems), "two entries for one problem"
    for each in entries:
        kernel = KERNELS[each.problem.kernel]
        assert len(each.problem.sizes) == len(kernel.size_names)
        assert each.problem.layout in kernel.layouts
        assert kernel.config_of(each.config, each.problem, gpu), each
        assert each.ratio <= 1.0, "slower than the heuristic's config"
        for name, value in each.config.items():
            assert name in ("num_stages", "strip") or triton.next_power_of_2(value) == value
    assert path.read_text() == tables.render(gpu, list(entries)), "in the order in which it is written"


@by_table
def test_each_entry_is_found_at_its_problem(path, folder):
    name, entries = tables.read_strictly(path)
    for each in entries:
        assert lookup.find(each.problem, Gpu.called(name)).entry == each


@by_table
def test_target_shapes_are_there(path):
    problems = {entry.problem for entry in tables.read(path)}
    for chain in CHAINS.values():
        for dtype in DTYPES:
            assert problems.issuperset(chain.problems(chain.target, dtype, PASSES)), (chain, dtype)


def test_h200_is_shipped():
    assert "nvidia_h200" in {path.stem for path in SHIPPED}


def test_unknown_gpu_has_no_table():
    assert tables.read(tables.shipped_path(Gpu("NVIDIA GeForce GT 710", 35, 1, 49152))) == ()


def test_store_and_read(folder):
    path = tables.user_path(GPU)
    tables.store(path, GPU, entry(FIRST))
    tables.store(path, GPU, entry(SECOND, m=2048))
    tables.store(path, GPU, entry(SECOND))
    assert tables.read(path) == (entry(SECOND), entry(SECOND, m=2048)), "the newer of two for one problem"
    assert [file.suffix for file in folder.iterdir() if file.suffix != ".lock"] == [".json"], "nothing is left behind"


def test_folder_named_by_the_environment(folder, monkeypatch, tmp_path):
    assert tables.user_folder() == folder
    monkeypatch.delenv(tables.FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tables.user_folder() == tmp_path / "normfuse" / "tables"


DAMAGED = {
    "empty": "",
    "cut off": '{"gpu": "NVIDIA H200", "entries": [{"ker',
    "a list": "[]",
    "no entries": '{"gpu": "NVIDIA H200"}',
    "no gpu": '{"entries": []}',
    "another tool's": '{"gpu": "NVIDIA H200", "entries": [{"block_size": 16}]}',
    "negative size": json.dumps({"gpu": "NVIDIA H200", "entries": [{**entry().to_json(), "sizes": [-1, 2, 3, 4]}]}),
    "size in words": json.dumps({"gpu": "NVIDIA H200", "entries": [{**entry().to_json(), "sizes": ["many"]}]}),
    "config in words": json.dumps({"gpu": "NVIDIA H200", "entries": [{**entry().to_json(), "config": {"x": "y"}}]}),
    "no ratio": json.dumps({"gpu": "NVIDIA H200", "entries": [{**entry().to_json(), "ratio": None}]}),
    "not text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_file_is_skipped_with_one_warning(folder, content):
    path = tables.user_path(GPU)
    folder.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(RuntimeWarning, match=f"{path} is skipped"):
        found = lookup.find(entry().problem, GPU)
    assert found.table != str(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lookup.find(entry(m=2048).problem, GPU)


def test_a_damaged_file_is_kept_beside_the_new_table(folder):
    path = tables.user_path(GPU)
    folder.mkdir()
    path.write_text("notes of mine")
    tables.store(path, GPU, entry())
    assert tables.read(path) == (entry(),)
    assert path.with_name(path.name + ".damaged").read_text() == "notes of mine"


def test_a_folder_that_cannot_be_written(folder):
    folder.write_text("a file where the folder should be")
    with pytest.raises(OSError):
        tables.store(tables.user_path(GPU), GPU, entry())


def test_an_interruption_leaves_the_old_table(folder, monkeypatch):
    path = tables.user_path(GPU)
    tables.store(path, GPU, entry())
    monkeypatch.setattr(tables.os, "replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tables.store(path, GPU, entry(SECOND))
    tables.read.cache_clear()
    assert tables.read(path) == (entry(),)
    assert not list(folder.glob("*.partial"))


def _store_many(path, first):
    for m in range(first, first + 20):
        tables.store(path, GPU, entry(m=m))


def test_two_sweeps_at_once_lose_nothing(folder):
    path = tables.user_path(GPU)
    spawn = multiprocessing.get_context("fork")
    processes = [spawn.Process(target=_store_many, args=(path, first)) for first in (1, 101)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert {entry.problem.sizes[0] for entry in tables.read(path)} == {*range(1, 21), *range(101, 121)}
