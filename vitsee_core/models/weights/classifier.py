"""A model's classifier, found by trying, proven on its logits: as norm, pooling and linear layer,
or behind attention pooling (a "map" head) as the model's own modules: norm, attention of a learned
query over the tokens, linear layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitsee_core.models.capture import Capture, Observer
from vitsee_core.models.hook_points import CaptureError, first_tensor
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.survey.head import likely_classifiers
from vitsee_core.models.survey.tracing import probe_images
from vitsee_core.models.weights import POOLS, Classifier, HeadWeights
from vitsee_core.types import Float
from vitsee_stores.layout import SiteSpec, TokenLayout

# Of the largest logit less its bias: float32 sums over some thousand channels.
TOLERANCE = 1e-5
# The first of two that are right is taken, unless the other's error is below this fraction of it.
CLEARLY = 0.5
MAX_NORMS = 4
MAX_SITES = 3
POOL = "attention"
_BATCH_SIZE = 32  # images whose tokens are pooled together


class _TokenKeeper(Observer):
    """An observer that keeps the tokens of sites, (images, tokens, dim) in float64."""

    def __init__(self) -> None:
        self.tokens: dict[str, NDArray[np.float64]] = {}

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Keep the tokens as (images, tokens, dim)."""
        tokens = body.flatten(1, -2)
        if prefix is not None:
            tokens = torch.cat([prefix, tokens], 1)
        self.tokens[site.name] = tokens.double().cpu().numpy()


@dataclass(frozen=True)
class LateTokens:
    """Tokens of late sites on two random images, and the model's logits.

    Attributes:
        sites: the sites, the last block's output first.
        tokens: site -> (images, tokens, dim).
        logits: (images, classes).
        scale: the largest logit less its bias.
    """

    sites: list[SiteSpec]
    tokens: dict[str, NDArray[np.float64]]
    logits: NDArray[np.float64]
    scale: float


def late_tokens(
    model: LoadedModel, table: SiteTable, linear: nn.Linear | nn.Conv2d
) -> LateTokens | str:
    """Return the late tokens of a model on the CPU that are as wide as its classifier's linear
    layer, or the reason why there are none."""
    sites = _late_sites(table, linear.weight.shape[1])
    if not sites:
        return "no site after the last block has tokens as wide as the classifier"
    keeper = _TokenKeeper()
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
    """Return the classifier of a model on the CPU as a formula over the tokens of a late site, or
    the reason why it is not one. Of all formulas that are right it is that of the earliest site.

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
        "the logits are not head(norm(pool)) of a late site's tokens (the closest "
        f"reading differs by {closest:.2g} of the largest)"
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
    return [*wide[:1], *wide[1:][-MAX_SITES:]]


def _norms(module: nn.Module, dim: int) -> list[nn.Module]:
    """Return the last norms over `dim` channels, the model's last one first."""
    norms = []
    for child in module.modules():
        if "norm" not in type(child).__name__.lower():
            continue
        weight = getattr(child, "weight", None)
        if weight is not None and (
            not isinstance(weight, Tensor) or weight.shape != (dim,)
        ):
            continue
        # timm's norms that carry an activation have it as a child.
        if all(isinstance(inner, nn.Identity) for inner in child.children()):
            norms.append(child)
    return norms[::-1][:MAX_NORMS]


def _candidates(
    site: SiteSpec,
    layout: TokenLayout,
    arrays: dict[str, NDArray[np.float32]],
    norms: list[nn.Module],
) -> Iterator[HeadWeights]:
    """Yield every combination of a norm, or none, and a pooling over a site's tokens.

    arrays: kernel and bias of the linear layer.
    """
    pools = [how for how in POOLS if how != "cls" or layout.cls is not None]
    readings = [_NormReading("none", eps=0.0, arrays={})]
    for norm in norms:
        readings += _norm_readings(norm)
    for reading in readings:
        for how in pools:
            # A single token, and no norm, give the same in both orders.
            orders = [True]
            if reading.kind != "none" and how != "cls":
                orders.append(False)
            for norm_first in orders:
                yield HeadWeights(
                    arrays={**arrays, **reading.arrays},
                    site=site.name,
                    pool=how,
                    norm=reading.kind,
                    eps=reading.eps,
                    norm_first=norm_first,
                )


class _NormReading(NamedTuple):
    """The kinds of norm before a classifier; the fields are those of `HeadWeights`."""

    kind: str
    eps: float
    arrays: dict[str, NDArray[np.float32]]


