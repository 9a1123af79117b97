"""Two-way analysis of variance of patch tokens: the parts explained by image and by position.

For x_nt, the token at position t of image n (channels), N images of T positions each:

    total    = sum_nt |x_nt - m|^2
    image    = T sum_n |m_n - m|^2,   m_n the mean over the image's tokens
    position = N sum_t |m_t - m|^2,   m_t the mean over images at the position
    rest     = total - image - position

each over the total. For independent noise the shares are (N - 1) / (N T - 1), (T - 1) / (N T - 1)
and the remainder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vitsee_core.types import Float

SHARES = ("share_image", "share_position", "share_rest")
ALIKE = 1e-12


@dataclass
class TokenSums:
    """Sums over the tokens of images, from which shares of variance follow."""

    n: int  # images
    at: Float  # (tokens, dim) sums over images
    squares: float  # sum of |x|^2
    means: float  # sum over images of |m_n|^2

    @classmethod
    def of(cls, x: Float) -> TokenSums:
        """The sums of x: (images, tokens, dim)."""
        means = x.mean(1)
        squares, of_means = float(np.vdot(x, x)), float(np.vdot(means, means))
        return cls(len(x), x.sum(0), squares, of_means)

    def plus(self, other: TokenSums, sign: int = 1) -> TokenSums:
        """The sums with the images of another added (sign 1) or removed (sign -1)."""
        return TokenSums(
            self.n + sign * other.n,
            self.at + sign * other.at,
            self.squares + sign * other.squares,
            self.means + sign * other.means,
        )

    def shares(self) -> dict[str, float]:
        """Each of `SHARES`; NaN if all tokens are equal, or with one image or position."""
        n, t = self.n, len(self.at)
        shares = dict.fromkeys(SHARES, math.nan)
        if n < 2 or t < 2:
            return shares
        mean = self.at.sum(0) / (n * t)
        of_mean = n * t * float(mean @ mean)
        total = self.squares - of_mean
        if total <= ALIKE * self.squares:
            return shares
        shares["share_image"] = (t * self.means - of_mean) / total
        shares["share_position"] = (float(np.vdot(self.at, self.at)) / n - of_mean) / total
        shares["share_rest"] = 1 - shares["share_image"] - shares["share_position"]
        return shares

    def nulls(self) -> dict[str, float]:
        """The shares of independent noise; NaN where `shares` is."""
        n, t = self.n, len(self.at)
        left = n * t - 1
        if n < 2 or t < 2:
            return dict.fromkeys(SHARES, math.nan)
        image, position = (n - 1) / left, (t - 1) / left
        return dict(zip(SHARES, (image, position, 1 - image - position), strict=True))
