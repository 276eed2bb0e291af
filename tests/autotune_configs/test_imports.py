"""Modules of autotune_configs import downwards: none imports, at once or later, one that imports it."""

import ast
from pathlib import Path

import autotune_configs

FOLDER = Path(autotune_configs.__file__).parent
MODULES = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}


def imported(name: str) -> set[str]:
    """The modules that a module imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "autotune_configs":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.removeprefix("autotune_configs."))
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("autotune_configs.") for alias in node.names}
    return found


def test_no_circle():
    below = {name: imported(name) & MODULES for name in MODULES}
    assert below["tuning"] >= {"lookup", "sweep"}, "also what a function imports"
    order: list[str] = []
    while below:
        free = sorted(name for name, modules in below.items() if modules <= set(order))
        assert free, f"in a circle, or above one: {sorted(below)}"
        order += free
        below = {name: modules for name, modules in below.items() if name not in free}


def test_no_package_above():
    for name in MODULES:
        above = {module.partition(".")[0] for module in imported(name)} & {"ops", "bench", "tests"}
        assert not above, name
