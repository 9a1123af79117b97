"""The probes of one site: fitted to training images and tested on test images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from vitsee_core.analyses.probe.draws import Draw
from vitsee_core.analyses.probe.fit import (
    Fitted,
    Task,
    fit,
    token_bytes,
)
from vitsee_core.analyses.probe.settings import Training
from vitsee_core.analyses.probe.sgd import fit_sgd
from vitsee_core.analyses.probe.side_by_side import probe_concatenated
from vitsee_core.analyses.probe.sources import ConcatenatedTokens, Source
from vitsee_core.analyses.probe.tally import Tally
from vitsee_core.runtime.lanes import one_blas_thread
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.streaming import thread_map
from vitsee_core.types import Float32, Integers, Mask
from vitsee_stores.errors import VitseeError


@dataclass(frozen=True)
class Prober:
    """Fits and tests the probes of a site; the settings are shared by every site.

    Attributes:
        task: settings of the fits.
        draws: the draws of training images; each has a probe of its own.
        test_labels: (images,) classes of the labelled test images.
        training: settings of SGD; None for ridge regression.
        blocks: (images,) jackknife block of each test image.
    """

    task: Task
    draws: Sequence[Draw]
    test_labels: Integers
    training: Training | None = None
    blocks: Integers | None = None

    def each(
        self,
        train: Source,
        test: Source,
        title: str,
        first: int = 0,
        done: Callable[[int], object] = lambda n: None,
    ) -> Tally:
        """Fit and test a probe for every token, as many at a time as fit the memory.

        Args:
            train: features of the training images.
            test: features of the test images.
            title: site and tokens in words, for errors.
            first: tokens from this one on are averaged in the tally's `share`.
            done: called with the number of probes that were finished.

        Raises:
            VitseeError: not even one token fits the memory.
        """
        tally = self._tally(train.n_tokens, first)
        if self.training is None:
            bytes_per_token = token_bytes(self.task, self.draws, train.dim)
        else:
            bytes_per_token = 8 * train.dim * sum(map(len, self.draws))
        if bytes_per_token > self.task.memory:
            raise VitseeError(
                f"probing {title} takes about {human_bytes(bytes_per_token)} of memory, more than "
                f"{human_bytes(self.task.memory)} (give more with --memory, or use fewer images)"
            )
        tokens_at_once = max(1, self.task.memory // bytes_per_token)
        with self.threads():
            for token_slice in train.groups(tokens_at_once):
                fitted: list[list[Fitted | None]]
                if self.training is not None:
                    fitted = fit_sgd(
                        train, token_slice, self.draws, self.task, self.training
                    )
                else:
                    ridge = fit(train, token_slice, self.draws, self.task)
                    fitted = [list(probes) for probes in ridge]
                self._test(test, token_slice, fitted, tally)
                n_tokens = token_slice.stop - token_slice.start
                done(len(self.draws) * n_tokens)
        return tally

    def threads(self) -> AbstractContextManager[None]:
        """Return a context in which ridge probes' products run in the calling thread.

        Entering takes some milliseconds, so callers with many sites hold it for all of them.
        """
        if self.training is not None:
            return nullcontext()
        return one_blas_thread()

    def side_by_side(self, train: Source, test: Source, title: str) -> Tally:
        """Fit and test one probe of all tokens together.

        With more features than images it is fitted by inner products, so that the features are
        never in memory all together. title: site and tokens in words, for errors.
        """
        has_more_features = train.n_tokens * train.dim > max(map(len, self.draws))
        if train.n_tokens > 1 and has_more_features and self.training is None:
            tally = self._tally(n_tokens=1, first=0)
            n = len(self.test_labels)
            for d, probe, x in probe_concatenated(train, test, self.draws, self.task, n):
                tally.l2s[d, :, 0] = probe.l2s
                tally.blind[d, :, 0] = probe.blind
                right = tally.is_right(probe.ranks(x, self.test_labels))
                tally.count(d, slice(None), 0, np.arange(n), right)
            return tally
        return self.each(ConcatenatedTokens(train), ConcatenatedTokens(test), title)

    def _tally(self, n_tokens: int, first: int) -> Tally:
        """Return an empty tally of the test images."""
        return Tally(
            self.test_labels,
            self.task.n_classes,
            draws=len(self.draws),
            l2s=self.task.n_l2,
            tokens=n_tokens,
            first=first,
            blocks=self.blocks,
        )

    def _test(
        self,
        test: Source,
        token_slice: slice,
        fitted: list[list[Fitted | None]],
        tally: Tally,
    ) -> None:
        """Count the right answers of the probes of some tokens.

        fitted: probe of each draw and token of the slice; None if its training diverged.
        """
        probe_keys = [
            (d, t) for d, probes in enumerate(fitted) for t in range(len(probes))
        ]
        for d, t in probe_keys:
            probe = fitted[d][t]
            at = (d, slice(None), token_slice.start + t)
            tally.failed[at] = probe is None
            tally.blind[at] = probe is not None and probe.blind
            tally.l2s[at] = np.nan if probe is None else probe.l2s

        def pieces() -> Iterator[tuple[tuple[int, int], Integers, Float32]]:
            """Yield (probe's key, image indices, features (m, dim)) as the images are read."""
            for indices, x in test.blocks(token_slice, np.arange(len(self.test_labels))):
                for d, t in probe_keys:
                    yield (d, t), indices, x[:, t]

        def score(
            piece: tuple[tuple[int, int], Integers, Float32],
        ) -> tuple[tuple[int, int], Integers, Mask | None]:
            """Return (probe's key, image indices, whether each is right (l2s, metrics, m)); None in
            place of the last if the probe's training diverged."""
            (d, t), indices, x = piece
            probe = fitted[d][t]
            if probe is None:
                return (d, t), indices, None
            ranks = probe.ranks(x.astype(np.float64), self.test_labels[indices])
            return (d, t), indices, tally.is_right(ranks)

        # Scoring runs in threads; counting stays here, as tallies are not safe to share.
        for (d, t), indices, right in thread_map(self.task.jobs)(score, pieces()):
            if right is not None:
                token = token_slice.start + t
                tally.count(d, slice(None), token, indices, right)
