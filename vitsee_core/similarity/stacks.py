"""Stacks of small feature matrices, read together and cached by runs of images.

For large work on the CPU they stay in memory as stored: float16 and bytes take a half and a quarter
of float32. They are cast, shifted and scaled just before a product, into memory that stays in the
core's cache: features in float32 come from main memory, which takes longer for matrices of some
hundred columns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features import SiteFeatures
from vitsee_core.kernels.backend import MatmulBackend
from vitsee_core.kernels.compiled import shift_bytes, shift_half
from vitsee_core.runtime.progress import Progress
from vitsee_core.similarity.patch_pixels import PatchPixels
from vitsee_core.types import Float32, Integers

MEAN_ROWS = 32


class TokenStack:
    """Tokens of a site, each a feature matrix of its own, images by channels.

    Raises:
        SiteError: the site has no such tokens.
        MissingInput: they are not stored.
    """

    def __init__(self, features: SiteFeatures, places: Integers | None = None) -> None:
        """places: which of `features.tokens`, in any order; all of them by default."""
        self.features, self.store = features, features.store
        self.places = np.arange(len(features.tokens)) if places is None else places
        _ = features.arrays  # raises now rather than during the work

    @property
    def n_matrices(self) -> int:
        return len(self.places)

    @property
    def n_features(self) -> int:
        return self.features.dim

    def part(self, wanted: slice) -> TokenStack:
        return TokenStack(self.features, self.places[wanted])

    def read(self, rows: slice) -> NDArray[Any]:
        """(rows, tokens, channels) of consecutive rows of the store."""
        first, last = int(self.places.min()), int(self.places.max())
        values: NDArray[Any] = self.features.load(rows, slice(first, last + 1))
        places = self.places - first
        return values if np.array_equal(places, np.arange(values.shape[1])) else values[:, places]


# Feature matrices of the same images, all of one width, that are read together.
Stack = TokenStack | PatchPixels


class Runs:
    """A stack's features by runs of images: (matrices, images, features) float32 on the device,
    minus a fixed vector each, which changes no HSIC and preserves float32 precision: the mean over
    the first images. Constant features become 0, bitwise. `kept` runs (at least two) stay in
    memory."""

    def __init__(
        self, stack: Stack, images: Integers, kept: int, backend: MatmulBackend, progress: Progress
    ) -> None:
        self.stack, self.images, self._progress = stack, images, progress
        self.backend = backend
        self._kept = max(2, kept)
        self._runs: dict[int, Any] = {}
        self._mean: Float32 | None = None

    def reading(self, i: slice, j: slice) -> list[Callable[[], None]]:
        """Jobs to load both runs, i <= j, in any order; none if they are loaded or already
        requested."""
        jobs = []
        for run in (i, j):
            if run.start not in self._runs:
                self._make_room(i.start, j.start)
                self._runs[run.start] = None
                jobs += self._jobs(run)
        return jobs

    def _jobs(self, run: slice) -> list[Callable[[], None]]:
        def read() -> None:
            self._runs[run.start] = self.backend.take(self._read(run))

        return [read]

    def of(self, k: int, run: slice, name: str) -> Any:
        """(images, features) of one matrix, after reading. name: of the per-thread memory that is
        reused if they have to be computed."""
        return self._runs[run.start][k]

    def _make_room(self, i: int, j: int) -> None:
        """Tiles come row by row of the upper triangle: runs before i are not needed again, and of
        the others the last one before j is needed last."""
        while len(self._runs) >= self._kept:
            others = sorted(run for run in self._runs if run not in (i, j))
            below = [run for run in others if run < j]
            del self._runs[others[0] if others[0] < i else (below or others)[-1]]

    def _read(self, run: slice) -> Any:
        x = self._load(run)
        if self._mean is None:
            first = x[:, :1]
            self._mean = first + (x[:, :MEAN_ROWS] - first).mean(1, keepdims=True)
        x -= self._mean
        return x

    def _load(self, run: slice) -> Float32:
        n = run.stop - run.start
        out = np.empty((self.stack.n_matrices, n, self.stack.n_features), np.float32)
        for some, rows in self.spans(run):
            values = self.stack.read(slice(int(rows[0]), int(rows[-1]) + 1))
            self._progress.advance(0, values.nbytes)
            if len(values) > len(rows):
                values = values[rows - rows[0]]
            if len(values) == n and values.dtype == np.float32:
                whole = values.swapaxes(0, 1)
                if whole.flags.c_contiguous and whole.base is not None and whole.flags.writeable:
                    return whole  # already in the wanted form, in its own memory
            self.backend.cast(out[:, some].swapaxes(0, 1), values)
        return out

    def spans(self, run: slice) -> list[tuple[slice, Integers]]:
        """Slab by slab, which of a run's images it has, and their rows in the store."""
        rows, plan, spans = self.images[run], self.stack.store.plan, []
        for slab in range(int(rows[0]) // plan.slab, int(rows[-1]) // plan.slab + 1):
            span = plan.rows(slab)
            low, high = np.searchsorted(rows, [span.start, span.stop]).tolist()
            if high > low:
                spans.append((slice(low, high), rows[low:high]))
        return spans


NO_SUMS, NO_VALUES = np.zeros((0, 2), np.float32), np.zeros((0, 0, 0))


class Scratch(threading.local):
    """Per-thread memory that is reused for the next piece of work: fresh memory costs page
    faults."""

    def __init__(self) -> None:
        self._found: dict[str, Float32] = {}

    def take(self, name: str, rows: int, columns: int) -> Float32:
        """(rows, columns) uninitialised, in the memory of the last call with this name."""
        n = rows * columns
        buffer = self._found.get(name)
        if buffer is None or len(buffer) < n:
            buffer = self._found[name] = np.empty(n, np.float32)
        return buffer[:n].reshape(rows, columns)


class StoredRuns(Runs):
    """`Runs` of one matrix at a time.

    Patches keep their pixels' values, scaled as the model's normalisation does; the mean that it
    subtracts is the same for all pixels of a channel and has no effect.

    _runs: for each slab, which of the run's images it has, and (matrices, images, features).
    """

    _scratch = Scratch()
    _runs: dict[int, list[tuple[slice, NDArray[Any]]]]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._means: dict[int, Float32] = {}

    @staticmethod
    def takes(stack: Stack) -> bool:
        """Whether a stack is stored in such a type."""
        if not isinstance(stack, TokenStack):
            return stack.scale is not None
        of = stack.features
        return of.matching is None and all(a.dtype == np.float16 for a in of.arrays)

    def of(self, k: int, run: slice, name: str) -> Float32:
        """A run of slab k's array `name`, in float32."""
        x = self._scratch.take(name, run.stop - run.start, self.stack.n_features)
        mean = self._mean_of(k)
        for some, values in self._runs[run.start]:
            raw = np.ascontiguousarray(values[k])
            if raw.dtype == np.float16:
                shift_half(raw.view(np.uint16), mean, x[some], 0, NO_SUMS)
            else:
                shift_bytes(raw, mean, self._scale, x[some])
        return x

    def _mean_of(self, k: int) -> Float32:
        """The mean to subtract from a matrix: over the first rows of the first run, which is loaded
        when first requested; an integer for bytes."""
        if k not in self._means:
            x = self._runs[0][0][1][k][:MEAN_ROWS].astype(np.float32)
            # For equal rows it equals these bitwise.
            mean = x[0] + (x - x[0]).mean(0)
            self._means[k] = mean if isinstance(self.stack, TokenStack) else np.rint(mean)
        return self._means[k]

    @property
    def _scale(self) -> Float32:
        """The scale of the pixels of a patch."""
        assert isinstance(self.stack, PatchPixels) and self.stack.scale is not None
        return self.stack.scale

    def _jobs(self, run: slice) -> list[Callable[[], None]]:
        spans = self.spans(run)
        slabs = self._runs[run.start] = [(some, NO_VALUES) for some, _ in spans]

        def keep(k: int) -> None:
            slabs[k] = slabs[k][0], self._read_rows(spans[k][1])

        return [partial(keep, k) for k in range(len(spans))]

    def _read_rows(self, rows: Integers) -> NDArray[Any]:
        """(matrices, images, features) of rows of one slab."""
        stack, span = self.stack, slice(int(rows[0]), int(rows[-1]) + 1)
        if isinstance(stack, PatchPixels):
            values = stack.read_stored(span)
        else:
            values = stack.read(span).swapaxes(0, 1)
        self._progress.advance(0, values.nbytes)
        return values[:, rows - rows[0]] if values.shape[1] > len(rows) else values
