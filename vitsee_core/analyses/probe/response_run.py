"""The run of `probe --response`: its responses, its training and test images, and its
table.

The regressions themselves are in `responses`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.probe.inputs import HELD_OUT, ProbedStores, SplitOptions
from vitsee_core.analyses.probe.options import FeatureOptions, ResponseOptions
from vitsee_core.analyses.probe.responses import (
    ImageSplit,
    ResponseImages,
    ResponseProbe,
    Responses,
    ResponseSettings,
)
from vitsee_core.analyses.probe.sites import SitePair, each_selection
from vitsee_core.features import choose_features, compared, require_comparable
from vitsee_core.features.array_files import read_arrays, read_ids
from vitsee_core.features.compared import other_precision
from vitsee_core.kernels.l2_choice import GRID
from vitsee_core.kernels.ridge import Algebra
from vitsee_core.runtime.progress import SITE_IMAGES, counting
from vitsee_core.statistics.correlation import N_SPLITS, reliability
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.tables.columns import REPLICATES, SITE
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.labelled_rows import (
    in_split,
    shared_ids,
    shared_images,
    training_execution,
)
from vitsee_core.types import Float
from vitsee_stores import open_store
from vitsee_stores.errors import VitseeError
from vitsee_stores.manifest import abbreviate
from vitsee_stores.url import Url

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Store


log = logging.getLogger(__name__)
RESPONSE_COLUMNS = (
    *(*SITE, "token", "column", "l2", "metric", "value", "low", "high"),
    *("n_images", "n_columns", "baseline"),
)
RESPONSE_METRICS = ("r", "r2")
FOLDS = 5
MIN_TRAINING_IMAGES = 4  # three that fit and one that chooses l2
MIN_TEST_IMAGES = 3  # per test set, as two always correlate by 1 or -1
METHOD = (
    "delete-a-block jackknife over blocks of test images (t quantile); the probe, its "
    "l2, the training images and the noise ceiling held fixed, and the columns those "
    "that were measured; of a median over columns that are alike it is wider than it "
    "need be"
)


def run_responses(
    stores: ProbedStores,
    options: ResponseOptions,
    features: FeatureOptions,
    metrics: Sequence[str],
    execution: Execution,
) -> Table:
    """Return the table of probes that predict responses, with `RESPONSE_COLUMNS`.

    Args:
        stores: stores that train and test.
        options: the responses, and how their prediction is tested.
        features: what is probed.
        metrics: some of `RESPONSE_METRICS`; () for all.
        execution: seed, threads and memory.

    Raises:
        MissingInput: no such split, or a store lacks a site.
        SiteError: a site has no such tokens, or several where one vector is needed.
        StoreMismatch: other models, or images that are both trained and tested on.
        VitseeError: responses that do not fit the stores, too few images, or a way to
            choose l2 that responses do not have.
    """
    # Four ways to choose test images, of which one at most is given.
    if stores.n_ways_of_testing + (options.folds is not None) > 1:
        raise VitseeError("give one of TEST, --test-split, --holdout and --folds at most")
    train = stores.train
    tests = stores.tests
    require_comparable(train, tests, trains="probe")
    metrics = select_metrics(
        metrics or RESPONSE_METRICS, RESPONSE_METRICS, "probe --response"
    )
    train_execution = training_execution(execution, tests, stores.split.train_images)
    settings = _settings(options, features, stores.split.allow_shared, execution.seed)
    responses = _read_responses(options, tests)

    # Without a test store some of the same images test: test_images is train_images then,
    # which `_image_splits` asks for.
    train_images = ResponseImages.of(train, responses, train_execution)
    probes = []
    n_shared = []
    remarks = []
    # None: the store tests on a part of its own images.
    for test in tests or (None,):
        test_images = train_images
        if test is not None:
            test_images = ResponseImages.of(test, responses, execution)
            train_rows = train_images.mask.nonzero()[0]
            test_rows = test_images.mask.nonzero()[0]
            n_shared.append(
                shared_images(train, train_rows, test, test_rows, settings.allow_shared)
            )
            remarks += shared_ids(train, train_rows, test, test_rows)
        sets = _image_splits(train_images, test_images, stores.split, settings)
        probes.append(
            _prepare_probe(train_images, test_images, sets, responses, settings)
        )

    pairs_of_probes = _read_sites(stores, probes, settings)
    rows = _fit_sites(probes, pairs_of_probes, metrics, execution)
    for remark in remarks:
        log.info("%s", remark)

    tokens: dict[str, str] = {}
    for train_features, _ in pairs_of_probes[0]:
        tokens.setdefault(train_features.site.name, str(train_features.selection))
    notes = _notes(stores, probes, responses, settings)
    notes["also_in_train"] = n_shared
    notes["compared"] = compared(
        stores.all, tokens, asked="" if settings.tokens else None
    )
    notes[REPLICATES] = {
        probe.test.store.label: probe.blocks.describe() for probe in probes
    }
    notes["seed"] = settings.seed
    notes["remarks"] = [*remarks, *other_precision(stores.all)]
    names = [name for name in RESPONSE_COLUMNS if name != "column" or settings.by_column]
    return Table.from_rows(rows, names, notes)


def _settings(
    options: ResponseOptions, features: FeatureOptions, allow_shared: bool, seed: int
) -> ResponseSettings:
    """Return the choices of `probe --response`, with their defaults.

    Raises:
        VitseeError: a way to choose l2 that responses do not have.
    """
    l2 = features.l2
    words = {value for value in l2 if isinstance(value, str)}
    if words - {"holdout", "grid"} or (words and len(l2) > 1):
        raise VitseeError(
            f"--l2 {', '.join(map(str, l2))}: with --response expected holdout, grid or "
            "numbers"
        )
    numbers = {float(value) for value in l2 if not isinstance(value, str)}
    return ResponseSettings(
        sites=tuple(features.sites) or ("blocks",),
        tokens=tuple(features.tokens),
        l2s=GRID if "grid" in words else tuple(sorted(numbers)),
        algebra=Algebra(bool(features.standardise)),
        folds=options.folds or FOLDS,
        by_column=options.by_column,
        allow_shared=allow_shared,
        seed=seed,
    )


def _read_responses(options: ResponseOptions, tests: Sequence[Store]) -> Responses:
    """Read the responses of --response, with the ids of --response-ids.

    Raises:
        VitseeError: they have no ids, and several stores share them.
    """
    path = options.response
    assert path is not None
    if not isinstance(path, Url):
        path = Path(path)
    ids = None if options.response_ids is None else Path(options.response_ids)
    responses = read_responses(path, ids)
    if ids is None and responses.ids is None and tests:
        raise VitseeError(
            f"{responses.source} has no ids, so that its rows can be of one store only; "
            "say whose they are with --response-ids FILE"
        )
    return responses


def _image_splits(
    train_images: ResponseImages,
    test_images: ResponseImages,
    split: SplitOptions,
    settings: ResponseSettings,
) -> list[ImageSplit]:
    """Return the images that train and those that test, for each fit.

    Images of one store are drawn in the data set's own order, so that a shuffled store has
    the same sets. Without a split or a held-out share they are the folds of a
    cross-validation.

    Raises:
        VitseeError: too few images for that.
    """
    n = len(test_images)
    every_image = np.arange(len(train_images))
    # Indices of the images with a response, in the order of the data set.
    order = np.argsort(test_images.store.samples.index[test_images.mask], kind="stable")
    rng = np.random.default_rng((settings.seed, 2))
    if test_images is not train_images:
        sets = [ImageSplit(train=every_image, test=np.arange(n))]
    else:
        if split.test_split is not None:
            is_tested = in_split(train_images.store, split.test_split)
            tested_sets = [np.flatnonzero(is_tested[train_images.mask])]
        elif split.holdout is not None:
            n_held_out = round(split.holdout * n)
            tested_sets = [np.sort(order[rng.permutation(n)[:n_held_out]])]
        else:
            # Folds whose sizes differ by one at most.
            folds = np.array_split(order[rng.permutation(n)], settings.folds)
            tested_sets = [np.sort(fold) for fold in folds]
        sets = [
            ImageSplit(train=np.setdiff1d(every_image, tested), test=tested)
            for tested in tested_sets
        ]
    for train, test in sets:
        if len(train) < MIN_TRAINING_IMAGES or len(test) < MIN_TEST_IMAGES:
            raise VitseeError(
                f"{len(train)} images with a response of {train_images.store.label} are "
                f"left to train and {len(test)} of {test_images.store.label} to test; "
                f"expected at least {MIN_TRAINING_IMAGES} and {MIN_TEST_IMAGES}: give "
                "more images, or fewer --folds"
            )
    return sets


def _prepare_probe(
    train_images: ResponseImages,
    test_images: ResponseImages,
    sets: list[ImageSplit],
    responses: Responses,
    settings: ResponseSettings,
) -> ResponseProbe:
    """Return the probe of a pair of stores, after a check of all columns.

    Raises:
        VitseeError: columns that cannot be predicted.
    """
    # Images that are in some test set: with folds all of them.
    tested = np.unique(np.concatenate([test for _, test in sets]))
    mask = np.zeros(len(test_images.mask), bool)
    mask[np.flatnonzero(test_images.mask)[tested]] = True
    blocks = Blocks.of(test_images.store, mask, settings.seed)
    # Indices of test sets count all images with a response, so block labels have to as
    # well; those of images that are not tested are never read.
    labels = blocks.of_rows[test_images.mask]
    for train, test in sets:
        # A column that is constant in one of the sets has no correlation.
        responses.check(train_images.rows[train], train_images.store.label)
        responses.check(test_images.rows[test], test_images.store.label)
    # (repeats, tested images, columns)
    tested_repeats = responses.repeats[:, test_images.rows[tested]]
    mean: Float = responses.mean
    return ResponseProbe(
        train=train_images,
        test=test_images,
        sets=sets,
        y_train=mean[train_images.rows],
        y_test=mean[test_images.rows],
        blocks=replace(blocks, labels=labels),
        ceiling=reliability(tested_repeats, settings.seed),
        columns=responses.columns,
        settings=settings,
    )


def _read_sites(
    stores: ProbedStores, probes: Sequence[ResponseProbe], settings: ResponseSettings
) -> list[list[SitePair]]:
    """Return the features of all sites for each probe.

    All are found before the first fit: a site that a store lacks is an error at once.
    """
    pairs_of_probes = []
    for probe in probes:
        read = partial(_read_pair, stores.train, probe.test.store, stores.all)
        pairs = each_selection(stores.train, settings.sites, settings.tokens, read)
        pairs_of_probes.append(list(pairs))
    return pairs_of_probes


def _fit_sites(
    probes: Sequence[ResponseProbe],
    pairs_of_probes: Sequence[Sequence[SitePair]],
    metrics: Sequence[str],
    execution: Execution,
) -> list[dict[str, Any]]:
    """Fit the probes of all sites, and return the rows of some metrics and their summaries."""
    n_site_images = 0
    for probe, pairs in zip(probes, pairs_of_probes, strict=True):
        n_site_images += len(pairs) * probe.n_read
    rows: list[dict[str, Any]] = []
    with counting(execution.progress, n_site_images, SITE_IMAGES):
        for probe, pairs in zip(probes, pairs_of_probes, strict=True):
            for site_rows in execution.spread(probe, pairs):
                # r_median, r_normalised_mean, ...: named by the metric that they summarise.
                rows += [
                    row for row in site_rows if row["metric"].split("_")[0] in metrics
                ]
    return rows


def _read_pair(
    train: Store, test: Store, among: Sequence[Store], name: str, word: str | None
) -> SitePair:
    """Return the features of a site in the training store and in the test store.

    Args:
        train: training store.
        test: test store.
        among: all stores of the run, whose default tokens have to agree.
        name: name of the site.
        word: which tokens; None for the site's default.
    """
    train_features = choose_features(
        train, train.site(name), word, among=among, one_vector=True
    )
    test_features = choose_features(
        test, test.site(name), word, among=among, one_vector=True
    )
    return train_features, test_features


def _notes(
    stores: ProbedStores,
    probes: Sequence[ResponseProbe],
    responses: Responses,
    settings: ResponseSettings,
) -> dict[str, Any]:
    """Return the table's notes on the responses, the regression and the images."""
    first = probes[0]
    ceiling = None
    if first.ceiling is not None:
        n_splits = 1 if len(responses.repeats) == 2 else N_SPLITS
        n_without = int((~(first.ceiling > 0)).sum())
        ceiling = (
            "Spearman-Brown corrected correlation of half the repeats with the others, "
            f"mean of {n_splits} random halves, over tested images; r is divided by its "
            "root, r2 by it; columns where it is not above 0 have no normalised value "
            f"({n_without})"
        )
    l2: list[float] | str = list(settings.l2s)
    if not settings.l2s:
        l2 = (
            "of each column, from 2^-10 to 2^19: least squared error "
            f"on {HELD_OUT:.0%} of the training images"
        )
    tests = [
        {
            "store": probe.test.store.label,
            "images": probe.n_tested,
            "without_response": probe.test.n_left_out,
        }
        for probe in probes
    ]
    return {
        "interval": METHOD,
        "responses": {
            "source": responses.source,
            "columns": len(responses.columns),
            "repeats": len(responses.repeats),
            "ceiling": ceiling,
        },
        "solver": {
            "solver": "ridge",
            "intercept": "not penalised",
            "standardised": settings.algebra.standardise,
            "l2": l2,
        },
        "test_sets": len(first.sets),
        "train": {
            "store": stores.train.label,
            "images": len(first.train),
            "without_response": first.train.n_left_out,
        },
        "tests": tests,
    }


