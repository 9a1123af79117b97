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

A store pickles as its address: unpickling opens it there again, once per process.
"""

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
from vitsee_stores.store_contents import (
    BY_IMAGE,
    MAX_NAMES,
    NEW_STORE,
    StoreContents,
    Tokens,
    no_whole_grid,
    token_array,
    why_absent,
)
from vitsee_stores.url import Place, Url


class Store(StoreContents):
    """A store opened for reading, as `open_store` returns it.

    Every method returns a lazy array, which reads from disk when it is sliced.

    Examples:
        >>> import vitsee
        >>> store = vitsee.open_store("vit.zarr")
        >>> isinstance(store, vitsee.Store)
        True
        >>> store.samples.label[:3].tolist()
        [1, 4, 8]
    """

    def acts(
        self, site: str, tokens: Tokens = "all", *, partial: bool = False
    ) -> LazyArray:
        """Return the activations of one site, read when sliced.

        The shape depends on the tokens that are selected:

            "all", "each"               (images, tokens, dim), prefix tokens first
            "patches"                   (images, rows, cols, dim); of clips
                                        (clips, frames, rows, cols, dim)
            "prefix"                    (images, prefix tokens, dim)
            "cls", "first", a cell      (images, dim)
            "mean", "mean-all", "rest"  (images, dim) float32: the mean over the grid (equal
                                        to `pooled`), over all tokens, over all but the first

        Args:
            site: name of the site; for an alias the site that it equals is read.
            tokens: one of the words above; or a grid cell, (row, col) or "ROW,COL", of clips
                (frame, row, col) or "FRAME,ROW,COL". A vector has no tokens and is returned
                whatever is selected. A raw output takes "all" only and has its module's shape.
            partial: whether images may be smaller than their canvas. Tokens outside of an
                image are then 0 and mean nothing; `Placement.on_image` in
                vitsee_core.images.placement tells which tokens lie on it.

        Raises:
            MissingInput: the site is not stored, or only its pooled tokens are.
            SiteError: the site has no such tokens; or images do not fill their canvas, and
                `partial` is False.
        """
        spec = self.site(site)
        if spec.kind == "vector":
            return self.array(f"vectors/{spec.name}")
        if tokens == "mean":
            return self.pooled(site, "mean")
        if spec.tokens != "all":
            raise MissingInput(
                f"{self.label} keeps {spec.name} pooled only: extract it with "
                f"--tokens {spec.name}=all {NEW_STORE} (every site: --tokens all)"
            )
        if not partial and not self.fills.all():
            raise no_whole_grid(self)
        if spec.layout is None:
            if tokens not in ("all", "each"):
                raise SiteError(
                    f"{spec.name} has no token layout, so no tokens {tokens!r}; expected "
                    "all"
                )
            return self.array(f"acts/{spec.name}/raw")
        return token_array(self, spec, spec.layout, tokens)

    def pooled(self, site: str, kind: str = "mean") -> LazyArray:
        """Return one vector of a site for each image, (images, dim) float32.

        Args:
            site: name of the site. A vector (`logits`) is returned whatever the kind.
            kind: "mean" over the grid, or "cls" for the class token. Where each frame of a
                clip has a class token, it is their mean.

        Raises:
            MissingInput: the site is not stored.
            SiteError: the site has no class token, or no tokens at all.
        """
        spec = self.site(site)
        if spec.kind == "vector":
            return self.array(f"vectors/{spec.name}")
        path = f"pooled/{spec.name}/{kind}"
        if path not in self.arrays:
            lacking = "class token" if kind == "cls" else f"pooled {kind!r}"
            tokens = "no token layout"
            if spec.layout is not None:
                tokens = describe_layout(spec.layout)
            raise SiteError(
                f"{self.label}: {spec.name} has no {lacking}: it has {tokens}"
            )
        return self.array(path)

    def vectors(self, name: str) -> LazyArray:
        """Return a site without tokens (`pooled`, `logits`), (images, dim) float32.

        Raises:
            MissingInput: the store has no such vector.
        """
        name = self.site(name).name
        return self.array(
            f"vectors/{name}", missing=f"{self.label}: {name} is no vector, read its acts"
        )

    def grams(self, site: str) -> LazyArray:
        """Return the Gram matrices X X^T of a site within each slab.

        X has one row for each image of the slab: all tokens of the site, flattened, minus
        their mean over the slab's valid images.

        Returns:
            (slabs, images of a slab, images of a slab) float32; NaN in the rows and columns
            of invalid images and of those beyond the last image.

        Raises:
            MissingInput: the matrices are not stored, or the site is a vector, which has none.
        """
        spec = self.site(site)
        if spec.kind == "vector":
            why = f"{spec.name} is a vector, kept whole: read vectors"
        else:
            why = f"extract it with --grams {NEW_STORE}"
        missing = f"{self.label} has no Gram matrices of {spec.name} ({why})"
        return self.array(f"grams/{spec.name}/all", missing=missing)

    def erf(self, site: str) -> LazyArray:
        """Return the sums of a site's effective receptive field in the first slabs.

        The field of an image is |d centre / d input| at each input pixel, added up over RGB,
        where centre is the activation in the middle of the site's grid. A slab's sum is over
        the images that `erf_counts` counts. Source: Luo et al. 2016, "Understanding the
        Effective Receptive Field in Deep Convolutional Neural Networks".

        Returns:
            (slabs with receptive fields, height, width) float32.

        Raises:
            MissingInput: the store has no receptive fields, or none of this site.
        """
        name = self.site(site).name
        reason = None
        if self.plan.erf is not None:
            reason = self.manifest.left_out.get(f"{name} erf")
        why = why_absent(reason, option="--erf 256")
        missing = f"{self.label} has no receptive field of {name} ({why})"
        return self.array(f"erf/{name}", missing=missing)

    def erf_counts(self) -> LazyArray:
        """Return how many valid images each sum of `erf` is over.

        Returns:
            (slabs with receptive fields,) int64; 0 for a slab that is not committed.

        Raises:
            MissingInput: the store has no receptive fields.
        """
        how = f"extract them with --erf 256 {NEW_STORE}"
        return self.array(
            "erf/count", missing=f"{self.label} keeps no receptive fields ({how})"
        )

    def weights(self, name: str) -> NDArray[np.float32]:
        """Return one of the model's small weights, in memory.

        Args:
            name: `filters`, `positions`, `head_kernel`, `head_bias`, `head_norm_scale` or
                `head_norm_bias`. FORMAT.md says what they are.

        Raises:
            MissingInput: the weights are not stored; with the reason, if extract recorded one.
        """
        record = "head_weights" if name.startswith("head_") else "input_weights"
        absent = (self.manifest.info.get(record) or {}).get("absent")
        # A classifier is kept or left out as a whole, so its record has one reason; weights
        # of the input have one reason each.
        reason = absent.get(name) if isinstance(absent, dict) else absent
        missing = f"{self.label} has no weights {name}"
        if reason:
            missing += f": {reason}"
        return self.array(f"weights/{name}", missing=missing)[:]

    @property
    def attention_blocks(self) -> list[AttentionGroup]:
        """The blocks with attention summaries, by token layout; empty without any."""
        return list(self.plan.attention)

    def attention(self, name: str, group: str = "") -> LazyArray:
        """Return an attention summary of each image.

        FORMAT.md lists them. Examples are `distance_px` (images, blocks, heads), which is NaN
        beyond a block's own heads; `rollout` (images, tokens); and `full/blocks.3` (images,
        heads, tokens, tokens).

        Args:
            name: path of the array below `attention/`.
            group: `prefix` of one of `attention_blocks`, for a token layout other than the
                first.

        Raises:
            MissingInput: the summary is not stored; names the extract option that adds it.
            SiteError: images do not fill their canvas, and the summary is over grid cells.
        """
        path = f"attention/{group}/{name}" if group else f"attention/{name}"
        left_out = self.manifest.left_out
        reason = left_out.get("attention") or left_out.get(name)
        if reason:
            missing = f"{self.label} has no {path}: it was left out: {reason}"
        else:
            level = "summary"
            if name in ("cls_rows", "received_rows"):
                level = "rows"
            elif name.startswith("full/"):
                level = "full"
            how = f"extract it with --attention {level} {NEW_STORE}"
            missing = f"{self.label} has no {path} ({how})"
        summary = self.array(path, missing=missing)
        canvas = self.plan.canvas
        if canvas is not None and canvas.own_grids and name not in BY_IMAGE:
            raise no_whole_grid(self)
        return summary

    def attention_sums(self, name: str, group: str = "") -> LazyArray:
        """Return an attention summary that is summed over the valid images of each slab.

        These are `aligned` (slabs, blocks, heads, dy, dx), and `cls_map` and `received`
        (slabs, blocks, heads, tokens). The array `n_valid` counts the images of each sum.

        Raises:
            MissingInput: the summary is not stored; names the extract option that adds it.
        """
        return self.attention(name, group)

    def residual(self, sublayer: str) -> LazyArray:
        """Return the inner products z.z, f.f and z.f of a sublayer's skip z and branch f.

        Args:
            sublayer: name of the residual sum, such as `blocks.3.attn`.

        Returns:
            (images, tokens, 3) float32, prefix tokens first.

        Raises:
            MissingInput: the products are not stored.
        """
        why = why_absent(self.manifest.left_out.get("residual"), option="--residual")
        names = [name for name, _ in self.plan.sublayers]
        if names:
            ellipsis = ", ..." if len(names) > MAX_NAMES else ""
            why = f"it has: {', '.join(names[:MAX_NAMES])}{ellipsis}"
        missing = f"{self.label} has no residual summary of {sublayer} ({why})"
        return self.array(f"residual/{sublayer}", missing=missing)

    def inputs(self) -> LazyArray:
        """Return the normalised pixels, as the model saw them.

        Returns:
            (images, 3, H, W) float32; of clips (clips, frames, 3, H, W).

        Raises:
            MissingInput: the store has no pixels.
            StoreError: the manifest does not record how they were normalised.
        """
        missing = f"{self.label} keeps no pixels (extract it with --inputs {NEW_STORE})"
        pixels = self.array("input", missing=missing)
        mean = self.manifest.transform.get("mean") or []
        std = self.manifest.transform.get("std") or []
        if not len(mean) == len(std) == 3 or 0 in std:
            raise StoreError(
                f"{self.place} does not say with what mean and std it was normalised"
            )
        return NormalisedInputs(pixels, self.valid, mean, std)

    def slabs(self, images: int | None = None) -> Iterator[Slab]:
        """Yield the committed slabs in order.

        Args:
            images: number of leading rows to yield; the last slab is cut there. By default
                all rows.
        """
        stop = self.n_images
        if images is not None:
            stop = min(images, stop)
        for k in range(self.n_slabs):
            rows = self.plan.rows(k)
            if self.committed[k] and rows.start < stop:
                yield Slab(self, k, slice(rows.start, min(rows.stop, stop)))


@dataclass(frozen=True)
class Slab:
    """Consecutive rows of a store: the unit of reading.

    It has the methods of `Store`, which return arrays in memory that are cut to these rows.
    `grams` is (rows, rows) here. `attention_sums` has no rows: it is the sum over the slab's
    valid images, those beyond `rows` too.

    Attributes:
        store: the store that the rows belong to.
        k: index of the slab.
        rows: rows of the store; fewer than the slab's if `Store.slabs` was given a number of
            images.
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
        """Return the activations of one site, (rows, ...) as `Store.acts` shapes them."""
        return self.store.acts(site, tokens, partial=partial)[self.rows]

    def pooled(self, site: str, kind: str = "mean") -> NDArray[Any]:
        """Return a site's "mean" or "cls" vectors, (rows, dim) float32."""
        return self.store.pooled(site, kind)[self.rows]

    def vectors(self, name: str) -> NDArray[Any]:
        """Return a site without tokens (`pooled`, `logits`), (rows, dim) float32."""
        return self.store.vectors(name)[self.rows]

    def attention(self, name: str, group: str = "") -> NDArray[Any]:
        """Return an attention summary of each image, (rows, ...)."""
        return self.store.attention(name, group)[self.rows]

    def attention_sums(self, name: str, group: str = "") -> NDArray[Any]:
        """Return an attention summary that is summed over the slab, (blocks, heads, ...)."""
        return self.store.attention_sums(name, group)[self.k]

    def grams(self, site: str) -> NDArray[Any]:
        """Return the Gram matrix of a site within the slab, (rows, rows) float32."""
        return self.store.grams(site)[self.k, : len(self), : len(self)]

    def residual(self, sublayer: str) -> NDArray[Any]:
        """Return z.z, f.f and z.f of a sublayer, (rows, tokens, 3) float32."""
        return self.store.residual(sublayer)[self.rows]

    def inputs(self) -> NDArray[Any]:
        """Return the normalised pixels, (rows, 3, H, W) float32; of clips with frames."""
        return self.store.inputs()[self.rows]


