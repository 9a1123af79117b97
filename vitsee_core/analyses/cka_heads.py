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
from vitsee_core.tables.columns import PAIR, REPLICATES, VALUES, pair_columns
from vitsee_core.tables.headlines import Answer, measured, number, picked
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

# `heads` are numbers with blanks between, from the most local head on.
COLUMNS = (*PAIR, "heads", "distance_px", *VALUES, "n_images")
ARROW = "\N{RIGHTWARDS ARROW}"
# More curves have neither bars nor a legend entry each.
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
    """Return the CKA of each group of heads with each site of the second store, a row per pair.

    Rows begin with the most local group. The columns are `COLUMNS`: `heads` has the group's heads
    from the most local on, "3 0 5", `distance_px` their mean attention distance in pixels, and the
    others are those of `vitsee cka`. CKA and distances are of the images that can be read in both
    stores.

    Args:
        stores: the store with heads, and the store they are compared with.

    Raises:
        StoreMismatch: the stores do not have the same images in the same order.
        MissingInput: the first store lacks attention summaries or the heads' outputs.
        SiteError: no such block or site.
        VitseeError: not two stores, choices that do not go together, too few images.

    Examples:
        >>> import vitsee
        >>> table = vitsee.cka_heads("heads.zarr", "resnet.zarr", sites_b="last")
        >>> len(table)  # four heads
        4
    """
    if len(stores) != 2:
        raise VitseeError(
            f"cka-heads compares the heads of one store with the sites of another; "
            f"expected two stores, got {len(stores)}"
        )
    a, b = stores
    heads_block = _block_with_heads(a, block)
    heads = _head_outputs(a, heads_block)
    # Distances order the heads, on the same images as their CKA.
    distances = _head_distances(a, b, heads_block, execution)
    groups = _groups_of_heads(distances, window, cumulative)
    if sites_b:
        sites = b.select(sites_b)
    else:
        # Fig. 5 of Raghu et al. compares with the early layers of a ResNet.
        sites = [site for site in b.select("blocks") if site.rel_depth <= 0.5]
    chosen_estimator = choose_estimator(
        stores,
        preset=preset,
        kind=estimator,
        batch=batch,
        examples=examples,
        repeats=repeats,
        images=execution.images,
        seed=execution.seed,
    )
    # Heads with heads, too: the self-HSIC of a group is a sum over pairs of its heads.
    h = hsic(
        heads,
        [*heads, *(Representation(b, site) for site in sites)],
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
        progress=execution.progress,
    )
    members = np.zeros((len(groups), len(heads)))  # 1 where a head is in a group
    for row, group in zip(members, groups, strict=True):
        row[group] = 1
    grouped = over_groups(h, members)
    # Summed before the division: the CKA of a group is not the mean of its heads' CKA.
    similarity = summarise(grouped)

    group_names = [" ".join(map(str, group)) for group in groups]
    remarks = without_value([f"heads {name}" for name in group_names], grouped.rows)
    remarks += without_value([f"{b.label} {site.name}" for site in sites], grouped.cols)
    for remark in remarks:
        log.warning("%s", remark)
    notes = dict(h.notes)
    notes["groups"] = _describe_groups(groups, cumulative)
    if preset:
        notes["preset"] = f"{preset}: {PRESETS[preset].source}"
    # (heads,) in the heads' own order: rows have the means of groups.
    notes["head_distances_px"] = distances.tolist()
    notes["remarks"] = remarks

    rows: list[dict[str, Any]] = []
    for i, group in enumerate(groups):
        for j, site in enumerate(sites):
            table_row = pair_columns((a, heads[0].site), (b, site))
            table_row["heads"] = group_names[i]
            table_row["distance_px"] = float(distances[group].mean())
            table_row["metric"] = "cka"
            table_row.update(similarity.cells(i, j))
            table_row["spread"] = h.spread
            table_row["n_images"] = h.n_images
            table_row[REPLICATES] = similarity.replicates_of(i, j)
            rows.append(table_row)
    return Table.from_rows(rows, COLUMNS, notes)


def _block_with_heads(store: Store, block: str | None) -> StoredAttention:
    """Return the block that `--block` chooses, by default the first with attention.

    Raises:
        MissingInput: the store has no attention summaries.
        SiteError: no such block.
        VitseeError: `--block` chooses several.
    """
    if block is None:
        return chosen_blocks(store, ("blocks",))[0]
    chosen = chosen_blocks(store, (block,))
    if len(chosen) > 1:
        raise VitseeError(f"--block {block} chooses {len(chosen)} blocks; expected one")
    return chosen[0]


