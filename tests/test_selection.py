"""Promise: ``--every 4`` runs each test, and about a quarter of its cases."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def collected(*options):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "test_grids.py", *options]
    output = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True).stdout
    return [line for line in output.splitlines() if "::" in line]


def names(cases):
    return {case.partition("[")[0] for case in cases}


def test_every():
    all_cases, some = collected(), collected("--every", "4")
    assert names(some) == names(all_cases) and set(some) < set(all_cases)
    assert len(names(some)) <= len(some) <= len(names(some)) + len(all_cases) / 2
    assert collected("--every", "1") == all_cases
