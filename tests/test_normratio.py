"""Norm ratio: numbers against hand and loops."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.extractions import VIT, extracted, plant_images
from tests.reference_normratio import (
    loop_jackknife,
    loop_median_shares,
    loop_statistic,
    loop_values,
)
from tests.residuals import SITES, cnn, products_of, random_branches, vit
from tests.stores import write_residuals
from tests.tables import equal
from vitsee_core.analyses.normratio import COLUMNS, DEFAULT_METRICS, plot, run
from vitsee_core.analyses.normratio.sublayer_estimates import METRICS
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.statistics.skip_branch import quantities
from vitsee_core.tables.results import Table
from vitsee_stores import Store, open_store
from vitsee_stores.errors import SiteError, VitseeError
from vitsee_stores.layout import TokenLayout

Array = NDArray[Any]


# ---------------------------------------------------------------- numbers


def test_by_hand(tmp_path: Path) -> None:
    # z = (3, 4) k and f = (0, 5): |z| / |f| = k, cosine 20 / 25, z + f = (3k, 4k + 5)
    z = np.array([[3.0, 4.0]]) * np.array([1, 2, 4])[:, None, None]
    f = np.broadcast_to([0.0, 5.0], z.shape)
    layout = TokenLayout(("cls",), None, rows=0)
    store = write_residuals(
        tmp_path / "a.zarr", {"blocks.0.attn": products_of(z, f)}, layout=layout
    )
    table = run(store)
    assert tuple(table.written.columns) == COLUMNS
    assert table["metric"].tolist() == list(DEFAULT_METRICS)
    out = [
        (25 * k**2 + 20 * k) / (5 * k * math.hypot(3 * k, 4 * k + 5)) for k in (1, 2, 4)
    ]
    # exact squares in float32; cosines by one division and root
    assert table["value"].tolist() == pytest.approx(
        [7 / 3, 2, 2, 0.8, sum(out) / 3], rel=1e-15
    )
    assert table["n_images"].tolist() == [3] * 5
    std = math.sqrt(((4 / 3) ** 2 + (1 / 3) ** 2 + (5 / 3) ** 2) / 2)
    assert table["std"][0] == pytest.approx(std, rel=1e-14)
    half = t_quantile(2) * std / math.sqrt(3)
    assert table["low"][0] == pytest.approx(7 / 3 - half, rel=1e-13)
    assert table["high"][0] == pytest.approx(7 / 3 + half, rel=1e-13)
    # no two order statistics of three images contain the median 95 times of 100
    assert np.isnan([table[name][1] for name in ("std", "low", "high")]).all()
    # geometric means sqrt(8), 2, sqrt(2)
    without = [math.sqrt(8), 2.0, math.sqrt(2)]
    error = math.sqrt(2 / 3 * sum((v - sum(without) / 3) ** 2 for v in without))
    assert table["std"][2] == pytest.approx(math.sqrt(3) * error, rel=1e-13)
    first = {name: table[name][0] for name in COLUMNS[:11]}
    assert first == {
        "store": "a",
        "model": "tiny",
        "weights": "",
        "site": "blocks.0.attn",
        "block": "blocks.0",
        "depth": 0,
        "rel_depth": 0.0,
        "token": "cls",
        "row": None,
        "col": None,
        "metric": "norm_ratio",
    }


@pytest.mark.parametrize("n", [2, 11, 53])
def test_against_loops(tmp_path: Path, n: int) -> None:
    products = products_of(*random_branches(n, 7))
    valid = [i != 1 or n == 2 for i in range(n)]
    store = write_residuals(tmp_path / "a.zarr", {"blocks.0.mlp": products}, valid=valid)
    kept = products[np.array(valid)]
    blocks = [i * min(len(kept), 20) // len(kept) for i in range(len(kept))]
    table = run(store, tokens=["each", "patches"], metrics=tuple(METRICS))
    assert len(table) == 7 * 8
    for metric in METRICS:
        values = loop_values(kept, metric)
        rows = table.filter(metric=metric)
        per_token = [loop_statistic(of, metric) for of in values]
        # float64 sums and roots of float32 products, in other orders
        assert rows["value"][:7] == pytest.approx(per_token, rel=1e-12)
        assert rows["value"][7] == pytest.approx(
            statistics.fmean(per_token[1:]), rel=1e-12
        )
        assert (rows["n_images"] == len(kept)).all()
        for i, members in enumerate([*([t] for t in range(7)), list(range(1, 7))]):
            some = [values[t] for t in members]
            if METRICS[metric][1] == "mean":
                of_images = [statistics.fmean(image) for image in zip(*some, strict=True)]
                error = statistics.stdev(of_images) / math.sqrt(len(kept))
                quantile = t_quantile(len(kept) - 1)
            elif METRICS[metric][1] == "median":
                check_median(rows, i, some)
                continue
            else:
                error = loop_jackknife(some, metric, blocks)
                quantile = t_quantile(max(blocks))
            assert rows["std"][i] == pytest.approx(error * math.sqrt(len(kept)), rel=1e-9)
            assert rows["low"][i] == pytest.approx(
                rows["value"][i] - quantile * error, rel=1e-9
            )
            assert rows["high"][i] == pytest.approx(
                rows["value"][i] + quantile * error, rel=1e-9
            )


def check_median(rows: Any, i: int, of_tokens: list[list[float]]) -> None:
    """The i-th row, about the median of a token or the mean of several tokens' medians."""
    n = len(of_tokens[0])
    ends = [loop_median_shares(values) for values in of_tokens]
    shares = [
        statistics.fmean(image) for image in zip(*(of[2] for of in ends), strict=True)
    ]
    error = math.sqrt(math.fsum(share * share for share in shares) * n / (n - 1))
    assert rows["std"][i] == pytest.approx(error * math.sqrt(n), rel=1e-9, nan_ok=True)
    low, high = ends[0][:2]
    if len(ends) > 1:
        half = t_quantile(n - 1) * error
        low, high = rows["value"][i] - half, rows["value"][i] + half
    assert rows["low"][i] == pytest.approx(low, rel=1e-9, nan_ok=True)
    assert rows["high"][i] == pytest.approx(high, rel=1e-9, nan_ok=True)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([2.0**-20, 0.5, 4.0, 2.0**20]))
