"""Loading: a name, of any source, or a caller's torch module becomes a `LoadedModel`, with its
image transform, the record of its weights and their hash."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from vitsee_core.models.sources.base import Source
from vitsee_core.models.sources.transforms import input_transform, label_names
from vitsee_core.models.tokens.clips import frames_of, recognise
from vitsee_core.models.tokens.towers import packing_of
from vitsee_core.models.weights.checkpoints import Checkpoint
from vitsee_core.models.weights.positions import Resampling

log = logging.getLogger(__name__)

MAX_SEED = 2**63 - 1  # of a torch generator, as JSON readers represent it


@dataclass(frozen=True)
class LoadOptions:
    """The keywords of `load_model`. Each overrides the model's own configuration.

    Attributes:
        checkpoint: a file with weights to take instead of the pretrained ones.
        checkpoint_key: which of the file's state dicts, where it holds several.
        random_init: a seed; random weights instead of the pretrained ones.
        img_size: side, or (rows, cols), of the input in pixels.
        img_mean: mean of the channels, for pixels from 0 to 1.
        img_std: standard deviation of the channels, for pixels from 0 to 1.
        crop_pct: fraction of the resized image's side that the centre crop keeps.
        crop_mode: how images are cropped, one of timm's words.
        fill: the colour of what a crop beyond the image's border shows.
        transform: "timm" for timm's image transform in place of the source's image processor.
        processor: backend of the image processor, "pil" or "torchvision".
        trust_remote_code: whether code of the model's repository may run.
        model_args: arguments of the architecture.
        ablate_skip: blocks or sublayers to run without their skip connections, besides those that
            a folder's config.json leaves out.
        replace, ablate_heads, block_attention: interventions, recorded here and in effect in
            extractions alone.
        registers: tokens to add, which are added at once.
        frames: frames of a clip. A model of clips is made for this number where it can be; a
            user's own module is tried on clips of so many.
        foreign: label of the store that name and arguments were read from, which nobody vouches
            for: no folder and no network is asked, and only arguments that size a layer are taken.
        native: whether images come at the sizes of the model's image processor.
        any_weights: whether weights may be any: random, or those that the code has for every seed.
        weights_size: (rows, cols) in pixels of the images that the weights' position table is for,
            where the weights do not say it; by default square.
        resample_patches: whether filters of another patch size are resampled, not refused.
    """

    checkpoint: Path | None = None
    checkpoint_key: str | None = None
    random_init: int | None = None
    img_size: int | tuple[int, int] | None = None
    img_mean: tuple[float, ...] | None = None
    img_std: tuple[float, ...] | None = None
    crop_pct: float | None = None
    crop_mode: str | None = None
    fill: str | None = None
    transform: str | None = None
    processor: str | None = None
    trust_remote_code: bool = False
    model_args: Mapping[str, Any] | None = None
    ablate_skip: Sequence[str] = ()
    replace: Sequence[str] = ()
    ablate_heads: Sequence[str] = ()
    block_attention: Sequence[str] = ()
    registers: Sequence[str] = ()
    frames: int | None = None
    foreign: str | None = None
    native: bool = False
    any_weights: bool = False
    weights_size: tuple[int, int] | None = None
    resample_patches: bool = False

    @property
    def seed(self) -> int | None:
        """The seed of random weights; None for weights that were trained."""
        if self.random_init is None and self.any_weights:
            return 0
        return self.random_init


def load_model(name: str, **keywords: Any) -> LoadedModel:
    """Return the model that a name stands for, ready to run.

    Args:
        name: a timm name with or without tag, `hf-hub:...`, `local-dir:/path`, `demo:vit`, or the
            name of another source's model (`sources/`).
        keywords: weights, input geometry and changes, the fields of `LoadOptions`.

    Raises:
        ModelError: unknown model, weights that cannot be had or do not fit, an option that the
            architecture does not take, or a skip that cannot be ablated.

    Example:
        >>> model = load_model("vit_tiny_patch16_224", random_init=0, img_size=32)
        >>> model.input_size
        (3, 32, 32)
    """
    options = LoadOptions(**keywords)
    model_args = dict(options.model_args or {})
    source = source_of(name, vars(options))
    # Before anything is opened: name and arguments may come from a store that nobody vouches for.
    if options.foreign is not None:
        source.check_foreign(model_args, options.foreign)
    check_model_options(name, vars(options))
    source.resampling = Resampling(
        patches=options.resample_patches, size=options.weights_size
    )

    # The file comes before the module: its layout may state arguments of the architecture.
    checkpoint = None
    layout = None
    if options.checkpoint is not None:
        checkpoint = Checkpoint.read(options.checkpoint, options.checkpoint_key)
        layout = checkpoint.layout
    if layout is not None:
        model_args = {**source.layout_arguments(layout.args), **model_args}
    arguments = model_arguments(model_args, options.img_size)
    if options.frames is not None and source.takes_frames:
        arguments["frames"] = options.frames
    try:
        module = _make_module(source, arguments, options)
    except ModelError as error:
        if layout is None or not layout.args:
            raise
        raise ModelError(
            f"{options.checkpoint} is a checkpoint of {layout.name}, but {error}"
        ) from error

    overrides = {
        "mean": options.img_mean,
        "std": options.img_std,
        "crop_pct": options.crop_pct,
        "crop_mode": options.crop_mode,
        "fill": options.fill,
    }
    transform = source.transform(module, arguments.get("img_size"), overrides)
    weights: dict[str, Any]
    if checkpoint is not None:
        weights, transform = _load_checkpoint(
            checkpoint,
            module=module,
            source=source,
            arguments=arguments,
            transform=transform,
            overrides=overrides,
        )
    elif options.seed is not None:
        weights = {"source": "random", "seed": options.seed}
    else:
        weights = source.pretrained_record(module, arguments)

    refuse_compiled(module)
    _prepare_for_inference(module)
    if options.frames is not None and source.any_module:
        recognise(module, options.frames, tuple(transform["input_size"]), name)
    if options.resample_patches:
        weights["resample_patches"] = True
    if options.weights_size is not None:
        weights["weights_size"] = list(options.weights_size)
    # After the model is in float32 and without parametrizations, as it computes.
    weights["sha256"] = hash_weights(module)
    if not any(bool(parameter.any()) for parameter in module.parameters()):
        log.warning(
            "%s: all weights are 0, so that its features are the same for all images",
            options.checkpoint or name,
        )
    model = LoadedModel(
        name=name,
        module=module,
        input_size=tuple(transform["input_size"]),
        transform=transform,
        weights=weights,
        architecture=source.architecture(module),
        model_args=model_args,
        class_names=source.class_names(module),
        trained_without=source.skips_left_out,
        interventions=parse(
            options.replace,
            options.ablate_heads,
            options.block_attention,
            options.registers,
        ),
        origin=source.origin(),
        native=source.native,
    )
    # Skips are taken out and registers added now; other interventions act in extractions alone.
    return _apply_lasting_changes(model, options.ablate_skip)


def _make_module(
    source: Source, arguments: dict[str, Any], options: LoadOptions
) -> nn.Module:
    """Return the module of a source, with its pretrained weights where no others are chosen.

    Raises:
        ModelError: the source cannot make it; tensors of its own classes; random weights were
            chosen, and the source's code has the same weights for every seed, or an argument asks
            for trained ones.
    """
    seed = options.seed
    module = source.make(
        pretrained=options.checkpoint is None and seed is None,
        seed=seed or 0,
        arguments=arguments,
        foreign=options.foreign is not None,
    )
    require_plain_tensors(module, source.name)
    if options.random_init is None or options.any_weights:
        return module
    if not source.depends_on_seed(module, options.random_init, arguments):
        raise ModelError(
            f"{source.name} gives the same weights for every seed; expected random ones: "
            "give its function a parameter 'pretrained', which is False for them"
        )
    return module


def _load_checkpoint(
    checkpoint: Checkpoint,
    *,
    module: nn.Module,
    source: Source,
    arguments: dict[str, Any],
    transform: dict[str, Any],
    overrides: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a checkpoint into a module; return the record of the weights and the image transform.

    A published layout brings the transform that its authors evaluate with. What neither the file
    nor the caller states is recorded as assumed.

    Args:
        checkpoint: the file's weights.
        module: the module, changed in place.
        source: what made the module.
        arguments: what it was made with.
        transform: the module's own image transform.
        overrides: the caller's settings of the transform, None where the caller gave none.

    Raises:
        ModelError: the weights do not fit.
    """
    layout = checkpoint.layout
    weights: dict[str, Any] = {
        "source": "checkpoint",
        **checkpoint.put_into(module, source.converter(module), source.resampling),
    }
    if layout is not None:
        weights["layout"] = layout.name
        preprocessing = layout.preprocessing(rows=transform["input_size"][1])
        for key, value in overrides.items():
            if value is not None:
                preprocessing[key] = value
        transform = source.transform(module, arguments.get("img_size"), preprocessing)
    if layout is None or not layout.sure:
        names = ["mean", "std"]
        if layout is not None:
            names.append("crop_pct")
        assumed = {name: transform[name] for name in names if overrides[name] is None}
        assumed |= source.assumed(module, arguments)
        if assumed:
            weights["assumed"] = assumed
    return weights, transform


