"""docs/findings.md: its statistics on tables of known answer, its verdicts, and the page."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from findings import REAL_TABLE, TABLE, VERDICTS, page
from findings_measure import Family, OtherSeed, needs

from tests.reference_cka import loop_cka
from tests.test_localize import write
from vitsee_core import demo
from vitsee_core.analyses import attn_dist
from vitsee_core.study.findings import estimates as of
from vitsee_core.study.findings.finding import DEPENDS, Finding, verdict
from vitsee_core.study.findings.model_tables import ModelTables
from vitsee_core.study.findings.papers import FINDINGS
from vitsee_core.study.real.photographs import PHOTOGRAPHS
from vitsee_core.tables.results import Table
from vitsee_stores import TokenLayout, open_store
from vitsee_stores.errors import MissingInput

ROOT = Path(__file__).resolve().parents[1]


def table(
    rows: Sequence[Mapping[str, Any]], without: Sequence[Sequence[float]] | None = None
) -> Table:
    """Rows with two replicates: by default value + 1 and value - 1."""
    pairs = (
        [[row["value"] + 1, row["value"] - 1] for row in rows]
        if without is None
        else without
    )
    return Table.from_rows(
        [
            {**row, "replicates": np.array(own, float)}
            for row, own in zip(rows, pairs, strict=True)
        ],
        list(rows[0]),
    )


def blocks_table(values: Sequence[float]) -> Table:
    """Two heads a block, depths 0 to 1."""
    n = len(values) // 2
    return table(
        [
            {"block": f"blocks.{i // 2}", "rel_depth": (i // 2) / (n - 1), "value": value}
            for i, value in enumerate(values)
        ]
    )


def similarity(values: Mapping[tuple[str, str], float]) -> Table:
    """CKA of sites named by block and relative depth in thirds: `b0.out` at 0 and so on."""
    rows = []
    for (a, b), value in values.items():
        row: dict[str, Any] = {}
        for side, site in (("a", a), ("b", b)):
            block, _, part = site.partition(".")
            depth = int(block[1:]) + (part == "out")
            row |= {f"site_{side}": site, f"block_{side}": block, f"depth_{side}": depth}
            row[f"rel_depth_{side}"] = depth / 4
        rows.append(row | {"value": value})
    return table(rows)


def values(estimate: of.Estimate) -> list[float]:
    return [round(float(x), 9) for x in (estimate.value, *estimate.without)]


# ------------------------------------------------------------ estimates


def test_a_paired_difference_by_hand() -> None:
    """Replicates 2, 4 less 1, 1: 1, 3; error sqrt(1/2 (1 + 1)) = 1; t(0.975, 1) = 12.706."""
    found = of.Estimate(3.0, np.array([2.0, 4.0])) - of.Estimate(
        1.0, np.array([1.0, 1.0])
    )
    assert values(found) == [2, 1, 3]
    std, low, high = found.interval()
    assert std == pytest.approx(1)
    assert (low, high) == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-4)


def test_what_two_estimates_share_cancels() -> None:
    """Equal replicates less a constant: no error is left."""
    noise = np.array([0.1, 0.5, -0.3])
    found = of.Estimate(1.0, 1 + noise) - of.Estimate(0.25, 0.25 + noise)
    std, low, high = found.interval()
    assert std == pytest.approx(0, abs=1e-12)
    assert low == pytest.approx(0.75) and high == pytest.approx(0.75)


def test_other_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 and 3 blocks"):
        of.Estimate(0.0, np.zeros(2)) - of.Estimate(0.0, np.zeros(3))


def test_ratio_limits_and_sign() -> None:
    a, b = of.Estimate(6.0, np.array([4.0, 8.0])), of.Estimate(2.0, np.array([1.0, 4.0]))
    assert values(a / b) == [3, 4, 2]
    assert values(of.above(1, b)) == [1, 0, 3]
    assert values(of.below(1, b)) == [-1, 0, -3]
    assert values(of.negative(b)) == [-2, -1, -4]


def test_rows_without_value_or_replicates_are_refused() -> None:
    rows = [{"value": 1.0}, {"value": math.nan}]
    with pytest.raises(ValueError, match="without a value"):
        of.mean(table(rows), np.array([True, True]))
    assert values(of.mean(table(rows), np.array([True, False]))) == [1, 2, 0]
    with pytest.raises(ValueError, match="no row is of"):
        of.mean(table(rows), np.array([False, False]))
    with pytest.raises(ValueError, match="too few images"):
        of.mean(Table({"value": np.ones(2)}), np.array([True, True]))


def test_blocks_that_no_chosen_row_has_are_left_out() -> None:
    found = table([{"value": 1.0}, {"value": 5.0}], [[2, 3, math.nan], [3, 4, 5]])
    assert values(of.mean(found, np.array([True, False]))) == [1, 2, 3]
    with pytest.raises(ValueError, match="without a value, or without one"):
        of.mean(found, np.array([True, True]))


# ------------------------------------------------------------ statistics


def test_cka_between_the_ends() -> None:
    found = similarity(
        {
            ("b0.in", "b0.in"): 1.0,  # depths 0, 0: not between the ends
            ("b0.in", "b3.out"): 0.2,  # 0, 1
            ("b0.out", "b2.out"): 0.4,  # 1/4, 3/4
            ("b0.out", "b1.out"): 0.9,  # 1/4, 1/2: no end
            ("b3.out", "b0.in"): 0.7,  # the mirrored pair is not taken twice
        }
    )
    assert values(of.ends(found)) == [0.3, 1.3, -0.7]


def test_second_quarter_and_final_third() -> None:
    found = similarity(
        {
            ("b0.out", "b1.out"): 0.9,  # ViT 1/4, CNN 1/2
            ("b1.out", "b1.out"): 0.5,  # ViT 1/2
            ("b0.out", "b0.out"): 0.1,  # CNN 1/4: the first quarter
            ("b3.out", "b1.out"): 0.3,  # ViT 1
        }
    )
    assert values(of.second_quarter(found)) == [0.4, 0.4, 0.4]
    assert values(of.final_third(found)) == [0.2, 0.2, 0.2]


def test_both_sides_of_a_block() -> None:
    found = similarity(
        {
            ("b0.out", "b0.norm"): 0.8,  # both before b1
            ("b0.out", "b0.out"): 1.0,  # itself
            ("b0.out", "b1.norm"): 0.0,  # inside of b1
            ("b0.out", "b1.out"): 0.3,  # before, behind
            ("b0.norm", "b2.norm"): 0.1,  # before, behind
            ("b1.out", "b2.out"): 0.6,  # both behind
        }
    )
    assert values(of.across(found, "b1")) == [0.2, 1.2, -0.8]
    assert values(of.within(found, "b1"))[0] == 0.7


def test_lower_less_upper() -> None:
    found = similarity(
        {("b0.out", "b0.out"): 0.9, ("b1.out", "b1.out"): 0.7, ("b3.out", "b3.out"): 0.5}
    )
    assert values(of.lower_less_upper(found)) == pytest.approx([0.3, 0.3, 0.3])


def test_the_own_patch_against_the_others() -> None:
    rows = [
        {"token": token, "row": row, "col": 0, "value": value}
        for token, row, value in (
            ("0,0", 0, 0.9),
            ("0,0", 1, 0.2),
            ("0,0", 2, math.nan),  # the same in all images
            ("1,0", 0, 0.4),
            ("1,0", 1, 0.7),
        )
    ]
    assert values(of.own_contrast(table(rows))) == pytest.approx([0.5, 0.5, 0.5])


def test_heads_by_distance() -> None:
    rows = [
        {"distance_px": 3.0, "value": 0.9},
        {"distance_px": 3.0, "value": 0.7},
        {"distance_px": 8.0, "value": 0.6},
        {"distance_px": 9.0, "value": 0.1},
    ]
    assert values(of.local_less_global(table(rows))) == pytest.approx([0.7, 0.7, 0.7])


def test_heads_of_low_and_high_blocks() -> None:
    """Blocks 0 to 4, two heads each."""
    heads = blocks_table([0.2, 1.0, 0.4, 0.9, 0.1, 2.0, 0.8, 0.9, 0.7, 0.95])
    assert values(of.nearest_head(heads)) == pytest.approx([0.2, 1.2, -0.8])
    assert values(of.nearest_head(heads, 3))[0] == pytest.approx(0.1)
    assert values(of.head_range(heads))[0] == pytest.approx(0.8 - 0.25)
    assert values(of.upper_is_global(heads))[0] == pytest.approx(0.5)
    # The middle block of five is in the lower half.
    assert values(of.rise(heads))[0] == pytest.approx(3.35 / 4 - 4.6 / 6)


def test_the_least_head_may_change_with_the_images() -> None:
    """The minimum is taken within each replicate, not of the row that is the least in all."""
    heads = Table(
        {
            "block": np.array(["b", "b"]),
            "value": np.array([1.0, 2.0]),
            "replicates": np.array([[1.0, 5.0], [2.0, 3.0]]),
        }
    )
    assert values(of.nearest_head(heads)) == [1, 1, 3]


def test_focus_beside_the_query() -> None:
    rows = [
        {"metric": metric, "value": value}
        for metric, of_heads in (
            ("focus_mass", (0.9, 0.4, 0.6)),
            ("offset_cells", (0.1, 1.0, 2.0)),
        )
        for value in of_heads
    ]
    assert values(of.offset_focus(table(rows)))[0] == pytest.approx(0.6)
    with pytest.raises(ValueError, match="no row is of"):
        of.offset_focus(table(rows), offset=3)


def test_ratios_in_logs() -> None:
    rows: list[dict[str, Any]] = [
        {"block": f"b{i}", "value": math.exp(x)}
        for i, x in enumerate((4.0, 2.0, 1.0, 0.0))
    ]
    found = table(rows, [[row["value"]] * 2 for row in rows])
    assert values(of.log_fall(found)) == pytest.approx([2.5, 2.5, 2.5])


def test_depths() -> None:
    rows = [
        {"rel_depth": d, "value": v}
        for d, v in ((0.0, 1.0), (0.4, 2.0), (0.6, 3.0), (1.0, 8.0))
    ]
    assert values(of.at_depth(table(rows), 0.5))[0] == 2
    assert values(of.at_depth(table(rows), 1))[0] == 8
    assert values(of.last_less_best(table(rows))) == [5, 5, 5]
    assert values(of.share_by_middle(table(rows)))[0] == pytest.approx(0.25)
    with pytest.raises(ValueError, match="4 rows"):
        of.first(table(rows))
    assert values(of.first(table(rows[:1])))[0] == 1


def test_distances_without_each_block_of_images(
    make_store: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten images are ten blocks: each replicate is the mean over the other nine."""
    store = open_store(make_store())
    family = Family(tmp_path)
    monkeypatch.setattr(family, "store", lambda model: store)
    found = family.distances("any")
    whole = attn_dist.run(store, metrics="distance_relative")
    assert found.replicates is not None and found.replicates.shape == (len(whole), 10)
    np.testing.assert_array_equal(found["value"], whole["value"])
    distance = np.asarray(store.attention("distance_px")[:], np.float64)
    for i in range(len(whole)):
        block = int(str(whole["block"][i]).rpartition(".")[2])
        of_head = distance[:, block, int(whole["head"][i])]
        uniform = of_head.mean() / whole["value"][i]
        for b in range(10):
            without = np.delete(of_head, b).mean() / uniform
            assert found.replicates[i, b] == pytest.approx(without, rel=1e-9)


