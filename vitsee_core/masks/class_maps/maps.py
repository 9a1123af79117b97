"""The interface of a source of class maps, and several sources as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.errors import VitseeError

ClassMap = NDArray[np.uint8]
IGNORED = 255  # a pixel without a class; so there are at most 255 classes, 0 to 254


class ClassMaps(Protocol):
    """Class maps by number, each with the name of an image."""

    @property
    def name(self) -> str:
        """The source's name, as the user gave it."""

    @property
    def keys(self) -> Sequence[str]:
        """The maps' names, matched with the images'."""

    @property
    def classes(self) -> Sequence[str]:
        """Names by class, empty where the source names none."""

    @property
    def layout(self) -> str:
        """Whose files these are, in words."""

    @property
    def rules(self) -> dict[str, str]:
        """How pixels become classes, for a sidecar."""

    def where(self, i: int) -> str:
        """The map's file, or its place in one, for a message."""

    def read(self, i: int) -> ClassMap:
        """(height, width): classes, `IGNORED` for pixels that have none.

        Raises:
            VitseeError: the map cannot be read; names the file.
        """


@dataclass(frozen=True)
class JointMaps:
    """Several sources of the same classes, one after the other; see `ClassMaps`."""

    sources: Sequence[ClassMaps]

    @property
    def name(self) -> str:
        """The names of all sources."""
        return ", ".join(source.name for source in self.sources)

    @cached_property
    def keys(self) -> list[str]:
        """The keys of all sources."""
        return [key for source in self.sources for key in source.keys]

    @property
    def classes(self) -> Sequence[str]:
        """The classes, which every source has."""
        return self.sources[0].classes

    @property
    def layout(self) -> str:
        """The layouts of all sources."""
        return ", ".join(dict.fromkeys(source.layout for source in self.sources))

    @property
    def rules(self) -> dict[str, str]:
        """The rules, which every source has."""
        return self.sources[0].rules

    def where(self, i: int) -> str:
        """In its source."""
        source, k = self._place(i)
        return source.where(k)

    def read(self, i: int) -> ClassMap:
        """(height, width); see `ClassMaps`."""
        source, k = self._place(i)
        return source.read(k)

    def _place(self, i: int) -> tuple[ClassMaps, int]:
        for source in self.sources:
            if i < len(source.keys):
                return source, i
            i -= len(source.keys)
        raise IndexError(i)


def join_maps(sources: Sequence[ClassMaps]) -> ClassMaps:
    """One source, or several as one.

    Raises:
        VitseeError: their classes differ, or an image is in two of them.
    """
    if len(sources) == 1:
        return sources[0]
    first = sources[0]
    owner: dict[str, ClassMaps] = {}
    for source in sources:
        if list(source.classes) != list(first.classes):
            raise VitseeError(
                f"{first.name} and {source.name} have different classes "
                f"({len(first.classes)} and {len(source.classes)} names); expected splits of one "
                "data set"
            )
        for key in source.keys:
            if key in owner:
                raise VitseeError(
                    f"the image {key} is in {owner[key].name} and in {source.name}; give each once"
                )
            owner[key] = source
    return JointMaps(tuple(sources))
