"""Attention calls with scores of a test's choosing, and what their summaries hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitsee_core.summaries import AttentionReducer, AttentionSummary
from vitsee_core.summaries.device_passes import BLOCK_BYTES
from vitsee_stores.layout import TokenLayout

PER_HEAD = (
    "distance_px",
    "distance_px_raw",
    "distance_unit",
    "prefix_mass",
    "entropy",
    "query_std",
    "n_queries",
    "received_max",
    "received_argmax",
    "qk_nmi",
)
PER_IMAGE = (*PER_HEAD, "head_std", "head_mean", "cls_rows", "received_rows", "full")
SUMS = ("aligned", "received", "cls_map")
PREFIXES: list[tuple[str, ...]] = [
    (),
    ("cls",),
    ("cls", "dist"),
    ("reg0", "cls"),
    ("reg0", "reg1"),
    ("cls", "reg0", "reg1", "reg2", "reg3"),
]
DEVICES = ["cpu"]
DEVICES += ["cuda"] if torch.cuda.is_available() else []
DEVICES += ["mps"] if torch.backends.mps.is_available() else []


@dataclass
class Call:
    """Attention with given scores (images, heads, tokens, tokens)."""

    given: Tensor

    @property
    def n_images(self) -> int:
        return self.given.shape[0]

    @property
    def n_heads(self) -> int:
        return self.given.shape[1]

    @property
    def n_tokens(self) -> int:
        return self.given.shape[2]

    def scores(self, images: slice, out: Tensor | None = None) -> Tensor:
        part = self.given[images].float()
        return part.clone() if out is None else out.copy_(part)


def random_scores(
    layout: TokenLayout, n_images: int = 2, n_heads: int = 3, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (n_images, n_heads, layout.n_tokens, layout.n_tokens)
    return 2.0 * torch.randn(shape, generator=generator)


def reduce(
    layout: TokenLayout,
    scores: Tensor,
    valid: list[bool] | None = None,
    device: str = "cpu",
    block_bytes: int = BLOCK_BYTES,
) -> AttentionSummary:
    reducer = AttentionReducer(
        layout, device, rows=True, full=True, block_bytes=block_bytes
    )
    mask = torch.tensor([True] * len(scores) if valid is None else valid)
    return reducer.reduce(Call(scores.to(device)), mask)