def test_what_leaves_the_quantities_alone(seed: int, scale: float) -> None:
    z, f = random_branches(3, 4, seed)
    names = ("norm_ratio", "cos_branch", "cos_out")
    plain = quantities(products_of(z, f), names)
    # powers of two: the same bits
    scaled = quantities(products_of(scale * z, scale * f))
    assert all(np.array_equal(plain[name], scaled[name]) for name in plain)
    flipped = quantities(products_of(-z, f))
    assert np.array_equal(flipped["norm_ratio"], plain["norm_ratio"])
    assert np.array_equal(flipped["cos_branch"], -plain["cos_branch"])
    both = quantities(products_of(-z, -f))
    assert all(np.array_equal(plain[name], both[name]) for name in plain)
    longer = quantities(products_of(z, scale * f))
    assert np.allclose(
        longer["norm_ratio"] * scale, plain["norm_ratio"], rtol=1e-15, atol=0
    )
    assert np.allclose(longer["cos_branch"], plain["cos_branch"], rtol=1e-14, atol=0)
    # Cosines of z, f and z + f lie in one plane: cos_out follows from the other two.
    r, c = plain["norm_ratio"], plain["cos_branch"]
    assert np.allclose(
        plain["cos_out"], (r + c) / np.sqrt(r * r + 2 * r * c + 1), atol=1e-7
    )


def test_where_a_quantity_is_undefined() -> None:
    z = np.array([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [1.0, 2.0]])
    f = np.array([[0.0, 0.0], [1.0, 2.0], [-1.0, -2.0], [0.0, 0.0], [1.0, 2.0]])
    found = quantities(products_of(z, f))
    nan = math.nan
    assert np.array_equal(found["norm_ratio"], [nan, 0, 1, nan, 1], equal_nan=True)
    assert np.array_equal(found["cos_branch"], [nan, nan, -1, nan, 1], equal_nan=True)
    assert np.array_equal(found["cos_out"], [1, nan, nan, nan, 1], equal_nan=True)


def test_all_tokens_as_one_vector(tmp_path: Path) -> None:
    z, f = random_branches(9, 7)
    store = write_residuals(tmp_path / "a.zarr", {"blocks.0.mlp": products_of(z, f)})
    metrics = ["norm_ratio", "cos_branch", "skip_norm", "branch_norm"]
    table = run(store, tokens=["flat", "cls"], metrics=metrics)
    assert tokens_of(table) == [("flat", None, None), ("cls", None, None)]
    flat = table.filter(token="flat")["value"]
    skip, branch = (np.linalg.norm(x.reshape(9, -1), axis=1) for x in (z, f))
    cosine = (z * f).sum((1, 2)) / skip / branch
    expected = [x.mean() for x in (skip / branch, cosine, skip, branch)]
    # the products were rounded to float32
    assert flat == pytest.approx(expected, rel=1e-5)
    cls = table.filter(token="cls", metric="skip_norm")["value"]
    assert cls == pytest.approx(np.linalg.norm(z[:, 0], axis=1).mean(), rel=1e-6)
    plot(table)


