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
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.spatial.structure import (
    COSINES,
    FAR,
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
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words
from vitsee_core.truth.masks import ground_truth, open_masks
from vitsee_core.truth.masks.labels import Labels
from vitsee_core.truth.masks.sources import (
    BACKGROUND_OPTION,
    PANOPTIC,
    VOID_OPTION,
    lost_annotations,
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
FAR_APART = {
    "lds",
    "cds",
    OF_MASKS,
}  # compare tokens with those at least `FAR` steps away
METRICS = (*COSINES, OF_MASKS, "fourier_high", "fourier_radial", *SHARES, *IN_TIME)
COLUMNS = (
    *SITE,
    "frequency",
    "null",
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
    """Return each metric of each store and site, one row each; `fourier_radial` has one row per
    frequency.

    The columns are `COLUMNS`: `frequency` is in units of pi per cell, 0 to 1; `null` is what
    independent noise would give; `value` is a cosine or a share without unit, or a natural
    logarithm of amplitudes; `low` and `high` are the 95 % interval over images. Values are NaN if
    no image has one (too small a grid for `lds` and `cds`, no square grid for `fourier_high`, no
    foreground for `srss`).

    Memory: a slab of one site, and its T x D sums for each of 20 blocks of images.

    Args:
        stores: stores with all tokens of sites with a grid.

    Raises:
        MissingInput: a site is stored pooled only.
        SiteError: no such site, or none with a grid.
        VitseeError: unknown metric, `srss` without masks, masks that cannot be used, numbers that
            are not finite, or metrics without any value (see `FAR_APART`).

    Examples:
        >>> import vitsee
        >>> table = vitsee.spatial("vit.zarr", metrics=("lds", "rmsc"), sites="blocks.-1.out")
        >>> list(zip(table["metric"].tolist(), table["value"].round(2).tolist()))
        [('lds', 0.48), ('rmsc', 0.8)]
    """
    requested = select_metrics(metrics or METRICS, METRICS, "spatial")
    # Refuse what cannot be measured before the first slab is read.
    if OF_MASKS in metrics and not masks:
        raise VitseeError("srss compares foreground with background: give --masks too")
    selected = select_each(stores, sites, _sites_with_grid)
    image_stores = [store for store in selected.stores if store.plan.clip is None]
    if image_stores and set(requested) <= set(IN_TIME):
        raise MissingInput(
            f"{image_stores[0].label} holds images, which have no {', '.join(requested)}; "
            "expected stores of clips"
        )
    if masks and len(image_stores) < len(selected.stores):
        raise MissingInput(
            "srss compares masks with images, and there are stores of clips; expected the "
            "frames extracted as images"
        )
    for store, chosen in selected.members:
        for site in chosen:
            store.acts(site.name, "patches")  # raises before any work if they are missing
    mask_source = open_masks(masks, background, void, panoptic) if masks else None
    images_by_store = [execution.rows(store) for store in selected.stores]
    foregrounds = [
        _foreground_by_layout(store, store_sites, images, mask_source, execution)
        for (store, store_sites), images in zip(
            selected.members, images_by_store, strict=True
        )
    ]
    rows: list[dict[str, Any]] = []
    zero_tokens: dict[str, dict[str, int]] = {}
    total = sum(
        images.n * len(store_sites)
        for images, store_sites in zip(images_by_store, selected.chosen, strict=True)
    )
    with counting(execution.progress, total, SITE_IMAGES):
        for (store, store_sites), images, foreground in zip(
            selected.members, images_by_store, foregrounds, strict=True
        ):
            measures = SpatialMeasures(store, images, execution, requested)
            for site in store_sites:
                layout = store.site(site.name).layout
                rows += measures.measure(site, foreground.get(layout))
            if measures.zero_tokens:
                zero_tokens[store.label] = measures.zero_tokens
    if set(requested) <= FAR_APART and all(math.isnan(row["value"]) for row in rows):
        raise VitseeError(
            f"{', '.join(requested)}: no value in any image; expected sites whose grid has tokens "
            f"{FAR} or more steps apart (and of {OF_MASKS}, objects of several tokens)"
        )
    for label, counts in zero_tokens.items():
        texts = abbreviate([f"{site} ({n})" for site, n in counts.items()])
        log.info("%s: tokens of length 0, which have no cosine: %s", label, texts)
    notes: dict[str, Any] = {
        "interval": {"shares": METHODS["jackknife"], "others": METHODS["mean"]},
        "std": METHODS["std"],
        "null": "share of independent noise: (N - 1) / (N T - 1), (T - 1) / (N T - 1), "
        "the rest",
        "zero_tokens": zero_tokens,
    }
    if mask_source is not None:
        notes["masks"] = {
            "source": mask_source.name,
            "foreground": "any",
            **lost_annotations(mask_source),
        }
    notes["seed"] = execution.seed
    notes["images"] = {
        store.label: images.describe()
        for store, images in zip(selected.stores, images_by_store, strict=True)
    }
    notes.update(selected.notes())
    return Table.from_rows(rows, COLUMNS, notes)


def _sites_with_grid(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    """Return the selected sites with a grid; others are logged.

    Raises:
        SiteError: no site has one.
    """
    chosen = sites_of(store, patterns)
    with_grid = [
        site
        for site in chosen
        if site.layout is not None and site.layout.grid is not None
    ]
    if not with_grid:
        raise SiteError(
            f"{chosen[0].name} of {store.label} has no grid; expected e.g. blocks"
        )
    if len(with_grid) < len(chosen):
        left_out = [site.name for site in chosen if site not in with_grid]
        log.info("%s: no grid in %s", store.label, abbreviate(left_out))
    return with_grid


def _foreground_by_layout(
    store: Store,
    sites: Sequence[SiteSpec],
    rows: Rows,
    source: MaskSource | None,
    execution: Execution,
) -> Mapping[TokenLayout | None, Labels]:
    """Return, for each layout of the sites, which tokens of all images are foreground.

    Args:
        store: of the sites.
        sites: with grids; many share a layout.
        rows: the chosen images.
        source: of masks; None: no foreground.
        execution: resources.

    Returns:
        Layout -> (all images, tokens).
    """
    if source is None:
        return {}
    layouts = dict.fromkeys(store.site(site.name).layout for site in sites)
    layout_of_name = {
        str(i): layout for i, layout in enumerate(layouts) if layout is not None
    }
    truth = ground_truth(
        store,
        source,
        rows,
        layout_of_name,
        foreground="any",
        execution=execution,
    )
    return {layout: truth.labels[name] for name, layout in layout_of_name.items()}


class SpatialMeasures:
    """Measures the spatial structure of the sites of one store.

    Args:
        store: of the sites.
        rows: the chosen images.
        execution: resources, and the seed of the jackknife's blocks.
        metrics: names of `METRICS`.

    Attributes:
        zero_tokens: site -> how many of its tokens have length 0, for the measured sites.
    """

    def __init__(
        self, store: Store, rows: Rows, execution: Execution, metrics: Sequence[str]
    ) -> None:
        self.store = store
        self.rows = rows
        self.execution = execution
        self.metrics = metrics
        self.blocks = Blocks.of(store, rows.mask & store.valid, execution.seed)
        self.zero_tokens: dict[str, int] = {}

    def measure(self, site: SiteSpec, foreground: Labels | None) -> list[dict[str, Any]]:
        """Return the table's rows about one site.

        Args:
            site: with a grid.
            foreground: (all images, tokens), which tokens are foreground; None without masks.
        """
        spec = self.store.site(site.name)
        assert spec.layout is not None and spec.layout.grid is not None
        slabs = each_slab(
            self.store,
            _MeasureSlab(spec.name, self.blocks.of_rows, foreground),
            rows=self.rows,
            jobs=self.execution.jobs,
            map=self.execution.map,
            progress=self.execution.progress,
        )
        # Shares and the cosine with other clips need all images at once. Their sums are kept by
        # block, so that the jackknife can leave one block out.
        structures: list[ImageStructure] = []
        token_sums: dict[int, TokenSums] = {}  # block of images -> its sums
        clip_sums: dict[int, ClipSums] = {}
        for slab in slabs:
            structures.append(slab.structure)
            for block, tokens in slab.token_sums.items():
                if block in token_sums:
                    tokens = token_sums[block].plus(tokens)
                token_sums[block] = tokens
            for block, clips in slab.clip_sums.items():
                if block in clip_sums:
                    clips = clip_sums[block].plus(clips)
                clip_sums[block] = clips
        n_zero = sum(structure.n_zero for structure in structures)
        if n_zero:
            self.zero_tokens[site.name] = n_zero
        with one_blas_thread():
            rows = self._image_rows(structures, spec.layout.grid)
            rows += self._share_rows(token_sums)
            rows += self._clip_rows(clip_sums)
        site_cells = site_columns(self.store, site)
        return [{**site_cells, **row} for row in rows if row["metric"] in self.metrics]

    def _image_rows(
        self, structures: Sequence[ImageStructure], grid: tuple[int, int]
    ) -> list[dict[str, Any]]:
        """Return the rows of the metrics that each image has, means over images.

        Args:
            structures: one per slab.
            grid: rows, columns.

        Returns:
            The rows; `frequency` is in units of pi per cell.
        """
        block_of_image = self.blocks.labels
        rows: list[dict[str, Any]] = []
        for metric in METRICS:
            if metric not in structures[0].values:
                continue
            values = np.concatenate([slab.values[metric] for slab in structures])
            row = {"metric": metric, **mean_cells(values, block_of_image)}
            if metric == NEXT:
                # The null: two frames in random order instead of consecutive ones.
                any_frame = np.concatenate(
                    [slab.values["any_frame_cos"] for slab in structures]
                )
                row["null"] = mean_cells(any_frame, block_of_image)["value"]
            rows.append(row)
        profiles = np.concatenate([slab.profile for slab in structures])
        for frequency, values in zip(frequencies(grid).tolist(), profiles.T, strict=True):
            cells = mean_cells(values, block_of_image)
            rows.append({"metric": PROFILES, "frequency": frequency, **cells})
        return rows

    def _share_rows(self, sums: Mapping[int, TokenSums]) -> list[dict[str, Any]]:
        """Return the rows of the shares of variance, which are over all images together.

        Args:
            sums: block of images -> its sums.
        """
        block_sums = [sums[block] for block in sorted(sums)]
        total = block_sums[0]
        for block_sum in block_sums[1:]:
            total = total.plus(block_sum)
        shares = total.shares()
        nulls = total.nulls()
        without_block: list[dict[str, float]] = []
        if len(block_sums) > 1:
            without_block = [
                total.plus(block_sum, -1).shares() for block_sum in block_sums
            ]
        rows = []
        for metric in SHARES:
            replicates = np.array([values[metric] for values in without_block])
            cells = jackknife_cells(shares[metric], replicates, total.n, SHARE)
            rows.append({"metric": metric, "null": nulls[metric], **cells})
        return rows

    def _clip_rows(self, sums: Mapping[int, ClipSums]) -> list[dict[str, Any]]:
        """Return the row over all clips together; none for images.

        Args:
            sums: block of clips -> its sums.
        """
        block_sums = [sums[block] for block in sorted(sums)]
        if not block_sums:
            return []
        total = block_sums[0]
        for block_sum in block_sums[1:]:
            total = total.plus(block_sum)
        without_block: list[float] = []
        if len(block_sums) > 1:
            without_block = [
                total.plus(block_sum, -1).cosine() for block_sum in block_sums
            ]
        cells = jackknife_cells(
            total.cosine(), np.array(without_block), total.n, (-1.0, 1.0)
        )
        return [{"metric": OF_ALL, **cells}]


class SlabMeasures(NamedTuple):
    """The sums that one slab contributes."""

    structure: ImageStructure  # of each image that counts
    token_sums: dict[int, TokenSums]  # block of images -> its sums
    clip_sums: dict[int, ClipSums]  # likewise in time; empty for images


@dataclass(frozen=True)
class _MeasureSlab:
    """The work on one slab."""

    site: str
    block_of_row: Integers  # (all images,) block of the jackknife
    foreground: Labels | None  # (all images, tokens)

    def __call__(self, slab: Slab) -> SlabMeasures:
        """Return the measures of the slab's images that count.

        Raises:
            VitseeError: a number is not finite.
        """
        # (images, rows, cols, dim), of clips (clips, times, rows, cols, dim)
        cells = slab.acts(self.site, "patches")[slab.valid]
        if not np.isfinite(cells).all():
            raise not_finite(slab.store, self.site, slab.rows)
        cells = cells.astype(np.float32, copy=False)
        foreground = None
        if self.foreground is not None:
            foreground = self.foreground[slab.rows][slab.valid]
        block_of_image = self.block_of_row[slab.rows][slab.valid]
        # Float64 by block of images: one block at a time holds the copy.
        token_sums = {}
        for block in np.unique(block_of_image).tolist():
            images = cells[block_of_image == block]
            tokens: Float = images.reshape(len(images), -1, images.shape[-1])
            token_sums[block] = TokenSums.of(tokens.astype(np.float64))
        if cells.ndim < 5:
            return SlabMeasures(image_structure(cells, foreground), token_sums, {})
        units = np.stack([units_of(clip) for clip in cells])
        clip_sums = {
            block: ClipSums.of(units[block_of_image == block]) for block in token_sums
        }
        return SlabMeasures(_clip_structure(cells, units), token_sums, clip_sums)


def _clip_structure(cells: NDArray[np.floating], units: Float) -> ImageStructure:
    """Return the structure of clips: means over their frames, and cosines in time.

    Args:
        cells: (clips, times, rows, cols, dim).
        units: the clips as `units_of` returns each.
    """
    n_clips, n_times = cells.shape[:2]
    frames = image_structure(cells.reshape(-1, *cells.shape[2:]))
    values = {
        name: _mean_over_frames(frame_values.reshape(n_clips, n_times))
        for name, frame_values in frames.values.items()
    }
    cosines = [clip_cosines(clip) for clip in units]
    for name in PER_CLIP:
        values[name] = np.array([clip[name] for clip in cosines])
    profiles = frames.profile.reshape(n_clips, n_times, -1)
    return ImageStructure(values, profiles.mean(1), frames.n_zero)


def _mean_over_frames(values: Float) -> Float:
    """Return the means (clips,) of values (clips, frames) over the frames with a value; NaN if
    there is none."""
    has_value = np.isfinite(values)
    total = np.where(has_value, values, 0).sum(1)
    n = has_value.sum(1)
    return np.divide(total, n, out=np.full(len(values), np.nan), where=n > 0)


def headline(table: Table) -> list[Answer]:
    """Return how much more alike near patches are than distant ones, and how alike all patches are
    in the end; for clips how alike a place is to itself in the next frame."""
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
            in_any_frame = measured(any_frame, -1)
            text += f"; in any other frame {in_any_frame} at {any_frame['site'][-1]}"
        answers.append((store, text))
    return answers


DRAWN = (
    "lds",
    "lds_scaled",
    "cds",
    "cds_scaled",
    "srss",
    "rmsc",
    "mean_cos",
    "fourier_high",
    "share_image",
    "share_position",
    "share_rest",
    *(name for name in IN_TIME if name != "any_frame_cos"),
)
PROFILES = "fourier_radial"
MAX_STORES = 6  # with a panel of spectra each


@styled
def plot(table: Table) -> Figure:
    """Draw the metrics over depth, and spectra.

    Each metric has a panel with one curve per store and the 95 % interval as a band. Dotted lines
    are what noise would give for shares of variance, and the cosine with any other frame for that
    with the next. Below, each of up to `MAX_STORES` stores has a panel of the log amplitude against
    the frequency, layers from dark to bright (Park et al. 2023).
    """
    frame = table.frame
    with_values = frame.filter(pl.col("value").is_finite())["metric"].unique()
    metrics = []
    for metric in DRAWN:
        # On a grid of 16 x 16 the scaled metric equals the published one and is not drawn again.
        is_repeated = metric.endswith("_scaled") and _equals_published(frame, metric)
        if metric in with_values and not is_repeated:
            metrics.append(metric)
    profiles: list[pl.DataFrame] = []  # of each store
    if PROFILES in with_values:
        profiles = frame.filter(metric=PROFILES).partition_by(
            "store", maintain_order=True
        )
    # Spectra of many stores would leave no room for the curves.
    if len(profiles) > MAX_STORES and metrics:
        profiles = []
    curve_grid = CurveGrid.of(max(1, len(metrics)), frame)
    grids: list[CurveGrid | PanelGrid] = [curve_grid]
    if profiles:
        profile_grid = PanelGrid(len(profiles))
        grids.append(profile_grid)
    figure, boxes = stack(*grids)
    panels = curve_grid.panels(boxes[0], of_metrics(frame, metrics))
    drawn_rows = frame.filter(pl.col("metric").is_in(metrics))
    for axes, metric, rows in panels:
        draw_depth_curves(axes, rows, among=drawn_rows)
        axes.set_xlim(-0.04, max(1.04, axes.get_xlim()[1]))
        if metric in ("share_image", "share_position", NEXT):
            draw_marks(axes, rows, frame, "null", DOTTED, "by chance")
    # Panels of one metric share their y axis, which the curves of all of them set.
    curve_grid.finish(panels)
    all_axes = [axes for axes, *_ in panels]
    if profiles:
        profile_axes = profile_grid.axes(boxes[1])
        for axes, rows in zip(profile_axes, profiles, strict=True):
            _draw_profiles(axes, rows)
        all_axes += profile_axes
    add_curve_legend(figure, all_axes)
    return figure


def _equals_published(rows: pl.DataFrame, metric: str) -> bool:
    """Return whether a metric scaled to the grid has the values of the published one."""
    published = rows.filter(metric=metric.removesuffix("_scaled"))["value"].to_numpy()
    scaled = rows.filter(metric=metric)["value"].to_numpy()
    if len(scaled) != len(published):
        return False
    return np.allclose(scaled, published, equal_nan=True)


def _draw_profiles(axes: Axes, rows: pl.DataFrame) -> None:
    """Draw one store's log amplitude against the frequency, a line for each layer.

    Args:
        axes: where to draw.
        rows: of `fourier_radial`; sites of one kind are drawn, outputs of blocks if there are any.
    """
    import matplotlib

    kinds = {site: site_kind(site) for site in rows["site"].unique(maintain_order=True)}
    main_kind = "out" if "out" in kinds.values() else next(iter(kinds.values()))
    main_sites = [site for site, kind in kinds.items() if kind == main_kind]
    rows = rows.filter(pl.col("site").is_in(main_sites))
    ends = {rows["rel_depth"].min(): "first layer", rows["rel_depth"].max(): "last layer"}
    colours = matplotlib.colormaps["viridis"]
    for layer in rows.partition_by("site", maintain_order=True):
        depth = layer["rel_depth"][0]
        x = layer["frequency"]
        y = layer["value"]
        label = f"spectrum of the {ends[depth]}" if depth in ends else "_nolegend_"
        mark = "o" if len(x) < 3 else ""
        # Amplitudes are relative to frequency 0, whose own is 0.
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
