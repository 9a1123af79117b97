"""Analyses of time on stores of clips: against loops over every pair of tokens, and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.stores import write_attention, write_sites
from vitsee_core.analyses import attn_dist, head_types, spatial
from vitsee_core.analyses.head_types.head_geometry import (
    Thresholds,
    classify_time,
    measure_time,
)
from vitsee_core.analyses.spatial.structure import IN_TIME
from vitsee_core.attention.heads import (
    StoredAttention,
    attention_blocks,
    keys_seen,
    uniform_in_time,
)
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput
from vitsee_stores.layout import AttentionGroup, TokenLayout
from vitsee_stores.plan import Clip

Array = NDArray[Any]
TIMES, ROWS, COLS = 4, 2, 3
CELLS = [(t, r, c) for t in range(TIMES) for r in range(ROWS) for c in range(COLS)]
LAYOUT = TokenLayout(
    (), (ROWS, COLS), stride_px=(16.0, 8.0), frames=TIMES, stride_frames=2.0
)
WINDOWS = {
    "joint": None,
    "within": (1, ROWS, COLS),
    "over": (TIMES, 1, 1),
    "halves": (2, 2, 2),
}
Cell = tuple[int, int, int]  # time, row, column
See = Callable[[Cell, Cell], bool]


def attention_of(see: See) -> Array:
    """(tokens, tokens): each query attends evenly to the keys that it sees, a loop."""
    a = np.array([[float(see(q, k)) for k in CELLS] for q in CELLS])
    return a / a.sum(1, keepdims=True)


def same_window(window: tuple[int, int, int] | None) -> See:
    sides = window or (TIMES, ROWS, COLS)
    return lambda q, k: all(i // n == j // n for i, j, n in zip(q, k, sides, strict=True))


def summaries(a: Array) -> dict[str, Any]:
    """The summaries that extract keeps of one head's attention, by loops over queries and keys."""
    pairs = [(i, q, j, k) for i, q in enumerate(CELLS) for j, k in enumerate(CELLS)]
    n = len(CELLS)
    px = sum(
        a[i, j] * math.hypot(16 * (k[1] - q[1]), 8 * (k[2] - q[2]))
        for i, q, j, k in pairs
    )
    found: dict[str, Any] = {
        "distance_px": px / n,
        "distance_px_raw": px / n,
        "distance_frames": sum(a[i, j] * 2 * abs(k[0] - q[0]) for i, q, j, k in pairs)
        / n,
        "frame_mass": sum(a[i, j] for i, q, j, k in pairs if k[0] == q[0]) / n,
        "entropy": -sum(x * math.log(x) for x in a.ravel() if x > 0) / n,
        "aligned": np.zeros((2 * ROWS - 1, 2 * COLS - 1)),
        "aligned_frames": np.zeros(2 * TIMES - 1),
    }
    for i, q, j, k in pairs:
        found["aligned"][k[1] - q[1] + ROWS - 1, k[2] - q[2] + COLS - 1] += a[i, j] / n
        found["aligned_frames"][k[0] - q[0] + TIMES - 1] += a[i, j] / n
    return found


def store_of(
    path: Path,
    heads: dict[str, list[Array]],
    *,
    n: int = 4,
    seconds: list[float] | None = None,
    slab: int = 1,
    layout: TokenLayout = LAYOUT,
) -> Store:
    """A store of n equal clips. heads: name of `WINDOWS` -> the heads' attention, a block each."""
    groups, values = [], {}
    for i, (name, own) in enumerate(heads.items()):
        prefix = "" if i == 0 else name
        window = None if layout.frames is None else WINDOWS[name]
        group = AttentionGroup(prefix, (f"blocks.{i}",), (len(own),), layout, window)
        groups.append(group)
        found = [summaries(a) for a in own]
        for what in found[0]:
            of_heads = np.stack([one[what] for one in found])
            values[group.folder + what] = np.broadcast_to(
                of_heads, (n, 1, *of_heads.shape)
            )
        for what in ("prefix_mass", "query_std", "distance_unit"):
            values[group.folder + what] = np.zeros((n, 1, len(own)))
        values[f"{group.folder}head_std"] = np.zeros((n, 1))
    values = {
        path: np.array(x, np.float32) for path, x in values.items()
        if layout.frames or not path.endswith(("_frames", "frame_mass"))
    }  # fmt: skip
    if layout.frames:
        values["seconds"] = np.array(seconds or [math.nan] * n, np.float32)
    blocks = [block for group in groups for block in group.blocks]
    clip = None if layout.frames is None else Clip(TIMES * 2)
    return write_attention(
        path, groups, values, n_images=n, slab=slab, model_blocks=blocks, clip=clip
    )


