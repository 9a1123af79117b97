"""A study over the checkpoints of a training: each is a step of a `Series`."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

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
from vitsee_core.training.series import (
    DIVERGED,
    EVERY_STORE,
    FAILED,
    FIRST,
    LAST,
    Series,
    without_remarks,
)
from vitsee_stores.errors import VitseeError

ANALYSES = (
    "attn-dist",
    "normratio",
    "spectrum",
    "spatial",
    "cka:first",
    "cka:last",
    "knn",
)


@dataclass(frozen=True)
class StepFile:
    """A checkpoint and its step."""

    step: int
    path: Path

    def cells(self) -> dict[str, Any]:
        """The file's cells in the record: name, size and time of change, which identify it."""
        status = self.path.stat()
        changed = datetime.fromtimestamp(status.st_mtime, UTC).isoformat()
        return {"file": self.path.name, "size_bytes": status.st_size, "changed": changed}


def find_checkpoints(pattern: str) -> tuple[str, list[StepFile], dict[str, str]]:
    """The unit of the files of a glob ("step" or "epoch"), the files by step, and the reason for
    each file without one.

    A step is the number behind `step`, `global_step`, `iter` or `epoch` in a file's name; else the
    file's own field of that name; else the last number of the name that varies among the files.

    Raises:
        VitseeError: no file matches, none has a step, or two have the same.
    """
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    paths = [
        path
        for path in paths
        if path.is_file() and not path.name.endswith((".tmp", ".part"))
    ]
    if not paths:
        raise VitseeError(
            f"no file matches --checkpoints {pattern!r}; expected a glob of checkpoints, in quotes"
        )
    named = {path: numbers_in_name(path.stem) for path in paths}
    unread: dict[str, str] = {}
    if not any(all(unit in found for found in named.values()) for unit in UNITS):
        for path in paths:
            try:
                named[path] |= _in_file(read_file(path))
            except ModelError as error:
                unread[path.name] = str(error)
    for unit in UNITS:
        with_step = {path: found[unit] for path, found in named.items() if unit in found}
        if with_step and all(path in with_step or path.name in unread for path in paths):
            break
    else:
        unit = "step"
        with_step = _that_varies(paths)
        unread = {}
    if not with_step:
        raise VitseeError(
            f"no step in the names of {pattern!r}, nor a field step, global_step or epoch in the "
            "files; expected names such as step_1000.pt"
        )
    files = sorted(
        (StepFile(step, path) for path, step in with_step.items()),
        key=lambda file: file.step,
    )
    for one, other in pairwise(files):
        if one.step == other.step:
            raise VitseeError(
                f"two checkpoints of {unit} {one.step}: {one.path} and {other.path}; expected a "
                "glob that takes one of them"
            )
    names = {file.path.name for file in files}
    return unit, files, {name: why for name, why in unread.items() if name not in names}


def _in_file(content: Any) -> dict[str, int]:
    """Unit -> the file's own field."""
    found: dict[str, int] = {}
    for unit, words in UNITS.items():
        for word in words:
            value = content.get(word) if isinstance(content, Mapping) else None
            if getattr(value, "numel", lambda: 0)() == 1:
                value = value.item()  # type: ignore[union-attr]
            if isinstance(value, (int, float)) and value == int(value):
                found.setdefault(unit, int(value))
    return found


def _that_varies(paths: Sequence[Path]) -> dict[Path, int]:
    """The last number of the names that is not the same in all; {} if names differ in more."""
    numbers = [re.findall(r"\d+", path.stem) for path in paths]
    if len({re.sub(r"\d+", "0", path.stem) for path in paths}) > 1 or not numbers[0]:
        return {}
    columns = list(zip(*numbers, strict=True))
    varying = [column for column in columns if len({*column}) > 1] or columns[-1:]
    return {path: int(number) for path, number in zip(paths, varying[-1], strict=True)}


def applicable(
    model: SurveyedModel, *, with_train: bool
) -> tuple[list[str], dict[str, str]]:
    """The analyses of `ANALYSES` that a model offers, and for the others the reason."""
    needs = needs_of_analyses()
    left_out = dict[str, str]()
    found = list[str]()
    for name in ANALYSES:
        command = name.partition(":")[0]
        if command == "knn" and not with_train:
            left_out[name] = "it learns from images: name them with --train"
        elif why := model.lack(needs[command]):
            left_out[name] = why
        else:
            found.append(name)
    return found, left_out


