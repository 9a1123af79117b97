"""HSIC between representations: the choice of images and of the estimator, and the estimator for
sites that have only a Gram matrix within each slab (extract --grams)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

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
    BatchGrams,
    InMemory,
    batch_grams,
    each_batch,
    minibatch,
    over_all_images,
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
from vitsee_core.similarity.scaling import stored_gram_scale
from vitsee_core.similarity.whole_tiles import Matrix
from vitsee_core.types import Float32, Integers
from vitsee_stores.errors import MissingInput, StoreMismatch, VitseeError
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from vitsee_stores import Store

MOST_EXACT = 16384  # images up to which "auto" is exact
# |mean|^2 over the total variance of features: above the first float16 lost digits; above the
# second the features are the same for all images, up to rounding to float32.
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
    """Return the HSIC of every representation in `rows` with every one in `cols`.

    Each representation's Gram matrix is computed once and cached; all pairs, the spread and all
    repeats follow from the matrices alone. Memory stays within `options.memory`, whatever the
    number of images and of representations.

    Args:
        rows: R representations.
        cols: C representations; None: `rows` among themselves.
        estimator: how HSIC is estimated; by default exact for up to `MOST_EXACT` images.
        images: how many images are sampled from the first store; None: all.
        seed: of samples, minibatches, and the jackknife's blocks in stores in the data's order.
        options: resources and the cache.
        pair_by: "image" or "id", how rows of the stores are paired.
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
        # One site without its activations decides for all, as HSIC needs the same pairs
        # of images.
        by_slab = any(r.has_blocks_only for r in comparison.representations)
        # Full float32: TF32 keeps 10 bits of each factor.
        with full_precision(comparison.device), one_blas_thread():
            result = _estimate(comparison, estimator, by_slab)
        if comparison.among_themselves:
            result = symmetric(result)
        offsets: dict[str, float] = {}
        if (
            not by_slab
        ):  # Gram matrices within slabs have no record of the features' offset
            result, offsets = _without_constant_features(comparison, result)
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
    """Yield the comparison, with its cache of Gram matrices open; arguments and errors are those of
    `hsic`."""
    options = options or GramOptions()
    representations = (*rows, *(cols or ()))
    by_slab = any(r.has_blocks_only for r in representations)
    chosen = _choose_images(representations, images, seed, by_slab, pair_by)
    n_images = len(next(iter(chosen.paired.values())))
    notes: dict[str, Any] = {"images": n_images, "seed": seed, **chosen.pairing_notes}
    words = dict.fromkeys(r.tokens for r in representations if r.site.kind != "vector")
    stores = [r.store for r in representations]
    notes["compared"] = compared(stores, ", ".join(words) or "vectors")
    if options.precision != "fp32":
        notes["precision"] = options.precision
    if chosen.remarks:
        notes["remarks"] = chosen.remarks
    with gram_cache(options.cache, options.use_cache, options.precision) as cache:
        comparison = Comparison(
            representations=representations,
            n_rows=len(rows),
            among_themselves=cols is None,
            rows=chosen.paired,
            own=chosen.own,
            shuffled=chosen.shuffled,
            seed=seed,
            device="cpu",
            memory=options.memory or memory_bytes() // 4,
            cache=cache,
            progress=progress,
            notes=notes,
            map=options.map,
        )
        # After the cache is open: matrices that are there cost nothing, which decides the
        # device.
        work = _n_multiplications(comparison)
        device = choose_device(options.device, work)
        _require_precision(options.precision, device, representations)
        yield replace(comparison, device=device, fused=is_worth_compiling(work))


def _require_precision(
    precision: str, device: str, representations: Sequence[Representation]
) -> None:
    """Raise VitseeError for an unknown precision, or one that the device or the store lacks."""
    if precision not in PRECISIONS:
        raise VitseeError(
            f"no precision {precision!r}; expected {' or '.join(PRECISIONS)}"
        )
    if precision == "bf16":
        if any(r.has_blocks_only for r in representations):
            raise VitseeError(
                "--precision bf16 is of Gram matrices that are made now; what extract --grams kept "
                "is there already"
            )
        require_bfloat16(device)


