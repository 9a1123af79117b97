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
`keypoints.spair.MATCHED`). Baselines: `chance`, a candidate at random, in closed form; `still`,
the same place relative to the image; `grid`, the candidate nearest to the keypoint, the ceiling.

Intervals leave out one image with all of its pairs, see `keypoints.scoring`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.keypoints.places import Located, locate
from vitsee_core.analyses.keypoints.scoring import (
    BASELINES,
    INTERVAL_METHOD,
    METRICS,
    KeypointScorer,
    found_without_features,
    within,
)
from vitsee_core.analyses.keypoints.spair import (
    ALPHAS,
    CANDIDATES,
    CLASS,
    GROUPS,
    MATCHES,
    PRESETS,
    THRESHOLDS,
    VARIATIONS,
    Protocol,
    choose_protocol,
    draw_pairs,
    read_pairs,
)
from vitsee_core.declaration import Analysis
from vitsee_core.figures.curve_looks import DASHES, curve_looks
from vitsee_core.figures.curve_panels import draw_depth_panels
from vitsee_core.figures.panels import small
from vitsee_core.figures.plotting import GREY, styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import KNOWLEDGE, SITES, Offers, Option, metrics_option
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.store_selection import select_each
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.headlines import best_layers
from vitsee_core.tables.metrics import asked_for
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import baseline_words
from vitsee_core.truth.labels.labelled_rows import RANDOM_BASELINE
from vitsee_core.types import Float, Mask, pl
from vitsee_stores import Store
from vitsee_stores.errors import SiteError, VitseeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_stores import SiteSpec

log = logging.getLogger(__name__)

headline = partial(best_layers, units={"pck@0.1": "PCK at 0.1"})

__all__ = [
    "ALPHAS",
    "CANDIDATES",
    "GROUPS",
    "MATCHES",
    "PRESETS",
    "THRESHOLDS",
    "plot",
    "run",
]

GROUP = "group"
RANDOM = "random"
COLUMNS = (
    *(*SITE, CLASS, GROUP),
    *("metric", "value", "std", "low", "high", "spread"),
    *("n_images", "n_pairs", "n_points", "baseline"),
)


