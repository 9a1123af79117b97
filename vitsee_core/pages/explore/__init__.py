"""Patches to click on: the tokens of a few images of several stores on one page, `explore.html`.

Only the rows of the shown images are read. The page computes cosines of packed tokens (the module
`tokens` measures their error); norms, PCA colours, attention and the classifier's answers are
packed with it.

It shows images that are named, or picks some of those that all stores have:

- `diverse`: k-means of the images' vectors at the first store's last site, all of length 1, into as
  many groups as images are shown (k-means++, Arthur and Vassilvitskii 2007), and of each group the
  image nearest to its mean;
- `outliers`: the images whose vectors there are farthest from the others, by the mean cosine
  distance to the `NEIGHBOURS` nearest;
- `random`: drawn with the seed.

The first two look at a sample of at most `SAMPLE` images, and at their pooled vectors alone.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.attention.recompute import find_rows
from vitsee_core.figures.patch_maps.photos import SheetImages
from vitsee_core.figures.patch_maps.views import View, grid_sites
from vitsee_core.models.provenance import Provenance
from vitsee_core.pages.explore.contents import StoreContents, last_scores, read_sites
from vitsee_core.pages.explore.page import render, steps_of
from vitsee_core.pages.explore.readouts import (
    BlockAttention,
    SiteAnswers,
    answers_of,
    attention_of,
)
from vitsee_core.pages.explore.tokens import MAX_BYTES, pack_tokens
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
RANDOM = "random"
DIVERSE = "diverse"
OUTLIERS = "outliers"
PICKS = (RANDOM, DIVERSE, OUTLIERS)
SAMPLE = 5000  # images among which some are picked, at most
NEIGHBOURS = 10
# Of k-means: starts, and rounds of each.
STARTS = 3
ROUNDS = 50


@dataclass(frozen=True)
class Explored:
    """A page that was written.

    Attributes:
        place: its file.
        n_images: that it shows.
        examples: "images" or "clips".
        n_sites: of all stores.
        p99: 99 of 100 cosines of the worst site are within it of the stored features' cosines.
        largest: the largest error of a cosine.
    """

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
        stores: with all tokens of sites with a grid, and images of the same ids. For stores of a
            training (`vit-step0`, `vit-step1000`, ...) the page has a slider over the steps, and
            shows one store at a time.
        output: the page, .html.
        image: ids of the images to show, or rows of the first store; by default some are picked.
        images: number of images to pick.
        pick: "diverse", "random" or "outliers".
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

    Examples:
        >>> import vitsee
        >>> page = vitsee.explore("vit.zarr", output="explore.html", images=3)
        >>> page.n_images, page.n_sites
        (3, 7)
    """
    path = Path(output)
    check_new_files([path], force=force)
    steps = steps_of([store.label for store in stores])
    if steps is not None:
        stores = tuple(stores[k] for k in np.argsort(steps["numbers"]))
    selected = select_each(stores, sites, grid_sites)
    rows = choose_images(
        selected.stores,
        selected.chosen[0][-1],
        names=image,
        n=images,
        pick=pick,
        seed=seed,
    )
    sheets = _sheets(selected.members, rows)
    n_steps = sum(len(sheet.rows) * len(sheet.sites) for sheet in sheets)
    with counting(progress, n_steps, SITE_IMAGES):
        sites_of_stores = [read_sites(sheet, seed, progress.advance) for sheet in sheets]
    recompute_origin = (origin or Provenance()) if recompute else None
    contents = []
    for sheet, store_sites in zip(sheets, sites_of_stores, strict=True):
        attention = _attention_or_reason(sheet, recompute_origin, device, progress)
        answers = _answers_or_reason(sheet, recompute_origin)
        contents.append(StoreContents(sheet, store_sites, attention, answers))
    _pack_contents(contents)
    page = render(
        contents,
        guide=last_scores(sites_of_stores[0]),
        data=None if origin is None else origin.data,
        title=title,
        note=note,
        left_out=selected.left_out,
    )
    write_files({path: page.encode()}, force=force)
    return _explored(path, contents)


