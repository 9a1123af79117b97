"""The one look: sizes, colours, and that drawing changes nothing for others."""

from __future__ import annotations

import io
import struct
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from vitsee_core.figures.panels import new_figure
from vitsee_core.figures.plotting import (
    COLOURS,
    DPI,
    colour,
    figure_bytes,
    integer_ticks,
    marker,
    save_figure,
    styled,
)
from vitsee_core.tables.formats import FIGURE_ENDINGS
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_stores.errors import VitseeError


def test_png_has_200_dots_an_inch(tmp_path: Path) -> None:
    save_figure(new_figure(2, 1), tmp_path / "a.png")
    width, height = struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24])
    assert (width, height) == (2 * DPI, DPI) == (400, 200)
    with pytest.raises(VitseeError, match="exists"):
        save_figure(new_figure(2, 1), tmp_path / "a.png")
    save_figure(new_figure(1, 1), tmp_path / "a.png", force=True)


@styled
def labelled(text: str, table: Table | None = None) -> Figure:
    """A line with a name in the title, the legend and on a tick."""
    name = text if table is None else str(table["store"][0])
    figure = new_figure(2, 2)
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], label=name)
    axes.set_xticks([0.5], [name])
    axes.set_title(name)
    axes.legend()
    return figure


def test_titles_are_broken_for_the_dots_that_are_written() -> None:
    """Letters of few dots are wider, so that titles that fill their line would be cut off."""

    @styled
    def titled(text: str) -> Figure:
        figure = new_figure(2, 2)
        figure.add_subplot()
        figure.suptitle(text)
        return figure

    def over(figure: Figure) -> float:
        """How many times as wide as the figure its title is at 40 dots an inch."""
        figure.dpi = 40
        return float(figure._suptitle.get_window_extent().width / figure.bbox.width)  # type: ignore[attr-defined]

    texts = [" ".join(["il"] * n) for n in (5, 9, 30)]
    assert min(over(titled(text)) for text in texts) > 1
    for text in texts:
        figure = titled(text)
        figure_bytes(figure, ".png", 40)
        assert over(figure) < 1


@pytest.mark.slow
@pytest.mark.parametrize("ending", FIGURE_ENDINGS)
def test_same_picture_same_bytes(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    first = figure_bytes(labelled("ViT"), ending)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "2000000000")
    assert figure_bytes(labelled("ViT"), ending) == first
    assert first.startswith(
        {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[ending]
    )


def saved(figure: Figure) -> bytes:
    """The PNG that matplotlib's own savefig writes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


@pytest.mark.slow
def test_png_is_what_savefig_writes() -> None:
    """It is laid out as savefig lays it out, for the dots that it gets, and drawn once."""
    figure, other = labelled("ViT"), labelled("ViT")
    other.set_layout_engine("none")
    assert figure_bytes(figure) == saved(other)
    assert figure.dpi == labelled("ViT").dpi
    # One that was changed since is laid out anew.
    for changed in (figure, other):
        changed.set_layout_engine("constrained")
        changed.axes[0].set_ylabel("a\nlabel\nof\nlines")
    assert figure_bytes(figure) == saved(other)


def test_text_stays_text() -> None:
    svg = figure_bytes(labelled("my model"), ".svg").decode()
    assert svg.count(">my model</text>") == 3
    # Type 42 is an embedded TrueType font, whose text can be selected; type 3 draws shapes.
    pdf = figure_bytes(labelled("my model"), ".pdf")
    assert b"/CIDFontType2" in pdf
    assert b"/Type3" not in pdf


@pytest.mark.slow
def test_names_are_drawn_letter_by_letter() -> None:
    """Neither set as a formula nor broken by one, and no control character in an XML file."""
    for name, drawn in (
        ("$x^$", "$x^$"),
        ("$\\alpha$", "$\\alpha$"),
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("5$", "5$"),
    ):
        table = Table({"store": np.array([name], object)})
        svg = figure_bytes(labelled("", table), ".svg").decode()
        assert svg.count(f">{drawn}</text>") == 3
    assert table["store"][0] == "5$", "the caller's table is left alone"


def test_letters_that_the_font_lacks_are_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure_bytes(labelled("图中图"))
    assert [r.getMessage() for r in caplog.records] == [
        "the figure's font has no letters 图中: boxes stand for them"
    ]


def test_endings_of_figures(tmp_path: Path) -> None:
    for name in ("a.svg", "a.PDF"):
        save_figure(new_figure(1, 1), tmp_path / name)
    with pytest.raises(VitseeError, match=r"ends in \.png, \.svg or \.pdf"):
        save_figure(new_figure(1, 1), tmp_path / "a.jpg")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.PDF", "a.svg"]


def test_styled_ignores_and_keeps_the_users_settings() -> None:
    @styled
    def draw() -> float:
        return float(matplotlib.rcParams["font.size"])

    with matplotlib.rc_context({"font.size": 33, "axes.grid": False}):
        before = dict(matplotlib.rcParams)
        assert draw() == 8
        assert dict(matplotlib.rcParams) == before


def test_lines_differ_in_colour_or_marker() -> None:
    looks = {(colour(i), marker(i)) for i in range(7 * len(COLOURS))}
    assert len(looks) == 7 * len(COLOURS)


def test_shorten() -> None:
    assert shorten("short", 5) == "short"
    assert shorten("vit_base_patch16_224.augreg", 12) == "vit_bas…greg"


@pytest.mark.parametrize("high", [1, 2, 9, 12, 32, 250])
def test_integer_ticks(high: int) -> None:
    axes = new_figure(2, 2).add_subplot()
    integer_ticks(axes, [0, high])
    ticks = axes.get_xticks().tolist()
    assert 2 <= len(ticks) <= 9
    assert all(tick == int(tick) for tick in ticks)
    assert set(range(0, high + 1, int(ticks[1]))) == set(ticks)


def test_integer_ticks_of_one_value() -> None:
    axes = new_figure(2, 2).add_subplot()
    integer_ticks(axes, [3])
    assert axes.get_xticks().tolist() == [3]
