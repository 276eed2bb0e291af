"""Which Tritons are known, and what is said of one that is not."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from triton_kernels import versions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "text, version",
    [("3.6.0", (3, 6)), ("3.10.1", (3, 10)), ("3.9.0+git1f2e3d", (3, 9)), ("4.0.0rc1", (4, 0)), ("4", (4, 0))],
)
def test_version_of(text, version):
    assert versions.version_of(text) == version


def test_a_newer_triton_is_warned_of_and_an_older_one_refused():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        versions.check((3, 6))
        versions.check(versions.TESTED[-1])
    assert not caught
    with pytest.warns(RuntimeWarning, match=r"triton 3\.10 is newer .* \(3\.6, 3\.7, 3\.8, 3\.9\)") as caught:
        versions.check((3, 10))
    assert len(caught) == 1
    with pytest.raises(ImportError, match=r"^normfuse needs triton 3\.6 or newer, and found 3\.5$"):
        versions.check((3, 5))


def test_an_older_triton_is_refused_before_anything_else(tmp_path):
    """What is missing there would be an ImportError of no help."""
    (tmp_path / "triton.py").write_text('__version__ = "3.1.0"')
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-c", "import ops"]
    process = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert process.returncode == 1
    assert "ImportError: normfuse needs triton 3.6 or newer, and found 3.1" in process.stderr


def test_what_is_tested_is_what_make_matrix_compiles():
    """One release of each version, beside that of constraints.txt, and pyproject asks for none older."""
    releases = re.findall(r"^TRITONS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    releases += re.findall(r"^triton==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert tuple(sorted(versions.version_of(release) for release in releases)) == versions.TESTED
    oldest = ".".join(map(str, versions.TESTED[0]))
    assert f'"triton>={oldest}; ' in (ROOT / "pyproject.toml").read_text()
