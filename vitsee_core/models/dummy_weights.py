"""A model with stand-ins in place of its weights: enough to see which of its weights a store would
keep, and how large they are, without reading, drawing or storing them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vitsee_core.models.blocks import is_leaf
from vitsee_core.models.load import model_arguments
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.sources import source_of

SPREAD = 0.05  # of stand-ins around zero, or around one for the scales of norms


def stand_in(name: str, options: Mapping[str, Any], table: SiteTable) -> LoadedModel:
    """The model that `name` and the options of `load_model` stand for, on the CPU, with numbers
    that mean nothing for weights; buffers are the architecture's own.

    Parameters of layers are views of one random vector, as long as the largest of them, and blocks
    whose output has the shape of their input give that input back. So neither memory nor time
    grows with the depth, and what lies before and behind the blocks computes what it would.

    Raises:
        ModelError: unknown model, or arguments that it does not take.
    """
    source = source_of(name, options)
    args = dict(options.get("model_args") or {})
    wanted = model_arguments(args, options.get("img_size"))
    with _Unfilled():
        module = source.make(pretrained=False, seed=0, wanted=wanted)
    module.eval().float().requires_grad_(False)
    fill(module)
    skip_blocks(module, table)
    given = {key: options.get(key) for key in ("crop_pct", "crop_mode", "fill")}
    given |= {key: options.get(f"img_{key}") for key in ("mean", "std")}
    transform = source.transform(module, wanted.get("img_size"), given)
    return LoadedModel(
        name=name,
        module=module,
        input_size=tuple(transform["input_size"]),
        transform=transform,
        weights={"source": "none"},
        architecture=source.architecture(module),
        model_args=args,
        class_names=source.class_names(module),
    )


def fill(module: nn.Module) -> None:
    """Give every parameter stand-ins: those of layers share memory, so that they must not be
    written to; those of modules with children (position tables, class tokens) have their own."""
    most = max((p.numel() for p in module.parameters()), default=0)
    shared = torch.randn(most, generator=torch.Generator().manual_seed(0)) * SPREAD
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            values = shared[: parameter.numel()].view(parameter.shape)
            if parameter.ndim == 1 and name.endswith("weight"):
                values = values + 1
            parameter.data = values if is_leaf(child) else values.clone()


def skip_blocks(module: nn.Module, table: SiteTable) -> None:
    """Let every block of `table` give back its input where that has the output's shape."""
    shapes = {site.name: (site.kind, site.shape) for site in table.sites}
    for name, shape in shapes.items():
        block, _, part = name.rpartition(".")
        if part == "out" and shapes.get(f"{block}.in") == shape:
            (left,) = table.points[name].hook_points
            module.get_submodule(left.module).forward = _first


def _first(x: Any, *_: Any, **__: Any) -> Any:
    return x


class _Unfilled(TorchFunctionMode):
    """Leaves parameters as they are allocated, which costs neither time nor memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given, name = dict(kwargs or {}), getattr(func, "__name__", "")
        written = args[0] if args else given.get("tensor")  # torch.nn.init passes it by name
        writes = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        return written if writes and isinstance(written, nn.Parameter) else func(*args, **given)
