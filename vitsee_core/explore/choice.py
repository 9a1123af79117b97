"""Which images a page shows: named ones, or some of those that all stores have.

`diverse`: k-means of the images' vectors at the first store's last site, all of length 1, into as
many groups as are shown (k-means++, Arthur and Vassilvitskii 2007), and of each group the image
nearest to its mean. `outliers`: those whose vectors there are farthest from the others', by the
mean cosine distance to the `NEIGHBOURS` nearest. `random`: drawn with the seed. The first two look
at a sample of at most `SAMPLE` images, and at their pooled vectors alone.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.attention.recompute import find_rows
from vitsee_core.runtime.streaming import choose_rows
from vitsee_core.similarity.pairs import paired_rows
from vitsee_core.types import Float32, Integers
from vitsee_stores.errors import StoreMismatch, VitseeError

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store

log = logging.getLogger(__name__)

RANDOM, DIVERSE, OUTLIERS = PICKS = ("random", "diverse", "outliers")
SAMPLE, NEIGHBOURS = 5000, 10
STARTS, ROUNDS = 3, 50  # of k-means


def choose_images(
    stores: Sequence[Store], last: SiteSpec, names: Sequence[str], n: int, pick: str, seed: int
) -> list[list[int]]:
    """Each store's rows of the images to show, the same images in the same order.

    Args:
        stores: one or more.
        last: the site of the first store whose vectors decide.
        names: ids, or rows of the first store; else `n` images are picked.
        n: at most so many.
        pick: one of `PICKS`.
        seed: of everything random.

    Raises:
        StoreMismatch: no image is in all stores.
        VitseeError: a store has no such image; an unknown word.
    """
    if pick not in PICKS:
        raise VitseeError(f"no way to pick images {pick!r}; expected one of: {', '.join(PICKS)}")
    if n < 1 and not names:
        raise VitseeError(f"{n} images were asked for; expected a positive number")
    first, *others = stores
    if names:
        rows = list(dict.fromkeys(find_rows(first, list(dict.fromkeys(names))).tolist()))
        ids = [str(name) for name in first.samples.id[rows]]
        found = [rows, *(find_rows(other, ids).tolist() for other in others)]
    else:
        paired = paired_rows(stores, choose_rows(first), pair_by="id")[0]
        own = paired[first.manifest.store_id]
        if not len(own):
            raise StoreMismatch(f"{first.label} has no image that could be read in every store")
        at = _picked(first, last, own, n, pick, seed)
        found = [paired[store.manifest.store_id][at].tolist() for store in stores]
    for other, rows in zip(others, found[1:], strict=True):
        differ = int((first.samples.hash[found[0]] != other.samples.hash[rows]).sum())
        if differ:
            log.warning(
                "%s was made from other bytes than %s for %d of the %d images (of the same ids); "
                "the page shows the pictures of %s",
                *(other.label, first.label, differ, len(rows), first.label),
            )
    return found


def _picked(store: Store, site: SiteSpec, rows: Integers, n: int, pick: str, seed: int) -> Integers:
    """(at most n,) places in `rows`."""
    rng = np.random.default_rng(seed)
    sample = rng.permutation(len(rows))[:SAMPLE]
    if n >= len(rows):
        return np.arange(len(rows))
    if pick == RANDOM:
        return sample[:n]
    sample = np.sort(sample)
    vectors = np.asarray(store.pooled(site.name)[rows[sample]], np.float32)
    lengths = np.linalg.norm(vectors, axis=1)
    good = np.isfinite(lengths) & (lengths > 0)
    if good.sum() < n:
        raise VitseeError(
            f"{int(good.sum())} images of {store.label} have a vector in {site.name}: {n} cannot "
            f"be picked by it (use --pick {RANDOM})"
        )
    sample, units = sample[good], vectors[good] / lengths[good, np.newaxis]
    found: Integers = sample[_central(units, n, seed) if pick == DIVERSE else _lonely(units, n)]
    return found


def _central(units: Float32, n: int, seed: int) -> Integers:
    """(n,) of each of n groups the vector nearest to its mean."""
    from scipy.cluster.vq import kmeans2  # takes a fifth of scikit-learn's time to import

    rng, found = np.random.default_rng(seed), []
    for _ in range(STARTS):
        with warnings.catch_warnings():  # of groups that are empty, as where vectors are equal
            warnings.simplefilter("ignore", UserWarning)
            means, labels = kmeans2(units, n, ROUNDS, minit="++", seed=rng)
        off = (means**2).sum(1) - 2 * units @ means.T  # squared distances less 1
        found.append((float(off.min(1).sum()), off, labels))
    _, off, labels = min(found, key=lambda one: one[0])
    chosen: list[int] = []
    for k in range(n):
        order = np.argsort(np.where(labels == k, off[:, k], np.inf), kind="stable")
        chosen.append(next(int(i) for i in order if int(i) not in chosen))
    return np.array(chosen, np.int64)


def _lonely(units: Float32, n: int) -> Integers:
    """(n,) the vectors farthest from their nearest ones, the farthest first."""
    k = min(NEIGHBOURS, len(units) - 1)
    cosines = units @ units.T
    np.fill_diagonal(cosines, -np.inf)
    nearest = np.partition(cosines, -k, axis=1)[:, -k:]
    found: Integers = np.argsort(nearest.mean(1), kind="stable")[:n]
    return found
