"""vitsee sites: the table of what a model offers, for people and for scripts."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from click.testing import Result

from tests.command_line import invoke, one_line

VIT = (
    *("vit_tiny_patch16_224", "--random-init", "0", "--img-size", "32x48"),
    *("--model-arg", "depth=2", "--model-arg", "embed_dim=48"),
)


SHAPES: tuple[str, ...] = ()
PROVE = ("--prove", "--random-init", "0")


def sites(*args: str) -> Result:
    return invoke("sites", *args)


def rows(*args: str) -> list[dict[str, Any]]:
    result = sites(*args, "--csv")
    assert result.exit_code == 0, result.output
    return list(csv.DictReader(io.StringIO(result.stdout)))


def test_for_people() -> None:
    result = sites(*VIT)
    assert result.exit_code == 0, result.output
    listed = [line.split()[0] for line in result.stdout.splitlines() if line]
    assert listed[0] == "site"
    for name in ("embed", "blocks.0.attn.branch", "blocks.1.out", "pooled", "logits"):
        assert name in listed
    assert "blocks.0.attn.qkv" not in listed, (
        "single modules are not listed unless asked for"
    )
    assert "outputs of single modules (--sites modules)" in result.stdout
    assert "attention: 2 blocks (blocks.0 to blocks.1)" in result.stdout
    assert "residual: 4 sublayers (blocks.0.attn to blocks.1.mlp)" in result.stdout


def test_numbers() -> None:
    """7 tokens (CLS and 2 x 3 patches) of 48 channels in float16: 672 bytes."""
    by_name = {row["site"]: row for row in rows(*VIT)}
    out = by_name["blocks.1.out"]
    assert (out["shape"], out["grid"], out["prefix"]) == ("7x48", "2x3", "cls")
    assert (out["depth"], out["rel_depth"], out["size_bytes"]) == ("2", "1.0", "672")
    alias = by_name["blocks.1.in"]
    assert (alias["alias_of"], alias["size_bytes"]) == ("blocks.0.out", "0")
    assert by_name["pooled"]["size_bytes"] == str(48 * 4)


def test_selection_keeps_the_models_order() -> None:
    chosen = rows(*VIT, "--sites", "head", "--sites", "blocks")
    assert [row["site"] for row in chosen][:3] == [
        "embed",
        "blocks.0.out",
        "blocks.1.out",
    ]
    assert [row["site"] for row in rows(*VIT, "--sites", "blocks.-1.out")] == [
        "blocks.1.out"
    ]


def test_json_tells_why_something_is_missing() -> None:
    result = sites("test_resnet", "--random-init", "0", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert isinstance(record["attention"], str)
    assert record["residual"][0].startswith("layer1.0")
    assert any(row["site"] == "layer1.0.out" for row in record["sites"])


@pytest.mark.parametrize(
    ("args", "phrase"),
    [
        (("vit_tiny_patch17_224", "--random-init", "0"), "vit_tiny_patch1"),
        ((*VIT, "--sites", "blokcs.*"), "no site matches 'blokcs.*'"),
        (("vit_tiny_patch16_224", "--checkpoint", "missing.pth"), "missing.pth"),
    ],
)
def test_mistakes_are_one_line(args: tuple[str, ...], phrase: str) -> None:
    assert phrase in one_line("sites", *args)


def refuse_weights(*_: object, **__: object) -> None:
    raise AssertionError("weights were made")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["vit_large_patch16_224", "mobilenetv5_300m", "demo:resnet"]
)
def test_weights_are_not_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitsee_core.models.without_weights.load_model", refuse_weights)
    result = sites(name, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["proven"] is False
    assert "read from shapes; extract, or --prove, verifies" in result.stderr


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("test_maxvit", "efficientvim_m1")
]


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext", *SLOW])
def test_shapes_list_what_pixels_prove(name: str) -> None:
    told, proven = (
        json.loads(sites(name, *how, "--json").stdout) for how in (SHAPES, PROVE)
    )
    assert (told.pop("proven"), proven.pop("proven")) == (False, True)
    assert told == proven


def test_what_pixels_disprove_is_told_by_prove() -> None:
    """CoAtNet's strided attention block adds a pooled shortcut, which shapes do not show."""
    told, proven = (
        json.loads(sites("test_coatnet", *how, "--json").stdout)["residual"]
        for how in (SHAPES, PROVE)
    )
    strided = {"stages.2.blocks.0.attn", "stages.3.blocks.0.mlp"}
    assert strided <= set(told) and not strided & set(proven)
    assert set(proven) < set(told)


@pytest.mark.slow
def test_shapes_that_do_not_suffice_are_proven() -> None:
    """XCiT's tokens may lie in either dimension; its own weights are not asked for."""
    record = json.loads(sites("xcit_nano_12_p16_224", "--json").stdout)
    assert record["proven"] is True
    assert record["residual"] == "no block whose branches are known"


@pytest.mark.parametrize(
    ("args", "phrase"),
    [
        (("--img-size", "3"), "less than one patch"),
        (("--model-arg", "depht=3"), "depht"),
        (("--fill", "black"), "--crop-mode border"),
        (("--model-arg", "checkpoint_path=x.pth"), "checkpoint_path"),
    ],
)
def test_options_are_checked_without_weights(args: tuple[str, ...], phrase: str) -> None:
    result = sites("test_vit", *args)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert phrase in line


def test_one_format_at_a_time() -> None:
    assert sites(*VIT, "--csv", "--json").exit_code == 2