class ChosenImages(NamedTuple):
    """The images that are compared; stores are named by their store_id."""

    paired: dict[
        str, Integers
    ]  # store -> its rows with the images, in the first store's order
    own: dict[str, Integers]  # store -> the rows that it would count by itself
    shuffled: bool  # whether the first store has its images in random order
    pairing_notes: dict[str, Any]
    remarks: list[str]


def _choose_images(
    representations: Sequence[Representation],
    images: int | None,
    seed: int,
    by_slab: bool,
    pair_by: str,
) -> ChosenImages:
    """Return the images that all stores can compare.

    Args:
        representations: of any stores.
        images: how many are sampled; None: all.
        seed: of the sample.
        by_slab: take whole slabs.
        pair_by: "image" or "id".

    Raises:
        StoreMismatch: the stores hold other images.
        VitseeError: fewer than 4 images.
    """
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
    # Gram matrices are made of the rows that a store counts by itself, whatever it is compared
    # with, so that other comparisons can use them, too.
    own: dict[str, Integers] = {}
    for store_id, store in stores.items():
        if pair_by == "image" or store is first:
            own[store_id] = np.flatnonzero(chosen.mask & store.valid)
        elif (
            images is None
        ):  # in another order, where the first store's mask says nothing
            own[store_id] = np.flatnonzero(store.valid)
        else:
            own[store_id] = np.sort(paired[store_id])
    return ChosenImages(
        paired=paired,
        own=own,
        shuffled=first.shuffled,
        pairing_notes=pairing,
        remarks=list(chosen.remarks),
    )


def _estimate(comparison: Comparison, estimator: Estimator, by_slab: bool) -> Hsic:
    """Return what the chosen estimator gives; a damaged Gram matrix is computed again."""
    # At most one damaged matrix for each representation, so that the loop ends.
    for _ in range(len(comparison.representations)):
        try:
            return _estimate_once(comparison, estimator, by_slab)
        except DamagedGram as error:
            log.warning("%s; it is made again", error)
            error.path.unlink(missing_ok=True)
    return _estimate_once(comparison, estimator, by_slab)


def _estimate_once(comparison: Comparison, estimator: Estimator, by_slab: bool) -> Hsic:
    """Return what the chosen estimator gives.

    Raises:
        DamagedGram: a cached matrix is not what was written.
    """
    if by_slab:
        return within_slabs(comparison, estimator)
    kind = estimator.kind
    if kind == "auto":
        has_batch_options = (
            estimator.batch
            or estimator.examples
            or estimator.repeats
            or estimator.rescale
        )
        n = comparison.n_images
        if has_batch_options:
            kind = "minibatch"
        elif n <= MOST_EXACT:
            kind = "exact"
        else:
            kind = "minibatch"
            log.warning(
                "%d images: minibatch CKA (%d images in batches of %d, %d times) in place of exact "
                "(--estimator exact, or --images N with N up to %d)",
                n,
                min(n, EXAMPLES),
                min(n, BATCH),
                REPEATS,
                MOST_EXACT,
            )
    if kind == "minibatch":
        return minibatch(comparison, estimator)
    return over_all_images(comparison, biased=kind == "biased")


def _n_multiplications(comparison: Comparison) -> float:
    """Return about how many multiplications are needed: missing Gram matrices, and all pairs."""
    n = comparison.n_images
    rows, cols = comparison.split(comparison.representations)
    missing = [
        r
        for r in comparison.representations
        if not r.has_blocks_only and comparison.find(r) is None
    ]
    n_features = sum(r.features.n_features for r in missing)
    n_pairs = len(rows) * len(cols or rows)
    # Matrices are symmetric: half of the n^2 pairs of images.
    return n * n / 2 * (n_features + n_pairs)


