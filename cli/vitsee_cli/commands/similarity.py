"""vitsee similarity: measures beyond CKA, with a null."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import console, options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.sections import SIMILARITY
from vitsee_cli.similarity_options import gram_options, pair_options
from vitsee_cli.values import FiniteRange
from vitsee_core.analyses import similarity
from vitsee_core.analyses.similarity import MEASURES, PRESETS, RDMS
from vitsee_core.measures.calibration import LEAST

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = SIMILARITY


@click.command()
@options.defaults_of(similarity.run)
@options.stores_argument
@options.output_options
@options.replicates_option
@click.option(
    "--measure",
    type=click.Choice(MEASURES),
    multiple=True,
    help="Repeatable. gulp is a distance; ridge-r2 predicts a's features from b's.",
)
@click.option(
    "--calibrate",
    metavar="B",
    type=click.IntRange(min=LEAST),
    help="Compare with B permutations of the images: threshold, p-values, calibrated value.  "
    "[default: no calibration]",
)
@click.option(
    "--k",
    metavar="K",
    type=click.IntRange(min=1),
    help="Nearest neighbours of mutual-knn and cknna.",
)
@click.option(
    "--rdm",
    type=click.Choice(RDMS),
    help="Dissimilarity of two images in rsa: 1 - correlation over features, or distance.",
)
@click.option(
    "--ridge",
    metavar="L",
    type=FiniteRange(min=0, min_open=True),
    help="Of gulp, in units of the total variance.",
)
@click.option(
    "--variance",
    metavar="SHARE",
    type=FiniteRange(min=0, min_open=True, max=1),
    help="What the principal components that svcca compares have of it.",
)
@pair_options(None, "all; cls with --preset platonic")
@click.option(
    "--preset",
    type=click.Choice(PRESETS),
    help="platonic: class tokens of all blocks without outliers, the largest value over pairs of "
    "layers (Huh et al. 2024); options given beside it win.  [default: none]",
)
@options.images_option
@options.seed_option
@gram_options
@options.dask_option("Gram matrices and permutations")
@options.allow_partial_option
def command(stores: tuple[StorePath, ...], outputs: Outputs, **parameters: Any) -> None:
    """Compare representations by measures beyond CKA.

    Common neighbours (mutual-knn, cknna; Huh et al. 2024), dissimilarities (rsa; Kriegeskorte et
    al. 2008), rotation (procrustes; Williams et al. 2021), canonical correlations (svcca; Raghu et
    al. 2017), ridge predictors (gulp; Boix-Adsera et al. 2022; ridge-r2), debiased CKA; from the
    Gram matrices that vitsee cka keeps, with jackknife intervals over images. Which sites meet
    which is as in vitsee cka.

    Wide features are similar by chance alone: --calibrate 200 tells by how much.

    \b
      $ vitsee similarity a.zarr b.zarr -o knn.csv --png knn.png
      $ vitsee similarity a.zarr --measure rsa --measure gulp --png two.png > two.csv
      $ vitsee similarity a.zarr b.zarr --pairs same-depth --calibrate 200 --png null.png > null.csv
      $ vitsee similarity dino.zarr mae.zarr --preset platonic --calibrate 200 -o platonic.csv

    Columns: store_a, model_a, site_a, block_a, depth_a, rel_depth_a, the same with _b, k, metric
    (mutual_knn, ...), value, std, low, high, spread (what std is), null_mean, tau (5 % threshold),
    p, p_family (over all layers of two stores), calibrated, n_images.
    """
    run_analysis(
        similarity.run,
        similarity.plot,
        stores,
        outputs,
        resumes="" if parameters["no_cache"] else console.GRAMS_KEPT,
        **parameters,
    )
