"""Offline compilation of an image's sums in one launch: what is merged by the last program was stored before."""

import re
from functools import partial

import pytest
import torch

from autotune_configs.offline import compile_launches
from tests.compilation import META, by_architecture
from tests.test_offline_compilation_images import assert_fit_without_spills
from triton_kernels.activations import RELU
from triton_kernels.built_in import NAMED
from triton_kernels.chain import Chain
from triton_kernels.image_statistics import image_statistics
from triton_kernels.image_sums import image_sums
from triton_kernels.image_tiles import ImageSumsConfig
from triton_kernels.versions import VERSION

pytestmark = pytest.mark.offline

CHAIN = Chain(after=(RELU,))
EVENT = re.compile(r"\b(st\.global|bar\.sync|barrier\.sync|atom\.\S+|ld\.global\.cg)")


def launches(config, shape=(2, 128, 4096), num_groups=32, dtype=torch.bfloat16):
    B, C, S = shape
    image = torch.empty(B, S, C, dtype=dtype, device=META).mT
    of_channels = torch.empty(4, B, C, device=META)
    weight, bias, *sums = torch.empty(4, C, device=META)
    operands = (weight, bias, None)
    statistics = image_statistics(image, num_groups, 1e-5, config, CHAIN, operands, channels=of_channels[:2].unbind())
    image_sums(image, image, statistics, CHAIN, operands, (*sums, None), config, channels=of_channels[2:].unbind())


@by_architecture
def test_the_last_program_finds_what_others_stored(arch):
    """All threads store, a barrier, one thread's atomic addition that releases and acquires, a barrier, and loads that
    pass by the multiprocessor's own cache."""
    kernels = compile_launches(lambda: launches(ImageSumsConfig(64, 32, programs=64)), arch)
    assert [kernel.name for kernel in kernels] == ["statistics_kernel", "sums_kernel"]
    for kernel, counters in zip(kernels, (1, 2), strict=True):
        events = EVENT.findall(kernel.ptx)
        atomics = [place for place, event in enumerate(events) if event.startswith("atom")]
        assert len(atomics) == counters
        for place in atomics:
            assert {"acq_rel", "gpu", "add"} <= set(events[place].split("."))
            stored = max(i for i, event in enumerate(events[:place]) if event == "st.global")
            loaded = min(i for i, event in enumerate(events) if i > place and event == "ld.global.cg")
            assert any(event.startswith("bar") for event in events[stored:place])
            assert any(event.startswith("bar") for event in events[place:loaded])


@by_architecture
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "config", [ImageSumsConfig(32, 64, programs=528), ImageSumsConfig(64, 16, 2, programs=1056)], ids=str
)
def test_without_spills(config, dtype, arch):
    kernels = compile_launches(lambda: launches(config, dtype=dtype), arch)
    puts_aside = VERSION < (3, 7) and arch == 100 and dtype == torch.bfloat16 and config.num_warps == 2
    assert_fit_without_spills(kernels, put_aside=8 if puts_aside else 0)


@by_architecture
def test_images_that_are_added_up_are_on_their_way_too(arch):
    """All of them are loaded before they are needed, without spills."""
    config, count = ImageSumsConfig(32, 64, programs=528), []
    for added in range(3):
        chain = Chain(before=(NAMED["add tensor"],) * added)
        images = [torch.empty(1, 65536, 128, dtype=torch.bfloat16, device=META).mT for _ in range(1 + added)]
        operands = (*images[1:], None, None)
        (kernel,) = compile_launches(partial(image_statistics, images[0], 32, 1e-5, config, chain, operands), arch)
        count.append(kernel.ptx.count("cp.async.cg.shared.global"))
        assert_fit_without_spills([kernel])
    assert count == [count[0], 2 * count[0], 3 * count[0]] and count[0]
