"""The run of `probe --response`: which images train and test, the ridge regression of every column
of responses on a site's features, and the table.

One eigendecomposition of a site's training images serves every column and every l2. The l2 of each
column is the one with the least squared error on `HELD_OUT` of the training images, which were not
fitted to; with the chosen ones all training images are fitted again. Test images choose nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.probe.draws import HELD_OUT
from vitsee_core.analyses.probe.options import (
    FeatureOptions,
    ProbedStores,
    ResponseOptions,
)
from vitsee_core.analyses.probe.probed_sites import each_selection
from vitsee_core.analyses.probe.responses import (
    SPLITS,
    Responses,
    Sums,
    read_responses,
    reliability,
)
from vitsee_core.features import (
    SiteFeatures,
    choose_features,
    compared,
    require_comparable,
)
from vitsee_core.features.compared import other_precision
from vitsee_core.kernels.l2_choice import GRID
from vitsee_core.kernels.ridge import Algebra, Factors
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.progress import SITE_IMAGES, counting
from vitsee_core.statistics.jackknife import UNLIMITED, Blocks, Limits, interval_cells
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.metrics import asked_for
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import CEILING
from vitsee_core.truth.labels.labelled_rows import (
    in_split,
    shared_ids,
    shared_images,
    training_execution,
)
from vitsee_core.types import Float, Integers, Mask
from vitsee_stores.errors import VitseeError
from vitsee_stores.url import Url

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Store

COLUMNS = (
    *(*SITE, "token", "column", "l2", "metric", "value", "low", "high"),
    *("n_images", "n_columns", "baseline"),
)
OF_RESPONSES = ("r", "r2")
FOLDS = 5
LEAST = 4  # training images: three that fit and one that chooses l2
LEAST_TESTED = 3  # per test set, as two always correlate by 1 or -1
Sets = list[
    tuple[Integers, Integers]
]  # places among the training images and the tested, of a fit
METHOD = (
    "delete-a-block jackknife over blocks of test images (t quantile); the probe, its l2, the "
    "training images and the noise ceiling held fixed, and the columns those that were measured; "
    "of a median over columns that are alike it is wider than it need be"
)


def _settings(
    options: ResponseOptions, features: FeatureOptions, allow_shared: bool, seed: int
) -> Settings:
    """The choices of `probe --response`, with their defaults. Raises VitseeError: a way to choose
    l2 that responses do not have."""
    l2 = features.l2
    words = {value for value in l2 if isinstance(value, str)}
    if words - {"holdout", "grid"} or (words and len(l2) > 1):
        raise VitseeError(
            f"--l2 {', '.join(map(str, l2))}: with --response expected holdout, grid or numbers"
        )
    numbers = tuple(sorted({float(value) for value in l2 if not isinstance(value, str)}))
    return Settings(
        sites=tuple(features.sites) or ("blocks",),
        tokens=tuple(features.tokens),
        l2s=GRID if "grid" in words else numbers,
        algebra=Algebra(bool(features.standardise)),
        folds=options.folds or FOLDS,
        by_column=options.by_column,
        allow_shared=allow_shared,
        seed=seed,
    )


def run_responses(
    stores: ProbedStores,
    options: ResponseOptions,
    features: FeatureOptions,
    metrics: Sequence[str],
    execution: Execution,
) -> Table:
    """The table of probes that predict responses, with `COLUMNS`; metrics: some of `OF_RESPONSES`,
    by default all.

    Raises:
        MissingInput: no such split, or a store lacks a site.
        SiteError: a site has no such tokens, or several where one vector is needed.
        StoreMismatch: other models, or images that are both trained and tested on.
        VitseeError: responses that do not fit the stores, too few images, or a way to choose l2
            that responses do not have.
    """
    if stores.n_ways + (options.folds is not None) > 1:
        raise VitseeError("give one of TEST, --test-split, --holdout and --folds at most")
    train = stores.train
    tests = stores.tests
    require_comparable(train, tests, trains="probe")
    metrics = asked_for(metrics or OF_RESPONSES, OF_RESPONSES, "probe --response")
    training = training_execution(execution, tests, stores.split.train_images)
    settings = _settings(options, features, stores.split.allow_shared, execution.seed)
    response = options.response
    ids = options.response_ids
    assert response is not None
    place = response if isinstance(response, Url) else Path(response)
    responses = read_responses(place, None if ids is None else Path(ids))
    if ids is None and responses.ids is None and tests:
        raise VitseeError(
            f"{responses.source} has no ids, so that its rows can be of one store only; say whose "
            "they are with --response-ids FILE"
        )
    ours = Images.of(train, responses, training)
    probes = []
    shared = []
    remarks = []
    for test in tests or (None,):
        theirs = ours if test is None else Images.of(test, responses, execution)
        both = [images.mask.nonzero()[0] for images in (ours, theirs)]
        if test is not None:
            n_shared = shared_images(train, both[0], test, both[1], settings.allow_shared)
            shared.append(n_shared)
            remarks += shared_ids(train, both[0], test, both[1])
        sets = _sets(
            ours, theirs, stores.split.test_split, stores.split.holdout, settings
        )
        probes.append(_probe(ours, theirs, sets, responses, settings))
    chosen = settings.sites, settings.tokens
    items = []
    for probe in probes:
        read = partial(_features, (train, probe.test.store), (train, *tests))
        items.append(list(each_selection(train, *chosen, read)))
    total = sum(
        len(some) * (len(probe.train) + len(probe.test) * bool(tests))
        for probe, some in zip(probes, items, strict=True)
    )
    rows: list[dict[str, Any]] = []
    with counting(execution.progress, total, SITE_IMAGES):
        for probe, some in zip(probes, items, strict=True):
            for of_site in execution.spread(probe, some):
                rows += [row for row in of_site if row["metric"].split("_")[0] in metrics]
    for remark in remarks:
        log.info("%s", remark)
    first = probes[0]
    words = dict[str, str]()
    for ours_of, _ in items[0]:
        words.setdefault(ours_of.site.name, str(ours_of.selection))
    notes = {
        "interval": METHOD,
        "responses": {
            "source": responses.source,
            "columns": len(responses.columns),
            "repeats": len(responses.repeats),
            "ceiling": None
            if first.ceiling is None
            else (
                "Spearman-Brown corrected correlation of half the repeats with the others, mean "
                f"of {1 if len(responses.repeats) == 2 else SPLITS} random halves, over tested "
                "images; r is divided by its root, r2 by it; columns where it is not above 0 have "
                f"no normalised value ({int((~(first.ceiling > 0)).sum())})"
            ),
        },
        "solver": {
            "solver": "ridge",
            "intercept": "not penalised",
            "standardised": settings.algebra.standardise,
            "l2": list(settings.l2s)
            or f"of each column, from 2^-10 to 2^19: least squared error "
            f"on {HELD_OUT:.0%} of the training images",
        },
        "test_sets": len(first.sets),
        "train": {
            "store": train.label,
            "images": len(ours),
            "without_response": ours.left_out,
        },
        "tests": [
            {
                "store": probe.test.store.label,
                "images": probe.n_tested,
                "without_response": probe.test.left_out,
            }
            for probe in probes
        ],
        "also_in_train": shared,
        "compared": compared(
            (train, *tests), words, asked="" if settings.tokens else None
        ),
        WORD: {probe.test.store.label: probe.blocks.describe() for probe in probes},
        "seed": settings.seed,
        "remarks": [*remarks, *other_precision((train, *tests))],
    }
    names = [name for name in COLUMNS if name != "column" or settings.by_column]
    return Table.from_rows(rows, names, notes)


def _sets(
    ours: Images,
    theirs: Images,
    split: str | None,
    holdout: float | None,
    settings: Settings,
) -> Sets:
    """The images that train and those that test, for each fit, drawn in the data set's own order.

    Raises:
        VitseeError: too few images for that.
    """
    n = len(theirs)
    everything = np.arange(len(ours))
    order = np.argsort(theirs.store.samples.index[theirs.mask], kind="stable")
    rng = np.random.default_rng((settings.seed, 2))
    if theirs is not ours:
        parts = [everything]
        sets = [(everything, np.arange(n))]
    else:
        if split is not None:
            parts = [np.flatnonzero(in_split(ours.store, split)[ours.mask])]
        elif holdout is not None:
            parts = [np.sort(order[rng.permutation(n)[: round(holdout * n)]])]
        else:
            shuffled = order[rng.permutation(n)]
            parts = [np.sort(part) for part in np.array_split(shuffled, settings.folds)]
        sets = [(np.setdiff1d(everything, part), part) for part in parts]
    for train, test in sets:
        if len(train) < LEAST or len(test) < LEAST_TESTED:
            raise VitseeError(
                f"{len(train)} images with a response of {ours.store.label} are left to train "
                f"and {len(test)} of {theirs.store.label} to test; expected at least {LEAST} "
                f"and {LEAST_TESTED}: give more images, or fewer --folds"
            )
    return sets


def _probe(
    ours: Images, theirs: Images, sets: Sets, responses: Responses, settings: Settings
) -> ResponseProbe:
    tested = np.unique(np.concatenate([test for _, test in sets]))
    mask = np.zeros(len(theirs.mask), bool)
    mask[np.flatnonzero(theirs.mask)[tested]] = True
    blocks = Blocks.of(theirs.store, mask, settings.seed)
    # Places are those of all images with a response; labels of images that are not tested, unused.
    of_place = blocks.of_rows[theirs.mask]
    mean = responses.mean
    for train, test in sets:
        responses.check(ours.rows[train], ours.store.label)
        responses.check(theirs.rows[test], theirs.store.label)
    ceiling = reliability(responses.repeats[:, theirs.rows[tested]], settings.seed)
    return ResponseProbe(
        ours,
        theirs,
        sets,
        mean[ours.rows],
        mean[theirs.rows],
        replace(blocks, labels=of_place),
        ceiling,
        responses.columns,
        settings,
    )


def _features(
    both: tuple[Store, Store], among: Sequence[Store], name: str, word: str | None
) -> tuple[SiteFeatures, SiteFeatures]:
    """The features of a site in the training store and in the test store."""
    ours, theirs = (
        choose_features(store, store.site(name), word, among=among, one_vector=True)
        for store in both
    )
    return ours, theirs


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
    """The images of one store with responses; `rows` (images,) are theirs in the responses."""

    store: Store
    mask: Mask
    rows: Integers
    left_out: int

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, store: Store, responses: Responses, execution: Execution) -> Images:
        """The images of a store that were chosen, can be read and have responses.

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
class ResponseProbe:
    """The probes of one pair of stores, or of one store; called with the features of a site."""

    train: Images
    test: Images
    sets: Sets
    y_train: Float
    y_test: Float
    blocks: Blocks
    ceiling: Float | None
    columns: Sequence[str]
    settings: Settings

    @property
    def n_tested(self) -> int:
        """The number of images that are in a test set."""
        return sum(len(test) for _, test in self.sets)

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
        for train, test in self.sets:
            x_fit = x[train]
            y_fit = self.y_train[train]
            chosen: dict[float | None, Float] = {
                l2: np.full(y_fit.shape[1], l2) for l2 in self.settings.l2s
            } or {None: self._choose(x_fit, y_fit)}
            factors = Factors.of_targets(x_fit, y_fit, self.settings.algebra)
            coordinates = factors.coordinates(z[test])
            y = self.y_test[test]
            labels = self.blocks.labels[test]
            for asked, l2s in chosen.items():
                p = coordinates @ (factors.rhs / (factors.values[:, np.newaxis] + l2s))
                sums = Sums.by_block(y - factors.mean_target, p, labels, self.blocks.n)
                found.setdefault(asked, []).append((sums, l2s))
        for own in found.values():
            yield from self._of_l2(
                [sums for sums, _ in own], np.stack([l2 for _, l2 in own])
            )
        yield from self._ceiling_rows()

    def _choose(self, x: Float, y: Float) -> Float:
        """The l2 of each column, (columns,): the one with the least squared error of held-out
        training images, of several the largest."""
        rng = np.random.default_rng((self.settings.seed, 1))
        held = np.zeros(len(x), bool)
        held[rng.permutation(len(x))[: max(1, round(HELD_OUT * len(x)))]] = True
        factors = Factors.of_targets(x[~held], y[~held], self.settings.algebra)
        coordinates = factors.coordinates(x[held])
        best = np.full(y.shape[1], np.inf)
        chosen = np.full(y.shape[1], GRID[-1])
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
                metrics[f"{name}_normalised"] = (
                    value / bound,
                    replicates / bound,
                    UNLIMITED,
                )
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
                summary = over(value[there])
                of_blocks = over(replicates[:, there], axis=1)
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
                    "metric": f"{name}_{word}",
                    "value": value,
                    "n_images": self.n_tested,
                    "n_columns": len(bound),
                    "baseline": CEILING,
                }


def _geometric(l2s: Float) -> Float:
    """The geometric mean over the first axis; a number without rounding where all are equal."""
    return np.where(np.ptp(l2s, 0) > 0, np.exp(np.log(l2s).mean(0)), l2s[0])


def _over_sets(
    sums: Sequence[Sums], score: Callable[[Sums], Float]
) -> tuple[Float, Float]:
    """The mean score over test sets, (columns,), and without each block, (blocks, columns)."""
    whole = np.mean([score(own.total()) for own in sums], axis=0)
    return whole, np.mean([score(own.without()) for own in sums], axis=0)


def _matrix(features: SiteFeatures, images: Images, execution: Execution) -> Float:
    """The features (images, dim) of the images with a response, in the store's order."""
    need = 8 * 4 * len(images) * features.dim
    if need > execution.budget:
        raise VitseeError(
            f"{features.site.name}: {len(images)} images of {features.dim} channels take "
            f"{human_bytes(need)}, {human_bytes(execution.budget)} are allowed; give --memory, or "
            "fewer --images"
        )
    parts = features.vectors(images.mask, jobs=execution.jobs, memory=execution.budget)
    return np.concatenate([part.astype(np.float64) for part in parts])
