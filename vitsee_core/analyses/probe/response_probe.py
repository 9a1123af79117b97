"""Responses as linear functions of features: ridge regression of every column at a site.

One eigendecomposition of a site's training images serves every column and every l2. The l2 of each
column is the one with the least squared error on `HELD_OUT` of the training images, which were not
fitted to; with the chosen ones all training images are fitted again. Test images choose nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.probe.draws import HELD_OUT
from vitsee_core.analyses.probe.response_scores import Sums
from vitsee_core.analyses.probe.responses import Responses
from vitsee_core.features import SiteFeatures
from vitsee_core.kernels.ridge import GRID, Algebra, Factors
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.statistics.jackknife import UNLIMITED, Blocks, Limits
from vitsee_core.statistics.value_columns import interval_cells
from vitsee_core.tables.columns import site_columns
from vitsee_core.tables.words import CEILING
from vitsee_core.types import Float, Integers, Mask
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Store

CORRELATION: Limits = (-1.0, 1.0)
EXPLAINED: Limits = (-np.inf, 1.0)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """Choices of the user.

    Attributes:
        sites, tokens: what is probed; tokens empty for the default of each site.
        l2s: to report, each for all columns; empty: chosen for each column.
        folds: of a cross-validation.
        by_column: add the rows of every column.
    """

    sites: tuple[str, ...]
    tokens: tuple[str, ...]
    l2s: tuple[float, ...]
    algebra: Algebra
    folds: int
    by_column: bool
    allow_shared: bool
    seed: int


@dataclass(frozen=True)
class Images:
    """The images of one store with responses. rows: (images,) of the responses."""

    store: Store
    mask: Mask
    rows: Integers
    left_out: int

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, store: Store, responses: Responses, execution: Execution) -> Images:
        """Those among the chosen that can be read.

        Raises:
            VitseeError: there are none.
        """
        rows = responses.rows_of(store)
        chosen = execution.rows(store).mask & store.valid
        mask = chosen & (rows >= 0)
        left_out = int((chosen & ~mask).sum())
        if not mask.any():
            raise VitseeError(
                f"none of the {int(chosen.sum())} images chosen of {store.label} has a response in "
                f"{responses.source}; expected ids like {store.samples.id[0]}"
            )
        if left_out:
            log.info(
                "%s: %d of the %d images have no response in %s and are left out",
                *(store.label, left_out, int(chosen.sum()), responses.source),
            )
        return cls(store, mask, rows[mask], left_out)


@dataclass(frozen=True)
class TestSet:
    """One fit: places among the training images, and among the tested ones."""

    train: Integers
    test: Integers


@dataclass(frozen=True)
class ResponseProbe:
    """The probes of one pair of stores, or of one store; called with the features of a site."""

    train: Images
    test: Images
    sets: tuple[TestSet, ...]
    y_train: Float
    y_test: Float
    blocks: Blocks
    ceiling: Float | None
    columns: Sequence[str]
    settings: Settings

    @property
    def n_tested(self) -> int:
        """Images that are in a test set."""
        return sum(len(one.test) for one in self.sets)

    def __call__(
        self, execution: Execution, item: tuple[SiteFeatures, SiteFeatures]
    ) -> list[dict[str, Any]]:
        """The rows of a site's tokens."""
        ours, theirs = item
        one = self.test is self.train
        x = _matrix(ours, self.train, execution)
        z = x if one else _matrix(theirs, self.test, execution)
        execution.progress.advance(len(self.train) + len(self.test) * (not one))
        place = site_columns(self.test.store, ours.site)
        place["token"] = "" if ours.site.layout is None else str(ours.selection)
        return [place | row for row in self.rows(x, z)]

    def rows(self, x: Float, z: Float) -> Iterator[dict[str, Any]]:
        """The rows of features (training images, dim) and (test images, dim)."""
        found: dict[float | None, list[tuple[Sums, Float]]] = {}
        for one in self.sets:
            x_fit, y_fit = x[one.train], self.y_train[one.train]
            chosen: dict[float | None, Float] = {
                l2: np.full(y_fit.shape[1], l2) for l2 in self.settings.l2s
            } or {None: self._choose(x_fit, y_fit)}
            factors = Factors.of_targets(x_fit, y_fit, self.settings.algebra)
            coordinates, y = factors.coordinates(z[one.test]), self.y_test[one.test]
            labels = self.blocks.labels[one.test]
            for asked, l2s in chosen.items():
                p = coordinates @ (factors.rhs / (factors.values[:, np.newaxis] + l2s))
                sums = Sums.by_block(y - factors.mean_target, p, labels, self.blocks.n)
                found.setdefault(asked, []).append((sums, l2s))
        for own in found.values():
            yield from self._of_l2([sums for sums, _ in own], np.stack([l2 for _, l2 in own]))
        yield from self._ceiling_rows()

    def _choose(self, x: Float, y: Float) -> Float:
        """(columns,) the l2 with the least squared error of held-out training images; of several
        the largest."""
        rng = np.random.default_rng((self.settings.seed, 1))
        held = np.zeros(len(x), bool)
        held[rng.permutation(len(x))[: max(1, round(HELD_OUT * len(x)))]] = True
        factors = Factors.of_targets(x[~held], y[~held], self.settings.algebra)
        coordinates = factors.coordinates(x[held])
        best, chosen = np.full(y.shape[1], np.inf), np.full(y.shape[1], GRID[-1])
        for l2 in reversed(GRID):
            error = np.square(factors.scores(coordinates, l2) - y[held]).sum(0)
            better = error < best
            best[better], chosen[better] = error[better], l2
        return chosen

    def _of_l2(self, sums: Sequence[Sums], l2s: Float) -> Iterator[dict[str, Any]]:
        """The rows of one choice of l2; sums: by block, of each test set."""
        metrics: dict[str, tuple[Float, Float, Limits]] = {
            "r": (*_over_sets(sums, lambda own: own.r), CORRELATION),
            "r2": (*_over_sets(sums, lambda own: own.r2), EXPLAINED),
        }
        if self.ceiling is not None:
            usable = np.where(self.ceiling > 0, self.ceiling, np.nan)
            for name, bound in (("r", np.sqrt(usable)), ("r2", usable)):
                value, replicates, _ = metrics[name]
                metrics[f"{name}_normalised"] = value / bound, replicates / bound, UNLIMITED
        l2 = _geometric(l2s)
        about = {"n_images": self.n_tested, "baseline": ""}
        if self.settings.by_column:
            for name, (value, replicates, limits) in metrics.items():
                for at, column in enumerate(self.columns):
                    own = {"column": column, "l2": float(l2[at]), "n_columns": 1}
                    cells = interval_cells(value[at], replicates[:, at], limits)
                    yield about | own | {"metric": name} | cells
        of_all = about | {"l2": float(_geometric(l2))}
        for name, (value, replicates, limits) in metrics.items():
            there = np.isfinite(value)
            own = of_all | {"n_columns": int(there.sum())}
            for word, over in (("median", np.median), ("mean", np.mean)):
                if not there.any():
                    yield own | {"metric": f"{name}_{word}", "value": np.nan}
                    continue
                summary, of_blocks = over(value[there]), over(replicates[:, there], axis=1)
                cells = interval_cells(summary, of_blocks, limits)
                yield own | {"metric": f"{name}_{word}"} | cells

    def _ceiling_rows(self) -> Iterator[dict[str, Any]]:
        if self.ceiling is None:
            return
        usable = self.ceiling[self.ceiling > 0]
        for name, bound in (("r", np.sqrt(usable)), ("r2", usable)):
            for word, over in (("median", np.median), ("mean", np.mean)):
                value = float(over(bound)) if len(bound) else np.nan
                yield {
                    "metric": f"{name}_{word}", "value": value, "n_images": self.n_tested,
                    "n_columns": len(bound), "baseline": CEILING,
                }  # fmt: skip


def _geometric(l2s: Float) -> Float:
    """The geometric mean over the first axis; a number without rounding where all are equal."""
    return np.where(np.ptp(l2s, 0) > 0, np.exp(np.log(l2s).mean(0)), l2s[0])


def _over_sets(sums: Sequence[Sums], score: Callable[[Sums], Float]) -> tuple[Float, Float]:
    """(columns,) and (blocks, columns) the mean over test sets."""
    whole = np.mean([score(own.total()) for own in sums], axis=0)
    return whole, np.mean([score(own.without()) for own in sums], axis=0)


def _matrix(features: SiteFeatures, images: Images, execution: Execution) -> Float:
    """(images, dim) of those with a response, in the store's order."""
    need = 8 * 4 * len(images) * features.dim
    if need > execution.budget:
        raise VitseeError(
            f"{features.site.name}: {len(images)} images of {features.dim} channels take "
            f"{human_bytes(need)}, {human_bytes(execution.budget)} are allowed; give --memory, or "
            "fewer --images"
        )
    parts = features.vectors(images.mask, jobs=execution.jobs, memory=execution.budget)
    return np.concatenate([part.astype(np.float64) for part in parts])
