"""Keypoints: matches against features upsampled in a loop, scores by hand, intervals over images,
and what a user sees."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode

from tests import reference_keypoints as reference
from tests.spair_sets import (
    GRID,
    LAYOUT,
    SIZE,
    SIZES,
    STRIDE,
    all_pairs,
    annotation,
    transform,
    write_pairs,
    write_store,
)
from tests.stores import write_sites
from tests.tables import equal, groups_of, having, unique
from vitsee_core.analyses.keypoints import COLUMNS, plot, run
from vitsee_core.analyses.keypoints.candidates import (
    TokenAxis,
    candidate_axes,
    token_axes,
)
from vitsee_core.analyses.keypoints.positions import locate
from vitsee_core.analyses.keypoints.protocol import ProtocolOptions, choose_protocol
from vitsee_core.analyses.keypoints.scoring import KeypointScorer
from vitsee_core.analyses.keypoints.search import (
    find_matches,
    sample_features,
    search,
    unit_tokens,
)
from vitsee_core.analyses.keypoints.spair import draw_pairs, read_pairs
from vitsee_core.images.placement import place
from vitsee_core.runtime.progress import Tally
from vitsee_core.statistics.shares import share_interval
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.labelled_rows import random_features
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import TokenLayout

Array = NDArray[Any]
EVERY = (-0.5, -0.5, SIZE - 0.5, SIZE - 0.5)


def predictions(store: Store, folder: Path, **choices: Any) -> tuple[Any, Array]:
    """The located keypoints and where each is found, at the first site."""
    protocol = choose_protocol(ProtocolOptions(**choices))
    located = locate(store, draw_pairs(read_pairs(folder), None), protocol)
    (site,) = store.select(["blocks"])
    found = search(store, site, located, protocol.match, device=torch.device("cpu"))
    return located, found


def made(
    path: Path, seed: int = 0, dim: int = 6, **more: Any
) -> tuple[Store, Path, Array]:
    """All pairs of two categories and random tokens for their images."""
    pairs, ids, sizes = all_pairs(seed=seed)
    grids = np.random.default_rng(seed).standard_normal((len(ids), GRID, GRID, dim))
    grids = grids.astype(np.float32).astype(np.float64)
    store = write_store(path / "a.zarr", {"blocks.0.out": grids}, ids, sizes, **more)
    return store, write_pairs(path / "SPair-71k", pairs), grids


def field(shift: tuple[float, float] = (0, 0), dim: int = 32, seed: int = 3) -> Array:
    """(rows, cols, dim) of features that change smoothly over the input, moved by x, y pixels."""
    rng = np.random.default_rng(seed)
    wave, phase = rng.normal(0, 0.06, (2, dim)), rng.uniform(0, 2 * np.pi, dim)
    centres = (np.arange(GRID) + 0.5) * STRIDE - 0.5
    x, y = centres[None, :] - shift[0], centres[:, None] - shift[1]
    found: Array = np.cos(x[..., None] * wave[0] + y[..., None] * wave[1] + phase)
    return found


def squares(
    path: Path, source: Array, target: Array, points: Any, **more: Any
) -> tuple[Store, Path]:
    """One pair of images as large as the input; points: x, y in source and target."""
    size = [SIZE, SIZE, 3]
    pair = annotation(
        src_imsize=size, trg_imsize=size, trg_bndbox=[0, 0, 50, 50],
        src_kps=[list(a) for a, _ in points], trg_kps=[list(b) for _, b in points], **more,
    )  # fmt: skip
    store = write_store(
        path / "a.zarr", {"blocks.0.out": np.stack([source, target])},
        ["cat/a0.jpg", "cat/a1.jpg"], (SIZE, SIZE),
    )  # fmt: skip
    return store, write_pairs(path / "SPair-71k", [pair])


def value(table: Table, metric: str, baseline: str = "", **more: Any) -> float:
    (found,) = having(table, metric=metric, baseline=baseline, **more)["value"]
    return float(found)


# ---------------------------------------------------------------- matches against loops


@pytest.mark.parametrize("seed", range(3))
def test_vit_analysis_is_the_released_algorithm(tmp_path: Path, seed: int) -> None:
    store, folder, grids = made(tmp_path, seed)
    located, found = predictions(store, folder, preset="walmer", pairs_per_class=99)
    for point, pair in enumerate(located.pair_index.tolist()):
        source, target = (
            grids[rows[pair]] for rows in (located.source_row, located.target_row)
        )
        expected = reference.vit_analysis(
            source, target, located.source_xy[point].tolist(), SIZE
        )
        assert found[point].tolist() == list(expected)


def test_vit_analysis_lies_on_the_token_grid_and_at_the_border(tmp_path: Path) -> None:
    store, folder, _ = made(tmp_path)
    _, found = predictions(store, folder, match="vit_analysis", candidates="canvas")
    centres = (np.arange(GRID) + 0.5) * STRIDE - 0.5
    beside = {0.0, *np.floor(centres)[1:], *np.ceil(centres)[1:]}
    assert set(found.ravel().tolist()) <= beside
    assert (
        found == 0
    ).any()  # in the first half cell the first pixel is taken, 3.5 too far out


def test_coordinates_of_vit_analysis_are_scaled_and_truncated(tmp_path: Path) -> None:
    # 60 x 40 becomes 64 x 43 below 10 rows of border: x * 64 / 60, y * 64 / 60 + 10
    store, folder, _ = made(tmp_path)
    located, _ = predictions(store, folder, preset="walmer", pairs_per_class=99)
    first = located.pairs[0]
    assert first.source_size == (40, 60) and first.target_size == (60, 40)
    np.testing.assert_allclose(located.source_xy[:4], first.source_xy * 64 / 60 + [0, 10])
    np.testing.assert_allclose(located.target_xy[:4], first.target_xy * 64 / 60 + [10, 0])
    assert located.side_length[0] == max(40 // 2, 60 // 2) * 64 / 60
    assert (located.pixel_size == 1).all()


@pytest.mark.parametrize("where", ["image", "canvas", "box"])
@pytest.mark.parametrize("match", ["smooth", "token"])
def test_matches_are_those_of_a_loop_over_pixels(
    tmp_path: Path, match: str, where: str
) -> None:
    store, folder, grids = made(tmp_path, 1)
    located, found = predictions(store, folder, match=match, candidates=where)
    slow = getattr(reference, match)
    for point, pair in list(enumerate(located.pair_index.tolist()))[::3]:
        one = located.pairs[pair]
        source, target = (
            grids[rows[pair]] for rows in (located.source_row, located.target_row)
        )
        box = {
            "canvas": EVERY,
            "image": tuple(np.array(_edges(one.target_size)) - 0.5),
            "box": tuple(
                _placed(np.array(one.box).reshape(2, 2), one.target_size).ravel()
            ),
        }[where]
        at = _placed(one.source_xy, one.source_size)[
            point - np.argmax(located.pair_index == pair)
        ]
        np.testing.assert_allclose(located.source_xy[point], at, atol=1e-9)
        expected = slow(source, target, at.tolist(), SIZE, box)
        np.testing.assert_allclose(found[point], expected, atol=1e-9)


def _edges(size: tuple[int, int]) -> tuple[float, float, float, float]:
    where = place(transform(), size)
    return where.left, where.top, where.right, where.bottom


def _placed(xy: Array, size: tuple[int, int]) -> Array:
    """By hand: the longer side becomes 64, the border is the same on both sides, rounded down."""
    height, width = (round(side * SIZE / max(size)) for side in size)
    scale = np.array([width / size[1], height / size[0]])
    found: Array = (xy + 0.5) * scale - 0.5 + [(SIZE - width) // 2, (SIZE - height) // 2]
    return found


def test_results_do_not_depend_on_slabs_and_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []
    for i, slab in enumerate((2, 5, 6)):
        (tmp_path / str(i)).mkdir()
        store, folder, _ = made(tmp_path / str(i), slab=slab)
        tables.append(run(store, pairs=folder))
        monkeypatch.setattr(f"{run.__module__}.search.PIECE_VALUES", 5000)
        monkeypatch.setattr(f"{run.__module__}.search.SAMPLED_AT_ONCE", 3)
    for other in tables[1:]:
        assert other["value"].tolist() == tables[0]["value"].tolist()
        assert other["low"].tolist() == tables[0]["low"].tolist()


@given(
    n=st.integers(1, 6),
    stride=st.floats(1, 20),
    offset=st.floats(-8, 8),
    length=st.integers(1, 90),
)
@settings(max_examples=60, deadline=None)
def test_weights_and_corners_of_any_grid(
    n: int, stride: float, offset: float, length: int
) -> None:
    cells = TokenAxis(n, stride, offset)
    pixels = np.arange(length, dtype=float)
    weights = cells.bilinear_weights(pixels)
    np.testing.assert_allclose(weights.sum(1), 1)
    assert ((weights > 0).sum(1) <= 2).all()
    np.testing.assert_allclose(
        weights @ np.arange(n), cells.token_coordinates(pixels), atol=1e-9
    )
    # The largest of all pixels is at a corner, whatever the values.
    layout = TokenLayout(
        (), (n, n), stride_px=(stride, stride), offset_px=(offset, offset)
    )
    window = np.array([-0.5, -0.5, length, length])
    corners, _ = candidate_axes(layout, (length, length), window, "vit_analysis")
    values = np.random.default_rng(n).standard_normal(n)
    assert (corners.weights @ values).max() == pytest.approx(
        (weights @ values).max(), abs=1e-9
    )


def test_a_window_without_candidates_has_the_nearest(tmp_path: Path) -> None:
    window = np.array([20.1, 3.2, 20.4, 3.3])
    rows, cols = candidate_axes(LAYOUT, (SIZE, SIZE), window, "smooth")
    assert rows.positions.tolist() == [3] and cols.positions.tolist() == [20]
    rows, cols = candidate_axes(LAYOUT, (SIZE, SIZE), window, "token")
    assert rows.positions.tolist() == [3.5] and cols.positions.tolist() == [19.5]


# ---------------------------------------------------------------- what is found, by hand


def test_whole_patches_are_found_at_any_alpha_and_parts_by_smooth_alone(
    tmp_path: Path,
) -> None:
    colours = np.random.default_rng(0).standard_normal((GRID, GRID, 8))
    points = [
        ((3 + 8 * c, 4 + 8 * r), (3 + 8 * (c + 2), 4 + 8 * (r + 1)))
        for r, c in ((1, 1), (4, 3))
    ]
    moved = np.roll(colours, (1, 2), (0, 1))
    for name in "ab":
        (tmp_path / name).mkdir()
    store, folder = squares(tmp_path / "a", colours, moved, points)
    for match in ("smooth", "token"):
        # of 50 pixels 0.015 is 0.75: the centre of a token lies 0.5 from two pixels, 0.71 from four
        table = run(store, pairs=folder, match=match, alphas=[0.015])
        assert value(table, "pck@0.015") == 1
    shift = (3, 2)
    points = [
        ((x, y), (x + 3, y + 2)) for x, y in ((20, 28), (36, 20), (28, 44), (44, 36))
    ]
    store, folder = squares(tmp_path / "b", field(), field(shift), points)
    found = {
        match: value(run(store, pairs=folder, match=match, alphas=[0.045]), "pck@0.045")
        for match in ("smooth", "token", "vit_analysis")
    }
    assert found["smooth"] == 1 and found["token"] < 1 and found["vit_analysis"] < 1


def test_an_image_is_found_in_itself_to_the_pixel_by_smooth_alone(tmp_path: Path) -> None:
    points = [((x, y), (x, y)) for x in range(6, 58, 7) for y in range(5, 58, 9)]
    store, folder = squares(tmp_path, field(), field(), points)
    smooth, released = (
        np.sqrt(((found - located.target_xy) ** 2).sum(1))
        for located, found in (
            predictions(store, folder, match=m) for m in ("smooth", "vit_analysis")
        )
    )
    assert smooth.mean() < 1 < 2 < released.mean()


def test_found_is_strictly_nearer_than_alpha_times_the_longer_side(
    tmp_path: Path,
) -> None:
    colours = np.random.default_rng(0).standard_normal((GRID, GRID, 8))
    # The source is a token's centre, found at (19.5, 27.5); the keypoint lies 5 away from there.
    store, folder = squares(tmp_path, colours, colours, [((19.5, 27.5), (22.5, 31.5))])
    for alpha, hit in ((0.1, 0), (0.1001, 1)):  # of the box's 50
        table = run(store, pairs=folder, match="token", alphas=[alpha])
        assert value(table, f"pck@{alpha:g}") == hit
    for alpha, hit in ((5 / 64, 0), (5.01 / 64, 1)):
        table = run(store, pairs=folder, match="token", alphas=[alpha], alpha_of="image")
        assert value(table, f"pck@{alpha:g}") == hit


def test_lengths_and_rotations_of_channels_change_nothing(tmp_path: Path) -> None:
    store, folder, grids = made(tmp_path, 2)
    _, before = predictions(store, folder)
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 6)))[0]
    lengths = np.random.default_rng(1).uniform(0.5, 3, grids.shape[:3])[..., None]
    _, ids, sizes = all_pairs(seed=2)
    other = write_store(
        tmp_path / "b.zarr", {"blocks.0.out": grids @ turn * lengths}, ids, sizes
    )
    _, after = predictions(other, folder)
    np.testing.assert_array_equal(before, after)


def test_squashed_images_are_measured_in_their_own_pixels(tmp_path: Path) -> None:
    # 128 x 32 squashed to 64 x 64: an input pixel is 2 pixels across and half a pixel down
    colours = np.random.default_rng(0).standard_normal((GRID, GRID, 8))
    size = [128, 32, 3]
    pair = annotation(
        src_imsize=size, trg_imsize=size, trg_bndbox=[0, 0, 100, 20],
        src_kps=[[39.5, 13.75]], trg_kps=[[39.5, 13.75]],
    )  # fmt: skip
    store = write_store(
        tmp_path / "a.zarr", {"blocks.0.out": np.stack([colours, np.roll(colours, 1, 1)])},
        ["a0", "a1"], (32, 128), mode="squash",
    )  # fmt: skip
    folder = write_pairs(tmp_path / "s", [pair])
    # found a token of 8 input pixels to the right: 16 pixels
    for alpha, hit in ((0.159, 0), (0.161, 1)):
        table = run(store, pairs=folder, match="token", alphas=[alpha])
        assert value(table, f"pck@{alpha:g}") == hit
    with pytest.raises(VitseeError, match=r"were squashed; .* --crop-mode border"):
        run(store, pairs=folder, match="vit_analysis")


# ---------------------------------------------------------------- scores and intervals


def test_scores_by_hand(tmp_path: Path) -> None:
    """Two categories with three and one points."""
    pairs = [
        annotation("c0", "c1", "cat", src_kps=[[1, 1]] * 2, trg_kps=[[1, 1]] * 2),
        annotation("c1", "c0", "cat", src_kps=[[1, 1]], trg_kps=[[1, 1]]),
        annotation("d0", "d1", "dog", src_kps=[[1, 1]], trg_kps=[[1, 1]]),
    ]
    store = write_store(
        tmp_path / "a.zarr", {"blocks.0.out": np.ones((4, GRID, GRID, 2))},
        ["cat/c0.jpg", "cat/c1.jpg", "dog/d0.jpg", "dog/d1.jpg"], (40, 60),
    )  # fmt: skip
    folder = write_pairs(tmp_path / "s", pairs)
    scorer = KeypointScorer.from_keypoints(
        locate(store, read_pairs(folder), choose_protocol(ProtocolOptions()))
    )
    cells = {
        row["metric"]: row for row in scorer.rows(np.array([[1], [0], [1], [0]]), [0.1])
    }
    assert cells["pck@0.1"]["value"] == pytest.approx((2 / 3 + 0) / 2)
    assert cells["pck_point@0.1"]["value"] == 0.5
    assert cells["pck_image@0.1"]["value"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert [cells["pck@0.1"][n] for n in ("n_images", "n_pairs", "n_points")] == [4, 3, 4]
    # without either image a category has no pairs
    assert np.isnan([cells["pck@0.1"]["low"], cells["pck@0.1"]["high"]]).all()


def scored(located: Any, found: Array) -> list[reference.Scored]:
    return [
        (p.category, p.source, p.target, found[located.pair_index == i].tolist())
        for i, p in enumerate(located.pairs)
    ]


def test_values_and_errors_are_those_of_leaving_out_images_in_a_loop(
    tmp_path: Path,
) -> None:
    pairs, ids, sizes = all_pairs(sizes=(*SIZES, (30, 40), (44, 52)))
    del pairs[3], pairs[7]  # not every pair exists
    pairs.append(
        annotation("cat1", "cat1", "cat", src_imsize=[40, 60, 3], trg_imsize=[40, 60, 3])
    )
    grids = np.ones((len(ids), GRID, GRID, 2))
    store = write_store(tmp_path / "a.zarr", {"blocks.0.out": grids}, ids, sizes)
    folder = write_pairs(tmp_path / "s", pairs)
    located = locate(
        store, draw_pairs(read_pairs(folder), None), choose_protocol(ProtocolOptions())
    )
    found = np.random.default_rng(0).integers(0, 2, (len(located), 2))
    lists = scored(located, found[:, 1])
    cells = {
        row["metric"]: row
        for row in KeypointScorer.from_keypoints(located).rows(found, [0.1, 0.05])
    }
    values, errors = reference.pck(lists), reference.jackknife(lists)
    for name in values:
        row = cells[f"{name}@0.05"]
        assert row["value"] == pytest.approx(values[name], abs=1e-12)
        assert row["std"] == pytest.approx(errors[name], abs=1e-12)
        # t with 10 images less 2 categories
        ends = share_interval(values[name], errors[name], 10, 2.306004135)
        assert (row["low"], row["high"]) == pytest.approx(ends)


def test_intervals_are_over_images_not_over_pairs(tmp_path: Path) -> None:
    """Images in which all is found or nothing: their pairs vary together."""
    n = 12
    ids = [f"cat/i{i}.jpg" for i in range(n)]
    pairs = [
        annotation(f"i{a}", f"i{b}", "cat") for a in range(n) for b in range(n) if a != b
    ]
    store = write_store(
        tmp_path / "a.zarr", {"blocks.0.out": np.ones((n, GRID, GRID, 2))}, ids, (40, 60)
    )
    folder = write_pairs(tmp_path / "s", pairs)
    located = locate(store, read_pairs(folder), choose_protocol(ProtocolOptions()))
    easy = np.arange(n) % 2
    row_of = {f"i{i}.jpg": i for i in range(n)}
    good = np.array([easy[row_of[located.pairs[p].target]] for p in located.pair_index])
    (row,) = (
        r
        for r in KeypointScorer.from_keypoints(located).rows(good[:, None], [0.1])
        if r["metric"] == "pck_image@0.1"
    )
    over_pairs = np.std(good[::2], ddof=1) / np.sqrt(len(pairs))
    over_images = np.std(easy, ddof=1) / np.sqrt(n)
    assert row["value"] == 0.5
    assert row["std"] == pytest.approx(over_images, rel=0.1)
    assert row["std"] > 3 * over_pairs


def test_baselines_against_loops(tmp_path: Path) -> None:
    store, folder, _ = made(tmp_path, 1)
    for match, where in (
        ("smooth", "image"),
        ("token", "canvas"),
        ("vit_analysis", "canvas"),
    ):
        table = run(store, pairs=folder, match=match, candidates=where, alphas=[0.2])
        located = locate(
            store, draw_pairs(read_pairs(folder), None),
            choose_protocol(ProtocolOptions(match=match, candidates=where)),
        )  # fmt: skip
        chance, grid, still = [], [], []
        for i, p in enumerate(located.pair_index.tolist()):
            pair = located.pairs[p]
            rows, cols = candidate_axes(
                LAYOUT, located.input_size, located.window[i], match
            )
            near = [
                np.linalg.norm(([x, y] - located.target_xy[i]) * located.pixel_size[i])
                < 0.2 * located.side_length[i]
                for y in rows.positions
                for x in cols.positions
            ]
            chance.append(float(np.mean(near)))
            grid.append(float(np.max(near)))
            at = pair.source_xy[i - np.argmax(located.pair_index == p)]
            scale = np.array(pair.target_size[::-1]) / pair.source_size[::-1]
            there = (at + 0.5) * scale - 0.5
            error = there - pair.target_xy[i - np.argmax(located.pair_index == p)]
            longer = max(pair.box[2] - pair.box[0], pair.box[3] - pair.box[1])
            still.append(float(np.hypot(*error) < 0.2 * longer))
        for name, values in (("chance", chance), ("grid", grid), ("still", still)):
            lists = scored(located, np.array(values))
            for metric, expected in reference.pck(lists).items():
                assert value(table, f"{metric}@0.2", name) == pytest.approx(
                    expected, abs=1e-12
                )


def test_metrics_are_chosen(tmp_path: Path) -> None:
    store, pairs, _ = made(tmp_path)
    whole = run(store, pairs=pairs)
    for kind in ("pck", "pck_point", "pck_image"):
        found = run(store, pairs=pairs, metrics=[kind])
        rows = having(
            whole, metric=[m for m in unique(whole, "metric") if m.startswith(f"{kind}@")]
        )
        assert found["value"].tolist() == rows["value"].tolist() and len(found)
        assert plot(found).axes
    with pytest.raises(
        VitseeError, match="no metric 'x'; metrics of keypoints: pck, pck_point"
    ):
        run(store, pairs=pairs, metrics=["x"])


def test_groups_are_tables_of_their_pairs(tmp_path: Path) -> None:
    store, folder, _ = made(tmp_path)
    table = run(
        store, pairs=folder, by_group=["class", "viewpoint", "scale"], alphas=[0.2]
    )
    assert tuple(table.written.columns) == COLUMNS
    whole = having(table, **{"class": "", "group": ""})
    assert len(whole) == 3 * 4 and whole["n_pairs"].tolist() == [12] * 12
    groups = {
        "viewpoint 0",
        "viewpoint 1",
        "viewpoint 2",
        "scale 0",
        "scale 1",
        "scale 2",
    }
    assert set(table["group"]) == {"", *groups}
    kept = [
        json.loads(f.read_text())
        for f in sorted((folder / "PairAnnotation/test").iterdir())
    ]
    for column, name, chosen in (
        ("class", "dog", [p for p in kept if p["category"] == "dog"]),
        ("group", "viewpoint 2", [p for p in kept if p["viewpoint_variation"] == 2]),
    ):
        own = write_pairs(tmp_path / column, chosen)
        alone = run(store, pairs=own, alphas=[0.2])
        part = having(table, **{column: name})
        for cell in ("metric", "value", "n_pairs", "n_points", "n_images", "baseline"):
            assert part[cell].tolist() == alone[cell].tolist()
        np.testing.assert_allclose(part["std"], alone["std"], atol=1e-12)
    assert not {"class", "group"} & set(run(store, pairs=folder).written.columns)


def test_replicates_are_the_values_without_each_image(tmp_path: Path) -> None:
    store, folder, _ = made(tmp_path)
    table = run(store, pairs=folder, alphas=[0.2])
    assert table.replicates is not None and table.replicates.shape == (12, 6)
    assert table.notes["replicates"]["a"]["n_blocks"] == 6
    kept = [
        json.loads(f.read_text())
        for f in sorted((folder / "PairAnnotation/test").iterdir())
    ]
    less = [p for p in kept if "dog2.jpg" not in (p["src_imname"], p["trg_imname"])]
    alone = run(store, pairs=write_pairs(tmp_path / "less", less), alphas=[0.2])
    np.testing.assert_allclose(table.replicates[:, 5], alone["value"], atol=1e-12)


def test_draws_are_seeded_and_of_each_class_alone(tmp_path: Path) -> None:
    pairs, _, _ = all_pairs(("cat", "dog", "owl"))
    every = read_pairs(write_pairs(tmp_path, pairs))
    drawn = draw_pairs(every, 2, 5)
    assert [p.category for p in drawn] == ["cat", "cat", "dog", "dog", "owl", "owl"]
    assert [p.name for p in drawn] == [p.name for p in draw_pairs(every[::-1], 2, 5)]
    without = draw_pairs([p for p in every if p.category != "cat"], 2, 5)
    assert [p.name for p in without] == [p.name for p in drawn[2:]]
    assert len({tuple(p.name for p in draw_pairs(every, 2, s)) for s in range(9)}) > 3
    assert len(draw_pairs(every, 100)) == len(every)


def test_sites_without_a_grid(tmp_path: Path) -> None:
    pairs, ids, sizes = all_pairs()
    tokens = np.ones((6, 1 + GRID * GRID, 2))
    store = write_sites(
        tmp_path / "a.zarr", {"blocks.0.out": tokens, "pooled": np.ones((6, 2))},
        layout=LAYOUT, ids=ids, sizes=sizes, transform=transform(),
    )  # fmt: skip
    folder = write_pairs(tmp_path / "s", pairs)
    assert unique(run(store, pairs=folder, sites=["*"]), "site") == ["blocks.0.out"]
    with pytest.raises(VitseeError, match="pooled has no tokens on the image's grid"):
        run(store, pairs=folder, sites=["pooled"])


@pytest.mark.parametrize("match", ["smooth", "token", "vit_analysis"])
def test_what_a_gpu_works_on_stays_there(
    match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors refuse operands of several devices."""
    device = torch.device("cuda:0")
    rows, cols = candidate_axes(LAYOUT, (SIZE, SIZE), np.array(EVERY), match)
    points = np.random.default_rng(0).uniform(0, SIZE - 1, (5, 2))
    with FakeTensorMode():
        tokens = unit_tokens(
            torch.empty(GRID, GRID, 6, dtype=torch.float16, device=device)
        )
        sources = sample_features(tokens, token_axes(LAYOUT), points, match, (SIZE, SIZE))
        assert (sources.device, sources.shape) == (device, (5, 6))
        left: list[torch.device] = []

        def back(x: torch.Tensor) -> torch.Tensor:
            left.append(x.device)
            raise StopIteration

        monkeypatch.setattr(torch.Tensor, "cpu", back)
        with pytest.raises(StopIteration):
            find_matches(sources, tokens, rows, cols, match)
        assert left == [device]  # the places alone, once


