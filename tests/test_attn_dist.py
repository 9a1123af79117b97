"""Attention distance: numbers against hand and loops, and what a user sees."""

from __future__ import annotations

import logging
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.printed_text import flat
from tests.stores import attention_group, write_attention
from tests.tables import equal, groups_of
from vitsee_core.analyses.attn_dist import COLUMNS, METRICS, plot, run
from vitsee_core.attention.heads import uniform_distance
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.tables.results import Table
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import AttentionGroup, TokenLayout

Array = NDArray[Any]
SPAWN = multiprocessing.get_context(
    "spawn"
)  # a fork may hang beside other tests' threads
STORED = ("distance_px", "distance_px_raw", "distance_unit")


def random_values(
    n: int, blocks: int, heads: int, seed: int = 0, folder: str = ""
) -> Any:
    rng = np.random.default_rng(seed)
    shape = (n, blocks, heads)
    return {
        f"attention/{folder}{name}": rng.uniform(0, 40, shape).astype(np.float32)
        for name in STORED
    }


def two_blocks(path: Path, n: int = 10, **kwargs: Any) -> Store:
    values = kwargs.pop("values", None) or random_values(n, 2, 3)
    blocks = ("blocks.0", "blocks.1")
    groups = [attention_group(blocks, (3, 3))]
    defaults: dict[str, Any] = {"n_images": n, "model_blocks": blocks}
    return write_attention(path, groups, values, **defaults | kwargs)


def loop_mean_std(values: list[float]) -> tuple[float, float]:
    kept = [v for v in values if not math.isnan(v)]
    mean = math.fsum(kept) / len(kept)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in kept) / (len(kept) - 1))


def test_by_hand(tmp_path: Path) -> None:
    # one head, three images at 8, 10, 12 px: mean 10, std 2, half = t(2) * 2 / sqrt(3)
    px = np.array([8, 10, 12], np.float32).reshape(3, 1, 1)
    values = {f"attention/{name}": px * k for k, name in enumerate(STORED, 1)}
    groups = [attention_group(["blocks.0"], [1], grid=(1, 2))]
    store = write_attention(tmp_path / "a.zarr", groups, values, n_images=3)
    table = run(store)
    assert tuple(table.written.columns) == COLUMNS
    assert table["metric"].tolist() == list(METRICS)
    # a 1 x 2 grid of 16 px: half of the pairs are 16 px apart, so uniform attention reaches 8 px
    assert table["value"].tolist() == [10, 20, 30, 10 / 8]
    assert table["std"].tolist() == pytest.approx([2, 4, 6, 2 / 8], rel=1e-15)
    half = t_quantile(2) * 2 / math.sqrt(3)
    assert table["low"].tolist() == pytest.approx(
        [10 - half, 20 - 2 * half, 30 - 3 * half, (10 - half) / 8], rel=1e-14
    )
    assert table["high"][0] == pytest.approx(10 + half, rel=1e-14)
    assert table["n_images"].tolist() == [3] * 4
    first = {name: table[name][0] for name in COLUMNS[:8]}
    assert first == {
        "store": "a",
        "model": "tiny",
        "weights": "",
        "site": "blocks.0",
        "block": "blocks.0",
        "depth": 0,
        "rel_depth": 0.0,
        "head": 0,
    }


def test_relative_to_uniform_attention_within_a_window(tmp_path: Path) -> None:
    # 1 x 4 cells of 16 px in windows of two: a query sees itself and one key 16 px away, 8 px on
    # average, where uniform attention over all four cells would reach 20 px
    px = np.full((3, 1, 1), 12, np.float32)
    values = {f"attention/{name}": px for name in STORED}
    layout = TokenLayout((), (1, 4), stride_px=(16.0, 16.0))
    group = AttentionGroup("", ("blocks.0",), (1,), layout, window=(1, 2))
    store = write_attention(tmp_path / "a.zarr", [group], values, n_images=3)
    table = run(store, metrics=["distance_relative"])
    assert table["value"].tolist() == [12 / 8]


