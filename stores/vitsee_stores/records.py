"""Types of the descriptive fields of a manifest."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from vitsee_stores.json_schema import Fields, flag, integer, items, number, text, unexpected

Check = Callable[[Any, str], object]

MOST = 1 << 62


def _digest(value: Any, where: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", text(value, where)):
        raise unexpected(where, value, "64 hexadecimal digits")
    return str(value)


def _any(value: Any, where: str) -> object:
    return value


_count: Check = partial(integer, low=0, high=MOST)
_integer: Check = partial(integer, low=-MOST, high=MOST)
_real: Check = partial(number, low=-1e30, high=1e30)
_texts: Check = partial(items, item=text)
_counts: Check = partial(items, item=_count)
_reals: Check = partial(items, item=_real)


def _texts_by_name(value: Any, where: str) -> object:
    return [text(item, f"{where}.{key}") for key, item in Fields(value, where).value.items()]


# Every field may be absent or null; those that are not named here may be anything.
RECORDS: dict[str, dict[str, Check]] = {
    "identity": {
        "model": Fields,
        "weights": text,
        "ablate_skip": _texts,
        "interventions": _texts,
        "transform": Fields,
        "n_images": _count,
        "seed": _integer,
        "order": text,
        "slab": _count,
        "codec": text,
        "attention": text,
        "residual": flag,
        "inputs": flag,
        "grams": flag,
        "erf": _count,
        "precision": text,
        "tokens": Fields,
        "dtype": Fields,
    },
    "model": {
        "name": text,
        "architecture": text,
        "args": Fields,
        "input_size": _counts,
        "n_params": _count,
        "weights": Fields,
        "ablate_skip": _texts,
        "interventions": _texts,
    },
    "transform": {
        "input_size": _counts,
        "interpolation": text,
        "crop_mode": text,
        "crop_pct": _real,
        "crop_border_pixels": _count,
        "fill": text,
        "short_side": _count,
        "multiple": _count,
        "processor": text,
        "mean": _reals,
        "std": _reals,
    },
    "selfcheck": {},
    "left_out": {},
    "info": {
        "data": Fields,
        "data_folder": text,
        "checkpoint": text,
        "command": _any,
        "versions": _texts_by_name,
        "selection": Fields,
        "first_images_sha256": text,
        "input_weights": Fields,
    },
}


def check_records(manifest: Fields) -> None:
    """Check the types that readers rely on in the descriptive parts.

    Raises:
        ValueError: names the field, what it is and what was expected.
    """
    _digest(manifest.get("store_id"), "store_id")
    _digest(manifest.get("samples_fingerprint"), "samples_fingerprint")
    for part, checks in RECORDS.items():
        fields = manifest.object(part)
        for key, check in checks.items():
            if key in fields:
                check(fields.value[key], fields.place(key))
    _texts_by_name(manifest.get("left_out"), "left_out")
    weights = manifest.object("model").value.get("weights")
    if weights is not None:
        fields = Fields(weights, "model.weights")
        for key in ("missing", "unexpected", "other_keys"):
            if key in fields:
                fields.list(key, text)
