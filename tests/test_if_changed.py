"""--if-changed: a repeated command succeeds at once, and works again where something changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import invoke, one_line
from vitsee_core.pages.report.outputs import Outputs, is_up_to_date
from vitsee_core.tables.sidecars import digest_of, newest_ns


def ran(*words: object) -> str:
    result = invoke(*words, "--if-changed")
    assert result.exit_code == 0, result.output
    return result.stderr


@pytest.fixture
def store(make_store: Callable[..., Path]) -> Path:
    return make_store()


def test_it_writes_once_and_then_is_up_to_date(store: Path, tmp_path: Path) -> None:
    table, figure = tmp_path / "r.csv", tmp_path / "r.png"
    words = ("attn-dist", store, "-o", table, "--png", figure)
    assert "up to date" not in ran(*words)
    sidecar = (tmp_path / "r.csv.json").read_bytes()
    for path in tmp_path.glob("r.*"):
        os.utime(path, (1, 1))
    assert ran(*words) == f"{table} is up to date\n"
    # Nothing is written; make sees that the files are newer than what they are made of.
    assert (tmp_path / "r.csv.json").read_bytes() == sidecar
    assert all(path.stat().st_mtime > 1e9 for path in tmp_path.glob("r.*"))
    assert ran(*words, "--jobs", 1, "--memory", "1G") == f"{table} is up to date\n"
    assert f"{table} exists" in one_line(*words)


@pytest.mark.parametrize(
    "change",
    ["option", "figure", "table", "sidecar", "version", "store", "label", "partial"],
)
def test_it_works_again_where_something_changed(
    store: Path, tmp_path: Path, change: str
) -> None:
    table, figure = tmp_path / "r.csv", tmp_path / "r.png"
    words: list[object] = ["attn-dist", store, "-o", table, "--png", figure]
    ran(*words)
    before = table.read_bytes()
    if change == "option":
        words += ["--images", 3]
    elif change == "figure":
        figure.unlink()
    elif change == "table":
        table.write_bytes(before + b"\n")
    elif change == "sidecar":
        (tmp_path / "r.csv.json").unlink()
    elif change in ("version", "store"):  # as if it was made with another one, and sealed
        made = json.loads((tmp_path / "r.csv.json").read_text())
        if change == "version":
            made["versions"]["vitsee"] = "0.0.1"
        else:
            made["stores"][0]["store_id"] = "0" * 64
        sealed = made | {"digest": digest_of(made)}
        (tmp_path / "r.csv.json").write_text(json.dumps(sealed))
    elif change == "label":
        words[1] = f"other={store}"
    else:
        words += ["--allow-partial"]
    assert "up to date" not in ran(*words)
    assert ran(*words) == f"{table} is up to date\n"
    assert figure.is_file() and (change in ("option", "label")) == (
        table.read_bytes() != before
    )


def test_files_that_options_name(store: Path, tmp_path: Path) -> None:
    """A result made of results, and a file that is newer than the table."""
    words = ("attn-dist", store, "-o", tmp_path / "r.csv")
    ran(*words)
    outputs = Outputs(tmp_path / "r.csv")
    sidecar = json.loads((tmp_path / "r.csv.json").read_text())
    masks = tmp_path / "masks"
    masks.mkdir()
    (masks / "a.png").write_bytes(b"")
    for path in (masks, masks / "a.png"):
        os.utime(path, (1, 1))
    assert newest_ns([masks, tmp_path / "none"]) == 10**9 and newest_ns([]) == 0
    assert is_up_to_date(outputs, sidecar, [masks])
    (masks / "a.png").unlink()  # the folder changes with it
    os.utime(masks, (4e9, 4e9))
    assert not is_up_to_date(outputs, sidecar, [masks])
    assert not is_up_to_date(Outputs(None), sidecar)


def test_best_layers_of_results(store: Path, tmp_path: Path) -> None:
    scores = tmp_path / "knn.csv"
    columns = "store,model,weights,site,block,depth,rel_depth,k,metric,value,std,low,high,n_images"
    rows = [
        f"a,m,w,blocks.{i}.out,blocks.{i},{i},{i / 2},1,top1,0.{i + 3},,,,9"
        for i in range(3)
    ]
    scores.write_text("\n".join([columns, *rows]) + "\n")
    words = ("best-layer", scores, "-o", tmp_path / "best.csv")
    assert "up to date" not in ran(*words)
    assert "best.csv is up to date" in ran(*words)
    scores.write_text(scores.read_text().replace("0.5", "0.1"))
    os.utime(scores, (4e9, 4e9))
    assert "up to date" not in ran(*words)
    assert "blocks.1.out" in (tmp_path / "best.csv").read_text()


def test_what_it_excludes(store: Path, tmp_path: Path) -> None:
    assert "--if-changed is about a table's file" in one_line(
        "attn-dist", store, "--if-changed", code=2
    )
    line = one_line(
        "attn-dist", store, "-o", tmp_path / "r.csv", "--if-changed", "--force", code=2
    )
    assert line.endswith("--if-changed and --force exclude each other")
