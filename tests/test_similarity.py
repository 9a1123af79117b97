"""HSIC and CKA against double loops, by hand, and whatever way the numbers were come by."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.features import activations
from tests.reference_cka import loop_cka, loop_hsic0, loop_hsic1
from tests.stores import CNN, write_sites
from vitsee_core.runtime import machine
from vitsee_core.runtime.progress import Silent
from vitsee_core.similarity import (
    Estimator,
    GramOptions,
    Representation,
    centred_alignment,
    hsic,
    summarise,
)
from vitsee_core.similarity import estimate as estimate_module
from vitsee_core.similarity.comparison import Comparison
from vitsee_core.statistics.moments import t_quantile
from vitsee_stores import Store, open_store
from vitsee_stores.errors import MissingInput, SiteError, StoreMismatch, VitseeError

Array = NDArray[Any]
Float = NDArray[np.float64]


def representations(
    store: Store, tokens: str = "all", sites: Sequence[str] = ("all",)
) -> list[Representation]:
    return [Representation(store, site, tokens) for site in store.select(list(sites))]


def options(**kwargs: Any) -> GramOptions:
    return GramOptions(use_cache=False, **kwargs)


def one(store: Store, **kwargs: Any) -> Float:
    return summarise(hsic(representations(store), options=options(), **kwargs)).cka


N = 30
SITES = {f"blocks.{i}.out": activations(N, seed=i) for i in range(3)}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return write_sites(tmp_path / "a.zarr", SITES)


def expected(
    sites: dict[str, Array] = SITES, rows: Array | None = None, value: Any = loop_hsic1
) -> Float:
    chosen = [v if rows is None else v[rows] for v in sites.values()]
    return np.array([[loop_cka(x, y, value) for y in chosen] for x in chosen])


# Values


def test_by_hand(tmp_path: Path) -> None:
    # four images with one feature each; K~ and L~ written out:
    # x = 0 1 0 1: x_i x_j is 1 for images 1 and 3 only. y = 1 0 0 1: for 0 and 3 only.
    # <K~,L~> = 0; row sums 0 1 0 1 and 1 0 0 1: r.r = 1, s s = 4
    # HSIC_1 = (0 - 2/2 * 1 + 4 / (3 * 2)) / (4 * 1) = (-1 + 2/3) / 4 = -1/12
    # of x with itself: <K~,K~> = 2, r.r = 2: (2 - 2 + 2/3) / 4 = 1/6, as of y; CKA = -1/2
    x, y = ([[0.0], [1.0], [0.0], [1.0]], [[1.0], [0.0], [0.0], [1.0]])
    store = write_sites(tmp_path / "a.zarr", {"x": np.array(x), "y": np.array(y)}, slab=4)
    h = hsic(representations(store), options=options())
    assert h.cross == pytest.approx(
        np.array([[1 / 6, -1 / 12], [-1 / 12, 1 / 6]]), rel=1e-6
    )
    assert summarise(h).cka == pytest.approx(np.array([[1, -0.5], [-0.5, 1]]), rel=1e-6)
    assert h.spread == ""  # 4 images: none can be left out
    # biased: centred x = -+1/2, y = +-1/2, x.y = 0
    h = hsic(representations(store), estimator=Estimator("biased"), options=options())
    assert h.cross == pytest.approx(np.array([[1 / 9, 0], [0, 1 / 9]]), abs=1e-7)


def test_exact_is_the_double_loop(store: Store) -> None:
    assert one(store) == pytest.approx(expected(), abs=1e-6)


def test_biased_is_the_trace(store: Store) -> None:
    found = one(store, estimator=Estimator("biased"))
    assert found == pytest.approx(expected(value=loop_hsic0), abs=1e-6)
    assert (found[0, 1:] > one(store)[0, 1:]).all()


@pytest.mark.parametrize(
    ("tokens", "chosen"),
    [
        ("patches", lambda v: v[:, 1:]),
        ("cls", lambda v: v[:, 0]),
        ("rest", lambda v: v[:, 1:].mean(1)),
        ("1,2", lambda v: v[:, 1 + 5]),
    ],
)
def test_tokens(store: Store, tokens: str, chosen: Any) -> None:
    found = summarise(hsic(representations(store, tokens), options=options())).cka
    assert found == pytest.approx(
        expected({k: chosen(v) for k, v in SITES.items()}), abs=1e-6
    )


def test_tokens_that_are_not_there(store: Store, tmp_path: Path) -> None:
    cnn = write_sites(tmp_path / "c.zarr", {"x": activations(8, layout=CNN)}, layout=CNN)
    with pytest.raises(SiteError, match="c: x has no class token"):
        representations(cnn, "cls")
    with pytest.raises(SiteError, match="9,9"):
        representations(store, "9,9")
    pooled = write_sites(tmp_path / "p.zarr", {"x": activations(8)}, tokens="pooled")
    with pytest.raises(MissingInput, match=r"--tokens x=all .*, or with --grams"):
        representations(pooled)
    assert one_of(representations(pooled, "cls")) == pytest.approx(1)


def one_of(reps: list[Representation]) -> float:
    return float(summarise(hsic(reps, options=options())).cka[0, 0])


def test_channels_are_a_part_of_every_token(store: Store) -> None:
    (site,) = store.select(["blocks.1.out"])
    parts = [Representation(store, site, channels=slice(a, a + 2)) for a in (0, 2)]
    h = hsic(parts, representations(store), options=options())
    halves = [SITES[site.name][..., a : a + 2] for a in (0, 2)]
    wanted = [[loop_cka(x, y) for y in SITES.values()] for x in halves]
    assert summarise(h).cka == pytest.approx(np.array(wanted), abs=1e-6)
    # HSIC is bilinear: the parts' sum is the whole
    whole = hsic([Representation(store, site)], representations(store), options=options())
    assert h.cross.sum(0) == pytest.approx(whole.cross[0], rel=1e-5)


# Invariances (Kornblith et al. 2019, section 2); of rotation and scale see test_cka


@pytest.mark.slow
def test_independent_data_are_near_zero(tmp_path: Path) -> None:
    values = []
    for seed in range(10):
        x, y = np.random.default_rng(seed).normal(size=(2, 16, 64))
        values.append(one(write_sites(tmp_path / f"{seed}.zarr", {"x": x, "y": y}))[0, 1])
    assert abs(np.mean(values)) < 3 * np.std(values) / math.sqrt(10)
    biased = one(
        write_sites(tmp_path / "b.zarr", {"x": x, "y": y}), estimator=Estimator("biased")
    )
    assert biased[0, 1] > 0.6


def test_a_common_offset_changes_nothing(tmp_path: Path) -> None:
    moved = {k: v + 300 * np.sign(np.arange(4) - 1.5) for k, v in SITES.items()}
    found = one(write_sites(tmp_path / "a.zarr", moved))
    assert found == pytest.approx(expected(), abs=1e-5)


@pytest.mark.parametrize(("dtype", "offset"), [("float32", 1000), ("float16", 300)])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_an_offset_that_cost_digits_is_said(
    tmp_path: Path,
    dtype: str,
    offset: int,
    as_tokens: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Tokens that are stored in float16 lost digits; those in float32, and vectors, did not."""
    sites = {name: values + offset for name, values in SITES.items()}
    if not as_tokens:
        sites = {name: values[:, 0] for name, values in sites.items()}
    far = write_sites(tmp_path / "a.zarr", sites, dtype=dtype)
    h = hsic(representations(far), options=options())
    assert "a blocks.0.out, a blocks.1.out" in caplog.text
    is_rounded = as_tokens and dtype == "float16"
    assert ("--dtype SITE=float32, or import" in caplog.text) == is_rounded
    assert ("have few digits in float32" in caplog.text) == (not is_rounded)
    assert h.notes["common_offset"]["a blocks.0.out"] > 1e4


