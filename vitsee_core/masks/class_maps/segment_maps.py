"""Class maps of COCO files: panoptic segments, stuff and objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vitsee_core.masks.class_maps.maps import IGNORED, ClassMap
from vitsee_core.masks.labels import MaskSource
from vitsee_core.masks.panoptic import PanopticMasks
from vitsee_stores.errors import VitseeError

BACKGROUND = "background"


@dataclass(frozen=True)
class SegmentMaps:
    """The segments of a COCO file painted over one another in the file's order; see `ClassMaps`.

    Of a panoptic file, pixels of no segment have no class; of one of objects or stuff they are the
    class `background`, the first. Crowds have no class where no object lies over them.
    """

    source: MaskSource
    ignore: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def keys(self) -> Sequence[str]:
        return self.source.keys

    @cached_property
    def classes(self) -> list[str]:
        """The categories that are not ignored, with the background first where there is one."""
        return [name for name in self._every if name not in self.ignore]

    @property
    def layout(self) -> str:
        return "COCO panoptic" if self._panoptic else "COCO objects or stuff"

    @property
    def rules(self) -> dict[str, str]:
        rest = "no class" if self._panoptic else f"the class {BACKGROUND}"
        return {
            "layout": self.layout,
            "pixels of no annotation": rest,
            "ignored": ", ".join(("crowds", *self.ignore)),
        }

    def where(self, i: int) -> str:
        return self.source.where(i)

    def read(self, i: int) -> ClassMap:
        numbers = {name: number for number, name in enumerate(self.classes)}
        segments = self.source.segments(i)
        shape = segments[0].mask.shape if segments else self.source.read(i).shape
        rest = IGNORED if self._panoptic else numbers.get(BACKGROUND, IGNORED)
        found = np.full(shape, rest, np.uint8)
        for crowd in (True, False):  # objects lie over crowds
            for one in segments:
                if one.crowd == crowd:
                    found[one.mask] = IGNORED if crowd else numbers.get(one.category, IGNORED)
        return found

    @property
    def _panoptic(self) -> bool:
        return isinstance(self.source, PanopticMasks)

    @cached_property
    def _every(self) -> list[str]:
        return [*([] if self._panoptic else [BACKGROUND]), *self.source.categories]


def open_segment_maps(source: MaskSource, ignore: Sequence[str]) -> SegmentMaps:
    """The class maps of a COCO file; ignore: names of categories.

    Raises:
        VitseeError: it names no categories or too many, or an ignored one is none of them.
    """
    found = SegmentMaps(source, tuple(ignore))
    if not source.categories:
        raise VitseeError(f"{source.name} names no categories; expected a COCO file with them")
    if unknown := [word for word in ignore if word not in found._every]:
        raise VitseeError(
            f"--ignore {unknown[0]}: no category of {source.name}; expected a name like "
            f"{found._every[0]} or {found._every[-1]}"
        )
    if len(found.classes) > IGNORED:
        raise VitseeError(
            f"{source.name} has {len(found.classes)} categories; at most {IGNORED} are read"
        )
    return found
