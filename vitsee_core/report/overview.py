"""What a report is about, for its head: the models, how many images of what, when and by whom."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitsee_core.report.materials import FoundStore, Materials
from vitsee_core.report.redrawing import Result
from vitsee_core.runtime.machine import counted, human_bytes
from vitsee_core.tables.text import visible
from vitsee_stores.manifest import by_reason

STUDY_FILE = "study.json"
SHOWN_MODELS = 6  # in a title


@dataclass(frozen=True)
class Overview:
    """title: of the page; about: what it shows, in short pieces; command: that made it all, ""
    where several did."""

    title: str
    about: list[str]
    command: str


def overview(materials: Materials, title: str) -> Overview:
    """A study's models and images, or another folder's name and what lies in it."""
    study = read_study(materials.folder)
    names = [str(name) for name in study.get("models") or ()]
    images = _images(materials, study)
    kinds = {result.command for result in materials.results}
    about = [*images, counted(len(kinds), "analyses"), counted(len(materials.results), "results")]
    about += [_date(materials)]
    own = materials.folder.resolve().name
    if names:
        own = ", ".join(names[:SHOWN_MODELS])
        own += f" and {len(names) - SHOWN_MODELS} more" if len(names) > SHOWN_MODELS else ""
    words = study.get("command")
    command = shlex.join(map(str, words)) if isinstance(words, list) else ""
    own = str(study.get("title") or own)
    return Overview(visible(title or own), [visible(one) for one in about if one], visible(command))


def read_study(folder: Path) -> Mapping[str, Any]:
    """What `study.json` says was asked for, as far as it has the shape that ours have."""
    try:
        found = json.loads((folder / STUDY_FILE).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    models = found.get("models") if isinstance(found, dict) else None
    return found if models and isinstance(models, dict) else {}


def failed_steps(study: Mapping[str, Any]) -> dict[str, Any]:
    """Steps of a study that failed -> why."""
    steps = study.get("steps")
    return {
        name: entry.get("reason")
        for name, entry in (steps.items() if isinstance(steps, dict) else ())
        if isinstance(entry, dict) and entry.get("status") == "failed"
    }


def failures(folder: Path) -> list[str]:
    """The same of the study in the folder, a line each."""
    failed = failed_steps(read_study(folder))
    return [f"Failed: {x}: {why or 'no reason is recorded'}." for x, why in failed.items()]


def notes_of_study(folder: Path) -> list[str]:
    """What the file of the study says of all its figures."""
    return [str(note) for note in [read_study(folder).get("note")] if note]


def not_in_study(folder: Path) -> list[str]:
    """Analyses that the study in the folder left out, a line a reason."""
    left_out = read_study(folder).get("left_out")
    if not isinstance(left_out, dict):
        return []
    named = {str(name): str(reason) for name, reason in left_out.items()}
    return [f"Not in this study: {line}." for line in by_reason(named, shown=len(named))]


def _images(materials: Materials, study: Mapping[str, Any]) -> list[str]:
    """`1,000 images of demo:test`, `500 of demo:train to learn classes from`."""
    of_data: dict[str, int] = {}
    for store in materials.stores:
        data = data_of(store)
        of_data[data] = max(of_data.get(data, 0), store.record["n_images"])
    texts = {"data": "{:,} images of {}", "train": "{:,} of {} to learn classes from"}
    asked = {name: study.get(name) for name in texts}
    found = [
        texts[name].format(of_data[data], data)
        for name, data in asked.items()
        if isinstance(data, str) and data in of_data
    ]
    if found or not of_data:
        return found
    models = {*map(_model, materials.stores)}
    most = max(of_data.values())
    return [counted(len(models), "models"), f"{most:,} image{'' if most == 1 else 's'}"]


def data_of(store: FoundStore) -> str:
    data = store.record["info"].get("data")
    return str(data.get("data", "")) if isinstance(data, dict) else ""


def _date(materials: Materials) -> str:
    dates = []
    for result in materials.results:
        try:
            dates.append(datetime.fromisoformat(str(result.file.sidecar.get("created"))).date())
        except ValueError:
            continue
    return f"{max(dates):%d %B %Y}".lstrip("0") if dates else ""


# ------------------------------------------------------------------------------------ stores


@dataclass(frozen=True)
class StoreRow:
    """A line of the table of stores. state: complete and checked, or what it lacks."""

    name: str
    data: str
    images: str
    size: str
    state: str
    sound: bool
    command: str
    store: FoundStore


def stores_by_model(materials: Materials) -> dict[str, list[StoreRow]]:
    """Model with its weights -> its stores."""
    found: dict[str, list[StoreRow]] = {}
    for store in materials.stores:
        record = store.record
        lacks = []
        if not record["complete"]:
            lacks.append(f"{record['n_committed']} of {counted(record['n_slabs'], 'slabs')}")
        if not record["selfcheck"]:
            lacks.append("no self-check")
        row = StoreRow(
            name=visible(store.name),
            data=visible(data_of(store)),
            images=f"{record['n_images']:,}",
            size=human_bytes(record["size_bytes"]),
            state=", ".join(lacks) or "complete, checked",
            sound=not lacks,
            command=visible(str(record["info"].get("command") or "")),
            store=store,
        )
        found.setdefault(_model(store), []).append(row)
    return found


def _model(store: FoundStore) -> str:
    """`demo:vit (random 0)`."""
    name, weights = str(store.record["model"].get("name")), store.record["weights"]
    return visible(f"{name} ({weights})" if weights else name)


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
