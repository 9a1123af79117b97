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
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.figures.fitting import fit
from vitsee_core.figures.panels import drawn_for, medium, note_below, small, smaller
from vitsee_core.tables.files import write_files
from vitsee_core.tables.formats import FIGURE_ENDINGS, ending_of
from vitsee_core.tables.headlines import FEW, observations, too_few
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import figure_text
from vitsee_core.tables.words import name_examples
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
_MISSING_GLYPH = re.compile(r"Glyph (\d+) .*missing from font")
# Seven colours of Okabe and Ito (2008) without their yellow, which cannot be seen on white paper;
# then seven, less distinct, of Paul Tol.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"),
    *("#332288", "#882255", "#44AA99", "#999933", "#AA4499", "#8C6D4F", "#7A8B99"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#6B6B6B"


class Theme(NamedTuple):
    """The colours of a figure that are not data's."""

    paper: str
    ink: str  # letters and black lines
    grid: str


THEMES = {
    "light": Theme(paper="white", ink="black", grid="#E4E4E4"),
    "dark": Theme(paper="#16181d", ink="#e8e6e3", grid="#3a3d45"),
}
# Replacements of the colours that cannot be seen on dark paper.
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
    """Draw the figures inside this context in a theme, and hand each to `finish` when it is drawn.

    Args:
        theme: one of `THEMES`.
        finish: changes a drawn figure before its text is fitted.
    """
    before = _LOOK.set((theme, finish))
    try:
        yield
    finally:
        _LOOK.reset(before)


def theme() -> str:
    """Return the name of the theme that figures have now, one of `THEMES`."""
    return _LOOK.get()[0]


def ink() -> str:
    """Return the colour of letters, for lines that do not belong to a store."""
    return THEMES[theme()].ink


def _style() -> dict[str, Any]:
    """Return matplotlib's settings for the current medium and theme.

    Lines, ticks and gaps grow with the letters, so that a slide looks like a page.
    """
    size = medium().font
    em = medium().em
    thin = size / 8  # points: 1 on a page
    colours = THEMES[theme()]
    letters = dict.fromkeys(_LETTERS, colours.ink)
    ticks = {
        f"{axis}tick.major.{name}": length * thin
        for axis in "xy"
        for name, length in _TICKS.items()
    }
    return {
        "figure.constrained_layout.use": True,
        "figure.constrained_layout.w_pad": 0.6 * em,
        "figure.constrained_layout.h_pad": 0.5 * em,
        "figure.facecolor": colours.paper,
        "axes.facecolor": colours.paper,
        **letters,
        "font.size": size,
        "axes.titlesize": size,
        "axes.titlelocation": "left",
        "axes.titlepad": 0.5 * size,
        "axes.labelsize": size,
        "axes.labelpad": 0.35 * size,
        "xtick.labelsize": small(),
        "ytick.labelsize": small(),
        **ticks,
        "legend.fontsize": small(),
        "legend.frameon": False,
        "legend.handlelength": 1.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6 * thin,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": colours.grid,
        "grid.linewidth": 0.5 * thin,
        "lines.linewidth": 1.2 * thin,
        "lines.markersize": 3.3 * thin,
        "image.cmap": "viridis",
        "image.interpolation": "nearest",
        "image.origin": "lower",
    }


# matplotlib's settings of the colours of letters and frames.
_LETTERS = (
    "text.color",
    "axes.labelcolor",
    "axes.edgecolor",
    "xtick.color",
    "ytick.color",
)
_TICKS = {"size": 2.5, "width": 0.5, "pad": 2.5}  # points on a page


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that draws a figure, so that all figures have one style.

    matplotlib's settings are those of the medium while `draw` runs, and restored then. Text in the
    tables among its arguments (or in sequences among them) is drawn letter by letter: a store
    called `$x$` is not set as a formula. A figure of fewer than `FEW` images (queries, videos, ...)
    says so at its foot. A figure too tall for the medium is drawn again with smaller letters.
    """

    @wraps(draw)
    def draw_in_style(*args: P.args, **kwargs: P.kwargs) -> R:
        """Draw the figure in vitsee's style."""
        import matplotlib
        import matplotlib.figure

        # The user's own settings (matplotlibrc) would change the figures. The backend is left
        # alone: rc_context would not bring the caller's back.
        defaults: dict[Any, Any] = {
            name: value
            for name, value in matplotlib.rcParamsDefault.items()
            if not name.startswith("backend")
        }
        draw_untyped: Any = draw  # mypy cannot follow replaced arguments of a ParamSpec
        literal_args = [_literal(value) for value in args]
        literal_kwargs = {name: _literal(value) for name, value in kwargs.items()}
        if _DRAWING.get():  # inside another styled function, which does the rest
            return draw_untyped(*literal_args, **literal_kwargs)  # type: ignore[no-any-return]
        tables = [value for value in args if isinstance(value, Table)]
        counts = [observations(table.frame) for table in tables]
        token = _DRAWING.set(True)
        current_medium = medium()
        try:
            while True:
                settings = drawn_for(current_medium)
                with settings, matplotlib.rc_context(defaults | _style()):
                    figure = draw_untyped(*literal_args, **literal_kwargs)
                    if not isinstance(figure, matplotlib.figure.Figure):
                        return figure  # type: ignore[no-any-return]
                    if counts:
                        n, unit = min(counts)
                        if n < FEW:
                            note_below(figure, too_few(n, unit))
                    for table in tables:
                        if table.notes.get("examples") == CLIPS:
                            _say_clips(figure, table)
                    finish = _LOOK.get()[1]
                    if finish is not None:
                        finish(figure)
                    smaller_medium = smaller(figure)
                    if smaller_medium is None:
                        # Last, as it measures all text that the steps above have written.
                        with _warnings_in_a_line(figure):
                            fit(figure, DPI)
                        return figure  # type: ignore[return-value]
                current_medium = smaller_medium
        finally:
            _DRAWING.reset(token)

    return draw_in_style


def _say_clips(figure: Figure, table: Table) -> None:
    """Replace "images" by "clips" in every text of a figure about a table of clips."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        words = name_examples(text.get_text(), table.notes)
        if words != text.get_text():
            text.set_text(words)


def _literal(value: Any) -> Any:
    """Return an argument with its tables' text escaped, so that matplotlib draws it as it is.

    Tables are also looked for in lists and tuples, and as the field `table` of a dataclass (a
    result's file). Other values stay; NamedTuples too, whose type would be lost.
    """
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
    """Return the i-th colour of curves in the current theme; they repeat after the last."""
    chosen = COLOURS[i % len(COLOURS)]
    if theme() == "dark":
        return _ON_DARK.get(chosen, chosen)
    return chosen


def marker(i: int) -> str:
    """Return the i-th marker, so that curves differ in more than their colour.

    When colours repeat, markers are shifted by one: no two of the first 98 curves look alike.
    """
    return MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]


_STORES: ContextVar[tuple[str, ...]] = ContextVar("stores", default=())


@contextmanager
def stores_in_order(labels: Sequence[str]) -> Iterator[None]:
    """Give the stores of these labels the first colours, in this order, inside the context.

    A store then has one colour in all figures, whichever other stores their tables have.
    """
    before = _STORES.set(tuple(figure_text(label) for label in labels))
    try:
        yield
    finally:
        _STORES.reset(before)


def store_order(rows: pl.DataFrame) -> list[str]:
    """Return the stores in the order of their colours: the i-th has `colour(i)`.

    First the labels of `stores_in_order`, then further ones of the rows.
    """
    labels = rows["store"].unique(maintain_order=True)
    return list(dict.fromkeys([*_STORES.get(), *labels]))


def integer_ticks(
    axes: Axes, values: Sequence[int] | NDArray[np.int64], limit: int = 9
) -> None:
    """Put evenly spaced whole numbers on the x axis, from the least of `values` on.

    Args:
        axes: the panel.
        values: numbers along x.
        limit: largest number of ticks.
    """
    low = int(min(values))
    high = int(max(values))
    steps = (1, 2, 4, 5, 10, 20, 50, 100, 200, 500, 1000)
    step = next(step for step in steps if (high - low) / step < limit)
    axes.set_xticks(range(low, high + 1, step))


# Multiples of powers of 10 at which `plain_log_ticks` puts ticks.
FINE = (1.0, 2.0, 5.0)
DECADES = (1.0,)


def plain_log_ticks(axis: Axis, subs: Sequence[float] = FINE) -> None:
    """Label a logarithmic axis with plain numbers (0.5, 2, 10), and powers of 10 beyond.

    Args:
        axis: a logarithmic axis.
        subs: `FINE` or `DECADES`: ticks are at these multiples of powers of 10, none between.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=tuple(subs), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain_number(value)))
    axis.set_minor_formatter(NullFormatter())


