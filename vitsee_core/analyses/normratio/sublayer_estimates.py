"""Estimates of the metrics of one sublayer: of single tokens, and of means over several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.statistics.image_statistics import (
    Estimates,
    Statistic,
    block_labels,
    estimates_of,
    statistic,
)
from vitsee_core.statistics.skip_branch import ReadQuantities, StoredSublayer, TokenPlace
from vitsee_core.tables.replicates import stack_replicates
from vitsee_core.types import Float, Integers, Mask
from vitsee_stores import Store


class Metric(NamedTuple):
    """A quantity of each image and token, and its statistic over images."""

    quantity: str
    statistic: str


METRICS = {
    "norm_ratio": Metric("norm_ratio", "mean"),
    "norm_ratio_median": Metric("norm_ratio", "median"),
    "norm_ratio_geomean": Metric("norm_ratio", "geomean"),
    "cos_branch": Metric("cos_branch", "mean"),
    "cos_out": Metric("cos_out", "mean"),
    "skip_norm": Metric("skip_norm", "mean"),
    "branch_norm": Metric("branch_norm", "mean"),
}
# Bytes for a token of an image: three quantities, and what a statistic takes beside them.
BYTES_PER_TOKEN = 8 * 12
# Statistics are computed of as many tokens at a time as these bytes hold, to stay in the cache.
CACHED_BYTES = 16 << 20


class ZeroCount(NamedTuple):
    """Number of tokens of images with f(z) = 0, and of all."""

    n_zero: int
    n_tokens: int


class SublayerEstimates(NamedTuple):
    """The estimates of one sublayer.

    Attributes:
        by_metric: metric -> estimates, one entry per row of the table.
        zeros: tokens of images where f(z) = 0.
    """

    by_metric: dict[str, Estimates]
    zeros: ZeroCount


class SublayerEstimator:
    """Estimates the metrics of the sublayers of a store, over its chosen images.

    Args:
        store: with residual dot products.
        rows: the chosen images.
        execution: resources, and the seed of the jackknife's blocks.
    """

    def __init__(self, store: Store, rows: Rows, execution: Execution) -> None:
        self.store = store
        self.rows = rows
        self.execution = execution
        self.n_images = int((rows.mask & store.valid).sum())
        # Runs of rows of a shuffled store are random samples already.
        seed = None if store.shuffled else execution.seed
        self.labels = block_labels(self.n_images, seed)
        self.tokens_at_once = self._n_tokens_in(execution.budget)

    def _n_tokens_in(self, n_bytes: int) -> int:
        """Return the number of tokens whose values of all images fit these bytes; at least 1."""
        return max(1, n_bytes // (BYTES_PER_TOKEN * self.n_images))

    def estimate(
        self,
        sublayer: StoredSublayer,
        token_sets: Sequence[TokenPlace],
        metrics: Sequence[str],
    ) -> SublayerEstimates:
        """Return the estimates of each metric, one entry per set of tokens.

        Args:
            sublayer: of the store.
            token_sets: single tokens, or several whose statistics are averaged.
            metrics: some of `METRICS`.
        """
        tokens = np.array(
            sorted({token for token_set in token_sets for token in token_set.members})
        )
        members = [token_set.members for token_set in token_sets]
        accumulators = {metric: TokenSetEstimates(members) for metric in metrics}
        quantities = tuple(dict.fromkeys(METRICS[name].quantity for name in metrics))
        n_cached = self._n_tokens_in(CACHED_BYTES)
        n_zero = 0
        # As many tokens as fit the memory are read at once, of which statistics are computed in
        # pieces that fit the cache.
        for read_tokens in _pieces(tokens, self.tokens_at_once):
            read_quantities = ReadQuantities(
                sublayer.site, tuple(read_tokens.tolist()), quantities
            )
            values, n_zero_read = self._read_all_slabs(read_quantities)
            n_zero += n_zero_read
            for piece in _pieces(np.arange(len(read_tokens)), n_cached):
                for name, accumulator in accumulators.items():
                    metric = METRICS[name]
                    # (tokens, images)
                    token_statistics = statistic(
                        values[metric.quantity][piece], metric.statistic, self.labels
                    )
                    accumulator.add(token_statistics, read_tokens[piece])
        return SublayerEstimates(
            by_metric={
                metric: accumulator.estimates()
                for metric, accumulator in accumulators.items()
            },
            zeros=ZeroCount(n_zero, len(tokens) * self.n_images),
        )

    def _read_all_slabs(self, work: ReadQuantities) -> tuple[dict[str, Float], int]:
        """Return quantity -> (tokens, images) over all slabs, and the number of f(z) = 0.

        Args:
            work: reads the quantities of some tokens from a slab.
        """
        values = {
            name: np.empty((len(work.tokens), self.n_images)) for name in work.names
        }
        first_image = 0
        n_zero = 0
        slabs = each_slab(
            self.store,
            work,
            rows=self.rows,
            jobs=self.execution.jobs,
            map=self.execution.map,
        )
        for slab_values, n_zero_slab in slabs:
            n_zero += n_zero_slab
            n_slab_images = 0
            for name, quantity in slab_values.items():  # (tokens, images of the slab)
                n_slab_images = quantity.shape[1]
                values[name][:, first_image : first_image + n_slab_images] = quantity
            first_image += n_slab_images
        return values, n_zero


def _pieces(items: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    """Yield runs of up to `size` items."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


