"""Probes of classes: of images, and of segments of images.

Both fit the same probes to labelled examples; what an example is, and how it is read and held out,
its `Examples` say.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vitsee_core.analyses.probe.fit import Task
from vitsee_core.analyses.probe.options import ClassOptions, FeatureOptions, ProbedStores
from vitsee_core.analyses.probe.score import INTERVAL, METRICS, TOP, ProbedSites, Prober
from vitsee_core.analyses.probe.settings import (
    Settings,
    check_classes,
    choose_settings,
    choose_training,
    draw_images,
    split_rows,
)
from vitsee_core.features import compared, require_comparable
from vitsee_core.features.compared import other_precision
from vitsee_core.runtime.progress import counting
from vitsee_core.tables.columns import SITE
from vitsee_core.tables.metrics import asked_for
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
    """The table of probes that classify images, with `COLUMNS`. Raises: as `run`."""
    return _probe(stores, None, features, options, metrics, execution)


def run_segments(
    stores: ProbedStores,
    segmentation: Segmentation,
    features: FeatureOptions,
    options: ClassOptions,
    metrics: Sequence[str],
    execution: Execution,
) -> Table:
    """The table of probes that classify segments, with `SEGMENT_COLUMNS`. A held-out share is one
    of the images. Raises: as `run`; masks that cannot be read, or fit no image."""
    return _probe(stores, segmentation, features, options, metrics, execution)


def _probe(
    stores: ProbedStores,
    segmentation: Segmentation | None,
    features: FeatureOptions,
    options: ClassOptions,
    metrics: Sequence[str],
    execution: Execution,
) -> Table:
    """The table of `run_classes` or, with a segmentation, of `run_segments`."""
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
        sgd=options.of_sgd(),
        ridge=options.of_ridge(features),
    )
    wanted = [*asked_for(metrics or METRICS, METRICS, "probe"), "top1_class"]
    for name in options.baselines:
        if name not in BASELINES:
            raise VitseeError(f"no baseline {name!r}; expected {', '.join(BASELINES)}")
    require_comparable(stores.train, stores.tests, trains="probe")
    examples = _examples(stores, segmentation, settings, execution)
    works = []
    remarks = []
    shared = []
    for test in stores.tests or (None,):
        ours, theirs = split_rows(
            stores.train,
            test,
            test_split=stores.split.test_split,
            holdout=stores.split.holdout,
            rows=examples.rows,
            seed=execution.seed,
        )
        if test is not None:
            remarks += examples.check_classes(ours, theirs)
        shared.append(check_disjoint(ours, theirs, stores.split.allow_shared))
        remarks += shared_ids(ours.store, ours.rows, theirs.store, theirs.rows)
        remarks += check_classes(ours, theirs, settings.shots)
        draws = [
            draw_images(ours, shots, seed)
            for shots in settings.shots or (None,)
            for seed in settings.seeds
        ]
        blocks = theirs.jackknife(execution.seed)
        task = Task(
            labels=ours.labels,
            n_classes=ours.n_classes,
            algebra=settings.algebra,
            l2s=settings.l2s if training is None else (math.nan,),
            choose=settings.choose,
            jobs=execution.jobs,
            memory=execution.budget,
        )
        work = ProbedSites(
            prober=Prober(task, draws, theirs.labels, training, blocks.labels),
            examples=examples,
            train=ours,
            test=theirs,
            stores=stores.all,
            blocks=blocks,
            settings=settings,
            per_class=options.per_class,
            baselines=tuple(options.baselines),
            seed=execution.seed,
        )
        works.append(work)
    if (
        {*metrics} == {"top5"}
        and works[0].train.n_classes <= TOP
        and not options.per_class
    ):
        raise VitseeError(f"no top5: it needs more than {TOP} classes")
    n_probes = sum(work.n_probes for work in works)
    with counting(execution.progress, n_probes, "probes"), works[0].prober.threads():
        of_works = [work.rows(execution) for work in works]
    for work in works:
        remarks += work.remarks
    remarks = list(dict.fromkeys(remarks))
    for remark in remarks:
        log.info("%s", remark)
    tests = []
    for work, n_shared in zip(works, shared, strict=True):
        about = {"store": work.test.store.label, **work.test.describe()}
        tests.append({**about, "also_in_train": n_shared})
    first = works[0]
    words = {name: ", ".join(some) for name, some in first.words.items()}
    notes: dict[str, Any] = {
        "interval": INTERVAL if segmentation is None else first.test.INTERVAL,
        "solver": settings.describe() if training is None else training.describe(),
        "train": {"store": stores.train.label, **first.train.describe()},
        "tests": tests,
        "classes": first.train.n_classes,
        "shots": list(settings.shots) or "all",
        "seeds": list(settings.seeds),
        "seed": execution.seed,
        "compared": compared(
            stores.all, words, asked=None if not settings.tokens else ""
        ),
        "matched_to_last_stage": first.matched,
        WORD: {work.test.store.label: work.blocks.describe() for work in works},
        "remarks": [*remarks, *other_precision(stores.all)],
    }
    # The rows of the model first, then those of its baselines.
    rows = [row for real_rows, _ in of_works for row in real_rows]
    rows += [row for _, baseline_rows in of_works for row in baseline_rows]
    columns = COLUMNS if segmentation is None else SEGMENT_COLUMNS
    return Table.from_rows(
        [row for row in rows if row["metric"] in wanted],
        [name for name in columns if name != "class" or options.per_class],
        notes,
    )


def _examples(
    stores: ProbedStores,
    segmentation: Segmentation | None,
    settings: Settings,
    execution: Execution,
) -> Examples:
    """What is classified: images, or the segments of the sites that are probed."""
    sites_of_stores = []
    if segmentation is not None:
        for store in stores.all:
            sites_of_stores.append((store, store.select(list(settings.sites))))
    of_train = training_execution(execution, stores.tests, stores.split.train_images)
    return examples_of(
        segmentation,
        sites_of_stores,
        execution,
        stores.split.test_split,
        {stores.train.manifest.store_id: of_train},
    )
