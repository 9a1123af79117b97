"""A model's classifier, found by trying, proven on its logits: as norm, pooling and linear layer,
or behind attention pooling (a "map" head) as the model's own modules: norm, attention of a learned
query over the tokens, linear layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitsee_core.models.capture import Capture, Observer
from vitsee_core.models.hook_points import CaptureError, first_tensor
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.survey.structure import likely_classifiers
from vitsee_core.models.survey.tracing import probe_images
from vitsee_core.models.weights import POOLS, Classifier, HeadWeights
from vitsee_core.types import Float
from vitsee_stores.layout import SiteSpec, TokenLayout

TOLERANCE = (
    1e-5  # of the largest logit less its bias; float32 sums over some thousand channels
)
CLEARLY = 0.5  # the first of two that are right is taken, unless the other's error is below this
MOST_NORMS = 4
MOST_SITES = 3
POOL = "attention"
_AT_ONCE = 32  # images whose tokens are pooled together


class _Keeper(Observer):
    def __init__(self) -> None:
        self.tokens: dict[str, NDArray[np.float64]] = {}

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Keep the tokens as (images, tokens, dim)."""
        parts = [part for part in (prefix, body.flatten(1, -2)) if part is not None]
        self.tokens[site.name] = torch.cat(parts, 1).double().cpu().numpy()


@dataclass(frozen=True)
class LateTokens:
    """Tokens of late sites on two random images. sites: the last block's output first. tokens:
    site -> (images, tokens, dim). logits: (images, classes) the model's own; scale: the largest of
    these less its bias."""

    sites: list[SiteSpec]
    tokens: dict[str, NDArray[np.float64]]
    logits: NDArray[np.float64]
    scale: float


def late_tokens(
    model: LoadedModel, table: SiteTable, linear: nn.Linear | nn.Conv2d
) -> LateTokens | str:
    """The late tokens of a model on the CPU that are as wide as its classifier's linear layer, or
    the reason why there are none."""
    sites = _late_sites(table, linear.weight.shape[1])
    if not sites:
        return "no site after the last block has tokens as wide as the classifier"
    keeper = _Keeper()
    capture = Capture(model, table, sites=sites)
    try:
        with torch.inference_mode(), capture:
            images = probe_images(model.input_size, corners=False)
            output = first_tensor(capture.run(images, keeper))
    except CaptureError as error:
        return str(error)
    if output is None or output.shape != (len(images), len(linear.weight)):
        return "the model's output is no vector of the classifier's logits"
    logits = output.double().numpy()
    # What the bias alone gives proves nothing.
    bias = 0.0 if linear.bias is None else linear.bias.detach().double().numpy()
    scale = float(np.abs(logits - bias).max())
    if not scale > 0:
        return (
            "its logits are the same for every image: nothing shows how they come about"
        )
    return LateTokens(sites, keeper.tokens, logits, scale)


def find_classifier(model: LoadedModel, table: SiteTable) -> HeadWeights | str:
    """The classifier of a model on the CPU as a formula over the tokens of a late site, or why it
    is none. Of all that are right, the one over the earliest site.

    Every combination of a site, a norm and a pooling is tried on two random images; one counts only
    if it gives the model's own logits.
    """
    linear = linear_of(model.module)
    if isinstance(linear, str):
        return linear
    kernel = linear.weight.detach().float().flatten(1).numpy()
    arrays: dict[str, NDArray[np.float32]] = {"head_kernel": kernel.copy()}
    if linear.bias is not None:
        arrays["head_bias"] = linear.bias.detach().float().numpy().copy()
    late = late_tokens(model, table, linear)
    if isinstance(late, str):
        return late
    closest = np.inf
    for site in late.sites:
        assert site.layout is not None
        best = None
        for head in _candidates(
            site, site.layout, arrays, _norms(model.module, kernel.shape[1])
        ):
            found = head.logits(late.tokens[site.name], site.layout)
            gap = float(np.abs(found - late.logits).max()) / late.scale
            closest = min(closest, gap)
            # Where tokens are much alike, a wrong order of norm and pooling comes close, too.
            if gap <= TOLERANCE and (best is None or gap < CLEARLY * best.error):
                best = replace(head, error=gap)
        if best is not None:
            return best
    return (
        "the logits are not head(norm(pool)) of a late site's tokens (the closest reading differs "
        f"by {closest:.2g} of the largest)"
    )


