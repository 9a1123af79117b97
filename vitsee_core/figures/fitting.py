"""Fits the text of a finished figure into it.

Long lines are broken; labels that repeat or touch each other are left out.
"""

from __future__ import annotations

import textwrap
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

UnbrokenTexts = dict[Any, str]  # matplotlib's text -> its words before lines were broken
MAX_ROUNDS = (
    4  # broken lines make panels smaller, so that further lines may have to be broken
)
SMALLEST = 3.5  # points of a letter
TICK_GAP = 0.4  # ems between tick labels beside each other


def fit(figure: Figure, dpi: float) -> None:
    """Break titles and labels that are longer than their panel, and thin out tick labels.

    All text is in its place then: until something changes, the figure need not be laid out again.

    Args:
        figure: a finished figure.
        dpi: dots per inch that it is likely to be drawn with; letters are rounded to whole dots.
    """
    visible_axes = [axes for axes in all_axes(figure) if axes.get_visible()]
    _hide_repeated_labels(visible_axes)
    unbroken: UnbrokenTexts = {}
    dpi_before = figure.dpi
    figure.dpi = dpi
    for _ in range(MAX_ROUNDS):
        _lay_out(figure)
        for axes in visible_axes:
            _fix_title_position(axes)
        changed = [_fit_panel(axes, unbroken) for axes in visible_axes]
        boxes: list[Any] = [figure, *figure.subfigs]
        for box in boxes:
            title = box._suptitle
            if title is not None:
                width = 0.98 * box.bbox.width
                changed.append(_break_lines(title, width, "width", unbroken))
        if not any(changed):
            break
    figure.dpi = dpi_before
    figure.stale = any(changed)


def figure_of(axes: Axes) -> Figure:
    """Return the figure that a panel is in, also if it is in a subfigure."""
    figure: Any = axes.get_figure(root=True)
    return figure  # type: ignore[no-any-return]


def all_axes(figure: Figure) -> list[Axes]:
    """Return the figure's panels and the axes inside them, such as colour bars."""
    axes_list: list[Any] = list(figure.axes)
    for axes in axes_list:  # grows meanwhile: axes inside axes are visited, too
        axes_list += [child for child in axes.child_axes if child not in axes_list]
    return axes_list


