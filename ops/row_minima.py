"""Linear → GroupNorm → row minimum → + bias as steps of plans, forward and backward."""

from collections.abc import Sequence

import torch

from ops import passes, products
from ops.arguments import Arguments, contiguous
from ops.contractions import Gradients, Linear
from triton_kernels import row_minimum, row_minimum_backward
from triton_kernels.grid import blocks_of
from triton_kernels.group_norm import column_tiles, group_norm
from triton_kernels.launch import call as do

Tensor = torch.Tensor

#: Below this many groups, or above this width, the gradient at the GEMM's output is dense enough for dense products.
_FEWEST_SPARSE_GROUPS = 16
_WIDEST_SPARSE_GROUP = 128


class ReducedLinear(Linear):
    """A linear layer of which the chain keeps the rows' minima.

    For the backward pass, it keeps of each row what ``_winner`` divides.
    """

    def empty_results(self, given: Arguments, training: bool) -> list[Tensor]:
        """The result is [1, C, M, 1], or [M, 1] without a bias."""
        M, group_size, bias = given.input.shape[0], given.weight.shape[0] // given.call.num_groups, given.bias
        output = given.input.new_empty((M, 1) if bias is None else (1, bias.numel(), M, 1))
        kept = output.new_empty(max(1, M) * (group_size + 2), dtype=torch.float32) if training else None
        return [output] if kept is None else [output, kept]

    def z_shape(self, given: Arguments, dy: Tensor, kept: Sequence[Tensor]) -> Sequence[int]:
        M = dy.shape[0] if dy.ndim == 2 else dy.shape[2]
        return M, _group_size(M, kept[0]) * given.call.num_groups

    def forward(self, given: Arguments, training: bool) -> list[Tensor]:
        call, input, weight, bias = given.call, given.input, given.weight, given.bias
        (M, _), N = input.shape, weight.shape[0]
        group_size = N // call.num_groups
        config = products.fused_config(call.chain, input, weight, group_size, given.biases)
        if config is not None:
            tiles = blocks_of(N, config.epilogue_columns)
            keys, of_tiles = row_minimum.empty_tile_minimum(tiles, M, group_size, input.device, training)
            targets = {"output": keys, "saved": of_tiles, "eps": call.eps, "group_size": group_size}
            products.product(input, weight, call.chain, config, given.operands, **targets)
        else:
            z = products.affine(input, weight, given.biases, (M, N))
            norm = passes.rows_config("group_norm", call, z)
            tiles = column_tiles(N, group_size, norm)
            keys, of_tiles = row_minimum.empty_tile_minimum(tiles, M, group_size, input.device, training)
            operands = given.operands_after_biases
            group_norm(z, call.num_groups, call.chain, operands, call.eps, norm, output=keys, saved=of_tiles)
        output, *kept = results = self.empty_results(given, training)
        winner = _winner(kept[0], M) if training else None
        if training and M == 0:
            do(products.zero, kept[0])  # which says the group size by its own
        flat_bias = None if bias is None else contiguous(bias).view(-1)
        rows = output.view(1 if bias is None else bias.numel(), M)
        row_minimum.finish(keys, of_tiles, flat_bias, rows, winner, group_size, *given.operands[-2:])
        return results

    def backward(self, given: Arguments, dy: Tensor, kept: Sequence[Tensor], gradients: Arguments) -> Gradients:
        """The gradient at the GEMM's output is zero outside the group that holds a row's minimum.

        While groups are narrow, the input's gradient gathers that group's rows of the weight, and the weight's adds up
        the rows that chose each group.
        """
        (M, N), num_groups = self.z_shape(given, dy, kept), given.call.num_groups
        group_size = N // num_groups
        winner = column, _, _ = _winner(contiguous(kept[0]), M)
        columns = dy.squeeze(1).unsqueeze(0) if dy.ndim == 2 else dy[0, :, :, 0]
        bias = None if gradients.bias is None else gradients.bias.view(-1)
        row_partials, order, offsets = row_minimum_backward.sums_and_order(
            columns, column, num_groups, group_size, bias
        )
        minimum_gradient, z_gradient = row_minimum_backward.winner_backward(
            row_partials, winner, given.operands[-2], group_size
        )
        row_minimum_backward.column_gradients(minimum_gradient, winner, z_gradient, order, offsets, gradients.flat)
        if num_groups < _FEWEST_SPARSE_GROUPS or group_size > _WIDEST_SPARSE_GROUP:
            if gradients.input is None and gradients.weight is None:
                return None, None
            return products.gradients(do(_scatter, z_gradient, column, num_groups, dy.dtype), given, gradients)
        of_input = of_weight = None
        if gradients.input is not None:
            of_input = self.empty_gradient(0, given, dy, kept)
            row_minimum_backward.input_gradient(z_gradient, column, order, given.weight, of_input)
        if gradients.weight is not None:
            of_weight = self.empty_gradient(1, given, dy, kept)
            row_minimum_backward.weight_gradient(z_gradient, order, offsets, given.input, of_weight)
        return of_input, of_weight


def _group_size(M: int, kept: Tensor) -> int:
    return kept.numel() // max(1, M) - 2


def _winner(kept: Tensor, M: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the group that holds each row's minimum: the minimum's column [M] (int32), the group's reciprocal standard
    deviation [M] and normalised values [M, group_size]. They are one tensor, which costs the host least."""
    group_size = _group_size(M, kept)
    normalized, rstd, column, _ = kept.split([M * group_size, M, M, kept.numel() - M * (group_size + 2)])
    return column.view(torch.int32), rstd, normalized.view(M, group_size)


def _scatter(z_gradient: Tensor, column: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    """The gradient at the GEMM's output [M, N], of which each row has one group, [M, group_size]."""
    M, group_size = z_gradient.shape
    dense = z_gradient.new_zeros(M, num_groups, group_size, dtype=dtype)
    group = torch.div(column, group_size, rounding_mode="floor").long()
    dense[torch.arange(M, device=dense.device), group] = z_gradient.to(dtype)
    return dense.view(M, num_groups * group_size)


REDUCED_LINEAR = ReducedLinear()
