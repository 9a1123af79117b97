"""Whether a store that is joined or grown was made from the images and the model at hand.

Identity knows ids and labels only; another folder with the same names would fill the rest of a
store unnoticed. So the encoded bytes of the check images, and of some committed ones, are compared
by their hashes, and the check images' pixels too, which differ where a decoder decodes otherwise.
The same images in another folder are the same images. Before more is added, the model must give
what the store has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitsee_core.images import ImageError, Selection, batches, normalise
from vitsee_core.images.clips import has_clips
from vitsee_core.models.capture import Capture, Observer
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.sites import SiteTable
from vitsee_core.runtime.device import current_precision, precision_context
from vitsee_core.runtime.versions import DECODERS, store_versions
from vitsee_core.types import Float32
from vitsee_stores import Store, StoreWriter
from vitsee_stores.errors import IdentityMismatch, StoreError, VitseeError
from vitsee_stores.generations import Generation
from vitsee_stores.layout import SiteSpec
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from vitsee_stores import Store


# Images that are compared; among how many they are looked for; hashes that are read
# again.
CHECK_IMAGES = 4
CHECK_WITHIN = 64
COMPARED = 256
# |here - stored| / |stored| of a pooled vector: summation order in float32, which other batches
# and devices change; rounded factors in TF32 and half precision.
TOLERANCE = {"fp32": 1e-3, "tf32": 2e-2, "half": 1e-1}
MOST_SITES = 4


@dataclass(frozen=True)
class FirstImages:
    """The first readable images of the store's order, the same for every process and batch size.

    row: of the first of them. pixels: (images, channels, height, width) uint8 of the readable ones.
    hash: (rows,) of the encoded bytes, 0 where unreadable.
    """

    row: int
    pixels: torch.Tensor
    hash: NDArray[np.uint64]

    def record(self) -> dict[str, Any]:
        """The entries of the manifest's `info` that later images are compared with."""
        return {
            "first_images": {
                "row": self.row,
                "hash": [f"{value:016x}" for value in self.hash],
            },
            "first_images_sha256": hashlib.sha256(
                self.pixels.numpy().tobytes()
            ).hexdigest(),
        }


def first_images(
    selection: Selection, transform: Mapping[str, Any], info: Mapping[str, Any]
) -> FirstImages:
    """The check images; those of `info`, where a store's manifest has recorded some.

    Raises:
        VitseeError: none of the first images can be read.
        IdentityMismatch: an image that the store was made from cannot be read.
    """
    if recorded := _recorded(info):
        row, hashes = recorded
        # The very rows of the first extraction, whatever can be read by now.
        ranges = [slice(row, row + len(hashes))]
    else:
        stop = min(CHECK_WITHIN, len(selection))
        ranges = [
            slice(i, min(i + CHECK_IMAGES, stop)) for i in range(0, stop, CHECK_IMAGES)
        ]
    with closing(batches(selection, transform, ranges, workers=0)) as loading:
        for batch in loading:
            if batch.valid.any():
                break
    if not batch.valid.any():
        _, name, reason = batch.errors[-1]
        examples = "images"
        expected = "image files that Pillow opens"
        if has_clips(selection.source):
            examples = "clips"
            expected = "videos or frames that FFmpeg and Pillow open"
        raise VitseeError(
            f"none of the first {batch.rows.stop} {examples} can be read (the last: "
            f"{name}: {reason}); expected {expected}"
        )
    wanted = batch.valid
    if recorded:
        # One that can be read by now has no numbers in the store to be compared with.
        wanted = batch.valid & (hashes != 0)
        if not wanted.any():
            wanted = batch.valid
    return FirstImages(
        batch.rows.start, batch.pixels[torch.from_numpy(wanted)], batch.hash
    )


def check_same_images(
    writer: StoreWriter, selection: Selection, first: FirstImages
) -> None:
    """Compare the images at hand with those that a store was made from.

    Raises:
        IdentityMismatch: other encoded bytes under the same names, or the same bytes that decode to
            other pixels; names the images, or the versions.
    """
    info = writer.manifest.info
    ids = selection.samples.ids
    # Rows of committed slabs, and the first images, which are known before any slab is.
    expected = _committed_hashes(writer)
    if recorded := _recorded(info):
        row, hashes = recorded
        expected |= {row + k: int(value) for k, value in enumerate(hashes) if value}
    known = {first.row + k: int(value) for k, value in enumerate(first.hash)}
    other = []
    for row, value in sorted(expected.items()):
        try:
            index = int(selection.samples.index[row])
            # The first images are in memory; all others are read again for their hash.
            found = known[row] if row in known else selection.source.hash(index)
        except ImageError:
            found = 0
        if found != value:
            other.append(f"{ids[row]}{'' if found else ' (cannot be read)'}")
    if other:
        raise IdentityMismatch(
            f"{writer.place} was made from other images of the same names: "
            f"{abbreviate(other)} in {selection.source.name}, {len(other)} of "
            f"{len(expected)} compared (give the data that it was made from, choose "
            f"another -o, or start anew with --force)"
        )
    made = info.get("first_images_sha256")
    if made is not None and made != first.record()["first_images_sha256"]:
        raise IdentityMismatch(
            f"{writer.place}: the same image files come out with other pixels here: "
            f"{_other_versions(info.get('versions', {}))} (go on with the versions that "
            "the store was begun with, choose another -o, or start anew with --force)"
        )


