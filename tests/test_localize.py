"""Localisation: maps against double loops and by hand, however they are made; what a user sees."""

from __future__ import annotations

import io
import logging
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from matplotlib.text import Text
from numpy.typing import NDArray
from PIL import Image

from tests.extractions import VIT, extracted, plant_images
from tests.manifests import edited
from tests.printed_text import flat
from tests.reference_cka import loop_cka
from tests.stores import Site, write_sites
from tests.tables import check_chosen_metrics, groups_of, having, unique
from vitsee_cli.main import main
from vitsee_core.analyses import localize
from vitsee_core.analyses.localize import (
    COLUMNS,
    SITE_COLUMNS,
    location_maps,
    plot,
    run,
    site_maps,
)
from vitsee_core.analyses.localize.localisation import OWN_METRICS, own_patch
from vitsee_core.analyses.localize.site_maps import SiteMaps
from vitsee_core.features import choose_features
from vitsee_core.runtime import lanes as cost
from vitsee_core.similarity import Estimator, GramOptions, Hsic, Representation, hsic
from vitsee_core.similarity import on_the_fly as engine
from vitsee_core.similarity.estimators import BLOCKS
from vitsee_core.similarity.on_the_fly import hsic_on_the_fly
from vitsee_core.similarity.stacks import PatchPixels, TokenStack
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.tables.results import Table
from vitsee_stores import Store, open_store
from vitsee_stores.errors import MissingInput, VitseeError
from vitsee_stores.layout import TokenLayout

Array = NDArray[Any]
Float = NDArray[np.float64]

LAYOUT = TokenLayout(("cls",), (2, 3), stride_px=(4.0, 4.0))
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
N = 30


# Stores


def pictures(
    n: int, height: int = 8, width: int = 12, seed: int = 0
) -> NDArray[np.uint8]:
    """(n, 3, height, width)"""
    return np.random.default_rng(seed).integers(0, 256, (n, 3, height, width), np.uint8)


def normalised(pixels: Array) -> Float:
    mean, std = (np.array(x).reshape(1, 3, 1, 1) for x in (MEAN, STD))
    return np.asarray((pixels / 255.0 - mean) / std)


def tokens_of(
    pixels: Array, dim: int = 5, seed: int = 1, layout: TokenLayout = LAYOUT
) -> Float:
    """(n, tokens, dim): noise, and something of the whole image."""
    rng = np.random.default_rng(seed)
    flat = normalised(pixels).reshape(len(pixels), -1)
    mixed = flat @ rng.normal(size=(flat.shape[1], layout.n_tokens * dim)) / 10
    return (mixed + rng.normal(size=mixed.shape)).reshape(
        len(pixels), layout.n_tokens, dim
    )


def write(
    path: Path,
    sites: Mapping[str, tuple[Array, TokenLayout]],
    pixels: Array | None,
    **more: Any,
) -> Store:
    n = len(next(iter(sites.values()))[0])
    transform = {"mean": MEAN, "std": STD}
    whole: dict[str, Site] = {**sites, "pooled": np.zeros((n, 3))}
    return write_sites(path, whole, pixels=pixels, transform=transform, **more)


PIXELS = pictures(N)
ACTS = tokens_of(PIXELS)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return write(tmp_path / "a.zarr", {"blocks.0.out": (ACTS, LAYOUT)}, PIXELS)


# The oracle: float64 loops over images, tokens and patches


def cell_pixels(pixels: Array, grid: tuple[int, int], step: int) -> list[Array]:
    """Each cell's pixels, (n, features), row by row."""
    x = normalised(pixels)
    return [
        x[:, :, r * step : (r + 1) * step, c * step : (c + 1) * step].reshape(len(x), -1)
        for r in range(grid[0])
        for c in range(grid[1])
    ]


def loop_maps(acts: Array, pixels: Array, grid: tuple[int, int], step: int) -> Float:
    """(tokens, patches) of the grid's tokens."""
    patches = cell_pixels(pixels, grid, step)
    first = acts.shape[1] - len(patches)
    return np.array(
        [[loop_cka(acts[:, first + t], p) for p in patches] for t in range(len(patches))]
    )


def maps_of(table: Table, name: str = "value") -> Float:
    """(tokens, patches) in the table's order."""
    return np.asarray(table[name].reshape(len(unique(table, "token")), -1))


# Values


