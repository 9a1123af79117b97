"""Head importance: which attention heads does the model's answer need?

The output of one head at a time, before the projection, is replaced, and the model runs on. The
replacement is the head's mean over images, token by token, or zero (as Michel et al. 2019 mask).
The outputs are compared by these metrics, with logits u of the model and v without the head:

- `top1_difference`: accuracy lost (below 0), with McNemar's exact test, if the labels are the
  classifier's classes; `agreement`: the share of images with the same answer;
- `kl`: KL(softmax u || softmax v) in nats, mean over images.

The table also has `distance_px`, the head's mean attention distance as in `vitsee attn-dist`, and
Spearman's rank correlations with it over all heads: `spearman_kl` of KL, and `spearman_top1` of the
loss of accuracy. Importance and distance both change with depth; `spearman_kl_within` and
`spearman_top1_within` therefore rank heads within their block only.

Each head is judged while all others work: two heads that do the same thing both seem unimportant.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.head_importance.ablated_runs import AblatedRuns, Head, batches
from vitsee_core.analyses.head_importance.figure import plot
from vitsee_core.attention.heads import StoredAttention, attention_blocks
from vitsee_core.declaration import Analysis
from vitsee_core.models.provenance import Provenance
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import (
    ATTENTION,
    Gather,
    Offers,
    Option,
    blocks_option,
    metrics_option,
)
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.store_selection import select_each
from vitsee_core.statistics.jackknife import Blocks, Cells, interval
from vitsee_core.statistics.shares import PAIRED_TEST
from vitsee_core.tables.columns import REPLICATES, SITE, VALUES, site_columns
from vitsee_core.tables.glances import select_evenly
from vitsee_core.tables.headlines import Answer, extremes, measured, picked
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.changed_outputs import (
    KL,
    OUTPUT_INTERVALS,
    RIGHT,
    BlockMean,
    BlockMeans,
    compare_outputs,
    loss,
    output_rows,
)
from vitsee_core.truth.labels.labelled_rows import why_not_own
from vitsee_core.types import Float, Integers, pl
from vitsee_stores import Store

if TYPE_CHECKING:
    from vitsee_stores import Slab

__all__ = ["COLUMNS", "METRICS", "WAYS", "plot", "run"]

log = logging.getLogger(__name__)

COLUMNS = (*SITE, "head", *VALUES, "p", "n_images", "n_only_base", "n_only_changed")
METRICS = ("top1_difference", "agreement", KL)
WAYS = ("mean", "zero")
DISTANCE = "distance_px"
# How the intervals of the correlations are made, for the sidecar.
SPEARMAN = (
    "Spearman's rank correlation with distance_px over heads, within: of ranks within "
    "blocks less their mean; 95 % interval over images by the jackknife of both"
)
CORRELATIONS = (-1.0, 1.0)


@analysis
def run(
    *stores: Store,
    sites: Annotated[Sequence[str], blocks_option()] = ("blocks",),
    ablation: Annotated[
        str,
        Option(
            "What takes the place of a head's output: its mean, or zero.", choices=WAYS
        ),
    ] = "mean",
    metrics: Annotated[
        Sequence[str],
        metrics_option(
            METRICS,
            "all that can be had",
            "What the answer loses; beside it always the head's distance, and the rank "
            "correlations of what is asked for. top1_difference needs labels.",
        ),
    ] = (),
    origin: Annotated[Provenance | None, Gather(Provenance)] = None,
    execution: Annotated[Execution, Offers("images seed device")] = DEFAULT,
) -> Table:
    """Return a table with one row per store, head and metric, and the rank correlations over heads.

    The columns are `COLUMNS`. `std` is the jackknife's standard error, `distance_px` is in pixels
    and `kl` in nats. Rows about all heads have no site.

    Memory: the model, and a batch of 16 images.

    Args:
        stores: stores with attention summaries, of models with a classifier. Others are left out,
            as long as one can be used.
        sites: patterns of the blocks whose heads are ablated.
        ablation: "mean" or "zero".
        metrics: names out of `METRICS`; empty for all that the stores allow.
        origin: where the model's weights and the images are now.
        execution: images, seed and device.

    Raises:
        MissingInput: no store has attention and a model with a classifier.
        SiteError: a pattern matches no block.
        VitseeError: weights or images are gone, or are not those of the store.

    Examples:
        >>> import vitsee
        >>> table = vitsee.head_importance("vit.zarr", sites="blocks.-1", images=20)
        >>> ablated = table.filter(metric="kl")
        >>> len(ablated)
        4
    """
    origin = origin or Provenance()
    row_metrics = select_metrics(metrics or METRICS, METRICS, "head-importance")
    selection = select_each(stores, sites, attention_blocks)
    rows: list[Cells] = []
    notes: dict[str, Any] = {"remarks": [], REPLICATES: {}, "images": {}}
    for store, blocks in selection.members:
        work = StoreAblations(store, blocks, origin, execution)
        for row in work.rows(ablation):
            if _is_requested(row["metric"], row_metrics):
                rows.append(row)
        if work.remark:
            notes["remarks"].append(work.remark)
        notes[REPLICATES][store.label] = work.image_blocks.describe()
        notes["images"][store.label] = work.images.describe()
    notes |= {
        "interval": {
            **OUTPUT_INTERVALS,
            DISTANCE: OUTPUT_INTERVALS[KL],
            "spearman": SPEARMAN,
        },
        "p": PAIRED_TEST,
        "replaced_by": ablation,
        "seed": execution.seed,
        **selection.notes(),
    }
    return Table.from_rows(rows, COLUMNS, notes)


def _is_requested(metric: str, row_metrics: Sequence[str]) -> bool:
    """Return whether rows of a metric belong into the table: always those of the distance."""
    if metric == DISTANCE:
        return True
    if metric.startswith("spearman_"):
        # `spearman_kl_within` belongs to "kl", `spearman_top1` to "top1_difference".
        importance = metric.split("_")[1]
        return importance in {name.split("_")[0] for name in row_metrics}
    return metric in row_metrics


def at_a_glance(table: Table) -> Table:
    """Return the first store's heads, by one metric."""
    return select_evenly(table, store=1).filter(pl.col("metric") != "top1_difference")


