"""Attention sinks: scores by hand and against loops over whole attention, and what a user sees."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.attention_maps import Attention, layout, qk_nmi, random_attention, write
from tests.command_line import said
from tests.extractions import extracted
from tests.tables import equal, having, unique
from vitsee_core.analyses.attn_map import plot, run
from vitsee_core.analyses.attn_map.sinks import COLUMNS
from vitsee_core.tables.metrics import direction
from vitsee_core.tables.results import Table
from vitsee_stores import Store, open_store

Array = NDArray[Any]
GRID = (3, 4)


def cell(
    table: Table, metric: str, token: str = "", head: int = 0, site: str = "blocks.0"
) -> Any:
    rows = having(table, metric=metric, token=token, head=head, site=site)
    assert len(rows) == 1
    return rows["value"][0]


def to_one(n_tokens: int, key: int, share: float) -> Array:
    """Every query gives one key this share of its attention, and each other the same."""
    a = np.full((n_tokens, n_tokens), (1 - share) / (n_tokens - 1))
    a[:, key] = share
    return a


def by_hand(path: Path, level: str = "rows") -> Store:
    """13 tokens, two images. Heads: even; to the class token, in one image only; to a patch; each
    query to a key of its own."""
    t = 13
    even = np.full((t, t), 1 / t)
    heads = [
        np.stack([even, even]),
        np.stack([to_one(t, 0, 0.9), even]),
        np.stack([to_one(t, 5, 1.0), to_one(t, 7, 0.85)]),
        np.stack([np.eye(t), np.eye(t)]),
    ]
    made = Attention(layout(GRID, ("cls",)), (np.stack(heads, 1),), ("blocks.0",))
    return write(path, [made], level=level)


def test_by_hand(tmp_path: Path) -> None:
    table = run(by_hand(tmp_path / "a.zarr"), kind="sink")
    assert tuple(table.written.columns) == COLUMNS
    assert unique(table, "metric") == ["sink_max", "sink_median", "sink_share", "qk_nmi"]
    # T = 13 tokens. Even: 1. Class token: (13 * 0.9 + 1) / 2. A patch: (13 + 13 * 0.85) / 2.
    # Oneself: each of 12 patches gets 1/12 of 12 queries, the class token nothing: 13/12.
    most = [cell(table, "sink_max", head=h) for h in range(4)]
    assert most == pytest.approx([1, 6.35, 12.025, 13 / 12], rel=1e-6)
    # Of the others each gets 13 * 0.1 / 12; 0 and 13 * 0.15 / 12; and 13/12. float16 rows.
    typical = [cell(table, "sink_median", head=h) for h in range(4)]
    left = [1, (13 * 0.1 / 12 + 1) / 2, 13 * 0.15 / 24, 13 / 12]
    assert typical == pytest.approx(left, rel=1e-3)
    shares = [
        [cell(table, "sink_share", token, h) for token in ("", "cls", "patches")]
        for h in range(4)
    ]
    assert shares == [[0, 0, 0], [0.5, 0.5, 0], [1, 0, 1], [0, 0, 0]]
    # None of 2, of 2, of 1 image: Wilson's interval, z^2 / (n + z^2) at its upper end.
    whole = having(table, metric="sink_share", token="")
    assert whole["low"].tolist()[0] == 0
    assert whole["high"].tolist()[0] == pytest.approx(3.841459 / (2 + 3.841459), rel=1e-6)
    # Alike: 0, and without a value where all attend to one key; oneself: 1. In the sink at the
    # class token the rest is even over patches. The other patch's is that of equal rows: 0.
    nmi = [cell(table, "qk_nmi", head=h) for h in range(4)]
    assert nmi == pytest.approx([0, 0, 0, 1], abs=1e-6)
    counted = table.filter(metric="qk_nmi")["n_images"].tolist()
    assert counted == [2, 2, 1, 2]


def test_the_threshold_is_passed_not_reached(tmp_path: Path) -> None:
    # 16 patches, one with 10/16 or a little more of all attention.
    for share, expected in ((10 / 16, 0.0), (10.01 / 16, 1.0)):
        made = Attention(
            layout((4, 4), ()), (to_one(16, 3, share)[None, None],), ("blocks.0",)
        )
        table = run(write(tmp_path / f"{share}.zarr", [made]), kind="sink")
        assert cell(table, "sink_share") == expected


@pytest.mark.parametrize("prefix", [("cls",), ("reg0", "cls", "reg1"), ()])
def test_against_loops(tmp_path: Path, prefix: tuple[str, ...]) -> None:
    n, valid, rng = 7, [1, 1, 0, 1, 1, 1, 1], np.random.default_rng(3)
    fine = random_attention(layout(GRID, prefix), n, [2, 3])
    for a in fine.a:  # sinks here and there, of any kind
        for i, h in np.ndindex(a.shape[:2]):
            key = int(rng.integers(a.shape[-1]))
            a[i, h] = 0.08 * a[i, h] + 0.92 * np.eye(a.shape[-1])[key]
    coarse = random_attention(layout((1, 2), prefix), n, [4], seed=1, prefix="grid_1x2")
    store = write(tmp_path / "a.zarr", [fine, coarse], slab=3, valid=valid, level="rows")
    table = run(store, kind="sink")
    kept = [i for i in range(n) if valid[i]]
    seen = set()
    for group in (fine, coarse):
        first, t = group.layout.n_prefix, group.layout.n_tokens
        for site, a in zip(group.blocks, group.a, strict=True):
            for head in range(a.shape[1]):
                scores = np.array([t * a[i, head, first:].mean(0) for i in kept])
                expected: dict[tuple[str, str], Array] = {
                    ("sink_max", ""): scores.max(1),
                    ("sink_median", ""): np.median(scores, 1),
                    ("qk_nmi", ""): np.array(
                        [qk_nmi(a[i, head], group.layout) for i in kept]
                    ),
                }
                if group is fine:
                    names = np.array([*prefix, *["patches"] * (t - first)])
                    lies = [
                        str(names[one.argmax()]) if one.max() > 10 else None
                        for one in scores
                    ]
                    seen |= {*lies}
                    for kind in (*prefix, "patches"):
                        expected["sink_share", kind] = np.array([k == kind for k in lies])
                    expected["sink_share", ""] = np.array([k is not None for k in lies])
                rows = having(table, site=site, head=head)
                assert len(rows) == len(expected)  # no shares of few tokens
                for (metric, token), values in expected.items():
                    own = having(rows, metric=metric, token=token)
                    assert own["value"][0] == pytest.approx(
                        values.mean(), rel=2e-3, abs=1e-6
                    )
                    # the rows behind a median are float16: 11 bits
                    rounding = 2**-11 * values.mean() if metric == "sink_median" else 1e-6
                    spread = values.std(ddof=1)
                    assert own["std"][0] == pytest.approx(spread, rel=1e-4, abs=rounding)
                    assert own["n_images"][0] == 6
    assert "patches" in seen
    shares = table.filter(metric="sink_share")
    assert (shares["low"] >= 0).all() and (shares["high"] <= 1).all()
    assert plot(table).axes


@pytest.mark.slow
def test_extracted_summaries_are_those_of_the_full_attention(tmp_path: Path) -> None:
    words = ["demo:vit", "--data", "demo:test", "--images", 6, "--attention", "full"]
    extracted(*words, "-o", tmp_path / "v.zarr")
    store = open_store(tmp_path / "v.zarr")
    table = run(store, kind="sink")
    for block in ("blocks.0", "blocks.5"):
        a = store.attention(f"full/{block}")[:].astype(np.float64)
        where = store.attention_blocks[0].layout
        received = a[:, :, where.n_prefix :].mean(2) * where.n_tokens
        for head in range(a.shape[1]):
            # attention in float16 has 11 bits
            largest = cell(table, "sink_max", head=head, site=block)
            assert largest == pytest.approx(received[:, head].max(1).mean(), rel=1e-3)
            typical = cell(table, "sink_median", head=head, site=block)
            assert typical == pytest.approx(
                np.median(received[:, head], 1).mean(), rel=2e-3
            )
            nmi = np.mean([qk_nmi(one, where) for one in a[:, head]])
            assert cell(table, "qk_nmi", head=head, site=block) == pytest.approx(
                nmi, abs=2e-4
            )


def test_slabs_jobs_and_a_choice_do_not_matter(tmp_path: Path) -> None:
    made = random_attention(layout(GRID), 9, [2, 2])
    whole = write(tmp_path / "a.zarr", [made], slab=9, level="rows")
    cut = write(tmp_path / "b.zarr", [made], slab=2, level="rows")
    once = run(cut, kind="sink")
    assert equal(once, run(cut, kind="sink", jobs=3))
    assert once["value"] == pytest.approx(
        run(whole, kind="sink")["value"], rel=1e-12, abs=1e-15
    )
    some = run(cut, kind="sink", sites=["blocks.-1"], heads=[1])
    assert equal(some, once.filter(site="blocks.1", head=1))


def test_what_a_store_lacks_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few = write(tmp_path / "few.zarr", [random_attention(layout((2, 3)), 3, [2])])
    with caplog.at_level(logging.INFO, "vitsee_core"):
        table = run(few, kind="sink")
    assert (
        "no sink_share for blocks.0: of 7 tokens none can get more than 10 times"
        in caplog.text
    )
    assert "few: no sink_median (extract it with --attention rows)" in caplog.text
    assert unique(table, "metric") == ["sink_max", "qk_nmi"]
    assert plot(table).axes


def test_no_layer_is_the_best_by_its_sinks() -> None:
    for metric in ("sink_max", "sink_median", "sink_share", "qk_nmi"):
        assert direction(metric) == "none"


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    by_hand(tmp_path / "a.zarr")
    by_hand(tmp_path / "b.zarr", "summary")
    words = ["attn-map", "a.zarr", "b.zarr", "--kind", "sink"]
    said(tmp_path, *words, "-o", "s.csv", "--png", "s.png")
    table = Table.read(tmp_path / "s.csv")
    assert table.notes["threshold"] == 10
    figure = plot(table)
    assert len(figure.axes) == 6
    bars: list[Any] = list(figure.axes[1].patches)
    tops = [bar.get_height() for bar in bars]
    assert tops == pytest.approx(
        [0.5 / 4, 1 / 4]
    )  # heads with a sink: at cls, at patches
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"sink at the class token", "sink at a patch"} <= {*legend}
    assert (tmp_path / "s.png").stat().st_size > 10_000
    wrong = " ".join(said(tmp_path, *words, "--coverage", code=2).split())
    assert "--coverage/--no-coverage has no effect without --kind aligned" in wrong
