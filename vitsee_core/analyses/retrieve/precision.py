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

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.types import Float, Integers


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
    rank, number = found.rank.astype(np.float64), found.number.astype(np.float64)
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


def chance_precision(n_right: Integers, n_images: Integers, form: str, top: int = 0) -> Float:
    """(queries,) expected average precision in random order.

    Args:
        n_right: (queries,) right images.
        n_images: (queries,) right and wrong ones.
        form: as for `average_precision`.
        top: likewise.
    """
    r, n = n_right.astype(np.float64), n_images.astype(np.float64)
    others = np.divide(r - 1, n - 1, out=np.ones_like(r), where=n > 1)
    deep = np.minimum(n_images, top) if top else n_images
    harmonic = _harmonic(int(deep.max(initial=0)))[deep]
    # sum over r < deep of (1 + r others) / (r + 1)
    total = harmonic + others * (deep - harmonic)
    plain = _over(r * total, n * (np.minimum(r, top) if top else r))
    return plain if form == "plain" else np.where(n_right > 0, (plain + _over(r, n)) / 2, np.nan)


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
