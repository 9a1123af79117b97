"""The classes of models that transformers has: which take images, and how one is made; and one part
of a larger model, a tower alone or with what leads to the language model, and its weights read
alone."""

from __future__ import annotations

import inspect
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import missing_extra
from vitsee_core.models.sources.meta_device import meta_device
from vitsee_core.models.sources.transformers_inputs import refuse_others
from vitsee_core.models.tokens.towers import (
    FEATURES,
    drop_language_model,
    packed_inputs,
    take_features,
)
from vitsee_core.models.weights.fitting import require_fit, require_numbers
from vitsee_core.models.weights.left_over import unknown

PIXELS = "pixel_values"
VIDEOS = "pixel_values_videos"
# In a configuration these say that the model takes several frames at once, and how many.
FRAMES = ("num_frames", "frames_per_clip")
_OF_VIDEOS = (*FRAMES, "tubelet_size")
_USUAL_FRAMES = 16
_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_TEXT = "input_ids"


def library() -> Any:
    """transformers; a ModelError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("transformers", "transformers") from error
    found: Any = transformers
    found.logging.set_verbosity_error()
    found.logging.disable_progress_bar()
    return found


def class_names() -> list[str]:
    """The classes of models that transformers has a processor of images or of videos for."""
    auto: Any = library().models.auto
    models = auto.modeling_auto.MODEL_MAPPING_NAMES
    processors = [*auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES]
    videos = getattr(
        auto, "video_processing_auto", None
    )  # transformers 4 has none at first
    processors += [*getattr(videos, "VIDEO_PROCESSOR_MAPPING_NAMES", ())]
    found = [models.get(kind) for kind in processors]
    return sorted({name for name in found if isinstance(name, str)})


def backend(wanted: str | None) -> dict[str, Any]:
    """The argument that chooses a processor's backend; transformers 4 has another."""
    if wanted is None:
        return {}
    if int(library().__version__.partition(".")[0]) < 5:
        return {"use_fast": wanted == "torchvision"}
    return {"backend": wanted}


def remote_class(name: str, place: str, revision: str | None) -> Any:
    """A class of a repository's own code, which runs."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(name, place, revision=revision)


def _forward(kind: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind.forward).parameters


def check_input(kind: Any, who: str, *, remote: bool) -> None:
    """Refuse a class that does not take a batch of images, with a ModelError about `who`. remote:
    its own code may run, whose `main_input_name` is often not set."""
    refuse_others(kind, who)
    remote = remote and "input_ids" not in _forward(kind)
    taken = kind.main_input_name in (PIXELS, VIDEOS)
    if not taken and not remote and not packed_inputs(kind):
        raise ModelError(
            f"{who} takes {kind.main_input_name}; expected a model of {PIXELS}: name its tower "
            "behind #, as in #vision_model"
        )


def clip_frames(module: nn.Module) -> int | None:
    """How many frames a model's configuration gives a clip; None for a model of images."""
    config = getattr(module, "config", None)
    stated = [getattr(config, key, None) for key in _OF_VIDEOS]
    videos = getattr(module, "main_input_name", None) == VIDEOS
    if not videos and all(value is None for value in stated):
        return None
    return next((n for n in stated[: len(FRAMES)] if isinstance(n, int)), _USUAL_FRAMES)


def by_attention(make: Callable[[str], Any]) -> Any:
    """The model built with scaled_dot_product_attention, or eager attention if unsupported."""
    try:
        return make("sdpa")
    except ValueError as error:
        if "scaled_dot_product" not in str(error):
            raise
        return make("eager")


def random_model(kind: Any, config: Any) -> nn.Module:
    """A model of new weights."""

    def make(how: str) -> Any:
        config._attn_implementation = how
        return kind(config)

    return by_attention(make)


def size_of(config: Any) -> tuple[int, int] | None:
    """Rows and columns that a configuration states."""
    size = getattr(config, "image_size", getattr(config, "crop_size", None))
    if isinstance(size, Mapping):
        size = size.get("height"), size.get("width")
    if isinstance(size, int):
        return size, size
    patch = getattr(config, "patch_size", None)
    n_patches = getattr(config, "num_patches", None)
    if size is None and isinstance(n_patches, int) and isinstance(patch, int):
        return math.isqrt(n_patches) * patch, math.isqrt(
            n_patches
        ) * patch  # of its positions
    if (
        isinstance(size, list | tuple)
        and len(size) == 2
        and all(isinstance(n, int) for n in size)
    ):
        return size[0], size[1]
    return None


def towers(whole: nn.Module) -> list[str]:
    """Paths of the modules of a model that take images and no text, those inside one another left
    out."""
    found: list[str] = []
    for path, module in whole.named_modules():
        inside = any(path.startswith(f"{above}.") for above in found)
        if path and not inside and hasattr(module, "config"):
            taken = inspect.signature(module.forward).parameters
            if _TEXT not in taken and (PIXELS in taken or packed_inputs(module)):
                found.append(path)
    return found


