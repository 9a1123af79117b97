"""The direct contributions of single patches to the logits of single images.

If the classifier reads the mean over tokens, a patch has the part of its own token, for every term
of the stream. If it reads the class token, a patch has what attention moves from it to the class
token: weight times value through the output projection, summed over the heads of a block. The
values are computed with the model again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.logit_attribution.contributions import (
    LOGIT,
    Projection,
    ReadContributions,
    Readout,
)
from vitsee_core.analyses.logit_attribution.explained_store import (
    METRIC,
    PREDICTED,
    ExplainedStore,
    class_name,
    projections_of,
)
from vitsee_core.analyses.logit_attribution.figures import TOTAL
from vitsee_core.analyses.logit_attribution.residual_stream import ResidualStream
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


# Largest difference from the stored branch of values that are computed again, perhaps on another
# device, relative to the parts of all tokens.
RECOMPUTE_TOLERANCE = 1e-3


# An image's row, and its maps: branch or base site -> (classes, cells of the grid).
PatchParts = tuple[int, dict[str, Float]]


def one_image(store: Store, row: int) -> Piece:
    """Return the piece of a slab that holds one valid image."""
    return Piece(store, row // store.plan.slab, slice(row, row + 1), np.ones(1, bool))


def map_own_tokens(
    store: Store,
    stream: ResidualStream,
    readout: Readout,
    classes: Mapping[int, Sequence[int]],
) -> Iterator[PatchParts]:
    """Yield each image's maps of what its patches' own tokens add, if their mean is read.

    Args:
        store: the store, with all tokens of every term.
        stream: the stream that is split.
        readout: the classifier.
        classes: row of an image -> the classes whose logits are mapped.

    Raises:
        MissingInput: a term is stored pooled only.
    """
    layout = store.site(stream.head.site).layout
    assert layout is not None
    body = slice(layout.n_prefix, None)
    for row, image_classes in classes.items():
        piece = one_image(store, row)
        frozen = stream.freeze_norm(piece)
        if frozen.kind is None:
            weights = frozen.weights[0, body]  # (patches,)
        else:
            # The norm follows the mean: all patches have the same weight.
            weights = frozen.weights[0] / layout.n_body
        vectors = readout.vectors[list(image_classes)]
        maps = {}
        for site in stream.terms:
            tokens = piece.acts(site.name)[0, body].astype(np.float64)
            maps[site.name] = (vectors @ tokens.T) * weights  # (classes, patches)
        yield row, maps


def map_through_attention(
    store: Store,
    stream: ResidualStream,
    readout: Readout,
    projections: Mapping[str, Projection],
    classes: Mapping[int, Sequence[int]],
    origin: Provenance,
) -> Iterator[PatchParts]:
    """Yield each image's maps of what attention moves from each patch to the class token.

    Args:
        store: the store.
        stream: the stream that is split.
        readout: the classifier.
        projections: block -> the projection of its heads, for every block with attention.
        classes: row of an image -> the classes whose logits are mapped.
        origin: where images and weights are now.

    Raises:
        MissingInput: the store has no attention summaries.
        NotOffered: a block's attention is not among them.
        VitseeError: images or weights are gone, or give another attention than the store's.
    """
    blocks = [block for block in attention_blocks(store) if block.site in projections]
    block_names = {block.site for block in blocks}
    for name in projections:
        if name not in block_names:
            raise NotOffered(f"{store.label} has no attention of {name}: no --patches")
    # Classes of all images together, so that one pass of the model is enough.
    all_classes = sorted({c for row_classes in classes.values() for c in row_classes})
    vectors = readout.vectors[all_classes]
    back = {block.site: vectors @ projections[block.site].weight for block in blocks}
    rows = np.array([*classes], np.int64)
    take = partial(_moved_to_class_token, back)
    for batch in recomputed_calls(store, rows, take, blocks, origin):
        for i, row in enumerate(batch.rows.tolist()):
            piece = one_image(store, row)
            frozen = stream.freeze_norm(piece)
            scale = frozen.weights[0, 0]  # 1 / s of the class token
            class_indices = [all_classes.index(c) for c in classes[row]]
            image_vectors = vectors[class_indices]
            maps = {}
            for block in blocks:
                moved = batch.values[block.site]["moved"][i][class_indices]
                parts = scale * moved.astype(np.float64)  # (classes, tokens)
                branch = f"{block.site}.attn.branch"
                # The parts and the bias have to add up to what the stored branch gives.
                stored = image_vectors @ frozen.pooled(piece, branch)[0]
                bias = scale * (image_vectors @ projections[block.site].bias)
                recomputed = parts.sum(1) + bias
                tolerance = RECOMPUTE_TOLERANCE * np.abs(parts).sum(1).max()
                if not np.abs(recomputed - stored).max() <= tolerance:
                    raise VitseeError(
                        f"{store.label}: attention computed again moves another part to "
                        f"the class token in {block.site} ({recomputed[0]:.4g}) than was "
                        f"stored ({stored[0]:.4g})"
                    )
                maps[branch] = parts[:, block.layout.n_prefix :]
            yield row, maps


def _moved_to_class_token(
    back: Mapping[str, Float], block: StoredAttention, call: AttentionCall
) -> dict[str, Tensor]:
    """Return what moves from each token to the class token, (images, classes, tokens).

    It is before the final norm: weight times value, through the projection, along each class.

    Args:
        back: block -> (classes, heads x head dim), the classes read back through the projection.
        block: the block whose attention was called.
        call: its scores and values.
    """
    import torch

    # The class token's query alone: (images, heads, tokens).
    weights = torch.softmax(call.scores(slice(None)), -1)[:, :, block.layout.cls]
    directions = torch.from_numpy(back[block.site]).to(weights)
    directions = directions.reshape(len(directions), call.n_heads, -1)
    # n images, h heads, t tokens, e channels of a head, c classes
    values = call.value.float()
    moved = torch.einsum("nht,nhte,che->nct", weights, values, directions)
    return {"moved": moved}


# ---------------------------------------------------------------- the table


COLUMNS = (*SITE, "row", "col", "class", "image", "part", "metric", "value")
REST = "rest"  # the part of a logit that its map leaves out


def patch_table(
    works: Sequence[ExplainedStore],
    names: Sequence[str],
    raw: bool,
    origin: Provenance,
    execution: Execution,
) -> Table:
    """Return a table of what each patch adds to the logits of single images.

    It has a row per image, class, term and patch; then rows of the sum over terms (`patches`), of
    the rest of the logit, and of the logit. The notes hold the photographs.

    Args:
        works: the stores.
        names: names of the images; by default the first four.
        raw: logits as they are, not less their mean over classes.
        origin: where images and weights are now.
        execution: images and progress.

    Raises:
        MissingInput: tokens, or attention, are not stored.
        VitseeError: a store does not have an image, an image has no label, or images or weights
            are gone.
    """
    rows: list[dict[str, Any]] = []
    sheets: list[SheetImages] = []
    for work in works:
        store = work.store
        sites = grid_sites(store, [work.stream.head.site])
        # All stores show the images of the first one.
        first_sheet = sheets[0] if sheets else None
        image_rows = shown_rows(store, names, first_sheet, execution)
        sheets.append(SheetImages(store, View.of(store, sites), image_rows, sites))
        images = MappedImages(work, raw, image_rows)
        with counting(execution.progress, len(image_rows)):
            for row, maps in images.parts(origin):
                rows += images.table_rows(row, maps)
                execution.progress.advance(1)
    part_words = {}
    for work in works:
        words = "of the patch's own token"
        if work.stream.head.pool == "cls":
            words = "moved by attention to the class token"
        part_words[work.store.label] = words
    notes = {
        "target": {work.store.label: work.target for work in works},
        "logits": "as they are" if raw else "less the mean over classes",
        "parts": part_words,
        "sheet": describe_sheet(sheets, origin.data),
    }
    return Table.concat(rows, COLUMNS, notes)


class MappedImages:
    """The images of one store that are mapped.

    Their logits are read and their classes are found at once, before any long work.

    Attributes:
        logits: row -> (classes,) the image's logits.
        classes: row -> the classes whose logits are mapped.
    """

    def __init__(
        self, work: ExplainedStore, raw: bool, image_rows: Sequence[int]
    ) -> None:
        self.work = work
        self.raw = raw
        store = work.store
        self.readout = Readout.from_head(work.stream.head)
        read = ReadContributions(work.stream, self.readout, work.targets, {}, raw)
        self.logits: dict[int, Float] = {}
        self.classes: dict[int, list[int]] = {}
        for row in image_rows:
            piece = one_image(store, row)
            logits = read.logits(piece)
            image_class = work.targets.image_classes(piece, logits).tolist()
            self.classes[row] = list(work.targets.classes or image_class)
            if -1 in self.classes[row]:
                raise VitseeError(
                    f"{str(store.samples.id[row])!r} of {store.label} has no label; give "
                    f"--target {PREDICTED} or --class"
                )
            self.logits[row] = logits[0] - (0.0 if raw else logits.mean())

    def parts(self, origin: Provenance) -> Iterator[PatchParts]:
        """Return an iterator over the images' maps, by own tokens or through attention."""
        store = self.work.store
        stream = self.work.stream
        readout = self.readout if self.raw else self.readout.centred()
        if stream.head.pool != "cls":
            return map_own_tokens(store, stream, readout, self.classes)
        projections = projections_of(store, stream, origin, stored=False)
        return map_through_attention(
            store, stream, readout, projections, self.classes, origin
        )

    def table_rows(self, row: int, maps: Mapping[str, Float]) -> Iterator[dict[str, Any]]:
        """Yield blocks of the table's rows about one image: column -> values of all patches.

        Args:
            row: the image's row in the store.
            maps: branch or base site -> (classes, patches).
        """
        store = self.work.store
        head = self.work.stream.head
        layout = store.site(head.site).layout
        assert layout is not None
        *term_entries, logit_entry = self.work.entries()
        # Heads and biases, whose keys have a part, have no map.
        entries = {entry.key[0]: entry for entry in term_entries if entry.key[1] == ""}
        total = np.sum(list(maps.values()), axis=0)  # (classes, patches)
        for i, number in enumerate(self.classes[row]):
            image_cells = {
                "class": class_name(store, head.n_classes, number),
                "image": str(store.samples.id[row]),
                "metric": METRIC,
            }
            patch_cells = cell_columns(layout, np.arange(total.shape[1]))
            for site, values in maps.items():
                yield {
                    **site_columns(store, entries[site].site),
                    **image_cells,
                    "part": entries[site].part,
                    **patch_cells,
                    "value": values[i],
                }
            model_cells = {**site_columns(store, logit_entry.site), **image_cells}
            yield {**model_cells, "part": TOTAL, **patch_cells, "value": total[i]}
            logit = float(self.logits[row][number])
            rest = logit - float(total[i].sum())
            yield {**model_cells, "part": REST, "value": rest}
            yield {**model_cells, "part": LOGIT, "value": logit}