def read_responses(path: Path | Url, ids: Path | None) -> Responses:
    """Read the responses of a file or a store.

    Args:
        path: a store that `vitsee import` made; or a table or array with a row per image
            and a column per neuron, voxel or rating, or (repeats, images, columns).
        ids: file with the image id of each row; None: the file's column id, if it has one.

    Raises:
        VitseeError: no responses, several arrays, or ids that do not fit them.
        OSError: it cannot be opened.
    """
    if isinstance(path, Url) or path.is_dir():
        if ids is not None:
            raise VitseeError(
                f"{path} is a store, which has ids; leave --response-ids out"
            )
        return _responses_of_store(open_store(path))
    arrays = read_arrays(path)
    if len(arrays.values) != 1:
        raise VitseeError(
            f"{path} holds {len(arrays.values)} arrays "
            f"({abbreviate(list(arrays.values))}); expected one"
        )
    ((name, array),) = arrays.values.items()
    if array.ndim > 3:
        raise VitseeError(
            f"{path} has {array.ndim} axes; expected (images, columns), or (repeats, "
            "images, columns)"
        )
    columns = arrays.columns.get(name) or [str(i) for i in range(array.shape[-1])]
    image_ids = arrays.ids if ids is None else read_ids(ids)[0]
    # (images, columns), or with repeats in front
    values = np.asarray(array, np.float64)
    n_rows = values.shape[-2]
    if image_ids is not None and len(image_ids) != n_rows:
        raise VitseeError(
            f"{ids or path} has {len(image_ids)} ids for responses to {n_rows} images; "
            "expected as many"
        )
    if values.ndim == 3:
        if image_ids is not None:
            twice = [name for name, count in Counter(image_ids).items() if count > 1]
            if twice:
                raise VitseeError(
                    f"{path} has an axis of repeats, and {twice[0]!r} twice; expected "
                    "one or the other"
                )
        return Responses(image_ids, values, columns, path.name)
    if image_ids is None:
        return Responses(None, values[np.newaxis], columns, path.name)
    distinct_ids, repeats = _group_repeats(image_ids, values)
    return Responses(distinct_ids, repeats, columns, path.name)


