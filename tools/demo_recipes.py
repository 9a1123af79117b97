"""The demo's models: one recipe for all transformers and the mixer, and what sets each apart."""

from __future__ import annotations

import math
import types
from dataclasses import asdict, dataclass, replace
from typing import Any

import timm
import torch
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from torch import Tensor, nn

from vitsee_core.demo import architectures

SIZE = 32
PATCH = 4
MEAN, STD = 0.2860, 0.3530
VIT = {
    "img_size": SIZE,
    "patch_size": PATCH,
    "embed_dim": 96,
    "depth": 6,
    "num_heads": 4,
    "mlp_ratio": 2.0,
}
# The original code's GAP: no class token, and the mean of the normalised tokens.
GAP = {"class_token": False, "global_pool": "avg", "fc_norm": False}
MIXER = {
    "img_size": SIZE,
    "patch_size": PATCH,
    "embed_dim": 96,
    "num_blocks": 6,
    "mlp_ratio": (0.5, 2.0),
}


@dataclass(frozen=True)
class Recipe:
    """How one model is trained.

    An epoch is 60,000 images seen, also where `share` of the training images of each class is
    all that there is: they are seen more often, so that the number of updates is everyone's.
    sincos: position embeddings start as 2-D sines and cosines (as in MoCo-v3) and are trained on:
    from noise of 0.02 a short training leaves the heads blind to position.
    no_skip: blocks that are trained without their skip connections (Raghu et al. 2021, Fig. 8).
    masked: trained as a masked autoencoder (He et al. 2022) without labels, and only its linear
    classifier with labels.
    bf16: forward and backward passes in bfloat16 (autocast), weights and their updates in float32.
    """

    architecture: str
    model_args: dict[str, Any]
    first_conv: str
    classifier: str
    epochs: int = 12
    rate: float = 1.5e-3
    batch: int = 64
    weight_decay: float = 0.05
    shift: int = 2
    erase: float = 0.0
    seed: int = 0
    share: float = 1.0
    sincos: bool = True
    no_skip: tuple[str, ...] = ()
    masked: bool = False
    bf16: bool = True

    def record(self) -> dict[str, Any]:
        return asdict(self)


_VIT = Recipe("vit_tiny_patch16_224", VIT, "patch_embed.proj", "head")
_MIXER = Recipe(architectures.MIXER, MIXER, "stem.proj", "head", sincos=False)
_RESNET = Recipe(
    "resnet26",
    {"channels": [16, 32, 64, 128]},
    "conv1",
    "fc",
    rate=3e-3,
    batch=128,
    weight_decay=0.02,
    erase=0.1,
    sincos=False,
    bf16=False,
)
RECIPES: dict[str, Recipe] = {
    "vit-gap": replace(_VIT, model_args=VIT | GAP),
    "vit-noskip": replace(_VIT, no_skip=("blocks.3",)),
    "vit-10pct": replace(_VIT, share=0.1),
    "mixer": _MIXER,
    "vit-masked": replace(_VIT, masked=True),
    "vit-seed1": replace(_VIT, seed=1),
    "vit": _VIT,
    "resnet": _RESNET,
}


def build(recipe: Recipe) -> Any:
    """The untrained model, its weights drawn from the recipe's seed."""
    architectures.register()
    torch.manual_seed(recipe.seed)
    model: Any = timm.create_model(
        recipe.architecture, num_classes=10, **recipe.model_args
    )
    if recipe.sincos:
        with torch.no_grad():
            model.pos_embed[0, model.num_prefix_tokens :] = sincos(model.embed_dim)
    for path in recipe.no_skip:
        block: Any = model.get_submodule(path)
        block.forward = types.MethodType(_without_skip, block)
    return model


def sincos(dim: int) -> Tensor:
    """Position embeddings of the grid's cells, (64, dim)."""
    side = SIZE // PATCH
    table: Tensor = build_sincos2d_pos_embed([side, side], dim=dim, temperature=100.0)
    return table


def _without_skip(block: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """timm's transformer block without its two additions."""
    x = block.drop_path1(block.ls1(block.attn(block.norm1(x))))
    x = block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
    return x


def rate_at(recipe: Recipe, step: int, steps: int) -> float:
    """The learning rate: 500 updates of warm-up times a half cosine over all updates."""
    warm_up = min(1.0, step / 500)
    return recipe.rate * 0.5 * (1 + math.cos(math.pi * step / steps)) * warm_up


class MaskedAutoencoder(nn.Module):
    """Reconstructs the patches that its encoder, a timm ViT, does not see (He et al. 2022).

    Three quarters of the patches are left out before the encoder; a decoder of two narrow blocks
    that is thrown away later predicts each one's pixels, normalised to mean 0 and variance 1.
    """

    HIDDEN = 0.75
    WIDTH = 64
    positions: Tensor

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.embed = nn.Linear(encoder.embed_dim, self.WIDTH)
        self.mask_token = nn.Parameter(torch.randn(self.WIDTH) * 0.02)
        self.register_buffer("positions", sincos(self.WIDTH))
        shape: dict[str, Any] = {
            "embed_dim": self.WIDTH,
            "depth": 2,
            "num_heads": 4,
            "mlp_ratio": 2.0,
        }
        decoder: Any = timm.create_model(
            "vit_tiny_patch16_224",
            img_size=SIZE,
            patch_size=PATCH,
            num_classes=0,
            **shape,
        )
        self.blocks, self.norm = decoder.blocks, decoder.norm
        self.predict = nn.Linear(self.WIDTH, PATCH * PATCH)

    def forward(self, images: Tensor, order: Tensor) -> Tensor:
        """The mean squared error over the hidden patches of grey images (n, 3, 32, 32); `order`
        (n, 64) permutes each image's patches, and the first quarter is seen."""
        n, cells = order.shape
        seen = order[:, : round(cells * (1 - self.HIDDEN))]
        encoder, rows = self.encoder, torch.arange(n)[:, None]
        tokens = encoder.patch_embed(images) + encoder.pos_embed[:, 1:]
        cls = (encoder.cls_token + encoder.pos_embed[:, :1]).expand(n, -1, -1)
        x = self.embed(
            encoder.norm(encoder.blocks(torch.cat([cls, tokens[rows, seen]], 1)))
        )
        whole = self.mask_token.to(x.dtype).expand(n, cells, -1).clone()
        whole[rows, seen] = x[:, 1:]
        y = self.norm(self.blocks(torch.cat([x[:, :1], whole + self.positions], 1)))
        hidden = order[:, seen.shape[1] :]
        found = self.predict(y[:, 1:][rows, hidden]).float()
        missed: Tensor = found - patch_targets(images)[rows, hidden]
        return missed.square().mean()


def patch_targets(images: Tensor) -> Tensor:
    """The grey pixels of each patch, normalised within it: (n, 3, 32, 32) -> (n, 64, 16)."""
    patches = nn.functional.unfold(images[:, :1], PATCH, stride=PATCH).transpose(1, 2)
    spread, mean = torch.var_mean(patches, -1, keepdim=True)
    return (patches - mean) / (spread + 1e-6).sqrt()