def test_against_a_loop(tmp_path: Path) -> None:
    n = 11
    values = random_values(n, 2, 3)
    values["attention/distance_px"][[2, 7], 1, 2] = np.nan  # a head without spatial mass
    for array in values.values():
        array[5] = 1e6  # of an invalid image
    values["attention/distance_px"][:, 0, 0] = np.nan  # a head without any value
    store = two_blocks(
        tmp_path / "a.zarr", n, values=values, valid=[i != 5 for i in range(n)]
    )
    table = run(store, metrics=STORED)
    assert len(table) == 3 * 2 * 3
    for i in range(len(table)):
        row = {name: table[name][i] for name in COLUMNS}
        column = values[f"attention/{row['metric']}"][:, row["depth"], row["head"]]
        if row["metric"] == "distance_px" and (row["depth"], row["head"]) == (0, 0):
            assert (row["n_images"], math.isnan(row["value"])) == (0, True)
            continue
        column = np.delete(column, 5)
        mean, std = loop_mean_std([float(v) for v in column])
        # float64 sums of ten float32 values
        assert row["value"] == pytest.approx(mean, rel=1e-14)
        assert row["std"] == pytest.approx(std, rel=1e-13)
        without_mass = row["metric"] == "distance_px" and (row["depth"], row["head"]) == (
            1,
            2,
        )
        assert row["n_images"] == (8 if without_mass else 10)
    assert table.notes["images"]["a"] == {
        "rows": n,
        "left_out_invalid": 1,
        "chosen": "all",
    }
    plot(table)


@pytest.mark.parametrize("n", [1, 9])
def test_what_has_no_spread(tmp_path: Path, n: int) -> None:
    values = {f"attention/{name}": np.full((n, 2, 3), 0.1, np.float32) for name in STORED}
    table = run(two_blocks(tmp_path / "a.zarr", n, values=values), metrics=STORED)
    assert set(table["value"].tolist()) == {float(np.float32(0.1))}
    for name, expected in (
        ("std", 0),
        ("low", np.float32(0.1)),
        ("high", np.float32(0.1)),
    ):
        wanted = np.full(len(table), np.nan if n == 1 else expected)
        np.testing.assert_array_equal(table[name], wanted)


@pytest.mark.slow
def test_any_jobs_or_map_give_the_same_bits(tmp_path: Path) -> None:
    store = two_blocks(tmp_path / "a.zarr", 23, slab=4)
    expected = run(store)
    assert equal(run(store, jobs=3, memory=1), expected)
    with ProcessPoolExecutor(2, mp_context=SPAWN) as processes:
        assert equal(run(store, map=processes.map), expected)


@pytest.mark.slow
@pytest.mark.parametrize("slab", [1, 3, 23])
def test_slab_size_does_not_matter(tmp_path: Path, slab: int) -> None:
    whole = run(two_blocks(tmp_path / "a.zarr", 23, slab=23))
    cut = run(two_blocks(tmp_path / "b.zarr", 23, slab=slab))
    for name in ("value", "std", "low", "high"):
        # other order of float64 additions
        assert np.allclose(cut[name], whole[name], rtol=1e-13, atol=0)


def test_heads_that_a_block_has_not_are_no_rows(tmp_path: Path) -> None:
    blocks = ("blocks.0", "blocks.1")
    values = random_values(5, 2, 4)
    for array in values.values():
        array[:, 0, 2:] = np.nan
    groups = [attention_group(blocks, (2, 4))]
    store = write_attention(tmp_path / "a.zarr", groups, values, n_images=5)
    table = run(store, metrics=["distance_px"])
    assert list(zip(table["site"].tolist(), table["head"].tolist(), strict=True)) == [
        *[("blocks.0", h) for h in range(2)],
        *[("blocks.1", h) for h in range(4)],
    ]
    assert not np.isnan(table["value"]).any()


