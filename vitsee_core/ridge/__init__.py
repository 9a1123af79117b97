"""Ridge regression to one target per class, +1 for an image's own and -1 for the others.

Sufficient statistics or the rows themselves (`Gathered`), one eigendecomposition for every l2
(`Factors`), a solve for a single one (`solve`), and the choice of l2 (`selection`). All in float64.
"""

from vitsee_core.ridge.gathered import Gathered
from vitsee_core.ridge.l2_choice import GRID, HeldOut, LeaveOneOut
from vitsee_core.ridge.solver import Algebra, Factors, Linear, from_kernel, solve

__all__ = [
    "GRID",
    "Algebra",
    "Factors",
    "Gathered",
    "HeldOut",
    "LeaveOneOut",
    "Linear",
    "from_kernel",
    "solve",
]
