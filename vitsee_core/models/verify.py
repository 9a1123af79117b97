"""Proof of a fresh table on random images, before anybody relies on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitsee_core.models.attention import AttentionCall
from vitsee_core.models.capture import Capture
from vitsee_core.models.proofs import AttentionProof, SumProof
from vitsee_core.models.trace import probe_images
from vitsee_stores.layout import SiteSpec

if TYPE_CHECKING:
    from vitsee_core.models.load import LoadedModel
    from vitsee_core.models.sites import AttentionBlock, SiteTable, Sublayer

# In float32 the recomputed attention differs by summation order alone.
ATTENTION_TOLERANCE = 1e-4


class _Verifier:
    def __init__(self, proof: AttentionProof) -> None:
        self.proof = proof

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Nothing is asked for."""

    def branch(self, sublayer: Sublayer, z: Tensor, f: Tensor) -> None:
        """Nothing is asked for."""

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """Hand over to the proof."""
        self.proof.attention(block, call)


def verify(model: LoadedModel, table: SiteTable) -> dict[str, str]:
    """What the table claims but two random images disprove: block path, or "PATH attention", ->
    reason. {} for a table that holds."""
    if not table.residuals and not table.attention:
        return {}
    names = list(table.residuals)
    sums, heads = SumProof(model.module, table, names), AttentionProof(table)
    capture = Capture(model, table, sites=(), attention=table.attention)
    sums.attach(capture, names)
    heads.attach(capture, table.attention)
    device = next(model.module.parameters()).device
    images = probe_images(model.input_size, corners=False).to(device)
    with torch.inference_mode(), capture:
        capture.run(images, _Verifier(heads))
    failed = {}
    for name in names:
        error = sums.errors.get(name, float("inf"))
        if not error <= 1:
            residual = table.residuals[name]
            block = residual.total.rpartition(".")[0]
            failed[block] = f"{residual.formula} is not {residual.total}"
    for block_served in table.attention:
        error = heads.errors.get(block_served.name, float("inf"))
        if not error <= ATTENTION_TOLERANCE:
            failed[f"{block_served.name} attention"] = (
                "softmax of the scores times the values is not what the block goes on with"
            )
    return failed
