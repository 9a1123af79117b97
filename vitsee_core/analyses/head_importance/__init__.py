"""Head importance: which attention heads does the model's answer need?

Each head alone has its output, before the projection, replaced: by its mean over images, token by
token, or by zero (Michel et al. 2019, who mask by zero), and the model runs on. Of the outputs, for
logits u of the model and v without the head's information:

- `top1_difference`: accuracy lost (below 0), with McNemar's exact test, where the labels are the
  head's classes; `agreement`: images with the same answer;
- `kl`: KL(softmax u || softmax v) in nats, mean over images.

Beside it `distance_px`, the head's mean attention distance, as in `vitsee attn-dist`; and over all
heads Spearman's rank correlation of each with it: `spearman_kl`, and `spearman_top1` of the loss of
accuracy. Both change with depth, so that `spearman_kl_within` and `spearman_top1_within` rank heads
within their block and count what is left.

A head is judged with all others in their place: two heads that do the same are both unimportant.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.head_importance.ablated_runs import AblatedRuns, Head, batches
from vitsee_core.attention.heads import StoredAttention, attention_blocks
from vitsee_core.declaration import Analysis
from vitsee_core.figures.panels import PanelGrid, colour_bar, note_count, stack
from vitsee_core.figures.plotting import GREY, styled
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
from vitsee_core.tables.columns import SITE, VALUES, site_columns
from vitsee_core.tables.glances import some_of
from vitsee_core.tables.headlines import Answer, extremes, measured, picked
from vitsee_core.tables.metrics import asked_for
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words
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
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_stores import Slab

log = logging.getLogger(__name__)

COLUMNS = (*SITE, "head", *VALUES, "p", "n_images", "n_only_base", "n_only_changed")
METRICS = ("top1_difference", "agreement", KL)
WAYS = ("mean", "zero")
DISTANCE = "distance_px"
SPEARMAN = (
    "Spearman's rank correlation with distance_px over heads, within: of ranks within blocks less "
    "their mean; 95 % interval over images by the jackknife of both"
)
CORRELATIONS = (-1.0, 1.0)


@analysis
def run(
    *stores: Store,
    sites: Annotated[Sequence[str], blocks_option()] = ("blocks",),
    by: Annotated[
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
    """One row per store, head and metric; and per store the rank correlations over heads.

    Columns: see `COLUMNS`; `std` is the jackknife's standard error. `distance_px` in pixels, `kl`
    in nats; rows about all heads have no site.

    Memory: the model, and a batch of 16 images.

    Args:
        stores: with attention summaries, of models with a classifier; others are left out where
            one can be used.
        origin: where weights and images are now.

    Raises:
        MissingInput: no store has attention, or a model with a classifier.
        SiteError: a pattern matches no block.
        VitseeError: weights or images that are gone, or others than the store's.
    """
    origin = origin or Provenance()
    wanted = asked_for(metrics or METRICS, METRICS, "head-importance")
    selected = select_each(stores, sites, attention_blocks)
    rows: list[Cells] = []
    notes: dict[str, Any] = {"remarks": [], WORD: {}, "images": {}}
    for store, blocks in selected.members:
        work = _Store(store, blocks, origin, execution)
        rows += [row for row in work.rows(by) if _belongs(row["metric"], wanted)]
        notes["remarks"] += [work.remark] if work.remark else []
        notes[WORD][store.label] = work.blocks.describe()
        notes["images"][store.label] = work.images.describe()
    notes |= {
        "interval": {
            **OUTPUT_INTERVALS,
            DISTANCE: OUTPUT_INTERVALS[KL],
            "spearman": SPEARMAN,
        },
        "p": PAIRED_TEST,
        "replaced_by": by,
        "seed": execution.seed,
        **selected.notes(),
    }
    return Table.from_rows(rows, COLUMNS, notes)


def at_a_glance(table: Table) -> Table:
    """The first store's heads, by one metric."""
    return some_of(table, store=1).filter(pl.col("metric") != "top1_difference")


def _belongs(metric: str, wanted: Sequence[str]) -> bool:
    """Whether a row is of these metrics: their own, a rank correlation of theirs, or a distance."""
    if metric.startswith("spearman_"):
        return metric.split("_")[1] in {name.split("_")[0] for name in wanted}
    return metric == DISTANCE or metric in wanted


