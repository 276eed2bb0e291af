"""``python -m bench merge``: put the rows of several results files into one."""

from pathlib import Path

from autotune_configs.command_line import Parser
from bench.results import merge


def main(arguments: list[str], prog: str) -> int:
    """Write the file; returns the exit status."""
    parser = Parser(
        prog=prog,
        description="Put the rows of several results files, of one experiment on one device, into one file, with those "
        "that it already has. Of each cell the newest run is kept.",
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="what --output wrote")
    parser.add_argument("--into", type=Path, metavar="FILE", required=True, help="the file to write")
    options = parser.parse_args(arguments)
    merge(options.files, options.into)
    print(f"wrote {options.into}")
    return 0
