"""Compute Gram matrices from features: each strip of columns is read once and added to all tiles.

    store -> slab (fp16) -> strip: float32 less a mean -> x_i x_j^T -> float64 tile

A tile is one block of a Gram matrix, rows i times rows j; a lane is a thread.

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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vitsee_core.features.matrix import FeatureBlock, FeatureMatrix
from vitsee_core.kernels.backend import (
    MatmulBackend,
    matmul_backend,
    product_in,
    product_size,
)
from vitsee_core.runtime.lanes import OrderedAccess, n_lanes, run_lanes
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.similarity.representation import FeatureOffset
from vitsee_core.similarity.scaling import feature_scale
from vitsee_core.similarity.strip_means import StripMeans
from vitsee_core.types import Integers
from vitsee_stores.disk import in_this_thread
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.kernels.backend import Staging

Indices = slice | Integers

# Columns of a strip: GOOD_COLUMNS if the memory allows it, up to MAX_COLUMNS if a stored chunk
# has more columns, so that it is decoded once.
MAX_COLUMNS = 32768
GOOD_COLUMNS = 16384
MIN_COLUMNS = 256
LANES = 2  # threads that strips are sized for, whatever the number of cores


class GramTile(NamedTuple):
    """A requested product: the features of rows `i` times those of rows `j`, by their indices among
    the chosen rows; `i is j` if symmetric."""

    i: Indices
    j: Indices


class Workspace:
    """Buffers that are reused from one matrix to the next: fresh memory of their size costs page
    faults. For one call of `products` at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def take(self, name: str, n: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return (n,) uninitialised numbers, in the memory of the last call with this name."""
        size = n * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            self._buffers.pop(name, None)  # free the old one first
            buffer = self._buffers[name] = np.empty(size, np.uint8)
        return buffer[:size].view(dtype)

    def clear(self) -> None:
        """Free all buffers."""
        self._buffers.clear()


@dataclass(frozen=True)
class StripPlan:
    """How many tiles, columns and threads fit the memory."""

    at_once: int  # tiles that are computed together
    columns: int  # of a strip
    lanes: int  # number of threads with memory for a strip

    @classmethod
    def within_memory(
        cls,
        features: FeatureMatrix,
        n: int,
        tiles: Sequence[GramTile],
        memory: int,
        item: int,
    ) -> StripPlan:
        """Return the plan of a pass over n rows.

        Tiles' sums take three eighths of the memory, the threads' strips as much; the rest is for
        the libraries, and for a tile on its way to disk.

        Args:
            features: the matrix.
            n: number of chosen rows.
            tiles: products to compute.
            memory: bytes to stay within.
            item: bytes of a number of a strip and of a product.

        Raises:
            VitseeError: not even one tile and two narrow strips fit.
        """
        largest = max(_length(tile.i) * _length(tile.j) for tile in tiles)
        share = memory * 3 // 8
        at_once = max(1, share // (largest * 8))  # sums are float64
        # A lane holds its strip, a slab of it as stored, a stored chunk and a product.
        slab = min(features.store.plan.slab, n)
        n_used = 0
        for first in range(0, len(tiles), at_once):
            n_used = max(n_used, len(_used_rows(n, tiles[first : first + at_once])))
        column_bytes = n_used * item + slab * features.item_size
        fixed_bytes = largest * item + features.chunk_bytes
        narrowest = min(MIN_COLUMNS, features.n_features)
        preferred = max(GOOD_COLUMNS, features.chunk_columns)
        widest = min(features.n_features, MAX_COLUMNS, preferred)
        columns = 0
        for lanes in (LANES, 1):
            if columns < narrowest:
                columns = min(widest, (share // lanes - fixed_bytes) // column_bytes)
        if columns < narrowest or largest * 8 > share:
            strip_bytes = narrowest * column_bytes + fixed_bytes
            need = max(strip_bytes, largest * 8) * 8 / 3
            raise VitseeError(
                f"{human_bytes(memory)} of memory are too few for {n} images; give --memory "
                f"{human_bytes(need * 1.01).replace(' ', '')} or more, or fewer --images"
            )
        strip_bytes = columns * column_bytes + fixed_bytes
        return cls(at_once=at_once, columns=columns, lanes=max(1, share // strip_bytes))


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
    """Yield x_i x_j^T of every tile, in their order.

    x are the features of `rows`, minus a common vector, and times a power of two where they are far
    from 1 (`feature_scale`). The vector is the mean over some rows of the first slab. Everything
    derived from the result (HSIC, centred kernels) is independent of it, but float32 precision is
    not (offsets of 300 standard deviations would cost two digits of CKA).

    Args:
        features: the matrix.
        rows: (n,) rows of the store, ascending.
        tiles: what to compute, in groups that fit the memory; each group reads the rows it needs
            once.
        device: where to multiply: cpu, cuda or cuda:1.
        memory: bytes to stay within, of the host; on a GPU also of the device.
        centred: subtract that vector.
        dtype: of the products; sums over strips are in float64.
        precision: "bf16" rounds the factors of the products to bfloat16.
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
    plan = StripPlan.within_memory(
        features=features, n=len(rows), tiles=tiles, memory=memory, item=item.itemsize
    )
    lanes = n_lanes(plan.lanes)
    strips = _split_last_strip(features.strips(plan.columns), plan.columns)
    means = StripMeans(
        centred=centred,
        origin=origin,
        cast=backend.cast,
        fused=fused,
        scale=feature_scale(features),
    )
    workspace = workspace or Workspace()
    # A row that several groups of tiles need is recorded in `origin` once.
    was_read = np.zeros(len(rows), bool)
    for first in range(0, len(tiles), plan.at_once):
        group = tiles[first : first + plan.at_once]
        used = _used_rows(len(rows), group)
        reading = _Pass(
            features=features,
            strips=strips,
            rows=rows[used],
            row_indices=used,
            fresh=~was_read[used],
            tiles=[_index_read_rows(tile, used, len(rows)) for tile in group],
            means=means,
            backend=backend,
        )
        was_read[used] = True
        yield from reading.run(lanes, item, workspace, progress)


def _length(indices: Indices) -> int:
    """Return the number of rows that a tile's side takes."""
    if isinstance(indices, slice):
        return indices.stop - indices.start
    return len(indices)


def _used_rows(n: int, tiles: Sequence[GramTile]) -> Integers:
    """Return the indices below n that any of these tiles needs, ascending."""
    mask = np.zeros(n, bool)
    for tile in tiles:
        mask[tile.i] = True
        mask[tile.j] = True
    return np.flatnonzero(mask)


def _index_read_rows(tile: GramTile, used: Integers, n: int) -> GramTile:
    """Return the tile with indices among the `used` rows in place of those among all n."""
    to_local = np.full(n, -1)
    to_local[used] = np.arange(len(used))

    def as_local(indices: Indices) -> Indices:
        """Consecutive rows become a slice: a view of the strip, not a copy."""
        local: Integers = to_local[indices]
        first = int(local[0])
        last = int(local[-1])
        if last - first + 1 == len(local):
            return slice(first, last + 1)
        return local

    i = as_local(tile.i)
    if tile.i is tile.j:  # stays the same object, which marks a symmetric product
        return GramTile(i, i)
    return GramTile(i, as_local(tile.j))


def _split_last_strip(strips: list[FeatureBlock], columns: int) -> list[FeatureBlock]:
    """Split the last wide strip in two, so that of two threads neither idles meanwhile."""
    if not strips or strips[-1].n_columns < columns // 2 or columns < 2 * MIN_COLUMNS:
        return strips
    return [*strips[:-1], *strips[-1].cut(strips[-1].n_columns // 2)]


class _LaneBuffers(NamedTuple):
    """Memory of one thread, reused from strip to strip."""

    strip: NDArray[Any]  # (rows * columns,) cast; empty if the strip is staged
    slab: NDArray[np.uint8]  # bytes of a slab as stored
    product: Any  # of the largest tile, on the device
    staging: Staging | None  # the strip on its way to a GPU


class _SlabRows(NamedTuple):
    """The chosen rows of one slab."""

    span: slice  # all rows of the slab, in the store
    chosen: Integers | None  # the chosen ones, counted from the span's start; None: all
    target: slice  # rows of the strip that they fill


class _Pass:
    """One reading of the features of some rows, for a group of tiles.

    Args:
        features: the matrix.
        strips: its columns, in blocks.
        rows: rows of the store to read, ascending.
        row_indices: their indices among all chosen rows of the matrix.
        fresh: which of them no earlier group read.
        tiles: products to compute, with indices among `rows`.
        means: what is subtracted.
        backend: where to multiply.
    """

    def __init__(
        self,
        features: FeatureMatrix,
        strips: Sequence[FeatureBlock],
        rows: Integers,
        row_indices: Integers,
        fresh: NDArray[np.bool_],
        tiles: Sequence[GramTile],
        means: StripMeans,
        backend: MatmulBackend,
    ) -> None:
        self._strips = strips
        self._row_indices = row_indices
        self._fresh = fresh
        self._tiles = tiles
        self._means = means
        self._backend = backend
        self._n = len(rows)
        self._slabs = _rows_by_slab(features, rows)
        self._item_size = features.item_size
        self._slab_rows = features.store.plan.slab
        self._dtype = features.dtype

    def run(
        self,
        lanes: int,
        dtype: np.dtype[Any],
        workspace: Workspace,
        progress: Callable[[int], object] | None,
    ) -> Iterator[NDArray[np.float64]]:
        """Yield the tiles' products, one after the other, once all strips are read."""
        lanes = min(lanes, len(self._strips))
        backend = self._backend
        buffers = self._allocate(lanes, dtype, workspace)
        sums = [backend.zeros((_length(t.i), _length(t.j))) for t in self._tiles]
        # Strips are added to a tile in their order, so that rounding does not depend on threads.
        access = OrderedAccess(len(self._tiles) + 1)

        def work(lane: int, take: Callable[[], int | None]) -> None:
            """Read strips and add their products, until `take` has no more."""
            lane_buffers = buffers[lane]
            while (k := take()) is not None:
                if lane_buffers.staging is None:
                    x, n_bytes = self._load(k, lane_buffers.strip, lane_buffers.slab)
                    on_device = backend.take(x)
                else:
                    on_device, n_bytes = self._send(
                        k, lane_buffers.staging, lane_buffers.slab, dtype
                    )
                for t, tile in enumerate(self._tiles):
                    left = on_device[tile.i]
                    # The same object: the backend then makes one triangle only.
                    right = left if tile.i is tile.j else on_device[tile.j]
                    product = product_in(lane_buffers.product, len(left), len(right))
                    backend.multiply(left, right, product)
                    with access.turn(k, t):
                        backend.add(sums[t], product)
                with access.turn(k, len(self._tiles)):
                    self._means.done(k, self._row_indices[self._fresh], self._fresh)
                    if progress is not None:
                        progress(n_bytes)

        with backend.one_thread():
            run_lanes(lanes, work, len(self._strips), access.stop)
        for tile, total in zip(self._tiles, sums, strict=True):
            yield backend.host(total, tile.i is tile.j)

    def _allocate(
        self, lanes: int, dtype: np.dtype[Any], workspace: Workspace
    ) -> list[_LaneBuffers]:
        """Return the memory of each thread, large enough for the widest strip."""
        backend = self._backend
        widest = max(strip.n_columns for strip in self._strips)
        product_sizes = [product_size(_length(t.i), _length(t.j)) for t in self._tiles]
        slab_bytes = self._slab_rows * widest * self._item_size
        stagings = [backend.staging(self._n * widest, self._dtype) for _ in range(lanes)]
        buffers = []
        for k, staging in enumerate(stagings):
            strip_size = 0 if staging else self._n * widest
            product = workspace.take(f"product {k}", max(product_sizes), dtype)
            buffers.append(
                _LaneBuffers(
                    strip=workspace.take(f"strip {k}", strip_size, dtype),
                    slab=workspace.take(f"slab {k}", slab_bytes, np.uint8),
                    product=backend.buffer(product),
                    staging=staging,
                )
            )
        return buffers

    def _load(
        self, k: int, buffer: NDArray[Any], slab_buffer: NDArray[np.uint8]
    ) -> tuple[NDArray[Any], int]:
        """Return strip k (rows, columns) minus its mean, and the bytes that were read for it."""
        strip = self._strips[k]
        n_bytes = 0
        x = buffer[: self._n * strip.n_columns].reshape(self._n, strip.n_columns)
        all_columns = slice(0, strip.n_columns)
        with in_this_thread():
            for span, chosen, target in self._slabs:
                pieces: Iterable[tuple[slice, NDArray[Any]]]
                if self._means.has_mean(k) or strip.in_one_chunk(span):
                    pieces = strip.pieces(span, slab_buffer)
                else:  # the mean needs all columns at once
                    pieces = [(all_columns, strip.read(span, slab_buffer))]
                for columns, values in pieces:
                    n_bytes += values.nbytes
                    if chosen is not None:
                        values = values[chosen]
                    self._means.fill(x, values, strip=k, rows=target, columns=columns)
        return x, n_bytes

    def _send(
        self,
        k: int,
        staging: Staging,
        slab_buffer: NDArray[np.uint8],
        dtype: np.dtype[Any],
    ) -> tuple[Any, int]:
        """Return strip k (rows, columns) on the device, minus its mean, and the bytes that were
        read for it."""
        strip = self._strips[k]
        n_bytes = 0
        room = staging.room(self._n, strip.n_columns)
        with in_this_thread():
            for span, chosen, target in self._slabs:
                values = strip.read(span, slab_buffer)
                n_bytes += values.nbytes
                room[target] = values if chosen is None else values[chosen]
                self._means.take_mean(room[target], k)
        x = staging.send(self._n, strip.n_columns, dtype)
        self._means.shift(x, k, staging)
        return x, n_bytes


def _rows_by_slab(features: FeatureMatrix, rows: Integers) -> list[_SlabRows]:
    """Return the chosen rows of every slab that has any."""
    plan = features.store.plan
    spans = []
    for slab in range(plan.n_slabs):
        span = plan.rows(slab)
        low, high = np.searchsorted(rows, [span.start, span.stop]).tolist()
        if high > low:
            chosen = None
            if high - low < span.stop - span.start:
                chosen = rows[low:high] - span.start
            spans.append(_SlabRows(span, chosen, target=slice(low, high)))
    return spans
