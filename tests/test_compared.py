"""Stores that are compared agree in model, weights, transform and token, or one line says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stores import CNN_PAIR, VIT, write_labelled, write_sites
from vitsee_core.analyses import (
    cka,
    cka_heads,
    knn,
    localize,
    probe,
    retrieve,
    similarity,
)
from vitsee_core.features import compared, require_comparable
from vitsee_stores import Store
from vitsee_stores.errors import StoreMismatch

LABELS = np.arange(12) % 3
TRANSFORM = {"input_size": [3, 16, 32], "crop_pct": 0.9, "crop_mode": "center"}


def made(path: Path, *, tokens: int = 3, seed: int = 0, **identity: Any) -> Store:
    """A store of 12 images of three classes; identity: what is unlike other stores'."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(12, tokens, 4))
    x[:, -2:] += (
        np.eye(4)[LABELS][:, None] * 9
    )  # patches show the class, the class token does not
    more: dict[str, Any] = {} if tokens == 3 else {"layout": CNN_PAIR}
    whole = {
        "model": {"architecture": "vit"},
        "weights": "w",
        "transform": TRANSFORM,
        **identity,
    }
    return write_labelled(
        path, {"embed": x, "blocks.0.out": 2 * x}, LABELS, hash_offset=100 * seed,
        model="vit", identity=whole, **more,
    )  # fmt: skip


DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "weights": (
        {"weights": "v"},
        r"different weights \(both vit\); extract both in the same way",
    ),
    "architecture": (
        {"model": {"architecture": "deit"}},
        r"different models \(architecture: vit against deit\)",
    ),
    "skips": (
        {"ablate_skip": ["blocks.0"]},
        r"different skip connections \(ablate_skip: \[\] against \['blocks.0'\]\)",
    ),
    "crop": (
        {"transform": {**TRANSFORM, "crop_pct": 0.5}},
        r"different transforms \(crop_pct: 0.9 against 0.5\); extract both in the same way",
    ),
    "absent": (
        {"transform": {"crop_pct": 0.9, "crop_mode": "center"}},
        r"different transforms \(input_size: \[3, 16, 32\] against None\)",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_train_and_test_are_refused(tmp_path: Path, name: str) -> None:
    identity, phrase = DIFFERENCES[name]
    train, same = made(tmp_path / "train.zarr"), made(tmp_path / "same.zarr", seed=1)
    other = made(tmp_path / "o.zarr", seed=2, **identity)
    require_comparable(train, [same])
    for run, options in ((knn.run, {"ks": (3,)}), (probe.run, {})):
        with pytest.raises(StoreMismatch, match=f"^train and o were made with {phrase}"):
            run(train, same, other, **options)
    of_none = "o .vit. is of none of the models that are searched with"
    with pytest.raises(
        StoreMismatch, match=phrase if "transforms" in phrase else of_none
    ):
        retrieve.run(train, queries=[other])


def test_model_names_come_first(tmp_path: Path) -> None:
    a = made(tmp_path / "a.zarr")
    b = write_labelled(
        tmp_path / "b.zarr", {"embed": np.ones((2, 3, 4))}, [0, 1], model="cnn"
    )
    with pytest.raises(
        StoreMismatch, match=r"a and b .* different models \(vit against cnn\)"
    ):
        require_comparable(a, [b])


def test_canvases_of_tiles_may_be_of_any_size(tmp_path: Path) -> None:
    """A canvas is as large as the largest image of the data, which differs between data sets."""
    tiles = {"short_side": 16, "tiles": [16, 16]}
    a, b, c = (
        made(
            tmp_path / f"{i}.zarr",
            transform={**TRANSFORM, "input_size": [3, 16, width], "short_side": side},
            canvas={**tiles, "size": [16, width]},
        )
        for i, (width, side) in enumerate([(32, 16), (48, 16), (32, 8)])
    )
    require_comparable(a, [b])
    with pytest.raises(StoreMismatch, match=r"\(short_side: 16 against 8\)"):
        require_comparable(a, [c])


@pytest.mark.parametrize("command", ["knn", "probe", "retrieve"])
def test_one_token_for_all_stores(
    tmp_path: Path, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A class token that one of the stores lacks is used in none of them."""
    train, test = made(tmp_path / "train.zarr"), made(tmp_path / "test.zarr", seed=1)
    bare = made(tmp_path / "bare.zarr", tokens=2, seed=2)

    def run(*tests: Store, **options: Any) -> Any:
        if command == "retrieve":
            queries, *more = tests
            return retrieve.run(train, queries=[queries], distractors=more, **options)
        own = {"ks": (3,)} if command == "knn" else {"l2": [1.0]}
        return (knn.run if command == "knn" else probe.run)(
            train, *tests, **own, **options
        )

    def note(table: Any) -> Any:
        found = table.notes["compared"]
        return found[0] if command == "retrieve" else found

    alone = run(test)
    assert alone["value"].tolist() != run(test, tokens="mean")["value"].tolist()
    assert note(alone)["tokens"] == {"embed": "cls", "blocks.0.out": "cls"}
    assert note(alone)["differences"] == []
    with caplog.at_level(logging.INFO):
        table = run(bare)
        both = run(test, bare)
    line = "tokens: the mean over patches in all stores, as bare has no class token"
    assert f"{line} (embed, blocks.0.out)" in caplog.text
    assert (
        note(table)["tokens"]
        == note(both)["tokens"]
        == dict.fromkeys(("embed", "blocks.0.out"), "mean")
    )
    assert note(table)["differences"] == [line]
    asked = run(test, bare, tokens="mean")
    assert both["value"].tolist() == asked["value"].tolist()
    assert note(asked)["differences"] == []


def test_comparisons_of_models_say_what_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a = made(tmp_path / "a.zarr")
    b = made(
        tmp_path / "b.zarr", transform={**TRANSFORM, "crop_pct": 0.5}, weights="v" * 64
    )
    c = made(
        tmp_path / "c.zarr",
        transform=TRANSFORM | {"crop_mode": "squash"},
        precision="bf16",
    )
    with caplog.at_level(logging.INFO):
        table = cka.run(a, b, c, sites=["embed"], no_cache=True)
    lines = ["crop_mode: center (a, b), squash (c)", "crop_pct: 0.9 (a, c), 0.5 (b)"]
    assert (
        f"the transforms of the compared stores differ: {'; '.join(lines)}"
        in caplog.messages
    )
    assert (
        "the precisions of the compared stores differ: precision: fp32 (a, b), bf16 (c)"
        in (caplog.messages)
    )
    found = table.notes["compared"]
    assert found["stores"] == ["a", "b", "c"] and found["tokens"] == "all"
    assert found["model"] == {"architecture": "vit"} and found["order"] == "shuffled"
    assert found["differences"] == [
        "weights: w (a, c), vvvvvvvv (b)", *lines, "precision: fp32 (a, b), bf16 (c)"
    ]  # fmt: skip
    assert "transform" not in found and "precision" not in found
    again = similarity.run(a, b, sites=["embed"], k=3, no_cache=True).notes["compared"]
    assert again == compared([a, b], "all")
    assert (
        cka.run(a, sites=["embed"], no_cache=True).notes["compared"]["differences"] == []
    )


@pytest.mark.parametrize("command", ["localize", "cka-heads"])
def test_other_inputs_are_said(
    tmp_path: Path, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 7, 4))
    pixels = rng.integers(0, 256, (8, 3, 32, 48), np.uint8)
    transform = {"input_size": [3, 32, 48], "mean": [0.5] * 3, "std": [0.5] * 3}
    stores = [
        write_sites(
            tmp_path / f"{name}.zarr", {"blocks.0.attn.heads": x, "blocks.0.out": x},
            layout=VIT, pixels=pixels, distances=rng.uniform(1, 9, (8, 1, 2)),
            transform=transform, identity={"transform": {**transform, "crop_pct": pct}},
        )
        for name, pct in (("a", 0.9), ("b", 0.5))
    ]  # fmt: skip
    with caplog.at_level(logging.INFO):
        if command == "localize":
            table = localize.run(*stores, sites=["blocks.0.out"], tokens=["0,0"])
        else:
            table = cka_heads.run(*stores, sites_b=["blocks.0.out"], no_cache=True)
    line = "crop_pct: 0.9 (a), 0.5 (b)"
    assert f"the transforms of the compared stores differ: {line}" in caplog.messages
    assert table.notes["compared"]["differences"] == [line]


def test_what_is_recorded(tmp_path: Path) -> None:
    tokens = {"embed": "cls", "blocks.0.out": "cls"}
    assert compared([made(tmp_path / "a.zarr"), made(tmp_path / "b.zarr", seed=1)], tokens) == {
        "stores": ["a", "b"], "tokens": tokens,
        "model": {"architecture": "vit"}, "weights": "w", "ablate_skip": [], "interventions": [],
        "transform": TRANSFORM, "precision": "fp32", "order": "shuffled", "differences": [],
    }  # fmt: skip
