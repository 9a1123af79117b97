"""Attention summaries against float64 loops, hand-computed values and their edges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import reference
from tests.attention_calls import (
    DEVICES,
    PER_HEAD,
    PREFIXES,
    SUMS,
    Call,
    random_scores,
    reduce,
)
from vitsee_core.summaries import AttentionReducer, AttentionSummary, attention
from vitsee_stores.layout import TokenLayout


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def expected(layout: TokenLayout, scores: Tensor) -> list[reference.Attention]:
    assert layout.grid and layout.stride_px
    return [
        reference.attention(
            reference.softmax(image),
            layout.n_prefix,
            layout.grid,
            layout.stride_px,
            layout.cls,
        )
        for image in scores.double().numpy()
    ]


def assert_close(found: Tensor, want: Any, name: str) -> None:
    """float32 softmax and sums of some dozens of terms."""
    rtol, atol = 2e-5, 2e-6
    np.testing.assert_allclose(
        found.cpu().numpy(), want, rtol=rtol, atol=atol, err_msg=name
    )


def assert_summary(found: AttentionSummary, images: list[reference.Attention]) -> None:
    for name in (*PER_HEAD, "head_std", "head_mean"):
        want = np.array([getattr(image, name) for image in images])
        assert_close(getattr(found, name), want, name)
    for name in SUMS:
        if name == "cls_map" and images[0].cls_map is None:
            assert found.cls_map is None
        else:
            assert_close(
                getattr(found, name), sum(getattr(i, name) for i in images), name
            )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grid", [(3, 4), (1, 5), (5, 1), (1, 1), (3, 3)])
@pytest.mark.parametrize("prefix", PREFIXES, ids=lambda kinds: "-".join(kinds) or "none")
def test_every_quantity_agrees_with_loops(
    prefix: tuple[str, ...], grid: tuple[int, int], device: str
) -> None:
    layout = TokenLayout(prefix, grid, stride_px=(16.0, 12.0))
    scores = random_scores(layout)
    assert_summary(reduce(layout, scores, device=device), expected(layout, scores))


@pytest.fixture
def few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes that a GPU takes, on the CPU."""
    monkeypatch.setattr(attention, "is_cpu", lambda _device: False)


@pytest.mark.usefixtures("few_kernels")
@pytest.mark.parametrize("grid", [(3, 4), (1, 5), (1, 1)])
@pytest.mark.parametrize(
    "prefix", PREFIXES[:3], ids=lambda kinds: "-".join(kinds) or "none"
)
def test_the_passes_of_a_gpu_agree_with_loops(
    prefix: tuple[str, ...], grid: tuple[int, int]
) -> None:
    layout = TokenLayout(prefix, grid, stride_px=(16.0, 12.0))
    scores = random_scores(layout, n_images=3)
    scores[0, 1, :, 0] = -math.inf if layout.n_tokens > 1 else 0.0
    found = reduce(layout, scores, block_bytes=4 * 3 * layout.n_tokens**2 * 2)
    assert_summary(found, expected(layout, scores))


@pytest.mark.usefixtures("few_kernels")
def test_the_passes_of_a_gpu_leave_invalid_images_out() -> None:
    layout = TokenLayout(("cls",), (3, 4), stride_px=(16.0, 16.0))
    scores = random_scores(layout, n_images=4)
    want = expected(layout, scores)
    scores[1] = math.nan
    found = reduce(layout, scores, [True, False, False, True], block_bytes=1)
    for name in SUMS:
        total = getattr(want[0], name) + getattr(want[3], name)
        np.testing.assert_allclose(getattr(found, name), total, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("frames", [None, 2])
def test_nothing_of_a_summary_needs_its_values_on_the_host(frames: int | None) -> None:
    """On the meta device there are none: whatever waited for them would fail."""
    layout = TokenLayout(("cls",), (3, 4), stride_px=(16.0, 16.0), frames=frames)
    call = Call(random_scores(layout).to("meta"))
    reducer = AttentionReducer(layout, "meta", rows=True, full=True)
    for valid in (
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, dtype=torch.bool, device="meta"),
    ):
        found = reducer.reduce(call, valid)
        for name, value in vars(reduce(layout, random_scores(layout))).items():
            other = getattr(found, name)
            if value is None:
                assert other is None and name in (
                    "distance_frames",
                    "frame_mass",
                    "aligned_frames",
                )
                continue
            assert (other.shape, other.dtype) == (value.shape, value.dtype), name


@pytest.mark.parametrize("device", DEVICES)
def test_one_head(device: str) -> None:
    layout = TokenLayout(("cls",), (2, 3), stride_px=(8.0, 8.0))
    scores = random_scores(layout, n_heads=1)
    found = reduce(layout, scores, device=device)
    assert_summary(found, expected(layout, scores))
    assert torch.all(found.head_std == 0)


