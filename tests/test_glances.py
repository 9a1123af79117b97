"""The few rows that stand for a table on a card of the report."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import polars as pl
import pytest

from vitsee_core.declaration import Analysis
from vitsee_core.pages.report import pictures
from vitsee_core.pages.report.pictures import MAX_TILE_ASPECT, TILE, Addresses, tile
from vitsee_core.pages.report.redrawing import open_result
from vitsee_core.runtime.registry import builtin_names, load
from vitsee_core.tables.glances import most_varied, select_evenly
from vitsee_core.tables.results import Table

GLANCED = [name for name in builtin_names() if load(name).at_a_glance is not None]


def test_values_are_evenly_spaced_in_each_store() -> None:
    rows = [
        {
            "store": store,
            "site": f"{store}{i}",
            "head": None if i == 3 else i,
            "value": 1.0,
        }
        for store, n in (("a", 5), ("b", 2))
        for i in range(n)
    ]
    table = Table.from_rows(rows, notes={"of": 1})
    assert select_evenly(table, site=3)["site"].tolist() == ["a0", "a2", "a4", "b0", "b1"]
    assert select_evenly(table, store=1, site=1)["site"].tolist() == ["a0"]
    assert select_evenly(table, head=2)["site"].tolist() == ["a0", "a3", "a4", "b0"], (
        "with what has none"
    )
    assert select_evenly(table, nothing=1).frame.equals(table.frame)
    assert select_evenly(table, site=1).notes == {"of": 1}


def test_the_image_whose_values_differ_most() -> None:
    values = {"x": [1.0, 1.0, 1.0], "y": [0.0, 9.0, 0.0], "z": [4.0, 5.0, 6.0]}
    rows = pl.DataFrame(
        [{"image": name, "value": v} for name in values for v in values[name]]
    )
    assert most_varied(rows, "image")["value"].to_list() == values["y"]


def small(analysis: Analysis, path: Path) -> tuple[Table, float]:
    """The rows at a glance, and their figure's height over its width."""
    result = open_result(path)
    assert analysis.at_a_glance is not None
    rows = analysis.at_a_glance(result.file.table)
    width, height = result.figure(rows, medium=TILE).get_size_inches()  # type: ignore[arg-type]
    return rows, float(height / width)


@pytest.mark.slow
@pytest.mark.parametrize("name", GLANCED)
def test_a_figure_of_few_rows_fits_a_card(
    name: str, tables_of: Callable[[str], list[Path]]
) -> None:
    for path in tables_of(name.replace("_", "-")):
        rows, ratio = small(load(name), path)
        assert 0 < len(rows) <= len(Table.read(path)) and ratio <= MAX_TILE_ASPECT


@pytest.mark.slow
def test_what_an_earlier_page_shows_is_not_drawn_again(
    tables_of: Callable[[str], list[Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for ending in (".csv", ".csv.json"):
        made = tables_of("pca")[0].with_suffix(ending)
        shutil.copy(made, tmp_path / f"pca{ending}")
    result = open_result(tmp_path / "pca.csv")
    with closing(Addresses({}, [])) as empty:
        drawn = tile(result, empty)
    assert drawn is not None and drawn.address.startswith("data:image/")
    monkeypatch.setattr(pictures, "figure_bytes", None)
    with closing(Addresses({drawn.digest: "data:x"}, [])) as earlier:
        assert tile(result, earlier) == pictures.Picture("data:x", digest=drawn.digest)
        (tmp_path / "pca.csv").write_text((tmp_path / "pca.csv").read_text() + "\n")
        again = open_result(tmp_path / "pca.csv")
        assert tile(again, earlier) is None, "another table, which would be drawn"