class _Store:
    """The rows of one store."""

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
        mask = self.images.mask & store.valid
        self.numbers = np.flatnonzero(mask)
        self.blocks = Blocks.of(store, mask, execution.seed)
        self.mask = mask
        self.remark = ""

    def rows(self, by: str) -> list[Cells]:
        outputs = self._outputs(by)
        make = partial(
            BlockMeans, partial(_read_distances, self.runs.blocks), self.blocks
        )
        distances = self.execution.fold(self.store, make, self.images).result()
        places = {
            block.site: site_columns(self.store, block) for block in self.runs.blocks
        }
        found: list[Cells] = []
        for head in self.runs.heads:
            place = places[head[0]] | {"head": head[1]}
            own = [row for row in output_rows(outputs[head]) if row["metric"] != "top1"]
            own.append({"metric": DISTANCE, **distances[head].cells()})
            found += [place | row for row in own]
        return found + self._correlations(outputs, distances)

    def _outputs(self, by: str) -> dict[Head, dict[str, BlockMean]]:
        """Head -> means of what `compare_outputs` gives."""
        n = len(self.numbers)
        labels = self.store.samples.label.astype(np.int64)
        means = BlockMeans(None, self.blocks)
        n_passes = n * (1 + len(self.runs.heads) + (by == "mean"))
        log.info(
            "%s: %d heads, %d forward passes of an image on %s",
            *(self.store.label, len(self.runs.heads), n_passes, self.runs.device),
        )
        with (
            counting(self.execution.progress, n_passes, "forward passes") as progress,
            self.runs,
        ):
            held = (
                self.runs.means(self.numbers, progress.advance) if by == "mean" else None
            )
            changes = self.runs.changes(held)
            for part in batches(self.numbers):
                x = self.runs.pixels(part)
                whole = self.runs.logits(x)
                if part[0] == self.numbers[0]:
                    self.remark = why_not_own(self.store, self.mask, whole.shape[1])
                    self.remark = self.remark and f"no top1: {self.remark}"
                    log.info("%s", self.remark) if self.remark else None
                progress.advance(len(part))
                for head, change in changes.items():
                    without = self.runs.logits(x, change)
                    own = compare_outputs(
                        whole, without, None if self.remark else labels[part]
                    )
                    means.count(
                        {(head, metric): values for metric, values in own.items()}, part
                    )
                    progress.advance(len(part))
        found: dict[Head, dict[str, BlockMean]] = {}
        for (head, metric), mean in means.result().items():
            found.setdefault(head, {})[metric] = mean
        return found

    def _correlations(
        self,
        outputs: Mapping[Head, Mapping[str, BlockMean]],
        distances: Mapping[Head, BlockMean],
    ) -> list[Cells]:
        names = [block.site for block in self.runs.blocks]
        of = np.array([names.index(block) for block, _ in self.runs.heads])
        far = _stacked([distances[head] for head in self.runs.heads])
        asked = {KL: [outputs[head][KL] for head in self.runs.heads]}
        if RIGHT in outputs[self.runs.heads[0]]:
            asked["top1"] = [loss(outputs[head]) for head in self.runs.heads]
        place = site_columns(self.store, self.runs.blocks[0])
        place |= dict.fromkeys(("site", "block"), "") | {"depth": None, "rel_depth": None}
        found: list[Cells] = []
        for name, means in asked.items():
            for end, blocks in (("", None), ("_within", of)):
                value, *without = rank_correlation(_stacked(means), far, blocks)
                std, low, high = interval(
                    np.array(value), np.array(without), CORRELATIONS
                )
                numbers = {"value": value, "std": std, "low": low, "high": high}
                found.append(
                    place
                    | {"metric": f"spearman_{name}{end}", "spread": "jackknife"}
                    | {key: float(number) for key, number in numbers.items()}
                    | {"n_images": len(self.numbers), WORD: np.array(without)}
                )
        return found


def _stacked(means: Sequence[BlockMean]) -> Float:
    """(heads, 1 + blocks) the means, and those without each block of images."""
    return np.array([[mean.value, *mean.without] for mean in means])


def _read_distances(blocks: Sequence[StoredAttention], slab: Slab) -> dict[Head, Float]:
    """Head -> (images,) mean attention distance in pixels."""
    arrays = {
        group: slab.attention(DISTANCE, group) for group in {b.group for b in blocks}
    }
    return {
        (block.site, head): arrays[block.group][slab.valid][:, block.row, head].astype(
            np.float64
        )
        for block in blocks
        for head in range(block.n_heads)
    }


def rank_correlation(x: Float, y: Float, blocks: Integers | None = None) -> Float:
    """(replicates,) Spearman's correlation of x and y (heads, replicates); NaN where either is
    constant; heads with a NaN in any replicate are left out. blocks: (heads,) ranks are those
    within a block, less their mean: what blocks differ in does not count."""
    from scipy.stats import rankdata

    keep = np.isfinite(x).all(1) & np.isfinite(y).all(1)
    x = x[keep]
    y = y[keep]
    of = np.zeros(len(x), np.int64) if blocks is None else blocks[keep]
    if not len(x):
        return np.full(x.shape[1], np.nan)
    ranks = [np.zeros_like(x), np.zeros_like(y)]
    for block in np.unique(of):
        own = of == block
        for made, values in zip(ranks, (x, y), strict=True):
            made[own] = rankdata(values[own], axis=0)
            made[own] -= made[own].mean(0)
    a, b = ranks
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Float = (a * b).sum(0) / np.sqrt((a * a).sum(0) * (b * b).sum(0))
    return found


