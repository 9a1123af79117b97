"""The head of a report: the models, how many images of what, when and by whom."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from vitsee_core.figures.curve_looks import of_models
from vitsee_core.pages.report.materials import FoundStore, Materials
from vitsee_core.pages.report.redrawing import Result
from vitsee_core.pages.report.study_record import Section, StudyRecord, read_study
from vitsee_core.runtime.machine import human_bytes, plural
from vitsee_core.tables.text import visible
from vitsee_core.tables.words import example_noun
from vitsee_core.types import pl

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
    names = list(study.models)
    images = _images(materials, study)
    kinds = {result.command for result in materials.results}
    about = [
        *images,
        plural(len(kinds), "analyses"),
        plural(len(materials.results), "results"),
    ]
    about += [_date(materials)]
    own = materials.folder.resolve().name
    if names:
        own = ", ".join(names[:SHOWN_MODELS])
        own += (
            f" and {len(names) - SHOWN_MODELS} more" if len(names) > SHOWN_MODELS else ""
        )
    own = study.title or own
    command = shlex.join(study.command)
    return Overview(
        visible(title or own), [visible(one) for one in about if one], visible(command)
    )


def _images(materials: Materials, study: StudyRecord) -> list[str]:
    """`1,000 images of demo:test`, `500 of demo:train to learn classes from`."""
    of_data: dict[str, int] = {}
    examples: dict[str, str] = {}
    for store in materials.stores:
        data = data_of(store)
        of_data[data] = max(of_data.get(data, 0), store.record["n_images"])
        examples[data] = example_noun(store.record)
    texts = ["{0:,} {1} of {2}", "{0:,} of {2} to learn classes from"]
    found = [
        text.format(of_data[data], examples[data], data)
        for text, data in zip(texts, (study.data, study.train), strict=True)
        if data and data in of_data
    ]
    if found or not of_data:
        return found
    models = {*map(_model, materials.stores)}
    data, most = max(of_data.items(), key=lambda item: item[1])
    one = examples[data] if most > 1 else examples[data].removesuffix("s")
    return [plural(len(models), "models"), f"{most:,} {one}"]


def data_of(store: FoundStore) -> str:
    data = store.record["info"].get("data")
    return str(data.get("data", "")) if isinstance(data, dict) else ""


def _date(materials: Materials) -> str:
    dates = []
    for result in materials.results:
        try:
            dates.append(
                datetime.fromisoformat(str(result.file.sidecar.get("created"))).date()
            )
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
            lacks.append(
                f"{record['n_committed']} of {plural(record['n_slabs'], 'slabs')}"
            )
        if not record["selfcheck"]:
            lacks.append("no self-check")
        row = StoreRow(
            name=visible(store.name),
            data=visible(data_of(store)),
            images=f"{record['n_images']:,} {example_noun(record)}",
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
    name = str(store.record["model"].get("name"))
    weights = store.record["weights"]
    return visible(f"{name} ({weights})" if weights else name)


NOT_THERE = "not measured here"


class Number(NamedTuple):
    """what: it measures; paper: as printed; ours: with its interval and where it is."""

    what: str
    paper: str
    ours: str


def paper_numbers(section: Section, results: Sequence[Result]) -> list[Number]:
    """The numbers that the paper of a figure prints, beside ours."""
    found = []
    for one in section.printed:
        own = (
            result
            for result in results
            if result.file.path.stem in section.results
            and one.result in (result.file.path.stem, result.command)
        )
        ours = next((_best(result, one.where) for result in own), "")
        found.append(Number(visible(one.what), f"{one.paper:.10g}", ours or NOT_THERE))
    return found


def _best(result: Result, where: Mapping[str, Any]) -> str:
    """The largest value of these rows, without baselines; "" if there is none."""
    rows = result.file.table.frame
    if not {"value", *where} <= {*rows.columns}:
        return ""
    rows = of_models(rows).filter(
        pl.col(n).cast(pl.String) == str(cell) for n, cell in where.items()
    )
    rows = rows.filter(pl.col("value").is_not_null()).sort("value", maintain_order=True)
    if not len(rows):
        return ""
    best = rows.filter(value=rows["value"][-1]).row(0, named=True)
    text = f"{best['value']:.4g}"
    if {"low", "high"} <= {*best}:
        low, high = (np.nan if best[n] is None else best[n] for n in ("low", "high"))
        text += f" [{low:.4g}, {high:.4g}]"
    return visible(text + (f" at {best['site']}" if "site" in best else ""))
