"""Spectra: how many directions do a layer's features use?

Of one vector per image (class token, mean over patches, `pooled`), or of all tokens as examples:
`rankme`, `effective_rank`, `participation_ratio`, `alpha`, `anisotropy` as in
`statistics.covariance`. Of one vector per image also `twonn` and, where they have labels, `nc1`,
`cdnv`, `nc2_norms`, `nc2_angles`, `nc4`, see `measures`.

Each number depends on how many examples it is of, and cannot exceed a `cap`; so each row has the
cap, and the value of two halves of the images. Halves that are far from the whole say that more
images would give another number. One channel with a large mean takes RankMe to 1 whatever the
others do (massive activations): read it with the effective rank, which is centred.

Tokens of one image are not an independent sample: with tokens as examples, the unbiased
participation ratio is that of tokens, but intervals are over images.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from vitsee_core.analyses.spectrum.site_spectra import (
    MAX_NEIGHBOUR_IMAGES,
    METRICS,
    SpectrumWork,
)
from vitsee_core.declaration import Analysis
from vitsee_core.features import choose_features
from vitsee_core.figures.curve_panels import draw_depth_panels
from vitsee_core.figures.depth_curves import DOTS, DOTTED, draw_marks
from vitsee_core.figures.plotting import DECADES, FINE, plain_log_ticks, styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import (
    KNOWLEDGE,
    SITES,
    Offers,
    metrics_option,
    tokens_option,
)
from vitsee_core.runtime.progress import SITE_IMAGES, counting
from vitsee_core.runtime.store_selection import select_each, sites_of
from vitsee_core.statistics.covariance import say_cost
from vitsee_core.statistics.image_statistics import METHODS
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.tables.columns import SITE
from vitsee_core.tables.headlines import Answer, by_store, extremes, measured, picked
from vitsee_core.tables.metrics import SIZE_NOTE, depends_on_size, select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.types import pl
from vitsee_stores import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)


COLUMNS = (
    *(*SITE, "token", "cap", "half_a", "half_b"),
    *("metric", "value", "std", "low", "high", "n_images", "n_examples"),
)
TOKENS = ("cls", "mean", "mean-all", "first", "rest", "patches", "prefix", "all")


METRICS_OPTION = metrics_option(
    METRICS,
    "all that can be had",
    "twonn needs one vector per image, nc1 to nc4 and cdnv labels too.",
)
# Notes of the sidecar.
TWONN_INTERVAL = (
    "standard error by batch means: the standard deviation over blocks of images of each "
    "block's own dimension, / sqrt(blocks); empty below 3 images a block"
)
HALVES = "half_a, half_b: of the blocks of images 0, 2, 4, ... and 1, 3, 5, ..."
CAP = "the largest value that the metric can have with these examples and channels"


@analysis
def run(
    *stores: Store,
    metrics: Annotated[Sequence[str], METRICS_OPTION] = (),
    sites: Annotated[Sequence[str], SITES] = ("blocks",),
    tokens: Annotated[
        str | None, tokens_option(TOKENS, "cls where there is one, else mean")
    ] = None,
    execution: Annotated[
        Execution, Offers("images seed jobs memory", dask="sites")
    ] = DEFAULT,
) -> Table:
    """Return a table with one row per store, site and metric.

    The columns are `COLUMNS`. `token` says which tokens are examples, `n_examples` counts them.
    `cap` is the largest value possible. `half_a` and `half_b` are the values on every second block
    of images and on the others; `low` and `high` are the 95 % interval over images by the
    jackknife. NaN is a value that is not defined (all examples alike, or too few).

    Memory: the vectors of one site in float32, with labels twice more in float64, and a D x D
    matrix in float64 for each of 20 blocks; for tokens the matrices only. More than the budget is
    refused. Time: n D^2 once, and 23 eigendecompositions of min(n, D) per site.

    Args:
        stores: stores, perhaps of different images; nc1 to nc4 and cdnv need labels.
        metrics: names out of `METRICS`; empty for all that the stores allow.
        tokens: which tokens are examples.

    Raises:
        MissingInput: the site is stored pooled only.
        SiteError: no site matches, or it does not have these tokens.
        VitseeError: a metric is unknown or needs one vector per image, labels or logits that are
            missing; or the work does not fit the memory.

    Examples:
        >>> import vitsee
        >>> table = vitsee.spectrum("vit.zarr", metrics=("rankme", "alpha"), sites="blocks.-1.out")
        >>> list(zip(table["metric"].tolist(), table["value"].round(1).tolist()))
        [('rankme', 29.0), ('alpha', nan)]
    """
    select_metrics(metrics, METRICS, "spectrum")
    selected = select_each(stores, sites, sites_of)
    plans = []
    for store, chosen in selected.members:
        all_features = [choose_features(store, site, tokens) for site in chosen]
        work = SpectrumWork(store, execution.rows(store), execution.seed, metrics)
        # Before any work: a wrong option must not cost hours.
        for features in all_features:
            work.check(features, execution.budget)
        plans.append((work, list(zip(chosen, all_features, strict=True))))
    for work, site_features in plans:
        # Seconds for vectors, hours for all tokens of many images.
        with_tokens = [features for _, features in site_features if features.has_tokens]
        say_cost(with_tokens, work.rows.n)
    rows: list[dict[str, Any]] = []
    remarks: list[str] = []
    # Twice: each image is read, and then measured.
    counts = [2 * work.rows.n * len(site_features) for work, site_features in plans]
    with counting(execution.progress, sum(counts), SITE_IMAGES):
        for work, site_features in plans:
            for site_rows, site_remarks in execution.spread(work, site_features):
                rows += site_rows
                remarks += site_remarks
    # After the progress bar has gone.
    for remark in remarks:
        log.info("%s", remark)
    notes = {
        "interval": METHODS["jackknife"],
        "interval_of": {m: SIZE_NOTE for m in METRICS if depends_on_size(m)},
        "twonn_interval": TWONN_INTERVAL,
        "nc4_interval": SHARES,
        "std": METHODS["std"],
        "halves": HALVES,
        "cap": CAP,
        "twonn_images": f"at most {MAX_NEIGHBOUR_IMAGES}",
        "remarks": remarks,
        "seed": execution.seed,
        "images": {work.store.label: work.rows.describe() for work, _ in plans},
        **selected.notes(),
    }
    return Table.from_rows(rows, COLUMNS, notes)


def headline(table: Table) -> list[Answer]:
    """Return per store the effective rank of the last site with its cap, and the largest one."""
    answers = []
    for store, rows in by_store(table, metric="effective_rank"):
        # Of several selections of tokens the first one in the table.
        rows = picked(rows, token=rows["token"][0])
        last = len(rows) - 1
        largest = extremes(rows)[1]
        text = f"{measured(rows, last)} of at most {float(rows['cap'][last]):g} at "
        text += f"{rows['site'][last]} (effective rank)"
        if largest != last:
            text += f"; most at {rows['site'][largest]}, {measured(rows, largest)}"
        answers.append((store, text))
    return answers


RANKS = ("rankme", "effective_rank", "participation_ratio")
# Their values span decades over depth.
LOGARITHMIC = (*RANKS, "nc1", "cdnv")


@styled
def plot(table: Table) -> Figure:
    """Draw a panel per metric: a curve per store over depth, with the 95 % interval as a band.

    Dots are the values of two halves of the images. Dotted lines are the caps of ranks, which have
    logarithmic axes.
    """
    frame = table.frame
    present = [metric for metric in METRICS if metric in frame["metric"]]
    # A metric without a value (alpha of fewer than 100 channels) needs no panel beside others.
    lowest = dict(frame.group_by("metric").agg(pl.col("value").min()).rows())
    metrics = [metric for metric in present if lowest[metric] is not None] or present

    def finish(axes: Axes, rows: pl.DataFrame, metric: str) -> None:
        """Add halves and caps to a panel that has its curves."""
        for half in ("half_a", "half_b"):
            draw_marks(axes, rows, frame, half, DOTS, "half of the images")
        if metric in RANKS:
            draw_marks(axes, rows, frame, "cap", DOTTED, "largest possible")
        if metric in LOGARITHMIC and (lowest[metric] or 0) > 0:
            _use_log_axis(axes, rows, caps=metric in RANKS)
        # The same ends for all metrics, with room for markers.
        axes.set_xlim(-0.04, max(1.04, axes.get_xlim()[1]))

    return draw_depth_panels(frame, metrics, finish)


def _use_log_axis(axes: Axes, rows: pl.DataFrame, *, caps: bool) -> None:
    """Give a panel a logarithmic axis that shows all values, and the caps if there are any."""
    names = ["value", "half_a", "half_b"]
    if caps:
        names.append("cap")
    values = rows.select(names).to_numpy()
    values = values[values > 0]
    axes.set_yscale("log")
    axes.set_ylim(0.8 * values.min(), 1.3 * values.max())
    # Every decade where there are several, else what lies within it.
    few = values.max() < 40 * values.min()
    plain_log_ticks(axes.yaxis, FINE if few else DECADES)


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Measure how many directions a layer's features use.

    RankMe, effective rank, participation ratio, decay of the spectrum (alpha), anisotropy
    and intrinsic dimension (TwoNN) of one vector per image, or of tokens; with labels,
    neural collapse. Every value comes with the largest it can be, two halves of the
    images, and an interval.

      $ vitsee spectrum b16.zarr -o spectrum.csv --png spectrum.png
      $ vitsee spectrum mae=a.zarr dino=b.zarr --tokens mean --metric rankme > rankme.csv
      $ vitsee spectrum b16.zarr --tokens patches --sites 'blocks.*.out' -o tokens.csv

    --tokens patches, prefix, all: every token is an example (n D^2 multiply-adds a site).

    The figure shows each metric over depth, dots for the halves, dotted lines for the
    caps.
    """,
    needs=("sites",),
    reading=(
        "How many directions a layer's features use, how fast their spectrum falls, and "
        "how far the classes have collapsed to points. No number can exceed its cap, and "
        "all depend on the number of images: halves (in the table) far from the whole "
        "say that more images would move it."
    ),
    source="Garrido et al. 2023; Papyan et al. 2020; Facco et al. 2017",
    columns=COLUMNS,
    meanings={
        "cap": "the largest value possible",
        "half_b": "values of two halves of the images",
    },
    metrics=METRICS,
    run=run,
    plot=plot,
    headline=headline,
    glance_metric="effective_rank",
)
