"""Best layers from result files, the curves they are drawn as, and what a user sees."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from vitsee_cli.main import main
from vitsee_core.analyses.best_layer import plot, read, run
from vitsee_core.analyses.best_layer.layer_tasks import tasks, to_last
from vitsee_core.figures.curve_looks import Curve, curve_looks, site_kind
from vitsee_core.figures.depth_curves import draw_depth_curves
from vitsee_core.figures.panels import new_figure
from vitsee_core.figures.plotting import (
    colour,
)
from vitsee_core.tables.metrics import direction
from vitsee_core.tables.results import Table, read_result
from vitsee_stores.errors import VitseeError

LAYERS = ("embed", "blocks.0.out", "blocks.1.out", "blocks.2.out")


def write(path: Path, rows: list[dict[str, Any]], command: str = "") -> Path:
    with path.open("w") as file:
        Table.from_rows(rows).to_csv(file)
    if command:
        sidecar = {"command": ["vitsee", command, "a.zarr"]}
        path.with_name(path.name + ".json").write_text(json.dumps(sidecar))
    return path


def scores(
    values: list[float], store: str = "vit", metric: str = "top1", **more: Any
) -> list[dict[str, Any]]:
    """One row a layer."""
    return [
        {
            "store": store,
            "model": f"demo:{store}",
            "site": site,
            "depth": i,
            "rel_depth": i / 3,
        }
        | {"metric": metric, "value": value, "low": value - 0.1, "high": value + 0.1}
        | {"n_images": 50}
        | more
        for i, (site, value) in enumerate(zip(LAYERS, values, strict=False))
    ]


def self_cka(store: str = "vit", half: bool = False) -> list[dict[str, Any]]:
    """CKA of i and j is 1 - |i - j| / 10; each pair once where `half`."""
    return [
        {"store_a": store, "site_a": LAYERS[i], "depth_a": i}
        | {"store_b": store, "site_b": LAYERS[j], "depth_b": j}
        | {"metric": "cka", "value": 1 - abs(i - j) / 10}
        | {"low": 0.1, "high": 0.9}
        for i in range(4)
        for j in range(4)
        if not half or i >= j
    ]


# ---------------------------------------------------------------- the best


def test_the_largest_value_and_its_layer(tmp_path: Path) -> None:
    rows = scores([0.1, 0.5, 0.8, 0.7], k=20, baseline="")
    rows += scores([0.4, 0.3, 0.2, 0.1], store="cnn", k=20, baseline="")
    rows += scores([0.1, 0.1, 0.12, 0.1], k=20, baseline="random")
    table = run(read([write(tmp_path / "r.csv", rows, "knn")]))
    assert table["task"].tolist() == ["knn top1, k = 20"] * 3
    assert table["store"].tolist() == ["vit", "vit", "cnn"]
    assert table["baseline"].tolist() == ["", "random", ""]
    assert table["site"].tolist() == ["blocks.1.out", "blocks.1.out", "embed"]
    assert table["depth"].tolist() == [2, 2, 0]
    assert table["value"].tolist() == [0.8, 0.12, 0.4]
    assert table["low"].tolist() == [0.8 - 0.1, 0.12 - 0.1, 0.4 - 0.1]
    assert table["n_layers"].tolist() == [4] * 3
    assert table["model"].tolist() == ["demo:vit", "demo:vit", "demo:cnn"]
    assert not {"shots", "head"} & {*table.frame.columns}
    assert table["file"].tolist() == [str(tmp_path / "r.csv")] * 3


def test_results_by_path(tmp_path: Path) -> None:
    """In a notebook: one path, several, or some that were read before."""
    paths = [
        write(tmp_path / f"{c}.csv", scores([0.5, c, 0.7]), "knn") for c in (0.6, 0.9)
    ]
    expected = run(read(paths))
    mixed: list[Any] = [*read(paths[:1]), paths[1]]
    for given in (paths, [*map(str, paths)], mixed):
        found = run(list[Any](given))
        assert list(found.written.columns) == list(expected.written.columns)
        assert found.frame.equals(expected.frame)
    assert run(paths[1])["value"].tolist() == [0.9]
    with pytest.raises(VitseeError, match="given twice"):
        run([paths[0], str(paths[0])])


def test_against_a_loop(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        row | {"head": head}
        for store in ("a", "b", "c")
        for metric in ("iou", "purity")
        for head in range(3)
        for row in scores(rng.random(4).round(2).tolist(), store, metric)
    ]
    table = run(read([write(tmp_path / "r.csv", rows)]))
    assert len(table) == 6
    for i, place in enumerate(zip(table["store"], table["metric"], strict=True)):
        own = [row for row in rows if (row["store"], row["metric"]) == place]
        best = max(own, key=lambda row: row["value"])  # of equal ones the first
        for name in ("site", "depth", "head", "value", "high"):
            assert table[name][i] == best[name]


def test_ties_gaps_and_nothing(tmp_path: Path) -> None:
    rows = scores([0.2, 0.9, 0.9, math.nan])
    rows += scores([math.nan] * 4, store="cnn")
    table = run(read([write(tmp_path / "r.csv", rows)]))
    assert table["site"].tolist() == ["blocks.0.out", ""]
    assert table["n_layers"].tolist() == [3, 0]
    assert math.isnan(table["value"][1]) and table["depth"].tolist() == [1, None]
    plot(table, read([tmp_path / "r.csv"]))
    table = run(read([write(tmp_path / "inf.csv", scores([math.inf, 0.5, math.nan]))]))
    assert (table["site"].tolist(), table["value"].tolist()) == (["blocks.0.out"], [0.5])


def test_tasks_join_over_files_and_part_over_repetitions(tmp_path: Path) -> None:
    first = write(
        tmp_path / "a.csv", scores([0.1, 0.2]) + scores([0.5], metric="top5"), "probe"
    )
    other = write(tmp_path / "b.csv", scores([0.3, 0.2], store="cnn"), "probe")
    again = write(tmp_path / "c.csv", scores([0.7, 0.2], shots=10), "probe")
    twice = write(tmp_path / "d.csv", scores([0.8, 0.2]), "probe")
    plain = write(tmp_path / "e.csv", scores([0.4]))
    found = tasks(read([first, other, again, twice, plain]))
    assert {task: [*dict.fromkeys(rows["store"])] for task, rows in found.items()} == {
        "probe top1": ["vit", "cnn"],
        "probe top5": ["vit"],
        "probe top1, shots = 10": ["vit"],
        f"probe top1 ({twice})": ["vit"],
        "top1": ["vit"],
    }
    assert found["probe top1"]["value"].to_list() == [0.1, 0.2, 0.3, 0.2]


def test_metrics_and_classes(tmp_path: Path) -> None:
    rows = [row | {"class": ""} for row in scores([0.1, 0.2])]
    rows += [
        row | {"class": c}
        for c in ("cat", "7")
        for row in scores([0.5], metric="top1_class")
    ]
    files = read([write(tmp_path / "r.csv", rows)])
    assert list(tasks(files)) == ["top1"]
    assert list(tasks(files, ["top1_class"])) == [
        "top1_class, class = cat",
        "top1_class, class = 7",
    ]
    with pytest.raises(
        VitseeError, match=r"no result has the metric 'iou'; they have top1, top1_"
    ):
        run(files, ["iou"])


def test_poolings_are_tasks(tmp_path: Path) -> None:
    rows = [
        row | {"token": t, "row": ""}
        for t in ("cls", "mean")
        for row in scores([0.1, 0.2])
    ]
    both = write(tmp_path / "both.csv", rows)
    assert list(tasks(read([both]))) == ["top1, token = cls", "top1, token = mean"]
    assert list(tasks(read([write(tmp_path / "one.csv", rows[:2])]))) == ["top1"]
    # --tokens 0,0 --tokens 1,0: no mean over all tokens stands for the layer
    some = [
        row | {"token": f"{i},0", "row": i, "col": 0}
        for i in (0, 1)
        for row in scores([0.1])
    ]
    found = tasks(read([write(tmp_path / "some.csv", some)]))
    assert list(found) == ["top1, token = 0,0", "top1, token = 1,0"]


def probed(store: str, sites: dict[str, list[float]], cls: bool) -> list[dict[str, Any]]:
    """Rows of `probe --tokens each`: two patches per site, their mean, and a class token."""
    own = {"token": "cls", "row": None, "col": None}
    rows = [row | own for row in scores([0.9] * len(sites), store) if cls]
    for at, values in enumerate(zip(*sites.values(), strict=True)):
        place = {"token": f"0,{at}", "row": 0, "col": at}
        rows += [row | place for row in scores(list(values), store)]
    means = scores([sum(values) / len(values) for values in sites.values()], store)
    return [*rows, *(row | {"token": "each", "row": None, "col": None} for row in means)]


@pytest.mark.slow
def test_a_layer_is_the_mean_over_its_tokens(tmp_path: Path) -> None:
    """Raghu et al. 2021, Fig. 11: the second site is better on average, the first has the best
    token; a model without a class token is in the same task."""
    vit = probed("vit", {"a": [0.9, 0.1], "b": [0.6, 0.6]}, cls=True)
    cnn = probed("cnn", {"a": [0.7, 0.1], "b": [0.5, 0.5]}, cls=False)
    apart = [write(tmp_path / f"{i}.csv", rows) for i, rows in enumerate((vit, cnn))]
    for paths in ([write(tmp_path / "both.csv", vit + cnn)], apart):
        files = read(paths)
        table = run(files)
        each = table.filter(task="top1, token = each")
        assert each["store"].tolist() == ["vit", "cnn"]
        assert each["value"].tolist() == [0.6, 0.5]
        assert [*dict.fromkeys(each["site"])] == [scores([0, 0])[1]["site"]]
        assert [*dict.fromkeys(table["task"])] == [
            "top1, token = cls",
            "top1, token = each",
        ]
        assert any(
            "left out: 8 rows about single" in said for said in table.notes["remarks"]
        )
        curve = plot(table, files).axes[1].lines[0]
        assert np.asarray(curve.get_ydata()).tolist() == [0.5, 0.6]
        best = run(files, best_token=True)
        assert best.filter(task="top1, token = best")["value"].tolist() == [0.9, 0.7]
        assert best.filter(task="top1, token = best")["token"].tolist() == ["0,0", "0,0"]
        assert best.filter(task="top1, token = each")["value"].tolist() == [0.6, 0.5]
        assert not any("single tokens" in remark for remark in best.notes["remarks"])
        assert len(plot(best, files).axes) > len(plot(table, files).axes)


def test_a_site_measured_with_and_without_a_token(tmp_path: Path) -> None:
    """`lens --patches`: the class token's row, the mean over patches, and every patch."""
    rows = [row | {"token": "", "row": None, "col": None} for row in scores([0.3, 0.8])]
    rows += [
        row | {"token": "patches", "row": None, "col": None} for row in scores([0.1, 0.2])
    ]
    rows += [
        row | {"token": "", "row": 0, "col": i}
        for i in range(2)
        for row in scores([1.0, 1.0])
    ]
    table = run(read([write(tmp_path / "lens.csv", rows)]))
    assert table["task"].tolist() == ["top1", "top1, token = patches"]
    assert table["value"].tolist() == [0.8, 0.2]