def _group_repeats(ids: list[str], values: Float) -> tuple[list[str], Float]:
    """Return each id once, and its rows as repeats of one image, (repeats, images,
    columns).

    Images with fewer repeats than others have NaN in the last ones.

    Args:
        ids: image id of each row.
        values: (rows, columns).
    """
    row_of_id = {image_id: row for row, image_id in enumerate(dict.fromkeys(ids))}
    n_repeats = max(Counter(ids).values())
    repeats = np.full((n_repeats, len(row_of_id), values.shape[1]), np.nan)
    counts: Counter[str] = Counter()
    for image_id, row_values in zip(ids, values, strict=True):
        repeats[counts[image_id], row_of_id[image_id]] = row_values
        counts[image_id] += 1
    return list(row_of_id), repeats


def _responses_of_store(store: Store) -> Responses:
    """Return the vectors of all sites of a store, side by side, as responses without
    repeats."""
    sites = [site for site in store.sites.values() if site.kind == "vector"]
    if not sites:
        raise VitseeError(
            f"{store.label} has no vectors; expected responses that vitsee import made"
        )
    columns_of_sites: dict[str, Any] = store.manifest.info.get("columns") or {}
    names: list[str] = []
    for site in sites:
        site_columns = columns_of_sites.get(site.name) or []
        if len(site_columns) != site.dim:
            site_columns = [str(i) for i in range(site.dim)]
        if len(sites) > 1:
            site_columns = [f"{site.name}:{column}" for column in site_columns]
        names += site_columns
    values = np.concatenate([store.vectors(site.name)[:] for site in sites], axis=1)
    valid_values = values[store.valid].astype(np.float64)
    ids = store.samples.id[store.valid].tolist()
    return Responses(ids, valid_values[np.newaxis], names, store.label)
