"""Check that ``triton_kernels`` and ``autotune_configs`` are this project's: other projects use these names too."""

import importlib.util
import sys


def require_own_siblings() -> None:
    """Raise ImportError unless the sibling packages that would be imported are this project's, with their sources.

    The first check is that of ``autotune_configs.siblings``, which may be the other project's.
    """
    for name in ("triton_kernels", "autotune_configs"):
        if (found := _foreign(name)) is not None:
            raise ImportError(
                f"ops needs the package {name!r} of the normfuse distribution, but found {found}, which is another "
                "project's; install normfuse in an environment of its own"
            )
    spec = importlib.util.find_spec("triton_kernels")
    if spec and spec.loader and spec.loader.get_source("triton_kernels") is None:  # type: ignore[attr-defined]
        raise ImportError(f"ops needs the sources of triton_kernels, which Triton compiles; {spec.origin} has none")


def _foreign(name: str) -> str | None:
    """What would be imported in the place of this project's package, or None where that is it."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module that was made, not imported
        return repr(sys.modules[name])
    if spec is None:
        return "none"
    try:
        code = spec.loader.get_code(name)  # type: ignore[union-attr]
        is_own = "__distribution__" in code.co_names and "normfuse" in code.co_consts
    except (AttributeError, ImportError, OSError, SyntaxError, ValueError):  # no loader, no code
        is_own = False
    return None if is_own else str(spec.origin or list(spec.submodule_search_locations or []))
