"""A timm model by name, checkpoint or folder, with its geometry, transform and weights' hash."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitsee_core.models.checkpoints import load_checkpoint
from vitsee_core.models.taps import ModelError, refuse_compiled

_DEMO = "demo:"


@dataclass
class LoadedModel:
    """A model ready to run: eval mode, no gradients, float32, on the CPU.

    input_size: (channels, rows, cols). transform: input_size, interpolation, crop_pct, crop_mode,
    mean, std. weights: source ("pretrained", "random", "checkpoint", "local-dir"), sha256 of all
    tensors, and for a checkpoint its file, the key used, and what was missing or unexpected.
    ablate_skip: residual sublayers that work without their skip, sorted (see ablation.py).
    """

    name: str
    module: nn.Module
    input_size: tuple[int, int, int]
    transform: dict[str, Any]
    weights: dict[str, Any]
    architecture: str
    model_args: dict[str, Any] = field(default_factory=dict)
    class_names: list[str] | None = None
    ablate_skip: tuple[str, ...] = ()


def load_model(
    name: str,
    *,
    checkpoint: Path | None = None,
    random_init: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    img_mean: tuple[float, ...] | None = None,
    img_std: tuple[float, ...] | None = None,
    crop_pct: float | None = None,
    model_args: Mapping[str, Any] | None = None,
    ablate_skip: Sequence[str] = (),
) -> LoadedModel:
    """The model that `name` stands for: a timm name with or without tag, `hf-hub:...`,
    `local-dir:/path`, `demo:vit`, `demo:resnet`.

    checkpoint: a file with weights instead of the pretrained ones. random_init: a seed; fresh
    weights instead of the pretrained ones. ablate_skip: blocks or sublayers to run without their
    skip connections. The others override the model's own configuration.

    Raises:
        ModelError: unknown model, weights that cannot be had or do not fit, an option that the
            architecture does not take, or a skip that cannot be ablated.
    """
    import timm

    args = dict(model_args or {})
    if checkpoint is not None and random_init is not None:
        raise ModelError("--checkpoint and --random-init exclude each other; give one of them")
    full = _resolve(name)
    fresh = checkpoint is not None or random_init is not None
    wanted = dict(args)
    if img_size is not None:
        wanted["img_size"] = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
    module = _create(timm, full, name, not fresh, random_init or 0, wanted)
    weights: dict[str, Any]
    if checkpoint is not None:
        weights = {"source": "checkpoint", **load_checkpoint(module, checkpoint)}
    elif random_init is not None:
        weights = {"source": "random", "seed": random_init}
    else:
        weights = _pretrained_record(module, full)
    refuse_compiled(module)
    _still(module)
    weights["sha256"] = hash_weights(module)
    transform = _transform(timm, module, wanted.get("img_size"), img_mean, img_std, crop_pct)
    config: dict[str, Any] = getattr(module, "pretrained_cfg", {}) or {}
    names = config.get("label_names")
    model = LoadedModel(
        name=name,
        module=module,
        input_size=tuple(transform["input_size"]),
        transform=transform,
        weights=weights,
        architecture=str(config.get("architecture") or full),
        model_args=args,
        class_names=[str(label) for label in names] if names else None,
    )
    if ablate_skip:
        from vitsee_core.models.ablation import ablate_skips

        ablate_skips(model, ablate_skip)
    return model


def _pretrained_record(module: nn.Module, full: str) -> dict[str, Any]:
    """Where weights came from; a timm name without a tag stands for the tag recorded here."""
    if full.startswith("local-dir:"):
        return {"source": "local-dir"}
    config: dict[str, Any] = getattr(module, "pretrained_cfg", None) or {}
    named = [str(config[key]) for key in ("architecture", "tag") if config.get(key)]
    return {"source": "pretrained", "pretrained": ".".join(named) or full}


def hash_weights(module: nn.Module) -> str:
    """sha256 of the state dict: each tensor's name, type, shape and bytes, in key order."""
    digest = hashlib.sha256()
    for key, tensor in sorted(module.state_dict().items()):
        flat = tensor.detach().cpu().contiguous()
        digest.update(f"{key} {flat.dtype} {tuple(flat.shape)}\n".encode())
        digest.update(flat.view(-1).view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def _resolve(name: str) -> str:
    if not name.startswith(_DEMO):
        return name
    from vitsee_core.demo import model_folder

    return f"local-dir:{model_folder(name.removeprefix(_DEMO))}"


def _create(
    timm: Any, full: str, name: str, pretrained: bool, seed: int, wanted: dict[str, Any]
) -> nn.Module:
    known = full.startswith(("hf-hub:", "hf_hub:", "local-dir:")) or timm.is_model(full)
    if not known:
        import difflib

        base = full.partition(".")[0]
        near = difflib.get_close_matches(base, timm.list_models(), n=3, cutoff=0.5)
        hint = f"; near names: {', '.join(near)}" if near else ""
        raise ModelError(f"no timm model is called {name!r}{hint} (run: timm.list_models())")
    if full.startswith("local-dir:") and not Path(full[len("local-dir:") :]).is_dir():
        raise ModelError(
            f"{name}: no such folder; expected one with config.json and model.safetensors"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: nn.Module = timm.create_model(full, pretrained=pretrained, **wanted)
        except TypeError as error:
            if "img_size" in wanted and "img_size" in str(error):
                rest = {k: v for k, v in wanted.items() if k != "img_size"}
                return _create(timm, full, name, pretrained, seed, rest)
            raise ModelError(f"{name} does not take these arguments: {_line(error)}") from error
        except (RuntimeError, ValueError, OSError, AssertionError, KeyError) as error:
            hint = "; give --checkpoint FILE or --random-init SEED" if pretrained else ""
            raise ModelError(f"{name} cannot be made: {_line(error)}{hint}") from error
    return model


def _still(module: nn.Module) -> None:
    """No dropout, no gradients, no checkpointing, float32."""
    module.eval().float().requires_grad_(False)
    switch = getattr(module, "set_grad_checkpointing", None)
    if callable(switch):
        try:
            switch(False)
        except (AssertionError, AttributeError, NotImplementedError, TypeError):
            logging.getLogger(__name__).debug("no gradient checkpointing to turn off")


def _transform(
    timm: Any,
    module: nn.Module,
    img_size: tuple[int, int] | None,
    mean: tuple[float, ...] | None,
    std: tuple[float, ...] | None,
    crop_pct: float | None,
) -> dict[str, Any]:
    given: dict[str, Any] = {"mean": mean, "std": std, "crop_pct": crop_pct}
    if img_size is not None:
        channels = (getattr(module, "pretrained_cfg", None) or {}).get("input_size", (3,))[0]
        given["input_size"] = (int(getattr(module, "in_chans", channels)), *img_size)
    given = {key: value for key, value in given.items() if value is not None}
    resolved = timm.data.resolve_data_config(given, model=module, use_test_size=False)
    size = resolved["input_size"]
    own = getattr(getattr(module, "patch_embed", None), "img_size", None)
    if img_size is None and own is not None and tuple(own) != tuple(size[1:]):
        size = (size[0], int(own[0]), int(own[1]))
    return {
        "input_size": tuple(int(n) for n in size),
        "interpolation": resolved["interpolation"],
        "crop_pct": float(resolved["crop_pct"]),
        "crop_mode": resolved["crop_mode"],
        "mean": tuple(float(x) for x in np.atleast_1d(resolved["mean"])),
        "std": tuple(float(x) for x in np.atleast_1d(resolved["std"])),
    }


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text if len(text) <= 300 else f"{text[:297]}..."