def test_self_comparison_is_one_and_symmetric(store: Store) -> None:
    h = hsic(representations(store), options=options())
    found = summarise(h)
    assert (np.diag(found.cka) == 1).all()
    assert np.diag(found.std) == pytest.approx(np.zeros(3), abs=1e-12)
    assert np.array_equal(found.cka, found.cka.T) and np.array_equal(
        found.std, found.std.T
    )
    assert (found.low <= found.cka).all() and (found.cka <= found.high).all()


def test_constant_features_that_rounding_moves_have_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jitter = np.random.default_rng(0).integers(-1, 2, (N, 3)) * np.finfo(np.float32).eps
    sites = {"flat": 1 + jitter, **SITES}
    store = write_sites(tmp_path / "a.zarr", sites)
    for cols in (None, representations(store, sites=["blocks.1.out"])):
        found = summarise(hsic(representations(store), cols, options=options()))
        assert np.isnan(found.cka[0]).all() and np.isnan(found.std[0]).all()
        assert np.isfinite(found.cka[1:, -1]).all()
    assert "the same for all images, so without a value: a flat" in caplog.text
    assert "--dtype" not in caplog.text


def test_centred_alignment_is_nan_where_a_self_hsic_is_not_positive() -> None:
    found = centred_alignment(
        np.ones((2, 2)), np.array([4.0, -1.0]), np.array([1.0, 0.0])
    )
    assert found[0, 0] == 0.5
    assert np.isnan(found[1]).all() and np.isnan(found[0, 1])


