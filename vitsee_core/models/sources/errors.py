"""Errors of other libraries in one line."""

from __future__ import annotations

from vitsee_core.models.hook_points import ModelError

LONGEST = 300


def one_line(error: BaseException) -> str:
    """The error's text without line breaks, cut where it is long; its type if it has none."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def missing_extra(package: str, extra: str) -> ModelError:
    """The line for a library that an extra of vitsee's brings."""
    return ModelError(
        f"models of {package} need a package that is not installed (pip install 'vitsee[{extra}]')"
    )
