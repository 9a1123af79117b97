"""A Gram matrix on disk: tiles of float32 in one file, a descriptive header in another.

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
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import DTypeLike, NDArray

from vitsee_core.similarity.representation import Shift
from vitsee_core.types import Float32, Integers
from vitsee_stores.errors import MissingInput, VitseeError

FORMAT = 3  # since matrices are of scaled features, where these are far from 1
LARGEST_TILE = 1024
MOST_BYTES = 1 << 28  # of a list of rows: larger claims of a header are refused


class DamagedGram(VitseeError):
    """A cached Gram matrix that is gone or does not match its checksums."""

    def __init__(self, path: Path, tile: int, reason: str) -> None:
        super().__init__(f"{path} is {reason} (tile {tile})")
        self.path = path


@dataclass(frozen=True)
class Header:
    """Description of a Gram file.

    Attributes:
        store: its identity and revision.
        rows: the images, as rows of the store.
        batches: empty for one matrix of all rows, else the lengths of consecutive batches in
            `rows`.
        offset: |mean|^2 of the features over their total variance.
        shift: of the rows, for one matrix.
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
        shift = self.shift and {
            "along": _packed(self.shift.along, "<f8"),
            "means": _packed(self.shift.means, "<f8"),
            "squared": self.shift.squared,
            "n_features": self.shift.n_features,
        }
        fields = {
            "format": FORMAT,
            **{"store": self.store, "key": self.key, "rows": _packed(self.rows, "<i8")},
            **{"batches": self.batches, "tile": self.tile, "offset": self.offset},
            **{"checksums": self.checksums, "shift": shift},
        }
        return json.dumps({**fields, "digest": _digest(fields)}).encode()

    @classmethod
    def load(cls, text: bytes) -> Header | None:
        """Parse what `dump` wrote; None for anything else, including other formats."""
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("digest") != _digest(fields) or fields.pop("format") != FORMAT:
                return None
            rows = _unpacked(fields.pop("rows"), "<i8", np.int64)
            for name in ("key", "batches", "checksums"):
                fields[name] = tuple(fields[name])
            if (shift := fields.pop("shift")) is not None:
                for name in ("along", "means"):
                    shift[name] = _unpacked(shift[name], "<f8", np.float64)
                    if len(shift[name]) != len(rows):
                        return None
                shift = Shift(**shift)
            header = cls(rows=rows, shift=shift, **fields)
            return header if len(header.checksums) == header.n_tiles else None
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
        return len(self.batches) or n_tiles(len(self.rows), self.tile)

    @property
    def size_bytes(self) -> int:
        """Size of the file of tiles."""
        return 4 * self.n_tiles * self.tile**2