def _head_outputs(store: Store, block: StoredAttention) -> list[Representation]:
    """Return the output of each head of a block as a representation, all tokens.

    Raises:
        MissingInput: the outputs are not stored, or only pooled.
        VitseeError: the channels do not divide evenly by the number of heads.
    """
    name = f"{block.site}.attn.heads"
    try:
        site = store.site(name)
        store.acts(name)
    except MissingInput:
        raise MissingInput(
            f"{store.label} does not keep the outputs of the heads of {block.site}; run: "
            f"vitsee extract MODEL --sites blocks --sites {name} ..."
        ) from None
    width, rest = divmod(site.dim, block.n_heads)
    if rest:
        raise VitseeError(
            f"{store.label}: {name} has {site.dim} channels for {block.n_heads} heads"
        )
    # Channels are heads by head dim: each head has a run of them.
    starts = range(0, site.dim, width)
    return [
        Representation(store, site, channels=slice(start, start + width))
        for start in starts
    ]


def _head_distances(
    a: Store, b: Store, block: StoredAttention, execution: Execution
) -> NDArray[Any]:
    """Return the mean attention distance of each head of a block, (heads,) in pixels.

    The means are over the images that can be read in both stores.

    Args:
        a: the store of the block.
        b: the store that it is compared with.
        block: the block.
        execution: images and parallel work.
    """
    rows = execution.rows(a)
    # Images that one store could not read are in no CKA.
    rows = replace(rows, mask=rows.mask & require_paired(a, b))
    stored = ("distance_px", block.group)
    make = partial(SlabMoments, partial(read_heads, (stored,)))
    with counting(execution.progress, rows.n):
        summaries = execution.fold(a, make, rows).result()
    summary = summaries[stored]
    return summary.mean[block.row, : block.n_heads]


