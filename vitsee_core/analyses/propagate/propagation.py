"""Labels of a video's first frame, carried to the others by the similarity of tokens.

As in the released code of Jabri et al. 2020, Caron et al. 2021 (DINO) and Walmer et al. 2023. For
every token q of a frame, over the tokens k of the first frame and of the last `context` frames that
lie within the window about q:

    a(q, k) = exp(cos(q, k) / temperature), 0 below the `top` largest of all these frames together
    label(q) = sum_k a(q, k) label(k) / sum_k a(q, k)

Tokens that tie with the last of the `top` largest are all kept. The labels of earlier frames are
those found here, soft and as they are. A frame's labels are enlarged to pixels, each class scaled
to 0 ... 1 by its own minimum and maximum, and the largest wins (the first of equals): only this
copy is scaled.

Cost: of all pairs of tokens only those of a strip of the longer axis with what its window reaches
are multiplied, about 0.55 of them for 28 x 49 cells, window 12. Memory: (context + 2) frames of
tokens in float32, and the similarities of one strip.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitsee_core.analyses.propagate.propagation_settings import PropagationSettings
from vitsee_core.images.placement import nearest_places
from vitsee_core.runtime.device import to_device
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.errors import SiteError, VitseeError

if TYPE_CHECKING:
    from vitsee_core.images.placement import Placement
    from vitsee_stores.layout import TokenLayout


# ---------------------------------------------------------------- frames and cells
#
# Mapping between a frame's pixels and the grid cells on it.
#
# Pixels and cells are matched like Pillow's nearest resize, its rounding included: if the grid
# covers the frame exactly this is bitwise the resize of the released code. Cropped or padded frames
# are the general case.


_WHOLE = 1e-6  # edges this close to a pixel's are snapped to it


@dataclass(frozen=True)
class FrameAxis:
    """One axis of a frame and of its cells.

    Attributes:
        first, stop: the cells whose middle is on the frame.
        length: pixels of the frame.
        low, high: where these cells begin and end, in its pixels; beyond it if it was padded.
        seen: where all cells of the grid begin and end.
        cell: input pixels of a cell, to which it is enlarged.
    """

    first: int
    stop: int
    length: int
    low: float
    high: float
    seen: tuple[float, float]
    cell: int

    @property
    def n(self) -> int:
        """Number of cells on the frame."""
        return self.stop - self.first

    def pixels_of_cells(self) -> Integers:
        """(cells,) the pixel in the middle of each cell; the border pixel for a cell whose middle
        is beyond the frame."""
        return np.clip(
            nearest_places(self.length, self.n, self.low, self.high), 0, self.length - 1
        )

    def cells_of_pixels(self, per_cell: int) -> Integers:
        """(pixels,) for each pixel its part of a cell, with `per_cell` parts each, or the nearest
        part if the cell is left out because its middle is beyond the frame; -1 for pixels that no
        cell has seen."""
        n = self.n * per_cell
        scale = n / (self.high - self.low)
        low, high = (_whole((edge - self.low) * scale) for edge in (0, self.length))
        nearest = nearest_places(n, self.length, low, high)
        middle = np.arange(self.length) + 0.5
        seen = (middle > self.seen[0]) & (middle < self.seen[1])
        return np.where(seen, np.clip(nearest, 0, n - 1), -1)

    def weights(self) -> Float:
        """(cells, pixels) share of each pixel within each cell."""
        edges = self.low + (self.high - self.low) / self.n * np.arange(self.n + 1)
        pixels = np.arange(self.length)
        low = np.maximum(edges[:-1, None], pixels)
        high = np.minimum(edges[1:, None], pixels + 1)
        return np.maximum(high - low, 0.0)


@dataclass(frozen=True)
class FrameMap:
    """Both axes of a frame."""

    y: FrameAxis
    x: FrameAxis

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of cells on the frame."""
        return self.y.n, self.x.n

    def cells(self, tokens: NDArray[np.floating]) -> NDArray[np.floating]:
        """The cells on the frame; tokens: (rows, cols, dim) of the site's grid."""
        return tokens[self.y.first : self.y.stop, self.x.first : self.x.stop]

    def seeds(self, labels: NDArray[np.uint8], n_classes: int, how: str) -> Float32:
        """(rows, cols, classes) labels of the cells, adding up to 1.

        Args:
            labels: (height, width) numbers of classes.
            n_classes: including the background.
            how: `nearest`: the class of the pixel in the middle; `area`: each class's share.
        """
        classes = np.arange(n_classes)
        if how == "nearest":
            seen = labels[self.y.pixels_of_cells()[:, None], self.x.pixels_of_cells()]
            return (seen[..., None] == classes).astype(np.float32)
        down = self.y.weights()
        across = self.x.weights()
        shares = np.stack([down @ (labels == i) @ across.T for i in classes], -1)
        # A cell's edge may exceed the frame slightly, its middle does not.
        return (shares / shares.sum(-1, keepdims=True)).astype(np.float32)

    def hidden(self) -> float:
        """The share of the frame that no cell has seen."""
        seen = [float((axis.cells_of_pixels(1) >= 0).mean()) for axis in (self.y, self.x)]
        return 1 - seen[0] * seen[1]


