"""Asynchronous copies: results from the device to the host, pixels to the device.

On CUDA copies run on streams of their own, beside the model. The host waits for them only where the
methods say so; on other devices each is done when its call returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vitsee_core.images import Batch

# Batches whose results may be in transit to the host; all of them occupy the device.
BATCHES_UNDER_WAY = 2
# Buffers between the device and memory that is not pinned.
N_BOUNCES = 2
# Batches of pixels in pinned memory: one in use, one in transit, one being filled.
N_PINNED_BATCHES = 3


class HostCopies:
    """Copies into host memory, in the order of the calls.

    Memory on the device: the results of at most three batches, including the current one; on the
    host: two buffers of the size of the largest copy into unpinned memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._batches: deque[torch.cuda.Event] = deque()
        self._bouncing: deque[tuple[torch.cuda.Event, Tensor, Tensor]] = deque()
        self._spare: list[Tensor] = []

    @property
    def asynchronous(self) -> bool:
        """Whether copies are still pending when `copy` has returned."""
        return self._stream is not None

    def copy(self, out: Tensor, value: Tensor) -> None:
        """Copy `value` into host memory `out`; `value` may change once this has returned.

        A GPU cannot write to unpinned memory asynchronously: such copies take a second step on the
        host, which happens when the intermediate buffers are needed, or in `wait` and `mark`.
        """
        if self._stream is None or value.device.type != self._device.type:
            out.copy_(value)
            return
        # Always a copy: the model may overwrite a live tensor before the side stream reads it.
        staged = value.new_empty(value.shape, dtype=out.dtype).copy_(value)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        bounce = None if out.is_pinned() else self._bounce_buffer(out.nbytes)
        target = out if bounce is None else _view_like(bounce, out)
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
        # Else torch may give the memory to another tensor of the model's stream before the copy.
        staged.record_stream(self._stream)
        if bounce is not None:
            self._bouncing.append((self._record_event(), bounce, out))

    def end_batch(self) -> None:
        """Wait until the results of the batch before last have left the device.

        Otherwise they would pile up if the model is faster than the bus.
        """
        if self._stream is None:
            return
        self._batches.append(self._record_event())
        if len(self._batches) > BATCHES_UNDER_WAY:
            self._batches.popleft().synchronize()

    def wait(self) -> None:
        """Return when everything has arrived, so that the host may read it."""
        if self._stream is not None:
            self._stream.synchronize()
        self._settle(0)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after all copies so far, None if they have arrived already.

        When its `synchronize` returns, on any thread, they have arrived.
        """
        self._settle(0)
        return None if self._stream is None else self._record_event()

    def _record_event(self) -> torch.cuda.Event:
        """Return an event after everything that the copying stream was given so far."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _bounce_buffer(self, n_bytes: int) -> Tensor:
        """Return pinned memory, uint8 and at least this long, that no copy uses."""
        self._settle(N_BOUNCES - 1)
        if self._spare and len(self._spare[0]) >= n_bytes:
            return self._spare.pop(0)
        # A buffer that was too small once is freed: at most N_BOUNCES exist.
        del self._spare[:1]
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def _settle(self, max_pending: int) -> None:
        """Complete the oldest copies, until at most this many lack the second step."""
        while len(self._bouncing) > max_pending:
            event, bounce, out = self._bouncing.popleft()
            event.synchronize()
            out.copy_(_view_like(bounce, out))
            self._spare.append(bounce)


def _view_like(memory: Tensor, like: Tensor) -> Tensor:
    """Return the front of flat uint8 memory as a tensor of the type and shape of `like`."""
    return memory[: like.nbytes].view(like.dtype).view(like.shape)


class PixelFeed:
    """Batches with their pixels on the device.

    On CUDA they are copied while the model processes the previous batch: call `ahead` once its
    forward pass has been started.
    """

    def __init__(self, loading: Iterator[Batch], device: torch.device) -> None:
        self._loading = loading
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        self._next: tuple[Batch, Tensor, torch.cuda.Event] | None = None

    def ahead(self) -> None:
        """Load the next batch, if there is one, and start its copy; only on CUDA."""
        if self._stream is None or self._next is not None:
            return
        batch = next(self._loading, None)
        if batch is None:
            return
        memory = self._pinned_memory(batch.pixels.nbytes)
        pinned = _view_like(memory, batch.pixels).copy_(batch.pixels)
        with torch.cuda.stream(self._stream):
            pixels = pinned.to(self._device, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(self._stream)
        self._pinned.append((arrived, memory))
        self._next = batch, pixels, arrived

    def take(self) -> tuple[Batch, Tensor]:
        """Return the next batch, and its pixels (images, channels, height, width) uint8.

        The pixels are on the device.

        Raises:
            StopIteration: there is no further batch.
        """
        if self._stream is None:
            batch = next(self._loading)
            return batch, batch.pixels.to(self._device)
        self.ahead()
        if self._next is None:
            raise StopIteration
        batch, pixels, arrived = self._next
        self._next = None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        # They were allocated on the copying stream and are used on the model's.
        pixels.record_stream(current)
        return batch, pixels

    def _pinned_memory(self, n_bytes: int) -> Tensor:
        """Return pinned memory, uint8 and at least this long.

        It is that of the oldest copy, once that has arrived, if there are `N_PINNED_BATCHES`.
        """
        if len(self._pinned) == N_PINNED_BATCHES:
            arrived, memory = self._pinned.popleft()
            arrived.synchronize()
            if len(memory) >= n_bytes:
                return memory
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
