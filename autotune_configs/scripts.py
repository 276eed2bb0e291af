"""The console script ``normfuse-bench``."""

import importlib.util
import sys
from importlib import import_module
from pathlib import Path

#: A file that only this project's package of that name has.
_OWN_FILES = {"bench": "recording.py", "ops": "rewriting.py", "triton_kernels": "row_minimum.py"}


def bench() -> int:
    """Run ``python -m bench``, unless another project's package of one of these names would be imported.

    This function cannot be in ``bench``, which may be the other project's. Nor can it be in ``ops``, which loads
    Triton: the bench must first choose between Triton's compiler and its interpreter.
    """
    for name, own_file in _OWN_FILES.items():
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.origin or not (Path(spec.origin).parent / own_file).is_file():
            found = f"found {spec.origin or list(spec.submodule_search_locations or [])}" if spec else "found none"
            print(
                f"normfuse-bench: needs the package {name!r} of the normfuse distribution, but {found}, which is "
                "another project's; install normfuse in an environment of its own",
                file=sys.stderr,
            )
            return 2
    return import_module("bench.__main__").main()
