"""Linear CKA: how alike are the layers?

Two sites are compared over the same images. An image is an example, its features are all chosen
tokens' channels, flattened; tokens are never examples:

    K = X X^T, L = Y Y^T    CKA = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L))

with the unbiased HSIC_1 over all images or over minibatches, or the biased HSIC_0
(`similarity.hsic_sums` has the formulas). Debiased CKA may lie a little below 0 or above 1: that is
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
from vitsee_core.similarity.pairs import Side, choose_pairs
from vitsee_core.statistics.image_statistics import block_labels
from vitsee_core.statistics.jackknife import interval, standard_error
from vitsee_core.tables.columns import PAIR, REPLICATES, VALUES, pair_columns
from vitsee_core.tables.headlines import Answer, alike
from vitsee_core.tables.results import Table
from vitsee_core.types import Float
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


log = logging.getLogger(__name__)

COLUMNS = (*PAIR, *VALUES, "n_images")
FEW_IMAGES = 10  # below, CKA of independent representations is often far from 0
MIN_IMAGES = 4  # unbiased HSIC divides by n - 3


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
    """Return the CKA of each pair of sites and its spread, one row per pair.

    The columns are `COLUMNS`. `metric` is `cka`; its value is NaN where a self-HSIC is not positive
    (constant features); debiased values near the limits may exceed 0 and 1. `spread` says what
    `std` is: "jackknife" and "slabs", the standard error over images, with `low` and `high` as the
    95 % interval; "repeats", the standard deviation over minibatch repeats, which is the
    estimator's own noise and has no interval; "" if there is none. One store's sites among
    themselves fill the full square, (i, j) and (j, i).

    Args:
        stores: stores that hold the same images in the same order, or (`pair_by`) images of the
            same ids. One, two, or more of them are compared in the ways that `choose_pairs` lists.

    Raises:
        StoreMismatch: the stores do not have the same images in the same order.
        MissingInput: a store lacks a site or its tokens.
        SiteError: a selector that nothing matches, or tokens that a site lacks.
        VitseeError: choices that do not go together, too few images, disk or memory.

    Examples:
        >>> import vitsee
        >>> table = vitsee.cka("vit.zarr", "resnet.zarr", sites="last")
        >>> table["site_a"].item(), table["site_b"].item(), round(table["value"].item(), 2)
        ('blocks.5.out', 'layer4.1.out', 0.71)
        >>> len(vitsee.cka("vit.zarr", sites="blocks"))  # embedding and six blocks: 7 x 7 pairs
        49
        >>> vit = vitsee.open_store("vit.zarr")
        >>> values = vitsee.cka(vit.pooled("blocks.4.out")[:], vit.pooled("blocks.5.out")[:])
        >>> len(values)
        1
    """
    # A paper's sites, unless other sites or pairs were named.
    if preset in PRESETS and pairs == "all":
        sites = sites or PRESETS[preset].sites
    chosen = choose_pairs(stores, sites, sites_a, sites_b, pairs)
    chosen_estimator = choose_estimator(
        stores,
        preset=preset,
        kind=estimator,
        batch=batch,
        examples=examples,
        repeats=repeats,
        images=execution.images,
        seed=execution.seed,
        pair_by=pair_by,
    )
    row_representations = _representations(chosen.rows, tokens)
    # None: one store's sites among themselves.
    col_representations = None
    if chosen.cols is not None:
        col_representations = _representations(chosen.cols, tokens)
    h = hsic(
        row_representations,
        col_representations,
        estimator=chosen_estimator,
        images=execution.images,
        seed=execution.seed,
        options=GramOptions(
            cache=cache,
            use_cache=not no_cache,
            device=execution.device,
            memory=execution.memory,
            map=execution.map,
            precision=precision,
        ),
        pair_by=pair_by,
        progress=execution.progress,
    )
    # Sites whose CKA is NaN, and too few images: said beside the table, not instead of it.
    remarks = without_value(_side_labels(chosen.rows), h.rows)
    if chosen.cols is not None:
        remarks += without_value(_side_labels(chosen.cols), h.cols)
    remarks += remarks_on_few_images(h.n_images)
    for remark in remarks:
        log.warning("%s", remark)

    col_sites = chosen.rows if chosen.cols is None else chosen.cols
    compared_sites = [*chosen.rows, *col_sites]
    any_tokens = any(site.kind != "vector" for _, site in compared_sites)
    notes = dict(h.notes)
    if preset:
        notes["preset"] = f"{preset}: {PRESETS[preset].source}"
    if chosen_estimator.rescale:
        notes["rescaled"] = True
    notes["pairs"] = pairs
    # Vectors have no tokens to choose from.
    notes["tokens"] = tokens if any_tokens else "vectors"
    notes.update(_site_notes(chosen.rows, col_sites))
    notes["remarks"] = remarks

    similarity = summarise(h)
    rows: list[dict[str, Any]] = []
    for i, j in chosen.index_pairs:
        row = pair_columns(chosen.rows[i], col_sites[j])
        row["metric"] = "cka"
        row.update(similarity.cells(i, j))
        row["spread"] = h.spread
        row["n_images"] = h.n_images
        row[REPLICATES] = similarity.replicates_of(i, j)
        rows.append(row)
    return Table.from_rows(rows, COLUMNS, notes)


def _representations(side: Sequence[Side], tokens: str) -> list[Representation]:
    """Return the chosen tokens of each site of one side as a representation."""
    return [Representation(store, site, tokens) for store, site in side]


def _side_labels(side: Sequence[Side]) -> list[str]:
    """Return the words that name each site of one side in a remark: store and site."""
    return [f"{store.label} {site.name}" for store, site in side]


def remarks_on_few_images(n: int) -> list[str]:
    """Return a remark if `n` images are so few that their CKA is mostly noise, else none."""
    if n >= FEW_IMAGES:
        return []
    # Of 4 images without one, unbiased HSIC does not exist: there is no jackknife.
    no_interval = ", and has no interval" if n == MIN_IMAGES else ""
    return [
        f"CKA of {n} images is mostly noise{no_interval}: unbiased HSIC divides by n (n "
        "- 3), and representations that share nothing may reach 1; give more --images"
    ]


def _site_notes(side_a: Sequence[Side], side_b: Sequence[Side]) -> dict[str, Any]:
    """Return the sidecar's notes on the compared sites: for each side, store -> its sites."""
    sites_a: dict[str, list[str]] = {}
    for store, site in side_a:
        sites_a.setdefault(store.label, []).append(site.name)
    sites_b: dict[str, list[str]] = {}
    for store, site in side_b:
        sites_b.setdefault(store.label, []).append(site.name)
    return {"sites_a": sites_a, "sites_b": sites_b}