def test_best_token_through_the_command(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.csv", probed("vit", {"a": [0.9, 0.1], "b": [0.6, 0.6]}, cls=False)
    )
    result = best_layer_command(path, "--best-token")
    assert result.exit_code == 0 and "token = best" in result.stdout
    refused = best_layer_command(path, "--best-token", "--paired", "layers")
    assert refused.exit_code == 2 and "leave --paired out" in refused.stderr


# ---------------------------------------------------------------- reading


def test_read_result(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text(
        'store,site,depth,k,value,metric,class\n5,"a,b",0,,,x,\n5,c,1,3,2,x,1\n'
    )
    file = read_result(path)
    assert (file.command, file.sidecar) == ("", {})
    columns = file.table.frame.to_dict(as_series=False)
    assert columns["store"] == ["5", "5"] and columns["site"] == ["a,b", "c"]
    assert columns["depth"] == [0, 1] and columns["k"] == [None, 3]
    assert columns["class"] == [None, "1"]
    path.write_text("value\n1.5\n\n2,3\n")
    with pytest.raises(VitseeError, match="row 2 has 2 cells, its header 1"):
        read_result(path)


def test_the_command_of_a_sidecar(tmp_path: Path) -> None:
    """Behind its flags; none of a broken one."""
    path = write(tmp_path / "r.csv", scores([0.1]))
    flags = '{"command": ["vitsee", "-q", "knn", "a.zarr"]}'
    for text, command in ((flags, "knn"), ("{", ""), ("[1]", ""), ('{"command": 3}', "")):
        (tmp_path / "r.csv.json").write_text(text)
        assert read_result(path).command == command


def test_files_that_are_none_of_ours(tmp_path: Path) -> None:
    good = write(tmp_path / "good.csv", scores([0.1]))
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / "other.csv").write_text("name,age\nx,3\n")
    write(tmp_path / "cka.csv", self_cka())
    crossed = [row | {"store_b": "cnn"} for row in self_cka()]
    write(tmp_path / "crossed.csv", crossed)
    for names, phrase in (
        (["empty.csv"], "empty.csv has no rows"),
        (["picture.csv"], "is no CSV text"),
        (
            ["other.csv"],
            r"has the columns name, age; expected store, site, depth, metric, value",
        ),
        ([""], "is a folder"),
        (["cka.csv"], "only CKA results"),
        (
            ["good.csv", "crossed.csv"],
            r"compares cnn, vit with each other; .*vitsee cka STORE",
        ),
        (["good.csv", "good.csv"], "good.csv is given twice"),
    ):
        with pytest.raises(VitseeError, match=phrase):
            read([tmp_path / name for name in names])
    assert len(read([good, tmp_path / "cka.csv"])) == 2


