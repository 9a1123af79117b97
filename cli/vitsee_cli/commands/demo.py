"""`vitsee demo`: every command on the models and images that ship with vitsee, offline."""

from __future__ import annotations

from pathlib import Path

import click

from vitsee_cli import console
from vitsee_cli.sections import STORES
from vitsee_cli.values import parse_folder
from vitsee_stores.errors import VitseeError, reason

QUESTION = STORES


def steps(folder: Path) -> list[list[str]]:
    """The demo's commands, in order: what a user would type."""
    models = ("vit", "resnet")
    vit, resnet = (str(folder / f"{name}.zarr") for name in models)
    layers = ["--sites", "blocks", "--sites", "norms"]
    vit_layers = [*layers, "--sites", "hidden"]
    kept = ["--sites", "head", "--inputs", "--erf", "256"]
    pooled = ["--tokens", "pooled", "--attention", "none", "--no-residual"]
    two_kinds = ["--tokens", "cls", "--tokens", "patches", "--metric", "norm_ratio"]
    tokens = ["--sites", "blocks.0.out", "--sites", "blocks.5.out", "--tokens", "3,4"]
    few = ["--shots", "10"]
    probes = [f"{folder / f'probe-{name}'}.csv" for name in models]
    return [
        ["extract", "demo:vit", "--data", "demo:test", "-o", vit, *vit_layers, *kept],
        ["extract", "demo:resnet", "--data", "demo:test", "-o", resnet, *layers, *kept],
        *(
            ["extract", f"demo:{name}", "--data", "demo:train", "-o", _train(folder, name), *pooled]
            for name in models
        ),
        ["info", vit],
        ["attn-dist", vit, *_results(folder, "attn-dist")],
        ["attn-map", vit, "--kind", "mean-cls", *_results(folder, "attn-map-cls")],
        ["attn-map", vit, "--kind", "aligned", *_results(folder, "attn-map-aligned")],
        ["head-types", vit, *_results(folder, "head-types")],
        ["cka", vit, *vit_layers, *_results(folder, "cka-vit")],
        ["cka", resnet, *layers, *_results(folder, "cka-resnet")],
        ["cka", vit, resnet, *vit_layers, *_results(folder, "cka-vit-resnet")],
        ["normratio", vit, resnet, *two_kinds, *_results(folder, "normratio")],
        ["localize", vit, *tokens, "--tokens", "6,2", *_results(folder, "localize")],
        ["localize", vit, resnet, "--summary", "site", *_results(folder, "localize-depth")],
        ["erf", vit, resnet, "--sites", "blocks", *_results(folder, "erf")],
        *(
            ["probe", _train(folder, name), store, *few, *_results(folder, f"probe-{name}")]
            for name, store in zip(models, (vit, resnet), strict=True)
        ),
        ["best-layer", *probes, "--metric", "top1", *_results(folder, "probe")],
        ["weights", "demo:vit", *_results(folder, "weights")],
    ]


def _train(folder: Path, name: str) -> str:
    return str(folder / f"{name}-train.zarr")


def _results(folder: Path, name: str) -> list[str]:
    """Options that say where a step's table and picture go."""
    return ["-o", f"{folder / name}.csv", "--png", f"{folder / name}.png", "--force"]


@click.command()
@click.option(
    "-o",
    "--output",
    metavar="FOLDER",
    type=parse_folder,
    default="demo-out",
    show_default=True,
    help="Where stores, tables and pictures go.",
)
@click.pass_context
def command(ctx: click.Context, output: Path) -> None:
    """Run vitsee on its own models and images.

    The two demo models, a ViT and a ResNet trained on Fashion-MNIST, are extracted over the demo's
    2,000 test images, and each figure is drawn. Offline; a few minutes on two cores.

    \b
      vitsee demo
      vitsee demo -o /tmp/demo
    """
    import shlex

    vitsee = ctx.find_root().command
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VitseeError(f"cannot make the folder {output}: {reason(error)}") from None
    for step in steps(output):
        console.say(f"$ vitsee {shlex.join(step)}")
        if code := vitsee.main(step, prog_name="vitsee", standalone_mode=False, parent=ctx):
            ctx.exit(code)
    console.say(f"look at {output}/*.png")
