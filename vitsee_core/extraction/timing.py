"""Where the time of an extraction goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from vitsee_stores.layout import SiteSpec

if TYPE_CHECKING:
    from vitsee_core.models.attention_watch import AttentionCall
    from vitsee_core.models.capture import Observer
    from vitsee_core.models.sites import AttentionBlock, Sublayer


class Clock:
    """Seconds by stage; `with clock("loading"): ...`. Safe from several threads."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, stage: str, seconds: float) -> None:
        """Add seconds to a stage."""
        with self._lock:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def limit(self) -> str:
        """What the run was waiting for most, in words: images, the disk, or the model."""
        waited = {
            "loading images (more --workers, smaller files)": self.seconds.get("loading", 0.0),
            "writing (a faster disk, --tokens pooled)": self.seconds.get(
                "waiting for the writer", 0.0
            ),
        }
        rest = sum(
            self.seconds.get(stage, 0.0) for stage in ("model", "reductions", "grams", "erf")
        )
        waited["the model and its summaries"] = rest
        return max(waited, key=lambda stage: waited[stage])

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time spent inside to a stage."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - began)

    @contextmanager
    def within(self, stage: str, outer: str) -> Iterator[None]:
        """Add the time spent inside to a stage, and subtract it from the one that is running."""
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self.add(stage, spent)
            self.add(outer, -spent)


class TimedObserver:
    """An observer that counts the time spent in another as "reductions" and not as "model".

    For CPU runs: on an asynchronous device the calls return before the work is done.
    """

    def __init__(self, observer: Observer, clock: Clock):
        self._observer, self._clock = observer, clock

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """As the observer's `site`, timed."""
        with self._clock.within("reductions", "model"):
            self._observer.site(site, prefix, body)

    def branch(self, sublayer: Sublayer, z: Tensor, f: Tensor) -> None:
        """As the observer's `branch`, timed."""
        with self._clock.within("reductions", "model"):
            self._observer.branch(sublayer, z, f)

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """As the observer's `attention`, timed."""
        with self._clock.within("reductions", "model"):
            self._observer.attention(block, call)
