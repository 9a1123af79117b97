"""Read stacks of small feature matrices together: one matrix per token, or per patch of pixels.

Localisation compares each token of a site with each patch of the input, so it needs hundreds of
matrices of the same images. `TokenStack` and `PatchPixels` read them for consecutive images.
"""

from __future__ import annotations

import logging
import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features import SiteFeatures
from vitsee_core.images.placement import cell_edges
from vitsee_core.kernels.compiled import compiled
from vitsee_core.models.provenance import Pictures
from vitsee_core.runtime.machine import free_disk_bytes, human_bytes
from vitsee_core.runtime.progress import SILENT, Progress
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
        """Return (patches, images, features) of images `rows` of the store, bytes from 0 to 255.

        Features are (channel, row, column) of the largest patch, 0 where a patch is smaller.
        """
        assert isinstance(self.pixels, NormalisedInputs)
        stored = self.pixels.raw
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
