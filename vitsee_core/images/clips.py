"""Clips in place of images: videos and folders of frames, as samples of a data set.

A clip is loaded as an image is: an opener gives it with the hash of its bytes, a recipe makes
pixels of it. Its frames are decoded one after another while they are brought to size, so that one
frame is in memory, whatever the clip. Loading workers run this module.
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

_HASH_BYTES = 8


@dataclass
class OpenClip:
    """A clip whose frames are decoded as they are asked for; height, width and seconds are known
    once a recipe was applied.

    Attributes:
        sample: its id.
        seconds: between neighbouring sampled frames.
    """

    sample: str
    moving: Video | FrameFolder
    height: int = 0
    width: int = 0
    seconds: float = math.nan


@dataclass(frozen=True)
class ClipRecipe:
    """Frames of a clip, each by a recipe for images, as uint8 pixels of `shape` (frames, channels,
    height, width)."""

    each: Recipe
    sampling: Sampling

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.sampling.frames, *self.each.shape

    def apply(self, clip: OpenClip) -> NDArray[np.uint8]:
        """Pixels (frames, channels, height, width) in the order that the model sees. Raises
        ImageError: fewer frames than are asked for, or one that cannot be decoded."""
        sampling = self.sampling
        moving = clip.moving
        try:
            places = sampling.chosen(clip.sample, moving.line)
            order = sampling.order(clip.sample)
            seen = sorted(set(order))
            out = np.empty(self.shape, np.uint8)
            frames = moving.frames([places[k] for k in seen])
            for k, image in zip(seen, frames, strict=True):
                size = image.height, image.width
                if clip.height and size != (clip.height, clip.width):
                    raise ImageError(
                        clip.sample,
                        f"its frames are of several sizes: {clip.width} x {clip.height} and "
                        f"{size[1]} x {size[0]}; expected one",
                    )
                clip.height, clip.width = size
                keep_clip_remarks(clip, remarks_on(image))
                out[[at for at, place in enumerate(order) if place == k]] = (
                    self.each.apply(image)
                )
            clip.seconds = sampling.seconds(moving.line)
            return out
        finally:
            moving.close()


@dataclass(frozen=True)
class ClipOpener(Opener):
    """Clips of another opener's files; a location is (sample's id, that opener's location). Where
    that is a folder, its images are the frames."""

    files: Opener

    def upright(self) -> Opener:
        """The same clips, with frames in folders turned upright; videos always are."""
        return ClipOpener(self.files.upright())

    @property
    def at_once(self) -> int:
        return self.files.at_once

    def each(self, work: Callable[[int], None], n: int) -> None:
        self.files.each(work, n)

    def inherit(self) -> tuple[Opener, tuple[int, ...]]:
        heir, descriptors = self.files.inherit()
        return ClipOpener(heir), descriptors

    def _load(self, location: tuple[str, Any]) -> tuple[Any, int]:
        sample, place = location
        if (folder := self.files.folder(place)) is not None:
            frames = FrameFolder(sample, folder, self.files.exif)
            return OpenClip(sample, frames), frames.hash()
        file = self.files.file(place)
        try:
            value = hash64_of(file)
            return OpenClip(sample, Video(sample, file)), value
        except BaseException:
            file.close()
            raise

    def _hash(self, location: tuple[str, Any]) -> int:
        sample, place = location
        if (folder := self.files.folder(place)) is not None:
            return FrameFolder(sample, folder).hash()
        with self.files.file(place) as file:
            return hash64_of(file)

    def _bytes(self, location: tuple[str, Any]) -> bytes:
        return self.files._bytes(location[1])

    def _size(self, location: tuple[str, Any]) -> Size:
        clip, _ = self._load(location)
        (first,) = clip.moving.frames([0])
        clip.moving.close()
        return first.height, first.width


@dataclass(frozen=True)
class _Located:
    """The locations of a `ClipOpener`, made when they are asked for."""

    ids: Sequence[str]
    places: Sequence[Any]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> tuple[str, Any]:
        return str(self.ids[row]), self.places[row]


def as_clips(source: ImageSource) -> ImageSource:
    """The source with each of its files, or folders, as a clip. Raises DataError: its samples are
    parts of files, or PyAV is not installed."""
    if source.boxes is not None:
        raise DataError(
            f"{source.name} has boxes, which clips do not have; leave the column out"
        )
    first = source.locations[0] if len(source) else None
    if importlib.util.find_spec("av") is None and source.opener.folder(first) is None:
        raise DataError(MISSING)
    locations = cast(Sequence[Any], _Located(source.ids, source.locations))
    return replace(source, opener=ClipOpener(source.opener), locations=locations)


def has_clips(source: ImageSource) -> bool:
    """Whether the samples are clips."""
    return isinstance(source.opener, ClipOpener)


class FrameFolder:
    """The images of one folder as frames, in the natural order of their names (2 before 10)."""

    def __init__(self, sample: str, folder: str, exif: bool = False) -> None:
        """exif: whether frames are turned upright. Raises OSError: the folder cannot be read."""
        names = [entry.name for entry in os.scandir(folder) if entry.is_file()]
        self.sample = sample
        self.folder = folder
        self.exif = exif
        self.names = sorted(filter(is_image, names), key=natural_key)
        self.line = Timeline(range(len(self.names)), len(self.names))

    def close(self) -> None:
        return

    def hash(self) -> int:
        """The hash of the frames' hashes, in their order."""
        digest = hashlib.blake2b(digest_size=_HASH_BYTES)
        for name in self.names:
            digest.update(hash64(self._bytes(name)).to_bytes(_HASH_BYTES, "little"))
        return int.from_bytes(digest.digest(), "little") or 1

    def frames(self, places: Sequence[int]) -> Iterator[Image.Image]:
        """The frames at these places. Raises ImageError: one cannot be decoded."""
        for place in places:
            name = self.names[place]
            try:
                yield decode(name, self._bytes(name), self.exif)[0]
            except ImageError as error:
                raise ImageError(
                    self.sample, f"its frame {name}: {error.reason}"
                ) from None

    def _bytes(self, name: str) -> bytes:
        return read_regular(os.path.join(self.folder, name), MAX_BYTES)
