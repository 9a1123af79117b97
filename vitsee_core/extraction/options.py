"""The options of an extraction, also those that stand in a model's name.

None means the default, or the value of the store that is continued.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsee_core.models.intervention_spec import parse
from vitsee_core.models.sources import has_parts
from vitsee_stores.errors import VitseeError
from vitsee_stores.url import Place

if TYPE_CHECKING:
    from vitsee_core.models.loaded import LoadedModel


class OptionError(VitseeError):
    """A value that is invalid for an option, whatever the model and the data."""

    exit_code = 2


ATTENTION_LEVELS = ("none", "summary", "rows", "full")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
DEFAULT_SITES = ("blocks", "head")
DEFAULT_SLAB = 256
CLIP_OPTIONS = ("frames", "every", "time")
NATIVE_OPTIONS = ("native", "min_pixels", "max_pixels")
INTERVENTIONS = ("replace", "ablate_heads", "block_attention", "registers")


@dataclass(frozen=True)
class ModelOptions:
    """The model, its weights, its input geometry, and the changes made to it.

    Attributes:
        name: as on the command line, without `?OPTION=VALUE`.
        checkpoint: file of weights; checkpoint_key names the entry that holds the state dict.
        weights_size: (height, width) of the input that the weights' position table is for.
        resample_patches: whether the patch embedding is resampled to another patch size.
        random_init: seed of untrained weights, None for trained ones.
        img_size: (height, width) of the input.
        img_mean: mean of each channel, as img_std, for the normalisation of pixels.
        crop_pct: share of the image's side that the crop keeps.
        transform: "timm" for timm's transform in place of a model's image processor.
        processor: library that runs the image processor.
        model_args: keyword arguments of the architecture.
        ablate_skip: blocks whose skip connection is cut.
        replace: as ablate_heads, block_attention and registers, a text for each intervention.
    """

    name: str
    checkpoint: Path | None = None
    checkpoint_key: str | None = None
    weights_size: tuple[int, int] | None = None
    resample_patches: bool = False
    random_init: int | None = None
    img_size: tuple[int, int] | None = None
    img_mean: tuple[float, ...] | None = None
    img_std: tuple[float, ...] | None = None
    crop_pct: float | None = None
    crop_mode: str | None = None
    fill: str | None = None
    transform: str | None = None
    processor: str | None = None
    trust_remote_code: bool = False
    model_args: dict[str, Any] = field(default_factory=dict)
    ablate_skip: tuple[str, ...] = ()
    replace: tuple[str, ...] = ()
    ablate_heads: tuple[str, ...] = ()
    block_attention: tuple[str, ...] = ()
    registers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the interventions.

        Raises:
            InterventionError: one of them cannot be parsed.
        """
        parse(*self.interventions.values())

    @property
    def interventions(self) -> dict[str, tuple[str, ...]]:
        """Option -> texts of the interventions that it requests."""
        return {name: getattr(self, name) for name in INTERVENTIONS}


@dataclass(frozen=True)
class DataOptions:
    """The images, their order, and how they reach the model.

    Attributes:
        data: folder, file or data set, as `--data` takes it.
        short_side: pixels of the short side on a canvas; `native` makes a canvas of images at
            native resolution. Without both every image is resized to the model's input.
        min_pixels: bound of native resolution, as max_pixels; None for that of the model's image
            processor.
        frames: frames of a clip, None for images or for the number that the model takes; every and
            time say which frames, in which order.
        exif: whether images are turned upright by their EXIF orientation.
    """

    data: str
    split: str | None = None
    images: int | None = None
    per_class: int | None = None
    seed: int | None = None
    order: str | None = None
    only: Path | None = None
    short_side: int | None = None
    multiple: int | None = None
    tiles: bool = False
    native: bool = False
    min_pixels: int | None = None
    max_pixels: int | None = None
    label_key: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    frames: int | None = None
    every: int | None = None
    time: str | None = None
    exif: bool | None = None

    @property
    def has_clip_options(self) -> bool:
        """Whether an option says that the data are clips."""
        return any(value is not None for value in (self.frames, self.every, self.time))

    def record(self) -> dict[str, Any]:
        """Return the options as a manifest records them.

        Options of clips, of native resolution and of EXIF orientation are recorded only where one
        is given: earlier versions had none of them.
        """
        absent: list[str] = []
        if not self.has_clip_options:
            absent += CLIP_OPTIONS
        if not self.native:
            absent += NATIVE_OPTIONS
        if not self.exif:
            absent.append("exif")
        return {key: value for key, value in asdict(self).items() if key not in absent}


