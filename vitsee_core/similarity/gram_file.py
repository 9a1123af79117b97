"""Keep a Gram matrix on disk: tiles of float32 in one file, a descriptive header in another.

    <name>.tiles   float32, (tiles, t, t): of one matrix the tiles of the upper triangle row by row
                   (diagonal tiles whole, the last row and column padded with 0), or one matrix per
                   batch
    <name>.json    format, store, features, rows, size of the tiles, a crc32c of each, what the
                   features were shifted by, and a crc32c of all that; written last

The features are shifted by one common vector; the matrix is not centred and keeps its diagonal.
HSIC, centred kernels and ridge regression follow from it, and with the header's `Shift` the inner
products of the features themselves.
"""

from __future__ import annotations

import base64
import json
import math
import os
import stat
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
from numpy.typing import DTypeLike, NDArray

from vitsee_core.similarity.representation import Shift
from vitsee_core.types import Float32, Integers
from vitsee_stores.errors import MissingInput, VitseeError

FORMAT = 3  # since matrices are of scaled features, where these are far from 1
MAX_TILE = 1024  # side of a tile; 4 MiB are read at a time
MAX_BYTES = 1 << 28  # of an array in a header: larger claims are refused, not allocated


class DamagedGram(VitseeError):
    """A cached Gram matrix that is gone or does not match its checksums."""

    def __init__(self, path: Path, tile: int, reason: str) -> None:
        super().__init__(f"{path} is {reason} (tile {tile})")
        self.path = path


@dataclass(frozen=True)
class Header:
    """Description of a Gram file.

    Attributes:
        store: identity and revision of the store.
        key: names the features: site, tokens and what was done to them.
        rows: the images, as rows of the store.
        batches: empty for one matrix of all rows, else the lengths of consecutive batches in
            `rows`.
        tile: side of a tile.
        offset: |mean|^2 of the features over their total variance.
        checksums: crc32c of each tile.
        shift: the shift of `rows`, for one matrix; None for batches.
    """

    store: str
    key: tuple[str, ...]
    rows: Integers
    batches: tuple[int, ...]
    tile: int
    offset: float
    checksums: tuple[int, ...]
    shift: Shift | None

    def dump(self) -> bytes:
        """Return the header as JSON, its arrays compressed, with a checksum of all fields."""
        shift: dict[str, Any] | None = None
        if self.shift is not None:
            shift = {
                "along": _compress(self.shift.along, "<f8"),
                "means": _compress(self.shift.means, "<f8"),
                "squared": self.shift.squared,
                "n_features": self.shift.n_features,
            }
        fields = {
            "format": FORMAT,
            "store": self.store,
            "key": self.key,
            "rows": _compress(self.rows, "<i8"),
            "batches": self.batches,
            "tile": self.tile,
            "offset": self.offset,
            "checksums": self.checksums,
            "shift": shift,
        }
        return json.dumps({**fields, "digest": _checksum_fields(fields)}).encode()

    @classmethod
    def load(cls, text: bytes) -> Header | None:
        """Return the header that `dump` wrote; None for anything else, including other formats.

        Headers lie in folders that others may write, so any content has to end here.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            digest = fields.pop("digest")
            # Before anything is decompressed.
            if digest != _checksum_fields(fields) or fields.pop("format") != FORMAT:
                return None
            rows = _decompress(fields.pop("rows"), "<i8", np.int64)
            for name in ("key", "batches", "checksums"):  # JSON has lists
                fields[name] = tuple(fields[name])
            shift = fields.pop("shift")
            if shift is not None:
                for name in ("along", "means"):
                    shift[name] = _decompress(shift[name], "<f8", np.float64)
                    if len(shift[name]) != len(rows):
                        return None
                shift = Shift(**shift)
            header = cls(rows=rows, shift=shift, **fields)
            if len(header.checksums) != header.n_tiles:
                return None
            return header
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            zlib.error,
        ):
            return None

    @property
    def n_tiles(self) -> int:
        """Number of tiles in the file: one per batch, or those of the upper triangle."""
        return len(self.batches) or n_tiles(len(self.rows), self.tile)

    @property
    def size_bytes(self) -> int:
        """Size of the file of tiles, float32."""
        return 4 * self.n_tiles * self.tile**2


def format_of(text: bytes) -> int:
    """Return the format number of a header; the current one if the header has none."""
    try:
        number = json.loads(text)["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return FORMAT
    return number if isinstance(number, int) else FORMAT


def _compress(values: NDArray[Any], dtype: DTypeLike) -> str:
    """Return an array (n,), stored as `dtype`, as text for JSON."""
    return base64.b85encode(zlib.compress(values.astype(dtype).tobytes())).decode()


def _decompress(text: str, stored: DTypeLike, dtype: DTypeLike) -> NDArray[Any]:
    """Return the array (n,) that `_compress` wrote.

    Raises:
        ValueError: more than `MAX_BYTES`, or cut short.
    """
    decompressor = zlib.decompressobj()
    # At most MAX_BYTES, whatever the text would unpack to.
    data = decompressor.decompress(base64.b85decode(text), MAX_BYTES)
    if not decompressor.eof:
        raise ValueError("too long, or cut short")
    return np.frombuffer(data, stored).astype(dtype)


def _checksum_fields(fields: dict[str, Any]) -> int:
    """Return a crc32c of the fields that does not depend on their order."""
    return int(google_crc32c.value(json.dumps(fields, sort_keys=True).encode()))


def read_regular(path: Path) -> bytes:
    """Return a file's bytes; none if it is gone, unreadable or not a regular file (reading a pipe
    would block)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return file.read()
            return b""
    except OSError:
        return b""


