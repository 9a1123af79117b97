"""Labels of a video's first frame, carried to the others by the similarity of tokens.

As in the released code of Jabri et al. 2020, Caron et al. 2021 (DINO) and Walmer et al.
2023. For every token q of a frame, over the tokens k of the first frame and of the last
`context` frames that lie within the window about q:

    a(q, k) = exp(cos(q, k) / temperature), 0 below the `top` largest of all these frames
    together label(q) = sum_k a(q, k) label(k) / sum_k a(q, k)

Tokens that tie with the last of the `top` largest are all kept. The labels of earlier
frames are those found here, soft and as they are. A frame's labels are enlarged to pixels,
each class scaled to 0 ... 1 by its own minimum and maximum, and the largest wins (the
first of equals): only this copy is scaled.

Cost: of all pairs of tokens only those of a strip of the longer axis with what its window
reaches are multiplied, about 0.55 of them for 28 x 49 cells, window 12. Memory: (context +
2) frames of tokens in float32, and the similarities of one strip.
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
# Pixels and cells are matched like Pillow's nearest resize, its rounding included: if the
# grid covers the frame exactly this is bitwise the resize of the released code. Cropped or
# padded frames are the general case.


_SNAP_DISTANCE = 1e-6  # pixels; edges this close to a pixel's are snapped to it


@dataclass(frozen=True)
class FrameAxis:
    """One axis of a frame and of its cells.

    Attributes:
        first: first cell whose middle is on the frame.
        stop: cell after the last one.
        length_px: pixels of the frame.
        low: where the first of these cells begins, in the frame's pixels; below 0 if it
            was padded.
        high: where the last of these cells ends, in the frame's pixels.
        seen: where all cells of the grid begin and end, in the frame's pixels.
        cell_px: input pixels of a cell, to which it is enlarged.
    """

    first: int
    stop: int
    length_px: int
    low: float
    high: float
    seen: tuple[float, float]
    cell_px: int

    @property
    def n(self) -> int:
        """Number of cells on the frame."""
        return self.stop - self.first

    def pixels_of_cells(self) -> Integers:
        """Return (cells,) the pixel in the middle of each cell.

        It is the border pixel for a cell whose middle is beyond the frame.
        """
        nearest = nearest_places(self.length_px, self.n, self.low, self.high)
        return np.clip(nearest, 0, self.length_px - 1)

    def cells_of_pixels(self, per_cell: int) -> Integers:
        """Return (pixels,) for each pixel of the frame the subcell on it.

        A pixel on a cell that is left out, as its middle is beyond the frame, has the
        nearest subcell; a pixel that no cell has seen has -1.

        per_cell: into how many subcells each cell is divided.
        """
        n_subcells = self.n * per_cell
        scale = n_subcells / (self.high - self.low)
        low = _snap((0 - self.low) * scale)
        high = _snap((self.length_px - self.low) * scale)
        nearest = nearest_places(n_subcells, self.length_px, low, high)
        middle = np.arange(self.length_px) + 0.5
        is_seen = (middle > self.seen[0]) & (middle < self.seen[1])
        return np.where(is_seen, np.clip(nearest, 0, n_subcells - 1), -1)

    def pixel_shares(self) -> Float:
        """Return (cells, pixels) the share of each pixel within each cell."""
        edges = self.low + (self.high - self.low) / self.n * np.arange(self.n + 1)
        pixels = np.arange(self.length_px)
        low = np.maximum(edges[:-1, None], pixels)
        high = np.minimum(edges[1:, None], pixels + 1)
        return np.maximum(high - low, 0.0)


@dataclass(frozen=True)
class FrameMap:
    """The mapping between a frame's pixels and a grid of cells: both axes.

    Attributes:
        y: the axis down, rows.
        x: the axis across, columns.
    """

    y: FrameAxis
    x: FrameAxis

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of cells on the frame."""
        return self.y.n, self.x.n

    def cells(self, tokens: NDArray[np.floating]) -> NDArray[np.floating]:
        """Return the cells on the frame, (rows, cols, dim).

        tokens: (rows, cols, dim) of the site's whole grid.
        """
        return tokens[self.y.first : self.y.stop, self.x.first : self.x.stop]

    def seeds(self, labels: NDArray[np.uint8], n_classes: int, how: str) -> Float32:
        """Return (rows, cols, classes) labels of the cells, adding up to 1.

        Args:
            labels: (height, width) numbers of classes.
            n_classes: number of classes, including the background.
            how: `nearest`: the class of the pixel in the middle; `area`: each class's
                share.
        """
        classes = np.arange(n_classes)
        if how == "nearest":
            rows = self.y.pixels_of_cells()
            cols = self.x.pixels_of_cells()
            cell_classes = labels[rows[:, None], cols]
            return (cell_classes[..., None] == classes).astype(np.float32)
        down = self.y.pixel_shares()  # (rows, height)
        across = self.x.pixel_shares()  # (cols, width)
        shares = np.stack([down @ (labels == i) @ across.T for i in classes], -1)
        # A cell's edge may exceed the frame slightly, its middle does not.
        return (shares / shares.sum(-1, keepdims=True)).astype(np.float32)

    def unseen_share(self) -> float:
        """Return the share of the frame's pixels that no cell has seen."""
        seen_down = float((self.y.cells_of_pixels(1) >= 0).mean())
        seen_across = float((self.x.cells_of_pixels(1) >= 0).mean())
        return 1 - seen_down * seen_across


