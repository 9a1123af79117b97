"""Patches to click on: the tokens of a few images of several stores on one page, `explore.html`.

Only the rows of the shown images are read. What the page computes are cosines of packed tokens (see
`tokens`, which measures their error); norms, PCA colours, attention and the classifier's answers
are looked up.

It shows images that are named, or some of those that all stores have. `diverse`: k-means of the
images' vectors at the first store's last site, all of length 1, into as many groups as are shown
(k-means++, Arthur and Vassilvitskii 2007), and of each group the image nearest to its mean.
`outliers`: those whose vectors there are farthest from the others', by the mean cosine distance to
the `NEIGHBOURS` nearest. `random`: drawn with the seed. The first two look at a sample of at most
`SAMPLE` images, and at their pooled vectors alone.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.attention.recompute import find_rows
from vitsee_core.figures.patch_maps.photos import SheetImages
from vitsee_core.figures.patch_maps.views import View, grid_sites
from vitsee_core.models.provenance import Provenance
from vitsee_core.pages.explore.contents import StoreContents, read_sites, reference
from vitsee_core.pages.explore.page import render, steps_of
from vitsee_core.pages.explore.readouts import answers_of, attention_of
from vitsee_core.pages.explore.tokens import MOST_BYTES, pack_tokens
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.progress import SILENT, SITE_IMAGES, Progress, counting
from vitsee_core.runtime.store_selection import select_each
from vitsee_core.runtime.streaming import choose_rows
from vitsee_core.similarity.pairs import paired_rows
from vitsee_core.tables.files import check_new_files, write_files
from vitsee_core.types import Float32, Integers
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput, SiteError, StoreMismatch, VitseeError

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec

log = logging.getLogger(__name__)

IMAGES = 12
RANDOM, DIVERSE, OUTLIERS = PICKS = ("random", "diverse", "outliers")
SAMPLE = 5000
NEIGHBOURS = 10
# of k-means
STARTS = 3
ROUNDS = 50


@dataclass(frozen=True)
class Explored:
    """A page. place: its file; n_images, n_sites: what it shows, sites of all stores; examples:
    images or clips; p99, largest: of the cosines' errors, those of the worst site."""

    place: Path
    n_images: int
    examples: str
    n_sites: int
    p99: float
    largest: float


@analysis
def explore(
    *stores: Store,
    output: Path | str,
    image: Sequence[str] = (),
    images: int = IMAGES,
    pick: str = DIVERSE,
    sites: Sequence[str] = ("blocks",),
    recompute: bool = False,
    origin: Provenance | None = None,
    device: str = "auto",
    title: str = "",
    note: str = "",
    seed: int = 0,
    force: bool = False,
    progress: Progress = SILENT,
) -> Explored:
    """Write a page to click through the patches of a few images, in all layers of all stores.

    Memory: a slab of one site, the shown images' patches of it, of all sites their coordinates on
    at most 256 axes, and the page.

    Args:
        stores: with all tokens of sites with a grid, and images of the same ids; of a training, see
            `steps_of`, the page has a slider over the steps, and shows one store at a time.
        output: the page, .html.
        image: ids of the images to show, or rows of the first store; by default some are picked.
        images: so many are picked.
        pick: "diverse", "random" or "outliers", see above.
        sites: selectors.
        recompute: compute attention, and take a classifier, with the stores' models where a store
            lacks them.
        origin: where data and weights are now, for the photographs and for `recompute`.
        device: on which that is computed.
        title: of the page.
        note: a line below it.
        seed: of everything random.
        force: an existing file is replaced.
        progress: advanced by images x sites.

    Raises:
        MissingInput: a site is stored pooled only.
        SiteError: no such site, or none with a grid of patches.
        StoreMismatch: no image is in all stores, or clips have other numbers of places in time.
        VitseeError: no such image; the file exists or cannot be written.
    """
    place = Path(output)
    check_new_files([place], force=force)
    if steps := steps_of([store.label for store in stores]):
        order = np.argsort(steps["numbers"])
        stores = tuple(stores[k] for k in order)
    selected = select_each(stores, sites, grid_sites)
    rows = choose_images(
        selected.stores, selected.chosen[0][-1], image, images, pick, seed
    )
    parts = [
        _by_time(SheetImages(store, View.of(store, own), of_store, own))
        for (store, own), of_store in zip(selected.members, rows, strict=True)
    ]
    for part in parts[1:]:
        if part.times != parts[0].times:
            raise StoreMismatch(
                f"{parts[0].store.label} and {part.store.label} have {parts[0].times} and "
                f"{part.times} places in time; explore shows stores with one number of "
                "them"
            )
    contents = []
    total = sum(len(part.rows) * len(part.sites) for part in parts)
    with counting(progress, total, SITE_IMAGES):
        read = [read_sites(part, seed, progress.advance) for part in parts]
    again = (origin or Provenance()) if recompute else None
    for part, own in zip(parts, read, strict=True):
        one = StoreContents(part, own, "", "")
        try:
            one.attention = attention_of(part, again, device, progress)
        except MissingInput as missing:
            one.attention = str(missing)
        try:
            if part.times > 1:
                raise MissingInput(
                    "a page of clips has no answers of patches (see vitsee lens)"
                )
            one.answers = answers_of(part, again)
        except MissingInput as missing:
            one.answers = str(missing)
        contents.append(one)
    room = MOST_BYTES - sum(one.attention_bytes for one in contents)
    packed = iter(
        pack_tokens([own.tokens for one in contents for own in one.sites], room)
    )
    for one in contents:
        one.packed = [next(packed) for _ in one.sites]
    guide = reference([own.scores for own in read[0]])
    data = None if origin is None else origin.data
    page = render(contents, guide, data, title, note, selected.left_out)
    write_files({place: page.encode()}, force=force)
    errors = [own.error for one in contents for own in one.packed]
    return Explored(
        place,
        len(rows[0]),
        contents[0].shown.store.plan.examples,
        len(errors),
        max(error.p99 for error in errors),
        max(error.largest for error in errors),
    )


