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
compares each value with those of permuted images (see `comparing`).

`platonic` is the protocol of the Platonic Representation Hypothesis (Huh et al. 2024) for vision
models, as their code has it: the class token of every block's output; values beyond the 0.95
quantile of |x| (of all layers and images of a model together, exact) cut off; cosine; mutual k-NN
with k = 10; and of all pairs of layers of two models the largest value. The largest of many is high
by chance: `p_family` of --calibrate says how high.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.similarity import comparing
from vitsee_core.analyses.similarity.comparing import Compared, compare_all, grams_of
from vitsee_core.analyses.similarity.measure import Cknna, Measure, MutualKnn
from vitsee_core.analyses.similarity.products import (
    Cka,
    Gulp,
    Procrustes,
    RidgeR2,
    Rsa,
    Svcca,
)
from vitsee_core.declaration import Analysis
from vitsee_core.features.matrix import quantile_of_sizes
from vitsee_core.figures.heatmaps import (
    Panel,
    describe_scope,
    draw_curves,
    draw_heatmaps,
    one_to_one,
    panels_of,
)
from vitsee_core.figures.panels import handles_of, legend_below, panels
from vitsee_core.figures.plotting import reference_line, styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import (
    FEATURE_TOKENS,
    SIMILARITY,
    Offers,
    Option,
    metrics_option,
    tokens_option,
)
from vitsee_core.runtime.streaming import choose_rows
from vitsee_core.similarity import GramOptions, Representation
from vitsee_core.similarity import options as pairwise
from vitsee_core.similarity.pairs import SitePairs, choose_pairs, paired_rows
from vitsee_core.statistics.jackknife import interval
from vitsee_core.tables.columns import NULL, PAIR, VALUES, pair_columns
from vitsee_core.tables.headlines import Answer, alike, extremes, picked
from vitsee_core.tables.metrics import OF_THIS_SIZE, asked_for, depends_on_size
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import metric_words
from vitsee_stores import Store
from vitsee_stores.errors import SiteError, VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_core.types import Integers

log = logging.getLogger(__name__)

MEASURES = (
    "mutual_knn",
    "cknna",
    "rsa",
    "procrustes",
    "svcca",
    "gulp",
    "ridge_r2",
    "cka",
)
NEIGHBOURS = ("mutual_knn", "cknna")
RDMS = ("pearson", "euclidean")
PLATONIC = "platonic"
PLATONIC_SITES = ("*.out",)
PLATONIC_TOKENS = "cls"
PLATONIC_QUANTILE = 0.95
PLATONIC_SOURCE = (
    "Huh et al. 2024 and their code: class tokens of all blocks, values cut at the 0.95 quantile "
    "of |x| of all layers and images of a model together, the largest over pairs of layers"
)
PRESETS = (PLATONIC,)
COLUMNS = (*PAIR, "k", *VALUES, *NULL, "n_images")
INTERVAL = (
    "delete-a-block jackknife over images: std its standard error, low and high value -+ t(0.975, "
    "blocks - 1) * std, cut at the measure's limits; of neighbour measures the neighbours are "
    "found anew without the block, and the interval is conservative (1.6 to 1.9 times too wide)"
)
LABELS = {name: metric_words(name) for name in MEASURES}
NAMES = {"gulp": "GULP", "procrustes": "Procrustes", "rsa": "RSA"}  # 1 means equal


