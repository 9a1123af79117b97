"""Errors of other libraries in one line."""

from __future__ import annotations

LONGEST = 300


def one_line(error: BaseException) -> str:
    """The error's text without line breaks, cut where it is long; its type if it has none."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
