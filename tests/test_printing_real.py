"""Every figure of the study that `vitsee demo --real` is, at its own width and in a column: no text
is clipped, lies on other text or runs into its neighbour. The models are small stand-ins without
weights, whose sites have the names of EfficientNet-lite0, MobileNetV2 and ViT-S/14."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.every_command import vitsee
from tests.printed_text import flaws
from vitsee_core.pages.report.materials import find_materials

VIT = "model-arg=embed_dim=48&model-arg=num_heads=6&img-size=84"
MODELS = {
    "vit-saliency": f"vit_small_patch14_dinov2?random-init=0&{VIT}",
    "lite0": "tf_efficientnet_lite0?random-init=0&img-size=64",
    "mobilenetv2": "mobilenetv2_100?random-init=0&img-size=64",
}


N = 12


@pytest.mark.slow
def test_all_text_of_the_real_demo_can_be_read(tmp_path: Path) -> None:
    photographs, folder = tmp_path / "photographs", tmp_path / "out"
    photographs.mkdir()
    rng = np.random.default_rng(0)
    for i in range(N):
        pixels = rng.integers(0, 256, (64, 64, 3), np.uint8)
        Image.fromarray(pixels).save(photographs / f"{i}.png")
    models = [f"{name}={model}" for name, model in MODELS.items()]
    words = [
        "study",
        *models,
        "--data",
        photographs,
        "--images",
        N,
        "-o",
        folder,
        "--dry-run",
    ]
    for name in ("stores", "results"):
        (folder / name).mkdir(parents=True)
    for line in vitsee(*words).splitlines():
        if not line.startswith("vitsee "):
            continue
        command, *rest = shlex.split(line.removeprefix("vitsee "))
        if command not in ("explore", "report"):
            vitsee(command, *without_figure(rest))
    results = find_materials(folder).results
    commands = {result.command for result in results}
    assert {"cka", "cka-heads", "similarity", "norms", "erf", "weights", "pca"} < commands
    assert len(results) == 27, "as in the demo"
    found = {
        (result.file.path.name, medium): flaws(result.figure(medium=medium))
        for result in results
        for medium in ("page", "column")
    }
    assert {place: some for place, some in found.items() if some} == {}


def without_figure(words: list[str]) -> list[str]:
    """The words of a command that writes a table alone."""
    at = words.index("--png") if "--png" in words else len(words)
    return words[:at] + words[at + 2 :]
