"""Token norms: are there outliers, registers or massive activations?

Of the tokens of a site, x_t (channels), mean over images unless said otherwise:

- `norm`, `norm_median`: mean over images of |x_t|, of single tokens and of kinds of tokens; median
  over all tokens of a kind in all images.
- `outlier_share`: patch tokens with a norm above 150 (Darcet et al. 2024, section 2.1, whose
  threshold fits the last layer of DINOv2-g; other models, other scales: `threshold`).
- `outlier_share_mad`: patch tokens with a norm above median + 6 x 1.4826 MAD of the patch tokens of
  all images at the site, a threshold that follows the model's scale.
- `bimodality`: (skewness^2 + 1) / kurtosis of the patch tokens' log norms: 1/3 for a normal sample,
  5/9 for a uniform one, 1 for two peaks and nothing between (Sarle's coefficient, without his
  small-sample terms).
- `norm_histogram`: share of the patch tokens with a norm between `norm_from` and `norm_to`
  (Darcet et al., Fig. 4).
- `massive_top1`: the largest |activation| of an image over all tokens and channels;
  `massive_ratio`: over the median |activation| of the image (none where
  that is 0, as behind a ReLU); `massive_share`: images with one above
  100 and above 1,000 times that median (Sun et al. 2024, section 2); `massive_channel_share`,
  `massive_token_share`: images whose largest lies in the commonest `channel`, at the commonest
  token (`at`).
- `neighbour_cos`: cosine of a patch with its two to four neighbours, mean over patches (Darcet et
  al., Fig. 5a, who measure it after the patch embedding); of clips those in its own frame.

Norms are those of the site: of the stream before any final norm in `blocks`, which is where
outliers are; the released features of DINOv2 are normalised (`--sites norm`) and have none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.norms.norm_figures import draw_norms
from vitsee_core.analyses.norms.stream_norms import (
    NormSource,
    ReadTokens,
    TokenStatistics,
    bimodality,
    histogram,
    mad_threshold,
    norm_source,
    share_above_mad,
)
from vitsee_core.declaration import Analysis
from vitsee_core.figures.patch_maps.photos import frames_seen
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.options import (
    FLOW,
    SITES,
    Offers,
    Option,
    metrics_option,
    tokens_option,
)
from vitsee_core.runtime.progress import SITE_IMAGES, counting
from vitsee_core.runtime.store_selection import select_each, sites_of
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.statistics.image_statistics import (
    METHODS,
    block_labels,
    median_statistic,
    statistic,
)
from vitsee_core.statistics.jackknife import (
    Cells,
    cells_of,
    columns_of,
    jackknife_cells,
    mean_cells,
)
from vitsee_core.statistics.medians import pooled_median
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.statistics.shares import as_share
from vitsee_core.statistics.skip_branch import TokenPlace, place_columns, places_of
from vitsee_core.tables.columns import SITE, in_time, site_columns
from vitsee_core.tables.headlines import Answer, by_store, extremes, measured
from vitsee_core.tables.metrics import asked_for
from vitsee_core.tables.results import Table
from vitsee_core.types import Float, Integers
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput, SiteError, VitseeError
from vitsee_stores.manifest import abbreviate
from vitsee_stores.selectors import TokenSelection, layout_tokens

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)

plot = draw_norms

OF_NORMS = ("norm", "norm_median", "outlier_share", "outlier_share_mad", "bimodality")
OF_ACTIVATIONS = (
    *("massive_top1", "massive_ratio", "massive_share"),
    *("massive_channel_share", "massive_token_share", "neighbour_cos"),
)
METRICS = (*OF_NORMS, "norm_histogram", *OF_ACTIVATIONS)
KINDS = ("all", "cls", "prefix", "patches")
TOKENS = (*KINDS, "each")
COLUMNS = (
    *(*SITE, "token", "row", "col", "channel", "at", "norm_from", "norm_to"),
    *("metric", "value", "std", "low", "high", "n_images"),
)
THRESHOLD = 150.0
MASSIVE = 100.0
MASSIVE_RATIO = 1000.0
# A token of an image: its norm, a copy for the median, and what is left of it without a block.
BYTES_A_TOKEN = 8 * 5
PIECE_BYTES = 16 << 20  # of tokens whose means are computed at a time


@analysis
def run(
    *stores: Store,
    metrics: Annotated[
        Sequence[str],
        metrics_option(
            METRICS,
            "all that the store has",
            "Those of activations (massive_*, neighbour_cos) need a store that keeps all tokens.",
        ),
    ] = (),
    sites: Annotated[Sequence[str], SITES] = ("blocks",),
    tokens: Annotated[Sequence[str], tokens_option(TOKENS, "all and each")] = (),
    threshold: Annotated[
        float,
        Option("Norm above which outlier_share counts a patch.", metavar="NORM", above=0),
    ] = THRESHOLD,
    execution: Annotated[
        Execution, Offers("images seed jobs memory", dask="slabs")
    ] = DEFAULT,
) -> Table:
    """One row per store, site, metric and token, or kind of token.

    Columns: see `COLUMNS`. `token`, `row`, `col` as in `skip_branch.TokenPlace`: rows about single
    tokens have `norm` and, for patches, the shares of images in which it is an outlier; those about
    `patches` have the rest of `OF_NORMS` and the histogram; those about activations have no token.
    Norms in the units of the activations, shares from 0 to 1. NaN: no value (`value`), or fewer
    than two images (the others). The stores may have different images.

    Memory: the norms of all tokens of one site, five times in float64; refused where that is more
    than the memory.

    Args:
        stores: norms need a store's residual dot products or its activations, see `norm_source`;
            the metrics `OF_ACTIVATIONS` its activations.

    Raises:
        MissingInput: no store keeps what the norms, or a metric that was asked for, need.
        SiteError: no such site, or none with tokens.
        VitseeError: unknown metric, a threshold that is no positive number, more tokens than fit
            the memory, or numbers that are not finite.
    """
    asked_for(metrics, METRICS, "norms")
    if not (np.isfinite(threshold) and threshold > 0):
        raise VitseeError(f"the threshold is {threshold:g}; expected a norm above 0")
    tokens = tokens or ("all", "each")
    for word in tokens:
        TokenSelection.parse(word, TOKENS)
    selected = select_each(stores, sites, partial(_sites, metrics=metrics))
    chosen = [execution.rows(store) for store in selected.stores]
    parts: list[Cells] = []
    sources: dict[str, dict[str, str]] = {}
    total = sum(r.n * len(own) for r, own in zip(chosen, selected.chosen, strict=True))
    with counting(execution.progress, total, SITE_IMAGES):
        for (store, own), picked in zip(selected.members, chosen, strict=True):
            work = _Site(store, picked, execution, tokens, threshold, metrics)
            for site in own:
                parts += work(site)
            sources[store.label] = {
                site.name: norm_source(store, site).describe() for site in own
            }
    notes = {
        "interval": {
            "norm, massive_top1, massive_ratio, neighbour_cos": METHODS["mean"],
            "shares": SHARES,
            "norm_median": METHODS["median"],
            "bimodality": METHODS["jackknife"],
        },
        "std": METHODS["std"],
        "outliers": f"outlier_share: above {threshold:g}; outlier_share_mad: above median + 6 x "
        "1.4826 MAD of the patch tokens of all images at the site",
        "threshold": f"{threshold:g}",
        "norms_from": sources,
        "stream": "blocks: the residual stream before any final norm",
        "seed": execution.seed,
        "images": {
            s.label: r.describe() for s, r in zip(selected.stores, chosen, strict=True)
        },
        **({"clip": seen} if (seen := frames_seen(selected.stores[0])) else {}),
        **selected.notes(),
    }
    layouts = [
        store.site(site.name).layout for store, own in selected.members for site in own
    ]
    return Table.concat(parts, in_time(COLUMNS, layouts), notes)


def _sites(
    store: Store, patterns: Sequence[str], metrics: Sequence[str]
) -> list[SiteSpec]:
    """The sites that have norms; those pooled away are named, including vectors.

    Raises:
        SiteError: none has tokens.
        MissingInput: the store lacks what the norms or the metrics need.
    """
    chosen = sites_of(store, patterns)
    with_tokens = [site for site in chosen if site.layout is not None]
    if not with_tokens:
        raise SiteError(
            f"{chosen[0].name} of {store.label} has no tokens; expected e.g. blocks"
        )
    measured: list[SiteSpec] = []
    lacking: list[MissingInput] = []
    for site in with_tokens:
        try:
            norm_source(store, site)
            if set(metrics) & set(OF_ACTIVATIONS):
                store.acts(site.name)
            measured.append(site)
        except MissingInput as missing:
            lacking.append(missing)
    if not measured:
        raise lacking[0]
    left = [site.name for site in chosen if site not in measured]
    if left:
        log.info(
            "%s: no norms of %s (vectors, or pooled only)", store.label, abbreviate(left)
        )
    return measured


class _Site:
    def __init__(
        self,
        store: Store,
        rows: Rows,
        execution: Execution,
        tokens: Sequence[str],
        threshold: float,
        metrics: Sequence[str],
    ) -> None:
        self.store = store
        self.rows = rows
        self.execution = execution
        self.tokens = tokens
        self.threshold = threshold
        self.metrics = metrics or METRICS
        self.n = int((rows.mask & store.valid).sum())
        self.labels = block_labels(self.n, None if store.shuffled else execution.seed)

    def __call__(self, site: SiteSpec) -> list[Cells]:
        spec = self.store.site(site.name)
        layout = spec.layout
        assert layout is not None
        self._check_memory(site.name, layout)
        source = norm_source(self.store, site)
        with_acts = spec.tokens == "all" and bool({*self.metrics} & {*OF_ACTIVATIONS})
        statistics = self._read(spec, layout, source, with_acts)
        blocks = self._of_norms(statistics.norms, layout)
        if with_acts:
            blocks += self._of_activations(statistics, layout)
        place = site_columns(self.store, site)
        return [
            place | (as_share(block) if "share" in block["metric"] else block)
            for block in blocks
            if block["metric"] in self.metrics
        ]

    def _check_memory(self, name: str, layout: TokenLayout) -> None:
        need = BYTES_A_TOKEN * self.n * layout.n_tokens
        budget = self.execution.budget
        if need > budget:
            fit = budget // (BYTES_A_TOKEN * layout.n_tokens)
            raise VitseeError(
                f"the norms of {self.n} images at {name} of {self.store.label} take "
                f"{human_bytes(need)} of memory; --memory is {human_bytes(budget)} (use fewer "
                f"--images, {fit} fit, or give more --memory)"
            )

    def _read(
        self, spec: SiteSpec, layout: TokenLayout, source: NormSource, with_acts: bool
    ) -> TokenStatistics:
        body = None if layout.grid is None else layout.body
        work = ReadTokens(spec.name, source, with_acts, layout.n_prefix, body)
        use = self.execution
        options: dict[str, Any] = {
            "jobs": use.jobs,
            "map": use.map,
            "progress": use.progress,
        }
        parts = each_slab(self.store, work, rows=self.rows, **options)
        return TokenStatistics.joined(parts, self.n)

    def _of_norms(self, norms: Float, layout: TokenLayout) -> list[Cells]:
        kinds = places_of(layout, [word for word in self.tokens if word in KINDS])
        singles = places_of(layout, [word for word in self.tokens if word not in KINDS])
        above = norms > self.threshold
        body = norms[:, layout.n_prefix :]
        above_mad = norms > mad_threshold(body)
        blocks: list[Cells] = []
        for place in kinds:
            own = _columns(norms, place.members)
            blocks.append(_about(place, "norm") | mean_cells(own.mean(1), self.labels))
            if "norm_median" in self.metrics:
                blocks.append(_about(place, "norm_median") | self._median(own))
            if place.token == "patches":
                blocks += self._of_patches(place, own, above[:, place.members])
        singles = [place for place in singles if place not in kinds]
        blocks += _of_tokens(singles, "norm", norms, self.labels)
        patches = [place for place in singles if min(place.members) >= layout.n_prefix]
        blocks += _of_tokens(patches, "outlier_share", above, self.labels)
        blocks += _of_tokens(patches, "outlier_share_mad", above_mad, self.labels)
        return blocks

    def _median(self, norms: Float) -> Cells:
        """Cells of the median of all norms (images, tokens)."""
        present = np.ones((1, len(norms)), bool)
        statistic = median_statistic(pooled_median(norms), present, self.labels)
        return cells_of(statistic.estimates(), 0)

    def _of_patches(self, place: TokenPlace, norms: Float, above: Any) -> list[Cells]:
        blocks = [_about(place, "outlier_share") | mean_cells(above.mean(1), self.labels)]
        for metric, measure in (
            ("outlier_share_mad", share_above_mad),
            ("bimodality", bimodality),
        ):
            if metric in self.metrics:
                estimate = measure(norms, self.labels)
                blocks.append(_about(place, metric) | jackknife_cells(*estimate, self.n))
        if "norm_histogram" in self.metrics and (bins := histogram(norms)):
            low, high, share = (np.array(of) for of in zip(*bins, strict=True))
            edges = {
                "norm_from": low,
                "norm_to": high,
                "value": share,
                "n_images": self.n,
            }
            blocks.append(_about(place, "norm_histogram") | edges)
        return blocks

    def _of_activations(self, of: TokenStatistics, layout: TokenLayout) -> list[Cells]:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(of.median > 0, of.largest / of.median, np.nan)
        massive = (of.largest > MASSIVE) & (of.largest > MASSIVE_RATIO * of.median)
        channel = _commonest(of.channel)
        token = _commonest(of.token)
        named = layout_tokens(layout)[token]
        where = {"channel": channel, "at": named.name}
        values: dict[str, tuple[Any, Cells]] = {
            "massive_top1": (of.largest, where),
            "massive_ratio": (ratio, where),
            "massive_share": (massive, {}),
            "massive_channel_share": (of.channel == channel, where | {"at": None}),
            "massive_token_share": (of.token == token, where | {"channel": None}),
        }
        if layout.grid is not None:
            values["neighbour_cos"] = (of.neighbour_cos, {})
        return [
            {"metric": metric} | about | mean_cells(of_images, self.labels)
            for metric, (of_images, about) in values.items()
        ]


def _columns(norms: Float, members: Sequence[int]) -> Float:
    """These tokens' norms; a view if they are contiguous."""
    first = members[0]
    last = members[-1]
    if tuple(members) == tuple(range(first, last + 1)):
        return norms[:, first : last + 1]
    return norms[:, members]


