"""Openers, which decode the image at a location and hash its encoded bytes.

A location is what a source lists for each sample: a path, a member of a tar file, a row. Each kind
of source has an `Opener` that reads its locations. Loading workers import this module, so it
imports neither torch nor timm: a worker then starts in a fifth of a second.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from vitsee_core.images.errors import DataError, ImageError
from vitsee_core.images.formats import FORMAT_NAMES, readable_formats
from vitsee_core.images.picture_remarks import (
    EXIF_APPLIED,
    EXIF_IGNORED,
    SIXTEEN_BITS,
    describe_loaded,
    has_wide_channels,
    keep_remarks,
    orientation_of,
    remarks_on,
    size_when_loaded,
    turned_upright,
    warned,
)
from vitsee_core.images.pillow_warnings import hear_libtiff, heard_warnings
from vitsee_core.images.shared_memory import SharedBlock
from vitsee_stores.disk import open_regular, read_regular
from vitsee_stores.errors import reason, reason_of_text
from vitsee_stores.files import Files, NoAnswer
from vitsee_stores.folder import Folder
from vitsee_stores.plan import Size

# The process or the machine ran out of file handles or memory: the image is not to blame.
_NOT_THE_IMAGE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_MAX_REASON_LENGTH = 200
MAX_BYTES = 1 << 30  # of an encoded image
_ZIP_HEADER = 30  # bytes of a member's local header before its name
_ZIP_MAGIC = b"PK\x03\x04"
_TAR_HEADER = 512  # bytes before each member's contents
_PIECE_BYTES = 1 << 20  # read at a time from a file that is hashed
_REMOTE_REQUESTS = 16  # images that are requested from a server, and in memory, at a time

# (index of the zip file, name, offset of the local header, packed bytes, unpacked bytes,
# whether it is deflated, crc32). A plain tuple: there are millions of them, and they are pickled.
ZipMember = tuple[int, str, int, int, int, bool, int]


@dataclass(frozen=True)
class Opener(ABC):
    """Reads the image at a location, in whatever form its source lists locations.

    A subclass implements `_bytes`, and overrides `_load`, `_hash` or `_size` where it can do
    better than read and decode the whole file.

    Attributes:
        exif: whether images are turned upright by their EXIF orientation.
    """

    exif: bool = field(default=False, kw_only=True)

    def upright(self) -> Opener:
        """Return the same opener with images turned upright by their EXIF orientation."""
        return replace(self, exif=True)

    def load(self, location: Any) -> tuple[Image.Image, int]:
        """Return the decoded image in its own mode and the 64-bit hash of its encoded bytes.

        Raises:
            ImageError: the file is missing, truncated, empty, too large or not an image.
        """
        with _image_errors(location):
            return self._load(location)

    def hash(self, location: Any) -> int:
        """Return the 64-bit hash that `load` returns, without decoding the image.

        Bytes that are not an image have a hash, too.

        Raises:
            ImageError: the file is missing or truncated.
        """
        with _image_errors(location):
            return self._hash(location)

    def size(self, location: Any) -> Size:
        """Return (height, width) of the image that `load` returns, from its header if possible.

        Raises:
            ImageError: the file is missing, truncated or not an image.
        """
        with _image_errors(location):
            return self._size(location)

    def file(self, location: Any) -> IO[bytes]:
        """Open the file at a location for reading; a member of an archive is read into memory."""
        return io.BytesIO(self._bytes(location))

    def folder(self, location: Any) -> str | None:
        """Return the path at a location if that is a folder (of a clip's frames), else None."""
        return None

    def inherit(self) -> tuple[Opener, tuple[int, ...]]:
        """Return an opener to pickle for a worker, and file descriptors the worker must inherit."""
        return self, ()

    @property
    def at_once(self) -> int:
        """The number of images that are worth loading together."""
        return 1

    def each(self, work: Callable[[int], None], n: int) -> None:
        """Call `work` with each number below n, possibly in several threads."""
        for k in range(n):
            work(k)

    def _load(self, location: Any) -> tuple[Image.Image, int]:
        """Return what `load` returns; may raise the system's errors."""
        return decode(str(location), self._bytes(location), exif=self.exif)

    def _hash(self, location: Any) -> int:
        """Return what `hash` returns; may raise the system's errors."""
        return hash64(self._bytes(location))

    @abstractmethod
    def _bytes(self, location: Any) -> bytes:
        """Return the encoded bytes at a location, of which `hash` is the hash."""

    def _size(self, location: Any) -> Size:
        """Return what `size` returns; may raise the system's errors."""
        file = io.BytesIO(self._bytes(location))
        return header_size(str(location), file, exif=self.exif)


@dataclass(frozen=True)
class FileOpener(Opener):
    """Opens image files; a location is a path, and relative paths are below `root`."""

    root: str

    def file(self, location: str) -> IO[bytes]:
        """Open the file for reading; a pipe or a device is refused rather than waited for."""
        return open(open_regular(os.path.join(self.root, location)), "rb")

    def folder(self, location: str) -> str | None:
        """Return the folder at a location, None if a file is there."""
        path = os.path.join(self.root, location)
        return path if os.path.isdir(path) else None

    def _bytes(self, location: str) -> bytes:
        return read_regular(os.path.join(self.root, location), MAX_BYTES)

    def _size(self, location: str) -> Size:
        # From the open file: Pillow reads the header alone, not the megabytes behind it.
        with self.file(location) as file:
            return header_size(location, file, exif=self.exif)


@dataclass(frozen=True)
class FilesOpener(Opener):
    """Opens whole files of a folder or a URL; a location is a name."""

    files: Files

    @property
    def at_once(self) -> int:
        """The number of images to load together: 1 from a disk, several from a server."""
        if isinstance(self.files, Folder):
            return 1
        return _REMOTE_REQUESTS

    def each(self, work: Callable[[int], None], n: int) -> None:
        """Call `work` with each number below n, in several threads where a server answers."""
        self.files.each_small(work, range(n))

    def _bytes(self, location: Any) -> bytes:
        return self.files.read(location, MAX_BYTES)


@dataclass(frozen=True)
class TarOpener(FilesOpener):
    """Opens members of uncompressed tar files.

    A location is (index of the tar, member's name, offset of its contents, size in bytes).
    """

    tars: Sequence[str]

    def _bytes(self, location: tuple[int, str, int, int]) -> bytes:
        """Read a member with its header; raise ImageError if the header has another size."""
        tar, name, offset, size = location
        _check_bytes(name, size)
        # The header is read too: it differs if the tar was written anew since it was indexed.
        data = self.files.read_range(
            self.tars[tar], offset - _TAR_HEADER, size + _TAR_HEADER
        )
        # Bytes 124 to 135 are the size in octal digits; a first bit of 1 marks a size in binary
        # (GNU tar, above 8 GiB), which no image has.
        is_octal = not data[124] & 0x80
        if is_octal and int(data[124:135].strip(b"\0 ") or b"0", 8) != size:
            raise ImageError(
                name, f"the tar file changed: other bytes than {size} at {offset}"
            )
        return data[_TAR_HEADER:]


@dataclass(frozen=True)
class ZipOpener(Opener):
    """Opens members of zip files; a location is a `ZipMember`.

    `zipfile` is not used: it would list the whole archive again in every worker.
    """

    zips: tuple[str, ...]

    def _bytes(self, location: ZipMember) -> bytes:
        """Read and inflate a member; raise ImageError if it is not as the zip file lists it."""
        zip_index, name, offset, packed, size, deflated, crc = location
        _check_bytes(name, max(packed, size))
        with open(self.zips[zip_index], "rb") as file:
            file.seek(offset)
            header = file.read(_ZIP_HEADER)
            if len(header) < _ZIP_HEADER or not header.startswith(_ZIP_MAGIC):
                raise ImageError(
                    name, "the zip file is damaged: no member where one should be"
                )
            # The lengths of the name and of the extra field, which stand before the data.
            name_length = int.from_bytes(header[26:28], "little")
            extra_length = int.from_bytes(header[28:30], "little")
            file.seek(name_length + extra_length, os.SEEK_CUR)
            data = file.read(packed)
        if deflated:
            try:
                # At most one byte more than listed, so that a member that inflates to gigabytes
                # is refused below without filling the memory.
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
            except zlib.error as error:
                raise ImageError(name, f"the zip file is damaged: {error}") from None
        if len(data) != size or zlib.crc32(data) != crc:
            raise ImageError(name, "the zip file is damaged: other bytes than it lists")
        return data


@dataclass(frozen=True)
class ArrayOpener(Opener):
    """Opens rows of a uint8 array (images, height, width) or (images, height, width, 3)."""

    images: NDArray[np.uint8]

    def inherit(self) -> tuple[Opener, tuple[int, ...]]:
        """Return an opener of a copy in shared memory, one for all workers, and its descriptor."""
        block = SharedBlock(max(1, self.images.nbytes))
        block.array(self.images.shape)[...] = self.images
        return _SharedArrayOpener(block, self.images.shape), (block.fd,)

    def _load(self, location: int) -> tuple[Image.Image, int]:
        pixels = np.ascontiguousarray(self.images[location])
        return Image.fromarray(pixels), hash64(self._bytes(location))

    def _bytes(self, location: int) -> bytes:
        # The shape is hashed too: a 2 x 8 image is not a 4 x 4 image of the same bytes.
        pixels = self.images[location]
        return b"".join((str(pixels.shape).encode(), pixels.tobytes()))

    def _size(self, location: int) -> Size:
        return self.images.shape[1], self.images.shape[2]


class _SharedArrayOpener(ArrayOpener):
    """Opens rows of an array in shared memory, of which the block and shape are pickled alone."""

    def __init__(self, block: SharedBlock, shape: tuple[int, ...]) -> None:
        super().__init__(block.array(shape))
        # Through __dict__, since the dataclass is frozen.
        self.__dict__["_block_and_shape"] = block, shape

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.__dict__["_block_and_shape"]


@dataclass(frozen=True)
class RowOpener(Opener):
    """Opens rows of a Hugging Face data set whose image column is left encoded."""

    dataset: Any
    column: str

    def _bytes(self, location: int) -> bytes:
        """Return the bytes in the row, or of the file whose path is in the row."""
        image = self.dataset[location][self.column] or {}
        encoded = image.get("bytes")
        path = image.get("path")
        if encoded:
            return bytes(encoded)
        if path:
            return FileOpener("")._bytes(path)
        raise ImageError(f"row {location}", "the row has no image")


@dataclass(frozen=True)
class JointOpener(Opener):
    """Opens images of several sources; a location is (index of the opener, its location)."""

    openers: tuple[Opener, ...]

    def upright(self) -> Opener:
        """Return a joint opener of the openers with images turned upright."""
        return JointOpener(tuple(opener.upright() for opener in self.openers))

    def inherit(self) -> tuple[Opener, tuple[int, ...]]:
        """Return a joint opener to pickle for a worker, and the descriptors of all openers."""
        openers: list[Opener] = []
        descriptors: list[int] = []
        for opener in self.openers:
            heir, fds = opener.inherit()
            openers.append(heir)
            descriptors.extend(fds)
        return JointOpener(tuple(openers)), tuple(descriptors)

    def _load(self, location: tuple[int, Any]) -> tuple[Image.Image, int]:
        opener_index, inner_location = location
        return self.openers[opener_index].load(inner_location)

    def _bytes(self, location: tuple[int, Any]) -> bytes:
        opener_index, inner_location = location
        return self.openers[opener_index]._bytes(inner_location)

    def _size(self, location: tuple[int, Any]) -> Size:
        opener_index, inner_location = location
        return self.openers[opener_index]._size(inner_location)


@contextmanager
def _image_errors(location: Any) -> Iterator[None]:
    """Turn the system's errors on one image into an ImageError, within this context.

    A server that does not answer is a DataError: the next image would fare no better. Errors that
    say that the process or the machine ran out of something pass as they are.
    """
    try:
        yield
    except NoAnswer as error:
        raise DataError(
            f"an image cannot be read: {error.strerror}; what was committed is kept: repeat the "
            "command to go on"
        ) from None
    except OSError as error:
        if error.errno in _NOT_THE_IMAGE:
            raise
        raise ImageError(str(location), " ".join(reason(error).split())) from None
    except ValueError as error:  # a NUL in the path
        raise ImageError(str(location), one_line(error)) from None


def _check_bytes(name: str, size: int) -> None:
    """Raise ImageError if an encoded image is larger than any real one."""
    if size > MAX_BYTES:
        raise ImageError(name, f"has {size} bytes, expected at most {MAX_BYTES}")


def decode(name: str, encoded: bytes, exif: bool = False) -> tuple[Image.Image, int]:
    """Return the decoded image in its own mode and the hash of `encoded`.

    The image carries its remarks (16 bits cut to 8, an ignored EXIF orientation, ...), which
    `remarks_on` returns.

    Args:
        name: the image's name, for error messages.
        encoded: the bytes of the image file.
        exif: whether the image is turned upright by its EXIF orientation. It is not by default,
            since the evaluation of timm and torchvision ignores that orientation.

    Raises:
        ImageError: not a whole image of at most `Image.MAX_IMAGE_PIXELS`.
    """
    if not encoded:
        raise ImageError(name, "the file is empty")
    remarks: list[str] = []
    with heard_warnings(), _pillow_errors(name):
        image = _open_within_limits(name, io.BytesIO(encoded))
        # Before `load`, after which Pillow no longer knows how wide the channels were.
        if has_wide_channels(image):
            remarks.append(SIXTEEN_BITS)
        if image.format == "TIFF":
            hear_libtiff()
        image.load()
        remarks += describe_loaded(image)
        orientation = orientation_of(image)
        if orientation != 1:
            remarks.append(EXIF_APPLIED if exif else EXIF_IGNORED)
        if exif:
            image = turned_upright(image, orientation)
    keep_remarks(image, remarks)
    return image, hash64(encoded)


def header_size(name: str, file: IO[bytes], exif: bool = False) -> Size:
    """Return (height, width) of the image that `decode` returns, from the image's header.

    Raises:
        ImageError: not an image, or one with too many pixels.
    """
    with (
        heard_warnings(),
        _pillow_errors(name),
        _open_within_limits(name, file) as image,
    ):
        return size_when_loaded(image, exif)


def _open_within_limits(name: str, file: IO[bytes]) -> Image.Image:
    """Read an image's header; raise ImageError if it has more than Pillow's limit of pixels.

    Pillow itself only warns up to twice its limit.
    """
    image = Image.open(file, formats=readable_formats())
    max_pixels = Image.MAX_IMAGE_PIXELS
    if max_pixels and image.width * image.height > max_pixels:
        size = f"{image.width} x {image.height}"
        raise ImageError(
            name,
            f"too many pixels: {size}, expected at most {max_pixels}; make it smaller",
        )
    return image


@contextmanager
def _pillow_errors(name: str) -> Iterator[None]:
    """Turn whatever Pillow raises on an image into an ImageError, within this context."""
    try:
        yield
    except ImageError:
        raise
    except MemoryError:
        # Pillow raises it on a nonsensical size in a damaged file, which passes the pixel limit.
        raise ImageError(name, "it asks for more memory than there is: damaged") from None
    except UnidentifiedImageError:
        raise ImageError(
            name, f"not an image, or of a format other than {FORMAT_NAMES}"
        ) from None
    except Image.DecompressionBombError as error:
        raise ImageError(name, f"too many pixels: {one_line(error)}") from None
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
        raise ImageError(name, one_line(error)) from None


def hash64(data: bytes) -> int:
    """Return the 64-bit BLAKE2b hash of `data`, read as little-endian.

    It is never 0, which marks an unreadable image in a store.
    """
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


def hash64_of(file: IO[bytes]) -> int:
    """Return `hash64` of all bytes of an open file, reading them in pieces."""
    file.seek(0)
    digest = hashlib.blake2b(digest_size=8)
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    return int.from_bytes(digest.digest(), "little") or 1


@dataclass
class Facts:
    """Facts about loaded images beside their pixels.

    Attributes:
        valid: (images,) False for an unreadable image, which has zeros, hash 0 and size 0.
        hash: (images,) hash of the encoded bytes.
        size: (images, 2) height and width as decoded.
        seconds: (images,) seconds between sampled frames of a clip, NaN for an image.
        errors: (position, reason) of each unreadable image.
        pixel_hash: (images,) hash of the pixels after resize and crop, 0 for an unreadable image.
        remarks: remark (see `picture_remarks`) -> number of images it applies to.
    """

    valid: NDArray[np.bool_]
    hash: NDArray[np.uint64]
    size: NDArray[np.int32]
    seconds: NDArray[np.float32]
    errors: list[tuple[int, str]]
    pixel_hash: NDArray[np.uint64]
    remarks: Counter[str] = field(default_factory=Counter)

    @classmethod
    def none(cls, n: int) -> Facts:
        """Return the facts of `n` images that are not loaded yet."""
        return cls(
            valid=np.zeros(n, np.bool_),
            hash=np.zeros(n, np.uint64),
            size=np.zeros((n, 2), np.int32),
            seconds=np.full(n, np.nan, np.float32),
            errors=[],
            pixel_hash=np.zeros(n, np.uint64),
        )

    def put(self, start: int, batch: Facts) -> None:
        """Copy the facts of consecutive images to the positions from `start` on."""
        rows = slice(start, start + len(batch.valid))
        self.valid[rows] = batch.valid
        self.hash[rows] = batch.hash
        self.size[rows] = batch.size
        self.seconds[rows] = batch.seconds
        self.pixel_hash[rows] = batch.pixel_hash
        self.errors.extend((start + k, why) for k, why in batch.errors)
        # Workers finish in any order.
        self.errors.sort()
        self.remarks.update(batch.remarks)


def load_into(
    out: NDArray[np.uint8], opener: Opener, locations: Sequence[Any], recipe: Any
) -> Facts:
    """Load images into `out` and return the facts about them.

    Args:
        out: (images, channels, height, width), or (clips, frames, channels, height, width) for
            clips, filled in place; an unreadable image has zeros.
        opener: reads the images.
        locations: one for each image of `out`.
        recipe: resizes and crops a decoded image.
    """
    facts = Facts.none(len(locations))

    def load(k: int) -> None:
        """Load image k, or note why it cannot be read; `opener` may call it in threads."""
        try:
            with heard_warnings() as messages:
                image, encoded_hash = opener.load(locations[k])
                out[k] = recipe.apply(image)
        except ImageError as error:
            out[k] = 0
            facts.errors.append((k, error.reason))
        else:
            facts.valid[k] = True
            facts.hash[k] = encoded_hash
            facts.pixel_hash[k] = hash64(out[k].tobytes())
            facts.size[k] = image.height, image.width
            facts.seconds[k] = getattr(image, "seconds", np.nan)
            facts.remarks.update({*remarks_on(image), *warned(messages)})

    opener.each(load, len(locations))
    facts.errors.sort()
    return facts


def one_line(error: BaseException) -> str:
    """Return an error's text on one line, cut at 200 characters, or its type if it has none."""
    text = str(error)
    if isinstance(error, ValueError):
        text = reason_of_text(error)
    text = " ".join(text.split()) or type(error).__name__
    return text[:_MAX_REASON_LENGTH]
