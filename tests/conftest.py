"""Which tests run where: through Triton's interpreter, as offline compilation, or on a GPU.

The interpreter is chosen by TRITON_INTERPRET=1 before triton is imported, for a whole process, so one run of pytest
does either the interpreter's tests (those without a mark) or the others:

    TRITON_INTERPRET=1 pytest -m "not gpu and not offline"
    pytest -m offline
    pytest -m gpu

Tests of the other kind are deselected, so that a bare ``pytest`` does what is possible in its process. ``--every 4``
runs a quarter of a test's cases and the first: which ones hangs on their names alone.
"""

import zlib

import hypothesis
import pytest
import torch
import triton

pytest.register_assert_rewrite("tests.accuracy", "tests.bench.refusals", "tests.ops.graphs")

INTERPRETED = bool(triton.knobs.runtime.interpret)


def _refuse_what_lies_outside():
    """Loads and stores of the interpreter raise where they would touch what is in none of the launch's tensors.

    Numpy reads and writes any address, and what a mask lets through by one element too many mostly goes unseen.
    """
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    take_arguments, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    extents = []

    def tensors_of(argument):
        if isinstance(argument, tuple):
            return [tensor for each in argument for tensor in tensors_of(each)]
        argument = getattr(argument, "base", argument)  # of a descriptor
        return [argument] if isinstance(argument, torch.Tensor) and argument.numel() else []

    def note_arguments(self, arguments, options):
        taken = take_arguments(self, arguments, options)
        extents.clear()
        for tensor in tensors_of((*taken[0], *taken[1].values())):
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            extents.append((tensor.data_ptr(), tensor.data_ptr() + last * tensor.element_size()))
        return taken

    def check(pointers, mask):
        touched = pointers.data[mask.data]
        if touched.size:
            least, greatest = touched.min(), touched.max()
            assert any(first <= least and greatest <= last for first, last in extents), "outside of all tensors"

    def checked_load(self, pointers, mask, *arguments, **options):
        check(pointers, mask)
        return load(self, pointers, mask, *arguments, **options)

    def checked_store(self, pointers, value, mask, *arguments):
        check(pointers, mask)
        return store(self, pointers, value, mask, *arguments)

    executor._init_args_hst = note_arguments
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store


if INTERPRETED:
    _refuse_what_lies_outside()

hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    # Not shrink: an example takes up to a second in the interpreter, and its sizes are small already.
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.register_profile(
    "exhaustive", hypothesis.settings.get_profile("ci"), derandomize=False, max_examples=12000
)
hypothesis.settings.load_profile("ci")


def pytest_addoption(parser):
    parser.addoption("--every", type=int, default=1, help="run the first of each test's cases and one in so many")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    config.addinivalue_line("markers", "offline: compiles kernels without a GPU; runs without the interpreter")


def pytest_report_header(config):
    if INTERPRETED:
        return "TRITON_INTERPRET=1: the interpreter's tests; gpu and offline tests run in a process without it"
    return "compiled kernels: gpu and offline tests; the others need TRITON_INTERPRET=1"


def pytest_collection_modifyitems(config, items):
    kept, others, tests = [], [], set()
    for item in items:
        compiled = item.get_closest_marker("gpu") or item.get_closest_marker("offline")
        test = item.nodeid.partition("[")[0]
        is_first = test not in tests
        is_drawn = is_first or zlib.crc32(item.nodeid.encode()) % config.option.every == 0
        tests.add(test)
        (others if bool(compiled) == INTERPRETED or not is_drawn else kept).append(item)
    if others:
        items[:] = kept
        config.hook.pytest_deselected(items=others)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is False")


@pytest.fixture
def fresh_compiler():
    """What other tests have compiled is forgotten, and what this one compiles."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def own_plans():
    """Each test makes its own plans: none holds what another test has patched."""
    from autotune_configs import lookup

    lookup.forget()


@pytest.fixture(autouse=True)
def default_precision():
    """Each test starts from, and leaves behind, PyTorch's default float32 setting."""
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def poisoned_memory():
    """PyTorch fills what ``torch.empty`` and its kin return with NaN (integers: their largest value).

    It does so in its deterministic mode alone. What a kernel leaves out, or reads before it is written, then shows.
    """
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(9).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def made(monkeypatch):
    """The plans that are made."""
    from ops.plan import Planner

    found = []
    plan = Planner.plan

    def noted(self, results):
        found.append(plan(self, results))
        return found[-1]

    monkeypatch.setattr(Planner, "plan", noted)
    return found
