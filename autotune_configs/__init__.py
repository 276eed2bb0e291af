"""Which block sizes to run a kernel with: the shipped table of this GPU, else a heuristic. Nothing is tuned here."""

from autotune_configs.lookup import group_norm_config, linear_config

__all__ = ["group_norm_config", "linear_config"]
