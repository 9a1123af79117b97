"""Linear probes by least squares at the resolution of pixels, from one pass over tokens.

    min over W, b of  1/n |M (U Z W + b - Y)|^2 + l2 v |W|^2

over the n pixels that count of all images: U interpolates tokens Z (cells, dim)
bilinearly, M is the diagonal of the pixels' weights (0 for those that do not count), Y
their targets, 1 for a pixel's class and 0 for the others, or its depth; v is the mean
variance of a feature over pixels, so that l2, the analysis's `l2_relative`, has no unit:
l2 n v is scikit-learn's alpha. The intercept b is not penalised.

Least squares needs sums over an image's pixels, which are made per cell (`CellSums`):

    S = U'MU    (cells, cells): a cell and its eight neighbours, so four numbers a cell
    T = U'MY    (cells, targets): a triangular filter of the class map

Sums over pixels are Z'SZ and Z'T; no pixel has features in memory. As U is a product of
one operator a direction, S and T are each a few products of matrices as large as the
image. With tokens about a fixed `shift`, which costs no digits, these sums make

    A = Z'SZ - n m m',  B = Z'T - m (sum Y)',  m = Z'S1 / n,   W = (A + l2 n v I)^-1 B

and one eigendecomposition of A serves every l2 (`Solutions`). l2 is chosen by the squared
error of held-out training images, which follows from their own sums: no second pass. All
is in float64.

With balanced classes a pixel of class c has the weight n / (C n_c) in M, of the n_c
training pixels of each of C classes, so that all classes weigh alike.

The sums of the baselines (`heads.PositionSums`) are made from the same sums of images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vitsee_core.analyses.dense_probe.heads import (
    GridSums,
    Head,
    HeadKey,
    LinearScores,
    PositionSums,
    Trained,
)
from vitsee_core.analyses.dense_probe.options import CHOOSING, RIDGE_GRID, Solver
from vitsee_core.analyses.dense_probe.split_images import (
    SplitImages,
    Sums,
    counted_rows,
    draw_images,
)
from vitsee_core.truth.masks.png_maps import IGNORED
from vitsee_core.types import Float, Integers, Mask
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.analyses.dense_probe.metrics import Task
    from vitsee_core.analyses.dense_probe.pixels import Pixels
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Slab


@dataclass(frozen=True)
class CellSums:
    """The sums of one image's pixels over the cells of one grid.

    S is symmetric and couples a cell with its eight neighbours, so four arrays hold it.

    Attributes:
        same: (rows, cols) S of a cell with itself.
        beside: (rows, cols - 1) S of a cell with its right neighbour.
        below: (rows - 1, cols) S of a cell with the one below.
        diagonal: (rows - 1, cols - 1) S of either diagonal of four cells, which are equal.
        present: numbers of the targets that occur: classes, or [0] for depths.
        targets: (present, rows, cols) T.
        totals: (present,) sums of Y over pixels.
        squares: the sum of Y squared over pixels.
        n: the sum of the weights.
        weights: (rows, cols) U'M1, the row sums of S.
    """

    same: Float
    beside: Float
    below: Float
    diagonal: Float
    present: list[int]
    targets: Float
    totals: Float
    squares: float
    n: float
    weights: Float

    @classmethod
    def of(cls, pixels: Pixels, class_weights: Float | None = None) -> CellSums:
        """Return the sums of an image.

        class_weights: (256,) weight of a pixel of each class, 0 for `IGNORED`; by default
            1.
        """
        down = pixels.row_weights
        across = pixels.col_weights
        # Products of neighbouring cells' shares in the same pixel.
        down_pairs = down[:, :-1] * down[:, 1:]
        across_pairs = across[:, :-1] * across[:, 1:]
        pixel_weights = pixels.weights
        if class_weights is not None:
            pixel_weights = class_weights[pixels.labels]  # (height, width)
        # U is a product of one operator a direction, and so is S: first down, then across.
        same_row = (down**2).T @ pixel_weights  # (rows, width)
        next_row = down_pairs.T @ pixel_weights  # (rows - 1, width)
        targets = pixels.targets
        weighted = [pixel_weights * target for target in targets]
        grid = (down.shape[1], across.shape[1])
        target_sums = np.array([pixels.sums_of_cells(target) for target in weighted])
        squares = sum(
            (product * target).sum()
            for product, target in zip(weighted, targets, strict=True)
        )
        return cls(
            same=same_row @ across**2,
            beside=same_row @ across_pairs,
            below=next_row @ across**2,
            diagonal=next_row @ across_pairs,
            present=pixels.present,
            targets=target_sums.reshape(-1, *grid),
            totals=np.array([target.sum() for target in weighted], np.float64),
            squares=float(squares),
            n=float(pixel_weights.sum()),
            weights=pixels.sums_of_cells(pixel_weights),
        )

    def smoothed(self, tokens: Float) -> Float:
        """Return the product S Z for tokens Z (rows, cols, dim)."""
        product = self.same[..., None] * tokens
        left = np.s_[:, :-1]
        right = np.s_[:, 1:]
        _add_coupled(product, tokens, self.beside, left, right)
        upper = np.s_[:-1, :]
        lower = np.s_[1:, :]
        _add_coupled(product, tokens, self.below, upper, lower)
        upper_left = np.s_[:-1, :-1]
        lower_right = np.s_[1:, 1:]
        _add_coupled(product, tokens, self.diagonal, upper_left, lower_right)
        upper_right = np.s_[:-1, 1:]
        lower_left = np.s_[1:, :-1]
        _add_coupled(product, tokens, self.diagonal, upper_right, lower_left)
        return product


def _add_coupled(
    product: Float,
    tokens: Float,
    coupling: Float,
    cells: tuple[slice, slice],
    neighbours: tuple[slice, slice],
) -> None:
    """Add to a product S Z what S has of cells with their neighbours, in either
    direction."""
    product[cells] += coupling[..., None] * tokens[neighbours]
    product[neighbours] += coupling[..., None] * tokens[cells]


def add_to_grid(grid_sums: GridSums, grid: str, sums: CellSums, n_targets: int) -> None:
    """Add an image's sums to those of its grid."""
    if grid not in grid_sums:
        shape = sums.weights.shape
        grid_sums[grid] = PositionSums(np.zeros((n_targets, *shape)), np.zeros(shape))
    grid_sums[grid].targets[sums.present] += sums.targets
    grid_sums[grid].weights += sums.weights


