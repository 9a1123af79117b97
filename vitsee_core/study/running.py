"""Executes a plan: finished steps are skipped, failed ones named, the others continue."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from vitsee_core.report.outputs import Outputs
from vitsee_core.report.study_record import STUDY as FILE
from vitsee_core.report.study_record import StudyStep, read_study_file
from vitsee_core.runtime.versions import result_versions
from vitsee_core.study.steps import RESULTS, SETS, STORES, Plan, Step, Study
from vitsee_core.tables.files import TABLE_ENDINGS, check_place, write_files
from vitsee_stores.errors import VitseeError, reason
from vitsee_stores.manifest import few

BEGUN, DONE, FAILED, LEFT_OUT = "begun", "done", "failed", "left out"
Report = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    code: int
    reason: str = ""  # in one line, "" if it succeeded
    applies: bool = True  # whether these models have what the command is about


Perform = Callable[[Step], Outcome]


@dataclass
class Record:
    """`study.json`: the request, and for each step what it was made from and how it ended."""

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, StudyStep] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Record:
        """The record in a folder; an empty one if there is none, or not ours."""
        found = read_study_file(folder / FILE)
        return cls(folder / FILE, {}, {} if found is None else found.steps)

    def outdate(self, step: Step) -> None:
        """Have it done again, whatever it was made from."""
        if step.name in self.steps:
            self.steps[step.name].status = BEGUN

    def write(self) -> None:
        steps = msgspec.to_builtins(self.steps)
        text = json.dumps({**self.about, "steps": steps}, indent=2) + "\n"
        write_files({self.path: text.encode()}, force=True)


def record_path(study: Study) -> Path:
    return study.folder / FILE


def folders(study: Study) -> list[Path]:
    return [study.folder / name for name in (STORES, RESULTS)]


def make_folders(study: Study) -> None:
    """Make the study's folders. Raises VitseeError: impossible, or there is another
    `study.json`."""
    record = record_path(study)
    if record.exists() and read_study_file(record) is None:
        raise VitseeError(f"{record} is no record of a study; choose another -o, or remove it")
    try:
        for folder in folders(study):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VitseeError(f"cannot make the folder {study.folder}: {reason(error)}") from None


def begin(study: Study, command: Sequence[str], plan: Plan) -> Record:
    """The record of a study that begins or continues."""
    record = Record.read(study.folder)
    record.about = {
        "command": list(command),
        "models": dict(study.models),
        "data": study.data,
        "train": study.train,
        "images": study.images,
        "train_images": study.asked("train"),
        "seed": study.seed,
        "left_out": dict(plan.left_out),
        "title": study.title,
        "note": study.note,
        "sections": plan.sections,
        "versions": result_versions(),
    }
    record.write()
    return record


def carry_out(
    steps: Sequence[Step],
    record: Record,
    perform: Perform,
    say: Report,
    *,
    first: int = 1,
    total: int | None = None,
    before: Sequence[Step] = (),
) -> list[Step]:
    """Perform the steps in order; returns those that failed, or whose input is missing or stale
    because this study's step failed. A step that does not apply to its models is left out, with
    its reason.

    Args:
        steps: of one plan.
        record: written after every step.
        perform: runs a step's command.
        say: receives a line for each step.
        first, total: how the lines count.
        before: steps that failed earlier; files at their outputs are from another study.

    Raises:
        Stopped: a signal ended a step.
    """
    failed: list[Step] = []
    unfit: list[Step] = []
    total = len(steps) if total is None else total
    for number, step in enumerate(steps, first):
        head = f"[{number}/{total}] {step.name}"
        stale = {path for other in (*before, *failed, *unfit) for path in other.outputs}
        missing = [path for path in step.inputs if path in stale or not path.exists()]
        if step.partial and len(missing) < len(step.inputs):
            step, missing = step.without(missing), []
        entry = record.steps.get(step.name)
        if missing:
            text = f"{', '.join(path.name for path in missing)} was not made"
            record.steps[step.name] = _entry(step, LEFT_OUT, 0.0, text)
            say(f"{head}: left out: {text}")
            failed.append(step)
        elif _is_finished(step, entry):
            say(f"{head}: done before")
            continue
        else:
            record.steps[step.name] = _entry(step, BEGUN, 0.0)
            record.write()
            start = time.monotonic()
            outcome = perform(step)
            seconds = time.monotonic() - start
            if outcome.code > 1 and outcome.code != 2:
                raise Stopped(outcome.code)
            if outcome.code and not outcome.applies:
                record.steps[step.name] = _entry(step, LEFT_OUT, seconds, outcome.reason)
                record.about.setdefault("left_out", {})[step.name] = outcome.reason
                say(f"{head}: left out: {outcome.reason}")
                unfit.append(step)
            elif outcome.code:
                text = outcome.reason or f"exit code {outcome.code}"
                record.steps[step.name] = _entry(step, FAILED, seconds, text)
                say(f"{head}: failed: {text}")
                failed.append(step)
            else:
                record.steps[step.name] = _entry(step, DONE, seconds)
                say(f"{head}: {seconds:.1f} s")
        record.write()
    return failed


class Stopped(Exception):
    """A signal ended a step. code: the exit code for it."""

    def __init__(self, code: int):
        super().__init__(f"stopped with exit code {code}")
        self.code = code


def _entry(step: Step, status: str, seconds: float, text: str = "") -> StudyStep:
    outputs = {str(path): _outcome(path) for path in step.outputs}
    inputs = fingerprints(step.inputs)
    return StudyStep(status, step.line, round(seconds, 1), inputs, outputs, text)


def _is_finished(step: Step, before: StudyStep | None) -> bool:
    """Whether a step was done with the same words from the same inputs, and its files are those
    that it made."""
    return (
        before is not None
        and before.status == DONE
        and before.command == step.line
        and before.inputs == fingerprints(step.inputs)
        and before.outputs == {str(path): _outcome(path) for path in step.outputs}
        and all(path.exists() for path in step.outputs)
    )


def _outcome(path: Path) -> str:
    """Identity of an output: the id of a complete store, the digest of a file."""
    return next(iter(fingerprints((path,)).values()), "")


def fingerprints(paths: Sequence[Path]) -> dict[str, str]:
    """Path -> contents: a store's id (and whether it is complete), a file's digest."""
    found = {}
    for path in paths:
        if path.suffix == ".zarr":
            from vitsee_stores import open_store

            try:
                store = open_store(path, allow_partial=True)
                grown = f", generation {store.generation}" if store.generation > 1 else ""
                partial = "" if store.complete else ", partial"
                found[str(path)] = store.manifest.store_id + grown + partial
            except (VitseeError, OSError):
                found[str(path)] = ""
        elif path.is_file():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[str(path)] = SETS if path.is_dir() else ""
    return found


def check_outputs(study: Study, steps: Sequence[Step], record: Record) -> None:
    """Refuse outputs of steps that are not the study's own, by its record. Stores are left to
    extract, which replaces none. Raises VitseeError: names the files; or the study's folder is
    inside a store or among its images."""
    for images in (study.data, study.train or ""):
        check_place(record.path, images=images)
    found = [
        path
        for step in steps
        for output in step.outputs
        if output.suffix != ".zarr" and not _is_own(output.relative_to(study.folder), record)
        for path in _files_of(output)
        if path.exists()
    ]
    if found:
        names = few([str(path) for path in found])
        raise VitseeError(
            f"{names} would be replaced, and {record.path} does not say that this study wrote "
            f"{'it' if len(found) == 1 else 'them'}; move {'it' if len(found) == 1 else 'them'} "
            "away, or choose another -o"
        )


def _is_own(place: Path, record: Record) -> bool:
    """Whether a finished step wrote this place of the study's folder, wherever that was then; or
    one was stopped while it wrote."""
    for entry in record.steps.values():
        for path, held in entry.outputs.items():
            ours = held or entry.status == BEGUN
            if ours and Path(path).parts[-len(place.parts) :] == place.parts:
                return True
    return False


def _files_of(output: Path) -> Iterator[Path]:
    if output.name.endswith(TABLE_ENDINGS):
        yield from Outputs(output, with_replicates=True).paths()
    else:
        yield output
