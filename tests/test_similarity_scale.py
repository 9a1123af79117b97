"""Similarity of features that are far from 1: single precision holds neither the fourth power of
1e-12 nor that of 1e10."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.reference_cka import loop_cka, loop_jackknife
from tests.stores import write_sites
from vitsee_core.analyses import cka, similarity
from vitsee_core.similarity.scaling import power_of_two, stored_gram_scale
from vitsee_core.tables.results import Table
from vitsee_stores import Store
from vitsee_stores.layout import TokenLayout

Array = NDArray[Any]
N = 24
SITES = ("embed", "pooled", "logits")
SCALES = (1e-30, 1e-12, 1e-8, 1e8, 1e10, 1e25)


def pair() -> tuple[Array, Array]:
    """Two representations of the same images, as a store keeps them."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(N, 12)) + 0.5
    y = x @ rng.normal(size=(12, 9)) / 3 + rng.normal(size=(N, 9))
    return x.astype(np.float32), y.astype(np.float32)


def store_of(path: Path, scale: float) -> Store:
    x, y = pair()
    tokens = np.concatenate([x, y[:, :9], x[:, :7]], axis=1).reshape(N, 7, 4)
    sites = {"embed": tokens * scale, "pooled": x * scale, "logits": y}
    return write_sites(path, {name: x.astype(np.float32) for name, x in sites.items()})


def value_and_ends(table: Table, a: str, b: str) -> list[float]:
    row = table.filter(site_a=a, site_b=b)
    return [float(row[name][0]) for name in ("value", "low", "high")]


def test_powers_of_two() -> None:
    assert [power_of_two(x) for x in (0.0, 1.0, 1e-6, 1e6)] == [1.0] * 4
    assert power_of_two(1e10) == 2.0**-34  # 1e10 is 0.58 times 2^34
    assert power_of_two(1e-12) == 2.0**39


@pytest.mark.parametrize("scale", SCALES)
def test_cka_does_not_depend_on_the_scale(scale: float, tmp_path: Path) -> None:
    x, y = pair()
    blocks = [np.flatnonzero(np.arange(N) * 20 // N == b) for b in range(20)]
    expected = loop_cka(x.astype(float), y.astype(float))
    error = loop_jackknife(x.astype(float), y.astype(float), blocks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled = cka.run(
            store_of(tmp_path / "scaled.zarr", scale), sites=SITES, no_cache=True
        )
        plain = cka.run(
            store_of(tmp_path / "plain.zarr", 1.0), sites=SITES, no_cache=True
        )
    found = value_and_ends(scaled, "pooled", "logits")
    assert found[0] == pytest.approx(expected, abs=1e-6)
    half = 2.0930240544083087 * error
    assert found[1:] == pytest.approx(
        [expected - half, min(1, expected + half)], abs=2e-6
    )
    for a, b in (("embed", "pooled"), ("embed", "logits")):
        # float32 of x times the scale, which is no power of two
        assert value_and_ends(scaled, a, b) == pytest.approx(
            value_and_ends(plain, a, b), abs=2e-6
        )
    assert not any("no CKA" in remark for remark in scaled.notes["remarks"])


@pytest.mark.parametrize("estimator", ["biased", "minibatch"])
def test_other_estimators(estimator: str, tmp_path: Path) -> None:
    batches: dict[str, Any] = {"batch": 8, "examples": 24, "repeats": 3}
    more = batches if estimator == "minibatch" else {}
    values = []
    for scale in (1.0, 1e-12, 1e10):
        store = store_of(tmp_path / f"{scale}.zarr", scale)
        table = cka.run(store, sites=SITES, no_cache=True, estimator=estimator, **more)
        values.append(float(table.filter(site_a="pooled", site_b="logits")["value"][0]))
    assert values[1:] == pytest.approx([values[0]] * 2, abs=2e-6)


def test_stored_gram_matrices(tmp_path: Path) -> None:
    """Of `extract --grams` without the tokens: tokens of 3 channels in slabs of 8 images."""
    x, y = pair()
    values = []
    for scale in (1.0, 1e-12, 1e10, 2.0**-40):
        tokens = {"a": x.reshape(N, 4, 3) * np.float32(scale), "b": y.reshape(N, 3, 3)}
        sites = {
            name: (site, TokenLayout((), (1, site.shape[1]), stride_px=(8, 8)))
            for name, site in tokens.items()
        }
        path = tmp_path / f"{scale}.zarr"
        store = write_sites(path, sites, tokens="pooled", grams=True, slab=8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            table = cka.run(store, sites=["a", "b"], no_cache=True)
        assert stored_gram_scale(store, "b") == 1.0
        values.append(value_and_ends(table, "a", "b")[0])
    assert values[1] == pytest.approx(values[0], abs=2e-6)
    assert values[2] == pytest.approx(values[0], abs=2e-6)
    assert values[3] == values[0]  # a power of two rounds nothing


@pytest.mark.parametrize("metric", list(similarity.MEASURES))
def test_other_measures(metric: str, tmp_path: Path) -> None:
    values = []
    for scale in (1.0, 1e-12, 1e10):
        store = store_of(tmp_path / f"{scale}.zarr", scale)
        sides: dict[str, Any] = {
            "sites_a": ["pooled"],
            "sites_b": ["logits"],
            "no_cache": True,
        }
        with np.errstate(over="raise", invalid="raise"):
            table = similarity.run(store, metrics=[metric], **sides)
        values.append(float(table.filter(metric=metric)["value"][0]))
    assert values[1:] == pytest.approx([values[0]] * 2, abs=1e-4)


@pytest.mark.parametrize("scale", [1e-200, 1e-12, 1e10, 1e200])
def test_arrays(scale: float) -> None:
    x, y = (features.astype(float) for features in pair())
    table = cka.cka_of_arrays(x * scale, y)
    plain = cka.cka_of_arrays(x, y)
    for name in ("value", "low", "high"):
        assert table[name][0] == pytest.approx(plain[name][0], abs=1e-9)


def test_few_images_are_a_remark(tmp_path: Path) -> None:
    x, y = (features.astype(float) for features in pair())
    for n, words in (
        (4, "has no interval"),
        (9, "CKA of 9 images is mostly noise"),
        (10, ""),
    ):
        of_arrays = cka.cka_of_arrays(x[:n], y[:n])
        store = write_sites(tmp_path / f"{n}.zarr", {"pooled": x[:n], "logits": y[:n]})
        of_store = cka.run(store, sites=SITES[1:], no_cache=True)
        for table in (of_arrays, of_store):
            remarks = [text for text in table.notes["remarks"] if "mostly noise" in text]
            assert len(remarks) == (n < 10)
            assert all(words in text for text in remarks)
    assert np.isnan(cka.cka_of_arrays(x[:4], y[:4])["low"][0])
