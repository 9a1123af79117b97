"""Spatial structure: do patches resemble their neighbours, or all other patches?

Per image, then means over images, as in `spatial.structure`: `lds`, `cds`, `lds_scaled`,
`cds_scaled`, `rmsc`, `mean_cos`, with masks `srss`, `fourier_high`, `fourier_radial`. Over all
images, as in `spatial.shares`: `share_image`, `share_position`, `share_rest` with what
noise would give (`null`). Of clips all that is per image is the mean over the clip's frames, and
time comes beside it, as in `structure`: `next_cos`, `next_other_cos`, `slowness`,
`any_frame_cos`, and over all clips `other_clip_cos`.

How well a model's features guide image generation follows LDS, CDS, SRSS and RMSC (|r| > 0.85) and
not its accuracy (Singh et al. 2025, arXiv 2512.10794); models trained by masking keep high
frequencies that contrastive ones lose (Park et al. 2023).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.spatial.structure import (
    COSINES,
    IN_TIME,
    NEXT,
    OF_ALL,
    PER_CLIP,
    SHARES,
    ClipSums,
    ImageStructure,
    TokenSums,
    clip_cosines,
    frequencies,
    image_structure,
    units_of,
)
from vitsee_core.declaration import Analysis
from vitsee_core.features.matrix import not_finite
from vitsee_core.figures.curve_looks import site_kind
from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import (
    DOTTED,
    add_curve_legend,
    draw_depth_curves,
    draw_marks,
)
from vitsee_core.figures.panels import PanelGrid, note_count, stack
from vitsee_core.figures.plotting import styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.lanes import one_blas_thread
from vitsee_core.runtime.options import FLOW, SITES, Offers, metrics_option
from vitsee_core.runtime.progress import SITE_IMAGES, counting
from vitsee_core.runtime.store_selection import select_each, sites_of
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.statistics.image_statistics import METHODS
from vitsee_core.statistics.jackknife import SHARE, Blocks, jackknife_cells, mean_cells
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.headlines import Answer, by_store, first_and_last, measured
from vitsee_core.tables.metrics import asked_for
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words
from vitsee_core.truth.masks import ground_truth, open_masks
from vitsee_core.truth.masks.labels import Labels
from vitsee_core.truth.masks.sources import (
    BACKGROUND_OPTION,
    PANOPTIC,
    VOID_OPTION,
    objects,
)
from vitsee_core.types import Float, Integers, pl
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput, SiteError, VitseeError
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.truth.masks import MaskSource
    from vitsee_stores import SiteSpec, Slab
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)


OF_MASKS = "srss"
METRICS = (*COSINES, OF_MASKS, "fourier_high", "fourier_radial", *SHARES, *IN_TIME)
COLUMNS = (
    *(*SITE, "frequency", "null"),
    *("metric", "value", "std", "low", "high", "n_images"),
)


@analysis
def run(
    *stores: Store,
    metrics: Annotated[
        Sequence[str],
        metrics_option(METRICS, "all, srss with --masks, those in time of clips"),
    ] = (),
    sites: Annotated[Sequence[str], SITES] = ("blocks",),
    masks: Annotated[Path | Sequence[Path], objects(": adds srss", "no srss")] = (),
    background: Annotated[Sequence[int], BACKGROUND_OPTION] = (),
    void: Annotated[int | str | None, VOID_OPTION] = None,
    panoptic: Annotated[Path | None, PANOPTIC] = None,
    execution: Annotated[
        Execution,
        Offers("images seed jobs memory", dask="slabs, and the masks of --masks,"),
    ] = DEFAULT,
) -> Table:
    """One row per store, site and metric; of `fourier_radial` one per frequency.

    Columns: see `COLUMNS`; `frequency` in units of pi per cell, 0 to 1; `null` what independent
    noise would give; `value` cosines and shares without unit, logarithms of amplitudes (natural);
    `low`, `high` the 95 % interval over images. NaN: no image has a value (too small a grid for
    `lds` and `cds`, no square one for `fourier_high`, no foreground for `srss`).

    Memory: a slab of one site, and its T x D sums for each of 20 blocks of images.

    Args:
        stores: with all tokens of sites with a grid.

    Raises:
        MissingInput: a site is stored pooled only.
        SiteError: no such site, or none with a grid.
        VitseeError: unknown metric, `srss` without masks, masks that cannot be used (see
            `open_masks`, `ground_truth`), numbers that are not finite.
    """
    wanted = asked_for(metrics or METRICS, METRICS, "spatial")
    if OF_MASKS in metrics and not masks:
        raise VitseeError("srss compares foreground with background: give --masks too")
    selected = select_each(stores, sites, _sites)
    of_images = [store for store in selected.stores if store.plan.clip is None]
    if of_images and {*wanted} <= {*IN_TIME}:
        raise MissingInput(
            f"{of_images[0].label} holds images, which have no {', '.join(wanted)}; expected "
            "stores of clips"
        )
    if masks and len(of_images) < len(selected.stores):
        raise MissingInput(
            "srss compares masks with images, and there are stores of clips; expected the frames "
            "extracted as images"
        )
    for store, chosen in selected.members:
        for site in chosen:
            store.acts(site.name, "patches")
    source = open_masks(masks, background, void, panoptic) if masks else None
    picked = [execution.rows(store) for store in selected.stores]
    labels = [
        _foreground(store, own, rows, source, execution)
        for (store, own), rows in zip(selected.members, picked, strict=True)
    ]
    rows: list[dict[str, Any]] = []
    zeros: dict[str, dict[str, int]] = {}
    total = sum(r.n * len(own) for r, own in zip(picked, selected.chosen, strict=True))
    with counting(execution.progress, total, SITE_IMAGES):
        for (store, own), chosen_rows, on in zip(
            selected.members, picked, labels, strict=True
        ):
            work = _Store(store, chosen_rows, execution, wanted)
            for site in own:
                rows += work(site, on.get(store.site(site.name).layout))
            zeros[store.label] = work.zeros
    for label, of_sites in zeros.items():
        if of_sites:
            shown = abbreviate([f"{site} ({n})" for site, n in of_sites.items()])
            log.info("%s: tokens of length 0, which have no cosine: %s", label, shown)
    notes = {
        "interval": {"shares": METHODS["jackknife"], "others": METHODS["mean"]},
        "std": METHODS["std"],
        "null": "share of independent noise: (N - 1) / (N T - 1), (T - 1) / (N T - 1), the rest",
        "zero_tokens": {label: found for label, found in zeros.items() if found},
        **(
            {}
            if source is None
            else {"masks": {"source": source.name, "foreground": "any"}}
        ),
        "seed": execution.seed,
        "images": {
            s.label: r.describe() for s, r in zip(selected.stores, picked, strict=True)
        },
        **selected.notes(),
    }
    return Table.from_rows(rows, COLUMNS, notes)


def _sites(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    """The sites with a grid. Raises SiteError: none has one."""
    chosen = sites_of(store, patterns)
    gridded = [
        site
        for site in chosen
        if site.layout is not None and site.layout.grid is not None
    ]
    if not gridded:
        raise SiteError(
            f"{chosen[0].name} of {store.label} has no grid; expected e.g. blocks"
        )
    if len(gridded) < len(chosen):
        left = [site.name for site in chosen if site not in gridded]
        log.info("%s: no grid in %s", store.label, abbreviate(left))
    return gridded


def _foreground(
    store: Store,
    sites: Sequence[SiteSpec],
    rows: Rows,
    source: MaskSource | None,
    execution: Execution,
) -> Mapping[TokenLayout | None, Labels]:
    if source is None:
        return {}
    layouts = dict.fromkeys(store.site(site.name).layout for site in sites)
    named = {str(i): layout for i, layout in enumerate(layouts) if layout is not None}
    truth = ground_truth(
        store,
        source,
        rows,
        named,
        foreground="any",
        execution=execution,
    )
    return {layout: truth.labels[name] for name, layout in named.items()}


class _Store:
    """The rows of one store's sites. zeros: site -> tokens of length 0."""

    def __init__(
        self, store: Store, rows: Rows, execution: Execution, metrics: Sequence[str]
    ) -> None:
        self.store = store
        self.rows = rows
        self.execution = execution
        self.metrics = metrics
        self.blocks = Blocks.of(store, rows.mask & store.valid, execution.seed)
        self.zeros: dict[str, int] = {}

    def __call__(self, site: SiteSpec, labels: Labels | None) -> list[dict[str, Any]]:
        spec = self.store.site(site.name)
        assert spec.layout is not None and spec.layout.grid is not None
        work = _ReadSpatial(spec.name, self.blocks.of_rows, labels)
        use = self.execution
        options: dict[str, Any] = {
            "jobs": use.jobs,
            "map": use.map,
            "progress": use.progress,
        }
        parts: list[ImageStructure] = []
        sums: dict[int, TokenSums] = {}
        in_time: dict[int, ClipSums] = {}
        slabs = each_slab(self.store, work, rows=self.rows, **options)
        for structure, of_blocks, of_clips in slabs:
            parts.append(structure)
            for b, own in of_blocks.items():
                sums[b] = sums[b].plus(own) if b in sums else own
            for b, clips in of_clips.items():
                in_time[b] = in_time[b].plus(clips) if b in in_time else clips
        if n_zero := sum(part.n_zero for part in parts):
            self.zeros[site.name] = n_zero
        place = site_columns(self.store, site)
        with one_blas_thread():
            rows = self._of_images(parts, spec.layout.grid) + self._of_all(sums)
            rows += self._of_clips(in_time)
        return [place | row for row in rows if row["metric"] in self.metrics]

    def _of_images(
        self, parts: Sequence[ImageStructure], grid: tuple[int, int]
    ) -> list[dict[str, Any]]:
        labels = self.blocks.labels
        rows: list[dict[str, Any]] = []
        for metric in METRICS:
            if metric in parts[0].values:
                values = np.concatenate([part.values[metric] for part in parts])
                rows.append({"metric": metric} | mean_cells(values, labels))
                if metric == NEXT:  # whose frames in random order would give that
                    any_frame = np.concatenate(
                        [part.values["any_frame_cos"] for part in parts]
                    )
                    rows[-1]["null"] = mean_cells(any_frame, labels)["value"]
        profile = np.concatenate([part.profile for part in parts])
        for frequency, values in zip(frequencies(grid).tolist(), profile.T, strict=True):
            about = {"metric": "fourier_radial", "frequency": frequency}
            rows.append(about | mean_cells(values, labels))
        return rows

    def _of_all(self, sums: Mapping[int, TokenSums]) -> list[dict[str, Any]]:
        parts = [sums[b] for b in sorted(sums)]
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.plus(part)
        shares = whole.shares()
        nulls = whole.nulls()
        left = [whole.plus(part, -1).shares() for part in parts] if len(parts) > 1 else []
        rows = []
        for metric in SHARES:
            without = np.array([one[metric] for one in left])
            cells = jackknife_cells(shares[metric], without, whole.n, SHARE)
            rows.append({"metric": metric, "null": nulls[metric]} | cells)
        return rows

    def _of_clips(self, sums: Mapping[int, ClipSums]) -> list[dict[str, Any]]:
        """The row over all clips; none of images."""
        parts = [sums[b] for b in sorted(sums)]
        if not parts:
            return []
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.plus(part)
        left = [whole.plus(part, -1).cosine() for part in parts] if len(parts) > 1 else []
        cells = jackknife_cells(whole.cosine(), np.array(left), whole.n, (-1.0, 1.0))
        return [{"metric": OF_ALL} | cells]