@dataclass(frozen=True)
class KeepOptions:
    """The options that say what a store contains.

    None takes the default of a new store, or the value of an existing one; a field that is set must
    equal the existing store's.
    """

    sites: tuple[str, ...] | None = None
    tokens: tuple[str, ...] | None = None
    attention: str | None = None
    residual: bool | None = None
    inputs: bool | None = None
    grams: bool | None = None
    erf: int | None = None
    dtype: tuple[str, ...] | None = None
    codec: str | None = None
    slab: int | None = None
    precision: str | None = None
    head_weights: bool | None = None


@dataclass(frozen=True)
class RunOptions:
    """How this process works; nothing here changes the numbers in the store.

    Attributes:
        output: folder or URL of the store.
        batch_size: images per forward pass, None for the device's default.
        workers: processes that load images, None for the default.
        shard: which slabs this process makes, "I/N", "slurm" or "claims"; None for all.
        on_error: what becomes of an unreadable image: "nan" or "fail".
        force: whether an existing store is replaced.
        command: the command line, for the store's record.
    """

    output: Place
    batch_size: int | None = None
    device: str = "auto"
    workers: int | None = None
    shard: str | None = None
    on_error: str = "nan"
    force: bool = False
    dry_run: bool = False
    command: str = ""


@dataclass(frozen=True)
class Request:
    """All options of one `extract` call; an already loaded model comes from Python callers."""

    model: ModelOptions | LoadedModel
    data: DataOptions
    keep: KeepOptions
    run: RunOptions


def split_model(text: str) -> tuple[str, dict[str, list[str]]]:
    """Split `NAME?OPTION=VALUE&OPTION=VALUE` into the name and option -> values.

    `#PART` chooses a part of a model. It belongs to the name, and may also stand behind the
    options.

    Raises:
        OptionError: no name, or something after `?` that is not OPTION=VALUE.
    """
    name, mark, query = text.partition("?")
    if "#" in query and has_parts(name):
        query, _, part = query.rpartition("#")
        name = f"{name}#{part}"
        mark = query  # nothing but the part behind `?` is a model without options
    assignments = query.split("&") if mark else []
    options: dict[str, list[str]] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not (name and key and equals and value):
            raise OptionError(
                f"{text!r}; expected MODEL?OPTION=VALUE, further ones after &, as in "
                "vit_small_patch16_224?random-init=0&img-size=384"
            )
        options.setdefault(key, []).append(value)
    return name, options


def parse_tokens(texts: Sequence[str] | None) -> tuple[str, dict[str, str]]:
    """Parse `--tokens` values into (default, selector -> "all" or "pooled").

    Raises:
        OptionError: not one of all, pooled, GROUP=all, GROUP=pooled; or two for the same sites.
    """
    expected = "all, pooled, or GROUP=pooled (as norms=pooled)"
    return _by_selector("--tokens", texts, values=("all", "pooled"), expected=expected)


def parse_dtypes(texts: Sequence[str] | None) -> tuple[str, dict[str, str]]:
    """Parse `--dtype` values into (default, selector -> dtype).

    Raises:
        OptionError: not one of float16, float32, SITE=float16, SITE=float32; or two for the same
            sites.
    """
    expected = "float16, float32, or SITE=float32 (Zarr has no bfloat16)"
    return _by_selector(
        "--dtype", texts, values=("float16", "float32"), expected=expected
    )


