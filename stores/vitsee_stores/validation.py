"""Whether a store is what its manifest says: metadata, files, commits and, if asked, every byte."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import root
from vitsee_stores.chunks import boxes, decode, file_name, read_all, where
from vitsee_stores.disk import PARTIAL, each, reason, work_pool
from vitsee_stores.errors import StoreError
from vitsee_stores.layout import CHECKSUM_BYTES, ArraySpec, arrays
from vitsee_stores.manifest import Manifest, samples_from_arrays

SHOWN = 4


def validate(path: str | os.PathLike[str], deep: bool = False) -> list[str]:
    """What is wrong with a store, a line each; [] where it is sound. That slabs are still to come
    is no damage: `describe` tells.

    Looks at every metadata file, every marker, the arrays written once, and the presence and size
    of every chunk of committed slabs. `deep` reads all of them too: checksums, and NaN or infinite
    values in rows of readable images (but NaN in the arrays that FORMAT.md lists). Memory: one
    chunk a core.

    Raises:
        StoreError: there is no store at `path`, or its manifest cannot be read.
    """
    folder = os.fspath(path)
    manifest, complete = root.read_root(folder)
    return list(_problems(folder, manifest, complete, deep))


def _problems(folder: str, manifest: Manifest, complete: bool, deep: bool) -> Iterator[str]:
    specs = arrays(manifest.plan)
    committed = np.array([m is not None for m in root.read_markers(folder, manifest.plan)])
    if complete and not committed.all():
        missing = _listed(np.flatnonzero(~committed))
        yield f"commits: the store is marked complete, but has no sound marker of slab {missing}"
    yield from _metadata(folder, specs)
    yield from _foreign_files(folder, specs, complete)
    yield from _written_once(folder, manifest, specs)
    for slab in np.flatnonzero(committed).tolist():
        valid, problem = _valid_rows(folder, specs, slab)
        if problem:
            yield problem
        for spec in specs.values():
            if spec.has_slab(slab):
                yield from _slab(folder, spec, slab, valid, deep)


def _metadata(folder: str, specs: dict[str, ArraySpec]) -> Iterator[str]:
    expected: dict[str, dict[str, Any]] = {g: root.group_document() for g in _groups(specs)}
    expected |= {path: root.array_document(spec) for path, spec in specs.items()}
    for path, document in expected.items():
        try:
            with open(os.path.join(folder, path, root.ZARR_JSON), "rb") as file:
                found = json.load(file)
        except FileNotFoundError:
            yield f"{path}: its {root.ZARR_JSON} is missing"
            continue
        except OSError as error:
            yield f"{path}: its {root.ZARR_JSON} cannot be read: {reason(error)}"
            continue
        except ValueError:
            yield f"{path}: its {root.ZARR_JSON} is no JSON"
            continue
        for key, value in document.items():
            if key not in ("attributes", "storage_transformers") and found.get(key) != value:
                yield (
                    f"{path}: its {root.ZARR_JSON} says {key} {json.dumps(found.get(key))}, "
                    f"expected {json.dumps(value)}"
                )


def _foreign_files(folder: str, specs: dict[str, ArraySpec], complete: bool) -> Iterator[str]:
    folders = {*_groups(specs), *specs, "."}
    for here, below, files in os.walk(folder):
        path = os.path.relpath(here, folder).replace(os.sep, "/")
        for name in sorted(below):
            inner = name if path == "." else f"{path}/{name}"
            if inner not in folders:
                below.remove(name)
                yield f"{inner}: is no part of the store"
        expected = {root.ZARR_JSON}
        if path in specs:
            expected |= {file_name(index) for index, _ in boxes(specs[path])}
        # Hidden files are the droppings of file systems and desktops (.nfs*, .DS_Store).
        for name in sorted(n for n in set(files) - expected if not n.startswith(".")):
            inner = name if path == "." else f"{path}/{name}"
            if not name.endswith(PARTIAL):
                yield f"{inner}: is no part of the store"
            elif complete:
                yield f"{inner}: was left behind by a killed process"


def _written_once(folder: str, manifest: Manifest, specs: dict[str, ArraySpec]) -> Iterator[str]:
    read: dict[str, NDArray[Any]] = {}
    for path, spec in specs.items():
        if spec.per == "once":
            try:
                read[path] = read_all(folder, spec)
            except StoreError as error:
                yield _short(error, folder)
    try:
        samples = samples_from_arrays(read, manifest.splits)
    except KeyError:
        return
    except (IndexError, UnicodeDecodeError):
        yield "samples: their ids or splits cannot be decoded"
        return
    if samples.fingerprint() != manifest.samples_fingerprint:
        yield "samples: ids and labels do not match the manifest's samples_fingerprint"


def _valid_rows(
    folder: str, specs: dict[str, ArraySpec], slab: int
) -> tuple[NDArray[np.bool_] | None, str]:
    """Which rows of a slab hold an image, None where that cannot be read; and what is wrong."""
    rows = specs["valid"].shape[0] - slab * specs["valid"].chunks[0]
    flags, wrong = _read(folder, specs["valid"], (slab,))
    count, _ = _read(folder, specs["n_valid"], (slab,))
    if flags is None:
        return None, ""
    flags = flags[:rows]
    if not np.isin(flags, (0, 1)).all():
        wrong = f"valid, slab {slab}: holds other values than 0 and 1"
    elif count is not None and int(count[0]) != int(flags.sum()):
        wrong = f"n_valid, slab {slab}: is {count[0]}, but {flags.sum()} rows are valid"
    return flags == 1, wrong


def _slab(
    folder: str, spec: ArraySpec, slab: int, valid: NDArray[np.bool_] | None, deep: bool
) -> Iterator[str]:
    """What is wrong with one array's chunks of one slab."""
    indices = [index for index, _ in boxes(spec, slab)]
    absent: list[str] = []
    present: list[tuple[int, ...]] = []
    for index in indices:
        try:
            size = os.stat(os.path.join(folder, spec.path, file_name(index))).st_size
        except OSError:
            absent.append(file_name(index))
            continue
        whole = spec.chunk_bytes + CHECKSUM_BYTES
        if spec.codec == "none" and size != whole:
            yield f"{where(spec, index)}: {file_name(index)} has {size} bytes, expected {whole}"
        elif size <= CHECKSUM_BYTES:
            yield f"{where(spec, index)}: {file_name(index)} is cut short: it has {size} bytes"
        else:
            present.append(index)
    if absent:
        yield (
            f"{where(spec, indices[0])}: {len(absent)} of {len(indices)} chunk files are missing: "
            f"{_listed(absent)}"
        )
    if not deep:
        return
    checks = each(work_pool, lambda index: _contents(folder, spec, index, valid), present)
    not_finite: set[int] = set()
    for index, (problem, rows) in zip(present, checks, strict=True):
        if problem:
            yield f"{where(spec, index)}: {problem}"
        not_finite |= rows
    if not_finite:
        kind = "infinite" if spec.nan_ok else "NaN or infinite"
        images = spec.shape[1] if spec.pairs else spec.chunks[0]  # of a slab
        rows_text = (
            f"{len(not_finite)} rows of readable images, the first is row "
            f"{slab * images + min(not_finite)}"
            if spec.pairs or spec.per == "image"
            else "its sums"
        )
        yield f"{where(spec, indices[0])}: {kind} values in {rows_text}"


