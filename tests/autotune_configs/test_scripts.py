"""How the programs start: which packages they run with, and what they say of others."""

import compileall
import errno
import functools
import importlib.machinery
import os
import py_compile
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from autotune_configs import siblings
from ops.sibling_packages import require_own_siblings

ROOT = Path(__file__).resolve().parents[2]


PACKAGES = ("autotune_configs", "bench", "ops", "triton_kernels")


def script(
    name: str, function: str, *arguments: str, first: Path | None = None, root: Path = ROOT, folder: Path = Path("/")
) -> subprocess.CompletedProcess:
    """The script as pip's wrapper calls it, in a folder that is not on the path, with another one first on it.

    Where ``root`` is another one, an editable installation of this one is not on the path either.
    """
    folders = [str(each) for each in (first, root) if each]
    module, _, function = function.partition(":")
    others = "" if root == ROOT else f"sys.path[:] = [each for each in sys.path if each != {str(ROOT)!r}]; "
    code = f"import sys; sys.path.remove(''); {others}from {module} import {function} as main; "
    return subprocess.run(
        [sys.executable, "-c", code + f"sys.argv[0] = {name!r}; sys.exit(main())", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


bench = functools.partial(script, "normfuse-bench", "autotune_configs.scripts:bench")
autotune = functools.partial(script, "normfuse-autotune", "autotune_configs.__main__:main")


def test_own_bench():
    result = bench("--help")
    assert result.returncode == 0 and "Check the chains against float64" in result.stdout, result.stderr


module = functools.partial(script, "bench/__main__.py", "bench.__main__:main")


@pytest.mark.parametrize(
    "run, called, name",
    [
        *((bench, "normfuse-bench", name) for name in ("bench", "ops", "triton_kernels")),
        *((module, "python -m bench", name) for name in ("autotune_configs", "ops", "triton_kernels")),
    ],
)
def test_package_of_another_project(run, called, name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise SystemExit('it was imported')")
    result = run("--help", first=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(f"{called}: needs the package {name!r} of the normfuse distribution, but found")
    assert str(tmp_path) in result.stderr and "it was imported" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("code", ["", "__distribution__ = 'an'", "(", None], ids=["empty", "its own", "broken", "none"])
@pytest.mark.parametrize("name", ["bench", "ops", "triton_kernels"])
def test_a_package_that_was_installed_over_this_one(name, code, tmp_path):
    """The files that only this project has are still there."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    own = tmp_path / name / "__init__.py"
    own.unlink() if code is None else own.write_text(code)
    result = bench("--help", root=tmp_path)
    assert result.returncode == 2 and f"needs the package {name!r} of the normfuse distribution" in result.stderr
    assert code is None or str(own) in result.stderr and len(result.stderr.splitlines()) == 1


def test_autotune_beside_another_projects_kernels(tmp_path):
    (tmp_path / "triton_kernels").mkdir()
    found = tmp_path / "triton_kernels" / "__init__.py"
    found.write_text("raise SystemExit('it was imported')")
    result = autotune("show", "--list", first=tmp_path)
    assert result.returncode == 2
    assert result.stderr == (
        "normfuse-autotune: needs the package 'triton_kernels' of the normfuse distribution, but found "
        f"{found}, which is another project's; install normfuse in an environment of its own\n"
    )


def test_a_chain_of_a_module_in_the_current_folder(tmp_path):
    """As ``python -m autotune_configs`` finds it."""
    (tmp_path / "my_model.py").write_text("import ops\nCHAIN = ops.Chain('linear', after=(ops.pointwise.silu()[0],))\n")
    arguments = "show", "--gpu", "h200", "--names", "my_model:CHAIN(8)", "--dtypes", "bfloat16", "--csv"
    result = autotune(*arguments, folder=tmp_path)
    assert result.returncode == 0 and "linear_group_norm_silu,bfloat16" in result.stdout, result.stderr
    beside = autotune(*arguments)
    assert beside.returncode == 2 and "No module named 'my_model'" in beside.stderr


def test_a_module_of_another_projects_ops(tmp_path):
    """The one in the current folder, which comes before this project's."""
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "__init__.py").touch()
    (tmp_path / "my_model.py").write_text("import ops\nCHAIN = ops.Chain('linear')\n")
    result = autotune("show", "--gpu", "h200", "--names", "my_model:CHAIN", folder=tmp_path)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    told = "'my_model:CHAIN' cannot be imported: module 'ops' has no attribute 'Chain'; it needs the package 'ops'"
    assert told in result.stderr and "ops/__init__.py, which is another project's" in result.stderr


def python(code: str, root: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(root), "TRITON_INTERPRET": "1"}
    return subprocess.run([sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, text=True)


def archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for package in PACKAGES:
            for source in sorted((ROOT / package).rglob("*")):
                if source.suffix in (".py", ".json"):
                    file.write(source, source.relative_to(ROOT))


def test_an_archive_of_the_packages(tmp_path):
    """All work within it, with the shipped tables."""
    archive(tmp_path / "normfuse.zip")
    result = bench("--help", root=tmp_path / "normfuse.zip")
    assert result.returncode == 0, result.stderr
    shown = "show", "--gpu", "h200", "--names", "l94", "--shapes", "1024x8192x8192", "--csv"
    result = autotune(*shown, root=tmp_path / "normfuse.zip")
    assert result.returncode == 0 and "this problem" in result.stdout, result.stderr
    code = "import ops, torch; assert '.zip' in ops.__file__; print(ops.layer_norm(torch.ones(2, 4), 4))"
    result = python(code, tmp_path / "normfuse.zip")
    assert result.returncode == 0 and "tensor([[0., 0., 0., 0.]" in result.stdout, result.stderr
    code = (
        "from ops.backend import _PASSES, _behind; print([_behind([], *each).uuid()[:2] for each in _PASSES.items()])"
    )
    result = python(code, tmp_path / "normfuse.zip")  # by which PyTorch's caches know the backend's passes
    assert result.stdout == "[('complete', 'read_terms'), ('hold_apart', True), ('take_over', 'join')]\n", result.stderr


def test_compiled_files_alone(tmp_path):
    """Triton reads the kernels' sources: that is said, and nothing of another project."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    assert compileall.compile_dir(tmp_path, quiet=1, legacy=True)
    for source in tmp_path.rglob("*.py"):
        source.unlink()
    result = python("import ops", tmp_path)
    compiled = tmp_path / "triton_kernels" / "__init__.pyc"
    told = f"needs the sources of triton_kernels, which Triton compiles; {compiled} has none"
    assert result.stderr.splitlines()[-1] == f"ImportError: ops {told}"
    for run in (bench, autotune):
        result = run("--help", root=tmp_path)
        assert result.returncode == 2 and result.stderr.endswith(f": {told}\n") and len(result.stderr.splitlines()) == 1


#: How a fault of the machine reaches who reads a package: where it is looked for, its code read, or its source.
READS = {
    "the folder": ("FileFinder", "find_spec"),
    "the code": ("SourceFileLoader", "get_code"),
    "the source": ("SourceFileLoader", "get_data"),
}


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["autotune_configs", "triton_kernels"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_package_that_cannot_be_read(read, name, number, monkeypatch):
    """The fault is told as what it is, and not as another project's package."""
    finder, method = read
    of_python = getattr(getattr(importlib.machinery, finder), method)

    def fail(self, read, *arguments):
        if read == name or read.endswith(os.path.join(name, "__init__.py")):
            raise OSError(number, os.strerror(number), read)
        return of_python(self, read, *arguments)

    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(getattr(importlib.machinery, finder), method, fail)
    told = siblings.complaint(name)
    assert told.startswith(f"cannot read the package {name!r}: ") and os.strerror(number) in told
    with pytest.raises(ImportError, match=f"^ops cannot read the package '{name}': .*{os.strerror(number)}"):
        require_own_siblings()


@pytest.mark.parametrize("damage", ["a folder without rights", "of another Python", "cut off"])
def test_a_package_that_is_damaged(tmp_path, monkeypatch, damage):
    folder = tmp_path / "triton_kernels"
    folder.mkdir()
    if damage == "a folder without rights":
        stat = os.stat

        def refuse(path, *arguments, **options):
            if os.fspath(path).startswith(f"{folder}/"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return stat(path, *arguments, **options)

        monkeypatch.setattr(os, "stat", refuse)
        monkeypatch.setattr(importlib._bootstrap_external, "_path_stat", refuse)
        told = "Permission denied"
    else:
        source = folder / "__init__.py"
        source.write_text("__distribution__ = 'normfuse'")
        compiled = Path(py_compile.compile(source, folder / "__init__.pyc"))
        content = compiled.read_bytes()
        compiled.write_bytes(b"\0" * 4 + content[4:] if damage == "of another Python" else content[:20])
        source.unlink()
        told = "bad magic number" if damage == "of another Python" else "marshal data too short"
    monkeypatch.delitem(sys.modules, "triton_kernels")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert re.match(f"cannot read the package 'triton_kernels': .*{told}", siblings.complaint("triton_kernels"))


def test_the_lowest_versions_that_are_declared_are_tested():
    """By ``make lowest``, a part of ``make matrix``."""
    makefile = (ROOT / "Makefile").read_text()
    assert "lowest" in re.findall("^matrix:(.*)$", makefile, re.MULTILINE)[0].split()
    declared = re.findall(r'^    "(\w+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (lowest,) = re.findall("^LOWEST := (.*)$", makefile, re.MULTILINE)
    tested = dict(each.split("==") for each in lowest.split())
    assert dict(declared).keys() == tested.keys() == {"numpy", "platformdirs", "rich", "torch", "triton"}
    assert all(tested[name].startswith(version) for name, version in declared)
