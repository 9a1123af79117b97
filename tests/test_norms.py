"""Token norms, outliers and massive activations: against hand and loops."""

from __future__ import annotations

import math
import statistics
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from tests.extractions import RESNET, VIT, extracted, plant_images
from tests.residuals import products_of
from tests.stores import VIT as LAYOUT
from tests.stores import write_sites
from tests.tables import having, unique
from vitsee_core.analyses.norms import plot, run
from vitsee_core.analyses.norms.site_norms import (
    ACTIVATION_METRICS,
    METRICS,
    NORM_METRICS,
)
from vitsee_core.analyses.norms.stream_norms import (
    bimodality,
    histogram,
    mad_threshold,
    medians_of_half,
    share_above_mad,
)
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.tables.results import Table
from vitsee_stores import Store, open_store
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import TokenLayout

Array = NDArray[Any]

LINE = TokenLayout((), (1, 2), stride_px=(16.0, 16.0))


def value(table: Table, metric: str, **where: Any) -> float:
    (found,) = having(table, metric=metric, **where)["value"].tolist()
    return float(found)


# ---------------------------------------------------------------- by hand


def test_by_hand(tmp_path: Path) -> None:
    # Two images of two patches: norms 5, 200 and 5, 10; channels (3, 4), (0, 200) and (3, 4), (6,
    # -8). Medians of |x|: 3.5 and 5.
    x = np.array([[[3, 4], [0, 200]], [[3, 4], [6, -8]]], float)
    table = run(write_sites(tmp_path / "a.zarr", {"embed": x}, layout=LINE))
    patches = table.filter(token="patches")
    assert value(patches, "norm") == 55.0  # means 102.5 and 7.5
    half = t_quantile(1) * np.std([102.5, 7.5], ddof=1) / math.sqrt(2)
    assert patches.filter(metric="norm")["low"][0] == pytest.approx(55 - half, rel=1e-12)
    assert value(patches, "norm_median") == 7.5  # 5, 5, 10, 200
    assert value(patches, "outlier_share") == 0.25
    # |x - 7.5| = 2.5, 2.5, 2.5, 192.5: the threshold is 7.5 + 6 x 1.4826 x 2.5 = 29.7
    assert value(patches, "outlier_share_mad") == 0.25
    cells = table.filter(row=0)
    assert cells.filter(metric="norm")["value"].tolist() == [5.0, 105.0]
    assert cells.filter(metric="outlier_share")["value"].tolist() == [0.0, 0.5]
    assert value(table, "massive_top1") == 104.0
    assert value(table, "massive_ratio") == pytest.approx(
        (200 / 3.5 + 8 / 5) / 2, rel=1e-12
    )
    assert (
        value(table, "massive_share") == 0.0
    )  # 200 is above 100, but 57 times the median
    # cosines (0.8, and (18 - 32) / 50 = -0.28)
    assert value(table, "neighbour_cos") == pytest.approx((0.8 - 0.28) / 2, rel=1e-12)
    top = table.filter(metric="massive_token_share")
    assert top["at"].tolist() == ["0,1"]
    assert top["value"].tolist() == [1.0]
    assert table.filter(metric="massive_channel_share")["channel"].tolist() == [1]
    bins = table.filter(metric="norm_histogram")
    counts = dict(zip(bins["norm_from"].tolist(), bins["value"].tolist(), strict=True))
    # 5, 10 and 200 lie in the eighths 18 (4.757 to 5.187), 26 and 61 of factors of 2
    assert counts == {2 ** (18 / 8): 0.5, 2 ** (26 / 8): 0.25, 2 ** (61 / 8): 0.25}


def test_a_massive_activation_by_hand(tmp_path: Path) -> None:
    """Sun et al.: above 100 and above 1,000 times the median, each alone is not enough."""
    x = np.full((3, 7, 50), 0.125)
    x[0, 0, 7] = -126  # 1,008 times the median
    x[1, 0, 7] = 124  # 992 times
    x[2] *= 0.125
    x[2, 2, 7] = 99  # 6,336 times, but below 100
    table = run(write_sites(tmp_path / "a.zarr", {"embed": x}))
    assert value(table, "massive_share") == pytest.approx(1 / 3)
    row = table.filter(metric="massive_top1")
    assert (row["channel"][0], row["at"][0]) == (7, "cls")
    assert value(table, "massive_token_share") == pytest.approx(2 / 3)
    assert value(table, "massive_channel_share") == 1.0


