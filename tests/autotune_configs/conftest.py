"""Each test has its own folder of tables. Earlier lookups and warnings are forgotten."""

import pytest

from autotune_configs import lookup, sweep, tables, tuning
from tests.autotune_configs.sweeps import Bench


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(tables.FOLDER_VARIABLE, str(tmp_path / "tables"))
    monkeypatch.setattr(tables, "_told", set())
    monkeypatch.setattr(tuning, "_tried", set())
    monkeypatch.setattr(tuning, "_is_possible", True)
    lookup.forget()
    yield tmp_path / "tables"
    lookup.forget()


@pytest.fixture
def bench(folder, monkeypatch):
    bench = Bench([], {})
    monkeypatch.setattr(sweep, "workload_of", bench.workload_of)
    monkeypatch.setattr(sweep.time, "monotonic", lambda: bench.time)
    return bench
