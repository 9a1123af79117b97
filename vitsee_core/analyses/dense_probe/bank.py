"""Patches in memory with the labels of their pixels, for the solvers that need more than
sums: logistic regression and nearest neighbours.

A bank holds all patches of every training image where they fit into memory, else equally
many of each image. The pixels of a patch are those of the model's input that its cell
covers.

`knn`: each of the k nearest patches votes with its pixels; a pixel of the input gets the
class that most of them have at its place in the patch, of equally many the lowest (CAPI:
Darcet et al. 2025). Pixels without a class do not vote; where none votes, the patch's most
frequent class is taken. For depths a pixel gets the mean of the neighbours' pixels at its
place, or of their whole patches where none has a depth there.

`hummingbird`: scores are the k nearest patches' shares of classes, weighted by
softmax(cosine / 0.02), and are interpolated bilinearly (Balažević et al. 2023).

The number of neighbours and the distance are chosen by the patches of held-out training
images.

`logistic`: the regression of `kernels.logistic`, on the patches of the bank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.dense_probe.heads import (
    ClassHead,
    GridSums,
    Head,
    HeadKey,
    HummingbirdScores,
    KnnHead,
    LinearScores,
    Search,
    Trained,
    mean_depths,
    most_votes,
)
from vitsee_core.analyses.dense_probe.linear import CellSums, add_to_grid, blind_heads
from vitsee_core.analyses.dense_probe.metrics import count_confusions, mean_iou
from vitsee_core.analyses.dense_probe.options import (
    CHOOSING,
    HUMMINGBIRD,
    LOGISTIC,
    Solver,
)
from vitsee_core.analyses.dense_probe.pixels import Labels, has_label
from vitsee_core.analyses.dense_probe.split_images import (
    SplitImages,
    Sums,
    counted_rows,
    draw_images,
)
from vitsee_core.kernels.logistic import Scaling, Targets, choose_l2, fit
from vitsee_core.truth.masks.png_maps import IGNORED
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Slab


log = logging.getLogger(__name__)
RARE = "rare"
ANY = "any"
QUERIES_AT_ONCE = 1024
COPIES = 4  # times the bytes of a site's tokens that a solver takes for copies


@dataclass(frozen=True)
class Bank:
    """Patches of one site.

    Attributes:
        tokens: (n, dim).
        labels: (n, pixels) labels of each patch's pixels.
        rows: (n,) rows of the store, those of the patches' images.
    """

    tokens: Float32
    labels: Labels
    rows: Integers

    def subset(self, mask: Mask) -> Bank:
        """Return the patches in a mask (n,)."""
        return Bank(self.tokens[mask], self.labels[mask], self.rows[mask])

    def histograms(self) -> tuple[Integers, Float, Integers]:
        """Return the classes that occur, and the numbers of their pixels in each patch.

        Returns:
            The classes (classes,), the number of pixels of each class in each patch (n,
            classes), and the number of pixels with any class in each patch (n,).
        """
        n = len(self.labels)
        classes = np.unique(self.labels)
        classes = classes[classes != IGNORED].astype(np.int64)
        # Class number -> column of the histogram; -1 for pixels without a class.
        column_of_class = np.full(IGNORED + 1, -1)
        column_of_class[classes] = np.arange(len(classes))
        columns = column_of_class[self.labels]  # (n, pixels)
        flat = np.arange(n)[:, None] * len(classes) + columns
        counts = np.bincount(flat[columns >= 0], minlength=n * len(classes))
        counts = counts.reshape(n, -1)
        return classes, counts.astype(np.float64), counts.sum(1)


def choose_cells(
    labels: Labels, max_cells: int, choice: str, seed: tuple[int, ...]
) -> Integers:
    """Return the cells of an image that are kept, ascending.

    Args:
        labels: (cells, pixels); cells without any label are never kept.
        max_cells: the largest number that is kept.
        choice: `RARE` keeps those with the lowest (sum over their classes of how many
            patches of the image have it) x uniform noise, as Balažević et al. 2023 do;
            `ANY` those with the lowest noise.
        seed: seed of the noise.
    """
    labelled = np.flatnonzero(has_label(labels).any(1))
    if len(labelled) <= max_cells:
        return labelled
    noise = np.random.default_rng(seed).random(len(labelled))
    if choice == RARE:
        cell_labels = labels[labelled]
        classes = np.unique(cell_labels)
        classes = classes[classes != IGNORED]
        # (cells, classes): whether the cell has the class
        has_class = np.stack([(cell_labels == c).any(1) for c in classes], 1)
        noise *= has_class @ has_class.sum(0)
    return np.sort(labelled[np.argsort(noise, kind="stable")[:max_cells]])


@dataclass(frozen=True)
class Collecting:
    """The images, and which of their patches are kept.

    Attributes:
        images: the training images.
        max_cells: patches kept of an image.
        choice: `RARE` or `ANY`, see `choose_cells`.
        seed: seed of the choice.
    """

    images: SplitImages
    max_cells: int
    choice: str
    seed: int


@dataclass
class Banks(Sums[Collecting]):
    """The kept patches of every site by slab, and the sums of the baselines.

    Attributes:
        slab_banks: name of a site -> a bank of each slab.
        grid_sums: key of a grid -> sums of labels at each cell.
    """

    slab_banks: dict[str, list[Bank]] = field(default_factory=dict)
    grid_sums: GridSums = field(default_factory=dict)

    def update(self, slab: Slab) -> None:
        """Keep patches of the images of a slab."""
        assert self.work is not None
        images = self.work.images
        rows = counted_rows(slab)
        # Key of a grid -> the kept cells of each image, and their labels.
        cells_of_grids: dict[str, list[Integers]] = {}
        labels_of_grids: dict[str, list[Labels]] = {}
        for row in rows:
            # By the image's number in the data set: a shuffled store keeps the same
            # patches.
            seed = (self.work.seed, 4, int(images.store.samples.index[row]))
            for grid, labels in images.truth.cells(row).items():
                cells = choose_cells(labels, self.work.max_cells, self.work.choice, seed)
                cells_of_grids.setdefault(grid, []).append(cells)
                labels_of_grids.setdefault(grid, []).append(labels[cells])
            for grid, pixels in images.truth.pixels(row).items():
                sums = CellSums.of(pixels)
                add_to_grid(self.grid_sums, grid, sums, images.task.n_targets)
        for site, patches in images.features.items():
            grid = images.grids[site]
            cells_of_images = cells_of_grids[grid]
            tokens = [
                x[cells]
                for x, cells in zip(patches.of_slab(slab), cells_of_images, strict=True)
            ]
            bank = Bank(
                tokens=np.concatenate(tokens),
                labels=np.concatenate(labels_of_grids[grid]),
                rows=np.repeat(rows, [len(cells) for cells in cells_of_images]),
            )
            self.slab_banks.setdefault(site, []).append(bank)

    def bank(self, site: str) -> Bank:
        """Remove and return all patches of a site."""
        # Removed, so that a site's patches are in memory twice for one site at a time only.
        banks = self.slab_banks.pop(site)
        return Bank(
            tokens=np.concatenate([bank.tokens for bank in banks]),
            labels=np.concatenate([bank.labels for bank in banks]),
            rows=np.concatenate([bank.rows for bank in banks]),
        )


def train_from_bank(images: SplitImages, solver: Solver, execution: Execution) -> Trained:
    """Train the probes of every site, and the baselines of every grid.

    Raises:
        VitseeError: no patch has a class, fewer patches than neighbours, cells that are
            not whole pixels, or too few images to choose l2.
    """
    banks, max_cells = _collect(images, solver, execution)
    held_out = draw_images(images.store, images.truth.mask, CHOOSING, (execution.seed, 3))
    heads: dict[HeadKey, Head] = {}
    notes: dict[str, Any] = {"patches_of_an_image_at_most": max_cells}
    n_left_out = 0
    for site in images.features:
        bank = banks.bank(site)
        if not len(bank.tokens):
            raise images.no_pixel("training")
        layout = images.truth.layouts[images.grids[site]]
        n_left_out = max(n_left_out, layout.n_body - max_cells)
        notes["patches"] = len(bank.tokens)
        if solver.name == LOGISTIC:
            heads_of_l2s = _logistic_heads(images, bank, solver, held_out, site)
            notes.setdefault("l2_relative", {})[site] = list(heads_of_l2s)
            for l2, head in heads_of_l2s.items():
                heads[HeadKey(site, l2=l2)] = head
            continue
        if len(bank.tokens) < max(solver.ks):
            raise VitseeError(
                f"{site}: the bank has {len(bank.tokens)} patches with a "
                f"{images.task.label}; --k {max(solver.ks)} needs as many"
            )
        ks = solver.ks
        distance = solver.distances[0]
        if solver.chooses:
            choice = choose_neighbours(bank, held_out, solver, execution.device, site)
            notes.setdefault("chosen", {})[site] = choice
            ks = (choice["k"],)
            distance = choice["distance"]
        search = make_search(bank, solver, distance, execution.device)
        heads |= _neighbour_heads(images, bank, search, solver, ks, site)
    if images.task.label == "class":
        # The classes of all grids are the same: any of them counts.
        first_sums = next(iter(banks.grid_sums.values()))
        notes["n_trained"] = int((first_sums.totals > 0).sum())
    if n_left_out > 0:
        notes["left_out"] = f"patches beyond {max_cells} of an image"
        log.info("%s: %d patches of each image are kept", images.store.label, max_cells)
    return Trained(heads | blind_heads(images.task, banks.grid_sums), notes)


def _neighbour_heads(
    images: SplitImages,
    bank: Bank,
    search: Search,
    solver: Solver,
    ks: Sequence[int],
    site: str,
) -> dict[HeadKey, Head]:
    """Return a head of one site for each number of neighbours."""
    heads: dict[HeadKey, Head] = {}
    if solver.name == HUMMINGBIRD:
        classes, counts, n_pixels = bank.histograms()
        shares = counts / n_pixels[:, None]
        for k in ks:
            scores = HummingbirdScores(search, shares, k)
            heads[HeadKey(site, k=k)] = ClassHead(classes, scores)
        return heads
    layout = images.truth.layouts[images.grids[site]]
    join = mean_depths if images.task.label == "depth" else most_votes
    for k in ks:
        heads[HeadKey(site, k=k)] = KnnHead(search, bank.labels, layout, k, join)
    return heads


def _collect(
    images: SplitImages, solver: Solver, execution: Execution
) -> tuple[Banks, int]:
    """Collect the patches of all sites; also return the largest number that is kept of an
    image.

    Raises:
        VitseeError: a requested number of patches does not fit the memory.
    """
    n_pixels = max(
        layout.stride_px[0] * layout.stride_px[1]
        for layout in images.truth.layouts.values()
        if layout.stride_px is not None
    )
    dims = [patches.dim for patches in images.features.values()]
    n_bytes_label = 4 if images.task.label == "depth" else 1
    # float32 tokens and the labels of a patch's pixels, of every site at the same time;
    # and the copies of the site that is fitted.
    n_bytes_patch = sum(4 * dim + n_bytes_label * int(n_pixels) for dim in dims)
    n_bytes_copies = 4 * COPIES * max(dims)
    # The other half of the memory is for reading.
    n_fitting = execution.budget // 2 // (n_bytes_patch + n_bytes_copies)
    n_patches = n_fitting
    if solver.bank is not None:
        if solver.bank > n_fitting:
            raise VitseeError(
                f"--bank {solver.bank} patches of {len(images.features)} sites do not "
                f"fit into the memory; {n_fitting} do: give fewer, fewer --sites, or "
                "more --memory"
            )
        n_patches = solver.bank
    max_cells = max(1, n_patches // images.n_images)
    choice = RARE if solver.name == HUMMINGBIRD else ANY
    make = partial(Banks, Collecting(images, max_cells, choice, execution.seed))
    return images.fold(make, execution), max_cells


def _logistic_heads(
    images: SplitImages, bank: Bank, solver: Solver, held_out: Mask, site: str
) -> dict[float, Head]:
    """Return l2 -> a logistic probe that is fitted at it, by ascending l2.

    held_out: (images of the store,) which of them choose l2 if it is not given.

    Raises:
        VitseeError: too few patches to choose l2.
    """
    classes, counts, _ = bank.histograms()
    if solver.of_patches:
        counts = _most_frequent(bank, counts)
    scaling = Scaling.of(bank.tokens)
    z = scaling(bank.tokens)
    l2s = solver.l2s
    if not l2s:
        is_held_out = held_out[bank.rows]
        fitted = Targets.of(z[~is_held_out], counts[~is_held_out])
        choosing = Targets.of(z[is_held_out], counts[is_held_out])
        if not len(fitted.z) or not len(choosing.z):
            raise VitseeError(
                f"{site}: l2 cannot be chosen, as the training images that fit have "
                f"{len(fitted.z)} patches with a class and those held out "
                f"{len(choosing.z)}; give it with --l2-relative, or more images"
            )
        l2s = (choose_l2(fitted, choosing, solver.grid),)
    weights_of_l2s = fit(Targets.of(z, counts), l2s)
    heads = {}
    for l2 in sorted(weights_of_l2s):
        scores = _linear_scores(weights_of_l2s[l2], scaling)
        heads[l2] = images.task.head(classes, scores, solver.of_patches)
    return heads


def _linear_scores(weights: Float, scaling: Scaling) -> LinearScores:
    """Return the scores of classes as a linear function of features as they are stored.

    weights: (dim + 1, classes) of scaled features, with the intercept last.
    """
    stored_weights = weights[:-1] * scaling.factor[:, None]
    return LinearScores(stored_weights, weights[-1] - scaling.mean @ stored_weights)


def _most_frequent(bank: Bank, counts: Float) -> Float:
    """Return a matrix (n, classes) with 1 for each patch's most frequent class.

    Of equally many it is the lowest. A patch has 0 throughout if more of its pixels have
    no class.

    counts: (n, classes) pixels of each class.
    """
    n_ignored = (bank.labels == IGNORED).sum(1)
    one_hot = np.zeros_like(counts)
    best = counts.argmax(1)
    one_hot[np.arange(len(counts)), best] = counts.max(1) >= n_ignored
    return one_hot


def make_search(bank: Bank, solver: Solver, distance: str, device: str) -> Search:
    """Return the search among a bank's patches, standardised if the solver asks for it."""
    if solver.standardise:
        scaling = Scaling.of(bank.tokens)
    else:
        scaling = Scaling.none(bank.tokens.shape[1])
    return Search(scaling(bank.tokens).astype(np.float32), scaling, device, distance)


