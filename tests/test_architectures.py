"""Ten families of models extracted with default options, as docs/architectures.md lists all."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Name, image size, arguments that make it small; grids as the page shows them, attention blocks
# or a phrase of why there are none, residual sublayers or the same.
NO = "no block"
TINY = {"embed_dim": 48, "depth": 2, "num_heads": 3}
PIT = {"base_dims": (8, 8, 8), "depth": (1, 1, 1), "heads": (2, 2, 2)}
SWIN = {"embed_dim": 24, "depths": (1, 1, 1, 1)}
HALVED = "13x13 every 8; 7x7 every 16; 4x4 every 32"
FAMILIES: list[tuple[str, int | None, dict[str, Any], str, Any, Any]] = [
    ("vit_tiny_patch16_224", 101, TINY, "6x6 every 16 + cls", 2, 4),
    ("test_resnet", 101, {}, f"26x26 every 4; {HALVED}", NO, 4),
    ("test_convnext", 101, {}, "25x25 every 4; 12x12 every 8", NO, 9),
    ("test_efficientnet", 101, {}, "51x51 every 2; 26x26 every 4", NO, NO),
    ("test_nfnet", 101, {}, "26x26 every 4; 13x13 every 8", NO, NO),
    ("test_mambaout", 101, {}, "26x26 every 4; 13x13 every 8", NO, 6),
    ("test_maxvit", None, {}, "80x80 every 2; 40x40 every 4", "2 attention calls", NO),
    (
        *("pit_ti_distilled_224", 101, PIT),
        "11x11 every 8 from 4 + cls,dist; 6x6 every 16 + cls,dist; 3x3 every 32 + cls,dist",
        *(3, 6),
    ),
    ("swin_tiny_patch4_window7_224", 101, SWIN, f"25x25 every 4; {HALVED}", 2, 8),
    (
        *("crossvit_tiny_240", None, {"depth": ((1, 1, 0),)}),
        *("20x20 every 12 + cls; 14x14 every 17.1429 + cls", 2, 4),
    ),
    ("levit_128s", None, {}, "14x14 every 16; 7x7 every 32; 4x4 every 64", 9, 18),
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("try_every_architecture")


@pytest.fixture(scope="module")
def data(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = script.plant(tmp_path_factory.mktemp("pictures"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0])
def test_family(script: ModuleType, data: Path, family: tuple[Any, ...]) -> None:
    """No traceback, a store that validates, logits and pooled as timm gives them."""
    name, size, args, grids, attention, residual = family
    row = script.attempt(name, size, args, data)
    assert (row["outcome"], row["reason"]) == ("ok", "")
    assert "; ".join(row["grids"]).startswith(grids)
    for wanted, found in ((attention, row["attention"]), (residual, row["residual"])):
        assert str(wanted) in found


@pytest.mark.slow
def test_what_fails_is_named(
    script: ModuleType, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = script.attempt("test_vit", 3, {}, data)
    assert refused["outcome"] == "refused" and "--img-size" in refused["reason"]
    failed = script.attempt("test_vit", None, {"depth": "none"}, data)
    assert failed["outcome"] == "FAILURE"
    monkeypatch.setattr(script, "TOLERANCE", -1.0)
    differs = script.attempt("test_resnet", None, {}, data)
    assert differs["outcome"] == "FAILURE" and "logits differs" in differs["reason"]
    page = script.table(
        [{"module": "m", "architecture": "a", "n_params": 1, "size": 3, **refused}]
    )
    assert "1 runs,\n0 failures" in page and "| m | a | 0.0 | 3 | refused |" in page