def rows_of(table: Any, **where: Any) -> list[dict[str, Any]]:
    return list(table.frame.filter(**where).iter_rows(named=True))


@pytest.mark.parametrize("name", WINDOWS)
def test_uniform_attention_within_each_window_is_at_its_baseline(
    tmp_path: Path, name: str
) -> None:
    a = attention_of(same_window(WINDOWS[name]))
    store = store_of(tmp_path / "a.zarr", {name: [a]})
    (block,) = attention_blocks(store)
    assert keys_seen(block) == pytest.approx(np.mean([(row > 0).sum() for row in a]))
    table = attn_dist.run(store)
    metrics = ["distance_px", "distance_frames", "frame_mass"]
    metrics += ["distance_relative"] if name != "over" else []
    for metric in metrics:
        (row,) = rows_of(table, metric=metric)
        assert row["value"] == pytest.approx(row["uniform"], rel=1e-6), metric
    frames = {"joint": 2 * 15 / 12, "within": 0, "over": 2 * 15 / 12, "halves": 2 * 3 / 6}
    share = {"joint": 1 / 4, "within": 1, "over": 1 / 4, "halves": 1 / 2}
    assert uniform_in_time(block) == pytest.approx((frames[name], share[name]))
    texts = {
        "joint": None,
        "within": "1 x 2 x 3",
        "over": "4 x 1 x 1",
        "halves": "2 x 2 x 2",
    }
    assert block.window_text == texts[name]
    assert ("window" in table.frame.columns) == (name != "joint")
    attn_dist.plot(table)


def test_a_moving_square_by_hand(tmp_path: Path) -> None:
    """A square moves one column a time. Head 0 attends to where the square was a time before (the
    first time to itself): 2 frames and 8 px for 3 of 4 times. Head 1 attends to its own place in
    all four times: 2.5 frames, 0 px, a quarter within its frame. Two clips are sampled every 0.1 s
    and one every 0.2 s, of the fourth nothing is known."""

    def before(q: Cell, k: Cell) -> bool:
        return k == ((0, *q[1:]) if q[0] == 0 else (q[0] - 1, q[1], (q[2] - 1) % 3))

    heads = [attention_of(before), attention_of(lambda q, k: k[1:] == q[1:])]
    seconds = [0.1, 0.1, 0.2, math.nan]
    table = attn_dist.run(
        store_of(tmp_path / "a.zarr", {"joint": heads}, seconds=seconds)
    )
    # Of three columns 0 is left of 1 by 8 px; from 0 the square came in from 2, 16 px away.
    mean_px = 3 / 4 * (8 + 8 + 16) / 3
    wanted = {
        "distance_px": [mean_px, 0],
        "distance_frames": [1.5, 2.5],
        "distance_seconds": [1.5 * 0.4 / 3, 2.5 * 0.4 / 3],
        "frame_mass": [1 / 4, 1 / 4],
    }
    for metric, values in wanted.items():
        rows = rows_of(table, metric=metric)
        assert [row["value"] for row in rows] == pytest.approx(values, rel=1e-6), metric
        assert {row["n_images"] for row in rows} == {3 if "seconds" in metric else 4}
    (uniform,) = {row["uniform"] for row in rows_of(table, metric="distance_seconds")}
    assert uniform == pytest.approx(2.5 * 0.4 / 3, rel=1e-6)
    answers = [text for _, text in attn_dist.headline(table)]
    assert any(
        "own frame: blocks.0 0.250 (spread evenly: 0.250)" in text for text in answers
    )


