"""The Triton versions that the kernels are tested with, and how they differ. This does not import Gluon."""

import re
import warnings

import triton

#: `make matrix` compiles every kernel with the newest release of each.
TESTED = ((3, 6), (3, 7), (3, 8), (3, 9))


def version_of(text: str) -> tuple[int, int]:
    """Major and minor number of a version such as "3.9.0" or "3.9.0+git1234"."""
    major, minor, *_ = [*map(int, re.findall(r"\d+", text)), 0, 0]
    return major, minor


VERSION = version_of(triton.__version__)

#: Gluon's TMA functions are ``async_load`` and ``async_store``. Before, they were ``async_copy_global_to_shared`` and
#: ``async_copy_shared_to_global``; 3.9 keeps these names for functions that raise an error.
HAS_ASYNC_LOAD = VERSION >= (3, 8)
#: A slice of shared memory may begin anywhere along its leading axis, and ``reinterpret`` has no underscore
#: (``triton_kernels.hopper_memory``).
SLICES_ANYWHERE = VERSION >= (3, 9)


def check(version: tuple[int, int] = VERSION) -> None:
    """ImportError for a Triton older than those tested, one RuntimeWarning for a newer one."""
    if version < TESTED[0]:
        raise ImportError(
            "normfuse needs triton {}.{} or newer, and found {}.{}".format(*TESTED[0], *version), name="triton"
        )
    if version > TESTED[-1]:
        tested = ", ".join(f"{major}.{minor}" for major, minor in TESTED)
        warnings.warn(
            f"triton {version[0]}.{version[1]} is newer than those that normfuse is tested with ({tested}): kernels may"
            " fail to compile",
            RuntimeWarning,
            stacklevel=2,
        )


check()
