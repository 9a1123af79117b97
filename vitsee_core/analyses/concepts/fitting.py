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
BATCH = 4096  # tokens, or 16 for each concept where that is more
STARTS = 4  # of k-means on the first batch
HALVES = 2


@dataclass(frozen=True)
class Choice:
    """method: of `METHODS`; k: concepts; epochs: passes over the tokens of kmeans and nmf; clamp:
    negative numbers are taken as 0; seed: of the solver and the tokens' order."""

    method: str
    k: int
    epochs: int
    clamp: bool
    seed: int

    @property
    def passes(self) -> int:
        return 1 if self.method == "pca" else self.epochs


class Fitted(NamedTuple):
    """Dictionaries of the same patches."""

    whole: Dictionary  # of all images
    halves: tuple[Dictionary, ...]
    mean: Float32  # (D,) of all patches


def fit(
    features: SiteFeatures, groups: Integers, choice: Choice, progress: Progress
) -> Fitted:
    """The dictionaries of all images and of each half of a site's patches. groups: (images,) half
    of each image, -1 for those that do not count; progress is advanced by the images of each pass.

    Raises:
        VitseeError: too few tokens in a half, or negative numbers in nmf.
    """
    name = f"{features.site.name} of {features.store.label}"
    counts = [
        int((groups == half).sum()) * len(features.tokens) for half in range(HALVES)
    ]
    if min(counts) < choice.k:
        raise VitseeError(
            f"{choice.k} concepts were asked for, but half of the images of {name} has "
            f"{min(counts)} patches; expected --k of at most that"
        )
    solvers = [_Solver(choice) for _ in range(1 + HALVES)]
    for epoch in range(choice.passes):
        for x, halves in _tokens(features, groups, choice, epoch):
            if choice.method == "nmf" and (x < 0).any():
                raise VitseeError(
                    f"{name} has negative numbers ({x.min():.3g}), and nmf is of numbers without: "
                    "give --clamp to take them as 0 (CRAFT's activations come from a ReLU), or "
                    "another --method"
                )
            solvers[0].add(x)
            for half in range(HALVES):
                solvers[1 + half].add(x[halves == half])
            progress.advance(len(x) // len(features.tokens))
        for solver in solvers:
            solver.flush()
    whole, *halves_of_it = (solver.dictionary(features.site.name) for solver in solvers)
    mean = (solvers[0].total / solvers[0].n).astype(np.float32)
    return Fitted(whole, tuple(halves_of_it), mean)


def _tokens(
    features: SiteFeatures, groups: Integers, choice: Choice, epoch: int
) -> Iterator[tuple[Float32, Integers]]:
    """Tokens (n, D) of a slab in random order, and their halves; the slabs in random order."""
    store = features.store
    rng = np.random.default_rng([choice.seed, epoch])
    for k in rng.permutation(store.plan.n_slabs).tolist():
        rows = store.plan.rows(k)
        counted = groups[rows] >= 0
        if not counted.any():
            continue
        x = features.of_slab(
            Piece(store, k, rows, counted), slice(0, len(features.tokens))
        )
        halves = np.repeat(groups[rows][counted], x.shape[1])
        order = rng.permutation(len(halves))
        flat = x.reshape(-1, x.shape[-1])[order]
        yield np.maximum(flat, 0) if choice.clamp else flat, halves[order]


class _Solver:
    """One model, given its tokens in batches of between `size` and twice as many."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.model: Any = None
        self.size = max(BATCH, 16 * choice.k)
        self.waiting: list[Float32] = []
        self.total: Any = 0.0
        self.n = 0

    def add(self, x: Float32) -> None:
        self.total = self.total + x.sum(0, dtype=np.float64)
        self.n += len(x)
        self.waiting.append(x)
        if sum(map(len, self.waiting)) < 2 * self.size:
            return
        pool = np.concatenate(self.waiting)
        stop = len(pool) // self.size * self.size - self.size
        for start in range(0, stop, self.size):
            self._step(pool[start : start + self.size])
        self.waiting = [pool[stop:]]

    def flush(self) -> None:
        """Take the step of the rows that wait for a full batch at the end of a pass."""
        if self.waiting:
            self._step(np.concatenate(self.waiting))
        self.waiting = []

    def _step(self, x: Float32) -> None:
        from sklearn.exceptions import ConvergenceWarning

        with warnings.catch_warnings():
            # Fewer distinct tokens than concepts; few iterations on one batch.
            warnings.simplefilter("ignore", ConvergenceWarning)
            if self.model is None:
                self.model = self._new(x)
            self.model.partial_fit(x)

    def _new(self, x: Float32) -> Any:
        from sklearn.cluster import KMeans, MiniBatchKMeans
        from sklearn.decomposition import IncrementalPCA, MiniBatchNMF

        k = self.choice.k
        seed = self.choice.seed
        if self.choice.method == "pca":
            return IncrementalPCA(k)
        if self.choice.method == "nmf":
            # All batches count alike, as the data are finite.
            return MiniBatchNMF(k, random_state=seed, forget_factor=1.0)
        first = KMeans(k, n_init=STARTS, random_state=seed).fit(x)
        return MiniBatchKMeans(
            k, init=first.cluster_centers_, n_init=1, random_state=seed
        )

    def dictionary(self, site: str) -> Dictionary:
        told: dict[str, Any] = {"clamp": self.choice.clamp, "site": site}
        nothing = np.zeros(len(self.total), np.float32)
        if self.choice.method == "kmeans":
            rows = self.model.cluster_centers_.astype(np.float32)
            return Dictionary("nearest", rows, nothing, **told)
        rows = self.model.components_.astype(np.float32)
        if self.choice.method == "nmf":
            return Dictionary("nnls", rows, nothing, **told)
        signs = np.sign(rows[np.arange(len(rows)), np.abs(rows).argmax(1)])
        rows = rows * np.where(signs == 0, 1, signs)[:, None].astype(np.float32)
        centre = self.model.mean_.astype(np.float32)
        zeros = np.zeros(len(rows), np.float32)
        return Dictionary(
            "linear", rows, centre, rows.T.copy(), zeros, centre=True, **told
        )


def matched_cosine(fitted: Fitted, shuffled: np.random.Generator | None = None) -> float:
    """The mean cosine of the two halves' concepts, each matched with one of the other so that the
    sum is largest (Hungarian assignment).

    Of k-means, concepts are centres about the mean of all patches, which they otherwise share; of
    principal axes the cosine's magnitude counts, as their sign is arbitrary. shuffled: permutes the
    second one's channels, for what matching alone gives.
    """
    from scipy.optimize import linear_sum_assignment

    first, second = (_directions(one, fitted.mean) for one in fitted.halves)
    if shuffled is not None:
        second = second[:, shuffled.permutation(second.shape[1])]
    cosines = first @ second.T
    if fitted.whole.kind == "linear":
        cosines = np.abs(cosines)
    rows, columns = linear_sum_assignment(cosines, maximize=True)
    return float(cosines[rows, columns].mean())


def _directions(dictionary: Dictionary, mean: Float32) -> Any:
    """(K, D) float64 of length 1, or 0."""
    rows = dictionary.w_dec.astype(np.float64)
    if dictionary.kind == "nearest":
        rows = rows - mean
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(length > 0, length, 1)


def halves_of(of_rows: Integers) -> Integers:
    """(images,) 0 for those in even blocks, 1 in odd ones, -1 for those in none (of_rows: -1)."""
    return np.where(of_rows < 0, -1, of_rows % HALVES)


AT_ONCE = 4096  # tokens


@dataclass(frozen=True)
class Task:
    """features: patches; blocks: (images,) block of the jackknife, -1 for none; labels: (draws,
    images) classes, the own ones and shuffled ones, without any draw where there are none; n_top:
    patches kept of each concept."""

    features: SiteFeatures
    dictionary: Dictionary
    blocks: Integers
    labels: Integers
    n_top: int

    def __call__(self) -> ConceptSums:
        """An empty accumulator."""
        return ConceptSums(self)

    @property
    def n_blocks(self) -> int:
        return int(self.blocks.max()) + 1


class Top(NamedTuple):
    """The patches of each concept with the highest activation, of one image each: (K, n) values,
    rows of the store, and cells."""

    values: Float
    rows: Integers
    cells: Integers


@dataclass
class ConceptSums:
    """An accumulator (see `streaming`) of what is measured of a dictionary."""

    task: Task
    n: NDArray[Any] = field(init=False)  # (blocks,) patches
    error: Float = field(init=False)  # (blocks,) sum of |x - x'|^2
    squares: Float = field(init=False)  # (blocks,) sum of |x|^2
    total: Float = field(init=False)  # (blocks, D) sum of x
    counts: Integers = field(init=False)  # (K,) patches assigned
    classes: Integers = field(
        init=False
    )  # (draws, blocks, K, classes) of them, with a label
    top: Top = field(init=False)

    def __post_init__(self) -> None:
        d = self.task.dictionary
        m = self.task.n_blocks
        labels = self.task.labels
        self.n = np.zeros(m, np.int64)
        self.error = np.zeros(m)
        self.squares = np.zeros(m)
        self.total = np.zeros((m, d.dim))
        self.counts = np.zeros(d.n, np.int64)
        n_classes = int(labels.max(initial=-1)) + 1
        self.classes = np.zeros((len(labels), m, d.n, n_classes), np.int64)
        nothing = np.zeros((d.n, 0), np.int64)
        self.top = Top(np.zeros((d.n, 0)), nothing, nothing)

    def update(self, slab: Slab) -> None:
        """Count a slab."""
        task = self.task
        d = self.task.dictionary
        tokens = task.features.of_slab(slab, slice(0, len(task.features.tokens)))
        rows = np.arange(slab.rows.start, slab.rows.stop)[slab.valid]
        step = max(1, AT_ONCE // tokens.shape[1])
        for start in range(0, len(rows), step):
            own = rows[start : start + step]
            x = d.target(tokens[start : start + step].reshape(-1, d.dim))
            codes = d.encode(x)
            wide = x.astype(np.float64)
            block = task.blocks[own]
            shape = (len(own), -1)
            np.add.at(self.n, block, tokens.shape[1])
            np.add.at(
                self.error, block, ((wide - d.decode(codes)) ** 2).reshape(shape).sum(1)
            )
            np.add.at(self.squares, block, (wide**2).reshape(shape).sum(1))
            np.add.at(self.total, block, wide.reshape(len(own), -1, d.dim).sum(1))
            self._assign(codes, own, np.repeat(block, tokens.shape[1]))
            self._strongest(d.activation(x, codes), own)

    def _assign(self, codes: Any, own: Integers, block: Integers) -> None:
        """Each patch to the concept with the largest code, in magnitude; none with codes of 0."""
        size = np.abs(codes)
        concept = size.argmax(1)
        counted = size[np.arange(len(size)), concept] > 0
        np.add.at(self.counts, concept[counted], 1)
        for draw, labels in enumerate(self.task.labels):
            label = np.repeat(labels[own], len(block) // len(own))
            use = counted & (label >= 0)
            np.add.at(self.classes[draw], (block[use], concept[use], label[use]), 1)

    def _strongest(self, activation: Any, own: Integers) -> None:
        """Keep for each concept its best images so far, an image counting by its strongest
        patch."""
        by_image = activation.reshape(len(own), -1, activation.shape[-1])
        cells = by_image.argmax(1)  # (images, K)
        values = np.take_along_axis(by_image, cells[:, None], 1)[:, 0].astype(np.float64)
        rows = np.broadcast_to(own[:, None], cells.shape)
        self.top = _best([self.top, Top(values.T, rows.T, cells.T)], self.task.n_top)

    def merge(self, other: ConceptSums) -> None:
        """Add another accumulator."""
        for name in ("n", "error", "squares", "total", "counts", "classes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.top = _best([self.top, other.top], self.task.n_top)

    def result(self) -> ConceptSums:
        """The accumulator itself."""
        return self

    def r2(self, without: int | None = None) -> float:
        """The share that is explained, see `dictionary.explained`; without: a block of images."""
        keep = np.arange(len(self.n)) != (-1 if without is None else without)
        sums = (self.n, self.error, self.squares, self.total)
        return explained(*(of_blocks[keep].sum(0) for of_blocks in sums))

    def purity(self, draw: int, without: int | None = None) -> float:
        """(1 / n) sum over concepts of the largest number of patches of images of one class."""
        keep = np.arange(len(self.n)) != (-1 if without is None else without)
        table = self.classes[draw, keep].sum(0)
        if table.sum():
            return float(table.max(1).sum() / table.sum())
        return np.nan


def _best(parts: list[Top], n: int) -> Top:
    """The highest of each concept, the first rows of equal ones."""
    values, rows, cells = (np.concatenate(some, 1) for some in zip(*parts, strict=True))
    order = np.lexsort((rows, -values), axis=1)[:, :n]
    return Top(*(np.take_along_axis(some, order, 1) for some in (values, rows, cells)))
