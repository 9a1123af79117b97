"""What a change does: against slow loops, by hand, and where nothing changed."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from scipy.stats import binom

from tests.extractions import VIT as VIT_MODEL
from tests.extractions import extracted, plant_images
from tests.reference_cka import loop_cka
from tests.stores import CNN, VIT, write_labelled
from vitsee_cli.main import main
from vitsee_core.analyses.effect import COLUMNS, METRICS, changes, headline, plot, run
from vitsee_core.analyses.effect.changes import cosines
from vitsee_core.statistics.shares import difference_interval, mcnemar
from vitsee_core.tables.metrics import direction
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.changed_outputs import compare_outputs
from vitsee_stores import Store, open_store
from vitsee_stores.errors import MissingInput, SiteError, StoreMismatch, VitseeError

Array = NDArray[Any]

N, CLASSES, DIM = 30, 3, 5
LABELS = np.arange(N) % CLASSES
SITES = ("embed", "blocks.0.out", "blocks.1.out")


def values(
    seed: int, near: dict[str, Any] | None = None, by: float = 0.5
) -> dict[str, Any]:
    """Tokens and logits, drawn anew or near to others."""
    rng = np.random.default_rng(seed)
    drawn: dict[str, Any] = {s: rng.normal(size=(N, VIT.n_tokens, DIM)) for s in SITES}
    drawn["logits"] = rng.normal(size=(N, CLASSES)) + 2 * np.eye(CLASSES)[LABELS]
    if near is not None:
        drawn["logits"] = 4 * rng.normal(size=(N, CLASSES))
        drawn = {name: near[name] + by * x for name, x in drawn.items()}
    return {name: x.astype(np.float32) for name, x in drawn.items()}


def store(path: Path, sites: dict[str, Any], labels: Any = LABELS, **more: Any) -> Store:
    return write_labelled(path, sites, labels, **{"layout": VIT, "slab": 8, **more})


@pytest.fixture
def two(tmp_path: Path) -> tuple[Store, Store]:
    base = values(0)
    return store(tmp_path / "base.zarr", base), store(
        tmp_path / "cut.zarr", values(1, base)
    )


def number(table: Table, metric: str, site: str = "logits", name: str = "cut") -> Any:
    (value,) = table.filter(metric=metric, site=site, store=name)["value"].tolist()
    return value


def logits_of(store: Store) -> list[list[float]]:
    return [[float(x) for x in row] for row in store.vectors("logits")[:]]


def softmax(row: list[float]) -> list[float]:
    powers = [math.exp(x) for x in row]
    return [p / sum(powers) for p in powers]


# ---------------------------------------------------------------------------------- slow loops


def test_outputs_against_loops(two: tuple[Store, Store]) -> None:
    table = run(*two, sites=())
    a, b = map(logits_of, two)
    right, right_base, same, divergence = 0, 0, 0, 0.0
    only = {"base": 0, "changed": 0}
    for u, v, label in zip(a, b, LABELS.tolist(), strict=True):
        first, then = u.index(max(u)), v.index(max(v))
        right += then == label
        right_base += first == label
        same += first == then
        only["base"] += first == label != then
        only["changed"] += then == label != first
        p, q = softmax(u), softmax(v)
        divergence += sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
    assert 0 < right < right_base < N, "the drawn numbers have to tell them apart"
    assert number(table, "top1") == pytest.approx(right / N)
    assert number(table, "top1", name="base") == pytest.approx(right_base / N)
    assert number(table, "top1_difference") == pytest.approx((right - right_base) / N)
    assert number(table, "agreement") == pytest.approx(same / N)
    assert number(table, "kl") == pytest.approx(divergence / N, rel=1e-12)
    row = table.filter(metric="top1_difference")
    assert row["n_only_base"].tolist() == [only["base"]]
    assert row["n_only_changed"].tolist() == [only["changed"]]
    n = sum(only.values())
    tail = sum(binom.pmf(k, n, 0.5) for k in range(min(only.values()) + 1))
    assert row["p"].tolist()[0] == pytest.approx(min(1.0, 2 * tail))


@pytest.mark.parametrize("tokens", ["all", "cls", "patches", "mean", "1,2"])
def test_layers_against_loops(two: tuple[Store, Store], tokens: str) -> None:
    table = run(*two, tokens=tokens, no_cache=True)
    for site in SITES:
        a, b = (_chosen(s.acts(site)[:].astype(np.float64), tokens) for s in two)
        total = 0.0
        for x, y in zip(a, b, strict=True):
            found = [
                sum(u * v for u, v in zip(s, t, strict=True))
                / math.sqrt(sum(u * u for u in s) * sum(v * v for v in t))
                for s, t in zip(x, y, strict=True)
            ]
            total += sum(found) / len(found)
        assert number(table, "cosine", site) == pytest.approx(total / N, rel=1e-6)
        expected = loop_cka(a.reshape(N, -1), b.reshape(N, -1))
        assert number(table, "cka", site) == pytest.approx(expected, rel=1e-5)


def _chosen(tokens: Array, how: str) -> Array:
    if how == "mean":
        return tokens[:, 1:].mean(1, keepdims=True)
    parts = {
        "all": slice(0, 7),
        "cls": slice(0, 1),
        "patches": slice(1, 7),
        "1,2": slice(6, 7),
    }
    return tokens[:, parts[how]]


def test_intervals_are_those_of_a_jackknife(two: tuple[Store, Store]) -> None:
    """Twenty blocks of one or two images, left out by hand."""
    table = run(*two, sites=())
    a, b = (np.array(logits_of(s)) for s in two)
    each = compare_outputs(a, b)["kl"]
    blocks = np.arange(N) * 20 // N
    without = np.array([each[blocks != k].mean() for k in range(20)])
    error = math.sqrt(19 / 20 * ((without - without.mean()) ** 2).sum())
    rows = table.filter(metric="kl")
    assert rows["std"][0] == pytest.approx(error)
    assert rows["high"][0] - rows["value"][0] == pytest.approx(2.093 * error, rel=1e-3)
    assert table.replicates is not None
    assert table.replicates[table["metric"] == "kl"][0] == pytest.approx(without)
    difference = table.replicates[table["metric"] == "top1_difference"][0]
    tops = table.replicates[table["metric"] == "top1"]
    assert difference == pytest.approx(tops[1] - tops[0])


# ------------------------------------------------------------------------------------ by hand


def test_mcnemar_by_hand() -> None:
    # 2 (1 + 6) / 2^6 of six discordant images, one against five
    assert mcnemar(1, 5) == pytest.approx(14 / 64)
    assert mcnemar(5, 1) == mcnemar(1, 5)
    assert mcnemar(0, 8) == pytest.approx(2 / 256)
    assert mcnemar(4, 4) == 1 and mcnemar(0, 0) == 1


def test_the_interval_of_a_difference_by_hand() -> None:
    # p = 3/10, q = 7/10: d = -0.4, sqrt((1 - 0.16) / 10) = 0.28983
    low, high = difference_interval(2, 6, 8)
    assert (low, high) == pytest.approx((-0.96805, 0.16805), abs=1e-5)
    low, high = difference_interval(0, 0, 98)
    assert high == -low == pytest.approx(1.95996 * math.sqrt(2) / 100, abs=1e-6)
    assert difference_interval(5, 0, 5)[1] == 1 and difference_interval(0, 5, 5)[0] == -1


def test_divergence_by_hand() -> None:
    u = np.log([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
    v = (
        np.log([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]) + 7
    )  # softmax forgets what is added
    found = compare_outputs(u, v, np.array([0, -1]))
    # 0.5 log 2 + 0.25 log 0.5
    assert found["kl"] == pytest.approx([0.25 * math.log(2), 0], abs=1e-15)
    assert found["agreement"].tolist() == [0, 1]
    assert found["only base"][0] == 1 and math.isnan(found["only base"][1])
    far = compare_outputs(np.array([[1000.0, -1000.0]]), np.array([[-1000.0, 1000.0]]))
    assert far["kl"].tolist() == [2000]


def test_cosines_by_hand() -> None:
    a = np.array([[[3, 4], [0, 0], [0, 0], [1, 0]]], np.float32)
    b = np.array([[[4, 3], [1, 0], [0, 0], [-2, 0]]], np.float32)
    assert cosines(a, b).tolist() == [[0.96, 0.0, 1.0, -1.0]]


# ------------------------------------------------------------------------------- invariances


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nothing_changed(tmp_path: Path, dtype: str) -> None:
    base, same = (
        store(tmp_path / f"{n}.zarr", values(0), dtype=dtype) for n in ("base", "cut")
    )
    table = run(base, same, no_cache=True)
    assert number(table, "top1_difference") == number(table, "kl") == 0
    assert number(table, "agreement") == 1
    rows = table.filter(metric="top1_difference")
    assert rows["low"][0] < 0 < rows["high"][0] and rows["p"][0] == 1
    for site in SITES:
        assert number(table, "cosine", site) == 1
        assert number(table, "cka", site) == pytest.approx(1, abs=1e-7)


def test_scaled_and_rotated_features(tmp_path: Path) -> None:
    base = values(0)
    turned = np.linalg.qr(np.random.default_rng(5).normal(size=(DIM, DIM)))[0]
    other = {**base, SITES[0]: 3 * base[SITES[0]], SITES[1]: base[SITES[1]] @ turned}
    other["logits"] = base["logits"] + 5
    table = run(
        *(store(tmp_path / f"{n}.zarr", v) for n, v in (("base", base), ("cut", other)))
    )
    assert number(table, "cosine", SITES[0]) == pytest.approx(1)
    assert number(table, "cosine", SITES[1]) < 0.9
    assert [number(table, "cka", s) for s in SITES] == pytest.approx([1] * 3, abs=1e-6)
    assert number(table, "kl") == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_only_images_that_all_could_read_count(tmp_path: Path) -> None:
    base = values(0)
    valid = np.ones((3, N), bool)
    valid[0, 3], valid[1, 7], valid[2, 8] = False, False, False
    names = ("base", "cut", "other")
    stores = [
        store(tmp_path / f"{name}.zarr", values(i, base) if i else base, valid=valid[i])
        for i, name in enumerate(names)
    ]
    table = run(*stores)
    assert {*table["n_images"].tolist()} == {N - 3}
    keep = valid.all(0)
    a, b = (np.array(logits_of(s))[keep] for s in stores[:2])
    assert number(table, "kl") == pytest.approx(compare_outputs(a, b)["kl"].mean())
    few = run(*stores, images=10, sites=())
    assert {*few["n_images"].tolist()} == {10 - 3}


def test_slabs_jobs_and_pieces_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = values(0)
    stores = [store(tmp_path / "base.zarr", base, slab=8)]
    stores.append(store(tmp_path / "cut.zarr", values(1, base), slab=12))
    table = run(*stores)
    again = run(*stores, jobs=3)
    for name in ("value", "std", "low", "high"):
        assert np.array_equal(table[name], again[name], equal_nan=True)
    monkeypatch.setattr("vitsee_core.analyses.effect.changes.PIECE_BYTES", 600)
    small = run(*stores)
    assert small["value"].tolist() == pytest.approx(table["value"].tolist())


# ----------------------------------------------------------------------- what cannot be compared


def test_images_without_labels(tmp_path: Path) -> None:
    base = values(0)
    labels = np.where(np.arange(N) < 10, -1, LABELS)
    stores = [store(tmp_path / "base.zarr", base, labels)]
    stores.append(store(tmp_path / "cut.zarr", values(1, base), labels))
    table = run(*stores, sites=())
    counts = dict(table.frame.group_by("metric").agg("n_images").rows())
    assert counts == {
        "top1": [N - 10] * 2, "top1_difference": [N - 10], "agreement": [N], "kl": [N],
    }  # fmt: skip
    right = np.array(logits_of(stores[1])).argmax(1) == LABELS
    assert number(table, "top1") == pytest.approx(right[10:].mean())


@pytest.mark.parametrize(
    ("labels", "classes", "said"),
    [
        (np.full(N, -1), ("a", "b", "c"), "no top1: base has no labels"),
        (
            LABELS,
            "abcd",
            "no top1: base has labels of 4 classes, its classifier 3: not the same",
        ),
    ],
)
def test_labels_that_are_not_the_heads(
    tmp_path: Path, labels: Array, classes: Any, said: str
) -> None:
    stores = [
        store(tmp_path / f"{name}.zarr", values(i), labels, classes=list(classes))
        for i, name in enumerate(("base", "cut"))
    ]
    table = run(*stores, sites=())
    assert [*dict.fromkeys(table["metric"])] == ["agreement", "kl"]
    assert any(remark.startswith(said) for remark in table.notes["remarks"])
    assert plot(table) is not None and headline(table)


def test_a_store_without_outputs_or_with_other_tokens(tmp_path: Path) -> None:
    base = values(0)
    first = store(tmp_path / "base.zarr", base)
    bare = store(tmp_path / "cut.zarr", {s: base[s] for s in SITES[:2]})
    other = store(
        tmp_path / "other.zarr", {**base, SITES[1]: (base[SITES[1]][:, :4], CNN)}
    )
    table = run(first, bare, other)
    less, rest = table.filter(store="cut"), table.filter(store="other")
    assert [*dict.fromkeys(less["metric"])] == ["cka", "cosine"]
    assert [*dict.fromkeys(less["site"])] == [*SITES[:2]]
    assert [*dict.fromkeys(rest.filter(metric="cosine")["site"])] == [SITES[0], SITES[2]]
    assert [*dict.fromkeys(rest.filter(metric="cka")["site"])] == [*SITES]
    said = table.notes["remarks"]
    assert any(r.startswith("no outputs: cut keeps no logits") for r in said)
    assert any(
        r.startswith("other: no cosine at blocks.0.out, whose tokens") for r in said
    )
    assert number(table, "agreement", name="other") == 1


def test_one_line_says_what_is_wrong(two: tuple[Store, Store], tmp_path: Path) -> None:
    base, _ = two
    made = values(3)

    def refused(error: type[VitseeError], text: str, *stores: Store, **more: Any) -> None:
        with pytest.raises(error, match=text) as caught:
            run(*(stores or two), **more)
        assert "\n" not in str(caught.value)

    refused(VitseeError, "no changed store to compare with the base", base)
    shutil.copytree(base.path, tmp_path / "copy.zarr")
    for again in (
        open_store(base.path, label="other"),
        open_store(tmp_path / "copy.zarr"),
    ):
        refused(
            VitseeError,
            rf"base\.zarr and .*{again.place.name} are one store, so",
            *two,
            again,
        )
    few = {name: x[:12] for name, x in made.items()}
    refused(StoreMismatch, "do not pair: 30 images against 12",
            base, store(tmp_path / "few.zarr", few, LABELS[:12]))  # fmt: skip
    refused(StoreMismatch, "the id in row 0",
            base, store(tmp_path / "other.zarr", made, hash_offset=99))  # fmt: skip
    refused(StoreMismatch, "the label in row 0 is 0 against 2",
            base, store(tmp_path / "labels.zarr", made, LABELS[::-1].copy()))  # fmt: skip
    wide = {**made, "logits": np.ones((N, 4), np.float32)}
    refused(StoreMismatch, "outputs of 3 classes, wide of 4; expected the same",
            base, store(tmp_path / "wide.zarr", wide))  # fmt: skip
    refused(SiteError, "--sites none compares the outputs alone", sites=["nowhere"])
    refused(SiteError, r"tail has none of the sites of base, .*; it has blocks.7.out",
            base, store(tmp_path / "tail.zarr", {"blocks.7.out": made["embed"]}))  # fmt: skip
    bare = store(tmp_path / "bare.zarr", {"embed": made["embed"]})
    refused(MissingInput, "nothing to compare: no outputs: bare keeps no logits",
            base, bare, sites=())  # fmt: skip
    pooled = store(tmp_path / "pooled.zarr", made, tokens="pooled")
    refused(MissingInput, "pooled only", base, pooled)
    refused(SiteError, "register", tokens="registers")
    broken = {**made, "logits": np.full((N, 3), np.nan, np.float32)}
    refused(VitseeError, "numbers in logits that are not finite",
            base, store(tmp_path / "nan.zarr", broken), sites=())  # fmt: skip
    refused(VitseeError, "expected at least 4", images=3)


@pytest.mark.parametrize("metric", METRICS)
def test_one_metric_alone(
    metric: str, two: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are those of all metrics; what only others need is not computed."""
    whole = run(*two).filter(metric=metric)
    needed = {"cka": "hsic", "cosine": "cosines"}.get(metric, "compare_outputs")
    for name, where in (
        ("hsic", changes),
        ("cosines", changes),
        ("compare_outputs", changes),
    ):
        if name != needed:
            monkeypatch.delattr(where, name)
    found = run(*two, metrics=[metric])
    assert set(found["metric"].tolist()) == {metric}
    for name in ("store", "site", "value", "low", "high"):
        assert found[name].tolist() == whole[name].tolist()
    assert plot(found).axes if metric != "top1" else True


