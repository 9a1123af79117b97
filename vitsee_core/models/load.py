"""A model by name, of any source, or a caller's own torch module, with its geometry, transform and
weights' hash."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitsee_core.models.attention_watch import without_fast_path
from vitsee_core.models.hook_points import ModelError, refuse_compiled
from vitsee_core.models.intervention_spec import Intervention, Registers, parse
from vitsee_core.models.lasting_changes import ablate_skips, add_registers
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.plain_modules import (
    EXTRA_STATE,
    require_plain_tensors,
    without_parametrizations,
)
from vitsee_core.models.sources import source_of
from vitsee_core.models.sources.transforms import input_transform, label_names
from vitsee_core.models.tokens.clips import frames_of, recognise
from vitsee_core.models.tokens.towers import packing_of
from vitsee_core.models.weights.checkpoints import Checkpoint
from vitsee_core.models.weights.positions import Resampling

log = logging.getLogger(__name__)

MOST_SEED = 2**63 - 1  # of a torch generator, as JSON readers represent it


def load_model(
    name: str,
    *,
    checkpoint: Path | None = None,
    checkpoint_key: str | None = None,
    random_init: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    img_mean: tuple[float, ...] | None = None,
    img_std: tuple[float, ...] | None = None,
    crop_pct: float | None = None,
    crop_mode: str | None = None,
    fill: str | None = None,
    transform: str | None = None,
    processor: str | None = None,
    trust_remote_code: bool = False,
    model_args: Mapping[str, Any] | None = None,
    ablate_skip: Sequence[str] = (),
    replace: Sequence[str] = (),
    ablate_heads: Sequence[str] = (),
    block_attention: Sequence[str] = (),
    registers: Sequence[str] = (),
    frames: int | None = None,
    foreign: str | None = None,
    native: bool = False,
    any_weights: bool = False,
    weights_size: tuple[int, int] | None = None,
    resample_patches: bool = False,
) -> LoadedModel:
    """The model that `name` stands for: a timm name with or without tag, `hf-hub:...`,
    `local-dir:/path`, `demo:vit`, or that of another source, see `models/sources/`.

    checkpoint: a file with weights instead of the pretrained ones; checkpoint_key: which of its
    state dicts. random_init: a seed; fresh weights instead of the pretrained ones. ablate_skip:
    blocks or sublayers to run without their skip connections, besides those that a folder's
    config.json leaves out (its `ablate_skip`). replace, ablate_heads, block_attention, registers:
    recorded as `interventions`, in effect in extractions alone; the tokens of registers are added
    at once. native: images come at the sizes of its image processor. frames: of a clip, for which a
    model of clips is made where it can be; a user's own module is tried on clips of so many.
    foreign: the store that name and arguments were read from, which nobody vouches for: no folder,
    no network, and only arguments that size a layer. any_weights: random ones, or those that its
    code has for every seed. weights_size: (rows, cols) in pixels of the images that the weights'
    position table is for, where these do not say it; by default square. resample_patches: filters
    of another patch size are resampled, not refused. The others override the model's own
    configuration. transform, processor, trust_remote_code: see `Choices`.

    Raises:
        ModelError: unknown model, weights that cannot be had or do not fit, an option that the
            architecture does not take, or a skip that cannot be ablated.
    """
    args: dict[str, Any] = dict(model_args or {})
    options: dict[str, Any] = {
        "transform": transform,
        "processor": processor,
        "native": native,
    }
    options |= {"trust_remote_code": trust_remote_code, "checkpoint": checkpoint}
    options |= {
        "checkpoint_key": checkpoint_key,
        "random_init": random_init,
        "crop_pct": crop_pct,
    }
    options |= {"weights_size": weights_size, "resample_patches": resample_patches}
    source = source_of(name, options)
    if foreign is not None:
        source.check_foreign(args, foreign)
    check_model_options(name, {**options, "model_args": args})
    if any_weights and random_init is None:
        random_init = 0
    fresh = checkpoint is not None or random_init is not None
    resampling = Resampling(patches=resample_patches, size=weights_size)
    source.resampling = resampling
    file = None if checkpoint is None else Checkpoint.read(checkpoint, checkpoint_key)
    layout = None if file is None else file.layout
    if layout is not None:
        args = {**source.layout_arguments(layout.args), **args}
    wanted = model_arguments(args, img_size)
    if frames is not None and source.takes_frames:
        wanted["frames"] = frames
    try:
        module = source.make(
            pretrained=not fresh,
            seed=random_init or 0,
            wanted=wanted,
            foreign=foreign is not None,
        )
        require_plain_tensors(module, name)
        one_for_all = (
            random_init is not None
            and not any_weights
            and not source.depends_on_seed(module, random_init, wanted)
        )
        if one_for_all:
            raise ModelError(
                f"{source.name} gives the same weights for every seed; expected random ones: give "
                "its function a parameter 'pretrained', which is False for them"
            )
    except ModelError as error:
        if layout is None or not layout.args:
            raise
        raise ModelError(
            f"{checkpoint} is a checkpoint of {layout.name}, but {error}"
        ) from error
    given: dict[str, Any] = {"mean": img_mean, "std": img_std, "crop_pct": crop_pct}
    given |= {"crop_mode": crop_mode, "fill": fill}
    config = source.transform(module, wanted.get("img_size"), given)
    weights: dict[str, Any]
    if file is not None:
        weights = {
            "source": "checkpoint",
            **file.put_into(module, source.converter(module), resampling),
        }
        if layout is not None:
            weights["layout"] = layout.name
            own = layout.preprocessing(config["input_size"][1])
            own |= {key: x for key, x in given.items() if x is not None}
            config = source.transform(module, wanted.get("img_size"), own)
        if layout is None or not layout.sure:
            names = ("mean", "std") if layout is None else ("mean", "std", "crop_pct")
            assumed = {key: config[key] for key in names if given[key] is None}
            assumed |= source.assumed(module, wanted)
            weights |= {"assumed": assumed} if assumed else {}
    elif random_init is not None:
        weights = {"source": "random", "seed": random_init}
    else:
        weights = source.pretrained_record(module, wanted)
    refuse_compiled(module)
    _still(module)
    if frames is not None and source.any_module:
        recognise(module, frames, tuple(config["input_size"]), name)
    if resample_patches:
        weights["resample_patches"] = True
    if weights_size is not None:
        weights["weights_size"] = list(weights_size)
    weights["sha256"] = hash_weights(module)
    if not any(bool(weight.any()) for weight in module.parameters()):
        log.warning(
            "%s: all weights are 0, so that its features are the same for all images",
            checkpoint or name,
        )
    model = LoadedModel(
        name=name,
        module=module,
        input_size=tuple(config["input_size"]),
        transform=config,
        weights=weights,
        architecture=source.architecture(module),
        model_args=args,
        class_names=source.class_names(module),
        trained_without=source.skips_left_out,
        interventions=parse(replace, ablate_heads, block_attention, registers),
        origin=source.origin(),
        native=source.native,
    )
    return _changed(model, ablate_skip)


def own_model(
    module: nn.Module,
    transform: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    ablate_skip: Sequence[str] = (),
    interventions: Sequence[Intervention] = (),
    frames: int | None = None,
    copied: bool = False,
) -> LoadedModel:
    """A caller's own torch module as a model; the module itself is not changed but copied.

    Args:
        module: takes (images, channels, rows, cols) float32, and gives anything; with `frames` it
            may take (clips, frames, channels, rows, cols), or with channels before frames.
        transform: input_size, interpolation, crop_pct, crop_mode, mean, std; None for a module of
            timm's, which has its own.
        name: what tables call the model; by default its timm name, or its class.
        ablate_skip, interventions, frames: as in `load_model`.
        copied: the module is a copy already, on the CPU, and is changed itself.

    Raises:
        ModelError: neither module nor caller say how images are prepared; the module has no
            parameters, or cannot be copied; parts of it are compiled, traced or scripted; a skip
            that cannot be ablated.
    """
    refuse_compiled(module)
    config: dict[str, Any] = getattr(module, "pretrained_cfg", None) or {}
    kind = type(module)
    architecture = str(
        config.get("architecture") or f"{kind.__module__}.{kind.__qualname__}"
    )
    name = name or str(config.get("architecture") or kind.__name__)
    if transform is None:
        if not config:
            raise ModelError(
                f"{name} is not a timm model: give its transform (transform=...)"
            )
        transform = input_transform(module, name, None, {})
    require_plain_tensors(module, name)
    if next(module.parameters(), None) is None:
        raise ModelError(f"{name} has no parameters; expected a trained network")
    try:
        module = module if copied else copy.deepcopy(module).cpu()
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"{name} cannot be copied: {str(error).splitlines()[0]}"
        ) from error
    _still(module)
    if frames is not None:
        recognise(module, frames, tuple(transform["input_size"]), name)
    model = LoadedModel(
        name=name,
        module=module,
        input_size=tuple(transform["input_size"]),
        transform=dict(transform),
        weights={"source": "module", "sha256": hash_weights(module)},
        architecture=architecture,
        class_names=label_names(config, name),
        interventions=tuple(interventions),
    )
    return _changed(model, ablate_skip)


def _changed(model: LoadedModel, ablate_skip: Sequence[str]) -> LoadedModel:
    """The model without these skips and those of its configuration, with its registers."""
    if model.trained_without or ablate_skip:
        ablate_skips(model, ablate_skip)
    if model.interventions and packing_of(model.module) is not None:
        raise ModelError(
            f"{model.name} takes the patches of all images packed, where interventions do not "
            "reach; expected none, or a model whose images lie in a batch"
        )
    if model.interventions and frames_of(model.module) is not None:
        raise ModelError(
            f"{model.name} takes clips, of which interventions do not know the tokens' places; "
            "expected none, or a model of images"
        )
    for one in model.interventions:
        if isinstance(one, Registers):
            add_registers(model, one.n)
    return model


def model_arguments(
    args: Mapping[str, Any] | None, img_size: int | tuple[int, int] | None
) -> dict[str, Any]:
    """The arguments that create_model is called with, the input size as (rows, cols) among them."""
    if img_size is None:
        return dict(args or {})
    size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
    return {**(args or {}), "img_size": size}


def check_model_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse options of `load_model` that this source's models do not take, or that exclude each
    other.

    Raises:
        ModelError: in one line.
    """
    source = source_of(name, options)
    source.check_choices()
    source.check_arguments(options.get("model_args") or {})
    checkpoint = options.get("checkpoint")
    random_init = options.get("random_init")
    checkpoint_key = options.get("checkpoint_key")
    crop_pct = options.get("crop_pct")
    if checkpoint is not None and random_init is not None:
        raise ModelError(
            "--checkpoint and --random-init exclude each other; give one of them"
        )
    resampled = options.get("weights_size") is not None or options.get("resample_patches")
    if random_init is not None and resampled:
        raise ModelError(
            "--weights-size and --resample-patches are about trained weights, which --random-init "
            "does not read; leave them out"
        )
    if checkpoint_key is not None and checkpoint is None:
        raise ModelError(
            "--checkpoint-key chooses within a file: give --checkpoint FILE too"
        )
    if random_init is not None and not 0 <= random_init <= MOST_SEED:
        raise ModelError(f"--random-init is {random_init}; expected 0 to {MOST_SEED}")
    if crop_pct is not None and not 0 < crop_pct <= 1:
        percent = f"; {crop_pct / 100:.2f}?" if 1 < crop_pct <= 100 else ""
        raise ModelError(
            f"--crop-pct is {crop_pct:g}; expected above 0, at most 1{percent}"
        )


def hash_weights(module: nn.Module) -> str:
    """sha256 of the state dict: each tensor's name, type, shape and bytes, in key order."""
    digest = hashlib.sha256()
    for key, tensor in sorted(module.state_dict().items()):
        if key.endswith(EXTRA_STATE):
            continue
        flat = tensor.detach().cpu().contiguous()
        digest.update(f"{key} {flat.dtype} {tuple(flat.shape)}\n".encode())
        digest.update(
            flat.view(-1).view(torch.uint8).numpy().data if flat.numel() else b""
        )
    return digest.hexdigest()


def _still(module: nn.Module) -> None:
    """No dropout, no gradients, no parametrizations, no checkpointing, no fused layers, float32."""
    module.eval().float().requires_grad_(False)
    without_parametrizations(module)
    without_fast_path(module)
    switch = getattr(module, "set_grad_checkpointing", None)
    if callable(switch):
        try:
            switch(False)
        except (AssertionError, AttributeError, NotImplementedError, TypeError):
            logging.getLogger(__name__).debug("no gradient checkpointing to turn off")
