"""The protocol of measures, the Gram matrix that they are given, and the measures of common
neighbours: mutual k-NN and CKNNA (Huh et al. 2024).

A measure makes a state of each representation, once, and numbers of pairs of states. Neighbours are
by the cosine of the features, not centred, an image itself left out by its index, ties to the lower
index. Both depend on the number of images: chance of mutual k-NN is k / (n - 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.runtime.lanes import in_order, lane_pool, n_lanes, one_blas_thread
from vitsee_core.runtime.machine import plural
from vitsee_core.similarity import cosine
from vitsee_core.similarity.estimators import most_left_out
from vitsee_core.similarity.representation import Shift
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from scipy.sparse import csr_array

# Beyond this, matrices over all pairs of images use a random sample of images.
MOST_DENSE = 4096
# Relative residue of cancellation after rounding to float32.
CANCELLED = 1e-6
CONSTANT = 1e-10
AT_ONCE = 32  # pairs of representations per thread


class Measure(ABC):
    """A measure of similarity of two representations of the same n images.

    Attributes:
        name: as in tables.
        distance: a lower value is nearer.
        symmetric: both orders of a pair have one value.
        limits: least and largest value.
        most_images: beyond this a random sample is taken; None: all.
        slow: a pair takes seconds, so that intervals and calibration are limited to few pairs.
        reduces: the state without some images follows from the state of all, see `reduced`.
    """

    name: ClassVar[str]
    distance: ClassVar[bool] = False
    symmetric: ClassVar[bool] = True
    limits: ClassVar[tuple[float, float]] = (0.0, 1.0)
    most_images: ClassVar[int | None] = None
    slow: ClassVar[bool] = False
    reduces: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, gram: SiteGram, kept: tuple[int, ...] = ()) -> Any:
        """The state of one representation, whatever it is compared with; None if it has no value.
        kept: from the state of all images, for the state without some of them."""

    def kept(self, state: Any) -> tuple[int, ...]:
        """The choices, by number, that replicates without some of the images reuse from the state
        of all; none by default. Those of several states of the same images are merged."""
        return ()

    def reduced(self, state: Any, places: Integers) -> Any:
        """The state of the images at these ascending places among those of `state`, equal to
        `prepare` of their Gram matrix; None if that matrix is needed."""
        return None

    def lacking(self, gram: SiteGram) -> Mask | None:
        """A mask (n,) of images without a value in this representation; None if there are none."""
        return None

    @abstractmethod
    def permuted(self, state: Any, order: Integers) -> Any:
        """The state with image `order[i]` in place of image i."""

    @abstractmethod
    def compare(self, a: Sequence[Any], b: Sequence[Any], pairs: Integers) -> Float:
        """The measure of a[i] and b[j] for each (i, j) of pairs (pairs, 2), (pairs,)."""

    def null(
        self,
        a: Sequence[Any],
        b: Sequence[Any],
        pairs: Integers,
        orders: Sequence[Integers],
    ) -> Float:
        """The same with the images of `b` in each of these orders, (permutations, pairs)."""
        used = np.unique(pairs[:, 1])
        values = []
        with one_blas_thread():  # set once rather than for each order
            for order in orders:
                moved = list(b)
                for j in used:
                    moved[j] = self.permuted(b[j], order)
                values.append(self.compare(a, moved, pairs))
        return np.array(values)

    def remark(self, a: Sequence[Any], b: Sequence[Any], pairs: Integers) -> str | None:
        """A caveat about these values, if any."""
        return None

    @abstractmethod
    def state_bytes(self, n: int) -> int:
        """Approximate bytes of a state of n images."""


@dataclass(frozen=True)
class SiteGram:
    """The Gram matrix of one representation of n images in the forms that measures need."""

    shifted: Float32  # (n, n) inner products of features minus one common vector
    shift: Shift  # gives the inner products of the features themselves, see `Shift`

    @property
    def n(self) -> int:
        return len(self.shifted)

    def of(self, places: Integers) -> SiteGram:
        """The Gram matrix of some of the images, in this order."""
        return SiteGram(self.shifted[np.ix_(places, places)], self.shift.of(places))

    def centred(self) -> Float:
        """The matrix K = H G H (n, n), of features minus their mean over the images."""
        g = self.shifted.astype(np.float64)
        mean = g.mean(0)
        g -= mean
        g -= mean[:, np.newaxis] - mean.mean()
        return g

    def distances(self) -> Float:
        """The Euclidean distances (n, n) between the images' features."""
        g = self.shifted.astype(np.float64)
        own = np.diagonal(g).copy()
        squared = own[:, np.newaxis] + own - 2 * g
        return np.sqrt(np.maximum(squared, 0, out=squared))

    @property
    def is_constant(self) -> bool:
        """Whether all images have the same features, up to rounding."""
        g = self.shifted.astype(np.float64)
        own = np.trace(g)
        centred = own - g.sum() / self.n
        raw = own + 2 * self.shift.along.sum() + self.n * self.shift.squared
        return not centred > max(CONSTANT * raw, 0.0)

    @property
    def zero(self) -> Mask:
        """A mask (n,) of images whose features are all 0, up to rounding."""
        own = np.diagonal(self.shifted).astype(np.float64)
        g = self.shift.along
        scale = own + 2 * np.abs(g) + self.shift.squared
        return own + 2 * g + self.shift.squared <= CANCELLED * scale

    @property
    def flat(self) -> Mask:
        """A mask (n,) of images whose features are all the same, so that they correlate with
        none."""
        own = np.diagonal(self.shifted).astype(np.float64)
        raw = own + 2 * self.shift.along + self.shift.squared
        spread = raw - self.shift.n_features * self.shift.means**2
        return self.zero | (spread <= CANCELLED * raw)


