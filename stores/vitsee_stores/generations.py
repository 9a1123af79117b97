"""Generations: a complete store and what was added to it since, read as one store.

A generation is a store of its own below the first one, `generations/2`, with its own manifest,
chunks and commit markers: new sites of all images, or all arrays of further slabs. Nothing that
was there before is touched, and readers see a generation once its own manifest says that it is
complete, so that a growing store is written, resumed and checked as every store is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import metadata
from vitsee_stores.errors import NoStore, StoreError
from vitsee_stores.files import Files
from vitsee_stores.layout import ArraySpec, arrays
from vitsee_stores.manifest import Manifest
from vitsee_stores.plan import StorePlan
from vitsee_stores.sealed import VerifiedChunks

FOLDER = "generations"
# Arrays that seal the other arrays of one generation; the combined store has none.
SEALS = ("checksums", "commits")


@dataclass(frozen=True)
class Generation:
    """One generation of a store.

    Attributes:
        files: the generation's files.
        manifest: the generation's manifest.
        published: whether that manifest says that the generation is complete.
        combined: the manifest of the store made of all generations up to this one.
    """

    files: Files
    manifest: Manifest
    published: bool
    combined: Manifest

    @property
    def number(self) -> int:
        """The generation's number; 1 for the store as it was made."""
        growth = self.manifest.growth
        if growth is None:
            return 1
        return growth.number

    @property
    def first_slab(self) -> int:
        """Index within the combined store of this generation's slab 0."""
        growth = self.manifest.growth
        if growth is None:
            return 0
        return growth.first_slab

    @cached_property
    def markers(self) -> dict[int, dict[str, Any]]:
        """Commit markers of the committed slabs, by slab index within the generation."""
        return metadata.read_markers(self.files, self.manifest)

    @cached_property
    def complete(self) -> bool:
        """Whether it is published and the marker files of all slabs exist."""
        if not self.published:
            return False
        n_slabs = self.manifest.plan.n_slabs
        names = metadata.list_names(self.files, "commits")
        return len(metadata.numbers(names, n_slabs)) == n_slabs

    @property
    def committed(self) -> NDArray[np.bool_]:
        """(slabs,) which of its slabs can be read.

        For a complete generation the names of the marker files decide, which costs one
        listing in place of reading every marker.
        """
        if self.complete:
            return np.ones(self.manifest.plan.n_slabs, np.bool_)
        return self.marked

    @property
    def marked(self) -> NDArray[np.bool_]:
        """(slabs,) which of its slabs have a sound marker; reads all markers."""
        flags = np.zeros(self.manifest.plan.n_slabs, np.bool_)
        flags[list(self.markers)] = True
        return flags


def files_of(files: Files, number: int) -> Files:
    """Return the files of a store's generation with this number."""
    if number == 1:
        return files
    return files.inside(f"{FOLDER}/{number}")


def numbers(files: Files) -> list[int]:
    """Return the numbers of the generations that were begun after the first, in order.

    Raises:
        StoreError: the store cannot be listed.
    """
    names = metadata.list_names(files, FOLDER)
    return sorted(
        int(name) for name in names if re.fullmatch(r"[2-9]|[1-9]\d{1,5}", name)
    )


def read_generations(files: Files) -> list[Generation]:
    """Read the manifests of all generations of a store, in order.

    The last one may be unpublished: a generation that is being added, which readers do not
    see. A store that is unfinished itself has one generation.

    Raises:
        StoreError: the store is missing, not a store, of another format version, or damaged;
            or a generation that others are built on is missing or unfinished, or does not
            fit them.
    """
    manifest, published = metadata.read_root(files)
    generations = [Generation(files, manifest, published, combined=manifest)]
    if not published:
        return generations
    for number in numbers(files):
        last = generations[-1]
        if number != last.number + 1:
            raise _missing_base(files, last.number + 1, "is missing", number)
        if not last.published:
            raise _missing_base(files, last.number, "is unfinished", number)
        added_files = files_of(files, number)
        try:
            manifest, published = metadata.read_root(added_files)
        except NoStore:  # it was removed since the folder was listed
            break
        store_ids = [generation.manifest.store_id for generation in generations]
        try:
            combined = grown(store_ids, last.combined, manifest)
        except ValueError as error:
            raise StoreError(
                f"{added_files} is no generation of {files}: {error}"
            ) from None
        generations.append(Generation(added_files, manifest, published, combined))
    return generations


def _missing_base(files: Files, base: int, problem: str, number: int) -> StoreError:
    """Return the error for generation `number`, which is built on the unusable one `base`."""
    return StoreError(
        f"{files} is damaged: generation {base} {problem}, and generation {number} is "
        f"built on it (put {FOLDER}/{base} back; or remove {FOLDER}/{number} and add "
        "that again)"
    )


# ---------------- the manifest of the combined store


