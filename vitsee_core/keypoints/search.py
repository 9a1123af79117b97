"""The keypoints of all pairs at one site, in two passes over the store.

The first takes the feature of each source keypoint, the second looks for them in the target images.
Memory: one slab of the site as it is stored, one image in float32, the features of the distinct
source keypoints (6,000 of SPair-71k's test split), and a piece of similarities.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.device import precision_context, to_device
from vitsee_core.keypoints.candidates import candidates, cells_of
from vitsee_core.keypoints.matching import find, sample, unit
from vitsee_core.progress import SILENT, Progress
from vitsee_core.streaming import Rows, each_slab
from vitsee_core.types import Float, Integers
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.keypoints.located import Located
    from vitsee_stores import SiteSpec, Slab, Store


def search(
    store: Store,
    site: SiteSpec,
    located: Located,
    match: str,
    *,
    device: torch.device,
    progress: Progress = SILENT,
) -> Float:
    """(points, 2) x, y on the input where each keypoint is found.

    Args:
        store: holds the images.
        site: with a grid.
        located: the keypoints.
        match: one of `protocol.MATCHES`.
        device: makes the products.
        progress: advanced by `n_images(located)`.

    Raises:
        VitseeError: a number of the store is not finite.
    """
    layout = site.layout
    assert layout is not None
    cells = cells_of(layout)
    rows = located.source_row[located.pair]
    keys = np.concatenate([rows[:, None], located.source], 1)
    each, which = np.unique(keys, axis=0, return_inverse=True)
    bank = torch.zeros(len(each), site.dim, device=device)
    found = np.empty_like(located.target)
    with precision_context(device, "fp32"):
        for row, tokens in _images(store, site, each[:, 0].astype(np.int64), device, progress):
            own = np.flatnonzero(each[:, 0] == row)
            features = sample(tokens, cells, each[own, 1:], match, located.size)
            bank[torch.from_numpy(own).to(device)] = features
        groups = located.groups()
        targets = np.array([group.row for group in groups], np.int64)
        for row, tokens in _images(store, site, targets, device, progress):
            for i in np.flatnonzero(targets == row):
                points = groups[i].points
                down, across = candidates(layout, located.size, groups[i].window, match)
                sources = bank[torch.from_numpy(which[points]).to(device)]
                found[points] = find(sources, tokens, down, across, match)
    return found


def n_images(located: Located) -> int:
    """How many images a search reads: sources, then targets."""
    return sum(len(np.unique(rows)) for rows in (located.source_row, located.target_row))


def _images(
    store: Store, site: SiteSpec, rows: Integers, device: torch.device, progress: Progress
) -> Iterator[tuple[int, torch.Tensor]]:
    """Row and (rows, cols, dim) unit tokens of each of these images, in the store's order."""
    mask = np.zeros(store.n_images, bool)
    mask[rows] = True
    work = partial(_read, site.name)
    for numbers, values in each_slab(store, work, rows=Rows(mask, 0, ""), progress=progress):
        for row, tokens in zip(numbers, values, strict=True):
            if not np.isfinite(tokens).all():
                raise VitseeError(
                    f"{store.label} holds numbers in {site.name} that are not finite, in "
                    f"row {row} (look at it with vitsee validate)"
                )
            yield int(row), unit(to_device(tokens, device))


def _read(site: str, slab: Slab) -> tuple[Integers, list[NDArray[Any]]]:
    """Numbers of a slab's images that count, and (rows, cols, dim) of each, as stored."""
    values = slab.store.acts(site, "patches", partial=True)[slab.rows]
    own = np.flatnonzero(slab.valid)
    return slab.rows.start + own, [values[i] for i in own]
