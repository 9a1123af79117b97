"""The contents of a store: images, sites by name, arrays by path; what two stores share."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.errors import MissingInput, SiteError, StoreMismatch
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
from vitsee_stores.url import require_folder


class StoreContents:
    """The contents of a store: its images, sites and arrays.

    `Store` adds the methods that return arrays by their meaning.

    Attributes:
        place: folder or URL of the store.
        label: name of the store in tables and figures.
        generations: the store as it was made, and what was added to it since.
        manifest: manifest of the store made of all generations.
        plan: the planned contents in that manifest.
        committed: (slabs,) which slabs can be read. Rows of the others read as NaN, 0 and not
            valid, and `slabs()` skips them.
        complete: whether every slab is committed and every generation published.
        sites: name -> site, aliases included.
        chunks: the verified chunks that arrays are read from.
        arrays: path -> spec of every array.
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
        if label is None:
            label = self.place.absolute().stem
        self.label = label
        self.manifest: Manifest = generations[-1].combined
        self.plan = self.manifest.plan
        self.committed = committed
        self.complete = complete
        self.sites: dict[str, SiteSpec] = {site.name: site for site in self.plan.sites}
        self.chunks: VerifiedChunks
        if len(generations) == 1:
            self.chunks = VerifiedChunks(self.files, self.manifest)
        else:
            self.chunks = GrownChunks(generations)
        self.arrays: dict[str, ArraySpec] = self.chunks.specs

    @property
    def model(self) -> dict[str, Any]:
        """The model in the manifest: name, weights, transform, input size."""
        return dict(self.manifest.model)

    def __repr__(self) -> str:
        state = "" if self.complete else ", incomplete"
        contents = f"{self.n_images} images, {len(self.sites)} sites"
        return f"<Store {self.label}: {contents}{state}>"

    def _repr_html_(self) -> str:
        """Notebook display: a summary and the sites."""
        state = "" if self.complete else ", incomplete"
        model = self.manifest.model.get("name", "")
        caption = f"{self.label}: {model}, {self.n_images} images{state} ({self.place})"
        return site_table(caption, self.sites.values())

    @property
    def path(self) -> Path:
        """The store's folder. Raises StoreError: it is at a URL; `place` works for any store."""
        return require_folder(self.place)

    @property
    def zarr(self) -> Any:
        """Read-only zarr-python group of the store as it was made.

        It ignores commits and their checksums. What was added to the store since is in groups
        of its own (`generations/2`).
        """
        # Here, as reading a store without zarr must not pay for its import.
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
        used = {
            generation.number: list(generation.markers) for generation in self.generations
        }
        return revision(self.generations, used)

    def revision_of(self, site: str) -> str:
        """Return a digest of the commit markers of the slabs that a site is read from.

        It changes when one of them is rewritten or added, and not when other sites are added.
        """
        name = self.site(site).name
        used = {1: list(range(self.n_slabs))}
        if isinstance(self.chunks, GrownChunks):
            # All arrays of a site are in the same generations: one stands for the site.
            prefixes = (f"acts/{name}", f"vectors/{name}", f"pooled/{name}")
            path = next(path for path in self.arrays if path.startswith(prefixes))
            used = self.chunks.used(path)
        return revision(self.generations, used)

    @cached_property
    def samples(self) -> StoreSamples:
        """Ids, labels, splits, hashes and sizes of the images in the store's order."""
        arrays = self.chunks.samples()
        split_names = np.array(self.manifest.splits, np.str_)
        pixel_hash = None
        if self.plan.pixel_hashes:
            pixel_hash = self.array("pixel_hash")[:]
        return StoreSamples(
            index=arrays["samples/index"],
            label=arrays["samples/label"],
            split=split_names[arrays["samples/split"]],
            hash=self.array("hash")[:],
            valid=self.valid,
            size=self.array("size")[:],
            box=arrays.get("samples/box"),
            encoded_id=arrays["samples/id"],
            pixel_hash=pixel_hash,
        )

    @cached_property
    def sizes(self) -> NDArray[np.int32]:
        """(images, 2) height and width of each original image as decoded.

        They are 0 if the image could not be read or its slab is not committed. FORMAT.md says
        when EXIF orientation is applied.

        Raises:
            MissingInput: the store does not record sizes.
        """
        sizes: NDArray[np.int32] = self.array("size")[:]
        if (sizes[self.valid] < 1).any():
            raise MissingInput(
                f"{self.label} does not say how large its original images are; extract "
                "anew"
            )
        return sizes

    @cached_property
    def seconds(self) -> NDArray[np.float32]:
        """(clips,) median time in seconds between neighbouring sampled frames.

        It is NaN where a clip does not record it, and for images.
        """
        if self.plan.clip is None:
            return np.full(self.n_images, np.nan, np.float32)
        seconds: NDArray[np.float32] = self.array("seconds")[:]
        return seconds

    @cached_property
    def fills(self) -> NDArray[np.bool_]:
        """(images,) which images fill the model's input: all but those smaller than their canvas.

        Unreadable images count as filling it.

        Raises:
            MissingInput: the store has a canvas and does not record image sizes.
        """
        canvas = self.plan.canvas
        if canvas is None:
            return np.ones(self.n_images, np.bool_)
        return canvas.filled(self.sizes)

    # sites and arrays -------------------------------------------------------------------------

    def select(self, patterns: str | Sequence[str]) -> list[SiteSpec]:
        """Return the sites that patterns select, in the model's order.

        Args:
            patterns: names, globs, groups (`blocks`), or numbers from the end
                (`blocks.-1.out`); the grammar is that of vitsee_stores/selectors.py.

        Raises:
            SiteError: a pattern without a match.
        """
        if isinstance(patterns, str):
            patterns = [patterns]
        hint = f"vitsee info {shlex.quote(str(self.place))}"
        return select_names(
            patterns, self.plan.sites, owner=f"store, {self.label}", hint=hint
        )

    def site(self, name: str) -> SiteSpec:
        """Return the stored site with one name.

        Args:
            name: a name, or `blocks.-1.out`; for an alias the site that it equals is returned.

        Raises:
            MissingInput: the store does not hold the site.
            SiteError: the name selects several sites.
        """
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
        if site.alias_of:
            return self.sites[site.alias_of]
        return site

    def layout(self, site: str) -> TokenLayout | None:
        """Return the token layout of a site; None for a vector or a raw output."""
        return self.site(site).layout

    def has(self, path: str) -> bool:
        """Return whether the store has the array at this path (`attention/rollout`)."""
        return path in self.arrays

    def array(
        self, path: str, fixed: Mapping[int, int] | None = None, *, missing: str = ""
    ) -> StoredArray:
        """Return an array by its path.

        Args:
            path: path below the store's root (`attention/rollout`).
            fixed: axis -> index at which the array is cut; these axes are dropped.
            missing: message of the error if the store has no such array.

        Raises:
            MissingInput: the store has no such array.
        """
        if path not in self.arrays:
            raise MissingInput(missing or f"{self.label} has no array {path}")
        return StoredArray(self.chunks, self.arrays[path], self.committed, fixed)


