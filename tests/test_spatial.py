"""Spatial structure of patch tokens: against hand, loops and known fields."""

from __future__ import annotations

import cmath
import math
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from PIL import Image

from tests.extractions import VIT, extracted, plant_images
from tests.stores import write_sites
from tests.tables import having, unique
from vitsee_cli.main import main
from vitsee_core.analyses.spatial import METRICS, plot, run
from vitsee_core.analyses.spatial.structure import (
    IN_TIME,
    TokenSums,
    foreground_cosines,
    frequencies,
    image_structure,
    scaled,
)
from vitsee_core.runtime.streaming import choose_rows
from vitsee_core.tables.results import Table
from vitsee_core.truth.masks import BACKGROUND, FOREGROUND, VOID, ground_truth, open_masks
from vitsee_stores import Store, open_store
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import TokenLayout

Array = NDArray[Any]


def layout(rows: int, cols: int, prefix: tuple[str, ...] = ()) -> TokenLayout:
    return TokenLayout(prefix, (rows, cols), stride_px=(8.0, 8.0))


def field(n: int, rows: int, cols: int, dim: int = 4, seed: int = 0) -> Array:
    """Tokens that resemble their neighbours, about a mean."""
    x = np.random.default_rng(seed).normal(size=(n, rows, cols, dim))
    x = x + np.roll(x, 1, 1) + np.roll(x, 1, 2) + 0.5
    return np.asarray(x, np.float32).astype(np.float64)


# ---------------------------------------------------------------- oracles


def loop_cosines(x: Array) -> dict[int, list[float]]:
    """Manhattan distance -> cosines of all pairs of one image."""
    rows, cols = x.shape[:2]
    cells = [(r, c) for r in range(rows) for c in range(cols) if np.any(x[r, c])]
    found: dict[int, list[float]] = {}
    for i, (r, c) in enumerate(cells):
        for a, b in cells[:i]:
            u, v = x[r, c], x[a, b]
            cosine = float(u @ v) / math.sqrt(float(u @ u) * float(v @ v))
            found.setdefault(abs(r - a) + abs(c - b), []).append(cosine)
    return found


def loop_structure(x: Array) -> dict[str, float]:
    by = loop_cosines(x)
    found = {}
    side = max(x.shape[:2])
    own = [max(2, round(cells * side / 16)) for cells in (6, 8)]
    for name, far, reach in (("", 6, 8), ("_scaled", *own)):
        distant = [v for d, values in by.items() if d >= far for v in values]
        found[f"lds{name}"] = (
            statistics.fmean(by[1]) - statistics.fmean(distant) if distant else math.nan
        )
        there = all(d in by for d in range(1, reach + 1))
        means = [statistics.fmean(by[d]) for d in range(1, reach + 1)] if there else []
        found[f"cds{name}"] = (
            -np.polyfit(range(1, reach + 1), means, 1)[0] if there else math.nan
        )
    found["mean_cos"] = statistics.fmean(v for values in by.values() for v in values)
    units = [u / np.linalg.norm(u) for u in x.reshape(-1, x.shape[-1]) if np.any(u)]
    mean = sum(units) / len(units)
    found["rmsc"] = math.sqrt(
        statistics.fmean(float((u - mean) @ (u - mean)) for u in units)
    )
    return found


def loop_fourier(x: Array, ky: int, kx: int) -> float:
    """Mean over channels of log(|sum_t x_t e^(-2 pi i k t)| + 1e-6)."""
    rows, cols, dim = x.shape
    logs = []
    for d in range(dim):
        total = 0j
        for r in range(rows):
            for c in range(cols):
                total += x[r, c, d] * cmath.exp(
                    -2j * math.pi * (ky * r / rows + kx * c / cols)
                )
        logs.append(math.log(abs(total) + 1e-6))
    return statistics.fmean(logs)


def loop_shares(x: Array) -> tuple[float, float]:
    """Of (images, tokens, dim)."""
    mean = x.mean((0, 1))
    total = math.fsum(float((v - mean) @ (v - mean)) for image in x for v in image)
    image = math.fsum(float(((one.mean(0) - mean) ** 2).sum()) for one in x) * x.shape[1]
    places = math.fsum(
        float(((x[:, t].mean(0) - mean) ** 2).sum()) for t in range(x.shape[1])
    ) * len(x)
    return image / total, places / total


# ---------------------------------------------------------------- pure functions


