"""Sanitises text for output: nothing in it can control a terminal, a spreadsheet or a figure.

The texts come from stores, lists and tables that a stranger may have written.
"""

from __future__ import annotations

import re

# These three patterns are in the grammar that Python's and polars' regular expressions share.
# Characters that steer terminals or reorder lines: C0 and C1 controls, DEL, bidirectional marks,
# line and paragraph separators.
STEERING = r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]"
# A spreadsheet takes text that begins so for a formula; the quotes are those of an earlier writing.
FORMULA = r"^'*[=+\-@]"
QUOTED = r"^'('*[=+\-@])"
# Beside these, surrogates, which no encoding writes (polars' text cannot hold them).
_STEERING = re.compile(STEERING.removesuffix("]") + "\ud800-\udfff]")
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_DOLLAR = re.compile(r"(?<!\\)\$")


def visible(text: str, keep: str = "") -> str:
    r"""Return `text` with its control characters written out: `\x1b`, `\n`, `\u202e`.

    Args:
        text: from anywhere.
        keep: characters to leave as they are, e.g. a newline in text of several lines.
    """
    return _STEERING.sub(lambda match: _escape(match[0], keep), text)


def _escape(character: str, keep: str) -> str:
    r"""Return `\n` or the code, `\x1b`, of a control character; one of `keep` as it is."""
    if character in keep:
        return character
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def figure_text(text: str) -> str:
    r"""Return `text` such that matplotlib draws it literally.

    Control characters are written out, and `$` becomes `\$`, so that a name like `$x$` is not set
    as a formula. Idempotent.
    """
    return _DOLLAR.sub(r"\\$", visible(text, keep="\n"))


def shorten(text: str, limit: int) -> str:
    """Return `text` with "…" for its middle if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    n_head = (limit - 1) * 2 // 3
    n_tail = limit - 1 - n_head
    return f"{text[:n_head]}…{text[len(text) - n_tail :]}"


def spreadsheet_cell(text: str) -> str:
    """Return `text` as a cell of a CSV that no spreadsheet runs as a formula.

    Control characters are written out, and a single quote stands before text that begins with =, +,
    - or @ (perhaps behind quotes) unless it is a number. Reading removes the quote.
    """
    text = visible(text)
    if not re.match(FORMULA, text):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text
