"""vitsee normratio: what flows through the skips, and what through the branches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.sections import FLOW
from vitsee_core.analyses import normratio
from vitsee_core.statistics.skip_branch import TOKENS

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = FLOW


@click.command()
@options.defaults_of(normratio.run)
@options.stores_argument
@options.output_options
@options.replicates_option
@options.metric_option(
    normratio.METRICS,
    "all but the norms",
    "norm_ratio: |z| / |f(z)|, mean over images; _median and _geomean likewise; cos_branch: "
    "cosine of z and f(z); cos_out: of z and z + f(z); skip_norm, branch_norm: |z|, |f(z)|.",
)
@click.option(
    "--sites",
    metavar="SUBLAYER",
    multiple=True,
    default=("blocks",),
    show_default="every residual sublayer",
    help="Sublayers by name, glob or kind (blocks.3.attn, 'blocks.1?.mlp', layer1.0, attn, mlp); "
    "blocks.-1.mlp counts from the end. Repeatable.",
)
@options.tokens_option("each", TOKENS, multiple=True)
@options.images_option
@options.seed_option
@options.jobs_option
@options.dask_option("slabs")
@options.memory_option
@options.allow_partial_option
def command(stores: tuple[StorePath, ...], outputs: Outputs, **parameters: Any) -> None:
    """Compare each residual sublayer's skip with its branch.

    A sublayer (attention, MLP, residual block) adds its branch f(z) to its skip z. Where |z| /
    |f(z)| is high the token passes through, where it is low the branch rewrites it (Raghu et al.
    2021, Figs. 7, E.1, E.2). Reads the dot products that extract stores by default, in seconds;
    activations are not needed.

    \b
      $ vitsee normratio b16.zarr -o ratio.csv --png ratio.png
      $ vitsee normratio b16.zarr r50.zarr --tokens cls --tokens patches --png both.png > both.csv
      $ vitsee normratio b16.zarr --metric norm_ratio --sites mlp --tokens 0,0 --tokens 2,1

    --tokens each: every token; cls; prefix: every kind of prefix token, registers as their mean;
    patches: the mean over patches (locations of a CNN); all: prefix and patches; flat: all tokens
    of an image as one vector (Walmer et al. 2023).

    Columns: store, model, site (the sublayer), block, depth, rel_depth, token (cls, reg0,
    registers, patches, flat; empty for a patch), row, col, metric, value, std and the 95 % interval
    low, high over images, n_images. The figure shows tokens against sublayers, and means against
    depth.
    """
    run_analysis(normratio.run, normratio.plot, stores, outputs, **parameters)
