"""Linear probes: which layer knows the class best?

One linear map per site (or token) from features to one target per class, +1 for an image's own
class and -1 for the others, by ridge regression in closed form; a test image is assigned the class
with the highest score (Raghu et al. 2021, Figs. 11, 13, D.4, F.1 to F.3 and appendix A; Dosovitskiy
et al. 2021, few-shot). Classes are those of the data set, not those seen. By SGD: Walmer et al.
2023, Table 6.

- `top1`: share of test images whose class has the highest score.
- `top5`: share whose class is among the five highest, where there are more than five classes.
- `top1_class`: `top1` of the images of one class.

Equal scores go to the lower class. `value` is the mean over seeds, `std` the standard deviation
over seeds (n - 1; empty with one), `low` and `high` the 95 % interval over test images, its ends
averaged over seeds. Nothing is chosen by looking at the test images.

With responses, columns of numbers take the place of classes, see `response_run` and `responses`.
With masks, segments train and test: the vectors are those of `cluster --masks`, the classes are the
masks' categories, and intervals are over images.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from vitsee_core.analyses.probe import response_run, responses
from vitsee_core.analyses.probe.figure import plot
from vitsee_core.analyses.probe.fit import Task
from vitsee_core.analyses.probe.response_run import OF_RESPONSES, refuse_of_classes, run_responses
from vitsee_core.analyses.probe.score import (
    INTERVAL,
    METRICS,
    TOP,
    ProbedSites,
    Prober,
)
from vitsee_core.analyses.probe.settings import (
    PRESETS,
    SEEDS,
    SOLVERS,
    Training,
    check_classes,
    choose_settings,
    choose_training,
    draw_images,
    parse_intercept,
    parse_l2,
    split_rows,
)
from vitsee_core.declaration import Analysis
from vitsee_core.features import compared, require_comparable
from vitsee_core.features.compared import other_precision
from vitsee_core.labels.labelled_rows import (
    ALLOW_SHARED,
    PER_CLASS,
    RANDOM_BASELINE,
    TESTS,
    TRAIN_IMAGES,
    check_disjoint,
    training_execution,
)
from vitsee_core.masks.segments import Segmentation, as_segmentation, examples_of
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import (
    KNOWLEDGE,
    Gather,
    Offers,
    Option,
    metrics_option,
    sites_option,
    tokens_option,
)
from vitsee_core.runtime.progress import counting
from vitsee_core.tables.columns import SITE
from vitsee_core.tables.headlines import best_layers
from vitsee_core.tables.metrics import asked_for
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError
from vitsee_stores.selectors import VECTOR_WORDS

__all__ = ["plot", "run"]

log = logging.getLogger(__name__)

headline = partial(
    best_layers,
    units={
        "top1": "of the images right",
        "top5": "with it among five",
        "r_median": "correlation of the median column",
    },
)

BASELINES = ("random",)
COLUMNS = (
    *(*SITE, "token", "row", "col", "class", "shots", "l2"),
    *("metric", "value", "std", "low", "high", "n_images", "baseline"),
)
SEGMENT_COLUMNS = (*COLUMNS[:-1], "n_segments", "baseline")


@analysis
def run(
    train: Store,
    *tests: Annotated[Store, TESTS],
    test_split: Annotated[
        str | None,
        Option(
            "Without TEST: test on images of this split of the data, train on all others.",
            metavar="NAME",
            default="none",
        ),
    ] = None,
    holdout: Annotated[
        float | None,
        Option(
            "Without TEST: test on this share of each class, e.g. 0.2.",
            metavar="SHARE",
            above=0,
            below=1,
            default="none",
        ),
    ] = None,
    masks: Annotated[
        Segmentation | Path | str | Sequence[Path] | None, Gather(Segmentation)
    ] = None,
    response: Annotated[Path | None, responses.RESPONSE] = None,
    response_ids: Annotated[Path | None, responses.RESPONSE_IDS] = None,
    folds: Annotated[int | None, responses.FOLDS] = None,
    by_column: Annotated[bool, responses.BY_COLUMN] = False,
    preset: Annotated[
        str | None,
        Option(
            "raghu: 10 shots, mean of all tokens, CNNs at the last stage's grid, l2 held out; "
            "big_vision: standardised, constant column of 100, l2 = 2^10, site pooled. Options "
            "given beside it win.",
            choices=PRESETS,
            default="none",
        ),
    ] = None,
    sites: Annotated[Sequence[str], sites_option("blocks; big_vision: pooled")] = (),
    tokens: Annotated[
        Sequence[str],
        tokens_option(
            (*VECTOR_WORDS, "each", "all"),
            "cls where a site has a class token, else mean; raghu: mean-all",
        ),
    ] = (),
    match_last_stage: Annotated[
        bool | None,
        Option(
            "CNNs: flatten patches of p x p cells, the largest p with channels x p^2 at most the "
            "last stage's channels, then average to the last stage's grid.",
            "--match-last-stage/--no-match-last-stage",
            default="only with raghu",
        ),
    ] = None,
    shots: Annotated[
        Sequence[int],
        Option(
            "Train on K images of each class, small draws within larger ones.",
            metavar="K",
            least=1,
            default="all training images",
        ),
    ] = (),
    seeds: Annotated[
        int | None,
        Option("Draw the shots N times: with --seed, --seed + 1, ...", least=1, default=str(SEEDS)),
    ] = None,
    l2: Annotated[
        Sequence[float | str],
        Option(
            "holdout: chosen on 20 % of each class of the training images, from 2^-10 to 2^19; "
            "loo: by exact leave-one-out; grid: report all of these; or a number, scikit-learn's "
            "alpha. Numbers: repeatable.",
            metavar="L2",
            parse=parse_l2,
            default="holdout",
        ),
    ] = (),
    standardise: Annotated[
        bool | None,
        Option(
            "Divide features by their standard deviation over the training images.",
            "--standardise/--no-standardise",
            default="only with big_vision",
        ),
    ] = None,
    intercept: Annotated[
        float | str | None,
        Option(
            "free: not penalised; a number: weight of a penalised constant column of that value.",
            metavar="VALUE",
            parse=parse_intercept,
            default="free; big_vision: 100",
        ),
    ] = None,
    solver: Annotated[
        str,
        Option(
            "ridge: closed form, on the CPU in float64; sgd: a linear layer with cross-entropy.",
            choices=SOLVERS,
        ),
    ] = "ridge",
    batch_norm: Annotated[bool, Option("sgd: batch-normalise the features.")] = False,
    epochs: Annotated[
        int | None,
        Option("sgd: passes over the training images.", least=1, default=str(Training.epochs)),
    ] = None,
    lr: Annotated[
        float | None,
        Option(
            "sgd: learning rate for 256 images per step, falling to 0 along a cosine.",
            metavar="LR",
            above=0,
            default=str(Training.lr),
        ),
    ] = None,
    batch: Annotated[
        int | None, Option("sgd: images a step.", least=2, default=str(Training.batch))
    ] = None,
    metrics: Annotated[
        Sequence[str],
        metrics_option(
            (*METRICS, *OF_RESPONSES),
            "all that can be had",
            "top1 and top5 of classes; r and r2 of --response, with their medians, means and "
            "shares of the noise ceiling.",
        ),
    ] = (),
    baselines: Annotated[Sequence[str], RANDOM_BASELINE] = (),
    per_class: Annotated[bool, PER_CLASS] = False,
    train_images: Annotated[int | None, TRAIN_IMAGES] = None,
    allow_shared: Annotated[bool, ALLOW_SHARED] = False,
    execution: Annotated[
        Execution,
        Offers(
            "images seed device jobs memory", dask="sites and tokens, and the masks of --masks,"
        ),
    ] = DEFAULT,
) -> Table:
    """One row per site, token, shots, l2 and metric: the accuracy on the test images.

    Columns: see `COLUMNS`; with `each` one row per token, and one called `each`, the mean over the
    patches' probes (prefix tokens apart, as in Raghu et al. 2021, Fig. 11). `l2` is the geometric
    mean where seeds chose different values; empty for SGD. With masks the columns are
    `SEGMENT_COLUMNS`, with responses `response_run.COLUMNS`. NaN: SGD diverged, or a class without
    test images.

    Memory: as many tokens at a time as fit; each byte of a site is read once as far as groups of
    tokens can follow the store's chunks, and the training images that choose l2 fit.

    Args:
        train: its labelled images train.
        tests: their labelled images are classified, store by store; all have activations of the
            same model. Each store's probes are fitted anew.
        masks: probe segments in place of images; a `Segmentation`, or the paths of the masks of
            all stores. A held-out share is then one of the images.

    Raises:
        MissingInput: no labels, no such split, or a store lacks a site.
        SiteError: a site has no such tokens.
        StoreMismatch: other models, other classes, or images that are both trained and tested on.
        VitseeError: too few images of a class, choices that exclude each other, or too little
            memory.
    """
    n_ways = sum(way is not None for way in (tests or None, test_split, holdout))
    if response is not None:
        refuse_of_classes({
            "--masks": masks, "--preset": preset, "--shots": shots, "--seeds": seeds,
            "--match-last-stage": match_last_stage, "--intercept": intercept,
            "--solver": solver if solver != "ridge" else None, "--batch-norm": batch_norm,
            "--epochs": epochs, "--lr": lr, "--batch": batch, "--baseline": baselines,
            "--per-class": per_class,
        })  # fmt: skip
        if n_ways + (folds is not None) > 1:
            raise VitseeError("give one of TEST, --test-split, --holdout and --folds at most")
        require_comparable(train, tests)
        of_responses = asked_for(metrics or OF_RESPONSES, OF_RESPONSES, "probe --response")
        return run_responses(
            train, tests, response, response_ids, test_split, holdout, execution,
            training=training_execution(execution, tests, train_images), l2=l2,
            sites=sites, tokens=tokens, standardise=standardise, folds=folds, by_column=by_column,
            allow_shared=allow_shared, metrics=of_responses,
        )  # fmt: skip
    if n_ways != 1:
        raise VitseeError("give exactly one of TEST, --test-split NAME and --holdout SHARE")
    seed = execution.seed
    settings = choose_settings(
        preset, sites=sites, tokens=tokens, shots=shots, seeds=seeds, seed=seed, l2=l2,
        standardise=standardise, intercept=intercept, match_last_stage=match_last_stage,
    )  # fmt: skip
    training = choose_training(
        solver,
        execution.device,
        sgd={
            **{"--epochs": epochs, "--lr": lr, "--batch": batch},
            "--batch-norm": batch_norm or None,
        },
        ridge={
            **{"--l2": l2 or None, "--standardise": standardise, "--intercept": intercept},
            "--preset big_vision": preset if preset == "big_vision" else None,
        },
    )
    wanted = [*asked_for(metrics or METRICS, METRICS, "probe"), "top1_class"]
    for name in baselines:
        if name not in BASELINES:
            raise VitseeError(f"no baseline {name!r}; expected {', '.join(BASELINES)}")
    require_comparable(train, tests)
    works, remarks, shared = [], [], []
    choice = as_segmentation(masks)
    read = [] if choice is None else [(s, s.select(list(settings.sites))) for s in (train, *tests)]
    of_train = {train.manifest.store_id: training_execution(execution, tests, train_images)}
    examples = examples_of(choice, read, execution, test_split, of_train)
    for test in tests or (None,):
        ours, theirs = split_rows(
            train, test, test_split=test_split, holdout=holdout, rows=examples.rows, seed=seed
        )
        if test is not None:
            remarks += examples.check_classes(ours, theirs)
        shared.append(check_disjoint(ours, theirs, allow_shared))
        remarks += check_classes(ours, theirs, settings.shots)
        draws = [draw_images(ours, n, s) for n in settings.shots or (None,) for s in settings.seeds]
        l2s = settings.l2s if training is None else (math.nan,)
        task = Task(
            ours.labels, ours.n_classes, settings.algebra, l2s, settings.choose, execution.jobs,
            execution.budget,
        )  # fmt: skip
        blocks = theirs.jackknife(seed)
        prober = Prober(task, draws, theirs.labels, training, blocks.labels)
        works.append(
            ProbedSites(
                *(prober, examples, ours, theirs, (train, *tests), blocks, settings),
                *(per_class, tuple(baselines), seed),
            )
        )
    if {*metrics} == {"top5"} and works[0].train.n_classes <= TOP and not per_class:
        raise VitseeError(f"no top5: it needs more than {TOP} classes")
    n_probes = sum(work.n_probes for work in works)
    with counting(execution.progress, n_probes, "probes"), works[0].prober.threads():
        of_works = [work.rows(execution) for work in works]
    remarks = list(dict.fromkeys([*remarks, *(r for work in works for r in work.remarks)]))
    for remark in remarks:
        log.info("%s", remark)
    words = {name: ", ".join(some) for name, some in works[0].words.items()}
    notes = {
        "interval": INTERVAL if choice is None else works[0].test.INTERVAL,
        "solver": settings.describe() if training is None else training.describe(),
        "train": {"store": train.label, **works[0].train.describe()},
        "tests": [
            {"store": work.test.store.label, **work.test.describe(), "also_in_train": n}
            for work, n in zip(works, shared, strict=True)
        ],
        "classes": works[0].train.n_classes,
        "shots": list(settings.shots) or "all",
        "seeds": list(settings.seeds),
        "seed": seed,
        "compared": compared((train, *tests), words, asked=None if not settings.tokens else ""),
        "matched_to_last_stage": works[0].matched,
        WORD: {work.test.store.label: work.blocks.describe() for work in works},
        "remarks": [*remarks, *other_precision((train, *tests))],
    }
    rows = [row for real, _ in of_works for row in real]
    rows += [row for _, some in of_works for row in some]
    rows = [row for row in rows if row["metric"] in wanted]
    columns = COLUMNS if choice is None else SEGMENT_COLUMNS
    names = [name for name in columns if name != "class" or per_class]
    return Table.from_rows(rows, names, notes)


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Probe how well a layer's tokens predict the classes.

    A linear map from a token (or a mean of tokens) to one target per class, +1 or -1, fitted to
    the images of TRAIN by ridge regression in closed form and tested on those of each TEST,
    stores of the same model over different images of the same classes (Raghu et al. 2021, Figs.
    11, 13, D.4, F.1 to F.3; Dosovitskiy et al. 2021, few-shot; with --solver sgd Walmer et al.
    2023, Table 6). Nothing is chosen on the test images.

      $ vitsee probe train.zarr b16.zarr --shots 10 -o probe.csv --png probe.png
      $ vitsee probe train.zarr b16.zarr --tokens each --shots 10 --png maps.png
      $ vitsee probe train.zarr b16.zarr --tokens first --tokens mean-all --tokens rest
      $ vitsee probe all.zarr --holdout 0.2 --baseline random
      $ vitsee probe train.zarr b16.zarr --preset big_vision \\
          --shots 1 --shots 5 --shots 10 --shots 25
      $ vitsee probe train.zarr b16.zarr --solver sgd --batch-norm --sites blocks.-1.out
      $ vitsee probe coco.zarr --masks instances_val2017.json --holdout 0.2 --per-class
      $ vitsee probe b16.zarr --response it.parquet --by-column -o it.csv --png it.png

    With --masks segments train and test, the vectors of cluster --masks; a share held out is
    one of images, intervals are over images, and the column n_segments counts. With --response
    columns of numbers are predicted in place of classes: metrics r and r2, their median and
    mean over columns, cross-validated or as above; with repeats beside the noise ceiling, and
    normalised by it (Schrimpf et al. 2018; Cadena et al. 2019). l2 is chosen for each column.
    --tokens: cls, mean (over patches), mean-all, first, rest (mean of all but the first),
    ROW,COL; each: a probe for every token, and their mean over patches, called each; all: side
    by side.

    The figure shows accuracy against depth, and maps of the tokens where each was probed. For
    other models repeat the command: best-layer reads several results.
    """,
    needs=("sites",),
    reading=(
        "The share of test images that a linear map of one layer's tokens classifies right, "
        "against depth; bands are 95 % intervals over test images. It shows what a layer knows "
        "of the class, whether or not the model uses it."
    ),
    source=(
        "Raghu et al. 2021, Figs. 11, 13, D.4, F.1 to F.3; Dosovitskiy et al. 2021; Walmer et "
        "al. 2023, Table 6; of responses Schrimpf et al. 2018 and Cadena et al. 2019"
    ),
    columns=COLUMNS,
    other_columns=(SEGMENT_COLUMNS, response_run.COLUMNS),
    meanings={
        "store": "the one that tests",
        "class": "with --per-class",
        "shots": "empty: all",
        "l2": "as used",
        "std": "over seeds",
        "high": "95 % interval over test images",
        "baseline": "of --response: ceiling; there, column and n_columns too",
    },
    metrics=(*METRICS, "top1_class", *OF_RESPONSES, "r_*", "r2_*"),
    may_lack_values=True,
    run=run,
    plot=plot,
    headline=headline,
)
