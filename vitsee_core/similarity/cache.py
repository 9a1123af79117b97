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
    is_whole,
    read_regular,
    same_batches,
    write_tiles,
)
from vitsee_core.similarity.representation import FeatureOffset
from vitsee_core.tables.files import check_place, renamed
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
    _places: dict[str, Path] = field(default_factory=dict)

    def place(self, store: Store) -> Path:
        """The folder for a store's matrices; the scratch folder if that is not writable (logged
        once)."""
        store_id = store.manifest.store_id
        if store_id not in self._places:
            self._places[store_id] = self._find(store)
        return self._places[store_id]

    def is_shared(self, store: Store, map: Map) -> bool:
        """Whether processes of `map` can see a store's folder: not this machine's scratch folder,
        unless they run on this machine."""
        return self.place(store) != self.scratch or bool(getattr(map, "local", 0))

    def absolute(self) -> GramCache:
        """The same for a process with another working directory."""
        places = {store_id: place.absolute() for store_id, place in self._places.items()}
        folder = self.folder and self.folder.absolute()
        return replace(self, folder=folder, _places=places)

    def _find(self, store: Store) -> Path:
        if not self.persistent:
            return self.scratch
        wanted = self.folder or own_folder(store)
        try:
            wanted.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=wanted):
                _sweep(wanted)
                return wanted
        except OSError as error:
            log.warning(
                "Gram matrices of %s are not kept: cannot write %s: %s (choose a place with "
                "--cache DIR, or --no-cache)",
                *(store.label, wanted, reason(error)),
            )
            return self.scratch

    def find(
        self, features: FeatureMatrix, rows: Integers, batches: Sequence[Integers] = ()
    ) -> GramFile | None:
        """A cached matrix that contains `rows`, or the matrices of these batches."""
        store = _revision(features)
        folder = self.place(features.store)
        stem = self._stem(features)
        key = self._key(features)
        for path in sorted(folder.glob(f"{stem}.*.json")) if folder.is_dir() else ():
            header = Header.load(read_regular(path))
            if header is None or (header.store, header.key) != (store, key):
                continue
            if same_batches(header, batches) if batches else covers(header, rows):
                tiles = path.with_suffix(".tiles")
                if is_whole(tiles, header):
                    return GramFile(tiles, header)
                if tiles.exists():
                    log.warning("%s is cut short; it is made again", tiles)
                    for broken in (path, tiles):
                        broken.unlink(missing_ok=True)
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
            features: of what.
            rows: the images; with `batches`, batch after batch.
            tile: side of the tiles.
            make: computes the tiles, see `gram_file`, and records the origin of the features.
            batches: see `Header`.

        Raises:
            VitseeError: the disk refused it.
        """
        for attempt in range(3):
            folder = self.place(features.store)
            try:
                return self._add(folder, features, rows, tile, make, batches)
            except OSError as error:
                if not folder.is_dir() and attempt < 2:
                    log.warning(
                        "%s was removed meanwhile; the Gram matrix of %s is made again%s",
                        *(
                            folder,
                            " ".join(features.key),
                            " and not kept" if attempt else "",
                        ),
                    )
                    if attempt:
                        self._places[features.store.manifest.store_id] = self.scratch
                    continue
                raise VitseeError(
                    f"cannot keep the Gram matrix of {' '.join(features.key)} in {folder}: "
                    f"{reason(error)} (choose another place with --cache DIR)"
                ) from error
        raise AssertionError("the last attempt returns or raises")

    def _add(
        self,
        folder: Path,
        features: FeatureMatrix,
        rows: Integers,
        tile: int,
        make: Callable[[FeatureOffset], Tiles],
        batches: tuple[int, ...],
    ) -> GramFile:
        key = self._key(features)
        digest = sha256(repr((_revision(features), key, batches)).encode())
        digest.update(rows.astype("<i8").tobytes())
        # A private name, so that two processes computing the same matrix do not collide.
        name = f"{self._stem(features)}.{digest.hexdigest()[:12]}-{secrets.token_hex(3)}"
        data = folder / f"{name}.tiles"
        header_file = folder / f"{name}.json"
        places = {
            path.with_name(path.name + PARTIAL): path for path in (data, header_file)
        }
        tiles, about = places
        folder.mkdir(parents=True, exist_ok=True)
        owned = None
        try:  # an interrupt may come at any moment after the file's creation
            with renamed(places):
                owned = create_owned(tiles)
                origin = FeatureOffset(0 if batches else len(rows))
                checksums = write_tiles(owned, make(origin), tile)
                header = Header(
                    _revision(features),
                    key,
                    rows,
                    batches,
                    tile,
                    origin.ratio,
                    checksums,
                    None if batches else origin.shift,
                )
                if not batches and (theirs := self.find(features, rows)) is not None:
                    places.clear()  # another process was faster
                    return theirs
                about.write_bytes(header.dump())
        finally:
            if owned is not None:
                os.close(owned)
        for header_path in folder.glob(f"{self._stem(features)}.*.json"):
            if format_of(read_regular(header_path)) < FORMAT:  # of the same features
                for old in (header_path, header_path.with_suffix(".tiles")):
                    old.unlink(missing_ok=True)
        return GramFile(data, header)

    def _key(self, features: FeatureMatrix) -> tuple[str, ...]:
        """Identity of cached features: store, features, and precision unless fp32."""
        if self.precision == "fp32":
            return features.key
        return (*features.key, self.precision)

    def _stem(self, features: FeatureMatrix) -> str:
        """A descriptive file name."""
        text = ".".join([*self._key(features), features.store.manifest.store_id[:8]])
        return re.sub(r"[^A-Za-z0-9._-]", "_", text)


def own_folder(store: Store) -> Path:
    """The cache folder of a store: beside one in a folder; for a store at a URL in the user's cache
    folder, by its identity."""
    if isinstance(store.place, Path):
        return store.place.with_name(f"{store.place.name}.grams")
    return user_caches() / f"{store.place.stem}-{store.manifest.store_id[:12]}.grams"


@contextmanager
def gram_cache(
    folder: Path | None, persistent: bool, precision: str = "fp32"
) -> Iterator[GramCache]:
    """A cache whose scratch folder is removed at the end. Raises VitseeError: `folder` is inside a
    store, or its parent does not exist."""
    if folder is not None:
        check_place(folder / OWNER)
        if not folder.absolute().parent.is_dir():
            raise VitseeError(
                f"--cache {folder}: there is no folder {folder.absolute().parent}"
            )
    for left in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        if owned_by_none(left / OWNER):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=SCRATCH, ignore_cleanup_errors=True
    ) as scratch:
        owner = create_owned(Path(scratch, OWNER))
        try:
            yield GramCache(folder, persistent, Path(scratch), precision)
        finally:
            os.close(owner)


def _revision(features: FeatureMatrix) -> str:
    """Version of a site's numbers: the store's identity, and when the slabs that hold the site
    were committed, in whichever generation."""
    store = features.store
    site = features.key[0]
    return f"{store.manifest.store_id}:{store.revision_of(site)}"


def _sweep(folder: Path) -> None:
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
            raise VitseeError(
                f"cannot remove {error.filename}: {reason(error)}"
            ) from None


def caches_of(places: Sequence[Place]) -> list[CacheFolder]:
    """The caches of stores, and those below other folders; by default those below the working
    directory and in the user's cache folder. Raises VitseeError: a place does not exist."""
    roots = [_root(place) for place in places] or [Path(), user_caches()]
    folders = dict.fromkeys(folder for root in roots for folder in _below(root))
    caches = [
        cache for folder in sorted(folders) if (cache := _cache(folder)) is not None
    ]
    indexes = dict.fromkeys(
        file for root in roots for file in sorted(root.glob(f"*{TAR_INDEX}"))
    )
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
    return [
        p
        for p in sorted(folder.glob("*.json"))
        if Header.load(read_regular(p)) is not None
    ]


def _cache(folder: Path) -> CacheFolder | None:
    """The contents of a folder; None if there is no Gram matrix."""
    headers = _headers(folder)
    if not headers:
        return None
    first = Header.load(read_regular(headers[0]))
    files = [
        file for h in headers for file in (h, h.with_suffix(".tiles")) if file.exists()
    ]
    size = sum(file.stat().st_size for file in files)
    store_id = first.store.partition(":")[0] if first is not None else ""
    return CacheFolder(folder, store_id, len(headers), size)
