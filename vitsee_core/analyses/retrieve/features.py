"""The vectors of one site in the stores of a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitsee_core.analyses.retrieve.rows import Search
from vitsee_core.features import SiteFeatures, check_alike, choose_features
from vitsee_core.labels.labelled_rows import random_pieces
from vitsee_core.types import Float32, Mask

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store


@dataclass(frozen=True)
class RandomFeatures:
    """Standard normal vectors of `dim` channels instead of a store's, one for each of its rows."""

    store: Store
    dim: int
    seed: tuple[int, ...]
    selection: str = ""

    def vectors(self, rows: Mask, *, jobs: int, memory: int) -> Iterator[Float32]:
        """(images, dim) of the rows in a mask, in pieces; see `SiteFeatures.vectors`."""
        start = 0
        for piece in random_pieces(len(rows), self.dim, self.seed):
            yield piece[rows[start : start + len(piece)]]
            start += len(piece)


@dataclass(frozen=True)
class Features:
    """One vector per image, for the images, the queries and the distractors. name: in words."""

    name: str
    images: SiteFeatures | RandomFeatures
    queries: SiteFeatures | RandomFeatures
    distractors: tuple[SiteFeatures | RandomFeatures, ...]

    @classmethod
    def random(cls, search: Search, dim: int, seed: int) -> Features:
        """Random vectors; a store has the same ones as images and as queries."""
        order = list(dict.fromkeys(store.manifest.store_id for store in search.stores))
        images, queries, *distractors = (
            RandomFeatures(store, dim, (seed, order.index(store.manifest.store_id)))
            for store in search.stores
        )
        return cls("random features", images, queries, tuple(distractors))

    @classmethod
    def of(cls, search: Search, site: SiteSpec, tokens: str | None) -> Features:
        """The same tokens of a site in every store.

        Raises:
            MissingInput: a store lacks the site or the tokens.
            StoreMismatch: it has other channels there.
            SiteError: the tokens are several vectors per image.
        """
        images, queries, *distractors = (
            choose_features(store, site, tokens, among=search.stores, one_vector=True)
            for store in search.stores
        )
        for other in (queries, *distractors):
            check_alike(images, other)
        return cls(site.name, images, queries, tuple(distractors))
