"""Options of the analyses that train on some images and measure accuracy on others."""

from __future__ import annotations

from collections.abc import Sequence

from vitsee_core.runtime.options import Option
from vitsee_stores.errors import VitseeError

TESTS = Option("", default="none")
RANDOM_BASELINE = Option(
    "Add the rows of Gaussian features of the same shape.",
    "--baseline",
    choices=("random",),
    default="none",
)
PER_CLASS = Option("Add top1_class of each class.")
ALLOW_SHARED = Option("Go on where the same image trains and tests.  [default: refuse]")


def word_or_number(text: str, words: Sequence[str], expected: str) -> str | float:
    """One of the words, or a finite number above 0. Raises VitseeError: neither."""
    if text in words:
        return text
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise VitseeError(f"{text!r}; expected {expected}")
    return value
