"""The run of `probe --response`: its options, which images train and test, and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.probe.draws import HELD_OUT
from vitsee_core.analyses.probe.response_probe import Images, ResponseProbe, Settings, TestSet
from vitsee_core.analyses.probe.response_scores import SPLITS, reliability
from vitsee_core.analyses.probe.responses import Responses, read_responses
from vitsee_core.analyses.probe.site_probes import each_selection
from vitsee_core.features import SiteFeatures, choose_features, compared
from vitsee_core.kernels.ridge import GRID, Algebra
from vitsee_core.labels.labelled_rows import in_split, shared_images
from vitsee_core.runtime.progress import SITE_IMAGES, counting
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.tables.columns import SITE
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
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
METHOD = (
    "delete-a-block jackknife over blocks of test images (t quantile); the probe, its l2, the "
    "training images and the noise ceiling held fixed, and the columns those that were measured"
)


def refuse_of_classes(options: Mapping[str, Any]) -> None:
    """Refuse options that belong to probes of classes: raises VitseeError, naming the first."""
    for name, value in options.items():
        if value is not None and value is not False and value != ():
            raise VitseeError(
                f"{name} belongs to probes of classes, not to --response; leave it out"
            )


def _settings(
    l2: Sequence[float | str],
    *,
    sites: Sequence[str],
    tokens: Sequence[str],
    standardise: bool | None,
    folds: int | None,
    by_column: bool,
    allow_shared: bool,
    seed: int,
) -> Settings:
    """The choices of `probe --response`, with their defaults. Raises VitseeError: a way to choose
    l2 that responses do not have."""
    words = {value for value in l2 if isinstance(value, str)}
    if words - {"holdout", "grid"} or (words and len(l2) > 1):
        raise VitseeError(
            f"--l2 {', '.join(map(str, l2))}: with --response expected holdout, grid or numbers"
        )
    numbers = tuple(sorted({float(value) for value in l2 if not isinstance(value, str)}))
    return Settings(
        tuple(sites) or ("blocks",), tuple(tokens), GRID if "grid" in words else numbers,
        Algebra(bool(standardise)), folds or FOLDS, by_column, allow_shared, seed,
    )  # fmt: skip


def run_responses(
    train: Store,
    tests: Sequence[Store],
    response: Path | Url,
    ids: Path | None,
    test_split: str | None,
    holdout: float | None,
    execution: Execution,
    *,
    metrics: Sequence[str],
    **options: Any,
) -> Table:
    """The table of `probe --response`; metrics: some of `OF_RESPONSES`; options: of `_settings`.

    Raises:
        MissingInput: no such split, or a store lacks a site.
        SiteError: a site has no such tokens, or several where one vector is needed.
        StoreMismatch: other models, or images that are both trained and tested on.
        VitseeError: responses that do not fit the stores, too few images, or a way to choose l2
            that responses do not have.
    """
    settings = _settings(**options, seed=execution.seed)
    place = response if isinstance(response, Url) else Path(response)
    responses = read_responses(place, None if ids is None else Path(ids))
    if ids is None and responses.ids is None and tests:
        raise VitseeError(
            f"{responses.source} has no ids, so that its rows can be of one store only; say whose "
            "they are with --response-ids FILE"
        )
    ours = Images.of(train, responses, execution)
    probes, shared = [], []
    for test in tests or (None,):
        theirs = ours if test is None else Images.of(test, responses, execution)
        both = [images.mask.nonzero()[0] for images in (ours, theirs)]
        if test is not None:
            n_shared = shared_images(train, both[0], test, both[1], settings.allow_shared)
            shared.append(n_shared)
        sets = _sets(ours, theirs, test_split, holdout, settings)
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
            "ceiling": None if first.ceiling is None else (
                "Spearman-Brown corrected correlation of half the repeats with the others, mean "
                f"of {1 if len(responses.repeats) == 2 else SPLITS} random halves, over tested "
                "images; r is divided by its root, r2 by it; columns where it is not above 0 have "
                f"no normalised value ({int((~(first.ceiling > 0)).sum())})"
            ),
        },
        "solver": {
            "solver": "ridge", "intercept": "not penalised",
            "standardised": settings.algebra.standardise,
            "l2": list(settings.l2s) or f"of each column, from 2^-10 to 2^19: least squared error "
            f"on {HELD_OUT:.0%} of the training images",
        },
        "test_sets": len(first.sets),
        "train": {"store": train.label, "images": len(ours), "without_response": ours.left_out},
        "tests": [
            {"store": probe.test.store.label, "images": probe.n_tested,
             "without_response": probe.test.left_out} for probe in probes
        ],
        "also_in_train": shared,
        "compared": compared(
            (train, *tests), words, asked="" if settings.tokens else None
        ),
        WORD: {probe.test.store.label: probe.blocks.describe() for probe in probes},
        "seed": settings.seed,
    }  # fmt: skip
    names = [name for name in COLUMNS if name != "column" or settings.by_column]
    return Table.from_rows(rows, names, notes)


def _sets(
    ours: Images, theirs: Images, split: str | None, holdout: float | None, settings: Settings
) -> list[TestSet]:
    """Which images are tested with which left to train, in the data set's own order.

    Raises:
        VitseeError: too few images for that.
    """
    n, everything = len(theirs), np.arange(len(ours))
    order = np.argsort(theirs.store.samples.index[theirs.mask], kind="stable")
    rng = np.random.default_rng((settings.seed, 2))
    if theirs is not ours:
        parts = [everything]
        sets = [TestSet(everything, np.arange(n))]
    else:
        if split is not None:
            parts = [np.flatnonzero(in_split(ours.store, split)[ours.mask])]
        elif holdout is not None:
            parts = [np.sort(order[rng.permutation(n)[: round(holdout * n)]])]
        else:
            shuffled = order[rng.permutation(n)]
            parts = [np.sort(part) for part in np.array_split(shuffled, settings.folds)]
        sets = [TestSet(np.setdiff1d(everything, part), part) for part in parts]
    for one in sets:
        if len(one.train) < LEAST or len(one.test) < LEAST_TESTED:
            raise VitseeError(
                f"{len(one.train)} images with a response of {ours.store.label} are left to train "
                f"and {len(one.test)} of {theirs.store.label} to test; expected at least {LEAST} "
                f"and {LEAST_TESTED}: give more images, or fewer --folds"
            )
    return sets


def _probe(
    ours: Images, theirs: Images, sets: list[TestSet], responses: Responses, settings: Settings
) -> ResponseProbe:
    tested = np.unique(np.concatenate([one.test for one in sets]))
    mask = np.zeros(len(theirs.mask), bool)
    mask[np.flatnonzero(theirs.mask)[tested]] = True
    blocks = Blocks.of(theirs.store, mask, settings.seed)
    # Places are those of all images with a response; labels of images that are not tested, unused.
    of_place = blocks.of_rows[theirs.mask]
    mean = responses.mean
    for one in sets:
        responses.check(ours.rows[one.train], ours.store.label)
        responses.check(theirs.rows[one.test], theirs.store.label)
    ceiling = reliability(responses.repeats[:, theirs.rows[tested]], settings.seed)
    return ResponseProbe(
        ours, theirs, tuple(sets), mean[ours.rows], mean[theirs.rows],
        replace(blocks, labels=of_place), ceiling, responses.columns, settings,
    )  # fmt: skip


def _features(
    both: tuple[Store, Store], among: Sequence[Store], name: str, word: str | None
) -> tuple[SiteFeatures, SiteFeatures]:
    """Features of a site in the training store and in the test store."""
    ours, theirs = (
        choose_features(store, store.site(name), word, among=among, one_vector=True)
        for store in both
    )
    return ours, theirs