def blind_heads(task: Task, grid_sums: GridSums) -> dict[HeadKey, Head]:
    """Return the head of each baseline of every grid; baselines see no tokens."""
    heads = {}
    for grid, position_sums in grid_sums.items():
        classes, *scores_of_baselines = position_sums.scores()
        for name, scores in zip(task.baselines, scores_of_baselines, strict=True):
            heads[HeadKey(grid, baseline=name)] = task.head(classes, scores)
    return heads


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
        """Return the sums over no pixel."""
        return cls(
            n=0.0,
            totals=np.zeros(n_targets),
            squares=0.0,
            first=np.zeros(dim),
            second=np.zeros((dim, dim)),
            crossed=np.zeros((n_targets, dim)),
        )

    def count(self, tokens: Float, sums: CellSums) -> None:
        """Add an image with tokens (rows, cols, dim) minus the shift."""
        flat = tokens.reshape(-1, tokens.shape[-1])  # (cells, dim)
        self.n += sums.n
        self.totals[sums.present] += sums.totals
        self.squares += sums.squares
        self.first += sums.weights.ravel() @ flat  # 1'S Z
        self.second += flat.T @ sums.smoothed(tokens).reshape(flat.shape)  # Z'S Z
        self.crossed[sums.present] += sums.targets.reshape(-1, len(flat)) @ flat  # T'Z

    def __add__(self, later: PixelSums) -> PixelSums:
        """Return the sums over both."""
        return PixelSums(
            n=self.n + later.n,
            totals=self.totals + later.totals,
            squares=self.squares + later.squares,
            first=self.first + later.first,
            second=self.second + later.second,
            crossed=self.crossed + later.crossed,
        )


@dataclass(frozen=True)
class Training:
    """The images that are summed.

    Attributes:
        images: the training images.
        shifts: site -> (dim,) numbers that are subtracted from its tokens.
        held_out: (images of the store,) which of them choose l2.
        class_weights: (256,) weight of a pixel of each class; None: 1 for all classes.
    """

    images: SplitImages
    shifts: Mapping[str, Float]
    held_out: Mask
    class_weights: Float | None = None


class SiteSums(NamedTuple):
    """The sums of one site over the images that fit, and over those held out."""

    fitted: PixelSums
    held_out: PixelSums


