"""A model without its weights: its sites by name, from shapes alone where these suffice, and a
model with stand-ins for them, which shows which of its weights a store would keep, and how large
they are, without reading, drawing or storing them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import check_model_options, load_model, model_arguments
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.plain_modules import without_parametrizations
from vitsee_core.models.site_tables import site_table, sketch
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.sources import source_of
from vitsee_core.models.sources.base import Unfilled
from vitsee_core.models.survey.structure import is_leaf
from vitsee_core.models.tokens.clips import frames_of

INPUT = ("img_mean", "img_std", "crop_pct", "crop_mode", "fill")
SPREAD = 0.05  # of stand-ins around zero, or around one for the scales of norms


@dataclass(frozen=True)
class Listing:
    """table: of a model's sites. input_size: (channels, rows, cols). proven: whether a forward pass
    on pixels made the table; else it was read from shapes. notes: what to know of the weights."""

    table: SiteTable
    input_size: tuple[int, int, int]
    proven: bool
    notes: tuple[str, ...] = ()


def list_sites(name: str, *, prove: bool = False, **options: Any) -> Listing:
    """The sites and attention that can be captured of the model that `name` and the options of
    `load_model` stand for.

    Shapes do not say everything: that a block's branches add up to its output, and that attention
    is what the block uses next, is verified on pixels only, here or by every extraction. Where
    they do not even show the order of tokens, or the model cannot run without values, it is made
    with random weights. A checkpoint is loaded, and its fit is checked.

    Args:
        prove: make the model with the weights that the options name, and verify on pixels.

    Raises:
        ModelError: as `load_model`; the model does not run on images of this size.
    """
    check_model_options(name, options)
    checkpoint = options.get("checkpoint")
    own = bool(source_of(name).skips_left_out)  # proven as they are taken out
    own = own or bool(options.get("registers"))  # so are tokens that are added
    if not prove and checkpoint is None and not own:
        if (listing := from_shapes(name, options)) is not None:
            return listing
        options = {**options, "any_weights": True}
    model = load_model(name, **options)
    return Listing(
        site_table(model), model.input_size, proven=True, notes=tuple(model.notes())
    )


def from_shapes(name: str, options: Mapping[str, Any]) -> Listing | None:
    """The sites as shapes show them, on torch's meta device; None where these do not suffice, or
    values are needed for them.

    Raises:
        ModelError: unknown model, or arguments that it does not take.
    """
    module, size = sketched_module(name, options)
    try:
        return Listing(
            sketch(module, size, allow_ambiguous_axes=False), size, proven=False
        )
    except (ModelError, NotImplementedError, RuntimeError):
        return None  # whatever is wrong shows again, in one line, once there are values


def sketched_module(
    name: str, options: Mapping[str, Any]
) -> tuple[nn.Module, tuple[int, int, int]]:
    """The module without weights, on torch's meta device where it can be made there, and its input
    size. options: of `load_model`.

    Raises:
        ModelError: unknown model, or arguments that it does not take.
    """
    source = source_of(name, options)
    given = {key.removeprefix("img_"): options.get(key) for key in INPUT}
    wanted = model_arguments(options.get("model_args"), options.get("img_size"))
    module = source.without_weights(wanted).eval().requires_grad_(False)
    without_parametrizations(module)
    transform = source.transform(module, wanted.get("img_size"), given)
    return module, transform["input_size"]


def flops_of(module: nn.Module, size: tuple[int, int, int]) -> int:
    """Floating-point operations of one image's, or clip's, forward pass of a module, on its device.

    Raises:
        NotImplementedError, RuntimeError: it does not run without values.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    device = next(module.parameters()).device
    frames = frames_of(module)
    shape = (1, *size) if frames is None else (1, frames, *size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(
            torch.ones(shape, device=device)
        )  # an image of zeros is none to some models
    return int(counter.get_total_flops())


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
    with Unfilled():
        module = source.make(pretrained=False, seed=0, arguments=wanted)
    module.eval().float().requires_grad_(False)
    without_parametrizations(module)
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