@styled
def plot(table: Table) -> Figure:
    """Draw the table as heatmaps, or as curves where each site has one partner.

    Heatmaps have the rows' sites upwards and the columns' sites to the right, both from input to
    output. Skips against branches get a panel for each kind of sublayer; models that are compared
    by one site each get numbers in the cells. Curves run over the sites in order, one for each
    store that the first is compared with; bands are 95 % intervals, bars the estimator's noise.
    """
    # Where each site has one partner, a matrix would be a diagonal.
    if not one_to_one(table):
        return draw_heatmaps(panels_of(table), describe_scale(table))
    figure, (axes,) = panels(1, widest=48, height=18)
    handles = draw_curves(axes, table.frame)
    axes.set_ylabel(describe_scale(table))
    axes.set_title(describe_scope(table))
    # From 0, or from below where a debiased CKA is negative.
    axes.set_ylim(min(0, axes.dataLim.y0), 1.05 * axes.dataLim.y1)
    legend_below(figure, handles)
    return figure


def headline(table: Table) -> list[Answer]:
    """Return per store how alike its layers are; for two stores, their most similar layers.

    Per store it is the CKA of its lowest layers among themselves, of its highest layers, and of
    the first layer with the last.
    """
    return alike(table, "cka")


def cka_of_arrays(a: ArrayLike, b: ArrayLike) -> Table:
    """Return the debiased linear CKA of two arrays of features of the same images, one row.

    It is what `vitsee cka` gives for two sites of stores, with the 95 % interval of a
    delete-a-block jackknife over images.

    Args:
        a: (images, ...), flattened to (images, features).
        b: the same images in the same order; its number of features may differ.

    Raises:
        VitseeError: different numbers of images, fewer than `MIN_IMAGES`, or numbers that are not
            finite.
    """
    gram_a = _hollow_gram(_flat_features(a, "first"))
    gram_b = _hollow_gram(_flat_features(b, "second"))
    n = len(gram_a)
    if len(gram_b) != n or n < MIN_IMAGES:
        raise VitseeError(
            f"the arrays have {n} and {len(gram_b)} images; expected the same ones, at "
            f"least {MIN_IMAGES}"
        )
    value = _cka_of_grams(gram_a, gram_b)
    labels = block_labels(n, None)
    without = np.full(labels.max() + 1, np.nan)  # CKA without each block of images
    for block in range(len(without)):
        # The Gram matrix of the remaining images is a part of that of all. It is centred by the
        # mean of all, on which unbiased HSIC does not depend.
        remaining = np.flatnonzero(labels != block)
        if len(remaining) >= MIN_IMAGES:
            pairs = np.ix_(remaining, remaining)
            without[block] = _cka_of_grams(gram_a[pairs], gram_b[pairs])
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
    notes["remarks"] = remarks_on_few_images(n)
    return Table.from_rows([row], columns, notes)


