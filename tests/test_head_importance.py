"""Heads ablated one by one: against hand-written hooks in plain torch, slow loops, and by hand."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy.stats import spearmanr

from tests.extractions import VIT, extracted, plant_images
from tests.tables import check_chosen_metrics
from vitsee_cli.main import main
from vitsee_core.analyses.head_importance import (
    COLUMNS,
    headline,
    plot,
    rank_correlation,
    run,
)
from vitsee_core.models.load import load_model
from vitsee_core.tables.results import Table
from vitsee_stores import Store, open_store
from vitsee_stores.errors import MissingInput, SiteError, VitseeError

N, CLASSES = 9, 2
SMALL = {"num_classes": CLASSES, "depth": 2, "num_heads": 4, "embed_dim": 32}
WORDS = [
    word for key, value in SMALL.items() for word in ("--model-arg", f"{key}={value}")
]


def made(folder: Path, *more: object) -> Store:
    folder.mkdir(exist_ok=True)
    images = plant_images(folder / "images", N)
    extracted(*VIT, *WORDS, "--data", images, "--slab", 4, *more, "-o", folder / "a.zarr")
    return open_store(folder / "a.zarr")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return made(tmp_path_factory.mktemp("heads"), "--inputs")


def number(table: Table, metric: str, block: str, head: int) -> float:
    (value,) = table.filter(metric=metric, site=block, head=head)["value"]
    return float(value)


def by_hooks(store: Store, block: int, head: int, by: str) -> tuple[Any, Any]:
    """Logits of the whole model and without a head, whose input to the projection is replaced."""
    module: Any = load_model(
        "test_vit",
        random_init=0,
        img_size=(32, 48),
        model_args={"patch_size": 8, **SMALL},
    ).module
    x = torch.from_numpy(np.asarray(store.inputs()))
    width = SMALL["embed_dim"] // SMALL["num_heads"]
    own = slice(head * width, (head + 1) * width)

    def change(_module: Any, args: Any) -> Any:
        heads = args[0].clone()
        heads[..., own] = heads[..., own].mean(0) if by == "mean" else 0
        return (heads,)

    with torch.inference_mode():
        whole = module(x)
        module.blocks[block].attn.proj.register_forward_pre_hook(change)
        return whole.double().tolist(), module(x).double().tolist()


@pytest.mark.parametrize("ablation", ["mean", "zero"])
def test_against_hooks_and_loops(store: Store, ablation: str) -> None:
    table = run(store, ablation=ablation, device="cpu")
    assert len(table.filter(metric="kl")) == 8
    for block, head in ((0, 0), (0, 3), (1, 2)):
        whole, without = by_hooks(store, block, head, ablation)
        total, gained, same = 0.0, 0, 0
        for u, v, label in zip(whole, without, store.samples.label.tolist(), strict=True):
            p, q = ([math.exp(z) / sum(map(math.exp, w)) for z in w] for w in (u, v))
            total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            gained += (v.index(max(v)) == label) - (u.index(max(u)) == label)
            same += v.index(max(v)) == u.index(max(u))
        name = f"blocks.{block}"
        assert total > 1e-7, "the change has to be seen"
        assert number(table, "kl", name, head) == pytest.approx(
            total / N, rel=1e-2, abs=1e-9
        )
        assert number(table, "top1_difference", name, head) == pytest.approx(gained / N)
        assert number(table, "agreement", name, head) == pytest.approx(same / N)
        distances = store.attention("distance_px")[:, block, head].astype(float)
        assert number(table, "distance_px", name, head) == pytest.approx(distances.mean())


@pytest.mark.slow
def test_metrics_are_chosen(store: Store) -> None:
    rows = {metric: [metric, "distance_px"] for metric in ("agreement", "kl")}
    rows["kl"] += ["spearman_kl", "spearman_kl_within"]
    check_chosen_metrics(partial(run, store, device="cpu"), plot, rows, "head-importance")


def test_rank_correlations_are_scipys(store: Store) -> None:
    table = run(store, device="cpu")
    kl, far = (
        {(s, int(h)): v for s, h, v in zip(r["site"], r["head"], r["value"], strict=True)}
        for r in (table.filter(metric="kl"), table.filter(metric="distance_px"))
    )
    row = table.filter(metric="spearman_kl")
    assert len(row) == 1
    expected = spearmanr([*kl.values()], [far[key] for key in kl]).statistic
    assert row["value"][0] == pytest.approx(expected)
    assert -1 <= row["low"][0] <= expected <= row["high"][0] <= 1
    assert table.replicates is not None
    heads = table.replicates[table["metric"] == "kl"][:, :N]
    distances = table.replicates[table["metric"] == "distance_px"][:, :N]
    own = table.replicates[table["metric"] == "spearman_kl"][0, :N]
    for b in range(N):
        assert own[b] == pytest.approx(spearmanr(heads[:, b], distances[:, b]).statistic)


def test_rank_correlation_by_hand() -> None:
    x = np.array([1.0, 2.0, 3.0, 10.0, 20.0, 30.0])[:, np.newaxis]
    y = np.array([3.0, 2.0, 1.0, 30.0, 20.0, 10.0])[:, np.newaxis]
    # d = 2, 0, -2, 2, 0, -2: 1 - 6 * 16 / (6 * 35)
    assert rank_correlation(x, y) == pytest.approx([1 - 96 / 210])
    assert rank_correlation(x, y, np.array([0, 0, 0, 1, 1, 1])) == pytest.approx([-1])
    assert np.isnan(rank_correlation(x, np.ones_like(x)))
    gone = np.where(np.arange(6)[:, np.newaxis] == 0, np.nan, y)
    assert rank_correlation(x, gone) == pytest.approx(
        spearmanr(x[1:, 0], y[1:, 0]).statistic
    )
    assert np.isnan(rank_correlation(x, np.full_like(x, np.nan)))


def test_a_head_that_says_nothing_is_not_needed(store: Store) -> None:
    """What is the same in all images is its own mean: over one image nothing changes."""
    table = run(store, images=1, device="cpu")
    assert {*table.filter(metric="agreement")["value"].tolist()} == {1}
    assert table.filter(metric="kl")["value"].tolist() == pytest.approx(
        [0] * 8, abs=1e-12
    )


@pytest.mark.slow
def test_table_figure_and_headline(store: Store, tmp_path: Path) -> None:
    out = [
        "-o",
        str(tmp_path / "h.csv"),
        "--png",
        str(tmp_path / "h.png"),
        "--replicates",
    ]
    words = ["head-importance", str(store.path), "--sites", "blocks.1", *out]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert "a: 4 heads, 54 forward passes of an image" in result.stderr
    table = Table.read(tmp_path / "h.csv")
    assert [*table.written.columns] == [*COLUMNS] and table["block"][0] == "blocks.1"
    assert len([axes for axes in plot(table).axes if axes.get_visible()]) == 2
    ((name, text),) = headline(table)
    assert name == "a" and "of blocks.1: " in text and "rank correlation" in text
    assert (tmp_path / "h.png").exists() and (tmp_path / "h.replicates.csv").exists()


@pytest.mark.slow
def test_other_classes(tmp_path: Path) -> None:
    store = made(tmp_path, "--model-arg", "num_classes=3")
    table = run(store, sites="blocks.0", device="cpu")
    assert {*table["metric"]} == {
        "agreement", "kl", "distance_px", "spearman_kl", "spearman_kl_within",
    }  # fmt: skip
    assert table.notes["remarks"][0].startswith("no top1: a has labels of 2 classes")
    assert headline(table) and plot(table) is not None


@pytest.mark.slow
def test_one_line_says_what_is_wrong(store: Store, tmp_path: Path) -> None:
    with pytest.raises(SiteError, match=r"blocks\.7"):
        run(store, sites="blocks.7")
    for name, more, phrase in (
        ("bare", ["--attention", "none"], "a has no attention summaries"),
        (
            "none",
            ["--model-arg", "num_classes=0"],
            "the model of a has no classifier whose answer",
        ),
        (
            "cut",
            ["--ablate-heads", "blocks.0:1"],
            "nothing is recomputed of a changed model",
        ),
    ):
        with pytest.raises(MissingInput, match=phrase):
            run(made(tmp_path / name, *more), device="cpu")
    gone = made(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone" / "images")
    with pytest.raises(
        VitseeError, match="the images of a cannot be read again"
    ) as caught:
        run(gone, device="cpu")
    assert "\n" not in str(caught.value)
    result = CliRunner().invoke(
        main, ["head-importance", str(store.path), "--ablation", "noise"]
    )
    assert result.exit_code == 2 and "'mean', 'zero'" in result.output
