"""``python -m bench models``: a model is one entry; what is found of each way, and how it becomes a row."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import model_figures, models, pictures
from bench.__main__ import main
from bench.model_figures import Cell, Step, by_kind, costs, errors, kind_of, norm_bytes, saved_bytes, times
from bench.model_ways import DECOMPOSITIONS, listening, prepare, without_cpp_compiler
from bench.model_zoo import MEMORY_FORMATS, MODELS, SETTINGS, Model
from bench.models import Experiment, cells_of
from bench.results import read_all
from bench.schema import KINDS, KernelTimes, ModelRow, WayFigures
from bench.tables import fill_tables
from tests.bench.refusals import assert_refused
from tests.bench.result_files import write

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
#: A convolution with its norm and activation, one of which a graph has a chain for each norm.
LAYERS = (nn.Conv2d, (3, 8, 3)), (nn.GroupNorm, (2, 8)), (nn.SiLU, ()), (nn.Conv2d, (8, 4, 3)), (nn.BatchNorm2d, (4,))


def make_layers(tiny):
    return nn.Sequential(*(layer(*arguments) for layer, arguments in LAYERS))


SMALL = Model(
    "small",
    "torch",
    "8x3x64x64",
    "2x3x9x9",
    make_layers,
    (("autocast", "channels_last"), ("inference", "contiguous")),
)


@pytest.fixture(autouse=True)
def small(monkeypatch, fresh_compiler):
    """A model of torch's own layers, beside those of the registry."""
    monkeypatch.setitem(MODELS, "small", SMALL)


def cell(setting="float32", memory_format="contiguous"):
    return Cell("small", setting, memory_format, "cpu", tiny=True)


# The registry


def test_libraries_are_those_of_the_extra():
    text = (ROOT / "pyproject.toml").read_text()
    extra = re.search(r"^models = \[(.*?)\]", text, re.MULTILINE)[1]
    assert {model.library for model in MODELS.values()} - {"torch"} == set(json.loads(f"[{extra}]"))


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_entries(model):
    assert MODELS[model.name] is model and len(model.shape.split("x")) == len(model.tiny_shape.split("x"))
    for setting, memory_format in model.cells:
        assert setting in SETTINGS and memory_format in (*MEMORY_FORMATS, None)


def test_cells():
    """The model's own, or those that are asked for; a model without images has no memory format."""
    assert [(each.setting, each.memory_format) for each in cells_of("small", None, None, CPU, True)] == list(
        SMALL.cells
    )
    asked = cells_of("small", ["float32"], ["contiguous"], CPU, True)
    assert [(each.setting, each.memory_format, each.shape) for each in asked] == [("float32", "contiguous", "2x3x9x9")]
    assert [each.memory_format for each in cells_of("bert", ["autocast"], ["channels_last"], CPU, False)] == [None]


def test_problem():
    """The same each time, in the cell's dtype and memory format; no weight is left at zero."""
    one, two = cell("inference", "channels_last").make_problem(), cell("inference", "channels_last").make_problem()
    for first, second in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert first.dtype == torch.bfloat16 and torch.equal(first, second)
    assert (
        one.model[0].weight.is_contiguous(memory_format=torch.channels_last) and not one.model[0].weight.is_contiguous()
    )
    assert one.inputs[0].is_contiguous(memory_format=torch.channels_last) and not one.model.training
    assert one.model[1].bias.any() and cell().make_problem().model.training


# Inductor as of torch 2.15


