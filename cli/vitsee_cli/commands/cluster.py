"""vitsee cluster: whether clusters of images are classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.mask_options import segment_options
from vitsee_cli.sections import KNOWLEDGE
from vitsee_core.analyses import cluster
from vitsee_stores.token_selection import VECTOR_WORDS

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = KNOWLEDGE


@click.command()
@options.defaults_of(cluster.run)
@options.stores_argument
@options.output_options
@options.replicates_option
@options.sites_option("blocks")
@options.tokens_option(
    None, VECTOR_WORDS, show_default="cls where a site has a class token, else mean (over patches)"
)
@click.option(
    "--k",
    metavar="K",
    type=click.IntRange(min=1),
    show_default="the number of classes; walmer: 80",
    help="Number of clusters.",
)
@click.option(
    "--seeds",
    "n_seeds",
    metavar="N",
    type=click.IntRange(min=1),
    help="Runs of k-means, with the seeds SEED, SEED + 1, ...",
)
@click.option(
    "--baseline",
    "baselines",
    type=click.Choice([*cluster.SEGMENT_BASELINES, "none"]),
    multiple=True,
    show_default="shuffled and random, with --masks image too",
    help="shuffled: the same clusters against shuffled labels; random: clusters of Gaussian "
    "features of the same shape; image: of segments, clusters of the mean over all patches of "
    "their image. Repeatable.",
)
@segment_options
@click.option(
    "--preset",
    type=click.Choice(cluster.PRESETS),
    help="walmer: k = 80, vit_analysis weights, crowds too, of the first 999 images of the masks. "
    "Options given beside it win.  [default: none]",
)
@options.images_option
@options.seed_option
@options.jobs_option
@options.dask_option("sites, and the masks of --masks,")
@options.memory_option
@options.allow_partial_option
def command(
    stores: tuple[StorePath, ...], outputs: Outputs, baselines: tuple[str, ...], **parameters: Any
) -> None:
    """Cluster images, objects or parts and compare with their classes.

    k-means on one vector per image; the clusters are compared with the labels by purity, NMI and
    ARI (Walmer et al. 2023, Figs. 7, 24, 25). With --masks on one vector per segment, the mean of
    the patches it lies on, weighted by its area in each (Figs. 8, 26, 27). k-means is
    scikit-learn's (k-means++, best of 10 starts, float32); each value is the mean over seeds.
    Labels are not used for clustering.

    \b
      $ vitsee cluster b16.zarr -o cluster.csv --png cluster.png
      $ vitsee cluster b16.zarr dino=vits16-dino.zarr --k 50 --images 5000 --png both.png
      $ vitsee cluster b16.zarr --tokens mean --seeds 10
      $ vitsee cluster coco.zarr --masks instances_val2017.json -o objects.csv --png objects.png
      $ vitsee cluster pin.zarr --masks train.json --masks val.json --masks test.json
      $ vitsee cluster parts.zarr --masks masks/ --background 40 --void none --segments 5000

    Columns: store, model, site, block, depth, rel_depth, k, metric (purity, nmi, ari; of segments
    segment_purity, ...), value, std over seeds, of segments the 95 % interval low, high over
    images, n_images, n_segments (of segments), baseline. The figure shows the three against depth.
    """

    if not baselines:
        of_images = parameters["masks"] is None
        baselines = cluster.BASELINES if of_images else cluster.SEGMENT_BASELINES
    if "none" in baselines:
        if len(set(baselines)) > 1:
            raise click.UsageError("--baseline none excludes the other baselines")
        baselines = ()
    run_analysis(
        cluster.run,
        cluster.plot,
        stores,
        outputs,
        baselines=baselines,
        **parameters,
    )
