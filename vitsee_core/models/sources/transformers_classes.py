"""The classes of models that transformers has: which take images, and how one is made.

Of a larger model one tower is made alone, or with what leads to the language model, and its weights
are read alone.
"""

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
# Entries of a configuration with the number of frames that the model takes at once.
FRAMES = ("num_frames", "frames_per_clip")
# Entries that only models of clips have.
_CLIP_ENTRIES = (*FRAMES, "tubelet_size")
_USUAL_FRAMES = 16
_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_TEXT = "input_ids"


def library() -> Any:
    """Return the module transformers, without its warnings and progress bars.

    Raises:
        ModelError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("transformers", "transformers") from error
    untyped: Any = transformers
    untyped.logging.set_verbosity_error()
    untyped.logging.disable_progress_bar()
    return untyped


def class_names() -> list[str]:
    """Return the classes that transformers has a processor of images or of videos for, sorted."""
    auto: Any = library().models.auto
    class_of_type = auto.modeling_auto.MODEL_MAPPING_NAMES
    model_types = [*auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES]
    # The first releases of transformers 4 have no processors of videos.
    videos = getattr(auto, "video_processing_auto", None)
    model_types += [*getattr(videos, "VIDEO_PROCESSOR_MAPPING_NAMES", ())]
    names = set()
    for model_type in model_types:
        name = class_of_type.get(model_type)
        if isinstance(name, str):  # a tuple has classes for pieces of a model
            names.add(name)
    return sorted(names)


def backend(backend_name: str | None) -> dict[str, Any]:
    """Return the keyword that chooses a processor's backend, {} for the processor's default."""
    if backend_name is None:
        return {}
    if int(library().__version__.partition(".")[0]) < 5:
        return {"use_fast": backend_name == "torchvision"}
    return {"backend": backend_name}


def remote_class(name: str, repository: str, revision: str | None) -> Any:
    """Return a class of a repository's own code; that code runs."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(name, repository, revision=revision)


def check_input(model_class: Any, who: str, *, remote: bool) -> None:
    """Raise ModelError for a class that does not take a batch of images.

    Args:
        model_class: class of transformers, or of a repository.
        who: the model, as the message calls it.
        remote: whether code of the repository may run, whose `main_input_name` is often not set.
    """
    refuse_others(model_class, who)
    takes_images = model_class.main_input_name in (PIXELS, VIDEOS)
    takes_text = _TEXT in inspect.signature(model_class.forward).parameters
    is_unlabelled = remote and not takes_text
    if not takes_images and not is_unlabelled and not packed_inputs(model_class):
        raise ModelError(
            f"{who} takes {model_class.main_input_name}; expected a model of {PIXELS}: "
            "name its tower behind #, as in #vision_model"
        )


def clip_frames(module: nn.Module) -> int | None:
    """Return the number of frames of a clip; None for a model of images."""
    config = getattr(module, "config", None)
    entries = [getattr(config, key, None) for key in _CLIP_ENTRIES]
    takes_videos = getattr(module, "main_input_name", None) == VIDEOS
    if not takes_videos and all(value is None for value in entries):
        return None
    for key in FRAMES:
        n_frames = getattr(config, key, None)
        if isinstance(n_frames, int):
            return n_frames
    return _USUAL_FRAMES


def by_attention(make: Callable[[str], Any]) -> Any:
    """Return `make("sdpa")`, or `make("eager")` where the class has no such attention.

    Capture reads q, k, v of scaled_dot_product_attention where a model calls it.
    """
    try:
        return make("sdpa")
    except ValueError as error:
        if "scaled_dot_product" not in str(error):
            raise
        return make("eager")


def random_model(model_class: Any, config: Any) -> nn.Module:
    """Return a model with new weights, which torch's random state decides."""

    def make(attention: str) -> Any:
        """Return the model with one of the library's attention functions."""
        config._attn_implementation = attention
        return model_class(config)

    return by_attention(make)


