"""What the bench says of where it runs."""

import pytest
import torch

from bench import recording

CPU = torch.device("cpu")


def test_run():
    run = recording.current_run(CPU)
    assert run.torch == torch.__version__ and run.driver is None and run.date.tzinfo is not None
    assert run.commit is None or len(run.commit.removesuffix("-dirty")) == 40


def test_commit_of_another_project(monkeypatch, tmp_path):
    """An installed package names no commit, though it lies within a repository."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(recording, "_ROOT", tmp_path / "venv" / "site-packages")
    monkeypatch.setattr(recording, "_output_of", lambda *command: pytest.fail(f"it asked {command}"))
    assert recording.current_run(CPU).commit is None


@pytest.mark.parametrize("setting, expected", [("0", "cuda"), ("", "cuda"), ("1", "cpu")])
def test_device_to_measure(setting, expected, monkeypatch):
    """The GPU, unless Triton is told to interpret."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", setting)
    assert recording.device_to_measure().type == expected


def test_triton_is_told_to_interpret(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert recording.device_to_measure() == CPU
    assert recording.os.environ["TRITON_INTERPRET"] == "1"
