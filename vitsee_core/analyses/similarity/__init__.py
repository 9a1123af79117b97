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
from vitsee_core.analyses.similarity.comparing import PairResults, compare_all
from vitsee_core.analyses.similarity.decompositions import Procrustes, RidgeR2, Svcca
from vitsee_core.analyses.similarity.figures import LABELS, MEASURES, plot
from vitsee_core.analyses.similarity.gram_reader import grams_of
from vitsee_core.analyses.similarity.measure import Cknna, Measure, MutualKnn
from vitsee_core.analyses.similarity.products import Cka, Gulp, Rsa
from vitsee_core.declaration import Analysis
from vitsee_core.features.matrix import quantile_of_sizes
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
from vitsee_core.similarity.pairs import Side, SitePairs, choose_pairs, paired_rows
from vitsee_core.statistics.jackknife import interval
from vitsee_core.tables.columns import NULL, PAIR, REPLICATES, VALUES, pair_columns
from vitsee_core.tables.headlines import Answer, alike, extremes, picked
from vitsee_core.tables.metrics import SIZE_NOTE, depends_on_size, select_metrics
from vitsee_core.tables.results import Table
from vitsee_stores import Store
from vitsee_stores.errors import SiteError, VitseeError

if TYPE_CHECKING:
    from vitsee_core.types import Integers

__all__ = ["COLUMNS", "LABELS", "MEASURES", "choose_measures", "plot", "run"]

log = logging.getLogger(__name__)

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
            least=comparing.MIN_PERMUTATIONS,
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
    """Return each measure of each pair of sites, its spread, and what unrelated sites would give.

    There is one row per measure and pair; the columns are `COLUMNS`. `k` is that of the neighbour
    measures. With `calibrate` there are `null_mean`, `tau` (the 5 % threshold), `p`, `p_family`
    (against the largest of all layers of the two stores) and `calibrated`; else they are empty.
    Values are NaN where a site is constant. `ridge_r2` in a row (a, b) predicts a from b; of two
    stores both orders are rows.

    Args:
        stores: stores of the same images, as for `vitsee cka`.

    Raises:
        StoreMismatch: the stores do not have the same images in the same order.
        MissingInput: a store lacks a site or its tokens, or keeps only blocks within slabs.
        SiteError: a selector that nothing matches, or tokens that a site lacks.
        VitseeError: choices that do not go together, too few images, disk or memory.

    Examples:
        >>> import vitsee
        >>> table = vitsee.similarity(
        ...     "vit.zarr", "untrained.zarr", metrics="mutual_knn", pairs="same-depth", sites="last"
        ... )
        >>> table["k"].item(), round(table["value"].item(), 2)
        (10, 0.65)
    """
    measures = choose_measures(metrics, k=k, rdm=rdm, ridge=ridge, variance=variance)
    if calibrate is not None and calibrate < comparing.MIN_PERMUTATIONS:
        raise VitseeError(
            f"{calibrate} permutations give no 5 % threshold; expected "
            f"{comparing.MIN_PERMUTATIONS} and more"
        )
    if preset not in (None, *PRESETS):
        raise VitseeError(f"no preset {preset!r}; expected {', '.join(PRESETS)}")
    # Options that the user gave win over the preset's.
    if preset and not (sites_a and sites_b):
        sites = sites or PLATONIC_SITES
    tokens = tokens or (PLATONIC_TOKENS if preset else "all")
    chosen = choose_pairs(stores, sites, sites_a, sites_b, pairs)
    # Numbered as the representations are: rows, then columns.
    sides = [*chosen.rows, *(chosen.cols or ())]
    # Neighbours among the other images: refused here, before any work.
    n_images = min(int(store.valid.sum()) for store, _ in sides)
    if execution.images is not None:
        n_images = min(n_images, execution.images)
    for measure in measures:
        if isinstance(measure, MutualKnn | Cknna):
            measure.check(n_images)
    try:
        representations = [Representation(store, site, tokens) for store, site in sides]
    except SiteError as error:
        hint = ""
        if preset and tokens == PLATONIC_TOKENS:
            hint = f" (--preset {preset} takes the class token; --tokens mean the rest)"
        raise SiteError(f"{error}{hint}") from None
    if preset:
        representations = without_outliers(representations, execution, pair_by)
    n_rows = len(chosen.rows)
    table_rows: list[dict[str, Any]] = []
    remarks: list[str] = []
    with grams_of(
        representations[:n_rows],
        None if chosen.cols is None else representations[n_rows:],
        images=execution.images,
        seed=execution.seed,
        options=GramOptions(
            cache=cache,
            use_cache=not no_cache,
            device=execution.device,
            memory=execution.memory,
            map=execution.map,
        ),
        pair_by=pair_by,
        progress=execution.progress,
    ) as grams:
        for measure in measures:
            # ridge_r2 predicts one site from the other, so both orders count.
            pair_indices = numbered_pairs(chosen, both=not measure.symmetric)
            result = compare_all(
                grams, measure, pair_indices, permutations=calibrate or 0
            )
            remarks += result.remarks
            table_rows += _measure_rows(measure, sides, pair_indices, result)
        notes = dict(grams.comparison.notes)
    for remark in remarks:
        log.warning("%s", remark)
    any_tokens = any(site.kind != "vector" for _, site in sides)
    notes["pairs"] = pairs
    notes["tokens"] = tokens if any_tokens else "vectors"
    notes["interval"] = INTERVAL
    notes["interval_of"] = {
        measure.name: SIZE_NOTE for measure in measures if depends_on_size(measure.name)
    }
    if calibrate:
        notes["calibration"] = f"{calibrate} {comparing.METHOD}"
    notes["remarks"] = [*notes.get("remarks", ()), *remarks]
    if not preset:
        return Table.from_rows(table_rows, COLUMNS, notes)
    notes["preset"] = f"{preset}: {PLATONIC_SOURCE}"
    # One bound for each store, the same for all of its sites.
    notes["outliers"] = {r.store.label: r.clamp for r in representations}
    notes["alignment"] = _alignments(Table.from_rows(table_rows, COLUMNS))
    for line in notes["alignment"]:
        log.info("%s", line)
    return Table.from_rows(table_rows, COLUMNS, notes)


