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
# Each generation has its own; those of the whole would say nothing.
SEALS = ("checksums", "commits")


@dataclass(frozen=True)
class Generation:
    """One generation of a store.

    Attributes:
        files: its own.
        manifest: its own.
        published: whether its manifest says that it is complete.
        whole: the manifest of the store up to this generation.
    """

    files: Files
    manifest: Manifest
    published: bool
    whole: Manifest

    @property
    def number(self) -> int:
        """1 for the store as it was made."""
        growth = self.manifest.growth
        return 1 if growth is None else growth.number

    @property
    def first_slab(self) -> int:
        """The slab of the whole store that is this one's slab 0."""
        growth = self.manifest.growth
        return 0 if growth is None else growth.first_slab

    @cached_property
    def markers(self) -> dict[int, dict[str, Any]]:
        """The generation's commit markers by slab, counted within it; only committed slabs have
        one."""
        return metadata.read_markers(self.files, self.manifest)

    @cached_property
    def complete(self) -> bool:
        """Whether readers can use all of it."""
        if not self.published:
            return False
        n_slabs = self.manifest.plan.n_slabs
        names = metadata.list_names(self.files, "commits")
        return len(metadata.numbers(names, n_slabs)) == n_slabs

    @property
    def committed(self) -> NDArray[np.bool_]:
        """(slabs,) which of its slabs can be read, by the names of their markers where it is
        complete."""
        if self.complete:
            return np.ones(self.manifest.plan.n_slabs, np.bool_)
        return self.marked

    @property
    def marked(self) -> NDArray[np.bool_]:
        """(slabs,) which of its slabs have a marker that can be read."""
        flags = np.zeros(self.manifest.plan.n_slabs, np.bool_)
        flags[list(self.markers)] = True
        return flags


def files_of(files: Files, number: int) -> Files:
    """The files of a store's generation."""
    if number == 1:
        return files
    return files.inside(f"{FOLDER}/{number}")


def numbers(files: Files) -> list[int]:
    """The numbers of the generations that were begun after the first, in order. Raises StoreError:
    the store cannot be listed."""
    names = metadata.list_names(files, FOLDER)
    return sorted(
        int(name) for name in names if re.fullmatch(r"[2-9]|[1-9]\d{1,5}", name)
    )


def read_generations(files: Files) -> list[Generation]:
    """All generations of a store in order: those that readers see, and the one that is being added,
    if there is one. Of a store that is unfinished itself it is the only one. Raises StoreError:
    missing, not a store, of another format version, or damaged; a generation that others are built
    on is missing or unfinished, or does not fit them."""
    manifest, published = metadata.read_root(files)
    found = [Generation(files, manifest, published, manifest)]
    for number in numbers(files) if published else ():
        last = found[-1]
        if number != last.number + 1:
            lost = last.number + 1
            what = "is missing"
        elif not last.published:
            lost = last.number
            what = "is unfinished"
        else:
            own = files_of(files, number)
            try:
                manifest, published = metadata.read_root(own)
            except NoStore:  # it was removed meanwhile
                break
            try:
                whole = grown(
                    [one.manifest.store_id for one in found], last.whole, manifest
                )
            except ValueError as error:
                raise StoreError(f"{own} is no generation of {files}: {error}") from None
            found.append(Generation(own, manifest, published, whole))
            continue
        raise StoreError(
            f"{files} is damaged: generation {lost} {what}, and generation {number} is built on "
            f"it (put {FOLDER}/{lost} back; or remove {FOLDER}/{number} and add that again)"
        )
    return found


def grown(before: Sequence[str], whole: Manifest, own: Manifest) -> Manifest:
    """The manifest of a store with one more generation.

    Args:
        before: the store_id of each generation before.
        whole: the manifest of the store until now.
        own: the manifest of the generation.

    Raises:
        ValueError: the generation does not fit the store.
    """
    growth = own.growth
    old = whole.plan
    new = own.plan
    if growth is None or list(growth.after) != list(before):
        raise ValueError("it was not added to these generations")
    if own.splits[: len(whole.splits)] != whole.splits or new.boxes != old.boxes:
        raise ValueError("its images are described otherwise")
    sites = {site.name: site for site in (*old.sites, *new.sites)}
    for was in old.sites:
        now = sites[was.name]
        if (was.kind, was.shape, was.layout) != (now.kind, now.shape, now.layout):
            raise ValueError(f"its site {was.name} has other tokens")
    if sorted(growth.sites) != sorted(sites):
        raise ValueError("growth.sites does not name the sites of both")
    n_images = growth.first_slab * old.slab + new.n_images
    more = n_images > old.n_images
    if more and growth.first_slab != old.n_images // old.slab:
        raise ValueError(f"its first slab is {growth.first_slab}")
    if not more and (growth.first_slab or n_images < old.n_images):
        raise ValueError(f"it has {new.n_images} images from slab {growth.first_slab} on")
    if not more and (common := {s.name for s in old.sites} & {s.name for s in new.sites}):
        raise ValueError(f"both have the site {min(common)}")
    erf = old.erf
    if erf is not None and new.erf is not None:
        with_erf = {*erf.sites, *new.erf.sites}
        erf = dataclasses.replace(
            erf, sites=tuple(n for n in growth.sites if n in with_erf)
        )
    plan = dataclasses.replace(
        old,
        n_images=n_images,
        sites=tuple(sites[name] for name in growth.sites),
        erf=erf,
        id_bytes=max(old.id_bytes, new.id_bytes),
    )
    _check_arrays(arrays(plan), arrays(new), all_of_them=more)
    identity = {"n_images": n_images, "samples_fingerprint": growth.samples_fingerprint}
    return dataclasses.replace(
        whole,
        plan=plan,
        samples_fingerprint=growth.samples_fingerprint,
        identity={**_with_sites(whole.identity, own.identity, plan), **identity},
        splits=own.splits,
    )


