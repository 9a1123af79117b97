"""Define what a measure of similarity is, and the two measures of common neighbours.

A `Measure` prepares a state of each representation, once, from its Gram matrix (`SiteGram`), and
makes numbers of pairs of states. Mutual k-NN and CKNNA (Huh et al. 2024) compare nearest
neighbours: those by the cosine of the features, not centred, an image itself left out by its index,
ties to the lower index. Both depend on the number of images: unrelated features have k / (n - 1) of
their neighbours in common.
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

# Beyond this many images, measures with matrices over all pairs of images take a random sample.
MAX_DENSE_IMAGES = 4096
# float32 products that cancel leave about this much of the terms' size.
CANCELLED = 1e-6
CONSTANT = 1e-10  # share of the features' size below which their variance is rounding
PAIRS_AT_ONCE = 32  # pairs of representations per thread


class Measure(ABC):
    """A measure of similarity of two representations of the same n images.

    Attributes:
        name: as in tables.
        distance: a lower value is nearer.
        symmetric: both orders of a pair have one value.
        limits: least and largest value.
        most_images: beyond this a random sample is taken; None: all.
        slow: a pair takes seconds, so that intervals and calibration are limited to few pairs.
        can_restrict: `restrict` makes the state of some images from that of all.
    """

    name: ClassVar[str]
    distance: ClassVar[bool] = False
    symmetric: ClassVar[bool] = True
    limits: ClassVar[tuple[float, float]] = (0.0, 1.0)
    most_images: ClassVar[int | None] = None
    slow: ClassVar[bool] = False
    can_restrict: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, gram: SiteGram, choices: tuple[int, ...] = ()) -> Any:
        """Return the state of one representation, whatever it is compared with; None if it has no
        value.

        Args:
            gram: its Gram matrix over the images.
            choices: those of the state of all images, for the state of a replicate.
        """

    def choices(self, state: Any) -> tuple[int, ...]:
        """Return the numbers of what was chosen when `state` was compared, which replicates without
        some of the images reuse. None by default; those of several states of one representation
        are merged."""
        return ()

    def restrict(self, state: Any, image_indices: Integers) -> Any:
        """Return the state of some of the images, equal to `prepare` of their Gram matrix; None if
        that matrix is needed.

        image_indices: ascending, among the images of `state`.
        """
        return None

    def images_without_value(self, gram: SiteGram) -> Mask | None:
        """Return a mask (n,) of images that this measure cannot compare; None if it compares any
        image."""
        return None

    @abstractmethod
    def permute(self, state: Any, order: Integers) -> Any:
        """Return the state with image `order[i]` in place of image i."""

    @abstractmethod
    def compare(self, a: Sequence[Any], b: Sequence[Any], pairs: Integers) -> Float:
        """Return the measure of a[i] and b[j] for each (i, j) of pairs (pairs, 2), (pairs,)."""

    def null(
        self,
        a: Sequence[Any],
        b: Sequence[Any],
        pairs: Integers,
        orders: Sequence[Integers],
    ) -> Float:
        """Return `compare` with b's images in each of these orders, (permutations, pairs)."""
        used = np.unique(pairs[:, 1])
        values = []
        with one_blas_thread():  # set once rather than for each order
            for order in orders:
                permuted = list(b)
                for j in used:
                    permuted[j] = self.permute(b[j], order)
                values.append(self.compare(a, permuted, pairs))
        return np.array(values)

    def remark(self, a: Sequence[Any], b: Sequence[Any], pairs: Integers) -> str | None:
        """Return a caveat about the values of these pairs, in words, if there is any."""
        return None

    @abstractmethod
    def state_bytes(self, n: int) -> int:
        """Return the approximate bytes of a state of n images."""


