"""Gram matrices from features: each strip of columns is read once and adds to all tiles that fit.

    store -> slab (fp16) -> strip: float32 less a mean -> x_i x_j^T -> float64 tile

Costs: a Gram matrix takes n (n + 1) p useful operations; on the CPU a diagonal tile is a symmetric
product (numpy calls ssyrk, half the work of a product), on a GPU a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitsee_core.machine import human_bytes
from vitsee_core.similarity.features import Features, Strip
from vitsee_stores.errors import VitseeError

Rows = NDArray[np.int64]
Columns = slice | Rows

MOST_COLUMNS = 32768
FEWEST_COLUMNS = 256
MEAN_ROWS = 128
SERIAL = 1 << 15  # elements up to which torch uses no further thread


@dataclass(frozen=True)
class Tile:
    """A product to be made: of the chosen rows, places `i` times places `j`; `i is j` where it is
    symmetric."""

    i: Columns
    j: Columns


class Workspace:
    """Buffers that are used again from one matrix to the next: fresh memory of their size costs
    page faults. For one call of `products` at a time."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(
        self, name: str, n: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        """(n,) of undefined values, in the memory of the last call with this name."""
        device = device or torch.device("cpu")
        found = self._buffers.get((name, dtype, device))
        if found is None or len(found) < n:
            found = torch.empty(n, dtype=dtype, device=device)
            self._buffers[name, dtype, device] = found
        return found[:n]


@dataclass
class Origin:
    """Where the features were centred, for their conditioning: |mean|^2 and the sum of squares of
    the centred features over the rows that were used to find it, with their number."""

    squared_mean: float = 0.0
    squared_spread: float = 0.0
    n: int = 0

    @property
    def ratio(self) -> float:
        """|mean|^2 over the total variance: how much of the features is common to all images."""
        variance = self.squared_spread / max(self.n - 1, 1)
        return self.squared_mean / variance if variance > 0 else 0.0


