"""Tables over a training: a layer's value at every step, its charts, and --x step of commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from click.testing import CliRunner, Result
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.features import vit_sites
from tests.stores import write_model
from vitsee_cli import analysis
from vitsee_cli.main import main
from vitsee_core.figures.fitting import all_axes
from vitsee_core.figures.panels import drawn_for
from vitsee_core.figures.plotting import drawn_as
from vitsee_core.figures.training_charts import MOST_PANELS, draw_over_training, is_log
from vitsee_core.figures.training_values import INTERVAL, RUNS, layers_over_steps
from vitsee_core.pages.report.redrawing import redraw
from vitsee_core.tables.results import Table
from vitsee_core.tables.steps import numbers_in_name, with_steps
from vitsee_stores.errors import VitseeError

STEPS = (0, 10, 100, 1000)


def row(
    step: int, block: int, value: float, model: str = "vit", **more: Any
) -> dict[str, Any]:
    path = f"blocks.{block}"
    return {
        "step": step, "store": f"{model}-step{step}", "model": model, "weights": f"step_{step}.pt",
        "site": f"{path}.out", "block": path, "depth": block, "rel_depth": block / 2,
        "head": None, "metric": "distance_px", "value": value, "low": value - 1, "high": value + 1,
        "n_images": 20,
    } | more  # fmt: skip


def table(rows: Sequence[dict[str, Any]], unit: str = "step") -> Table:
    return Table.from_rows(rows, notes={"unit": unit})


def growing(**more: Any) -> list[dict[str, Any]]:
    """Block b at the i-th step: 10 b + i."""
    return [
        row(s, b, 10.0 * b + i, **more) for i, s in enumerate(STEPS) for b in range(3)
    ]


def numbers(found: Any, *names: str) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = found.select(names).rows()
    return rows


# ------------------------------------------------------------------------------ layers by step


def test_numbers_in_names() -> None:
    assert numbers_in_name("vit-step1000") == {"step": 1000}
    assert numbers_in_name("run_epoch=3-step=40") == {"step": 40, "epoch": 3}
    assert numbers_in_name("footstep7") == numbers_in_name("vit16") == {}


def test_a_mean_over_heads_with_the_least_and_the_largest() -> None:
    rows = [
        row(s, 0, v, head=h)
        for s, of in ((0, (1.0, 4.0)), (10, (2.0, 8.0)))
        for h, v in enumerate(of)
    ]
    found = layers_over_steps(table(rows))
    assert numbers(found, "step", "value", "low", "high", "band") == [
        (0, 2.5, 1.0, 4.0, "heads"),
        (10, 5.0, 2.0, 8.0, "heads"),
    ]


def test_whole_layers_before_their_parts() -> None:
    """A metric with rows of the whole keeps these, with their interval; another is a mean."""
    rows = [row(s, 0, 5.0 + s) for s in (0, 1)]
    rows += [row(s, 0, 7.0, head=0) for s in (0, 1)]
    rows += [
        row(s, 0, s + float(v), metric="norm", head=v) for s in (0, 1) for v in (2, 4)
    ]
    found = layers_over_steps(table(rows))
    assert numbers(found, "metric", "step", "value", "low", "high", "band") == [
        ("distance_px", 0, 5.0, 4.0, 6.0, INTERVAL),
        ("distance_px", 1, 6.0, 5.0, 7.0, INTERVAL),
        ("norm", 0, 3.0, 2.0, 4.0, "heads"),
        ("norm", 1, 4.0, 3.0, 5.0, "heads"),
    ]


def test_models_as_repetitions() -> None:
    """By hand: the mean of 1 and 3 is 2, their standard error 1, and t(0.975, 1) 12.7062."""
    rows = [row(s, 0, v, m) for s in (0, 1) for m, v in (("a", 1.0), ("b", 3.0))]
    apart, pooled = (
        layers_over_steps(table(rows)),
        layers_over_steps(table(rows), pooled=True),
    )
    assert numbers(apart, "run", "step", "value") == [
        ("a", 0, 1.0), ("b", 0, 3.0), ("a", 1, 1.0), ("b", 1, 3.0),
    ]  # fmt: skip
    assert numbers(pooled, "run", "step", "value", "band") == [
        ("", 0, 2.0, RUNS),
        ("", 1, 2.0, RUNS),
    ]
    assert pooled["low"].to_numpy() == pytest.approx([2 - 12.7062] * 2, abs=1e-4)
    assert pooled["high"].to_numpy() == pytest.approx([2 + 12.7062] * 2, abs=1e-4)
    alone = layers_over_steps(table([r for r in rows if r["model"] == "a"]), pooled=True)
    assert alone["low"].null_count() == 2 and alone["value"].to_list() == [1.0, 1.0]


def test_what_makes_a_panel_and_what_does_not() -> None:
    """Tokens and parts of blocks do; baselines, metrics without values and multiples do not."""
    rows = growing(token="cls") + [r | {"value": 3.0} for r in growing(token=None)]
    rows += [r | {"metric": "distance_unit", "value": r["value"] / 32} for r in rows]
    rows += [r | {"metric": "entropy", "value": None} for r in growing(token="cls")]
    for r in rows:
        r["baseline"] = None
    rows += [r | {"baseline": "chance", "value": 0.1} for r in growing(token="cls")]
    found = layers_over_steps(table(rows))
    panels = found["panel"].unique(maintain_order=True).to_list()
    assert sorted(panels) == [
        "attention distance (px), all patches",
        "attention distance (px), class token",
    ]
    rows = growing() + [r | {"site": f"{r['block']}.attn.branch"} for r in growing()]
    panels = layers_over_steps(table(rows))["panel"].unique().sort().to_list()
    assert panels == [
        "attention distance (px), attention",
        "attention distance (px), block output",
    ]


def compared(first: Sequence[int]) -> Table:
    rows = []
    for a, b in zip(first, STEPS[1:], strict=True):
        one = row(b, 0, 0.5)
        named = ("store", "model", "weights", "site", "block", "depth", "rel_depth")
        cells = {f"{n}_{side}": one[n] for side in "ab" for n in named}
        about = {"metric": "cka", "value": 0.5, "low": 0.4, "high": 0.6, "n_images": 20}
        rows.append({"step": b} | cells | {"store_a": f"vit-step{a}"} | about)
    return table(rows)


@pytest.mark.parametrize(
    ("first", "words"),
    [((0, 0, 0), "CKA with step 0"), ((0, 10, 100), "CKA with the step before")],
)
def test_a_comparison_says_with_what(first: Sequence[int], words: str) -> None:
    found = layers_over_steps(compared(first))
    assert found["panel"].unique().to_list() == [words]
    assert numbers(found, "step", "site", "value") == [
        (s, "blocks.0.out", 0.5) for s in STEPS[1:]
    ]


def test_several_values_of_a_layer_are_refused() -> None:
    with pytest.raises(
        VitseeError, match=r"several values of blocks.0.out at step 0.*same-depth"
    ):
        layers_over_steps(table([row(s, 0, 1.0) for s in (0, 0, 1)]))


def test_tables_that_are_not_over_a_training() -> None:
    assert table(growing()).step_unit == "step"
    assert table([row(0, 0, 1.0), row(0, 1, 1.0)]).step_unit == ""
    assert table(growing(), unit="epoch").step_unit == ""
    assert Table.from_rows(growing()).step_unit == ""


# ------------------------------------------------------------------------------ figures


def panels(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if not hasattr(axes, "_colorbar")]


def test_curves_and_map_show_the_values() -> None:
    curves, heat = panels(draw_over_training(table(growing())))
    lines = [line for line in curves.lines if np.size(line.get_xdata())]
    assert [line.get_label() for line in lines] == ["block 0", "block 1", "block 2"]
    for block, line in enumerate(lines):
        assert np.array_equal(line.get_xdata(), STEPS)
        assert np.array_equal(line.get_ydata(), 10 * block + np.arange(4))
    shades = [matplotlib.colors.to_rgb(line.get_color()) for line in lines]
    light = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in shades]
    assert light == sorted(light) and light[2] - light[0] > 0.4  # from input to output
    cells: Any = heat.images[0].get_array()
    assert np.array_equal(cells, 10 * np.arange(3)[:, None] + np.arange(4))
    assert [text.get_text() for text in heat.get_yticklabels()] == ["0", "1", "2"]
    assert (
        heat.get_ylabel() == "block"
        and curves.get_title(loc="left") == "attention distance (px)"
    )
    assert "band: 95 % interval" in curves.get_legend_handles_labels()[1]


def test_steps_on_an_axis() -> None:
    assert is_log(STEPS) and is_log([1, 2, 5, 10, 20, 50, 100])
    assert (
        not is_log(range(100))
        and not is_log([0, 1000, 2000, 3000, 3100])
        and not is_log([0, 9])
    )
    figure = draw_over_training(table(growing()))
    curves = panels(figure)[0]
    assert (
        curves.get_xscale() == "symlog"
        and curves.get_xlabel() == "training step (logarithmic)"
    )
    ticks = dict(
        zip(
            curves.get_xticks(),
            (t.get_text() for t in curves.get_xticklabels()),
            strict=True,
        )
    )
    assert ticks == {0: "0", 10: "10", 100: "100", 1000: "1k"}
    x = curves.transData.transform([(step, 0) for step in STEPS])[:, 0]
    assert (np.diff(x) > 0).all() and x[2] - x[1] == pytest.approx(x[3] - x[2])
    even = draw_over_training(table([row(s, b, 1.0) for s in (0, 5, 10) for b in (0, 1)]))
    assert panels(even)[0].get_xscale() == "linear"


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ((1.0, 5.0), 0.0, 5.25),
        ((8.0, 10.0), 7.9, 10.1),
        ((-1.0, 1.0), -1.1, 1.1),
        ((9.9, 10.0), 9.675, 10.225),  # 0.5 wide, with margins of 0.025
    ],
)
def test_the_y_axis_begins_at_0_unless_values_are_near(
    values: tuple[float, float], low: float, high: float
) -> None:
    rows = [
        row(s, 0, v, low=None, high=None) for s, v in zip((0, 1), values, strict=True)
    ]
    (axes,) = panels(draw_over_training(table(rows)))
    assert axes.get_ylim() == pytest.approx((low, high))


def test_many_layers_have_a_colour_bar_and_many_metrics_a_note() -> None:
    rows = [row(s, b, float(b)) for s in (0, 5, 10) for b in range(20)]
    figure = draw_over_training(table(rows))
    assert "relative depth" in [axes.get_ylabel() for axes in all_axes(figure)]
    assert not any("block" in text.get_text() for text in figure.legends[0].get_texts())
    rng = np.random.default_rng(0)
    rows = [
        row(s, b, rng.random(), metric=f"m{m}")
        for m in range(8)
        for s in (0, 5)
        for b in (0, 1)
    ]
    figure = draw_over_training(table(rows))
    assert len(panels(figure)) == 2 * MOST_PANELS
    assert figure.legends[0].get_title().get_text() == (
        "2 more in the table: choose with --metric and --sites"
    )


def test_one_layer_is_a_curve_alone_and_a_column_stacks_its_panels() -> None:
    (only,) = panels(draw_over_training(table([row(s, 0, 1.0) for s in STEPS])))
    assert not only.images
    with drawn_for("column"), drawn_as("dark"):
        figure = draw_over_training(table(growing()))
    curves, heat = panels(figure)
    assert (
        figure.get_figwidth() == 3.5 and heat.get_position().y1 < curves.get_position().y0
    )


def test_a_gap_is_grey_and_named() -> None:
    rows = [r | ({"value": None} if r["step"] == 10 else {}) for r in growing()]
    figure = draw_over_training(table(rows))
    drawn: Any = panels(figure)[1].images[0].get_array()
    assert np.isnan(np.ma.filled(drawn, np.nan)[:, 1]).all()
    assert "no value" in [text.get_text() for text in figure.legends[0].get_texts()]


# ------------------------------------------------------------------------------ commands


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    for step in (0, 20, 1000):
        write_model(folder / f"vit-step{step}.zarr", vit_sites(24, seed=step))
    return folder


def vitsee(*words: object) -> Result:
    return CliRunner().invoke(main, [*map(str, words)])


def test_cka_along_steps(stores: Path, tmp_path: Path) -> None:
    """The steps are those of the names, each layer is compared with itself at the first step, and
    plot draws the same picture from the file."""
    places = [stores / f"vit-step{step}.zarr" for step in (0, 1000, 20)]
    out = ["-o", tmp_path / "r.csv", "--png", tmp_path / "r.png"]
    done = vitsee("cka", *places, "--x", "step", *out)
    assert done.exit_code == 0, done.stderr
    found = Table.read(tmp_path / "r.csv")
    assert found.frame.columns[0] == "step" and sorted(set(found["step"])) == [20, 1000]
    assert set(found["store_a"]) == {"vit-step0"}
    plain = vitsee("cka", *places, "--pairs", "same-depth", "-o", tmp_path / "plain.csv")
    assert plain.exit_code == 0
    other = Table.read(tmp_path / "plain.csv").filter(store_b="vit-step20")
    assert np.array_equal(found.filter(step=20)["value"], other["value"])
    assert vitsee("plot", tmp_path / "r.csv", "-o", tmp_path / "again.png").exit_code == 0
    assert (tmp_path / "r.png").read_bytes() == (tmp_path / "again.png").read_bytes()
    assert len(panels(found.plot())) == 2


@pytest.mark.parametrize(
    "dask",
    [
        pytest.param("local:2", marks=pytest.mark.slow, id="processes"),
        # As with workers, but for the workers: paths are made absolute, the rest is here.
        pytest.param("tcp://localhost:1", id="no worker"),
    ],
)
def test_dask_compares_layers_of_equal_depth_along_steps(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dask: str
) -> None:
    """With --dask the table is that of one process, and the sidecar says how it was made."""
    if dask == "local:2":
        pytest.importorskip("distributed")
    else:
        monkeypatch.setattr(analysis, "spread_over", lambda *_: nullcontext({}))
    paths = [stores / f"vit-step{step}.zarr" for step in (0, 1000, 20)]
    here = vitsee("cka", *paths, "--x", "step", "-o", tmp_path / "here.csv")
    assert here.exit_code == 0, here.stderr
    options = ["--x", "step", "--dask", dask, "-o", tmp_path / "there.csv"]
    there = vitsee("cka", *paths, *options)
    assert there.exit_code == 0, there.stderr
    expected = (tmp_path / "here.csv").read_bytes()
    assert (tmp_path / "there.csv").read_bytes() == expected
    sidecar = json.loads((tmp_path / "there.csv.json").read_text())
    assert sidecar["parameters"]["pairs"] == "same-depth"


@pytest.mark.slow
def test_plot_chooses_metrics_axes_and_the_commands_figure(
    stores: Path, tmp_path: Path
) -> None:
    places = [stores / f"vit-step{step}.zarr" for step in (0, 20, 1000)]
    done = vitsee("spectrum", *places, "--x", "step", "-o", tmp_path / "r.csv")
    assert done.exit_code == 0, done.stderr
    one = redraw(tmp_path / "r.csv", metrics=["rankme"])
    assert [axes.get_title(loc="left") for axes in panels(one)][:1] == ["RankMe"]
    assert len(panels(one)) == 2
    over_depth = redraw(tmp_path / "r.csv", metrics=["rankme"], x="rel_depth")
    assert "relative depth" in [axes.get_xlabel() for axes in panels(over_depth)]
    wrong = vitsee("plot", tmp_path / "r.csv", "--metric", "rank")
    assert (
        wrong.exit_code == 1
        and "no metric rank in this table; it has rankme" in wrong.stderr
    )
    args = ["plot", tmp_path / "r.csv", "--log", "none", "-o", tmp_path / "linear.png"]
    assert vitsee(*args).exit_code == 0


def test_log_none_makes_steps_linear(tmp_path: Path) -> None:
    from vitsee_core.figures.looks import Look

    with drawn_as("light", Look(log=("none",)).put_on):
        curves = panels(draw_over_training(table(growing())))[0]
    assert curves.get_xscale() == "linear" and curves.get_xlabel() == "training step"
    with drawn_as("light", Look(log=("x",)).put_on):  # 0 keeps its place
        assert panels(draw_over_training(table(growing())))[0].get_xscale() == "symlog"


def test_stores_without_a_step_or_with_one(stores: Path) -> None:
    places = [stores / f"vit-step{step}.zarr" for step in (0, 20)]
    named = vitsee("spectrum", f"a={places[0]}", places[1], "--x", "step")
    assert named.exit_code == 1 and named.stdout == ""
    assert (
        "no step in the name of the store a; expected one such as vit-step1000"
        in named.stderr
    )
    alone = vitsee("spectrum", places[0], "--x", "step")
    assert alone.exit_code == 1 and "one step alone: vit-step0" in alone.stderr
    rows = Table.from_rows([{"store": "a-epoch1", "metric": "m", "value": 1.0}])
    with pytest.raises(VitseeError, match="this table has no layers of stores"):
        with_steps(rows, "epoch")
