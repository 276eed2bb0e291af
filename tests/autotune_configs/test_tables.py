"""Tables: the shipped ones are complete, the user's own are safe, and each entry is found at its problem."""

import errno
import fcntl
import json
import multiprocessing
import os
import pwd
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import triton

from autotune_configs import files, gpus, lookup, tables
from autotune_configs.chains import CHAINS, DTYPES, PASSES
from autotune_configs.gpus import Gpu
from autotune_configs.kernels import KERNELS
from tests.autotune_configs.entries import FIRST, GPU, SECOND, entry

SHIPPED = sorted(tables.shipped_folder().glob("*.json"))
by_table = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)


@by_table
def test_shipped_entries(path):
    gpu, entries = tables.read_strictly(path)
    assert gpu == Gpu.called(gpu.name)
    assert path == tables.shipped_path(gpu)
    problems = [entry.problem for entry in entries]
    assert entries and len(set(problems)) == len(problems), "two entries for one problem"
    for each in entries:
        kernel = KERNELS[each.problem.kernel]
        assert len(each.problem.sizes) == len(kernel.size_names)
        assert each.problem.layout in kernel.layouts
        config = kernel.config_of(each.config, each.problem, gpu)
        assert config, each
        assert each.ratio <= 1.0, "slower than the heuristic's config"
        assert each.ratio < 1.0 or config == kernel.heuristic(each.problem, gpu), (
            "measured before the heuristic changed"
        )
        for name, value in each.config.items():
            assert name in ("num_stages", "strip", "programs") or triton.next_power_of_2(value) == value
    assert path.read_text() == tables.render(gpu, list(entries)), "in the order in which it is written"


@by_table
def test_each_entry_is_found_at_its_problem(path, folder):
    gpu, entries = tables.read_strictly(path)
    for each in entries:
        assert lookup.find(each.problem, gpu).entry == each


@by_table
def test_target_shapes_are_there(path, monkeypatch):
    """And nothing that the GPU never asks for: products of float32 numbers that it splits."""
    monkeypatch.setattr(gpus, "takes_hopper_kernels", lambda architecture: architecture == 90)
    gpu, entries = tables.read_strictly(path)
    problems = {entry.problem for entry in entries}
    assert not gpu.splits_float32 or all(each.precision is None for each in problems)
    for chain in CHAINS.values():
        for dtype in DTYPES:
            missing = set(chain.problems(chain.target, dtype, PASSES, gpu)) - problems
            # The sums of float32 images, in one launch since, were not measured on an H200: an H100's entries serve.
            unmeasured = (gpu.name, chain, dtype) == ("NVIDIA H200", CHAINS["l19"], "float32")
            assert {each.kernel for each in missing} == ({"image_sums"} if unmeasured else set()), (chain, dtype)


def test_what_is_shipped():
    assert {"nvidia_h100_80gb_hbm3", "nvidia_h200"} <= {path.stem for path in SHIPPED}


def test_unknown_gpu_has_no_table():
    unknown = Gpu("NVIDIA GeForce GT 710", 35, 1, 49152)
    assert tables.read(tables.shipped_path(unknown), unknown) == ()


def test_store_and_read(folder):
    path = tables.user_path(GPU)
    tables.store(path, GPU, entry(FIRST))
    tables.store(path, GPU, entry(SECOND, m=2048))
    tables.store(path, GPU, entry(SECOND))
    assert tables.read(path, GPU) == (entry(SECOND), entry(SECOND, m=2048)), "the newer of two for one problem"
    assert [file.suffix for file in folder.iterdir() if file.suffix != ".lock"] == [".json"], "nothing is left behind"


