"""Right answers of probes: counted class by class (`Tally`), turned into rows (`Scorer`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitsee_core.analyses.probe.draws import Draw
from vitsee_core.statistics.jackknife import Blocks, means_without
from vitsee_core.statistics.moments import Moments
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.statistics.shares import share_interval
from vitsee_core.tables.replicates import WORD
from vitsee_core.truth.labels.labelled_rows import LabelledRows
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.selectors import Token

INTERVAL = (
    "95 % Wilson score interval of the share of test images that are right, training images and "
    "features held fixed; with several seeds its ends are averaged; std is over seeds (n - 1). "
    f"Rows of token `each` (mean over the probes of all patches): {SHARES}"
)

TOP = 5
METRICS = ("top1", "top5")


class Tally:
    """Right answers on the test images, for each draw, l2, token and class.

    `top1` counts an image as right if its own class has the highest score, `top5` if it is among
    the five highest. With five classes or fewer `top5` would always be 1 and is left out.

    Attributes:
        metrics: names of the counted metrics, `top1` and possibly `top5`.
        right: (draws, l2s, tokens, metrics, classes), number of right answers.
        in_block: (draws, l2s, tokens, metrics, blocks), right answers in each block of test images.
        share: (draws, l2s, metrics, images), for how many of the tokens from `first` on each image
            is right.
        l2s: (draws, l2s, tokens), the l2 that each probe used; NaN for SGD.
        failed: (draws, l2s, tokens), probes without a result, as SGD diverged.
        blind: (draws, l2s, tokens), probes that give all images the same scores.
    """

    def __init__(
        self,
        labels: Integers,
        n_classes: int,
        *,
        draws: int,
        l2s: int,
        tokens: int,
        first: int = 0,
        blocks: Integers | None = None,
    ) -> None:
        """Start with counts of zero.

        Args:
            labels: (images,) class of each test image.
            n_classes: number of classes.
            draws: number of draws of training images.
            l2s: number of l2 values at which each probe is reported.
            tokens: number of tokens.
            first: first token that counts towards `share`; the ones before it are prefix tokens.
            blocks: (images,) jackknife block of each test image; by default all are in one block.
        """
        self.labels = labels
        self.n_classes = n_classes
        self.first = first
        self.blocks = np.zeros(len(labels), np.int64) if blocks is None else blocks
        self.metrics = METRICS if n_classes > TOP else METRICS[:1]
        n_metrics = len(self.metrics)
        self.right = np.zeros((draws, l2s, tokens, n_metrics, n_classes), np.int64)
        n_blocks = int(self.blocks.max(initial=-1)) + 1
        self.in_block = np.zeros((draws, l2s, tokens, n_metrics, n_blocks), np.int64)
        self.l2s = np.zeros((draws, l2s, tokens))
        self.failed = np.zeros((draws, l2s, tokens), bool)
        self.blind = np.zeros((draws, l2s, tokens), bool)
        self.share = np.zeros((draws, l2s, n_metrics, len(labels)), np.float32)

    def is_right(self, ranks: Integers) -> Mask:
        """Return whether each image is right, (l2s, metrics, m).

        Args:
            ranks: (l2s, m) number of classes that are ranked before each image's own class.
        """
        # An image is right if fewer than 1 (top1) or 5 (top5) classes come before its own.
        limits = np.array((1, TOP)[: len(self.metrics)])
        return ranks[:, np.newaxis] < limits[:, np.newaxis]

    def count(
        self, draw: int, l2s: slice, token: int, indices: Integers, right: Mask
    ) -> None:
        """Add the answers of one probe about some test images.

        Args:
            draw: number of the draw.
            l2s: l2 values of the probe.
            token: number of the token.
            indices: (m,) which of the test images.
            right: (l2s, metrics, m) whether each is right, from `is_right`.
        """
        self._add_by_group(self.right[draw, l2s, token], right, self.labels[indices])
        self._add_by_group(self.in_block[draw, l2s, token], right, self.blocks[indices])
        if token >= self.first:
            self.share[draw, l2s][:, :, indices] += right

    @staticmethod
    def _add_by_group(totals: Integers, right: Mask, groups: Integers) -> None:
        """Add the right answers (l2s, metrics, m) of each group of images to totals (l2s, metrics,
        groups). groups: (m,) the class or block of each image."""
        n_l2s, n_metrics, n_groups = totals.shape
        l2_index, metric_index, image_index = np.nonzero(right)
        # One bincount over a flat index (l2, metric, group) is much faster than a loop over l2s.
        row = l2_index * n_metrics + metric_index
        flat = row * n_groups + groups[image_index]
        counts = np.bincount(flat, minlength=n_l2s * n_metrics * n_groups)
        totals += counts.reshape(totals.shape)


@dataclass(frozen=True)
class Scorer:
    """Turns tallies into rows of a table.

    Attributes:
        draws: the draws of training images, as in the tally.
        test: the labelled test images.
        classes: names of the classes that have rows of their own; () for none.
        blocks: jackknife blocks of the test images, as in the tally.
    """

    draws: Sequence[Draw]
    test: LabelledRows
    classes: Sequence[str]
    blocks: Blocks

    def rows(
        self, tokens: Sequence[Token], tally: Tally, each: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of one site, for each number of shots and each l2.

        Args:
            tokens: the probed tokens.
            tally: right answers of their probes.
            each: add a row `each` after those of the tokens, the mean over the patches' probes.
        """
        for shots in dict.fromkeys(draw.shots for draw in self.draws):
            # The draws with this number of shots differ in their seed only.
            seeds = np.array(
                [d for d, draw in enumerate(self.draws) if draw.shots == shots]
            )
            for i in range(tally.right.shape[1]):
                for t, token in enumerate(tokens):
                    probe = {
                        "token": token.name,
                        "row": token.row,
                        "col": token.col,
                        "shots": shots,
                        "l2": _mean_l2(tally.l2s[seeds, i, t]),
                    }
                    for scores in self._scores_of_probe(tally, seeds, i, t):
                        yield {**probe, **scores}
                if each:
                    l2s = tally.l2s[seeds, i]
                    same_l2 = (l2s == l2s.flat[0]).all()
                    mean_probe = {
                        "token": "each",
                        "shots": shots,
                        "l2": _mean_l2(l2s) if same_l2 else None,
                    }
                    for scores in self._scores_of_mean(tally, seeds, i, len(tokens)):
                        yield {**mean_probe, **scores}

    def _scores_of_mean(
        self, tally: Tally, seeds: Integers, i: int, n_tokens: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the scores of the mean over the patches' probes at l2 number i, one per metric."""
        n_averaged = n_tokens - tally.first
        failed = tally.failed[seeds, i, tally.first :].any()
        for m, metric in enumerate(tally.metrics):
            share = tally.share[seeds, i, m] / n_averaged  # (seeds, images)
            if failed:
                share = np.full_like(share, np.nan)
            without = self.blocks.means_without(share.mean(0, dtype=np.float64))
            yield {"metric": metric, WORD: without, **_mean_share(share)}

    def _scores_of_probe(
        self, tally: Tally, seeds: Integers, i: int, t: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the scores of token t at l2 number i: one per metric, then one per named class.

        seeds: numbers of the draws over which the scores are averaged.
        """
        right = tally.right[seeds, i, t]  # (seeds, metrics, classes)
        failed = tally.failed[seeds, i, t]
        labels = self.test.labels
        images_in_block = self.blocks.sums(np.ones(len(labels)))
        for m, metric in enumerate(tally.metrics):
            right_in_block = tally.in_block[seeds, i, t, m].mean(0)
            without = means_without(right_in_block, images_in_block)
            scores = self._over_seeds(right[:, m].sum(-1), len(labels), failed, without)
            if failed.any():
                without = without * math.nan
            counts = self.test.counted()
            yield {"metric": metric, **scores, WORD: without, **counts}
        images_in_class = np.bincount(labels, minlength=tally.n_classes)
        for c, name in enumerate(self.classes):
            n_images = int(images_in_class[c])
            scores = self._over_seeds(right[:, 0, c], n_images, failed, None)
            counts = self.test.counted(labels == c)
            yield {"metric": "top1_class", "class": name, **scores, **counts}

    def _over_seeds(
        self, right: Integers, n: int, failed: Mask, without: Float | None
    ) -> dict[str, Any]:
        """Return the value, spread and interval of a share over seeds.

        Args:
            right: (seeds,) number of right answers among n.
            n: number of images.
            failed: (seeds,) probes without a result; any of them makes all cells NaN.
            without: (blocks,) mean share without each jackknife block.
        """
        mean_share = right.mean() / max(n, 1)
        low = np.zeros(len(right))
        high = np.zeros(len(right))
        for s, n_right in enumerate(right):
            low[s], high[s] = self.test.ends(mean_share, n, int(n_right), without)
        if failed.any():
            missing = np.full(len(right), math.nan)
            return _summary(missing, missing, missing, n)
        # Divided after the summary, not before: equal counts give exactly their mean, without
        # spread.
        scores = _summary(right, low, high, n)
        for name in ("value", "std"):
            scores[name] = scores[name] / n if n else math.nan
        return scores


def _mean_l2(values: Float) -> float | None:
    """Return the geometric mean of some l2 values, exact if they are equal; None if one is NaN."""
    if not np.isfinite(values).all():
        return None
    if (values == values.flat[0]).all():
        return float(values.flat[0])
    # The grid of l2 is geometric (2^-10 to 2^19), so is its mean.
    return float(np.exp2(np.log2(values).mean()))


def _mean_share(share: Float32) -> dict[str, Any]:
    """Return the value, spread and interval of a mean share.

    share: (seeds, images), the share of the patches' probes that are right about each image.
    """
    moments = Moments()
    moments.add(share.T)
    summary = moments.summary()
    n = share.shape[1]
    standard_error = summary.std / np.sqrt(n)
    low, high = share_interval(summary.mean, standard_error, n)
    return _summary(summary.mean, low, high, n)


def _summary(value: Any, low: Any, high: Any, n: int) -> dict[str, Any]:
    """Return mean, standard deviation (n - 1) and mean interval over seeds, of arrays (seeds,)."""
    spread = float(value.std(ddof=1)) if len(value) > 1 else math.nan
    return {
        "value": float(value.mean()),
        "std": spread,
        "low": float(low.mean()),
        "high": float(high.mean()),
        "n_images": n,
    }
