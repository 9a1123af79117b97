"""A classifier behind attention pooling (a "map" head), as the model's own modules: norm, attention
of a learned query over the tokens, linear layer. Proven on the model's logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vitsee_core.models.classifier import TOLERANCE, LateTokens, late_tokens, linear_of
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.sites import SiteTable
from vitsee_core.types import Float
from vitsee_stores.layout import TokenLayout

POOL = "attention"
_AT_ONCE = 32  # images whose tokens are pooled together


@dataclass(frozen=True)
class AttentionPooled:
    """Such a classifier, on the CPU; see `head_weights.Classifier`.

    norm, pooling, after: modules, applied one after the other. with_prefix: whether the prefix
    tokens are pooled too. error: as of `HeadWeights`.
    """

    norm: nn.Module
    pooling: nn.Module
    after: nn.Module
    site: str
    width: int
    n_classes: int
    with_prefix: bool
    error: float = 0.0

    pool = POOL
    pooled_kind = None

    def logits(self, tokens: NDArray[Any], layout: TokenLayout) -> Float:
        first = 0 if self.with_prefix else layout.n_prefix
        return self._classify(tokens[:, first:])

    def of_tokens(self, tokens: NDArray[Any]) -> Float:
        """(..., classes) of tokens (..., dim), each pooled by itself."""
        alone = np.asarray(tokens).reshape(-1, 1, tokens.shape[-1])
        return self._classify(alone).reshape(*tokens.shape[:-1], self.n_classes)

    def record(self) -> dict[str, Any]:
        return {"site": self.site, "pool": self.pool, "from": "the model", "error": self.error}

    def _classify(self, tokens: NDArray[Any]) -> Float:
        with torch.inference_mode():
            parts = [
                self.after(self.pooling(self.norm(torch.from_numpy(part.astype(np.float32)))))
                for part in (tokens[at : at + _AT_ONCE] for at in range(0, len(tokens), _AT_ONCE))
            ]
        return torch.cat(parts).double().numpy()


def find_attention_pooled(model: LoadedModel, table: SiteTable) -> AttentionPooled | str:
    """The classifier of a model on the CPU that pools its last block's tokens by attention, or why
    it has none."""
    module = model.module
    pooling, norm = getattr(module, "attn_pool", None), getattr(module, "norm", None)
    if not isinstance(pooling, nn.Module) or not isinstance(norm, nn.Module):
        return "the model pools its tokens by no attention"
    if getattr(pooling, "pos_embed", None) is not None:
        return "its attention pooling adds positions, so that no token can be read by itself"
    linear = linear_of(module)
    if isinstance(linear, str):
        return linear
    found = late_tokens(model, table, linear.weight.shape[1])
    if not isinstance(found, LateTokens):
        return found
    rest = [getattr(module, name, None) for name in ("fc_norm", "head")]
    after = nn.Sequential(*(part for part in rest if isinstance(part, nn.Module)))
    site = found.sites[0]
    assert site.layout is not None
    head = AttentionPooled(
        *(norm, pooling, after, site.name, site.dim, len(linear.weight)),
        with_prefix=bool(getattr(module, "pool_include_prefix", False)),
    )
    try:
        logits = head.logits(found.tokens[site.name], site.layout)
    except RuntimeError as error:  # modules that take other shapes
        return f"its attention pooling cannot be run by itself ({str(error)[:80]})"
    gap = float(np.abs(logits - found.logits).max()) / found.scale
    if gap > TOLERANCE:
        return f"its modules after the last block give other logits (by {gap:.2g} of the largest)"
    return replace(head, error=gap)
