"""The command line of ``python -m autotune_configs`` and ``normfuse-autotune``."""

import os
import sys

from autotune_configs.command_line import run_command
from autotune_configs.siblings import called_as, complaint


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands; returns the exit status."""
    try:
        return run_command(lambda: _run(arguments))
    except BrokenPipeError:  # the reader, such as head, has seen enough: nothing more may be written, at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: list[str] | None) -> int:
    if told := complaint("triton_kernels"):
        print(f"{called_as('autotune_configs')}: {told}", file=sys.stderr)
        return 2
    from autotune_configs import commands  # Ctrl-C is quiet, too, in the seconds that torch takes to load

    status = commands.run(arguments)
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
