"""The tokens of a site that interventions replace, and their new values, from a store of the
unchanged model.

mean: over the store's valid images, of the same token. noise: Gaussian with that mean and the
variance of each channel of that token; drawn for each image by its place in the data set, so that
it does not depend on batches, shards and resumption. shuffle: the same token of another image; the
valid images form one cycle in random order, so that no image gets its own.

Register neurons, whose activations move to added registers, are those of the hidden layers of MLPs
that are most active at patches of outlying norm (Jiang et al. 2025, arXiv 2506.08010).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.intervention_spec import COUNTED
from vitsee_core.runtime.machine import memory_bytes
from vitsee_stores import Store
from vitsee_stores.layout import SiteSpec, TokenLayout
from vitsee_stores.manifest import jsonable
from vitsee_stores.weights_names import weights_name

Places = NDArray[np.int64]
# Images that are converted to float64 together.
ROWS_AT_ONCE = 32
HELD_SHARE = 8  # a site up to this part of the memory is read once
# (images, chosen tokens, dim)
Array = NDArray[np.float32]
N_MAD = 6 * 1.4826  # as of `outlier_share_mad` of vitsee norms
Neurons = Mapping[str, NDArray[np.int64]]


@dataclass(frozen=True)
class TokenChoice:
    """The same tokens of every image (`fixed`), or of each image `n` patch tokens: those of largest
    norm ("outliers"), or drawn for each image ("random")."""

    layout: TokenLayout
    fixed: Places
    kind: str = ""
    n: int = 0

    @property
    def of_prefix(self) -> bool:
        """Whether they are prefix tokens in every image."""
        return not self.kind and bool((self.fixed < self.layout.n_prefix).all())

    def of(self, x: Tensor, draws: Sequence[np.random.Generator]) -> Places:
        """Return the places (images, chosen) of the tokens of x (images, tokens, dim).

        draws: one generator for each image.
        """
        if self.kind == "outliers":
            norms = torch.linalg.vector_norm(x[:, self.layout.n_prefix :].float(), dim=-1)
            # Stable, so that equal norms give the same tokens on every device.
            order = norms.sort(dim=1, descending=True, stable=True).indices[:, : self.n]
            return order.cpu().numpy() + self.layout.n_prefix
        # The same generators draw the noise afterwards, so the order of these draws is
        # part of it.
        if self.kind == "random":
            n_body = self.layout.n_body
            drawn = [draw.choice(n_body, self.n, replace=False) for draw in draws]
            return np.stack(drawn) + self.layout.n_prefix
        return np.repeat(self.fixed[None], len(x), axis=0)


def choose_tokens(words: Sequence[str], layout: TokenLayout, what: str) -> TokenChoice:
    """Return the tokens that these words name in a layout; `what` begins the errors.

    Raises:
        ModelError: the layout has no such tokens, or fewer.
    """
    # "outliers:4" and "random:4" are chosen image by image; all other words name fixed
    # tokens.
    kind, _, number = words[0].partition(":")
    if kind in COUNTED:
        if layout.grid is None or int(number) > layout.n_body:
            raise ModelError(f"{what}: {words[0]}, and there are {_patches(layout)}")
        return TokenChoice(layout, np.zeros(0, np.int64), kind, int(number))
    # Words may overlap ("all,cls").
    places = sorted(
        {int(place) for word in words for place in places_of(word, layout, what)}
    )
    return TokenChoice(layout, np.array(places, np.int64))


def places_of(word: str, layout: TokenLayout, what: str) -> Places:
    """Return the places of one kind of tokens: `all`, `patches`, `prefix`, `registers` (reg0, reg1,
    ...), or one prefix token by its name (`cls`).

    Raises:
        ModelError: the layout has none of these.
    """
    every = np.arange(layout.n_tokens)
    found = every[:0]
    if word == "all":
        found = every
    elif word == "patches" and layout.grid is not None:
        found = every[layout.n_prefix :]
    elif word == "prefix":
        found = every[: layout.n_prefix]
    elif word == "registers":
        found = np.array(
            [i for i, name in enumerate(layout.prefix) if name.startswith("reg")], int
        )
    elif word in layout.prefix:
        found = every[layout.prefix.index(word) :][:1]
    if not len(found):
        prefix = (
            f"prefix tokens {', '.join(layout.prefix)}"
            if layout.prefix
            else "no prefix tokens"
        )
        raise ModelError(
            f"{what}: there are no tokens {word!r}; there are {prefix} and "
            f"{_patches(layout)}"
        )
    return found


def _patches(layout: TokenLayout) -> str:
    """Return the tokens behind the prefix in words: "14x14 patches"."""
    if layout.grid is None:
        return f"{layout.n_body} other tokens on no grid"
    return f"{layout.grid[0]}x{layout.grid[1]} patches"


class Reference:
    """Replacements for the tokens of one site: "mean", "noise" or "shuffle" of a plain store, as
    `check_base` takes it. tokens: which will be asked for."""

    def __init__(
        self, store: Store, site: str, kind: str, tokens: TokenChoice, seed: int
    ) -> None:
        self.store = store
        self.site = site
        self.kind = kind
        self.seed = seed
        # Prefix tokens come first, so that their places are the same in both; fewer bytes
        # are read.
        self.stored_tokens = "prefix" if tokens.of_prefix else "all"
        if kind == "shuffle":
            self.partners = cycle(store.valid, seed)
            self.array = store.acts(site, self.stored_tokens)
            self.is_in_memory = self.array.size_bytes <= memory_bytes() // HELD_SHARE
            # (rows, tokens, dim), all rows of the store or the replacements of some new rows
            self.held: NDArray[Any] | None = self.array[:] if self.is_in_memory else None
            # row of the new store whose replacement is held[0]
            self.first_held_row = 0
        else:
            self.mean, self.std = self._moments()

    def begin(self, rows: slice) -> None:
        """Read ahead what these rows of the new store will need, if it is not in memory."""
        if self.kind == "shuffle" and not self.is_in_memory:
            # (rows, tokens, dim) of each row's partner, in the order of the rows.
            self.held = self.array[self.partners[rows]]
            self.first_held_row = rows.start

    def of(self, rows: Places, places: Places, draws: list[np.random.Generator]) -> Array:
        """Return the replacements (images, chosen, dim) for these rows of the new store.

        Args:
            rows: (images,) rows, for "shuffle" among those that `begin` got last.
            places: (images, chosen) tokens.
            draws: one generator for each image.
        """
        if self.kind == "shuffle":
            assert self.held is not None
            if self.is_in_memory:
                held_rows = self.partners[rows]
            else:
                held_rows = rows - self.first_held_row
            values = np.take_along_axis(self.held[held_rows], places[:, :, None], 1)
            return values.astype(np.float32)
        # (images, chosen, dim)
        values = self.mean[places]
        if self.kind == "noise":
            # A generator for each image: the numbers do not depend on the batch that it
            # is in.
            shape = values.shape[1:]
            normal = np.stack([draw.standard_normal(shape, np.float32) for draw in draws])
            values = values + self.std[places] * normal
        return values

    def _moments(self) -> tuple[Array, Array]:
        """Return mean and standard deviation over the valid images, both (tokens, dim)."""
        # Means and sums of squares of pieces are merged (Chan et al. 1983): a single
        # pass, without the cancellation of E[x^2] - E[x]^2. 0-d arrays take the shape of
        # the first piece.
        n = 0
        mean = np.zeros(())
        squares = np.zeros(())
        for slab in self.store.slabs():
            values = slab.acts(self.site, self.stored_tokens)[slab.valid]
            for start in range(0, len(values), ROWS_AT_ONCE):
                part = values[start : start + ROWS_AT_ONCE].astype(np.float64)
                # (tokens, dim)
                own = part.mean(0)
                total = n + len(part)
                gap = own - mean
                squares = (
                    squares
                    + ((part - own) ** 2).sum(0)
                    + gap**2 * (n * len(part) / total)
                )
                mean = mean + gap * (len(part) / total)
                n = total
        if not n:
            raise ModelError(
                f"{self.store.label} has no readable image to take the {self.kind} of"
            )
        return mean.astype(np.float32), np.sqrt(squares / n).astype(np.float32)


def generators(
    seed: int, about: str, index: NDArray[np.int64]
) -> list[np.random.Generator]:
    """Return one generator for each image, by its place in the data set and what is replaced."""
    # Not hash(), which differs from one Python process to the next.
    own = zlib.crc32(about.encode())
    return [np.random.default_rng([seed, own, int(place)]) for place in index]


def cycle(valid: NDArray[np.bool_], seed: int) -> NDArray[np.int64]:
    """Return the row (rows,) that replaces each row: the next valid one in a random order of them,
    the first one for the last. Rows that are not valid get the first valid one.

    Raises:
        ModelError: fewer than two valid images.
    """
    # A single cycle rather than a permutation, which may leave an image its own tokens.
    rows = np.flatnonzero(valid)
    if len(rows) < 2:
        raise ModelError("shuffle takes another image's tokens, and there is one image")
    order = np.random.default_rng([seed, len(valid)]).permutation(rows)
    # Rows without a readable image are computed as well, and need some partner.
    partners = np.full(len(valid), rows[0], np.int64)
    partners[order] = np.roll(order, -1)
    return partners


def check_base(store: Store, identity: Mapping[str, Any], kind: str, what: str) -> None:
    """Refuse a store whose activations are not those of the same unchanged model. identity: of the
    new store; `what` begins the error.

    Raises:
        ModelError: another model, other weights, skips or preprocessing, interventions; for
            shuffle also other images or another order.
    """
    own = store.manifest.identity
    identity = jsonable(dict(identity))
    differs = {
        "another model": own.get("model") != identity["model"],
        f"other weights ({weights_name(store.manifest.model) or 'unknown'})": own.get(
            "weights"
        )
        != identity["weights"],
        "other skip connections": (own.get("ablate_skip") or [])
        != identity["ablate_skip"],
        "interventions of its own": bool(own.get("interventions")),
        "another transform": own.get("transform") != identity["transform"],
    }
    if kind == "shuffle":
        # Mean and noise may come from other images (a training set's).
        fingerprints = (own.get("samples_fingerprint"), identity["samples_fingerprint"])
        differs["other images, or the same in another order"] = (
            fingerprints[0] != fingerprints[1]
        )
    found = next((words for words, there in differs.items() if there), None)
    if found is not None:
        raise ModelError(
            f"{what}: {store.label} has {found}; expected a plain extraction with this "
            f"model and transform{', of these images' if kind == 'shuffle' else ''}"
        )


def check_site(store: Store, site: SiteSpec, what: str) -> str:
    """Return the name of the site in a store that has all of its tokens.

    Raises:
        MissingInput: it is not stored, or pooled only.
        ModelError: its tokens are others.
    """
    own = store.site(site.name)
    # Raises MissingInput here, before a model runs, if the tokens are not all stored.
    store.acts(own.name)
    if own.shape != site.shape:
        raise ModelError(
            f"{what}: {site.name} is {site.shape}, in {store.label} {own.shape}"
        )
    return own.name


@dataclass(frozen=True)
class Moved:
    """The activations of these neurons of one site, at each image, move to the tokens `places`,
    which all get the largest one of all tokens; the other tokens get 0."""

    places: NDArray[np.int64]
    neurons: NDArray[np.int64]

    def put(self, x: Tensor) -> None:
        """Change a site's (images, tokens, neurons) in place."""
        # (images, tokens, chosen neurons)
        values = x[:, :, self.neurons]
        moved = torch.zeros_like(values)
        moved[:, self.places] = values.amax(1, keepdim=True)
        x[:, :, self.neurons] = moved


