"""Draws the pictures of README and docs/ from the results of the demo: docs/*.png.

    vitsee demo --quick -o FOLDER
    python tools/pictures.py FOLDER             # more commands on its stores, then all pictures
    python tools/pictures.py FOLDER --only erf  # one of them
    vitsee demo --real -o REAL
    python tools/pictures.py REAL --real        # those of docs/real-vit.md

A minute on two cores. Three pictures are made elsewhere: docs/pca.png needs weights and photographs
that are not bundled, docs/similarity-chance.png is drawn by tools/similarity_by_chance.py,
docs/explore.png by a browser, with tools/explore_picture.py. docs/training-*.png are of trainings.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from vitsee_core.figures.plotting import figure_bytes
from vitsee_core.pages.report.redrawing import redraw
from vitsee_core.tables.files import write_files

DOCS = Path(__file__).parents[1] / "docs"
ELSEWHERE = {
    "explore": "# in the folder of vitsee demo --real\n"
    "vitsee explore vit=stores/vit-saliency.zarr stores/lite0.zarr --recompute --trust-store "
    "-o explore.html\n"
    "PYTHONPATH=. python tools/explore_picture.py explore.html docs/explore.png",
    "pca": "# not bundled: weights, photographs\nvitsee pca lite0.zarr -o pca.csv --png pca.png",
    **{
        f"training-{name}": "# after docs/guide/training-vit.md's recipe\n"
        f"vitsee plot over/seed*/results/{file}.csv {more}--x step --by site --dpi 130 "
        f"-o training-{name}.png"
        for name, file, more in (
            ("cka", "cka", ""),
            ("distance", "attn-dist", "--metric distance_px "),
            ("knn", "knn", "--metric top1 --sites 'blocks,!embed' "),
            ("norm-ratio", "normratio", "--metric norm_ratio --sites '*.attn' "),
            ("rank", "spectrum", "--metric effective_rank --sites 'blocks,!embed' "),
        )
    },
    "tower-windows": "vitsee extract 'transformers:Qwen2_5_VisionTransformerPretrainedModel?depth=2"
    "&hidden_size=48&num_heads=4&intermediate_size=96&out_hidden_size=64"
    "&fullatt_block_indexes=[1]' --random-init 0 --img-size 224 --data demo:test --images 64 "
    "-o tower.zarr\n"
    "vitsee attn-map tower.zarr --kind aligned -o windows.csv\n"
    "vitsee plot windows.csv --dpi 130 -o docs/tower-windows.png",
    "tower-positions": "# black.png: 256 x 256 black pixels in a folder of its own\n"
    'for n in 256 64 16; do vitsee extract "transformers:Qwen3VLVisionModel?depth=2'
    "&hidden_size=64&num_heads=4&intermediate_size=96&out_hidden_size=64"
    '&deepstack_visual_indexes=[1]&num_position_embeddings=$n" --random-init 0 --img-size 256 '
    "--img-mean 0,0,0 --img-std 1,1,1 --data black --attention none -o p$n.zarr; done\n"
    "vitsee cosine-map '16 x 16=p256.zarr' '8 x 8=p64.zarr' '4 x 4=p16.zarr' --at 5,5 -o p.csv\n"
    "vitsee plot p.csv --dpi 130 -o docs/tower-positions.png",
    "similarity-chance": "python tools/similarity_by_chance.py docs/similarity-chance.png",
}
DPI = 130  # what README shows: a page is about 900 pixels wide
COLOURS, METHOD = 256, Image.Quantize.MAXCOVERAGE  # rare colours too, as of a line
MOST_BYTES = 150_000
VIT, RESNET = "vit=stores/vit.zarr", "resnet=stores/resnet.zarr"
# Of effect: no skip around these sublayers, and other weights.
CHANGES = {
    "no-skip-0-mlp": "--ablate-skip blocks.0.mlp",
    "no-skip-2-mlp": "--ablate-skip blocks.2.mlp",
    "no-skip-5-attn": "--ablate-skip blocks.5.attn",
    "random": "--random-init 0",
}


@dataclass(frozen=True)
class Picture:
    """docs/NAME.png. result: the table in the folder that it is drawn from, or a picture that a
    command wrote as it is; commands: make the result, where the demo does not."""

    name: str
    result: str
    commands: tuple[str, ...] = ()
    dpi: int = DPI


def _made(name: str, *commands: str, dpi: int = DPI) -> Picture:
    """Of a table of its own, which the last command makes."""
    *before, last = commands
    table = f"more/{name}.csv"
    return Picture(name, table, (*before, f"{last} -o {table} --force"), dpi)


def _shots(label: str) -> str:
    stores = f"stores/{label}-train.zarr {label}=stores/{label}.zarr"
    return f"probe {stores} --shots 10 -o more/shots-{label}.csv --force"


_EXTRACT = "extract demo:vit --data demo:test --images 500"
PICTURES = (
    Picture("cka-vit", "results/cka-vit.csv"),
    Picture("cka-vit-resnet", "results/cka-vit-resnet.csv"),
    Picture("attn-dist", "results/attn-dist.csv"),
    _made(
        "similarity",
        f"similarity {VIT} {RESNET} --pairs same-depth --sites-a !embed,blocks --sites-b "
        "layer[123].*.out --metric mutual_knn --metric procrustes --metric cka --calibrate 99",
    ),
    _made(
        "cka-heads",
        f"{_EXTRACT} --sites blocks.0.attn.heads -o stores/heads.zarr",
        f"cka-heads vit=stores/heads.zarr {RESNET} --window 1",
    ),
    _made("head-types", "head-types stores/vit.zarr"),
    Picture("saliency", "results/saliency.csv"),
    Picture("weights", "results/weights.parquet"),
    Picture("attn-map-aligned", "results/attn-map-aligned-vit.parquet"),
    _made(
        "attn-sinks",
        f"{_EXTRACT} --random-init 0 --tokens pooled -o stores/untrained.zarr",
        "attn-map trained=stores/vit.zarr untrained=stores/untrained.zarr --kind sink",
    ),
    _made(
        "normratio",
        f"normratio {VIT} {RESNET} --tokens patches --tokens cls --metric norm_ratio",
    ),
    Picture("localize-depth", "results/localize.csv"),
    Picture("erf", "results/erf.parquet"),
    Picture("norms", "results/norms.parquet"),
    Picture("spatial", "results/spatial.csv"),
    Picture("spectrum", "results/spectrum.csv"),
    _made("lens", f"lens {VIT} {RESNET} --patches"),
    _made(
        "effect",
        *(
            f"{_EXTRACT} {change} --attention none --no-residual -o stores/{name}.zarr"
            for name, change in CHANGES.items()
        ),
        f"effect {VIT} {' '.join(f'stores/{name}.zarr' for name in CHANGES)}",
    ),
    _made(
        "logit-attribution",
        f"{_EXTRACT} --sites blocks --sites head --sites residual --sites heads --tokens pooled "
        "-o stores/branches.zarr",
        "logit-attribution vit=stores/branches.zarr --by-head",
    ),
    _made("head-importance", f"head-importance {VIT}"),
    _made("cosine-map", f"cosine-map {VIT} {RESNET} --image 1 --image 2 --at 12,14px"),
    Picture("propagate", "results/propagate.csv"),
    Picture("retrieve", "results/retrieve-buildings.csv"),
    Picture("keypoints", "results/keypoints.csv"),
    Picture(
        "best-table",
        "more/best-table.png",
        (
            "best-layer results/retrieve-buildings.csv results/keypoints.csv --metric map_easy "
            "--metric map_medium --metric map_hard --metric pck@0.1 --metric pck@0.05 "
            "--table more/best-table.png -o more/best-table.csv --force",
        ),
    ),
    Picture("objects", "results/cluster-objects.csv"),
    _made("knn", "best-layer results/knn-vit.csv results/knn-resnet.csv --metric top1"),
    _made(
        "probe",
        _shots("vit"),
        _shots("resnet"),
        "best-layer more/shots-vit.csv more/shots-resnet.csv --metric top1",
    ),
)

# Of the stores of `vitsee demo --real`.
REAL_VIT, LITE = "vit=stores/vit-saliency.zarr", "lite0=stores/lite0.zarr"
REAL = (
    _made("real-attn-dist", f"attn-dist {REAL_VIT}"),
    _made(
        "real-attn-aligned",
        f"attn-map {REAL_VIT} --kind aligned --sites blocks.1,blocks.3,blocks.6,blocks.11",
        dpi=100,
    ),
    _made(
        "real-attn-cls",
        f"attn-map {REAL_VIT} --image chelsea.png --sites blocks.0,blocks.3,blocks.8,blocks.10 "
        "--scale head --trust-store",
        dpi=100,
    ),
    _made(
        "real-pca",
        f"pca {REAL_VIT} {LITE} --image chelsea.png --image coffee.png --image flower.jpg",
        dpi=120,
    ),
    _made(
        "real-cosine-map",
        f"cosine-map {REAL_VIT} {LITE} --image chelsea.png --image flower.jpg --scale map",
        dpi=120,
    ),
    _made("real-norms", f"norms {REAL_VIT} {LITE} --metric norm --metric norm_histogram"),
    _made(
        "real-normratio",
        f"normratio {REAL_VIT} --tokens patches --tokens cls --metric norm_ratio",
    ),
    _made("real-erf", f"erf {REAL_VIT} {LITE} --sites blocks", dpi=100),
    _made("real-cka", f"cka {REAL_VIT} {LITE} --sites blocks"),
)


def drawn(picture: Picture, folder: Path) -> bytes:
    """The picture's file, of results that are there."""
    result = folder / picture.result
    if result.suffix == ".png":
        return result.read_bytes()
    full = figure_bytes(redraw(result), ".png", picture.dpi)
    few, out = (
        Image.open(io.BytesIO(full)).convert("RGB").quantize(COLOURS, METHOD),
        io.BytesIO(),
    )
    few.save(out, "png", optimize=True)
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what vitsee demo --quick -o made")
    parser.add_argument("--only", nargs="+", choices=[p.name for p in (*PICTURES, *REAL)],
                        metavar="NAME")  # fmt: skip
    parser.add_argument("--to", type=Path, default=DOCS, help="where they go [docs/]")
    parser.add_argument(
        "--draw", action="store_true", help="of results that are there, without commands"
    )
    parser.add_argument(
        "--real", action="store_true", help="FOLDER is of vitsee demo --real"
    )
    args = parser.parse_args()
    (args.folder / "more").mkdir(exist_ok=True)
    large = []
    for picture in REAL if args.real else PICTURES:
        if args.only and picture.name not in args.only:
            continue
        for line in () if args.draw else picture.commands:
            words = [sys.executable, "-m", "vitsee_cli", "-q", *line.split()]
            subprocess.run(words, cwd=args.folder, check=True)
        data = drawn(picture, args.folder)
        write_files({args.to / f"{picture.name}.png": data}, force=True)
        print(f"{picture.name}.png: {len(data) / 1000:.0f} kB", flush=True)
        if len(data) > MOST_BYTES:
            large.append(picture.name)
    if large:
        sys.exit(
            f"larger than {MOST_BYTES // 1000} kB, take a lower dpi: {', '.join(large)}"
        )


if __name__ == "__main__":
    main()