def test_by_hand(tmp_path: Path) -> None:
    # four images, one pixel a patch. Token 0,0 is 0 1 0 1; patch 0,0 is 1 0 0 1 and patch 0,1 is
    # as the token. <K~,L~> = 0, r.r = 1, s s = 4: HSIC_1 = (0 - 2/2 + 4/6) / 4 = -1/12; of each
    # with itself (2 - 2 + 4/6) / 4 = 1/6. CKA = -1/2, and 1 with its equal.
    x, y = [0, 1, 0, 1], [1, 0, 0, 1]
    pixels = np.zeros((4, 3, 1, 2), np.uint8)
    pixels[:, :, 0, 0] = np.array(y)[:, None] * 200
    pixels[:, :, 0, 1] = np.array(x)[:, None] * 100
    layout = TokenLayout((), (1, 2), stride_px=(1.0, 1.0))
    acts = np.array([x, y], np.float64).T[..., np.newaxis]
    table = run(write(tmp_path / "a.zarr", {"blocks.0.out": (acts, layout)}, pixels))
    assert tuple(table.written.columns) == COLUMNS
    assert table["token"].tolist() == ["0,0", "0,0", "0,1", "0,1"]
    assert table["row"].tolist() == [0] * 4 and table["col"].tolist() == [0, 1, 0, 1]
    assert table["value"] == pytest.approx([-0.5, 1, 1, -0.5], rel=1e-6)
    assert set(table["spread"]) == {""}  # of four images none can be left out
    # both tokens are most similar to the other's patch: margin -1.5, rank 2 of 2, 1 px away
    table = run(open_store(tmp_path / "a.zarr"), summary="site")
    values = dict(
        zip(table["metric"].tolist()[:-1], table["value"].tolist()[:-1], strict=True)
    )
    assert values == pytest.approx(
        {
            "own_top1": 0,
            "own_cka": -0.5,
            "own_rank": 2,
            "own_rank_relative": 1,
            "own_margin": -1.5,
        }
        | {"peak_distance_px": 1}
    )
    assert table["value"][-1] == 0.5 and table["baseline"].tolist() == [""] * 6 + [
        "chance"
    ]


def test_every_token_and_patch_is_the_double_loop(store: Store) -> None:
    table = run(store)
    assert maps_of(table) == pytest.approx(loop_maps(ACTS, PIXELS, (2, 3), 4), abs=1e-6)
    assert table["n_images"].tolist() == [N] * 36
    assert table["token"].tolist()[::6] == ["0,0", "0,1", "0,2", "1,0", "1,1", "1,2"]
    assert table["row"].tolist()[:6] == [0, 0, 0, 1, 1, 1]


def test_chosen_tokens_and_the_class_token(tmp_path: Path, store: Store) -> None:
    everything = maps_of(run(store))
    table = run(store, tokens=["1,2", "0,1", "1,2", "cls"])
    assert unique(table, "token") == ["cls", "1,2", "0,1"]
    assert maps_of(table)[1:] == pytest.approx(everything[[5, 1]], abs=1e-6)
    expected = [loop_cka(ACTS[:, 0], p) for p in cell_pixels(PIXELS, (2, 3), 4)]
    assert maps_of(table)[0] == pytest.approx(expected, abs=1e-6)
    # which pooled vectors have, too
    pooled = write(
        tmp_path / "p.zarr", {"blocks.0.out": (ACTS, LAYOUT)}, PIXELS, tokens="pooled"
    )
    found = run(pooled, tokens=["cls"])["value"]
    assert found == pytest.approx(maps_of(table)[0], abs=1e-6)
    with pytest.raises(
        MissingInput, match=r"pooled only: extract it with --tokens blocks"
    ):
        run(pooled)


def test_tokens_that_copy_their_patch(tmp_path: Path) -> None:
    patches = cell_pixels(PIXELS, (2, 3), 4)
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(48, 48)))[0]
    copies = np.stack([5 * p @ turn + 3 for p in patches], 1)
    store = write(
        tmp_path / "a.zarr",
        {"blocks.0.out": (np.concatenate([copies[:, :1], copies], 1), LAYOUT)},
        PIXELS,
    )
    table = run(store, summary="token")
    by_metric = {name: rows["value"] for name, rows in groups_of(table, "metric")}
    assert by_metric["own_cka"] == pytest.approx(np.ones(6), abs=1e-5)
    assert by_metric["own_rank"].tolist() == [1] * 6
    assert (
        by_metric["own_rank_relative"].tolist() == by_metric["peak_distance_px"].tolist()
    )
    assert by_metric["own_margin"].min() > 0.5
    table = run(store, summary="site")
    assert table.filter(metric="own_top1")["value"].tolist() == [1, pytest.approx(1 / 6)]
    assert table["n_tokens"].tolist() == [6] * 7


@pytest.mark.parametrize("summary", ["site", "token"])
def test_metrics_are_chosen(store: Store, summary: str) -> None:
    names = [*["own_top1"] * (summary == "site"), *OWN_METRICS, "peak_distance_px"]
    rows = {metric: [metric] for metric in names}
    check_chosen_metrics(
        partial(run, store, summary=summary), plot, rows, "localize --summary .*"
    )
    for metric in ("own_rank_relative", "peak_distance_px"):  # not drawn among the others
        assert plot(run(store, summary=summary, metrics=[metric])).axes
    with pytest.raises(VitseeError, match="metrics are of summaries"):
        run(store, metrics=["own_cka"])


# Grids and pixels


