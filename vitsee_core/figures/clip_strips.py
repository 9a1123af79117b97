"""Strips of clips: a line of maps over time for each layer, below the frames of the clip. Drawn
from the column `frame` of tables of clips and from their notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vitsee_core.figures.panels import medium, room
from vitsee_core.figures.patch_maps.photos import evenly_with
from vitsee_core.figures.patch_sheets import (
    BAR,
    MARGIN,
    TALLEST,
    TITLE,
    WHOLE,
    Bar,
    Box,
    Map,
    draw_sheet,
    within,
)
from vitsee_core.figures.plotting import GREY
from vitsee_core.tables.text import shorten
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# ems of a tile's width
SMALLEST = 3.9
LARGEST = 6.5
# ems
GAP = 0.35
LINE_GAP = 1.2
NAMES = 6.2  # ems of the names of layers, at the left
STORE = 1.5  # ems of the name of a store, where there are several
TIMES = {
    "shuffled": "frames in random order, as the model saw them",
    "still": "one frame repeated, as the model saw it",
}


@dataclass(frozen=True)
class Moment:
    """A column: one of the places in time of the coarsest grid, of so many."""

    cell: int
    of: int

    def at(self, n: int) -> int:
        """The place that contains its middle, of n."""
        return (2 * self.cell + 1) * n // (2 * self.of)

    def frames(self, n: int) -> str:
        """Those of n sampled frames that lie in it, as `0` or `2–3`."""
        first = self.cell * n // self.of
        last = max((self.cell + 1) * n // self.of - 1, 0)
        return str(first) if last <= first else f"{first}–{last}"


@dataclass(frozen=True)
class ClipStrip:
    """The maps of one layer: (frames, rows, cols) or (frames, rows, cols, 4). edges: top, left,
    bottom, right of the grid on the frames. cell: (frame, row, col) to frame in red."""

    store: str
    title: str
    values: Float
    edges: Sequence[float] = WHOLE
    cell: Sequence[int] | None = None


@dataclass(frozen=True)
class ClipLine:
    """One clip and what is mapped of it. mark: a place on its frames, (share of the time, y, x)."""

    image: str
    title: str
    strips: Sequence[ClipStrip]
    mark: tuple[float, float, float] | None = None


@dataclass
class ClipSheet:
    """Clips below one another, laid out in ems from the upper left corner. notes: what
    `describe_clips` says, or of `clip` alone. look: colours of the maps; bar: what the colour bar
    says; photos: whether frames stand above the maps."""

    lines: Sequence[ClipLine]
    notes: Mapping[str, Any]
    caption: Sequence[str]
    look: Mapping[str, Any] = field(default_factory=dict)
    bar: str | None = None
    photos: bool = True

    def draw(self) -> Figure:
        """The figure; call it inside a function decorated with `styled`."""
        several = len({strip.store for line in self.lines for strip in line.strips}) > 1
        start = MARGIN + NAMES + STORE * several
        fixed = start + MARGIN + (BAR if self.bar else 0.0)
        columns = self._columns(int((room() - fixed + GAP) / (SMALLEST + GAP)))
        self._side = min((room() - fixed + GAP) / len(columns) - GAP, LARGEST)
        width = start + len(columns) * (self._side + GAP) - GAP + MARGIN
        heights = [self._height(line) for line in self.lines]

        def draw_line(box: Box, k: int, top: float) -> AxesImage | None:
            return self._draw_line(box, self.lines[k], columns, top, start, several)

        bar = (
            Bar(self.bar, self._head(self.lines[0]), 26.0, LINE_GAP) if self.bar else None
        )
        texts = [*self.caption, *self._said(columns)]
        return draw_sheet(width, heights, texts, draw_line, bar)

    def _columns(self, most: int) -> list[Moment]:
        """The times that are drawn: those of the notes, or as many evenly spaced ones as fit, with
        those that are marked."""
        sizes = [len(strip.values) for line in self.lines for strip in line.strips]
        said = self.notes.get("clip", {})
        of = said.get("of", min(sizes))
        there = said.get("shown", range(of))
        marked = {int(line.mark[0] * of) for line in self.lines if line.mark is not None}
        return [Moment(cell, of) for cell in evenly_with(there, max(most, 1), marked)]

    def _said(self, columns: Sequence[Moment]) -> list[str]:
        """The caption's sentences on the times."""
        said = []
        if time := TIMES.get(self.notes.get("clip", {}).get("time", "")):
            said.append(time)
        if len(columns) < columns[0].of:
            said.append("evenly spaced times; the table has all")
        return said

    def _n_frames(self, columns: Sequence[Moment]) -> int:
        return int(self.notes.get("clip", {}).get("frames", columns[0].of))

    def _about(self, image: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = (
            self.notes.get("images", {}).get(image, {}) if image else {}
        )
        return found

    def _tile(self, image: str) -> tuple[float, float]:
        aspect = float(self._about(image).get("aspect", 1.0))
        return within(self._side, self._side * TALLEST, aspect)

    def _head(self, line: ClipLine) -> float:
        """Ems of the clip's name and of the times above its columns."""
        return TITLE * (1 + bool(line.title) + ("seconds" in self._about(line.image)))

    def _height(self, line: ClipLine) -> float:
        each = self._tile(line.image)[1] + GAP
        return self._head(line) + (len(line.strips) + self.photos) * each - GAP + LINE_GAP

    def _draw_line(
        self,
        box: Box,
        line: ClipLine,
        columns: Sequence[Moment],
        top: float,
        start: float,
        several: bool,
    ) -> AxesImage | None:
        about, (wide, tall) = self._about(line.image), self._tile(line.image)
        seen = about.get("frame", WHOLE)
        at = top + TITLE / 2
        last = None
        if line.title:
            letters = int((len(columns) * (self._side + GAP) + NAMES) / 0.56)
            box.text(MARGIN, at, shorten(line.title, letters), fontsize=medium().font)
            at += TITLE
        n = self._n_frames(columns)
        step = about.get("seconds")
        for name in ("frame", "seconds") if step else ("frame",):
            box.text(start - 0.6, at, name, ha="right", color=GREY)
            for k, moment in enumerate(columns):
                said = moment.frames(n)
                if name == "seconds" and step:
                    said = f"{moment.cell * n / moment.of * float(step):.2f}"
                box.text(
                    start + k * (self._side + GAP) + self._side / 2, at, said, ha="center"
                )
            at += TITLE
        at = at - TITLE / 2
        lefts = self._lefts(columns, start, wide)
        if self.photos:
            for left, moment in zip(lefts, columns, strict=True):
                place = box.place(left, at, wide, tall, seen)
                picture = about.get("pictures", {}).get(str(moment.at(n)))
                place.picture(picture, about.get("edges", WHOLE), "no\npicture")
                if (
                    line.mark
                    and Moment(int(line.mark[0] * moment.of), moment.of) == moment
                ):
                    place.cross(*line.mark[1:])
            at += tall + GAP
        before = None
        for strip in line.strips:
            most = int(NAMES / 0.56)
            parts = [  # `block 3, time` is too long for a line
                part
                for line in strip.title.split("\n")
                for part in (line.split(", ") if len(line) > most else [line])
            ]
            name = "\n".join(shorten(part, most) for part in parts)
            box.text(start - 0.6, at + tall / 2, name, ha="right")
            if several and strip.store != before:
                below = sum(other.store == strip.store for other in line.strips)
                middle = at + (below * (tall + GAP) - GAP) / 2
                owner = shorten(strip.store, max(6, int(below * tall * 1.6)))
                box.text(MARGIN + 0.4, middle, owner, ha="center", rotation=90)
            before = strip.store
            for left, moment in zip(lefts, columns, strict=True):
                k = moment.at(len(strip.values))
                cell = strip.cell
                own = (cell[1], cell[2]) if cell is not None and cell[0] == k else None
                tile = Map("", strip.values[k], strip.edges, own)
                last = box.place(left, at, wide, tall, seen).map(tile, self.look)
            at += tall + GAP
        return last

    def _lefts(self, columns: Sequence[Moment], start: float, wide: float) -> list[float]:
        each = self._side + GAP
        return [start + k * each + (self._side - wide) / 2 for k in range(len(columns))]


def of_clips(rows: pl.DataFrame) -> bool:
    """Whether the cells of a table are those of clips."""
    return "frame" in rows.columns and rows["frame"].null_count() < len(rows)
