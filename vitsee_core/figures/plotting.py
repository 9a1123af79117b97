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

from vitsee_core.figures.fitting import fit
from vitsee_core.figures.panels import drawn_for, medium, note_below, small, smaller
from vitsee_core.tables.files import write_files
from vitsee_core.tables.formats import FIGURE_ENDINGS, ending_of
from vitsee_core.tables.headlines import FEW, observations, too_few
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import figure_text
from vitsee_core.tables.words import said_of
from vitsee_stores.plan import CLIPS

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)

DPI = 200
_DRAWING: ContextVar[bool] = ContextVar("drawing", default=False)
_MISSING = re.compile(r"Glyph (\d+) .*missing from font")
# Okabe and Ito (2008) without the yellow, which white paper swallows; then, less distinct, of Tol.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"),
    *("#332288", "#882255", "#44AA99", "#999933", "#AA4499", "#8C6D4F", "#7A8B99"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#6B6B6B"


# Colours of the paper, of letters and black lines, and of the grid.
THEMES = {
    "light": ("white", "black", "#E4E4E4"),
    "dark": ("#16181d", "#e8e6e3", "#3a3d45"),
}
# Those that dark paper swallows.
_ON_DARK = {
    "#000000": "#e8e6e3",
    "#0072B2": "#4aa8e8",
    "#009E73": "#2fc296",
    "#332288": "#8f7fe8",
    "#882255": "#d06a9b",
    "#AA4499": "#cf7fc4",
}
_LOOK: ContextVar[tuple[str, Callable[[Any], None] | None]] = ContextVar(
    "look", default=("light", None)
)


@contextmanager
def drawn_as(theme: str, finish: Callable[[Any], None] | None = None) -> Iterator[None]:
    """While it lasts figures have this theme, and each is handed to `finish` when it is drawn."""
    before = _LOOK.set((theme, finish))
    try:
        yield
    finally:
        _LOOK.reset(before)


def theme() -> str:
    """The theme that figures have now, of `THEMES`."""
    return _LOOK.get()[0]


def ink() -> str:
    """The colour of letters, for lines that are no store's."""
    return THEMES[theme()][1]


def _style() -> dict[str, Any]:
    """Settings of matplotlib for the medium: what is drawn is as large as its letters want it."""
    size = medium().font
    em = medium().em
    thin = size / 8  # points
    paper, ink, lines = THEMES[theme()]
    return {
        "figure.constrained_layout.use": True,
        "figure.constrained_layout.w_pad": 0.6 * em,
        "figure.constrained_layout.h_pad": 0.5 * em,
        "figure.facecolor": paper,
        "axes.facecolor": paper,
        **dict.fromkeys(_LETTERS, ink),
        "font.size": size,
        "axes.titlesize": size,
        "axes.titlelocation": "left",
        "axes.titlepad": 0.5 * size,
        "axes.labelsize": size,
        "axes.labelpad": 0.35 * size,
        "xtick.labelsize": small(),
        "ytick.labelsize": small(),
        **{
            f"{axis}tick.major.{what}": n * thin
            for axis in "xy"
            for what, n in _TICKS.items()
        },
        "legend.fontsize": small(),
        "legend.frameon": False,
        "legend.handlelength": 1.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6 * thin,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": lines,
        "grid.linewidth": 0.5 * thin,
        "lines.linewidth": 1.2 * thin,
        "lines.markersize": 3.3 * thin,
        "image.cmap": "viridis",
        "image.interpolation": "nearest",
        "image.origin": "lower",
    }


_LETTERS = (
    "text.color",
    "axes.labelcolor",
    "axes.edgecolor",
    "xtick.color",
    "ytick.color",
)
_TICKS = {"size": 2.5, "width": 0.5, "pad": 2.5}


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Decorator: `draw` makes its figure in the one style; matplotlib's settings are restored.

    Text in the tables that it gets (as arguments, or in sequences of them) is drawn letter by
    letter: a store called `$x$` is no formula. A figure of fewer than `FEW` images (queries,
    videos, ...) says so at its foot.
    """

    @wraps(draw)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        import matplotlib
        import matplotlib.figure

        # The backend is left alone: rc_context would not bring the caller's back.
        plain: dict[Any, Any] = {
            k: v
            for k, v in matplotlib.rcParamsDefault.items()
            if not k.startswith("backend")
        }
        literal: Any = draw
        given = [*map(_literal, args)]
        named = {name: _literal(value) for name, value in kwargs.items()}
        if _DRAWING.get():  # by a function that is styled too
            return literal(*given, **named)  # type: ignore[no-any-return]
        found = [observations(table.frame) for table in args if isinstance(table, Table)]
        token = _DRAWING.set(True)
        less = medium()
        try:
            while True:
                with drawn_for(less), matplotlib.rc_context(plain | _style()):
                    drawn = literal(*given, **named)
                    if not isinstance(drawn, matplotlib.figure.Figure):
                        return drawn  # type: ignore[no-any-return]
                    if found and (fewest := min(found))[0] < FEW:
                        note_below(drawn, too_few(*fewest))
                    for table in args:
                        if (
                            isinstance(table, Table)
                            and table.notes.get("examples") == CLIPS
                        ):
                            _say_clips(drawn, table)
                    if (finish := _LOOK.get()[1]) is not None:
                        finish(drawn)
                    if (again := smaller(drawn)) is None:
                        with _warnings_in_a_line(drawn):
                            fit(drawn, DPI)
                        return drawn  # type: ignore[return-value]
                less = again
        finally:
            _DRAWING.reset(token)

    return inner


def _say_clips(figure: Figure, table: Table) -> None:
    """Call clips in every text of a figure what its drawing calls images."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if (said := said_of(text.get_text(), table.notes)) != text.get_text():
            text.set_text(said)


def _literal(value: Any) -> Any:
    """A table whose text matplotlib draws as it is; also in a list, or as what has a `table`."""
    if isinstance(value, Table):
        return value.map_text(figure_text)
    if isinstance(value, (list, tuple)):
        if type(value) in (list, tuple):
            return type(value)(map(_literal, value))
        return value
    table = getattr(value, "table", None)
    if isinstance(table, Table) and is_dataclass(value) and not isinstance(value, type):
        return replace(value, table=_literal(table))
    return value


def colour(i: int) -> str:
    chosen = COLOURS[i % len(COLOURS)]
    if theme() == "dark":
        return _ON_DARK.get(chosen, chosen)
    return chosen


def marker(i: int) -> str:
    """The i-th marker, so that lines differ in more than their colour; another one for each
    repetition of a colour."""
    return MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]