@dataclass(frozen=True)
class _ReadSpatial:
    """The work on one slab. labels: (all images,) blocks; foreground: (all images, tokens)."""

    site: str
    labels: Integers
    foreground: Labels | None

    def __call__(
        self, slab: Slab
    ) -> tuple[ImageStructure, dict[int, TokenSums], dict[int, ClipSums]]:
        """The structure of each image that counts, and the sums of each block of images, of clips
        also those in time."""
        cells = slab.acts(self.site, "patches")[slab.valid]
        if not np.isfinite(cells).all():
            raise not_finite(slab.store, self.site, slab.rows)
        cells = cells.astype(np.float32, copy=False)
        on = None if self.foreground is None else self.foreground[slab.rows][slab.valid]
        of_rows = self.labels[slab.rows][slab.valid]
        sums = {}
        in_time = {}
        for b in np.unique(of_rows).tolist():
            own = cells[of_rows == b]
            whole: Float = own.reshape(len(own), -1, own.shape[-1]).astype(np.float64)
            sums[b] = TokenSums.of(whole)
        if cells.ndim < 5:
            return image_structure(cells, on), sums, {}
        units = np.stack([units_of(clip) for clip in cells])
        for b in sums:
            in_time[b] = ClipSums.of(units[of_rows == b])
        return _clip_structure(cells, units), sums, in_time


