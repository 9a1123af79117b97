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
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitsee_core.demo.scenes import Placed, Scene, box_of, compose, sprite

NAME = "roxford5k"
LANDMARKS = ("Trouser", "Bag", "Ankle boot", "Dress", "Sandal")
OTHERS = ("Shirt", "Sneaker", "Pullover", "Coat", "T-shirt/top")
SIZES = ((60, 80), (80, 60), (64, 64))  # (height, width) of images
# Kind of an image -> length of its object, as a share of the image's shorter side.
_LENGTHS = {"easy": 0.8, "hard": 0.45, "junk": 0.6}


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
    names: list[str] = []  # of the images that are searched
    # Landmark -> kind -> indices into `names`.
    indices: dict[str, dict[str, list[int]]] = {}
    counts = {"easy": n_each, "hard": n_each - 1, "junk": 1}
    landmarks = LANDMARKS[: max(1, min(n_queries, len(LANDMARKS)))]
    for landmark in landmarks:
        indices[landmark] = {}
        # The first number of a scene's seed and of a file's name is that of its kind.
        for k, kind in enumerate(_LENGTHS):
            indices[landmark][kind] = []
            for i in range(counts[kind]):
                indices[landmark][kind].append(len(names))
                names.append(f"{_stem(landmark)}_{k + 1}0{i:05d}")
                _save(folder, names[-1], _scene(landmark, kind, (seed, k, i)))
    for i in range(n_others):
        other = OTHERS[i % len(OTHERS)]
        names.append(f"{_stem(other)}_40{i:05d}")
        _save(folder, names[-1], _scene(other, "easy", (seed, 3, i)))
    queries: list[str] = []
    truth: list[dict[str, Any]] = []
    for i in range(n_queries):
        landmark = landmarks[i % len(landmarks)]
        scene = _scene(landmark, "easy", (seed, 4, i))
        queries.append(f"{_stem(landmark)}_00{i:05d}")
        _save(folder, queries[-1], scene)
        box = [float(edge) for edge in box_of(scene.masks[0])]
        truth.append({"bbx": box, **indices[landmark]})
    content = {"imlist": names, "qimlist": queries, "gnd": truth}
    # Protocol 2, as the published file of Python 2.
    data = pickle.dumps(content, protocol=2)
    (folder / f"gnd_{NAME}.pkl").write_bytes(data)


def _save(folder: Path, name: str, scene: Scene) -> None:
    """Write an image of the set."""
    Image.fromarray(scene.pixels).save(folder / "jpg" / f"{name}.jpg", quality=92)


def _stem(name: str) -> str:
    """Return a class's name as the beginning of files' names."""
    return name.lower().replace(" ", "_").replace("/", "_").replace("-", "_")


def _scene(name: str, kind: str, seed: tuple[int, int, int]) -> Scene:
    """Return a scene with one object, as large and as visible as its kind demands.

    Args:
        name: the object's class.
        kind: "easy", "hard" or "junk".
        seed: the last number counts the scenes of the kind.
    """
    rng = np.random.default_rng((*seed, *name.encode()))
    size = SIZES[int(rng.integers(len(SIZES)))]
    instance = int(rng.integers(100))
    item = sprite(name, instance, max(8, round(_LENGTHS[kind] * min(size))))
    height, width = item.mask.shape
    top = int(rng.integers(0, size[0] - height + 1))
    left = int(rng.integers(0, size[1] - width + 1))
    placed = [Placed(item, top, left)]
    if kind == "hard":
        # Another object lies over its lower right part.
        cover_number = seed[2]
        cover_name = OTHERS[cover_number % len(OTHERS)]
        cover = sprite(cover_name, cover_number, max(4, height // 2))
        placed.append(Placed(cover, top + height // 2, left + width // 3))
    if kind == "junk":
        # All but its left edge is beyond the frame.
        placed = [Placed(item, top, size[1] - max(2, width // 6))]
    return compose(size, placed, int(rng.integers(2**31)))
