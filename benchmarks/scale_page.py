"""Writes docs/scale.md from benchmarks/results/scale/*.json and arithmetic.

    python benchmarks/scale_page.py                     # writes the page
    python benchmarks/scale_page.py --print --rate 800 --disk 500   # of your GPU and disk

Bytes and files are those that `extract --dry-run` counts, from the models' shapes on torch's meta
device: no weights are needed.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import RESULTS

from vitsee_core.extraction.options import DEFAULT_SLAB, KeepOptions
from vitsee_core.extraction.plan import build_plan, choose, total_size
from vitsee_core.models.without_weights import list_sites

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
IMAGES = 1_281_167  # of ImageNet-1k's training set
WORKERS = 64
TITLES = {
    "vit_base_patch16_224": "ViT-B/16",
    "vit_large_patch16_224": "ViT-L/16",
    "vit_huge_patch14_224": "ViT-H/14",
    "vit_large_patch14_dinov2": "DINOv2-L/14 at 224 pixels",
}
KEPT: dict[str, KeepOptions] = {
    "pooled vectors of blocks and head": KeepOptions(
        tokens=("pooled",), attention="none", residual=False
    ),
    "and attention and residual summaries": KeepOptions(tokens=("pooled",)),
    "and Gram matrices within slabs": KeepOptions(tokens=("pooled",), grams=True),
    "all tokens of blocks (the default)": KeepOptions(),
    "all tokens of blocks and branches": KeepOptions(
        sites=("blocks", "head", "residual")
    ),
    "all tokens of all sublayers": KeepOptions(sites=("all",)),
}
HEAD = """\
# Scale

Written by `python benchmarks/scale_page.py` from `benchmarks/results/scale/*.json`; do not edit it.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--print", action="store_true", help="to stdout")
    parser.add_argument(
        "--rate", type=float, default=1000, help="images a second of your worker"
    )
    parser.add_argument(
        "--disk", type=float, help="MB a second that it writes  [as measured]"
    )
    args = parser.parse_args()
    found = {
        path.stem: json.loads(path.read_text())
        for path in (RESULTS / "scale").glob("*.json")
    }
    parts = [HEAD, measured(found["images"])]
    if "exact" in found:
        parts.append(exact(found["exact"]))
    if "no-activations" in found:
        parts.append(kept(found["no-activations"]))
    text = "\n".join([*parts, projected(found["rates"], args.rate, args.disk)])
    if args.print:
        sys.stdout.write(text)
    else:
        PAGE.write_text(text)


def measured(found: dict[str, Any]) -> str:
    """Commands over 10 k to 1 M images."""
    rows = found["rows"]
    sizes = list(dict.fromkeys(row["images"] for row in rows))
    commands = [
        name for name in dict.fromkeys(row["what"] for row in rows) if name != "store"
    ]
    at = {(row["what"], row["images"]): row for row in rows}
    stores = [at["store", n] for n in sizes]
    lines = [
        *head("Up to a million images, measured", found),
        prose(
            "Each command in a process of its own, imports included, with `--memory 512M` where it "
            "takes that: seconds of the processor, then the peak of resident memory. Seconds of "
            "the clock are those of a machine that others used too, and say less. Stores of 16 "
            f"channels, ten tokens, four blocks, slabs of 256: {listed(stores)}."
        ),
        "",
        f"| | {' | '.join(f'{n:,} images' for n in sizes)} | the clock, of the most |",
        f"|---|{'---|' * (len(sizes) + 1)}",
    ]
    for name in commands:
        cells = [
            f"{at[name, n]['cpu']:.1f} s, {megabytes(at[name, n]['rss'])}" for n in sizes
        ]
        lines.append(
            f"| {name} | {' | '.join(cells)} | {at[name, sizes[-1]]['seconds']:.1f} s |"
        )
    said = prose(
        "`knn` looks for the neighbours of 2,000 images. `cka` is the minibatch estimator with "
        "every image in one batch of 1,024, two sites; its Gram matrices, 4 KB per image and site, "
        "are on disk meanwhile (`--no-cache`) or kept. `norms` and `normratio` have medians over "
        "all images, for which the numbers of a site's tokens are in memory: 40 bytes per token "
        "for `norms`, which refuses what `--memory` does not hold; `normratio` reads as often as "
        "needed. Else memory grows by what is kept of each image: its label, place and hash."
    )
    return "\n".join([*lines, "", said, ""])


def listed(stores: Sequence[dict[str, Any]]) -> str:
    """Files and bytes of the stores."""
    return "; ".join(
        f"{row['files']:,} files and {row['bytes'] / 1e9:.2f} GB for {row['images']:,} images"
        for row in stores
    )


