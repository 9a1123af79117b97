"""Head types: scores by hand and loops, attention of known type, and what a user sees."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from tests.attention_maps import (
    Attention,
    Float,
    aligned,
    layout,
    random_attention,
    write,
)
from tests.stores import write_attention
from vitsee_cli.main import main
from vitsee_core.analyses.head_types import AGREEMENT, COLUMNS, SCORES, plot, run
from vitsee_core.analyses.head_types.head_geometry import (
    DIRECTIONS,
    SHAPE_SCORES,
    TYPES,
    Scores,
    Thresholds,
    classify,
    direction,
    excess,
    measure,
    repetition,
)
from vitsee_core.attention.head_maps import query_coverage, uniform_map
from vitsee_core.statistics.jackknife import standard_error
from vitsee_core.statistics.moments import t_quantile
from vitsee_stores.errors import MissingInput, VitseeError

Array = NDArray[Any]
Kernel = Callable[[Array, Array], Array]
GRIDS = [(7, 7), (14, 14), (6, 10)]


def attention(grid: tuple[int, int], kernel: Kernel) -> Float:
    """(cells, cells): each query's keys weighted by `kernel(dy, dx)`, cut at the rim."""
    cell = np.arange(grid[0] * grid[1])
    y, x = cell // grid[1], cell % grid[1]
    a = kernel(y[None] - y[:, None], x[None] - x[:, None]).astype(np.float64)
    empty = a.sum(1) == 0
    a[empty, cell[empty]] = 1  # nobody there: at itself
    return np.asarray(a / a.sum(1, keepdims=True))


def gauss(
    sigma: float, y: float = 0, x: float = 0, across: float | None = None
) -> Kernel:
    other = sigma if across is None else across
    return lambda dy, dx: np.exp(
        -((dx - x) ** 2) / (2 * sigma**2) - (dy - y) ** 2 / (2 * other**2)
    )


def aligned_map(grid: tuple[int, int], kernel: Kernel) -> Float:
    return aligned(attention(grid, kernel), layout(grid, ()))


