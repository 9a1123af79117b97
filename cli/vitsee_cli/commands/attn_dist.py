"""vitsee attn-dist: how far each attention head looks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.sections import ATTENTION
from vitsee_core.analyses import attn_dist

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = ATTENTION


@click.command()
@options.defaults_of(attn_dist.run)
@options.stores_argument
@options.output_options
@options.metric_option(
    attn_dist.METRICS,
    "all",
    "distance_px in pixels; _raw without renormalising over patches; _unit on a unit "
    "square; _relative to uniform attention.",
)
@options.blocks_option("every block with attention")
@options.images_option
@options.seed_option
@options.jobs_option
@options.dask_option("slabs")
@options.memory_option
@options.allow_partial_option
def command(stores: tuple[StorePath, ...], outputs: Outputs, **parameters: Any) -> None:
    """Measure how far each attention head looks.

    The mean distance between a patch and the patches it attends to, weighted by the attention,
    averaged over patches and images (Raghu et al. 2021, Figs. 3, 4; Walmer et al. 2023, Figs. 4,
    15; Dosovitskiy et al. 2021, Figs. 7, 10). One row per head; class and register tokens are left
    out. Reads the summaries that extract stores by default; takes seconds.

    \b
      $ vitsee attn-dist b16.zarr -o dist.csv --png dist.png
      $ vitsee attn-dist b16.zarr dino=runs/vits16.zarr --png both.png > both.csv
      $ vitsee attn-dist b16.zarr --metric distance_px --sites blocks.0 | sort -t, -k9 -g

    Columns: store, model, site and block (the block), depth, rel_depth, head, metric, value, std
    and the 95 % interval low, high over images, n_images. The figure shows the heads of the lowest
    and highest blocks, all heads against depth, and the means of all stores.
    """
    run_analysis(attn_dist.run, attn_dist.plot, stores, outputs, **parameters)
