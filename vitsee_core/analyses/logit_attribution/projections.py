"""The projections, taken from the model, that turn the heads' outputs into their block's branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from vitsee_core.analyses.logit_attribution.contributions import Projection
from vitsee_core.models.capture import Capture, Observer
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.survey.tracing import probe_images
from vitsee_core.types import Float
from vitsee_stores.errors import NotOffered

if TYPE_CHECKING:
    from vitsee_core.models.loaded import LoadedModel
    from vitsee_stores import SiteSpec

PROVEN = 1e-5  # of the branch's largest value; float32 sums over some thousand channels


@dataclass
class _Keeper(Observer):
    tokens: dict[str, Float] = field(default_factory=dict)

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Keep the tokens as (tokens of all images, dim)."""
        parts = [part for part in (prefix, body.flatten(1, -2)) if part is not None]
        whole = torch.cat(parts, 1).flatten(0, 1)
        self.tokens[site.part] = whole.double().cpu().numpy()


def projections(model: LoadedModel, blocks: Sequence[str]) -> dict[str, Projection]:
    """The projections of these blocks of a model on the CPU, each proven on random images.

    Raises:
        NotOffered: no linear layer and factor per channel make the branch of what the heads gave.
    """
    table = site_table(model)
    n_heads = {block.name: block.n_heads for block in table.attention}
    found = {}
    for block in blocks:
        keeper = _Keeper()
        sites = [table[f"{block}.{part}"] for part in ("attn.heads", "attn.branch")]
        with torch.inference_mode(), Capture(model, table, sites=sites) as capture:
            capture.run(probe_images(model.input_size, False), keeper)
        heads, branch = (keeper.tokens[site.part] for site in sites)
        shape = (branch.shape[1], heads.shape[1])
        # The heads' outputs enter the projection, or a norm or an Identity before it.
        around = model.module.get_submodule(table.heads[block].module.rpartition(".")[0])
        layers = [
            layer
            for layer in around.modules()
            if isinstance(layer, nn.Linear) and layer.weight.shape == shape
        ]
        fits = (_fitted(layer, heads, branch, n_heads[block]) for layer in layers)
        own = next((fit for fit in fits if fit is not None), None)
        if own is None:
            raise NotOffered(
                f"{model.name}: the branch of {block}.attn is no linear layer of what the heads "
                "gave, times one factor per channel (a norm is between, say); leave out --heads"
            )
        found[block] = own
    return found


def _fitted(layer: nn.Linear, heads: Float, branch: Float, n_heads: int) -> Projection | None:
    """The layer with the factor per channel (1, or the layer scale) that makes its output the
    branch; None if none does."""
    weight = layer.weight.detach().double().numpy()
    bias = np.zeros(len(weight)) if layer.bias is None else layer.bias.detach().double().numpy()
    plain = heads @ weight.T + bias
    size = np.square(plain).sum(0)
    factor = (plain * branch).sum(0) / np.where(size > 0, size, 1)
    if not np.abs(plain * factor - branch).max() <= PROVEN * np.abs(branch).max():
        return None
    return Projection(weight * factor[:, np.newaxis], bias * factor, n_heads)
