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
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from vitsee_cli import console, options, signals
from vitsee_cli.study_settings import commands_of, in_a_study
from vitsee_core.runtime import machine
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.models.provenance import NamedModel
    from vitsee_core.study.running import Outcome
    from vitsee_core.study.steps import Step

RESUME_LINE = "finished steps are kept; repeat the command to go on"
MAX_WORKERS = 8  # by default; more wait for the disk and for the longest step
# Memory of a process beside a step's budget: its packages, a large figure.
WORKER_BYTES = 1 << 30
SECONDS_TO_END = 20.0  # for a stopped step to remove its half-made files

_SPAWN = multiprocessing.get_context("spawn")


def n_workers(jobs: int | None, memory: int | None) -> int:
    """Return how many steps of a study are performed at a time.

    By default as many as there are cores, and as three quarters of the memory have room for. Each
    step keeps the memory budget that it has alone, since there are results that depend on it (how
    many tokens localize compares).

    Args:
        jobs: the number that the user chose; None for the default.
        memory: bytes that a step may take; None for a quarter of the machine's.
    """
    if jobs is not None:
        return jobs
    usable_memory = machine.memory_bytes() * 3 // 4
    if memory is None:
        n_by_budget = 3  # each a quarter of the machine's memory
    else:
        n_by_budget = usable_memory // (WORKER_BYTES + memory)
    n_by_memory = min(n_by_budget, usable_memory // WORKER_BYTES)
    return max(1, min(machine.n_cores(), MAX_WORKERS, n_by_memory))


class Performer:
    """Runs the command of a step as if it were typed.

    The step's remarks are shown only with -v, and each of its warnings once per study.

    Attributes:
        ctx: context of the study's command.
        verbosity: of the study, as `console.setup` has it.
        shown_lines: warnings that were shown already.
    """

    def __init__(self, ctx: click.Context) -> None:
        self.ctx = ctx
        self.verbosity = ctx.meta.get(options.VERBOSITY, 0)
        self.shown_lines: set[str] = set()

    def __call__(self, step: Step) -> Outcome:
        """Run a step, and return how it ended: whatever happens, the other steps go on."""
        from vitsee_core.study.running import Outcome

        self.ctx.meta.pop(console.REASON, None)
        self.ctx.meta.pop(console.NOT_OFFERED, None)
        command = commands_of(self.ctx)(step.command) or self.ctx.command
        in_study_words = partial(
            in_a_study, command=command, study_command=self.ctx.command
        )
        # On a terminal bars vanish when they are done; in a log only extractions, which take
        # longest, say how far they are.
        shows_progress = step.command == "extract" or console.stderr().is_terminal
        step_verbosity = console.PROGRESS_ONLY if shows_progress else -1
        self.ctx.meta[options.VERBOSITY] = self.verbosity or step_verbosity
        try:
            if step.make is not None:
                step.make()
                return Outcome(0)
            group = self.ctx.find_root().command
            with console.step_lines(self.shown_lines, in_study_words):
                code = group.main(
                    list(step.words),
                    prog_name="vitsee",
                    standalone_mode=False,
                    parent=self.ctx,
                )
        except click.ClickException as error:
            return Outcome(2, error.format_message())
        except (VitseeError, OSError) as error:
            return Outcome(1, in_study_words(" ".join(str(error).split())))
        except Exception as error:  # a bug in one step: the others go on
            console.debug_traceback()
            return Outcome(
                1, f"{type(error).__name__}: {error}; run it by itself: {step.line}"
            )
        finally:
            self.ctx.meta[options.VERBOSITY] = self.verbosity
            self.ctx.meta[console.RESUMES] = RESUME_LINE
            console.setup(self.verbosity)
        # A study has no --force: its user removes what that would delete.
        remedy = f"remove {shlex.join(map(str, step.outputs))} to extract anew"
        reason = self.ctx.meta.get(console.REASON, "")
        reason = reason.replace("start anew with --force", remedy)
        return Outcome(
            code or 0,
            in_study_words(reason),
            applies=not self.ctx.meta.get(console.NOT_OFFERED),
        )


# ------------------------------------------------------------------------------- other processes


class _WorkerSettings(NamedTuple):
    """The facts about a study that a worker process needs; sent to it once, pickled."""

    command: str  # the study's command, `study` or `demo`
    verbosity: int
    models: Mapping[Path, NamedModel]  # folder of a store -> its model


class _Worker:
    """A process, and the step that it performs."""

    def __init__(self, settings: _WorkerSettings, n: int) -> None:
        """Start a process that is one of `n`, with its share of the cores.

        Raises:
            OSError: no process can be started.
        """
        self.connection, worker_connection = _SPAWN.Pipe()
        environment = machine.shared_by(n, os.environ)
        self.process = _SPAWN.Process(
            target=_serve, args=(worker_connection, environment), name="vitsee-step"
        )
        self.step: Step | None = None  # the step that it performs; None: it is free
        # The tracker starts with the first process, and would reset the mask below.
        resource_tracker.ensure_running()
        # The mask is inherited, so that no signal arrives before the worker handles it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            worker_connection.close()
        # If the process is gone already, that is seen when its step is waited for.
        with suppress(OSError):
            self.connection.send(settings)

    def how_it_ended(self) -> str:
        """Wait for the process, and return its signal's name or its exit code, in words."""
        self.process.join(SECONDS_TO_END)
        code = self.process.exitcode
        if code is not None and code < 0:
            return signal.Signals(-code).name
        return f"exit code {code}"


class Workers:
    """Up to `n` processes that perform steps, each started when there is a step for it.

    If a process is killed, as when memory runs out, its step is performed again, alone, once no
    other step is running; the other steps do not notice.
    """

    def __init__(
        self, perform: Performer, models: Mapping[Path, NamedModel], n: int
    ) -> None:
        """Start nothing yet; models: folder of a store -> its model."""
        self.n = n
        self._perform = perform
        self._settings = _WorkerSettings(
            perform.ctx.info_name or "", perform.verbosity, models
        )
        self._workers: list[_Worker] = []
        self._lost_steps: list[Step] = []  # steps of killed processes, to be repeated
        self._repeated: set[str] = set()  # names of all such steps

    def takes(self, step: Step) -> bool:
        """Return whether a step can be performed by a worker.

        Extractions take the whole machine, and results on stdout are the study's own. A step
        that waits for all others, as the report does, is not worth a new process.
        """
        if step.make is not None or step.command == "extract" or not step.outputs:
            return False
        return bool(step.inputs or self._workers)

    def free_for(self, step: Step) -> bool:
        """Return whether a step could begin now."""
        running = [worker.step for worker in self._workers if worker.step is not None]
        if len(running) + len(self._lost_steps) >= self.n:
            return False
        if not self._on_gpu(step):
            return True
        return not any(self._on_gpu(running_step) for running_step in running)

    def begin(self, step: Step) -> None:
        """Give a step to a free worker, or to a new one.

        Raises:
            VitseeError: no process can be started.
        """
        free_workers = [worker for worker in self._workers if worker.step is None]
        if free_workers:
            worker = free_workers[0]
        else:
            try:
                worker = _Worker(self._settings, self.n)
            except OSError as error:
                raise VitseeError(
                    f"cannot start a process for {step.name}: {error.strerror}; "
                    f"{RESUME_LINE}, one step at a time with --jobs 1"
                ) from None
            self._workers.append(worker)
        worker.step = step
        # A step that waits for all others, or is repeated, has the cores for itself.
        runs_alone = not step.inputs or step.name in self._repeated
        environment = machine.shared_by(1 if runs_alone else self.n, os.environ)
        with suppress(OSError):  # the worker is gone, which `ended` sees
            worker.connection.send((step, environment))

    def ended(self) -> tuple[str, Outcome]:
        """Wait until a step has ended, and return its name and its outcome.

        Meanwhile the lines that workers send are shown.
        """
        while True:
            busy_workers = {
                worker.connection: worker
                for worker in self._workers
                if worker.step is not None
            }
            if not busy_workers:
                self.begin(self._lost_steps.pop(0))
                continue
            names = [worker.step.name for worker in self._workers if worker.step]
            with console.status(", ".join(names)):
                ready_connections = wait(list(busy_workers))
            for connection in ready_connections:
                worker = busy_workers[connection]  # type: ignore[index]
                step = worker.step
                assert step is not None
                try:
                    message = worker.connection.recv()
                except (EOFError, OSError):
                    message = self._remove_dead_worker(worker, step)
                if isinstance(message, str):
                    console.show(message, self._perform.shown_lines)
                elif message is not None:
                    worker.step = None
                    return step.name, message

    def _remove_dead_worker(self, worker: _Worker, step: Step) -> Outcome | None:
        """Return the outcome of a dead worker's step; None if the step will be repeated."""
        from vitsee_core.study.running import Outcome

        self._workers.remove(worker)
        worker.connection.close()
        reason = (
            f"its process ended early ({worker.how_it_ended()}), as when memory runs out"
        )
        if step.name in self._repeated:
            return Outcome(1, f"{reason}; run it by itself: {step.line}")
        self._repeated.add(step.name)
        self._lost_steps.append(step)
        console.warn(
            f"{step.name}: {reason}; it is performed again when the others have ended"
        )
        return None

    def _on_gpu(self, step: Step) -> bool:
        """Return whether a step may compute on a GPU.

        Such steps run one at a time: processes cannot know how much of its memory others take.
        """
        command = commands_of(self._perform.ctx)(step.command)
        has_device_option = command is not None and any(
            param.name == "device" for param in command.params
        )
        return has_device_option and machine.may_have_gpu()

    def close(self) -> None:
        """End all processes; steps that are running are stopped, and leave nothing half-made."""
        for worker in self._workers:
            if worker.step is not None:
                worker.process.terminate()
            else:
                worker.connection.close()
        try:
            deadline = time.monotonic() + SECONDS_TO_END
            for worker in self._workers:
                worker.process.join(max(0.0, deadline - time.monotonic()))
        finally:
            # Also on a second signal, which ends the waiting above.
            for worker in self._workers:
                worker.process.kill()
                worker.process.join()
                worker.connection.close()
            self._workers.clear()


def _serve(connection: Connection, environment: Mapping[str, str]) -> None:
    """Perform steps in a worker process, until the study ends or closes the connection.

    Received are the `_WorkerSettings`, then pairs of a step and its environment; sent are lines to
    show, and the outcome of each step.

    environment: variables for the worker's share of the cores, set before any library is loaded
    that reads them.
    """
    signals.install_worker_handlers()
    os.environ.update(environment)
    threading.Thread(target=_end_with_study, daemon=True).start()
    send_lock = threading.Lock()

    def send(message: str | Outcome) -> None:
        """Send a message whole; threads of a step log lines, too."""
        with send_lock:
            connection.send(message)

    console.send_lines_to(send)
    try:
        from vitsee_cli.main import main
        from vitsee_core.models.provenance import naming

        settings: _WorkerSettings = connection.recv()
        root = click.Context(main, info_name="vitsee")
        command = main.get_command(root, settings.command)
        assert command is not None
        ctx = click.Context(command, parent=root, info_name=settings.command)
        ctx.meta[options.VERBOSITY] = settings.verbosity
        perform = Performer(ctx)
        console.setup(settings.verbosity)
        with naming(settings.models):
            while True:
                step, step_environment = connection.recv()
                os.environ.update(step_environment)
                outcome = perform(step)
                send(outcome)
                if outcome.code > 2:  # stopped by a signal, and not by the step itself
                    return
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return


def _end_with_study() -> None:
    """Wait, in a thread of a worker, for the end of the study's process; then end the worker.

    A step gets some seconds to remove its half-made files.
    """
    study = multiprocessing.parent_process()
    assert study is not None
    study.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    os._exit(1)
