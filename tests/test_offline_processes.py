"""Promise: what Inductor's processes compile, this process finds in Triton's cache and does not compile again."""

import pytest
import torch
import triton
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_worker.subproc_pool import SubprocPool
from triton.compiler.compiler import ASTSource

from autotune_configs.offline import compile_launches
from ops import inductor
from tests.compilation import META
from tests.test_offline_compilation import L94, SPLIT_K, SPLIT_M, split_product_launches
from tests.test_offline_compilation_norms import pass_over
from triton_kernels import chains
from triton_kernels import launch as launching
from triton_kernels.float32_split import split

pytestmark = pytest.mark.offline


class Notes:
    """Compiles what is launched in a process first, as a plan's thread does."""

    def __init__(self):
        self.compiled = []

    def launch(self, kernel, grid, arguments, options, config):
        stand_ins = launching.with_counters(arguments, lambda each: each.stand_in)
        kernel.device_caches.clear()
        inductor._compile_in_process(kernel, stand_ins, options)
        kernel.run(*stand_ins, grid=grid, warmup=True, **options)
        self.compiled.append(kernel.__name__)

    def call(self, function, arguments, options):
        return function(*arguments, **options)


@pytest.fixture
def front_end(monkeypatch, tmp_path):
    """The names of the kernels that this process compiles, with an empty cache."""
    found, make_ir = [], ASTSource.make_ir

    def noted(self, *arguments, **options):
        found.append(self.fn.__name__)
        return make_ir(self, *arguments, **options)

    monkeypatch.setattr(ASTSource, "make_ir", noted)
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        yield found


def product():
    """Descriptors of tensors, and a chain."""
    split_product_launches(2, L94, ("depth", "rows"), 32)


def operand():
    split(torch.empty(SPLIT_M, SPLIT_K, device=META), 2, torch.empty(1, dtype=torch.int32, device=META))


def image_norm():
    """Counters, and functions among the options."""
    image = torch.empty(4, 64, 28 * 28, dtype=torch.bfloat16, device=META)
    vector = torch.empty(64, dtype=torch.bfloat16, device=META)
    pass_over(chains.GROUP_NORM_HARDTANH, image, (vector, vector, (-1.0, 1.0)), (image,), 8)


def compile_in_processes(launches):
    notes = Notes()

    def noted():
        with launching.noted_in(notes):
            launches()

    compile_launches(noted, 90)
    return notes.compiled


@pytest.mark.parametrize("launches", [operand, product, image_norm])
def test_compiled_once(launches, front_end):
    compiled = compile_in_processes(launches)
    assert compiled and front_end == []


def test_what_no_process_compiles_is_compiled_here(front_end, monkeypatch):
    def refuses(*arguments):
        raise OSError("no process")

    monkeypatch.setattr(AsyncCompile, "process_pool", refuses)
    assert compile_in_processes(operand) == front_end == ["split_kernel"]


def test_the_cache_may_move(front_end, monkeypatch, tmp_path):
    """As Inductor moves it, while a process compiles."""
    submit = SubprocPool.submit

    def moved(self, *arguments):
        triton.knobs.cache.dir = str(tmp_path / "moved")
        return submit(self, *arguments)

    monkeypatch.setattr(SubprocPool, "submit", moved)
    assert compile_in_processes(operand) and front_end == []