def _flat_features(features: ArrayLike, name: str) -> Float:
    """Return the features as float64, (images, features).

    Args:
        features: (images, ...), numbers.
        name: which array an error is about, "first" or "second".

    Raises:
        VitseeError: an array of fewer than two axes, not of numbers, or with NaN or infinity.
    """
    values: NDArray[Any] = np.asarray(features)
    if values.ndim < 2 or values.dtype.kind not in "fiub":
        raise VitseeError(
            f"the {name} array is {values.dtype} of shape {values.shape}; expected "
            "numbers, (images, features) or (images, tokens, features)"
        )
    flat = values.reshape(len(values), -1).astype(np.float64)
    if not np.isfinite(flat).all():
        raise VitseeError(f"the {name} array has values that are not finite")
    return flat


def _hollow_gram(x: Float) -> Float:
    """Return the Gram matrix of centred features with its diagonal set to 0, (images, images).

    CKA depends neither on the features' scale nor on their mean.
    """
    largest = float(np.abs(x).max(initial=0))
    if largest > 0:
        # HSIC has the features' fourth power, which overflows or underflows far from 1. A power
        # of two rounds nothing.
        _, exponent = np.frexp(largest)
        x = np.ldexp(x, -exponent)
    x = x - x.mean(0)
    gram: Float = x @ x.T  # (images, images)
    np.fill_diagonal(gram, 0.0)
    return gram


def _cka_of_grams(k: Float, m: Float) -> float:
    """Return the CKA of two hollow Gram matrices; NaN where a self-HSIC is not positive."""
    product = _unbiased_hsic(k, k) * _unbiased_hsic(m, m)
    if not product > 0:
        return float("nan")
    return _unbiased_hsic(k, m) / product**0.5


def _unbiased_hsic(k: Float, m: Float) -> float:
    """Return HSIC_1 (Song et al. 2012, Eq. 5) of two hollow Gram matrices, (images, images)."""
    n = len(k)
    elementwise = (k * m).sum()  # tr(K M)
    totals = k.sum() * m.sum() / ((n - 1) * (n - 2))  # 1' K 1 1' M 1
    row_sums = 2 * (k.sum(1) @ m.sum(1)) / (n - 2)  # 1' K M 1
    return float((elementwise + totals - row_sums) / (n * (n - 3)))


ANALYSIS = Analysis(
    module=__name__,
    question=SIMILARITY,
    help="""
    Compare representations by linear CKA.

    One store: all its sites with each other (Raghu et al. 2021, Fig. 1; Walmer et al.
    2023, Figs. 20 to 22). Two: the first one's sites (rows) with the second one's
    (columns; Raghu Fig. 2). Three and more: one site of each, model by model (Walmer Fig.
    6). An image is an example, all tokens' channels are its features; --tokens takes
    fewer. The stores must hold the same images in the same order, or images of the same
    names with --pair-by id.

      $ vitsee cka b16.zarr -o b16.csv --png b16.png
      $ vitsee cka b16.zarr r50.zarr --png cross.png > cross.csv
      $ vitsee cka b16.zarr --sites norms --sites hidden --sites blocks --png fig1.png > fig1.csv
      $ vitsee cka fs=a.zarr dino=b.zarr mae=c.zarr --sites blocks.-1.out --tokens cls
      $ vitsee cka full.zarr 10pc.zarr 3pc.zarr --pairs same-depth --png fig12.png > fig12.csv
      $ vitsee cka clean.zarr blurred.zarr --pair-by id --pairs same-depth > blur.csv
      $ vitsee cka b16.zarr --pairs branch --png fig23.png > fig23.csv

    Debiased (HSIC_1) over all images where there are at most 16384, with a jackknife's
    standard error and 95 % interval; otherwise over minibatches, whose spread is the
    estimator's own noise. Gram matrices are cached beside each store and reused.
    """,
    needs=("sites",),
    reading=(
        "Each cell compares two layers over the same images: 1 is the same "
        "representation up to rotation and scale, 0 is none of it shared. Off the "
        "diagonal, a uniform square means that layers hardly change what they represent "
        "(typical of ViTs); blocks along the diagonal are stages (typical of CNNs)."
    ),
    source=(
        "Kornblith et al. 2019; Raghu et al. 2021, Figs. 1, 2, 8, 12; Walmer et al. "
        "2023, Figs. 6, 19 to 23"
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