@pytest.mark.slow
def test_grids_of_different_size_in_one_call(tmp_path: Path) -> None:
    pixels = PIXELS[:14]
    small = TokenLayout((), (1, 1), stride_px=(8.0, 8.0))
    odd = TokenLayout((), (2, 3), stride_px=(3.0, 3.0))  # covers 6 x 9 of 8 x 12 pixels
    acts = {
        "a.out": (tokens_of(pixels, 4, 2), LAYOUT),
        "b.out": (tokens_of(pixels, 3, 3, small), small),
        "c.out": (tokens_of(pixels, 6, 4, odd), odd),
        "d.out": (tokens_of(pixels, 2, 5), LAYOUT),
    }
    table = run(write(tmp_path / "a.zarr", acts, pixels), sites=["blocks"])
    assert unique(table, "site") == list(acts)
    for (name, (values, layout)), step in zip(acts.items(), (4, 8, 3, 4), strict=True):
        expected = loop_maps(values, pixels, layout.grid or (0, 0), step)
        assert maps_of(having(table, site=name)) == pytest.approx(expected, abs=1e-6)
    patch = table.notes["stores"]["a"]["patch_px"]
    assert patch == {"a.out": [4, 4], "b.out": [8, 8], "c.out": [3, 3], "d.out": [4, 4]}
    summary = run(open_store(tmp_path / "a.zarr"), sites=["b.out"], summary="site")
    assert np.isnan(summary["value"]).all() and summary["n_tokens"].tolist() == [0] * 7
    # two sites with the same patches: their Gram matrices serve both, the result is that of one
    alone = run(open_store(tmp_path / "a.zarr"), sites=["d.out"])
    assert alone["value"] == pytest.approx(table.filter(site="d.out")["value"], rel=1e-12)


def test_patches_cut_at_the_edge(tmp_path: Path) -> None:
    # 8 pixels in steps of 3, rounded up: rows 0-2, 3-5, 6-7
    pixels = pictures(12, 8, 8)
    layout = TokenLayout((), (3, 3), stride_px=(3.0, 3.0))
    acts = tokens_of(pixels, 3, 1, layout)
    table = run(write(tmp_path / "a.zarr", {"blocks.0.out": (acts, layout)}, pixels))
    assert maps_of(table) == pytest.approx(loop_maps(acts, pixels, (3, 3), 3), abs=1e-6)


def test_fractional_strides() -> None:
    class Pixels:
        shape = (2, 3, 10, 10)

    layout = TokenLayout((), (3, 4), stride_px=(10 / 3, 2.5))
    patches = PatchPixels(None, Pixels(), layout)  # type: ignore[arg-type]
    assert [edges.tolist() for edges in patches.bounds] == [
        [0, 3, 7, 10],
        [0, 2, 5, 8, 10],
    ]
    assert patches.shape == (3, 4, 3)


def test_patches_lie_where_the_layout_says(tmp_path: Path) -> None:
    # patches of 4 pixels in the middle of 8 x 12, two rows and columns of pixels on each side
    pixels = pictures(12, 12, 16)
    layout = TokenLayout((), (2, 3), stride_px=(4.0, 4.0), offset_px=(2.0, 2.0))
    inner = np.ascontiguousarray(pixels[:, :, 2:10, 2:14])
    acts = tokens_of(inner, 4, 2, layout)
    table = run(write(tmp_path / "a.zarr", {"blocks.0.out": (acts, layout)}, pixels))
    assert maps_of(table) == pytest.approx(loop_maps(acts, inner, (2, 3), 4), abs=1e-6)


@pytest.mark.slow
def test_a_constant_patch_has_no_value(tmp_path: Path) -> None:
    pixels = PIXELS.copy()
    pixels[:, :, :4, :4] = 77
    acts = ACTS.copy()
    acts[:, 2] = 0.1  # token 0,1; 0.1 is no number of float32
    store = write(tmp_path / "a.zarr", {"blocks.0.out": (acts, LAYOUT)}, pixels)
    maps = maps_of(run(store))
    assert np.isnan(maps[:, 0]).all() and np.isnan(maps[1]).all()
    assert np.isfinite(np.delete(maps[:, 1:], 1, 0)).all()
    table = run(store, summary="site")
    assert table["n_tokens"].tolist() == [4] * 7 and np.isfinite(table["value"]).all()
    assert table["value"][-1] == 1 / 5
    tokens = run(store, summary="token")
    assert np.isnan(tokens.filter(token="0,0")["value"]).all()
    for table in (tokens, run(store, tokens=["0,1"])):  # the latter is nothing but NaN
        plot(table).savefig(io.BytesIO(), dpi=40)


