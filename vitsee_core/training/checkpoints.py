"""A study over the checkpoints of a training: each is a step of a `Series`."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from vitsee_core.extraction.options import ModelOptions, OptionError
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import load_model
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.selfcheck import NotFinite
from vitsee_core.models.weights.checkpoint_files import read_file
from vitsee_core.runtime.machine import human_bytes, plural
from vitsee_core.study.catalogue import SurveyedModel, needs_of_analyses
from vitsee_core.study.cost import EFFICIENCY, describe_time
from vitsee_core.tables.steps import UNITS, numbers_in_name
from vitsee_core.training.measurements import FIRST, LAST
from vitsee_core.training.series import (
    DIVERGED,
    EVERY_STORE,
    FAILED,
    Series,
    without_remarks,
)
from vitsee_stores.errors import VitseeError

# What `vitsee study --checkpoints` runs at every step, as far as the model supports it.
ANALYSES = (
    "attn-dist",
    "normratio",
    "spectrum",
    "spatial",
    "cka:first",
    "cka:last",
    "knn",
)


class StepFile(NamedTuple):
    """A checkpoint file and its step of the training."""

    step: int
    path: Path

    def cells(self) -> dict[str, Any]:
        """Return the file's name, size and time of change, which identify it in the record."""
        status = self.path.stat()
        changed = datetime.fromtimestamp(status.st_mtime, UTC).isoformat()
        return {"file": self.path.name, "size_bytes": status.st_size, "changed": changed}


def find_checkpoints(pattern: str) -> tuple[str, list[StepFile], dict[str, str]]:
    """Find the checkpoints of a glob and their steps.

    A step is the number behind `step`, `global_step`, `iter` or `epoch` in a file's name; else
    the file's field of that name; else the last number of the name that varies among the files.

    Returns:
        The unit of the steps ("step" or "epoch"), the files by step, and file name -> reason
        for each file that has no step because it cannot be read.

    Raises:
        VitseeError: no file matches, none has a step, or two have the same.
    """
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    # Trainers write under such names, and rename at the end.
    paths = [
        path
        for path in paths
        if path.is_file() and not path.name.endswith((".tmp", ".part"))
    ]
    if not paths:
        raise VitseeError(
            f"no file matches --checkpoints {pattern!r}; expected a glob of checkpoints, "
            "in quotes"
        )
    # path -> number by unit
    numbers = {path: numbers_in_name(path.stem) for path in paths}
    unreadable: dict[str, str] = {}
    names_suffice = any(
        all(unit in by_unit for by_unit in numbers.values()) for unit in UNITS
    )
    if not names_suffice:
        # Reading a checkpoint takes seconds: only if the names do not say it.
        for path in paths:
            try:
                numbers[path] |= _numbers_in_file(read_file(path))
            except ModelError as error:
                unreadable[path.name] = str(error)
    # Steps rather than epochs: the first unit that all readable files have.
    for unit in UNITS:
        step_by_path = {
            path: by_unit[unit] for path, by_unit in numbers.items() if unit in by_unit
        }
        is_complete = all(
            path in step_by_path or path.name in unreadable for path in paths
        )
        if step_by_path and is_complete:
            break
    else:
        # Names such as model-3.pt, which say no unit.
        unit = "step"
        step_by_path = _varying_numbers(paths)
        unreadable = {}
    if not step_by_path:
        raise VitseeError(
            f"no step in the names of {pattern!r}, nor a field step, global_step or "
            "epoch in the files; expected names such as step_1000.pt"
        )
    files = sorted(
        (StepFile(step, path) for path, step in step_by_path.items()),
        key=lambda file: file.step,
    )
    for file, next_file in pairwise(files):
        if file.step == next_file.step:
            raise VitseeError(
                f"two checkpoints of {unit} {file.step}: {file.path} and "
                f"{next_file.path}; expected a glob that takes one of them"
            )
    names = {file.path.name for file in files}
    skipped = {name: why for name, why in unreadable.items() if name not in names}
    return unit, files, skipped