def test_by_hand() -> None:
    # A row of nine tokens that turn by 10 degrees each: cos(d) = cos(10 d degrees).
    angle = np.deg2rad(10) * np.arange(9)
    x = (
        np.stack([np.cos(angle), np.sin(angle)], -1)
        .reshape(1, 1, 9, 2)
        .astype(np.float32)
    )
    found = image_structure(x)
    cosines = [math.cos(math.radians(10 * d)) for d in range(9)]
    # Three, two and one pairs at distances 6, 7, 8
    far = (3 * cosines[6] + 2 * cosines[7] + cosines[8]) / 6
    # float32 tokens
    assert found.values["lds"][0] == pytest.approx(cosines[1] - far, rel=1e-6)
    slope = np.polyfit(range(1, 9), cosines[1:], 1)[0]
    assert found.values["cds"][0] == pytest.approx(-slope, rel=1e-6)
    everything = sum((9 - d) * cosines[d] for d in range(1, 9)) / 36
    assert found.values["mean_cos"][0] == pytest.approx(everything, rel=1e-6)
    assert found.values["rmsc"][0] == pytest.approx(
        math.sqrt((1 - everything) * 8 / 9), rel=1e-6
    )
    # |FFT| of a chessboard is 16 at the corner (pi, pi), which the half diagonal of an even side
    # does not reach, and 0 elsewhere; a mean of 1/16 is an amplitude of 1 at frequency 0.
    y, z = np.mgrid[:4, :4]
    board = (np.where((y + z) % 2, -1.0, 1.0) + 1 / 16)[np.newaxis, ..., np.newaxis]
    assert image_structure(board).values["fourier_high"][0] == pytest.approx(
        math.log(1e-6) - math.log(1 + 1e-6), rel=1e-6
    )
    assert frequencies((4, 4)).tolist() == [0.5, 1.0]
    # frequency (pi, pi) is at distance 2.83 of 4, a ring of its own beyond the last
    assert image_structure(board).profile.shape == (1, 2)


def test_distances_of_other_grids() -> None:
    assert [scaled(6, (n, n)) for n in (16, 8, 14, 37, 4)] == [6, 3, 5, 14, 2]
    assert [scaled(8, (n, n)) for n in (16, 8, 14, 24)] == [8, 4, 7, 12]


