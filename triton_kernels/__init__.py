"""Kernels and their launchers. Each takes tensors and a config, and knows nothing of the layers above."""

from triton_kernels import versions  # noqa: F401 (first, as it says which Triton is too old)

__distribution__ = "normfuse"  # by which it is told from another project's package of this name
