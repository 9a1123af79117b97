"""Calibration of a similarity: against the same with the images of one side permuted.

Under the null hypothesis the images are exchangeable: any order of one side's goes with the
other's. With s_1 .. s_B of B permutations (arXiv 2602.14486):

    p          = (1 + #{s_b >= s}) / (B + 1)
    tau        = the ceil((1 - alpha)(B + 1))-th smallest s_b, alpha = 0.05
    calibrated = max(0, (s - tau) / (1 - tau))

and, for the many layers of two models, p_family with the largest s_b of all of them in the place of
each (Westfall & Young 1993). For a distance, signs are reversed and calibrated = max(0, (tau - d) /
tau).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitsee_core.types import Float, Integers

ALPHA = 0.05
ROUNDING = 1e-9
LEAST = 19  # permutations that give a 5 % threshold
METHOD = (
    "permutations of the images of side b, one for all layers; tau the 5 % threshold, p one-sided, "
    "p_family against the largest of all layers of two stores in each permutation"
)


@dataclass(frozen=True)
class Calibration:
    """For each pair, (pairs,)."""

    null_mean: Float
    tau: Float
    p: Float
    p_family: Float
    calibrated: Float


def calibrate(value: Float, null: Float, families: Integers, *, distance: bool) -> Calibration:
    """From values (pairs,) and those of permuted images (permutations, pairs).

    Args:
        value: NaN for none.
        null: likewise.
        families: (pairs,) which pairs are tested together.
        distance: a lower value is nearer.
    """
    sign = -1.0 if distance else 1.0
    s, of_null = sign * value, sign * null
    draws = len(null)
    place = int(np.ceil((1 - ALPHA) * (draws + 1) - 1e-9))
    tau = np.sort(of_null, 0)[place - 1]
    largest = np.empty_like(of_null)
    for family in np.unique(families):
        members = families == family
        there = members & np.isfinite(value)
        most = of_null[:, there].max(1, initial=-np.inf)
        largest[:, members] = most[:, np.newaxis]
    with np.errstate(invalid="ignore", divide="ignore"):
        if distance:
            calibrated = np.maximum(0, (s - tau) / -tau)
        else:
            calibrated = np.maximum(0, (np.minimum(s, 1) - tau) / (1 - tau))
    # A permutation that does not change a pair counts, despite rounding.
    p = (1 + (of_null >= s - ROUNDING).sum(0)) / (draws + 1)
    p_family = (1 + (largest >= s - ROUNDING).sum(0)) / (draws + 1)
    absent = ~np.isfinite(value)
    columns = (null.mean(0), sign * tau, p, p_family, calibrated)
    return Calibration(*(np.where(absent, np.nan, one) for one in columns))