def model_from_module(
    module: nn.Module,
    transform: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    ablate_skip: Sequence[str] = (),
    interventions: Sequence[Intervention] = (),
    frames: int | None = None,
    copied: bool = False,
) -> LoadedModel:
    """Return a caller's torch module as a model; the module itself is copied, not changed.

    Args:
        module: takes (images, channels, rows, cols) float32, and returns anything; with `frames`
            it may take (clips, frames, channels, rows, cols), or channels before frames.
        transform: input_size, interpolation, crop_pct, crop_mode, mean, std; None for a timm
            module, which states its own.
        name: what tables call the model; by default its timm name, or its class.
        ablate_skip: blocks or sublayers to run without their skip connections.
        interventions: what extractions change while the model runs.
        frames: frames of a clip, for a module that takes clips.
        copied: whether the module is a copy already, on the CPU, which may be changed.

    Raises:
        ModelError: neither module nor caller say how images are prepared; the module has no
            parameters, or cannot be copied; parts of it are compiled, traced or scripted; a skip
            cannot be ablated.
    """
    refuse_compiled(module)
    config: dict[str, Any] = getattr(module, "pretrained_cfg", None) or {}
    cls = type(module)
    timm_name = config.get("architecture")
    architecture = str(timm_name or f"{cls.__module__}.{cls.__qualname__}")
    name = name or str(timm_name or cls.__name__)
    if transform is None:
        if not config:
            raise ModelError(
                f"{name} is not a timm model: give its transform (transform=...)"
            )
        transform = input_transform(module, name, None, {})
    require_plain_tensors(module, name)
    if next(module.parameters(), None) is None:
        raise ModelError(f"{name} has no parameters; expected a trained network")
    if not copied:
        try:
            module = copy.deepcopy(module).cpu()
        except (RuntimeError, TypeError) as error:
            raise ModelError(
                f"{name} cannot be copied: {str(error).splitlines()[0]}"
            ) from error
    _prepare_for_inference(module)
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
    return _apply_lasting_changes(model, ablate_skip)