def without_outliers(
    representations: Sequence[Representation], execution: Execution, pair_by: str
) -> list[Representation]:
    """Return the representations with values clipped at a quantile of their sizes.

    The quantile `PLATONIC_QUANTILE` of |x| is over all representations of one store together, of
    the images that are compared.

    Raises:
        StoreMismatch: the stores do not hold the same images.
        VitseeError: non-finite numbers.
    """
    stores = {r.store.manifest.store_id: r.store for r in representations}
    first = next(iter(stores.values()))
    chosen = choose_rows(first, execution.images, execution.seed)
    # The quantile is of the images that are compared, not of all that a store has.
    rows, _ = paired_rows(list(stores.values()), chosen, pair_by)
    bounds = {}
    for store_id, store in stores.items():
        # Each site once, even if it is a row and a column.
        features = {
            r.features.identity: r.features
            for r in representations
            if r.store.manifest.store_id == store_id
        }
        mask = np.zeros(len(store.valid), bool)
        mask[rows[store_id]] = True
        bounds[store_id] = quantile_of_sizes(
            list(features.values()), mask, PLATONIC_QUANTILE
        )
    return [replace(r, clamp=bounds[r.store.manifest.store_id]) for r in representations]


def _alignments(table: Table) -> list[str]:
    """Return a line for each measure and pair of stores: the largest value over pairs of layers,
    and which layers these are (the first of ties)."""
    lines = []
    pairs = picked(table).group_by("metric", "store_a", "store_b", maintain_order=True)
    for (metric, a, b), rows in pairs:
        # gulp is a distance; a model with itself is aligned perfectly.
        if metric != "gulp" and a != b:
            _, highest = extremes(rows)
            best = rows.row(highest, named=True)
            lines.append(
                f"{metric} of {a} and {b}, the largest over layers: {best['value']:.4g} "
                f"({best['site_a']}, {best['site_b']})"
            )
    return lines