def has_full_size(path: Path, header: Header) -> bool:
    """Return whether `path` is a regular file of the size that the header implies."""
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == header.size_bytes


def tile_size(n: int) -> int:
    """Return the side of the tiles of an n x n matrix: at most `MAX_TILE`, with little padding."""
    # As many tiles as MAX_TILE needs, of equal size: less padding than a short last one.
    return math.ceil(n / math.ceil(n / MAX_TILE))


def n_tiles(n: int, size: int) -> int:
    """Return the number of tiles in the upper triangle of an n x n matrix, with its diagonal."""
    n_tile_rows = math.ceil(n / size)
    return n_tile_rows * (n_tile_rows + 1) // 2


def gram_bytes(n: int) -> int:
    """Return the size on disk of the Gram matrix of n images."""
    size = tile_size(n)
    return n_tiles(n, size) * size**2 * 4


def write_tiles(
    descriptor: int, tiles: Iterable[tuple[int, NDArray[np.float64]]], size: int
) -> tuple[int, ...]:
    """Write tiles to a file and return their checksums, in the order of their numbers.

    Args:
        descriptor: of the open file.
        tiles: (number, values) of each tile, in any order; smaller ones are padded with 0.
        size: side of the padded tiles.
    """
    checksums: dict[int, int] = {}
    for k, tile in tiles:
        # float32 on disk: sums were made in float64.
        block = tile.astype(np.float32, order="C")
        if block.shape != (size, size):
            block = np.zeros((size, size), np.float32)
            block[: tile.shape[0], : tile.shape[1]] = tile
        checksums[k] = int(google_crc32c.value(block))
        data = block.data.cast("B")
        # Padded tiles are of one size, so each can be written and read alone.
        offset = k * block.nbytes
        while data:  # pwrite may write less than it is given
            n_written = os.pwrite(descriptor, data, offset)
            data = data[n_written:]
            offset += n_written
    return tuple(checksums[k] for k in sorted(checksums))


