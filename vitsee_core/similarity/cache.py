"""Cache of Gram matrices: beside the store, under the store's identity, computed once.

`<store>.grams/` serves every pair, repeat and later comparison; it is never inside the store, which
does not change once complete. A file that is being written is owned by its process, whatever its
age: the lock ends with the process. Folders of matrices, and kept indexes of tar files, are found
and removed for `vitsee cache`.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features.matrix import FeatureMatrix
from vitsee_core.runtime.machine import TAR_INDEX, user_caches
from vitsee_core.runtime.streaming import Map
from vitsee_core.similarity.gram_file import (
    FORMAT,
    GramFile,
    Header,
    covers,
    format_of,
    has_batches,
    has_full_size,
    read_regular,
    write_tiles,
)
from vitsee_core.similarity.representation import FeatureOffset
from vitsee_core.tables.files import check_output_path, rename_at_end
from vitsee_core.types import Integers
from vitsee_stores import open_store
from vitsee_stores.errors import VitseeError, reason
from vitsee_stores.metadata import ZARR_JSON
from vitsee_stores.url import Place, Url

if TYPE_CHECKING:
    from vitsee_stores import Store

try:
    import fcntl
except ImportError:  # no POSIX: every file counts as owned
    fcntl = None  # type: ignore[assignment]


def create_owned(path: Path) -> int:
    """A new file that belongs to this process until the returned descriptor is closed."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        if fcntl is None:
            return descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # no locks on this file system: nobody can claim or remove it
            return descriptor
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # swept before it was locked


def owned_by_none(path: Path) -> bool:
    """Whether the process that created it with `create_owned` has ended; False if unknown, or if
    there is no such file."""
    if fcntl is None:
        return False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


# Tiles of a file with their numbers, in any order.
Tiles = Iterable[tuple[int, NDArray[np.float64]]]

PARTIAL = ".partial"
SCRATCH = "vitsee-grams-"
OWNER = "owner"

log = logging.getLogger(__name__)