def exact(found: dict[str, Any]) -> str:
    """Exact CKA of many images."""
    lines = [
        *head("Exact CKA, out of core, measured", found),
        prose(
            "Two sites of each of two stores of 160 features: all four pairs, with the jackknife. "
            "Work and Gram matrices, on disk, grow with the square of the images; memory stays "
            "within `--memory 1G` and the imports."
        ),
        "",
        "| images | Gram matrices | processor | clock | peak memory | once more, from the cache |",
        "|---|---|---|---|---|---|",
    ]
    rows = {(row["what"], row["images"]): row for row in found["rows"]}
    for n in dict.fromkeys(row["images"] for row in found["rows"]):
        row, again = rows["exact", n], rows["cached", n]
        cells = [f"{n:,}", f"{row['bytes'] / 1e9:.1f} GB", f"{row['cpu']:.0f} s"]
        cells += [f"{row['seconds']:.0f} s", megabytes(row["rss"])]
        cells += [f"{again['cpu']:.0f} s of the processor"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def kept(found: dict[str, Any]) -> str:
    """What is left without activations."""
    whole, lean = found["bytes"]["whole"], found["bytes"]["lean"]
    lines = [
        "## No activations kept, tried",
        "",
        f"`{found['command']}`",
        "",
        prose(
            "Every analysis on two stores of the demo's ViT over the same images: one with all "
            f"tokens of the blocks, {amount(whole)} per image, one made with `--tokens pooled "
            f"--grams`, {amount(lean)}; attention rows and summaries, residual products and "
            "receptive fields in both."
        ),
        "",
        "| | numbers | |",
        "|---|---|---|",
        *(
            f"| `{command}` | {verdict} | {why} |"
            for command, verdict, why in found["rows"]
        ),
    ]
    return "\n".join([*lines, ""])


def projected(found: dict[str, Any], rate: float, disk: float | None) -> str:
    """ImageNet-1k on several models."""
    models = [row for row in found["rows"] if row["what"] == "model"]
    (written,) = (row for row in found["rows"] if row["what"] == "write")
    own_disk = written["bytes"] / written["seconds"]
    their_disk = own_disk if disk is None else disk * 1e6
    lines = [
        *head("ImageNet-1k's training set, computed", found),
        prose(
            f"{IMAGES:,} images, slabs of {DEFAULT_SLAB}; bytes and files are those that `extract "
            "--dry-run` counts. Hours are the larger of computing and of writing, which go on "
            "beside each other. Computing on one core takes the processor seconds per image below, "
            f"measured; a process writes {own_disk / 1e6:,.0f} MB/s, measured with fsync. "
            f"{WORKERS} cores are {WORKERS} times as fast, if the disk is too. The last column is "
            f"for one worker of {rate:,.0f} images/s, **assumed, not measured**, that writes "
            f"{their_disk / 1e6:,.0f} MB/s: give your own with `--rate` and `--disk`. Decoding "
            "images is not counted."
        ),
        "",
    ]
    for row in models:
        size = row["options"].get("img_size")
        listing = list_sites(row["model"], img_size=size and (size, size))
        cpu = row["cpu"]
        lines += [
            f"### {TITLES[row['model']]}",
            "",
            f"Forward pass {cpu['forward']:.2f} s, attention summaries {cpu['attention']:.2f} s",
            "",
            f"| kept | per image | in all | files | 1 core | {WORKERS} cores | "
            f"{rate:,.0f} images/s |",
            "|---|---|---|---|---|---|---|",
        ]
        for title, keep in KEPT.items():
            choices = choose(keep, {}, listing.table, listing.input_size)
            total = total_size(build_plan(choices, listing.table, IMAGES, DEFAULT_SLAB))
            seconds = cpu["forward"] + (cpu["attention"] if keep.attention is None else 0)
            own = max(IMAGES * seconds, total.size_bytes / own_disk)
            theirs = max(IMAGES / rate, total.size_bytes / their_disk)
            times = " | ".join(hours(t) for t in (own, own / WORKERS, theirs))
            lines.append(
                f"| {title} | {amount(total.size_bytes / IMAGES)} | {amount(total.size_bytes)} | "
                f"{total.n_files:,} | {times} |"
            )
        lines.append("")
    return "\n".join(lines)


def prose(text: str) -> str:
    """A paragraph."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def head(title: str, found: dict[str, Any]) -> list[str]:
    """A section's first lines: the command, where and when it ran."""
    about = f"{found['date']}, {found['machine']}, load {found['load']:g}"
    return [f"## {title}", "", f"`{found['command']}`", "", about, ""]


def megabytes(size: float) -> str:
    """MB, rounded."""
    return f"{size / 1e6:,.0f} MB"


def amount(size: float) -> str:
    """In the unit that fits, three digits."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


def hours(seconds: float) -> str:
    """Hours; days where they are many."""
    spent = seconds / 3600
    if spent >= 48:
        return f"{spent / 24:,.0f} days"
    return f"{spent:.0f} h" if spent >= 10 else f"{spent:.2g} h"


if __name__ == "__main__":
    main()
