"""Text of a figure that is clipped or lies on other text, by matplotlib's own extents."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from vitsee_core.figures.fitting import all_axes
from vitsee_core.figures.plotting import DPI

APART = 0.3  # ems
PIXEL = DPI / 100  # how many dots a hundredth of an inch has: antialiasing is no overlap
INSIDE = 0.75 * PIXEL


def flaws(figure: Figure) -> list[str]:
    """What is wrong with each text that is drawn, nothing where all can be read."""
    figure.set_dpi(DPI)
    figure.draw_without_rendering()
    paper, found = figure.bbox, []
    texts = [(text, text.get_window_extent()) for text in _texts(figure)]
    for text, box in texts:
        inside = paper.x0 - PIXEL <= box.x0 and box.x1 <= paper.x1 + PIXEL
        if not (inside and paper.y0 - PIXEL <= box.y0 and box.y1 <= paper.y1 + PIXEL):
            found.append(f"clipped: {text.get_text()!r}")
    for (one, a), (other, b) in combinations(texts, 2):
        wide = min(a.x1, b.x1) - max(a.x0, b.x0)
        tall = min(a.y1, b.y1) - max(a.y0, b.y0)
        if wide > INSIDE and tall > INSIDE:
            found.append(f"on each other: {one.get_text()!r} and {other.get_text()!r}")
    for axes in all_axes(figure):
        if axes.get_visible() and axes.axison:
            found += _run_together(axes.xaxis)
    for text, box in texts:
        for axes in figure.axes:
            own = axes.get_window_extent()
            wide = min(box.x1, own.x1) - max(box.x0, own.x0)
            tall = min(box.y1, own.y1) - max(box.y0, own.y0)
            if (
                min(wide, tall) > 2 * PIXEL
                and axes.get_visible()
                and axes.axison
                and not _of(text, axes)
            ):
                found.append(f"on another panel: {text.get_text()!r}")
    return found


def _run_together(axis: Any) -> list[str]:
    """Tick labels beside each other with less than a third of a letter between them."""
    seen = [
        text
        for text in _tick_labels(axis)
        if text.get_visible() and text.get_text().strip()
    ]
    boxes = sorted(
        ((text.get_window_extent(), text) for text in seen), key=lambda one: one[0].x0
    )
    return [
        f"run together: {one.get_text()!r} and {other.get_text()!r}"
        for (a, one), (b, other) in pairwise(boxes)
        if min(a.y1, b.y1) > max(a.y0, b.y0)
        and b.x0 - a.x1 < APART * float(one.get_fontsize()) * DPI / 72
    ]


def _of(text: Text, axes: Any) -> bool:
    """Whether a text belongs to a panel, or to a colour bar inside it."""
    return text.axes is axes or text.axes in axes.child_axes


def _texts(figure: Figure) -> list[Text]:
    """Every text that is drawn."""
    found: list[Text] = []
    for axes in all_axes(figure):
        if not axes.get_visible():
            continue
        found += [*axes.texts, axes.title, axes._left_title, axes._right_title]  # type: ignore[attr-defined]
        if axes.get_legend() is not None:
            found += axes.get_legend().get_texts()  # type: ignore[union-attr]
        for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
            found += [axis.label, axis.offsetText, *_tick_labels(axis)]
        for table in axes.tables:
            found += [cell.get_text() for cell in table.get_celld().values()]
    parts: list[Any] = [figure, *figure.subfigs]
    for part in parts:
        found += [*part.texts, *([part._suptitle] if part._suptitle else [])]
        for legend in part.legends:
            found += [legend.get_title(), *legend.get_texts()]
    found += [figure._supxlabel] if figure._supxlabel else []  # type: ignore[attr-defined]
    unique = {id(text): text for text in found}
    return [
        text for text in unique.values() if text.get_visible() and text.get_text().strip()
    ]


def _tick_labels(axis: Any) -> list[Text]:
    low, high = sorted(axis.get_view_interval())
    slack = 1e-6 * (high - low)
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    seen = [tick for tick in ticks if low - slack <= tick.get_loc() <= high + slack]
    return [label for tick in seen for label in (tick.label1, tick.label2)]


def flat(text: str) -> str:
    """A text as it was before it was broken into lines."""
    return text.replace("\n", " ")


def colour_bars(figure: Figure) -> list[Any]:
    """The panels of its colour bars."""
    return [
        axes for axes in all_axes(figure) if getattr(axes, "_colorbar", None) is not None
    ]
