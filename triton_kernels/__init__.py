"""Kernels and their launchers. Each takes tensors and a config, and knows nothing of the layers above."""