def test_rows_and_full_hold_the_attention_itself() -> None:
    layout = TokenLayout(("reg0", "cls"), (2, 3), stride_px=(8.0, 8.0))
    scores = random_scores(layout)
    a = reference.softmax(scores.double().numpy())
    found = reduce(layout, scores)
    assert found.full is not None and found.full.dtype == torch.float16
    assert found.cls_rows is not None and found.received_rows is not None
    np.testing.assert_allclose(found.full.numpy(), a, atol=5e-4)  # float16: half of 2^-11
    np.testing.assert_allclose(found.cls_rows.numpy(), a[:, :, 1], rtol=1e-5)
    np.testing.assert_allclose(
        found.received_rows.numpy(), a[:, :, 2:].mean(2), rtol=1e-5
    )


def test_only_what_was_asked_for_is_kept() -> None:
    layout = TokenLayout(("cls",), (2, 3), stride_px=(8.0, 8.0))
    reducer = AttentionReducer(layout, "cpu", rollout=False)
    found = reducer.reduce(Call(random_scores(layout)), torch.tensor([True, True]))
    assert found.head_mean is found.cls_rows is found.received_rows is found.full is None
    want = reduce(layout, random_scores(layout))
    assert torch.equal(found.head_std, want.head_std)


def test_dtypes() -> None:
    layout = TokenLayout(("cls",), (2, 3), stride_px=(8.0, 8.0))
    found = reduce(layout, random_scores(layout))
    counts = {"n_queries", "received_argmax"}
    assert {getattr(found, name).dtype for name in counts} == {torch.int32}
    for name in set(PER_HEAD) - counts | {"head_std", "head_mean"}:
        assert getattr(found, name).dtype == torch.float32, name
    for name in SUMS:
        assert getattr(found, name).dtype == torch.float64, name