# ---------------- the array of a selection of tokens

Tokens = str | tuple[int, ...]


def token_array(
    store: StoreContents, spec: SiteSpec, layout: TokenLayout, tokens: Tokens
) -> LazyArray:
    """Return the activations of selected tokens, for a site whose tokens are all stored.

    Args:
        store: the store.
        spec: the site.
        layout: token layout of the site.
        tokens: selection of tokens; the shapes are those of `Store.acts`.

    Raises:
        SiteError: the site has no such tokens.
    """
    owner = f"{store.label}: {spec.name}"
    prefix_path = f"acts/{spec.name}/prefix"
    body_path = f"acts/{spec.name}/grid"
    if layout.grid is None:
        body_path = f"acts/{spec.name}/rows"
    selection = TokenSelection.parse(tokens)
    token_indices = selection.require(layout, owner)
    if selection == "patches" and layout.grid is None:
        raise SiteError(
            f"{owner} has no tokens 'patches': it has {describe_layout(layout)}"
        )
    prefix = None
    if layout.prefix:
        prefix = store.array(prefix_path)
    if selection in ("all", "each", "mean-all", "rest"):
        all_tokens = TokenArray(prefix, store.array(body_path))
        if selection.is_mean:
            return LazyTokenMean(all_tokens, first=token_indices.start)
        return all_tokens
    if selection == "patches":
        return store.array(body_path)
    if selection == "prefix" and prefix is not None:
        return prefix
    if selection == "cls" and len(token_indices) > 1:
        # Each frame has a class token: the store has their mean.
        return store.array(f"pooled/{spec.name}/cls")
    # One token is left: an array cut at its index, without the axes of tokens.
    body_index = token_indices.start - layout.n_prefix
    if body_index < 0:
        return store.array(prefix_path, fixed={1: token_indices.start})
    cell = np.unravel_index(body_index, layout.body)
    return store.array(
        body_path, fixed={axis: int(i) for axis, i in enumerate(cell, start=1)}
    )


