"""A ViT of one's own.

    vitsee extract 'examples/own_vit.py:build?depth=6' --random-init 0 --data photos -o own.zarr

vitsee knows none of these names. It finds the blocks, what their two branches add, the attention of
nn.MultiheadAttention, the class token and the classifier by running the model once.
"""

import torch
from torch import nn


class Layer(nn.Module):
    """Looks around, then thinks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_mixing, self.before_thinking = (
            nn.LayerNorm(width),
            nn.LayerNorm(width),
        )
        self.mixing = nn.MultiheadAttention(width, heads, batch_first=True)
        self.thinking = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(images, tokens, width), twice."""
        seen = self.before_mixing(x)
        x = x + self.mixing(seen, seen, seen)[0]
        out: torch.Tensor = x + self.thinking(self.before_thinking(x))
        return out


class OwnViT(nn.Module):
    """Patches, a class token, layers, an answer."""

    def __init__(self, depth: int, width: int, heads: int, side: int, patch: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.tower = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.last = nn.LayerNorm(width)
        self.answer = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(images, 3, side, side) to (images, 10)."""
        x = self.cut(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.places
        for layer in self.tower:
            x = layer(x)
        logits: torch.Tensor = self.answer(self.last(x)[:, 0])
        return logits


def build(
    depth: int = 4, width: int = 64, heads: int = 4, img_size: int = 64, patch: int = 8
):  # type: ignore[no-untyped-def]
    """The module, and how its images are prepared."""
    module = OwnViT(depth, width, heads, img_size, patch)
    return module, {
        "input_size": (3, img_size, img_size),
        "mean": (0.5,) * 3,
        "std": (0.5,) * 3,
    }
