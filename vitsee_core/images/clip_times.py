"""Which frames of a clip a model sees, and in which order.

Frames are those that a viewer would see at certain times: for `frames` T of them the middles of T
equal parts of the clip, or with `every` K times that are K mean frame intervals apart, around the
clip's middle. Of a constant rate that is frame floor((k + 1/2) n / T) of n, and with K frame
floor(n / 2 + (k + (1 - T) / 2) K). Times are compared as whole ticks of the file's clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.errors import ImageError
from vitsee_stores.plan import TIMES

ORDERED, SHUFFLED, STILL = TIMES


@dataclass(frozen=True)
class Timeline:
    """When each frame of a clip is shown.

    Attributes:
        starts: (frames,) in ticks, ascending.
        end: of the last frame, in ticks.
        tick_seconds: None where the clip does not say.
    """

    starts: Sequence[int]
    end: int
    tick_seconds: float | None = None

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True)
class Sampling:
    """The frames that a model sees of a clip, see `Clip` in vitsee_stores.

    Attributes:
        seed: of the orders of shuffled frames.
    """

    frames: int
    every: int | None = None
    time: str = ORDERED
    seed: int = 0

    def chosen(self, name: str, line: Timeline) -> list[int]:
        """The sampled frames in the order of time, as places in the timeline.

        Raises:
            ImageError: the clip has no frames, or fewer than are asked for.
        """
        n, asked = len(line), self.frames
        if not n:
            raise ImageError(name, "it has no frames")
        reach = asked if self.every is None else (asked - 1) * self.every + 1
        if reach > n:
            how = "" if self.every is None else f" every {self.every} reach over {reach} and"
            has = f"{n} frame{'' if n == 1 else 's'}"
            raise ImageError(name, f"it has {has}; {asked} frames{how} were asked for")
        begin = line.starts[0]
        length = line.end - begin
        if self.every is None:
            ticks = [begin + (2 * k + 1) * length // (2 * asked) for k in range(asked)]
        else:
            ticks = [
                begin + (length * n + (2 * k + 1 - asked) * self.every * length) // (2 * n)
                for k in range(asked)
            ]
        places = np.searchsorted(np.array(line.starts, np.int64), ticks, side="right") - 1
        return [int(place) for place in places]

    def order(self, sample: str) -> list[int]:
        """For each frame that the model sees its place among the sampled ones: 0, 1, 2, ...; of
        shuffled ones a permutation that depends on the sample's id and the seed and is never the
        order of time (if there are two frames at least); of still ones the middle frame alone."""
        if self.time == STILL:
            return [self.frames // 2] * self.frames
        if self.time == ORDERED or self.frames == 1:
            return list(range(self.frames))
        key = hashlib.blake2b(f"{self.seed}:{sample}".encode(), digest_size=16).digest()
        draws = np.random.PCG64(int.from_bytes(key, "little"))
        while True:
            # numpy promises the raw draws across its versions, not what it makes of them.
            order: NDArray[np.int64] = np.argsort(draws.random_raw(self.frames), kind="stable")
            if (order != np.arange(self.frames)).any():
                return [int(place) for place in order]

    def seconds(self, line: Timeline) -> float:
        """The time between neighbouring sampled frames; NaN of one frame, or where the clip does
        not say."""
        if line.tick_seconds is None or self.frames == 1:
            return float("nan")
        length = (line.end - line.starts[0]) * line.tick_seconds
        return length / self.frames if self.every is None else length * self.every / len(line)
