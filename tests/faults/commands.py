"""A command that trials kill: at any moment, or between any two changes of the disk."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults.conftest import Trial
from tests.faults.trials import ends_well, killed, moment
from tests.processes import Process, Server


@dataclass
class Command:
    """A command, which gets the place of its output, and what it does when nothing disturbs it:
    its output, the seconds it takes and how often it changes the disk."""

    words: Callable[[Path], list[object]]
    path: Path
    seconds: float
    steps: int

    def kill(self, trial: Trial, path: Path, begun: Callable[[], bool]) -> None:
        """Begin it, and kill it: at a random moment, or before a random change of the disk."""
        if trial.rng.random() < 0.5:
            process = trial.run.start(*self.words(path))
            moment(trial.rng, process, self.seconds, begun)
            killed(process, trial.ended)
            return
        done = start(
            trial.run, self.words(path), path.parent, trial.rng.randint(1, self.steps)
        )
        code = done.end().code
        assert code in (0, -signal.SIGKILL), done.end().stderr
        trial.ended("resumed" if code else "ended before the signal")


def start(
    run: Server, words: list[object], below: Path, at: int, log: str = ""
) -> Process:
    """The command, to be killed before that change of the disk below a folder; 0: never."""
    env = {"VITSEE_DIE_BELOW": str(below), "VITSEE_DIE_AT": str(at), "VITSEE_STEPS": log}
    return run.start(*words, env=env, before="tests.faults.hooks:die_at_a_step")


def undisturbed(
    run: Server, words: Callable[[Path], list[object]], path: Path
) -> Command:
    """Run a command to its end."""
    path.parent.mkdir(exist_ok=True)
    log, started = path.parent.with_suffix(".steps"), time.monotonic()
    ends_well(start(run, words(path), path.parent, 0, str(log)).end())
    return Command(words, path, time.monotonic() - started, log.stat().st_size)
