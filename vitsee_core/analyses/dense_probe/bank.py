"""Patches in memory with the labels of their pixels, for the solvers that need more than sums:
logistic regression and nearest neighbours.

A bank holds all patches of every training image where they fit into memory, else equally many of
each image. The pixels of a patch are those of the model's input that its cell covers.

`knn`: each of the k nearest patches votes with its pixels; a pixel of the input gets the class that
most of them have at its place in the patch, of equally many the lowest (CAPI: Darcet et al. 2025).
Pixels without a class do not vote; where none votes, the patch's most frequent class is taken.
For depths a pixel gets the mean of the neighbours' pixels at its place, or of their whole patches
where none has a depth there.

`hummingbird`: scores are the k nearest patches' shares of classes, weighted by softmax(cosine /
0.02), and are interpolated bilinearly (Balažević et al. 2023).

The number of neighbours and the distance are chosen by the patches of held-out training images.

`logistic`: the regression of `linear`, on the patches of the bank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.dense_probe.linear import (
    Scaling,
    Targets,
    choose_l2,
    fit,
    linear_scores,
)
from vitsee_core.analyses.dense_probe.metrics import count_confusions, mean_iou
from vitsee_core.analyses.dense_probe.options import (
    COSINE,
    HUMMINGBIRD,
    L2,
    LOGISTIC,
    TEMPERATURE,
    Solver,
)
from vitsee_core.analyses.dense_probe.pixels import (
    CellSums,
    ClassHead,
    Head,
    Labels,
    Pixels,
    Places,
    count_places,
    has_label,
)
from vitsee_core.analyses.dense_probe.work import (
    CHOOSING,
    HeadKey,
    SplitImages,
    Sums,
    Trained,
    blind_heads,
    counted_rows,
    drawn,
)
from vitsee_core.truth.masks.class_maps import IGNORED, ClassMap
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import TokenLayout

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Slab

log = logging.getLogger(__name__)

RARE = "rare"
ANY = "any"
ROWS_AT_ONCE = 1 << 16
AT_ONCE = 1 << 24  # votes in memory
QUERIES_AT_ONCE = 1024
WORK = 4  # times the bytes of a bank's tokens that a solver takes for copies


@dataclass(frozen=True)
class Bank:
    """Patches of one site: tokens (n, dim), labels (n, pixels) of each, and rows (n,) of the store,
    those of their images."""

    tokens: Float32
    labels: Labels
    rows: Integers

    def part(self, some: Mask) -> Bank:
        """The patches in the mask (n,)."""
        return Bank(self.tokens[some], self.labels[some], self.rows[some])

    def histograms(self) -> tuple[Integers, Float, Integers]:
        """The classes that occur, the number of pixels of each class in each patch (n,
        classes), and of those with any class (n,)."""
        n = len(self.labels)
        classes = np.unique(self.labels)
        classes = classes[classes != IGNORED].astype(np.int64)
        places = np.full(IGNORED + 1, -1)
        places[classes] = np.arange(len(classes))
        at = places[self.labels]
        index = (np.arange(n)[:, None] * len(classes) + at)[at >= 0]
        counts = np.bincount(index, minlength=n * len(classes)).reshape(n, -1)
        return classes, counts.astype(np.float64), counts.sum(1)


def chosen_cells(
    labels: Labels, most: int, choice: str, seed: tuple[int, ...]
) -> Integers:
    """The cells of an image that are kept, ascending; labels: (cells, pixels).

    Args:
        labels: cells without any are never kept.
        most: the largest number that is.
        choice: `RARE` keeps those with the lowest (sum over their classes of how many patches of
            the image have it) x uniform noise, as Balažević et al. 2023 do; `ANY` those with the
            lowest noise.
        seed: of the noise.
    """
    there = np.flatnonzero(has_label(labels).any(1))
    if len(there) <= most:
        return there
    noise = np.random.default_rng(seed).random(len(there))
    if choice == RARE:
        own = labels[there]
        numbers = np.unique(own)
        present = np.stack([(own == n).any(1) for n in numbers[numbers != IGNORED]], 1)
        noise *= present @ present.sum(0)
    return np.sort(there[np.argsort(noise, kind="stable")[:most]])


@dataclass(frozen=True)
class Collecting:
    """The images, and which of their patches are kept; see `chosen_cells`."""

    part: SplitImages
    most: int
    choice: str
    seed: int


@dataclass
class BankParts(Sums[Collecting]):
    """The kept patches of every site by slab, and the sums of the baselines."""

    parts: dict[str, list[Bank]] = field(default_factory=dict)
    places: Places = field(default_factory=dict)

    def update(self, slab: Slab) -> None:
        """Keep patches of the images of a slab."""
        assert self.work is not None
        work = self.work
        part = self.work.part
        rows = counted_rows(slab)
        kept: dict[str, list[tuple[Integers, Labels]]] = {}
        for row in rows:
            seed = work.seed, 4, int(part.store.samples.index[row])
            for grid, labels in part.truth.cells(row).items():
                cells = chosen_cells(labels, work.most, work.choice, seed)
                kept.setdefault(grid, []).append((cells, labels[cells]))
            for grid, pixels in part.truth.pixels(row).items():
                count_places(self.places, grid, CellSums.of(pixels), part.task.n_targets)
        for site, features in part.features.items():
            own = kept[part.grids[site]]
            tokens = features.of_slab(slab)
            bank = Bank(
                np.concatenate(
                    [x[cells] for x, (cells, _) in zip(tokens, own, strict=True)]
                ),
                np.concatenate([labels for _, labels in own]),
                np.repeat(rows, [len(cells) for cells, _ in own]),
            )
            self.parts.setdefault(site, []).append(bank)

    def bank(self, site: str) -> Bank:
        """Remove and return all patches of a site."""
        every = zip(*(vars(part).values() for part in self.parts.pop(site)), strict=True)
        return Bank(*map(np.concatenate, every))


@dataclass(frozen=True)
class Search:
    """A search among the scaled patches of a bank, `rows` (n, dim), computed on `device`."""

    rows: Float32
    scaling: Scaling
    device: str
    distance: str = COSINE

    def nearest(self, tokens: Float, k: int) -> tuple[Float32, Integers]:
        """Closeness and rows (cells, k), nearest first; tokens: (rows, cols, dim). Closeness is the
        cosine, with ties by row, or minus the squared distance."""
        from vitsee_core.kernels.neighbours import Neighbours
        from vitsee_core.runtime.device import resolve_device

        queries = self.scaling(tokens.reshape(-1, tokens.shape[-1])).astype(np.float32)
        device = resolve_device(self.device)
        if self.distance == L2:
            return _nearest_by_l2(queries, self.rows, k, device)
        found = Neighbours(queries, k, device)
        found.add(self.rows)
        return found.result()


def _nearest_by_l2(
    queries: Float32, rows: Float32, k: int, device: object
) -> tuple[Float32, Integers]:
    """Search by -|q - r|^2 = 2 qr - |q|^2 - |r|^2, in float64 and some rows at a time."""
    import torch

    assert isinstance(device, torch.device)
    exact = (
        torch.device("cpu") if device.type == "mps" else device
    )  # Metal has no float64
    q = torch.from_numpy(queries).to(exact).double()
    best = q.new_empty(len(q), 0)
    which = torch.empty(len(q), 0, dtype=torch.int64, device=exact)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        r = torch.from_numpy(rows[start : start + ROWS_AT_ONCE]).to(exact).double()
        close = 2 * q @ r.T - (r**2).sum(1) - (q**2).sum(1)[:, None]
        near = close.topk(min(k, len(r)), dim=1)
        values = torch.cat([best, near.values], 1)
        numbers = torch.cat([which, near.indices + start], 1)
        best, places = values.topk(min(k, values.shape[1]), dim=1)
        which = numbers.gather(1, places)
    return best.float().cpu().numpy(), which.cpu().numpy()


@dataclass(frozen=True)
class KnnHead:
    """A pixel gets a label made of the neighbours' pixels at its place. labels: (n, pixels) of the
    bank; layout: of the site; join: makes (cells, pixels) of the neighbours' (cells, k, pixels)."""

    search: Search
    labels: Labels
    layout: TokenLayout
    k: int
    join: Callable[[Labels], Labels]

    def predict(self, tokens: Float, pixels: Pixels) -> Labels:
        assert self.layout.stride_px is not None
        _, rows = self.search.nearest(tokens, self.k)
        sides = [round(step) for step in self.layout.stride_px]
        cells = self.join(self.labels[rows]).reshape(*tokens.shape[:2], *sides)
        inside = []
        for axis, cell in enumerate(pixels.nearest):
            begin = self.layout.offset_px[axis] + cell * self.layout.stride_px[axis]
            at = np.floor(pixels.at[axis] - np.rint(begin)).astype(np.int64)
            inside.append(np.clip(at, 0, sides[axis] - 1))
        (row, col), (down, across) = pixels.nearest, inside
        return cells[row[:, None], col, down[:, None], across]


