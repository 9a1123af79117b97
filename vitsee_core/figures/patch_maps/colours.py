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
    """Conversion of a layer's scores to colours."""

    rotation: Float  # (3, 3)
    middle: Float  # (3,) the rotated scores that become 0.5
    half: Float  # (3,) their distance to 0 and 1
    n_aligned: int = 0  # patches that determined the rotation, 0 without one

    @classmethod
    def of(
        cls, scores: Float, turned_by: Float | None = None, n_aligned: int = 0
    ) -> Colours:
        rotation = np.eye(CHANNELS) if turned_by is None else turned_by
        turned = scores @ rotation
        middle = np.median(turned, axis=0)
        half = SPREADS * np.median(np.abs(turned - middle), axis=0)
        return cls(rotation, middle, half, n_aligned)

    def __call__(self, scores: Float) -> Float:
        """(..., 3) from 0 to 1; 0.5 in a channel whose scores are mostly equal."""
        offset = scores @ self.rotation - self.middle
        half = np.where(self.half > 0, self.half, np.inf)
        return np.clip(0.5 + offset / (2 * half), 0.0, 1.0)

    @classmethod
    def read(cls, notes: Mapping[str, Any]) -> Colours:
        rotation, middle, half = (
            np.array(notes[name], np.float64)
            for name in ("rotation", "middle", "half_range")
        )
        return cls(rotation, middle, half, int(notes["aligned_on_patches"]))

    def describe(self) -> dict[str, Any]:
        return {
            "rotation": self.rotation.tolist(),
            "middle": self.middle.tolist(),
            "half_range": self.half.tolist(),
            "aligned_on_patches": self.n_aligned,
        }


def rotation_to(scores: Float, reference: Float) -> Float:
    """(channels, channels) the orthogonal matrix that rotates scores (tokens, channels) nearest to
    the reference's of the same tokens, both about their means."""
    a = scores - scores.mean(0)
    b = reference - reference.mean(0)
    left, _, right = np.linalg.svd(a.T @ b)
    return left @ right


def matched(
    scores: Float, keep: Mask, at: Integers, reference: Float
) -> tuple[Float, Float]:
    """Scores of two layers of one image, patch by patch.

    Args:
        scores: (cells, channels) of the layer.
        keep: (cells,) which of them count.
        at: (reference's cells,) the layer's cell at that place, -1 for none.
        reference: (reference's cells, channels), NaN where one does not count.
    """
    both = (at >= 0) & ~np.isnan(reference).any(1)
    cells = at[both]
    counted = keep[cells]
    return scores[cells[counted]], reference[both][counted]
