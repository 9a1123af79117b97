"""Names from stores and lists on terminals, in spreadsheets and in figures."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitsee_core.tables.formats import read_table, table_bytes
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import figure_text, spreadsheet_cell, visible


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


def read_back(text: str) -> str:
    """The cell that is read back from a CSV with this one in a column of text."""
    written = table_bytes(Table({"text": [text], "n": [1]}).written, ".csv")
    frame = read_table(Path("r.csv"), written, {"text": "text"})
    return str(Table(frame)["text"][0])


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
    assert read_back(text) == visible(text)


@given(st.text(alphabet="'=+-@a1.\n"))
def test_cells_come_back(text: str) -> None:
    cell = spreadsheet_cell(text)
    assert read_back(text) == visible(text)
    harmless = not cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    assert harmless or float(cell) == float(text)


def test_numbers_are_left_alone() -> None:
    columns = {
        "value": np.array([-0.5, -1.0]),
        "shift": np.array([-3, 4]),
        "n": np.array(["-", ""]),
    }
    written = table_bytes(Table(columns).written, ".csv").decode()
    assert list(csv.reader(io.StringIO(written)))[1:] == [
        ["-0.5", "-3", "'-"],
        ["-1.0", "4", ""],
    ]


def test_figure_text_twice_is_once() -> None:
    assert figure_text("$x^$") == r"\$x^\$"
    assert figure_text(figure_text("$x^$\x1b")) == r"\$x^\$\x1b"
