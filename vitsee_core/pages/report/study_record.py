"""Reads `study.json`: the request of a study, and how each of its steps ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from vitsee_stores.disk import read_regular
from vitsee_stores.manifest import by_reason
from vitsee_stores.metadata import parse
from vitsee_stores.schema import Real, checked

STUDY = "study.json"
MAX_BYTES = 64 << 20  # of the file


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
    """A figure of a study that was given as a file; `results` are the stems of its tables."""

    title: str
    note: str
    results: list[str]
    printed: list[Printed]


class Survey(Struct, frozen=True):
    """The survey of a study's models: what each offers.

    Attributes:
        versions: of the packages with which it was made.
        models: name -> fields of a `SurveyedModel`.
    """

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
    """Return the record of a study in a file; None if the file is missing or something else."""
    try:
        document = parse(read_regular(path, MAX_BYTES))
        # Every field has a default: any JSON object would be an empty record.
        if isinstance(document, dict) and ("steps" in document or "models" in document):
            return checked(document, StudyRecord)
    except (OSError, ValueError):
        pass
    return None


def read_study(folder: Path) -> StudyRecord:
    """Return the record of the study in a folder; an empty one if there is none with models."""
    record = read_study_file(folder / STUDY)
    if record is not None and record.models:
        return record
    return StudyRecord()


def failed_steps(study: StudyRecord) -> dict[str, str]:
    """Return step -> reason, of the steps of a study that failed."""
    return {
        name: step.reason for name, step in study.steps.items() if step.status == "failed"
    }


def failures(study: StudyRecord) -> list[str]:
    """Return a line for each step of a study that failed."""
    lines = []
    for step, reason in failed_steps(study).items():
        lines.append(f"Failed: {step}: {reason or 'no reason is recorded'}.")
    return lines


def remarks(study: StudyRecord) -> list[str]:
    """Return the note on all figures, and the analyses that were left out, a line per reason."""
    lines = []
    if study.note:
        lines.append(study.note)
    for line in by_reason(study.left_out, max_names=len(study.left_out)):
        lines.append(f"Not in this study: {line}.")
    return lines