@pytest.mark.slow
def test_blocks_with_grids_of_their_own(tmp_path: Path) -> None:
    fine = attention_group(
        ["stages.0.0", "stages.0.1"], [2, 2], grid=(4, 6), stride=(8.0, 8.0)
    )
    coarse = attention_group(["stages.1.1"], [3], grid=(2, 3), prefix="grid_2x3")
    values = random_values(6, 2, 2) | random_values(6, 1, 3, seed=1, folder="grid_2x3/")
    store = write_attention(
        tmp_path / "a.zarr",
        [fine, coarse],
        values,
        n_images=6,
        # stages.1.0 is a convolution: it has an output and no heads
        model_blocks=("stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"),
    )
    table = run(store)
    places = {
        s: (int(r["depth"][0]), float(r["rel_depth"][0]))
        for s, r in groups_of(table, "site")
    }
    assert places == {
        "stages.0.0": (0, 0.0),
        "stages.0.1": (1, 1 / 3),
        "stages.1.1": (3, 1.0),
    }
    last = table.filter(site="stages.1.1", metric="distance_px")
    expected = values["attention/grid_2x3/distance_px"][:, 0].astype(float).mean(0)
    assert np.allclose(last["value"], expected, rtol=1e-14, atol=0)
    relative = table.filter(metric="distance_relative")["value"]
    ratio = table.filter(metric="distance_px")["value"] / relative
    assert ratio[:4] == pytest.approx([uniform_distance(fine.layout)] * 4)
    assert ratio[4:] == pytest.approx([uniform_distance(coarse.layout)] * 3)
    plot(table)


# ---------------------------------------------------------------- relative to uniform attention


def test_a_uniform_head_is_at_one(tmp_path: Path) -> None:
    blocks = attention_group(["blocks.0"], [1], grid=(3, 5), stride=(8.0, 16.0))
    uniform = uniform_distance(blocks.layout)
    values = {
        f"attention/{name}": np.full((4, 1, 1), uniform, np.float32) for name in STORED
    }
    store = write_attention(tmp_path / "a.zarr", [blocks], values, n_images=4)
    # the store holds float32
    assert run(store, metrics=["distance_relative"])["value"][0] == pytest.approx(
        1.0, rel=1e-7
    )


def test_one_cell_has_no_relative_distance(tmp_path: Path) -> None:
    values = {f"attention/{name}": np.zeros((4, 1, 1), np.float32) for name in STORED}
    groups = [attention_group(["blocks.0"], [1], grid=(1, 1))]
    store = write_attention(tmp_path / "a.zarr", groups, values, n_images=4)
    table = run(store)
    assert table.filter(metric="distance_px")["value"].tolist() == [0.0]
    assert np.isnan(table.filter(metric="distance_relative")["value"]).all()
    plot(table)


# ---------------------------------------------------------------- which images


def test_the_first_rows_of_a_shuffled_store(tmp_path: Path) -> None:
    values = random_values(10, 2, 3)
    store = two_blocks(tmp_path / "a.zarr", values=values)
    table = run(store, images=6, seed=5, metrics=["distance_px"])
    expected = values["attention/distance_px"][:6].astype(float).mean(0).ravel()
    assert np.allclose(table["value"], expected, rtol=1e-14, atol=0)
    assert set(table["n_images"].tolist()) == {6}
    assert table.notes["images"]["a"]["chosen"] == "the first 6"


def test_a_seeded_sample_of_an_ordered_store(tmp_path: Path) -> None:
    values = {f"attention/{name}": np.empty((40, 2, 3), np.float32) for name in STORED}
    for array in values.values():
        array[...] = np.arange(40)[:, None, None]
    store = two_blocks(tmp_path / "a.zarr", 40, values=values, order="dataset")
    once = run(store, images=10, seed=1)
    assert equal(once, run(store, images=10, seed=1, jobs=2))
    assert not equal(once, run(store, images=10, seed=2))
    assert once["value"][0] != np.arange(10).mean()
    assert set(once["n_images"].tolist()) == {10}
    assert once.notes["images"]["a"]["chosen"] == "10 drawn with seed 1"


def test_only_committed_slabs_of_an_unfinished_store(tmp_path: Path) -> None:
    values = random_values(10, 2, 3)
    store = two_blocks(tmp_path / "a.zarr", values=values, slabs=[0, 2])
    rows = [0, 1, 2, 3, 8, 9]
    table = run(store, metrics=["distance_px"])
    expected = values["attention/distance_px"][rows].astype(float).mean(0).ravel()
    assert np.allclose(table["value"], expected, rtol=1e-14, atol=0)
    assert set(table["n_images"].tolist()) == {6}


# ---------------------------------------------------------------- refusals


def test_blocks_without_attention_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left_out = {
        f"layers.0.blocks.{i} attention": "attention within windows (4)" for i in (0, 1)
    }
    store = two_blocks(tmp_path / "swin.zarr", left_out=left_out)
    with caplog.at_level(logging.INFO, "vitsee_core"):
        run(store)
    blocks = "layers.0.blocks.0, layers.0.blocks.1"
    assert (
        f"swin lacks the attention of {blocks}: attention within windows (4)"
        in caplog.text
    )


