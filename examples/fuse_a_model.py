"""A model that is there already: ``ops.fuse`` finds its chains in the first call and runs them fused, ``ops.unfuse``
undoes it; the parameters, and with them checkpoints and optimisers, stay the same."""

import torch
from torch import nn

import ops


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU())
        self.upscale = nn.ConvTranspose2d(4, 16, kernel_size=3)
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, input):
        image = self.features(input).view(-1, 4, 4, 4)
        return self.norm(nn.functional.gelu(self.upscale(image)))


device = "cuda" if torch.cuda.is_available() else "cpu"
model = Decoder().to(device)
input = torch.randn(16, 32, device=device)
expected = model(input)

report = ops.fuse(model)
for _ in range(2):
    torch.testing.assert_close(model(input), expected, atol=2e-3, rtol=2e-3)  # cuDNN convolves as TF32
print(report)
ops.unfuse(model)
torch.testing.assert_close(model(input), expected, atol=2e-3, rtol=2e-3)
