"""The console script ``normfuse-bench``."""

import sys
from importlib import import_module

from autotune_configs.siblings import complaint


def bench() -> int:
    """Run ``python -m bench``, unless another project's package of this name would be imported.

    This function cannot be in ``bench``, which may be the other project's. Nor can it be in ``ops``, which loads
    Triton: the bench must first choose between Triton's compiler and its interpreter.
    """
    if told := complaint("bench"):
        print(f"normfuse-bench: {told}", file=sys.stderr)
        return 2
    return import_module("bench.__main__").main()
