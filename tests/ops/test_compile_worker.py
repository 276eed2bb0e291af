"""Promise: Inductor's workers compile the kernels of a graph's plans as this process would, and where none can, it does
so itself."""

import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from triton.compiler.compiler import ASTSource

from autotune_configs import lookup
from ops import compile_worker, inductor
from ops.calls import parse
from tests.ops.programs import run

DEVICE = torch.device("cuda", 0)
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448
)


def like(*shape, dtype=torch.float32, channels_last=False):
    """What stands for a tensor on the GPU."""
    format = torch.channels_last if channels_last else torch.contiguous_format
    stride = torch.empty(shape, device="meta", memory_format=format).stride()
    return inductor._Described(torch.Size(shape), stride, dtype, DEVICE, 0)


def text(call):
    return parse(call).text_in_graph


def statistics():
    image, weight = like(2, 32, 16, 16, dtype=torch.bfloat16, channels_last=True), like(32)
    return "statistics.default", [text("group_norm(4, 1e-05) -> mul -> no add"), [None, None], False], [image, weight]


def product():
    """Split operands, and what is left: with a descriptor among the arguments."""
    row = [like(1024, 512), like(1024, 512), like(1024)]
    call = text("linear -> add -> group_norm(32, 1e-05) -> no mul -> no add")
    return "forward.one", [call, [None] * 3, False], row


@pytest.fixture
def setting(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H100)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return compile_worker.Setting.of(DEVICE)


@pytest.fixture
def compiled(monkeypatch):
    """The kernels that this process compiles."""
    found, make = [], ASTSource.make_ir

    def noted(self, *arguments, **options):
        found.append(self.name)
        return make(self, *arguments, **options)

    monkeypatch.setattr(ASTSource, "make_ir", noted)
    return found


@pytest.mark.offline
@pytest.mark.parametrize("call", [statistics, product])
def test_what_a_worker_compiled_is_found(call, setting, compiled, tmp_path):
    """The workers are Inductor's own, which have another assembler, where PyTorch brings one."""
    from torch._inductor.async_compile import AsyncCompile

    with torch._inductor.config.patch(compile_threads=2):
        pool = AsyncCompile.process_pool()
        pool.submit(compile_worker.make_offline, setting, inductor._plan_of, *call()).result(timeout=300)
    kernels = len(list(tmp_path.glob("*/*.cubin")))
    assert kernels > 0 and not compiled
    compile_worker.make_offline(setting, inductor._plan_of, *call())
    assert not compiled and len(list(tmp_path.glob("*/*.cubin"))) == kernels


class Workers:
    """Stands for Inductor's: notes what is to be done, and does nothing or fails."""

    def __init__(self, is_ready=True, failure=None):
        self.is_ready, self.failure, self.submitted = is_ready, failure, []

    def use_process_pool(self):
        return self.is_ready

    def process_pool(self):
        return self

    def submit(self, *job):
        self.submitted.append(job[2:])
        future = Future()
        if self.failure != "none comes":
            future.set_exception(self.failure) if self.failure else future.set_result(None)
        return future


@pytest.fixture
def asked_of(setting, monkeypatch):
    """Puts workers in the place of Inductor's."""
    monkeypatch.setattr(lookup, "_generation", 0)
    compile_worker.forget()
    yield lambda workers: monkeypatch.setitem(
        sys.modules, "torch._inductor.async_compile", SimpleNamespace(AsyncCompile=workers)
    )
    compile_worker.forget()


@pytest.mark.parametrize(
    "workers, device, tables, is_early, is_asked",
    [
        (Workers(), DEVICE, 0, False, True),
        (Workers(is_ready=False), DEVICE, 0, False, False),
        (Workers(is_ready=False), DEVICE, 0, True, True),
        (Workers(), torch.device("cpu"), 0, True, False),
        (Workers(), DEVICE, 1, True, False),  # whose tables changed in this process
        (None, DEVICE, 0, True, False),  # another PyTorch's
        (SimpleNamespace(), DEVICE, 0, True, False),
    ],
)
def test_who_is_asked(workers, device, tables, is_early, is_asked, asked_of, monkeypatch):
    monkeypatch.setattr(lookup, "_generation", tables)
    asked_of(workers)
    assert (compile_worker.ask(device, print, 1, is_early=is_early) is not None) == is_asked
    monkeypatch.delitem(sys.modules, "torch._inductor.async_compile")
    assert compile_worker.ask(device, print, 1, is_early=is_early) is None


def test_what_is_asked_once(asked_of, monkeypatch, tmp_path):
    """The same call with the same setting; a folder of another name knows nothing of it."""
    workers = Workers()
    asked_of(workers)
    first = compile_worker.ask(DEVICE, print, like(2), is_early=True)
    assert compile_worker.ask(DEVICE, print, like(2)) is first and workers.submitted == [(print, like(2))]
    compile_worker.ask(DEVICE, print, like(3))
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        compile_worker.ask(DEVICE, print, like(3))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert len(workers.submitted) == 3
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    assert compile_worker.ask(DEVICE, print, like(2)) is not first


@pytest.mark.parametrize("failure", [None, RuntimeError("a worker's"), "none comes"], ids=str)
def test_what_a_worker_does_not(failure, asked_of, monkeypatch, caplog):
    """The caller does it, and the log tells."""
    monkeypatch.setattr(compile_worker, "_LONGEST", 0.01)
    workers = Workers(failure=failure)
    asked_of(workers)
    with caplog.at_level("INFO", "ops.compile_worker"):
        compile_worker.wait(compile_worker.ask(DEVICE, print, 1))
        compile_worker.wait(None)
    assert workers.submitted == [(print, 1)] and len(caplog.messages) == (failure is not None)


PROGRAM = """
import torch
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from triton.compiler.compiler import ASTSource

from ops import compiling
from ops.backend import normfuse

compiling.IN_THREADS = True
found, make = [], ASTSource.make_ir
ASTSource.make_ir = lambda self, *given, **options: (found.append(self.name), make(self, *given, **options))[1]
model = nn.Sequential(nn.Conv2d(8, 64, 3), nn.GroupNorm(8, 64), nn.SiLU()).cuda()
image = torch.randn(2, 8, 64, 64, device="cuda")
AsyncCompile.use_process_pool()
AsyncCompile.wait_pool_ready()
torch.compile(model, backend=normfuse)(image).sum().backward()
torch.cuda.synchronize()
print(sorted(name for name in found if not name.startswith("triton_")))
"""


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, monkeypatch):
    """The first call compiles none of the project's kernels in its own process."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert run(tmp_path, PROGRAM, interpreted=False) == ["[]"]
