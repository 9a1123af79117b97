"""Norms and largest activations of tokens, and outliers among the norms of patch tokens.

Outliers are described by thresholds, shares, bimodality and histograms.

Stores keep the dot products z.z, f.f and z.f of every residual sublayer's skip z and branch f, for
every token. A site that is the skip of a sublayer, as the output of block b is that of the
attention in block b + 1, has the norm sqrt(z.z); the sum of a sublayer has sqrt(z.z + 2 z.f + f.f).
So stores without activations (`extract --tokens pooled`) have norms, too. Which site is which
follows from the store's aliases and from the sums that the self-check proved; an output behind an
activation function (ResNet v1) or a norm is not a sum, and needs the activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features.matrix import not_finite
from vitsee_core.features.reader import widened
from vitsee_core.statistics.skip_branch import ROUNDING
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.errors import MissingInput

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Slab, Store

# The last word of a sublayer's name -> that of the site it adds its branch to (its skip), and that
# of the sum.
SKIPS = {"attn": "in", "token": "in", "mlp": "mid", "channel": "mid"}
SUMS = {"attn": "mid", "token": "mid", "mlp": "out", "channel": "out"}
IMAGES_AT_ONCE = 8  # activations in float64 at a time
N_MAD = 6.0
MAD_SCALE = 1.4826  # makes the median absolute deviation of a normal sample its sigma
BINS_PER_OCTAVE = 8  # of the histogram of norms
NORMS_AT_ONCE = 1 << 18
MIN_LOG_VARIANCE = 1e-24  # below it, all norms are alike to 12 digits


@dataclass(frozen=True)
class NormSource:
    """The source of a site's norms.

    Attributes:
        sublayer: name of the sublayer whose dot products are read; "" for the activations.
        is_sum: whether the site is the sum of the sublayer; else it is its skip.
    """

    sublayer: str = ""
    is_sum: bool = False

    def describe(self) -> str:
        """Return the source in words, for the table's notes."""
        if not self.sublayer:
            return "activations"
        products = "z.z + 2 z.f + f.f" if self.is_sum else "z.z"
        return f"residual/{self.sublayer}: {products}"


def norm_source(store: Store, site: SiteSpec) -> NormSource:
    """Return the dot products that give a site's squared norms, or else its activations.

    Raises:
        MissingInput: the store has neither.
    """
    site = store.site(site.name)
    aliases = {spec.name for spec in store.plan.sites if spec.alias_of == site.name}
    names = {site.name} | aliases
    sublayers = [name for name, layout in store.plan.sublayers if layout == site.layout]
    # Skips first: z.z is one stored product, while a sum of three rounds more.
    for sublayer in sublayers:
        if names & set(_skip_names(sublayer)):
            return NormSource(sublayer)
    # Without its skip, a sublayer's output is the branch and not the sum.
    without_skip = store.manifest.identity.get("ablate_skip") or ()
    for sublayer in sublayers:
        if _sum_name(store, sublayer) in names and sublayer not in without_skip:
            return NormSource(sublayer, is_sum=True)
    if site.tokens == "all":
        return NormSource()
    raise MissingInput(
        f"{store.label} keeps {site.name} pooled only, and no dot products of it: "
        f"extract it with --tokens {site.name}=all -o NEW.zarr (every site: --tokens all)"
    )


def _skip_names(sublayer: str) -> tuple[str, ...]:
    """Return the possible names of the site that is a sublayer's skip."""
    block, _, word = sublayer.rpartition(".")
    if word in SKIPS:
        return (f"{block}.{SKIPS[word]}",)
    return f"{sublayer}.shortcut", f"{sublayer}.in"


