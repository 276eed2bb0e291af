"""A problem: the key that a config is looked up by."""

from dataclasses import dataclass

ELEMENT_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Problem:
    """One launch of a kernel.

    ``kernel`` is its name in ``autotune_configs.kernels.KERNELS``, and ``sizes`` are in the order of its
    ``size_names``. ``dtype`` is the tensors' ("bfloat16"). ``precision`` is that of float32 products ("highest"), else
    None. ``layout`` is the memory layout of images, None for matrices.
    """

    kernel: str
    dtype: str
    sizes: tuple[int, ...]
    precision: str | None = None
    layout: str | None = None

    @property
    def element_size(self) -> int:
        return ELEMENT_SIZES[self.dtype]

    def __str__(self) -> str:
        parts = (self.kernel, self.dtype, self.precision, self.layout, "x".join(map(str, self.sizes)))
        return " ".join(part for part in parts if part)
