"""Sites along an axis of a picture: legible names, a selection of them where there are many."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from vitsee_core.figures.plotting import integer_ticks
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import PARTS, site_words
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis

STEPS = (1, 2, 4, 5, 10, 20, 25, 50, 100, 200)


def one_place_a_layer(rows: pl.DataFrame) -> tuple[pl.DataFrame, dict[int, str]]:
    """The rows of a store, whose blocks may have several attentions (of clips over time and within
    a frame): `depth` then counts these. Beside them the name of each depth: `3`, or `3 time`."""
    layers = rows.select("depth", "site").unique(maintain_order=True)
    layers = layers.sort("depth", maintain_order=True)
    if layers["depth"].is_unique().all():
        return rows, {depth: str(depth) for depth in layers["depth"]}
    places = {str(site): place for place, site in enumerate(layers["site"])}
    names = [f"{depth} {str(site).rpartition('.')[2]}" for depth, site in layers.rows()]
    depth = pl.col("site").cast(pl.String).replace_strict(places, return_dtype=pl.Int64)
    return rows.with_columns(depth=depth), dict(enumerate(names))


def layer_ticks(axes: Axes, names: Mapping[int, str], limit: int = 9) -> None:
    """Label the x axis with the depths of `one_place_a_layer`, by their names where these are
    more than numbers."""
    axes.set_xlabel("block")
    if all(map(_is_number, names.values())):
        integer_ticks(axes, [*names], limit)
        return
    # Of two attentions of a block the odd steps show both in turn.
    step = next(
        step for step in (1, 3, 5, 7, 9, 15, 25, len(names)) if len(names) / step <= 14
    )
    shown = list(names)[::step]
    axes.set_xticks(shown, [names[place] for place in shown], rotation=90)


@dataclass(frozen=True)
class Ticks:
    """Places of tick labels along an axis, their texts, and the axis' label."""

    places: list[float]
    texts: list[str]
    label: str

    @property
    def upright(self) -> bool:
        """Whether there are words among several labels, which need more room than numbers."""
        return len(self.texts) > 2 and not all(map(_is_number, self.texts))

    @property
    def longest(self) -> float:
        return 0.55 * max(map(len, self.texts))

    def put_on(self, axis: XAxis | YAxis) -> None:
        """Label the axis, below a panel with words upright."""
        axis.set_ticks(self.places, self.texts)
        axis.set_label_text(self.label)
        if axis.axis_name == "x" and self.upright:
            for label, text in zip(axis.get_ticklabels(), self.texts, strict=True):
                label.set_rotation(0 if _is_number(text) else 90)


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
        found = []
        at = 0
        for block, members in groupby(self.blocks):
            n = len(list(members))
            found += [(block, at, n)] if block else [("", at + k, 1) for k in range(n)]
            at += n
        return found

    def boundaries(self) -> list[float]:
        """The places where blocks of several sites begin and end, the axis' own ends left out."""
        edges = {e for block, at, n in self.runs() if n > 1 for e in (at, at + n)}
        return [edge - 0.5 for edge in sorted(edges - {0, len(self)})]

    def ticks(self, most: int) -> Ticks:
        """The labels of the axis, about `most` at most: every site's, or every block's, or some of
        those."""
        if len(set(zip(self.stores, self.sites, strict=True))) == 1:
            return self._labelled(
                [(0, site_words(self.sites[0], self.blocks[0]))], "site"
            )
        if len(set(self.stores)) > 1:
            return self._store_ticks(most)
        if not any(self.blocks):
            return self._plain_ticks(most)
        pattern, numbers = _numbered([block for block in self.blocks if block])
        parts = {_part(s, b) for s, b in zip(self.sites, self.blocks, strict=True) if b}
        alike = len(parts) == 1
        what = f"block {_names_of(pattern)}".strip()
        part = next(iter(parts))
        if alike and (part := PARTS.get(part, part)):
            what = f"{what}, {part}"
        if len(self) <= most:
            texts = [
                site_words(site)
                if not block
                else numbers[block]
                if alike
                else f"{numbers[block]} {PARTS.get(_part(site, block), _part(site, block))}".strip()
                for site, block in zip(self.sites, self.blocks, strict=True)
            ]
            return self._labelled(enumerate(texts), what)
        runs = [
            (at + (n - 1) / 2, numbers[block]) for block, at, n in self.runs() if block
        ]
        shown = runs[:: _step(len(runs), most)]
        # Sites outside the blocks, where there is room for their labels.
        gap = 0.9 * len(self) / most
        for block, at, _ in self.runs():
            if not block and min(abs(at - other) for other, _ in shown) >= gap:
                shown.append((at, site_words(self.sites[at])))
        return self._labelled(sorted(shown), what)

    def _plain_ticks(self, most: int) -> Ticks:
        """The sites outside of all known blocks."""
        pattern, numbers = _numbered(self.sites)
        step = _step(len(self), most)
        shown = ((k, numbers[self.sites[k]]) for k in range(0, len(self), step))
        return self._labelled(shown, f"site ({pattern})" if pattern else "site")

    def _labelled(self, shown: Iterable[tuple[float, str]], what: str) -> Ticks:
        places, texts = zip(*shown, strict=True)
        if self.role:
            what = what.replace("block", self.role, 1) if "block" in what else self.role
        label = f"{shorten(self.stores[0], 22)}, {what}"
        return Ticks(list(map(float, places)), list(texts), label)

    def _store_ticks(self, most: int) -> Ticks:
        """Names of stores; of their sites too where these differ."""
        alike = len(set(self.sites)) == 1
        pairs = zip(self.stores, self.sites, strict=True)
        texts = [
            shorten(st, 24) if alike else f"{shorten(st, 24)}: {site_words(si)}"
            for st, si in pairs
        ]
        every = range(0, len(self), _step(len(self), most))
        label = site_words(self.sites[0], self.blocks[0]) if alike else ""
        return Ticks([float(k) for k in every], [texts[k] for k in every], label)


def _names_of(pattern: str) -> str:
    """The names of the two numbers of a block, in brackets: `(stage.block)` of
    `stages.*.blocks.*`."""
    names = [name.rstrip("s.") for name in re.findall(r"[a-z]+", pattern)]
    if pattern.count("*") < 2:
        return f"({pattern})" if pattern not in ("", "blocks.*") else ""
    return f"({names[0]}.{'block' if len(names) < 2 else names[1]})"


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
