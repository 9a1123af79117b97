"""A model's sites from the shapes of one forward pass without weights: fast, and no proof."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from vitsee_core.models.blocks import find_blocks
from vitsee_core.models.build import TableBuilder
from vitsee_core.models.create import create_model
from vitsee_core.models.geometry import model_geometry
from vitsee_core.models.input_transform import input_transform
from vitsee_core.models.load import resolve
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.steps import Steps
from vitsee_core.models.survey import Survey
from vitsee_core.models.trace import trace


def without_weights(name: str) -> tuple[nn.Module, tuple[int, int, int]]:
    """The module that `name` stands for (see `load_model`) on torch's meta device, where nothing
    is computed and no memory taken, and its input size.

    Raises:
        ModelError: unknown model.
    """
    with torch.device("meta"):
        module = create_model(resolve(name), name, pretrained=False, seed=0, wanted={})
    module.eval().requires_grad_(False)
    return module, input_transform(module, name, None, {})["input_size"]


def sketch(module: nn.Module, size: tuple[int, int, int]) -> SiteTable:
    """The site table as `site_table` begins it: what needs pixels (tokens in another order, patches
    measured, sums and attention proven) is left to that.

    Raises:
        ModelError: the model does not run on images of this size.
    """
    seen = trace(module, size, corners=False)
    geometry = replace(model_geometry(module, size[1:]), steps=Steps(size[1:], module, seen))
    survey = Survey(seen, tuple(find_blocks(module, seen)), geometry)
    return TableBuilder(module, survey, {}).build()