@dataclass(frozen=True)
class SiteGram:
    """The Gram matrix of one representation of n images in the forms that measures need."""

    shifted: Float32  # (n, n) inner products of features minus one common vector
    shift: Shift  # gives the inner products of the features before that

    @property
    def n(self) -> int:
        """Number of images."""
        return len(self.shifted)

    def take(self, image_indices: Integers) -> SiteGram:
        """Return the Gram matrix of some of the images, in this order."""
        entries = self.shifted[np.ix_(image_indices, image_indices)]
        return SiteGram(entries, self.shift.of(image_indices))

    def centred(self) -> Float:
        """Return K = H G H (n, n), the matrix of features minus their mean over the images."""
        g = self.shifted.astype(np.float64)
        mean = g.mean(0)
        g -= mean
        g -= mean[:, np.newaxis] - mean.mean()
        return g

    def distances(self) -> Float:
        """Return the Euclidean distances (n, n) between the images' features."""
        g = self.shifted.astype(np.float64)
        norms = np.diagonal(g).copy()  # (n,) squared
        # |x_i - x_j|^2 = G_ii + G_jj - 2 G_ij, which no shift changes.
        squared = norms[:, np.newaxis] + norms - 2 * g
        return np.sqrt(np.maximum(squared, 0, out=squared))

    @property
    def is_constant(self) -> bool:
        """Whether all images have the same features, up to rounding."""
        g = self.shifted.astype(np.float64)
        trace = np.trace(g)
        centred = trace - g.sum() / self.n  # tr K, sum of |x_i - mean|^2
        raw = (
            trace + 2 * self.shift.along.sum() + self.n * self.shift.squared
        )  # of |x_i|^2
        return not centred > max(CONSTANT * raw, 0.0)

    @property
    def is_zero(self) -> Mask:
        """A mask (n,) of images whose features are all 0, up to rounding."""
        norms = np.diagonal(self.shifted).astype(np.float64)
        g = self.shift.along
        # |x|^2 = |x - c|^2 + 2 (x - c) . c + |c|^2, whose terms cancel where x is 0.
        terms = norms + 2 * np.abs(g) + self.shift.squared
        return norms + 2 * g + self.shift.squared <= CANCELLED * terms

    @property
    def is_flat(self) -> Mask:
        """A mask (n,) of images whose features are all the same number, so that no correlation with
        them is defined."""
        norms = np.diagonal(self.shifted).astype(np.float64)
        raw = norms + 2 * self.shift.along + self.shift.squared
        # D times the variance over the D features.
        spread = raw - self.shift.n_features * self.shift.means**2
        return self.is_zero | (spread <= CANCELLED * raw)


def nearest(cosines: Float, k: int) -> Mask:
    """Return a mask (n, n) of the k < n images nearest to each row's image.

    cosines: (n, n); its diagonal is overwritten, as no image is its own neighbour.
    """
    n = len(cosines)
    np.fill_diagonal(cosines, -np.inf)
    # The k-th largest of each row: all above it are taken, of those equal to it the first ones.
    kth = np.partition(cosines, n - k, axis=1)[:, n - k, np.newaxis]
    above = cosines > kth
    ties = cosines == kth
    n_ties_taken = k - above.sum(1, keepdims=True)
    return above | (ties & (np.cumsum(ties, 1) <= n_ties_taken))


@dataclass(frozen=True)
class NeighbourPairs:
    """The k nearest neighbours of each of n images.

    Attributes:
        n: number of images.
        keys: (n k,) i n + j of each neighbour j of image i, ascending.
        cosines: (n k,) of image and neighbour.
        order: (n, k and more) the nearest of each image, nearest first, which give the neighbours
            among fewer images; None if the state was restricted or permuted.
        order_cosines: theirs, of the same shape.
    """

    n: int
    keys: Integers
    cosines: Float
    order: NDArray[np.int32] | None = None
    order_cosines: Float | None = None


def _pairs_from_lists(n: int, i: Integers, j: Integers, cosines: Float) -> NeighbourPairs:
    """Return the state of n images made of neighbours j of images i, in any order."""
    keys = i * n + j
    order = np.argsort(keys)
    return NeighbourPairs(n, keys[order], cosines[order])


