"""Promise: what one process compiled, another one finds in Triton's cache, whatever each compiled before."""

import json

import pytest

from tests.ops.programs import run

PROGRAM = """
import importlib, json, pkgutil, sys
import triton_kernels
from triton.runtime.jit import JITCallable
from triton_kernels.built_in import BUILT_IN
from triton_kernels.cache_keys import hash_in_order

found = {}
for each in pkgutil.iter_modules(triton_kernels.__path__):
    module = importlib.import_module(f"triton_kernels.{each.name}")
    found |= {value.__name__: value for value in vars(module).values() if isinstance(value, JITCallable)}
names = sorted(found, reverse=sys.argv[1] == "last first")
for step in sorted(BUILT_IN, key=lambda step: step.name, reverse=sys.argv[1] == "last first"):
    hash(step), step.cache_key
for name in names:
    hash_in_order(found[name])
print(json.dumps({name: found[name].cache_key for name in sorted(found)}))
"""


@pytest.mark.offline
def test_keys_do_not_depend_on_the_order(tmp_path):
    first, second = (
        json.loads(run(tmp_path, PROGRAM, order, interpreted=False)[-1]) for order in ("first first", "last first")
    )
    assert len(first) > 100 and first == second
