"""The labels of pixels and tokens, and the interface of a source of masks."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vitsee_core.types import Mask

Labels = NDArray[np.uint8]

BACKGROUND, FOREGROUND, VOID = 0, 1, 2


class Segment(NamedTuple):
    """One object, part or region of an image. category: its name; mask: (height, width), which
    pixels it covers, perhaps none; crowd: a group of objects that nobody told apart."""

    category: str
    mask: Mask
    crowd: bool = False


class MaskSource(Protocol):
    """Masks by number, each with the name of an image."""

    @property
    def name(self) -> str:
        """The source's name, as the user gave it."""

    @property
    def keys(self) -> list[str]:
        """The masks' names, matched with the images'."""

    @property
    def rules(self) -> dict[str, str]:
        """How pixels become labels, for a sidecar."""

    @property
    def categories(self) -> list[str]:
        """The names that segments may have; empty where that is not known before all is read."""

    @property
    def void(self) -> str:
        """What makes a pixel void, in words."""

    def where(self, i: int) -> str:
        """The mask's file, or its place in one, for a message."""

    def read(self, i: int) -> Labels:
        """(height, width): BACKGROUND, FOREGROUND (the union of all objects) or VOID.

        Raises:
            VitseeError: the mask cannot be read.
        """

    def segments(self, i: int) -> list[Segment]:
        """The objects in the source's order, all of the size of the image.

        Raises:
            VitseeError: the mask cannot be read, or a category has no name.
        """
