"""vitsee cka: how similar the representations of models are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import console, options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.sections import SIMILARITY
from vitsee_cli.similarity_options import (
    estimator_options,
    gram_options,
    pair_options,
    precision_option,
)
from vitsee_core.analyses import cka
from vitsee_core.similarity.presets import PRESETS

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = SIMILARITY


@click.command()
@options.defaults_of(cka.run)
@options.stores_argument
@options.output_options
@options.replicates_option
@pair_options()
@estimator_options(*PRESETS)
@options.images_option
@options.seed_option
@gram_options
@options.dask_option("Gram matrices")
@precision_option
@options.allow_partial_option
def command(stores: tuple[StorePath, ...], outputs: Outputs, **parameters: Any) -> None:
    """Compare representations by linear CKA.

    One store: all its sites with each other (Raghu et al. 2021, Fig. 1; Walmer et al. 2023, Figs.
    20 to 22). Two: the first one's sites (rows) with the second one's (columns; Raghu Fig. 2).
    Three and more: one site of each, model by model (Walmer Fig. 6). An image is an example, all
    tokens' channels are its features; --tokens takes fewer. The stores must hold the same images in
    the same order, or images of the same names with --pair-by id.

    \b
      $ vitsee cka b16.zarr -o b16.csv --png b16.png
      $ vitsee cka b16.zarr r50.zarr --png cross.png > cross.csv
      $ vitsee cka b16.zarr --sites norms --sites hidden --sites blocks --png fig1.png > fig1.csv
      $ vitsee cka fs=a.zarr dino=b.zarr mae=c.zarr --sites blocks.-1.out --tokens cls
      $ vitsee cka full.zarr 10pc.zarr 3pc.zarr --pairs same-depth --png fig12.png > fig12.csv
      $ vitsee cka clean.zarr blurred.zarr --pair-by id --pairs same-depth > blur.csv
      $ vitsee cka b16.zarr --pairs branch --png fig23.png > fig23.csv

    Debiased (HSIC_1) over all images where there are at most 16384, with a jackknife's standard
    error and 95 % interval; otherwise over minibatches, whose spread is the estimator's own noise.
    Gram matrices are cached beside each store and reused.

    Columns: store_a, model_a, site_a, block_a, depth_a, rel_depth_a, the same with _b, metric
    (cka), value, std, low, high, spread (what std is), n_images.
    """
    run_analysis(
        cka.run,
        cka.plot,
        stores,
        outputs,
        resumes="" if parameters["no_cache"] else console.GRAMS_KEPT,
        **parameters,
    )
