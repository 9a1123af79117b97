"""The disk format in one place: a store's arrays, their shapes, types and chunks.

FORMAT.md is the normative text; a test compares its table with `arrays`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vitsee_stores.plan import (
    CODECS,
    AttentionGroup,
    ErfPlan,
    SiteSpec,
    StorePlan,
    TokenLayout,
)
from vitsee_stores.selectors import GROUPS, select_names

__all__ = [
    "CODECS",
    "FEATURES",
    "FORMAT_VERSION",
    "GROUPS",
    "ArraySpec",
    "AttentionGroup",
    "ErfPlan",
    "SiteSpec",
    "StorePlan",
    "TokenLayout",
    "arrays",
    "n_bytes",
    "places",
    "select_names",
]

FORMAT_VERSION = 2
# Format extensions that this package reads, as named in a manifest's `features`.
FEATURES: tuple[str, ...] = ("box", "canvas", "clips", "native", "pixel_hash", "window")
COMMIT_BYTES = 4096
CHECKSUM_BYTES = 4
SMALL_CHUNK = 4 << 20
LARGE_CHUNK = 16 << 20

Per = Literal["image", "slab", "commit", "once"]


@dataclass(frozen=True)
class ArraySpec:
    """One array.

    Attributes:
        per: what the first axis counts, and so when it is written: "image" (S rows per slab),
            "slab" (one row per slab, for all slabs or the first ones), "commit" (one row per slab,
            added by the writer on commit) or "once" (at creation).
        codec: compression of its chunks; a crc32c always follows.
        nan_ok: whether rows of valid images may contain NaN.
        pairs: both axes after the first count the images of a slab, and only entries of two valid
            images are numbers.
    """

    path: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str
    per: Per
    nan_ok: bool
    axes: tuple[str, ...]
    codec: str
    pairs: bool = False

    @property
    def fill(self) -> float:
        """Value of a chunk that was never written, and padding of the last chunks."""
        return math.nan if self.dtype.startswith("float") else 0

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(
            math.ceil(n / c) for n, c in zip(self.shape, self.chunks, strict=True)
        )

    def has_slab(self, slab: int) -> bool:
        """Whether the slab writes chunks of this array."""
        return self.per in ("image", "slab") and slab < self.grid[0]

    @property
    def n_chunks(self) -> int:
        """Number of chunks per slab."""
        return math.prod(self.grid[1:])

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk without compression and checksum."""
        return math.prod(self.chunks) * np.dtype(self.dtype).itemsize


def n_bytes(plan: StorePlan) -> dict[str, int]:
    """Uncompressed size of each array on disk, padding of the last chunks included."""
    return {
        path: math.prod(spec.grid) * (spec.chunk_bytes + CHECKSUM_BYTES)
        for path, spec in arrays(plan).items()
    }


def places(specs: Mapping[str, ArraySpec]) -> dict[str, int]:
    """Offset of each array's chunks in a row of `checksums`: arrays in the order of their paths, a
    slab's chunks of an array in C order; arrays that end before the slab keep their places."""
    begin = 0
    offsets = dict[str, int]()
    for path in sorted(path for path, spec in specs.items() if spec.has_slab(0)):
        offsets[path] = begin
        begin += specs[path].n_chunks
    return offsets


def n_places(specs: Mapping[str, ArraySpec]) -> int:
    """The length of a row of `checksums`."""
    return sum(spec.n_chunks for spec in specs.values() if spec.has_slab(0))


