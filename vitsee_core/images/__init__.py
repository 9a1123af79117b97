"""From data sets to pixels in a model's input. Five files to read first, as an image goes:

    sources/__init__.py   which kind of data `--data` names
    image_source.py       a data set: its samples in its own order, and its splits
    selection.py          which samples, in which order: the store's
    decoding.py           the decoded image and the hash of its bytes, from an image's location
    loading.py            batches of pixels, loaded ahead by a thread or by processes

and the rest, around them:

    the model's input     transform, torch_transforms (a caller's own), placement (boxes, cells)
    clips                 clips, videos
    formats, memory       formats (of image files that are opened), shared_memory (with workers)
    names and errors      folders (kinds, classes, splits), errors; embedded_pictures, of sidecars
    kinds of data         sources/: lists, arrays, archives (tar_index), parquet, libraries, remote
                          (remote_files); base is what they share
"""

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