NOT_REPEATING = {"keys_share": 1.0, "query_repetition": 0.0}
KNOWN: dict[str, tuple[str, str, Kernel]] = {
    "identity": ("strict local", "", lambda dy, dx: (dy == 0) & (dx == 0)),
    "sharp": ("strict local", "", gauss(0.4)),
    "soft": ("soft local", "", gauss(1.0)),
    "ring": ("soft local", "", lambda dy, dx: np.maximum(abs(dy), abs(dx)) == 1),
    "row": ("axial local", "row", lambda dy, dx: (dy == 0) * np.exp(-abs(dx) / 1.5)),
    "column": ("axial local", "column", gauss(0.4, across=1.8)),
    "both sides": ("axial local", "row", lambda dy, dx: (dy == 0) & (abs(dx) == 1)),
    "whole row": ("axial local", "row", lambda dy, dx: dy == 0),
    "cross": (
        "axial local",
        "cross",
        lambda dy, dx: (dy * dx == 0) & (abs(dy) + abs(dx) < 4),
    ),
    "left": ("offset local", "left", lambda dy, dx: (dy == 0) & (dx == -1)),
    "two down": ("offset local", "down", lambda dy, dx: (dy == 2) & (dx == 0)),
    "diagonal": ("offset local", "up-right", lambda dy, dx: (dy == -1) & (dx == 1)),
    "soft offset": ("offset local", "down-left", gauss(0.7, 1, -1)),
    "uniform": ("global", "", lambda dy, dx: np.ones(dy.shape)),
    "wide": ("global", "", gauss(6.0)),
    "away": ("global", "", lambda dy, dx: 1 - np.exp(-(dy**2 + dx**2) / 8)),
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", KNOWN)
def test_attention_of_known_type(grid: tuple[int, int], name: str) -> None:
    kind, detail, kernel = KNOWN[name]
    scores = measure(aligned_map(grid, kernel))
    assert classify(scores, NOT_REPEATING, Thresholds()) == (kind, detail), scores


@pytest.mark.parametrize("name", KNOWN)
def test_types_beside_an_even_background(name: str) -> None:
    kind, detail, kernel = KNOWN[name]
    grid = (14, 14)
    u = query_coverage(grid)
    p = 0.7 * aligned_map(grid, kernel) + 0.3 * u / u.sum()
    scores = measure(p)
    assert classify(scores, NOT_REPEATING, Thresholds()) == (kind, detail), scores


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("i", range(8))
def test_offsets_of_every_direction(i: int, length: int) -> None:
    dy, dx = [(0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1)][i]
    at = (dy * length, dx * length)
    scores = measure(aligned_map((14, 14), lambda y, x: (y == at[0]) & (x == at[1])))
    kind, detail = classify(scores, NOT_REPEATING, Thresholds())
    assert (kind, detail) == ("offset local", DIRECTIONS[i])
    # queries at the rim look at themselves and draw the centre of mass towards the middle
    assert scores.values["offset_cells"] == pytest.approx(math.hypot(*at), rel=0.3)
    angle = i * math.pi / 4
    assert direction(math.sin(angle + 0.35), math.cos(angle + 0.35)) == DIRECTIONS[i]


# ---------------------------------------------------------------- scores


def test_scores_by_hand() -> None:
    # a row of nine cells: half of the mass at the query, 0.3 to its right, 0.2 to its left
    p = np.zeros((1, 17))
    p[0, 7:10] = 0.2, 0.5, 0.3
    scores = measure(p, radius=1)
    values = scores.values
    assert values["self_mass"] == 0.5
    assert values["focus_mass"] == pytest.approx(1.0)
    assert (values["offset_dy"], values["offset_dx"]) == pytest.approx((0, 0.1))
    assert values["row_mass"] == pytest.approx(1.0)
    # most pairs of cells get nothing, so the background is 0; variance 0.5 - 0.01 along x, none
    # along y, each with a cell's own
    assert values["elongation"] == pytest.approx(math.sqrt((0.49 + 1 / 12) / (1 / 12)))
    # uniform attention on nine cells: 1/9 at the query itself
    assert scores.excess["self_mass"] == pytest.approx((0.5 - 1 / 9) / (8 / 9))
    assert math.isnan(scores.excess["row_mass"])  # all there is


def test_uniform_attention_has_no_excess() -> None:
    for grid in GRIDS:
        u = query_coverage(grid)
        scores = measure(u / u.sum())
        assert list(scores.excess.values()) == pytest.approx([0.0] * 5, abs=1e-12)
        assert scores.relative_elongation == pytest.approx(1.0)
        assert scores.values["off_cross"] == pytest.approx(1.0)
    for window in ((2, 2), (3, 2), (4, 5)):  # within windows: their own uniform attention
        scores = measure(uniform_map((7, 9), window), 1, window)
        over = [value for value in scores.excess.values() if not math.isnan(value)]
        assert over == pytest.approx([0.0] * len(over), abs=1e-12) and over
    assert excess(1.0, 0.2) == 1.0


def test_what_rises_above_the_background() -> None:
    # a row on an even background, which is the median of all pairs: only the row is left
    u = query_coverage((5, 5))
    u = u / u.sum()
    row = aligned_map((5, 5), KNOWN["whole row"][2])
    plain, mixed = measure(row), measure(0.5 * row + 0.5 * u)
    assert mixed.values["elongation"] == pytest.approx(plain.values["elongation"])
    assert mixed.values["row_mass"] < plain.values["row_mass"] == pytest.approx(1.0)


def test_mass_gathers_where_most_of_it_is() -> None:
    # the largest cell stands alone, next to a wider heap: the square moves over to the heap
    p = np.zeros((13, 13))
    p[6, 6] = 0.2
    p[6, 7:10] = p[5, 7:10] = 0.8 / 6
    scores = measure(p, radius=2)
    assert scores.values["focus_mass"] == pytest.approx(1.0)
    assert scores.values["offset_dx"] == pytest.approx(0.8 * 2)
    assert scores.values["offset_dy"] == pytest.approx(-0.4)


def swapped(scores: Scores) -> dict[str, float]:
    """The scores of the transposed map."""
    v = scores.values
    return {
        **v,
        "offset_dy": v["offset_dx"],
        "offset_dx": v["offset_dy"],
        "row_mass": v["column_mass"],
        "column_mass": v["row_mass"],
        "elongation": 1 / v["elongation"],
    }


@given(seed=st.integers(0, 10**6), grid=st.sampled_from(GRIDS))
def test_symmetries(seed: int, grid: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    p = rng.random((2 * grid[0] - 1, 2 * grid[1] - 1)) ** 4
    p /= p.sum()
    scores = measure(p)
    turned = measure(p.T).values
    expected = swapped(scores)
    assert [turned[n] for n in SHAPE_SCORES] == pytest.approx(
        [expected[n] for n in SHAPE_SCORES]
    )
    for name in ("focus_mass", "row_mass", "column_mass", "cross_mass", "self_mass"):
        assert 0 <= scores.values[name] <= 1 + 1e-12


# ---------------------------------------------------------------- repetition


def spread_of(a: Float, n_prefix: int) -> tuple[float, float]:
    """keys_share and query_repetition of one image's (tokens, tokens) attention."""
    spatial = a[n_prefix:]
    entropy = -(spatial * np.log(np.where(spatial > 0, spatial, 1))).sum(1).mean()
    mass = spatial[:, :n_prefix].sum(1).mean()
    std = spatial[:, n_prefix:].std(0, ddof=1).mean()
    return repetition(float(entropy), float(mass), float(std), len(a) - n_prefix)


def test_repetition_of_known_patterns() -> None:
    rng = np.random.default_rng(0)
    shared = np.zeros(100)
    shared[[3, 40, 77]] = 1 / 3
    share, repeated = spread_of(np.tile(shared, (100, 1)), 0)
    assert (share, repeated) == pytest.approx((0.03, 1.0))
    # as many keys a query, each query's own
    alone = np.array([rng.permutation(shared) for _ in range(100)])
    share, repeated = spread_of(alone, 0)
    assert share == pytest.approx(0.03)
    assert repeated == pytest.approx(
        0, abs=0.2
    )  # the mean of deviations is below their square's
    share, repeated = spread_of(np.eye(100), 0)
    assert share == pytest.approx(0.01)
    assert repeated == pytest.approx(0, abs=0.02)
    share, repeated = spread_of(np.full((100, 100), 0.01), 0)
    assert share == pytest.approx(1.0)
    assert math.isnan(repeated)


def test_prefix_mass_does_not_count() -> None:
    shared = np.zeros(100)
    shared[[3, 40, 77]] = 1 / 3
    bare = spread_of(np.tile(shared, (100, 1)), 0)
    with_cls = np.tile(np.concatenate([[0.9], 0.1 * shared]), (101, 1))
    assert spread_of(with_cls, 1) == pytest.approx(bare)
    assert all(map(math.isnan, repetition(0.0, 1.0, 0.0, 100)))


def test_repeating_heads_are_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n, cells = 6, 36
    a = np.zeros((n, 3, cells, cells))
    for i in range(n):
        a[i, 0, :, rng.choice(cells, 4, replace=False)] = 0.25  # other keys in each image
        for q in range(cells):
            a[i, 1, q, rng.choice(cells, 4, replace=False)] = 0.25
    a[:, 2] = 1 / cells
    made = Attention(layout((6, 6), ()), (a,), ("blocks.0",))
    table = run(write(tmp_path / "a.zarr", [made]))
    scores = table.filter(metric="query_repetition")
    assert scores["type"].tolist() == ["repeating", "global", "global"]
    assert scores["value"][0] == pytest.approx(1.0, abs=1e-5)
    assert abs(scores["value"][1]) < 0.2


# ---------------------------------------------------------------- the table


def typed_store(path: Path, n: int = 8, **kwargs: Any) -> Any:
    """Four heads of known type in two blocks, on a 7 x 7 grid with a class token."""
    rng = np.random.default_rng(1)
    names = ["identity", "soft", "diagonal", "uniform"]
    heads = np.zeros((n, 4, 50, 50))
    for i, name in enumerate(names):
        heads[:, i, 1:, 1:] = 0.9 * attention((7, 7), KNOWN[name][2])
        heads[:, i, 1:, 0] = 0.1
        heads[:, i, 0] = 1 / 50
    noise = rng.dirichlet(np.full(50, 0.5), heads.shape[:-1])
    mixed = 0.9 * heads + 0.1 * noise
    blocks = ("blocks.0", "blocks.1")
    made = Attention(layout((7, 7)), (mixed[:, :2], mixed[:, 2:]), blocks)
    return write(path, [made], **kwargs), made


@pytest.mark.slow
def test_the_table(tmp_path: Path) -> None:
    store, made = typed_store(tmp_path / "a.zarr")
    table = run(store)
    assert tuple(table.written.columns) == COLUMNS
    steady = table.filter(metric="same_type_thresholds")
    assert steady["type"].tolist() == [
        "strict local",
        "soft local",
        "offset local",
        "global",
    ]
    assert steady["detail"].tolist() == ["", "", "up-right", ""]
    assert table.filter(metric="same_type_slabs")["value"].tolist() == [1.0] * 4
    for site, head, metrics in (("blocks.0", 0, SCORES), ("blocks.1", 1, AGREEMENT)):
        own = table.filter(site=site, head=head)
        assert set(metrics) <= set(own["metric"].tolist())
    # against the mean of maps made by loops
    for block, head in np.ndindex(2, 2):
        mean = np.mean([aligned(a[head], made.layout) for a in made.a[block]], 0)
        expected = measure(mean).values
        own = table.filter(depth=block, head=head)
        for name in SHAPE_SCORES:
            value = own.filter(metric=name)["value"][0]
            assert value == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
        px = 8 * math.hypot(expected["offset_dy"], expected["offset_dx"])
        assert own.filter(metric="offset_px")["value"][0] == pytest.approx(
            px, rel=1e-3, abs=1e-4
        )
        assert set(own["n_images"].tolist()) == {8}
    example = table.filter(metric="aligned", type="offset local")
    assert len(example) == 13 * 13
    assert example["value"].sum() == pytest.approx(1.0, rel=1e-12)
    assert (example["row"].min(), example["row"].max()) == (-6, 6)
    peak = int(np.argmax(example["value"]))
    assert (example["row"][peak], example["col"][peak]) == (-1, 1)


def test_spread_scores_against_a_loop(tmp_path: Path) -> None:
    store, made = typed_store(tmp_path / "a.zarr", n=5, valid=[1, 1, 0, 1, 1])
    table = run(store)
    kept = [0, 1, 3, 4]
    for block, head in np.ndindex(2, 2):
        own = table.filter(depth=block, head=head)
        a = made.a[block][kept][:, :, 1:]
        entropy = -(a * np.log(a)).sum(-1).mean((0, 2))
        mass = a[..., 0].mean((0, 2))
        std = a[..., 1:].std(2, ddof=1).mean((0, 2))
        head_std = a[..., 1:].std(1, ddof=1).mean()
        share, queries = repetition(entropy[head], mass[head], std[head], 49)
        _, heads = repetition(entropy.mean(), mass.mean(), head_std, 49)
        for name, expected in (
            ("query_std", std[head]),
            ("head_std", head_std),
            ("keys_share", share),
            ("query_repetition", queries),
            ("head_repetition", heads),
        ):
            value = own.filter(metric=name)["value"][0]
            assert value == pytest.approx(expected, rel=1e-5, abs=1e-5), name


@pytest.mark.slow
def test_the_jackknife_is_that_of_the_slabs(tmp_path: Path) -> None:
    made = random_attention(layout((3, 3)), 40, [2])
    store = write(tmp_path / "a.zarr", [made], slab=2)
    table = run(store, radius=1)
    maps = np.array([[aligned(a, made.layout) for a in image] for image in made.a[0]])
    for head in range(2):
        values = np.array(
            [
                measure(
                    np.delete(maps[:, head], [2 * k, 2 * k + 1], 0).mean(0), 1
                ).values["row_mass"]
                for k in range(20)
            ]
        )
        error = math.sqrt(19 / 20 * ((values - values.mean()) ** 2).sum())
        own = table.filter(head=head, metric="row_mass")
        # float32 sums
        assert own["std"][0] == pytest.approx(error, rel=1e-3)
        half = t_quantile(19) * error
        assert own["high"][0] - own["value"][0] == pytest.approx(half, rel=1e-3)
    assert table.notes["blocks"] == {"a": 20}
    ten = run(write(tmp_path / "d.zarr", [made], slab=4), radius=1).filter(
        metric="row_mass"
    )
    left = [np.delete(maps[:, 0], range(4 * k, 4 * k + 4), 0).mean(0) for k in range(10)]
    masses = np.array([measure(one, 1).values["row_mass"] for one in left])
    error = float(standard_error(masses))
    assert ten["std"][0] == pytest.approx(error, rel=1e-3)
    assert ten["value"][0] - ten["low"][0] == pytest.approx(
        t_quantile(9) * error, rel=1e-3
    )
    few = run(write(tmp_path / "b.zarr", [made], slab=5), radius=1)
    assert np.isnan(few["std"]).all() and np.isnan(few["high"]).all()
    assert not np.isnan(few.filter(metric="same_type_slabs")["value"]).any()
    one = run(write(tmp_path / "c.zarr", [made], slab=40), radius=1)
    assert np.isnan(one.filter(metric="same_type_slabs")["value"]).all()


@pytest.mark.slow
def test_slabs_and_jobs_do_not_matter(tmp_path: Path) -> None:
    cut, _ = typed_store(tmp_path / "a.zarr", slab=3)
    whole, _ = typed_store(tmp_path / "b.zarr", slab=8)
    once = run(cut)
    again = run(cut, jobs=3)
    for name in COLUMNS:
        kind = once[name].dtype.kind
        assert np.array_equal(once[name], again[name], equal_nan=kind == "f")
    for metric in SCORES:
        values = [t.filter(metric=metric)["value"] for t in (once, run(whole))]
        # float32 sums; a head that uses all keys alike has next to nothing to divide by
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_sensitivity_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, _ = typed_store(tmp_path / "a.zarr")
    self_excess = measure(
        run(store).filter(metric="aligned", type="strict local")["value"].reshape(13, 13)
    ).excess["self_mass"]
    # just below the head's score: the threshold times 1.25 loses it
    close = Thresholds(strict=self_excess * 0.9)
    with caplog.at_level(logging.INFO, "vitsee_core"):
        table = run(store, thresholds=close)
    steady = table.filter(metric="same_type_thresholds")["value"]
    assert steady[0] == pytest.approx(11 / 12)
    assert table.notes["changed"]["a"]["strict x 1.25"] == 0.25
    assert table.notes["thresholds"] == asdict(close)
    assert "a: 75 % of heads keep their type" in caplog.text
    assert len(list(close.varied())) == 12
    scores = measure(aligned_map((14, 14), gauss(1.0)))
    assert classify(scores, NOT_REPEATING, Thresholds(focus=0.99))[0] == "global"
    few = {"keys_share": 0.1, "query_repetition": 0.9}
    wide = measure(aligned_map((14, 14), KNOWN["uniform"][2]))
    for limits, kind in (
        ({}, "repeating"),
        ({"keys": 0.05}, "global"),
        ({"repetition": 0.95}, "global"),
    ):
        assert classify(wide, few, Thresholds(**limits))[0] == kind


@pytest.mark.slow
def test_a_radius_beyond_the_grid_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = typed_store(tmp_path / "a.zarr")
    with caplog.at_level(logging.INFO):
        run(store, radius=2)
    assert "finds no focus" not in caplog.text
    with caplog.at_level(logging.INFO):
        table = run(store, radius=1000)
    assert "--radius 1000 takes in every key of 7 x 7 tokens: it finds no focus" in (
        caplog.text
    )
    # the square is the whole map, whose mass is 1 for every head
    focus = table.filter(metric="focus_mass")["value"]
    assert focus == pytest.approx(np.ones(len(focus)), abs=1e-6)


def test_a_head_without_spatial_mass_is_undefined(tmp_path: Path) -> None:
    made = random_attention(layout((3, 3)), 4, [2])
    made.a[0][:, 1] = [1] + [0] * 9
    table = run(write(tmp_path / "a.zarr", [made]))
    own = table.filter(head=1, metric="self_mass")
    assert (own["type"][0], own["n_images"][0]) == ("undefined", 0)
    assert np.isnan(own["value"][0])
    plot(table)


@pytest.mark.slow
def test_several_grids_and_stores(tmp_path: Path) -> None:
    groups = [
        random_attention(layout((3, 4)), 4, [2, 2]),
        random_attention(layout((2, 2)), 4, [3], prefix="grid_2x2"),
    ]
    first = write(tmp_path / "a.zarr", groups)
    second, _ = typed_store(tmp_path / "b.zarr")
    table = run(first, second, sites=["*"])
    assert [*dict.fromkeys(table["store"])] == ["a", "b"]
    heads = table.filter(store="a", metric="self_mass")
    assert (
        heads["site"].tolist() == ["blocks.0"] * 2 + ["blocks.1"] * 2 + ["grid_2x2.0"] * 3
    )
    figure = plot(table)
    assert len(figure.axes) == 2 * (1 + len(TYPES))
    counts, heights = figure.axes[1 + len(TYPES)], np.zeros(2)
    for bar in counts.patches:
        assert isinstance(bar, Rectangle)
        heights[round(bar.get_x() + bar.get_width() / 2)] += bar.get_height()
    assert heights.tolist() == [2, 2]
    assert (counts.get_title(loc="left"), counts.get_title(loc="right")) == ("b", "n = 8")


# ---------------------------------------------------------------- figure, command


def test_an_example_of_uniform_attention_is_flat(tmp_path: Path) -> None:
    made = random_attention(layout((3, 3)), 4, [1])
    made.a[0][:] = 1 / made.a[0].shape[-1]
    figure = plot(run(write(tmp_path / "a.zarr", [made])))
    (example,) = [axes for axes in figure.axes if axes.images]
    assert example.get_xlabel().endswith("0.11 to 0.11")


@pytest.mark.slow
def test_captions_of_neighbouring_examples_do_not_touch(tmp_path: Path) -> None:
    store, _ = typed_store(tmp_path / "a.zarr")
    figure = plot(run(store))
    shown = [axes for axes in figure.axes if axes.images]
    assert len(shown) > 1
    for axes in shown:  # as long as the captions of a ViT-L are
        axes.xaxis.label.set_text("blocks.23 head 15\n0.00048 to 0.00051")
    figure.draw_without_rendering()
    boxes = [axes.xaxis.label.get_window_extent() for axes in shown]
    middles = np.diff([axes.get_window_extent().x0 for axes in figure.axes[1:]])
    assert max(box.width for box in boxes) < 0.9 * middles.min()
    assert boxes[-1].x1 < figure.bbox.x1


def test_refusals(tmp_path: Path) -> None:
    reason = {"attention": "channel attention"}
    store = write_attention(tmp_path / "xcit.zarr", [], {}, n_images=3, left_out=reason)
    with pytest.raises(MissingInput, match="channel attention"):
        run(store)
    for name, value, range_ in (
        ("strict", 2.0, "above 0, at most 1"),
        ("keys", 1.01, "above 0, at most 1"),
        ("elongation", 0.5, "1 or more"),
    ):
        with pytest.raises(
            VitseeError, match=f"^--{name} is {value:g}; expected {range_}$"
        ):
            run(store, thresholds=Thresholds(**{name: value}))
    assert (
        CliRunner()
        .invoke(main, ["head-types", str(store.path), "--strict", "0"])
        .exit_code
        == 2
    )