@analysis
def run(
    *stores: Store,
    metrics: Annotated[
        Sequence[str],
        replace(
            metrics_option(
                MEASURES,
                "mutual_knn",
                "gulp is a distance; ridge_r2 predicts a's features from b's.",
            ),
            alias="--measure",
        ),
    ] = ("mutual_knn",),
    k: Annotated[
        int,
        Option(
            "Nearest neighbours of mutual_knn and cknna.",
            metavar="K",
            least=1,
            only_with=("metrics", "mutual_knn", "cknna"),
        ),
    ] = 10,
    rdm: Annotated[
        str,
        Option(
            "Dissimilarity of two images in rsa: 1 - correlation over features, or distance.",
            choices=RDMS,
            only_with=("metrics", "rsa"),
        ),
    ] = "pearson",
    ridge: Annotated[
        float,
        Option(
            "Of gulp, in units of the total variance.",
            metavar="L",
            above=0,
            only_with=("metrics", "gulp"),
        ),
    ] = 1e-2,
    variance: Annotated[
        float,
        Option(
            "What the principal components that svcca compares have of it.",
            metavar="SHARE",
            above=0,
            most=1,
            only_with=("metrics", "svcca"),
        ),
    ] = 0.99,
    calibrate: Annotated[
        int | None,
        Option(
            "Compare with B permutations of the images: threshold, p-values, calibrated value.",
            metavar="B",
            least=comparing.LEAST,
            default="no calibration",
        ),
    ] = None,
    sites: Annotated[Sequence[str], pairwise.SITES] = (),
    sites_a: Annotated[Sequence[str], pairwise.SITES_A] = (),
    sites_b: Annotated[Sequence[str], pairwise.SITES_B] = (),
    tokens: Annotated[
        str | None, tokens_option(FEATURE_TOKENS, "all; cls with --preset platonic")
    ] = None,
    pairs: Annotated[str, pairwise.PAIRS] = "all",
    pair_by: Annotated[str, pairwise.PAIR_BY] = "image",
    preset: Annotated[
        str | None,
        Option(
            "platonic: class tokens of all blocks without outliers, the largest value over pairs "
            "of layers (Huh et al. 2024); options given beside it win.",
            choices=PRESETS,
            default="none",
        ),
    ] = None,
    cache: Annotated[Path | None, pairwise.CACHE] = None,
    no_cache: Annotated[bool, pairwise.NO_CACHE] = False,
    execution: Annotated[
        Execution,
        Offers("images seed device memory", dask="Gram matrices and permutations"),
    ] = DEFAULT,
) -> Table:
    """One row per measure and pair of sites: its value, the spread, and what a null gives.

    Columns: see `COLUMNS`. `k`: of the neighbour measures.
    `null_mean`, `tau` (the 5 % threshold), `p`, `p_family` (against the largest of all layers of
    the two stores), `calibrated`: with `calibrate`, else empty. The value is NaN where a site is
    constant. `ridge_r2` of row (a, b) predicts a from b, and of two stores both orders are rows.

    Args:
        stores: of the same images, as for `cka`.

    Raises:
        StoreMismatch: the stores do not have the same images in the same order.
        MissingInput: a store lacks a site or its tokens, or keeps only blocks within slabs.
        SiteError: a selector that nothing matches, or tokens that a site lacks.
        VitseeError: choices that do not go together, too few images, disk or memory.
    """
    measures = choose_measures(metrics, k=k, rdm=rdm, ridge=ridge, variance=variance)
    if calibrate is not None and calibrate < comparing.LEAST:
        raise VitseeError(
            f"{calibrate} permutations give no 5 % threshold; expected {comparing.LEAST} and more"
        )
    if preset not in (None, *PRESETS):
        raise VitseeError(f"no preset {preset!r}; expected {', '.join(PRESETS)}")
    if preset and not (sites_a and sites_b):
        sites = sites or PLATONIC_SITES
    tokens = tokens or (PLATONIC_TOKENS if preset else "all")
    chosen = choose_pairs(stores, sites, sites_a, sites_b, pairs)
    sides = [*chosen.rows, *(chosen.cols or ())]
    # Neighbours among the other images: refused here, before any work.
    n_images = min(int(store.valid.sum()) for store, _ in sides)
    if execution.images is not None:
        n_images = min(n_images, execution.images)
    for measure in measures:
        if isinstance(measure, MutualKnn | Cknna):
            measure.check(n_images)
    try:
        compared = [Representation(store, site, tokens) for store, site in sides]
    except SiteError as error:
        hint = f" (--preset {preset} takes the class token; --tokens mean the rest)"
        raise SiteError(
            f"{error}{hint if preset and tokens == PLATONIC_TOKENS else ''}"
        ) from None
    if preset:
        compared = without_outliers(compared, execution, pair_by)
    n_rows = len(chosen.rows)
    table_rows: list[dict[str, Any]] = []
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
            table_rows += _rows(one, sides, places, result)
        notes = dict(grams.comparison.notes)
    for remark in remarks:
        log.warning("%s", remark)
    any_tokens = any(site.kind != "vector" for _, site in sides)
    notes |= {
        **{
            "pairs": pairs,
            "tokens": tokens if any_tokens else "vectors",
            "interval": INTERVAL,
        },
        "interval_of": {
            m.name: OF_THIS_SIZE for m in measures if depends_on_size(m.name)
        },
        **({"calibration": f"{calibrate} {comparing.METHOD}"} if calibrate else {}),
        "remarks": [*notes.get("remarks", ()), *remarks],
    }
    if not preset:
        return Table.from_rows(table_rows, COLUMNS, notes)
    notes["preset"] = f"{preset}: {PLATONIC_SOURCE}"
    notes["outliers"] = {one.store.label: one.clamp for one in compared}
    notes["alignment"] = _alignments(Table.from_rows(table_rows, COLUMNS))
    for line in notes["alignment"]:
        log.info("%s", line)
    return Table.from_rows(table_rows, COLUMNS, notes)