class GramFile:
    """A complete Gram file; tiles are read on demand, and verified the first time."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.header = header
        self._checked: set[int] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the absolute path: another process may have another working directory."""
        return GramFile, (self.path.absolute(), self.header)

    def tile(self, k: int) -> Float32:
        """Return the k-th tile, (t, t).

        Raises:
            DamagedGram: the file is gone, cut short, or not what was written.
        """
        size = self.header.tile
        n_values = size * size
        try:
            block = np.fromfile(self.path, np.float32, n_values, offset=k * n_values * 4)
        except FileNotFoundError:
            raise DamagedGram(self.path, k, "gone") from None
        except OSError:
            block = np.empty(0, np.float32)
        is_intact = len(block) == n_values
        # Once for each tile: later reads of this object trust the file.
        if is_intact and k not in self._checked:
            is_intact = int(google_crc32c.value(block)) == self.header.checksums[k]
        if not is_intact:
            raise DamagedGram(self.path, k, "damaged")
        self._checked.add(k)
        return block.reshape(size, size)

    def block(self, i: Integers, j: Integers) -> Float32:
        """Return the entries (len(i), len(j)) of the one matrix.

        i, j: ascending indices among the header's rows.
        """
        size = self.header.tile
        n_tile_rows = math.ceil(len(self.header.rows) / size)
        out = np.empty((len(i), len(j)), np.float32)
        # Used for each segment of i.
        j_segments = list(_split_by_tile(j, size))
        for a in _split_by_tile(i, size):
            for b in j_segments:
                # Below the diagonal a tile is not stored: it is the mirrored one, transposed.
                low = min(a.tile, b.tile)
                high = max(a.tile, b.tile)
                # Tiles are (0, 0), (0, 1) .. (1, 1) ..: row r of them has n_tile_rows - r.
                row_start = low * n_tile_rows - low * (low - 1) // 2
                tile = self.tile(row_start + high - low)
                if a.tile <= b.tile:
                    values = _select(tile, a.inside, b.inside)
                else:
                    values = _select(tile, b.inside, a.inside).T
                out[a.target, b.target] = values
        return out


class _Segment(NamedTuple):
    """The chosen indices that lie in one row, or column, of tiles."""

    tile: int  # number of that row of tiles
    target: slice  # which of the chosen indices these are
    inside: Integers  # the indices, counted from the tile's start


def _split_by_tile(indices: Integers, size: int) -> Iterable[_Segment]:
    """Yield the segments of ascending indices, one per row of tiles that has any."""
    first_tile = int(indices[0]) // size
    last_tile = int(indices[-1]) // size
    for tile in range(first_tile, last_tile + 1):
        start = tile * size
        low, high = np.searchsorted(indices, [start, start + size]).tolist()
        if high > low:
            yield _Segment(tile, slice(low, high), indices[low:high] - start)


def _select(tile: Float32, i: Integers, j: Integers) -> Float32:
    """Return tile[i][:, j]."""
    return tile[_as_slice(i)][:, _as_slice(j)]


def _as_slice(indices: Integers) -> slice | Integers:
    """Return consecutive indices as a slice, which makes views; others as they are."""
    first = int(indices[0])
    last = int(indices[-1])
    if last - first + 1 == len(indices):
        return slice(first, last + 1)
    return indices


class GramView:
    """The entries of a Gram matrix on disk for rows of a store, in any order.

    Args:
        file: the matrix, which has all of these rows.
        rows: (n,) rows of the store.
    """

    def __init__(self, file: GramFile, rows: Integers) -> None:
        self.file = file
        self._indices = np.searchsorted(file.header.rows, rows)
        self.n = len(rows)
        self._ascending = bool((np.diff(rows) > 0).all())

    @property
    def shift(self) -> Shift:
        """What `raw_gram` needs for inner products of the features before they were shifted.

        Raises:
            MissingInput: the file holds matrices of single batches, which are cached without it.
        """
        if self.file.header.shift is None:
            raise MissingInput(
                f"{self.file.path} holds Gram matrices of batches, kept without what inner "
                "products of the features themselves need (cosine, Pearson)"
            )
        return self.file.header.shift.of(self._indices)

    def block(self, i: slice, j: slice) -> Float32:
        """Return the entries (len(i), len(j)) of consecutive rows of the view."""
        row_indices = self._indices[i]
        column_indices = self._indices[j]
        if self._ascending:
            return self.file.block(row_indices, column_indices)
        # Read in ascending order, then put each entry where the view has it.
        row_order = np.argsort(row_indices)
        column_order = np.argsort(column_indices)
        block = self.file.block(row_indices[row_order], column_indices[column_order])
        out = np.empty_like(block)
        out[np.ix_(row_order, column_order)] = block
        return out


def covers(header: Header, rows: Integers) -> bool:
    """Return whether a header's matrix is one of all images and has all of `rows`."""
    if header.batches:
        return False
    return bool(np.isin(rows, header.rows, assume_unique=True).all())


def has_batches(header: Header, batches: Sequence[Integers]) -> bool:
    """Return whether a header's matrices are those of these batches, in their order."""
    if header.batches != tuple(map(len, batches)):
        return False
    return np.array_equal(header.rows, np.concatenate(batches))
