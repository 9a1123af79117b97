"""Several mask sources as one: the splits of a data set whose classes are spread over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vitsee_core.masks.labels import Labels, MaskSource, Segment
from vitsee_stores.errors import VitseeError


@dataclass(frozen=True)
class SeveralMasks:
    """The masks of several sources, one source after the other; see `MaskSource`."""

    sources: Sequence[MaskSource]

    @property
    def name(self) -> str:
        """The names of all sources."""
        return ", ".join(source.name for source in self.sources)

    @cached_property
    def keys(self) -> list[str]:
        """The keys of all sources."""
        return [key for source in self.sources for key in source.keys]

    @property
    def rules(self) -> dict[str, str]:
        """How pixels become labels, where the sources differ."""
        found: dict[str, dict[str, None]] = {}
        for source in self.sources:
            for key, rule in source.rules.items():
                found.setdefault(key, {})[rule] = None
        return {key: "; ".join(rules) for key, rules in found.items()}

    @property
    def categories(self) -> list[str]:
        """The categories of all sources, if all are known."""
        known = [source.categories for source in self.sources]
        return list(dict.fromkeys(name for one in known for name in one)) if all(known) else []

    @property
    def void(self) -> str:
        """What makes a pixel void."""
        return "; ".join(dict.fromkeys(source.void for source in self.sources))

    def where(self, i: int) -> str:
        """In its source."""
        source, k = self._place(i)
        return source.where(k)

    def read(self, i: int) -> Labels:
        """(height, width); see `MaskSource`."""
        source, k = self._place(i)
        return source.read(k)

    def segments(self, i: int) -> list[Segment]:
        """The objects of an image; see `MaskSource`."""
        source, k = self._place(i)
        return source.segments(k)

    def _place(self, i: int) -> tuple[MaskSource, int]:
        for source in self.sources:
            if i < len(source.keys):
                return source, i
            i -= len(source.keys)
        raise IndexError(i)


def join_masks(sources: Sequence[MaskSource]) -> MaskSource:
    """One source, or several as one.

    Raises:
        VitseeError: an image is in two of them.
    """
    if len(sources) == 1:
        return sources[0]
    seen: dict[str, MaskSource] = {}
    for source in sources:
        for key in dict.fromkeys(source.keys):
            other = seen.setdefault(key, source)
            if other is not source:
                both = "twice" if other.name == source.name else f"and in {source.name}"
                raise VitseeError(f"the image {key} is in {other.name} {both}; give each once")
    return SeveralMasks(tuple(sources))
