"""Sheets of maps of patches beside photographs: images in lines, models below one another, layers
across. From the columns of the tables of `vitsee pca` and `vitsee cosine-map` and their notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.figures.panels import em, evenly, medium, new_figure, room, small
from vitsee_core.figures.plotting import GREY
from vitsee_core.images.embedded_pictures import decode
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.patches import Rectangle

MOST_ACROSS = 13
MOST_LAYERS = 6  # of a store, below one another
TILE = 6.5  # ems of a map's width, and of a photograph's beside one store's maps
TALLEST = 1.5  # of a map's height over its width, before it gets narrower
PHOTO = 8.5  # ems
# ems
MARGIN = 0.8
GAP = 0.5
LINE_GAP = 0.8
TITLE = 1.3
LABEL = 1.7
LETTERS = 1.85  # of the caption, per em
FOOT = 1.8  # ems, with room for the note on few images
BAR = 7.0  # ems of the colour bar with its label
MARK = "#FF3B30"
WHOLE = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Map:
    """One tile. values: (rows, cols) or (rows, cols, 4). edges: top, left, bottom, right of the
    grid on the image. cell: (row, col) to frame."""

    title: str
    values: Float
    edges: Sequence[float]
    cell: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SheetLine:
    """One photograph and what is mapped of it. maps: a store's label and its tiles. mark: (y, x) on
    the photograph."""

    image: str
    title: str
    maps: Sequence[tuple[str, Sequence[Map]]]
    mark: tuple[float, float] | None = None


@dataclass
class Sheet:
    """Lines of maps, laid out in ems from the upper left corner. about: image -> what the notes
    say of it. look: colours of the maps; bar: what the colour bar says."""

    lines: Sequence[SheetLine]
    about: Mapping[str, Any]
    caption: Sequence[str]
    look: Mapping[str, Any] = field(default_factory=dict)
    bar: str | None = None
    photos: bool = True

    def draw(self) -> Figure:
        """The figure; call it inside a function decorated with `styled`."""
        several = self._several()
        across = max(len(tiles) for line in self.lines for _, tiles in line.maps)
        start = MARGIN + (self._photo_width() + 1.0) * self.photos + LABEL * several
        width = start + across * (TILE + GAP) + MARGIN
        heights = [self._height(line, first=not k) for k, line in enumerate(self.lines)]

        def draw_line(box: Box, k: int, top: float) -> AxesImage | None:
            return self._draw_line(
                box, self.lines[k], top, start, first=not k, named=several
            )

        bar = Bar(self.bar, self._head(True), math.inf) if self.bar else None
        return draw_sheet(width, heights, self.caption, draw_line, bar)

    def _several(self) -> bool:
        """Whether there are several stores, which are then named."""
        return len({store for line in self.lines for store, _ in line.maps}) > 1

    def _head(self, first: bool) -> float:
        """Ems of the text above a photograph and its first maps."""
        if first:
            return TITLE * max(self._titles(), 1)
        return TITLE * self.photos

    def _height(self, line: SheetLine, first: bool) -> float:
        """Ems of a line of images, with the text above it and the room below."""
        maps = len(line.maps) * (self._tile(line.image)[1] + GAP) - GAP
        if first:
            maps += (len(line.maps) - 1) * TITLE * self._titles()
        photo = self._photo(line.image)[1] * self.photos
        return self._head(first) + max(maps, photo) + LINE_GAP

    def _titles(self) -> int:
        texts = [tile.title for _, tiles in self.lines[0].maps for tile in tiles]
        return max((text.count("\n") + 1 for text in texts), default=0)

    def _tile(self, image: str) -> tuple[float, float]:
        return within(TILE, TILE * TALLEST, self._aspect(image))

    def _photo(self, image: str) -> tuple[float, float]:
        width = self._photo_width()
        return within(width, width * TALLEST, self._aspect(image))

    def _photo_width(self) -> float:
        """The width of a photograph in ems: that of a map beside one store, larger beside
        several."""
        return PHOTO if self._several() else TILE

    def _aspect(self, image: str) -> float:
        return float(self.about.get(image, {}).get("aspect", 1.0))

    def _draw_line(
        self,
        box: Box,
        line: SheetLine,
        top: float,
        start: float,
        *,
        first: bool,
        named: bool,
    ) -> AxesImage | None:
        about = self.about.get(line.image, {})
        seen = about.get("frame", WHOLE)
        wide, tall = self._tile(line.image)
        at = top + self._head(first)
        last = None
        if self.photos:
            photo = self._photo(line.image)
            left = MARGIN + (self._photo_width() - photo[0]) / 2
            place = box.place(left, at, *photo, seen)
            place.title(
                shorten(line.title, int(self._photo_width() / 0.56))
            )  # as wide as it is
            place.picture(about.get("picture"), about.get("edges", WHOLE), "no picture")
            if line.mark is not None:
                place.cross(*line.mark)
        for i, (store, tiles) in enumerate(line.maps):
            at += TITLE * self._titles() if first and i else 0.0
            if named:
                name = shorten(store, max(6, int(tall * 1.9)))
                box.text(start - 0.9, at + tall / 2, name, rotation=90, ha="center")
            for k, tile in enumerate(tiles):
                left = start + k * (TILE + GAP) + (TILE - wide) / 2
                place = box.place(left, at, wide, tall, seen)
                last = place.map(tile, self.look)
                if first:
                    place.title(tile.title)
            at += tall + GAP
        return last


@dataclass(frozen=True)
class Bar:
    """The colour bar of a sheet, at its right. head: ems above the first maps, where it begins;
    longest: ems."""

    label: str
    head: float
    longest: float
    gap: float = LINE_GAP  # below the last line


def draw_sheet(
    width: float,
    heights: Sequence[float],
    caption: Sequence[str],
    draw_line: Callable[[Box, int, float], AxesImage | None],
    bar: Bar | None,
) -> Figure:
    """A figure of lines below one another, with a caption at its foot.

    Args:
        width: of the lines, in ems.
        heights: of each line, in ems.
        caption: texts, broken here.
        draw_line: draws the line of a number, from this many ems on; gives the last map, if any.
        bar: the colour bar of the last map.
    """
    total = max(width + (BAR if bar else 0.0), 26.0)
    texts = [part for text in caption for part in wrap(text, int(total * LETTERS))]
    size = total, MARGIN + sum(heights) + 1.25 * len(texts) + FOOT
    figure = new_figure(em(size[0]), em(size[1]))
    figure.set_layout_engine("none")
    box = Box.of(figure, size)
    image = None
    top = MARGIN
    for k, tall in enumerate(heights):
        image = draw_line(box, k, top) or image
        top += tall
    if bar is not None and image is not None:
        tall = min(max(sum(heights) - bar.head - bar.gap, 6.0), bar.longest)
        x, y = box.at(width, MARGIN + bar.head + tall)
        drawn = figure.colorbar(
            image, cax=figure.add_axes((x, y, 0.8 / size[0], tall / size[1]))
        )
        drawn.set_label(bar.label)
        drawn.outline.set_linewidth(0.5)  # type: ignore[operator]
    for k, text in enumerate(texts):
        box.text(MARGIN, top + 0.6 + 1.25 * k, text, color=GREY)
    return figure


@dataclass(frozen=True)
class Box:
    """A figure in ems from its upper left corner, were it of the `size` it was laid out for. panel:
    all of it, in these ems; it has all pictures, as a panel takes ten times as long as an image."""

    figure: Figure
    size: tuple[float, float]
    panel: Axes

    @classmethod
    def of(cls, figure: Figure, size: tuple[float, float]) -> Box:
        panel = figure.add_axes((0, 0, 1, 1), xticks=[], yticks=[])
        panel.set(xlim=(0, size[0]), ylim=(size[1], 0), autoscale_on=False)
        panel.set_axis_off()
        return cls(figure, size, panel)

    def at(self, left: float, top: float) -> tuple[float, float]:
        width, height = self.size
        return left / width, 1 - top / height

    def text(self, left: float, top: float, text: str, **look: Any) -> None:
        self.figure.text(
            *self.at(left, top), text, **{"fontsize": small(), "va": "center", **look}
        )

    def place(
        self, left: float, top: float, wide: float, tall: float, seen: Sequence[float]
    ) -> Place:
        """A framed place, in ems, for the part of an image within its edges `seen`."""
        from matplotlib.patches import Rectangle

        look: dict[str, Any] = {
            "fill": False,
            "edgecolor": GREY,
            "linewidth": 0.4,
            "zorder": 2.5,
        }
        frame = Rectangle((left, top), wide, tall, **look)
        self.panel.add_patch(frame)
        return Place(self, frame, seen)


@dataclass(frozen=True)
class Place:
    """A place of a sheet that shows a part of an image. seen: top, left, bottom and right of it."""

    box: Box
    frame: Rectangle
    seen: Sequence[float]

    def at(self, y: float, x: float) -> tuple[float, float]:
        """Ems from the left and from the top of a place on the image."""
        (left, top), wide, tall = self.frame.get_xy(), *self.frame.get_bbox().size
        y0, x0, y1, x1 = self.seen
        return left + (x - x0) / (x1 - x0) * wide, top + (y - y0) / (y1 - y0) * tall

    def title(self, text: str) -> None:
        """Write above it."""
        left, top = self.frame.get_xy()
        above = top - 3 / medium().font
        look: dict[str, Any] = {"ha": "center", "va": "baseline", "linespacing": 1.1}
        self.box.text(left + self.frame.get_width() / 2, above, text, **look)

    def picture(self, picture: str | None, edges: Sequence[float], missing: str) -> None:
        """Draw a picture of the notes at its edges, or say what is missing."""
        if picture is None:
            x, y = self.frame.get_center()
            self.box.text(x, y, missing, ha="center", color=GREY)
            return
        pixels = decode(picture)
        smooth = "nearest" if max(pixels.shape[:2]) < 64 else "antialiased"
        self._image(pixels, edges, interpolation=smooth)

    def map(self, tile: Map, look: Mapping[str, Any]) -> AxesImage:
        """Draw a map; its cell, if it names one, in a red frame."""
        from matplotlib.patches import Rectangle

        if tile.cell is not None:
            top, left, bottom, right = tile.edges
            rows, cols = tile.values.shape[:2]
            tall = (bottom - top) / rows
            wide = (right - left) / cols
            y = top + tile.cell[0] * tall
            x = left + tile.cell[1] * wide
            (x0, y0), (x1, y1) = self.at(y, x), self.at(y + tall, x + wide)
            edge: dict[str, Any] = {"fill": False, "edgecolor": MARK, "linewidth": 1.1}
            cell = Rectangle((x0, y0), x1 - x0, y1 - y0, **edge)
            self.box.panel.add_patch(cell).set_clip_path(self.frame)
        return self._image(tile.values, tile.edges, **look)

    def cross(self, y: float, x: float) -> None:
        """A red cross with a white edge."""
        for colour, size in (("white", 2.6), (MARK, 1.3)):
            look: dict[str, Any] = {
                "color": colour,
                "markersize": 9,
                "markeredgewidth": size,
            }
            (line,) = self.box.panel.plot(*([one] for one in self.at(y, x)), "+", **look)
            line.set_clip_path(self.frame)

    def _image(
        self, pixels: NDArray[Any], edges: Sequence[float], **look: Any
    ) -> AxesImage:
        (left, top), (right, bottom) = self.at(*edges[:2]), self.at(*edges[2:])
        flat: dict[str, Any] = {"origin": "upper", "aspect": "auto"}
        image = self.box.panel.imshow(
            pixels, extent=(left, right, bottom, top), **flat, **look
        )
        image.set_clip_path(self.frame)
        return image


def within(width: float, height: float, aspect: float) -> tuple[float, float]:
    """Width and height of the largest picture of this height over width within a box."""
    if width * aspect <= height:
        return (width, width * aspect)
    return (height / aspect, height)


def shown_sites(rows: pl.DataFrame, *, bar: bool = True) -> dict[str, list[str]]:
    """The sites of each store that are drawn side by side. bar: whether a colour bar stands beside
    them."""
    most = min(MOST_ACROSS, int((room() - PHOTO - BAR * bar - 5) / (TILE + GAP)))
    return shown_layers(rows, most)


def shown_layers(rows: pl.DataFrame, most: int = MOST_LAYERS) -> dict[str, list[str]]:
    """The sites of each store that are drawn: all, or evenly spaced ones with the first and the
    last; by default as many as below one another."""
    each = rows.select("store", "site").unique(maintain_order=True)
    return {
        store: evenly(own["site"].to_list(), most)
        for (store,), own in each.group_by("store", maintain_order=True)
    }


def of_sites(rows: pl.DataFrame, sites: Mapping[str, Sequence[str]]) -> pl.DataFrame:
    """The rows about sites that are drawn: fewer to look through."""
    return rows.filter(
        pl.col("site").is_in({site for own in sites.values() for site in own})
    )


def grid_of(
    rows: pl.DataFrame, sheet: Mapping[str, Any], site: str, image: str
) -> tuple[Any, Any]:
    """(rows, cols), of clips (frames, rows, cols), and edges of a site's grid on an image, from the
    notes; else as far as there are cells, over the whole image."""
    own = sheet.get("grids", {}).get(str(rows["store"][0]), {}).get(site, {})
    shape = own.get("shape") or [
        largest + 1 for largest in rows.select(places_in(rows)).max().row(0)
    ]
    return shape, own.get("edges", {}).get(image, WHOLE)


def thinned(rows: pl.DataFrame, sites: Mapping[str, Sequence[str]]) -> list[str]:
    """A line of the caption where some of the stores' sites are not drawn."""
    every = rows.group_by("store").agg(pl.col("site").n_unique())
    some = any(n > len(sites[store]) for store, n in every.rows())
    return ["evenly spaced layers; the table has all"] if some else []


def places_in(rows: pl.DataFrame) -> list[str]:
    """The columns that say where a cell is: row and col, of clips frame before them."""
    in_time = "frame" in rows.columns and rows["frame"].null_count() < len(rows)
    return ["frame", "row", "col"] if in_time else ["row", "col"]


def place_values(rows: pl.DataFrame, shape: Sequence[int]) -> Float:
    """(rows, cols), of clips (frames, rows, cols): values of the cells, NaN where there is none."""
    found = np.full(tuple(shape), np.nan)
    found[tuple(rows[name].to_numpy() for name in places_in(rows))] = rows[
        "value"
    ].to_numpy()
    return found


def layer_name(site: str) -> str:
    """A site as a short title."""
    return shorten(site_words(site), int(TILE / 0.56))