def test_stores_of_images_have_no_columns_of_time(tmp_path: Path) -> None:
    from dataclasses import replace

    image = replace(LAYOUT, frames=None, stride_frames=None)
    a = np.full((6, 6), 1 / 6)
    pairs = {"attention/distance_px": np.full((4, 1, 1), float(a.sum()), np.float32)}
    group = AttentionGroup("", ("blocks.0",), (1,), image)
    store = write_attention(tmp_path / "image.zarr", [group], pairs, n_images=4)
    table = attn_dist.run(store)
    assert tuple(table.frame.columns) == attn_dist.COLUMNS
    assert "uniform" not in table.notes
    assert not {*attn_dist.IN_TIME} & {*table["metric"]}
    with pytest.raises(
        MissingInput, match="image holds images, which have no frame_mass; expec"
    ):
        attn_dist.run(store, metrics=["frame_mass"])
    clips = store_of(tmp_path / "clips.zarr", {"joint": [attention_of(lambda *_: True)]})
    both = attn_dist.run(store, clips)
    assert {row["uniform"] for row in rows_of(both, store="image")} == {None}
    attn_dist.plot(both)
    with pytest.raises(
        MissingInput, match="do not say their frame rate; expected distance_frames"
    ):
        attn_dist.run(clips, metrics=["distance_seconds"])
    attn_dist.plot(attn_dist.run(clips, metrics=["frame_mass"]))


# ---------------------------------------------------------------- slowness


