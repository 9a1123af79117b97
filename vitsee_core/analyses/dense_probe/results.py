"""The probes of one pair of stores, and the rows that they give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.dense_probe.features import Probed, probed
from vitsee_core.analyses.dense_probe.memory import train_from_bank
from vitsee_core.analyses.dense_probe.protocols import BATCH, RIDGE, SGD, Solver
from vitsee_core.analyses.dense_probe.ridge_training import train_ridge
from vitsee_core.analyses.dense_probe.scoring import HeadKey, Tally
from vitsee_core.analyses.dense_probe.shown import show_images
from vitsee_core.analyses.dense_probe.splits import Images
from vitsee_core.analyses.dense_probe.tasks import Task
from vitsee_core.analyses.dense_probe.work import Part, Trained, score_heads
from vitsee_core.patch_maps.views import grid_sites
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.tables.columns import site_columns
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution

UNTRAINED = "untrained"


@dataclass(frozen=True)
class Settings:
    """What is probed, how, and what is measured. concat: see `features.probed`. eigen: test on the
    crop of Eigen et al. 2014."""

    sites: tuple[str, ...]
    concat: int | None
    task: Task
    solver: Solver
    metrics: tuple[str, ...]
    per_class: bool
    eigen: bool


class PairOfStores:
    """One store that trains and one that tests, which may be the same. chosen: in the first."""

    def __init__(self, train: Images, test: Images, settings: Settings) -> None:
        self.settings = settings
        sites = grid_sites(train[0], settings.sites)
        self.chosen: list[Probed] = probed(sites, settings.concat, train[0].label)
        others = [one.of(test[0]) for one in self.chosen]
        more = settings.task, settings.solver.resolution
        self.train = Part.of(*train, self.chosen, *more)
        self.test = Part.of(*test, others, *more, settings.eigen)
        for one in self.chosen:
            self.train.features[one.name].check_alike(self.test.features[one.name])

    @property
    def n_images(self) -> int:
        """How many are read, for a progress bar."""
        solver = self.settings.solver
        trained = (2 if solver.balanced else 1) * self.train.n_images
        if solver.name == SGD:
            trained += solver.steps * BATCH * len(self.chosen)
        return trained + self.test.n_images

    def probe(self, execution: Execution) -> Found:
        """Train and test."""
        solver = self.settings.solver
        if solver.name == RIDGE:
            trained = train_ridge(self.train, solver, execution)
        elif solver.name == SGD:
            from vitsee_core.analyses.dense_probe.sgd_training import train_sgd  # torch

            trained = train_sgd(self.train, solver, execution)
        else:
            trained = train_from_bank(self.train, solver, execution)
        alone = solver.of_neighbours  # they take all threads
        counts, blocks = score_heads(
            self.test, trained.heads, self.settings.metrics, execution, alone
        )
        return Found(self, trained, counts, blocks)


@dataclass(frozen=True)
class Found:
    """What a pair of stores gave."""

    work: PairOfStores
    trained: Trained
    counts: Mapping[HeadKey, Tally]
    blocks: Blocks

    def rows(self) -> Iterator[dict[str, Any]]:
        """Of the model's sites, then of the baselines beside each of them."""
        for one in self.work.chosen:
            yield from self._of_site(one)
        several = len(self.work.settings.solver.l2s) > 1
        for one in self.work.chosen:
            grid = self.work.test.grids[one.name]
            place = site_columns(self.work.test.store, one)
            for own in self._keys(one):
                # Beside each row that they are compared with.
                of = place | {"k": own.k, "l2": own.l2 if several else None}
                for name in self.work.settings.task.baselines:
                    yield from self._cells(HeadKey(grid, baseline=name), of | {"baseline": name})

    def rows_for(self, trained: Found) -> Iterator[dict[str, Any]]:
        """Of the sites of an untrained model, as a baseline of those of a trained one."""
        known = {one.name: one for one in self.work.chosen}
        for one in trained.work.chosen:
            if one.name not in known:
                label = self.work.train.store.label
                raise VitseeError(f"{label} lacks the site {one.name}, which is probed")
            yield from self._of_site(
                known[one.name], site_columns(trained.work.test.store, one), UNTRAINED
            )

    def shown(self, n: int, data: str | None) -> list[dict[str, Any]]:
        """The first test images by the best probe, for the notes."""
        keys = [key for key in self.counts if not key.baseline]
        values = [self.work.settings.task.quality(self.counts[key]) for key in keys]
        key = keys[int(np.nanargmax(values))]
        return show_images(self.work.test, key, self.trained.heads[key], n, data)

    def _of_site(
        self, one: Probed, place: Mapping[str, Any] | None = None, baseline: str = ""
    ) -> Iterator[dict[str, Any]]:
        place = place or site_columns(self.work.test.store, one)
        for key in self._keys(one):
            yield from self._cells(key, {**place, "baseline": baseline, "l2": key.l2, "k": key.k})

    def _keys(self, one: Probed) -> list[HeadKey]:
        """Of the site's probes."""
        return [key for key in self.trained.heads if key.of == one.name and not key.baseline]

    def _cells(self, key: HeadKey, about: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        settings = self.work.settings
        rows = settings.task.cells(self.counts[key], settings.metrics, settings.per_class)
        for cells in rows:
            yield {**about, **cells, "n_images": self.work.test.n_images}
