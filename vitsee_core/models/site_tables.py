"""The site table of a model: proven on random images (`site_table`), sketched without weights
(`sketch`), or adapted to images of another size (`table_of_size`).

For another size grids grow with the image; the order of packed tokens (groups that are merged,
windows) is found again, on numbers, as `packed_order` does it. A block in which all tensors have
the order of its input leaves tokens where they are and is passed over, so that a size costs the
embedding and the mergers of some twenty images.
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
    ModuleSide,
    input_tensor,
    refuse_compiled,
)
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.proofs import AttentionProof, SumProof, beyond
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.sites.build import TableBuilder
from vitsee_core.models.survey import (
    needs_pixels,
    orders_at,
    survey,
    with_measured_patches,
)
from vitsee_core.models.survey.tracing import probe_images
from vitsee_core.models.tokens.clip_order import UNSEEN, ClipOrder
from vitsee_core.models.tokens.clips import frames_of
from vitsee_core.models.tokens.packed_order import Order, same_order
from vitsee_stores.layout import TokenLayout
from vitsee_stores.plan import Size

# In float32 the recomputed attention differs by summation order alone.
ATTENTION_TOLERANCE = 1e-4
NO_OUTPUT = "no module's output, nor one times a factor per channel"


def site_table(model: LoadedModel) -> SiteTable:
    """Return the sites of a model, found and verified by running it on random images.

    Residual sums and attention are verified on those images; a block none of whose readings is
    right is listed with its output alone. The pixels of each patch are measured. All this takes
    a handful of forward passes.

    Raises:
        ModelError: parts of the model are compiled, traced or scripted.
    """
    refuse_compiled(model.module)
    observed = survey(model.module, model.input_size, geometry=model.geometry)
    observed = with_measured_patches(model.module, model.input_size, observed)
    # A block's readings are tried one after another: each failure rules out one more, until all
    # that is left in the table holds.
    disproved: dict[str, list[str]] = defaultdict(list)
    while True:
        table = TableBuilder(model.module, observed, disproved, model.ablate_skip).build()
        failures = verify(model, table)
        if not failures:
            return table
        for name, reason in failures.items():
            disproved[name].append(reason)


def sketch(
    module: nn.Module, size: tuple[int, int, int], *, allow_ambiguous_axes: bool = True
) -> SiteTable:
    """Return the site table that shapes alone show: tokens are taken to lie in raster order, and
    neither patches are measured nor sums and attention verified.

    Args:
        module: the model, on the meta device or with values.
        size: (channels, rows, cols) of its input.
        allow_ambiguous_axes: whether shapes may leave open which dimensions of the tokens are the
            image's.

    Raises:
        ModelError: the model does not run on images of this size; these dimensions are open and
            may not be.
    """
    if not allow_ambiguous_axes and frames_of(module) is not None:
        raise ModelError(UNSEEN)
    observed = survey(module, size, allow_ambiguous_axes=True)
    is_ambiguous = not allow_ambiguous_axes and needs_pixels(
        module, observed.trace, [*observed.blocks], observed.geometry
    )
    if is_ambiguous:
        raise ModelError("shapes alone do not show where the image lies in its tokens")
    return TableBuilder(module, observed, {}).build()


def verify(model: LoadedModel, table: SiteTable) -> dict[str, str]:
    """Return the claims of a site table that two random images disprove.

    Returns:
        Block path, or "PATH attention", -> reason; {} where nothing is disproved.

    Raises:
        ChangingModelError: other modules are called in every run.
    """
    if not table.residuals and not table.attention:
        return {}
    sublayer_names = list(table.residuals)
    sum_proof = SumProof(model.module, table, sublayer_names)
    attention_proof = AttentionProof(table)
    capture = Capture(model, table, sites=(), attention=table.attention)
    sum_proof.attach(capture, sublayer_names)
    attention_proof.attach(capture, table.attention)
    device = next(model.module.parameters()).device
    images = probe_images(
        model.input_size, corners=False, frames=frames_of(model.module)
    ).to(device)
    with torch.inference_mode(), capture, sum_proof.watching():
        try:
            capture.run(images, attention_proof)
        except CaptureError:
            change = changing(model.module, images)
            if change is None:
                raise
            raise ChangingModelError(f"{model.name} {change}") from None
    failures = {}
    # Errors of sums are in units of rounding: more than one is not a rounding.
    for name in beyond(sum_proof.errors, sublayer_names, 1):
        residual = table.residuals[name]
        block = residual.total.rpartition(".")[0]
        failures[block] = f"{residual.formula} is not {residual.total}"
        if residual.witness is not None:
            failures[block] = f"what it adds is {NO_OUTPUT}"
    attention_names = [block.name for block in table.attention]
    for name in beyond(attention_proof.errors, attention_names, ATTENTION_TOLERANCE):
        failures[f"{name} attention"] = (
            "softmax of the scores times the values is not what the block uses next"
        )
    return failures


def layout_of_size(layout: TokenLayout, size: Size) -> TokenLayout | None:
    """Return the layout on an image of this size (rows, cols) in pixels; None where its cells do
    not cover the image exactly."""
    if layout.grid is None or layout.stride_px is None or layout.offset_px != (0, 0):
        return None
    cells = [length / step for length, step in zip(size, layout.stride_px, strict=True)]
    if any(n < 1 or n != int(n) for n in cells):
        return None
    return replace(layout, grid=(int(cells[0]), int(cells[1])))


def table_of_size(model: LoadedModel, table: SiteTable, size: Size) -> SiteTable:
    """Return the table for images of another size: its views of tokens, and the order of packed
    tokens.

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
        resized = None if layout is None else layout_of_size(layout, size)
        if resized is not None:
            point = replace(point, view=replace(point.view, layout=resized))
        points[name] = point
    return replace(table, points=points, orders=_orders_of_size(model, table, size))


