"""A miniature of ROxford in its published layout: `jpg/*.jpg` and `gnd_roxford5k.pkl`.

Buildings are objects of the bundled classes: an easy image shows the query's object large, a hard
one small and partly hidden, a junk one only its edge; the rest shows objects of other classes.
The box of a query encloses its object.

    write_revisited(folder)
    vitsee extract demo:vit --data folder/jpg --tokens pooled -o ox.zarr
    vitsee retrieve ox.zarr --truth folder/gnd_roxford5k.pkl
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitsee_core.demo.scenes import Placed, Scene, box_of, compose, sprite

NAME = "roxford5k"
LANDMARKS = ("Trouser", "Bag", "Ankle boot", "Dress", "Sandal")
OTHERS = ("Shirt", "Sneaker", "Pullover", "Coat", "T-shirt/top")
SIZES = ((60, 80), (80, 60), (64, 64))
_KINDS = {"easy": 0.8, "hard": 0.45, "junk": 0.6}


@dataclass
class _Set:
    folder: Path
    images: list[str] = field(default_factory=list)

    def save(self, name: str, scene: Scene) -> None:
        picture = Image.fromarray(scene.pixels)
        picture.save(self.folder / "jpg" / f"{name}.jpg", quality=92)

    def add(self, name: str, scene: Scene) -> int:
        self.save(name, scene)
        self.images.append(name)
        return len(self.images) - 1


def write_revisited(
    folder: str | Path,
    seed: int = 0,
    n_queries: int = 6,
    n_each: int = 3,
    n_others: int = 20,
) -> None:
    """Write the set; the same for the same arguments.

    Args:
        folder: made if it is missing.
        seed: of all scenes.
        n_queries: their objects are those of `LANDMARKS` in turn.
        n_each: easy images of a landmark; one less are hard, one is junk.
        n_others: images of other objects.
    """
    folder = Path(folder)
    (folder / "jpg").mkdir(parents=True, exist_ok=True)
    made = _Set(folder)
    lists: dict[str, dict[str, list[int]]] = {}
    counts = {"easy": n_each, "hard": n_each - 1, "junk": 1}
    landmarks = LANDMARKS[: max(1, min(n_queries, len(LANDMARKS)))]
    for landmark in landmarks:
        lists[landmark] = {
            kind: [
                made.add(
                    f"{_stem(landmark)}_{place}{i:05d}",
                    _scene(landmark, kind, seed, k, i),
                )
                for i in range(counts[kind])
            ]
            for place, (k, kind) in zip((10, 20, 30), enumerate(_KINDS), strict=True)
        }
    for i in range(n_others):
        other = OTHERS[i % len(OTHERS)]
        made.add(f"{_stem(other)}_40{i:05d}", _scene(other, "easy", seed, 3, i))
    queries = []
    truth = []
    for i in range(n_queries):
        landmark = landmarks[i % len(landmarks)]
        scene = _scene(landmark, "easy", seed, 4, i)
        queries.append(f"{_stem(landmark)}_00{i:05d}")
        made.save(queries[-1], scene)
        truth.append(
            {"bbx": [float(edge) for edge in box_of(scene.masks[0])]} | lists[landmark]
        )
    found: dict[str, Any] = {"imlist": made.images, "qimlist": queries, "gnd": truth}
    (folder / f"gnd_{NAME}.pkl").write_bytes(pickle.dumps(found, protocol=2))


def _stem(name: str) -> str:
    return name.lower().replace(" ", "_").replace("/", "_").replace("-", "_")


def _scene(name: str, kind: str, seed: int, k: int, i: int) -> Scene:
    """One object of a class, as large and as visible as its kind demands."""
    rng = np.random.default_rng((seed, k, i, *name.encode()))
    size = SIZES[int(rng.integers(len(SIZES)))]
    one = sprite(name, int(rng.integers(100)), max(8, round(_KINDS[kind] * min(size))))
    height, width = one.mask.shape
    top = int(rng.integers(0, size[0] - height + 1))
    left = int(rng.integers(0, size[1] - width + 1))
    placed = [Placed(one, top, left)]
    if kind == "hard":
        cover = sprite(OTHERS[i % len(OTHERS)], i, max(4, height // 2))
        placed.append(Placed(cover, top + height // 2, left + width // 3))
    if kind == "junk":
        placed = [Placed(one, top, size[1] - max(2, width // 6))]
    return compose(size, placed, int(rng.integers(2**31)))
