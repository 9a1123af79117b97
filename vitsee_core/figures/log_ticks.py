"""Plain numbers on logarithmic axes: 0.5, 2, 10, and powers of 10 beyond."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axis import Axis

FINE, DECADES = (1.0, 2.0, 5.0), (1.0,)


def plain_log_ticks(axis: Axis, subs: Sequence[float] = FINE) -> None:
    """Ticks at `subs` times powers of 10, none between, on an axis whose scale is logarithmic."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=tuple(subs), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axis.set_minor_formatter(NullFormatter())


def _plain(value: float) -> str:
    return f"{value:g}" if 1e-3 <= value < 1e5 else f"$10^{{{np.log10(value):.3g}}}$"