def choose_measures(
    names: Sequence[str], *, k: int, rdm: str, ridge: float, variance: float
) -> list[Measure]:
    """Return the measures with these names, each once.

    Args:
        names: of `MEASURES`, with hyphens or underscores.
        k: nearest neighbours of mutual_knn and cknna.
        rdm: dissimilarity of rsa, one of `RDMS`.
        ridge: of gulp, in units of the total variance.
        variance: share of it that svcca's principal components have.

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
    distinct_names = list(dict.fromkeys(name.replace("-", "_") for name in names))
    select_metrics(distinct_names, MEASURES, "similarity")
    if not distinct_names:
        raise VitseeError(f"no metric; expected some of {', '.join(MEASURES)}")
    return [makers[name]() for name in distinct_names]


def numbered_pairs(chosen: SitePairs, *, both: bool) -> Integers:
    """Return the indices (pairs, 2) of the two representations of each pair.

    Args:
        chosen: the pairs; their columns are numbered after their rows.
        both: have each pair of a row and a column in both orders.
    """
    first_col = 0 if chosen.cols is None else len(chosen.rows)
    pair_indices = np.array([(i, j + first_col) for i, j in chosen.index_pairs], np.int64)
    # Among themselves both orders are there already (SitePairs).
    if both and chosen.cols is not None:
        pair_indices = np.concatenate([pair_indices, pair_indices[:, ::-1]])
    return pair_indices


def _measure_rows(
    measure: Measure,
    sides: Sequence[Side],
    pair_indices: Integers,
    results: PairResults,
) -> list[dict[str, Any]]:
    """Return the table's rows of one measure.

    Args:
        measure: that was computed.
        sides: store and site of each representation.
        pair_indices: (pairs, 2) indices into the sides.
        results: of each pair.
    """
    values = results.values
    missing = np.full(len(values), np.nan)
    numbers = {"value": values, "std": missing, "low": missing, "high": missing}
    spread = ""
    if results.replicates is not None:
        std, low, high = interval(values, results.replicates.T, measure.limits)
        numbers.update(std=std, low=low, high=high)
        spread = "jackknife"
    if results.null is None:
        numbers.update(dict.fromkeys(NULL, missing))
    else:
        # The largest value over the layers of two stores is compared with the largest of a
        # permutation: pairs of the same two stores are one family.
        stores = [
            (sides[i][0].label, sides[j][0].label) for i, j in pair_indices.tolist()
        ]
        # By rows: a pair of labels is one family.
        _, families = np.unique(stores, axis=0, return_inverse=True)
        calibrated = comparing.calibrate(
            values, results.null, families.ravel(), distance=measure.distance
        )
        numbers.update(calibrated)
    rows = []
    for pair, (i, j) in enumerate(pair_indices.tolist()):
        row = pair_columns(sides[i], sides[j])
        row["k"] = getattr(measure, "k", None)
        row["metric"] = measure.name
        row["spread"] = spread
        for name, column in numbers.items():
            row[name] = float(column[pair])
        row["n_images"] = results.n_images
        row[REPLICATES] = None
        if results.replicates is not None:
            row[REPLICATES] = results.replicates[:, pair]
        rows.append(row)
    return rows


def headline(table: Table) -> list[Answer]:
    """Return the answers of CKA's headline, by the table's first measure that is 1 for equals."""
    for metric in table.frame["metric"].unique(maintain_order=True):
        if metric in LABELS and metric != "gulp":
            answers = alike(table, metric)
            return [(name, f"{LABELS[metric]}, {text}") for name, text in answers]
    return []


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
    may_lack_values=True,  # a remark names constant sites
    run=run,
    plot=plot,
    headline=headline,
)