def size_of(config: Any) -> tuple[int, int] | None:
    """Return the (rows, cols) in pixels that a configuration states, None where it states none."""
    size = getattr(config, "image_size", getattr(config, "crop_size", None))
    if isinstance(size, Mapping):
        size = size.get("height"), size.get("width")
    if isinstance(size, int):
        return size, size
    patch = getattr(config, "patch_size", None)
    n_patches = getattr(config, "num_patches", None)
    if size is None and isinstance(n_patches, int) and isinstance(patch, int):
        # SigLIP 2 NaFlex states the square grid of its positions alone.
        side = math.isqrt(n_patches) * patch
        return side, side
    if not isinstance(size, list | tuple) or len(size) != 2:
        return None
    rows, cols = size
    if isinstance(rows, int) and isinstance(cols, int):
        return rows, cols
    return None


# ------------------------------------------------------------ towers of a larger model


def towers(model: nn.Module) -> list[str]:
    """Return the paths of a model's modules that take images and no text; of those within one
    another the outermost."""
    paths: list[str] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{tower}.") for tower in paths)
        if path and not is_inside and hasattr(module, "config"):
            inputs = inspect.signature(module.forward).parameters
            takes_images = PIXELS in inputs or packed_inputs(module)
            if takes_images and _TEXT not in inputs:
                paths.append(path)
    return paths


def named_towers(class_name: str) -> list[str]:
    """Return `CLASS#PATH` of each tower of a class that takes images and text.

    The model is made without values from its default configuration. A class that takes images
    alone, that cannot be made so or that has no tower is returned as [class_name].
    """
    model_class: Any = getattr(library(), class_name)
    try:
        if _TEXT not in inspect.signature(model_class.forward).parameters:
            return [class_name]
        paths = towers(on_meta(model_class, model_class.config_class()))
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, KeyError):
        return [class_name]
    return [f"{class_name}#{path}" for path in paths] or [class_name]


def language_input_of(model_class: Any, name: str) -> Any:
    """Return a subclass of a model of images and text whose instances have no language model.

    `with_features` lets an instance compute the language model's input.

    Raises:
        ModelError: the class, of the model `name`, has no function for that input.
    """
    major_version = int(library().__version__.partition(".")[0])
    if not hasattr(model_class, FEATURES) or major_version < 5:
        raise ModelError(
            f"{name} asks for what a language model receives, and {model_class.__name__} "
            f"of transformers {library().__version__} has no {FEATURES} that says it; "
            "expected a model of images and text of transformers 5"
        )

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        """Make the model, then drop its language model."""
        model_class.__init__(self, *args, **kwargs)
        drop_language_model(self)

    members = {"__init__": init, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), members)


def random_language_input(model_class: Any, config: Any) -> nn.Module:
    """Return an instance of a class of `language_input_of` with new weights, which takes images."""

    def make(attention: str) -> Any:
        """Return the model with one of the library's attention functions."""
        # `from_pretrained` makes modules on the meta device and gives values to those that are
        # left, so that the language model never takes memory.
        return model_class.from_pretrained(
            None,
            config=config,
            state_dict={},
            dtype=torch.float32,
            attn_implementation=attention,
        )

    if torch.get_default_device().type == "meta":
        config._attn_implementation = "sdpa"
        module: nn.Module = model_class(config)
    else:
        module = by_attention(make)
    return with_features(module)


def with_features(module: nn.Module) -> nn.Module:
    """Let a module of `language_input_of` compute the language model's input, and return it."""
    # LLaVA's images are one each; classes with tiles are called in the same way.
    take_features(module, library().LlavaModel.get_image_features)
    return module


def on_meta(model_class: Any, config: Any) -> nn.Module:
    """Return the model on the meta device, without values."""
    with meta_device():
        module: nn.Module = model_class(config)
    return module


# ------------------------------------------------------------ weights of one tower alone