@dataclass
class TrainingSums(Sums[Training]):
    """Sums over the pixels of the training images.

    Attributes:
        sums: (site, whether images are held out) -> the sums over their pixels.
        grid_sums: key of a grid -> sums of labels at each cell, for the baselines.
    """

    sums: dict[tuple[str, bool], PixelSums] = field(default_factory=dict)
    grid_sums: GridSums = field(default_factory=dict)

    def update(self, slab: Slab) -> None:
        """Add the images of a slab."""
        assert self.work is not None
        images = self.work.images
        n_targets = images.task.n_targets
        rows = counted_rows(slab)
        # For each image: key of a grid -> its sums. Made once for all sites that share the
        # grid.
        sums_of_images: list[dict[str, CellSums]] = []
        for row in rows:
            sums_of_grids = {}
            for grid, pixels in images.truth.pixels(row).items():
                sums_of_grids[grid] = CellSums.of(pixels, self.work.class_weights)
                add_to_grid(self.grid_sums, grid, sums_of_grids[grid], n_targets)
            sums_of_images.append(sums_of_grids)
        for site, patches in images.features.items():
            shift = self.work.shifts[site]
            for row, x, sums_of_grids in zip(
                rows, patches.of_slab(slab), sums_of_images, strict=True
            ):
                key = (site, bool(self.work.held_out[row]))
                if key not in self.sums:
                    self.sums[key] = PixelSums.empty(patches.dim, n_targets)
                z = (x.astype(np.float64) - shift).reshape(*patches.grid, -1)
                self.sums[key].count(z, sums_of_grids[images.grids[site]])

    def of_site(self, site: str, dim: int, n_targets: int) -> SiteSums:
        """Return the sums of one site, empty where it has no such images."""
        empty = PixelSums.empty(dim, n_targets)
        return SiteSums(
            fitted=self.sums.get((site, False), empty),
            held_out=self.sums.get((site, True), empty),
        )


@dataclass(frozen=True)
class Solutions:
    """The decomposition that gives the weights at every l2.

    Attributes:
        classes: the targets that occur.
        basis: (dim, dim) eigenvectors of A.
        values: (dim,) eigenvalues of A over n v.
        rhs: (dim, classes) B over n v in the eigenvectors' coordinates.
        mean: (dim,) mean of the features minus the shift.
        target_means: (classes,) means of the targets.
    """

    classes: Integers
    basis: Float
    values: Float
    rhs: Float
    mean: Float
    target_means: Float

    @classmethod
    def of(cls, sums: PixelSums) -> Solutions:
        """Return the decomposition for the sums of some images."""
        n = sums.n
        classes = np.flatnonzero(sums.totals)
        mean = sums.first / n
        scatter = sums.second - n * np.outer(mean, mean)  # A
        scatter = (scatter + scatter.T) / 2  # symmetric but for rounding
        crossed = sums.crossed[classes] - sums.totals[classes, None] * mean  # B'
        # n times the mean variance; features that are all equal have none, and get no
        # weight.
        scale = float(np.trace(scatter)) / len(mean) or 1.0
        values, basis = np.linalg.eigh(scatter / scale)
        return cls(
            classes=classes,
            basis=basis,
            values=np.maximum(values, 0),
            rhs=basis.T @ crossed.T / scale,
            mean=mean,
            target_means=sums.totals[classes] / n,
        )

    def scores(self, l2: float, shift: Float) -> LinearScores:
        """Return the scores of `classes` at one l2, as a linear function of stored
        features."""
        weights = self.basis @ self._rotated_weights(l2)
        return LinearScores(weights, self.target_means - (self.mean + shift) @ weights)

    def squared_errors(self, l2s: Sequence[float], held_out: PixelSums) -> list[float]:
        """Return the squared error per held-out pixel at each l2.

        Classes without training pixels have the score 0.
        """
        n = held_out.n
        # All in the eigenvectors' coordinates, so that each l2 costs products with few
        # columns.
        second = self.basis.T @ held_out.second @ self.basis
        first = self.basis.T @ held_out.first
        crossed = self.basis.T @ held_out.crossed[self.classes].T
        mean = self.basis.T @ self.mean
        totals = held_out.totals[self.classes]
        errors = []
        for l2 in l2s:
            weights = self._rotated_weights(l2)  # (dim, classes)
            bias = self.target_means - mean @ weights
            # The sum over pixels of |W'z + b - y|^2, multiplied out.
            weight_terms = float(np.einsum("rc,rc->", weights, second @ weights))
            bias_terms = 2 * float(bias @ (first @ weights)) + n * float(bias @ bias)
            target_terms = float(np.einsum("rc,rc->", weights, crossed))
            target_terms += float(bias @ totals)
            error = weight_terms + bias_terms - 2 * target_terms + held_out.squares
            errors.append(error / n)
        return errors

    def _rotated_weights(self, l2: float) -> Float:
        """Return the weights (dim, classes) at one l2, in the eigenvectors' coordinates."""
        return self.rhs / (self.values + l2)[:, None]


