"""vitsee localize: where in the image a token's content comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.data_options import recompute_data_option
from vitsee_cli.sections import FLOW
from vitsee_cli.similarity_options import estimator_options
from vitsee_core.analyses import localize

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = FLOW


@click.command()
@options.stores_argument
@options.output_options
@options.replicates_option
@options.sites_option(show_default="the last block; with --summary blocks")
@options.tokens_option("each", ("each", "cls"), multiple=True)
@click.option(
    "--summary",
    type=click.Choice(localize.SUMMARIES),
    help="In place of maps, how each token compares with its own patch, by token or averaged by "
    "site (curves over depth).  [default: maps]",
)
@estimator_options("raghu")
@options.images_option
@options.seed_option
@recompute_data_option
@options.device_option
@options.memory_option
@options.dask_option("sites")
@options.allow_partial_option
def command(stores: tuple[StorePath, ...], outputs: Outputs, **parameters: Any) -> None:
    """Map how similar each token is to each input patch.

    Debiased CKA, over images, between one token of a site and the pixels of one input patch, for
    every patch (Raghu et al. 2021, Figs. 9, 10, D.1 to D.3). The patches are the cells of the
    site's grid, in ResNets too. The pixels are those that the model saw: extract --inputs keeps
    them, otherwise the images are loaded again from the data and checked.

    \b
      $ vitsee localize b32.zarr --tokens 0,0 --tokens 2,1 --png fig9.png > fig9.csv
      $ vitsee localize b16.zarr --sites blocks.0.out --sites blocks.-1.out --png all.png > all.csv
      $ vitsee localize b32.zarr --tokens cls --png cls.png > cls.csv
      $ vitsee localize cls=a.zarr gap=b.zarr r50.zarr --summary site --png depth.png > depth.csv

    Columns: store, model, site, block, depth, rel_depth, token (ROW,COL or cls), row and col of the
    patch, metric (cka), value, std, low, high, spread (what std is), n_images. With --summary token
    the metrics own_cka, own_rank (1: no patch is more similar), own_rank_relative (0 first, 1
    last), own_margin (own minus best other), peak_distance_px (from the own to the most similar
    patch); with --summary site also own_top1, the fraction of tokens whose own patch is first,
    n_tokens, and baseline rows with what chance gives. Exact over all images, or over a sample of
    16384 where there are more; --images N takes fewer or more.
    """
    run_analysis(localize.run, localize.plot, stores, outputs, **parameters)
