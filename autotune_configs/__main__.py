"""The command line of ``python -m autotune_configs`` and ``normfuse-autotune``."""

import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands; returns the exit status."""
    try:
        from autotune_configs import commands  # Ctrl-C is quiet, too, in the seconds that torch takes to load

        return commands.run(arguments)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
