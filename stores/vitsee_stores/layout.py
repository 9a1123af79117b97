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
    "checksum_offsets",
    "n_bytes",
    "select_names",
]

# The number changes only where what was written before is not read any more.
FORMAT_VERSION = 2
# Format extensions that this package reads, as named in a manifest's `features`.
FEATURES: tuple[str, ...] = ("box", "canvas", "clips", "native", "pixel_hash", "window")
COMMIT_BYTES = 4096
CHECKSUM_BYTES = 4  # a crc32c
# A chunk above MAX_CHUNK_BYTES is cut into some of at least MIN_CHUNK_BYTES.
MIN_CHUNK_BYTES = 4 << 20
MAX_CHUNK_BYTES = 16 << 20

Per = Literal["image", "slab", "commit", "once"]


@dataclass(frozen=True)
class ArraySpec:
    """One array of a store.

    Attributes:
        path: path below the store's root, `acts/blocks.3.out/grid`.
        shape: lengths of all axes.
        chunks: lengths of a chunk along these axes.
        dtype: numpy's name of the type of its values.
        per: what the first axis counts, and so when it is written: "image" (one row for each
            image of a slab), "slab" (one row for each slab, of all slabs or the first ones),
            "commit" (one row for each slab, added by the writer on commit) or "once" (at the
            store's creation).
        nan_ok: whether rows of valid images may contain NaN.
        axes: name of each axis.
        codec: compression of its chunks; a crc32c always follows.
        pairs: whether both axes after the first count the images of a slab; only entries of
            two valid images are numbers then.
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
        if self.dtype.startswith("float"):
            return math.nan
        return 0

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(
            math.ceil(n / c) for n, c in zip(self.shape, self.chunks, strict=True)
        )

    def has_slab(self, slab: int) -> bool:
        """Return whether chunks of this array are written with the slab."""
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
    """Return the uncompressed size of each array on disk, by path.

    Padding of the last chunks and checksums are included.
    """
    return {
        path: math.prod(spec.grid) * (spec.chunk_bytes + CHECKSUM_BYTES)
        for path, spec in arrays(plan).items()
    }


def checksum_offsets(specs: Mapping[str, ArraySpec]) -> dict[str, int]:
    """Return the offset of each array's chunks in a row of `checksums`, by path.

    Arrays stand in the order of their paths, the chunks of an array in C order. Arrays that
    end before a slab keep their entries in its row, so that all rows have one length.
    """
    begin = 0
    offsets = dict[str, int]()
    for path in sorted(path for path, spec in specs.items() if spec.has_slab(0)):
        offsets[path] = begin
        begin += specs[path].n_chunks
    return offsets


def n_checksums(specs: Mapping[str, ArraySpec]) -> int:
    """Return the length of a row of `checksums`: the number of chunks of slab 0."""
    return sum(spec.n_chunks for spec in specs.values() if spec.has_slab(0))


def arrays(plan: StorePlan) -> dict[str, ArraySpec]:
    """Return every array of a store, path -> spec, in writing order.

    The order of paths does not matter to readers; FORMAT.md lists the arrays.
    """
    table = _ArrayTable(plan)
    for site in plan.stored:
        _add_site_arrays(table, site)
    for site in plan.gram_sites:
        table.slab(
            f"grams/{site.name}/all",
            shape=(plan.slab, plan.slab),
            axes=("image_i", "image_j"),
            pairs=True,
        )
    for group in plan.attention:
        _add_attention_arrays(table, group, plan.attention_level)
    if plan.rollout:
        table.image("attention/rollout", plan.attention[0].layout.n_tokens, "key")
    for name, layout in plan.sublayers:
        n_tokens = layout.n_tokens
        axes = (f"token_{n_tokens}", "product")
        table.image(f"residual/{name}", (n_tokens, 3), axes)
    if plan.erf is not None:
        first_slabs: Any = {"n_slabs": plan.n_erf_slabs, "slab_axis": "first_slab"}
        for name in plan.erf.sites:
            table.slab(f"erf/{name}", plan.erf.size, ("y", "x"), **first_slabs)
        table.slab("erf/count", (), (), "int64", **first_slabs)
    if plan.inputs is not None:
        pixel_axes = ("rgb", "y", "x")
        if plan.clip is None:
            table.image("input", plan.inputs, pixel_axes, "uint8")
        else:
            clip_axes = ("sampled_frame", *pixel_axes)
            table.image("input", (plan.clip.frames, *plan.inputs), clip_axes, "uint8")
    for name, shape in plan.weights:
        weight_axes = [f"{name}_{i}" for i in range(len(shape))]
        table.once(f"weights/{name}", shape, "float32", weight_axes)
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
    table.commit("checksums", n_checksums(table.specs), "chunk", "uint32")
    table.commit("commits", COMMIT_BYTES, "marker_byte", "uint8")
    return table.specs


class _ArrayTable:
    """Collects the array specs of a plan.

    Shapes and axes are given without the first axis, which follows from the method.
    """

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
        """Add an array with one row for each image."""
        if isinstance(shape, int):
            shape = (shape,)
        if isinstance(axes, str):
            axes = (axes,)
        spec = ArraySpec(
            path=path,
            shape=(self.plan.n_images, *shape),
            chunks=_chunks((self.plan.slab, *shape), np.dtype(dtype).itemsize),
            dtype=dtype,
            per="image",
            nan_ok=nan_ok,
            axes=("image", *axes),
            codec=self.plan.codec,
        )
        self._add(spec)

    def slab(
        self,
        path: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        dtype: str = "float32",
        pairs: bool = False,
        n_slabs: int | None = None,
        slab_axis: str = "slab",
    ) -> None:
        """Add an array with one row for each slab.

        Args:
            n_slabs: number of leading slabs with a row; None for all.
            slab_axis: name of the first axis. Another length needs another name.
        """
        if n_slabs is None:
            n_slabs = self.plan.n_slabs
        spec = ArraySpec(
            path=path,
            shape=(n_slabs, *shape),
            chunks=_chunks((1, *shape), np.dtype(dtype).itemsize),
            dtype=dtype,
            per="slab",
            nan_ok=False,
            axes=(slab_axis, *axes),
            codec=self.plan.codec,
            pairs=pairs,
        )
        self._add(spec)

    def commit(self, path: str, length: int, axis: str, dtype: str) -> None:
        """Add an array that the writer fills on commit, one row for each slab."""
        spec = ArraySpec(
            path=path,
            shape=(self.plan.n_slabs, length),
            chunks=(1, length),
            dtype=dtype,
            per="commit",
            nan_ok=False,
            axes=("slab", axis),
            codec="none",
        )
        self._add(spec)

    def once(
        self, path: str, shape: tuple[int, ...], dtype: str, axes: Sequence[str]
    ) -> None:
        """Add an array of one chunk that is written at the store's creation."""
        spec = ArraySpec(
            path=path,
            shape=shape,
            chunks=shape,
            dtype=dtype,
            per="once",
            nan_ok=False,
            axes=tuple(axes),
            codec="none",
        )
        self._add(spec)

    def _add(self, spec: ArraySpec) -> None:
        """Add an array. Raises ValueError: there is one of this path."""
        if spec.path in self.specs:
            raise ValueError(f"two arrays would be {spec.path}")
        self.specs[spec.path] = spec