def arrays(plan: StorePlan) -> dict[str, ArraySpec]:
    """Every array of a store: path -> spec, in writing order."""
    table = _Specs(plan)
    for site in plan.stored:
        _site(table, site)
    for site in plan.gram_sites:
        both = (plan.slab, plan.slab)
        table.slab(f"grams/{site.name}/all", both, ("image_i", "image_j"), pairs=True)
    for group in plan.attention:
        _attention(table, group, plan.attention_level)
    if plan.rollout:
        table.image("attention/rollout", plan.attention[0].layout.n_tokens, "key")
    for name, layout in plan.sublayers:
        n = layout.n_tokens
        table.image(f"residual/{name}", (n, 3), (f"token_{n}", "product"))
    if plan.erf is not None:
        some: Any = {"n_slabs": plan.n_erf_slabs, "axis": "first_slab"}
        for name in plan.erf.sites:
            table.slab(f"erf/{name}", plan.erf.size, ("y", "x"), **some)
        table.slab("erf/count", (), (), "int64", **some)
    if plan.inputs is not None:
        pixel_axes = ("rgb", "y", "x")
        if plan.clip is None:
            table.image("input", plan.inputs, pixel_axes, "uint8")
        else:
            axes = ("sampled_frame", *pixel_axes)
            table.image("input", (plan.clip.frames, *plan.inputs), axes, "uint8")
    for name, shape in plan.weights:
        table.once(
            f"weights/{name}",
            shape,
            "float32",
            [f"{name}_{i}" for i in range(len(shape))],
        )
    n = plan.n_images
    table.once("samples/index", (n,), "int64", ["image"])
    table.once("samples/label", (n,), "int64", ["image"])
    table.once("samples/split", (n,), "int16", ["image"])
    table.once("samples/id", (n, plan.id_bytes), "uint8", ["image", "id_byte"])
    if plan.boxes:
        table.once("samples/box", (n, 4), "float32", ["image", "edge"])
    table.image("valid", (), (), "uint8")
    table.image("hash", (), (), "uint64")
    table.image("size", 2, "side", "int32")
    if plan.pixel_hashes:
        table.image("pixel_hash", (), (), "uint64")
    if plan.clip is not None:
        table.image("seconds", (), (), nan_ok=True)
    table.slab("n_valid", (), (), "int64")
    table.commit("checksums", n_places(table.specs), "chunk", "uint32")
    table.commit("commits", COMMIT_BYTES, "marker_byte", "uint8")
    return table.specs


class _Specs:
    """Collects array specs; shapes and axes are given without the first axis."""

    def __init__(self, plan: StorePlan):
        self.plan = plan
        self.specs: dict[str, ArraySpec] = {}

    def image(
        self,
        path: str,
        shape: int | tuple[int, ...],
        axes: str | tuple[str, ...],
        dtype: str = "float32",
        nan_ok: bool = False,
    ) -> None:
        rest = (shape,) if isinstance(shape, int) else shape
        names = (axes,) if isinstance(axes, str) else axes
        full = (self.plan.n_images, *rest)
        chunks = (self.plan.slab, *rest)
        chunks = _chunks(chunks, np.dtype(dtype).itemsize)
        axes = ("image", *names)
        codec = self.plan.codec
        self._add(ArraySpec(path, full, chunks, dtype, "image", nan_ok, axes, codec))

    def slab(
        self,
        path: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        dtype: str = "float32",
        pairs: bool = False,
        n_slabs: int | None = None,
        axis: str = "slab",
    ) -> None:
        full = (self.plan.n_slabs if n_slabs is None else n_slabs, *shape)
        chunks = _chunks((1, *shape), np.dtype(dtype).itemsize)
        axes = (axis, *axes)
        codec = self.plan.codec
        self._add(ArraySpec(path, full, chunks, dtype, "slab", False, axes, codec, pairs))

    def commit(self, path: str, length: int, axis: str, dtype: str) -> None:
        full = (self.plan.n_slabs, length)
        axes = ("slab", axis)
        self._add(
            ArraySpec(path, full, (1, length), dtype, "commit", False, axes, "none")
        )

    def once(
        self, path: str, shape: tuple[int, ...], dtype: str, axes: Sequence[str]
    ) -> None:
        self._add(
            ArraySpec(path, shape, shape, dtype, "once", False, tuple(axes), "none")
        )

    def _add(self, spec: ArraySpec) -> None:
        if spec.path in self.specs:
            raise ValueError(f"two arrays would be {spec.path}")
        self.specs[spec.path] = spec


