"""Stores of vectors and tokens that others computed: neural responses, features of other tools.

The arrays come from files (`array_files.py` lists their kinds); each array becomes a site.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features.array_files import Array, Arrays, read_arrays, read_ids
from vitsee_core.images.class_labels import class_labels
from vitsee_core.images.decoding import hash64
from vitsee_core.runtime.progress import SILENT, Progress, counting
from vitsee_core.runtime.versions import result_versions
from vitsee_stores import Store, StoreWriter, open_store
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import SiteSpec, StorePlan, TokenLayout
from vitsee_stores.manifest import abbreviate, new_manifest
from vitsee_stores.samples import Samples
from vitsee_stores.url import Place

# Images per slab, and per step of a pass over an array.
SLAB = 256
# The group of a model's blocks, so that analyses take imported sites by default.
GROUP = "blocks"
# Numbers beyond these become infinite when they are stored.
LARGEST = {"float16": 65504.0, "float32": float(np.finfo(np.float32).max)}


def import_arrays(
    paths: Sequence[Path],
    output: Place,
    *,
    names: Sequence[str] = (),
    ids: Path | None = None,
    like: Store | None = None,
    prefix: Sequence[str] = (),
    grid: tuple[int, int] | None = None,
    dtype: str = "float32",
    model: str = "",
    command: str = "",
    progress: Progress = SILENT,
) -> Store:
    """Write a store of the arrays of files, one site each, and return it.

    Args:
        paths: files of arrays (images, dim) or (images, tokens, dim).
        names: names of the sites, in order; by default the arrays' names in their files.
        ids: file with the ids of the rows; by default a table's column id, or `like`'s ids.
        like: a store of the same images: the new one has its images in its order, and pairs with
            it; those that the arrays lack are not valid.
        prefix: kinds of the tokens before the patches, in arrays with tokens: cls, reg0, ...
        grid: rows and columns of these patches; None for a square.
        dtype: dtype of tokens; vectors are float32.
        model: name of what computed them; train and test stores have to agree in it.
        command: for the store's provenance.

    Raises:
        VitseeError: arrays that do not fit each other, the ids or `like`; numbers beyond `dtype`.
        StoreError: there is another store at `output`, or it cannot be written.
    """
    files = [read_arrays(path) for path in paths]
    arrays = _name_arrays(files, names)
    n_rows = _count_rows(arrays)
    images = _order_images(n_rows, files, ids, like)
    samples = images.samples
    sites = _make_sites(arrays, prefix=prefix, grid=grid, dtype=dtype, like=like)
    plan = StorePlan(len(samples), min(SLAB, len(samples)), "zstd", sites)
    model_name = model or paths[0].stem
    identity = {
        "command": "import",
        "model": {"name": model_name},
        # An interrupted import is completed from the same numbers only.
        "arrays": {name: _digest(array) for name, array in arrays.items()},
        # Stores that are paired must agree in these.
        "order": like.manifest.identity.get("order") if like else "dataset",
        "seed": like.manifest.identity.get("seed", 0) if like else 0,
        "tokens": {"default": "all"},
    }
    # Table column of each entry of a vector, which has no other record.
    entry_names = {
        name: entries for file in files for name, entries in file.columns.items()
    }
    info = {
        "command": command,
        "data": {"data": abbreviate([str(path) for path in paths])},
        "versions": result_versions(),
        "columns": entry_names,
    }
    manifest = new_manifest(
        identity,
        plan,
        samples,
        model={"name": model_name, "weights": {"source": "imported"}},
        class_names=images.class_names,
        info=info,
    )
    # A pass over all numbers before the first write: an error leaves nothing half written.
    for site in sites:
        _check_numbers(site, arrays[site.name], samples.ids, images.rows)
    writer = StoreWriter.create_or_join(output, manifest, samples)
    with counting(progress, len(samples), "images"):
        for k in range(plan.n_slabs):
            slab_rows = plan.rows(k)
            slab = _slab_arrays(sites, arrays, images, slab_rows)
            writer.write_slab(k, slab, {"command": command})
            progress.advance(len(slab["valid"]))
    writer.finish()
    return open_store(output)


def _name_arrays(files: Sequence[Arrays], names: Sequence[str]) -> dict[str, Array]:
    """Return site -> array, by `names` if there are any, else by the names in the files.

    Raises:
        VitseeError: another number of names than of arrays, or two arrays of one name.
    """
    original_names: list[str] = []
    arrays: list[Array] = []
    for file in files:
        original_names += file.values.keys()
        arrays += file.values.values()
    if names and len(names) != len(arrays):
        raise VitseeError(
            f"--as is given {len(names)} times for {len(arrays)} arrays "
            f"({abbreviate(original_names)}); expected one a site"
        )
    site_names = names or original_names
    repeated = [name for name, n in Counter(site_names).items() if n > 1]
    if repeated:
        raise VitseeError(
            f"two arrays would be the site {repeated[0]}; name each with --as"
        )
    return dict(zip(site_names, arrays, strict=True))


def _count_rows(arrays: dict[str, Array]) -> int:
    """Return the number of rows that all arrays have; raise a VitseeError if they differ, or 0."""
    first_name = next(iter(arrays))
    n_rows = len(arrays[first_name])
    for name, array in arrays.items():
        if len(array) != n_rows:
            raise VitseeError(
                f"{first_name} has {n_rows} rows and {name} {len(array)}; expected one "
                "row an image in all"
            )
    if not n_rows:
        raise VitseeError(f"{first_name} has no rows; expected one an image")
    return n_rows


class _ImportedImages(NamedTuple):
    """The images of the store that is made, in its order.

    Attributes:
        samples: their ids, labels and splits.
        hashes: (images,) hashes of their pixels.
        sizes: (images, 2) height and width in pixels, 0 where unknown.
        rows: (images,) row of each in the arrays, -1 for none.
        class_names: names of the labels; None if labels are numbers.
    """

    samples: Samples
    hashes: NDArray[np.uint64]
    sizes: NDArray[np.int32]
    rows: NDArray[np.int64]
    class_names: list[str] | None


def _order_images(
    n_rows: int, files: Sequence[Arrays], id_path: Path | None, like: Store | None
) -> _ImportedImages:
    """Return the images: those of `like` in its order, else those of the rows.

    Args:
        n_rows: rows of the arrays.
        files: the files, whose tables may have ids and labels.
        id_path: the file of ids, which replace those of the tables.
        like: the store of the same images, if any.

    Raises:
        VitseeError: no ids, another number of ids than of rows, or an id twice.
    """
    ids: list[str] | None = None
    labels: list[str] | None = None
    if id_path is not None:
        ids, labels = read_ids(id_path)
    else:
        # Of several tables with ids the last one counts.
        for file in files:
            ids = file.ids or ids
            labels = file.labels or labels
    if ids is not None and len(ids) != n_rows:
        raise VitseeError(
            f"{id_path or 'the table'} has {len(ids)} ids for {n_rows} rows; expected "
            "one a row"
        )
    repeated = [name for name, n in Counter(ids or ()).items() if n > 1]
    if repeated:
        raise VitseeError(
            f"two rows have the id {repeated[0]!r}; expected one row an image"
        )
    if like is not None:
        return _images_of_store(like, n_rows, ids)
    if ids is None:
        raise VitseeError(
            "whose rows these are is not said: give --ids FILE, or --like STORE"
        )
    # Without labels each image has the number -1, as in an unlabelled folder.
    label_numbers, class_names = class_labels(labels or [""] * n_rows)
    rows = np.arange(n_rows, dtype=np.int64)
    # There are no files to hash: images are the same where their ids are.
    hashes = np.array([hash64(os.fsencode(name)) for name in ids], np.uint64)
    return _ImportedImages(
        samples=Samples(rows, ids, label_numbers, splits=[""] * n_rows),
        hashes=hashes,
        sizes=np.zeros((n_rows, 2), np.int32),
        rows=rows,
        class_names=class_names,
    )


def _images_of_store(like: Store, n_rows: int, ids: list[str] | None) -> _ImportedImages:
    """Return the images of a store in its order, with the arrays' row of each.

    Without ids the rows are the store's images, or its valid ones, in its order.

    Raises:
        VitseeError: another number of rows, or ids of which the store has none.
    """
    samples = like.samples
    rows = np.full(len(samples), -1, np.int64)
    if ids is None:
        valid = np.flatnonzero(samples.valid)
        if n_rows == len(samples):
            rows[:] = np.arange(n_rows)
        elif n_rows == len(valid):
            rows[valid] = np.arange(n_rows)
        else:
            raise VitseeError(
                f"{n_rows} rows for {len(samples)} images of {like.label} "
                f"({len(valid)} of them valid); expected one an image in its order, or "
                "say whose rows they are with --ids"
            )
        # An image that the model could not read has no partner for its row.
        rows[~samples.valid] = -1
    else:
        # Rows of images that the store does not have are left out without a word.
        row_of_id = {name: row for row, name in enumerate(ids)}
        rows[:] = [row_of_id.get(name, -1) for name in samples.id.tolist()]
        if (rows < 0).all():
            raise VitseeError(
                f"no image of {like.label} has one of these ids: {abbreviate(ids)} "
                f"against {abbreviate(samples.id[:3].tolist())}"
            )
    return _ImportedImages(
        samples=Samples(
            samples.index,
            samples.id.tolist(),
            samples.label,
            splits=samples.split.tolist(),
            boxes=samples.box,
        ),
        hashes=samples.hash,
        sizes=samples.size,
        rows=rows,
        class_names=like.manifest.class_names,
    )


def _digest(array: Array) -> str:
    """Return the SHA-256 of an array's dtype, shape and numbers, read `SLAB` rows at a time."""
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    for start in range(0, len(array), SLAB):
        digest.update(np.ascontiguousarray(array[start : start + SLAB]).data)
    return digest.hexdigest()


