"""The models that ``python -m bench models`` times: each is one entry, built from a config with random weights."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from bench.sizes import sizes_of

#: By setting: the mode and dtype of a row. Under autocast the parameters are float32, and products bfloat16.
SETTINGS = {
    "inference": ("forward", "bfloat16"),
    "autocast": ("training", "autocast"),
    "float32": ("training", "float32"),
}
#: By memory format: its name in PyTorch for images of two and of three dimensions.
_FORMATS = {"contiguous": ("contiguous_format",) * 2, "channels_last": ("channels_last", "channels_last_3d")}
MEMORY_FORMATS = tuple(_FORMATS)


@dataclass(frozen=True)
class Model:
    """A model, and where it is measured. A new one needs an entry in ``MODELS`` and nothing else.

    Args:
        name: What the command line and rows call it.
        library: The package that has it, which rows have as its product.
        shape: Of its first input.
        tiny_shape: The same of the tiny model, which a CPU runs in a second.
        make: The model, with random weights and no dropout; the argument is whether to make the tiny one.
        cells: The settings and memory formats that are measured by default; None for a model without images.
        inputs: Its inputs, of this shape and for the tiny model or not.
    """

    name: str
    library: str
    shape: str
    tiny_shape: str
    make: Callable[[bool], nn.Module]
    cells: tuple[tuple[str, str | None], ...]
    inputs: Callable[[tuple[int, ...], bool], tuple[torch.Tensor, ...]] = lambda shape, tiny: (torch.randn(shape),)

    @property
    def has_images(self) -> bool:
        return any(memory_format for _, memory_format in self.cells)

    @property
    def is_installed(self) -> bool:
        return find_spec(self.library) is not None


@dataclass(frozen=True)
class Problem:
    """A model in its dtype and memory format, and its inputs."""

    model: nn.Module
    inputs: tuple[torch.Tensor, ...]


def make_problem(
    model: Model, setting: str, memory_format: str | None, device: torch.device, tiny: bool = False
) -> Problem:
    """The same weights and inputs at each call."""
    mode, dtype = SETTINGS[setting]
    torch.manual_seed(0)
    module = model.make(tiny).train(mode == "training")
    _draw_constants(module)
    inputs = model.inputs(sizes_of(model.tiny_shape if tiny else model.shape), tiny)
    kept = torch.bfloat16 if dtype == "bfloat16" else torch.float32

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(device, kept) if tensor.is_floating_point() else tensor.to(device)
        if memory_format and tensor.ndim in (4, 5):
            return tensor.contiguous(memory_format=getattr(torch, _FORMATS[memory_format][tensor.ndim - 4]))
        return tensor

    module._apply(laid_out)
    return Problem(module, tuple(map(laid_out, inputs)))


def _draw_constants(module: nn.Module) -> None:
    """Let no block be left out: libraries begin with zeros in the last norm of a residual branch, or in the head."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif not parameter.any():
                parameter.normal_(std=0.02)


# Where they come from


def _timm(name: str, tiny: dict[str, Any]) -> Callable[[bool], nn.Module]:
    return lambda is_tiny: import_module("timm").create_model(name, **(tiny if is_tiny else {}))


def _mixer_b(is_tiny: bool) -> nn.Module:
    options = {"embed_dim": 64, "num_blocks": 2, "img_size": 32} if is_tiny else {"embed_dim": 768, "num_blocks": 12}
    return import_module("timm.models.mlp_mixer").MlpMixer(patch_size=16, **options)


def _monai(name: str, options: dict[str, Any], tiny: dict[str, Any]) -> Callable[[bool], nn.Module]:
    def make(is_tiny: bool) -> nn.Module:
        return getattr(import_module("monai.networks.nets"), name)(**options | (tiny if is_tiny else {}))

    return make


def _diffusers(name: str, options: dict[str, Any], tiny: dict[str, Any], part: str = "") -> Callable[[bool], nn.Module]:
    def make(is_tiny: bool) -> nn.Module:
        model = getattr(import_module("diffusers"), name)(**options | (tiny if is_tiny else {}))
        return getattr(model, part) if part else model

    return make


