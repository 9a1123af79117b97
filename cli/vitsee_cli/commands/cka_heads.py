"""vitsee cka-heads: which heads of the first block see like a CNN."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import console, options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.sections import SIMILARITY
from vitsee_cli.similarity_options import estimator_options, gram_options, precision_option
from vitsee_core.analyses import cka_heads

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = SIMILARITY


@click.command()
@options.stores_argument
@options.output_options
@options.replicates_option
@click.option(
    "--block",
    metavar="BLOCK",
    show_default="the first with attention",
    help="The block of the first store whose heads are compared: blocks.0, blocks.-1.",
)
@click.option(
    "--window",
    metavar="W",
    type=click.IntRange(min=1),
    show_default="a third of the heads",
    help="Heads in a group: W neighbours in the order of distance.",
)
@click.option(
    "--cumulative",
    is_flag=True,
    help="Groups of the k most local heads, k from 1 to all.  [default: windows]",
)
@options.side_option("b", "the second store", "its blocks in the lower half by depth")
@estimator_options("raghu")
@options.images_option
@options.seed_option
@gram_options
@options.dask_option("Gram matrices and slabs")
@precision_option
@options.allow_partial_option
def command(stores: tuple[StorePath, ...], outputs: Outputs, **parameters: Any) -> None:
    """Compare local and global heads with another model.

    The heads of the first block, from those that look at their neighbourhood to those that look
    everywhere (by mean attention distance), in groups: CKA between the outputs of a group's heads
    and the lower sites of a second store, usually a CNN, against the group's mean distance (Raghu
    et al. 2021, Fig. 5). One row per group and site.

    \b
      $ vitsee extract MODEL --sites blocks --sites blocks.0.attn.heads -o b16.zarr ...
      $ vitsee cka-heads b16.zarr r50.zarr -o heads.csv --png heads.png
      $ vitsee cka-heads b16.zarr r50.zarr --sites-b 'layer1.*.out' --window 2
      $ vitsee cka-heads b16.zarr r50.zarr --cumulative --png cumulative.png > cumulative.csv

    Columns: store_a, model_a, site_a, block_a, depth_a, rel_depth_a, the same with _b, heads (from
    the most local on), distance_px (their mean), metric (cka), value, std, low, high, spread (what
    std is), n_images.
    """
    run_analysis(
        cka_heads.run,
        cka_heads.plot,
        stores,
        outputs,
        resumes="" if parameters["no_cache"] else console.GRAMS_KEPT,
        **parameters,
    )
