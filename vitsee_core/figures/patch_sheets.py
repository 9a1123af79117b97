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

MAX_ACROSS = 13  # maps side by side
MAX_LAYERS = 6  # of a store, below one another
TALLEST = 1.5  # a map's height over its width, above which it gets narrower
LETTERS = 1.85  # of the caption, per em
# Lengths in ems.
TILE = 6.5  # width of a map, and of a photograph beside the maps of one store
PHOTO = 8.5  # width of a photograph beside the maps of several stores
MARGIN = 0.8
GAP = 0.5  # between maps
LINE_GAP = 0.8  # between the lines of two images
TITLE = 1.3  # height of a line of text above a map
LABEL = 1.7  # width of the names of stores
FOOT = 1.8  # with room for the note on few images
BAR = 7.0  # the colour bar with its label
MARK = "#FF3B30"
WHOLE = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Map:
    """One map of an image.

    Attributes:
        title: text above it.
        values: (rows, cols), or colours (rows, cols, 4).
        edges: top, left, bottom and right of the grid, as shares of the image.
        cell: (row, col) of a cell to frame, None for none.
    """

    title: str
    values: Float
    edges: Sequence[float]
    cell: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SheetLine:
    """One image of a sheet: a photograph and its maps.

    Attributes:
        image: the image's name in the notes.
        title: text above the photograph.
        maps: each store's label and its maps.
        mark: (y, x) of a cross on the photograph, as shares of the image; None for none.
    """

    image: str
    title: str
    maps: Sequence[tuple[str, Sequence[Map]]]
    mark: tuple[float, float] | None = None


@dataclass
class Sheet:
    """A figure of images below one another, each with its maps at the right.

    Attributes:
        lines: the images.
        about: image -> its notes (`aspect`, `frame`, `picture`, `edges`).
        caption: texts at the foot.
        look: keywords of matplotlib's `imshow`, for the maps' colours.
        bar: label of the colour bar; None for no bar.
        photos: whether photographs are drawn.
    """

    lines: Sequence[SheetLine]
    about: Mapping[str, Any]
    caption: Sequence[str]
    look: Mapping[str, Any] = field(default_factory=dict)
    bar: str | None = None
    photos: bool = True

    def draw(self) -> Figure:
        """Return the figure. Call it inside a function decorated with `styled`."""
        has_several_stores = self._has_several_stores()
        across = max(len(tiles) for line in self.lines for _, tiles in line.maps)
        start = MARGIN  # ems from the left edge to the first map
        if self.photos:
            start += self._photo_width() + 1.0
        if has_several_stores:
            start += LABEL
        width = start + across * (TILE + GAP) + MARGIN
        heights = [self._height(line, first=k == 0) for k, line in enumerate(self.lines)]

        def draw_line(box: Box, k: int, top: float) -> AxesImage | None:
            """Draw the k-th image from `top` ems on; return its last map."""
            return self._draw_line(
                box,
                self.lines[k],
                top,
                start,
                first=k == 0,
                name_stores=has_several_stores,
            )

        bar = Bar(self.bar, self._head(True), math.inf) if self.bar else None
        return draw_sheet(width, heights, self.caption, draw_line, bar)

    def _has_several_stores(self) -> bool:
        """Return whether there are several stores, which are then named."""
        return len({store for line in self.lines for store, _ in line.maps}) > 1

    def _head(self, first: bool) -> float:
        """Return the ems of the text above a photograph and its first maps.

        Only the first image has titles above its maps; the others have the photograph's.
        """
        if first:
            return TITLE * max(self._titles(), 1)
        return TITLE * self.photos

    def _height(self, line: SheetLine, first: bool) -> float:
        """Return the ems of an image's line, with the text above it and the room below."""
        maps = len(line.maps) * (self._tile(line.image)[1] + GAP) - GAP
        if first:
            maps += (len(line.maps) - 1) * TITLE * self._titles()
        photo = self._photo(line.image)[1] * self.photos
        return self._head(first) + max(maps, photo) + LINE_GAP

    def _titles(self) -> int:
        """Return the number of lines of the longest title above a map."""
        texts = [tile.title for _, tiles in self.lines[0].maps for tile in tiles]
        return max((text.count("\n") + 1 for text in texts), default=0)

    def _tile(self, image: str) -> tuple[float, float]:
        """Return width and height of an image's maps in ems."""
        return within(TILE, TILE * TALLEST, self._aspect(image))

    def _photo(self, image: str) -> tuple[float, float]:
        """Return width and height of an image's photograph in ems."""
        width = self._photo_width()
        return within(width, width * TALLEST, self._aspect(image))

    def _photo_width(self) -> float:
        """Return the largest width of a photograph in ems: larger beside several stores."""
        return PHOTO if self._has_several_stores() else TILE

    def _aspect(self, image: str) -> float:
        """Return an image's height over its width."""
        return float(self.about.get(image, {}).get("aspect", 1.0))

    def _draw_line(
        self,
        box: Box,
        line: SheetLine,
        top: float,
        start: float,
        *,
        first: bool,
        name_stores: bool,
    ) -> AxesImage | None:
        """Draw an image: its photograph, and its maps at the right, stores below one another.

        Args:
            box: the figure.
            line: the image.
            top: ems from the figure's upper edge to the line.
            start: ems from its left edge to the first map.
            first: whether it is the first image, whose maps have titles.
            name_stores: whether the stores' names stand beside their maps.

        Returns:
            The last map, for the colour bar.
        """
        about = self.about.get(line.image, {})
        seen = about.get("frame", WHOLE)
        wide, tall = self._tile(line.image)
        at = top + self._head(first)
        last_map = None
        if self.photos:
            photo_width, photo_height = self._photo(line.image)
            left = MARGIN + (self._photo_width() - photo_width) / 2
            frame = box.frame(left, at, photo_width, photo_height, seen)
            letters = int(self._photo_width() / 0.56)  # a small letter is 0.56 em wide
            frame.title(shorten(line.title, letters))
            frame.picture(about.get("picture"), about.get("edges", WHOLE), "no picture")
            if line.mark is not None:
                y, x = line.mark
                frame.cross(y, x)
        for i, (store, tiles) in enumerate(line.maps):
            if first and i:
                at += TITLE * self._titles()
            if name_stores:
                name = shorten(store, max(6, int(tall * 1.9)))
                box.text(start - 0.9, at + tall / 2, name, rotation=90, ha="center")
            for k, tile in enumerate(tiles):
                left = start + k * (TILE + GAP) + (TILE - wide) / 2
                frame = box.frame(left, at, wide, tall, seen)
                last_map = frame.map(tile, self.look)
                if first:
                    frame.title(tile.title)
            at += tall + GAP
        return last_map


