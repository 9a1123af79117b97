"""The share of keypoints found (PCK) and its interval over images.

    pck         mean over categories of the share of a category's points (Walmer et al. 2023, VA's)
    pck_point   share of all points
    pck_image   mean over pairs of the share of a pair's points

Pairs share images, so that neither points nor pairs are independent: all ordered pairs of 26
images are 650 pairs that vary together. Intervals come from a jackknife that leaves out one image
with all of its pairs. Categories are drawn apart from each other, and the variances of their
images add up:

    std^2 = sum_c (n_c - 1) / n_c sum_(i in c) (v_i - mean_c v)^2

v_i the value without image i of category c, mean_c its mean over the category's n_c images; low and
high are those of `shares.share_interval`, with t(0.975, sum_c (n_c - 1)).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.keypoints.places import Located, candidates
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.statistics.shares import share_interval
from vitsee_core.tables.replicates import WORD
from vitsee_core.types import Float, Integers, Mask

if TYPE_CHECKING:
    from vitsee_stores.layout import TokenLayout


# ---------------------------------------------------------------- baselines without features


BASELINES = ("chance", "still", "grid")


def found_without_features(
    located: Located, layout: TokenLayout, match: str, alphas: Sequence[float]
) -> dict[str, Float]:
    """Baseline -> (points, alphas), 1 where a keypoint is found.

    chance: the probability that a candidate drawn at random is near enough. still: the same place
    relative to the image. grid: the candidate nearest to the keypoint, the upper bound.
    """
    shape = len(located), len(alphas)
    nearest = np.empty_like(located.target)
    probable = np.empty(shape)
    for group in located.groups():
        rows, cols = candidates(layout, located.size, group.window, match)
        # Many pairs have the same target.
        points = np.concatenate([located.target, located.unit, located.side[:, None]], 1)
        each, which = np.unique(points[group.points], axis=0, return_inverse=True)
        best = np.empty((len(each), 2))
        chance = np.empty((len(each), len(alphas)))
        for i, (x, y, across, down, side) in enumerate(each.tolist()):
            dx2 = ((cols.at - x) * across) ** 2
            dy2 = ((rows.at - y) * down) ** 2
            best[i] = cols.at[dx2.argmin()], rows.at[dy2.argmin()]
            dx2.sort()
            near = [
                np.searchsorted(dx2, (alpha * side) ** 2 - dy2).sum() for alpha in alphas
            ]
            chance[i] = np.array(near) / (len(dx2) * len(dy2))
        nearest[group.points], probable[group.points] = best[which], chance[which]
    return {
        "chance": probable,
        "still": within(located, located.still, alphas),
        "grid": within(located, nearest, alphas),
    }


def within(located: Located, found: Float, alphas: Sequence[float]) -> Float:
    """(points, alphas) 1 where positions (points, 2) are nearer to the keypoint than alpha times
    the side, else 0."""
    reach = np.multiply.outer(located.side, np.asarray(alphas)) ** 2
    return (located.squared_error(found)[:, None] < reach).astype(np.float64)


# ---------------------------------------------------------------- shares and intervals


METRICS = ("pck", "pck_point", "pck_image")
SPREAD = "jackknife"
INTERVAL_METHOD = (
    "delete-one-image jackknife within categories: v_i is the value without an image and "
    "all of its pairs; std^2 = sum over categories of (n - 1) / n sum_i (v_i - mean "
    "v)^2; empty where leaving out an image leaves a category without pairs; low, high, "
    f"with t(0.975, images - categories) in place of 1.96: {SHARES}"
)
REPLICATES_METHOD = "value without one image of a category and all of its pairs"


@dataclass(frozen=True)
class KeypointScorer:
    """Scores of points by pair, category and image.

    Attributes:
        pair: (points,) their pairs.
        category: (pairs,).
        source, target: (pairs,) numbers of images; an image in two categories has two.
        image_category: (images,).
        names: of the categories.
        digest: equal for equal pairs.
        metrics: some of `METRICS`, to make rows of.
    """

    pair: Integers
    category: Integers
    source: Integers
    target: Integers
    image_category: Integers
    names: list[str]
    digest: str
    metrics: Sequence[str] = METRICS

    @classmethod
    def of(cls, located: Located, metrics: Sequence[str] = METRICS) -> KeypointScorer:
        names = sorted({pair.category for pair in located.pairs})
        category = np.array(
            [names.index(pair.category) for pair in located.pairs], np.int64
        )
        both = np.concatenate([located.source_row, located.target_row])
        images, numbers = np.unique(
            np.stack([np.tile(category, 2), both], 1), axis=0, return_inverse=True
        )
        source, target = numbers.reshape(2, -1)
        words = [f"{pair.source} {pair.target} {pair.category}" for pair in located.pairs]
        digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
        return cls(
            located.pair, category, source, target, images[:, 0], names, digest, metrics
        )

    @property
    def n_images(self) -> int:
        return len(self.image_category)

    def describe(self) -> dict[str, Any]:
        return {
            "n_blocks": self.n_images,
            "digest": self.digest,
            "method": REPLICATES_METHOD,
        }

    def rows(
        self, found: NDArray[Any], alphas: Sequence[float], among: Mask | None = None
    ) -> Iterator[dict[str, Any]]:
        """The cells of a row for each metric and alpha.

        Args:
            found: (points, alphas) 1 where a keypoint was found, or the probability of that.
            alphas: their thresholds.
            among: (pairs,) these pairs only.
        """
        scores = self.scores(found, among)
        used = np.ones(len(self.category), bool) if among is None else among
        counts = {
            "n_images": len(np.union1d(self.source[used], self.target[used])),
            "n_pairs": int(used.sum()),
            "n_points": int(used[self.pair].sum()),
        }
        for name in self.metrics:
            score = scores[name]
            for i, alpha in enumerate(alphas):
                cells = {
                    "metric": f"{name}@{alpha:g}",
                    **score.cells(i),
                    "spread": SPREAD,
                }
                yield cells | counts

    def scores(self, found: NDArray[Any], among: Mask | None = None) -> dict[str, Score]:
        """Metric -> values of (points, alphas); see `rows`."""
        n_pairs = len(self.category)
        used = np.ones(n_pairs, bool) if among is None else among
        points: Float = np.bincount(self.pair, used[self.pair], n_pairs).astype(
            np.float64
        )
        hits = _sums(np.asarray(found, np.float64), self.pair, n_pairs) * used[:, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.where(points[:, None] > 0, hits / points[:, None], 0)
        in_use = np.flatnonzero(self._of_images(points[:, None])[:, 0] > 0)
        by_class = self._classes(hits, points)
        return {
            "pck": self._score(*by_class, in_use),
            "pck_point": self._score(*self._means(hits, points), in_use),
            "pck_image": self._score(*self._means(share, points > 0), in_use),
        }

    def _of_images(self, values: Float) -> Float:
        """(images, ...) sums over the pairs of each image; a pair of an image with itself counts
        once."""
        other = self.source != self.target
        of_source = _sums(values, self.source, self.n_images)
        return of_source + _sums(values[other], self.target[other], self.n_images)

    def _means(self, values: Float, weights: NDArray[Any]) -> tuple[Float, Float]:
        """Sum of values over sum of weights: (alphas,), and (images, alphas) without each image."""
        counts = np.asarray(weights, np.float64)[:, None]
        value = values.sum(0) / counts.sum()
        left = counts.sum() - self._of_images(counts)
        return value, _ratio(values.sum(0) - self._of_images(values), left)

    def _classes(self, hits: Float, points: NDArray[Any]) -> tuple[Float, Float]:
        """The mean over categories of their shares of points, and the same without each image."""
        counts = points.astype(np.float64)[:, None]
        n = len(self.names)
        class_hits, class_counts = (_sums(x, self.category, n) for x in (hits, counts))
        present = class_counts[:, 0] > 0
        shares = _ratio(class_hits, class_counts)
        value = shares[present].mean(0)
        own = self.image_category
        without = _ratio(
            class_hits[own] - self._of_images(hits),
            class_counts[own] - self._of_images(counts),
        )
        change = (without - shares[own]) / present.sum()
        return value, value + change

    def _score(self, value: Float, without: Float, in_use: Integers) -> Score:
        """Value and interval; images without any of the pairs do not count."""
        own = self.image_category[in_use]
        v = without[in_use]
        n = np.bincount(own, minlength=len(self.names))
        mean = _ratio(_sums(v, own, len(n)), n[:, None].astype(np.float64))
        squares = _sums((v - mean[own]) ** 2, own, len(n))
        variance = (
            squares * np.where(n > 0, (n - 1) / np.maximum(n, 1), 0)[:, None]
        ).sum(0)
        df = int((n[n > 0] - 1).sum())
        std = np.sqrt(variance) if df > 0 else np.full_like(value, np.nan)
        ends = share_interval(
            value, std, len(in_use), t_quantile(df) if df > 0 else np.nan
        )
        whole = np.tile(value, (self.n_images, 1))
        whole[in_use] = v
        return Score(value, std, *ends, whole)


@dataclass(frozen=True)
class Score:
    """Score of one metric: value, std, low, high (alphas,); without: (images, alphas)."""

    value: Float
    std: Float
    low: Float
    high: Float
    without: Float

    def cells(self, i: int) -> dict[str, Any]:
        """The cells of a row about one alpha."""
        names = ("value", "std", "low", "high")
        return {name: float(getattr(self, name)[i]) for name in names} | {
            WORD: self.without[:, i]
        }


def _sums(values: Float, labels: Integers, n: int) -> Float:
    """(n, ...) sums of (rows, columns) by label."""
    sums = np.zeros((n, *values.shape[1:]))
    for column in range(values.shape[1]):
        sums[:, column] = np.bincount(labels, values[:, column], n)
    return sums


def _ratio(a: Float, b: Float) -> Float:
    """a / b, NaN where b is 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(b > 0, a / b, np.nan)
