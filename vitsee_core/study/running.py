"""Execute a plan: finished steps are skipped, failed ones are named, the others continue."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vitsee_core.pages.report.study_record import StudyStep
from vitsee_core.study.recipes import EXPLORE
from vitsee_core.study.record import (
    BEGUN,
    DONE,
    FAILED,
    LEFT_OUT,
    Record,
    fingerprints,
    is_finished,
)
from vitsee_core.study.steps import LARGE_TABLES, Step

Report = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """How a step ended.

    Attributes:
        code: exit code of the command.
        reason: of a failure, in one line; "" if the step succeeded.
        applies: whether the models have what the command is about.
    """

    code: int
    reason: str = ""
    applies: bool = True


Perform = Callable[[Step], Outcome]
# Steps that begin first of those that were never timed: a long one begun last runs alone, while the
# other workers rest.
LONG = LARGE_TABLES | {EXPLORE}
LONG_SECONDS = 1.0  # above the 0 that stands for all others


class Workers(Protocol):
    """Perform several steps at a time."""

    def takes(self, step: Step) -> bool:
        """Return whether workers perform this step at all."""

    def free_for(self, step: Step) -> bool:
        """Return whether a worker and memory are free for this step now."""

    def begin(self, step: Step) -> None:
        """Begin a step."""

    def ended(self) -> tuple[str, Outcome]:
        """Wait for a step to end; return its name, and how it ended."""


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
    """Perform the steps in order, or several at a time.

    A step that does not apply to its models is left out, with its reason.

    Args:
        steps: of one plan.
        record: written after every step.
        perform: runs a step's command.
        say: receives a line for each step, as it ends.
        first: number of the first step in these lines.
        total: number of all steps in these lines; that of `steps` by default.
        before: steps that failed earlier; files at their outputs are from another study.
        workers: perform what they take, the longest steps first, each once the steps are done whose
            outputs it reads; one that names no inputs comes after all before it. What they do not
            take is performed here while they rest.

    Returns:
        The steps that failed, or whose input is missing or stale because a step failed.

    Raises:
        Stopped: a signal ended a step.
    """
    n_lines = len(steps) if total is None else total
    ledger = _Ledger(steps, record, say, first=first, total=n_lines, before=before)
    waiting = [*steps]
    running: dict[str, tuple[Step, float]] = {}  # name -> the step, and when it began
    # Estimates of how long steps take: as long as in the run before, if there was one.
    durations: dict[str, float] = {}
    for step in steps:
        durations[step.name] = LONG_SECONDS if step.command in LONG else 0.0
        if step.name in record.steps and record.steps[step.name].seconds:
            durations[step.name] = record.steps[step.name].seconds
    while waiting or running:
        next_step = _next(steps, waiting, running, durations, workers)
        if next_step is None:
            # All that wait need a worker, or the output of a step that runs.
            assert workers is not None
            name, outcome = workers.ended()
            ended_step, start = running.pop(name)
            ledger.note(ended_step, outcome, time.monotonic() - start)
            continue
        waiting.remove(next_step)
        runnable_step = ledger.begin(next_step)
        if runnable_step is None:
            continue
        start = time.monotonic()
        if workers is not None and workers.takes(runnable_step):
            workers.begin(runnable_step)
            running[runnable_step.name] = (runnable_step, start)
        else:
            outcome = perform(runnable_step)
            ledger.note(runnable_step, outcome, time.monotonic() - start)
    return [ledger.failed[step.name] for step in steps if step.name in ledger.failed]


def _next(
    steps: Sequence[Step],
    waiting: Sequence[Step],
    running: Mapping[str, tuple[Step, float]],
    durations: Mapping[str, float],
    workers: Workers | None,
) -> Step | None:
    """Return the step that begins now; None while all wait for those that are running.

    Args:
        steps: all steps, in the plan's order.
        waiting: those that have not begun, in the same order.
        running: name -> a step that workers perform, and when it began.
        durations: name -> estimated seconds.
        workers: perform several at a time; None to perform the steps in order.
    """
    if workers is None:
        return waiting[0]
    unfinished = {step.name for step in waiting} | {*running}
    able = []
    # In the plan's order: when a step's turn comes, this has the outputs of all unfinished steps
    # before it.
    missing_paths: set[Path] = set()
    for step in steps:
        if step.inputs:
            is_ready = missing_paths.isdisjoint(step.inputs)
        else:
            is_ready = not missing_paths
        if step in waiting and is_ready:
            able.append(step)
        if step.name in unfinished:
            # A step without outputs is waited for by its name, which is no input's path.
            missing_paths.update(step.outputs or [Path(step.name)])
    for_workers = [step for step in able if workers.takes(step)]
    # A step of this process runs alone, as it may use all cores and all memory.
    if able and able[0] not in for_workers:
        return None if running else able[0]
    free = [step for step in for_workers if workers.free_for(step)]
    return max(free, key=lambda step: durations[step.name], default=None)


class _Ledger:
    """Enter how steps ended into the record, and say it in a line each."""

    def __init__(
        self,
        steps: Sequence[Step],
        record: Record,
        say: Report,
        *,
        first: int,
        total: int,
        before: Sequence[Step],
    ) -> None:
        """Prepare a ledger; the arguments are those of `carry_out`."""
        self.record = record
        self._say = say
        self._number = first
        self._total = total
        self._order = [step.name for step in steps]
        self._without_outputs = [*before]  # failed or left out: their outputs are stale
        self.failed: dict[str, Step] = {}

    def begin(self, step: Step) -> Step | None:
        """Return the step as it is to be performed, on the inputs that are there; None if it
        cannot be, or was finished before."""
        stale = {path for other in self._without_outputs for path in other.outputs}
        missing = [path for path in step.inputs if path in stale or not path.exists()]
        if step.partial and len(missing) < len(step.inputs):
            step = step.without(missing)
            missing = []
        if missing:
            text = f"{', '.join(path.name for path in missing)} was not made"
            self._leave_out(step, 0.0, text)
            self.failed[step.name] = step
            self._write()
            return None
        if is_finished(step, self.record.steps.get(step.name)):
            self._say_line(step, "done before")
            return None
        # Before it begins: a killed run leaves the entry, by which its half files are known.
        self._enter(step, BEGUN, 0.0)
        self._write()
        return step

    def note(self, step: Step, outcome: Outcome, seconds: float) -> None:
        """Enter how a step ended.

        Args:
            step: the step.
            outcome: how it ended.
            seconds: how long it took.

        Raises:
            Stopped: a signal ended it.
        """
        # 1 and 2 are a command's own codes: a failure, and a wrong option.
        if outcome.code > 2:
            raise Stopped(outcome.code)
        if outcome.code == 0:
            self._enter(step, DONE, seconds)
            self._say_line(step, f"{seconds:.1f} s")
        elif not outcome.applies:
            self._leave_out(step, seconds, outcome.reason)
            self.record.about.setdefault("left_out", {})[step.name] = outcome.reason
        else:
            text = outcome.reason or f"exit code {outcome.code}"
            self._enter(step, FAILED, seconds, text)
            self._say_line(step, f"failed: {text}")
            self._without_outputs.append(step)
            self.failed[step.name] = step
        self._write()

    def _leave_out(self, step: Step, seconds: float, text: str) -> None:
        """Enter a step that was not performed to its end, with the reason."""
        self._enter(step, LEFT_OUT, seconds, text)
        self._say_line(step, f"left out: {text}")
        self._without_outputs.append(step)

    def _say_line(self, step: Step, text: str) -> None:
        """Say a step's line, and count it."""
        self._say(f"[{self._number}/{self._total}] {step.name}: {text}")
        self._number += 1

    def _enter(self, step: Step, status: str, seconds: float, text: str = "") -> None:
        """Enter a step into the record, with its files as they are now."""
        self.record.steps[step.name] = StudyStep(
            status,
            step.line,
            round(seconds, 1),
            fingerprints(step.inputs),
            fingerprints(step.outputs),
            text,
        )

    def _write(self) -> None:
        """Write the record, its steps in the plan's order, behind those that the plan does not
        have."""
        entries = self.record.steps
        planned = {name: entries[name] for name in self._order if name in entries}
        others = {name: entry for name, entry in entries.items() if name not in planned}
        self.record.steps = others | planned
        self.record.write()


class Stopped(Exception):
    """A signal ended a step. code: the exit code for it."""

    def __init__(self, code: int):
        super().__init__(f"stopped with exit code {code}")
        self.code = code
