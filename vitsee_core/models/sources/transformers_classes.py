"""The classes of models that transformers has: which take images, and how one is made."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.packing import packed_inputs
from vitsee_core.models.sources.errors import missing_extra
from vitsee_core.models.sources.transformers_inputs import refuse_others

PIXELS = "pixel_values"
VIDEOS = "pixel_values_videos"
# In a configuration these say that the model takes several frames at once, and how many.
FRAMES = ("num_frames", "frames_per_clip")
_OF_VIDEOS = (*FRAMES, "tubelet_size")
_USUAL_FRAMES = 16


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
    videos = getattr(auto, "video_processing_auto", None)  # transformers 4 has none at first
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


def check_input(kind: Any, config: Any, who: str, *, remote: bool) -> None:
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
    patch, n_patches = getattr(config, "patch_size", None), getattr(config, "num_patches", None)
    if size is None and isinstance(n_patches, int) and isinstance(patch, int):
        return math.isqrt(n_patches) * patch, math.isqrt(n_patches) * patch  # of its positions
    if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(n, int) for n in size):
        return size[0], size[1]
    return None
