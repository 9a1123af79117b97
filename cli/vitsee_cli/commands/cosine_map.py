"""vitsee cosine-map: which patches a chosen patch resembles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.data_options import recompute_data_option
from vitsee_cli.sections import KNOWLEDGE
from vitsee_core.analyses import cosine_map
from vitsee_core.figures.cosine_sheets import SCALES
from vitsee_core.patch_maps.photos import SHOWN
from vitsee_core.patch_maps.spots import MIDDLE, Spot
from vitsee_core.provenance import Provenance
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = KNOWLEDGE


def parse_spot(text: str) -> str:
    """A patch, as `Spot` has it."""
    try:
        return Spot.parse(text).text
    except VitseeError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@options.defaults_of(cosine_map.run, cosine_map.plot)
@options.stores_argument
@options.output_options
@options.image_option("Choose patches of", f"the first {SHOWN}", "the first store")
@click.option(
    "--at",
    metavar="PATCH",
    multiple=True,
    type=parse_spot,
    show_default=MIDDLE,
    help="The patch at ROW,COL of the token grid (3,5), at X,Ypx of the original image (120,80px: "
    "the same place in every grid), or in the middle. Repeatable.",
)
@click.option(
    "--to",
    metavar="ID",
    multiple=True,
    show_default="none",
    help="Also map the patches of this other image. Repeatable.",
)
@click.option(
    "--offsets",
    is_flag=True,
    help="Means over all images by the offset between two patches, in place of single images.",
)
@click.option(
    "--scale",
    type=click.Choice(SCALES),
    help="Colours of the figure: one scale for all maps, or each map over its own range.",
)
@options.sites_option("blocks")
@options.images_option
@options.seed_option
@recompute_data_option
@options.jobs_option
@options.dask_option("slabs (of --offsets)")
@options.memory_option
@options.allow_partial_option
def command(
    stores: tuple[StorePath, ...],
    outputs: Outputs,
    scale: str,
    data: str | None,
    **parameters: Any,
) -> None:
    """Map which patches a chosen patch resembles.

    The cosine of one patch's features with those of every patch, in its image and in others, layer
    by layer and model by model, beside the photograph with the patch marked.

    \b
      $ vitsee cosine-map b16.zarr --image cat.jpg --at 120,80px --png cat.png > cat.csv
      $ vitsee cosine-map a.zarr b.zarr --image cat.jpg --to dog.jpg --png both.png > both.csv
      $ vitsee cosine-map b16.zarr --offsets --png offsets.png > offsets.csv

    Columns: store, model, site, block, depth, rel_depth, token (the chosen patch in the site's
    grid), row, col, query (its image), image (the one mapped), at, metric, value. Metrics: cosine;
    of each chosen patch cosine_mean over the others of its image, cosine_neighbours, and
    cosine_area, the share of patches above the middle between that mean and 1. --offsets: row, col
    (signed, key minus query), value, std and the 95 % interval low, high over images, n_images.
    """
    run_analysis(
        cosine_map.run,
        cosine_map.plot,
        stores,
        outputs,
        drawing={"scale": scale},
        origin=Provenance(data),
        **parameters,
    )