def _check_arrays(
    whole: Mapping[str, ArraySpec], own: Mapping[str, ArraySpec], all_of_them: bool
) -> None:
    """Check that a generation's arrays are cut as those of the whole store, and that a generation
    of further images has all of them. Raises ValueError: names an array."""
    for path, spec in own.items():
        if path in SEALS or spec.per == "once":
            continue
        theirs = whole.get(path)
        cut = [
            (s.chunks, s.shape[1:], s.dtype, s.codec)
            for s in (spec, theirs)
            if s is not None
        ]
        if len(cut) < 2 or cut[0] != cut[1]:
            raise ValueError(f"its array {path} does not fit")
    wanted = [path for path, spec in whole.items() if spec.per in ("image", "slab")]
    lost = [path for path in wanted if path not in own and not path.startswith("erf/")]
    if all_of_them and lost:
        raise ValueError(f"it has no array {lost[0]}")


def _with_sites(
    old: Mapping[str, Any], own: Mapping[str, Any], plan: StorePlan
) -> dict[str, Any]:
    """The identity of a store as if the sites that a generation adds had been asked for at once."""
    by_site = {}
    for key in ("tokens", "dtype"):
        before = old.get(key)
        added = own.get(key)
        if isinstance(before, dict) and isinstance(added, dict):
            usual = before.get("default") if len(before) == 1 else None
            by_site[key] = before | {site: v for site, v in added.items() if v != usual}
    return {**old, "sites": [site.name for site in plan.stored], **by_site}


def committed(
    generations: Sequence[Generation], *, marked: bool = False
) -> NDArray[np.bool_]:
    """(slabs,) which slabs of the whole store can be read in all their arrays. marked: by what
    their markers say, which reads all of them."""
    flags = np.ones(generations[-1].whole.plan.n_slabs, np.bool_)
    n_images = 0
    for one in generations:
        own = one.marked if marked else one.committed
        slabs = slice(one.first_slab, one.first_slab + len(own))
        # Further images come in place of what there was of their slabs.
        more = one.whole.plan.n_images > n_images
        flags[slabs] = own if more else flags[slabs] & own
        n_images = one.whole.plan.n_images
    return flags


class GrownChunks(VerifiedChunks):
    """The chunks of a store with all its generations, in the places that they would have in a store
    that was made at once; without those that seal others."""

    def __init__(self, generations: Sequence[Generation]):
        super().__init__(generations[0].files, generations[-1].whole)
        self.specs = {
            path: spec for path, spec in self.specs.items() if path not in SEALS
        }
        self.generations = tuple(generations)
        self._own = [VerifiedChunks(one.files, one.manifest) for one in generations]

    def read(self, spec: ArraySpec, index: Sequence[int]) -> NDArray[Any]:
        if spec.per == "once":
            return self._once(spec)
        place, own = self._of(spec.path, index[0])
        at = (index[0] - self.generations[place].first_slab, *index[1:])
        return own.read(own.specs[spec.path], at)

    def used(self, path: str) -> dict[int, list[int]]:
        """The slabs of each generation, counted within it, from which an array is read."""
        found: dict[int, list[int]] = {}
        for slab in range(self.specs[path].grid[0]):
            place, _ = self._of(path, slab)
            one = self.generations[place]
            found.setdefault(one.number, []).append(slab - one.first_slab)
        return found

    def _of(self, path: str, slab: int) -> tuple[int, VerifiedChunks]:
        """The last generation that has a slab of an array."""
        for place in reversed(range(len(self._own))):
            if (
                slab >= self.generations[place].first_slab
                and path in self._own[place].specs
            ):
                return place, self._own[place]
        raise KeyError(f"{path}, slab {slab}")

    def _once(self, spec: ArraySpec) -> NDArray[Any]:
        """An array of the first generation, or what describes the images of all."""
        values = self._own[0].read_all(self._own[0].specs[spec.path])
        if not spec.path.startswith("samples/"):
            return values
        for one, own in zip(self.generations[1:], self._own[1:], strict=True):
            first = one.first_slab * one.manifest.plan.slab
            if first + one.manifest.plan.n_images > len(values):
                added = own.read_all(own.specs[spec.path])
                values = np.concatenate(
                    [_wide(part, spec) for part in (values[:first], added)]
                )
        return _wide(values, spec)

    def _read_rows(self, spec: ArraySpec, slabs: Iterable[int]) -> None:
        by_place: dict[int, list[int]] = {}
        for slab in slabs:
            place, _ = self._of(spec.path, slab)
            by_place.setdefault(place, []).append(
                slab - self.generations[place].first_slab
            )
        for place, own in by_place.items():
            self._own[place]._read_rows(spec, own)


def _wide(values: NDArray[Any], spec: ArraySpec) -> NDArray[Any]:
    """Ids padded to the width that those of all generations need."""
    if values.shape[1:] == spec.shape[1:]:
        return values
    return np.pad(values, ((0, 0), (0, spec.shape[1] - values.shape[1])))


def revision(generations: Sequence[Generation], used: Mapping[int, Sequence[int]]) -> str:
    """Digest of the commit markers of these slabs, by generation; of a store of one generation it
    is that of all its markers."""
    markers = [
        {slab: one.markers[slab] for slab in used[one.number] if slab in one.markers}
        for one in generations
        if one.number in used
    ]
    text = json.dumps(markers[0] if len(markers) == 1 else markers, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
