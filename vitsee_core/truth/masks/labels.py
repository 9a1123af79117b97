"""The labels of pixels and tokens, and the interface of a source of masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vitsee_core.types import Mask

Labels = NDArray[np.uint8]

BACKGROUND = 0
FOREGROUND = 1
VOID = 2


class Segment(NamedTuple):
    """One object, part or region of an image. category: its name; mask: (height, width), which
    pixels it covers, perhaps none; crowd: a group of objects that nobody told apart."""

    category: str
    mask: Mask
    crowd: bool = False


class PixelSource(Protocol):
    """Labels of every pixel of images, by image number.

    Attributes:
        name: of the source, as the user gave it.
        keys: what the images are called, matched with the names of a store's.
    """

    @property
    def name(self) -> str: ...

    @property
    def keys(self) -> Sequence[str]: ...

    def where(self, i: int) -> str:
        """The file, or its place in one, for a message."""

    def read(self, i: int) -> NDArray[Any]:
        """(height, width). Raises VitseeError: it cannot be read; names the file."""


class MaskSource(PixelSource, Protocol):
    """Masks of objects.

    Attributes:
        rules: how pixels become labels, for a sidecar.
        categories: names that segments may have; empty where that is not known before all is read.
        void: what makes a pixel void, in words.
    """

    @property
    def rules(self) -> dict[str, str]: ...

    @property
    def categories(self) -> list[str]: ...

    @property
    def void(self) -> str: ...

    def read(self, i: int) -> Labels:
        """(height, width): BACKGROUND, FOREGROUND (the union of all objects) or VOID."""

    def segments(self, i: int) -> list[Segment]:
        """The objects in the source's order, all of the size of the image. Raises VitseeError: the
        mask cannot be read, or a category has no name."""
