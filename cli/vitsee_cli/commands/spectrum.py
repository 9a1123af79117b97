"""vitsee spectrum: ranks, decay and collapse of a layer's features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.sections import KNOWLEDGE
from vitsee_core.analyses import spectrum

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = KNOWLEDGE
TOKENS = ("cls", "mean", "mean-all", "first", "rest", "patches", "prefix", "all")


@click.command()
@options.defaults_of(spectrum.run)
@options.stores_argument
@options.output_options
@options.replicates_option
@options.metric_option(
    spectrum.METRICS,
    "all that can be had",
    "twonn needs one vector per image, nc1 to nc4 and cdnv labels too.",
)
@options.sites_option("blocks")
@options.tokens_option(None, TOKENS, show_default="cls where there is one, else mean")
@options.images_option
@options.seed_option
@options.jobs_option
@options.dask_option("sites")
@options.memory_option
@options.allow_partial_option
def command(stores: tuple[StorePath, ...], outputs: Outputs, **parameters: Any) -> None:
    """Measure how many directions a layer's features use.

    RankMe, effective rank, participation ratio, decay of the spectrum (alpha), anisotropy and
    intrinsic dimension (TwoNN) of one vector per image, or of tokens; with labels, neural collapse.
    Every value comes with the largest it can be, two halves of the images, and an interval.

    \b
      $ vitsee spectrum b16.zarr -o spectrum.csv --png spectrum.png
      $ vitsee spectrum mae=a.zarr dino=b.zarr --tokens mean --metric rankme > rankme.csv
      $ vitsee spectrum b16.zarr --tokens patches --sites 'blocks.*.out' -o tokens.csv

    --tokens patches, prefix, all: every token is an example (n D^2 multiply-adds a site).

    Columns: store, model, site, block, depth, rel_depth, token, cap, half_a, half_b, metric, value,
    std and the 95 % interval low, high over images, n_images, n_examples. The figure shows each
    metric over depth, dots for the halves, dotted lines for the caps.
    """
    run_analysis(spectrum.run, spectrum.plot, stores, outputs, **parameters)