class StoreAblations:
    """The work on one store: its model runs without each head, and rows are made of the outputs.

    Attributes:
        runs: the model, ready to run with single heads ablated.
        images: the chosen rows of the store.
        row_indices: (images,) indices of the rows that are chosen and valid.
        image_blocks: the blocks of images that the jackknife leaves out one by one.
        remark: why there is no `top1_difference`, "" if there is; known after `rows`.
    """

    def __init__(
        self,
        store: Store,
        blocks: Sequence[StoredAttention],
        origin: Provenance,
        execution: Execution,
    ) -> None:
        self.store = store
        self.execution = execution
        self.runs = AblatedRuns(store, blocks, origin, execution.device)
        self.images = execution.rows(store)
        self.mask = self.images.mask & store.valid
        self.row_indices = np.flatnonzero(self.mask)
        self.image_blocks = Blocks.of(store, self.mask, execution.seed)
        self.remark = ""

    def rows(self, ablation: str) -> list[Cells]:
        """Return the rows about each head, then those about all heads.

        Args:
            ablation: what replaces a head's output, "mean" or "zero".
        """
        outputs = self._compare_without_each_head(ablation)
        read_distances = partial(_read_distances, self.runs.blocks)
        distances = self.execution.fold(
            self.store,
            partial(BlockMeans, read_distances, self.image_blocks),
            self.images,
        ).result()
        block_columns = {
            block.site: site_columns(self.store, block) for block in self.runs.blocks
        }
        rows: list[Cells] = []
        for head in self.runs.heads:
            block, number = head
            about_head = {**block_columns[block], "head": number}
            for cells in output_rows(outputs[head]):
                # Each head's `top1` is the same accuracy as `top1_difference`, said otherwise.
                if cells["metric"] != "top1":
                    rows.append({**about_head, **cells})
            rows.append({**about_head, "metric": DISTANCE, **distances[head].cells()})
        return rows + self._correlation_rows(outputs, distances)

    def _compare_without_each_head(
        self, ablation: str
    ) -> dict[Head, dict[str, BlockMean]]:
        """Run the model whole and without each head; return head -> metric -> mean over images.

        The metrics are those of `compare_outputs`. Sets `remark`.
        """
        labels = self.store.samples.label.astype(np.int64)
        means = BlockMeans(None, self.image_blocks)
        # One pass of the whole model, one without each head, and one to take the heads' means.
        n_passes_per_image = 1 + len(self.runs.heads) + (ablation == "mean")
        n_passes = len(self.row_indices) * n_passes_per_image
        # Said before the work, which may take hours.
        log.info(
            "%s: %d heads, %d forward passes of an image on %s",
            self.store.label,
            len(self.runs.heads),
            n_passes,
            self.runs.device,
        )
        with (
            counting(self.execution.progress, n_passes, "forward passes") as progress,
            self.runs,
        ):
            head_means = None
            if ablation == "mean":
                head_means = self.runs.means(self.row_indices, progress.advance)
            changes = self.runs.changes(head_means)
            # All heads of a batch before the next batch: its images are decoded once.
            for batch in batches(self.row_indices):
                x = self.runs.pixels(batch)
                base_logits = self.runs.logits(x)
                if batch[0] == self.row_indices[0]:
                    # The number of classes is known only now.
                    reason = why_not_own(self.store, self.mask, base_logits.shape[1])
                    if reason:
                        self.remark = f"no top1: {reason}"
                        log.info("%s", self.remark)
                progress.advance(len(batch))
                batch_labels = None if self.remark else labels[batch]
                for head, change in changes.items():
                    changed_logits = self.runs.logits(x, change)
                    compared = compare_outputs(base_logits, changed_logits, batch_labels)
                    # Metric -> (images,), counted by head and metric.
                    by_key = {(head, name): values for name, values in compared.items()}
                    means.count(by_key, batch)
                    progress.advance(len(batch))
        by_head: dict[Head, dict[str, BlockMean]] = {}
        for (head, metric), mean in means.result().items():
            by_head.setdefault(head, {})[metric] = mean
        return by_head

    def _correlation_rows(
        self,
        outputs: Mapping[Head, Mapping[str, BlockMean]],
        distances: Mapping[Head, BlockMean],
    ) -> list[Cells]:
        """Return the rows about the rank correlations of importance with distance over heads."""
        heads = self.runs.heads
        # Which block each head is in, for the ranks within blocks.
        block_names = [block.site for block in self.runs.blocks]
        block_indices = np.array([block_names.index(block) for block, _ in heads])
        distance = _with_replicates([distances[head] for head in heads])
        importances = {KL: [outputs[head][KL] for head in heads]}
        if RIGHT in outputs[heads[0]]:
            importances["top1"] = [loss(outputs[head]) for head in heads]
        # A row about all heads has the store's columns, and no layer.
        about_store = site_columns(self.store, self.runs.blocks[0])
        about_store.update(site="", block="", depth=None, rel_depth=None)
        rows: list[Cells] = []
        for name, means in importances.items():
            importance = _with_replicates(means)
            correlations = {
                f"spearman_{name}": rank_correlation(importance, distance),
                f"spearman_{name}_within": rank_correlation(
                    importance, distance, block_indices
                ),
            }
            for metric, correlation in correlations.items():
                # The first is over all images, the others are without each block of images.
                value = correlation[0]
                replicates = correlation[1:]
                std, low, high = interval(np.array(value), replicates, CORRELATIONS)
                rows.append(
                    {
                        **about_store,
                        "metric": metric,
                        "spread": "jackknife",
                        "value": float(value),
                        "std": float(std),
                        "low": float(low),
                        "high": float(high),
                        "n_images": len(self.row_indices),
                        REPLICATES: replicates,
                    }
                )
        return rows


