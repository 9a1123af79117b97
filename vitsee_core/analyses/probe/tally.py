"""Counts of right answers of probes, class by class."""

from __future__ import annotations

import numpy as np

from vitsee_core.types import Integers, Mask

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
