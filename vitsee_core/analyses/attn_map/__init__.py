"""Attention maps: where does attention end up?

For A (queries by keys) of one image and one head, over spatial keys k; means go over images:

- `mean-cls`: A[cls, k] (Walmer et al. 2023, Figs. 1 top, 2, 13, 17).
- `mean-spatial`: mean over spatial queries of A[q, k]. Neither is renormalised, so that a map's
  total is 1 minus the mass on prefix tokens; Walmer et al. draw each head over its own range
  (`--scale head`), where intensities are not comparable between heads.
- `aligned`: every query's map is shifted so that the query is at the centre, rows renormalised
  over spatial keys, and averaged over queries and images (Aligned Aggregated Attention Maps; Walmer
  et al. 2023, Figs. 3, 14, 18). Cells are offsets key minus query, of total mass 1 (their code's
  sum to its batch size). Far offsets exist for few queries, so that uniform attention has most mass
  at small offsets, as a local head has: `coverage` divides each cell by the share of queries that
  have a key there, which turns uniform attention into the constant 1 / keys. The figure shows these
  values by default; Walmer et al. draw the mass.
- `rollout`: the class token's row (without one: the mean over spatial queries) of the product of
  all blocks' 0.5 mean_h A + 0.5 I, rows renormalised (Abnar & Zuidema 2020). Dosovitskiy et al.
  2021, Figs. 6, 13, mention no residual term: `rollout_residual=False` leaves I out.
- `prefix-mass`: mean over spatial queries of the attention to class, register and distillation
  tokens. `entropy`: mean over spatial queries of -sum_k A ln A over all keys, in nats.
- `sink`: keys that draw far more attention than their share, of which kind they are, and whether
  all queries attend alike; see `vitsee_core.analyses.attn_map.sinks`.

Of clips a key has a place in time, too, and maps are over all spatial keys of all frames; `aligned`
adds up the keys of all times. Of an image model frame by frame the class token's row is the mean of
those of all frames, each of mass 1 / frames in its own.

Single images: see `vitsee_core.analyses.attn_map.image_maps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.attn_map import image_maps, sinks
from vitsee_core.analyses.attn_map.clip_figures import draw_clips
from vitsee_core.analyses.attn_map.figures import draw_images, draw_models_of_images
from vitsee_core.analyses.attn_map.image_maps import map_images
from vitsee_core.analyses.attn_map.mean_tables import (
    MAP_COLUMNS,
    NUMBER_COLUMNS,
    NUMBERS,
    ROLLOUT_COLUMNS,
    mean_table,
)
from vitsee_core.analyses.attn_map.number_figures import draw_numbers, draw_sinks
from vitsee_core.attention.head_maps import blocks_of_each, per_query
from vitsee_core.attention.heads import with_windows
from vitsee_core.declaration import Analysis
from vitsee_core.figures.clip_strips import of_clips
from vitsee_core.figures.head_tiles import draw_grid, draw_models
from vitsee_core.figures.plotting import styled
from vitsee_core.models.provenance import Provenance
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.tables.glances import select_evenly
from vitsee_core.tables.headlines import (
    Answer,
    by_store,
    extremes,
    measured,
    number,
    picked,
)
from vitsee_core.tables.results import Table
from vitsee_core.types import pl
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["KINDS", "MAP_COLUMNS", "NUMBERS", "NUMBER_COLUMNS", "plot", "run"]

# Kinds of maps and numbers over all images, as `--kind` names them.
KINDS = (
    "mean-cls",
    "mean-spatial",
    "aligned",
    "rollout",
    "prefix-mass",
    "entropy",
    "sink",
)
TITLES = {
    "mean_cls": "mean attention of the class token",
    "mean_spatial": "mean attention of the patches",
    "aligned": "aligned attention, share of mass by offset",
    "aligned_coverage": "aligned attention, mean of the queries with a key at the offset",
    "rollout": "attention rollout",
    "rollout_no_residual": "attention rollout without residual term",
}


@analysis
def run(
    *stores: Store,
    kind: str | None = None,
    sites: Sequence[str] = (),
    heads: Sequence[int] = (),
    coverage: bool = False,
    rollout_residual: bool = True,
    image: Sequence[str] = (),
    query: Sequence[tuple[int, ...]] = (),
    origin: Provenance | None = None,
    execution: Execution = DEFAULT,
) -> Table:
    """Return maps of heads, a row per cell, or numbers of heads, a row per head.

    Without a `kind` the maps are those of single images. The columns are `MAP_COLUMNS`,
    `ROLLOUT_COLUMNS` or `NUMBER_COLUMNS`; `sinks.COLUMNS` for `sink`, which has several metrics;
    `image_maps.COLUMNS` for single images. `row` and `col` are the key's cell, for `aligned` its
    signed offset from the query; clips have the key's time in `frame`. `metric` is the kind, with
    `_coverage` or `_no_residual`. The `site` of a rollout is the block it starts from. Values are
    NaN if no image is left.

    Args:
        stores: stores with attention summaries; those without are left out if others have them.
        kind: one of `KINDS`.
        sites: blocks by path or glob; by default all, for single images the last one.
        heads: numbers of the heads of each block; by default all.
        coverage: correct `aligned` for the number of queries that have a key at each offset.
        rollout_residual: have the residual term in a `rollout`; without it the full
            attention of every image is read (extract --attention full) or recomputed.
        image: ids or row numbers of single images, instead of a kind.
        query: cells of the grid whose maps single images get, too: (row, col), of clips (frame,
            row, col).
        origin: where data and weights are now, for recomputing.
        execution: which images, and what the work may use.

    Raises:
        MissingInput: no store has such summaries, or a class token.
        SiteError: a pattern matches no block.
        VitseeError: options that do not go together, no such head, image or cell.

    Examples:
        >>> import vitsee
        >>> table = vitsee.attn_map("vit.zarr", kind="entropy", sites="blocks.-1")
        >>> table["head"].tolist(), table["value"].round(2).tolist()
        ([0, 1, 2, 3], [3.23, 3.32, 3.51, 3.86])
    """
    _check_options(
        kind,
        has_choice=bool(sites or heads),
        coverage=coverage,
        residual=rollout_residual,
        image=image,
        query=query,
        execution=execution,
    )
    selection = blocks_of_each(stores, sites or ("blocks",))
    tables = {}
    for store, blocks in selection.members:
        if kind is None:
            tables[store.label] = map_images(
                store,
                names=image,
                blocks=blocks if sites else blocks[-1:],
                heads=heads,
                query=query,
                origin=origin,
                execution=execution,
            )
        else:
            tables[store.label] = mean_table(
                store,
                blocks,
                kind,
                heads=heads,
                coverage=coverage,
                residual=rollout_residual,
                origin=origin,
                execution=execution,
            )
    return with_windows(_concat_stores(tables, selection.notes()), selection.members)


def _check_options(
    kind: str | None,
    *,
    has_choice: bool,
    coverage: bool,
    residual: bool,
    image: Sequence[str],
    query: Sequence[tuple[int, ...]],
    execution: Execution,
) -> None:
    """Refuse options of `run` that do not go together, before any work.

    has_choice: whether blocks or heads were chosen.
    """
    if (kind is None and not image) or (kind is not None and image):
        raise VitseeError("expected a kind of map or single images, and not both")
    if kind not in (*KINDS, None):
        raise VitseeError(f"no kind {kind!r}; kinds of attn-map: {', '.join(KINDS)}")
    maps = kind or "single images"
    if coverage and kind != "aligned":
        raise VitseeError(f"coverage corrects aligned maps only, not {maps}")
    if not residual and kind != "rollout":
        raise VitseeError(f"only the kind rollout goes without residual term, not {maps}")
    if query and not image:
        raise VitseeError(
            "the maps of a query are those of single images: name an --image"
        )
    if kind is None:
        if execution.images is not None:
            raise VitseeError("single images were named: leave the number of images out")
    elif kind == "rollout" and has_choice:
        raise VitseeError(
            "a rollout goes through all blocks and heads: leave their choice out"
        )


def _concat_stores(tables: dict[str, Table], notes: dict[str, Any]) -> Table:
    """Return the stores' tables as one.

    Args:
        tables: label of a store -> its table.
        notes: of all stores. Notes of the tables that all of them share are joined to them; those
            that differ go under `stores`, by label.
    """
    notes_by_store = [table.notes for table in tables.values()]
    common = {
        name: note
        for name, note in notes_by_store[0].items()
        if all(notes_of_store.get(name) == note for notes_of_store in notes_by_store)
    }
    # The pictures of each store, for instance: models see the same image differently.
    differing = {
        label: {name: note for name, note in table.notes.items() if name not in common}
        for label, table in tables.items()
    }
    if any(differing.values()):
        notes = notes | {"stores": differing}
    return Table.concat(list(tables.values()), notes=common | notes)


def at_a_glance(table: Table) -> Table:
    """Return the maps of four heads of three blocks of one store (of clips one head of each); a
    table without maps as it is."""
    if "row" not in table.frame.columns:
        return table
    n_heads = 1 if of_clips(table.frame) else 4
    return select_evenly(table, store=1, image=1, site=3, head=n_heads)


@styled
def plot(table: Table, scale: str = "shared", coverage: bool = True) -> Figure:
    """Draw the maps or numbers of a table, from the table alone.

    Maps are a grid with layers in rows and heads in columns, each token grid of a model separately,
    and several models side by side. Single images have their pictures (from the table's notes),
    maps and rollouts. Numbers of heads, and sinks, are drawn against depth. Clips have a strip over
    time for each head.

    Args:
        table: from `run`.
        scale: "shared": all maps on one colour scale; "head": each over its own range, so that
            intensities are not comparable between heads.
        coverage: draw `aligned` corrected for coverage, whatever the table has: otherwise uniform
            attention shows a bright centre, the number of pairs of patches at each offset.
    """
    # Which kind a table is about shows in its columns.
    columns = table.frame.columns
    is_comparison = table.frame["store"].n_unique() > 1
    if of_clips(table.frame):
        return draw_clips(table, scale, TITLES)
    if "image" in columns:
        if is_comparison:
            return draw_models_of_images(table, scale)
        return draw_images(table, scale)
    if "token" in columns:
        return draw_sinks(table.frame)
    if "row" not in columns:
        return draw_numbers(table.frame)
    metric = str(table["metric"][0])
    convert = None
    if metric == "aligned" and coverage:
        metric = "aligned_coverage"
        convert = per_query
    # Mass by offset is a share of all attention; corrected for coverage it is attention to a key.
    unit = "attention" if metric == "aligned_coverage" else "share of attention"
    midlines = metric.startswith("aligned")
    draw = draw_models if is_comparison else draw_grid
    return draw(table, TITLES[metric], scale, unit, midlines=midlines, convert=convert)


def headline(table: Table) -> list[Answer]:
    """Return a sentence for each store, by the metrics that the table has.

    It is on the strongest sink, on the attention to the middle of the image or to prefix tokens, or
    on how spread attention is.
    """
    answers: list[Answer] = []
    for store, rows in by_store(table, metric="sink_max"):
        _, i = extremes(rows)
        head = f"head {rows['head'][i]} of {rows['site'][i]}"
        text = f"the strongest key draws {measured(rows, i)} times an even share ({head})"
        answers.append((store, text))
    for metric in ("mean_cls", "mean_spatial"):
        for store, rows in by_store(table, metric=metric, image=None):
            answers.append((store, _share_of_middle(rows)))
    # Numbers of heads: the first and the last block are what a reader compares.
    units = {"prefix_mass": "of attention goes to prefix tokens", "entropy": "nats"}
    for metric, unit in units.items():
        for store, rows in by_store(table, metric=metric, image=None, query=None):
            outer_sites = dict.fromkeys((str(rows["site"][0]), str(rows["site"][-1])))
            means = []
            for site in outer_sites:
                mean = picked(rows, site=site)["value"].to_numpy().mean()
                means.append(f"{number(mean)} at {site}")
            answers.append((store, f"{', '.join(means)} {unit}, mean over heads"))
    return answers


def _share_of_middle(rows: pl.DataFrame) -> str:
    """Return a sentence on how much attention the middle of the grid gets in the last block.

    The middle is the middle half of rows and columns; the share is of attention to patches, mean
    over heads, beside the share of patches that lie there.

    rows: one store's maps of one kind.
    """
    rows = picked(rows, site=str(rows["site"][-1]))
    # A cell is inside if all of it lies in the middle half.
    inside = np.ones(len(rows), bool)
    for name in ("row", "col"):
        cells = rows[name].to_numpy()
        size = cells.max() + 1
        inside &= (cells >= size / 4) & (cells + 1 <= size - size / 4)
    values = rows["value"].to_numpy()
    share = values[inside].sum() / values.sum()
    even = inside.mean()
    return (
        f"in {rows['site'][0]} the middle of the grid gets {number(float(share))} of "
        f"the attention to patches, by its size {number(float(even))}"
    )


ANALYSIS = Analysis(
    module=__name__,
    needs=("attention",),
    reading=(
        "One tile per head: where it attends, averaged over images. Bright cells get more "
        "attention."
    ),
    readings={
        "mean_cls": (
            "One tile per head: where the class token attends, averaged over images. "
            "Heads of one block differ; in late blocks they agree on the middle of the "
            "image, where objects are."
        ),
        "mean_spatial": (
            "One tile per head: where patches attend on average. A flat tile attends "
            "evenly; bright single cells are the same for all patches and images."
        ),
        "aligned": (
            "One tile per head: attention by offset from the patch that looks, which "
            "is at the centre (the lines). A spot at the centre is a local head, a "
            "spot beside it an offset head, a line an axial one; flat tiles look "
            "everywhere alike."
        ),
        "rollout": (
            "Attention multiplied through all blocks: how much each patch can have "
            "contributed to the class token, averaged over images."
        ),
        "prefix_mass": (
            "How much of the patches' attention goes to the class token and registers, "
            "per head, against depth."
        ),
        "entropy": (
            "How spread the patches' attention is, per head, against depth: low is "
            "attention to few keys, high attention to many."
        ),
        "sink": (
            "Keys that draw far more attention than their share, against depth: how "
            "much the strongest one gets, and in how many images and heads there is "
            "one. Sinks on patches of background are where outlier tokens are (norms)."
        ),
    },
    source=(
        "Walmer et al. 2023, Figs. 1 to 3, 11 to 14, 17, 18; Dosovitskiy et al. 2021, "
        "Figs. 6, 13; Abnar and Zuidema 2020"
    ),
    columns=MAP_COLUMNS,
    other_columns=(
        ROLLOUT_COLUMNS,
        NUMBER_COLUMNS,
        image_maps.COLUMNS,
        sinks.COLUMNS,
    ),
    metrics=(
        "attention",
        *TITLES,
        *NUMBERS.values(),
        "sink_max",
        "sink_median",
        "sink_share",
        "qk_nmi",
    ),
    run=run,
    plot=plot,
    headline=headline,
    at_a_glance=at_a_glance,
)