# Whatever way the numbers were come by


@pytest.mark.slow
@pytest.mark.parametrize(("slab", "memory"), [(4, None), (7, 70_000), (30, 70_000)])
def test_slabs_and_memory_do_not_matter(
    tmp_path: Path, slab: int, memory: int | None
) -> None:
    store = write_sites(tmp_path / "a.zarr", SITES, slab=slab)
    h = hsic(representations(store), options=options(memory=memory))
    assert summarise(h).cka == pytest.approx(expected(), abs=1e-6)
    assert h.replicates is not None and len(h.replicates.cross) == 20


@pytest.mark.slow
def test_tiles_groups_and_strips_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = {**SITES, "pooled": activations(N, seed=9)[:, 0]}
    store = write_sites(
        tmp_path / "a.zarr", sites, slab=7, valid=[1] * 11 + [0] + [1] * (N - 12)
    )
    other = write_sites(
        tmp_path / "b.zarr", SITES, slab=4, valid=[1] * 20 + [0] + [1] * (N - 21)
    )
    a, b = representations(store), representations(other)
    whole = [hsic(a, options=options()), hsic(a, b, options=options())]
    monkeypatch.setattr("vitsee_core.similarity.gram_file.MAX_TILE", 8)
    monkeypatch.setattr("vitsee_core.similarity.estimators.tile_size", lambda n: 7)
    monkeypatch.setattr("vitsee_core.similarity.products.MAX_COLUMNS", 6)
    monkeypatch.setattr("vitsee_core.similarity.products.MIN_COLUMNS", 1)
    monkeypatch.setattr(
        "vitsee_core.similarity.estimators.bytes_per_matrix", lambda n, p, t: 1 << 20
    )
    small = options(memory=4 << 20)
    again = [hsic(a, options=small), hsic(a, b, options=small)]
    for ours, theirs in zip(again, whole, strict=True):
        for name in ("cross", "rows", "cols"):
            assert getattr(ours, name) == pytest.approx(
                getattr(theirs, name), rel=1e-5, abs=1e-7
            )
        assert ours.replicates is not None and theirs.replicates is not None
        assert ours.replicates.cross == pytest.approx(
            theirs.replicates.cross, rel=1e-4, abs=1e-6
        )
        assert ours.replicates.cols == pytest.approx(
            theirs.replicates.cols, rel=1e-4, abs=1e-6
        )


