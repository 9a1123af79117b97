"""`vitsee explore`: a page on which one clicks a patch and sees it in every layer of every store.

Only the rows of the shown images are read. What the page computes are cosines of packed tokens (see
`tokens`, which measures their error); norms, PCA colours, attention and the classifier's answers
are looked up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.explore.answers import answers_of
from vitsee_core.explore.attended import attention_of
from vitsee_core.explore.choice import DIVERSE, choose_images
from vitsee_core.explore.colours import reference
from vitsee_core.explore.contents import StoreContents, read_sites
from vitsee_core.explore.page import render, steps_of
from vitsee_core.explore.tokens import MOST_BYTES, pack_tokens
from vitsee_core.models.provenance import Provenance
from vitsee_core.patch_maps.photos import Shown
from vitsee_core.patch_maps.views import View, grid_sites
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.progress import SILENT, SITE_IMAGES, Progress, counting
from vitsee_core.runtime.store_selection import select_each
from vitsee_core.tables.files import check_new_files, write_files
from vitsee_stores.errors import MissingInput, SiteError, StoreMismatch

if TYPE_CHECKING:
    from vitsee_stores import Store

log = logging.getLogger(__name__)

IMAGES = 12


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
        pick: "diverse", "random" or "outliers"; see `choice`.
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
        StoreMismatch: no image is in all stores.
        VitseeError: no such image; the file exists or cannot be written.
    """
    place = Path(output)
    check_new_files([place], force=force)
    if steps := steps_of([store.label for store in stores]):
        order = np.argsort(steps["numbers"])
        stores = tuple(stores[k] for k in order)
    selected = select_each(stores, sites, grid_sites)
    rows = choose_images(selected.stores, selected.chosen[0][-1], image, images, pick, seed)
    parts = [
        Shown(store, View.of(store, own), of_store, own)
        for (store, own), of_store in zip(selected.members, rows, strict=True)
    ]
    parts = [_by_time(part) for part in parts]
    _check_times(parts)
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
                raise MissingInput("a page of clips has no answers of patches (see vitsee lens)")
            one.answers = answers_of(part, again)
        except MissingInput as missing:
            one.answers = str(missing)
        contents.append(one)
    room = MOST_BYTES - sum(one.attention_bytes for one in contents)
    packed = iter(pack_tokens([own.tokens for one in contents for own in one.sites], room))
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


def _by_time(part: Shown) -> Shown:
    """The part with each place in time of its clips as an image of its own; as it is of images.

    Raises:
        SiteError: sites with other numbers of places in time.
    """
    layouts = {site.name: part.store.site(site.name).layout for site in part.sites}
    times = {name: layout.frames for name, layout in layouts.items() if layout is not None}
    numbers = dict.fromkeys(times.values())
    if len(numbers) > 1:
        a, b = (next(site for site, own in times.items() if own == n) for n in [*numbers][:2])
        raise SiteError(
            f"{part.store.label}: {a} has {times[a]} places in time and {b} {times[b]}; explore "
            "shows sites with one number of them: choose these with --sites"
        )
    n_times = next(iter(numbers)) or 1
    return replace(part, rows=[row for row in part.rows for _ in range(n_times)], times=n_times)


def _check_times(parts: Sequence[Shown]) -> None:
    """Raise StoreMismatch: stores with other numbers of places in time."""
    for part in parts[1:]:
        if part.times != parts[0].times:
            raise StoreMismatch(
                f"{parts[0].store.label} and {part.store.label} have {parts[0].times} and "
                f"{part.times} places in time; explore shows stores with one number of them"
            )
