"""Lens: from which block on does the model's own classifier know the class?

The head that turns the last block's tokens into logits (norm, pooling, linear layer) is applied to
the tokens of each block, as if the model ended there (the logit lens, nostalgebraist 2020; for ViTs
Vilas et al. 2023). Stores keep the head; where one does not, the model is built again. Nothing is
trained; a low value says that a block does not write in the classifier's basis, not that it does
not know the class, which is what probes measure.

- `lens_top1`: images whose label has the largest logit;
- `lens_agreement`: images whose largest logit is that of the model's output;
- `lens_rank`: rank of the label among the logits, 1 the largest (of equal ones the best); mean over
  images, so that few images far off weigh most.

The tokens are pooled as the model pools them: its class token, the mean over patches before or
after the norm, or attention of a learned query over them (SigLIP's "map" head). With
`patches` the same of every patch alone: head(norm(x_t)), or head(pool(norm(x_t))) of the one token;
where the model normalises after pooling, maps of patches do not average to its logits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from vitsee_core.analyses.lens.figure import plot
from vitsee_core.analyses.lens.store_lens import (
    METRICS,
    StoreLens,
    select_readable_sites,
)
from vitsee_core.declaration import Analysis
from vitsee_core.models.provenance import Classifiers, Provenance
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import (
    KNOWLEDGE,
    SITES,
    Gather,
    Offers,
    Option,
    metrics_option,
)
from vitsee_core.runtime.progress import SITE_IMAGES, counting
from vitsee_core.runtime.store_selection import select_each
from vitsee_core.statistics.image_statistics import METHODS
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.tables.columns import SITE
from vitsee_core.tables.headlines import Answer, by_store, first_and_last
from vitsee_core.tables.results import Table
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

__all__ = ["COLUMNS", "METRICS", "plot", "run"]

log = logging.getLogger(__name__)

NEARLY = 0.9  # of the last block's share, for the headline
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
            METRICS, "all that can be had", "lens_top1 and lens_rank need labels."
        ),
    ] = (),
    sites: Annotated[Sequence[str], SITES] = ("blocks",),
    patches: Annotated[
        bool, Option("Also classify every patch alone (needs all tokens).")
    ] = False,
    origin: Annotated[
        Provenance | None, Gather(Provenance, ("checkpoint", "trust"))
    ] = None,
    execution: Annotated[
        Execution, Offers("images seed jobs memory", dask="slabs")
    ] = DEFAULT,
) -> Table:
    """Return one row per store, site and metric; with `patches` also one per cell of the grid.

    The columns are `COLUMNS`. `token` is empty where tokens are pooled as the model does, and
    `patches` for the mean over the patches' own values; a single patch has `row` and `col`. Shares
    are from 0 to 1, ranks from 1; `low` and `high` are the 95 % interval over images. An image
    without a label counts for `lens_agreement` only.

    In memory are a slab of one site, and the logits of a few images' patches.

    Args:
        stores: stores that keep their model's classifier, or whose model can be built again; others
            are left out if at least one has it.
        metrics: some of `METRICS`; () for all that can be had.
        sites: patterns of site names.
        patches: also classify every patch alone.
        origin: where the weights are now, for stores that keep no classifier.
        execution: images, seed, threads and memory.

    Raises:
        MissingInput: no store has a classifier, or the tokens that it reads.
        SiteError: no such site, or none of the classifier's width.
        VitseeError: unknown metric, or labels that are not the classifier's classes.

    Examples:
        >>> import vitsee
        >>> table = vitsee.lens("vit.zarr", metrics="lens_top1")
        >>> list(zip(table["site"].tolist(), table["value"].round(2).tolist()))[-2:]
        [('blocks.4.out', 0.84), ('blocks.5.out', 0.88)]
    """
    for metric in metrics:
        if metric not in METRICS:
            raise VitseeError(
                f"no metric {metric!r}; metrics of lens: {', '.join(METRICS)}"
            )
    # Classifiers are read once: a model that is built again takes seconds.
    heads = Classifiers(origin or Provenance())
    readable_sites = partial(select_readable_sites, heads=heads, patches=patches)
    selected = select_each(stores, sites, readable_sites)
    if heads.origin.checkpoint and not heads.rebuilt:
        log.info("the checkpoint is not read: the stores keep their classifiers")
    lenses = [
        StoreLens(
            store=store,
            head=heads(store),
            rows=execution.rows(store),
            execution=execution,
            metrics=metrics,
            patches=patches,
        )
        for store in selected.stores
    ]
    # The progress bar counts images, once for each site that they are read at.
    n_site_images = 0
    for lens, sites_of_store in zip(lenses, selected.chosen, strict=True):
        n_site_images += lens.rows.n * len(sites_of_store)
    rows: list[dict[str, Any]] = []
    with counting(execution.progress, n_site_images, SITE_IMAGES):
        for lens, sites_of_store in zip(lenses, selected.chosen, strict=True):
            for site in sites_of_store:
                rows += lens.site_rows(site)
    notes = {
        "interval": {"lens_top1, lens_agreement": SHARES, "lens_rank": METHODS["mean"]},
        "head": {lens.store.label: lens.head.record() for lens in lenses},
        "chance": {lens.store.label: 1 / lens.n_classes for lens in lenses},
        "remarks": [lens.remark for lens in lenses if lens.remark],
        "seed": execution.seed,
        "images": {lens.store.label: lens.rows.describe() for lens in lenses},
        **selected.notes(),
    }
    return Table.from_rows(rows, COLUMNS, notes)


def headline(table: Table) -> list[Answer]:
    """Return how often the classifier is right on the first and the last block of each store.

    The answer adds from which block on it is nearly as often right as on the last. Without labels
    it is how often the classifier agrees with the model's output.
    """
    if "lens_top1" in table["metric"]:
        metric = "lens_top1"
        words = "right"
    elif "lens_agreement" in table["metric"]:
        metric = "lens_agreement"
        words = "as the model's output"
    else:
        return []
    answers = []
    # Rows without token, row and col are those of pooled tokens, from input to output.
    for store, rows in by_store(table, metric=metric, token=None, row=None):
        values = rows["value"].to_numpy()
        first_near = int((values >= NEARLY * values[-1]).argmax())
        answers.append(
            (
                store,
                f"share of images {words}: {first_and_last(rows)}; "
                f"{rows['site'][first_near]} is the first with {NEARLY:g} of the last",
            )
        )
    return answers


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Read every block through the model's own classifier.

    The final norm, pooling and linear layer that extract keeps are applied to each
    block's tokens (the logit lens; Vilas et al. 2023): how early the right class has
    the largest logit, how early the model's answer is there, and the label's rank.
    Nothing is trained. A head that a store does not keep (above 16 MB, or of attention
    pooling) is that of its model, built again.

      $ vitsee lens b16.zarr -o lens.csv --png lens.png
      $ vitsee lens b16.zarr deit.zarr --patches --png both.png > both.csv

    --patches: every patch alone through the same norm and classifier, as maps.
    """,
    needs=("sites",),
    reading=(
        "The model's own classifier applied to each block's tokens, as if the model "
        "ended there. A low value does not say that a block knows nothing of the class, "
        "only that it does not write it in the classifier's terms; probes tell the one "
        "from the other."
    ),
    source="nostalgebraist 2020; Vilas et al. 2023",
    columns=COLUMNS,
    meanings={"token": "empty: pooled as the model does; patches: mean over patches"},
    metrics=METRICS,
    run=run,
    plot=plot,
    headline=headline,
)
