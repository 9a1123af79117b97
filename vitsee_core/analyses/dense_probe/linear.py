"""Linear probes of patches: least squares at the resolution of pixels, from one pass over tokens,
and multinomial logistic regression of patches in memory.

Least squares:

    min over W, b of  1/n |M (U Z W + b - Y)|^2 + l2 v |W|^2

over the n pixels that count of all images: U interpolates tokens bilinearly, Y is 1 for a pixel's
class and 0 for the others, or its depth; v is the mean variance of a feature over pixels, so that
l2, the analysis's `l2_relative`, has no unit: l2 n v is scikit-learn's alpha. The intercept b is
not penalised. With tokens about a fixed `shift`, the sums of `pixels.CellSums` make

    A = Z'SZ - n m m',  B = Z'T - m (sum Y)',  m = Z'S1 / n,   W = (A + l2 n v I)^-1 B

and one eigendecomposition of A serves every l2. l2 is chosen by the squared error of held-out
training images, which follows from their own sums: no second pass. Everything is in float64.

With balanced classes a pixel of class c has the weight n / (C n_c) in M, of the n_c training pixels
of each of C classes, so that all classes weigh alike.

Logistic regression of patches on their shares of classes:

    min over W, b of  sum_p w_p CE(P_p, softmax(W' z_p + b)) / sum_p w_p + l2 / 2 |W|^2

with P_p the shares of classes among the pixels of patch p that have one, and w_p how many these
are: the cross-entropy of every pixel, were each given the scores of its patch. Features z are
scaled to mean 0 and standard deviation 1 over the training patches. By L-BFGS, each l2 from the
weights of the next larger one; l2 is chosen by the cross-entropy of held-out images. It is the
analysis's `l2_relative` (the mean variance of a feature is 1 here): 1 / (l2 n) is scikit-learn's C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.analyses.dense_probe.pixels import (
    CellSums,
    Head,
    LinearScores,
    Places,
    count_places,
)
from vitsee_core.analyses.dense_probe.solvers import RIDGE_GRID, Solver
from vitsee_core.analyses.dense_probe.work import (
    CHOOSING,
    HeadKey,
    SplitImages,
    Sums,
    Trained,
    blind_heads,
    counted_rows,
    draw_images,
)
from vitsee_core.truth.masks.png_maps import IGNORED
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Slab

TOLERANCE = 1e-9
ITERATIONS = 1000


@dataclass
class PixelSums:
    """Sums over pixels, weighted, of features z about a shift and of targets y.

    Attributes:
        n: sum of the weights.
        totals: (targets,) sum of y.
        squares: sum of |y|^2.
        first: (dim,) sum of z.
        second: (dim, dim) sum of zz'.
        crossed: (targets, dim) sum of yz', with z as interpolated to pixels.
    """

    n: float
    totals: Float
    squares: float
    first: Float
    second: Float
    crossed: Float

    @classmethod
    def empty(cls, dim: int, n_targets: int = IGNORED) -> PixelSums:
        return cls(
            0.0,
            np.zeros(n_targets),
            0.0,
            np.zeros(dim),
            np.zeros((dim, dim)),
            np.zeros((n_targets, dim)),
        )

    def count(self, tokens: Float, sums: CellSums) -> None:
        """Add an image with tokens (rows, cols, dim) minus the shift."""
        flat = tokens.reshape(-1, tokens.shape[-1])
        self.n += sums.n
        self.totals[sums.present] += sums.totals
        self.squares += sums.squares
        self.first += sums.weights.ravel() @ flat
        self.second += flat.T @ sums.smoothed(tokens).reshape(flat.shape)
        self.crossed[sums.present] += sums.targets.reshape(-1, len(flat)) @ flat

    def __add__(self, other: PixelSums) -> PixelSums:
        both = zip(vars(self).values(), vars(other).values(), strict=True)
        return PixelSums(*(ours + theirs for ours, theirs in both))


@dataclass(frozen=True)
class Training:
    """The images that are summed.

    Attributes:
        shifts: site -> (dim,) what is subtracted from its tokens.
        held_out: (images,) which of the store's rows choose l2.
        class_weights: see `CellSums.of`.
    """

    part: SplitImages
    shifts: Mapping[str, Float]
    held_out: Mask
    class_weights: Float | None = None


@dataclass
class TrainingSums(Sums[Training]):
    """Sums over the pixels of the training images: of (site, whether images are held out), and, for
    the baselines, of each grid per cell."""

    sums: dict[tuple[str, bool], PixelSums] = field(default_factory=dict)
    places: Places = field(default_factory=dict)

    def update(self, slab: Slab) -> None:
        """Add the images of a slab."""
        assert self.work is not None
        work = self.work
        part = self.work.part
        rows = counted_rows(slab)
        n_targets = part.task.n_targets
        by_image = [
            {
                grid: CellSums.of(own, work.class_weights)
                for grid, own in part.truth.pixels(row).items()
            }
            for row in rows
        ]
        for of_grid in by_image:
            for grid, sums in of_grid.items():
                count_places(self.places, grid, sums, n_targets)
        for site, features in part.features.items():
            tokens = features.of_slab(slab)
            for row, x, of_grid in zip(rows, tokens, by_image, strict=True):
                key = site, bool(work.held_out[row])
                if key not in self.sums:
                    self.sums[key] = PixelSums.empty(features.dim, n_targets)
                z = (x.astype(np.float64) - work.shifts[site]).reshape(*features.grid, -1)
                self.sums[key].count(z, of_grid[part.grids[site]])

    def parts(self, site: str, dim: int, n_targets: int) -> tuple[PixelSums, PixelSums]:
        """The sums of the images that fit, and of those held out."""
        empty = PixelSums.empty(dim, n_targets)
        return self.sums.get((site, False), empty), self.sums.get((site, True), empty)


@dataclass(frozen=True)
class Solutions:
    """The decomposition that gives the weights at every l2.

    Attributes:
        classes: the targets that occur.
        basis: (dim, dim) eigenvectors of A.
        values: (dim,) eigenvalues of A over n v.
        rhs: (dim, classes) B over n v in the eigenvectors' coordinates.
        mean: (dim,) mean of the features minus the shift.
        levels: (classes,) means of the targets.
    """

    classes: Integers
    basis: Float
    values: Float
    rhs: Float
    mean: Float
    levels: Float

    @classmethod
    def of(cls, sums: PixelSums) -> Solutions:
        """Solve for the sums of some images."""
        n = sums.n
        classes = np.flatnonzero(sums.totals)
        mean = sums.first / n
        scatter = sums.second - n * np.outer(mean, mean)
        scatter = (scatter + scatter.T) / 2
        crossed = sums.crossed[classes] - sums.totals[classes, None] * mean
        # n times the mean variance; features that are all equal have none, and get no weight.
        scale = float(np.trace(scatter)) / len(mean) or 1.0
        values, basis = np.linalg.eigh(scatter / scale)
        rhs = basis.T @ crossed.T / scale
        return cls(
            classes, basis, np.maximum(values, 0), rhs, mean, sums.totals[classes] / n
        )

    def scores(self, l2: float, shift: Float) -> LinearScores:
        """The scores of `classes` at one l2, as a linear function of stored features."""
        weights = self.basis @ self._rotated(l2)
        return LinearScores(weights, self.levels - (self.mean + shift) @ weights)

    def squared_errors(self, l2s: Sequence[float], held_out: PixelSums) -> list[float]:
        """The squared error per held-out pixel at each l2. Classes without training pixels have the
        score 0."""
        n = held_out.n
        turned = self.basis.T @ held_out.second @ self.basis
        first = self.basis.T @ held_out.first
        own = held_out.totals[self.classes]
        crossed = self.basis.T @ held_out.crossed[self.classes].T
        origin = self.basis.T @ self.mean
        found = []
        for l2 in l2s:
            weights = self._rotated(l2)
            bias = self.levels - origin @ weights
            # The sum of |W'z + b - y|^2, multiplied out.
            products = float(np.einsum("rc,rc->", weights, turned @ weights))
            levels = 2 * float(bias @ (first @ weights)) + n * float(bias @ bias)
            agreed = float(np.einsum("rc,rc->", weights, crossed)) + float(bias @ own)
            found.append((products + levels - 2 * agreed + held_out.squares) / n)
        return found

    def _rotated(self, l2: float) -> Float:
        return self.rhs / (self.values + l2)[:, None]


def train_ridge(part: SplitImages, solver: Solver, execution: Execution) -> Trained:
    """Train the probes of every site, and the baselines of every grid.

    Raises:
        VitseeError: no pixel counts, or there are too few images to choose l2.
    """
    held_out = np.zeros(part.store.n_images, bool)
    if not solver.l2s:
        held_out = draw_images(part.store, part.truth.mask, CHOOSING, (execution.seed, 3))
    weights = None
    if solver.balanced:
        weights = balanced_weights(count_truth(part, execution))
    sums = _fold_training(part, held_out, weights, execution)
    shifts = _shifts(part)
    task = part.task
    heads: dict[HeadKey, Head] = {}
    chosen = {}
    notes = dict[str, object]()
    for site, features in part.features.items():
        fitted, held = sums.parts(site, features.dim, task.n_targets)
        whole = fitted + held
        if not whole.n:
            raise part.no_pixel("training")
        values = list(solver.l2s) or [_chosen(fitted, held, site)]
        solutions = Solutions.of(whole)
        for l2 in values:
            scores = solutions.scores(l2, shifts[site])
            heads[HeadKey(site, l2)] = task.head(solutions.classes, scores)
        chosen[site] = values
        notes["training_pixels"] = round(whole.n)
        notes["n_trained"] = len(solutions.classes)
    notes["l2_relative"] = chosen
    if not solver.l2s:
        notes["held_out_images"] = int(held_out.sum())
    return Trained(heads | blind_heads(task, sums.places), notes)


def count_truth(part: SplitImages, execution: Execution) -> Places:
    """Count the training pixels, without reading tokens.

    Raises:
        VitseeError: none counts.
    """
    found = _fold_training(
        replace(part, features={}), np.zeros(0, bool), None, execution
    ).places
    if not any(own.weights.any() for own in found.values()):
        raise part.no_pixel("training")
    return found


def balanced_weights(places: Places) -> Float:
    """The weight of a pixel of each class, (256,): n / (C n_c); those of all pixels add up to n."""
    totals = next(iter(places.values())).totals
    there = totals > 0
    found = np.zeros(IGNORED + 1)
    found[:IGNORED][there] = totals.sum() / (there.sum() * totals[there])
    return found


def _chosen(fitted: PixelSums, held: PixelSums, site: str) -> float:
    """The l2 with the least squared error per held-out pixel, the largest of several."""
    if not fitted.n or not held.n:
        raise VitseeError(
            f"{site}: l2 cannot be chosen, as the training images that fit have {fitted.n:.0f} "
            f"pixels that count and those held out {held.n:.0f}; give it with --l2-relative, or "
            "more images"
        )
    errors = Solutions.of(fitted).squared_errors(RIDGE_GRID, held)
    return min(
        zip(errors, RIDGE_GRID, strict=True), key=lambda pair: (pair[0], -pair[1])
    )[1]


def _shifts(part: SplitImages) -> dict[str, Float]:
    """A token of each site; sums of features minus it lose no digits."""
    first = int(np.flatnonzero(part.truth.mask)[0])
    tokens = {
        site: own.load(first)[0].astype(np.float64) for site, own in part.features.items()
    }
    return {
        site: np.where(np.isfinite(token), token, 0.0) for site, token in tokens.items()
    }


def _fold_training(
    part: SplitImages, held_out: Mask, weights: Float | None, execution: Execution
) -> TrainingSums:
    make = partial(TrainingSums, Training(part, _shifts(part), held_out, weights))
    dims = [own.dim for own in part.features.values()]
    sums = sum(8 * 2 * dim * (dim + part.task.n_targets) for dim in dims)
    return part.fold(make, execution, part.slab_bytes + sums)


@dataclass(frozen=True)
class Scaling:
    """The numbers (dim,) that are subtracted from features, and the factors that follow."""

    mean: Float
    factor: Float

    @classmethod
    def none(cls, dim: int) -> Scaling:
        """The scaling that leaves features as they are."""
        return cls(np.zeros(dim), np.ones(dim))

    @classmethod
    def of(cls, tokens: Float32) -> Scaling:
        """The scaling to mean 0 and standard deviation 1 over tokens (n, dim); constant
        features become 0."""
        mean = tokens.mean(0, dtype=np.float64)
        std = tokens.std(0, dtype=np.float64)
        return cls(mean, np.divide(1, std, out=np.zeros_like(std), where=std > 0))

    def __call__(self, tokens: Float | Float32) -> Float:
        return (tokens - self.mean) * self.factor


@dataclass(frozen=True)
class Targets:
    """Patches to fit: scaled features (n, dim), shares (n, classes) of each patch's pixels, which
    add up to 1, and weights (n,) of the patches, which add up to 1."""

    z: Float
    shares: Float
    weights: Float

    @classmethod
    def of(cls, z: Float, counts: Float) -> Targets:
        """The targets from the number of pixels of each class in each patch, (n, classes); patches
        without any are left out."""
        n = counts.sum(1)
        kept = n > 0
        return cls(z[kept], counts[kept] / n[kept, None], n[kept] / max(n.sum(), 1))


def fit(targets: Targets, l2s: Sequence[float]) -> dict[float, Float]:
    """The weights at each l2, (dim + 1, classes) with the intercept last."""
    from scipy.optimize import minimize

    shape = targets.z.shape[1] + 1, targets.shares.shape[1]
    start = np.zeros(shape)
    found = {}
    for l2 in sorted(l2s, reverse=True):
        result = minimize(
            _loss,
            start.ravel(),
            (targets, l2),
            "L-BFGS-B",
            jac=True,
            options={"maxiter": ITERATIONS, "ftol": 0, "gtol": TOLERANCE, "maxls": 50},
        )
        start = result.x.reshape(shape)
        found[l2] = start
    return found


def cross_entropy(targets: Targets, weights: Float) -> float:
    """The mean cross-entropy per pixel, without the penalty."""
    logs, _ = _log_softmax(targets.z @ weights[:-1] + weights[-1])
    return -float(np.einsum("n,nc,nc->", targets.weights, targets.shares, logs))


def choose_l2(fitted: Targets, held_out: Targets, l2s: Sequence[float]) -> float:
    """The l2 with the least cross-entropy on held-out pixels, the largest of several."""
    found = fit(fitted, l2s)
    return min(l2s, key=lambda l2: (cross_entropy(held_out, found[l2]), -l2))


def linear_scores(weights: Float, scaling: Scaling) -> LinearScores:
    """The scores of classes as a linear function of features as they are stored."""
    own = weights[:-1] * scaling.factor[:, None]
    return LinearScores(own, weights[-1] - scaling.mean @ own)


def _loss(flat: Float, targets: Targets, l2: float) -> tuple[float, Float]:
    weights = flat.reshape(-1, targets.shares.shape[1])
    logs, shares = _log_softmax(targets.z @ weights[:-1] + weights[-1])
    value = -float(np.einsum("n,nc,nc->", targets.weights, targets.shares, logs))
    off = targets.weights[:, None] * (shares - targets.shares)
    gradient = np.concatenate([targets.z.T @ off + l2 * weights[:-1], off.sum(0)[None]])
    return value + l2 / 2 * float((weights[:-1] ** 2).sum()), gradient.ravel()


def _log_softmax(scores: Float) -> tuple[Float, Float]:
    """The logarithm of the softmax, and the softmax."""
    apart = scores - scores.max(1, keepdims=True)
    powers = np.exp(apart)
    sums = powers.sum(1, keepdims=True)
    return apart - np.log(sums), powers / sums
