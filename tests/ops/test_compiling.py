"""Kernels are compiled side by side, and what two plans need once."""

import os
import signal
import threading
from concurrent.futures import Future, wait
from types import SimpleNamespace

import pytest
import torch

from ops import compiling

DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def in_threads(monkeypatch):
    """Also with a Python that cannot compile so: these kernels are not parsed."""
    monkeypatch.setattr(compiling, "IN_THREADS", True)


class Compiled:
    """In the place of Triton's: it is loaded as it is asked for what launches it."""

    def __init__(self):
        self.loads = 0

    def __getitem__(self, grid):
        self.loads += 1


class Kernel:
    """In the place of Triton's: its parameters are a tensor, a size and a constexpr."""

    params = tuple(SimpleNamespace(is_constexpr=each) for each in (False, False, True))

    def __init__(self, compile=lambda: None):
        self.compile, self.kept, self.at_once, self.most_at_once = compile, {}, 0, 0

    def run(self, tensor, size, constexpr, *, grid, warmup, **options):
        key = tensor.dtype, size % 16 == 0, constexpr, *options.items()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        if key not in self.kept:
            self.compile()
            self.kept[key] = Compiled()
        self.at_once -= 1
        return self.kept[key]


def begin(kernel, size, constexpr=1, dtype=torch.float32, **options):
    return compiling.begin(DEVICE, kernel, (1,), [torch.empty(3, dtype=dtype), size, constexpr], options)


def test_kernels_are_compiled_side_by_side():
    both = threading.Barrier(3)
    kernels = [Kernel(lambda: both.wait(timeout=60)) for _ in range(3)]
    assert all(each.loads == 1 for each in compiling.finished([begin(each, 32) for each in kernels]))


@pytest.mark.parametrize(
    "version, may", [((3, 10, 13), True), ((3, 11), False), ((3, 11, 7), False), ((3, 11, 8), True), ((3, 12, 0), True)]
)
def test_a_python_whose_threads_cannot_parse_at_once(version, may, monkeypatch):
    """There the caller compiles."""
    assert compiling.may_parse(version) is may
    monkeypatch.setattr(compiling, "IN_THREADS", may)
    names: list[str] = []
    compiling.finished([begin(Kernel(lambda: names.append(threading.current_thread().name)), 32)])
    assert names[0].startswith("normfuse-kernels") is may


@pytest.mark.parametrize("other", [{"size": 33}, {"constexpr": 2}, {"dtype": torch.float16}, {"num_warps": 8}], ids=str)
def test_so_are_specializations(other):
    both = threading.Barrier(2)
    kernel = Kernel(lambda: both.wait(timeout=60))
    first, second = compiling.finished([begin(kernel, 32), begin(kernel, **{"size": 32} | other)])
    assert first is not second


def test_a_specialization_is_compiled_once():
    """Whatever the sizes and numbers: while one thread compiles it, others wait."""
    begun = threading.Event()
    kernel = Kernel(lambda: begun.wait(timeout=60))
    futures = [begin(kernel, 16 * size) for size in range(2, 6)]
    assert all(isinstance(each, Future) for each in futures)
    wait(futures, timeout=0.2)
    begun.set()
    first, *others = compiling.finished(futures)
    assert all(each is first for each in others) and kernel.most_at_once == 1
    assert begin(kernel, 160) is first  # no thread is asked
    assert compiling._kind(False, 0.5) == compiling._kind(False, 1e-5)


def test_where_one_fails():
    """Its error is raised, those that have not begun never do, and a failure is no kernel."""

    def fail():
        raise RuntimeError("no such instruction")

    held, started = threading.Event(), threading.Semaphore(0)
    slow, kernel = [Kernel(lambda: started.release() or held.wait(timeout=60)) for _ in range(40)], Kernel(fail)
    failed, *begun = begin(kernel, 32), *[begin(each, 32) for each in slow]
    assert all(started.acquire(timeout=60) for _ in range(compiling._MOST_THREADS))
    with pytest.raises(RuntimeError, match="no such instruction"):
        compiling.finished([failed, *begun])
    held.set()
    wait(begun)
    assert sum(each.cancelled() for each in begun) == len(slow) - compiling._MOST_THREADS
    with pytest.raises(RuntimeError, match="no such instruction"):
        compiling.finished([begin(kernel, 32)])


def test_at_the_end_of_the_process(monkeypatch):
    """No thread can be started then."""

    def refuse(*_):
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(compiling, "threads", lambda purpose: SimpleNamespace(submit=refuse))
    assert begin(Kernel(), 32).loads == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_has_threads_of_its_own():
    compiling.finished([begin(Kernel(), 32)])
    compiling._finding.acquire()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends it
        os._exit(0 if compiling.finished([begin(Kernel(), 48)])[0].loads == 1 else 1)
    compiling._finding.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
