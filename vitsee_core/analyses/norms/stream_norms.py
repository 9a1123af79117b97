"""Norms and largest activations of tokens, their sources in a store, and the outliers among the
norms of patch tokens: thresholds, shares, bimodality, histograms.

Stores keep the dot products z.z, f.f and z.f of every residual sublayer's skip z and branch f, for
every token. A site that is the skip of a sublayer, as the output of block b is that of the
attention in block b + 1, has the norm sqrt(z.z); the sum of a sublayer has sqrt(z.z + 2 z.f + f.f).
So stores without activations (`extract --tokens pooled`) have norms, too. Which site is which
follows from the store's aliases and from the sums that the self-check proved; an output behind an
activation function (ResNet v1) or a norm is not a sum, and needs the activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features.matrix import not_finite
from vitsee_core.features.reader import widened
from vitsee_core.statistics.skip_branch import ROUNDING
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.errors import MissingInput

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Slab, Store

# What a sublayer adds its branch to, and what the sum is called, by the sublayer's last word.
SKIPS = {"attn": "in", "token": "in", "mlp": "mid", "channel": "mid"}
SUMS = {"attn": "mid", "token": "mid", "mlp": "out", "channel": "out"}
IMAGES_AT_ONCE = 8  # activations in float64 at a time
N_MAD = 6.0
MAD_SCALE = 1.4826  # makes the median absolute deviation of a normal sample its sigma
BINS_PER_OCTAVE = 8
PIECE = 1 << 18  # norms worked on at a time


@dataclass(frozen=True)
class NormSource:
    """The source of a site's norms: a sublayer's dot products (of its skip, or of its sum if
    `total`), or with "" the activations."""

    sublayer: str = ""
    total: bool = False

    def describe(self) -> str:
        if not self.sublayer:
            return "activations"
        products = "z.z + 2 z.f + f.f" if self.total else "z.z"
        return f"residual/{self.sublayer}: {products}"


def norm_source(store: Store, site: SiteSpec) -> NormSource:
    """The dot products that give a site's squared norms, or else its activations. Raises
    MissingInput: the store has neither."""
    site = store.site(site.name)
    equal = {site.name} | {s.name for s in store.plan.sites if s.alias_of == site.name}
    alike = [name for name, layout in store.plan.sublayers if layout == site.layout]
    for name in alike:
        if equal & set(_skips(name)):
            return NormSource(name)
    ablated = store.manifest.identity.get("ablate_skip") or ()
    for name in alike:
        if _sum(store, name) in equal and name not in ablated:
            return NormSource(name, total=True)
    if site.tokens == "all":
        return NormSource()
    raise MissingInput(
        f"{store.label} keeps {site.name} pooled only, and no dot products of it: "
        f"extract it with --tokens {site.name}=all -o NEW.zarr (every site: --tokens all)"
    )


def _skips(sublayer: str) -> tuple[str, ...]:
    """Possible names of a sublayer's skip."""
    block, _, word = sublayer.rpartition(".")
    if word in SKIPS:
        return (f"{block}.{SKIPS[word]}",)
    return f"{sublayer}.shortcut", f"{sublayer}.in"


def _sum(store: Store, sublayer: str) -> str:
    """The site that is skip + branch of a sublayer; "" if something may follow the sum."""
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
    """Statistics of one site, by image; all but `norms` only from activations, else empty."""

    norms: Float  # (images, tokens)
    largest: Float  # (images,) of |x| over all tokens and channels
    median: Float  # (images,) of |x|
    channel: Integers  # (images,) of the largest
    token: Integers  # (images,) of the largest
    neighbour_cos: Float  # (images,) see `neighbour_cosines`

    @classmethod
    def joined(cls, parts: Iterable[TokenStatistics], n: int) -> TokenStatistics:
        """The statistics of `n` images of several slabs, without holding all in memory twice."""
        whole: dict[str, NDArray[Any]] = {}
        done = 0
        for part in parts:
            for field in fields(cls):
                of_part = getattr(part, field.name)
                if field.name not in whole:
                    shape = (n if len(of_part) else 0, *of_part.shape[1:])
                    whole[field.name] = np.empty(shape, of_part.dtype)
                whole[field.name][done : done + len(of_part)] = of_part
            done += len(part.norms)
        return cls(**whole)


