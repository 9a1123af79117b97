"""Results of the sites of one store, as columns of the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from vitsee_core.analyses.localize.localisation import (
    SITE_METRICS,
    TOKEN_METRICS,
    Maps,
    chance,
    replicates_of,
    site_summary,
    token_summary,
)
from vitsee_core.analyses.localize.site_maps import SiteMaps
from vitsee_core.runtime.execution import Execution
from vitsee_core.similarity import Estimator
from vitsee_core.similarity.estimators import batch_sizes
from vitsee_core.similarity.stacks import input_pixels
from vitsee_core.tables.columns import site_columns
from vitsee_core.types import Integers

if TYPE_CHECKING:
    from vitsee_stores import Store


class SiteTable(TypedDict):
    """The result for one site: plain values and arrays, so that a killed run can keep it.

    Attributes:
        columns: column of the table -> array, or a scalar for all rows.
        site: name of the site.
        notes: notes on the estimate.
        patch_px: (channels, rows, cols) of a patch.
    """

    columns: dict[str, Any]
    site: str
    notes: dict[str, Any]
    patch_px: tuple[int, ...]


def compare_sites(
    site_maps: SiteMaps,
    images: Integers,
    *,
    estimator: Estimator,
    data: str | None,
    summary: str | None,
    execution: Execution,
) -> list[SiteTable]:
    """Return the result for each site of a store, in their order.

    Args:
        site_maps: the sites.
        images: rows of the images that are compared.
        estimator: of HSIC.
        data: where the images are, if the store does not keep their pixels.
        summary: "token", "site" or None.
        execution: resources.
    """
    if estimator.kind == "minibatch":
        # Decided here, so that sizes which the data cap are logged once, not for each grid.
        batch, examples, repeats = batch_sizes(estimator, len(images))
        estimator = Estimator(
            "minibatch", batch=batch, examples=examples, repeats=repeats
        )
    compare = _CompareSites(
        site_maps=site_maps,
        images=images,
        estimator=estimator,
        seed=execution.seed,
        data=data,
        summary=summary,
    )
    # Sites with the same patches are compared in one pass over the pixels.
    groups = site_maps.groups_in_memory(estimator, execution.budget)
    if execution.map is not None:
        # More processes are worth more than reading the pixels once for several sites.
        groups = [[k] for group in groups for k in group]
    by_site: dict[int, SiteTable] = {}
    results = execution.spread(compare, groups, unit="sites")
    for group, site_tables in zip(groups, results, strict=True):
        by_site.update(zip(group, site_tables, strict=True))
    return [by_site[k] for k in sorted(by_site)]


@dataclass
class _CompareSites:
    """Computes the maps of a group of sites, as columns of the table.

    Attributes:
        site_maps: the sites of a store.
        images: rows of the images that are compared.
        estimator: of HSIC.
        seed: of minibatches and jackknife blocks.
        data: where the images are, if the store does not keep their pixels.
        summary: "token", "site" or None for maps.
        pixels: of the images; read by the first call, in every process.
    """

    site_maps: SiteMaps
    images: Integers
    estimator: Estimator
    seed: int
    data: str | None
    summary: str | None
    pixels: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the pixels, which are too large to send to a process."""
        return {**self.__dict__, "pixels": None}

    def __call__(self, execution: Execution, group: Sequence[int]) -> list[SiteTable]:
        """Return the results for the sites with these indices, which share their patches."""
        store = self.site_maps.store
        if self.pixels is None:
            self.pixels = input_pixels(store, self.images, self.data, execution.progress)
        all_maps = self.site_maps.maps(
            group,
            pixels=self.pixels,
            images=self.images,
            estimator=self.estimator,
            seed=self.seed,
            execution=execution,
        )
        return [
            SiteTable(
                columns=_table_columns(maps, store, self.summary),
                site=maps.site.name,
                notes=maps.h.notes,
                patch_px=maps.patch_px,
            )
            for maps in all_maps
        ]


def _table_columns(maps: Maps, store: Store, summary: str | None) -> dict[str, Any]:
    """Return the table's columns for one site's maps: name -> array, or a scalar for all rows.

    Args:
        maps: the site's maps.
        store: the site's store.
        summary: "token", "site" or None for a row per token and patch.
    """
    if summary is None:
        columns = _map_columns(maps)
    elif summary == "token":
        columns = _token_columns(maps)
    else:
        columns = _site_columns(maps)
    n_rows = len(columns["metric"])
    columns.update(site_columns(store, maps.site))
    columns["spread"] = maps.h.spread
    columns["n_images"] = maps.h.n_images
    replicates = replicates_of(maps, summary)
    if replicates is not None:
        # The last row of a site's summary, the value of chance, has none.
        missing = n_rows - len(replicates)
        columns["replicates"] = np.pad(
            replicates, [(0, missing), (0, 0)], constant_values=np.nan
        )
    return columns


def _map_columns(maps: Maps) -> dict[str, Any]:
    """Return one row per token and patch, tokens first."""
    n_tokens, n_patches = maps.h.cross.shape
    rows, cols = np.divmod(np.arange(n_patches), maps.n_cols)  # patches go row by row
    similarity = maps.similarity
    return {
        "token": np.repeat(maps.tokens, n_patches),
        "row": np.tile(rows, n_tokens),
        "col": np.tile(cols, n_tokens),
        "metric": np.full(n_tokens * n_patches, "cka"),
        "value": similarity.cka.ravel(),
        "std": similarity.std.ravel(),
        "low": similarity.low.ravel(),
        "high": similarity.high.ravel(),
    }


def _token_columns(maps: Maps) -> dict[str, Any]:
    """Return one row per token and metric; `row` and `col` are the token's own patch."""
    rows, cols = np.divmod(np.arange(maps.h.cross.shape[1]), maps.n_cols)
    columns: dict[str, Any] = {
        "token": np.repeat(maps.tokens, len(TOKEN_METRICS)),
        "row": np.repeat(rows[maps.cells], len(TOKEN_METRICS)),
        "col": np.repeat(cols[maps.cells], len(TOKEN_METRICS)),
        "metric": np.tile(TOKEN_METRICS, len(maps.tokens)),
    }
    for name, values in token_summary(maps).items():  # (tokens, metrics)
        columns[name] = values.ravel()
    return columns


def _site_columns(maps: Maps) -> dict[str, Any]:
    """Return one row per metric, and one with the value of `own_top1` by chance."""
    n_tokens, numbers = site_summary(maps)
    return {
        "metric": np.array([*SITE_METRICS, "own_top1"]),
        "value": np.append(numbers["value"], chance(maps)),
        "std": np.append(numbers["std"], np.nan),
        "low": np.append(numbers["low"], np.nan),
        "high": np.append(numbers["high"], np.nan),
        "n_tokens": np.full(len(SITE_METRICS) + 1, n_tokens),
        "baseline": np.array([""] * len(SITE_METRICS) + ["chance"]),
    }