def test_folder_named_by_the_environment(folder, monkeypatch, tmp_path):
    assert tables.user_folder() == folder
    monkeypatch.delenv(tables.FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tables.user_folder() == tmp_path / "normfuse" / "tables"
    monkeypatch.delenv("XDG_CACHE_HOME")
    with_platformdirs = tables.user_folder()
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert tables.user_folder() == with_platformdirs == Path.home() / ".cache" / "normfuse" / "tables"


def table_of(**changes):
    return json.dumps({"gpu": asdict(GPU), "entries": [{**entry().to_json(), **changes}]})


DAMAGED = {
    "empty": "",
    "cut off": '{"gpu": {"name": "NVIDIA H200"}, "entries": [{"ker',
    "a list": "[]",
    "deep": "[" * 100000,
    "no entries": json.dumps({"gpu": asdict(GPU)}),
    "no gpu": '{"entries": []}',
    "a name for a gpu": '{"gpu": "NVIDIA H200", "entries": []}',
    "another GPU's": json.dumps({"gpu": {**asdict(GPU), "name": "NVIDIA L4"}, "entries": []}),
    "another tool's": json.dumps({"gpu": asdict(GPU), "entries": [{"block_size": 16}]}),
    "negative size": table_of(sizes=[-1, 2, 3, 4]),
    "size in words": table_of(sizes=["many"]),
    "config in words": table_of(config={"x": "y"}),
    "huge config": table_of(config={"block_m": 10**30}),
    "no ratio": table_of(ratio=None),
    "ratio of nothing": table_of(ratio=float("nan")),
    "ratio of 400 digits": table_of(ratio=10**400),
    "ratio below zero": table_of(ratio=-1.0),
    "yes for a ratio": table_of(ratio=True),
    "time without an end": table_of(microseconds=float("inf")),
    "number of 5000 digits": '{"gpu": ' + "9" * 5000 + "}",
    "yes for a size": table_of(sizes=[True, 2, 3, 4]),
    "no multiprocessors": json.dumps({"gpu": {**asdict(GPU), "multiprocessors": 0}, "entries": []}),
    "list for a layout": table_of(layout=["x"]),
    "dict for a precision": table_of(precision={}),
    "not text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_file_is_skipped_with_one_warning(folder, content):
    path = tables.user_path(GPU)
    folder.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(RuntimeWarning, match=f"{path} is skipped") as told:
        found = lookup.find(entry().problem, GPU)
        lookup.forget()
        lookup.find(entry(m=2048).problem, GPU)
    assert found.table != str(path)
    assert len(told) == 1, "also where it is read again"
    assert len(str(told[0].message)) < 1000


def test_damaged_files_are_kept_beside_the_new_table(folder):
    """Each damaged file is kept, and the user is told."""
    path = tables.user_path(GPU)
    folder.mkdir()
    others = json.dumps({"gpu": {**asdict(GPU), "name": "NVIDIA L4"}, "entries": [entry(SECOND, m=2048).to_json()]})
    for number, content in enumerate(("notes of mine", "other notes", others)):
        path.write_text(content)
        tables._told.clear()
        with pytest.warns(RuntimeWarning, match=f"{path} is kept as "):
            tables.store(path, GPU, entry())
        assert tables.read(path, GPU) == (entry(),)
        assert path.with_name(f"{path.name}.damaged{number or ''}").read_text() == content


def test_a_damaged_file_is_kept_where_warnings_are_errors(folder):
    """The entry is stored even so."""
    path = tables.user_path(GPU)
    folder.mkdir()
    path.write_text("notes of mine")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="is kept as"):
            tables.store(path, GPU, entry())
    assert tables.read(path, GPU) == (entry(),)
    assert path.with_name(f"{path.name}.damaged").read_text() == "notes of mine"


def make_link_to_a_folder_that_is_gone(path):
    path.parent.rmdir()
    path.parent.symlink_to("unmounted")


def make_file_in_place_of_the_folder(path):
    path.parent.rmdir()
    path.parent.write_text("notes of mine")


#: What cannot be read, though it may be a table, or hide one.
UNREADABLE = {
    "folder": lambda path: (path / "kept").mkdir(parents=True),
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("unmounted/table.json"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "folder that is a link to nothing": make_link_to_a_folder_that_is_gone,
    "folder that is a file": make_file_in_place_of_the_folder,
    "larger than any table": lambda path: path.write_text(table_of() + " " * tables._LARGEST_TABLE),
}


@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_is_told_once_and_left_alone(folder, make):
    path = tables.user_path(GPU)
    folder.mkdir()
    make(path)
    with pytest.warns(RuntimeWarning, match=f"{path} is skipped: ") as told:
        for _ in range(2):
            assert lookup.find(entry().problem, GPU).table != str(path)
            lookup.forget()
    assert len(told) == 1
    before = os.lstat(path) if folder.is_dir() else os.lstat(folder)
    with pytest.raises(OSError):
        tables.store(path, GPU, entry())
    after = os.lstat(path) if folder.is_dir() else os.lstat(folder)
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert not (folder.parent / "unmounted").exists() and not (folder / "unmounted").exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE], ids=errno.errorcode.get)
def test_a_read_error_moves_and_loses_nothing(folder, monkeypatch, number):
    path = tables.user_path(GPU)
    tables.store(path, GPU, entry())

    def fail(self, *arguments, **options):
        raise OSError(number, os.strerror(number), str(self))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", fail)
        with pytest.raises(OSError, match=os.strerror(number)):
            tables.store(path, GPU, entry(SECOND, m=2048))
        with pytest.warns(RuntimeWarning, match=f"{path} is skipped: {os.strerror(number)}"):
            assert tables.read(path, GPU) == ()
    assert tables.read(path, GPU) == (entry(),)
    assert not list(folder.glob("*.damaged*"))


