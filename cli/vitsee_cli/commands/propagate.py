"""vitsee propagate: masks carried through videos."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.declared import Listed, a_file, with_usage_errors
from vitsee_cli.sections import KNOWLEDGE, SectionedCommand, section
from vitsee_cli.values import POSITIVE, WholeNumber, parse_path
from vitsee_core.analyses import propagate
from vitsee_core.analyses.propagate.propagation_settings import (
    PRESETS,
    SEEDS,
    UPSAMPLES,
    WINDOWS,
)
from vitsee_core.truth.masks.sources import VOID_OPTION, parse_void

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.pages.report.outputs import Outputs

QUESTION = KNOWLEDGE
WALMER = PRESETS["walmer"].settings


def parse_radius(text: str) -> dict[str, float]:
    """Return the parameter of the analysis for `12` (tokens), `192px` or `none`."""
    if text == "none":
        return {"radius": math.inf}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(px)?", text)
    if match is None:
        raise click.BadParameter(
            f"{text!r}; expected tokens like 12, pixels like 192px, or none"
        )
    # The analysis has a parameter for each unit; one of both is set.
    return {"radius_px" if match[2] else "radius": float(match[1])}


@click.command(cls=SectionedCommand)
@options.defaults_of(propagate.run)
@options.stores_argument
@section(
    "Videos",
    [
        click.option(
            "--masks",
            metavar="DIR",
            type=parse_path,
            required=True,
            help="The folder of DAVIS, or one with a folder of PNG masks per video, a "
            "mask per frame: 0 is background, 1, 2, ... are objects; 255, with --void none, is "
            "one more (DAVIS-2016).",
        ),
        click.option(
            "--void",
            metavar="VALUE",
            type=with_usage_errors(parse_void),
            show_default="255",
            help=VOID_OPTION.help,
        ),
        a_file(
            "--only",
            show_default="every video of the store",
            help="The videos to use, a name per line: ImageSets/2017/val.txt.",
        ),
        options.sites_option(
            show_default="blocks; norm with the presets dino and dinov3"
        ),
    ],
)
@section(
    "Propagation",
    [
        click.option(
            "--preset",
            type=click.Choice(PRESETS),
            show_default="walmer",
            help="Published settings, which the options below change. dino: the same at "
            "the final norm. dinov3: temperature 0.2, a circle, nearest, the final norm.",
        ),
        click.option(
            "--context",
            metavar="N",
            type=WholeNumber(min=0),
            show_default=f"{WALMER.context:g}",
            help="Look at the last N frames, beside the first.",
        ),
        click.option(
            "--radius",
            metavar="R",
            type=parse_radius,
            show_default=f"{WALMER.radius:g}",
            help="Look R tokens far, or R pixels (192px), or anywhere (none).",
        ),
        click.option(
            "--neighbourhood",
            type=click.Choice(WINDOWS),
            show_default=WALMER.neighbourhood,
            help="The shape of what is looked at.",
        ),
        click.option(
            "--topk",
            metavar="K",
            type=WholeNumber(min=1),
            show_default=f"{WALMER.topk:g}",
            help="Take the K most similar tokens of all these frames together, and those "
            "that tie.",
        ),
        click.option(
            "--temperature",
            metavar="T",
            type=POSITIVE,
            show_default=f"{WALMER.temperature:g}",
            help="They count exp(cosine / T).",
        ),
        click.option(
            "--first-labels",
            type=click.Choice(SEEDS),
            show_default=WALMER.first_labels,
            help="The first mask's labels of tokens: of the pixel in the middle, or "
            "shares of area, which lose no object.",
        ),
        click.option(
            "--upsample",
            type=click.Choice(UPSAMPLES),
            show_default=WALMER.upsample,
            help="From labels of tokens to labels of pixels.",
        ),
    ],
)
@section(
    "Results",
    [
        options.output_options,
        options.replicates_option,
        click.option(
            "--metric",
            "metrics",
            type=click.Choice(propagate.METRICS),
            cls=Listed,
            show_default="all",
            help="Scores of the table. Repeatable.",
        ),
        click.option(
            "--baseline",
            "baselines",
            type=click.Choice([*propagate.BASELINES, "none"]),
            cls=Listed,
            show_default="all three",
            help="still: the first mask stays. grid: each frame's own mask to the grid "
            "and back, which is what the grid allows. random: Gaussian tokens. "
            "Repeatable.",
        ),
        click.option(
            "--per-video", is_flag=True, help="Add rows for each video and each object."
        ),
        click.option(
            "--save",
            metavar="DIR",
            type=parse_path,
            help="Make DIR, with the masks found as PNG files in the layout of DAVIS, so "
            "that its own evaluation can read them.  [default: they are not kept]",
        ),
    ],
)
@options.seed_option
@options.device_option
@options.jobs_option
@options.dask_option("videos")
@options.memory_option
@options.allow_partial_option
def command(
    stores: tuple[StorePath, ...],
    outputs: Outputs,
    baselines: tuple[str, ...],
    radius: dict[str, float] | None,
    save: Path | None,
    **parameters: Any,
) -> None:
    """Propagate the first mask of each video to its other frames.

    The labels of a video's first mask go from frame to frame to the tokens that are most similar,
    and the masks that come out are compared with the annotation as DAVIS-2017 does: region
    similarity J and contour accuracy F (Walmer et al. 2023, Figs. 10 left, 30, Table 4; Caron et
    al. 2021). Nothing is trained. Frames are in the store one after the other: extract with --order
    dataset. A store of clips (extract --frames) holds each video in a row: of it the sampled frames
    are used, and of stores of images beside it the same ones. What it will cost is logged first.

    \b
      $ vitsee extract vit_base_patch16_224 --data DAVIS/JPEGImages/480p \\
          --only DAVIS/ImageSets/2017/val.txt --order dataset --short-side 448 --tiles \\
          --slab 32 -o davis.zarr
      $ vitsee propagate davis.zarr --masks DAVIS -o jf.csv --png jf.png
      $ vitsee propagate normal=224.zarr dense=davis.zarr --masks DAVIS --png both.png > both.csv
      $ vitsee propagate davis.zarr --masks DAVIS --sites last --save results --per-video > last.csv

    Columns: store, model, weights, site, block, depth, rel_depth, with --per-video video and
    object, metric (jf, j, f, j_recall, f_recall, j_decay, f_decay), value (a mean over objects),
    std over objects, the 95 % interval low, high (jackknife over videos), n_objects, n_videos,
    n_images (frames scored), baseline.
    """
    # None: the preset decides.
    radii: dict[str, Any] = {"radius": None, "radius_px": None}
    if radius is not None:
        radii.update(radius)
    if "none" in baselines:
        if len(set(baselines)) > 1:
            raise click.UsageError("--baseline none excludes the other baselines")
        baselines = ()
    run_analysis(
        propagate.run,
        propagate.ANALYSIS.draw,
        stores,
        outputs,
        baselines=baselines,
        save=save,
        **radii,
        **parameters,
    )
