"""Building blocks of error lines."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from vitsee_core.models.hook_points import ModelError

LONGEST = 300
SHOWN = 4


def one_line(error: BaseException) -> str:
    """The error's text without line breaks, cut where it is long; its type if it has none."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def some(names: Sequence[str]) -> str:
    """The first names, `a, b, c, d, ...`."""
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def near_names(name: str, known: Sequence[str]) -> str:
    """`; near names: a, b` where some are known that resemble a name."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; near names: {', '.join(near)}" if near else ""


def foreign_place(name: str, where: str) -> ModelError:
    """The line for a model of a folder or a repository that a store's manifest names. where: the
    store's name."""
    return ModelError(
        f"{where} names the model {name[:80]}: a folder or a repository is not opened because a "
        "store names it; if the store is your own, repeat the command with --trust-store"
    )


def missing_extra(package: str, extra: str) -> ModelError:
    """The line for a library that an extra of vitsee's brings."""
    return ModelError(
        f"models of {package} need a package that is not installed (pip install 'vitsee[{extra}]')"
    )
