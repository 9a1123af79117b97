"""Activations of the unchanged model, from a store, in place of others.

mean: over the store's valid images, of the same token. noise: Gaussian with that mean and the
variance of each channel of that token; drawn for each image by its place in the data set, so that
it does not depend on batches, shards and resumption. shuffle: the same token of another image; the
valid images form one cycle in random order, so that no image gets its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.interventions.tokens import Places, TokenChoice
from vitsee_core.runtime.machine import memory_bytes
from vitsee_stores import Store
from vitsee_stores.layout import SiteSpec
from vitsee_stores.manifest import jsonable
from vitsee_stores.weights_names import weights_name

ROWS_AT_ONCE = 32
HELD_SHARE = 8  # a site up to this part of the memory is read once
Array = NDArray[np.float32]


class Reference:
    """Replacements for the tokens of one site: "mean", "noise" or "shuffle" of a plain store, as
    `check_base` takes it. tokens: which will be asked for."""

    def __init__(self, store: Store, site: str, kind: str, tokens: TokenChoice, seed: int) -> None:
        self.store, self.site, self.kind, self.seed = store, site, kind, seed
        self.words = "prefix" if tokens.of_prefix else "all"
        if kind == "shuffle":
            self.partners = cycle(store.valid, seed)
            self.array = store.acts(site, self.words)
            self.whole = self.array.size_bytes <= memory_bytes() // HELD_SHARE
            self.held: NDArray[Any] | None = self.array[:] if self.whole else None
            self.first = 0
        else:
            self.mean, self.std = self._moments()

    def begin(self, rows: slice) -> None:
        """Read ahead what these rows of the new store will need, if it is not in memory."""
        if self.kind == "shuffle" and not self.whole:
            self.held, self.first = self.array[self.partners[rows]], rows.start

    def of(self, rows: Places, places: Places, draws: list[np.random.Generator]) -> Array:
        """(images, chosen, dim) of these rows of the new store. places: (images, chosen) tokens;
        draws: one generator for each image."""
        if self.kind == "shuffle":
            assert self.held is not None
            taken = self.held[self.partners[rows] if self.whole else rows - self.first]
            return np.take_along_axis(taken, places[:, :, None], 1).astype(np.float32)
        values = self.mean[places]
        if self.kind == "noise":
            shape = values.shape[1:]
            normal = np.stack([draw.standard_normal(shape, np.float32) for draw in draws])
            values = values + self.std[places] * normal
        return values

    def _moments(self) -> tuple[Array, Array]:
        """(tokens, dim) mean and standard deviation over the valid images."""
        n, mean, squares = 0, np.zeros(()), np.zeros(())
        for slab in self.store.slabs():
            values = slab.acts(self.site, self.words)[slab.valid]
            for start in range(0, len(values), ROWS_AT_ONCE):
                part = values[start : start + ROWS_AT_ONCE].astype(np.float64)
                own, total = part.mean(0), n + len(part)
                gap = own - mean
                squares = squares + ((part - own) ** 2).sum(0) + gap**2 * (n * len(part) / total)
                mean, n = mean + gap * (len(part) / total), total
        if not n:
            raise ModelError(f"{self.store.label} has no readable image to take the {self.kind} of")
        return mean.astype(np.float32), np.sqrt(squares / n).astype(np.float32)


def generators(seed: int, about: str, index: NDArray[np.int64]) -> list[np.random.Generator]:
    """One generator for each image, by its place in the data set and what is replaced."""
    own = zlib.crc32(about.encode())
    return [np.random.default_rng([seed, own, int(place)]) for place in index]


def cycle(valid: NDArray[np.bool_], seed: int) -> NDArray[np.int64]:
    """(rows,) the row that replaces each row: the next valid one in a random order of them, the
    last by the first. Rows that are not valid get the first valid one.

    Raises:
        ModelError: fewer than two valid images.
    """
    rows = np.flatnonzero(valid)
    if len(rows) < 2:
        raise ModelError("shuffle takes another image's tokens, and there is one image")
    order = np.random.default_rng([seed, len(valid)]).permutation(rows)
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
    own, identity = store.manifest.identity, jsonable(dict(identity))
    differs = {
        "another model": own.get("model") != identity["model"],
        f"other weights ({weights_name(store.manifest.model) or 'unknown'})": own.get("weights")
        != identity["weights"],
        "other skip connections": (own.get("ablate_skip") or []) != identity["ablate_skip"],
        "interventions of its own": bool(own.get("interventions")),
        "another transform": own.get("transform") != identity["transform"],
    }
    if kind == "shuffle":
        fingerprints = (own.get("samples_fingerprint"), identity["samples_fingerprint"])
        differs["other images, or the same in another order"] = fingerprints[0] != fingerprints[1]
    found = next((words for words, there in differs.items() if there), None)
    if found is not None:
        raise ModelError(
            f"{what}: {store.label} has {found}; expected a plain extraction with this model and "
            f"transform{', of these images' if kind == 'shuffle' else ''}"
        )


def check_site(store: Store, site: SiteSpec, what: str) -> str:
    """The name of the site in a store that has all of its tokens.

    Raises:
        MissingInput: it is not stored, or pooled only.
        ModelError: its tokens are others.
    """
    own = store.site(site.name)
    store.acts(own.name)
    if own.shape != site.shape:
        raise ModelError(f"{what}: {site.name} is {site.shape}, in {store.label} {own.shape}")
    return own.name
