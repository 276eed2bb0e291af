"""Promise: on a GPU ``fuse`` takes the chains that are faster on the wall at their sizes, and tells why it leaves the
others; ``everything=True`` takes all."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ops import pays, precision, rewriting
from ops.fuse import FusedChain, LeftChain, fuse
from ops.graph_nodes import REFUSAL
from ops.rewriting import rewrite

NORM = "group_norm -> silu"


def test_the_rule():
    """Bytes, launches and the host's time, and nothing else."""
    per_us = pays.BYTES_PER_SECOND / 1e6
    host = pays.CAPTURED_CALL * 1e6
    assert pays.reason_for_pytorch(host * per_us * 1.01, 0) == ""
    assert pays.reason_for_pytorch(host * per_us * 0.99, 0) != ""
    launches = int(pays.CAPTURED_CALL / pays.LAUNCH)
    assert pays.reason_for_pytorch(0, launches + 1) == "" and pays.reason_for_pytorch(0, launches) != ""
    assert pays.reason_for_pytorch(1, 0, host=0) == "" and pays.reason_for_pytorch(0, 0, host=0) != ""
    assert pays.reason_for_pytorch(4e6, 1) == (
        "left to PyTorch: 4.0 MB and 1 launches would be saved, some 6 us, and the call takes the host 48 us more"
    )


def layers(channels, device="cuda"):
    """A norm and what follows, in a block; its parameters are fake."""
    norm = nn.GroupNorm(4, channels, device="meta")
    for name in ("weight", "bias"):
        setattr(norm, name, nn.Parameter(torch.empty(channels, device=device), requires_grad=False))
    return nn.Sequential(norm, nn.SiLU())


def called(model, input, **options):
    """The report of a model that was called twice."""
    report = fuse(model, **options)
    with torch.no_grad():
        for _ in range(2):
            model(input)
    return report


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("pixels, is_taken", [((8, 8), False), ((1024, 2048), True)], ids=["small", "large"])
def test_sizes_decide(pixels, is_taken, everything):
    with FakeTensorMode():
        model = nn.Sequential(layers(16), nn.Softmax(1))
        report = called(model, torch.empty(4, 16, *pixels, device="cuda"), everything=everything)
        assert len(report.chains) == (is_taken or everything)
        if is_taken or everything:
            assert report.left == () and report.chains[0].module == "0"
            assert "forward" in vars(model[0])
        else:
            (left,) = report.left
            assert isinstance(left, FusedChain) and (left.module, left.chain) == ("0", NORM)
            assert left.reason.startswith("left to PyTorch: 0.0 MB and 1 launches")
            assert str(report) == f"0 chains\n  0: {NORM}, {left.reason}"
            assert "forward" not in vars(model[0])  # it costs no call anything


def test_each_chain_decides():
    """In one model, in the order in which they stand; the report has both kinds."""
    with FakeTensorMode():
        model = nn.Sequential(layers(16), nn.Softmax(1), nn.AvgPool2d(512), layers(16), nn.Softmax(1))
        report = called(model, torch.empty(4, 16, 1024, 2048, device="cuda"))
        assert [each.module for each in report.chains] == ["0"]
        assert [(each.module, type(each)) for each in report.left] == [("3", LeftChain)]


def test_on_the_cpu_all_are_taken():
    """No kernel of a GPU's would be faster or slower there."""
    model = nn.Sequential(nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()), nn.Softmax(1))
    report = called(model, torch.ones(2, 8, 2, 2))
    assert len(report.chains) == 1 and report.left == ()


def graph_of(forward, *arguments, **options):
    """Dynamo's graph of a function of fake tensors on a GPU, and what the rewriter says of it."""
    found = []

    def take(graph, inputs):
        found.extend(rewrite(graph, **options))
        found.extend(node.meta[REFUSAL] for node in graph.graph.nodes if options and REFUSAL in node.meta)
        return graph.forward

    with FakeTensorMode(), torch.no_grad():
        fakes = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in arguments]
        torch._dynamo.reset()
        torch.compile(forward, backend=take, fullgraph=True)(*fakes)
    torch._dynamo.reset()
    return found


F = nn.functional
SAVED = {
    "a norm alone": (lambda x: F.group_norm(x, 4), 0, 0),
    "one function": (lambda x: F.silu(F.group_norm(x, 4)), 2, 1),
    "two functions": (lambda x: F.silu(F.group_norm(x, 4)) * 2, 4, 2),
    "before and after": (lambda x: F.silu(F.group_norm(x + 1, 4)), 4, 2),
    "what changes nothing": (lambda x: F.dropout(F.silu(F.group_norm(x, 4).contiguous()), 0.5, False), 2, 1),
    "channels_last": (lambda x: F.silu(F.group_norm(x.to(memory_format=torch.channels_last), 4)), 4, 2),
}


@pytest.mark.parametrize("forward, passes, launches", SAVED.values(), ids=SAVED)
def test_what_is_saved(forward, passes, launches, monkeypatch):
    """Each value between two functions is written and read, in one kernel more; PyTorch copies channels_last images."""
    seen = []
    monkeypatch.setattr(pays, "reason_for_pytorch", lambda *saved: seen.append(saved) or "left")
    (found,) = graph_of(forward, (2, 8, 4, 4))
    image = 2 * 8 * 4 * 4 * 2
    assert seen == [(passes * image, launches, pays.CAPTURED_CALL)] and found.left == "left"


@pytest.mark.parametrize("trains", [False, True])
def test_what_the_host_takes(trains):
    """More where a gradient is wanted. (Dynamo has no such tensors of a GPU that is not there.)"""
    with FakeTensorMode():
        value = torch.empty(2, device="cuda", requires_grad=trains)
    growth = SimpleNamespace(value=value, saved=(pays.BYTES_PER_SECOND * 1e-4, 0))
    reason = rewriting._reason_to_leave(growth)
    assert ("the call takes the host 260 us more" in reason) if trains else reason == ""


@pytest.mark.parametrize(
    "rows, by_cublas, reason",
    [
        (4096, False, ""),  # 2 x 4096 x 4096 x 2 bytes
        (8, False, "left to the compiler: 0.1 MB would be saved, some 0 us, and the call takes the host 9 us more"),
        (4096, True, "left to the compiler: 100.7 MB would be moved either way"),  # three matrices
    ],
    ids=["large", "few rows", "by cuBLAS"],
)
def test_products_in_inference(rows, by_cublas, reason, monkeypatch):
    """In 16 bits the compiler gets those whose call takes the host longer than it saves."""
    monkeypatch.setattr(precision, "multiplies_by_cublas", lambda *_, **__: by_cublas)

    def forward(x, w):
        return F.linear(F.gelu(F.linear(x, w)), w).softmax(1)

    def found(**options):
        graph = graph_of(forward, (rows, 4096), (4096, 4096), compiles=True, **options)
        return [getattr(each, "chain", each) for each in graph]

    taken = "linear -> add -> gelu"
    assert found() == [reason or taken]
    assert found(replays=True) == [taken]  # by a CUDA graph, which the host launches as a whole


def test_a_left_chain_is_left_whole(monkeypatch):
    """No part of it is tried, nor told of, as another chain."""
    monkeypatch.setattr(pays, "reason_for_pytorch", lambda *saved: "left")
    chain = graph_of(lambda x, w: F.gelu(F.layer_norm(F.linear(x, w), (8,))), (4, 6), (8, 6))
    assert [each.chain for each in chain] == ["linear -> layer_norm -> gelu"]
