"""A Gram matrix on disk: tiles of float32 in one file, a header that says of what in another.

    <name>.tiles   float32, (tiles, t, t): of one matrix the tiles of the upper triangle row by row
                   (diagonal tiles whole, the last row and column padded with 0), or one matrix a
                   batch
    <name>.json    store, features, rows, size of the tiles, a crc32c of each; written last

The matrix is that of the features less one common vector, in the plain sense: not centred, with
its diagonal. HSIC, centred kernels and ridge regression follow from it.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from vitsee_stores.errors import VitseeError

FORMAT = 1
LARGEST_TILE = 1024
Float32 = NDArray[np.float32]
Rows = NDArray[np.int64]


class DamagedGram(VitseeError):
    """A cached Gram matrix that does not match its checksums."""

    def __init__(self, path: Path, tile: int) -> None:
        super().__init__(f"{path} is damaged (tile {tile})")
        self.path = path


@dataclass(frozen=True)
class Header:
    """What a Gram file holds.

    store: its identity and revision. rows: the images, in rows of the store; batches: empty for one
    matrix of all rows, else the lengths of the batches that `rows` is cut into, in their order.
    offset: |mean|^2 of the features over their total variance.
    """

    store: str
    key: tuple[str, ...]
    rows: Rows
    batches: tuple[int, ...]
    tile: int
    offset: float
    checksums: tuple[int, ...]

    def dump(self) -> bytes:
        """As JSON."""
        packed = base64.b85encode(zlib.compress(self.rows.astype("<i8").tobytes())).decode()
        fields = {**asdict(self), "rows": packed, "format": FORMAT}
        return json.dumps(fields).encode()

    @classmethod
    def load(cls, text: bytes) -> Header | None:
        """What `dump` wrote; None of anything else."""
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("format") != FORMAT:
                return None
            packed = zlib.decompress(base64.b85decode(fields["rows"]))
            fields["rows"] = np.frombuffer(packed, "<i8").astype(np.int64)
            for name in ("key", "batches", "checksums"):
                fields[name] = tuple(fields[name])
            header = cls(**fields)
            expected = len(header.batches) or n_tiles(len(header.rows), header.tile)
            return header if len(header.checksums) == expected else None
        except (ValueError, KeyError, TypeError, AttributeError, zlib.error):
            return None


def tile_size(n: int) -> int:
    """Length of the tiles of an n x n matrix: as even as possible, at most 1024."""
    return math.ceil(n / math.ceil(n / LARGEST_TILE))


def n_tiles(n: int, size: int) -> int:
    """Number of tiles of the upper triangle of an n x n matrix."""
    along = math.ceil(n / size)
    return along * (along + 1) // 2


def gram_bytes(n: int) -> int:
    """Bytes on disk of the Gram matrix of n images."""
    size = tile_size(n)
    return n_tiles(n, size) * size**2 * 4


def write_tiles(path: Path, tiles: Iterable[NDArray[np.float64]], size: int) -> tuple[int, ...]:
    """Write tiles (padded to size x size) one after the other; their checksums.

    Raises:
        OSError: the disk refused them.
    """
    checksums = []
    with open(path, "xb") as file:
        for tile in tiles:
            block = np.zeros((size, size), np.float32)
            block[: tile.shape[0], : tile.shape[1]] = tile
            checksums.append(int(google_crc32c.value(block)))
            file.write(block.data)
    return tuple(checksums)


class GramFile:
    """A Gram file that is whole; tiles are read when asked for, and checked the first time."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.header = path, header
        self._checked: set[int] = set()

    def tile(self, k: int) -> Float32:
        """(t, t) the k-th tile.

        Raises:
            DamagedGram: gone, cut short, or not what was written.
        """
        size = self.header.tile
        try:
            block = np.fromfile(self.path, np.float32, size * size, offset=k * size * size * 4)
        except OSError:
            block = np.empty(0, np.float32)
        whole = len(block) == size * size
        if whole and k not in self._checked:
            whole = int(google_crc32c.value(block)) == self.header.checksums[k]
        if not whole:
            raise DamagedGram(self.path, k)
        self._checked.add(k)
        return block.reshape(size, size)

    def block(self, i: Rows, j: Rows) -> Float32:
        """(len(i), len(j)) entries of the one matrix, at ascending places among its rows."""
        size = self.header.tile
        along = math.ceil(len(self.header.rows) / size)
        out = np.empty((len(i), len(j)), np.float32)
        for a, of_i, in_a in _by_tile(i, size):
            for b, of_j, in_b in _by_tile(j, size):
                low, high = min(a, b), max(a, b)
                tile = self.tile(low * along - low * (low - 1) // 2 + high - low)
                out[of_i, of_j] = _cut(tile, in_a, in_b) if a <= b else _cut(tile, in_b, in_a).T
        return out


def _by_tile(places: Rows, size: int) -> Iterable[tuple[int, slice, Rows]]:
    """Of each tile along one side that holds some of `places`: its number, which of them it holds,
    and where they are within it."""
    for a in range(int(places[0]) // size, int(places[-1]) // size + 1):
        low, high = np.searchsorted(places, [a * size, (a + 1) * size])
        if high > low:
            yield a, slice(int(low), int(high)), places[low:high] - a * size


def _cut(tile: Float32, i: Rows, j: Rows) -> Float32:
    """tile[i][:, j], by slices where they are runs."""
    return tile[_run(i)][:, _run(j)]


def _run(places: Rows) -> slice | Rows:
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1) if last - first + 1 == len(places) else places


class GramView:
    """The Gram matrix of some rows of a store: a part of one that is on disk."""

    def __init__(self, file: GramFile, rows: Rows) -> None:
        self.file = file
        self._places = np.searchsorted(file.header.rows, rows)
        self.n = len(rows)

    def block(self, i: slice, j: slice) -> Float32:
        """(len(i), len(j)) entries of consecutive rows of the view."""
        return self.file.block(self._places[i], self._places[j])


def covers(header: Header, rows: Rows) -> bool:
    """Whether a header's matrix holds all of `rows` (ascending)."""
    return not header.batches and bool(np.isin(rows, header.rows, assume_unique=True).all())


def same_batches(header: Header, batches: Sequence[Rows]) -> bool:
    """Whether a header's matrices are those of these batches."""
    return header.batches == tuple(map(len, batches)) and np.array_equal(
        header.rows, np.concatenate(batches)
    )
