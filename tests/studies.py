"""Models and studies of a few words, for tests of plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitsee_core.study.catalogue import SurveyedModel
from vitsee_core.study.steps import Study

NO_ATTENTION = "no block has a softmax over tokens"


def model(label: str, **changes: Any) -> SurveyedModel:
    """A transformer."""
    offered = ("sites", "grid", "attention", "heads", "residual", "images", "classifier")
    about: dict[str, Any] = {
        "label": label, "name": f"demo:{label}", "lacks": dict.fromkeys(offered),
        "class_token": True, "grid": (4, 6), "heads": "blocks.0.attn.heads", "flops": 10**6,
        "size": (3, 8, 12), "n_blocks": 2, "bytes_of_tokens": 1000, "bytes_pooled": 10,
        "n_fields": 3, "more_groups": ("norms", "hidden", "residual"), "more_sites": ("norm1",),
        "more_bytes": 5000, "more_fields": 10,
    }  # fmt: skip
    return SurveyedModel(**{**about, **changes})


def cnn(label: str) -> SurveyedModel:
    lacks = {**model(label).lacks, "attention": NO_ATTENTION, "heads": NO_ATTENTION}
    groups = {"more_groups": ("norms", "residual")}
    return model(label, lacks=lacks, class_token=False, grid=(1, 1), heads=None, **groups)


def study(folder: Path = Path("out"), *labels: str, **changes: Any) -> Study:
    models = {label: f"demo:{label}" for label in labels or ("vit", "cnn")}
    return Study(folder, models, "photos", **{"train": "others", **changes})
