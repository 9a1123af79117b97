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


class Overview(NamedTuple):
    """The head of the page.

    Attributes:
        title: of the page.
        about: what it shows, in short texts.
        command: that made it all; "" if several did.
    """

    title: str
    about: list[str]
    command: str


def overview(materials: Materials, title: str) -> Overview:
    """Return the head of a report: a study's models and images, or what lies in a folder.

    Args:
        materials: of the report.
        title: of the page; "" for the study's, its models, or the folder's name.
    """
    study = read_study(materials.folder)
    n_analyses = len({result.command for result in materials.results})
    about = [
        *_image_texts(materials, study),
        plural(n_analyses, "analyses"),
        plural(len(materials.results), "results"),
        _last_date(materials),
    ]
    models = list(study.models)
    names = ", ".join(models[:SHOWN_MODELS])
    if len(models) > SHOWN_MODELS:
        names += f" and {len(models) - SHOWN_MODELS} more"
    title = title or study.title or names or materials.folder.resolve().name
    return Overview(
        title=visible(title),
        about=[visible(text) for text in about if text],
        command=visible(shlex.join(study.command)),
    )


def _image_texts(materials: Materials, study: StudyRecord) -> list[str]:
    """Return `1,000 images of demo:test`, `500 of demo:train to learn classes from`.

    Without a study of these data: the number of models, and that of images of the largest data.
    """
    n_images: dict[str, int] = {}  # of each data set: of its largest store
    examples: dict[str, str] = {}
    for store in materials.stores:
        data = data_of(store)
        n_images[data] = max(n_images.get(data, 0), store.record["n_images"])
        examples[data] = example_noun(store.record)
    texts = []
    if study.data and study.data in n_images:
        data = study.data
        texts.append(f"{n_images[data]:,} {examples[data]} of {data}")
    if study.train and study.train in n_images:
        texts.append(f"{n_images[study.train]:,} of {study.train} to learn classes from")
    if texts or not n_images:
        return texts
    n_models = len({_model_and_weights(store) for store in materials.stores})
    data = max(n_images, key=lambda name: n_images[name])
    noun = examples[data]
    if n_images[data] <= 1:
        noun = noun.removesuffix("s")
    return [plural(n_models, "models"), f"{n_images[data]:,} {noun}"]


def data_of(store: FoundStore) -> str:
    """Return the name or path of the data that a store was extracted from; "" if unknown."""
    data = store.record["info"].get("data")
    return str(data.get("data", "")) if isinstance(data, dict) else ""


def _last_date(materials: Materials) -> str:
    """Return the day of the newest result, `3 May 2025`; "" if no sidecar says one."""
    dates = []
    for result in materials.results:
        created = str(result.file.sidecar.get("created"))
        try:
            dates.append(datetime.fromisoformat(created).date())
        except ValueError:
            continue
    return f"{max(dates):%d %B %Y}".lstrip("0") if dates else ""


# ------------------------------------------------------------------------------------ stores


@dataclass(frozen=True)
class StoreRow:
    """A line of the table of stores.

    `state` says that the store is complete and checked, or what it lacks; `sound` whether it lacks
    nothing.
    """

    name: str
    data: str
    images: str
    size: str
    state: str
    sound: bool
    command: str
    store: FoundStore


def stores_by_model(materials: Materials) -> dict[str, list[StoreRow]]:
    """Return model with its weights -> its stores."""
    rows: dict[str, list[StoreRow]] = {}
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
        rows.setdefault(_model_and_weights(store), []).append(row)
    return rows


def _model_and_weights(store: FoundStore) -> str:
    """Return `demo:vit (random 0)`."""
    name = str(store.record["model"].get("name"))
    weights = store.record["weights"]
    return visible(f"{name} ({weights})" if weights else name)


NOT_THERE = "not measured here"


class Number(NamedTuple):
    """A number that a paper prints, beside ours.

    Attributes:
        quantity: in words.
        paper: as printed.
        ours: with its interval and its site.
    """

    quantity: str
    paper: str
    ours: str


def paper_numbers(section: Section, results: Sequence[Result]) -> list[Number]:
    """Return the numbers that the paper of a figure prints, beside ours."""
    numbers = []
    for printed in section.printed:
        ours = ""
        for result in results:
            stem = result.file.path.stem
            # A result is named by its file, or by its command.
            if stem in section.results and printed.result in (stem, result.command):
                ours = _largest_value(result, printed.where)
                break
        paper = f"{printed.paper:.10g}"
        numbers.append(Number(visible(printed.what), paper, ours or NOT_THERE))
    return numbers


def _largest_value(result: Result, where: Mapping[str, Any]) -> str:
    """Return the largest value of some rows, without baselines: `0.81 [0.79, 0.83] at blocks.3`.

    "" if there is none. `where` is column -> cell of the rows that count.
    """
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
        low = np.nan if best["low"] is None else best["low"]
        high = np.nan if best["high"] is None else best["high"]
        text += f" [{low:.4g}, {high:.4g}]"
    if "site" in best:
        text += f" at {best['site']}"
    return visible(text)