# ---------------- why a store lacks an array, and which option of extract adds it

# Summaries of attention that are one number for each image and head, whatever the image's
# grid.
BY_IMAGE = (
    "distance_px",
    "distance_px_raw",
    "distance_unit",
    "entropy",
    "prefix_mass",
    "query_std",
    "head_std",
    "qk_nmi",
    "n_queries",
)
# An existing store can grow by sites and images only; other arrays need another store.
NEW_STORE = "-o NEW.zarr"
MAX_NAMES = 12  # of sublayers in a message


def why_absent(reason: str | None, option: str) -> str:
    """Return why extract left an array out, or else the option that adds it."""
    if reason:
        return f"left out: {reason}"
    return f"extract it with {option} {NEW_STORE}"


def no_whole_grid(store: StoreContents) -> SiteError:
    """Return the error for reading tokens of images that do not fill their canvas."""
    assert store.plan.canvas is not None
    height, width = store.plan.canvas.size
    return SiteError(
        f"{store.label} has {(~store.fills).sum()} of {store.n_images} images that do "
        f"not fill its canvas of {width} x {height} pixels, and what is asked for reads "
        "tokens beside them too; expected images of one size, or, of commands that take "
        "it, --tokens mean, which leaves these out"
    )


# ---------------- pairs of stores


def require_paired(a: StoreContents, b: StoreContents) -> NDArray[np.bool_]:
    """Return which rows are valid in both of two stores of the same images.

    Returns:
        (images,) boolean.

    Raises:
        StoreMismatch: the stores hold other images or another order of them: ids or labels
            differ, or the encoded bytes of an image that both could read.
    """
    names = f"{a.label} and {b.label}"
    if a.manifest.samples_fingerprint != b.manifest.samples_fingerprint:
        raise StoreMismatch(
            f"{names} do not pair: {_first_difference(a, b)} (extract both from the same "
            "--data with the same --images, --seed and --order)"
        )
    both = a.valid & b.valid
    differing = np.flatnonzero(both & (a.samples.hash != b.samples.hash))
    if differing.size:
        row = int(differing[0])
        raise StoreMismatch(
            f"{names} do not pair: row {row} ({a.samples.id[row]}) was read from other "
            f"bytes, as were {differing.size} of {int(both.sum())} images (extract both "
            "from the same --data)"
        )
    return both


def _first_difference(a: StoreContents, b: StoreContents) -> str:
    """Describe the first difference between the samples of two stores."""
    if a.n_images != b.n_images:
        return f"{a.n_images} images against {b.n_images}"
    for column in ("id", "label"):
        a_values = getattr(a.samples, column)
        b_values = getattr(b.samples, column)
        rows = np.flatnonzero(a_values != b_values)
        if rows.size:
            row = int(rows[0])
            return f"the {column} in row {row} is {a_values[row]} against {b_values[row]}"
    return "their samples_fingerprints differ"
