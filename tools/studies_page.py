"""Writes docs/studies.md: bytes and time of real studies, from the models' shapes.

    python tools/studies_page.py                          # writes the page
    python tools/studies_page.py --print --rate 400       # with the rate of your GPU

Bytes are those that `extract --dry-run` counts, from shapes on torch's meta device: no weights.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from vitsee_core.extraction.options import DEFAULT_SLAB, KeepOptions
from vitsee_core.extraction.plan import build_plan, choose, total_size
from vitsee_core.models.without_weights import list_sites

PAGE = Path(__file__).resolve().parents[1] / "docs" / "studies.md"
IMAGES = 5000
TRAIN_IMAGES = 1_281_167
DISK = 500e6


@dataclass(frozen=True)
class Studied:
    """A model of timm's. title: what it is called; what: what it was trained by."""

    title: str
    name: str
    what: str


MODELS = (
    Studied("ViT-B/16", "vit_base_patch16_224.augreg_in21k_ft_in1k", "labels"),
    Studied("ResNet-50", "resnet50.a1_in1k", "labels"),
    Studied("DINO-B/16", "vit_base_patch16_224.dino", "self-distillation"),
    Studied("MAE-B/16", "vit_base_patch16_224.mae", "reconstruction of masked patches"),
    Studied("CLIP-B/16", "vit_base_patch16_clip_quickgelu_224.openai", "captions"),
    Studied(
        "DINOv2-B/14",
        "vit_base_patch14_dinov2.lvd142m",
        "self-distillation, at 518 pixels",
    ),
)
LEAN = KeepOptions(tokens=("pooled",), attention="none", residual=False)
RAGHU = KeepOptions(sites=("blocks", "norms", "hidden"))
# A CNN's layers inside of blocks are among its norms.
CNN = KeepOptions(sites=("blocks", "norms"))
COMMANDS = """\
# how large it gets, from shapes alone; timm downloads the weights when they are first needed
vitsee extract vit_base_patch16_224.mae --data imagenet/val --images 5000 -o mae.zarr --dry-run

# everything from here to the report; repeat it after an interruption
vitsee study ViT=vit_base_patch16_224.augreg_in21k_ft_in1k ResNet=resnet50.a1_in1k \\
    DINO=vit_base_patch16_224.dino MAE=vit_base_patch16_224.mae \\
    CLIP=vit_base_patch16_clip_quickgelu_224.openai DINOv2=vit_base_patch14_dinov2.lvd142m \\
    --data imagenet/val --train imagenet/train --images 5000 \\
    --train-images 100000 -o study

# or model by model, as array jobs of a cluster, and the analyses afterwards on any machine
vitsee extract vit_base_patch16_224.mae --data imagenet/val --images 5000 -o mae.zarr \\
    --precision bf16 --plan slurm > mae.sh
bash mae.sh --gres=gpu:1 --array=0-3
vitsee cka ViT=vit.zarr MAE=mae.zarr --tokens mean -o cka.csv --png cka.png
vitsee report results -o report.html
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--print", action="store_true", help="to stdout")
    parser.add_argument(
        "--rate", type=float, default=500, help="images a second of your worker"
    )
    args = parser.parse_args()
    if args.print:
        sys.stdout.write(page(args.rate))
    else:
        PAGE.write_text(page(args.rate))


def page(rate: float) -> str:
    lines = [
        "# Real studies",
        "",
        "<!-- Written by python tools/studies_page.py; do not edit it. -->",
        "",
        prose(
            "Six models of timm's with the architecture of the papers, on folders in ImageNet's "
            "layout (a sub-folder per class), from extraction on a node with a GPU to the report. "
            "None of it was run for this page: bytes are computed from the models' shapes, as "
            f"`extract --dry-run` does; times are those of a worker of {rate:,.0f} images/s, "
            f"**assumed, not measured**, that writes {DISK / 1e6:,.0f} MB/s, the larger of "
            "computing and writing. Give your own rate with `--rate`."
        ),
        "",
        "```sh",
        COMMANDS.rstrip(),
        "```",
        "",
        prose(
            f"Columns: *default*, every token of the block outputs, attention and residual "
            f"summaries of {IMAGES:,} images (the number of Raghu et al. 2021, Fig. 3, and Walmer "
            "et al. 2023); *all layers*, also norms and hidden layers, as for Raghu et al. 2021, "
            f"Fig. 1; *training set*, pooled vectors of the {TRAIN_IMAGES:,} images of ImageNet-1k "
            "for k-NN and probes."
        ),
        "",
        "| model | trained by | default | all layers | training set | time, in that order |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(cells(model, rate))} |" for model in MODELS]
    lines += [
        "",
        prose(
            "What misleads on models of several kinds: images come to each as its weights were "
            "trained (224 or 518 pixels, their own crop and normalisation), so that distances in "
            "pixels and localisation compare only in relative units; MAE's class token was trained "
            "by nothing (`--tokens mean`); DINOv2 without registers has outlier tokens (`vitsee "
            "norms`); CKA of two models needs the same images in the same order, which the same "
            "`--data`, `--images` and `--seed` give."
        ),
        "",
    ]
    return "\n".join(lines)


def cells(model: Studied, rate: float) -> list[str]:
    listing = list_sites(model.name)
    hidden = any("hidden" in site.groups for site in listing.table.sites)
    layers = RAGHU if hidden else CNN
    sizes, times = [], []
    for keep, images in ((KeepOptions(), IMAGES), (layers, IMAGES), (LEAN, TRAIN_IMAGES)):
        choices = choose(keep, {}, listing.table, listing.input_size)
        size = total_size(
            build_plan(choices, listing.table, images, DEFAULT_SLAB)
        ).size_bytes
        sizes.append(amount(size))
        times.append(duration(max(images / rate, size / DISK)))
    return [f"{model.title}<br>`{model.name}`", model.what, *sizes, ", ".join(times)]


def prose(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def amount(size: float) -> str:
    unit, scale = next(
        ((u, s) for u, s in (("TB", 1e12), ("GB", 1e9)) if size >= s), ("MB", 1e6)
    )
    return f"{size / scale:.3g} {unit}"


def duration(seconds: float) -> str:
    unit, scale = next(
        ((u, s) for u, s in (("h", 3600), ("min", 60)) if seconds >= s), ("s", 1)
    )
    return f"{seconds / scale:.2g} {unit}"


if __name__ == "__main__":
    main()
