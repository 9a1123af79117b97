"""vitsee attn-map: where each attention head looks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.declared import Listed
from vitsee_cli.model_options import recompute_options
from vitsee_cli.sections import ATTENTION
from vitsee_cli.values import WholeNumber
from vitsee_core.analyses import attn_map
from vitsee_core.figures.head_tiles import SCALES
from vitsee_core.models.provenance import Provenance
from vitsee_stores.selectors import parse_position

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.pages.report.outputs import Outputs

QUESTION = ATTENTION
CURVES = (*attn_map.NUMBERS, "sink")


def parse_query(text: str | tuple[int, ...]) -> tuple[int, ...]:
    """Return the cell of `ROW,COL` of the token grid, or of `FRAME,ROW,COL`."""
    cell = text if isinstance(text, tuple) else parse_position(text)
    if cell is None:
        raise click.BadParameter(
            f"{text!r}; expected ROW,COL of the token grid, e.g. 3,5"
        )
    return cell


@click.command()
@options.defaults_of(attn_map.run, attn_map.plot)
@options.stores_argument
@options.output_options
@click.option(
    "--kind",
    type=click.Choice(attn_map.KINDS),
    help="What to map: means over images (aligned: by offset from the query), or one "
    "number per head (prefix-mass, entropy), or attention sinks (several).  [default: "
    "none, with --image]",
)
@options.image_option("Map", "none", "the store", ", in place of a mean")
@click.option(
    "--query",
    metavar="ROW,COL",
    multiple=True,
    type=parse_query,
    show_default="none",
    help="With --image: map what this patch of the token grid (of clips FRAME,ROW,COL) "
    "attends to, too. Repeatable.",
)
@options.blocks_option("every block with attention; the last one with --image")
@click.option(
    "--heads",
    metavar="N",
    cls=Listed,
    type=WholeNumber(min=0),
    show_default="all",
    help="Heads of each block, counted from 0. Repeatable.",
)
@click.option(
    "--coverage/--no-coverage",
    default=None,
    show_default="in the picture, not in the table",
    help="With --kind aligned: divide each offset by the share of queries that have a "
    "key there, so that attention spread evenly is flat, or draw the mass as Walmer et "
    "al. do.",
)
@click.option(
    "--rollout-residual/--no-rollout-residual",
    help="With --kind rollout: multiply 0.5 A + 0.5 I, or A alone (from a store of "
    "--attention full, else recomputed).",
)
@click.option(
    "--scale",
    type=click.Choice(SCALES),
    help="Colours of the figure: one scale for all heads, or each head over its own "
    "range.",
)
@options.images_option
@options.seed_option
@recompute_options
@options.jobs_option
@options.dask_option("slabs (of a --kind but rollout)")
@options.memory_option
@options.allow_partial_option
def command(
    stores: tuple[StorePath, ...],
    outputs: Outputs,
    scale: str,
    coverage: bool | None,
    data: str | None,
    checkpoint: Path | None,
    trust_store: bool,
    **parameters: Any,
) -> None:
    """Map where each attention head looks.

    Means over images of what the class token or the patches attend to, head by head (Walmer et al.
    2023, Figs. 1, 2, 17), the same aligned by offset from the query (Figs. 3, 14, 18), attention
    rollout (Dosovitskiy et al. 2021, Figs. 6, 13), or one number per head, in seconds, from the
    summaries that extract stores by default. With --image, single images: the picture, the heads'
    maps and the rollout over it, from a store of extract --attention full or recomputed with the
    store's model. --kind sink: how much the most attended token gets (1: its even share), in how
    many images more than ten times that and at which kind of token, and the mutual information of
    queries and keys (0: all attend alike).

    \b
      $ vitsee attn-map b16.zarr --kind mean-cls -o cls.csv --png cls.png
      $ vitsee attn-map b16.zarr --kind aligned --scale head --png aligned.png > aligned.csv
      $ vitsee attn-map b16.zarr --kind entropy --sites blocks.-1
      $ vitsee attn-map b16.zarr --kind sink -o sink.csv --png sink.png
      $ vitsee attn-map b16.zarr --image 0 --image 7 --query 3,5 --png images.png > images.csv

    Columns: store, model, weights, site and block (the block), depth, rel_depth, row and col (of
    the key; the signed offset key minus query for aligned), head, metric, value, n_images; std and
    the 95 % interval low, high over images where there are numbers per head, or a rollout. Sinks
    have the metrics sink_max, sink_median (with --attention rows), sink_share (token: all kinds
    where empty) and qk_nmi. Single images have columns image and token (the query: cls, mean or
    ROW,COL) in place of n_images. Of clips maps have a column frame, the key's place in time, and
    the figure has a strip over time for each head.
    """
    if (parameters["kind"] is None) == (not parameters["image"]):
        raise click.UsageError("give either --kind or --image")
    options.only_with("--kind aligned", parameters["kind"] == "aligned", "coverage")
    options.only_with(
        "a --kind that is drawn as maps", parameters["kind"] not in CURVES, "scale"
    )
    # Left out (None), the picture is divided by the coverage, and the table is not.
    divides_picture = coverage is None or coverage
    divides_table = bool(coverage)
    run_analysis(
        attn_map.run,
        attn_map.ANALYSIS.draw,
        stores,
        outputs,
        drawing={"scale": scale, "coverage": divides_picture},
        coverage=divides_table,
        origin=Provenance(data, checkpoint, trust_store),
        **parameters,
    )
