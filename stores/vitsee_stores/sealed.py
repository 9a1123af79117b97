"""Reading chunks, each verified against the checksum that was committed for it.

The crc32c at the end of a chunk shows that its bytes are whole, not that they are the right ones: a
chunk of another slab or store passes, too. Here each chunk is compared with its entry in the slab's
row of `checksums`, the row with the commit marker, and a write-once array with the manifest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import metadata
from vitsee_stores.chunks import (
    Box,
    boxes,
    check_length,
    checksum,
    chunk_name,
    damage,
    decode,
    defect,
    file_name,
    read_chunk,
    where,
)
from vitsee_stores.errors import StoreError, StoreMismatch, Unreachable
from vitsee_stores.files import Files
from vitsee_stores.layout import CHECKSUM_BYTES, ArraySpec, arrays, places
from vitsee_stores.manifest import Manifest
from vitsee_stores.samples import check_samples


class ChunkPart(NamedTuple):
    """Intersection of a box with one chunk."""

    chunk: tuple[int, ...]  # its index
    inside: Box  # the part within the chunk
    target: Box  # the part within the box


def chunk_parts(spec: ArraySpec, box: Box) -> list[ChunkPart]:
    """The intersections of `box` (start, stop on every axis) with chunks."""
    touched = [
        range(part.start // size, math.ceil(part.stop / size))
        for part, size in zip(box, spec.chunks, strict=True)
    ]
    parts = []
    for index in itertools.product(*touched):
        inside = []
        target = []
        for i, part, size in zip(index, box, spec.chunks, strict=True):
            start = max(part.start, i * size)
            stop = min(part.stop, (i + 1) * size)
            inside.append(slice(start - i * size, stop - i * size))
            target.append(slice(start - part.start, stop - part.start))
        parts.append(ChunkPart(index, tuple(inside), tuple(target)))
    return parts


class VerifiedChunks:
    """The chunks of one store. Rows of `checksums` are cached: four bytes per chunk. markers:
    commit markers that were already read, by slab."""

    def __init__(
        self,
        files: Files,
        manifest: Manifest,
        markers: Mapping[int, Mapping[str, Any]] | None = None,
    ):
        self.files = files
        self.manifest = manifest
        self._markers = markers or {}
        self.specs = arrays(manifest.plan)
        self._places = places(self.specs)
        self._rows: dict[int, NDArray[np.uint32]] = {}

    def read(self, spec: ArraySpec, index: Sequence[int]) -> NDArray[Any]:
        """One whole chunk, padding included. An uncompressed chunk is in memory that this thread's
        next read reuses. Raises StoreError: missing, unreadable, damaged, or not the chunk that was
        committed."""
        if spec.per == "commit":  # it seals the other chunks
            self.read_row(index[0])
            return read_chunk(self.files, spec, index)[0]
        expected = self.expected(spec, index)
        block, actual = read_chunk(self.files, spec, index)
        if actual != expected and (
            spec.per == "once" or actual != self.expected(spec, index, again=True)
        ):
            raise damage(
                self.files, spec, index, "is not the chunk that was committed here"
            )
        return block

    def expected(self, spec: ArraySpec, index: Sequence[int], again: bool = False) -> int:
        """The committed checksum of a chunk; `again` reads the slab's row anew, as the slab may
        have been rewritten since. Raises StoreError: the slab's marker or row is damaged, or from
        another slab or store."""
        if spec.per == "once":
            return self.manifest.checksums[spec.path]
        slab = index[0]
        if again or slab not in self._rows:
            self._rows[slab] = self.read_row(
                slab, None if again else self._markers.get(slab)
            )
        return int(self._rows[slab][self.row_offset(spec, index)])

    def row_offset(self, spec: ArraySpec, index: Sequence[int]) -> int:
        """Return the position of a chunk's checksum in its slab's row of `checksums`."""
        within = 0
        for i, n in zip(index[1:], spec.grid[1:], strict=True):
            within = within * n + i
        return self._places[spec.path] + within

    def read_row(
        self, slab: int, marker: Mapping[str, Any] | None = None
    ) -> NDArray[np.uint32]:
        """(chunks,) the checksums of a slab's chunks, as sealed by its marker. marker: its
        contents, if already read. Raises StoreError: the marker or the row is missing, damaged, or
        from another slab or store; StoreMismatch: another store is there now."""
        spec = self.specs["checksums"]
        index = (slab, 0)
        if marker is None:
            marker = metadata.read_marker(
                self.files, slab, self.specs["commits"], self.manifest
            )
        if marker is None:
            if metadata.read_root(self.files)[0].store_id != self.manifest.store_id:
                raise StoreMismatch(
                    f"{self.files} was replaced by another store during the work"
                )
            what = "is no sound marker of this slab"
            raise damage(self.files, self.specs["commits"], index, what)
        name = chunk_name(spec, index)
        try:
            data = self.files.read(name, spec.chunk_bytes + CHECKSUM_BYTES)
            row: NDArray[np.uint32] = decode(data, spec)[0]
        except (OSError, ValueError) as error:
            what = defect(self.files, name, error)
        else:
            if checksum(data) == marker["checksums"]:
                return row
            what = "is not the row that the slab's marker seals"
        raise damage(self.files, spec, index, what)

    def samples(self) -> dict[str, NDArray[Any]]:
        """The arrays below `samples/`, by path. Raises StoreError: an array below `samples/` is
        missing, damaged, or not the manifest's."""
        paths = [path for path in self.specs if path.startswith("samples/")]
        parts = {path: self.read_all(self.specs[path]) for path in paths}
        try:
            check_samples(parts, self.manifest.splits)
        except ValueError as error:
            raise StoreError(f"{self.files} is damaged: samples: {error}") from None
        return parts

    def read_box(
        self,
        spec: ArraySpec,
        box: Box,
        out: NDArray[Any] | None = None,
        skip: Callable[[int], bool] = lambda slab: False,
    ) -> NDArray[Any]:
        """The part of an array inside `box` (start, stop on every axis), read in parallel from the
        chunks it touches; into `out` if given.

        Chunks whose place along the first axis is skipped are not opened and read as fill values.
        Raises StoreError: a chunk is missing, damaged, or not the one that was committed.
        """
        shape = tuple(part.stop - part.start for part in box)
        if spec.per == "once" and out is None:
            # A single chunk, whose file size is checked before memory is allocated.
            whole = self.read(spec, (0,) * len(shape))
            return whole[box].copy()
        result = np.empty(shape, spec.dtype) if out is None else out
        if 0 in shape:
            return result

        def read(part: ChunkPart) -> None:
            skipped = spec.per != "once" and skip(part.chunk[0])
            result[part.target] = (
                spec.fill if skipped else self.read(spec, part.chunk)[part.inside]
            )

        parts = chunk_parts(spec, box)
        if spec.per in ("image", "slab"):
            slabs = dict.fromkeys(part.chunk[0] for part in parts)
            self._read_rows(spec, [slab for slab in slabs if not skip(slab)])
        self.files.each(read, parts)
        return result

    def _read_rows(self, spec: ArraySpec, slabs: Iterable[int]) -> None:
        """Prefetch these slabs' checksum rows, once each, to read an array."""
        new = [slab for slab in slabs if slab not in self._rows]
        self._rows.update(
            zip(new, self.files.each_small(self.read_row, new), strict=True)
        )

    def read_all(self, spec: ArraySpec) -> NDArray[Any]:
        """A whole array. Raises StoreError: a chunk is missing, damaged, or not the one that was
        committed."""
        return self.read_box(spec, tuple(slice(0, n) for n in spec.shape))


