"""The contents of a store: images, sites by name, arrays by path."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.errors import MissingInput, SiteError
from vitsee_stores.files import Files
from vitsee_stores.generations import Generation, GrownChunks, revision
from vitsee_stores.layout import ArraySpec, select_names
from vitsee_stores.lazy import LazyArray, LazyTokenMean, StoredArray, TokenArray
from vitsee_stores.manifest import Manifest
from vitsee_stores.notebook import site_table
from vitsee_stores.plan import SiteSpec, TokenLayout
from vitsee_stores.samples import StoreSamples
from vitsee_stores.sealed import VerifiedChunks
from vitsee_stores.selectors import TokenSelection, describe_layout
from vitsee_stores.url import folder_of


class StoreContents:
    """A store without its arrays: which images and sites it has.

    Attributes:
        place: its folder or URL.
        committed: (slabs,) which slabs can be read. Rows of the others read as NaN, 0 and not
            valid, and `slabs()` skips them.
        generations: the store as it was made, and what was added to it since; `manifest` is that of
            all of them.
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        committed: NDArray[np.bool_],
        complete: bool,
        label: str | None = None,
    ):
        self.generations = tuple(generations)
        self.files: Files = generations[0].files
        self.place = self.files.place
        self.label = label if label is not None else self.place.absolute().stem
        self.manifest: Manifest = generations[-1].combined
        self.plan = self.manifest.plan
        self.committed = committed
        self.complete = complete
        self.sites: dict[str, SiteSpec] = {site.name: site for site in self.plan.sites}
        self.chunks = (
            VerifiedChunks(self.files, self.manifest)
            if len(generations) == 1
            else GrownChunks(generations)
        )
        self.arrays: dict[str, ArraySpec] = self.chunks.specs

    @property
    def model(self) -> dict[str, Any]:
        """The model in the manifest: name, weights, transform, input size."""
        return dict(self.manifest.model)

    def __repr__(self) -> str:
        state = "" if self.complete else ", incomplete"
        return f"<Store {self.label}: {self.n_images} images, {len(self.sites)} sites{state}>"

    def _repr_html_(self) -> str:
        """Notebook display: a summary and the sites."""
        state = "" if self.complete else ", incomplete"
        model = self.manifest.model.get("name", "")
        caption = f"{self.label}: {model}, {self.n_images} images{state} ({self.place})"
        return site_table(caption, self.sites.values())

    @property
    def path(self) -> Path:
        """The store's folder. Raises StoreError: it is at a URL; `place` works for any store."""
        return folder_of(self.place)

    @property
    def zarr(self) -> Any:
        """Read-only zarr-python group of the store as it was made, which ignores commits and their
        checksums; what was added since is in groups of its own (`generations/2`)."""
        import zarr

        return zarr.open_group(self.files.zarr_store(), mode="r")

    @property
    def n_images(self) -> int:
        """Number of rows, including unreadable images and uncommitted slabs."""
        return self.plan.n_images

    @property
    def shuffled(self) -> bool:
        """Whether rows are in random order, so that the first rows are a random sample."""
        return self.manifest.identity.get("order") != "dataset"

    @property
    def n_slabs(self) -> int:
        """Number of slabs, including uncommitted ones."""
        return self.plan.n_slabs

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes, if the data has any."""
        return self.manifest.class_names

    @cached_property
    def valid(self) -> NDArray[np.bool_]:
        """(images,) rows whose image could be read and whose slab is committed."""
        return np.asarray(self.array("valid")[:] == 1)

    @property
    def generation(self) -> int:
        """The number of the last generation: 1 for a store that did not grow."""
        return self.generations[-1].number

    @cached_property
    def revision(self) -> str:
        """Digest of all commit markers; changes when a slab is rewritten or added."""
        every = {one.number: list(one.markers) for one in self.generations}
        return revision(self.generations, every)

    def revision_of(self, site: str) -> str:
        """Digest of the commit markers of a site's slabs; changes when one is rewritten or added,
        and not when other sites are."""
        name = self.site(site).name
        used = {1: list(range(self.n_slabs))}
        if isinstance(self.chunks, GrownChunks):
            folders = tuple(
                f"{folder}/{name}" for folder in ("acts", "vectors", "pooled")
            )
            path = next(path for path in self.arrays if path.startswith(folders))
            used = self.chunks.used(path)
        return revision(self.generations, used)

    @cached_property
    def samples(self) -> StoreSamples:
        """The images in the store's order."""
        made = self.chunks.samples()
        names = np.array(self.manifest.splits, np.str_)
        return StoreSamples(
            index=made["samples/index"],
            label=made["samples/label"],
            split=names[made["samples/split"]],
            hash=self.array("hash")[:],
            valid=self.valid,
            size=self.array("size")[:],
            box=made.get("samples/box"),
            encoded_id=made["samples/id"],
            pixel_hash=self.array("pixel_hash")[:] if self.plan.pixel_hashes else None,
        )

    @cached_property
    def sizes(self) -> NDArray[np.int32]:
        """(images, 2) height and width of each original image as decoded (FORMAT.md says when EXIF
        orientation is applied); 0 if it could not be read or its slab is not committed. Raises
        MissingInput: the store does not record sizes."""
        sizes: NDArray[np.int32] = self.array("size")[:]
        if (sizes[self.valid] < 1).any():
            raise MissingInput(
                f"{self.label} does not say how large its original images are; extract anew"
            )
        return sizes

    @cached_property
    def seconds(self) -> NDArray[np.float32]:
        """(clips,) median time between neighbouring sampled frames; NaN where a clip does not say,
        and of images."""
        if self.plan.clip is None:
            return np.full(self.n_images, np.nan, np.float32)
        seconds: NDArray[np.float32] = self.array("seconds")[:]
        return seconds

    @cached_property
    def fills(self) -> NDArray[np.bool_]:
        """(images,) which images fill the model's input or the canvas: all except those smaller
        than their canvas. Unreadable images count as filling it. Raises MissingInput: the store
        uses a canvas and does not record image sizes."""
        canvas = self.plan.canvas
        if canvas is None:
            return np.ones(self.n_images, np.bool_)
        return canvas.filled(self.sizes)

    # sites and arrays -------------------------------------------------------------------------

    def select(self, patterns: str | Sequence[str]) -> list[SiteSpec]:
        """The sites selected by names, globs, groups or `blocks.-1.out`, in the model's order.
        Raises SiteError: a pattern without a match."""
        patterns = [patterns] if isinstance(patterns, str) else patterns
        hint = f"vitsee info {shlex.quote(str(self.place))}"
        return select_names(
            patterns, self.plan.sites, what=f"store, {self.label}", hint=hint
        )

    def site(self, name: str) -> SiteSpec:
        """The stored site for one name, an alias or `blocks.-1.out`. Raises MissingInput: the store
        does not hold it."""
        site = self.sites.get(name)
        if site is None:
            try:
                (site,) = self.select([name])
            except SiteError as error:
                raise MissingInput(
                    f"{self.label}: {error}; extract adds it with --sites"
                ) from None
            except ValueError:
                raise SiteError(f"{name!r} names several sites; expected one") from None
        return self.sites[site.alias_of] if site.alias_of else site

    def layout(self, site: str) -> TokenLayout | None:
        """The token layout of a site; None for a vector or a raw output."""
        return self.site(site).layout

    def has(self, path: str) -> bool:
        """Whether the store has the array at this path (`attention/rollout`)."""
        return path in self.arrays

    def array(
        self, path: str, fixed: Mapping[int, int] | None = None, *, missing: str = ""
    ) -> StoredArray:
        """An array by its path, at fixed places along some axes (axis -> place). Raises
        MissingInput: the store has no such array; says `missing` if given."""
        if path not in self.arrays:
            raise MissingInput(missing or f"{self.label} has no array {path}")
        return StoredArray(self.chunks, self.arrays[path], self.committed, fixed)


