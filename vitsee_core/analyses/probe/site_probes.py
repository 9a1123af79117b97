"""The probes of one site, fitted, tested and turned into rows, in any process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vitsee_core.analyses.probe.remarks import remarks_on
from vitsee_core.analyses.probe.rows import Scorer, tokens_of
from vitsee_core.analyses.probe.score import Prober
from vitsee_core.analyses.probe.sources import Random, Stored
from vitsee_core.analyses.probe.tally import Tally
from vitsee_core.features import SiteFeatures
from vitsee_core.labels.labelled_rows import LabelledRows
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.progress import Progress
from vitsee_stores.token_selection import Token

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
            return list(
                self.scorer.rows([Token("")], self._random(prober, first, second), False)
            ), []
        tally = self._probe(prober, first, second, execution.progress)
        one_class = len(np.unique(self.train.labels)) == 1
        rows = self.scorer.rows(tokens_of(first), tally, first.selection == "each")
        return list(rows), remarks_on(first, tally, task, one_class)

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
