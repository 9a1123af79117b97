"""The Gram matrices of all compared representations, over the images that count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from vitsee_core.analyses.similarity.site_gram import SiteGram
from vitsee_core.kernels.backend import full_precision
from vitsee_core.runtime.one_thread import one_blas_thread
from vitsee_core.similarity import Representation
from vitsee_core.similarity.comparison import SHARE, Comparison
from vitsee_core.similarity.estimate import comparing
from vitsee_core.similarity.exact import full_grams, jackknife_blocks
from vitsee_core.similarity.gram_file import DamagedGram, GramView
from vitsee_core.types import Integers
from vitsee_stores.errors import MissingInput, VitseeError

HELD = 0.25  # of the memory, for matrices that are read once


@dataclass(frozen=True)
class Grams:
    """Gram matrices, each read on demand, and kept if the memory allows it."""

    comparison: Comparison
    views: Sequence[GramView]
    _held: dict[int, SiteGram] = field(default_factory=dict)

    @cached_property
    def labels(self) -> Integers:
        """(images,) the jackknife's block of each, as in `vitsee cka`."""
        of = self.comparison
        return jackknife_blocks(of.n_images, of.shuffled, of.seed).labels

    def sample(self, most: int | None) -> Integers:
        """At most this many of the images, in order: the first of a random order, else drawn."""
        of, n = self.comparison, self.comparison.n_images
        if most is None or n <= most:
            return np.arange(n)
        if of.shuffled:
            return np.arange(most)
        return np.sort(np.random.default_rng(of.seed).choice(n, most, replace=False))

    def elsewhere(self, used: Sequence[int]) -> Grams | None:
        """A picklable reader for another process; None if there are no files."""
        own, among = self.comparison, [self.comparison.representations[k] for k in used]
        if own.map is None or not all(own.cache.is_shared(of.store, own.map) for of in among):
            return None
        return Grams(own.alone, self.views)

    def require(self, used: Sequence[int]) -> None:
        """Refuse files that this process does not find. Raises VitseeError: names one."""
        for path in (self.views[k].file.path for k in used):
            if not path.exists():
                raise VitseeError(f"the Gram matrix {path} is not on a worker's disk: {SHARE}")

    def name(self, k: int) -> str:
        of = self.comparison.representations[k]
        return f"{of.store.label} {of.site.name}"

    def read(self, k: int, places: Integers) -> SiteGram:
        """The Gram matrix of the k-th representation, over some of the images. Raises DamagedGram:
        its file is not what was written."""
        whole, n = self._held.get(k), self.comparison.n_images
        if whole is None:
            view = self.views[k]
            whole = SiteGram(view.block(slice(0, n), slice(0, n)), view.shift)
            if (len(self._held) + 1) * whole.shifted.nbytes <= HELD * self.comparison.memory:
                self._held[k] = whole
        return whole if len(places) == n else whole.of(places)


@contextmanager
def grams_of(
    rows: Sequence[Representation], cols: Sequence[Representation] | None, **choice: Any
) -> Iterator[Grams]:
    """The Gram matrices of `rows`, then of `cols`, computed as in `vitsee cka` if not cached; see
    `similarity.estimate.hsic` for the other arguments and errors."""
    for one in (*rows, *(cols or ())):
        if one.has_blocks_only:
            raise MissingInput(
                f"{one.store.label} keeps only Gram matrices within slabs of {one.site.name}, "
                "which serve cka alone; run: vitsee cka, or give --tokens mean, or run: vitsee "
                "extract MODEL --tokens all ..."
            )
    with comparing(rows, cols, **choice) as comparison:
        yield Grams(comparison, _whole(comparison))


def _whole(comparison: Comparison) -> list[GramView]:
    """Views of verified tiles; damaged ones are recomputed."""
    for _ in range(len(comparison.representations)):
        with full_precision(comparison.device), one_blas_thread():
            views = full_grams(comparison)
        try:
            for view in views:
                for k in range(view.file.header.n_tiles):
                    view.file.tile(k)
        except DamagedGram as error:
            error.path.unlink(missing_ok=True)
        else:
            return views
    with full_precision(comparison.device), one_blas_thread():
        return full_grams(comparison)