def test_one_image_has_no_spread(tmp_path: Path) -> None:
    table = run(vit(tmp_path / "a.zarr", 1), tokens=["each", "patches"])
    assert np.isfinite(table["value"]).all()
    for name in ("std", "low", "high"):
        assert np.isnan(table[name]).all()
    assert set(table["n_images"].tolist()) == {1}


def test_constant_images(tmp_path: Path) -> None:
    z, f = random_branches(1, 7)
    products = np.repeat(products_of(z, f), 30, axis=0)
    table = run(write_residuals(tmp_path / "a.zarr", {"blocks.0.mlp": products}))
    for metric in DEFAULT_METRICS:
        rows = table.filter(metric=metric)
        expected = [
            loop_statistic(of[:1], metric) for of in loop_values(products, metric)
        ]
        assert rows["value"] == pytest.approx(expected, rel=1e-14)
        assert rows["std"] == pytest.approx(np.zeros(7), abs=1e-13)


# ---------------------------------------------------------------- f = 0


@pytest.mark.slow
def test_branches_that_are_zero_somewhere(tmp_path: Path, caplog: Any) -> None:
    z, f = random_branches(30, 7)
    f[:10, 2] = 0  # cell 0,1 in a third of the images
    f[:, 4] = 0  # cell 1,0 in all
    products = products_of(z, f)
    store = write_residuals(tmp_path / "a.zarr", {"blocks.0.mlp": products})
    with caplog.at_level("WARNING"):
        table = run(store, tokens=["each", "patches"])
    assert "a: the branch is 0, and left out, in blocks.0.mlp (40 of 210" in caplog.text
    said = {"a": {"blocks.0.mlp": "f(z) = 0 in 40 of 210 tokens of images"}}
    assert table.notes["zero_branch"] == said
    for metric in DEFAULT_METRICS:
        rows = table.filter(metric=metric)
        values = [loop_statistic(of, metric) for of in loop_values(products, metric)]
        assert rows["value"][:7] == pytest.approx(values, rel=1e-12, nan_ok=True)
        there = [v for v in values[1:] if not math.isnan(v)]
        assert rows["value"][7] == pytest.approx(statistics.fmean(there), rel=1e-12)
        assert rows["n_images"][7] == 30
        assert np.isfinite(rows["low"][7])
        without = [0, 20] if metric != "cos_out" else [30, 30]
        assert [rows["n_images"][5 - 1], rows["n_images"][2]] == without
    # of the cell with 20 images: a plain sample of 20
    ratio = [v for v in loop_values(products, "norm_ratio")[2] if not math.isnan(v)]
    row = table.filter(metric="norm_ratio")
    assert row["std"][2] == pytest.approx(statistics.stdev(ratio), rel=1e-12)
    plot(table)


@pytest.mark.slow
def test_a_sublayer_without_any_branch_is_named(tmp_path: Path, caplog: Any) -> None:
    z, f = random_branches(6, 7)
    products = {"blocks.0.mlp": products_of(z, 0 * f), "blocks.1.mlp": products_of(z, f)}
    with caplog.at_level("WARNING"):
        table = run(write_residuals(tmp_path / "a.zarr", products), tokens=["all"])
    assert "a: the branch is 0 in every image and token of blocks.0.mlp:" in caplog.text
    assert "blocks.1" not in caplog.text
    empty = table.filter(site="blocks.0.mlp")
    gone = empty.filter(
        pl.col("metric").is_in([m for m in DEFAULT_METRICS if m != "cos_out"])
    )
    assert np.isnan(gone["value"]).all() and (gone["n_images"] == 0).all()
    assert (empty.filter(metric="cos_out")["value"] == 1).all()
    plot(table)
    plot(table.filter(site="blocks.0.mlp"))


def test_against_the_activations_of_a_model(tmp_path: Path) -> None:
    images = plant_images(tmp_path / "images", 5)
    path = tmp_path / "a.zarr"
    sites = ["--sites", "residual", "--dtype", "float32"]
    extracted(*VIT, "--data", images, *sites, "-o", path)
    store = open_store(path)
    table = run(store, metrics=["norm_ratio", "cos_out"])
    sites_of = {"attn": ("in", "attn.branch"), "mlp": ("mid", "mlp.branch")}
    assert [*dict.fromkeys(table["site"])] == [name for name, _ in store.plan.sublayers]
    for (site,), rows in table.frame.group_by("site", maintain_order=True):
        block, _, kind = site.rpartition(".")
        z, f = (store.acts(f"{block}.{part}")[:].astype(float) for part in sites_of[kind])
        ratio = np.linalg.norm(z, axis=-1) / np.linalg.norm(f, axis=-1)
        # sums over channels in float32 while extracting
        found = rows.filter(metric="norm_ratio")["value"]
        assert np.allclose(found, ratio.mean(0), rtol=1e-4, atol=0)
        out = (
            (z * (z + f)).sum(-1)
            / np.linalg.norm(z, axis=-1)
            / np.linalg.norm(z + f, axis=-1)
        )
        assert np.allclose(rows.filter(metric="cos_out")["value"], out.mean(0), atol=1e-5)