@pytest.mark.parametrize("grid", [(7, 7), (5, 8), (3, 4), (10, 2)])
def test_against_loops(grid: tuple[int, int]) -> None:
    cells = field(2, *grid)
    cells[1, 1, 1] = 0  # a token without direction
    found = image_structure(cells)
    assert found.n_zero == 1
    for i, x in enumerate(cells):
        for name, value in loop_structure(x).items():
            # cosines by FFT
            close = pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True)
            assert found.values[name][i] == close, name
        base, rows, cols = loop_fourier(x, 0, 0), *grid
        if rows == cols:
            last = (rows - 1) // 2
            high = loop_fourier(x, last, last) - base
            assert found.values["fourier_high"][i] == pytest.approx(high, rel=1e-9)
        else:
            assert math.isnan(found.values["fourier_high"][i])
        rings: dict[int, list[float]] = {}
        for ky in range(rows):
            for kx in range(cols):
                fy, fx = min(ky, rows - ky) / rows, min(kx, cols - kx) / cols
                ring = round(math.hypot(fy, fx) * max(grid))
                rings.setdefault(ring, []).append(loop_fourier(x, ky, kx) - base)
        expected = [statistics.fmean(rings[k]) for k in range(1, max(grid) // 2 + 1)]
        assert found.profile[i] == pytest.approx(expected, rel=1e-8)


def test_one_cell_and_alike_patches() -> None:
    one = image_structure(np.ones((3, 1, 1, 4)))
    assert all(np.isnan(values).all() for values in one.values.values())
    assert one.profile.shape == (3, 0)
    alike = image_structure(np.ones((1, 9, 9, 4))).values
    assert alike["mean_cos"][0] == pytest.approx(1)
    for name in ("lds", "cds", "rmsc"):
        assert alike[name][0] == pytest.approx(0, abs=1e-7)


def test_foreground_by_hand_and_loops() -> None:
    x = field(1, 4, 8)[0]
    labels = np.full((4, 8), BACKGROUND, np.uint8)
    labels[1, :2], labels[3, 0], labels[0, 7] = FOREGROUND, FOREGROUND, VOID
    expected = []
    for r, c in ((1, 0), (1, 1), (3, 0)):
        near, far = [], []
        for a in range(4):
            for b in range(8):
                d = abs(r - a) + abs(c - b)
                cosine = float(
                    x[r, c] @ x[a, b] / np.linalg.norm(x[r, c]) / np.linalg.norm(x[a, b])
                )
                if labels[a, b] == FOREGROUND and d == 1:
                    near.append(cosine)
                if labels[a, b] == BACKGROUND and d >= 6:
                    far.append(cosine)
        if near and far:
            expected.append(statistics.fmean(near) - statistics.fmean(far))
    assert len(expected) == 2  # the lone one at (3, 0) has no neighbour
    found = foreground_cosines(x, labels.ravel())
    assert found == pytest.approx(statistics.fmean(expected), rel=1e-12)
    assert math.isnan(foreground_cosines(x, np.full(32, VOID, np.uint8)))
    # Objects of one direction, background of the orthogonal one: 1 - 0.
    y = np.where((labels == FOREGROUND)[..., np.newaxis], [1.0, 0], [0, 3.0])
    assert foreground_cosines(y, labels.ravel()) == 1


def test_shares_of_pure_effects_and_of_noise() -> None:
    rng = np.random.default_rng(0)
    of_image, of_place = rng.normal(size=(30, 1, 5)), rng.normal(size=(1, 12, 5))
    both = np.broadcast_arrays(of_image, of_place)
    assert TokenSums.of(both[0].copy()).shares()["share_image"] == pytest.approx(
        1, rel=1e-12
    )
    assert TokenSums.of(both[1].copy()).shares()["share_position"] == pytest.approx(
        1, rel=1e-12
    )
    summed = TokenSums.of(of_image + of_place).shares()
    assert summed["share_rest"] == pytest.approx(0, abs=1e-12)
    # Noise of 500 channels: the standard error of a share is about sqrt(2 x share / (500 x T)).
    noise = TokenSums.of(rng.normal(size=(30, 12, 500)))
    for name, value in noise.nulls().items():
        assert noise.shares()[name] == pytest.approx(value, rel=0.05)
    assert noise.nulls()["share_image"] == 29 / 359


# ---------------------------------------------------------------- the analysis


@pytest.mark.slow
def test_the_table_against_loops(tmp_path: Path) -> None:
    x = field(23, 7, 7).reshape(23, 49, 4)
    with_prefix = np.concatenate([np.full((23, 1, 4), 9.0), x], 1)
    valid = [i != 5 for i in range(23)]
    store = write_sites(
        tmp_path / "a.zarr", {"embed": with_prefix}, layout=layout(7, 7, ("cls",)), slab=6,
        valid=valid,
    )  # fmt: skip
    table = run(store)
    kept = x[np.array(valid)]
    blocks = np.arange(22) * 20 // 22
    expected = [loop_structure(one.reshape(7, 7, 4)) for one in kept]
    for name in expected[0]:
        values = np.array([one[name] for one in expected])
        rows = having(table, metric=name)
        assert rows["value"][0] == pytest.approx(values.mean(), rel=1e-9)
        assert rows["std"][0] == pytest.approx(values.std(ddof=1), rel=1e-7)
        assert rows.replicates is not None
        assert rows.replicates[0][3] == pytest.approx(
            values[blocks != 3].mean(), rel=1e-9
        )
    for keep, column in ((blocks >= 0, None), (blocks != 3, 3)):
        image, place = loop_shares(kept[keep])
        for name, value in (("share_image", image), ("share_position", place)):
            rows = having(table, metric=name)
            found = rows["value"][0] if column is None else rows.replicates[0][column]  # type: ignore[index]
            assert found == pytest.approx(value, rel=1e-10)
    assert table.filter(metric="share_position")["null"][0] == 48 / (22 * 49 - 1)
    assert table.filter(metric="fourier_radial")["frequency"].tolist() == [
        2 / 7,
        4 / 7,
        6 / 7,
    ]
    plot(table)


@pytest.mark.slow
def test_a_figure_of_some_sites(tmp_path: Path) -> None:
    """Of one store profiles are left, of the other only a site of 1 x 1 cells without any."""
    x = field(4, 3, 3).reshape(4, 9, 4)
    a = write_sites(tmp_path / "a.zarr", {"embed": x}, layout=layout(3, 3))
    b = write_sites(tmp_path / "b.zarr", {"embed": x[:, :1]}, layout=layout(1, 1))
    table = run(a, b)
    no_profile = (table["store"] == "b") & (table["metric"] == "fourier_radial")
    figure = plot(table.filter(~no_profile))
    titles = [axes.get_title("left") for axes in figure.axes if axes.get_visible()]
    assert "a" in titles and "b" not in titles


def test_slabs_and_jobs_do_not_matter(tmp_path: Path) -> None:
    x, grid = field(23, 4, 5).reshape(23, 20, 4), layout(4, 5)
    whole = run(write_sites(tmp_path / "a.zarr", {"embed": x}, layout=grid, slab=6))
    cut = run(
        write_sites(tmp_path / "b.zarr", {"embed": x}, layout=grid, slab=23), jobs=3
    )
    # shares are sums of blocks, cut where slabs end
    assert cut["value"] == pytest.approx(whole["value"], rel=1e-11, nan_ok=True)
    assert cut["low"] == pytest.approx(whole["low"], rel=1e-8, nan_ok=True)


@pytest.mark.slow
def test_masks_through_the_command(tmp_path: Path) -> None:
    images = plant_images(tmp_path / "images", 4)
    for file in sorted(p for p in images.rglob("*") if p.is_file())[:3]:
        size = Image.open(file).size
        mask = np.zeros(size[::-1], np.uint8)
        mask[: size[1] // 3, : size[0] // 2] = 1
        place = (tmp_path / "masks" / file.relative_to(images)).with_suffix(".png")
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(place)
    args = ["--model-arg", "patch_size=4", "--dtype", "float32"]
    extracted(*VIT, "--data", images, *args, "-o", tmp_path / "a.zarr")
    out = [
        "-o",
        str(tmp_path / "s.csv"),
        "--png",
        str(tmp_path / "s.png"),
        "--replicates",
    ]
    rest = next(
        (tmp_path / "masks").rglob("*.png")
    )  # one of the masks in a folder of its own
    other = tmp_path / "rest" / rest.relative_to(tmp_path / "masks")
    other.parent.mkdir(parents=True)
    shutil.copy(rest, other)
    apart = tmp_path / "apart"
    shutil.copytree(tmp_path / "masks", apart)
    (apart / rest.relative_to(tmp_path / "masks")).unlink()
    masks = ["--masks", str(apart), "--masks", str(tmp_path / "rest")]
    result = CliRunner().invoke(main, ["spatial", str(tmp_path / "a.zarr"), *masks, *out])
    assert result.exit_code == 0, result.output
    table = Table.read(tmp_path / "s.csv")
    assert set(unique(table, "metric")) == {*METRICS} - {*IN_TIME}
    rows = table.filter(metric="srss")
    assert set(rows["n_images"].tolist()) == {3}
    store = open_store(tmp_path / "a.zarr")
    acts = store.acts(rows["site"][-1], "patches")[:].astype(np.float64)
    grid = store.layout(rows["site"][-1])
    assert grid is not None
    truth = ground_truth(
        store,
        open_masks(tmp_path / "masks"),
        choose_rows(store),
        {"": grid},
        foreground="any",
    )
    on = truth.labels[""]
    assert (on == FOREGROUND).any(1).sum() == 3
    expected = [foreground_cosines(acts[i], on[i]) for i in np.flatnonzero(truth.mask)]
    assert rows["value"][-1] == pytest.approx(statistics.fmean(expected), rel=1e-6)
    plot(table)


def test_metrics_without_a_value_are_refused(tmp_path: Path) -> None:
    """On 3 x 3 tokens none is 6 steps away; the line was one for authors of analyses."""
    store = write_sites(
        tmp_path / "a.zarr",
        {"embed": field(4, 3, 3).reshape(4, 9, 4)},
        layout=layout(3, 3),
        ids=[f"{k}.jpg" for k in range(4)],
        sizes=(3, 3),
        transform={"input_size": (3, 3, 3), "crop_mode": "squash", "crop_pct": 1.0,
                   "interpolation": "nearest", "mean": (0.5,) * 3, "std": (0.5,) * 3},
    )  # fmt: skip
    (tmp_path / "masks").mkdir()
    for k in range(4):
        mask = Image.fromarray(np.eye(3, dtype=np.uint8))
        mask.save(tmp_path / f"masks/{k}.png")
    for metrics in (["srss"], ["lds", "srss"], ["cds"]):
        with pytest.raises(
            VitseeError, match=f"{', '.join(metrics)}: no value .* 6 or more"
        ):
            run(store, masks=tmp_path / "masks", metrics=metrics)
    table = run(store, masks=tmp_path / "masks", metrics=["srss", "lds_scaled"])
    assert np.isnan(table.filter(metric="srss")["value"]).all()


def test_refusals(tmp_path: Path) -> None:
    x, grid = field(4, 3, 3).reshape(4, 9, 4), layout(3, 3)
    store = write_sites(tmp_path / "a.zarr", {"embed": x, "pooled": x[:, 0]}, layout=grid)
    pooled = write_sites(tmp_path / "p.zarr", {"embed": x}, layout=grid, tokens="pooled")
    x[2, 3, 1] = np.nan
    infinite = write_sites(tmp_path / "n.zarr", {"embed": x}, layout=grid)
    cases: list[tuple[Store, dict[str, Any], str]] = [
        (store, {"metrics": ["ldr"]}, "no metric 'ldr'; metrics of spatial: lds, "),
        (store, {"metrics": ["srss"]}, "srss compares foreground .*--masks"),
        (store, {"sites": ["head"]}, "pooled of a has no grid"),
        (pooled, {}, "keeps embed pooled only"),
        (infinite, {}, "embed that are not finite"),
    ]
    for one, choice, line in cases:
        with pytest.raises(VitseeError, match=line):
            run(one, **choice)
