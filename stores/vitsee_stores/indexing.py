"""Resolving an index into an array on disk: the box to read, and what to take from it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.chunks import Box

Part = int | slice | EllipsisType | Sequence[int] | Sequence[bool] | NDArray[Any]
Index = Part | tuple[Part, ...]


@dataclass(frozen=True)
class Cut:
    """A resolved index."""

    box: Box  # the smallest box with everything requested, (start, stop) on every axis
    # index into that box or, with listed places, into the box with these in their stead
    within: tuple[slice | int, ...]
    # (axis, places) of the axis that is indexed by a list, in the requested order
    listed: tuple[int, NDArray[np.int64]] | None = None
    # numpy moves that axis to the front, as a slice separates it from an integer
    to_front: bool = False

    @property
    def result_axis(self) -> int:
        """The listed axis among the axes of the result."""
        assert self.listed is not None
        return sum(isinstance(part, slice) for part in self.within[: self.listed[0]])


def cut_out(index: Any, shape: tuple[int, ...]) -> Cut:
    """Resolve an index into an array of this shape.

    Raises:
        IndexError: a place beyond its axis, a mask of the wrong length, or too many indices.
        TypeError: not integers, slices, and at most one list of places or mask.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    ellipses = [i for i, part in enumerate(parts) if part is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index with two ellipses")
    if ellipses:
        rest = [slice(None)] * (len(shape) - len(parts) + 1)
        parts[ellipses[0] : ellipses[0] + 1] = rest
    parts += [slice(None)] * (len(shape) - len(parts))
    if len(parts) != len(shape):
        raise IndexError(f"{len(parts)} indices for an array with {len(shape)} axes")
    box: list[slice] = []
    within: list[slice | int] = []
    listed: tuple[int, NDArray[np.int64]] | None = None
    for axis, (part, n) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, slice):
            chosen = range(*part.indices(n))
            first, last = sorted((chosen[0], chosen[-1])) if chosen else (0, -1)
            box.append(slice(first, last + 1))
            within.append(slice(None, None, chosen.step))
        elif isinstance(part, (list, np.ndarray)) and np.ndim(part) > 0:
            if listed is not None:
                raise TypeError("a lazy array takes one list of places or mask; index the result")
            places = _places(part, n)
            listed = (axis, places)
            low, high = (int(places.min()), int(places.max()) + 1) if len(places) else (0, 0)
            box.append(slice(low, high))
            within.append(slice(None))
        else:
            at = _integer(part)
            if not -n <= at < n:
                raise IndexError(f"index {at} of an axis with {n} entries")
            box.append(slice(at % n, at % n + 1))
            within.append(0)
    advanced = [i for i, part in enumerate(parts) if not isinstance(part, slice)]
    apart = listed is not None and advanced[-1] - advanced[0] + 1 != len(advanced)
    return Cut(tuple(box), tuple(within), listed, apart)


def _integer(part: Any) -> int:
    if not isinstance(part, (bool, np.bool_)):
        try:
            return operator.index(part)
        except TypeError:
            pass
    raise TypeError("a lazy array takes integers, slices, and one list of places or mask")


def _places(part: Any, n: int) -> NDArray[np.int64]:
    """The places that a list or mask selects on an axis of `n` entries, in its order."""
    values = np.asarray(part)
    if values.ndim != 1:
        raise TypeError("a lazy array takes lists of places and masks of one axis only")
    if values.dtype == np.bool_:
        if len(values) != n:
            raise IndexError(f"a mask of {len(values)} entries for an axis with {n}")
        return np.flatnonzero(values)
    if not len(values):
        return np.zeros(0, np.int64)
    if values.dtype.kind not in "iu":
        raise TypeError(f"a lazy array takes whole numbers or a mask, not {values.dtype}")
    wrong = (values < -n) | (values >= n)
    if wrong.any():
        raise IndexError(f"index {values[wrong][0]} of an axis with {n} entries")
    return np.where(values < 0, values + n, values).astype(np.int64)
