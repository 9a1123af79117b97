"""A store as lazy arrays, and its slabs in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import missing_input as absent
from vitsee_stores.errors import MissingInput, SiteError, StoreError
from vitsee_stores.files import Files
from vitsee_stores.generations import Generation, GrownChunks, revision
from vitsee_stores.layout import ArraySpec
from vitsee_stores.lazy import LazyArray, NormalisedInputs, StoredArray
from vitsee_stores.manifest import Manifest
from vitsee_stores.notebook import site_table
from vitsee_stores.plan import AttentionGroup, SiteSpec
from vitsee_stores.samples import StoreSamples
from vitsee_stores.sealed import VerifiedChunks
from vitsee_stores.store_sites import StoreSites
from vitsee_stores.token_selection import describe_layout
from vitsee_stores.tokens import Tokens, token_array
from vitsee_stores.url import folder_of


class Store(StoreSites):
    """A store opened for reading, see `open_store`; pickles as its address.

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
        self.manifest: Manifest = generations[-1].whole
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
        """What made the activations, as the manifest records it: name, weights, transform, input
        size."""
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
        """The store's folder.

        Raises:
            StoreError: it is at a URL; `place` works for any store.
        """
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
        name, used = self.site(site).name, {1: list(range(self.n_slabs))}
        if isinstance(self.chunks, GrownChunks):
            folders = tuple(f"{folder}/{name}" for folder in ("acts", "vectors", "pooled"))
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
        )

    @cached_property
    def sizes(self) -> NDArray[np.int32]:
        """(images, 2) height and width of each original image as decoded, EXIF orientation not
        applied; 0 if it could not be read or its slab is not committed.

        Raises:
            MissingInput: the store does not record sizes.
        """
        sizes: NDArray[np.int32] = self.array("size")[:]
        if (sizes[self.valid] < 1).any():
            raise MissingInput(
                f"{self.label} does not say how large its original images are; extract anew"
            )
        return sizes

    @cached_property
    def fills(self) -> NDArray[np.bool_]:
        """(images,) which images fill the model's input or the canvas: all except those smaller
        than their canvas. Unreadable images count as filling it.

        Raises:
            MissingInput: the store uses a canvas and does not record image sizes.
        """
        canvas = self.plan.canvas
        return np.ones(self.n_images, np.bool_) if canvas is None else canvas.filled(self.sizes)

    # arrays -----------------------------------------------------------------------------------

    def has(self, path: str) -> bool:
        """Whether the store has the array at this path (`attention/rollout`)."""
        return path in self.arrays

    def array(self, path: str, fixed: Mapping[int, int] | None = None) -> StoredArray:
        """An array by its path, at fixed places along some axes (axis -> place).

        Raises:
            MissingInput: the store has no such array.
        """
        return self._array(path, f"{self.label} has no array {path}", fixed)

    def _array(
        self, path: str, missing: str, fixed: Mapping[int, int] | None = None
    ) -> StoredArray:
        if path not in self.arrays:
            raise MissingInput(missing)
        return StoredArray(self.chunks, self.arrays[path], self.committed, fixed)

    def acts(self, site: str, tokens: Tokens = "all", *, partial: bool = False) -> LazyArray:
        """Activations of one site.

        Args:
            site: its name; an alias reads the site it equals.
            tokens: "all" or "each" (images, tokens, dim), prefix tokens first; "patches" (images,
                rows, cols, dim); "prefix" (images, prefix tokens, dim); "cls", "first" or a grid
                cell (row, col) or "ROW,COL" (images, dim); in float32 "mean" (over the grid, equal
                to `pooled`), "mean-all", "rest" (all but the first token), each (images, dim). A
                vector is read as it is, a raw output with "all" only, in its module's shape.
            partial: whether images may be smaller than their canvas: tokens outside an image are 0
                and meaningless (`Placement.on_image` in vitsee_core.images.placement gives those on
                it).

        Raises:
            MissingInput: the site is not stored, or pooled only.
            SiteError: the site has no such tokens; or, without `partial`, images do not fill their
                canvas.
        """
        spec = self.site(site)
        if spec.kind == "vector":
            return self.array(f"vectors/{spec.name}")
        if tokens == "mean":
            return self.pooled(site, "mean")
        if spec.tokens != "all":
            raise MissingInput(
                f"{self.label} keeps {spec.name} pooled only: extract it with "
                f"--tokens {spec.name}=all (every site: --tokens all)"
            )
        if not partial and not self.fills.all():
            n = int((~self.fills).sum())
            line = absent.no_whole_grid(self.label, self.manifest, n, self.n_images)
            raise SiteError(line)
        if spec.layout is None:
            if tokens not in ("all", "each"):
                raise SiteError(
                    f"{spec.name} has no token layout, so no tokens {tokens!r}; expected all"
                )
            return self.array(f"acts/{spec.name}/raw")
        return token_array(self.array, f"{self.label}: {spec.name}", spec, tokens)

    def pooled(self, site: str, kind: str = "mean") -> LazyArray:
        """(images, dim) float32: a site's class token ("cls") or its mean over the grid ("mean"); a
        vector is read as it is.

        Raises:
            MissingInput: the site is not stored.
            SiteError: it has no class token, or no tokens at all.
        """
        spec = self.site(site)
        if spec.kind == "vector":
            return self.array(f"vectors/{spec.name}")
        path = f"pooled/{spec.name}/{kind}"
        if path not in self.arrays:
            has = "no token layout" if spec.layout is None else describe_layout(spec.layout)
            what = "class token" if kind == "cls" else f"pooled {kind!r}"
            raise SiteError(f"{self.label}: {spec.name} has no {what}: it has {has}")
        return self.array(path)

    def vectors(self, name: str) -> LazyArray:
        """(images, dim) float32: `pooled` or `logits`.

        Raises:
            MissingInput: the store has no such vector.
        """
        name = self.site(name).name
        return self._array(f"vectors/{name}", f"{self.label}: {name} is no vector, read its acts")

    def grams(self, site: str) -> LazyArray:
        """(slabs, slab, slab) float32: X X^T within each slab, X the slab's images by all tokens of
        a site, flattened, minus their mean over the slab's valid images. NaN in rows and columns
        of invalid images, and beyond the last image.

        Raises:
            MissingInput: not stored, or the site is a vector, which has none.
        """
        spec = self.site(site)
        vector = f"{spec.name} is a vector, kept whole: read vectors"
        why = vector if spec.kind == "vector" else "extract it with --grams"
        path = f"grams/{spec.name}/all"
        return self._array(path, f"{self.label} has no Gram matrices of {spec.name} ({why})")

    def erf(self, site: str) -> LazyArray:
        """(erf slabs, H, W) float32: |d centre / d input| of a site summed over RGB and over the
        slab's images that `erf_counts` counts, in input pixels. Only the first slabs have any.

        Raises:
            MissingInput: not stored, or not for this site.
        """
        spec = self.site(site)
        return self._array(
            f"erf/{spec.name}", absent.no_field(self.label, self.manifest, spec.name)
        )

    def erf_counts(self) -> LazyArray:
        """(erf slabs,) int64: number of valid images summed in `erf`, 0 for an uncommitted slab.

        Raises:
            MissingInput: the store has no receptive fields.
        """
        missing = f"{self.label} keeps no receptive fields (extract them with --erf 256)"
        return self._array("erf/count", missing)

    def weights(self, name: str) -> NDArray[np.float32]:
        """One of the model's small weights (listed in FORMAT.md): `filters`, `positions`,
        `head_kernel`, `head_bias`, `head_norm_scale`, `head_norm_bias`.

        Raises:
            MissingInput: not stored; with the reason, if extract recorded one.
        """
        missing = absent.no_weights(self.label, self.manifest, name)
        return self._array(f"weights/{name}", missing)[:]

    @property
    def attention_blocks(self) -> list[AttentionGroup]:
        """The blocks with attention summaries, by token layout; empty without any."""
        return list(self.plan.attention)

    def attention(self, name: str, group: str = "") -> LazyArray:
        """A per-image attention summary (listed in FORMAT.md): `distance_px` (images, blocks,
        heads), NaN beyond a block's own heads; `rollout` (images, tokens); `full/blocks.3`.

        Args:
            name: the array below `attention/`.
            group: the `prefix` of one of `attention_blocks`, for grids other than the first.

        Raises:
            MissingInput: not stored; names the extract option that adds it.
        """
        path = f"attention/{group}/{name}" if group else f"attention/{name}"
        return self._array(path, absent.no_attention(self.label, self.manifest, name, path))

    def attention_sums(self, name: str, group: str = "") -> LazyArray:
        """A sum over the valid images of each slab: `aligned` (slabs, blocks, heads, dy, dx),
        `cls_map`, `received` (slabs, blocks, heads, tokens). `n_valid` counts those images.

        Raises:
            MissingInput: as for `attention`.
        """
        return self.attention(name, group)

    def residual(self, sublayer: str) -> LazyArray:
        """(images, tokens, 3) float32: z.z, f.f and z.f of skip z and branch f, prefix first.

        Raises:
            MissingInput: not stored.
        """
        missing = absent.no_residual(self.label, self.manifest, sublayer)
        return self._array(f"residual/{sublayer}", missing)

    def inputs(self) -> LazyArray:
        """(images, 3, H, W) float32: the normalised pixels, as the model saw them.

        Raises:
            MissingInput: the store has no pixels.
            StoreError: the manifest does not record how they were normalised.
        """
        pixels = self._array("input", f"{self.label} keeps no pixels (extract it with --inputs)")
        mean, std = (self.manifest.transform.get(key) or [] for key in ("mean", "std"))
        if not len(mean) == len(std) == 3 or 0 in std:
            raise StoreError(f"{self.place} does not say with what mean and std it was normalised")
        return NormalisedInputs(pixels, self.valid, mean, std)

    def slabs(self, images: int | None = None) -> Iterator[Slab]:
        """The committed slabs in order; only rows below `images` if given."""
        stop = self.n_images if images is None else min(images, self.n_images)
        for k in range(self.n_slabs):
            rows = self.plan.rows(k)
            if self.committed[k] and rows.start < stop:
                yield Slab(self, k, slice(rows.start, min(rows.stop, stop)))


