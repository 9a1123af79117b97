"""Similarity beyond CKA: do other measures call the same layers alike?

Two sites are compared over the same images; an image's features are all chosen tokens' channels,
flattened. Every measure is made of the Gram matrices that `vitsee cka` keeps:

- mutual_knn, cknna: common nearest neighbours (Huh et al. 2024);
- rsa: Spearman's correlation of dissimilarities (Kriegeskorte et al. 2008);
- procrustes: the angle left after the best rotation (Williams et al. 2021);
- svcca: canonical correlations of principal components (Raghu et al. 2017);
- gulp: distance of ridge predictors over all targets (Boix-Adsera et al. 2022);
- ridge_r2: a's features predicted from b's, on left-out images (Kornblith et al. 2019);
- cka: debiased linear CKA, as `vitsee cka`.

Features wider than the number of images are similar by most measures whatever they are: `calibrate`
compares each value with those of permuted images (see `measures.calibration`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.answers import Answer, alike
from vitsee_core.arguments import analysis
from vitsee_core.columns import NULL, PAIR, VALUES, pair_columns
from vitsee_core.execution import DEFAULT, Execution
from vitsee_core.figures.heatmaps import Panel, describe_scope, draw_heatmaps
from vitsee_core.figures.site_pairs import draw_curves, one_to_one, panels_of, put_legend_below
from vitsee_core.measures import (
    Cka,
    Cknna,
    Gulp,
    Measure,
    MutualKnn,
    Procrustes,
    RidgeR2,
    Rsa,
    Svcca,
    calibration,
    platonic,
)
from vitsee_core.measures.comparing import Compared, compare_all
from vitsee_core.measures.grams import grams_of
from vitsee_core.plotting import new_figure, styled
from vitsee_core.replicates import WORD
from vitsee_core.results import Table
from vitsee_core.similarity import GramOptions, Representation
from vitsee_core.similarity.pairs import SitePairs, choose_pairs
from vitsee_core.statistics.jackknife import interval
from vitsee_stores.errors import SiteError, VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_core.types import Float, Integers
    from vitsee_stores import Store

log = logging.getLogger(__name__)

NEEDS = ("sites",)
READING = (
    "Similarity of layers by other measures than CKA, which weigh neighbours, angles or "
    "predictions. Where they disagree, the conclusion is about the measure. With calibration, a "
    "panel beside each shows what is left beyond chance."
)
SOURCE = (
    "Huh et al. 2024; Kriegeskorte et al. 2008; Williams et al. 2021; Raghu et al. 2017; "
    "Kornblith et al. 2019; Boix-Adsera et al. 2022"
)
MEASURES = ("mutual-knn", "cknna", "rsa", "procrustes", "svcca", "gulp", "ridge-r2", "cka")
NEIGHBOURS = ("mutual_knn", "cknna")
RDMS = ("pearson", "euclidean")
PRESETS = (platonic.NAME,)
COLUMNS = (*PAIR, "k", *VALUES, *NULL, "n_images")
INTERVAL = (
    "delete-a-block jackknife over images: std its standard error, low and high value -+ t(0.975, "
    "blocks - 1) * std, cut at the measure's limits; of neighbour measures the neighbours are "
    "found anew without the block, and the interval is conservative (1.6 to 1.9 times too wide)"
)
LABELS = {
    "mutual_knn": "mutual k-NN",
    "cknna": "CKNNA",
    "rsa": "RSA (Spearman)",
    "procrustes": "Procrustes similarity",
    "svcca": "SVCCA",
    "gulp": "GULP distance (0: alike)",
    "ridge_r2": "ridge $R^2$ (a from b)",
    "cka": "CKA (debiased)",
}
NAMES = {"gulp": "GULP", "procrustes": "Procrustes", "rsa": "RSA"}  # where 1 is alike


@analysis
def run(
    *stores: Store,
    measure: Sequence[str] = ("mutual-knn",),
    k: int = 10,
    rdm: str = "pearson",
    ridge: float = 1e-2,
    variance: float = 0.99,
    calibrate: int | None = None,
    sites: Sequence[str] = (),
    sites_a: Sequence[str] = (),
    sites_b: Sequence[str] = (),
    tokens: str | None = None,
    pairs: str = "all",
    pair_by: str = "image",
    preset: str | None = None,
    cache: Path | None = None,
    no_cache: bool = False,
    execution: Execution = DEFAULT,
) -> Table:
    """One row per measure and pair of sites: its value, the spread, and what a null gives.

    Columns: see `COLUMNS`. `metric`: the measure's name with `_`. `k`: of the neighbour measures.
    `null_mean`, `tau` (the 5 % threshold), `p`, `p_family` (against the largest of all layers of
    the two stores), `calibrated`: with `calibrate`, else empty. The value is NaN where a site is
    constant. `ridge_r2` of row (a, b) predicts a from b, and of two stores both orders are rows.

    Args:
        stores: of the same images, as for `cka`.
        measure: of `MEASURES`, several for several.
        k: nearest neighbours.
        rdm: dissimilarities of rsa: "pearson" (1 - correlation over features) or "euclidean".
        ridge: of gulp, in units of the total variance.
        variance: share of it that svcca's components have.
        calibrate: permutations of the images; None: no calibration.
        sites: selectors, by default `blocks`, or those of the preset.
        sites_a: of the rows, in place of `sites`.
        sites_b: of the columns, in place of `sites`.
        tokens: the tokens whose channels are an image's features, see `Representation`; by default
            "all", or those of the preset.
        pairs: "all", "same-depth" or "branch".
        pair_by: "image", or "id" for other pictures of the same ids.
        preset: "platonic", see `measures.platonic`; what is given beside it wins.
        cache: folder for Gram matrices; by default beside each store.
        no_cache: keep none.
        execution: which images, and what the work may use; see `Execution`.

    Raises:
        StoreMismatch: the stores do not have the same images in the same order.
        MissingInput: a store lacks a site or its tokens, or keeps only blocks within slabs.
        SiteError: a selector that nothing matches, or tokens that a site lacks.
        VitseeError: choices that do not go together, too few images, disk or memory.
    """
    measures = choose_measures(measure, k=k, rdm=rdm, ridge=ridge, variance=variance)
    if calibrate is not None and calibrate < calibration.LEAST:
        raise VitseeError(
            f"{calibrate} permutations give no 5 % threshold; expected {calibration.LEAST} and more"
        )
    if preset not in (None, *PRESETS):
        raise VitseeError(f"no preset {preset!r}; expected {', '.join(PRESETS)}")
    if preset and not (sites_a and sites_b):
        sites = sites or platonic.SITES
    tokens = tokens or (platonic.TOKENS if preset else "all")
    chosen = choose_pairs(stores, sites, sites_a, sites_b, pairs)
    sides = [*chosen.rows, *(chosen.cols or ())]
    check_k(measures, [store for store, _ in sides], execution.images)
    try:
        compared = [Representation(store, site, tokens) for store, site in sides]
    except SiteError as error:
        hint = f" (--preset {preset} takes the class token; --tokens mean the rest)"
        raise SiteError(f"{error}{hint if preset and tokens == platonic.TOKENS else ''}") from None
    if preset:
        compared = platonic.without_outliers(compared, execution, pair_by)
    n_rows = len(chosen.rows)
    found: list[dict[str, Any]] = []
    remarks: list[str] = []
    with grams_of(
        compared[:n_rows],
        None if chosen.cols is None else compared[n_rows:],
        images=execution.images,
        seed=execution.seed,
        options=GramOptions(
            *(cache, not no_cache, execution.device, execution.memory, execution.map)
        ),
        pair_by=pair_by,
        progress=execution.progress,
    ) as grams:
        for one in measures:
            places = numbered_pairs(chosen, both=not one.symmetric)
            result = compare_all(grams, one, places, permutations=calibrate or 0)
            remarks += result.remarks
            found += _rows(one, sides, places, result)
        notes = dict(grams.notes)
    for remark in remarks:
        log.warning("%s", remark)
    any_tokens = any(site.kind != "vector" for _, site in sides)
    notes |= {
        **{"pairs": pairs, "tokens": tokens if any_tokens else "vectors", "interval": INTERVAL},
        **({"calibration": f"{calibrate} {calibration.METHOD}"} if calibrate else {}),
        "remarks": [*notes.get("remarks", ()), *remarks],
    }
    if not preset:
        return Table.from_rows(found, COLUMNS, notes)
    notes["preset"] = f"{preset}: {platonic.SOURCE}"
    notes["outliers"] = {one.store.label: one.clamp for one in compared}
    notes["alignment"] = platonic.alignments(Table.from_rows(found, COLUMNS))
    for line in notes["alignment"]:
        log.info("%s", line)
    return Table.from_rows(found, COLUMNS, notes)


def choose_measures(
    names: Sequence[str], *, k: int, rdm: str, ridge: float, variance: float
) -> list[Measure]:
    """The measures of these names, each once.

    Raises:
        VitseeError: an unknown one, or a parameter out of range.
    """
    if rdm not in RDMS:
        raise VitseeError(f"no dissimilarities {rdm!r}; expected {' or '.join(RDMS)}")
    if not 0 < variance <= 1:
        raise VitseeError(f"a share of {variance:g} of the variance; expected above 0, at most 1")
    if not ridge > 0 or not np.isfinite(ridge):
        raise VitseeError(f"a ridge of {ridge:g}; expected above 0")
    if k < 1:
        raise VitseeError(f"{k} neighbours; expected 1 and more")
    makers: dict[str, Callable[[], Measure]] = {
        "mutual-knn": lambda: MutualKnn(k),
        "cknna": lambda: Cknna(k),
        "rsa": lambda: Rsa(rdm),
        "procrustes": Procrustes,
        "svcca": lambda: Svcca(variance),
        "gulp": lambda: Gulp(ridge),
        "ridge-r2": RidgeR2,
        "cka": Cka,
    }
    wanted = dict.fromkeys(name.replace("_", "-") for name in names)
    if unknown := [name for name in wanted if name not in makers]:
        raise VitseeError(f"no measure {unknown[0]!r}; expected {', '.join(MEASURES)}")
    if not wanted:
        raise VitseeError(f"no measure; expected some of {', '.join(MEASURES)}")
    return [makers[name]() for name in wanted]


def check_k(measures: Sequence[Measure], stores: Sequence[Store], images: int | None) -> None:
    """Refuse, before any work, more neighbours than there are other images.

    Raises:
        VitseeError: names both.
    """
    n = min(int(store.valid.sum()) for store in stores)
    n = n if images is None else min(n, images)
    for measure in measures:
        if isinstance(measure, MutualKnn | Cknna):
            measure.check(n)


def numbered_pairs(chosen: SitePairs, *, both: bool) -> Integers:
    """(pairs, 2) places among the rows and columns; both: each of two sides the other way too."""
    shift = 0 if chosen.cols is None else len(chosen.rows)
    places = np.array([(i, j + shift) for i, j in chosen.places], np.int64)
    if both and chosen.cols is not None:
        places = np.concatenate([places, places[:, ::-1]])
    return places


def _rows(
    measure: Measure,
    sides: Sequence[tuple[Store, Any]],
    places: Integers,
    compared: Compared,
) -> list[dict[str, Any]]:
    value = compared.value
    std, low, high = spread(measure, value, compared.without)
    null = None
    if compared.null is not None:
        names = [(sides[i][0].label, sides[j][0].label) for i, j in places.tolist()]
        families = np.unique(names, axis=0, return_inverse=True)[1].ravel()
        null = calibration.calibrate(value, compared.null, families, distance=measure.distance)
    nothing = np.full(len(value), np.nan)
    numbers = {"value": value, "std": std, "low": low, "high": high}
    numbers |= {name: nothing if null is None else getattr(null, name) for name in NULL}
    lists = {name: column.tolist() for name, column in numbers.items()}
    word = "" if compared.without is None else "jackknife"
    return [
        pair_columns(sides[i], sides[j])
        | {"k": getattr(measure, "k", None), "metric": measure.name, "spread": word}
        | {name: column[at] for name, column in lists.items()}
        | {"n_images": compared.n_images}
        | {WORD: None if compared.without is None else compared.without[:, at]}
        for at, (i, j) in enumerate(places.tolist())
    ]


def spread(measure: Measure, value: Float, without: Float | None) -> tuple[Float, Float, Float]:
    """Standard error, low and high, within the measure's limits."""
    if without is None:
        nothing = np.full_like(value, np.nan)
        return nothing, nothing, nothing
    return interval(value, without.T, measure.limits)


