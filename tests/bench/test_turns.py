"""Turns: one process at a time holds the file's lock."""

import fcntl

import pytest

from bench.turns import turn


def test_the_lock_is_held_meanwhile(tmp_path):
    path = tmp_path / "gpu0"
    with turn(path), open(path) as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(path) as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_lock_is_freed_by_an_error(tmp_path):
    path = tmp_path / "gpu0"
    with pytest.raises(ValueError), turn(path):
        raise ValueError
    with open(path) as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_without_a_file():
    with turn(None):
        pass