def _sum_name(store: Store, sublayer: str) -> str:
    """Return the site that is skip + branch of a sublayer; "" if something may follow the sum."""
    block, _, word = sublayer.rpartition(".")
    if word in SUMS:
        return f"{block}.{SUMS[word]}"
    # A block that is one sublayer: parallel ones have an `in`; CNNs have not, and an activation
    # may follow.
    if f"{sublayer}.in" in store.sites:
        return f"{sublayer}.out"
    return ""


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics of one site, by image.

    All but `norms` need activations, and are empty without them.

    Attributes:
        norms: (images, tokens).
        largest: (images,) largest |x| over all tokens and channels.
        median: (images,) median of |x|.
        channel, token: (images,) where the largest lies.
        neighbour_cos: (images,) of `neighbour_cosines`.
    """

    norms: Float
    largest: Float
    median: Float
    channel: Integers
    token: Integers
    neighbour_cos: Float

    @classmethod
    def join(cls, slabs: Iterable[TokenStatistics], n_images: int) -> TokenStatistics:
        """Return the statistics of several slabs, without holding all in memory twice."""
        joined: dict[str, NDArray[Any]] = {}
        n_done = 0
        for statistics in slabs:
            for field in fields(cls):
                values = getattr(statistics, field.name)
                if field.name not in joined:
                    # Allocated at once, so that a slab can be freed after its copy.
                    shape = (n_images if len(values) else 0, *values.shape[1:])
                    joined[field.name] = np.empty(shape, values.dtype)
                joined[field.name][n_done : n_done + len(values)] = values
            n_done += len(statistics.norms)
        return cls(**joined)


class ActivationStatistics(NamedTuple):
    """The fields of `TokenStatistics` that need activations, of some images."""

    largest: Float
    median: Float
    channel: Integers
    token: Integers
    neighbour_cos: Float


@dataclass(frozen=True)
class ReadTokens:
    """Reads the statistics of one site from a slab.

    Attributes:
        site: name of a stored site.
        source: where its norms come from.
        with_activations: whether statistics that are not norms are read.
        n_prefix: number of tokens before the patches.
        body: (rows, cols) of the grid, of clips (frames, rows, cols); None without a grid.
    """

    site: str
    source: NormSource
    with_activations: bool
    n_prefix: int
    body: tuple[int, ...] | None

    def __call__(self, slab: Slab) -> TokenStatistics:
        """Return the statistics of the slab's images that count.

        Raises:
            VitseeError: a number is not finite.
        """
        norms = np.zeros(0)
        pieces: list[ActivationStatistics] = []
        if self.source.sublayer:
            norms = _read_product_norms(slab, self.source)
        if self.with_activations or not self.source.sublayer:
            stored = slab.acts(self.site)[slab.valid]  # (images, tokens, dim)
            norm_pieces = []
            # Overflow in half precision is refused below, in one line.
            with np.errstate(invalid="ignore"):
                for first in range(0, len(stored), IMAGES_AT_ONCE):
                    piece = stored[first : first + IMAGES_AT_ONCE]
                    acts, _ = widened(piece)
                    if not self.source.sublayer:
                        norm_pieces.append(_token_norms(acts))
                    if self.with_activations:
                        pieces.append(self._measure(piece, acts))
            if not self.source.sublayer:
                norms = np.concatenate(norm_pieces)
        statistics = _join_pieces(pieces)
        if not (np.isfinite(norms).all() and np.isfinite(statistics.largest).all()):
            raise not_finite(slab.store, self.site, slab.rows)
        return TokenStatistics(norms=norms, **statistics._asdict())

    def _measure(
        self, stored: NDArray[np.floating], acts: Float32
    ) -> ActivationStatistics:
        """Return the statistics of (images, tokens, dim), as stored and widened."""
        sizes = np.abs(acts).reshape(len(acts), -1)  # (images, tokens * dim)
        index = sizes.argmax(1)
        largest = np.take_along_axis(sizes, index[:, np.newaxis], 1)[:, 0]
        if stored.dtype == np.float16:
            median = medians_of_half(stored.reshape(len(stored), -1))
        else:
            # Last use of the sizes, so that no copy is sorted.
            median = np.median(sizes, axis=1, overwrite_input=True).astype(np.float64)
        neighbour_cos = np.full(len(acts), np.nan)
        if self.body is not None:
            patches = acts[:, self.n_prefix :].reshape(len(acts), *self.body, -1)
            neighbour_cos = neighbour_cosines(patches)
        token, channel = np.divmod(index, acts.shape[-1])
        return ActivationStatistics(
            largest=largest.astype(np.float64),
            median=median,
            channel=channel.astype(np.int64),
            token=token.astype(np.int64),
            neighbour_cos=neighbour_cos,
        )


def _token_norms(acts: Float32) -> Float:
    """Return the norms of (images, tokens, dim), with sums in float64: (images, tokens)."""
    return np.sqrt(np.einsum("itd,itd->it", acts, acts, dtype=np.float64))


def _join_pieces(pieces: Sequence[ActivationStatistics]) -> ActivationStatistics:
    """Return the statistics of all pieces in order; empty arrays if there is none."""
    if not pieces:
        empty = np.zeros(0)
        no_indices = np.zeros(0, np.int64)
        return ActivationStatistics(empty, empty, no_indices, no_indices, empty)
    return ActivationStatistics(
        *(np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
    )


def medians_of_half(x: NDArray[np.float16]) -> Float:
    """Return the median of each row of |x|: (images,).

    Half precision has 2^15 sizes, which are in order as integers: they are counted instead of
    sorted.

    Args:
        x: (images, values) without NaN.
    """
    n_values = x.shape[1]
    ranks = [(n_values - 1) // 2, n_values // 2]  # equal for an odd number of values
    sizes = x.view(np.uint16) & np.uint16(0x7FFF)  # without the sign bit
    middles = np.empty((len(x), 2), np.uint16)
    for i, image_sizes in enumerate(sizes):
        n_up_to = np.bincount(image_sizes, minlength=1 << 15).cumsum()
        middles[i] = np.searchsorted(n_up_to, ranks, "right")
    return middles.view(np.float16).astype(np.float32).mean(1).astype(np.float64)


def _read_product_norms(slab: Slab, source: NormSource) -> Float:
    """Return the norms from a sublayer's dot products: (images, tokens)."""
    products = slab.residual(source.sublayer)[slab.valid].astype(np.float64)
    zz, ff, zf = np.moveaxis(products, -1, 0)
    squared = zz
    if source.is_sum:
        squared = zz + 2 * zf + ff
        # Skip and branch cancel to within the rounding of the products.
        squared[squared <= ROUNDING * (zz + ff)] = 0
    return np.sqrt(squared)


