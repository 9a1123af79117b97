"""Stacks of small feature matrices, of tokens or the pixels of patches, read together and cached by
runs of images.

For large work on the CPU they stay in memory as stored: float16 and bytes take a half and a quarter
of float32. They are cast, shifted and scaled just before a product, into memory that stays in the
core's cache: features in float32 come from main memory, which takes longer for matrices of some
hundred columns.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features import SiteFeatures
from vitsee_core.images.placement import cell_edges
from vitsee_core.kernels.backend import MatmulBackend
from vitsee_core.kernels.compiled import compiled, shift_bytes, shift_half
from vitsee_core.models.provenance import Pictures
from vitsee_core.runtime.machine import free_disk_bytes, human_bytes
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_core.similarity.scaling import largest_size, power_of_two
from vitsee_core.types import Float32, Integers
from vitsee_stores.errors import MissingInput, VitseeError
from vitsee_stores.lazy import LazyArray, NormalisedInputs

if TYPE_CHECKING:
    from vitsee_stores import Store
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)

AT_ONCE = 64
# Neighbouring pixels: a loop of a fixed length is one instruction. Images whose patches at a place
# are cut one after the other.
AT_A_TIME = np.uint64(16)
NEAR = 8


class PatchPixels:
    """Each patch's pixels as features, channels first: a `Stack`.

    The patch of a grid cell is the pixels of the cell, see `cells.cell_edges`. Smaller patches are
    padded with zeros, which do not affect similarities.
    """

    def __init__(
        self,
        store: Store,
        pixels: LazyArray,
        layout: TokenLayout,
        cells: Integers | None = None,
    ) -> None:
        """layout: of a site with a grid; cells: only these of it, row by row."""
        assert layout.grid is not None
        self.store = store
        self.pixels = pixels
        self.layout = layout
        self.cells = np.arange(layout.n_body) if cells is None else cells
        self.bounds = cell_edges(layout, pixels.shape[2:])
        self.shape = patch_shape(layout, pixels.shape[1:])

    @property
    def n_matrices(self) -> int:
        return len(self.cells)

    @property
    def n_features(self) -> int:
        return int(np.prod(self.shape))

    def part(self, wanted: slice) -> PatchPixels:
        return PatchPixels(self.store, self.pixels, self.layout, self.cells[wanted])

    def read(self, rows: slice) -> NDArray[np.float32]:
        """(rows, patches, features) of consecutive rows of the store."""
        assert self.layout.grid is not None
        images = self.pixels[rows]
        # Contiguous by patch, as products need them.
        out = np.zeros((self.n_matrices, len(images), *self.shape), np.float32)
        for k, ((y0, y1), (x0, x1)) in enumerate(self._edges()):
            out[k, :, :, : y1 - y0, : x1 - x0] = images[:, :, y0:y1, x0:x1]
        return out.reshape(self.n_matrices, len(images), -1).swapaxes(0, 1)

    @cached_property
    def scale(self) -> Float32 | None:
        """(features,) normalised difference of one pixel level; None unless the pixels are stored
        as bytes."""
        if not isinstance(self.pixels, NormalisedInputs):
            return None
        of_channel = 1 / (np.float32(255) * self.pixels.std)
        return np.repeat(of_channel, self.n_features // len(of_channel))

    def read_stored(self, rows: slice) -> NDArray[np.uint8]:
        """(patches, rows, features) of consecutive rows of the store, not normalised; 0 in
        padding."""
        assert isinstance(self.pixels, NormalisedInputs)
        stored = self.pixels.pixels
        edges = np.array(self._edges())
        n = rows.stop - rows.start
        out = np.zeros((self.n_matrices, n, *self.shape), np.uint8)
        for part in stored.parts((rows, *(slice(0, n) for n in stored.shape[1:]))):
            begin = np.array([along.start for along in part.target])
            cut_patches(np.ascontiguousarray(stored.read_part(part)), begin, edges, out)
        return out.reshape(self.n_matrices, n, -1)

    def _edges(self) -> list[tuple[list[int], list[int]]]:
        """The first row of each patch and the one after its last, and the same for columns."""
        assert self.layout.grid is not None
        places = (divmod(cell, self.layout.grid[1]) for cell in self.cells.tolist())
        (ys, xs) = self.bounds
        return [(ys[r : r + 2].tolist(), xs[c : c + 2].tolist()) for r, c in places]


@compiled
def cut_patches(
    pixels: NDArray[np.uint8],
    begin: NDArray[np.int64],
    edges: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    """The pixels of each patch, from some of all images, channels, rows and columns.

    Args:
        pixels: (images, channels, height, width), contiguous.
        begin: (4,) its first image, channel, row and column.
        edges: (patches, 2, 2) the first row and the one after the last, the same for columns.
        out: (patches, images, channels, rows, columns), contiguous: filled from a patch's first row
            and column on.
    """
    n, n_channels, height, width = pixels.shape
    down, across = out.shape[3:]
    of = pixels.reshape(-1)
    to = out.reshape(-1)
    for first in range(0, n, NEAR):
        for k in range(len(edges)):
            (top, bottom), (left, right) = edges[k]
            low = max(left, begin[3])
            high = min(right, begin[3] + width)
            some = np.uint64(max(0, high - low))
            many = some // AT_A_TIME * AT_A_TIME
            for image in range(first, min(first + NEAR, n)):
                for channel in range(n_channels):
                    plane = (image * n_channels + channel) * height
                    place = (
                        (k * out.shape[1] + begin[0] + image) * out.shape[2]
                        + begin[1]
                        + channel
                    ) * down
                    for y in range(max(top, begin[2]), min(bottom, begin[2] + height)):
                        # None is negative.
                        source = np.uint64(
                            (plane + y - begin[2]) * width + low - begin[3]
                        )
                        target = np.uint64((place + y - top) * across + low - left)
                        for start in range(np.uint64(0), many, AT_A_TIME):
                            for x in range(start, start + AT_A_TIME):
                                to[target + x] = of[source + x]
                        for x in range(many, some):
                            to[target + x] = of[source + x]


def patch_shape(layout: TokenLayout, pixels: tuple[int, ...]) -> tuple[int, ...]:
    """(channels, rows, cols) of the largest patch, for pixels (channels, height, width)."""
    edges = cell_edges(layout, pixels[1:])
    return (pixels[0], *(int(np.diff(along).max()) for along in edges))


def pixels_shape(store: Store) -> tuple[int, ...] | None:
    """(channels, height, width) of the result of `input_pixels`; None if the store does not record
    it."""
    if store.has("input"):
        return store.inputs().shape[1:]
    size = store.manifest.transform.get("input_size")
    return None if size is None else tuple(int(n) for n in size)


def input_pixels(
    store: Store, rows: Integers, data: str | None = None, progress: Progress = SILENT
) -> LazyArray:
    """(images, channels, height, width) float32, normalised; only `rows`, valid ones in their
    order, may be read. `data`: see `Pictures`. Raises MissingInput: not stored, and not available
    from its data."""
    if store.has("input"):
        return store.inputs()
    try:
        return _load(store, rows, Pictures(store, data), progress)
    except VitseeError as error:
        raise MissingInput(
            f"{store.label} keeps no pixels: {error}; "
            f"or run: vitsee extract ... --inputs -o {store.place}, the rest as its vitsee info "
            "says"
        ) from None


def _load(
    store: Store, rows: Integers, pictures: Pictures, progress: Progress
) -> LazyArray:
    """The pixels of these rows in a temporary file. Raises VitseeError: an image has changed or is
    gone, or there is no room."""
    name = pictures.source.name
    transform = store.manifest.transform
    shape = (store.n_images, *(int(n) for n in transform["input_size"]))
    need = len(rows) * int(np.prod(shape[1:]))
    free = free_disk_bytes(Path(tempfile.gettempdir()))
    if need > free:
        raise VitseeError(
            f"they take {human_bytes(need)}, {human_bytes(free)} are free for it"
        )
    log.info(
        "%s keeps no pixels: loading %d images of %s again",
        store.label,
        len(rows),
        name,
    )
    pictures.check_decoding()
    with tempfile.TemporaryFile(prefix="vitsee-pixels") as file:
        file.truncate(int(np.prod(shape)))  # sparse: only used rows take space
        pixels = np.memmap(file, np.uint8, "r+", shape=shape)
    progress.start(len(rows))
    try:
        for start in range(0, len(rows), AT_ONCE):
            piece = rows[start : start + AT_ONCE]
            pixels[piece] = pictures(piece)
            progress.advance(len(piece))
    finally:
        progress.stop()
    return _Reloaded(pixels, store.valid, transform)


class _Reloaded(LazyArray):
    """The array that `Store.inputs` is, of pixels that were loaded again."""

    def __init__(
        self,
        pixels: NDArray[np.uint8],
        valid: NDArray[np.bool_],
        transform: dict[str, Any],
    ) -> None:
        self.pixels = pixels
        self.valid = valid
        self.transform = transform
        self.shape = pixels.shape
        self.dtype = np.dtype(np.float32)

    def load(self, box: tuple[slice, ...]) -> NDArray[np.float32]:
        """Normalises all channels and pixels of the images in `box`."""
        import torch

        from vitsee_core.images import normalise

        whole = normalise(
            torch.from_numpy(self.pixels[box[0]]), self.transform, "cpu"
        ).numpy()
        whole[~self.valid[box[0]]] = np.nan
        return whole[(slice(None), *box[1:])]


MEAN_ROWS = 32


class TokenStack:
    """Tokens of a site, each a feature matrix of its own, images by channels.

    Raises:
        SiteError: the site has no such tokens.
        MissingInput: they are not stored.
    """

    def __init__(self, features: SiteFeatures, places: Integers | None = None) -> None:
        """places: which of `features.tokens`, in any order; all of them by default."""
        self.features = features
        self.store = features.store
        self.places = np.arange(len(features.tokens)) if places is None else places
        _ = features.arrays  # raises now rather than during the work

    @property
    def n_matrices(self) -> int:
        return len(self.places)

    @property
    def n_features(self) -> int:
        return self.features.dim

    def part(self, wanted: slice) -> TokenStack:
        return TokenStack(self.features, self.places[wanted])

    def read(self, rows: slice) -> NDArray[Any]:
        """(rows, tokens, channels) of consecutive rows of the store."""
        first = int(self.places.min())
        last = int(self.places.max())
        values: NDArray[Any] = self.features.load(rows, slice(first, last + 1))
        places = self.places - first
        if np.array_equal(places, np.arange(values.shape[1])):
            return values
        return values[:, places]


# Feature matrices of the same images, all of one width, that are read together.
Stack = TokenStack | PatchPixels


class Runs:
    """A stack's features by runs of images: (matrices, images, features) float32 on the device,
    minus a fixed vector each, which changes no HSIC and preserves float32 precision: the mean over
    the first images; features far from 1 are brought near it by a power of two (see `scaling`).
    Constant features become 0, bitwise. `kept` runs (at least two) stay in memory."""

    def __init__(
        self,
        stack: Stack,
        images: Integers,
        kept: int,
        backend: MatmulBackend,
        progress: Progress,
    ) -> None:
        self.stack = stack
        self.images = images
        self._progress = progress
        self.backend = backend
        self._kept = max(2, kept)
        self._runs: dict[int, Any] = {}
        self._mean: Float32 | None = None
        self._scale = 1.0  # of all images, by the first run's

    def reading(self, i: slice, j: slice) -> list[Callable[[], None]]:
        """Jobs to load both runs, i <= j, in any order; none if they are loaded or already
        requested."""
        jobs = []
        for run in (i, j):
            if run.start not in self._runs:
                # Tiles come row by row of the upper triangle: runs before i are not needed again,
                # and of the others the last one before j is needed last.
                while len(self._runs) >= self._kept:
                    others = sorted(
                        at for at in self._runs if at not in (i.start, j.start)
                    )
                    below = [at for at in others if at < j.start]
                    del self._runs[
                        others[0] if others[0] < i.start else (below or others)[-1]
                    ]
                self._runs[run.start] = None
                jobs += self._jobs(run)
        return jobs

    def _jobs(self, run: slice) -> list[Callable[[], None]]:
        def read() -> None:
            self._runs[run.start] = self.backend.take(self._read(run))

        return [read]

    def of(self, k: int, run: slice, name: str) -> Any:
        """(images, features) of one matrix, after reading. name: of the per-thread memory that is
        reused if they have to be computed."""
        return self._runs[run.start][k]

    def _read(self, run: slice) -> Any:
        x = self._load(run)
        if self._mean is None:
            first = x[:, :1]
            self._mean = first + (x[:, :MEAN_ROWS] - first).mean(1, keepdims=True)
            self._scale = power_of_two(largest_size(x))
        x -= self._mean
        if self._scale != 1:
            x *= np.float32(self._scale)
        return x

    def _load(self, run: slice) -> Float32:
        n = run.stop - run.start
        out = np.empty((self.stack.n_matrices, n, self.stack.n_features), np.float32)
        for some, rows in self.spans(run):
            values = self.stack.read(slice(int(rows[0]), int(rows[-1]) + 1))
            self._progress.advance(0, values.nbytes)
            if len(values) > len(rows):
                values = values[rows - rows[0]]
            if len(values) == n and values.dtype == np.float32:
                whole = values.swapaxes(0, 1)
                if (
                    whole.flags.c_contiguous
                    and whole.base is not None
                    and whole.flags.writeable
                ):
                    return whole  # already in the wanted form, in its own memory
            self.backend.cast(out[:, some].swapaxes(0, 1), values)
        return out

    def spans(self, run: slice) -> list[tuple[slice, Integers]]:
        """Slab by slab, which of a run's images it has, and their rows in the store."""
        rows = self.images[run]
        plan = self.stack.store.plan
        spans = []
        for slab in range(int(rows[0]) // plan.slab, int(rows[-1]) // plan.slab + 1):
            span = plan.rows(slab)
            low, high = np.searchsorted(rows, [span.start, span.stop]).tolist()
            if high > low:
                spans.append((slice(low, high), rows[low:high]))
        return spans


NO_SUMS = np.zeros((0, 2), np.float32)
NO_VALUES = np.zeros((0, 0, 0))


class Scratch(threading.local):
    """Per-thread memory that is reused for the next piece of work: fresh memory costs page
    faults."""

    def __init__(self) -> None:
        self._found: dict[str, Float32] = {}

    def take(self, name: str, rows: int, columns: int) -> Float32:
        """(rows, columns) uninitialised, in the memory of the last call with this name."""
        n = rows * columns
        buffer = self._found.get(name)
        if buffer is None or len(buffer) < n:
            buffer = self._found[name] = np.empty(n, np.float32)
        return buffer[:n].reshape(rows, columns)


class StoredRuns(Runs):
    """`Runs` of one matrix at a time.

    Patches keep their pixels' values, scaled as the model's normalisation does; the mean that it
    subtracts is the same for all pixels of a channel and has no effect.

    _runs: for each slab, which of the run's images it has, and (matrices, images, features).
    """

    _scratch = Scratch()
    _runs: dict[int, list[tuple[slice, NDArray[Any]]]]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._means: dict[int, Float32] = {}

    @staticmethod
    def takes(stack: Stack) -> bool:
        """Whether a stack is stored in such a type."""
        if not isinstance(stack, TokenStack):
            return stack.scale is not None
        of = stack.features
        return of.matching is None and all(a.dtype == np.float16 for a in of.arrays)

    def of(self, k: int, run: slice, name: str) -> Float32:
        """A run of slab k's array `name`, in float32."""
        x = self._scratch.take(name, run.stop - run.start, self.stack.n_features)
        mean = self._mean_of(k)
        for some, values in self._runs[run.start]:
            raw = np.ascontiguousarray(values[k])
            if raw.dtype == np.float16:
                shift_half(raw.view(np.uint16), mean, x[some], 0, NO_SUMS)
            else:
                assert (
                    isinstance(self.stack, PatchPixels) and self.stack.scale is not None
                )
                shift_bytes(raw, mean, self.stack.scale, x[some])
        return x

    def _mean_of(self, k: int) -> Float32:
        """The mean to subtract from a matrix: over the first rows of the first run, which is loaded
        when first requested; an integer for bytes."""
        if k not in self._means:
            x = self._runs[0][0][1][k][:MEAN_ROWS].astype(np.float32)
            # For equal rows it equals these bitwise.
            mean = x[0] + (x - x[0]).mean(0)
            self._means[k] = mean if isinstance(self.stack, TokenStack) else np.rint(mean)
        return self._means[k]

    def _jobs(self, run: slice) -> list[Callable[[], None]]:
        spans = self.spans(run)
        slabs = self._runs[run.start] = [(some, NO_VALUES) for some, _ in spans]

        def keep(k: int) -> None:
            slabs[k] = slabs[k][0], self._read_rows(spans[k][1])

        return [partial(keep, k) for k in range(len(spans))]

    def _read_rows(self, rows: Integers) -> NDArray[Any]:
        """(matrices, images, features) of rows of one slab."""
        stack = self.stack
        span = slice(int(rows[0]), int(rows[-1]) + 1)
        if isinstance(stack, PatchPixels):
            values = stack.read_stored(span)
        else:
            values = stack.read(span).swapaxes(0, 1)
        self._progress.advance(0, values.nbytes)
        if values.shape[1] > len(rows):
            return values[:, rows - rows[0]]
        return values
