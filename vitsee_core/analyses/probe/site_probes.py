"""The probes of one site, fitted, tested and turned into rows, in any process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.probe.fit import Task
from vitsee_core.analyses.probe.rows import Scorer, Tally, tokens_of
from vitsee_core.analyses.probe.score import Prober
from vitsee_core.analyses.probe.sources import Random, Stored
from vitsee_core.features import SiteFeatures, check_alike
from vitsee_core.kernels.ridge import GRID
from vitsee_core.labels.labelled_rows import LabelledRows
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.progress import Progress
from vitsee_stores.token_selection import Token

if TYPE_CHECKING:
    from vitsee_stores import Store

# A site's features of the training and of the test images; or tokens and channels of random ones.
Item = tuple[SiteFeatures, SiteFeatures] | tuple[int, int]


@dataclass(frozen=True)
class SiteProbes:
    """The rows of a site's probes, or of those of random features, and remarks."""

    prober: Prober
    train: LabelledRows
    test: LabelledRows
    scorer: Scorer
    seed: int

    def __call__(self, execution: Execution, item: Item) -> tuple[list[dict[str, Any]], list[str]]:
        task = replace(self.prober.task, jobs=execution.jobs, memory=execution.budget)
        prober = replace(self.prober, task=task)
        first, second = item
        if isinstance(first, int) or isinstance(second, int):
            assert isinstance(first, int) and isinstance(second, int)
            random = self._random(prober, first, second)
            return list(self.scorer.rows([Token("")], random, False)), []
        tally = self._probe(prober, first, second, execution.progress)
        one_class = len(np.unique(self.train.labels)) == 1
        rows = self.scorer.rows(tokens_of(first), tally, first.selection == "each")
        return list(rows), _remarks(first, tally, task, one_class)

    def _probe(
        self, prober: Prober, features: SiteFeatures, other: SiteFeatures, progress: Progress
    ) -> Tally:
        task, what = prober.task, f"{features.site.name} ({features.selection})"
        ours = Stored(features, self.train, task.jobs, task.memory)
        theirs = Stored(other, self.test, task.jobs, task.memory)
        if features.site.layout is not None and features.selection == "all":
            tally = prober.side_by_side(ours, theirs, what)
            progress.advance(len(prober.draws))
            return tally
        first = features.n_prefix if features.selection == "each" else 0
        return prober.each(ours, theirs, what, first, progress.advance)

    def _random(self, prober: Prober, n: int, dim: int) -> Tally:
        """Random features with these numbers of tokens and channels."""
        ours = Random(len(self.train), n, dim, (self.seed, 0))
        theirs = Random(len(self.test), n, dim, (self.seed, 1))
        return prober.side_by_side(ours, theirs, "random features")


def shape_of_random(features: SiteFeatures) -> tuple[int, int]:
    """Tokens and channels of the random features beside these; for `each`, of one token."""
    return len(features.tokens) if features.selection == "all" else 1, features.dim


def each_selection(
    train: Store,
    sites: Sequence[str],
    tokens: Sequence[str],
    read: Callable[[str, str | None], tuple[SiteFeatures, SiteFeatures]],
) -> Iterator[tuple[SiteFeatures, SiteFeatures]]:
    """The features of the training and of the test images, of every site and kind of tokens, each
    once; a vector has no tokens.

    Args:
        train: whose sites.
        sites: patterns.
        tokens: words, () for each site's default.
        read: returns both features of a site's name and a word.

    Raises:
        StoreMismatch: the test images have other tokens or channels.
    """
    for site in train.select(list(sites)):
        seen: set[str] = set()
        for word in tokens or (None,):
            ours, theirs = read(site.name, word)
            check_alike(ours, theirs)
            if ours.selection not in seen and (ours.site.layout is not None or not seen):
                seen.add(ours.selection)
                yield ours, theirs


def _remarks(features: SiteFeatures, tally: Tally, task: Task, one_class: bool) -> list[str]:
    """One sentence each on SGD that diverged, equal features, and an l2 at an end of the grid.
    one_class: all training images have the same label, so that equal scores say nothing about the
    features."""
    name, out = features.site.name, []
    if tally.failed.any():
        out.append(
            f"{name}: SGD diverged for {int(tally.failed.sum())} of {tally.failed.size} "
            "probes, which have no value (give a smaller --lr)"
        )
    if tally.blind.any() and not one_class:
        tokens = tally.blind.any((0, 1))
        count = f" of {int(tokens.sum())} of {tokens.size} tokens" if tokens.size > 1 else ""
        which = "" if count or features.site.layout is None else f"{features.selection} "
        out.append(
            f"{name}: the {which}features{count} are the same in all training images; their "
            "probe gives every image the class that most of them have"
        )
    ends = np.isin(tally.l2s, (GRID[0], GRID[-1])) & ~tally.blind
    if ends.any() and not task.l2s:
        out.append(
            f"{name}: the chosen l2 of {int(ends.sum())} of {tally.l2s.size} probes is at an end "
            "of the grid"
        )
    return out
