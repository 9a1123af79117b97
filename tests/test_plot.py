"""`vitsee plot`: every command's figure again from its CSV, and what a reader may change of it."""

from __future__ import annotations

import csv
import json
import re
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner, Result

from tests.every_command import TABLES, vitsee
from tests.printed_text import flat
from vitsee_cli.main import main
from vitsee_core.figures.looks import Look
from vitsee_core.figures.plotting import THEMES
from vitsee_core.pages.report.redrawing import open_result, redraw
from vitsee_core.tables.results import Table, read_result
from vitsee_core.tables.table_sites import block_part, rows_of_sites
from vitsee_stores.errors import SiteError, VitseeError

RUNS = [(command, i) for command, runs in TABLES.items() for i in range(len(runs))]


def plot(*args: object) -> Result:
    return CliRunner().invoke(main, ["plot", *map(str, args)])


@pytest.fixture(scope="module")
def curves(everything: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of curves, with sidecar."""
    return written(everything, tmp_path_factory, ["attn-dist", "vit.zarr"])


@pytest.fixture(scope="module")
def heatmap(everything: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of pairs, with sidecar."""
    return written(everything, tmp_path_factory, ["cka", "vit.zarr", "cnn.zarr"])


def written(
    everything: Path, factory: pytest.TempPathFactory, words: Sequence[str]
) -> Path:
    folder = factory.mktemp("plot")
    stores = [
        str(everything / word) if word.endswith(".zarr") else word for word in words
    ]
    vitsee(*stores, "-o", folder / "r.csv")
    return folder / "r.csv"


def copied(result: Path, folder: Path) -> Path:
    for path in (result, result.with_name(f"{result.name}.json")):
        shutil.copy(path, folder)
    return folder / result.name


@pytest.mark.slow
@pytest.mark.parametrize(("command", "run"), RUNS)
def test_every_figure_is_drawn_again_as_it_was(
    command: str,
    run: int,
    everything: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the byte: a figure is drawn from its table alone, whatever the command had in memory."""
    monkeypatch.chdir(everything)
    vitsee(
        command,
        *TABLES[command][run],
        "-o",
        tmp_path / "r.csv",
        "--png",
        tmp_path / "r.png",
    )
    done = plot(tmp_path / "r.csv", "-o", tmp_path / "again.png")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "r.png").read_bytes()


@pytest.mark.slow
def test_options_of_the_figure_are_kept(
    everything: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(everything)
    words = ["attn-map", "vit.zarr", "--kind", "aligned"]
    for name, more in (("a", []), ("b", ["--scale", "head", "--no-coverage"])):
        vitsee(
            *words,
            *more,
            "-o",
            tmp_path / f"{name}.csv",
            "--png",
            tmp_path / f"{name}.png",
        )
        assert (
            plot(tmp_path / f"{name}.csv", "-o", tmp_path / f"{name}2.png").exit_code == 0
        )
        png = (tmp_path / f"{name}.png").read_bytes()
        assert png == (tmp_path / f"{name}2.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["csv.gz", "tsv", "json"])
def test_tables_of_every_format(everything: Path, tmp_path: Path, ending: str) -> None:
    vitsee("attn-dist", everything / "vit.zarr", "-o", tmp_path / f"r.{ending}")
    assert plot(tmp_path / f"r.{ending}").exit_code == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    again = plot(tmp_path / f"r.{ending}")
    assert again.exit_code == 1 and "r.png exists" in again.stderr
    assert plot(tmp_path / f"r.{ending}", "--force").exit_code == 0


@pytest.mark.slow
def test_text_stays_text(heatmap: Path, tmp_path: Path) -> None:
    title = "CKA of $x$ <b> & 'more'"
    for ending in ("svg", "pdf"):
        done = plot(heatmap, "-o", tmp_path / f"r.{ending}", "--title", title)
        assert done.exit_code == 0, done.output
    svg = (tmp_path / "r.svg").read_text()
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert "CKA of $x$ &lt;b&gt; &amp; 'more'" in texts
    assert any("CKA (debiased)" in text for text in texts)
    assert (
        b"/FontFile2" in (tmp_path / "r.pdf").read_bytes()
    )  # TrueType, not outlines of letters


@pytest.mark.slow
def test_size_and_dots_per_inch(curves: Path, tmp_path: Path) -> None:
    assert (
        plot(curves, "-o", tmp_path / "r.png", "--size", "4,3", "--dpi", "50").exit_code
        == 0
    )
    assert struct.unpack(">II", (tmp_path / "r.png").read_bytes()[16:24]) == (200, 150)
    tiny = plot(curves, "-o", tmp_path / "t.png", "--size", "0.5,0.5")
    assert tiny.exit_code == 0 and tiny.stderr.splitlines() == [
        "warning: 0.5 x 0.5 inches leave the panels no room: the figure is unreadable",
        f"{tmp_path}/t.png is written",
    ]
    figure = redraw(curves, size=(7.5, 2.5))
    assert tuple(figure.get_size_inches()) == (7.5, 2.5)


def test_colours_and_range_of_maps(heatmap: Path) -> None:
    figure = redraw(heatmap, look=Look(cmap="magma", range=(0.25, 0.5)))
    image = figure.axes[0].images[0]
    assert image.cmap.name == "magma" and image.get_clim() == (0.25, 0.5)
    values = np.ma.getdata(image.get_array())  # type: ignore[arg-type]
    bar = figure.axes[0].child_axes[0]
    low, high = bar.get_ylim()
    assert (low, high) == (0.25, 0.5)
    assert flat(bar.get_ylabel()) == "CKA (debiased), colours from 0.25 to 0.5"
    extend = bar._colorbar.extend  # type: ignore[attr-defined]
    below, above = bool((values < 0.25).any()), bool((values > 0.5).any())
    assert (
        extend
        == {(0, 0): "neither", (1, 0): "min", (0, 1): "max", (1, 1): "both"}[below, above]
    )


@pytest.mark.slow
def test_range_and_logarithm_of_curves(curves: Path) -> None:
    figure = redraw(curves, look=Look(range=(1, 9), log=("y",)))
    for axes in figure.axes:
        assert axes.get_yscale() == "log" and axes.get_ylim() == (1, 9)
        assert axes.get_xscale() == "linear"
    values = open_result(curves).file.table.filter(metric="distance_px")["value"]
    for axes in redraw(curves, look=Look(log=("y",))).axes:
        low, high = axes.get_ylim()
        assert 0 < low < high and high > values.max()


def test_what_a_figure_has_not(curves: Path, heatmap: Path, tmp_path: Path) -> None:
    for result, options, expected in (
        (curves, ["--cmap", "magma"], "no colour map to change"),
        (heatmap, ["--cmap", "viridus"], "no colour map 'viridus'; near names: viridis"),
        (heatmap, ["--log", "y"], "no y axis of numbers"),
        (
            curves,
            ["--log", "y", "--range", "-1,9"],
            "the y axis is logarithmic: a range from -1",
        ),
        (curves, ["--sites", "blocks.99"], "no site matches 'blocks.99'"),
    ):
        done = plot(result, "-o", tmp_path / "r.png", *options)
        assert done.exit_code == 1 and expected in done.stderr
        assert done.stderr.count("\n") == 1 and not (tmp_path / "r.png").exists()


@pytest.mark.parametrize(
    "options",
    [["--size", "4"], ["--size", "0,3"], ["--size", "4,nan"], ["--size", "1e9,1"],
     ["--range", "2,1"], ["--range", "0,inf"], ["--dpi", "1e9"], ["--theme", "grey"],
     ["--log", "z"], ["-o", ""]],
)  # fmt: skip
def test_options_that_say_nothing(curves: Path, options: list[str]) -> None:
    done = plot(curves, *options)
    assert done.exit_code == 2 and not curves.with_name("r.png").exists()


def test_no_value_is_positive(curves: Path, tmp_path: Path) -> None:
    result = copied(curves, tmp_path)
    lines = list(csv.DictReader(result.open()))
    for line in lines:
        line |= {"value": "-1.0", "low": "-2.0", "high": "-0.5"}
    rewrite(result, lines)
    assert "cannot be logarithmic" in plot(result, "--log", "y").stderr


def rewrite(result: Path, lines: Sequence[dict[str, str]]) -> None:
    with result.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def test_a_changed_table_is_said(curves: Path, tmp_path: Path) -> None:
    result = copied(curves, tmp_path)
    lines = list(csv.DictReader(result.open()))
    without = [{k: v for k, v in line.items() if k != "head"} for line in lines]
    for changed, code, said in (
        (lines[:4], 0, "was changed since vitsee attn-dist wrote it"),
        (without, 1, "lost columns since vitsee attn-dist wrote it: head"),
        (
            [{**line, "metric": "other"} for line in lines],
            1,
            "makes no figure of that command",
        ),
        (
            [{**line, "value": "much"} for line in lines],
            1,
            "the text 'much'; expected numbers",
        ),
    ):
        rewrite(result, changed)
        done = plot(result, "--force")
        assert done.exit_code == code and said in done.stderr


def test_tables_without_a_figure(curves: Path, tmp_path: Path) -> None:
    result = copied(curves, tmp_path)
    sidecar = result.with_name("r.csv.json")
    told = json.loads(sidecar.read_text())
    for changed, expected in (
        (
            {**told, "command": ["vitsee", "info", "x"]},
            "of vitsee info, which draws no figure",
        ),
        ({"made": "elsewhere"}, "of another program, which draws no figure"),
        (
            {**told, "command": ["vitsee", "../x"]},
            "of vitsee ../x, which draws no figure",
        ),
        ({}, "has no sidecar r.csv.json beside it"),
    ):
        sidecar.write_text(json.dumps(changed))
        done = plot(result)
        assert done.exit_code == 1 and expected in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    sidecar.unlink()
    assert "has no sidecar r.csv.json beside it" in plot(result).stderr
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert "has no sidecar" in plot(tmp_path / "other.csv").stderr
    assert "no such file" in plot(tmp_path / "none.csv").stderr
    assert "is a folder" in plot(tmp_path).stderr


@pytest.mark.slow
def test_a_sidecar_of_a_stranger_is_no_traceback(curves: Path, tmp_path: Path) -> None:
    result = copied(curves, tmp_path)
    sidecar = result.with_name("r.csv.json")
    told = json.loads(sidecar.read_text())
    old = {name: value for name, value in told.items() if name != "sha256"}
    for changed, code in (
        (old, 0),
        ({**told, "figure": {"nothing": 1}}, 0),
        ({**old, "command": ["vitsee", "cka"]}, 1),
        ({**old, "command": ["vitsee", "best-layer"], "results": 7, "parameters": 3}, 1),
        ({**old, "command": ["vitsee", "best-layer"], "results": [1, {"path": 2}]}, 1),
    ):
        sidecar.write_text(json.dumps(changed))
        done = plot(result, "--force")
        assert done.exit_code == code, done.output
        assert code == 0 or done.stderr.count("\nvitsee plot: ") == 1


@pytest.mark.slow
def test_a_figure_of_other_results_without_them(
    everything: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """best-layer draws the curves of its inputs: as recorded, or beside it."""
    monkeypatch.chdir(everything)
    inner = copied(everything / "knn.csv", tmp_path)
    vitsee(
        "best-layer",
        f"named={inner}",
        "-o",
        tmp_path / "b.csv",
        "--png",
        tmp_path / "b.png",
    )
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in (*tmp_path.glob("*.csv"), *tmp_path.glob("*.json")):
        path.rename(moved / path.name)
    assert plot(moved / "b.csv").exit_code == 0
    assert (moved / "b.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    (moved / "knn.csv").unlink()
    done = plot(moved / "b.csv", "--force")
    assert (
        done.exit_code == 1
        and "knn.csv is gone, whose curves this figure shows" in done.stderr
    )


# ------------------------------------------------------------------------------------ sites


def pairs_table() -> Table:
    rows = [
        {f"{name}_{side}": cell
         for side, (store, site, block, depth) in (("a", a), ("b", b))
         for name, cell in (("store", store), ("site", site), ("block", block),
                            ("depth", depth), ("rel_depth", depth / 2))}
        for a in VIT_SITES for b in CNN_SITES
    ]  # fmt: skip
    return Table.from_rows(rows)


VIT_SITES = [
    ("vit", "embed", "", 0),
    ("vit", "blocks.0.out", "blocks.0", 1),
    ("vit", "blocks.1.out", "blocks.1", 2),
]
CNN_SITES = [("cnn", "stem", "", 0), ("cnn", "layer1.0.out", "layer1.0", 2)]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["all"], 6),
        (["blocks,!embed"], 4),
        (["last"], 1),
        (["blocks.*.out", "stem"], 2),
        (["depth:0.5", "layer1*"], 1),
        (["blocks.-1.out,layer1.0.out"], 1),
    ],
)
def test_rows_of_sites(patterns: list[str], expected: int) -> None:
    table = rows_of_sites(pairs_table(), patterns)
    assert len(table) == expected
    if patterns == ["last"]:
        assert (table["site_a"][0], table["site_b"][0]) == (
            "blocks.1.out",
            "layer1.0.out",
        )


@pytest.mark.slow
@pytest.mark.parametrize("command", ["normratio", "norms", "pca", "cosine-map"])
@pytest.mark.parametrize("place", ["first", "last", "depth:0.5"])
def test_places_in_depth_are_those_of_the_command(
    command: str, place: str, everything: Path, tmp_path: Path
) -> None:
    tables = []
    for name, more in (("all", ()), ("some", ("--sites", place))):
        vitsee(command, everything / "vit.zarr", *more, "-o", tmp_path / f"{name}.csv")
        tables.append(read_result(tmp_path / f"{name}.csv").table)
    every, some = ({*table["site"].tolist()} for table in tables)
    assert {*rows_of_sites(tables[0], [place])["site"].tolist()} == some < every
    figure = vitsee(
        "plot", tmp_path / "all.csv", "-o", tmp_path / "a.png", "--sites", place
    )
    assert figure == "" and (tmp_path / "a.png").stat().st_size > 5_000


def test_first_and_last_are_those_of_the_table() -> None:
    """Of a model whose last stage has no grid, say, or of sublayers and heads alone."""
    depths = {"stem": 0, "layer1.0.out": 1, "layer2.0.out": 2}
    rows = [
        {"store": "cnn", "site": site, "block": site.removesuffix(".out"), "depth": depth,
         "rel_depth": depth / 3} for site, depth in depths.items()
    ]  # fmt: skip
    rows[0]["block"] = ""
    table = Table.from_rows(rows)
    chosen = {
        "last": ["layer2.0.out"],
        "first": ["layer1.0.out"],
        "all,!last": [*depths][:2],
    }
    for pattern, sites in chosen.items():
        assert rows_of_sites(table, [pattern])["site"].tolist() == sites
    heads = [row | {"site": f"{row['block']}.heads"} for row in rows[1:]]
    assert rows_of_sites(Table.from_rows(heads), ["last"])["site"].tolist() == [
        "layer2.0.heads"
    ]
    with pytest.raises(
        SiteError, match="no site matches 'last'; sites of this table, cnn: stem"
    ):
        rows_of_sites(table.with_frame(table.frame.head(1)), ["last"])


def test_parts_of_blocks() -> None:
    sites = {"blocks.1.attn.branch": "blocks.1", "blocks.1": "blocks.1", "norm": None}
    rows = pl.DataFrame(
        {"site": [*sites, "norm", None], "block": [*sites.values(), None, None]}
    )
    found = rows.select(part=block_part(rows))["part"].to_list()
    assert found == ["attn.branch", "out", "out", "out", "out"]
    assert (
        rows.drop("block").with_columns(part=block_part(rows.drop("block")))["part"][0]
        == "out"
    )


def test_rows_without_sites_stay() -> None:
    rows = [
        {"store": "a", "site": s, "block": "", "depth": 0, "rel_depth": 0.0} for s in "xy"
    ]
    table = Table.from_rows([*rows, {"store": "a", "site": ""}], list(rows[0]))
    assert rows_of_sites(table, ["x"])["site"].tolist() == ["x", ""]
    with pytest.raises(SiteError, match="no site matches 'z'"):
        rows_of_sites(table, ["z"])
    with pytest.raises(VitseeError, match="no column of sites"):
        rows_of_sites(Table.from_rows([{"model": "m"}]), ["x"])


# ------------------------------------------------------------------------------------ themes


@pytest.mark.slow
def test_dark_letters_turn_light(curves: Path, heatmap: Path) -> None:
    from matplotlib.colors import to_hex

    for result in (curves, heatmap):
        figure = redraw(result, look=Look(theme="dark"))
        assert to_hex(figure.get_facecolor()) == THEMES["dark"][0]
        for axes in figure.axes:
            texts = [
                axes.title,
                axes.xaxis.label,
                axes.yaxis.label,
                *axes.get_xticklabels(),
            ]
            legend = axes.get_legend()
            texts += [] if legend is None else legend.get_texts()
            # A title at the left is another text than the (empty) one in the middle.
            assert {to_hex(text.get_color()) for text in texts} == {THEMES["dark"][1]}
            for line in axes.lines:
                assert to_hex(line.get_color()) not in ("#000000", "#ffffff")
