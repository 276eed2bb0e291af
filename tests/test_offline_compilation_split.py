"""Promise: float32 products of split operands, and the splits, compile without a GPU, fit, and spill no more than is
measured to be good.

As in ``tests/test_offline_compilation.py``, which has the other chains; products in registers are in
``test_offline_compilation_registers.py``.
"""

import functools

import pytest
import torch

from autotune_configs.offline import compile_launches
from tests.compilation import META, by_architecture, more_spills
from tests.test_offline_compilation import L30, L75, L94, operands_of
from tests.triton_kernels.test_chain import CHAINS
from triton_kernels import chains, row_minimum
from triton_kernels.built_in import BUILT_IN
from triton_kernels.chain import Chain
from triton_kernels.float32_block_split import BlockSplit, split_blocks
from triton_kernels.float32_split import SplitOperand, split
from triton_kernels.float32_tiles import LinearSplitConfig
from triton_kernels.grid import blocks_of
from triton_kernels.linear import FLOAT32_INPUT_PRECISION, linear

pytestmark = pytest.mark.offline

SPLIT_M, SPLIT_N, SPLIT_K = 1024, 8192, 8192


by_scales = pytest.mark.parametrize("parts, in_blocks", [(1, False), (2, False), (2, True)], ids=["1", "2", "blocks"])


def split_operand(rows, depth, order, parts, in_blocks):
    shape = (parts, rows, depth) if order == "depth" else (parts, depth, rows)
    memory = torch.empty(shape, dtype=torch.float16, device=META)
    memory = memory if order == "depth" else memory.mT
    if in_blocks:
        scale = torch.empty(blocks_of(rows, 128), blocks_of(depth, 128), device=META)
        return BlockSplit(memory[0], memory[1], scale, scale)
    return SplitOperand(memory[0], memory[1] if parts == 2 else None, torch.empty(rows, device=META))


def split_product_launches(parts, chain, orders, group_size=1, shape=(SPLIT_M, SPLIT_N), in_blocks=False):
    """The product of split operands and that of the remaining tiles, with what the backward pass needs."""
    from triton_kernels.linear_split_hopper import linear_split

    config = LinearSplitConfig(parts, divides=orders[0] == "rows", in_blocks=in_blocks)
    (M, N), K = shape, SPLIT_K
    output, saved = torch.empty(2, M, N, device=META)
    if chain.reduction:
        output, saved = row_minimum.empty_tile_minimum(N // config.epilogue_columns, M, group_size, META, True)
    operands = operands_of(chain, M, N)
    saved = saved if chain.norm else None
    left = torch.empty(blocks_of(M, config.block_m) * blocks_of(N, config.block_n), dtype=torch.int32, device=META)
    options = {"output": output, "saved": saved, "eps": 1e-5, "group_size": group_size, "left": left}
    input, weight = (split_operand(*each, parts, in_blocks) for each in zip((M, N), (K, K), orders, strict=True))
    linear_split(input, weight, chain, config, operands, **options)
    matrices = (matrix.high.float() for matrix in (input, weight))
    linear(*matrices, chain, config.rest, operands, input_precision=FLOAT32_INPUT_PRECISION, **options)


@pytest.mark.parametrize(
    "chain, orders, group_size",
    [
        (chains.LINEAR, ("depth", "depth"), 1),
        (chains.LINEAR, ("depth", "rows"), 1),
        (chains.LINEAR, ("rows", "rows"), 1),
        (L94, ("depth", "depth"), 32),
        (L30, ("depth", "depth"), 128),
        (L75, ("depth", "depth"), 16),
    ],
    ids=lambda value: value.kernel if isinstance(value, Chain) else None,
)
@by_scales
def test_split_products(parts, in_blocks, chain, orders, group_size):
    launch = functools.partial(split_product_launches, parts, chain, orders, group_size, in_blocks=in_blocks)
    kernels = compile_launches(launch, 90)
    # In the epilogue of tiles of 256 columns, once a tile: what vectors are loaded ahead (with 584 bytes in L94's, the
    # products of a training step take 209 us on average, those of plain tiles about 200; H200). The rest is rare.
    allowed = {"linear_split_kernel": 600 if parts == 1 else 96, "linear_sections_kernel": 0, "linear_rest_kernel": 512}
    has_sections = orders[0] == "rows" and parts == 1  # tiles of 256 columns are one too many for 3 multiprocessors
    assert [kernel.name for kernel in kernels] == [name for name in allowed if has_sections or "sections" not in name]
    for kernel in kernels:
        multiplies = kernel.name != "linear_sections_kernel"
        assert kernel.fits and ("wgmma" in kernel.ptx) == multiplies and not kernel.waits_for_products
        assert kernel.spilled_bytes <= allowed[kernel.name] + more_spills(90), kernel.name


@by_scales
def test_split_products_of_sections(parts, in_blocks):
    """One tile for all multiprocessors."""
    tile = LinearSplitConfig(parts).block_m, LinearSplitConfig(parts).block_n
    launch = functools.partial(split_product_launches, parts, chains.LINEAR, ("rows", "rows"), 1, tile, in_blocks)
    kernels = compile_launches(launch, 90)
    product, sections, rest = kernels
    assert [kernel.name for kernel in kernels] == [f"linear_{name}_kernel" for name in ("split", "sections", "rest")]
    assert all(kernel.fits and not kernel.waits_for_products for kernel in kernels)
    assert product.spilled_bytes == sections.spilled_bytes == 0 and rest.spilled_bytes <= 512 + more_spills(90)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("parts", [1, 2])
def test_split_products_with_operands(parts, name):
    """A chain's tensors have room beside the widest tiles, also of what is left."""
    chain, _ = CHAINS[name]
    kernels = compile_launches(lambda: split_product_launches(parts, chain, ("depth", "depth"), 64), 90)
    assert [kernel.name for kernel in kernels if kernel.fits] == ["linear_split_kernel", "linear_rest_kernel"]


@pytest.mark.parametrize("norm", ["", "group_norm"])
def test_split_products_take_every_function(norm):
    """Gluon, in which they are written, has not all of Triton's language."""
    functions = tuple(each for each in BUILT_IN if each.operand != "sample")
    chain = Chain("linear", norm=norm, after=functions)
    kernels = compile_launches(lambda: split_product_launches(2, chain, ("depth", "depth"), 64), 90)
    assert [kernel.name for kernel in kernels] == ["linear_split_kernel", "linear_rest_kernel"]


@by_architecture
@pytest.mark.parametrize("parts", [1, 2])
def test_splits(parts, arch):
    def launch():
        for shape in ((SPLIT_M, SPLIT_K), (SPLIT_M, 2 * SPLIT_K), (SPLIT_M, 77), (SPLIT_M, 40000)):
            split(torch.empty(shape, device=META), parts)
        for rows, depth in (
            (2 * SPLIT_M, 512),
            (8 * SPLIT_M, SPLIT_K),
            (SPLIT_M, SPLIT_K),
            (1000, SPLIT_K),
            (1002, SPLIT_K),
        ):
            split(torch.empty(depth, rows, device=META).T, parts)
        for shape in ((SPLIT_M, SPLIT_K), (1000, 1002), (77, 1001)):
            split_blocks(torch.empty(shape, device=META))
            split_blocks(torch.empty(shape[::-1], device=META).T)

    for kernel in compile_launches(launch, arch):
        # Two registers where rows are contiguous; the smaller block, which spills none, takes 1.09 of its time (H200).
        assert kernel.fits and kernel.spilled_bytes <= 8 + more_spills(arch)
