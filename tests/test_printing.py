"""Every figure of every command at the width of a column, of a page and on a slide: no text is
clipped or lies on other text, by matplotlib's own extents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.every_command import TABLES, vitsee
from tests.printed_text import flaws
from tests.tables import having, unique
from vitsee_core.analyses.norms.norm_figures import draw_norms
from vitsee_core.figures.depth_curves import (
    draw_depth_curves,
)
from vitsee_core.figures.panels import (
    MEDIA,
    PanelGrid,
    drawn_for,
    medium,
    new_figure,
    panels,
)
from vitsee_core.figures.plotting import (
    stores_in_order,
    styled,
)
from vitsee_core.pages.report.redrawing import Result, open_result
from vitsee_core.tables.results import Table

RUNS = [(command, i) for command, runs in TABLES.items() for i in range(len(runs))]
# Commands that draw something for each store below one another, which 20 make taller than any page.
STACKED = {"cosine-map", "erf", "head-types", "localize", "pca", "weights"}
PAIRS = {"cka", "cka-heads", "similarity"}  # rows are about two stores
FROM_FILES = {"best-layer"}  # drawn from other tables, too
MANY = 20
Made = Callable[[str, int], Result]


@pytest.fixture(scope="module")
def made(everything: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Each command's result, run once."""
    folder = tmp_path_factory.mktemp("printing")

    @functools.cache
    def run(command: str, i: int) -> Result:
        path = folder / f"{command}-{i}.csv"
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(everything)
            vitsee(command, *TABLES[command][i], "-o", path)
            return open_result(path)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("command", "run"), RUNS)
