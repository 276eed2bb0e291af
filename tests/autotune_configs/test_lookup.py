"""Lookup of a problem's config: the user's entry, the shipped one, the nearest, the heuristic's."""

from dataclasses import replace

import pytest
import torch

import autotune_configs
from autotune_configs import lookup, tables
from autotune_configs.gpus import Gpu
from autotune_configs.heuristics import heuristic_image_config, heuristic_linear_config
from autotune_configs.kernels import KERNELS
from autotune_configs.problem import Problem
from tests.autotune_configs.entries import FIRST, GPU, SECOND, entry, linear_problem
from triton_kernels.group_norm import GroupNormConfig
from triton_kernels.image_tiles import ImageSumsConfig, layout_of
from triton_kernels.linear import LinearConfig

NORMALISING = "linear_hardtanh_mish_group_norm"


@pytest.fixture
def table(folder, monkeypatch):
    """Only a shipped table of the GPU, none of other GPUs, and none of the user's own."""
    shipped, read = [], tables.read

    def of_gpu(path, gpu):
        if path.parent == tables.shipped_folder():
            return tuple(shipped) if path == tables.shipped_path(GPU) else ()
        return read(path, gpu)

    monkeypatch.setattr(tables, "read", of_gpu)
    return shipped


def find(**sizes):
    lookup.forget()
    return lookup.find(linear_problem(**sizes), GPU)


def heuristic(m=1024, n=8192, k=8192, group_size=1):
    return heuristic_linear_config(2, m, n, k, group_size, GPU)


def test_exact_entry(table):
    table += [entry(SECOND, m=512), entry(FIRST), entry(SECOND, m=2048)]
    found = find()
    assert found.config == FIRST
    assert found.entry == table[1] and found.table == str(tables.shipped_path(GPU))


def test_nearest_entry(table):
    """Distances are in doublings: 1500 is nearer to 2048 than to 1024. (float32 has no prediction.)"""
    table += [entry(FIRST, dtype="float32"), entry(SECOND, dtype="float32", m=2048)]
    assert find(m=1400, dtype="float32").config == FIRST
    assert find(m=1500, dtype="float32").config == SECOND
    assert find(m=4096, dtype="float32").config == SECOND


def test_tiles_that_come_out_even(table):
    """80 tiles of 128 x 256 leave two of five multiprocessors idle; 128 tiles of 128 x 128 do not.

    An entry for just this problem is used even so.
    """
    wide, square = LinearConfig(128, 256, 64), LinearConfig(128, 128, 64)
    table += [entry(wide, m=512, n=4608, k=4096), entry(square, m=256, n=16384, k=4096)]
    assert find(m=512, n=4096, k=4096).config == square and find(m=512, n=4096, k=4096).fills_last_wave
    assert find(m=1024, n=4096, k=4096).config == wide, "twice as many fill the waves with either"
    assert find(m=512, n=4096, k=1024, dtype="float16").entry is None
    table += [entry(wide, m=512, n=4096, k=4096)]
    assert find(m=512, n=4096, k=4096).config == wide
    del table[0], table[-1]
    assert find(m=64, n=2048, k=4096).entry is None, "too far away to be the nearest, and no better than the rule's"
    assert find(m=2, n=4096, k=4096).entry is None


def test_the_width_of_groups_counts(table):
    table += [entry(FIRST, group_size=16, kernel=NORMALISING), entry(SECOND, group_size=64, kernel=NORMALISING)]
    assert find(group_size=16, kernel=NORMALISING).config == FIRST
    assert find(group_size=64, kernel=NORMALISING).config == SECOND


def test_far_entries_say_nothing(table):
    table += [entry(FIRST)]
    assert find(m=64, n=256) == lookup.Found(heuristic(m=64, n=256))
    assert find(m=0) == lookup.Found(heuristic(m=0))


def test_what_is_no_size_must_be_the_same(table):
    table += [entry(FIRST, Problem("group_norm", "bfloat16", (1024, 8192, 1))), entry(FIRST, dtype="float16")]
    assert find().entry is None
    assert find(dtype="float16").config == FIRST
    images = 8, 64, 4096, 8
    table += [entry(ImageSumsConfig(8, 64), Problem("image_statistics", "bfloat16", images, None, "contiguous"))]
    lookup.forget()
    assert lookup.find(Problem("image_statistics", "bfloat16", images, None, "contiguous"), GPU).entry
    assert lookup.find(Problem("image_statistics", "bfloat16", images, None, "channels_last"), GPU).entry is None