# ---------------- damage to the chunks of one committed slab

Chunk = tuple[ArraySpec, tuple[int, ...]]

SHOWN = 4
MISSING = "is missing"
# Small arrays that checks of others depend on.
ALWAYS_READ = ("valid", "n_valid", "size")


class SlabChecks:
    """Checks slab after slab: the last four bytes of every chunk; with `deep`, all bytes."""

    def __init__(self, chunks: VerifiedChunks, deep: bool):
        self.chunks = chunks
        self.deep = deep

    def problems(self, slab: int) -> Iterator[str]:
        """One line per problem."""
        try:
            row = self.chunks.read_row(slab)
        except Unreachable:
            raise
        except StoreError as error:
            yield without_advice(error, self.chunks.files)
            return
        valid, problem = self._valid_rows(slab)
        if problem:
            yield problem
        chunks = self._chunks(slab)
        ends = dict(
            zip(
                chunks,
                self.chunks.files.each(partial(self._end, row), chunks),
                strict=True,
            )
        )
        sound = [
            chunk
            for chunk, what in ends.items()
            if not what and (self.deep or chunk[0].path in ALWAYS_READ)
        ]
        read = self.chunks.files.each(partial(self._contents, valid), sound)
        contents = dict(zip(sound, read, strict=True))
        for spec, of_array in itertools.groupby(chunks, key=lambda chunk: chunk[0]):
            indices = [index for _, index in of_array]
            yield from self._missing(
                spec, {index: ends[spec, index] for index in indices}
            )
            checks = [
                contents[spec, index] for index in indices if (spec, index) in contents
            ]
            yield from (problem for problem, _ in checks if problem)
            if not_finite := set[int]().union(*(rows for _, rows in checks)):
                yield _not_finite(spec, slab, not_finite)

    def agree(self, slab: int) -> bool:
        """Whether the marker, the checksum row and the end of every chunk agree."""
        try:
            row = self.chunks.read_row(slab)
        except Unreachable:
            raise
        except StoreError:
            return False
        return not any(
            self.chunks.files.each(partial(self._end, row), self._chunks(slab))
        )

    def _chunks(self, slab: int) -> list[Chunk]:
        specs = [spec for spec in self.chunks.specs.values() if spec.has_slab(slab)]
        return [(spec, index) for spec in specs for index, _ in boxes(spec, slab)]

    def _missing(
        self, spec: ArraySpec, ends: Mapping[tuple[int, ...], str]
    ) -> Iterator[str]:
        """A line for each damaged end of an array's chunks, and one for all missing chunks."""
        absent = [index for index, what in ends.items() if what == MISSING]
        for index, what in ends.items():
            if what not in ("", MISSING):
                yield f"{where(spec, index)}: {file_name(index)} {what}"
        if absent:
            yield (
                f"{where(spec, absent[0])}: {len(absent)} of {len(ends)} chunk files are "
                f"missing: {listed(map(file_name, absent))}"
            )

    def _end(self, row: NDArray[np.uint32], chunk: Chunk) -> str:
        """Check a chunk file's size and trailing checksum; the defect in words, "" if none."""
        spec, index = chunk
        expected = int(row[self.chunks.row_offset(spec, index)])
        files = self.chunks.files
        name = chunk_name(spec, index)
        try:
            size, end = files.read_end(name, CHECKSUM_BYTES)
            check_length(size, spec)
        except (OSError, ValueError) as error:
            return defect(files, name, error)
        if checksum(end) == expected:
            return ""
        return "does not have the checksum that was committed"

    def _contents(
        self, valid: NDArray[np.bool_] | None, chunk: Chunk
    ) -> tuple[str, set[int]]:
        """Check a chunk's bytes: the defect in words, and the rows with unexpected NaN or inf."""
        spec, index = chunk
        try:
            block = self.chunks.read(spec, index)
        except Unreachable:
            raise
        except StoreError as error:
            return without_advice(error, self.chunks.files), set()
        if block.dtype.kind != "f" or (
            valid is None and (spec.per == "image" or spec.pairs)
        ):
            return "", set()
        if spec.pairs and valid is not None:
            i, j = (
                np.flatnonzero(valid[place * length : (place + 1) * length])
                for place, length in zip(index[1:], spec.chunks[1:], strict=True)
            )
            rows_i = i[~np.isfinite(block[0][np.ix_(i, j)]).all(1)]
            return "", set((index[1] * spec.chunks[1] + rows_i).tolist())
        rows = block.reshape(len(block), -1)
        if spec.per == "image" and valid is not None:
            rows = rows[: len(valid)][valid]
            numbers = np.flatnonzero(valid)
        else:
            numbers = np.arange(len(rows))
        # Padding of the chunk along further axes is NaN by design: only the array counts.
        inside = tuple(
            slice(0, n - i * c)
            for i, c, n in zip(index[1:], spec.chunks[1:], spec.shape[1:], strict=True)
        )
        values = rows.reshape(len(rows), *block.shape[1:])[(slice(None), *inside)]
        bad = np.isinf(values) if spec.nan_ok else ~np.isfinite(values)
        return "", set(numbers[bad.any(axis=tuple(range(1, bad.ndim)))].tolist())

    def _valid_rows(self, slab: int) -> tuple[NDArray[np.bool_] | None, str]:
        """Which rows of a slab hold an image, None if that cannot be read; and what is wrong with
        the arrays that say so."""
        specs = self.chunks.specs
        try:
            n = len(
                range(
                    *self.chunks.manifest.plan.rows(slab).indices(specs["valid"].shape[0])
                )
            )
            flags = self.chunks.read(specs["valid"], (slab,))[:n].copy()
            count = int(self.chunks.read(specs["n_valid"], (slab,))[0])
            sizes = self.chunks.read(specs["size"], (slab, 0))[:n].copy()
        except Unreachable:
            raise
        except StoreError:
            return None, ""  # reported with the other chunks
        wrong = ""
        if not np.isin(flags, (0, 1)).all():
            wrong = f"valid, slab {slab}: holds other values than 0 and 1"
        elif count != int(flags.sum()):
            wrong = f"n_valid, slab {slab}: is {count}, but {flags.sum()} rows are valid"
        elif (sizes < 0).any() or sizes[flags == 0].any():
            wrong = (
                f"size, slab {slab}: is negative, or not 0 where no image could be read"
            )
        return flags == 1, wrong


def _not_finite(spec: ArraySpec, slab: int, rows: set[int]) -> str:
    kind = "infinite" if spec.nan_ok else "NaN or infinite"
    images = spec.shape[1] if spec.pairs else spec.chunks[0]  # of a slab
    what = "its sums"
    if spec.pairs or spec.per == "image":
        first = slab * images + min(rows)
        what = f"{len(rows)} rows of readable images, the first is row {first}"
    return f"{where(spec, (slab,))}: {kind} values in {what}"


def listed(items: Iterable[Any]) -> str:
    """The first few items, and their number."""
    names = [str(item) for item in items]
    return ", ".join(names[:SHOWN]) + (
        f", ... ({len(names)})" if len(names) > SHOWN else ""
    )


def without_advice(error: StoreError, files: Files) -> str:
    """A reader's error without the path and the advice that validate's caller already knows."""
    text = str(error).removeprefix(f"{files} is damaged: ")
    return text.removesuffix(f" (run: vitsee validate {files} --deep)")