@dataclass(frozen=True)
class _NeighbourMeasure(Measure):
    """A measure of the k nearest neighbours of each image."""

    k: int = 10
    can_restrict: ClassVar[bool] = True

    def check(self, n: int) -> None:
        """Refuse as many neighbours as there are images, or more.

        Raises:
            VitseeError: names both numbers.
        """
        if not 0 < self.k < n:
            raise VitseeError(
                f"--k {self.k} neighbours of {plural(n, 'images')}; expected at most {n - 1}"
            )

    def images_without_value(self, gram: SiteGram) -> Mask:
        """Return the images whose features are all 0, as they have no cosine."""
        return gram.is_zero

    def prepare(self, gram: SiteGram, choices: tuple[int, ...] = ()) -> NeighbourPairs:
        """Return each image's k nearest, and lists that are longer by a jackknife block."""
        n = gram.n
        cosines = cosine(gram.shifted, gram.shift)
        self.check(n)
        # A block of images is left out at a time: so many more are enough for the k nearest left.
        n_listed = min(n - 1, self.k + most_left_out(n))
        columns = np.nonzero(nearest(cosines, n_listed))[1].reshape(n, n_listed)
        near = np.take_along_axis(cosines, columns, 1)
        by_cosine = np.argsort(
            -near, axis=1, kind="stable"
        )  # ties keep the order of indices
        order = np.take_along_axis(columns, by_cosine, 1)
        order_cosines = np.take_along_axis(near, by_cosine, 1)
        neighbours = _pairs_from_lists(
            n,
            i=np.repeat(np.arange(n), self.k),
            j=order[:, : self.k].ravel(),
            cosines=order_cosines[:, : self.k].ravel(),
        )
        return replace(
            neighbours, order=order.astype(np.int32), order_cosines=order_cosines
        )

    def restrict(
        self, state: NeighbourPairs, image_indices: Integers
    ) -> NeighbourPairs | None:
        """Return the state of fewer images; None if an image's list is too short.

        Cosines do not change, and the k nearest are the first ones of each list that remain.
        """
        if state.order is None or state.order_cosines is None:
            return None
        remains = np.zeros(state.n, bool)
        remains[image_indices] = True
        order = state.order[image_indices]
        cosines = state.order_cosines[image_indices]
        is_neighbour = remains[order]
        is_neighbour &= np.cumsum(is_neighbour, 1) <= self.k
        if (is_neighbour.sum(1) < self.k).any():
            return None
        n = len(image_indices)
        new_index = np.cumsum(remains) - 1  # (images of `state`,)
        return _pairs_from_lists(
            n,
            i=np.repeat(np.arange(n), self.k),
            j=new_index[order[is_neighbour]],
            cosines=cosines[is_neighbour],
        )

    def permute(self, state: NeighbourPairs, order: Integers) -> NeighbourPairs:
        """Return the neighbours with both images of each pair renumbered."""
        new_index = np.empty(state.n, np.int64)
        new_index[order] = np.arange(state.n)
        i, j = np.divmod(state.keys, state.n)
        return _pairs_from_lists(state.n, new_index[i], new_index[j], state.cosines)

    def state_bytes(self, n: int) -> int:
        """Return the bytes of keys and cosines (8 each), and of lists (4) and their cosines (8)."""
        return 16 * n * self.k + 12 * n * (self.k + most_left_out(n))


@dataclass(frozen=True)
class MutualKnn(_NeighbourMeasure):
    """Mean over images of the share of neighbours that both representations have in common.

    1/n sum_i |N_a(i) & N_b(i)| / k (Huh et al. 2024, Eq. 11).
    """

    name: ClassVar[str] = "mutual_knn"

    def compare(
        self, a: Sequence[NeighbourPairs], b: Sequence[NeighbourPairs], pairs: Integers
    ) -> Float:
        """Return the shares (pairs,); all pairs are one sparse product."""
        rows, i = np.unique(pairs[:, 0], return_inverse=True)
        cols, j = np.unique(pairs[:, 1], return_inverse=True)
        left = _incidence([a[row] for row in rows])
        right = _incidence([b[col] for col in cols])
        n_common = (left @ right.T).toarray()  # (rows, cols), over all images
        return n_common[i, j] / (a[rows[0]].n * self.k)