def choose_neighbours(
    bank: Bank, held_out: Mask, solver: Solver, device: str, site: str
) -> dict[str, Any]:
    """Return the `k` and `distance` with the highest mean IoU on held-out patches.

    The pixels of held-out patches are predicted by votes of the other patches. Of equal
    ones the first is chosen.

    Args:
        bank: patches of the training images.
        held_out: (images of the store,) which of them choose.
        solver: the numbers of neighbours and the distances to choose from.
        device: torch device of the search.
        site: name of the site, for errors.

    Returns:
        `k`, `distance` and their mean IoU, `miou_held_out`.

    Raises:
        VitseeError: too few patches to choose by.
    """
    is_held_out = held_out[bank.rows]
    fitted = bank.subset(~is_held_out)
    queries = bank.subset(is_held_out)
    ks = [k for k in solver.ks if k <= len(fitted.tokens)]
    if not ks or not len(queries.tokens):
        raise VitseeError(
            f"{site}: k cannot be chosen, as the training images that fit have "
            f"{len(fitted.tokens)} patches with a class and those held out "
            f"{len(queries.tokens)}; give it with --k, or more images"
        )
    best: dict[str, Any] = {"miou_held_out": -np.inf}
    for distance in solver.distances:
        search = make_search(fitted, solver, distance, device)
        counts = {k: np.zeros((3, IGNORED), np.int64) for k in ks}
        for start in range(0, len(queries.tokens), QUERIES_AT_ONCE):
            batch = slice(start, start + QUERIES_AT_ONCE)
            tokens = queries.tokens[batch][None].astype(np.float64)
            # Neighbours of the largest k include those of every smaller one.
            _, neighbours = search.nearest(tokens, max(ks))
            truth = queries.labels[batch]
            for k in ks:
                prediction = most_votes(fitted.labels[neighbours[:, :k]])
                prediction = np.where(truth == IGNORED, np.uint8(IGNORED), prediction)
                counts[k] += count_confusions(prediction, truth)
        for k in ks:
            miou = float(mean_iou(counts[k]))
            if miou > best["miou_held_out"]:
                best = {"k": k, "distance": distance, "miou_held_out": miou}
    return best