def _clip_structure(cells: NDArray[np.floating], units: Float) -> ImageStructure:
    """The structure of clips (clips, times, rows, cols, dim): that of their frames, means over
    those that have a value, and cosines in time. units: as of `units_of`."""
    shape = cells.shape[:2]
    frames = image_structure(cells.reshape(-1, *cells.shape[2:]))
    values = {name: _over_frames(of.reshape(shape)) for name, of in frames.values.items()}
    cosines = [clip_cosines(clip) for clip in units]
    values |= {name: np.array([own[name] for own in cosines]) for name in PER_CLIP}
    return ImageStructure(
        values, frames.profile.reshape(*shape, -1).mean(1), frames.n_zero
    )


def _over_frames(values: Float) -> Float:
    """(clips,) means over the frames with a value, NaN without any. values: (clips, frames)."""
    there = np.isfinite(values)
    total = np.where(there, values, 0).sum(1)
    n = there.sum(1)
    return np.divide(total, n, out=np.full(len(values), np.nan), where=n > 0)


def headline(table: Table) -> list[Answer]:
    """How much more alike near patches are than distant ones, and in the end all of them."""
    last = dict(by_store(table, metric="mean_cos"))
    answers = []
    for store, rows in by_store(table, metric="lds"):
        text = f"cosine of near patches above distant ones {first_and_last(rows)}"
        if store in last:
            all_of_them = last[store]
            text += (
                f"; all patches {measured(all_of_them, -1)} at {all_of_them['site'][-1]}"
            )
        answers.append((store, text))
    chance = dict(by_store(table, metric="any_frame_cos"))
    for store, rows in by_store(table, metric="next_cos"):
        text = f"cosine of a place with itself in the next frame {first_and_last(rows)}"
        if store in chance:
            any_frame = chance[store]
            text += f"; in any other frame {measured(any_frame, -1)} at {any_frame['site'][-1]}"
        answers.append((store, text))
    return answers


