"""`study.json`, the record of a study: what each step was made from, how it ended, and so which
files the study wrote and which steps are finished."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from vitsee_core.pages.report.outputs import Outputs
from vitsee_core.pages.report.study_record import STUDY as FILE
from vitsee_core.pages.report.study_record import (
    StudyRecord,
    StudyStep,
    Survey,
    read_study_file,
)
from vitsee_core.runtime.versions import result_versions, worker_versions
from vitsee_core.study.catalogue import SurveyedModel
from vitsee_core.study.steps import RESULTS, SETS, STORES, Plan, Step, Study
from vitsee_core.tables.files import TABLE_ENDINGS, check_output_path, write_files
from vitsee_stores.errors import VitseeError, reason
from vitsee_stores.manifest import abbreviate

# How a step stands in the record.
BEGUN = "begun"
DONE = "done"
FAILED = "failed"
LEFT_OUT = "left out"


@dataclass
class Record:
    """`study.json`: the request, and for each step what it was made from and how it ended.

    Attributes:
        path: of the file.
        about: the request, for the report.
        steps: name -> step, also of earlier requests.
        survey: the models as they were surveyed, and the versions that surveyed them.
    """

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, StudyStep] = field(default_factory=dict)
    survey: Survey = field(default_factory=Survey)

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Return the record in a folder; an empty one if there is none, or it is not ours."""
        content = read_study_file(folder / FILE) or StudyRecord()
        return cls(folder / FILE, {}, content.steps, content.survey)

    def surveyed(self, models: Mapping[str, str]) -> list[SurveyedModel] | None:
        """Return the models as they were surveyed when the study began; None if this code has not
        surveyed all of them.

        The record says what their stores were made of, which is not what they are now: a file of
        weights may have changed.

        Args:
            models: label -> name.
        """
        # Other code may find other sites in the same model.
        if self.survey.versions != worker_versions():
            return None
        surveyed_models = []
        for label, name in models.items():
            # The file may be a stranger's, or of an earlier version with other fields.
            try:
                model = msgspec.convert(self.survey.models[name], SurveyedModel)
            except (KeyError, msgspec.ValidationError):
                return None
            surveyed_models.append(replace(model, label=label))
        return surveyed_models

    def finished(self, steps: Sequence[Step]) -> bool:
        """Return whether all of these steps were done, and their inputs and outputs are unchanged
        since."""
        return all(is_finished(step, self.steps.get(step.name)) for step in steps)

    def outdate(self, step: Step) -> None:
        """Have a step done again, whatever it was made from."""
        if step.name in self.steps:
            self.steps[step.name].status = BEGUN

    def write(self) -> None:
        """Replace the file, in one go: a reader sees the old record or the new one."""
        steps = msgspec.to_builtins(self.steps)
        text = json.dumps({**self.about, "steps": steps}, indent=2) + "\n"
        write_files({self.path: text.encode()}, force=True)


def record_path(study: Study) -> Path:
    """Return the path of a study's record."""
    return study.folder / FILE


def folders(study: Study) -> list[Path]:
    """Return the folders of a study's stores and of its results."""
    return [study.folder / STORES, study.folder / RESULTS]


def make_folders(study: Study) -> None:
    """Make the study's folders.

    Raises:
        VitseeError: the disk refuses, or another program's `study.json` is there.
    """
    record = record_path(study)
    if record.exists() and read_study_file(record) is None:
        raise VitseeError(
            f"{record} is no record of a study; choose another -o, or remove it"
        )
    try:
        for folder in folders(study):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VitseeError(
            f"cannot make the folder {study.folder}: {reason(error)}"
        ) from None


