"""Finding and removing folders of cached Gram matrices, and kept indexes of tar files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitsee_core.runtime.machine import TAR_INDEX, user_caches
from vitsee_core.similarity.cache import own_folder
from vitsee_core.similarity.gram_file import Header, read_regular
from vitsee_stores import open_store
from vitsee_stores.errors import VitseeError, reason
from vitsee_stores.metadata import ZARR_JSON
from vitsee_stores.url import Place, Url


@dataclass(frozen=True)
class CacheFolder:
    """Gram matrices in one folder; or, without any, the index of tar files in one file."""

    folder: Path
    store_id: str  # of the store of the first matrix
    n_matrices: int
    size_bytes: int  # of all of them on disk

    def remove(self) -> None:
        """Remove the matrices, and the folder if nothing else is in it. Raises VitseeError: the
        disk refused."""
        try:
            if not self.n_matrices:
                self.folder.unlink(missing_ok=True)
                return
            for header in _headers(self.folder):
                for file in (header, header.with_suffix(".tiles")):
                    file.unlink(missing_ok=True)
            if not any(self.folder.iterdir()):
                self.folder.rmdir()
        except OSError as error:
            raise VitseeError(f"cannot remove {error.filename}: {reason(error)}") from None


def caches_of(places: Sequence[Place]) -> list[CacheFolder]:
    """The caches of stores, and those below other folders; by default those below the working
    directory and in the user's cache folder. Raises VitseeError: a place does not exist."""
    roots = [_root(place) for place in places] or [Path(), user_caches()]
    folders = dict.fromkeys(folder for root in roots for folder in _below(root))
    caches = [cache for folder in sorted(folders) if (cache := _cache(folder)) is not None]
    indexes = dict.fromkeys(file for root in roots for file in sorted(root.glob(f"*{TAR_INDEX}")))
    return caches + [CacheFolder(file, "", 0, file.stat().st_size) for file in indexes]


def _root(place: Place) -> Path:
    """The folder in which the caches of a store, or of everything below a folder, are."""
    if isinstance(place, Url) or (place / ZARR_JSON).is_file():
        return own_folder(open_store(place, allow_partial=True))
    if not place.is_dir():
        raise VitseeError(f"{place} is no store and no folder; expected either")
    return place


def _below(root: Path) -> Iterator[Path]:
    for here, folders, _ in os.walk(root):
        if (Path(here) / ZARR_JSON).is_file():
            folders.clear()  # nothing is cached inside a store
        else:
            yield Path(here)


def _headers(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.glob("*.json")) if Header.load(read_regular(p)) is not None]


def _cache(folder: Path) -> CacheFolder | None:
    """The contents of a folder; None if there is no Gram matrix."""
    headers = _headers(folder)
    if not headers:
        return None
    first = Header.load(read_regular(headers[0]))
    files = [file for h in headers for file in (h, h.with_suffix(".tiles")) if file.exists()]
    size = sum(file.stat().st_size for file in files)
    store_id = first.store.partition(":")[0] if first is not None else ""
    return CacheFolder(folder, store_id, len(headers), size)