def neighbour_cosines(patches: Float32) -> Float:
    """Return the mean over patches of a patch's mean cosine with its neighbours: (images,).

    Neighbours are the two to four above, below, left and right (Darcet et al. 2024, Fig. 5a). A
    patch of length 0 has no cosines and is not a neighbour; NaN if no patch has one.

    Args:
        patches: (images, rows, cols, dim), of clips (clips, frames, rows, cols, dim): neighbours
            are in one frame.
    """
    x = patches.astype(np.float64)
    length = np.sqrt(np.einsum("...d,...d->...", x, x))
    is_nonzero = length > 0
    length[~is_nonzero] = (
        1  # divides without a warning; such cosines are 0 and not counted
    )
    total = np.zeros(is_nonzero.shape)
    n_neighbours = np.zeros(is_nonzero.shape)
    below = (..., slice(1, None), slice(None))
    above = (..., slice(None, -1), slice(None))
    right = (..., slice(1, None))
    left = (..., slice(None, -1))
    for first, second in ((below, above), (right, left)):
        is_pair = is_nonzero[first] & is_nonzero[second]
        products = np.einsum("...d,...d->...", x[*first, :], x[*second, :])
        cosine = products / (length[first] * length[second])
        # Both patches of a pair are each other's neighbour.
        for side in (first, second):
            total[side] += cosine
            n_neighbours[side] += is_pair
    with np.errstate(invalid="ignore", divide="ignore"):
        patch_axes = tuple(range(1, n_neighbours.ndim))
        sums = np.nansum(total / n_neighbours, axis=patch_axes)
        means: Float = sums / (n_neighbours > 0).sum(patch_axes)
    return means


def mad_threshold(norms: Float) -> float:
    """Return median + 6 x 1.4826 median(|x - median|) of all norms."""
    return _sorted_mad_threshold(np.sort(norms, axis=None))


def blocks_out(labels: NDArray[np.integer]) -> Iterator[Mask]:
    """Yield a mask (images,) for each block of the jackknife: the images that are not in it."""
    return (labels != block for block in range(int(labels.max()) + 1))


def share_above_mad(norms: Float, labels: Integers) -> tuple[float, Float]:
    """Return the share of norms above `mad_threshold`, and the same without each block of images.

    Threshold and share are recomputed without a block; NaN if nothing is left. Norms are sorted
    once, and stay so without a block: neither medians nor counts cost more than leaving it out.
    Memory: beside the norms, three times as much.

    Args:
        norms: (images, tokens).
        labels: (images,) jackknife block of each image.
    """
    order = np.argsort(norms, axis=None)
    ascending = norms.ravel()[order]
    order //= norms.shape[1]  # indices of tokens become those of images, in place
    norm_labels = labels.astype(np.int32)[order]
    del order  # as large as the norms, and not needed for what follows
    without = [_share_above(ascending[is_kept]) for is_kept in blocks_out(norm_labels)]
    return _share_above(ascending), np.array(without)


def _share_above(ascending: Float) -> float:
    """Return the share of sorted norms above their `mad_threshold`; NaN of none."""
    n = len(ascending)
    if not n:
        return np.nan
    n_up_to = np.searchsorted(ascending, _sorted_mad_threshold(ascending), "right")
    return float(n - n_up_to) / n


