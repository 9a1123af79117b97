"""What is said to a user who named one thing for another."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.command_line import invoke, one_line
from tests.random_stores import PLANS, create
from vitsee_core.attention.recompute import find_rows
from vitsee_core.features import require_comparable
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError


def test_what_is_no_number(tmp_path: Path) -> None:
    line = one_line("knn", tmp_path / "a.zarr", "--k", "abc", code=2)
    assert line.endswith("'abc' is not a valid whole number.")
    line = one_line("plot", tmp_path / "r.csv", "--dpi", "abc", code=2)
    assert line.endswith("'abc' is not a valid number.")


def test_a_store_for_a_model_and_the_reverse(make_store: Callable[..., Path]) -> None:
    store = make_store()
    for words in (
        ["sites", store],
        ["extract", store, "--data", "demo:test", "-o", "x.zarr"],
    ):
        assert f"{store} is a store; expected a model" in one_line(*words)
    assert f"{store} is a store; expected a model" in one_line("models", store)
    line = one_line("attn-dist", "demo:vit")
    assert "no store at demo:vit" in line
    assert (
        "(run: vitsee extract demo:vit --data DATA -o NAME.zarr, if that is a model)"
        in line
    )
    assert "MODEL --data DATA -o x.zarr)" in one_line("attn-dist", "x.zarr")


@pytest.mark.parametrize(
    ("config", "phrase"),
    [
        ({"model_type": "vit"}, "is a folder; expected transformers:{}"),
        ({"architectures": ["ViTModel"]}, "is a folder; expected transformers:{}"),
        ({"architecture": "vit_base_patch16_224"}, "is a folder; expected local-dir:{}"),
        (
            {"other": 1},
            "is a folder; expected a config.json of timm (local-dir:FOLDER) or",
        ),
        (None, "is a folder; expected a model's name, or a folder with config.json"),
    ],
)
def test_a_folder_for_a_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any] | None,
    phrase: str,
) -> None:
    (tmp_path / "A" / "vit").mkdir(parents=True)
    (tmp_path / "B").mkdir()
    if config is not None:
        (tmp_path / "A" / "vit" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path / "B")
    data = ["--data", "demo:test", "-o", "x"]
    for command in ("extract", "study", "sites", "models"):
        more = data if command in ("extract", "study") else []
        assert phrase.format("../A/vit") in invoke(command, "../A/vit", *more).stderr


def test_a_file_of_weights_for_a_model(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "w.pth")
    line = one_line("sites", tmp_path / "w.pth")
    assert f"expected the model's name, and --checkpoint {tmp_path / 'w.pth'}" in line
    assert "is a file of weights" in one_line("models", tmp_path / "w.pth")


def test_a_repository_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "hubconf.py").touch()
    assert f"expected torchhub:{tmp_path}:ENTRY" in one_line("sites", tmp_path)


def test_an_option_in_the_singular(make_store: Callable[..., Path]) -> None:
    for command in ("norms", "cka", "attn-map"):
        line = one_line(command, make_store(f"{command}.zarr"), "--site", "last", code=2)
        assert line.endswith("No such option '--site'. Did you mean --sites?")
    for option in ("--site", "--sites"):
        line = one_line("export", "a.zarr", option, "last", "-o", "x.npy", code=2)
        assert f"No such option '{option}'. SITE is an argument: " in line
        assert line.endswith("export [OPTIONS] [NAME=]STORE SITE")


@pytest.mark.parametrize("command", ["probe", "knn"])
def test_two_models_for_train_and_test(tmp_path: Path, command: str) -> None:
    def made(name: str, model: str) -> Store:
        manifest = SimpleNamespace(
            model={"name": model}, info={}, identity={"model": model}
        )
        return SimpleNamespace(label=name, manifest=manifest)  # type: ignore[return-value]

    with pytest.raises(VitseeError) as refusal:
        require_comparable(made("vit", "a"), [made("cnn", "b")], trains=command)
    assert str(refusal.value).endswith(
        "vit is TRAIN and cnn TEST, which are of one model: "
        f"run vitsee {command} for each model, TRAIN and TEST of its own"
    )


def test_an_image_size_that_no_memory_holds() -> None:
    words = ["--random-init", 0, "--data", "demo:test", "-o", "x.zarr"]
    line = one_line("extract", "test_vit", "--img-size", 10**6, *words)
    assert "the weights of test_vit would take 1.0 TB, more than the memory" in line


def test_a_key_of_a_file_that_is_one_state_dict(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save({"a.weight": torch.zeros(3, 3)}, path)
    words = ["--checkpoint-key", "ema", "--data", "demo:test", "-o", tmp_path / "x.zarr"]
    line = one_line("extract", "test_vit", "--checkpoint", path, *words)
    assert (
        f"{path} is itself one state dict" in line
        and "leave out --checkpoint-key" in line
    )


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert f"{missing} is no folder; expected one with results" in one_line(
        "report", missing
    )


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("b/2.jpg", 1),
        ("2", 2),
        ("3", 3),
        ("b/2", 1),
        ("2.jpg", 1),
        ("3.png", 2),
        ("10", 3),
    ],
)
def test_images_by_shorter_names(name: str, row: int) -> None:
    ids = np.array(["a/1.png", "b/2.jpg", "b/3.png", "c/10.png", "d/1.png"], object)
    store: Any = SimpleNamespace(
        label="s", samples=SimpleNamespace(id=ids), valid=np.ones(5, bool)
    )
    assert find_rows(store, [name]).tolist() == [row]
    with pytest.raises(
        VitseeError, match=r"has 2 images '1\.png'; expected .*'a/1\.png' or 'd/1"
    ):
        find_rows(store, ["1.png"])
    with pytest.raises(VitseeError, match=r"has no image '1\.jpg'"):
        find_rows(store, ["1.jpg"])


def test_one_slab_is_no_plural(tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    create(store, dataclasses.replace(PLANS["vit"], slab=PLANS["vit"].n_images))
    result = invoke("validate", store)
    assert result.stdout == f"ok: {store}: 0 of 1 slab, unfinished\n"
    assert "0 of 1 slab is committed" in one_line("attn-dist", store)
