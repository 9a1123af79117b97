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
from vitsee_stores.layout import CHECKSUM_BYTES, ArraySpec, arrays, checksum_offsets
from vitsee_stores.manifest import Manifest
from vitsee_stores.samples import check_samples


class ChunkPart(NamedTuple):
    """The intersection of a box with one chunk."""

    chunk: tuple[int, ...]  # index of the chunk
    inside: Box  # the intersection, as ranges within the chunk
    target: Box  # the intersection, as ranges within the box


def chunk_parts(spec: ArraySpec, box: Box) -> list[ChunkPart]:
    """Return the intersections of `box`, (start, stop) on every axis, with chunks."""
    touched = [
        range(axis_range.start // size, math.ceil(axis_range.stop / size))
        for axis_range, size in zip(box, spec.chunks, strict=True)
    ]
    parts = []
    for index in itertools.product(*touched):
        inside = []
        target = []
        for i, axis_range, size in zip(index, box, spec.chunks, strict=True):
            chunk_start = i * size
            start = max(axis_range.start, chunk_start)
            stop = min(axis_range.stop, chunk_start + size)
            inside.append(slice(start - chunk_start, stop - chunk_start))
            target.append(slice(start - axis_range.start, stop - axis_range.start))
        parts.append(ChunkPart(index, tuple(inside), tuple(target)))
    return parts


class VerifiedChunks:
    """The chunks of one store, each compared with its committed checksum when it is read.

    The rows of `checksums` are cached: four bytes for each chunk.

    Attributes:
        files: the store's files.
        manifest: its manifest.
        specs: path -> spec of every array.
    """

    def __init__(
        self,
        files: Files,
        manifest: Manifest,
        markers: Mapping[int, Mapping[str, Any]] | None = None,
    ):
        """Read chunks of a store.

        Args:
            markers: slab -> commit marker, for markers that were read already.
        """
        self.files = files
        self.manifest = manifest
        self._markers = markers or {}
        self.specs = arrays(manifest.plan)
        # path -> offset in a row of `checksums`
        self._offsets = checksum_offsets(self.specs)
        self._rows: dict[int, NDArray[np.uint32]] = {}  # slab -> its row of `checksums`

    def read(self, spec: ArraySpec, index: Sequence[int]) -> NDArray[Any]:
        """Return one chunk, padding included.

        An uncompressed chunk is in memory that this thread's next read reuses.

        Raises:
            StoreError: the chunk is missing, unreadable, damaged, or not the one that was
                committed.
        """
        if spec.per == "commit":  # it seals the other chunks
            self.read_row(index[0])
            return read_chunk(self.files, spec, index)[0]
        expected = self.expected(spec, index)
        block, actual = read_chunk(self.files, spec, index)
        is_committed = actual == expected
        if not is_committed and spec.per != "once":
            # The slab may have been made again since its row was cached.
            is_committed = actual == self.expected(spec, index, again=True)
        if not is_committed:
            raise damage(
                self.files, spec, index, "is not the chunk that was committed here"
            )
        return block

    def expected(self, spec: ArraySpec, index: Sequence[int], again: bool = False) -> int:
        """Return the committed checksum of a chunk.

        Args:
            again: whether to read the slab's row of checksums anew, not from the cache.

        Raises:
            StoreError: the slab's marker or row is damaged, or from another slab or store.
        """
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
        return self._offsets[spec.path] + within

    def read_row(
        self, slab: int, marker: Mapping[str, Any] | None = None
    ) -> NDArray[np.uint32]:
        """Return the checksums of a slab's chunks, (chunks,), as sealed by its marker.

        Args:
            slab: index of the slab.
            marker: the slab's commit marker, if it was read already.

        Raises:
            StoreError: the marker or the row is missing, damaged, or from another slab or
                store.
            StoreMismatch: another store is there now.
        """
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
            problem = "is no sound marker of this slab"
            raise damage(self.files, self.specs["commits"], index, problem)
        name = chunk_name(spec, index)
        try:
            data = self.files.read(name, spec.chunk_bytes + CHECKSUM_BYTES)
            row: NDArray[np.uint32] = decode(data, spec)[0]
        except (OSError, ValueError) as error:
            problem = defect(self.files, name, error)
        else:
            if checksum(data) == marker["checksums"]:
                return row
            problem = "is not the row that the slab's marker seals"
        raise damage(self.files, spec, index, problem)

    def samples(self) -> dict[str, NDArray[Any]]:
        """Return the arrays below `samples/`, by path.

        Raises:
            StoreError: one of them is missing, damaged, or not the manifest's.
        """
        paths = [path for path in self.specs if path.startswith("samples/")]
        sample_arrays = {path: self.read_all(self.specs[path]) for path in paths}
        try:
            check_samples(sample_arrays, self.manifest.splits)
        except ValueError as error:
            raise StoreError(f"{self.files} is damaged: samples: {error}") from None
        return sample_arrays

    def read_box(
        self,
        spec: ArraySpec,
        box: Box,
        out: NDArray[Any] | None = None,
        skip: Callable[[int], bool] = lambda slab: False,
    ) -> NDArray[Any]:
        """Return the values of an array inside a box, read in parallel from its chunks.

        Args:
            spec: the array.
            box: (start, stop) on every axis.
            out: array of the box's shape to read into; by default a new one.
            skip: whether the chunks of a slab are left out. They are not opened and read as
                fill values.

        Raises:
            StoreError: a chunk is missing, damaged, or not the one that was committed.
        """
        shape = tuple(axis_range.stop - axis_range.start for axis_range in box)
        if spec.per == "once" and out is None:
            # A single chunk, whose file size is checked before memory is allocated: a manifest
            # may claim any shape.
            values = self.read(spec, (0,) * len(shape))
            return values[box].copy()
        result = np.empty(shape, spec.dtype) if out is None else out
        if 0 in shape:
            return result

        def read(part: ChunkPart) -> None:
            """Read one chunk, and copy its part into the result."""
            if spec.per != "once" and skip(part.chunk[0]):
                result[part.target] = spec.fill
            else:
                result[part.target] = self.read(spec, part.chunk)[part.inside]

        parts = chunk_parts(spec, box)
        if spec.per in ("image", "slab"):
            slabs = dict.fromkeys(part.chunk[0] for part in parts)
            self._read_rows(spec, [slab for slab in slabs if not skip(slab)])
        self.files.each_in_threads(read, parts)
        return result

    def _read_rows(self, spec: ArraySpec, slabs: Iterable[int]) -> None:
        """Prefetch these slabs' checksum rows, once each, to read an array."""
        new = [slab for slab in slabs if slab not in self._rows]
        self._rows.update(
            zip(new, self.files.each_small(self.read_row, new), strict=True)
        )

    def read_all(self, spec: ArraySpec) -> NDArray[Any]:
        """Return all values of an array.

        Raises:
            StoreError: a chunk is missing, damaged, or not the one that was committed.
        """
        return self.read_box(spec, tuple(slice(0, n) for n in spec.shape))


# ---------------- damage to the chunks of one committed slab

Chunk = tuple[ArraySpec, tuple[int, ...]]

MAX_LISTED = 4
MISSING = "is missing"
# Small arrays that checks of others depend on.
ALWAYS_READ = ("valid", "n_valid", "size")


class SlabChecks:
    """Checks the chunks of committed slabs.

    Attributes:
        chunks: chunks of the store.
        deep: whether all bytes of a chunk are read, or its last four alone: its checksum.
    """

    def __init__(self, chunks: VerifiedChunks, deep: bool):
        self.chunks = chunks
        self.deep = deep

    def problems(self, slab: int) -> Iterator[str]:
        """Yield a line for each problem of a slab."""
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
        # chunk -> what is wrong with the end of its file, "" if nothing is
        end_problems = self.chunks.files.each_in_threads(
            partial(self._check_end, row), chunks
        )
        ends = dict(zip(chunks, end_problems, strict=True))
        # Only files whose end is sound are read as a whole.
        to_read = [
            chunk
            for chunk, end_problem in ends.items()
            if not end_problem and (self.deep or chunk[0].path in ALWAYS_READ)
        ]
        checks = self.chunks.files.each_in_threads(
            partial(self._check_contents, valid), to_read
        )
        contents = dict(zip(to_read, checks, strict=True))
        for spec, chunks_of_array in itertools.groupby(
            chunks, key=lambda chunk: chunk[0]
        ):
            indices = [index for _, index in chunks_of_array]
            yield from self._end_lines(
                spec, {index: ends[spec, index] for index in indices}
            )
            not_finite_rows: set[int] = set()
            for index in indices:
                if (spec, index) in contents:
                    content_problem, rows = contents[spec, index]
                    if content_problem:
                        yield content_problem
                    not_finite_rows |= rows
            if not_finite_rows:
                yield _not_finite(spec, slab, not_finite_rows)

    def agree(self, slab: int) -> bool:
        """Return whether the marker, the checksum row and the end of every chunk agree."""
        try:
            row = self.chunks.read_row(slab)
        except Unreachable:
            raise
        except StoreError:
            return False
        end_problems = self.chunks.files.each_in_threads(
            partial(self._check_end, row), self._chunks(slab)
        )
        return not any(end_problems)

    def _chunks(self, slab: int) -> list[Chunk]:
        """Return the spec and index of every chunk that is written with a slab."""
        specs = [spec for spec in self.chunks.specs.values() if spec.has_slab(slab)]
        return [(spec, index) for spec in specs for index, _ in boxes(spec, slab)]

    def _end_lines(
        self, spec: ArraySpec, ends: Mapping[tuple[int, ...], str]
    ) -> Iterator[str]:
        """Yield a line for each damaged chunk of an array, and one for all missing chunks."""
        absent = [index for index, problem in ends.items() if problem == MISSING]
        for index, problem in ends.items():
            if problem not in ("", MISSING):
                yield f"{where(spec, index)}: {file_name(index)} {problem}"
        if absent:
            yield (
                f"{where(spec, absent[0])}: {len(absent)} of {len(ends)} chunk files are "
                f"missing: {listed(map(file_name, absent))}"
            )

    def _check_end(self, row: NDArray[np.uint32], chunk: Chunk) -> str:
        """Check the size of a chunk's file and the checksum at its end.

        Args:
            row: committed checksums of the slab's chunks.
            chunk: spec and index of the chunk.

        Returns:
            The defect in words; "" if there is none.
        """
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

    def _check_contents(
        self, valid: NDArray[np.bool_] | None, chunk: Chunk
    ) -> tuple[str, set[int]]:
        """Check all bytes of a chunk.

        Args:
            valid: (images of the slab,) which could be read; None if that is not known.
            chunk: spec and index of the chunk.

        Returns:
            The defect in words, "" if there is none; and the rows within the slab that have
            unexpected NaN or infinite values.
        """
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
            # (1, images i, images j): both axes count images, and each is cut into chunks.
            first_i = index[1] * spec.chunks[1]
            first_j = index[2] * spec.chunks[2]
            valid_i = np.flatnonzero(valid[first_i : first_i + spec.chunks[1]])
            valid_j = np.flatnonzero(valid[first_j : first_j + spec.chunks[2]])
            is_finite = np.isfinite(block[0][np.ix_(valid_i, valid_j)]).all(axis=1)
            return "", set((first_i + valid_i[~is_finite]).tolist())
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
        """Return which rows of a slab hold an image.

        Returns:
            (images of the slab,) boolean, None if the arrays cannot be read; and a line about
            a contradiction among these arrays, "" if there is none.
        """
        specs = self.chunks.specs
        try:
            rows = self.chunks.manifest.plan.rows(slab)
            n_rows = rows.stop - rows.start
            # Copies, as the next read reuses the memory of an uncompressed chunk.
            flags = self.chunks.read(specs["valid"], (slab,))[:n_rows].copy()
            count = int(self.chunks.read(specs["n_valid"], (slab,))[0])
            sizes = self.chunks.read(specs["size"], (slab, 0))[:n_rows].copy()
        except Unreachable:
            raise
        except StoreError:
            return None, ""  # reported with the other chunks
        # An image that was read, but of which the model gives NaN, has a size and is not valid.
        wrong = ""
        if not np.isin(flags, (0, 1)).all():
            wrong = f"valid, slab {slab}: holds other values than 0 and 1"
        elif count != int(flags.sum()):
            wrong = f"n_valid, slab {slab}: is {count}, but {flags.sum()} rows are valid"
        elif (sizes < 0).any() or (sizes == 0).any(axis=1)[sizes.any(axis=1)].any():
            wrong = f"size, slab {slab}: is negative, or has one side of 0"
        return flags == 1, wrong


def _not_finite(spec: ArraySpec, slab: int, rows: set[int]) -> str:
    """Return the line about unexpected NaN or infinite values in these rows of a slab."""
    kind = "infinite" if spec.nan_ok else "NaN or infinite"
    location = "its sums"
    if spec.pairs or spec.per == "image":
        images_per_slab = spec.shape[1] if spec.pairs else spec.chunks[0]
        first = slab * images_per_slab + min(rows)
        location = f"{len(rows)} rows of readable images, the first is row {first}"
    return f"{where(spec, (slab,))}: {kind} values in {location}"


def listed(items: Iterable[Any]) -> str:
    """Return the first few items in words, and their number if there are more."""
    names = [str(item) for item in items]
    text = ", ".join(names[:MAX_LISTED])
    if len(names) > MAX_LISTED:
        text += f", ... ({len(names)})"
    return text


def without_advice(error: StoreError, files: Files) -> str:
    """Return a reader's error without its path and advice, which validate's user knows."""
    text = str(error).removeprefix(f"{files} is damaged: ")
    return text.removesuffix(f" (run: vitsee validate {files} --deep)")
