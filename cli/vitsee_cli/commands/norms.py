"""vitsee norms: norms of tokens, outliers and registers, massive activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.sections import FLOW
from vitsee_cli.values import POSITIVE
from vitsee_core.analyses import norms

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = FLOW


@click.command()
@options.defaults_of(norms.run)
@options.stores_argument
@options.output_options
@options.replicates_option
@options.metric_option(
    norms.METRICS,
    "all that the store has",
    "Those of activations (massive_*, neighbour_cos) need a store that keeps all tokens.",
)
@options.sites_option("blocks")
@options.tokens_option(None, norms.TOKENS, multiple=True, show_default="all and each")
@click.option(
    "--threshold",
    metavar="NORM",
    type=POSITIVE,
    help="Norm above which outlier_share counts a patch.",
)
@options.images_option
@options.seed_option
@options.jobs_option
@options.dask_option("slabs")
@options.memory_option
@options.allow_partial_option
def command(stores: tuple[StorePath, ...], outputs: Outputs, **parameters: Any) -> None:
    """Find outlier tokens and massive activations.

    Large vision transformers put a few patch tokens at norms far above the others, where they hold
    global information (Darcet et al. 2024; registers take their place), and a few activations at
    thousands of times the median (Sun et al. 2024). Norms come from the dot products that extract
    stores by default, also with --tokens pooled; activations are read for the rest.

    \b
      $ vitsee norms l14.zarr -o norms.csv --png norms.png
      $ vitsee norms dinov2=a.zarr reg=b.zarr --tokens all --png both.png > both.csv
      $ vitsee norms b16.zarr --metric outlier_share --threshold 60 --tokens patches

    --tokens all: cls, registers and patches as kinds, with the median, the shares of outliers
    (above --threshold; above median + 6 x 1.4826 MAD) and the histogram; each: every token, with
    the share of images in which it is an outlier.

    Columns: store, model, site, block, depth, rel_depth, token, row, col, channel and at (where the
    largest activation of most images lies), norm_from and norm_to (a bin of norm_histogram),
    metric, value, std and the 95 % interval low, high over images, n_images. The figure shows the
    histogram over depth, where the outliers lie, and their share over depth.
    """
    run_analysis(norms.run, norms.plot, stores, outputs, **parameters)
