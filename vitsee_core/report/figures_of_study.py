"""The figures of a study that was written as a file: headings of the report, in the file's order,
and the numbers that a paper prints beside those of the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitsee_core.report.overview import read_study
from vitsee_core.report.redrawing import Result
from vitsee_core.tables.text import visible

NOT_THERE = "not measured here"


class Number(NamedTuple):
    """what: it measures; paper: as printed; ours: with its interval and where it is."""

    what: str
    paper: str
    ours: str


@dataclass(frozen=True)
class StudyFigure:
    """A figure: results are the stems of its tables."""

    title: str
    note: str
    results: tuple[str, ...]
    printed: tuple[Mapping[str, Any], ...]

    def numbers(self, results: Sequence[Result]) -> list[Number]:
        """What the paper prints, beside ours."""
        own = [one for one in results if one.file.path.stem in self.results]
        return [_number(printed, own) for printed in self.printed]


def study_figures(folder: Path) -> list[StudyFigure]:
    """The figures that `study.json` lists, as far as it has the shape that ours have."""
    found = read_study(folder).get("sections")
    figures = []
    for entry in found if isinstance(found, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("results"), list):
            printed = entry.get("printed")
            figures.append(
                StudyFigure(
                    visible(str(entry.get("title", ""))),
                    visible(str(entry.get("note", ""))),
                    tuple(map(str, entry["results"])),
                    tuple(one for one in printed if isinstance(one, dict))
                    if isinstance(printed, list)
                    else (),
                )
            )
    return figures


def _number(printed: Mapping[str, Any], results: Sequence[Result]) -> Number:
    what, paper = visible(str(printed.get("what", ""))), f"{printed.get('paper')}"
    where = printed.get("where")
    for result in results:
        named = printed.get("result") in (result.file.path.stem, result.command)
        if named and isinstance(where, dict):
            return Number(what, paper, _best(result, where) or NOT_THERE)
    return Number(what, paper, NOT_THERE)


def _best(result: Result, where: Mapping[str, Any]) -> str:
    """The largest value of these rows, without baselines; "" if there is none."""
    table = result.file.table
    if not {"value", *where} <= {*table.columns}:
        return ""
    rows = np.ones(len(table), bool)
    for column, text in where.items():
        rows &= np.array([str(cell) == str(text) for cell in table[column].tolist()], bool)
    if "baseline" in table.columns:
        rows &= ~table.given("baseline")
    values = np.where(rows, table["value"].astype(np.float64), np.nan)
    if np.isnan(values).all():
        return ""
    best = int(np.nanargmax(values))
    text = f"{values[best]:.4g}"
    if {"low", "high"} <= {*table.columns}:
        text += f" [{float(table['low'][best]):.4g}, {float(table['high'][best]):.4g}]"
    return visible(text + (f" at {table['site'][best]}" if "site" in table.columns else ""))