def _orders_of_size(
    model: LoadedModel, table: SiteTable, size: Size
) -> dict[ModuleSide, Order | ClipOrder]:
    """Return the orders of tokens that the table has, for images of another size.

    Raises:
        ModelError: the order at one of the table's module sides is not found.
    """
    if not table.orders:
        return {}
    skipped = _blocks_in_order(table)
    orders = _orders_without_blocks(model, table, size, skipped)
    missing = [side for side, order in orders.items() if order is None]
    if missing and skipped:
        # Without some blocks the pass may not reach all sides: run it with every block.
        orders = _orders_without_blocks(model, table, size, skipped=[])
        missing = [side for side, order in orders.items() if order is None]
    if missing:
        rows, cols = model.input_size[1:]
        raise ModelError(
            f"{model.name}: of images of {size[1]} x {size[0]} pixels the order of "
            f"tokens at {missing[0].module or 'its output'} is not found, as it is of "
            f"{cols} x {rows}; leave such images out (--only), or leave out --native"
        )
    return {side: order for side, order in orders.items() if order is not None}


def _orders_without_blocks(
    model: LoadedModel, table: SiteTable, size: Size, skipped: Sequence[str]
) -> dict[ModuleSide, Order | ClipOrder | None]:
    """Return the order at each of the table's module sides in a pass without these blocks; None
    where there is none with the cells of this size."""
    channels, *reference_size = model.input_size
    with (
        _returning_inputs(model.module, skipped),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        try:
            orders_in_pass = orders_at(model.module, (channels, *size))
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
            if not skipped:
                raise
            orders_in_pass = {}
    orders: dict[ModuleSide, Order | ClipOrder | None] = {}
    for side, reference in table.orders.items():
        # All sides in a skipped block have the order of its input.
        block = next((path for path in skipped if _is_within(side.module, path)), None)
        side_in_pass = side if block is None else ModuleSide(block, is_input=True)
        order: Order | ClipOrder | None = orders_in_pass.get(side_in_pass)
        expected_grid = [
            n * new / old
            for n, new, old in zip(reference.grid, size, reference_size, strict=True)
        ]
        if order is None and expected_grid == [1, 1]:
            # One cell an image: there is no order to find.
            axis = getattr(reference, "axis", 0)
            order = Order((1, 1), index=torch.zeros(1, dtype=torch.long), axis=axis)
        if order is not None and [*order.grid] != expected_grid:
            order = None
        orders[side] = order
    return orders


def _blocks_in_order(table: SiteTable) -> list[str]:
    """Return the paths of the blocks in which all tensors have the order of the block's input."""
    paths = []
    for site in table.sites:
        hook_points = table.points[site.name].hook_points
        if site.part != "out" or site.block is None or len(hook_points) != 1:
            continue
        path = hook_points[0].module
        input_order = table.orders.get(ModuleSide(path, is_input=True))
        orders_inside = [
            order for side, order in table.orders.items() if _is_within(side.module, path)
        ]
        if isinstance(input_order, Order) and all(
            isinstance(order, Order) and same_order(input_order, order)
            for order in orders_inside
        ):
            paths.append(path)
    return paths


def _is_within(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


@contextmanager
def _returning_inputs(module: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Return a context in which the modules at these paths return their first argument."""

    def return_input(*args: Any, **kwargs: Any) -> Any:
        return input_tensor(args, kwargs)

    blocks = [module.get_submodule(path) for path in paths]
    for block in blocks:
        block.forward = return_input  # type: ignore[method-assign]
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
