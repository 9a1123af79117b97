"""The full attention of single images of a store: as it was stored, or recomputed.

By default a store contains summaries of attention. Its manifest records the model, the weights, the
transform and the data, which is enough to recompute the rest for a few images, and hashes that
prove whether the weights and the images are still those it was made from:

    def rows(block, a):                         # a: (images, heads, tokens, tokens), on the device
        return {"cls": a[:, :, block.layout.cls]}

    for batch in attention_of_images(store, find_rows(store, ["test/0"]), rows):
        batch.rows, batch.values["blocks.0"]["cls"]     # (images,), (images, heads, tokens)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.attention.heads import StoredAttention, attention_blocks
from vitsee_core.images.selection import shorter_ids
from vitsee_core.models.provenance import Pictures, Provenance, model_of
from vitsee_core.runtime.machine import plural
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_core.types import Integers
from vitsee_stores.errors import MissingInput, VitseeError

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_core.models.attention_watch import AttentionCall
    from vitsee_core.models.sites import AttentionBlock
    from vitsee_stores import Store

log = logging.getLogger(__name__)

Array = NDArray[Any]
Take = Callable[[StoredAttention, "Tensor"], Mapping[str, "Tensor"]]
TakeCall = Callable[[StoredAttention, "AttentionCall"], Mapping[str, "Tensor"]]

# Bounds the memory: pixels and the results of `take` grow with a batch, too.
BATCH_BYTES = 256 << 20  # attention of one block over one batch
MAX_IMAGES = 32


class Attended(NamedTuple):
    """Results for a batch of images.

    Attributes:
        rows: (images,) row of each in the store.
        values: block -> name -> array (images, ...).
    """

    rows: Integers
    values: dict[str, dict[str, Array]]


def find_rows(store: Store, names: Sequence[str]) -> Integers:
    """Return the rows of some images, each named by its id or its row number in the store.

    An id may be given without its folder or ending if it is still unique.

    Raises:
        VitseeError: no such image, or it could not be read when the store was made.
    """
    ids = store.samples.id
    row_indices = []
    # An id wins over a row number, and a whole id over a shortened one.
    for name in names:
        rows = np.flatnonzero(ids == name)
        if not len(rows) and name.isdigit() and int(name) < len(ids):
            rows = np.array([int(name)])
        elif not len(rows):
            rows = np.flatnonzero(
                [name in shorter_ids(str(image_id)) for image_id in ids]
            )
        if len(rows) > 1:
            raise VitseeError(
                f"{store.label} has {len(rows)} images {name!r}; expected an id, as "
                f"{' or '.join(repr(str(image_id)) for image_id in ids[rows[:2]])}"
            )
        if not len(rows):
            raise VitseeError(
                f"{store.label} has no image {name!r}; expected an id like "
                f"{str(ids[0])!r} or a row from 0 to {len(ids) - 1}"
            )
        elif name.isdigit() and int(name) < len(ids) and int(name) != rows[0]:
            log.info(
                "%s: %r is read as an image's id (row %d of the store); the image in row "
                "%s is %r",
                store.label,
                name,
                rows[0],
                name,
                str(ids[int(name)]),
            )
        # Rows of images that could not be read are NaN.
        if not store.valid[rows[0]]:
            raise VitseeError(
                f"{store.label} holds nothing of the image {name!r}: it is not valid"
            )
        row_indices.append(int(rows[0]))
    return np.array(row_indices, np.int64)


def has_full(store: Store, blocks: Sequence[StoredAttention]) -> bool:
    """Return whether the store contains the full attention of these blocks."""
    return all(store.has(f"attention/full/{block.site}") for block in blocks)


def attention_of_images(
    store: Store,
    rows: Integers,
    take: Take,
    *,
    blocks: Sequence[StoredAttention] | None = None,
    origin: Provenance | None = None,
    device: str = "auto",
    progress: Progress = SILENT,
) -> Iterator[Attended]:
    """Yield the results of `take` for each block's attention, one batch of images at a time.

    `take(block, a)` gets (images, heads, tokens, tokens) float32: softmax attention as it is,
    queries by keys, prefix tokens first. Read from a store of `extract --attention full` (float16
    there), else computed with the model on `device`. Memory: one block's attention over a batch
    (256 MiB, or one image), and the results of `take`.

    Args:
        store: with attention summaries.
        rows: valid rows of the store, each once.
        take: computes what to keep.
        blocks: by default all with stored attention.
        origin: where weights and images are now; None: where extract read them.
        device: auto, cpu, cuda, cuda:i or mps; not used for stored attention.
        progress: advanced by the images done.

    Raises:
        MissingInput: the store has no attention summaries, or it has to be recomputed of clips that
            the model saw frame by frame.
        VitseeError: images or weights are gone, or differ from the store's.
    """
    chosen = attention_blocks(store) if blocks is None else list(blocks)
    progress.start(len(rows))
    try:
        if has_full(store, chosen):
            batches = _read_attention(store, rows, take, chosen)
        else:
            batches = recomputed_calls(
                store,
                rows,
                take=partial(_take_from_softmax, take),
                blocks=chosen,
                origin=origin or Provenance(),
                device=device,
            )
        for batch in batches:
            yield batch
            progress.advance(len(batch.rows))
    finally:
        # Also if the caller leaves the loop early.
        progress.stop()


def _batch_size(blocks: Sequence[StoredAttention]) -> int:
    """Return how many images' attention of one block, in float32, fits `BATCH_BYTES`."""
    image_bytes = max(4 * block.n_heads * block.layout.n_tokens**2 for block in blocks)
    return max(1, min(MAX_IMAGES, BATCH_BYTES // image_bytes))


def _copy_to_host(taken: Mapping[str, Tensor]) -> dict[str, Array]:
    """Return float32 copies of a block's results in host memory."""
    # Copies: `take` may give views of a tensor that the next block overwrites.
    return {name: value.float().cpu().numpy().copy() for name, value in taken.items()}


def _read_attention(
    store: Store, rows: Integers, take: Take, blocks: Sequence[StoredAttention]
) -> Iterator[Attended]:
    """Yield the results of `take` for stored attention, a batch of images at a time.

    Images come in the order of their rows.
    """
    import torch

    max_span = _batch_size(blocks)
    sorted_rows = np.sort(rows)
    slabs = sorted_rows // store.plan.slab
    start = 0
    while start < len(sorted_rows):
        # A batch is within one slab and spans at most `max_span` rows: those between are read, too.
        is_near = sorted_rows < sorted_rows[start] + max_span
        is_in_batch = (slabs == slabs[start]) & is_near
        batch = sorted_rows[start:][is_in_batch[start:]]
        start += len(batch)
        low = int(batch[0])
        high = int(batch[-1]) + 1
        values = {}
        for block in blocks:
            array = store.attention(f"full/{block.site}")
            # (images, heads, tokens, tokens), float16 in the store
            attention = array[low:high][batch - low].astype(np.float32)
            values[block.site] = _copy_to_host(take(block, torch.from_numpy(attention)))
        yield Attended(batch, values)


def _take_from_softmax(
    take: Take, block: StoredAttention, call: AttentionCall
) -> Mapping[str, Tensor]:
    """Return the results of `take` for the attention of a recomputed call, all queries at once."""
    import torch

    return take(block, torch.softmax(call.scores(slice(None)), -1))


def recomputed_calls(
    store: Store,
    rows: Integers,
    take: TakeCall,
    blocks: Sequence[StoredAttention],
    origin: Provenance,
    device: str = "auto",
) -> Iterator[Attended]:
    """Yield the results of `take(block, call)` for each block, one batch of images at a time.

    A call has the queries, keys and values as the model computes them again. Arguments and errors
    are those of `attention_of_images`.
    """
    import torch

    from vitsee_core.images import normalise
    from vitsee_core.models.capture import Capture, Observer
    from vitsee_core.models.site_tables import site_table
    from vitsee_core.runtime.device import precision_context, resolve_device

    clip = store.plan.clip
    if clip is not None and clip.by_frame:
        raise MissingInput(
            f"{store.label} holds clips that an image model saw frame by frame, of which "
            "no attention is recomputed (for maps of single frames extract them as images)"
        )
    torch_device = resolve_device(device)
    model = model_of(store, origin.checkpoint, trust=origin.trust)
    table = site_table(model)
    model_blocks = {block.name: block for block in table.attention}
    for block in blocks:
        # What `take` relies on must be as in the store: heads, token layout and windows.
        model_block = model_blocks.get(block.site)
        is_same = (
            model_block is not None
            and model_block.n_heads == block.n_heads
            and model_block.layout == block.layout
            and model_block.window == block.window
        )
        if not is_same:
            raise VitseeError(
                f"{model.name} has no attention like the store's in {block.site} any "
                f"more; extract {store.label} anew"
            )
    model.module.to(torch_device)
    # As when it was extracted, so that summaries and maps agree.
    precision = store.manifest.identity.get("precision", "fp32")
    if precision == "tf32" and torch_device.type != "cuda":
        precision = "fp32"  # tf32 exists on CUDA only
    log.info(
        "computing the attention of %s with %s on %s",
        plural(len(rows), "images"),
        model.name,
        torch_device,
    )
    batch_size = _batch_size(blocks)
    # Checks hashes: images that have changed since are refused.
    read_pixels = Pictures(store, origin.data)
    stored_blocks = {block.site: block for block in blocks}
    values: dict[str, dict[str, Array]] = {}

    class Taker(Observer):
        """Keeps the results of `take` for each block that a forward pass reaches."""

        def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
            """Add the results for one block to `values`."""
            values[block.name] = _copy_to_host(take(stored_blocks[block.name], call))

    watched = [model_blocks[block.site] for block in blocks]
    capture = Capture(model, table, sites=[], attention=watched)
    with torch.inference_mode(), precision_context(torch_device, precision), capture:
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            pixels = torch.from_numpy(read_pixels(batch))
            inputs = normalise(pixels, store.manifest.transform, torch_device)
            values = {}
            capture.run(inputs, Taker())
            yield Attended(batch, values)
