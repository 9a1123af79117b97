"""vitsee keypoints: whether the same part of another object is found by its features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.sections import KNOWLEDGE
from vitsee_cli.values import POSITIVE, parse_path, parse_words
from vitsee_core.analyses import keypoints

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = KNOWLEDGE


@click.command()
@options.defaults_of(keypoints.run)
@options.stores_argument
@options.output_options
@options.replicates_option
@click.option(
    "--pairs",
    metavar="PATH",
    type=parse_path,
    required=True,
    help="The folder SPair-71k (or any with PairAnnotation/SPLIT/*.json in its form), or a list of "
    "pairs in it (Layout/large/test.txt).",
)
@click.option(
    "--split",
    metavar="NAME",
    type=parse_words,
    show_default="the list's, else test",
    help="Which pairs of the folder.",
)
@click.option(
    "--pairs-per-class",
    metavar="N",
    type=click.IntRange(min=1),
    show_default="all",
    help="Draw N pairs of each class, with the seed.",
)
@click.option(
    "--alpha",
    "alphas",
    metavar="A",
    type=POSITIVE,
    multiple=True,
    show_default=" ".join(f"{alpha:g}" for alpha in keypoints.ALPHAS),
    help="Found is what is nearer than A times the longer side. Repeatable.",
)
@click.option(
    "--threshold",
    type=click.Choice(keypoints.THRESHOLDS),
    show_default="box",
    help="Whose longer side that is: the target object's box, or the target image.",
)
@click.option(
    "--match",
    type=click.Choice(keypoints.MATCHES),
    show_default="smooth",
    help="smooth: features at pixels, between tokens; token: of tokens; vit_analysis: those of the "
    "released code, which lie on the token grid.",
)
@click.option(
    "--candidates",
    type=click.Choice(keypoints.CANDIDATES),
    show_default="image",
    help="Where the target may lie: on the image, anywhere on the input (canvas), in the object's "
    "box.",
)
@click.option(
    "--by",
    type=click.Choice(keypoints.GROUPS),
    multiple=True,
    help="Add the rows of each group of pairs. Repeatable.  [default: none]",
)
@click.option(
    "--preset",
    type=click.Choice(list(keypoints.PRESETS)),
    help="walmer: 20 pairs a class, vit_analysis, canvas. Options given beside it win.  "
    "[default: none]",
)
@options.sites_option("blocks")
@options.seed_option
@options.device_option
@options.dask_option("sites and images")
@options.allow_partial_option
def command(stores: tuple[StorePath, ...], outputs: Outputs, **parameters: Any) -> None:
    """Find keypoints again in other images of a class.

    A keypoint of one image is looked for in another by the cosine of dense features; PCK is the
    share found near enough (Walmer et al. 2023, Figs. 10 right, 31; SPair-71k). The stores hold the
    pairs' images, whole: with --crop-mode border and --crop-pct 1.

    \b
      $ vitsee extract vit_base_patch16_224 --data SPair-71k/JPEGImages \\
            --crop-mode border --fill black --crop-pct 1 -o b16.zarr
      $ vitsee keypoints b16.zarr --pairs SPair-71k -o pck.csv --png pck.png
      $ vitsee keypoints b16.zarr dino.zarr --pairs SPair-71k --preset walmer --png both.png
      $ vitsee keypoints b16.zarr --pairs SPair-71k/Layout/small/test.txt --by class --alpha 0.1

    Features are bilinear between tokens, and scaled to unit length after that; the released code
    does not scale, so that what it finds lies on the token grid: --match vit_analysis. Pairs whose
    images the store lacks are left out and counted.

    Columns: store, model, site, block, depth, rel_depth, class and group (with --by), metric
    (pck@A: the mean over classes; pck_point@A: over points; pck_image@A: over pairs), value, std
    and the 95 % interval low, high (spread: a jackknife that leaves out an image with all its
    pairs), n_images, n_pairs, n_points, baseline. Rows with a baseline need no features: chance,
    still (the same place in the image), grid (the nearest possible place, a ceiling).
    """
    run_analysis(keypoints.run, keypoints.plot, stores, outputs, **parameters)
