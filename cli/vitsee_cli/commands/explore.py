"""vitsee explore: a page to click through the patches of a few images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import console, options
from vitsee_cli.declared import a_file, a_number
from vitsee_cli.model_options import recompute_options
from vitsee_cli.sections import RESULTS
from vitsee_cli.values import parse_path

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath

QUESTION = RESULTS
PICKS = ("diverse", "random", "outliers")
IMAGES = 12


@click.command()
@options.stores_argument
@click.option(
    "-o",
    "--output",
    metavar="PAGE",
    type=parse_path,
    default="explore.html",
    show_default=True,
    help="Where the page goes, a .html.",
)
@a_number(
    "--images",
    default=IMAGES,
    show_default=True,
    help="Pick so many images that all stores have.",
)
@click.option(
    "--pick",
    type=click.Choice(PICKS),
    default=PICKS[0],
    show_default=True,
    help="diverse: the most central ones of N groups of alike images (k-means of their "
    "vectors at the last site); random; outliers: those least like any other.",
)
@options.image_option("Show", "those picked", "the first store")
@a_file(
    "--ids",
    help="Show the images that the lines of FILE name, as --image does.  [default: none]",
)
@options.sites_option("blocks")
@click.option(
    "--recompute",
    is_flag=True,
    help="Compute the attention that a store lacks, and take the classifier that it does "
    "not keep, with its model.  [default: what is stored]",
)
@recompute_options
@click.option(
    "--title", metavar="TEXT", help="Of the page.  [default: the stores' names]"
)
@click.option(
    "--note", metavar="TEXT", default="", help="A line below the title.  [default: none]"
)
@options.seed_option
@options.force_option
@options.allow_partial_option
def command(
    stores: tuple[StorePath, ...],
    output: Path,
    image: tuple[str, ...],
    ids: Path | None,
    data: str | None,
    checkpoint: Path | None,
    trust_store: bool,
    force: bool,
    allow_partial: bool,
    **chosen: Any,
) -> None:
    """Write a page to click through patches.

    On it one clicks a patch and sees it in every layer of every model: a few images of the stores,
    the same in each, with the cosine of the chosen patch, or of a box of patches, with all others,
    as a strip over all layers, models below each other; the most similar patches of the other
    images; attention (of a store of extract --attention rows or full, or with --recompute), PCA
    colours, norms, and what the model's classifier says of each patch. The page is one file, works
    offline, by keys and on a phone, and an address ending in #image=3&patch=88&layer=7 leads to
    what it shows. Three stores and more whose names differ in a step alone, vit-step0.zarr,
    vit-step1000.zarr, are a training: a slider chooses the step that is shown.

    Tokens are reduced to as few numbers of 8 bits as keep their cosines, in a page of some MB; the
    error that this makes is measured, and printed. Large grids are shown as means of 2 x 2 or 4 x 4
    patches.

    \b
      $ vitsee explore b16.zarr -o explore.html
      $ vitsee explore dino=a.zarr mae=b.zarr --images 24 --pick random -o both.html
      $ vitsee explore b16.zarr --image cat.jpg --image dog.jpg --recompute -o pets.html
    """
    from vitsee_core.images.selection import read_only
    from vitsee_core.models.provenance import Provenance
    from vitsee_core.pages.explore import explore
    from vitsee_core.runtime.machine import human_bytes, plural
    from vitsee_core.tables.files import check_new_files, check_output_path
    from vitsee_core.tables.formats import ending_of

    ending_of(output, (".html", ".htm"), "-o")
    check_new_files([output], force=force)
    check_output_path(output, images=data or "")
    image_names = [*image]
    if ids is not None:
        image_names += [line for _, line in read_only(ids, "--ids")]
    options.only_with(
        "images that are picked (no --image, --ids)", not image_names, "images", "pick"
    )
    options.only_with(
        "--recompute", chosen["recompute"], "checkpoint", "trust_store", "device"
    )
    chosen["title"] = chosen["title"] or ""
    page = explore(
        *options.open_stores(stores, allow_partial=allow_partial),
        output=output,
        image=image_names,
        origin=Provenance(data, checkpoint, trust_store),
        force=force,
        progress=console.Reporter("explore"),
        **chosen,
    )
    console.out(str(output))
    console.say(
        f"{plural(page.n_images, page.examples)}, {plural(page.n_sites, 'layers')}, "
        f"{human_bytes(output.stat().st_size)}; cosines are within {page.p99:.2g} of "
        "those of the stored features for 99 of 100 pairs of patches, within "
        f"{page.largest:.2g} for all"
    )