def _groups_of_heads(
    distances: NDArray[Any], window: int | None, cumulative: bool
) -> list[NDArray[np.int64]]:
    """Return the heads' indices in each group, from the most local group on.

    Args:
        distances: (heads,) mean attention distance of each head.
        window: heads in a group; None: a third of them.
        cumulative: groups are the k most local heads, k from 1 to all.

    Raises:
        VitseeError: a window that the block does not have, or a window of cumulative groups.
    """
    n = len(distances)
    if cumulative and window is not None:
        raise VitseeError("--window and --cumulative exclude each other")
    if window is not None and not 1 <= window <= n:
        raise VitseeError(f"--window is {window}; the block has {n} heads")
    # Stable: heads of equal distance keep their order, on every machine.
    order = np.argsort(distances, kind="stable")
    if cumulative:
        return [order[: k + 1] for k in range(n)]
    size = window or max(1, n // 3)
    return [order[k : k + size] for k in range(n - size + 1)]


def _describe_groups(groups: Sequence[NDArray[np.int64]], cumulative: bool) -> str:
    """Return how heads are grouped, in words for the notes and the figure's title."""
    if cumulative:
        return "the most local heads, one more each time"
    size = len(groups[0])
    return "single heads" if size == 1 else f"windows of {size} heads"


def over_groups(h: Hsic, members: NDArray[np.float64]) -> Hsic:
    """Return the HSIC of groups of heads with sites, from the HSIC of single heads.

    Args:
        h: rows are the H heads; cols the heads again, then the sites.
        members: (groups, H) 1 if a head is in a group, else 0.
    """
    n_heads = members.shape[1]
    # (..., heads, heads), with leading axes for blocks of images or repeats
    between_heads = h.cross[..., :n_heads]
    # HSIC(G, G) = sum_{h, h' in G} HSIC(h, h')
    self_hsics = ((members @ between_heads) * members).sum(-1)
    # Sums over heads again, as HSIC without a block of images is bilinear, too.
    replicates = None
    if h.replicates is not None:
        replicates = over_groups(h.replicates, members)
    return replace(
        h,
        # HSIC(G, L) = sum_{h in G} HSIC(h, L)
        cross=members @ h.cross[..., n_heads:],
        rows=self_hsics,
        cols=h.cols[..., n_heads:],
        replicates=replicates,
    )


@styled
def plot(table: Table) -> Figure:
    """Draw CKA against the groups' mean distance, one curve per site of the second store.

    Curves are dark to bright with depth. Of up to ten sites bars show the 95 % interval, or the
    estimator's noise where it has no interval.
    """
    import matplotlib
    from matplotlib.lines import Line2D

    figure, (axes,) = panels(1, widest=48, height=20)
    by_site = table.frame.partition_by("site_b", maintain_order=True)
    sites = [str(rows["site_b"][0]) for rows in by_site]
    colours = matplotlib.colormaps[COLOUR_MAP]
    # Neither the darkest nor the brightest colours, which are hard to see.
    shades = np.linspace(0.1, 0.82, len(sites)) if len(sites) > 1 else [0.4]
    has_bars = len(sites) <= LEGEND_ENTRIES  # bars of more curves would hide the others
    for i, (shade, rows) in enumerate(zip(shades, by_site, strict=True)):
        _draw_site_curve(axes, rows, colours(shade), marker(i), has_bars)

    # Of many sites the legend names every so many.
    step = -(-len(sites) // LEGEND_ENTRIES)
    store_b = shorten(str(table["store_b"][0]), 20)
    handles: dict[str, Any] = {}
    for i in range(0, len(sites), step):
        symbol = marker(i) if has_bars else "o"
        handle = Line2D([], [], color=colours(shades[i]), marker=symbol)
        handles[f"{store_b}, {site_words(sites[i])}"] = handle
    legend_below(figure, handles)

    store_a = shorten(str(table["store_a"][0]), 22)
    heads = f"{store_a}, {block_words(str(table['block_a'][0]))}"
    axes.set_xlabel(f"mean attention distance (px), local {ARROW} global\n{heads}")
    axes.set_ylabel(describe_scale(table))
    title = f"{table.notes.get('groups', 'heads')}, {describe_scope(table)}"
    if has_bars and np.isfinite(table["low"]).any():
        title += "; bars: 95 % interval over images"
    elif has_bars and np.isfinite(table["std"]).any():
        title += "; bars: std over minibatch repeats"
    axes.set_title(title)
    # From 0, or from below where a debiased CKA is negative.
    axes.set_ylim(min(0.0, axes.dataLim.y0), 1.05 * axes.dataLim.y1)
    return figure


def _draw_site_curve(
    axes: Axes, rows: pl.DataFrame, shade: Any, symbol: str, has_bars: bool
) -> None:
    """Draw the curve of one site: CKA of each group of heads against its distance.

    Args:
        axes: where to draw.
        rows: the site's rows of the table.
        shade: the curve's colour.
        symbol: the curve's marker.
        has_bars: whether to show the spread.
    """
    names = ("distance_px", "value", "std", "low", "high")
    ordered = rows.sort("distance_px", maintain_order=True)
    x, y, std, low, high = ordered.select(names).to_numpy().T
    if not has_bars:
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
    """Return how alike local and global heads are to the other model's lowest site.

    For each pair of stores it is the CKA of the most local and of the most global group of heads.
    """
    answers = []
    pairs = picked(table, metric="cka").partition_by(
        "store_a", "store_b", maintain_order=True, as_dict=True
    )
    for (store_a, store_b), rows in pairs.items():
        # Sites are in the model's order.
        lowest_site = rows["site_b"][0]
        groups = rows.filter(site_b=lowest_site)
        groups = groups.sort("distance_px", maintain_order=True)
        local_heads = _measured_group(groups, 0)
        global_heads = _measured_group(groups, -1)
        text = f"CKA with {lowest_site} {local_heads}, {global_heads}"
        answers.append((f"{store_a} and {store_b}", text))
    return answers


def _measured_group(rows: pl.DataFrame, i: int) -> str:
    """Return the CKA of the group of heads in the i-th row, and its distance, in words."""
    distance = number(float(rows["distance_px"][i]))
    return f"{measured(rows, i)} for heads at {distance} px"


ANALYSIS = Analysis(
    module=__name__,
    question=SIMILARITY,
    help="""
    Compare local and global heads with another model.

    The heads of the first block, from those that look at their neighbourhood to those
    that look everywhere (by mean attention distance), in groups: CKA between the outputs
    of a group's heads and the lower sites of a second store, usually a CNN, against the
    group's mean distance (Raghu et al. 2021, Fig. 5). One row per group and site.

      $ vitsee extract MODEL --sites blocks --sites blocks.0.attn.heads -o b16.zarr ...
      $ vitsee cka-heads b16.zarr r50.zarr -o heads.csv --png heads.png
      $ vitsee cka-heads b16.zarr r50.zarr --sites-b 'layer1.*.out' --window 2
      $ vitsee cka-heads b16.zarr r50.zarr --cumulative --png cumulative.png > cumulative.csv
    """,
    needs=("attention", "heads"),
    reading=(
        "Each point is a group of heads of one block: how far they attend, and how "
        "similar their output is to the lowest layers of the other model. If similarity "
        "falls with distance, the local heads are the ones that see as a CNN does."
    ),
    source="Raghu et al. 2021, Fig. 5",
    columns=COLUMNS,
    meanings={"heads": "from the most local on", "distance_px": "their mean", "high": ""},
    metrics=("cka",),
    may_lack_values=True,  # a warning names what has no CKA
    run=run,
    plot=plot,
    headline=headline,
)