# ------------------------------------------------------------ findings and their page


def test_verdicts() -> None:
    assert verdict(0.1, 0.3) == "holds" and verdict(-0.3, -0.1) == "does not hold"
    for low, high in ((-0.1, 0.2), (0.0, 0.2), (math.nan, math.nan)):
        assert verdict(low, high) == "undecided"


def rows_of_table() -> list[dict[str, str]]:
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.name)
def test_every_finding_is_in_the_table(finding: Finding) -> None:
    """As it is described now, with the verdict that its interval gives."""
    (row,) = (row for row in rows_of_table() if row["name"] == finding.name)
    expected = finding.row(None)
    for name in ("section", "claim", "source", "statistic", "unit", "models"):
        assert row[name] == expected[name]
    if row["verdict"] == "not trained":
        assert not row["value"]
        assert not needs(finding) <= {*demo.models()}, "they ship now: make findings"
    else:
        assert needs(finding) <= {*demo.models()}
        verdicts = set()
        assert bool(row["value_seed1"]) == ("vit" in finding.models)
        for suffix in ("", "_seed1") if "vit" in finding.models else ("",):
            low, value, high = (
                float(row[f"{name}{suffix}"]) for name in ("low", "value", "high")
            )
            assert low < value < high
            verdicts.add(verdict(low, high))
        assert row["verdict"] == (DEPENDS if len(verdicts) > 1 else verdicts.pop())