@dataclass(frozen=True)
class Bar:
    """The colour bar of a sheet, at its right.

    Attributes:
        label: text along it.
        head: ems from the first line's upper edge to its first maps, where the bar begins.
        longest: ems that it may be long.
        gap: ems below the last line's maps.
    """

    label: str
    head: float
    longest: float
    gap: float = LINE_GAP


def draw_sheet(
    width: float,
    heights: Sequence[float],
    caption: Sequence[str],
    draw_line: Callable[[Box, int, float], AxesImage | None],
    bar: Bar | None,
) -> Figure:
    """Return a figure of lines below one another, with a caption at its foot.

    Args:
        width: ems of the lines' width.
        heights: ems of each line's height.
        caption: texts, broken into lines here.
        draw_line: draws a line into the box, given its number and the ems above it; returns its
            last map, or None.
        bar: the colour bar of the last map; None for no bar.
    """
    figure_width = max(width + (BAR if bar else 0.0), 26.0)
    texts: list[str] = []
    for text in caption:
        texts += wrap(text, int(figure_width * LETTERS))
    figure_height = MARGIN + sum(heights) + 1.25 * len(texts) + FOOT
    figure = new_figure(em(figure_width), em(figure_height))
    figure.set_layout_engine("none")  # everything has its place already
    box = Box.on(figure, (figure_width, figure_height))
    image = None
    top = MARGIN
    for k, tall in enumerate(heights):
        image = draw_line(box, k, top) or image
        top += tall
    if bar is not None and image is not None:
        tall = min(max(sum(heights) - bar.head - bar.gap, 6.0), bar.longest)
        x, y = box.figure_point(width, MARGIN + bar.head + tall)
        bar_axes = figure.add_axes((x, y, 0.8 / figure_width, tall / figure_height))
        colour_bar = figure.colorbar(image, cax=bar_axes)
        colour_bar.set_label(bar.label)
        colour_bar.outline.set_linewidth(0.5)  # type: ignore[operator]
    for k, text in enumerate(texts):
        box.text(MARGIN, top + 0.6 + 1.25 * k, text, color=GREY)
    return figure


