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
from numpy.typing import NDArray

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
# Bytes for a token of an image: its norm, a copy for the median, and what is left without a block.
BYTES_PER_TOKEN = 8 * 5
PIECE_BYTES = 16 << 20  # of tokens whose means are computed at a time


@analysis
def run(
    *stores: Store,
    metrics: Annotated[
        Sequence[str],
        metrics_option(
            METRICS,
            "all that the store has",
            "Those of activations (massive_*, neighbour_cos) need a store that keeps "
            "all tokens.",
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
    """Return the norms and outliers of tokens, one row per store, site, metric and token or kind.

    The columns are `COLUMNS`. Rows about single tokens (`token`, or `row` and `col` of a patch)
    have `norm` and, for patches, the shares of images in which the token is an outlier. Rows about
    `patches` have the rest of `OF_NORMS` and the histogram; rows about activations have no token.
    Norms are in the units of the activations, shares from 0 to 1. Numbers are NaN without a value
    (`value`), or with fewer than two images (the others). The stores may have different images.

    Memory: the norms of all tokens of one site, five times in float64; more than the memory is
    refused.

    Args:
        stores: norms need a store's residual dot products or its activations; the metrics
            `OF_ACTIVATIONS` need its activations.

    Raises:
        MissingInput: no store keeps what the norms, or a metric that was asked for, need.
        SiteError: no such site, or none with tokens.
        VitseeError: unknown metric, a threshold that is not a positive number, more tokens than fit
            the memory, or numbers that are not finite.
    """
    asked_for(metrics, METRICS, "norms")
    if not (np.isfinite(threshold) and threshold > 0):
        raise VitseeError(f"the threshold is {threshold:g}; expected a norm above 0")
    tokens = tokens or ("all", "each")
    for word in tokens:
        TokenSelection.parse(word, TOKENS)
    selected = select_each(stores, sites, partial(_sites_with_norms, metrics=metrics))
    images_by_store = [execution.rows(store) for store in selected.stores]
    blocks: list[Cells] = []
    sources: dict[str, dict[str, str]] = {}
    total = sum(
        images.n * len(store_sites)
        for images, store_sites in zip(images_by_store, selected.chosen, strict=True)
    )
    with counting(execution.progress, total, SITE_IMAGES):
        for (store, store_sites), images in zip(
            selected.members, images_by_store, strict=True
        ):
            measures = SiteNorms(
                store,
                images,
                execution,
                tokens=tokens,
                threshold=threshold,
                metrics=metrics,
            )
            for site in store_sites:
                blocks += measures.measure(site)
            sources[store.label] = {
                site.name: norm_source(store, site).describe() for site in store_sites
            }
    notes: dict[str, Any] = {
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
    }
    notes["images"] = {
        store.label: images.describe()
        for store, images in zip(selected.stores, images_by_store, strict=True)
    }
    frames = frames_seen(selected.stores[0])
    if frames:
        notes["clip"] = frames
    notes.update(selected.notes())
    layouts = [
        store.site(site.name).layout
        for store, store_sites in selected.members
        for site in store_sites
    ]
    return Table.concat(blocks, in_time(COLUMNS, layouts), notes)


def _sites_with_norms(
    store: Store, patterns: Sequence[str], metrics: Sequence[str]
) -> list[SiteSpec]:
    """Return the selected sites that have norms; sites without tokens, or pooled, are logged.

    Args:
        store: of the sites.
        patterns: selectors of sites.
        metrics: as the user gave them; those of activations need all tokens.

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
    errors: list[MissingInput] = []
    for site in with_tokens:
        try:
            norm_source(store, site)
            if set(metrics) & set(OF_ACTIVATIONS):
                store.acts(site.name)
            measured.append(site)
        except MissingInput as error:
            errors.append(error)
    if not measured:
        raise errors[0]
    left_out = [site.name for site in chosen if site not in measured]
    if left_out:
        log.info(
            "%s: no norms of %s (vectors, or pooled only)",
            store.label,
            abbreviate(left_out),
        )
    return measured


class SiteNorms:
    """Measures the norms and activations of the sites of one store.

    Args:
        store: of the sites.
        rows: the chosen images.
        execution: resources, and the seed of the jackknife's blocks.
        tokens: words of `TOKENS`.
        threshold: norm above which a patch is an outlier.
        metrics: names of `METRICS`; none: all.
    """

    def __init__(
        self,
        store: Store,
        rows: Rows,
        execution: Execution,
        *,
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
        self.n_images = int((rows.mask & store.valid).sum())
        seed = None if store.shuffled else execution.seed
        self.labels = block_labels(self.n_images, seed)

    def measure(self, site: SiteSpec) -> list[Cells]:
        """Return blocks of the table's rows about one site: column -> values.

        Raises:
            VitseeError: its norms do not fit the memory.
        """
        spec = self.store.site(site.name)
        layout = spec.layout
        assert layout is not None
        self._require_memory(site.name, layout)
        source = norm_source(self.store, site)
        wants_activations = not set(self.metrics).isdisjoint(OF_ACTIVATIONS)
        with_acts = spec.tokens == "all" and wants_activations
        statistics = self._read_tokens(spec, layout, source, with_acts)
        blocks = self._norm_blocks(statistics.norms, layout)
        if with_acts:
            blocks += self._activation_blocks(statistics, layout)
        site_cells = site_columns(self.store, site)
        measured: list[Cells] = []
        for block in blocks:
            if block["metric"] in self.metrics:
                if "share" in block["metric"]:
                    block = as_share(block)
                measured.append({**site_cells, **block})
        return measured

    def _require_memory(self, name: str, layout: TokenLayout) -> None:
        """Raise VitseeError if the norms of all tokens of a site do not fit the memory."""
        bytes_per_image = BYTES_PER_TOKEN * layout.n_tokens
        needed = bytes_per_image * self.n_images
        budget = self.execution.budget
        if needed > budget:
            raise VitseeError(
                f"the norms of {self.n_images} images at {name} of {self.store.label} "
                f"take {human_bytes(needed)} of memory; --memory is "
                f"{human_bytes(budget)} (use fewer --images, {budget // bytes_per_image} "
                "fit, or give more --memory)"
            )

    def _read_tokens(
        self, spec: SiteSpec, layout: TokenLayout, source: NormSource, with_acts: bool
    ) -> TokenStatistics:
        """Return the norms of a site's tokens of all images, with numbers of its activations if
        `with_acts`."""
        body = None if layout.grid is None else layout.body
        slabs = each_slab(
            self.store,
            ReadTokens(spec.name, source, with_acts, layout.n_prefix, body),
            rows=self.rows,
            jobs=self.execution.jobs,
            map=self.execution.map,
            progress=self.execution.progress,
        )
        return TokenStatistics.joined(slabs, self.n_images)

    def _norm_blocks(self, norms: Float, layout: TokenLayout) -> list[Cells]:
        """Return the rows about norms (images, tokens): kinds of tokens, then single tokens."""
        kinds = places_of(layout, [word for word in self.tokens if word in KINDS])
        singles = places_of(layout, [word for word in self.tokens if word not in KINDS])
        is_above = norms > self.threshold
        is_above_mad = norms > mad_threshold(norms[:, layout.n_prefix :])
        blocks: list[Cells] = []
        for place in kinds:
            kind_norms = _tokens_of(norms, place.members)
            mean = mean_cells(kind_norms.mean(1), self.labels)
            blocks.append({**_place_cells(place, "norm"), **mean})
            if "norm_median" in self.metrics:
                median = self._median_cells(kind_norms)
                blocks.append({**_place_cells(place, "norm_median"), **median})
            if place.token == "patches":
                blocks += self._patch_blocks(
                    place, kind_norms, is_above[:, place.members]
                )
        # A kind of a single token, as the class token, has its row already.
        singles = [place for place in singles if place not in kinds]
        blocks += _single_token_blocks(singles, "norm", norms, self.labels)
        patches = [place for place in singles if min(place.members) >= layout.n_prefix]
        blocks += _single_token_blocks(patches, "outlier_share", is_above, self.labels)
        blocks += _single_token_blocks(
            patches, "outlier_share_mad", is_above_mad, self.labels
        )
        return blocks

    def _median_cells(self, norms: Float) -> Cells:
        """Return the cells of the median of all norms (images, tokens)."""
        present = np.ones((1, len(norms)), bool)
        median = median_statistic(pooled_median(norms), present, self.labels)
        return cells_of(median.estimates(), 0)

    def _patch_blocks(
        self, place: TokenPlace, norms: Float, is_above: NDArray[np.bool_]
    ) -> list[Cells]:
        """Return the rows about all patches: shares of outliers, bimodality, the histogram.

        Args:
            place: the patches.
            norms: (images, patches).
            is_above: (images, patches), whether a norm is above the threshold.
        """
        outliers = mean_cells(is_above.mean(1), self.labels)
        blocks = [{**_place_cells(place, "outlier_share"), **outliers}]
        # Functions of the norms of all images together, so that each needs its own jackknife.
        of_all_norms = {"outlier_share_mad": share_above_mad, "bimodality": bimodality}
        for metric, measure in of_all_norms.items():
            if metric in self.metrics:
                estimate = measure(norms, self.labels)
                cells = jackknife_cells(*estimate, self.n_images)
                blocks.append({**_place_cells(place, metric), **cells})
        if "norm_histogram" in self.metrics:
            bins = histogram(norms)
            if bins:
                block = _place_cells(place, "norm_histogram")
                block["norm_from"] = np.array([low for low, _, _ in bins])
                block["norm_to"] = np.array([high for _, high, _ in bins])
                block["value"] = np.array([share for _, _, share in bins])
                block["n_images"] = self.n_images
                blocks.append(block)
        return blocks

    def _activation_blocks(
        self, statistics: TokenStatistics, layout: TokenLayout
    ) -> list[Cells]:
        """Return the rows about activations, means over images (Sun et al. 2024)."""
        largest = statistics.largest
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(statistics.median > 0, largest / statistics.median, np.nan)
        # Their definition: above 100, and above 1000 times the median.
        is_massive = (largest > MASSIVE) & (largest > MASSIVE_RATIO * statistics.median)
        channel = _most_frequent(statistics.channel)
        token = _most_frequent(statistics.token)
        token_name = layout_tokens(layout)[token].name
        at_largest = {"channel": channel, "at": token_name}
        # metric -> (value of each image, where it lies)
        values: dict[str, tuple[Any, Cells]] = {
            "massive_top1": (largest, at_largest),
            "massive_ratio": (ratio, at_largest),
            "massive_share": (is_massive, {}),
            "massive_channel_share": (
                statistics.channel == channel,
                {"channel": channel, "at": None},
            ),
            "massive_token_share": (
                statistics.token == token,
                {"channel": None, "at": token_name},
            ),
        }
        if layout.grid is not None:
            values["neighbour_cos"] = (statistics.neighbour_cos, {})
        return [
            {"metric": metric, **location, **mean_cells(image_values, self.labels)}
            for metric, (image_values, location) in values.items()
        ]


def _tokens_of(norms: Float, members: Sequence[int]) -> Float:
    """Return the norms of these tokens, (images, members); a view if they are contiguous."""
    first = members[0]
    last = members[-1]
    if tuple(members) == tuple(range(first, last + 1)):
        return norms[:, first : last + 1]
    return norms[:, members]


def _place_cells(place: TokenPlace, metric: str) -> Cells:
    """Return the cells that say what a row is about."""
    return {"token": place.token, "row": place.row, "col": place.col, "metric": metric}


def _single_token_blocks(
    places: Sequence[TokenPlace], metric: str, values: NDArray[Any], labels: Integers
) -> list[Cells]:
    """Return the rows of the mean over images of single tokens.

    Args:
        places: one token each.
        metric: what the values are.
        values: (images, tokens of the site).
        labels: (images,) the jackknife's blocks.
    """
    blocks: list[Cells] = []
    # A few at a time, which need little memory beside the norms.
    at_once = max(1, PIECE_BYTES // (8 * len(values)))
    for first in range(0, len(places), at_once):
        piece = places[first : first + at_once]
        tokens = [place.members[0] for place in piece]
        x = np.ascontiguousarray(values[:, tokens].T, dtype=np.float64)
        estimates = statistic(x, "mean", labels).estimates()
        blocks.append({**place_columns(piece), "metric": metric, **columns_of(estimates)})
    return blocks


def _most_frequent(values: Integers) -> int:
    """Return the most frequent value, the lowest of ties."""
    distinct, counts = np.unique(values, return_counts=True)
    return int(distinct[counts.argmax()])


def headline(table: Table) -> list[Answer]:
    """Return the site with most outliers among patches, and the one with the largest activation."""
    texts: dict[str, list[str]] = {}
    for store, rows in by_store(
        table, metric="outlier_share_mad", token="patches", row=None
    ):
        _, i = extremes(rows)
        text = f"at most {measured(rows, i)} of patches are outliers at {rows['site'][i]}"
        texts.setdefault(store, []).append(text)
    for store, rows in by_store(table, metric="massive_ratio", token=None, row=None):
        _, i = extremes(rows)
        text = f"largest activation {measured(rows, i)} times the median at {rows['site'][i]}"
        texts.setdefault(store, []).append(text)
    return [(store, "; ".join(parts)) for store, parts in texts.items()]


ANALYSIS = Analysis(
    module=__name__,
    question=FLOW,
    help="""
    Find outlier tokens and massive activations.

    Large vision transformers put a few patch tokens at norms far above the others,
    where they hold global information (Darcet et al. 2024; registers take their place),
    and a few activations at thousands of times the median (Sun et al. 2024). Norms come
    from the dot products that extract stores by default, also with --tokens pooled;
    activations are read for the rest.

      $ vitsee norms l14.zarr -o norms.csv --png norms.png
      $ vitsee norms dinov2=a.zarr reg=b.zarr --tokens all --png both.png > both.csv
      $ vitsee norms b16.zarr --metric outlier_share --threshold 60 --tokens patches

    --tokens all: cls, registers and patches as kinds, with the median, the shares of
    outliers (above --threshold; above median + 6 x 1.4826 MAD) and the histogram; each:
    every token, with the share of images in which it is an outlier. The figure shows
    the histogram over depth, where the outliers lie, and their share over depth. Of
    clips patches have a column frame, their place in time.
    """,
    needs=("sites",),
    reading=(
        "The lengths of tokens against depth, and how they are distributed. A second "
        "peak far above the others are outlier tokens, which hold global information in "
        "place of their patch; massive activations are single channels thousands of "
        "times above the median. Maps show where outliers are, in the layers that have "
        "most."
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