def frame_map(
    site: str, layout: TokenLayout | None, placement: Placement, size: tuple[int, int]
) -> FrameMap:
    """Return the mapping of a frame to a site's grid.

    Args:
        site: the site's name, for messages.
        layout: the site's layout of tokens.
        placement: where the frame lies on the model's input.
        size: height and width of the frame in pixels.

    Raises:
        SiteError: the site has no grid, or its position is unknown.
        VitseeError: no cell is on the frame.
    """
    if layout is None or layout.grid is None or layout.stride_px is None:
        raise SiteError(
            f"{site} has no grid of tokens; propagate needs sites that have one"
        )
    on_frame = placement.on_image(layout)  # (rows, cols)
    if not on_frame.any():
        raise VitseeError(
            f"no token of {site} lies on frames of {size[1]} x {size[0]} pixels"
        )
    return FrameMap(
        y=_frame_axis(
            np.asarray(on_frame.any(1)),
            stride_px=layout.stride_px[0],
            offset_px=layout.offset_px[0],
            length_px=size[0],
            edges=(placement.top, placement.bottom),
        ),
        x=_frame_axis(
            np.asarray(on_frame.any(0)),
            stride_px=layout.stride_px[1],
            offset_px=layout.offset_px[1],
            length_px=size[1],
            edges=(placement.left, placement.right),
        ),
    )


def _frame_axis(
    on_frame: Mask,
    *,
    stride_px: float,
    offset_px: float,
    length_px: int,
    edges: tuple[float, float],
) -> FrameAxis:
    """Return one axis of a frame.

    Args:
        on_frame: (cells,) whose middle is on the frame.
        stride_px: input pixels from one cell to the next.
        offset_px: input pixel where the first cell begins.
        length_px: pixels of the frame.
        edges: input pixels where the frame begins and ends.
    """
    cells = np.flatnonzero(on_frame)
    first = int(cells[0])
    stop = int(cells[-1]) + 1
    scale = length_px / (edges[1] - edges[0])

    def frame_px(cell: int) -> float:
        """Return where a cell begins, in the frame's pixels."""
        return _snap((offset_px + cell * stride_px - edges[0]) * scale)

    return FrameAxis(
        first=first,
        stop=stop,
        length_px=length_px,
        low=frame_px(first),
        high=frame_px(stop),
        seen=(frame_px(0), frame_px(len(on_frame))),
        cell_px=max(1, round(stride_px)),
    )


def _snap(edge: float) -> float:
    """Return an edge without the rounding errors of its computation: whole where it nearly is."""
    if abs(edge - round(edge)) < _SNAP_DISTANCE:
        return float(round(edge))
    return float(edge)