def _with_replicates(means: Sequence[BlockMean]) -> Float:
    """Return (heads, 1 + blocks) each head's mean, then its means without each block of images."""
    return np.array([[mean.value, *mean.without] for mean in means])


def _read_distances(blocks: Sequence[StoredAttention], slab: Slab) -> dict[Head, Float]:
    """Return head -> (images,) mean attention distance in pixels, for the slab's valid images."""
    groups = {block.group for block in blocks}
    # (images, blocks, heads) for each group of blocks that are stored in one array
    arrays = {group: slab.attention(DISTANCE, group)[slab.valid] for group in groups}
    distances = {}
    for block in blocks:
        # (images, heads); a block may have fewer heads than its array has columns.
        block_distances = arrays[block.group][:, block.row].astype(np.float64)
        for head in range(block.n_heads):
            distances[block.site, head] = block_distances[:, head]
    return distances


def rank_correlation(x: Float, y: Float, blocks: Integers | None = None) -> Float:
    """Return Spearman's rank correlation over heads for each replicate, (replicates,).

    Heads with a NaN in any replicate are left out. The correlation is NaN where x or y is constant.

    Args:
        x: a number of each head, (heads, replicates).
        y: another number of each head, (heads, replicates).
        blocks: (heads,) each head's block. If given, heads are ranked within their block and the
            block's mean rank is taken off, so that differences between blocks do not count.
    """
    from scipy.stats import rankdata

    complete = np.isfinite(x).all(1) & np.isfinite(y).all(1)
    x = x[complete]
    y = y[complete]
    if len(x) == 0:
        return np.full(x.shape[1], np.nan)
    # Without blocks all heads are one block: the same formula gives the plain correlation.
    blocks = np.zeros(len(x), np.int64) if blocks is None else blocks[complete]
    # Ranks within each block less their mean, ties at their mean rank. (heads, replicates)
    x_ranks = np.zeros_like(x)
    y_ranks = np.zeros_like(y)
    for block in np.unique(blocks):
        in_block = blocks == block
        x_block = rankdata(x[in_block], axis=0)
        y_block = rankdata(y[in_block], axis=0)
        x_ranks[in_block] = x_block - x_block.mean(0)
        y_ranks[in_block] = y_block - y_block.mean(0)
    # Pearson's correlation of the centred ranks.
    covariance = (x_ranks * y_ranks).sum(0)
    scale = np.sqrt((x_ranks * x_ranks).sum(0) * (y_ranks * y_ranks).sum(0))
    # Constant ranks, of a single head or of equal values, have no correlation: 0 / 0.
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation: Float = covariance / scale
    return correlation


