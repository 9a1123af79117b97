"""vitsee models: timm's names, sizes, and which analyses apply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.sections import STORES
from vitsee_core import catalogue

if TYPE_CHECKING:
    from vitsee_core.outputs import Outputs

QUESTION = STORES


@click.command()
@options.defaults_of(catalogue.run)
@click.argument("pattern", metavar="GLOB")
@click.option("--names", "names_only", is_flag=True, help="Names, tags and input sizes only.")
@click.option(
    "--prove",
    is_flag=True,
    help="Prove each with random weights on pixels, as extract does: some seconds each.  [default: "
    "from shapes]",
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=1),
    help="Inspect N architectures at most, about a second each; more are refused.",
)
@options.table_options
def command(pattern: str, outputs: Outputs, **parameters: Any) -> None:
    """List timm's models and the analyses they support.

    Parameters, input size, blocks, and the commands that apply.

    GLOB is an architecture, or a pattern of architectures or of NAME.TAG (tags name pretrained
    weights); also local-dir:FOLDER, hf-hub:OWNER/NAME, demo:vit. No weights are loaded: each model
    is run once on shapes alone, which does not reveal attention or branches of another kind (XCiT,
    MViTv2); --prove does.

    \b
      $ vitsee models vit_base_patch16_224
      $ vitsee models 'vit_small_*dino*'
      $ vitsee models 'resnet50*' --names
      $ vitsee models '*.*clip*' --names -o clip.csv

    \b
    Columns
      model, tags            the architecture, and its pretrained weights (NAME.TAG)
      n_params               with the default arguments
      height, width          input size in pixels
      n_blocks               of all stages
      analyses               the commands that its shapes allow
      left_out               the others, and why
    """
    run_analysis(*(catalogue.run, None, (), outputs), pattern=pattern, **parameters)
