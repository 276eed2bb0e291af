"""What the tests of ``fuse`` share: models of the four chains in many spellings, and how two models are compared."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

IN, OUT, GROUPS, ROWS = 6, 8, 2, 5


L94, L75, L30, L19 = (
    "linear_hardtanh_mish_group_norm",
    "linear_group_norm_min",
    "linear_group_norm_hardtanh",
    "conv_transpose2d_gelu_group_norm",
)


class Parts(nn.Module):
    """What the forwards below are written with."""

    def __init__(self):
        super().__init__()
        self.gemm = nn.Linear(IN, OUT)
        self.gemm_without_bias = nn.Linear(IN, OUT, bias=False)
        self.skip = nn.Linear(IN, OUT)
        self.bias = nn.Parameter(torch.randn(OUT))
        self.row_bias = nn.Parameter(torch.randn(1, OUT))
        self.axis_bias = nn.Parameter(torch.randn(1, 3, 1, 1))
        self.register_buffer("buffer", torch.randn(OUT))
        self.hardtanh = nn.Hardtanh(-0.5, 0.75)
        self.mish = nn.Mish()
        self.groupnorm = nn.GroupNorm(GROUPS, OUT)
        self.conv_transpose = nn.ConvTranspose2d(IN, OUT, 3, stride=2, padding=1, output_padding=1)
        self.gelu = nn.GELU("tanh")
        self.dropout = nn.Dropout()
        self.weight = nn.Parameter(torch.randn(OUT, IN))
        self.kernel = nn.Parameter(torch.randn(IN, OUT, 3, 3))
        self.groups, self.eps, self.scale = GROUPS, 1e-3, 2.0


class BenchmarkL94(Parts):
    def forward(self, x):
        x = self.gemm(x)
        x = x + self.bias
        x = self.hardtanh(x)
        x = self.mish(x)
        x = self.groupnorm(x)
        return x


class BenchmarkL75(Parts):
    def forward(self, x):
        x = self.gemm(x)
        x = self.groupnorm(x)
        x = torch.min(x, dim=1, keepdim=True)[0]
        x = x + self.axis_bias
        return x


class BenchmarkL30(Parts):
    def forward(self, x):
        x = self.gemm(x)
        x = self.groupnorm(x)
        x = self.hardtanh(x)
        return x


class BenchmarkL19(Parts):
    def forward(self, x):
        x = self.conv_transpose(x)
        x = torch.nn.functional.gelu(x)
        x = self.groupnorm(x)
        return x


BENCHMARKS = {L94: BenchmarkL94, L75: BenchmarkL75, L30: BenchmarkL30, L19: BenchmarkL19}


by_benchmark = pytest.mark.parametrize("chain", BENCHMARKS)


def functional_l94(self, x):
    z = F.linear(x, self.weight, self.bias) + self.buffer
    z = F.mish(F.hardtanh(z, -0.5, max_val=2))
    return F.group_norm(z, self.groups, self.buffer, self.bias, eps=self.eps)


def softplus_l94(self, x):
    z = torch.clamp(self.gemm(x), -0.5, max=0.75)
    return self.groupnorm(z * torch.tanh(F.softplus(z)))


def softplus_first_l94(self, x):
    z = self.hardtanh(self.gemm(x))
    return self.groupnorm(F.softplus(z, threshold=20).tanh().mul(z))


def in_place_l94(self, x):
    x = self.gemm(x)
    x += self.bias
    x = F.hardtanh(x, inplace=True)
    return torch.group_norm(F.mish(x, inplace=True), 2)


def unpacked_l75(self, x):
    minimum, _ = torch.min(self.groupnorm(self.gemm(x)), 1, True)
    return self.axis_bias + minimum


def beside_another_path(self, x):
    """What stands between the steps reads the same input, and the sum of the two stays outside."""
    h = self.gemm(x)
    other = self.skip(x)
    h = self.groupnorm(h)
    return self.hardtanh(h) + other


#: chain → forwards of Parts, by what is special about each
SPELLINGS = {
    L94: {
        "functional": functional_l94,
        "bias first": lambda self, x: self.groupnorm(self.mish(self.hardtanh(self.bias + self.gemm(x)))),
        "torch.add": lambda self, x: self.groupnorm(self.mish(self.hardtanh(torch.add(self.gemm(x), self.row_bias)))),
        "no bias": lambda self, x: self.groupnorm(self.mish(self.hardtanh(self.gemm_without_bias(x)))),
        "one bias": lambda self, x: self.groupnorm(self.mish(self.hardtanh(self.gemm_without_bias(x).add(self.bias)))),
        "softplus": softplus_l94,
        "softplus as methods": softplus_first_l94,
        "in place": in_place_l94,
        "one bound": lambda self, x: self.groupnorm(self.mish(self.gemm(x).clamp(min=-0.5))),
        "by keyword": lambda self, x: self.groupnorm(input=self.mish(self.hardtanh(self.gemm(input=x)))),
    },
    L75: {
        "unpacked": unpacked_l75,
        "values": lambda self, x: self.groupnorm(self.gemm(x)).min(dim=1, keepdim=True).values + self.axis_bias,
        "amin": lambda self, x: torch.amin(self.groupnorm(self.gemm(x)), dim=1, keepdim=True) + self.axis_bias,
        "amin of a tuple": lambda self, x: self.groupnorm(self.gemm(x)).amin((-1,), keepdim=True),
        "no bias": lambda self, x: torch.min(self.groupnorm(self.gemm_without_bias(x)), dim=-1, keepdim=True)[0],
        "linear bias added": lambda self, x: self.groupnorm(self.gemm_without_bias(x) + self.bias).amin(1, True),
        "another bias after": lambda self, x: self.groupnorm(self.gemm(x)).amin(1, True) + self.bias,
        "a number after": lambda self, x: self.groupnorm(self.gemm(x)).amin(1, True) + 1.5,
    },
    L30: {
        "functional": lambda self, x: F.hardtanh(
            F.group_norm(F.linear(x, self.weight), self.groups, bias=self.bias, weight=self.buffer), -2, self.scale
        ),
        "clamp": lambda self, x: self.groupnorm(self.gemm(x)).clamp_(-0.5, 0.5),
        "clip": lambda self, x: torch.clip(self.groupnorm(self.gemm(x)), max=0.5),
        "bias added": lambda self, x: self.hardtanh(self.groupnorm(self.bias + F.linear(x, self.weight))),
    },
    L19: {
        "modules": lambda self, x: self.groupnorm(self.gelu(self.conv_transpose(x))),
        "functional": lambda self, x: F.group_norm(
            F.gelu(F.conv_transpose2d(x, self.kernel, None, 2, dilation=(1, 2)), approximate="tanh"), 4
        ),
    },
}


SPELLED = [
    pytest.param(chain, forward, id=f"{chain}-{name}")
    for chain, forwards in SPELLINGS.items()
    for name, forward in forwards.items()
]


def made(forward, parts=Parts, dtype=torch.float32):
    """A model of this forward."""
    torch.manual_seed(1)
    model = type("Model", (parts,), {"forward": forward})() if inspect.isfunction(forward) else forward()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) / 4
    return model.to(dtype)


def input_of(chain, dtype=torch.float32):
    shape = (2, IN, 4, 5) if chain == L19 else (ROWS, IN)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def run(model, input):
    """The result and the gradients of the input and of all parameters."""
    input = input.clone().requires_grad_()
    model.zero_grad()
    output = model(input)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output)
    (output * weights).sum().backward()
    return {"output": output, "input": input.grad} | {
        name: parameter.grad for name, parameter in model.named_parameters()
    }


def assert_same(fused, plain, input, atol=1e-4, rtol=1e-4):
    """The same result and gradients, in the call that looks for chains and in the next, which runs fused."""
    for _ in range(2):
        _assert_same_once(fused, plain, input, atol=atol, rtol=rtol)


def _assert_same_once(fused, plain, input, **tolerance):
    mine, theirs = run(fused, input), run(plain, input)
    for name, expected in theirs.items():
        torch.testing.assert_close(mine[name], expected, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def outcome(model, *arguments, **options):
    """What a call returns, or the type of what it raises."""
    try:
        return model(*arguments, **options)
    except Exception as error:
        return type(error)


def assert_alike(mine, theirs):
    """Tensors to rounding, with their strides; of all else, their types and values."""
    assert type(mine) is type(theirs), (mine, theirs)
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(mine, theirs, equal_nan=True, check_stride=True, atol=1e-4, rtol=1e-4)
    elif isinstance(theirs, (tuple, list)):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_alike(one, other)
    elif isinstance(theirs, dict):
        assert_alike(list(mine.items()), list(theirs.items()))
    else:
        assert mine == theirs


class HalvingLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def in_full(self, x):
    return self.hardtanh(self.groupnorm(self.gemm(x)))


def used_elsewhere(self, x):
    h = self.gemm(x)
    return self.hardtanh(self.groupnorm(h)) + h
