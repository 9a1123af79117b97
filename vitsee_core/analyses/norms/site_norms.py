"""Rows about the norms and the activations of one site, with intervals over images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.statistics.image_statistics import (
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
from vitsee_core.statistics.shares import as_share
from vitsee_core.statistics.skip_branch import TokenPlace, place_columns, places_of
from vitsee_core.tables.columns import site_columns
from vitsee_core.types import Float, Integers
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError
from vitsee_stores.selectors import layout_tokens

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec
    from vitsee_stores.layout import TokenLayout

NORM_METRICS = (
    "norm",
    "norm_median",
    "outlier_share",
    "outlier_share_mad",
    "bimodality",
)
ACTIVATION_METRICS = (
    "massive_top1",
    "massive_ratio",
    "massive_share",
    "massive_channel_share",
    "massive_token_share",
    "neighbour_cos",
)
METRICS = (*NORM_METRICS, "norm_histogram", *ACTIVATION_METRICS)
KINDS = ("all", "cls", "prefix", "patches")
TOKENS = (*KINDS, "each")

# Sun et al. 2024, section 2: above 100, and above 1000 times the median.
MASSIVE = 100.0
MASSIVE_RATIO = 1000.0

# Bytes for a token of an image: its norm, a copy for the median, and what is left without a block.
BYTES_PER_TOKEN = 8 * 5
PIECE_BYTES = 16 << 20  # of tokens whose means are computed at a time


class SiteNorms:
    """Measures the norms and activations of the sites of one store.

    Args:
        store: of the sites.
        rows: the chosen images.
        execution: resources, and the seed of the jackknife's blocks.
        tokens: words of `TOKENS`.
        threshold: norm above which a patch is an outlier.
        metrics: some of `METRICS`; all if empty.
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
        self.metrics = metrics or METRICS  # the store decides which of them it has
        self.n_images = int((rows.mask & store.valid).sum())
        # Runs of rows of a shuffled store are random samples already.
        seed = None if store.shuffled else execution.seed
        self.labels = block_labels(self.n_images, seed)

    def measure(self, site: SiteSpec) -> list[Cells]:
        """Return blocks of the table's rows about one site: column -> values.

        Raises:
            VitseeError: its norms do not fit the memory.
        """
        # An alias has the tokens of the site that is stored.
        spec = self.store.site(site.name)
        layout = spec.layout
        assert layout is not None
        self._require_memory(site.name, layout)
        source = norm_source(self.store, site)
        wants_activations = not set(self.metrics).isdisjoint(ACTIVATION_METRICS)
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
                    # Intervals of shares stay between 0 and 1.
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
        """Return the norms of a site's tokens, (images, tokens), and statistics of activations.

        Args:
            spec: the stored site.
            layout: its tokens.
            source: where its norms come from.
            with_acts: whether activations are read; their statistics are empty without.
        """
        body = None if layout.grid is None else layout.body
        slabs = each_slab(
            self.store,
            ReadTokens(
                site=spec.name,
                source=source,
                with_activations=with_acts,
                n_prefix=layout.n_prefix,
                body=body,
            ),
            rows=self.rows,
            jobs=self.execution.jobs,
            map=self.execution.map,
            progress=self.execution.progress,
        )
        return TokenStatistics.join(slabs, self.n_images)

    def _norm_blocks(self, norms: Float, layout: TokenLayout) -> list[Cells]:
        """Return the rows about norms: kinds of tokens, then single tokens.

        Args:
            norms: (images, tokens).
            layout: names the tokens.
        """
        kinds = places_of(layout, [word for word in self.tokens if word in KINDS])
        singles = places_of(layout, [word for word in self.tokens if word not in KINDS])
        is_above = norms > self.threshold
        # The relative threshold is of patches alone, whose norms it describes.
        is_above_mad = norms > mad_threshold(norms[:, layout.n_prefix :])
        blocks: list[Cells] = []
        for kind in kinds:
            kind_norms = _norms_of_tokens(norms, kind.members)
            mean = mean_cells(kind_norms.mean(1), self.labels)
            blocks.append({**_token_cells(kind, "norm"), **mean})
            if "norm_median" in self.metrics:
                median = self._median_cells(kind_norms)
                blocks.append({**_token_cells(kind, "norm_median"), **median})
            if kind.token == "patches":
                blocks += self._patch_blocks(kind, kind_norms, is_above[:, kind.members])
        # A kind of a single token, as the class token, has its row already.
        singles = [token for token in singles if token not in kinds]
        blocks += _single_token_blocks(singles, "norm", norms, self.labels)
        # Only patches can be outliers: class token and registers are meant to differ.
        patches = [token for token in singles if min(token.members) >= layout.n_prefix]
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
        self, patches: TokenPlace, norms: Float, is_above: NDArray[np.bool_]
    ) -> list[Cells]:
        """Return the rows about all patches: shares of outliers, bimodality, the histogram.

        Args:
            patches: names the rows.
            norms: (images, patches).
            is_above: (images, patches), whether a norm is above the threshold.
        """
        outliers = mean_cells(is_above.mean(1), self.labels)
        blocks = [{**_token_cells(patches, "outlier_share"), **outliers}]
        # Functions of the norms of all images together, so that each needs its own jackknife.
        measures = {"outlier_share_mad": share_above_mad, "bimodality": bimodality}
        for metric, measure in measures.items():
            if metric in self.metrics:
                value, without = measure(norms, self.labels)
                cells = jackknife_cells(value, without, self.n_images)
                blocks.append({**_token_cells(patches, metric), **cells})
        if "norm_histogram" in self.metrics:
            bins = histogram(norms)
            if bins:
                block = _token_cells(patches, "norm_histogram")
                block["norm_from"] = np.array([low for low, _, _ in bins])
                block["norm_to"] = np.array([high for _, high, _ in bins])
                block["value"] = np.array([share for _, _, share in bins])
                block["n_images"] = self.n_images
                blocks.append(block)
        return blocks

    def _activation_blocks(
        self, statistics: TokenStatistics, layout: TokenLayout
    ) -> list[Cells]:
        """Return the rows about activations, means over images (Sun et al. 2024).

        Args:
            statistics: of all images, with those of activations.
            layout: names the token of the largest activation.
        """
        largest = statistics.largest
        # A median of 0, as behind a ReLU, gives no ratio.
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(statistics.median > 0, largest / statistics.median, np.nan)
        # Their definition: above 100, and above 1000 times the median.
        is_massive = (largest > MASSIVE) & (largest > MASSIVE_RATIO * statistics.median)
        channel = _most_frequent(statistics.channel)
        token = _most_frequent(statistics.token)
        token_name = layout_tokens(layout)[token].name
        at_largest = {"channel": channel, "at": token_name}
        blocks: list[Cells] = []

        def add(metric: str, values: Any, location: Cells) -> None:
            """Add the mean of (images,) values, and where they lie."""
            blocks.append(
                {"metric": metric, **location, **mean_cells(values, self.labels)}
            )

        add("massive_top1", largest, at_largest)
        add("massive_ratio", ratio, at_largest)
        add("massive_share", is_massive, {})
        in_channel = statistics.channel == channel
        add("massive_channel_share", in_channel, {"channel": channel, "at": None})
        at_token = statistics.token == token
        add("massive_token_share", at_token, {"channel": None, "at": token_name})
        if layout.grid is not None:
            add("neighbour_cos", statistics.neighbour_cos, {})
        return blocks