def _ddpm_unet(attends_at: int) -> Callable[[bool], nn.Module]:
    """``attends_at``: the level of four that has attention."""
    down = ["AttnDownBlock2D" if level == attends_at else "DownBlock2D" for level in range(4)]
    tiny = {
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "layers_per_block": 1,
    }
    options = {
        "block_out_channels": (128, 256, 256, 256),
        "down_block_types": tuple(down),
        "up_block_types": tuple(each.replace("Down", "Up") for each in reversed(down)),
        "layers_per_block": 2,
        "sample_size": 64,
    }
    return _diffusers("UNet2DModel", options, tiny)


def _transformers(name: str, options: dict[str, Any], tiny: dict[str, Any]) -> Callable[[bool], nn.Module]:
    def make(is_tiny: bool) -> nn.Module:
        library = import_module("transformers")
        model = getattr(library, name)
        return model(model.config_class(**options | (tiny if is_tiny else {})))

    return make


def _resnet50(is_tiny: bool) -> nn.Module:
    models = import_module("torchvision.models")
    return models.resnet18(num_classes=10) if is_tiny else models.resnet50()


def _steps(shape: tuple[int, ...], most: int = 1000) -> torch.Tensor:
    """One of a diffusion's steps for each sample."""
    return torch.randint(most, shape[:1])


def _prompted(width: int, tiny_width: int) -> Callable:
    """Noise, its steps, and prompts of 77 tokens of that width."""
    return lambda shape, tiny: (
        torch.randn(shape),
        _steps(shape),
        torch.randn(shape[0], 77, tiny_width if tiny else width),
    )


def _tokens(vocabulary: int, tiny_vocabulary: int) -> Callable:
    return lambda shape, tiny: (torch.randint(tiny_vocabulary if tiny else vocabulary, shape),)


