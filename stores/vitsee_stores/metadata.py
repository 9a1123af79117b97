"""A store's metadata on disk: Zarr's zarr.json files, with the manifest, and commit markers."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitsee_stores.chunks import chunk_name, decode, encode, no_answer
from vitsee_stores.errors import NoStore, StoreError, reason
from vitsee_stores.files import Files, NoAnswer
from vitsee_stores.layout import CHECKSUM_BYTES, COMMIT_BYTES, ArraySpec, arrays
from vitsee_stores.manifest import ATTRIBUTE, Manifest

ZARR_JSON = "zarr.json"
# Bounds that FORMAT.md states.
MAX_BYTES = 16 << 20
MAX_DEPTH = 32


def parse(text: bytes) -> Any:
    """Parse JSON strictly.

    Raises:
        ValueError: not JSON in UTF-8, numbers that are not finite, or nesting deeper than
            `MAX_DEPTH` levels.
    """

    def refuse(word: str) -> Any:
        """Raise ValueError for NaN and Infinity, which Python's parser accepts."""
        raise ValueError(f"{word} is no number")

    def number(word: str) -> float:
        """Return a number with a point or exponent; 1e999 is infinite and refused."""
        value = float(word)
        if not math.isfinite(value):
            refuse(word)
        return value

    try:
        value = json.loads(text.decode(), parse_constant=refuse, parse_float=number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # Level by level, without recursion: all items at one depth, then all that they contain.
    level = [value]
    depth = 0
    while level:
        next_level: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                next_level += item.values()
            elif isinstance(item, list):
                next_level += item
        level = next_level
        depth += 1
        if level and depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
    return value


def to_text(document: Mapping[str, Any]) -> bytes:
    """Return a JSON document as it is written to disk."""
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def group_document(attributes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the zarr.json of a group, as zarr writes it."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes or {})}


def root_document(manifest: Manifest, complete: bool) -> dict[str, Any]:
    """Return the zarr.json of the root group, with the manifest and its digest."""
    return group_document(
        {ATTRIBUTE: with_digest({**manifest.to_json(), "complete": complete})}
    )


def with_digest(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the root's attribute with its digest.

    The digest is the sha256 of the JSON of everything in it except `digest` and `complete`,
    with sorted keys, without spaces, in ASCII.
    """
    sealed = {key: data[key] for key in data if key not in ("digest", "complete")}
    text = json.dumps(sealed, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return {**data, "digest": hashlib.sha256(text.encode()).hexdigest()}


def root_text(manifest: Manifest, complete: bool) -> bytes:
    """Return the zarr.json of the root group as written to disk.

    Raises:
        StoreError: readers would refuse it.
    """
    document = root_document(manifest, complete)
    text = to_text(document)
    if len(text) > MAX_BYTES:
        raise StoreError(
            f"the manifest has {len(text)} bytes, expected at most {MAX_BYTES}"
        )
    try:
        Manifest.from_json(parse(text)["attributes"][ATTRIBUTE])
    except (StoreError, ValueError) as error:
        raise StoreError(f"this store could not be read again: {error}") from None
    return text


def read_root(files: Files) -> tuple[Manifest, bool]:
    """Read the manifest of a store.

    Returns:
        The manifest, and whether it says that the store is complete.

    Raises:
        StoreError: the store is missing, not a store, of another format version, or damaged.
    """
    data = read_attribute(files)
    try:
        manifest = Manifest.from_json(data)
        if type(data.get("complete")) is not bool:
            raise StoreError(
                "the manifest is damaged: it does not say whether it is complete"
            )
        if with_digest(data)["digest"] != data.get("digest"):
            raise StoreError("the manifest is damaged: it does not match its digest")
        return manifest, data.get("complete") is True
    except StoreError as error:
        raise StoreError(f"{files}: {error}") from None


def read_attribute(files: Files) -> dict[str, Any]:
    """Return the vitsee attribute of a Zarr group, of any format version.

    Raises:
        NoStore: nothing is there.
        StoreError: not a store, or a damaged one.
    """
    try:
        document = parse(files.read(ZARR_JSON, MAX_BYTES))
    except FileNotFoundError:
        if not _exists(files):
            raise _no_store(str(files)) from None
        raise StoreError(
            f"{files} is no vitsee store: the folder has no {ZARR_JSON} (a store is what "
            "vitsee extract writes)"
        ) from None
    except NotADirectoryError:
        raise StoreError(
            f"{files} is no vitsee store but a file (a store is a folder that vitsee "
            "extract writes)"
        ) from None
    except OSError as error:
        raise StoreError(f"{files} cannot be read: {reason(error)}") from None
    except ValueError:
        raise StoreError(
            f"{files} is damaged: its {ZARR_JSON} is no JSON (copy the store anew, or "
            "extract it again)"
        ) from None
    attributes = document.get("attributes") if isinstance(document, dict) else None
    data = attributes.get(ATTRIBUTE) if isinstance(attributes, dict) else None
    if not isinstance(data, dict):
        raise StoreError(
            f"{files} is no vitsee store: its {ZARR_JSON} has no '{ATTRIBUTE}' attribute "
            "(a store is what vitsee extract writes)"
        )
    return data


def _exists(files: Files) -> bool:
    """Return whether anything is where the store should be.

    Raises:
        StoreError: that cannot be found out.
    """
    try:
        return files.exists()
    except OSError as error:
        raise StoreError(f"{files} cannot be read: {reason(error)}") from None


def _no_store(location: str) -> NoStore:
    """Return the error for a path or URL without anything, with similar names and what to run."""
    similar = _similar_names(location)
    # A bare word may be a model's name, typed in the wrong place.
    if "/" in location or location.endswith(".zarr"):
        advice = f"run: vitsee extract MODEL --data DATA -o {location}"
    else:
        advice = (
            f"run: vitsee extract {location} --data DATA -o NAME.zarr, if that is a model"
        )
    return NoStore(f"no store at {location}: nothing is there{similar} ({advice})")


def _similar_names(location: str) -> str:
    """Return `; near names: vit.zarr`: stores beside a path of this machine; "" without any."""
    path = Path(location)
    try:
        names = [name for name in os.listdir(path.parent) if name.endswith(".zarr")]
    except OSError:  # no such folder, or a URL
        return ""
    similar = difflib.get_close_matches(path.name, names, n=3)
    # The ending alone makes a short name, `a` for `a.zarr`, too different for difflib.
    with_ending = f"{path.name}.zarr"
    if with_ending in names and with_ending not in similar:
        similar = [with_ending, *similar[:2]]
    return f"; near names: {', '.join(similar)}" if similar else ""


def encode_marker(
    seal: Mapping[str, Any], provenance: Mapping[str, Any], spec: ArraySpec
) -> bytes:
    """Return a slab's commit marker as the bytes of its chunk: JSON padded with spaces.

    Args:
        seal: fields that readers compare: store_id, slab, checksums.
        provenance: record of the writer. Fields that do not fit are dropped, longest first,
            and named under "dropped".
        spec: the array `commits`.
    """
    fields = {**provenance, **seal}
    text = json.dumps(fields, allow_nan=False).encode()
    dropped: list[str] = []
    while len(text) > COMMIT_BYTES:
        droppable = [key for key in fields if key != "dropped" and key not in seal]
        longest = max(droppable, key=lambda key: len(json.dumps(fields[key])))
        dropped.append(longest)
        del fields[longest]
        fields["dropped"] = dropped
        text = json.dumps(fields, allow_nan=False).encode()
    block = np.frombuffer(text.ljust(COMMIT_BYTES), np.uint8).reshape(spec.chunks)
    return b"".join(bytes(piece) for piece in encode(block, spec))


def read_marker(
    files: Files, slab: int, spec: ArraySpec, manifest: Manifest
) -> dict[str, Any] | None:
    """Read a slab's commit marker.

    It is None if the slab is not committed: the marker is missing, damaged, or from another
    slab or store.

    Raises:
        StoreError: the server did not respond.
    """
    try:
        data = files.read(chunk_name(spec, (slab, 0)), spec.chunk_bytes + CHECKSUM_BYTES)
        marker = parse(decode(data, spec).tobytes())
    except NoAnswer as error:
        raise no_answer(files, chunk_name(spec, (slab, 0)), error) from None
    except (OSError, ValueError):
        return None
    if not isinstance(marker, dict):
        return None
    if marker.get("store_id") != manifest.store_id or marker.get("slab") != slab:
        return None
    # `type`, not `isinstance`: true and false are instances of int.
    return marker if type(marker.get("checksums")) is int else None


def read_markers(files: Files, manifest: Manifest) -> dict[int, dict[str, Any]]:
    """Return slab -> commit marker of all committed slabs, in the slabs' order."""
    spec = arrays(manifest.plan)["commits"]
    names = list_names(files, spec.path)
    slabs = sorted(numbers(names, manifest.plan.n_slabs))
    markers = files.each_small(
        lambda slab: read_marker(files, slab, spec, manifest), slabs
    )
    committed = {}
    for slab, marker in zip(slabs, markers, strict=True):
        if marker is not None:
            committed[slab] = marker
    return committed


def numbers(names: Iterable[str], n_slabs: int) -> set[int]:
    """Return the slabs whose marker files are among `names`.

    Time depends on the existing files, not on the number of slabs that a manifest claims.
    """
    slabs = set()
    for name in names:
        match = re.fullmatch(r"c\.(0|[1-9]\d{0,9})\.0", name)
        if match and int(match[1]) < n_slabs:
            slabs.add(int(match[1]))
    return slabs


def list_names(files: Files, folder: str) -> set[str]:
    """Return the names in a store's folder, none if it does not exist.

    Raises:
        StoreError: it cannot be listed.
    """
    try:
        return files.names(folder)
    except OSError as error:
        raise StoreError(f"{files}/{folder} cannot be listed: {reason(error)}") from None
