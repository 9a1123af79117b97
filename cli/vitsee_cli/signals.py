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

# The codes that a shell reports for SIGINT and SIGTERM; resumable work ends with 75 (EX_TEMPFAIL).
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_RESUMABLE = 75
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Commands that can end at any moment, since no half-made file has to be removed -> the line that
# they report before they have stored anything.
RESUMABLE = {
    "extract": "before its first slab: nothing is stored yet by this run; repeat the "
    "command"
}
_SHOW_CURSOR = b"\x1b[?25h"

# State of the process, which the handlers read: they get nothing but the signal's number.
_command = ""
_resume_line = ""
_is_worker = False


def install_handlers(arguments: Sequence[str]) -> None:
    """Install handlers: a signal ends resumable commands with 75, others with 130 or 143.

    An exception would not do: many libraries swallow it while they are imported, or fail half-way.
    """
    global _command
    _command = next((word for word in arguments if not word.startswith("-")), "")
    for number in SIGNALS:
        signal.signal(number, _end)


def install_worker_handlers() -> None:
    """Install handlers of a worker process: SIGTERM raises a KeyboardInterrupt, once.

    So half-made files are removed. SIGINT, which a terminal sends to all of its processes, is
    for the process that began the work.
    """
    global _is_worker
    _is_worker = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _raise_once)
    # A worker inherits the mask of the thread that started it, which may block both.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def ignore() -> None:
    """Ignore both signals once the command has ended.

    So its exit code survives the interpreter's shutdown.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def set_resume_line(line: str) -> None:
    """Set the line that a resumable command reports when it is stopped from now on."""
    global _resume_line
    _resume_line = line


class RaisingSignals:
    """Context in which both signals raise a KeyboardInterrupt with the signal's name.

    So half-made files are removed. After `install_handlers` a resumable command still ends at once.
    """

    def __init__(self, command: str) -> None:
        """Change nothing yet; command: its name."""
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
        if main and not resumable and not _is_worker:
            self._before = {number: signal.signal(number, _raise) for number in SIGNALS}

    def __exit__(self, *error: object) -> None:
        """Restore the handlers from before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code of a stopped command that cannot be resumed."""
    if stop.args == (signal.SIGTERM.name,):
        return EXIT_TERMINATED
    return EXIT_INTERRUPTED


def _raise(number: int, frame: FrameType | None) -> None:
    """Raise a KeyboardInterrupt with the signal's name, which `exit_code` reads."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def _raise_once(number: int, frame: FrameType | None) -> None:
    """Raise a KeyboardInterrupt; a second signal must not stop the cleaning up."""
    signal.signal(number, signal.SIG_IGN)
    _raise(number, frame)


def _end(number: int, frame: FrameType | None) -> None:
    """Write a line on stderr and end the process at once, without any cleaning up."""
    name = f"vitsee {_command}".rstrip()
    line = f"{name}: interrupted"
    code = 128 + number  # as shells report a signal
    if _command in RESUMABLE:
        resume_line = _resume_line or RESUMABLE[_command]
        line = f"{name}: stopped by {signal.Signals(number).name} {resume_line}"
        code = EXIT_RESUMABLE
    try:
        message = f"{line}\n".encode()
        if os.isatty(2):
            # A progress bar may have hidden the cursor.
            message = _SHOW_CURSOR + message
        os.write(2, message)
    finally:
        os._exit(code)