def _recorded(info: Mapping[str, Any]) -> tuple[int, NDArray[np.uint64]] | None:
    """Row and hashes of a store's check images."""
    record = info.get("first_images")
    if record is None:
        return None
    try:
        hashes = [int(text, 16) for text in record["hash"]]
        return int(record["row"]), np.array(hashes, np.uint64)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise StoreError("the manifest is damaged: info.first_images") from None


def _committed_hashes(writer: StoreWriter) -> dict[int, int]:
    """Row and hash of up to COMPARED committed images that could be read, drawn with a seed."""
    committed = writer.committed()
    if not committed.any():
        return {}
    # A slab of a store that was complete, whose marker is damaged by now, is one to make.
    own = Generation(writer.files, writer.manifest, False, writer.manifest)
    store = Store([own], committed, False, "")
    rows = np.flatnonzero(store.valid)
    if len(rows) > COMPARED:
        # One seed, so that a repeated command says the same.
        rows = np.random.default_rng(0).choice(rows, COMPARED, replace=False)
    hashes = store.samples.hash
    return {int(row): int(hashes[row]) for row in rows}


def _other_versions(then: Mapping[str, str]) -> str:
    """`pillow 11.3.0 then, 12.0.0 here`; of the libraries that decode and resize."""
    here = store_versions()
    names = [name for name in DECODERS if then.get(name) != here[name]]
    if not names:
        same = ", ".join(f"{name} {here[name]}" for name in DECODERS)
        return f"other builds of the same versions ({same})"
    return ", ".join(
        f"{name} {then.get(name, 'unknown')} then, {here[name]} here" for name in names
    )


class _Pooled(Observer):
    """An observer that keeps the means over tokens, and vectors."""

    def __init__(self) -> None:
        self.found: dict[str, Float32] = {}

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        mean = (
            body
            if site.kind == "vector"
            else body.flatten(1, -2).mean(1, dtype=torch.float32)
        )
        self.found[site.name] = mean.float().cpu().numpy().copy()


def check_reproduced(
    store: Store,
    model: LoadedModel,
    table: SiteTable,
    first: FirstImages,
    device: torch.device,
    precision: str,
) -> None:
    """Compare pooled vectors of the store's last sites with the model's on the first images. Stores
    of tiles, which the model never sees whole, of images with grids of their own, and of other
    module outputs only are left out.

    Raises:
        IdentityMismatch: they differ by more than rounding does.
    """
    canvas = store.plan.canvas
    sites = [s for s in store.plan.sites if s.alias_of is None and s.kind != "raw"][
        -MOST_SITES:
    ]
    if not sites or (canvas is not None and canvas.in_parts):
        return
    pooled = _Pooled()
    clip = store.plan.clip
    pixels = first.pixels
    n_frames = 1
    if clip is not None and clip.by_frame:
        pixels = pixels.flatten(0, 1)
        n_frames = clip.frames
    with (
        torch.inference_mode(),
        precision_context(device, precision),
        Capture(model, table, sites=sites) as capture,
    ):
        capture.run(normalise(pixels, model.transform, device), pooled)
        tolerance = TOLERANCE[current_precision(device)]
    rows = (
        np.flatnonzero(store.valid[first.row : first.row + len(first.hash)]) + first.row
    )
    for site in sites:
        stored = store.pooled(site.name)[rows]
        here = pooled.found[site.name]
        here = here.reshape(len(here) // n_frames, n_frames, -1).mean(1)
        if len(here) != len(rows):  # an image that could not be read then, or cannot now
            return
        error = float(
            np.linalg.norm(here - stored) / max(float(np.linalg.norm(stored)), 1e-12)
        )
        if not error <= tolerance:
            raise IdentityMismatch(
                f"{model.name} does not give what {store.place} has of {site.name} on "
                f"the first images: {error:.2g} of its length apart, expected at most "
                f"{tolerance:g} (grow it with the model, the precision and the libraries "
                f"that made it)"
            )