DRAWN = (
    *(
        "lds",
        "lds_scaled",
        "cds",
        "cds_scaled",
        "srss",
        "rmsc",
        "mean_cos",
        "fourier_high",
    ),
    *("share_image", "share_position", "share_rest"),
    *(name for name in IN_TIME if name != "any_frame_cos"),
)
PROFILES = "fourier_radial"
MOST_STORES = 6  # with a panel of spectra each


@styled
def plot(table: Table) -> Figure:
    """One panel per metric over depth, one curve per store with the 95 % interval as a band, the
    shares of variance with what noise would give dotted, a place's cosine with itself in the next
    frame with that in any other; below, for each store (up to
    `MOST_STORES`), the log amplitude against the frequency, layers from dark to bright (Park et al.
    2023)."""
    frame = table.frame
    known = frame.filter(pl.col("value").is_finite())["metric"].unique()
    there = [metric for metric in DRAWN if metric in known]
    # Where the grid is 16 x 16 both are the same; else only those of the grid have a value.
    metrics = [m for m in there if not (m.endswith("_scaled") and _same(frame, m))]
    profiles = frame.filter(metric=PROFILES)
    stores = (
        profiles.partition_by("store", maintain_order=True) if PROFILES in known else []
    )
    stores = stores if len(stores) <= MOST_STORES or not metrics else []
    curves = CurveGrid.of(max(1, len(metrics)), frame)
    below = [PanelGrid(len(stores))] if stores else []
    figure, parts = stack(curves, *below)
    panels = curves.panels(parts[0], of_metrics(frame, metrics))
    among = frame.filter(pl.col("metric").is_in(metrics))
    for axes, metric, rows in panels:
        draw_depth_curves(axes, rows, among=among)
        axes.set_xlim(-0.04, max(1.04, axes.get_xlim()[1]))
        if metric in ("share_image", "share_position", NEXT):
            draw_marks(axes, rows, frame, "null", DOTTED, "by chance")
    curves.finish(panels)
    every = below[0].axes(parts[1]) if stores else []
    for axes, store in zip(every, stores, strict=True):
        _draw_profiles(axes, store)
    add_curve_legend(figure, [*(axes for axes, *_ in panels), *every])
    return figure


