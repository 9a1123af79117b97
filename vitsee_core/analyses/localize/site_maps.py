"""The maps of a store's sites: checked before any work, then computed together where possible."""

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
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.product_time import say_cost
from vitsee_core.similarity import Estimator, Hsic
from vitsee_core.similarity.on_the_fly import hsic_on_the_fly, multiplications, shapes
from vitsee_core.similarity.patch_pixels import PatchPixels, patch_shape, pixels_shape
from vitsee_core.similarity.stacks import Stack, TokenStack
from vitsee_core.types import Integers
from vitsee_stores.errors import SiteError, VitseeError
from vitsee_stores.manifest import by_reason
from vitsee_stores.token_selection import TokenSelection

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)


WORDS = ("each", "cls")
# Tokens times patches of a site of which all tokens are compared unless they are asked for: grids
# of up to 38 x 38. Not the memory alone, so that machines give the same table.
MOST_PAIRS = 1 << 21


@dataclass(frozen=True)
class _Tokens:
    """The selected tokens of a site: the stack they are read from, their names, their cells of the
    grid (-1 for the class token)."""

    site: SiteSpec
    layout: TokenLayout
    stacks: list[Stack]
    names: list[str]
    cells: Integers
    thinned: dict[str, Any] = field(default_factory=dict)  # which tokens, where not as asked

    def map_bytes(self, how: Estimator) -> int:
        """Bytes of its maps and their replicates."""
        copies = 3 * 21 if how.kind != "minibatch" else 3 * ((how.repeats or 20) + 1)
        return 8 * copies * len(self.names) * self.layout.n_body


class SiteMaps:
    """The sites of a store, checked before any work."""

    def __init__(
        self, store: Store, sites: Sequence[SiteSpec], tokens: Sequence[str], summary: str | None
    ) -> None:
        words = [word for word in tokens or ("each",) if word != "cls" or not summary]
        self.store = store
        self.thins = not tokens
        self.sites = [_tokens(store, site, words) for site in _with_grid(store, sites)]

    def say_cost(self, n_images: int) -> None:
        pixels, total = pixels_shape(self.store), 0.0
        if pixels is None:
            return
        for sites in self._alike():
            layout = sites[0].layout
            tokens = shapes([stack for site in sites for stack in site.stacks])
            patches = layout.n_body, math.prod(patch_shape(layout, pixels))
            total += multiplications(tokens, [patches], n_images)
        say_cost(self.store.label, n_images, total)

    def _alike(self) -> list[list[_Tokens]]:
        """The sites, grouped by their patches."""
        groups: dict[Any, list[_Tokens]] = {}
        for site in self.sites:
            layout = site.layout
            key = layout.grid, layout.stride_px, layout.offset_px
            groups.setdefault(key, []).append(site)
        return list(groups.values())

    def maps(
        self,
        together: Sequence[int],
        pixels: Any,
        images: Integers,
        how: Estimator,
        seed: int,
        execution: Execution,
    ) -> list[Maps]:
        """The maps of some of the sites, which share their patches."""
        sites = [self.sites[k] for k in together]
        patches = PatchPixels(self.store, pixels, sites[0].layout)
        h = hsic_on_the_fly(
            [stack for site in sites for stack in site.stacks],
            [patches],
            images,
            estimator=how,
            shuffled=self.store.shuffled,
            seed=seed,
            device=execution.device,
            memory=execution.budget - execution.budget // 4,
            progress=execution.progress,
        )
        of_sites, at = [], 0
        for site in sites:
            of_site = slice(at, at + len(site.names))
            about = site.site, site.names, site.cells, site.layout, patches.shape[1:]
            of_sites.append(Maps(_some_rows(h, of_site), *about))
            at = of_site.stop
        return of_sites

    def together(self, how: Estimator, memory: int) -> list[list[int]]:
        """Groups of sites with the same patches, as many as have room for their maps and
        replicates."""
        place = {site.site.name: k for k, site in enumerate(self.sites)}
        together: list[list[int]] = []
        for alike in self._alike():
            left = 0
            for site in alike:
                size = site.map_bytes(how)
                if size > left:
                    together.append([])
                    left = memory // 4
                together[-1].append(place[site.site.name])
                left -= size
        return together

    def thin(self, how: Estimator, memory: int) -> dict[str, Any]:
        """Without tokens asked for, compare only every s-th row and column of grids that are too
        fine, s the least for which tokens times patches are `MOST_PAIRS` at most and the maps fit
        into a quarter of the memory; returns which of what was thinned."""
        for k, site in enumerate(self.sites if self.thins else ()):
            assert site.layout.grid is not None
            whole = len(site.names)
            for every in range(1, max(site.layout.grid) + 1):
                if every > 1:
                    site = _every(site, every)
                n_pairs = len(site.names) * site.layout.n_body
                if n_pairs <= MOST_PAIRS and site.map_bytes(how) <= memory // 4:
                    break
            if len(site.names) < whole:
                self.sites[k] = site
        found = {site.site.name: site.thinned for site in self.sites if site.thinned}
        texts = {
            name: "{n_tokens} of its {of} tokens are compared, every {every}th row and column; "
            "--tokens each takes all".format(**which)
            for name, which in found.items()
        }
        for line in by_reason(texts):
            log.warning("%s: %s", self.store.label, line)
        return found

    def leave_out_large(self, how: Estimator, memory: int) -> dict[str, str]:
        """Leave out the sites whose maps exceed the memory; returns the reason for each. Raises
        VitseeError: all are too large."""
        reasons = {
            site.site.name: (
                f"its maps of {len(site.names)} tokens take {human_bytes(size)}; choose some with "
                f"--tokens ROW,COL, or give --memory {math.ceil(4 * size / 1e6)}M"
            )
            for site in self.sites
            if (size := site.map_bytes(how)) > memory // 4
        }
        kept = [site for site in self.sites if site.site.name not in reasons]
        if not kept:
            smallest = min(self.sites, key=lambda site: site.map_bytes(how)).site.name
            raise VitseeError(f"{self.store.label}: {smallest}: {reasons[smallest]}")
        for line in by_reason(reasons):
            log.warning("%s: left out: %s", self.store.label, line)
        self.sites = kept
        return reasons