@dataclass(frozen=True)
class ReadTokens:
    """The work on one slab."""

    site: str  # a stored site
    source: NormSource
    activations: bool  # whether to read these, for what is not a norm
    n_prefix: int  # of its layout
    body: (
        tuple[int, ...] | None
    )  # (rows, cols) of its grid, of clips (frames, rows, cols)

    def __call__(self, slab: Slab) -> TokenStatistics:
        """The statistics of the images that count. Raises VitseeError: a number is not finite."""
        n = int(slab.valid.sum())
        none = np.zeros(0)
        largest = none
        median = none
        near = none
        channel = token = np.zeros(0, np.int64)
        norms = _stored_norms(slab, self.source) if self.source.sublayer else none
        if self.activations or not self.source.sublayer:
            acts = slab.acts(self.site)[slab.valid]
            pieces = [acts[i : i + IMAGES_AT_ONCE] for i in range(0, n, IMAGES_AT_ONCE)]
            with np.errstate(invalid="ignore"):  # refused below
                of_pieces = [self._of_acts(piece) for piece in pieces]
            own, *rest = (np.concatenate(part) for part in zip(*of_pieces, strict=True))
            norms = norms if self.source.sublayer else own
            if self.activations:
                largest, median, near = rest[:3]
                channel, token = (part.astype(np.int64) for part in rest[3:])
        if not (np.isfinite(norms).all() and np.isfinite(largest).all()):
            raise not_finite(slab.store, self.site, slab.rows)
        return TokenStatistics(norms, largest, median, channel, token, near)

    def _of_acts(self, stored: NDArray[np.floating]) -> tuple[Float, ...]:
        """Norms, largest, median, neighbour_cos, channel, token of (images, tokens, dim)."""
        acts, _ = widened(stored)
        norms = np.sqrt(np.einsum("itd,itd->it", acts, acts, dtype=np.float64))
        if not self.activations:
            return (norms,)
        size = np.abs(acts).reshape(len(acts), -1)
        at = size.argmax(1)
        largest = np.take_along_axis(size, at[:, np.newaxis], 1)[:, 0].astype(np.float64)
        if stored.dtype == np.float16:
            median = medians_of_half(stored.reshape(len(stored), -1))
        else:
            median = np.median(size, axis=1, overwrite_input=True).astype(np.float64)
        near = np.full(len(acts), np.nan)
        if self.body is not None:
            cells = acts[:, self.n_prefix :].reshape(len(acts), *self.body, -1)
            near = neighbour_cosines(cells)
        token, channel = np.divmod(at, acts.shape[-1])
        return norms, largest, median, near, channel, token