# ---------------- opening and pickling


def open_store(
    path: str | os.PathLike[str] | Url,
    *,
    allow_partial: bool = False,
    label: str | None = None,
) -> Store:
    """Open the store at `path` for reading.

    Args:
        path: folder of the store, or its URL (`s3://bucket/runs/b16.zarr`).
        allow_partial: whether to open an unfinished store, too. Only its committed slabs are
            read then. A generation that is being added to a complete store is not read before
            it is complete.
        label: name of the store in tables and figures; by default the folder's name without
            its suffix.

    Raises:
        StoreError: `path` is missing, not a vitsee store, of another format version, or
            damaged.
        IncompleteStore: the store is unfinished and `allow_partial` is False, or it has no
            slab yet.

    Examples:
        >>> import vitsee
        >>> store = vitsee.open_store("vit.zarr")
        >>> len(store.samples), sorted(store.sites)[:2]
        (200, ['blocks.0.in', 'blocks.0.out'])
        >>> store.acts("blocks.3.out", tokens="patches").shape  # (images, rows, cols, dim)
        (200, 8, 8, 96)
    """
    return _open_generations(path, allow_partial, label, max_generations=None)


def _open_generations(
    path: str | os.PathLike[str] | Url,
    allow_partial: bool,
    label: str | None,
    max_generations: int | None,
) -> Store:
    """Open the store at `path` as it was when it had at most `max_generations` generations."""
    first, *later = read_generations(files_at(path))[:max_generations]
    # The first generation counts even unfinished: it then is the whole (partial) store.
    generations = [first]
    generations += [generation for generation in later if generation.published]
    slabs = committed(generations)
    unfinished = [generation for generation in generations if not generation.complete]
    if unfinished:
        generation = unfinished[0]
        flags = generation.committed
        are = "slab is" if len(flags) == 1 else "slabs are"
        count = f"{flags.sum()} of {len(flags)} {are} committed"
        progress = f"{generation.files} is incomplete: {count}"
        if not allow_partial:
            raise IncompleteStore(
                f"{progress} (repeat the vitsee extract command to go on, or read those "
                "with --allow-partial)"
            )
        if not slabs.any():
            raise IncompleteStore(
                f"{progress} (repeat the vitsee extract command to go on)"
            )
    return Store(generations, slabs, complete=not unfinished, label=label)


