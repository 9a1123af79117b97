"""What single patches add to the logits of single images, directly.

Where the classifier reads the mean over tokens, a patch has the part of its own token: of every
term of the stream. Where it reads the class token, a patch has what attention moves from it there,
the weight times its value through the output projection, of every head of a block; values are
computed with the model again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.analyses.logit_attribution.contributions import Projection, Readout
from vitsee_core.analyses.logit_attribution.stream import ResidualStream
from vitsee_core.attention.heads import StoredAttention, attention_blocks
from vitsee_core.attention.recompute import recomputed_calls
from vitsee_core.models.provenance import Provenance
from vitsee_core.runtime.streaming import Piece
from vitsee_core.types import Float
from vitsee_stores.errors import NotOffered, VitseeError

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_core.models.attention_watch import AttentionCall
    from vitsee_stores import Store

# Of a block's attention: values computed again, on another device perhaps, against stored branches.
AGAIN = 1e-3


@dataclass(frozen=True)
class PatchParts:
    """One image's maps. maps: branch or base site -> (classes, cells of the grid)."""

    row: int
    maps: dict[str, Float]

    @property
    def total(self) -> Float:
        """(classes, cells) of all terms."""
        return np.sum(list(self.maps.values()), axis=0)


def one_image(store: Store, row: int) -> Piece:
    """The slab of one valid image."""
    return Piece(store, row // store.plan.slab, slice(row, row + 1), np.ones(1, bool))


def of_own_tokens(
    store: Store, stream: ResidualStream, readout: Readout, classes: Mapping[int, Sequence[int]]
) -> Iterator[PatchParts]:
    """The parts of each image's own tokens, where the classifier reads their mean; classes: of each
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
            share = frozen.weights[0] / layout.n_body if weights is None else weights[body]
            maps[site.name] = (readout.vectors[list(own)] @ tokens.T) * share
        yield PatchParts(row, maps)


def through_attention(
    store: Store,
    stream: ResidualStream,
    readout: Readout,
    projections: Mapping[str, Projection],
    classes: Mapping[int, Sequence[int]],
    origin: Provenance,
) -> Iterator[PatchParts]:
    """What attention moves from each patch to the class token, in every block with attention;
    projections: of its heads, classes: of each row, origin: where images and weights are now.

    Raises:
        MissingInput: the store has no attention summaries.
        NotOffered: a block's attention is not among them.
        VitseeError: images or weights are gone, or give another attention than the store's.
    """
    blocks = [block for block in attention_blocks(store) if block.site in projections]
    if len(blocks) < len(projections):
        left = next(block for block in projections if block not in {b.site for b in blocks})
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
                parts = scale * some.values[block.site]["moved"][i][own].astype(np.float64)
                name = f"{block.site}.attn.branch"
                stored = vectors[own] @ frozen.pooled(piece, name)[0]
                again = parts.sum(1) + scale * (vectors[own] @ projections[block.site].bias)
                if not np.abs(again - stored).max() <= AGAIN * np.abs(parts).sum(1).max():
                    raise VitseeError(
                        f"{store.label}: attention computed again moves another part to the class "
                        f"token in {block.site} ({again[0]:.4g}) than was stored ({stored[0]:.4g})"
                    )
                maps[name] = parts[:, block.layout.n_prefix :]
            yield PatchParts(row, maps)


def _moved(
    back: Mapping[str, Float], block: StoredAttention, call: AttentionCall
) -> dict[str, Tensor]:
    """(images, classes, tokens) what goes from every token to the class token, before the norm.
    back: block -> (classes, heads x head dim), classes read back through the projection."""
    import torch

    weights = torch.softmax(call.scores(slice(None)), -1)[:, :, block.layout.cls]
    read = torch.from_numpy(back[block.site]).to(weights)
    read = read.reshape(len(read), call.n_heads, -1)
    return {"moved": torch.einsum("nht,nhte,che->nct", weights, call.value.float(), read)}
