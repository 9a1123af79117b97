"""Sheets of maps of patches beside photographs: images in lines, models below one another, layers
across. From the columns of the tables of `vitsee pca` and `vitsee cosine-map` and their notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from vitsee_core.figures.panels import em, evenly, new_figure, room, small
from vitsee_core.figures.plotting import GREY, styled
from vitsee_core.images.embedded_pictures import decode
from vitsee_core.patch_maps.colours import Colours
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words
from vitsee_core.types import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MOST_ACROSS = 13
TILE = 6.5  # ems of a map's width, and of a photograph's beside one store's maps
TALLEST = 1.5  # of a map's height over its width, before it gets narrower
PHOTO = 8.5  # ems
MARGIN, GAP, LINE_GAP, TITLE, LABEL = 0.8, 0.5, 0.8, 1.3, 1.7  # ems
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
    cell: tuple[int, int] | None = None


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
        total = max(width + (BAR if self.bar else 0.0), 26.0)
        caption = [part for text in self.caption for part in wrap(text, int(total * LETTERS))]
        heights = [self._height(line, first=not k) for k, line in enumerate(self.lines)]
        size = total, MARGIN + sum(heights) + 1.25 * len(caption) + FOOT
        figure = new_figure(em(size[0]), em(size[1]))
        figure.set_layout_engine("none")
        box = _Box(figure, size)
        image, top = None, MARGIN
        for k, (line, tall) in enumerate(zip(self.lines, heights, strict=True)):
            image = self._draw_line(box, line, top, start, first=not k, named=several) or image
            top += tall
        if self.bar and image is not None:
            self._draw_bar(box, image, width, sum(heights))
        for k, text in enumerate(caption):
            x, y = box.at(MARGIN, top + 0.6 + 1.25 * k)
            figure.text(x, y, text, fontsize=small(), color=GREY, va="center")
        return figure

    def _several(self) -> bool:
        """Whether there are several stores, which are then named."""
        return len({store for line in self.lines for store, _ in line.maps}) > 1

    def _head(self, first: bool) -> float:
        """Ems of the text above a photograph and its first maps."""
        return TITLE * max(self._titles(), 1) if first else TITLE * self.photos

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
        return _within(TILE, TILE * TALLEST, self._aspect(image))

    def _photo(self, image: str) -> tuple[float, float]:
        width = self._photo_width()
        return _within(width, width * TALLEST, self._aspect(image))

    def _photo_width(self) -> float:
        """The width of a photograph in ems: that of a map beside one store, larger beside
        several."""
        return PHOTO if self._several() else TILE

    def _aspect(self, image: str) -> float:
        return float(self.about.get(image, {}).get("aspect", 1.0))

    def _draw_line(
        self, box: _Box, line: SheetLine, top: float, start: float, *, first: bool, named: bool
    ) -> AxesImage | None:
        wide, tall = self._tile(line.image)
        at, last = top + self._head(first), None
        if self.photos:
            photo = self._photo(line.image)
            axes = box.axes(MARGIN + (self._photo_width() - photo[0]) / 2, at, *photo)
            self._draw_photo(axes, line)
        for i, (store, tiles) in enumerate(line.maps):
            at += TITLE * self._titles() if first and i else 0.0
            if named:
                x, y = box.at(start - 0.9, at + tall / 2)
                box.figure.text(
                    x, y, shorten(store, max(6, int(tall * 1.9))),
                    rotation=90, ha="center", va="center", fontsize=small(),
                )  # fmt: skip
            for k, tile in enumerate(tiles):
                left = start + k * (TILE + GAP) + (TILE - wide) / 2
                axes = box.axes(left, at, wide, tall)
                last = self._draw_tile(axes, line.image, tile)
                if first:
                    axes.set_title(
                        tile.title, fontsize=small(), loc="center", pad=3, linespacing=1.1
                    )
            at += tall + GAP
        return last

    def _draw_photo(self, axes: Axes, line: SheetLine) -> None:
        about = self.about.get(line.image, {})
        axes.set_title(  # as wide as the photograph
            shorten(line.title, int(self._photo_width() / 0.56)),
            fontsize=small(),
            loc="center",
            pad=3,
        )
        _frame(axes, about.get("frame", WHOLE))
        if "picture" not in about:
            look: dict[str, Any] = {
                "ha": "center",
                "va": "center",
                "color": GREY,
                "fontsize": small(),
            }
            axes.text(0.5, 0.5, "no picture", transform=axes.transAxes, **look)
        else:
            pixels = decode(about["picture"])
            smooth = "nearest" if max(pixels.shape[:2]) < 64 else "antialiased"
            axes.imshow(pixels, extent=_extent(about["edges"]), interpolation=smooth, **_FLAT)
        if line.mark is not None:
            y, x = line.mark
            for colour, size in (("white", 2.6), (MARK, 1.3)):
                axes.plot([x], [y], "+", color=colour, markersize=9, markeredgewidth=size)

    def _draw_tile(self, axes: Axes, image: str, tile: Map) -> AxesImage:
        from matplotlib.patches import Rectangle

        _frame(axes, self.about.get(image, {}).get("frame", WHOLE))
        drawn = axes.imshow(tile.values, extent=_extent(tile.edges), **_FLAT, **self.look)
        if tile.cell is not None:
            top, left, bottom, right = tile.edges
            rows, cols = tile.values.shape[:2]
            tall, wide = (bottom - top) / rows, (right - left) / cols
            corner = left + tile.cell[1] * wide, top + tile.cell[0] * tall
            look: dict[str, Any] = {"fill": False, "edgecolor": MARK, "linewidth": 1.1}
            axes.add_patch(Rectangle(corner, wide, tall, **look))
        return drawn

    def _draw_bar(self, box: _Box, image: AxesImage, left: float, height: float) -> None:
        top = MARGIN + self._head(True)
        tall = max(height - self._head(True) - LINE_GAP, 6.0)
        bar = box.figure.colorbar(image, cax=box.axes(left, top, 0.8, tall))
        bar.set_label(str(self.bar))
        bar.outline.set_linewidth(0.5)  # type: ignore[operator]


_FLAT: dict[str, Any] = {"origin": "upper", "aspect": "auto"}


@dataclass(frozen=True)
class _Box:
    """A figure in ems from its upper left corner, were it of the `size` it was laid out for."""

    figure: Figure
    size: tuple[float, float]

    def at(self, left: float, top: float) -> tuple[float, float]:
        width, height = self.size
        return left / width, 1 - top / height

    def axes(self, left: float, top: float, wide: float, tall: float) -> Axes:
        width, height = self.size
        x, y = self.at(left, top + tall)
        return self.figure.add_axes((x, y, wide / width, tall / height))


def _within(width: float, height: float, aspect: float) -> tuple[float, float]:
    """Width and height of the largest picture of this height over width within a box."""
    return (width, width * aspect) if width * aspect <= height else (height / aspect, height)


def _extent(edges: Sequence[float]) -> tuple[float, float, float, float]:
    top, left, bottom, right = edges
    return left, right, bottom, top


def _frame(axes: Axes, edges: Sequence[float]) -> None:
    top, left, bottom, right = edges
    axes.set(xticks=[], yticks=[])
    axes.set(xlim=(left, right), ylim=(bottom, top), autoscale_on=False)
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set(visible=True, linewidth=0.4, color=GREY)


def shown_sites(rows: pl.DataFrame, *, bar: bool = True) -> dict[str, list[str]]:
    """The sites of each store that are drawn: all, or evenly spaced ones with the first and the
    last. bar: whether a colour bar stands beside them."""
    most = min(MOST_ACROSS, int((room() - PHOTO - BAR * bar - 5) / (TILE + GAP)))
    return {
        store: evenly(own["site"].unique(maintain_order=True).to_list(), most)
        for (store,), own in rows.group_by("store", maintain_order=True)
    }


def grid_of(rows: pl.DataFrame, sheet: Mapping[str, Any], site: str, image: str) -> tuple[Any, Any]:
    """(rows, cols) and edges of a site's grid on an image, from the notes; else as far as there are
    cells, over the whole image."""
    own = sheet.get("grids", {}).get(str(rows["store"][0]), {}).get(site, {})
    shape = own.get("shape") or [largest + 1 for largest in rows.select("row", "col").max().row(0)]
    return shape, own.get("edges", {}).get(image, WHOLE)


def thinned(rows: pl.DataFrame, sites: Mapping[str, Sequence[str]]) -> list[str]:
    """A line of the caption where some of the stores' sites are not drawn."""
    every = rows.group_by("store").agg(pl.col("site").n_unique())
    some = any(n > len(sites[store]) for store, n in every.rows())
    return ["evenly spaced layers; the table has all"] if some else []


