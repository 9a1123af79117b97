"""The pixels of each input patch, as the model saw them: normalised, patch by patch.

From the store if `extract --inputs` stored them; else the images are loaded again from the data set
that the store records, and refused if they differ; see `provenance.Pictures`.
"""

from __future__ import annotations

import logging
import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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

AT_ONCE = 64
# Neighbouring pixels: a loop of a fixed length is one instruction. Images whose patches at a place
# are cut one after the other.
AT_A_TIME, NEAR = np.uint64(16), 8

log = logging.getLogger(__name__)


class PatchPixels:
    """Each patch's pixels as features, channels first: a `similarity.stacks.Stack`.

    The patch of a grid cell is the pixels of the cell, see `cells.cell_edges`. Smaller patches are
    padded with zeros, which do not affect similarities.
    """

    def __init__(
        self, store: Store, pixels: LazyArray, layout: TokenLayout, cells: Integers | None = None
    ) -> None:
        """layout: of a site with a grid; cells: only these of it, row by row."""
        assert layout.grid is not None
        self.store, self.pixels, self.layout = store, pixels, layout
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
        stored, edges, n = self.pixels.pixels, np.array(self._edges()), rows.stop - rows.start
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
    of, to = pixels.reshape(-1), out.reshape(-1)
    for first in range(0, n, NEAR):
        for k in range(len(edges)):
            (top, bottom), (left, right) = edges[k]
            low, high = max(left, begin[3]), min(right, begin[3] + width)
            some = np.uint64(max(0, high - low))
            many = some // AT_A_TIME * AT_A_TIME
            for image in range(first, min(first + NEAR, n)):
                for channel in range(n_channels):
                    plane = (image * n_channels + channel) * height
                    place = (
                        (k * out.shape[1] + begin[0] + image) * out.shape[2] + begin[1] + channel
                    ) * down
                    for y in range(max(top, begin[2]), min(bottom, begin[2] + height)):
                        # None is negative.
                        source = np.uint64((plane + y - begin[2]) * width + low - begin[3])
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


def _load(store: Store, rows: Integers, pictures: Pictures, progress: Progress) -> LazyArray:
    """The pixels of these rows in a temporary file. Raises VitseeError: an image has changed or is
    gone, or there is no room."""
    name, transform = pictures.source.name, store.manifest.transform
    shape = (store.n_images, *(int(n) for n in transform["input_size"]))
    need, free = len(rows) * int(np.prod(shape[1:])), free_disk_bytes(Path(tempfile.gettempdir()))
    if need > free:
        raise VitseeError(f"they take {human_bytes(need)}, {human_bytes(free)} are free for it")
    log.info("%s keeps no pixels: loading %d images of %s again", *(store.label, len(rows), name))
    pictures.check_decoding()
    with tempfile.TemporaryFile(prefix="vitsee-pixels") as file:
        file.truncate(int(np.prod(shape)))  # sparse: only used rows take space
        kept = np.memmap(file, np.uint8, "r+", shape=shape)
    progress.start(len(rows))
    try:
        for start in range(0, len(rows), AT_ONCE):
            some = rows[start : start + AT_ONCE]
            kept[some] = pictures(some)
            progress.advance(len(some))
    finally:
        progress.stop()
    return _Reloaded(kept, store.valid, transform)


class _Reloaded(LazyArray):
    """The array that `Store.inputs` is, of pixels that were loaded again."""

    def __init__(
        self, pixels: NDArray[np.uint8], valid: NDArray[np.bool_], transform: dict[str, Any]
    ) -> None:
        self.pixels, self.valid, self.transform = pixels, valid, transform
        self.shape, self.dtype = pixels.shape, np.dtype(np.float32)

    def load(self, box: tuple[slice, ...]) -> NDArray[np.float32]:
        """Normalises all channels and pixels of the images in `box`."""
        import torch

        from vitsee_core.images import normalise

        whole = normalise(torch.from_numpy(self.pixels[box[0]]), self.transform, "cpu").numpy()
        whole[~self.valid[box[0]]] = np.nan
        return whole[(slice(None), *box[1:])]
