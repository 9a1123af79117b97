"""Stores made from whole attention of a test's choosing, every summary by a slow float64 loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests import reference
from tests.stores import write_attention
from vitsee_stores import AttentionGroup, Store, TokenLayout

Array = NDArray[Any]
Float = NDArray[np.float64]


@dataclass(frozen=True)
class Attention:
    """Blocks that share a layout. a: one (images, heads, tokens, tokens) array a block."""

    layout: TokenLayout
    a: tuple[Float, ...]
    blocks: tuple[str, ...]
    prefix: str = ""

    @property
    def group(self) -> AttentionGroup:
        heads = tuple(a.shape[1] for a in self.a)
        return AttentionGroup(self.prefix, self.blocks, heads, self.layout)


def layout(
    grid: tuple[int, int] = (2, 3), prefix: Sequence[str] = ("cls",), step: float = 8.0
) -> TokenLayout:
    return TokenLayout(tuple(prefix), grid, stride_px=(step, step))


def random_attention(
    layout: TokenLayout, n: int, heads: Sequence[int], *, seed: int = 0, prefix: str = ""
) -> Attention:
    """Softmax of random scores, blocks named blocks.0 and so on (below `prefix` where given)."""
    rng = np.random.default_rng(seed)
    found = []
    for h in heads:
        e = np.exp(2 * rng.standard_normal((n, h, layout.n_tokens, layout.n_tokens)))
        # What a store of --attention full can hold, so that singles compare to the last digit.
        found.append((e / e.sum(-1, keepdims=True)).astype(np.float16).astype(np.float64))
    names = tuple(f"{prefix or 'blocks'}.{i}" for i in range(len(heads)))
    return Attention(layout, tuple(found), names, prefix)


def aligned(a: Float, layout: TokenLayout) -> Float:
    """One image and head: mean over queries with spatial mass of the renormalised, shifted row."""
    assert layout.grid is not None
    (gh, gw), first = layout.grid, layout.n_prefix
    out, counted = np.zeros((2 * gh - 1, 2 * gw - 1)), 0
    for q in range(gh * gw):
        row = a[first + q, first:]
        if row.sum() == 0:
            continue
        counted += 1
        for k in range(gh * gw):
            dy, dx = k // gw - q // gw, k % gw - q % gw
            out[gh - 1 + dy, gw - 1 + dx] += row[k] / row.sum()
    return out / max(counted, 1)


def qk_nmi(a: Float, layout: TokenLayout) -> float:
    """One image and head: what queries and keys, both spatial, know of each other."""
    body = a[layout.n_prefix :, layout.n_prefix :]
    return reference.shared_information(
        [row / row.sum() for row in body if row.sum() > 0]
    )


def rollout(head_means: Sequence[Float], layout: TokenLayout, residual: bool) -> Float:
    """The whole product, matrix by matrix: (tokens,)."""
    return reference.rollout(list(head_means), layout.n_prefix, layout.cls, residual)


def write(
    path: Path,
    groups: Sequence[Attention],
    *,
    level: str = "summary",
    with_rollout: bool = True,
    **more: Any,
) -> Store:
    """A store of these blocks' attention; images with valid 0 are NaN and in no sum. more: of
    `write_attention`."""
    n = len(groups[0].a[0])
    with_rollout = with_rollout and len(groups) == 1
    images: dict[str, Array] = {}
    for group in groups:
        images |= _images(group, level)
    if with_rollout:
        means = [a.mean(1) for a in groups[0].a]
        images["attention/rollout"] = np.stack(
            [rollout([m[i] for m in means], groups[0].layout, True) for i in range(n)]
        )
    return write_attention(
        path, [group.group for group in groups], images, n_images=n, level=level,
        rollout=with_rollout, ids=[f"test/{i}.png" for i in range(n)], **more,
    )  # fmt: skip


def _images(group: Attention, level: str) -> dict[str, Array]:
    """Every array of the group image by image; what the store sums, too."""
    layout, heads = (
        group.layout,
        (len(group.a[0]), len(group.a), max(a.shape[1] for a in group.a)),
    )
    assert layout.grid is not None
    gh, gw = layout.grid
    names = (
        "entropy",
        "prefix_mass",
        "query_std",
        "received_max",
        "received_argmax",
        "qk_nmi",
    )
    out = {name: np.full(heads, -1.0 if "argmax" in name else np.nan) for name in names}
    out["aligned"] = np.zeros((*heads, 2 * gh - 1, 2 * gw - 1))
    out |= {name: np.zeros((*heads, layout.n_tokens)) for name in ("received", "cls_map")}
    head_std = np.zeros(heads[:2])
    for i, row in np.ndindex(heads[:2]):
        a = group.a[row][i]
        of = reference.attention(a, layout.n_prefix, layout.grid, (1.0, 1.0), layout.cls)
        head_std[i, row] = of.head_std
        for name, values in out.items():
            if (own := getattr(of, name)) is not None:
                values[i, row, : len(a)] = own
    out["head_std"] = head_std
    if layout.cls is None:
        del out["cls_map"]
    if level in ("rows", "full"):
        out["received_rows"] = out["received"]
    out = {f"{group.group.folder}{name}": values for name, values in out.items()}
    if level == "full":
        for name, whole in zip(group.blocks, group.a, strict=True):
            out[f"attention/full/{name}"] = whole
    return out
