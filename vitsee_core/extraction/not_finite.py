"""Images that make a sound model give NaN or inf.

They are found one by one once a slab has failed, and left out as unreadable images are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitsee_core.images import Batch
from vitsee_core.models.attention_watch import AttentionCall
from vitsee_core.models.capture import Observer
from vitsee_core.models.selfcheck import NotFinite
from vitsee_core.models.sites import AttentionBlock
from vitsee_stores.layout import SiteSpec


class FiniteWatch(Observer):
    """An observer that finds the images whose activations are NaN or inf.

    first_sites: row of an image in the pass -> the first site, or block with attention, that is.
    """

    def __init__(self) -> None:
        self.first_sites: dict[int, str] = {}

    def first_site(self) -> str | None:
        """Return the first site that any image breaks, None if none does."""
        return next(iter(self.first_sites.values()), None)

    def note(self, name: str, x: Tensor | None) -> None:
        """Look at a tensor (images, ...)."""
        if x is None or not x.numel():
            return
        finite = x.flatten(1).isfinite().all(1)
        for row in (~finite).nonzero().flatten().tolist():
            self.first_sites.setdefault(row, name)

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Look at a site's tokens."""
        self.note(site.name, prefix)
        self.note(site.name, body)

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """Look at the heads' outputs of a block."""
        self.note(f"{block.name} attention", call.output)


@dataclass(frozen=True)
class LeftOut:
    """An image that is left out: its row in the store, its id, and where it is NaN or inf."""

    row: int
    name: str
    site: str

    @property
    def reason(self) -> str:
        return f"NaN or inf at {self.site}"


def pixels_of_sound(batch: Batch, watch: FiniteWatch) -> Tensor | None:
    """Return a copy of the pixels of the batch's first image that is read and does not break the
    model; None without one.

    Args:
        batch: the images.
        watch: what the model's pass over them showed.
    """
    for row in np.flatnonzero(batch.valid).tolist():
        if row not in watch.first_sites:
            return batch.pixels[row].clone()
    return None


def without_broken(
    batches: Iterator[Batch],
    look: Callable[[Batch], FiniteWatch],
    ids: Sequence[str],
    failure: NotFinite,
    fail: bool,
    elsewhere: Callable[[], Tensor | None],
) -> tuple[list[Batch], list[LeftOut]]:
    """Mark the images that break the model as invalid in the batches of a slab.

    Their pixels are replaced by those of a sound image, so that sums over the slab stay
    finite. Their hashes stay, as their files are readable.

    Args:
        batches: batches of the slab, loaded anew.
        look: function that runs the model on a batch.
        ids: ids of all rows of the store.
        failure: the error that was raised for the slab.
        fail: whether one such image is to end the run.
        elsewhere: function that returns the pixels of a sound image of another slab, None if
            there is none; called if all images of this slab break the model.

    Returns:
        The batches, and the images that break the model.

    Raises:
        NotFinite: with `fail`, names the first such image. `failure` is raised if all
            images of the store break the model, or none of the slab does by itself.
    """
    loaded: list[tuple[Batch, NDArray[np.bool_]]] = []
    left_out: list[LeftOut] = []
    sound_pixels: Tensor | None = None
    for batch in batches:
        watch = look(batch)
        broken = np.zeros(len(batch.valid), np.bool_)
        broken[list(watch.first_sites)] = True
        loaded.append((batch, broken))
        for row in np.flatnonzero(broken & batch.valid).tolist():
            store_row = batch.rows.start + row
            left_out.append(LeftOut(store_row, ids[store_row], watch.first_sites[row]))
        if sound_pixels is None:
            sound_pixels = pixels_of_sound(batch, watch)
    if sound_pixels is None and left_out:
        sound_pixels = elsewhere()
    if sound_pixels is None or not left_out:
        raise failure
    if fail:
        images = left_out[0].name
        if len(left_out) > 1:
            images += f" and {len(left_out) - 1} more of these images"
        raise NotFinite(
            f"{images}: {left_out[0].reason}, where the model's output of other images is sound; "
            "expected finite values: --on-error nan leaves such images out",
            failure.advice,
        )
    for batch, broken in loaded:
        # The zeros of an unreadable image may break the model, too.
        batch.pixels[torch.from_numpy(broken)] = sound_pixels
        batch.valid[broken] = False
    return [batch for batch, _ in loaded], left_out
