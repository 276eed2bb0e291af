"""Runs a program in a process of its own: for what a cache gives the next one, and for what may crash."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run(folder: Path, program: str, *arguments: str, interpreted: bool = True) -> list[str]:
    """The lines that the program prints, with the folder to work in, to import from, and for all caches."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(folder)]),
            "PYTHONDONTWRITEBYTECODE": "1",  # of a module that is edited within a second
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
            "TRITON_INTERPRET": str(int(interpreted)),
        },
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, f"status {result.returncode}: {result.stderr}"
    return result.stdout.splitlines()
