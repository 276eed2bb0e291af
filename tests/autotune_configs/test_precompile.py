"""Compiling ahead in worker processes, whatever the compiler does there."""

import contextlib
import errno
import os
import signal
import subprocess
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import pytest
import triton
from triton.compiler.code_generator import CodeGenerator
from triton.runtime.errors import PTXASError

from autotune_configs import precompile
from autotune_configs.kernels import kernel_of
from autotune_configs.precompile import Precompiler
from autotune_configs.worker_pool import WorkerPool
from tests.autotune_configs.entries import FIRST, GPU, SECOND, linear_problem
from triton_kernels.linear import linear_kernel
from triton_kernels.versions import VERSION

FINE, CRASHES, REFUSED, KILLED = (linear_problem(m=rows) for rows in (16, 32, 64, 128))
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def compile_config(problem, config, gpu, all_launches=True):
    """Replaces the compiler."""
    if problem == CRASHES:
        os._exit(1)
    if problem == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    return (0, "does not compile") if problem == REFUSED else (8, None)


def test_a_compiler_that_crashes(monkeypatch):
    """It takes its worker along, and none of the other results."""
    monkeypatch.setattr(precompile, "compile_config", compile_config)
    compiled = []
    launches = [(problem, config) for problem in (FINE, CRASHES, REFUSED) for config in (FIRST, SECOND)]
    with Precompiler(GPU, 2) as precompiler:
        found = precompiler.compile(launches, on_compiled=lambda *told: compiled.append(told))
        again = precompiler.compile(launches[:1])
    expected = {FINE: (8, None), CRASHES: (0, "the compiler crashes"), REFUSED: (0, "does not compile")}
    assert found == {launch: expected[launch[0]] for launch in launches} and list(found) == launches
    assert again == {launches[0]: (8, None)}
    assert sorted(compiled, key=str) == sorted(((launch, found[launch][1]) for launch in launches), key=str)


def test_a_compiler_that_is_killed(monkeypatch):
    """As where memory runs out. It is not refused for that, nor is another config."""
    monkeypatch.setattr(precompile, "compile_config", compile_config)
    with Precompiler(GPU, 2) as precompiler:
        found = precompiler.compile([(problem, FIRST) for problem in (FINE, KILLED)])
        assert found[FINE, FIRST] == (8, None)
        assert isinstance(found[KILLED, FIRST][1], OSError) and "-9" in str(found[KILLED, FIRST][1])
        with pytest.raises(OSError, match="ended"):
            precompiler.refused(KILLED, FIRST, [SECOND])


def test_how_a_process_ended_is_read_once(monkeypatch):
    """The system tells it to the first thread that asks: here the pool's own, which is slow to note it."""
    waitpid = os.waitpid

    def wait(*arguments):
        ended = waitpid(*arguments)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.5)
        return ended

    monkeypatch.setattr(os, "waitpid", wait)
    with WorkerPool(1) as pool:
        with pytest.raises(BrokenProcessPool):
            pool.submit(signal.raise_signal, signal.SIGKILL).result()
        assert pool.exit_statuses() == [-signal.SIGKILL]


def test_no_process_that_compiles(monkeypatch):
    monkeypatch.setattr(precompile, "compile_config", compile_config)
    monkeypatch.setattr(precompile, "_is_loaded", os.abort)
    with Precompiler(GPU, 1) as precompiler:
        ((_, fault),) = precompiler.compile([(CRASHES, FIRST)]).values()
    assert isinstance(fault, OSError) and "no process compiles" in str(fault)