@pytest.mark.parametrize(
    ("grid", "stride", "px", "unit"),
    [
        ((7, 7), 32.0, 115.5, 0.602),
        ((14, 14), 16.0, 116.5, 0.560),
        ((16, 16), 14.0, 116.6, 0.555),
        ((28, 28), 8.0, 116.7, 0.540),
    ],
)
def test_uniform_attention_has_the_published_distances(
    grid: tuple[int, int], stride: float, px: float, unit: float
) -> None:
    layout = TokenLayout(("cls",), grid, stride_px=(stride, stride))
    n = layout.n_tokens
    found = reduce(layout, torch.zeros(1, 1, n, n))
    assert found.distance_px.item() == pytest.approx(px, abs=0.05)
    assert found.distance_unit.item() == pytest.approx(unit, abs=5e-4)
    assert found.distance_px_raw.item() == pytest.approx(
        found.distance_px.item() * (n - 1) / n, rel=1e-5
    )
    assert found.entropy.item() == pytest.approx(math.log(n), rel=1e-5)
    assert found.prefix_mass.item() == pytest.approx(1 / n, rel=1e-5)
    assert found.n_queries.item() == n - 1
    assert found.query_std.item() < 1e-6 / n
    assert found.qk_nmi.item() == pytest.approx(0.0, abs=5e-7)
    assert found.received_max.item() == pytest.approx(1 / n, rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", [0.0, 2.0])
@pytest.mark.parametrize("spread", [1e-1, 1e-2, 1e-3])
def test_spreads_of_nearly_even_attention(
    spread: float, level: float, device: str
) -> None:
    """All queries nearly alike, over all keys alike or over keys of different height."""
    layout = TokenLayout(("cls",), (14, 14), stride_px=(16.0, 16.0))
    scores = spread * random_scores(layout, n_images=1, n_heads=4)
    scores += level * random_scores(layout, n_images=1, n_heads=1, seed=1)[:, :, :1]
    found = reduce(layout, scores, device=device)
    rows = torch.softmax(scores.double(), -1)[:, :, 1:, 1:]
    query_std = rows.std(2).mean(-1)
    head_std = rows.std(1).mean((-1, -2))
    # The rounding of A (6e-8 of it) over a spread of at least 1e-3, averaged over 196^2 entries.
    torch.testing.assert_close(
        found.query_std.double().cpu(), query_std, rtol=2e-6, atol=0
    )
    torch.testing.assert_close(found.head_std.double().cpu(), head_std, rtol=1e-6, atol=0)


def test_where_attention_goes_and_what_a_query_says_of_it_by_hand() -> None:
    """Head 0: each query its own key. Head 1: all the class token but for a quarter on key 2.
    Head 2: two queries each on keys 0 and 1."""
    layout = TokenLayout(("cls",), (2, 2), stride_px=(8.0, 8.0))
    a = torch.zeros(1, 3, 5, 5)
    a[:, :, 0, 0] = 1.0
    a[0, 0, 1:, 1:] = torch.eye(4)
    a[0, 1, 1:, 0], a[0, 1, 1:, 3] = 0.75, 0.25
    a[0, 2, 1:3, 1], a[0, 2, 3:, 2] = 1.0, 1.0
    found = reduce(layout, a.log())
    assert found.received_max[0].tolist() == pytest.approx([0.25, 0.75, 0.5], rel=1e-6)
    assert found.received_argmax.tolist() == [[1, 0, 1]]  # the first of equal ones
    # I(q, k) = ln 4 of sqrt(ln 4 ln 4); H(k) = 0; ln 2 of sqrt(ln 4 ln 2).
    assert found.qk_nmi[0, 0].item() == pytest.approx(1.0, rel=1e-6)
    assert found.qk_nmi[0, 1].isnan()
    assert found.qk_nmi[0, 2].item() == pytest.approx(math.sqrt(0.5), rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_mutual_information_beside_a_sink(device: str) -> None:
    """The renormalised rows are what they are without the class token, however little they hold."""
    layout = TokenLayout(("cls",), (7, 7), stride_px=(8.0, 8.0))
    scores = random_scores(layout)
    scores[..., 0] = 12.0  # the spatial keys keep a hundredth of the mass
    bare = TokenLayout((), (7, 7), stride_px=(8.0, 8.0))
    found, alone = (
        reduce(layout, scores, device=device),
        reduce(bare, scores[:, :, 1:, 1:]),
    )
    want = [image.qk_nmi for image in expected(layout, scores)]
    np.testing.assert_allclose(found.qk_nmi.cpu().numpy(), want, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.qk_nmi.cpu(), alone.qk_nmi, rtol=0, atol=1e-6)


def test_identity_attention_has_no_distance() -> None:
    layout = TokenLayout(("cls",), (3, 4), stride_px=(16.0, 16.0))
    scores = torch.full((1, 2, 13, 13), -math.inf)
    scores.diagonal(dim1=-2, dim2=-1).zero_()
    found = reduce(layout, scores)
    for name in (
        "distance_px",
        "distance_px_raw",
        "distance_unit",
        "prefix_mass",
        "entropy",
    ):
        assert torch.equal(getattr(found, name), torch.zeros(1, 2)), name
    peak = torch.zeros(2, 5, 7, dtype=torch.float64)
    peak[:, 2, 3] = 1.0
    torch.testing.assert_close(found.aligned, peak)


@pytest.mark.parametrize(("dy", "dx"), [(1, 0), (0, 2), (-1, 1), (2, -3)])
def test_a_pure_shift_is_one_peak_at_key_minus_query(dy: int, dx: int) -> None:
    gh, gw = 4, 5
    layout = TokenLayout(("cls",), (gh, gw), stride_px=(16.0, 8.0))
    # Queries whose target lies outside the grid look at the class token: they have no spatial mass.
    scores = torch.full((1, 1, gh * gw + 1, gh * gw + 1), -math.inf)
    scores[..., 0] = 0.0
    n_inside = 0
    for row, col in np.ndindex(gh, gw):
        if 0 <= row + dy < gh and 0 <= col + dx < gw:
            n_inside += 1
            query, key = 1 + row * gw + col, 1 + (row + dy) * gw + col + dx
            scores[0, 0, query, 0] = -math.inf
            scores[0, 0, query, key] = 0.0
    found = reduce(layout, scores)
    peak = torch.zeros(1, 2 * gh - 1, 2 * gw - 1, dtype=torch.float64)
    peak[0, gh - 1 + dy, gw - 1 + dx] = 1.0
    torch.testing.assert_close(found.aligned, peak, rtol=1e-6, atol=0)
    assert found.n_queries.item() == n_inside == (gh - abs(dy)) * (gw - abs(dx))
    length = math.hypot(16 * dy, 8 * dx)
    assert found.distance_px.item() == pytest.approx(length, rel=1e-6)
    assert found.distance_px_raw.item() == pytest.approx(length * n_inside / 20, rel=1e-6)
    assert found.distance_unit.item() == pytest.approx(
        math.hypot(dy / 3, dx / 4), rel=1e-6
    )
    assert found.prefix_mass.item() == pytest.approx(1 - n_inside / 20, rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_no_query_with_spatial_mass(device: str) -> None:
    layout = TokenLayout(("cls", "reg0"), (2, 2), stride_px=(16.0, 16.0))
    scores = random_scores(layout)
    scores[:, 0, :, 2:] = -math.inf
    found = reduce(layout, scores, device=device)
    assert_summary(found, expected(layout, scores))
    assert found.n_queries.tolist() == [[0, 4, 4]] * 2
    assert (
        found.distance_px[:, 0].isnan().all() and found.distance_unit[:, 0].isnan().all()
    )
    assert torch.all(found.aligned[0] == 0)
    torch.testing.assert_close(found.prefix_mass[:, 0].cpu(), torch.ones(2))


@pytest.mark.parametrize("device", DEVICES)
def test_masked_prefix_and_masked_keys(device: str) -> None:
    layout = TokenLayout(("cls", "reg0"), (3, 4), stride_px=(16.0, 16.0))
    scores = random_scores(layout)
    scores[:, 0, :, :2] = -math.inf
    scores[:, 1] += torch.full((14, 14), -math.inf).triu_(1)
    scores[0, 2, 3:7, 5] = -math.inf
    found = reduce(layout, scores, device=device)
    assert_summary(found, expected(layout, scores))
    assert torch.all(found.prefix_mass[:, 0] == 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first_key", [-200.0, -80.0, 40.0, 3000.0])
def test_entropy_where_one_key_is_far_from_the_others(
    first_key: float, device: str
) -> None:
    layout = TokenLayout(("cls",), (3, 4), stride_px=(16.0, 16.0))
    scores = random_scores(layout)
    scores[..., 0] += first_key
    found = reduce(layout, scores, device=device).entropy.cpu().numpy()
    want = np.stack([image.entropy for image in expected(layout, scores)])
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-4)


def test_entropy_of_scores_far_from_zero() -> None:
    layout = TokenLayout(("cls",), (3, 4), stride_px=(16.0, 16.0))
    scores = (random_scores(layout) * 64).round() / 64  # exact after the shift
    found, shifted = reduce(layout, scores), reduce(layout, scores + 8192)
    torch.testing.assert_close(shifted.entropy, found.entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models(dtype: torch.dtype) -> None:
    layout = TokenLayout(("cls",), (3, 4), stride_px=(16.0, 16.0))
    scores = random_scores(layout).to(dtype)
    assert_summary(reduce(layout, scores), expected(layout, scores))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_invalid_images_leave_the_sums_alone(broken: float, device: str) -> None:
    layout = TokenLayout(("cls",), (3, 4), stride_px=(16.0, 16.0))
    scores = random_scores(layout, n_images=4)
    valid = [True, False, True, False]
    want = expected(layout, scores)
    scores[1] = broken
    for mask in (torch.tensor(valid), torch.tensor(valid, device=device)):
        reducer = AttentionReducer(layout, device)
        found = reducer.reduce(Call(scores.to(device)), mask)
        for name in SUMS:
            total = sum(getattr(want[i], name) for i in (0, 2))
            np.testing.assert_allclose(
                getattr(found, name).cpu().numpy(), total, rtol=1e-5
            )
        for i in (0, 2, 3):
            np.testing.assert_allclose(
                found.entropy[i].cpu().numpy(), want[i].entropy, rtol=1e-5
            )
    assert torch.isnan(found.distance_px[1]).all()


def test_a_query_that_may_attend_nowhere_makes_its_image_and_head_nan() -> None:
    layout = TokenLayout(("cls",), (3, 4), stride_px=(16.0, 16.0))
    scores = random_scores(layout)
    scores[0, 1, 5] = -math.inf
    found = reduce(layout, scores)
    nowhere = [[False, True, False], [False] * 3]
    for name in set(PER_HEAD) - {"n_queries", "received_argmax"}:
        assert getattr(found, name).isnan().tolist() == nowhere, name
    assert (found.received_argmax == -1).tolist() == nowhere


def test_no_valid_image_at_all() -> None:
    layout = TokenLayout(("cls",), (3, 4), stride_px=(16.0, 16.0))
    found = reduce(layout, torch.full((2, 3, 13, 13), math.nan), valid=[False, False])
    for name in SUMS:
        assert torch.all(getattr(found, name) == 0), name


def test_no_image_at_all() -> None:
    layout = TokenLayout(("cls",), (3, 4), stride_px=(16.0, 16.0))
    reducer = AttentionReducer(layout, "cpu")
    reducer.reduce(Call(random_scores(layout)), torch.ones(2, dtype=torch.bool))
    found = reducer.reduce(
        Call(random_scores(layout, n_images=0)), torch.ones(0, dtype=torch.bool)
    )
    assert found.entropy.shape == (0, 3)
    for name in SUMS:
        assert torch.all(getattr(found, name) == 0), name


def test_a_layout_without_grid_or_stride_is_refused() -> None:
    for layout in (TokenLayout(("cls",), None, rows=9), TokenLayout((), (3, 3))):
        with pytest.raises(ValueError, match="grid"):
            AttentionReducer(layout, "cpu")


def test_attention_over_other_tokens_is_refused() -> None:
    layout = TokenLayout(("cls",), (3, 3), stride_px=(16.0, 16.0))
    with pytest.raises(ValueError, match="9 tokens"):
        reduce(layout, torch.zeros(1, 1, 9, 9))
