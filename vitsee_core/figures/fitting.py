"""Text of a finished figure, fitted into it: lines are broken, labels repeated or in each other's
way are left out."""

from __future__ import annotations

import textwrap
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

Whole = dict[Any, str]  # text -> what it said before it was broken
ROUNDS = 4  # broken lines make panels smaller, which may break others
SMALLEST = 3.5  # points
APART = 0.4  # ems between tick labels beside each other


def fit(figure: Figure, dpi: float) -> None:
    """Break titles and labels that are longer than their panel, and thin out tick labels. What the
    figure says is then in its place: until something changes, it need not be laid out again.
    dpi: dots per inch that it is likely to be drawn with."""
    every = [axes for axes in all_axes(figure) if axes.get_visible()]
    _share_labels(every)
    whole: Whole = {}
    before = figure.dpi
    figure.dpi = dpi
    for _ in range(ROUNDS):
        _lay_out(figure)
        for axes in every:
            _settle_titles(axes)
        changed = [_fit_panel(axes, whole) for axes in every]
        changed += [_fit_title(part, whole) for part in (figure, *figure.subfigs)]
        if not any(changed):
            break
    figure.dpi = before
    figure.stale = any(changed)


def figure_of(axes: Axes) -> Figure:
    """The figure that a panel is in, whichever part of it."""
    found: Any = axes.get_figure(root=True)
    return found  # type: ignore[no-any-return]


def all_axes(figure: Figure) -> list[Axes]:
    """The figure's panels with those inside them, such as colour bars."""
    found: list[Any] = list(figure.axes)
    for axes in found:
        found += [child for child in axes.child_axes if child not in found]
    return found


def _lay_out(figure: Figure) -> None:
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
    for axes in all_axes(figure):
        locator: Any = axes.get_axes_locator()
        axes.apply_aspect(None if locator is None else locator(axes, None))


def _settle_titles(axes: Axes) -> None:
    """Titles stay where they are in panels with no ticks or powers of ten above them: matplotlib
    would measure the axes for each of them whenever it lays the figure out."""
    every: list[Any] = [axes, *axes.child_axes]
    bare = (
        one.xaxis.get_ticks_position() not in ("top", "unknown")
        and one.xaxis.get_label_position() == "bottom"
        and not one.yaxis.offsetText.get_text()
        for one in every
    )
    if all(bare):
        axes._autotitlepos = False  # type: ignore[attr-defined]


def _share_labels(every: list[Axes]) -> None:
    """A label that the panel below, or at the left, has too is written there alone."""
    places: dict[Any, Axes] = {}
    for axes in every:
        spec = axes.get_subplotspec()
        if spec is not None and spec.colspan.stop - spec.colspan.start == 1:
            places[id(spec.get_gridspec()), spec.rowspan.start, spec.colspan.start] = axes
    for (grid, row, column), axes in places.items():
        below = places.get((grid, row + 1, column))
        left = places.get((grid, row, column - 1))
        if below is not None and _alike(axes, below, "x"):
            axes.xaxis.label.set_visible(False)
        if left is not None and _alike(axes, left, "y"):
            axes.yaxis.label.set_visible(False)


def _alike(one: Axes, other: Axes, which: str) -> bool:
    texts = [getattr(axes, f"{which}axis").label.get_text() for axes in (one, other)]
    return bool(texts[0]) and texts[0] == texts[1]


def _fit_title(part: Any, whole: Whole) -> bool:
    title = part._suptitle
    return title is not None and _break(title, 0.98 * part.bbox.width, "width", whole)


def _fit_panel(axes: Axes, whole: Whole) -> bool:
    box = axes.get_window_extent()
    room = _room(axes, box)
    titles: list[Text] = [axes.title, axes._left_title, axes._right_title]  # type: ignore[attr-defined]
    right = titles[2].get_window_extent().width if titles[2].get_text() else 0.0
    em = float(titles[0].get_fontsize()) * figure_of(axes).dpi / 72
    # The title of a narrow panel may stand above its colour bar too.
    narrow = box.width < 10 * em
    bars = [child.get_tightbbox() for child in axes.child_axes if narrow]
    end = max([room[1], *(bar.x1 for bar in bars if bar is not None)])
    beside = max(end - box.x0 - (right + em if right else 0), 4 * em)
    changed = [_break(title, beside, "width", whole) for title in titles[:2]]
    changed += [
        _break(titles[2], box.width, "width", whole),
        _break(axes.xaxis.label, _around(box, room) + em, "width", whole),
        _break(axes.yaxis.label, max(box.height, 5 * em), "height", whole),
        *(_thin(axis) for axis in (axes.xaxis, axes.yaxis)),
        _shrink(axes),
    ]
    return any(changed)