def test_no_thread_that_compiles(monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    with Precompiler(GPU, 1) as precompiler:
        with monkeypatch.context() as patched, pytest.raises(OSError, match="can't start new thread"):
            patched.setattr(threading.Thread, "start", fail)
            precompiler.compile([(FINE, FIRST)])
        monkeypatch.setattr(precompile, "compile_config", compile_config)
        assert precompiler.compile([(FINE, FIRST)]) == {(FINE, FIRST): (8, None)}


def wrapped(error):
    """As Triton's code generator raises it, from within a function that the kernel calls."""
    outer, inner = (triton.CompilationError("", None, None) for _ in range(2))
    outer.__cause__, inner.__context__ = inner, error
    return outer


def raised(error, within=None):
    def fail(*arguments):
        try:
            if within:
                raise within
        finally:
            raise error

    return fail


KILL = subprocess.CalledProcessError(-signal.SIGKILL, ["ptxas"])
CRASH = subprocess.CalledProcessError(-signal.SIGSEGV, ["ptxas"])
OF_MACHINE = {
    "no space": (NO_SPACE, None, "No space left on device"),
    "no permission": (PermissionError(errno.EACCES, "Permission denied"), None, "Permission denied"),
    "too many files": (OSError(errno.EMFILE, "Too many open files"), None, "Too many open files"),
    "memory": (MemoryError(), None, "Cannot allocate memory"),
    "ptxas cannot write": (PTXASError("Output file 'x' could not be opened"), None, "could not be opened"),
    "ptxas is killed": (PTXASError("`ptxas` failed with error code -9"), KILL, "-9"),
    "what ptxas wrote is damaged": (subprocess.CalledProcessError(255, ["cuobjdump"]), None, "cuobjdump"),
    "memory in a kernel's function": (wrapped(MemoryError()), None, "Cannot allocate memory"),
    "disk in a kernel's function": (wrapped(OSError(errno.EIO, "Input/output error")), None, "Input/output error"),
    "space in a kernel's function": (wrapped(NO_SPACE), None, "[Errno 28] No space left on device"),
    "within two of them": (wrapped(wrapped(OSError(errno.EROFS, "Read-only file system"))), None, "Read-only"),
    "threads": (RuntimeError("can't start new thread"), None, "can't start new thread"),
    "threads in a kernel's function": (wrapped(RuntimeError("can't start new thread")), None, "thread"),
    "PyTorch's memory": (RuntimeError("DefaultCPUAllocator: can't allocate memory"), None, "allocate"),
}
OF_THE_CONFIG = {
    "ptxas crashes": (PTXASError("`ptxas` raised SIGSEGV"), CRASH),
    "not in Triton's language": (triton.CompilationError("", None, "out of bounds"), None),
    "not in a kernel's function": (wrapped(AssertionError("out of bounds")), None),
    "resources": (triton.OutOfResources(300000, 232448, "shared memory"), None),
    "anything else": (ValueError("block_n must be a power of 2"), None),
}


@pytest.mark.parametrize("error, within, told", OF_MACHINE.values(), ids=OF_MACHINE)
def test_faults_of_the_machine(monkeypatch, error, within, told):
    monkeypatch.setattr(precompile, "compile_launches", raised(error, within))
    _, fault = precompile.compile_config(FINE, FIRST, GPU)
    assert isinstance(fault, OSError) and told in str(fault)


@pytest.mark.parametrize("error, within", OF_THE_CONFIG.values(), ids=OF_THE_CONFIG)
def test_faults_of_a_config(monkeypatch, error, within):
    monkeypatch.setattr(precompile, "compile_launches", raised(error, within))
    _, fault = precompile.compile_config(FINE, FIRST, GPU)
    assert isinstance(fault, str) and fault.startswith(f"does not compile: {type(error).__name__}: ")


def test_what_the_cache_has_damaged_is_compiled_again(monkeypatch):
    def compile_launches(launch, architecture):
        if not triton.knobs.compilation.always_compile:
            raise KeyError("cubin")
        return [SimpleNamespace(shared_memory=1, spilled_bytes=4)]

    monkeypatch.setattr(precompile, "compile_launches", compile_launches)
    with pytest.warns(RuntimeWarning, match="Triton's cache in .* was damaged: linear_bias .* is compiled again"):
        assert precompile.compile_config(FINE, FIRST, GPU) == (4, None)
    assert not triton.knobs.compilation.always_compile


@pytest.mark.offline
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_fault_within_the_code_generator(tmp_path, monkeypatch, number):
    error = MemoryError() if number == errno.ENOMEM else OSError(number, os.strerror(number))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    linear_kernel.device_caches.clear()
    monkeypatch.setattr(CodeGenerator, "visit_Assign", raised(error))
    _, fault = precompile.compile_config(linear_problem(m=16, n=64, k=64), FIRST, GPU)
    assert isinstance(fault, OSError) and fault.errno == number


#: Of a kernel, and of the group of its files: what is no object, and objects that lack what they should have.
DAMAGED_JSON = {
    "null for a group's json": b"null",
    "a list for a group's json": b"[]",
    "a list of paths in a group's json": b'{"child_paths": ["x"]}',
    "null for a path in a group's json": b'{"child_paths": {"linear_kernel.json": null}}',
    "null for a json": b"null",
    "a number for a json": b"5",
    "an empty json": b"{}",
    "no backend's json": b'{"target": {"backend": "none", "arch": 90, "warp_size": 32}}',
    "no name in a json": b'{"target": {"backend": "cuda", "arch": 90, "warp_size": 32}}',
    "a deep json": b"[" * 100000,
}


@pytest.mark.offline
@pytest.mark.parametrize("damage", ["cubin", "empty cubin", "missing cubin", "json", "source", *DAMAGED_JSON])
def test_a_damaged_cache(tmp_path, monkeypatch, damage):
    """The kernel is compiled again, and the cache is whole afterwards."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    problem = linear_problem(m=16, n=64, k=64)
    config = kernel_of(problem.kernel).heuristic(problem, GPU)

    def compiled():
        linear_kernel.device_caches.clear()  # as in another process
        return precompile.compile_config(problem, config, GPU)

    assert compiled() == (0, None)
    paths = tmp_path.glob(f"*/*.{damage.split()[-1]}")
    (path,) = (path for path in paths if path.name.startswith("__grp__") == ("group's" in damage))
    before = path.read_bytes()
    if damage == "missing cubin":
        path.unlink()
    else:
        contents = {"empty cubin": b"", "source": b"\xff\xfe", **DAMAGED_JSON}
        path.write_bytes(contents.get(damage, before[: len(before) // 2]))
    warning = f"Triton's cache in {tmp_path} was damaged: {problem} is compiled again"
    triton_notices = damage == "missing cubin" and VERSION >= (3, 9)  # and compiles again by itself
    with contextlib.nullcontext() if triton_notices else pytest.warns(RuntimeWarning, match=warning):
        assert compiled() == (0, None)
    assert len(path.read_bytes()) == len(before)
    assert compiled() == (0, None)
