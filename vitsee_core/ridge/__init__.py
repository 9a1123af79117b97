"""Ridge regression to one target per class, +1 for an image's own and -1 for the others.

Sufficient statistics or the rows themselves (`Gathered`), one decomposition for every l2
(`Factors`), a solve for a single one (`solve`), and the choice of l2 (`l2_choice`). In float64, but
for what `at_l2` proves not to need it.
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
