"""The command line of ``python -m bench``: which of its commands runs."""

import sys
from importlib import import_module

#: Module by first argument; without one of these, the bench measures. A module is imported when its command runs: the
#: report needs neither torch nor the kernels.
_COMMANDS = {
    "captured": "bench.captured",
    "first-call": "bench.first_call",
    "merge": "bench.results",
    "models": "bench.models",
    "report": "bench.report",
    "tensor-parallel": "bench.tensor_parallel",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; returns the exit status."""
    from autotune_configs.command_line import run_command

    # Interrupted, also in the seconds that torch takes to load, it keeps what was measured.
    return run_command(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    from autotune_configs.command_line import Parser, called_as
    from bench.results import BadResult

    command = arguments[:1] if arguments and not arguments[0].startswith("-") else []
    if command and command[0] not in _COMMANDS:
        Parser(prog=called_as("bench")).error(f"{command[0]!r} is no command: there are {', '.join(_COMMANDS)}")
    prog = " ".join([called_as("bench"), *command])
    module = import_module(_COMMANDS[command[0]] if command else "bench.times")
    try:
        return module.main(arguments[len(command) :], prog)
    except BadResult as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