def _norms_of_tokens(norms: Float, indices: Sequence[int]) -> Float:
    """Return the norms of these tokens, (images, indices); a view if they are contiguous.

    A view, because a copy of all patches would double the memory.
    """
    first = indices[0]
    last = indices[-1]
    if tuple(indices) == tuple(range(first, last + 1)):
        return norms[:, first : last + 1]
    return norms[:, indices]


def _token_cells(tokens: TokenPlace, metric: str) -> Cells:
    """Return the cells that say what a row is about."""
    return {
        "token": tokens.token,
        "row": tokens.row,
        "col": tokens.col,
        "metric": metric,
    }


def _single_token_blocks(
    tokens: Sequence[TokenPlace], metric: str, values: NDArray[Any], labels: Integers
) -> list[Cells]:
    """Return the rows of the mean over images of single tokens.

    Args:
        tokens: the tokens, one each.
        metric: name of the values.
        values: (images, tokens of the site).
        labels: (images,) jackknife block of each image.
    """
    blocks: list[Cells] = []
    # A few at a time, which need little memory beside the norms.
    at_once = max(1, PIECE_BYTES // (8 * len(values)))
    for first in range(0, len(tokens), at_once):
        piece = tokens[first : first + at_once]
        indices = [token.members[0] for token in piece]
        # (tokens, images): statistics run along contiguous rows.
        x = np.ascontiguousarray(values[:, indices].T, dtype=np.float64)
        estimates = statistic(x, "mean", labels).estimates()
        blocks.append({**place_columns(piece), "metric": metric, **columns_of(estimates)})
    return blocks


def _most_frequent(values: Integers) -> int:
    """Return the most frequent value, the lowest of ties."""
    distinct, counts = np.unique(values, return_counts=True)
    return int(distinct[counts.argmax()])
