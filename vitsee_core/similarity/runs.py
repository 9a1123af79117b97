"""Keep stacks of small feature matrices in memory, by runs of consecutive images.

`Runs` has them as float32. For large work on the CPU `StoredRuns` has them as stored: float16 and
bytes take a half and a quarter of float32. They are cast, shifted and scaled just before a product,
into memory that stays in the core's cache: float32 features would come from main memory, which
takes longer for matrices of some hundred columns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.kernels.backend import MatmulBackend
from vitsee_core.kernels.compiled import shift_bytes, shift_half
from vitsee_core.runtime.progress import Progress
from vitsee_core.similarity.scaling import largest_size, power_of_two
from vitsee_core.similarity.stacks import PatchPixels, Stack, TokenStack
from vitsee_core.types import Float32, Integers

MEAN_ROWS = 32  # images that the subtracted mean is taken over


class Runs:
    """A stack's features by runs of images: (matrices, images, features) float32 on the device.

    From each matrix a fixed vector is subtracted, the mean over the first images, which changes no
    HSIC and preserves float32 precision; constant features become 0, bitwise. Features far from 1
    are brought near it by a power of two (`power_of_two`).

    Args:
        stack: the matrices.
        images: (n,) rows of the store, ascending; a run is a slice of these.
        kept: how many runs stay in memory, at least two.
        backend: multiplies; the features are on its device.
        progress: counts the bytes that are read.
    """

    def __init__(
        self,
        stack: Stack,
        images: Integers,
        kept: int,
        backend: MatmulBackend,
        progress: Progress,
    ) -> None:
        self.stack = stack
        self.images = images
        self._progress = progress
        self.backend = backend
        self._kept = max(2, kept)
        # First image of a run -> (matrices, images, features), None while it is requested.
        self._runs: dict[int, Any] = {}
        self._mean: Float32 | None = None  # (matrices, 1, features)
        self._scale = 1.0  # of all images, by the first run's

    def loading_jobs(self, i: slice, j: slice) -> list[Callable[[], None]]:
        """Return jobs that load both runs, i <= j, to be called in any order; none for runs that
        are loaded or already requested."""
        jobs = []
        for run in (i, j):
            if run.start not in self._runs:
                while len(self._runs) >= self._kept:
                    self._drop_run(i.start, j.start)
                self._runs[run.start] = None
                jobs += self._request(run)
        return jobs

    def _drop_run(self, i: int, j: int) -> None:
        """Free the run that is needed last, of those that do not begin at images i and j.

        Tiles come row by row of the upper triangle: runs before i are not needed again, and of the
        others the last one before j is needed last.
        """
        starts = sorted(start for start in self._runs if start not in (i, j))
        if starts[0] < i:
            del self._runs[starts[0]]
            return
        before_j = [start for start in starts if start < j]
        del self._runs[(before_j or starts)[-1]]

    def _request(self, run: slice) -> list[Callable[[], None]]:
        """Return the jobs that load one run, of which `loading_jobs` has taken note."""

        def read() -> None:
            """Load all matrices of the run onto the device."""
            x = self._load(run)
            if self._mean is None:
                # Differences to the first image: the mean of equal images is then exact.
                first = x[:, :1]
                self._mean = first + (x[:, :MEAN_ROWS] - first).mean(1, keepdims=True)
                self._scale = power_of_two(largest_size(x))
            x -= self._mean
            if self._scale != 1:
                x *= np.float32(self._scale)
            self._runs[run.start] = self.backend.take(x)

        return [read]

    def features(self, k: int, run: slice, buffer: str) -> Any:
        """Return (images, features) of matrix k, once the run's jobs are done.

        buffer: names this thread's memory for the result, which another call with the same name
            overwrites; not used where the features are in memory already.
        """
        return self._runs[run.start][k]

    def _load(self, run: slice) -> Float32:
        """Return (matrices, images, features) of a run, float32, in memory that may be changed."""
        n = run.stop - run.start
        out = np.empty((self.stack.n_matrices, n, self.stack.n_features), np.float32)
        for target, rows in self.slab_rows(run):
            # The span of rows is read at once; unreadable images within it are left out.
            values = self.stack.read(slice(int(rows[0]), int(rows[-1]) + 1))
            self._progress.advance(0, values.nbytes)
            if len(values) > len(rows):
                values = values[rows - rows[0]]
            if len(values) == n and values.dtype == np.float32:
                by_matrix = values.swapaxes(0, 1)
                if (
                    by_matrix.flags.c_contiguous
                    and by_matrix.base is not None
                    and by_matrix.flags.writeable
                ):
                    return by_matrix  # already in the right form, in its own memory
            self.backend.cast(out[:, target].swapaxes(0, 1), values)
        return out

    def slab_rows(self, run: slice) -> list[tuple[slice, Integers]]:
        """Return for each slab with images of a run: which of the run's images these are, and their
        rows in the store."""
        rows = self.images[run]
        plan = self.stack.store.plan
        spans = []
        for slab in range(int(rows[0]) // plan.slab, int(rows[-1]) // plan.slab + 1):
            span = plan.rows(slab)
            low, high = np.searchsorted(rows, [span.start, span.stop]).tolist()
            if high > low:
                spans.append((slice(low, high), rows[low:high]))
        return spans


NO_SUMS = np.zeros((0, 2), np.float32)
NO_VALUES = np.zeros((0, 0, 0))


class Scratch(threading.local):
    """Memory of each thread that is reused for the next piece of work: fresh memory costs page
    faults."""

    def __init__(self) -> None:
        self._buffers: dict[str, Float32] = {}

    def take(self, name: str, rows: int, columns: int) -> Float32:
        """Return (rows, columns) uninitialised, in the memory of the last call with this name."""
        n = rows * columns
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < n:
            buffer = self._buffers[name] = np.empty(n, np.float32)
        return buffer[:n].reshape(rows, columns)


class StoredRuns(Runs):
    """`Runs` that stay in memory as stored, float16 or bytes; a matrix is cast when it is needed.

    Patches keep their pixels' values, scaled as the model's normalisation does; the mean that it
    subtracts is the same for all pixels of a channel and has no effect.
    """

    _scratch = Scratch()
    # First image of a run -> for each slab: which of the run's images it has, and
    # (matrices, images, features) of these.
    _runs: dict[int, list[tuple[slice, NDArray[Any]]]]

    def __init__(
        self,
        stack: Stack,
        images: Integers,
        kept: int,
        backend: MatmulBackend,
        progress: Progress,
    ) -> None:
        super().__init__(stack, images, kept, backend, progress)
        self._means: dict[int, Float32] = {}  # matrix -> (features,)

    @staticmethod
    def supports(stack: Stack) -> bool:
        """Return whether a stack is stored as bytes or float16, and read without conversion."""
        if not isinstance(stack, TokenStack):
            return stack.scale is not None
        features = stack.features
        if features.matching is not None:
            return False
        return all(array.dtype == np.float16 for array in features.arrays)

    def features(self, k: int, run: slice, buffer: str) -> Float32:
        """Return (images, features) of matrix k in float32, in this thread's memory `buffer`."""
        n_images = run.stop - run.start
        x = self._scratch.take(buffer, n_images, self.stack.n_features)
        mean = self._matrix_mean(k)
        for target, values in self._runs[run.start]:
            raw = np.ascontiguousarray(values[k])
            if raw.dtype == np.float16:
                bits = raw.view(np.uint16)
                shift_half(bits, mean, x=x[target], column=0, sums=NO_SUMS)
            else:
                assert isinstance(self.stack, PatchPixels)
                assert self.stack.scale is not None
                shift_bytes(raw, mean, self.stack.scale, x[target])
        return x

    def _matrix_mean(self, k: int) -> Float32:
        """Return the mean (features,) to subtract from matrix k; whole numbers for bytes.

        It is over the first rows of the first run, which is loaded before any other.
        """
        if k not in self._means:
            _, values = self._runs[0][0]
            x = values[k][:MEAN_ROWS].astype(np.float32)
            # Differences to the first image: the mean of equal images is then exact.
            mean = x[0] + (x - x[0]).mean(0)
            self._means[k] = mean if isinstance(self.stack, TokenStack) else np.rint(mean)
        return self._means[k]

    def _request(self, run: slice) -> list[Callable[[], None]]:
        """Return one job per slab of the run; each puts its values where `features` finds them."""
        slab_rows = self.slab_rows(run)
        slabs = [(target, NO_VALUES) for target, _ in slab_rows]
        self._runs[run.start] = slabs

        def read(k: int) -> None:
            """Keep the k-th slab's values."""
            target, rows = slab_rows[k]
            slabs[k] = target, self._read_rows(rows)

        return [partial(read, k) for k in range(len(slab_rows))]

    def _read_rows(self, rows: Integers) -> NDArray[Any]:
        """Return (matrices, images, features), as stored, of rows of one slab."""
        stack = self.stack
        span = slice(int(rows[0]), int(rows[-1]) + 1)
        if isinstance(stack, PatchPixels):
            values = stack.read_stored(span)
        else:
            values = stack.read(span).swapaxes(0, 1)
        self._progress.advance(0, values.nbytes)
        if values.shape[1] > len(rows):
            return values[:, rows - rows[0]]
        return values
