"""A representation: some tokens of a site of a store, as one feature matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from vitsee_core.features import FeatureMatrix, SiteFeatures
from vitsee_core.features.clamped import clamped
from vitsee_stores.errors import MissingInput
from vitsee_stores.token_selection import TokenSelection

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store


@dataclass(frozen=True)
class Representation:
    """The features of one site of a store: its tokens' channels, flattened.

    An example is an image, its features are token x channel; tokens are never examples. `cls` and
    `mean` are read from the pooled vectors, in float32; a vector site is read as it is.

    Args:
        store: an open store.
        site: one of its sites, or an alias.
        tokens: "all", "patches", "cls", "prefix", "mean", "mean-all", "first", "rest", "ROW,COL".
        channels: only these channels of every token.
        clamp: values are limited to [-clamp, clamp]; None: unchanged.

    Raises:
        MissingInput: the store has neither these tokens nor within-slab Gram blocks of them.
        SiteError: the site has no such tokens.
    """

    store: Store
    site: SiteSpec
    tokens: str = "all"
    channels: slice | None = None
    clamp: float | None = None

    def __post_init__(self) -> None:
        if not self.has_blocks_only:
            _ = self.features  # raises now what cannot be read later

    @property
    def stored(self) -> SiteSpec:
        """The stored site: the one an alias equals."""
        return self.store.site(self.site.name)

    @property
    def has_blocks_only(self) -> bool:
        """Whether the store has not the features, only their Gram matrix within each slab."""
        site = self.stored
        return (
            site.kind != "vector"
            and site.tokens != "all"
            and self.tokens == "all"
            and self.channels is None
            and self.clamp is None
            and self.store.has(f"grams/{site.name}/all")
        )

    @cached_property
    def features(self) -> FeatureMatrix:
        chosen = SiteFeatures(self.store, self.stored, TokenSelection.parse(self.tokens))
        try:
            matrix = chosen.matrix(self.channels)
        except MissingInput as error:
            raise MissingInput(f"{error}, or with --grams where all tokens are compared") from None
        return matrix if self.clamp is None else clamped(matrix, self.clamp)
