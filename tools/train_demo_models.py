"""Train the models that ship with vitsee on Fashion-MNIST, from scratch and seeded.

    python tools/train_demo_models.py FASHION_MNIST_DIR vit-gap

FASHION_MNIST_DIR holds the four IDX files of the data set (`*-ubyte.gz`; Debian ships them in the
package dataset-fashion-mnist, under /usr/share/datasets). What each model is: demo_recipes.py. One
is written, when it is finished, as a timm `local-dir:` folder (config.json, float16
model.safetensors) with `training.json` beside the weights: recipe, curve, and the accuracy of the
rounded weights on the 10,000 test images. After every epoch the state is kept in --scratch, and
the same command goes on from there, to the same weights.

An epoch of the ViT takes two minutes on one core of a Xeon with AMX. Its passes alone: 1.9 in
bfloat16 by autocast (float32: 3.2), with attention written out (torch's fused one: 5.3 for these
65 tokens), not compiled (2.1). The number of threads changes sums in the last bit: --threads 1
unless given.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from demo_recipes import (
    MEAN,
    RECIPES,
    SIZE,
    STD,
    MaskedAutoencoder,
    Recipe,
    build,
    rate_at,
)
from make_demo_data import CLASSES, read_idx
from PIL import Image
from timm.layers.config import set_fused_attn
from timm.models import save_for_hf
from torch import nn

from vitsee_core.tables.files import rename_at_end

Split = tuple[np.ndarray, np.ndarray]  # (n, 32, 32) uint8, (n,) int64
EPOCH = 60_000  # images seen
CURVE_IMAGES = 2_000


def load_split(folder: Path, stem: str) -> Split:
    """Images resized as the models' own transform does it, and labels."""
    images = read_idx(folder / f"{stem}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{stem}-labels-idx1-ubyte.gz").astype(np.int64)
    return resized(images), labels


def resized(images: np.ndarray) -> np.ndarray:
    """(n, 28, 28) uint8 -> (n, 32, 32) uint8."""
    large = [
        Image.fromarray(i).resize((SIZE, SIZE), Image.Resampling.BICUBIC) for i in images
    ]
    return np.stack([np.asarray(i) for i in large])


def part_of(split: Split, share: float, seed: int) -> Split:
    """A seeded share of the images of each class, in their order."""
    if share == 1:
        return split
    images, labels = split
    rng = np.random.default_rng(seed)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    drawn = [rng.choice(m, max(1, round(share * len(m))), replace=False) for m in members]
    rows = np.sort(np.concatenate(drawn))
    return images[rows], labels[rows]


def to_input(images: np.ndarray) -> torch.Tensor:
    """(n, 32, 32) uint8 -> (n, 3, 32, 32) float32, normalised."""
    x = (torch.from_numpy(images).float() / 255 - MEAN) / STD
    return x[:, None].expand(-1, 3, -1, -1).contiguous()


def augment(
    images: np.ndarray, rng: np.random.Generator, shift: int, erase: float
) -> np.ndarray:
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


@torch.inference_mode()
def outputs(model: Any, images: np.ndarray, bf16: bool) -> torch.Tensor:
    """What `model`, in eval mode, gives for all images, float32."""
    parts = []
    for start in range(0, len(images), 500):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            parts.append(model(to_input(images[start : start + 500])).float())
    return torch.cat(parts)


def accuracy(model: nn.Module, split: Split, bf16: bool = False) -> float:
    model.eval()
    return float(np.mean(outputs(model, split[0], bf16).argmax(1).numpy() == split[1]))