def test_kin(table):
    """An epilogue without entries takes those of another: the nearer, the fewer things only one of the two does."""
    reduced, tensors = "linear_group_norm_row_minimum", "linear_group_norm_add_tensor"
    for other in (reduced, "linear_bias", tensors, NORMALISING):  # from the farthest to the nearest
        table.append(entry(SECOND, kernel=other, group_size=1 if other == "linear_bias" else 64))
    for kernel, nearest in (
        ("linear_group_norm_silu", NORMALISING),
        ("linear_silu_group_norm_mul_vector", NORMALISING),
        ("linear_silu", "linear_bias"),
        ("linear_group_norm_silu_add_tensor", tensors),
    ):
        found = find(kernel=kernel, group_size=1 if nearest == "linear_bias" else 64)
        assert (found.kin, found.entry.problem.kernel) == (nearest, nearest), kernel
    assert find(kernel=NORMALISING, group_size=64).kin == "", "its own where it has one"
    table[:] = [entry(SECOND, kernel=reduced, group_size=64)]
    assert find(kernel="linear_group_norm_silu", group_size=64).kin == reduced, "and what there is"


def test_how_far_kin_are(table):
    """Other functions count for half a doubling, a norm for as much again; then its width says nothing."""
    table += [entry(FIRST, kernel=NORMALISING, group_size=64, dtype="float32")]
    table += [entry(SECOND, kernel="linear_group_norm_silu", group_size=64, dtype="float32", m=2048)]
    found = {m: find(kernel="linear_group_norm_silu", group_size=64, dtype="float32", m=m) for m in (1100, 1200, 1250)}
    assert [(m, each.kin) for m, each in found.items()] == [(1100, NORMALISING), (1200, NORMALISING), (1250, "")]
    assert find(kernel="linear_silu", dtype="float32", m=4096).kin == "linear_group_norm_silu"
    assert find(kernel="linear_silu", dtype="float32", m=8192, n=16384).entry is None, "three doublings, and one of kin"
    table[:] = [entry(FIRST, kernel="linear_bias", m=512, dtype="float32")]
    assert find(kernel="linear_group_norm_silu", group_size=64, dtype="float32", m=1024).config == FIRST


def test_what_kin_do_not_share(table):
    """Another dtype, kernels that are no chain's product, and configs that do not hold the groups."""
    table += [entry(SECOND, kernel=NORMALISING, group_size=64)]
    assert find(kernel="linear_group_norm_silu", group_size=64, dtype="float16").entry is None
    assert find(kernel="linear_group_norm_silu", group_size=128).entry is None
    norm = Problem("group_norm", "bfloat16", (1024, 8192, 32))
    table += [entry(GroupNormConfig(1, 32, 1), norm), entry(FIRST, replace(norm, kernel="another_norm"))]
    lookup.forget()
    assert lookup.find(replace(norm, kernel="group_norm_backward"), GPU).entry is None
    assert lookup.find(norm, GPU).kin == ""


def test_kins_tiles_are_divided_as_ones_own_epilogue_needs(table):
    """A reduction stores no strips. Tensors, and several exponentials beside a full tile, take the tile in two."""
    wide = LinearConfig(128, 256, 64, num_stages=4, store_strips=2)
    table += [entry(wide), entry(wide, kernel=NORMALISING, group_size=16)]
    in_strips = replace(wide, epilogue_strips=2, store_strips=1)
    for kernel, expected in (
        ("linear_silu", wide),
        ("linear_silu_hardtanh_mul_mul_vector", wide),
        ("linear_silu_silu", in_strips),
        ("linear_softplus", in_strips),
        ("linear_add_tensor", replace(in_strips, num_stages=3)),
    ):
        found = find(kernel=kernel)
        assert found.kin == "linear_bias" and found.config == expected, kernel
    assert find(kernel="linear_silu_group_norm_gelu", group_size=16).config == in_strips
    reduced = find(kernel="linear_group_norm_row_minimum", group_size=16)
    assert reduced.kin and reduced.config == replace(wide, store_strips=1)


def test_tiles_hold_groups_where_they_can(table):
    table += [entry(SECOND, group_size=64, kernel=NORMALISING), entry(FIRST, m=4096, group_size=64, kernel=NORMALISING)]
    assert find(group_size=32, kernel=NORMALISING).config == SECOND
    assert find(group_size=128, kernel=NORMALISING).config == FIRST, "further away, but it holds the groups"
    assert find(group_size=256, kernel=NORMALISING).config.holds_groups_of(256)


def test_entries_that_do_not_fit_are_passed_over(table):
    table += [entry(LinearConfig(128, 256, 64, num_stages=3))]
    small = replace(GPU, shared_memory=101376)
    assert lookup.find(linear_problem(), small).entry is None
    assert lookup.find(linear_problem(), GPU).entry is not None


def test_rows_that_descriptors_do_not_take(table):
    """Tables are measured with tensor descriptors. K = 8191 in bfloat16 is loaded without them."""
    table += [entry(FIRST, k=8190)]
    assert find(k=8191).config == heuristic(k=8191)


def test_an_entry_of_other_settings_is_passed_over(table):
    """A version of the package that has other kernels wrote it."""
    stranger = entry(FIRST)
    stranger.config["swizzle"] = 1
    table += [stranger]
    assert find().entry is None