@styled
def plot(table: Table) -> Figure:
    """A heatmap per measure, and one of the calibrated values beside it; or curves where each site
    has one partner, with the null's mean (dashed) and 5 % threshold (dotted).

    Similarities are on one scale from 0 to 1; a distance has a scale of its own from 0 to its
    largest value.
    """
    groups = list(table.groups("metric"))
    if all(one_to_one(rows) for _, rows in groups):
        return _draw_curves(table)
    panels: list[Panel] = []
    for metric, rows in groups:
        panels += _panels(metric, rows)
    across = 2 if np.isfinite(table["calibrated"]).any() or len(groups) == 2 else 3
    absent = "features that are the same for all images"
    return draw_heatmaps(panels, absent=absent, across=min(across, len(panels)))


def _panels(metric: str, rows: Table) -> list[Panel]:
    """The measure's heatmaps."""
    from dataclasses import replace

    scope = describe_scope(rows)
    finite = rows["value"][np.isfinite(rows["value"])]
    top = float(finite.max(initial=0)) if metric == "gulp" else 1.0
    label = _label(metric, rows).replace("a from b", "rows from columns")
    found = [
        replace(panel, limits=(0.0, top or 1.0), label=label)
        for panel in panels_of(rows, about=scope)
    ]
    if np.isfinite(rows["calibrated"]).any():
        found += [
            replace(panel, label=f"{NAMES.get(metric, LABELS[metric])}, calibrated (0: chance)")
            for panel in panels_of(rows, "calibrated", scope)
        ]
    return found


