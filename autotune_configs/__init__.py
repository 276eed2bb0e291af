"""Which block sizes to run a kernel with: the user's own table of this GPU, the shipped one, else a heuristic.

``ops`` asks here. ``python -m autotune_configs`` makes, shows and checks tables. Nothing is tuned in passing unless
``tune_unseen_problems`` says so.
"""

from autotune_configs.lookup import (
    convolution_config,
    forget,
    group_norm_config,
    image_norm_config,
    library_multiplies,
    linear_config,
)
from autotune_configs.tuning import tune_unseen_problems

__all__ = [
    "convolution_config",
    "forget",
    "group_norm_config",
    "image_norm_config",
    "library_multiplies",
    "linear_config",
    "tune_unseen_problems",
]
