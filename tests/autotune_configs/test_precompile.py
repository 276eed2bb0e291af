"""Compiling ahead in worker processes, whatever the compiler does there."""

import os

from autotune_configs import precompile
from autotune_configs.precompile import Precompiler
from tests.autotune_configs.entries import FIRST, GPU, SECOND, linear_problem

FINE, CRASHES, REFUSED = linear_problem(m=16), linear_problem(m=32), linear_problem(m=64)


def compile_config(problem, config, gpu, all_launches=True):
    """Replaces the compiler."""
    if problem == CRASHES:
        os._exit(1)
    return (0, "does not compile") if problem == REFUSED else (8, None)


def test_a_compiler_that_crashes(monkeypatch):
    """It takes its worker along, and none of the other results."""
    monkeypatch.setattr(precompile, "compile_config", compile_config)
    compiled = []
    launches = [(problem, config) for problem in (FINE, CRASHES, REFUSED) for config in (FIRST, SECOND)]
    with Precompiler(GPU, 2) as precompiler:
        found = precompiler.compile(launches, on_compiled=lambda *told: compiled.append(told))
        again = precompiler.compile(launches[:1])
    expected = {FINE: (8, None), CRASHES: (0, "the compiler crashes"), REFUSED: (0, "does not compile")}
    assert found == {launch: expected[launch[0]] for launch in launches} and list(found) == launches
    assert again == {launches[0]: (8, None)}
    assert sorted(compiled, key=str) == sorted(((launch, found[launch][1]) for launch in launches), key=str)