@pytest.mark.slow
def test_half_precision_agrees_with_what_it_stores(tmp_path: Path) -> None:
    store = write_sites(tmp_path / "a.zarr", SITES, dtype="float16")
    rounded = {k: v.astype(np.float16).astype(np.float64) for k, v in SITES.items()}
    assert one(store) == pytest.approx(expected(rounded), abs=1e-6)


def test_too_little_memory_is_one_line(store: Store) -> None:
    with pytest.raises(VitseeError, match=r"give --memory \d+"):
        hsic(representations(store), options=options(memory=100))


# Which images


@pytest.mark.slow
def test_invalid_and_unfinished_rows_are_left_out(tmp_path: Path) -> None:
    valid = np.ones(N, int)
    valid[[0, 9, 29]] = 0
    a = write_sites(tmp_path / "a.zarr", SITES, valid=valid.tolist())
    assert one(a) == pytest.approx(expected(rows=valid == 1), abs=1e-6)
    also = np.ones(N, int)
    also[5] = 0
    b = write_sites(
        tmp_path / "b.zarr", SITES, valid=also.tolist(), slab=5, slabs=[0, 1, 2, 5]
    )
    rows = (valid == 1) & (also == 1) & ((np.arange(N) < 15) | (np.arange(N) >= 25))
    h = hsic(representations(a), representations(b), options=options())
    assert h.n_images == rows.sum()
    assert summarise(h).cka == pytest.approx(expected(rows=rows), abs=1e-6)


def test_images_takes_the_first_rows_of_a_shuffled_store(store: Store) -> None:
    h = hsic(representations(store), images=12, options=options())
    assert h.n_images == 12
    assert summarise(h).cka == pytest.approx(expected(rows=np.arange(12)), abs=1e-6)


def test_three_images_are_too_few(tmp_path: Path) -> None:
    few = write_sites(tmp_path / "a.zarr", {k: v[:3] for k, v in SITES.items()})
    with pytest.raises(VitseeError, match=r"3 images .* at least 4"):
        one(few)


# Spread


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "order"), [("exact", "dataset"), ("biased", "shuffled")]
)
def test_jackknife_leaves_out_blocks_of_images(
    tmp_path: Path, estimator: str, order: str
) -> None:
    store = write_sites(tmp_path / "a.zarr", SITES, order=order)
    h = hsic(
        representations(store), estimator=Estimator(estimator), options=options(), seed=3
    )
    labels = np.arange(N) * 20 // N
    if order == "dataset":
        labels = np.random.default_rng(3).permutation(labels)
    value = loop_hsic1 if estimator == "exact" else loop_hsic0
    each = np.array([expected(rows=labels != g, value=value) for g in range(20)])
    found = summarise(h)
    std = np.sqrt(19 / 20 * ((each - each.mean(0)) ** 2).sum(0))
    assert h.spread == "jackknife"
    assert found.std == pytest.approx(std, rel=1e-3, abs=1e-7)
    half = t_quantile(19) * std
    assert found.low == pytest.approx(np.maximum(found.cka - half, -1), abs=1e-5)
    assert found.high == pytest.approx(np.minimum(found.cka + half, 1), abs=1e-5)


@pytest.mark.slow
def test_the_jackknife_knows_the_sampling_error(tmp_path: Path) -> None:
    """Its standard error against the spread over independent samples of images."""
    values, errors = [], []
    for seed in range(16):
        rng = np.random.default_rng(seed)
        common = rng.normal(size=(60, 5)) * [4, 2, 1, 1, 1]
        x, y = (common @ np.eye(5, 9) + rng.normal(size=(60, 9)) for _ in range(2))
        sample = write_sites(tmp_path / f"{seed}.zarr", {"x": x, "y": y}, slab=60)
        h = hsic(representations(sample), options=options())
        values.append(summarise(h).cka[0, 1])
        errors.append(summarise(h).std[0, 1])
    assert 0.6 < np.mean(errors) / np.std(values, ddof=1) < 1.6


def test_few_images_are_left_out_one_by_one(tmp_path: Path) -> None:
    few = {k: v[:6] for k, v in SITES.items()}
    h = hsic(representations(write_sites(tmp_path / "a.zarr", few)), options=options())
    assert h.replicates is not None and h.replicates.cross.shape == (6, 3, 3)