def test_users_own_entry_wins(folder, monkeypatch):
    monkeypatch.setattr(tables, "shipped_folder", lambda: folder.parent / "shipped")
    tables.store(tables.shipped_path(GPU), GPU, entry(FIRST))
    assert find().config == FIRST
    tables.store(tables.user_path(GPU), GPU, entry(SECOND))
    found = find()
    assert found.config == SECOND and found.table == str(tables.user_path(GPU))
    assert find(m=1400).config == SECOND, "also where both are equally near"
    tables.store(tables.shipped_path(GPU), GPU, entry(FIRST, m=1400))
    assert find(m=1400).config == FIRST, "but an exact entry is nearer"


def test_tables_of_kin(folder, monkeypatch):
    """A GPU also uses the shipped tables of GPUs of its architecture and about its size."""
    monkeypatch.setattr(tables, "shipped_folder", lambda: folder.parent / "shipped")
    tables.store(tables.shipped_path(GPU), GPU, entry(FIRST))
    tables.shipped_path(GPU).with_name("damaged.json").write_text("[")
    lookup.forget()
    kin = Gpu.called("NVIDIA H100 PCIe")
    found = lookup.find(linear_problem(), kin)
    assert found.config == FIRST and found.table == str(tables.shipped_path(GPU))
    assert found.is_of(GPU) and not found.is_of(kin)
    larger = replace(GPU, name="A larger one", multiprocessors=160)
    tables.store(tables.shipped_path(larger), larger, entry(SECOND))
    lookup.forget()
    assert lookup.find(linear_problem(), kin).config == FIRST, "of the one that is more like it"
    for other in (Gpu.called("NVIDIA B200"), replace(kin, name="a slice", multiprocessors=66)):
        assert lookup.find(linear_problem(), other).entry is None
    smaller = replace(GPU, name="A smaller one", multiprocessors=62)
    tables.store(tables.shipped_path(smaller), smaller, entry(SECOND))
    lookup.forget()
    assert lookup.find(linear_problem(), kin).config == FIRST, "nor of one that is smaller, and less like it"
    tables.store(tables.shipped_path(kin), kin, entry(SECOND, m=1400))
    lookup.forget()
    assert lookup.find(linear_problem(), kin).config == FIRST, "where its own has another problem alone"
    assert lookup.find(linear_problem(m=1200), kin).config == SECOND, "the nearer one"
    tables.store(tables.shipped_path(kin), kin, entry(SECOND))
    lookup.forget()
    assert lookup.find(linear_problem(), kin).config == SECOND, "but its own where both have the problem"


def test_known_configs(table):
    """The config that is found, and those for the problem in a dtype of the same size; each once."""
    assert lookup.known_configs(linear_problem(), GPU) == []
    table += [entry(FIRST, m=2048), entry(SECOND, dtype="float16"), entry(SECOND, dtype="float16", m=512)]
    lookup.forget()
    assert lookup.known_configs(linear_problem(), GPU) == [FIRST, SECOND]
    assert lookup.known_configs(linear_problem(m=512), GPU) == [FIRST, SECOND]
    assert lookup.known_configs(linear_problem(m=2048), GPU) == [FIRST]
    assert lookup.known_configs(linear_problem(dtype="float32"), GPU) == []
    table += [entry(FIRST, dtype="float16", m=2048)]
    lookup.forget()
    assert lookup.known_configs(linear_problem(m=2048), GPU) == [FIRST]


def test_what_is_stored_is_found_once_the_tables_are_read_again(folder):
    cpu = torch.device("cpu")
    arguments = "group_norm", torch.bfloat16, 1024, 8192, 32, cpu
    before = autotune_configs.group_norm_config(*arguments)
    problem = Problem("group_norm", "bfloat16", (1024, 8192, 32))
    gpu = Gpu.of(cpu)
    other = next(each for each in KERNELS["group_norm"].neighbours(before, problem, gpu))
    tables.store(tables.user_path(gpu), gpu, entry(other, problem))
    autotune_configs.forget()
    assert autotune_configs.group_norm_config(*arguments) == other


def test_image_configs_know_the_layout(folder):
    contiguous = torch.empty(2, 8, 64)
    channels_last = torch.empty(2, 64, 8).transpose(1, 2)
    for images in ((contiguous, contiguous), (channels_last, channels_last), (channels_last, contiguous)):
        layout = " to ".join(dict.fromkeys(map(layout_of, images)))
        expected = heuristic_image_config("image_group_norm", 2, 8, 64, layout)
        assert autotune_configs.image_norm_config("image_group_norm", 2, *images) == expected


def test_what_is_found_is_kept(folder):
    """A second lookup is answered by a cache (the bench times it)."""
    arguments = "linear_bias", torch.bfloat16, 1024, 8192, 8192, 1, torch.device("cpu")
    autotune_configs.linear_config(*arguments)
    before = lookup.find.cache_info()
    autotune_configs.linear_config(*arguments)
    after = lookup.find.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)


def test_public_names():
    assert autotune_configs.__all__ == [
        "forget",
        "group_norm_config",
        "image_norm_config",
        "linear_config",
        "prefers_cublas",
        "tune_unseen_problems",
    ]
