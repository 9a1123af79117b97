"""Sites along an axis of a picture: legible names, and a selection of them where there are many."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from vitsee_core.figures.plotting import integer_ticks
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import BLOCK_PARTS, site_words
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis

STEPS = (1, 2, 4, 5, 10, 20, 25, 50, 100, 200)  # every so many sites have a label


def one_place_a_layer(rows: pl.DataFrame) -> tuple[pl.DataFrame, dict[int, str]]:
    """Give each layer of a store a depth of its own.

    Blocks of video models may have several attentions, over time and within a frame, at one depth;
    `depth` then counts the attentions.

    Returns:
        The rows with that depth, and the name of each depth: `3`, or `3 time`.
    """
    layers = rows.select("depth", "site").unique(maintain_order=True)
    layers = layers.sort("depth", maintain_order=True)
    if layers["depth"].is_unique().all():
        return rows, {depth: str(depth) for depth in layers["depth"]}
    new_depths = {str(site): i for i, site in enumerate(layers["site"])}
    names = [f"{depth} {str(site).rpartition('.')[2]}" for depth, site in layers.rows()]
    sites = pl.col("site").cast(pl.String)
    depth = sites.replace_strict(new_depths, return_dtype=pl.Int64)
    return rows.with_columns(depth=depth), dict(enumerate(names))


def layer_ticks(axes: Axes, names: Mapping[int, str], limit: int = 9) -> None:
    """Label the x axis with the depths of `one_place_a_layer`.

    Args:
        axes: the panel.
        names: depth -> its name; shown where they are more than numbers.
        limit: largest number of ticks that are numbers.
    """
    axes.set_xlabel("block")
    if all(map(_is_number, names.values())):
        integer_ticks(axes, [*names], limit)
        return
    # Odd steps: with two attentions per block, an even one would show the same kind each time.
    steps = (1, 3, 5, 7, 9, 15, 25, len(names))
    step = next(step for step in steps if len(names) / step <= 14)
    depths = list(names)[::step]
    axes.set_xticks(depths, [names[depth] for depth in depths], rotation=90)


@dataclass(frozen=True)
class Ticks:
    """Tick labels of an axis.

    Attributes:
        positions: coordinates of the ticks along the axis.
        texts: their labels.
        label: the axis' label.
    """

    positions: list[float]
    texts: list[str]
    label: str

    @property
    def upright(self) -> bool:
        """Whether there are words among several labels, which need more room than numbers."""
        return len(self.texts) > 2 and not all(map(_is_number, self.texts))

    @property
    def longest(self) -> float:
        """Ems of the longest label: a letter is 0.55 em wide on average."""
        return 0.55 * max(map(len, self.texts))

    def put_on(self, axis: XAxis | YAxis) -> None:
        """Label an axis; words below a panel stand upright, numbers do not."""
        axis.set_ticks(self.positions, self.texts)
        axis.set_label_text(self.label)
        if axis.axis_name == "x" and self.upright:
            for label, text in zip(axis.get_ticklabels(), self.texts, strict=True):
                label.set_rotation(0 if _is_number(text) else 90)


class BlockRun(NamedTuple):
    """Consecutive cells of an axis that lie in one block; `block` is "" outside of blocks."""

    block: str
    start: int  # the first cell
    n: int


@dataclass(frozen=True)
class SiteAxis:
    """One side of a heatmap: sites in their order, of one store or of several.

    Attributes:
        stores: the store of each cell.
        sites: the site of each cell.
        blocks: path of the block that each site lies in, "" for none.
        role: word for what the sites are, where that is not just sites or blocks ("skip").
    """

    stores: tuple[str, ...]
    sites: tuple[str, ...]
    blocks: tuple[str, ...]
    role: str = ""

    @classmethod
    def of(
        cls, cells: Sequence[tuple[str, str]], blocks: Mapping[str, str], role: str = ""
    ) -> SiteAxis:
        """Return the axis of these cells.

        Args:
            cells: (store, site) of each cell.
            blocks: site -> path of its block, for those that lie in one.
            role: word for what the sites are, "" for sites or blocks.
        """
        stores, sites = zip(*cells, strict=True)
        return cls(
            stores=stores,
            sites=sites,
            blocks=tuple(blocks.get(site, "") for site in sites),
            role=role,
        )

    def __len__(self) -> int:
        return len(self.sites)

    def runs(self) -> list[BlockRun]:
        """Return the runs of consecutive cells of one block; a site outside of blocks is alone."""
        runs = []
        start = 0
        for block, cells in groupby(self.blocks):
            n = len(list(cells))
            if block:
                runs.append(BlockRun(block, start, n))
            else:
                runs += [BlockRun("", start + k, 1) for k in range(n)]
            start += n
        return runs

    def boundaries(self) -> list[float]:
        """Return where blocks of several sites begin and end, without the axis' own ends."""
        edges: set[int] = set()
        for run in self.runs():
            if run.n > 1:
                edges |= {run.start, run.start + run.n}
        # The cell k spans k - 0.5 to k + 0.5.
        return [edge - 0.5 for edge in sorted(edges - {0, len(self)})]

    def ticks(self, limit: int) -> Ticks:
        """Return the labels of the axis: every site's, or every block's, or some of those.

        Args:
            limit: largest number of labels; sites outside of the blocks may come on top.
        """
        if len(set(zip(self.stores, self.sites, strict=True))) == 1:
            name = site_words(self.sites[0], self.blocks[0])
            return self._ticks_at([(0, name)], "site")
        if len(set(self.stores)) > 1:
            return self._store_ticks(limit)
        if not any(self.blocks):
            return self._plain_ticks(limit)
        pattern, numbers = _pattern_and_numbers([block for block in self.blocks if block])
        parts = {
            _part_of_block(site, block)
            for site, block in zip(self.sites, self.blocks, strict=True)
            if block
        }
        one_part = len(parts) == 1
        words = f"block {_block_number_words(pattern)}".strip()
        if one_part:
            part = next(iter(parts))
            part_words = BLOCK_PARTS.get(part, part)
            if part_words:
                words = f"{words}, {part_words}"
        if len(self) <= limit:
            texts = []
            for site, block in zip(self.sites, self.blocks, strict=True):
                if not block:
                    texts.append(site_words(site))
                elif one_part:  # which the axis' label names
                    texts.append(numbers[block])
                else:
                    part = _part_of_block(site, block)
                    texts.append(
                        f"{numbers[block]} {BLOCK_PARTS.get(part, part)}".strip()
                    )
            return self._ticks_at(enumerate(texts), words)
        # One label in the middle of each block.
        middles = [
            (run.start + (run.n - 1) / 2, numbers[run.block])
            for run in self.runs()
            if run.block
        ]
        labelled = middles[:: _label_step(len(middles), limit)]
        # Sites outside the blocks, where there is room for their labels.
        gap = 0.9 * len(self) / limit
        for run in self.runs():
            if run.block:
                continue
            distance = min(abs(run.start - position) for position, _ in labelled)
            if distance >= gap:
                labelled.append((run.start, site_words(self.sites[run.start])))
        return self._ticks_at(sorted(labelled), words)

    def _plain_ticks(self, limit: int) -> Ticks:
        """Return the labels of sites that all lie outside of known blocks."""
        pattern, numbers = _pattern_and_numbers(self.sites)
        step = _label_step(len(self), limit)
        labelled = ((k, numbers[self.sites[k]]) for k in range(0, len(self), step))
        return self._ticks_at(labelled, f"site ({pattern})" if pattern else "site")

    def _ticks_at(self, labelled: Iterable[tuple[float, str]], words: str) -> Ticks:
        """Return ticks of one store.

        Args:
            labelled: coordinate and text of each tick.
            words: what the texts are, `block` being replaced by the axis' role.
        """
        positions, texts = zip(*labelled, strict=True)
        if self.role and "block" in words:
            words = words.replace("block", self.role, 1)
        elif self.role:
            words = self.role
        label = f"{shorten(self.stores[0], 22)}, {words}"
        return Ticks(list(map(float, positions)), list(texts), label)

    def _store_ticks(self, limit: int) -> Ticks:
        """Return the names of several stores, with their sites where these differ."""
        one_site = len(set(self.sites)) == 1
        texts = []
        for store, site in zip(self.stores, self.sites, strict=True):
            name = shorten(store, 24)
            texts.append(name if one_site else f"{name}: {site_words(site)}")
        cells = range(0, len(self), _label_step(len(self), limit))
        label = site_words(self.sites[0], self.blocks[0]) if one_site else ""
        return Ticks([float(k) for k in cells], [texts[k] for k in cells], label)