def train_ridge(images: SplitImages, solver: Solver, execution: Execution) -> Trained:
    """Train the probes of every site, and the baselines of every grid.

    Raises:
        VitseeError: no pixel counts, or there are too few images to choose l2.
    """
    held_out = np.zeros(images.store.n_images, bool)
    if not solver.l2s:
        seed = (execution.seed, 3)
        held_out = draw_images(images.store, images.truth.mask, CHOOSING, seed)
    class_weights = None
    if solver.balanced:
        class_weights = balanced_weights(count_truth(images, execution))
    sums = _fold_training(images, held_out, class_weights, execution)
    shifts = _shifts(images)
    task = images.task
    heads: dict[HeadKey, Head] = {}
    notes: dict[str, object] = {}
    l2s_of_sites = {}
    for site, patches in images.features.items():
        site_sums = sums.of_site(site, patches.dim, task.n_targets)
        all_sums = site_sums.fitted + site_sums.held_out
        if not all_sums.n:
            raise images.no_pixel("training")
        l2s = list(solver.l2s) or [_choose_l2(site_sums, site)]
        solutions = Solutions.of(all_sums)
        for l2 in l2s:
            scores = solutions.scores(l2, shifts[site])
            heads[HeadKey(site, l2)] = task.head(solutions.classes, scores)
        l2s_of_sites[site] = l2s
        notes["training_pixels"] = round(all_sums.n)
        notes["n_trained"] = len(solutions.classes)
    notes["l2_relative"] = l2s_of_sites
    if not solver.l2s:
        notes["held_out_images"] = int(held_out.sum())
    return Trained(heads | blind_heads(task, sums.grid_sums), notes)


def count_truth(images: SplitImages, execution: Execution) -> GridSums:
    """Count the training pixels at each cell of every grid, without reading tokens.

    Raises:
        VitseeError: none counts.
    """
    without_tokens = replace(images, features={})
    none_held_out = np.zeros(0, bool)
    grid_sums = _fold_training(without_tokens, none_held_out, None, execution).grid_sums
    if not any(position_sums.weights.any() for position_sums in grid_sums.values()):
        raise images.no_pixel("training")
    return grid_sums


def balanced_weights(grid_sums: GridSums) -> Float:
    """Return the weight of a pixel of each class, (256,): n / (C n_c).

    The weights of all pixels add up to n.
    """
    totals = next(iter(grid_sums.values())).totals  # the same pixels on every grid
    occurs = totals > 0
    weights = np.zeros(IGNORED + 1)
    weights[:IGNORED][occurs] = totals.sum() / (occurs.sum() * totals[occurs])
    return weights


def _choose_l2(sums: SiteSums, site: str) -> float:
    """Return the l2 with the least squared error per held-out pixel, the largest of
    several."""
    if not sums.fitted.n or not sums.held_out.n:
        raise VitseeError(
            f"{site}: l2 cannot be chosen, as the training images that fit have "
            f"{sums.fitted.n:.0f} pixels that count and those held out "
            f"{sums.held_out.n:.0f}; give it with --l2-relative, or more images"
        )
    errors = Solutions.of(sums.fitted).squared_errors(RIDGE_GRID, sums.held_out)
    error_of_l2 = dict(zip(RIDGE_GRID, errors, strict=True))
    return min(RIDGE_GRID, key=lambda l2: (error_of_l2[l2], -l2))


def _shifts(images: SplitImages) -> dict[str, Float]:
    """Return site -> a token (dim,) of it; sums of features minus it lose no digits."""
    first_row = int(np.flatnonzero(images.truth.mask)[0])
    shifts = {}
    for site, patches in images.features.items():
        token = patches.load(first_row)[0].astype(np.float64)
        shifts[site] = np.where(np.isfinite(token), token, 0.0)
    return shifts


def _fold_training(
    images: SplitImages,
    held_out: Mask,
    class_weights: Float | None,
    execution: Execution,
) -> TrainingSums:
    """Return the sums over the training images, in one pass over their tokens."""
    training = Training(images, _shifts(images), held_out, class_weights)
    # float64: zz' and yz' of every site, for the images that fit and for those held out.
    n_bytes = 0
    for patches in images.features.values():
        n_bytes += 8 * 2 * patches.dim * (patches.dim + images.task.n_targets)
    make = partial(TrainingSums, training)
    return images.fold(make, execution, images.slab_bytes + n_bytes)
