"""The console script ``normfuse-bench``."""

import importlib.util
import sys
from importlib import import_module
from pathlib import Path


def bench() -> int:
    """Run ``python -m bench``, unless another project's package of that name would run in its place.

    This function cannot be in ``bench``, which may be the other project's. Nor can it be in ``ops``, which loads
    Triton: the bench must first choose between Triton's compiler and its interpreter.
    """
    spec = importlib.util.find_spec("bench")
    if spec is None or not spec.origin or not (Path(spec.origin).parent / "peers.py").is_file():
        found = f"found {spec.origin or list(spec.submodule_search_locations or [])}" if spec else "found none"
        print(
            f"normfuse-bench: needs the package 'bench' of the normfuse distribution, but {found}, which is another "
            "project's; install normfuse in an environment of its own",
            file=sys.stderr,
        )
        return 2
    return import_module("bench.__main__").main()
