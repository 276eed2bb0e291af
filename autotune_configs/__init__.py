"""The configs (block sizes and the like) that kernels run with: from tables of the GPU, or from a heuristic.

``ops`` looks them up here. ``python -m autotune_configs`` makes, shows, shares and checks tables. A call never tunes a
kernel unless ``tune_unseen_problems`` is on.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune_configs.configs import (
        group_norm_config,
        image_norm_config,
        linear_config,
        prefers_cublas,
    )
    from autotune_configs.lookup import forget
    from autotune_configs.tuning import tune_unseen_problems

__distribution__ = "normfuse"  # by which it is told from another project's package of this name
__all__ = [
    "forget",
    "group_norm_config",
    "image_norm_config",
    "linear_config",
    "prefers_cublas",
    "tune_unseen_problems",
]


def __getattr__(name: str):
    """Load torch and triton when a function is first used: some modules of the command lines do without them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"forget": "lookup", "tune_unseen_problems": "tuning"}.get(name, "configs")
    function = getattr(import_module(f"autotune_configs.{home}"), name)
    globals()[name] = function  # the next use comes straight to it
    return function