_STORES: ContextVar[tuple[str, ...]] = ContextVar("stores", default=())


@contextmanager
def stores_in_order(labels: Sequence[str]) -> Iterator[None]:
    """While it lasts, a store of these labels has one colour, whichever others a table has."""
    before = _STORES.set(tuple(figure_text(label) for label in labels))
    try:
        yield
    finally:
        _STORES.reset(before)


def store_order(rows: pl.DataFrame) -> list[str]:
    """Stores whose places are the numbers of their colours: those of `stores_in_order`, and then
    the rows' own."""
    own = rows["store"].unique(maintain_order=True)
    return list(dict.fromkeys([*_STORES.get(), *own]))


def integer_ticks(
    axes: Axes, values: Sequence[int] | NDArray[np.int64], limit: int = 9
) -> None:
    """Whole numbers on the x axis, at most `limit` of them, evenly spaced."""
    low = int(min(values))
    high = int(max(values))
    step = next(
        s
        for s in (1, 2, 4, 5, 10, 20, 50, 100, 200, 500, 1000)
        if (high - low) / s < limit
    )
    axes.set_xticks(range(low, high + 1, step))


# of `plain_log_ticks`
FINE = (1.0, 2.0, 5.0)
DECADES = (1.0,)


def plain_log_ticks(axis: Axis, subs: Sequence[float] = FINE) -> None:
    """Plain numbers on a logarithmic axis: 0.5, 2, 10, and powers of 10 beyond. Ticks are at `subs`
    times powers of 10, none between."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=tuple(subs), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain_number(value)))
    axis.set_minor_formatter(NullFormatter())


def _plain_number(value: float) -> str:
    if 1e-3 <= value < 1e5:
        return f"{value:g}"
    return f"$10^{{{np.log10(value):.3g}}}$"


def reference_line(axes: Axes, value: float, text: str) -> None:
    """A dashed grey line across the panel, in the legend as `text` (not at all if it is "")."""
    axes.axhline(
        value,
        color=GREY,
        linestyle=(0, (5, 3)),
        linewidth=1,
        label=text or "_nolegend_",
        zorder=1,
    )


def figure_bytes(
    figure: Figure, ending: str = ".png", dpi: float = DPI, *, quick: bool = False
) -> bytes:
    """The figure in the format of `ending`: .png (so many dots per inch; larger and in less time if
    `quick`), .svg or .pdf (text stays text). The same figure gives the same bytes: no date, no
    random names."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kind = ending.lstrip(".")
    # What a figure draws late, such as its ticks, is drawn as `styled` draws.
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "vitsee",
        "pdf.fonttype": 42,
        "image.composite_image": False,  # each in its own resolution
    }
    undated: dict[str, dict[str, Any]] = {
        "svg": {"Date": None},
        "pdf": {"CreationDate": None},
    }
    if kind == "png" and dpi != DPI:  # letters are not as wide in other numbers of dots
        with _warnings_in_a_line(figure):
            fit(figure, dpi)
    buffer = io.BytesIO()
    laid_out = not figure.stale
    with matplotlib.rc_context(settings), _warnings_in_a_line(figure, said=laid_out):
        if kind == "png" and isinstance(figure.canvas, FigureCanvasAgg):
            # savefig would draw it once more, only to lay it out, which `fit` has done.
            dpi_before = figure.dpi
            engine = figure.get_layout_engine()
            if laid_out:
                figure.set_layout_engine("none")
            figure.dpi = dpi
            options = {"compress_level": 1} if quick else None
            figure.canvas.print_png(buffer, pil_kwargs=options)  # type: ignore[no-untyped-call]
            figure.dpi = dpi_before
            figure.set_layout_engine(engine or "none")
        else:
            figure.savefig(buffer, format=kind, dpi=dpi, metadata=undated.get(kind))
    return buffer.getvalue()


@contextmanager
def _warnings_in_a_line(figure: Figure, *, said: bool = False) -> Iterator[None]:
    """Letters that the font lacks, and no room for the panels: each in one line of the log, unless
    that was said before."""
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
    if crowded and not said:
        width, height = figure.get_size_inches()
        log.warning(
            "%g x %g inches leave the panels no room: the figure is unreadable",
            width,
            height,
        )
    if letters and not said:
        log.warning(
            "the figure's font has no letters %s: boxes stand for them", "".join(letters)
        )


def save_figure(figure: Figure, path: str | Path, *, force: bool = False) -> None:
    """Write the picture, .png, .svg or .pdf by its ending; the file exists only when it is whole.

    Raises:
        VitseeError: another ending, the file exists and `force` is off, or it cannot be written.
    """
    place = Path(path)
    ending = ending_of(place, FIGURE_ENDINGS, "the figure")
    write_files({place: figure_bytes(figure, ending)}, force=force)
