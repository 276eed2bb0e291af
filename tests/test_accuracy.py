"""Promise: results and gradients are no less accurate than PyTorch's own, at every dtype and on any kind of data."""

import pytest
import torch

from tests.accuracy import check, draw_grad_output
from tests.chains import (
    BIAS_HARDTANH_MISH,
    CHAINS,
    DTYPES,
    L75,
    L94,
    LINEAR,
    LINEAR_CHAINS,
    Problem,
    chain_id,
    make_arguments,
)

KINDS = ("normal", "positive", "wide", "spike", "exact")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
@pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
def test_kinds_of_data(chain, dtype, kind):
    arguments = make_arguments(chain, Problem(rows=70, depth=72, groups=5, group_size=16), dtype, kind=kind)
    check(chain, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
@pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
def test_wide_gradients(chain, dtype):
    """The incoming gradient's own elements spread over 2^16."""
    arguments = make_arguments(chain, Problem(rows=33, depth=40, groups=3, group_size=32), dtype)
    check(chain, arguments, draw_grad_output(chain, arguments, kind="wide"))


@pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
@pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
def test_many_samples(chain, dtype):
    """Enough samples for chance to be small beside PyTorch's error: here the rule is at its sharpest."""
    arguments = make_arguments(chain, Problem(rows=400, depth=64, groups=4, group_size=16), dtype)
    check(chain, arguments)


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("chain", LINEAR_CHAINS + (LINEAR,), ids=chain_id)
def test_float32_precisions(chain, precision):
    """On the CPU PyTorch computes these settings like "highest" or in bfloat16; ours may take another path for them."""
    torch.set_float32_matmul_precision(precision)
    arguments = make_arguments(chain, Problem(rows=70, depth=72, groups=5, group_size=16), torch.float32)
    check(chain, arguments)


@pytest.mark.parametrize("chain", [L94, L75, BIAS_HARDTANH_MISH], ids=chain_id)
def test_unsafe_samples_are_few(chain):
    """The other tests compare most samples: few of them lie so near a jump that they are left out."""
    arguments = make_arguments(chain, Problem(rows=70, depth=72, groups=5, group_size=16), torch.float16)
    grad_output = draw_grad_output(chain, arguments)
    assert (grad_output != 0).float().mean() > 0.5
