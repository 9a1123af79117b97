"""Small timm models with redrawn weights, and an observer that keeps what it sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitsee_core.models.attention_watch import AttentionCall
from vitsee_core.models.capture import Capture, Observer
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import load_model
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.sites import AttentionBlock, SiteTable, Sublayer
from vitsee_core.models.tokens.clips import frames_of
from vitsee_stores.layout import SiteSpec

SMALL = {"embed_dim": 48, "depth": 3, "num_heads": 3}
VIT = {**SMALL, "patch_size": 8}
_SPREAD = (
    "gamma",
    "ls1",
    "ls2",
    "pos",
    "bias",
    "table",
    "alpha",
    "beta",
    "scale",
    "token",
    "rel",
)


def redraw(module: nn.Module, seed: int = 0) -> None:
    """Draw anew every norm weight and bias, LayerScale, gamma, position table or bias and running
    statistic: timm starts ResNet branches at zero and LayerScale at 1e-5, where a wrong hook
    passes unseen."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: torch.Size) -> Tensor:
        sign = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
        return sign * (0.3 + 0.9 * torch.rand(shape, generator=generator))

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim <= 1 or any(word in name.lower() for word in _SPREAD):
                parameter.copy_(draw(parameter.shape))
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


def small(name: str, img_size: Any = 32, **args: Any) -> LoadedModel:
    """A random model of this architecture, every weight of weight redrawn."""
    model = load_model(name, random_init=0, img_size=img_size, model_args=args)
    redraw(model.module)
    return model


def images(model: LoadedModel, n: int = 3, seed: int = 1) -> Tensor:
    """Random normalised images of the model's input size, or clips of them."""
    frames = frames_of(model.module)
    shape = (n, *(() if frames is None else (frames,)), *model.input_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Keeper(Observer):
    """Keeps copies of everything: sites by name, (z, f) by sublayer, scores by block."""

    def __init__(self) -> None:
        self.sites: dict[str, tuple[Tensor | None, Tensor]] = {}
        self.branches: dict[str, tuple[Tensor, Tensor]] = {}
        self.scores: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        self.output: Any = None

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        self.sites[site.name] = (None if prefix is None else prefix.clone(), body.clone())

    def branch(self, sublayer: Sublayer, z: Tensor, f: Tensor) -> None:
        self.branches[sublayer.name] = (z.clone(), f.clone())

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        self.scores[block.name] = call.scores(slice(None)).clone()
        self.values[block.name] = call.value.clone()

    def tokens(self, name: str) -> Tensor:
        """A site's tokens, prefix first: (images, tokens, dim)."""
        prefix, body = self.sites[name]
        body = body.flatten(1, -2) if body.ndim > 3 else body
        return body if prefix is None else torch.cat([prefix, body], 1)


def captured(model: LoadedModel, table: SiteTable, x: Tensor, **chosen: Any) -> Keeper:
    """What a pass over images shows of the chosen `sites`, `sublayers` and `attention`; of all that
    a store keeps, if none is chosen."""
    if not chosen:
        stored = [site for site in table.sites if site.alias_of is None]
        chosen = {
            "sites": stored,
            "sublayers": table.sublayers,
            "attention": table.attention,
        }
    keeper = Keeper()
    with (
        torch.inference_mode(),
        Capture(model, table, **{"sites": (), **chosen}) as capture,
    ):
        keeper.output = capture.run(x, keeper)
    return keeper


def refusal(name: str, **options: Any) -> str:
    """The one line that says why a model is not loaded."""
    with pytest.raises(ModelError) as error:
        load_model(name, **options)
    assert "\n" not in str(error.value)
    return str(error.value)
