"""Cache of Gram matrices: beside the store, under the store's identity, computed once.

`<store>.grams/` serves every pair, repeat and later comparison; it is never inside the store, which
does not change once complete.
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
from vitsee_core.runtime.machine import user_caches
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
from vitsee_core.similarity.ownership import create_owned, owned_by_none
from vitsee_core.similarity.shift import FeatureOffset
from vitsee_core.tables.files import check_place, renamed
from vitsee_core.types import Integers
from vitsee_stores.errors import VitseeError, reason

if TYPE_CHECKING:
    from vitsee_stores import Store

# Tiles of a file with their numbers, in any order.
Tiles = Iterable[tuple[int, NDArray[np.float64]]]

PARTIAL, SCRATCH, OWNER = ".partial", "vitsee-grams-", "owner"

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
        store, folder = _revision(features), self.place(features.store)
        stem, key = self._stem(features), self._key(features)
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
                        *(folder, " ".join(features.key), " and not kept" if attempt else ""),
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
        data, header_file = folder / f"{name}.tiles", folder / f"{name}.json"
        places = {path.with_name(path.name + PARTIAL): path for path in (data, header_file)}
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
        _remove_older(folder, self._stem(features))
        return GramFile(data, header)

    def _key(self, features: FeatureMatrix) -> tuple[str, ...]:
        """Identity of cached features: store, features, and precision unless fp32."""
        return features.key if self.precision == "fp32" else (*features.key, self.precision)

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
            raise VitseeError(f"--cache {folder}: there is no folder {folder.absolute().parent}")
    for left in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        if owned_by_none(left / OWNER):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, ignore_cleanup_errors=True) as scratch:
        owner = create_owned(Path(scratch, OWNER))
        try:
            yield GramCache(folder, persistent, Path(scratch), precision)
        finally:
            os.close(owner)


def _revision(features: FeatureMatrix) -> str:
    """Version of a site's numbers: the store's identity, and when the slabs that hold the site
    were committed, in whichever generation."""
    store, site = features.store, features.key[0]
    return f"{store.manifest.store_id}:{store.revision_of(site)}"


def _remove_older(folder: Path, stem: str) -> None:
    """Remove matrices of the same features in earlier formats."""
    for path in folder.glob(f"{stem}.*.json"):
        if format_of(read_regular(path)) < FORMAT:
            for old in (path, path.with_suffix(".tiles")):
                old.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    for path in folder.glob(f"*.tiles{PARTIAL}"):
        if owned_by_none(path):
            path.unlink(missing_ok=True)
            header = path.name.removesuffix(f".tiles{PARTIAL}")
            path.with_name(f"{header}.json{PARTIAL}").unlink(missing_ok=True)