def _norm_readings(norm: nn.Module) -> list[_NormReading]:
    """Return all that a norm may compute, the likeliest first."""
    arrays: dict[str, NDArray[np.float32]] = {}
    scale_or_none = getattr(norm, "weight", None)
    if isinstance(scale_or_none, Tensor):
        arrays["head_norm_scale"] = scale_or_none.detach().float().numpy().copy()
    bias_or_none = getattr(norm, "bias", None)
    if isinstance(bias_or_none, Tensor):
        arrays["head_norm_bias"] = bias_or_none.detach().float().numpy().copy()
    eps = float(getattr(norm, "eps", None) or 0.0)
    mean = getattr(norm, "running_mean", None)
    variance = getattr(norm, "running_var", None)
    if isinstance(mean, Tensor) and isinstance(variance, Tensor):
        # A batch norm with running statistics is a scale and a shift per channel.
        scale = 1 / np.sqrt(variance.double().numpy() + eps)
        if "head_norm_scale" in arrays:
            scale = scale * arrays["head_norm_scale"]
        shift = -mean.double().numpy() * scale
        if "head_norm_bias" in arrays:
            shift = shift + arrays["head_norm_bias"]
        folded = {
            "head_norm_scale": scale.astype(np.float32),
            "head_norm_bias": shift.astype(np.float32),
        }
        return [_NormReading("affine", eps=0.0, arrays=folded)]
    layer = _NormReading("layer", eps, arrays)
    rms = _NormReading("rms", eps, arrays)
    if "rms" in type(norm).__name__.lower():
        return [rms, layer]
    return [layer, rms]


@dataclass(frozen=True)
class AttentionPooled:
    """A classifier behind attention pooling, on the CPU, with the interface of `HeadWeights`.

    Attributes:
        norm, pooling, after: modules, applied one after the other.
        site: the site whose tokens it reads.
        width: channels of a token.
        n_classes: the number of logits.
        with_prefix: whether the prefix tokens are pooled, too.
        error: largest difference from the model's logits over the largest of these less its bias.
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
        """Return (images, classes) for tokens (images, tokens, dim), prefix tokens first."""
        if not self.with_prefix:
            tokens = tokens[:, layout.n_prefix :]
        return self._classify(tokens)

    def of_tokens(self, tokens: NDArray[Any]) -> Float:
        """Return (..., classes) for tokens (..., dim), each pooled by itself."""
        alone = np.asarray(tokens).reshape(-1, 1, tokens.shape[-1])
        return self._classify(alone).reshape(*tokens.shape[:-1], self.n_classes)

    def record(self) -> dict[str, Any]:
        """Return the fields that a store's manifest records, as JSON values."""
        return {
            "site": self.site,
            "pool": self.pool,
            "from": "the model",
            "error": self.error,
        }

    def _classify(self, tokens: NDArray[Any]) -> Float:
        """Return (images, classes) for the tokens that are pooled, in batches."""
        logits = []
        with torch.inference_mode():
            for start in range(0, len(tokens), _BATCH_SIZE):
                batch = tokens[start : start + _BATCH_SIZE].astype(np.float32)
                pooled = self.pooling(self.norm(torch.from_numpy(batch)))
                logits.append(self.after(pooled))
        return torch.cat(logits).double().numpy()


def find_attention_pooled(model: LoadedModel, table: SiteTable) -> AttentionPooled | str:
    """Return the classifier of a model on the CPU that pools its last block's tokens by attention,
    or the reason why it has none."""
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
    late = late_tokens(model, table, linear)
    if not isinstance(late, LateTokens):
        return late
    after = nn.Sequential()
    for name in ("fc_norm", "head"):
        child = getattr(module, name, None)
        if isinstance(child, nn.Module):
            after.append(child)
    site = late.sites[0]
    assert site.layout is not None
    head = AttentionPooled(
        norm=norm,
        pooling=pooling,
        after=after,
        site=site.name,
        width=site.dim,
        n_classes=len(linear.weight),
        with_prefix=bool(getattr(module, "pool_include_prefix", False)),
    )
    try:
        logits = head.logits(late.tokens[site.name], site.layout)
    except RuntimeError as error:  # modules that take other shapes
        return f"its attention pooling cannot be run by itself ({str(error)[:80]})"
    gap = float(np.abs(logits - late.logits).max()) / late.scale
    if gap > TOLERANCE:
        return f"its modules after the last block give other logits (by {gap:.2g} of the largest)"
    return replace(head, error=gap)


def classifier_of(model: LoadedModel) -> Classifier | str:
    """Return the classifier of a model on the CPU: a formula over tokens, or attention pooling and
    a linear layer; else the reason why it is not a formula."""
    table = site_table(model)
    formula = find_classifier(model, table)
    if not isinstance(formula, str):
        return formula
    pooled = find_attention_pooled(model, table)
    if isinstance(pooled, str):
        return formula  # the reason that says more
    return pooled
