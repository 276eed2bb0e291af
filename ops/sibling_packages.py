"""Check that ``triton_kernels`` and ``autotune_configs`` are this project's: other projects use these names too."""

import os
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def require_own_siblings() -> None:
    """Raise ImportError unless the sibling packages that would be imported are this project's, with their sources.

    The check is that of ``autotune_configs.siblings``, from beside this package: what would be imported as
    ``autotune_configs`` may be the other project's.
    """
    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "autotune_configs")
    spec = PathFinder.find_spec("siblings", [folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"ops needs normfuse's autotune_configs, and cannot read {folder}")
    siblings = module_from_spec(spec)
    spec.loader.exec_module(siblings)
    if told := siblings.complaint("triton_kernels", "autotune_configs"):
        raise ImportError(f"ops {told}")
