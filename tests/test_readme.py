"""Promise: the README is short, begins with a measured figure, runs as it stands, and reads well on a package index."""

import contextlib
import io
import re
from pathlib import Path

import pytest

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def expected_output(example: str) -> str:
    """The comment lines under a print."""
    lines = example.partition("print(")[2].splitlines()[1:]
    return "".join(line.removeprefix("# ").removeprefix("#") + "\n" for line in lines if line.startswith("#"))


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples(example):
    small = example.replace("1024", "64").replace("2048", "128")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(small, {})
    assert output.getvalue() == expected_output(example)


def test_length():
    assert len(README.split()) <= 900


def test_first_figure():
    """A time in microseconds within the first 15 lines."""
    assert re.search(r"\| *\d+ *\|", "\n".join(README.splitlines()[:15]))


def on_an_index() -> str:
    """The page as the wheel's metadata has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    page = README
    for each in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        page = re.sub(each["pattern"], each["replacement"], page)
    return page


def test_index_has_no_links_into_the_repository():
    from readme_renderer import markdown  # what an index renders with

    page = markdown.render(on_an_index())
    targets = re.findall(r'(?:href|src|srcset)="([^"]*)"', page)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert "docs/limits.md" in page and "<table>" in page and "<img" not in page