def _make_sites(
    arrays: dict[str, Array],
    *,
    prefix: Sequence[str],
    grid: tuple[int, int] | None,
    dtype: str,
    like: Store | None,
) -> tuple[SiteSpec, ...]:
    """Return the sites of arrays: of vectors for two axes, of tokens for three.

    A name such as `layer8.out` is the part `out` of the block `layer8`. Depth is the position
    among the arrays.

    Raises:
        VitseeError: an array has more axes, or tokens that the layout does not have.
    """
    sites = []
    for depth, (name, array) in enumerate(arrays.items()):
        if array.ndim > 3:
            raise VitseeError(
                f"{name} has {array.ndim} axes; expected (images, dim), or (images, "
                "tokens, dim)"
            )
        dim = array.shape[-1]
        block, _, part_name = name.rpartition(".")
        site = SiteSpec(
            name,
            part=part_name,
            block=block or None,
            groups=(GROUP, "all"),
            kind="vector",
            dim=dim,
            shape=(dim,),
            layout=None,
            depth=depth,
            # 0 to 1 in the arrays' order, so that curves over depth have an axis.
            rel_depth=depth / max(1, len(arrays) - 1),
            dtype="float32",
        )
        if array.ndim == 3:
            layout = _token_layout(name, array.shape[1], prefix, grid, like)
            shape = (layout.n_tokens, dim)
            site = replace(site, kind="tokens", shape=shape, layout=layout, dtype=dtype)
        sites.append(site)
    return tuple(sites)


