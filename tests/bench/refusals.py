"""How every command answers a bad argument."""

from collections.abc import Callable

import pytest


def assert_refused(main: Callable[[list[str]], int], arguments: list[str], named: str, program: str, capsys) -> None:
    """Exit status 2 and one line that names the argument, what came and what is known; nothing else."""
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    output, errors = capsys.readouterr()
    assert exit.value.code == 2 and not output
    assert named in errors and errors.startswith(f"{program}: ") and errors.count("\n") == 1
