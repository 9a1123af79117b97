"""`extract` for Python: the command's options as keywords, and a caller's own torch module."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from vitsee_core.extraction.by_workers import extract_by_workers
from vitsee_core.extraction.options import (
    ATTENTION_LEVELS,
    INTERVENTIONS,
    PRECISIONS,
    DataOptions,
    KeepOptions,
    ModelOptions,
    OptionError,
    Request,
    RunOptions,
    options_in_name,
)
from vitsee_core.extraction.outcome import Outcome
from vitsee_core.extraction.run import extract as fill_store
from vitsee_core.extraction.run import log
from vitsee_core.extraction.sharding import parse_shard
from vitsee_core.images.loading import ON_ERROR
from vitsee_core.images.transform import CROP_MODES, FILLS
from vitsee_core.models.intervention_spec import parse
from vitsee_core.models.load import model_from_module
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.sources.base import BACKENDS, OWN_TRANSFORM
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_core.runtime.streaming import Map
from vitsee_stores import Store, open_store
from vitsee_stores.layout import CODECS
from vitsee_stores.plan import TIMES
from vitsee_stores.url import parse_place

# What options of Python callers must be; click checks those of the command.
_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "attention": ATTENTION_LEVELS,
    "precision": PRECISIONS,
    "codec": CODECS,
    "on_error": ON_ERROR,
    "time": TIMES,
    "crop_mode": CROP_MODES,
    "fill": FILLS,
    "processor": BACKENDS,
    "trust_remote_code": (True, False),
    "resample_patches": (True, False),
    "exif": (True, False),
}
_TEXT_LISTS = ("sites", "tokens", "dtype", "ablate_skip", *INTERVENTIONS)
_COUNTS = (
    "images",
    "per_class",
    "slab",
    "batch_size",
    "erf",
    "short_side",
    "multiple",
    "frames",
    "every",
    "min_pixels",
    "max_pixels",
)
_SIZES = ("img_size", "weights_size")
_PER_CHANNEL = ("img_mean", "img_std")

# Fields of the options that `extract` sets from its own parameters.
_SET_HERE = ("name", "data", "output", "command", "dry_run")
# Options of a model that a torch module has no use for: its caller made it so.
_ANY_MODEL = ("name", "ablate_skip", *INTERVENTIONS)
_NAMED_MODEL_ONLY = tuple(
    field.name for field in fields(ModelOptions) if field.name not in _ANY_MODEL
)


def extract(
    model: str | nn.Module | LoadedModel,
    data: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    transform: Any = None,
    name: str | None = None,
    map: Map | None = None,
    progress: Progress = SILENT,
    **options: Any,
) -> Store:
    """Run a model over images into a store, or resume that, and return the opened store.

        vitsee.extract("vit_base_patch16_224", "photos", "b16.zarr", images=500, sites="blocks")
        vitsee.extract(my_module, "photos", "mine.zarr", transform=my_transform, name="mine")

    Args:
        model: a name as the command takes it, `NAME?random-init=0` too, or a torch module, which is
            copied: its sites are found as those of timm's models are; or one that is loaded.
        data: as the command's --data.
        output: the store to fill, a folder or a URL.
        transform: for a torch module how its images are prepared: a dictionary, or transforms of
            torchvision; a module of timm's needs none. For a name "timm", which is vitsee's own in
            place of an image processor of transformers.
        name: what tables call a torch module.
        map: from `dask_map`, whose workers make the slabs of a model that they load by its name.
        progress: advanced by the images done, e.g. a bar.
        options: those of `vitsee extract`, with `_`: images, per_class, only, split, seed, order,
            short_side, multiple, tiles, native, min_pixels, max_pixels, frames, every, time,
            exif, label_key, image_column, label_column, sites, tokens, attention, residual, inputs,
            grams, erf, head_weights, dtype, codec, slab, precision, batch_size, device,
            workers, shard, on_error, force, ablate_skip, replace, ablate_heads,
            block_attention, registers;
            of a name also checkpoint, checkpoint_key, weights_size, resample_patches,
            random_init, img_size, img_mean, img_std, crop_pct, crop_mode, fill, processor,
            trust_remote_code, model_args.

    Returns:
        The store. With `shard`, while others have slabs to do, only what is there so far.

    Raises:
        OptionError: an option that does not exist, or a value that it does not take.
        VitseeError: as the command's line on stderr; committed slabs are kept.

    Examples:
        >>> import vitsee
        >>> store = vitsee.extract("demo:vit", "demo:test", "few.zarr", images=8, sites="blocks")
        >>> store.acts("blocks.-1.out").shape
        (8, 65, 96)
    """
    if isinstance(model, str) and "?" in model:
        model, options_of_name = options_in_name(model)
        options = {**options_of_name, **options}
    values = check_options(options)
    if map is not None and not isinstance(model, str):
        raise OptionError(
            "the workers of a map load models by their names; give no torch module"
        )
    if map is not None and "shard" in values:
        raise OptionError("a map's workers are given their slabs; leave out shard")

    source: ModelOptions | LoadedModel
    if isinstance(model, str):
        if transform not in (None, OWN_TRANSFORM) or name is not None:
            raise OptionError(
                "transform and name belong to a torch module, not to a model's name"
            )
        if transform is not None:
            values["transform"] = transform
        source = ModelOptions(model, **_fields_of(ModelOptions, values))
    elif isinstance(model, LoadedModel):
        source = model
    else:
        source = load_module(model, transform, name, values)

    shard = parse_shard(values.get("shard"), os.environ)
    request = Request(
        model=source,
        data=DataOptions(_data_name(data), **_fields_of(DataOptions, values)),
        keep=KeepOptions(**_fields_of(KeepOptions, values)),
        run=RunOptions(
            output=parse_place(output),
            command="vitsee.extract",
            **_fields_of(RunOptions, values),
        ),
    )
    if map is not None:
        outcome = extract_by_workers(request, map, progress)
    else:
        outcome = fill_store(request, shard, progress)
    _log_outcome(outcome)
    store = open_store(request.run.output, allow_partial=not outcome.complete)
    # The command lists what is left out before it begins: here a module is new to vitsee.
    if isinstance(source, LoadedModel) and store.manifest.left_out:
        reasons = [f"{name}: {why}" for name, why in store.manifest.left_out.items()]
        log.warning("%s lacks %s", source.name, "; ".join(reasons))
    return store


def _log_outcome(outcome: Outcome) -> None:
    """Log what was done to images, and which could not be read."""
    for line in outcome.remark_lines():
        log.warning("%s", line)
    unreadable_line = outcome.unreadable_line()
    if unreadable_line:
        log.warning("%s", unreadable_line)


def _data_name(data: object) -> str:
    """Return the name of a data set as text.

    Raises:
        DataError: it is a data set itself, or an object that is not a name.
    """
    from vitsee_core.images import DataError
    from vitsee_core.images.sources.libraries import refuse_iterable

    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    kind = f"data of the type {type(data).__name__}"
    if hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise refuse_iterable(kind)
    raise DataError(f"{kind} has no name; expected what --data takes, as text")


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the types of their fields, without those that are None.

    Raises:
        OptionError: an unknown option, or a value that it does not take.
    """
    names: list[str] = []
    for kind in [ModelOptions, DataOptions, KeepOptions, RunOptions]:
        names += [field.name for field in fields(kind) if field.name not in _SET_HERE]
    for key in options:
        if key not in names:
            hint = f"options: {', '.join(names)}"
            near = difflib.get_close_matches(key, names, n=2)
            if near:
                hint = f"did you mean {' or '.join(near)}?"
            raise OptionError(f"no option {key!r} of extract; {hint}")
    return {
        key: _check_value(key, value)
        for key, value in options.items()
        if value is not None
    }


