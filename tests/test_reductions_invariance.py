"""What must not change attention summaries, and what must change them in a known way."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention_calls import (
    PER_HEAD,
    PER_IMAGE,
    PREFIXES,
    SUMS,
    Call,
    random_scores,
    reduce,
)
from vitsee_core.summaries import AttentionReducer
from vitsee_core.summaries.summary import _sum_by_offset_fold, distances, sum_by_offset
from vitsee_stores.layout import TokenLayout


def assert_same(a: Tensor, b: Tensor, rtol: float = 1e-4, atol: float = 2e-5) -> None:
    """Equal but for the order in which the same float32 terms were added up."""
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)


def assert_identical(a: Tensor, b: Tensor, name: str) -> None:
    """Equal to the bit, NaN in the same places."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=name)


# What no longer holds its value when tokens change places, or keys go.
BY_PLACE = {"received_argmax"}


@st.composite
def layouts(draw: st.DrawFn) -> TokenLayout:
    grid = (draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    stride = (draw(st.sampled_from([4.0, 16.0])), draw(st.sampled_from([4.0, 14.0])))
    return TokenLayout(draw(st.sampled_from(PREFIXES)), grid, stride_px=stride)


seeds = st.integers(0, 1000)
fast = settings(max_examples=25, deadline=None)


@fast
@given(layouts(), seeds)
def test_a_constant_added_to_a_row_of_scores_changes_nothing(
    layout: TokenLayout, seed: int
) -> None:
    scores = random_scores(layout, seed=seed)
    shift = random_scores(layout, seed=seed + 1)[..., :1]
    a, b = reduce(layout, scores), reduce(layout, scores + shift)
    for name in (*PER_IMAGE, *SUMS):
        if getattr(a, name) is not None:
            atol = 1e-3 if name == "full" else 2e-5
            assert_same(getattr(a, name), getattr(b, name), atol=atol)


@fast
@given(layouts(), seeds)
def test_heads_in_another_order(layout: TokenLayout, seed: int) -> None:
    scores = random_scores(layout, seed=seed)
    order = [2, 0, 1]
    a, b = reduce(layout, scores), reduce(layout, scores[:, order])
    for name in PER_HEAD:
        assert_identical(getattr(a, name)[:, order], getattr(b, name), name)
    assert torch.equal(a.aligned[order], b.aligned)
    assert_same(a.head_std, b.head_std, rtol=1e-6, atol=1e-7)


@fast
@given(layouts(), seeds)
def test_images_in_another_order(layout: TokenLayout, seed: int) -> None:
    scores = random_scores(layout, n_images=3, seed=seed)
    order = [1, 2, 0]
    a, b = reduce(layout, scores), reduce(layout, scores[order])
    for name in PER_IMAGE:
        if getattr(a, name) is not None:
            assert_identical(getattr(a, name)[order], getattr(b, name), name)
    for name in ("aligned", "received"):
        assert_same(getattr(a, name), getattr(b, name))


@fast
@given(layouts(), seeds)
def test_an_image_turned_round(layout: TokenLayout, seed: int) -> None:
    """Half a turn keeps distances and turns the offsets."""
    n, scores = layout.n_prefix, random_scores(layout, seed=seed)
    turned = [*range(n), *reversed(range(n, layout.n_tokens))]
    a, b = reduce(layout, scores), reduce(layout, scores[:, :, turned][..., turned])
    for name in set(PER_HEAD) - BY_PLACE:
        assert_same(getattr(a, name), getattr(b, name))
    assert_same(a.aligned.flip(1, 2), b.aligned)


@fast
@given(layouts(), seeds)
def test_rows_and_columns_exchanged(layout: TokenLayout, seed: int) -> None:
    assert layout.grid and layout.stride_px
    n, (gh, gw) = layout.n_prefix, layout.grid
    cells = torch.arange(gh * gw).view(gh, gw).T.flatten() + n
    order = [*range(n), *cells.tolist()]
    other = dataclasses.replace(layout, grid=(gw, gh), stride_px=layout.stride_px[::-1])
    scores = random_scores(layout, seed=seed)
    a, b = reduce(layout, scores), reduce(other, scores[:, :, order][..., order])
    for name in set(PER_HEAD) - BY_PLACE:
        assert_same(getattr(a, name), getattr(b, name))
    assert_same(a.aligned.mT, b.aligned)


@fast
@given(layouts(), seeds)
def test_offsets_hold_the_distances(layout: TokenLayout, seed: int) -> None:
    """Any distance follows from the aligned sums: mass by offset times the offset's length."""
    assert layout.grid and layout.stride_px
    gh, gw = layout.grid
    found = reduce(layout, random_scores(layout, seed=seed))
    dy = torch.arange(1 - gh, gh)[:, None] * layout.stride_px[0]
    dx = torch.arange(1 - gw, gw)[None, :] * layout.stride_px[1]
    by_offset = (found.aligned * torch.hypot(dy, dx)).sum((1, 2))
    assert_same(by_offset, found.distance_px.double().sum(0))
    total = torch.full_like(by_offset, 2.0)
    assert_same(found.aligned.sum((1, 2)), total)
    assert_same(found.received.sum(1), total)


@fast
@given(layouts(), seeds, st.floats(0.0, 30.0))
def test_bounds(layout: TokenLayout, seed: int, sharpness: float) -> None:
    assert layout.grid and layout.stride_px
    gh, gw = layout.grid
    found = reduce(layout, random_scores(layout, seed=seed) * sharpness)
    assert torch.all(found.entropy >= 0)
    assert torch.all(found.entropy <= math.log(layout.n_tokens) + 1e-4)
    assert torch.all(found.prefix_mass <= 1 + 1e-6)
    farthest = math.hypot(layout.stride_px[0] * (gh - 1), layout.stride_px[1] * (gw - 1))
    assert torch.all(found.distance_px_raw <= farthest * (1 - found.prefix_mass) + 1e-4)
    assert torch.all(found.n_queries <= layout.n_tokens - layout.n_prefix)
    assert torch.all(found.distance_unit.nan_to_num() <= math.sqrt(2) + 1e-5)


@fast
@given(layouts(), seeds)
def test_a_class_token_that_none_attends_to(layout: TokenLayout, seed: int) -> None:
    """Prefix tokens without mass leave the rest as it is without them."""
    n, scores = layout.n_prefix, random_scores(layout, seed=seed)
    scores[..., :n] = -math.inf
    bare = dataclasses.replace(layout, prefix=())
    a, b = reduce(layout, scores), reduce(bare, scores[:, :, n:, n:])
    for name in set(PER_HEAD) - {"received_argmax"}:
        assert_same(getattr(a, name), getattr(b, name))
    assert torch.equal(a.received_argmax, b.received_argmax + n)
    assert_same(a.aligned, b.aligned)


def everything(summary: object) -> dict[str, Tensor]:
    found = {name: getattr(summary, name) for name in (*PER_IMAGE, *SUMS)}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize("prefix", PREFIXES[:3])
def test_blocks_of_images_do_not_matter(prefix: tuple[str, ...]) -> None:
    layout = TokenLayout(prefix, (5, 4), stride_px=(16.0, 16.0))
    scores = random_scores(layout, n_images=7)
    scores[3, 1, 2:5, 0] = -math.inf  # one image takes the plain way for its entropy
    valid = [True, True, False, True, True, True, True]
    image_bytes = 4 * 3 * layout.n_tokens**2
    whole = everything(reduce(layout, scores, valid, block_bytes=100 * image_bytes))
    for n in (1, 2, 3):
        other = everything(reduce(layout, scores, valid, block_bytes=n * image_bytes))
        for name in PER_IMAGE:
            if name in whole:
                assert torch.equal(whole[name], other[name]), (name, n)
        for name in SUMS:
            if name in whole:
                # Weighted rows add up in float32 within a part of the batch.
                assert_same(whole[name], other[name], rtol=1e-6, atol=1e-7)


def test_threads_do_not_matter() -> None:
    layout = TokenLayout(("cls",), (5, 4), stride_px=(16.0, 16.0))
    scores = random_scores(layout, n_images=37)
    valid = [image != 4 for image in range(37)]

    def summary() -> dict[str, Tensor]:
        # Inference mode is a thread's own: what it makes may only be written inside it.
        with torch.inference_mode():
            return everything(reduce(layout, scores, valid, block_bytes=1))

    assert_equal_for_any_threads(summary)


def assert_equal_for_any_threads(summary: Callable[[], dict[str, Tensor]]) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for n_threads in (1, 2, 5, 40):
            torch.set_num_threads(n_threads)
            found.append(summary())
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.equal(value, other[name]), name


@dataclasses.dataclass
class ProductCall(Call):
    """Attention whose scores are nothing but a product."""

    query: Tensor
    key: Tensor

    def factors(self) -> tuple[Tensor, Tensor, float]:  # type: ignore[override]
        return self.query, self.key, 0.3


def test_threads_do_not_matter_to_large_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which one thread takes each alone, and several share each."""
    layout = TokenLayout(("cls",), (14, 14), stride_px=(16.0, 16.0))
    generator = torch.Generator().manual_seed(0)
    shape = 3, 3, layout.n_tokens, 64
    query, key = (torch.randn(shape, generator=generator) for _ in range(2))
    call = ProductCall(0.3 * query @ key.transpose(-1, -2), query, key)
    monkeypatch.setattr("vitsee_core.summaries.attention.THREAD_BYTES", 1)
    valid = torch.ones(3, dtype=torch.bool)
    assert_equal_for_any_threads(
        lambda: everything(AttentionReducer(layout, "cpu", rows=True).reduce(call, valid))
    )


def test_large_images_share_their_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = TokenLayout(("cls",), (5, 4), stride_px=(16.0, 16.0))
    scores = random_scores(layout, n_images=5)
    want = everything(reduce(layout, scores))
    monkeypatch.setattr("vitsee_core.summaries.attention.THREAD_BYTES", 1)
    callers: set[int] = set()

    class Watched(Call):
        def scores(self, images: slice, out: Tensor | None = None) -> Tensor:
            callers.add(threading.get_ident())
            return super().scores(images, out)

    reducer = AttentionReducer(layout, "cpu", rows=True, full=True, block_bytes=1)
    found = reducer.reduce(Watched(scores), torch.ones(5, dtype=torch.bool))
    assert callers == {threading.get_ident()}
    for name, value in everything(found).items():
        assert_same(value, want[name], rtol=1e-6, atol=1e-7)


def test_batches_do_not_matter() -> None:
    layout = TokenLayout(("cls",), (5, 4), stride_px=(16.0, 16.0))
    scores = random_scores(layout, n_images=7)
    valid = [True, False, True, True, True, False, True]
    whole = everything(reduce(layout, scores, valid))
    parts = [slice(0, 2), slice(2, 3), slice(3, 7)]
    pieces = [everything(reduce(layout, scores[part], valid[part])) for part in parts]
    for name in PER_IMAGE:
        assert torch.equal(whole[name], torch.cat([piece[name] for piece in pieces])), (
            name
        )
    for name in SUMS:
        total = torch.stack([piece[name] for piece in pieces]).sum(0)
        # Weighted rows add up in float32 within a batch.
        assert_same(whole[name], total, rtol=1e-6, atol=1e-7)


def test_a_reducer_keeps_nothing_of_the_call_before() -> None:
    layout = TokenLayout(("cls",), (5, 4), stride_px=(16.0, 16.0))
    reducer = AttentionReducer(layout, "cpu", rows=True, full=True)
    first, second = (random_scores(layout, n_images=3, seed=seed) for seed in (1, 2))
    with torch.inference_mode():
        before = reducer.reduce(Call(first), torch.ones(3, dtype=torch.bool))
        kept = {name: value.clone() for name, value in everything(before).items()}
    # Fewer images, more heads, outside inference mode.
    wide = torch.cat([second, second], dim=1)[:2]
    after = reducer.reduce(Call(wide), torch.ones(2, dtype=torch.bool))
    assert all(
        torch.equal(value, kept[name]) for name, value in everything(before).items()
    )
    fresh = everything(reduce(layout, wide))
    assert all(
        torch.equal(value, fresh[name]) for name, value in everything(after).items()
    )


def test_scores_are_not_written_unless_given_away() -> None:
    layout = TokenLayout(("cls",), (3, 4), stride_px=(16.0, 16.0))
    scores = random_scores(layout)
    before = scores.clone()
    reduce(layout, scores, valid=[True, False])
    assert torch.equal(scores, before)


@pytest.mark.parametrize("grid", [(3, 4), (1, 6), (6, 1), (1, 1), (5, 5)])
def test_both_sums_by_offset_agree_with_a_loop(grid: tuple[int, int]) -> None:
    gh, gw = grid
    pairs = torch.from_numpy(np.random.default_rng(0).random((2, gh * gw, gh * gw)))
    want = torch.zeros(2, 2 * gh - 1, 2 * gw - 1, dtype=torch.float64)
    for q, k in np.ndindex(gh * gw, gh * gw):
        dy, dx = k // gw - q // gw, k % gw - q % gw
        want[:, gh - 1 + dy, gw - 1 + dx] += pairs[:, q, k]
    assert_same(sum_by_offset(pairs, grid), want)
    assert_same(_sum_by_offset_fold(pairs, grid), want)


def test_distances_of_a_small_grid() -> None:
    found = distances((2, 3), (4.0, 3.0))
    assert found[0].tolist() == [0.0, 3.0, 6.0, 4.0, 5.0, math.hypot(4, 6)]
    assert torch.equal(found, found.T)
