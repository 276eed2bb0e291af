"""Check that ``triton_kernels`` and ``autotune_configs`` are this project's: other projects use these names too."""

import importlib.util
from pathlib import Path

#: A file that only this project's package of that name has.
_SIBLINGS = {"triton_kernels": "row_minimum.py", "autotune_configs": "heuristics.py"}


def require_own_siblings() -> None:
    """Raise ImportError unless the sibling packages that would be imported are this project's."""
    for name, own_file in _SIBLINGS.items():
        spec = importlib.util.find_spec(name)
        folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
        if not any((folder / own_file).is_file() for folder in folders):
            raise ImportError(
                f"ops needs the package {name!r} of the normfuse distribution, but found "
                f"{(spec.origin or folders) if spec else 'none'}, which is another project's; "
                "install normfuse in an environment of its own"
            )