def without_outliers(
    representations: Sequence[Representation], execution: Execution, pair_by: str
) -> list[Representation]:
    """The same, clipped at the quantile over all representations of one store, over the compared
    images.

    Raises:
        StoreMismatch: the stores do not hold the same images.
        VitseeError: non-finite numbers.
    """
    stores = {one.store.manifest.store_id: one.store for one in representations}
    first = next(iter(stores.values()))
    chosen = choose_rows(first, execution.images, execution.seed)
    rows = paired_rows(list(stores.values()), chosen, pair_by)[0]
    bounds = {}
    for store_id, store in stores.items():
        own = {
            one.features.identity: one.features
            for one in representations
            if one.store.manifest.store_id == store_id
        }
        mask = np.zeros(len(store.valid), bool)
        mask[rows[store_id]] = True
        bounds[store_id] = quantile_of_sizes(list(own.values()), mask, PLATONIC_QUANTILE)
    return [replace(r, clamp=bounds[r.store.manifest.store_id]) for r in representations]


def _alignments(table: Table) -> list[str]:
    """A line for each measure and pair of stores: its largest value over pairs of layers, and which
    layers (the first of ties)."""
    lines = []
    pairs = picked(table).group_by("metric", "store_a", "store_b", maintain_order=True)
    for (metric, a, b), rows in pairs:
        if metric != "gulp" and a != b:
            best = rows.row(extremes(rows)[1], named=True)
            lines.append(
                f"{metric} of {a} and {b}, the largest over layers: {best['value']:.4g} "
                f"({best['site_a']}, {best['site_b']})"
            )
    return lines


def choose_measures(
    names: Sequence[str], *, k: int, rdm: str, ridge: float, variance: float
) -> list[Measure]:
    """The measures with these names, each once.

    Raises:
        VitseeError: an unknown one, or a parameter out of range.
    """
    if rdm not in RDMS:
        raise VitseeError(f"no dissimilarities {rdm!r}; expected {' or '.join(RDMS)}")
    if not 0 < variance <= 1:
        raise VitseeError(
            f"a share of {variance:g} of the variance; expected above 0, at most 1"
        )
    if not ridge > 0 or not np.isfinite(ridge):
        raise VitseeError(f"a ridge of {ridge:g}; expected above 0")
    if k < 1:
        raise VitseeError(f"{k} neighbours; expected 1 and more")
    makers: dict[str, Callable[[], Measure]] = {
        "mutual_knn": lambda: MutualKnn(k),
        "cknna": lambda: Cknna(k),
        "rsa": lambda: Rsa(rdm),
        "procrustes": Procrustes,
        "svcca": lambda: Svcca(variance),
        "gulp": lambda: Gulp(ridge),
        "ridge_r2": RidgeR2,
        "cka": Cka,
    }
    wanted = dict.fromkeys(name.replace("-", "_") for name in names)
    asked_for([*wanted], MEASURES, "similarity")
    if not wanted:
        raise VitseeError(f"no metric; expected some of {', '.join(MEASURES)}")
    return [makers[name]() for name in wanted]


def numbered_pairs(chosen: SitePairs, *, both: bool) -> Integers:
    """The indices (pairs, 2) of the two representations of each pair, rows before columns; with
    `both`, each pair of two sides in both orders."""
    shift = 0 if chosen.cols is None else len(chosen.rows)
    places = np.array([(i, j + shift) for i, j in chosen.index_pairs], np.int64)
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
    nothing = np.full(len(value), np.nan)
    std = nothing
    low = nothing
    high = nothing
    word = ""
    if compared.without is not None:
        std, low, high = interval(value, compared.without.T, measure.limits)
        word = "jackknife"
    null = dict.fromkeys(NULL, nothing)
    if compared.null is not None:
        names = [(sides[i][0].label, sides[j][0].label) for i, j in places.tolist()]
        families = np.unique(names, axis=0, return_inverse=True)[1].ravel()
        null = comparing.calibrate(
            value, compared.null, families, distance=measure.distance
        )
    numbers = {"value": value, "std": std, "low": low, "high": high} | null
    lists = {name: column.tolist() for name, column in numbers.items()}
    return [
        pair_columns(sides[i], sides[j])
        | {"k": getattr(measure, "k", None), "metric": measure.name, "spread": word}
        | {name: column[at] for name, column in lists.items()}
        | {"n_images": compared.n_images}
        | {WORD: None if compared.without is None else compared.without[:, at]}
        for at, (i, j) in enumerate(places.tolist())
    ]


