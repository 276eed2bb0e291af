"""Promise: overlapping windows of shared memory begin where they should, with each Triton."""

import re

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autotune_configs.offline import compile_launches
from tests.compilation import META
from triton_kernels.hopper_barriers import new_barriers
from triton_kernels.hopper_memory import load_box, view, window

pytestmark = pytest.mark.offline

STAGES = 3
#: By the buffer's atom: a swizzle atom of 8 pixels (convolution_hopper), or one pixel (weight_gradient_hopper); and the
#: atoms of the buffer, of a window, before the first stage, from stage to stage, and before the window in its stage.
WINDOWS = {
    "8 pixels": ((8, 64), 96, 16, 6, 19, 3),
    "8 pixels, at the end of a stage": ((8, 64), 128, 16, 72, 18, 2),
    "a pixel": ((64,), 512, 32, 0, 150, 45),
    "a pixel, few of them": ((64,), 512, 8, 0, 150, 142),
}


@gluon.jit
def copy_to_window(
    source,
    stage,
    ATOM: gl.constexpr,
    ATOMS: gl.constexpr,
    OF_WINDOW: gl.constexpr,
    FIRST: gl.constexpr,
    PITCH: gl.constexpr,
    PLACE: gl.constexpr,
    STAGES: gl.constexpr,
):
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    if ATOM == 8:
        memory = gl.allocate_shared_memory(source.dtype, [ATOMS, 8, 64], swizzled)
    else:
        memory = gl.allocate_shared_memory(source.dtype, [ATOMS // 8, 8, 64], swizzled)
        memory = view(memory, source.dtype, [ATOMS, 64], flat)
    barriers = new_barriers(1, 1)
    box = window(memory, stage, OF_WINDOW, FIRST, PITCH, STAGES, PLACE)
    load_box(source, [0, 0], barriers.index(0), box)


@pytest.mark.parametrize("name", WINDOWS)
def test_where_a_window_begins(name):
    atom, atoms, of_window, first, pitch, place = WINDOWS[name]
    pixels = atom[0] if len(atom) == 2 else 1

    def launch():
        image = torch.empty(1024, 64, dtype=torch.bfloat16, device=META)
        layout = gl.NVMMASharedLayout(128, 16, 2)
        source = TensorDescriptor.from_tensor(image, [of_window * pixels, 64], layout)
        copy_to_window[(1,)](source, 2, pixels, atoms, of_window, first, pitch, place, STAGES, num_warps=4)

    (kernel,) = compile_launches(launch, 90)
    for stage in range(STAGES):
        assert copied_to(kernel.ptx, stage) == (first + stage * pitch + place) * pixels * 128


def copied_to(ptx, stage):
    """The byte of shared memory to which a kernel without loops copies, with this value of its one integer."""
    values = {"global_smem": 0}
    compute = {
        "mov": lambda a: a,
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b,
        "mad": lambda a, b, c: a * b + c,
        "shl": lambda a, b: a << b,
        "selp": lambda a, b, is_a: a if is_a else b,
        "setp.eq": lambda a, b: a == b,
        "setp.ne": lambda a, b: a != b,
    }
    for line in ptx.splitlines():
        words = line.strip().rstrip(";").replace(",", "").split()
        if words[:1] == ["ld.param.b32"]:
            values[words[1]] = stage
        elif words and (found := re.match(r"cp\.async\.bulk\.tensor|setp\.\w+|\w+", words[0])) and found[0] in compute:
            given = [values.get(each, each) for each in words[2:]]
            if all(isinstance(each, int) or re.fullmatch(r"-?\d+", each) for each in given):
                values[words[1]] = compute[found[0]](*map(int, given))
        elif "cp.async.bulk.tensor" in line:
            return values[re.search(r"\[(%r\d+)\]", line)[1]]
    raise AssertionError(ptx)
