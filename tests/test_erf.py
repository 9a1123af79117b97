"""Effective receptive fields: radii by hand and against loops, and what a user sees."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.command_line import refused, said
from tests.random_stores import PLANS, create, expected, slab_of, tokens_site
from tests.random_stores import write as write_random
from tests.tables import having, unique
from vitsee_core.analyses import erf
from vitsee_core.analyses.erf import (
    COLUMNS,
    METRICS,
    centre_of_mass,
    offset,
    plot,
    radius,
    run,
)
from vitsee_core.figures.fitting import all_axes
from vitsee_core.figures.panels import small_maps
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.tables.results import Table
from vitsee_stores import Store, open_store
from vitsee_stores.errors import MissingInput, VitseeError
from vitsee_stores.layout import ErfPlan, StorePlan, TokenLayout

Array = NDArray[Any]
GRID = TokenLayout(("cls",), (2, 3), stride_px=(4.0, 4.0))
SITES = ("embed", "blocks.0.attn.branch", "blocks.0.out", "blocks.1.out")
SIZE = (8, 12)


def write(
    path: Path,
    fields: Mapping[str, Array],
    counts: Array,
    *,
    slab: int = 4,
    n_images: int | None = None,
    slabs: list[int] | None = None,
    order: str = "shuffled",
) -> Store:
    """A store with these fields, site -> (slabs, H, W) sums over `counts` images."""
    n_erf = len(counts) * slab
    sites = tuple(
        tokens_site(name, GRID, dim=2, depth=i, tokens="pooled")
        for i, name in enumerate(SITES)
    )
    alias = tokens_site("blocks.1.in", GRID, dim=2, alias_of="blocks.0.out")
    size = next(iter(fields.values())).shape[1:]
    kept = ErfPlan(n_erf, tuple(fields), (size[0], size[1]))
    plan = StorePlan(n_images or n_erf, slab, "none", (*sites, alias), erf=kept)
    whole = dict(expected(plan))
    whole |= {f"erf/{name}": field.astype(np.float32) for name, field in fields.items()}
    whole["erf/count"] = np.asarray(counts, np.int64)
    writer = create(path, plan, order=order)
    for k in range(plan.n_slabs) if slabs is None else slabs:
        writer.write_slab(k, slab_of(plan, whole, k), {})
    writer.finish()
    return open_store(path, label=path.stem, allow_partial=slabs is not None)


def blobs(n: int, seed: int = 0) -> dict[str, Array]:
    """Sums of spread squares for all but one site."""
    rng = np.random.default_rng(seed)
    return {name: rng.random((n, *SIZE)) ** 4 for name in SITES if name != "embed"}


# numbers --------------------------------------------------------------------------------------


def slow_radius(field: Array, share: float) -> float:
    """By loops over pixels."""
    total = math.fsum(field.ravel().tolist())
    y0 = math.fsum(y * v for (y, _), v in np.ndenumerate(field)) / total
    x0 = math.fsum(x * v for (_, x), v in np.ndenumerate(field)) / total
    ring: dict[float, float] = {}
    for (y, x), v in np.ndenumerate(field):
        if v > 0:
            at = round(math.hypot(y - y0, x - x0), 9)
            ring[at] = ring.get(at, 0.0) + float(v)
    inside, before = 0.0, 0.0
    for at in sorted(ring):
        if inside + ring[at] >= share * total:
            return before + (at - before) * (share * total - inside) / ring[at]
        inside, before = inside + ring[at], at
    return before


def test_radii_by_hand() -> None:
    point = np.zeros((5, 7))
    point[1, 2] = 3
    assert radius(point, 0.5) == radius(point, 0.9) == 0
    assert centre_of_mass(point) == (1, 2)
    assert offset(point) == math.hypot(1, 1)
    # mass 4 in the middle and 1 on each of four neighbours: 0.5 within 0, then 0.4 / 0.5 of a pixel
    cross = np.zeros((5, 5))
    cross[2, 2], cross[1, 2], cross[3, 2], cross[2, 1], cross[2, 3] = 4, 1, 1, 1, 1
    assert radius(cross, 0.5) == 0
    assert radius(cross, 0.9) == pytest.approx(0.8)
    # four pixels around a corner, all at sqrt(1/2): the mass grows from 0 to there
    square = np.zeros((4, 4))
    square[1:3, 1:3] = 7
    assert radius(square, 0.5) == pytest.approx(0.5 * math.sqrt(0.5))
    assert offset(square) == 0
    assert math.isnan(radius(np.zeros((3, 3)), 0.5))
    assert math.isnan(offset(np.zeros((3, 3))))


def test_two_box_filters_and_a_disc() -> None:
    profile = np.array([1, 2, 3, 2, 1.0])
    field = np.zeros((11, 11))
    field[3:8, 3:8] = np.outer(profile, profile)
    # cumulated mass at 0, 1, sqrt 2, 2, ...: 9, 33, 49, 61 of 81
    assert radius(field, 0.5) == pytest.approx(1 + (40.5 - 33) / 16 * (math.sqrt(2) - 1))
    y, x = np.mgrid[-40:41, -40:41]
    disc = (np.hypot(y, x) <= 30).astype(float)
    # of a disc's mass the share p lies within sqrt(p) of its radius, up to a pixel's half
    assert radius(disc, 0.5) == pytest.approx(30 * math.sqrt(0.5), abs=0.5)
    assert radius(disc, 0.9) == pytest.approx(30 * math.sqrt(0.9), abs=0.5)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([0.5, 0.9]),
)
def test_radius_against_a_loop_and_its_invariances(
    seed: int, h: int, w: int, p: float
) -> None:
    rng = np.random.default_rng(seed)
    field = rng.random((h, w)) * (rng.random((h, w)) < 0.7)
    field[h // 2, w // 2] += 0.1
    found = radius(field, p)
    assert found == pytest.approx(slow_radius(field, p), rel=1e-6, abs=1e-8)
    # scale, mirror, transposition, place
    moved = np.pad(field, ((2, 0), (1, 5)))
    for other in (1e-7 * field, field[::-1], field[:, ::-1], field.T, moved):
        assert radius(other, p) == pytest.approx(found, rel=1e-9, abs=1e-9)
    assert radius(field, 0.5) <= radius(field, 0.9) <= math.hypot(h, w)


def test_squares() -> None:
    field = np.random.default_rng(0).random((113, 60))
    step, cells = erf.squares(field)
    assert step == 3
    assert cells.shape == (38, 20)
    for i, j in np.ndindex(cells.shape):
        wanted = field[3 * i : 3 * i + 3, 3 * j : 3 * j + 3].mean()
        assert cells[i, j] == pytest.approx(wanted, rel=1e-12)
    assert erf.squares(field[:56])[0] == 2
    small = field[:56, :56]
    assert erf.squares(small)[0] == 1
    np.testing.assert_array_equal(erf.squares(small)[1], small)


def test_table(tmp_path: Path) -> None:
    fields, counts = blobs(3), np.array([4, 0, 2])
    for field in fields.values():
        field[1] = 0
    store = write(tmp_path / "a.zarr", fields, counts, n_images=17)
    table = run(store)
    assert tuple(table.written.columns) == COLUMNS
    assert unique(table, "site") == list(SITES[1:])
    for site, field in fields.items():
        mean = field.astype(np.float32).astype(float).sum(0) / 6
        rows = having(table, site=site)
        for metric, p in (("radius50_px", 0.5), ("radius90_px", 0.9)):
            (row,) = np.flatnonzero(rows["metric"] == metric)
            assert rows["value"][row] == pytest.approx(slow_radius(mean, p), rel=1e-7)
            assert rows["row"][row] is None
            assert np.isnan([rows[name][row] for name in ("std", "low", "high")]).all()
        cells = rows.filter(metric="gradient")
        y, x = cells["row"].astype(int), cells["col"].astype(int)
        np.testing.assert_allclose(cells["value"].astype(float), mean[y, x], rtol=1e-12)
        assert len(cells) == SIZE[0] * SIZE[1]
    assert set(table["n_images"].tolist()) == {6}
    assert table.notes["images"]["a"] == {"images": 6, "slabs": 3, "chosen": "all"}
    assert table["depth"][0] == 1


def test_jackknife_over_slabs(tmp_path: Path) -> None:
    fields, counts = blobs(12), np.array([4] * 10 + [0, 3])
    for field in fields.values():
        field[10] = 0
    store = write(tmp_path / "a.zarr", fields, counts)
    table = run(store, metrics=["radius50_px", "offset_px"], sites=["blocks.0.out"])
    field = fields["blocks.0.out"].astype(np.float32).astype(float)
    used = [k for k in range(12) if k != 10]
    for row, function in enumerate((lambda f: slow_radius(f, 0.5), offset)):
        without = [function(sum(field[j] for j in used if j != k)) for k in used]
        mean = math.fsum(without) / 11
        error = math.sqrt(10 / 11 * math.fsum((v - mean) ** 2 for v in without))
        value = function(field.sum(0))
        assert table["value"][row] == pytest.approx(value, rel=1e-6)
        assert table["std"][row] == pytest.approx(error * math.sqrt(43), rel=1e-5)
        assert table["low"][row] == pytest.approx(
            value - t_quantile(10) * error, rel=1e-5
        )
        assert table["high"][row] == pytest.approx(
            value + t_quantile(10) * error, rel=1e-5
        )


def test_choosing_images_and_sites(tmp_path: Path) -> None:
    counts = np.array([4, 3, 4, 4])
    store = write(tmp_path / "a.zarr", blobs(4), counts)
    some = run(store, images=5, metrics=["radius50_px"])
    assert set(some["n_images"].tolist()) == {7}
    assert some.notes["images"]["a"]["chosen"] == "5, rounded up to 2 whole slabs"
    first = write(
        tmp_path / "b.zarr", {n: f[:2] for n, f in blobs(4).items()}, counts[:2]
    )
    assert some["value"].tolist() == run(first, metrics=["radius50_px"])["value"].tolist()
    assert set(run(store, images=99)["n_images"].tolist()) == {15}
    ordered = write(tmp_path / "c.zarr", blobs(4), counts, order="dataset")
    seeds = [run(ordered, images=4, seed=s, metrics=["radius50_px"]) for s in range(8)]
    assert len({table["value"][0] for table in seeds}) > 1
    assert unique(run(store, sites=["blocks.1.in"]), "site") == ["blocks.0.out"]
    assert unique(run(store, sites=["blocks.-1.out"]), "site") == ["blocks.1.out"]
    with pytest.raises(MissingInput, match=r"a has no receptive field of embed"):
        run(store, sites=["embed"])
    with pytest.raises(VitseeError, match=r"no metric 'radius'"):
        run(store, metrics=["radius"])
    with pytest.raises(VitseeError, match=r"positive number"):
        run(store, images=0)


def test_committed_slabs_only(tmp_path: Path) -> None:
    counts = np.array([4, 3, 4])
    fields = blobs(3)
    store = write(tmp_path / "a.zarr", fields, counts, slabs=[0, 2])
    both = write(
        tmp_path / "b.zarr", {n: f[[0, 2]] for n, f in fields.items()}, counts[[0, 2]]
    )
    assert run(store)["value"].tolist() == run(both)["value"].tolist()
    assert set(run(store)["n_images"].tolist()) == {8}


@pytest.mark.slow
def test_a_branch_that_is_zero(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = blobs(2)
    fields["blocks.0.attn.branch"][:] = 0
    store = write(tmp_path / "a.zarr", fields, np.array([4, 4]))
    table = run(store)
    assert (
        "a: the gradient is 0 everywhere at blocks.0.attn.branch: no radius"
        in caplog.text
    )
    zero = table.filter(site="blocks.0.attn.branch")
    assert np.isnan(zero.filter(metric="radius50_px")["value"].astype(float)).all()
    assert not zero.filter(metric="gradient")["value"].astype(float).any()
    plot(table)
    empty = write(tmp_path / "e.zarr", blobs(2), np.array([0, 0]))
    with pytest.raises(VitseeError, match=r"e has no readable image"):
        run(empty)


# figures --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_figure_from_the_columns_alone(tmp_path: Path) -> None:
    a = write(tmp_path / "a.zarr", blobs(2), np.array([4, 4]))
    b = write(tmp_path / "b.zarr", blobs(12, seed=1), np.array([4] * 12))
    run(a, b).write(tmp_path / "r.csv")
    figure = plot(Table.read(tmp_path / "r.csv"))
    every = [axes for axes in figure.get_axes() if axes.get_images() and axes.get_title()]
    assert len(every) == 6
    labels = {axes.get_ylabel().replace("\n", " ") for axes in all_axes(figure)}
    assert "radius of 50 % of the mass (px)" in labels
    unit = ": gradient as a share of each map's largest"
    titles = {part.get_suptitle().replace("\n", " ") for part in figure.subfigs}
    assert {f"a (n = 8){unit}", f"b, attention (n = 48){unit}"} <= titles
    for metric in METRICS:
        plot(run(a, metrics=[metric]))


def test_many_blocks_are_thinned_out(tmp_path: Path) -> None:
    rows = [
        {
            "store": "deep", "site": f"blocks.{i}.out", "rel_depth": i / 39, "row": 2 * y,
            "col": 2 * x, "metric": "gradient", "value": float(y == x), "n_images": 5,
        }
        for i in range(40) for y in range(3) for x in range(4)
    ]  # fmt: skip
    figure = plot(Table.from_rows(rows))
    titles = [a.get_title() for a in figure.get_axes() if a.get_title()]
    assert 5 < len(titles) == small_maps(99).across
    assert (titles[0], titles[-1]) == ("block 0", "block 39")
    assert f"n = 5; {len(titles)} of 40 blocks" in figure.get_suptitle()


# what a user sees -----------------------------------------------------------------------------


@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", blobs(2), np.array([4, 4]))
    assert said(tmp_path, "erf", "a.zarr", "-o", "r.csv", "--png", "r.png") == ""
    assert (tmp_path / "r.csv").read_text().startswith(",".join(COLUMNS))
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    sidecar = json.loads((tmp_path / "r.csv.json").read_text())
    assert sidecar["stores"][0]["ablations"] == []
    assert "centre of mass" in sidecar["notes"]["radius"]
    words = ["--metric", "radius50_px", "--sites", "blocks.*.out"]
    lines = said(tmp_path, "erf", "a.zarr", *words).splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("a,random,,blocks.0.out,blocks.0,2,0.6")


def test_missing_input_and_mistakes(tmp_path: Path) -> None:
    write_random(tmp_path / "plain.zarr", PLANS["cnn"])
    write(tmp_path / "a.zarr", blobs(2), np.array([4, 4]))
    out = ["-o", tmp_path / "r.csv", "--png", tmp_path / "r.png"]
    for args, code, line in (
        (
            ["plain.zarr"],
            1,
            "plain holds no receptive fields (extract it with --erf 256 -o NEW",
        ),
        (["a.zarr", "--sites", "embed"], 1, "extract it with --erf 256"),
        (["a.zarr", "--sites", "nothing"], 1, "no site matches 'nothing'"),
        (["a.zarr", "--metric", "nothing"], 2, "Invalid value for '--metric'"),
    ):
        assert line in refused("erf", tmp_path / args[0], *args[1:], *out, code=code)
    assert not list(tmp_path.glob("r.*"))