def _token_layout(
    name: str,
    n_tokens: int,
    prefix: Sequence[str],
    grid: tuple[int, int] | None,
    like: Store | None,
) -> TokenLayout:
    """Return the layout of an array's tokens; its stride in pixels is known from `like` alone.

    Args:
        name: the site, for messages.
        n_tokens: the tokens of an image.
        prefix: kinds of the tokens before the patches.
        grid: rows and columns of the patches; None for a square.
        like: the store of the same images, if any.

    Raises:
        VitseeError: the array has another number of tokens than the prefix and the grid.
    """
    n_patches = n_tokens - len(prefix)
    side = math.isqrt(max(0, n_patches))
    rows, cols = grid or (side, side)
    if n_patches < 1 or rows * cols != n_patches:
        prefix_text = f"{len(prefix)} of --prefix and " if prefix else ""
        grid_text = f"{rows} x {cols} of --grid" if grid else "a square of patches"
        raise VitseeError(
            f"{name} has {n_tokens} tokens an image; expected {prefix_text}{grid_text} "
            "(say --prefix cls,... and --grid ROWSxCOLS)"
        )
    stride = None
    input_size = like.manifest.transform.get("input_size") if like else None
    # (channels, height, width); a manifest of clips or of another tool may say something else.
    if isinstance(input_size, list) and len(input_size) == 3:
        stride = (int(input_size[1]) / rows, int(input_size[2]) / cols)
    return TokenLayout(tuple(prefix), (rows, cols), stride_px=stride)