# ---------------------------------------------------------------- independence of how it is done


@pytest.mark.slow
def test_any_jobs_memory_or_map_give_the_same_bits(tmp_path: Path) -> None:
    store = vit(tmp_path / "a.zarr", 53)
    tokens = ["each", "all"]
    expected = run(store, tokens=tokens)
    assert equal(run(store, tokens=tokens, memory=1, jobs=3), expected)
    assert equal(run(store, tokens=tokens, memory=3 * 96 * 53, jobs=2), expected)
    with ThreadPoolExecutor(2) as threads:
        assert equal(run(store, tokens=tokens, map=threads.map), expected)


@pytest.mark.parametrize("slab", [1, 53])
def test_slab_size_does_not_matter(tmp_path: Path, slab: int) -> None:
    valid = [i % 5 != 1 for i in range(53)]
    whole = run(vit(tmp_path / "a.zarr", 53, valid=valid), tokens=["each", "all"])
    cut = run(
        vit(tmp_path / "b.zarr", 53, slab=slab, valid=valid), tokens=["each", "all"]
    )
    assert all(
        np.array_equal(cut[name], whole[name]) for name in ("value", "std", "low", "high")
    )


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"valid": [i != 4 for i in range(10)]}, [0, 1, 2, 3, 5, 6, 7, 8, 9]),
        ({"slabs": [0, 2]}, [0, 1, 2, 3, 8, 9]),
        ({"images": 6}, range(6)),
    ],
)
def test_which_images_count(
    tmp_path: Path, more: dict[str, Any], kept: Sequence[int]
) -> None:
    """Valid ones of the committed slabs; the first of a shuffled store."""
    images = more.pop("images", None)
    table = run(vit(tmp_path / "a.zarr", 10, **more), images=images, seed=5)
    products = {
        site: products_of(*random_branches(10, 7, i))[list(kept)]
        for i, site in enumerate(SITES)
    }
    without = run(write_residuals(tmp_path / "b.zarr", products))
    for name in ("value", "std", "low", "high", "n_images"):
        assert np.array_equal(table[name], without[name])
    left = table.notes["images"]["a"].get("left_out_invalid", 0)
    assert left == ("valid" in more)


def test_a_store_in_the_data_set_s_order(tmp_path: Path) -> None:
    store = vit(tmp_path / "a.zarr", 60, order="dataset")
    once = run(store, seed=1)
    assert equal(once, run(store, seed=1, jobs=2))
    other = run(store, seed=2)
    assert np.array_equal(once["value"], other["value"])
    blocked = once["metric"] == "norm_ratio_geomean"
    assert not np.array_equal(once["std"][blocked], other["std"][blocked])
    assert set(run(store, images=10)["n_images"].tolist()) == {10}


# ---------------------------------------------------------------- tokens and sublayers


def tokens_of(table: Table) -> list[Any]:
    return list(
        dict.fromkeys(
            zip(*(table[name].tolist() for name in ("token", "row", "col")), strict=True)
        )
    )


def test_tokens(tmp_path: Path) -> None:
    layout = TokenLayout(("cls", "reg0", "reg1"), (2, 2), stride_px=(14.0, 14.0))
    store = vit(tmp_path / "a.zarr", layout=layout)
    prefix = [(name, None, None) for name in ("cls", "reg0", "reg1")]
    cells = [("", row, col) for row in range(2) for col in range(2)]
    cls, registers, patches = (
        (name, None, None) for name in ("cls", "registers", "patches")
    )
    assert tokens_of(run(store)) == [*prefix, *cells]
    assert tokens_of(run(store, tokens=["cls"])) == [cls]
    assert tokens_of(run(store, tokens=["prefix"])) == [cls, registers]
    assert tokens_of(run(store, tokens=["patches"])) == [patches]
    assert tokens_of(run(store, tokens=["all"])) == [cls, registers, patches]
    assert tokens_of(run(store, tokens=["1,0", "cls", "1,0"])) == [cells[2], cls]
    each, kinds = run(store), run(store, tokens=["all"])
    for metric in DEFAULT_METRICS:
        for site in SITES:
            one = each.filter(metric=metric, site=site)["value"]
            found = kinds.filter(metric=metric, site=site)["value"]
            assert found == pytest.approx(
                [one[0], one[1:3].mean(), one[3:].mean()], rel=1e-14
            )


