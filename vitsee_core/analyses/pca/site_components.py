"""Axes, scores and colours of the sites of one store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.pca.projection import (
    AXIS_METRICS,
    SIDES,
    Patches,
    PatchScores,
    axis_rows,
    centre_side,
    project,
)
from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.figures.patch_maps.colours import (
    CHANNELS,
    FEWEST,
    Colours,
    matched,
    rotation_to,
)
from vitsee_core.figures.patch_maps.photos import SheetImages
from vitsee_core.figures.patch_maps.views import View
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.streaming import Rows
from vitsee_core.statistics.covariance import (
    CovarianceSums,
    PrincipalAxes,
    block_sums,
    principal_axes,
    say_cost,
    total,
)
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.tables.columns import cell_columns, site_columns
from vitsee_core.types import Integers
from vitsee_stores import Store
from vitsee_stores.errors import SiteError, VitseeError

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)

METRICS = (*AXIS_METRICS, "score")
MAX_SAMPLE_IMAGES = 256  # that decide ranges and rotations of colours


@dataclass(frozen=True)
class ComponentOptions:
    """The options of `run` that each site needs.

    Attributes:
        components: number of axes.
        normalise: whether tokens are brought to length 1 first.
        foreground: one of `FOREGROUND`, the patches that are kept.
        fit_shown: whether axes are of the images shown alone.
    """

    components: int
    normalise: bool
    foreground: str
    fit_shown: bool


class StoreComponents:
    """Fits axes for each site of one store.

    Attributes:
        rows: the images that axes are fitted on.
        blocks: the blocks of images that the jackknife leaves out one by one.
        sheet: the images shown, and where their patches lie.
        features: site -> its patches.
        sample: rows of the images whose scores decide the colours, and of those shown; ascending.
    """

    def __init__(
        self,
        store: Store,
        sites: list[SiteSpec],
        image_rows: list[int],
        options: ComponentOptions,
        execution: Execution,
    ) -> None:
        self.store = store
        self.sites = sites
        self.options = options
        self.execution = execution
        self.rows = execution.rows(store)
        if options.fit_shown:
            mask = np.zeros(store.n_images, bool)
            mask[image_rows] = True
            self.rows = Rows(mask, 0, "those shown")
        is_counted = self.rows.mask & store.valid
        self.blocks = Blocks.of(store, is_counted, execution.seed)
        self.sheet = SheetImages(store, View.of(store, sites), image_rows, sites)
        self.features = {
            site.name: choose_features(store, site, "patches", partial=True)
            for site in sites
        }
        # Of all sites, so that errors come before any work.
        for features in self.features.values():
            self._require_room(features)
        row_indices = np.flatnonzero(is_counted)
        # Images in the order of their classes would make a sample of the first classes alone.
        if not store.shuffled:
            rng = np.random.default_rng(execution.seed)
            row_indices = row_indices[rng.permutation(len(row_indices))]
        self.sample: Integers = np.union1d(
            row_indices[:MAX_SAMPLE_IMAGES], np.array(image_rows, np.int64)
        )

    def _require_room(self, features: SiteFeatures) -> None:
        """Refuse, before any work, more components than channels and more than fits the memory.

        Raises:
            SiteError: the site has fewer channels than components were asked for.
            VitseeError: the second moments do not fit the memory.
        """
        label = self.store.label
        dim = features.dim
        name = features.site.name
        if self.options.components > dim:
            raise SiteError(
                f"{name} of {label} has {dim} channels and so no more components; "
                f"{self.options.components} were asked for"
            )
        # A float64 matrix per block, their sum, and what the eigendecomposition takes.
        n_bytes = 8 * dim**2 * (self.blocks.n + 4)
        if n_bytes > self.execution.budget:
            raise VitseeError(
                f"the axes of {name} of {label} ({dim} channels) take "
                f"{human_bytes(n_bytes)} of memory; --memory is "
                f"{human_bytes(self.execution.budget)}"
            )

    def say_cost(self) -> float:
        """Log what a pass over all sites costs; return its multiply-adds."""
        return say_cost(list(self.features.values()), self.rows.n)

    def measure(self, site: SiteSpec) -> SiteComponents:
        """Return the axes of a site and the scores of the sample.

        Raises:
            VitseeError: fewer than two patches count, as with an empty foreground.
        """
        features = self.features[site.name]
        view = self.sheet.view
        layout = self.store.site(site.name).layout
        assert layout is not None
        k = self.options.components
        patches = Patches(view, layout, self.options.normalise)
        sums = self._second_moments(features, patches)
        axes = principal_axes(total(sums), k)
        patch_scores = project(features, patches, axes, self.sample, self.execution)
        side = None
        if self.options.foreground != "none":
            # DINOv2, Fig. 1: the first axis of all patches tells the object from the background,
            # and the axes of the object's patches alone are then computed anew.
            side = SIDES.get(self.options.foreground)
            if side is None:
                side = centre_side(patch_scores, view, layout)
            patches = replace(patches, first_axes=axes, side=side)
            sums = self._second_moments(features, patches)
            axes = principal_axes(total(sums), k)
            patch_scores = project(features, patches, axes, self.sample, self.execution)
        return SiteComponents(
            self, site, layout, axes, patch_scores, sums=sums, side=side
        )

    def _second_moments(
        self, features: SiteFeatures, patches: Patches
    ) -> list[CovarianceSums]:
        """Return the sums of each block of images, over the patches that count.

        Raises:
            VitseeError: fewer than two patches count.
        """
        sums = block_sums(
            features, self.rows, self.blocks.of_rows, self.execution, patches
        )
        n = sum(block.n for block in sums)
        if n < 2:
            raise VitseeError(
                f"{features.site.name} of {self.store.label} has {n} patches that count: "
                "no axes"
            )
        return sums


class SiteComponents:
    """The axes of one site, the scores of the sample, and their colours.

    Args:
        components: the axes of the site's store.
        site: the site.
        layout: where its tokens lie.
        axes: the axes of all patches that count.
        patch_scores: the scores of the sample.
        sums: second moments of each block of images.
        side: the sign of the foreground's first scores, None without a foreground.
    """

    def __init__(
        self,
        components: StoreComponents,
        site: SiteSpec,
        layout: TokenLayout,
        axes: PrincipalAxes,
        patch_scores: PatchScores,
        *,
        sums: Sequence[CovarianceSums],
        side: int | None,
    ) -> None:
        self.components = components
        self.site = site
        self.layout = layout
        self.axes = axes
        self.patch_scores = patch_scores
        self.side = side
        # Now, so that no site's second moments outlive it.
        n_images = int((components.rows.mask & components.store.valid).sum())
        self.axis_rows = axis_rows(sums, axes, n_images, components.execution.jobs)
        self.colours = Colours.of(patch_scores.counted[:, :CHANNELS])

    @cached_property
    def ids(self) -> list[str]:
        """Return the names of the sample's images."""
        return [
            str(name) for name in self.components.store.samples.id[self.patch_scores.rows]
        ]

    def align(self, guide: SiteComponents) -> None:
        """Rotate the colours to those of another site.

        The rotation is the one that brings patches at the same places of the photographs nearest to
        each other (orthogonal Procrustes, Schönemann 1966), over the images in both samples. With
        too few of them, colours stay and a warning is logged.
        """
        if guide is self:
            return
        view = self.components.sheet.view
        guide_view = guide.components.sheet.view
        row_by_id = dict(zip(self.ids, self.patch_scores.rows.tolist(), strict=True))
        matched_scores = []
        guide_rows = guide.patch_scores.rows.tolist()
        for name, guide_row in zip(guide.ids, guide_rows, strict=True):
            if name not in row_by_id:
                continue
            row = row_by_id[name]
            # The guide's patches that lie where this site's patches lie on the photograph.
            cells = view.cells_like(self.layout, row, guide_view, guide.layout, guide_row)
            scores = self.patch_scores.image_scores(row)[:, :CHANNELS]
            targets = guide.patch_scores.image_scores(guide_row)[:, :CHANNELS]
            is_counted = ~np.isnan(scores[:, 0])
            matched_scores.append(matched(scores, is_counted, cells, targets))
        # (patches, 3) of this site, and of the same places of the guide.
        site_scores = np.concatenate([scores for scores, _ in matched_scores])
        guide_scores = np.concatenate([scores for _, scores in matched_scores])
        n_matched = len(site_scores)
        if n_matched < FEWEST:
            log.warning(
                "%s: colours of %s are not aligned: %d patches in common with the "
                "reference",
                self.components.store.label,
                self.site.name,
                n_matched,
            )
            return
        rotation = rotation_to(site_scores, guide_scores)
        counted = self.patch_scores.counted[:, :CHANNELS]
        self.colours = Colours.of(counted, rotation, n_matched)

    def describe(self) -> dict[str, Any]:
        """Return rotation and range of the colours, and the side of the foreground, as a note."""
        note = self.colours.describe()
        if self.side is not None:
            note["foreground_side"] = self.side
        return note

    def table_rows(self) -> list[dict[str, Any]]:
        """Return rows about the axes, then a block of rows for each image shown.

        Such a block has a score per component and patch.
        """
        site_cells = site_columns(self.components.store, self.site)
        blocks = [{**site_cells, **row} for row in self.axis_rows]
        for image_row in self.components.sheet.rows:
            # (cells, k)
            scores = self.patch_scores.image_scores(image_row)
            cells = np.flatnonzero(~np.isnan(scores[:, 0]))
            k = scores.shape[1]
            blocks.append(
                {
                    **site_cells,
                    "image": str(self.components.store.samples.id[image_row]),
                    # Component by component, as `scores.T` is laid out.
                    **cell_columns(self.layout, np.tile(cells, k)),
                    "component": np.repeat(np.arange(1, k + 1), len(cells)),
                    "metric": METRICS[-1],
                    "value": scores[cells].T.ravel(),
                }
            )
        return blocks
