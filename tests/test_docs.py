"""Promise: links lead somewhere, the table of errors is the results', and all that is public is described."""

import importlib.util
import inspect
import re
import urllib.parse
from pathlib import Path

import pytest

import autotune_configs
import ops
from bench.results import read_all
from tests.bench import result_files

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("*.md"))
PAGES += [page for folder in ("bench", "docs", "examples") for page in sorted((ROOT / folder).rglob("*.md"))]
PUBLIC = [(module, name) for module in (ops, autotune_configs) for name in module.__all__]


def load_script():
    """scripts/docs.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("docs_script", ROOT / "scripts" / "docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_code(text: str) -> str:
    """The text of a page without its code, in which a bracket is no link."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def links(text: str) -> list[str]:
    """Where links and pictures lead, but for addresses in the web."""
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", without_code(text))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """What headings are called in links: lower case, without punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    dead = []
    for link in links(page.read_text()):
        path, _, anchor = urllib.parse.unquote(link).partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links(page):
    assert dead_links(page) == []


def test_dead_links_are_seen(tmp_path):
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# Of floats, and others\n```\n# no heading\n```\n")
    page.write_text(
        "[a](other.md#of-floats-and-others) [b](#here) `[c](code.md)` [d](https://host.invalid/x)\n## Here\n"
        "![e](missing.png) [f](other.md#missing) [g](#no-heading) [h](other.md#no-heading)\n"
    )
    assert dead_links(page) == ["missing.png", "other.md#missing", "#no-heading", "other.md#no-heading"]


def test_table_of_errors():
    """As the script would write it from the results that lie in bench/results."""
    script = load_script()
    page = script.PAGE.read_text()
    assert page == script.with_table(page, read_all(sorted(script.RESULTS.glob("*.json")))), (
        f"{script.PAGE.name} is not of these results: run make docs"
    )


def test_table_of_errors_of_other_results(tmp_path):
    """A row a setting: how many pairs, their mean, the largest ratio and where it is from; exact results aside."""
    errors = {"output": [1e-3, 2e-3], "d_weight": [4e-3, 2e-3], "d_bias": [0.0, 1e-3]}
    paths = [
        result_files.write(tmp_path / "first.json", result_files.rows(errors=errors, modes=("training",))),
        result_files.write(tmp_path / "second.json", result_files.rows("L30", dtype="float16", errors={})),
    ]
    table = load_script().with_table("Before\n<!-- errors: x -->\nold\n<!-- /errors -->\nafter\n", read_all(paths))
    assert "old" not in table and table.startswith("Before\n") and table.endswith("\nafter\n")
    rows = [line for line in table.splitlines() if line.startswith("| NVIDIA H200")]
    assert rows == [
        "| NVIDIA H200 | GEMM | bfloat16 | 2 | 1.00 | 2.00 "
        "| L94 1024x8192x8192, `d_weight`: 4.0e-03 / 2.0e-03 | `first.json` |"
    ]


def test_page_without_a_place_for_the_table():
    with pytest.raises(ValueError, match="numerics.md must have one place for the table of errors, got 0"):
        load_script().with_table("Nothing\n", [])


@pytest.mark.parametrize("module, name", PUBLIC, ids=[f"{module.__name__}.{name}" for module, name in PUBLIC])
def test_docstrings(module, name):
    """What the reference is made of; a function of ``ops`` says what it raises."""
    public = getattr(module, name)
    assert (public.__doc__ or "").strip()
    if module is ops and inspect.isfunction(public):
        assert "\n\nRaises:\n    TypeError: " in inspect.getdoc(public)
