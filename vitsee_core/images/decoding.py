"""The decoded image and the hash of its bytes, from an image's location.

Loading workers run this module: it imports neither torch nor timm, so that a worker starts in a
fifth of a second.
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
from vitsee_stores.errors import reason
from vitsee_stores.files import Files, NoAnswer
from vitsee_stores.folder import Folder
from vitsee_stores.plan import Size

# The process or the machine ran out of something: the image is not to blame.
_NOT_THE_IMAGE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_REASON_LENGTH = 200
MOST_BYTES = 1 << 30  # of an encoded image
_ZIP_HEADER = 30
_ZIP_MAGIC = b"PK\x03\x04"
_TAR_HEADER = 512
_PIECE_BYTES = 1 << 20  # of a file that is hashed
_AT_ONCE_FAR = 16  # images that are asked of a server at the same time, and in memory

ZipMember = tuple[int, str, int, int, int, bool, int]


@dataclass(frozen=True)
class Opener(ABC):
    """Reads the image at a location, in whatever form its source lists locations.

    exif: whether images are turned upright by their EXIF orientation.
    """

    exif: bool = field(default=False, kw_only=True)

    def upright(self) -> Opener:
        """The same opener, whose images are turned upright by their EXIF orientation."""
        return replace(self, exif=True)

    def load(self, location: Any) -> tuple[Image.Image, int]:
        """The decoded image in its own mode, and the 64-bit hash of its encoded bytes. Raises
        ImageError: missing, truncated, empty, not an image, or too large to be one."""
        with _read_of(location):
            return self._load(location)

    def hash(self, location: Any) -> int:
        """The 64-bit hash that `load` returns, without decoding the image. Raises ImageError:
        missing or truncated; bytes that are not an image have a hash, too."""
        with _read_of(location):
            return self._hash(location)

    def size(self, location: Any) -> Size:
        """(height, width) of the result of `load`, from the image's header if possible. Raises
        ImageError: missing, truncated, or not an image."""
        with _read_of(location):
            return self._size(location)

    def file(self, location: Any) -> IO[bytes]:
        """The file at a location, open for reading; in memory, where it is a part of another."""
        return io.BytesIO(self._bytes(location))

    def folder(self, location: Any) -> str | None:
        """The path at a location that is a folder; None of anything else."""
        return None

    def inherit(self) -> tuple[Opener, tuple[int, ...]]:
        """An opener to send to a worker, and the descriptors that the worker must inherit."""
        return self, ()

    @property
    def at_once(self) -> int:
        """Images that are worth loading together."""
        return 1

    def each(self, work: Callable[[int], None], n: int) -> None:
        """Call `work` with each number below n."""
        for k in range(n):
            work(k)

    def _load(self, location: Any) -> tuple[Image.Image, int]:
        return decode(str(location), self._bytes(location), self.exif)

    def _hash(self, location: Any) -> int:
        return hash64(self._bytes(location))

    @abstractmethod
    def _bytes(self, location: Any) -> bytes:
        """The hashed bytes."""

    def _size(self, location: Any) -> Size:
        return header_size(str(location), io.BytesIO(self._bytes(location)), self.exif)


@dataclass(frozen=True)
class FileOpener(Opener):
    """Image files; a location is a path, relative ones below `root`."""

    root: str

    def file(self, location: str) -> IO[bytes]:
        return open(open_regular(os.path.join(self.root, location)), "rb")

    def folder(self, location: str) -> str | None:
        path = os.path.join(self.root, location)
        return path if os.path.isdir(path) else None

    def _bytes(self, location: str) -> bytes:
        return read_regular(os.path.join(self.root, location), MOST_BYTES)

    def _size(self, location: str) -> Size:
        with open(open_regular(os.path.join(self.root, location)), "rb") as file:
            return header_size(location, file, self.exif)


@dataclass(frozen=True)
class FilesOpener(Opener):
    """Whole files of a folder or a URL; a location is a name."""

    files: Files

    @property
    def at_once(self) -> int:
        return 1 if isinstance(self.files, Folder) else _AT_ONCE_FAR

    def each(self, work: Callable[[int], None], n: int) -> None:
        self.files.each_small(work, range(n))

    def _bytes(self, location: Any) -> bytes:
        return self.files.read(location, MOST_BYTES)


@dataclass(frozen=True)
class TarOpener(FilesOpener):
    """Members of uncompressed tar files; a location is (tar, member's name, offset, size)."""

    tars: Sequence[str]

    def _bytes(self, location: tuple[int, str, int, int]) -> bytes:
        tar, name, offset, size = location
        _check_bytes(name, size)
        # With its header, which is another if the tar was written anew.
        data = self.files.read_range(
            self.tars[tar], offset - _TAR_HEADER, size + _TAR_HEADER
        )
        if not data[124] & 0x80 and int(data[124:135].strip(b"\0 ") or b"0", 8) != size:
            raise ImageError(
                name, f"the tar file changed: other bytes than {size} at {offset}"
            )
        return data[_TAR_HEADER:]


@dataclass(frozen=True)
class ZipOpener(Opener):
    """Members of zip files; a location is (zip, member's name, offset of its header, bytes packed
    and unpacked, whether it is deflated, crc32)."""

    zips: tuple[str, ...]

    def _bytes(self, location: ZipMember) -> bytes:
        which, name, offset, packed, size, deflated, crc = location
        _check_bytes(name, max(packed, size))
        with open(self.zips[which], "rb") as file:
            file.seek(offset)
            header = file.read(_ZIP_HEADER)
            if len(header) < _ZIP_HEADER or not header.startswith(_ZIP_MAGIC):
                raise ImageError(
                    name, "the zip file is damaged: no member where one should be"
                )
            skip = int.from_bytes(header[26:28], "little") + int.from_bytes(
                header[28:30], "little"
            )
            file.seek(skip, os.SEEK_CUR)
            data = file.read(packed)
        if deflated:
            try:  # one byte more than the member has: it would not end where it says
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
            except zlib.error as error:
                raise ImageError(name, f"the zip file is damaged: {error}") from None
        if len(data) != size or zlib.crc32(data) != crc:
            raise ImageError(name, "the zip file is damaged: other bytes than it lists")
        return data


@dataclass(frozen=True)
class ArrayOpener(Opener):
    """Rows of a uint8 array (images, height, width) or (images, height, width, 3)."""

    images: NDArray[np.uint8]

    def inherit(self) -> tuple[Opener, tuple[int, ...]]:
        """An opener of a copy in shared memory, one for all workers."""
        block = SharedBlock(max(1, self.images.nbytes))
        block.array(self.images.shape)[...] = self.images
        return _SharedArrayOpener(block, self.images.shape), (block.fd,)

    def _load(self, location: int) -> tuple[Image.Image, int]:
        pixels = np.ascontiguousarray(self.images[location])
        return Image.fromarray(pixels), hash64(self._bytes(location))

    def _bytes(self, location: int) -> bytes:
        pixels = self.images[location]
        return b"".join((str(pixels.shape).encode(), pixels.tobytes()))

    def _size(self, location: int) -> Size:
        return self.images.shape[1], self.images.shape[2]


class _SharedArrayOpener(ArrayOpener):
    """Opens an array in shared memory; only its location is pickled."""

    def __init__(self, block: SharedBlock, shape: tuple[int, ...]) -> None:
        super().__init__(block.array(shape))
        self.__dict__["_place"] = block, shape

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.__dict__["_place"]


@dataclass(frozen=True)
class RowOpener(Opener):
    """Rows of a Hugging Face data set whose image column is left encoded."""

    dataset: Any
    column: str

    def _bytes(self, location: int) -> bytes:
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
    """Several openers; a location is (which of them, its own location)."""

    parts: tuple[Opener, ...]

    def upright(self) -> Opener:
        return JointOpener(tuple(part.upright() for part in self.parts))

    def inherit(self) -> tuple[Opener, tuple[int, ...]]:
        heirs = [part.inherit() for part in self.parts]
        return JointOpener(tuple(heir for heir, _ in heirs)), sum(
            (fds for _, fds in heirs), ()
        )

    def _load(self, location: tuple[int, Any]) -> tuple[Image.Image, int]:
        return self.parts[location[0]].load(location[1])

    def _bytes(self, location: tuple[int, Any]) -> bytes:
        return self.parts[location[0]]._bytes(location[1])

    def _size(self, location: tuple[int, Any]) -> Size:
        return self.parts[location[0]]._size(location[1])


@contextmanager
def _read_of(location: Any) -> Iterator[None]:
    """Context that turns the system's errors on one image into an ImageError."""
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
    if size > MOST_BYTES:
        raise ImageError(name, f"has {size} bytes, expected at most {MOST_BYTES}")


def decode(name: str, encoded: bytes, exif: bool = False) -> tuple[Image.Image, int]:
    """The decoded image in its own mode, `remarks_on` it, and the hash of `encoded`.

    EXIF orientation is applied with `exif` alone: timm's and torchvision's evaluation ignore it.
    Raises ImageError: not a whole image of at most `Image.MAX_IMAGE_PIXELS`.
    """
    if not encoded:
        raise ImageError(name, "the file is empty")
    remarks: list[str] = []
    with heard_warnings(), _pillow(name):
        image = _opened(name, io.BytesIO(encoded))
        if has_wide_channels(image):  # which loading forgets
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
    """(height, width) of what `decode` gives, according to an image's header. Raises ImageError:
    not an image, or too large to be one."""
    with heard_warnings(), _pillow(name), _opened(name, file) as image:
        return size_when_loaded(image, exif)


def _opened(name: str, file: IO[bytes]) -> Image.Image:
    image = Image.open(file, formats=readable_formats())
    most = Image.MAX_IMAGE_PIXELS
    if most and image.width * image.height > most:
        size = f"{image.width} x {image.height}"
        raise ImageError(
            name, f"too many pixels: {size}, expected at most {most}; make it smaller"
        )
    return image


@contextmanager
def _pillow(name: str) -> Iterator[None]:
    """Context that turns whatever Pillow raises into an ImageError."""
    try:
        yield
    except ImageError:
        raise
    except MemoryError:
        # Pillow's answer to a size in a damaged file, far above the limit of pixels.
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
    """The 64-bit BLAKE2b hash of `data`, read little-endian; never 0, which marks a bad image."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


def hash64_of(file: IO[bytes]) -> int:
    """`hash64` of a file's bytes, read from its begin in pieces."""
    file.seek(0)
    digest = hashlib.blake2b(digest_size=8)
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    return int.from_bytes(digest.digest(), "little") or 1


@dataclass
class Facts:
    """Facts about loaded images beside their pixels.

    Attributes:
        valid: (images,) False for an unreadable one, which has zeros, hash 0 and size 0.
        hash: (images,) of the encoded bytes.
        size: (images, 2) height and width as decoded.
        seconds: (images,) between neighbouring sampled frames of a clip, NaN of an image.
        errors: position and reason of unreadable ones.
        pixel_hash: (images,) of the pixels after resize and crop, 0 of unreadable ones.
        remarks: what was done to images -> of how many of them, see `picture_remarks`.
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
        """The facts of `n` images that are not loaded yet."""
        return cls(
            valid=np.zeros(n, np.bool_),
            hash=np.zeros(n, np.uint64),
            size=np.zeros((n, 2), np.int32),
            seconds=np.full(n, np.nan, np.float32),
            errors=[],
            pixel_hash=np.zeros(n, np.uint64),
        )

    def put(self, start: int, some: Facts) -> None:
        """Take over those of some images, from a position on."""
        rows = slice(start, start + len(some.valid))
        for name in ("valid", "hash", "size", "seconds", "pixel_hash"):
            getattr(self, name)[rows] = getattr(some, name)
        self.errors = sorted(
            [*self.errors, *((start + k, why) for k, why in some.errors)]
        )
        self.remarks.update(some.remarks)


def load_into(
    out: NDArray[np.uint8], opener: Opener, locations: Sequence[Any], recipe: Any
) -> Facts:
    """Load images into `out` (images, channels, height, width), of clips (clips, frames, channels,
    height, width); unreadable ones have zeros there."""
    found = Facts.none(len(locations))

    def load(k: int) -> None:
        try:
            with heard_warnings() as messages:
                image, value = opener.load(locations[k])
                out[k] = recipe.apply(image)
        except ImageError as error:
            out[k] = 0
            found.errors.append((k, error.reason))
        else:
            found.valid[k], found.hash[k] = True, value
            found.pixel_hash[k] = hash64(out[k].tobytes())
            found.size[k] = image.height, image.width
            found.seconds[k] = getattr(image, "seconds", np.nan)
            found.remarks.update({*remarks_on(image), *warned(messages)})

    opener.each(load, len(locations))
    found.errors.sort()
    return found


def one_line(error: BaseException) -> str:
    """An error's text on one line, cut at 200 characters; its type if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:_REASON_LENGTH]