def _check_numbers(
    site: SiteSpec, array: Array, ids: Sequence[str], rows: NDArray[np.int64]
) -> None:
    """Refuse numbers that are not finite in the dtype of the site.

    Rows of images that the store does not take are not looked at.

    Args:
        site: the site.
        array: (rows, ...) its numbers.
        ids: ids of the store's images.
        rows: (images,) row of each image, -1 for none.

    Raises:
        VitseeError: names the site, the row and the image.
    """
    id_of_row = dict(zip(rows.tolist(), ids, strict=True))
    for start in range(0, len(array), SLAB):
        with np.errstate(invalid="ignore"):  # signalling NaN
            values = array[start : start + SLAB].astype(np.float64)
        # NaN compares as False, so that "not within" includes it.
        is_wrong = ~(np.abs(values) <= LARGEST[site.dtype])
        is_wrong_row = is_wrong.reshape(len(values), -1).any(axis=1)
        for row in (start + np.flatnonzero(is_wrong_row)).tolist():
            if row in id_of_row:
                raise VitseeError(
                    f"{site.name}: row {row} ({id_of_row[row]}) holds numbers that are "
                    f"{_say_why_refused(array[row], site.dtype)}"
                )


def _say_why_refused(values: Array, dtype: str) -> str:
    """Return why a store of this dtype does not take some numbers, and what to do about it."""
    if not np.isfinite(values).all():
        return "not finite; leave that image out"
    if dtype == "float32" or np.abs(values).max() > LARGEST["float32"]:
        return "beyond float32; leave that image out, or divide all numbers"
    return f"beyond {dtype}; leave that image out, or give --dtype float32"


def _slab_arrays(
    sites: Sequence[SiteSpec],
    arrays: dict[str, Array],
    images: _ImportedImages,
    slab_rows: slice,
) -> dict[str, NDArray[Any]]:
    """Return all arrays of one slab, by their names in the store.

    Args:
        sites: the sites.
        arrays: site -> (rows, ...) its numbers.
        images: the images of the store; those without a row get NaN and are not valid.
        slab_rows: the store's rows that the slab holds.
    """
    rows = images.rows[slab_rows]
    has_row = rows >= 0
    hashes = np.where(has_row, images.hashes[slab_rows], 0)
    sizes = np.where(has_row[:, None], images.sizes[slab_rows], 0)
    slab = dict[str, Array]()
    for site in sites:
        # Row 0 stands in for -1 until the next line.
        x = np.array(arrays[site.name][np.maximum(rows, 0)], np.float32)
        x[~has_row] = np.nan
        layout = site.layout
        if layout is None:
            slab[f"vectors/{site.name}"] = x
            continue
        assert layout.grid is not None
        patches = x[:, layout.n_prefix :]  # (images, patches, dim)
        patch_grid = patches.reshape(len(x), *layout.grid, site.dim)
        slab[f"acts/{site.name}/grid"] = patch_grid.astype(site.dtype)
        # Pooled vectors are made here as extract makes them: sums in float64, kept in float32.
        mean = patches.mean(1, dtype=np.float64)
        slab[f"pooled/{site.name}/mean"] = mean.astype(np.float32)
        if layout.prefix:
            slab[f"acts/{site.name}/prefix"] = x[:, : layout.n_prefix].astype(site.dtype)
        if layout.cls is not None:
            slab[f"pooled/{site.name}/cls"] = x[:, layout.cls]
    slab["valid"] = has_row.astype(np.uint8)
    slab["n_valid"] = np.array(has_row.sum(), np.int64)
    slab["hash"] = hashes.astype(np.uint64)
    slab["size"] = sizes.astype(np.int32)
    return slab