def _apply_lasting_changes(model: LoadedModel, ablate_skip: Sequence[str]) -> LoadedModel:
    """Take out these skip connections and those that the configuration leaves out, add registers,
    and return the model.

    Raises:
        ModelError: a skip that cannot be ablated; interventions in a model of packed patches or of
            clips.
    """
    if model.trained_without or ablate_skip:
        ablate_skips(model, ablate_skip)
    if model.interventions and packing_of(model.module) is not None:
        raise ModelError(
            f"{model.name} takes the patches of all images packed, where interventions "
            "do not reach; expected none, or a model whose images lie in a batch"
        )
    if model.interventions and frames_of(model.module) is not None:
        raise ModelError(
            f"{model.name} takes clips, of which interventions do not know the tokens' "
            "places; expected none, or a model of images"
        )
    for intervention in model.interventions:
        if isinstance(intervention, Registers):
            add_registers(model, intervention.n)
    return model


def model_arguments(
    args: Mapping[str, Any] | None, img_size: int | tuple[int, int] | None
) -> dict[str, Any]:
    """Return the arguments that a source makes its model with: `args`, and `img_size` as
    (rows, cols) where it is not None."""
    arguments = dict(args or {})
    if isinstance(img_size, int):
        arguments["img_size"] = (img_size, img_size)
    elif img_size is not None:
        arguments["img_size"] = tuple(img_size)
    return arguments


def check_model_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse options of `load_model` that this source's models do not take, or that exclude each
    other, before anything is made or read.

    Args:
        name: as in `load_model`.
        options: fields of `LoadOptions`; those that are missing are not checked.

    Raises:
        ModelError: the first such option.
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
    asks_to_resample = options.get("weights_size") is not None or options.get(
        "resample_patches"
    )
    if random_init is not None and asks_to_resample:
        raise ModelError(
            "--weights-size and --resample-patches are about trained weights, which "
            "--random-init does not read; leave them out"
        )
    if checkpoint_key is not None and checkpoint is None:
        raise ModelError(
            "--checkpoint-key chooses within a file: give --checkpoint FILE too"
        )
    if random_init is not None and not 0 <= random_init <= MAX_SEED:
        raise ModelError(f"--random-init is {random_init}; expected 0 to {MAX_SEED}")
    if crop_pct is not None and not 0 < crop_pct <= 1:
        suggestion = ""
        if 1 < crop_pct <= 100:  # a percentage
            suggestion = f"; {crop_pct / 100:.2f}?"
        raise ModelError(
            f"--crop-pct is {crop_pct:g}; expected above 0, at most 1{suggestion}"
        )


def hash_weights(module: nn.Module) -> str:
    """Return the sha256 of the state dict: each tensor's name, type, shape and bytes, in order of
    their names."""
    digest = hashlib.sha256()
    for key, tensor in sorted(module.state_dict().items()):
        if key.endswith(EXTRA_STATE):  # an object of any kind, not a tensor
            continue
        contiguous = tensor.detach().cpu().contiguous()
        digest.update(f"{key} {contiguous.dtype} {tuple(contiguous.shape)}\n".encode())
        if contiguous.numel():  # an empty tensor cannot be viewed as bytes
            # Bytes: NumPy has no bfloat16.
            digest.update(contiguous.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _prepare_for_inference(module: nn.Module) -> None:
    """Switch off dropout, gradients, gradient checkpointing and fused layers, compute
    parametrized weights once, and go to float32."""
    module.eval().float().requires_grad_(False)
    without_parametrizations(module)
    without_fast_path(module)
    switch = getattr(module, "set_grad_checkpointing", None)
    if callable(switch):
        try:
            switch(False)
        except (AssertionError, AttributeError, NotImplementedError, TypeError):
            log.debug("no gradient checkpointing to turn off")