def named_towers(name: str) -> list[str]:
    """`NAME#PATH` of each tower of a class of transformers that takes images and text, made without
    values from its default configuration; the class itself where it takes images alone, or where
    it cannot be made or has no tower."""
    kind: Any = getattr(library(), name)
    try:
        if _TEXT not in inspect.signature(kind.forward).parameters:
            return [name]
        found = towers(on_meta(kind, kind.config_class()))
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, KeyError):
        return [name]
    return [f"{name}#{path}" for path in found] or [name]


def language_input_of(kind: Any, name: str) -> Any:
    """A class like `kind`, a model of images and text, without its language model, which
    `take_features` can make the language model's input of.

    Raises:
        ModelError: in one line: `kind` is no such model.
    """
    if not hasattr(kind, FEATURES) or int(library().__version__.partition(".")[0]) < 5:
        raise ModelError(
            f"{name} asks for what a language model receives, and {kind.__name__} of transformers "
            f"{library().__version__} has no {FEATURES} that says it; expected a model of images "
            "and text of transformers 5"
        )

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        drop_language_model(self)

    return type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__})


def random_language_input(kind: Any, config: Any) -> nn.Module:
    """One of `language_input_of`'s classes with new weights; the language model is only ever laid
    out without values."""

    def make(how: str) -> Any:
        given = {"dtype": torch.float32, "attn_implementation": how}
        return kind.from_pretrained(None, config=config, state_dict={}, **given)

    if torch.get_default_device().type == "meta":
        config._attn_implementation = "sdpa"
        made: nn.Module = kind(config)
    else:
        made = by_attention(make)
    return with_features(made)


def with_features(module: nn.Module) -> nn.Module:
    """One of these classes' modules that takes images; LLaVA's own way is that of one image."""
    take_features(module, library().LlavaModel.get_image_features)
    return module


def read_parts(module: nn.Module, file_of: Callable[[str], str | None]) -> bool:
    """Read the weights of each of a module's children as `read_weights` does, and its own."""
    from safetensors import safe_open

    shards = _shards(file_of)
    for name, child in module.named_children():
        if child.state_dict() and not read_weights(child, file_of, name):
            return False
    for name, own in module.named_parameters(recurse=False):
        found = [key for key in shards if f".{key}".endswith(f".{name}")]
        local = file_of(shards[found[0]]) if len(found) == 1 else None
        if local is None:
            return False
        with safe_open(local, "pt") as tensors, torch.no_grad():
            copy_into(own, tensors.get_tensor(found[0]), found[0])
    return True


def on_meta(kind: Any, config: Any) -> nn.Module:
    """The model without values."""
    with meta_device():
        made: nn.Module = kind(config)
    return made


def read_weights(
    module: nn.Module, file_of: Callable[[str], str | None], path: str
) -> bool:
    """Read the module's weights from a checkpoint in safetensors of a model that has it at `path`,
    file by file and tensor by tensor. False, with nothing read, where they are not there by the
    names that the module has.

    file_of: the local path of a file of the checkpoint, None if there is none.
    """
    from safetensors import safe_open

    own = module.state_dict()
    shards = _shards(file_of)
    prefix = _prefix(own, shards, path)
    if prefix is None:
        return False
    inside = [key.removeprefix(prefix) for key in shards if key.startswith(prefix)]
    kept = {*own, *(name for name, _ in module.named_buffers())}
    left_over = [name for name in inside if name not in kept]
    require_fit(f"{path} of the checkpoint", left_over=unknown(left_over))
    by_file: dict[str, list[str]] = defaultdict(list)
    for name in own:
        by_file[shards[prefix + name]].append(name)
    for file, names in by_file.items():
        local = file_of(file)
        if local is None:
            return False
        with safe_open(local, "pt") as tensors, torch.no_grad():
            for name in names:
                copy_into(own[name], tensors.get_tensor(prefix + name), prefix + name)
    return True


def copy_into(own: Tensor, stored: Tensor, name: str) -> None:
    """Copy a checkpoint's tensor, by its name there, into a model's.

    Raises:
        ModelError: it has another shape, or no numbers of the model's kind.
    """
    require_numbers("the checkpoint", {name: stored}, {name: own})
    if stored.shape != own.shape:
        size = f"{name} {tuple(stored.shape)} for {tuple(own.shape)}"
        require_fit("the checkpoint", sizes=[size])
    own.copy_(stored)


def _shards(file_of: Callable[[str], str | None]) -> dict[str, str]:
    """The file of each tensor of a checkpoint; {} where it is in no safetensors."""
    from safetensors import safe_open

    if (index := file_of(_INDEX)) is not None:
        return dict(json.loads(Path(index).read_text())["weight_map"])
    if (whole := file_of(_WHOLE)) is not None:
        with safe_open(whole, "pt") as tensors:
            return dict.fromkeys(tensors.keys(), _WHOLE)
    return {}


def _prefix(own: Mapping[str, Any], shards: Mapping[str, str], path: str) -> str | None:
    """The prefix of a module's names in a checkpoint; of several the one that ends like the
    module's path."""
    first = next(iter(own))
    found = [key.removesuffix(first) for key in shards if key.endswith(f".{first}")]
    found = [prefix for prefix in found if all(prefix + name in shards for name in own)]
    named = [
        prefix for prefix in found if f".{prefix}".endswith(f".{path.split('.')[-1]}.")
    ]
    fitting = named or found
    return fitting[0] if len(fitting) == 1 else None
