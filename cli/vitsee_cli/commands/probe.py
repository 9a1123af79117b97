"""vitsee probe: how well a layer's tokens predict the classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.accuracy_options import (
    allow_shared_option,
    per_class_option,
    random_baseline_option,
    tests_argument,
)
from vitsee_cli.analysis import run_analysis
from vitsee_cli.mask_options import segment_options
from vitsee_cli.sections import KNOWLEDGE
from vitsee_cli.values import POSITIVE, SHARE, parse_store
from vitsee_core.analyses import probe
from vitsee_core.probing import settings
from vitsee_core.probing.sgd import Training
from vitsee_stores.token_selection import VECTOR_WORDS

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = KNOWLEDGE

L2_WORDS = (*settings.CHOOSERS, "grid")


def parse_l2(text: str | float) -> str | float:
    """A number above 0, or a word of `L2_WORDS`."""
    if isinstance(text, float) or text in L2_WORDS:
        return text
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise click.BadParameter(f"{text!r}; expected a number above 0, {', '.join(L2_WORDS)}")
    return value


def parse_intercept(text: str | float) -> str | float:
    """`free` or a number above 0."""
    if isinstance(text, float) or text == "free":
        return text
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise click.BadParameter(f"{text!r}; expected free or a number above 0, e.g. 100")
    return value


_PROTOCOL = (
    click.option(
        "--preset",
        type=click.Choice(settings.PRESETS),
        help="raghu: 10 shots, mean of all tokens, CNNs at the last stage's grid, l2 held out; "
        "big_vision: standardised, constant column of 100, l2 = 2^10, site pooled. Options given "
        "beside it win.  [default: none]",
    ),
    click.option(
        "--shots",
        metavar="K",
        type=click.IntRange(min=1),
        multiple=True,
        show_default="all training images",
        help="Train on K images of each class, small draws within larger ones. Repeatable.",
    ),
    click.option(
        "--seeds",
        metavar="N",
        type=click.IntRange(min=1),
        show_default=str(settings.SEEDS),
        help="Draw the shots N times: with --seed, --seed + 1, ...",
    ),
    click.option(
        "--l2",
        metavar="L2",
        type=parse_l2,
        multiple=True,
        show_default="holdout",
        help="holdout: chosen on 20 % of each class of the training images, from 2^-10 to 2^19; "
        "loo: by exact leave-one-out; grid: report all of these; or a number. Numbers: repeatable.",
    ),
    click.option(
        "--standardise/--no-standardise",
        default=None,
        show_default="only with big_vision",
        help="Divide features by their standard deviation over the training images.",
    ),
    click.option(
        "--intercept",
        metavar="VALUE",
        type=parse_intercept,
        show_default="free; big_vision: 100",
        help="free: not penalised; a number: weight of a penalised constant column of that value.",
    ),
    click.option(
        "--match-last-stage/--no-match-last-stage",
        default=None,
        show_default="only with raghu",
        help="CNNs: flatten patches of p x p cells, the largest p with channels x p^2 at most the "
        "last stage's channels, then average to the last stage's grid.",
    ),
)
_SGD = (
    click.option(
        "--solver",
        type=click.Choice(settings.SOLVERS),
        help="ridge: closed form, on the CPU in float64; sgd: a linear layer with cross-entropy.",
    ),
    click.option("--batch-norm", is_flag=True, help="sgd: batch-normalise the features."),
    click.option(
        "--epochs",
        metavar="N",
        type=click.IntRange(min=1),
        show_default=str(Training.epochs),
        help="sgd: passes over the training images.",
    ),
    click.option(
        "--lr",
        metavar="LR",
        type=POSITIVE,
        show_default=str(Training.lr),
        help="sgd: learning rate for 256 images per step, falling to 0 along a cosine.",
    ),
    click.option(
        "--batch",
        metavar="N",
        type=click.IntRange(min=2),
        show_default=str(Training.batch),
        help="sgd: images a step.",
    ),
    options.device_option,
)


def _protocol_options(command: Any) -> Any:
    return options.apply(command, _PROTOCOL)


def _sgd_options(command: Any) -> Any:
    return options.apply(command, _SGD)


@click.command()
@options.defaults_of(probe.run)
@click.argument("train", metavar="TRAIN", type=parse_store)
@tests_argument(required=False)
@click.option(
    "--test-split",
    metavar="NAME",
    help="Without TEST: test on images of this split of the data, train on all others.  "
    "[default: none]",
)
@click.option(
    "--holdout",
    metavar="SHARE",
    type=SHARE,
    help="Without TEST: test on this share of each class, e.g. 0.2.  [default: none]",
)
@options.output_options
@options.replicates_option
@options.sites_option(show_default="blocks; big_vision: pooled")
@options.tokens_option(
    None,
    (*VECTOR_WORDS, "each", "all"),
    multiple=True,
    show_default="cls where a site has a class token, else mean; raghu: mean-all",
)
@segment_options
@_protocol_options
@random_baseline_option
@per_class_option
@allow_shared_option
@_sgd_options
@options.images_option
@options.seed_option
@options.jobs_option
@options.dask_option("sites and tokens, and the masks of --masks,")
@options.memory_option
@options.allow_partial_option
def command(
    train: StorePath,
    tests: tuple[StorePath, ...],
    test_split: str | None,
    holdout: float | None,
    outputs: Outputs,
    **parameters: Any,
) -> None:
    """Probe how well a layer's tokens predict the classes.

    A linear map from a token (or a mean of tokens) to one target per class, +1 or -1, fitted to the
    images of TRAIN by ridge regression in closed form and tested on those of each TEST, stores of
    the same model over different images of the same classes (Raghu et al. 2021, Figs. 11, 13, D.4,
    F.1 to F.3; Dosovitskiy et al. 2021, few-shot; with --solver sgd Walmer et al. 2023, Table 6).
    Nothing is chosen on the test images.

    \b
      $ vitsee probe train.zarr b16.zarr --shots 10 -o probe.csv --png probe.png
      $ vitsee probe train.zarr b16.zarr --tokens each --shots 10 --png maps.png
      $ vitsee probe train.zarr b16.zarr --tokens first --tokens mean-all --tokens rest
      $ vitsee probe all.zarr --holdout 0.2 --baseline random
      $ vitsee probe train.zarr b16.zarr --preset big_vision \\
          --shots 1 --shots 5 --shots 10 --shots 25
      $ vitsee probe train.zarr b16.zarr --solver sgd --batch-norm --sites blocks.-1.out
      $ vitsee probe coco.zarr --masks instances_val2017.json --holdout 0.2 --per-class

    With --masks segments train and test, the vectors of cluster --masks; a share held out is one of
    images, intervals are over images, and the column n_segments counts.
    --tokens: cls, mean (over patches), mean-all, first, rest (mean of all but the first), ROW,COL;
    each: a probe for every token, and their mean over patches, called each; all: side by side.
    Columns: store (the one that tests), model, site, block, depth, rel_depth, token, row, col,
    class (with --per-class), shots (empty: all), l2 (as used), metric (top1; top5 with more than
    five classes), value and std over seeds, the 95 % interval low, high over test images, n_images,
    baseline. The figure shows accuracy against depth, and maps of the tokens where each was probed.
    For other models repeat the command: best-layer reads several results.
    """

    ways = [tests or None, test_split, holdout]
    if sum(way is not None for way in ways) != 1:
        raise click.UsageError("give exactly one of TEST, --test-split NAME and --holdout SHARE")
    if train.label in (test.label for test in tests):
        train = train._replace(label=f"{train.label} (train)")
    run_analysis(
        probe.run,
        probe.plot,
        (train, *tests),
        outputs,
        test_split=test_split,
        holdout=holdout,
        **parameters,
    )
