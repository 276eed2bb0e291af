"""Each test has its own folder of tables. Earlier lookups and warnings are forgotten."""

import pytest

from autotune_configs import lookup, tables, tuning


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(tables.FOLDER_VARIABLE, str(tmp_path / "tables"))
    monkeypatch.setattr(tables, "_told", set())
    monkeypatch.setattr(tuning, "_tried", set())
    monkeypatch.setattr(tuning, "_is_possible", True)
    lookup.forget()
    yield tmp_path / "tables"
    lookup.forget()