def nearest(cosines: Float, k: int) -> Mask:
    """A mask (n, n) of the k < n nearest images of each row's image. The diagonal of `cosines`,
    which is overwritten, counts as none."""
    n = len(cosines)
    np.fill_diagonal(cosines, -np.inf)
    least = np.partition(cosines, n - k, axis=1)[:, n - k, np.newaxis]
    above = cosines > least
    ties = cosines == least
    left = k - above.sum(1, keepdims=True)
    return above | (ties & (np.cumsum(ties, 1) <= left))


@dataclass(frozen=True)
class NeighbourPairs:
    """Neighbours of each image."""

    n: int
    keys: Integers  # (n k,) i n + j of each neighbour j of image i, ascending
    cosines: Float  # theirs
    # (n, k and more) the nearest of each image, nearest first, which give those among fewer images;
    # None if derived or permuted
    order: NDArray[np.int32] | None = None
    order_cosines: Float | None = None


def _of_lists(n: int, i: Integers, j: Integers, cosines: Float) -> NeighbourPairs:
    """The state made of neighbours j of images i, in any order."""
    keys = i * n + j
    by = np.argsort(keys)
    return NeighbourPairs(n, keys[by], cosines[by])


@dataclass(frozen=True)
class _OfNeighbours(Measure):
    """k: neighbours of each image."""

    k: int = 10
    reduces: ClassVar[bool] = True

    def check(self, n: int) -> None:
        """Refuse as many neighbours as there are images, or more. Raises VitseeError: names
        both."""
        if not 0 < self.k < n:
            raise VitseeError(
                f"--k {self.k} neighbours of {plural(n, 'images')}; expected at most {n - 1}"
            )

    def lacking(self, gram: SiteGram) -> Mask:
        """Images whose features are all 0 have no cosine."""
        return gram.zero

    def prepare(self, gram: SiteGram, kept: tuple[int, ...] = ()) -> NeighbourPairs:
        n = gram.n
        cosines = cosine(gram.shifted, gram.shift)
        self.check(n)
        # More by the size of a jackknife block, which is left out.
        listed = min(n - 1, self.k + most_left_out(n))
        found_at = np.nonzero(nearest(cosines, listed))[1].reshape(n, listed)
        near = np.take_along_axis(cosines, found_at, 1)
        by = np.argsort(-near, axis=1, kind="stable")  # ties keep the order of indices
        rows = np.arange(n)[:, np.newaxis]
        order = found_at[rows, by]
        of_order = near[rows, by]
        i = np.repeat(np.arange(n), self.k)
        neighbours = _of_lists(
            n, i, order[:, : self.k].ravel(), of_order[:, : self.k].ravel()
        )
        return replace(neighbours, order=order.astype(np.int32), order_cosines=of_order)

    def reduced(self, state: NeighbourPairs, places: Integers) -> NeighbourPairs | None:
        """The state of fewer images: cosines do not change, and the k nearest are the first ones of
        the lists that remain. None if a list is too short."""
        if state.order is None or state.order_cosines is None:
            return None
        there = np.zeros(state.n, bool)
        there[places] = True
        order = state.order[places]
        cosines = state.order_cosines[places]
        left = there[order]
        left &= np.cumsum(left, 1) <= self.k
        if (left.sum(1) < self.k).any():
            return None
        n = len(places)
        anew = np.cumsum(there) - 1
        i = np.repeat(np.arange(n), self.k)
        return _of_lists(n, i, anew[order[left]], cosines[left])

    def permuted(self, state: NeighbourPairs, order: Integers) -> NeighbourPairs:
        place = np.empty(state.n, np.int64)
        place[order] = np.arange(state.n)
        i, j = np.divmod(state.keys, state.n)
        return _of_lists(state.n, place[i], place[j], state.cosines)

    def state_bytes(self, n: int) -> int:
        return 16 * n * self.k + 12 * n * (self.k + most_left_out(n))