def begin(
    study: Study, command: Sequence[str], plan: Plan, models: Sequence[SurveyedModel] = ()
) -> Record:
    """Write the record of a study that begins or continues.

    Args:
        study: the request.
        command: the command line, for the report.
        plan: its steps.
        models: as they were surveyed.

    Returns:
        The record, with the steps of earlier runs.
    """
    # Steps that this request does not have stay: another request may come back to them.
    record = Record.read(study.folder)
    record.about = {
        "command": list(command),
        "models": dict(study.models),
        "data": study.data,
        "train": study.train,
        "images": study.images,
        "train_images": study.n_requested("train"),
        "seed": study.seed,
        "left_out": dict(plan.left_out),
        "title": study.title,
        "note": study.note,
        "sections": plan.sections,
        "versions": result_versions(),
        "survey": {
            "versions": dict(worker_versions()),
            "models": {model.name: asdict(model) for model in models},
        },
    }
    record.write()
    return record


def is_finished(step: Step, entry: StudyStep | None) -> bool:
    """Return whether a step was done with the same words from the same inputs, and its files are
    those that it made. entry: of the step in the record."""
    return (
        entry is not None
        and entry.status == DONE
        and entry.command == step.line
        and entry.inputs == fingerprints(step.inputs)
        and entry.outputs == fingerprints(step.outputs)
        and all(path.exists() for path in step.outputs)
    )


def fingerprints(paths: Sequence[Path]) -> dict[str, str]:
    """Return path -> identity of its contents: a store's id (and whether it is complete), a file's
    digest, a word for a folder; "" if there is nothing."""
    identities = {}
    for path in paths:
        if path.suffix == ".zarr":
            from vitsee_stores import open_store

            try:
                store = open_store(path, allow_partial=True)
                # Sites that were added to a store change its generation, not its id.
                grown = f", generation {store.generation}" if store.generation > 1 else ""
                partial = "" if store.complete else ", partial"
                identities[str(path)] = store.manifest.store_id + grown + partial
            except (VitseeError, OSError):
                identities[str(path)] = ""
        elif path.is_file():
            identities[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.is_dir():
            # A set of images: its files are large, and always the same.
            identities[str(path)] = SETS
        else:
            identities[str(path)] = ""
    return identities


def check_outputs(study: Study, steps: Sequence[Step], record: Record) -> None:
    """Refuse outputs of steps that the study's record does not have, and links that lead out of its
    folder. Stores are left to extract, which replaces none.

    Raises:
        VitseeError: names the files; or the study's folder is inside a store or among its images.
    """
    check_output_path(record.path, images=study.data)
    check_output_path(record.path, images=study.train or "")
    # A link could lead a step to write anywhere; a study's folder may be a stranger's.
    outputs = [output for step in steps for output in step.outputs]
    files = [record.path]
    for output in outputs:
        files += _files_of(output)
    for path in files:
        is_outside = not path.resolve().is_relative_to(study.folder.resolve())
        if path.is_symlink() and path.suffix != ".zarr" and is_outside:
            raise VitseeError(
                f"{path} is a link to {path.resolve()}, outside of the study's folder; "
                "remove it, or choose another -o"
            )
    foreign = []
    for output in outputs:
        if output.suffix == ".zarr":
            continue
        if not _is_recorded(output.relative_to(study.folder), record):
            foreign += [str(path) for path in _files_of(output) if path.exists()]
    if foreign:
        pronoun = "it" if len(foreign) == 1 else "them"
        raise VitseeError(
            f"{abbreviate(foreign)} would be replaced, and {record.path} does not say "
            f"that this study wrote {pronoun}; move {pronoun} away, or choose another -o"
        )


def _is_recorded(path: Path, record: Record) -> bool:
    """Return whether a step of the record wrote a file, or was stopped while it wrote.

    Args:
        path: of the file in the study's folder, which may have been moved since.
        record: of the study.
    """
    for entry in record.steps.values():
        for recorded_path, identity in entry.outputs.items():
            is_written = identity != "" or entry.status == BEGUN
            if is_written and Path(recorded_path).parts[-len(path.parts) :] == path.parts:
                return True
    return False


def _files_of(output: Path) -> list[Path]:
    """Return the files that a command writes for an output: a table has its parameters and its
    replicates beside it."""
    if output.name.endswith(TABLE_ENDINGS):
        return [*Outputs(output, with_replicates=True).paths()]
    return [output]
