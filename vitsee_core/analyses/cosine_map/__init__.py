"""Cosine maps: which patches does a chosen patch resemble, layer by layer?

For a chosen patch q of an image (a cell of the grid, or the one at a pixel of the original image,
which is the same place whatever the model's grid): the cosine x_q . x_t / (|x_q| |x_t|) with every
patch t of that image, and of other images where these are asked for (the maps of Siméoni et al.
2025, DINOv3, Fig. 3). Of each query:

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
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

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
from vitsee_core.tables.columns import SITE, cell_columns, in_time, site_columns
from vitsee_core.tables.glances import most_varied, some_of
from vitsee_core.tables.results import Table
from vitsee_core.types import Float, pl
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_stores import SiteSpec

log = logging.getLogger(__name__)

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
            "The patch at ROW,COL of the token grid (3,5), at X,Ypx of the original image "
            "(120,80px: the same place in every grid), or in the middle; of clips in the middle "
            "frame, or at FRAME,ROW,COL.",
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
            "Means over all images by the offset between two patches, in place of single images."
        ),
    ] = False,
    sites: Annotated[Sequence[str], SITES] = ("blocks",),
    origin: Annotated[Provenance | None, Gather(Provenance, ("data",))] = None,
    execution: Annotated[
        Execution,
        Offers("images seed jobs memory", dask="slabs (of --offsets)", replicates=False),
    ] = DEFAULT,
) -> Table:
    """A row per patch of each map, and one per query and statistic; or a row per offset.

    Columns: `COLUMNS`, or with `offsets` `OFFSET_COLUMNS`. `query`: the image that the chosen patch
    lies in; `token`: that patch in the site's grid; `at`: as it was asked for; `image`: the one
    whose patches are mapped, at `row`, `col` (of offsets key minus query, signed). Statistics have
    no row and col. The notes hold the photographs and where maps lie on them, under `sheet`. NaN:
    no value is defined.

    Memory: one image's patches at a time; with `offsets` a slab's.

    Args:
        stores: with all tokens of sites with a grid; every one has the images named.
        origin: where the data is now, for the photographs.

    Raises:
        MissingInput: a site is stored pooled only.
        SiteError: no such site, none with a grid, a patch outside of the grid or of the image.
        VitseeError: no such image or pixel, options that do not go together.
    """
    if offsets and (image or at or to):
        raise VitseeError(
            "offsets are means over all images: leave single images and patches out"
        )
    spots = [Spot.parse(text) for text in dict.fromkeys(at or (MIDDLE,))]
    selected = select_each(stores, sites, grid_sites)
    parts = [_Store(store, own, execution) for store, own in selected.members]
    if offsets:
        return _offsets(parts, selected, execution)
    for part in parts:
        first = None if part is parts[0] else parts[0].queries
        part.queries = part.shown(image, first)
        targets = None if part is parts[0] else parts[0].targets
        part.targets = part.shown(to, targets) if to else part.shown_rows([])
        part.choose(spots)
    n_maps = sum(
        len(part.sites) * len(part.chosen) * (1 + len(part.targets.rows))
        for part in parts
    )
    rows: list[dict[str, Any]] = []
    with counting(execution.progress, n_maps, "maps"):
        for part in parts:
            for site in part.sites:
                rows += part.rows(site)
            if part.empty:
                log.info(
                    "%s: no cosine of a patch of length 0: %s",
                    part.store.label,
                    abbreviate(part.empty),
                )
    lead = parts[0]
    everything = [
        part.shown_rows([*dict.fromkeys(part.queries.rows + part.targets.rows)])
        for part in parts
    ]
    notes = {
        "marks": [
            {
                **{"query": str(lead.store.samples.id[row]), "at": spot.text},
                **{"place": list(place), **lead.time_of(spot)},
            }
            for (row, spot), place in lead.places().items()
        ],
        "images": {
            part.store.label: [
                str(name) for name in part.store.samples.id[part.queries.rows]
            ]
            for part in parts
        },
        "sheet": describe_sheet(
            everything, None if origin is None else origin.data, lead.times()
        ),
        **selected.notes(),
    }
    layouts = [features.layout for part in parts for features in part.features.values()]
    return Table.concat(rows, in_time(COLUMNS, layouts), notes)


def at_a_glance(table: Table) -> Table:
    """The patch whose cosines differ most within its own image, in three layers of each model."""
    rows = table.frame
    if "query" in rows.columns:
        own = rows.filter(pl.col("query") == pl.col("image"), metric="cosine")
        table = some_of(table.with_frame(most_varied(own, "query")), at=1)
    return some_of(table, site=3)


def plot(
    table: Table,
    scale: Annotated[
        str,
        Option(
            "Colours of the figure: one scale for all maps, or each map over its own range.",
            choices=SCALES,
        ),
    ] = SCALES[0],
) -> Figure:
    """A sheet of cosine maps, drawn from the table alone; see `cosine_sheets.draw_cosines`.

    Args:
        table: from `run`.
        scale: "shared": all maps on one colour scale; "map": each over its own range.
    """
    return draw_cosines(table, scale)


@dataclass(frozen=True)
class _Query:
    row: int  # of its image
    spot: Spot  # as requested
    cell: dict[str, int]  # by site


class _Store:
    """One store's maps. empty: where a selected patch has length 0."""

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
        self.chosen: list[_Query] = []
        self.empty: list[str] = []

    def shown(self, names: Sequence[str], first: SheetImages | None) -> SheetImages:
        """The images of these names, or those that another store shows."""
        return self.shown_rows(shown_rows(self.store, names, first, self.execution))

    def shown_rows(self, rows: list[int]) -> SheetImages:
        return SheetImages(self.store, self.view, rows, self.sites)

    def choose(self, spots: Sequence[Spot]) -> None:
        """The selected patches in every site's grid; errors are raised here rather than during the
        work."""
        for row in self.queries.rows:
            for spot in spots:
                cell = {
                    site.name: spot.index(self.store, site, self.view, row)
                    for site in self.sites
                }
                self.chosen.append(_Query(row, spot, cell))

    def places(self) -> dict[tuple[int, Spot], tuple[float, float]]:
        """The position of each selected patch on its image; of a cell, in the first site's grid."""
        return {
            (one.row, one.spot): one.spot.place(
                self.store, self.sites[0], self.view, one.row
            )
            for one in self.chosen
        }

    def time_of(self, spot: Spot) -> dict[str, float]:
        """`time`, the middle of a selected patch's place in time in the first site's grid, as a
        share of the sampled frames; nothing of images."""
        layout = self.features[self.sites[0].name].site.layout
        assert layout is not None
        if layout.frames is None:
            return {}
        return {"time": (spot.frame(layout) + 0.5) / layout.frames}

    def times(self) -> list[float]:
        """The times of all selected patches, see `time_of`."""
        spots = dict.fromkeys(one.spot for one in self.chosen)
        return [time for spot in spots for time in self.time_of(spot).values()]

    def rows(self, site: SiteSpec) -> list[dict[str, Any]]:
        """The maps of one site, then the statistics."""
        layout = self.features[site.name].site.layout
        assert layout is not None and layout.grid is not None
        place = site_columns(self.store, site)
        ids = self.store.samples.id
        maps: list[dict[str, Any]] = []
        numbers: list[dict[str, Any]] = []
        for query in self.chosen:
            cell = query.cell[site.name]
            token = ",".join(str(int(i)) for i in np.unravel_index(cell, layout.body))
            about = {
                **{**place, "token": token, "query": str(ids[query.row])},
                "at": query.spot.text,
            }
            own = self._units(site, query.row)
            if np.isnan(own[cell, 0]):
                self.empty.append(f"{site.name} {about['query']} {query.spot.text}")
            for other in [query.row, *(r for r in self.targets.rows if r != query.row)]:
                units = own if other == query.row else self._units(site, other)
                cosines = np.clip(units @ own[cell], -1, 1)
                if other == query.row:
                    found = map_statistics(cosines, cell, layout.body)
                    numbers += [
                        {
                            **about,
                            "image": about["query"],
                            "metric": name,
                            "value": found[name],
                        }
                        for name in STATISTICS
                    ]
                # Where the query has no length every patch that counts has an empty value.
                counts = self.view.on_image(layout, np.array([other]))[0]
                cells = np.flatnonzero(counts)
                on_grid = cell_columns(layout, cells)
                of_map = {
                    "image": str(ids[other]),
                    "metric": "cosine",
                    "value": cosines[cells],
                }
                maps.append({**about, **on_grid, **of_map})
            self.execution.progress.advance(1 + len(self.targets.rows))
        return maps + numbers

    def _units(self, site: SiteSpec, row: int) -> Float:
        features = self.features[site.name]
        assert features.layout is not None
        x = features.load(slice(row, row + 1), slice(0, len(features.tokens)))[0]
        if not np.isfinite(x).all():
            raise not_finite(self.store, site.name, row)
        return unit_vectors(x, self.view.on_image(features.layout, np.array([row]))[0])


