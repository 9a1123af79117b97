"""The self-check of a model on the first images, before any slab is made."""

from __future__ import annotations

import torch

from vitsee_core.extraction.not_finite import FiniteWatch
from vitsee_core.extraction.plan import hook_points
from vitsee_core.images import normalise
from vitsee_core.models.capture import Capture
from vitsee_core.models.hook_points import first_tensor
from vitsee_core.models.interventions.changes import Changes, prove
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.selfcheck import NotFinite, SelfCheck, self_check
from vitsee_core.models.sites import SiteTable
from vitsee_core.runtime.device import precision_context
from vitsee_core.runtime.progress import soon_said
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import StorePlan


def run_self_check(
    model: LoadedModel,
    table: SiteTable,
    plan: StorePlan,
    pixels: torch.Tensor,
    device: torch.device,
    precision: str,
    changes: Changes | None = None,
    *,
    plan_is_stored: bool = False,
) -> SelfCheck:
    """Run the self-check on the first images, and the proof of interventions.

    The check fixes the types in which sites are stored, for every process of the extraction.
    The proof shows that interventions have their effect and no other.

    Args:
        model: the model, on `device`.
        table: its sites.
        plan: contents of the store.
        pixels: (images, 3, H, W) uint8, of clips (clips, frames, 3, H, W).
        device: where the model runs.
        precision: precision in which the extraction runs the model.
        changes: interventions, which are in effect in the proof alone.
        plan_is_stored: whether the plan is that of an existing store, from which nothing can
            be left out any more.

    Raises:
        NotFinite: activations are NaN or inf.
        VitseeError: the check or the proof failed otherwise.
    """
    _, height, width = model.input_size
    # On a tiled canvas this is the first tile, which is checked in place of all.
    pixels = pixels[..., :height, :width]
    if plan.clip is not None and plan.clip.by_frame:
        # (clips, frames, 3, H, W) -> (images, 3, H, W): the middle frame of each clip
        pixels = pixels[:, plan.clip.frames // 2]
    with (
        soon_said(f"checking {model.name} on the first images"),
        torch.inference_mode(),
        precision_context(device, precision),
    ):
        images = normalise(pixels, model.transform, device)
        dtypes = {site.name: site.dtype for site in plan.sites}
        check = self_check(
            model, table, images, dtypes=dtypes, **hook_points(table, plan)
        )
        if not check.finite:
            # An image may break a sound model: then the others are checked, and the loop over
            # slabs names the broken ones.
            finite = finite_images(model, table, plan, images)
            if 0 < len(finite) < len(images):
                pixels = pixels[finite]
                images = images[finite]
                check = self_check(
                    model, table, images, dtypes=dtypes, **hook_points(table, plan)
                )
    lacking = sorted(check.left_out.keys() & {name for name, _ in plan.sublayers})
    if lacking and plan_is_stored:
        name = lacking[0]
        check.failures.append(
            f"{name}: {check.left_out[name]}, as it was when the store was made"
        )
    check.notes += [
        f"no residual products of {name}: {check.left_out[name]}" for name in lacking
    ]
    if not check.ok:
        error_type = VitseeError if check.finite else NotFinite
        raise error_type(
            f"the self-check of {model.name} failed: {'; '.join(check.failures)}"
        )
    if changes is not None and changes.lines:
        with precision_context(device, precision):
            prove(model, table, changes, normalise(pixels, model.transform, device))
    return check


def finite_images(
    model: LoadedModel, table: SiteTable, plan: StorePlan, images: torch.Tensor
) -> list[int]:
    """Return the indices of the images whose activations and output are finite, each run alone:
    images in one sequence, apart by a mask, break one another."""
    finite = []
    with Capture(model, table, **hook_points(table, plan)) as capture:
        for row in range(len(images)):
            watch = FiniteWatch()
            output = first_tensor(capture.run(images[row : row + 1], watch))
            watch.note("the output", output)
            if watch.first_site() is None:
                finite.append(row)
    return finite
