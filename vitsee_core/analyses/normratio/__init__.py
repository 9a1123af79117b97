"""Norm ratio: does a layer pass on what came, or write something new?

Per image, token and sublayer (attention or MLP of a transformer, a residual block of a CNN, token
or channel mixing of a Mixer), from skip z and branch f(z) over channels (Raghu et al. 2021,
section 6):

- `norm_ratio`, `norm_ratio_median`, `norm_ratio_geomean`: mean, median and geometric mean over
  images of |z| / |f(z)| (Figs. 7, E.1). Above 1 the skip dominates. The paper does not say which
  mean; the arithmetic one is inflated by images with a small branch, which the other two reveal.
- `cos_branch`: mean over images of the cosine of z and f(z) (Fig. E.2 by its caption).
- `cos_out`: of z and z + f(z), the sublayer's output (Fig. E.2 by the text).
- `skip_norm`, `branch_norm`: mean over images of |z| and |f(z)|; of all tokens as one vector
  (`flat`) the norms that the code of Walmer et al. 2023 dumps. Not by default.

Images first, then tokens: a row about several tokens has the mean of the tokens' own statistics.
The branch includes a layer scale; the skip of the first block of a CNN's stage is the shortcut's
output; the sum is the one before the activation.

Where f(z) = 0, as in every block of a freshly initialised ResNet, there is no ratio and no
`cos_branch`: such tokens of images are left out, counted and named; `cos_out` is 1 there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Any

from vitsee_core.analyses.normratio.sublayer_estimates import (
    METRICS,
    SublayerEstimator,
    ZeroCount,
)
from vitsee_core.analyses.normratio.token_pictures import draw_norm_ratios
from vitsee_core.declaration import Analysis
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import (
    FLOW,
    Offers,
    Option,
    metrics_option,
    tokens_option,
)
from vitsee_core.runtime.progress import SITE_IMAGES, counting
from vitsee_core.statistics.image_statistics import METHODS
from vitsee_core.statistics.jackknife import columns_of
from vitsee_core.statistics.skip_branch import (
    TOKENS,
    StoredSublayer,
    choose_sublayers,
    missing_tokens,
    place_columns,
    places_of,
)
from vitsee_core.tables.columns import SITE, site_columns, with_frame_column
from vitsee_core.tables.headlines import Answer, by_store, extremes, measured
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_stores import Store
from vitsee_stores.errors import SiteError
from vitsee_stores.manifest import abbreviate

log = logging.getLogger(__name__)

plot = draw_norm_ratios

# Statistic over images -> the method of its interval, one of `METHODS`.
INTERVALS = {"mean": "mean", "median": "median", "geomean": "jackknife"}
DEFAULT_METRICS = tuple(METRICS)[:5]
COLUMNS = (
    *SITE,
    "token",
    "row",
    "col",
    "metric",
    "value",
    "std",
    "low",
    "high",
    "n_images",
)


@analysis
def run(
    *stores: Store,
    metrics: Annotated[
        Sequence[str],
        metrics_option(
            METRICS,
            "all but the norms",
            "norm_ratio: |z| / |f(z)|, mean over images; _median and _geomean likewise; "
            "cos_branch: cosine of z and f(z); cos_out: of z and z + f(z); skip_norm, "
            "branch_norm: |z|, |f(z)|.",
        ),
    ] = DEFAULT_METRICS,
    sites: Annotated[
        Sequence[str],
        Option(
            "Sublayers by name, glob or kind (blocks.3.attn, 'blocks.1?.mlp', layer1.0, "
            "attn, mlp); blocks.-1.mlp counts from the end.",
            metavar="SUBLAYER",
            default="every residual sublayer",
        ),
    ] = ("blocks",),
    tokens: Annotated[Sequence[str], tokens_option(TOKENS)] = ("each",),
    execution: Annotated[
        Execution, Offers("images seed jobs memory", dask="slabs")
    ] = DEFAULT,
) -> Table:
    """Return each metric of each store, sublayer and token, or kind of token, one row each.

    The columns are `COLUMNS`. Only the norms have a unit, that of the activations. `token` names a
    prefix token or a kind of token; a cell of the grid has `row` and `col` instead. `low` and
    `high` are the 95 % interval; the notes say how it and `std` are computed. `n_images` is the
    number of images with a value. Numbers are NaN if no image has a value (`value`), or fewer than
    two (the others). The stores may have different images.

    Memory: all images of as many tokens of one sublayer as fit; a sublayer that does not fit is
    read several times.

    Args:
        stores: stores with residual dot products; those without are left out if others have them.
        metrics: some of `METRICS`.
        sites: patterns of sublayers.
        tokens: words of `TOKENS`, or cells of the grid.
        execution: which images, seed, processes, memory and progress.

    Raises:
        MissingInput: no store has dot products.
        SiteError: a pattern that matches in no store or tokens that no store has, or a store left
            without any.
        VitseeError: unknown metric, or no valid image among those chosen.

    Examples:
        >>> import vitsee
        >>> table = vitsee.normratio("vit.zarr", metrics="norm_ratio", tokens="cls")
        >>> list(zip(table["site"].tolist(), table["value"].round(1).tolist()))[:2]
        [('blocks.0.attn', 0.3), ('blocks.0.mlp', 1.7)]
    """
    requested = select_metrics(metrics, METRICS, "normratio")
    selected = choose_sublayers(stores, sites)
    stores = tuple(selected.stores)
    sublayers_by_store = selected.chosen
    _require_tokens(stores, sublayers_by_store, tokens)
    images_by_store = [execution.rows(store) for store in stores]
    # The table as blocks of columns: tokens are many, and a dictionary per row would be slow.
    blocks: list[dict[str, Any]] = []
    zero_branches: dict[str, dict[str, str]] = {}
    n_reads = 0
    for images, sublayers in zip(images_by_store, sublayers_by_store, strict=True):
        n_reads += images.n * len(sublayers)
    with counting(execution.progress, n_reads, SITE_IMAGES) as progress:
        for store, sublayers, images in zip(
            stores, sublayers_by_store, images_by_store, strict=True
        ):
            estimator = SublayerEstimator(store, images, execution)
            zero_counts: dict[str, ZeroCount] = {}
            for sublayer in sublayers:
                # Single tokens, or several whose mean is a row.
                token_sets = places_of(sublayer.layout, tokens)
                if token_sets:
                    estimates = estimator.estimate(sublayer, token_sets, requested)
                    zero_counts[sublayer.site] = estimates.zeros
                    cells = site_columns(store, sublayer)
                    cells.update(place_columns(token_sets))
                    for metric, values in estimates.by_metric.items():
                        blocks.append({**cells, "metric": metric, **columns_of(values)})
                progress.advance(images.n)
            zero_branches[store.label] = _report_zeros(store.label, zero_counts)
    notes: dict[str, Any] = {}
    notes["interval"] = {
        metric: METHODS[INTERVALS[METRICS[metric].statistic]] for metric in requested
    }
    notes["std"] = METHODS["std"]
    notes["tokens"] = (
        "rows about several tokens: the mean over them of each one's statistic"
    )
    notes["zero_branch"] = {
        label: sites for label, sites in zero_branches.items() if sites
    }
    notes["seed"] = execution.seed
    notes["images"] = {
        store.label: images.describe()
        for store, images in zip(stores, images_by_store, strict=True)
    }
    notes.update(selected.notes())
    layouts = [
        sublayer.layout for sublayers in sublayers_by_store for sublayer in sublayers
    ]
    return Table.concat(blocks, with_frame_column(COLUMNS, layouts), notes)


def _require_tokens(
    stores: Sequence[Store],
    sublayers_by_store: Sequence[Sequence[StoredSublayer]],
    words: Sequence[str],
) -> None:
    """Refuse tokens that no store has, and log which tokens a store lacks.

    Args:
        stores: with residual dot products.
        sublayers_by_store: the chosen sublayers of each.
        words: the tokens, as `--tokens` names them.

    Raises:
        SiteError: tokens that no store has, or a store without any of the tokens.
    """
    # A word that no store knows is a mistake; one that some stores lack is logged.
    for word in words:
        is_available = any(
            places_of(sublayer.layout, [word])
            for sublayers in sublayers_by_store
            for sublayer in sublayers
        )
        for store, sublayers in zip(stores, sublayers_by_store, strict=True):
            reason = missing_tokens(store.label, sublayers, word)
            if reason is None:
                continue
            if not is_available:
                raise SiteError(reason)
            log.info("%s: no row for these", reason)
    for store, sublayers in zip(stores, sublayers_by_store, strict=True):
        if not any(places_of(sublayer.layout, words) for sublayer in sublayers):
            reason = missing_tokens(store.label, sublayers, words[0])
            raise SiteError(
                reason or f"no tokens of {store.label} were asked for; give --tokens"
            )


def _report_zeros(label: str, zero_counts: dict[str, ZeroCount]) -> dict[str, str]:
    """Log the sublayers where f(z) = 0, and return them for the notes.

    Args:
        label: of the store.
        zero_counts: site -> tokens of images where f(z) = 0.

    Returns:
        Site -> in how many tokens, for the sites with any.
    """
    always_zero: list[str] = []
    partly_zero: list[str] = []
    notes: dict[str, str] = {}
    for site, count in zero_counts.items():
        if count.n_zero:
            notes[site] = (
                f"f(z) = 0 in {count.n_zero} of {count.n_tokens} tokens of images"
            )
        if count.n_zero == count.n_tokens:
            always_zero.append(site)
        elif count.n_zero:
            partly_zero.append(
                f"{site} ({count.n_zero} of {count.n_tokens} tokens of images)"
            )
    # One line for all sites of a kind: a new ResNet has zeros in every block.
    if always_zero:
        log.warning(
            "%s: the branch is 0 in every image and token of %s: no norm ratio, no "
            "cos_branch",
            label,
            ", ".join(always_zero),
        )
    if partly_zero:
        log.warning(
            "%s: the branch is 0, and left out, in %s", label, abbreviate(partly_zero)
        )
    return notes


def headline(table: Table) -> list[Answer]:
    """Return where the skip dominates least and most, for each store and kind of token.

    Rows about single patches, of which there are many, are left out.
    """
    answers = []
    for store, rows in by_store(table, metric="norm_ratio", row=None):
        for (token,), token_rows in rows.group_by("token", maintain_order=True):
            lowest, highest = extremes(token_rows)
            low = f"{measured(token_rows, lowest)} at {token_rows['site'][lowest]}"
            high = f"{measured(token_rows, highest)} at {token_rows['site'][highest]}"
            name = f"{store}, {token}" if token else store
            answers.append((name, f"skip over branch: from {low} to {high}"))
    return answers


ANALYSIS = Analysis(
    module=__name__,
    question=FLOW,
    help="""
    Compare each residual sublayer's skip with its branch.

    A sublayer (attention, MLP, residual block) adds its branch f(z) to its skip z.
    Where |z| / |f(z)| is high the token passes through, where it is low the branch
    rewrites it (Raghu et al. 2021, Figs. 7, E.1, E.2). Reads the dot products that
    extract stores by default, in seconds; activations are not needed.

      $ vitsee normratio b16.zarr -o ratio.csv --png ratio.png
      $ vitsee normratio b16.zarr r50.zarr --tokens cls --tokens patches --png both.png > both.csv
      $ vitsee normratio b16.zarr --metric norm_ratio --sites mlp --tokens 0,0 --tokens 2,1

    --tokens each: every token; cls; prefix: every kind of prefix token, registers as
    their mean; patches: the mean over patches (locations of a CNN); all: prefix and
    patches; flat: all tokens of an image as one vector (Walmer et al. 2023).

    The figure shows tokens against sublayers, and means against depth. Of clips patches
    have a column frame, their place in time.
    """,
    needs=("residual",),
    reading=(
        "How much of what leaves each sublayer came through the skip connection, and how "
        "much its branch wrote: above 1 the skip dominates. The class token and the "
        "patches of a ViT change places somewhere in depth."
    ),
    source="Raghu et al. 2021, Figs. 7, E.1, E.2",
    columns=COLUMNS,
    meanings={
        "site": "the sublayer",
        "token": "cls, reg0, registers, patches, flat; empty for a patch",
    },
    metrics=tuple(METRICS),
    may_lack_values=True,  # a warning names branches that are 0
    run=run,
    plot=plot,
    headline=headline,
)