def place_values(rows: pl.DataFrame, shape: Sequence[int]) -> Float:
    """(rows, cols) values of the cells, NaN where there is no row."""
    found = np.full(tuple(shape), np.nan)
    found[rows["row"].to_numpy(), rows["col"].to_numpy()] = rows["value"].to_numpy()
    return found


def layer_name(site: str) -> str:
    """A site as a short title."""
    return shorten(site_words(site), int(TILE / 0.56))


# ---------------------------------------------------------------- principal components


@styled
def draw_colours(table: Table) -> Figure:
    """One line per image: the photograph, and each layer's patches in the colours of the first
    three principal components, models below one another; above them the layer and how much of the
    variance these three explain. Patches left out as background are black."""
    scores = table.frame.filter(metric="score")
    sheet = table.notes.get("sheet", {})
    of_object = table.notes.get("foreground", "none") != "none"
    explained = _explained(table.frame)
    sites = shown_sites(scores, bar=False)
    by_site = scores.partition_by("store", "site", as_dict=True)
    colours = {
        (store, site): _colours(table.notes, by_site[store, site], store, site)
        for store in sites
        for site in sites[store]
    }
    cells = scores.partition_by("store", "site", "image", as_dict=True)
    lines = []
    for image in scores["image"].unique(maintain_order=True):
        maps = []
        for store in sites:
            tiles = []
            for site in sites[store]:
                of_site = by_site[store, site]
                own = cells.get((store, site, image), of_site.clear())
                title = layer_name(site)
                if share := explained.get((store, site)):
                    title += f"\n{100 * share:.0f} %"
                # An image without a patch of the foreground has an empty tile.
                shape, edges = grid_of(own if len(own) else of_site, sheet, site, image)
                values = _rgb(own, shape, colours[store, site], of_object)
                tiles.append(Map(title, values, edges))
            maps.append((store, tiles))
        lines.append(SheetLine(image, image, maps))
    return Sheet(lines, sheet.get("images", {}), _caption(table, sites)).draw()


