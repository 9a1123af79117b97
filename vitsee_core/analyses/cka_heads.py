"""Heads and CNNs: do local heads see like a CNN, or global ones?

The heads of one block are ordered by mean attention distance. The outputs of some of them (before
the projection, all tokens, concatenated) are one representation, compared by CKA with the lower
sites of another store, against the heads' mean distance (Raghu et al. 2021, Fig. 5). The paper does
not say how heads are grouped; here in windows of neighbours in that order, a third of the heads
each, shifted by one head at a time, or cumulatively, the k most local heads.

The Gram matrix of concatenated features is the sum of the heads' Gram matrices and HSIC is
bilinear, so that every group's value, and every replicate behind its spread, is a sum over heads:

    HSIC(G, L) = sum_{h in G} HSIC(h, L)    HSIC(G, G) = sum_{h, h' in G} HSIC(h, h')
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.attention.head_maps import chosen_blocks
from vitsee_core.attention.heads import StoredAttention, read_heads
from vitsee_core.declaration import Analysis
from vitsee_core.figures.heatmaps import COLOUR_MAP, describe_scale, describe_scope
from vitsee_core.figures.panels import legend_below, panels
from vitsee_core.figures.plotting import marker, styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import SIMILARITY, Offers, Option
from vitsee_core.runtime.progress import counting
from vitsee_core.similarity import GramOptions, Hsic, Representation, hsic, summarise
from vitsee_core.similarity import options as pairwise
from vitsee_core.similarity.hsic_sums import without_value
from vitsee_core.similarity.options import PRESETS, choose_estimator
from vitsee_core.statistics.moments import SlabMoments
from vitsee_core.tables.columns import PAIR, VALUES, pair_columns
from vitsee_core.tables.headlines import Answer, measured, number, picked
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import block_words, site_words
from vitsee_core.types import pl
from vitsee_stores import Store, require_paired
from vitsee_stores.errors import MissingInput, VitseeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


log = logging.getLogger(__name__)

COLUMNS = (*PAIR, "heads", "distance_px", *VALUES, "n_images")
ARROW = "\N{RIGHTWARDS ARROW}"
LEGEND_ENTRIES = 10


@analysis
def run(
    *stores: Store,
    block: Annotated[
        str | None,
        Option(
            "The block of the first store whose heads are compared: blocks.0, blocks.-1.",
            metavar="BLOCK",
            default="the first with attention",
        ),
    ] = None,
    window: Annotated[
        int | None,
        Option(
            "Heads in a group: W neighbours in the order of distance.",
            metavar="W",
            least=1,
            default="a third of the heads",
        ),
    ] = None,
    cumulative: Annotated[
        bool,
        Option("Groups of the k most local heads, k from 1 to all.  [default: windows]"),
    ] = False,
    sites_b: Annotated[
        Sequence[str],
        pairwise.side("the second store", "its blocks in the lower half by depth"),
    ] = (),
    estimator: Annotated[str | None, pairwise.ESTIMATOR] = None,
    batch: Annotated[int | None, pairwise.BATCH] = None,
    examples: Annotated[int | None, pairwise.EXAMPLES] = None,
    repeats: Annotated[int | None, pairwise.REPEATS] = None,
    preset: Annotated[str | None, pairwise.preset("raghu")] = None,
    cache: Annotated[Path | None, pairwise.CACHE] = None,
    no_cache: Annotated[bool, pairwise.NO_CACHE] = False,
    precision: Annotated[str, pairwise.PRECISION] = "fp32",
    execution: Annotated[
        Execution, Offers("images seed device memory", dask="Gram matrices and slabs")
    ] = DEFAULT,
) -> Table:
    """One row per group of heads and site of the second store, from the most local group on.

    Columns: see `COLUMNS`; `heads` their numbers from the most local on, "3 0 5"; `distance_px`
    their mean attention distance in pixels; the rest as in `cka.run`. The images behind both are
    those that can be read in both stores.

    Args:
        stores: the one with heads, and the one they are compared with.

    Raises:
        StoreMismatch: the stores do not have the same images in the same order.
        MissingInput: the first store lacks attention summaries or the heads' outputs.
        SiteError: no such block or site.
        VitseeError: not two stores, choices that do not go together, too few images.
    """
    if len(stores) != 2:
        raise VitseeError(
            f"cka-heads compares the heads of one store with the sites of another; expected two "
            f"stores, got {len(stores)}"
        )
    a, b = stores
    chosen, *others = chosen_blocks(a, ("blocks",) if block is None else (block,))
    if block is not None and others:
        raise VitseeError(
            f"--block {block} chooses {1 + len(others)} blocks; expected one"
        )
    heads = _heads(a, chosen)
    distances = _distances(a, b, chosen, execution)
    groups = _groups(distances, window, cumulative)
    sites = (
        b.select(sites_b)
        if sites_b
        else [site for site in b.select("blocks") if site.rel_depth <= 0.5]
    )
    how = choose_estimator(
        stores,
        preset,
        estimator,
        batch=batch,
        examples=examples,
        repeats=repeats,
        images=execution.images,
        seed=execution.seed,
    )
    h = hsic(
        heads,
        [*heads, *(Representation(b, site) for site in sites)],
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
        progress=execution.progress,
    )
    size = len(groups[0])
    of_size = "single heads" if size == 1 else f"windows of {size} heads"
    members = np.zeros((len(groups), len(heads)))
    for row, group in zip(members, groups, strict=True):
        row[group] = 1
    grouped = over_groups(h, members)
    similarity = summarise(grouped)
    remarks = [
        *without_value(
            [f"heads {' '.join(map(str, group))}" for group in groups], grouped.rows
        ),
        *without_value([f"{b.label} {site.name}" for site in sites], grouped.cols),
    ]
    for remark in remarks:
        log.warning("%s", remark)
    notes = {
        **h.notes,
        "groups": "the most local heads, one more each time" if cumulative else of_size,
        **({"preset": f"{preset}: {PRESETS[preset].source}"} if preset else {}),
        "head_distances_px": distances.tolist(),
        "remarks": remarks,
    }
    rows = [
        {
            **pair_columns((a, heads[0].site), (b, site)),
            "heads": " ".join(map(str, group)),
            "distance_px": float(distances[group].mean()),
            "metric": "cka",
            "value": float(similarity.cka[i, j]),
            **{
                name: float(getattr(similarity, name)[i, j])
                for name in ("std", "low", "high")
            },
            "spread": h.spread,
            "n_images": h.n_images,
            WORD: None if similarity.without is None else similarity.without[:, i, j],
        }
        for i, group in enumerate(groups)
        for j, site in enumerate(sites)
    ]
    return Table.from_rows(rows, COLUMNS, notes)


def _heads(store: Store, block: StoredAttention) -> list[Representation]:
    """The outputs of each head. Channels are heads x head dim.

    Raises:
        MissingInput: they are not stored, or pooled only.
        VitseeError: the heads' outputs are not of one size.
    """
    name = f"{block.site}.attn.heads"
    try:
        site = store.site(name)
        store.acts(name)
    except MissingInput:
        raise MissingInput(
            f"{store.label} does not keep the outputs of the heads of {block.site}; run: vitsee "
            f"extract MODEL --sites blocks --sites {name} ..."
        ) from None
    width, rest = divmod(site.dim, block.n_heads)
    if rest:
        raise VitseeError(
            f"{store.label}: {name} has {site.dim} channels for {block.n_heads} heads"
        )
    slices = [slice(h * width, (h + 1) * width) for h in range(block.n_heads)]
    return [Representation(store, site, channels=part) for part in slices]


def _distances(
    a: Store, b: Store, block: StoredAttention, execution: Execution
) -> NDArray[Any]:
    """(heads,) mean attention distance in pixels over the images of the comparison."""
    rows = execution.rows(a)
    rows = replace(rows, mask=rows.mask & require_paired(a, b))
    stored = ("distance_px", block.group)
    make = partial(SlabMoments, partial(read_heads, (stored,)))
    with counting(execution.progress, rows.n):
        summaries = execution.fold(a, make, rows).result()
    summary = summaries[stored]
    return summary.mean[block.row, : block.n_heads]


def _groups(
    distances: NDArray[Any], window: int | None, cumulative: bool
) -> list[NDArray[np.int64]]:
    """Indices of the heads in each group, from the most local on."""
    n = len(distances)
    if cumulative and window is not None:
        raise VitseeError("--window and --cumulative exclude each other")
    if window is not None and not 1 <= window <= n:
        raise VitseeError(f"--window is {window}; the block has {n} heads")
    order = np.argsort(distances, kind="stable")
    if cumulative:
        return [order[: k + 1] for k in range(n)]
    size = window or max(1, n // 3)
    return [order[k : k + size] for k in range(n - size + 1)]


def over_groups(h: Hsic, members: NDArray[np.float64]) -> Hsic:
    """HSIC of groups of heads with sites, from that of the heads.

    Args:
        h: rows are the H heads; cols the heads again, then the sites.
        members: (groups, H) 1 if a head is in a group, else 0.
    """
    n = members.shape[1]
    own = ((members @ h.cross[..., :n]) * members).sum(-1)
    return replace(
        h,
        cross=members @ h.cross[..., n:],
        rows=own,
        cols=h.cols[..., n:],
        replicates=None if h.replicates is None else over_groups(h.replicates, members),
    )


@styled
def plot(table: Table) -> Figure:
    """CKA against the groups' mean distance, one curve per site of the second store, dark to bright
    with depth; for up to ten sites the 95 % interval, or the estimator's noise, as bars.
    """
    import matplotlib
    from matplotlib.lines import Line2D

    figure, (axes,) = panels(1, widest=48, height=20)
    by_site = table.frame.partition_by("site_b", maintain_order=True)
    sites = [str(rows["site_b"][0]) for rows in by_site]
    colours = matplotlib.colormaps[COLOUR_MAP]
    places = np.linspace(0.1, 0.82, len(sites)) if len(sites) > 1 else [0.4]
    spread = len(sites) <= LEGEND_ENTRIES  # of more curves it would hide the others
    for i, (place, rows) in enumerate(zip(places, by_site, strict=True)):
        _draw_curve(axes, rows, colours(place), marker(i), spread)
    shown = sites[:: -(-len(sites) // LEGEND_ENTRIES)]
    first = {name: str(table[name][0]) for name in ("store_a", "block_a", "store_b")}
    handles = {
        f"{shorten(first['store_b'], 20)}, {site_words(sites[i])}": Line2D(
            [], [], color=colours(places[i]), marker=marker(i) if spread else "o"
        )
        for i in map(sites.index, shown)
    }
    legend_below(figure, handles)
    heads = f"{shorten(first['store_a'], 22)}, {block_words(first['block_a'])}"
    axes.set_xlabel(f"mean attention distance (px), local {ARROW} global\n{heads}")
    axes.set_ylabel(describe_scale(table))
    spread_words = ""
    if np.isfinite(table["low"]).any():
        spread_words = "; bars: 95 % interval over images"
    elif np.isfinite(table["std"]).any():
        spread_words = "; bars: std over minibatch repeats"
    axes.set_title(
        f"{table.notes.get('groups', 'heads')}, {describe_scope(table)}"
        + (spread_words if spread else "")
    )
    axes.set_ylim(min(0.0, axes.dataLim.y0), 1.05 * axes.dataLim.y1)
    return figure


def _draw_curve(
    axes: Axes, rows: pl.DataFrame, shade: Any, symbol: str, spread: bool
) -> None:
    names = ("distance_px", "value", "std", "low", "high")
    x, y, std, low, high = (
        rows.sort("distance_px", maintain_order=True).select(names).to_numpy().T
    )
    if not spread:
        axes.plot(x, y, color=shade, linewidth=0.9, marker="o", markersize=1.5)
        return
    # What is measured are the groups of heads: bars there, and a thin line to guide the eye.
    if np.isfinite(low).any():
        bars = np.stack([y - low, high - y])
        axes.errorbar(x, y, bars, color=shade, fmt="none", capsize=2.5, linewidth=0.9)
    elif np.isfinite(std).any():
        axes.errorbar(x, y, std, color=shade, fmt="none", capsize=2.5, linewidth=0.9)
    axes.plot(x, y, color=shade, linewidth=0.7, marker=symbol, markersize=4)


def headline(table: Table) -> list[Answer]:
    """The most local and the most global group of heads, with the other model's lowest site."""
    found = []
    pairs = picked(table, metric="cka").partition_by(
        "store_a", "store_b", maintain_order=True, as_dict=True
    )
    for (store_a, store_b), own in pairs.items():
        rows = own.filter(site_b=own["site_b"][0]).sort(
            "distance_px", maintain_order=True
        )
        near, far = (
            f"{measured(rows, i)} for heads at {number(float(rows['distance_px'][i]))} px"
            for i in (0, -1)
        )
        text = f"CKA with {rows['site_b'][0]} {near}, {far}"
        found.append((f"{store_a} and {store_b}", text))
    return found


