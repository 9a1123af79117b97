"""Stores made from whole attention of a test's choosing, every summary by a slow float64 loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    rows = [row / row.sum() for row in body if row.sum() > 0]
    if len(rows) < 2:
        return np.nan
    joint = np.array(rows) / len(rows)
    of_queries, of_keys = joint.sum(1), joint.sum(0)
    information = 0.0
    for q, k in np.ndindex(joint.shape):
        if joint[q, k] > 0:
            information += joint[q, k] * np.log(joint[q, k] / (of_queries[q] * of_keys[k]))
    of_keys = of_keys[of_keys > 0]
    spread = -(of_keys * np.log(of_keys)).sum() * np.log(len(rows))
    return float(information / np.sqrt(spread)) if spread > 0 else np.nan


def rollout(head_means: Sequence[Float], layout: TokenLayout, residual: bool) -> Float:
    """The whole product, matrix by matrix: (tokens,)."""
    eye = np.eye(layout.n_tokens)
    product = eye
    for mean in head_means:
        mixed = 0.5 * mean + 0.5 * eye if residual else mean
        product = (mixed / mixed.sum(1, keepdims=True)) @ product
    row: Float = product[layout.n_prefix :].mean(0)
    return row if layout.cls is None else product[layout.cls]


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
    n, first = len(group.a[0]), group.layout.n_prefix
    folder, widest = group.group.folder, max(a.shape[1] for a in group.a)
    assert group.layout.grid is not None
    gh, gw = group.layout.grid
    t = group.layout.n_tokens
    heads = (n, len(group.a), widest)
    names = ("entropy", "prefix_mass", "query_std", "received_max", "qk_nmi")
    per_head = {name: np.full(heads, np.nan) for name in names}
    per_head["received_argmax"] = np.full(heads, -1)
    head_std = np.zeros(heads[:2])
    maps = np.zeros((*heads, 2 * gh - 1, 2 * gw - 1))
    received, cls = np.zeros((*heads, t)), np.zeros((*heads, t))
    for i, row, h in np.ndindex(heads):
        if h >= group.a[row].shape[1]:
            continue
        a = group.a[row][i, h]
        spatial = a[first:]
        logs = np.log(np.where(spatial > 0, spatial, 1))
        per_head["entropy"][i, row, h] = -(spatial * logs).sum(1).mean()
        per_head["prefix_mass"][i, row, h] = spatial[:, :first].sum(1).mean()
        per_head["query_std"][i, row, h] = spatial[:, first:].std(0, ddof=1).mean()
        maps[i, row, h] = aligned(a, group.layout)
        received[i, row, h] = spatial.mean(0)
        per_head["received_max"][i, row, h] = max(received[i, row, h])
        per_head["received_argmax"][i, row, h] = list(received[i, row, h]).index(
            max(received[i, row, h])
        )
        per_head["qk_nmi"][i, row, h] = qk_nmi(a, group.layout)
        if group.layout.cls is not None:
            cls[i, row, h] = a[group.layout.cls]
    for i, row in np.ndindex(heads[:2]):
        a = group.a[row][i][:, first:, first:]
        head_std[i, row] = a.std(0, ddof=1).mean() if len(a) > 1 else 0.0
    out: dict[str, Array] = {folder + name: values for name, values in per_head.items()}
    out |= {folder + "head_std": head_std, folder + "aligned": maps, folder + "received": received}
    if group.layout.cls is not None:
        out[folder + "cls_map"] = cls
    if level in ("rows", "full"):
        out[folder + "received_rows"] = received
    if level == "full":
        for name, values in zip(group.blocks, group.a, strict=True):
            out[f"attention/full/{name}"] = values
    return out
