"""``python -m bench products``: each way to compute a float32 product, errors first."""

from datetime import datetime, timezone
from functools import partial

import pytest
import torch

from bench import products, recording, tables
from bench.__main__ import main
from bench.results import read_all
from bench.schema import PRODUCT_WAYS, Run
from bench.tables import fill_tables
from tests.bench.refusals import assert_refused

CPU = torch.device("cpu")


@pytest.fixture
def measure(monkeypatch):
    """``products.measure`` of a small shape, where each call takes as many microseconds as there were before it."""
    monkeypatch.setattr(products, "warm_up", lambda call: call())
    results = []

    def clock(call):
        results.append(call())
        return float(len(results))

    found = partial(products.measure, "8x64x48", CPU, 3, clock)
    found.results = results
    return found


def test_ways(measure):
    before = torch.backends.cuda.matmul.fp32_precision
    row = measure()
    assert tuple(row.ways) == PRODUCT_WAYS and not row.red and torch.backends.cuda.matmul.fp32_precision == before
    assert all(each.shape == (8, 48) for each in measure.results) and len(measure.results) == 3 * len(PRODUCT_WAYS)
    errors = {name: (each.error, each.positive_error, abs(each.bias)) for name, each in row.ways.items()}
    assert all(0 < error < 1e-6 for name in ("ours", "cublas", "tf32x3") for error in errors[name])
    assert all(1e-4 < error < 1e-2 for error in errors["bfloat16"][:2])
    # Each round begins with another.
    assert row.way("ours").us == 10 and row.way("cublas").us == 6 and row.way("ours").ours_over == 1


def test_batches(measure):
    row = products.measure("3x8x64x48", CPU, *measure.args[2:])
    assert row.product == "batch" and not row.red and set(PRODUCT_WAYS) - set(row.ways) == {"tf32x3"}
    assert all(each.shape == (3, 8, 48) for each in measure.results)


@pytest.mark.parametrize("wrong", [lambda input: 1.0, lambda input: torch.nan if input.min() >= 0 else 0.0])
def test_what_is_wrong_is_not_timed(measure, monkeypatch, wrong):
    """Nor what is no number, of positive ones alone."""
    calls = products._calls
    monkeypatch.setattr(
        products,
        "_calls",
        lambda *given: calls(*given) | {"ours": lambda: calls(*given)["cublas"]() + wrong(given[0])},
    )
    row = measure()
    assert row.red and not measure.results and row.way("cublas").us is None
    assert products._summary(row).startswith("8x64x48: wrong: an error of ")


@pytest.fixture
def gpu(monkeypatch, measure):
    """Pretends that there is a GPU, which is the CPU."""
    monkeypatch.setattr(products, "has_gpu", lambda: True)
    monkeypatch.setattr(products, "device_clock", lambda device: None)
    monkeypatch.setattr(recording, "name_of", lambda device: "NVIDIA H200")
    monkeypatch.setattr(recording, "current_run", lambda device: Run(datetime.now(timezone.utc)))
    of_cpu = products.measure
    monkeypatch.setattr(
        products,
        "measure",
        lambda shape, device, rounds, clock: of_cpu(shape, CPU, rounds, lambda call: float(len(shape))),
    )


def test_rows_and_tables(gpu, tmp_path, capsys):
    path = tmp_path / "products.jsonl"
    words = ["products", "--batches", "4,8", "--features", "64", "--rounds", "2", "--output", str(path)]
    words += ["--matrices", "2x8x16x8"]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "4x64x64: 7 µs, 1.00 of cuBLAS's 7" in output and "Float32 products" in output
    (found,) = read_all([path])
    assert [row.shape for row in found.products] == ["4x64x64", "8x64x64", "2x8x16x8"] and found.products[0].way(
        "tf32"
    ).us == 7
    page = fill_tables("<!-- table: products -->\n<!-- /table -->", [found], tmp_path)
    assert "| shape | ours, µs | cublas, µs |" in page and "| 8x64x64 | 7 | 7 (1.00) |" in page


def test_main_table(gpu, tmp_path, monkeypatch):
    """Of the four chains' size: each way's error and time."""
    monkeypatch.setitem(tables.TARGET, "GEMM", "8x64x64")
    path = tmp_path / "products.jsonl"
    words = ["products", "--batches", "4,8", "--features", "64", "--rounds", "2", "--output", str(path)]
    assert main([*words, "--matrices", ""]) == 0
    (found,) = read_all([path])
    page = fill_tables("<!-- table: products_main -->\n<!-- /table -->", [found], tmp_path)
    error = found.products[1].way("cublas").error
    assert f"| cuBLAS | {error:.1e} | 7 |" in page and "| normfuse | " in page and page.count("| 7 |") == 4
    assert page.splitlines()[-3].endswith(", 8x64x64.")


@pytest.mark.parametrize(
    "words, told",
    [
        (["--batches", "0"], "argument --batches: '0' is not a positive integer"),
        (["--features", "8,x"], "argument --features: 'x' is not a positive integer"),
        (["--matrices", "2x8x16"], "argument --matrices: '2x8x16' is not matrices x rows x terms x columns"),
        (["--matrices", "2x8x16x0"], "argument --matrices: '0' is not a positive integer"),
        ([], "needs a GPU"),
    ],
)
def test_bad_arguments(words, told, monkeypatch, capsys):
    monkeypatch.setattr(products, "has_gpu", lambda: False)
    assert_refused(main, ["products", *words], told, "python -m bench products", capsys)