def products(
    features: Features,
    rows: Rows,
    tiles: Sequence[Tile],
    *,
    device: torch.device,
    memory: int,
    centred: bool = True,
    dtype: torch.dtype = torch.float32,
    origin: Origin | None = None,
    workspace: Workspace | None = None,
    progress: Callable[[int], object] | None = None,
) -> Iterator[NDArray[np.float64]]:
    """x_i x_j^T of every tile, in their order; x the features of `rows`, less a common vector.

    The vector is the mean over some rows of the first slab. What is made of the result (HSIC,
    centred kernels) does not depend on it; single precision does (offsets of 300 standard
    deviations cost two digits of CKA without it).

    Args:
        features: the matrix.
        rows: (n,) rows of the store, ascending.
        tiles: what to compute; they are made in groups that fit the memory, each of which reads
            the rows it needs once.
        device: where to multiply.
        memory: bytes to stay within, of the host; on a GPU also of the device.
        centred: subtract that vector.
        dtype: of the products; sums over strips are in float64.
        origin: told what was subtracted.
        workspace: where its buffers come from.
        progress: told the bytes of each strip that is done.

    Raises:
        VitseeError: not even one tile and a narrow strip fit the memory, or the device has no
            float64.
    """
    if device.type == "mps":
        raise VitseeError("--device mps has no float64; use --device cpu")
    if device.type == "cuda":
        memory = min(memory, torch.cuda.mem_get_info(device)[0] // 2)
    largest = max(_length(t.i) * _length(t.j) for t in tiles)
    at_once = max(1, memory // 2 // (largest * 8))
    groups = [range(k, min(k + at_once, len(tiles))) for k in range(0, len(tiles), at_once)]
    used = [_used(rows, [tiles[k] for k in group]) for group in groups]
    # Two strips in `dtype`, and a slab of one as it is stored, twice while its chunks are put in.
    slab = min(features.store.plan.slab, max(len(u) for u in used))
    a_column = 2 * max(len(u) for u in used) * dtype.itemsize + 2 * slab * features.item_size
    columns = min(MOST_COLUMNS, (memory // 2 - largest * dtype.itemsize) // a_column)
    if columns < FEWEST_COLUMNS and columns < features.n_features:
        need = 2 * (FEWEST_COLUMNS * a_column + largest * 12)
        raise VitseeError(
            f"{human_bytes(memory)} of memory are too few for {len(rows)} images; give --memory "
            f"{human_bytes(need).replace(' ', '')} or more, or fewer --images"
        )
    strips = features.strips(columns)
    # Nothing is multiplied while the first of them is read: narrow ones, then wide ones.
    wide = next((k for k, s in enumerate(strips) if s.n_columns > columns // 3), 0)
    strips[wide : wide + 1] = strips[wide].cut(max(1, columns // 3))
    centres, workspace = _Centres(centred, origin), workspace or Workspace()
    for group, places in zip(groups, used, strict=True):
        local = [_localise(tiles[k], places, len(rows)) for k in group]
        sums = [
            torch.zeros(_length(t.i), _length(t.j), dtype=torch.float64, device=device)
            for t in local
        ]
        scratch = workspace.take("product", largest, dtype, device)
        for x, read in _read_ahead(features, strips, rows[places], centres, dtype, workspace):
            _add(x.to(device), local, sums, scratch)
            if progress is not None:
                progress(read)
        yield from (total.cpu().numpy() for total in sums)


def _length(part: Columns) -> int:
    return part.stop - part.start if isinstance(part, slice) else len(part)


def _used(rows: Rows, tiles: Sequence[Tile]) -> Rows:
    """The places among `rows` that any of these tiles needs."""
    mask = np.zeros(len(rows), bool)
    for tile in tiles:
        mask[tile.i] = True
        mask[tile.j] = True
    return np.flatnonzero(mask)


def _localise(tile: Tile, places: Rows, n: int) -> Tile:
    """The tile in terms of the rows that were read; runs become slices, which are views."""
    to_local = np.full(n, -1)
    to_local[places] = np.arange(len(places))

    def local(part: Columns) -> Columns:
        found: Rows = to_local[part]
        first, last = int(found[0]), int(found[-1])
        return slice(first, last + 1) if last - first + 1 == len(found) else found

    i = local(tile.i)
    return Tile(i, i if tile.i is tile.j else local(tile.j))


def _add(x: Tensor, tiles: Sequence[Tile], sums: Sequence[Tensor], scratch: Tensor) -> None:
    for tile, total in zip(tiles, sums, strict=True):
        left = _take(x, tile.i)
        right = left if tile.i is tile.j else _take(x, tile.j)
        out = scratch[: total.numel()].view(total.shape)
        if x.is_cuda:
            torch.mm(left, right.T, out=out)
        else:
            a = left.numpy()
            # The same array on both sides: numpy then calls syrk.
            np.matmul(a, (a if right is left else right.numpy()).T, out=out.numpy())
        total += out


def _take(x: Tensor, part: Columns) -> Tensor:
    return x[part] if isinstance(part, slice) else x[torch.from_numpy(part).to(x.device)]


class _Centres:
    """What is subtracted of each strip: the mean of the rows that are read first of it."""

    def __init__(self, centred: bool, origin: Origin | None) -> None:
        self.centred, self.origin = centred, origin
        self.of: dict[int, Tensor] = {}

    def fill(self, x: Tensor, raw: Tensor, strip: int) -> None:
        """x = raw - its strip's mean, in pieces that stay in cache and need no second thread: the
        product has them all."""
        if self.centred and strip not in self.of:
            self.of[strip] = self._mean(raw)
        step = max(1, SERIAL // raw.shape[1])
        for to, of in zip(x.split(step), raw.split(step), strict=True):
            to.copy_(of)
            if self.centred:
                to -= self.of[strip]

    def _mean(self, raw: Tensor) -> Tensor:
        sample = raw[:: max(1, len(raw) // MEAN_ROWS)].to(torch.float32, copy=True)
        mean = sample.mean(0)
        if self.origin is not None:
            sample -= mean
            self.origin.squared_mean += float(mean @ mean)
            self.origin.squared_spread += float(torch.linalg.vecdot(sample, sample).sum())
            self.origin.n = len(sample)
        return mean


def _read_ahead(
    features: Features,
    strips: Sequence[Strip],
    rows: Rows,
    centres: _Centres,
    dtype: torch.dtype,
    workspace: Workspace,
) -> Iterator[tuple[Tensor, int]]:
    """Each strip's (rows, columns) less its centre, and the bytes it was read from; the next one
    is made ready meanwhile. A strip's memory is taken again when the one after it is asked for."""
    widest = max(strip.n_columns for strip in strips)
    buffers = [workspace.take(f"strip {k}", len(rows) * widest, dtype) for k in range(2)]
    places = _by_slab(features, rows)
    slab_bytes = features.store.plan.slab * widest * features.item_size
    slab = workspace.take("slab", slab_bytes, torch.uint8).numpy()

    def read(number: int) -> tuple[Tensor, int]:
        strip, size = strips[number], 0
        x = buffers[number % 2][: len(rows) * strip.n_columns].view(len(rows), strip.n_columns)
        for span, inside, target in places:
            values = strip.read(span, slab)
            size += values.nbytes
            values = values if inside is None else values[inside]
            centres.fill(x[target], torch.from_numpy(values), number)
        return x, size

    with ThreadPoolExecutor(1, "strips") as pool:
        coming = pool.submit(read, 0)
        for number in range(len(strips)):
            ready = coming.result()
            if number + 1 < len(strips):
                coming = pool.submit(read, number + 1)
            yield ready


def _by_slab(features: Features, rows: Rows) -> list[tuple[slice, Rows | None, slice]]:
    """Of every slab with rows that count: its rows in the store, which of them count (None: all),
    and where they go."""
    plan, found = features.store.plan, []
    for k in range(plan.n_slabs):
        span = plan.rows(k)
        low, high = np.searchsorted(rows, [span.start, span.stop])
        if high > low:
            inside = rows[low:high] - span.start
            whole = high - low == span.stop - span.start
            found.append((span, None if whole else inside, slice(int(low), int(high))))
    return found
