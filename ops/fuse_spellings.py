"""How PyTorch spells each step of a chain: as a module's class, a function or a method."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

REQUIRED = object()


@dataclass(frozen=True)
class Spelling:
    """One way to write a step.

    Args:
        kind: The contraction, pointwise function, norm or reduction of a chain, by its name there.
        parameters: What it takes beside its input, in PyTorch's order, with the defaults. Modules have attributes of
            these names.
        calls: Functions, and methods by their names.
        module: The module's class, or None.
    """

    kind: str
    parameters: dict[str, Any]
    calls: tuple[Any, ...]
    module: type[nn.Module] | None = None


#: "clamp" becomes a hardtanh, and of "minimum_and_index" the first becomes a row minimum.
SPELLINGS = (
    Spelling("linear", {"weight": REQUIRED, "bias": None}, (F.linear,), nn.Linear),
    Spelling(
        "conv_transpose2d",
        {
            **{"weight": REQUIRED, "bias": None, "stride": 1, "padding": 0},
            **{"output_padding": 0, "groups": 1, "dilation": 1},
        },
        (F.conv_transpose2d,),
        nn.ConvTranspose2d,
    ),
    Spelling(
        "group_norm",
        {"num_groups": REQUIRED, "weight": None, "bias": None, "eps": 1e-5},
        (F.group_norm, torch.group_norm),
        nn.GroupNorm,
    ),
    Spelling("hardtanh", {"min_val": -1.0, "max_val": 1.0}, (F.hardtanh,), nn.Hardtanh),
    Spelling("clamp", {"min": None, "max": None}, (torch.clamp, torch.clip, "clamp", "clamp_", "clip", "clip_")),
    Spelling("mish", {}, (F.mish,), nn.Mish),
    Spelling("gelu", {"approximate": "none"}, (F.gelu,), nn.GELU),
    Spelling("row_minimum", {"dim": None, "keepdim": False}, (torch.amin, "amin")),
    Spelling("minimum_and_index", {"dim": None, "keepdim": False}, (torch.min, "min")),
    Spelling("add", {"other": REQUIRED}, (operator.add, torch.add, "add", "add_")),
)
OF_CALLS: dict[Any, Spelling] = {call: spelling for spelling in SPELLINGS for call in spelling.calls}
OF_MODULES = {spelling.module: spelling for spelling in SPELLINGS if spelling.module is not None}
#: Operands that are tensors. All others are numbers, pairs of them or text.
TENSORS = ("weight", "bias", "other")