def _is_rounded(r: Representation) -> bool:
    """Return whether features were rounded to float16 when they were stored."""
    is_pooled = r.tokens in ("cls", "mean", "mean-all")  # vectors in float32 of their own
    return r.stored.kind != "vector" and r.stored.dtype == "float16" and not is_pooled


def _without_constant_features(
    comparison: Comparison, result: Hsic
) -> tuple[Hsic, dict[str, float]]:
    """Return the result with NaN for features that are constant up to rounding, and the offsets of
    others that are almost constant. Both are logged.

    Returns:
        The result; and site -> |mean|^2 over the total variance, for the ill-conditioned ones.
    """
    offsets: dict[str, float] = {}
    rounded = {True: dict[str, float](), False: dict[str, float]()}  # to float16
    constant: list[int] = []  # indices of representations
    names: list[str] = []
    for index, r in enumerate(comparison.representations):
        file = comparison.find(r)
        offset = 0.0 if file is None else file.header.offset
        names.append(f"{r.store.label} {r.stored.name}")
        # |mean|^2 over the total variance, as the file's header records it
        if offset > CONSTANT:
            constant.append(index)
        elif offset > ILL_CONDITIONED:
            offsets[names[index]] = offset
            rounded[_is_rounded(r)][names[index]] = offset
    if rounded[True]:
        log.warning(
            "features that are almost the same for all images, whose differences lost digits when "
            "they were stored: %s (|mean|^2 up to %.0e times the variance; extract such sites with "
            "--dtype SITE=float32, or import them so)",
            abbreviate(list(rounded[True])),
            max(rounded[True].values()),
        )
    if rounded[False]:
        log.warning(
            "features that are almost the same for all images, whose differences have few digits "
            "in float32: %s (|mean|^2 up to %.0e times the variance)",
            abbreviate(list(rounded[False])),
            max(rounded[False].values()),
        )
    if constant:
        log.warning(
            "the same for all images, so without a value: %s",
            abbreviate(list(dict.fromkeys(names[index] for index in constant))),
        )
    n_rows = comparison.n_rows
    # Indices among all representations -> among rows and among columns.
    rows = [index for index in constant if index < n_rows]
    cols = [index - n_rows for index in constant if index >= n_rows]
    if comparison.among_themselves:
        cols = rows
    return set_to_nan(result, rows, cols), offsets


def within_slabs(comparison: Comparison, estimator: Estimator) -> Hsic:
    """Return the mean HSIC_1 over slabs, weighted by their images; replicates leave out one slab,
    if there are at least 10.

    Raises:
        MissingInput: the estimator needs pairs of images across slabs.
        StoreMismatch: the stores' slabs differ.
        VitseeError: no slab has 4 images.
    """
    slab_size, named = _require_slabs(comparison, estimator)
    rows = comparison.rows_of(comparison.representations[0])
    if not all(np.array_equal(rows, other) for other in comparison.rows.values()):
        raise StoreMismatch(
            f"{named}: slabs compare where the stores hold the same ids in the same order (extract "
            "both with the same --images, --seed and --order)"
        )
    # (images,) by the rows' numbers, as slabs are runs of rows.
    slab_of_image = rows // slab_size
    slabs = [np.flatnonzero(slab_of_image == k) for k in np.unique(slab_of_image)]
    used = [slab for slab in slabs if len(slab) >= 4]  # HSIC_1 divides by n - 3
    if not used:
        raise VitseeError(
            f"{named}, all slabs of fewer than 4 images; CKA needs at least 4"
        )
    if len(used) < len(slabs):
        log.warning(
            "slabs of fewer than 4 images are left out: %d", len(slabs) - len(used)
        )
    log.warning(
        "%s: minibatch CKA with slabs as batches, once (slabs: %d)", named, len(used)
    )
    grams = _grams_within_slabs(comparison, used, slab_size)
    slab_values = list(each_batch(comparison, grams, len(used)))
    # Slabs may lack unreadable images, and the last is short.
    sizes = [len(slab) for slab in used]
    value = weighted_sum(slab_values, sizes)
    notes: dict[str, Any] = {
        "estimator": "minibatch",
        "hsic": "HSIC_1 (unbiased) in each slab; ratio of means over slabs, weighed by images",
        "batch": slab_size,
        "batches": len(used),
        "repeats": 1,
    }
    if len(used) < FEWEST_SLABS:
        notes["spread"] = f"none: fewer than {FEWEST_SLABS} slabs"
        log.warning("no error bars: fewer than %d slabs", FEWEST_SLABS)
        return replace(value, n_images=sum(sizes), notes=notes)
    # A weight of 0 leaves a slab out; nothing is computed anew.
    replicates = []
    for left_out in range(len(used)):
        weights: list[float] = list(sizes)
        weights[left_out] = 0
        replicates.append(weighted_sum(slab_values, weights))
    return replace(
        value,
        replicates=stacked(replicates),
        spread="slabs",
        n_images=sum(sizes),
        notes=notes,
    )