@dataclass(frozen=True)
class HummingbirdScores:
    """The neighbours' shares of classes, weighted by similarity; see `pixels.Scores`. `shares` are
    those of the bank's patches, (n, classes)."""

    search: Search
    shares: Float
    k: int

    def __call__(self, tokens: Float) -> Float:
        cosines, rows = self.search.nearest(tokens, self.k)
        weights = np.exp((cosines.astype(np.float64) - cosines[:, :1]) / TEMPERATURE)
        weights /= weights.sum(1, keepdims=True)
        scores: Float = np.einsum("ck,ckn->cn", weights, self.shares[rows])
        return scores.reshape(*tokens.shape[:2], -1)


def most_votes(labels: ClassMap) -> ClassMap:
    """The class (cells, pixels) that most of the k neighbours (cells, k, pixels) have; the module's
    text says how ties are decided."""
    cells, _, pixels = labels.shape
    classes = np.unique(labels)
    classes = classes[classes != IGNORED]
    if not len(classes):
        return np.full((cells, pixels), IGNORED, np.uint8)
    found = np.empty((cells, pixels), np.uint8)
    step = max(1, AT_ONCE // (pixels * len(classes)))
    for start in range(0, cells, step):
        some = labels[start : start + step]
        votes = np.stack([(some == number).sum(1) for number in classes], -1)
        whole = votes.sum(1).argmax(-1)
        best = np.where(votes.any(-1), votes.argmax(-1), whole[:, None])
        found[start : start + step] = classes[best]
    return found


def mean_depths(depths: Float32) -> Float32:
    """The mean (cells, pixels) of depths (cells, k, pixels); that of the whole patches where no
    neighbour has one."""
    there = np.isfinite(depths)
    known = np.where(there, depths, 0)
    n = there.sum(1)
    sums = known.sum(1)
    whole = (sums.sum(1) / n.sum(1))[:, None]
    return np.where(n > 0, sums / np.maximum(n, 1), whole).astype(np.float32)


def train_from_bank(part: SplitImages, solver: Solver, execution: Execution) -> Trained:
    """Train the probes of every site, and the baselines of every grid.

    Raises:
        VitseeError: no patch has a class, fewer patches than neighbours, cells that are not whole
            pixels, or too few images to choose l2.
    """
    parts, most = _collect(part, solver, execution)
    held_out = drawn(part.store, part.truth.mask, CHOOSING, (execution.seed, 3))
    heads: dict[HeadKey, Head] = {}
    notes: dict[str, Any] = {"patches_of_an_image_at_most": most}
    left_out = 0
    for site in part.features:
        bank = parts.bank(site)
        n = len(bank.tokens)
        if not n:
            raise part.no_pixel("training")
        layout = part.truth.layouts[part.grids[site]]
        left_out = max(left_out, layout.n_body - most)
        notes["patches"] = n
        if solver.name == LOGISTIC:
            of_l2 = _logistic(part, bank, solver, held_out, site)
            notes.setdefault("l2_relative", {})[site] = list(of_l2)
            heads |= {HeadKey(site, l2=l2): head for l2, head in of_l2.items()}
            continue
        if n < max(solver.ks):
            raise VitseeError(
                f"{site}: the bank has {n} patches with a {part.task.label}; --k {max(solver.ks)} "
                "needs as many"
            )
        ks = solver.ks
        distance = solver.distances[0]
        if solver.chooses:
            found = choose_neighbours(bank, held_out, solver, execution.device, site)
            notes.setdefault("chosen", {})[site] = found
            ks = (found["k"],)
            distance = found["distance"]
        search = make_search(bank, solver, distance, execution.device)
        if solver.name == HUMMINGBIRD:
            classes, counts, pixels = bank.histograms()
            shares = counts / pixels[:, None]
        for k in ks:
            if solver.name == HUMMINGBIRD:
                head: Head = ClassHead(classes, HummingbirdScores(search, shares, k))
            else:
                join = mean_depths if part.task.label == "depth" else most_votes
                head = KnnHead(search, bank.labels, layout, k, join)
            heads[HeadKey(site, k=k)] = head
    if part.task.label == "class":
        notes["n_trained"] = int((next(iter(parts.places.values())).totals > 0).sum())
    if left_out > 0:
        notes["left_out"] = f"patches beyond {most} of an image"
        log.info("%s: %d patches of each image are kept", part.store.label, most)
    return Trained(heads | blind_heads(part.task, parts.places), notes)


def _collect(
    part: SplitImages, solver: Solver, execution: Execution
) -> tuple[BankParts, int]:
    """Collect the patches; also return the largest number that is kept of an image."""
    pixels = max(
        layout.stride_px[0] * layout.stride_px[1]
        for layout in part.truth.layouts.values()
        if layout.stride_px is not None
    )
    size_of_label = 4 if part.task.label == "depth" else 1
    each = sum(
        4 * own.dim + size_of_label * int(pixels) for own in part.features.values()
    )
    largest = max(own.dim for own in part.features.values())
    room = execution.budget // 2 // (each + 4 * WORK * largest)
    wanted = room if solver.bank is None else min(solver.bank, room)
    if solver.bank is not None and solver.bank > room:
        raise VitseeError(
            f"--bank {solver.bank} patches of {len(part.features)} sites do not fit into the "
            f"memory; {room} do: give fewer, fewer --sites, or more --memory"
        )
    most = max(1, wanted // part.n_images)
    choice = RARE if solver.name == HUMMINGBIRD else ANY
    make = partial(BankParts, Collecting(part, most, choice, execution.seed))
    return part.fold(make, execution), most


def _logistic(
    part: SplitImages, bank: Bank, solver: Solver, held_out: Mask, site: str
) -> dict[float, Head]:
    """Fit a logistic probe at each l2."""
    classes, counts, _ = bank.histograms()
    if solver.of_patches:
        counts = _most_frequent(bank, counts)
    scaling = Scaling.of(bank.tokens)
    z = scaling(bank.tokens)
    l2s = solver.l2s
    if not l2s:
        held = held_out[bank.rows]
        parts = [Targets.of(z[some], counts[some]) for some in (~held, held)]
        if not all(len(own.z) for own in parts):
            raise VitseeError(
                f"{site}: l2 cannot be chosen, as the training images that fit have "
                f"{len(parts[0].z)} patches with a class and those held out {len(parts[1].z)}; "
                "give it with --l2-relative, or more images"
            )
        l2s = (choose_l2(parts[0], parts[1], solver.grid),)
    found = fit(Targets.of(z, counts), l2s)
    return {
        l2: part.task.head(classes, linear_scores(found[l2], scaling), solver.of_patches)
        for l2 in sorted(found)
    }


def _most_frequent(bank: Bank, counts: Float) -> Float:
    """A matrix (n, classes) with 1 for each patch's most frequent class, of equally many the
    lowest; 0 throughout where more pixels have none."""
    ignored = (bank.labels == IGNORED).sum(1)
    found = np.zeros_like(counts)
    best = counts.argmax(1)
    found[np.arange(len(counts)), best] = counts.max(1) >= ignored
    return found


def make_search(bank: Bank, solver: Solver, distance: str, device: str) -> Search:
    """The search among a bank's patches, standardised if the solver asks for it."""
    scaling = (
        Scaling.of(bank.tokens)
        if solver.standardise
        else Scaling.none(bank.tokens.shape[1])
    )
    return Search(scaling(bank.tokens).astype(np.float32), scaling, device, distance)


def choose_neighbours(
    bank: Bank, held_out: Mask, solver: Solver, device: str, site: str
) -> dict[str, Any]:
    """The `k` and `distance` with the highest mean IoU, `miou_held_out`, on the pixels of held-out
    patches (held_out: of the store's images) by votes of the others; of equal ones the first.

    Raises:
        VitseeError: too few patches to choose by.
    """
    held = held_out[bank.rows]
    fitted = bank.part(~held)
    queries = bank.part(held)
    ks = [k for k in solver.ks if k <= len(fitted.tokens)]
    if not ks or not len(queries.tokens):
        raise VitseeError(
            f"{site}: k cannot be chosen, as the training images that fit have "
            f"{len(fitted.tokens)} patches with a class and those held out {len(queries.tokens)}; "
            "give it with --k, or more images"
        )
    best: dict[str, Any] = {"miou_held_out": -np.inf}
    for distance in solver.distances:
        search = make_search(fitted, solver, distance, device)
        counts = {k: np.zeros((3, IGNORED), np.int64) for k in ks}
        for start in range(0, len(queries.tokens), QUERIES_AT_ONCE):
            part = slice(start, start + QUERIES_AT_ONCE)
            tokens = queries.tokens[part][None].astype(np.float64)
            _, rows = search.nearest(tokens, max(ks))
            truth = queries.labels[part]
            for k in ks:
                found = most_votes(fitted.labels[rows[:, :k]])
                found = np.where(truth == IGNORED, np.uint8(IGNORED), found)
                counts[k] += count_confusions(found, truth)
        for k in ks:
            if (miou := float(mean_iou(counts[k]))) > best["miou_held_out"]:
                best = {"k": k, "distance": distance, "miou_held_out": miou}
    return best
