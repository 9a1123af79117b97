"""vitsee lens: the model's own classifier on the tokens of every block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.model_options import rebuild_options
from vitsee_cli.sections import KNOWLEDGE
from vitsee_core.analyses import lens
from vitsee_core.provenance import Provenance

if TYPE_CHECKING:
    from pathlib import Path

    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = KNOWLEDGE


@click.command()
@options.defaults_of(lens.run)
@options.stores_argument
@options.output_options
@options.replicates_option
@options.metric_option(
    lens.METRICS,
    "all that can be had",
    "lens_top1 and lens_rank need labels.",
)
@click.option("--patches", is_flag=True, help="Also classify every patch alone (needs all tokens).")
@options.sites_option("blocks")
@rebuild_options
@options.images_option
@options.seed_option
@options.jobs_option
@options.dask_option("slabs")
@options.memory_option
@options.allow_partial_option
def command(
    stores: tuple[StorePath, ...],
    outputs: Outputs,
    checkpoint: Path | None,
    trust_store: bool,
    **parameters: Any,
) -> None:
    """Read every block through the model's own classifier.

    The final norm, pooling and linear layer that extract keeps are applied to each block's tokens
    (the logit lens; Vilas et al. 2023): how early the right class has the largest logit, how early
    the model's answer is there, and the label's rank. Nothing is trained. A head that a store does
    not keep (above 16 MB, or of attention pooling) is that of its model, built again.

    \b
      $ vitsee lens b16.zarr -o lens.csv --png lens.png
      $ vitsee lens b16.zarr deit.zarr --patches --png both.png > both.csv

    --patches: every patch alone through the same norm and classifier, as maps.

    Columns: store, model, site, block, depth, rel_depth, token (empty: pooled as the model does;
    patches: mean over patches), row, col, metric, value, std and the 95 % interval low, high over
    images, n_images.
    """
    origin = Provenance(None, checkpoint, trust_store)
    run_analysis(lens.run, lens.plot, stores, outputs, origin=origin, **parameters)
