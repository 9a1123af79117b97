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

UNSEALED = "0" * 64  # stands for the page's own digest while that is computed
_MADE_OF = re.compile(
    rb'<meta name="vitsee-made-of" content="([0-9a-f]{64}) ([0-9a-f]{64}) '
)
_PICTURE = re.compile(
    rb'data-png="([0-9a-f]{64})" src="(data:image/\w+;base64,[\w+/=]+)"'
)
HEAD = 4096  # bytes within which a page says what it was made of


@dataclass(frozen=True)
class EarlierPage:
    """What an earlier page says about itself.

    Attributes:
        inputs: the digest of what the page shows; "" if it cannot be relied on.
        pictures: digest of a PNG -> the address of its image on the page.
    """

    inputs: str = ""
    pictures: Mapping[str, str] = field(default_factory=dict)


def code_digest() -> str:
    """Return the SHA-256 of the code, ours and guests', and of the versions that it runs with."""
    modules = tuple(guest.module for guest in guests().values())
    versions = json.dumps(dict(worker_versions(modules)))
    return hashlib.sha256(versions.encode()).hexdigest()


def read_page(path: Path) -> EarlierPage:
    """Return the page in a file; an empty one if other code wrote it or it was changed since."""
    try:
        page = read_file(path)
    except (OSError, VitseeError):
        return EarlierPage()
    made_of = _MADE_OF.search(page[:HEAD])
    if made_of is None or made_of[1].decode() != code_digest():
        return EarlierPage()
    # The third digest is that of the page with zeros in its place, see `sealed`.
    seal = page[made_of.end() : made_of.end() + len(UNSEALED)]
    unsealed = page.replace(seal, UNSEALED.encode(), 1)
    if hashlib.sha256(unsealed).hexdigest().encode() != seal:
        return EarlierPage()
    pictures = {
        digest.decode(): address.decode() for digest, address in _PICTURE.findall(page)
    }
    return EarlierPage(made_of[2].decode(), pictures)


def sealed(page: str) -> bytes:
    """Return the page with its own digest in place of `UNSEALED`."""
    text = page.encode()
    digest = hashlib.sha256(text).hexdigest()
    return text.replace(UNSEALED.encode(), digest.encode(), 1)


def inputs_digest(folder: Path, output: Path, about: Any) -> str:
    """Return the SHA-256 of all that the page of a folder shows.

    Args:
        folder: its stores, its results and their pictures, and its study count.
        output: the page, whose links are relative.
        about: what else decides the page, as JSON.
    """
    study = read_study(folder)
    failed = failed_steps(study)
    # Of the steps only failures are on the page: the rest would change with every run.
    study_record = msgspec.to_builtins(msgspec.structs.replace(study, steps={}))
    link = os.path.relpath(folder.absolute(), output.absolute().parent)
    head = json.dumps([about, link, study_record, failed], default=str)
    digest = hashlib.sha256(head.encode())
    for path in candidates(folder):
        digest.update(f"\0{path.relative_to(folder)}\0".encode())
        try:
            if path.is_dir():
                digest.update(json.dumps(describe(path), default=str).encode())
                continue
            sidecar = path.with_name(f"{path.name}.json")
            files = [path, sidecar, picture_beside(path), *_input_results(sidecar)]
            # The page has results in the order of their times.
            digest.update(str(path.stat().st_mtime_ns).encode())
            for file in files:
                if file is not None and file.is_file():
                    digest.update(hashlib.sha256(read_file(file)).digest())
                else:
                    digest.update(b"-")
        except (OSError, VitseeError) as error:
            digest.update(str(error).encode())
    return digest.hexdigest()


def _input_results(sidecar: Path) -> list[Path]:
    """Return the results that a result was made of, whose curves its figure shows.

    None of them if the sidecar has another form: it may be a stranger's.
    """
    try:
        entries = json.loads(read_file(sidecar)).get("results")
        return [Path(str(entry["path"])) for entry in entries or ()]
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
