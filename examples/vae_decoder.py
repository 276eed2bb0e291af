"""A small VAE decoder, called by a method of the model, in channels_last: each part is looked at in its first call."""

import copy

import torch
from torch import nn
from torch.utils.benchmark import Timer

import ops


class Autoencoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU())
        self.decoder = nn.Sequential(
            *(nn.Conv2d(4, 2 * width, 3, padding=1), nn.GroupNorm(8, 2 * width), nn.SiLU()),
            *(nn.ConvTranspose2d(2 * width, width, 4, 2, padding=1), nn.GELU(), nn.GroupNorm(8, width)),
            nn.Conv2d(width, 3, 3, padding=1),
        )

    def decode(self, latent):
        return self.decoder(latent).sigmoid()


device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
width, size = (64, 128) if device == "cuda" else (16, 8)
plain = Autoencoder(width).to(device, dtype, memory_format=torch.channels_last)
fused = copy.deepcopy(plain)
report = ops.fuse(fused)
latent = torch.randn(4, 4, size, size).to(device, dtype, memory_format=torch.channels_last)
with torch.no_grad():
    for _ in range(2):
        torch.testing.assert_close(fused.decode(latent), plain.decode(latent), atol=0.1, rtol=0.1)
    print(report)
    for name, model in {"plain": plain, "fused": fused}.items() if device == "cuda" else ():
        step = Timer("model.decode(latent)", globals={"model": model, "latent": latent})
        print(f"{name}: {step.blocked_autorange().median * 1e3:.2f} ms")
