"""Fits and tests probes of one site's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from vitsee_core.analyses.probe.concatenated import probe_concatenated
from vitsee_core.analyses.probe.draws import Draw
from vitsee_core.analyses.probe.fit import Fitted, Task, fit, token_bytes
from vitsee_core.analyses.probe.rows import Tally
from vitsee_core.analyses.probe.sgd import Training, fit_sgd
from vitsee_core.analyses.probe.sources import ConcatenatedTokens, Source
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.one_thread import one_blas_thread
from vitsee_core.runtime.streaming import thread_map
from vitsee_core.types import Float32, Integers, Mask
from vitsee_stores.errors import VitseeError


@dataclass(frozen=True)
class Prober:
    """Settings shared by every site."""

    task: Task
    draws: Sequence[Draw]
    test_labels: Integers  # of the labelled test images
    training: Training | None = None  # of SGD, None for ridge
    blocks: Integers | None = None  # (test images,) the jackknife's

    def each(
        self,
        train: Source,
        test: Source,
        what: str,
        first: int = 0,
        done: Callable[[int], object] = lambda n: None,
    ) -> Tally:
        """A probe for every token, as many at a time as fit the memory.

        Args:
            train, test: features of the images.
            what: in words, for errors.
            first: tokens from this one on are averaged in the tally's `share`.
            done: called with the number of finished probes.

        Raises:
            VitseeError: not even one token fits the memory.
        """
        tally = self._tally(train.n_tokens, first)
        size = self._token_bytes(train.dim)
        if size > self.task.memory:
            raise VitseeError(
                f"probing {what} takes about {human_bytes(size)} of memory, more than "
                f"{human_bytes(self.task.memory)} (give more with --memory, or use fewer images)"
            )
        with self.threads():
            for part in train.groups(max(1, self.task.memory // size)):
                if self.training is not None:
                    fitted = fit_sgd(train, part, self.draws, self.task, self.training)
                else:
                    fitted = [list(probes) for probes in fit(train, part, self.draws, self.task)]
                self._test(test, part, fitted, tally)
                done(len(self.draws) * (part.stop - part.start))
        return tally

    def threads(self) -> AbstractContextManager[None]:
        """Context in which ridge probes' products run in the calling thread. Entering takes some
        milliseconds, so callers with many sites hold it for all."""
        return nullcontext() if self.training is not None else one_blas_thread()

    def side_by_side(self, train: Source, test: Source, what: str) -> Tally:
        """One probe of all tokens together: by inner products if there are more features than
        images."""
        wide = train.n_tokens * train.dim > max(map(len, self.draws))
        if train.n_tokens > 1 and wide and self.training is None:
            tally = self._tally(1, 0)
            probe_concatenated(train, test, self.draws, self.task, tally)
            return tally
        return self.each(ConcatenatedTokens(train), ConcatenatedTokens(test), what)

    def _tally(self, tokens: int, first: int) -> Tally:
        sizes = {"draws": len(self.draws), "l2s": self.task.n_l2, "tokens": tokens}
        labels, n_classes = self.test_labels, self.task.n_classes
        return Tally(labels, n_classes, first=first, blocks=self.blocks, **sizes)

    def _token_bytes(self, dim: int) -> int:
        if self.training is None:
            return token_bytes(self.task, self.draws, dim)
        return 8 * dim * sum(map(len, self.draws))

    def _test(
        self, test: Source, part: slice, fitted: list[list[Fitted | None]], tally: Tally
    ) -> None:
        pairs = [(d, t) for d, probes in enumerate(fitted) for t in range(len(probes))]
        for d, t in pairs:
            probe, where = fitted[d][t], (d, slice(None), part.start + t)
            tally.failed[where] = probe is None
            tally.blind[where] = probe is not None and probe.blind
            tally.l2s[where] = np.nan if probe is None else probe.l2s

        def pieces() -> Iterator[tuple[tuple[int, int], Integers, Float32]]:
            for places, x in test.blocks(part, np.arange(len(self.test_labels))):
                for d, t in pairs:
                    yield (d, t), places, x[:, t]

        def score(
            piece: tuple[tuple[int, int], Integers, Float32],
        ) -> tuple[tuple[int, int], Integers, Mask | None]:
            (d, t), places, x = piece
            if (probe := fitted[d][t]) is None:
                return (d, t), places, None
            ranks = probe.ranks(x.astype(np.float64), self.test_labels[places])
            return (d, t), places, tally.judged(ranks)

        for (d, t), places, right in thread_map(self.task.jobs)(score, pieces()):
            if right is not None:
                tally.count(d, slice(None), part.start + t, places, right)