def run(
    series: Series,
    options: ModelOptions,
    files: Sequence[StepFile],
    say: Callable[[str], object],
) -> list[StepFile]:
    """Measure every checkpoint that was not measured before, as it is now; returns those that could
    not be read or measured. Rows say which failed or diverged, and the others go on.

    Args:
        series: with a model's name in place.
        options: of the model, without a checkpoint.
        files: by step.
        say: receives a line for each.
    """
    # Only what is there when the work begins: the next call takes what was added meanwhile.
    about = {file.step: file.cells() for file in files}
    todo = [file for file in files if not series.is_done(file.step, about[file.step])]
    if len(todo) < len(files):
        say(
            f"{len(files) - len(todo)} of {plural(len(files), 'checkpoints')}: done before"
        )
    if not todo:
        return []
    failed: dict[int, StepFile] = {}
    reasons = set[tuple[str, str]]()  # of analyses that failed
    begun: list[StepFile] = []

    def loaded(file: StepFile) -> LoadedModel:
        return replace(
            load_model(**{**vars(options), "checkpoint": file.path}), name=series.name
        )

    def make(file: StepFile) -> None:
        series.make(loaded(file), file.step)

    def measure(file: StepFile) -> None:
        cells = about[file.step]
        _, lost = series.measure(loaded(file), file.step, anew=False, cells=lambda: cells)
        for stem, why in lost.items():
            # Once: what a set of images lacks, it lacks at every step.
            if (
                said := (stem, why.replace(series.store(file.step).stem, ""))
            ) not in reasons:
                reasons.add(said)
                say(f"{series.unit} {file.step}: {stem} failed: {why}")

    def attempt(file: StepFile, work: Callable[[StepFile], None]) -> bool:
        """Do it; a failure is a row, and is not tried again."""
        if file.step in failed:
            return False
        try:
            with without_remarks(bool(begun)):
                begun.append(file)
                work(file)
        except VitseeError as error:
            status = DIVERGED if isinstance(error, NotFinite) else FAILED
            series.record(file.step, status, str(error), **about[file.step])
            say(f"{series.unit} {file.step}: {status}: {error}")
            failed[file.step] = file
        return file.step not in failed

    wanted = {one.against for one in series.analyses}
    for against, some in ((FIRST, files), (LAST, files[::-1])):
        if against not in wanted or against in series.ends:
            continue
        end = next((file for file in some if attempt(file, make)), None)
        if end is not None:
            series.keep_as(against, end.step)
    if series.ends.get(LAST, files[-1].step) < files[-1].step:
        last = series.ends[LAST]
        say(
            f"cka:last compares with {series.unit} {last}, the last one of the first call"
        )
    for number, file in enumerate(todo, 1):
        if attempt(file, measure):
            say(f"[{number}/{len(todo)}] {series.unit} {file.step}: {file.path.name}")
    return [
        file for file in failed.values() if file.step not in series.steps_of(DIVERGED)
    ]


def cost_line(
    model: SurveyedModel, n_files: int, n_images: int, keep: str, speed: float
) -> str:
    """Disk and time, estimated."""
    one = n_images * model.bytes_of_tokens
    at_once = n_files if keep == EVERY_STORE else min(n_files, 3)
    seconds = n_files * n_images * model.flops / (EFFICIENCY * speed)
    return (
        f"{plural(n_files, 'checkpoints')} over {plural(n_images, 'images')}: about "
        f"{human_bytes(at_once * one)} on disk, {describe_time(seconds)} of extraction on this "
        "machine"
    )


def check_name(options: ModelOptions) -> None:
    """Raise OptionError if a model's name chooses weights, which the checkpoints are."""
    for key in ("checkpoint", "random_init"):
        if getattr(options, key) is not None:
            raise OptionError(
                f"{options.name} with {key.replace('_', '-')}: its weights are those of "
                "--checkpoints; leave that out"
            )
