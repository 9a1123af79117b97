"""Result of one call of `extract`, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vitsee_core.runtime.machine import counted


@dataclass
class Outcome:
    """Result of one call of `extract`; `complete` refers to the whole store.

    Attributes:
        clock: seconds by consecutive stage: their sum is `seconds`, of each worker if there are
            several.
        beside: seconds of stages that ran concurrently.
        examples: images or clips.
    """

    complete: bool
    n_images: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    clock: dict[str, float] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)
    unreadable: list[tuple[int, str, str]] = field(default_factory=list)
    examples: str = "images"

    def add(self, other: Outcome) -> None:
        """Add the results of another round."""
        self.n_images += other.n_images
        self.size_bytes += other.size_bytes
        self.seconds += other.seconds
        for own, added in ((self.clock, other.clock), (self.beside, other.beside)):
            for stage, seconds in added.items():
                own[stage] = own.get(stage, 0.0) + seconds
        self.unreadable += other.unreadable

    def stages(self) -> str:
        """The time by stage, in words."""

        def listed(clock: Mapping[str, float]) -> str:
            longest = sorted(clock.items(), key=lambda item: -item[1])
            return ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in longest)

        several = sum(self.clock.values()) > 1.05 * self.seconds
        line = ("all workers together: " if several else "") + listed(self.clock)
        return f"{line}; beside these {listed(self.beside)}" if self.beside else line

    def unreadable_line(self) -> str:
        """Which images could not be read, and why; "" if none."""
        if not self.unreadable:
            return ""
        named = "; ".join(f"{name} ({reason})" for _, name, reason in self.unreadable[:10])
        more = f"; and {len(self.unreadable) - 10} more" if len(self.unreadable) > 10 else ""
        return (
            f"{len(self.unreadable)} of {counted(self.n_images, self.examples)} could not be read: "
            f"{named}{more}; their rows are NaN with valid = 0"
        )
