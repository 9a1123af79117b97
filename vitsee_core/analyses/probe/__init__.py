"""Linear probes: which layer knows the class best?

One linear map per site (or token) from features to one target per class, +1 for an image's
own class and -1 for the others, by ridge regression in closed form; a test image is
assigned the class with the highest score (Raghu et al. 2021, Figs. 11, 13, D.4, F.1 to F.3
and appendix A; Dosovitskiy et al. 2021, few-shot). Classes are those of the data set, not
those seen. By SGD: Walmer et al. 2023, Table 6.

- `top1`: share of test images whose class has the highest score.
- `top5`: share whose class is among the five highest, where there are more than five
  classes.
- `top1_class`: `top1` of the images of one class.

Equal scores go to the lower class. `value` is the mean over seeds, `std` the standard
deviation over seeds (n - 1; empty with one), `low` and `high` the 95 % interval over test
images, its ends averaged over seeds. Nothing is chosen by looking at the test images.

With responses, columns of numbers take the place of classes (`response_run`). With masks,
segments train and test: the vectors are those of `cluster --masks`, the classes are the
masks' categories, and intervals are over images.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from vitsee_core.analyses.probe.figure import plot
from vitsee_core.analyses.probe.fit import Task
from vitsee_core.analyses.probe.inputs import (
    ProbedStores,
    SplitOptions,
    check_classes,
    draw_images,
    split_rows,
)
from vitsee_core.analyses.probe.options import (
    ClassOptions,
    FeatureOptions,
    ResponseOptions,
    Settings,
    Training,
    choose_settings,
    choose_training,
)
from vitsee_core.analyses.probe.prober import METRICS, TOP, Prober
from vitsee_core.analyses.probe.response_run import (
    RESPONSE_COLUMNS,
    RESPONSE_METRICS,
    run_responses,
)
from vitsee_core.analyses.probe.sites import INTERVAL, ProbedSites
from vitsee_core.declaration import Analysis
from vitsee_core.features import compared, require_comparable
from vitsee_core.features.compared import other_precision
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import KNOWLEDGE, Fields, Gather, Offers, metrics_option
from vitsee_core.runtime.progress import counting
from vitsee_core.tables.columns import REPLICATES, SITE
from vitsee_core.tables.headlines import best_layers
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.labelled_rows import (
    TESTS,
    check_disjoint,
    shared_ids,
    training_execution,
)
from vitsee_core.truth.masks.segments import (
    Examples,
    Segmentation,
    as_segmentation,
    examples_of,
)
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution


__all__ = ["COLUMNS", "SEGMENT_COLUMNS", "plot", "run"]

log = logging.getLogger(__name__)

BASELINES = ("random",)
COLUMNS = (
    *(*SITE, "token", "row", "col", "class", "shots", "l2"),
    *("metric", "value", "std", "low", "high", "n_images", "baseline"),
)
SEGMENT_COLUMNS = (*COLUMNS[:-1], "n_segments", "baseline")
headline = partial(
    best_layers,
    units={
        "top1": "of the images right",
        "top5": "with it among five",
        "r_median": "correlation of the median column",
    },
)


@analysis
def run(
    train: Store,
    *tests: Annotated[Store, TESTS],
    split: Annotated[SplitOptions, Fields()],
    masks: Annotated[
        Segmentation | Path | str | Sequence[Path] | None, Gather(Segmentation)
    ] = None,
    responses: Annotated[ResponseOptions, Fields()],
    features: Annotated[FeatureOptions, Fields()],
    classes: Annotated[ClassOptions, Fields()],
    metrics: Annotated[
        Sequence[str],
        metrics_option(
            (*METRICS, *RESPONSE_METRICS),
            "all that can be had",
            "top1 and top5 of classes; r and r2 of --response, with their medians, "
            "means and shares of the noise ceiling.",
        ),
    ] = (),
    execution: Annotated[
        Execution,
        Offers(
            "images seed device jobs memory",
            dask="sites and tokens, and the masks of --masks,",
        ),
    ] = DEFAULT,
) -> Table:
    """Return the accuracy on the test images: a row per site, token, shots, l2 and metric.

    The columns are `COLUMNS`. With `each` there is one row per token, and one called
    `each`, the mean over the patches' probes (prefix tokens apart, as in Raghu et al.
    2021, Fig. 11). `l2` is the geometric mean where seeds chose different values, and
    empty for SGD. With masks the columns are `SEGMENT_COLUMNS`, with responses
    `RESPONSE_COLUMNS`. A value is NaN if SGD diverged, or for a class without test images.

    As many tokens are probed at a time as fit the memory. Each byte of a site is read once
    as long as groups of tokens can follow the store's chunks and the training images that
    choose l2 fit.

    Args:
        train: store whose labelled images train.
        tests: stores whose labelled images are classified, store by store; all have
            activations of the same model. Each store's probes are fitted anew.
        split: which part of `train` tests if there are no `tests`.
        masks: probe segments in place of images; a `Segmentation`, or the paths of the
            masks of all stores. A held-out share is then one of the images.
        responses: predict columns of numbers in place of classes.
        features: sites, tokens, and the penalty of their weights.
        classes: protocol, shots and solver of probes of classes.
        metrics: names of metrics; () for all.
        execution: images, seed, device, threads and memory.

    Raises:
        MissingInput: no labels, no such split, or a store lacks a site.
        SiteError: a site has no such tokens.
        StoreMismatch: other models, other classes, or images that are both trained and
            tested on.
        VitseeError: too few images of a class, choices that exclude each other, or too
            little memory.

    Examples:
        >>> import vitsee
        >>> table = vitsee.probe("train.zarr", "vit.zarr", sites="blocks.-1.out")
        >>> list(zip(table["metric"].tolist(), table["value"].round(2).tolist()))
        [('top1', 0.86), ('top5', 1.0)]
    """
    stores = ProbedStores(train, tests, split)
    segmentation = as_segmentation(masks)
    if responses.response is not None:
        if segmentation is not None:
            raise VitseeError(
                "--masks belongs to probes of classes, not to --response; leave it out"
            )
        classes.refuse_any()
        return run_responses(stores, responses, features, metrics, execution)
    return _probe_classes(stores, segmentation, features, classes, metrics, execution)


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


def _probe_classes(
    stores: ProbedStores,
    segmentation: Segmentation | None,
    features: FeatureOptions,
    options: ClassOptions,
    metrics: Sequence[str],
    execution: Execution,
) -> Table:
    """Return the table of probes that classify images or, with a segmentation, segments.

    Both fit the same probes to labelled examples. An `Examples` object knows the
    difference: what an example is, how its features are read, and how examples are held
    out. A held-out share of segments is one of the images, so that the segments of an
    image stay together.
    """
    if stores.n_ways_of_testing != 1:
        raise VitseeError(
            "give exactly one of TEST, --test-split NAME and --holdout SHARE"
        )
    settings = choose_settings(options, features, execution.seed)
    training = choose_training(options, features, execution.device)
    selected_metrics = select_metrics(metrics or METRICS, METRICS, "probe")
    for name in options.baselines:
        if name not in BASELINES:
            raise VitseeError(f"no baseline {name!r}; expected {', '.join(BASELINES)}")
    require_comparable(stores.train, stores.tests, trains="probe")
    examples = _examples(stores, segmentation, settings, execution)
    # Every test store is checked before the first probe is fitted. Without a test store, a
    # part of the training store tests.
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
    # Only now the number of classes is known, on which top5 depends.
    is_top5_alone = {*metrics} == {"top5"} and not options.per_class
    if is_top5_alone and first.train.n_classes <= TOP:
        raise VitseeError(f"no top5: it needs more than {TOP} classes")

    n_probes = sum(tested_store.work.n_probes for tested_store in tested_stores)
    rows = []
    baseline_rows = []
    # One context for all sites: to enter it takes milliseconds.
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
    # The rows of classes are there only with --per-class, whatever the metrics are.
    table_metrics = {*selected_metrics, "top1_class"}
    columns = COLUMNS if segmentation is None else SEGMENT_COLUMNS
    return Table.from_rows(
        # The rows of the model first, then those of its baselines.
        [row for row in rows + baseline_rows if row["metric"] in table_metrics],
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
    # A probe for each number of shots (None: all training images) and each seed.
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
    """Return the remarks on the images of all test sets, then those on results, each
    once."""
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
        REPLICATES: blocks,
        "remarks": [*remarks, *other_precision(stores.all)],
    }


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Probe how well a layer's tokens predict the classes.

    A linear map from a token (or a mean of tokens) to one target per class, +1 or -1,
    fitted to the images of TRAIN by ridge regression in closed form and tested on those of
    each TEST, stores of the same model over different images of the same classes (Raghu et
    al. 2021, Figs. 11, 13, D.4, F.1 to F.3; Dosovitskiy et al. 2021, few-shot; with
    --solver sgd Walmer et al. 2023, Table 6). Nothing is chosen on the test images.

      $ vitsee probe train.zarr b16.zarr --shots 10 -o probe.csv --png probe.png
      $ vitsee probe train.zarr b16.zarr --tokens each --shots 10 --png maps.png
      $ vitsee probe train.zarr b16.zarr --tokens first --tokens mean-all --tokens rest
      $ vitsee probe all.zarr --holdout 0.2 --baseline random
      $ vitsee probe train.zarr b16.zarr --preset big_vision \\
          --shots 1 --shots 5 --shots 10 --shots 25
      $ vitsee probe train.zarr b16.zarr --solver sgd --batch-norm --sites blocks.-1.out
      $ vitsee probe coco.zarr --masks instances_val2017.json --holdout 0.2 --per-class
      $ vitsee probe b16.zarr --response it.parquet --by-column -o it.csv --png it.png

    With --masks segments train and test, the vectors of cluster --masks; a share held out
    is one of images, intervals are over images, and the column n_segments counts. With
    --response columns of numbers are predicted in place of classes: metrics r and r2,
    their median and mean over columns, cross-validated or as above; with repeats beside
    the noise ceiling, and normalised by it (Schrimpf et al. 2018; Cadena et al. 2019). l2
    is chosen for each column. --tokens: cls, mean (over patches), mean-all, first, rest
    (mean of all but the first), ROW,COL; each: a probe for every token, and their mean
    over patches, called each; all: side by side.

    The figure shows accuracy against depth, and maps of the tokens where each was probed.
    For other models repeat the command: best-layer reads several results.
    """,
    needs=("sites",),
    reading=(
        "The share of test images that a linear map of one layer's tokens classifies "
        "right, against depth; bands are 95 % intervals over test images. It shows what "
        "a layer knows of the class, whether or not the model uses it."
    ),
    source=(
        "Raghu et al. 2021, Figs. 11, 13, D.4, F.1 to F.3; Dosovitskiy et al. 2021; "
        "Walmer et al. 2023, Table 6; of responses Schrimpf et al. 2018 and Cadena et "
        "al. 2019"
    ),
    columns=COLUMNS,
    other_columns=(SEGMENT_COLUMNS, RESPONSE_COLUMNS),
    meanings={
        "store": "the one that tests",
        "class": "with --per-class",
        "shots": "empty: all",
        "l2": "as used",
        "std": "over seeds",
        "high": "95 % interval over test images",
        "baseline": "of --response: ceiling; there, column and n_columns too",
    },
    metrics=(*METRICS, "top1_class", *RESPONSE_METRICS, "r_*", "r2_*"),
    may_lack_values=True,
    run=run,
    plot=plot,
    headline=headline,
)