class TokenMean:
    """Accumulates the mean over tokens of their statistics; tokens without a value are left out.

    Beside the value it needs what an interval is made of: the trace of the statistic over images
    or blocks, and which of these have a value.
    """

    def __init__(self) -> None:
        self._n_tokens = 0
        self._sum = 0.0
        # Arrays over the columns of `Statistic.trace` and `present`, made by the first token.
        self._trace: Float | None = None
        self._n_traced: Integers | None = None
        self._present: Mask | None = None
        self._jackknife = False
        self._labels: Integers | None = None

    def add(self, statistics: Statistic, rows: Integers) -> None:
        """Count the tokens in these rows of the statistics.

        Args:
            statistics: of single tokens, one per row.
            rows: (n,) indices of rows.
        """
        rows = rows[~np.isnan(statistics.value[rows])]
        if not len(rows):
            return
        if self._trace is None or self._n_traced is None or self._present is None:
            self._trace = np.zeros(statistics.trace.shape[1])
            self._n_traced = np.zeros(statistics.trace.shape[1], np.int64)
            self._present = np.zeros(statistics.present.shape[1], bool)
            self._jackknife = statistics.jackknife
            self._labels = statistics.labels
        trace = statistics.trace[rows]
        has_trace = ~np.isnan(trace)
        self._n_tokens += len(rows)
        # One token after the other from the sum so far, so that pieces of any size give its bits.
        self._sum = float(np.cumsum([self._sum, *statistics.value[rows]])[-1])
        new_traces = np.where(has_trace, trace, 0)
        self._trace = np.concatenate([self._trace[np.newaxis], new_traces]).sum(0)
        self._n_traced += has_trace.sum(0)
        self._present |= statistics.present[rows].any(0)

    def estimates(self) -> Estimates:
        """Return the estimates of the mean, one entry; NaN if no token has a value."""
        if self._trace is None or self._n_traced is None or self._labels is None:
            missing = np.full(1, np.nan)
            return Estimates(missing, missing, missing, missing, np.zeros(1, np.int64))
        assert self._present is not None
        with np.errstate(invalid="ignore"):
            trace = self._trace / self._n_traced
        return estimates_of(
            np.array([self._sum / self._n_tokens]),
            trace[np.newaxis],
            self._present[np.newaxis],
            self._jackknife,
            self._labels,
        )


class TokenSetEstimates:
    """Accumulates estimates of single tokens, and of means over several tokens.

    Args:
        members: the tokens of each set. They come in pieces, in their order.
    """

    def __init__(self, members: Sequence[Sequence[int]]) -> None:
        # token -> indices of the sets that are this token
        self._indices_of_token: dict[int, list[int]] = {}
        # index of a set of several tokens -> the tokens, and their mean
        self._means: dict[int, tuple[Integers, TokenMean]] = {}
        for index, tokens in enumerate(members):
            if len(tokens) == 1:
                self._indices_of_token.setdefault(tokens[0], []).append(index)
            else:
                self._means[index] = (np.array(tokens), TokenMean())
        n_sets = len(members)
        self._estimates = Estimates(
            value=np.full(n_sets, np.nan),
            std=np.full(n_sets, np.nan),
            low=np.full(n_sets, np.nan),
            high=np.full(n_sets, np.nan),
            n=np.zeros(n_sets, int),
        )
        self._without: list[Float | None] = [None] * n_sets

    def add(self, statistics: Statistic, tokens: Integers) -> None:
        """Count the statistics of some tokens.

        Args:
            statistics: of single tokens, one per row.
            tokens: (rows,) index of each token.
        """
        rows: list[int] = []
        indices: list[int] = []
        for row, token in enumerate(tokens.tolist()):
            for index in self._indices_of_token.get(token, ()):
                rows.append(row)
                indices.append(index)
        self._put(statistics.estimates(), rows, indices)
        for members, mean in self._means.values():
            mean.add(statistics, np.flatnonzero(np.isin(tokens, members)))

    def estimates(self) -> Estimates:
        """Return the estimates, one entry per set, once all tokens are counted."""
        for index, (_, mean) in self._means.items():
            self._put(mean.estimates(), [0], [index])
        return replace(self._estimates, without=stack_replicates(self._without))

    def _put(self, estimates: Estimates, rows: list[int], indices: list[int]) -> None:
        """Set the entries with these indices from rows of the estimates.

        Args:
            estimates: of single tokens or of a mean.
            rows: rows of the estimates.
            indices: the entry that each row goes to; as long as `rows`.
        """
        for name in ("value", "std", "low", "high", "n"):
            getattr(self._estimates, name)[indices] = getattr(estimates, name)[rows]
        for row, index in zip(rows, indices, strict=True):
            if estimates.without is None:
                self._without[index] = None
            else:
                self._without[index] = estimates.without[row]