def medians_of_half(x: NDArray[np.float16]) -> Float:
    """(images,) the median of each row of |x|, (images, values) of half precision without NaN: the
    2^15 sizes that there are, which are in order as integers, are counted."""
    middle = [(x.shape[1] - 1) // 2, x.shape[1] // 2]
    sizes = x.view(np.uint16) & np.uint16(0x7FFF)
    counts = (np.bincount(of_image, minlength=1 << 15).cumsum() for of_image in sizes)
    found = np.array(
        [np.searchsorted(below, middle, "right") for below in counts], np.uint16
    )
    return found.view(np.float16).astype(np.float32).mean(1).astype(np.float64)


def _stored_norms(slab: Slab, source: NormSource) -> Float:
    products = slab.residual(source.sublayer)[slab.valid].astype(np.float64)
    zz, ff, zf = np.moveaxis(products, -1, 0)
    total = zz
    if source.total:
        total = zz + 2 * zf + ff
        total[total <= ROUNDING * (zz + ff)] = 0
    return np.sqrt(total)


def neighbour_cosines(cells: Float32) -> Float:
    """(images,) the mean over cells of a cell's mean cosine with its two to four neighbours above,
    below, left and right (Darcet et al. 2024, Fig. 5a).

    A cell of length 0 has no cosines and is not a neighbour; NaN if no cell has one.

    Args:
        cells: (images, rows, cols, dim), of clips (clips, frames, rows, cols, dim): neighbours are
            in one frame.
    """
    x = cells.astype(np.float64)
    length = np.sqrt(np.einsum("...d,...d->...", x, x))
    there = length > 0
    length[~there] = 1
    total = np.zeros(there.shape)
    count = np.zeros(there.shape)
    for a, b in (
        ((..., slice(1, None), slice(None)), (..., slice(None, -1), slice(None))),
        ((..., slice(1, None)), (..., slice(None, -1))),
    ):
        both = there[a] & there[b]
        cosine = np.einsum("...d,...d->...", x[*a, :], x[*b, :]) / (length[a] * length[b])
        for side in (a, b):
            total[side] += cosine
            count[side] += both
    with np.errstate(invalid="ignore", divide="ignore"):
        over = tuple(range(1, count.ndim))
        found: Float = np.nansum(total / count, axis=over) / (count > 0).sum(over)
    return found


def mad_threshold(norms: Float) -> float:
    """median + 6 x 1.4826 median(|x - median|) of all norms."""
    return _threshold(np.sort(norms, axis=None))


def blocks_out(labels: NDArray[np.integer]) -> Iterator[Mask]:
    """A mask (images,) for each block of the jackknife: the images that are not in it."""
    return (labels != b for b in range(int(labels.max()) + 1))


def share_above_mad(norms: Float, labels: Integers) -> tuple[float, Float]:
    """The share of norms (images, tokens) above `mad_threshold`, and the same without each block of
    images, with threshold and share recomputed; NaN if nothing is left.

    Norms are sorted once, and stay so without a block: neither medians nor counts cost more than
    leaving it out. Memory: beside the norms, three times as much.
    """
    values, blocks = _in_order(norms, labels)
    return _share(values), np.array([_share(values[keep]) for keep in blocks_out(blocks)])


def _share(ascending: Float) -> float:
    n = len(ascending)
    if not n:
        return np.nan
    return float(n - np.searchsorted(ascending, _threshold(ascending), "right")) / n


def _threshold(ascending: Float) -> float:
    """`mad_threshold` of norms in ascending order."""
    n = len(ascending)
    middle = _median(ascending)
    deviations = [_nearest(ascending, middle, k + 1) for k in ((n - 1) // 2, n // 2)]
    return middle + N_MAD * MAD_SCALE * sum(deviations) / 2


def _nearest(ascending: Float, middle: float, k: int) -> float:
    """The k-th smallest |x - middle|: the k nearest values are contiguous, starting where a
    bisection finds."""
    low = 0
    high = len(ascending) - k
    while low < high:
        at = (low + high) // 2
        if middle - ascending[at] > ascending[at + k] - middle:
            low = at + 1
        else:
            high = at
    return float(max(middle - ascending[low], ascending[low + k - 1] - middle))


def _median(ascending: Float) -> float:
    n = len(ascending)
    if n:
        return float(ascending[(n - 1) // 2] + ascending[n // 2]) / 2
    return np.nan


def _in_order(norms: Float, labels: Integers) -> tuple[Float, NDArray[np.int32]]:
    """All norms, ascending, and the block of each."""
    order = np.argsort(norms, axis=None)
    values = norms.ravel()[order]
    order //= norms.shape[1]  # images
    return values, labels.astype(np.int32)[order]


def bimodality(norms: Float, labels: Integers) -> tuple[float, Float]:
    """(skewness^2 + 1) / kurtosis of the logarithms of all norms (images, tokens) above 0 (Sarle's
    coefficient), and the same without each block of images: 1/3 for a normal sample, 5/9 for a
    uniform one, 1 for two equal peaks; NaN if all are equal."""
    # About the mean of all: power sums of few digits lost, whatever the unit.
    n, total = np.concatenate(
        [_powers(piece, 0.0)[:, :2] for piece in _pieces(norms)]
    ).sum(0)
    centre = total / n if n else 0.0
    powers = np.concatenate([_powers(piece, centre) for piece in _pieces(norms)])
    without = [_coefficient(powers[keep].sum(0)) for keep in blocks_out(labels)]
    return _coefficient(powers.sum(0)), np.array(without)


def _powers(norms: Float, centre: float) -> Float:
    """(images, 5) number of an image's norms above 0, and the sums over these of the first four
    powers of their logarithms minus `centre`."""
    with np.errstate(divide="ignore"):
        logs = np.log(norms)
    there = np.isfinite(logs)
    x = np.where(there, logs - centre, 0.0)
    return np.stack([there.sum(1), *((x**p).sum(1) for p in range(1, 5))], 1)


def _pieces(norms: Float) -> Iterator[Float]:
    """A few images' norms at a time, which need little additional memory."""
    step = max(1, PIECE // norms.shape[1])
    return (norms[at : at + step] for at in range(0, len(norms), step))


def _coefficient(powers: Float) -> float:
    """The coefficient from the number of values and the sums of their first four powers."""
    n = powers[0]
    if n < 2:
        return np.nan
    m1, r2, r3, r4 = powers[1:] / n
    m2 = r2 - m1**2
    m3 = r3 - 3 * m1 * r2 + 2 * m1**3
    m4 = r4 - 4 * m1 * r3 + 6 * m1**2 * r2 - 3 * m1**4
    if not m2 > 1e-24:  # of logarithms: all norms alike to 12 digits
        return np.nan
    return float((m3**2 / m2**3 + 1) / (m4 / m2**2))


def histogram(norms: Float) -> list[tuple[float, float, float]]:
    """(from, to, share of the norms) for each non-empty bin; bins are eighths of a factor of 2, the
    same for every site and model. Norms of 0 are in none."""
    counts = Counter[int]()
    for piece in _pieces(norms):
        bins = np.floor(BINS_PER_OCTAVE * np.log2(piece[piece > 0])).astype(np.int64)
        filled, of_each = np.unique(bins, return_counts=True)
        counts.update(dict(zip(filled.tolist(), of_each.tolist(), strict=True)))
    return [
        (
            2.0 ** (k / BINS_PER_OCTAVE),
            2.0 ** ((k + 1) / BINS_PER_OCTAVE),
            counts[k] / norms.size,
        )
        for k in sorted(counts)
    ]
