"""Symmetric matrices brought to three diagonals, and (M + l2 I)^-1 of such at several l2.

S = Q M Q^T is the first step of an eigendecomposition, the smaller part of its cost, and then each
l2 costs as little: M + l2 I = L D L^T has two diagonals. Eigenvalues are the case without the outer
ones. (G. H. Golub, C. F. Van Loan, Matrix Computations, 4th ed., 8.3.1 and 4.3.6.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vitsee_core.compiled import compiled
from vitsee_core.scipy_routines import routine
from vitsee_core.types import Float

ROUNDING = 2.0**-50  # of an element, as a share of the largest row: with room
BLOCK = 64  # columns that LAPACK takes at a time
TOGETHER = 8  # images whose chains of operations run side by side
WEIGHT_BYTES = 1 << 22  # of weights that are made at a time, so few that they stay in cache


def three_diagonals(square: Float) -> tuple[Float, Float, Float] | None:
    """Q (r, r), the diagonal (r,) and what lies beside it (r - 1,) of a symmetric matrix, which is
    overwritten; None where scipy does not offer the routines."""
    reduce = routine("lapack", "dsytrd", "cididdddii")
    expand = routine("lapack", "dorgtr", "cididdii")
    if reduce is None or expand is None:
        return None
    r = len(square)
    diagonal = np.zeros(r)
    beside, tau = none_beside(diagonal), none_beside(diagonal)
    work, failed = np.empty(BLOCK * max(1, r)), np.zeros((), np.intc)
    of = b"L", r, square, max(1, r)
    reduce(*of, diagonal, beside, tau, work, len(work), failed)
    expand(*of, tau, work, len(work), failed)
    assert not failed  # only arguments that do not fit make it fail
    return square.T, diagonal, beside


def decomposed(square: Float, least: float) -> tuple[Float, Float, Float]:
    """Q (r, r) and the diagonals (r,), (r - 1,) of M, where Q M Q^T is a matrix that is positive
    semidefinite but for rounding; it is overwritten.

    M has three diagonals where that rounding is little beside `least`, which is added to its
    diagonal: no eigenvalue is below -`least` / 2. Else it has eigenvalues, 0 for those below, and
    zeros beside them.
    """
    r, size = len(square), np.abs(square).sum(axis=0).max(initial=0)
    basis = None
    if r * ROUNDING * size < least and (found := three_diagonals(square)) is not None:
        basis, diagonal, beside = found
        # As many of D are negative as eigenvalues of L D L^T (Sylvester's law of inertia). What the
        # matrix was made of may have been much larger than it is.
        if is_definite(diagonal, beside, least / 2):
            return found
        square = np.diag(diagonal) + np.diag(beside, -1)  # of which the lower triangle is read
    values, vectors = np.linalg.eigh(square)
    vectors = vectors if basis is None else basis @ vectors
    return vectors, np.maximum(values, 0), none_beside(values)


def is_definite(diagonal: Float, beside: Float, more: float) -> bool:
    """Whether M + more I is positive definite, M with these diagonals."""
    inverses, below = np.empty((1, len(diagonal))), np.empty((1, len(beside)))
    factor(diagonal, beside, np.array([more]), inverses, below)
    return bool(((inverses > 0) & (inverses < np.inf)).all())


def none_beside(diagonal: Float) -> Float:
    """(r - 1,) zeros, as are beside a diagonal (r,) of eigenvalues."""
    return np.zeros(max(0, len(diagonal) - 1))


@dataclass(frozen=True)
class Resolvents:
    """(M + l2 I)^-1 at several l2, and B B^T = M + l2 I at the smallest.

    In coordinates B^-1 z all directions have about the same length; the weights of such are B^T
    times those of z.

    inverses: (l2s, r) of D. below: (l2s, r - 1) the diagonal below L's. least: of the l2s.
    """

    inverses: Float
    below: Float
    least: int

    @classmethod
    def of(cls, diagonal: Float, beside: Float, l2s: Sequence[float]) -> Resolvents:
        """Of M with these diagonals, (r,) and (r - 1,).

        Raises:
            ValueError: it is not positive definite with every l2.
        """
        inverses, below = np.empty((len(l2s), len(diagonal))), np.empty((len(l2s), len(beside)))
        factor(diagonal, beside, np.array(l2s, np.float64), inverses, below)
        if not (inverses > 0).all():
            raise ValueError("a matrix of sums of squares has to be positive definite")
        return cls(inverses, below, int(np.argmin(l2s)))

    def __len__(self) -> int:
        """Number of l2s."""
        return len(self.inverses)

    @property
    def roots(self) -> Float:
        """(r,) B's diagonal."""
        found: Float = 1 / np.sqrt(self.inverses[self.least])
        return found

    def evened(self, z: Float) -> Float:
        """B^-1 z of coordinates (m, r)."""
        roots, out = self.roots, np.empty_like(z)
        share = self.below[self.least] * roots[:-1] / roots[1:]
        divide_by_root(z, 1 / roots, share, out)
        return out

    def resolved(self, rhs: Float) -> Float:
        """(l2s, r, c) (M + l2 I)^-1 of right-hand sides (r, c)."""
        out = np.empty((len(self), *rhs.shape))
        resolve(self.inverses, self.below, rhs, out)
        return out

    def weights(self, rhs: Float, of: slice = slice(None)) -> Float:
        """(l2s, r, c) B^T (M + l2 I)^-1 of right-hand sides (r, c), at some of the l2."""
        out = np.empty((len(self.inverses[of]), *rhs.shape))
        return self._weights(rhs, of, out)

    def by_class(self, rhs: Float) -> Iterator[tuple[slice, Float]]:
        """All `weights`, of some columns of the right-hand sides at a time; in memory that is
        taken again for the next of them."""
        n = rhs.shape[1]
        n_blocks = max(1, min(n, -(-8 * n * self.inverses.size // WEIGHT_BYTES)))
        memory = np.empty(self.inverses.size * -(-n // n_blocks))
        for block in range(n_blocks):
            some = slice(n * block // n_blocks, n * (block + 1) // n_blocks)
            own = np.ascontiguousarray(rhs[:, some])
            size = self.inverses.size * own.shape[1]
            out = memory[:size].reshape(*self.inverses.shape, own.shape[1])
            yield some, self._weights(own, slice(None), out)

    def _weights(self, rhs: Float, of: slice, out: Float) -> Float:
        resolve(self.inverses[of], self.below[of], rhs, out)
        multiply_by_root(self.roots, self.below[self.least], out)
        return out


@compiled
def factor(diagonal: Float, beside: Float, l2s: Float, inverses: Float, below: Float) -> None:
    """M + l2 I = L D L^T, see `Resolvents`."""
    for at in range(len(l2s)):
        pivot = 0.0
        for k in range(len(diagonal)):
            less = below[at, k - 1] * beside[k - 1] if k > 0 else 0.0
            pivot = diagonal[k] + l2s[at] - less
            inverses[at, k] = 1 / pivot
            if k < len(beside):
                below[at, k] = beside[k] / pivot


@compiled
def resolve(inverses: Float, below: Float, rhs: Float, out: Float) -> None:
    """(M + l2 I)^-1 of the right-hand sides (r, c), (l2s, r, c)."""
    r, c = rhs.shape
    for at in range(len(inverses)):
        for k in range(r):
            to, of = out[at, k], rhs[k]
            if k == 0:
                for j in range(c):
                    to[j] = of[j]
            else:
                share, before = below[at, k - 1], out[at, k - 1]
                for j in range(c):
                    to[j] = of[j] - share * before[j]
        for k in range(r - 1, -1, -1):
            to, inverse = out[at, k], inverses[at, k]
            if k == r - 1:
                for j in range(c):
                    to[j] *= inverse
            else:
                share, after = below[at, k], out[at, k + 1]
                for j in range(c):
                    to[j] = to[j] * inverse - share * after[j]


@compiled
def resolve_one(inverses: Float, below: Float, z: Float, out: Float) -> None:
    """(M + l2 I)^-1 z at one l2, (r,): `resolve` of one column, which is slower with a loop over
    columns in its innermost place."""
    r = len(z)
    for k in range(r):
        out[k] = z[k] - below[k - 1] * out[k - 1] if k > 0 else z[k]
    for k in range(r - 1, -1, -1):
        out[k] *= inverses[k]
        if k < r - 1:
            out[k] -= below[k] * out[k + 1]


@compiled
def multiply_by_root(roots: Float, below: Float, weights: Float) -> None:
    """B^T of weights (l2s, r, c), in place."""
    n, r, c = weights.shape
    for at in range(n):
        for k in range(r):
            to, root = weights[at, k], roots[k]
            if k == r - 1:
                for j in range(c):
                    to[j] *= root
            else:
                share, after = below[k], weights[at, k + 1]
                for j in range(c):
                    to[j] = root * (to[j] + share * after[j])


@compiled
def divide_by_root(z: Float, inverses: Float, share: Float, out: Float) -> None:
    """B^-1 of coordinates (m, r): multiplied by `inverses`, less `share` of the one before."""
    m, r = z.shape
    for first in range(0, m, TOGETHER):
        n = min(TOGETHER, m - first)
        for k in range(r):
            inverse = inverses[k]
            if k == 0:
                for i in range(first, first + n):
                    out[i, k] = z[i, k] * inverse
            else:
                less = share[k - 1]
                for i in range(first, first + n):
                    out[i, k] = z[i, k] * inverse - less * out[i, k - 1]