@pytest.mark.parametrize("named", ["~nosuchuser/x", "~/x", None])
def test_without_a_home_folder(folder, monkeypatch, named):
    """Shipped tables and the heuristic are used. The one warning names the variable."""
    monkeypatch.setenv(tables.FOLDER_VARIABLE, named or "")
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)

    def fail(user):
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", fail)
    monkeypatch.setattr(pwd, "getpwnam", fail)
    for platformdirs in (sys.modules.get("platformdirs"), None):
        if platformdirs is None:
            monkeypatch.setitem(sys.modules, "platformdirs", None)
        tables._told.clear()
        with pytest.warns(RuntimeWarning, match=f"{named or '.cache'}.*{tables.FOLDER_VARIABLE}") as told:
            for _ in range(2):
                lookup.forget()
                found = lookup.find(tables.read_strictly(tables.shipped_path(GPU))[1][0].problem, GPU)
                assert found.is_of(GPU)
        assert len(told) == 1
        with pytest.raises(OSError, match=tables.FOLDER_VARIABLE):
            tables.user_path(GPU)


def test_a_table_behind_a_link_stays_there(folder, tmp_path):
    path, elsewhere = tables.user_path(GPU), tmp_path / "elsewhere" / "mine.json"
    tables.store(elsewhere, GPU, entry())
    folder.mkdir()
    path.symlink_to(elsewhere)
    tables.store(path, GPU, entry(SECOND, m=2048))
    assert path.is_symlink()
    assert tables.read(elsewhere, GPU) == (entry(), entry(SECOND, m=2048))
    elsewhere.write_text("notes of mine")
    with pytest.warns(RuntimeWarning, match=f"{path} is ") as told:
        assert tables.read(path, GPU) == ()
        tables.store(path, GPU, entry())
    assert len(told) == 1


def test_a_table_with_a_byte_order_mark(folder):
    """Some editors write one."""
    path = tables.user_path(GPU)
    folder.mkdir()
    path.write_text(table_of(), encoding="utf-8-sig")
    assert lookup.find(entry().problem, GPU).entry == entry()


def test_a_partial_file_that_was_left_behind(folder):
    """A killed process leaves one. They do not pile up, and even a FIFO in its place makes nobody wait."""
    path = tables.user_path(GPU)
    tables.store(path, GPU, entry())
    os.mkfifo(path.with_name(path.name + ".partial"))
    tables.store(path, GPU, entry(SECOND, m=2048))
    assert tables.read(path, GPU) == (entry(), entry(SECOND, m=2048))
    assert not list(folder.glob("*.partial"))