def _by_selector(
    option: str, texts: Sequence[str] | None, *, values: Sequence[str], expected: str
) -> tuple[str, dict[str, str]]:
    """Parse `VALUE` and `SELECTOR=VALUE` texts of an option.

    Args:
        option: the option, for the error line.
        texts: the texts.
        values: the values that the option takes, its default first.
        expected: the values in words, for the error line.

    Returns:
        The value without a selector, or the default; and selector -> value.

    Raises:
        OptionError: another value, or two for one selector.
    """
    value_by_selector: dict[str, str] = {}
    for text in texts or ():
        selector, equals, value = text.rpartition("=")
        if value not in values or (equals and not selector):
            raise OptionError(f"{option} is {text!r}; expected {expected}")
        previous = value_by_selector.setdefault(selector, value)
        if previous != value:
            whose = f"for {selector}" if selector else "for all sites"
            raise OptionError(
                f"{option} is both {previous} and {value} {whose}; give one of them, and "
                f"{option} GROUP={value} where only some sites are meant"
            )
    default = value_by_selector.pop("", values[0])
    return default, value_by_selector


# ---------------- `MODEL?OPTION=VALUE` of Python callers; click parses it for the command


def options_in_name(text: str) -> tuple[str, dict[str, Any]]:
    """Split a model's name from its options, as fields of `ModelOptions`.

    Raises:
        OptionError: no such option, a value that it does not take, or several of one that takes
            one.
    """
    name, options = split_model(text)
    fields: dict[str, Any] = {}
    for key, values in options.items():
        if key not in _PARSERS:
            raise OptionError(
                f"{text!r}: no option {key!r} of a model; expected {', '.join(_PARSERS)}"
            )
        field_name, parse_value = _PARSERS[key]
        try:
            parsed = [parse_value(value) for value in values]
        except (KeyError, ValueError):
            raise OptionError(
                f"{text!r}: {key} is {values[-1]!r}; expected {_EXPECTED}"
            ) from None
        if key == "model-arg":
            fields[field_name] = dict(parsed)
        elif field_name in ("ablate_skip", *INTERVENTIONS):
            fields[field_name] = tuple(parsed)
        elif len(parsed) > 1:
            raise OptionError(f"{text!r}: {key} takes one value")
        else:
            fields[field_name] = parsed[0]
    return name, fields


def _parse_size(text: str) -> tuple[int, int]:
    """Parse `384` or `384x224` into (height, width); raise ValueError for another text."""
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)
    if match is None:
        raise ValueError(text)
    height, width = match.groups()
    return int(height), int(width or height)


def _parse_argument(text: str) -> tuple[str, Any]:
    """Parse `NAME=VALUE`, the value as JSON if it is JSON; raise ValueError without a name."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(text)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _parse_flag(text: str) -> bool:
    """Parse `true` or `false`; raise KeyError for another text."""
    return {"true": True, "false": False}[text]


def _parse_channels(text: str) -> tuple[float, ...]:
    """Parse one number per channel, separated by commas."""
    return tuple(float(number) for number in text.split(","))


_EXPECTED = "what the option takes on the command line"
# Option -> field of `ModelOptions`, and the function that parses its value.
_PARSERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "checkpoint": ("checkpoint", Path),
    "checkpoint-key": ("checkpoint_key", str),
    "weights-size": ("weights_size", _parse_size),
    "resample-patches": ("resample_patches", _parse_flag),
    "random-init": ("random_init", int),
    "img-size": ("img_size", _parse_size),
    "img-mean": ("img_mean", _parse_channels),
    "img-std": ("img_std", _parse_channels),
    "crop-pct": ("crop_pct", float),
    "crop-mode": ("crop_mode", str),
    "fill": ("fill", str),
    "transform": ("transform", str),
    "processor": ("processor", str),
    "trust-remote-code": ("trust_remote_code", _parse_flag),
    "model-arg": ("model_args", _parse_argument),
    "ablate-skip": ("ablate_skip", str),
    **{name.replace("_", "-"): (name, str) for name in INTERVENTIONS},
}
