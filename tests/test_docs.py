"""Promise: links and pictures lead somewhere, and all that is public is described."""

import importlib
import inspect
import re
import urllib.parse
from pathlib import Path

import pytest

import autotune_configs
import ops

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("*.md"))
PAGES += [page for folder in ("bench", "docs", "examples") for page in sorted((ROOT / folder).rglob("*.md"))]
#: Written by hand; the benchmarks' page is a report.
GUIDES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "benchmarks"]
PUBLIC = [(module, name) for module in (ops, autotune_configs) for name in module.__all__]


def without_code(text: str) -> str:
    """The text of a page without its code, in which a bracket is no link."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def links(text: str) -> list[str]:
    """Where links and pictures lead, but for addresses in the web."""
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"\s]+)\"", without_code(text))
    targets = [link or picture for link, picture in targets]
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
        '<picture><source srcset="dark.png"><img src="other.md" alt="i"></picture>\n'
    )
    assert dead_links(page) == ["missing.png", "other.md#missing", "#no-heading", "other.md#no-heading", "dark.png"]


def words(page: Path) -> int:
    """Of a page without its generated tables."""
    return len(re.sub(r"<!-- table: .*?<!-- /table -->", "", page.read_text(), flags=re.DOTALL).split())


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_guide(page):
    """Short, and the first sentence says what a reader can do afterwards."""
    assert words(page) <= 1200
    assert "\nAfter this page you" in page.read_text()


def names_in(text: str) -> set[str]:
    """What a page names in backticks by a dotted name of this project's."""
    return set(re.findall(r"`((?:ops|autotune_configs|triton_kernels)\.\w+)[`(]", text))


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_names(page):
    """All names exist, as attributes or as modules."""
    for name in names_in(page.read_text()):
        module, _, attribute = name.partition(".")
        found = hasattr(importlib.import_module(module), attribute) or (ROOT / module / f"{attribute}.py").exists()
        assert found, name


def test_names_are_seen():
    assert names_in("`ops.explain(model)`, `ops.Chain` and `torch.mm`") == {"ops.explain", "ops.Chain"}


def test_citation():
    citation = (ROOT / "CITATION.cff").read_text()
    version, licence = (re.search(rf"^{name}: (.*)$", citation, re.M)[1] for name in ("version", "license"))
    assert version == ops.__version__
    assert f'license = "{licence}"' in (ROOT / "pyproject.toml").read_text()


def test_site_has_every_page():
    listed = set(re.findall(r"^docs/(\w+)$", (ROOT / "docs" / "conf.py").read_text(), flags=re.MULTILINE))
    assert listed == {page.stem for page in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("module, name", PUBLIC, ids=[f"{module.__name__}.{name}" for module, name in PUBLIC])
def test_docstrings(module, name):
    """What the reference is made of; a function of ``ops`` says what it raises for its arguments."""
    public = getattr(module, name)
    assert (public.__doc__ or "").strip()
    if module is ops and inspect.isfunction(public) and inspect.signature(public).parameters:
        assert "\n\nRaises:\n    TypeError: " in inspect.getdoc(public)
