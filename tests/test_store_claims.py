"""What a manifest claims is checked before it is used: types, ranges, sizes, names."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manifests import edited
from tests.random_stores import PLANS, write
from vitsee_stores import StoreError, describe, layout, open_store, validate
from vitsee_stores.layout import _chunks

VIT = PLANS["vit"]
Change = Callable[[dict[str, Any]], object]

CHANGES: dict[str, tuple[Change, str]] = {
    "images": (
        lambda m: m["plan"].update(n_images=10**12),
        "plan.n_images is 1000000000000",
    ),
    "no images": (lambda m: m["plan"].update(n_images=0), "plan.n_images is 0"),
    "true images": (lambda m: m["plan"].update(n_images=True), "plan.n_images is true"),
    "float images": (lambda m: m["plan"].update(n_images=10.0), "plan.n_images is 10.0"),
    "slab": (lambda m: m["plan"].update(slab=-1), "plan.slab is -1"),
    "heads": (
        lambda m: m["plan"]["attention"][0].update(n_heads=[2**62, 2]),
        "plan.attention[0].n_heads[0] is 4611686018427387904",
    ),
    "blocks": (
        lambda m: m["plan"]["attention"][0].update(blocks=[]),
        "plan.attention[0] has 0",
    ),
    "grid": (
        lambda m: m["plan"]["sites"][0]["layout"].update(grid=[3, 10**9]),
        "plan.sites[0].layout.grid[1] is 1000000000",
    ),
    "no grid": (
        lambda m: m["plan"]["sites"][0].update(layout=None),
        "plan.sites[0] is of kind",
    ),
    "a huge row": (
        lambda m: m["plan"]["sites"][0].update(dim=2**39),
        "bytes a row, expected",
    ),
    "too many chunks": (
        lambda m: (
            m["plan"].update(slab=2**24, grams=False),
            m["plan"]["sites"][0]["layout"].update(grid=[2**20, 2**10]),
        ),
        "chunks, expected at most",
    ),
    "up": (
        lambda m: m["plan"]["sites"][0].update(name="../../x"),
        "expected a name without",
    ),
    "away": (
        lambda m: m["plan"]["sites"][0].update(name="/etc"),
        "expected a name without",
    ),
    "dots": (lambda m: m["plan"]["sites"][0].update(name=".."), "plan.sites[0].name is"),
    "escape": (
        lambda m: m["plan"]["sites"][0].update(name="a\x1b[31m"),
        r'"a\u001b[31m"',
    ),
    "surrogate": (
        lambda m: m["plan"]["sites"][0].update(name="\ud800"),
        "expected a name",
    ),
    "long": (
        lambda m: m["plan"]["sites"][0].update(name="x" * 300),
        "expected a name without",
    ),
    "zarr.json": (
        lambda m: m["plan"]["sites"][5].update(name="zarr.json"),
        "Zarr's files",
    ),
    "twice": (lambda m: m["plan"]["sites"][3].update(name="embed"), "two sites"),
    "alias": (lambda m: m["plan"]["sites"][2].update(alias_of="gone"), "alias of gone"),
    "window": (
        lambda m: m["plan"]["attention"][0].update(window=[99, 1]),
        "plan.attention[0] has windows of [99, 1] cells, expected some within",
    ),
    "group": (
        lambda m: m["plan"]["attention"][0].update(prefix="../up"),
        "expected a name",
    ),
    "weights": (
        lambda m: m["plan"].update(weights=[["../w", [1]]]),
        "plan.weights[0][0] is",
    ),
    "sublayer": (
        lambda m: m["plan"]["sublayers"][0].__setitem__(0, "a/b"),
        'plan.sublayers[0][0] is "a/b"',
    ),
    "no tokens": (
        lambda m: m["plan"]["sublayers"][0][1].update(prefix=[], grid=None, rows=0),
        "plan.sublayers[0][1] has no tokens",
    ),
    "no offset": (
        lambda m: m["plan"]["sites"][0]["layout"].pop("offset_px"),
        "plan.sites[0].layout.offset_px is missing",
    ),
    "no dtype": (
        lambda m: m["plan"]["sites"][0].pop("dtype"),
        "plan.sites[0].dtype is missing",
    ),
    "no level": (
        lambda m: m["plan"].pop("attention_level"),
        "plan.attention_level is missing",
    ),
    "erf": (lambda m: m["plan"]["erf"].update(n_images=99), "plan.erf.n_images is 99"),
    "erf sites": (lambda m: m["plan"]["erf"].update(sites=["pooled"]), "no stored grid"),
    "rollout": (lambda m: m["plan"].update(attention=[], erf=None), "without attention"),
    "codec": (lambda m: m["plan"].update(codec="pickle"), "plan.codec is"),
    "model": (lambda m: m.update(model=[1]), "model is a list, expected an object"),
    "name": (lambda m: m["model"].update(name=5), "model.name is 5, expected text"),
    "mean": (lambda m: m["transform"].update(mean=["x"]), 'transform.mean[0] is "x"'),
    "id": (lambda m: m.update(store_id="../x"), "64 hexadecimal digits"),
    "splits": (
        lambda m: m.update(splits={"a": 1}),
        "splits is an object, expected a list",
    ),
    "checksums": (lambda m: m["checksums"].pop("samples/id"), "checksums does not name"),
    "left out": (lambda m: m.update(left_out={"a": 1}), "left_out.a is 1, expected text"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("claims") / "a.zarr"
    write(path, VIT)
    return path


@pytest.fixture
def store(sound: Path) -> Any:
    text = (sound / "zarr.json").read_bytes()
    yield sound
    (sound / "zarr.json").write_bytes(text)


@pytest.mark.slow
@pytest.mark.parametrize("claim", CHANGES)
def test_claims(store: Path, claim: str) -> None:
    change, said = CHANGES[claim]
    with edited(store) as manifest:
        change(manifest)
    for call in (open_store, validate, describe):
        with pytest.raises(StoreError, match="the manifest is damaged: ") as error:
            call(store)
        assert said in str(error.value)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 500


def test_claims_that_sizes_alone_cannot_refuse(store: Path) -> None:
    """A plan in range, but of another size than the files: nothing of that size is made."""
    with edited(store) as manifest:
        manifest["plan"]["n_images"] = 1 << 27
    assert any("samples/index: c.0 has" in line for line in validate(store))
    assert describe(store)["n_committed"] == 3
    with pytest.raises(StoreError):
        _ = open_store(store, allow_partial=True).samples.id


def test_an_array_takes_no_memory_before_its_file_is_as_large(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with edited(store) as manifest:
        manifest["plan"]["weights"][0][1] = [1 << 31, 1]
    real = np.empty

    def empty(shape: Any, *more: Any) -> Any:
        assert np.prod(shape) < 1 << 20
        return real(shape, *more)

    monkeypatch.setattr(np, "empty", empty)
    name = "weights/patch_filters"
    assert any(line.startswith(f"{name}: ") for line in validate(store))
    with pytest.raises(StoreError):
        open_store(store).array(name)[...]


def test_samples_are_checked(store: Path) -> None:
    with edited(store) as manifest:
        manifest["splits"] = manifest["splits"][:1]
    assert "samples: codes 0 to 1 of 1 splits" in validate(store)
    with pytest.raises(StoreError, match="samples: codes 0 to 1 of 1 splits"):
        _ = open_store(store).samples.split


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    for name in ("a/b", "..", "a\nb"):
        site = {**vars(VIT.sites[0]), "name": name}
        plan = layout.StorePlan(10, 4, "none", (layout.SiteSpec(**site),))
        with pytest.raises(StoreError, match="could not be read again"):
            write(tmp_path / "a.zarr", plan)
        assert list(tmp_path.iterdir()) == []


@given(st.integers(1, 3000), st.integers(1, 1 << 14), st.integers(1, 64))
@settings(max_examples=150, deadline=None)
def test_the_best_length_is_found_without_trying_all(
    first: int, second: int, third: int
) -> None:
    """As by trying every length."""
    shape = (first, second, third)
    got = _chunks(shape, 4)
    if first * second * third * 4 <= 16 << 20:
        assert got == shape
        return
    one = first * third * 4
    low = max(1, math.ceil((4 << 20) / one))
    high = max(low, (16 << 20) // one)
    tried = range(min(low, second), min(high, second) + 1)
    assert got[1] == min(tried, key=lambda c: (math.ceil(second / c) * c, c))
