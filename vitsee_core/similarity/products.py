"""Gram matrices from features: each strip of columns is read once and added to all tiles that fit.

    store -> slab (fp16) -> strip: float32 less a mean -> x_i x_j^T -> float64 tile

Each thread reads, casts and multiplies a strip of its own with single-threaded BLAS, and adds it
after the previous strips: the result does not depend on the number of threads.

Costs: a Gram matrix takes n (n + 1) p useful operations; on the CPU a diagonal tile is a symmetric
product (half the work), on a GPU nearly so.

Measured and rejected (two cores with AVX-512, 1,024 images of 75,648 features, where syrk takes
0.27 of 0.34 s): the triangle from blocks of products, by OpenBLAS or MKL, which are slower the
smaller they are; panels of 384 to 2,688 columns cast just before they are multiplied, so that they
stay in the second cache (no difference); adding one triangle only (none); memory-mapped instead of
read files (half the speed). `benchmarks/cka.py rate` prints the time of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vitsee_core.features.matrix import FeatureBlock, FeatureMatrix
from vitsee_core.kernels.backend import (
    Cast,
    MatmulBackend,
    matmul_backend,
    product_in,
    product_size,
)
from vitsee_core.kernels.compiled import shift_half
from vitsee_core.runtime.lanes import OrderedAccess, n_lanes, run_lanes
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.similarity.representation import FeatureOffset
from vitsee_core.similarity.scaling import feature_scale
from vitsee_core.types import Integers
from vitsee_stores.disk import in_this_thread
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.kernels.backend import Staging

MEAN_ROWS = 128
PIECE = 1 << 18  # elements shifted and summed while in cache
HALF_TO_SINGLE = np.dtype(np.float16), np.dtype(np.float32)
NO_SUMS = np.zeros((0, 2), np.float32)


class StripMeans:
    """The mean of each strip over the rows that are read first."""

    def __init__(
        self,
        centred: bool,
        origin: FeatureOffset | None,
        cast: Cast,
        fused: bool = False,
        scale: float = 1.0,
    ) -> None:
        """fused: shift half-precision features by compiled code. scale: of all features, a power of
        two; means and what `origin` records are of scaled features."""
        self._centred = centred
        self._origin = origin
        self._cast = cast
        self._fused = fused
        self._scale = np.float64(scale)
        self._of: dict[int, NDArray[np.float32]] = {}
        self._sums: dict[int, NDArray[np.float32]] = {}

    def has_mean(self, strip: int) -> bool:
        """Whether a strip's mean is known, or none is wanted."""
        return not self._centred or strip in self._of

    def fill(
        self, x: Any, raw: NDArray[Any], strip: int, rows: slice, columns: slice
    ) -> None:
        """x[rows, columns] = raw - its strip's mean, in cache-sized pieces. All columns of the
        first rows come first."""
        if not self._centred:
            self._cast_scaled(x[rows, columns], raw)
            return
        self.take_mean(raw, strip)
        mean = self._of[strip][columns]
        sums = NO_SUMS
        if self._sums_up:
            if strip not in self._sums:
                self._sums[strip] = np.zeros((len(x), 2), np.float32)
            sums = self._sums[strip][rows]
        if self._fused and (raw.dtype, x.dtype) == HALF_TO_SINGLE:
            bits = np.ascontiguousarray(raw).view(np.uint16)
            shift_half(bits, mean, x[rows], columns.start, sums)
            return
        weights = _weights(mean)
        step = max(1, PIECE // raw.shape[1])
        for at in range(0, len(raw), step):
            piece = x[rows, columns][at : at + step]
            self._cast_scaled(piece, raw[at : at + step])
            piece -= mean
            if len(sums):
                sums[at : at + step] += piece @ weights

    def _cast_scaled(self, out: Any, raw: NDArray[Any]) -> None:
        """out = raw * scale. Scaled before the cast, which could not hold what comes of it else."""
        self._cast(out, raw if self._scale == 1 else raw * self._scale)

    @property
    def _sums_up(self) -> bool:
        return self._origin is not None and bool(self._origin.n_rows)

    def take_mean(self, raw: NDArray[Any], strip: int) -> None:
        """Compute a strip's mean from the rows that are read first; later calls do nothing."""
        if self._centred and strip not in self._of:
            self._of[strip] = self._mean(raw, strip)

    def shift(self, x: Any, strip: int, staging: Staging) -> None:
        """x = scale * x - its strip's mean, on the device."""
        if self._scale != 1:
            x *= float(self._scale)
        if self._centred:
            mean = self._of[strip]
            staging.shift(x, mean)
            if self._sums_up:
                self._sums[strip] = staging.times(x, _weights(mean))

    def done(self, strip: int, places: Integers, fresh: NDArray[np.bool_]) -> None:
        """Mark a strip as complete; called in the strips' order."""
        if self._origin is not None and (sums := self._sums.pop(strip, None)) is not None:
            self._origin.add(places, sums[fresh])

    def _mean(self, raw: NDArray[Any], strip: int) -> NDArray[np.float32]:
        chosen = raw[:: max(1, len(raw) // MEAN_ROWS)]
        sample = np.empty(chosen.shape, np.float32)
        self._cast_scaled(sample, chosen)
        mean: NDArray[np.float32] = sample.mean(0)
        if self._origin is not None:
            sample -= mean
            self._origin.centre(strip, mean, sample)
        return mean


def _weights(mean: NDArray[np.float32]) -> NDArray[np.float32]:
    """Factors that give the rows' products with the mean, and their sums."""
    return np.stack([mean, np.ones_like(mean)], 1)


Places = slice | Integers

MOST_COLUMNS = 32768
GOOD_COLUMNS = 16384
FEWEST_COLUMNS = 256
LANES = 2  # threads that strips are sized for, whatever the number of cores


@dataclass(frozen=True)
class GramTile:
    """A requested product of the chosen rows: indices `i` times indices `j`; `i is j` if
    symmetric."""

    i: Places
    j: Places


class Workspace:
    """Buffers that are reused from one matrix to the next: fresh memory of their size costs page
    faults. For one call of `products` at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def take(self, name: str, n: int, dtype: DTypeLike) -> NDArray[Any]:
        """(n,) uninitialised, in the memory of the last call with this name."""
        size = n * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            self._buffers.pop(name, None)  # free the old one first
            buffer = self._buffers[name] = np.empty(size, np.uint8)
        return buffer[:size].view(dtype)

    def clear(self) -> None:
        self._buffers.clear()


@dataclass(frozen=True)
class StripPlan:
    """The division of a pass."""

    at_once: int  # tiles that are computed together
    columns: int  # of a strip
    lanes: int  # number of threads with memory for a strip

    @classmethod
    def of(
        cls,
        features: FeatureMatrix,
        n: int,
        tiles: Sequence[GramTile],
        memory: int,
        item: int,
    ) -> StripPlan:
        """Tiles' sums take three eighths of the memory, the threads' strips as much; the rest is
        for the libraries, and for a tile on its way to disk. Raises VitseeError: not even one tile
        and two narrow strips fit."""
        largest = max(_length(t.i) * _length(t.j) for t in tiles)
        share = memory * 3 // 8
        at_once = max(1, share // (largest * 8))
        # A lane holds its strip, a slab of it as stored, a stored chunk and a product.
        slab = min(features.store.plan.slab, n)
        groups = (
            tiles[first : first + at_once] for first in range(0, len(tiles), at_once)
        )
        used = max(len(_used(n, group)) for group in groups)
        a_column = used * item + slab * features.item_size
        fixed = largest * item + features.chunk_bytes
        p = features.n_features
        least = min(FEWEST_COLUMNS, features.n_features)
        good = min(p, MOST_COLUMNS, max(GOOD_COLUMNS, features.chunk_columns))
        columns = 0
        for lanes in (LANES, 1):
            if columns < least:
                columns = min(good, (share // lanes - fixed) // a_column)
        if columns < least or largest * 8 > share:
            need = max(least * a_column + fixed, largest * 8) * 8 / 3
            raise VitseeError(
                f"{human_bytes(memory)} of memory are too few for {n} images; give --memory "
                f"{human_bytes(need * 1.01).replace(' ', '')} or more, or fewer --images"
            )
        return cls(at_once, columns, max(1, share // (columns * a_column + fixed)))


def products(
    features: FeatureMatrix,
    rows: Integers,
    tiles: Sequence[GramTile],
    *,
    device: str,
    memory: int,
    centred: bool = True,
    dtype: DTypeLike = np.float32,
    precision: str = "fp32",
    fused: bool = False,
    origin: FeatureOffset | None = None,
    workspace: Workspace | None = None,
    progress: Callable[[int], object] | None = None,
) -> Iterator[NDArray[np.float64]]:
    """x_i x_j^T of every tile, in their order; x the features of `rows`, minus a common vector, and
    times a power of two where they are far from 1 (see `scaling`).

    The vector is the mean over some rows of the first slab. Everything derived from the result
    (HSIC, centred kernels) is independent of it, but float32 precision is not (offsets of 300
    standard deviations would cost two digits of CKA).

    Args:
        features: the matrix.
        rows: (n,) rows of the store, ascending.
        tiles: what to compute, in groups that fit the memory; each group reads the rows it needs
            once.
        device: where to multiply: cpu, cuda or cuda:1.
        memory: bytes to stay within, of the host; on a GPU also of the device.
        centred: subtract that vector.
        dtype: of the products; sums over strips are in float64.
        precision: "bf16" rounds the factors of the products; see `kernels.backend`.
        fused: shift half-precision features by compiled code, which takes a second to load; sums
            that `origin` records then round differently.
        origin: records what was subtracted.
        workspace: source of buffers.
        progress: called with the bytes of each finished strip.

    Raises:
        VitseeError: not even one tile and narrow strips fit the memory.
    """
    backend = matmul_backend(device, precision)
    memory = min(memory, backend.free_bytes() or memory)
    item = np.dtype(dtype)
    plan = StripPlan.of(features, len(rows), tiles, memory, item.itemsize)
    lanes = n_lanes(plan.lanes)
    strips = _balanced(features.strips(plan.columns), plan.columns)
    scale = feature_scale(features)
    centres = StripMeans(centred, origin, backend.cast, fused, scale)
    workspace = workspace or Workspace()
    counted = np.zeros(len(rows), bool)
    for first in range(0, len(tiles), plan.at_once):
        group = tiles[first : first + plan.at_once]
        used = _used(len(rows), group)
        local = [_localise(tile, used, len(rows)) for tile in group]
        work = _Pass(features, strips, rows[used], local, centres, backend)
        work.places = used
        work.fresh = ~counted[used]
        counted[used] = True
        yield from work.run(lanes, item, workspace, progress)


def _length(part: Places) -> int:
    if isinstance(part, slice):
        return part.stop - part.start
    return len(part)


def _used(n: int, tiles: Sequence[GramTile]) -> Integers:
    """The indices below n that any of these tiles needs."""
    mask = np.zeros(n, bool)
    for tile in tiles:
        mask[tile.i] = True
        mask[tile.j] = True
    return np.flatnonzero(mask)


def _localise(tile: GramTile, places: Integers, n: int) -> GramTile:
    """The tile in terms of the rows that were read; runs become slices, which are views."""
    to_local = np.full(n, -1)
    to_local[places] = np.arange(len(places))

    def local(part: Places) -> Places:
        shifted: Integers = to_local[part]
        first = int(shifted[0])
        last = int(shifted[-1])
        if last - first + 1 == len(shifted):
            return slice(first, last + 1)
        return shifted

    i = local(tile.i)
    return GramTile(i, i if tile.i is tile.j else local(tile.j))


def _balanced(strips: list[FeatureBlock], columns: int) -> list[FeatureBlock]:
    """Split the last wide strip in two, so that of two threads neither idles meanwhile."""
    if not strips or strips[-1].n_columns < columns // 2 or columns < 2 * FEWEST_COLUMNS:
        return strips
    return [*strips[:-1], *strips[-1].cut(strips[-1].n_columns // 2)]


class _Pass:
    """One reading of the features of some rows, for a group of tiles."""

    places: Integers  # of its rows, among all of the matrix
    fresh: NDArray[np.bool_]  # which of them no earlier group read

    def __init__(
        self,
        features: FeatureMatrix,
        strips: Sequence[FeatureBlock],
        rows: Integers,
        tiles: Sequence[GramTile],
        centres: StripMeans,
        backend: MatmulBackend,
    ) -> None:
        self._strips = strips
        self._tiles = tiles
        self._centres = centres
        self._backend = backend
        self._n = len(rows)
        self._slabs = _by_slab(features, rows)
        self._item_size = features.item_size
        self._slab = features.store.plan.slab
        self._dtype = features.dtype

    def run(
        self,
        lanes: int,
        dtype: np.dtype[Any],
        workspace: Workspace,
        progress: Callable[[int], object] | None,
    ) -> Iterator[NDArray[np.float64]]:
        """The tiles of the products, one after the other."""
        lanes = min(lanes, len(self._strips))
        backend = self._backend
        widest = max(strip.n_columns for strip in self._strips)
        largest = max(product_size(_length(t.i), _length(t.j)) for t in self._tiles)
        staged = [backend.staging(self._n * widest, self._dtype) for _ in range(lanes)]
        buffers = [
            (
                workspace.take(f"strip {k}", 0 if staging else self._n * widest, dtype),
                workspace.take(
                    f"slab {k}", self._slab * widest * self._item_size, np.uint8
                ),
                backend.buffer(workspace.take(f"product {k}", largest, dtype)),
                staging,
            )
            for k, staging in enumerate(staged)
        ]
        sums = [backend.zeros((_length(t.i), _length(t.j))) for t in self._tiles]
        turns = OrderedAccess(len(self._tiles) + 1)

        def work(lane: int, take: Callable[[], int | None]) -> None:
            strip_buffer, slab, memory, staging = buffers[lane]
            while (k := take()) is not None:
                if staging is None:
                    x, read = self._load(k, strip_buffer, slab)
                    on_device = backend.take(x)
                else:
                    on_device, read = self._send(k, staging, slab, dtype)
                for t, tile in enumerate(self._tiles):
                    left = on_device[tile.i]
                    right = left if tile.i is tile.j else on_device[tile.j]
                    product = product_in(memory, len(left), len(right))
                    backend.multiply(left, right, product)
                    with turns.of(k, t):
                        backend.add(sums[t], product)
                with turns.of(k, len(self._tiles)):
                    self._centres.done(k, self.places[self.fresh], self.fresh)
                    if progress is not None:
                        progress(read)

        with backend.one_thread():
            run_lanes(lanes, work, len(self._strips), turns.stop)
        for tile, total in zip(self._tiles, sums, strict=True):
            yield backend.host(total, tile.i is tile.j)

    def _load(
        self, k: int, buffer: NDArray[Any], slab: NDArray[np.uint8]
    ) -> tuple[NDArray[Any], int]:
        """A strip (rows, columns) minus its mean, and the bytes it was read from."""
        strip = self._strips[k]
        size = 0
        x = buffer[: self._n * strip.n_columns].reshape(self._n, strip.n_columns)
        with in_this_thread():
            for span, inside, target in self._slabs:
                whole = slice(0, strip.n_columns)
                pieces: Iterable[tuple[slice, NDArray[Any]]] = (
                    strip.pieces(span, slab)
                    if self._centres.has_mean(k) or strip.in_one_chunk(span)
                    else [(whole, strip.read(span, slab))]
                )
                for columns, values in pieces:
                    size += values.nbytes
                    values = values if inside is None else values[inside]
                    self._centres.fill(x, values, k, target, columns)
        return x, size

    def _send(
        self, k: int, staging: Staging, slab: NDArray[np.uint8], dtype: np.dtype[Any]
    ) -> tuple[Any, int]:
        """A strip on the device, minus its mean; and the bytes it was read from."""
        strip = self._strips[k]
        size = 0
        shape = self._n, strip.n_columns
        room = staging.room(*shape)
        with in_this_thread():
            for span, inside, target in self._slabs:
                values = strip.read(span, slab)
                size += values.nbytes
                room[target] = values if inside is None else values[inside]
                self._centres.take_mean(room[target], k)
        x = staging.send(*shape, dtype)
        self._centres.shift(x, k, staging)
        return x, size


def _by_slab(
    features: FeatureMatrix, rows: Integers
) -> list[tuple[slice, Integers | None, slice]]:
    """The pieces of every slab with rows that count: its rows in the store, which of them count
    (None: all), and their destination."""
    plan = features.store.plan
    spans = []
    for k in range(plan.n_slabs):
        span = plan.rows(k)
        low, high = np.searchsorted(rows, [span.start, span.stop])
        if high > low:
            inside = rows[low:high] - span.start
            whole = high - low == span.stop - span.start
            spans.append((span, None if whole else inside, slice(int(low), int(high))))
    return spans