@pytest.mark.slow
def test_tokens_that_are_no_grid_are_numbered(tmp_path: Path) -> None:
    layout = TokenLayout((), None, rows=7)
    store = vit(tmp_path / "a.zarr", layout=layout)
    assert tokens_of(run(store)) == [(str(i), None, None) for i in range(7)]
    plot(run(store))


def test_one_location_is_a_token_and_all_of_them(tmp_path: Path) -> None:
    table = run(cnn(tmp_path / "r.zarr"), tokens=["each", "patches"]).filter(
        site="layer3.0"
    )
    for rows in table.frame.partition_by("metric"):
        assert rows["value"][0] == rows["value"][1]
        assert rows["low"][0] == rows["low"][1]


def test_two_stores_of_two_families(tmp_path: Path, caplog: Any) -> None:
    a, b = vit(tmp_path / "vit.zarr"), cnn(tmp_path / "resnet.zarr", 15)
    with caplog.at_level("INFO"):
        table = run(a, b, tokens=["cls", "patches"])
    assert "resnet has no tokens 'cls' in 3 of 3 sublayers" in caplog.text
    assert [*dict.fromkeys(table["store"])] == ["vit", "resnet"]
    assert equal(table.filter(store="vit"), run(a, tokens=["cls", "patches"]))
    assert equal(table.filter(store="resnet"), run(b, tokens=["patches"]))
    assert set(table.filter(store="resnet")["n_images"].tolist()) == {15}
    with pytest.raises(SiteError, match=r"^resnet has no tokens 'cls'"):
        run(a, b, tokens=["cls"])
    with pytest.raises(SiteError, match=r"^resnet has no tokens 'cls'"):
        run(b, tokens=["cls", "patches"])
    with pytest.raises(SiteError, match=r"no tokens '2,0' .*grid of 2 x 3"):
        run(a, tokens=["2,0"])


def test_a_cell_that_only_some_grids_have(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level("INFO"):
        table = run(cnn(tmp_path / "r.zarr"), tokens=["1,2"])
    assert "r has no tokens '1,2' in 1 of 3 sublayers (layer3.0:" in caplog.text
    assert [*dict.fromkeys(table["site"])] == ["layer1.0", "layer2.0"]


def test_sublayers(tmp_path: Path) -> None:
    a, b = vit(tmp_path / "a.zarr"), cnn(tmp_path / "r.zarr")

    def chosen(*stores: Store, sites: Sequence[str]) -> list[str]:
        return [*dict.fromkeys(run(*stores, sites=sites, metrics=["norm_ratio"])["site"])]

    assert chosen(a, sites=["blocks"]) == list(SITES)
    assert chosen(a, sites=["mlp"]) == [SITES[1], SITES[3]]
    assert chosen(a, sites=["blocks.*.attn", "blocks.0.mlp"]) == [*SITES[:2], SITES[2]]
    assert chosen(a, sites=["blocks.-1.mlp"]) == [SITES[3]]
    assert chosen(a, b, sites=["attn", "layer1.*"]) == [SITES[0], SITES[2], "layer1.0"]
    with pytest.raises(SiteError, match=r"no site matches 'attn'; .*layer1.0"):
        chosen(a, b, sites=["attn"])
    with pytest.raises(SiteError, match=r"no site matches 'blocks\.7\.mlp'"):
        chosen(a, b, sites=["blocks.7.mlp", "blocks"])


# ---------------------------------------------------------------- refusals


def test_refusals(tmp_path: Path) -> None:
    reason = {"residual": "no block whose branches are known"}
    plain = write_residuals(tmp_path / "b.zarr", {}, n_images=3, left_out=reason)
    without = write_residuals(tmp_path / "c.zarr", {}, n_images=3)
    cases: list[tuple[Store, dict[str, Any], str]] = [
        (plain, {}, "^b has no products .*: no block whose"),
        (without, {}, "^c has no products .*--no-residual"),
        (
            vit(tmp_path / "a.zarr"),
            {"metrics": ["ratio"]},
            "no metric 'ratio'; .*norm_ratio",
        ),
        (vit(tmp_path / "n.zarr", 3, valid=[0, 0, 0]), {}, "no readable image"),
    ]
    for store, choice, line in cases:
        with pytest.raises(VitseeError, match=line):
            run(store, **choice)
