"""Progress in a notebook: one line below the cell that is renewed, and left at its end."""

from __future__ import annotations

import html
import importlib
import sys
import threading
import time
from typing import Any

EVERY = 0.2  # seconds between renewals


class NotebookProgress:
    """`progress=NotebookProgress()` of an analysis or of `extract`: a bar in an IPython notebook,
    lines of text on stderr elsewhere (at the end of each phase).

    Args:
        what: said before the numbers.
    """

    def __init__(self, what: str = "vitsee") -> None:
        self.what = what
        self._lock = threading.Lock()
        self._total = self._done = 0
        self._unit, self._start, self._shown = "images", 0.0, 0.0
        self._display: Any = None

    def start(self, total: int, done: int = 0, unit: str = "images") -> None:
        """See `Progress`."""
        with self._lock:
            self._total, self._done, self._unit = total, done, unit
            self._start, self._shown, self._display = time.monotonic(), 0.0, None
            self._show()

    def advance(self, count: int, size_bytes: int = 0) -> None:
        """See `Progress`."""
        with self._lock:
            self._done += count
            if time.monotonic() - self._shown > EVERY:
                self._show()

    def skip(self, count: int) -> None:
        """See `Progress`."""
        self.advance(count)

    def stop(self) -> None:
        """See `Progress`."""
        with self._lock:
            self._show(last=True)

    def line(self) -> str:
        took = time.monotonic() - self._start
        return f"{self.what}: {self._done:,} of {self._total:,} {self._unit}, {took:.0f} s"

    def _show(self, last: bool = False) -> None:
        self._shown = time.monotonic()
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is None or not hasattr(shell, "kernel"):
            if last:
                sys.stderr.write(f"{self.line()}\n")
            return
        notebook = importlib.import_module("IPython.display")
        bar = f'<progress value="{self._done}" max="{max(self._total, 1)}"></progress> '
        shown = notebook.HTML(bar + html.escape(self.line()))
        if self._display is None:
            self._display = notebook.display(shown, display_id=True)
        else:
            self._display.update(shown)
