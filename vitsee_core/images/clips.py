"""Clips in place of images: videos and folders of frames, as samples of a data set.

A clip is loaded as an image is: an opener opens it and hashes its bytes, and a recipe turns it into
pixels. Its frames are decoded one after another while they are resized, so that a single decoded
frame is in memory, however long the clip is. Loading workers import this module.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.images.class_labels import natural_key
from vitsee_core.images.decoding import MAX_BYTES, Opener, decode, hash64, hash64_of
from vitsee_core.images.errors import DataError, ImageError
from vitsee_core.images.folders import is_image
from vitsee_core.images.image_source import ImageSource
from vitsee_core.images.picture_remarks import keep_clip_remarks, remarks_on
from vitsee_core.images.transform import Recipe
from vitsee_core.images.videos import MISSING, Sampling, Timeline, Video
from vitsee_stores.disk import read_regular
from vitsee_stores.plan import Size

# As of images: 64 bits.
_HASH_BYTES = 8


@dataclass
class OpenClip:
    """A clip whose frames are decoded when a recipe needs them.

    Attributes:
        sample: the sample's id.
        moving: the video, or the folder of frames.
        height, width: the frames' size; 0 until a recipe was applied.
        seconds: seconds between sampled frames; NaN until a recipe was applied.
    """

    sample: str
    moving: Video | FrameFolder
    height: int = 0
    width: int = 0
    seconds: float = math.nan


@dataclass(frozen=True)
class ClipRecipe:
    """The steps from a clip to a model's pixels.

    Attributes:
        frame_recipe: the steps for each frame.
        sampling: which frames the model sees, and in which order.
    """

    frame_recipe: Recipe
    sampling: Sampling

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(frames, channels, height, width) of the pixels."""
        return self.sampling.frames, *self.frame_recipe.shape

    def apply(self, clip: OpenClip) -> NDArray[np.uint8]:
        """Return (frames, channels, height, width) pixels in the order that the model sees.

        The clip is closed.

        Raises:
            ImageError: the clip has too few frames, frames of several sizes, or a frame that cannot
                be decoded.
        """
        sampling = self.sampling
        moving = clip.moving
        try:
            frame_numbers = sampling.chosen(clip.sample, moving.line)
            order = sampling.order(clip.sample)
            # Still clips have the same frame several times: each is decoded once.
            distinct = sorted(set(order))
            out = np.empty(self.shape, np.uint8)
            frames = moving.frames([frame_numbers[k] for k in distinct])
            # Ascending, so that a video is decoded forwards once.
            for k, image in zip(distinct, frames, strict=True):
                size = image.height, image.width
                if clip.height and size != (clip.height, clip.width):
                    raise ImageError(
                        clip.sample,
                        f"its frames are of several sizes: {clip.width} x {clip.height} and "
                        f"{size[1]} x {size[0]}; expected one",
                    )
                clip.height, clip.width = size
                keep_clip_remarks(clip, remarks_on(image))
                # (frames, channels, height, width): one frame may be at several places.
                positions = [i for i, sampled in enumerate(order) if sampled == k]
                out[positions] = self.frame_recipe.apply(image)
            clip.seconds = sampling.seconds(moving.line)
            return out
        finally:
            moving.close()


