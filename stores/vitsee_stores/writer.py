"""Whole slabs in: creation at once, slabs written, synced and then committed, leftovers swept."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import creation, metadata
from vitsee_stores.chunks import boxes, checksum, encode, file_name, padded
from vitsee_stores.disk import (
    PARTIAL,
    each,
    partial_name,
    put_if_absent,
    remove_files,
    sync,
    sync_pool,
    work_pool,
    write_new,
    write_whole,
)
from vitsee_stores.errors import StoreError, reason
from vitsee_stores.layout import ArraySpec
from vitsee_stores.manifest import Manifest, Samples, check_identity, jsonable, samples_arrays
from vitsee_stores.owners import is_left, is_mine
from vitsee_stores.sealed import SealedChunks
from vitsee_stores.slab_checks import SlabChecks

# How often a slab is written anew that another process writes at the same time.
ATTEMPTS = 6


class StoreWriter:
    """Writes slabs into one store; any number of processes may hold one, each with its own slabs.

    manifest: what is on disk, which another process may have put there. durable: False leaves
    out every fsync, that of a new store's metadata included, for measurements and tests.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: Manifest, *, durable: bool = True):
        self.path = Path(path)
        self.manifest = manifest
        self.plan = manifest.plan
        self._sealed = SealedChunks(os.fspath(path), manifest)
        self.arrays = self._sealed.specs
        self.durable = durable

    @classmethod
    def join(cls, path: str | os.PathLike[str], *, durable: bool = True) -> StoreWriter | None:
        """The writer of an existing store; None where nothing is at `path`.

        Raises:
            StoreError: what is there is no store, or is damaged; it is left untouched.
        """
        if not os.path.lexists(path):
            return None
        manifest, _ = metadata.read_root(path)
        return cls(path, manifest, durable=durable)

    @classmethod
    def create_or_join(
        cls,
        path: str | os.PathLike[str],
        manifest: Manifest,
        samples: Samples,
        once: Mapping[str, NDArray[Any]] | None = None,
        *,
        durable: bool = True,
    ) -> StoreWriter:
        """The writer of a store at `path`, made now unless one is there.

        The empty store is built beside `path` and renamed into place, so of several processes
        that start together one makes it and the others join. `once`: the arrays below `weights/`.

        Raises:
            StoreError: `path` is something else, or cannot be written.
            IdentityMismatch: the store there was made with other choices than `manifest`.
        """
        writer = cls.join(path, durable=durable)
        if writer is None:
            temporary = creation.sibling(path, creation.CREATING)
            for leftover in filter(is_left, creation.siblings(Path(path))):
                shutil.rmtree(leftover, ignore_errors=True)
            try:
                sealed = creation.build(
                    temporary,
                    manifest,
                    {**samples_arrays(samples, manifest), **(once or {})},
                    durable=durable,
                )
                os.rename(temporary, path)
                if durable:
                    sync(Path(path).absolute().parent)
                return cls(path, sealed, durable=durable)
            except OSError as error:
                # Another process was first: its folder is in the way, or it has finished already
                # and swept this one.
                writer = cls.join(path, durable=durable)
                if writer is None:
                    raise StoreError(f"cannot make {path}: {reason(error)}") from None
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        fields = {"samples_fingerprint": manifest.samples_fingerprint, **manifest.identity}
        stored = writer.manifest
        check_identity(
            {"samples_fingerprint": stored.samples_fingerprint, **stored.identity}, fields
        )
        return writer

    @property
    def n_slabs(self) -> int:
        """Number of slabs of the whole store."""
        return self.plan.n_slabs

    @property
    def complete(self) -> bool:
        """Whether the store reads as whole, asked of the disk."""
        return metadata.read_root(self.path)[1] and bool(self.committed().all())

    def committed(self) -> NDArray[np.bool_]:
        """(slabs,) which slabs are committed, asked of the disk."""
        flags = np.zeros(self.n_slabs, np.bool_)
        flags[list(metadata.read_markers(self.path, self.manifest))] = True
        return flags

    def sweep(self, slabs: Sequence[int]) -> int:
        """Remove what killed processes left of these slabs' chunks; the number of files.

        What a living process on this machine, or any on another within the last hour, may still
        be writing stays.
        """
        return remove_files(filter(is_left, self._partials(slabs)))

    def write_slab(
        self, k: int, arrays: Mapping[str, NDArray[Any]], provenance: Mapping[str, Any]
    ) -> int:
        """Write, sync and commit slab `k`; the bytes written, 0 where it is committed already.

        Another process that writes the same slab does no harm: one of them commits it, and what
        is committed is whole, of one process or the other.

        Args:
            k: the slab.
            arrays: path -> its rows (images of the slab, ...) of a per-image array, or (...)
                of a per-slab array; all of the plan's, in the plan's types.
            provenance: kept with the marker as JSON.

        Raises:
            StoreError: an array is missing, unknown or misshapen; the disk is full or fails. The
                slab is not committed then.
        """
        jobs = self._jobs(k, arrays)
        commits = self.arrays["commits"]
        marker = self.path / "commits" / file_name((k, 0))
        for attempt in range(ATTEMPTS):
            if metadata.read_marker(self.path, k, commits, self.manifest) is not None:
                return 0
            try:
                remove_files([marker])  # damaged, or of another slab or store
                size, row = self._write_chunks(k, jobs)
                seal = {"store_id": self.manifest.store_id, "slab": k, "checksums": row}
                record = {"committed": _now(), **jsonable(dict(provenance))}
                data = metadata.encode_marker(seal, record, commits)
                put = put_if_absent(marker, data, durable=self.durable)
            except FileNotFoundError as error:
                # Another process has swept this one's files, or the store is gone.
                remove_files(self._mine(k))
                if not os.path.exists(self.path / metadata.ZARR_JSON):
                    raise StoreError(self._failure(k, error)) from None
                continue
            except OSError as error:
                remove_files(self._mine(k))
                raise StoreError(self._failure(k, error)) from None
            if self._settled(k, attempt):
                return size + len(data) if put else 0
            remove_files([marker])
        raise StoreError(
            f"slab {k} of {self.path} was written by another process at the same time, again and "
            "again: give each process slabs of its own with --shard"
        )

    def _settled(self, k: int, attempt: int) -> bool:
        """Whether the marker that is there seals the chunks that are there. Where two processes
        made other bytes of one slab, each may have overwritten some of the other's."""
        checks = SlabChecks(SealedChunks(os.fspath(self.path), self.manifest), deep=False)
        if checks.agree(k):
            return True
        time.sleep(random.uniform(0, 0.2 * 2**attempt))  # the other one may be about to
        return checks.agree(k)

    def finish(self) -> bool:
        """Set `complete` and sweep all leftovers if every slab is committed; whether it is so.

        Any process may call it any number of times.

        Raises:
            StoreError: the disk fails.
        """
        if not self.committed().all():
            return False
        try:
            if not metadata.read_root(self.path)[1]:
                text = metadata.root_text(self.manifest, complete=True)
                try:
                    self._put(self.path / metadata.ZARR_JSON, text)
                except FileNotFoundError:
                    # Another process finished first and swept this one's temporary file.
                    if not metadata.read_root(self.path)[1]:
                        raise
            remove_files(self._partials())
            for leftover in creation.siblings(self.path):
                shutil.rmtree(leftover, ignore_errors=True)
        except OSError as error:
            raise StoreError(f"cannot finish {self.path}: {reason(error)}") from None
        return True

    # ------------------------------------------------------------------------------------------

    def _jobs(
        self, k: int, given: Mapping[str, NDArray[Any]]
    ) -> list[tuple[ArraySpec, tuple[int, ...], NDArray[Any]]]:
        """Every chunk of the slab: spec, index, its part of the given array."""
        if not 0 <= k < self.n_slabs:
            raise StoreError(f"slab {k} of a store with {self.n_slabs} slabs")
        specs = {path: spec for path, spec in self.arrays.items() if spec.has_slab(k)}
        if missing := [path for path in specs if path not in given]:
            raise StoreError(f"slab {k} lacks {', '.join(missing)}")
        if unknown := [path for path in given if path not in specs]:
            raise StoreError(f"slab {k} has arrays that are not in the plan: {', '.join(unknown)}")
        rows = self.plan.rows(k)
        jobs = []
        for path, spec in specs.items():
            n = (rows.stop - rows.start,) if spec.per == "image" else ()
            array = np.asarray(given[path])
            if array.shape != (*n, *spec.shape[1:]) or array.dtype != np.dtype(spec.dtype):
                raise StoreError(
                    f"slab {k}: {path} is {array.dtype} {array.shape}, expected "
                    f"{spec.dtype} {(*n, *spec.shape[1:])}"
                )
            if spec.per == "slab":
                array = array[None]
            for index, box in boxes(spec, k):
                jobs.append((spec, index, array[(slice(None), *box[1:])]))
        return jobs

    def _write_chunks(
        self, k: int, jobs: Sequence[tuple[ArraySpec, tuple[int, ...], NDArray[Any]]]
    ) -> tuple[int, int]:
        """Write all chunks and the row of their checksums under their names, and to the disk; the
        bytes, and the row's own checksum."""
        settling: list[Future[None]] = []
        lock = threading.Lock()

        def write(job: tuple[ArraySpec, tuple[int, ...], NDArray[Any]]) -> tuple[int, int]:
            spec, index, values = job
            final = os.path.join(self.path, spec.path, file_name(index))
            temporary = partial_name(final)
            pieces = encode(padded(values, spec), spec)
            written = write_new(temporary, pieces), checksum(bytes(pieces[-1]))
            if not self.durable:
                os.replace(temporary, final)
                return written
            future = sync_pool().submit(_settle, temporary, final)
            with lock:
                settling.append(future)
            return written

        try:
            written = each(work_pool, write, jobs)
            sealed = self.arrays["checksums"]
            row = np.zeros(sealed.chunks, sealed.dtype)
            for (spec, index, _), (_, found) in zip(jobs, written, strict=True):
                row[0, self._sealed.place(spec, index)] = found
            row_size, row_sum = write((sealed, (k, 0), row))
        finally:
            wait(settling)
        for future in settling:
            future.result()
        if self.durable:
            paths = {sealed.path, *(spec.path for spec, _, _ in jobs)}
            each(sync_pool, sync, [os.path.join(self.path, path) for path in sorted(paths)])
        return sum(size for size, _ in written) + row_size, row_sum

    def _put(self, path: Path, data: bytes) -> None:
        write_whole(path, data, durable=self.durable)

    def _partials(self, slabs: Sequence[int] | None = None) -> list[str]:
        """Temporary files below the store; only these slabs' where given."""
        wanted = None if slabs is None else set(map(str, slabs))
        return [
            os.path.join(folder, name)
            for folder in (self.path, *(self.path / path for path in self.arrays))
            for name in metadata.list_names(folder)
            if name.endswith(PARTIAL) and (wanted is None or name.split(".")[1] in wanted)
        ]

    def _mine(self, k: int) -> list[str]:
        """This process's temporary files of a slab."""
        return [path for path in self._partials([k]) if is_mine(path)]

    def _failure(self, k: int, error: OSError) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"the disk of {self.path} is full ({reason(error)}): slab {k} is not written; free "
                "space and repeat the command, committed slabs are kept"
            )
        if not os.path.exists(self.path / metadata.ZARR_JSON):
            return f"{self.path} was removed while slab {k} was written"
        return (
            f"cannot write slab {k} of {self.path}: {reason(error)}; repeat the command, committed "
            "slabs are kept"
        )


def _settle(temporary: str, final: str) -> None:
    sync(temporary)
    os.replace(temporary, final)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
