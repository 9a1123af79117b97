"""Similarity of representations: linear CKA between sites of one model, two, or many.

Two sites are compared over the same images. An image is an example, its features are all chosen
tokens' channels, flattened; tokens are never examples:

    K = X X^T, L = Y Y^T    CKA = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L))

with the unbiased HSIC_1 over all images, over minibatches, or the biased one; see
`similarity.hsic` for the formulas. Debiased CKA may lie a little below 0 or above 1: that is noise
about a true value near the limit, and is not clipped.

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
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.arguments import analysis
from vitsee_core.columns import PAIR, VALUES, pair_columns
from vitsee_core.execution import DEFAULT, Execution
from vitsee_core.figures.heatmaps import (
    MOST_LABELS,
    Panel,
    describe_scale,
    describe_scope,
    draw_heatmaps,
)
from vitsee_core.figures.site_axes import SiteAxis
from vitsee_core.plotting import GREY, colour, marker, new_figure, shorten, styled
from vitsee_core.replicates import WORD
from vitsee_core.results import Table
from vitsee_core.similarity import GramOptions, Representation, hsic, summarise
from vitsee_core.similarity.hsic import without_value
from vitsee_core.similarity.pairs import SitePairs, choose_pairs
from vitsee_core.similarity.presets import PRESETS, choose_estimator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_stores import Store

log = logging.getLogger(__name__)

NEEDS = ("sites",)
COLUMNS = (*PAIR, *VALUES, "n_images")
NUMBERS = {"value": "cka", "std": "std", "low": "low", "high": "high"}
MOST_NUMBERS = 16  # cells of a single row or column that have room for their numbers
# Titles of panels, by the part of a block that their columns are.
SUBLAYERS = {
    "attn.branch": "attention",
    "mlp.branch": "MLP",
    "token.branch": "token mixing",
    "channel.branch": "channel mixing",
    "branch": "block",
}


@analysis
def run(
    *stores: Store,
    sites: Sequence[str] = (),
    sites_a: Sequence[str] = (),
    sites_b: Sequence[str] = (),
    tokens: str = "all",
    pairs: str = "all",
    pair_by: str = "image",
    estimator: str | None = None,
    batch: int | None = None,
    examples: int | None = None,
    repeats: int | None = None,
    preset: str | None = None,
    cache: Path | None = None,
    no_cache: bool = False,
    execution: Execution = DEFAULT,
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
        sites: selectors, by default `blocks` or what the preset compares.
        sites_a: of the rows, in place of `sites`.
        sites_b: of the columns, in place of `sites`.
        tokens: the tokens whose channels are an image's features; see `Representation`.
        pairs: "all", "same-depth" or "branch".
        pair_by: "image", or "id" for other pictures of the same ids; see `paired_rows`.
        estimator: "exact", "minibatch" or "biased"; None: by the number of images.
        batch: images per minibatch.
        examples: images per repeat.
        repeats: how often they are drawn.
        preset: "raghu", "walmer" or "vit_analysis".
        cache: folder for Gram matrices; by default beside each store.
        no_cache: keep none.
        execution: which images, and what the work may use; see `Execution`.

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
        None if side is None else [Representation(store, site, tokens) for store, site in side]
        for side in (chosen.rows, chosen.cols)
    )
    h = hsic(
        rows or [],
        cols,
        estimator=how,
        images=execution.images,
        seed=execution.seed,
        options=GramOptions(cache, not no_cache, execution.device, execution.memory),
        pair_by=pair_by,
        progress=execution.progress,
    )
    sides = [(chosen.rows, h.rows), *([] if chosen.cols is None else [(chosen.cols, h.cols)])]
    remarks = [
        remark
        for side, own in sides
        for remark in without_value([f"{store.label} {site.name}" for store, site in side], own)
    ]
    for remark in remarks:
        log.warning("%s", remark)
    any_tokens = any(site.kind != "vector" for _, site in (*chosen.rows, *(chosen.cols or ())))
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
    numbers = {column: getattr(similarity, name)[at].tolist() for column, name in NUMBERS.items()}
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


def _site_notes(chosen: SitePairs) -> dict[str, Any]:
    """The compared sites of both sides, by store."""
    sides = {"a": chosen.rows, "b": chosen.cols or chosen.rows}
    notes: dict[str, Any] = {"sites_a": {}, "sites_b": {}}
    for letter, side in sides.items():
        for store, site in side:
            notes[f"sites_{letter}"].setdefault(store.label, []).append(site.name)
    return notes


def _blocks(table: Table) -> dict[str, str]:
    """Site -> the path of its block, of those that lie in one."""
    found: dict[str, str] = {}
    for side in "ab":
        found |= zip(table[f"site_{side}"].tolist(), table[f"block_{side}"].tolist(), strict=True)
    return {site: block for site, block in found.items() if block}


@styled
def plot(table: Table) -> Figure:
    """The table as heatmaps, or as lines where each site has one partner.

    Heatmaps: rows upwards, columns to the right, from input to output; one panel for each kind of
    sublayer where skips are compared with branches; numbers in the cells where models are compared
    by one site each. Lines: over the sites in order, one for each store that the first is compared
    with, with the 95 % interval as a band or the estimator's noise as bars.
    """
    a, b = _cells(table, "a"), _cells(table, "b")
    if _one_to_one(table):
        return _draw_lines(table)
    partners: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for row, col in zip(a, b, strict=True):
        partners.setdefault(row, []).append(col)
    values = dict(zip(zip(a, b, strict=True), table["value"].tolist(), strict=True))
    about = describe_scope(table)
    panels = []
    # Rows with the same partners are one panel.
    for cols in dict.fromkeys(map(tuple, partners.values())):
        rows = [row for row, others in partners.items() if tuple(others) == cols]
        panels.append(_panel(table, rows, cols, values, about))
    return draw_heatmaps(panels, describe_scale(table))


def _panel(
    table: Table,
    rows: Sequence[tuple[str, str]],
    cols: Sequence[tuple[str, str]],
    values: dict[Any, float],
    about: str,
) -> Panel:
    blocks = _blocks(table)
    branch = table.notes.get("pairs") == "branch"
    roles = ("skip", "branch") if branch else ("", "")
    title = about
    if branch:
        site = cols[0][1]
        part = site.removeprefix(f"{blocks.get(site, '')}.")
        title = f"{SUBLAYERS.get(part, part)}: {about}"
    return Panel(
        np.array([[values[row, col] for col in cols] for row in rows], np.float64),
        SiteAxis.of(rows, blocks, roles[0]),
        SiteAxis.of(cols, blocks, roles[1]),
        title,
        numbers=max(len(rows), len(cols)) == 1
        or (min(len(rows), len(cols)) == 1 and max(len(rows), len(cols)) <= MOST_NUMBERS)
        or len({store for store, _ in rows}) > 1,
    )


def _cells(table: Table, side: str) -> list[tuple[str, str]]:
    """(store, site) of one side of every row."""
    names = (table[f"{name}_{side}"].tolist() for name in ("store", "site"))
    return list(zip(*names, strict=True))


def _one_to_one(table: Table) -> bool:
    """Whether, between two stores, each of several sites has one partner of its own."""
    if table.notes.get("pairs") == "branch":
        return False
    a, b = _cells(table, "a"), _cells(table, "b")
    of_a = {(cell, store) for cell, (store, _) in zip(a, b, strict=True)}
    of_b = {(store, cell) for (store, _), cell in zip(a, b, strict=True)}
    stores = {(one, other) for (one, _), (other, _) in zip(a, b, strict=True)}
    return len(of_a) == len(of_b) == len(table) > len(stores)


def _draw_lines(table: Table) -> Figure:
    """One curve per pair of stores over the first store's sites."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    blocks = _blocks(table)
    first = list(dict.fromkeys(_cells(table, "a")))
    places = {cell: k for k, cell in enumerate(first)}
    figure = new_figure(5.6, 3.8)
    axes = figure.add_subplot()
    handles: list[Any] = []
    for i, (store, rows) in enumerate(table.groups("store_b")):
        x = [places[cell] for cell in _cells(rows, "a")]
        text = f"against {shorten(store, 28)}"
        if rows["site_a"].tolist() != rows["site_b"].tolist():
            others = SiteAxis.of([(store, site) for site in rows["site_b"].tolist()], blocks)
            text = f"against {others.ticks(len(others)).label}"
        if np.isfinite(rows["low"]).any():
            axes.fill_between(x, rows["low"], rows["high"], color=colour(i), alpha=0.2, linewidth=0)
        elif np.isfinite(rows["std"]).any():
            axes.errorbar(x, rows["value"], rows["std"], color=colour(i), fmt="none", capsize=2)
        handles += axes.plot(x, rows["value"], color=colour(i), marker=marker(i), label=text)
    if np.isfinite(table["low"]).any():
        handles.append(Patch(color=GREY, alpha=0.3, linewidth=0, label="95 % interval over images"))
    elif np.isfinite(table["std"]).any():
        label = "std over minibatch repeats (the estimator's noise)"
        handles.append(Line2D([], [], color=GREY, marker="|", linestyle="none", label=label))
    SiteAxis.of(first, blocks).ticks(MOST_LABELS).put_on(axes.xaxis, 4.6 / len(first))
    axes.set_ylabel(describe_scale(table))
    axes.set_title(describe_scope(table))
    axes.set_ylim(min(0, axes.dataLim.y0), max(1.02, axes.dataLim.y1))
    longest = max(len(handle.get_label()) for handle in handles)
    columns = max(1, min(len(handles), 72 // (longest + 6)))
    figure.legend(handles=handles, loc="outside lower left", ncols=columns)
    return figure