def _block_number_words(pattern: str) -> str:
    """Return what the numbers in a block's path count: `(stage.block)` for `stages.*.blocks.*`.

    "" for `blocks.*`, whose one number needs no explanation.
    """
    names = [name.rstrip("s.") for name in re.findall(r"[a-z]+", pattern)]
    if pattern.count("*") < 2:
        return f"({pattern})" if pattern not in ("", "blocks.*") else ""
    inner = names[1] if len(names) >= 2 else "block"
    return f"({names[0]}.{inner})"


def _is_number(text: str) -> bool:
    """Whether a label is a number or several with dots between: `3`, `1.2`."""
    return text.replace(".", "").isdigit()


def _part_of_block(site: str, block: str) -> str:
    """Return the name of a site within its block: `attn.branch`."""
    return site.removeprefix(f"{block}.")


def _pattern_and_numbers(names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the common pattern of names, and the numbers that tell each from the others.

    `stages.*.blocks.*`, and `1.2` for `stages.1.blocks.2`. Names of several patterns, or without
    numbers, have the pattern "" and stay as they are.
    """
    patterns = {re.sub(r"\d+", "*", name) for name in names}
    if len(patterns) == 1:
        pattern = patterns.pop()
        if "*" in pattern:
            return pattern, {name: ".".join(re.findall(r"\d+", name)) for name in names}
    return "", {name: name for name in names}


def _label_step(n: int, limit: int) -> int:
    """Return every how many of n sites one has a label, so that about `limit` have."""
    return next((step for step in STEPS if n <= step * max(limit, 1)), n)
