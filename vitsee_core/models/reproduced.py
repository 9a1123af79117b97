"""Whether a model gives what a store has of it: before more is added."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vitsee_core.images import normalise
from vitsee_core.models.capture import Capture, Observer
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.same_images import FirstImages
from vitsee_core.models.sites import SiteTable
from vitsee_core.runtime.device import current_precision, precision_context
from vitsee_core.types import Float32
from vitsee_stores.errors import IdentityMismatch
from vitsee_stores.layout import SiteSpec

if TYPE_CHECKING:
    from vitsee_stores import Store

# |here - stored| / |stored| of a pooled vector: summation order in float32, which other batches
# and devices change; rounded factors in TF32 and half precision.
TOLERANCE = {"fp32": 1e-3, "tf32": 2e-2, "half": 1e-1}
MOST_SITES = 4


class _Pooled(Observer):
    """An observer that keeps the means over tokens, and vectors."""

    def __init__(self) -> None:
        self.found: dict[str, Float32] = {}

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        mean = body if site.kind == "vector" else body.flatten(1, -2).mean(1, dtype=torch.float32)
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
    sites = [s for s in store.plan.sites if s.alias_of is None and s.kind != "raw"][-MOST_SITES:]
    if not sites or (canvas is not None and canvas.in_parts):
        return
    pooled, clip, pixels, n_frames = _Pooled(), store.plan.clip, first.pixels, 1
    if clip is not None and clip.by_frame:
        pixels, n_frames = pixels.flatten(0, 1), clip.frames
    with (
        torch.inference_mode(),
        precision_context(device, precision),
        Capture(model, table, sites=sites) as capture,
    ):
        capture.run(normalise(pixels, model.transform, device), pooled)
        tolerance = TOLERANCE[current_precision(device)]
    rows = np.flatnonzero(store.valid[first.row : first.row + len(first.hash)]) + first.row
    for site in sites:
        stored = store.pooled(site.name)[rows]
        here = pooled.found[site.name]
        here = here.reshape(len(here) // n_frames, n_frames, -1).mean(1)
        if len(here) != len(rows):  # an image that could not be read then, or cannot now
            return
        error = float(np.linalg.norm(here - stored) / max(float(np.linalg.norm(stored)), 1e-12))
        if not error <= tolerance:
            raise IdentityMismatch(
                f"{model.name} does not give what {store.place} has of {site.name} on the first "
                f"images: {error:.2g} of its length apart, expected at most {tolerance:g} (grow it "
                "with the model, the precision and the libraries that made it)"
            )