def read_parts(module: nn.Module, file_of: Callable[[str], str | None]) -> bool:
    """Read the weights of each of a module's children like `read_weights`, and the parameters that
    are the module's own.

    Returns:
        Whether all were read; if not, some may have been.
    """
    from safetensors import safe_open

    file_of_tensor = _tensor_files(file_of)
    for name, child in module.named_children():
        if child.state_dict() and not read_weights(child, file_of, name):
            return False
    for name, parameter in module.named_parameters(recurse=False):
        keys = [key for key in file_of_tensor if f".{key}".endswith(f".{name}")]
        if len(keys) != 1:
            return False
        key = keys[0]
        path = file_of(file_of_tensor[key])
        if path is None:
            return False
        with safe_open(path, "pt") as tensors, torch.no_grad():
            copy_into(parameter, tensors.get_tensor(key), key)
    return True


def read_weights(
    module: nn.Module, file_of: Callable[[str], str | None], path: str
) -> bool:
    """Read a module's weights from the safetensors of a larger model, tensor by tensor.

    Args:
        module: changed in place.
        file_of: returns the local path of a file of the checkpoint, None if there is none.
        path: the module's path in the larger model.

    Returns:
        Whether they were read; False, with nothing changed, where the checkpoint does not have them
        under the module's names.

    Raises:
        ModelError: a tensor does not fit, or tensors below the path are left over.
    """
    from safetensors import safe_open

    state = module.state_dict()
    file_of_tensor = _tensor_files(file_of)
    prefix = _find_prefix(state, file_of_tensor, path)
    if prefix is None:
        return False
    expected = {*state, *(name for name, _ in module.named_buffers())}
    left_over = []
    for key in file_of_tensor:
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name not in expected:
            left_over.append(name)
    require_fit(f"{path} of the checkpoint", left_over=unknown(left_over))
    # Each file is opened once.
    names_in_file: dict[str, list[str]] = defaultdict(list)
    for name in state:
        names_in_file[file_of_tensor[prefix + name]].append(name)
    for file, names in names_in_file.items():
        file_path = file_of(file)
        if file_path is None:
            return False
        with safe_open(file_path, "pt") as tensors, torch.no_grad():
            for name in names:
                key = prefix + name
                copy_into(state[name], tensors.get_tensor(key), key)
    return True


def copy_into(target: Tensor, stored: Tensor, name: str) -> None:
    """Copy a checkpoint's tensor into a model's.

    name: the tensor's name in the checkpoint, for messages.

    Raises:
        ModelError: it has another shape, or no numbers of the model's kind.
    """
    require_numbers("the checkpoint", {name: stored}, {name: target})
    if stored.shape != target.shape:
        size = f"{name} {tuple(stored.shape)} for {tuple(target.shape)}"
        require_fit("the checkpoint", sizes=[size])
    target.copy_(stored)


def _tensor_files(file_of: Callable[[str], str | None]) -> dict[str, str]:
    """Return tensor name -> file of a checkpoint; {} where it has no safetensors."""
    from safetensors import safe_open

    index_path = file_of(_INDEX_FILE)
    if index_path is not None:
        return dict(json.loads(Path(index_path).read_text())["weight_map"])
    path = file_of(_SINGLE_FILE)
    if path is not None:
        with safe_open(path, "pt") as tensors:
            return dict.fromkeys(tensors.keys(), _SINGLE_FILE)
    return {}


def _find_prefix(
    state: Mapping[str, Any], keys: Mapping[str, Any], path: str
) -> str | None:
    """Return what stands before a module's names in a checkpoint, None where none or several fit.

    Args:
        state: the module's tensors by name.
        keys: the checkpoint's tensors by name.
        path: the module's path in the larger model; of several prefixes the one counts that ends
            with its last word.
    """
    first_name = next(iter(state))
    prefixes = []
    for key in keys:
        if key.endswith(f".{first_name}"):
            prefix = key.removesuffix(first_name)
            if all(prefix + name in keys for name in state):
                prefixes.append(prefix)
    last_word = path.split(".")[-1]
    named_alike = [
        prefix for prefix in prefixes if f".{prefix}".endswith(f".{last_word}.")
    ]
    fitting = named_alike or prefixes
    return fitting[0] if len(fitting) == 1 else None
