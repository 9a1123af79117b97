"""A store as lazy arrays, and its slabs in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.errors import MissingInput, SiteError, StoreError
from vitsee_stores.lazy import LazyArray, NormalisedInputs
from vitsee_stores.manifest import Manifest
from vitsee_stores.plan import AttentionGroup
from vitsee_stores.store_contents import StoreContents, Tokens, token_array
from vitsee_stores.token_selection import describe_layout


class Store(StoreContents):
    """A store opened for reading, see `open_store`; pickles as its address."""

    def acts(self, site: str, tokens: Tokens = "all", *, partial: bool = False) -> LazyArray:
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
            n = int((~self.fills).sum())
            raise SiteError(no_whole_grid(self.label, self.manifest, n, self.n_images))
        if spec.layout is None:
            if tokens not in ("all", "each"):
                raise SiteError(
                    f"{spec.name} has no token layout, so no tokens {tokens!r}; expected all"
                )
            return self.array(f"acts/{spec.name}/raw")
        return token_array(self, spec, spec.layout, tokens)

    def pooled(self, site: str, kind: str = "mean") -> LazyArray:
        """(images, dim) float32: a site's class token ("cls"; where each frame of a clip has one,
        their mean) or its mean over the grid ("mean"); a vector is read as it is.

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
        return self.array(
            f"vectors/{name}", missing=f"{self.label}: {name} is no vector, read its acts"
        )

    def grams(self, site: str) -> LazyArray:
        """(slabs, slab, slab) float32: X X^T within each slab, X the slab's images by all tokens of
        a site, flattened, minus their mean over the slab's valid images. NaN in rows and columns
        of invalid images, and beyond the last image.

        Raises:
            MissingInput: not stored, or the site is a vector, which has none.
        """
        spec = self.site(site)
        vector = f"{spec.name} is a vector, kept whole: read vectors"
        why = vector if spec.kind == "vector" else f"extract it with --grams {ELSEWHERE}"
        missing = f"{self.label} has no Gram matrices of {spec.name} ({why})"
        return self.array(f"grams/{spec.name}/all", missing=missing)

    def erf(self, site: str) -> LazyArray:
        """(erf slabs, H, W) float32: |d centre / d input| of a site summed over RGB and over the
        slab's images that `erf_counts` counts, in input pixels. Only the first slabs have any.

        Raises:
            MissingInput: not stored, or not for this site.
        """
        name = self.site(site).name
        missing = no_field(self.label, self.manifest, name)
        return self.array(f"erf/{name}", missing=missing)

    def erf_counts(self) -> LazyArray:
        """(erf slabs,) int64: number of valid images summed in `erf`, 0 for an uncommitted slab.

        Raises:
            MissingInput: the store has no receptive fields.
        """
        how = f"extract them with --erf 256 {ELSEWHERE}"
        return self.array("erf/count", missing=f"{self.label} keeps no receptive fields ({how})")

    def weights(self, name: str) -> NDArray[np.float32]:
        """One of the model's small weights (listed in FORMAT.md): `filters`, `positions`,
        `head_kernel`, `head_bias`, `head_norm_scale`, `head_norm_bias`.

        Raises:
            MissingInput: not stored; with the reason, if extract recorded one.
        """
        missing = no_weights(self.label, self.manifest, name)
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
        missing = no_attention(self.label, self.manifest, name, path)
        found = self.array(path, missing=missing)
        canvas = self.plan.canvas
        if canvas is not None and canvas.own_grids and name not in BY_IMAGE:
            n = int((~self.fills).sum())
            raise SiteError(no_whole_grid(self.label, self.manifest, n, self.n_images))
        return found

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
        missing = no_residual(self.label, self.manifest, sublayer)
        return self.array(f"residual/{sublayer}", missing=missing)

    def inputs(self) -> LazyArray:
        """(images, 3, H, W), of clips (clips, frames, 3, H, W), float32: the normalised pixels, as
        the model saw them.

        Raises:
            MissingInput: the store has no pixels.
            StoreError: the manifest does not record how they were normalised.
        """
        missing = f"{self.label} keeps no pixels (extract it with --inputs {ELSEWHERE})"
        pixels = self.array("input", missing=missing)
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
        """The values of `Store.acts`, for these rows."""
        return self.store.acts(site, tokens, partial=partial)[self.rows]

    def pooled(self, site: str, kind: str = "mean") -> NDArray[Any]:
        """The values of `Store.pooled`, for these rows."""
        return self.store.pooled(site, kind)[self.rows]

    def vectors(self, name: str) -> NDArray[Any]:
        """The values of `Store.vectors`, for these rows."""
        return self.store.vectors(name)[self.rows]

    def attention(self, name: str, group: str = "") -> NDArray[Any]:
        """The values of `Store.attention`, for these rows."""
        return self.store.attention(name, group)[self.rows]

    def attention_sums(self, name: str, group: str = "") -> NDArray[Any]:
        """The values of `Store.attention_sums`, for the whole slab: (blocks, heads, ...)."""
        return self.store.attention_sums(name, group)[self.k]

    def grams(self, site: str) -> NDArray[Any]:
        """The values of `Store.grams`, for these rows: (rows, rows)."""
        return self.store.grams(site)[self.k, : len(self), : len(self)]

    def residual(self, sublayer: str) -> NDArray[Any]:
        """The values of `Store.residual`, for these rows."""
        return self.store.residual(sublayer)[self.rows]

    def inputs(self) -> NDArray[Any]:
        """The values of `Store.inputs`, for these rows."""
        return self.store.inputs()[self.rows]


