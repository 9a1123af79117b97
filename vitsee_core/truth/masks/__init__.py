"""Ground-truth masks: where they come from, and which tokens of a model lie on an object."""

from vitsee_core.truth.masks.labels import BACKGROUND, FOREGROUND, VOID, MaskSource
from vitsee_core.truth.masks.mask_truth import RULES, MaskTruth, ground_truth
from vitsee_core.truth.masks.sources import open_masks

__all__ = [
    "BACKGROUND",
    "FOREGROUND",
    "RULES",
    "VOID",
    "MaskSource",
    "MaskTruth",
    "ground_truth",
    "open_masks",
]
