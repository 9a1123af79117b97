"""The options of an extraction, also those that stand in a model's name. None means the default, or
the value of the store."""

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
INTERVENTIONS = ("replace", "ablate_heads", "block_attention", "registers")


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and with which weights and input geometry."""

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
        """Raises:
        InterventionError: one of the last four cannot be read.
        """
        parse(*self.interventions.values())

    @property
    def interventions(self) -> dict[str, tuple[str, ...]]:
        """The texts of what is changed while the model runs, by option."""
        return {name: getattr(self, name) for name in INTERVENTIONS}


@dataclass(frozen=True)
class DataOptions:
    """Which images, in which order, and on what canvas (short_side, or native: None and False for
    none); min_pixels, max_pixels: the bounds of native resolution, None for those of the model's
    image processor; frames, every and time: how frames are taken of clips, None for images or for
    the model's own number; exif: whether images are turned upright by their EXIF orientation."""

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
    def of_clips(self) -> bool:
        """Whether an option says that the data are clips."""
        return any(value is not None for value in (self.frames, self.every, self.time))

    def record(self) -> dict[str, Any]:
        """The options as a manifest has them; without those of clips, of native resolution, or of
        EXIF orientation, where none is given."""
        absent = (() if self.of_clips else OF_CLIPS) + (() if self.native else OF_NATIVE)
        absent += () if self.exif else ("exif",)
        return {key: value for key, value in asdict(self).items() if key not in absent}


OF_CLIPS = ("frames", "every", "time")
OF_NATIVE = ("native", "min_pixels", "max_pixels")


@dataclass(frozen=True)
class KeepOptions:
    """The options that say what a store keeps. None takes the default of a new store, or the value
    of an existing one; a field that is set must equal the existing store's."""

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
    """How this process works; nothing here changes the numbers in the store."""

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
    """`NAME?OPTION=VALUE&OPTION=VALUE` as the name and the values of each option; `#PART` may stand
    behind the name or behind the options, and belongs to the name. Raises OptionError: no name, or
    something after `?` that is not OPTION=VALUE."""
    name, mark, rest = text.partition("?")
    if "#" in rest and has_parts(name):
        rest, sign, part = rest.rpartition("#")
        name = f"{name}{sign}{part}"
        mark = rest
    options: dict[str, list[str]] = {}
    for part in rest.split("&") if mark else ():
        key, equals, value = part.partition("=")
        if not (name and key and equals and value):
            raise OptionError(
                f"{text!r}; expected MODEL?OPTION=VALUE, further ones after &, as in "
                "vit_small_patch16_224?random-init=0&img-size=384"
            )
        options.setdefault(key, []).append(value)
    return name, options


def parse_tokens(texts: Sequence[str] | None) -> tuple[str, dict[str, str]]:
    """`--tokens` values as (default, {selector: "all" | "pooled"}). Raises OptionError: not one of
    all, pooled, GROUP=all, GROUP=pooled; two for the same."""
    expected = "all, pooled, or GROUP=pooled (as norms=pooled)"
    return _by_selector("--tokens", texts, ("all", "pooled"), expected)


def parse_dtypes(texts: Sequence[str] | None) -> tuple[str, dict[str, str]]:
    """`--dtype` values as (default, {selector: dtype}). Raises OptionError: not one of float16,
    float32, SITE=float16, SITE=float32; two for the same."""
    expected = "float16, float32, or SITE=float32 (Zarr has no bfloat16)"
    return _by_selector("--dtype", texts, ("float16", "float32"), expected)


def _by_selector(
    option: str, texts: Sequence[str] | None, values: Sequence[str], expected: str
) -> tuple[str, dict[str, str]]:
    """(the plain value or the first allowed one, {selector: value})."""
    chosen: dict[str, str] = {}
    for text in texts or ():
        selector, equals, value = text.rpartition("=")
        if value not in values or (equals and not selector):
            raise OptionError(f"{option} is {text!r}; expected {expected}")
        if chosen.setdefault(selector, value) != value:
            whose = f"for {selector}" if selector else "for all sites"
            raise OptionError(
                f"{option} is both {chosen[selector]} and {value} {whose}; give one of them, and "
                f"{option} GROUP={value} where only some sites are meant"
            )
    return chosen.pop("", values[0]), chosen


# ---------------- `MODEL?OPTION=VALUE`: where click does not read them


def options_in_name(text: str) -> tuple[str, dict[str, Any]]:
    """The model's name, and its options as fields of `ModelOptions`. Raises OptionError: no such
    option, a value that it does not take, or several of one that takes one."""
    name, options = split_model(text)
    found: dict[str, Any] = {}
    for key, values in options.items():
        if key not in _READ:
            raise OptionError(
                f"{text!r}: no option {key!r} of a model; expected {', '.join(_READ)}"
            )
        field, read = _READ[key]
        try:
            parsed = [read(value) for value in values]
        except (KeyError, ValueError):
            raise OptionError(
                f"{text!r}: {key} is {values[-1]!r}; expected {_EXPECTED}"
            ) from None
        if key == "model-arg":
            found[field] = dict(parsed)
        elif field in ("ablate_skip", *INTERVENTIONS):
            found[field] = tuple(parsed)
        elif len(parsed) > 1:
            raise OptionError(f"{text!r}: {key} takes one value")
        else:
            found[field] = parsed[0]
    return name, found


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)
    if match is None:
        raise ValueError(text)
    return int(match[1]), int(match[2] or match[1])


def _argument(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key.isidentifier():
        raise ValueError(text)
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


_EXPECTED = "what the option takes on the command line"
_READ: dict[str, tuple[str, Callable[[str], Any]]] = {
    "checkpoint": ("checkpoint", Path),
    "checkpoint-key": ("checkpoint_key", str),
    "weights-size": ("weights_size", _size),
    "resample-patches": ("resample_patches", {"true": True, "false": False}.__getitem__),
    "random-init": ("random_init", int),
    "img-size": ("img_size", _size),
    "img-mean": ("img_mean", lambda text: tuple(map(float, text.split(",")))),
    "img-std": ("img_std", lambda text: tuple(map(float, text.split(",")))),
    "crop-pct": ("crop_pct", float),
    "crop-mode": ("crop_mode", str),
    "fill": ("fill", str),
    "transform": ("transform", str),
    "processor": ("processor", str),
    "trust-remote-code": (
        "trust_remote_code",
        {"true": True, "false": False}.__getitem__,
    ),
    "model-arg": ("model_args", _argument),
    "ablate-skip": ("ablate_skip", str),
    **{name.replace("_", "-"): (name, str) for name in INTERVENTIONS},
}
