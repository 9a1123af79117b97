"""The columns of every command's table: one grammar."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.every_command import TABLES, vitsee
from vitsee_core.declaration import Analysis
from vitsee_core.runtime import registry
from vitsee_core.tables.columns import block_of_sublayer

# Written out anew, as a reader of the documentation has them.
SITE = ["store", "model", "weights", "site", "block", "depth", "rel_depth"]
PAIR = [f"{name}_a" for name in SITE] + [f"{name}_b" for name in SITE]
ABOUT = [
    "token",
    "frame",
    "row",
    "col",
    "head",
    "class",
    "query",
    "video",
    "object",
    "segment",
]
VALUES = ["metric", "value", "std", "low", "high", "spread"]
NULL = ["null_mean", "tau", "p", "p_family", "calibrated"]


def in_order(names: Sequence[str]) -> list[str]:
    """The grammar: where, what about, the command's own, values, null, counts, baseline."""
    known = [*SITE, *PAIR, *ABOUT, "own", *VALUES, *NULL, "counts", "baseline"]

    def place(name: str) -> int:
        if name in known:
            return known.index(name)
        return known.index("counts" if name.startswith("n_") else "own")

    return sorted(names, key=place)


def tables() -> list[tuple[str, tuple[str, ...]]]:
    """(analysis, columns) of every table of every analysis."""
    found = []
    for name in registry.builtin_names():
        analysis: Analysis = registry.load(name)
        for columns in (analysis.columns, *analysis.other_columns):
            found.append((name, tuple(columns)))
    return found


@pytest.mark.parametrize(("what", "columns"), tables())
def test_every_analysis_names_its_columns_in_order(
    what: str, columns: tuple[str, ...]
) -> None:
    assert list(columns) == in_order(columns), what
    assert {"metric", "value"} <= {*columns}
    assert columns[:7] == tuple(SITE) or columns[:14] == tuple(PAIR) or what == "weights"


@pytest.mark.slow
@pytest.mark.parametrize("command", TABLES)
def test_one_grammar(command: str, tables_of: Callable[[str], list[Path]]) -> None:
    for path in tables_of(command):
        rows = list(csv.DictReader(io.StringIO(path.read_text())))
        names = list(rows[0])
        assert names == in_order(names)
        assert {"metric", "value"} <= {*names}
        if command == "weights":  # of a tensor, not of a place in depth
            assert names[:4] == SITE[:4]
        else:
            assert names[:14] == PAIR if "site_a" in names else names[:7] == SITE
            for row in rows:
                check_blocks(row)


def check_blocks(row: dict[str, str]) -> None:
    """The block is what the site's name says; outside of blocks there is none."""
    for side in ("_a", "_b") if "site_a" in row else ("",):
        site, block = row[f"site{side}"], row[f"block{side}"]
        match = re.match(r"(blocks|layer\d)\.\d+", site)
        assert block == (match[0] if match else "")
        assert row[f"model{side}"] in ("test_vit", "test_resnet")
        assert row[f"weights{side}"].partition(",")[0] == "random 0"


def test_tables_join_on_store_and_block(
    everything: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(everything)
    tables = [
        {
            (row["store"], row["block"])
            for row in csv.DictReader(io.StringIO(vitsee(command, "vit.zarr", *options)))
        }
        for command, *options in (
            ("attn-dist",),
            ("normratio", "--sites", "attn"),
            ("cluster", "--k", "2", "--sites", "blocks.*.out"),
        )
    ]
    assert tables[0] == tables[1] == tables[2] != {("vit", "")}


def test_the_block_of_a_sublayer() -> None:
    blocks = {
        **{
            "blocks.3.attn": "blocks.3",
            "blocks.3.mlp": "blocks.3",
            "layer1.0": "layer1.0",
        },
        **{"stages.0.blocks.1.token": "stages.0.blocks.1", "blocks.11": "blocks.11"},
    }
    assert {name: block_of_sublayer(name) for name in blocks} == blocks