def _chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the chunk shape of a slab's part of an array.

    Chunks are whole along the first axis, and along the others while they have at most
    16 MiB. Else the first of these axes is cut to the length that gives 4 to 16 MiB with the
    least padding, the shortest of equal ones; or to 1, and then the next axis likewise.

    Args:
        shape: shape of the slab's part.
        itemsize: bytes of one value.
    """
    chunks = list(shape)
    for axis in range(1, len(shape)):
        n = shape[axis]
        # bytes of a chunk that is cut to length 1 along this axis
        layer_bytes = math.prod([*chunks[:axis], 1, *chunks[axis + 1 :]]) * itemsize
        if layer_bytes * n <= MAX_CHUNK_BYTES:
            break
        shortest = max(1, math.ceil(MIN_CHUNK_BYTES / layer_bytes))
        longest = max(shortest, MAX_CHUNK_BYTES // layer_bytes)
        low = min(shortest, n)
        high = min(longest, n)
        # For each number of chunks only the shortest length can be the best. Try these, or
        # all lengths where those are fewer.
        max_pieces = math.ceil(n / low)
        min_pieces = math.ceil(n / high)
        if max_pieces - min_pieces < high - low:
            lengths = {
                max(low, math.ceil(n / n_pieces))
                for n_pieces in range(min_pieces, max_pieces + 1)
            }
        else:
            lengths = set(range(low, high + 1))
        # ceil(n / length) * length is the padded length of the axis.
        chunks[axis] = min(
            lengths, key=lambda length: (math.ceil(n / length) * length, length)
        )
    return tuple(chunks)


def _add_site_arrays(table: _ArrayTable, site: SiteSpec) -> None:
    """Add the arrays of one stored site: `vectors/`, or `acts/` and `pooled/`."""
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
                grid_axes: tuple[str, ...] = ("row", "col", "channel")
                if layout.frames is not None:
                    grid_axes = ("frame", *grid_axes)
                table.image(
                    f"{folder}/grid", (*layout.body, site.dim), grid_axes, site.dtype
                )
    if layout is not None:
        if layout.cls_tokens:
            table.image(f"pooled/{site.name}/cls", site.dim, "channel")
        table.image(f"pooled/{site.name}/mean", site.dim, "channel")


def _add_attention_arrays(table: _ArrayTable, group: AttentionGroup, level: str) -> None:
    """Add the attention summaries of one group of blocks, of the levels up to `level`."""
    layout = group.layout
    folder = group.folder
    if layout.grid is None:
        raise ValueError(f"attention of {group.blocks} without a grid")
    n_blocks = len(group.blocks)
    n_heads = max(group.n_heads)
    n_tokens = layout.n_tokens
    # Blocks with fewer heads than others have NaN in place of the heads that they lack.
    ragged = len(set(group.n_heads)) > 1
    # xarray needs one size per axis name within a folder and everything below it.
    suffix = f"_{group.prefix}" if group.prefix else ""
    block = f"block{suffix}"
    head = f"head{suffix}"
    key = f"key{suffix}"
    heads = (n_blocks, n_heads)
    head_axes = (block, head)
    nan_names = ["distance_px", "distance_unit", "qk_nmi"]
    if layout.frames is not None:
        nan_names += ["distance_frames", "frame_mass"]
    for name in nan_names:
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
    rows, cols = layout.grid
    # Offsets key - query run from -(rows - 1) to rows - 1, and so along the other axes.
    table.slab(
        folder + "aligned",
        shape=(*heads, 2 * rows - 1, 2 * cols - 1),
        axes=(*head_axes, f"dy{suffix}", f"dx{suffix}"),
    )
    if layout.frames is not None:
        table.slab(
            folder + "aligned_frames",
            shape=(*heads, 2 * layout.frames - 1),
            axes=(*head_axes, f"dt{suffix}"),
        )
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