@dataclass(frozen=True)
class Box:
    """A figure whose points are named in ems from its upper left corner.

    Attributes:
        figure: the figure.
        size: width and height in ems that it was laid out for; it is stretched if its real size is
            another.
        panel: axes that cover the figure and count in these ems. They hold all pictures, as axes of
            their own for each would take ten times as long to draw.
    """

    figure: Figure
    size: tuple[float, float]
    panel: Axes

    @classmethod
    def on(cls, figure: Figure, size: tuple[float, float]) -> Box:
        """Return a box that covers an empty figure."""
        panel = figure.add_axes((0, 0, 1, 1), xticks=[], yticks=[])
        panel.set(xlim=(0, size[0]), ylim=(size[1], 0), autoscale_on=False)
        panel.set_axis_off()
        return cls(figure, size, panel)

    def figure_point(self, left: float, top: float) -> tuple[float, float]:
        """Return a point in matplotlib's coordinates: shares of the figure from its lower left."""
        width, height = self.size
        return left / width, 1 - top / height

    def text(self, left: float, top: float, text: str, **look: Any) -> None:
        """Write a small text, by default with its middle at this height.

        Args:
            left: ems from the left edge.
            top: ems from the upper edge.
            text: what is written.
            look: keywords of matplotlib's `text`.
        """
        x, y = self.figure_point(left, top)
        self.figure.text(x, y, text, **{"fontsize": small(), "va": "center", **look})

    def frame(
        self, left: float, top: float, wide: float, tall: float, seen: Sequence[float]
    ) -> Frame:
        """Draw a frame for a part of an image, and return it.

        Args:
            left: ems from the left edge.
            top: ems from the upper edge.
            wide: ems of its width.
            tall: ems of its height.
            seen: top, left, bottom and right of the part, as shares of the image.
        """
        from matplotlib.patches import Rectangle

        look: dict[str, Any] = {
            "fill": False,
            "edgecolor": GREY,
            "linewidth": 0.4,
            "zorder": 2.5,
        }
        rectangle = Rectangle((left, top), wide, tall, **look)
        self.panel.add_patch(rectangle)
        return Frame(self, rectangle, seen)


@dataclass(frozen=True)
class Frame:
    """A frame on a sheet that shows a part of an image.

    Attributes:
        box: the figure.
        rectangle: the frame, in ems.
        seen: top, left, bottom and right of the part, as shares of the image.
    """

    box: Box
    rectangle: Rectangle
    seen: Sequence[float]

    def point(self, y: float, x: float) -> tuple[float, float]:
        """Return the ems from the figure's left and upper edge of a point on the image."""
        left, top = self.rectangle.get_xy()
        wide, tall = self.rectangle.get_bbox().size
        y0, x0, y1, x1 = self.seen
        return left + (x - x0) / (x1 - x0) * wide, top + (y - y0) / (y1 - y0) * tall

    def title(self, text: str) -> None:
        """Write a text above the frame."""
        left, top = self.rectangle.get_xy()
        middle = left + self.rectangle.get_width() / 2
        baseline = top - 3 / medium().font  # 3 points higher
        look: dict[str, Any] = {"ha": "center", "va": "baseline", "linespacing": 1.1}
        self.box.text(middle, baseline, text, **look)

    def picture(self, picture: str | None, edges: Sequence[float], missing: str) -> None:
        """Draw a picture of the notes, or write that there is none.

        Args:
            picture: PNG in base64, or None.
            edges: top, left, bottom and right of the picture, as shares of the image.
            missing: what is written without a picture.
        """
        if picture is None:
            x, y = self.rectangle.get_center()
            self.box.text(x, y, missing, ha="center", color=GREY)
            return
        pixels = decode(picture)
        # Pixels of tiny pictures stay squares, rather than being blurred.
        interpolation = "nearest" if max(pixels.shape[:2]) < 64 else "antialiased"
        self._draw_image(pixels, edges, interpolation=interpolation)

    def map(self, tile: Map, look: Mapping[str, Any]) -> AxesImage:
        """Draw a map, with a red frame around the cell that it names, and return its image."""
        from matplotlib.patches import Rectangle

        if tile.cell is not None:
            top, left, bottom, right = tile.edges
            rows, cols = tile.values.shape[:2]
            tall = (bottom - top) / rows
            wide = (right - left) / cols
            y = top + tile.cell[0] * tall
            x = left + tile.cell[1] * wide
            x0, y0 = self.point(y, x)
            x1, y1 = self.point(y + tall, x + wide)
            edge: dict[str, Any] = {"fill": False, "edgecolor": MARK, "linewidth": 1.1}
            cell = Rectangle((x0, y0), x1 - x0, y1 - y0, **edge)
            self.box.panel.add_patch(cell).set_clip_path(self.rectangle)
        return self._draw_image(tile.values, tile.edges, **look)

    def cross(self, y: float, x: float) -> None:
        """Draw a red cross with a white edge at a point of the image."""
        left, top = self.point(y, x)
        for colour, linewidth in (("white", 2.6), (MARK, 1.3)):
            look: dict[str, Any] = {
                "color": colour,
                "markersize": 9,
                "markeredgewidth": linewidth,
            }
            (line,) = self.box.panel.plot([left], [top], "+", **look)
            line.set_clip_path(self.rectangle)

    def _draw_image(
        self, pixels: NDArray[Any], edges: Sequence[float], **look: Any
    ) -> AxesImage:
        """Draw pixels at their edges on the image, cut off at the frame."""
        y0, x0, y1, x1 = edges
        left, top = self.point(y0, x0)
        right, bottom = self.point(y1, x1)
        image = self.box.panel.imshow(
            pixels,
            extent=(left, right, bottom, top),
            origin="upper",
            aspect="auto",
            **look,
        )
        image.set_clip_path(self.rectangle)
        return image


