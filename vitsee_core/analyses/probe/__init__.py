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

With responses, columns of numbers take the place of classes (`response_run`, `responses`). With
masks, segments train and test: the vectors are those of `cluster --masks`, the classes are the
masks' categories, and intervals are over images.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from vitsee_core.analyses.probe import response_run
from vitsee_core.analyses.probe.class_run import (
    COLUMNS,
    SEGMENT_COLUMNS,
    run_classes,
    run_segments,
)
from vitsee_core.analyses.probe.figure import plot
from vitsee_core.analyses.probe.options import (
    ClassOptions,
    FeatureOptions,
    ProbedStores,
    ResponseOptions,
    SplitOptions,
)
from vitsee_core.analyses.probe.response_run import RESPONSE_METRICS, run_responses
from vitsee_core.analyses.probe.tally import METRICS
from vitsee_core.declaration import Analysis
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import KNOWLEDGE, Fields, Gather, Offers, metrics_option
from vitsee_core.tables.headlines import best_layers
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.labelled_rows import TESTS
from vitsee_core.truth.masks.segments import Segmentation, as_segmentation
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

__all__ = ["COLUMNS", "SEGMENT_COLUMNS", "plot", "run"]

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
            "top1 and top5 of classes; r and r2 of --response, with their medians, means and "
            "shares of the noise ceiling.",
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

    The columns are `COLUMNS`. With `each` there is one row per token, and one called `each`, the
    mean over the patches' probes (prefix tokens apart, as in Raghu et al. 2021, Fig. 11). `l2` is
    the geometric mean where seeds chose different values, and empty for SGD. With masks the columns
    are `SEGMENT_COLUMNS`, with responses `response_run.COLUMNS`. A value is NaN if SGD diverged,
    or for a class without test images.

    As many tokens are probed at a time as fit the memory. Each byte of a site is read once as long
    as groups of tokens can follow the store's chunks and the training images that choose l2 fit.

    Args:
        train: store whose labelled images train.
        tests: stores whose labelled images are classified, store by store; all have activations of
            the same model. Each store's probes are fitted anew.
        split: which part of `train` tests if there are no `tests`.
        masks: probe segments in place of images; a `Segmentation`, or the paths of the masks of
            all stores. A held-out share is then one of the images.
        responses: predict columns of numbers in place of classes.
        features: sites, tokens, and the penalty of their weights.
        classes: protocol, shots and solver of probes of classes.
        metrics: names of metrics; () for all.
        execution: images, seed, device, threads and memory.

    Raises:
        MissingInput: no labels, no such split, or a store lacks a site.
        SiteError: a site has no such tokens.
        StoreMismatch: other models, other classes, or images that are both trained and tested on.
        VitseeError: too few images of a class, choices that exclude each other, or too little
            memory.

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
    if segmentation is not None:
        return run_segments(stores, segmentation, features, classes, metrics, execution)
    return run_classes(stores, features, classes, metrics, execution)


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
    metrics=(*METRICS, "top1_class", *RESPONSE_METRICS, "r_*", "r2_*"),
    may_lack_values=True,
    run=run,
    plot=plot,
    headline=headline,
)