def _sorted_mad_threshold(ascending: Float) -> float:
    """Return `mad_threshold` of norms in ascending order; NaN of none."""
    n = len(ascending)
    if not n:
        return np.nan
    # The mean of the two middle values, which are one if n is odd.
    lower = (n - 1) // 2
    upper = n // 2
    median = float(ascending[lower] + ascending[upper]) / 2
    lower_deviation = _kth_deviation(ascending, median, lower + 1)
    upper_deviation = _kth_deviation(ascending, median, upper + 1)
    return median + N_MAD * MAD_SCALE * (lower_deviation + upper_deviation) / 2


def _kth_deviation(ascending: Float, middle: float, k: int) -> float:
    """Return the k-th smallest |x - middle|, k from 1, in logarithmic time.

    The k nearest values are contiguous; a bisection finds the first of them.
    """
    low = 0
    high = len(ascending) - k
    while low < high:
        first = (low + high) // 2
        # The window moves right as long as the value behind it is nearer than its first.
        if middle - ascending[first] > ascending[first + k] - middle:
            low = first + 1
        else:
            high = first
    return float(max(middle - ascending[low], ascending[low + k - 1] - middle))


def bimodality(norms: Float, labels: Integers) -> tuple[float, Float]:
    """Return Sarle's coefficient of the logarithms of all norms above 0, and without each block.

    It is (skewness^2 + 1) / kurtosis: 1/3 for a normal sample, 5/9 for a uniform one, 1 for two
    equal peaks; NaN if all are equal.

    Args:
        norms: (images, tokens).
        labels: (images,) jackknife block of each image.
    """
    # Powers about the mean of all: their sums lose few digits, whatever the unit of the norms.
    uncentred = [_log_powers(piece, 0.0)[:, :2] for piece in _pieces(norms)]
    n, total = np.concatenate(uncentred).sum(0)
    centre = total / n if n else 0.0
    powers = np.concatenate([_log_powers(piece, centre) for piece in _pieces(norms)])
    without = [_sarle(powers[is_kept].sum(0)) for is_kept in blocks_out(labels)]
    return _sarle(powers.sum(0)), np.array(without)


def _log_powers(norms: Float, centre: float) -> Float:
    """Return sums of powers of each image's log norms minus `centre`: (images, 5).

    Powers are 0 to 4, so that the first column counts; norms of 0 are left out.
    """
    with np.errstate(divide="ignore"):
        logs = np.log(norms)
    is_positive = np.isfinite(logs)
    x = np.where(is_positive, logs - centre, 0.0)
    columns = [is_positive.sum(1)]
    for power in range(1, 5):
        columns.append((x**power).sum(1))
    return np.stack(columns, axis=1)


def _pieces(norms: Float) -> Iterator[Float]:
    """Yield a few images' norms at a time, which need little additional memory."""
    step = max(1, NORMS_AT_ONCE // norms.shape[1])
    return (norms[first : first + step] for first in range(0, len(norms), step))


def _sarle(powers: Float) -> float:
    """Return the coefficient from (5,) sums of powers 0 to 4; NaN where it is undefined."""
    n = powers[0]
    if n < 2:
        return np.nan
    # Raw moments about the centre, then central moments by the binomial theorem.
    m1, r2, r3, r4 = powers[1:] / n
    m2 = r2 - m1**2
    m3 = r3 - 3 * m1 * r2 + 2 * m1**3
    m4 = r4 - 4 * m1 * r3 + 6 * m1**2 * r2 - 3 * m1**4
    if not m2 > MIN_LOG_VARIANCE:
        return np.nan
    return float((m3**2 / m2**3 + 1) / (m4 / m2**2))


def histogram(norms: Float) -> list[tuple[float, float, float]]:
    """Return (from, to, share of the norms) of each bin that is not empty.

    Bins are eighths of a factor of 2, the same for every site and model. Norms of 0 are in none.
    """
    counts = Counter[int]()
    for piece in _pieces(norms):
        bins = np.floor(BINS_PER_OCTAVE * np.log2(piece[piece > 0])).astype(np.int64)
        filled, bin_counts = np.unique(bins, return_counts=True)
        counts.update(dict(zip(filled.tolist(), bin_counts.tolist(), strict=True)))
    return [
        (
            2.0 ** (k / BINS_PER_OCTAVE),
            2.0 ** ((k + 1) / BINS_PER_OCTAVE),
            counts[k] / norms.size,
        )
        for k in sorted(counts)
    ]
