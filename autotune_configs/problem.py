"""What a config is looked up by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One launch: the kernel by its name in ``autotune_configs.kernels.KERNELS``, and what it is launched for.

    ``sizes`` are in the order of the kernel's ``size_names``. ``dtype`` is the tensors' ("bfloat16"), ``precision``
    that of float32 products ("highest"), None for all else; ``layout`` that of images in memory, None for matrices.
    """

    kernel: str
    dtype: str
    sizes: tuple[int, ...]
    precision: str | None = None
    layout: str | None = None

    def __str__(self) -> str:
        parts = (self.kernel, self.dtype, self.precision, self.layout, "x".join(map(str, self.sizes)))
        return " ".join(part for part in parts if part)
