"""Token norms: are there outliers, registers or massive activations?

Of the tokens of a site, x_t (channels), mean over images unless said otherwise:

- `norm`, `norm_median`: mean over images of |x_t|, of single tokens and of kinds of tokens; median
  over all tokens of a kind in all images.
- `outlier_share`: patch tokens with a norm above 150 (Darcet et al. 2024, section 2.1, whose
  threshold fits the last layer of DINOv2-g; other models, other scales: `threshold`).
- `outlier_share_mad`: patch tokens with a norm above median + 6 x 1.4826 MAD of the patch tokens of
  all images at the site, a threshold that follows the model's scale.
- `bimodality`: (skewness^2 + 1) / kurtosis of the patch tokens' log norms: 1/3 for a normal sample,
  5/9 for a uniform one, 1 for two peaks and nothing between (Sarle's coefficient, without his
  small-sample terms).
- `norm_histogram`: share of the patch tokens with a norm between `norm_from` and `norm_to`
  (Darcet et al., Fig. 4).
- `massive_top1`: the largest |activation| of an image over all tokens and channels;
  `massive_ratio`: over the median |activation| of the image (none where
  that is 0, as behind a ReLU); `massive_share`: images with one above
  100 and above 1,000 times that median (Sun et al. 2024, section 2); `massive_channel_share`,
  `massive_token_share`: images whose largest lies in the commonest `channel`, at the commonest
  token (`at`).
- `neighbour_cos`: cosine of a patch with its two to four neighbours, mean over patches (Darcet et
  al., Fig. 5a, who measure it after the patch embedding); of clips those in its own frame.

Norms are those of the site: of the stream before any final norm in `blocks`, which is where
outliers are; the released features of DINOv2 are normalised (`--sites norm`) and have none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.norms.norm_figures import draw_norms
from vitsee_core.analyses.norms.site_norms import (
    ACTIVATION_METRICS,
    METRICS,
    TOKENS,
    SiteNorms,
)
from vitsee_core.analyses.norms.stream_norms import norm_source
from vitsee_core.declaration import Analysis
from vitsee_core.figures.patch_maps.photos import frames_seen
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import (
    FLOW,
    SITES,
    Offers,
    Option,
    metrics_option,
    tokens_option,
)
from vitsee_core.runtime.progress import SITE_IMAGES, counting
from vitsee_core.runtime.store_selection import select_each, sites_of
from vitsee_core.statistics.image_statistics import METHODS
from vitsee_core.statistics.jackknife import Cells
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.tables.columns import SITE, with_frame_column
from vitsee_core.tables.headlines import Answer, by_store, extremes, measured
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput, SiteError, VitseeError
from vitsee_stores.manifest import abbreviate
from vitsee_stores.selectors import TokenSelection

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec

log = logging.getLogger(__name__)

plot = draw_norms

COLUMNS = (
    *SITE,
    "token",
    "row",
    "col",
    "channel",
    "at",
    "norm_from",
    "norm_to",
    "metric",
    "value",
    "std",
    "low",
    "high",
    "n_images",
)
THRESHOLD = 150.0  # Darcet et al. 2024, section 2.1


@analysis
def run(
    *stores: Store,
    metrics: Annotated[
        Sequence[str],
        metrics_option(
            METRICS,
            "all that the store has",
            "Those of activations (massive_*, neighbour_cos) need a store that keeps "
            "all tokens.",
        ),
    ] = (),
    sites: Annotated[Sequence[str], SITES] = ("blocks",),
    tokens: Annotated[Sequence[str], tokens_option(TOKENS, "all and each")] = (),
    threshold: Annotated[
        float,
        Option("Norm above which outlier_share counts a patch.", metavar="NORM", above=0),
    ] = THRESHOLD,
    execution: Annotated[
        Execution, Offers("images seed jobs memory", dask="slabs")
    ] = DEFAULT,
) -> Table:
    """Return the norms and outliers of tokens, one row per store, site, metric and token or kind.

    The columns are `COLUMNS`. Rows about single tokens (`token`, or `row` and `col` of a patch)
    have `norm` and, for patches, the shares of images in which the token is an outlier. Rows about
    `patches` have the rest of `NORM_METRICS` and the histogram; rows about activations have no
    token.
    Norms are in the units of the activations, shares from 0 to 1. Numbers are NaN without a value
    (`value`), or with fewer than two images (the others). The stores may have different images.

    Memory: the norms of all tokens of one site, five times in float64; more than the memory is
    refused.

    Args:
        stores: norms need a store's residual dot products or its activations; the metrics
            `ACTIVATION_METRICS` need its activations.
        metrics: some of `METRICS`; if empty, all that the store has.
        sites: patterns of site names.
        tokens: words of `TOKENS`; `all` and `each` if empty.
        threshold: norm above which a patch is an outlier.
        execution: which images, seed, processes, memory and progress.

    Raises:
        MissingInput: no store keeps what the norms, or a requested metric, need.
        SiteError: no such site, or none with tokens.
        VitseeError: unknown metric, a threshold that is not a positive number, more tokens than fit
            the memory, or numbers that are not finite.

    Examples:
        >>> import vitsee
        >>> table = vitsee.norms("vit.zarr", metrics="norm", sites="blocks.-1.out")
        >>> table["token"].tolist()[:2], table["value"].round(1).tolist()[:2]
        (['cls', 'patches'], [18.8, 13.0])
    """
    select_metrics(metrics, METRICS, "norms")
    if not (np.isfinite(threshold) and threshold > 0):
        raise VitseeError(f"the threshold is {threshold:g}; expected a norm above 0")
    tokens = tokens or ("all", "each")
    for word in tokens:
        TokenSelection.parse(word, TOKENS)
    selected = select_each(stores, sites, partial(_sites_with_norms, metrics=metrics))
    images_by_store = [execution.rows(store) for store in selected.stores]
    # The table as blocks of columns: tokens are many, and a dictionary per row would be slow.
    blocks: list[Cells] = []
    sources: dict[str, dict[str, str]] = {}
    n_reads = 0
    for images, store_sites in zip(images_by_store, selected.chosen, strict=True):
        n_reads += images.n * len(store_sites)
    with counting(execution.progress, n_reads, SITE_IMAGES):
        for (store, store_sites), images in zip(
            selected.members, images_by_store, strict=True
        ):
            measures = SiteNorms(
                store,
                images,
                execution,
                tokens=tokens,
                threshold=threshold,
                metrics=metrics,
            )
            for site in store_sites:
                blocks += measures.measure(site)
            sources[store.label] = {
                site.name: norm_source(store, site).describe() for site in store_sites
            }
    notes = _notes(threshold, sources, execution.seed)
    notes["images"] = {
        store.label: images.describe()
        for store, images in zip(selected.stores, images_by_store, strict=True)
    }
    # All stores of a table are of clips, or none is.
    frames = frames_seen(selected.stores[0])
    if frames:
        notes["clip"] = frames
    notes.update(selected.notes())
    layouts = [
        store.site(site.name).layout
        for store, store_sites in selected.members
        for site in store_sites
    ]
    return Table.concat(blocks, with_frame_column(COLUMNS, layouts), notes)


def _notes(
    threshold: float, sources: dict[str, dict[str, str]], seed: int
) -> dict[str, Any]:
    """Return the notes on intervals, outliers and where norms come from.

    Args:
        threshold: norm above which a patch is an outlier.
        sources: store -> site -> source of its norms.
        seed: seed of the jackknife's blocks.
    """
    return {
        "interval": {
            "norm, massive_top1, massive_ratio, neighbour_cos": METHODS["mean"],
            "shares": SHARES,
            "norm_median": METHODS["median"],
            "bimodality": METHODS["jackknife"],
        },
        "std": METHODS["std"],
        "outliers": (
            f"outlier_share: above {threshold:g}; outlier_share_mad: above median + 6 x "
            "1.4826 MAD of the patch tokens of all images at the site"
        ),
        "threshold": f"{threshold:g}",
        "norms_from": sources,
        "stream": "blocks: the residual stream before any final norm",
        "seed": seed,
    }


def _sites_with_norms(
    store: Store, patterns: Sequence[str], metrics: Sequence[str]
) -> list[SiteSpec]:
    """Return the selected sites that have norms; sites without tokens, or pooled, are logged.

    Args:
        store: of the sites.
        patterns: selectors of sites.
        metrics: as the user gave them; `ACTIVATION_METRICS` need all tokens.

    Raises:
        SiteError: none has tokens.
        MissingInput: the store lacks what the norms or the metrics need.
    """
    chosen = sites_of(store, patterns)
    with_tokens = [site for site in chosen if site.layout is not None]
    if not with_tokens:
        raise SiteError(
            f"{chosen[0].name} of {store.label} has no tokens; expected e.g. blocks"
        )
    measured: list[SiteSpec] = []
    # A site that cannot be measured is an error only if none can.
    errors: list[MissingInput] = []
    for site in with_tokens:
        try:
            norm_source(store, site)
            if set(metrics) & set(ACTIVATION_METRICS):
                store.acts(site.name)
            measured.append(site)
        except MissingInput as error:
            errors.append(error)
    if not measured:
        raise errors[0]
    left_out = [site.name for site in chosen if site not in measured]
    if left_out:
        log.info(
            "%s: no norms of %s (vectors, or pooled only)",
            store.label,
            abbreviate(left_out),
        )
    return measured


def headline(table: Table) -> list[Answer]:
    """Return the site with most outliers among patches, and the one with the largest activation.

    A sentence about a metric that the table does not contain is left out.
    """
    texts: dict[str, list[str]] = {}
    outliers = by_store(table, metric="outlier_share_mad", token="patches", row=None)
    for store, rows in outliers:
        _, i = extremes(rows)
        text = f"at most {measured(rows, i)} of patches are outliers at {rows['site'][i]}"
        texts.setdefault(store, []).append(text)
    massive = by_store(table, metric="massive_ratio", token=None, row=None)
    for store, rows in massive:
        _, i = extremes(rows)
        ratio = measured(rows, i)
        text = f"largest activation {ratio} times the median at {rows['site'][i]}"
        texts.setdefault(store, []).append(text)
    return [(store, "; ".join(sentences)) for store, sentences in texts.items()]


ANALYSIS = Analysis(
    module=__name__,
    question=FLOW,
    help="""
    Find outlier tokens and massive activations.

    Large vision transformers put a few patch tokens at norms far above the others,
    where they hold global information (Darcet et al. 2024; registers take their place),
    and a few activations at thousands of times the median (Sun et al. 2024). Norms come
    from the dot products that extract stores by default, also with --tokens pooled;
    activations are read for the rest.

      $ vitsee norms l14.zarr -o norms.csv --png norms.png
      $ vitsee norms dinov2=a.zarr reg=b.zarr --tokens all --png both.png > both.csv
      $ vitsee norms b16.zarr --metric outlier_share --threshold 60 --tokens patches

    --tokens all: cls, registers and patches as kinds, with the median, the shares of
    outliers (above --threshold; above median + 6 x 1.4826 MAD) and the histogram; each:
    every token, with the share of images in which it is an outlier. The figure shows
    the histogram over depth, where the outliers lie, and their share over depth. Of
    clips patches have a column frame, their place in time.
    """,
    needs=("sites",),
    reading=(
        "The lengths of tokens against depth, and how they are distributed. A second "
        "peak far above the others are outlier tokens, which hold global information in "
        "place of their patch; massive activations are single channels thousands of "
        "times above the median. Maps show where outliers are, in the layers that have "
        "most."
    ),
    source="Darcet et al. 2024, Figs. 3 to 5; Sun et al. 2024",
    columns=COLUMNS,
    meanings={
        "at": "where the largest activation of most images lies",
        "norm_to": "a bin of norm_histogram",
    },
    metrics=METRICS,
    run=run,
    plot=plot,
    headline=headline,
    glance_metric="outlier_share_mad",
)
