"""Class numbers and names from what data sets write for a label.

A text is a number if it is one in ASCII digits: `3`, `+3`, `003`, `3.0`, `3e0`, but not `1_0`,
which Python reads as 10. Numbers are class numbers if all texts are numbers. `3` and `3.0` are the
same class. `007` and `7` may be one or two, so that all texts are names where both occur.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.errors import DataError

log = logging.getLogger(__name__)

NAN = "nan"
MISSING = frozenset((NAN, "<na>"))  # as pandas and NumPy write a missing label
NO_LABELS = "none"  # of --label-key and --label-column
_SEPARATORS = ";|"  # between several classes of one image
_LARGEST_LABEL = 2**62
_TOO_LARGE = 2 * _LARGEST_LABEL
_MAX_DIGITS = 19  # of a number up to _LARGEST_LABEL
_MAX_LITERAL = 10_000  # characters of a list as Python writes one
_SHOWN = 60
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_PADDED = re.compile(r"\+|-?0+[0-9]")  # how `+7` and `007` begin
_INFINITE = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)


def natural_key(text: str) -> tuple[list[tuple[int, str] | str], str]:
    """Sorts digits by their value and letters without case; ties by code point."""
    pieces = re.split(r"([0-9]+)", text.lower())
    return [_digits_key(p) if k % 2 else p for k, p in enumerate(pieces)], text


def _digits_key(digits: str) -> tuple[int, str]:
    """Sorts digits by their value; Python refuses to make integers of thousands of them."""
    significant = digits.lstrip("0")
    return len(significant), significant


def number(names: Sequence[str]) -> tuple[NDArray[np.int64], list[str] | None]:
    """Labels for class names, "" being none (-1), and the names in natural order (None if none)."""
    class_names = sorted({name for name in names if name}, key=natural_key)
    code = {name: k for k, name in enumerate(class_names)}
    labels = np.array([code.get(name, -1) for name in names], np.int64)
    return labels, class_names or None


def class_labels(
    values: Sequence[str], counts: Sequence[int] | None = None
) -> tuple[NDArray[np.int64], list[str] | None]:
    """Return the label of each text, and the names of the classes; None for class numbers, and
    where no text has a class.

    Class numbers if every text is a number (3, or 3.0), else names. A text "", `nan` or `<na>` has
    no class: -1; the latter two are logged. Texts of numbers are names, too, where two of them are
    one number and one of these is padded (`007` beside `7`, which is logged), and where a number
    is below -1 or above 2**62.

    Args:
        values: the texts.
        counts: the number of images of each text; one each by default.

    Raises:
        DataError: numbers that are not whole, or several classes in one text.
    """
    texts = ["" if value.lower() in MISSING else value for value in values]
    _say_missing(values, texts, counts)
    distinct = [text for text in dict.fromkeys(texts) if text]
    number_of_text = _whole_numbers(distinct)
    if number_of_text is None:
        _refuse_several(distinct)
        _say_numbers_beside_names(distinct)
        return number(texts)
    ambiguous = [
        writings
        for writings in _writings_of_numbers(number_of_text)
        if any(_PADDED.match(text) for text in writings)
    ]
    if ambiguous:
        log.warning(
            "the labels %r and %r are one number in two writings: all labels are taken for "
            "names, and these two for different classes",
            *ambiguous[0][:2],
        )
        return number(texts)
    numbers = number_of_text.values()
    if min(numbers, default=0) < -1 or max(numbers, default=0) > _LARGEST_LABEL:
        return number(texts)
    labels = [number_of_text[text] if text else -1 for text in texts]
    return np.array(labels, np.int64), None


def _say_missing(
    values: Sequence[str], texts: Sequence[str], counts: Sequence[int] | None
) -> None:
    """Log how many of the values are `nan`, for which the texts have ""."""
    counts = [1] * len(values) if counts is None else counts
    columns = zip(values, texts, counts, strict=True)
    n_missing = sum(count for value, text, count in columns if value != text)
    if n_missing:
        log.warning(
            "labels that are nan (%d of %d) are taken for none", n_missing, sum(counts)
        )


def _whole_numbers(texts: Sequence[str]) -> dict[str, int] | None:
    """The number of each text; None if any text is not a number. Raises DataError: all are numbers,
    and one is not whole."""
    if not all(_NUMBER.fullmatch(text) or _INFINITE.fullmatch(text) for text in texts):
        return None
    number_of_text = {}
    for text in texts:
        whole = _whole_number(text)
        if whole is None:
            raise DataError(
                f"the label {text[:_SHOWN]} is a number and no class; expected class numbers or "
                "names (vitsee probe --response FILE predicts numbers)"
            )
        number_of_text[text] = whole
    return number_of_text


def _whole_number(text: str) -> int | None:
    """The whole number that a number's text is; None if it is not whole, or too large for a float.

    One of more digits than a label has is replaced by any that is too large for a label.
    """
    if abs(float(text)) == float("inf"):
        return None
    value = Decimal(text)  # a float would round 9007199254740993
    if value and value.adjusted() >= _MAX_DIGITS:
        return _TOO_LARGE if value > 0 else -_TOO_LARGE
    if value != value.to_integral_value():
        return None
    return int(value)


def _writings_of_numbers(number_of_text: Mapping[str, int]) -> list[list[str]]:
    """The texts of each number that has several, as 7 has in `7` and `7.0`."""
    texts_of_number: dict[int, list[str]] = {}
    for text, value in number_of_text.items():
        if abs(value) <= _LARGEST_LABEL:
            texts_of_number.setdefault(value, []).append(text)
    return [texts for texts in texts_of_number.values() if len(texts) > 1]


def _say_numbers_beside_names(texts: Sequence[str]) -> None:
    """Log what is hardly meant among texts of which one is a name: 0.5, or both 1 and 1.0."""
    whole_numbers = dict[str, int]()
    for text in texts:
        if not _NUMBER.fullmatch(text):
            continue
        value = _whole_number(text)
        if value is None:
            log.warning(
                "the label %s is a number and no class, and is taken for a name, since other "
                "labels are names",
                text[:_SHOWN],
            )
            break
        whole_numbers[text] = value
    for writings in _writings_of_numbers(whole_numbers):
        log.warning(
            "the labels %r and %r are one number in two writings, and different classes, since "
            "other labels are names",
            *writings[:2],
        )
        break


def _refuse_several(texts: Sequence[str]) -> None:
    """Raises DataError: one text holds several classes, as lists of tags do, or a record."""
    names = set(texts)
    for name in sorted(names):
        written = _written_kind(name)
        if written:
            raise DataError(
                f"the label {name[:_SHOWN]!r} is a {written}; expected one class number or name "
                "an image (choose another column)"
            )
        separator, pieces = _pieces(name, names)
        if len(pieces) > 1:
            raise DataError(
                f"the label {name[:_SHOWN]!r} holds several classes; expected one class an image "
                f"(choose another column, or write names without {separator!r})"
            )


def _written_kind(name: str) -> str:
    """What a text is in Python or JSON that is not a class: a list, a record; "" for a name."""
    if name[0] == "[":
        return "list"
    if name[0] == "{":
        return "record"
    if name[0] != "(" or len(name) > _MAX_LITERAL:
        return ""
    try:
        value = ast.literal_eval(name)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ""
    return "list" if isinstance(value, tuple) else ""


def _pieces(name: str, names: set[str]) -> tuple[str, list[str]]:
    """The classes in one text, and what separates them: semicolons or bars; commas, which names
    may have, too (`tench, Tinca tinca`), only if all are numbers or classes of other images."""
    for separator in (*_SEPARATORS, ","):
        pieces = [piece.strip() for piece in name.split(separator) if piece.strip()]
        if len(pieces) < 2:
            continue
        if separator != "," or all(p in names or _NUMBER.fullmatch(p) for p in pieces):
            return separator, pieces
    return "", [name]


def label_text(value: Any) -> str:
    """The text for `class_labels` of a value in JSON or in a column; "" of none. Raises DataError:
    a list or another kind of value, which is no class. The text of NaN is `nan`."""
    if value is None:
        return ""
    if isinstance(value, bool | int | float | str):
        return str(value).strip()
    kind = type(value).__name__
    raise DataError(
        f"the label {str(value)[:_SHOWN]} is a {kind}; expected one class number or name"
    )
