"""Writing a store slab by slab.

A store is created atomically. A slab's chunks are written and synced first, then its commit
marker: readers see a slab with all its chunks, or not at all. What killed processes left is
removed at the end.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import creation, metadata
from vitsee_stores.chunks import boxes, checksum, chunk_name, encode, padded
from vitsee_stores.disk import is_from_this_process, is_leftover
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


class _ChunkJob(NamedTuple):
    """One chunk to write."""

    spec: ArraySpec
    chunk: tuple[int, ...]  # its index among the array's chunks
    values: NDArray[Any]  # without the padding of the last chunks


class StoreWriter:
    """Writes slabs into one store.

    Any number of processes may have a writer for the same store, each for slabs of its own.

    Attributes:
        files: the store's files.
        place: folder or URL of the store.
        manifest: the manifest on disk, which another process may have written.
        arrays: path -> spec of every array of the plan.
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
        """Return a writer for an existing store, or None if nothing is at `path`.

        Args:
            path: folder, URL or files of the store.
            durable: whether to fsync what is written, metadata of a new store too. False is
                for measurements and tests.

        Raises:
            StoreError: `path` is not a store, or a damaged one; it is left untouched.
        """
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
        """Return a writer for the store at `path`, which is created if it is absent.

        Creation is atomic: of several processes that start together one creates the store and
        the others join it.

        Args:
            path: folder, URL or files of the store.
            manifest: manifest of a new store. The identity of an existing one must equal its
                identity.
            samples: the images in the store's order.
            once: path -> array of the write-once arrays below `weights/`.
            durable: as for `join`.

        Raises:
            StoreError: `path` is something else than a store, or cannot be written.
            IdentityMismatch: the existing store was made with other settings than `manifest`.
        """
        writer = cls.join(path, durable=durable)
        if writer is None:
            files = path if isinstance(path, Files) else files_at(path, durable=durable)
            files.sweep_beside(is_leftover)
            empty_store, sealed_manifest = _empty_store(manifest, samples, once)
            try:
                files.create(empty_store)
                return cls(files, sealed_manifest)
            except OSError as error:
                # Another process was first: its store is in the way, or it has finished
                # already and swept what this one was making.
                writer = cls.join(path, durable=durable)
                if writer is None:
                    raise StoreError(f"cannot make {path}: {reason(error)}") from None
        check_identity(
            stored=_compared_fields(writer.manifest),
            requested=_compared_fields(manifest),
        )
        writer.finish_creation(samples, once)
        return writer

    @property
    def is_created(self) -> bool:
        """Whether all files of the empty store exist. Raises StoreError: it cannot be read."""
        try:
            return self.files.is_created()
        except OSError as error:
            raise StoreError(f"{self.place} cannot be read: {reason(error)}") from None

    def finish_creation(
        self, samples: Samples, once: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        """Write what a process that was killed during creation left out.

        In a folder, where creation is atomic, there is nothing to do.

        Args:
            samples: the images in the store's order.
            once: path -> array of the write-once arrays below `weights/`.

        Raises:
            StoreError: these are not the arrays that the store was begun with, or they cannot
                be written.
        """
        if self.is_created:
            return
        try:
            empty_store, sealed_manifest = _empty_store(self.manifest, samples, once)
            if sealed_manifest.checksums != self.manifest.checksums:
                raise StoreError(
                    f"{self.place} was left half made, from other images or weights "
                    "(start anew with --force)"
                )
            self.files.fill(empty_store)
        except OSError as error:
            raise StoreError(f"cannot make {self.place}: {reason(error)}") from None

    @property
    def n_slabs(self) -> int:
        """Number of slabs of the plan, committed or not."""
        return self.plan.n_slabs

    @property
    def complete(self) -> bool:
        """Whether the store is complete, which is read from disk."""
        _, says_complete = metadata.read_root(self.files)
        return says_complete and bool(self.committed().all())

    def committed(self) -> NDArray[np.bool_]:
        """Return which slabs are committed, (slabs,), which is read from disk."""
        flags = np.zeros(self.n_slabs, np.bool_)
        flags[list(metadata.read_markers(self.files, self.manifest))] = True
        return flags

    def sweep(self, slabs: Sequence[int]) -> int:
        """Remove what killed processes left of these slabs' chunks.

        Files that may still be written stay: those of a living process on this machine, and
        those that another machine wrote within the last hour.

        Returns:
            The number of removed files.
        """
        return self._sweep(is_leftover, slabs)

    def write_slab(
        self, k: int, arrays: Mapping[str, NDArray[Any]], provenance: Mapping[str, Any]
    ) -> int:
        """Write, sync and commit slab `k`.

        Another process that writes the same slab does no harm: one of them commits it, and
        the committed slab is entirely from one process.

        Args:
            k: index of the slab.
            arrays: path -> values of every array of the plan, in its dtype: (images of the
                slab, ...) of an array with a row for each image, (...) of an array with a row
                for each slab.
            provenance: record of the writer, stored as JSON in the commit marker.

        Returns:
            The number of bytes written; 0 if the slab is committed already.

        Raises:
            StoreError: an array is missing, unknown or misshapen; or the disk is full or
                fails. The slab is not committed then.
        """
        jobs = self._chunk_jobs(k, arrays)
        commits = self.arrays["commits"]
        marker_name = chunk_name(commits, (k, 0))
        for attempt in range(ATTEMPTS):
            if metadata.read_marker(self.files, k, commits, self.manifest) is not None:
                return 0
            try:
                # An existing marker is damaged, or that of another slab or store. It goes
                # before any chunk is replaced.
                self.files.remove([marker_name])
                size, row_checksum = self._write_chunks(k, jobs)
                # Chunks are on disk from here on: only now may a marker name them.
                seal = {
                    "store_id": self.manifest.store_id,
                    "slab": k,
                    "checksums": row_checksum,
                }
                now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                record = {"committed": now, **jsonable(dict(provenance))}
                marker = metadata.encode_marker(seal, record, commits)
                is_first = self.files.put_if_absent(marker_name, marker)
            except FileNotFoundError as error:
                # Another process has swept this one's files, or the store is gone.
                self._sweep(is_from_this_process, [k])
                if not self._store_exists():
                    raise StoreError(self._failure(k, error)) from None
                continue
            except OSError as error:
                self._sweep(is_from_this_process, [k])
                raise StoreError(self._failure(k, error)) from None
            if self._marker_seals_chunks(k, attempt):
                if is_first:
                    return size + len(marker)
                return 0
            try:
                self.files.remove([marker_name])
            except OSError as error:
                raise StoreError(self._failure(k, error)) from None
        raise StoreError(
            f"slab {k} of {self.place} was written by another process at the same time, "
            "again and again: give each process slabs of its own with --shard"
        )

    def _marker_seals_chunks(self, k: int, attempt: int) -> bool:
        """Return whether the slab's marker on disk seals the chunks on disk.

        If two processes wrote different bytes for one slab, each may have overwritten some
        chunks of the other.
        """
        checks = SlabChecks(VerifiedChunks(self.files, self.manifest), deep=False)
        if checks.agree(k):
            return True
        # The other process may be about to commit. A random wait, doubled at each attempt,
        # parts two processes that would go on in step.
        time.sleep(random.uniform(0, 0.2 * 2**attempt))
        return checks.agree(k)

    def finish(self) -> bool:
        """Mark the store as complete and remove all leftovers, if every slab is committed.

        Any process may call this any number of times.

        Returns:
            Whether every slab is committed.

        Raises:
            StoreError: the disk fails.
        """
        if not self.committed().all():
            return False
        try:
            _, says_complete = metadata.read_root(self.files)
            if not says_complete:
                text = metadata.root_text(self.manifest, complete=True)
                try:
                    self.files.put(metadata.ZARR_JSON, text)
                except FileNotFoundError:
                    # Another process finished first and swept this one's temporary file.
                    _, says_complete = metadata.read_root(self.files)
                    if not says_complete:
                        raise
            self._sweep(lambda path: True)
            self.files.sweep_beside()
            remove_claims(self.files)
        except OSError as error:
            raise StoreError(f"cannot finish {self.place}: {reason(error)}") from None
        return True

    # ------------------------------------------------------------------------------------------

    def _chunk_jobs(self, k: int, arrays: Mapping[str, NDArray[Any]]) -> list[_ChunkJob]:
        """Cut the arrays of slab `k` into its chunks.

        Raises:
            StoreError: an array is missing, unknown or misshapen.
        """
        if not 0 <= k < self.n_slabs:
            raise StoreError(f"slab {k} of a store with {self.n_slabs} slabs")
        specs = {path: spec for path, spec in self.arrays.items() if spec.has_slab(k)}
        if missing := [path for path in specs if path not in arrays]:
            raise StoreError(f"slab {k} lacks {', '.join(missing)}")
        if unknown := [path for path in arrays if path not in specs]:
            raise StoreError(
                f"slab {k} has arrays that are not in the plan: {', '.join(unknown)}"
            )
        rows = self.plan.rows(k)
        jobs = []
        for path, spec in specs.items():
            shape = spec.shape[1:]
            if spec.per == "image":
                shape = (rows.stop - rows.start, *shape)
            array = np.asarray(arrays[path])
            if array.shape != shape or array.dtype != np.dtype(spec.dtype):
                raise StoreError(
                    f"slab {k}: {path} is {array.dtype} {array.shape}, expected "
                    f"{spec.dtype} {shape}"
                )
            if spec.per == "slab":
                array = array[None]  # (1, ...): the slab's row of the array on disk
            for index, box in boxes(spec, k):
                # The array has this slab's rows only, so the box is cut after axis 0.
                values = array[(slice(None), *box[1:])]
                jobs.append(_ChunkJob(spec, index, values))
        return jobs

    def _write_chunks(self, k: int, jobs: Sequence[_ChunkJob]) -> tuple[int, int]:
        """Write and sync the chunks of slab `k` and the row of their checksums.

        Returns:
            The number of bytes, and the checksum of that row.
        """
        with self.files.writing() as put:

            def write(job: _ChunkJob) -> tuple[int, int]:
                """Write one chunk; return its number of bytes and its checksum."""
                pieces = encode(padded(job.values, job.spec), job.spec)
                size = put(chunk_name(job.spec, job.chunk), pieces)
                return size, checksum(bytes(pieces[-1]))

            written = self.files.each_in_threads(write, jobs)
            checksums = self.arrays["checksums"]
            row = np.zeros(checksums.chunks, checksums.dtype)  # (1, chunks of a slab)
            for job, (_, crc) in zip(jobs, written, strict=True):
                row[0, self._sealed.row_offset(job.spec, job.chunk)] = crc
            row_size, row_checksum = write(_ChunkJob(checksums, (k, 0), row))
        # All chunks are synced when the context exits, before the caller commits.
        return sum(size for size, _ in written) + row_size, row_checksum

    def _sweep(
        self, chosen: Callable[[str], bool], slabs: Sequence[int] | None = None
    ) -> int:
        """Remove temporary files whose path `chosen` accepts; return how many.

        Args:
            slabs: slabs whose files may be removed; None for all.
        """
        slab_texts = None if slabs is None else set(map(str, slabs))

        def is_swept(path: str) -> bool:
            """Return whether a temporary file may be removed."""
            # A chunk's temporary name begins with that of the chunk, `c.SLAB.`
            if slab_texts is not None:
                slab_text = os.path.basename(path).split(".")[1]
                if slab_text not in slab_texts:
                    return False
            return chosen(path)

        return self.files.sweep(("", *self.arrays), is_swept)

    def _store_exists(self) -> bool:
        """Return whether the store is still there; True if that cannot be told."""
        try:
            return self.files.exists(metadata.ZARR_JSON)
        except OSError:  # the original error says more
            return True

    def _failure(self, k: int, error: OSError) -> str:
        """Describe why slab `k` could not be written, and what to do."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"the disk of {self.place} is full ({reason(error)}): slab {k} is not "
                "written; free space and repeat the command, committed slabs are kept"
            )
        if not self._store_exists():
            return f"{self.place} was removed while slab {k} was written"
        return (
            f"cannot write slab {k} of {self.place}: {reason(error)}; repeat the "
            "command, committed slabs are kept"
        )


def tidy(files: Files) -> None:
    """Remove what processes that were killed at their end left in a complete store.

    Raises:
        StoreError: the store is damaged, or the disk fails.
    """
    for generation in read_generations(files):
        if generation.complete:
            StoreWriter(generation.files, generation.manifest).finish()


def _compared_fields(manifest: Manifest) -> dict[str, Any]:
    """Return the fields in which a store and a process that joins it must agree."""
    return {"samples_fingerprint": manifest.samples_fingerprint, **manifest.identity}


def _empty_store(
    manifest: Manifest, samples: Samples, once: Mapping[str, NDArray[Any]] | None
) -> tuple[list[tuple[str, Pieces]], Manifest]:
    """Return the files of a store without slabs, and its manifest with checksums.

    Args:
        once: path -> array of the write-once arrays below `weights/`.
    """
    arrays = samples_arrays(samples, manifest.plan.id_bytes, manifest.splits)
    return creation.contents(manifest, {**arrays, **(once or {})})
