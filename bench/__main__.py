"""The command line of ``python -m bench``: which of its commands runs."""

import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

#: Module by first argument; without one of these, the bench measures. A module is imported when its command runs: the
#: report needs neither torch nor the kernels.
_COMMANDS = {
    "captured": "bench.captured",
    "first-call": "bench.first_call",
    "merge": "bench.results",
    "models": "bench.models",
    "products": "bench.products",
    "report": "bench.report",
    "tensor-parallel": "bench.tensor_parallel",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; returns the exit status. Another project's packages of our names are told, and not imported."""
    # From beside this package, as in ops.sibling_packages: autotune_configs may be the other project's.
    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "autotune_configs")
    spec = PathFinder.find_spec("siblings", [folder])
    if spec and spec.loader:
        siblings = module_from_spec(spec)
        spec.loader.exec_module(siblings)
        if told := siblings.complaint("autotune_configs", "ops", "triton_kernels"):
            print(f"{siblings.called_as('bench')}: {told}", file=sys.stderr)
            return 2
    from autotune_configs.command_line import run_command

    # Interrupted, also in the seconds that torch takes to load, it keeps what was measured.
    return run_command(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    from autotune_configs.command_line import Parser
    from autotune_configs.siblings import called_as
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