def test_the_table_has_no_other_findings() -> None:
    assert [row["name"] for row in rows_of_table()] == [
        finding.name for finding in FINDINGS
    ]
    assert {row["verdict"] for row in rows_of_table()} <= {*VERDICTS}


def test_real_weights_have_a_value_and_verdict_of_the_findings_as_they_are() -> None:
    known = {finding.name: finding for finding in FINDINGS}
    with REAL_TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sum(bool(row["value"]) for row in rows) > 10
    for row in rows:
        finding = known[row["name"]]
        for name in ("section", "claim", "source", "statistic", "unit"):
            assert row[name] == getattr(finding, name)
        if row["value"]:
            assert int(row["n_blocks"]) == len(PHOTOGRAPHS)
            assert row["verdict"] == verdict(float(row["low"]), float(row["high"]))
        else:
            assert row["reason"]


def test_the_committed_page_is_what_the_script_prints() -> None:
    command = [sys.executable, str(ROOT / "tools" / "findings.py"), "--print"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (ROOT / "docs" / "findings.md").read_text() == done.stdout


def test_a_row_on_the_page() -> None:
    """sqrt(2/3 (0.01 + 0.01)) = 0.1155, times t(0.975, 2) = 4.303: 0.497."""
    found = of.Estimate(0.5, np.array([0.4, 0.5, 0.6]))
    empty = dict.fromkeys(("value", "low", "high", "value_seed1"), "")

    def row(*estimates: of.Estimate | None) -> dict[str, str]:
        made = FINDINGS[0].row(*estimates)
        return empty | {name: str(value) for name, value in made.items()}

    def shown(*estimates: of.Estimate | None) -> str:
        return page([row(*estimates)], {})

    text = shown(found, found)
    here = "+0.500 (+0.003 to +0.997)"
    assert f"| {here} | {here} | **holds** | – | CKA |" in text
    assert "| holds | 1 | 0 |" in text and "| not trained | 0 | 0 |" in text
    assert "| does not apply | 0 | 1 |" in text
    text = shown(found, of.negative(found))
    assert f"| {here} | -0.500 (-0.997 to -0.003) | **{DEPENDS}** | – | CKA |" in text
    assert f"| {DEPENDS} | 1 |" in text
    assert f"| {DEPENDS} |" in shown(found, of.Estimate(0.5, np.array([0.3, 0.5, 0.7])))
    assert f"| {here} |  | **holds** | – | CKA |" in shown(found)
    assert "|  |  | **not trained** | – | CKA |" in shown(None)
    text = page([row(None)], {FINDINGS[0].name: row(of.negative(found))})
    assert (
        "| **not trained** | -0.500 (-0.997 to -0.003): **does not hold** | CKA |" in text
    )
    assert "| does not hold | 0 | 1 |" in text and "| does not apply | 0 | 0 |" in text


class Echo:
    """In place of a family."""

    def cka(self, *models: str, pairs: str = "all") -> tuple[str, ...]:
        return (*models, pairs)


def test_the_other_seed_takes_the_place_of_the_first() -> None:
    other: Any = OtherSeed(cast(Family, Echo()))
    assert other.cka("vit", "resnet") == ("vit-seed1", "resnet", "all")
    assert other.cka("vit-seed1", "vit", pairs="x") == ("vit", "vit-seed1", "x")
    unseeded = {f.name for f in FINDINGS if not {"vit-seed1"} & needs(f)}
    assert unseeded == {"uniform-gap"}


def test_places_of_equal_size_against_a_loop(tmp_path: Path) -> None:
    """Tokens of 4 x 4 cells and of 2 x 2: both with the pixels of quarters of the image. The CNN's
    last block of one location is passed by."""
    n, rng = 12, np.random.default_rng(0)
    pixels = rng.integers(0, 255, (n, 3, 8, 8)).astype(np.uint8)
    fine, coarse, alone = (rng.normal(size=(n, tokens, 5)) for tokens in (16, 4, 1))
    stores = {
        "vit": {"blocks.0.out": (fine, TokenLayout((), (4, 4), stride_px=(2.0, 2.0)))},
        "cnn": {
            "layer1.0.out": (coarse, TokenLayout((), (2, 2), stride_px=(4.0, 4.0))),
            "layer2.0.out": (alone, TokenLayout((), (1, 1), stride_px=(8.0, 8.0))),
        },
    }
    made = {
        name: write(tmp_path / f"{name}.zarr", of, pixels) for name, of in stores.items()
    }
    seen = made["vit"].inputs()[:].astype(float)
    own = [
        seen[:, :, r : r + 4, c : c + 4].reshape(n, -1) for r in (0, 4) for c in (0, 4)
    ]
    maps = fine.reshape(n, 4, 4, 5)
    means = [maps[:, r : r + 2, c : c + 2].mean((1, 2)) for r in (0, 2) for c in (0, 2)]
    same = np.eye(4, dtype=bool)

    def contrast(tokens: Sequence[Any], keep: Any) -> float:
        cka = np.array([[loop_cka(a[keep], b[keep]) for b in own] for a in tokens])
        return float(cka[same].mean() - cka[~same].mean())

    tables = ModelTables(made, {})
    found = tables.equal_places("vit", "cnn")
    sides = means, [coarse[:, i] for i in range(4)]
    for value, keep in (
        (found.value, np.arange(n)),
        (found.without[3], np.arange(n) != 3),
    ):
        a, b = (contrast(tokens, keep) for tokens in sides)
        assert value == pytest.approx(a - b, abs=1e-5)  # activations in float32
    with pytest.raises(MissingInput, match=r"layer2\.0\.out do not fill 4 x 4 places"):
        tables.equal_places("cnn", "vit")
