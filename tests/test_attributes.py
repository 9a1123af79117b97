"""Charts along an attribute of the stores, and several pairs of stores in one chart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from matplotlib.axes import Axes

from tests.command_line import invoke, one_line
from tests.manifests import edited
from tests.stores import write_sites
from vitsee_core.pages.report.redrawing import redraw
from vitsee_core.tables.attributes import with_attribute
from vitsee_core.tables.results import Table
from vitsee_core.tables.sidecars import describe_run
from vitsee_stores import open_store
from vitsee_stores.errors import VitseeError

SIZES = {"tiny": 5e6, "small": 22e6, "base": 86e6}
STORES = [{"label": name, "attributes": {"params": int(n)}} for name, n in SIZES.items()]


def plot(*args: object) -> Result:
    return invoke("plot", *args)


def written(
    path: Path, rows: Sequence[Mapping[str, Any]], command: str = "knn", **more: Any
) -> Path:
    table = Table.from_rows(rows)
    table.write(path)
    sidecar = {"command": ["vitsee", command], "notes": {}, **more}
    path.with_name(f"{path.name}.json").write_text(json.dumps(sidecar))
    return path


def row(
    store: str, value: float, site: str = "blocks.1.out", **more: Any
) -> dict[str, Any]:
    return {
        **{
            "store": store,
            "model": f"vit_{store}.in21k",
            "site": site,
            "block": site[:8],
        },
        **{"depth": int(site[7]) + 1, "rel_depth": (int(site[7]) + 1) / 2, **more},
        **{"metric": "top1", "value": value, "low": value - 0.1, "high": value + 0.1},
        **{"n_images": 50, "baseline": ""},
    }


ROWS = [row(name, 0.1 * (i + 1)) for i, name in enumerate(SIZES)]


def points(axes: Axes) -> dict[str, Any]:
    """Label of each curve -> its points."""
    return {
        str(line.get_label()): [tuple(p) for p in np.asarray(line.get_xydata()).tolist()]
        for line in axes.lines
        if not str(line.get_label()).startswith("_") and len(np.asarray(line.get_xdata()))
    }


def test_sidecars_record_what_charts_need(tmp_path: Path) -> None:
    store = write_sites(tmp_path / "a.zarr", {"embed": np.zeros((9, 7, 4))})
    with edited(tmp_path / "a.zarr") as manifest:
        manifest["model"] |= {"n_params": 1234, "input_size": [3, 192, 224]}
        manifest["info"]["data"] = {"data": "/sets/imagenet/val/", "split": None}
    store = open_store(tmp_path / "a.zarr")
    (entry,) = describe_run([store], command=["vitsee"], parameters={})["stores"]
    expected = {"params": 1234, "resolution": 192, "images": 9, "data": "val"}
    assert entry["attributes"] == expected


def test_values_along_an_attribute_of_the_sidecar(tmp_path: Path) -> None:
    result = written(
        tmp_path / "r.csv", [*ROWS, {**ROWS[0], "baseline": "random"}], stores=STORES
    )
    (axes,) = redraw(result, x="params").axes
    assert points(axes) == {
        name: [(n, pytest.approx(0.1 * (i + 1)))]
        for i, (name, n) in enumerate(SIZES.items())
    }
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "parameters"
    done = plot(result, "-o", tmp_path / "r.png", "--x", "params")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_panel_without_a_value_along_decades(tmp_path: Path) -> None:
    """matplotlib's limits of an empty panel are about 0, which has no logarithm."""
    empty = [
        {**r, "metric": "top5", "value": None, "low": None, "high": None} for r in ROWS
    ]
    result = written(tmp_path / "r.csv", [*ROWS, *empty], stores=STORES)
    assert plot(result, "-o", tmp_path / "r.png", "--x", "params").exit_code == 0
    limits = [axes.get_xlim() for axes in redraw(result, x="params").axes]
    assert len(limits) == 2 and all(low > 0 for low, _ in limits)


def test_a_store_with_two_values_is_refused(tmp_path: Path) -> None:
    result = written(tmp_path / "r.csv", ROWS, stores=STORES)
    own = tmp_path / "own.csv"
    own.write_text("store,epochs\ntiny,9\nsmall,8\nbase,7\ntiny,9\n")
    (axes,) = redraw(result, x="epochs", attributes=own).axes  # the same row again
    assert points(axes)["tiny"] == [(9, pytest.approx(0.1))]
    own.write_text("store,epochs\ntiny,9\nsmall,8\nbase,7\ntiny,10\n")
    assert one_line("plot", result, "--x", "epochs", "--attributes", own).endswith(
        "several values of epochs for store tiny: 9, 10; expected one row"
    )


def test_curves_by_a_column_of_ones_own(tmp_path: Path) -> None:
    """A store's row goes before its model's; a model's name stands for its tags; text is evenly
    spaced in the order of the table."""
    result = written(tmp_path / "r.csv", ROWS, stores=STORES)
    own = tmp_path / "own.csv"
    own.write_text(
        "store,model,family,pretraining,n_params\n"
        ",vit_tiny,A,1k,5\nsmall,,A,21k,22\n,vit_small.in21k,B,JFT,0\nbase,,B,JFT,86\n"
    )
    (axes,) = redraw(result, x="params", by=["family"], attributes=own).axes
    assert points(axes)["A"] == [(5, pytest.approx(0.1)), (22, pytest.approx(0.2))]
    assert points(axes)["B"] == [(86, pytest.approx(0.3))]
    (axes,) = redraw(result, x="pretraining", by=["metric"], attributes=own).axes
    assert [p[0] for p in points(axes)["top1"]] == [0, 1, 2]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1k", "21k", "JFT"]


