"""`vitsee demo`: every command on the models and images that ship with vitsee, offline."""

from __future__ import annotations

from pathlib import Path

import click

from vitsee_cli import console
from vitsee_cli.values import parse_path
from vitsee_stores.errors import VitseeError


def steps(folder: Path) -> list[list[str]]:
    """The demo's commands, in order: what a user would type."""
    vit, resnet = str(folder / "vit.zarr"), str(folder / "resnet.zarr")
    layers = ["--sites", "blocks", "--sites", "norms"]
    vit_layers = [*layers, "--sites", "hidden"]
    kept = ["--sites", "head", "--inputs"]
    return [
        ["extract", "demo:vit", "--data", "demo:test", "-o", vit, *vit_layers, *kept],
        ["extract", "demo:resnet", "--data", "demo:test", "-o", resnet, *layers, *kept],
        ["info", vit],
        ["attn-dist", vit, *_results(folder, "attn-dist")],
        ["cka", vit, *vit_layers, *_results(folder, "cka-vit")],
        ["cka", resnet, *layers, *_results(folder, "cka-resnet")],
        ["cka", vit, resnet, *vit_layers, *_results(folder, "cka-vit-resnet")],
    ]


def _results(folder: Path, name: str) -> list[str]:
    """Where a step's table and picture go."""
    return ["-o", f"{folder / name}.csv", "--png", f"{folder / name}.png", "--force"]


@click.command(short_help="Run vitsee on its own models and images.")
@click.option(
    "-o",
    "--output",
    metavar="FOLDER",
    type=parse_path,
    default="demo-out",
    show_default=True,
    help="Where stores, tables and pictures go.",
)
@click.pass_context
def command(ctx: click.Context, output: Path) -> None:
    """Extract the two demo models (a ViT and a ResNet trained on Fashion-MNIST) over the demo's
    2,000 test images, and draw each figure. Offline; a few minutes on two cores.

    \b
      vitsee demo
      vitsee demo -o /tmp/demo
    """
    import shlex

    from vitsee_cli.main import main

    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise VitseeError(f"cannot make the folder {output}: {reason}") from None
    for step in steps(output):
        console.say(f"$ vitsee {shlex.join(step)}")
        if code := main.main(step, prog_name="vitsee", standalone_mode=False, parent=ctx):
            ctx.exit(code)
    console.say(f"look at {output}/*.png")
