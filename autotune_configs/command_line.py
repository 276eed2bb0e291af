"""What all command lines share: the parser, and argument types."""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not None and False."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Answers a bad argument with one line and exit status 2, and shows defaults in its help."""

    def __init__(self, **options):
        super().__init__(formatter_class=_Help, **options)

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def called_as(package: str) -> str:
    """How the user called this program: by a console script, or ``python -m package``."""
    script = Path(sys.argv[0]).name
    return script if script.startswith("normfuse-") else f"python -m {package}"


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argument type: some of the ``known`` names, in any case, separated by commas."""
    by_lower = {name.lower(): name for name in known}

    def parse(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",")]
        for name in found:
            if name.lower() not in by_lower:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(by_lower.values())}")
        return list(dict.fromkeys(by_lower[name.lower()] for name in found))

    return parse


def positive(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)