@dataclass(frozen=True)
class Slab:
    """Consecutive rows of a store, the unit of reading, with arrays in memory.

    Attributes:
        rows: the slab's place in the store.
        k: the slab's index; sums are those of the whole slab.
    """

    store: Store
    k: int
    rows: slice

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def valid(self) -> NDArray[np.bool_]:
        """(rows,) which rows hold an image."""
        return self.store.valid[self.rows]

    def acts(self, site: str, tokens: Tokens = "all", *, partial: bool = False) -> NDArray[Any]:
        """As `Store.acts`, for these rows."""
        return self.store.acts(site, tokens, partial=partial)[self.rows]

    def pooled(self, site: str, kind: str = "mean") -> NDArray[Any]:
        """As `Store.pooled`, for these rows."""
        return self.store.pooled(site, kind)[self.rows]

    def vectors(self, name: str) -> NDArray[Any]:
        """As `Store.vectors`, for these rows."""
        return self.store.vectors(name)[self.rows]

    def attention(self, name: str, group: str = "") -> NDArray[Any]:
        """As `Store.attention`, for these rows."""
        return self.store.attention(name, group)[self.rows]

    def attention_sums(self, name: str, group: str = "") -> NDArray[Any]:
        """As `Store.attention_sums`, for the whole slab: (blocks, heads, ...)."""
        return self.store.attention_sums(name, group)[self.k]

    def grams(self, site: str) -> NDArray[Any]:
        """As `Store.grams`, for these rows: (rows, rows)."""
        return self.store.grams(site)[self.k, : len(self), : len(self)]

    def residual(self, sublayer: str) -> NDArray[Any]:
        """As `Store.residual`, for these rows."""
        return self.store.residual(sublayer)[self.rows]

    def inputs(self) -> NDArray[Any]:
        """As `Store.inputs`, for these rows."""
        return self.store.inputs()[self.rows]
