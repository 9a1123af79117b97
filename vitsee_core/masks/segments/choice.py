"""Which segments stand for examples, and how their tokens are weighted: the user's choices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from vitsee_core.masks import MaskSource, open_masks
from vitsee_core.masks.options import BACKGROUND, PANOPTIC, SEGMENTS, VOID
from vitsee_core.runtime.options import Option
from vitsee_stores.errors import VitseeError

WEIGHTS = ("area", "any", "vit_analysis")


@dataclass(frozen=True)
class Segmentation:
    """Segments of images in place of the images.

    masks, panoptic, background, void: see `masks.open_masks`. weights: of tokens, see
    `segments.weights`; `area` by default. crowd: whether groups of objects that nobody told apart
    are segments; by default they are not. segments: so many at most, of images drawn with the seed.
    first: only of the first so many images of the masks (of COCO files by their ids).
    """

    masks: Annotated[Path | str | Sequence[Path | str], SEGMENTS]
    panoptic: Annotated[Path | str | None, PANOPTIC] = None
    background: Annotated[Sequence[int], BACKGROUND] = ()
    void: Annotated[int | str | None, VOID] = None
    weights: Annotated[
        str | None,
        Option(
            "How much each patch counts for a segment: by the area in its cell, all that it "
            "touches alike, or as in the code of Walmer et al. (bicubic).",
            choices=WEIGHTS,
            default="area",
            only_with=("masks",),
        ),
    ] = None
    crowd: Annotated[
        bool | None,
        Option(
            "Whether crowds (iscrowd 1) are segments.",
            "--crowd/--no-crowd",
            default="no-crowd",
            only_with=("masks",),
        ),
    ] = None
    segments: Annotated[
        int | None,
        Option(
            "At most N segments, those of images drawn with the seed.",
            least=1,
            default="all",
            only_with=("masks",),
        ),
    ] = None
    first: int | None = None

    def filled(self, **values: Any) -> Segmentation:
        """The same with these values where none was chosen."""
        return replace(
            self, **{name: v for name, v in values.items() if getattr(self, name) is None}
        )

    def open(self) -> MaskSource:
        """The masks.

        Raises:
            VitseeError: see `open_masks`; or an unknown choice.
        """
        if self.weights not in (None, *WEIGHTS):
            raise VitseeError(f"no weights {self.weights!r}; expected {', '.join(WEIGHTS)}")
        for what, n in (("segments", self.segments), ("images", self.first)):
            if n is not None and n < 1:
                raise VitseeError(f"{n} {what} were asked for; expected a positive number")
        masks = self.masks
        paths = [masks] if isinstance(masks, (str, os.PathLike)) else list(masks)
        panoptic = None if self.panoptic is None else Path(self.panoptic)
        return open_masks([Path(path) for path in paths], self.background, self.void, panoptic)


def as_segmentation(
    masks: Segmentation | Path | str | Sequence[Path | str] | None,
) -> Segmentation | None:
    """The choices that go with masks given as such, or as paths alone."""
    return masks if masks is None or isinstance(masks, Segmentation) else Segmentation(masks)