def test_all_text_can_be_read(
    command: str, run: int, made: Made, everything: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(everything)
    result = made(command, run)
    for name, wanted in MEDIA.items():
        figure = result.figure(medium=name)
        assert figure.get_figwidth() <= wanted.width + 1e-9
        assert flaws(figure) == [], name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_base_patch16_{}", "{}/vit_base/patch16"])
@pytest.mark.parametrize(
    ("command", "run"), [r for r in RUNS if r[0] not in STACKED | PAIRS | FROM_FILES]
)
def test_all_text_of_twenty_models_can_be_read(
    command: str,
    run: int,
    name: str,
    made: Made,
    everything: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same model under twenty names; in groups of four."""
    monkeypatch.chdir(everything)
    result = made(command, run)
    table = under_names(result.file.table, MANY, name)
    for medium_name, wanted in MEDIA.items():
        figure = result.figure(table, medium=medium_name)
        assert figure.get_figwidth() <= wanted.width + 1e-9
        assert flaws(figure) == [], medium_name


@pytest.mark.slow
def test_norms_of_a_model_without_outliers_among_others(made: Made) -> None:
    """In place of its maps there is a line, which needs less room than any panel."""
    table = under_names(made("norms", 0).file.table, 2, "vit_base_patch16_{}")
    columns = {name: table[name] for name in table.written.columns}
    share = np.isin(table["metric"], ("outlier_share", "outlier_share_mad"))
    columns["value"][share] = np.where(
        table["store"][share] == table["store"][0], 0.5, 0.0
    )
    for name in MEDIA:
        with drawn_for(name):
            figure = draw_norms(Table(columns, table.notes))
        assert any(
            "no patch is an outlier" in part.get_suptitle() for part in figure.subfigs
        )
        assert flaws(figure) == [], name


def under_names(table: Table, n: int, name: str) -> Table:
    """The rows of the first store, n times under other names."""
    first = having(table, store=unique(table, "store")[0])
    labels = [
        name.format(i // 4) + f"_{i % 4}" if "/" in name else name.format(i)
        for i in range(n)
    ]
    copies = [Table(first.written.with_columns(store=pl.lit(label))) for label in labels]
    return Table(Table.concat(copies).frame, table.notes)


def test_what_the_check_finds() -> None:
    """Without it a passing test would say nothing."""

    @styled
    def draw() -> object:
        figure, (axes,) = panels(1)
        axes.text(0.2, 0.5, "some words")
        axes.text(0.25, 0.5, "other words")
        far = axes.text(0.8, 0.2, "words that go on beyond the right edge of the paper")
        far.set_in_layout(False)
        return figure

    found = flaws(draw())  # type: ignore[arg-type]
    assert any(line.startswith("clipped: 'words that go on") for line in found)
    assert "on each other: 'some words' and 'other words'" in found


@pytest.mark.parametrize(("name", "across"), [("column", 2), ("page", 3), ("slide", 3)])
def test_panels_wrap_by_width(name: str, across: int) -> None:
    with drawn_for(name):
        assert [PanelGrid(n).across for n in (1, 2, 3)] == [
            1,
            2,
            across if across == 3 else 2,
        ]
        assert (PanelGrid(7).across, PanelGrid(7).down) == (across, -(-7 // across))
        width, height = PanelGrid(7).size
        assert width <= medium().width
        assert height == pytest.approx(PanelGrid(7).down * 14 * medium().font / 72)
        # Four stand two and two where three and one would do.
        assert PanelGrid(4).across == 2
        pairs = PanelGrid(6, together=2)  # never one of a pair on the next line
        assert (pairs.across, pairs.down) == (2, 3)
    with drawn_for(size=(5, 2)):
        assert tuple(new_figure(3, 3).get_size_inches()) == (5, 2)
        assert medium().font == pytest.approx(5 / 3.5 + 6)


def curve(store: str, value: float, half: float, n: int = 4) -> Table:
    x = np.linspace(0, 1, n)
    columns = {
        "store": np.full(n, store, object),
        "site": np.array([f"blocks.{i}.out" for i in range(n)], object),
        "metric": np.full(n, "top1", object),
        "rel_depth": x,
        "value": value + 0 * x,
        "low": value - half + 0 * x,
        "high": value + half + 0 * x,
        "n_images": np.full(n, 200),
    }
    return Table(columns)


@styled
def drawn(table: Table) -> tuple[list[str], int, list[str]]:
    """Colours of the curves, number of bands, legend."""
    _, (axes,) = panels(1)
    draw_depth_curves(axes, table.frame)
    lines = [line for line in axes.lines if len(line.get_xdata())]  # type: ignore[arg-type]
    bands = [
        c for c in axes.collections if type(c).__name__ == "FillBetweenPolyCollection"
    ]
    labels = axes.get_legend_handles_labels()[1]
    assert (
        axes.get_title(loc="right") == "n = 200" and axes.get_xlabel() == "relative depth"
    )
    assert axes.get_ylabel() == "top-1 accuracy"
    return [str(line.get_color()) for line in lines], len(bands), labels


def test_bands_on_one_another_are_bars() -> None:
    apart = Table.concat([curve("a", 0.2, 0.05), curve("b", 0.8, 0.05)])
    crossed = Table.concat([curve("a", 0.5, 0.2), curve("b", 0.6, 0.2)])
    many = Table.concat([curve(f"m{i}", 0.5, 0.2) for i in range(9)])
    # One empty polygon stands for all bands in the legend.
    assert drawn(apart)[1] == 2 and drawn(apart)[2][-1] == "band: 95 % interval"
    assert drawn(crossed)[1] == 0 and drawn(crossed)[2][-1] == "bars: 95 % interval"
    assert drawn(many)[2][-1] == "bars: 95 % interval in the table alone"


def test_one_model_one_colour_in_all_figures() -> None:
    both = drawn(Table.concat([curve("a", 0.2, 0.05), curve("b", 0.8, 0.05)]))[0]
    with stores_in_order(["a", "b"]):
        assert drawn(curve("b", 0.8, 0.05))[0] == both[1:]
    assert drawn(curve("b", 0.8, 0.05))[0] == both[:1]


def test_missing_values_are_explained() -> None:
    table = curve("a", 0.2, 0.05)
    values = table["value"]
    values[1] = np.nan
    assert "no value" in drawn(Table(table.written.with_columns(value=values)))[2]