def _explored(path: Path, contents: Sequence[StoreContents]) -> Explored:
    """Return what the page at a path shows, and the errors of its cosines."""
    first = contents[0].shown
    errors = [tokens.error for each_store in contents for tokens in each_store.packed]
    return Explored(
        place=path,
        n_images=len(first.unique_rows),
        examples=first.store.plan.examples,
        n_sites=len(errors),
        p99=max(error.p99 for error in errors),
        largest=max(error.largest for error in errors),
    )


def _sheets(
    members: Iterable[tuple[Store, Sequence[SiteSpec]]], rows: Sequence[list[int]]
) -> list[SheetImages]:
    """Return the shown images in each store; each time of a clip is an image of its own.

    Args:
        members: stores with their sites.
        rows: each store's rows of the images.

    Raises:
        SiteError: sites of one store with different numbers of times.
        StoreMismatch: stores with different numbers of times.
    """
    sheets = []
    for (store, sites), store_rows in zip(members, rows, strict=True):
        view = View.of(store, sites)
        sheets.append(_split_times(SheetImages(store, view, store_rows, sites)))
    first = sheets[0]
    for sheet in sheets[1:]:
        if sheet.times != first.times:
            raise StoreMismatch(
                f"{first.store.label} and {sheet.store.label} have {first.times} and "
                f"{sheet.times} places in time; explore shows stores with one number of "
                "them"
            )
    return sheets


def _split_times(sheet: SheetImages) -> SheetImages:
    """Return the sheet with each time of its clips as an image of its own; of images, as it is.

    Raises:
        SiteError: sites with different numbers of times.
    """
    times = {}
    for site in sheet.sites:
        layout = sheet.store.site(site.name).layout
        if layout is not None:
            times[site.name] = layout.frames
    first_site = next(iter(times))
    for site_name, n_times in times.items():
        if n_times != times[first_site]:
            raise SiteError(
                f"{sheet.store.label}: {first_site} has {times[first_site]} places in "
                f"time and {site_name} {n_times}; explore shows sites with one number of "
                "them: choose these with --sites"
            )
    n_times = times[first_site] or 1  # None: images
    rows = np.repeat(sheet.rows, n_times).tolist()
    return replace(sheet, rows=rows, times=n_times)


def _attention_or_reason(
    sheet: SheetImages, origin: Provenance | None, device: str, progress: Progress
) -> list[BlockAttention] | str:
    """Return the attention on the shown images, or the reason why there is none."""
    try:
        return attention_of(sheet, origin, device, progress)
    except MissingInput as missing:
        return str(missing)


def _answers_or_reason(
    sheet: SheetImages, origin: Provenance | None
) -> Mapping[str, SiteAnswers] | str:
    """Return the classifier's answers for the shown patches, or the reason why there are none."""
    if sheet.times > 1:
        return "a page of clips has no answers of patches (see vitsee lens)"
    try:
        return answers_of(sheet, origin)
    except MissingInput as missing:
        return str(missing)


def _pack_contents(contents: Sequence[StoreContents]) -> None:
    """Set `packed` of each store: its tokens, which share what attention leaves of the page."""
    n_attention_bytes = sum(each_store.attention_bytes for each_store in contents)
    tokens = [site.tokens for each_store in contents for site in each_store.sites]
    packed = iter(pack_tokens(tokens, MAX_BYTES - n_attention_bytes))
    for each_store in contents:
        each_store.packed = [next(packed) for _ in each_store.sites]


