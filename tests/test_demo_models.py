"""The demo's models: found by their folders, loaded without the skips that their config.json leaves
out, and trained by tools/train_demo_models.py, to the same weights each time."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from demo_recipes import RECIPES, MaskedAutoencoder, Recipe, build, patch_targets, rate_at
from safetensors.torch import load_file, save_file
from train_demo_models import (
    Split,
    Training,
    add_probe,
    augment,
    part_of,
    rounded,
    save,
    to_input,
)

from tests.extractions import extract, extracted, plant_images
from tests.models_helpers import images, redraw
from vitsee_cli.main import main
from vitsee_core import demo
from vitsee_core.images.errors import DataError
from vitsee_core.images.sources import open_source
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import load_model
from vitsee_core.models.provenance import model_of
from vitsee_core.models.site_tables import site_table
from vitsee_stores import VitseeError, open_store

# Float32 sums of a hundred terms in another order.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the demo's."""
    room = tmp_path / "demo"
    room.mkdir()
    monkeypatch.setattr(demo, "_HERE", room)
    return room


def plant(folder: Path, **more: Any) -> Path:
    """An untrained test_vit, every weight of weight redrawn."""
    folder.mkdir()
    source = load_model(
        "test_vit", random_init=4, img_size=32, model_args={"patch_size": 8}
    )
    redraw(source.module, 4)
    save_file(source.module.state_dict(), folder / "model.safetensors")
    config = {
        "architecture": "test_vit",
        "model_args": {"img_size": 32, "patch_size": 8},
        "pretrained_cfg": {"input_size": [3, 32, 32], "fixed_input_size": True},
    }
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