def format_of(text: bytes) -> int:
    """The format stated in a header; the current one if it states none."""
    try:
        number = json.loads(text)["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return FORMAT
    return number if isinstance(number, int) else FORMAT


def _packed(values: NDArray[Any], dtype: DTypeLike) -> str:
    return base64.b85encode(zlib.compress(values.astype(dtype).tobytes())).decode()


def _unpacked(text: str, stored: DTypeLike, dtype: DTypeLike) -> NDArray[Any]:
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(base64.b85decode(text), MOST_BYTES)
    if not unpacking.eof:
        raise ValueError("too long, or cut short")
    return np.frombuffer(data, stored).astype(dtype)


def _digest(fields: dict[str, Any]) -> int:
    return int(google_crc32c.value(json.dumps(fields, sort_keys=True).encode()))


def read_regular(path: Path) -> bytes:
    """A file's bytes; empty if it is gone, unreadable or not a regular file (a pipe would
    block)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return file.read()
            return b""
    except OSError:
        return b""


def is_whole(path: Path, header: Header) -> bool:
    """Whether there is a regular file of the size that the header implies."""
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == header.size_bytes


def tile_size(n: int) -> int:
    """Side of the tiles of an n x n matrix: as even as possible, at most 1024."""
    return math.ceil(n / math.ceil(n / LARGEST_TILE))


def n_tiles(n: int, size: int) -> int:
    """Number of tiles of the upper triangle of an n x n matrix."""
    along = math.ceil(n / size)
    return along * (along + 1) // 2


def gram_bytes(n: int) -> int:
    """Size on disk of the Gram matrix of n images."""
    size = tile_size(n)
    return n_tiles(n, size) * size**2 * 4


def write_tiles(
    descriptor: int, tiles: Iterable[tuple[int, NDArray[np.float64]]], size: int
) -> tuple[int, ...]:
    """Write tiles (padded to size x size), each to its place; returns their checksums."""
    checksums: dict[int, int] = {}
    for k, tile in tiles:
        block = tile.astype(np.float32, order="C")
        if block.shape != (size, size):
            block = np.zeros((size, size), np.float32)
            block[: tile.shape[0], : tile.shape[1]] = tile
        data = block.data.cast("B")
        at = k * block.nbytes
        checksums[k] = int(google_crc32c.value(block))
        while data:
            done = os.pwrite(descriptor, data, at)
            data = data[done:]
            at = at + done
    return tuple(checksums[k] for k in sorted(checksums))


class GramFile:
    """A complete Gram file; tiles are read on demand, and verified the first time."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.header = header
        self._checked: set[int] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Absolute: another process may have another working directory."""
        return GramFile, (self.path.absolute(), self.header)

    def tile(self, k: int) -> Float32:
        """(t, t) the k-th tile. Raises DamagedGram: gone, cut short, or not what was written."""
        size = self.header.tile
        try:
            block = np.fromfile(
                self.path, np.float32, size * size, offset=k * size * size * 4
            )
        except FileNotFoundError:
            raise DamagedGram(self.path, k, "gone") from None
        except OSError:
            block = np.empty(0, np.float32)
        whole = len(block) == size * size
        if whole and k not in self._checked:
            whole = int(google_crc32c.value(block)) == self.header.checksums[k]
        if not whole:
            raise DamagedGram(self.path, k, "damaged")
        self._checked.add(k)
        return block.reshape(size, size)

    def block(self, i: Integers, j: Integers) -> Float32:
        """(len(i), len(j)) entries of the one matrix, at ascending positions among its rows."""
        size = self.header.tile
        along = math.ceil(len(self.header.rows) / size)
        out = np.empty((len(i), len(j)), np.float32)
        for a, of_i, in_a in _by_tile(i, size):
            for b, of_j, in_b in _by_tile(j, size):
                low = min(a, b)
                high = max(a, b)
                tile = self.tile(low * along - low * (low - 1) // 2 + high - low)
                out[of_i, of_j] = (
                    _cut(tile, in_a, in_b) if a <= b else _cut(tile, in_b, in_a).T
                )
        return out


def _by_tile(places: Integers, size: int) -> Iterable[tuple[int, slice, Integers]]:
    """Each tile along one side that holds some of `places`: its number, which of them it holds, and
    where they are within it."""
    for a in range(int(places[0]) // size, int(places[-1]) // size + 1):
        low, high = np.searchsorted(places, [a * size, (a + 1) * size])
        if high > low:
            yield a, slice(int(low), int(high)), places[low:high] - a * size


def _cut(tile: Float32, i: Integers, j: Integers) -> Float32:
    """tile[i][:, j]; runs become slices."""
    return tile[_run(i)][:, _run(j)]


def _run(places: Integers) -> slice | Integers:
    first = int(places[0])
    last = int(places[-1])
    if last - first + 1 == len(places):
        return slice(first, last + 1)
    return places


class GramView:
    """Part of a Gram matrix on disk: some rows of a store, in any order."""

    def __init__(self, file: GramFile, rows: Integers) -> None:
        self.file = file
        self._places = np.searchsorted(file.header.rows, rows)
        self.n = len(rows)
        self._ascending = bool((np.diff(rows) > 0).all())

    @property
    def shift(self) -> Shift:
        """The shift for inner products of the original features; see `raw_gram`. Raises
        MissingInput: a matrix of single batches, which are cached without."""
        if self.file.header.shift is None:
            raise MissingInput(
                f"{self.file.path} holds Gram matrices of batches, kept without what inner "
                "products of the features themselves need (cosine, Pearson)"
            )
        return self.file.header.shift.of(self._places)

    def block(self, i: slice, j: slice) -> Float32:
        """(len(i), len(j)) entries of consecutive rows of the view."""
        along = self._places[i]
        across = self._places[j]
        if self._ascending:
            return self.file.block(along, across)
        of_i = np.argsort(along)
        of_j = np.argsort(across)
        out = np.empty((len(along), len(across)), np.float32)
        out[np.ix_(of_i, of_j)] = self.file.block(along[of_i], across[of_j])
        return out


def covers(header: Header, rows: Integers) -> bool:
    """Whether a header's matrix contains all of `rows`."""
    return not header.batches and bool(
        np.isin(rows, header.rows, assume_unique=True).all()
    )


def same_batches(header: Header, batches: Sequence[Integers]) -> bool:
    """Whether a header's matrices are those of these batches."""
    return header.batches == tuple(map(len, batches)) and np.array_equal(
        header.rows, np.concatenate(batches)
    )