def test_bimodality_of_known_samples() -> None:
    labels = np.zeros(1, np.int64)
    rng = np.random.default_rng(0)
    peaks = np.exp(np.where(np.arange(1000) % 2, 1.0, 5.0))[np.newaxis]
    assert bimodality(peaks, labels)[0] == pytest.approx(1.0, abs=1e-9)
    # Monte Carlo errors of the kurtosis of 10^5 draws are below 0.02 of it
    uniform = np.exp(rng.uniform(size=(1, 100_000)))
    assert bimodality(uniform, labels)[0] == pytest.approx(5 / 9, rel=0.02)
    normal = np.exp(rng.normal(size=(1, 100_000)))
    assert bimodality(normal, labels)[0] == pytest.approx(1 / 3, rel=0.06)
    assert math.isnan(bimodality(np.full((2, 3), 7.0), np.arange(2))[0])


def test_the_histogram_leaves_zeros_out() -> None:
    assert histogram(np.array([[0.0, 1.0, 1.0, 2.0]])) == [
        (1.0, 2 ** (1 / 8), 0.5),
        (2.0, 2 ** (9 / 8), 0.25),
    ]


# ---------------------------------------------------------------- against loops


def tokens_of(seed: int = 0, n: int = 23) -> Array:
    """A class token and 2 x 3 patches, some of them large."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 7, 5)) * np.exp(rng.normal(size=(n, 7, 1)))
    x[rng.random((n, 7)) < 0.1] *= 40
    return np.asarray(x, np.float32).astype(np.float64)


def loop(x: Array, metric: str, threshold: float) -> Any:
    """Of (images, 7, channels), by plain Python."""
    norms = [
        [math.sqrt(math.fsum(v * v for v in token)) for token in image] for image in x
    ]
    patches = [norm for image in norms for norm in image[1:]]
    middle = statistics.median(patches)
    if metric == "norm":
        return statistics.fmean(patches)
    if metric == "norm_median":
        return middle
    if metric == "outlier_share":
        return sum(norm > threshold for norm in patches) / len(patches)
    if metric == "outlier_share_mad":
        edge = middle + 6 * 1.4826 * statistics.median(
            abs(norm - middle) for norm in patches
        )
        return sum(norm > edge for norm in patches) / len(patches)
    if metric == "bimodality":
        logs = [math.log(norm) for norm in patches]
        mean = statistics.fmean(logs)
        m2, m3, m4 = (statistics.fmean((v - mean) ** p for v in logs) for p in (2, 3, 4))
        return ((m3 / m2**1.5) ** 2 + 1) / (m4 / m2**2)
    sizes = [[abs(v) for token in image for v in token] for image in x]
    tops = [max(size) for size in sizes]
    ratios = [
        top / statistics.median(size) for top, size in zip(tops, sizes, strict=True)
    ]
    if metric == "massive_top1":
        return statistics.fmean(tops)
    if metric == "massive_ratio":
        return statistics.fmean(ratios)
    if metric == "massive_share":
        pairs = zip(tops, ratios, strict=True)
        return statistics.fmean(top > 100 and ratio > 1000 for top, ratio in pairs)
    assert metric == "neighbour_cos"
    return statistics.fmean(loop_neighbours(image[1:].reshape(2, 3, -1)) for image in x)


def loop_neighbours(cells: Array) -> float:
    means = []
    for r in range(2):
        for c in range(3):
            near = [(r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)]
            cosines = [
                float(cells[r, c] @ cells[a, b])
                / math.sqrt(
                    float(cells[r, c] @ cells[r, c]) * float(cells[a, b] @ cells[a, b])
                )
                for a, b in near
                if 0 <= a < 2 and 0 <= b < 3
            ]
            means.append(statistics.fmean(cosines))
    return statistics.fmean(means)


LOOPED = [m for m in METRICS if m not in ("norm_histogram",) and "_token" not in m]


@pytest.mark.parametrize("metric", [m for m in LOOPED if "channel" not in m])
def test_against_loops(metric: str, tmp_path: Path) -> None:
    x = tokens_of()
    valid = [i not in (4, 11) for i in range(len(x))]
    kept = x[np.array(valid)]
    store = write_sites(tmp_path / "a.zarr", {"embed": x}, valid=valid, slab=5)
    table = having(run(store, threshold=20.0), metric=metric, row=[None])
    row = table.filter(token="patches") if metric in NORM_METRICS else table
    # sums in float64 in another order
    assert row["value"][0] == pytest.approx(loop(kept, metric, 20.0), rel=1e-11)
    assert row["n_images"][0] == 21
    # Replicates: the same without each block of images, of which the last two are one image each.
    blocks = np.arange(21) * 20 // 21
    assert row.replicates is not None
    if metric == "norm_median":  # its replicates are to first order, see test_medians
        return
    for b in (0, 7, 19):
        without = loop(kept[blocks != b], metric, 20.0)
        assert row.replicates[0][b] == pytest.approx(without, rel=1e-10)
    if metric == "bimodality":
        error = math.sqrt(
            19 / 20 * sum((r - row.replicates[0].mean()) ** 2 for r in row.replicates[0])
        )
        assert row["high"][0] - row["value"][0] == pytest.approx(
            t_quantile(19) * error, rel=1e-9
        )


def test_slabs_and_jobs_do_not_matter(tmp_path: Path) -> None:
    x = tokens_of()
    whole = run(write_sites(tmp_path / "a.zarr", {"embed": x}, slab=23))
    cut = run(write_sites(tmp_path / "b.zarr", {"embed": x}, slab=3), jobs=3)
    for name in ("value", "std", "low", "high"):
        assert np.array_equal(whole[name], cut[name], equal_nan=True)


def test_tokens_without_length_have_no_cosine(tmp_path: Path) -> None:
    x = tokens_of(n=4)
    x[0, 1:] = 0  # no patch of an image
    x[1, 2] = 0  # one patch of another
    table = run(write_sites(tmp_path / "a.zarr", {"embed": x}))
    row = table.filter(metric="neighbour_cos")
    assert row["n_images"][0] == 3
    assert np.isfinite(row["value"][0])


# ---------------------------------------------------------------- where norms come from


@pytest.mark.slow
@pytest.mark.parametrize("model", [VIT, RESNET], ids=["vit", "resnet"])
def test_dot_products_give_the_activations_norms(model: Any, tmp_path: Path) -> None:
    images = plant_images(tmp_path / "images", 5)
    more = ["--dtype", "float32", "--slab", "4"]
    extracted(*model, "--data", images, *more, "-o", tmp_path / "all.zarr")
    extracted(
        *model, "--data", images, *more, "--tokens", "pooled", "-o", tmp_path / "few.zarr"
    )
    both, pooled = (open_store(tmp_path / f"{name}.zarr") for name in ("all", "few"))
    table, alone = run(both), run(pooled)
    assert not {*unique(alone, "metric")} & {*ACTIVATION_METRICS}
    sources = table.notes["norms_from"]["all"]
    assert any(source.startswith("residual/") for source in sources.values())
    for site in unique(table, "site"):
        x = both.acts(site, "patches")[:].astype(np.float64)
        expected = np.linalg.norm(x, axis=-1).mean(0).ravel()
        for found in (table, alone) if sources[site] != "activations" else (table,):
            cells = having(found, site=site, metric="norm")
            cells = cells.filter(pl.col("row").is_not_null())
            # products were summed in float32 while extracting
            assert cells["value"] == pytest.approx(expected, rel=2e-5)
    acts = {site for site, source in sources.items() if source == "activations"}
    assert set(unique(alone, "site")) == set(unique(table, "site")) - acts
    plot(table)
    plot(alone)


def test_the_last_block_of_a_transformer_is_a_sum(tmp_path: Path) -> None:
    """And behind an activation function it is none."""
    rng = np.random.default_rng(0)
    z, f = rng.normal(size=(2, 4, 7, 5))
    f[0] = -z[0]  # cancels: rounding of the products is no norm
    acts = {"blocks.0.out": z + f}
    for name, expected in (("blocks.0.mlp", "residual/blocks.0.mlp: z.z + 2 z.f + f.f"),
                           ("blocks.0", "activations")):  # fmt: skip
        store = both_of(tmp_path / f"{name}.zarr", acts, {name: products_of(z, f)})
        table = run(store, metrics=["norm"], tokens=["cls"])
        assert table.notes["norms_from"][store.label] == {"blocks.0.out": expected}
        norms = np.linalg.norm((z + f)[:, 0], axis=-1)
        assert table["value"][0] == pytest.approx(norms.mean(), rel=1e-6)


def both_of(
    path: Path, acts: dict[str, Array], products: dict[str, Array], **more: Any
) -> Store:
    """A store of activations and of dot products."""
    from dataclasses import replace

    import tests.stores as stores

    made = write_sites(path.with_suffix(".tmp.zarr"), acts)
    plan = replace(
        made.plan,
        sublayers=tuple((name, LAYOUT) for name in products),
        places=tuple((name, i, float(i)) for i, name in enumerate(products)),
    )
    values = {f"residual/{name}": array for name, array in products.items()}
    for name, x in acts.items():
        values |= {
            k: v for k, v in stores._parts(name, x, LAYOUT).items() if "gram" not in k
        }
    values = {k: v for k, v in values.items() if not k.endswith("/rows")}
    values.pop("pooled/blocks.0.out/prefix", None)
    return stores.write(path, plan, values, **more)


def test_an_ablated_skip_is_no_sum(tmp_path: Path) -> None:
    z, f = np.random.default_rng(0).normal(size=(2, 4, 7, 5))
    store = both_of(
        tmp_path / "a.zarr",
        {"blocks.0.out": f},
        {"blocks.0.mlp": products_of(z, f)},
        identity={"ablate_skip": ["blocks.0.mlp"]},
    )
    table = run(store, metrics=["norm"], tokens=["cls"])
    assert table["value"][0] == pytest.approx(
        np.linalg.norm(f[:, 0], axis=-1).mean(), rel=1e-6
    )


# ---------------------------------------------------------------- what a user sees


def test_refusals(tmp_path: Path) -> None:
    x = tokens_of(n=4)
    pooled = write_sites(tmp_path / "a.zarr", {"embed": x}, tokens="pooled")
    vectors = write_sites(tmp_path / "v.zarr", {"pooled": np.ones((4, 3))})
    whole = write_sites(tmp_path / "w.zarr", {"embed": x})
    x[2, 3, 1] = np.inf
    infinite = write_sites(tmp_path / "i.zarr", {"embed": x})
    cases: list[tuple[Store, dict[str, Any], str]] = [
        (pooled, {}, "embed pooled only, and no dot products of it: .*=all"),
        (vectors, {"sites": ["head"]}, "pooled of v has no tokens"),
        (whole, {"sites": ["head"]}, "no site matches 'head'"),
        (whole, {"metrics": ["norms"]}, "no metric 'norms'; metrics of norms: norm, "),
        (whole, {"threshold": math.nan}, "threshold is nan; expected"),
        (
            whole,
            {"memory": 2 * 7 * 8 * 5 + 5},
            "take .* of memory; --memory .*images, 2 fit",
        ),
        (infinite, {}, "embed that are not finite, in rows 0 to 3"),
    ]
    for store, choice, line in cases:
        with pytest.raises(VitseeError, match=line):
            run(store, **choice)


@pytest.mark.slow
def test_the_figure(tmp_path: Path) -> None:
    sites = {"embed": tokens_of(), "blocks.0.out": tokens_of(1)}
    store = write_sites(tmp_path / "a.zarr", sites)
    table = run(store)
    assert set(METRICS) == set(unique(table, "metric"))
    figure = plot(table)
    figure.canvas.draw()
    ticks = figure.axes[0].yaxis.get_ticklabels(which="both")
    assert {t.get_text() for t in ticks} & {"1", "2", "5", "10"}, "plain numbers"
    assert not any("times" in t.get_text() for t in ticks)
    few = run(store, metrics=["norm"], tokens=["cls"], sites=["first"])
    assert len(few) == 1
    plot(few)


# ---------------------------------------------------------------- medians without a block


def threshold_of(norms: Array) -> float:
    middle = np.median(norms)
    return float(middle + 6 * 1.4826 * np.median(np.abs(norms - middle)))


@pytest.mark.parametrize("n", [1, 2, 7, 3000])
def test_medians_of_half_precision_are_those_of_numpy(n: int) -> None:
    """With both zeros, values below the normal ones, the largest, and ties."""
    x = np.random.default_rng(n).standard_cauchy((5, n)).astype(np.float16)
    x[0], x[1] = np.resize([-0.0, 0.0, 6e-8, -65504], n), np.resize([2, -2, 2.5], n)
    expected = np.median(np.abs(x).astype(np.float64), axis=1)
    np.testing.assert_allclose(medians_of_half(x), expected, rtol=1e-7)


def test_the_median_of_half_precision_by_hand() -> None:
    x = np.array([[-3, 1, 2, -8], [0, -0.0, 5, 0]], np.float16)
    assert medians_of_half(x).tolist() == [2.5, 0.0]


@pytest.mark.parametrize(("n", "tokens", "blocks"), [(1, 1, 1), (5, 1, 5), (41, 3, 20)])
@pytest.mark.parametrize("ties", [False, True])
def test_medians_in_order_are_those_of_numpy(
    n: int, tokens: int, blocks: int, ties: bool
) -> None:
    rng = np.random.default_rng(n)
    norms = rng.standard_cauchy((n, tokens)) ** 2
    norms = np.round(norms) if ties else norms
    labels = rng.permutation(np.arange(n) * blocks // n)
    kept = [norms[labels != b] for b in range(blocks)]
    assert mad_threshold(norms) == threshold_of(norms)

    def share_above(x: Array) -> float:
        return float((x > threshold_of(x)).mean()) if x.size else np.nan

    share, without = share_above_mad(norms, labels)
    assert share == share_above(norms)
    np.testing.assert_array_equal(without, [share_above(x) for x in kept])


@pytest.mark.slow
@pytest.mark.parametrize("measure", [share_above_mad, bimodality])
def test_what_norms_take_beside_them_is_bounded(measure: Any) -> None:
    norms = np.random.default_rng(0).random((50_000, 20))
    labels = np.arange(len(norms)) * 20 // len(norms)
    measure(norms[:100], labels[:100])
    tracemalloc.start()
    measure(norms, labels)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3.5 * norms.nbytes  # once as many copies as blocks