def test_columns_of_numbers(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.csv", scores([math.nan, math.nan]))
    assert np.isnan(read_result(empty).table["value"]).all()
    table = run(read([empty]))
    assert table["site"].tolist() == [""] and table["n_layers"].tolist() == [0]
    plot(table, read([empty]))
    with pytest.raises(VitseeError, match=r"give them too, as plot\(table, files="):
        plot(table)
    placeless = scores([0.2, 0.4], depth=math.nan, rel_depth=math.nan)
    plot(run(read([path := write(tmp_path / "placeless.csv", placeless)])), read([path]))
    for name in ("value", "depth"):
        words = write(tmp_path / "words.csv", scores([0.2, 0.4], **{name: "high"}))
        with pytest.raises(VitseeError, match=f"column {name} has the text 'high'"):
            read([words])


def test_no_l2_is_chosen_on_the_reported_images(tmp_path: Path) -> None:
    chosen = [row | {"l2": 2.0**i} for i, row in enumerate(scores([0.1, 0.4]))]
    table = run(read([write(tmp_path / "a.csv", chosen, "probe")]))
    assert (table["task"].tolist(), table["l2"].tolist()) == (["probe top1"], [2.0])
    several = scores([0.1, 0.2], l2=1.0) + scores([0.4, 0.3], l2=8.0)
    table = run(read([write(tmp_path / "b.csv", several, "probe")]))
    assert table["task"].tolist() == ["probe top1, l2 = 1.0", "probe top1, l2 = 8.0"]
    assert table["value"].tolist() == [0.2, 0.4]


# ---------------------------------------------------------------- redundancy


@pytest.mark.parametrize("half", [False, True])
def test_cka_to_the_last_layer(half: bool) -> None:
    rows = self_cka(half=half)
    # a norm of the last block is no layer of the residual stream
    rows += [
        {**rows[0], "site_a": "blocks.2.norm1", "depth_a": 9, "value": 0.3},
        {**rows[0], "site_b": "norm", "depth_b": 9, "value": 0.3},
    ]
    ((store, last, table),) = to_last(Table.from_rows(rows).frame)
    assert (store, last) == ("vit", "blocks.2.out")
    assert table["site"].to_list() == list(LAYERS)
    assert table["value"].to_list() == pytest.approx([0.7, 0.8, 0.9, 1.0])
    assert table["rel_depth"].to_list() == [0, 1 / 3, 2 / 3, 1]


def test_the_redundancy_panel(tmp_path: Path) -> None:
    rows = scores([0.1, 0.6, 0.7, 0.7]) + scores([0.5] * 4, store="cnn")
    files = read(
        [write(tmp_path / "r.csv", rows), write(tmp_path / "cka.csv", self_cka())]
    )
    figure = plot(run(files), files)
    panel = figure.axes[1]
    assert panel.get_title(loc="left").startswith("vit")
    lines = {str(line.get_label()): np.asarray(line.get_ydata()) for line in panel.lines}
    assert lines["CKA with the last layer"].tolist() == pytest.approx(
        [0.7, 0.8, 0.9, 1.0]
    )
    assert lines["top-1 accuracy"].tolist() == [0.1, 0.6, 0.7, 0.7]


# ---------------------------------------------------------------- curves


def test_kinds_of_sites() -> None:
    for site, kind in {
        "embed": "out",
        "stem": "out",
        "blocks.11.out": "out",
        "layer1.0.out": "out",
        "stages.0.blocks.1.out": "out",
        "blocks.3.attn.branch": "attn.branch",
        "stages.0.blocks.1.norm1": "norm1",
        "blocks.3": "block",
        "norm": "head",
        "logits": "head",
    }.items():
        assert site_kind(site) == kind, site


def test_curves_keep_their_colour_and_sites_of_no_block_their_place() -> None:
    rows = scores([0.1, 0.2, 0.3, 0.4]) + scores([0.3] * 4, store="cnn")
    head = {**rows[3], "site": "logits", "value": 0.9}
    norms = [{**row, "site": f"blocks.{i}.norm1"} for i, row in enumerate(rows[:3])]
    chance = [{**row, "baseline": "random", "value": 0.05} for row in [*rows[:4], head]]
    everything = Table.from_rows(
        [{"baseline": "", **row} for row in [*rows, head, *norms]] + chance
    ).frame
    looks = curve_looks(everything)
    kinds = {"vit": ("out", "head", "norm1"), "cnn": ("out",)}
    assert {*looks} == {
        Curve(store, (), kind) for store in kinds for kind in kinds[store]
    }
    # The colour is the store's, the stroke the kind's.
    tints = {curve: look["color"] for curve, look in looks.items()}
    assert tints == {curve: colour(int(curve.store == "cnn")) for curve in looks}
    assert (
        looks[Curve("vit", (), "norm1")]["linestyle"]
        != looks[Curve("vit", (), "out")]["linestyle"]
    )
    axes = new_figure(4, 3).add_subplot()
    draw_depth_curves(
        axes, everything.filter(store="cnn"), among=everything, ylabel="top1"
    )
    full = [line for line in axes.lines if len(np.asarray(line.get_xdata()))]
    lines = {str(line.get_label()): line for line in full}
    assert np.asarray(lines["cnn, block output"].get_ydata()).tolist() == [0.3] * 4
    axes = new_figure(4, 3).add_subplot()
    draw_depth_curves(axes, everything)
    point = next(
        line for line in axes.lines if np.asarray(line.get_ydata()).tolist() == [0.9]
    )
    assert float(np.asarray(point.get_xdata())[0]) > 1 and point.get_color() == colour(0)
    assert [text.get_text() for text in axes.get_xticklabels()][-1] == "logits"
    assert axes.get_ylim()[0] == 0


def test_one_point_has_its_baseline_and_interval() -> None:
    rows = [{**scores([0.5])[0], "baseline": name} for name in ("", "random")]
    axes = new_figure(4, 3).add_subplot()
    draw_depth_curves(axes, Table.from_rows(rows).frame)
    paths = [path for c in axes.collections for path in c.get_paths()]
    ends = [np.ptp(np.asarray(path.vertices), axis=0) for path in paths]
    assert any(width > 0 and height == 0 for width, height in ends)  # the baseline's dash
    assert any(height == pytest.approx(0.2) for _, height in ends)  # low to high


def test_panels_and_stars(tmp_path: Path) -> None:
    rows = scores([0.1, 0.6, 0.7, 0.65], k=20) + scores(
        [0.5, 0.4, 0.3, 0.2], store="cnn", k=20
    )
    rows += [{**row, "metric": "top5"} for row in rows]
    rows += [{**rows[3], "site": "logits", "value": 0.95}]
    files = read([write(tmp_path / "r.csv", rows, "knn")])
    table = run(files)
    figure = plot(table, files)
    assert len(figure.axes) == 2 + 1
    stars = [line for line in figure.axes[0].lines if line.get_marker() == "*"]
    places = [tuple(np.asarray(xy).tolist() for xy in s.get_data()) for s in stars]
    texts = (text.get_text() for text in figure.axes[0].get_xticklabels())
    ticks = dict(zip(texts, figure.axes[0].get_xticks(), strict=True))
    assert places == [([ticks["logits"]], [0.95]), ([0.0], [0.5]), ([], [])]
    written = [
        cell.get_text().get_text()
        for cell in figure.axes[2].tables[0].get_celld().values()
    ]
    assert "0.950 (logits)" in written and "0.500 (0)" in written


# ---------------------------------------------------------------- the command


def best_layer_command(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["best-layer", *map(str, args)])


@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    knn = write(tmp_path / "knn.csv", scores([0.1, 0.3, 0.2, 0.2], k=20), "knn")
    cka = write(tmp_path / "cka.csv", self_cka(), "cka")
    csv, png = tmp_path / "best.csv", tmp_path / "best.png"
    result = best_layer_command(knn, cka, "-o", csv, "--png", png)
    assert (result.exit_code, result.stdout) == (0, "")
    lines = csv.read_text().splitlines()
    assert lines[0].startswith(
        "store,model,site,depth,rel_depth,task,k,file,metric,value,low,"
    )
    assert lines[1].startswith("vit,demo:vit,blocks.0.out,1,")
    sidecar = json.loads((tmp_path / "best.csv.json").read_text())
    assert [Path(r["path"]).name for r in sidecar["results"]] == ["knn.csv", "cka.csv"]
    assert sidecar["results"][0]["made_by"]["command"][1] == "knn"
    assert png.read_bytes()[1:4] == b"PNG"
    assert best_layer_command(knn).stdout == csv.read_text()
    # its own output is a result too
    assert best_layer_command(csv).exit_code == 0


def test_a_figure_where_no_file_has_intervals(tmp_path: Path) -> None:
    rows = [
        {k: v for k, v in r.items() if k not in ("low", "high")}
        for r in scores([0.5, 0.7])
    ]
    files = read([write(tmp_path / "cluster.csv", rows, "cluster")])
    table = run(files)
    assert "low" not in table.frame.columns
    stars = [
        line for line in plot(table, files).axes[0].lines if line.get_marker() == "*"
    ]
    assert [y for line in stars for y in np.asarray(line.get_ydata()).tolist()] == [0.7]


def test_command_refuses_in_one_line(tmp_path: Path) -> None:
    good = write(tmp_path / "good.csv", scores([0.1]))
    (tmp_path / "other.csv").write_text("name,age\nx,3\n")
    csv = tmp_path / "best.csv"
    for args, phrase in (
        ((tmp_path / "other.csv",), "it has the columns name, age"),
        ((tmp_path / "none.csv",), "none.csv: no such file"),
        ((good, "--metric", "iou"), "they have top1"),
        ((good, "--png", tmp_path / "best.jpg"), ".png"),
    ):
        result = best_layer_command(*args, "-o", csv)
        assert (result.exit_code, result.stdout) == (1, ""), args
        assert phrase in result.stderr and len(result.stderr.splitlines()) == 1
        assert not csv.exists()
    assert best_layer_command().exit_code == 2


# ---------------------------------------------------------------- which side is better


@pytest.mark.parametrize(
    ("metric", "side"),
    [
        *(
            (m, "higher")
            for m in ("top1", "top5", "top1_class", "purity", "nmi", "ari", "iou")
        ),
        *(
            (m, "higher")
            for m in ("map", "map_hard", "map@100", "map@100_public", "mp@10_easy")
        ),
        *(
            (m, "higher")
            for m in ("pck@0.1", "pck_point@0.05", "pck_image@1e-2", "jf", "j_recall")
        ),
        *(
            (m, "higher")
            for m in ("segment_ari", "lens_top1", "lens_agreement", "agreement")
        ),
        *((m, "lower") for m in ("lens_rank", "j_decay", "f_decay", "kl")),
        *(
            (m, "none")
            for m in ("distance_px", "norm_ratio", "cka", "mutual_knn", "alpha")
        ),
        *(
            (m, "none")
            for m in ("top", "maps", "map@", "purity_", "radius50_px", "", "rankme")
        ),
    ],
)
def test_directions(metric: str, side: str) -> None:
    assert direction(metric) == side


def test_the_smallest_where_lower_is_better(tmp_path: Path) -> None:
    rows = scores([3.0, 1.5, 2.0, 1.5], metric="lens_rank", baseline="")
    file = write(tmp_path / "lens.csv", rows, "lens")
    table = run(read([file]))
    assert table["site"].tolist() == ["blocks.0.out"] and table["value"].tolist() == [1.5]
    assert table["ties"].tolist() == ["blocks.2.out"]
    assert table["n_overlap"].tolist() == [1]  # 1.5 -+ 0.1 of the last; 2.0 is far
    drawn = plot(table, read([file]))
    star = next(line for line in drawn.axes[0].lines if line.get_marker() == "*")
    assert np.asarray(star.get_ydata()).tolist() == [1.5]


def test_what_has_no_better_side_is_left_out_and_named(tmp_path: Path) -> None:
    px = write(tmp_path / "px.csv", scores([9, 8, 7], metric="distance_px"), "attn-dist")
    knn = write(tmp_path / "knn.csv", scores([0.1, 0.4, 0.3]), "knn")
    table = run(read([px, knn]))
    assert table["task"].tolist() == ["knn top1"]
    said = "left out, as neither side is better: distance_px"
    assert table.notes["remarks"][0] == said
    with pytest.raises(
        VitseeError, match="no layer is the best by distance_px: neither a higher"
    ):
        run(read([px, knn]), ["distance_px"])
    with pytest.raises(
        VitseeError, match=r"no result has a metric of which one side .*distance"
    ):
        run(read([px]))


def test_ties_overlaps_and_gaps_are_said(tmp_path: Path) -> None:
    # intervals are -+ 0.1: of the best at 0.8, 0.62 overlaps and 0.5 does not
    rows = scores([0.62, 0.8, 0.5, 0.8], baseline="") + [
        row | {"head": 3} for row in scores([math.nan], baseline="")
    ]
    table = run(read([write(tmp_path / "r.csv", rows, "knn")]))
    assert table["site"].tolist() == ["blocks.0.out"]
    assert table["ties"].tolist() == ["blocks.2.out"]
    assert table["n_overlap"].tolist() == [2]
    assert table["n_layers"].tolist() == [4]
    assert table.notes["remarks"] == [
        "knn top1, vit: 1 of 5 rows have no value",
        "knn top1, vit: blocks.0.out is the first of equal ones: blocks.2.out",
        "knn top1, vit: the intervals of 2 of the other 3 layers overlap that of blocks.0.out",
    ]


def test_equal_heads_of_one_layer_are_told_apart(tmp_path: Path) -> None:
    rows = [
        row | {"head": h, "baseline": ""} for h in (0, 1) for row in scores([0.3, 0.7])
    ]
    table = run(read([write(tmp_path / "r.csv", rows, "saliency")]))
    assert (table["site"][0], table["head"][0]) == ("blocks.0.out", 0)
    assert table["ties"].tolist() == ["blocks.0.out head 1"]
    assert table["n_overlap"].tolist() == [0]


@pytest.mark.parametrize("part", ["group", "query", "video", "object", "segment"])
def test_rows_about_a_part_of_the_images_are_left_out(tmp_path: Path, part: str) -> None:
    rows = [row | {part: ""} for row in scores([0.3, 0.2], metric="map")]
    rows += [row | {part: "one"} for row in scores([0.1, 0.9], metric="map")]
    table = run(read([write(tmp_path / "r.csv", rows, "retrieve")]))
    assert table["value"].tolist() == [0.3]
    with pytest.raises(VitseeError, match="no result has rows about whole layers"):
        run(read([write(tmp_path / "s.csv", rows[2:], "retrieve")]))


def test_saliency_s_baselines_stand_beside_each_token(tmp_path: Path) -> None:
    rows = []
    for token, head, best, baseline, value in (
        ("cls", 0, "head", "", 0.4), ("mean", 0, "head", "", 0.4), ("", None, "", "random", 0.2),
        ("cls", None, "image", "", 0.9),
    ):  # fmt: skip
        about: dict[str, Any] = {
            "token": token,
            "head": head,
            "best": best,
            "baseline": baseline,
        }
        rows += scores([value / 2, value], metric="iou", **about)
    files = read([write(tmp_path / "iou.csv", rows, "saliency")])
    table = run(files)
    expected = ["saliency iou, token = cls"] * 2 + ["saliency iou, token = mean"] * 2
    assert table["task"].tolist() == expected
    assert table["baseline"].tolist() == ["", "random"] * 2
    assert table["value"].tolist() == [0.4, 0.2] * 2  # never the images' own best heads
    titles = [
        axes.get_title() or axes.get_title(loc="left") for axes in plot(table, files).axes
    ]
    assert sum("saliency" in title for title in titles) == 2
