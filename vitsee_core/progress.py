"""How long runs tell somebody how far they are."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told how far a run is; the terminal's draws a bar."""

    def start(self, total: int, done: int = 0) -> None:
        """`total` images (or what else the run counts) are to be done, `done` already are."""

    def advance(self, images: int, size_bytes: int = 0) -> None:
        """That many more are done, and bytes written or read."""

    def stop(self) -> None:
        """The run ended, well or not."""


class Silent:
    """Progress that shows nothing."""

    def start(self, total: int, done: int = 0) -> None:
        """Nothing."""

    def advance(self, images: int, size_bytes: int = 0) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


SILENT = Silent()
