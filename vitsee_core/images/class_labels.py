"""Class numbers and names from what data sets write for a label."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.errors import DataError

log = logging.getLogger(__name__)

MISSING = frozenset(
    ("nan", "<na>")
)  # as pandas and NumPy write a label that is not there
NO_LABELS = "none"  # of --label-key and --label-column
_SEPARATORS = ";|"  # between several classes of one image
_LARGEST_LABEL = 2**62
_SHOWN = 60


def natural_key(text: str) -> tuple[list[int | str], str]:
    """Sorts digits by their value and letters without case; ties by code point."""
    pieces = re.split(r"([0-9]+)", text.lower())
    return [int(p) if k % 2 else p for k, p in enumerate(pieces)], text


def number(names: Sequence[str]) -> tuple[NDArray[np.int64], list[str] | None]:
    """Labels for class names, "" being none (-1), and the names in natural order (None if none)."""
    class_names = sorted({name for name in names if name}, key=natural_key)
    code = {name: k for k, name in enumerate(class_names)}
    labels = np.array([code.get(name, -1) for name in names], np.int64)
    return labels, class_names or None


def class_labels(values: Sequence[str]) -> tuple[NDArray[np.int64], list[str] | None]:
    """Labels for what users write: class numbers (3, or 3.0), or names where any is none; "" is
    none (-1), and so is `nan`, which is logged. The names are None if all are numbers. Raises
    DataError: numbers that are not whole, or several classes in one text."""
    texts = ["" if value.lower() in MISSING else value for value in values]
    if texts != list(values):
        n_missing = sum(text != value for text, value in zip(texts, values, strict=True))
        log.warning(
            "labels that are nan (%d of %d) are taken for none", n_missing, len(values)
        )
    numbers = _whole_numbers(texts)
    if numbers is None:
        _refuse_several(texts)
        return number(texts)
    if min(numbers, default=0) < -1 or max(numbers, default=0) > _LARGEST_LABEL:
        return number(texts)
    return np.array(numbers, np.int64), None


def _whole_numbers(texts: Sequence[str]) -> list[int] | None:
    """The numbers, -1 for ""; None if any text is not a number. Raises DataError: all are numbers,
    and one is not whole."""
    try:
        return [int(text) if text else -1 for text in texts]
    except ValueError:
        pass
    try:
        numbers = [float(text) if text else -1.0 for text in texts]
    except ValueError:
        return None
    for text, value in zip(texts, numbers, strict=True):
        if not value.is_integer():
            raise DataError(
                f"the label {text[:_SHOWN]} is a number and no class; expected class numbers or "
                "names (vitsee probe --response FILE predicts numbers)"
            )
    return [int(value) for value in numbers]


def _refuse_several(texts: Sequence[str]) -> None:
    """Raises DataError: one text holds several classes, as lists of tags do."""
    names = {text for text in texts if text}
    for name in sorted(names):
        pieces = _pieces(name, names)
        if len(pieces) > 1 or name[0] in "[{":
            raise DataError(
                f"the label {name[:_SHOWN]!r} holds several classes; expected one class an image "
                "(choose another column, or write names without ';' and '|')"
            )


def _pieces(name: str, names: set[str]) -> list[str]:
    """The classes in one text: between semicolons or bars; between commas, which names may have,
    too (`tench, Tinca tinca`), only if all are numbers or classes of other images."""
    for separator in _SEPARATORS:
        pieces = [piece.strip() for piece in name.split(separator) if piece.strip()]
        if len(pieces) > 1:
            return pieces
    pieces = [piece.strip() for piece in name.split(",") if piece.strip()]
    if all(piece in names or piece.isdigit() for piece in pieces):
        return pieces
    return [name]


def label_text(value: Any) -> str:
    """The text for `class_labels` of a value in JSON or in a column; "" of none. Raises DataError:
    a list or another kind of value, which is no class."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool | int | float | str):
        return str(value).strip()
    kind = type(value).__name__
    raise DataError(
        f"the label {str(value)[:_SHOWN]} is a {kind}; expected one class number or name"
    )
