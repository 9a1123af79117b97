"""Token norm: how long are the tokens?

The Euclidean norm of each token of a site, averaged over the image's tokens, then over images; of a
vector site the norm of the vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from vitsee import api

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from polars import DataFrame

COLUMNS = (*api.SITE, "metric", "value", "std", "low", "high", "n_images")
ORDERS = {"1": 1.0, "2": 2.0, "inf": np.inf}


@api.analysis
def run(
    *stores: api.Store,
    sites: Annotated[Sequence[str], api.SITES] = ("blocks",),
    order: Annotated[
        str, api.Option("Which norm: 2 is the length.", choices=tuple(ORDERS))
    ] = "2",
    execution: Annotated[
        api.Execution,
        api.Offers("images seed jobs memory", dask="slabs", replicates=False),
    ] = api.DEFAULT,
) -> api.Table:
    """One row per store and site: the mean norm, in the units of the activations.

    Raises:
        MissingInput: a site is stored pooled only.
        SiteError: no such site.
    """
    selected = api.select_each(stores, sites, api.sites_of)
    rows = []
    for store, chosen_sites in selected.members:
        features = [api.choose_features(store, site, "all") for site in chosen_sites]
        images = execution.rows(store)
        read = partial(read_norms, features, ORDERS[order])
        with api.counting(execution.progress, images.n):
            means = execution.fold(
                store,
                partial(api.SlabMoments, read),
                images,
                slab_bytes=max(feature.slab_bytes for feature in features),
            ).result()
        for site in chosen_sites:
            row = api.site_columns(store, site)
            row["metric"] = "token_norm"
            row |= means[site.name].cells()
            rows.append(row)
    notes = {"interval": api.INTERVAL_METHOD, **selected.notes()}
    return api.Table.from_rows(rows, COLUMNS, notes)


def read_norms(
    features: Sequence[api.SiteFeatures], order: float, slab: api.Slab
) -> dict[str, NDArray[np.float64]]:
    """Site -> (images,) mean token norm, of the slab's images that count."""
    norms = {}
    for feature in features:
        every_token = slice(0, len(feature.tokens))
        tokens = feature.of_slab(slab, every_token).astype(
            np.float64
        )  # (images, tokens, channels)
        norms[feature.site.name] = np.linalg.norm(tokens, ord=order, axis=-1).mean(axis=1)
    return norms


@api.styled
def plot(table: api.Table) -> Figure:
    """The mean norm against relative depth, a curve per store."""
    return api.draw_depth_panels(table.frame, ["token_norm"], name_axis)


def name_axis(axes: Axes, rows: DataFrame, metric: str) -> None:
    """The axis in words, where the column has the metric's name."""
    axes.set_ylabel("mean norm of tokens")


def headline(table: api.Table) -> list[api.Answer]:
    """Each store's first and last site."""
    answers = []
    for store, rows in api.by_store(table, metric="token_norm"):
        answers.append((store, api.first_and_last(rows)))
    return answers


ANALYSIS = api.Analysis(
    module=__name__,
    question=api.FLOW,
    help="""
    Measure the mean norm of tokens.

    How long the tokens of each layer are, on average over an image's tokens and over images; or
    how large their largest channel is (--order inf).

      $ vitsee token-norm vit.zarr -o norm.csv --png norm.png
    """,
    needs=("sites",),
    reading=(
        "The mean length of a layer's tokens against depth; bands are 95 % intervals over images. "
        "In a residual stream it grows with depth, as every block adds to what the others wrote."
    ),
    source="Darcet et al. 2024, Fig. 3",
    columns=COLUMNS,
    metrics=("token_norm",),
    run=run,
    plot=plot,
    headline=headline,
)
