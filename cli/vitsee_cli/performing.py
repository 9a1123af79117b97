"""How the steps of a study are performed: in this process, or several at a time in others.

A worker is a fresh interpreter, since locks and threads of libraries do not survive a fork. It
takes one step after the other, so that it imports what they need once, with its share of the
cores, and sends back what there is to show and how a step ended. Only the process of
the study itself writes its record. A worker ends when that one does, however it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitsee_cli import console, options, signals
from vitsee_cli.study_settings import commands_of, in_a_study
from vitsee_core.runtime import machine
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.models.provenance import NamedModel
    from vitsee_core.study.running import Outcome
    from vitsee_core.study.steps import Step

KEPT = "finished steps are kept; repeat the command to go on"
MOST_WORKERS = 8  # by default; more wait for the disk and for the longest step
WORKER_BYTES = (
    1 << 30
)  # of a process beside a step's budget: its packages, a large figure
SECONDS_TO_END = 20.0  # for a step to remove what is half made, once it is stopped

_SPAWN = multiprocessing.get_context("spawn")


def n_workers(jobs: int | None, memory: int | None) -> int:
    """How many steps are performed at a time: `jobs`, by default as many as there are cores, and as
    three quarters of the memory have room for. Each keeps the budget that it has alone, since there
    are results that depend on it (how many tokens localize compares).

    memory: bytes that a step may take; by default a quarter of the machine's.
    """
    if jobs is not None:
        return jobs
    whole = machine.memory_bytes()
    room = 3 if memory is None else whole * 3 // 4 // (WORKER_BYTES + memory)
    return max(
        1, min(machine.n_cores(), MOST_WORKERS, room, whole * 3 // 4 // WORKER_BYTES)
    )


class Performer:
    """Runs the command of a step as if it were typed. Its remarks are shown only with -v, and each
    warning once."""

    def __init__(self, ctx: click.Context) -> None:
        self.ctx = ctx
        self.verbosity = ctx.meta.get(options.VERBOSITY, 0)
        self.shown: set[str] = set()

    def __call__(self, step: Step) -> Outcome:
        from vitsee_core.study.running import Outcome

        self.ctx.meta.pop(console.REASON, None)
        self.ctx.meta.pop(console.NOT_OFFERED, None)
        command = commands_of(self.ctx)(step.command) or self.ctx.command
        own_words = partial(in_a_study, command=command, own=self.ctx.command)
        # Bars vanish; in a log only what takes longest says how far it is.
        shown = step.command == "extract" or console.stderr().is_terminal
        quiet = console.PROGRESS_ONLY if shown else -1
        self.ctx.meta[options.VERBOSITY] = self.verbosity or quiet
        try:
            if step.make is not None:
                step.make()
                return Outcome(0)
            group = self.ctx.find_root().command
            with console.of_a_step(self.shown, own_words):
                code = group.main(
                    list(step.words),
                    prog_name="vitsee",
                    standalone_mode=False,
                    parent=self.ctx,
                )
        except click.ClickException as error:
            return Outcome(2, error.format_message())
        except (VitseeError, OSError) as error:
            return Outcome(1, own_words(" ".join(str(error).split())))
        except Exception as error:  # a bug in one step: the others go on
            console.debug_traceback()
            return Outcome(
                1, f"{type(error).__name__}: {error}; run it by itself: {step.line}"
            )
        finally:
            self.ctx.meta[options.VERBOSITY] = self.verbosity
            self.ctx.meta[console.RESUMES] = KEPT
            console.setup(self.verbosity)
        # A study has no --force: what it would delete, its user does.
        anew = f"remove {shlex.join(map(str, step.outputs))} to extract anew"
        reason = self.ctx.meta.get(console.REASON, "").replace(
            "start anew with --force", anew
        )
        return Outcome(
            code or 0,
            own_words(reason),
            applies=not self.ctx.meta.get(console.NOT_OFFERED),
        )


# ------------------------------------------------------------------------------- other processes


@dataclass(frozen=True)
class _About:
    """The arguments of a worker process: the study's command, how much it shows, and the model of
    each store."""

    command: str
    verbosity: int
    models: Mapping[Path, NamedModel]


class _Worker:
    """A process, and the step that it performs."""

    def __init__(self, about: _About, n: int) -> None:
        """One of `n`. Raises OSError: no process can be started."""
        self.connection, theirs = _SPAWN.Pipe()
        share = machine.shared_by(n, os.environ)
        self.process = _SPAWN.Process(
            target=_serve, args=(theirs, share), name="vitsee-step"
        )
        self.step: Step | None = None
        resource_tracker.ensure_running()  # which would take the mask away
        # It is inherited, so that no signal arrives before the worker knows what to do.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals.CAUGHT)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        with suppress(OSError):  # it is gone, which is seen when its step is waited for
            self.connection.send(about)

    def how_it_ended(self) -> str:
        self.process.join(SECONDS_TO_END)
        code = self.process.exitcode
        if code is not None and code < 0:
            return signal.Signals(-code).name
        return f"exit code {code}"


class Workers:
    """At most `n` processes, started with the first steps that they are given. One that is killed
    costs its own step alone, which is performed again once no other is."""

    def __init__(
        self, perform: Performer, models: Mapping[Path, NamedModel], n: int
    ) -> None:
        self.n = n
        self._perform = perform
        self._about = _About(perform.ctx.info_name or "", perform.verbosity, models)
        self._workers: list[_Worker] = []
        self._lost: list[Step] = []
        self._again: set[str] = set()

    def takes(self, step: Step) -> bool:
        """Whether a step can be performed by a worker. Extractions take the whole machine, and
        results on stdout are the study's own; what waits for all others, as the report does, is
        worth no new process."""
        if step.make is not None or step.command == "extract" or not step.outputs:
            return False
        return bool(step.inputs or self._workers)

    def free_for(self, step: Step) -> bool:
        """Whether it could begin now."""
        busy = [worker for worker in self._workers if worker.step is not None]
        if len(busy) + len(self._lost) >= self.n:
            return False
        return not (
            self._on_gpu(step) and any(self._on_gpu(w.step) for w in busy if w.step)
        )

    def begin(self, step: Step) -> None:
        """Have it performed. Raises VitseeError: no process can be started."""
        worker = next((one for one in self._workers if one.step is None), None)
        if worker is None:
            try:
                worker = _Worker(self._about, self.n)
            except OSError as error:
                raise VitseeError(
                    f"cannot start a process for {step.name}: {error.strerror}; {KEPT}, "
                    "one step at a time with --jobs 1"
                ) from None
            self._workers.append(worker)
        worker.step = step
        alone = not step.inputs or step.name in self._again
        with suppress(OSError):  # it is gone, which `ended` sees
            worker.connection.send(
                (step, machine.shared_by(1 if alone else self.n, os.environ))
            )

    def ended(self) -> tuple[str, Outcome]:
        """Wait for a step: its name, and how it ended."""
        while True:
            busy = {w.connection: w for w in self._workers if w.step is not None}
            if not busy:
                self.begin(self._lost.pop(0))
                continue
            names = [
                worker.step.name for worker in self._workers if worker.step is not None
            ]
            with console.status(", ".join(names)):
                found = wait(list(busy))
            for ready in found:
                worker = busy[ready]  # type: ignore[index]
                step = worker.step
                assert step is not None
                try:
                    answer = worker.connection.recv()
                except (EOFError, OSError):
                    answer = self._without(worker, step)
                if isinstance(answer, str):
                    console.show(answer, self._perform.shown)
                elif answer is not None:
                    worker.step = None
                    return step.name, answer

    def _without(self, worker: _Worker, step: Step) -> Outcome | None:
        """The outcome of the step of a worker that is gone; None if it is performed again."""
        from vitsee_core.study.running import Outcome

        self._workers.remove(worker)
        worker.connection.close()
        how = (
            f"its process ended early ({worker.how_it_ended()}), as when memory runs out"
        )
        if step.name in self._again:
            return Outcome(1, f"{how}; run it by itself: {step.line}")
        self._again.add(step.name)
        self._lost.append(step)
        console.warn(
            f"{step.name}: {how}; it is performed again when the others have ended"
        )
        return None

    def _on_gpu(self, step: Step) -> bool:
        """Whether a step may compute on a GPU, whose memory the steps of several processes would
        have to share without knowing of each other."""
        command = commands_of(self._perform.ctx)(step.command)
        takes = command is not None and any(
            param.name == "device" for param in command.params
        )
        return takes and machine.may_have_gpu()

    def close(self) -> None:
        """End all processes; what they are performing is stopped, and leaves nothing half-made."""
        for worker in self._workers:
            if worker.step is not None:
                worker.process.terminate()
            else:
                worker.connection.close()
        try:
            end = time.monotonic() + SECONDS_TO_END
            for worker in self._workers:
                worker.process.join(max(0.0, end - time.monotonic()))
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.process.join()
                worker.connection.close()
            self._workers.clear()


def _serve(connection: Connection, share: Mapping[str, str]) -> None:
    """In a worker: perform steps until the study ends, or says so. share: of the cores, for the
    environment before any library is loaded that reads it."""
    signals.answer_in_a_worker()
    os.environ.update(share)
    threading.Thread(target=_end_with_the_study, daemon=True).start()
    sending = threading.Lock()

    def send(what: str | Outcome) -> None:
        with sending:
            connection.send(what)

    console.hand_over(send)
    try:
        from vitsee_cli.main import main
        from vitsee_core.models.provenance import naming

        about: _About = connection.recv()
        root = click.Context(main, info_name="vitsee")
        command = main.get_command(root, about.command)
        assert command is not None
        ctx = click.Context(command, parent=root, info_name=about.command)
        ctx.meta[options.VERBOSITY] = about.verbosity
        perform = Performer(ctx)
        console.setup(about.verbosity)
        with naming(about.models):
            while True:
                step, environment = connection.recv()
                os.environ.update(environment)
                outcome = perform(step)
                send(outcome)
                if outcome.code > 2:
                    return
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return


def _end_with_the_study() -> None:
    study = multiprocessing.parent_process()
    assert study is not None
    study.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    os._exit(1)
