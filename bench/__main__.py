"""The command line of ``python -m bench``: which of its commands runs."""

import sys
from importlib import import_module

from autotune_configs.command_line import called_as
from bench.results import BadResult

#: Module by first argument; without one of these, the bench measures. A module is imported when its command runs: the
#: report needs neither torch nor the kernels.
_COMMANDS = {
    "captured": "bench.captured",
    "first-call": "bench.first_call",
    "merge": "bench.merge",
    "report": "bench.report",
    "tensor-parallel": "bench.tensor_parallel",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = arguments[:1] if arguments and arguments[0] in _COMMANDS else []
    module = import_module(_COMMANDS[command[0]] if command else "bench.measure")
    prog = " ".join([called_as("bench"), *command])
    try:
        return module.main(arguments[len(command) :], prog)
    except BadResult as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # as a shell has it; what was measured is kept


if __name__ == "__main__":
    sys.exit(main())
