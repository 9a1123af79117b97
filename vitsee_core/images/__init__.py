"""Data sources -> ordered, identified samples -> pixels."""

from vitsee_core.images.errors import DataError, ImageError
from vitsee_core.images.loading import Batch, batches
from vitsee_core.images.opening import open_source
from vitsee_core.images.selection import Selection, select
from vitsee_core.images.source import Source
from vitsee_core.images.transform import normalise

__all__ = [
    "Batch",
    "DataError",
    "ImageError",
    "Selection",
    "Source",
    "batches",
    "normalise",
    "open_source",
    "select",
]
