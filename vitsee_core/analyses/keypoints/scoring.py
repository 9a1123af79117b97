"""Share of keypoints that are found (PCK), and its interval over images.

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

from vitsee_core.analyses.keypoints.candidates import candidate_axes
from vitsee_core.analyses.keypoints.positions import LocatedKeypoints
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.statistics.shares import share_interval
from vitsee_core.tables.columns import REPLICATES
from vitsee_core.types import Float, Integers, Mask

if TYPE_CHECKING:
    from vitsee_stores.layout import TokenLayout


# ---------------------------------------------------------------- baselines without features


BASELINES = ("chance", "still", "grid")


def baseline_hits(
    located: LocatedKeypoints, layout: TokenLayout, match: str, alphas: Sequence[float]
) -> dict[str, Float]:
    """Return baseline -> (points, alphas), 1 where a keypoint is found, else 0.

    chance: the probability that a candidate drawn at random is near enough. still: the same place
    relative to the image. grid: the candidate nearest to the keypoint, the upper bound.

    Args:
        located: the keypoints.
        layout: token layout of a site; only its grid matters.
        match: one of `protocol.MATCHES`.
        alphas: thresholds, as shares of the side length.
    """
    # (points, 5): all that decides a point's baselines within a group
    targets = np.concatenate(
        [located.target_xy, located.pixel_size, located.side_length[:, None]], axis=1
    )
    nearest_xy = np.empty_like(located.target_xy)
    chance = np.empty((len(located), len(alphas)))
    for group in located.search_groups():
        rows, cols = candidate_axes(layout, located.input_size, group.window, match)
        # Many pairs have the same target: all sources of a category.
        unique_targets, target_index = np.unique(
            targets[group.points], axis=0, return_inverse=True
        )
        best = np.empty((len(unique_targets), 2))
        probability = np.empty((len(unique_targets), len(alphas)))
        for i, (x, y, width, height, side) in enumerate(unique_targets.tolist()):
            squared_dx = ((cols.positions - x) * width) ** 2
            squared_dy = ((rows.positions - y) * height) ** 2
            best[i, 0] = cols.positions[squared_dx.argmin()]
            best[i, 1] = rows.positions[squared_dy.argmin()]
            # Candidates within the radius, row by row, without the map of all of them.
            squared_dx.sort()
            n_near = [
                np.searchsorted(squared_dx, (alpha * side) ** 2 - squared_dy).sum()
                for alpha in alphas
            ]
            n_candidates = len(squared_dx) * len(squared_dy)
            probability[i] = np.array(n_near) / n_candidates
        nearest_xy[group.points] = best[target_index]
        chance[group.points] = probability[target_index]
    return {
        "chance": chance,
        "still": hits_within(located, located.still_xy, alphas),
        "grid": hits_within(located, nearest_xy, alphas),
    }


def hits_within(
    located: LocatedKeypoints, positions: Float, alphas: Sequence[float]
) -> Float:
    """Return 1 where (points, 2) positions are nearer than alpha times the side, else 0.

    The result is (points, alphas).
    """
    radii = np.multiply.outer(located.side_length, np.asarray(alphas))
    # Strictly nearer, as in the code of Walmer et al.
    return (located.squared_error(positions)[:, None] < radii**2).astype(np.float64)


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
    """Makes scores and intervals of hits, by pair, category and image.

    Attributes:
        pair_index: (points,) the pair of each point.
        category: (pairs,) index of each pair's category.
        source, target: (pairs,) indices of images; an image in two categories has two.
        image_category: (images,) index of each image's category.
        names: names of the categories.
        digest: equal for equal pairs.
        metrics: some of `METRICS`, to make rows of.
    """

    pair_index: Integers
    category: Integers
    source: Integers
    target: Integers
    image_category: Integers
    names: list[str]
    digest: str
    metrics: Sequence[str] = METRICS

    @classmethod
    def from_keypoints(
        cls, located: LocatedKeypoints, metrics: Sequence[str] = METRICS
    ) -> KeypointScorer:
        """Return a scorer of these keypoints.

        Args:
            located: the keypoints.
            metrics: some of `METRICS`.
        """
        names = sorted({pair.category for pair in located.pairs})
        category = np.array(
            [names.index(pair.category) for pair in located.pairs], np.int64
        )
        # Images are numbered within categories, which the jackknife takes apart.
        rows = np.concatenate([located.source_row, located.target_row])
        category_and_row = np.stack([np.tile(category, 2), rows], axis=1)
        images, image_index = np.unique(category_and_row, axis=0, return_inverse=True)
        source, target = image_index.reshape(2, -1)
        texts = [f"{pair.source} {pair.target} {pair.category}" for pair in located.pairs]
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
        return cls(
            pair_index=located.pair_index,
            category=category,
            source=source,
            target=target,
            image_category=images[:, 0],
            names=names,
            digest=digest,
            metrics=metrics,
        )

    @property
    def n_images(self) -> int:
        """Return the number of images, those in two categories counted twice."""
        return len(self.image_category)

    def describe(self) -> dict[str, Any]:
        """Return the note on the jackknife replicates, which paired tables compare."""
        return {
            "n_blocks": self.n_images,
            "digest": self.digest,
            "method": REPLICATES_METHOD,
        }

    def rows(
        self, hits: NDArray[Any], alphas: Sequence[float], pairs: Mask | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the cells of a row for each metric and alpha.

        Args:
            hits: (points, alphas) 1 where a keypoint was found, or the probability of that.
            alphas: their thresholds.
            pairs: (pairs,) True for the pairs that count; None for all.
        """
        if pairs is None:
            pairs = np.ones(len(self.category), bool)
        scores = self.scores(hits, pairs)
        counts = {
            "n_images": len(np.union1d(self.source[pairs], self.target[pairs])),
            "n_pairs": int(pairs.sum()),
            "n_points": int(pairs[self.pair_index].sum()),
        }
        for metric in self.metrics:
            score = scores[metric]
            for i, alpha in enumerate(alphas):
                cells = {
                    "metric": f"{metric}@{alpha:g}",
                    **score.cells(i),
                    "spread": SPREAD,
                }
                yield cells | counts

    def scores(self, hits: NDArray[Any], pairs: Mask) -> dict[str, Score]:
        """Return metric -> score.

        Args:
            hits: (points, alphas) 1 where a keypoint was found, or the probability of that.
            pairs: (pairs,) True for the pairs that count.
        """
        n_pairs = len(self.category)
        # Points and hits of each pair, 0 of pairs that do not count.
        n_points: Float = np.bincount(
            self.pair_index, pairs[self.pair_index], n_pairs
        ).astype(np.float64)
        point_hits = np.asarray(hits, np.float64)
        pair_hits = _sum_by_label(point_hits, self.pair_index, n_pairs) * pairs[:, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            pair_shares = pair_hits / n_points[:, None]
        pair_shares = np.where(n_points[:, None] > 0, pair_shares, 0)
        # Images without any of the pairs would count as replicates equal to the value.
        images = np.flatnonzero(self._image_sums(n_points[:, None])[:, 0] > 0)
        class_value, class_without = self._class_means(pair_hits, n_points)
        point_value, point_without = self._weighted_means(pair_hits, n_points)
        pair_value, pair_without = self._weighted_means(pair_shares, n_points > 0)
        return {
            "pck": self._score(class_value, class_without, images),
            "pck_point": self._score(point_value, point_without, images),
            "pck_image": self._score(pair_value, pair_without, images),
        }

    def _image_sums(self, values: Float) -> Float:
        """Return (images, ...) sums of (pairs, ...) over the pairs of each image.

        A pair of an image with itself counts once.
        """
        source_sums = _sum_by_label(values, self.source, self.n_images)
        is_other = self.source != self.target
        target_sums = _sum_by_label(
            values[is_other], self.target[is_other], self.n_images
        )
        return source_sums + target_sums

    def _weighted_means(
        self, values: Float, weights: NDArray[Any]
    ) -> tuple[Float, Float]:
        """Return sums of (pairs, alphas) over the sum of (pairs,) weights.

        The first is (alphas,), of all pairs; the second (images, alphas), without each image.
        """
        counts = np.asarray(weights, np.float64)[:, None]
        mean = values.sum(0) / counts.sum()
        left_counts = counts.sum() - self._image_sums(counts)
        left_sums = values.sum(0) - self._image_sums(values)
        return mean, _ratio(left_sums, left_counts)

    def _class_means(self, hits: Float, n_points: Float) -> tuple[Float, Float]:
        """Return the mean over categories of their shares of points: hits over points.

        The first is (alphas,), of all pairs; the second (images, alphas), without each image.

        Args:
            hits: (pairs, alphas) number of points found, 0 of pairs that do not count.
            n_points: (pairs,) number of points, 0 of pairs that do not count.
        """
        counts = n_points[:, None]
        class_hits = _sum_by_label(hits, self.category, len(self.names))
        class_counts = _sum_by_label(counts, self.category, len(self.names))
        is_present = class_counts[:, 0] > 0
        shares = _ratio(class_hits, class_counts)
        mean = shares[is_present].mean(0)
        # Leaving out an image changes the share of its category alone.
        category = self.image_category
        left_shares = _ratio(
            class_hits[category] - self._image_sums(hits),
            class_counts[category] - self._image_sums(counts),
        )
        change = (left_shares - shares[category]) / is_present.sum()
        return mean, mean + change

    def _score(self, value: Float, without: Float, images: Integers) -> Score:
        """Return (alphas,) values with the jackknife's intervals.

        Args:
            value: (alphas,) of all pairs.
            without: (images, alphas) the value without each image.
            images: indices of the images that have a pair; others do not count.
        """
        n_classes = len(self.names)
        category = self.image_category[images]
        replicates = without[images]
        # n_c, mean_c and the sum of squares of the module's formula
        n = np.bincount(category, minlength=n_classes)
        sums = _sum_by_label(replicates, category, n_classes)
        class_means = _ratio(sums, n[:, None].astype(np.float64))
        deviations = replicates - class_means[category]
        squares = _sum_by_label(deviations**2, category, n_classes)
        factors = np.where(n > 0, (n - 1) / np.maximum(n, 1), 0)
        variance = (squares * factors[:, None]).sum(0)
        df = int((n[n > 0] - 1).sum())
        if df > 0:
            std = np.sqrt(variance)
            quantile = t_quantile(df)
        else:
            std = np.full_like(value, np.nan)
            quantile = np.nan
        low, high = share_interval(value, std, len(images), quantile)
        # Without an image that has no pair the value is what it was.
        all_replicates = np.tile(value, (self.n_images, 1))
        all_replicates[images] = replicates
        return Score(value=value, std=std, low=low, high=high, without=all_replicates)


@dataclass(frozen=True)
class Score:
    """Values of one metric.

    Attributes:
        value, std, low, high: (alphas,).
        without: (images, alphas) the value without each image.
    """

    value: Float
    std: Float
    low: Float
    high: Float
    without: Float

    def cells(self, i: int) -> dict[str, Any]:
        """Return the cells of a row about one alpha."""
        return {
            "value": float(self.value[i]),
            "std": float(self.std[i]),
            "low": float(self.low[i]),
            "high": float(self.high[i]),
            REPLICATES: self.without[:, i],
        }


def _sum_by_label(values: Float, labels: Integers, n: int) -> Float:
    """Return (n, columns) sums of the rows of (rows, columns) with each label."""
    sums = np.zeros((n, *values.shape[1:]))
    # By column, since bincount takes one weight per label.
    for column in range(values.shape[1]):
        sums[:, column] = np.bincount(labels, values[:, column], n)
    return sums


def _ratio(numerator: Float, denominator: Float) -> Float:
    """Return the quotient, NaN where the denominator is 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(denominator > 0, numerator / denominator, np.nan)