def grown(store_ids: Sequence[str], combined: Manifest, added: Manifest) -> Manifest:
    """Return the manifest of a store with one more generation.

    Args:
        store_ids: store_id of each earlier generation, in order.
        combined: manifest of the store made of the earlier generations.
        added: manifest of the new generation.

    Raises:
        ValueError: the generation does not fit the store.
    """
    growth = added.growth
    old = combined.plan
    new = added.plan
    if growth is None or list(growth.after) != list(store_ids):
        raise ValueError("it was not added to these generations")
    # Split codes are indices: the earlier names must keep theirs.
    same_splits = added.splits[: len(combined.splits)] == combined.splits
    if not same_splits or new.boxes != old.boxes:
        raise ValueError("its images are described otherwise")
    # Sites: one that both have is the same one, for further images.
    sites = {site.name: site for site in old.sites}
    sites |= {site.name: site for site in new.sites}
    for old_site in old.sites:
        site = sites[old_site.name]
        same_tokens = (
            site.kind == old_site.kind
            and site.shape == old_site.shape
            and site.layout == old_site.layout
        )
        if not same_tokens:
            raise ValueError(f"its site {old_site.name} has other tokens")
    if sorted(growth.sites) != sorted(sites):
        raise ValueError("growth.sites does not name the sites of both")
    # Images: the new ones come behind those of before, in slabs of the same size.
    n_images = growth.first_slab * old.slab + new.n_images
    adds_images = n_images > old.n_images
    if adds_images:
        # An unfilled last slab is written again, with the further images.
        if growth.first_slab != old.n_images // old.slab:
            raise ValueError(f"its first slab is {growth.first_slab}")
    else:
        if growth.first_slab or n_images < old.n_images:
            raise ValueError(
                f"it has {new.n_images} images from slab {growth.first_slab} on"
            )
        common = {site.name for site in old.sites} & {site.name for site in new.sites}
        if common:
            raise ValueError(f"both have the site {min(common)}")
    # Receptive fields are listed in the order of the sites, as in a store that was made at once.
    erf = old.erf
    if erf is not None and new.erf is not None:
        erf_sites = {*erf.sites, *new.erf.sites}
        erf = dataclasses.replace(
            erf, sites=tuple(name for name in growth.sites if name in erf_sites)
        )
    plan = dataclasses.replace(
        old,
        n_images=n_images,
        sites=tuple(sites[name] for name in growth.sites),
        erf=erf,
        # Shorter ids end in NULs, so that the longest decides.
        id_bytes=max(old.id_bytes, new.id_bytes),
    )
    _check_generation_arrays(arrays(plan), arrays(new), require_all=adds_images)
    identity = _identity_with_sites(combined.identity, added.identity, plan)
    identity["n_images"] = n_images
    identity["samples_fingerprint"] = growth.samples_fingerprint
    return dataclasses.replace(
        combined,
        plan=plan,
        samples_fingerprint=growth.samples_fingerprint,
        identity=identity,
        splits=added.splits,
    )


def _check_generation_arrays(
    combined: Mapping[str, ArraySpec], added: Mapping[str, ArraySpec], require_all: bool
) -> None:
    """Check that a generation's arrays have the chunks of the combined store's.

    Args:
        combined: path -> array of the combined store.
        added: path -> array of the generation.
        require_all: whether the generation must have every array, as one of further images
            does, but for receptive fields, which are those of the first images.

    Raises:
        ValueError: names the first array that does not fit or is missing.
    """
    for path, spec in added.items():
        if path in SEALS or spec.per == "once":
            continue
        expected = combined.get(path)
        if expected is None or _chunking(spec) != _chunking(expected):
            raise ValueError(f"its array {path} does not fit")
    if not require_all:
        return
    for path, spec in combined.items():
        is_needed = spec.per in ("image", "slab") and not path.startswith("erf/")
        if is_needed and path not in added:
            raise ValueError(f"it has no array {path}")


def _chunking(spec: ArraySpec) -> tuple[Any, ...]:
    """Return what the arrays of two generations must have in common to be read as one."""
    return spec.chunks, spec.shape[1:], spec.dtype, spec.codec


def _identity_with_sites(
    old: Mapping[str, Any], added: Mapping[str, Any], plan: StorePlan
) -> dict[str, Any]:
    """Return the identity of a store as if all its sites had been chosen at once.

    Args:
        old: identity of the earlier generations.
        added: identity of the generation that adds sites.
        plan: plan of the combined store.
    """
    identity = {**old, "sites": [site.name for site in plan.stored]}
    for key in ("tokens", "dtype"):
        old_choices = old.get(key)
        added_choices = added.get(key)
        if isinstance(old_choices, dict) and isinstance(added_choices, dict):
            # A choice that equals the only default is not listed by site.
            default = old_choices.get("default") if len(old_choices) == 1 else None
            identity[key] = dict(old_choices)
            for site, choice in added_choices.items():
                if choice != default:
                    identity[key][site] = choice
    return identity


