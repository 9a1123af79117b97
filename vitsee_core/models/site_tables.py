"""The site table of a model: proven on random images, or sketched without weights."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from vitsee_core.models.build import TableBuilder
from vitsee_core.models.capture import Capture
from vitsee_core.models.clip_orders import UNSEEN
from vitsee_core.models.clips import clips_of, frames_of
from vitsee_core.models.hook_points import ModelError, refuse_compiled
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.proofs import AttentionProof, SumProof, beyond
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.survey import measured, needs_pixels, survey
from vitsee_core.models.trace import probe_images

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


def sketch(module: nn.Module, size: tuple[int, int, int], *, doubtful: bool = True) -> SiteTable:
    """The site table as `site_table` begins it: what needs pixels (tokens in another order, patches
    measured, sums and attention proven) is left to that.

    Raises:
        ModelError: the model does not run on images of this size; without `doubtful` also where
            shapes do not show which dimensions of its tokens are the image's.
    """
    if not doubtful and clips_of(module) is not None:
        raise ModelError(UNSEEN)
    found = survey(module, size, doubtful=True)
    if not doubtful and needs_pixels(module, found.trace, [*found.blocks], found.geometry):
        raise ModelError("shapes alone do not show where the image lies in its tokens")
    return TableBuilder(module, found, {}).build()


def verify(model: LoadedModel, table: SiteTable) -> dict[str, str]:
    """The claims of the table that two random images disprove: block path, or "PATH attention", ->
    reason. {} where nothing is disproved."""
    if not table.residuals and not table.attention:
        return {}
    names = list(table.residuals)
    sums, heads = SumProof(model.module, table, names), AttentionProof(table)
    capture = Capture(model, table, sites=(), attention=table.attention)
    sums.attach(capture, names)
    heads.attach(capture, table.attention)
    device = next(model.module.parameters()).device
    images = probe_images(model.input_size, False, frames_of(model.module)).to(device)
    with torch.inference_mode(), capture:
        capture.run(images, heads)
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