ANALYSIS = Analysis(
    module=__name__,
    question=SIMILARITY,
    help="""
    Compare local and global heads with another model.

    The heads of the first block, from those that look at their neighbourhood to those that look
    everywhere (by mean attention distance), in groups: CKA between the outputs of a group's heads
    and the lower sites of a second store, usually a CNN, against the group's mean distance (Raghu
    et al. 2021, Fig. 5). One row per group and site.

      $ vitsee extract MODEL --sites blocks --sites blocks.0.attn.heads -o b16.zarr ...
      $ vitsee cka-heads b16.zarr r50.zarr -o heads.csv --png heads.png
      $ vitsee cka-heads b16.zarr r50.zarr --sites-b 'layer1.*.out' --window 2
      $ vitsee cka-heads b16.zarr r50.zarr --cumulative --png cumulative.png > cumulative.csv
    """,
    needs=("attention", "heads"),
    reading=(
        "Each point is a group of heads of one block: how far they attend, and how similar "
        "their output is to the lowest layers of the other model. If similarity falls with "
        "distance, the local heads are the ones that see as a CNN does."
    ),
    source="Raghu et al. 2021, Fig. 5",
    columns=COLUMNS,
    meanings={"heads": "from the most local on", "distance_px": "their mean", "high": ""},
    metrics=("cka",),
    run=run,
    plot=plot,
    headline=headline,
)
