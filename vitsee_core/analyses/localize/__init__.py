"""Localisation: which patches of the image does one token still represent?

For a token t of a site and a patch p of the input, over images,

    K_t = X_t X_t^T, X_t: images by the token's channels
    L_p = Y_p Y_p^T, Y_p: images by the patch's pixels
    cka = HSIC(K_t, L_p) / sqrt(HSIC(K_t, K_t) HSIC(L_p, L_p))

with the unbiased HSIC_1 (see `similarity.hsic`) over all images, or over minibatches: one map of
patches for each token (Raghu et al. 2021, Figs. 9, 10, D.1 to D.3). A CNN's token is all channels
at one location.

- The pixels are those that the model saw, normalised: CKA is invariant to one scale of all
  channels, but not to one for each. The patches are the cells of the site's own grid (7 x 7
  locations of a ResNet: patches of 32 pixels); see `PatchPixels` for their edges.
- Tokens at the border resemble other patches at the border too (Raghu et al., Fig. 9): they share
  the images' background.
- NaN: a patch (or token) that is the same in all images, or in all but one: CKA is 0 / 0 there.

Of a grid token the own patch is the one in its place. Summaries compare it with the others:

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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.localize.localisation import (
    SITE_METRICS,
    TOKEN_METRICS,
    Maps,
    SiteMaps,
    chance,
    replicates_of,
    site_summary,
    token_summary,
)
from vitsee_core.analyses.localize.location_maps import (
    draw_curves,
    draw_maps,
    draw_token_summary,
)
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
from vitsee_core.similarity.estimators import batch_sizes
from vitsee_core.similarity.options import PRESETS, choose_estimator
from vitsee_core.similarity.stacks import input_pixels
from vitsee_core.tables.columns import SITE, VALUES, site_columns
from vitsee_core.tables.headlines import Answer, by_store, measured, number, picked
from vitsee_core.tables.metrics import asked_for
from vitsee_core.tables.results import Table
from vitsee_core.types import Integers, pl
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


log = logging.getLogger(__name__)


SUMMARIES = ("site", "token")
COLUMNS = (*SITE, "token", "row", "col", *VALUES, "n_images")
SAID = 0.01  # share of intervals from -1 to 1 that is remarked
SITE_COLUMNS = (*SITE, *VALUES, "n_images", "n_tokens", "baseline")


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
            "In place of maps, how each token compares with its own patch, by token or averaged by "
            "site (curves over depth).",
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
    """One row per token and patch; with `summary` one row per metric and token, or per metric and
    site.

    Columns: see `COLUMNS`, `SITE_COLUMNS`; `metric` is `cka` except in summaries; `token` is
    "ROW,COL" or "cls", `row` and `col` the patch (of a summary by tokens, the own one). `spread`
    names what `std` is, as for `cka`: "jackknife", the standard error over images, with the 95 %
    interval `low` to `high`; "repeats", the minibatch estimator's own noise. It is NaN where a
    self-HSIC is not positive. Rows with a `baseline` give the values of chance. The stores may have
    different images.

    Args:
        tokens: "each" (all of the grid), "cls", or cells of the grid; by default each, of finer
            grids than 38 x 38 (`MOST_PAIRS` pairs of a token and a patch), or where the
            maps do not fit the memory, those of every s-th row and column, s the least that fits
            (see `localisation.every_nth`): the notes name them, and `n_tokens` counts them. Each is
            compared with all patches.
        stores: with their pixels, or whose data can be loaded again.

    Raises:
        MissingInput: no pixels, or a site that is not stored with all its tokens.
        SiteError: a selector that nothing matches, or tokens that a site lacks.
        VitseeError: choices that do not go together, too few images or too little memory. A site
            whose maps alone are too large for the memory is left out, which is logged, where
            another is not.
    """
    if summary not in (None, *SUMMARIES):
        raise VitseeError(f"no summary {summary!r}; expected {' or '.join(SUMMARIES)}")
    if summary is not None and set(tokens) == {"cls"}:
        raise VitseeError(
            "a summary is about the own patches of grid tokens; cls has none"
        )
    if summary is None and metrics:
        raise VitseeError("metrics are of summaries: maps have cka alone")
    known = TOKEN_METRICS if summary == "token" else SITE_METRICS
    wanted = asked_for(metrics or known, known, f"localize --summary {summary}")
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
    selected = select_each(stores, sites or ("blocks",), sites_of)
    chosen = selected.chosen
    if not sites and summary is None:
        chosen = [of_store[-1:] for of_store in chosen]
    works = [
        SiteMaps(store, of_store, tokens, summary)
        for store, of_store in zip(selected.stores, chosen, strict=True)
    ]
    notes: dict[str, Any] = {"seed": execution.seed, "stores": {}}
    notes["compared"] = compared(stores, ", ".join(tokens or ("each",)))
    if preset is not None:
        notes["preset"] = f"{preset}: {PRESETS[preset].source}"
    tables: list[Table] = []
    remarks: list[str] = []
    left_out = dict(selected.left_out)
    for work in works:
        images, about = _rows(work.store, execution, how)
        if thinned := work.thin(how, execution.budget):
            about["tokens"] = thinned
        for site, reason in work.leave_out_large(how, execution.budget).items():
            left_out[f"{work.store.label} {site}"] = reason
        of_store = how
        if how.kind == "minibatch":  # logged once, not for each grid
            of_store = Estimator("minibatch", *batch_sizes(how, len(images)))
        work.say_cost(len(images))
        compare = _SiteBlocks(work, images, of_store, execution.seed, data, summary)
        together = work.together(of_store, execution.budget)
        if (
            execution.map is not None
        ):  # what is read once for several sites is read by each
            together = [[k] for group in together for k in group]
        made = [
            one
            for some in execution.spread(compare, together, unit="sites")
            for one in some
        ]
        order = [k for group in together for k in group]
        blocks: list[dict[str, Any]] = []
        for _, (columns, site, maps_notes, patch_px) in sorted(
            zip(order, made, strict=True), key=lambda one: one[0]
        ):
            blocks.append(columns)
            notes |= {"estimator": maps_notes["estimator"]}
            about |= maps_notes
            about.setdefault("patch_px", {})[site] = list(patch_px)
        about["pixels"] = "as the model saw them, normalised" + (
            "" if work.store.has("input") else "; loaded again from the store's data"
        )
        notes["stores"][work.store.label] = about
        tables.append(
            Table.concat(blocks, SITE_COLUMNS if summary == "site" else COLUMNS)
        )
        remarks += _too_few(work.store.label, tables[-1].frame)
    for remark in remarks:
        log.warning("%s", remark)
    notes["remarks"] = remarks
    if left_out:
        notes["left_out"] = left_out
    whole = Table.concat(tables, notes=notes)
    if metrics:
        return whole.filter(pl.col("metric").is_in(wanted))
    return whole


def _rows(
    store: Store, execution: Execution, how: Estimator
) -> tuple[Integers, dict[str, Any]]:
    """The images that are used, and remarks about them. Minibatches of all images cost as much here
    as the exact value, so if that takes long a sample of images is used instead of minibatches.
    Raises VitseeError: fewer than 4."""
    images = execution.images
    if images is None and how.kind == "auto" and store.valid.sum() > MOST_EXACT:
        images = MOST_EXACT
        log.warning(
            "%s: %d of its %d images, as a sample; --images N takes more or fewer",
            *(store.label, images, int(store.valid.sum())),
        )
    chosen = replace(execution, images=images).rows(store)
    rows = np.flatnonzero(chosen.mask & store.valid)
    if len(rows) < 4:
        raise VitseeError(
            f"{store.label}: {len(rows)} readable images chosen; CKA needs at least 4"
        )
    return rows, {"chosen": chosen.describe()}


def _too_few(label: str, rows: pl.DataFrame) -> list[str]:
    """A remark on a store if some of its CKAs may be anything from -1 to 1."""
    rows = rows.filter(
        pl.col("metric").is_in(["cka", "own_cka"]), pl.col("low").is_finite()
    )
    whole = ((rows["low"] <= -1) & (rows["high"] >= 1)).to_numpy()
    if not len(rows) or whole.mean() < SAID:
        return []
    n: Any = rows["n_images"].max()
    return [
        f"{label}: {plural(n, 'images')} are too few: the interval is all of -1 to 1 for "
        f"{100 * whole.mean():.0f} % of the similarities (--images N takes more)"
    ]


@dataclass
class _SiteBlocks:
    """The columns of sites that are compared together, their names, notes and patches; arrays, so
    that a killed run keeps them. pixels: read by the first call, in every process."""

    work: SiteMaps
    images: Integers
    how: Estimator
    seed: int
    data: str | None
    summary: str | None
    pixels: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pixels": None}

    def __call__(
        self, execution: Execution, together: Sequence[int]
    ) -> list[tuple[dict[str, Any], str, dict[str, Any], tuple[int, ...]]]:
        store = self.work.store
        if self.pixels is None:
            self.pixels = input_pixels(store, self.images, self.data, execution.progress)
        all_maps = self.work.maps(
            together, self.pixels, self.images, self.how, self.seed, execution
        )
        return [
            (
                _columns(maps, store, self.summary),
                maps.site.name,
                maps.h.notes,
                maps.patch_px,
            )
            for maps in all_maps
        ]


def _columns(maps: Maps, store: Store, summary: str | None) -> dict[str, Any]:
    h = maps.h
    alike = site_columns(store, maps.site) | {"spread": h.spread, "n_images": h.n_images}
    n_tokens, n_patches = h.cross.shape
    rows_, cols_ = np.divmod(np.arange(n_patches), maps.n_cols)
    if summary is None:
        of = maps.similarity
        columns: dict[str, NDArray[Any]] = {
            "token": np.repeat(maps.tokens, n_patches),
            "row": np.tile(rows_, n_tokens),
            "col": np.tile(cols_, n_tokens),
            "metric": np.full(n_tokens * n_patches, "cka"),
            "value": of.cka.ravel(),
            **{name: getattr(of, name).ravel() for name in ("std", "low", "high")},
        }
    elif summary == "token":
        numbers = token_summary(maps)
        columns = {
            "token": np.repeat(maps.tokens, len(TOKEN_METRICS)),
            "row": np.repeat(rows_[maps.cells], len(TOKEN_METRICS)),
            "col": np.repeat(cols_[maps.cells], len(TOKEN_METRICS)),
            "metric": np.tile(TOKEN_METRICS, len(maps.tokens)),
            **{name: values.ravel() for name, values in numbers.items()},
        }
    else:
        n_tokens, numbers = site_summary(maps)
        nothing = np.array([np.nan])
        columns = {
            "metric": np.array([*SITE_METRICS, "own_top1"]),
            "value": np.append(numbers["value"], chance(maps)),
            **{
                name: np.append(numbers[name], nothing) for name in ("std", "low", "high")
            },
            "n_tokens": np.full(len(SITE_METRICS) + 1, n_tokens),
            "baseline": np.array(["" for _ in SITE_METRICS] + ["chance"]),
        }
    length = len(next(iter(columns.values())))
    columns |= alike
    own = replicates_of(maps, summary)
    if own is not None and len(own) < length:  # what chance gives has none
        own = np.pad(own, ((0, length - len(own)), (0, 0)), constant_values=np.nan)
    if own is not None:
        columns["replicates"] = own
    return columns


@styled
def plot(table: Table) -> Figure:
    """Maps: one for each token, its own place marked, on one colour scale from 0, a line of them
    for each store and site (Raghu et al. 2021, Figs. 9, 10, D.1 to D.3); where the tokens are many,
    a mosaic of maps, each in its token's place, and curves over depth where there are several
    sites. Summaries by site: curves over relative depth. By token: maps of the metrics."""
    if "cka" in table["metric"]:
        return draw_maps(table)
    if "token" in table.frame.columns:
        return draw_token_summary(table)
    return draw_curves(table)


def headline(table: Table) -> list[Answer]:
    """How many tokens of the last site are most like their own patch, beside chance, and by how
    much."""
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
        own = picked(table, store=store, metric="own_margin", site=site, token=None)
        if len(own):
            text += f"; CKA with it less that with the next: {measured(own)}"
        answers.append((store, text))
    return answers


ANALYSIS = Analysis(
    module=__name__,
    question=FLOW,
    help="""
    Map how similar each token is to each input patch.

    Debiased CKA, over images, between one token of a site and the pixels of one input patch, for
    every patch (Raghu et al. 2021, Figs. 9, 10, D.1 to D.3). The patches are the cells of the
    site's grid, in ResNets too. The pixels are those that the model saw: extract --inputs keeps
    them, otherwise the images are loaded again from the data and checked.

      $ vitsee localize b32.zarr --tokens 0,0 --tokens 2,1 --png fig9.png > fig9.csv
      $ vitsee localize b16.zarr --sites blocks.0.out --sites blocks.-1.out --png all.png > all.csv
      $ vitsee localize b32.zarr --tokens cls --png cls.png > cls.csv
      $ vitsee localize cls=a.zarr gap=b.zarr r50.zarr --summary site --png depth.png > depth.csv

    With --summary token the metrics own_cka, own_rank (1: no patch is more similar),
    own_rank_relative (0 first, 1 last), own_margin (own minus best other), peak_distance_px
    (from the own to the most similar patch); with --summary site also own_top1, the fraction of
    tokens whose own patch is first, n_tokens, and baseline rows with what chance gives. Of
    grids finer than 38 x 38 tokens of every s-th row and column are compared, which is logged;
    --tokens each takes all. Exact over all images, or over a sample of 16384 where there are
    more; --images N takes fewer or more.
    """,
    needs=("grid", "images"),
    reading=(
        "How similar one token's representation is to each patch of the input, over images. A "
        "bright cell at the token's own place (framed) says that it still represents its patch; "
        "where it fades, place has been given up for content."
    ),
    source="Raghu et al. 2021, Figs. 9, 10, D.1 to D.3",
    columns=COLUMNS,
    other_columns=(SITE_COLUMNS,),
    meanings={"token": "ROW,COL or cls", "col": "row, col of the patch", "high": ""},
    metrics=("cka", *SITE_METRICS),
    run=run,
    plot=plot,
    headline=headline,
)