def test_refusals(tmp_path: Path) -> None:
    reason = {"attention": "resnet18 has no token-to-token attention"}
    bare = write_attention(tmp_path / "r18.zarr", [], {}, n_images=3, left_out=reason)
    none = write_attention(tmp_path / "none.zarr", [], {}, n_images=3)
    store = two_blocks(tmp_path / "a.zarr")
    cases: list[tuple[Store, dict[str, Any], str]] = [
        (bare, {}, r"^r18 .*summaries: resnet18 has no token"),
        (none, {}, "--attention summary"),
        (store, {"metrics": ["distance"]}, r"no metric 'distance'; .*distance_px"),
        (store, {"sites": ["blocks.9"]}, r"no site matches 'blocks\.9'"),
        (two_blocks(tmp_path / "b.zarr", 3, valid=[0, 0, 0]), {}, "no readable image"),
    ]
    for one, choice, line in cases:
        with pytest.raises(VitseeError, match=line):
            run(one, **choice)


# ---------------------------------------------------------------- figure


def made_table(label: str, blocks: int, heads: int, metrics: Any = METRICS) -> Table:
    rng = np.random.default_rng(blocks)
    rows = []
    for metric in metrics:
        for block, head in np.ndindex(blocks, heads):
            value = rng.uniform(0.2, 1) * (1 if metric == "distance_relative" else 16.5)
            place = {
                "depth": block,
                "rel_depth": block / max(blocks - 1, 1),
                "head": head,
            }
            spread = {"value": value, "std": 0.1, "low": value - 0.1, "high": value + 0.1}
            about = {
                "store": label,
                "model": "m",
                "site": f"blocks.{block}",
                "metric": metric,
            }
            rows.append(about | place | spread | {"n_images": 50})
    return Table.from_rows(rows, COLUMNS)


@pytest.mark.slow
def test_panels() -> None:
    alone = plot(made_table("a", 6, 4))
    assert len(alone.axes) == 2
    assert flat(alone.axes[0].get_ylabel()) == "attention distance (px)"
    labels = [line.get_label() for line in alone.axes[0].lines]
    assert labels[:4] == [
        "first block",
        "second block",
        "last block but one",
        "last block",
    ]
    heights = np.asarray(alone.axes[0].lines[0].get_ydata())
    assert (np.diff(heights) >= 0).all()
    figure = plot(Table.concat([made_table(f"s{i}", 6, 4) for i in range(3)]))
    assert sum(axes.get_visible() for axes in figure.axes) == 2 * 3 + 1


def test_the_layer_line_is_the_mean_over_heads() -> None:
    table = made_table("a", 3, 4).filter(metric="distance_px")
    line = next(
        x for x in plot(table).axes[1].lines if x.get_label() == "mean of a block's heads"
    )
    expected = table["value"].reshape(3, 4).mean(1)
    assert np.asarray(line.get_ydata()) == pytest.approx(expected)


@pytest.mark.slow
def test_uniform_attention_is_drawn_where_the_table_tells_it(tmp_path: Path) -> None:
    groups = [
        attention_group(["blocks.0", "blocks.1"], [2, 2], grid=(3, 5), stride=(8.0, 16.0))
    ]
    store = write_attention(
        tmp_path / "a.zarr", groups, random_values(5, 2, 2), n_images=5
    )
    table = run(store)

    def dashed(figure: Any) -> list[float]:
        lines = [x for x in figure.axes[0].lines if x.get_label() == "uniform"]
        return [float(np.asarray(line.get_ydata())[0]) for line in lines]

    assert dashed(plot(table)) == pytest.approx([uniform_distance(groups[0].layout)])
    assert dashed(plot(table.filter(metric="distance_relative"))) == [1.0]
    assert dashed(plot(table.filter(metric="distance_px"))) == []
    assert dashed(plot(table.filter(metric="distance_unit"))) == []


@pytest.mark.parametrize(
    ("blocks", "heads"), [(1, 1), pytest.param(32, 16, marks=pytest.mark.slow)]
)
def test_sizes_of_models(blocks: int, heads: int) -> None:
    plot(Table.concat([made_table("a", blocks, heads), made_table("b", 4, 3)]))
