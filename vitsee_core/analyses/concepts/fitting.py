"""Dictionaries of a site's patches by scikit-learn's minibatch solvers, of all chosen images and of
two halves of them in the same passes over the tokens; then one pass that measures a dictionary."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.runtime.progress import Progress
from vitsee_core.runtime.streaming import Piece
from vitsee_core.sae.dictionary import Dictionary, explained
from vitsee_core.types import Float, Float32, Integers
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.features import SiteFeatures
    from vitsee_stores import Slab

METHODS = ("kmeans", "nmf", "pca")
BATCH = 4096  # tokens of a step, or 16 for each concept if that is more
N_STARTS = 4  # of k-means on the first batch
N_HALVES = 2
TOKENS_AT_ONCE = 4096  # encoded at once while measuring, so that codes fit the memory


@dataclass(frozen=True)
class SolverOptions:
    """How dictionaries are fitted.

    Attributes:
        method: one of `METHODS`.
        k: number of concepts.
        epochs: passes over the tokens, for kmeans and nmf.
        clamp: whether negative numbers are taken as 0.
        seed: of the solvers and of the tokens' order.
    """

    method: str
    k: int
    epochs: int
    clamp: bool
    seed: int

    @property
    def n_passes(self) -> int:
        """Number of passes over the tokens; one for pca, whose sums are exact after it."""
        return 1 if self.method == "pca" else self.epochs


class FittedDictionaries(NamedTuple):
    """Dictionaries of one site's patches."""

    full: Dictionary  # fitted on all images
    halves: tuple[Dictionary, ...]  # fitted on each half of the images
    mean: Float32  # (D,) mean of all patches


