"""Scores of a ranking: average precision, precision at k, and what they are by chance.

Ranks count from 0. With the R right images of a query at ranks r_0 < r_1 < ...:

    plain       1/R sum_j (j + 1) / (r_j + 1)                       scikit-learn's
    trapezoid   1/R sum_j (p0 + p1) / 2, p0 = j / r_j (1 where r_j = 0), p1 = (j + 1) /
    (r_j + 1)
                the area below the broken line, as ROxford, RParis and Oxford5k compute it
    plain, the first n only (GLDv2, n = 100): sum_{r_j < n} (j + 1) / (r_j + 1) / min(R, n)
    mp@k        right images among the first m, over m; m = min(k, r_{R-1} + 1): behind the
    last
                right image nothing counts (Radenovic et al. 2018). mp@1 is recall@1

The trapezoid is the mean of the plain form and of the precision just before each right
image, and never above the plain one. NaN for a query without right images.

By chance, all orders of N images being equally likely, H_N = sum_{i=1..N} 1/i:

    E[plain]      (H_N + (R - 1)/(N - 1) (N - H_N)) / N
    E[trapezoid]  (E[plain] + R/N) / 2
    E[first n]    R/N sum_{r < min(n, N)} (1 + r (R - 1)/(N - 1)) / (r + 1) / min(R, n)
    E[mp@k]       R/N, and for each m < k the last right image may be the m-th, whose m
    counts in
                  place of k: + sum_{m=R..k-1} P(m) (R/m - R/k), P(m) = R/m prod_{i<R}
                      (m-i)/(N-i)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.retrieve.search import Features, Search
from vitsee_core.analyses.retrieve.truth import Setting
from vitsee_core.features import compared
from vitsee_core.statistics.image_statistics import block_labels
from vitsee_core.statistics.jackknife import SHARE, Blocks, cut, interval
from vitsee_core.statistics.moments import Moments
from vitsee_core.statistics.shares import as_share, jackknife_share
from vitsee_core.tables.columns import REPLICATES
from vitsee_core.types import Float, Integers, Mask

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec


@dataclass(frozen=True)
class RightRanks:
    """The ranks of the right images of some queries, nearest first for each query.

    Attributes:
        query: (right images,) index of the query.
        number: (right images,) j = 0, 1, ... within the query.
        rank: (right images,) r_j, among all images that count.
        n_right: (queries,) number of right images.
    """

    query: Integers
    number: Integers
    rank: Integers
    n_right: Integers


def rank_right_images(
    n_queries: int, query: Integers, keys: Integers, n_wrong_above: Integers
) -> RightRanks:
    """Return the ranks of right images among right and wrong ones.

    Args:
        n_queries: number of queries.
        query: (right images,) index of the query.
        keys: (right images,) larger is nearer, distinct within a query.
        n_wrong_above: (right images,) number of nearer wrong images.
    """
    # By query, then nearest first: ~key is -key - 1, which cannot overflow.
    order = np.lexsort((~keys, query))
    query = query[order]
    n_right = np.bincount(query, minlength=n_queries)
    first = np.cumsum(n_right) - n_right
    number = np.arange(len(query)) - first[query]
    return RightRanks(
        query=query, number=number, rank=n_wrong_above[order] + number, n_right=n_right
    )


def average_precision(ranks: RightRanks, form: str, top: int = 0) -> Float:
    """Return (queries,) average precision.

    Args:
        ranks: the ranks of the right images.
        form: "trapezoid" or "plain".
        top: only this many nearest images count (plain form); 0 for all.
    """
    rank = ranks.rank.astype(np.float64)
    number = ranks.number.astype(np.float64)
    terms = (number + 1) / (rank + 1)
    if form == "trapezoid":
        before = np.where(rank == 0, 1.0, number / np.maximum(rank, 1))
        terms = (before + terms) / 2
    elif top:
        terms = np.where(rank < top, terms, 0.0)
    sums = np.bincount(ranks.query, terms, len(ranks.n_right))
    n_reachable = np.minimum(ranks.n_right, top) if top else ranks.n_right
    return _divide_or_nan(sums, n_reachable)


def precision_at(ranks: RightRanks, k: int) -> Float:
    """Return (queries,) the share of right images among the first m.

    m is k, or the position of the last right image if that is less (Radenovic et al.
    2018).
    """
    n_queries = len(ranks.n_right)
    last_position = np.zeros(n_queries, np.int64)
    np.maximum.at(last_position, ranks.query, ranks.rank + 1)
    m = np.minimum(last_position, k)
    hits = np.bincount(ranks.query, ranks.rank < m[ranks.query], n_queries)
    return _divide_or_nan(hits, m)


def chance_precision(
    n_right: Integers, n_images: Integers, form: str, top: int = 0
) -> Float:
    """Return (queries,) the expected average precision in random order.

    Args:
        n_right: (queries,) right images, R.
        n_images: (queries,) right and wrong ones, N.
        form: as for `average_precision`.
        top: as for `average_precision`.
    """
    r = n_right.astype(np.float64)
    n = n_images.astype(np.float64)
    # Chance that another image is right, given that one is: (R - 1)/(N - 1).
    other_right = np.divide(r - 1, n - 1, out=np.ones_like(r), where=n > 1)
    depth = np.minimum(n_images, top) if top else n_images
    harmonic = _harmonic_numbers(int(depth.max(initial=0)))[depth]
    # sum over rank < depth of (1 + rank other_right) / (rank + 1)
    total = harmonic + other_right * (depth - harmonic)
    n_reachable = np.minimum(r, top) if top else r
    plain = _divide_or_nan(r * total, n * n_reachable)
    if form == "plain":
        return plain
    return np.where(n_right > 0, (plain + _divide_or_nan(r, n)) / 2, np.nan)


def chance_precision_at(n_right: Integers, n_images: Integers, k: int) -> Float:
    """Return (queries,) the expected `precision_at` in random order, NaN without right images."""
    values = np.full(len(n_right), np.nan)
    for i, r in enumerate(n_right.tolist()):
        if r:
            values[i] = _expected_precision_at(r, int(n_images[i]), k)
    return values


# Many queries have equally many right images.
@lru_cache(maxsize=4096)
def _expected_precision_at(r: int, n: int, k: int) -> float:
    """Return E[mp@k] of the module's docstring for r right ones of n images."""
    k = min(k, n)
    value = r / n
    # Chance that all right images are among the first m: prod_{i<R} (m - i)/(N - i).
    all_within = 1.0
    for m in range(r, k):
        if m == r:
            for i in range(r):
                all_within *= (m - i) / (n - i)
        else:
            # From m - 1 to m this product changes by the factor m/(m - R).
            all_within *= m / (m - r)
        # P(m) = R/m all_within: the last of them is the m-th.
        value += r / m * all_within * (r / m - r / k)
    return value


