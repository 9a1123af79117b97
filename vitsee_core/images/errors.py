"""Errors of a data set, and of one image of it."""

from __future__ import annotations

from vitsee_stores.errors import VitseeError


class DataError(VitseeError):
    """The data, the split or the selection cannot be used as requested."""


class ImageError(VitseeError):
    """One image cannot be read; `name` is its id or path, `reason` is why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"cannot read {name}: {reason}")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[type[ImageError], tuple[str, str]]:
        return type(self), (self.name, self.reason)
