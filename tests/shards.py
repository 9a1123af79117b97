"""The same images as a folder, as tar files with labels beside them, and as parquet."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from PIL import Image
from pyarrow import parquet

N_CLASSES = 3
Member = tuple[str, bytes]


def noise(seed: int, side: int = 12) -> bytes:
    """A PNG of random pixels."""
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side + 3, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def make_images(n: int = 24) -> dict[str, bytes]:
    """Path -> bytes, sorted by path; the folder c0, c1, c2 is the class."""
    return dict(sorted((f"c{k % N_CLASSES}/{k:03d}.png", noise(k)) for k in range(n)))


def label(path: str) -> int:
    return int(path[1])


def write_folder(root: Path, images: Mapping[str, bytes]) -> Path:
    for path, data in images.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def write_tar(
    path: Path, members: Sequence[Member], form: int = tarfile.USTAR_FORMAT
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
    return path


def with_labels(images: Mapping[str, bytes], kind: str = "cls") -> list[Member]:
    """Each image with its label beside it, in a member with this ending."""
    members: list[Member] = []
    for path, data in images.items():
        text = (
            str(label(path))
            if kind != "json"
            else json.dumps({"label": label(path), "w": 3})
        )
        members += [(f"{path.removesuffix('.png')}.{kind}", text.encode()), (path, data)]
    return members


def write_shards(
    folder: Path, images: Mapping[str, bytes], n: int, kind: str = "cls"
) -> str:
    """Tar files 0000, 0001, ..., and the pattern that names them; images go to each in turn."""
    for shard in range(n):
        part = dict(list(images.items())[shard::n])
        write_tar(folder / f"in1k-{shard:04d}.tar", with_labels(part, kind))
    return f"{folder}/in1k-{{0000..{n - 1:04d}}}.tar"


def write_parquet(
    path: Path, images: Mapping[str, bytes], *, group: int = 5, **columns: Sequence[Any]
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    structs = [{"bytes": data, "path": name} for name, data in images.items()]
    table = pyarrow.table(
        {"image": structs, "label": [label(name) for name in images], **columns}
    )
    parquet.write_table(table, path, row_group_size=group)
    return path