# Minibatches


def minibatch(batch: int = 5, examples: int = 20, repeats: int = 3) -> Estimator:
    return Estimator("minibatch", batch, examples, repeats)


def loop_minibatch(batch: int, examples: int, repeats: int, seed: int) -> Float:
    """(repeats, sites, sites): ratio of sums over the batches of a repeat."""
    rng = np.random.default_rng(seed)
    values = list(SITES.values())
    out = []
    for _ in range(repeats):
        order = rng.permutation(N)[:examples]
        batches = [order[at : at + batch] for at in range(0, examples, batch)]

        def total(x: Array, y: Array, batches: Any = batches) -> float:
            return math.fsum(
                loop_hsic1(x[b].reshape(batch, -1), y[b].reshape(batch, -1))
                for b in batches
            )

        own = [total(x, x) for x in values]
        cross = np.array([[total(x, y) for y in values] for x in values])
        out.append(cross / np.sqrt(np.outer(own, own)))
    return np.array(out)


@pytest.mark.parametrize("whole", [True, False])
def test_minibatch_is_the_ratio_of_sums(
    store: Store, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vitsee_core.similarity.estimators._prefers_full_grams", lambda *_: whole
    )
    h = hsic(representations(store), estimator=minibatch(), seed=4, options=options())
    wanted = loop_minibatch(5, 20, 3, seed=4)
    found = summarise(h)
    assert h.spread == "repeats"
    assert found.cka == pytest.approx(wanted.mean(0), abs=1e-6)
    assert found.std == pytest.approx(wanted.std(0, ddof=1), abs=1e-6)
    assert np.isnan(found.low).all()
    assert h.notes["batch"] == 5 and h.notes["batches"] == 4 and h.notes["repeats"] == 3


def test_a_batch_of_everything_is_exact(store: Store) -> None:
    h = hsic(representations(store), estimator=minibatch(N, N, 1), options=options())
    assert summarise(h).cka == pytest.approx(expected(), abs=1e-6)
    assert h.spread == ""