def within(width: float, height: float, aspect: float) -> tuple[float, float]:
    """Return width and height of the largest picture within a box.

    Args:
        width: the box' width.
        height: the box' height.
        aspect: the picture's height over its width.
    """
    if width * aspect <= height:
        return (width, width * aspect)
    return (height / aspect, height)


def shown_sites(rows: pl.DataFrame, *, bar: bool = True) -> dict[str, list[str]]:
    """Return the sites of each store that are drawn side by side.

    Args:
        rows: a table's rows.
        bar: whether a colour bar stands beside the maps.
    """
    maps_width = room() - PHOTO - BAR * bar - 5
    return shown_layers(rows, min(MAX_ACROSS, int(maps_width / (TILE + GAP))))


def shown_layers(rows: pl.DataFrame, limit: int = MAX_LAYERS) -> dict[str, list[str]]:
    """Return the sites of each store that are drawn: all, or evenly spaced ones.

    The first and the last are among them.

    Args:
        rows: a table's rows.
        limit: largest number of sites; by default as many as below one another.
    """
    pairs = rows.select("store", "site").unique(maintain_order=True)
    return {
        store: evenly(store_rows["site"].to_list(), limit)
        for (store,), store_rows in pairs.group_by("store", maintain_order=True)
    }


def of_sites(rows: pl.DataFrame, sites: Mapping[str, Sequence[str]]) -> pl.DataFrame:
    """Return the rows about sites that any store draws.

    Args:
        rows: a table's rows.
        sites: store -> its drawn sites.
    """
    drawn_sites: set[str] = set()
    for store_sites in sites.values():
        drawn_sites |= set(store_sites)
    return rows.filter(pl.col("site").is_in(drawn_sites))


def grid_of(
    rows: pl.DataFrame, sheet: Mapping[str, Any], site: str, image: str
) -> tuple[Any, Any]:
    """Return shape and edges of a site's grid on an image.

    The shape is (rows, cols), of clips (frames, rows, cols). Without notes the grid reaches as far
    as the table has cells, and covers the image.

    Args:
        rows: rows of one store.
        sheet: the table's notes on its sheet, as `describe_sheet` makes them.
        site: the site.
        image: the image's name.
    """
    store = str(rows["store"][0])
    grid = sheet.get("grids", {}).get(store, {}).get(site, {})
    shape = grid.get("shape")
    if not shape:
        largest = rows.select(places_in(rows)).max().row(0)
        shape = [index + 1 for index in largest]
    return shape, grid.get("edges", {}).get(image, WHOLE)


def thinned(rows: pl.DataFrame, sites: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a sentence for the caption if not all sites are drawn, as a list of none or one."""
    n_sites = rows.group_by("store").agg(pl.col("site").n_unique())
    if any(n > len(sites[store]) for store, n in n_sites.rows()):
        return ["evenly spaced layers; the table has all"]
    return []


def places_in(rows: pl.DataFrame) -> list[str]:
    """Return the columns that say where a cell is: row and col, of clips frame before them."""
    in_time = "frame" in rows.columns and rows["frame"].null_count() < len(rows)
    return ["frame", "row", "col"] if in_time else ["row", "col"]


def place_values(rows: pl.DataFrame, shape: Sequence[int]) -> Float:
    """Return the values of cells as an array of this shape, NaN where a cell has no row.

    Args:
        rows: one map's rows.
        shape: (rows, cols), of clips (frames, rows, cols).
    """
    values = np.full(tuple(shape), np.nan)
    indices = tuple(rows[name].to_numpy() for name in places_in(rows))
    values[indices] = rows["value"].to_numpy()
    return values


def layer_name(site: str) -> str:
    """Return a site as a title that is no wider than a map."""
    return shorten(site_words(site), int(TILE / 0.56))