def _numbers_in_file(content: Any) -> dict[str, int]:
    """Return the whole numbers in a checkpoint's fields for steps and epochs, by unit."""
    numbers: dict[str, int] = {}
    if not isinstance(content, Mapping):
        return numbers
    for unit, field_names in UNITS.items():
        for name in field_names:
            value = content.get(name)
            # Some trainers store the step as a tensor of one entry.
            if getattr(value, "numel", lambda: 0)() == 1:
                value = value.item()  # type: ignore[union-attr]
            if isinstance(value, (int, float)) and value == int(value):
                numbers.setdefault(unit, int(value))
    return numbers


def _varying_numbers(paths: Sequence[Path]) -> dict[Path, int]:
    """Return the last number in the files' names that is not the same in all, by path.

    The result is empty if the names differ in more than numbers, or have none.
    """
    # One row per file, one column per number in its name.
    numbers = [re.findall(r"\d+", path.stem) for path in paths]
    if len({re.sub(r"\d+", "0", path.stem) for path in paths}) > 1 or not numbers[0]:
        return {}
    columns = list(zip(*numbers, strict=True))
    varying = [column for column in columns if len({*column}) > 1] or columns[-1:]
    return {path: int(number) for path, number in zip(paths, varying[-1], strict=True)}


def applicable(
    model: SurveyedModel, *, with_train: bool
) -> tuple[list[str], dict[str, str]]:
    """Return which of `ANALYSES` a model supports.

    Args:
        model: the model.
        with_train: whether there are images to train on.

    Returns:
        Their names; and name -> reason for the others.
    """
    # Command -> what it needs of a model, from the declarations.
    needs = needs_of_analyses()
    left_out: dict[str, str] = {}
    names: list[str] = []
    for name in ANALYSES:
        command = name.partition(":")[0]
        if command == "knn" and not with_train:
            left_out[name] = "it learns from images: name them with --train"
        elif why := model.lack(needs[command]):
            left_out[name] = why
        else:
            names.append(name)
    return names, left_out


def run(
    series: Series,
    options: ModelOptions,
    files: Sequence[StepFile],
    say: Callable[[str], object],
) -> list[StepFile]:
    """Measure every checkpoint that was not measured before in its present state.

    A checkpoint that cannot be read or that diverged becomes a row of the record, and the
    others are measured all the same.

    Args:
        series: the steps; its name is that of the model.
        options: the model, without a checkpoint.
        files: the checkpoints by step.
        say: receives a line for each of them.

    Returns:
        The checkpoints that could not be read or measured; diverged ones are not among them.
    """
    # Sizes and times are those of the start: a file that is replaced while this runs is
    # measured by the next call.
    record_cells = {file.step: file.cells() for file in files}
    todo = [
        file for file in files if not series.is_done(file.step, record_cells[file.step])
    ]
    if len(todo) < len(files):
        say(
            f"{len(files) - len(todo)} of {plural(len(files), 'checkpoints')}: done before"
        )
    if not todo:
        return []
    work = CheckpointRun(series, options, record_cells, say)
    # Before the others, which are compared with them.
    work.make_reference(FIRST, files)
    work.make_reference(LAST, files[::-1])
    if series.ends.get(LAST, files[-1].step) < files[-1].step:
        last = series.ends[LAST]
        say(
            f"cka:last compares with {series.unit} {last}, the last one of the first call"
        )
    for number, file in enumerate(todo, 1):
        if work.attempt(file, work.measure):
            say(f"[{number}/{len(todo)}] {series.unit} {file.step}: {file.path.name}")
    diverged = series.steps_of(DIVERGED)
    return [file for file in work.failed.values() if file.step not in diverged]