def test_minibatch_sizes_are_capped_and_said(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    h = hsic(representations(store), estimator=Estimator("minibatch"), options=options())
    assert "batch 1024: there are 30 images" in caplog.text
    # one batch of everything is the same each time: no repeats that look like no noise
    assert (h.notes["batch"], h.notes["batches"], h.notes["repeats"]) == (30, 1, 1)
    assert h.spread == "" and np.isnan(summarise(h).std).all()


@pytest.mark.parametrize(
    ("estimator", "says"),
    [
        (Estimator("minibatch", batch=3), "--batch is 3"),
        (Estimator("minibatch", batch=10, examples=5), "fewer than a batch"),
        (Estimator("minibatch", batch=5, repeats=2, rescale=True), "--repeats 1"),
    ],
)
def test_impossible_minibatches(store: Store, estimator: Estimator, says: str) -> None:
    with pytest.raises(VitseeError, match=says):
        one(store, estimator=estimator)


# Which estimator


def test_the_estimator_is_chosen_by_the_number_of_images(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a small disk nor matrices that are there already change it."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(
        VitseeError, match=r"take .*, .* has 1\.0 kB free; choose another --cache"
    ):
        hsic(representations(store), options=options())
    monkeypatch.undo()
    assert hsic(representations(store), options=options()).notes["estimator"] == "exact"
    monkeypatch.setattr(estimate_module, "MOST_EXACT", len(store.samples) - 1)
    assert (
        hsic(representations(store), options=options()).notes["estimator"] == "minibatch"
    )
    assert "in place of exact (--estimator exact, or --images N" in caplog.text


# The cache


def kept(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("*.json"))


def test_gram_matrices_are_made_once(store: Store, tmp_path: Path) -> None:
    counts: list[int] = []

    class Counting(Silent):
        def start(self, total: int, done: int = 0, unit: str = "images") -> None:
            counts.append(total)

    reps, at_store = representations(store), GramOptions()
    one(store)
    assert not store.path.with_name("a.zarr.grams").exists()
    first = hsic(reps, options=at_store, progress=Counting())
    folder = store.path.with_name("a.zarr.grams")
    assert counts == [3] and len(kept(folder)) == 3
    again = hsic(reps, options=at_store, progress=Counting())
    assert counts == [3] and np.array_equal(again.cross, first.cross)
    # a comparison of fewer images, minibatches and other estimators find them too
    some = hsic(reps, images=12, options=at_store, progress=Counting())
    assert summarise(some).cka == pytest.approx(expected(rows=np.arange(12)), abs=1e-6)
    for estimator in (minibatch(), Estimator("biased")):
        hsic(reps, estimator=estimator, options=at_store, progress=Counting())
    other = write_sites(tmp_path / "b.zarr", SITES, valid=[0] + [1] * (N - 1))
    hsic(reps, representations(other), options=at_store, progress=Counting())
    assert counts == [3, 3] and len(kept(folder)) == 3


@pytest.mark.slow
def test_stores_of_the_same_images_share_no_cache(tmp_path: Path) -> None:
    a = write_sites(tmp_path / "a.zarr", SITES)
    changed = {k: v[:, ::-1] ** 3 for k, v in SITES.items()}
    b = write_sites(tmp_path / "b.zarr", changed)
    place = GramOptions(cache=tmp_path / "cache")
    hsic(representations(a), options=place)
    found = summarise(hsic(representations(b), options=place)).cka
    assert found == pytest.approx(expected(changed), abs=1e-6)


def test_a_place_that_cannot_be_written_is_said(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    h = hsic(representations(store), options=GramOptions(cache=tmp_path / "file"))
    assert summarise(h).cka == pytest.approx(expected(), abs=1e-6)
    assert caplog.text.count("are not kept") == 1 and "--cache DIR" in caplog.text


def test_damaged_matrices_are_made_again(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    reps = representations(store)
    hsic(reps, options=GramOptions())
    folder = store.path.with_name("a.zarr.grams")
    flipped, short, headless = sorted(folder.glob("*.tiles"))
    data = bytearray(flipped.read_bytes())
    data[100] ^= 1
    flipped.write_bytes(data)
    short.write_bytes(short.read_bytes()[:50])
    header = json.loads(headless.with_suffix(".json").read_bytes())
    headless.with_suffix(".json").write_text(json.dumps({**header, "checksums": []}))
    assert summarise(hsic(reps, options=GramOptions())).cka == pytest.approx(
        expected(), abs=1e-6
    )
    assert caplog.text.count("is damaged (tile 0); it is made again") == 1
    assert caplog.text.count("is cut short; it is made again") == 1
    caplog.clear()
    hsic(reps, options=GramOptions())
    assert "damaged" not in caplog.text


@pytest.mark.slow
def test_a_slab_written_anew_has_other_matrices(store: Store) -> None:
    before = hsic(representations(store), options=GramOptions())
    changed = {k: v[:, ::-1] ** 3 for k, v in SITES.items()}
    # as after damage: what is not committed is written again, by the same command
    for marker in (store.path / "commits").glob("c.*"):
        marker.unlink()
    write_sites(store.path, changed, command="again")
    again = hsic(representations(open_store(store.path)), options=GramOptions())
    assert not np.allclose(again.cross, before.cross)
    assert summarise(again).cka == pytest.approx(expected(changed), abs=1e-6)


def test_two_processes_keep_one_matrix(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reps = representations(store)
    hsic(reps, options=GramOptions())
    monkeypatch.setattr(
        Comparison, "find", lambda *_: None
    )  # as where both began at once
    hsic(reps, options=GramOptions())
    assert len(kept(store.path.with_name("a.zarr.grams"))) == 3


def test_a_failure_leaves_no_half_matrix(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vitsee_core.similarity.cache.os.replace", full)
    with pytest.raises(
        VitseeError, match=r"cannot keep the Gram matrix of .*no space left"
    ):
        hsic(representations(store), options=GramOptions())
    assert list(store.path.with_name("a.zarr.grams").iterdir()) == []


# Gram matrices within slabs


def test_slab_grams_stand_in_for_activations(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    valid = [1] * 13 + [0] + [1] * (N - 14)
    a = write_sites(tmp_path / "a.zarr", SITES, tokens="pooled", grams=True, valid=valid)
    b = write_sites(tmp_path / "b.zarr", SITES, slab=5)
    cells = [
        np.array([i for i in range(k, min(k + 8, N)) if valid[i]]) for k in range(0, N, 8)
    ]

    def total(x: Array, y: Array) -> float:
        return math.fsum(
            len(c) * loop_hsic1(x[c].reshape(len(c), -1), y[c].reshape(len(c), -1))
            for c in cells
        )

    values = list(SITES.values())
    wanted = np.array(
        [
            [total(x, y) / math.sqrt(total(x, x) * total(y, y)) for y in values]
            for x in values
        ]
    )
    h = hsic(representations(a), options=options())
    assert summarise(h).cka == pytest.approx(wanted, abs=1e-5)
    assert "only Gram matrices within slabs were kept of a blocks.0.out" in caplog.text
    assert h.spread == "" and "fewer than 10" in h.notes["spread"] and h.n_images == N - 1
    # beside activations, which are cut the same way
    mixed = hsic(representations(a), representations(b), options=options())
    assert summarise(mixed).cka == pytest.approx(wanted, abs=1e-5)
    # pooled vectors are kept, and exact
    mean = summarise(hsic(representations(a, "mean"), options=options())).cka
    rows = np.array(valid) == 1
    assert mean == pytest.approx(
        expected({k: v[:, 1:].mean(1) for k, v in SITES.items()}, rows), abs=1e-6
    )


def test_slab_grams_have_a_jackknife_from_ten_slabs_on(tmp_path: Path) -> None:
    sites = {k: activations(50, seed=i) for i, k in enumerate(SITES)}
    a = write_sites(tmp_path / "a.zarr", sites, tokens="pooled", grams=True, slab=5)
    h = hsic(representations(a), options=options())
    rest = {k: v[5:] for k, v in sites.items()}
    b = write_sites(tmp_path / "b.zarr", rest, tokens="pooled", grams=True, slab=5)
    without = hsic(representations(b), options=options())
    assert (
        h.spread == "slabs" and h.replicates is not None and len(h.replicates.cross) == 10
    )
    left = (getattr(h.replicates, name)[0] for name in ("cross", "rows", "cols"))
    assert centred_alignment(*left) == pytest.approx(summarise(without).cka, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "says"),
    [
        (Estimator("exact"), "--estimator exact needs pairs of images across slabs"),
        (Estimator("biased"), "--tokens blocks.0.out=all"),
        (Estimator(repeats=20), "leave out --examples, --repeats"),
        (Estimator(batch=16), "--batch 16 is not their slab of 8"),
    ],
)
def test_slab_grams_serve_one_estimator(
    tmp_path: Path, estimator: Estimator, says: str
) -> None:
    a = write_sites(tmp_path / "a.zarr", SITES, tokens="pooled", grams=True)
    with pytest.raises(MissingInput, match=says):
        one(a, estimator=estimator)


def test_slab_grams_of_other_slabs_do_not_compare(tmp_path: Path) -> None:
    a = write_sites(tmp_path / "a.zarr", SITES, tokens="pooled", grams=True)
    b = write_sites(tmp_path / "b.zarr", SITES, tokens="pooled", grams=True, slab=5)
    with pytest.raises(StoreMismatch, match="same --slab"):
        hsic(representations(a), representations(b), options=options())


def test_an_unset_memory_is_a_quarter_of_the_machines(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(estimate_module, "memory_bytes", lambda: 400)
    with pytest.raises(VitseeError, match="of memory are too few"):
        one(store)
    assert machine.memory_bytes() > 400
