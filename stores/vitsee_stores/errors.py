"""Errors that a user can cause or fix; each message is one line for the terminal."""

from __future__ import annotations

import re
from typing import Any, Self

_MANY_DIGITS = re.compile(r"\((\d+) digits\) for integer.*?(?:value has (\d+) digits|$)")


class VitseeError(Exception):
    """Base of all errors that are shown without a traceback.

    The message says what was found, what was expected, and what to run.

    Examples:
        >>> import vitsee
        >>> try:
        ...     vitsee.open_store("nowhere/none.zarr")
        ... except vitsee.VitseeError as error:
        ...     print(str(error).split(" (")[0])  # the rest says what to run
        no store at nowhere/none.zarr: nothing is there
    """

    # BaseException pickles (class, args) and calls the constructor with them, which fails for
    # subclasses whose constructors take something else. Errors come back from worker processes.
    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the constructor."""
        return type(self)._from_state, (self.args, self.__dict__)

    @classmethod
    def _from_state(cls, arguments: tuple[Any, ...], state: dict[str, Any]) -> Self:
        """Return a copy of an error of another process."""
        error = cls.__new__(cls, *arguments)
        error.args = arguments
        error.__dict__.update(state)
        return error


class StoreError(VitseeError):
    """A folder or URL is not a store, has another or a newer format, is damaged or unreadable."""


class Unreachable(StoreError):
    """The server did not respond; the store itself may be fine."""


class NoStore(StoreError):
    """Nothing is where a store should be, as far as this process can see."""


class IncompleteStore(StoreError):
    """An extraction into this store has not finished."""


class IdentityMismatch(StoreError):
    """A store is joined or resumed with other settings than it was made with."""


class StoreMismatch(StoreError):
    """Two stores do not hold the same images in the same order."""


class MissingInput(VitseeError):
    """The store lacks what was requested; names the extract option that adds it."""


class NotOffered(MissingInput):
    """The store's model has nothing of the kind: no other extraction adds it."""


class SiteError(VitseeError):
    """A selector of sites or tokens without a match."""


def reason(error: OSError) -> str:
    """Return the operating system's message for use within a line: `no such file or directory`."""
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]


def reason_of_text(error: Exception) -> str:
    """Return what is wrong with a text that could not be parsed.

    Python's messages about encodings and long numbers are meant for programmers, and are put into
    other words: `it is not text in UTF-8 (byte 3)`, `a number has 5000 digits; at most 4300 are
    read`. All others are returned as they are.
    """
    if isinstance(error, UnicodeDecodeError):
        return f"it is not text in {error.encoding.upper()} (byte {error.start})"
    match = _MANY_DIGITS.search(str(error))
    if match is None:
        return str(error)
    digits = f"{match[2]} digits" if match[2] else "too many digits"
    return f"a number has {digits}; at most {match[1]} are read"
