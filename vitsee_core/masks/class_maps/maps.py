"""The interface of a source of class maps, and several sources as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vitsee_core.masks.labels import PixelSource
from vitsee_core.masks.several import Several, check_once
from vitsee_stores.errors import VitseeError

ClassMap = NDArray[np.uint8]
IGNORED = 255  # a pixel without a class; so there are at most 255 classes, 0 to 254


class ClassMaps(PixelSource, Protocol):
    """The class of every pixel.

    Attributes:
        classes: names by class, empty where the source names none.
        layout: whose files these are, in words.
        rules: how pixels become classes, for a sidecar.
    """

    @property
    def classes(self) -> Sequence[str]: ...

    @property
    def layout(self) -> str: ...

    @property
    def rules(self) -> dict[str, str]: ...

    def read(self, i: int) -> ClassMap:
        """(height, width): classes, `IGNORED` for pixels that have none."""


class SeveralMaps(Several[ClassMaps]):
    """Sources of the same classes and rules; see `ClassMaps`."""

    @property
    def classes(self) -> Sequence[str]:
        return self.sources[0].classes

    @property
    def layout(self) -> str:
        return ", ".join(dict.fromkeys(source.layout for source in self.sources))

    @property
    def rules(self) -> dict[str, str]:
        return self.sources[0].rules


def join_maps(sources: Sequence[ClassMaps]) -> ClassMaps:
    """One source, or several as one.

    Raises:
        VitseeError: their classes differ, or an image is in two of them.
    """
    first, *others = sources
    for other in others:
        if list(other.classes) != list(first.classes):
            raise VitseeError(
                f"{first.name} and {other.name} have different classes ({len(first.classes)} and "
                f"{len(other.classes)} names); expected splits of one data set"
            )
    check_once(sources)
    return SeveralMaps(tuple(sources)) if others else first