@dataclass(frozen=True)
class MutualKnn(_OfNeighbours):
    """Mean over images of the share of neighbours that both representations have in common:
    1/n sum_i |N_a(i) & N_b(i)| / k (Huh et al. 2024, Eq. 11)."""

    name: ClassVar[str] = "mutual_knn"

    def compare(
        self, a: Sequence[NeighbourPairs], b: Sequence[NeighbourPairs], pairs: Integers
    ) -> Float:
        rows, i = np.unique(pairs[:, 0], return_inverse=True)
        cols, j = np.unique(pairs[:, 1], return_inverse=True)
        one = _incidence([a[r] for r in rows])
        other = _incidence([b[c] for c in cols])
        common = (one @ other.T).toarray()
        return common[i, j] / (a[rows[0]].n * self.k)


def _incidence(states: Sequence[NeighbourPairs]) -> csr_array:
    """A matrix (representations, n^2) that is 1 at the keys of each."""
    from scipy.sparse import csr_array

    keys = np.concatenate([state.keys for state in states])
    starts = np.cumsum([0, *(len(state.keys) for state in states)])
    shape = (len(states), states[0].n ** 2)
    return csr_array((np.ones(len(keys)), keys, starts), shape=shape)


@dataclass(frozen=True)
class Cknna(_OfNeighbours):
    """Centred kernel nearest-neighbour alignment: CKA of cosine kernels, kept only between common
    neighbours (Huh et al. 2024, appendix A).

    With a_ij = 1 where j is among the k nearest of i in both, and HSIC_1 in Song's three terms on
    the masked matrices, which are not symmetric, with tr(K L) = sum_ij K_ij L_ji:

        CKNNA = HSIC_1(a K, a L) / sqrt(HSIC_1(a_K K, a_K K) HSIC_1(a_L L, a_L L))

    where a_K holds the neighbours in K alone. It may pass 1 by a few thousandths, and is NaN where
    a term of a representation with itself is not positive.
    """

    name: ClassVar[str] = "cknna"
    limits: ClassVar[tuple[float, float]] = (-np.inf, 1.0)

    def compare(
        self, a: Sequence[NeighbourPairs], b: Sequence[NeighbourPairs], pairs: Integers
    ) -> Float:
        keys = np.unique(pairs[:, 0]), np.unique(pairs[:, 1])
        own_a, own_b = (
            dict(
                zip(
                    which.tolist(), _each_hsic([(x[i], x[i]) for i in which]), strict=True
                )
            )
            for x, which in zip((a, b), keys, strict=True)
        )
        values = np.full(len(pairs), np.nan)
        there = [
            at
            for at, (i, j) in enumerate(pairs.tolist())
            if own_a[i] > 0 and own_b[j] > 0
        ]
        products = np.array([own_a[i] * own_b[j] for i, j in pairs[there].tolist()])
        values[there] = _each_hsic([(a[i], b[j]) for i, j in pairs[there]]) / np.sqrt(
            products
        )
        return values


def _each_hsic(pairs: Sequence[tuple[NeighbourPairs, NeighbourPairs]]) -> list[float]:
    """HSIC_1 of two kernels that are 0 except between common neighbours, for each pair, on all
    cores."""

    def some(part: list[tuple[NeighbourPairs, NeighbourPairs]]) -> list[float]:
        return [masked_hsic(a, b) for a, b in part]

    parts = [list(pairs[at : at + AT_ONCE]) for at in range(0, len(pairs), AT_ONCE)]
    with lane_pool(n_lanes()) as pool:
        return [
            one for found in in_order(some, parts, pool, n_lanes() + 1) for one in found
        ]


def masked_hsic(a: NeighbourPairs, b: NeighbourPairs) -> float:
    """HSIC_1 of two kernels of n images that are 0 except at common neighbours."""
    n = a.n
    at = np.minimum(np.searchsorted(b.keys, a.keys), len(b.keys) - 1)
    both = b.keys[at] == a.keys
    keys = a.keys[both]
    k = a.cosines[both]
    l_ = b.cosines[at[both]]
    i, j = np.divmod(keys, n)
    through = np.bincount(j, k, n) @ np.bincount(i, l_, n)
    # sum_ij K_ij L_ji: where (j, i) is a common neighbour too.
    back = np.minimum(np.searchsorted(keys, j * n + i), max(0, len(keys) - 1))
    crossed = float((k * l_[back])[keys[back] == j * n + i].sum()) if len(keys) else 0.0
    total = crossed + k.sum() * l_.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * through
    return float(total / (n * (n - 3)))