def test_a_table_does_not_grow_beyond_what_is_read(folder, monkeypatch):
    path = tables.user_path(GPU)
    tables.store(path, GPU, entry())
    monkeypatch.setattr(tables, "_LARGEST_TABLE", path.stat().st_size + 100)
    with pytest.raises(OSError, match="larger than any table would be"):
        tables.store(path, GPU, entry(m=2048))
    assert tables.read(path, GPU) == (entry(),)


def test_shipped_tables_that_cannot_be_listed(folder, monkeypatch):
    """For example because of too many open files."""

    def fail(self, pattern):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(self))

    monkeypatch.setattr(Path, "glob", fail)
    kin = Gpu.called("NVIDIA H100 PCIe")
    with pytest.warns(RuntimeWarning, match=f"{tables.shipped_folder()} is skipped: Too many open files"):
        assert lookup.find(entry().problem, kin).entry is None


def test_a_full_disk_leaves_the_old_table(folder, monkeypatch):
    path = tables.user_path(GPU)
    tables.store(path, GPU, entry())

    def fail(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tables.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        tables.store(path, GPU, entry(SECOND))
    assert tables.read(path, GPU) == (entry(),)
    assert not list(folder.glob("*.partial"))


def test_a_lock_that_is_not_let_go(folder, monkeypatch):
    """A stopped process holds it: whoever stores gives up."""
    path = tables.user_path(GPU)
    tables.store(path, GPU, entry())
    monkeypatch.setattr(files, "_PATIENCE", 0.1)
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=f"{path}.lock"):
            tables.store(path, GPU, entry(SECOND))
    tables.store(path, GPU, entry(SECOND))
    assert tables.read(path, GPU) == (entry(SECOND),)


def test_a_lock_that_is_no_file(folder):
    path = tables.user_path(GPU)
    folder.mkdir()
    os.mkfifo(path.with_name(path.name + ".lock"))
    tables.store(path, GPU, entry())
    assert tables.read(path, GPU) == (entry(),)


def test_a_folder_that_cannot_be_written(folder):
    folder.write_text("a file where the folder should be")
    with pytest.raises(OSError):
        tables.store(tables.user_path(GPU), GPU, entry())


#: In a sound table: entries that nothing can match, or that no kernel could run with.
STRANGE = {
    "unknown kernel": {"kernel": "softmax"},
    "unknown dtype": {"dtype": "int8"},
    "unknown layout": {"layout": "strided"},
    "too few sizes": {"sizes": [1024, 8192]},
    "no power of two": {"config": {**entry().config, "block_m": 48}},
    "too many warps": {"config": {**entry().config, "num_warps": 64}},
    "three strips": {"config": {**entry().config, "epilogue_strips": 3}},
    "another setting": {"config": {**entry().config, "swizzle": 1}},
}


@pytest.mark.parametrize("changes", STRANGE.values(), ids=STRANGE)
def test_strange_entries_are_passed_over(folder, changes, monkeypatch):
    monkeypatch.setattr(tables, "shipped_folder", lambda: folder / "none")
    folder.mkdir()
    tables.user_path(GPU).write_text(table_of(**changes))
    assert lookup.find(entry().problem, GPU).entry is None
    tables.store(tables.user_path(GPU), GPU, entry(m=2048))
    lookup.forget()
    assert lookup.find(entry().problem, GPU).entry == entry(m=2048), "the others are not"


def test_a_folder_with_a_name_too_long(folder, monkeypatch):
    monkeypatch.setenv(tables.FOLDER_VARIABLE, "/tmp/" + 300 * "n")
    with pytest.warns(RuntimeWarning, match="is skipped"):
        lookup.find(entry().problem, GPU)


def test_an_interruption_leaves_the_old_table(folder, monkeypatch):
    path = tables.user_path(GPU)
    tables.store(path, GPU, entry())
    monkeypatch.setattr(tables.os, "replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tables.store(path, GPU, entry(SECOND))
    assert tables.read(path, GPU) == (entry(),)
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
    assert {entry.problem.sizes[0] for entry in tables.read(path, GPU)} == {*range(1, 21), *range(101, 121)}
