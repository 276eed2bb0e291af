"""L75: Linear → GroupNorm → row minimum → + bias, forward and backward."""

from collections.abc import Sequence

import torch

from autotune_configs import group_norm_config
from ops import checks, gemm, operators, precision, reference, submodules, tensor_parallel
from ops.chain import as_vectors, check_chain, fused_product_config, in_reference
from ops.group_norm import fits_registers, group_norm
from ops.linear import linear
from ops.replay import repeated_eagerly
from triton_kernels import row_minimum, row_minimum_backward
from triton_kernels.epilogues import group_norm_row_minimum_epilogue
from triton_kernels.grid import blocks_of
from triton_kernels.group_norm import column_tiles, finish_row_minimum
from triton_kernels.group_norm import group_norm as group_norm_kernel

#: Below this many groups, or above this width, the gradient at the GEMM's output is dense enough for dense products.
_FEWEST_SPARSE_GROUPS = 16
_WIDEST_SPARSE_GROUP = 128
#: In wider groups, keeping the winner's group takes more shared memory than a block of the product's kernel has left.
WIDEST_FUSED_GROUP = 64


def _forward(input, weight, linear_bias, num_groups, norm_weight, norm_bias, bias, eps, training):
    """Returns the result [C, M] and, empty unless ``training``, of the group that holds each row's minimum: its column
    [M], the group's reciprocal standard deviation [M] and normalised values [M, group_size]."""
    M, N = input.shape[0], weight.shape[0]
    group_size = N // num_groups
    config = None
    if group_size <= WIDEST_FUSED_GROUP:
        config = fused_product_config("linear_group_norm_row_minimum", input, weight, group_size, linear_bias)
    if config is not None:
        tiles = blocks_of(N, config.epilogue_columns)
        keys, tile_winner = row_minimum.empty_tile_minimum(tiles, M, group_size, input.device, training)
        gemm.product(
            input,
            weight,
            group_norm_row_minimum_epilogue,
            config,
            output=keys,
            saved=tile_winner,
            vectors=(linear_bias, None, norm_weight, norm_bias),
            scalars=(0.0, 0.0, eps),
            group_size=group_size,
        )
    else:
        norm_config = group_norm_config("group_norm", input.dtype, M, N, group_size, input.device)
        tiles = column_tiles(N, group_size, norm_config)
        keys, tile_winner = row_minimum.empty_tile_minimum(tiles, M, group_size, input.device, training)
        group_norm_kernel(
            gemm.affine(input, weight, linear_bias),
            num_groups,
            norm_weight,
            norm_bias,
            eps,
            norm_config,
            output=keys,
            saved=tile_winner,
            finish=finish_row_minimum,
        )
    output = torch.empty(1 if bias is None else bias.numel(), M, dtype=input.dtype, device=input.device)
    winner = row_minimum.empty_winner(M if training else 0, group_size, input.device)
    kept = winner if training else None
    row_minimum.finish(keys, tile_winner, bias, output, kept, group_size, norm_weight, norm_bias)
    return output, *winner