def _chunks(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    """Chunk shape within a slab: whole along the first axis; along each further axis, until a chunk
    has at most 16 MiB, the length giving 4 to 16 MiB with the least padding, the shortest of
    equals."""
    chunks = list(shape)
    for axis in range(1, len(shape)):
        one = math.prod([*chunks[:axis], 1, *chunks[axis + 1 :]]) * item
        if one * shape[axis] <= LARGE_CHUNK:
            break
        shortest = max(1, math.ceil(SMALL_CHUNK / one))
        longest = max(shortest, LARGE_CHUNK // one)
        n = shape[axis]
        low = min(shortest, shape[axis])
        high = min(longest, shape[axis])
        # The best lengths are the shortest that give this number of pieces.
        most = math.ceil(n / low)
        least = math.ceil(n / high)
        if most - least < high - low:
            lengths = {
                max(low, math.ceil(n / pieces)) for pieces in range(least, most + 1)
            }
        else:
            lengths = set(range(low, high + 1))
        chunks[axis] = min(lengths, key=lambda c: (math.ceil(n / c) * c, c))
    return tuple(chunks)


def _site(table: _Specs, site: SiteSpec) -> None:
    if site.kind == "vector":
        table.image(f"vectors/{site.name}", site.shape, f"channel_{site.dim}")
        return
    layout = site.layout
    if site.tokens == "all":
        folder = f"acts/{site.name}"
        if layout is None:
            axes = tuple(f"axis_{i}" for i in range(1, len(site.shape) + 1))
            table.image(f"{folder}/raw", site.shape, axes, site.dtype)
        else:
            if layout.prefix:
                shape = (layout.n_prefix, site.dim)
                table.image(
                    f"{folder}/prefix", shape, ("prefix_token", "channel"), site.dtype
                )
            if layout.grid is None:
                table.image(
                    f"{folder}/rows",
                    (layout.rows, site.dim),
                    ("row", "channel"),
                    site.dtype,
                )
            else:
                grid_axes = ("frame", "row", "col", "channel")[-1 - len(layout.body) :]
                table.image(
                    f"{folder}/grid", (*layout.body, site.dim), grid_axes, site.dtype
                )
    if layout is not None:
        if layout.cls_tokens:
            table.image(f"pooled/{site.name}/cls", site.dim, "channel")
        table.image(f"pooled/{site.name}/mean", site.dim, "channel")


def _attention(table: _Specs, group: AttentionGroup, level: str) -> None:
    layout = group.layout
    folder = group.folder
    if layout.grid is None:
        raise ValueError(f"attention of {group.blocks} without a grid")
    n_blocks = len(group.blocks)
    n_heads = max(group.n_heads)
    n_tokens = layout.n_tokens
    ragged = len(set(group.n_heads)) > 1
    # xarray needs one size per axis name within a folder and everything below it.
    suffix = f"_{group.prefix}" if group.prefix else ""
    block, head, dy, dx, key = (
        f"{name}{suffix}" for name in ("block", "head", "dy", "dx", "key")
    )
    heads = (n_blocks, n_heads)
    head_axes = (block, head)
    in_time = () if layout.frames is None else ("distance_frames", "frame_mass")
    for name in ("distance_px", "distance_unit", "qk_nmi", *in_time):
        table.image(folder + name, heads, head_axes, nan_ok=True)
    for name in (
        "distance_px_raw",
        "prefix_mass",
        "entropy",
        "query_std",
        "received_max",
    ):
        table.image(folder + name, heads, head_axes, nan_ok=ragged)
    for name in ("n_queries", "received_argmax"):
        table.image(folder + name, heads, head_axes, "int32")
    table.image(folder + "head_std", n_blocks, block)
    gh, gw = layout.grid
    table.slab(folder + "aligned", (*heads, 2 * gh - 1, 2 * gw - 1), (*head_axes, dy, dx))
    if layout.frames is not None:
        apart = (*heads, 2 * layout.frames - 1)
        table.slab(folder + "aligned_frames", apart, (*head_axes, f"dt{suffix}"))
    per_key = (*heads, n_tokens)
    key_axes = (*head_axes, key)
    table.slab(folder + "received", per_key, key_axes)
    if layout.cls_tokens:
        table.slab(folder + "cls_map", per_key, key_axes)
    if level in ("rows", "full"):
        table.image(folder + "received_rows", per_key, key_axes, "float16", nan_ok=ragged)
        if layout.cls_tokens:
            table.image(folder + "cls_rows", per_key, key_axes, "float16", nan_ok=ragged)
    if level == "full":
        for name, count in zip(group.blocks, group.n_heads, strict=True):
            table.image(
                f"attention/full/{name}",
                (count, n_tokens, n_tokens),
                (f"head_{count}", f"query_{n_tokens}", f"key_{n_tokens}"),
                "float16",
            )