@analysis
def run(
    *stores: Store,
    pairs: Annotated[
        str | Path,
        Option(
            "The folder SPair-71k (or any with PairAnnotation/SPLIT/*.json in its form), "
            "or a list of pairs in it (Layout/large/test.txt)."
        ),
    ],
    split: Annotated[
        str | None,
        Option(
            "Which pairs of the folder.", metavar="NAME", default="the list's, else test"
        ),
    ] = None,
    sites: Annotated[Sequence[str], SITES] = ("blocks",),
    alphas: Annotated[
        Sequence[float],
        Option(
            "Found is what is nearer than A times the longer side.",
            "--alpha",
            metavar="A",
            above=0,
            default=" ".join(f"{alpha:g}" for alpha in ALPHAS),
        ),
    ] = (),
    match: Annotated[
        str | None,
        Option(
            "smooth: features at pixels, between tokens; token: of tokens; "
            "vit_analysis: those of the released code, which lie on the token grid.",
            choices=MATCHES,
            default="smooth",
        ),
    ] = None,
    threshold: Annotated[
        str | None,
        Option(
            "Whose longer side that is: the target object's box, or the target image.",
            choices=THRESHOLDS,
            default="box",
        ),
    ] = None,
    candidates: Annotated[
        str | None,
        Option(
            "Where the target may lie: on the image, anywhere on the input (canvas), in "
            "the object's box.",
            choices=CANDIDATES,
            default="image",
        ),
    ] = None,
    by: Annotated[
        Sequence[str],
        Option("Add the rows of each group of pairs.", choices=GROUPS, default="none"),
    ] = (),
    pairs_per_class: Annotated[
        int | None,
        Option("Draw N pairs of each class, with the seed.", least=1, default="all"),
    ] = None,
    preset: Annotated[
        str | None,
        Option(
            "walmer: 20 pairs a class, vit_analysis, canvas. Options given beside it win.",
            choices=tuple(PRESETS),
            default="none",
        ),
    ] = None,
    metrics: Annotated[
        Sequence[str],
        metrics_option(METRICS, "all of them", "The mean over classes, points or pairs."),
    ] = (),
    baselines: Annotated[Sequence[str], RANDOM_BASELINE] = (),
    execution: Annotated[
        Execution, Offers("seed device", dask="sites and images")
    ] = DEFAULT,
) -> Table:
    """Rows per store and site: PCK for each alpha, as the mean over classes (`pck@0.1`), over
    points (`pck_point@0.1`) and over pairs (`pck_image@0.1`); the same of each baseline.

    Columns: `COLUMNS`, `class` and `group` only with `by`. `value`: between 0 and 1. `std`, `low`,
    `high`: of the jackknife over images, NaN where leaving out an image leaves a class without
    pairs. `group`: `viewpoint 0` and so on.

    Memory: see `keypoints.search`.

    Args:
        stores: of the images in the pairs, resized so that their keypoints are seen.

    Raises:
        MissingInput: see `places.locate`; or a store keeps its tokens pooled only.
        SiteError: no site with a grid matches.
        VitseeError: see `spair.read_pairs`, `spair.choose_protocol`, `places.locate`.
    """
    if not stores:
        raise VitseeError("no store was given; expected one or more")
    protocol = choose_protocol(
        preset,
        match=match,
        candidates=candidates,
        threshold=threshold,
        alphas=alphas,
        pairs_per_class=pairs_per_class,
        by=by,
    )
    if unknown := {*baselines} - {RANDOM}:
        raise VitseeError(f"no baseline {min(unknown)!r}; expected {RANDOM}")
    wanted = asked_for(metrics or METRICS, METRICS, "keypoints")
    execution.check_device()
    selected = select_each(stores, sites, _with_grid)
    drawn = draw_pairs(read_pairs(pairs, split), protocol.pairs_per_class, execution.seed)
    for word in protocol.by:
        if word in VARIATIONS and (
            lost := [p for p in drawn if word not in p.variations]
        ):
            raise VitseeError(
                f"the pair {lost[0].name} has no {VARIATIONS[word]}; leave out --by {word}"
            )
    located = [locate(store, drawn, protocol) for store in selected.stores]
    # torch is imported from here on.
    from vitsee_core.analyses.keypoints.search import n_images, parts_of, search_all

    parts = [parts_of(store, len(own), execution) for store, own in selected.members]
    drawn_once = [
        dict.fromkeys((site.layout, site.dim) for site in own if baselines)
        for own in selected.chosen
    ]
    total = sum(
        (len(own) + len(noises)) * n_images(where, part)
        for own, noises, where, some in zip(
            selected.chosen, drawn_once, located, parts, strict=True
        )
        for part in some
    )
    rows: list[dict[str, Any]] = []
    blind: list[dict[str, Any]] = []
    scorers = {
        s.label: KeypointScorer.of(w, wanted)
        for s, w in zip(selected.stores, located, strict=True)
    }
    with counting(execution.progress, total):
        for (store, own), where, some in zip(
            selected.members, located, parts, strict=True
        ):
            known: dict[Any, dict[str, Float]] = {}
            drawn_at: dict[Any, Float] = {}
            scorer = scorers[store.label]
            at_all = search_all(store, own, where, protocol.match, some, execution)
            for site, predicted in zip(own, at_all, strict=True):
                place = site_columns(store, site)
                hits = within(where, predicted, protocol.alphas)
                rows += _rows(place, "", hits, scorer, where, protocol)
                if site.layout not in known:
                    assert site.layout is not None
                    known[site.layout] = found_without_features(
                        where, site.layout, protocol.match, protocol.alphas
                    )
                for name in BASELINES:
                    blind += _rows(
                        place, name, known[site.layout][name], scorer, where, protocol
                    )
                if baselines:
                    if (site.layout, site.dim) not in drawn_at:
                        (noise,) = search_all(
                            store,
                            [site],
                            where,
                            protocol.match,
                            some,
                            execution,
                            execution.seed,
                        )
                        drawn_at[site.layout, site.dim] = within(
                            where, noise, protocol.alphas
                        )
                    hits = drawn_at[site.layout, site.dim]
                    blind += _rows(place, RANDOM, hits, scorer, where, protocol)
    notes = {
        "interval": INTERVAL_METHOD,
        "protocol": protocol.describe(),
        "seed": execution.seed,
        "preset": f"{preset}: {PRESETS[preset]}" if preset else None,
        "pairs": {
            s.label: w.describe() for s, w in zip(selected.stores, located, strict=True)
        },
        **selected.notes(),
        WORD: {label: scorer.describe() for label, scorer in scorers.items()},
    }
    used = {CLASS: CLASS in protocol.by, GROUP: bool({*protocol.by} - {CLASS})}
    return Table.from_rows(rows + blind, [c for c in COLUMNS if used.get(c, True)], notes)


