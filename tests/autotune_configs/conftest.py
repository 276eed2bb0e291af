"""Tables in a folder of the test's own; what has been looked up before is forgotten, then and afterwards."""

import pytest

from autotune_configs import lookup, tables, tuning


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(tables.FOLDER_VARIABLE, str(tmp_path / "tables"))
    monkeypatch.setattr(tuning, "_tried", set())
    lookup.forget()
    yield tmp_path / "tables"
    lookup.forget()