@dataclass(frozen=True)
class ClipOpener(Opener):
    """Opens clips; a location is (the sample's id, the location of its file or folder of frames).

    Attributes:
        files: reads these files and folders.
    """

    files: Opener

    def upright(self) -> Opener:
        """Return an opener that turns frames in folders upright; those of videos always are."""
        return ClipOpener(self.files.upright())

    @property
    def at_once(self) -> int:
        """The number of clips that are worth loading together."""
        return self.files.at_once

    def each(self, work: Callable[[int], None], n: int) -> None:
        """Call `work` with each number below n, possibly in several threads."""
        self.files.each(work, n)

    def inherit(self) -> tuple[Opener, tuple[int, ...]]:
        """Return an opener to pickle for a worker, and the descriptors that it must inherit."""
        heir, descriptors = self.files.inherit()
        return ClipOpener(heir), descriptors

    def _load(self, location: tuple[str, Any]) -> tuple[Any, int]:
        """Return the open clip and the hash of its bytes; a recipe closes the clip."""
        sample, file_location = location
        folder = self.files.folder(file_location)
        if folder is not None:
            frames = FrameFolder(sample, folder, self.files.exif)
            return OpenClip(sample, frames), frames.hash()
        file = self.files.file(file_location)
        try:
            encoded_hash = hash64_of(file)
            return OpenClip(sample, Video(sample, file)), encoded_hash
        except BaseException:  # the caller has no clip to close
            file.close()
            raise

    def _hash(self, location: tuple[str, Any]) -> int:
        sample, file_location = location
        folder = self.files.folder(file_location)
        if folder is not None:
            return FrameFolder(sample, folder).hash()
        with self.files.file(file_location) as file:
            return hash64_of(file)

    def _bytes(self, location: tuple[str, Any]) -> bytes:
        return self.files._bytes(location[1])

    def _size(self, location: tuple[str, Any]) -> Size:
        clip, _ = self._load(location)
        # The size is that of the first frame; `apply` refuses clips with others.
        (first,) = clip.moving.frames([0])
        clip.moving.close()
        return first.height, first.width


@dataclass(frozen=True)
class _ClipLocations:
    """The locations of a `ClipOpener`, each made when it is indexed."""

    ids: Sequence[str]
    file_locations: Sequence[Any]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> tuple[str, Any]:
        return str(self.ids[row]), self.file_locations[row]


def as_clips(source: ImageSource) -> ImageSource:
    """Return the source with each of its files or folders as a clip.

    Raises:
        DataError: its samples are parts of files, or PyAV is not installed.
    """
    if source.boxes is not None:
        raise DataError(
            f"{source.name} has boxes, which clips do not have; leave the column out"
        )
    first = source.locations[0] if len(source) else None
    # Folders of frames need no PyAV; the first sample says which they are.
    if importlib.util.find_spec("av") is None and source.opener.folder(first) is None:
        raise DataError(MISSING)
    locations = cast(Sequence[Any], _ClipLocations(source.ids, source.locations))
    return replace(source, opener=ClipOpener(source.opener), locations=locations)


def has_clips(source: ImageSource) -> bool:
    """Return whether the samples are clips."""
    return isinstance(source.opener, ClipOpener)


class FrameFolder:
    """The images of a folder as frames, in the natural order of their names (2 before 10).

    Args:
        sample: the sample's id, for messages.
        folder: the folder's path.
        exif: whether frames are turned upright by their EXIF orientation.

    Raises:
        OSError: the folder cannot be read.
    """

    def __init__(self, sample: str, folder: str, exif: bool = False) -> None:
        names = [entry.name for entry in os.scandir(folder) if entry.is_file()]
        self.sample = sample
        self.folder = folder
        self.exif = exif
        self.names = sorted(filter(is_image, names), key=natural_key)
        self.line = Timeline(range(len(self.names)), len(self.names))

    def close(self) -> None:
        """Do nothing: no file is open. `Video` has one."""

    def hash(self) -> int:
        """Return the hash of the frames' hashes, in their order."""
        digest = hashlib.blake2b(digest_size=_HASH_BYTES)
        for name in self.names:
            digest.update(hash64(self._bytes(name)).to_bytes(_HASH_BYTES, "little"))
        # 0 stands for an unreadable image in stores.
        return int.from_bytes(digest.digest(), "little") or 1

    def frames(self, numbers: Sequence[int]) -> Iterator[Image.Image]:
        """Yield the frames with these numbers; raise ImageError if one cannot be decoded."""
        for number in numbers:
            name = self.names[number]
            try:
                yield decode(name, self._bytes(name), self.exif)[0]
            except ImageError as error:
                raise ImageError(
                    self.sample, f"its frame {name}: {error.reason}"
                ) from None

    def _bytes(self, name: str) -> bytes:
        return read_regular(os.path.join(self.folder, name), MAX_BYTES)