def _lay_out(figure: Figure) -> None:
    """Put everything where drawing would put it, without drawing it."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
    for axes in all_axes(figure):
        locator: Any = axes.get_axes_locator()
        position = None if locator is None else locator(axes, None)
        axes.apply_aspect(position)


def _fix_title_position(axes: Axes) -> None:
    """Fix the height of titles in panels with no ticks or powers of ten above them.

    matplotlib would measure the axes for each title whenever it lays the figure out.
    """
    family: list[Any] = [axes, *axes.child_axes]
    nothing_above = (
        member.xaxis.get_ticks_position() not in ("top", "unknown")
        and member.xaxis.get_label_position() == "bottom"
        and not member.yaxis.offsetText.get_text()
        for member in family
    )
    if all(nothing_above):
        axes._autotitlepos = False  # type: ignore[attr-defined]


def _hide_repeated_labels(panels: list[Axes]) -> None:
    """Hide an axis label that the panel below, or at the left, has too."""
    panel_at: dict[tuple[int, int, int], Axes] = {}  # grid, row, column -> panel
    for axes in panels:
        spec = axes.get_subplotspec()
        if spec is not None and spec.colspan.stop - spec.colspan.start == 1:
            grid_id = id(spec.get_gridspec())
            panel_at[grid_id, spec.rowspan.start, spec.colspan.start] = axes
    for (grid_id, row, column), axes in panel_at.items():
        below = panel_at.get((grid_id, row + 1, column))
        left = panel_at.get((grid_id, row, column - 1))
        if below is not None and _same_text(axes.xaxis.label, below.xaxis.label):
            axes.xaxis.label.set_visible(False)
        if left is not None and _same_text(axes.yaxis.label, left.yaxis.label):
            axes.yaxis.label.set_visible(False)


def _same_text(label: Text, other: Text) -> bool:
    """Return whether two labels have the same text, and any."""
    return bool(label.get_text()) and label.get_text() == other.get_text()


def _fit_panel(axes: Axes, unbroken: UnbrokenTexts) -> bool:
    """Fit the titles, labels and ticks of a panel; return whether anything was changed."""
    box = axes.get_window_extent()
    left, right = _horizontal_room(axes, box)
    centre_title: Text = axes.title
    left_title: Text = axes._left_title  # type: ignore[attr-defined]
    right_title: Text = axes._right_title  # type: ignore[attr-defined]
    em = float(centre_title.get_fontsize()) * figure_of(axes).dpi / 72  # pixels
    title_end = right
    if (
        box.width < 10 * em
    ):  # the title of a narrow panel may stand above its colour bar, too
        for child in axes.child_axes:
            bar = child.get_tightbbox()
            if bar is not None:
                title_end = max(title_end, bar.x1)
    title_width = title_end - box.x0
    if right_title.get_text():
        right_width = right_title.get_window_extent().width
        if right_width:
            title_width -= right_width + em
    title_width = max(title_width, 4 * em)
    # A label below is centred on the panel: the nearer end of the room limits it.
    middle = (box.x0 + box.x1) / 2
    xlabel_width = 2.0 * float(min(middle - left, right - middle)) + em
    ylabel_height = max(box.height, 5 * em)
    changed = [
        _break_lines(centre_title, title_width, "width", unbroken),
        _break_lines(left_title, title_width, "width", unbroken),
        _break_lines(right_title, box.width, "width", unbroken),
        _break_lines(axes.xaxis.label, xlabel_width, "width", unbroken),
        _break_lines(axes.yaxis.label, ylabel_height, "height", unbroken),
        _thin_ticks(axes.xaxis),
        _thin_ticks(axes.yaxis),
        _shrink_texts(axes),
    ]
    return any(changed)


def _horizontal_room(axes: Axes, box: Any) -> tuple[float, float]:
    """Return the pixels at which the room of a panel begins and ends along x.

    A panel whose cells are square may be narrower than its room.

    Args:
        axes: the panel.
        box: its extent in pixels.
    """
    position: Any = axes.get_subplotspec() and axes.get_position(original=True)
    if not position or axes.get_aspect() == "auto":
        return box.x0, box.x1
    room = position.transformed(axes.figure.transSubfigure)  # type: ignore[union-attr]
    return min(box.x0, room.x0), max(box.x1, room.x1)


def _break_lines(text: Text, room: float, side: str, unbroken: UnbrokenTexts) -> bool:
    """Break a text into lines that fit; return whether it was changed.

    Args:
        text: a title or label.
        room: pixels that a line may be long.
        side: "width", or "height" of a text that is rotated.
        unbroken: the words of each text before its first change; every round begins with them.
    """
    drawn = text.get_text()
    if not drawn or not text.get_visible():
        return False
    length = getattr(text.get_window_extent(), side)
    if length <= room + 1:
        return False
    words = unbroken.setdefault(text, drawn)
    longest_line = max(map(len, drawn.split("\n")))
    # Words of up to 12 letters are not broken, however narrow the panel is.
    longest_word = min(12, max(map(len, words.split())))
    # At least a letter less than now: the estimate may round to the present length.
    fitting = min(longest_line - 1, int(longest_line * room / length))
    letters = max(longest_word, fitting)
    words = words.replace(
        " = ", "\u00a0=\u00a0"
    )  # textwrap does not break at such spaces
    lines: list[str] = []
    for line in words.split("\n"):
        lines += textwrap.wrap(line, letters)
    text.set_text("\n".join(lines).replace("\u00a0", " "))
    return text.get_text() != drawn


def _shrink_texts(axes: Axes) -> bool:
    """Write all texts in a panel smaller if two side by side touch; return whether they did."""
    texts = [
        (text, text.get_window_extent()) for text in axes.texts if text.get_visible()
    ]
    texts.sort(key=lambda item: (item[1].y0, item[1].x0))
    scale = 1.0
    for (_, a), (_, b) in pairwise(texts):
        side_by_side = b.x0 > a.x0 and abs(a.y0 - b.y0) < 0.2 * a.height
        if side_by_side and near(a, b, 1.0):
            # Centres stay where they are: the distance of the middles is what two halves may take.
            distance = (b.x0 + b.x1 - a.x0 - a.x1) / 2
            scale = min(scale, (distance - 1.5) / ((a.width + b.width) / 2))
    if scale >= 1:
        return False
    for text, _ in texts:
        text.set_fontsize(max(SMALLEST, float(text.get_fontsize()) * scale))
    return True


def _thin_ticks(axis: Any) -> bool:
    """Leave out tick labels until no two of an axis touch; return whether some were left out.

    Every k-th label stays, with the smallest k that suffices.
    """
    low, high = sorted(axis.get_view_interval())
    slack = 1e-6 * (high - low)
    ticks = []
    for tick in axis.get_major_ticks():
        location = tick.get_loc()
        if not low - slack <= location <= high + slack:
            continue
        for label in (tick.label1, tick.label2):  # at the lower edge and the upper one
            if label.get_visible() and label.get_text():
                ticks.append((location, label))
    if len(ticks) < 2:
        return False
    # matplotlib puts tick labels in their places when it measures them.
    axis.get_tightbbox(axis.get_figure(root=True).canvas.get_renderer())
    ticks.sort(key=lambda tick: tick[0])
    boxes = [label.get_window_extent() for _, label in ticks]
    letter = float(ticks[0][1].get_fontsize()) * figure_of(axis.axes).dpi / 72
    gap = TICK_GAP * letter if axis.axis_name == "x" else 1.5
    step = next(
        step
        for step in range(1, len(ticks) + 2)
        if not any(near(a, b, gap) for a, b in pairwise(boxes[::step]))
    )
    if step == 1:
        return False
    remaining = ticks[::step]
    positions = [position for position, _ in remaining]
    texts = [label.get_text() for _, label in remaining]
    # `set_ticks` makes new labels without the looks of the old ones.
    looks = [
        {"rotation": label.get_rotation(), "size": label.get_size()}
        for _, label in remaining
    ]
    axis.set_ticks(positions, texts)
    for label, look in zip(axis.get_ticklabels(), looks, strict=True):
        label.set(**look)
    if axis.get_scale() != "linear":
        axis.set_ticks([], minor=True)
    return True


def near(box: Any, other: Any, gap: float = 0.0) -> bool:
    """Return whether two boxes in pixels touch, or come nearer than a gap along both axes."""
    x_overlap = min(box.x1, other.x1) - max(box.x0, other.x0)
    y_overlap = min(box.y1, other.y1) - max(box.y0, other.y0)
    return bool(x_overlap > -gap and y_overlap > -gap)