def _plain_number(value: float) -> str:
    """Return a tick's number: `0.05`, or a power of ten if it is very small or large."""
    if 1e-3 <= value < 1e5:
        return f"{value:g}"
    return f"$10^{{{np.log10(value):.3g}}}$"


def reference_line(axes: Axes, value: float, text: str) -> None:
    """Draw a dashed grey line across the panel at a value of y.

    Args:
        axes: the panel.
        value: height of the line.
        text: its label in the legend; "" for none.
    """
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
    """Return the bytes of a picture file. The same figure gives the same bytes.

    Args:
        figure: drawn by a function that is `styled`.
        ending: its format: .png, .svg or .pdf (in the latter two text stays text).
        dpi: dots per inch of a .png.
        quick: compress a .png less, which takes less time and more bytes.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kind = ending.lstrip(".")
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",  # letters, not outlines
        "svg.hashsalt": "vitsee",  # fixed: names of elements are random otherwise
        "pdf.fonttype": 42,  # TrueType: letters can be searched and edited
        "image.composite_image": False,  # each in its own resolution
    }
    # None takes out the date, which would make two equal figures differ.
    undated: dict[str, dict[str, Any]] = {
        "svg": {"Date": None},
        "pdf": {"CreationDate": None},
    }
    # Letters are rounded to whole dots: at other dpi than `styled` fitted for, text may not fit.
    if kind == "png" and dpi != DPI:
        with _warnings_in_a_line(figure):
            fit(figure, dpi)
    buffer = io.BytesIO()
    laid_out = not figure.stale
    # `fit` has logged the warnings of a figure that it laid out.
    silent = laid_out
    with matplotlib.rc_context(settings), _warnings_in_a_line(figure, silent=silent):
        if kind == "png" and isinstance(figure.canvas, FigureCanvasAgg):
            # savefig would draw it once more, only to lay it out, which `fit` has done.
            dpi_before = figure.dpi
            engine = figure.get_layout_engine()
            if laid_out:
                figure.set_layout_engine("none")
            figure.dpi = dpi
            pil_options = {"compress_level": 1} if quick else None
            figure.canvas.print_png(buffer, pil_kwargs=pil_options)  # type: ignore[no-untyped-call]
            figure.dpi = dpi_before
            figure.set_layout_engine(engine or "none")
        else:
            figure.savefig(buffer, format=kind, dpi=dpi, metadata=undated.get(kind))
    return buffer.getvalue()


@contextmanager
def _warnings_in_a_line(figure: Figure, *, silent: bool = False) -> Iterator[None]:
    """Log matplotlib's many warnings about letters and room inside this context as one line each.

    Letters that the font lacks are one line, panels without room another; other warnings pass.

    Args:
        figure: what is drawn.
        silent: drop the two lines, as they were logged before.
    """
    letters: dict[str, None] = {}
    crowded = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if match := _MISSING_GLYPH.match(str(warning.message)):
            letters[chr(int(match[1]))] = None
        elif str(warning.message).startswith("constrained_layout not applied"):
            crowded = True
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    if crowded and not silent:
        width, height = figure.get_size_inches()
        log.warning(
            "%g x %g inches leave the panels no room: the figure is unreadable",
            width,
            height,
        )
    if letters and not silent:
        log.warning(
            "the figure's font has no letters %s: boxes stand for them", "".join(letters)
        )


def save_figure(figure: Figure, path: str | Path, *, force: bool = False) -> None:
    """Write a figure as .png, .svg or .pdf, by the path's ending.

    The file is written under another name and renamed, so that it never exists in part.

    Args:
        figure: what is written.
        path: where it goes.
        force: replace an existing file.

    Raises:
        VitseeError: the path has another ending, the file exists and `force` is off, or it cannot
            be written.
    """
    path = Path(path)
    ending = ending_of(path, FIGURE_ENDINGS, "the figure")
    write_files({path: figure_bytes(figure, ending)}, force=force)