def load_module(
    module: nn.Module,
    transform: Any,
    name: str | None,
    values: Mapping[str, Any],
    *,
    copied: bool = False,
) -> LoadedModel:
    """Return a torch module as a model.

    Args:
        module: the module, which is copied.
        transform: how images are prepared, None for a module of timm's.
        name: what tables call it, None for its timm name or its class.
        values: options, as `check_options` returns them.
        copied: whether the module is a copy already, on the CPU, which may be changed.

    Raises:
        OptionError: options of a model's name.
        VitseeError: the module cannot be copied, or its transform cannot be read.
    """
    from vitsee_core.images.torch_transforms import transform_config

    for key in _NAMED_MODEL_ONLY:
        if key in values:
            raise OptionError(
                f"{key} belongs to a model's name; a torch module is taken as it is, and its "
                "transform says how images are prepared"
            )
    config = None if transform is None else transform_config(transform)
    intervention_texts = [values.get(key, ()) for key in INTERVENTIONS]
    return model_from_module(
        module,
        config,
        name=name,
        ablate_skip=values.get("ablate_skip", ()),
        interventions=parse(*intervention_texts),
        frames=values.get("frames"),
        copied=copied,
    )


def _check_value(key: str, value: Any) -> Any:
    """Return an option's value with the type of its field.

    Raises:
        OptionError: a value that the option does not take.
    """
    expected: str | None = None
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            expected = ", ".join(_CHOICES[key])
    elif key in _TEXT_LISTS:
        value = (value,) if isinstance(value, str) else tuple(value)
        if not all(isinstance(text, str) for text in value):
            expected = "texts"
    elif key in _COUNTS:
        # `type`, as True is an int, too.
        if type(value) is not int or value < 1:
            expected = "a whole number above 0"
    elif key in ("checkpoint", "only"):
        value = Path(value)
    elif key in _SIZES:
        value = (value, value) if isinstance(value, int) else tuple(value)
    elif key in _PER_CHANNEL:
        value = (value,) if isinstance(value, float | int) else tuple(value)
    if expected is not None:
        raise OptionError(f"{key} is {value!r}; expected {expected}")
    return value


def _fields_of(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of `kind`, without those that `extract` sets itself."""
    names = {field.name for field in fields(kind)} - set(_SET_HERE)
    return {key: value for key, value in values.items() if key in names}
