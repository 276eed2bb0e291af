"""Kernels and their launchers. Each takes tensors and a config, and knows nothing of the layers above."""

__distribution__ = "normfuse"  # by which it is told from another project's package of this name