def _require_slabs(comparison: Comparison, estimator: Estimator) -> tuple[int, str]:
    """Return the slab size, and words for the sites that have only Gram matrices within slabs.

    Raises:
        StoreMismatch: the stores' slabs differ in size.
        MissingInput: the estimator needs pairs of images across slabs.
    """
    limited = [r for r in comparison.representations if r.has_blocks_only]
    site = limited[0].stored.name
    names = list(dict.fromkeys(f"{r.store.label} {r.stored.name}" for r in limited))
    named = f"only Gram matrices within slabs were kept of {abbreviate(names)}"
    sizes = {r.store.plan.slab: r.store.label for r in limited}
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


def _grams_within_slabs(
    comparison: Comparison, slabs: Sequence[Integers], slab_size: int
) -> list[BatchGrams]:
    """Return every representation's Gram matrices within the slabs: stored ones, or computed now.

    Args:
        comparison: of the representations.
        slabs: the images of each slab, as indices of the comparison's images.
        slab_size: of the stores.
    """
    # Sites that keep activations get Gram matrices of the same slabs.
    with_acts = [r for r in comparison.representations if not r.has_blocks_only]
    computed = iter(
        batch_grams(replace(comparison, representations=tuple(with_acts)), slabs)
    )
    grams: list[BatchGrams] = []
    for r in comparison.representations:
        if r.has_blocks_only:
            rows = comparison.rows_of(r)
            slab_rows = [rows[images] for images in slabs]
            scale = stored_gram_scale(r.store, r.stored.name)
            grams.append(partial(_stored_slab_gram, r, slab_rows, slab_size, scale))
        else:
            grams.append(next(computed))
    return grams


def _stored_slab_gram(
    representation: Representation,
    slab_rows: Sequence[Integers],
    slab_size: int,
    scale: float,
    batch: int,
) -> Matrix:
    """Return the stored Gram matrix of the images of one slab, of scaled features.

    Args:
        representation: whose store keeps Gram matrices within slabs.
        slab_rows: rows of the store in each compared slab.
        slab_size: of the store.
        scale: of the features, a power of two.
        batch: which of the compared slabs.
    """
    rows = slab_rows[batch]
    # All rows are of one slab.
    slab = int(rows[0]) // slab_size
    positions = rows - slab * slab_size  # within the slab

    def load() -> Float32:
        """Return (images, images) of the slab."""
        stored = representation.store.grams(representation.stored.name)[slab]
        gram: Float32 = stored[np.ix_(positions, positions)]
        if scale != 1:
            # Twice the scale rather than once its square, which float32 may not hold.
            gram *= np.float32(scale)
            gram *= np.float32(scale)
        return gram

    return InMemory(len(rows), load)
