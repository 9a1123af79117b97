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
_SEVERAL = ("sites", "tokens", "dtype", "ablate_skip", *INTERVENTIONS)
_COUNTS = (
    *("images", "per_class", "slab", "batch_size", "erf", "short_side", "multiple"),
    *("frames", "every", "min_pixels", "max_pixels"),
)
_OF_ANY = ("name", "ablate_skip", *INTERVENTIONS)
_OF_A_NAME = tuple(f.name for f in fields(ModelOptions) if f.name not in _OF_ANY)
_PLACED = ("name", "data", "output", "command", "dry_run")


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
    """Run a model over images into a store, or resume that; the store, opened.

        vitsee.extract("vit_base_patch16_224", "photos", "b16.zarr", images=500, sites="blocks")
        vitsee.extract(my_module, "photos", "mine.zarr", transform=my_transform, name="mine")

    Args:
        model: a name as the command takes it, `NAME?random-init=0` too, or a torch module, which is
            copied: its sites are found as those of timm's models are; or one that is loaded.
        data: as the command's --data.
        output: the store to fill, a folder or a URL.
        transform: of a torch module, see `transform_config`; a module of timm's needs none. Of a
            name "timm", for vitsee's own in place of an image processor of transformers.
        name: of a torch module, what tables call it.
        map: of `dask_map`, whose workers make the slabs of a model that they can load by its name.
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
        model, named = options_in_name(model)
        options = {**named, **options}
    values = check_options(options)
    if map is not None and not isinstance(model, str):
        raise OptionError(
            "the workers of a map load models by their names; give no torch module"
        )
    if map is not None and "shard" in values:
        raise OptionError("a map's workers are given their slabs; leave out shard")
    if isinstance(model, str):
        if transform not in (None, OWN_TRANSFORM) or name is not None:
            raise OptionError(
                "transform and name belong to a torch module, not to a model's name"
            )
        values |= {} if transform is None else {"transform": transform}
        source: ModelOptions | LoadedModel = ModelOptions(
            model, **_taken(ModelOptions, values)
        )
    elif isinstance(model, LoadedModel):
        source = model
    else:
        source = loaded(model, transform, name, values)
    shard = parse_shard(values.get("shard"), os.environ)
    run = RunOptions(
        output=parse_place(output), command="vitsee.extract", **_taken(RunOptions, values)
    )
    what = DataOptions(_name_of(data), **_taken(DataOptions, values))
    asked = Request(source, what, KeepOptions(**_taken(KeepOptions, values)), run)
    if map is not None:
        outcome = extract_by_workers(asked, map, progress)
    else:
        outcome = fill_store(asked, shard, progress)
    for line in outcome.remark_lines():
        log.warning("%s", line)
    if line := outcome.unreadable_line():
        log.warning("%s", line)
    store = open_store(run.output, allow_partial=not outcome.complete)
    if isinstance(source, LoadedModel) and store.manifest.left_out:
        lacks = "; ".join(
            f"{what}: {why}" for what, why in store.manifest.left_out.items()
        )
        log.warning("%s lacks %s", source.name, lacks)
    return store


def _name_of(data: object) -> str:
    """Raises DataError: it is not the name of a data set."""
    from vitsee_core.images import DataError
    from vitsee_core.images.sources.libraries import refuse_iterable

    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    kind = f"data of the type {type(data).__name__}"
    if hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise refuse_iterable(kind)
    raise DataError(f"{kind} has no name; expected what --data takes, as text")


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options in the form of their fields, without those that are None. Raises OptionError: an
    unknown option, or a value that it does not take."""
    kinds = (ModelOptions, DataOptions, KeepOptions, RunOptions)
    names = [f.name for kind in kinds for f in fields(kind) if f.name not in _PLACED]
    for key in options:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=2)
            hint = (
                f"did you mean {' or '.join(near)}?"
                if near
                else f"options: {', '.join(names)}"
            )
            raise OptionError(f"no option {key!r} of extract; {hint}")
    return {
        key: _checked(key, value) for key, value in options.items() if value is not None
    }


def loaded(
    module: nn.Module,
    transform: Any,
    name: str | None,
    values: Mapping[str, Any],
    *,
    copied: bool = False,
) -> LoadedModel:
    """Return a torch module as a model. values: options in the form of their fields; copied: as for
    `model_from_module`. Raises VitseeError: it cannot be copied, or its transform cannot be read;
    options of a model's name."""
    from vitsee_core.images.torch_transforms import transform_config

    if given := [key for key in _OF_A_NAME if key in values]:
        raise OptionError(
            f"{given[0]} belongs to a model's name; a torch module is taken as it is, and its "
            "transform says how images are prepared"
        )
    config = None if transform is None else transform_config(transform)
    return model_from_module(
        module,
        config,
        name=name,
        ablate_skip=values.get("ablate_skip", ()),
        interventions=parse(*(values.get(key, ()) for key in INTERVENTIONS)),
        frames=values.get("frames"),
        copied=copied,
    )


def _checked(key: str, value: Any) -> Any:
    """A value in the form of the options' fields. Raises OptionError: a value that the option does
    not take."""
    expected: str | None = None
    if key in _CHOICES and value not in _CHOICES[key]:
        expected = ", ".join(_CHOICES[key])
    elif key in _SEVERAL:
        value = (value,) if isinstance(value, str) else tuple(value)
        expected = None if all(isinstance(text, str) for text in value) else "texts"
    elif key in _COUNTS and (type(value) is not int or value < 1):
        expected = "a whole number above 0"
    elif key in ("checkpoint", "only"):
        value = Path(value)
    elif key in ("img_size", "weights_size"):
        value = (value, value) if isinstance(value, int) else tuple(value)
    elif key in ("img_mean", "img_std"):
        value = (value,) if isinstance(value, float | int) else tuple(value)
    if expected is not None:
        raise OptionError(f"{key} is {value!r}; expected {expected}")
    return value


def _taken(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The `values` that are fields of `kind`, without those that the caller sets."""
    names = {f.name for f in fields(kind)} - set(_PLACED)
    return {key: value for key, value in values.items() if key in names}
