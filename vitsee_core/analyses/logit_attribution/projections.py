"""The projections that turn the heads' outputs into their block's branch, taken from the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from vitsee_core.analyses.logit_attribution.contributions import Projection
from vitsee_core.models.capture import Capture
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.trace import probe_images
from vitsee_core.types import Float
from vitsee_stores.errors import NotOffered

if TYPE_CHECKING:
    from vitsee_core.models.loaded import LoadedModel
    from vitsee_stores.layout import SiteSpec

PROVEN = 1e-5  # of the branch's largest value; float32 sums over some thousand channels


@dataclass
class _Keeper:
    tokens: dict[str, Float] = field(default_factory=dict)

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Keep the tokens as (tokens of all images, dim)."""
        parts = [part for part in (prefix, body.flatten(1, -2)) if part is not None]
        whole = torch.cat(parts, 1).flatten(0, 1)
        self.tokens[site.part] = whole.double().cpu().numpy()

    def branch(self, *_: object) -> None: ...

    def attention(self, *_: object) -> None: ...


def projections(model: LoadedModel, blocks: Sequence[str]) -> dict[str, Projection]:
    """Those of these blocks of a model on the CPU, each proven on random images.

    Raises:
        NotOffered: what the heads gave does not become the branch by a linear layer and one factor
            per channel.
    """
    table = site_table(model)
    n_heads = {block.name: block.n_heads for block in table.attention}
    found = {}
    for block in blocks:
        place = table.heads.get(block)
        layer = None if place is None else model.module.get_submodule(place.module)
        if block not in n_heads or not isinstance(layer, nn.Linear):
            kind = "unknown" if layer is None else f"a {type(layer).__name__}"
            raise NotOffered(
                f"{model.name}: what follows the heads of {block} is {kind}: no --heads"
            )
        keeper = _Keeper()
        sites = [table[f"{block}.{part}"] for part in ("attn.heads", "attn.branch")]
        capture = Capture(model, table, sites=sites)
        with torch.inference_mode(), capture:
            capture.run(probe_images(model.input_size, False), keeper)
        heads, branch = (keeper.tokens[site.part] for site in sites)
        weight = layer.weight.detach().double().numpy()
        bias = np.zeros(len(weight)) if layer.bias is None else layer.bias.detach().double().numpy()
        plain = heads @ weight.T + bias
        size = np.square(plain).sum(0)
        factor = (plain * branch).sum(0) / np.where(size > 0, size, 1)
        gap = np.abs(plain * factor - branch).max()
        if not gap <= PROVEN * np.abs(branch).max():
            raise NotOffered(
                f"{model.name}: the branch of {block}.attn is not the heads' projection times one "
                "factor per channel (a norm follows it, say); leave out --heads"
            )
        found[block] = Projection(weight * factor[:, np.newaxis], bias * factor, n_heads[block])
    return found
