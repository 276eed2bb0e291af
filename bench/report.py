"""``python -m bench report``: turn JSON results into tables and pictures. Needs neither torch nor the kernels."""

import os
import sys
from pathlib import Path

from autotune_configs.command_line import Parser, cannot_write
from autotune_configs.files import replace_file
from bench.results import BadResult, read_all

_ROOT = Path(__file__).parents[1]


def main(arguments: list[str]) -> int:
    """Write the page and its pictures; returns the exit status."""
    parser = Parser(
        prog="bench report",
        description="Turn results into a page of tables and into pictures, which are replaced. Where files share a "
        "cell, the newest decides. Exit status: 0, or 2 for a bad argument, result or folder.",
    )
    parser.add_argument(
        "json", type=Path, nargs="*", help="what python -m bench --json wrote; every JSON in --results where not given"
    )
    parser.add_argument(
        "--results", type=Path, metavar="DIR", default=_ROOT / "bench" / "results", help="where the pictures go"
    )
    parser.add_argument(
        "--docs", type=Path, metavar="FILE", default=_ROOT / "docs" / "benchmarks.md", help="the page to write"
    )
    options = parser.parse_args(arguments)
    paths = options.json or sorted(options.results.glob("*.json"))
    if not paths:
        parser.error(f"no results in {options.results}")
    try:
        devices = read_all(paths)
    except BadResult as error:
        parser.error(str(error))
    return _write(devices, options.results, options.docs)


def _write(devices, results: Path, page: Path) -> int:
    """All is made before anything is written."""
    from bench.markdown import write_page
    from bench.pictures import draw_all

    pictures = {name: content for device in devices for name, content in draw_all(device).items()}
    text = write_page(devices, results, page, pictures)
    files = {results / name: content for name, content in pictures.items()} | {page: text.encode()}
    for path, content in files.items():
        try:
            replace_file(path, content)
        except OSError as error:
            return cannot_write("bench report", path, error)
        print(f"wrote {os.path.relpath(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
