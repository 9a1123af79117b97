"""Statistics over images for every token, then averaged over the tokens of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vitsee_core.statistics.image_statistics import Estimates, Statistic, estimates_of
from vitsee_core.tables.replicates import stacked
from vitsee_core.types import Float, Integers, Mask


class TokenMean:
    """The mean over tokens of their statistics; tokens without a value are left out."""

    def __init__(self) -> None:
        self._parts = 0
        self._sum = 0.0
        self._trace: Float | None = None
        self._traced: Integers | None = None
        self._present: Mask | None = None
        self._jackknife = False
        self._labels: Integers | None = None

    def add(self, of: Statistic, rows: Integers) -> None:
        rows = rows[~np.isnan(of.value[rows])]
        if not len(rows):
            return
        if self._trace is None or self._traced is None or self._present is None:
            self._trace = np.zeros(of.trace.shape[1])
            self._traced = np.zeros(of.trace.shape[1], np.int64)
            self._present = np.zeros(of.present.shape[1], bool)
            self._jackknife, self._labels = of.jackknife, of.labels
        trace = of.trace[rows]
        there = ~np.isnan(trace)
        self._parts += len(rows)
        # One token after the other from the sum so far, so that pieces of any size give its bits.
        self._sum = float(np.cumsum([self._sum, *of.value[rows]])[-1])
        self._trace = np.concatenate([self._trace[np.newaxis], np.where(there, trace, 0)]).sum(0)
        self._traced += there.sum(0)
        self._present |= of.present[rows].any(0)

    def estimates(self) -> Estimates:
        if self._trace is None or self._traced is None or self._labels is None:
            nothing = np.full(1, np.nan)
            return Estimates(nothing, nothing, nothing, nothing, np.zeros(1, np.int64))
        with np.errstate(invalid="ignore"):
            trace = self._trace / self._traced
        value = np.array([self._sum / self._parts])
        assert self._present is not None
        present = self._present[np.newaxis]
        return estimates_of(value, trace[np.newaxis], present, self._jackknife, self._labels)


class Places:
    """Estimates of places: one token each, or the mean over several tokens. Tokens come in pieces,
    in their order."""

    def __init__(self, members: Sequence[Sequence[int]]) -> None:
        self._single: dict[int, list[int]] = {}
        for i, of in enumerate(members):
            if len(of) == 1:
                self._single.setdefault(of[0], []).append(i)
        self._several = {
            i: (np.array(of), TokenMean()) for i, of in enumerate(members) if len(of) != 1
        }
        nothing = np.full(len(members), np.nan)
        self._found = Estimates(
            nothing, nothing.copy(), nothing.copy(), nothing.copy(), np.zeros(len(members), int)
        )
        self._without: list[Float | None] = [None] * len(members)

    def add(self, of: Statistic, tokens: Integers) -> None:
        """Count the statistic of these tokens, one per row."""
        pairs = [(k, i) for k, t in enumerate(tokens.tolist()) for i in self._single.get(t, ())]
        self._put(of.estimates(), [k for k, _ in pairs], [i for _, i in pairs])
        for members, mean in self._several.values():
            mean.add(of, np.flatnonzero(np.isin(tokens, members)))

    def estimates(self) -> Estimates:
        for i, (_, mean) in self._several.items():
            self._put(mean.estimates(), [0], [i])
        return replace(self._found, without=stacked(self._without))

    def _put(self, estimates: Estimates, rows: list[int], places: list[int]) -> None:
        for name in ("value", "std", "low", "high", "n"):
            getattr(self._found, name)[places] = getattr(estimates, name)[rows]
        for row, place in zip(rows, places, strict=True):
            self._without[place] = None if estimates.without is None else estimates.without[row]
