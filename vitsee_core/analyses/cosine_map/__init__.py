"""Cosine maps: which patches does a chosen patch resemble, layer by layer?

A patch q of an image is chosen by a cell of the grid, or by a pixel of the original image, which is
the same position whatever the model's grid. Its map is the cosine x_q . x_t / (|x_q| |x_t|) with
every patch t of that image, and of other images if these are named (the maps of Siméoni et al.
2025, DINOv3, Fig. 3). Each query has three statistics:

- `cosine_mean`: mean over the other patches of its image;
- `cosine_neighbours`: mean over its up to eight neighbours;
- `cosine_area`: share of the other patches that are above the middle between `cosine_mean` and 1: a
  part of an object is small, a smoothed-out layer has no such part.

`offsets` in place of single images: the mean over all pairs of patches at the same offset key minus
query of an image, then over images (`cosine_offset`).

Of clips a patch lies in a frame, too, and its cosines are with the patches of all frames of its
clip; its neighbours are those in its own frame, and offsets are within a frame.

Cosines are of the features as they are, no mean taken off: where all patches share a large part,
all cosines are near 1. Patches of length 0 and cells beside an image (padding) have none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np

from vitsee_core.analyses.cosine_map.cosine_sheets import SCALES, draw_cosines
from vitsee_core.analyses.cosine_map.cosines import (
    MIDDLE,
    STATISTICS,
    ReadOffsets,
    Spot,
    map_statistics,
    unit_vectors,
)
from vitsee_core.declaration import Analysis
from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.features.matrix import not_finite
from vitsee_core.figures.patch_maps.photos import (
    SHOWN,
    SheetImages,
    describe_sheet,
    shown_rows,
)
from vitsee_core.figures.patch_maps.views import View, grid_sites
from vitsee_core.models.provenance import Provenance
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import (
    KNOWLEDGE,
    SITES,
    Gather,
    Offers,
    Option,
    image_option,
)
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.store_selection import StoreSelection, select_each
from vitsee_core.statistics.moments import INTERVAL_METHOD, SlabMoments, Summary
from vitsee_core.tables.columns import SITE, cell_columns, site_columns, with_frame_column
from vitsee_core.tables.glances import most_varied, select_evenly
from vitsee_core.tables.results import Table
from vitsee_core.types import Float, pl
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_stores import SiteSpec

log = logging.getLogger(__name__)

# Of maps and of the statistics of their queries, and of offsets.
COLUMNS = (*SITE, "token", "row", "col", "query", "image", "at", "metric", "value")
OFFSET_COLUMNS = (
    *SITE,
    "row",
    "col",
    "metric",
    "value",
    "std",
    "low",
    "high",
    "n_images",
)


@analysis
def run(
    *stores: Store,
    image: Annotated[
        Sequence[str], image_option("Choose patches of", f"the first {SHOWN}")
    ] = (),
    at: Annotated[
        Sequence[str],
        Option(
            "The patch at ROW,COL of the token grid (3,5), at X,Ypx of the original "
            "image (120,80px: the same place in every grid), or in the middle; of "
            "clips in the middle frame, or at FRAME,ROW,COL.",
            metavar="PATCH",
            default=MIDDLE,
            parse=lambda text: Spot.parse(text).text,
        ),
    ] = (),
    to: Annotated[
        Sequence[str],
        Option("Also map the patches of this other image.", metavar="ID", default="none"),
    ] = (),
    offsets: Annotated[
        bool,
        Option(
            "Means over all images by the offset between two patches, in place of "
            "single images."
        ),
    ] = False,
    sites: Annotated[Sequence[str], SITES] = ("blocks",),
    origin: Annotated[Provenance | None, Gather(Provenance, ("data",))] = None,
    execution: Annotated[
        Execution,
        Offers("images seed jobs memory", dask="slabs (of --offsets)", replicates=False),
    ] = DEFAULT,
) -> Table:
    """Return a table with a row per patch of each map and a row per query and statistic, or with
    `offsets` a row per offset.

    The columns are `COLUMNS`, or with `offsets` `OFFSET_COLUMNS`. `query` is the image that the
    chosen patch lies in, `token` is that patch in the site's grid, and `at` is how it was named.
    `image` is the image whose patches are mapped, at `row` and `col` (of offsets: key minus query,
    signed). Statistics have no row and col. NaN is a value that is not defined. The notes hold the
    photographs and where maps lie on them, under `sheet`.

    Memory: the patches of one image at a time; with `offsets` those of a slab.

    Args:
        stores: stores with all tokens of sites with a grid; every one has the images named.
        image: names of the images in which patches are chosen; by default the first ones.
        at: the chosen patches, as `Spot.parse` reads them; by default the one in the middle.
        to: names of other images whose patches are mapped, too.
        offsets: means over all images by offset, in place of single images.
        sites: patterns of the sites.
        origin: where the data is now, for the photographs.
        execution: images, seed and parallel work.

    Raises:
        MissingInput: a site is stored pooled only.
        SiteError: no site matches, none has a grid, or a patch lies outside of grid or image.
        VitseeError: a store does not have an image or a pixel, or options exclude each other.

    Examples:
        >>> import vitsee
        >>> table = vitsee.cosine_map("vit.zarr", image="1", at="4,3", sites="blocks.-1.out")
        >>> sorted(set(table["metric"]))
        ['cosine', 'cosine_area', 'cosine_mean', 'cosine_neighbours']
        >>> table.plot().savefig("cosine.png")
    """
    # Refused rather than ignored: the command would otherwise seem to use them.
    if offsets and (image or at or to):
        raise VitseeError(
            "offsets are means over all images: leave single images and patches out"
        )
    spots = [Spot.parse(text) for text in dict.fromkeys(at or (MIDDLE,))]
    selection = select_each(stores, sites, grid_sites)
    works = [
        CosineMaps(store, store_sites, execution)
        for store, store_sites in selection.members
    ]
    if offsets:
        return _offsets_result_table(works, selection, execution)
    # Names and the default images are resolved in the first store; the others show the same.
    for work in works:
        first_queries = None if work is works[0] else works[0].queries
        first_targets = None if work is works[0] else works[0].targets
        work.queries = work.shown(image, first_queries)
        work.targets = work.shown(to, first_targets) if to else work.shown_rows([])
        work.choose(spots)
    n_maps = sum(work.n_maps for work in works)
    rows: list[dict[str, Any]] = []
    with counting(execution.progress, n_maps, "maps"):
        for work in works:
            for site in work.sites:
                rows += work.rows(site)
            if work.empty:
                log.info(
                    "%s: no cosine of a patch of length 0: %s",
                    work.store.label,
                    abbreviate(work.empty),
                )
    data = None if origin is None else origin.data
    notes = _sheet_notes(works, data) | selection.notes()
    layouts = [features.layout for work in works for features in work.features.values()]
    return Table.concat(rows, with_frame_column(COLUMNS, layouts), notes)


def _sheet_notes(works: Sequence[CosineMaps], data: str | None) -> dict[str, Any]:
    """Return the notes that the figure needs: the chosen patches, the images and photographs.

    data: where the images are now; by default where extract read them.
    """
    first = works[0]
    ids = first.store.samples.id
    marks = []
    for (row, spot), position in first.positions().items():
        mark = {"query": str(ids[row]), "at": spot.text, "place": list(position)}
        marks.append(mark | first.time_of(spot))
    images = {}
    sheet_images = []
    for work in works:
        query_ids = work.store.samples.id[work.queries.rows]
        images[work.store.label] = [str(name) for name in query_ids]
        rows = dict.fromkeys(work.queries.rows + work.targets.rows)
        sheet_images.append(work.shown_rows([*rows]))
    sheet = describe_sheet(sheet_images, data, first.times())
    return {"marks": marks, "images": images, "sheet": sheet}


def at_a_glance(table: Table) -> Table:
    """Return the patch whose cosines differ most within its image, in three layers per model."""
    rows = table.frame
    if "query" in rows.columns:
        # Maps of other images vary with what is in them.
        query_maps = rows.filter(pl.col("query") == pl.col("image"), metric="cosine")
        table = select_evenly(table.with_frame(most_varied(query_maps, "query")), at=1)
    return select_evenly(table, site=3)


def plot(
    table: Table,
    scale: Annotated[
        str,
        Option(
            "Colours of the figure: one scale for all maps, or each map over its own "
            "range.",
            choices=SCALES,
        ),
    ] = SCALES[0],
) -> Figure:
    """Draw a sheet of cosine maps from the table alone.

    Args:
        table: from `run`.
        scale: "shared": all maps on one colour scale; "map": each over its own range.
    """
    return draw_cosines(table, scale)


class ChosenPatch(NamedTuple):
    """A chosen patch of one image.

    Attributes:
        row: the image's row in the store.
        spot: how the patch was named.
        cell: site -> the index of the patch in the site's grid.
    """

    row: int
    spot: Spot
    cell: dict[str, int]


class CosineMaps:
    """The work on one store: its images, its chosen patches, and their maps.

    Attributes:
        queries: the images in which patches are chosen.
        targets: the other images whose patches are mapped.
        chosen: the chosen patches of all query images.
        empty: site, image and spot of chosen patches of length 0, which have no cosines.
    """

    queries: SheetImages
    targets: SheetImages

    def __init__(self, store: Store, sites: list[SiteSpec], execution: Execution) -> None:
        self.store = store
        self.sites = sites
        self.execution = execution
        self.view = View.of(store, sites)
        self.features: dict[str, SiteFeatures] = {
            site.name: choose_features(store, site, "patches", partial=True)
            for site in sites
        }
        self.chosen: list[ChosenPatch] = []
        self.empty: list[str] = []

    def shown(self, names: Sequence[str], first: SheetImages | None) -> SheetImages:
        """Return the images of these names, or by default those that another store shows."""
        return self.shown_rows(shown_rows(self.store, names, first, self.execution))

    def shown_rows(self, rows: list[int]) -> SheetImages:
        """Return the images in these rows of the store, with where their patches lie."""
        return SheetImages(self.store, self.view, rows, self.sites)

    def choose(self, spots: Sequence[Spot]) -> None:
        """Find the chosen patches in every site's grid.

        Raises:
            SiteError, VitseeError: a patch lies outside; here rather than during the long work.
        """
        for row in self.queries.rows:
            for spot in spots:
                cell = {
                    site.name: spot.index(self.store, site, self.view, row)
                    for site in self.sites
                }
                self.chosen.append(ChosenPatch(row, spot, cell))

    @property
    def n_maps(self) -> int:
        """Number of maps: one per site, chosen patch, and image."""
        return len(self.sites) * len(self.chosen) * (1 + len(self.targets.rows))

    def positions(self) -> dict[tuple[int, Spot], tuple[float, float]]:
        """Return (row, spot) -> (y, x), the chosen patch's position on its image as fractions.

        A cell's position is that in the first site's grid.
        """
        return {
            (query.row, query.spot): query.spot.position(
                self.store, self.sites[0], self.view, query.row
            )
            for query in self.chosen
        }

    def time_of(self, spot: Spot) -> dict[str, float]:
        """Return `time` of a chosen patch of a clip: the middle of its cell in time, in the first
        site's grid, as a share of the sampled frames. Images have an empty dict."""
        layout = self.features[self.sites[0].name].site.layout
        assert layout is not None
        if layout.frames is None:
            return {}
        return {"time": (spot.frame(layout) + 0.5) / layout.frames}

    def times(self) -> list[float]:
        """Return the times of all chosen patches; empty for images."""
        spots = dict.fromkeys(query.spot for query in self.chosen)
        return [time for spot in spots for time in self.time_of(spot).values()]

    def rows(self, site: SiteSpec) -> list[dict[str, Any]]:
        """Return blocks of rows: the maps of one site, then the statistics of its queries."""
        layout = self.features[site.name].site.layout
        assert layout is not None and layout.grid is not None
        about_site = site_columns(self.store, site)
        ids = self.store.samples.id
        map_rows: list[dict[str, Any]] = []
        statistic_rows: list[dict[str, Any]] = []
        for query in self.chosen:
            cell = query.cell[site.name]
            token = ",".join(str(int(i)) for i in np.unravel_index(cell, layout.body))
            about = {
                **about_site,
                "token": token,
                "query": str(ids[query.row]),
                "at": query.spot.text,
            }
            query_units = self._units(site, query.row)  # (cells, dim)
            if np.isnan(query_units[cell, 0]):
                self.empty.append(f"{site.name} {about['query']} {query.spot.text}")
            for row in [query.row, *(r for r in self.targets.rows if r != query.row)]:
                units = query_units if row == query.row else self._units(site, row)
                # Rounding may leave a cosine slightly beyond 1.
                cosines = np.clip(units @ query_units[cell], -1, 1)
                if row == query.row:
                    statistics = map_statistics(cosines, cell, layout.body)
                    for name in STATISTICS:
                        cells = {"image": about["query"], "metric": name}
                        cells["value"] = statistics[name]
                        statistic_rows.append(about | cells)
                # A query of length 0 leaves every patch of the image, with an empty value.
                on_image = np.flatnonzero(self.view.on_image(layout, np.array([row]))[0])
                map_rows.append(
                    {
                        **about,
                        **cell_columns(layout, on_image),
                        "image": str(ids[row]),
                        "metric": "cosine",
                        "value": cosines[on_image],
                    }
                )
            # One image is read per map, so that progress counts maps.
            self.execution.progress.advance(1 + len(self.targets.rows))
        return map_rows + statistic_rows

    def _units(self, site: SiteSpec, row: int) -> Float:
        """Return an image's patches as vectors of length 1, (cells, dim).

        Raises:
            VitseeError: a number is not finite.
        """
        features = self.features[site.name]
        assert features.layout is not None
        # One image alone: a slab of all tokens may not fit the memory.
        x = features.load(slice(row, row + 1), slice(0, len(features.tokens)))[0]
        if not np.isfinite(x).all():
            raise not_finite(self.store, site.name, row)
        return unit_vectors(x, self.view.on_image(features.layout, np.array([row]))[0])


