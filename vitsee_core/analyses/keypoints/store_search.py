"""Rows of one store: searches at each of its sites, their baselines, and the scores of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.keypoints.positions import LocatedKeypoints
from vitsee_core.analyses.keypoints.protocol import CLASS, GROUP, RANDOM, Protocol
from vitsee_core.analyses.keypoints.scoring import (
    KeypointScorer,
    baseline_hits,
    hits_within,
)
from vitsee_core.analyses.keypoints.search import (
    n_images,
    search_sites,
    split_target_rows,
)
from vitsee_core.runtime.execution import Execution
from vitsee_core.tables.columns import site_columns
from vitsee_core.types import Float, Mask
from vitsee_stores import Store

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, TokenLayout


@dataclass(frozen=True)
class StoreSearch:
    """Searches for the keypoints of one store.

    Attributes:
        store: holds the images.
        sites: sites with a grid.
        located: the keypoints.
        scorer: makes rows of what is found.
        protocol: how keypoints are matched and scored.
        row_ranges: ranges of the store's rows, each searched by one process.
        with_noise: whether random features are searched, too.
    """

    store: Store
    sites: Sequence[SiteSpec]
    located: LocatedKeypoints
    scorer: KeypointScorer
    protocol: Protocol
    row_ranges: Sequence[slice]
    with_noise: bool

    @classmethod
    def plan(
        cls,
        store: Store,
        sites: Sequence[SiteSpec],
        located: LocatedKeypoints,
        *,
        metrics: Sequence[str],
        protocol: Protocol,
        with_noise: bool,
        execution: Execution,
    ) -> StoreSearch:
        """Return the search, with work for all processes.

        Args:
            store: holds the images.
            sites: sites with a grid.
            located: the keypoints of the store's images.
            metrics: some of `scoring.METRICS`.
            protocol: how keypoints are matched and scored.
            with_noise: whether random features are searched, too.
            execution: the number of processes.
        """
        return cls(
            store=store,
            sites=sites,
            located=located,
            scorer=KeypointScorer.from_keypoints(located, metrics),
            protocol=protocol,
            row_ranges=split_target_rows(store, len(sites), execution),
            with_noise=with_noise,
        )

    def n_reads(self) -> int:
        """Return the number of images that are read, once per search, for the progress bar."""
        # Baselines without features read no image.
        n_searches = len(self.sites) + len(self._noise_sites())
        return n_searches * sum(
            n_images(self.located, target_rows) for target_rows in self.row_ranges
        )

    def site_rows(self, execution: Execution) -> Iterator[dict[str, Any]]:
        """Search each site and yield its rows."""
        predictions = search_sites(
            self.store,
            self.sites,
            self.located,
            self.protocol.match,
            row_ranges=self.row_ranges,
            execution=execution,
        )
        for site, predicted in zip(self.sites, predictions, strict=True):
            # (points, 2) positions become (points, alphas) hits.
            hits = hits_within(self.located, predicted, self.protocol.alphas)
            yield from self._rows(site, hits, baseline="")

    def baseline_rows(self, execution: Execution) -> Iterator[dict[str, Any]]:
        """Yield the rows of each site's baselines, after a search among random features."""
        noise_hits = self._noise_hits(execution)
        # Only the grid decides, and sites of a model share it.
        hits_by_layout: dict[TokenLayout, dict[str, Float]] = {}
        for site in self.sites:
            layout = site.layout
            assert layout is not None
            if layout not in hits_by_layout:
                hits_by_layout[layout] = baseline_hits(
                    self.located, layout, self.protocol.match, self.protocol.alphas
                )
            for baseline, hits in hits_by_layout[layout].items():
                yield from self._rows(site, hits, baseline)
            if self.with_noise:
                yield from self._rows(site, noise_hits[layout, site.dim], RANDOM)

    def _noise_sites(self) -> list[SiteSpec]:
        """Return the first site with each layout and dimension, all that random features vary by.

        None if random features are not searched.
        """
        if not self.with_noise:
            return []
        first_sites: dict[tuple[TokenLayout | None, int], SiteSpec] = {}
        for site in self.sites:
            first_sites.setdefault((site.layout, site.dim), site)
        return list(first_sites.values())

    def _noise_hits(
        self, execution: Execution
    ) -> dict[tuple[TokenLayout | None, int], Float]:
        """Return (layout, dimension) -> (points, alphas) hits of random features."""
        sites = self._noise_sites()
        predictions = search_sites(
            self.store,
            sites,
            self.located,
            self.protocol.match,
            row_ranges=self.row_ranges,
            execution=execution,
            noise_seed=execution.seed,
        )
        return {
            (site.layout, site.dim): hits_within(
                self.located, predicted, self.protocol.alphas
            )
            for site, predicted in zip(sites, predictions, strict=True)
        }

    def _rows(
        self, site: SiteSpec, hits: Float, baseline: str
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of one site or baseline: of all pairs, then of each group.

        Args:
            site: the site that the rows name.
            hits: (points, alphas) 1 where a keypoint was found, or the probability of that.
            baseline: name of the baseline, "" for the model.
        """
        for group_cells, pairs in self._pair_groups():
            for cells in self.scorer.rows(hits, self.protocol.alphas, pairs):
                yield {
                    **site_columns(self.store, site),
                    **group_cells,
                    **cells,
                    "baseline": baseline,
                }

    def _pair_groups(self) -> Iterator[tuple[dict[str, str], Mask | None]]:
        """Yield the cells that name a group, and its (pairs,) mask.

        The first is all pairs, with None for the mask; then each group that the user asked for.
        """
        yield {CLASS: "", GROUP: ""}, None
        pairs = self.located.pairs
        for word in self.protocol.by_group:
            if word == CLASS:
                values = np.array([pair.category for pair in pairs])
            else:
                values = np.array([pair.variations[word] for pair in pairs])
            # Sorted, so that the table does not depend on the order of pairs.
            for value in np.unique(values).tolist():
                if word == CLASS:
                    cells = {CLASS: value, GROUP: ""}
                else:
                    cells = {CLASS: "", GROUP: f"{word} {value}"}
                yield cells, values == value
