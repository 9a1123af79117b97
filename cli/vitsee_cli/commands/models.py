"""vitsee models: names, sizes, and which analyses apply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import console, options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.declared import a_number, complete_from, model_names
from vitsee_cli.sections import STORES
from vitsee_core.study import catalogue

if TYPE_CHECKING:
    from vitsee_core.pages.report.outputs import Outputs

QUESTION = STORES


@click.command()
@options.defaults_of(catalogue.run)
@click.argument("pattern", metavar="GLOB", shell_complete=complete_from(model_names))
@click.option(
    "--names", "names_only", is_flag=True, help="Names, tags and input sizes only."
)
@click.option(
    "--prove",
    is_flag=True,
    help="Prove each with random weights on pixels, as extract does: some seconds each.  "
    "[default: from shapes]",
)
@a_number(
    "--limit",
    help="Inspect N architectures at most, about a second each; more are refused.",
)
@options.json_option
@options.table_options
def command(pattern: str, outputs: Outputs, as_json: bool, **parameters: Any) -> None:
    """List models and the analyses they support.

    Parameters, input size, blocks, and the commands that apply.

    GLOB is an architecture of timm's, or a pattern of architectures or of NAME.TAG (tags name
    pretrained weights), or of another source's ('torchvision:vit_*'); also local-dir:FOLDER,
    hf-hub:OWNER/NAME, demo:vit, model.py:build. No weights are loaded: each model is run once on
    shapes alone, which does not reveal attention or branches of another kind (XCiT, MViTv2);
    --prove does.

    \b
      $ vitsee models vit_base_patch16_224
      $ vitsee models 'vit_small_*dino*'
      $ vitsee models 'resnet50*' --names
      $ vitsee models 'torchvision:*' --names
      $ vitsee models '*.*clip*' --names -o clip.csv
      $ vitsee models 'deit3_*' --names --json

    \b
    Columns
      model, tags            the architecture, and its pretrained weights (NAME.TAG)
      n_params, flops        with the default arguments; flops per image
      height, width          input size in pixels
      n_blocks               of all stages
      heads                  per block; several numbers where blocks differ
      grid                   rows x columns of the last site that lies on the image
      analyses               the commands that its shapes allow
      left_out               the others, and why
    """
    if as_json and outputs.csv is not None:
        raise click.UsageError("--json is of stdout: give -o a .json file instead")
    if as_json:
        from vitsee_core.tables.formats import table_bytes

        progress = console.Reporter("models")
        table = catalogue.run(pattern, **parameters, progress=progress)
        console.out(table_bytes(table.written, ".json").decode().rstrip())
        return
    run_analysis(catalogue.run, None, (), outputs, pattern=pattern, **parameters)