def test_along_a_column_of_the_table_and_best_layers_results(tmp_path: Path) -> None:
    rows = [row("tiny", 0.1 * s, shots=s) for s in (1, 2, 5)]
    rows += [row("tiny", 0.9, site="blocks.0.out", shots=s) for s in (1, 2, 5)]
    result = written(tmp_path / "r.csv", rows)
    line = one_line("plot", result, "--x", "shots")
    assert "several values of tiny at shots = 1, which differ in site" in line
    (axes,) = redraw(result, sites=["last"], x="shots").axes
    assert points(axes) == {"tiny": [(s, pytest.approx(0.1 * s)) for s in (1, 2, 5)]}
    best = written(
        tmp_path / "best.csv",
        [{**one, "task": task} for task in ("knn top1", "probe top1") for one in ROWS],
        "best-layer",
        results=[{"path": "gone.csv", "made_by": {"stores": STORES}}],
    )
    panels = redraw(best, x="params").axes
    titles = [axes.get_title(loc="left") or axes.get_title() for axes in panels]
    assert titles == ["knn: top-1 accuracy", "probe: top-1 accuracy"]


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    result = written(tmp_path / "r.csv", ROWS, stores=STORES[:2])
    own = tmp_path / "own.csv"
    own.write_text("name,flops\ntiny,4\n")
    pairs = written(
        tmp_path / "p.csv", [{"store_a": "a", "store_b": "b", "metric": "cka"}], "cka"
    )
    for args, expected in (
        (
            (result, "--x", "params"),
            "params is not known of base; expected a column of the table",
        ),
        ((result, "--x", "flops"), "flops is not known of tiny, small, base; "),
        (
            (result, "--x", "flops", "--attributes", own),
            "expected flops beside store or model",
        ),
        ((pairs, "--x", "params"), "compares pairs"),
        ((result, pairs, "-o", tmp_path / "x.png"), "expected results of one command"),
    ):
        assert expected in one_line("plot", *args) and not [*tmp_path.glob("*.png")]
    assert plot(result, "--by", "site").exit_code == plot(result, result).exit_code == 2


def test_a_store_of_two_models_has_two_attributes(tmp_path: Path) -> None:
    """Results whose stores share a label are told apart, in the sidecar's attributes too."""
    paths = [
        written(
            tmp_path / f"{weights}.csv",
            [{**row("vit", value), "model": "vit", "weights": weights}],
            stores=[{"label": "vit", "weights": weights, "attributes": {"params": n}}],
        )
        for weights, value, n in (("a", 0.2, 10), ("b", 0.4, 20))
    ]
    (axes,) = redraw(paths, x="params").axes
    assert points(axes) == {"vit (a)": [(10, 0.2)], "vit (b)": [(20, 0.4)]}


def test_several_pairs_of_stores_are_one_chart(tmp_path: Path) -> None:
    """Depths of models of different sizes are comparable only where they are relative."""
    paths = []
    for name, n in (("b16", 3), ("l16", 5)):
        rows = []
        for i in range(n):
            place = {"model": "m", "weights": "w", "site": f"blocks.{i}.out", "depth": i}
            place |= {"block": f"blocks.{i}", "rel_depth": i / (n - 1)}
            a, b = ({"store": store, **place} for store in (name, f"{name}-10pc"))
            cells = {f"{k}_a": v for k, v in a.items()} | {
                f"{k}_b": v for k, v in b.items()
            }
            cells |= {
                "metric": "cka",
                "value": i / n,
                "std": np.nan,
                "low": np.nan,
                "high": np.nan,
            }
            rows.append({**cells, "spread": "", "n_images": 9})
        paths.append(written(tmp_path / f"{name}.csv", rows, "cka"))
    (axes,) = redraw(paths).axes
    assert points(axes) == {
        f"{name} against {name}-10pc": [(i / (n - 1), i / n) for i in range(n)]
        for name, n in (("b16", 3), ("l16", 5))
    }
    assert axes.get_xlabel() == "relative depth"


def test_attributes_of_no_store_in_python() -> None:
    table = Table.from_rows(ROWS)
    assert with_attribute(table, "value", []) is table
    with pytest.raises(VitseeError, match="in --attributes FILE"):
        with_attribute(table, "flops", [{"stores": 3, "results": [{"made_by": None}]}])


FAMILIES = {"tiny": "FS", "small": "DINO", "base": "FS"}


def test_groups_by_an_attribute(tmp_path: Path) -> None:
    result = written(tmp_path / "r.csv", ROWS, stores=STORES)
    mine = tmp_path / "mine.csv"
    lines = ["store,family", *(f"{name},{family}" for name, family in FAMILIES.items())]
    mine.write_text("\n".join(lines) + "\n")
    figure = redraw(result, group_by="family", attributes=mine)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["FS", "DINO"]
    assert [[*points(axes)][:2] for axes in figure.axes] == [["tiny", "base"], ["small"]]
    wrong = plot(result, "--group-by", "family", "-o", tmp_path / "f.png")
    assert wrong.exit_code == 1 and "family is not known of tiny" in wrong.stderr
    both = plot(result, "--group-by", "model", "--x", "params", "-o", tmp_path / "f.png")
    assert both.exit_code == 2 and not (tmp_path / "f.png").exists()


def test_groups_of_labels_are_an_attribute(tmp_path: Path) -> None:
    label = {name: f"{family}/{name}" for name, family in FAMILIES.items()}
    rows = [{**own, "store": label[str(own["store"])]} for own in ROWS]
    stores = [{**entry, "label": label[str(entry["label"])]} for entry in STORES]
    result = written(tmp_path / "r.csv", rows, stores=stores)
    (axes,) = redraw(result, x="params", by=["group"]).axes
    assert {name: len(of) for name, of in points(axes).items()} == {"FS": 2, "DINO": 1}
