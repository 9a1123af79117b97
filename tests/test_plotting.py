"""The one look: sizes, colours, and that drawing changes nothing for others."""

from __future__ import annotations

import struct
from pathlib import Path

import matplotlib
import pytest

from vitsee_core.plotting import (
    COLOURS,
    DPI,
    colour,
    integer_ticks,
    legend_above_data,
    marker,
    new_figure,
    png_bytes,
    save_png,
    shorten,
    styled,
)
from vitsee_stores.errors import VitseeError


def test_png_has_200_dots_an_inch(tmp_path: Path) -> None:
    save_png(new_figure(2, 1), tmp_path / "a.png")
    width, height = struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24])
    assert (width, height) == (2 * DPI, DPI) == (400, 200)
    with pytest.raises(VitseeError, match="exists"):
        save_png(new_figure(2, 1), tmp_path / "a.png")
    save_png(new_figure(1, 1), tmp_path / "a.png", force=True)


def test_same_picture_same_bytes() -> None:
    assert png_bytes(new_figure(1, 1)) == png_bytes(new_figure(1, 1))


def test_styled_ignores_and_keeps_the_users_settings() -> None:
    @styled
    def draw() -> float:
        return float(matplotlib.rcParams["font.size"])

    with matplotlib.rc_context({"font.size": 33, "axes.grid": False}):
        before = dict(matplotlib.rcParams)
        assert draw() == 9
        assert dict(matplotlib.rcParams) == before


def test_lines_differ_in_colour_or_marker() -> None:
    looks = {(colour(i), marker(i)) for i in range(len(COLOURS) ** 2)}
    assert len(looks) == len(COLOURS) ** 2


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


@pytest.mark.parametrize("n_lines", [1, 4, 9])
def test_legend_stays_clear_of_the_data(n_lines: int) -> None:
    @styled
    def draw() -> None:
        figure = new_figure(3, 3)
        axes = figure.add_subplot()
        for i in range(n_lines):
            axes.plot([0, 1], [5 + i, 10], label=f"line {i}")
        legend_above_data(axes, 2)
        figure.draw_without_rendering()
        legend = axes.get_legend()
        assert legend is not None
        lowest = legend.get_window_extent().y0
        top = axes.transData.transform((0, max(10, 4 + n_lines)))[1]
        assert lowest > top

    draw()
