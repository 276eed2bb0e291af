"""Merging tables: which of two entries for one problem wins, and what is counted."""

from collections import Counter
from dataclasses import replace

import pytest
import triton

from autotune_configs import lookup, sharing, tables
from autotune_configs.sharing import merge
from tests.autotune_configs.entries import FIRST, GPU, SECOND, entry

INSTALLED = triton.__version__
KEPT, REPLACED = Counter(kept=1), Counter(replaced=1)


@pytest.mark.parametrize(
    "own, other, merged",
    [
        ((INSTALLED, 0.9), (INSTALLED, 0.8), REPLACED),
        ((INSTALLED, 0.8), (INSTALLED, 0.9), KEPT),
        ((INSTALLED, 0.9), (INSTALLED, 0.9), KEPT),
        ((INSTALLED, 0.9), ("0.1", 0.8), KEPT),
        (("0.1", 0.8), (INSTALLED, 0.9), REPLACED),
        (("0.1", 0.9), ("0.2", 0.8), REPLACED),
        (("0.2", 0.8), ("0.1", 0.9), KEPT),
    ],
)
def test_the_better_of_two(folder, own, other, merged):
    """Neither the date nor the time says which one that is."""
    first, second = (
        replace(entry(config), triton=version, ratio=ratio)
        for config, (version, ratio) in zip((FIRST, SECOND), (own, other), strict=True)
    )
    second = replace(second, date="2027-01-01", microseconds=first.microseconds / 2)
    tables.store(tables.user_path(GPU), GPU, first)
    assert merge(GPU, [second]) == merged
    assert tables.read(tables.user_path(GPU), GPU) == (second if merged == REPLACED else first,)


def test_two_of_one_problem_in_a_file(folder):
    best = replace(entry(SECOND), ratio=0.5)
    assert merge(GPU, [entry(FIRST), best, entry(SECOND)]) == Counter(added=1, replaced=1, kept=1)
    assert tables.read(tables.user_path(GPU), GPU) == (best,)


def test_merged_entries_are_found_at_once(folder):
    merge(GPU, [entry(FIRST)])
    assert lookup.find(entry().problem, GPU).config == FIRST
    merge(GPU, [replace(entry(SECOND), ratio=0.5)])
    assert lookup.find(entry().problem, GPU).config == SECOND


def test_all_shipped_tables_can_be_merged(folder):
    for path in tables.shipped_folder().glob("*.json"):
        gpu, entries = sharing.read(path)
        assert merge(gpu, entries) == Counter(added=len(entries))
        assert tables.user_path(gpu).read_text() == path.read_text()


@pytest.mark.parametrize("name", ["", "a\0b", "bad\ud800x", "\x1b[31mred\nline", "x" * 5000])
def test_names_that_are_no_text(name, folder, tmp_path):
    """Files are named after a GPU, and its name is printed."""
    path = tmp_path / "table.json"
    path.write_text(tables.render(replace(GPU, name=name), [entry(FIRST)]))
    with pytest.raises(ValueError, match="is no GPU") as raised:
        sharing.read(path)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("known", ["listed", "own"])
def test_gpu_that_is_known_otherwise(known, folder, tmp_path):
    """A table's GPU decides what its entries are compiled for."""
    gpu = GPU if known == "listed" else replace(GPU, name="NVIDIA Unlisted")
    if known == "own":
        tables.store(tables.user_path(gpu), gpu, entry(FIRST))
    path = tmp_path / "table.json"
    path.write_text(tables.render(replace(gpu, multiprocessors=108), []))
    with pytest.raises(ValueError, match="multiprocessors=108.* but that GPU is known as"):
        sharing.read(path)