# All sites of a search, and a plan's settings, have the same numbers of images.
@lru_cache(maxsize=2)
def _harmonic_numbers(n: int) -> Float:
    """Return (n + 1,) the harmonic numbers, starting with that of 0."""
    return np.concatenate([[0.0], np.cumsum(1.0 / np.arange(1, n + 1))])


def _divide_or_nan(numerator: NDArray[Any], denominator: NDArray[Any]) -> Float:
    """Return the quotients, NaN where the denominator is 0."""
    out = np.full(len(numerator), np.nan)
    return np.divide(numerator, denominator, out=out, where=denominator > 0)


# ---------------------------------------------------------------- one search


# Setting -> metric -> (queries,); without each block of images (blocks, queries).
Scores = dict[Setting, dict[str, Float]]


@dataclass(frozen=True)
class Plan:
    """One search, with everything that decides its numbers.

    Attributes:
        search: what is searched.
        features: name of a site -> the site and its vectors.
        form: of the average precision, one of `FORMS`.
        ks: the K of mp@K.
        scored_queries: setting -> (queries,) which of them it scores; of settings with
            any.
        blocks: the blocks of the replicates: of images where these are the queries, else
            of queries.
        remarks: for the user.
        metrics: names of the metrics that become rows.
    """

    search: Search
    features: dict[str, tuple[SiteSpec, Features]]
    form: str
    ks: tuple[int, ...]
    scored_queries: dict[Setting, Mask]
    blocks: Blocks
    remarks: list[str]
    metrics: tuple[str, ...] = ()

    @classmethod
    def from_search(
        cls,
        search: Search,
        sites: Sequence[SiteSpec],
        tokens: str | None,
        *,
        form: str,
        ks: Sequence[int],
        seed: int,
    ) -> Plan:
        """Return the plan of a checked search.

        Args:
            search: the search.
            sites: sites of its store.
            tokens: which token stands for an image; None for the default.
            form: of the average precision.
            ks: the K of mp@K.
            seed: assigns the queries to the blocks of the replicates.

        Raises:
            MissingInput: a store lacks a site or its tokens.
            StoreMismatch: a store has another number of channels there.
        """
        remarks = list(search.remarks)
        features = {
            site.name: (site, Features.from_site(search, site, tokens)) for site in sites
        }
        scored_queries = {}
        for setting in search.settings:
            mask = search.has_score(setting)
            if mask.any():
                scored_queries[setting] = mask
            else:
                remarks.append(
                    f"{setting.map_name} is left out: no query has a right image for it"
                )
        plan = cls(
            search=search,
            features=features,
            form=form,
            ks=tuple(dict.fromkeys(ks)),
            scored_queries=scored_queries,
            blocks=search.image_blocks or _query_blocks(search.query_names, seed),
            remarks=remarks,
        )
        metrics = [metric for values in plan.chance.values() for metric in values]
        return replace(plan, metrics=tuple(metrics))

    def with_metrics(self, metrics: Sequence[str]) -> Plan:
        """Return a plan for some of its metrics; settings without any of them are not scored."""
        scored_queries = {
            setting: mask
            for setting, mask in self.scored_queries.items()
            if {*self.chance[setting]} & {*metrics}
        }
        return replace(self, scored_queries=scored_queries, metrics=tuple(metrics))

    def describe_compared(self, tokens: str | None) -> dict[str, Any]:
        """Return what its stores have in common, for a sidecar.

        tokens: the option, None if it was not set.
        """
        selections = {
            name: str(features.images.selection)
            for name, (_, features) in self.features.items()
        }
        return compared(self.search.stores, selections, asked=tokens)

    def describe(self) -> dict[str, Any]:
        """Return the search for a sidecar: its numbers, queries and distractors."""
        search = self.search
        return {
            "n_queries": len(search.query_names),
            "queries": search.query_store.label,
            "distractors": [store.label for store in search.distractors],
            **search.description,
        }

    def _ks_of(self, setting: Setting) -> tuple[int, ...]:
        """Return the K of mp@K in a setting; GLDv2's uses have no such metric."""
        return () if setting.use else self.ks

    @cached_property
    def chance(self) -> dict[Setting, dict[str, Float]]:
        """Setting -> metric -> (queries,) expected in random order."""
        expected: dict[Setting, dict[str, Float]] = {}
        for setting in self.scored_queries:
            n_right, n_images = self.search.count_images(setting)
            values = chance_precision(n_right, n_images, self.form, setting.top)
            expected[setting] = {setting.map_name: values}
            for k in self._ks_of(setting):
                values = chance_precision_at(n_right, n_images, k)
                expected[setting][f"mp@{k}{setting.suffix}"] = values
        return expected

    def score(self, setting: Setting, ranks: RightRanks) -> dict[str, Float]:
        """Return metric -> (queries,) values of some queries' ranks."""
        scores = {setting.map_name: average_precision(ranks, self.form, setting.top)}
        for k in self._ks_of(setting):
            scores[f"mp@{k}{setting.suffix}"] = precision_at(ranks, k)
        return scores

    def chance_rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row per metric with its value in random order, without intervals."""
        for setting, mask in self.scored_queries.items():
            for metric, values in self.chance[setting].items():
                if metric in self.metrics:
                    yield {
                        "metric": metric,
                        "value": float(values[mask].mean()),
                        "n_queries": int(mask.sum()),
                        "n_images": self.search.n_images,
                    }

    def rows(
        self, scores: Scores, scores_without: Scores, *, per_query: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield one row per metric, then one per query.

        Args:
            scores: setting -> metric -> (queries,).
            scores_without: the same as (blocks, queries), without the images of each
                block; used if the queries are the images.
            per_query: whether to add rows per query.
        """
        for setting, mask in self.scored_queries.items():
            for metric, values in scores[setting].items():
                if metric not in self.metrics:
                    continue
                without = None
                if self.search.image_blocks is not None:
                    without = scores_without[setting][metric]
                yield self._mean_row(metric, values, without, mask)
        if per_query:
            for setting in self.scored_queries:
                yield from self._query_rows(setting, scores[setting][setting.map_name])

    def _query_rows(self, setting: Setting, values: Float) -> Iterator[dict[str, Any]]:
        """Yield a row with the average precision of each scored query."""
        metric = setting.map_name.removeprefix("m")
        for i in np.flatnonzero(self.scored_queries[setting]).tolist():
            yield {
                "metric": metric,
                "value": float(values[i]),
                "baseline": "",
                "query": self.search.query_names[i],
                "n_images": self.search.n_images,
            }

    def _mean_row(
        self, metric: str, values: Float, without: Float | None, mask: Mask
    ) -> dict[str, Any]:
        """Return the row of the mean over the queries in `mask`, with its interval.

        Args:
            metric: its name.
            values: (queries,).
            without: (blocks, queries) without the images of each block; None if the
                queries are not the images.
            mask: (queries,).
        """
        moments = Moments()
        moments.add(values[mask])
        summary = moments.summary()
        cells: dict[str, Any] = dict(summary.cells())
        n_queries = cells["n_images"]  # the moments counted queries
        is_share = metric.startswith("mp@")
        low: float | Float
        high: float | Float
        if without is None:
            # Queries are independent: the interval of their mean, the database held fixed.
            replicates = self.blocks.means_without(np.where(mask, values, 0.0), mask)
            low, high = cut(summary.mean, summary.low, summary.high, SHARE)
            if is_share:
                wilson = as_share(cells)
                low = wilson["low"]
                high = wilson["high"]
        else:
            # An image is query and database alike: the jackknife leaves it out of both.
            replicates = self._means_without(without, mask)
            if is_share:
                low, high = jackknife_share(cells["value"], replicates, n_queries)
            else:
                _, low, high = interval(summary.mean, replicates, SHARE)
        cells |= {"low": float(low), "high": float(high)}
        return {
            "metric": metric,
            "baseline": "",
            REPLICATES: replicates,
            **cells,
            "n_queries": n_queries,
            "n_images": self.search.n_images,
        }

    def _means_without(self, without: Float, mask: Mask) -> Float:
        """Return (blocks,) means over the queries outside of each block.

        Queries whose right images are all in the block have no value (NaN) and are left
        out.
        """
        means = np.full(self.blocks.n, np.nan)
        for b, values in enumerate(without):
            remaining = values[mask & (self.blocks.labels != b)]
            finite = remaining[~np.isnan(remaining)]
            if len(finite):
                means[b] = finite.mean()
        return means


def _query_blocks(names: Sequence[str], seed: int) -> Blocks:
    """Return blocks of queries for the replicates, whose images are held fixed.

    The digest is of names and blocks: replicates of two tables belong together if it is
        equal.
    """
    text = "\n".join(map(str, (len(names), *names))).encode()
    labels = block_labels(len(names), seed)
    digest = hashlib.sha256(text + labels.astype("<i8").tobytes()).hexdigest()[:16]
    return Blocks(labels, labels, digest)
