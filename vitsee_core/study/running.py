"""Executes a plan: finished steps are skipped, failed ones named, the others continue."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

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
from vitsee_core.study.recipes import EXPLORE
from vitsee_core.study.steps import LARGE_TABLES, RESULTS, SETS, STORES, Plan, Step, Study
from vitsee_core.tables.files import TABLE_ENDINGS, check_output_path, write_files
from vitsee_stores.errors import VitseeError, reason
from vitsee_stores.manifest import abbreviate

BEGUN = "begun"
DONE = "done"
FAILED = "failed"
LEFT_OUT = "left out"
Report = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    code: int
    reason: str = ""  # in one line, "" if it succeeded
    applies: bool = True  # whether these models have what the command is about


Perform = Callable[[Step], Outcome]
# Steps that begin first of those that were never timed: a long one begun last runs alone.
LONG = LARGE_TABLES | {EXPLORE}
LONGER = 1.0


class Workers(Protocol):
    """Performs several steps at a time."""

    def takes(self, step: Step) -> bool:
        """Whether it performs this one at all."""

    def free_for(self, step: Step) -> bool:
        """Whether this one could begin now."""

    def begin(self, step: Step) -> None:
        """Begin it."""

    def ended(self) -> tuple[str, Outcome]:
        """Wait for one to end: its name, and how."""


@dataclass
class Record:
    """`study.json`: the request, and for each step what it was made from and how it ended."""

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, StudyStep] = field(default_factory=dict)
    survey: Survey = field(default_factory=Survey)

    @classmethod
    def read(cls, folder: Path) -> Record:
        """The record in a folder; an empty one if there is none, or not ours."""
        found = read_study_file(folder / FILE) or StudyRecord()
        return cls(folder / FILE, {}, found.steps, found.survey)

    def surveyed(self, models: Mapping[str, str]) -> list[SurveyedModel] | None:
        """The models (label -> name) as this code found them when it began the study; None unless
        it found all of them. It says what their stores were made of, not what they are now."""
        if self.survey.versions != worker_versions():
            return None
        try:
            return [
                replace(
                    msgspec.convert(self.survey.models[name], SurveyedModel), label=label
                )
                for label, name in models.items()
            ]
        except (KeyError, msgspec.ValidationError):
            return None

    def finished(self, steps: Sequence[Step]) -> bool:
        """Whether all of these were done, and their inputs and outputs are unchanged since."""
        return all(_is_finished(step, self.steps.get(step.name)) for step in steps)

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
    """The record of a study that begins or continues. models: as they were surveyed."""
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


def carry_out(
    steps: Sequence[Step],
    record: Record,
    perform: Perform,
    say: Report,
    *,
    first: int = 1,
    total: int | None = None,
    before: Sequence[Step] = (),
    workers: Workers | None = None,
) -> list[Step]:
    """Perform the steps in order, or several at a time; returns those that failed, or whose input
    is missing or stale because this study's step failed. A step that does not apply to its models
    is left out, with its reason.

    Args:
        steps: of one plan.
        record: written after every step.
        perform: runs a step's command.
        say: receives a line for each step, as it ends.
        first, total: how the lines count.
        before: steps that failed earlier; files at their outputs are from another study.
        workers: perform what they take, the longest steps first, each once the steps are done whose
            outputs it reads; one that names no inputs comes after all before it. What they do not
            take is performed here while they rest.

    Raises:
        Stopped: a signal ended a step.
    """
    ended = _Ended(
        steps, record, say, first, len(steps) if total is None else total, before
    )
    waiting = [*steps]
    running = dict[str, tuple[Step, float]]()
    seconds = {name: entry.seconds for name, entry in record.steps.items()}
    long = {s.name: seconds.get(s.name) or LONGER * (s.command in LONG) for s in steps}
    while waiting or running:
        step = _next(steps, waiting, running, long, workers)
        if step is None:
            assert workers is not None
            name, outcome = workers.ended()
            step, start = running.pop(name)
            ended.note(step, outcome, time.monotonic() - start)
            continue
        waiting.remove(step)
        begun = ended.begun(step)
        if begun is None:
            continue
        start = time.monotonic()
        if workers is not None and workers.takes(begun):
            workers.begin(begun)
            running[begun.name] = begun, start
        else:
            ended.note(begun, perform(begun), time.monotonic() - start)
    return [ended.failed[step.name] for step in steps if step.name in ended.failed]


def _next(
    steps: Sequence[Step],
    waiting: Sequence[Step],
    running: Mapping[str, tuple[Step, float]],
    long: Mapping[str, float],
    workers: Workers | None,
) -> Step | None:
    """The step that begins now, None while all wait for those that are running."""
    if workers is None:
        return waiting[0]
    open_ = {step.name for step in waiting} | {*running}
    made = set[Path]()
    able = list[Step]()
    for step in steps:  # in the plan's order, so that `made` is what is not made yet
        ready = not made & {*step.inputs} if step.inputs else not made
        if step in waiting and ready:
            able.append(step)
        if step.name in open_:
            made.update(step.outputs or [Path(step.name)])
    moved = [step for step in able if workers.takes(step)]
    if able and able[0] not in moved:
        return None if running else able[0]
    free = [step for step in moved if workers.free_for(step)]
    return max(free, key=lambda step: long[step.name], default=None)


class _Ended:
    """The steps that ended, in the record and as lines."""

    def __init__(
        self,
        steps: Sequence[Step],
        record: Record,
        say: Report,
        first: int,
        total: int,
        before: Sequence[Step],
    ) -> None:
        self.record = record
        self._say = say
        self._number = first
        self._total = total
        self._order = [step.name for step in steps]
        self._bad = [*before]
        self.failed: dict[str, Step] = {}

    def begun(self, step: Step) -> Step | None:
        """The step as it is to be performed, on the inputs that are there; None if it is not."""
        stale = {path for other in self._bad for path in other.outputs}
        missing = [path for path in step.inputs if path in stale or not path.exists()]
        if step.partial and len(missing) < len(step.inputs):
            step = step.without(missing)
            missing = []
        if missing:
            text = f"{', '.join(path.name for path in missing)} was not made"
            self._left_out(step, 0.0, text)
            self.failed[step.name] = step
            self._write()
        elif _is_finished(step, self.record.steps.get(step.name)):
            self._line(step, "done before")
        else:
            self._enter(step, BEGUN, 0.0)
            self._write()
            return step
        return None

    def note(self, step: Step, outcome: Outcome, seconds: float) -> None:
        """How it ended. Raises Stopped: by a signal."""
        if outcome.code > 1 and outcome.code != 2:
            raise Stopped(outcome.code)
        if outcome.code and not outcome.applies:
            self._left_out(step, seconds, outcome.reason)
            self.record.about.setdefault("left_out", {})[step.name] = outcome.reason
        elif outcome.code:
            text = outcome.reason or f"exit code {outcome.code}"
            self._enter(step, FAILED, seconds, text)
            self._line(step, f"failed: {text}")
            self._bad.append(step)
            self.failed[step.name] = step
        else:
            self._enter(step, DONE, seconds)
            self._line(step, f"{seconds:.1f} s")
        self._write()

    def _left_out(self, step: Step, seconds: float, text: str) -> None:
        self._enter(step, LEFT_OUT, seconds, text)
        self._line(step, f"left out: {text}")
        self._bad.append(step)

    def _line(self, step: Step, text: str) -> None:
        self._say(f"[{self._number}/{self._total}] {step.name}: {text}")
        self._number += 1

    def _enter(self, step: Step, status: str, seconds: float, text: str = "") -> None:
        self.record.steps[step.name] = _entry(step, status, seconds, text)

    def _write(self) -> None:
        """The record, its steps in the plan's order, behind those that the plan does not have."""
        own = {
            name: self.record.steps[name]
            for name in self._order
            if name in self.record.steps
        }
        others = {name: e for name, e in self.record.steps.items() if name not in own}
        self.record.steps = others | own
        self.record.write()


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
    """Refuse outputs of steps that are not the study's own, by its record, and links that lead out
    of its folder. Stores are left to extract, which replaces none. Raises VitseeError: names the
    files; or the study's folder is inside a store or among its images."""
    for images in (study.data, study.train or ""):
        check_output_path(record.path, images=images)
    files = [
        path for step in steps for output in step.outputs for path in _files_of(output)
    ]
    for path in [record.path, *files]:
        outside = not path.resolve().is_relative_to(study.folder.resolve())
        if path.is_symlink() and path.suffix != ".zarr" and outside:
            raise VitseeError(
                f"{path} is a link to {path.resolve()}, outside of the study's folder; remove it, "
                "or choose another -o"
            )
    found = [
        path
        for step in steps
        for output in step.outputs
        if output.suffix != ".zarr"
        and not _is_own(output.relative_to(study.folder), record)
        for path in _files_of(output)
        if path.exists()
    ]
    if found:
        names = abbreviate([str(path) for path in found])
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