def headline(table: Table) -> list[Answer]:
    """The head that the answer needs most, and the rank correlation with distance."""
    answers = []
    for (store,), rows in picked(table, metric=KL).group_by("store", maintain_order=True):
        i = extremes(rows)[1]
        text = (
            f"KL is largest without head {int(rows['head'][i])} of {rows['block'][i]}: "
        )
        text += f"{measured(rows, i)} nats"
        for metric, words in (
            ("spearman_kl", ""),
            ("spearman_kl_within", ", within blocks "),
        ):
            own = picked(table, metric=metric, store=store)
            before = words or "; rank correlation with distance "
            text += f"{before}{measured(own)}" if len(own) else ""
        answers.append((str(store), text))
    return answers


SHOWN = {"kl": "spearman_kl", "top1_difference": "spearman_top1"}
LOST = "top-1 accuracy lost"


@styled
def plot(table: Table) -> Figure:
    """One panel per store and metric: what the answer loses without each head against the head's
    mean attention distance, with 95 % intervals, coloured by block; below the axis the rank
    correlations."""
    from matplotlib.ticker import MaxNLocator

    there = table.frame["metric"]
    metrics = [metric for metric in SHOWN if metric in there] or ["agreement"]
    stores = table.frame.partition_by("store", maintain_order=True)
    grid = PanelGrid(len(stores) * len(metrics), width=24, widest=36, height=17, most=2)
    figure, (box,) = stack(grid)
    every = iter(grid.axes(box))
    for rows in stores:
        for metric in metrics:
            axes = next(every)
            if len(own := rows.filter(metric=metric)):
                image = _draw(axes, own, rows)
                _explain(axes, rows, SHOWN.get(metric, ""))
                axes.set_title(shorten(rows["store"][0], 24))
                colour_bar(axes, image, "block", ticks=MaxNLocator(5, integer=True))
            else:
                axes.set_visible(False)
    return figure


def _draw(axes: Axes, own: pl.DataFrame, rows: pl.DataFrame) -> Any:
    far = rows.filter(metric="distance_px").select("site", "head", x="value")
    own = own.join(far, on=["site", "head"], how="left", maintain_order="left")
    metric = str(own["metric"][0])
    sign = -1 if metric == "top1_difference" else 1
    x, value, low, high = (
        own.select("x", pl.col("value", "low", "high") * sign).to_numpy().T
    )
    axes.axhline(0, color=GREY, linestyle=(0, (5, 3)), linewidth=1, zorder=1)
    axes.vlines(x, low, high, color=GREY, linewidth=0.7, zorder=2)
    image = axes.scatter(
        x, value, c=own["depth"].to_numpy(), cmap="viridis", s=14, zorder=3
    )
    axes.set_ylabel(metric_words(metric) if sign > 0 else LOST)
    note_count(axes, own)
    return image


def _explain(axes: Axes, rows: pl.DataFrame, metric: str) -> None:
    """The x axis with the rank correlations below it."""
    lines = [metric_words("distance_px")]
    for name, words in (
        (metric, "rank correlation"),
        (f"{metric}_within", "within blocks"),
    ):
        known = rows.filter(pl.col("value").is_not_null(), metric=name)
        for value, low, high in known.select("value", "low", "high").rows()[:1]:
            spread = "" if low is None else f" ({low:.2f} to {high:.2f})"
            lines.append(f"{words} {value:.2f}{spread}")
    axes.set_xlabel("\n".join(lines))


ANALYSIS = Analysis(
    module=__name__,
    question=ATTENTION,
    help="""
    Measure which attention heads the model's answer needs.

    Each head's output is replaced by its mean over images (or by zero) while the others stay
    (Michel et al. 2019): accuracy lost, with McNemar's exact test, and KL(model || without the
    head). Beside it how far the head looks, and the rank correlation of both. The model runs
    again, once for each head: of ViT-B 146 forward passes of every image, so take few.

      $ vitsee extract vit_base_patch16_224 --data val --images 500 -o b16.zarr
      $ vitsee head-importance b16.zarr --images 200 -o heads.csv --png heads.png
      $ vitsee head-importance b16.zarr --sites blocks.0,blocks.11 --by zero > ends.csv

    Needs the model's weights and the images again, where extract read them.
    """,
    needs=("attention", "heads", "images"),
    reading=(
        "Every dot is a head: how far it attends on average against what the answer loses "
        "without it, coloured by its block. Most heads cost little alone, because others do the "
        "same; a rank correlation says whether far or near heads matter more, and within blocks "
        "whether that is more than a matter of depth. Bars are 95 % intervals over images."
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