def register_neurons(store: Store, site: str, hidden: Sequence[str], n: int) -> Neurons:
    """Return the n neurons of these sites with the largest mean activation at outliers, by site in
    the order of `hidden`; of equal ones the first.

    Outliers are the patches of all valid images whose norm at `site` is above median + 6 x 1.4826
    median absolute deviations of them all.

    Raises:
        MissingInput: a site is not stored with all of its tokens.
        ModelError: there are no outliers, or fewer than n neurons.
    """
    outliers = _outliers(store, site)
    means = {name: _means(store, name, outliers) for name in hidden}
    total = sum(map(len, means.values()))
    if n > total:
        raise ModelError(f"there are {total} neurons up to {site}, not {n}")
    # (all neurons,) of the sites one after the other: the largest of all sites together.
    values = np.concatenate(list(means.values()))
    chosen = np.zeros(total, np.bool_)
    chosen[np.argsort(-values, kind="stable")[:n]] = True
    # Back to the sites, each with the indices of its own neurons.
    ends = np.cumsum([len(x) for x in means.values()])[:-1]
    parts = zip(means, np.split(chosen, ends), strict=True)
    return {name: np.flatnonzero(part) for name, part in parts if part.any()}


def other_neurons(found: Neurons, sizes: Mapping[str, int], seed: int) -> Neurons:
    """Return the same number of neurons of each site, drawn from those of its `sizes[site]` that
    were not found.

    Raises:
        ModelError: so many others do not exist.
    """
    drawn: dict[str, Any] = {}
    for i, (name, neurons) in enumerate(found.items()):
        # As many of each layer as there are register neurons in it: the control differs
        # in nothing else.
        others = np.setdiff1d(np.arange(sizes[name]), neurons)
        if len(others) < len(neurons):
            raise ModelError(
                f"{name} has {len(others)} other neurons, not {len(neurons)}"
            )
        draw = np.random.default_rng([seed, i])
        drawn[name] = np.sort(draw.choice(others, len(neurons), replace=False))
    return drawn