class Training:
    """A model on its way: weights, optimizer, random numbers and the curve so far."""

    def __init__(self, recipe: Recipe, images: int = EPOCH) -> None:
        self.recipe, self.per_epoch = recipe, images // recipe.batch
        self.model = build(recipe)
        self.network = MaskedAutoencoder(self.model) if recipe.masked else self.model
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), weight_decay=recipe.weight_decay
        )
        self.rng = np.random.default_rng(recipe.seed)
        self.curve: list[dict[str, float]] = []

    def epoch(self, split: Split, test: Split) -> None:
        """One epoch more, and its point on the curve."""
        started = time.process_time()
        self.network.train()
        batch, done = self.recipe.batch, len(self.curve)
        need, total = self.per_epoch * batch, 0.0
        passes = -(-need // len(split[0]))
        order = np.concatenate(
            [self.rng.permutation(len(split[0])) for _ in range(passes)]
        )
        for k in range(self.per_epoch):
            step = done * self.per_epoch + k
            rows = order[k * batch : (k + 1) * batch]
            total += self._update(step, split[0][rows], split[1][rows])
        point = {"train_loss": round(total / self.per_epoch, 4)}
        if not self.recipe.masked:
            some = (test[0][:CURVE_IMAGES], test[1][:CURVE_IMAGES])
            point["test_accuracy"] = accuracy(self.model, some, self.recipe.bf16)
        point["cpu_seconds"] = round(time.process_time() - started, 1)
        self.curve.append(point)

    def _update(self, step: int, images: np.ndarray, labels: np.ndarray) -> float:
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(recipe, step, self.per_epoch * recipe.epochs)
        inputs = to_input(augment(images, self.rng, recipe.shift, recipe.erase))
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bf16):
            if recipe.masked:
                cells = self.rng.random((len(images), self.model.patch_embed.num_patches))
                loss = self.network(inputs, torch.from_numpy(cells.argsort(1)))
            else:
                logits = self.network(inputs)
        if not recipe.masked:
            wanted = torch.from_numpy(labels)
            loss = nn.functional.cross_entropy(
                logits.float(), wanted, label_smoothing=0.1
            )
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())

    def keep(self, path: Path) -> None:
        """Write the state as a whole, or not at all."""
        state = {
            "recipe": _comparable(self.recipe),
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": json.dumps(self.rng.bit_generator.state),
            "curve": self.curve,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        with rename_at_end({partial: path}):
            torch.save(state, partial)

    def go_on_from(self, path: Path) -> None:
        """The state that `keep` wrote.

        Raises:
            SystemExit: it is of another recipe.
        """
        state = torch.load(path, weights_only=True)
        if state["recipe"] != _comparable(self.recipe):
            raise SystemExit(
                f"{path} was made by another recipe; delete it, or name a --scratch"
            )
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.bit_generator.state = json.loads(state["rng"])
        self.curve = state["curve"]


def _comparable(recipe: Recipe) -> str:
    return json.dumps(recipe.record(), sort_keys=True)


def add_probe(model: Any, split: Split, bf16: bool) -> None:
    """Fit `model.head` on the frozen features of `split`: multinomial logistic regression with a
    little weight decay on standardised features, whose scaling is then part of the head."""
    model.eval()
    head, model.head = model.head, nn.Identity()
    x = outputs(model, split[0], bf16).double()
    model.head = head
    std, mean = torch.std_mean(x, 0)
    x, labels = (x - mean) / std, torch.from_numpy(split[1])
    weight = torch.zeros(head.out_features, x.shape[1], dtype=x.dtype, requires_grad=True)
    bias = torch.zeros(head.out_features, dtype=x.dtype, requires_grad=True)
    fit = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        fit.zero_grad()
        value = nn.functional.cross_entropy(x @ weight.T + bias, labels)
        value = value + 1e-4 * weight.square().sum()
        value.backward()
        return value

    fit.step(loss)
    with torch.no_grad():
        head.weight.copy_(weight / std)
        head.bias.copy_(bias - (weight / std) @ mean)


def rounded(model: Any) -> tuple[nn.Module, nn.Module]:
    """The model in float16, and that in float32 again."""
    half = copy.deepcopy(model).half()
    return half, copy.deepcopy(half).float()


def save(training: Training, folder: Path, test: Split, threads: int) -> float:
    """The finished model as a folder, whole or not at all; its accuracy."""
    recipe, (half, again) = training.recipe, rounded(training.model)
    half.pretrained_cfg = {  # type: ignore[assignment]
        "architecture": recipe.architecture,
        "input_size": [3, SIZE, SIZE],
        "fixed_input_size": not recipe.architecture.startswith("resnet"),
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "crop_mode": "center",
        "mean": [MEAN] * 3,
        "std": [STD] * 3,
        "num_classes": 10,
        "license": "mit",
        "first_conv": recipe.first_conv,
        "classifier": recipe.classifier,
    }
    reached = accuracy(again, test)
    curve_of = f"test_accuracy of the curve: the first {CURVE_IMAGES} test images, "
    record = {
        "data": "Fashion-MNIST train, resized from 28 to 32 px, grey as RGB",
        "train_images": round(recipe.share * EPOCH),
        "test_accuracy": reached,
        "test_images": len(test[1]),
        "weights": "rounded to float16; test_accuracy is theirs",
        "epochs": len(training.curve),
        "epoch": f"{training.per_epoch} updates of {recipe.batch} images",
        "curve": training.curve,
        "curve_is": curve_of + ("as trained: bfloat16" if recipe.bf16 else "float32"),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "threads": threads,
        "recipe": recipe.record(),
    }
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    config: dict[str, Any] = {"label_names": list(CLASSES)}
    if recipe.no_skip:
        config["ablate_skip"] = list(recipe.no_skip)
    save_for_hf(half, str(partial), config, recipe.model_args, safe_serialization=True)
    (partial / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    return reached


def train(name: str, source: Path, target: Path, scratch: Path, threads: int) -> None:
    """Train one model to its end, or on from the epoch that `scratch` holds."""
    torch.set_num_threads(threads)
    set_fused_attn(False)
    recipe, state = RECIPES[name], scratch / f"{name}.pt"
    training = Training(recipe)
    if state.exists():
        training.go_on_from(state)
    split = part_of(load_split(source, "train"), recipe.share, recipe.seed)
    test = load_split(source, "t10k")
    for epoch in range(len(training.curve), recipe.epochs):
        training.epoch(split, test)
        training.keep(state)
        print(
            f"{time.strftime('%X')} {name} epoch {epoch + 1}: {training.curve[-1]}",
            flush=True,
        )
    if recipe.masked:
        add_probe(training.model, split, recipe.bf16)
    reached = save(training, target / name, test, threads)
    print(
        f"{time.strftime('%X')} {name}: test {reached:.4f}, {target / name}", flush=True
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("model", choices=list(RECIPES))
    parser.add_argument(
        "--target", type=Path, default=Path(__file__).parents[1] / "vitsee_core/demo"
    )
    parser.add_argument(
        "--scratch", type=Path, default=Path(tempfile.gettempdir()) / "vitsee-training"
    )
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    train(args.model, args.source, args.target, args.scratch, args.threads)
