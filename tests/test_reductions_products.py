"""Scores as the compiled loops take them, and their exponentials."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.attention_calls import PER_HEAD
from vitsee_core.models.attention_watch import KernelCall
from vitsee_core.summaries import AttentionReducer, AttentionSummary
from vitsee_core.summaries.cpu_sums import (
    LANES,
    LEAST_SCORE,
    QUERIES,
    copy_scores,
    exponential,
    padded,
    subtract_largest,
)
from vitsee_core.types import Float32
from vitsee_stores.layout import TokenLayout


def without_gaps(rows: Float32, n_prefix: int, n_tokens: int) -> Float32:
    """Rows of whole vectors by token; what lies between must be no key."""
    begin = padded(n_prefix)
    at = np.r_[:n_prefix, begin : begin + n_tokens - n_prefix]
    assert np.isneginf(np.delete(rows, at, -1)).all()
    return rows[..., at]


@pytest.mark.slow
def test_scores_in_rows_of_whole_vectors() -> None:
    given = np.arange(12, dtype=np.float32)
    scores = np.full(QUERIES * 2 * LANES, np.nan, np.float32)
    copy_scores(given, 3, 2, 1, 3, 2 * LANES, scores)
    rows = scores.reshape(QUERIES, 2 * LANES)
    assert without_gaps(rows[:2], 1, 3).tolist() == [[3, 4, 5], [6, 7, 8]]
    assert rows[0, LANES : LANES + 2].tolist() == [4, 5]  # the grid begins with a vector


def call_of(n_images: int, n_tokens: int) -> KernelCall:
    shape = n_images, n_tokens, 3, 8  # interleaved, as timm's qkv
    query, key = (
        4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 1)
    )
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    return KernelCall({"query": query, "key": key, "value": query}, query)


def summary(call: KernelCall) -> AttentionSummary:
    layout = TokenLayout(("cls",), (5, 4), stride_px=(16.0, 12.0))
    valid = torch.arange(call.n_images) != 2
    return AttentionReducer(layout, "cpu", rows=True).reduce(call, valid)


def test_the_batch_around_an_image_does_not_matter() -> None:
    call = call_of(6, 21)
    whole = summary(call)
    part = {"query": call.query[4:], "key": call.key[4:], "value": call.value[4:]}
    alone = summary(KernelCall(part, call.output[4:]))
    for name in (*PER_HEAD, "head_std", "head_mean", "cls_rows", "received_rows"):
        assert torch.equal(getattr(whole, name)[4:], getattr(alone, name)), name


def test_exponentials_are_within_a_unit_in_the_last_place() -> None:
    x = np.linspace(-87, 0, 20001, dtype=np.float32)
    found = np.array([exponential(value) for value in x], np.float64)
    want = np.exp(x.astype(np.float64))
    assert np.abs(found / want - 1).max() < 2**-23
    assert exponential(np.float32(0)) == 1.0
    assert exponential(np.float32(-88)) == 0.0
    assert math.isnan(exponential(np.float32(np.nan)))


def test_scores_minus_their_largest_by_hand() -> None:
    inf, nan, least = math.inf, math.nan, float(LEAST_SCORE)
    rows = np.array([1, -3, -inf, -200, -inf, -5, -5, -7, -8, -5.5, 9, 9], np.float32)
    subtract_largest(rows, 2, 5)
    assert rows.tolist() == [0, -4, least, least, least, 0, 0, -2, -3, -0.5, 9, 9]
    for broken in ([1, nan, 0], [nan, -inf, -inf], [-inf] * 3, [-1, -nan, -2]):
        rows = np.array(broken, np.float32)
        subtract_largest(rows, 1, 3)
        assert np.isnan(rows).any(), broken
