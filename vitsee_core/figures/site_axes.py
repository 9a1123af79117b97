"""Sites along an axis of a picture: legible names, a selection of them where there are many."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.plotting import shorten

if TYPE_CHECKING:
    from matplotlib.axis import XAxis, YAxis

CHARACTER_INCHES = 0.068  # of a tick label
SMALL, SMALL_INCHES = 5.5, 0.095  # size in points of labels in a dense axis, and a line of them
STEPS = (1, 2, 4, 5, 10, 20, 25, 50, 100, 200)


@dataclass(frozen=True)
class Ticks:
    """Places of tick labels along an axis, their texts, and the axis' label."""

    places: list[float]
    texts: list[str]
    label: str
    small: bool = False

    def put_on(self, axis: XAxis | YAxis, unit_inches: float) -> None:
        """Label the axis; below a panel, labels that are too long for their place are rotated.

        Args:
            axis: an x or a y axis.
            unit_inches: how long one unit of the data is.
        """
        axis.set_ticks(self.places, self.texts)
        axis.set_label_text(self.label)
        axis.set_tick_params(length=2, width=0.5)
        if self.small:
            axis.set_tick_params(labelsize=SMALL)
        gaps = np.abs(np.subtract.outer(self.places, self.places))
        np.fill_diagonal(gaps, np.inf)
        too_long = {
            text
            for text, gap in zip(self.texts, gaps.min(axis=1), strict=True)
            if (len(text) + 0.6) * CHARACTER_INCHES > gap * unit_inches
        }
        if axis.axis_name == "y" or not too_long:
            return
        upright = too_long | {text for text in self.texts if not _is_number(text)}
        for label, text in zip(axis.get_ticklabels(), self.texts, strict=True):
            label.set_rotation(90 if text in upright else 0)


@dataclass(frozen=True)
class SiteAxis:
    """One side of a heatmap: sites in their order, of one store or of many.

    stores, sites: one per cell. blocks: path of the block each site lies in, "" for none. role:
    what the sites are, where that is not just sites or blocks ("skip").
    """

    stores: tuple[str, ...]
    sites: tuple[str, ...]
    blocks: tuple[str, ...]
    role: str = ""

    @classmethod
    def of(
        cls, cells: Sequence[tuple[str, str]], blocks: Mapping[str, str], role: str = ""
    ) -> SiteAxis:
        """The axis of these cells (store, site); blocks: site -> its block, where known."""
        stores, sites = zip(*cells, strict=True)
        return cls(stores, sites, tuple(blocks.get(site, "") for site in sites), role)

    def __len__(self) -> int:
        return len(self.sites)

    def runs(self) -> list[tuple[str, int, int]]:
        """(block, first cell, cells) of consecutive cells; a site outside any block is alone."""
        found, at = [], 0
        for block, members in groupby(self.blocks):
            n = len(list(members))
            found += [(block, at, n)] if block else [("", at + k, 1) for k in range(n)]
            at += n
        return found

    def boundaries(self) -> list[float]:
        """Where blocks of several sites begin and end, the axis' own ends left out."""
        edges = {e for block, at, n in self.runs() if n > 1 for e in (at, at + n)}
        return [edge - 0.5 for edge in sorted(edges - {0, len(self)})]

    def ticks(self, most: int, small: int = 0) -> Ticks:
        """At most about `most` labels, or `small` ones in small type where these name every site:
        every site's, or every block's, or some of those."""
        if most < len(self) <= small:
            return replace(self.ticks(len(self)), small=True)
        if len(set(zip(self.stores, self.sites, strict=True))) == 1:
            return self._labelled([(0, self.sites[0])], "site", "")
        if len(set(self.stores)) > 1:
            return self._store_ticks(most)
        if not any(self.blocks):
            return self._plain_ticks(most)
        pattern, numbers = _numbered([block for block in self.blocks if block])
        parts = {_part(s, b) for s, b in zip(self.sites, self.blocks, strict=True) if b}
        alike = len(parts) == 1
        if alike:
            pattern = f"{pattern or '*'}.{next(iter(parts))}"
        if len(self) <= most:
            texts = [
                site if not block else numbers[block] + ("" if alike else f".{_part(site, block)}")
                for site, block in zip(self.sites, self.blocks, strict=True)
            ]
            return self._labelled(enumerate(texts), "block" if alike else "site", pattern)
        runs = [(at + (n - 1) / 2, numbers[block]) for block, at, n in self.runs() if block]
        shown = runs[:: _step(len(runs), most)]
        # Sites outside the blocks, where there is room for their labels.
        gap = 0.9 * len(self) / most
        for block, at, _ in self.runs():
            if not block and min(abs(at - other) for other, _ in shown) >= gap:
                shown.append((at, self.sites[at]))
        return self._labelled(sorted(shown), "block", pattern)

    def _plain_ticks(self, most: int) -> Ticks:
        """The sites outside of all known blocks."""
        pattern, numbers = _numbered(self.sites)
        step = _step(len(self), most)
        shown = ((k, numbers[self.sites[k]]) for k in range(0, len(self), step))
        return self._labelled(shown, "site", pattern)

    def _labelled(self, shown: Iterable[tuple[float, str]], word: str, pattern: str) -> Ticks:
        places, texts = zip(*shown, strict=True)
        where = f" ({pattern})" if "*" in pattern else ""
        label = f"{shorten(self.stores[0], 22)}, {self.role or word}{where}"
        return Ticks(list(map(float, places)), list(texts), label)

    def _store_ticks(self, most: int) -> Ticks:
        """Names of stores; of their sites too where these differ."""
        alike = len(set(self.sites)) == 1
        pairs = zip(self.stores, self.sites, strict=True)
        texts = [shorten(st, 24) if alike else f"{shorten(st, 24)}: {si}" for st, si in pairs]
        every = range(0, len(self), _step(len(self), most))
        label = self.sites[0] if alike else ""
        return Ticks([float(k) for k in every], [texts[k] for k in every], label)


def _is_number(text: str) -> bool:
    return text.replace(".", "").isdigit()


def _part(site: str, block: str) -> str:
    return site.removeprefix(f"{block}.")


def _numbered(names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The pattern of names and what distinguishes them: `stages.*.blocks.*` and `1.2` for
    `stages.1.blocks.2`. Names of several patterns, or without numbers, stay whole."""
    patterns = {re.sub(r"\d+", "*", name) for name in names}
    if len(patterns) == 1 and "*" in (pattern := patterns.pop()):
        return pattern, {name: ".".join(re.findall(r"\d+", name)) for name in names}
    return "", {name: name for name in names}


def _step(n: int, most: int) -> int:
    return next((step for step in STEPS if n <= step * max(most, 1)), n)
