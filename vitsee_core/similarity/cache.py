"""Where Gram matrices are kept: beside the store, under the store's identity, computed once.

`<store>.grams/` holds them for every pair, repeat and later comparison; never inside the store,
which does not change once it is complete.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitsee_core.similarity.features import Features
from vitsee_core.similarity.gram_file import (
    GramFile,
    Header,
    covers,
    same_batches,
    write_tiles,
)
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_stores import Store

Rows = NDArray[np.int64]

PARTIAL, SCRATCH = ".partial", "vitsee-grams-"
ABANDONED_SECONDS = 24 * 3600

log = logging.getLogger(__name__)


@dataclass
class GramCache:
    """Gram files of any number of stores. folder: one place for all of them; None: beside each
    store. persistent: off, they are gone with `scratch`."""

    folder: Path | None
    persistent: bool
    scratch: Path
    _places: dict[str, Path] = field(default_factory=dict)

    def place(self, store: Store) -> Path:
        """The folder for a store's matrices; the scratch folder where the wanted one cannot be
        written, which is said once."""
        store_id = store.manifest.store_id
        if store_id not in self._places:
            self._places[store_id] = self._find(store)
        return self._places[store_id]

    def _find(self, store: Store) -> Path:
        if not self.persistent:
            return self.scratch
        wanted = self.folder or store.path.with_name(f"{store.path.name}.grams")
        try:
            wanted.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=wanted):
                _sweep(wanted)
                return wanted
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            log.warning(
                "Gram matrices of %s are not kept: cannot write %s: %s (choose a place with "
                "--cache DIR, or --no-cache)",
                *(store.label, wanted, reason),
            )
            return self.scratch

    def find(self, features: Features, rows: Rows, batches: Sequence[Rows] = ()) -> GramFile | None:
        """A matrix that holds `rows`, or the matrices of these batches, if they were made."""
        store, folder = _revision(features.store), self.place(features.store)
        stem = _stem(features)
        for path in sorted(folder.glob(f"{stem}.*.json")) if folder.is_dir() else ():
            header = Header.load(_bytes(path))
            if header is None or (header.store, header.key) != (store, features.key):
                continue
            if same_batches(header, batches) if batches else covers(header, rows):
                tiles = path.with_suffix(".tiles")
                if tiles.exists():
                    return GramFile(tiles, header)
        return None

    def add(
        self,
        features: Features,
        rows: Rows,
        tile: int,
        tiles: Iterable[NDArray[np.float64]],
        offset: Callable[[], float],
        batches: tuple[int, ...] = (),
    ) -> GramFile:
        """Keep a matrix while it is made; it exists only when it is whole.

        Args:
            features: of what.
            rows: of which images; with `batches`, batch after batch.
            tile: length of the tiles.
            tiles: see `gram_file`.
            offset: asked when the last tile is made.
            batches: see `Header`.

        Raises:
            VitseeError: the disk refused it.
        """
        folder = self.place(features.store)
        digest = sha256(repr((_revision(features.store), features.key, batches)).encode())
        digest.update(rows.astype("<i8").tobytes())
        # A run of its own, so that two processes that make the same one do not meet.
        name = f"{_stem(features)}.{digest.hexdigest()[:12]}-{secrets.token_hex(3)}"
        data, header_file = folder / f"{name}.tiles", folder / f"{name}.json"
        partial = [path.with_name(path.name + PARTIAL) for path in (data, header_file)]
        try:
            checksums = write_tiles(partial[0], tiles, tile)
            header = Header(
                _revision(features.store),
                features.key,
                rows,
                batches,
                tile,
                offset(),
                checksums,
            )
            if len(batches) == 0 and (theirs := self.find(features, rows)) is not None:
                partial[0].unlink()  # another process was faster
                return theirs
            partial[1].write_bytes(header.dump())
            for path, final in zip(partial, (data, header_file), strict=True):
                os.replace(path, final)
            return GramFile(data, header)
        except BaseException as error:
            for path in partial:
                path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                reason = (error.strerror or str(error)).lower()
                raise VitseeError(
                    f"cannot keep the Gram matrix of {' '.join(features.key)} in {folder}: "
                    f"{reason} (choose another place with --cache DIR)"
                ) from error
            raise


@contextmanager
def gram_cache(folder: Path | None, persistent: bool) -> Iterator[GramCache]:
    """A cache; what was put into its scratch folder is gone at the end."""
    for left in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        if _abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=SCRATCH) as scratch:
        yield GramCache(folder, persistent, Path(scratch))


def _stem(features: Features) -> str:
    """A file name that says what is in it."""
    text = ".".join([*features.key, features.store.manifest.store_id[:8]])
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)


def _revision(store: Store) -> str:
    """What a store's numbers are known by: its identity, and when its slabs were committed."""
    return f"{store.manifest.store_id}:{store.revision}"


def _sweep(folder: Path) -> None:
    """Remove what killed processes left a day ago or earlier."""
    for path in folder.glob(f"*{PARTIAL}"):
        if _abandoned(path):
            path.unlink(missing_ok=True)


def _abandoned(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > ABANDONED_SECONDS
    except OSError:  # its process removed it meanwhile
        return False


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
