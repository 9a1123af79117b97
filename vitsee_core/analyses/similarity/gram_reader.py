"""Read the Gram matrices of representations on demand, computed and verified beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from vitsee_core.analyses.similarity.measure import SiteGram
from vitsee_core.kernels.backend import full_precision
from vitsee_core.runtime.lanes import one_blas_thread
from vitsee_core.similarity import Representation
from vitsee_core.similarity.comparison import SHARED_CACHE_HINT, Comparison
from vitsee_core.similarity.estimate import comparing
from vitsee_core.similarity.estimators import full_grams, jackknife_blocks
from vitsee_core.similarity.gram_file import DamagedGram, GramView
from vitsee_core.types import Integers
from vitsee_stores.errors import MissingInput, VitseeError

GRAMS_SHARE = 0.25  # of the memory, for matrices that stay there after they were read


@dataclass(frozen=True)
class Grams:
    """Gram matrices of a comparison's representations, each read on demand.

    Matrices stay in memory as long as they take at most `GRAMS_SHARE` of it.
    """

    comparison: Comparison
    views: Sequence[GramView]  # one per representation
    _in_memory: dict[int, SiteGram] = field(default_factory=dict)

    @cached_property
    def labels(self) -> Integers:
        """(images,) the jackknife's block of each image, as in `vitsee cka`."""
        comparison = self.comparison
        blocks = jackknife_blocks(
            comparison.n_images, comparison.shuffled, comparison.seed
        )
        return blocks.labels

    def sample(self, most: int | None) -> Integers:
        """Return the indices of at most `most` of the images, ascending; None: of all.

        They are the first ones of a store in random order, else drawn.
        """
        comparison = self.comparison
        n = comparison.n_images
        if most is None or n <= most:
            return np.arange(n)
        if comparison.shuffled:
            return np.arange(most)
        rng = np.random.default_rng(comparison.seed)
        return np.sort(rng.choice(n, most, replace=False))

    def for_workers(self, used: Sequence[int]) -> Grams | None:
        """Return a reader of these matrices that can be pickled; None if workers would not find
        their files, or there are no workers."""
        comparison = self.comparison
        if comparison.map is None:
            return None
        for k in used:
            store = comparison.representations[k].store
            if not comparison.cache.is_shared(store, comparison.map):
                return None
        return Grams(comparison.alone, self.views)

    def require_files(self, used: Sequence[int]) -> None:
        """Refuse matrices whose files this process does not find.

        Raises:
            VitseeError: names one.
        """
        for k in used:
            path = self.views[k].file.path
            if not path.exists():
                raise VitseeError(
                    f"the Gram matrix {path} is not on a worker's disk: {SHARED_CACHE_HINT}"
                )

    def name(self, k: int) -> str:
        """Return store and site of the k-th representation, in words."""
        representation = self.comparison.representations[k]
        return f"{representation.store.label} {representation.site.name}"

    def read(self, k: int, image_indices: Integers) -> SiteGram:
        """Return the Gram matrix of the k-th representation over these images, ascending.

        Raises:
            DamagedGram: its file is not what was written.
        """
        gram = self._in_memory.get(k)
        n = self.comparison.n_images
        if gram is None:
            view = self.views[k]
            gram = SiteGram(view.block(slice(0, n), slice(0, n)), view.shift)
            # All have the same size.
            n_bytes = (len(self._in_memory) + 1) * gram.shifted.nbytes
            if n_bytes <= GRAMS_SHARE * self.comparison.memory:
                self._in_memory[k] = gram
        if len(image_indices) == n:
            return gram
        return gram.take(image_indices)


@contextmanager
def grams_of(
    rows: Sequence[Representation],
    cols: Sequence[Representation] | None,
    **comparison_args: Any,
) -> Iterator[Grams]:
    """Context with the Gram matrices of `rows`, then of `cols`, read from the cache or computed.

    Args:
        rows: representations.
        cols: others, None if the rows are compared among themselves.
        **comparison_args: the other arguments of `similarity.estimate.hsic`, which has the errors,
            too.

    Raises:
        MissingInput: a store keeps only Gram matrices within slabs.
    """
    for representation in (*rows, *(cols or ())):
        if representation.has_blocks_only:
            raise MissingInput(
                f"{representation.store.label} keeps only Gram matrices within slabs of "
                f"{representation.site.name}, which serve cka alone; run: vitsee cka, or give "
                "--tokens mean, or run: vitsee extract MODEL --tokens all ..."
            )
    with comparing(rows, cols, **comparison_args) as comparison:
        yield Grams(comparison, _verified_views(comparison))


def _verified_views(comparison: Comparison) -> list[GramView]:
    """Return views of Gram matrices whose tiles all match their checksums; others are removed and
    computed again."""
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
    # One attempt per matrix: whatever is still damaged is an error when it is read.
    with full_precision(comparison.device), one_blas_thread():
        return full_grams(comparison)
