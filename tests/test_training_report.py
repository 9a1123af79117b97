"""The report of a training: its section, charts, answers and steps without values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.test_training_charts import STEPS, compared, growing, row, table
from vitsee_cli.sections import commands_by_question
from vitsee_core.figures.training_values import answers_over_training, layers_over_steps
from vitsee_core.pages.report.cards import OVER_TRAINING
from vitsee_core.pages.report.charts import charts_of
from vitsee_core.pages.report.page import write_report
from vitsee_core.tables.files import write_files
from vitsee_core.tables.formats import table_bytes
from vitsee_core.tables.results import Table
from vitsee_core.tables.sidecars import sidecar_bytes


def written(own: Table, path: Path, command: str) -> None:
    """The table as its command writes it, with sidecar."""
    data = table_bytes(own.written, ".csv")
    about = {"command": ["vitsee", command], "created": "2026-01-01T00:00:00+00:00"}
    sidecar = sidecar_bytes(own.written, own.notes, about if command else {}, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_files({path.with_name(f"{path.name}.json"): sidecar, path: data}, force=True)


def test_the_answer_is_the_change_of_the_first_and_the_last_layer() -> None:
    rows = [r for m in ("a", "b") for r in growing(model=m)]
    assert answers_over_training(table(rows)) == [
        (
            model,
            "attention distance (px): block 0 from 0 at step 0 to 3.00 at step 1,000, "
            "block 2 from 20.0 at step 0 to 23.0 at step 1,000",
        )
        for model in ("a", "b")
    ]


def test_charts_are_maps_of_layers_and_steps() -> None:
    (chart,) = charts_of(table(growing()))
    assert chart["rows"] == ["block 0", "block 1", "block 2"]
    assert chart["cols"] == ["0", "10", "100", "1,000"] and chart["range"] == [0.0, 23.0]
    assert chart["cells"][1][2] == [12.0, 11.0, 13.0, 20.0]  # value, low, high, images
    assert charts_of(table([row(0, 0, 1.0), row(0, 0, 2.0), row(1, 0, 1.0)])) == []


def test_layers_of_one_store_are_compared_with_the_last() -> None:
    """By hand: of all pairs of three layers, the two with the last remain at each step."""
    rows: list[dict[str, Any]] = []
    named = ("store", "model", "weights", "site", "block", "depth", "rel_depth")
    for step in (0, 10):
        for a in range(3):
            for b in range(3):
                sides = zip("ab", (row(step, a, 0.0), row(step, b, 0.0)), strict=True)
                cells = {f"{n}_{side}": one[n] for side, one in sides for n in named}
                about = {"metric": "cka", "value": 1 - abs(a - b) / 4, "n_images": 20}
                rows.append({"step": step} | cells | about)
    found = layers_over_steps(table(rows))
    assert found["panel"].unique().to_list() == ["CKA with block 2"]
    assert found.select("step", "site", "value").rows() == [
        (0, "blocks.0.out", 0.5), (10, "blocks.0.out", 0.5),
        (0, "blocks.1.out", 0.75), (10, "blocks.1.out", 0.75),
    ]  # fmt: skip


@pytest.fixture
def training(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    written(table(growing()), folder / "results/attn-dist.csv", "attn-dist")
    written(compared((0, 0, 0)), folder / "results/cka-first.csv", "cka")
    status = ["measured", "diverged", "measured", "measured", "failed"]
    notes = [None, "NaN in head.bias", None, None, "no <whole> file"]
    steps = {"step": [*STEPS, 2000], "status": status, "note": notes}
    written(Table(pl.DataFrame(steps), {"unit": "step"}), folder / "steps.csv", "")
    return folder


def test_the_page_has_a_section_over_training(training: Path) -> None:
    page = training / "report.html"
    sections = commands_by_question(["attn-dist", "cka"])
    shown = write_report(training, page, sections=sections)
    assert shown is not None and not shown.left_out and len(shown.results) == 2
    text = page.read_text()
    assert text.count(f">{OVER_TRAINING}</h2>") == 1
    assert "run, step 10 diverged: NaN in head.bias." in text
    assert "run, step 2000 failed: no &lt;whole&gt; file." in text
    assert "vit, 4 steps" in text and "first: vit, 3 steps" in text
    assert "block 0 from 0 at step 0 to 3.00 at step 1,000" in text
    assert text.count("Each curve is a layer over the steps of a training") == 2
    assert text.count('src="data:image/') == 2
