"""Streams, events and pinned memory as CUDA has them, on the CPU: a copy on a side stream happens
only when somebody waits for it, so that whoever reads too early reads what was there before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor


class FakeStream:
    """Work in a queue; `n_waits` counts how often the host waited for it."""

    made: ClassVar[list[FakeStream]] = []  # of one test: `install` empties it

    def __init__(self, device: Any = None) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = self.n_waits = 0
        self.lock = threading.RLock()
        FakeStream.made.append(self)

    def push(self, work: Callable[[], object]) -> None:
        with self.lock:
            self.queue.append(work)

    def run(self, until: int) -> None:
        with self.lock:
            while self.done < until:
                self.queue[self.done]()
                self.done += 1

    def synchronize(self) -> None:
        self.n_waits += 1
        self.run(len(self.queue))

    def wait_stream(self, other: Self) -> None:
        """Orders the device's work, which is done at once here: the host does not wait."""

    def wait_event(self, event: FakeEvent) -> None:
        """What follows on this stream follows the event; the main stream's work is done at once."""
        event.run()


class FakeEvent:
    """A place in a stream's queue."""

    def record(self, stream: FakeStream) -> None:
        self.stream, self.place = stream, len(stream.queue)

    def run(self) -> None:
        self.stream.run(self.place)

    def synchronize(self) -> None:
        self.stream.n_waits += 1
        self.run()


class FakeRuntime:
    """The part of cudart that pins memory: what is pinned now, by address."""

    def __init__(self, refuse: bool = False) -> None:
        self.pinned: dict[int, int] = {}
        self.refuse = refuse

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
        if self.refuse:
            return 2
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def install(monkeypatch: pytest.MonkeyPatch, pinned: bool = True) -> FakeRuntime:
    """Put the fakes in torch's place for a test. pinned: what `is_pinned` says of all memory."""
    current: list[FakeStream] = []
    main, runtime = FakeStream(), FakeRuntime()
    FakeStream.made.clear()
    copy, empty = Tensor.copy_, torch.empty

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    def copied(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if current and non_blocking:
            current[-1].push(lambda: copy(self, source))
            return self
        return copy(self, source)

    def allocated(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: main)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "empty", allocated)
    monkeypatch.setattr(Tensor, "copy_", copied)
    monkeypatch.setattr(Tensor, "record_stream", lambda _self, _stream: None)
    monkeypatch.setattr(Tensor, "is_pinned", lambda _self: pinned)
    return runtime
