"""Ridge regression to one target per class: +1 for an image's own, -1 for the others.

Training images are collected as rows or as sums (`SufficientStats`). One eigendecomposition serves
every l2 (`Factors`), a single l2 is solved for directly (`solve`), and l2 is chosen by held-out
images or by leave-one-out (`l2_choice`). Everything is in float64.
"""

from vitsee_core.kernels.ridge.l2_choice import GRID, HeldOut, LeaveOneOut
from vitsee_core.kernels.ridge.solver import (
    Algebra,
    Factors,
    Linear,
    SufficientStats,
    from_kernel,
    ranks,
    solve,
)

__all__ = [
    "GRID",
    "Algebra",
    "Factors",
    "HeldOut",
    "LeaveOneOut",
    "Linear",
    "SufficientStats",
    "from_kernel",
    "ranks",
    "solve",
]