def frame_map(
    site: str, layout: TokenLayout | None, place: Placement, size: tuple[int, int]
) -> FrameMap:
    """The mapping of a frame to a site's grid.

    Args:
        site: its name.
        layout: of the site.
        place: of the frame on the model's input.
        size: height and width of the frame.

    Raises:
        SiteError: the site has no grid, or its position is unknown.
        VitseeError: no cell is on the frame.
    """
    if layout is None or layout.grid is None or layout.stride_px is None:
        raise SiteError(
            f"{site} has no grid of tokens; propagate needs sites that have one"
        )
    on = place.on_image(layout)
    if not on.any():
        raise VitseeError(
            f"no token of {site} lies on frames of {size[1]} x {size[0]} pixels"
        )
    edges = (place.top, place.bottom), (place.left, place.right)
    y, x = (
        _axis(
            np.asarray(on.any(1 - i)),
            layout.stride_px[i],
            layout.offset_px[i],
            size[i],
            edges[i],
        )
        for i in (0, 1)
    )
    return FrameMap(y, x)


def _axis(
    on: Mask, step: float, start: float, length: int, edges: tuple[float, float]
) -> FrameAxis:
    cells = np.flatnonzero(on)
    first = int(cells[0])
    stop = int(cells[-1]) + 1
    scale = length / (edges[1] - edges[0])
    begin, low, high, end = (
        _whole((start + i * step - edges[0]) * scale) for i in (0, first, stop, len(on))
    )
    return FrameAxis(first, stop, length, low, high, (begin, end), max(1, round(step)))


def _whole(edge: float) -> float:
    if abs(edge - round(edge)) < _WHOLE:
        return float(round(edge))
    return float(edge)


# ---------------------------------------------------------------- labels from frame to frame


# Queries per strip: enough for efficient products, few enough to skip keys outside the window.
CPU_QUERIES = 128
GPU_QUERIES = 4096
STRIP_BYTES = 256 << 20
_TINY = 1e-9
UPSAMPLED_BYTES = 64 << 20


@dataclass(frozen=True)
class WindowStrip:
    """Some lines of queries across the longer axis, and the keys that their windows reach."""

    queries: slice  # tokens, in the order of `Window`
    keys: slice  # tokens, in the order of `Window`
    # (queries, keys) 0 within the window and -inf outside of it; None if all keys are within
    outside: Tensor | None


