"""Builders that give several networks: one is chosen by index or name, and it is said which."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.extractions import extract, extracted
from tests.models_helpers import refusal
from vitsee_core.extraction.options import split_model
from vitsee_core.models.load import load_model
from vitsee_stores import open_store

TEXT = """
import dataclasses
from collections import namedtuple
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.cut = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in "ab")

    def forward(self, x):
        x = self.cut(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x

class Predictor(Net):
    pass

HALF = (0.5, 0.5, 0.5)
TRANSFORM = {"input_size": (3, 32, 32), "mean": HALF, "std": HALF}
Pair = namedtuple("Pair", "encoder predictor")

@dataclasses.dataclass
class Both:
    encoder: nn.Module
    predictor: nn.Module
    depth: int = 2

def two():
    torch.manual_seed(0)
    return Net(12), Predictor(8)

def pair(pretrained=True):
    return two()

def with_transform():
    return (*two(), TRANSFORM)

def nested():
    return two(), TRANSFORM

def named():
    return dict(zip(("encoder", "predictor"), two()), config={"width": 12})

def namedtuple_():
    return Pair(*two())

def dataclass_():
    return Both(*two())

def modules():
    return nn.ModuleDict(dict(zip(("encoder", "predictor"), two())))

def listed():
    return nn.ModuleList(two())

def whole():
    from torchvision.transforms import v2

    steps = [v2.Resize(32), v2.CenterCrop(32), v2.ToTensor(), v2.Normalize(HALF, HALF)]
    return two()[0], v2.Compose(steps)

def holder():
    outer = Net(4)
    outer.encoder, outer.predictor = two()
    return outer

def lone():
    return {"model": two()[0], "config": {"width": 12}}

def nothing():
    return ()

def four():
    return two()[0], None, None, None
"""
HUB = "dependencies = []\n" + TEXT


@pytest.fixture
def built(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(TEXT)
    (tmp_path / "hubconf.py").write_text(HUB)
    return tmp_path / "own.py"


BY_INDEX = ["pair", "with_transform", "nested", "listed"]
BY_NAME = ["named", "namedtuple_", "dataclass_", "modules", "holder"]


@pytest.mark.parametrize("entry", [*BY_INDEX, *BY_NAME])
def test_one_of_several_networks(built: Path, entry: str) -> None:
    keys = ("0", "1") if entry in BY_INDEX else ("encoder", "predictor")
    for key, kind, width in zip(keys, ("Net", "Predictor"), (12, 8), strict=True):
        model = load_model(f"{built}:{entry}#{key}", img_size=32)
        assert type(model.module).__name__ == kind
        assert model.module.state_dict()["cut.weight"].shape[0] == width
        assert model.architecture == f"own.py:{entry}#{key} ({kind})"
        other = f"{keys[1 - keys.index(key)]} ({'Predictor' if kind == 'Net' else 'Net'})"
        said = f"is {key} of what its function gives; beside it: {other}"
        assert any(said in note for note in model.notes()) == (entry != "holder")
    torch.manual_seed(0)
    expected = torch.nn.Conv2d(3, 12, 8, 8).weight
    if entry != "holder":
        first = load_model(f"{built}:{entry}#{keys[0]}").module.state_dict()
        assert torch.equal(first["cut.weight"], expected)
    if entry in ("with_transform", "nested"):
        assert load_model(f"{built}:{entry}#0").transform["mean"] == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("entry", ["pair", "named", "dataclass_", "listed"])
def test_several_without_a_choice_are_refused_by_name(built: Path, entry: str) -> None:
    first, second = ("0", "1") if entry in BY_INDEX else ("encoder", "predictor")
    line = refusal(f"{built}:{entry}")
    assert line == (
        f"{built}:{entry} gives 2 networks: {first} (Net), {second} (Predictor); name one of them, "
        f"as in {built}:{entry}#{first}"
    )
    assert "gives 2 networks, and none is '7': " in refusal(f"{built}:{entry}#7")


def test_a_single_network_needs_no_choice(built: Path) -> None:
    whole = load_model(f"{built}:whole")
    # This transform is a module, too: without parameters it is no second network.
    assert whole.transform["std"] == (0.5, 0.5, 0.5) and whole.notes() == []
    assert type(load_model(f"{built}:lone", img_size=32).module).__name__ == "Net"
    part = load_model(f"{built}:whole#blocks.0", img_size=32).module
    assert type(part).__name__ == "Sequential"
    assert "Net has no module 'head'; it has: cut, blocks" in refusal(
        f"{built}:whole#head"
    )
    assert "gives tuple; expected a torch.nn.Module" in refusal(f"{built}:nothing")
    assert "gives 4 things; expected a module" in refusal(f"{built}:four")


def test_the_part_stands_behind_the_name_or_behind_the_options() -> None:
    hub = "torchhub:facebookresearch/vjepa2:vjepa2_vit_large"
    assert split_model(f"{hub}#0?num_frames=16") == (f"{hub}#0", {"num_frames": ["16"]})
    assert split_model(f"{hub}?num_frames=16#0") == (f"{hub}#0", {"num_frames": ["16"]})
    assert split_model(f"{hub}?#0") == (f"{hub}#0", {})
    assert split_model("vit_tiny?fill=#ffffff") == ("vit_tiny", {"fill": ["#ffffff"]})


def test_a_store_names_the_part_and_joins_it_again(built: Path, tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8)
    np.savez(tmp_path / "x.npz", images=pictures)
    words = ["--data", tmp_path / "x.npz", "-o", tmp_path / "s.zarr", "--img-size", "32"]
    hub = f"torchhub:{built.parent}:pair"
    output = extracted(f"{hub}?pretrained=True#0", *words).output
    said = "is 0 of what its function gives; beside it: 1 (Predictor)"
    assert said in " ".join(output.split())
    store = open_store(tmp_path / "s.zarr")
    assert store.manifest.model["name"] == f"{hub}#0"
    assert store.plan.sites[-1].dim == 12
    assert "complete" in extracted(f"{hub}#0?pretrained=True", *words).output
    refused = extract(f"{hub}#1?pretrained=True", *words)
    assert refused.exit_code == 1 and "#1" in refused.output