def moving(
    n: int, times: int, rows: int, cols: int, dim: int = 5, seed: int = 0
) -> Array:
    """Tokens that stay much the same from time to time, some of length 0."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 1, rows, cols, dim)) + 0.5 * rng.normal(
        size=(n, times, rows, cols, dim)
    )
    x[0, 1, 0, 0] = 0
    return np.asarray(x + 0.3, np.float32).astype(np.float64)


def written(path: Path, x: Array, **more: Any) -> Store:
    """A store of one site with these tokens, (clips, times, rows, cols, dim)."""
    n, times, rows, cols, dim = x.shape
    layout = TokenLayout(
        (), (rows, cols), stride_px=(8.0, 8.0), frames=times, stride_frames=1.0
    )
    flat = x.reshape(n, -1, dim)
    return write_sites(
        path, {"blocks.0.out": flat}, layout=layout, clip=Clip(times), **more
    )


def cosine(a: Array, b: Array) -> float | None:
    length = math.sqrt(a @ a) * math.sqrt(b @ b)
    return float(a @ b) / length if length else None


def loop_in_time(x: Array) -> dict[str, float]:
    """Means over clips of means over pairs, by loops over all pairs of tokens."""
    n, times, rows, cols, _ = x.shape
    places = [(r, c) for r in range(rows) for c in range(cols)]
    found: dict[str, list[float]] = {
        "next_cos": [],
        "next_other_cos": [],
        "any_frame_cos": [],
    }
    others = []
    for i in range(n):
        own: dict[str, list[float | None]] = {name: [] for name in found}
        for t in range(times):
            for p in places:
                for s in range(times):
                    if s != t:
                        own["any_frame_cos"].append(cosine(x[i, t][p], x[i, s][p]))
                for q in places if t + 1 < times else []:
                    name = "next_cos" if p == q else "next_other_cos"
                    own[name].append(cosine(x[i, t][p], x[i, t + 1][q]))
                for j in range(n) if t + 1 < times else []:
                    others.append(cosine(x[i, t][p], x[j, t + 1][p]) if j != i else None)
        for name, values in own.items():
            found[name].append(float(np.mean([v for v in values if v is not None])))
    means = {name: float(np.mean(values)) for name, values in found.items()}
    means["slowness"] = means["next_cos"] - means["next_other_cos"]
    means["other_clip_cos"] = float(np.mean([v for v in others if v is not None]))
    return means


def test_slowness_against_loops_over_all_pairs(tmp_path: Path) -> None:
    x = moving(5, 3, 2, 2)
    store = written(tmp_path / "a.zarr", x, slab=2)
    table = spatial.run(store)
    for metric, value in loop_in_time(x).items():
        (row,) = rows_of(table, metric=metric)
        assert row["value"] == pytest.approx(value, abs=1e-12), metric
        assert row["n_images"] == 5
        assert row["low"] < row["value"] < row["high"]
    (row,) = rows_of(table, metric="next_cos")
    assert row["null"] == rows_of(table, metric="any_frame_cos")[0]["value"]
    # Structure in space is that of the frames, as of images.
    image = written(tmp_path / "one.zarr", x[:, :1])
    frames = [
        spatial.run(written(tmp_path / f"{t}.zarr", x[:, t : t + 1])) for t in range(3)
    ]
    for metric in ("rmsc", "mean_cos"):
        each = [rows_of(of, metric=metric)[0]["value"] for of in frames]
        (whole,) = rows_of(table, metric=metric)
        assert whole["value"] == pytest.approx(np.mean(each), abs=1e-12)
    (none,) = rows_of(spatial.run(image), metric="slowness")
    assert none["value"] is None and none["n_images"] == 0
    answers = [text for _, text in spatial.headline(table)]
    assert any("with itself in the next frame" in text for text in answers)
    spatial.plot(table)


def test_a_square_that_moves_by_hand(tmp_path: Path) -> None:
    """One row of four places; a square e1 on a ground e2 steps to the right at each of three times.
    Of four places two are what they were before, two are not: next_cos = 1/2. Of the 12 pairs of
    other places the square's token meets three places, one of them the square: the sums of cosines
    are 10 of all 16 pairs (3 x 3 of the ground, 1 of the square) less 2 = 8 of 12."""
    x = np.zeros((2, 3, 1, 4, 2))
    x[..., 1] = 1
    for t in range(3):
        x[:, t, 0, t] = (1, 0)
    table = spatial.run(written(tmp_path / "a.zarr", x, slab=1))
    value = {row["metric"]: row["value"] for row in table.frame.iter_rows(named=True)}
    assert value["next_cos"] == pytest.approx(1 / 2)
    assert value["next_other_cos"] == pytest.approx(8 / 12)
    assert value["slowness"] == pytest.approx(-1 / 6)
    # Places 0, 1 and 2 are alike in 1 of 3 pairs of times, place 3 in all.
    assert value["any_frame_cos"] == pytest.approx((3 * 1 / 3 + 1) / 4)
    assert value["other_clip_cos"] == pytest.approx(1 / 2)  # both clips are the same


def test_frames_in_random_order_have_no_next_frame(tmp_path: Path) -> None:
    """Over all orders of the frames the mean of next_cos is any_frame_cos."""
    from itertools import permutations

    x = moving(1, 3, 2, 2, seed=3)
    orders = np.concatenate([x[:, list(order)] for order in permutations(range(3))])
    table = spatial.run(written(tmp_path / "a.zarr", orders))
    (row,) = rows_of(table, metric="next_cos")
    # The token of length 0 takes two pairs out of orders in which it is in the middle.
    assert row["value"] == pytest.approx(row["null"], abs=0.02)


def test_images_have_no_slowness(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(4, 4, 3))
    layout = TokenLayout((), (2, 2), stride_px=(8.0, 8.0))
    store = write_sites(tmp_path / "image.zarr", {"blocks.0.out": x}, layout=layout)
    assert not {*IN_TIME} & {*spatial.run(store)["metric"]}
    with pytest.raises(
        MissingInput, match="image holds images, which have no slowness; expected"
    ):
        spatial.run(store, metrics=["slowness"])


# ---------------------------------------------------------------- head types


def offset(dt: int, dy: int = 0, dx: int = 0, *, place: bool = True) -> See:
    """Queries attend to the cell so many times and places away (`place` false: to all places of
    that time), or where there is none to themselves."""

    def see(q: tuple[int, int, int], k: tuple[int, int, int]) -> bool:
        at = (q[0] + dt, q[1] + dy, q[2] + dx)
        if place:
            return k == (at if at in CELLS else q)
        return k[0] == (at[0] if 0 <= at[0] < TIMES else q[0])

    return see


TEMPORAL: dict[str, tuple[See, str, str]] = {
    "before": (offset(-1), "previous frame", "strict local"),
    "after, all places": (offset(1, place=False), "next frame", "global"),
    "two before": (
        offset(-2),
        "all frames",
        "strict local",
    ),  # half have no such key
    "itself": (lambda q, k: q == k, "same frame", "strict local"),
    "own frame": (lambda q, k: q[0] == k[0], "same frame", "global"),
    "place elsewhere": (
        lambda q, k: q[1:] == k[1:] and q[0] != k[0],
        "same place",
        "strict local",
    ),
    "near": (lambda q, k: abs(q[0] - k[0]) <= 1, "near frames", "global"),
    "everything": (lambda q, k: True, "all frames", "global"),
}


def test_heads_of_known_type_in_time(tmp_path: Path) -> None:
    heads = [attention_of(see) for see, _, _ in TEMPORAL.values()]
    table = head_types.run(
        store_of(tmp_path / "a.zarr", {"joint": heads}, n=12), radius=1
    )
    assert tuple(table.written.columns) == head_types.CLIP_COLUMNS
    for head, (name, (_, time, kind)) in enumerate(TEMPORAL.items()):
        rows = {row["metric"]: row for row in rows_of(table, head=head)}
        assert (rows["self_mass"]["time"], rows["self_mass"]["type"]) == (time, kind), (
            name
        )
        a = heads[head]
        # By loops over queries and keys.
        pairs = [
            (a[i, j], q, k) for i, q in enumerate(CELLS) for j, k in enumerate(CELLS)
        ]
        elsewhere = sum(x for x, q, k in pairs if q[1:] == k[1:] and q[0] != k[0]) / len(
            CELLS
        )
        near = sum(x for x, q, k in pairs if abs(k[0] - q[0]) <= 1) / len(CELLS)
        assert rows["near_frames_mass"]["value"] == pytest.approx(near, abs=1e-6)
        assert rows["place_elsewhere"]["value"] <= elsewhere + 1e-6  # a bound
        assert rows["same_time_slabs"]["value"] == 1
    shares = rows_of(table, metric="aligned_frames", time="previous frame")
    assert [row["frame"] for row in shares] == [-3, -2, -1, 0, 1, 2, 3]
    values = [row["value"] for row in shares]
    assert values == pytest.approx([0, 0, 3 / 4, 1 / 4, 0, 0, 0], abs=1e-6)
    answers = [text for _, text in head_types.headline(table)]
    assert any("3 of 8 heads are temporal" in text for text in answers)
    head_types.plot(table)


def test_an_offset_that_most_queries_have_is_one() -> None:
    """Six of eight times have another one two before them, so the head sends 6/8 of its attention
    there, and uniform attention 6/64."""
    layout = TokenLayout((), (2, 3), stride_px=(16.0, 8.0), frames=8, stride_frames=2.0)
    block = StoredAttention("blocks.0", 0, 0.0, layout, "", 0, 1)
    shares = np.zeros(15)
    shares[[5, 7]] = 6 / 8, 2 / 8
    scores = measure_time(shares, 1.0, block)
    assert scores.values["offset_frames"] == -4
    assert scores.over["offset"] == pytest.approx((6 / 8 - 6 / 64) / (1 - 6 / 64))
    assert scores.values["place_elsewhere"] == 6 / 8
    # At the same place in other frames uniform attention has 7/8 of a sixth.
    assert scores.over["place"] == pytest.approx((6 / 8 - 7 / 48) / (1 - 7 / 48))
    assert classify_time(scores, Thresholds(), block) == "frame offset"
    nothing = measure_time(np.full(15, np.nan), math.nan, block)
    assert classify_time(nothing, Thresholds(), block) == "undefined"


@pytest.mark.parametrize(("name", "type_", "time"), [("within", "global", "same frame"),
                         ("over", "strict local", "all frames")])  # fmt: skip
def test_what_a_window_decides_is_said_so(
    tmp_path: Path, name: str, type_: str, time: str
) -> None:
    """Within a frame all heads are of the same frame, over time at a place all are strict local."""
    store = store_of(
        tmp_path / "a.zarr", {name: [attention_of(same_window(WINDOWS[name]))]}
    )
    (row,) = rows_of(head_types.run(store, radius=1), metric="self_mass")
    assert (row["type"], row["time"], row["window"]) == (
        *(type_, time), " x ".join(map(str, WINDOWS[name] or ()))
    )  # fmt: skip


def test_over_time_at_a_place_a_head_may_look_away_from_itself(tmp_path: Path) -> None:
    others = attention_of(lambda q, k: q[1:] == k[1:] and q[0] != k[0])
    table = head_types.run(store_of(tmp_path / "a.zarr", {"over": [others]}))
    (row,) = rows_of(table, metric="place_elsewhere")
    assert (row["time"], row["value"]) == ("same place", pytest.approx(1))