@dataclass
class GramCache:
    """Gram files of any number of stores.

    Attributes:
        folder: one place for all of them; None: beside each store.
        persistent: False keeps them in `scratch`, which is removed at the end.
        precision: of their products; matrices of another precision are not found.
    """

    folder: Path | None
    persistent: bool
    scratch: Path
    precision: str = "fp32"
    _folders: dict[str, Path] = field(default_factory=dict)  # store_id -> folder

    def place(self, store: Store) -> Path:
        """Return the folder for a store's matrices; the scratch folder if that is not writable
        (logged once)."""
        store_id = store.manifest.store_id
        if store_id not in self._folders:
            self._folders[store_id] = self._writable_folder(store)
        return self._folders[store_id]

    def is_shared(self, store: Store, map: Map) -> bool:
        """Return whether processes of `map` can see a store's folder: not this machine's scratch
        folder, unless they run on this machine."""
        return self.place(store) != self.scratch or bool(getattr(map, "local", 0))

    def absolute(self) -> GramCache:
        """Return the cache for a process with another working directory."""
        folders = {
            store_id: folder.absolute() for store_id, folder in self._folders.items()
        }
        folder = self.folder and self.folder.absolute()
        return replace(self, folder=folder, _folders=folders)

    def _writable_folder(self, store: Store) -> Path:
        """Return the folder for a store's matrices, which is made if it is missing; the scratch
        folder if it cannot be written. Remains of killed processes are removed from it."""
        if not self.persistent:
            return self.scratch
        folder = self.folder or own_folder(store)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Made and removed: permission bits alone do not tell whether files can be
            # written.
            with tempfile.TemporaryFile(dir=folder):
                _remove_abandoned_files(folder)
                return folder
        except OSError as error:
            log.warning(
                "Gram matrices of %s are not kept: cannot write %s: %s (choose a place with "
                "--cache DIR, or --no-cache)",
                store.label,
                folder,
                reason(error),
            )
            return self.scratch

    def find(
        self, features: FeatureMatrix, rows: Integers, batches: Sequence[Integers] = ()
    ) -> GramFile | None:
        """Return a cached matrix that contains `rows`, or the matrices of these batches; None if
        there is none. A file that is cut short is removed.

        Args:
            features: whose matrix it is.
            rows: of their store.
            batches: rows of each batch; none for a matrix of all rows.
        """
        folder = self.place(features.store)
        if not folder.is_dir():
            return None
        identity = (_revision(features), self._key(features))
        # A matrix of more rows serves as well, so the names of files do not decide alone.
        for path in sorted(folder.glob(f"{self._stem(features)}.*.json")):
            header = Header.load(read_regular(path))
            if header is None or (header.store, header.key) != identity:
                continue
            if batches:
                is_usable = has_batches(header, batches)
            else:
                is_usable = covers(header, rows)
            if not is_usable:
                continue
            tiles = path.with_suffix(".tiles")
            if has_full_size(tiles, header):
                return GramFile(tiles, header)
            if tiles.exists():
                log.warning("%s is cut short; it is made again", tiles)
                path.unlink(missing_ok=True)
                tiles.unlink(missing_ok=True)
        return None

    def add(
        self,
        features: FeatureMatrix,
        rows: Integers,
        tile: int,
        make: Callable[[FeatureOffset], Tiles],
        batches: tuple[int, ...] = (),
    ) -> GramFile:
        """Store a matrix while it is computed; it appears only when complete. If its folder
        disappears meanwhile, it is computed again, in the scratch folder.

        Args:
            features: whose matrix it is.
            rows: the images; with `batches`, batch after batch.
            tile: side of the tiles.
            make: returns the numbered tiles as they are computed, and records the features' offset.
            batches: images in each batch; none for a matrix of all rows.

        Raises:
            VitseeError: the disk refused it.
        """
        for attempt in range(3):
            folder = self.place(features.store)
            try:
                return self._write(folder, features, rows, tile, make, batches)
            except OSError as error:
                if not folder.is_dir() and attempt < 2:
                    log.warning(
                        "%s was removed meanwhile; the Gram matrix of %s is made again%s",
                        folder,
                        " ".join(features.key),
                        " and not kept" if attempt else "",
                    )
                    if attempt:  # removed twice: not worth a third try there
                        self._folders[features.store.manifest.store_id] = self.scratch
                    continue
                raise VitseeError(
                    f"cannot keep the Gram matrix of {' '.join(features.key)} in {folder}: "
                    f"{reason(error)} (choose another place with --cache DIR)"
                ) from error
        raise AssertionError("the last attempt returns or raises")

    def _write(
        self,
        folder: Path,
        features: FeatureMatrix,
        rows: Integers,
        tile: int,
        make: Callable[[FeatureOffset], Tiles],
        batches: tuple[int, ...],
    ) -> GramFile:
        """Compute and write a matrix into a folder; arguments as those of `add`.

        Returns:
            The file, or that of another process that finished the same matrix meanwhile.
        """
        key = self._key(features)
        digest = sha256(repr((_revision(features), key, batches)).encode())
        digest.update(rows.astype("<i8").tobytes())
        # A private name, so that two processes computing the same matrix do not collide.
        name = f"{self._stem(features)}.{digest.hexdigest()[:12]}-{secrets.token_hex(3)}"
        tiles_path = folder / f"{name}.tiles"
        header_path = folder / f"{name}.json"
        partial_tiles = tiles_path.with_name(tiles_path.name + PARTIAL)
        partial_header = header_path.with_name(header_path.name + PARTIAL)
        # Tiles first: a header is seen only beside its tiles.
        final_paths = {partial_tiles: tiles_path, partial_header: header_path}
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = None
        try:  # an interrupt may come at any moment after the file's creation
            with rename_at_end(final_paths):
                descriptor = create_owned(partial_tiles)
                # Matrices of batches are kept without the shift that all rows have in
                # common.
                offset = FeatureOffset(0 if batches else len(rows))
                checksums = write_tiles(descriptor, make(offset), tile)
                header = Header(
                    store=_revision(features),
                    key=key,
                    rows=rows,
                    batches=batches,
                    tile=tile,
                    offset=offset.ratio,
                    checksums=checksums,
                    shift=None if batches else offset.shift,
                )
                if not batches:
                    existing = self.find(features, rows)
                    if existing is not None:  # another process was faster
                        final_paths.clear()
                        return existing
                partial_header.write_bytes(header.dump())
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._remove_old_formats(folder, features)
        return GramFile(tiles_path, header)

    def _remove_old_formats(self, folder: Path, features: FeatureMatrix) -> None:
        """Remove matrices of these features that an earlier version wrote, which are not read."""
        for header_path in folder.glob(f"{self._stem(features)}.*.json"):
            if format_of(read_regular(header_path)) < FORMAT:
                header_path.unlink(missing_ok=True)
                header_path.with_suffix(".tiles").unlink(missing_ok=True)

    def _key(self, features: FeatureMatrix) -> tuple[str, ...]:
        """Return the identity of cached features: their key, and the precision unless fp32."""
        if self.precision == "fp32":
            return features.key
        return (*features.key, self.precision)

    def _stem(self, features: FeatureMatrix) -> str:
        """Return the beginning of the file names of these features' matrices."""
        text = ".".join([*self._key(features), features.store.manifest.store_id[:8]])
        return re.sub(r"[^A-Za-z0-9._-]", "_", text)


def own_folder(store: Store) -> Path:
    """Return the cache folder of a store: beside it, or for a store at a URL in the user's cache
    folder, by the store's identity."""
    if isinstance(store.place, Path):
        return store.place.with_name(f"{store.place.name}.grams")
    return user_caches() / f"{store.place.stem}-{store.manifest.store_id[:12]}.grams"


