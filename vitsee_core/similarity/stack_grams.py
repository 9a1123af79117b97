"""Gram matrices of stacks of small feature matrices, computed when read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vitsee_core.kernels.backend import MatmulBackend
from vitsee_core.runtime.progress import Progress
from vitsee_core.similarity.stacks import Runs, Stack, TokenStack
from vitsee_core.similarity.stored_runs import StoredRuns
from vitsee_core.types import Float32, Integers


@dataclass(frozen=True)
class StackGram:
    """The Gram matrix of one matrix of a stack."""

    features: Runs
    k: int

    @property
    def n(self) -> int:
        return len(self.features.images)

    def reading(self, i: slice, j: slice) -> Sequence[Callable[[], None]]:
        """Jobs to run, in any order, before its blocks are computed; none the second time."""
        return self.features.reading(i, j)

    def block(self, i: slice, j: slice) -> Any:
        """(len(i), len(j)) entries, on the device of the features."""
        a, b = self._both(i, j)
        return a @ b.T

    def compute(self, i: slice, j: slice, out: Float32) -> None:
        self.features.backend.multiply(*self._both(i, j), out)

    def _both(self, i: slice, j: slice) -> tuple[Any, Any]:
        """Its features of the images in `i` and of those in `j`; one array twice if i is j."""
        x = self.features.of(self.k, i, "left")
        return x, x if i == j else self.features.of(self.k, j, "right")


@dataclass(frozen=True)
class Counted:
    """A matrix that counts the blocks read from it."""

    matrix: StackGram
    progress: Progress

    @property
    def n(self) -> int:
        return self.matrix.n

    def reading(self, i: slice, j: slice) -> Sequence[Callable[[], None]]:
        return self.matrix.reading(i, j)

    def block(self, i: slice, j: slice) -> Any:
        self.progress.advance(1)
        return self.matrix.block(i, j)

    def compute(self, i: slice, j: slice, out: Float32) -> None:
        self.progress.advance(1)
        self.matrix.compute(i, j, out)


def bytes_per_value(stack: Stack, stored: bool) -> int:
    """Bytes of memory per number of a stack; see `matrices`."""
    if not stored or not StoredRuns.takes(stack):
        return 4
    return 2 if isinstance(stack, TokenStack) else 1


def matrices(
    stacks: Sequence[Stack],
    images: Integers,
    kept: int,
    backend: MatmulBackend,
    progress: Progress,
    stored: bool,
) -> Iterator[StackGram]:
    """The Gram matrix of each of their matrices over `images`, rows of the store; the features of
    `kept` (at least two) tiles' images stay in memory, and `progress` counts the bytes read.
    stored: they are kept in their stored type, if possible."""
    for stack in stacks:
        features: Runs
        if stored and StoredRuns.takes(stack):
            features = StoredRuns(stack, images, kept, backend, progress)
        else:
            features = Runs(stack, images, kept, backend, progress)
        yield from (StackGram(features, k) for k in range(stack.n_matrices))
