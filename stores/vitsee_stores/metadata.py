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
MOST_BYTES = 16 << 20
MOST_DEPTH = 32


def parse(text: bytes) -> Any:
    """Parse JSON strictly. Raises ValueError: not JSON in UTF-8, non-finite numbers, or nesting
    deeper than 32 levels."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no number")

    def number(word: str) -> float:
        value = float(word)
        return value if math.isfinite(value) else refuse(word)

    try:
        value = json.loads(text.decode(), parse_constant=refuse, parse_float=number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    depth = 0
    while level := [
        item
        for one in level
        if isinstance(one, (dict, list))
        for item in (one.values() if isinstance(one, dict) else one)
    ]:
        depth += 1
        if depth > MOST_DEPTH:
            raise ValueError("it is nested too deeply")
    return value


def to_text(document: Mapping[str, Any]) -> bytes:
    """A JSON document as written to disk."""
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def group_document(attributes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The zarr.json of a group, as zarr writes it."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes or {})}


def root_document(manifest: Manifest, complete: bool) -> dict[str, Any]:
    return group_document(
        {ATTRIBUTE: with_digest({**manifest.to_json(), "complete": complete})}
    )


def with_digest(data: Mapping[str, Any]) -> dict[str, Any]:
    """The root's attribute with a digest of everything in it except the digest and `complete`:
    sha256 of its JSON with sorted keys, without spaces, in ASCII."""
    sealed = {key: data[key] for key in data if key not in ("digest", "complete")}
    text = json.dumps(sealed, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return {**data, "digest": hashlib.sha256(text.encode()).hexdigest()}


def root_text(manifest: Manifest, complete: bool) -> bytes:
    """The zarr.json of the root group as written to disk. Raises StoreError: readers would refuse
    it."""
    document = root_document(manifest, complete)
    text = to_text(document)
    if len(text) > MOST_BYTES:
        raise StoreError(
            f"the manifest has {len(text)} bytes, expected at most {MOST_BYTES}"
        )
    try:
        Manifest.from_json(parse(text)["attributes"][ATTRIBUTE])
    except (StoreError, ValueError) as error:
        raise StoreError(f"this store could not be read again: {error}") from None
    return text


def read_root(files: Files) -> tuple[Manifest, bool]:
    """The manifest, and whether the store says that it is complete. Raises StoreError: missing, not
    a store, of another format version, or damaged."""
    data = check_ours(files)
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


def _near(place: str) -> str:
    """`; near names: vit.zarr` of what lies beside a path on this machine, "" without any."""
    path = Path(place)
    try:
        names = [name for name in os.listdir(path.parent) if name.endswith(".zarr")]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=3)
    return f"; near names: {', '.join(near)}" if near else ""


def check_ours(files: Files) -> dict[str, Any]:
    """The vitsee attribute of the Zarr group, of any format version. Raises NoStore: nothing is
    there; StoreError: not a store, or damaged."""
    try:
        document = parse(files.read(ZARR_JSON, MOST_BYTES))
    except FileNotFoundError:
        if not _is_there(files):
            named = "/" in str(files) or str(files).endswith(".zarr")
            run = (
                f"MODEL --data DATA -o {files}"
                if named
                else f"{files} --data DATA -o NAME.zarr"
            )
            told = f"run: vitsee extract {run}{'' if named else ', if that is a model'}"
            near = _near(str(files))
            raise NoStore(
                f"no store at {files}: nothing is there{near} ({told})"
            ) from None
        raise StoreError(
            f"{files} is no vitsee store: the folder has no {ZARR_JSON} (a store is what vitsee "
            "extract writes)"
        ) from None
    except NotADirectoryError:
        raise StoreError(
            f"{files} is no vitsee store but a file (a store is a folder that vitsee extract "
            "writes)"
        ) from None
    except OSError as error:
        raise StoreError(f"{files} cannot be read: {reason(error)}") from None
    except ValueError:
        raise StoreError(
            f"{files} is damaged: its {ZARR_JSON} is no JSON (copy the store anew, or extract it "
            "again)"
        ) from None
    attributes = document.get("attributes") if isinstance(document, dict) else None
    data = attributes.get(ATTRIBUTE) if isinstance(attributes, dict) else None
    if not isinstance(data, dict):
        raise StoreError(
            f"{files} is no vitsee store: its {ZARR_JSON} has no '{ATTRIBUTE}' attribute (a store "
            "is what vitsee extract writes)"
        )
    return data


def _is_there(files: Files) -> bool:
    try:
        return files.exists()
    except OSError as error:
        raise StoreError(f"{files} cannot be read: {reason(error)}") from None


def encode_marker(
    seal: Mapping[str, Any], provenance: Mapping[str, Any], spec: ArraySpec
) -> bytes:
    """A slab's commit marker as its chunk's bytes: JSON padded with spaces.

    seal: what readers compare (store_id, slab, checksums). Provenance that does not fit is dropped,
    longest first, and named under "dropped".
    """
    kept = {**provenance, **seal}
    text = json.dumps(kept, allow_nan=False).encode()
    dropped: list[str] = []
    while len(text) > COMMIT_BYTES:
        longest = max(
            (k for k in kept if k != "dropped" and k not in seal),
            key=lambda k: len(json.dumps(kept[k])),
        )
        dropped.append(longest)
        del kept[longest]
        kept["dropped"] = dropped
        text = json.dumps(kept, allow_nan=False).encode()
    block = np.frombuffer(text.ljust(COMMIT_BYTES), np.uint8).reshape(spec.chunks)
    return b"".join(bytes(piece) for piece in encode(block, spec))


def read_marker(
    files: Files, slab: int, spec: ArraySpec, manifest: Manifest
) -> dict[str, Any] | None:
    """A slab's commit marker; None if the slab is not committed: the marker is missing, damaged, or
    from another slab or store. Raises StoreError: the server did not respond."""
    try:
        data = files.read(chunk_name(spec, (slab, 0)), spec.chunk_bytes + CHECKSUM_BYTES)
        marker = parse(decode(data, spec).tobytes())
    except NoAnswer as error:
        raise no_answer(files, chunk_name(spec, (slab, 0)), error) from None
    except (OSError, ValueError):
        return None
    same = {"store_id": manifest.store_id, "slab": slab}
    if not isinstance(marker, dict) or any(marker.get(key) != same[key] for key in same):
        return None
    return marker if type(marker.get("checksums")) is int else None


def read_markers(files: Files, manifest: Manifest) -> dict[int, dict[str, Any]]:
    """The commit markers of all committed slabs, by slab, in order."""
    spec = arrays(manifest.plan)["commits"]
    names = list_names(files, spec.path)
    slabs = sorted(numbers(names, manifest.plan.n_slabs))
    markers = files.each_small(
        lambda slab: read_marker(files, slab, spec, manifest), slabs
    )
    return {
        k: marker for k, marker in zip(slabs, markers, strict=True) if marker is not None
    }


def numbers(names: Iterable[str], n_slabs: int) -> set[int]:
    """The slabs whose marker files are among `names`. Existing files are counted, not what the
    manifest claims."""
    matches = (re.fullmatch(r"c\.(0|[1-9]\d{0,9})\.0", name) for name in names)
    return {slab for match in matches if match and (slab := int(match[1])) < n_slabs}


def list_names(files: Files, folder: str) -> set[str]:
    """Names in a store's folder; empty if there is no such folder. Raises StoreError: it cannot be
    listed."""
    try:
        return files.names(folder)
    except OSError as error:
        raise StoreError(f"{files}/{folder} cannot be listed: {reason(error)}") from None
