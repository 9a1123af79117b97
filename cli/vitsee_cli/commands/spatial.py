"""vitsee spatial: local similarity, oversmoothing, frequencies and position of patch tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.mask_options import background_option, panoptic_option, void_option
from vitsee_cli.sections import FLOW
from vitsee_cli.values import parse_path
from vitsee_core.analyses import spatial

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = FLOW


@click.command()
@options.defaults_of(spatial.run)
@options.stores_argument
@options.output_options
@options.replicates_option
@options.metric_option(spatial.METRICS, "all, srss with --masks")
@click.option(
    "--masks",
    metavar="PATH",
    type=parse_path,
    help="A folder of PNG masks, whose paths or names are the images' but for the ending, or a "
    "COCO .json file: adds srss.  [default: no srss]",
)
@background_option
@void_option
@panoptic_option
@options.sites_option("blocks")
@options.images_option
@options.seed_option
@options.jobs_option
@options.dask_option("slabs, and the masks of --masks,")
@options.memory_option
@options.allow_partial_option
def command(stores: tuple[StorePath, ...], outputs: Outputs, **parameters: Any) -> None:
    """Measure the spatial structure of patch tokens.

    Whether neighbours are more alike than distant patches (LDS, CDS; with masks SRSS), whether all
    patches become alike (RMSC, mean cosine), which frequencies a layer keeps, and how much of the
    tokens' variance the image and the position explain. These, and not accuracy, predict how well
    features guide image generation (Singh et al. 2025).

    \b
      $ vitsee spatial b16.zarr -o spatial.csv --png spatial.png
      $ vitsee spatial mae=a.zarr dino=b.zarr --png both.png > both.csv
      $ vitsee spatial b16.zarr --masks voc/SegmentationClass --metric srss > srss.csv

    lds and cds use distances of a 16 x 16 grid as published; lds_scaled and cds_scaled distances in
    proportion to the grid.

    Columns: store, model, site, block, depth, rel_depth, frequency (of fourier_radial, in units of
    pi per cell), null (of the shares: what noise would give), metric, value, std and the 95 %
    interval low, high over images, n_images.
    """
    run_analysis(spatial.run, spatial.plot, stores, outputs, **parameters)
