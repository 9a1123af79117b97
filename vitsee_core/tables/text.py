"""Sanitises text from stores and lists for output: nothing in it can control a terminal, a
spreadsheet or a figure."""

from __future__ import annotations

import re

# Patterns in the grammar that Python's and polars' regular expressions share.
# What steers terminals and reorders lines: C0 and C1 controls, DEL, bidirectional marks, line
# and paragraph separators.
STEERING = r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]"
# Spreadsheets take such a beginning for a formula; quotes before it are ours.
FORMULA = r"^'*[=+\-@]"
QUOTED = r"^'('*[=+\-@])"
_STEERING = re.compile(
    STEERING[:-1] + "\ud800-\udfff]"
)  # and surrogates, which no encoding writes
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_DOLLAR = re.compile(r"(?<!\\)\$")


def visible(text: str, keep: str = "") -> str:
    r"""`text` with its control characters written out: `\x1b`, `\n`, `\u202e`.

    Args:
        text: from anywhere.
        keep: characters to leave as they are, e.g. a newline in text of several lines.
    """
    return _STEERING.sub(
        lambda match: match[0] if match[0] in keep else _escaped(match[0]), text
    )


def _escaped(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def figure_text(text: str) -> str:
    r"""`text` as matplotlib draws it literally: control characters written out, and `$` as `\$`, so
    that a name like `$x$` is not set as a formula. Idempotent."""
    return _DOLLAR.sub(r"\\$", visible(text, keep="\n"))


def shorten(text: str, limit: int) -> str:
    """`text` with its middle left out if longer than `limit` characters."""
    if len(text) <= limit:
        return text
    head = (limit - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


def spreadsheet_cell(text: str) -> str:
    """`text` as a cell of a CSV: control characters written out, and a single quote before text
    that begins with =, +, - or @ (perhaps behind quotes) unless it is a number. reading
    removes the quote."""
    text = visible(text)
    if re.match(FORMULA, text) and not _is_number(text):
        return f"'{text}"
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
