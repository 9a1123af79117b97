"""vitsee knn: whether images of a class lie together."""

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
from vitsee_cli.values import POSITIVE, parse_store
from vitsee_core.analyses import knn
from vitsee_stores.token_selection import VECTOR_WORDS

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = KNOWLEDGE


@click.command()
@options.defaults_of(knn.run)
@click.argument("train", metavar="TRAIN", type=parse_store)
@tests_argument(required=True)
@options.output_options
@options.replicates_option
@options.sites_option("blocks")
@options.tokens_option(
    None, VECTOR_WORDS, show_default="cls where a site has a class token, else mean (over patches)"
)
@click.option(
    "--k",
    "ks",
    metavar="K",
    type=click.IntRange(min=1),
    multiple=True,
    help="Number of neighbours. Repeatable.",
)
@click.option(
    "--vote",
    type=click.Choice(knn.VOTES),
    help="A neighbour's vote: exp(cosine / temperature), or 1.",
)
@click.option(
    "--temperature",
    metavar="T",
    type=POSITIVE,
    help="Of the softmax vote.",
)
@segment_options
@random_baseline_option
@per_class_option
@allow_shared_option
@options.images_option
@options.seed_option
@options.device_option
@options.jobs_option
@options.dask_option("sites, and the masks of --masks,")
@options.memory_option
@options.allow_partial_option
def command(
    train: StorePath, tests: tuple[StorePath, ...], outputs: Outputs, **parameters: Any
) -> None:
    """Classify images or segments by their nearest neighbours.

    A test image gets the class that the k training images nearest by cosine vote for (Walmer et
    al. 2023, Figs. 9 left, 28; Caron et al. 2021). TRAIN and each TEST are stores of the same model
    over different images of the same classes. Neighbours are exact; memory stays bounded.

    \b
      $ vitsee extract vit_base_patch16_224 --data imagenet/train --tokens pooled -o train.zarr
      $ vitsee extract vit_base_patch16_224 --data imagenet/val -o b16.zarr
      $ vitsee knn train.zarr b16.zarr -o knn.csv --png knn.png
      $ vitsee knn train.zarr b16.zarr --k 10 --k 100 --sites pooled --baseline random
      $ vitsee knn train.zarr val.zarr --masks instances_train.json --masks instances_val.json

    With --masks segments vote for segments, the vectors of cluster --masks; intervals are over
    images, and the column n_segments counts.
    Columns: store (TEST), model, site, block, depth, rel_depth, class (with --per-class), k, metric
    (top1, top5), value, std and the 95 % interval low, high over test images, n_images, baseline.
    top5 needs k >= 5 and more than 5 classes, and counts only classes that a neighbour has. The
    figure shows accuracy against depth.
    """

    if train.label in (test.label for test in tests):
        train = train._replace(label=f"{train.label} (train)")
    run_analysis(knn.run, knn.plot, (train, *tests), outputs, **parameters)
