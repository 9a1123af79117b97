"""vitsee erf: how far each layer's centre sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.sections import FLOW
from vitsee_core.analyses import erf

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = FLOW


@click.command()
@options.defaults_of(erf.run)
@options.stores_argument
@options.output_options
@options.replicates_option
@options.metric_option(
    erf.METRICS,
    "all",
    "radius50_px, radius90_px: circle with half and 90 % of the field's mass, in pixels; "
    "offset_px: its centre from the image's; gradient: the field itself.",
)
@options.sites_option("all", show_default="every site with a receptive field")
@options.images_option
@options.seed_option
@options.allow_partial_option
def command(stores: tuple[StorePath, ...], outputs: Outputs, **parameters: Any) -> None:
    """Measure effective receptive fields.

    How far the centre of a layer sees: its gradient with respect to the input pixels, in absolute
    value, averaged over images (Raghu et al. 2021, Figs. 6, C.1 to C.4). Needs `vitsee extract
    --erf 256`; sites after the residual sum (blocks) and before it (the branches of residual) are
    just different sites.

    \b
      $ vitsee extract vit_base_patch16_224 --data photos --erf 256 --sites residual -o b16.zarr
      $ vitsee erf b16.zarr -o erf.csv --png erf.png
      $ vitsee erf b16.zarr r50.zarr --sites blocks --png both.png > both.csv
      $ vitsee erf b16.zarr --metric radius50_px --sites '*.attn.branch'

    --images rounds up to whole slabs, as fields are kept as their sums.

    Columns: store, model, site, block, depth, rel_depth, row, col (of gradient: the first pixel of
    each square of the field; else empty), metric, value, std and the 95 % interval low, high over
    images (from 10 slabs on), n_images. The figure shows each site's field, and the radii against
    depth.
    """
    run_analysis(erf.run, erf.plot, stores, outputs, **parameters)
