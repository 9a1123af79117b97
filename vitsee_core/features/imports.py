"""Stores of vectors and tokens that others computed: neural responses, features of other tools.

The arrays come from files; what each is called, and the ids and labels beside them:

.npy               one array
.npz               one array a key
.pt, .pth          a tensor, or a dictionary of tensors; read with weights_only
.safetensors       one tensor a key
.csv, .tsv         a row an image; columns id and label, the others are the vector
.parquet           the same; a column of lists is a vector by itself (as vitsee export writes)
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.class_labels import class_labels, label_text
from vitsee_core.images.decoding import hash64, one_line
from vitsee_core.images.errors import DataError
from vitsee_core.images.sources.arrays import read_npz
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.progress import SILENT, Progress, counting
from vitsee_core.runtime.versions import result_versions
from vitsee_core.tables.delimited import as_numbers, read_cells
from vitsee_core.tables.formats import ending_of, read_parquet
from vitsee_core.types import pl
from vitsee_stores import Store, StoreWriter, open_store
from vitsee_stores.errors import VitseeError, reason
from vitsee_stores.layout import SiteSpec, StorePlan, TokenLayout
from vitsee_stores.manifest import abbreviate, new_manifest
from vitsee_stores.samples import Samples
from vitsee_stores.url import Place

Array = NDArray[Any]
T = TypeVar("T")
ID = "id"
LABEL = "label"
# Columns that `vitsee export` writes beside the features.
ABOUT = (ID, LABEL, "row", "index", "split")
EXPECTED = "expected names of columns and numbers"
NUMBERS = f"expected numbers in every column but {', '.join(ABOUT)}"
SLAB = 256
# so that analyses take imported sites by default
MEAN = "mean"
GROUP = "blocks"
LARGEST = {"float16": 65504.0, "float32": float(np.finfo(np.float32).max)}


@dataclass(frozen=True)
class Arrays:
    """values: name -> (images, ...); ids, labels: of the images, None where the file has none;
    columns: names of the entries of a vector that was made of columns."""

    values: dict[str, Array]
    ids: list[str] | None = None
    labels: list[str] | None = None
    columns: dict[str, list[str]] = field(default_factory=dict)


def read_arrays(path: Path) -> Arrays:
    """All arrays of a file. Raises VitseeError: another ending, a file that cannot be read, or no
    numbers in it."""
    ending = ending_of(path, tuple(_READERS), "an import")
    found = _read(_READERS[ending], path, f"{ending} file of numbers")
    for name, values in found.values.items():
        if values.dtype.kind not in "fiub" or values.ndim < 2:
            raise VitseeError(
                f"{path}: {name} has {values.ndim} axes of {values.dtype}; expected numbers, "
                "(images, dim) or (images, tokens, dim)"
            )
        if 0 in values.shape[1:]:
            raise VitseeError(
                f"{path}: {name} is {values.shape}; expected a number an image"
            )
    if not found.values:
        raise VitseeError(f"{path} has no array; expected one of numbers")
    return found


def read_ids(path: Path) -> tuple[list[str], list[str] | None]:
    """Ids, and labels where there are some, of a text with an id a line, or a table with a column
    id (`vitsee export --samples` writes one). Raises VitseeError: it cannot be read, or has no ids.
    """
    if path.suffix.lower() == ".txt":
        try:
            return path.read_text("utf-8-sig").splitlines(), None
        except (OSError, UnicodeDecodeError) as error:
            raise VitseeError(f"{path} cannot be read: {error}") from None
    ending = ending_of(path, (".txt", *_TABLES), "ids")
    columns = _read(_TABLES[ending], path, f"{ending} table")
    if ID not in columns:
        raise VitseeError(
            f"{path} has columns {', '.join(columns)}; expected one called {ID}"
        )
    return _texts_of_ids(columns, path), _texts_of_labels(columns, path)


def _texts_of_ids(columns: Mapping[str, Sequence[Any]], path: Path) -> list[str]:
    """The ids in a table's column; VitseeError: there is a row without one."""
    ids = columns[ID]
    if None in ids:
        raise VitseeError(
            f"{path}: row {list(ids).index(None)} has no {ID}; expected one a row"
        )
    return [str(value) for value in ids]


