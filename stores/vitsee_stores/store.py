"""A store opened for reading: lazy arrays, and slab by slab in memory.

    >>> from vitsee_stores import open_store
    >>> store = open_store("b16.zarr")
    >>> store.n_images, store.manifest.model["name"]
    (10000, 'vit_base_patch16_224')
    >>> [site.name for site in store.select(["blocks"])][-1]
    'blocks.11.out'
    >>> store.layout("blocks.-1.out")
    TokenLayout(prefix=('cls',), grid=(14, 14), rows=0, stride_px=(16.0, 16.0))
    >>> store.acts("blocks.3.out", tokens="patches")
    <LazyArray float16 (10000, 14, 14, 768)>
    >>> corner = store.acts("blocks.3.out", tokens=(0, 0))[:]      # one token of all images
    >>> first = store.acts("blocks.3.out")[:256]                   # every token of 256 images
    >>> nines = store.pooled("norm", "cls")[store.samples.label == 9]   # each slab is read once
    >>> store.attention("distance_px")[:].mean(0)                  # (blocks, heads)
    >>> sums = 0
    >>> for slab in store.slabs():                                 # each byte is read once
    ...     sums += slab.acts("blocks.3.out", "patches")[slab.valid].sum(0, dtype="f8")

Rows of unreadable images have `valid` False and contain NaN: exclude them.

A store pickles as its address: unpickling opens it there again, once per process."""

from __future__ import annotations

import copyreg
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.errors import (
    IncompleteStore,
    MissingInput,
    SiteError,
    StoreError,
    StoreMismatch,
)
from vitsee_stores.folder import files_at
from vitsee_stores.generations import committed, read_generations
from vitsee_stores.lazy import LazyArray, NormalisedInputs
from vitsee_stores.plan import AttentionGroup
from vitsee_stores.selectors import describe_layout
from vitsee_stores.store_contents import StoreContents, Tokens, token_array
from vitsee_stores.url import Place, Url


