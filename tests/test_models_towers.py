"""Towers of open_clip and torchvision, against the modules that these libraries make."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

pytest.importorskip("open_clip")
NO_ATTENTION = "no block has a softmax over tokens"
# Model, blocks and the path of the first, blocks with attention, sublayers.
FEW = [
    ("open_clip:ViT-M-16-alt", "3 (transformer.resblocks.0)", "3", "6"),
    ("open_clip:RN50", "5 (layer1.0)", NO_ATTENTION, "5"),
    ("torchvision:resnet18", "8 (layer1.0)", NO_ATTENTION, "8"),
    ("torchvision:mnasnet0_5", "16 (layers.8.0)", NO_ATTENTION, "10"),
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("try_towers")


@pytest.mark.parametrize("case", FEW, ids=lambda case: case[0])
def test_a_tower_against_its_library(script: ModuleType, case: tuple[str, ...]) -> None:
    """Outputs to the bit, explicit attention to 1e-6, sums proven."""
    name, blocks, attention, residual = case
    library, _, model = name.partition(":")
    row = script.attempt(script.Trial(name, script.tiny(model) if library == "open_clip" else {}))
    assert (row["outcome"], row["reason"]) == ("ok", "")
    assert (row["blocks"], row["attention"], row["residual"]) == (blocks, attention, residual)
    n_blocks = blocks.split()[0]
    assert row["outputs"] == f"{n_blocks} of {n_blocks}"
    assert attention == NO_ATTENTION or float(row["eager"]) <= 1e-6


@pytest.mark.slow
def test_every_tower(script: ModuleType) -> None:
    rows = [script.attempt(x) for x in (*script.of_open_clip(), *script.of_torchvision())]
    assert [row["name"] for row in rows if row["outcome"] == "FAILURE"] == []
    assert sum(row["outcome"] == "ok" for row in rows) >= 85


@pytest.mark.slow
def test_a_difference_is_a_failure(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "same_tokens", lambda *_: False)
    row = script.attempt(script.Trial("torchvision:shufflenet_v2_x0_5", {}))
    assert row["outcome"] == "FAILURE" and "stage2.0.out is not what its module" in row["reason"]
    refused = script.attempt(script.Trial("torchvision:resnet18", {"depth": 3}))
    assert refused["outcome"] == "refused" and "depth" in refused["reason"]
    page = script.page([row, refused])
    assert "2 models" in page and "0 ok, 1 failures" in page
