"""Images at native resolution: each on a canvas, and seen by the model alone on a grid of its own.

The images of a batch go through the model size by size; their tokens come to lie in the top left
corner of the canvas' grid, whose other cells are 0. Attention is summarised on each image's own
grid, and sums over images by offset or by cell of the canvas' grid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitsee_core.extraction.buffers import PER_HEAD
from vitsee_core.extraction.plan import hook_points
from vitsee_core.extraction.slab import SlabObserver
from vitsee_core.models.capture import Capture, Observer
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import layout_of_size, table_of_size
from vitsee_core.models.sites import AttentionBlock, SiteTable
from vitsee_core.summaries import AttentionReducer, largest_magnitude
from vitsee_stores.layout import SiteSpec, StorePlan, TokenLayout
from vitsee_stores.plan import Canvas, Size

if TYPE_CHECKING:
    from vitsee_core.models.attention_watch import AttentionCall

OWN_GRIDS = "images at native resolution have grids of their own"
# Sizes whose captures stay in memory; the token order of one costs a few bytes per token and site.
MAX_SIZES = 256


def without_dangling_aliases(sites: Iterable[SiteSpec]) -> tuple[SiteSpec, ...]:
    """Return the sites without aliases of sites that are not among them."""
    by_name = {site.name: site for site in sites}
    return tuple(
        site
        for site in by_name.values()
        if site.alias_of is None or site.alias_of in by_name
    )


def table_on_canvas(table: SiteTable, canvas: Canvas) -> tuple[SiteTable, dict[str, str]]:
    """Find the sites that a store of images with grids of their own can have.

    Returns:
        These sites and attention blocks, with their grids on the whole canvas; and name -> reason
        for those left out.
    """
    no_grid = f"no grid of whole patches, and {OWN_GRIDS}"
    left_out: dict[str, str] = {}
    sites: list[SiteSpec] = []
    for site in table.sites:
        layout = None
        if site.layout is not None:
            layout = layout_of_size(site.layout, canvas.size)
        if site.kind == "vector":
            sites.append(site)
        elif layout is not None and not layout.prefix:
            shape = (layout.n_tokens, site.dim)
            sites.append(dataclasses.replace(site, layout=layout, shape=shape))
        elif {"blocks", "head"} & set(site.groups):
            left_out[site.name] = no_grid
    attention: list[AttentionBlock] = []
    for block in table.attention:
        layout = layout_of_size(block.layout, canvas.size)
        if layout is not None and not layout.prefix:
            attention.append(dataclasses.replace(block, layout=layout))
        else:
            left_out[f"{block.name} attention"] = no_grid
    on_canvas = dataclasses.replace(
        table,
        sites=without_dangling_aliases(sites),
        sublayers=(),
        attention=tuple(attention),
        attention_refusal=table.attention_refusal if attention else OWN_GRIDS,
        residual_refusal=OWN_GRIDS,
        rollout_refusal=OWN_GRIDS,
    )
    return on_canvas, left_out


def block_of_size(block: AttentionBlock, size: Size) -> AttentionBlock:
    """Return a block's attention on an image of this size.

    A window is cut to the image's grid, and is None if it covers the whole grid.
    """
    layout = layout_of_size(block.layout, size)
    assert layout is not None and layout.grid is not None
    window = None
    if block.window is not None:
        rows = min(block.window[0], layout.grid[0])
        cols = min(block.window[1], layout.grid[1])
        if (rows, cols) != layout.grid:
            window = (rows, cols)
    return dataclasses.replace(block, layout=layout, window=window)


class NativeCapture:
    """Runs a model on images of any size, all of one size at a time, and captures their sites.

    It is used as `Capture` is. The sites of a size are found when the size comes first, and stay in
    memory until `MAX_SIZES` others came.
    """

    def __init__(self, model: LoadedModel, table: SiteTable, plan: StorePlan) -> None:
        self._model = model
        self._table = table
        self._hook_points = hook_points(table, plan)
        self._captures: dict[Size, Capture] = {}

    def __enter__(self) -> NativeCapture:
        return self

    def __exit__(self, *_error: object) -> None:
        return

    def run(self, x: Tensor, observer: Observer) -> Any:
        """Run the model, and hand the observer what it captures.

        Args:
            x: (images, channels, rows, cols), all of one size.
            observer: receives sites and attention, on the grid of that size.

        Returns:
            The model's output.

        Raises:
            ModelError: the model's sites cannot be found on images of that size.
        """
        size = x.shape[2], x.shape[3]
        if size not in self._captures:
            if len(self._captures) == MAX_SIZES:
                oldest = next(iter(self._captures))
                del self._captures[oldest]
            table = table_of_size(self._model, self._table, size)
            attention = [
                block_of_size(block, size) for block in self._hook_points["attention"]
            ]
            points = {**self._hook_points, "attention": attention}
            self._captures[size] = Capture(self._model, table, **points)
        with self._captures[size] as capture:
            return capture.run(x, observer)


class NativeObserver(SlabObserver):
    """Copies the grids of images into the top left corner of the canvas' grid.

    Per batch: `begin_batch`, for each tensor of `passes` a captured forward of its pixels, and
    `end_batch`. Memory on the device, beside that of `SlabObserver`: the grids of one pass at one
    site, and the distances between all cells of one size.
    """

    def passes(self, pixels: Tensor, sizes: Sequence[Size]) -> Iterator[Tensor]:
        """Yield the pixels of the images of one size, (images, channels, rows, cols), for each.

        Args:
            pixels: (images, channels, height, width) of a batch, on the canvas.
            sizes: (height, width) of the original images, 0 for one that does not count: it is in
                no pass.
        """
        canvas = self._plan.canvas
        assert canvas is not None
        images_by_size: dict[Size, list[int]] = {}
        for image, size in enumerate(sizes):
            if min(size) > 0:
                images_by_size.setdefault(canvas.image(size), []).append(image)
        for (height, width), images in images_by_size.items():
            self._images = images
            # Distances are those of one size: reducers of the last size are freed here.
            self._reducers: dict[TokenLayout, AttentionReducer] = {}
            yield pixels[images, :, :height, :width]

    def images_of_pass(self, n_rows: int) -> list[int]:
        """Return the index in the batch of each image of the current size."""
        return self._images

    def _site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Store one site of the images of one size; `body` is (images, rows, cols, dim)."""
        stored = self._stored[site.name]
        name = site.name
        self._note_peak(name, largest_magnitude(body))
        if stored.kind == "vector":
            self._keep_each(f"vectors/{name}", body)
            return
        assert stored.layout is not None and stored.layout.grid is not None
        # The mean is over the image's own cells, not over the canvas'.
        mean = body.flatten(1, 2).mean(1, dtype=torch.float32)  # (images, dim)
        self._keep_each(f"pooled/{name}/mean", mean)
        if stored.tokens == "all":
            n_images, rows, cols, dim = body.shape
            grid = body.new_zeros(n_images, *stored.layout.grid, dim)
            grid[:, :rows, :cols] = body
            self._keep_each(f"acts/{name}/grid", grid)

    def _attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """Reduce one call on the images of one size, and add its sums at their canvas cells."""
        group, _, row = self._slots[block.name]
        folder = group.folder
        heads = slice(0, block.n_heads)
        layout = block.layout
        if layout not in self._reducers:
            self._reducers[layout] = AttentionReducer(layout, self._device, rollout=False)
        valid = torch.ones(len(self._images), dtype=torch.bool)
        summary = self._reducers[layout].reduce(call, valid)
        assert layout.grid is not None and group.layout.grid is not None
        rows, cols = layout.grid
        canvas_rows, canvas_cols = group.layout.grid

        # Token indices count along the image's rows: renumber them along the canvas'.
        token = summary.received_argmax
        token_row = torch.div(token, cols, rounding_mode="floor")
        canvas_token = token_row * canvas_cols + token % cols
        for name in PER_HEAD:
            value = getattr(summary, name)
            if name == "received_argmax":
                value = torch.where(token < 0, token, canvas_token)  # -1: no such token
            self._stage(folder + name, value, row, heads)
        self._stage(folder + "head_std", summary.head_std, row)

        # Offsets run from -(rows - 1) to rows - 1, so that offset 0 is the middle of both tables.
        aligned = self._sums[folder + "aligned"][row, heads]
        top = canvas_rows - rows
        left = canvas_cols - cols
        bottom = top + 2 * rows - 1
        right = left + 2 * cols - 1
        aligned[:, top:bottom, left:right] += summary.aligned
        received = self._sums[folder + "received"][row, heads]  # (heads, canvas cells)
        received = received.unflatten(1, group.layout.grid)
        received[:, :rows, :cols] += summary.received.unflatten(1, layout.grid)

    def _keep_each(self, path: str, values: Tensor) -> None:
        """Store the values of the current images, each at its row of the batch."""
        # The images of one size need not be consecutive, and a copy takes consecutive rows.
        for k, image in enumerate(self._images):
            self._keep(path, values[k : k + 1], slice(image, image + 1))
