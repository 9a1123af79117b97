"""vitsee saliency: how well each head's attention covers the objects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.mask_options import background_option, panoptic_option, void_option
from vitsee_cli.model_options import recompute_options
from vitsee_cli.sections import ATTENTION
from vitsee_cli.values import SHARE, parse_path
from vitsee_core.analyses import saliency
from vitsee_core.masks import RULES
from vitsee_core.masks.scoring import TOKENS
from vitsee_core.provenance import Provenance

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = ATTENTION


@click.command()
@options.defaults_of(saliency.run)
@options.stores_argument
@options.output_options
@options.replicates_option
@click.option(
    "--masks",
    metavar="PATH",
    type=parse_path,
    required=True,
    help="A folder of PNG masks, whose paths or names are the images' but for the ending, or a "
    "COCO .json file.",
)
@click.option(
    "--tokens",
    multiple=True,
    type=click.Choice(TOKENS),
    show_default="both, mean without a class token",
    help="Whose attention: the class token's, or the mean over patches. Repeatable.",
)
@click.option(
    "--mass",
    metavar="SHARE",
    type=SHARE,
    help="Keep the most attended tokens with this share of the attention.",
)
@click.option(
    "--foreground",
    type=click.Choice(RULES),
    help="Which tokens are foreground: half of their pixels are, or any.",
)
@background_option
@void_option
@panoptic_option
@click.option(
    "--best",
    type=click.Choice(saliency.BESTS),
    help="head: flag each block's head with the highest mean over images. image: also add the mean "
    "of each image's best head, as the released code does; an oracle.",
)
@options.blocks_option("every block with attention")
@options.images_option
@options.seed_option
@recompute_options
@options.jobs_option
@options.dask_option("masks and slabs")
@options.memory_option
@options.allow_partial_option
def command(
    stores: tuple[StorePath, ...],
    outputs: Outputs,
    data: str | None,
    checkpoint: Path | None,
    trust_store: bool,
    **parameters: Any,
) -> None:
    """Measure how well each head's attention covers the objects.

    The most attended tokens that hold 60 % of a head's attention are compared with the union of the
    ground-truth masks, as intersection over union, averaged over images (Walmer et al. 2023, Figs.
    5, 16). Masks are resized and cropped as the images were. Images without a mask or without a
    foreground token are left out and counted. Reads stores of extract --attention rows; for others
    the attention is recomputed with the store's model.

    \b
      $ vitsee extract vit_base_patch16_224 --data voc/JPEGImages --attention rows -o b16.zarr
      $ vitsee saliency b16.zarr --masks voc/SegmentationClass -o iou.csv --png iou.png
      $ vitsee saliency b16.zarr dino.zarr --masks instances_val2017.json --png both.png > both.csv
      $ vitsee saliency b16.zarr --masks saliency/ --void none --tokens cls --best image

    Attention is read in float16, as it is stored: compared with float32, nearly equal tokens at the
    cut swap places, which changes a head's mean by up to 6e-4.

    PNG masks have one number per pixel: 0 is background, 255 void, all else foreground. Of a COCO
    file every annotation is foreground, crowd regions are void; of a panoptic one things are
    foreground, stuff is background. Tokens of which more than half is void are left out.

    Columns: store, model, site and block (the block), depth, rel_depth, token (cls or mean: whose
    attention), head, best (head: the block's best one), metric (iou), value, std and the 95 %
    interval low, high over images, n_images, baseline. Rows with a baseline give what maps that
    ignore the image reach: uniform (chance decides among equal tokens), centre (a Gaussian about
    the middle), random.
    """
    run_analysis(
        saliency.run,
        saliency.plot,
        stores,
        outputs,
        origin=Provenance(data, checkpoint, trust_store),
        **parameters,
    )
