"""Three scores of a token as red, green and blue, comparable over layers and models.

Scores of each layer are rotated (and mirrored, as axes have no sign) by the orthogonal matrix R
that brings them nearest to a reference layer's on the same patches, min ||Z R - Z_ref|| (orthogonal
Procrustes, Schönemann 1966), both about their means there. Then each channel goes from 0 at median
- 3 MAD to 1 at median + 3 MAD of the layer's own tokens; values beyond are clipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitsee_core.types import Float, Integers, Mask

CHANNELS = 3
SPREADS = 3.0  # median absolute deviations from the median to the end of the colours
FEWEST = 4  # patches that decide a rotation


@dataclass(frozen=True)
class Colours:
    """The conversion of a layer's scores to colours.

    Attributes:
        rotation: (3, 3), multiplied from the right.
        middle: (3,) the rotated scores that become 0.5.
        half: (3,) distance in scores from the middle to the colours 0 and 1.
        n_aligned: number of patches that determined the rotation, 0 without one.
    """

    rotation: Float
    middle: Float
    half: Float
    n_aligned: int = 0

    @classmethod
    def of(
        cls, scores: Float, turned_by: Float | None = None, n_aligned: int = 0
    ) -> Colours:
        """Return the conversion whose range is that of these scores.

        Args:
            scores: (tokens, 3) scores of the layer.
            turned_by: rotation (3, 3) to a reference layer; None for no rotation.
            n_aligned: number of patches that determined the rotation.
        """
        rotation = np.eye(CHANNELS) if turned_by is None else turned_by
        turned = scores @ rotation
        middle = np.median(turned, axis=0)
        # The median absolute deviation: a few outliers do not make all other tokens grey.
        half = SPREADS * np.median(np.abs(turned - middle), axis=0)
        return cls(rotation, middle, half, n_aligned)

    def __call__(self, scores: Float) -> Float:
        """Return the colours of scores (..., 3), from 0 to 1.

        A channel whose scores are mostly equal is 0.5.
        """
        offset = scores @ self.rotation - self.middle
        half = np.where(self.half > 0, self.half, np.inf)
        return np.clip(0.5 + offset / (2 * half), 0.0, 1.0)

    @classmethod
    def read(cls, notes: Mapping[str, Any]) -> Colours:
        """Return the conversion that `describe` has written into a table's notes."""
        return cls(
            rotation=np.array(notes["rotation"], np.float64),
            middle=np.array(notes["middle"], np.float64),
            half=np.array(notes["half_range"], np.float64),
            n_aligned=int(notes["aligned_on_patches"]),
        )

    def describe(self) -> dict[str, Any]:
        """Return the conversion as JSON, for a table's notes."""
        return {
            "rotation": self.rotation.tolist(),
            "middle": self.middle.tolist(),
            "half_range": self.half.tolist(),
            "aligned_on_patches": self.n_aligned,
        }


def rotation_to(scores: Float, reference: Float) -> Float:
    """Return the rotation of scores to a reference, (channels, channels).

    The solution of the orthogonal Procrustes problem (Schönemann 1966): of the singular value
    decomposition U S V^T = Z^T Z_ref it is U V^T, both scores about their means.

    Args:
        scores: (tokens, channels).
        reference: scores of the same tokens in the reference layer, (tokens, channels).
    """
    a = scores - scores.mean(0)
    b = reference - reference.mean(0)
    left, _, right = np.linalg.svd(a.T @ b)
    return left @ right


def matched(
    scores: Float, keep: Mask, at: Integers, reference: Float
) -> tuple[Float, Float]:
    """Return the scores of two layers of one image, patch by patch, for `rotation_to`.

    Args:
        scores: scores of the layer, (cells, channels).
        keep: which of its cells count, (cells,).
        at: the layer's cell at the position of each cell of the reference, -1 for none.
        reference: scores of the reference, (its cells, channels); NaN in cells that do not count.

    Returns:
        Two arrays (common patches, channels).
    """
    has_both = (at >= 0) & ~np.isnan(reference).any(1)
    cells = at[has_both]
    counts = keep[cells]
    return scores[cells[counts]], reference[has_both][counts]
