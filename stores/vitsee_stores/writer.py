"""Writing whole slabs: atomic creation, slabs written, synced and then committed, leftovers
removed."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import creation, metadata
from vitsee_stores.chunks import boxes, checksum, chunk_name, encode, padded
from vitsee_stores.disk import is_left, is_mine
from vitsee_stores.errors import StoreError, reason
from vitsee_stores.files import Files, Pieces
from vitsee_stores.folder import files_at
from vitsee_stores.generations import read_generations
from vitsee_stores.layout import ArraySpec
from vitsee_stores.leases import remove_claims
from vitsee_stores.manifest import Manifest, check_identity, jsonable
from vitsee_stores.samples import Samples, samples_arrays
from vitsee_stores.sealed import SlabChecks, VerifiedChunks
from vitsee_stores.url import Url

# Attempts to write a slab that another process writes at the same time.
ATTEMPTS = 6


class StoreWriter:
    """Writes slabs into one store; any number of processes may hold one, each with its own slabs.

    Attributes:
        manifest: as on disk, where another process may have written it.
        durable: False skips every fsync, including those of a new store's metadata, for
            measurements and tests.
    """

    def __init__(self, files: Files, manifest: Manifest):
        self.files = files
        self.place = files.place
        self.manifest = manifest
        self.plan = manifest.plan
        self._sealed = VerifiedChunks(files, manifest)
        self.arrays = self._sealed.specs

    @classmethod
    def join(
        cls, path: str | os.PathLike[str] | Url | Files, *, durable: bool = True
    ) -> StoreWriter | None:
        """A writer for an existing store; None if nothing is at `path`. Raises StoreError: not a
        store, or damaged; it is left untouched."""
        files = path if isinstance(path, Files) else files_at(path, durable=durable)
        try:
            if not files.exists():
                return None
        except OSError as error:
            raise StoreError(f"{files} cannot be read: {reason(error)}") from None
        return cls(files, metadata.read_root(files)[0])

    @classmethod
    def create_or_join(
        cls,
        path: str | os.PathLike[str] | Url | Files,
        manifest: Manifest,
        samples: Samples,
        once: Mapping[str, NDArray[Any]] | None = None,
        *,
        durable: bool = True,
    ) -> StoreWriter:
        """A writer for the store at `path`, which is created if absent.

        Creation is atomic: of several processes that start together one creates the store and the
        others join. `once`: the arrays below `weights/`. Raises StoreError: `path` is something
        else, or cannot be written; IdentityMismatch: the existing store was made with other
        settings than `manifest`.
        """
        writer = cls.join(path, durable=durable)
        if writer is None:
            files = path if isinstance(path, Files) else files_at(path, durable=durable)
            files.sweep_beside(is_left)
            made, sealed = _empty(manifest, samples, once)
            try:
                files.create(made)
                return cls(files, sealed)
            except OSError as error:
                # Another process was first: its store is in the way, or it has finished already
                # and swept what this one was making.
                writer = cls.join(path, durable=durable)
                if writer is None:
                    raise StoreError(f"cannot make {path}: {reason(error)}") from None
        fields = {
            "samples_fingerprint": manifest.samples_fingerprint,
            **manifest.identity,
        }
        stored = writer.manifest
        check_identity(
            {"samples_fingerprint": stored.samples_fingerprint, **stored.identity}, fields
        )
        writer.finish_creation(samples, once)
        return writer

    @property
    def is_made(self) -> bool:
        """Whether the empty store is all there. Raises StoreError: it cannot be read."""
        try:
            return self.files.is_made()
        except OSError as error:
            raise StoreError(f"{self.place} cannot be read: {reason(error)}") from None

    def finish_creation(
        self, samples: Samples, once: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        """Write what a process that was killed during creation left out; nothing to do where
        creation is atomic. Arguments as for `create_or_join`. Raises StoreError: not the arrays
        that the store was begun with, or it cannot be written."""
        if self.is_made:
            return
        try:
            files, sealed = _empty(self.manifest, samples, once)
            if sealed.checksums != self.manifest.checksums:
                raise StoreError(
                    f"{self.place} was left half made, from other images or weights (start anew "
                    "with --force)"
                )
            self.files.fill(files)
        except OSError as error:
            raise StoreError(f"cannot make {self.place}: {reason(error)}") from None

    @property
    def n_slabs(self) -> int:
        """Number of slabs of the whole store."""
        return self.plan.n_slabs

    @property
    def complete(self) -> bool:
        """Whether the store is complete, read from disk."""
        return metadata.read_root(self.files)[1] and bool(self.committed().all())

    def committed(self) -> NDArray[np.bool_]:
        """(slabs,) which slabs are committed, read from disk."""
        flags = np.zeros(self.n_slabs, np.bool_)
        flags[list(metadata.read_markers(self.files, self.manifest))] = True
        return flags

    def sweep(self, slabs: Sequence[int]) -> int:
        """Remove what killed processes left of these slabs' chunks; returns the number of files.

        Files that may still be written, by a living process on this machine or within the last hour
        on another, stay.
        """
        return self._sweep(is_left, slabs)

    def write_slab(
        self, k: int, arrays: Mapping[str, NDArray[Any]], provenance: Mapping[str, Any]
    ) -> int:
        """Write, sync and commit slab `k`; returns the bytes written, 0 if it is committed already.

        Another process writing the same slab does no harm: one of them commits it, and the
        committed slab is entirely from one process.

        Args:
            k: the slab.
            arrays: path -> rows (images of the slab, ...) of a per-image array, or (...) of a
                per-slab array; all arrays of the plan, in its types.
            provenance: stored with the marker as JSON.

        Raises:
            StoreError: an array is missing, unknown or misshapen; the disk is full or fails. The
                slab is then not committed.
        """
        jobs = self._jobs(k, arrays)
        commits = self.arrays["commits"]
        marker = chunk_name(commits, (k, 0))
        for attempt in range(ATTEMPTS):
            if metadata.read_marker(self.files, k, commits, self.manifest) is not None:
                return 0
            try:
                self.files.remove([marker])  # damaged, or of another slab or store
                size, row = self._write_chunks(k, jobs)
                seal = {"store_id": self.manifest.store_id, "slab": k, "checksums": row}
                now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                record = {"committed": now, **jsonable(dict(provenance))}
                data = metadata.encode_marker(seal, record, commits)
                put = self.files.put_if_absent(marker, data)
            except FileNotFoundError as error:
                # Another process has swept this one's files, or the store is gone.
                self._sweep(is_mine, [k])
                if not self._is_there():
                    raise StoreError(self._failure(k, error)) from None
                continue
            except OSError as error:
                self._sweep(is_mine, [k])
                raise StoreError(self._failure(k, error)) from None
            if self._settled(k, attempt):
                return size + len(data) if put else 0
            try:
                self.files.remove([marker])
            except OSError as error:
                raise StoreError(self._failure(k, error)) from None
        raise StoreError(
            f"slab {k} of {self.place} was written by another process at the same time, again and "
            "again: give each process slabs of its own with --shard"
        )

    def _settled(self, k: int, attempt: int) -> bool:
        """Whether the existing marker seals the existing chunks. If two processes wrote different
        bytes for one slab, each may have overwritten some of the other's."""
        checks = SlabChecks(VerifiedChunks(self.files, self.manifest), deep=False)
        if checks.agree(k):
            return True
        time.sleep(
            random.uniform(0, 0.2 * 2**attempt)
        )  # the other process may be about to commit
        return checks.agree(k)

    def finish(self) -> bool:
        """If every slab is committed, set `complete` and remove all leftovers; returns whether they
        are.

        Any process may call it any number of times. Raises StoreError: the disk fails.
        """
        if not self.committed().all():
            return False
        try:
            if not metadata.read_root(self.files)[1]:
                text = metadata.root_text(self.manifest, complete=True)
                try:
                    self.files.put(metadata.ZARR_JSON, text)
                except FileNotFoundError:
                    # Another process finished first and swept this one's temporary file.
                    if not metadata.read_root(self.files)[1]:
                        raise
            self._sweep(lambda path: True)
            self.files.sweep_beside()
            remove_claims(self.files)
        except OSError as error:
            raise StoreError(f"cannot finish {self.place}: {reason(error)}") from None
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
            raise StoreError(
                f"slab {k} has arrays that are not in the plan: {', '.join(unknown)}"
            )
        rows = self.plan.rows(k)
        jobs = []
        for path, spec in specs.items():
            n = (rows.stop - rows.start,) if spec.per == "image" else ()
            array = np.asarray(given[path])
            if array.shape != (*n, *spec.shape[1:]) or array.dtype != np.dtype(
                spec.dtype
            ):
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
        """Write and sync all chunks and the row of their checksums; returns the bytes and the row's
        own checksum."""
        with self.files.writing() as put:

            def write(
                job: tuple[ArraySpec, tuple[int, ...], NDArray[Any]],
            ) -> tuple[int, int]:
                spec, index, values = job
                pieces = encode(padded(values, spec), spec)
                return put(chunk_name(spec, index), pieces), checksum(bytes(pieces[-1]))

            written = self.files.each(write, jobs)
            sealed = self.arrays["checksums"]
            row = np.zeros(sealed.chunks, sealed.dtype)
            for (spec, index, _), (_, crc) in zip(jobs, written, strict=True):
                row[0, self._sealed.place(spec, index)] = crc
            row_size, row_sum = write((sealed, (k, 0), row))
        return sum(size for size, _ in written) + row_size, row_sum

    def _sweep(
        self, chosen: Callable[[str], bool], slabs: Sequence[int] | None = None
    ) -> int:
        """Remove temporary files, only of these slabs if given; returns how many."""
        wanted = None if slabs is None else set(map(str, slabs))

        def swept(path: str) -> bool:
            return (
                wanted is None or os.path.basename(path).split(".")[1] in wanted
            ) and chosen(path)

        return self.files.sweep(("", *self.arrays), swept)

    def _is_there(self) -> bool:
        try:
            return self.files.exists(metadata.ZARR_JSON)
        except OSError:  # the original error says more
            return True

    def _failure(self, k: int, error: OSError) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"the disk of {self.place} is full ({reason(error)}): slab {k} is not written; "
                "free space and repeat the command, committed slabs are kept"
            )
        if not self._is_there():
            return f"{self.place} was removed while slab {k} was written"
        return (
            f"cannot write slab {k} of {self.place}: {reason(error)}; repeat the command, "
            "committed slabs are kept"
        )


def tidy(files: Files) -> None:
    """Remove what processes that were killed at their end left of a store and its generations.
    Raises StoreError: damaged, or the disk fails."""
    for one in read_generations(files):
        if one.complete:
            StoreWriter(one.files, one.manifest).finish()


def _empty(
    manifest: Manifest, samples: Samples, once: Mapping[str, NDArray[Any]] | None
) -> tuple[list[tuple[str, Pieces]], Manifest]:
    own = samples_arrays(samples, manifest.plan.id_bytes, manifest.splits)
    return creation.contents(manifest, {**own, **(once or {})})
