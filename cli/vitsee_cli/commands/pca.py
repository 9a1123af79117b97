"""vitsee pca: principal components of patches as colours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.data_options import recompute_data_option
from vitsee_cli.sections import KNOWLEDGE
from vitsee_core.analyses import pca
from vitsee_core.patch_maps.photos import SHOWN
from vitsee_core.patch_maps.projection import FOREGROUND
from vitsee_core.provenance import Provenance

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = KNOWLEDGE


@click.command()
@options.defaults_of(pca.run)
@options.stores_argument
@options.output_options
@options.replicates_option
@options.image_option("Show", f"the first {SHOWN}", "the first store")
@options.sites_option("blocks")
@click.option(
    "--components",
    metavar="K",
    type=click.IntRange(min=3),
    help="How many components the table has; the picture shows the first three.",
)
@click.option("--normalise", is_flag=True, help="Bring every token to length 1 first.")
@click.option(
    "--foreground",
    type=click.Choice(FOREGROUND),
    help="Leave out patches on one side of the first component and compute those of the others "
    "anew; centre: keep the side that the middle of the images is on.",
)
@click.option(
    "--fit-shown",
    is_flag=True,
    help="Components of the images shown alone.  [default: of all images]",
)
@click.option(
    "--align/--no-align",
    help="Turn the scores of every layer and model to be nearest to the reference's, so that "
    "colours compare.",
)
@click.option(
    "--reference",
    metavar="SITE",
    show_default="the last one",
    help="The site of the first store that the others are turned to.",
)
@options.images_option
@options.seed_option
@recompute_data_option
@options.jobs_option
@options.dask_option("slabs")
@options.memory_option
@options.allow_partial_option
def command(
    stores: tuple[StorePath, ...], outputs: Outputs, data: str | None, **parameters: Any
) -> None:
    """Show patch tokens as colours: their principal components.

    The first three principal components of each layer's patches, over all images, as red, green and
    blue: patches of like colours have like features. Layers and models on one sheet beside the
    photographs, in colours that compare (orthogonal Procrustes), laid on what each model saw.

    \b
      $ vitsee pca b16.zarr --png pca.png > pca.csv
      $ vitsee pca mae=a.zarr dino=b.zarr --sites depth:0.5 --sites last --png both.png > both.csv
      $ vitsee pca b16.zarr --image cat.jpg --foreground centre --png cat.png > cat.csv

    One pass over all patches (n D^2 multiply-adds a site) and one over some images; memory does not
    grow with the images. --fit-shown: as in demonstrations of DINOv2, of a few images only.

    Columns: store, model, site, block, depth, rel_depth, row, col, image, component, half_a, half_b
    (explained variance of two halves of the images), metric (explained_variance, axis_agreement:
    absolute cosine of the halves' axes, score), value, std and the 95 % interval low, high over
    images, n_images, n_examples. What makes colours of scores is in the sidecar.
    """
    run_analysis(pca.run, pca.plot, stores, outputs, origin=Provenance(data), **parameters)
