"""The memory of a training step."""

import torch

from bench.times import measure_memory


def test_memory(monkeypatch):
    """The peak minus what was allocated before and the results. Each storage counts once."""
    peak = iter([5000])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peak))
    output, gradients = torch.empty(100), torch.empty(2, 50)
    assert measure_memory(lambda: (output, (gradients[0], gradients[1]))) == 4000 - 400 - 400
