"""Which Tritons are known, and what is said of one that is not."""

import re
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


def test_only_a_triton_newer_than_those_tested_is_warned_of():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        versions.warn_if_untested((3, 6))
        versions.warn_if_untested(versions.TESTED[-1])
    assert not caught
    with pytest.warns(RuntimeWarning, match=r"triton 3\.10 is newer .* \(3\.6, 3\.7, 3\.8, 3\.9\)") as caught:
        versions.warn_if_untested((3, 10))
    assert len(caught) == 1


def test_what_is_tested_is_what_make_matrix_compiles():
    """One release of each version, beside that of constraints.txt, and pyproject asks for none older."""
    releases = re.findall(r"^TRITONS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    releases += re.findall(r"^triton==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert tuple(sorted(versions.version_of(release) for release in releases)) == versions.TESTED
    oldest = ".".join(map(str, versions.TESTED[0]))
    assert f'"triton>={oldest}; ' in (ROOT / "pyproject.toml").read_text()
