"""The command line of ``python -m autotune_configs`` and ``normfuse-autotune``."""

import os
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands; returns the exit status."""
    try:
        from autotune_configs import commands  # Ctrl-C is quiet, too, in the seconds that torch takes to load

        status = commands.run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough: nothing more may be written, at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
