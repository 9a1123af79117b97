"""HSIC between representations: choice of images and estimator; and the estimator for sites with
only a Gram matrix within each slab (extract --grams)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.features import compared
from vitsee_core.kernels.backend import (
    PRECISIONS,
    choose_device,
    full_precision,
    is_worth_compiling,
    require_bfloat16,
)
from vitsee_core.runtime.lanes import one_blas_thread
from vitsee_core.runtime.machine import memory_bytes, plural
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_core.runtime.streaming import choose_rows
from vitsee_core.similarity.cache import gram_cache
from vitsee_core.similarity.comparison import Comparison, Estimator, GramOptions
from vitsee_core.similarity.estimators import (
    BATCH,
    EXAMPLES,
    REPEATS,
    InMemory,
    OfBatch,
    each_batch,
    minibatch,
    over_all_images,
    own_grams,
)
from vitsee_core.similarity.gram_file import DamagedGram
from vitsee_core.similarity.hsic_sums import (
    METHODS,
    Hsic,
    set_to_nan,
    stacked,
    symmetric,
    weighted_sum,
)
from vitsee_core.similarity.pairs import paired_rows
from vitsee_core.similarity.representation import Representation
from vitsee_core.similarity.whole_tiles import Matrix
from vitsee_core.types import Float32, Integers
from vitsee_stores.errors import MissingInput, StoreMismatch, VitseeError
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from vitsee_stores import Store

MOST_EXACT = 16384
# |mean|^2 over the total variance: above, float16 lost digits; and what rounding to float32 leaves
# of features that are the same for all images.
ILL_CONDITIONED = 1e4
CONSTANT = (8 * np.finfo(np.float32).eps) ** -2.0

log = logging.getLogger(__name__)
FEWEST_SLABS = 10


def hsic(
    rows: Sequence[Representation],
    cols: Sequence[Representation] | None = None,
    *,
    estimator: Estimator | None = None,
    images: int | None = None,
    seed: int = 0,
    options: GramOptions | None = None,
    pair_by: str = "image",
    progress: Progress = SILENT,
) -> Hsic:
    """HSIC of every representation in `rows` with every one in `cols`.

    Each representation's Gram matrix is computed once and cached, see `GramOptions`; all pairs, the
    spread and all repeats follow from the matrices alone. Memory: `options.memory`, whatever the
    number of images and of representations.

    Args:
        rows: R representations.
        cols: C representations; None: `rows` among themselves.
        estimator: see `Estimator`.
        images: see `streaming.choose_rows`.
        seed: of samples, minibatches, and the jackknife's blocks in stores in the data's order.
        options: see `GramOptions`.
        pair_by: see `paired_rows`.
        progress: counts finished Gram matrices, and the bytes read for them.

    Raises:
        StoreMismatch: stores of other images, or within-slab Gram matrices of different slabs.
        MissingInput: an estimate across slabs was requested, and only those within are stored.
        VitseeError: fewer than 4 images in common, not enough disk or memory.
    """
    estimator = estimator or Estimator()
    with comparing(
        rows,
        cols,
        images=images,
        seed=seed,
        options=options,
        pair_by=pair_by,
        progress=progress,
    ) as comparison:
        by_slab = any(r.has_blocks_only for r in comparison.representations)
        with full_precision(comparison.device), one_blas_thread():
            result = _estimate(comparison, estimator, by_slab)
        if comparison.among_themselves:
            result = symmetric(result)
        result, offsets = (result, {}) if by_slab else _conditioned(comparison, result)
    notes = {"spread": METHODS[result.spread], **result.notes, **comparison.notes}
    if offsets:
        notes["common_offset"] = offsets
    return replace(result, n_images=result.n_images or comparison.n_images, notes=notes)


@contextmanager
def comparing(
    rows: Sequence[Representation],
    cols: Sequence[Representation] | None = None,
    *,
    images: int | None = None,
    seed: int = 0,
    options: GramOptions | None = None,
    pair_by: str = "image",
    progress: Progress = SILENT,
) -> Iterator[Comparison]:
    """Context with the comparison and its cache of Gram matrices; arguments and errors as for
    `hsic`."""
    options = options or GramOptions()
    representations = (*rows, *(cols or ()))
    by_slab = any(r.has_blocks_only for r in representations)
    paired, pairing, own, shuffled, remarks = _images(
        representations, images, seed, by_slab, pair_by
    )
    counted = next(iter(paired.values()))
    notes: dict[str, Any] = {"images": len(counted), "seed": seed, **pairing}
    words = dict.fromkeys(r.tokens for r in representations if r.site.kind != "vector")
    of_stores = [r.store for r in representations]
    notes["compared"] = compared(of_stores, ", ".join(words) or "vectors")
    if options.precision != "fp32":
        notes["precision"] = options.precision
    if remarks:
        notes["remarks"] = remarks
    with gram_cache(options.cache, options.use_cache, options.precision) as cache:
        comparison = Comparison(
            representations=representations,
            n_rows=len(rows),
            among_themselves=cols is None,
            rows=paired,
            own=own,
            shuffled=shuffled,
            seed=seed,
            device="cpu",
            memory=options.memory or memory_bytes() // 4,
            cache=cache,
            progress=progress,
            notes=notes,
            map=options.map,
        )
        work = _work(comparison)
        device = choose_device(options.device, work)
        _require(options.precision, device, representations)
        yield replace(comparison, device=device, fused=is_worth_compiling(work))


def _require(precision: str, device: str, of: Sequence[Representation]) -> None:
    """Refuse an unknown precision, or one that this device lacks."""
    if precision not in PRECISIONS:
        raise VitseeError(
            f"no precision {precision!r}; expected {' or '.join(PRECISIONS)}"
        )
    if precision == "bf16":
        if any(r.has_blocks_only for r in of):
            raise VitseeError(
                "--precision bf16 is of Gram matrices that are made now; what extract --grams kept "
                "is there already"
            )
        require_bfloat16(device)


def _images(
    representations: Sequence[Representation],
    images: int | None,
    seed: int,
    by_slab: bool,
    pair_by: str,
) -> tuple[dict[str, Integers], dict[str, Any], dict[str, Integers], bool, list[str]]:
    """Rows counted in all stores, by store_id, with notes on their pairing; those that each counts
    by itself; whether they are in random order; remarks."""
    stores: dict[str, Store] = {
        r.store.manifest.store_id: r.store for r in representations
    }
    first = next(iter(stores.values()))
    chosen = choose_rows(first, images, seed, whole_slabs=by_slab)
    for remark in chosen.remarks:
        log.info("%s", remark)
    paired, pairing = paired_rows(list(stores.values()), chosen, pair_by)
    n = len(paired[first.manifest.store_id])
    if n < 4:
        raise VitseeError(
            f"{plural(n, 'images')} readable in all stores; expected at least 4"
        )
    own = {i: np.flatnonzero(chosen.mask & first.valid) for i in stores}
    for i, store in stores.items():
        if pair_by == "image":
            own[i] = np.flatnonzero(chosen.mask & store.valid)
        elif (
            store is not first
        ):  # in another order: all its rows, or those with a partner
            own[i] = np.flatnonzero(store.valid) if images is None else np.sort(paired[i])
    shuffled = first.shuffled
    return paired, pairing, own, shuffled, list(chosen.remarks)


def _estimate(comparison: Comparison, estimator: Estimator, by_slab: bool) -> Hsic:
    """Apply the chosen estimator; a damaged Gram matrix is computed again."""
    for _ in range(len(comparison.representations)):
        try:
            return _by_kind(comparison, estimator, by_slab)
        except DamagedGram as error:
            log.warning("%s; it is made again", error)
            error.path.unlink(missing_ok=True)
    return _by_kind(comparison, estimator, by_slab)


def _by_kind(comparison: Comparison, estimator: Estimator, by_slab: bool) -> Hsic:
    if by_slab:
        return within_slabs(comparison, estimator)
    kind = estimator.kind
    if kind == "auto":
        asked = (
            estimator.batch
            or estimator.examples
            or estimator.repeats
            or estimator.rescale
        )
        kind = "minibatch" if asked or comparison.n_images > MOST_EXACT else "exact"
        if kind == "minibatch" and not asked:
            n = comparison.n_images
            log.warning(
                "%d images: minibatch CKA (%d images in batches of %d, %d times) in place of exact "
                "(--estimator exact, or --images N with N up to %d)",
                *(n, min(n, EXAMPLES), min(n, BATCH), REPEATS, MOST_EXACT),
            )
    if kind == "minibatch":
        return minibatch(comparison, estimator)
    return over_all_images(comparison, biased=kind == "biased")


def _work(comparison: Comparison) -> float:
    """Approximate number of multiplications: missing Gram matrices, and all pairs."""
    n, (rows, cols) = comparison.n_images, comparison.split(comparison.representations)
    missing = [
        r
        for r in comparison.representations
        if not r.has_blocks_only and comparison.find(r) is None
    ]
    columns = sum(r.features.n_features for r in missing)
    return n * n / 2 * (columns + len(rows) * len(cols or rows))


def _conditioned(comparison: Comparison, result: Hsic) -> tuple[Hsic, dict[str, float]]:
    """No value for features that are constant up to rounding; and |mean|^2 over the total variance
    of those whose offset cost digits when they were stored. Both are logged."""
    offsets: dict[str, float] = {}
    constant: list[int] = []
    names: dict[int, str] = {}
    for place, r in enumerate(comparison.representations):
        file = comparison.find(r)
        offset = 0.0 if file is None else file.header.offset
        names[place] = f"{r.store.label} {r.stored.name}"
        if offset > CONSTANT:
            constant.append(place)
        elif offset > ILL_CONDITIONED:
            offsets[names[place]] = offset
    if offsets:
        log.warning(
            "features that are almost the same for all images, whose differences lost digits when "
            "they were stored: %s (|mean|^2 up to %.0e times the variance; extract such sites with "
            "--dtype SITE=float32)",
            *(abbreviate(list(offsets)), max(offsets.values())),
        )
    if constant:
        log.warning(
            "the same for all images, so without a value: %s",
            abbreviate(list(dict.fromkeys(names[place] for place in constant))),
        )
    rows = [place for place in constant if place < comparison.n_rows]
    cols = (
        rows
        if comparison.among_themselves
        else [p - comparison.n_rows for p in constant if p >= comparison.n_rows]
    )
    return set_to_nan(result, rows, cols), offsets


def within_slabs(comparison: Comparison, estimator: Estimator) -> Hsic:
    """The mean HSIC_1 over slabs, weighted by their images; replicates leave out one slab, if there
    are at least 10.

    Raises:
        MissingInput: the estimator needs pairs of images across slabs.
        StoreMismatch: the stores' slabs differ.
        VitseeError: no slab has 4 images.
    """
    slab, named = _require_slabs(comparison, estimator)
    rows = comparison.rows_of(comparison.representations[0])
    if not all(np.array_equal(rows, other) for other in comparison.rows.values()):
        raise StoreMismatch(
            f"{named}: slabs compare where the stores hold the same ids in the same order (extract "
            "both with the same --images, --seed and --order)"
        )
    labels = rows // slab
    cells = [np.flatnonzero(labels == k) for k in np.unique(labels)]
    used = [cell for cell in cells if len(cell) >= 4]
    if not used:
        raise VitseeError(
            f"{named}, all slabs of fewer than 4 images; CKA needs at least 4"
        )
    if len(used) < len(cells):
        log.warning(
            "slabs of fewer than 4 images are left out: %d", len(cells) - len(used)
        )
    log.warning(
        "%s: minibatch CKA with slabs as batches, once (slabs: %d)", named, len(used)
    )
    parts = list(each_batch(comparison, _grams(comparison, used, slab), len(used)))
    sizes = [len(cell) for cell in used]
    value = weighted_sum(parts, sizes)
    notes: dict[str, Any] = {
        "estimator": "minibatch",
        "hsic": "HSIC_1 (unbiased) in each slab; ratio of means over slabs, weighed by images",
        **{"batch": slab, "batches": len(used), "repeats": 1},
    }
    if len(used) < FEWEST_SLABS:
        notes["spread"] = f"none: fewer than {FEWEST_SLABS} slabs"
        log.warning("no error bars: fewer than %d slabs", FEWEST_SLABS)
        return replace(value, n_images=sum(sizes), notes=notes)
    without = [
        weighted_sum(
            parts, [0 if k == left_out else size for k, size in enumerate(sizes)]
        )
        for left_out in range(len(used))
    ]
    return replace(
        value,
        replicates=stacked(without),
        spread="slabs",
        n_images=sum(sizes),
        notes=notes,
    )


def _require_slabs(comparison: Comparison, estimator: Estimator) -> tuple[int, str]:
    """The slab size, and a description of the limited sites."""
    only = [r for r in comparison.representations if r.has_blocks_only]
    site = only[0].stored.name
    names = list(dict.fromkeys(f"{r.store.label} {r.stored.name}" for r in only))
    named = f"only Gram matrices within slabs were kept of {abbreviate(names)}"
    sizes = {r.store.plan.slab: r.store.label for r in only}
    if len(sizes) > 1:
        described = ", ".join(f"{label}: {size} images" for size, label in sizes.items())
        raise StoreMismatch(
            f"Gram matrices within slabs of different sizes ({described}) do not compare; extract "
            "both with the same --slab"
        )
    (slab,) = sizes
    if estimator.kind in ("exact", "biased"):
        raise MissingInput(
            f"{named}: --estimator {estimator.kind} needs pairs of images across slabs (extract "
            f"it with --tokens {site}=all)"
        )
    if estimator.rescale or estimator.examples or estimator.repeats not in (None, 1):
        raise MissingInput(
            f"{named}: the slabs are the batches, once; leave out --examples, --repeats, --preset"
        )
    if estimator.batch not in (None, slab):
        raise MissingInput(
            f"{named}: --batch {estimator.batch} is not their slab of {slab} images"
        )
    return slab, named


def _grams(comparison: Comparison, cells: Sequence[Integers], slab: int) -> list[OfBatch]:
    """Every representation's Gram matrices within the slabs: stored ones, or computed now."""
    with_acts = [r for r in comparison.representations if not r.has_blocks_only]
    made = iter(own_grams(replace(comparison, representations=tuple(with_acts)), cells))
    return [
        partial(_stored, r, [comparison.rows_of(r)[cell] for cell in cells], slab)
        if r.has_blocks_only
        else next(made)
        for r in comparison.representations
    ]


def _stored(
    of: Representation, cells: Sequence[Integers], slab: int, batch: int
) -> Matrix:
    rows = cells[batch]
    k = int(rows[0]) // slab
    places = rows - k * slab

    def load() -> Float32:
        return of.store.grams(of.stored.name)[k][np.ix_(places, places)]

    return InMemory(len(rows), load)
