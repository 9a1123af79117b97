"""Linear CKA: how alike are the layers?

Two sites are compared over the same images. An image is an example, its features are all chosen
tokens' channels, flattened; tokens are never examples:

    K = X X^T, L = Y Y^T    CKA = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L))

with the unbiased HSIC_1 over all images, over minibatches, or the biased one; see
`similarity.hsic_sums` for the formulas. Debiased CKA may lie a little below 0 or above 1: that is
noise about a true value near the limit, and is not clipped.

- All pairs of one model's sites: Kornblith et al. 2019; Raghu et al. 2021, Figs. 1, 8, B.1 top,
  H.1; Walmer et al. 2023, Figs. 20 to 22 (`norms`).
- Two models: Raghu et al. 2021, Figs. 2, B.1 bottom, H.2; other initialisations of one model.
- One site each of many models: Walmer et al. 2023, Figs. 6, 19.
- `same-depth`: Raghu et al. 2021, Figs. 12, G.1, G.2.
- `branch`, skip connections against long branches: Walmer et al. 2023, Fig. 23, who show attention
  only; here MLPs and the blocks of CNNs too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitsee_core.declaration import Analysis
from vitsee_core.figures.heatmaps import (
    describe_scale,
    describe_scope,
    draw_curves,
    draw_heatmaps,
    one_to_one,
    panels_of,
)
from vitsee_core.figures.panels import legend_below, panels
from vitsee_core.figures.plotting import styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import SIMILARITY, Offers
from vitsee_core.similarity import GramOptions, Representation, hsic, summarise
from vitsee_core.similarity import options as pairwise
from vitsee_core.similarity.hsic_sums import without_value
from vitsee_core.similarity.options import PRESETS, choose_estimator
from vitsee_core.similarity.pairs import SitePairs, choose_pairs
from vitsee_core.statistics.image_statistics import block_labels
from vitsee_core.statistics.jackknife import interval, standard_error
from vitsee_core.tables.columns import PAIR, VALUES, pair_columns
from vitsee_core.tables.headlines import Answer, alike
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.types import Float
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


log = logging.getLogger(__name__)

COLUMNS = (*PAIR, *VALUES, "n_images")
MIN_IMAGES = 10  # below, CKA of independent representations is often far from 0
LEAST = 4  # images: unbiased HSIC divides by n - 3
NUMBERS = {"value": "cka", "std": "std", "low": "low", "high": "high"}


@analysis
def run(
    *stores: Store,
    sites: Annotated[Sequence[str], pairwise.SITES] = (),
    sites_a: Annotated[Sequence[str], pairwise.SITES_A] = (),
    sites_b: Annotated[Sequence[str], pairwise.SITES_B] = (),
    tokens: Annotated[str, pairwise.TOKENS] = "all",
    pairs: Annotated[str, pairwise.PAIRS] = "all",
    pair_by: Annotated[str, pairwise.PAIR_BY] = "image",
    estimator: Annotated[str | None, pairwise.ESTIMATOR] = None,
    batch: Annotated[int | None, pairwise.BATCH] = None,
    examples: Annotated[int | None, pairwise.EXAMPLES] = None,
    repeats: Annotated[int | None, pairwise.REPEATS] = None,
    preset: Annotated[str | None, pairwise.preset(*PRESETS)] = None,
    cache: Annotated[Path | None, pairwise.CACHE] = None,
    no_cache: Annotated[bool, pairwise.NO_CACHE] = False,
    precision: Annotated[str, pairwise.PRECISION] = "fp32",
    execution: Annotated[
        Execution, Offers("images seed device memory", dask="Gram matrices")
    ] = DEFAULT,
) -> Table:
    """One row per pair of sites: their CKA and its spread.

    Columns: see `COLUMNS`. `metric` is `cka`; its value is NaN where a self-HSIC is not positive
    (constant features); debiased values near the limits may exceed 0 and 1. `spread` names what
    `std` is: "jackknife" and "slabs", the standard error over images, `low` and `high` its 95 %
    interval; "repeats", the standard deviation over minibatch repeats, which is the estimator's own
    noise and has no interval; "" for none. Sites among themselves fill the whole square, (i, j) and
    (j, i).

    Args:
        stores: of the same images in the same order, or paired by id; see `pairs.choose_pairs` for
            how many.

    Raises:
        StoreMismatch: the stores do not have the same images in the same order.
        MissingInput: a store lacks a site or its tokens.
        SiteError: a selector that nothing matches, or tokens that a site lacks.
        VitseeError: choices that do not go together, too few images, disk or memory.
    """
    if preset in PRESETS and pairs == "all":
        sites = sites or PRESETS[preset].sites
    chosen = choose_pairs(stores, sites, sites_a, sites_b, pairs)
    how = choose_estimator(
        stores,
        preset,
        estimator,
        batch=batch,
        examples=examples,
        repeats=repeats,
        images=execution.images,
        seed=execution.seed,
        pair_by=pair_by,
    )
    rows, cols = (
        None
        if side is None
        else [Representation(store, site, tokens) for store, site in side]
        for side in (chosen.rows, chosen.cols)
    )
    h = hsic(
        rows or [],
        cols,
        estimator=how,
        images=execution.images,
        seed=execution.seed,
        options=GramOptions(
            *(
                cache,
                not no_cache,
                execution.device,
                execution.memory,
                execution.map,
                precision,
            )
        ),
        pair_by=pair_by,
        progress=execution.progress,
    )
    sides = [
        (chosen.rows, h.rows),
        *([] if chosen.cols is None else [(chosen.cols, h.cols)]),
    ]
    remarks = [
        remark
        for side, own in sides
        for remark in without_value(
            [f"{store.label} {site.name}" for store, site in side], own
        )
    ]
    remarks += few_images(h.n_images)
    for remark in remarks:
        log.warning("%s", remark)
    any_tokens = any(
        site.kind != "vector" for _, site in (*chosen.rows, *(chosen.cols or ()))
    )
    notes = {
        **h.notes,
        **({"preset": f"{preset}: {PRESETS[preset].source}"} if preset else {}),
        **({"rescaled": True} if how.rescale else {}),
        **{"pairs": pairs, "tokens": tokens if any_tokens else "vectors"},
        **_site_notes(chosen),
        "remarks": remarks,
    }
    similarity = summarise(h)
    at = tuple(np.array(chosen.places).T)
    numbers = {
        column: getattr(similarity, name)[at].tolist() for column, name in NUMBERS.items()
    }
    return Table.from_rows(
        (
            pair_columns(chosen.rows[i], (chosen.cols or chosen.rows)[j])
            | {"metric": "cka"}
            | {name: values[k] for name, values in numbers.items()}
            | {"spread": h.spread, "n_images": h.n_images}
            | {WORD: None if similarity.without is None else similarity.without[:, i, j]}
            for k, (i, j) in enumerate(chosen.places)
        ),
        COLUMNS,
        notes,
    )


def few_images(n: int) -> list[str]:
    """A remark on a CKA of few images."""
    if n >= MIN_IMAGES:
        return []
    no_interval = ", and has no interval" if n == LEAST else ""
    return [
        f"CKA of {n} images is mostly noise{no_interval}: unbiased HSIC divides by n (n - 3), and "
        "representations that share nothing may reach 1; give more --images"
    ]


def _site_notes(chosen: SitePairs) -> dict[str, Any]:
    """The compared sites of both sides, by store."""
    sides = {"a": chosen.rows, "b": chosen.cols or chosen.rows}
    notes: dict[str, Any] = {"sites_a": {}, "sites_b": {}}
    for letter, side in sides.items():
        for store, site in side:
            notes[f"sites_{letter}"].setdefault(store.label, []).append(site.name)
    return notes


@styled
def plot(table: Table) -> Figure:
    """The table as heatmaps, or as lines where each site has one partner.

    Heatmaps: rows upwards, columns to the right, from input to output; one panel for each kind of
    sublayer where skips are compared with branches; numbers in the cells where models are compared
    by one site each. Lines: over the sites in order, one for each store that the first is compared
    with, with the 95 % interval as a band or the estimator's noise as bars.
    """
    if not one_to_one(table):
        return draw_heatmaps(panels_of(table), describe_scale(table))
    figure, (axes,) = panels(1, widest=48, height=18)
    handles = draw_curves(axes, table.frame)
    axes.set_ylabel(describe_scale(table))
    axes.set_title(describe_scope(table))
    axes.set_ylim(min(0, axes.dataLim.y0), 1.05 * axes.dataLim.y1)
    legend_below(figure, handles)
    return figure


def headline(table: Table) -> list[Answer]:
    """Lowest and highest layers among themselves, first with last; the most similar of two."""
    return alike(table, "cka")


def cka_of_arrays(a: ArrayLike, b: ArrayLike) -> Table:
    """One row: debiased linear CKA of two representations of the same images, with the interval of
    a delete-a-block jackknife, as `vitsee cka` has it for sites of stores.

    Args:
        a: (images, ...), flattened to (images, features).
        b: the same images in the same order; its features may be others.

    Raises:
        VitseeError: other numbers of images, fewer than `LEAST`, or numbers that are not finite.
    """
    grams = [
        _gram(_flat(features, name)) for features, name in ((a, "first"), (b, "second"))
    ]
    n = len(grams[0])
    if len(grams[1]) != n or n < LEAST:
        raise VitseeError(
            f"the arrays have {n} and {len(grams[1])} images; expected the same ones, at least "
            f"{LEAST}"
        )
    value = _cka(*grams)
    labels = block_labels(n, None)
    kept = [np.flatnonzero(labels != block) for block in range(labels.max() + 1)]
    without = np.array(
        [
            _cka(*(g[np.ix_(own, own)] for g in grams)) if len(own) >= LEAST else np.nan
            for own in kept
        ]
    )
    _, low, high = interval(np.array(value), without)
    row: dict[str, Any] = {
        "metric": "cka",
        "value": value,
        "std": float(standard_error(without)),
        "low": float(low),
        "high": float(high),
        "spread": "jackknife",
        "n_images": n,
        "replicates": without,
    }
    columns = ("metric", "value", "std", "low", "high", "spread", "n_images")
    notes: dict[str, Any] = {"estimator": "exact, unbiased HSIC over all images"}
    notes["remarks"] = few_images(n)
    return Table.from_rows([row], columns, notes)


def _flat(features: ArrayLike, name: str) -> Float:
    values: NDArray[Any] = np.asarray(features)
    if values.ndim < 2 or values.dtype.kind not in "fiub":
        raise VitseeError(
            f"the {name} array is {values.dtype} of shape {values.shape}; expected numbers, "
            "(images, features) or (images, tokens, features)"
        )
    flat = values.reshape(len(values), -1).astype(np.float64)
    if not np.isfinite(flat).all():
        raise VitseeError(f"the {name} array has values that are not finite")
    return flat


def _gram(x: Float) -> Float:
    """(images, images), the diagonal 0, of features less their mean and near 1, which CKA does not
    see."""
    largest = float(np.abs(x).max(initial=0))
    if largest > 0:
        _, exponent = np.frexp(largest)
        x = np.ldexp(x, -exponent)
    x = x - x.mean(0)
    gram: Float = x @ x.T
    np.fill_diagonal(gram, 0.0)
    return gram


def _cka(k: Float, m: Float) -> float:
    own = _hsic(k, k) * _hsic(m, m)
    return _hsic(k, m) / own**0.5 if own > 0 else float("nan")


def _hsic(k: Float, m: Float) -> float:
    """Song et al. 2012, Eq. 5, for matrices without diagonal."""
    n = len(k)
    rows = k.sum(1) @ m.sum(1)
    found = (k * m).sum() + k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 * rows / (n - 2)
    return float(found / (n * (n - 3)))


ANALYSIS = Analysis(
    module=__name__,
    question=SIMILARITY,
    help="""
    Compare representations by linear CKA.

    One store: all its sites with each other (Raghu et al. 2021, Fig. 1; Walmer et al. 2023,
    Figs. 20 to 22). Two: the first one's sites (rows) with the second one's (columns; Raghu
    Fig. 2). Three and more: one site of each, model by model (Walmer Fig. 6). An image is an
    example, all tokens' channels are its features; --tokens takes fewer. The stores must hold
    the same images in the same order, or images of the same names with --pair-by id.

      $ vitsee cka b16.zarr -o b16.csv --png b16.png
      $ vitsee cka b16.zarr r50.zarr --png cross.png > cross.csv
      $ vitsee cka b16.zarr --sites norms --sites hidden --sites blocks --png fig1.png > fig1.csv
      $ vitsee cka fs=a.zarr dino=b.zarr mae=c.zarr --sites blocks.-1.out --tokens cls
      $ vitsee cka full.zarr 10pc.zarr 3pc.zarr --pairs same-depth --png fig12.png > fig12.csv
      $ vitsee cka clean.zarr blurred.zarr --pair-by id --pairs same-depth > blur.csv
      $ vitsee cka b16.zarr --pairs branch --png fig23.png > fig23.csv

    Debiased (HSIC_1) over all images where there are at most 16384, with a jackknife's standard
    error and 95 % interval; otherwise over minibatches, whose spread is the estimator's own
    noise. Gram matrices are cached beside each store and reused.
    """,
    needs=("sites",),
    reading=(
        "Each cell compares two layers over the same images: 1 is the same representation up to "
        "rotation and scale, 0 is none of it shared. Off the diagonal, a uniform square means "
        "that layers hardly change what they represent (typical of ViTs); blocks along the "
        "diagonal are stages (typical of CNNs)."
    ),
    source=(
        "Kornblith et al. 2019; Raghu et al. 2021, Figs. 1, 2, 8, 12; Walmer et al. 2023, Figs. "
        "6, 19 to 23"
    ),
    columns=COLUMNS,
    meanings={"high": ""},
    metrics=("cka",),
    may_lack_values=True,
    run=run,
    plot=plot,
    headline=headline,
    of_arrays=cka_of_arrays,
)