class Three:
    """A map of three processes, which stays here and sends everything as they would get it."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def n_threads(self) -> int:
        return 3

    def __call__(self, function: Any, items: Any) -> Any:
        work = pickle.dumps(function)
        for item in items:
            self.sent.append(pickle.dumps(item))
            yield pickle.loads(work)(pickle.loads(self.sent[-1]))


@pytest.mark.parametrize("n_sites", [1, 2, 3])
def test_parts_of_the_images_by_other_processes(tmp_path: Path, n_sites: int) -> None:
    """To the bit: 3 parts of one site, 2 of two, 1 of three."""
    pairs, ids, sizes = all_pairs()
    rng = np.random.default_rng(0)
    grids = {
        f"blocks.{k}.out": rng.standard_normal((len(ids), GRID, GRID, 6))
        for k in range(3)
    }
    store = write_store(tmp_path / "a.zarr", grids, ids, sizes, slab=2)
    folder = write_pairs(tmp_path / "SPair-71k", pairs)
    sites = list(grids)[:n_sites]
    seen, expected, three = Tally(), Tally(), Three()
    here = run(store, pairs=folder, sites=sites, progress=expected)
    there = run(store, pairs=folder, sites=sites, progress=seen, map=three)
    assert equal(here, there)
    assert len(three.sent) == {1: 3, 2: 4, 3: 3}[n_sites]
    assert seen.count >= expected.count > 0  # sources are read for each part


@pytest.mark.parametrize("preset", [None, "walmer"])
def test_random_features_are_a_baseline(tmp_path: Path, preset: str | None) -> None:
    """As a store of such tokens scores, at every site of that many channels."""
    dim = 4
    pairs, ids, sizes = all_pairs(seed=0)
    folder = write_pairs(tmp_path / "SPair-71k", pairs)
    noise = [random_features(GRID * GRID, dim, (7, row)) for row in range(len(ids))]
    grids = np.stack([one.reshape(GRID, GRID, dim) for one in noise]).astype(np.float64)
    known = write_store(tmp_path / "n.zarr", {"blocks.0.out": grids}, ids, sizes)
    own = {
        f"blocks.{i}.out": grids * 0 + np.arange(1.0 + i, dim + 1 + i) for i in range(2)
    }
    store = write_store(tmp_path / "a.zarr", own, ids, sizes)
    options = {"pairs": folder, "preset": preset, "seed": 7}
    drawn = run(store, baselines=["random"], **options).filter(baseline="random")
    plain = having(run(known, **options), baseline="")
    assert len(drawn) == 2 * len(plain)
    for _, of_site in groups_of(drawn, "site"):
        for name in ("metric", "value", "low", "high", "n_points"):
            assert np.array_equal(of_site[name], plain[name], equal_nan=name != "metric")
    assert "random" not in unique(run(store, **options), "baseline")
    with pytest.raises(VitseeError, match="no baseline 'uniform'; expected random"):
        run(store, baselines=["uniform"], **options)
