"""Counts of right answers of probes, class by class, and one site's accuracies as rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitsee_core.analyses.probe.draws import Draw
from vitsee_core.features import SiteFeatures
from vitsee_core.labels.labelled_rows import LabelledRows
from vitsee_core.statistics.jackknife import Blocks, means_without
from vitsee_core.statistics.moments import Moments
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.statistics.shares import share_interval
from vitsee_core.tables.replicates import WORD
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.token_selection import Token

INTERVAL = (
    "95 % Wilson score interval of the share of test images that are right, training images and "
    "features held fixed; with several seeds its ends are averaged; std is over seeds (n - 1). "
    f"Rows of token `each` (mean over the probes of all patches): {SHARES}"
)


TOP = 5
METRICS = ("top1", "top5")


class Tally:
    """Right answers on the test images, for each draw, l2, token and class.

    Attributes:
        right: (draws, l2s, tokens, metrics, classes).
        share: (draws, l2s, metrics, images), for how many of the tokens from `first` on each image
            is right.
        metrics: `top1` and, with more than five classes, `top5` (with five or fewer it would always
            be 1).
        in_block: (draws, l2s, tokens, metrics, blocks), right answers in each block of test images.
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
        """labels, blocks: (images,) class and block of each; without `blocks` there is only one."""
        self.labels, self.n_classes, self.first = labels, n_classes, first
        self.blocks = np.zeros(len(labels), np.int64) if blocks is None else blocks
        self.metrics = METRICS if n_classes > TOP else METRICS[:1]
        n = len(self.metrics)
        self.right = np.zeros((draws, l2s, tokens, n, n_classes), np.int64)
        n_blocks = int(self.blocks.max(initial=-1)) + 1
        self.in_block = np.zeros((draws, l2s, tokens, n, n_blocks), np.int64)
        self.l2s = np.zeros((draws, l2s, tokens))
        self.failed = np.zeros((draws, l2s, tokens), bool)  # probes without a result
        # Probes that give all images the same scores.
        self.blind = np.zeros((draws, l2s, tokens), bool)
        self.share = np.zeros((draws, l2s, n, len(labels)), np.float32)

    def judged(self, ranks: Integers) -> Mask:
        """(l2s, metrics, m) whether each image is right, from its number of classes ranked before
        its own, (l2s, m)."""
        most = np.array((1, TOP)[: len(self.metrics)])
        return ranks[:, np.newaxis] < most[:, np.newaxis]

    def count(self, draw: int, l2s: slice, token: int, places: Integers, right: Mask) -> None:
        """Count test images `places` (m,), of a draw and token; right: (l2s, metrics, m), see
        `judged`."""
        at, metric, image = np.nonzero(right)
        row = at * len(self.metrics) + metric
        for total, of in ((self.right, self.labels), (self.in_block, self.blocks)):
            n_rows, n = right.shape[0] * right.shape[1], total.shape[-1]
            counts = np.bincount(row * n + of[places][image], minlength=n_rows * n)
            total[draw, l2s, token] += counts.reshape(*right.shape[:2], n)
        if token >= self.first:
            self.share[draw, l2s][:, :, places] += right


@dataclass(frozen=True)
class Scorer:
    """Turns tallies into rows."""

    draws: Sequence[Draw]  # of the tally
    test: LabelledRows  # the test images
    classes: Sequence[str]  # names of those that have rows of their own
    blocks: Blocks  # of the test images, as in the tally

    def rows(self, tokens: Sequence[Token], tally: Tally, each: bool) -> Iterator[dict[str, Any]]:
        """Rows of one site: tokens, for `each` then their mean, for each number of shots and l2."""
        for shots in dict.fromkeys(draw.shots for draw in self.draws):
            own = np.array([d for d, draw in enumerate(self.draws) if draw.shots == shots])
            for i in range(tally.right.shape[1]):
                for t, token in enumerate(tokens):
                    base = {
                        **{"token": token.name, "row": token.row, "col": token.col},
                        **{"shots": shots, "l2": _mean_l2(tally.l2s[own, i, t])},
                    }
                    for row in self._of_probe(tally, own, i, t):
                        yield base | row
                if each:
                    base = {"token": "each", "shots": shots}
                    l2 = tally.l2s[own, i]
                    base["l2"] = _mean_l2(l2) if (l2 == l2.flat[0]).all() else None
                    for m, metric in enumerate(tally.metrics):
                        share = tally.share[own, i, m] / (len(tokens) - tally.first)
                        if tally.failed[own, i, tally.first :].any():
                            share = np.full_like(share, np.nan)
                        without = self.blocks.means_without(share.mean(0, dtype=np.float64))
                        yield base | {"metric": metric, WORD: without} | _mean_share(share)

    def _of_probe(self, tally: Tally, own: Integers, i: int, t: int) -> Iterator[dict[str, Any]]:
        right = tally.right[own, i, t]
        failed = tally.failed[own, i, t]
        labels = self.test.labels
        counts = np.bincount(labels, minlength=tally.n_classes)
        in_block = self.blocks.sums(np.ones(len(labels)))
        for m, metric in enumerate(tally.metrics):
            without = means_without(tally.in_block[own, i, t, m].mean(0), in_block)
            scores = self._over_seeds(right[:, m].sum(-1), len(labels), failed, without)
            scores |= {WORD: without * (math.nan if failed.any() else 1)}
            yield {"metric": metric} | scores | self.test.counted()
        for c, name in enumerate(self.classes):
            scores = self._over_seeds(right[:, 0, c], int(counts[c]), failed, None)
            counted = self.test.counted(labels == c)
            yield {"metric": "top1_class", "class": name} | scores | counted

    def _over_seeds(
        self, right: Integers, n: int, failed: Mask, without: Float | None
    ) -> dict[str, Any]:
        """From the numbers of right answers among n, one per seed; without: (blocks,) their mean
        share without each block."""
        ends = [self.test.ends(right.mean() / max(n, 1), n, int(one), without) for one in right]
        low, high = (np.array(column) for column in zip(*ends, strict=True))
        if failed.any():
            return _summary(np.full(len(right), math.nan), low * math.nan, high * math.nan, n)
        # Equal counts give exactly their mean, without spread.
        scores = _summary(right, low, high, n)
        for name in ("value", "std"):
            scores[name] = scores[name] / n if n else math.nan
        return scores


def tokens_of(features: SiteFeatures) -> list[Token]:
    """Token name of the probed vectors in rows."""
    if features.site.layout is not None and features.selection == "all":
        return [Token("all")]
    return features.tokens


def _mean_l2(values: Float) -> float | None:
    """The value, or the geometric mean of several; None if there is none."""
    if not np.isfinite(values).all():
        return None
    if (values == values.flat[0]).all():
        return float(values.flat[0])
    return float(np.exp2(np.log2(values).mean()))


def _mean_share(share: Float32) -> dict[str, Any]:
    """From (seeds, images): the share of probes that are right about each image."""
    moments = Moments()
    moments.add(share.T)
    summary = moments.summary()
    n = share.shape[1]
    return _summary(summary.mean, *share_interval(summary.mean, summary.std / np.sqrt(n), n), n)


def _summary(value: Any, low: Any, high: Any, n: int) -> dict[str, Any]:
    spread = float(value.std(ddof=1)) if len(value) > 1 else math.nan
    ends = {"low": float(low.mean()), "high": float(high.mean())}
    return {"value": float(value.mean()), "std": spread, **ends, "n_images": n}