def _fake(input, weight, linear_bias, num_groups, norm_weight, norm_bias, bias, eps, training):
    M = input.shape[0]
    rows = M if training else 0
    return (
        input.new_empty(1 if bias is None else bias.numel(), M),
        input.new_empty(rows, dtype=torch.int32),
        input.new_empty(rows, dtype=torch.float32),
        input.new_empty(rows, weight.shape[0] // num_groups, dtype=torch.float32),
    )


def _backward_kernels(gradient, column, rstd, normalized, norm_weight, input, weight, num_groups, *dtypes):
    """Gradients of input, weight, and, in ``dtypes``, of linear_bias, norm_weight, norm_bias and bias; empty where they
    are not wanted. Of input and weight each is given for the other's gradient, and None where that is not wanted.

    The gradient at the GEMM's output is zero outside the group that holds a row's minimum. While groups are narrow, the
    input's gradient gathers that group's rows of the weight, and the weight's adds up the rows that chose each group.
    """
    M, group_size = normalized.shape
    N = group_size * num_groups
    winner = (column, rstd, normalized.contiguous())
    *norm_dtypes, bias_dtype = dtypes
    norm_gradients = operators.empty_vectors(gradient, N, norm_dtypes)
    (bias_gradient,) = operators.empty_vectors(gradient, gradient.shape[0], (bias_dtype,))
    row_partials, order, offsets = row_minimum_backward.sums_and_order(
        gradient, column, num_groups, group_size, bias_gradient
    )
    minimum_gradient, z_gradient = row_minimum_backward.winner_backward(row_partials, winner, norm_weight, group_size)
    row_minimum_backward.column_gradients(minimum_gradient, winner, z_gradient, order, offsets, norm_gradients)
    vector_gradients = operators.or_empty(gradient, *norm_gradients, bias_gradient)
    input_gradient, weight_gradient = _empty_matrix_gradients(gradient, M, N, input, weight)
    if num_groups >= _FEWEST_SPARSE_GROUPS and group_size <= _WIDEST_SPARSE_GROUP:
        if weight is not None:
            row_minimum_backward.input_gradient(z_gradient, column, order, weight, input_gradient)
        if input is not None:
            row_minimum_backward.weight_gradient(z_gradient, order, offsets, input, weight_gradient)
        return input_gradient, weight_gradient, *vector_gradients
    dense = gradient.new_zeros(M, num_groups, group_size)
    group = torch.div(column, group_size, rounding_mode="floor").long()
    dense[torch.arange(M, device=gradient.device), group] = z_gradient.to(gradient.dtype)
    dense = dense.view(M, N)
    if weight is not None:
        input_gradient = gemm.input_gradient(dense, weight)
    if input is not None:
        weight_gradient = gemm.weight_gradient(dense, input)
    return input_gradient, weight_gradient, *vector_gradients


def _empty_matrix_gradients(gradient, M, N, input, weight):
    """For the gradients of input and weight, each of which is wanted where the other is given."""
    input_gradient = gradient.new_empty(0 if weight is None else (M, weight.shape[1]))
    return input_gradient, gradient.new_empty(0 if input is None else (N, input.shape[1]))


def _backward_fake(gradient, column, rstd, normalized, norm_weight, input, weight, num_groups, *dtypes):
    *norm_dtypes, bias_dtype = dtypes
    M, group_size = normalized.shape
    N = group_size * num_groups
    return (
        *_empty_matrix_gradients(gradient, M, N, input, weight),
        *operators.or_empty(gradient, *operators.empty_vectors(gradient, N, norm_dtypes)),
        *operators.or_empty(gradient, *operators.empty_vectors(gradient, gradient.shape[0], (bias_dtype,))),
    )


_operator = operators.define(
    "linear_group_norm_min(Tensor input, Tensor weight, Tensor? linear_bias, int num_groups, Tensor? norm_weight,"
    " Tensor? norm_bias, Tensor? bias, float eps, bool training) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake,
)
_backward_operator = operators.define(
    "linear_group_norm_min_backward(Tensor gradient, Tensor column, Tensor rstd, Tensor normalized,"
    " Tensor? norm_weight, Tensor? input, Tensor? weight, int num_groups,"
    " ScalarType? linear_bias_dtype, ScalarType? norm_weight_dtype, ScalarType? norm_bias_dtype,"
    " ScalarType? bias_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_kernels,
    _backward_fake,
)


def _setup_context(ctx, inputs, outputs):
    input, weight, linear_bias, ctx.num_groups, norm_weight, norm_bias, bias, _, _ = inputs
    ctx.dtypes = operators.dtypes_of(linear_bias, norm_weight, norm_bias, bias)
    gemm.save(ctx, input, weight, *outputs[1:], norm_weight)


def _backward(ctx, gradient):
    input, weight, column, rstd, normalized, norm_weight = ctx.saved_tensors
    wanted, dtypes = ctx.needs_input_grad[:2], operators.wanted_dtypes(ctx, 2, 4, 5, 6)
    gradients = _backward_operator(
        gradient, column, rstd, normalized, norm_weight, input, weight, ctx.num_groups, *dtypes
    )
    *matrices, linear_bias_gradient, norm_weight_gradient, norm_bias_gradient, bias_gradient = operators.where_wanted(
        gradients, (*wanted, *dtypes)
    )
    return *matrices, linear_bias_gradient, None, norm_weight_gradient, norm_bias_gradient, bias_gradient, None, None


_differentiable = operators.differentiable(_operator, _setup_context, _backward)


def _is_channel_axis(shape: tuple[int, ...]) -> bool:
    return len(shape) == 4 and shape == (1, shape[1], 1, 1)


@repeated_eagerly
def linear_group_norm_min(
    input: torch.Tensor,
    weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    num_groups: int,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Linear layer, GroupNorm, minimum of each row and bias, fused.

    It computes::

        normalized = group_norm(linear(input, weight, linear_bias), num_groups, norm_weight, norm_bias)
        torch.min(normalized, dim=1, keepdim=True)[0] + bias

    Each row is one sample of the GroupNorm. A NaN in a row is its minimum. The gradient of a row goes to one column,
    the first one that holds the minimum. All tensors have one dtype (float32, bfloat16, float16 or float64) and are on
    one device. Under autocast their dtypes may differ.

    Args:
        input: ``(batch, in_features)``.
        weight: ``(out_features, in_features)`` of the linear layer.
        linear_bias: ``(out_features,)`` of the linear layer, or None for no bias.
        num_groups: Number of groups that the channels are divided into. It must divide them.
        norm_weight: ``(out_features,)``, the scale of the GroupNorm, or None.
        norm_bias: ``(out_features,)``, the shift of the GroupNorm, or None.
        bias: ``(1, channels, 1, 1)``, with any number of channels, or None.
        eps: Added to each variance. Not negative.

    Returns:
        ``(1, channels, batch, 1)``, or ``(batch, 1)`` without a ``bias``, in the input's dtype, or autocast's.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    vectors = {"linear_bias": linear_bias, "norm_weight": norm_weight, "norm_bias": norm_bias}
    num_groups, eps = check_chain(input, weight, num_groups, eps, **vectors)
    checks.tensors({"input": input}, {"bias": bias})
    if input.ndim != 2:
        raise ValueError(f"input must be 2-D (batch, in_features), got shape {tuple(input.shape)}")
    if bias is not None and not _is_channel_axis(bias.shape):
        raise ValueError(f"bias must have shape (1, channels, 1, 1), got {tuple(bias.shape)}")
    if tensor_parallel.is_distributed(input, weight, linear_bias, norm_weight, norm_bias, bias):
        tensors = {"input": input, "weight": weight, **vectors}
        return tensor_parallel.minimum_on_shards(linear_group_norm_min, tensors, bias, num_groups, eps=eps)
    dtype = precision.autocast_dtype(input)
    input, weight = input.to(dtype), weight.to(dtype)
    linear_bias, norm_weight, norm_bias, flat_bias = as_vectors(linear_bias, norm_weight, norm_bias, bias)
    if not precision.runs_kernels(input):
        shaped_bias = None if bias is None or flat_bias is None else flat_bias.view(bias.shape)
        return in_reference(
            reference.linear_group_norm_min,
            input,
            weight,
            linear_bias,
            num_groups,
            norm_weight,
            norm_bias,
            shaped_bias,
            eps=eps,
        )
    if not fits_registers(weight.shape[0], 1, num_groups):
        normalized = group_norm(linear(input, weight, linear_bias), num_groups, norm_weight, norm_bias, eps=eps)
        minimum = normalized.min(dim=1, keepdim=True)[0]
        return minimum if bias is None else (minimum + bias).to(dtype)
    training = precision.needs_gradient(input, weight, linear_bias, norm_weight, norm_bias, bias)
    result = _differentiable(input, weight, linear_bias, num_groups, norm_weight, norm_bias, flat_bias, eps, training)
    return result.view(-1, 1) if bias is None else result.view(1, *result.shape, 1)


class LinearGroupNormMin(torch.nn.Module):
    """Linear layer, GroupNorm, row minimum and bias: ``min(group_norm(gemm(input)), dim=1, keepdim=True)[0] + bias``.

    It has the parameters of the plain model: ``gemm.weight``, ``gemm.bias``, ``group_norm.weight``, ``group_norm.bias``
    and ``bias``. See :func:`ops.linear_group_norm_min`.

    Args:
        in_features: Size of each input row.
        out_features: Size of the rows that the minimum is taken of.
        num_groups: Number of groups of the GroupNorm. It must divide ``out_features``.
        bias_shape: Shape of ``bias``: ``(1, channels, 1, 1)``, with any number of channels.
        linear_bias: Whether ``gemm`` has a bias.
        eps: Added to each variance of the GroupNorm.
        device: Device of the parameters, as for ``torch.nn.Linear``.
        dtype: Dtype of the parameters, as for ``torch.nn.Linear``.

    Example::

        layer = ops.LinearGroupNormMin(64, 128, num_groups=8, bias_shape=(1, 128, 1, 1))
        layer(torch.randn(16, 64))  # (1, 128, 16, 1)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_groups: int,
        bias_shape: Sequence[int],
        *,
        linear_bias: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        in_features = checks.size("in_features", in_features)
        out_features = checks.size("out_features", out_features)
        checks.dtype(dtype)
        num_groups, eps = checks.groups(out_features, num_groups), checks.epsilon(eps)
        shape = checks.shape("bias_shape", bias_shape)
        if not _is_channel_axis(shape):
            raise ValueError(f"bias_shape must be (1, channels, 1, 1), got {shape}")
        self.gemm = torch.nn.Linear(in_features, out_features, bias=linear_bias, device=device, dtype=dtype)
        self.group_norm = torch.nn.GroupNorm(num_groups, out_features, eps=eps, device=device, dtype=dtype)
        self.bias = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw ``bias`` from the standard normal distribution; the layers reset their own parameters."""
        if self.bias is not None:
            torch.nn.init.normal_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the chain to ``input`` ``(batch, in_features)``; the result is ``(1, channels, batch, 1)``."""
        gemm, norm = self.gemm, self.group_norm
        if not submodules.are_as_made(self, gemm=(gemm, torch.nn.Linear), group_norm=(norm, torch.nn.GroupNorm)):
            minimum = torch.min(norm(gemm(input)), dim=1, keepdim=True)[0]
            return minimum if self.bias is None else minimum + self.bias
        return linear_group_norm_min(
            input, gemm.weight, gemm.bias, norm.num_groups, norm.weight, norm.bias, self.bias, eps=norm.eps
        )