def _texts_of_labels(
    columns: Mapping[str, Sequence[Any]], path: Path
) -> list[str] | None:
    """The labels in a table's column, "" for none; None without the column."""
    if LABEL not in columns:
        return None
    try:
        return [label_text(value) for value in columns[LABEL]]
    except DataError as error:
        raise VitseeError(f"{path}: {error}") from None


def _read(read: Callable[[Path], T], path: Path, what: str) -> T:
    """`read(path)`; whatever a damaged file makes the libraries raise is one line, and nothing that
    they warn of is another."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read(path)
    except VitseeError:
        raise
    except OSError as error:
        raise VitseeError(f"{path} cannot be read: {reason(error)}") from None
    except Exception as error:  # numpy, torch, csv and polars raise nearly anything
        raise VitseeError(f"{path} is no {what}: {one_line(error)}") from None


def _pt(path: Path) -> Arrays:
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # the unpickler raises nearly anything on damaged files
        raise VitseeError(
            f"{path} is no file of tensors alone: {one_line(error)}"
        ) from None
    tensors = {path.stem: found} if isinstance(found, torch.Tensor) else found
    if not isinstance(tensors, Mapping):
        raise VitseeError(
            f"{path} holds a {type(found).__name__}; expected tensors by name"
        )
    arrays = {}
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor):
            if value.nbytes > value.untyped_storage().nbytes():
                raise VitseeError(
                    f"{path}: {name} is {tuple(value.shape)}, of which the file has "
                    f"{human_bytes(value.untyped_storage().nbytes())}; expected all of its numbers"
                )
            arrays[str(name)] = value.float() if value.dtype is torch.bfloat16 else value
    return Arrays({name: value.numpy() for name, value in arrays.items()})


def _safetensors(path: Path) -> Arrays:
    from safetensors.numpy import load_file

    return Arrays(load_file(path))


def _csv_columns(path: Path) -> dict[str, Sequence[Any]]:
    """The columns of a delimited text: numbers where all cells are, else text."""
    ending = path.suffix.lower()
    frame, decimal_comma = read_cells(path, path.read_bytes(), ending, _is_text, EXPECTED)
    if not len(frame):
        raise VitseeError(f"{path} has {frame.width and 1} rows; {EXPECTED}")
    columns = dict[str, Sequence[Any]]()
    for column in frame.get_columns():
        if not column.name:
            raise VitseeError(
                f"{path}: a column has no name, as that of row numbers which pandas writes "
                "(to_csv(index=False) leaves it out); expected a name for each column"
            )
        numbers = None
        if column.name not in ABOUT:
            numbers = as_numbers(column, decimal_comma=decimal_comma)
        if numbers is None:
            columns[column.name] = column.fill_null("").to_list()
            continue
        if numbers.null_count():
            raise VitseeError(f"{path}: column {column.name} holds ''; {NUMBERS}")
        columns[column.name] = numbers.cast(pl.Float64).to_list()
    return columns


def _is_text(name: str) -> None:
    """The type of a column before its cells are looked at: text."""


def _parquet_columns(path: Path) -> dict[str, Sequence[Any]]:
    frame = read_parquet(path.read_bytes())
    return {column.name: column.to_list() for column in frame.get_columns()}


def _of_columns(
    read: Callable[[Path], dict[str, Sequence[Any]]],
) -> Callable[[Path], Arrays]:
    def arrays(path: Path) -> Arrays:
        columns = read(path)
        ids = _texts_of_ids(columns, path) if ID in columns else None
        labels = _texts_of_labels(columns, path)
        numbers: dict[str, Array] = {}
        for name, cells in columns.items():
            if name in ABOUT:
                continue
            try:
                numbers[name] = np.array(cells, np.float64)
            except (ValueError, TypeError):
                words = (f"{str(cell)[:40]!r}" for cell in cells if not _is_number(cell))
                found = next(words, "lists of different lengths")
                raise VitseeError(
                    f"{path}: column {name} holds {found}; {NUMBERS}"
                ) from None
        lists = {name: values for name, values in numbers.items() if values.ndim > 1}
        flat = {name: values for name, values in numbers.items() if values.ndim == 1}
        if flat:
            lists[path.stem] = np.stack([*flat.values()], 1)
        return Arrays(lists, ids, labels, {path.stem: [*flat]} if flat else {})

    return arrays


def _is_number(cell: Any) -> bool:
    try:
        np.float64(cell)
    except (ValueError, TypeError):
        return False
    return True


_TABLES = {".csv": _csv_columns, ".tsv": _csv_columns, ".parquet": _parquet_columns}
_READERS: dict[str, Callable[[Path], Arrays]] = {
    **{
        ".npy": lambda path: Arrays(
            {path.stem: np.lib.format.open_memmap(path, mode="r")}
        ),
        ".npz": lambda path: Arrays(read_npz(path, str(path))),
        ".pt": _pt,
        ".pth": _pt,
        ".safetensors": _safetensors,
    },
    **{ending: _of_columns(read) for ending, read in _TABLES.items()},
}


@dataclass(frozen=True)
class Tokens:
    """The places of the tokens of an array (images, tokens, dim).

    prefix: kinds of those before the patches (cls, reg0, ...); grid: rows and columns of the
    patches, None for a square.
    """

    prefix: tuple[str, ...] = ()
    grid: tuple[int, int] | None = None

    def layout(
        self, name: str, n_tokens: int, size: tuple[int, int] | None
    ) -> TokenLayout:
        """The layout of an array's tokens. size: of the images in pixels, where it is known. Raises
        VitseeError: the numbers of tokens differ."""
        n_patches = n_tokens - len(self.prefix)
        side = math.isqrt(max(0, n_patches))
        rows, cols = self.grid or (side, side)
        if n_patches < 1 or rows * cols != n_patches:
            found = f"{name} has {n_tokens} tokens an image"
            given = f"{len(self.prefix)} of --prefix and " if self.prefix else ""
            wanted = f"{rows} x {cols} of --grid" if self.grid else "a square of patches"
            raise VitseeError(
                f"{found}; expected {given}{wanted} (say --prefix cls,... and --grid "
                "ROWSxCOLS)"
            )
        stride = None if size is None else (size[0] / rows, size[1] / cols)
        return TokenLayout(self.prefix, (rows, cols), stride_px=stride)


def import_arrays(
    paths: Sequence[Path],
    output: Place,
    *,
    names: Sequence[str] = (),
    ids: Path | None = None,
    like: Store | None = None,
    tokens: Tokens | None = None,
    dtype: str = "float32",
    model: str = "",
    command: str = "",
    progress: Progress = SILENT,
) -> Store:
    """Write a store of arrays of files, one site each.

    Args:
        paths: files, see `vitsee_core.features.imports`.
        output: the store.
        names: of the sites, in order; by default the arrays' own, or the files' names.
        ids: the images' ids in the arrays' order; by default a file's column id, or `like`'s.
        like: a store of the same images: the new one has its images in its order, and pairs with
            it; those that the arrays lack are not valid.
        tokens: how the tokens of arrays with three axes lie; by default a square without prefix.
        dtype: of tokens; vectors are float32.
        model: what computed them; stores that are compared as train and test agree in it.
        command: for the store's provenance.
        progress: advanced by one per image.

    Raises:
        VitseeError: nothing to import, arrays that do not fit each other, the ids or `like`, or
            numbers that are not finite or beyond `dtype`.
        StoreError: there is another store at `output`, or it cannot be written.
    """
    found = [read_arrays(path) for path in paths]
    values = _named([values for one in found for values in one.values.items()], names)
    (first, n_rows), *others = ((name, len(array)) for name, array in values.items())
    for other, n in others:
        if n != n_rows:
            raise VitseeError(
                f"{first} has {n_rows} rows and {other} {n}; expected one row an image in all"
            )
    if not n_rows:
        raise VitseeError(f"{first} has no rows; expected one an image")
    samples, hashes, sizes, rows, class_names = _images(n_rows, found, ids, like)
    size = None if like is None else like.manifest.transform.get("input_size")
    size = (
        (int(size[1]), int(size[2]))
        if isinstance(size, list) and len(size) == 3
        else None
    )
    sites = tuple(
        _site(name, array, place, len(values), tokens or Tokens(), size, dtype)
        for place, (name, array) in enumerate(values.items())
    )
    plan = StorePlan(len(samples), min(SLAB, len(samples)), "zstd", sites)
    identity = {
        "command": "import",
        "model": {"name": model or paths[0].stem},
        "arrays": {name: _digest(array) for name, array in values.items()},
        "order": like.manifest.identity.get("order") if like else "dataset",
        "seed": like.manifest.identity.get("seed", 0) if like else 0,
        "tokens": {"default": "all"},
    }
    info = {
        "command": command,
        "data": {"data": abbreviate([str(path) for path in paths])},
        "versions": result_versions(),
        "columns": {name: names for one in found for name, names in one.columns.items()},
    }
    manifest = new_manifest(
        identity,
        plan,
        samples,
        model={"name": model or paths[0].stem, "weights": {"source": "imported"}},
        class_names=class_names,
        info=info,
    )
    for site in sites:
        _check_numbers(site, values[site.name], samples.ids, rows)
    writer = StoreWriter.create_or_join(output, manifest, samples)
    with counting(progress, len(samples), "images"):
        for k in range(plan.n_slabs):
            some = plan.rows(k)
            slab = _slab(sites, values, rows[some])
            valid = rows[some] >= 0
            slab |= {
                "valid": valid.astype(np.uint8),
                "n_valid": np.array(valid.sum(), np.int64),
                "hash": np.where(valid, hashes[some], 0).astype(np.uint64),
                "size": np.where(valid[:, None], sizes[some], 0).astype(np.int32),
            }
            writer.write_slab(k, slab, {"command": command})
            progress.advance(len(valid))
    writer.finish()
    return open_store(output)


def _named(values: Sequence[tuple[str, Array]], names: Sequence[str]) -> dict[str, Array]:
    if names and len(names) != len(values):
        raise VitseeError(
            f"--as is given {len(names)} times for {len(values)} arrays "
            f"({abbreviate([name for name, _ in values])}); expected one a site"
        )
    named = (
        [(name, array) for name, (_, array) in zip(names, values, strict=True)]
        if names
        else (list(values))
    )
    twice = [name for name, n in Counter(name for name, _ in named).items() if n > 1]
    if twice:
        raise VitseeError(f"two arrays would be the site {twice[0]}; name each with --as")
    return dict(named)


# The images of a store, their hashes and sizes, the row of each in the arrays (-1: none), classes.
_Images = tuple[
    Samples, NDArray[np.uint64], NDArray[np.int32], NDArray[np.int64], list[str] | None
]


def _images(
    n_rows: int, found: Sequence[Arrays], path: Path | None, like: Store | None
) -> _Images:
    ids, labels = read_ids(path) if path is not None else (None, None)
    for one in found if ids is None else ():
        ids = one.ids or ids
        labels = one.labels or labels
    if ids is not None and len(ids) != n_rows:
        where = path or "the table"
        raise VitseeError(
            f"{where} has {len(ids)} ids for {n_rows} rows; expected one a row"
        )
    if twice := [name for name, n in Counter(ids or ()).items() if n > 1]:
        raise VitseeError(f"two rows have the id {twice[0]!r}; expected one row an image")
    if like is not None:
        return _as_in(like, n_rows, ids)
    if ids is None:
        raise VitseeError(
            "whose rows these are is not said: give --ids FILE, or --like STORE"
        )
    codes, names = class_labels(labels or [""] * n_rows)
    rows = np.arange(n_rows, dtype=np.int64)
    # There are no files to hash: images are the same where their ids are.
    hashes = np.array([hash64(os.fsencode(name)) for name in ids], np.uint64)
    samples = Samples(rows, ids, codes, [""] * n_rows, None)
    return samples, hashes, np.zeros((n_rows, 2), np.int32), rows, names


def _as_in(like: Store, n_rows: int, ids: list[str] | None) -> _Images:
    """The images of a store in its order, and where their rows are."""
    theirs = like.samples
    rows = np.full(len(theirs), -1, np.int64)
    if ids is None:
        valid = np.flatnonzero(theirs.valid)
        if n_rows not in (len(theirs), len(valid)):
            raise VitseeError(
                f"{n_rows} rows for {len(theirs)} images of {like.label} ({len(valid)} of them "
                "valid); expected one an image in its order, or say whose rows they are with --ids"
            )
        there = np.arange(len(theirs)) if n_rows == len(theirs) else valid
        rows[there] = np.arange(n_rows)
        rows[~theirs.valid] = -1
    else:
        place = {name: row for row, name in enumerate(ids)}
        rows[:] = [place.get(name, -1) for name in theirs.id.tolist()]
        if (rows < 0).all():
            raise VitseeError(
                f"no image of {like.label} has one of these ids: {abbreviate(ids)} against "
                f"{abbreviate(theirs.id[:3].tolist())}"
            )
    samples = Samples(
        theirs.index, theirs.id.tolist(), theirs.label, theirs.split.tolist(), theirs.box
    )
    return samples, theirs.hash, theirs.size, rows, like.manifest.class_names


def _digest(array: Array) -> str:
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    for start in range(0, len(array), SLAB):
        digest.update(np.ascontiguousarray(array[start : start + SLAB]).data)
    return digest.hexdigest()


def _site(
    name: str,
    array: Array,
    place: int,
    n_sites: int,
    tokens: Tokens,
    size: tuple[int, int] | None,
    dtype: str,
) -> SiteSpec:
    if array.ndim > 3:
        raise VitseeError(
            f"{name} has {array.ndim} axes; expected (images, dim), or (images, tokens, dim)"
        )
    dim = array.shape[-1]
    spec = SiteSpec(
        name,
        part=name.rpartition(".")[2],
        block=name.rpartition(".")[0] or None,
        groups=(GROUP, "all"),
        kind="vector",
        dim=dim,
        shape=(dim,),
        layout=None,
        depth=place,
        rel_depth=place / max(1, n_sites - 1),
        dtype="float32",
    )
    if array.ndim == 2:
        return spec
    layout = tokens.layout(name, array.shape[1], size)
    shape = (layout.n_tokens, dim)
    return replace(spec, kind="tokens", shape=shape, layout=layout, dtype=dtype)


def _check_numbers(
    site: SiteSpec, array: Array, ids: Sequence[str], rows: NDArray[np.int64]
) -> None:
    """Whether all numbers that the store takes are finite in its types."""
    most = LARGEST[site.dtype]
    name = dict(zip(rows.tolist(), ids, strict=True))
    for start in range(0, len(array), SLAB):
        with np.errstate(invalid="ignore"):  # signalling NaN
            some = array[start : start + SLAB].astype(np.float64)
        wrong = ~(np.abs(some) <= most).reshape(len(some), -1).all(1)
        for row in (start + np.flatnonzero(wrong)).tolist():
            if row in name:
                raise VitseeError(
                    f"{site.name}: row {row} ({name[row]}) holds numbers that are "
                    f"{_why_refused(array[row], site.dtype)}"
                )


def _why_refused(values: Array, dtype: str) -> str:
    """What is wrong with numbers that a store of this type does not take, and what to do."""
    if not np.isfinite(values).all():
        return "not finite; leave that image out"
    if dtype == "float32" or np.abs(values).max() > LARGEST["float32"]:
        return "beyond float32; leave that image out, or divide all numbers"
    return f"beyond {dtype}; leave that image out, or give --dtype float32"


def _slab(
    sites: Sequence[SiteSpec], values: dict[str, Array], rows: NDArray[np.int64]
) -> dict[str, Array]:
    """The arrays of all sites in a slab, by their names in the store; NaN for images that the given
    arrays lack."""
    slab = dict[str, Array]()
    for site in sites:
        x = np.array(values[site.name][np.maximum(rows, 0)], np.float32)
        x[rows < 0] = np.nan
        if site.layout is None:
            slab[f"vectors/{site.name}"] = x
            continue
        layout = site.layout
        assert layout.grid is not None
        patches = x[:, layout.n_prefix :]
        grid = patches.reshape(len(x), *layout.grid, site.dim)
        slab[f"acts/{site.name}/grid"] = grid.astype(site.dtype)
        slab[f"pooled/{site.name}/mean"] = patches.mean(1, dtype=np.float64).astype(
            np.float32
        )
        if layout.prefix:
            slab[f"acts/{site.name}/prefix"] = x[:, : layout.n_prefix].astype(site.dtype)
        if layout.cls is not None:
            slab[f"pooled/{site.name}/cls"] = x[:, layout.cls]
    return slab