def _by_time(part: SheetImages) -> SheetImages:
    """The part with each place in time of its clips as an image of its own; as it is of images.

    Raises:
        SiteError: sites with other numbers of places in time.
    """
    layouts = {site.name: part.store.site(site.name).layout for site in part.sites}
    times = {
        name: layout.frames for name, layout in layouts.items() if layout is not None
    }
    numbers = dict.fromkeys(times.values())
    if len(numbers) > 1:
        a, b = (
            next(site for site, own in times.items() if own == n) for n in [*numbers][:2]
        )
        raise SiteError(
            f"{part.store.label}: {a} has {times[a]} places in time and {b} {times[b]}; "
            "explore shows sites with one number of them: choose these with --sites"
        )
    n_times = next(iter(numbers)) or 1
    return replace(
        part, rows=[row for row in part.rows for _ in range(n_times)], times=n_times
    )


def choose_images(
    stores: Sequence[Store],
    last: SiteSpec,
    names: Sequence[str],
    n: int,
    pick: str,
    seed: int,
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
        raise VitseeError(
            f"no way to pick images {pick!r}; expected one of: {', '.join(PICKS)}"
        )
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
            raise StoreMismatch(
                f"{first.label} has no image that could be read in every store"
            )
        at = _picked(first, last, own, n, pick, seed)
        found = [paired[store.manifest.store_id][at].tolist() for store in stores]
    for other, rows in zip(others, found[1:], strict=True):
        differ = int((first.samples.hash[found[0]] != other.samples.hash[rows]).sum())
        if differ:
            log.warning(
                "%s was made from other bytes than %s for %d of the %d images (of the "
                "same ids); "
                "the page shows the pictures of %s",
                other.label,
                first.label,
                differ,
                len(rows),
                first.label,
            )
    return found


def _picked(
    store: Store, site: SiteSpec, rows: Integers, n: int, pick: str, seed: int
) -> Integers:
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
            f"{int(good.sum())} images of {store.label} have a vector in {site.name}: "
            f"{n} cannot be picked by it (use --pick {RANDOM})"
        )
    sample = sample[good]
    units = vectors[good] / lengths[good, np.newaxis]
    found: Integers = sample[
        _central(units, n, seed) if pick == DIVERSE else _lonely(units, n)
    ]
    return found


def _central(units: Float32, n: int, seed: int) -> Integers:
    """(n,) of each of n groups the vector nearest to its mean."""
    from scipy.cluster.vq import kmeans2  # takes a fifth of scikit-learn's time to import

    rng = np.random.default_rng(seed)
    found = []
    for _ in range(STARTS):
        with (
            warnings.catch_warnings()
        ):  # of groups that are empty, as where vectors are equal
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
