"""Checks of a store against its manifest: metadata, files, commits and, on request, every byte."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import metadata
from vitsee_stores.chunks import defect
from vitsee_stores.creation import KEYS, documents
from vitsee_stores.disk import PARTIAL
from vitsee_stores.errors import StoreError, Unreachable, reason
from vitsee_stores.files import Files
from vitsee_stores.folder import files_at
from vitsee_stores.generations import (
    FOLDER,
    Generation,
    GrownChunks,
    files_of,
    numbers,
    read_generations,
)
from vitsee_stores.layout import ArraySpec
from vitsee_stores.manifest import ATTRIBUTE, Manifest, abbreviate
from vitsee_stores.samples import samples_from_arrays
from vitsee_stores.sealed import SlabChecks, VerifiedChunks, listed, without_advice
from vitsee_stores.url import Url

# Other writers may leave these out where they are empty, or write them as null.
OPTIONAL: dict[str, Any] = {
    "attributes": {},
    "storage_transformers": [],
    "consolidated_metadata": None,
}


def validate(
    path: str | os.PathLike[str] | Url,
    deep: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Check a store against its manifest.

    Every metadata file, every marker, the write-once arrays, and every chunk of committed slabs
    are checked: a chunk's presence, its size, and the checksum at its end against the committed
    one. Missing slabs are not damage: `describe` lists them. Memory: one chunk for each core.

    Args:
        path: folder or URL of the store.
        deep: whether to read all bytes, too. They are compared with the checksum, and rows of
            readable images are searched for NaN (except in the arrays for which FORMAT.md
            allows it) and infinite values.
        report: called with the number of slabs done and of all slabs, first with 0.

    Returns:
        The problems, a line each; [] if the store is sound.

    Raises:
        StoreError: there is no store at `path`, or its manifest cannot be read or is damaged.
    """
    files = files_at(path)
    manifest, complete = metadata.read_root(files)
    problems = list(_problems(files, manifest, complete, deep, report))
    if complete:
        problems += _generation_problems(files, deep, report)
    return list(dict.fromkeys(problems))


def _generation_problems(
    files: Files, deep: bool, report: Callable[[int, int], None]
) -> Iterator[str]:
    """Yield the problems of generations that were added to a complete store.

    A line begins with the folder of its generation. The last lines are about how the
    generations fit each other.
    """
    for number in numbers(files):
        added_files = files_of(files, number)
        try:
            manifest, complete = metadata.read_root(added_files)
        except Unreachable:
            raise
        except StoreError as error:
            yield f"{FOLDER}/{number}: {error}"
            continue
        for line in _problems(added_files, manifest, complete, deep, report):
            yield f"{FOLDER}/{number}: {line}"
    try:
        generations = [
            generation
            for generation in read_generations(files)
            if generation.number == 1 or generation.published
        ]
        if len(generations) > 1:
            yield from _check_same_images(generations)
    except Unreachable:
        raise
    except StoreError as error:
        yield f"{FOLDER}: {without_advice(error, files)}"


def _check_same_images(generations: Sequence[Generation]) -> Iterator[str]:
    """Yield a line for each generation whose images are not those of the ones before."""
    combined = GrownChunks(generations)
    try:
        samples = samples_from_arrays(combined.samples(), combined.manifest.splits)
    except StoreError:  # reported with its generation
        return
    if samples.fingerprint() != combined.manifest.samples_fingerprint:
        yield f"{FOLDER}: ids and labels do not match the last one's samples_fingerprint"
    before = np.empty(0, np.uint64)  # hashes of the images of earlier generations
    for generation in generations:
        chunks = VerifiedChunks(generation.files, generation.manifest)
        first = generation.first_slab * generation.manifest.plan.slab
        try:
            hashes = chunks.read_all(chunks.specs["hash"])
        except Unreachable:
            raise
        except StoreError:  # reported with its generation
            return
        common = before[first : first + len(hashes)]
        if (common != hashes[: len(common)]).any():
            yield (
                f"{FOLDER}/{generation.number}: hash: its images are not those of the "
                "ones before"
            )
        before = np.concatenate([before[:first], hashes])


def remedy(damage: Sequence[str]) -> str:
    """Return how to make damaged slabs again.

    Args:
        damage: the lines that `validate` returned.

    Returns:
        A line; "" if a problem is not within a slab, as making slabs again would not help.
    """
    slabs: set[tuple[str, int]] = set()  # (folder of the generation, slab)
    pattern = rf"^({FOLDER}/\d+)?.*(?:, slab|no sound marker of slab) (\d+)(?:: |$)"
    for line in damage:
        match = re.search(pattern, line)
        if match is None:
            return ""
        slabs.add((match[1] or "", int(match[2])))
    markers = [
        os.path.join(folder, f"commits/c.{slab}.0") for folder, slab in sorted(slabs)
    ]
    those = "that slab" if len(slabs) == 1 else "those slabs"
    if markers:
        return (
            f"delete {abbreviate(markers)}, then repeat the vitsee extract command: it "
            f"makes {those} again"
        )
    return ""


def _problems(
    files: Files,
    manifest: Manifest,
    complete: bool,
    deep: bool,
    report: Callable[[int, int], None],
) -> Iterator[str]:
    """Yield the problems of one store or generation, small files first."""
    chunks = VerifiedChunks(files, manifest)
    committed = list(metadata.read_markers(files, manifest))
    yield from _markers(files, manifest, committed, complete)
    yield from _metadata(files, chunks.specs)
    yield from _foreign_files(files, chunks.specs, complete)
    yield from _written_once(chunks)
    checks = SlabChecks(chunks, deep)
    report(0, len(committed))
    for done, slab in enumerate(committed, 1):
        yield from checks.problems(slab)
        report(done, len(committed))