def _label(metric: str, rows: Table) -> str:
    k = f", k = {rows['k'][0]:g}" if metric in NEIGHBOURS else ""
    return LABELS[metric] + k


def _draw_curves(table: Table) -> Figure:
    groups = list(table.groups("metric"))
    across = min(3, len(groups))
    down = -(-len(groups) // across)
    figure = new_figure(max(5.6, 4.0 * across), 0.8 + 3.0 * down)
    all_axes = figure.subplots(down, across, squeeze=False).ravel()
    handles: list[Any] = []
    for axes, (metric, rows) in zip(all_axes, groups, strict=False):
        handles = draw_curves(axes, rows)
        axes.set_ylabel(_label(metric, rows))
        axes.set_title(describe_scope(rows))
        if metric != "gulp":
            axes.set_ylim(min(0, axes.dataLim.y0), max(1.02, axes.dataLim.y1))
    for axes in all_axes[len(groups) :]:
        axes.set_visible(False)
    put_legend_below(figure, handles, 72 * across)
    return figure


def in_short(table: Table) -> list[Answer]:
    """As of CKA, by the first measure that the table has of those that are 1 where all is alike."""
    metric = next((m for m in table.unique("metric") if m in LABELS and m != "gulp"), None)
    found = alike(table, metric) if metric else []
    return [(who, f"{LABELS[str(metric)]}, {text}") for who, text in found]
