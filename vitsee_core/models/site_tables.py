"""The site table of a model: proven on random images, sketched without weights, or that of a tower
for images of another size than the one that its table was made on.

For another size grids grow with the image; the order of packed tokens (groups that are merged,
windows) is found again, on numbers, as `packed_order` does it. A block whose places all have its
input's order leaves tokens where they are and is passed over, so that a size costs the embedding
and the mergers of some twenty images.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vitsee_core.models.batch_independence import ChangingModelError, changing
from vitsee_core.models.capture import Capture
from vitsee_core.models.hook_points import (
    CaptureError,
    ModelError,
    input_tensor,
    refuse_compiled,
)
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.proofs import AttentionProof, SumProof, beyond
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.sites.build import TableBuilder
from vitsee_core.models.survey import measured, needs_pixels, orders_at, survey
from vitsee_core.models.survey.tracing import probe_images
from vitsee_core.models.tokens.clip_order import UNSEEN, ClipOrder
from vitsee_core.models.tokens.clips import frames_of
from vitsee_core.models.tokens.packed_order import Order, Place, same_order
from vitsee_stores.layout import TokenLayout
from vitsee_stores.plan import Size

# In float32 the recomputed attention differs by summation order alone.
ATTENTION_TOLERANCE = 1e-4
NO_OUTPUT = "no module's output, nor one times a factor per channel"


def site_table(model: LoadedModel) -> SiteTable:
    """Run the model on random images, two or three times, and find its sites in those passes.

    Residual sums and attention are verified on those images; a block none of whose readings is
    right is listed with its output alone. Patch embeddings are measured, see `patches`.

    Raises:
        ModelError: parts of the model are compiled, traced or scripted.
    """
    refuse_compiled(model.module)
    found = survey(model.module, model.input_size, known=model.geometry)
    found = measured(model.module, model.input_size, found)
    demoted: dict[str, list[str]] = defaultdict(list)
    while True:
        table = TableBuilder(model.module, found, demoted, model.ablate_skip).build()
        failed = verify(model, table)
        if not failed:
            return table
        for name, reason in failed.items():
            demoted[name].append(reason)


def sketch(
    module: nn.Module, size: tuple[int, int, int], *, doubtful: bool = True
) -> SiteTable:
    """The site table as `site_table` begins it: what needs pixels (tokens in another order, patches
    measured, sums and attention proven) is left to that.

    Raises:
        ModelError: the model does not run on images of this size; without `doubtful` also where
            shapes do not show which dimensions of its tokens are the image's.
    """
    if not doubtful and frames_of(module) is not None:
        raise ModelError(UNSEEN)
    found = survey(module, size, doubtful=True)
    if not doubtful and needs_pixels(
        module, found.trace, [*found.blocks], found.geometry
    ):
        raise ModelError("shapes alone do not show where the image lies in its tokens")
    return TableBuilder(module, found, {}).build()


def verify(model: LoadedModel, table: SiteTable) -> dict[str, str]:
    """The claims of the table that two random images disprove: block path, or "PATH attention", ->
    reason. {} where nothing is disproved.

    Raises:
        ChangingModelError: other modules are called in every run.
    """
    if not table.residuals and not table.attention:
        return {}
    names = list(table.residuals)
    sums = SumProof(model.module, table, names)
    heads = AttentionProof(table)
    capture = Capture(model, table, sites=(), attention=table.attention)
    sums.attach(capture, names)
    heads.attach(capture, table.attention)
    device = next(model.module.parameters()).device
    images = probe_images(model.input_size, False, frames_of(model.module)).to(device)
    with torch.inference_mode(), capture, sums.watching():
        try:
            capture.run(images, heads)
        except CaptureError:
            words = changing(model.module, images)
            if words is None:
                raise
            raise ChangingModelError(f"{model.name} {words}") from None
    failed = {}
    for name in beyond(sums.errors, names, 1):
        residual = table.residuals[name]
        block = residual.total.rpartition(".")[0]
        failed[block] = f"{residual.formula} is not {residual.total}"
        if residual.witness is not None:
            failed[block] = f"what it adds is {NO_OUTPUT}"
    for name in beyond(
        heads.errors, [block.name for block in table.attention], ATTENTION_TOLERANCE
    ):
        failed[f"{name} attention"] = (
            "softmax of the scores times the values is not what the block uses next"
        )
    return failed


def layout_of_size(layout: TokenLayout, size: Size) -> TokenLayout | None:
    """The layout on an image of this size (rows, cols) in pixels; None where its cells do not cover
    the image exactly."""
    if layout.grid is None or layout.stride_px is None or layout.offset_px != (0, 0):
        return None
    cells = [length / step for length, step in zip(size, layout.stride_px, strict=True)]
    if any(n < 1 or n != int(n) for n in cells):
        return None
    return replace(layout, grid=(int(cells[0]), int(cells[1])))


def table_of_size(model: LoadedModel, table: SiteTable, size: Size) -> SiteTable:
    """The table for images of this size: its views of tokens, and the order of packed ones.

    Args:
        model: with the size of images that the table was made on as its `input_size`.
        table: `site_table` of the model.
        size: rows and columns in pixels.

    Raises:
        ModelError: the order of tokens of such images is not found.
    """
    points = {}
    for name, point in table.points.items():
        layout = point.view.layout
        own = None if layout is None else layout_of_size(layout, size)
        view = point.view if own is None else replace(point.view, layout=own)
        points[name] = replace(point, view=view)
    return replace(table, points=points, orders=_orders(model, table, size))


def _orders(
    model: LoadedModel, table: SiteTable, size: Size
) -> dict[Place, Order | ClipOrder]:
    """The orders that the table has, for images of this size; with every block in the pass where
    what is passed over leaves some of them out."""
    if not table.orders:
        return {}
    unmoved = _unmoved(table)
    found = _found(model, table, size, unmoved)
    missing = [place for place, order in found.items() if order is None]
    if missing and unmoved:
        found = _found(model, table, size, [])
        missing = [place for place, order in found.items() if order is None]
    if missing:
        rows, cols = model.input_size[1:]
        raise ModelError(
            f"{model.name}: of images of {size[1]} x {size[0]} pixels the order of tokens at "
            f"{missing[0][0] or 'its output'} is not found, as it is of {cols} x {rows}; leave "
            "such images out (--only), or leave out --native"
        )
    return {place: order for place, order in found.items() if order is not None}


def _found(
    model: LoadedModel, table: SiteTable, size: Size, unmoved: Sequence[str]
) -> dict[Place, Order | ClipOrder | None]:
    """The order at each of the table's places in a pass without these blocks, None where there is
    none with the cells of this size."""
    channels, *reference = model.input_size
    with (
        _passed_over(model.module, unmoved),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        try:
            seen = orders_at(model.module, (channels, *size))
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
            if not unmoved:
                raise
            seen = {}
    found: dict[Place, Order | ClipOrder | None] = {}
    for place, before in table.orders.items():
        around = next((path for path in unmoved if _within(place[0], path)), None)
        order = seen.get(place if around is None else (around, True))
        cells = [
            n * length / own
            for n, length, own in zip(before.grid, size, reference, strict=True)
        ]
        if order is None and cells == [
            1,
            1,
        ]:  # one cell an image, which is no grid by itself
            order = Order(
                (1, 1), torch.zeros(1, dtype=torch.long), getattr(before, "axis", 0)
            )
        found[place] = order if order is not None and [*order.grid] == cells else None
    return found


def _unmoved(table: SiteTable) -> list[str]:
    """Paths of the blocks all of whose places have the order of the block's input."""
    found = []
    for site in table.sites:
        hook_points = table.points[site.name].hook_points
        if site.part != "out" or site.block is None or len(hook_points) != 1:
            continue
        path = hook_points[0].module
        entering = table.orders.get((path, True))
        inside = [
            order for place, order in table.orders.items() if _within(place[0], path)
        ]
        if isinstance(entering, Order) and all(
            isinstance(order, Order) and same_order(entering, order) for order in inside
        ):
            found.append(path)
    return found


def _within(place: str, path: str) -> bool:
    return place == path or place.startswith(f"{path}.")


@contextmanager
def _passed_over(module: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Context in which these modules give their first argument."""

    def given(*args: Any, **kwargs: Any) -> Any:
        return input_tensor(args, kwargs)

    blocks = [module.get_submodule(path) for path in paths]
    for block in blocks:
        block.forward = given  # type: ignore[method-assign]
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
