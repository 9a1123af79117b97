"""Semantic keypoints: is the same part of another object the most similar one?

A keypoint of a source image is looked for in a target image by the cosine of dense features; it is
found where the best position is nearer to the keypoint than alpha times the longer side of the
target object's box (or image). PCK is the share found, over pairs of images of one category with
keypoints seen in both (Walmer et al. 2023, Figs. 10 right, 31, Table 5; SPair-71k, Min et al.
2019). Distances are strictly smaller, as in the code of Walmer et al.

Their code upsamples unit features bilinearly and compares them without scaling them to unit length
again. Its similarities are then bilinear between tokens, so that predictions lie on the token grid
whatever the features are, 7.5 pixels too far left or up in the first column and row of 16-pixel
patches, and PCK at 0.01 measures the grid. The default `smooth` scales to unit length after
upsampling, which finds positions between tokens; `vit_analysis` is theirs, for their numbers (see
`keypoints.protocol.MATCHED`). Baselines: `chance`, a candidate at random, in closed form; `still`,
the same place relative to the image; `grid`, the candidate nearest to the keypoint, the ceiling.

Intervals leave out one image with all of its pairs, see `keypoints.scoring`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.answers import best_layers
from vitsee_core.arguments import analysis
from vitsee_core.columns import SITE, site_columns
from vitsee_core.execution import DEFAULT, Execution
from vitsee_core.keypoints.baselines import BASELINES, found_without_features, within
from vitsee_core.keypoints.figure import draw_keypoints
from vitsee_core.keypoints.located import Located, describe, locate
from vitsee_core.keypoints.protocol import (
    ALPHAS,
    CANDIDATES,
    CLASS,
    GROUPS,
    MATCHES,
    PRESETS,
    THRESHOLDS,
    Protocol,
    choose_protocol,
)
from vitsee_core.keypoints.scoring import INTERVAL_METHOD, KeypointScorer
from vitsee_core.keypoints.spair import VARIATIONS, draw_pairs, read_pairs
from vitsee_core.plotting import styled
from vitsee_core.progress import counting
from vitsee_core.replicates import WORD
from vitsee_core.results import Table
from vitsee_core.store_selection import select_each
from vitsee_core.types import Float, Mask
from vitsee_stores.errors import SiteError, VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_stores import SiteSpec, Store

log = logging.getLogger(__name__)

NEEDS = ("grid",)
READING = (
    "The share of keypoints found in another image of the class, against depth. Grey lines: a "
    "guess at random, the same place in the image, and the nearest place that the grid of tokens "
    "allows, above which no model can be. Intervals are over images, of which pairs are no "
    "independent sample."
)
SOURCE = "Min et al. 2019 (SPair-71k); Walmer et al. 2023, Figs. 10 right, 31, Table 5"
in_short = partial(best_layers, units={"pck@0.1": "PCK at 0.1"})

__all__ = ["ALPHAS", "CANDIDATES", "GROUPS", "MATCHES", "PRESETS", "THRESHOLDS", "plot", "run"]

GROUP = "group"
COLUMNS = (
    *(*SITE, CLASS, GROUP),
    *("metric", "value", "std", "low", "high", "spread"),
    *("n_images", "n_pairs", "n_points", "baseline"),
)


@analysis
def run(
    *stores: Store,
    pairs: str | Path,
    split: str | None = None,
    sites: Sequence[str] = ("blocks",),
    alphas: Sequence[float] = (),
    match: str | None = None,
    threshold: str | None = None,
    candidates: str | None = None,
    by: Sequence[str] = (),
    pairs_per_class: int | None = None,
    preset: str | None = None,
    execution: Execution = DEFAULT,
) -> Table:
    """Rows per store and site: PCK for each alpha, as the mean over classes (`pck@0.1`), over
    points (`pck_point@0.1`) and over pairs (`pck_image@0.1`); the same of each baseline.

    Columns: `COLUMNS`, `class` and `group` only with `by`. `value`: between 0 and 1. `std`, `low`,
    `high`: of the jackknife over images, NaN where leaving out an image leaves a class without
    pairs. `group`: `viewpoint 0` and so on.

    Memory: see `keypoints.search`.

    Args:
        stores: of the images in the pairs, resized so that their keypoints are seen.
        pairs: see `spair.read_pairs`.
        split: see `spair.read_pairs`.
        sites: names, globs and groups of sites with a grid.
        alphas: by default 0.1, 0.05 and 0.01.
        match: `smooth`, `token` or `vit_analysis`; see above.
        threshold: `box` or `image`: whose longer side alpha is a part of.
        candidates: where the target may lie: `image`, `canvas` (the whole input) or `box`.
        by: `class`, `viewpoint`, `scale`, `truncation`, `occlusion`: add the rows of each group.
        pairs_per_class: draw so many of each class, with the seed; by default all.
        preset: `walmer`: 20 pairs a class, `vit_analysis`, `canvas`.
        execution: what the work may use; see `Execution`.

    Raises:
        MissingInput: see `located.locate`; or a store keeps its tokens pooled only.
        SiteError: no site with a grid matches.
        VitseeError: see `spair.read_pairs`, `protocol.choose_protocol`, `located.locate`.
    """
    if not stores:
        raise VitseeError("no store was given; expected one or more")
    protocol = choose_protocol(
        preset, match=match, candidates=candidates, threshold=threshold, alphas=alphas,
        pairs_per_class=pairs_per_class, by=by,
    )  # fmt: skip
    execution.check_device()
    selected = select_each(stores, sites, _with_grid)
    drawn = draw_pairs(read_pairs(pairs, split), protocol.pairs_per_class, execution.seed)
    for word in protocol.by:
        if word in VARIATIONS and (lost := [p for p in drawn if word not in p.variations]):
            raise VitseeError(
                f"the pair {lost[0].name} has no {VARIATIONS[word]}; leave out --by {word}"
            )
    located = [locate(store, drawn, protocol) for store in selected.stores]
    # Nothing before has needed torch.
    from vitsee_core.keypoints.search import n_images, parts_of, search_all

    parts = [parts_of(store, len(own), execution) for store, own in selected.members]
    total = sum(
        len(own) * n_images(where, part)
        for own, where, some in zip(selected.chosen, located, parts, strict=True)
        for part in some
    )
    rows: list[dict[str, Any]] = []
    blind: list[dict[str, Any]] = []
    scorers = {s.label: KeypointScorer.of(w) for s, w in zip(selected.stores, located, strict=True)}
    with counting(execution.progress, total):
        for (store, own), where, some in zip(selected.members, located, parts, strict=True):
            known: dict[Any, dict[str, Float]] = {}
            scorer = scorers[store.label]
            at_all = search_all(store, own, where, protocol.match, some, execution)
            for site, found in zip(own, at_all, strict=True):
                place = site_columns(store, site)
                hits = within(where, found, protocol.alphas)
                rows += _rows(place, "", hits, scorer, where, protocol)
                if site.layout not in known:
                    assert site.layout is not None
                    known[site.layout] = found_without_features(
                        where, site.layout, protocol.match, protocol.alphas
                    )
                for name in BASELINES:
                    blind += _rows(place, name, known[site.layout][name], scorer, where, protocol)
    notes = {
        "interval": INTERVAL_METHOD, "protocol": protocol.describe(), "seed": execution.seed,
        "preset": f"{preset}: {PRESETS[preset]}" if preset else None,
        "pairs": {s.label: describe(w) for s, w in zip(selected.stores, located, strict=True)},
        **selected.notes(),
        WORD: {label: scorer.describe() for label, scorer in scorers.items()},
    }  # fmt: skip
    used = {CLASS: CLASS in protocol.by, GROUP: bool({*protocol.by} - {CLASS})}
    return Table.from_rows(rows + blind, [c for c in COLUMNS if used.get(c, True)], notes)


def _with_grid(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    """The sites whose tokens lie on the image.

    Raises:
        SiteError: none of those that match does.
        MissingInput: one is stored pooled only.
    """
    chosen = store.select(list(patterns))
    found = [s for s in chosen if s.layout is not None and s.layout.grid and s.layout.stride_px]
    if not found:
        raise SiteError(
            f"{store.label}: {', '.join(site.name for site in chosen[:3])} has no tokens on the "
            "image's grid; keypoints need sites that have (vitsee info lists them)"
        )
    for site in found:
        store.acts(site.name, "patches", partial=True)
    if left := [site.name for site in chosen if site not in found]:
        log.info("%s: left out, without a grid: %s", store.label, ", ".join(left))
    return found


def _rows(
    place: dict[str, Any],
    baseline: str,
    found: Float,
    scorer: KeypointScorer,
    located: Located,
    protocol: Protocol,
) -> Iterator[dict[str, Any]]:
    """The rows of one site or baseline: of all pairs, then of each group."""
    for about, among in _groups(located, protocol):
        for cells in scorer.rows(found, protocol.alphas, among):
            yield {**place, **about, **cells, "baseline": baseline}


def _groups(located: Located, protocol: Protocol) -> Iterator[tuple[dict[str, str], Mask | None]]:
    """What rows are about, and which of the pairs they are of."""
    yield {CLASS: "", GROUP: ""}, None
    for word in protocol.by:
        values = np.array(
            [p.category if word == CLASS else p.variations[word] for p in located.pairs]
        )
        for value in np.unique(values).tolist():
            cells = {CLASS: value} if word == CLASS else {GROUP: f"{word} {value}"}
            yield {CLASS: "", GROUP: "", **cells}, values == value


@styled
def plot(table: Table) -> Figure:
    """PCK (mean over classes) against relative depth, a panel per alpha and a curve per store, with
    the 95 % interval as a band; the ceiling of the grid and chance dashed (Walmer et al. 2023,
    Figs. 10 right, 31). A ceiling far above the curves is given in words."""
    return draw_keypoints(table)