_VAE = {
    "latent_channels": 4,
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 512,
}
_TINY_VAE = {
    "block_out_channels": (32, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
}
_VIT = {"embed_dim": 64, "depth": 2, "num_heads": 2, "img_size": 32}
_TRAINED = (("autocast", "channels_last"), ("autocast", "contiguous"))
_IMAGES_TRAINED = (*_TRAINED, ("float32", "channels_last"))

#: By name, in the order in which tables list them. Sizes are those at which each model is used or was studied.
MODELS = {
    model.name: model
    for model in (
        Model(
            "resnet50_gn",
            "timm",
            "64x3x224x224",
            "2x3x32x32",
            _timm("resnet50_gn", {"layers": (1, 1, 1, 1), "num_classes": 10}),
            (*_IMAGES_TRAINED, ("inference", "channels_last")),
        ),
        Model(
            "resnetv2_50x1_bit",
            "timm",
            "64x3x224x224",
            "2x3x64x64",
            _timm("resnetv2_50x1_bit", {"num_classes": 10}),
            _TRAINED,
        ),
        Model(
            "ddpm_unet",
            "diffusers",
            "32x3x64x64",
            "2x3x16x16",
            _ddpm_unet(attends_at=1),
            _TRAINED,
            lambda shape, tiny: (torch.randn(shape), _steps(shape)),
        ),
        Model(  # as in the paper, which has attention at 16 x 16 pixels
            "ddpm_unet_16",
            "diffusers",
            "32x3x64x64",
            "2x3x16x16",
            _ddpm_unet(attends_at=2),
            (("autocast", "channels_last"),),
            lambda shape, tiny: (torch.randn(shape), _steps(shape)),
        ),
        Model(
            "segresnet",
            "monai",
            "1x1x96x96x96",
            "1x1x16x16x16",
            _monai("SegResNet", {"in_channels": 1, "out_channels": 2, "init_filters": 32}, {"init_filters": 8}),
            _IMAGES_TRAINED,
        ),
        Model(
            "basic_unet",
            "monai",
            "1x1x96x96x96",
            "1x1x16x16x16",
            _monai(
                "BasicUNet",
                {
                    "spatial_dims": 3,
                    "in_channels": 1,
                    "out_channels": 2,
                    "features": (32, 32, 64, 128, 256, 32),
                    "norm": ("group", {"num_groups": 8}),
                },
                {"features": (8, 8, 16, 16, 16, 8)},
            ),
            _TRAINED,
        ),
        Model(
            "dynunet",
            "monai",
            "1x1x96x96x96",
            "1x1x16x16x16",
            _monai(
                "DynUNet",
                {
                    "spatial_dims": 3,
                    "in_channels": 1,
                    "out_channels": 2,
                    "kernel_size": (3,) * 5,
                    "strides": (1, 2, 2, 2, 2),
                    "upsample_kernel_size": (2,) * 4,
                    "filters": (32, 64, 128, 256, 320),
                },
                {
                    "kernel_size": (3,) * 3,
                    "strides": (1, 2, 2),
                    "upsample_kernel_size": (2,) * 2,
                    "filters": (8, 16, 16),
                },
            ),
            _TRAINED,
        ),
        Model(
            "vae_decoder_512",
            "diffusers",
            "1x4x64x64",
            "1x4x8x8",
            _diffusers("AutoencoderKL", _VAE, _TINY_VAE, "decoder"),
            (("inference", "channels_last"), ("inference", "contiguous")),
        ),
        Model(
            "vae_decoder_1024",
            "diffusers",
            "1x4x128x128",
            "1x4x8x8",
            _diffusers("AutoencoderKL", _VAE, _TINY_VAE, "decoder"),
            (("inference", "channels_last"),),
        ),
        Model(
            "stable_diffusion_unet",
            "diffusers",
            "2x4x64x64",
            "2x4x8x8",
            _diffusers(
                "UNet2DConditionModel",
                {"cross_attention_dim": 768, "sample_size": 64},
                {
                    "cross_attention_dim": 32,
                    "block_out_channels": (32, 64),
                    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
                    "layers_per_block": 1,
                    "attention_head_dim": 4,
                },
            ),
            (("inference", "channels_last"), ("inference", "contiguous")),
            _prompted(768, 32),
        ),
        Model(
            "video_unet",
            "diffusers",
            "2x4x16x32x32",
            "2x4x2x8x8",
            _diffusers(
                "UNet3DConditionModel",
                {"cross_attention_dim": 1024},
                {
                    "cross_attention_dim": 32,
                    "block_out_channels": (32, 64),
                    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
                    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
                    "layers_per_block": 1,
                    "attention_head_dim": 8,
                },
            ),
            (("inference", "channels_last"),),
            _prompted(1024, 32),
        ),
        Model(
            "dit_xl",
            "diffusers",
            "8x4x32x32",
            "2x4x8x8",
            _diffusers(
                "DiTTransformer2DModel",
                {"num_layers": 28, "num_attention_heads": 16, "attention_head_dim": 72, "sample_size": 32},
                {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "sample_size": 8},
            ),
            (("inference", None),),
            lambda shape, tiny: (torch.randn(shape), _steps(shape), _steps(shape)),
        ),
        Model(
            "bert",
            "transformers",
            "32x256",
            "2x16",
            _transformers(
                "BertModel",
                {
                    "num_hidden_layers": 6,
                    "hidden_dropout_prob": 0.0,
                    "attention_probs_dropout_prob": 0.0,
                    "vocab_size": 30522,
                },
                {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128},
            ),
            (("float32", None), ("autocast", None)),
            _tokens(30522, 30522),
        ),
        Model(
            "gpt2",
            "transformers",
            "8x1024",
            "2x16",
            _transformers(
                "GPT2LMHeadModel",
                {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "use_cache": False},
                {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100},
            ),
            (("autocast", None), ("float32", None)),
            _tokens(50257, 100),
        ),
        Model("vit_b", "timm", "64x3x224x224", "2x3x32x32", _timm("vit_base_patch16_224", _VIT), (("autocast", None),)),
        Model(
            "mixer_b",
            "timm",
            "32x3x224x224",
            "2x3x32x32",
            _mixer_b,
            (("float32", None),),
        ),
        Model(
            "convnext_tiny",
            "timm",
            "64x3x224x224",
            "2x3x32x32",
            _timm("convnext_tiny", {"depths": (1, 1, 1, 1), "dims": (16, 32, 32, 64), "num_classes": 10}),
            _TRAINED,
        ),
        Model("resnet50", "torchvision", "64x3x224x224", "4x3x64x64", _resnet50, _TRAINED),
    )
}