@torch.no_grad()
def by_hand(
    model: Any, x: torch.Tensor, *, cut: dict[int, tuple[bool, bool]]
) -> torch.Tensor:
    """test_vit's logits, for block i without the skip of (attention, MLP) where cut[i] says so."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(x)))
    for i, block in enumerate(model.blocks):
        no_attn, no_mlp = cut.get(i, (False, False))
        f = block.ls1(block.attn(block.norm1(x)))
        x = f if no_attn else x + f
        f = block.ls2(block.mlp(block.norm2(x)))
        x = f if no_mlp else x + f
    logits: torch.Tensor = model.forward_head(model.norm(x))
    return logits


# folders and their ablations ------------------------------------------------------------------


def test_a_model_is_a_folder(room: Path) -> None:
    plant(room / "vit-gap")
    plant(room / "one")
    (room / "davis.py").touch()
    (room / "empty").mkdir()
    assert demo.models() == ["one", "vit-gap"]
    assert demo.model_folder("demo:vit-gap") == room / "vit-gap"
    assert load_model("demo:vit-gap").weights["source"] == "local-dir"
    with pytest.raises(VitseeError) as error:
        load_model("demo:empty")
    assert (
        str(error.value)
        == "no demo model 'empty'; the demo's models: demo:one, demo:vit-gap"
    )
    with pytest.raises(DataError, match="demo:vit-gap is a model; the demo's data"):
        open_source("demo:vit-gap")


def test_each_model_that_ships_says_how_it_was_trained() -> None:
    assert {"resnet", "vit"} <= set(demo.models())
    for name in demo.models():
        folder = demo.model_folder(name)
        record = json.loads((folder / "training.json").read_text())
        assert 0.5 < record["test_accuracy"] < 1 and record["test_images"] == 10_000
        config = json.loads((folder / "config.json").read_text())
        assert config.get("ablate_skip", []) == list(record["recipe"].get("no_skip", []))
        assert load_model(f"demo:{name}").class_names == config["label_names"]


@pytest.mark.slow
def test_trained_without_a_skip_runs_without_it(room: Path) -> None:
    plant(room / "cut", ablate_skip=["blocks.1", "blocks.3.mlp"])
    plain = load_model(f"local-dir:{plant(room / 'plain')}")
    cut = load_model("demo:cut")
    assert cut.ablate_skip == ("blocks.1.attn", "blocks.1.mlp", "blocks.3.mlp")
    assert cut.notes() == [
        "demo:cut has no skip connections in blocks.1, blocks.3.mlp (its config.json)"
    ]
    x, gone = images(cut), {1: (True, True), 3: (False, True)}
    with torch.no_grad():
        torch.testing.assert_close(
            cut.module(x), by_hand(plain.module, x, cut=gone), **CLOSE
        )
        assert not torch.allclose(cut.module(x), plain.module(x), atol=0.1)
    assert plain.ablate_skip == () and plain.notes() == []


@pytest.mark.slow
def test_skips_of_the_command_come_on_top(room: Path) -> None:
    plant(room / "cut", ablate_skip=["blocks.1"])
    both = load_model("demo:cut", ablate_skip=["blocks.0.attn", "blocks.1.mlp"])
    assert both.ablate_skip == ("blocks.0.attn", "blocks.1.attn", "blocks.1.mlp")
    x, gone = images(both), {0: (True, False), 1: (True, True)}
    with torch.no_grad():
        torch.testing.assert_close(
            both.module(x), by_hand(both.module, x, cut=gone), **CLOSE
        )
    # Fresh weights are of the same architecture: it has no such skips.
    assert load_model("demo:cut", random_init=0).ablate_skip == (
        "blocks.1.attn",
        "blocks.1.mlp",
    )


@pytest.mark.parametrize(
    ("value", "phrase"),
    [
        (
            "blocks.1",
            "ablate_skip in its config.json is 'blocks.1'; expected a list of blocks",
        ),
        ([3], "ablate_skip in its config.json is '[3]'; expected a list of blocks"),
        (
            ["blocks.9"],
            "ablate_skip of its config.json: blocks.9: demo:cut has no residual block",
        ),
    ],
)
def test_a_configuration_that_is_wrong(room: Path, value: Any, phrase: str) -> None:
    plant(room / "cut", ablate_skip=value)
    with pytest.raises(ModelError) as error:
        load_model("demo:cut")
    assert phrase in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ModelError, match=r"ablate_skip.* (its|in its) config"):
        load_model("demo:cut", ablate_skip=["blocks.0"])


@pytest.mark.slow
def test_extract_says_it_and_the_store_brings_it_back(room: Path, tmp_path: Path) -> None:
    plant(room / "cut", ablate_skip=["blocks.1"])
    data, path = plant_images(tmp_path / "images", 4), tmp_path / "s.zarr"
    command = ["demo:cut", "--data", data, "-o", path, "--sites", "head", "--inputs"]
    said = extracted(*command, "--dtype", "float32").stderr
    assert "demo:cut has no skip connections in blocks.1 (its config.json)" in said
    assert (
        "no skip in blocks.1.attn, blocks.1.mlp"
        in CliRunner().invoke(main, ["info", str(path)]).stdout
    )
    store = open_store(path)
    x = torch.from_numpy(np.asarray(store.inputs()))
    wanted = by_hand(model_of(store).module, x, cut={1: (True, True)})
    np.testing.assert_allclose(
        np.asarray(store.vectors("logits")), wanted.numpy(), **CLOSE
    )
    config = json.loads((room / "cut" / "config.json").read_text()) | {"ablate_skip": []}
    (room / "cut" / "config.json").write_text(json.dumps(config))
    result = extract(*command, "--dtype", "float32", "--seed", "0")
    assert result.exit_code == 1 and "ablate_skip" in result.stderr


# recipes --------------------------------------------------------------------------------------


def test_one_recipe() -> None:
    """What differs between the transformers is what their names say."""
    control = asdict(RECIPES["vit"])
    differs = {
        name: {key for key, value in asdict(recipe).items() if value != control[key]}
        for name, recipe in RECIPES.items()
        if name.startswith("vit")
    }
    assert differs == {
        "vit-gap": {"model_args"},
        "vit-noskip": {"no_skip"},
        "vit-10pct": {"share"},
        "vit-masked": {"masked"},
        "vit-seed1": {"seed"},
        "vit": set(),
    }
    mixer = asdict(RECIPES["mixer"])
    changed = {key for key in control if mixer[key] != control[key]}
    assert changed == {"architecture", "model_args", "first_conv", "sincos"}


def test_learning_rate_by_hand() -> None:
    recipe = replace(RECIPES["vit"], rate=2.0)
    assert rate_at(recipe, 0, 2000) == 0
    assert rate_at(recipe, 250, 1000) == pytest.approx(0.5 * (1 + math.sqrt(0.5)))
    assert rate_at(recipe, 1000, 2000) == pytest.approx(1.0)
    assert rate_at(recipe, 2000, 2000) == pytest.approx(0.0)


def random_split(n: int, seed: int = 0) -> Split:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 32, 32)).astype(np.uint8), np.arange(n) % 10


def test_a_share_of_each_class() -> None:
    pictures, labels = random_split(100)
    assert part_of((pictures, labels), 1.0, 0)[0] is pictures
    some, own = part_of((pictures, labels), 0.3, 0)
    assert np.bincount(own).tolist() == [3] * 10
    places = [int(np.flatnonzero((pictures == image).all((1, 2)))[0]) for image in some]
    assert places == sorted(set(places)) and (labels[places] == own).all()
    assert not np.array_equal(some, part_of((pictures, labels), 0.3, 1)[0])


def test_augmentation_moves_and_mirrors() -> None:
    pictures, _ = random_split(40)
    found = augment(pictures, np.random.default_rng(0), shift=1, erase=0.0)
    mirrored = 0
    for before, after in zip(pictures, found, strict=True):
        padded = np.pad(before, 1)
        moved = [padded[y : y + 32, x : x + 32] for y in range(3) for x in range(3)]
        straight = any(np.array_equal(m, after) for m in moved)
        mirrored += not straight
        assert straight or any(np.array_equal(m[:, ::-1], after) for m in moved)
    assert 10 <= mirrored <= 30
    erased = augment(pictures, np.random.default_rng(0), shift=0, erase=1.0)
    same = [
        (erased[k] == pictures[k]).sum() + (erased[k] == pictures[k, :, ::-1]).sum()
        for k in range(40)
    ]
    assert all(800 < count < 1024 for count in same)  # but for a square of 144 pixels


# training -------------------------------------------------------------------------------------

TINY = ("vit-noskip", "vit-masked", "vit-gap", "mixer", "resnet")


def tiny(name: str) -> Recipe:
    return replace(RECIPES[name], epochs=2, batch=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_resumed_is_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    split, test = random_split(6), random_split(5, seed=1)
    whole, first, second = (Training(tiny(name), images=8) for _ in range(3))
    whole.epoch(split, test)
    whole.epoch(split, test)
    first.epoch(split, test)
    first.keep(tmp_path / "state" / "x.pt")
    second.go_on_from(tmp_path / "state" / "x.pt")
    second.epoch(split, test)
    assert [p["train_loss"] for p in second.curve] == [
        p["train_loss"] for p in whole.curve
    ]
    for key, tensor in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[key], tensor), key
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == ["x.pt"]
    other = Training(replace(tiny(name), rate=1.0), images=8)
    with pytest.raises(SystemExit, match="made by another recipe"):
        other.go_on_from(tmp_path / "state" / "x.pt")


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_what_is_saved_is_what_was_trained(name: str, room: Path) -> None:
    """The folder gives the training network's outputs, in float16's rounding and no other."""
    training = Training(tiny(name), images=8)
    training.epoch(random_split(8), random_split(5, seed=1))
    test = random_split(50, seed=2)
    if training.recipe.masked:
        add_probe(training.model, random_split(40), bf16=False)
    reached = save(training, room / name, test, threads=1)
    weights = load_file(room / name / "model.safetensors")
    floats = {t.dtype for t in weights.values() if t.is_floating_point()}
    assert floats == {torch.float16}
    model, again = load_model(f"demo:{name}"), rounded(training.model)[1].eval()
    assert model.ablate_skip == (
        ("blocks.3.attn", "blocks.3.mlp") if name == "vit-noskip" else ()
    )
    with torch.no_grad():
        logits = model.module(to_input(test[0]))
        torch.testing.assert_close(logits, again(to_input(test[0])), **CLOSE)
    if name == "mixer":
        assert {"blocks.0.token", "blocks.5.channel"} <= set(site_table(model).residuals)
    hits = int((logits.argmax(1).numpy() == test[1]).sum())
    record = json.loads((room / name / "training.json").read_text())
    assert reached == record["test_accuracy"] == hits / 50
    assert record["recipe"]["seed"] == 0 and len(record["curve"]) == record["epochs"] == 1
    assert [p.name for p in room.iterdir()] == [name]


def test_gap_has_no_class_token_and_a_norm_before_the_mean() -> None:
    model = build(RECIPES["vit-gap"]).eval()
    x = to_input(random_split(2)[0])
    with torch.no_grad():
        tokens = model.forward_features(x)
        assert tokens.shape == (2, 64, 96)
        np.testing.assert_allclose(
            tokens.mean(-1), 0, atol=1e-5
        )  # normalised, then averaged
        torch.testing.assert_close(model(x), model.head(tokens.mean(1)))


def test_patch_targets_by_hand() -> None:
    x = torch.zeros(1, 3, 32, 32)
    x[:, :, 0:4, 4:8] = torch.arange(16.0).reshape(4, 4)  # the patch right of the first
    found = patch_targets(x)
    assert found.shape == (1, 64, 16)
    spread = math.sqrt(np.arange(16).var(ddof=1))
    np.testing.assert_allclose(found[0, 1], (np.arange(16) - 7.5) / spread, rtol=1e-5)
    assert not found[0, [0, *range(2, 64)]].any()


def test_the_masked_loss_is_of_the_hidden_patches_alone() -> None:
    torch.manual_seed(0)
    network = MaskedAutoencoder(build(RECIPES["vit-masked"])).eval()
    x = to_input(random_split(3)[0])
    order = torch.from_numpy(np.random.default_rng(0).random((3, 64)).argsort(1))
    given: list[torch.Tensor] = []
    handle = network.predict.register_forward_hook(lambda _m, _a, out: given.append(out))
    with torch.no_grad():
        loss = float(network(x, order))
        total = 0.0
        for n in range(3):
            for k, cell in enumerate(order[n, 16:].tolist()):
                top, left = 4 * (cell // 8), 4 * (cell % 8)
                patch = x[n, 0, top : top + 4, left : left + 4].flatten().double().numpy()
                target = (patch - patch.mean()) / np.sqrt(patch.var(ddof=1) + 1e-6)
                total += float(((given[0][n, k].double().numpy() - target) ** 2).mean())
        assert loss == pytest.approx(total / (3 * 48), rel=1e-4)
        # What is predicted does not depend on the pixels that are hidden, and does on the others.
        for part, changes in ((order[0, 16:], False), (order[0, :16], True)):
            other = x.clone()
            for cell in part.tolist():
                top, left = 4 * (cell // 8), 4 * (cell % 8)
                other[0, :, top : top + 4, left : left + 4] += 1.0
            network(other, order)
            assert torch.equal(given[-1][0], given[0][0]) != changes
    handle.remove()


@pytest.mark.slow
def test_the_probe_is_where_its_gradient_vanishes() -> None:
    model = build(RECIPES["vit-masked"])
    redraw(model, 1)
    pictures, labels = random_split(60)
    features: list[torch.Tensor] = []
    handle = model.head.register_forward_pre_hook(
        lambda _m, given: features.append(given[0])
    )
    add_probe(model, (pictures, labels), bf16=False)
    with torch.no_grad():
        logits = model(to_input(pictures)).double().numpy()
    handle.remove()
    x = features[-1].double().numpy()
    std, mean = x.std(0, ddof=1), x.mean(0)
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    missed = (p - np.eye(10)[labels]) / len(labels)
    weight = model.head.weight.detach().double().numpy() * std
    gradient = missed.T @ ((x - mean) / std) + 2e-4 * weight
    assert np.abs(gradient).max() < 1e-4 < np.abs(2e-4 * weight).max()
    assert np.abs(missed.sum(0)).max() < 1e-4