def _pickle_as_address(store: Store) -> tuple[Any, ...]:
    """Reduce a store to its address and identity, for `pickle`."""
    flags = None
    if not store.complete:
        flags = np.packbits(store.committed).tobytes()
    # Absolute, as the process that unpickles may have another working directory.
    address = store.place.absolute()
    store_id = store.manifest.store_id
    return _reopen, (address, store.label, store_id, store.generation, flags)


# Cached, so that a process that unpickles one store many times opens it once.
@lru_cache(maxsize=16)
def _reopen(
    place: Place, label: str, store_id: str, generation: int, flags: bytes | None
) -> Store:
    """Open a pickled store again, with the generations that it had.

    Args:
        flags: packed bits of the slabs that were committed when an unfinished store was
            pickled, so that all workers read the same slabs; None for a complete store.

    Raises:
        StoreMismatch: another store is at the place now.
    """
    store = _open_generations(
        place,
        allow_partial=flags is not None,
        label=label,
        max_generations=generation,
    )
    if (store.manifest.store_id, store.generation) != (store_id, generation):
        raise StoreMismatch(f"{place} was replaced by another store during the work")
    if flags is None:
        return store
    bits = np.unpackbits(np.frombuffer(flags, np.uint8), count=store.n_slabs)
    return Store(store.generations, bits.astype(bool), complete=False, label=label)


copyreg.pickle(Store, _pickle_as_address)
