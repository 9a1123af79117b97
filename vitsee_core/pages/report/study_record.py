"""`study.json`: what was asked of a study, and how each of its steps ended, as it is read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from vitsee_stores.disk import read_regular
from vitsee_stores.manifest import by_reason
from vitsee_stores.metadata import parse
from vitsee_stores.schema import Real, checked

STUDY = "study.json"
MOST_BYTES = 64 << 20


class StudyStep(Struct, omit_defaults=True):
    """A step of `study.json`: how it ended, the ids and digests of its files, why it failed."""

    status: str
    command: str
    seconds: float
    inputs: dict[str, str]
    outputs: dict[str, str]
    reason: str = ""


class Printed(Struct, forbid_unknown_fields=True):
    """A number that a paper prints, and the rows of a result among which ours is the largest."""

    what: str
    paper: Real
    result: str
    where: dict[str, bool | int | float | str]


class Section(Struct):
    """A figure of a study that is written as a file. results: the stems of its tables."""

    title: str
    note: str
    results: list[str]
    printed: list[Printed]


class Survey(Struct, frozen=True):
    """The survey of a study's models: what each offers. versions: of the packages it was made
    with; models: name -> fields of a `SurveyedModel`."""

    versions: dict[str, str] = {}
    models: dict[str, Any] = {}


class StudyRecord(Struct):
    """The fields of `study.json` that are read again."""

    steps: dict[str, StudyStep] = {}
    command: list[str] = []
    models: dict[str, str] = {}
    data: str = ""
    train: str | None = None
    left_out: dict[str, str] = {}
    title: str = ""
    note: str = ""
    sections: list[Section] = []
    survey: Survey = Survey()


def read_study_file(path: Path) -> StudyRecord | None:
    """The record of a study in this file; None if there is none, or the file is something else."""
    try:
        found = parse(read_regular(path, MOST_BYTES))
        ours = isinstance(found, dict) and ("steps" in found or "models" in found)
        return checked(found, StudyRecord) if ours else None
    except (OSError, ValueError):
        return None


def read_study(folder: Path) -> StudyRecord:
    """The record of the study in a folder; an empty one without any."""
    found = read_study_file(folder / STUDY)
    if found is not None and found.models:
        return found
    return StudyRecord()


def failed_steps(study: StudyRecord) -> dict[str, str]:
    """Steps of a study that failed -> why."""
    return {
        name: step.reason for name, step in study.steps.items() if step.status == "failed"
    }


def failures(study: StudyRecord) -> list[str]:
    """The same, a line each."""
    failed = failed_steps(study)
    return [
        f"Failed: {x}: {why or 'no reason is recorded'}." for x, why in failed.items()
    ]


def remarks(study: StudyRecord) -> list[str]:
    """The note on all figures, and the analyses that were left out, a line per reason."""
    left_out = by_reason(study.left_out, shown=len(study.left_out))
    note = [study.note] if study.note else []
    return note + [f"Not in this study: {line}." for line in left_out]
