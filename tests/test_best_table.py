"""The table of best layers as papers print it, over the results of several commands."""

from __future__ import annotations

import math
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from vitsee_cli.main import main
from vitsee_core.analyses.best_layer import read, run
from vitsee_core.analyses.best_layer.best_table import CONTROLS, BestTable
from vitsee_core.tables.results import Table
from vitsee_stores.errors import VitseeError

SITES = ("embed", "blocks.0.out", "blocks.1.out", "blocks.2.out")


def curve(
    store: str, metric: str, values: list[float], **more: Any
) -> list[dict[str, Any]]:
    """A value per layer, with an interval of a hundredth to either side."""
    of_store = {
        "store": store,
        "model": store,
        "block": "",
        "metric": metric,
        "baseline": "",
    }
    return [
        {
            "low": value - 0.01,
            "high": value + 0.01,
            **of_store,
            "site": site,
            "depth": depth,
        }
        | {"rel_depth": depth / 3, "value": value}
        | more
        for depth, (site, value) in enumerate(zip(SITES, values, strict=True))
    ]


def write(path: Path, rows: list[dict[str, Any]], command: str) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w") as file:
        Table.from_rows(rows, names).to_csv(file)
    path.with_name(path.name + ".json").write_text(
        f'{{"command": ["vitsee", "{command}"]}}'
    )
    return path


def results(folder: Path) -> list[str]:
    """As retrieve (of two sets), propagate, keypoints, knn and cluster write them: with rows about
    parts and controls."""
    flat = [0.02] * 4
    retrieve = curve("b16", "map_medium", [0.1, 0.2, 0.3, 0.372])
    retrieve += curve("b16", "ap_medium", [0.9] * 4, query="q7")
    retrieve += curve("b16", "map_medium", flat, baseline="chance")
    retrieve += curve("l_16", "map_medium", [0.1, 0.2, 0.4123, 0.3])
    retrieve += curve("l_16", "map_medium", flat, baseline="chance")
    paris = curve("b16", "map_medium", [0.1, 0.2, 0.3, 0.6])
    propagate = curve("b16", "jf", [0.3, 0.59, 0.5, 0.4])
    propagate += curve("b16", "jf", [0.99] * 4, video="bear", object=1)
    propagate += curve("b16", "j_decay", [0.5, 0.3, 0.2, 0.4])
    propagate += curve("b16", "jf", [0.05, 0.06, 0.04, 0.05], baseline="random")
    propagate += curve("l_16", "jf", [0.3, 0.2, 0.5, math.nan])
    propagate += curve("l_16", "j_decay", [0.5, 0.25, 0.3, 0.4])
    propagate += curve("l_16", "jf", [0.08, 0.06, 0.04, 0.05], baseline="random")
    keypoints = curve("b16", "pck@0.1", [0.1, 0.2, 0.2828, 0.2])
    keypoints += curve("b16", "pck@0.1", [0.95] * 4, **{"class": "cat"})
    knn = curve("b16", "top1", [0.1, 0.2, 0.3, 0.7], k=20)
    head = {"store": "b16", "model": "b16", "site": "pooled", "block": "", "depth": 3}
    knn += [{**knn[0], **head, "value": 0.7606}]
    cluster = curve("b16", "segment_purity", [0.2, 0.3, 0.4, 0.35], k=80)
    cluster += curve("b16", "segment_purity", [0.25] * 4, k=80, baseline="image")
    return [
        f"ROx={write(folder / 'ox.csv', retrieve, 'retrieve')}",
        f"RPar={write(folder / 'par.csv', paris, 'retrieve')}",
        str(write(folder / "propagate.csv", propagate, "propagate")),
        str(write(folder / "keypoints.csv", keypoints, "keypoints")),
        str(write(folder / "knn.csv", knn, "knn")),
        str(write(folder / "cluster.csv", cluster, "cluster")),
    ]


def rim(png: bytes) -> int:
    """The darkest pixel of a picture's outermost ones."""
    pixels = np.asarray(Image.open(BytesIO(png)).convert("L"))
    return int(
        min(edge.min() for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]))
    )


