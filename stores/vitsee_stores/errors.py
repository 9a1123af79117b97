"""Errors that a user can cause or mend; each message is one line for the terminal."""

from __future__ import annotations

from typing import Any, Self


class VitseeError(Exception):
    """Root of all errors shown without a traceback: what was found, expected, and what to run.
    Another process' are raised here as they are, whatever their constructors take."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._again, (self.args, self.__dict__)

    @classmethod
    def _again(cls, arguments: tuple[Any, ...], state: dict[str, Any]) -> Self:
        error = cls.__new__(cls, *arguments)
        error.args = arguments
        error.__dict__.update(state)
        return error


class StoreError(VitseeError):
    """Not a store, a foreign or future format, damaged, or unreadable."""


class Unreachable(StoreError):
    """Whoever has the store gave no answer; that says nothing about the store."""


class NoStore(StoreError):
    """Nothing is where a store should be, as far as this process sees."""


class IncompleteStore(StoreError):
    """An extraction into this store has not finished."""


class IdentityMismatch(StoreError):
    """A store is joined or resumed with other choices than it was made with."""


class StoreMismatch(StoreError):
    """Two stores do not hold the same images in the same order."""


class MissingInput(VitseeError):
    """The store lacks what is asked of it; names the extract option that brings it."""


class NotOffered(MissingInput):
    """The store's model has nothing of the kind: no other extraction brings it."""


class SiteError(VitseeError):
    """A selector of sites or tokens that nothing answers to."""


def reason(error: OSError) -> str:
    """The system's word for an error, as a part of a line: `no such file or directory`."""
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]
