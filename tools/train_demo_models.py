"""Train the two models that ship with vitsee on Fashion-MNIST, from scratch and seeded.

    python tools/train_demo_models.py FASHION_MNIST_DIR vit     # about an hour on 2 CPU cores
    python tools/train_demo_models.py FASHION_MNIST_DIR resnet  # about 6 minutes

FASHION_MNIST_DIR holds the four IDX files of the data set (`*-ubyte.gz`; Debian ships them in the
package dataset-fashion-mnist, under /usr/share/datasets). Each model is a plain timm architecture
and is written as a timm `local-dir:` folder (config.json, model.safetensors) with `training.json`
beside the weights: the recipe, the seed and the accuracy on the 10,000 test images.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from make_demo_data import CLASSES, read_idx
from PIL import Image
from safetensors.torch import load_file
from timm.layers.config import set_fused_attn
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from timm.models import save_for_hf

SIZE = 32
MEAN, STD = 0.2860, 0.3530
RECIPES: dict[str, dict[str, Any]] = {
    "vit": {
        "architecture": "vit_tiny_patch16_224",
        "model_args": {
            "img_size": SIZE,
            "patch_size": 4,
            "embed_dim": 96,
            "depth": 6,
            "num_heads": 4,
            "mlp_ratio": 2.0,
        },
        "sincos": True,
        "cfg": {"first_conv": "patch_embed.proj", "classifier": "head"},
        "cycles": [[7, 1.5e-3], [4, 8e-4]],  # epochs, highest rate
        "batch": 64,
        "weight_decay": 0.05,
        "shift": 1,
        "erase": 0.0,
    },
    "resnet": {
        "architecture": "resnet26",
        "model_args": {"channels": [16, 32, 64, 128]},
        "sincos": False,
        "cfg": {"first_conv": "conv1", "classifier": "fc"},
        "cycles": [[12, 3e-3]],
        "batch": 128,
        "weight_decay": 0.02,
        "shift": 2,
        "erase": 0.1,
    },
}


def load_split(folder: Path, stem: str) -> tuple[np.ndarray, np.ndarray]:
    """Images resized as the models' own transform does it, (n, 32, 32) uint8, and labels."""
    images = read_idx(folder / f"{stem}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{stem}-labels-idx1-ubyte.gz").astype(np.int64)
    resized = [Image.fromarray(i).resize((SIZE, SIZE), Image.Resampling.BICUBIC) for i in images]
    return np.stack([np.asarray(i) for i in resized]), labels


def to_input(images: np.ndarray) -> torch.Tensor:
    """(n, 32, 32) uint8 -> (n, 3, 32, 32) float32, normalised."""
    x = (torch.from_numpy(images).float() / 255 - MEAN) / STD
    return x[:, None].expand(-1, 3, -1, -1).contiguous()


def augment(images: np.ndarray, rng: np.random.Generator, shift: int, erase: float) -> np.ndarray:
    """Shift by up to `shift` px, flip half of them, erase a square in a part `erase` of them."""
    n = len(images)
    padded = np.pad(images, ((0, 0), (shift, shift), (shift, shift)))
    out = np.empty_like(images)
    shifts = rng.integers(0, 2 * shift + 1, (n, 2))
    flips, erased = rng.random(n) < 0.5, rng.random(n) < erase
    corners = rng.integers(0, SIZE - 12, (n, 2))
    for k in range(n):
        dy, dx = shifts[k]
        image = padded[k, dy : dy + SIZE, dx : dx + SIZE]
        out[k] = image[:, ::-1] if flips[k] else image
        if erased[k]:
            y, x = corners[k]
            out[k, y : y + 12, x : x + 12] = rng.integers(0, 256)
    return out


def start_from_sincos(model: Any) -> None:
    """Position embeddings start as 2-D sines and cosines (as in MoCo-v3) and are trained on: from
    noise of 0.02 a short training leaves the heads blind to position."""
    grid = model.patch_embed.grid_size
    table = build_sincos2d_pos_embed(list(grid), dim=model.embed_dim, temperature=100.0)
    with torch.no_grad():
        model.pos_embed[0, model.num_prefix_tokens :] = table