# ---------------- why a store lacks an array, and which option of extract adds it

# Summaries of attention that are one number for each image and head, whatever the image's grid.
BY_IMAGE = (
    *("distance_px", "distance_px_raw", "distance_unit", "entropy", "prefix_mass", "query_std"),
    *("head_std", "qk_nmi", "n_queries"),
)
# A store that is there takes more sites and images only.
ELSEWHERE = "-o NEW.zarr"


def no_weights(label: str, manifest: Manifest, name: str) -> str:
    head = "head_weights" if name.startswith("head_") else "input_weights"
    absent = (manifest.info.get(head) or {}).get("absent")
    reason = absent.get(name) if isinstance(absent, dict) else absent
    return f"{label} has no weights {name}{f': {reason}' if reason else ''}"


def no_attention(label: str, manifest: Manifest, name: str, path: str) -> str:
    reason = manifest.left_out.get("attention") or manifest.left_out.get(name)
    if reason:
        return f"{label} has no {path}: it was left out: {reason}"
    level = {"cls_rows": "rows", "received_rows": "rows"}.get(name, "summary")
    level = "full" if name.startswith("full/") else level
    return f"{label} has no {path} (extract it with --attention {level} {ELSEWHERE})"


def no_residual(label: str, manifest: Manifest, sublayer: str) -> str:
    names = [name for name, _ in manifest.plan.sublayers]
    if names:
        why = f"it has: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
    else:
        why = _left_out_or(manifest.left_out.get("residual"), "--residual")
    return f"{label} has no residual summary of {sublayer} ({why})"


def no_field(label: str, manifest: Manifest, site: str) -> str:
    reason = None if manifest.plan.erf is None else manifest.left_out.get(f"{site} erf")
    return f"{label} has no receptive field of {site} ({_left_out_or(reason, '--erf 256')})"


def _left_out_or(reason: str | None, option: str) -> str:
    return f"left out: {reason}" if reason else f"extract it with {option} {ELSEWHERE}"


def no_whole_grid(label: str, manifest: Manifest, n: int, n_images: int) -> str:
    """Refusal to read tokens of images that do not fill the canvas."""
    canvas = manifest.plan.canvas
    assert canvas is not None
    height, width = canvas.size
    return (
        f"{label} has {n} of {n_images} images that do not fill its canvas of {width} x {height} "
        "pixels, and what is asked for reads tokens beside them too; expected images of one size, "
        "or, of commands that take it, --tokens mean, which leaves these out"
    )
