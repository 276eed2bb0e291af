"""Kernels overlap with the launch before them, so each must wait for it before it touches memory."""

import ast
import re
from pathlib import Path

import pytest
import torch

import triton_kernels
from autotune_configs.offline import compile_launches
from triton_kernels.activations import SILU
from triton_kernels.chain import Chain
from triton_kernels.chains import LINEAR
from triton_kernels.float32_split import SplitOperand
from triton_kernels.float32_tiles import LinearSplitConfig
from triton_kernels.image_group_norm import image_group_norm
from triton_kernels.image_statistics import image_statistics
from triton_kernels.image_tiles import ImageNormConfig, ImageSumsConfig
from triton_kernels.launch import call as do
from triton_kernels.launch import launch, noted_in
from triton_kernels.linear import LinearConfig, linear

SOURCES = sorted(Path(triton_kernels.__file__).parent.glob("*.py"))
META = torch.device("meta")
#: What may touch memory, in PTX: shared memory and barriers too, which only this launch's programs see, but not
#: parameters.
TOUCHES_MEMORY = re.compile(r"^\s*(?:@%p\d+ )?(?:ld|st|cp|atom|red|prefetch)\.(?!param)", re.MULTILINE)


def jit_functions():
    """Each function that Triton or Gluon compiles, by file and name."""
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                yield path, node


def launched_names():
    """What is handed to a launcher anywhere, by file; a name that stands for one of several stands for all of them."""
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("launch", "launch_tiles", "launch_parts"):
                yield path, ast.unparse(call.args[0])


def waits_first(function):
    statements = [node for node in function.body if not ast.get_docstring(function) or node is not function.body[0]]
    return ast.unparse(statements[0]) == "wait_for_launch_before()"


def test_every_kernel_waits_before_all_else():
    functions = {(path, node.name): node for path, node in jit_functions()}
    launched = set(launched_names())
    assert len(launched) > 20
    kernels = {(path, name) for path, name in functions if name.endswith("_kernel")} | {
        place for place in launched if place in functions
    }
    # ``linear`` chooses between two, and ``launch_tiles`` and ``launch_parts`` are handed any.
    choosing = {(SOURCES[0].parent / name, "kernel") for name in ("linear.py", "image_tiles.py")}
    assert {place for place in launched if place not in functions} == choosing
    assert [place for place in kernels if not waits_first(functions[place])] == []


def test_nothing_is_launched_in_another_way():
    """A launch past ``launch`` would be on the wrong device at times, and missing where a call is repeated."""
    for path in SOURCES:
        if path.name != "launch.py":
            for call in ast.walk(ast.parse(path.read_text())):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript):
                    assert not ast.unparse(call.func.value).endswith("kernel"), f"{path.name}: {ast.unparse(call)}"


def compiled_linear(arch):
    input, weight, output = (torch.empty(256, 256, dtype=torch.bfloat16, device=META) for _ in range(3))
    config = LinearConfig(64, 64, 64, num_warps=4)
    (compiled,) = compile_launches(lambda: linear(input, weight, LINEAR, config, (None,), output=output), arch)
    return compiled.ptx


@pytest.mark.offline
def test_hopper_waits():
    before, _, _ = compiled_linear(90).partition("griddepcontrol.wait")
    assert before != compiled_linear(90)
    assert not TOUCHES_MEMORY.search(before)


@pytest.mark.offline
def test_ampere_has_no_such_instruction():
    assert "griddepcontrol" not in compiled_linear(80)


@pytest.mark.offline
def test_warps_of_their_own_begin_after_the_wait():
    from triton_kernels.linear_split_hopper import linear_split

    def operand(rows):
        parts = torch.empty(2, rows, 256, dtype=torch.float16, device=META)
        return SplitOperand(parts[0], parts[1], torch.empty(rows, device=META))

    output, left = torch.empty(256, 256, device=META), torch.empty(4, dtype=torch.int32, device=META)
    options = {"output": output, "left": left}
    (compiled,) = compile_launches(
        lambda: linear_split(operand(256), operand(256), LINEAR, LinearSplitConfig(2), (None,), **options), 90
    )
    assert compiled.ptx.count("griddepcontrol.wait") == 1
    # The producer's copies are behind the barrier that the other warps reach once they have waited.
    copies = [match.start() for match in re.finditer(r"cp\.async\.bulk", compiled.ptx)]
    wait = compiled.ptx.index("griddepcontrol.wait")
    barrier = compiled.ptx.index("barrier.sync", wait)
    assert copies and wait < barrier


@pytest.mark.offline
def test_sums_of_images_do_not_overlap(monkeypatch):
    """They mostly follow cuDNN's convolutions, behind which that takes longer; the pass behind them does."""
    overlaps = {}

    class Notes:
        def launch(self, kernel, grid, arguments, options, config):
            overlaps[kernel.fn.__name__] = options.get("launch_pdl", False)

    monkeypatch.setattr("triton_kernels.launch.architecture", lambda device: 90)
    image, vectors = torch.empty(2, 32, 64, device=META), [torch.empty(32, device=META) for _ in range(2)]
    chain = Chain("", before=(), after=(SILU,))
    with noted_in(Notes()):
        statistics = image_statistics(image, 4, 1e-5, ImageSumsConfig.fit(image), chain, (*vectors, None))
        config = ImageNormConfig.fit(image)
        image_group_norm(image, statistics, chain, (*vectors, None), config, output=torch.empty_like(image))
    assert overlaps == {"statistics_kernel": False, "apply_kernel": True}


def test_notes_take_the_place_of_launches_and_calls():
    seen = []

    class Notes:
        def launch(self, *launched):
            seen.append(launched)

        def call(self, *called):
            seen.append(called)
            return "what stands for the result"

    with noted_in(Notes()):
        launch("kernel", (1, 2), torch.device("cpu"), 3, SIZE=4)
        assert do(divmod, 5, 3, named=4) == "what stands for the result"
    assert seen == [("kernel", (1, 2), (3,), {"SIZE": 4}, None), (divmod, (5, 3), {"named": 4})]
    assert do(divmod, 5, 3) == (1, 2), "nothing is noted any more"