def _offsets(
    parts: Sequence[_Store], selected: StoreSelection[SiteSpec], execution: Execution
) -> Table:
    rows = [execution.rows(part.store) for part in parts]
    tables = []
    with counting(execution.progress, sum(one.n for one in rows)):
        for part, own in zip(parts, rows, strict=True):
            read = ReadOffsets(tuple(part.features.values()), part.view)
            size = sum(features.slab_bytes for features in part.features.values())
            make = partial(SlabMoments, read)
            found = execution.fold(part.store, make, own, slab_bytes=size).result()
            for site in part.sites:
                place = site_columns(part.store, site) | {"metric": "cosine_offset"}
                summary = found[part.features[site.name].site.name]
                tables.append(_offset_table(place, summary))
    notes = {
        "interval": INTERVAL_METHOD,
        "seed": execution.seed,
        "images": {
            part.store.label: own.describe()
            for part, own in zip(parts, rows, strict=True)
        },
        **selected.notes(),
    }
    return Table.concat(tables, notes=notes)


def _offset_table(place: dict[str, Any], summary: Summary) -> Table:
    down, across = (np.arange(n) - n // 2 for n in summary.mean.shape)
    rows, cols = np.meshgrid(down, across, indexing="ij")
    spread = {name: getattr(summary, name).ravel() for name in ("std", "low", "high")}
    values = {"value": summary.mean.ravel(), **spread, "n_images": summary.n.ravel()}
    return Table.concat(
        [{**place, "row": rows.ravel(), "col": cols.ravel(), **values}], OFFSET_COLUMNS
    )


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Map which patches a chosen patch resembles.

    The cosine of one patch's features with those of every patch, in its image and in others,
    layer by layer and model by model, beside the photograph with the patch marked.

      $ vitsee cosine-map b16.zarr --image cat.jpg --at 120,80px --png cat.png > cat.csv
      $ vitsee cosine-map a.zarr b.zarr --image cat.jpg --to dog.jpg --png both.png > both.csv
      $ vitsee cosine-map b16.zarr --offsets --png offsets.png > offsets.csv

    Metrics: cosine; of each chosen patch cosine_mean over the others of its image,
    cosine_neighbours, and cosine_area, the share of patches above the middle between that mean
    and 1. With --offsets the columns are row, col (signed, key minus query), value, std and the
    95 % interval low, high over images, n_images. Of clips the maps have a column frame, the
    patch's place in time.
    """,
    needs=("grid",),
    reading=(
        "The framed patch of the photograph (red cross) against every patch: bright where "
        "features point the same way. A layer that knows objects lights up the object and "
        "little else, one that knows places lights up around the patch, one that is uniform "
        "everything. Cosines are not centred: read them within a layer, and by their statistics "
        "across layers."
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
