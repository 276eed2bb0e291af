"""KernelBench level 2, problem 19: transposed convolution, GELU, group norm."""

import torch

import ops


class ModelNew(ops.ConvTranspose2dGeluGroupNorm):
    """The fused module; for bfloat16, behind PyTorch's own convolution and GELU, as the harness asks (README.md)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dtype != torch.bfloat16:
            return super().forward(input)
        norm = self.group_norm
        activated = torch.nn.functional.gelu(self.conv_transpose(input))
        return ops.group_norm(activated, norm.num_groups, norm.weight, norm.bias, eps=norm.eps)