def vitsee(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_row_a_model_and_a_column_a_task(tmp_path: Path) -> None:
    result = vitsee("best-layer", *results(tmp_path), "--table", tmp_path / "t.md")
    assert result.exit_code == 0, result.stderr
    lines = (tmp_path / "t.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:6]]
    table = {
        row[0]: dict(zip(rows[0][1:], row[1:], strict=True))
        for row in [*rows[2:], rows[0]]
    }
    assert rows[0] == [
        *("model", "ROx: mean average precision (medium) ↑"),
        *("RPar: mean average precision (medium) ↑", "propagate: mean of J and F ↑"),
        *("propagate: decay of J ↓", "keypoints: keypoints found (PCK at 0.1) ↑"),
        *("knn: top-1 accuracy, k = 20 ↑", "cluster: purity of segments, k = 80 ↑"),
    ]
    assert list(table["b16"].values()) == [
        *("0.372 (3)", "0.600 (3)", "**0.590 (1)**", "**0.200 (2)**", "0.283 (2)"),
        *("0.761 (pooled)", "0.400 (2)"),
    ]
    assert list(table["l_16"].values()) == [
        *("**0.412 (2)**", "–", "0.500 (2)", "0.250 (1)", "–", "–", "–"),
    ]
    # of one model none is the best


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    given = results(tmp_path_factory.mktemp("results"))
    return run(read([name.partition("=")[2] or name for name in given]))


def test_the_lowest_is_bold_where_lower_is_better(table: Table) -> None:
    printed = BestTable.from_result(table)
    column = next(i for i, name in enumerate(printed.header) if "decay" in name)
    cells = {row[0].text: row[column] for row in printed.models}
    assert (cells["b16"].text, cells["b16"].bold) == ("0.200 (2)", True)
    assert (cells["l_16"].text, cells["l_16"].bold) == ("0.250 (1)", False)


def test_controls_are_below_and_said(table: Table) -> None:
    printed = BestTable.from_result(table)
    controls = {row[0].text: [cell.text for cell in row[1:]] for row in printed.controls}
    assert [*controls] == ["chance", "random", "image"]
    assert controls["chance"][0] == "0.020"
    # the stores' controls differ: their range
    column = printed.header.index("propagate: mean of J and F ↑") - 1
    assert controls["random"][column] == "0.060–0.080"
    assert controls["image"][-1] == "0.250" and controls["image"][0] == "–"
    assert not any(cell.bold for row in printed.controls for cell in row)
    assert "Random: Gaussian features of the same shape (Walmer" in printed.note
    assert "Grid" not in printed.note
    assert [*table.notes["baselines"]] == ["chance", "image", "random"]


def test_bold_only_where_intervals_lie_apart(tmp_path: Path) -> None:
    for second, half, expected in (
        (0.5, 0.01, [True, False]),
        (0.69, 0.01, [False, False]),
        (0.5, math.nan, [False, False]),
    ):
        rows = curve("a", "top1", [0.1, 0.2, 0.3, 0.7])
        rows += curve("b", "top1", [0.1, 0.2, 0.3, second])
        for row in rows:
            row |= {"low": row["value"] - half, "high": row["value"] + half}
        path = write(tmp_path / "r.csv", rows, "knn")
        printed = BestTable.from_result(run([path]))
        assert [row[1].bold for row in printed.models] == expected
        tied = (
            "Not told apart by 95 % intervals: knn: top-1 accuracy: a, b." in printed.note
        )
        assert tied == (not any(expected))


def test_latex(tmp_path: Path) -> None:
    rows = curve("a_b & $x$", "pck@0.1", [0.1, 0.2, 0.3, 0.25])
    rows += curve("a_b & $x$", "pck@0.1", [0.01, 0.02, 0.01, 0.02], baseline="chance")
    text = BestTable.from_result(
        run([write(tmp_path / "r.csv", rows, "keypoints")])
    ).latex()
    lines = text.splitlines()
    assert lines[1:] == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"model & keypoints: keypoints found (PCK at 0.1) $\uparrow$ \\",
        r"\midrule",
        r"a\_b \& \$x\$ & 0.300 (2) \\",
        r"\midrule",
        r"chance & 0.020 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    assert lines[0].startswith("% In brackets the best layer")


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_as_a_picture(table: Table, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"t{ending}"
    path.write_bytes(BestTable.from_result(table).written(path))
    if ending == ".svg":
        text = " ".join(re.findall(r">([^<]*)</text>", path.read_text()))
        assert "0.412 (2)" in text and "l_16" in text and CONTROLS["image"] in text
    elif ending == ".png":
        assert rim(path.read_bytes()) > 250, "nothing is cut there"
    else:
        assert path.read_bytes()[:4] == b"%PDF"


def test_no_value_at_all(tmp_path: Path) -> None:
    rows = curve("a", "top1", [math.nan] * 4) + curve("b", "top1", [0.1, 0.2, 0.3, 0.4])
    printed = BestTable.from_result(run([write(tmp_path / "r.csv", rows, "knn")]))
    assert [row[1].text for row in printed.models] == ["–", "0.400 (3)"]
    assert [row[1].bold for row in printed.models] == [False, False]


def test_the_command_refuses(tmp_path: Path) -> None:
    path = write(tmp_path / "r.csv", curve("a", "top1", [0.1, 0.2, 0.3, 0.4]), "knn")
    (tmp_path / "there.md").write_text("mine")
    for code, phrase, arguments in (
        (1, "expected a name that ends in .md, .tex", ["--table", tmp_path / "t.html"]),
        (1, "exists", ["--table", tmp_path / "there.md"]),
        (
            1,
            "named for two outputs",
            ["--table", tmp_path / "t.png", "--png", tmp_path / "t.png"],
        ),
        (
            2,
            "--paired has no such table",
            ["--table", tmp_path / "t.md", "--paired", "layers"],
        ),
    ):
        result = vitsee("best-layer", path, *arguments)
        assert (result.exit_code, result.stdout) == (code, ""), result.stderr
        assert phrase in result.stderr
    assert (tmp_path / "there.md").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"r.csv", "r.csv.json", "there.md"}
    with pytest.raises(VitseeError, match="ends in"):
        BestTable.from_result(run([path])).written(tmp_path / "t.csv")


def test_names_of_tasks(tmp_path: Path) -> None:
    path = write(tmp_path / "r.csv", curve("a", "top1", [0.1, 0.2, 0.3, 0.4]), "knn")
    result = vitsee("best-layer", f"ImageNet={path}")
    assert result.exit_code == 0 and "ImageNet top1" in result.stdout
    assert "knn top1" in vitsee("best-layer", path).stdout


def test_columns_of_the_dense_tasks_are_known() -> None:
    """A column that makes rows about a part of the images, and that best-layer does not know, would
    make such a row the best layer."""
    from vitsee_core.analyses import cluster, keypoints, knn, propagate, retrieve
    from vitsee_core.analyses.best_layer.layer_tasks import SETTINGS
    from vitsee_core.tables.columns import SITE, SUBSET_COLUMNS

    for module in (cluster, keypoints, knn, propagate, retrieve):
        about = module.COLUMNS[len(SITE) : module.COLUMNS.index("metric")]
        assert {*about} <= {*SUBSET_COLUMNS, *SETTINGS}, module.__name__


@pytest.mark.slow
def test_many_columns_stand_below_each_other(tmp_path: Path) -> None:
    """A page is 7 inches wide, whatever is printed; each column once, models again."""
    rows = [
        row
        for at in range(1, 31)
        for row in curve("a", f"mp@{at}_medium", [0.1, 0.2, 0.3, 0.4 + at / 1000])
    ]
    printed = BestTable.from_result(run([write(tmp_path / "r.csv", rows, "retrieve")]))
    figure = printed.figure()
    assert figure.get_size_inches()[0] <= 7
    cells = [c for t in figure.axes[0].tables for c in t.get_celld().values()]
    texts = [cell.get_text().get_text() for cell in cells]
    assert [texts.count(f"{0.4 + at / 1000:.3f} (3)") for at in range(1, 31)] == [1] * 30
    assert texts.count("model") == texts.count("a") > 1
    assert rim(printed.written(Path("t.png"))) > 250
