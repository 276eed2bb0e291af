"""Promise: every script in ``examples/`` is short, and runs as it stands, without a GPU too."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
#: What a script may need of the shell that starts it; nothing that changes how PyTorch, Triton or this project works.
KEPT = ("CUDA_VISIBLE_DEVICES", "HOME", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PATH", "TMPDIR")


def test_there_are_examples():
    assert {"compile", "functional", "fuse_a_model", "training"} <= {example.stem for example in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.stem for example in EXAMPLES])
def test_example(example, tmp_path):
    """In a Python of its own and a folder that is not the project's, with the project as if installed."""
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    result = subprocess.run(
        [sys.executable, str(example)],
        env=environment | {"PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip(), "it shows nothing"
    assert not list(tmp_path.iterdir()), "it leaves files behind"


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.stem for example in EXAMPLES])
def test_example_is_short(example):
    text = example.read_text()
    assert len(text.splitlines()) < 40
    assert text.startswith('"""')


@pytest.mark.parametrize("page", ["adopting", "architecture", "fuse", "interface"])
def test_pages(page, tmp_path):
    """A guide's snippets, one after another, from a file: Triton reads the source of jit functions."""
    snippets = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / f"{page}.md").read_text(), flags=re.DOTALL)
    assert snippets
    path = tmp_path / "snippets.py"
    path.write_text("".join(snippets))
    runpy.run_path(str(path))
