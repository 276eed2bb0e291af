"""Run the command line in this process, for its tests."""

from pathlib import Path

import pytest

from autotune_configs import __main__ as program
from autotune_configs.gpus import Gpu
from autotune_configs.problem import Problem
from triton_kernels.device import SHARED_MEMORY

ROOT = Path(__file__).parents[2]
#: A small problem, and the beginning of a command that sweeps its kernel.
PROBLEM = Problem("group_norm", "bfloat16", (4, 32, 8))
SMALL = ["sweep", "--names", "group_norm", "--dtypes", "bfloat16", "--shapes"]
CPU_TABLE = Gpu("cpu", 90, 3, SHARED_MEMORY[90])


def run(*arguments, capsys):
    status = program.main(list(arguments))
    return status, capsys.readouterr().out


def refused(*arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        program.main(list(arguments))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert exit.value.code == 2
    return line
