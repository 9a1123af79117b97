"""vitsee models: what timm has, told from shapes, against the models themselves."""

from __future__ import annotations

import csv
import io
import json
import pkgutil
from pathlib import Path

import pytest
import timm
import torch
from click.testing import CliRunner, Result

from vitsee_cli.main import main
from vitsee_core import analyses
from vitsee_core.models.load import load_model
from vitsee_core.models.site_tables import sketch
from vitsee_core.models.sources.timm import matching
from vitsee_core.models.without_weights import sketched_module
from vitsee_core.study import catalogue

VIT = "vit_tiny_patch16_224"
ATTENTION = {"attn-dist", "attn-map", "head-types", "saliency", "cka-heads"}


def models(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["models", *map(str, args)])


def rows(result: Result) -> list[dict[str, str]]:
    assert result.exit_code == 0, result.output
    return list(csv.DictReader(io.StringIO(result.stdout)))


@pytest.mark.slow
def test_a_vit() -> None:
    (row,) = rows(models(VIT))
    assert (row["model"], row["height"], row["width"], row["n_blocks"]) == (
        VIT,
        "224",
        "224",
        "12",
    )
    # Dosovitskiy's formula: embedding, class token and positions, 12 blocks, norm, classifier.
    d = 192
    block = 4 * d + (3 * d * d + 3 * d) + (d * d + d) + (8 * d * d + 5 * d)
    embed = 16 * 16 * 3 * d + d + d + 197 * d
    assert int(row["n_params"]) == embed + 12 * block + 2 * d + 1000 * d + 1000
    assert (row["heads"], row["grid"]) == ("3", "14x14")
    # Twice the multiply-adds: patches, and of each block linear layers and both attention products.
    linear, products = 12 * d * d * 197, 2 * 197 * 197 * d
    assert int(row["flops"]) == 2 * (196 * 768 * d + 12 * (linear + products) + d * 1000)
    assert set(row["analyses"].split()) == set(catalogue.needs_of_analyses())
    assert row["left_out"] == ""
    assert "augreg_in21k_ft_in1k" in row["tags"].split()


def test_a_resnet_says_what_it_lacks() -> None:
    (row,) = rows(models("test_resnet"))
    served = set(row["analyses"].split())
    assert row["heads"] == "" and int(row["flops"]) > 0 and "x" in row["grid"]
    assert {
        "cka",
        "probe",
        "knn",
        "cluster",
        "normratio",
        "localize",
        "erf",
        "weights",
    } <= served
    assert not served & ATTENTION
    assert "attn-dist attn-map" in row["left_out"]
    assert "no block has a softmax over tokens" in row["left_out"]


def test_patterns() -> None:
    found = matching("resnet18*")
    assert {"resnet18", "resnet18d"} <= set(found) and "seresnet18" not in found
    assert found["resnet18"] == [
        name.partition(".")[2] for name in timm.list_pretrained("resnet18.*")
    ]
    clip = matching("vit_base_patch16_*.*openai*")
    assert clip and all("openai" in tag for tags in clip.values() for tag in tags)
    assert list(matching("*")) == timm.list_models()


def test_a_glob_is_bounded(tmp_path: Path) -> None:
    result = models("*")
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert (
        f"matches {len(timm.list_models())} architectures" in line and "--names" in line
    )
    result = models("vit_*", "--names", "-o", tmp_path / "vit.csv")
    assert (result.exit_code, result.stdout) == (0, "")
    lines = (tmp_path / "vit.csv").read_text().splitlines()
    assert lines[0] == ",".join(catalogue.COLUMNS)
    assert len(lines) == 1 + len(timm.list_models("vit_*"))
    assert f"{VIT}," in (tmp_path / "vit.csv").read_text()
    assert len(rows(models("test_resnet*", "--limit", "5"))) >= 1


def test_nothing_matches() -> None:
    result = models("vit_tinny_patch16_224")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "near names: vit_tiny_patch16_224" in result.stderr
    assert "no such folder" in models("local-dir:/nowhere").stderr
    assert "no demo model" in models("demo:cat").stderr


def test_a_demo_model() -> None:
    (row,) = rows(models("demo:vit"))
    assert row["model"] == "demo:vit" and "attn-map" in row["analyses"]
    assert int(row["n_params"]) == sum(
        p.numel() for p in load_model("demo:vit").module.parameters()
    )


def test_a_model_that_needs_values_is_named_and_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        torch.empty(1, device="meta").cpu()

    monkeypatch.setattr("vitsee_core.models.survey.trace", refuse)
    (row,) = rows(models("test_vit"))
    assert (
        row["analyses"] == ""
        and row["left_out"]
        == "unknown without weights: Cannot copy out of meta tensor; no data!"
    )
    assert int(row["n_params"]) > 0


def test_every_analysis_says_what_it_needs() -> None:
    """Another need, or none at all, is found here and not by a user."""
    known = catalogue.offers(sketch(*sketched_module("test_resnet", {})))
    for needs in catalogue.needs_of_analyses().values():
        assert set(needs) <= known.keys()
    listed = {
        module.name.replace("_", "-")
        for module in pkgutil.iter_modules(analyses.__path__)
    }
    silent = listed - catalogue.needs_of_analyses().keys() - {"best-layer"}
    assert not silent, f'give these analyses needs=("attention",): {silent}'


@pytest.mark.slow
def test_what_shapes_cannot_tell_is_proven_on_request() -> None:
    """XCiT attends over channels: its heads are no tokens', its branches not where ViT's are."""
    name = "xcit_nano_12_p16_224"
    (told,), (proven,) = rows(models(name)), rows(models(name, "--prove"))
    assert "normratio" in told["analyses"].split()
    assert "normratio" not in proven["analyses"].split()
    assert "normratio: no block whose branches are known" in proven["left_out"]
    assert told["n_params"] == proven["n_params"]


def test_the_command_as_json() -> None:
    done = CliRunner().invoke(main, ["models", "deit3_base*", "--names", "--json"])
    assert done.exit_code == 0, done.stderr
    first = json.loads(done.stdout)[0]
    assert (first["model"], first["height"]) == ("deit3_base_patch16_224", 224)
    done = CliRunner().invoke(main, ["models", "deit3_base*", "--json", "-o", "x.csv"])
    assert done.exit_code == 2 and "give -o a .json file instead" in done.stderr