def _outliers(store: Store, site: str) -> list[NDArray[np.bool_]]:
    """Return a mask for each slab, (valid images, rows, cols): whether a patch is an outlier."""
    norms = []
    for slab in store.slabs():
        patches = slab.acts(site, "patches")[slab.valid]
        norms.append(np.linalg.norm(patches.astype(np.float32), axis=-1))
    # Of all images together: single images may have no outlier, and need not have one.
    every = np.concatenate([x.ravel() for x in norms]) if norms else np.zeros(0)
    middle = np.median(every) if len(every) else 0.0
    above = middle + N_MAD * np.median(np.abs(every - middle)) if len(every) else 0.0
    outliers = [x > above for x in norms]
    if not any(x.any() for x in outliers):
        raise ModelError(
            f"no patch of {site} in {store.label} has an outlying norm, above "
            f"{above:.4g}; expected a site with outliers (run: vitsee norms "
            f"{store.label}.zarr)"
        )
    return outliers


def _means(
    store: Store, site: str, outliers: Sequence[NDArray[np.bool_]]
) -> NDArray[np.float64]:
    """Return the mean activation (neurons,) at the outliers."""
    total = np.zeros(())
    count = 0
    for slab, there in zip(store.slabs(), outliers, strict=True):
        if there.any():
            # (outliers of the slab, neurons)
            values = slab.acts(site, "patches")[slab.valid][there]
            total = total + values.sum(0, dtype=np.float64)
            count += len(values)
    return np.asarray(total / count)