def _same(rows: pl.DataFrame, metric: str) -> bool:
    """Whether a metric scaled to the grid equals the published one."""
    published = rows.filter(metric=metric.removesuffix("_scaled"))["value"].to_numpy()
    own = rows.filter(metric=metric)["value"].to_numpy()
    return len(own) == len(published) and np.allclose(own, published, equal_nan=True)


def _draw_profiles(axes: Axes, rows: pl.DataFrame) -> None:
    import matplotlib

    kinds = {site: site_kind(site) for site in rows["site"].unique(maintain_order=True)}
    main = "out" if "out" in kinds.values() else next(iter(kinds.values()))
    rows = rows.filter(
        pl.col("site").is_in([s for s, kind in kinds.items() if kind == main])
    )
    ends = {rows["rel_depth"].min(): "first layer", rows["rel_depth"].max(): "last layer"}
    colours = matplotlib.colormaps["viridis"]
    for own in rows.partition_by("site", maintain_order=True):
        depth = own["rel_depth"][0]
        x = own["frequency"]
        y = own["value"]
        label = f"spectrum of the {ends[depth]}" if depth in ends else "_nolegend_"
        mark = "o" if len(x) < 3 else ""
        axes.plot([0, *x], [0, *y], color=colours(0.9 * depth), marker=mark, label=label)
    axes.set_title(shorten(str(rows["store"][0]), 28))
    axes.set_xlabel("frequency (pi per cell)")
    axes.set_ylabel(metric_words(PROFILES))
    note_count(axes, rows)
    axes.set_xlim(0, 1)


ANALYSIS = Analysis(
    module=__name__,
    question=FLOW,
    help="""
    Measure the spatial structure of patch tokens.

    Whether neighbours are more alike than distant patches (LDS, CDS; with masks SRSS), whether
    all patches become alike (RMSC, mean cosine), which frequencies a layer keeps, and how much
    of the tokens' variance the image and the position explain. These, and not accuracy, predict
    how well features guide image generation (Singh et al. 2025).

      $ vitsee spatial b16.zarr -o spatial.csv --png spatial.png
      $ vitsee spatial mae=a.zarr dino=b.zarr --png both.png > both.csv
      $ vitsee spatial b16.zarr --masks voc/SegmentationClass --metric srss > srss.csv

    lds and cds use distances of a 16 x 16 grid as published; lds_scaled and cds_scaled
    distances in proportion to the grid.

    Of clips also slowness: whether a place is more like itself in the next frame than like other
    places, beside what it is like in any other frame, and in other clips.

      $ vitsee spatial videomae.zarr shuffled=shuffled.zarr still=still.zarr --png slow.png
    """,
    needs=("grid",),
    reading=(
        "Whether patches resemble their neighbours more than distant ones, whether all become "
        "alike, which spatial frequencies stay, and how much of the variance is the image's, "
        "the position's, or both. All patches alike (a mean cosine near 1) is oversmoothing. Of "
        "clips slowness is how much more a place is like itself in the next frame than like "
        "other places; dotted: the same in any other frame."
    ),
    source="Singh et al. 2025; Park et al. 2023; Wiskott and Sejnowski 2002",
    columns=COLUMNS,
    meanings={
        "frequency": "of fourier_radial, in units of pi per cell",
        "null": "of the shares: what noise would give; of next_cos: any_frame_cos, which frames in "
        "random order would give",
    },
    metrics=METRICS,
    run=run,
    plot=plot,
    headline=headline,
)
