"""Read stacks of small feature matrices together: one matrix per token, or per patch of pixels.

Localisation compares each token of a site with each patch of the input, so it needs hundreds of
matrices of the same images. `TokenStack` and `PatchPixels` read them for consecutive images, `Runs`
keeps runs of consecutive images in memory, as float32.

For large work on the CPU `StoredRuns` keeps them as stored: float16 and bytes take a half and a
quarter of float32. They are cast, shifted and scaled just before a product, into memory that stays
in the core's cache: float32 features would come from main memory, which takes longer for matrices
of some hundred columns.
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

IMAGES_AT_ONCE = 64  # that are loaded again from the data set at a time
# Neighbouring pixels that are copied together: a loop of a fixed length is one instruction.
PIXELS_AT_ONCE = np.uint64(16)
# Images of which one patch is cut after the other: their targets are neighbours.
NEAR = 8


class PatchPixels:
    """Each patch's pixels as a feature matrix, images by (channel, row, column): a `Stack`.

    The patch of a grid cell is the pixels that the cell covers (`cell_edges`). Smaller patches are
    padded with zeros, which do not affect similarities.

    Args:
        store: the open store.
        pixels: (images, channels, height, width) of it, normalised.
        layout: of a site with a grid.
        cells: indices of cells of the grid, row by row; by default all.
    """

    def __init__(
        self,
        store: Store,
        pixels: LazyArray,
        layout: TokenLayout,
        cells: Integers | None = None,
    ) -> None:
        assert layout.grid is not None
        self.store = store
        self.pixels = pixels
        self.layout = layout
        self.cells = np.arange(layout.n_body) if cells is None else cells
        self.bounds = cell_edges(layout, pixels.shape[2:])
        self.shape = patch_shape(layout, pixels.shape[1:])

    @property
    def n_matrices(self) -> int:
        """Number of patches."""
        return len(self.cells)

    @property
    def n_features(self) -> int:
        """Number of pixels of the largest patch, times channels."""
        return int(np.prod(self.shape))

    def take(self, matrices: slice) -> PatchPixels:
        """Return a stack of some of these matrices."""
        return PatchPixels(self.store, self.pixels, self.layout, self.cells[matrices])

    def read(self, rows: slice) -> NDArray[np.float32]:
        """Return (rows, patches, features) of consecutive rows of the store."""
        assert self.layout.grid is not None
        images = self.pixels[rows]  # (rows, channels, height, width)
        # Contiguous by patch, as products need them; the result is a transposed view.
        out = np.zeros((self.n_matrices, len(images), *self.shape), np.float32)
        for k, ((y0, y1), (x0, x1)) in enumerate(self._edges()):
            out[k, :, :, : y1 - y0, : x1 - x0] = images[:, :, y0:y1, x0:x1]
        return out.reshape(self.n_matrices, len(images), -1).swapaxes(0, 1)

    @cached_property
    def scale(self) -> Float32 | None:
        """(features,) by which a normalised pixel differs for one level of 0 to 255; None unless
        the pixels are stored as bytes."""
        if not isinstance(self.pixels, NormalisedInputs):
            return None
        channel_scale = 1 / (np.float32(255) * self.pixels.std)
        return np.repeat(channel_scale, self.n_features // len(channel_scale))

    def read_stored(self, rows: slice) -> NDArray[np.uint8]:
        """Return (patches, rows, features) of consecutive rows of the store, as stored: not
        normalised; 0 in padding."""
        assert isinstance(self.pixels, NormalisedInputs)
        stored = self.pixels.pixels
        edges = np.array(self._edges())
        n = rows.stop - rows.start
        out = np.zeros((self.n_matrices, n, *self.shape), np.uint8)
        full_images = [slice(0, length) for length in stored.shape[1:]]
        # Chunk by chunk: an image may lie in several, by channels, rows and columns.
        for chunk in stored.parts((rows, *full_images)):
            begin = np.array([axis_range.start for axis_range in chunk.target])
            pixels = np.ascontiguousarray(stored.read_part(chunk))
            cut_patches(pixels, begin=begin, edges=edges, out=out)
        return out.reshape(self.n_matrices, n, -1)

    def _edges(self) -> list[tuple[list[int], list[int]]]:
        """Return for each patch its [first row, row after the last], and the same of columns."""
        assert self.layout.grid is not None
        n_columns = self.layout.grid[1]
        ys, xs = self.bounds
        edges = []
        for cell in self.cells.tolist():
            row, column = divmod(cell, n_columns)
            edges.append((ys[row : row + 2].tolist(), xs[column : column + 2].tolist()))
        return edges


@compiled
def cut_patches(
    pixels: NDArray[np.uint8],
    begin: NDArray[np.int64],
    edges: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    """Copy the pixels of each patch that lie in one chunk of the images.

    Args:
        pixels: (images, channels, height, width) of the chunk, contiguous.
        begin: (4,) the chunk's first image, channel, row and column.
        edges: (patches, 2, 2) the first row and the one after the last, the same for columns.
        out: (patches, images, channels, rows, columns), contiguous: filled from a patch's first row
            and column on.
    """
    n, n_channels, height, width = pixels.shape
    patch_height, patch_width = out.shape[3:]
    # Flat arrays with unsigned indices: numba then checks no index for being negative, and the
    # inner loop becomes vector instructions.
    flat_pixels = pixels.reshape(-1)
    flat_out = out.reshape(-1)
    for first in range(0, n, NEAR):
        for k in range(len(edges)):
            (top, bottom), (left, right) = edges[k]
            # The patch's columns that the chunk has.
            low = max(left, begin[3])
            high = min(right, begin[3] + width)
            n_columns = np.uint64(max(0, high - low))
            n_vectorised = n_columns // PIXELS_AT_ONCE * PIXELS_AT_ONCE
            for image in range(first, min(first + NEAR, n)):
                for channel in range(n_channels):
                    # Rows before this channel's first one, in the chunk and in `out`.
                    chunk_row = (image * n_channels + channel) * height
                    out_image = k * out.shape[1] + begin[0] + image
                    out_channel = out_image * out.shape[2] + begin[1] + channel
                    out_row = out_channel * patch_height
                    for y in range(max(top, begin[2]), min(bottom, begin[2] + height)):
                        source = np.uint64(
                            (chunk_row + y - begin[2]) * width + low - begin[3]
                        )
                        target = np.uint64((out_row + y - top) * patch_width + low - left)
                        for start in range(np.uint64(0), n_vectorised, PIXELS_AT_ONCE):
                            for x in range(start, start + PIXELS_AT_ONCE):
                                flat_out[target + x] = flat_pixels[source + x]
                        for x in range(n_vectorised, n_columns):
                            flat_out[target + x] = flat_pixels[source + x]


def patch_shape(layout: TokenLayout, pixels: tuple[int, ...]) -> tuple[int, ...]:
    """Return (channels, rows, columns) of the largest patch.

    pixels: (channels, height, width) of an image.
    """
    ys, xs = cell_edges(layout, pixels[1:])
    return pixels[0], int(np.diff(ys).max()), int(np.diff(xs).max())


def pixels_shape(store: Store) -> tuple[int, ...] | None:
    """Return (channels, height, width) of the result of `input_pixels`; None if the store does not
    record it."""
    if store.has("input"):
        return store.inputs().shape[1:]
    size = store.manifest.transform.get("input_size")
    return None if size is None else tuple(int(n) for n in size)


def input_pixels(
    store: Store, rows: Integers, data: str | None = None, progress: Progress = SILENT
) -> LazyArray:
    """Return the model's input, (images, channels, height, width) float32, normalised.

    If the store does not keep it, the images are loaded again from the data set.

    Args:
        store: an open store.
        rows: valid rows of the store, ascending; only these may be read from the result.
        data: where the images are now, as for `extract --data`; by default where they were.
        progress: counts images that are loaded again.

    Raises:
        MissingInput: the pixels are neither stored nor available from the data set.
    """
    if store.has("input"):
        return store.inputs()
    try:
        return _load_again(store, rows, Pictures(store, data), progress)
    except VitseeError as error:
        raise MissingInput(
            f"{store.label} keeps no pixels: {error}; "
            f"or run: vitsee extract ... --inputs -o {store.place}, the rest as its vitsee info "
            "says"
        ) from None


def _load_again(
    store: Store, rows: Integers, pictures: Pictures, progress: Progress
) -> LazyArray:
    """Load the images of these rows into a temporary file, and return its array.

    Raises:
        VitseeError: an image has changed or is gone, or the disk has no room.
    """
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
        # The mapping keeps the file's blocks after its name and descriptor are gone.
        pixels = np.memmap(file, np.uint8, "r+", shape=shape)
    progress.start(len(rows))
    try:
        for start in range(0, len(rows), IMAGES_AT_ONCE):
            batch = rows[start : start + IMAGES_AT_ONCE]
            pixels[batch] = pictures(batch)
            progress.advance(len(batch))
    finally:
        progress.stop()
    return _Reloaded(pixels, store.valid, transform)


class _Reloaded(LazyArray):
    """Pixels that were loaded again, normalised when read, as those of `Store.inputs` are."""

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
        """Return the normalised pixels in `box`, NaN for unreadable images."""
        import torch

        from vitsee_core.images import normalise

        raw = torch.from_numpy(self.pixels[box[0]])
        images = normalise(raw, self.transform, "cpu").numpy()
        images[~self.valid[box[0]]] = np.nan
        return images[(slice(None), *box[1:])]


MEAN_ROWS = 32  # images that the subtracted mean is taken over


class TokenStack:
    """Tokens of a site, each a feature matrix of its own, images by channels: a `Stack`.

    Args:
        features: the site and its chosen tokens.
        token_indices: indices among `features.tokens`, in any order; by default all.

    Raises:
        SiteError: the site has no such tokens.
        MissingInput: they are not stored.
    """

    def __init__(
        self, features: SiteFeatures, token_indices: Integers | None = None
    ) -> None:
        self.features = features
        self.store = features.store
        if token_indices is None:
            token_indices = np.arange(len(features.tokens))
        self.token_indices = token_indices
        _ = features.arrays  # raises now rather than during the work

    @property
    def n_matrices(self) -> int:
        """Number of tokens."""
        return len(self.token_indices)

    @property
    def n_features(self) -> int:
        """Number of channels."""
        return self.features.dim

    def take(self, matrices: slice) -> TokenStack:
        """Return a stack of some of these matrices."""
        return TokenStack(self.features, self.token_indices[matrices])

    def read(self, rows: slice) -> NDArray[Any]:
        """Return (rows, tokens, channels) of consecutive rows of the store, as stored."""
        first = int(self.token_indices.min())
        last = int(self.token_indices.max())
        values: NDArray[Any] = self.features.load(rows, slice(first, last + 1))
        local_indices = self.token_indices - first
        if np.array_equal(local_indices, np.arange(values.shape[1])):
            return values  # no copy
        return values[:, local_indices]


# Feature matrices of the same images, all of one width, that are read together.
Stack = TokenStack | PatchPixels


class Runs:
    """A stack's features by runs of images: (matrices, images, features) float32 on the device.

    From each matrix a fixed vector is subtracted, the mean over the first images, which changes no
    HSIC and preserves float32 precision; constant features become 0, bitwise. Features far from 1
    are brought near it by a power of two (`power_of_two`).

    Args:
        stack: the matrices.
        images: (n,) rows of the store, ascending; a run is a slice of these.
        kept: how many runs stay in memory, at least two.
        backend: multiplies; the features are on its device.
        progress: counts the bytes that are read.
    """

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
        # First image of a run -> (matrices, images, features), None while it is requested.
        self._runs: dict[int, Any] = {}
        self._mean: Float32 | None = None  # (matrices, 1, features)
        self._scale = 1.0  # of all images, by the first run's

    def loading_jobs(self, i: slice, j: slice) -> list[Callable[[], None]]:
        """Return jobs that load both runs, i <= j, to be called in any order; none for runs that
        are loaded or already requested."""
        jobs = []
        for run in (i, j):
            if run.start not in self._runs:
                while len(self._runs) >= self._kept:
                    self._drop_run(i.start, j.start)
                self._runs[run.start] = None
                jobs += self._request(run)
        return jobs

    def _drop_run(self, i: int, j: int) -> None:
        """Free the run that is needed last, of those that do not begin at images i and j.

        Tiles come row by row of the upper triangle: runs before i are not needed again, and of the
        others the last one before j is needed last.
        """
        starts = sorted(start for start in self._runs if start not in (i, j))
        if starts[0] < i:
            del self._runs[starts[0]]
            return
        before_j = [start for start in starts if start < j]
        del self._runs[(before_j or starts)[-1]]

    def _request(self, run: slice) -> list[Callable[[], None]]:
        """Return the jobs that load one run, of which `loading_jobs` has taken note."""

        def read() -> None:
            """Load all matrices of the run onto the device."""
            x = self._load(run)
            if self._mean is None:
                # Differences to the first image: the mean of equal images is then exact.
                first = x[:, :1]
                self._mean = first + (x[:, :MEAN_ROWS] - first).mean(1, keepdims=True)
                self._scale = power_of_two(largest_size(x))
            x -= self._mean
            if self._scale != 1:
                x *= np.float32(self._scale)
            self._runs[run.start] = self.backend.take(x)

        return [read]

    def features(self, k: int, run: slice, buffer: str) -> Any:
        """Return (images, features) of matrix k, once the run's jobs are done.

        buffer: names this thread's memory for the result, which another call with the same name
            overwrites; not used where the features are in memory already.
        """
        return self._runs[run.start][k]

    def _load(self, run: slice) -> Float32:
        """Return (matrices, images, features) of a run, float32, in memory that may be changed."""
        n = run.stop - run.start
        out = np.empty((self.stack.n_matrices, n, self.stack.n_features), np.float32)
        for target, rows in self.slab_rows(run):
            # The span of rows is read at once; unreadable images within it are left out.
            values = self.stack.read(slice(int(rows[0]), int(rows[-1]) + 1))
            self._progress.advance(0, values.nbytes)
            if len(values) > len(rows):
                values = values[rows - rows[0]]
            if len(values) == n and values.dtype == np.float32:
                by_matrix = values.swapaxes(0, 1)
                if (
                    by_matrix.flags.c_contiguous
                    and by_matrix.base is not None
                    and by_matrix.flags.writeable
                ):
                    return by_matrix  # already in the right form, in its own memory
            self.backend.cast(out[:, target].swapaxes(0, 1), values)
        return out

    def slab_rows(self, run: slice) -> list[tuple[slice, Integers]]:
        """Return for each slab with images of a run: which of the run's images these are, and their
        rows in the store."""
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
    """Memory of each thread that is reused for the next piece of work: fresh memory costs page
    faults."""

    def __init__(self) -> None:
        self._buffers: dict[str, Float32] = {}

    def take(self, name: str, rows: int, columns: int) -> Float32:
        """Return (rows, columns) uninitialised, in the memory of the last call with this name."""
        n = rows * columns
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < n:
            buffer = self._buffers[name] = np.empty(n, np.float32)
        return buffer[:n].reshape(rows, columns)


class StoredRuns(Runs):
    """`Runs` that stay in memory as stored, float16 or bytes; a matrix is cast when it is needed.

    Patches keep their pixels' values, scaled as the model's normalisation does; the mean that it
    subtracts is the same for all pixels of a channel and has no effect.
    """

    _scratch = Scratch()
    # First image of a run -> for each slab: which of the run's images it has, and
    # (matrices, images, features) of these.
    _runs: dict[int, list[tuple[slice, NDArray[Any]]]]

    def __init__(
        self,
        stack: Stack,
        images: Integers,
        kept: int,
        backend: MatmulBackend,
        progress: Progress,
    ) -> None:
        super().__init__(stack, images, kept, backend, progress)
        self._means: dict[int, Float32] = {}  # matrix -> (features,)

    @staticmethod
    def supports(stack: Stack) -> bool:
        """Return whether a stack is stored as bytes or float16, and read without conversion."""
        if not isinstance(stack, TokenStack):
            return stack.scale is not None
        features = stack.features
        if features.matching is not None:
            return False
        return all(array.dtype == np.float16 for array in features.arrays)

    def features(self, k: int, run: slice, buffer: str) -> Float32:
        """Return (images, features) of matrix k in float32, in this thread's memory `buffer`."""
        n_images = run.stop - run.start
        x = self._scratch.take(buffer, n_images, self.stack.n_features)
        mean = self._matrix_mean(k)
        for target, values in self._runs[run.start]:
            raw = np.ascontiguousarray(values[k])
            if raw.dtype == np.float16:
                bits = raw.view(np.uint16)
                shift_half(bits, mean, x=x[target], column=0, sums=NO_SUMS)
            else:
                assert isinstance(self.stack, PatchPixels)
                assert self.stack.scale is not None
                shift_bytes(raw, mean, self.stack.scale, x[target])
        return x

    def _matrix_mean(self, k: int) -> Float32:
        """Return the mean (features,) to subtract from matrix k; whole numbers for bytes.

        It is over the first rows of the first run, which is loaded before any other.
        """
        if k not in self._means:
            _, values = self._runs[0][0]
            x = values[k][:MEAN_ROWS].astype(np.float32)
            # Differences to the first image: the mean of equal images is then exact.
            mean = x[0] + (x - x[0]).mean(0)
            self._means[k] = mean if isinstance(self.stack, TokenStack) else np.rint(mean)
        return self._means[k]

    def _request(self, run: slice) -> list[Callable[[], None]]:
        """Return one job per slab of the run; each puts its values where `features` finds them."""
        slab_rows = self.slab_rows(run)
        slabs = [(target, NO_VALUES) for target, _ in slab_rows]
        self._runs[run.start] = slabs

        def read(k: int) -> None:
            """Keep the k-th slab's values."""
            target, rows = slab_rows[k]
            slabs[k] = target, self._read_rows(rows)

        return [partial(read, k) for k in range(len(slab_rows))]

    def _read_rows(self, rows: Integers) -> NDArray[Any]:
        """Return (matrices, images, features), as stored, of rows of one slab."""
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