def linear_of(module: nn.Module) -> nn.Linear | nn.Conv2d | str:
    """The one linear layer that gives the logits."""
    found = [m for m in likely_classifiers(module) if not isinstance(m, nn.Identity)]
    if not found:
        return "the model has no classifier"
    if len(found) > 1:
        return f"{len(found)} classifiers, whose logits are averaged"
    layers = [m for m in found[0].modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    if not layers:
        return f"the classifier is a {type(found[0]).__name__}, no linear layer"
    last = layers[-1]
    if isinstance(last, nn.Conv2d) and (last.kernel_size != (1, 1) or last.groups != 1):
        return "the classifier is a convolution over several pixels"
    return last


def _late_sites(table: SiteTable, dim: int) -> list[SiteSpec]:
    """The last block's output and the last sites after it whose tokens are `dim` wide."""
    outs = [i for i, site in enumerate(table.sites) if site.part == "out"]
    if not outs:
        return []
    stored = {site.name: site for site in table.sites}
    late = [stored[site.alias_of or site.name] for site in table.sites[outs[-1] :]]
    wide = [s for s in dict.fromkeys(late) if s.kind == "tokens" and s.dim == dim]
    return [*wide[:1], *wide[1:][-MOST_SITES:]]


def _norms(module: nn.Module, dim: int) -> list[nn.Module]:
    """The last norms over so many channels, the model's last one first."""
    found = [
        child
        for child in module.modules()
        if "norm" in type(child).__name__.lower()
        and isinstance(weight := getattr(child, "weight", None), Tensor | None)
        and (weight is None or weight.shape == (dim,))
        and all(isinstance(inner, nn.Identity) for inner in child.children())
    ]
    return found[::-1][:MOST_NORMS]


def _candidates(
    site: SiteSpec,
    layout: TokenLayout,
    arrays: dict[str, NDArray[np.float32]],
    norms: list[nn.Module],
) -> Iterator[HeadWeights]:
    pools = [how for how in POOLS if how != "cls" or layout.cls is not None]
    readings = [("none", 0.0, dict[str, NDArray[np.float32]]())]
    for norm in norms:
        readings += _readings(norm)
    for kind, eps, own in readings:
        for how in pools:
            for first in (True, False) if kind != "none" and how != "cls" else (True,):
                yield HeadWeights({**arrays, **own}, site.name, how, kind, eps, first)


def _readings(norm: nn.Module) -> list[tuple[str, float, dict[str, NDArray[np.float32]]]]:
    """All (kind, eps, arrays) that a norm may compute; the arrays are its scale and bias."""
    own: dict[str, NDArray[np.float32]] = {}
    for name, array in (("weight", "head_norm_scale"), ("bias", "head_norm_bias")):
        value = getattr(norm, name, None)
        if isinstance(value, Tensor):
            own[array] = value.detach().float().numpy().copy()
    eps = float(getattr(norm, "eps", None) or 0.0)
    mean = getattr(norm, "running_mean", None)
    variance = getattr(norm, "running_var", None)
    if isinstance(mean, Tensor) and isinstance(variance, Tensor):
        scale = 1 / np.sqrt(variance.double().numpy() + eps)
        if "head_norm_scale" in own:
            scale = scale * own["head_norm_scale"]
        shift = -mean.double().numpy() * scale
        if "head_norm_bias" in own:
            shift = shift + own["head_norm_bias"]
        folded = {"head_norm_scale": scale, "head_norm_bias": shift}
        return [("affine", 0.0, {k: x.astype(np.float32) for k, x in folded.items()})]
    kinds = ("rms", "layer") if "rms" in type(norm).__name__.lower() else ("layer", "rms")
    return [(kind, eps, own) for kind in kinds]


@dataclass(frozen=True)
class AttentionPooled:
    """Such a classifier, on the CPU; see `HeadWeights`.

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
        return {
            "site": self.site,
            "pool": self.pool,
            "from": "the model",
            "error": self.error,
        }

    def _classify(self, tokens: NDArray[Any]) -> Float:
        with torch.inference_mode():
            parts = [
                self.after(
                    self.pooling(self.norm(torch.from_numpy(part.astype(np.float32))))
                )
                for part in (
                    tokens[at : at + _AT_ONCE] for at in range(0, len(tokens), _AT_ONCE)
                )
            ]
        return torch.cat(parts).double().numpy()


def find_attention_pooled(model: LoadedModel, table: SiteTable) -> AttentionPooled | str:
    """The classifier of a model on the CPU that pools its last block's tokens by attention, or why
    it has none."""
    module = model.module
    pooling = getattr(module, "attn_pool", None)
    norm = getattr(module, "norm", None)
    if not isinstance(pooling, nn.Module) or not isinstance(norm, nn.Module):
        return "the model pools its tokens by no attention"
    if getattr(pooling, "pos_embed", None) is not None:
        return (
            "its attention pooling adds positions, so that no token can be read by itself"
        )
    linear = linear_of(module)
    if isinstance(linear, str):
        return linear
    found = late_tokens(model, table, linear)
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


def classifier_of(model: LoadedModel) -> Classifier | str:
    """The classifier of a model on the CPU: a formula over tokens, or attention pooling and a
    linear layer; else the reason why it is neither."""
    table = site_table(model)
    found = find_classifier(model, table)
    if not isinstance(found, str):
        return found
    pooled = find_attention_pooled(model, table)
    return found if isinstance(pooled, str) else pooled
