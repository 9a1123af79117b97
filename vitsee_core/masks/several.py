"""Several sources of pixels as one: the splits of a data set whose classes are spread over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from vitsee_core.masks.labels import MaskSource, PixelSource, Segment
from vitsee_stores.errors import VitseeError

Source = TypeVar("Source", bound=PixelSource)


@dataclass(frozen=True)
class Several(Generic[Source]):
    """One source after the other; see `PixelSource`."""

    sources: Sequence[Source]

    @property
    def name(self) -> str:
        return ", ".join(source.name for source in self.sources)

    @cached_property
    def keys(self) -> list[str]:
        return [key for source in self.sources for key in source.keys]

    def where(self, i: int) -> str:
        source, k = self._place(i)
        return source.where(k)

    def read(self, i: int) -> NDArray[Any]:
        source, k = self._place(i)
        return source.read(k)

    def _place(self, i: int) -> tuple[Source, int]:
        for source in self.sources:
            if i < len(source.keys):
                return source, i
            i -= len(source.keys)
        raise IndexError(i)


class SeveralMasks(Several[MaskSource]):
    """See `MaskSource`; rules and reasons for void are those of all sources, where they differ."""

    @property
    def rules(self) -> dict[str, str]:
        found: dict[str, dict[str, None]] = {}
        for source in self.sources:
            for key, rule in source.rules.items():
                found.setdefault(key, {})[rule] = None
        return {key: "; ".join(rules) for key, rules in found.items()}

    @property
    def categories(self) -> list[str]:
        known = [source.categories for source in self.sources]
        return list(dict.fromkeys(name for one in known for name in one)) if all(known) else []

    @property
    def void(self) -> str:
        return "; ".join(dict.fromkeys(source.void for source in self.sources))

    def segments(self, i: int) -> list[Segment]:
        source, k = self._place(i)
        return source.segments(k)


def join_masks(sources: Sequence[MaskSource]) -> MaskSource:
    """One source, or several as one.

    Raises:
        VitseeError: an image is in two of them.
    """
    check_once(sources)
    return sources[0] if len(sources) == 1 else SeveralMasks(tuple(sources))


def check_once(sources: Sequence[PixelSource]) -> None:
    """Raises VitseeError: an image is in two sources."""
    seen: dict[str, PixelSource] = {}
    for source in sources:
        for key in source.keys:
            other = seen.setdefault(key, source)
            if other is not source:
                both = "twice" if other.name == source.name else f"and in {source.name}"
                raise VitseeError(f"the image {key} is in {other.name} {both}; give each once")
