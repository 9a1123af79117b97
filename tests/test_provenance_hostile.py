"""A stranger's store: its manifest asks for everything that could run code or go online."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import save_for_hf

from tests.extractions import extracted, plant_images
from vitsee_core.models.load import load_model
from vitsee_core.models.provenance import NamedModel, model_of, naming, source_of
from vitsee_core.models.sources.timm import KNOWN
from vitsee_core.models.sources.timm_create import LOADING
from vitsee_stores import Store, open_store
from vitsee_stores.errors import VitseeError

SMALL = [
    "test_vit",
    "--random-init",
    "0",
    "--img-size",
    "32x48",
    "--model-arg",
    "patch_size=8",
]


class Evil:
    """A pickle that leaves a mark when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    data = plant_images(folder / "data", 2)
    extracted(*SMALL, "--data", data, "--tokens", "pooled", "-o", folder / "s.zarr")
    return folder / "s.zarr"


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with weights that are pickles with code; no caches, and no network to speak to."""

    def refuse(*args: Any, **_: Any) -> None:
        raise AssertionError(f"went online: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    folder = tmp_path / "trap"
    folder.mkdir()
    torch.save({"state_dict": Evil(tmp_path / "mark")}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps({"architecture": "test_vit"}))
    return folder


def hostile(made: Path, **model: Any) -> Store:
    """The store with another model in its manifest."""
    store = open_store(made)
    record = {**store.manifest.model, **model}
    store.manifest = dataclasses.replace(store.manifest, model=record)
    return store


def refusal(store: Store, **how: Any) -> str:
    with pytest.raises(VitseeError) as error:
        model_of(store, **how)
    text = str(error.value)
    assert "\n" not in text and len(text) < 400
    return text


def test_the_trap_works(trap: Path) -> None:
    torch.load(trap / "pytorch_model.bin", weights_only=False)
    assert (trap.parent / "mark").exists()


@pytest.mark.slow
def test_nothing_of_a_strangers_runs(made: Path, trap: Path) -> None:
    weights, mark = str(trap / "pytorch_model.bin"), trap.parent / "mark"
    pretrained = {"sha256": "0" * 64, "source": "pretrained"}
    asked: list[tuple[dict[str, Any], str]] = [
        ({"args": {"checkpoint_path": weights}}, "model argument 'checkpoint_path'"),
        (
            {"args": {"pretrained_cfg": {"file": weights}}},
            "model argument 'pretrained_cfg'",
        ),
        (
            {"args": {"pretrained_cfg_overlay": {"file": weights}}},
            "'pretrained_cfg_overlay'",
        ),
        ({"args": {"pretrained_cfg": {"url": "http://x/w.pth"}}}, "'pretrained_cfg'"),
        ({"args": {"cache_dir": str(trap)}}, "model argument 'cache_dir'"),
        (
            {"args": {"norm_layer": "__import__('os')"}},
            "norm_layer=__import__('os'), which is no",
        ),
        ({"args": {"depth": 10**9}}, "depth=1000000000"),
        (
            {"args": {"embed_dim": 2**16, "depth": 512, "num_heads": 1}},
            "more than the memory",
        ),
        ({"args": {"mlp_ratio": [[1.0]]}}, "mlp_ratio=[[1.0]]"),
        (
            {"name": f"local-dir:{trap}", "weights": pretrained},
            "with --trust-store",
        ),
        (
            {"name": "hf-hub:evil/model", "weights": pretrained},
            "with --trust-store",
        ),
        ({"name": "local-dir:trap"}, "with --trust-store"),
        (
            {"weights": pretrained},
            "nothing is fetched for a store (--trust-store allows it)",
        ),
        ({"name": "demo:../../x"}, "no demo model '../../x'"),
        (
            {"weights": {"sha256": "0" * 64, "source": "checkpoint", "file": weights}},
            "holds objects besides tensors",
        ),
    ]
    for model, phrase in asked:
        text = refusal(hostile(made, **model))
        assert phrase in text, (model, text)
        assert not mark.exists(), model


@pytest.mark.parametrize(
    "model",
    [
        {"weights": None},
        {"weights": {"sha256": 3}},
        {"weights": {"sha256": "0", "seed": "x"}},
        {"name": 7},
        {"args": ["depth"]},
        {"args": {"depth": {"a": 1}}},
        {"input_size": [3, 10**9, 10**9]},
        {"input_size": "abc"},
        {"input_size": [3, True, 32]},
        {"ablate_skip": 3},
        {"ablate_skip": [3]},
    ],
)
def test_a_manifest_of_other_types(made: Path, trap: Path, model: dict[str, Any]) -> None:
    refusal(hostile(made, **model))


@pytest.mark.parametrize("size", [[3, 97, 48], [3, 32, 145], [3, 8192, 48]])
def test_an_input_that_the_sites_do_not_cover_is_not_made(
    made: Path, size: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is of 32 x 48 pixels."""
    loads = "vitsee_core.models.load.load_model"
    monkeypatch.setattr(loads, lambda *_, **__: pytest.fail("the model was made"))
    text = refusal(hostile(made, input_size=size))
    assert f"its input has {size[1]} x {size[2]} pixels, and its sites cover" in text


