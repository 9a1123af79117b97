"""tools/over_training.py: which weights of a training are kept, and that it is the demo's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from demo_recipes import build
from over_training import Kept, bundled_split, steps_kept
from train_demo_models import Training

from tests.test_demo_models import random_split, tiny


def test_steps_are_even_on_a_logarithmic_axis_and_end_with_the_last() -> None:
    assert steps_kept(120) == [0, 10, 20, 30, 50, 70, 100, 120]
    assert steps_kept(1116)[-6:] == [200, 300, 500, 700, 1000, 1116]
    assert steps_kept(10) == [0, 10] and steps_kept(4) == [0, 4]
    ratios = np.diff(np.log(steps_kept(10_000)[1:]))
    assert ratios.max() < np.log(2) + 1e-9


@pytest.mark.slow
def test_kept_weights_are_those_of_the_demos_training(tmp_path: Path) -> None:
    """Kept before the first update and after the last, and the training is the same to the bit."""
    data = random_split(8)
    plain, kept = Training(tiny("vit"), images=8), Kept(tiny("vit"), 8, tmp_path)
    for _ in range(2):
        plain.epoch(data, data)
        kept.epoch(data, data)
    steps = kept.steps
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        f"step_{s}.pt" for s in steps
    )
    first = torch.load(tmp_path / "step_0.pt", weights_only=True)
    last = torch.load(tmp_path / f"step_{steps[-1]}.pt", weights_only=True)
    assert first["step"] == 0 and last["step"] == steps[-1]
    fresh = build(tiny("vit")).state_dict()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(last["state_dict"][name], value)
        assert torch.equal(first["state_dict"][name], fresh[name])
    assert not torch.equal(
        first["state_dict"]["head.weight"], last["state_dict"]["head.weight"]
    )


def test_bundled_images_are_resized_as_the_models_see_them() -> None:
    images, labels = bundled_split("train")
    assert images.shape == (2000, 32, 32) and images.dtype == np.uint8
    assert np.bincount(labels).tolist() == [200] * 10
