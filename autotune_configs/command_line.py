"""What all command lines share: the parser, argument types, and how a command ends."""

import argparse
import io
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable

#: The exit status of a command that the user interrupts.
INTERRUPTED = 128 + signal.SIGINT


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not None and False."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Answers a bad argument with one line and exit status 2, and shows defaults in its help."""

    def __init__(self, **options):
        super().__init__(formatter_class=_Help, **options)

    def error(self, message):
        lines = filter(None, map(str.strip, message.splitlines()))  # of what it quotes
        self.exit(2, f"{self.prog}: {' '.join(lines)}\n")


def run_command(command: Callable[[], int]) -> int:
    """The exit status of a command, or 128 and the number of the signal that ends it, as a shell has it.

    SIGTERM and SIGHUP end it as Ctrl-C does, which lets it tidy up; one that is ignored, as by nohup, stays so. A
    standard output whose encoding lacks a character, as "µ", gets "?".
    """
    received: list[int] = [signal.SIGINT]

    def interrupt(number, frame):
        received[0] = number
        raise KeyboardInterrupt

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    may_answer = threading.current_thread() is threading.main_thread()  # which alone sets handlers
    endings = (signal.SIGTERM, signal.SIGHUP) if may_answer else ()
    answered = [number for number in endings if signal.getsignal(number) == signal.SIG_DFL]
    for number in answered:
        signal.signal(number, interrupt)
    try:
        status = command()
    except KeyboardInterrupt:
        status = INTERRUPTED
    finally:
        for number in answered:
            signal.signal(number, signal.SIG_DFL)
    return 128 + received[0] if status == INTERRUPTED else status


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
