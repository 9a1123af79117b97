"""SIGINT and SIGTERM: how a command ends, from the program's first line on.

Nothing here may import what the interpreter has not loaded: until the handlers are installed a
signal ends in a traceback.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # typing is not loaded yet
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType
    from typing import Any

# What a shell reports for SIGINT and SIGTERM; resumable work ends with 75 (EX_TEMPFAIL) instead.
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_RESUMABLE = 75
CAUGHT = (signal.SIGINT, signal.SIGTERM)
# Commands that can end at any moment, since nothing half-made needs to be removed, and what they
# report before they have stored anything.
RESUMABLE = {
    "extract": "before its first slab: nothing is stored yet by this run; repeat the command"
}
_SHOW_CURSOR = b"\x1b[?25h"

_command = ""
_kept = ""
_in_a_worker = False


def answer(arguments: Sequence[str]) -> None:
    """From now on a signal ends this process: resumable commands with 75, others with 130 or 143.

    An exception would not do: many libraries swallow it while they are imported, or fail half-way.
    """
    global _command
    _command = next((word for word in arguments if not word.startswith("-")), "")
    for caught in CAUGHT:
        signal.signal(caught, _end)


def answer_in_a_worker() -> None:
    """From now on SIGTERM raises a KeyboardInterrupt once, so that half-made files are removed.
    SIGINT, which a terminal sends to all of its processes, is for the one that began the work."""
    global _in_a_worker
    _in_a_worker = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _raise_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)


def ignore() -> None:
    """Ignore signals once the command has ended, so that its exit code survives the interpreter's
    shutdown."""
    for caught in CAUGHT:
        signal.signal(caught, signal.SIG_IGN)


def keeps(line: str) -> None:
    """Set what a resumable command reports when it is stopped from now on."""
    global _kept
    _kept = line


class Raised:
    """Context in which both signals raise a KeyboardInterrupt with the signal's name, so that
    half-made files are removed; after `answer` a resumable command still ends at once."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._before: dict[
            signal.Signals, Callable[[int, FrameType | None], Any] | int | None
        ] = {}

    def __enter__(self) -> None:
        """Set the handlers; only the main thread can."""
        import threading

        main = threading.current_thread() is threading.main_thread()
        resumable = (
            self._command in RESUMABLE and signal.getsignal(signal.SIGTERM) is _end
        )
        if main and not resumable and not _in_a_worker:
            self._before = {caught: signal.signal(caught, _raise) for caught in CAUGHT}

    def __exit__(self, *error: object) -> None:
        for caught, handler in self._before.items():
            signal.signal(caught, handler)


def exit_code(stop: KeyboardInterrupt) -> int:
    """The exit code of a command that cannot be resumed."""
    if stop.args == (signal.SIGTERM.name,):
        return EXIT_TERMINATED
    return EXIT_INTERRUPTED


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _raise_once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    _raise(number, frame)


def _end(number: int, frame: FrameType | None) -> None:
    name = f"vitsee {_command}".rstrip()
    line = f"{name}: interrupted"
    code = 128 + number
    if _command in RESUMABLE:
        line = f"{name}: stopped by {signal.Signals(number).name} {_kept or RESUMABLE[_command]}"
        code = EXIT_RESUMABLE
    try:
        # A progress bar may have hidden it.
        os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + f"{line}\n".encode())
    finally:
        os._exit(code)
