"""Linear → GroupNorm → row minimum → + bias as steps of plans, forward and backward."""

import torch

from autotune_configs import group_norm_config
from ops import products
from ops.arguments import Arguments, contiguous
from ops.calls import Call
from triton_kernels import row_minimum, row_minimum_backward
from triton_kernels.grid import blocks_of
from triton_kernels.group_norm import column_tiles, group_norm
from triton_kernels.launch import call as do

Tensor = torch.Tensor

#: Below this many groups, or above this width, the gradient at the GEMM's output is dense enough for dense products.
_FEWEST_SPARSE_GROUPS = 16
_WIDEST_SPARSE_GROUP = 128


def forward(call: Call, given: Arguments, training: bool) -> list[Tensor]:
    """The result [1, C, M, 1], or [M, 1] without a bias, and, if ``training``, what ``_winner`` divides."""
    chain, input, weight, bias = call.chain, given.input, given.weight, given.bias
    (M, _), N = input.shape, weight.shape[0]
    group_size = N // call.num_groups
    operands = given.operands(call)
    biases = operands[: len(chain.biases)]
    config = products.fused_config(chain, input, weight, group_size, biases)
    if config is not None:
        tiles = blocks_of(N, config.epilogue_columns)
        keys, of_tiles = row_minimum.empty_tile_minimum(tiles, M, group_size, input.device, training)
        products.product(
            input, weight, chain, config, operands, output=keys, saved=of_tiles, eps=call.eps, group_size=group_size
        )
    else:
        norm_config = group_norm_config("group_norm", input.dtype, M, N, group_size, input.device)
        tiles = column_tiles(N, group_size, norm_config)
        keys, of_tiles = row_minimum.empty_tile_minimum(tiles, M, group_size, input.device, training)
        z = products.affine(input, weight, biases, (M, N))
        after = given.operands(call, with_biases=False)
        group_norm(z, call.num_groups, chain, after, call.eps, norm_config, output=keys, saved=of_tiles)
    flat_bias = None if bias is None else contiguous(bias).view(-1)
    rows = 1 if bias is None else bias.numel()
    output = torch.empty((M, 1) if bias is None else (1, rows, M, 1), dtype=input.dtype, device=input.device)
    kept = torch.empty(kept_size(M, group_size), dtype=torch.float32, device=input.device) if training else None
    winner = None if kept is None else _winner(kept, M)
    if kept is not None and M == 0:
        do(products.zero, kept)  # which says the group size by its own
    row_minimum.finish(keys, of_tiles, flat_bias, output.view(rows, M), winner, group_size, *operands[-2:])
    return [output] if kept is None else [output, kept]


def kept_size(M: int, group_size: int) -> int:
    """How many float32 values the backward pass needs."""
    return max(1, M) * (group_size + 2)


def sizes(gradient: Tensor, kept: Tensor) -> tuple[int, int]:
    """M and the group size, from the gradient at the result and what was kept."""
    M = gradient.shape[0] if gradient.ndim == 2 else gradient.shape[2]
    return M, kept.numel() // max(1, M) - 2


def _winner(kept: Tensor, M: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the group that holds each row's minimum: the minimum's column [M] (int32), the group's reciprocal standard
    deviation [M] and normalised values [M, group_size]. They are one tensor, which costs the host least."""
    group_size = kept.numel() // max(1, M) - 2
    normalized, rstd, column, _ = kept.split([M * group_size, M, M, kept.numel() - M * (group_size + 2)])
    return column.view(torch.int32), rstd, normalized.view(M, group_size)


def backward(call: Call, gradient: Tensor, kept: list[Tensor], given: Arguments, wanted: Arguments) -> Arguments:
    """The gradients of a call's tensors, where ``wanted`` has something.

    The gradient at the GEMM's output is zero outside the group that holds a row's minimum. While groups are narrow, the
    input's gradient gathers that group's rows of the weight, and the weight's adds up the rows that chose each group.
    """
    (M, group_size), num_groups = sizes(gradient, kept[0]), call.num_groups
    winner = column, _, normalized = _winner(contiguous(kept[0]), M)
    N = group_size * num_groups
    gradient = gradient.squeeze(1).unsqueeze(0) if gradient.ndim == 2 else gradient[0, :, :, 0]
    gradients = wanted.empty_gradients(gradient.device)
    norm_weight = given.operands(call)[-2]
    bias = None if gradients.bias is None else gradients.bias.view(-1)
    row_partials, order, offsets = row_minimum_backward.sums_and_order(gradient, column, num_groups, group_size, bias)
    minimum_gradient, z_gradient = row_minimum_backward.winner_backward(row_partials, winner, norm_weight, group_size)
    row_minimum_backward.column_gradients(minimum_gradient, winner, z_gradient, order, offsets, gradients.flat)
    input_gradient = weight_gradient = None
    is_sparse = num_groups >= _FEWEST_SPARSE_GROUPS and group_size <= _WIDEST_SPARSE_GROUP
    if not is_sparse and (wanted.input or wanted.weight):
        dense = do(_scatter, z_gradient, column, num_groups, gradient.dtype)
    if wanted.input:
        shape = M, given.weight.shape[1]
        if is_sparse:
            input_gradient = torch.empty(shape, dtype=gradient.dtype, device=gradient.device)
            row_minimum_backward.input_gradient(z_gradient, column, order, given.weight, input_gradient)
        else:
            input_gradient = products.multiply(dense, given.weight, shape)
    if wanted.weight:
        shape = N, given.input.shape[1]
        if is_sparse:
            weight_gradient = torch.empty(shape, dtype=gradient.dtype, device=gradient.device)
            row_minimum_backward.weight_gradient(z_gradient, order, offsets, given.input, weight_gradient)
        else:
            weight_gradient = products.multiply(dense.T, given.input, shape)
    return Arguments(input_gradient, weight_gradient, gradients.vectors, gradients.bias)


def _scatter(z_gradient: Tensor, column: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    """The gradient at the GEMM's output [M, N], of which each row has one group, [M, group_size]."""
    M, group_size = z_gradient.shape
    dense = z_gradient.new_zeros(M, num_groups, group_size, dtype=dtype)
    group = torch.div(column, group_size, rounding_mode="floor").long()
    dense[torch.arange(M, device=dense.device), group] = z_gradient.to(dtype)
    return dense.view(M, num_groups * group_size)
