"""Objects and parts of images as examples: one vector per segment, from the tokens it lies on."""

from vitsee_core.masks.segments.examples import Examples, examples_of
from vitsee_core.masks.segments.rows import WEIGHTS, LabelledSegments, Segmentation, as_segmentation
from vitsee_core.masks.segments.vectors import SegmentFeatures

__all__ = [
    "WEIGHTS",
    "Examples",
    "LabelledSegments",
    "SegmentFeatures",
    "Segmentation",
    "as_segmentation",
    "examples_of",
]
