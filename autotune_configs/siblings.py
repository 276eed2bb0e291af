"""Tell this project's packages from other projects' packages of the same names, without importing them."""

import contextlib
import importlib.util
import os
import sys


def called_as(package: str) -> str:
    """How the user called this program: by a console script, or ``python -m package``."""
    script = os.path.basename(sys.argv[0])
    return script if script.startswith("normfuse-") else f"python -m {package}"


def complaint(*names: str) -> str | None:
    """What is wrong where one of these packages would be imported from elsewhere, or without its sources, or None.

    Each package of this project says in its code of which distribution it is. That code may be a file, compiled, or in
    an archive. A package that another one was installed over does not say it.
    """
    for name in names:
        try:
            found = foreign(name)
            spec = importlib.util.find_spec(name) if found is None and name == "triton_kernels" else None
            lacks_sources = spec and spec.loader.get_source(name) is None  # type: ignore[union-attr]
        except (EOFError, ImportError, OSError) as error:  # a fault of the machine, or a damaged file
            return f"cannot read the package {name!r}: {error.__cause__ or error}"
        if found is not None:
            return (
                f"needs the package {name!r} of the normfuse distribution, but found {found}, which is another "
                "project's; install normfuse in an environment of its own"
            )
        if spec and lacks_sources:
            return f"needs the sources of {name}, which Triton compiles; {spec.origin} has none"
    return None


def foreign(name: str) -> str | None:
    """What would be imported in the place of this project's package, or None where that is it.

    Raises OSError, ImportError or EOFError where it cannot be read.
    """
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module that was made, not imported
        return repr(sys.modules[name])
    if spec is None:
        return "none"
    for folder in spec.submodule_search_locations or () if spec.origin is None else ():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(os.path.join(folder, "__init__.py"))  # one that cannot be read looks as if there were none
    try:
        code = spec.loader.get_code(name)  # type: ignore[union-attr]
        is_own = "__distribution__" in code.co_names and "normfuse" in code.co_consts
    except (AttributeError, SyntaxError, ValueError):  # no loader, no code
        is_own = False
    return None if is_own else str(spec.origin or list(spec.submodule_search_locations or []))