def committed(
    generations: Sequence[Generation], *, marked: bool = False
) -> NDArray[np.bool_]:
    """Return which slabs of the combined store can be read in all their arrays.

    Args:
        generations: generations of the store, in order.
        marked: whether the contents of the markers decide, which reads all of them, and not
            their names alone.

    Returns:
        (slabs,) boolean.
    """
    flags = np.ones(generations[-1].combined.plan.n_slabs, np.bool_)
    n_images = 0
    for generation in generations:
        added = generation.marked if marked else generation.committed
        slabs = slice(generation.first_slab, generation.first_slab + len(added))
        adds_images = generation.combined.plan.n_images > n_images
        if adds_images:
            # Further images replace the short last slab of those before.
            flags[slabs] = added
        else:
            flags[slabs] &= added
        n_images = generation.combined.plan.n_images
    return flags


# ---------------- reading the combined store


class GrownChunks(VerifiedChunks):
    """The chunks of a store with several generations, indexed as in a store made at once.

    The arrays that seal others (`SEALS`) are left out.
    """

    def __init__(self, generations: Sequence[Generation]):
        super().__init__(generations[0].files, generations[-1].combined)
        self.specs = {
            path: spec for path, spec in self.specs.items() if path not in SEALS
        }
        self.generations = tuple(generations)
        # the chunks of each generation, in the same order
        self._chunks = [
            VerifiedChunks(generation.files, generation.manifest)
            for generation in generations
        ]

    def read(self, spec: ArraySpec, index: Sequence[int]) -> NDArray[Any]:
        """Return one chunk of the combined store, padding included."""
        if spec.per == "once":
            return self._read_write_once(spec)
        k = self._generation_index(spec.path, index[0])
        chunks = self._chunks[k]
        index_within = (index[0] - self.generations[k].first_slab, *index[1:])
        return chunks.read(chunks.specs[spec.path], index_within)

    def used(self, path: str) -> dict[int, list[int]]:
        """Return the slabs of each generation from which an array is read.

        Returns:
            Generation number -> slab indices within the generation.
        """
        slabs_by_number: dict[int, list[int]] = {}
        for slab in range(self.specs[path].grid[0]):
            generation = self.generations[self._generation_index(path, slab)]
            slabs = slabs_by_number.setdefault(generation.number, [])
            slabs.append(slab - generation.first_slab)
        return slabs_by_number

    def _generation_index(self, path: str, slab: int) -> int:
        """Return the index of the last generation that has a slab of an array."""
        for k in reversed(range(len(self._chunks))):
            begun = slab >= self.generations[k].first_slab
            if begun and path in self._chunks[k].specs:
                return k
        raise KeyError(f"{path}, slab {slab}")

    def _read_write_once(self, spec: ArraySpec) -> NDArray[Any]:
        """Return a write-once array: of the samples of all images, else the first's."""
        first_chunks = self._chunks[0]
        values = first_chunks.read_all(first_chunks.specs[spec.path])
        if not spec.path.startswith("samples/"):
            return values
        for generation, chunks in zip(
            self.generations[1:], self._chunks[1:], strict=True
        ):
            plan = generation.manifest.plan
            first_row = generation.first_slab * plan.slab
            adds_images = first_row + plan.n_images > len(values)
            if adds_images:
                added = chunks.read_all(chunks.specs[spec.path])
                before = _pad_ids(values[:first_row], spec)
                values = np.concatenate([before, _pad_ids(added, spec)])
        return _pad_ids(values, spec)

    def _read_rows(self, spec: ArraySpec, slabs: Iterable[int]) -> None:
        """Prefetch the checksum rows of the generations that these slabs are read from."""
        slabs_by_generation: dict[int, list[int]] = {}
        for slab in slabs:
            k = self._generation_index(spec.path, slab)
            slab_within = slab - self.generations[k].first_slab
            slabs_by_generation.setdefault(k, []).append(slab_within)
        for k, slabs_within in slabs_by_generation.items():
            self._chunks[k]._read_rows(spec, slabs_within)


def _pad_ids(values: NDArray[Any], spec: ArraySpec) -> NDArray[Any]:
    """Pad `samples/id` with zeros to the width that the ids of all generations need."""
    if values.shape[1:] == spec.shape[1:]:
        return values
    missing_bytes = spec.shape[1] - values.shape[1]
    return np.pad(values, ((0, 0), (0, missing_bytes)))


def revision(generations: Sequence[Generation], used: Mapping[int, Sequence[int]]) -> str:
    """Return a digest of commit markers, which changes when one of the slabs is rewritten.

    Args:
        generations: generations of the store.
        used: generation number -> slab indices within it whose markers count.

    Returns:
        16 hexadecimal digits.
    """
    markers = [
        {
            slab: generation.markers[slab]
            for slab in used[generation.number]
            if slab in generation.markers
        }
        for generation in generations
        if generation.number in used
    ]
    # A store of one generation has the digest that it had before stores could grow.
    text = json.dumps(markers[0] if len(markers) == 1 else markers, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
