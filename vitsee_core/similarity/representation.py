"""A representation: some tokens of a site of a store, as one feature matrix; and the Gram matrix of
features, from that of the same features shifted.

Gram matrices are computed from X - c, c one vector for all images, which preserves float32
precision and changes no centred kernel: K = H G H, and d_ij^2 = G_ii + G_jj - 2 G_ij. Inner
products of X itself follow from G = (X - c)(X - c)^T with g_i = (x_i - c) . c

    X X^T = G + g 1^T + 1 g^T + |c|^2

and so cosines and, with the means m over D features, correlations: those of X X^T - D m m^T.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitsee_core.features import FeatureMatrix, SiteFeatures
from vitsee_core.features.matrix import clamped
from vitsee_core.types import Float, Integers
from vitsee_stores.errors import MissingInput
from vitsee_stores.selectors import TokenSelection

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store


@dataclass(frozen=True)
class Shift:
    """The shift of n images by a common vector c."""

    along: Float  # (n,) (x_i - c) . c
    means: Float  # (n,) mean of x_i over its features
    squared: float  # |c|^2
    n_features: int  # D

    def of(self, indices: Integers | slice) -> Shift:
        """Return the shift of some of the images."""
        return Shift(
            along=self.along[indices],
            means=self.means[indices],
            squared=self.squared,
            n_features=self.n_features,
        )


def raw_gram(gram: ArrayLike, shift: Shift) -> Float:
    """Return X X^T, (n, n), from the Gram matrix of the shifted features.

    The error is that of `gram`, whose cached entries are float32.
    """
    g = shift.along
    # X X^T = G + g 1^T + 1 g^T + |c|^2
    return np.asarray(gram, np.float64) + (g[:, np.newaxis] + g) + shift.squared


def cosine(gram: ArrayLike, shift: Shift) -> Float:
    """Return the cosines (n, n) of the features, which are not centred; NaN for an image whose
    features are all 0."""
    return _normalised(raw_gram(gram, shift))


def pearson(gram: ArrayLike, shift: Shift) -> Float:
    """Return the correlations (n, n) over features; NaN for an image whose features are all the
    same."""
    m = shift.means
    return _normalised(raw_gram(gram, shift) - shift.n_features * (m[:, np.newaxis] * m))


def _normalised(products: Float) -> Float:
    """Return a_ij / sqrt(a_ii a_jj)."""
    squares = np.diagonal(products)
    squares = np.where(squares > 0, squares, np.nan)
    return products / np.sqrt(squares[:, np.newaxis] * squares)


class FeatureOffset:
    """Records the vector that is subtracted from the features of n rows, strip by strip of columns.

    The rows' sums have to be added in the strips' order, so that rounding is reproducible.

    Args:
        n_rows: n, or 0 if no `Shift` is needed.
    """

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self._sums = np.zeros((n_rows, 2))
        self._centres: dict[int, tuple[float, float, int, float, int]] = {}

    def centre(
        self, strip: int, mean: NDArray[np.float32], sample: NDArray[np.float32]
    ) -> None:
        """Record a strip's part of the vector, and the centred rows that it is the mean of.

        Args:
            strip: its number.
            mean: (columns,) c of the strip.
            sample: (rows, columns) x_i - c of the rows behind the mean.
        """
        c = mean.astype(np.float64)
        spread = sum(float(row @ row) for row in sample)
        self._centres[strip] = (float(c @ c), float(c.sum()), len(c), spread, len(sample))

    def add(self, indices: Integers, sums: NDArray[np.float32]) -> None:
        """Add a strip's (x_i - c) . c and sum of x_i - c, (rows, 2), of the rows with these
        indices."""
        self._sums[indices] += sums

    @property
    def ratio(self) -> float:
        """|mean|^2 over the total variance."""
        squared, _, _, spread, n = self._totals()
        variance = spread / max(n - 1, 1)
        return squared / variance if variance > 0 else 0.0

    @property
    def shift(self) -> Shift:
        """The shift of all rows, once every strip is done."""
        squared, total, n_features, _, _ = self._totals()
        means = (self._sums[:, 1] + total) / n_features
        return Shift(self._sums[:, 0].copy(), means, squared, n_features)

    def _totals(self) -> tuple[float, float, int, float, int]:
        """Totals over the strips in their order; the last is the number of rows."""
        parts = [self._centres[k] for k in sorted(self._centres)]
        squared, total, columns, spread, rows = zip(*parts, strict=True)
        return sum(squared), sum(total), sum(columns), sum(spread), rows[0]


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
        """Whether the store has only the features' Gram matrix within each slab."""
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
        """The features, one row per image of the store.

        Raises:
            MissingInput: the store does not have them.
        """
        chosen = SiteFeatures(self.store, self.stored, TokenSelection.parse(self.tokens))
        try:
            matrix = chosen.matrix(self.channels)
        except MissingInput as error:
            raise MissingInput(
                f"{error}, or with --grams where all tokens are compared"
            ) from None
        if self.clamp is None:
            return matrix
        return clamped(matrix, self.clamp)