class Window:
    """Which tokens each token of a grid may attend to; tokens are ordered along the longer axis, so
    that strips of it are consecutive."""

    def __init__(
        self,
        grid: tuple[int, int],
        settings: PropagationSettings,
        radii: tuple[float, float] | None,
        device: torch.device,
    ) -> None:
        """radii: of the window, in rows and columns of the grid; None for no window."""
        self.grid = grid
        self.settings = settings
        self.device = device
        self.across = grid[1] > grid[0]  # columns are the longer axis
        self.long = max(grid)
        self.short = min(grid)
        self._radii = radii if radii is None or not self.across else (radii[1], radii[0])

    @cached_property
    def strips(self) -> list[WindowStrip]:
        """Strips that cover the grid."""
        reach = self.long if self._radii is None else int(self._radii[0])
        n_keys = min(self.long, 2 * reach + 1) * self.short * (self.settings.context + 1)
        wanted = CPU_QUERIES if self.device.type == "cpu" else GPU_QUERIES
        wanted = min(wanted, max(self.short, STRIP_BYTES // (4 * n_keys)))
        lines = max(1, round(wanted / self.short))
        return [
            self._strip(i, min(i + lines, self.long)) for i in range(0, self.long, lines)
        ]

    def _strip(self, start: int, stop: int) -> WindowStrip:
        queries = slice(start * self.short, stop * self.short)
        if self._radii is None:
            return WindowStrip(queries, slice(0, self.long * self.short), None)
        reach = int(self._radii[0])
        low = max(0, start - reach)
        high = min(self.long, stop + reach)
        keys = slice(low * self.short, high * self.short)
        lines = np.arange(low, high)
        along = np.abs(np.arange(start, stop)[:, None] - lines)
        across = np.abs(np.arange(self.short)[:, None] - np.arange(self.short))
        far = [
            x / max(r, _TINY) for x, r in zip((along, across), self._radii, strict=True)
        ]
        a = far[0][:, None, :, None]
        b = far[1][None, :, None, :]
        square = self.settings.neighbourhood == "square"
        within = ((np.maximum(a, b) if square else a**2 + b**2) <= 1 + _TINY).reshape(
            queries.stop - queries.start, -1
        )
        if within.all():
            return WindowStrip(queries, keys, None)
        outside = np.where(within, np.float32(0), np.float32(-np.inf))
        return WindowStrip(queries, keys, torch.from_numpy(outside).to(self.device))

    def tokens(self, cells: NDArray[np.floating]) -> Tensor:
        """(tokens, dim) float32 of length 1 in this order; cells: (rows, cols, dim)."""
        x = to_device(np.ascontiguousarray(cells), self.device).to(torch.float32)
        x = x.transpose(0, 1) if self.across else x
        return torch.nn.functional.normalize(x.reshape(-1, x.shape[-1]), dim=1)

    def labels(self, cells: Float32) -> Tensor:
        """(tokens, classes) in this order; cells: (rows, cols, classes)."""
        x = to_device(np.ascontiguousarray(cells), self.device)
        return (x.transpose(0, 1) if self.across else x).reshape(-1, x.shape[-1])

    def maps(self, labels: Tensor) -> Tensor:
        """(classes, rows, cols) of (tokens, classes)."""
        x = labels.reshape(self.long, self.short, -1)
        return (x.transpose(0, 1) if self.across else x).permute(2, 0, 1)


class Propagation:
    """The frames of one video, in order: `start` with the first, then `step` with each."""

    def __init__(self, window: Window, dim: int, n_classes: int) -> None:
        """dim: of the tokens. n_classes: including the background."""
        self._window = window
        self._settings = window.settings
        n = window.long * window.short
        slots = window.settings.context + 1
        device = window.device
        # The first frame, then a ring of the last ones.
        self._tokens = torch.empty((slots, n, dim), device=device)
        self._labels = torch.empty((slots, n, n_classes), device=device)
        self._found = torch.empty((n, n_classes), device=device)
        self._buffer = torch.empty(0, device=device)
        self._n_seen = 0

    def start(self, tokens: Tensor, labels: Tensor) -> None:
        """The first frame; tokens: (tokens, dim) of length 1, labels: (tokens, classes)."""
        self._tokens[0], self._labels[0] = tokens, labels
        self._n_seen = 0

    def step(self, tokens: Tensor) -> Tensor:
        """(tokens, classes) labels of the next frame, valid until the next call."""
        n_slots = min(self._n_seen, self._settings.context) + 1
        for strip in self._window.strips:
            self._found[strip.queries] = self._labels_of(
                tokens[strip.queries], strip, n_slots
            )
        if self._settings.context:
            slot = 1 + self._n_seen % self._settings.context
            self._tokens[slot], self._labels[slot] = tokens, self._found
        self._n_seen += 1
        return self._found

    def _labels_of(self, queries: Tensor, strip: WindowStrip, n_slots: int) -> Tensor:
        keys, labels = (x[:n_slots, strip.keys] for x in (self._tokens, self._labels))
        n_keys = keys.shape[1]
        near = self._similarities(queries, keys)
        if strip.outside is not None:
            near += strip.outside[:, None]
        near = near.reshape(len(queries), -1)
        top = min(self._settings.topk, near.shape[1])
        # One more, to detect ties with the last.
        values, places = near.topk(min(top + 1, near.shape[1]), dim=1)
        weights = torch.softmax(values[:, :top] / self._settings.temperature, dim=1)
        places = places[:, :top]
        at = places // n_keys * self._tokens.shape[1] + places % n_keys + strip.keys.start
        chosen = self._labels.flatten(0, 1)[at]
        mixed = torch.einsum("qk,qkc->qc", weights, chosen)
        if values.shape[1] > top:
            last = values[:, top - 1]
            ties = torch.nonzero((values[:, top] == last) & (last > -torch.inf))[:, 0]
            if len(ties):
                mixed[ties] = self._with_ties(near[ties], values[ties], labels)
        return mixed

    def _with_ties(self, near: Tensor, values: Tensor, labels: Tensor) -> Tensor:
        """Labels of queries with more than `top` tied tokens."""
        top = self._settings.topk
        temperature = self._settings.temperature
        kept = near >= values[:, top - 1 : top]
        weights = torch.where(kept, torch.exp((near - values[:, :1]) / temperature), 0.0)
        return (weights / weights.sum(1, keepdim=True)) @ labels.flatten(0, 1)

    def _similarities(self, queries: Tensor, keys: Tensor) -> Tensor:
        """(queries, slots, keys), in a buffer that the next call overwrites."""
        shape = len(queries), len(keys), keys.shape[1]
        size = shape[0] * shape[1] * shape[2]
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, device=queries.device)
        out = self._buffer[:size].view(shape)
        for slot, of in enumerate(keys):
            torch.mm(queries, of.T, out=out[:, slot])
        return out


class Enlarged:
    """Converts soft labels of cells to a frame's pixels."""

    def __init__(self, place: FrameMap, upsample: str, device: torch.device) -> None:
        """upsample: `bilinear`, or `nearest`: the cell that contains the pixel."""
        self._shape = place.grid
        self._bilinear = upsample == "bilinear"
        axes = (place.y, place.x)
        self._per_cell = [axis.cell if self._bilinear else 1 for axis in axes]
        at = [
            axis.cells_of_pixels(n) for axis, n in zip(axes, self._per_cell, strict=True)
        ]
        self._rows, self._cols = (torch.from_numpy(of).to(device) for of in at)
        self._unseen = [np.flatnonzero(of < 0) for of in at]

    def __call__(self, maps: Tensor) -> NDArray[np.uint8]:
        """(height, width) the class of each pixel, 0 where no cell has seen it; maps: (classes,
        rows, cols)."""
        labels = self.winners(maps).cpu().numpy()
        labels[self._unseen[0]] = 0
        labels[:, self._unseen[1]] = 0
        return labels

    def winners(self, maps: Tensor) -> Tensor:
        """The same on the device, except that pixels that no cell has seen have an arbitrary
        class."""
        shape = [n * m for n, m in zip(self._shape, self._per_cell, strict=True)]
        at_once = max(1, UPSAMPLED_BYTES // (4 * shape[0] * shape[1]))
        best: Tensor | None = None
        winner = torch.zeros(shape, dtype=torch.uint8, device=maps.device)
        for start in range(0, len(maps), at_once):
            values, classes = self._scaled(maps[start : start + at_once], shape).max(0)
            classes = (classes + start).to(torch.uint8)
            if best is None:
                best = values
                winner = classes
            else:
                better = values > best
                best = torch.where(better, values, best)
                winner = torch.where(better, classes, winner)
        rows = self._rows.clamp(min=0)
        cols = self._cols.clamp(min=0)
        return winner[rows][:, cols]

    def _scaled(self, maps: Tensor, shape: list[int]) -> Tensor:
        """(classes, height, width) of the input's pixels, each class from 0 to 1. A class that has
        one value everywhere (above 0) wins: the released code divides by 0, and NaN is largest."""
        if self._bilinear:
            maps = torch.nn.functional.interpolate(
                maps[None].contiguous(), size=shape, mode="bilinear", align_corners=False
            )[0]
        ends = torch.aminmax(maps.flatten(1), dim=1, keepdim=True)
        low = ends.min[..., None]
        high = ends.max[..., None]
        span = torch.where(high > low, high - low, 1.0)
        low = torch.where((high == low) & (high > 0), -torch.inf, low)
        return (maps - low).div_(span)