@pytest.mark.parametrize(
    "options", [{}, {"estimator": "minibatch", "batch": 10, "repeats": 2}]
)
def test_what_differs_in_one_image_has_no_value(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Its HSIC with itself is 0, as is any other: 0 / 0, of which rounding leaves 1e-5."""
    pixels, acts = PIXELS.copy(), ACTS.copy()
    pixels[:, :, :4, :4], acts[:, 2] = 77, 0.1
    pixels[3, :, :4, :4], acts[5, 2] = (
        np.arange(16).reshape(4, 4),
        np.arange(acts.shape[-1]),
    )
    store = write(tmp_path / "a.zarr", {"blocks.0.out": (acts, LAYOUT)}, pixels)
    maps = maps_of(run(store, **options))
    assert np.isnan(maps[:, 0]).all() and np.isnan(maps[1]).all()
    assert np.isfinite(np.delete(maps[:, 1:], 1, 0)).all()


# The engine: the same numbers however they were come by


def token_stack(store: Store, site: str, tokens: str) -> TokenStack:
    return TokenStack(choose_features(store, store.site(site), tokens))


def both_ways(store: Store, estimator: Estimator, **kwargs: Any) -> tuple[Hsic, Hsic]:
    fast = hsic_on_the_fly(
        [token_stack(store, "a.out", "cls"), token_stack(store, "a.out", "patches")],
        [token_stack(store, "b.out", "patches")],
        np.flatnonzero(store.valid),
        estimator=estimator,
        shuffled=store.manifest.identity["order"] == "shuffled",
        seed=3,
        device="cpu",
        memory=kwargs.pop("memory", 1 << 28),
    )
    a, b = store.site("a.out"), store.site("b.out")
    names = [f"{r},{c}" for r in range(2) for c in range(3)]
    slow = hsic(
        [Representation(store, a, token) for token in ("cls", *names)],
        [Representation(store, b, token) for token in names],
        estimator=estimator,
        seed=3,
        options=GramOptions(use_cache=False),
    )
    return fast, slow


@pytest.mark.parametrize("order", ["shuffled", "dataset"])
@pytest.mark.parametrize(
    "estimator",
    [Estimator("exact"), Estimator("biased"), Estimator("minibatch", 8, 24, 3)],
    ids=lambda e: e.kind,
)
def test_as_the_gram_matrices_on_disk(
    tmp_path: Path, estimator: Estimator, order: str
) -> None:
    sites = {
        "a.out": (tokens_of(PIXELS, 4, 2), LAYOUT),
        "b.out": (tokens_of(PIXELS, 3, 3), LAYOUT),
    }
    valid = [int(k != 5) for k in range(N)]
    store = write(tmp_path / "a.zarr", sites, None, valid=valid, order=order)
    fast, slow = both_ways(store, estimator)
    assert (fast.spread, fast.n_images) == (slow.spread, slow.n_images)
    for one, other in ((fast, slow), (fast.replicates, slow.replicates)):
        assert one is not None and other is not None
        for name in ("cross", "rows", "cols"):
            expected = getattr(other, name)
            assert getattr(one, name) == pytest.approx(
                expected, abs=1e-6 * np.abs(expected).max()
            )


def planned(store: Store, **kwargs: Any) -> tuple[Table, Any]:
    """The result, and the last plan of the work that its memory gave."""
    made: list[Any] = []
    divide = engine._divide_work

    def watch(*args: Any) -> Any:
        made.append(divide(*args))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_divide_work", watch)
        return run(store, **kwargs), made[-1]


@pytest.mark.slow
def test_memory_and_tiles_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = pictures(70)
    layout = TokenLayout((), (4, 6), stride_px=(2.0, 2.0))
    sites = {
        f"blocks.{k}.out": (tokens_of(pixels, 4, k, layout), layout) for k in range(2)
    }
    store = write(tmp_path / "a.zarr", sites, pixels)
    table, plan = planned(store, sites=["blocks"])
    assert (len(plan.rows), len(plan.cols), plan.tile) == (1, 1, 70)
    # the same blocks of images: what is left is the order in which single precision rounds
    for memory, groups in ((5_000_000, (2, 1)), (3_000_000, (3, 2)), (1_800_000, (3, 3))):
        other, plan = planned(store, sites=["blocks"], memory=memory)
        assert (len(plan.rows), len(plan.cols)) == groups
        for name in ("value", "std", "low"):
            assert other[name] == pytest.approx(table[name], abs=1e-6)
    monkeypatch.setattr(engine, "GOOD_TILE", 16)
    monkeypatch.setattr(engine, "TILES_ALONG", 7)
    divide = engine._divide_work
    for kept in (99, 4, 3, 2):  # of five tiles' images
        monkeypatch.setattr(
            engine,
            "_divide_work",
            lambda *args, k=kept: replace(divide(*args), kept_tiles=k),
        )
        other, plan = planned(store, sites=["blocks"])
        assert (plan.tile, plan.kept_tiles) == (16, kept)
        assert other["value"] == pytest.approx(table["value"], abs=1e-6)


def test_each_byte_is_read_once_where_it_fits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "GOOD_TILE", 8)
    rows: list[int] = []
    read = TokenStack.read

    def watch(self: TokenStack, span: slice) -> Any:
        rows.extend(range(span.start, span.stop))
        return read(self, span)

    monkeypatch.setattr(TokenStack, "read", watch)
    run(store)
    assert sorted(rows) == list(range(N))


def test_too_little_memory(tmp_path: Path, store: Store) -> None:
    with pytest.raises(
        VitseeError, match=r"maps of 6 tokens .* choose some with --tokens ROW,COL"
    ):
        run(store, tokens=["each"], memory=6_000)
    # 2419200 bytes are asked for, not rounded to 2.4 MB, and they are enough
    options = (
        "--sites",
        "blocks.3.out",
        "--tokens",
        "0,0",
        "--tokens",
        "0,1",
        "--tokens",
        "1,1",
    )
    path = many(tmp_path).path
    asked = refused(path, *options, "--memory", "1M").split("--memory ")[1].strip()
    assert asked == "3M"
    assert invoke(path, *options, "--memory", asked).exit_code == 0
    with pytest.raises(
        VitseeError, match=r"of memory are too few for 30 images; give --memory"
    ):
        run(store, tokens=["0,0"], memory=50_000)


def test_sites_too_large_for_the_memory_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the grids 12 x 12 and 4 x 4: maps and replicates of 144 tokens take 8 * 63 * 144^2 bytes;
    the other rows are those of the other site alone."""
    pixels, sites = pictures(6, 12, 12), {}
    for name, side in (("b.0.out", 12), ("b.1.out", 4)):
        layout = TokenLayout((), (side, side), stride_px=(12 / side, 12 / side))
        sites[name] = tokens_of(pixels, 2, side, layout), layout
    store = write(tmp_path / "r.zarr", sites, pixels)
    too_little = 4 * 8 * 63 * 144**2 - 1
    found = run(
        store, sites=["blocks"], tokens=["each"], summary="site", memory=too_little
    )
    alone = run(store, sites=["b.1.out"], summary="site")
    assert list(found["site"]) == list(alone["site"]) and "left_out" not in alone.notes
    np.testing.assert_array_equal(found["value"], alone["value"])
    reason = (
        "its maps of 144 tokens take 10.5 MB; choose some with --tokens ROW,COL, or give "
    )
    assert found.notes["left_out"] == {"r b.0.out": f"{reason}--memory 42M"}
    assert f"r: left out: b.0.out: {reason}--memory 42M" in caplog.text


def test_the_cost_is_said_before_the_work(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run(store)
    assert "multiplications" not in caplog.text  # done in no time
    monkeypatch.setattr(cost, "cpu_rate", lambda: 100.0)
    monkeypatch.setattr(cost, "n_lanes", lambda: 2)

    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitsee_core.analyses.localize.site_tables.input_pixels", stop)
    for n in (30, 15):
        with pytest.raises(KeyboardInterrupt):
            run(store, images=n)
    # 6 tokens of 4 channels, 6 patches of 12 pixels, 36 pairs; 60 of them a second
    widths = sum(s.n_matrices * s.n_features for s in counted(store))
    times = [n * (n + 1) / 2 * (widths + 36) for n in (30, 15)]
    for n, count in zip((30, 15), times, strict=True):
        assert f"{count:.1e} multiplications for {n} images, about" in caplog.text
    assert cost.rough_time(times[0] / 60) in caplog.text and "on 2 cores" in caplog.text


@pytest.mark.parametrize(
    ("seconds", "says"), [(0.2, "1 s"), (89, "89 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_rough_times(seconds: float, says: str) -> None:
    assert cost.rough_time(seconds) == f"about {says}"


def counted(store: Store) -> list[Any]:
    """The stacks that `run` compares by default."""
    (work,) = SiteMaps(store, store.select(["blocks"])[-1:], ("each",), None).sites
    return [*work.stacks, PatchPixels(store, store.inputs(), work.layout)]


# Spread


@pytest.mark.slow
def test_the_jackknife_leaves_images_out(tmp_path: Path) -> None:
    n = 20  # fewer than 24 images: each is a block
    acts = tokens_of(PIXELS[:n])
    store = write(tmp_path / "a.zarr", {"blocks.0.out": (acts, LAYOUT)}, PIXELS[:n])
    table = run(store, tokens=["0,1"])
    patch = cell_pixels(PIXELS[:n], (2, 3), 4)[4]
    without = np.array(
        [loop_cka(np.delete(acts[:, 2], k, 0), np.delete(patch, k, 0)) for k in range(n)]
    )
    std = math.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
    row = table.filter(row=1, col=1)
    value = loop_cka(acts[:, 2], patch)
    assert row["std"][0] == pytest.approx(std, rel=1e-4)
    half = t_quantile(n - 1) * std
    assert row["low"][0] == pytest.approx(max(value - half, -1), abs=1e-5)
    assert row["high"][0] == pytest.approx(min(value + half, 1), abs=1e-5)
    assert row["spread"][0] == "jackknife"


def test_spread_of_summaries(store: Store) -> None:
    table = run(store, summary="site")
    smooth = having(table, metric=["own_cka", "own_margin"])
    half = t_quantile(BLOCKS - 1) * smooth["std"]
    for bound, by_hand in (
        ("low", smooth["value"] - half),
        ("high", smooth["value"] + half),
    ):
        np.testing.assert_allclose(smooth[bound], by_hand)
    assert (half > 0).all()
    others = having(
        table, metric=["own_top1", "own_rank", "own_rank_relative", "peak_distance_px"]
    )
    assert np.isnan(others["std"]).all()  # a jackknife has nothing to say of ranks
    repeats = run(store, summary="site", preset="raghu", batch=10, repeats=3)
    about = repeats.notes["stores"]["a"]
    assert [about[name] for name in ("estimator", "batch", "batches", "repeats")] == [
        *("minibatch", 10, 3, 3)
    ]
    assert np.isfinite(having(repeats, baseline="")["std"]).all()
    assert np.isnan(repeats["low"]).all() and unique(repeats, "spread") == ["repeats"]
    assert tuple(repeats.written.columns) == SITE_COLUMNS
    assert tuple(run(store, summary="token").written.columns) == COLUMNS


@pytest.mark.slow
def test_scales_of_the_summary_do_not_depend_on_how_alike_the_tokens_are(
    store: Store,
) -> None:
    table = run(store, summary="token")
    for value, margin in ((1.0, 0.0), (2.0, 0.5)):
        values = np.where(table["metric"] == "own_margin", margin, value)
        figure = plot(Table(table.written.with_columns(value=values)))
        own, rank, less = (axes.images[0].norm for axes in figure.axes[:3])
        assert (own.vmin, own.vmax) == (0, value)
        assert (rank.vmin, rank.vmax) == (1, 6)
        assert (less.vmin, less.vmax) == ((-1, 1) if margin == 0 else (-margin, margin))


def test_summaries_are_those_of_the_maps(store: Store) -> None:
    maps = maps_of(run(store))
    table = run(store, summary="token")
    for t in range(6):
        row, col = divmod(t, 3)
        others = [v for p, v in enumerate(maps[t]) if p != t]
        rank = 1 + sum(v > maps[t, t] for v in others)
        peak = divmod(int(np.argmax(maps[t])), 3)
        expected = {
            "own_cka": maps[t, t],
            "own_rank": rank,
            "own_rank_relative": (rank - 1) / 5,
            "own_margin": maps[t, t] - max(others),
            "peak_distance_px": 4 * math.hypot(peak[0] - row, peak[1] - col),
        }
        rows = having(table, token=f"{row},{col}")
        assert dict(
            zip(rows["metric"].tolist(), rows["value"].tolist(), strict=True)
        ) == (pytest.approx(expected, rel=1e-12))
        assert rows["row"].tolist() == [row] * 5 and rows["col"].tolist() == [col] * 5
    site = run(store, summary="site")
    first = np.mean(table.filter(metric="own_rank")["value"] == 1)
    assert site["value"][0] == pytest.approx(first)
    assert site.filter(metric="own_margin")["value"][0] == pytest.approx(
        table.filter(metric="own_margin")["value"].mean()
    )


def test_ranks_of_equal_patches() -> None:
    maps = np.array([[0.5, 0.5, 0.1], [0.9, np.nan, 0.2], [0.3, np.nan, 0.3]])
    cka, rank, relative, margin = own_patch(maps, [0, 1, 2])
    assert rank.tolist()[::2] == [1, 1] and margin.tolist()[::2] == [0, 0]
    assert relative.tolist()[::2] == [0, 0] and cka.tolist()[::2] == [0.5, 0.3]
    assert np.isnan([cka[1], rank[1], relative[1], margin[1]]).all()


# Images


@pytest.mark.slow
def test_which_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    sites = {"blocks.0.out": (ACTS, LAYOUT)}
    store = write(tmp_path / "a.zarr", sites, PIXELS)
    table = run(store, images=12)
    assert maps_of(table) == pytest.approx(
        loop_maps(ACTS[:12], PIXELS[:12], (2, 3), 4), abs=1e-6
    )
    monkeypatch.setattr(localize, "MOST_EXACT", 12)
    assert run(store)["value"] == pytest.approx(table["value"], rel=1e-12)
    assert (
        "a: 12 of its 30 images, as a sample; --images N takes more or fewer"
        in caplog.text
    )
    assert table.notes["remarks"] == run(store).notes["remarks"] == []
    (remark,) = run(store, images=5).notes["remarks"]
    assert re.fullmatch(
        r"a: 5 images are too few: the interval is all of -1 to 1 for \d+ % .*", remark
    )
    assert remark in caplog.text
    assert run(store, images=20)["n_images"][0] == 20
    assert run(store, estimator="exact")["n_images"][0] == N
    monkeypatch.undo()
    valid = np.ones(N, int)
    valid[[0, 3, *range(8, 16), 29]] = 0  # a whole slab among them
    part = write(tmp_path / "p.zarr", sites, PIXELS, slabs=[0, 1, 2], valid=valid)
    keep = np.flatnonzero(valid[:24])
    expected = loop_maps(ACTS[keep], PIXELS[keep], (2, 3), 4)
    assert maps_of(run(part)) == pytest.approx(expected, abs=1e-6)
    assert run(part)["n_images"][0] == len(keep)
    with pytest.raises(
        VitseeError, match="a: 3 readable images chosen; CKA needs at least 4"
    ):
        run(store, images=3)


# What a user sees


def invoke(*args: object) -> Result:
    return CliRunner().invoke(main, ["localize", *map(str, args)])


def refused(*args: object) -> str:
    result = invoke(*args)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    return result.stderr


@pytest.mark.slow
def test_refusals(tmp_path: Path, store: Store) -> None:
    cnn = TokenLayout((), (2, 3), stride_px=(4.0, 4.0))
    bare = write(
        tmp_path / "c.zarr", {"blocks.0.out": (tokens_of(PIXELS, 2, 0, cnn), cnn)}, PIXELS
    )
    without = write(tmp_path / "w.zarr", {"blocks.0.out": (ACTS, LAYOUT)}, None)
    cases: list[tuple[Store, dict[str, Any], str]] = [
        (
            store,
            {"tokens": ["2,0"]},
            "a: blocks.0.out has no token 2,0: it has prefix cls and a",
        ),
        (bare, {"tokens": ["cls"]}, "has no class token"),
        (store, {"sites": ["pooled"]}, "pooled has no tokens on a grid"),
        (store, {"sites": ["blocks.7.out"]}, "no site"),
        (store, {"estimator": "exact", "batch": 8}, "--batch"),
        (store, {"summary": "site", "tokens": ["cls"]}, "own patches of grid tokens"),
        (store, {"tokens": ["mean"]}, "no tokens 'mean'; expected each, cls or ROW,COL"),
        (store, {"summary": "block"}, "no summary"),
        (
            without,
            {},
            "w keeps no pixels: w does not say where its .*: vitsee extract .* --inputs",
        ),
    ]
    for one, choice, line in cases:
        with pytest.raises(VitseeError, match=line):
            run(one, **choice)
    png = tmp_path / "r.png"
    assert "has no token 2,0" in refused(store.path, "--tokens", "2,0", "--png", png)
    assert invoke(store.path, "--tokens", "mean").exit_code == 2 and not png.exists()
    result = invoke(
        store.path, "--sites", "blocks", "--sites", "pooled", "--tokens", "0,0"
    )
    assert result.exit_code == 0, result.output
    assert "left out, as no grid of the image: pooled" in result.stderr


@pytest.mark.slow
def test_pixels_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plant_images(tmp_path / "data", 12)
    (tmp_path / "data" / "class0" / "004.png").write_bytes(b"no image")
    without, with_ = tmp_path / "without.zarr", tmp_path / "with.zarr"
    for out, option in ((without, "--no-inputs"), (with_, "--inputs")):
        extracted(*VIT, "--data", "data", "-o", out, option, "--slab", 5)
    monkeypatch.chdir("/")  # the data is where it was, not where the user is now
    expected = run(open_store(with_), sites=["blocks"])
    table = run(open_store(without), sites=["blocks"])
    assert np.array_equal(table["value"], expected["value"], equal_nan=True)
    assert "loaded again" in table.notes["stores"]["without"]["pixels"]
    few = run(open_store(without), images=7)
    again = run(open_store(with_), images=7)
    assert np.array_equal(few["value"], again["value"], equal_nan=True)
    # an image that came to the folder since then moves the others on, and is none of the store's
    shutil.copy(
        tmp_path / "data" / "class0" / "000.png", tmp_path / "data" / "class0" / "0.png"
    )
    table = run(open_store(without), sites=["blocks"])
    assert np.array_equal(table["value"], expected["value"], equal_nan=True)
    with edited(without) as manifest:
        digest = manifest["info"]["first_images_sha256"]
        manifest["info"]["first_images_sha256"] = "0" * 64
    assert "come out with other pixels here than then" in refused(without)
    with edited(without) as manifest:
        manifest["info"]["first_images_sha256"] = digest
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    line = refused(without)
    assert "without keeps no pixels: the images of without cannot be read again" in line
    assert (
        "no file or folder" in line and "--data" in line and "run: vitsee extract" in line
    )
    moved = tmp_path / "elsewhere"
    found = invoke(without, "--data", moved)
    assert (found.exit_code, found.stdout) == (
        0,
        invoke(with_).stdout.replace("with,", "without,"),
    )
    image = moved / "class1" / "007.png"
    Image.new("RGB", (60, 50), (9, 9, 9)).save(image)
    assert "class1/007.png' in" in (line := refused(without, "--data", moved))
    assert "is another picture now" in line
    image.unlink()
    assert "no longer has the image 'class1/007.png'" in refused(without, "--data", moved)


def fine(tmp_path: Path) -> tuple[Store, Array, Array]:
    """A site of 12 x 11 tokens of 6 images; its tokens, and the pixels."""
    layout = TokenLayout((), (12, 11), stride_px=(1.0, 1.0))
    pixels = pictures(6, 12, 11)
    acts = tokens_of(pixels, 2, 5, layout)
    return write(tmp_path / "f.zarr", {"b.0.out": (acts, layout)}, pixels), acts, pixels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_tokens", "every", "rows", "cols"),
    [
        (132, 1, [*range(12)], [*range(11)]),
        (131, 2, [0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9]),
        (29, 3, [1, 4, 7, 10], [2, 5, 8]),
        (5, 5, [3, 8], [2, 7]),
        (1, 7, [5], [5]),
    ],
)
def test_a_fine_grid_is_thinned_evenly(
    n_tokens: int, every: int, rows: list[int], cols: list[int],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The least step at which there are at most so many tokens; the maps are those of a loop over
    these tokens and all patches, and all tokens at a step of 1."""
    store, acts, pixels = fine(tmp_path)
    whole = run(store, sites=["b.0.out"], tokens=["each"])
    monkeypatch.setattr(site_maps, "MAX_PAIRS", n_tokens * 132)
    found = run(store, sites=["b.0.out"])
    assert unique(found, "token") == [f"{row},{col}" for row in rows for col in cols]
    patches = cell_pixels(pixels, (12, 11), 1)
    chosen = [row * 11 + col for row in rows for col in cols]
    for k, cell in enumerate(chosen[:3]):
        expected = [loop_cka(acts[:, cell], patch) for patch in patches]
        np.testing.assert_allclose(maps_of(found)[k], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        maps_of(found), maps_of(whole)[chosen], rtol=1e-4, atol=1e-5
    )
    if every == 1:
        assert (
            np.array_equal(maps_of(found), maps_of(whole)) and "tokens" not in found.notes
        )
        assert "every" not in caplog.text
        return
    which = {
        "every": every,
        "rows": rows,
        "cols": cols,
        "n_tokens": len(chosen),
        "of": 132,
    }
    assert found.notes["stores"]["f"]["tokens"] == {"b.0.out": which}
    said = f"f: b.0.out: {len(chosen)} of its 132 tokens are compared, every {every}"
    assert said in caplog.text and "--tokens each takes all" in caplog.text
    of_site = run(store, sites=["b.0.out"], summary="site")
    assert set(having(of_site, baseline="")["n_tokens"].tolist()) == {len(chosen)}
    own = own_patch(maps_of(found), chosen)
    margin = of_site.filter(metric="own_margin")["value"]
    assert margin[0] == pytest.approx(
        own[OWN_METRICS.index("own_margin")].mean(), rel=1e-6
    )
    assert len(plot(of_site).axes) == 3 and plot(found).axes
    assert plot(run(store, sites=["b.0.out"], summary="token")).axes


def test_a_grid_that_the_memory_is_too_small_for_is_thinned(tmp_path: Path) -> None:
    """8 * 63 * 132 bytes a token: a quarter of this memory holds 20 tokens, not 30."""
    store, *_ = fine(tmp_path)
    found = run(store, sites=["b.0.out"], memory=4 * 20 * 8 * 63 * 132)
    assert found.notes["stores"]["f"]["tokens"]["b.0.out"]["every"] == 3
    with pytest.raises(VitseeError, match="its maps of 132 tokens"):
        run(store, sites=["b.0.out"], tokens=["each"], memory=4 * 20 * 8 * 63 * 132)


# Pictures


def many(tmp_path: Path) -> Store:
    pixels = pictures(12, 20, 20)
    layout = TokenLayout(("cls",), (20, 20), stride_px=(1.0, 1.0))
    small = TokenLayout(("cls",), (2, 2), stride_px=(10.0, 10.0))
    sites = {f"blocks.{k}.out": (tokens_of(pixels, 2, k, small), small) for k in range(3)}
    sites["blocks.3.out"] = (tokens_of(pixels, 2, 0, layout), layout)
    return write(tmp_path / "m.zarr", sites, pixels)


@pytest.mark.slow
def test_pictures_from_the_csv(tmp_path: Path, store: Store) -> None:
    wide = many(tmp_path)
    for table, texts in (
        (run(store, tokens=["0,0", "cls"]), ["patch 0,0", "class token"]),
        (run(store, wide, tokens=["each", "cls"]), ["a, block 0"]),
        (run(store, summary="token"), []),
        (run(store, wide, sites=["blocks"], summary="site"), []),
    ):
        with open(tmp_path / "r.csv", "w") as file:
            table.to_csv(file)
        figure = plot(Table.read(tmp_path / "r.csv"))
        figure.savefig(io.BytesIO(), dpi=40)
        titles = [
            a.get_title(loc=side) for a in figure.axes for side in ("left", "center")
        ]
        titles = [flat(title) for title in titles]
        assert all(text in titles for text in texts)


@pytest.mark.slow
def test_a_figure_of_minibatches_names_their_size(store: Store) -> None:
    table = run(store, estimator="minibatch", batch=10, repeats=2)
    assert table.notes["batch"] == 10
    labels = [text.get_text() for text in plot(table).findobj(Text)]
    assert any("batches of 10" in " ".join(label.split()) for label in labels)


@pytest.mark.slow
def test_a_mosaic_draws_every_token_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = many(tmp_path)
    table = run(wide, sites=["blocks"])
    figure = plot(table)
    titles = [flat(axes.get_title(loc="left")) for axes in figure.axes]
    assert "m, block 3, every 2nd token" in titles and "m, block 2" in titles
    axes = figure.axes[titles.index("m, block 2")]
    drawn: Any = axes.images[0].get_array()
    shown = np.ma.filled(drawn, np.nan)
    assert shown.shape == (5, 5)  # 2 x 2 maps of 2 x 2 patches, a gap between them
    one = table.filter(site="blocks.2.out", token="1,0")
    assert shown[3:, :2] == pytest.approx(one["value"].reshape(2, 2))
    assert len(axes.collections[0].get_paths()) == 4
    monkeypatch.setattr(location_maps, "MAX_MOSAICS", 2)
    texts: list[Any] = plot(table).findobj(match=Text)
    assert any("2 of 4 sites" in flat(text.get_text()) for text in texts)
