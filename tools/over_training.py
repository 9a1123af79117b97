"""Train a model of the demo again and keep its weights on the way, for docs/guide/training-vit.md.

    python tools/over_training.py run/seed0                # the bundled 2,000 images, three minutes
    python tools/over_training.py run/seed0 --data FASHION_MNIST_DIR  # as the demo's own

Writes run/seed0/step_0.pt and so on: the weights before the first update, and after 10, 20, 30, 50,
70, 100 and so on up to the last. Recipe and updates are those of train_demo_models.py, of which
--images shortens the epochs (the learning rate follows); without --data its 2,000 bundled training
images are seen again and again. FASHION_MNIST_DIR holds the four IDX files of the data set (Debian:
dataset-fashion-mnist, under /usr/share/datasets).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from demo_recipes import RECIPES, Recipe
from timm.layers.config import set_fused_attn
from train_demo_models import EPOCH, Split, Training, load_split, resized

from vitsee_core import demo
from vitsee_core.tables.files import rename_at_end

BUNDLED = 6_000  # images of an epoch, of the bundled ones


def steps_kept(last: int) -> list[int]:
    """0, 10, 20, 30, 50, 70, 100 and so on up to the last step, which is kept in any case: evenly
    spaced on a logarithmic axis."""
    rounds = (
        m * 10**k
        for k in range(1, 10)
        for m in (1, 1.5, 2, 3, 5, 7)
        if (m, k) != (1.5, 1)
    )
    return [0, *(int(step) for step in rounds if step < last), last]


def bundled_split(name: str) -> Split:
    """The bundled images of a split, resized as the models' own transform does it, and labels."""
    with np.load(demo.data_file()) as file:
        mine = file["splits"] == name
        return resized(file["images"][mine]), file["labels"][mine].astype(np.int64)


class Kept(Training):
    """A training that keeps its weights at the steps of `steps_kept`."""

    def __init__(self, recipe: Recipe, images: int, folder: Path) -> None:
        super().__init__(recipe, images)
        self.folder = folder
        self.steps = steps_kept(self.per_epoch * recipe.epochs)
        folder.mkdir(parents=True, exist_ok=True)
        self._keep_at(0)

    def _update(self, step: int, images: np.ndarray, labels: np.ndarray) -> float:
        loss = super()._update(step, images, labels)
        self._keep_at(step + 1)
        return loss

    def _keep_at(self, step: int) -> None:
        """Write the weights after so many updates, whole or not at all, if they are wanted."""
        if step not in self.steps:
            return
        path = self.folder / f"step_{step}.pt"
        partial = path.with_name(f"{path.name}.part")
        with rename_at_end({partial: path}):
            torch.save({"state_dict": self.model.state_dict(), "step": step}, partial)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=list(RECIPES), default="vit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, metavar="FASHION_MNIST_DIR")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--images", type=int, help="seen in an epoch")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    set_fused_attn(False)
    recipe = replace(RECIPES[args.model], seed=args.seed)
    recipe = replace(recipe, epochs=args.epochs or recipe.epochs)
    names = ("train", "t10k") if args.data else ("train", "test")
    train, test = (
        load_split(args.data, n) if args.data else bundled_split(n) for n in names
    )
    images = args.images or (EPOCH if args.data else BUNDLED)
    training = Kept(recipe, images, args.folder)
    for epoch in range(recipe.epochs):
        training.epoch(train, test)
        print(
            f"{time.strftime('%X')} epoch {epoch + 1}: {training.curve[-1]}", flush=True
        )


if __name__ == "__main__":
    main()
