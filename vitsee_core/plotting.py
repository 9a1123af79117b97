"""One style for every figure: colours that colour-blind readers can distinguish, legible type, 200
dpi.

Figures are made without pyplot: no global state, no display, no window. matplotlib is imported
with the first picture.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.files import write_files
from vitsee_core.formats import FIGURE_ENDINGS, ending_of
from vitsee_core.results import Table
from vitsee_core.text import figure_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)

DPI = 200
_MISSING = re.compile(r"Glyph (\d+) .*missing from font")
# Okabe and Ito (2008) without the yellow, which white paper swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#6B6B6B"

STYLE: dict[str, Any] = {
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.facecolor": "white",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "image.cmap": "viridis",
    "image.interpolation": "nearest",
    "image.origin": "lower",
}


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Decorator: `draw` makes its figure in the one style; matplotlib's settings are restored.

    Text in the tables that it gets (as arguments, or in sequences of them) is drawn letter by
    letter: a store called `$x$` is no formula.
    """

    @wraps(draw)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        import matplotlib

        # The backend is left alone: rc_context would not bring the caller's back.
        plain: dict[Any, Any] = {
            k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith("backend")
        }
        with matplotlib.rc_context(plain | STYLE):
            literal: Any = draw
            return literal(  # type: ignore[no-any-return]
                *map(_literal, args), **{name: _literal(value) for name, value in kwargs.items()}
            )

    return inner


def _literal(value: Any) -> Any:
    """A table whose text matplotlib draws as it is; also in a list, or as what has a `table`."""
    if isinstance(value, Table):
        return value.map_text(figure_text)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_literal, value)) if type(value) in (list, tuple) else value
    table = getattr(value, "table", None)
    if isinstance(table, Table) and is_dataclass(value) and not isinstance(value, type):
        return replace(value, table=_literal(table))
    return value


_SIZE: ContextVar[tuple[float, float] | None] = ContextVar("size", default=None)


@contextmanager
def figures_of_size(size: tuple[float, float] | None) -> Iterator[None]:
    """While it lasts every new figure has this width and height in inches; None changes nothing."""
    before = _SIZE.set(size)
    try:
        yield
    finally:
        _SIZE.reset(before)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, or that of `figures_of_size`; to be called below
    `styled`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE.get() or (width, height))
    FigureCanvasAgg(figure)
    return figure


def colour(i: int) -> str:
    """The i-th colour; they repeat after seven."""
    return COLOURS[i % len(COLOURS)]


def marker(i: int) -> str:
    """The i-th marker, so that lines differ in more than their colour; another one for each
    repetition of a colour."""
    return MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]


def shorten(text: str, limit: int) -> str:
    """`text`, its middle left out where it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    head = (limit - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


def integer_ticks(axes: Axes, values: Sequence[int] | NDArray[np.int64], limit: int = 9) -> None:
    """Whole numbers on the x axis, at most `limit` of them, evenly spaced."""
    low, high = int(min(values)), int(max(values))
    step = next(
        s for s in (1, 2, 4, 5, 10, 20, 50, 100, 200, 500, 1000) if (high - low) / s < limit
    )
    axes.set_xticks(range(low, high + 1, step))


def reference_line(axes: Axes, value: float, text: str) -> None:
    """A dashed grey line across the panel, in the legend as `text` (not at all if it is "")."""
    axes.axhline(
        value, color=GREY, linestyle=(0, (5, 3)), linewidth=1, label=text or "_nolegend_", zorder=1
    )


def legend_above_data(axes: Axes, columns: int, *, from_zero: bool = True) -> None:
    """A legend in a strip of its own at the top: the y axis makes room for it and starts at 0, or
    a little below the data.

    To be called when all is drawn; a later, larger upper limit keeps it clear too.
    """
    legend = axes.legend(loc="upper left", ncols=columns, columnspacing=1.2, borderaxespad=0.1)
    rows = -(-len(legend.get_texts()) // columns)
    height_pt = axes.bbox.height * 72 / axes.figure.dpi
    strip = min((rows * 12 + 6) / height_pt, 0.6)
    low, high = axes.dataLim.y0, axes.dataLim.y1
    low = 0.0 if from_zero else low - 0.08 * (high - low)
    axes.set_ylim(low, low + (high - low) / (1 - strip) if high > low else low + 1)


def figure_bytes(figure: Figure, ending: str = ".png", dpi: float = DPI) -> bytes:
    """The figure in the format of `ending`: .png (so many dots per inch), .svg or .pdf (text
    stays text). The same figure gives the same bytes: no date, no random names."""
    import matplotlib

    kind = ending.lstrip(".")
    # What a figure draws late, such as its ticks, is drawn as `styled` draws.
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "vitsee",
        "pdf.fonttype": 42,
    }
    undated: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    with matplotlib.rc_context(settings), _warnings_in_a_line(figure):
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=undated.get(kind))
    return buffer.getvalue()


@contextmanager
def _warnings_in_a_line(figure: Figure) -> Iterator[None]:
    """Letters that the font lacks, and no room for the panels: each in one line of the log."""
    letters: dict[str, None] = {}
    crowded = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if match := _MISSING.match(str(warning.message)):
            letters[chr(int(match[1]))] = None
        elif str(warning.message).startswith("constrained_layout not applied"):
            crowded = True
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    if crowded:
        width, height = figure.get_size_inches()
        log.warning(
            "%g x %g inches leave the panels no room: the figure is unreadable", width, height
        )
    if letters:
        log.warning("the figure's font has no letters %s: boxes stand for them", "".join(letters))


def save_figure(figure: Figure, path: str | Path, *, force: bool = False) -> None:
    """Write the picture, .png, .svg or .pdf by its ending; the file exists only when it is whole.

    Raises:
        VitseeError: another ending, the file exists and `force` is off, or it cannot be written.
    """
    place = Path(path)
    ending = ending_of(place, FIGURE_ENDINGS, "the figure")
    write_files({place: figure_bytes(figure, ending)}, force=force)