def _markers(
    files: Files, manifest: Manifest, committed: list[int], complete: bool
) -> Iterator[str]:
    """Yield the problems of commit markers.

    Args:
        committed: slabs with a sound marker.
        complete: whether the manifest says that all slabs have one.
    """
    if complete and len(committed) < manifest.plan.n_slabs:
        flags = np.ones(manifest.plan.n_slabs, np.bool_)
        flags[committed] = False
        missing = listed(np.flatnonzero(flags[:1_000_000]))
        yield (
            "commits: the store is marked complete, but has no sound marker of slab "
            f"{missing}"
        )
    if not complete:
        names = metadata.list_names(files, "commits")
        for slab in sorted(
            metadata.numbers(names, manifest.plan.n_slabs) - set(committed)
        ):
            yield (
                f"commits, slab {slab}: c.{slab}.0 is damaged, or that of another slab "
                "or store: the slab does not count as committed"
            )


def _metadata(files: Files, specs: Mapping[str, ArraySpec]) -> Iterator[str]:
    """Yield the differences of every zarr.json from what the plan implies."""
    expected = {"": metadata.group_document(), **documents(specs)}

    def read_document(path: str) -> dict[str, Any] | str:
        """Return the contents of a group's or array's zarr.json, or a text that says what is wrong
        with it."""
        name = f"{path}/{metadata.ZARR_JSON}" if path else metadata.ZARR_JSON
        try:
            actual = metadata.parse(files.read(name, metadata.MAX_BYTES))
        except OSError as error:
            return defect(files, name, error)
        except ValueError:
            return "is no JSON"
        return actual if isinstance(actual, dict) else "is no JSON object"

    documents_on_disk = files.each_small(read_document, list(expected))
    for path, actual in zip(expected, documents_on_disk, strict=True):
        file = f"{path}: its {metadata.ZARR_JSON}" if path else metadata.ZARR_JSON
        if isinstance(actual, str):
            yield f"{file} {actual}"
            continue
        if not path and isinstance(actual.get("attributes"), dict):
            actual["attributes"].pop(ATTRIBUTE, None)  # the manifest, which has a digest
        for line in _metadata_differences(actual, expected[path]):
            yield f"{file} {line}"


def _metadata_differences(
    actual: Mapping[str, Any], expected: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the fields in which a zarr.json differs from the expected document.

    Fields that only the installed zarr version writes may be absent.
    """
    for key in dict.fromkeys([*expected, *actual]):
        is_absent = key not in actual and key not in OPTIONAL
        if is_absent and key not in KEYS:
            continue
        actual_text = _json_text(actual.get(key, OPTIONAL.get(key)))
        expected_text = _json_text(expected.get(key, OPTIONAL.get(key)))
        if is_absent or actual_text != expected_text:
            yield f"says {_short(key)} {actual_text}, expected {expected_text}"


def _foreign_files(
    files: Files, specs: Mapping[str, ArraySpec], complete: bool
) -> Iterator[str]:
    """Yield the files and folders that do not belong to the store."""
    folders = set(documents(specs))
    if complete:  # only complete stores have generations
        folders.add(FOLDER)
    unlisted: list[OSError] = []
    for path, subfolders, names in files.walk(unlisted.append):
        if path == FOLDER:
            subfolders.clear()  # generations are checked as stores of their own
        for name in sorted(subfolders):
            inner = f"{path}/{name}" if path else name
            if inner not in folders:
                subfolders.remove(name)  # so that it is not walked
                yield f"{_short(inner)}: is no part of the store"
        for name in sorted(names):
            # Hidden files are left by file systems and desktops (.nfs*, .DS_Store).
            if name == metadata.ZARR_JSON or name.startswith("."):
                continue
            if path in specs and _is_chunk(name, specs[path]):
                continue
            inner = _short(f"{path}/{name}" if path else name)
            if not name.endswith(PARTIAL):
                yield f"{inner}: is no part of the store"
            elif complete:
                yield f"{inner}: was left behind by a killed process"
    for error in unlisted:
        yield f"{error.filename}: cannot be listed: {reason(error)}"


def _is_chunk(name: str, spec: ArraySpec) -> bool:
    """Return whether a file name is that of a chunk of the array."""
    if not re.fullmatch(r"c(\.(0|[1-9]\d{0,9}))+", name):
        return False
    index = [int(number) for number in name.split(".")[1:]]
    return len(index) == len(spec.grid) and all(
        i < n for i, n in zip(index, spec.grid, strict=True)
    )


def _written_once(chunks: VerifiedChunks) -> Iterator[str]:
    """Yield the problems of the arrays that are written at the store's creation."""
    arrays: dict[str, NDArray[Any]] = {}
    for path, spec in chunks.specs.items():
        if spec.per == "once":
            try:
                arrays[path] = chunks.read_all(spec)
            except Unreachable:
                raise
            except StoreError as error:
                yield without_advice(error, chunks.files)
    try:
        samples = samples_from_arrays(arrays, chunks.manifest.splits)
    except KeyError:  # an array is damaged, which was reported
        return
    except ValueError as error:
        yield f"samples: {error}"
        return
    if samples.fingerprint() != chunks.manifest.samples_fingerprint:
        yield "samples: ids and labels do not match the manifest's samples_fingerprint"


def _json_text(value: Any) -> str:
    """Return a value as JSON for a message."""
    return _short(json.dumps(value, sort_keys=True))


def _short(text: str) -> str:
    """Return a text, cut after 300 characters: a stranger's store may have any."""
    return text if len(text) <= 300 else f"{text[:300]} ..."