class CheckpointRun:
    """Makes and measures the stores of checkpoints, and remembers which of them failed.

    Args:
        series: the steps.
        options: the model, without a checkpoint.
        record_cells: step -> cells of the record that identify its file.
        say: receives a line for each failure.

    Attributes:
        failed: step -> its file, which is not tried again.
    """

    def __init__(
        self,
        series: Series,
        options: ModelOptions,
        record_cells: Mapping[int, Mapping[str, Any]],
        say: Callable[[str], object],
    ) -> None:
        self.failed: dict[int, StepFile] = {}
        self._series = series
        self._options = options
        self._record_cells = record_cells
        self._say = say
        # (stem, reason) of analyses that failed
        self._reported: set[tuple[str, str]] = set()
        self._n_attempts = 0  # the remarks of the first alone are shown

    def load(self, file: StepFile) -> LoadedModel:
        """Return the model with the weights of a checkpoint, under the name of the series."""
        model = load_model(**{**vars(self._options), "checkpoint": file.path})
        return replace(model, name=self._series.name)

    def make(self, file: StepFile) -> None:
        """Make the store of a checkpoint alone."""
        self._series.make(self.load(file), file.step)

    def measure(self, file: StepFile) -> None:
        """Make the store of a checkpoint and run all analyses on it."""
        _, failed_analyses = self._series.measure(
            self.load(file),
            file.step,
            anew=False,
            cells=lambda: self._record_cells[file.step],
        )
        for stem, why in failed_analyses.items():
            # Reported once: what a set of images lacks, it lacks at every step.
            reason = (stem, why.replace(self._series.store(file.step).stem, ""))
            if reason not in self._reported:
                self._reported.add(reason)
                self._say(f"{self._series.unit} {file.step}: {stem} failed: {why}")

    def attempt(self, file: StepFile, work: Callable[[StepFile], None]) -> bool:
        """Return whether the work succeeds; a failure is recorded and not tried again."""
        if file.step in self.failed:
            return False
        self._n_attempts += 1
        try:
            with without_remarks(self._n_attempts > 1):
                work(file)
        except VitseeError as error:
            status = DIVERGED if isinstance(error, NotFinite) else FAILED
            cells = self._record_cells[file.step]
            self._series.record(file.step, status, str(error), **cells)
            self._say(f"{self._series.unit} {file.step}: {status}: {error}")
            self.failed[file.step] = file
        return file.step not in self.failed

    def make_reference(self, against: str, candidates: Sequence[StepFile]) -> None:
        """Make the store that all steps are compared with: that of the first sound candidate.

        Args:
            against: `FIRST` or `LAST`; nothing is made if no analysis compares with it, or if an
                earlier call chose it.
            candidates: the checkpoints, the preferred one first.
        """
        analyses = self._series.analyses
        is_needed = any(measurement.against == against for measurement in analyses)
        if not is_needed or against in self._series.ends:
            return
        for file in candidates:
            if self.attempt(file, self.make):
                self._series.keep_as(against, file.step)
                return


def cost_line(
    model: SurveyedModel, n_files: int, n_images: int, keep: str, speed: float
) -> str:
    """Describe the disk space and time that checkpoints will take.

    Args:
        model: the model's shapes.
        n_files: number of checkpoints.
        n_images: number of images at each.
        keep: as for `Series`.
        speed: floating point operations per second of this machine.
    """
    store_bytes = n_images * model.bytes_of_tokens
    # Stores of the first, the last and the present step exist at once.
    n_stores = n_files if keep == EVERY_STORE else min(n_files, 3)
    seconds = n_files * n_images * model.flops / (EFFICIENCY * speed)
    return (
        f"{plural(n_files, 'checkpoints')} over {plural(n_images, 'images')}: about "
        f"{human_bytes(n_stores * store_bytes)} on disk, {describe_time(seconds)} of "
        "extraction on this machine"
    )


def check_name(options: ModelOptions) -> None:
    """Raise OptionError if a model's name chooses weights: the checkpoints are the weights."""
    for key in ("checkpoint", "random_init"):
        if getattr(options, key) is not None:
            raise OptionError(
                f"{options.name} with {key.replace('_', '-')}: its weights are those of "
                "--checkpoints; leave that out"
            )
