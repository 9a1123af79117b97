"""Damage to the chunks of one committed slab."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.chunks import (
    boxes,
    check_length,
    checksum,
    chunk_name,
    defect,
    file_name,
    where,
)
from vitsee_stores.errors import StoreError, Unreachable
from vitsee_stores.files import Files
from vitsee_stores.layout import CHECKSUM_BYTES, ArraySpec
from vitsee_stores.sealed import VerifiedChunks

Chunk = tuple[ArraySpec, tuple[int, ...]]

SHOWN = 4
MISSING = "is missing"
# Small arrays that checks of others depend on.
ALWAYS_READ = ("valid", "n_valid", "size")


class SlabChecks:
    """Checks slab after slab: the last four bytes of every chunk; with `deep`, all bytes."""

    def __init__(self, chunks: VerifiedChunks, deep: bool):
        self.chunks, self.deep = chunks, deep

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
            zip(chunks, self.chunks.files.each(partial(self._end, row), chunks), strict=True)
        )
        sound = [chunk for chunk, what in ends.items() if not what and self._is_read(chunk[0])]
        read = self.chunks.files.each(partial(self._contents, valid), sound)
        contents = dict(zip(sound, read, strict=True))
        for spec, of_array in itertools.groupby(chunks, key=lambda chunk: chunk[0]):
            indices = [index for _, index in of_array]
            yield from self._missing(spec, {index: ends[spec, index] for index in indices})
            checks = [contents[spec, index] for index in indices if (spec, index) in contents]
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
        return not any(self.chunks.files.each(partial(self._end, row), self._chunks(slab)))

    def _chunks(self, slab: int) -> list[Chunk]:
        specs = [spec for spec in self.chunks.specs.values() if spec.has_slab(slab)]
        return [(spec, index) for spec in specs for index, _ in boxes(spec, slab)]

    def _is_read(self, spec: ArraySpec) -> bool:
        return self.deep or spec.path in ALWAYS_READ

    def _missing(self, spec: ArraySpec, ends: Mapping[tuple[int, ...], str]) -> Iterator[str]:
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
        expected, files = int(row[self.chunks.place(spec, index)]), self.chunks.files
        name = chunk_name(spec, index)
        try:
            size, end = files.read_end(name, CHECKSUM_BYTES)
            check_length(size, spec)
        except (OSError, ValueError) as error:
            return defect(files, name, error)
        return "" if checksum(end) == expected else "does not have the checksum that was committed"

    def _contents(self, valid: NDArray[np.bool_] | None, chunk: Chunk) -> tuple[str, set[int]]:
        """Check a chunk's bytes: the defect in words, and the rows with unexpected NaN or inf."""
        spec, index = chunk
        try:
            block = self.chunks.read(spec, index)
        except Unreachable:
            raise
        except StoreError as error:
            return without_advice(error, self.chunks.files), set()
        if block.dtype.kind != "f" or (valid is None and (spec.per == "image" or spec.pairs)):
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
            n = len(range(*self.chunks.manifest.plan.rows(slab).indices(specs["valid"].shape[0])))
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
            wrong = f"size, slab {slab}: is negative, or not 0 where no image could be read"
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
    return ", ".join(names[:SHOWN]) + (f", ... ({len(names)})" if len(names) > SHOWN else "")


def without_advice(error: StoreError, files: Files) -> str:
    """A reader's error without the path and the advice that validate's caller already knows."""
    text = str(error).removeprefix(f"{files} is damaged: ")
    return text.removesuffix(f" (run: vitsee validate {files} --deep)")