def _room(axes: Axes, box: Any) -> tuple[float, float]:
    """The pixels at which the room of a panel begins and ends: one whose cells are square may be
    narrower than it."""
    place: Any = axes.get_subplotspec() and axes.get_position(original=True)
    if not place or axes.get_aspect() == "auto":
        return box.x0, box.x1
    whole = place.transformed(axes.figure.transSubfigure)  # type: ignore[union-attr]
    return min(box.x0, whole.x0), max(box.x1, whole.x1)


def _around(box: Any, room: tuple[float, float]) -> float:
    """The width of what stands in the middle below a panel."""
    middle = (box.x0 + box.x1) / 2
    return 2.0 * float(min(middle - room[0], room[1] - middle))


def _break(text: Text, room: float, side: str, whole: Whole) -> bool:
    """Break a text into lines that are no longer than there is room; whether it was changed. whole:
    what texts said before."""
    drawn = text.get_text()
    if not drawn or not text.get_visible():
        return False
    length = getattr(text.get_window_extent(), side)
    if length <= room + 1:
        return False
    words = whole.setdefault(text, drawn)
    longest = max(map(len, drawn.split("\n")))
    word = min(12, max(map(len, words.split())))  # shorter ones are not broken
    letters = max(word, min(longest - 1, int(longest * room / length)))
    words = words.replace(" = ", "\u00a0=\u00a0")  # stay together
    lines = [part for line in words.split("\n") for part in textwrap.wrap(line, letters)]
    text.set_text("\n".join(lines).replace("\u00a0", " "))
    return text.get_text() != drawn


def _shrink(axes: Axes) -> bool:
    """Write the texts in a panel smaller where two beside each other touch; whether they were."""
    every = [
        (text, text.get_window_extent()) for text in axes.texts if text.get_visible()
    ]
    every.sort(key=lambda one: (one[1].y0, one[1].x0))
    fits = 1.0
    for (_, a), (_, b) in pairwise(every):
        if near(a, b, 1.0) and b.x0 > a.x0 and abs(a.y0 - b.y0) < 0.2 * a.height:
            middle = (b.x0 + b.x1 - a.x0 - a.x1) / 2
            fits = min(fits, (middle - 1.5) / ((a.width + b.width) / 2))
    if fits >= 1:
        return False
    for text, _ in every:
        text.set_fontsize(max(SMALLEST, float(text.get_fontsize()) * fits))
    return True


def _thin(axis: Any) -> bool:
    """Leave out tick labels until no two of an axis touch, or, beside each other, run into one
    another; whether some were."""
    low, high = sorted(axis.get_view_interval())
    slack = 1e-6 * (high - low)
    ticks = [
        (tick.get_loc(), label)
        for tick in axis.get_major_ticks()
        for label in (tick.label1, tick.label2)
        if label.get_visible()
        and label.get_text()
        and low - slack <= tick.get_loc() <= high + slack
    ]
    if len(ticks) < 2:
        return False
    axis.get_tightbbox(axis.get_figure(root=True).canvas.get_renderer())
    ticks.sort(key=lambda tick: tick[0])
    boxes = [label.get_window_extent() for _, label in ticks]
    letter = float(ticks[0][1].get_fontsize()) * figure_of(axis.axes).dpi / 72
    gap = APART * letter if axis.axis_name == "x" else 1.5
    step = next(
        s
        for s in range(1, len(ticks) + 2)
        if not any(near(a, b, gap) for a, b in pairwise(boxes[::s]))
    )
    if step == 1:
        return False
    kept = ticks[::step]
    looks = [
        {"rotation": label.get_rotation(), "size": label.get_size()} for _, label in kept
    ]
    axis.set_ticks([place for place, _ in kept], [label.get_text() for _, label in kept])
    for label, look in zip(axis.get_ticklabels(), looks, strict=True):
        label.set(**look)
    if axis.get_scale() != "linear":
        axis.set_ticks([], minor=True)
    return True


def near(one: Any, other: Any, gap: float = 0.0) -> bool:
    """Whether two boxes in pixels touch, or come nearer than a gap."""
    return bool(
        min(one.x1, other.x1) - max(one.x0, other.x0) > -gap
        and min(one.y1, other.y1) - max(one.y0, other.y0) > -gap
    )
