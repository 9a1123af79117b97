"""Scores of a ranking: average precision, precision at k, and what they are by chance.

Ranks count from 0. With the R right images of a query at ranks r_0 < r_1 < ...:

    plain       1/R sum_j (j + 1) / (r_j + 1)                       scikit-learn's
    trapezoid   1/R sum_j (p0 + p1) / 2, p0 = j / r_j (1 where r_j = 0), p1 = (j + 1) / (r_j + 1)
                the area below the broken line, as ROxford, RParis and Oxford5k compute it
    plain, the first n only (GLDv2, n = 100): sum_{r_j < n} (j + 1) / (r_j + 1) / min(R, n)
    mp@k        right images among the first m, over m; m = min(k, r_{R-1} + 1): behind the last
                right image nothing counts (Radenovic et al. 2018). mp@1 is recall@1

The trapezoid is the mean of the plain form and of the precision just before each right image, and
never above the plain one. NaN for a query without right images.

By chance, all orders of N images being equally likely, H_N = sum_{i=1..N} 1/i:

    E[plain]      (H_N + (R - 1)/(N - 1) (N - H_N)) / N
    E[trapezoid]  (E[plain] + R/N) / 2
    E[first n]    R/N sum_{r < min(n, N)} (1 + r (R - 1)/(N - 1)) / (r + 1) / min(R, n)
    E[mp@k]       R/N, and for each m < k the last right image may be the m-th, whose m counts in
                  place of k: + sum_{m=R..k-1} P(m) (R/m - R/k), P(m) = R/m prod_{i<R} (m-i)/(N-i)
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
from vitsee_core.tables.replicates import WORD
from vitsee_core.types import Float, Integers, Mask

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec


@dataclass(frozen=True)
class Ranked:
    """The right images of some queries, nearest first for each."""

    query: Integers  # (right images,) which query
    number: Integers  # 0, 1, ... within it
    rank: Integers  # among all images that count
    n: Integers  # (queries,) how many each has


def ranked(n_queries: int, query: Integers, keys: Integers, above: Integers) -> Ranked:
    """Ranks among right and wrong images.

    Args:
        n_queries: number of queries.
        query: (right images,) its query.
        keys: (right images,) larger is nearer, distinct within a query.
        above: (right images,) number of nearer wrong images.
    """
    order = np.lexsort((~keys, query))
    of = query[order]
    n = np.bincount(of, minlength=n_queries)
    number = np.arange(len(of)) - (np.cumsum(n) - n)[of]
    return Ranked(of, number, above[order] + number, n)


def average_precision(found: Ranked, form: str, top: int = 0) -> Float:
    """(queries,) average precision.

    Args:
        found: the ranks.
        form: "trapezoid" or "plain".
        top: only this many nearest images count (plain form); 0 for all.
    """
    rank = found.rank.astype(np.float64)
    number = found.number.astype(np.float64)
    terms = (number + 1) / (rank + 1)
    if form == "trapezoid":
        before = np.where(rank == 0, 1.0, number / np.maximum(rank, 1))
        terms = (before + terms) / 2
    elif top:
        terms = np.where(rank < top, terms, 0.0)
    sums = np.bincount(found.query, terms, len(found.n))
    return _over(sums, np.minimum(found.n, top) if top else found.n)


def precision_at(found: Ranked, k: int) -> Float:
    """(queries,) right images among the first min(k, place of the last right one), over that."""
    last = np.zeros(len(found.n), np.int64)
    np.maximum.at(last, found.query, found.rank + 1)
    m = np.minimum(last, k)
    hits = np.bincount(found.query, found.rank < m[found.query], len(found.n))
    return _over(hits, m)


def chance_precision(
    n_right: Integers, n_images: Integers, form: str, top: int = 0
) -> Float:
    """(queries,) expected average precision in random order.

    Args:
        n_right: (queries,) right images.
        n_images: (queries,) right and wrong ones.
        form: as for `average_precision`.
        top: likewise.
    """
    r = n_right.astype(np.float64)
    n = n_images.astype(np.float64)
    others = np.divide(r - 1, n - 1, out=np.ones_like(r), where=n > 1)
    deep = np.minimum(n_images, top) if top else n_images
    harmonic = _harmonic(int(deep.max(initial=0)))[deep]
    # sum over r < deep of (1 + r others) / (r + 1)
    total = harmonic + others * (deep - harmonic)
    plain = _over(r * total, n * (np.minimum(r, top) if top else r))
    if form == "plain":
        return plain
    return np.where(n_right > 0, (plain + _over(r, n)) / 2, np.nan)


def chance_precision_at(n_right: Integers, n_images: Integers, k: int) -> Float:
    """(queries,) the expected `precision_at` in random order."""
    return np.array(
        [
            _chance_at(r, n, k) if r else np.nan
            for r, n in zip(n_right.tolist(), n_images.tolist(), strict=True)
        ]
    )


@lru_cache(maxsize=4096)
def _chance_at(r: int, n: int, k: int) -> float:
    k = min(k, n)
    value = r / n
    within = 1.0  # the chance that all right images are among the first m
    for m in range(r, k):
        if m == r:
            for i in range(r):
                within *= (m - i) / (n - i)
        else:
            within *= m / (m - r)
        value += r / m * within * (r / m - r / k)
    return value


@lru_cache(maxsize=2)
def _harmonic(n: int) -> Float:
    """(n + 1,) the harmonic numbers, starting with that of 0."""
    return np.concatenate([[0.0], np.cumsum(1.0 / np.arange(1, n + 1))])


def _over(a: NDArray[Any], b: NDArray[Any]) -> Float:
    return np.divide(a, b, out=np.full(len(a), np.nan), where=b > 0)


# ---------------------------------------------------------------- one search


Scores = dict[Setting, dict[str, Float]]


@dataclass(frozen=True)
class Plan:
    """One search, with everything that decides its numbers."""

    search: Search
    read: dict[str, tuple[SiteSpec, Features]]  # site -> its features
    form: str
    at: tuple[int, ...]
    scored: list[tuple[Setting, Mask]]  # setting and its queries (queries,)
    blocks: Blocks
    remarks: list[str]
    metrics: tuple[str, ...] = ()  # of the rows

    @classmethod
    def of(
        cls,
        search: Search,
        chosen: Sequence[SiteSpec],
        tokens: str | None,
        form: str,
        at: Sequence[int],
        seed: int,
    ) -> Plan:
        """Plans a checked search at these sites of its store; see `retrieve.run`. seed: assigns the
        queries to the blocks of the replicates.

        Raises:
            MissingInput: a store lacks a site or its tokens.
            StoreMismatch: it has other channels there.
        """
        remarks = list(search.remarks)
        read = {site.name: (site, Features.of(search, site, tokens)) for site in chosen}
        scored = []
        for setting in search.settings:
            mask = search.scored(setting)
            if mask.any():
                scored.append((setting, mask))
            else:
                remarks.append(
                    f"{setting.map} is left out: no query has a right image for it"
                )
        blocks = search.itself or _of_queries(search.names, seed)
        plan = cls(search, read, form, tuple(dict.fromkeys(at)), scored, blocks, remarks)
        return replace(
            plan, metrics=tuple(m for own in plan.chance.values() for m in own)
        )

    def only(self, metrics: Sequence[str]) -> Plan:
        """The plan for some of its metrics; settings without any of them are not scored."""
        scored = [one for one in self.scored if {*self.chance[one[0]]} & {*metrics}]
        return replace(self, scored=scored, metrics=tuple(metrics))

    def compared(self, asked: str | None) -> dict[str, Any]:
        """The description of what its stores have in common, for a sidecar; see
        `features.compared`."""
        words = {name: str(of.images.selection) for name, (_, of) in self.read.items()}
        return compared(self.search.stores, words, asked=asked)

    def describe(self) -> dict[str, Any]:
        search = self.search
        return {
            "n_queries": len(search.names),
            "queries": search.query_store.label,
            "distractors": [store.label for store in search.distractors],
            **search.about,
        }

    @cached_property
    def chance(self) -> dict[Setting, dict[str, Float]]:
        """Setting -> metric -> (queries,) expected in random order."""
        return {setting: self._chance(setting) for setting, _ in self.scored}

    def _chance(self, setting: Setting) -> dict[str, Float]:
        n_right, n = self.search.counts(setting)
        expected = {setting.map: chance_precision(n_right, n, self.form, setting.top)}
        return expected | {
            f"mp@{k}{setting.suffix}": chance_precision_at(n_right, n, k)
            for k in (() if setting.use else self.at)
        }

    def scores(self, setting: Setting, found: Ranked) -> dict[str, Float]:
        """Metric -> (queries,)."""
        values = {setting.map: average_precision(found, self.form, setting.top)}
        return values | {
            f"mp@{k}{setting.suffix}": precision_at(found, k)
            for k in (() if setting.use else self.at)
        }

    def chance_rows(self) -> Iterator[dict[str, Any]]:
        """A row per metric, without intervals."""
        for setting, mask in self.scored:
            for metric, values in self.chance[setting].items():
                if metric not in self.metrics:
                    continue
                counts = {"n_queries": int(mask.sum()), "n_images": self.search.n_images}
                yield {"metric": metric, "value": float(values[mask].mean()), **counts}

    def rows(
        self, scores: Scores, without: Scores, per_query: bool
    ) -> Iterator[dict[str, Any]]:
        """One per metric, then one per query.

        Args:
            scores: setting -> metric -> (queries,).
            without: the same (blocks, queries) without the images of each block, if the queries are
                the images.
            per_query: whether to add rows per query.
        """
        for setting, mask in self.scored:
            for metric, values in scores[setting].items():
                if metric not in self.metrics:
                    continue
                own = without[setting][metric] if self.search.itself else None
                yield self._row(metric, values, own, mask)
        for setting, mask in self.scored if per_query else ():
            values = scores[setting][setting.map]
            metric = setting.map.removeprefix("m")
            for i in np.flatnonzero(mask).tolist():
                about = {"query": self.search.names[i], "n_images": self.search.n_images}
                yield {
                    "metric": metric,
                    "value": float(values[i]),
                    "baseline": "",
                    **about,
                }

    def _row(
        self, metric: str, values: Float, without: Float | None, mask: Mask
    ) -> dict[str, Any]:
        """The mean over the queries in `mask`."""
        moments = Moments()
        moments.add(values[mask])
        summary = moments.summary()
        cells: dict[str, Any] = dict(summary.cells())
        is_share = metric.startswith("mp@")
        if without is None:
            replicates = self.blocks.means_without(np.where(mask, values, 0.0), mask)
            ends = cut(summary.mean, summary.low, summary.high, SHARE)
            cells |= as_share(cells) if is_share else _ends(*ends)
        else:
            replicates = self._means_without(without, mask)
            if is_share:
                cells |= _ends(
                    *jackknife_share(cells["value"], replicates, cells["n_images"])
                )
            else:
                cells |= _ends(*interval(summary.mean, replicates, SHARE)[1:])
        counts = {"n_queries": cells.pop("n_images"), "n_images": self.search.n_images}
        return {"metric": metric, "baseline": "", WORD: replicates, **cells, **counts}

    def _means_without(self, without: Float, mask: Mask) -> Float:
        """(blocks,) means over the queries outside of each block that have a right image there."""
        means = np.full(self.blocks.n, np.nan)
        for b, values in enumerate(without):
            own = values[mask & (self.blocks.labels != b)]
            if (there := ~np.isnan(own)).any():
                means[b] = own[there].mean()
        return means


def _ends(low: Any, high: Any) -> dict[str, float]:
    return {"low": float(low), "high": float(high)}


def _of_queries(names: Sequence[str], seed: int) -> Blocks:
    """The blocks of queries that are not among the images; those stay as they are."""
    text = "\n".join(map(str, (len(names), *names))).encode()
    labels = block_labels(len(names), seed)
    digest = hashlib.sha256(text + labels.astype("<i8").tobytes()).hexdigest()[:16]
    return Blocks(labels, labels, digest)
