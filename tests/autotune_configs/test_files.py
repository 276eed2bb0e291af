"""Files that are replaced in one step, and locks beside them."""

import contextlib
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from autotune_configs import files
from autotune_configs.files import locked, replace_file


def test_new_folders(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    replace_file(path, b"content")
    assert path.read_bytes() == b"content"
    assert list(path.parent.iterdir()) == [path]


def test_old_content_until_the_new_is_whole(tmp_path, monkeypatch):
    """The file itself is never opened for writing."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    seen = []
    replace = os.replace

    def watched(source, target):
        seen.append((source.read_bytes(), target.read_bytes()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    replace_file(path, b"new")
    assert seen == [(b"new", b"old")] and path.read_bytes() == b"new"


def test_a_link_stays_one(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    replace_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_only_files_are_replaced(make, tmp_path):
    make(tmp_path / "other")
    before = (tmp_path / "other").stat()
    with pytest.raises(OSError, match="no regular file|Is a directory"):
        replace_file(tmp_path / "other", b"new")
    assert (tmp_path / "other").stat().st_ino == before.st_ino and len(list(tmp_path.iterdir())) == 1


def test_a_lock_that_cannot_be_made():
    """It is said at once, and not that another process holds it."""
    with pytest.raises(FileNotFoundError), locked(Path("/proc/table")):
        pass


def test_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"


def _hold(path, is_held):
    with locked(path):
        is_held.set()
        time.sleep(60)


@contextlib.contextmanager
def _held_by_another_process(path):
    fork = multiprocessing.get_context("fork")
    is_held = fork.Event()
    process = fork.Process(target=_hold, args=(path, is_held))
    process.start()
    assert is_held.wait(60)
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("patience", [None, 0.1, 0, -5.0, -float("inf")])
def test_patience_ends(tmp_path, monkeypatch, patience):
    """Also where it had ended before."""
    monkeypatch.setattr(files, "_PATIENCE", 0.1)
    path = tmp_path / "new" / "folder" / "table.json"
    with _held_by_another_process(path):
        with pytest.raises(TimeoutError, match=f"another process holds .*{path}.lock") as caught:
            with locked(path, patience):
                pass
        assert caught.value.filename == f"{path}.lock"
    with locked(path, patience):
        pass


@pytest.mark.parametrize("patience", [None, float("inf")])
def test_a_lock_ends_with_its_process(tmp_path, patience):
    """However that ends."""
    with _held_by_another_process(tmp_path / "table.json") as process:
        process.kill()
        with locked(tmp_path / "table.json", patience):
            pass


def _sleep_once(has_begun):
    has_begun.set()
    time.sleep(60)


def test_a_child_does_not_keep_the_lock(tmp_path):
    """Not even one that was forked meanwhile."""
    fork = multiprocessing.get_context("fork")
    has_begun = fork.Event()
    child = fork.Process(target=_sleep_once, args=(has_begun,))
    with locked(tmp_path / "table.json"):
        child.start()
        assert has_begun.wait(60)
    with _held_by_another_process(tmp_path / "table.json"):
        pass
    child.kill()
    child.join()


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir],
    ids=["FIFO", "link to a device", "folder"],
)
def test_a_lock_that_is_no_file_makes_nobody_wait(tmp_path, make):
    make(tmp_path / "table.json.lock")
    with contextlib.suppress(OSError), locked(tmp_path / "table.json"):
        pass


def test_a_lock_in_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("a file where the folder should be")
    with pytest.raises(OSError, match=str(tmp_path / "file")), locked(tmp_path / "file" / "table.json"):
        pass