# ---------------------------------------------------------------- labels from frame to
# frame


# Queries per strip: enough for efficient products, few enough to skip keys outside the
# window.
CPU_QUERIES = 128
GPU_QUERIES = 4096
STRIP_BYTES = 256 << 20
_TINY = 1e-9  # rounding of relative distances; in place of a radius of 0
UPSAMPLED_BYTES = 64 << 20  # of the classes that are enlarged at a time


@dataclass(frozen=True)
class WindowStrip:
    """Successive lines of queries across the longer axis, and the keys that their windows
    reach.

    Attributes:
        queries: tokens, in the order of `Window`.
        keys: tokens, in the order of `Window`.
        mask: (queries, keys) 0 within the window and -inf outside of it; None if all keys
            are within.
    """

    queries: slice
    keys: slice
    mask: Tensor | None


class Window:
    """Which tokens each token of a grid is compared with.

    Tokens are ordered along the longer axis, so that strips of it are consecutive.
    """

    def __init__(
        self,
        grid: tuple[int, int],
        settings: PropagationSettings,
        radii: tuple[float, float] | None,
        device: torch.device,
    ) -> None:
        """Describe the window.

        Args:
            grid: rows and columns of tokens.
            settings: how labels are carried.
            radii: radius of the window in rows and columns of the grid; None for no
                window.
            device: where tokens are compared.
        """
        self.grid = grid
        self.settings = settings
        self.device = device
        self._is_wide = grid[1] > grid[0]  # columns are the longer axis
        self.long = max(grid)
        self.short = min(grid)
        # Along the longer axis, then across.
        self._radii = radii
        if radii is not None and self._is_wide:
            self._radii = (radii[1], radii[0])

    @cached_property
    def strips(self) -> list[WindowStrip]:
        """The strips, which cover the grid."""
        reach = self.long if self._radii is None else int(self._radii[0])
        n_keys = min(self.long, 2 * reach + 1) * self.short * (self.settings.context + 1)
        n_queries = CPU_QUERIES if self.device.type == "cpu" else GPU_QUERIES
        # 4 bytes a similarity.
        n_queries = min(n_queries, max(self.short, STRIP_BYTES // (4 * n_keys)))
        n_lines = max(1, round(n_queries / self.short))
        return [
            self._strip(start, min(start + n_lines, self.long))
            for start in range(0, self.long, n_lines)
        ]

    def _strip(self, start: int, stop: int) -> WindowStrip:
        """Return the strip of the lines from `start` to `stop` across the longer axis."""
        queries = slice(start * self.short, stop * self.short)
        if self._radii is None:
            return WindowStrip(queries, slice(0, self.long * self.short), None)
        reach = int(self._radii[0])
        low = max(0, start - reach)
        high = min(self.long, stop + reach)
        keys = slice(low * self.short, high * self.short)
        # Distances in radii, (query lines, key lines) and (short, short).
        along = np.abs(np.arange(start, stop)[:, None] - np.arange(low, high))
        across = np.abs(np.arange(self.short)[:, None] - np.arange(self.short))
        relative_along = along / max(self._radii[0], _TINY)
        relative_across = across / max(self._radii[1], _TINY)
        # (query lines, short, key lines, short)
        dy = relative_along[:, None, :, None]
        dx = relative_across[None, :, None, :]
        if self.settings.neighbourhood == "square":
            distance = np.maximum(dy, dx)
        else:
            distance = dy**2 + dx**2
        is_within = distance.reshape(queries.stop - queries.start, -1) <= 1 + _TINY
        if is_within.all():
            return WindowStrip(queries, keys, None)
        mask = np.where(is_within, np.float32(0), np.float32(-np.inf))
        return WindowStrip(queries, keys, torch.from_numpy(mask).to(self.device))

    def order_tokens(self, cells: NDArray[np.floating]) -> Tensor:
        """Return (tokens, dim) float32 of length 1 in this order; cells: (rows, cols, dim)."""
        x = to_device(np.ascontiguousarray(cells), self.device).to(torch.float32)
        if self._is_wide:
            x = x.transpose(0, 1)
        return torch.nn.functional.normalize(x.reshape(-1, x.shape[-1]), dim=1)

    def order_labels(self, cells: Float32) -> Tensor:
        """Return (tokens, classes) in this order; cells: (rows, cols, classes)."""
        x = to_device(np.ascontiguousarray(cells), self.device)
        if self._is_wide:
            x = x.transpose(0, 1)
        return x.reshape(-1, x.shape[-1])

    def maps_of(self, labels: Tensor) -> Tensor:
        """Return (classes, rows, cols); labels: (tokens, classes) in this order."""
        x = labels.reshape(self.long, self.short, -1)
        if self._is_wide:
            x = x.transpose(0, 1)
        return x.permute(2, 0, 1)


class Propagation:
    """Carries labels through the frames of one video.

    Call `start` with the first frame, then `step` with each of the next ones.
    """

    def __init__(self, window: Window, dim: int, n_classes: int) -> None:
        """Reserve memory for the frames that count.

        Args:
            window: which tokens are compared.
            dim: channels of the tokens.
            n_classes: number of classes, including the background.
        """
        self._window = window
        self._settings = window.settings
        n_tokens = window.long * window.short
        n_slots = window.settings.context + 1
        device = window.device
        # The first frame, then a ring of the last ones.
        self._tokens = torch.empty((n_slots, n_tokens, dim), device=device)
        self._labels = torch.empty((n_slots, n_tokens, n_classes), device=device)
        self._new_labels = torch.empty((n_tokens, n_classes), device=device)
        self._buffer = torch.empty(0, device=device)
        self._n_seen = 0

    def start(self, tokens: Tensor, labels: Tensor) -> None:
        """Keep the first frame; tokens: (tokens, dim) of length 1, labels: (tokens, classes)."""
        self._tokens[0] = tokens
        self._labels[0] = labels
        self._n_seen = 0

    def step(self, tokens: Tensor) -> Tensor:
        """Return (tokens, classes) labels of the next frame, valid until the next call.

        tokens: (tokens, dim) of length 1.
        """
        n_slots = min(self._n_seen, self._settings.context) + 1
        for strip in self._window.strips:
            self._new_labels[strip.queries] = self._carry_labels(
                tokens[strip.queries], strip, n_slots
            )
        if self._settings.context:
            slot = 1 + self._n_seen % self._settings.context
            self._tokens[slot] = tokens
            self._labels[slot] = self._new_labels
        self._n_seen += 1
        return self._new_labels

    def _carry_labels(self, queries: Tensor, strip: WindowStrip, n_slots: int) -> Tensor:
        """Return (queries, classes) labels of a strip; queries: (queries, dim)."""
        keys = self._tokens[:n_slots, strip.keys]
        labels = self._labels[:n_slots, strip.keys]
        n_keys = keys.shape[1]
        cosines = self._similarities(queries, keys)
        if strip.mask is not None:
            cosines += strip.mask[:, None]
        cosines = cosines.reshape(len(queries), -1)  # (queries, slots * keys)
        top = min(self._settings.topk, cosines.shape[1])
        # One more, to detect ties with the last.
        values, indices = cosines.topk(min(top + 1, cosines.shape[1]), dim=1)
        # a(q, k), divided by their sum.
        weights = torch.softmax(values[:, :top] / self._settings.temperature, dim=1)
        # From (slot, key of the strip) to (slot, token of the frame).
        slot = indices[:, :top] // n_keys
        token = indices[:, :top] % n_keys + strip.keys.start
        top_labels = self._labels.flatten(0, 1)[slot * self._tokens.shape[1] + token]
        mixed = torch.einsum("qk,qkc->qc", weights, top_labels)
        if values.shape[1] > top:
            last = values[:, top - 1]
            ties = torch.nonzero((values[:, top] == last) & (last > -torch.inf))[:, 0]
            if len(ties):
                mixed[ties] = self._mix_with_ties(cosines[ties], values[ties], labels)
        return mixed

    def _mix_with_ties(self, cosines: Tensor, values: Tensor, labels: Tensor) -> Tensor:
        """Return (queries, classes) labels of queries that have more than `top` tokens by
        ties.

        Args:
            cosines: (queries, slots * keys).
            values: (queries, top + 1) the largest of them, descending.
            labels: (slots, keys, classes).
        """
        top = self._settings.topk
        is_kept = cosines >= values[:, top - 1 : top]
        # Less the largest, so that exp cannot overflow.
        exponents = (cosines - values[:, :1]) / self._settings.temperature
        weights = torch.where(is_kept, torch.exp(exponents), 0.0)
        return (weights / weights.sum(1, keepdim=True)) @ labels.flatten(0, 1)

    def _similarities(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return (queries, slots, keys), in a buffer that the next call overwrites.

        One product per slot writes straight into it, without a copy of the keys.
        """
        shape = len(queries), len(keys), keys.shape[1]
        size = shape[0] * shape[1] * shape[2]
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, device=queries.device)
        out = self._buffer[:size].view(shape)
        for slot, slot_keys in enumerate(keys):
            torch.mm(queries, slot_keys.T, out=out[:, slot])
        return out


class Enlarger:
    """Converts soft labels of cells to labels of a frame's pixels."""

    def __init__(self, frame_map: FrameMap, upsample: str, device: torch.device) -> None:
        """Find the subcell on each pixel.

        Args:
            frame_map: the mapping of the frame to the grid.
            upsample: `bilinear`, or `nearest`: the cell that contains the pixel.
            device: where labels are enlarged.
        """
        self._is_bilinear = upsample == "bilinear"
        rows_per_cell = frame_map.y.cell_px if self._is_bilinear else 1
        cols_per_cell = frame_map.x.cell_px if self._is_bilinear else 1
        rows, cols = frame_map.grid
        # The grid's size after it is enlarged to the model's input.
        self._size = [rows * rows_per_cell, cols * cols_per_cell]
        row_of_pixel = frame_map.y.cells_of_pixels(rows_per_cell)
        col_of_pixel = frame_map.x.cells_of_pixels(cols_per_cell)
        self._rows = torch.from_numpy(row_of_pixel).to(device)
        self._cols = torch.from_numpy(col_of_pixel).to(device)
        self._unseen_rows = np.flatnonzero(row_of_pixel < 0)
        self._unseen_cols = np.flatnonzero(col_of_pixel < 0)

    def __call__(self, maps: Tensor) -> NDArray[np.uint8]:
        """Return (height, width) the class of each pixel, 0 where no cell has seen it.

        maps: (classes, rows, cols).
        """
        labels = self.winners(maps).cpu().numpy()
        labels[self._unseen_rows] = 0
        labels[:, self._unseen_cols] = 0
        return labels

    def winners(self, maps: Tensor) -> Tensor:
        """Return the same on the device, where unseen pixels have an arbitrary class.

        maps: (classes, rows, cols).
        """
        # Classes in turns, as far as memory reaches; of equals the first wins.
        n_at_once = max(1, UPSAMPLED_BYTES // (4 * self._size[0] * self._size[1]))
        best: Tensor | None = None
        winner = torch.zeros(self._size, dtype=torch.uint8, device=maps.device)
        for start in range(0, len(maps), n_at_once):
            values, classes = self._enlarge(maps[start : start + n_at_once]).max(0)
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

    def _enlarge(self, maps: Tensor) -> Tensor:
        """Return (classes, height, width) on the model's input, each class from 0 to 1.

        A class that has one value everywhere (above 0) wins: the released code divides by
        0, and NaN is largest.
        """
        if self._is_bilinear:
            maps = torch.nn.functional.interpolate(
                maps[None].contiguous(),
                size=self._size,
                mode="bilinear",
                align_corners=False,
            )[0]
        # A class of one value gets +inf above 0 (by low = -inf) and 0 at 0.
        ends = torch.aminmax(maps.flatten(1), dim=1, keepdim=True)
        low = ends.min[..., None]
        high = ends.max[..., None]
        span = torch.where(high > low, high - low, 1.0)
        low = torch.where((high == low) & (high > 0), -torch.inf, low)
        return (maps - low).div_(span)