def choose_images(
    stores: Sequence[Store],
    last: SiteSpec,
    *,
    names: Sequence[str],
    n: int,
    pick: str,
    seed: int,
) -> list[list[int]]:
    """Return each store's rows of the images to show, the same images in the same order.

    Args:
        stores: one or more.
        last: the site of the first store whose vectors decide.
        names: ids, or rows of the first store; if there are none, images are picked.
        n: number of images to pick, at most.
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
        distinct_names = list(dict.fromkeys(names))
        # An id and a row may name one image.
        first_rows = list(dict.fromkeys(find_rows(first, distinct_names).tolist()))
        ids = [str(image_id) for image_id in first.samples.id[first_rows]]
        rows = [first_rows]
        rows += [find_rows(other, ids).tolist() for other in others]
    else:
        common_rows, *_ = paired_rows(stores, choose_rows(first), pair_by="id")
        candidates = common_rows[first.manifest.store_id]
        if not len(candidates):
            raise StoreMismatch(
                f"{first.label} has no image that could be read in every store"
            )
        picked = _pick_images(first, last, candidates, n=n, pick=pick, seed=seed)
        rows = [common_rows[store.manifest.store_id][picked].tolist() for store in stores]
    for other, other_rows in zip(others, rows[1:], strict=True):
        is_different = first.samples.hash[rows[0]] != other.samples.hash[other_rows]
        n_different = int(is_different.sum())
        if n_different:
            log.warning(
                "%s was made from other bytes than %s for %d of the %d images (of the "
                "same ids); the page shows the pictures of %s",
                other.label,
                first.label,
                n_different,
                len(other_rows),
                first.label,
            )
    return rows


def _pick_images(
    store: Store, site: SiteSpec, rows: Integers, *, n: int, pick: str, seed: int
) -> Integers:
    """Return (at most n,) indices into `rows`.

    Args:
        store: the first one.
        site: its pooled vectors decide.
        rows: (candidates,) of the store.
        n: number of images to pick.
        pick: one of `PICKS`.
        seed: of everything random.

    Raises:
        VitseeError: fewer than n images have a vector.
    """
    rng = np.random.default_rng(seed)
    sample = rng.permutation(len(rows))[:SAMPLE]
    if n >= len(rows):
        return np.arange(len(rows))
    if pick == RANDOM:
        return sample[:n]
    sample = np.sort(sample)  # the store is read in its order
    vectors = np.asarray(store.pooled(site.name)[rows[sample]], np.float32)
    lengths = np.linalg.norm(vectors, axis=1)
    has_direction = np.isfinite(lengths) & (lengths > 0)
    if has_direction.sum() < n:
        raise VitseeError(
            f"{int(has_direction.sum())} images of {store.label} have a vector in "
            f"{site.name}: {n} cannot be picked by it (use --pick {RANDOM})"
        )
    sample = sample[has_direction]
    units = vectors[has_direction] / lengths[has_direction, np.newaxis]
    picked = _central_images(units, n, seed) if pick == DIVERSE else _outliers(units, n)
    indices: Integers = sample[picked]
    return indices


def _central_images(units: Float32, n: int, seed: int) -> Integers:
    """Return (n,) the vector nearest to the mean of each of n groups by k-means.

    Args:
        units: (images, dim) of length 1.
        n: number of groups.
        seed: of the starts.
    """
    from scipy.cluster.vq import kmeans2  # takes a fifth of scikit-learn's time to import

    rng = np.random.default_rng(seed)
    best_distances = np.empty((0, n), np.float32)
    best_labels = np.empty(0, np.int32)
    best_sum = np.inf
    for _ in range(STARTS):
        with warnings.catch_warnings():
            # About empty groups, as equal vectors make them.
            warnings.simplefilter("ignore", UserWarning)
            means, labels = kmeans2(units, n, ROUNDS, minit="++", seed=rng)
        # |x - m|^2 = |m|^2 - 2 x . m + |x|^2, less |x|^2 = 1: (images, groups)
        distances = (means**2).sum(1) - 2 * units @ means.T
        distance_sum = float(distances.min(1).sum())
        if not best_labels.size or distance_sum < best_sum:
            best_sum = distance_sum
            best_distances = distances
            best_labels = labels
    picked: list[int] = []
    for group in range(n):
        # Images of other groups last: they stand in for an empty group.
        distance = np.where(best_labels == group, best_distances[:, group], np.inf)
        order = np.argsort(distance, kind="stable").tolist()
        picked.append(next(i for i in order if i not in picked))
    return np.array(picked, np.int64)


def _outliers(units: Float32, n: int) -> Integers:
    """Return (n,) the vectors farthest from their nearest ones, the farthest first."""
    k = min(NEIGHBOURS, len(units) - 1)
    cosines = units @ units.T
    np.fill_diagonal(cosines, -np.inf)  # a vector is not its own neighbour
    nearest = np.partition(cosines, -k, axis=1)[:, -k:]
    order: Integers = np.argsort(nearest.mean(1), kind="stable")
    return order[:n]
