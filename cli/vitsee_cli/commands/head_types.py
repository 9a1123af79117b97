"""vitsee head-types: strict, soft, axial and offset local, repeating and global attention heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.sections import ATTENTION
from vitsee_cli.values import POSITIVE
from vitsee_core.analyses import head_types
from vitsee_core.attention.head_geometry import Thresholds

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.outputs import Outputs

QUESTION = ATTENTION

THRESHOLDS = {
    "strict": "strict local: excess mass on the query itself, at least.",
    "focus": "local: excess mass around the place where it gathers; axial: along an axis.",
    "offset": "offset local: cells from the query to that place, at least.",
    "elongation": "axial local: how much longer than wide, at least.",
    "repetition": "repeating: how far all queries share their keys (1: wholly), at least.",
    "keys": "repeating: share of the keys in use, at most.",
}


def threshold_options(command: Any) -> Any:
    """One option per threshold."""
    return options.apply(
        command,
        [
            click.option(
                f"--{name}",
                metavar="X",
                type=POSITIVE,
                default=getattr(Thresholds, name),
                show_default=True,
                help=text,
            )
            for name, text in THRESHOLDS.items()
        ],
    )


@click.command()
@options.defaults_of(head_types.run)
@options.stores_argument
@options.output_options
@options.replicates_option
@options.blocks_option("every block with attention")
@threshold_options
@click.option(
    "--radius",
    metavar="CELLS",
    type=click.IntRange(min=1),
    help="Half the side of the square in which a local head's mass is counted.",
)
@options.images_option
@options.seed_option
@options.jobs_option
@options.dask_option("slabs")
@options.memory_option
@options.allow_partial_option
def command(stores: tuple[StorePath, ...], outputs: Outputs, **parameters: Any) -> None:
    """Classify attention heads by what they attend to.

    Strict, soft, axial and offset local heads (Walmer et al. 2023, Figs. 3, 14) by where their
    aligned maps have their mass, offset ones with direction and distance; repeating ones (their
    sparse repeating patterns) by the few keys that all queries share; the rest are global. Shares
    of mass are measured as their excess over uniform attention: 0 is as uniform, 1 is all of it.
    Reads the summaries that extract stores by default.

    \b
      $ vitsee head-types b16.zarr -o types.csv --png types.png
      $ vitsee head-types mae=a.zarr dino=b.zarr --png both.png > both.csv
      $ vitsee head-types b16.zarr --strict 0.4 | grep same_type_thresholds

    Columns: store, model, site and block (the block), depth, rel_depth, row, col, head, type,
    detail (the direction of an offset head; row, column or cross of an axial one), metric, value,
    std, low, high, n_images. One row per head and score; same_type_thresholds is the share of other
    thresholds (each one times 0.8 and times 1.25) that give the same type, same_type_slabs the
    share of jackknife samples (the images without one slab) that do. Rows of the metric aligned are
    the map of one head of each type, row and col the offset from the query. The figure shows counts
    by block and these maps.
    """
    values = {name: parameters.pop(name) for name in THRESHOLDS}
    run_analysis(
        head_types.run,
        head_types.plot,
        stores,
        outputs,
        thresholds=Thresholds(**values),
        **parameters,
    )