def _offsets_result_table(
    works: Sequence[CosineMaps],
    selection: StoreSelection[SiteSpec],
    execution: Execution,
) -> Table:
    """Return the table of mean cosines by offset, over all images of each store."""
    rows_by_store = [execution.rows(work.store) for work in works]
    tables = []
    with counting(execution.progress, sum(rows.n for rows in rows_by_store)):
        for work, rows in zip(works, rows_by_store, strict=True):
            read = ReadOffsets(tuple(work.features.values()), work.view)
            # One slab of every site is in memory at a time.
            slab_bytes = sum(features.slab_bytes for features in work.features.values())
            summaries = execution.fold(
                work.store, partial(SlabMoments, read), rows, slab_bytes=slab_bytes
            ).result()
            for site in work.sites:
                about_site = site_columns(work.store, site)
                about_site["metric"] = "cosine_offset"
                summary = summaries[work.features[site.name].site.name]
                tables.append(_offset_rows(about_site, summary))
    notes = {
        "interval": INTERVAL_METHOD,
        "seed": execution.seed,
        "images": {
            work.store.label: rows.describe()
            for work, rows in zip(works, rows_by_store, strict=True)
        },
        **selection.notes(),
    }
    return Table.concat(tables, notes=notes)


def _offset_rows(about_site: dict[str, Any], summary: Summary) -> Table:
    """Return one site's rows: a mean, its spread and interval for each offset.

    Args:
        about_site: the columns that all rows share.
        summary: moments of entries (2 rows - 1, 2 cols - 1).
    """
    # Entry i of n is offset i - n // 2, so that offset 0 is in the middle.
    rows, cols = np.indices(summary.mean.shape)
    cells = {
        **about_site,
        "row": rows.ravel() - summary.mean.shape[0] // 2,
        "col": cols.ravel() - summary.mean.shape[1] // 2,
        "value": summary.mean.ravel(),
        "std": summary.std.ravel(),
        "low": summary.low.ravel(),
        "high": summary.high.ravel(),
        "n_images": summary.n.ravel(),
    }
    return Table.concat([cells], OFFSET_COLUMNS)


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Map which patches a chosen patch resembles.

    The cosine of one patch's features with those of every patch, in its image and in
    others, layer by layer and model by model, beside the photograph with the patch
    marked.

      $ vitsee cosine-map b16.zarr --image cat.jpg --at 120,80px --png cat.png > cat.csv
      $ vitsee cosine-map a.zarr b.zarr --image cat.jpg --to dog.jpg --png both.png > both.csv
      $ vitsee cosine-map b16.zarr --offsets --png offsets.png > offsets.csv

    Metrics: cosine; of each chosen patch cosine_mean over the others of its image,
    cosine_neighbours, and cosine_area, the share of patches above the middle between that
    mean and 1. With --offsets the columns are row, col (signed, key minus query), value,
    std and the 95 % interval low, high over images, n_images. Of clips the maps have a
    column frame, the patch's place in time.
    """,
    needs=("grid",),
    reading=(
        "The framed patch of the photograph (red cross) against every patch: bright "
        "where features point the same way. A layer that knows objects lights up the "
        "object and little else, one that knows places lights up around the patch, one "
        "that is uniform everything. Cosines are not centred: read them within a "
        "layer, and by their statistics across layers."
    ),
    source="Siméoni et al. 2025 (DINOv3), Fig. 3",
    columns=COLUMNS,
    other_columns=(OFFSET_COLUMNS,),
    meanings={
        "token": "the chosen patch in the site's grid",
        "query": "its image",
        "image": "mapped",
    },
    metrics=("cosine", "cosine_offset", *STATISTICS),
    run=run,
    plot=plot,
    at_a_glance=at_a_glance,
    glance_metric="",
)