def fit(
    features: SiteFeatures, halves: Integers, options: SolverOptions, progress: Progress
) -> FittedDictionaries:
    """Fit the dictionaries of all images and of each half of the images, in the same passes.

    Args:
        features: reads the site's patch tokens.
        halves: (images,) half of each image, -1 for images that do not count.
        options: method, number of concepts, passes, seed.
        progress: advanced by the images of each pass.

    Raises:
        VitseeError: fewer patches in a half than concepts, or negative numbers in nmf.
    """
    name = f"{features.site.name} of {features.store.label}"
    n_patches = len(features.tokens)
    counts = [int((halves == half).sum()) * n_patches for half in range(N_HALVES)]
    if min(counts) < options.k:
        raise VitseeError(
            f"{options.k} concepts were asked for, but half of the images of {name} has "
            f"{min(counts)} patches; expected --k of at most that"
        )
    full_solver = _Solver(options)
    half_solvers = [_Solver(options) for _ in range(N_HALVES)]
    for epoch in range(options.n_passes):
        for x, token_halves in _shuffled_tokens(features, halves, options, epoch):
            if options.method == "nmf" and (x < 0).any():
                raise VitseeError(
                    f"{name} has negative numbers ({x.min():.3g}), and nmf is of numbers "
                    "without: give --clamp to take them as 0 (CRAFT's activations come "
                    "from a ReLU), or another --method"
                )
            full_solver.add(x)
            for half, solver in enumerate(half_solvers):
                solver.add(x[token_halves == half])
            progress.advance(len(x) // n_patches)
        for solver in (full_solver, *half_solvers):
            solver.flush()
    site = features.site.name
    return FittedDictionaries(
        full=full_solver.dictionary(site),
        halves=tuple(solver.dictionary(site) for solver in half_solvers),
        mean=(full_solver.total / full_solver.n).astype(np.float32),
    )


def _shuffled_tokens(
    features: SiteFeatures, halves: Integers, options: SolverOptions, epoch: int
) -> Iterator[tuple[Float32, Integers]]:
    """Yield the tokens of one slab after another, both in random order.

    halves: (images,) as in `fit`. Yields (n, D) tokens and (n,) the half of each.
    """
    store = features.store
    all_patches = slice(0, len(features.tokens))
    rng = np.random.default_rng([options.seed, epoch])
    for slab_index in rng.permutation(store.plan.n_slabs).tolist():
        rows = store.plan.rows(slab_index)
        counted = halves[rows] >= 0
        if not counted.any():
            continue
        # (images, patches, D)
        x = features.of_slab(Piece(store, slab_index, rows, counted), all_patches)
        token_halves = np.repeat(halves[rows][counted], x.shape[1])
        # Minibatch solvers expect batches that are alike: a slab's images are mixed.
        order = rng.permutation(len(token_halves))
        tokens = x.reshape(-1, x.shape[-1])[order]
        if options.clamp:
            tokens = np.maximum(tokens, 0)
        yield tokens, token_halves[order]


class _Solver:
    """One model of scikit-learn, fitted on batches of `size` to 2 x `size` tokens.

    Batches are cut anew, so that they do not depend on the slabs' sizes.
    """

    def __init__(self, options: SolverOptions) -> None:
        self.options = options
        self.model: Any = None  # made on the first batch
        self.size = max(BATCH, 16 * options.k)
        self.pending: list[Float32] = []  # tokens that wait for a full batch
        self.total: Any = 0.0  # (D,) float64 sum of all tokens
        self.n = 0  # number of tokens

    def add(self, x: Float32) -> None:
        """Add tokens (n, D), and take the steps for which there are enough of them."""
        self.total = self.total + x.sum(0, dtype=np.float64)
        self.n += len(x)
        self.pending.append(x)
        if sum(map(len, self.pending)) < 2 * self.size:
            return
        tokens = np.concatenate(self.pending)
        # One batch always stays, so that the last of a pass is never smaller than `size`.
        stop = len(tokens) // self.size * self.size - self.size
        for start in range(0, stop, self.size):
            self._step(tokens[start : start + self.size])
        self.pending = [tokens[stop:]]

    def flush(self) -> None:
        """Take the step of the tokens that wait for a full batch at the end of a pass."""
        if self.pending:
            self._step(np.concatenate(self.pending))
        self.pending = []

    def _step(self, x: Float32) -> None:
        """Update the model with one batch (n, D)."""
        from sklearn.exceptions import ConvergenceWarning

        with warnings.catch_warnings():
            # Fewer distinct tokens than concepts; few iterations on one batch.
            warnings.simplefilter("ignore", ConvergenceWarning)
            if self.model is None:
                self.model = self._make_model(x)
            self.model.partial_fit(x)

    def _make_model(self, x: Float32) -> Any:
        """Return the estimator; of kmeans with the centres of the first batch x (n, D)."""
        from sklearn.cluster import KMeans, MiniBatchKMeans
        from sklearn.decomposition import IncrementalPCA, MiniBatchNMF

        k = self.options.k
        seed = self.options.seed
        if self.options.method == "pca":
            return IncrementalPCA(k)
        if self.options.method == "nmf":
            # All batches count alike, as the data are finite.
            return MiniBatchNMF(k, random_state=seed, forget_factor=1.0)
        # partial_fit tries one start only; k-means on the first batch tries several.
        first_batch = KMeans(k, n_init=N_STARTS, random_state=seed).fit(x)
        return MiniBatchKMeans(
            k, init=first_batch.cluster_centers_, n_init=1, random_state=seed
        )

    def dictionary(self, site: str) -> Dictionary:
        """Return the fitted directions and their encoder, in float32."""
        clamp = self.options.clamp
        zero_bias = np.zeros(len(self.total), np.float32)
        if self.options.method == "kmeans":
            centres = self.model.cluster_centers_.astype(np.float32)
            return Dictionary("nearest", centres, zero_bias, clamp=clamp, site=site)
        components = self.model.components_.astype(np.float32)  # (K, D)
        if self.options.method == "nmf":
            return Dictionary("nnls", components, zero_bias, clamp=clamp, site=site)
        # A principal axis has no sign: its largest entry is made positive.
        largest = np.abs(components).argmax(1)
        signs = np.sign(components[np.arange(len(components)), largest])
        signs = np.where(signs == 0, 1, signs)  # an axis of zeros
        axes = components * signs[:, np.newaxis].astype(np.float32)
        return Dictionary(
            "linear",
            w_dec=axes,
            b_dec=self.model.mean_.astype(np.float32),
            w_enc=axes.T.copy(),
            b_enc=np.zeros(len(axes), np.float32),
            centre=True,
            clamp=clamp,
            site=site,
        )


def matched_cosine(
    fitted: FittedDictionaries, shuffle_rng: np.random.Generator | None = None
) -> float:
    """Return the mean cosine of the two halves' concepts, matched one to one.

    The matching has the largest sum of cosines (Hungarian assignment). Of k-means, concepts are
    centres about the mean of all patches, which they otherwise share; of principal axes the
    cosine's magnitude counts, as their sign is arbitrary.

    Args:
        fitted: the dictionaries.
        shuffle_rng: permutes the second half's channels, for what matching alone gives.
    """
    from scipy.optimize import linear_sum_assignment

    first, second = (_unit_directions(half, fitted.mean) for half in fitted.halves)
    if shuffle_rng is not None:
        second = second[:, shuffle_rng.permutation(second.shape[1])]
    cosines = first @ second.T  # (K, K)
    if fitted.full.kind == "linear":
        cosines = np.abs(cosines)
    rows, columns = linear_sum_assignment(cosines, maximize=True)
    return float(cosines[rows, columns].mean())


def _unit_directions(dictionary: Dictionary, mean: Float32) -> Float:
    """Return (K, D) the directions in float64, of length 1; a direction of zeros stays so."""
    directions = dictionary.w_dec.astype(np.float64)
    if dictionary.kind == "nearest":
        directions = directions - mean
    length = np.linalg.norm(directions, axis=1, keepdims=True)
    unit: Float = directions / np.where(length > 0, length, 1)
    return unit


def assign_halves(blocks: Integers) -> Integers:
    """Return (images,) 0 for images of even blocks, 1 for odd ones, -1 for those in none.

    blocks: (images,) block of each image, -1 for none.
    """
    return np.where(blocks < 0, -1, blocks % N_HALVES)


@dataclass(frozen=True)
class ConceptTask:
    """What is measured of one dictionary. The fold calls it for the accumulator of each slab.

    Attributes:
        features: reads the site's patch tokens.
        dictionary: encodes them.
        blocks: (images,) block of the jackknife, -1 for none.
        labels: (draws, images) classes: the images' labels, then shuffled ones; no draw if there
            are no classes.
        n_top: number of patches kept for each concept.
    """

    features: SiteFeatures
    dictionary: Dictionary
    blocks: Integers
    labels: Integers
    n_top: int

    def __call__(self) -> ConceptSums:
        """Return an empty accumulator."""
        return ConceptSums(self)

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return int(self.blocks.max()) + 1


class StrongestPatches(NamedTuple):
    """The patches of each concept with the highest activation, one per image: (K, n) each."""

    values: Float
    rows: Integers  # of the store
    cells: Integers  # of the site's grid


@dataclass
class ConceptSums:
    """Accumulator, for the streaming fold, of what is measured of a dictionary."""

    task: ConceptTask
    n: NDArray[Any] = field(init=False)  # (blocks,) patches
    error: Float = field(init=False)  # (blocks,) sum of |x - x'|^2
    squares: Float = field(init=False)  # (blocks,) sum of |x|^2
    total: Float = field(init=False)  # (blocks, D) sum of x
    counts: Integers = field(init=False)  # (K,) assigned patches
    # (draws, blocks, K, classes) assigned patches of images with a label
    classes: Integers = field(init=False)
    top: StrongestPatches = field(init=False)

    def __post_init__(self) -> None:
        n_concepts = self.task.dictionary.n
        n_blocks = self.task.n_blocks
        labels = self.task.labels
        n_classes = int(labels.max(initial=-1)) + 1
        self.n = np.zeros(n_blocks, np.int64)
        self.error = np.zeros(n_blocks)
        self.squares = np.zeros(n_blocks)
        self.total = np.zeros((n_blocks, self.task.dictionary.dim))
        self.counts = np.zeros(n_concepts, np.int64)
        self.classes = np.zeros((len(labels), n_blocks, n_concepts, n_classes), np.int64)
        no_patches = np.zeros((n_concepts, 0), np.int64)
        self.top = StrongestPatches(np.zeros((n_concepts, 0)), no_patches, no_patches)

    def update(self, slab: Slab) -> None:
        """Add the patches of a slab's valid images."""
        task = self.task
        dictionary = task.dictionary
        # (images, patches, D)
        tokens = task.features.of_slab(slab, slice(0, len(task.features.tokens)))
        n_patches = tokens.shape[1]
        rows = np.arange(slab.rows.start, slab.rows.stop)[slab.valid]
        step = max(1, TOKENS_AT_ONCE // n_patches)  # images
        for start in range(0, len(rows), step):
            step_rows = rows[start : start + step]
            step_blocks = task.blocks[step_rows]
            n_images = len(step_rows)
            x = dictionary.target(
                tokens[start : start + step].reshape(-1, dictionary.dim)
            )
            codes = dictionary.encode(x)  # (images x patches, K)
            # Float64, for sums whose difference r2 is.
            x64 = x.astype(np.float64)
            squared_error = (x64 - dictionary.decode(codes)) ** 2
            image_error = squared_error.reshape(n_images, -1).sum(1)
            image_squares = (x64**2).reshape(n_images, -1).sum(1)
            image_total = x64.reshape(n_images, -1, dictionary.dim).sum(1)
            np.add.at(self.n, step_blocks, n_patches)
            np.add.at(self.error, step_blocks, image_error)
            np.add.at(self.squares, step_blocks, image_squares)
            np.add.at(self.total, step_blocks, image_total)
            self._count_assigned(codes, step_rows, n_patches)
            self._keep_strongest(dictionary.activation(x, codes), step_rows)

    def _count_assigned(self, codes: Any, rows: Integers, n_patches: int) -> None:
        """Count each patch at the concept with its largest code, in magnitude.

        Patches whose codes are all 0 are not counted. codes: (images x patches, K); rows: (images,)
        of the store.
        """
        magnitudes = np.abs(codes)
        concepts = magnitudes.argmax(1)
        is_assigned = magnitudes[np.arange(len(magnitudes)), concepts] > 0
        np.add.at(self.counts, concepts[is_assigned], 1)
        blocks = np.repeat(self.task.blocks[rows], n_patches)
        for draw, image_labels in enumerate(self.task.labels):
            labels = np.repeat(image_labels[rows], n_patches)
            counted = is_assigned & (labels >= 0)
            cells = (blocks[counted], concepts[counted], labels[counted])
            np.add.at(self.classes[draw], cells, 1)

    def _keep_strongest(self, activation: Any, rows: Integers) -> None:
        """Keep the best images so far of each concept; an image counts by its strongest patch.

        activation: (images x patches, K); rows: (images,) of the store.
        """
        by_image = activation.reshape(len(rows), -1, activation.shape[-1])
        cells = by_image.argmax(1)  # (images, K)
        values = np.take_along_axis(by_image, cells[:, np.newaxis], 1)[:, 0]
        candidates = StrongestPatches(
            values=values.astype(np.float64).T,  # (K, images)
            rows=np.broadcast_to(rows[:, np.newaxis], cells.shape).T,
            cells=cells.T,
        )
        self.top = _join_strongest(self.top, candidates, self.task.n_top)

    def merge(self, other: ConceptSums) -> None:
        """Add another accumulator."""
        for name in ("n", "error", "squares", "total", "counts", "classes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.top = _join_strongest(self.top, other.top, self.task.n_top)

    def result(self) -> ConceptSums:
        """Return the accumulator itself."""
        return self

    def r2(self, without: int | None = None) -> float:
        """Return r2 = 1 - |x - x'|^2 / |x - mean|^2 over all patches.

        without: a block of images to leave out.
        """
        blocks = self._blocks_except(without)
        return explained(
            n=self.n[blocks].sum(),
            error=self.error[blocks].sum(),
            squares=self.squares[blocks].sum(),
            total=self.total[blocks].sum(0),
        )

    def purity(self, draw: int, without: int | None = None) -> float:
        """Return (1 / n) sum over concepts of the largest number of patches of one class.

        It is NaN if no patch is counted.

        Args:
            draw: which labels, as `ConceptTask.labels` counts them.
            without: a block of images to leave out.
        """
        # (K, classes)
        patch_counts = self.classes[draw, self._blocks_except(without)].sum(0)
        n = patch_counts.sum()
        if not n:
            return np.nan
        return float(patch_counts.max(1).sum() / n)

    def _blocks_except(self, without: int | None) -> NDArray[np.bool_]:
        """Return (blocks,) whether each block is used: all except `without`."""
        is_used = np.ones(len(self.n), bool)
        if without is not None:
            is_used[without] = False
        return is_used


def _join_strongest(a: StrongestPatches, b: StrongestPatches, n: int) -> StrongestPatches:
    """Return the n highest of both for each concept; of equal ones the first rows of the store."""
    values = np.concatenate([a.values, b.values], axis=1)
    rows = np.concatenate([a.rows, b.rows], axis=1)
    cells = np.concatenate([a.cells, b.cells], axis=1)
    # lexsort's last key is the first to be sorted by. (K, n)
    order = np.lexsort((rows, -values), axis=1)[:, :n]
    return StrongestPatches(
        values=np.take_along_axis(values, order, axis=1),
        rows=np.take_along_axis(rows, order, axis=1),
        cells=np.take_along_axis(cells, order, axis=1),
    )
