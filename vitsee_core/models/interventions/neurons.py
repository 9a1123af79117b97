"""Register neurons: those of the hidden layers of MLPs that are most active at patches of outlying
norm (Jiang et al. 2025, arXiv 2506.08010), from a store of the unchanged model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitsee_core.models.hook_points import ModelError
from vitsee_stores import Store

N_MAD = 6 * 1.4826  # as of `outlier_share_mad` of vitsee norms
Neurons = Mapping[str, NDArray[np.int64]]


@dataclass(frozen=True)
class Moved:
    """The activations of these neurons of one site, at each image, move to the tokens `places`,
    which all get the largest one of all tokens; the other tokens get 0."""

    places: NDArray[np.int64]
    neurons: NDArray[np.int64]

    def put(self, x: Tensor) -> None:
        """Change a site's (images, tokens, neurons) in place."""
        values = x[:, :, self.neurons]
        moved = torch.zeros_like(values)
        moved[:, self.places] = values.amax(1, keepdim=True)
        x[:, :, self.neurons] = moved


def register_neurons(store: Store, site: str, hidden: Sequence[str], n: int) -> Neurons:
    """The n neurons of these sites with the largest mean activation at outliers, by site in the
    order of `hidden`; of equal ones the first.

    Outliers are the patches of all valid images whose norm at `site` is above median + 6 x 1.4826
    median absolute deviations of them all.

    Raises:
        MissingInput: a site is not stored with all of its tokens.
        ModelError: there are no outliers, or fewer than n neurons.
    """
    outliers = _outliers(store, site)
    means = {name: _means(store, name, outliers) for name in hidden}
    total = sum(map(len, means.values()))
    if n > total:
        raise ModelError(f"there are {total} neurons up to {site}, not {n}")
    values = np.concatenate(list(means.values()))
    chosen = np.zeros(total, np.bool_)
    chosen[np.argsort(-values, kind="stable")[:n]] = True
    ends = np.cumsum([len(x) for x in means.values()])[:-1]
    parts = zip(means, np.split(chosen, ends), strict=True)
    return {name: np.flatnonzero(part) for name, part in parts if part.any()}


def other_neurons(found: Neurons, sizes: Mapping[str, int], seed: int) -> Neurons:
    """The same number of neurons of each site, drawn from those of its `sizes[site]` that were not
    found.

    Raises:
        ModelError: so many others do not exist.
    """
    drawn: dict[str, Any] = {}
    for i, (name, neurons) in enumerate(found.items()):
        others = np.setdiff1d(np.arange(sizes[name]), neurons)
        if len(others) < len(neurons):
            raise ModelError(f"{name} has {len(others)} other neurons, not {len(neurons)}")
        draw = np.random.default_rng([seed, i])
        drawn[name] = np.sort(draw.choice(others, len(neurons), replace=False))
    return drawn


def _outliers(store: Store, site: str) -> list[NDArray[np.bool_]]:
    """A mask for each slab, (valid images, rows, cols): whether a patch is an outlier."""
    norms = []
    for slab in store.slabs():
        patches = slab.acts(site, "patches")[slab.valid]
        norms.append(np.linalg.norm(patches.astype(np.float32), axis=-1))
    every = np.concatenate([x.ravel() for x in norms]) if norms else np.zeros(0)
    middle = np.median(every) if len(every) else 0.0
    above = middle + N_MAD * np.median(np.abs(every - middle)) if len(every) else 0.0
    outliers = [x > above for x in norms]
    if not any(x.any() for x in outliers):
        raise ModelError(
            f"no patch of {site} in {store.label} has an outlying norm, above {above:.4g}; "
            f"expected a site with outliers (run: vitsee norms {store.label}.zarr)"
        )
    return outliers


def _means(store: Store, site: str, outliers: Sequence[NDArray[np.bool_]]) -> NDArray[np.float64]:
    """(neurons,) mean activation at the outliers."""
    total, count = np.zeros(()), 0
    for slab, there in zip(store.slabs(), outliers, strict=True):
        if there.any():
            values = slab.acts(site, "patches")[slab.valid][there]
            total = total + values.sum(0, dtype=np.float64)
            count += len(values)
    return np.asarray(total / count)