def test_outputs_of_another_precision_are_a_remark(tmp_path: Path) -> None:
    """Without CKA, too, which compares what its Gram matrices are of."""
    base = values(0)
    whole = store(tmp_path / "base.zarr", base)
    half = store(tmp_path / "half.zarr", values(1, base), identity={"precision": "bf16"})
    for options in ({"sites": ()}, {"metrics": ["cosine"]}):
        remarks = run(whole, half, **options).notes["remarks"]
        assert "different precision" in str(remarks) and "bf16 (half)" in str(remarks)


def test_metrics_that_cannot_be_had(two: tuple[Store, Store], tmp_path: Path) -> None:
    with pytest.raises(
        VitseeError, match="no metric 'x'; metrics of effect: top1, top1_differ"
    ):
        run(*two, metrics=["x"])
    with pytest.raises(MissingInput, match="nothing to compare: no sites"):
        run(*two, sites=(), metrics=["cka"])
    bare = [
        store(tmp_path / f"{name}.zarr", values(3), np.full(N, -1))
        for name in ("bare", "other")
    ]
    with pytest.raises(MissingInput, match="no top1: no top1: "):
        run(*bare, metrics=["top1"])


# ----------------------------------------------------------------------------- table, figure


def test_table_figure_and_headline(two: tuple[Store, Store]) -> None:
    table = run(*two)
    assert [*table.written.columns] == [*COLUMNS]
    base = table.filter(pl.col("base").is_null())
    assert len(table.filter(store="base")) == 1 and not len(base.filter(metric="kl"))
    figure = plot(table)
    labels = [axes.get_xlabel() or axes.get_ylabel() for axes in figure.axes]
    assert labels[:3] == [
        "change of top-1 accuracy", "same class as the base (share)", "KL(base || changed) (nats)",
    ]  # fmt: skip
    assert len(figure.axes) == 5 and len(plot(run(*two, sites=())).axes) == 3
    ((name, text),) = headline(table)
    assert (
        name == "cut" and text.startswith("top-1 changed by -0.") and "lowest CKA" in text
    )
    directions = {"agreement": "higher", "kl": "lower", "top1_difference": "none"}
    assert {metric: direction(metric) for metric in directions} == directions


