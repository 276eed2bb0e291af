"""Files that are replaced in one step."""

import os

import pytest

from autotune_configs.files import replace_file


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


def test_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"
