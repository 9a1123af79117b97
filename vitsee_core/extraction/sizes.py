"""Disk usage of a planned store, for `extract --dry-run`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePosixPath

from vitsee_stores.layout import StorePlan, arrays, n_bytes


@dataclass(frozen=True)
class Size:
    """Disk usage of an array, of a folder of arrays (`acts/`), or the `total`."""

    name: str
    shape: tuple[int, ...]  # of an array, else empty
    dtype: str  # of an array, else empty
    size_bytes: int  # of the chunks before compression
    n_files: int  # chunks and metadata

    def row(self, n_images: int) -> str:
        """A line of CSV, see HEADER."""
        shape = "x".join(map(str, self.shape))
        per_image = round(self.size_bytes / n_images)
        return f"{self.name},{shape},{self.dtype},{self.size_bytes},{per_image},{self.n_files}"


HEADER = "array,shape,dtype,bytes,bytes_per_image,files"


def total_size(plan: StorePlan) -> Size:
    """The whole store; the files include its groups' metadata."""
    each = array_sizes(plan)
    groups = {str(parent) for size in each for parent in PurePosixPath(size.name).parents}
    files = sum(size.n_files for size in each) + len(groups)
    return Size("total", (), "", sum(size.size_bytes for size in each), files)


def folder_sizes(plan: StorePlan) -> list[Size]:
    """The arrays below each top folder together, largest first."""
    folders: dict[str, list[Size]] = {}
    for size in array_sizes(plan):
        top, slash, _ = size.name.partition("/")
        folders.setdefault(top + slash, []).append(size)
    sums = [
        Size(name, (), "", sum(s.size_bytes for s in some), sum(s.n_files for s in some))
        for name, some in folders.items()
    ]
    return sorted(sums, key=lambda size: -size.size_bytes)


def array_sizes(plan: StorePlan) -> list[Size]:
    """Every array, in writing order."""
    sizes = n_bytes(plan)
    return [
        Size(path, tuple(spec.shape), spec.dtype, sizes[path], math.prod(spec.grid) + 1)
        for path, spec in arrays(plan).items()
    ]
