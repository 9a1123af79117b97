"""Brace patterns as a shell expands them: `in1k-{0000..0063}.tar`, `{train,val}.tar`."""

from __future__ import annotations

import re

from vitsee_core.images.errors import DataError

MOST = 100_000
_INNERMOST = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expand_braces(text: str) -> list[str]:
    """The names that `text` stands for, in its order; itself if it has no braces. Numbers keep the
    zeros that the first or the last one begins with.

    Raises:
        DataError: a brace without its other half, one that holds neither a range of numbers nor
            several names, or more than a hundred thousand names.
    """
    match = _INNERMOST.search(text)
    if match is None:
        if "{" in text or "}" in text:
            raise DataError(f"{text} has a brace without its other half; expected {{0000..0063}}")
        return [text]
    start, stop = match.span()
    made: dict[str, None] = {}
    for choice in _choices(match[1], text):
        made.update(dict.fromkeys(expand_braces(text[:start] + choice + text[stop:])))
        if len(made) > MOST:
            raise DataError(f"{text} stands for more than {MOST} names")
    return list(made)


def _choices(inner: str, text: str) -> list[str]:
    if match := _RANGE.fullmatch(inner):
        first, last = int(match[1]), int(match[2])
        padded = any(len(end) > 1 and end.startswith("0") for end in match.groups())
        width = max(map(len, match.groups())) if padded else 0
        step = 1 if last >= first else -1
        if abs(last - first) >= MOST:
            raise DataError(f"{text} stands for more than {MOST} names")
        return [f"{number:0{width}}" for number in range(first, last + step, step)]
    if "," in inner:
        return inner.split(",")
    raise DataError(
        f"{text}: cannot read {{{inner}}}; expected a range of numbers, {{0000..0063}}, or names, "
        "{train,val}"
    )