def _tokens(store: Store, site: SiteSpec, words: Sequence[str]) -> _Tokens:
    """The tokens of a site that --tokens selects, the class token first.

    Raises:
        SiteError: it has no such tokens.
        MissingInput: they are not stored.
    """
    layout = store.layout(site.name)
    assert layout is not None and layout.grid is not None
    chosen = [TokenSelection.parse(word, WORDS) for word in words]
    cells: dict[int, None] = {}
    for selection in chosen:
        if selection != "cls":  # `each` is of the grid here
            members = selection.require(layout, f"{store.label}: {site.name}")
            cells |= dict.fromkeys(i - layout.n_prefix for i in members if i >= layout.n_prefix)
    stacks: list[Stack] = []
    names: list[str] = []
    if "cls" in chosen:
        stacks.append(TokenStack(choose_features(store, site, "cls")))
        names.append("cls")
    if cells:
        grid = TokenStack(choose_features(store, site, "patches"), np.array(list(cells)))
        stacks.append(grid)
        names += [grid.features.tokens[cell].name for cell in cells]
    places = [-1] * ("cls" in chosen) + list(cells)
    return _Tokens(site, layout, stacks, names, np.array(places))


def _every(site: _Tokens, every: int) -> _Tokens:
    """A site with all tokens of its grid, reduced to those of every `every`-th row and column."""
    assert site.layout.grid is not None
    rows, cols = (every_nth(n, every) for n in site.layout.grid)
    cells = (rows[:, np.newaxis] * site.layout.grid[1] + cols).ravel()
    grid = site.stacks[-1]
    assert isinstance(grid, TokenStack)
    names = [grid.features.tokens[cell].name for cell in cells]
    which = {
        "every": every, "rows": rows.tolist(), "cols": cols.tolist(),
        "n_tokens": len(cells), "of": site.layout.n_body,
    }  # fmt: skip
    return _Tokens(site.site, site.layout, [TokenStack(grid.features, cells)], names, cells, which)


def _some_rows(h: Hsic, rows: slice) -> Hsic:
    """`h` restricted to some of the rows."""
    inner = h.replicates and _some_rows(h.replicates, rows)
    return replace(h, cross=h.cross[..., rows, :], rows=h.rows[..., rows], replicates=inner)


def _with_grid(store: Store, sites: Sequence[SiteSpec]) -> list[SiteSpec]:
    """The sites with a grid; others are logged. Raises SiteError: none of them."""
    kept = [s for s in sites if s.layout is not None and s.layout.grid is not None]
    others = ", ".join(s.name for s in sites if s not in kept)
    if not kept:
        raise SiteError(
            f"{store.label}: {others} has no tokens on a grid of the image; choose other --sites "
            f"(vitsee info {store.place} -f sites lists them)"
        )
    if others:
        log.warning("%s: left out, as no grid of the image: %s", store.label, others)
    return kept