def test_an_input_beyond_the_memory_is_not_made(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitsee_core.models.provenance.memory_bytes", lambda: 300_000)
    text = refusal(open_store(made))
    assert (
        "made of 32 x 48 pixels: its model takes about 393 kB, this machine has 300 kB"
        in text
    )
    monkeypatch.undo()
    assert model_of(open_store(made)).input_size == (3, 32, 48)


def test_a_folder_is_opened_where_the_user_says_so(made: Path, trap: Path) -> None:
    """Even then a pickle with code is not run."""
    store = hostile(
        made, name=f"local-dir:{trap}", weights={"sha256": "0" * 64, "source": "x"}
    )
    text = refusal(store, trust=True)
    assert "torch.load(weights_only=True) reads" in text
    assert not (trap.parent / "mark").exists()


@pytest.fixture(scope="module")
def of_a_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A store of a model in a folder, and the model's name."""
    folder = tmp_path_factory.mktemp("own")
    save_for_hf(
        timm.create_model("test_vit"), str(folder / "mine"), safe_serialization=True
    )
    data, name = plant_images(folder / "data", 2), f"local-dir:{folder / 'mine'}"
    kept = ["--tokens", "pooled", "--img-size", "32", "--model-arg", "patch_size=8"]
    kept.append("--resample-patches")
    extracted(name, *kept, "--data", data, "-o", folder / "s.zarr")
    return folder / "s.zarr", name


def test_what_the_command_names_is_opened_in_place_of_what_a_store_names(
    of_a_folder: tuple[Path, str], trap: Path
) -> None:
    place, name = of_a_folder
    store, args = open_store(place), {"patch_size": 8}
    refusal(store)
    with naming({place: NamedModel(name, args)}):
        assert (
            model_of(store).weights["sha256"] == store.manifest.model["weights"]["sha256"]
        )
        evil = {"name": f"local-dir:{trap}"}
        assert model_of(hostile(place, **evil)).name == name, (
            "moved, or a lie: ours is opened"
        )
        other = {**store.manifest.model["weights"], "sha256": "0" * 64}
        text = refusal(hostile(place, **evil, weights=other))
        assert f"{name} now has other weights" in text
        asked = hostile(place, args={**args, "pretrained_cfg": {"file": str(trap / "w")}})
        assert "a folder or a repository is not opened" in refusal(asked)
    with naming({place.parent / "other.zarr": NamedModel(name, args)}):
        assert "a folder or a repository is not opened" in refusal(store)
    refusal(store)
    assert not (trap.parent / "mark").exists()


def test_an_unchanged_store_is_made_again(made: Path, trap: Path) -> None:
    store = open_store(made)
    assert model_of(store).weights["sha256"] == store.manifest.model["weights"]["sha256"]


@pytest.mark.slow
def test_a_key_of_a_checkpoint_is_remembered(tmp_path: Path) -> None:
    states = {}
    for seed, key in enumerate(("model", "model_ema")):
        own = load_model(
            "test_vit", random_init=seed, img_size=32, model_args={"patch_size": 8}
        )
        states[key] = own.module.state_dict()
    torch.save(states, tmp_path / "w.pth")
    data = plant_images(tmp_path / "data", 2)
    size = ["--img-size", "32", "--model-arg", "patch_size=8", "--tokens", "pooled"]
    chosen = ["--checkpoint", tmp_path / "w.pth", "--checkpoint-key", "model_ema"]
    said = extracted(
        "test_vit", *chosen, *size, "--data", data, "-o", tmp_path / "s.zarr"
    ).stderr
    assert "taken: model_ema; other copies: model (--checkpoint-key model)" in said
    store = open_store(tmp_path / "s.zarr")
    assert model_of(store).weights["key"] == "model_ema"


def test_the_hub_is_not_asked_for_images(made: Path, trap: Path) -> None:
    store = open_store(made)
    info = {**store.manifest.info, "data": {"data": "hfds/evil/set", "split": None}}
    store.manifest = dataclasses.replace(store.manifest, info=info)
    with pytest.raises(VitseeError, match="may not open by itself"):
        source_of(store)


def test_what_a_store_may_ask_for_loads_nothing() -> None:
    assert not KNOWN & LOADING.keys()
    assert "kwargs" not in KNOWN and len(KNOWN) > 100
