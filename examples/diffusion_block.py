"""A residual block of a diffusion model, in training: what ``fuse`` finds, that it is right, and how fast it is."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.benchmark import Timer

import ops


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, channels), nn.GroupNorm(32, channels)
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(256, channels)

    def forward(self, image, time):
        h = self.conv1(F.silu(self.norm1(image)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        return image + self.conv2(F.silu(self.norm2(h)))


device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
batch, channels, size = (16, 320, 64) if device == "cuda" else (2, 32, 8)
plain = Block(channels).to(device, dtype)
fused = copy.deepcopy(plain)
report = ops.fuse(fused)
arguments = torch.randn(batch, channels, size, size).to(device, dtype), torch.randn(batch, 256).to(device, dtype)
for _ in range(2):
    torch.testing.assert_close(fused(*arguments), plain(*arguments), atol=0.1, rtol=0.1)
print(report)
for name, model in {"plain": plain, "fused": fused}.items() if device == "cuda" else ():
    step = Timer("model(*arguments).sum().backward()", globals={"model": model, "arguments": arguments})
    print(f"{name}: {step.blocked_autorange().median * 1e3:.2f} ms a training step")
