"""Tables in a folder of the test's own; what has been looked up or warned of before is forgotten."""

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
