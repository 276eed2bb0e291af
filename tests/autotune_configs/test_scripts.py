"""The console script ``normfuse-bench``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str, first: Path | None = None) -> subprocess.CompletedProcess:
    """The script as pip's wrapper calls it, with a folder that comes first on the path."""
    folders = [str(folder) for folder in (first, ROOT) if folder]
    code = "import sys; from autotune_configs.scripts import bench; sys.argv[0] = 'normfuse-bench'; sys.exit(bench())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


def test_own_bench():
    result = bench("--help")
    assert result.returncode == 0 and "Check the chains against float64" in result.stdout, result.stderr


@pytest.mark.parametrize("name", ["bench", "ops", "triton_kernels"])
def test_package_of_another_project(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise SystemExit('it was imported')")
    result = bench("--help", first=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(
        f"normfuse-bench: needs the package {name!r} of the normfuse distribution, but found"
    )
    assert str(tmp_path) in result.stderr and "it was imported" not in result.stderr
