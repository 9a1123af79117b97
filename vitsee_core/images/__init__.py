"""Data sources -> ordered, identified samples -> pixels."""

from vitsee_core.images.errors import DataError, ImageError
from vitsee_core.images.image_source import ImageSource
from vitsee_core.images.loading import Batch, batches
from vitsee_core.images.selection import Selection, select
from vitsee_core.images.sources import open_source
from vitsee_core.images.transform import normalise

__all__ = [
    "Batch",
    "DataError",
    "ImageError",
    "ImageSource",
    "Selection",
    "batches",
    "normalise",
    "open_source",
    "select",
]
