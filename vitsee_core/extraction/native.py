"""Images at native resolution: each on a canvas, and seen by the model alone on a grid of its own.

The images of a batch go through the model size by size; their tokens come to lie in the top left
corner of the canvas' grid, whose other cells are 0. Attention is summarised on each image's own
grid, and sums over images by offset or by cell of the canvas' grid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
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
MOST_SIZES = (
    256  # kept; the order of the tokens of one takes some bytes a token and place
)


def table_on_canvas(table: SiteTable, canvas: Canvas) -> tuple[SiteTable, dict[str, str]]:
    """The sites that a store of images with grids of their own can keep, on the canvas' grid; and
    why others cannot."""
    kept: dict[str, SiteSpec] = {}
    left_out: dict[str, str] = {}
    for site in table.sites:
        layout = None if site.layout is None else layout_of_size(site.layout, canvas.size)
        if site.kind == "vector":
            kept[site.name] = site
        elif layout is not None and not layout.prefix:
            shape = (layout.n_tokens, site.dim)
            kept[site.name] = dataclasses.replace(site, layout=layout, shape=shape)
        elif {"blocks", "head"} & set(site.groups):
            left_out[site.name] = f"no grid of whole patches, and {OWN_GRIDS}"
    sites = tuple(s for s in kept.values() if s.alias_of is None or s.alias_of in kept)
    attention = []
    for block in table.attention:
        layout = layout_of_size(block.layout, canvas.size)
        if layout is not None and not layout.prefix:
            attention.append(dataclasses.replace(block, layout=layout))
        else:
            left_out[f"{block.name} attention"] = (
                f"no grid of whole patches, and {OWN_GRIDS}"
            )
    return dataclasses.replace(
        table,
        sites=sites,
        sublayers=(),
        attention=tuple(attention),
        attention_refusal=table.attention_refusal if attention else OWN_GRIDS,
        residual_refusal=OWN_GRIDS,
        rollout_refusal=OWN_GRIDS,
    ), left_out


def block_of_size(block: AttentionBlock, size: Size) -> AttentionBlock:
    """The attention of a block on an image of this size, its windows cut where they are larger."""
    layout = layout_of_size(block.layout, size)
    assert layout is not None and layout.grid is not None
    window = None
    if block.window is not None:
        cut = min(block.window[0], layout.grid[0]), min(block.window[1], layout.grid[1])
        window = None if cut == layout.grid else cut
    return dataclasses.replace(block, layout=layout, window=window)


class NativeCapture:
    """Runs a model on images of any size, all of one size at a time, and captures their sites as
    `Capture` does. The sites of each size are found when it comes first, and kept until
    many others came."""

    def __init__(self, model: LoadedModel, table: SiteTable, plan: StorePlan) -> None:
        self._model = model
        self._table = table
        self._chosen = hook_points(table, plan)
        self._captures: dict[Size, Capture] = {}

    def __enter__(self) -> NativeCapture:
        return self

    def __exit__(self, *_error: object) -> None:
        return

    def run(self, x: Tensor, observer: Observer) -> Any:
        """Run the model as `Capture.run` does, on images (images, channels, rows, cols) of one
        size. Raises ModelError: as `table_of_size`."""
        size = x.shape[2], x.shape[3]
        if size not in self._captures:
            if len(self._captures) == MOST_SIZES:
                del self._captures[next(iter(self._captures))]
            table = table_of_size(self._model, self._table, size)
            blocks = [block_of_size(block, size) for block in self._chosen["attention"]]
            chosen = {**self._chosen, "attention": blocks}
            self._captures[size] = Capture(self._model, table, **chosen)
        with self._captures[size] as capture:
            return capture.run(x, observer)


class NativeObserver(SlabObserver):
    """Puts the grids of images on the canvas' grid.

    Per batch: `begin_batch`, for each part of `parts` a captured forward of its pixels, and
    `end_batch`. Memory on the device, beside that of `SlabObserver`: one site's grids of one part,
    and the distances between all cells of one size.
    """

    def parts(self, pixels: Tensor, sizes: Sequence[Size]) -> Iterator[Tensor]:
        """Pixels of the images of one size, (images, channels, rows, cols), size by size.

        Args:
            pixels: (images, channels, height, width) of a batch, on the canvas.
            sizes: (height, width) of the original images, 0 for one that does not count: it has no
                part.
        """
        canvas = self._plan.canvas
        assert canvas is not None
        by_size: dict[Size, list[int]] = {}
        for image, size in enumerate(sizes):
            if min(size) > 0:
                by_size.setdefault(canvas.image(size), []).append(image)
        for (height, width), images in by_size.items():
            self._images = images
            self._reducers: dict[TokenLayout, AttentionReducer] = {}
            yield pixels[images, :, :height, :width]

    def images_of_pass(self, n_rows: int) -> list[int]:
        return self._images

    def _site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        stored = self._stored[site.name]
        name = site.name
        self._note_peak(name, largest_magnitude(body))
        if stored.kind == "vector":
            self._keep_each(f"vectors/{name}", body)
            return
        assert stored.layout is not None and stored.layout.grid is not None
        self._keep_each(
            f"pooled/{name}/mean", body.flatten(1, 2).mean(1, dtype=torch.float32)
        )
        if stored.tokens == "all":
            rows, cols = body.shape[1:3]
            grid = body.new_zeros(len(body), *stored.layout.grid, body.shape[3])
            grid[:, :rows, :cols] = body
            self._keep_each(f"acts/{name}/grid", grid)

    def _attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        group, _, row = self._place[block.name]
        folder = group.folder
        heads = slice(0, block.n_heads)
        layout = block.layout
        if layout not in self._reducers:
            self._reducers[layout] = AttentionReducer(layout, self._device, rollout=False)
        valid = torch.ones(len(self._images), dtype=torch.bool)
        summary = self._reducers[layout].reduce(call, valid)
        assert layout.grid is not None and group.layout.grid is not None
        (rows, cols), (all_rows, all_cols) = layout.grid, group.layout.grid
        token = summary.received_argmax
        on_canvas = (
            torch.div(token, cols, rounding_mode="floor") * all_cols + token % cols
        )
        for name in PER_HEAD:
            value = getattr(summary, name)
            if name == "received_argmax":
                value = torch.where(token < 0, token, on_canvas)
            self._stage(folder + name, value, row, heads)
        self._stage(folder + "head_std", summary.head_std, row)
        down = all_rows - rows
        across = all_cols - cols
        offsets = self._sums[folder + "aligned"][row, heads]
        offsets[:, down : down + 2 * rows - 1, across : across + 2 * cols - 1] += (
            summary.aligned
        )
        received = self._sums[folder + "received"][row, heads].unflatten(
            1, group.layout.grid
        )
        received[:, :rows, :cols] += summary.received.unflatten(1, layout.grid)

    def _keep_each(self, path: str, values: Tensor) -> None:
        """Store the values of the part's images, each at its place in the batch."""
        for k, image in enumerate(self._images):
            self._keep(path, values[k : k + 1], slice(image, image + 1))