def _contents(
    folder: str, spec: ArraySpec, index: tuple[int, ...], valid: NDArray[np.bool_] | None
) -> tuple[str, set[int]]:
    """What is wrong with a chunk's bytes, and its rows with values that should be finite."""
    block, wrong = _read(folder, spec, index)
    of_images = spec.per == "image" or spec.pairs
    if block is None or block.dtype.kind != "f" or (valid is None and of_images):
        return wrong, set()
    if spec.pairs and valid is not None:
        i, j = (
            np.flatnonzero(valid[place * length : (place + 1) * length])
            for place, length in zip(index[1:], spec.chunks[1:], strict=True)
        )
        rows_i = i[~np.isfinite(block[0][np.ix_(i, j)]).all(1)]
        return wrong, set((index[1] * spec.chunks[1] + rows_i).tolist())
    rows = block.reshape(len(block), -1)
    if spec.per == "image" and valid is not None:
        rows = rows[: len(valid)][valid]
        numbers = np.flatnonzero(valid)
    else:
        numbers = np.arange(len(rows))
    # The chunk's padding along further axes is NaN by design: only what the array holds counts.
    inside = tuple(
        slice(0, n - i * c)
        for i, c, n in zip(index[1:], spec.chunks[1:], spec.shape[1:], strict=True)
    )
    values = rows.reshape(len(rows), *block.shape[1:])[(slice(None), *inside)]
    bad = np.isinf(values) if spec.nan_ok else ~np.isfinite(values)
    return wrong, set(numbers[bad.any(axis=tuple(range(1, bad.ndim)))].tolist())


def _read(folder: str, spec: ArraySpec, index: tuple[int, ...]) -> tuple[NDArray[Any] | None, str]:
    """A chunk, or None and what is wrong with it; "" where its absence is told elsewhere."""
    name = file_name(index)
    try:
        with open(os.path.join(folder, spec.path, name), "rb") as file:
            return decode(file.read(), spec), ""
    except OSError:
        return None, ""
    except (ValueError, RuntimeError) as error:
        return None, f"{name} {error}"


def _groups(specs: dict[str, ArraySpec]) -> list[str]:
    parents = {str(parent) for path in specs for parent in PurePosixPath(path).parents}
    return sorted(parents - {"."})


def _listed(items: Iterable[Any]) -> str:
    names = [str(item) for item in items]
    return ", ".join(names[:SHOWN]) + (f", ... ({len(names)})" if len(names) > SHOWN else "")


def _short(error: StoreError, folder: str) -> str:
    """A reader's error without the path and the advice that validate's caller knows."""
    text = str(error).removeprefix(f"{folder} is damaged: ")
    return text.removesuffix(f" (run: vitsee validate {folder} --deep)")
