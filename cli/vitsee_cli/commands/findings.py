"""vitsee findings: what the papers found, looked for in one's own stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import console, options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.declared import Listed
from vitsee_cli.sections import RESULTS
from vitsee_cli.values import StorePath

if TYPE_CHECKING:
    from vitsee_core.pages.report.outputs import Outputs

QUESTION = RESULTS


@click.command()
@options.stores_argument
@options.table_options
@click.option(
    "--finding",
    "findings",
    metavar="NAME",
    cls=Listed,
    help="Only this finding. Repeatable.  [default: all that the stores are for]",
)
@options.images_option
@options.seed_option
@options.device_option
@options.memory_option
@options.jobs_option
@options.allow_partial_option
def command(stores: tuple[StorePath, ...], outputs: Outputs, **parameters: Any) -> None:
    """Look for what the papers found in your own models.

    Each finding of Raghu et al. 2021, Walmer et al. 2023 and Dosovitskiy et al. 2021 is a number
    that is above 0 where it holds, with an interval over images. Stores with attention stand for
    `vit`, others for `resnet`; a store named vit-gap, vit-masked, vit-10pct, vit-seed1, vit-noskip
    or mixer for the finding's model of that name. NAME-train is over images to learn from.

    \b
      $ vitsee findings b16.zarr r50.zarr -o findings.csv
      $ vitsee findings vit=b16.zarr vit-gap=gap.zarr r50.zarr --finding place-gap -o gap.csv
      $ vitsee findings study/stores/*.zarr -o findings.csv

    What a finding takes and a store does not keep (norms and hidden layers, receptive fields,
    pixels) is said in its row. CKA is of the layers that are there.

    \b
    Columns: name, claim, stores,
      value, std, low, high, n_blocks, unit   the number and its interval
      verdict                                 holds, does not hold, undecided, not measured
      reason                                  why it was not measured
      section, source, statistic              where it is from, what is computed
    """
    from vitsee_core.study.findings import verdicts

    with console.each_line_once():  # several findings are of one table
        run_analysis(verdicts.run, None, stores, outputs, **parameters)