def _colours(notes: Mapping[str, Any], rows: pl.DataFrame, store: str, site: str) -> Colours:
    """The colours of a layer: from the notes, else from the scores in the table."""
    own = notes.get("colours", {}).get(store, {}).get(site)
    if own is not None:
        return Colours.read(own)
    by_channel = [rows.filter(component=c)["value"].to_numpy() for c in (1, 2, 3)]
    return Colours.of(np.stack(by_channel, 1))


def _rgb(rows: pl.DataFrame, shape: Sequence[int], colours: Colours, of_object: bool) -> Float:
    """(rows, cols, 4): what does not count is black, or nothing where all patches should."""
    scores = np.stack([place_values(rows.filter(component=c), shape) for c in (1, 2, 3)], -1)
    there = ~np.isnan(scores[..., 0])
    found = np.zeros((*shape, 4))
    found[..., 3] = there | of_object
    found[there, :3] = colours(scores[there])
    return found


def _explained(rows: pl.DataFrame) -> dict[tuple[str, str], float]:
    """(store, site) -> share of the variance of the first three axes."""
    first = rows.filter(pl.col("component") <= 3, metric="explained_variance")
    shares = first.group_by("store", "site").agg(pl.col("value").sum())
    return {(store, site): value for store, site, value in shares.rows()}


def _caption(table: Table, sites: Mapping[str, Sequence[str]]) -> list[str]:
    notes = table.notes
    text = "red, green, blue: the first three principal components of each layer's patches"
    if notes.get("normalise"):
        text += ", normalised"
    lines = [f"{text}; %: their share of the variance"]
    if aligned := notes.get("aligned_to"):
        of = f"{shorten(aligned['store'], 20)} {layer_name(aligned['site'])}"
        lines.append(f"turned to be nearest to {of}")
    if notes.get("foreground", "none") != "none":
        lines.append("black: background, on the other side of the first component of all patches")
    return lines + thinned(table.frame, sites)
