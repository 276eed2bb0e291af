"""A head with LayerNorm: what ``explain`` says would run fused and what would not, and both beside each other."""

import copy

import torch
from torch import nn
from torch.utils.benchmark import Timer

import ops

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
width = 4096 if device == "cuda" else 64
plain = nn.Sequential(
    nn.Linear(width, width),
    nn.LayerNorm(width),
    nn.GELU(),
    nn.Dropout(0.1),
    nn.Linear(width, width),
    nn.LayerNorm(width),
    nn.GELU(),
    nn.Linear(width, 10),
).to(device, dtype)
plain.eval()
input = torch.randn(2 * width, width).to(device, dtype)
print(ops.explain(plain, input[:32]))

fused = copy.deepcopy(plain)
ops.fuse(fused)
with torch.no_grad():
    for _ in range(2):
        torch.testing.assert_close(fused(input), plain(input), atol=0.1, rtol=0.1)
for name, model in {"plain": plain, "fused": fused}.items() if device == "cuda" else ():
    step = Timer("model(input).sum().backward()", globals={"model": model, "input": input})
    print(f"{name}: {step.blocked_autorange().median * 1e3:.2f} ms a training step")
