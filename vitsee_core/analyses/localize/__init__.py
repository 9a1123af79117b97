"""Localisation: which patches of the image does one token still represent?

For a token t of a site and a patch p of the input, over images,

    K_t = X_t X_t^T, X_t: images by the token's channels
    L_p = Y_p Y_p^T, Y_p: images by the patch's pixels
    cka = HSIC(K_t, L_p) / sqrt(HSIC(K_t, K_t) HSIC(L_p, L_p))

with the unbiased HSIC_1 over all images, or over minibatches: one map of patches for each token
(Raghu et al. 2021, Figs. 9, 10, D.1 to D.3). A CNN's token is all channels at one location.

- The pixels are those that the model saw, normalised: CKA is invariant to one scale of all
  channels, but not to one for each. The patches are the cells of the site's own grid (7 x 7
  locations of a ResNet: patches of 32 pixels).
- Tokens at the border resemble other patches at the border too (Raghu et al., Fig. 9): they share
  the images' background.
- NaN: a patch (or token) that is the same in all images, or in all but one: CKA is 0 / 0 there.

The own patch of a grid token is the one at its position. Summaries compare it with the others:

- `own_cka`: their CKA. `own_margin`: that minus the CKA of the most similar other patch.
- `own_rank`: 1 where no other patch is more similar. `own_rank_relative`: from 0 (first) to 1
  (last), comparable between grids; 0.5 by chance.
- `peak_distance_px`: from the own patch to the most similar one, 0 where they are the same.
- `own_top1`, of a site: the fraction of tokens whose own patch ranks first, beside what chance
  gives. Tokens without a value, and grids of a single patch, are left out.

Unless tokens are asked for, a grid finer than 38 x 38 (early sites of CNNs) is thinned: tokens of
every s-th row and column, in the middle of equal parts of the grid, are compared, each with all
patches.

Cost: n (n + 1) (channels of all tokens + pixels of all patches + tokens x patches)
multiplications for n images, four times as many for twice the images; logged before the work where
it takes more than seconds.

A location of a CNN need not be centred on its cell: each padded convolution of stride 2
shifts it by half a pixel of its input, a ResNet's stem by almost half a cell up and left, so that
the own patch may rank behind a neighbour although localisation is sharp; `peak_distance_px`
distinguishes the two.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.localize.localisation import SITE_METRICS, TOKEN_METRICS
from vitsee_core.analyses.localize.location_maps import draw_curves, draw_maps
from vitsee_core.analyses.localize.site_maps import SiteMaps
from vitsee_core.analyses.localize.site_tables import compare_sites
from vitsee_core.analyses.localize.summary_maps import draw_token_summary
from vitsee_core.declaration import Analysis
from vitsee_core.features import compared
from vitsee_core.figures.plotting import styled
from vitsee_core.models.provenance import DATA
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.machine import plural
from vitsee_core.runtime.options import (
    FLOW,
    Offers,
    Option,
    metrics_option,
    sites_option,
    tokens_option,
)
from vitsee_core.runtime.store_selection import select_each, sites_of
from vitsee_core.similarity import Estimator
from vitsee_core.similarity import options as pairwise
from vitsee_core.similarity.estimate import MOST_EXACT
from vitsee_core.similarity.options import PRESETS, choose_estimator
from vitsee_core.tables.columns import SITE, VALUES
from vitsee_core.tables.headlines import Answer, by_store, measured, number, picked
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.types import Integers, pl
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


log = logging.getLogger(__name__)


SUMMARIES = ("site", "token")
COLUMNS = (*SITE, "token", "row", "col", *VALUES, "n_images")
SITE_COLUMNS = (*SITE, *VALUES, "n_images", "n_tokens", "baseline")
MIN_UNINFORMATIVE = 0.01  # share of intervals from -1 to 1 that is worth a remark


@analysis
def run(
    *stores: Store,
    sites: Annotated[
        Sequence[str], sites_option("the last block; with --summary blocks")
    ] = (),
    tokens: Annotated[
        Sequence[str],
        tokens_option(
            ("each", "cls"), "each, thinned where the grid is finer than 38 x 38"
        ),
    ] = (),
    summary: Annotated[
        str | None,
        Option(
            "In place of maps, how each token compares with its own patch, by token or "
            "averaged by site (curves over depth).",
            choices=SUMMARIES,
            default="maps",
        ),
    ] = None,
    metrics: Annotated[
        Sequence[str],
        replace(
            metrics_option(
                SITE_METRICS, "all", "Of summaries; own_top1 of those by site."
            ),
            only_with=("summary",),
        ),
    ] = (),
    estimator: Annotated[str | None, pairwise.ESTIMATOR] = None,
    batch: Annotated[int | None, pairwise.BATCH] = None,
    examples: Annotated[int | None, pairwise.EXAMPLES] = None,
    repeats: Annotated[int | None, pairwise.REPEATS] = None,
    preset: Annotated[str | None, pairwise.preset("raghu")] = None,
    data: Annotated[str | None, DATA] = None,
    execution: Annotated[
        Execution, Offers("images seed device memory", dask="sites")
    ] = DEFAULT,
) -> Table:
    """Return the CKA of each token with each input patch, or summaries by token or by site.

    Maps have one row per token and patch, summaries one per metric and token, or per metric and
    site. The columns are `COLUMNS` or, of summaries by site, `SITE_COLUMNS`. `metric` is `cka` in
    maps; `token` is "ROW,COL" or "cls"; `row` and `col` are the patch (in a summary by token its
    own patch). `spread` says what `std` is: "jackknife", the standard error over images, with the
    95 % interval `low` to `high`; "repeats", the minibatch estimator's own noise. Values are NaN
    where a self-HSIC is not positive. Rows with a `baseline` have the values of chance. The stores
    may have different images.

    Args:
        stores: stores that keep their pixels, or whose data can be loaded again.
        sites: patterns of site names; by default the last block, or all blocks for a summary.
        tokens: "each" (all of the grid), "cls", or cells of the grid, by default each. Each token
            is compared with all patches. If a grid by default has more than `MAX_PAIRS` pairs of a
            token and a patch (38 x 38 cells), or its maps do not fit the memory, only the tokens of
            every s-th row and column are compared, with the smallest s that fits: the notes name
            them, and `n_tokens` counts them.
        summary: "token" or "site" in place of maps.
        metrics: some of `SITE_METRICS`, of summaries; all if empty.
        estimator, batch, examples, repeats, preset: how HSIC is estimated.
        data: where the images are now, if the store does not keep their pixels.
        execution: which images, seed, device, memory and processes.

    Raises:
        MissingInput: no pixels, or a site that is not stored with all its tokens.
        SiteError: a selector that nothing matches, or tokens that a site lacks.
        VitseeError: choices that do not go together, too few images or too little memory. A site
            whose maps alone are too large for the memory is left out, which is logged, unless all
            are too large.

    Examples:
        >>> import vitsee
        >>> table = vitsee.localize("vit.zarr", sites="blocks.-1.out")
        >>> len(table)  # the CKA of each of 8 x 8 tokens with each of 8 x 8 input patches
        4096
    """
    _check_choices(summary, tokens, metrics)
    summary_metrics = TOKEN_METRICS if summary == "token" else SITE_METRICS
    requested = select_metrics(
        metrics or summary_metrics, summary_metrics, f"localize --summary {summary}"
    )
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
    selected = select_each(stores, sites or ("blocks",), sites_of)
    chosen = selected.chosen
    if not sites and summary is None:
        # Maps of all blocks would be hundreds of pictures: the last block's by default.
        chosen = [store_sites[-1:] for store_sites in chosen]
    # Of all stores first, so that errors come before any work.
    site_maps = [
        SiteMaps(store, store_sites, tokens, summary)
        for store, store_sites in zip(selected.stores, chosen, strict=True)
    ]
    notes: dict[str, Any] = {"seed": execution.seed, "stores": {}}
    notes["compared"] = compared(stores, ", ".join(tokens or ("each",)))
    if preset is not None:
        notes["preset"] = f"{preset}: {PRESETS[preset].source}"
    # One store after the other, so that the pixels of one are in memory at a time.
    tables: list[Table] = []
    remarks: list[str] = []
    left_out = dict(selected.left_out)
    columns = SITE_COLUMNS if summary == "site" else COLUMNS
    for maps_of_store in site_maps:
        store = maps_of_store.store
        images, store_notes = _choose_images(store, execution, chosen_estimator)
        thinned = maps_of_store.thin(chosen_estimator, execution.budget)
        if thinned:
            store_notes["tokens"] = thinned
        too_large = maps_of_store.leave_out_large(chosen_estimator, execution.budget)
        for site, reason in too_large.items():
            left_out[f"{store.label} {site}"] = reason
        maps_of_store.say_cost(len(images))
        site_tables = compare_sites(
            maps_of_store,
            images,
            estimator=chosen_estimator,
            data=data,
            summary=summary,
            execution=execution,
        )
        for site_table in site_tables:
            for name in ("estimator", "batch"):  # what the figure says about its values
                if name in site_table["notes"]:
                    notes[name] = site_table["notes"][name]
            store_notes.update(site_table["notes"])
            patch_px = store_notes.setdefault("patch_px", {})
            patch_px[site_table["site"]] = list(site_table["patch_px"])
        store_notes["pixels"] = "as the model saw them, normalised"
        if not store.has("input"):
            store_notes["pixels"] += "; loaded again from the store's data"
        notes["stores"][store.label] = store_notes
        blocks = [site_table["columns"] for site_table in site_tables]
        tables.append(Table.concat(blocks, columns))
        remarks += _remarks_on_few_images(store.label, tables[-1].frame)
    for remark in remarks:
        log.warning("%s", remark)
    notes["remarks"] = remarks
    if left_out:
        notes["left_out"] = left_out
    table = Table.concat(tables, notes=notes)
    if metrics:
        return table.filter(pl.col("metric").is_in(requested))
    return table


def _check_choices(
    summary: str | None, tokens: Sequence[str], metrics: Sequence[str]
) -> None:
    """Raise VitseeError if the summary is unknown, or does not go with tokens or metrics."""
    if summary not in (None, *SUMMARIES):
        raise VitseeError(f"no summary {summary!r}; expected {' or '.join(SUMMARIES)}")
    if summary is not None and set(tokens) == {"cls"}:
        raise VitseeError(
            "a summary is about the own patches of grid tokens; cls has none"
        )
    if summary is None and metrics:
        raise VitseeError("metrics are of summaries: maps have cka alone")


def _choose_images(
    store: Store, execution: Execution, estimator: Estimator
) -> tuple[Integers, dict[str, Any]]:
    """Return the rows of the images that are compared, ascending, and notes about the choice.

    Minibatches of all images cost as much here as the exact value, so if that takes long the exact
    value of a sample of images is used, rather than minibatches.

    Raises:
        VitseeError: fewer than 4 images.
    """
    images = execution.images
    # Only where the user chose neither images nor estimator.
    if images is None and estimator.kind == "auto" and store.valid.sum() > MOST_EXACT:
        images = MOST_EXACT
        log.warning(
            "%s: %d of its %d images, as a sample; --images N takes more or fewer",
            store.label,
            images,
            int(store.valid.sum()),
        )
    chosen = replace(execution, images=images).rows(store)
    rows = np.flatnonzero(chosen.mask & store.valid)
    # The unbiased HSIC_1 divides by n (n - 3).
    if len(rows) < 4:
        raise VitseeError(
            f"{store.label}: {len(rows)} readable images chosen; CKA needs at least 4"
        )
    return rows, {"chosen": chosen.describe()}


def _remarks_on_few_images(label: str, rows: pl.DataFrame) -> list[str]:
    """Return a remark on a store if some of its CKAs may be anything from -1 to 1, else none.

    Args:
        label: label of the store.
        rows: its rows of the table.
    """
    rows = rows.filter(
        pl.col("metric").is_in(["cka", "own_cka"]), pl.col("low").is_finite()
    )
    if not len(rows):
        return []
    is_uninformative = (rows["low"] <= -1) & (rows["high"] >= 1)
    share = is_uninformative.to_numpy().mean()
    if share < MIN_UNINFORMATIVE:
        return []
    n: Any = rows["n_images"].max()
    return [
        f"{label}: {plural(n, 'images')} are too few: the interval is all of -1 to 1 for "
        f"{100 * share:.0f} % of the similarities (--images N takes more)"
    ]


@styled
def plot(table: Table) -> Figure:
    """Draw maps, or summaries by token or by site.

    Each token has a map with its own patch marked, on one colour scale from 0, and each store and
    site has a line of maps (Raghu et al. 2021, Figs. 9, 10, D.1 to D.3). Many tokens become a
    mosaic with each map at its token's position, and curves over depth if there are several sites.
    Summaries by site are curves over relative depth, summaries by token maps of the metrics.
    """
    if "cka" in table["metric"]:
        return draw_maps(table)
    if "token" in table.frame.columns:
        return draw_token_summary(table)
    return draw_curves(table)


def headline(table: Table) -> list[Answer]:
    """Return the share of tokens of each store's last site that are most like their own patch.

    Beside it stand the share by chance, and the mean lead over the next patch.
    """
    answers = []
    for store, rows in by_store(table, metric="own_top1", token=None, baseline=None):
        site = str(rows["site"][-1])
        text = (
            f"at {site} {measured(rows, -1)} of the tokens are most like their own patch"
        )
        chance = picked(
            table, store=store, metric="own_top1", site=site, baseline="chance"
        )
        if len(chance):
            text += f" (chance {number(float(chance['value'][0]))})"
        # In CKA, beside the share of tokens.
        margin = picked(table, store=store, metric="own_margin", site=site, token=None)
        if len(margin):
            text += f"; CKA with it less that with the next: {measured(margin)}"
        answers.append((store, text))
    return answers


ANALYSIS = Analysis(
    module=__name__,
    question=FLOW,
    help="""
    Map how similar each token is to each input patch.

    Debiased CKA, over images, between one token of a site and the pixels of one input
    patch, for every patch (Raghu et al. 2021, Figs. 9, 10, D.1 to D.3). The patches are
    the cells of the site's grid, in ResNets too. The pixels are those that the model
    saw: extract --inputs keeps them, otherwise the images are loaded again from the
    data and checked.

      $ vitsee localize b32.zarr --tokens 0,0 --tokens 2,1 --png fig9.png > fig9.csv
      $ vitsee localize b16.zarr --sites blocks.0.out --sites blocks.-1.out --png all.png > all.csv
      $ vitsee localize b32.zarr --tokens cls --png cls.png > cls.csv
      $ vitsee localize cls=a.zarr gap=b.zarr r50.zarr --summary site --png depth.png > depth.csv

    With --summary token the metrics own_cka, own_rank (1: no patch is more similar),
    own_rank_relative (0 first, 1 last), own_margin (own minus best other),
    peak_distance_px (from the own to the most similar patch); with --summary site also
    own_top1, the fraction of tokens whose own patch is first, n_tokens, and baseline
    rows with what chance gives. Of grids finer than 38 x 38 tokens of every s-th row
    and column are compared, which is logged; --tokens each takes all. Exact over all
    images, or over a sample of 16384 where there are more; --images N takes fewer or
    more.
    """,
    needs=("grid", "images"),
    reading=(
        "How similar one token's representation is to each patch of the input, over "
        "images. A bright cell at the token's own place (framed) says that it still "
        "represents its patch; where it fades, place has been given up for content."
    ),
    source="Raghu et al. 2021, Figs. 9, 10, D.1 to D.3",
    columns=COLUMNS,
    other_columns=(SITE_COLUMNS,),
    meanings={"token": "ROW,COL or cls", "col": "row, col of the patch", "high": ""},
    metrics=("cka", *SITE_METRICS),
    may_lack_values=True,  # constant patches have none
    run=run,
    plot=plot,
    headline=headline,
)
