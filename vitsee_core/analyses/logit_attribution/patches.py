"""The direct contributions of single patches to the logits of single images.

Where the classifier reads the mean over tokens, a patch has the part of its own token: of every
term of the stream. Where it reads the class token, a patch has what attention moves from it there,
the weight times its value through the output projection, of every head of a block; values are
computed with the model again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.logit_attribution.contributions import (
    LOGIT,
    WHOLE,
    Projection,
    ReadContributions,
    Readout,
    ResidualStream,
)
from vitsee_core.analyses.logit_attribution.explained_store import (
    METRIC,
    PREDICTED,
    ExplainedStore,
    class_name,
    projections_of,
)
from vitsee_core.analyses.logit_attribution.figures import TOTAL
from vitsee_core.attention.heads import StoredAttention, attention_blocks
from vitsee_core.attention.recompute import recomputed_calls
from vitsee_core.figures.patch_maps.photos import SheetImages, describe_sheet, shown_rows
from vitsee_core.figures.patch_maps.views import View, grid_sites
from vitsee_core.models.provenance import Provenance
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.streaming import Piece
from vitsee_core.tables.columns import SITE, cell_columns, site_columns
from vitsee_core.tables.results import Table
from vitsee_core.types import Float
from vitsee_stores.errors import NotOffered, VitseeError

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_core.models.attention_watch import AttentionCall
    from vitsee_stores import Store


# Of a block's attention: values computed again, on another device perhaps, against stored branches.
AGAIN = 1e-3


# An image's row, and its maps: branch or base site -> (classes, cells of the grid).
PatchParts = tuple[int, dict[str, Float]]


def one_image(store: Store, row: int) -> Piece:
    """The slab of one valid image."""
    return Piece(store, row // store.plan.slab, slice(row, row + 1), np.ones(1, bool))


def of_own_tokens(
    store: Store,
    stream: ResidualStream,
    readout: Readout,
    classes: Mapping[int, Sequence[int]],
) -> Iterator[PatchParts]:
    """The parts of each image's own tokens, where the classifier reads their mean. classes: of each
    row.

    Raises:
        MissingInput: a term is stored pooled only.
    """
    layout = store.site(stream.head.site).layout
    assert layout is not None
    body = slice(layout.n_prefix, None)
    for row, own in classes.items():
        piece = one_image(store, row)
        frozen = stream.frozen(piece)
        weights = frozen.weights[0] if frozen.kind is None else None
        maps = {}
        for site in stream.terms:
            tokens = piece.acts(site.name)[0, body].astype(np.float64)
            share = (
                frozen.weights[0] / layout.n_body if weights is None else weights[body]
            )
            maps[site.name] = (readout.vectors[list(own)] @ tokens.T) * share
        yield row, maps


def through_attention(
    store: Store,
    stream: ResidualStream,
    readout: Readout,
    projections: Mapping[str, Projection],
    classes: Mapping[int, Sequence[int]],
    origin: Provenance,
) -> Iterator[PatchParts]:
    """The parts that attention moves from each patch to the class token, in every block with
    attention. projections: of its heads; classes: of each row; origin: where images and weights are
    now.

    Raises:
        MissingInput: the store has no attention summaries.
        NotOffered: a block's attention is not among them.
        VitseeError: images or weights are gone, or give another attention than the store's.
    """
    blocks = [block for block in attention_blocks(store) if block.site in projections]
    if len(blocks) < len(projections):
        left = next(
            block for block in projections if block not in {b.site for b in blocks}
        )
        raise NotOffered(f"{store.label} has no attention of {left}: no --patches")
    every = sorted({c for own in classes.values() for c in own})
    vectors = readout.vectors[every]
    back = {block.site: vectors @ projections[block.site].weight for block in blocks}
    rows = np.array([*classes], np.int64)
    for some in recomputed_calls(store, rows, partial(_moved, back), blocks, origin):
        for i, row in enumerate(some.rows.tolist()):
            piece = one_image(store, row)
            frozen = stream.frozen(piece)
            scale = frozen.weights[0, 0]
            own = [every.index(c) for c in classes[row]]
            maps = {}
            for block in blocks:
                parts = scale * some.values[block.site]["moved"][i][own].astype(
                    np.float64
                )
                name = f"{block.site}.attn.branch"
                stored = vectors[own] @ frozen.pooled(piece, name)[0]
                again = parts.sum(1) + scale * (
                    vectors[own] @ projections[block.site].bias
                )
                if not np.abs(again - stored).max() <= AGAIN * np.abs(parts).sum(1).max():
                    raise VitseeError(
                        f"{store.label}: attention computed again moves another part to the class "
                        f"token in {block.site} ({again[0]:.4g}) than was stored ({stored[0]:.4g})"
                    )
                maps[name] = parts[:, block.layout.n_prefix :]
            yield row, maps


def _moved(
    back: Mapping[str, Float], block: StoredAttention, call: AttentionCall
) -> dict[str, Tensor]:
    """(images, classes, tokens) parts moved from each token to the class token, before the norm.
    back: block -> (classes, heads x head dim), classes read back through the projection."""
    import torch

    weights = torch.softmax(call.scores(slice(None)), -1)[:, :, block.layout.cls]
    read = torch.from_numpy(back[block.site]).to(weights)
    read = read.reshape(len(read), call.n_heads, -1)
    return {"moved": torch.einsum("nht,nhte,che->nct", weights, call.value.float(), read)}


# ---------------------------------------------------------------- the table


COLUMNS = (*SITE, "row", "col", "class", "image", "part", "metric", "value")
REST = "rest"  # of the logit: what the map has not


def patch_table(
    works: Sequence[ExplainedStore],
    names: Sequence[str],
    raw: bool,
    origin: Provenance,
    execution: Execution,
) -> Table:
    """A row per image, class, term and patch; then what they all give (`patches`), the rest of the
    logit, and the logit. The notes hold the photographs. names: of the images, by default the first
    four.

    Raises:
        MissingInput: tokens, or attention, are not stored.
        VitseeError: no such image, one without a label, images or weights that are gone.
    """
    rows: list[dict[str, Any]] = []
    shown: list[SheetImages] = []
    for work in works:
        store = work.store
        sites = grid_sites(store, [work.stream.head.site])
        picked = shown_rows(store, names, shown[0] if shown else None, execution)
        shown.append(SheetImages(store, View.of(store, sites), picked, sites))
        images = _Images(work, raw, picked)
        with counting(execution.progress, len(picked)):
            for row, maps in images.parts(origin):
                rows += images.rows_of(row, maps)
                execution.progress.advance(1)
    by_attention = {work.store.label: work.stream.head.pool == "cls" for work in works}
    notes = {
        "target": {work.store.label: work.target for work in works},
        "logits": "as they are" if raw else "less the mean over classes",
        "parts": {
            label: "moved by attention to the class token"
            if cls
            else "of the patch's own token"
            for label, cls in by_attention.items()
        },
        "sheet": describe_sheet(shown, origin.data),
    }
    return Table.concat(rows, COLUMNS, notes)


@dataclass
class _Images:
    """The images shown of one store."""

    work: ExplainedStore
    raw: bool
    picked: Sequence[int]

    def __post_init__(self) -> None:
        """Reads their logits, and finds the classes asked for, before any work."""
        work = self.work
        store = self.work.store
        self.readout = Readout.of(work.stream.head)
        read = ReadContributions(work.stream, self.readout, work.asked, {}, self.raw)
        self.logits: dict[int, Float] = {}
        self.classes: dict[int, list[int]] = {}
        for row in self.picked:
            piece = one_image(store, row)
            logits = read.logits(piece)
            own = work.asked.own(piece, logits).tolist()
            self.classes[row] = list(work.asked.classes or own)
            if -1 in self.classes[row]:
                raise VitseeError(
                    f"{str(store.samples.id[row])!r} of {store.label} has no label; give --target "
                    f"{PREDICTED} or --class"
                )
            self.logits[row] = logits[0] - (0.0 if self.raw else logits.mean())

    def parts(self, origin: Provenance) -> Iterator[PatchParts]:
        """Each image's maps, by what the classifier reads."""
        store = self.work.store
        stream = self.work.stream
        readout = self.readout if self.raw else self.readout.centred()
        if stream.head.pool != "cls":
            return of_own_tokens(store, stream, readout, self.classes)
        found = projections_of(store, stream, origin, stored=False)
        return through_attention(store, stream, readout, found, self.classes, origin)

    def rows_of(self, row: int, maps: Mapping[str, Float]) -> Iterator[dict[str, Any]]:
        """Blocks of the table's rows about one image; see `PatchParts`."""
        work = self.work
        store = self.work.store
        head = work.stream.head
        layout = store.site(head.site).layout
        assert layout is not None
        *inner, (_, _, whole) = work.entries()
        places = {site: (part, place) for (site, kind), part, place in inner if not kind}
        places[WHOLE] = (TOTAL, whole)
        total = np.sum(list(maps.values()), axis=0)  # (classes, cells)
        for c, number in enumerate(self.classes[row]):
            about = {
                "class": class_name(store, head.n_classes, number),
                "image": str(store.samples.id[row]),
                "metric": METRIC,
            }
            for site, values in [*maps.items(), (WHOLE, total)]:
                part, place = places[site]
                own = site_columns(store, place) | about | {"part": part}
                cells = cell_columns(layout, np.arange(values.shape[1]))
                yield own | cells | {"value": values[c]}
            own = site_columns(store, whole) | about
            logit = float(self.logits[row][number])
            yield own | {"part": REST, "value": logit - float(total[c].sum())}
            yield own | {"part": LOGIT, "value": logit}
