"""Training of probes that need patches in memory: logistic regression and nearest neighbours.

The number of neighbours and the distance are chosen by the patches of held-out training images.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.dense_probe import logistic
from vitsee_core.analyses.dense_probe.cells import ClassHead, Head
from vitsee_core.analyses.dense_probe.labelled_images import CHOOSING, drawn
from vitsee_core.analyses.dense_probe.metrics import counted, mean_iou
from vitsee_core.analyses.dense_probe.neighbours import (
    HummingbirdScores,
    KnnHead,
    Scaling,
    Search,
    mean_depths,
    most_votes,
)
from vitsee_core.analyses.dense_probe.patch_bank import ANY, RARE, Bank, BankParts, Collecting
from vitsee_core.analyses.dense_probe.protocols import HUMMINGBIRD, LOGISTIC, Solver
from vitsee_core.analyses.dense_probe.work import HeadKey, Part, Trained, blind_heads
from vitsee_core.masks.class_maps import IGNORED
from vitsee_core.types import Float, Mask
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution

log = logging.getLogger(__name__)

QUERIES_AT_ONCE = 1024
WORK = 4  # times the bytes of a bank's tokens that a solver takes for copies


def train_from_bank(part: Part, solver: Solver, execution: Execution) -> Trained:
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
        ks, distance = solver.ks, solver.distances[0]
        if solver.chooses:
            found = choose_neighbours(bank, held_out, solver, execution.device, site)
            notes.setdefault("chosen", {})[site] = found
            ks, distance = (found["k"],), found["distance"]
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


def _collect(part: Part, solver: Solver, execution: Execution) -> tuple[BankParts, int]:
    """Collect the patches; also return the largest number that is kept of an image."""
    pixels = max(
        layout.stride_px[0] * layout.stride_px[1]
        for layout in part.truth.layouts.values()
        if layout.stride_px is not None
    )
    size_of_label = 4 if part.task.label == "depth" else 1
    each = sum(4 * own.dim + size_of_label * int(pixels) for own in part.features.values())
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
    part: Part, bank: Bank, solver: Solver, held_out: Mask, site: str
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
        parts = [logistic.Targets.of(z[some], counts[some]) for some in (~held, held)]
        if not all(len(own.z) for own in parts):
            raise VitseeError(
                f"{site}: l2 cannot be chosen, as the training images that fit have "
                f"{len(parts[0].z)} patches with a class and those held out {len(parts[1].z)}; "
                "give it with --l2-relative, or more images"
            )
        l2s = (logistic.choose_l2(parts[0], parts[1], solver.grid),)
    found = logistic.fit(logistic.Targets.of(z, counts), l2s)
    return {
        l2: part.task.head(classes, logistic.scores(found[l2], scaling), solver.of_patches)
        for l2 in sorted(found)
    }


def _most_frequent(bank: Bank, counts: Float) -> Float:
    """(n, classes) 1 for each patch's most frequent class, of equally many the lowest; 0 throughout
    where more pixels have none."""
    ignored = (bank.labels == IGNORED).sum(1)
    found = np.zeros_like(counts)
    best = counts.argmax(1)
    found[np.arange(len(counts)), best] = counts.max(1) >= ignored
    return found


def make_search(bank: Bank, solver: Solver, distance: str, device: str) -> Search:
    """The search among a bank's patches, standardised if the solver asks for it."""
    scaling = Scaling.of(bank.tokens) if solver.standardise else Scaling.none(bank.tokens.shape[1])
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
    fitted, queries = bank.part(~held), bank.part(held)
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
                counts[k] += counted(found, truth)
        for k in ks:
            if (miou := float(mean_iou(counts[k]))) > best["miou_held_out"]:
                best = {"k": k, "distance": distance, "miou_held_out": miou}
    return best
