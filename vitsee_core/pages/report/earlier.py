"""The page that an earlier call left: whether it still shows what is there, and its figures.

A page names, in a `meta` element, the digests of the code that made it, of all that it shows, and
of itself. One that was changed since is not relied on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from vitsee_core.pages.report.materials import candidates, picture_beside
from vitsee_core.pages.report.study_record import failed_steps, read_study
from vitsee_core.runtime.registry import guests
from vitsee_core.runtime.versions import worker_versions
from vitsee_core.tables.files import read_file
from vitsee_stores.errors import VitseeError
from vitsee_stores.info import describe

UNSEALED = "0" * 64
_MADE_OF = re.compile(
    rb'<meta name="vitsee-made-of" content="([0-9a-f]{64}) ([0-9a-f]{64}) '
)
_PICTURE = re.compile(
    rb'data-png="([0-9a-f]{64})" src="(data:image/\w+;base64,[\w+/=]+)"'
)
HEAD = 4096  # bytes within which a page says what it was made of


@dataclass(frozen=True)
class EarlierPage:
    """inputs: the digest of what the page shows, "" where it cannot be relied on; pictures: digest
    of a PNG -> the address of its image on the page."""

    inputs: str = ""
    pictures: Mapping[str, str] = field(default_factory=dict)


def code_digest() -> str:
    """SHA-256 of the package's code, that of guests, and the versions that it runs with."""
    modules = tuple(guest.module for guest in guests().values())
    return hashlib.sha256(json.dumps(dict(worker_versions(modules))).encode()).hexdigest()


def read_page(path: Path) -> EarlierPage:
    """The page in a file, where this code wrote it and nobody changed it."""
    try:
        page = read_file(path)
    except (OSError, VitseeError):
        return EarlierPage()
    found = _MADE_OF.search(page[:HEAD])
    if found is None or found[1].decode() != code_digest():
        return EarlierPage()
    own = page[found.end() : found.end() + 64]
    if (
        hashlib.sha256(page.replace(own, UNSEALED.encode(), 1)).hexdigest().encode()
        != own
    ):
        return EarlierPage()
    pictures = {
        digest.decode(): address.decode() for digest, address in _PICTURE.findall(page)
    }
    return EarlierPage(found[2].decode(), pictures)


def sealed(page: str) -> bytes:
    """The page with its own digest in place of `UNSEALED`."""
    text = page.encode()
    digest = hashlib.sha256(text).hexdigest()
    return text.replace(UNSEALED.encode(), digest.encode(), 1)


def inputs_digest(folder: Path, output: Path, about: Any) -> str:
    """SHA-256 of all that the page of a folder shows: stores, results and their pictures, what a
    study says. about: what else decides the page; JSON."""
    study = read_study(folder)
    failed = failed_steps(study)
    said = msgspec.to_builtins(msgspec.structs.replace(study, steps={}))
    place = os.path.relpath(folder.absolute(), output.absolute().parent)
    digest = hashlib.sha256(
        json.dumps([about, place, said, failed], default=str).encode()
    )
    for path in candidates(folder):
        digest.update(f"\0{path.relative_to(folder)}\0".encode())
        try:
            if path.is_dir():
                digest.update(json.dumps(describe(path), default=str).encode())
                continue
            sidecar = path.with_name(f"{path.name}.json")
            files = [path, sidecar, picture_beside(path), *_results_in(sidecar)]
            digest.update(
                str(path.stat().st_mtime_ns).encode()
            )  # results are in this order
            for file in files:
                found = file is not None and file.is_file()
                digest.update(
                    hashlib.sha256(read_file(file)).digest() if found and file else b"-"
                )
        except (OSError, VitseeError) as error:
            digest.update(str(error).encode())
    return digest.hexdigest()


def _results_in(sidecar: Path) -> list[Path]:
    """The results that one was made of, whose curves its figure shows."""
    try:
        entries = json.loads(read_file(sidecar)).get("results")
        return [Path(str(one["path"])) for one in entries or ()]
    except (
        OSError,
        ValueError,
        RecursionError,
        AttributeError,
        TypeError,
        KeyError,
        VitseeError,
    ):
        return []