def _with_grid(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    """The sites whose tokens are on the image.

    Raises:
        SiteError: none of the matching sites has a grid.
        MissingInput: one is stored pooled only.
    """
    chosen = store.select(list(patterns))
    with_grid = [
        s for s in chosen if s.layout is not None and s.layout.grid and s.layout.stride_px
    ]
    if not with_grid:
        raise SiteError(
            f"{store.label}: {', '.join(site.name for site in chosen[:3])} has no tokens "
            "on the image's grid; keypoints need sites that have (vitsee info lists them)"
        )
    for site in with_grid:
        store.acts(site.name, "patches", partial=True)
    if left := [site.name for site in chosen if site not in with_grid]:
        log.info("%s: left out, without a grid: %s", store.label, ", ".join(left))
    return with_grid


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


def _groups(
    located: Located, protocol: Protocol
) -> Iterator[tuple[dict[str, str], Mask | None]]:
    """The cells that say what rows are about, and which of the pairs they include (None: all):
    first of all pairs, then of each group that was asked for."""
    yield {CLASS: "", GROUP: ""}, None
    for word in protocol.by:
        values = np.array(
            [p.category if word == CLASS else p.variations[word] for p in located.pairs]
        )
        for value in np.unique(values).tolist():
            cells = {CLASS: value} if word == CLASS else {GROUP: f"{word} {value}"}
            yield {CLASS: "", GROUP: "", **cells}, values == value


LINES = ("grid", "still", "chance", "random")
ALIKE = 0.002  # lines this near to one another are one, for all stores
ROOM = 1.12  # times the highest value is the top of a panel
FAR = 1.6  # times the highest curve: a ceiling above it would leave the curves no room


@styled
def plot(table: Table) -> Figure:
    """PCK (mean over classes, else the first metric there is) against relative depth, a panel per
    alpha and a curve per store, with the 95 % interval as a band; the ceiling of the grid and
    chance dashed (Walmer et al. 2023, Figs. 10 right, 31). A ceiling far above the curves is given
    in words."""
    baseline = pl.col("baseline")
    parts = [
        pl.col(name).is_null()
        for name in ("class", "group")
        if name in table.frame.columns
    ]
    rows = table.frame.filter(baseline.is_null() | baseline.is_in(LINES), *parts)
    models = rows.filter(baseline.is_null())
    metrics = [*rows["metric"].unique(maintain_order=True)]
    metrics = [m for m in metrics if m.startswith(f"{metrics[0].partition('@')[0]}@")]

    def finish(axes: Axes, curves: pl.DataFrame, metric: str) -> None:
        lines = rows.filter(baseline.is_in(LINES), metric=metric)
        ceiling = lines.filter(baseline="grid")["value"]
        others = lines.filter(baseline.is_in(["still", "chance"]))["value"]
        top = _highest(curves["high"], curves["value"], others)
        if _highest(ceiling) <= FAR * top:
            top = max(top, _highest(ceiling))
        axes.set_ylim(0, ROOM * top or 1)
        for name, dashes in zip(LINES, DASHES, strict=False):
            line = lines.filter(baseline=name)
            if len(line) and float(np.nanmin(line["value"])) <= ROOM * top:
                _draw_line(axes, line, models, name, dashes)
        if _highest(ceiling) > ROOM * top:
            _note_ceiling(axes, float(np.nanmin(ceiling)), _highest(ceiling))

    spread = "95 % interval over images"
    return draw_depth_panels(
        models, metrics, finish, spread=spread, counts=("n_pairs", "pairs")
    )


def _highest(*values: pl.Series) -> float:
    return float(np.nanmax(np.concatenate(values), initial=0))


def _draw_line(
    axes: Axes, rows: pl.DataFrame, models: pl.DataFrame, name: str, dashes: Any
) -> None:
    """A baseline: grey if it is the same for all stores, else in their colours."""
    tints = {curve.store: look["color"] for curve, look in curve_looks(models).items()}
    values = rows["value"]
    shared = float(np.nanmax(values) - np.nanmin(values)) < ALIKE
    for own in rows.partition_by("store", maintain_order=True):
        own = own.sort("rel_depth", maintain_order=True)
        axes.plot(
            own["rel_depth"],
            own["value"],
            color=GREY if shared else tints[own["store"][0]],
            linestyle=dashes,
            linewidth=1,
            zorder=1.5,
        )
        if shared:
            break
    axes.plot(
        [], [], color=GREY, linestyle=dashes, linewidth=1, label=baseline_words(name)
    )


def _note_ceiling(axes: Axes, low: float, high: float) -> None:
    span = f"{low:.2f}" if high - low < 0.005 else f"{low:.2f} to {high:.2f}"
    axes.annotate(
        f"ceiling (grid): {span} ↑",
        (0.99, 0.99),
        xycoords="axes fraction",
        ha="right",
        va="top",
        fontsize=small(),
        color=GREY,
    )


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Find keypoints again in other images of a class.

    A keypoint of one image is looked for in another by the cosine of dense features;
    PCK is the share found near enough (Walmer et al. 2023, Figs. 10 right, 31;
    SPair-71k). The stores hold the pairs' images, whole: with --crop-mode border and
    --crop-pct 1.

      $ vitsee extract vit_base_patch16_224 --data SPair-71k/JPEGImages \\
            --crop-mode border --fill black --crop-pct 1 -o b16.zarr
      $ vitsee keypoints b16.zarr --pairs SPair-71k -o pck.csv --png pck.png
      $ vitsee keypoints b16.zarr dino.zarr --pairs SPair-71k --preset walmer --png both.png
      $ vitsee keypoints b16.zarr --pairs SPair-71k/Layout/small/test.txt --by class --alpha 0.1

    Features are bilinear between tokens, and scaled to unit length after that; the
    released code does not scale, so that what it finds lies on the token grid: --match
    vit_analysis. Pairs whose images the store lacks are left out and counted.

    Metrics: pck@A: the mean over classes; pck_point@A: over points; pck_image@A: over
    pairs. Rows with a baseline need no features: chance, still (the same place in the
    image), grid (the nearest possible place, a ceiling); --baseline random searches
    random features (Walmer et al. 2023, B.3).
    """,
    needs=("grid", "images"),
    reading=(
        "The share of keypoints found in another image of the class, against depth. Grey "
        "lines: a guess at random, the same place in the image, and the nearest place "
        "that the grid of tokens allows, above which no model can be. Intervals are over "
        "images, of which pairs are no independent sample."
    ),
    source="Min et al. 2019 (SPair-71k); Walmer et al. 2023, Figs. 10 right, 31, Table 5",
    columns=COLUMNS,
    meanings={
        "group": "class, group: with --by",
        "high": "95 % interval by a jackknife that leaves out an image with all its pairs",
    },
    metrics=("pck@*", "pck_point@*", "pck_image@*"),
    run=run,
    plot=plot,
    headline=headline,
)
