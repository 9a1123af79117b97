"""SIGTERM and SIGINT as a request to stop between two batches."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from vitsee_stores.errors import VitseeError


class Interrupted(VitseeError):
    """Stopped by a signal with all commits complete; the same command resumes."""

    exit_code = 75  # EX_TEMPFAIL: schedulers may requeue

    def __init__(self, text: str, signal_name: str = "") -> None:
        super().__init__(text)
        self.signal_name = signal_name


class StopRequest:
    """Context in which the first SIGTERM or SIGINT sets `signal_name`; a second one has its
    original effect.

    Signals can be caught in the main thread only; elsewhere nothing is installed.
    """

    CAUGHT = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in self.CAUGHT}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for caught, handler in self._before.items():
            signal.signal(caught, handler)
        self._before = {}
