"""`MODEL?OPTION=VALUE`: options of a model in its name, where click does not read them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitsee_core.extraction.options import INTERVENTIONS, OptionError, split_model


def options_in_name(text: str) -> tuple[str, dict[str, Any]]:
    """The model's name, and its options as fields of `ModelOptions`.

    Raises:
        OptionError: no such option, a value that it does not take, or several of one that takes
            one.
    """
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
            raise OptionError(f"{text!r}: {key} is {values[-1]!r}; expected {_EXPECTED}") from None
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


def _floats(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text]


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
    "random-init": ("random_init", int),
    "img-size": ("img_size", _size),
    "img-mean": ("img_mean", _floats),
    "img-std": ("img_std", _floats),
    "crop-pct": ("crop_pct", float),
    "crop-mode": ("crop_mode", str),
    "fill": ("fill", str),
    "transform": ("transform", str),
    "processor": ("processor", str),
    "trust-remote-code": ("trust_remote_code", _flag),
    "model-arg": ("model_args", _argument),
    "ablate-skip": ("ablate_skip", str),
    **{name.replace("_", "-"): (name, str) for name in INTERVENTIONS},
}