def headline(table: Table) -> list[Answer]:
    """Return per store the head that the answer needs most, and the correlation with distance."""
    answers = []
    for (store,), rows in picked(table, metric=KL).group_by("store", maintain_order=True):
        i = extremes(rows)[1]
        text = (
            f"KL is largest without head {int(rows['head'][i])} of {rows['block'][i]}: "
        )
        text += f"{measured(rows, i)} nats"
        overall = picked(table, metric="spearman_kl", store=store)
        if len(overall):
            text += f"; rank correlation with distance {measured(overall)}"
        within = picked(table, metric="spearman_kl_within", store=store)
        if len(within):
            text += f", within blocks {measured(within)}"
        answers.append((str(store), text))
    return answers


ANALYSIS = Analysis(
    module=__name__,
    question=ATTENTION,
    help="""
    Measure which attention heads the model's answer needs.

    Each head's output is replaced by its mean over images (or by zero) while the others
    stay (Michel et al. 2019): accuracy lost, with McNemar's exact test, and KL(model ||
    without the head). Beside it how far the head looks, and the rank correlation of both.
    The model runs again, once for each head: of ViT-B 146 forward passes of every image,
    so take few.

      $ vitsee extract vit_base_patch16_224 --data val --images 500 -o b16.zarr
      $ vitsee head-importance b16.zarr --images 200 -o heads.csv --png heads.png
      $ vitsee head-importance b16.zarr --sites blocks.0,blocks.11 --ablation zero > ends.csv

    Needs the model's weights and the images again, where extract read them.
    """,
    needs=("attention", "heads", "images"),
    reading=(
        "Every dot is a head: how far it attends on average against what the answer "
        "loses without it, coloured by its block. Most heads cost little alone, "
        "because others do the same; a rank correlation says whether far or near heads "
        "matter more, and within blocks whether that is more than a matter of depth. "
        "Bars are 95 % intervals over images."
    ),
    source="Michel et al. 2019",
    columns=COLUMNS,
    meanings={
        "head": "empty in the rows about all heads",
        "p": "of top1_difference: McNemar's exact test",
        "n_only_base": "images that only the whole model has right",
        "n_only_changed": "that only the model without the head has right",
    },
    metrics=(*METRICS, DISTANCE, "spearman_*"),
    run=run,
    plot=plot,
    headline=headline,
    at_a_glance=at_a_glance,
    glance_metric="",
)
