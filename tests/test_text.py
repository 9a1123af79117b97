"""Names from stores and lists on terminals, in spreadsheets and in figures."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitsee_core.tables.formats import write_csv
from vitsee_core.tables.text import figure_text, from_cell, spreadsheet_cell, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ä × 中", "plain ä × 中"),
        ("\x1b[2Jgone", r"\x1b[2Jgone"),
        ("a\nb\tc\rd", r"a\nb\tc\rd"),
        ("\x7f\x9b", r"\x7f\x9b"),
        ("abc\u202etxt.exe", r"abc\u202etxt.exe"),
        ("line\u2028two", r"line\u2028two"),
        ("not utf-8: \udcff", r"not utf-8: \udcff"),
        (r"C:\path", r"C:\path"),
    ],
)
def test_visible(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown


def test_visible_keeps_what_it_is_told_to() -> None:
    assert visible("a\nb\x1b", keep="\n") == "a\nb\\x1b"


@pytest.mark.slow
@given(st.text())
def test_what_is_visible_can_be_printed_and_written(text: str) -> None:
    shown = visible(text)
    shown.encode()
    assert len(shown.splitlines()) <= 1


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-x", "'-x"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("'=1", "''=1"),
        ("\t=1", r"\t=1"),
        ("a=b", "a=b"),
        ("'quoted'", "'quoted'"),
        ("-1.5", "-1.5"),
        ("+3e5", "+3e5"),
        ("", ""),
    ],
)
def test_cells_are_no_formulas(text: str, cell: str) -> None:
    assert spreadsheet_cell(text) == cell
    assert from_cell(cell) == visible(text)


@given(st.text(alphabet="'=+-@a1.\n"))
def test_cells_come_back(text: str) -> None:
    cell = spreadsheet_cell(text)
    assert from_cell(cell) == visible(text)
    harmless = not cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    assert harmless or float(cell) == float(text)


def test_numbers_are_left_alone() -> None:
    file = io.StringIO()
    columns = {
        "value": np.array([-0.5, -1.0]),
        "shift": np.array([-3, 4]),
        "n": np.array(["-", ""]),
    }
    write_csv(columns, file)
    assert list(csv.reader(io.StringIO(file.getvalue())))[1:] == [
        ["-0.5", "-3", "'-"],
        ["-1.0", "4", ""],
    ]


def test_figure_text_twice_is_once() -> None:
    assert figure_text("$x^$") == r"\$x^\$"
    assert figure_text(figure_text("$x^$\x1b")) == r"\$x^\$\x1b"