def _about(place: TokenPlace, metric: str) -> Cells:
    return {"token": place.token, "row": place.row, "col": place.col, "metric": metric}


def _of_tokens(
    places: Sequence[TokenPlace], metric: str, values: Any, labels: Integers
) -> list[Cells]:
    """Means over images of single tokens; a few at a time, which need little memory."""
    blocks: list[Cells] = []
    at_once = max(1, PIECE_BYTES // (8 * len(values)))
    for first in range(0, len(places), at_once):
        some = places[first : first + at_once]
        columns = [place.members[0] for place in some]
        x = np.ascontiguousarray(values[:, columns].T, dtype=np.float64)
        estimates = statistic(x, "mean", labels).estimates()
        blocks.append({**place_columns(some), "metric": metric, **columns_of(estimates)})
    return blocks


def _commonest(of_images: Integers) -> int:
    """The most frequent value, the lowest of ties."""
    values, counts = np.unique(of_images, return_counts=True)
    return int(values[counts.argmax()])


def headline(table: Table) -> list[Answer]:
    """The site with most outliers among patches, and the one with the largest activation."""
    said: dict[str, list[str]] = {}
    units = {
        "outlier_share_mad": "of patches are outliers",
        "massive_ratio": "times the median",
    }
    for metric, unit in units.items():
        token = "patches" if metric == "outlier_share_mad" else None
        for store, rows in by_store(table, metric=metric, token=token, row=None):
            i = extremes(rows)[1]
            text = f"{measured(rows, i)} {unit} at {rows['site'][i]}"
            said.setdefault(store, []).append(
                f"at most {text}" if token else f"largest activation {text}"
            )
    return [(store, "; ".join(parts)) for store, parts in said.items()]


ANALYSIS = Analysis(
    module=__name__,
    question=FLOW,
    help="""
    Find outlier tokens and massive activations.

    Large vision transformers put a few patch tokens at norms far above the others, where they
    hold global information (Darcet et al. 2024; registers take their place), and a few
    activations at thousands of times the median (Sun et al. 2024). Norms come from the dot
    products that extract stores by default, also with --tokens pooled; activations are read for
    the rest.

      $ vitsee norms l14.zarr -o norms.csv --png norms.png
      $ vitsee norms dinov2=a.zarr reg=b.zarr --tokens all --png both.png > both.csv
      $ vitsee norms b16.zarr --metric outlier_share --threshold 60 --tokens patches

    --tokens all: cls, registers and patches as kinds, with the median, the shares of outliers
    (above --threshold; above median + 6 x 1.4826 MAD) and the histogram; each: every token,
    with the share of images in which it is an outlier. The figure shows the histogram over
    depth, where the outliers lie, and their share over depth. Of clips patches have a column
    frame, their place in time.
    """,
    needs=("sites",),
    reading=(
        "The lengths of tokens against depth, and how they are distributed. A second peak far "
        "above the others are outlier tokens, which hold global information in place of their "
        "patch; massive activations are single channels thousands of times above the median. "
        "Maps show where outliers are, in the layers that have most."
    ),
    source="Darcet et al. 2024, Figs. 3 to 5; Sun et al. 2024",
    columns=COLUMNS,
    meanings={
        "at": "where the largest activation of most images lies",
        "norm_to": "a bin of norm_histogram",
    },
    metrics=METRICS,
    run=run,
    plot=plot,
    headline=headline,
    glance_metric="outlier_share_mad",
)
