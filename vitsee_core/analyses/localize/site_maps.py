"""The chosen tokens of a store's sites, and the maps that are computed of them.

Sites are checked before any work. Those whose grids are alike have the same patches, and are
computed together.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.localize.localisation import Maps, every_nth
from vitsee_core.features import choose_features
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.lanes import say_cost
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.similarity import Estimator, Hsic
from vitsee_core.similarity.on_the_fly import hsic_on_the_fly, multiplications, shapes
from vitsee_core.similarity.stacks import (
    PatchPixels,
    Stack,
    TokenStack,
    patch_shape,
    pixels_shape,
)
from vitsee_core.types import Integers
from vitsee_stores.errors import SiteError, VitseeError
from vitsee_stores.manifest import by_reason
from vitsee_stores.selectors import TokenSelection

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)

WORDS = ("each", "cls")
# Tokens times patches of a site up to which all tokens are compared by default: grids of up to
# 38 x 38. A constant beside the memory, so that machines give the same table.
MAX_PAIRS = 1 << 21
JACKKNIFE_COPIES = 21  # the values of all images, and 20 replicates
DEFAULT_REPEATS = 20


@dataclass(frozen=True)
class SiteTokens:
    """The selected tokens of a site.

    Attributes:
        site: the site.
        layout: its tokens.
        stacks: where the selected tokens are read from.
        names: names of the selected tokens.
        cells: (tokens,) their cells of the grid, -1 for the class token.
        thinned: which tokens they are, for a note; empty if the grid was not thinned.
    """

    site: SiteSpec
    layout: TokenLayout
    stacks: list[Stack]
    names: list[str]
    cells: Integers
    thinned: dict[str, Any] = field(default_factory=dict)

    def map_bytes(self, estimator: Estimator) -> int:
        """Return the bytes that its maps with their replicates take, in float64."""
        copies = JACKKNIFE_COPIES
        if estimator.kind == "minibatch":
            copies = (estimator.repeats or DEFAULT_REPEATS) + 1
        # HSICs, CKAs and the table's columns
        return 8 * 3 * copies * len(self.names) * self.layout.n_body


class SiteMaps:
    """The sites of a store and their chosen tokens, checked before any work.

    Args:
        store: with the features of all tokens.
        sites: of the store; those without a grid are left out.
        tokens: "each", "cls" or cells; none: each, thinned on fine grids.
        summary: "token", "site", or None for maps.

    Raises:
        SiteError: no site has a grid, or a site lacks a token.
        MissingInput: the tokens are not stored.
    """

    def __init__(
        self,
        store: Store,
        sites: Sequence[SiteSpec],
        tokens: Sequence[str],
        summary: str | None,
    ) -> None:
        words = tokens or ("each",)
        if summary:
            # Summaries are about own patches, which the class token does not have.
            words = [word for word in words if word != "cls"]
        self.store = store
        self.may_thin = not tokens
        self.sites = [
            _select_tokens(store, site, words) for site in _grid_sites(store, sites)
        ]

    def say_cost(self, n_images: int) -> None:
        """Log how long the comparison takes if that is more than seconds."""
        pixels = pixels_shape(self.store)
        if pixels is None:
            return
        total = 0.0
        for sites in self._groups_with_same_patches():
            layout = sites[0].layout
            tokens = shapes([stack for site in sites for stack in site.stacks])
            patches = layout.n_body, math.prod(patch_shape(layout, pixels))
            total += multiplications(tokens, [patches], n_images)
        say_cost(self.store.label, n_images, total)

    def _groups_with_same_patches(self) -> list[list[SiteTokens]]:
        """Return the sites grouped by their grids."""
        groups: dict[Any, list[SiteTokens]] = {}
        for site in self.sites:
            layout = site.layout
            key = layout.grid, layout.stride_px, layout.offset_px
            groups.setdefault(key, []).append(site)
        return list(groups.values())

    def maps(
        self,
        group: Sequence[int],
        *,
        pixels: Any,
        images: Integers,
        estimator: Estimator,
        seed: int,
        execution: Execution,
    ) -> list[Maps]:
        """Return the maps of some of the sites.

        Args:
            group: indices of the sites, whose patches are the same.
            pixels: of the images, as `input_pixels` returns them.
            images: rows of the store.
            estimator: of HSIC.
            seed: of minibatches and jackknife blocks.
            execution: resources.
        """
        sites = [self.sites[k] for k in group]
        patches = PatchPixels(self.store, pixels, sites[0].layout)
        h = hsic_on_the_fly(
            [stack for site in sites for stack in site.stacks],
            [patches],
            images,
            estimator=estimator,
            shuffled=self.store.shuffled,
            seed=seed,
            device=execution.device,
            # A quarter is for the maps themselves.
            memory=execution.budget - execution.budget // 4,
            progress=execution.progress,
        )
        # The sites' tokens are the rows of one result, one site after the other.
        maps_of_sites = []
        first = 0
        for site in sites:
            rows = slice(first, first + len(site.names))
            maps = Maps(
                h=_select_rows(h, rows),
                site=site.site,
                tokens=site.names,
                cells=site.cells,
                layout=site.layout,
                patch_px=patches.shape[1:],
            )
            maps_of_sites.append(maps)
            first = rows.stop
        return maps_of_sites

    def groups_in_memory(self, estimator: Estimator, memory: int) -> list[list[int]]:
        """Return groups of sites with the same patches, whose maps together fit the memory.

        Args:
            estimator: of HSIC; its replicates take memory, too.
            memory: in bytes, a quarter of which is for maps.

        Returns:
            The sites' indices in each group.
        """
        index = {site.site.name: k for k, site in enumerate(self.sites)}
        groups: list[list[int]] = []
        for sites in self._groups_with_same_patches():
            free = 0  # what is left for the current group
            for site in sites:
                size = site.map_bytes(estimator)
                if size > free:
                    groups.append([])
                    free = memory // 4
                groups[-1].append(index[site.site.name])
                free -= size
        return groups

    def thin(self, estimator: Estimator, memory: int) -> dict[str, Any]:
        """Keep every s-th row and column of grids that are too fine; log what is left out.

        Tokens that the user chose are kept. s is the smallest for which tokens times patches are
        `MAX_PAIRS` at most and the maps fit into a quarter of the memory, in bytes.

        Returns:
            Site -> which of its tokens are left, for the sites that were thinned.
        """
        if self.may_thin:
            self.sites = [_thin_to_fit(site, estimator, memory) for site in self.sites]
        thinned = {site.site.name: site.thinned for site in self.sites if site.thinned}
        texts = {
            name: (
                f"{tokens['n_tokens']} of its {tokens['of']} tokens are compared, every "
                f"{tokens['every']}th row and column; --tokens each takes all"
            )
            for name, tokens in thinned.items()
        }
        for line in by_reason(texts):
            log.warning("%s: %s", self.store.label, line)
        return thinned

    def leave_out_large(self, estimator: Estimator, memory: int) -> dict[str, str]:
        """Leave out the sites whose maps do not fit a quarter of the memory.

        Returns:
            Site -> reason, for the sites that were left out.

        Raises:
            VitseeError: all are too large.
        """
        reasons: dict[str, str] = {}
        for site in self.sites:
            size = site.map_bytes(estimator)
            if size > memory // 4:
                reasons[site.site.name] = (
                    f"its maps of {len(site.names)} tokens take {human_bytes(size)}; "
                    "choose some with --tokens ROW,COL, or give --memory "
                    f"{math.ceil(4 * size / 1e6)}M"
                )
        remaining = [site for site in self.sites if site.site.name not in reasons]
        if not remaining:
            smallest = min(self.sites, key=lambda site: site.map_bytes(estimator))
            name = smallest.site.name
            raise VitseeError(f"{self.store.label}: {name}: {reasons[name]}")
        for line in by_reason(reasons):
            log.warning("%s: left out: %s", self.store.label, line)
        self.sites = remaining
        return reasons


def _select_tokens(store: Store, site: SiteSpec, words: Sequence[str]) -> SiteTokens:
    """Return the tokens of a site that --tokens selects, the class token first.

    Raises:
        SiteError: it has no such tokens.
        MissingInput: they are not stored.
    """
    layout = store.layout(site.name)
    assert layout is not None and layout.grid is not None
    selections = [TokenSelection.parse(word, WORDS) for word in words]
    distinct_cells: dict[int, None] = {}  # in the order of their first mention
    for selection in selections:
        if selection != "cls":
            members = selection.require(layout, f"{store.label}: {site.name}")
            # "each" names prefix tokens, too; here it means the grid.
            for token in members:
                if token >= layout.n_prefix:
                    distinct_cells[token - layout.n_prefix] = None
    grid_cells = list(distinct_cells)
    stacks: list[Stack] = []
    names: list[str] = []
    cells: list[int] = []
    if "cls" in selections:
        stacks.append(TokenStack(choose_features(store, site, "cls")))
        names.append("cls")
        cells.append(-1)
    if grid_cells:
        features = choose_features(store, site, "patches")
        stacks.append(TokenStack(features, np.array(grid_cells)))
        names += [features.tokens[cell].name for cell in grid_cells]
        cells += grid_cells
    return SiteTokens(site, layout, stacks, names, np.array(cells))


def _thin_to_fit(site: SiteTokens, estimator: Estimator, memory: int) -> SiteTokens:
    """Return the site with the tokens of every s-th row and column, for the smallest s that fits.

    The site has all tokens of its grid before. If no s fits, a single token is left.
    """
    assert site.layout.grid is not None
    thinned = site
    for step in range(1, max(site.layout.grid) + 1):
        if step > 1:
            thinned = _every_nth_token(site, step)
        n_pairs = len(thinned.names) * site.layout.n_body
        if n_pairs <= MAX_PAIRS and thinned.map_bytes(estimator) <= memory // 4:
            break
    return thinned if len(thinned.names) < len(site.names) else site


def _every_nth_token(site: SiteTokens, step: int) -> SiteTokens:
    """Return the site, which has all tokens of its grid, with every `step`-th row and column."""
    assert site.layout.grid is not None
    n_rows, n_cols = site.layout.grid
    rows = every_nth(n_rows, step)
    cols = every_nth(n_cols, step)
    cells = (rows[:, np.newaxis] * n_cols + cols).ravel()  # row by row
    grid = site.stacks[-1]
    assert isinstance(grid, TokenStack)
    return SiteTokens(
        site=site.site,
        layout=site.layout,
        stacks=[TokenStack(grid.features, cells)],
        names=[grid.features.tokens[cell].name for cell in cells],
        cells=cells,
        thinned={
            "every": step,
            "rows": rows.tolist(),
            "cols": cols.tolist(),
            "n_tokens": len(cells),
            "of": site.layout.n_body,
        },
    )


def _select_rows(h: Hsic, rows: slice) -> Hsic:
    """Return `h` and its replicates restricted to some of the rows."""
    replicates = None if h.replicates is None else _select_rows(h.replicates, rows)
    return replace(
        h, cross=h.cross[..., rows, :], rows=h.rows[..., rows], replicates=replicates
    )


def _grid_sites(store: Store, sites: Sequence[SiteSpec]) -> list[SiteSpec]:
    """Return the sites with a grid of the image; others are logged.

    Raises:
        SiteError: no site has one.
    """
    with_grid = [s for s in sites if s.layout is not None and s.layout.grid is not None]
    others = ", ".join(s.name for s in sites if s not in with_grid)
    if not with_grid:
        raise SiteError(
            f"{store.label}: {others} has no tokens on a grid of the image; choose other "
            f"--sites (vitsee info {store.place} -f sites lists them)"
        )
    if others:
        log.warning("%s: left out, as no grid of the image: %s", store.label, others)
    return with_grid