def _incidence(states: Sequence[NeighbourPairs]) -> csr_array:
    """Return a matrix (representations, n^2) that is 1 at the keys of each."""
    from scipy.sparse import csr_array

    keys = np.concatenate([state.keys for state in states])
    starts = np.cumsum([0, *(len(state.keys) for state in states)])
    shape = (len(states), states[0].n ** 2)
    return csr_array((np.ones(len(keys)), keys, starts), shape=shape)


@dataclass(frozen=True)
class Cknna(_NeighbourMeasure):
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
        """Return CKNNA (pairs,), NaN where it is not defined."""
        self_a = _self_hsic(a, pairs[:, 0])
        self_b = _self_hsic(b, pairs[:, 1])
        values = np.full(len(pairs), np.nan)
        defined = []
        for index, (i, j) in enumerate(pairs.tolist()):
            if self_a[i] > 0 and self_b[j] > 0:
                defined.append(index)
        cross = np.array(_hsic_of_pairs([(a[i], b[j]) for i, j in pairs[defined]]))
        norms = np.array([self_a[i] * self_b[j] for i, j in pairs[defined].tolist()])
        values[defined] = cross / np.sqrt(norms)
        return values


def _self_hsic(states: Sequence[NeighbourPairs], used: Integers) -> dict[int, float]:
    """Return the HSIC_1 of each used representation with itself, by its index."""
    indices = np.unique(used).tolist()
    values = _hsic_of_pairs([(states[index], states[index]) for index in indices])
    return dict(zip(indices, values, strict=True))


def _hsic_of_pairs(
    pairs: Sequence[tuple[NeighbourPairs, NeighbourPairs]],
) -> list[float]:
    """Return `masked_hsic` of each pair, computed on all cores."""

    def work(batch: Sequence[tuple[NeighbourPairs, NeighbourPairs]]) -> list[float]:
        """Return the values of a batch: one pair is too little for a thread."""
        return [masked_hsic(a, b) for a, b in batch]

    starts = range(0, len(pairs), PAIRS_AT_ONCE)
    batches = [pairs[start : start + PAIRS_AT_ONCE] for start in starts]
    values: list[float] = []
    with lane_pool(n_lanes()) as pool:
        for batch_values in in_order(work, batches, pool, n_lanes() + 1):
            values += batch_values
    return values


def masked_hsic(a: NeighbourPairs, b: NeighbourPairs) -> float:
    """Return HSIC_1 of two kernels of n images that are 0 except at common neighbours.

    HSIC_1 n (n - 3) = tr(K L) + 1^T K 1 1^T L 1 / ((n - 1)(n - 2)) - 2 / (n - 2) 1^T K L 1
    (Song et al. 2012).
    """
    n = a.n
    # Where a's keys are, or would be, among b's.
    position = np.minimum(np.searchsorted(b.keys, a.keys), len(b.keys) - 1)
    is_common = b.keys[position] == a.keys
    keys = a.keys[is_common]
    k = a.cosines[is_common]  # (common neighbours,) the entries of K
    l_ = b.cosines[position[is_common]]
    i, j = np.divmod(keys, n)
    # 1^T K L 1: column sums of K times row sums of L.
    through = np.bincount(j, k, n) @ np.bincount(i, l_, n)
    # tr(K L) = sum_ij K_ij L_ji: where (j, i) is a common neighbour too.
    crossed = 0.0
    if len(keys):
        mirrored = j * n + i
        back = np.minimum(np.searchsorted(keys, mirrored), len(keys) - 1)
        crossed = float((k * l_[back])[keys[back] == mirrored].sum())
    total = crossed + k.sum() * l_.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * through
    return float(total / (n * (n - 3)))