# ---------------- the array of a selection of tokens

Tokens = str | tuple[int, ...]


def token_array(
    store: StoreContents, spec: SiteSpec, layout: TokenLayout, tokens: Tokens
) -> LazyArray:
    """The array that `Store.acts` describes, for a site whose tokens are all stored. Raises
    SiteError: the site has no such tokens."""
    owner = f"{store.label}: {spec.name}"
    folder = f"acts/{spec.name}"
    body = f"{folder}/{'rows' if layout.grid is None else 'grid'}"
    chosen = TokenSelection.parse(tokens)
    members = chosen.require(layout, owner)
    if chosen == "patches" and layout.grid is None:
        raise SiteError(
            f"{owner} has no tokens 'patches': it has {describe_layout(layout)}"
        )
    prefix = store.array(f"{folder}/prefix") if layout.prefix else None
    if chosen in ("all", "each", "mean-all", "rest"):
        everything = TokenArray(prefix, store.array(body))
        if chosen.is_mean:
            return LazyTokenMean(everything, members.start)
        return everything
    if chosen == "patches":
        return store.array(body)
    if chosen == "prefix" and prefix is not None:
        return prefix
    if chosen == "cls" and len(members) > 1:
        return store.array(f"pooled/{spec.name}/cls")
    at = members.start - layout.n_prefix
    if at < 0:
        return store.array(f"{folder}/prefix", {1: members.start})
    place = np.unravel_index(at, layout.body)
    return store.array(body, {axis: int(i) for axis, i in enumerate(place, 1)})
