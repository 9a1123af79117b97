"""Probes of classes: of images, and of segments of images.

Both fit the same probes to labelled examples. An `Examples` object knows the difference: what an
example is, how its features are read, and how examples are held out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vitsee_core.analyses.probe.draws import check_classes, draw_images, split_rows
from vitsee_core.analyses.probe.fit import Task
from vitsee_core.analyses.probe.options import ClassOptions, FeatureOptions, ProbedStores
from vitsee_core.analyses.probe.probed_sites import ProbedSites
from vitsee_core.analyses.probe.score import Prober
from vitsee_core.analyses.probe.settings import (
    Settings,
    Training,
    choose_settings,
    choose_training,
)
from vitsee_core.analyses.probe.tally import INTERVAL, METRICS, TOP
from vitsee_core.features import compared, require_comparable
from vitsee_core.features.compared import other_precision
from vitsee_core.runtime.progress import counting
from vitsee_core.tables.columns import SITE
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.labelled_rows import (
    check_disjoint,
    shared_ids,
    training_execution,
)
from vitsee_core.truth.masks.segments import Examples, Segmentation, examples_of
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Store

log = logging.getLogger(__name__)

BASELINES = ("random",)
COLUMNS = (
    *(*SITE, "token", "row", "col", "class", "shots", "l2"),
    *("metric", "value", "std", "low", "high", "n_images", "baseline"),
)
SEGMENT_COLUMNS = (*COLUMNS[:-1], "n_segments", "baseline")


def run_classes(
    stores: ProbedStores,
    features: FeatureOptions,
    options: ClassOptions,
    metrics: Sequence[str],
    execution: Execution,
) -> Table:
    """Return the table of probes that classify images, with `COLUMNS`.

    Raises the errors of `probe.run`.
    """
    return _run(stores, None, features, options, metrics, execution)


def run_segments(
    stores: ProbedStores,
    segmentation: Segmentation,
    features: FeatureOptions,
    options: ClassOptions,
    metrics: Sequence[str],
    execution: Execution,
) -> Table:
    """Return the table of probes that classify segments, with `SEGMENT_COLUMNS`.

    A held-out share is one of the images, so that the segments of an image stay together. Raises
    the errors of `probe.run`, and VitseeError for masks that cannot be read or fit no image.
    """
    return _run(stores, segmentation, features, options, metrics, execution)


class _TestedStore(NamedTuple):
    """The probes that one test store is tested with.

    Attributes:
        work: fits and tests the probes.
        n_shared: number of test images that train too.
        remarks: sentences about the training and test images.
    """

    work: ProbedSites
    n_shared: int
    remarks: list[str]


def _run(
    stores: ProbedStores,
    segmentation: Segmentation | None,
    features: FeatureOptions,
    options: ClassOptions,
    metrics: Sequence[str],
    execution: Execution,
) -> Table:
    """Return the table of `run_classes` or, with a segmentation, of `run_segments`."""
    if stores.n_ways != 1:
        raise VitseeError(
            "give exactly one of TEST, --test-split NAME and --holdout SHARE"
        )
    settings = choose_settings(
        options.preset,
        sites=features.sites,
        tokens=features.tokens,
        shots=options.shots,
        seeds=options.seeds,
        seed=execution.seed,
        l2=features.l2,
        standardise=features.standardise,
        intercept=options.intercept,
        match_last_stage=options.match_last_stage,
    )
    training = choose_training(
        options.solver,
        execution.device,
        sgd=options.sgd_options(),
        ridge=options.ridge_options(features),
    )
    selected_metrics = select_metrics(metrics or METRICS, METRICS, "probe")
    for name in options.baselines:
        if name not in BASELINES:
            raise VitseeError(f"no baseline {name!r}; expected {', '.join(BASELINES)}")
    require_comparable(stores.train, stores.tests, trains="probe")
    examples = _examples(stores, segmentation, settings, execution)
    # Every test store is checked before the first probe is fitted. Without a test store, a part of
    # the training store tests.
    tested_stores = [
        _prepare(
            stores,
            test,
            examples,
            settings=settings,
            training=training,
            options=options,
            execution=execution,
        )
        for test in stores.tests or (None,)
    ]
    first = tested_stores[0].work
    is_top5_alone = {*metrics} == {"top5"} and not options.per_class
    if is_top5_alone and first.train.n_classes <= TOP:
        raise VitseeError(f"no top5: it needs more than {TOP} classes")

    n_probes = sum(tested_store.work.n_probes for tested_store in tested_stores)
    rows = []
    baseline_rows = []
    with counting(execution.progress, n_probes, "probes"), first.prober.threads():
        for tested_store in tested_stores:
            site_rows, random_rows = tested_store.work.rows(execution)
            rows += site_rows
            baseline_rows += random_rows

    remarks = _distinct_remarks(tested_stores)
    for remark in remarks:
        log.info("%s", remark)
    interval = INTERVAL if segmentation is None else first.test.INTERVAL
    solver = settings.describe() if training is None else training.describe()
    notes: dict[str, Any] = {"interval": interval, "solver": solver}
    notes.update(_notes(stores, tested_stores, settings, remarks, execution.seed))
    kept_metrics = {*selected_metrics, "top1_class"}
    columns = COLUMNS if segmentation is None else SEGMENT_COLUMNS
    return Table.from_rows(
        # The rows of the model first, then those of its baselines.
        [row for row in rows + baseline_rows if row["metric"] in kept_metrics],
        [name for name in columns if name != "class" or options.per_class],
        notes,
    )


def _examples(
    stores: ProbedStores,
    segmentation: Segmentation | None,
    settings: Settings,
    execution: Execution,
) -> Examples:
    """Return what is classified: images, or the segments of the sites that are probed."""
    sites_of_stores = []
    if segmentation is not None:
        for store in stores.all:
            sites_of_stores.append((store, store.select(list(settings.sites))))
    # --images limits the test images; the training store has a limit of its own.
    for_train = training_execution(execution, stores.tests, stores.split.train_images)
    return examples_of(
        segmentation,
        sites_of_stores,
        execution,
        stores.split.test_split,
        {stores.train.manifest.store_id: for_train},
    )


def _prepare(
    stores: ProbedStores,
    test: Store | None,
    examples: Examples,
    *,
    settings: Settings,
    training: Training | None,
    options: ClassOptions,
    execution: Execution,
) -> _TestedStore:
    """Draw the images of one test store's probes, and check everything that can be checked.

    Args:
        stores: the stores of the run.
        test: store that tests; None if a part of the training store does.
        examples: what is classified.
        settings: settings of the probes.
        training: settings of SGD; None for ridge.
        options: the options of probes of classes.
        execution: seed, threads and memory.
    """
    remarks: list[str] = []
    train_rows, test_rows = split_rows(
        stores.train,
        test,
        test_split=stores.split.test_split,
        holdout=stores.split.holdout,
        rows=examples.rows,
        seed=execution.seed,
    )
    if test is not None:
        remarks += examples.check_classes(train_rows, test_rows)
    n_shared = check_disjoint(train_rows, test_rows, stores.split.allow_shared)
    remarks += shared_ids(
        train_rows.store, train_rows.rows, test_rows.store, test_rows.rows
    )
    remarks += check_classes(train_rows, test_rows, settings.shots)
    draws = []
    for shots in settings.shots or (None,):
        for seed in settings.seeds:
            draws.append(draw_images(train_rows, shots, seed))
    blocks = test_rows.jackknife(execution.seed)
    task = Task(
        labels=train_rows.labels,
        n_classes=train_rows.n_classes,
        algebra=settings.algebra,
        # SGD has no l2: its rows say NaN, which the table leaves empty.
        l2s=settings.l2s if training is None else (math.nan,),
        choose=settings.choose,
        jobs=execution.jobs,
        memory=execution.budget,
    )
    work = ProbedSites(
        prober=Prober(task, draws, test_rows.labels, training, blocks.labels),
        examples=examples,
        train=train_rows,
        test=test_rows,
        stores=stores.all,
        blocks=blocks,
        settings=settings,
        per_class=options.per_class,
        baselines=tuple(options.baselines),
        seed=execution.seed,
    )
    return _TestedStore(work, n_shared, remarks)


def _distinct_remarks(tested_stores: Iterable[_TestedStore]) -> list[str]:
    """Return the remarks on the images of all test sets, then those on results, each once."""
    on_images = [
        remark for tested_store in tested_stores for remark in tested_store.remarks
    ]
    on_results = [
        remark for tested_store in tested_stores for remark in tested_store.work.remarks
    ]
    return list(dict.fromkeys(on_images + on_results))


def _notes(
    stores: ProbedStores,
    tested_stores: Sequence[_TestedStore],
    settings: Settings,
    remarks: list[str],
    seed: int,
) -> dict[str, Any]:
    """Return the table's notes on images, classes, draws and sites."""
    first = tested_stores[0].work
    tests = []
    blocks = {}
    for work, n_shared, _ in tested_stores:
        store = work.test.store
        description = work.test.describe()
        tests.append({"store": store.label, **description, "also_in_train": n_shared})
        blocks[store.label] = work.blocks.describe()
    tokens = {site: ", ".join(words) for site, words in first.words.items()}
    return {
        "train": {"store": stores.train.label, **first.train.describe()},
        "tests": tests,
        "classes": first.train.n_classes,
        "shots": list(settings.shots) or "all",
        "seeds": list(settings.seeds),
        "seed": seed,
        "compared": compared(stores.all, tokens, asked="" if settings.tokens else None),
        "matched_to_last_stage": first.matched,
        WORD: blocks,
        "remarks": [*remarks, *other_precision(stores.all)],
    }
