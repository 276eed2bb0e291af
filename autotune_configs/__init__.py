"""Which block sizes to run a kernel with: the user's own table of this GPU, the shipped one, else a heuristic.

``ops`` asks here. ``python -m autotune_configs`` makes, shows and checks tables. Nothing is tuned in passing unless
``tune_unseen_problems`` says so.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune_configs.lookup import (
        convolution_config,
        forget,
        group_norm_config,
        image_norm_config,
        linear_config,
        prefers_cublas,
    )
    from autotune_configs.tuning import tune_unseen_problems

__all__ = [
    "convolution_config",
    "forget",
    "group_norm_config",
    "image_norm_config",
    "linear_config",
    "prefers_cublas",
    "tune_unseen_problems",
]


def __getattr__(name: str):
    """Load torch and triton when a function is asked for: the command line's modules do without them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "autotune_configs.tuning" if name == "tune_unseen_problems" else "autotune_configs.lookup"
    return getattr(import_module(home), name)
