"""Memory that each thread takes again for its next piece of work."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Scratch(threading.local):
    """Fresh memory of some size costs page faults; this is a thread's own, by name."""

    def __init__(self) -> None:
        self._found: dict[str, NDArray[Any]] = {}

    def take(self, name: str, n: int, dtype: DTypeLike) -> NDArray[Any]:
        """(n,) or longer, of undefined values, in the memory of the last call with this name, which
        had the same type."""
        found = self._found.get(name)
        if found is None or len(found) < n:
            found = self._found[name] = np.empty(n, dtype)
        return found