class Store(StoreContents):
    """A store opened for reading, see `open_store`; pickles as its address."""

    def acts(
        self, site: str, tokens: Tokens = "all", *, partial: bool = False
    ) -> LazyArray:
        """Activations of one site.

        Args:
            site: its name; an alias reads the site it equals.
            tokens: "all" or "each" (images, tokens, dim), prefix tokens first; "patches" (images,
                rows, cols, dim), of clips (clips, frames, rows, cols, dim); "prefix" (images,
                prefix tokens, dim); "cls", "first" or a grid cell (row, col) or "ROW,COL", of clips
                (frame, row, col) or "FRAME,ROW,COL" (images, dim); in float32 "mean" (over the
                grid, equal to `pooled`), "mean-all", "rest" (all but the first token), each
                (images, dim). A vector is read as it is, a raw output with "all" only, in its
                module's shape.
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
                f"--tokens {spec.name}=all {ELSEWHERE} (every site: --tokens all)"
            )
        if not partial and not self.fills.all():
            raise no_whole_grid(self)
        if spec.layout is None:
            if tokens not in ("all", "each"):
                raise SiteError(
                    f"{spec.name} has no token layout, so no tokens {tokens!r}; expected all"
                )
            return self.array(f"acts/{spec.name}/raw")
        return token_array(self, spec, spec.layout, tokens)

    def pooled(self, site: str, kind: str = "mean") -> LazyArray:
        """(images, dim) float32: a site's class token ("cls"; where each frame of a clip has one,
        their mean) or its mean over the grid ("mean"); a vector is read as it is. Raises
        MissingInput: the site is not stored; SiteError: it has no class token, or no tokens at all.
        """
        spec = self.site(site)
        if spec.kind == "vector":
            return self.array(f"vectors/{spec.name}")
        path = f"pooled/{spec.name}/{kind}"
        if path not in self.arrays:
            has = (
                "no token layout" if spec.layout is None else describe_layout(spec.layout)
            )
            what = "class token" if kind == "cls" else f"pooled {kind!r}"
            raise SiteError(f"{self.label}: {spec.name} has no {what}: it has {has}")
        return self.array(path)

    def vectors(self, name: str) -> LazyArray:
        """(images, dim) float32: `pooled` or `logits`. Raises MissingInput: the store has no such
        vector."""
        name = self.site(name).name
        return self.array(
            f"vectors/{name}", missing=f"{self.label}: {name} is no vector, read its acts"
        )

    def grams(self, site: str) -> LazyArray:
        """(slabs, slab, slab) float32: X X^T within each slab, X the slab's images by all tokens of
        a site, flattened, minus their mean over the slab's valid images. NaN in rows and columns of
        invalid images, and beyond the last image. Raises MissingInput: not stored, or the site is a
        vector, which has none."""
        spec = self.site(site)
        vector = f"{spec.name} is a vector, kept whole: read vectors"
        why = vector if spec.kind == "vector" else f"extract it with --grams {ELSEWHERE}"
        missing = f"{self.label} has no Gram matrices of {spec.name} ({why})"
        return self.array(f"grams/{spec.name}/all", missing=missing)

    def erf(self, site: str) -> LazyArray:
        """(erf slabs, H, W) float32: |d centre / d input| of a site summed over RGB and over the
        slab's images that `erf_counts` counts, in input pixels. Only the first slabs have any.
        Raises MissingInput: not stored, or not for this site."""
        name = self.site(site).name
        reason = (
            None if self.plan.erf is None else self.manifest.left_out.get(f"{name} erf")
        )
        why = _left_out_or(reason, "--erf 256")
        missing = f"{self.label} has no receptive field of {name} ({why})"
        return self.array(f"erf/{name}", missing=missing)

    def erf_counts(self) -> LazyArray:
        """(erf slabs,) int64: number of valid images summed in `erf`, 0 for an uncommitted slab.
        Raises MissingInput: the store has no receptive fields."""
        how = f"extract them with --erf 256 {ELSEWHERE}"
        return self.array(
            "erf/count", missing=f"{self.label} keeps no receptive fields ({how})"
        )

    def weights(self, name: str) -> NDArray[np.float32]:
        """One of the model's small weights (listed in FORMAT.md): `filters`, `positions`,
        `head_kernel`, `head_bias`, `head_norm_scale`, `head_norm_bias`. Raises MissingInput: not
        stored; with the reason, if extract recorded one."""
        head = "head_weights" if name.startswith("head_") else "input_weights"
        absent = (self.manifest.info.get(head) or {}).get("absent")
        reason = absent.get(name) if isinstance(absent, dict) else absent
        missing = f"{self.label} has no weights {name}{f': {reason}' if reason else ''}"
        return self.array(f"weights/{name}", missing=missing)[:]

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
            SiteError: images do not fill their canvas, and the array is one over cells.
        """
        path = f"attention/{group}/{name}" if group else f"attention/{name}"
        left_out = self.manifest.left_out
        if reason := left_out.get("attention") or left_out.get(name):
            missing = f"{self.label} has no {path}: it was left out: {reason}"
        else:
            level = {"cls_rows": "rows", "received_rows": "rows"}.get(name, "summary")
            level = "full" if name.startswith("full/") else level
            how = f"extract it with --attention {level} {ELSEWHERE}"
            missing = f"{self.label} has no {path} ({how})"
        found = self.array(path, missing=missing)
        canvas = self.plan.canvas
        if canvas is not None and canvas.own_grids and name not in BY_IMAGE:
            raise no_whole_grid(self)
        return found

    def attention_sums(self, name: str, group: str = "") -> LazyArray:
        """A sum over the valid images of each slab: `aligned` (slabs, blocks, heads, dy, dx),
        `cls_map`, `received` (slabs, blocks, heads, tokens). `n_valid` counts those images. Raises
        MissingInput: as for `attention`."""
        return self.attention(name, group)

    def residual(self, sublayer: str) -> LazyArray:
        """(images, tokens, 3) float32: z.z, f.f and z.f of skip z and branch f, prefix first.
        Raises MissingInput: not stored."""
        why = _left_out_or(self.manifest.left_out.get("residual"), "--residual")
        if names := [name for name, _ in self.plan.sublayers]:
            why = f"it has: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
        missing = f"{self.label} has no residual summary of {sublayer} ({why})"
        return self.array(f"residual/{sublayer}", missing=missing)

    def inputs(self) -> LazyArray:
        """(images, 3, H, W), of clips (clips, frames, 3, H, W), float32: the normalised pixels, as
        the model saw them. Raises MissingInput: the store has no pixels; StoreError: the manifest
        does not record how they were normalised."""
        missing = f"{self.label} keeps no pixels (extract it with --inputs {ELSEWHERE})"
        pixels = self.array("input", missing=missing)
        mean, std = (self.manifest.transform.get(key) or [] for key in ("mean", "std"))
        if not len(mean) == len(std) == 3 or 0 in std:
            raise StoreError(
                f"{self.place} does not say with what mean and std it was normalised"
            )
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
    """Consecutive rows of a store, the unit of reading, with arrays in memory: the methods of
    `Store` for these rows, `grams` (rows, rows), `attention_sums` of the whole slab.

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

    def acts(
        self, site: str, tokens: Tokens = "all", *, partial: bool = False
    ) -> NDArray[Any]:
        return self.store.acts(site, tokens, partial=partial)[self.rows]

    def pooled(self, site: str, kind: str = "mean") -> NDArray[Any]:
        return self.store.pooled(site, kind)[self.rows]

    def vectors(self, name: str) -> NDArray[Any]:
        return self.store.vectors(name)[self.rows]

    def attention(self, name: str, group: str = "") -> NDArray[Any]:
        return self.store.attention(name, group)[self.rows]

    def attention_sums(self, name: str, group: str = "") -> NDArray[Any]:
        return self.store.attention_sums(name, group)[self.k]

    def grams(self, site: str) -> NDArray[Any]:
        return self.store.grams(site)[self.k, : len(self), : len(self)]

    def residual(self, sublayer: str) -> NDArray[Any]:
        return self.store.residual(sublayer)[self.rows]

    def inputs(self) -> NDArray[Any]:
        return self.store.inputs()[self.rows]


# ---------------- why a store lacks an array, and which option of extract adds it

# Summaries of attention that are one number for each image and head, whatever the image's grid.
BY_IMAGE = (
    *(
        "distance_px",
        "distance_px_raw",
        "distance_unit",
        "entropy",
        "prefix_mass",
        "query_std",
    ),
    *("head_std", "qk_nmi", "n_queries"),
)
# A store that is there takes more sites and images only.
ELSEWHERE = "-o NEW.zarr"


def _left_out_or(reason: str | None, option: str) -> str:
    if reason:
        return f"left out: {reason}"
    return f"extract it with {option} {ELSEWHERE}"


def no_whole_grid(store: StoreContents) -> SiteError:
    """Refusal to read tokens of images that do not fill the canvas."""
    assert store.plan.canvas is not None
    height, width = store.plan.canvas.size
    return SiteError(
        f"{store.label} has {(~store.fills).sum()} of {store.n_images} images that do not fill its "
        f"canvas of {width} x {height} pixels, and what is asked for reads tokens beside them too; "
        "expected images of one size, or, of commands that take it, --tokens mean, which leaves "
        "these out"
    )


# ---------------- opening and pickling


def open_store(
    path: str | os.PathLike[str] | Url,
    *,
    allow_partial: bool = False,
    label: str | None = None,
) -> Store:
    """Open the store at `path`.

    Args:
        path: its folder, or a URL (`s3://bucket/runs/b16.zarr`).
        allow_partial: also open an unfinished store; only its committed slabs are read. A
            generation that is being added to a complete store is not read before it is complete.
        label: its name in tables and figures; by default the folder's name without suffix.

    Raises:
        StoreError: missing, not a vitsee store, of another format version, or damaged.
        IncompleteStore: unfinished without `allow_partial`, or without any slab yet.
    """
    return _opened(path, allow_partial, label, None)


def _opened(
    path: str | os.PathLike[str] | Url,
    allow_partial: bool,
    label: str | None,
    last: int | None,
) -> Store:
    """`open_store`, of at most `last` generations."""
    every = read_generations(files_at(path))
    found = [every[0], *(one for one in every[1:last] if one.published)]
    slabs = committed(found)
    if unfinished := [one for one in found if not one.complete]:
        one = unfinished[0]
        own = one.committed
        are = "slab is" if len(own) == 1 else "slabs are"
        done = f"{one.files} is incomplete: {own.sum()} of {len(own)} {are} committed"
        if not allow_partial:
            raise IncompleteStore(
                f"{done} (repeat the vitsee extract command to go on, or read those with "
                "--allow-partial)"
            )
        if not slabs.any():
            raise IncompleteStore(f"{done} (repeat the vitsee extract command to go on)")
    return Store(found, slabs, not unfinished, label)


def _address(store: Store) -> tuple[Any, ...]:
    """Pickle state of a store. Absolute: another process may have another working directory."""
    flags = None if store.complete else np.packbits(store.committed).tobytes()
    identity = store.manifest.store_id, store.generation
    return _at, (store.place.absolute(), store.label, *identity, flags)


@lru_cache(maxsize=16)
def _at(
    place: Place, label: str, store_id: str, generation: int, flags: bytes | None
) -> Store:
    """Reopen a pickled store with the generations that it had; if unfinished, with the slabs that
    were committed when it was pickled. Raises StoreMismatch: another store is there now."""
    store = _opened(place, flags is not None, label, generation)
    if (store.manifest.store_id, store.generation) != (store_id, generation):
        raise StoreMismatch(f"{place} was replaced by another store during the work")
    if flags is None:
        return store
    then = np.unpackbits(np.frombuffer(flags, np.uint8), count=store.n_slabs).astype(bool)
    return Store(store.generations, then, False, label)


copyreg.pickle(Store, _address)


# ---------------- pairs of stores


def require_paired(a: Store, b: Store) -> NDArray[np.bool_]:
    """(images,) the rows that are valid in both stores. Raises StoreMismatch: other images or
    another order: ids and labels differ, or the encoded bytes of an image that both could read."""
    names = f"{a.label} and {b.label}"
    if a.manifest.samples_fingerprint != b.manifest.samples_fingerprint:
        raise StoreMismatch(
            f"{names} do not pair: {_first_difference(a, b)} (extract both from the same --data "
            "with the same --images, --seed and --order)"
        )
    both = a.valid & b.valid
    differing = np.flatnonzero(both & (a.samples.hash != b.samples.hash))
    if differing.size:
        row = int(differing[0])
        raise StoreMismatch(
            f"{names} do not pair: row {row} ({a.samples.id[row]}) was read from other bytes, as "
            f"were {differing.size} of {int(both.sum())} images (extract both from the same --data)"
        )
    return both


def _first_difference(a: Store, b: Store) -> str:
    if a.n_images != b.n_images:
        return f"{a.n_images} images against {b.n_images}"
    for what in ("id", "label"):
        ours = getattr(a.samples, what)
        theirs = getattr(b.samples, what)
        rows = np.flatnonzero(ours != theirs)
        if rows.size:
            row = int(rows[0])
            return f"the {what} in row {row} is {ours[row]} against {theirs[row]}"
    return "their samples_fingerprints differ"
