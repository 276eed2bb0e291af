"""Chains of matrices as steps of plans, forward and backward: Linear, pointwise functions, norm, row minimum.

Which kernels run is decided here. One kernel does the whole chain where its tiles hold whole groups. Else the product
is followed by one pass, or by three passes where a group is too wide for one program. Of that size, only z, the
product with its biases, is kept for the backward pass.
"""

import torch

from autotune_configs import group_norm_config
from ops import images, products, row_minima
from ops.arguments import Arguments, contiguous, rows_of
from ops.calls import Call
from triton_kernels.group_norm import WIDEST_GROUP, group_norm, group_norm_backward
from triton_kernels.launch import call as do
from triton_kernels.pointwise_pass import pointwise, pointwise_backward

Tensor = torch.Tensor


def fits_registers(channels: int, num_groups: int) -> bool:
    """Whether one program can normalise a row's whole group in registers."""
    return channels // num_groups <= WIDEST_GROUP


def forward(call: Call, given: Arguments, training: bool) -> list[Tensor]:
    """The result and, if ``training``, what the backward pass needs beside the call's own tensors."""
    chain = call.chain
    if not chain.contraction:
        return _without_product(call, given)
    input, weight = rows_of(given.input), given.weight
    (M, N), shape = (input.shape[0], weight.shape[0]), (*given.input.shape[:-1], weight.shape[0])
    if chain.reduction:
        return row_minima.forward(call, given, training)
    operands = given.operands(call)
    biases = operands[: len(chain.biases)]
    if not chain.norm and len(biases) == len(chain.steps):
        return [products.affine(input, weight, biases, shape)]
    group_size = N // call.num_groups
    config = products.fused_config(chain, input, weight, group_size, biases)
    if config is not None:
        output = torch.empty(shape, dtype=input.dtype, device=input.device)
        z = torch.empty_like(output) if training else None
        products.product(
            input,
            weight,
            chain,
            config,
            operands,
            output=output.view(M, N),
            saved=None if z is None else z.view(M, N),
            eps=call.eps,
            group_size=group_size,
        )
        return [output] if z is None else [output, z]
    z = products.affine(input, weight, biases, shape)
    output = torch.empty_like(z)
    kept = _after_product(call, given.operands(call, with_biases=False), z.view(M, N), output.view(M, N))
    return [output, z, *kept] if training else [output]


def _without_product(call: Call, given: Arguments) -> list[Tensor]:
    input = contiguous(given.input)
    rows = input.view(-1, call_channels(call, input))
    output = torch.empty_like(input)
    _after_product(call, given.operands(call), rows, output.view(rows.shape))
    return [images.lying_as(given.input, output) if call.chain.norm else output]


def call_channels(call: Call, input: Tensor) -> int:
    """The number of channels of a chain without a product: of a norm the second dimension, else the last."""
    return input.shape[1 if call.chain.norm else -1]


def _after_product(call: Call, operands: tuple, z: Tensor, output: Tensor) -> list[Tensor]:
    """output = the chain of z, both [M, C] and contiguous; returns the statistics, where there are any."""
    M, C = z.shape
    if not call.chain.norm:
        pointwise(z, call.chain, operands, output=output)
    elif fits_registers(C, call.num_groups):
        config = group_norm_config("group_norm", z.dtype, M, C, C // call.num_groups, z.device)
        group_norm(z, call.num_groups, call.chain, operands, call.eps, config, output=output)
    else:
        return [images.normalize(call, operands, z.unsqueeze(2), output.unsqueeze(2))]
    return []


def backward(call: Call, gradient: Tensor, kept: list[Tensor], given: Arguments, wanted: Arguments) -> Arguments:
    """The gradients of a call's tensors, where ``wanted`` has something: (shape, dtype) for vectors and tensors."""
    chain = call.chain
    if chain.reduction:
        return row_minima.backward(call, gradient, kept, given, wanted)
    gradients = wanted.empty_gradients(gradient.device)
    shape = gradient.shape
    if chain.contraction and len(chain.biases) == len(chain.steps):
        for bias in gradients.flat:
            if bias is not None:
                do(_sum_rows, rows_of(gradient), bias)
        return _of_product(contiguous(gradient), given, wanted, gradients)
    gradient = contiguous(gradient)
    z = contiguous(kept[0] if chain.contraction else given.input)
    C = call_channels(call, z) if not chain.contraction else z.shape[-1]
    z, gradient = z.view(-1, C), gradient.view(-1, C)
    z_gradient = torch.empty(shape, dtype=z.dtype, device=z.device)
    target = z_gradient.view(z.shape)
    operands = given.operands(call, with_biases=not chain.contraction)
    if not chain.norm:
        pointwise_backward(gradient, z, chain, operands, input_gradient=target, gradients=gradients.flat)
    elif fits_registers(C, call.num_groups):
        config = group_norm_config("group_norm_backward", z.dtype, z.shape[0], C, C // call.num_groups, z.device)
        group_norm_backward(
            gradient,
            z,
            call.num_groups,
            chain,
            operands,
            call.eps,
            config,
            input_gradient=target,
            gradients=gradients.flat,
        )
    else:
        statistics = kept[1] if chain.contraction else images.statistics(call, operands, z.unsqueeze(2))
        differentiation = images.Differentiation(call, operands, z.unsqueeze(2), statistics, gradients.flat)
        differentiation.differentiate(gradient.unsqueeze(2), target.unsqueeze(2))
        differentiation.finish()
    if not chain.contraction:
        if chain.norm:
            z_gradient = images.lying_as(given.input, z_gradient)
        return Arguments(z_gradient, None, gradients.vectors, None)
    return _of_product(z_gradient, given, wanted, gradients)


def _sum_rows(gradient: Tensor, target: Tensor) -> None:
    target.copy_(gradient.sum(0, dtype=torch.float32))


def _of_product(z_gradient: Tensor, given: Arguments, wanted: Arguments, gradients: Arguments) -> Arguments:
    """The gradients of input and weight, each of which is given for the other's."""
    rows = rows_of(z_gradient)
    input_gradient = weight_gradient = None
    if wanted.input:
        shape = (*z_gradient.shape[:-1], given.weight.shape[1])
        input_gradient = products.multiply(rows, given.weight, shape)
    if wanted.weight:
        input = rows_of(given.input)
        weight_gradient = products.multiply(rows.T, input, (rows.shape[1], input.shape[1]))
    return Arguments(input_gradient, weight_gradient, gradients.vectors, gradients.bias)
