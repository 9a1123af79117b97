"""Semantic keypoints: is the same part of another object the most similar one?

A keypoint of a source image is looked for in a target image by the cosine of dense features; it is
found where the best position is nearer to the keypoint than alpha times the longer side of the
target object's box (or image). PCK is the share found, over pairs of images of one category with
keypoints seen in both (Walmer et al. 2023, Figs. 10 right, 31, Table 5; SPair-71k, Min et al.
2019). Distances are strictly smaller, as in the code of Walmer et al.

Their code upsamples unit features bilinearly and compares them without scaling them to unit length
again. Its similarities are then bilinear between tokens, so that predictions lie on the token grid
whatever the features are, 7.5 pixels too far left or up in the first column and row of 16-pixel
patches, and PCK at 0.01 measures the grid. The default `smooth` scales to unit length after
upsampling, which finds positions between tokens; `vit_analysis` is theirs, for their numbers.
Baselines: `chance`, a candidate at random, in closed form; `still`, the same place relative to the
image; `grid`, the candidate nearest to the keypoint, the ceiling.

Intervals are of a jackknife that leaves out one image with all of its pairs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.keypoints.positions import locate
from vitsee_core.analyses.keypoints.protocol import (
    ALPHAS,
    CANDIDATES,
    CLASS,
    GROUP,
    GROUPS,
    MATCHES,
    PRESETS,
    RANDOM,
    THRESHOLDS,
    Protocol,
    ProtocolOptions,
    choose_protocol,
)
from vitsee_core.analyses.keypoints.scoring import (
    INTERVAL_METHOD,
    METRICS,
)
from vitsee_core.analyses.keypoints.spair import VARIATIONS, Pair, draw_pairs, read_pairs
from vitsee_core.declaration import Analysis
from vitsee_core.figures.curve_looks import DASHES, curve_looks
from vitsee_core.figures.curve_panels import draw_depth_panels
from vitsee_core.figures.panels import small
from vitsee_core.figures.plotting import GREY, styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import (
    KNOWLEDGE,
    SITES,
    Fields,
    Offers,
    Option,
    metrics_option,
)
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.store_selection import select_each
from vitsee_core.tables.columns import REPLICATES, SITE
from vitsee_core.tables.headlines import best_layers
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import baseline_words
from vitsee_core.truth.labels.labelled_rows import RANDOM_BASELINE
from vitsee_core.types import pl
from vitsee_stores import Store
from vitsee_stores.errors import SiteError, VitseeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_stores import SiteSpec

log = logging.getLogger(__name__)

headline = partial(best_layers, units={"pck@0.1": "PCK at 0.1"})

__all__ = [
    "ALPHAS",
    "CANDIDATES",
    "GROUPS",
    "MATCHES",
    "PRESETS",
    "THRESHOLDS",
    "plot",
    "run",
]

COLUMNS = (
    *SITE,
    CLASS,
    GROUP,
    "metric",
    "value",
    "std",
    "low",
    "high",
    "spread",
    "n_images",
    "n_pairs",
    "n_points",
    "baseline",
)


@analysis
def run(
    *stores: Store,
    pairs: Annotated[
        str | Path,
        Option(
            "The folder SPair-71k (or any with PairAnnotation/SPLIT/*.json in its form), "
            "or a list of pairs in it (Layout/large/test.txt)."
        ),
    ],
    split: Annotated[
        str | None,
        Option(
            "Which pairs of the folder.", metavar="NAME", default="the list's, else test"
        ),
    ] = None,
    sites: Annotated[Sequence[str], SITES] = ("blocks",),
    options: Annotated[ProtocolOptions, Fields()],
    metrics: Annotated[
        Sequence[str],
        metrics_option(METRICS, "all of them", "The mean over classes, points or pairs."),
    ] = (),
    baselines: Annotated[Sequence[str], RANDOM_BASELINE] = (),
    execution: Annotated[
        Execution, Offers("seed device", dask="sites and images")
    ] = DEFAULT,
) -> Table:
    """Return rows per store and site with PCK for each alpha, and the same of each baseline.

    PCK is the mean over classes (`pck@0.1`), over points (`pck_point@0.1`) and over pairs
    (`pck_image@0.1`).

    Columns: `COLUMNS`, `class` and `group` only with `by_group`. `value`: between 0 and 1. `std`,
    `low`, `high`: of the jackknife over images, NaN where leaving out an image leaves a class
    without pairs. `group`: `viewpoint 0` and so on.

    Memory: one slab of the site as it is stored, one image in float32, and the features of the
    distinct source keypoints.

    Args:
        stores: of the images in the pairs, resized so that their keypoints are seen.
        pairs: the folder SPair-71k, or a list of pairs in it.
        split: which pairs of the folder.
        sites: patterns of site names.
        options: how keypoints are matched and scored.
        metrics: some of `METRICS`; all if empty.
        baselines: `random` adds a search among random features.
        execution: seed, device, processes and progress.

    Raises:
        MissingInput: a store does not record how its images were resized, or crops keypoints
            away, or keeps its tokens pooled only.
        SiteError: no site with a grid matches.
        VitseeError: files of pairs are missing or damaged, an option has an unknown value, or
            most of the images are not in a store.

    Examples:
        >>> import vitsee
        >>> table = vitsee.keypoints(
        ...     "vit-clothes.zarr", pairs="clothes", sites="blocks.-1.out", alphas=[0.1]
        ... )
        >>> sorted(set(table["metric"])), sorted(set(table["baseline"]))
        (['pck@0.1', 'pck_image@0.1', 'pck_point@0.1'], ['', 'chance', 'grid', 'still'])
    """
    if not stores:
        raise VitseeError("no store was given; expected one or more")
    protocol = choose_protocol(options)
    if unknown := {*baselines} - {RANDOM}:
        raise VitseeError(f"no baseline {min(unknown)!r}; expected {RANDOM}")
    # Everything is checked before any work: first what needs no file, then stores, then pairs.
    metric_names = select_metrics(metrics or METRICS, METRICS, "keypoints")
    execution.check_device()
    selected = select_each(stores, sites, _select_grid_sites)
    drawn = draw_pairs(read_pairs(pairs, split), protocol.pairs_per_class, execution.seed)
    _require_variations(drawn, protocol)
    located_by_store = [locate(store, drawn, protocol) for store in selected.stores]
    # Imported this late because it imports torch: the errors above are raised without it.
    from vitsee_core.analyses.keypoints.store_search import StoreSearch

    searches = [
        StoreSearch.plan(
            store,
            chosen_sites,
            located,
            metrics=metric_names,
            protocol=protocol,
            with_noise=bool(baselines),
            execution=execution,
        )
        for (store, chosen_sites), located in zip(
            selected.members, located_by_store, strict=True
        )
    ]
    # Rows about the models come first, of all stores.
    rows: list[dict[str, Any]] = []
    baseline_rows: list[dict[str, Any]] = []
    with counting(execution.progress, sum(search.n_reads() for search in searches)):
        for search in searches:
            rows += search.site_rows(execution)
            baseline_rows += search.baseline_rows(execution)
    notes = {
        "interval": INTERVAL_METHOD,
        "protocol": protocol.describe(),
        "seed": execution.seed,
        "preset": _preset_note(options.preset),
        "pairs": {search.store.label: search.located.describe() for search in searches},
        **selected.notes(),
        REPLICATES: {search.store.label: search.scorer.describe() for search in searches},
    }
    # Columns of groups only where the user asked for them.
    columns = list(COLUMNS)
    if CLASS not in protocol.by_group:
        columns.remove(CLASS)
    if not {*protocol.by_group} - {CLASS}:
        columns.remove(GROUP)
    return Table.from_rows(rows + baseline_rows, columns, notes)


def _require_variations(pairs: Sequence[Pair], protocol: Protocol) -> None:
    """Raise VitseeError if a pair does not state a variation that pairs are grouped by."""
    for word in protocol.by_group:
        if word not in VARIATIONS:
            continue
        for pair in pairs:
            if word not in pair.variations:
                raise VitseeError(
                    f"the pair {pair.name} has no {VARIATIONS[word]}; leave out "
                    f"--by-group {word}"
                )


def _preset_note(preset: str | None) -> str | None:
    """Return the note on the preset, None without one."""
    if preset is None:
        return None
    return f"{preset}: {PRESETS[preset]}"


def _select_grid_sites(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    """Return the matching sites whose tokens lie on the image; log the others.

    Raises:
        SiteError: none of the matching sites has a grid.
        MissingInput: one is stored pooled only.
    """
    chosen = store.select(list(patterns))
    with_grid = []
    without_grid = []
    for site in chosen:
        layout = site.layout
        if layout is not None and layout.grid and layout.stride_px:
            with_grid.append(site)
        else:
            without_grid.append(site.name)
    if not with_grid:
        raise SiteError(
            f"{store.label}: {', '.join(site.name for site in chosen[:3])} has no tokens "
            "on the image's grid; keypoints need sites that have (vitsee info lists them)"
        )
    for site in with_grid:
        # Raises MissingInput before any work if the tokens are not there.
        store.acts(site.name, "patches", partial=True)
    if without_grid:
        log.info("%s: left out, without a grid: %s", store.label, ", ".join(without_grid))
    return with_grid


BASELINE_LINES = ("grid", "still", "chance", "random")
SAME_LINE = 0.002  # baselines of stores that differ by less are drawn as one line
HEADROOM = 1.12  # times the highest value is the top of a panel
MAX_CEILING = 1.6  # times the highest curve; above it, a ceiling leaves curves no room


@styled
def plot(table: Table) -> Figure:
    """Draw PCK against relative depth, a panel per alpha and a curve per store.

    PCK is the mean over classes, else the first metric of the table, with the 95 % interval as a
    band; the ceiling of the grid and chance are dashed (Walmer et al. 2023, Figs. 10 right, 31).
    A ceiling far above the curves is given in words.
    """
    baseline = pl.col("baseline")
    is_drawn = baseline.is_null() | baseline.is_in(BASELINE_LINES)
    for column in (CLASS, GROUP):
        if column in table.frame.columns:
            is_drawn &= pl.col(column).is_null()  # of all pairs
    rows = table.frame.filter(is_drawn)
    models = rows.filter(baseline.is_null())
    # One mean alone, whose metrics differ by alpha: the first of the table.
    metrics = [*rows["metric"].unique(maintain_order=True)]
    prefix = metrics[0].partition("@")[0] + "@"
    metrics = [metric for metric in metrics if metric.startswith(prefix)]

    def draw_baselines(axes: Axes, curves: pl.DataFrame, metric: str) -> None:
        """Add the lines of baselines to a panel and choose its vertical range."""
        lines = rows.filter(baseline.is_in(BASELINE_LINES), metric=metric)
        ceiling = lines.filter(baseline="grid")["value"]
        low_lines = lines.filter(baseline.is_in(["still", "chance"]))["value"]
        highest_ceiling = _max_value(ceiling)
        top = _max_value(curves["high"], curves["value"], low_lines)
        if highest_ceiling <= MAX_CEILING * top:
            top = max(top, highest_ceiling)
        # An empty range has no scale: 1 where all values are 0.
        axes.set_ylim(0, HEADROOM * top or 1)
        for name, dashes in zip(BASELINE_LINES, DASHES, strict=False):
            line = lines.filter(baseline=name)
            if len(line) and float(np.nanmin(line["value"])) <= HEADROOM * top:
                _draw_baseline(axes, line, models, name, dashes)
        if highest_ceiling > HEADROOM * top:
            _write_ceiling(axes, float(np.nanmin(ceiling)), highest_ceiling)

    return draw_depth_panels(
        models,
        metrics,
        draw_baselines,
        spread="95 % interval over images",
        counts=("n_pairs", "pairs"),
    )


def _max_value(*values: pl.Series) -> float:
    """Return the largest number of several columns, 0 if there is none above it."""
    return float(np.nanmax(np.concatenate(values), initial=0))


def _draw_baseline(
    axes: Axes, rows: pl.DataFrame, models: pl.DataFrame, name: str, dashes: Any
) -> None:
    """Draw a baseline: grey if it is the same for all stores, else in their colours.

    Args:
        axes: where to draw.
        rows: rows of the baseline at one alpha.
        models: rows of the stores' curves, which decide the colours.
        name: name of the baseline.
        dashes: matplotlib's style of the line.
    """
    colours = {curve.store: look["color"] for curve, look in curve_looks(models).items()}
    values = rows["value"]
    is_shared = float(np.nanmax(values) - np.nanmin(values)) < SAME_LINE
    for store_rows in rows.partition_by("store", maintain_order=True):
        line = store_rows.sort("rel_depth", maintain_order=True)
        axes.plot(
            line["rel_depth"],
            line["value"],
            color=GREY if is_shared else colours[line["store"][0]],
            linestyle=dashes,
            linewidth=1,
            zorder=1.5,
        )
        if is_shared:
            break
    # Without points: the entry of the legend, grey whatever the lines' colours.
    axes.plot(
        [], [], color=GREY, linestyle=dashes, linewidth=1, label=baseline_words(name)
    )


def _write_ceiling(axes: Axes, low: float, high: float) -> None:
    """Write the range of a ceiling above the panel into its upper right corner."""
    span = f"{low:.2f}"
    if high - low >= 0.005:
        span = f"{low:.2f} to {high:.2f}"
    axes.annotate(
        f"ceiling (grid): {span} ↑",
        (0.99, 0.99),
        xycoords="axes fraction",
        ha="right",
        va="top",
        fontsize=small(),
        color=GREY,
    )


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Find keypoints again in other images of a class.

    A keypoint of one image is looked for in another by the cosine of dense features;
    PCK is the share found near enough (Walmer et al. 2023, Figs. 10 right, 31;
    SPair-71k). The stores hold the pairs' images, whole: with --crop-mode border and
    --crop-pct 1.

      $ vitsee extract vit_base_patch16_224 --data SPair-71k/JPEGImages \\
            --crop-mode border --fill black --crop-pct 1 -o b16.zarr
      $ vitsee keypoints b16.zarr --pairs SPair-71k -o pck.csv --png pck.png
      $ vitsee keypoints b16.zarr dino.zarr --pairs SPair-71k --preset walmer --png both.png
      $ vitsee keypoints b16.zarr --pairs SPair-71k/Layout/small/test.txt --by-group class

    Features are bilinear between tokens, and scaled to unit length after that; the
    released code does not scale, so that what it finds lies on the token grid: --match
    vit_analysis. Pairs whose images the store lacks are left out and counted.

    Metrics: pck@A: the mean over classes; pck_point@A: over points; pck_image@A: over
    pairs. Rows with a baseline need no features: chance, still (the same place in the
    image), grid (the nearest possible place, a ceiling); --baseline random searches
    random features (Walmer et al. 2023, B.3).
    """,
    needs=("grid", "images"),
    reading=(
        "The share of keypoints found in another image of the class, against depth. Grey "
        "lines: a guess at random, the same place in the image, and the nearest place "
        "that the grid of tokens allows, above which no model can be. Intervals are over "
        "images, of which pairs are no independent sample."
    ),
    source="Min et al. 2019 (SPair-71k); Walmer et al. 2023, Figs. 10 right, 31, Table 5",
    columns=COLUMNS,
    meanings={
        "group": "class, group: with --by-group",
        "high": "95 % interval by a jackknife that leaves out an image with all its pairs",
    },
    metrics=("pck@*", "pck_point@*", "pck_image@*"),
    run=run,
    plot=plot,
    headline=headline,
)
