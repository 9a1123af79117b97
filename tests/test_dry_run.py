"""`extract --dry-run` without weights: the arrays of an extraction, and what is left to that."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.extractions import VIT, extract, extracted, plant_images
from vitsee_core.extraction import ahead as module
from vitsee_core.extraction.ahead import UNCHECKED, dry_run
from vitsee_core.extraction.options import (
    DataOptions,
    KeepOptions,
    ModelOptions,
    Request,
    RunOptions,
)
from vitsee_core.extraction.run import prepare
from vitsee_core.extraction.small_weights import small_weights
from vitsee_core.models.load import load_model
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.without_weights import stand_in
from vitsee_stores.layout import arrays

# Class token, attention pooling, maps, registers, positions of several kinds, windows.
MODELS: dict[str, dict[str, Any]] = {
    "test_vit": {},
    "test_vit3": {},
    "test_resnet": {},
    "vit_small_r26_s32_224": {"depth": 1},  # tokens of maps
    "test_convnext": {},
    "test_efficientnet": {},
    "test_mambaout": {},
    "vit_tiny_patch16_224": {"depth": 2, "reg_tokens": 2, "no_embed_class": True},
    "deit3_small_patch16_224": {"depth": 2},
    "eva02_tiny_patch14_224": {"depth": 2},
    "swin_tiny_patch4_window7_224": {"depths": (1, 1, 2, 1)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("images"), 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_arrays_are_those_of_an_extraction(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelOptions(name, random_init=0, model_args=MODELS[name])
    data, keep = DataOptions(str(folder)), KeepOptions(sites=("all",))
    run = RunOptions(tmp_path / "s.zarr", device="cpu")
    asked = Request(model, data, keep, run)
    wanted = prepare(asked)
    monkeypatch.setattr(module, "prepare", lambda *_: pytest.fail("weights were made"))
    found = dry_run(asked)
    planned = arrays(found.plan)
    extracted = arrays(wanted.plan)
    assert planned.keys() == extracted.keys()
    for path, spec in extracted.items():
        # Values that float16 cannot hold, as those of fresh class tokens of 1e-6, show only when
        # the model runs: such a site is float32.
        dtypes = {(spec.dtype, planned[path].dtype)}
        assert dtypes <= {(spec.dtype, spec.dtype), ("float32", "float16")}, path
        assert dataclasses.replace(planned[path], dtype=spec.dtype) == spec
    assert found.left_out == wanted.manifest.left_out
    assert found.notes[-1] == UNCHECKED and not (tmp_path / "s.zarr").exists()


@pytest.mark.slow
def test_where_shapes_do_not_suffice_weights_are_made(
    folder: Path, tmp_path: Path
) -> None:
    model = ModelOptions(
        "crossvit_tiny_240", random_init=0, model_args={"depth": ((1, 1, 0),)}
    )
    data, run = DataOptions(str(folder)), RunOptions(tmp_path / "s.zarr")
    found = dry_run(Request(model, data, KeepOptions(), run))
    assert UNCHECKED not in found.notes and not (tmp_path / "s.zarr").exists()


@pytest.mark.slow
@pytest.mark.parametrize("head", [None, True, False])
def test_stand_ins_keep_the_weights_that_a_model_keeps(head: bool | None) -> None:
    table = site_table(real := load_model("test_vit", random_init=0))
    false = stand_in("test_vit", {}, table)
    wanted, found = small_weights(real, table, head), small_weights(false, table, head)
    assert found.shapes == wanted.shapes
    assert (
        found.record["input_weights"]["sites"] == wanted.record["input_weights"]["sites"]
    )
    for key in ("site", "pool", "norm", "norm_first"):
        assert found.record["head_weights"].get(key) == wanted.record["head_weights"].get(
            key
        )


def test_stand_ins_take_the_memory_of_the_largest_layer() -> None:
    options: dict[str, Any] = {"model_args": {"depth": 3}}
    real = load_model("vit_tiny_patch16_224", random_init=0, **options)
    made = stand_in("vit_tiny_patch16_224", options, site_table(real)).module
    layers = [m for m in made.modules() if isinstance(m, torch.nn.Linear)]
    assert len({layer.weight.untyped_storage().data_ptr() for layer in layers}) == 1
    # 192 channels: 768 x 192 numbers of an MLP are fewer than the classifier's 1000 x 192.
    assert layers[0].weight.untyped_storage().nbytes() == 4 * 1000 * 192
    before = {name: tuple(p.shape) for name, p in real.module.named_parameters()}
    assert {name: tuple(p.shape) for name, p in made.named_parameters()} == before
    x = torch.randn(1, 197, 192)
    assert all(block(x) is x for block in made.blocks)  # type: ignore[union-attr]


def test_buffers_are_those_of_the_architecture() -> None:
    table = site_table(real := load_model("test_resnet", random_init=0))
    made = dict(stand_in("test_resnet", {}, table).module.named_buffers())
    for name, values in real.module.named_buffers():
        np.testing.assert_array_equal(values, made[name], err_msg=name)


@pytest.mark.slow
def test_weights_that_cannot_be_read_are_left_to_the_extraction(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "no.pt").write_bytes(b"no weights")
    command = [VIT[0], "--checkpoint", tmp_path / "no.pt", *VIT[3:], "--data", folder]
    command += ["-o", tmp_path / "s.zarr"]
    assert (
        "no weights were read, so whether they are"
        in extracted(*command, "--dry-run").stderr
    )
    refused = extract(*command)
    assert refused.exit_code == 1 and "no.pt" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "phrase"),
    [
        (["--sites", "nothing"], 1, "no site matches 'nothing'"),
        (
            ["--attention", "rows", "--model-arg", "num_classes=0", "--head-weights"],
            1,
            "no classif",
        ),
        (["--img-size", "3"], 1, "is less than one patch"),
        (["--random-init", "0", "--checkpoint-key", "x"], 2, "give --checkpoint too"),
        (["--multiple", "16"], 2, "give --short-side N too"),
    ],
)
def test_refusals_that_need_no_weights(
    options: list[str], code: int, phrase: str, folder: Path, tmp_path: Path
) -> None:
    vit = ["test_vit", "--data", folder, "-o", tmp_path / "s.zarr", "--dry-run"]
    if "--multiple" in options or "--head-weights" in options:
        vit += ["--random-init", "0"]  # these look at the model itself
    result = extract(*vit, *options)
    assert result.exit_code == code and result.stdout == ""
    assert phrase in result.stderr


@pytest.mark.slow
def test_a_store_that_is_joined_is_compared_with_the_weights(
    folder: Path, tmp_path: Path
) -> None:
    command = [*VIT[3:], "--data", folder, "-o", tmp_path / "s.zarr", "--sites", "embed"]
    extracted("test_vit", "--random-init", 0, *command)
    other = extract("test_vit", "--random-init", 1, *command, "--dry-run")
    assert other.exit_code == 1 and "weights" in other.stderr