@styled
def plot(table: Table) -> Figure:
    """A heatmap per measure, and one of the calibrated values beside it; or curves where each site
    has one partner, with the null's mean (dashed) and 5 % threshold (dotted).

    Each has a scale of its own, which spans its values.
    """
    of_metrics = [
        table.with_frame(own)
        for own in table.frame.partition_by("metric", maintain_order=True)
    ]
    if all(one_to_one(rows) for rows in of_metrics):
        return _draw_curves(of_metrics)
    panels: list[Panel] = []
    for rows in of_metrics:
        panels += _panels(rows)
    return draw_heatmaps(panels, absent="features that are the same for all images")


def _panels(rows: Table) -> list[Panel]:
    scope = describe_scope(rows)
    metric = str(rows["metric"][0])
    label = _label(metric, rows).replace("a from b", "rows from columns")
    panels = [replace(panel, label=label) for panel in panels_of(rows, about=scope)]
    if rows.frame["calibrated"].is_finite().any():
        panels += [
            replace(
                panel,
                label=f"{NAMES.get(metric, LABELS[metric])}, calibrated (0: chance)",
            )
            for panel in panels_of(rows, "calibrated", scope)
        ]
    return panels


def _label(metric: str, rows: Table) -> str:
    if metric not in NEIGHBOURS:
        return LABELS[metric]
    k = f"{LABELS[metric]}, k = {rows['k'][0]:g}"
    if metric == "mutual_knn":
        return f"{k} (chance {_chance(rows):.2g})"
    return k


def _chance(rows: Table) -> float:
    """The mean of mutual k-NN over unrelated features: k of n - 1 others are neighbours."""
    return float(rows["k"][0]) / max(int(rows["n_images"].max()) - 1, 1)


def _draw_curves(of_metrics: Sequence[Table]) -> Figure:
    figure, every = panels(len(of_metrics), width=24, widest=48, height=18)
    handles: dict[str, Any] = {}
    for axes, rows in zip(every, of_metrics, strict=True):
        metric = str(rows["metric"][0])
        handles |= draw_curves(axes, rows.frame)
        axes.set_ylabel(_label(metric, rows))
        axes.set_title(describe_scope(rows))
        if metric == "mutual_knn":
            reference_line(axes, _chance(rows), "chance")
        if metric != "gulp":
            axes.set_ylim(min(0, axes.dataLim.y0), 1.05 * axes.dataLim.y1)
    legend_below(figure, handles | handles_of(every))
    return figure


def headline(table: Table) -> list[Answer]:
    """The answers of CKA's headline, by the table's first measure that is 1 for equals."""
    known = table.frame["metric"].unique(maintain_order=True)
    metric = next((m for m in known if m in LABELS and m != "gulp"), None)
    answers = alike(table, metric) if metric else []
    return [(who, f"{LABELS[str(metric)]}, {text}") for who, text in answers]


ANALYSIS = Analysis(
    module=__name__,
    question=SIMILARITY,
    help="""
    Compare representations by measures beyond CKA.

    Common neighbours (mutual_knn, cknna; Huh et al. 2024), dissimilarities (rsa; Kriegeskorte
    et al. 2008), rotation (procrustes; Williams et al. 2021), canonical correlations (svcca;
    Raghu et al. 2017), ridge predictors (gulp; Boix-Adsera et al. 2022; ridge_r2), debiased
    CKA; from the Gram matrices that vitsee cka keeps, with jackknife intervals over images.
    Which sites meet which is as in vitsee cka.

    Wide features are similar by chance alone: --calibrate 200 tells by how much.

      $ vitsee similarity a.zarr b.zarr -o knn.csv --png knn.png
      $ vitsee similarity a.zarr --metric rsa --metric gulp --png two.png > two.csv
      $ vitsee similarity a.zarr b.zarr --pairs same-depth --calibrate 200 --png null.png > null.csv
      $ vitsee similarity dino.zarr mae.zarr --preset platonic --calibrate 200 -o platonic.csv
    """,
    needs=("sites",),
    reading=(
        "Similarity of layers by other measures than CKA, which weigh neighbours, angles or "
        "predictions. Where they disagree, the conclusion is about the measure. With "
        "calibration, a panel beside each shows what is left beyond chance."
    ),
    source=(
        "Huh et al. 2024; Kriegeskorte et al. 2008; Williams et al. 2021; Raghu et al. 2017; "
        "Kornblith et al. 2019; Boix-Adsera et al. 2022"
    ),
    columns=COLUMNS,
    meanings={
        "tau": "5 % threshold",
        "p_family": "over all layers of two stores",
        "high": "",
    },
    metrics=MEASURES,
    run=run,
    plot=plot,
    headline=headline,
)
