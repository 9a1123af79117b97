"""Small stores that every analysis has something to read in, and the arguments of each command."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
from click.testing import CliRunner
from PIL import Image

from vitsee_cli.main import main
from vitsee_core.demo.davis import write_davis
from vitsee_core.demo.spair import write_spair
from vitsee_core.pages.report.captions import captions

VIT = ["vit.zarr"]
# Command -> its arguments in the folder of `write_everything`, once for each of its figures, where
# that is not the command on one store.
OTHERS = {
    "attn-map": [
        [*VIT, "--kind", "mean-cls"],
        [*VIT, "--kind", "rollout"],
        [*VIT, "--kind", "entropy"],
        [*VIT, "--image", "0", "--query", "0,1"],
    ],
    "best-layer": [["knn.csv"]],
    "cka": [VIT, [*VIT, "cnn.zarr"]],
    "cka-heads": [[*VIT, "cnn.zarr"]],
    "cluster": [[*VIT, "--k", "2"]],
    "cosine-map": [
        [*VIT, "cnn.zarr"],
        [*VIT, "--at", "0,1", "--to", "3"],
        [*VIT, "--offsets"],
    ],
    "dense-probe": [
        ["train.zarr", *VIT, "--masks", "maps", "--show", "1", "--per-class"]
    ],
    "effect": [[*VIT, "cut.zarr"], [*VIT, "cut.zarr", "--sites", "none"]],
    "keypoints": [["pairs.zarr", "--pairs", "pairs"]],
    "knn": [["train.zarr", *VIT, "--k", "3", "--per-class"]],
    "lens": [["cnn.zarr", "--patches"]],
    "localize": [VIT, [*VIT, "--summary", "token"], [*VIT, "--summary", "site"]],
    "logit-attribution": [VIT, [*VIT, "--by-head"], [*VIT, "--patches", "--image", "0"]],
    "normratio": [VIT, ["cnn.zarr"]],
    "norms": [VIT, ["cnn.zarr"]],
    "pca": [[*VIT, "cnn.zarr"], [*VIT, "--foreground", "centre", "--image", "0"]],
    "probe": [["train.zarr", *VIT, "--tokens", "each", "--per-class"]],
    "propagate": [["videos.zarr", "--masks", "videos", "--only", "val.txt"]],
    "retrieve": [[*VIT, "cnn.zarr", "--truth", "labels"]],
    "saliency": [[*VIT, "--masks", "masks"]],
    "similarity": [[*VIT, "cnn.zarr", "--metric", "mutual_knn", "--k", "2"]],
    "spatial": [[*VIT, "cnn.zarr"]],
    "spectrum": [[*VIT, "cnn.zarr"], [*VIT, "--tokens", "all"]],
}
TABLES = {command: OTHERS.get(command, [VIT]) for command in captions()}


def vitsee(*args: object) -> str:
    """What a command prints on stdout."""
    result = CliRunner().invoke(main, [*map(str, args)])
    assert result.exit_code == 0, result.output or result.exception
    return result.stdout


def write_everything(path: Path) -> None:
    """Stores of two small models with everything that the commands read, masks, a video, pairs."""
    rng = np.random.default_rng(0)
    for i in range(8):
        of_class = f"class{i % 2}/{i}.png"
        for name, split in (("data", 0), ("other", 1)):
            file = path / name / of_class
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels // (1 + split)).save(file)
        mask = path / "masks" / of_class
        mask.parent.mkdir(parents=True, exist_ok=True)
        square = np.zeros((32, 32), np.uint8)
        square[:16, :20] = 1
        Image.fromarray(square).save(mask)
        classes = path / "maps" / of_class
        classes.parent.mkdir(parents=True, exist_ok=True)
        square[24:, i:] = 2
        Image.fromarray(square).save(classes)
    write_davis(path / "videos")
    first = (path / "videos" / "ImageSets" / "2017" / "val.txt").read_text().split()[0]
    (path / "val.txt").write_text(f"{first}\n")
    write_spair(path / "pairs")
    vit = [
        "test_vit",
        "--random-init",
        "0",
        "--img-size",
        "32",
        "--model-arg",
        "patch_size=8",
    ]
    cnn = ["test_resnet", "--random-init", "0", "--img-size", "32"]
    all_of_it = ["--sites", "all", "--inputs", "--erf", "4", "--slab", "4"]
    whole = ["--sites", "blocks", "--attention", "none"]
    frames = [
        "--data",
        path / "videos" / "JPEGImages" / "480p",
        "--only",
        path / "val.txt",
    ]
    uncropped = ["--crop-mode", "border", "--crop-pct", "1"]
    runs = {
        "vit.zarr": [*vit, *all_of_it, "--attention", "full", "--data", path / "data"],
        "cnn.zarr": [*cnn, "--data", path / "data"],
        "cut.zarr": [*vit, "--data", path / "data", "--ablate-skip", "blocks.0"],
        "train.zarr": [*vit, "--data", path / "other"],
        "videos.zarr": [
            *vit,
            *whole,
            *frames,
            "--order",
            "dataset",
            "--crop-mode",
            "squash",
        ],
        "pairs.zarr": [*vit, *whole, *uncropped, "--data", path / "pairs" / "JPEGImages"],
    }
    for name, args in runs.items():
        vitsee("extract", *args, "-o", path / name)
    with contextlib.chdir(path):  # so that the results name their inputs as a user would
        vitsee("knn", "train.zarr", "vit.zarr", "--k", "3", "-o", "knn.csv")