@pytest.mark.slow
def test_the_command_on_an_ablated_model(tmp_path: Path) -> None:
    images = plant_images(tmp_path / "images", 7)
    options = ["--data", images, "--model-arg", "num_classes=2", "--slab", "4"]
    base, cut = tmp_path / "base.zarr", tmp_path / "cut.zarr"
    extracted(*VIT_MODEL, *options, "-o", base)
    extracted(*VIT_MODEL, *options, "--ablate-skip", "blocks.1.attn", "-o", cut)
    out = ["-o", tmp_path / "e.csv", "--png", tmp_path / "e.png", "--replicates"]
    result = CliRunner().invoke(main, list(map(str, ["effect", base, cut, *out])))
    assert result.exit_code == 0, result.output
    table = Table.read(tmp_path / "e.csv")
    assert any("without blocks.1.attn" in w for w in table["weights"])
    before = table.filter(
        pl.col("site").is_in(["embed", "blocks.0.out"]), metric="cosine"
    )
    assert before["value"].tolist() == [1, 1]
    assert number(table, "cosine", "blocks.1.out") < 1
    assert (tmp_path / "e.png").exists() and (tmp_path / "e.replicates.csv").exists()
    result = CliRunner().invoke(main, ["effect", str(base), str(cut), "--sites", "none"])
    assert result.exit_code == 0 and ",cka," not in result.stdout
    result = CliRunner().invoke(main, ["effect", str(base)])
    assert result.exit_code == 2
    assert "itself a changed model" not in result.stderr
    result = CliRunner().invoke(main, ["effect", str(cut), str(base), "--sites", "none"])
    assert result.exit_code == 0
    assert "the base cut is itself a changed model (random 0, without blocks.1.attn)" in (
        result.stderr
    )
    base.rename(tmp_path / "images" / "cut.zarr")
    words = ["effect", str(cut), str(tmp_path / "images" / "cut.zarr"), "--sites", "none"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0 and "the base cut (base) is itself" in result.stderr
    assert "(train)" not in result.output