@contextmanager
def gram_cache(
    folder: Path | None, persistent: bool, precision: str = "fp32"
) -> Iterator[GramCache]:
    """Yield a cache whose scratch folder is removed at the end.

    Args:
        folder: for the matrices of all stores; None: beside each store.
        persistent: whether matrices are kept at all.
        precision: of the products.

    Raises:
        VitseeError: `folder` is inside a store, or its parent does not exist.
    """
    if folder is not None:
        check_output_path(folder / OWNER)
        if not folder.absolute().parent.is_dir():
            raise VitseeError(
                f"--cache {folder}: there is no folder {folder.absolute().parent}"
            )
    # Scratch folders of processes that were killed.
    for abandoned in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        if owned_by_none(abandoned / OWNER):
            shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=SCRATCH, ignore_cleanup_errors=True
    ) as scratch:
        owner = create_owned(Path(scratch, OWNER))
        try:
            yield GramCache(folder, persistent, Path(scratch), precision)
        finally:
            os.close(owner)


def _revision(features: FeatureMatrix) -> str:
    """Return the version of a site's numbers: the store's identity, and when the slabs that hold
    the site were committed, in whichever generation."""
    store = features.store
    site = features.key[0]
    return f"{store.manifest.store_id}:{store.revision_of(site)}"


def _remove_abandoned_files(folder: Path) -> None:
    """Remove unfinished matrices of processes that have ended."""
    for path in folder.glob(f"*.tiles{PARTIAL}"):
        if owned_by_none(path):
            path.unlink(missing_ok=True)
            header = path.name.removesuffix(f".tiles{PARTIAL}")
            path.with_name(f"{header}.json{PARTIAL}").unlink(missing_ok=True)


@dataclass(frozen=True)
class CacheFolder:
    """Gram matrices in one folder; or, without any, the index of tar files in one file."""

    folder: Path
    store_id: str  # of the store of the first matrix
    n_matrices: int
    size_bytes: int  # of all of them on disk

    def remove(self) -> None:
        """Remove the matrices, and the folder if nothing else is in it.

        Raises:
            VitseeError: the disk refused.
        """
        try:
            if not self.n_matrices:
                self.folder.unlink(missing_ok=True)
                return
            for header in _header_paths(self.folder):
                header.unlink(missing_ok=True)
                header.with_suffix(".tiles").unlink(missing_ok=True)
            if not any(self.folder.iterdir()):
                self.folder.rmdir()
        except OSError as error:
            raise VitseeError(
                f"cannot remove {error.filename}: {reason(error)}"
            ) from None


def caches_of(places: Sequence[Place]) -> list[CacheFolder]:
    """Return the caches of stores, and those below other folders.

    Args:
        places: stores and folders; none: the working directory and the user's cache folder.

    Raises:
        VitseeError: a place does not exist.
    """
    roots = [_cache_root(place) for place in places] or [Path(), user_caches()]
    folders: set[Path] = set()
    indexes: dict[Path, None] = {}  # of tar files, in the roots' order
    for root in roots:
        folders.update(_folders_below(root))
        indexes.update(dict.fromkeys(sorted(root.glob(f"*{TAR_INDEX}"))))
    caches = []
    for folder in sorted(folders):
        cache = _cache_in(folder)
        if cache is not None:
            caches.append(cache)
    for path in indexes:
        size = path.stat().st_size
        caches.append(CacheFolder(path, store_id="", n_matrices=0, size_bytes=size))
    return caches


def _cache_root(place: Place) -> Path:
    """Return the folder in which the caches of a store, or of everything below a folder, are."""
    if isinstance(place, Url) or (place / ZARR_JSON).is_file():
        return own_folder(open_store(place, allow_partial=True))
    if not place.is_dir():
        raise VitseeError(f"{place} is no store and no folder; expected either")
    return place


def _folders_below(root: Path) -> Iterator[Path]:
    """Yield a folder and all folders below it that are not in a store."""
    for folder, subfolders, _ in os.walk(root):
        if (Path(folder) / ZARR_JSON).is_file():
            subfolders.clear()  # nothing is cached inside a store
        else:
            yield Path(folder)


def _header_paths(folder: Path) -> list[Path]:
    """Return the headers of the Gram matrices in a folder."""
    return [
        path
        for path in sorted(folder.glob("*.json"))
        if Header.load(read_regular(path)) is not None
    ]


def _cache_in(folder: Path) -> CacheFolder | None:
    """Return what a folder keeps; None if there is no Gram matrix in it."""
    header_paths = _header_paths(folder)
    if not header_paths:
        return None
    size = 0
    for header_path in header_paths:
        tiles_path = header_path.with_suffix(".tiles")
        size += header_path.stat().st_size if header_path.exists() else 0
        size += tiles_path.stat().st_size if tiles_path.exists() else 0
    first = Header.load(read_regular(header_paths[0]))
    store_id = ""
    if first is not None:
        store_id, _, _ = first.store.partition(":")
    return CacheFolder(folder, store_id, len(header_paths), size)
