"""Slow, obvious oracles: plain loops in float64 over one image, written from the definitions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float64]


def std(values: list[float]) -> float:
    """Sample standard deviation (n - 1); 0 for one value."""
    mean = sum(values) / len(values)
    total = sum((value - mean) ** 2 for value in values)
    return math.sqrt(total / (len(values) - 1)) if len(values) > 1 else 0.0


# Attention


def softmax(scores: ArrayLike) -> Float:
    """Softmax over the last axis; a masked key's score is -inf."""
    given = np.asarray(scores, dtype=np.float64)
    out = np.empty_like(given)
    for index in np.ndindex(given.shape[:-1]):
        largest = max(given[index])
        weights = [math.exp(score - largest) for score in given[index]]
        out[index] = [weight / sum(weights) for weight in weights]
    return out


@dataclass
class Attention:
    """Everything the extraction keeps of one image's attention, named as in the store.

    (heads,) but for head_std (a number), aligned (heads, 2 gh - 1, 2 gw - 1), received and
    cls_map (heads, tokens), head_mean (tokens, tokens), aligned_frames (heads, 2 times - 1).
    """

    distance_px: Float
    distance_px_raw: Float
    distance_unit: Float
    prefix_mass: Float
    entropy: Float
    query_std: Float
    n_queries: Float
    received_max: Float
    received_argmax: Float
    qk_nmi: Float
    head_std: float
    aligned: Float
    received: Float
    cls_map: Float | None
    head_mean: Float
    distance_frames: Float
    frame_mass: Float
    aligned_frames: Float


def attention(
    a: Float,
    n_prefix: int,
    grid: tuple[int, int],
    stride_px: tuple[float, float],
    cls: int | None,
    times: int = 1,
    stride_frames: float = 1.0,
) -> Attention:
    """The summaries of A (heads, tokens, tokens), one image's softmax, or one clip's."""
    gh, gw = grid
    n_heads, n_tokens, _ = a.shape
    spatial = range(n_prefix, n_tokens)
    time = {t: (t - n_prefix) // (gh * gw) for t in spatial}
    cells = {t: divmod((t - n_prefix) % (gh * gw), gw) for t in spatial}
    names = "distance_px distance_px_raw distance_unit prefix_mass entropy query_std n_queries"
    names += " received_max received_argmax qk_nmi distance_frames frame_mass"
    per_head = {name: np.zeros(n_heads) for name in names.split()}
    aligned = np.zeros((n_heads, 2 * gh - 1, 2 * gw - 1))
    aligned_frames = np.zeros((n_heads, 2 * times - 1))
    received = np.zeros((n_heads, n_tokens))
    for h in range(n_heads):
        counted = [q for q in spatial if sum(a[h, q, k] for k in spatial) > 1e-37]
        per_head["n_queries"][h] = len(counted)
        for q in spatial:
            for k in range(n_tokens):
                received[h, k] += a[h, q, k] / len(spatial)
                if a[h, q, k] > 0:
                    per_head["entropy"][h] -= (
                        a[h, q, k] * math.log(a[h, q, k]) / len(spatial)
                    )
                if k < n_prefix:
                    per_head["prefix_mass"][h] += a[h, q, k] / len(spatial)
            mass = sum(a[h, q, k] for k in spatial)
            for k in spatial:
                dy, dx = cells[k][0] - cells[q][0], cells[k][1] - cells[q][1]
                px = math.hypot(dy * stride_px[0], dx * stride_px[1])
                unit = math.hypot(dy / max(gh - 1, 1), dx / max(gw - 1, 1))
                per_head["distance_px_raw"][h] += a[h, q, k] * px / len(spatial)
                if q in counted:
                    weight = a[h, q, k] / mass / len(counted)
                    per_head["distance_px"][h] += weight * px
                    per_head["distance_unit"][h] += weight * unit
                    aligned[h, gh - 1 + dy, gw - 1 + dx] += weight
                    dt = time[k] - time[q]
                    aligned_frames[h, times - 1 + dt] += weight
                    per_head["distance_frames"][h] += weight * abs(dt) * stride_frames
                    per_head["frame_mass"][h] += weight * (dt == 0)
        if not counted:
            for name in ("distance_px", "distance_unit", "distance_frames", "frame_mass"):
                per_head[name][h] = math.nan
        spreads = [std([a[h, q, k] for q in spatial]) for k in spatial]
        per_head["query_std"][h] = sum(spreads) / len(spreads)
        per_head["received_max"][h] = max(received[h])
        per_head["received_argmax"][h] = list(received[h]).index(max(received[h]))
        inner = [a[h, q, n_prefix:] / sum(a[h, q, n_prefix:]) for q in counted]
        per_head["qk_nmi"][h] = shared_information(inner)
    spreads = [
        std([a[h, q, k] for h in range(n_heads)]) for q in spatial for k in spatial
    ]
    return Attention(
        **per_head,
        head_std=sum(spreads) / len(spreads),
        aligned=aligned,
        aligned_frames=aligned_frames,
        received=received,
        cls_map=None if cls is None else a[:, cls],
        head_mean=a.mean(axis=0),
    )


def shared_information(rows: list[Float]) -> float:
    """Normalised mutual information of row numbers, all as likely, and keys: the sum of
    p(q, k) ln(p(q, k) / (p(q) p(k))) over the root of the product of both entropies; NaN where one
    is 0."""
    if len(rows) < 2:
        return math.nan
    n, mean = len(rows), np.mean(rows, axis=0)
    found, of_keys = 0.0, 0.0
    for row in rows:
        for joint, key in zip(row / n, mean, strict=True):
            found += joint * math.log(joint * n / key) if joint > 0 else 0.0
    for key in mean:
        of_keys -= key * math.log(key) if key > 0 else 0.0
    return found / math.sqrt(math.log(n) * of_keys) if of_keys > 0 else math.nan


def rollout(
    head_means: list[Float], n_prefix: int, cls: int | None, residual: bool = True
) -> Float:
    """One image's rollout by the whole product: the class token's row, or the queries' mean."""
    n_tokens = len(head_means[0])
    product = np.eye(n_tokens)
    for mean in head_means:
        matrix = 0.5 * mean + 0.5 * np.eye(n_tokens) if residual else mean.copy()
        for q in range(n_tokens):
            matrix[q] /= matrix[q].sum()
        product = matrix @ product
    row: Float = product[cls] if cls is not None else product[n_prefix:].mean(axis=0)
    return row


# Residual branches and pooled activations


def residual_products(z: Float, f: Float) -> Float:
    """z.z, f.f and z.f of every token: (images, tokens, 3) from (images, tokens, dim)."""
    out = np.zeros((*z.shape[:2], 3))
    for image, token, channel in np.ndindex(*z.shape):
        left, right = z[image, token, channel], f[image, token, channel]
        out[image, token] += [left * left, right * right, left * right]
    return out


def mean_over_cells(body: Float) -> Float:
    """(images, dim) from (images, rows, cols, dim) or (images, rows, dim)."""
    out = np.zeros((body.shape[0], body.shape[-1]))
    n_cells = math.prod(body.shape[1:-1])
    for index in np.ndindex(*body.shape):
        out[index[0], index[-1]] += body[index] / n_cells
    return out