@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("shape", [(2, 6, 5, 3), (2, 6, 2, 3, 4), (2, 6, 7), (3, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decompositions(dtype, shape, affine):
    """Values and gradients are PyTorch's, and an image keeps its memory format."""
    torch.manual_seed(0)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    format = formats.get(len(shape), torch.contiguous_format)
    image, gradient = (torch.randn(shape).to(dtype).contiguous(memory_format=format) for _ in range(2))
    weight, bias = (torch.randn(shape[1], dtype=dtype) if has else None for has in affine)
    sizes = (*shape[:2], torch.Size(shape[2:]).numel(), 3)
    forward, backward = DECOMPOSITIONS.values()
    result, mean, rstd = forward(image, weight, bias, *sizes, 1e-5)
    got = backward(gradient, image, mean, rstd, weight, *sizes, [True, affine[0], affine[1]])

    exact = image.double().requires_grad_()
    parameters = [None if each is None else each.double().requires_grad_() for each in (weight, bias)]
    ones = parameters[0] if affine[0] else torch.ones(shape[1], dtype=torch.double)
    expected = nn.functional.group_norm(exact, 3, ones, parameters[1])
    expected.backward(gradient.double())
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(result.double(), expected, **tolerance)
    for value, leaf in zip(got, (exact, *parameters), strict=True):
        if leaf is not None:
            torch.testing.assert_close(value.double(), leaf.grad, **tolerance)
    for value in (result, got[0]):
        assert value.dtype == dtype and value.stride() == image.stride()


def test_inductor_2_15():
    """The decompositions are in the way of that name, without a GPU as well."""
    with without_cpp_compiler():
        found = costs(cell(), "inductor-2.15")
    assert max(whole for whole, _ in found["errors"].values()) < 1e-5


# What a process finds


@pytest.mark.parametrize(
    "way, setting",
    [
        *(("eager", setting) for setting in SETTINGS),
        ("fuse", "autocast"),
        ("normfuse", "autocast"),
        ("inductor", "float32"),
    ],
)
def test_costs(way, setting):
    with without_cpp_compiler():
        found = costs(cell(setting, "channels_last"), way)
    is_training = setting != "inference"
    assert list(found["errors"]) == (["output", "gradients"] if is_training else ["output"])
    least, most = (1e-9, 1e-5) if setting == "float32" else (1e-4, 3e-2)
    for whole, worst in found["errors"].values():
        assert least < whole < most and worst < 10 * most
    assert ("saved_mb" in found) == is_training
    assert found.get("chains") == {"eager": None, "inductor": None, "normfuse": 0}.get(way, 1)
    assert found.get("open_norms") == (1 if way == "normfuse" else None)


def test_errors():
    """In float64; a gradient that is zero but for rounding is not asked for the worst."""
    right = {"output": {"": torch.tensor([3.0, 4.0])}, "gradients": {"a": torch.ones(4), "b": 2 * torch.ones(4)}}
    right["gradients"]["before a norm"] = torch.full((4,), 1e-6)
    wrong = {"output": {"": torch.tensor([3.0, 4.5])}, "gradients": {"a": torch.ones(4) * 1.5, "b": 2 * torch.ones(4)}}
    wrong["gradients"]["before a norm"] = torch.full((4,), 1e-4)
    found = errors(wrong, right)
    assert found["output"] == pytest.approx((0.1, 0.125))
    assert found["gradients"] == pytest.approx((1 / 20**0.5, 0.5), rel=1e-3)
    assert errors(right, right) == {"output": (0.0, 0.0), "gradients": (0.0, 0.0)}


@pytest.mark.parametrize("way", ["eager", "inductor"])
def test_saved_bytes(way):
    """Each storage once, without parameters and the input."""
    at = cell()
    step = Step(at, way, at.make_problem())
    with without_cpp_compiler():
        step()
        saved = saved_bytes(step)
    images = 4 * 2 * (8 * 7 * 7 * 2 + 8 * 7 * 7 + 4 * 5 * 5)  # before and after the norm, after SiLU, before the norm
    assert images <= saved <= images * 1.05  # with the norms' statistics


def test_norm_bytes():
    """Forward an image is read twice and written once, backward five times; in inference a batch norm is a scale."""
    group, batch = 2 * 8 * 7 * 7, 2 * 4 * 5 * 5
    assert norm_bytes(cell("float32")) == (group + batch) * 4 * 8
    assert norm_bytes(cell("autocast")) == (group + batch) * 2 * 8
    assert norm_bytes(cell("inference")) == group * 2 * 3


@pytest.mark.parametrize(
    "name, kind",
    [
        ("triton_poi_fused__to_copy_add_3", "Inductor's"),
        ("triton_per_fused_convolution_backward_native_group_norm_1", "Inductor's"),
        ("void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16>", "copy"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", "copy"),
        ("apply_kernel", "ours"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32", "convolution"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad>", "convolution"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", "product"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n", "product"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, AddFunctor>", "other"),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name, {"apply_kernel"}) == kind


def test_by_kind():
    """Their time and number, in the order of ``KINDS``."""
    kernels = [("nvjet_a", 3.0), ("triton_a", 1.0), ("cudnn", 2.0), ("triton_b", 0.5)]
    found = by_kind(kernels)
    assert found == {
        "convolution": KernelTimes(2.0, 1),
        "product": KernelTimes(3.0, 1),
        "Inductor's": KernelTimes(1.5, 2),
    }
    assert list(found) == [kind for kind in KINDS if kind in found]


def test_listening():
    """What the backend takes over within it; nothing afterwards."""
    problem = cell().make_problem()
    with without_cpp_compiler(), listening() as taken:
        prepare("normfuse", problem.model, CPU)(*problem.inputs)
    assert [text.partition(" ")[0] for text in taken.open_norms] == ["add"] and not taken.chains


def fail_in(failing, monkeypatch):
    """No model can be made ready for this way."""
    prepare = model_figures.prepare

    def prepare_or_fail(way, model, device):
        if way == failing:
            raise ValueError("no\nmore")
        return prepare(way, model, device)

    monkeypatch.setattr(model_figures, "prepare", prepare_or_fail)


def test_times(monkeypatch):
    """Ratios are of the same round, and of a way that fails the others do not know."""
    on_device = {"inductor": [10.0, 20.0, 40.0], "normfuse": [11.0, 20.0, 36.0]}
    wall = {"inductor": [12.0, 24.0], "normfuse": [18.0, 36.0]}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(model_figures, "device_clock", lambda device, wait: lambda call: 1e3)
    monkeypatch.setattr(
        model_figures, "time_rounds", lambda steps, rounds, clock: {way: on_device[way] for way in steps}
    )
    monkeypatch.setattr(model_figures, "time_loops", lambda steps, synchronize: ({}, {way: wall[way] for way in steps}))
    monkeypatch.setattr(model_figures, "_profile", lambda step: [("nvjet", 2.0)])
    monkeypatch.setattr(model_figures, "_COPIED", 1 << 20)
    fail_in("fuse", monkeypatch)
    at = cell("autocast")
    with without_cpp_compiler():
        found = json.loads(json.dumps(times(at, ["fuse", "inductor", "normfuse"], 3)))
    assert found["ways"]["fuse"] == {"failure": "ValueError: no"}
    assert found["ways"]["normfuse"] == {
        "us": 20.0,
        "wall_us": 27.0,
        "over": {"inductor": [1.0, 1.5]},
        "kernels": {"product": {"us": 2.0, "launches": 1}},
    }
    assert found["copy_gb_s"] == pytest.approx(2 * 2**20 / 1e3 / 1e3)
    assert found["norms_us"] == pytest.approx(norm_bytes(at) / (2 * 2**20 / 1e3))
    row = models._with_times(ModelRow(**at.identity), ["fuse", "inductor", "normfuse"], found)
    assert row.way("fuse").failure == "ValueError: no" and row.failed and row.rounds == 3
    assert row.way("normfuse").kernels == {"product": KernelTimes(2.0, 1)}


# The command


def test_command(tmp_path, capsys, monkeypatch):
    """Without a GPU tiny models run, and their errors are shown. A way that fails leaves the others."""
    fail_in("inductor", monkeypatch)
    path = tmp_path / "rows.jsonl"
    some = ["--models", "small", "--settings", "inference", "--ways", "eager,inductor,normfuse,inductor-graphs"]
    assert main(["models", "--tiny", *some, "--output", str(path)]) == 1
    rows = read_all([path])[0].models
    assert [row.memory_format for row in rows] == ["contiguous", "channels_last"]
    for row in rows:
        assert list(row.ways) == ["eager", "inductor", "normfuse"]
        assert [name for name, way in row.ways.items() if way.failure] == ["inductor"]
        assert row.way("inductor") == WayFigures(failure="ValueError: no")
        assert row.way("normfuse").open_norms == 1 and row.way("normfuse").chains == 0
        assert 0 < row.way("normfuse").errors["output"][0] < 3e-2
    output = capsys.readouterr().out
    assert "small bfloat16 forward 2x3x9x9 channels_last inductor: failed: ValueError: no\n" in output
    assert "error: output" in output and "device, ms" not in output and output.endswith("Times need a GPU.\n")


def test_not_installed(monkeypatch, capsys):
    """It is left out with a word on how to get it."""
    monkeypatch.setitem(MODELS, "small", replace(SMALL, library="no_such_library"))
    assert main(["models", "--tiny", "--models", "small"]) == 0
    told = 'no_such_library is not installed, so small is left out: pip install "normfuse[models]"\n'
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--models", "small"], "needs a GPU; --tiny runs without one"),
        (["--models", "none", "--tiny"], "--models: 'none' is not one of resnet50_gn"),
        (["--ways", "mine", "--tiny"], "--ways: 'mine' is not one of eager"),
        (["--seconds", "0", "--tiny"], "--seconds: '0' is not a positive integer"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, named, monkeypatch, capsys):
    monkeypatch.setattr(models, "has_gpu", lambda: False)
    assert_refused(main, ["models", *arguments], named, "python -m bench models", capsys)


@pytest.fixture
def processes(monkeypatch):
    """Replaces the processes, and returns what each was started with: its part, arguments and caches."""
    started = []

    def answer_of(module, words, environment, longest):
        part, more = words[1], json.loads(words[2])
        assert module == "bench.model_figures" and Cell(**json.loads(words[0])) == ON_GPU
        folders = {Path(folder) for folder in environment.values()}
        (caches,) = {folder.parent for folder in folders}
        started.append((part, more, caches.name, sorted(each.name for each in caches.rglob("*") if each.is_file())))
        if part == "times":
            return {"ways": {way: {"us": 5.0} for way in more["ways"]}, "rounds": 3}
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / more["way"]).touch()
        return {"failure": "no"} if more["way"] == "fuse" else {"first_call_s": 2.0}

    monkeypatch.setattr(models, "answer_of", answer_of)
    return started


ON_GPU = Cell("small", "autocast", "channels_last", "cuda")


def test_processes(processes):
    """One for each way, with empty caches; then one for the times of those that ran, which finds all compiled."""
    *_, before, row = Experiment(["eager", "fuse", "normfuse"], ["costs", "times"], 3).rows(ON_GPU)
    assert [(part, caches, files) for part, _, caches, files in processes] == [
        ("costs", "eager", []),
        ("costs", "fuse", []),
        ("costs", "normfuse", []),
        ("times", "all", ["eager", "eager", "fuse", "fuse", "normfuse", "normfuse"]),
    ]
    assert processes[-1][1] == {"ways": ["eager", "normfuse"], "rounds": 3}
    assert before.way("normfuse") == WayFigures(first_call_s=2.0)
    assert row.way("normfuse") == WayFigures(first_call_s=2.0, us=5.0)
    assert row.way("fuse") == WayFigures(failure="no") and row.rounds == 3


def test_one_part(processes):
    (row,) = Experiment(["eager"], ["times"], 3).rows(ON_GPU)
    assert [part for part, *_ in processes] == ["times"] and row.way("eager").us == 5.0


def test_out_of_time(processes, monkeypatch):
    """Nothing is begun any more, and what was measured is kept."""
    clock = iter([0.0, 1.0, 61.0, 62.0])
    monkeypatch.setattr(models.time, "monotonic", lambda: next(clock))
    *_, row = Experiment(["eager", "normfuse"], ["costs", "times"], 3, seconds=60).rows(ON_GPU)
    assert len(processes) == 1
    out_of_time = "not run: the time was up"
    assert row.way("normfuse").failure == out_of_time
    assert row.way("eager") == WayFigures(first_call_s=2.0, failure=out_of_time)


def test_process(monkeypatch, capsys):
    """What it prints is JSON, also where it finds nothing."""
    words = [json.dumps(vars(cell("inference"))), "costs", json.dumps({"way": "eager"})]
    model_figures.main(words)
    assert WayFigures(**json.loads(capsys.readouterr().out)).errors["output"][0] < 3e-2
    model_figures.main([json.dumps(vars(replace(cell(), model="none"))), *words[1:]])
    assert json.loads(capsys.readouterr().out) == {"failure": "KeyError: 'none'"}


# The report


def figures(us, over, **others):
    return {"us": us, "wall_us": us, "over": {"inductor": over}} | others


def model_rows(chain="resnet50_gn", normfuse=(0.8, 1.04)):
    row = {"chain": chain, "product": "timm", "shape": "64x3x224x224", "dtype": "autocast", "mode": "training"}
    found = {"kernels": {"ours": {"us": 2000.0, "launches": 53}}, "chains": 2, "open_norms": 50}
    ways = {
        "fuse": {"failure": "no"},
        "inductor": {"us": 10000.0, "wall_us": 10000.0, "first_call_s": 20.0, "peak_mb": 4000.0},
        "inductor-2.15": figures(9000.0, [0.9, 0.91]),
        "normfuse": figures(8000.0, normfuse, first_call_s=15.0, peak_mb=4100.0, **found),
    }
    return row | {"memory_format": "channels_last", "rounds": 10, "norms_us": 2900.0, "copy_gb_s": 4000.0, "ways": ways}


@pytest.fixture
def results(tmp_path):
    rows = [model_rows("vit_b", (1.0, 1.0)), model_rows()]
    (found,) = read_all([write(tmp_path / "models.jsonl", rows, "models")])
    return found


def table(name, results):
    return fill_tables(f"<!-- table: {name} -->\n<!-- /table -->", results, Path("page.md"))


def test_main_table(results):
    """The backend over Inductor, of the rows that README names; without a column that is not known, as of graphs."""
    head, _, *lines = (line for line in table("models_main", [results]).splitlines() if line.startswith("|"))
    values = dict(zip(head.split("|"), lines[0].split("|"), strict=True))
    assert len(lines) == 1 and [value.strip() for value in values.values() if value.strip()] == [
        *("resnet50_gn, training, autocast channels_last", "10.0", "8.0", "0.80", "**1.04**"),
        *("0.75", "**1.02**"),
    ]


def test_main_table_is_of_one_device(results, tmp_path):
    """Of the one that was measured last, wherever it stands."""
    later = write(tmp_path / "later.jsonl", [model_rows()], "models", "NVIDIA A", date="2099-01-01T00:00:00+00:00")
    (other,) = read_all([later])
    for devices in [results, other], [other, results]:
        text = table("models_main", devices)
        assert "NVIDIA A, " in text and "H200" not in text and text.count("| model |") == 1
        assert "NVIDIA A, " in table("models", devices) and "H200" in table("models", devices)


def test_tables(results):
    times, costs, kernels = (table(name, [results]) for name in ("models", "models_costs", "models_kernels"))
    identity = "| resnet50_gn | autocast channels_last | training | 64x3x224x224 | normfuse |"
    assert f"{identity} 8.00 | 8.00 | 0.80, 1.04 | 2.90 |" in times and "A copy moves 4000 GB/s." in times
    assert f"{identity} 15.0 | 4100 | 2 | 50 |" in costs
    assert f"{identity} 2.00 (53) |" in kernels
    assert 'srcset="pictures/models.nvidia_h200.dark.png"' in times
    assert "- resnet50_gn autocast training 64x3x224x224 channels_last fuse: no\n" in table(
        "models_failures", [results]
    )
    assert "Not measured." in table("models", []) and "Not measured." in table("models_main", [])


def test_picture(results):
    picture = pictures.pictures_of(results)["models.nvidia_h200"]
    assert picture.title == "Whole models take 0.89 of Inductor's time on the device, 1.02 on the wall clock"
    assert ("resnet50_gn training autocast channels_last", "inductor-2.15", 0.9, 0.91) in picture.values
    assert pictures.draw_all(results)["models.nvidia_h200.light.png"].startswith(b"\x89PNG")