@torch.inference_mode()
def accuracy(model: torch.nn.Module, images: np.ndarray, labels: np.ndarray) -> float:
    model.eval()
    hits = 0
    for start in range(0, len(images), 500):
        rows = slice(start, start + 500)
        hits += int((model(to_input(images[rows])).argmax(1).numpy() == labels[rows]).sum())
    return hits / len(images)


def train(name: str, source: Path, target: Path, seed: int, first_cycle: int) -> None:
    """All cycles of a recipe; from a later one on, with the weights that `target` holds."""
    recipe = RECIPES[name]
    torch.manual_seed(seed)
    set_fused_attn(False)  # the explicit softmax is faster for 65 tokens on a CPU
    model = timm.create_model(recipe["architecture"], num_classes=10, **recipe["model_args"])
    if recipe["sincos"]:
        start_from_sincos(model)
    if first_cycle:
        model.load_state_dict(load_file(target / name / "model.safetensors"))
    train_split, test_split = load_split(source, "train"), load_split(source, "t10k")
    done = sum(epochs for epochs, _ in recipe["cycles"][:first_cycle])
    for cycle, (epochs, rate) in list(enumerate(recipe["cycles"]))[first_cycle:]:
        rng = np.random.default_rng(seed + cycle)
        for _ in run_cycle(model, recipe, train_split, epochs, rate, rng):
            done += 1
            reached = accuracy(model, *test_split)
            print(f"{name} epoch {done}: test {reached:.4f}, {time.strftime('%X')}", flush=True)
            save(model, recipe, target / name, seed, done, reached)


def run_cycle(
    model: torch.nn.Module,
    recipe: dict[str, Any],
    split: tuple[np.ndarray, np.ndarray],
    epochs: int,
    highest_rate: float,
    rng: np.random.Generator,
) -> Iterator[None]:
    """One warm-up and one half cosine of the learning rate; yields after every epoch."""
    images, labels = split
    batch = recipe["batch"]
    steps, step = len(images) // batch * epochs, 0
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=recipe["weight_decay"])
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    for _ in range(epochs):
        model.train()
        order = rng.permutation(len(images))
        for start in range(0, len(order) - batch + 1, batch):
            rows = order[start : start + batch]
            rate = highest_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, step / 500)
            inputs = to_input(augment(images[rows], rng, recipe["shift"], recipe["erase"]))
            loss = loss_of(model(inputs), torch.from_numpy(labels[rows]))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
        yield


def save(
    model: torch.nn.Module, recipe: dict[str, Any], folder: Path, seed: int, epochs: int, acc: float
) -> None:
    pretrained_cfg = {
        "architecture": recipe["architecture"],
        "input_size": [3, SIZE, SIZE],
        "fixed_input_size": True,
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "crop_mode": "center",
        "mean": [MEAN] * 3,
        "std": [STD] * 3,
        "num_classes": 10,
        "license": "mit",
        **recipe["cfg"],
    }
    model.pretrained_cfg = pretrained_cfg  # type: ignore[assignment]
    save_for_hf(
        model,
        str(folder),
        model_config={"label_names": list(CLASSES)},
        model_args=recipe["model_args"],
        safe_serialization=True,
    )
    record = {
        "data": "Fashion-MNIST train (60,000 images), resized from 28 to 32 px, grey as RGB",
        "test_accuracy": acc,
        "test_images": 10000,
        "seed": seed,
        "epochs": epochs,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "recipe": recipe,
    }
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument(
        "--target", type=Path, default=Path(__file__).parents[1] / "vitsee_core/demo"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-cycle", type=int, default=0, help="go on with the next cycle")
    args = parser.parse_args()
    train(args.model, args.source, args.target, args.seed, args.first_cycle)
