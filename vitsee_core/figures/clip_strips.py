"""Strips of clips: a line of maps over time for each layer, below the frames of the clip.

They are drawn from tables of clips, which have a column `frame`, and from their notes.
"""

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

# Lengths in ems.
SMALLEST = 3.9  # width of a tile
LARGEST = 6.5
GAP = 0.35  # between tiles
LINE_GAP = 1.2  # between clips
NAMES = 6.2  # width of the names of layers, at the left
STORE = 1.5  # width of a store's name, where there are several
LETTER = 0.56  # width of a letter
TIMES = {
    "shuffled": "frames in random order, as the model saw them",
    "still": "one frame repeated, as the model saw it",
}


@dataclass(frozen=True)
class Moment:
    """A column of a strip: a span of the clip's time.

    Attributes:
        cell: its index in time in the coarsest of the grids.
        of: number of such spans in the clip.
    """

    cell: int
    of: int

    def at(self, n: int) -> int:
        """Return which of n equal spans contains the middle of this one."""
        # The middle is (cell + 1/2) / of of the time: times n, rounded down, in whole numbers.
        return (2 * self.cell + 1) * n // (2 * self.of)

    def frames(self, n: int) -> str:
        """Return which of n sampled frames lie in it, as `0` or `2–3`."""
        first = self.cell * n // self.of
        last = max((self.cell + 1) * n // self.of - 1, 0)
        return str(first) if last <= first else f"{first}–{last}"


@dataclass(frozen=True)
class ClipStrip:
    """The maps of one layer over time.

    Attributes:
        store: the store's label.
        title: name of the layer, at the left.
        values: (frames, rows, cols), or colours (frames, rows, cols, 4).
        edges: top, left, bottom and right of the grid, as shares of a frame.
        cell: (frame, row, col) of a cell to frame in red, None for none.
    """

    store: str
    title: str
    values: Float
    edges: Sequence[float] = WHOLE
    cell: Sequence[int] | None = None


@dataclass(frozen=True)
class ClipLine:
    """One clip and its maps.

    Attributes:
        image: the clip's name in the notes, "" for a mean over clips.
        title: text above it, "" for none.
        strips: its maps, a strip per layer.
        mark: a point on its frames, (time, y, x), as shares of the clip and a frame.
    """

    image: str
    title: str
    strips: Sequence[ClipStrip]
    mark: tuple[float, float, float] | None = None


@dataclass
class ClipSheet:
    """A figure of clips below one another, each a line of frames above lines of maps.

    Attributes:
        lines: the clips.
        notes: what `describe_clips` returns; its `clip` is enough where no frames are drawn.
        caption: texts at the foot.
        look: keywords of matplotlib's `imshow`, for the maps' colours.
        bar: label of the colour bar; None for no bar.
        photos: whether frames stand above the maps.
    """

    lines: Sequence[ClipLine]
    notes: Mapping[str, Any]
    caption: Sequence[str]
    look: Mapping[str, Any] = field(default_factory=dict)
    bar: str | None = None
    photos: bool = True

    def draw(self) -> Figure:
        """Return the figure. Call it inside a function decorated with `styled`."""
        stores = {strip.store for line in self.lines for strip in line.strips}
        name_stores = len(stores) > 1
        start = MARGIN + NAMES  # ems from the left edge to the first tile
        if name_stores:
            start += STORE
        fixed_width = start + MARGIN + (BAR if self.bar else 0.0)
        tiles_width = room() - fixed_width
        columns = self._columns(int((tiles_width + GAP) / (SMALLEST + GAP)))
        self._side = min((tiles_width + GAP) / len(columns) - GAP, LARGEST)
        width = start + len(columns) * (self._side + GAP) - GAP + MARGIN
        heights = [self._height(line) for line in self.lines]

        def draw_line(box: Box, k: int, top: float) -> AxesImage | None:
            """Draw the k-th clip from `top` ems on; return its last map."""
            return self._draw_line(box, self.lines[k], columns, top, start, name_stores)

        bar = None
        if self.bar:
            head = self._head(self.lines[0])
            bar = Bar(self.bar, head, longest=26.0, gap=LINE_GAP)
        texts = [*self.caption, *self._time_sentences(columns)]
        return draw_sheet(width, heights, texts, draw_line, bar)

    def _columns(self, limit: int) -> list[Moment]:
        """Return the times that are drawn.

        Those of the notes, or evenly spaced ones; those that a clip marks are among them.

        Args:
            limit: largest number of columns.
        """
        n_times = [len(strip.values) for line in self.lines for strip in line.strips]
        clip_notes = self.notes.get("clip", {})
        n_spans = clip_notes.get("of", min(n_times))
        cells = clip_notes.get("shown", range(n_spans))
        marked = {
            int(line.mark[0] * n_spans) for line in self.lines if line.mark is not None
        }
        return [Moment(k, n_spans) for k in evenly_with(cells, max(limit, 1), marked)]

    def _time_sentences(self, columns: Sequence[Moment]) -> list[str]:
        """Return the caption's sentences on the times."""
        sentences = []
        order = self.notes.get("clip", {}).get("time", "")
        if order in TIMES:
            sentences.append(TIMES[order])
        if len(columns) < columns[0].of:
            sentences.append("evenly spaced times; the table has all")
        return sentences

    def _image_notes(self, image: str) -> Mapping[str, Any]:
        """Return the notes on a clip, empty for a mean over clips."""
        if not image:
            return {}
        notes: Mapping[str, Any] = self.notes.get("images", {}).get(image, {})
        return notes

    def _tile(self, image: str) -> tuple[float, float]:
        """Return width and height of a clip's tiles in ems."""
        aspect = float(self._image_notes(image).get("aspect", 1.0))
        return within(self._side, self._side * TALLEST, aspect)

    def _head(self, line: ClipLine) -> float:
        """Return the ems of the clip's name, its frames' numbers and seconds above the tiles."""
        n_lines = 1
        if line.title:
            n_lines += 1
        if "seconds" in self._image_notes(line.image):
            n_lines += 1
        return TITLE * n_lines

    def _height(self, line: ClipLine) -> float:
        """Return the ems of a clip with its text and the room below."""
        _, tall = self._tile(line.image)
        n_rows = len(line.strips) + self.photos
        return self._head(line) + n_rows * (tall + GAP) - GAP + LINE_GAP

    def _draw_line(
        self,
        box: Box,
        line: ClipLine,
        columns: Sequence[Moment],
        top: float,
        start: float,
        name_stores: bool,
    ) -> AxesImage | None:
        """Draw a clip: its name, the times, its frames, and its strips below one another.

        Args:
            box: the figure.
            line: the clip.
            columns: the times that are drawn.
            top: ems from the figure's upper edge to the clip.
            start: ems from its left edge to the first tile.
            name_stores: whether the stores' names stand at the left of their strips.

        Returns:
            The last map, for the colour bar.
        """
        notes = self._image_notes(line.image)
        wide, tall = self._tile(line.image)
        seen = notes.get("frame", WHOLE)
        step = self._side + GAP
        n_frames = int(self.notes.get("clip", {}).get("frames", columns[0].of))
        at = self._write_head(box, line, columns, top, start)
        lefts = [start + k * step + (self._side - wide) / 2 for k in range(len(columns))]
        if self.photos:
            for left, moment in zip(lefts, columns, strict=True):
                frame = box.frame(left, at, wide, tall, seen)
                picture = notes.get("pictures", {}).get(str(moment.at(n_frames)))
                frame.picture(picture, notes.get("edges", WHOLE), "no\npicture")
                if line.mark:
                    time, y, x = line.mark
                    if int(time * moment.of) == moment.cell:
                        frame.cross(y, x)
            at += tall + GAP
        last_map = None
        store_before = None
        for strip in line.strips:
            name = _name_in_lines(strip.title, int(NAMES / LETTER))
            box.text(start - 0.6, at + tall / 2, name, ha="right")
            # Once per store, beside all of its strips.
            if name_stores and strip.store != store_before:
                n_strips = sum(other.store == strip.store for other in line.strips)
                middle = at + (n_strips * (tall + GAP) - GAP) / 2
                store_name = shorten(strip.store, max(6, int(n_strips * tall * 1.6)))
                box.text(MARGIN + 0.4, middle, store_name, ha="center", rotation=90)
            store_before = strip.store
            for left, moment in zip(lefts, columns, strict=True):
                # Layers may have more places in time than columns: the one in the middle.
                k = moment.at(len(strip.values))
                cell = None
                if strip.cell is not None and strip.cell[0] == k:
                    cell = (strip.cell[1], strip.cell[2])
                tile = Map("", strip.values[k], strip.edges, cell)
                last_map = box.frame(left, at, wide, tall, seen).map(tile, self.look)
            at += tall + GAP
        return last_map

    def _write_head(
        self,
        box: Box,
        line: ClipLine,
        columns: Sequence[Moment],
        top: float,
        start: float,
    ) -> float:
        """Write a clip's name and the frames and seconds of its columns.

        Args:
            box: the figure.
            line: the clip.
            columns: the times that are drawn.
            top: ems from the figure's upper edge to the clip.
            start: ems from its left edge to the first tile.

        Returns:
            Ems from the figure's upper edge to the first tiles.
        """
        step = self._side + GAP
        n_frames = int(self.notes.get("clip", {}).get("frames", columns[0].of))
        # Texts are centred on their height, tiles begin at it.
        at = top + TITLE / 2
        if line.title:
            letters = int((len(columns) * step + NAMES) / LETTER)
            box.text(MARGIN, at, shorten(line.title, letters), fontsize=medium().font)
            at += TITLE
        box.text(start - 0.6, at, "frame", ha="right", color=GREY)
        for k, moment in enumerate(columns):
            middle = start + k * step + self._side / 2
            box.text(middle, at, moment.frames(n_frames), ha="center")
        at += TITLE
        seconds = self._image_notes(line.image).get("seconds")  # between sampled frames
        if seconds:
            box.text(start - 0.6, at, "seconds", ha="right", color=GREY)
            for k, moment in enumerate(columns):
                middle = start + k * step + self._side / 2
                time = moment.cell * n_frames / moment.of * float(seconds)
                box.text(middle, at, f"{time:.2f}", ha="center")
            at += TITLE
        return at - TITLE / 2


def _name_in_lines(title: str, letters: int) -> str:
    """Return a layer's name in lines of so many letters, broken at commas: `block 3, time`."""
    lines: list[str] = []
    for line in title.split("\n"):
        if len(line) > letters:
            lines += line.split(", ")
        else:
            lines.append(line)
    return "\n".join(shorten(line, letters) for line in lines)


def of_clips(rows: pl.DataFrame) -> bool:
    """Return whether the cells of a table are those of clips."""
    return "frame" in rows.columns and rows["frame"].null_count() < len(rows)
