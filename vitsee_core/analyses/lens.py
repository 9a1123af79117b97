"""Lens: from which block on does the model's own classifier know the class?

The head that turns the last block's tokens into logits (norm, pooling, linear layer: as stores
keep it, see `models.weights`, else the model's own, built again) is applied to the tokens of each
block, as if the model ended there (the logit lens, nostalgebraist 2020; for ViTs Vilas et al.
2023). Nothing is trained; a low value says that a block does not write in the classifier's basis,
not that it does not know the class, which is what probes measure.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.declaration import Analysis
from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import (
    PanelGrid,
    bars_at_ends,
    count,
    evenly,
    map_axes,
    map_title,
    name_part,
    small_maps,
    stack,
)
from vitsee_core.figures.patch_sheets import place_values
from vitsee_core.figures.plotting import GREY, plain_log_ticks, styled
from vitsee_core.models.provenance import Classifiers, Provenance
from vitsee_core.models.weights import Classifier
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
from vitsee_core.runtime.store_selection import select_each, sites_of
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.statistics.image_statistics import METHODS, block_labels, statistic
from vitsee_core.statistics.jackknife import Cells, cells_of, mean_cells
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.statistics.shares import as_share
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.headlines import Answer, by_store, first_and_last
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words, site_words
from vitsee_core.truth.labels.labelled_rows import why_not_own
from vitsee_core.types import Float, Float32, Integers, pl
from vitsee_stores import Store
from vitsee_stores.errors import NotOffered, SiteError, VitseeError
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_stores import SiteSpec, Slab

log = logging.getLogger(__name__)


METRICS = ("lens_top1", "lens_agreement", "lens_rank")
OF_LABELS = ("lens_top1", "lens_rank")
NEARLY = 0.9
COLUMNS = (
    *(*SITE, "token", "row", "col"),
    *("metric", "value", "std", "low", "high", "n_images"),
)
IMAGES_AT_ONCE = 4  # whose patches have their logits in float64 at a time


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
    """One row per store, site and metric; with `patches` also one per cell of the grid.

    Columns: see `COLUMNS`; `token` is empty for the tokens pooled as the model does, `patches` for
    the mean over patches of what is said of each, which have `row` and `col`. Shares from 0 to 1,
    ranks from 1; `low`, `high` the 95 % interval over images. An image without a label counts for
    `lens_agreement` only.

    Memory: a slab of one site, and the logits of a few images' patches.

    Args:
        stores: that keep their model's classifier, or whose model can be built again; others are
            left out where one has it.
        origin: where the weights are now, of stores that keep no classifier.

    Raises:
        MissingInput: no store has a classifier, or the tokens that it reads.
        SiteError: no such site, or none of the classifier's width.
        VitseeError: unknown metric, or labels that are not the classifier's classes.
    """
    for metric in metrics:
        if metric not in METRICS:
            raise VitseeError(
                f"no metric {metric!r}; metrics of lens: {', '.join(METRICS)}"
            )
    heads = Classifiers(origin or Provenance())
    selected = select_each(stores, sites, partial(_sites, heads=heads, patches=patches))
    if heads.origin.checkpoint and not heads.rebuilt:
        log.info("the checkpoint is not read: the stores keep their classifiers")
    picked = [execution.rows(store) for store in selected.stores]
    works = [
        _Store(store, heads(store), rows, execution, metrics, patches)
        for store, rows in zip(selected.stores, picked, strict=True)
    ]
    rows: list[dict[str, Any]] = []
    total = sum(r.n * len(own) for r, own in zip(picked, selected.chosen, strict=True))
    with counting(execution.progress, total, SITE_IMAGES):
        for work, own in zip(works, selected.chosen, strict=True):
            for site in own:
                rows += work(site)
    notes = {
        "interval": {"lens_top1, lens_agreement": SHARES, "lens_rank": METHODS["mean"]},
        "head": {work.store.label: work.head.record() for work in works},
        "chance": {work.store.label: 1 / work.n_classes for work in works},
        "remarks": [work.remark for work in works if work.remark],
        "seed": execution.seed,
        "images": {
            w.store.label: r.describe() for w, r in zip(works, picked, strict=True)
        },
        **selected.notes(),
    }
    return Table.from_rows(rows, COLUMNS, notes)


def _sites(
    store: Store, patterns: Sequence[str], heads: Classifiers, patches: bool
) -> list[SiteSpec]:
    """The sites that the store's classifier can read.

    Raises:
        MissingInput: the store has no classifier, or not the tokens that it reads.
        NotOffered: the model has none that can be read, or none of its blocks is as wide.
        SiteError: no selected site is as wide.
    """
    head = heads(store)
    if store.plan.clip is not None and store.plan.clip.by_frame:
        raise NotOffered(
            f"the classifier of {store.label} reads one frame, and the store holds clips frame by "
            "frame; expected a store of the frames, extracted as images"
        )
    chosen = sites_of(store, patterns)
    readable = _readable(store, head, chosen, patches)
    if not readable:
        inner = [site for site in store.sites.values() if "head" not in site.groups]
        raise (SiteError if _readable(store, head, inner, patches) else NotOffered)(
            f"the classifier of {store.label} reads {head.pool} of {head.width} channels: none of "
            f"{abbreviate([site.name for site in chosen])} has these"
        )
    if len(readable) < len(chosen):
        left = [site.name for site in chosen if site not in readable]
        log.info("%s: the classifier cannot read %s", store.label, abbreviate(left))
    return readable


def _readable(
    store: Store, head: Classifier, sites: Iterable[SiteSpec], patches: bool
) -> list[SiteSpec]:
    readable = []
    for site in sites:
        layout = store.site(site.name).layout
        if "head" in site.groups and site.name != head.site:  # has been through the norm
            continue
        if (
            layout is None
            or site.dim != head.width
            or (head.pool == "cls" and layout.cls is None)
        ):
            continue
        if patches and layout.grid is None:
            continue
        if patches or head.pooled_kind is None:
            store.acts(site.name)
        readable.append(site)
    return readable


class _Store:
    """The rows of one store's sites."""

    def __init__(
        self,
        store: Store,
        head: Classifier,
        rows: Rows,
        execution: Execution,
        metrics: Sequence[str],
        patches: bool,
    ) -> None:
        self.store = store
        self.rows = rows
        self.execution = execution
        self.patches = patches
        self.head = head
        self.n_classes = head.n_classes
        mask = rows.mask & store.valid
        self.labels = block_labels(
            int(mask.sum()), None if store.shuffled else execution.seed
        )
        self.remark = why_not_own(store, mask, self.n_classes)
        asked = {*metrics} & {*OF_LABELS}
        if self.remark and asked:
            raise VitseeError(f"{self.remark}: no {', '.join(sorted(asked))}")
        if self.remark:
            log.info("%s", self.remark)
        have = [m for m in METRICS if not (self.remark and m in OF_LABELS)]
        if not {"logits", self.head.site} & {*store.sites}:
            have.remove("lens_agreement")
        self.metrics = [metric for metric in have if metric in (metrics or METRICS)]

    def __call__(self, site: SiteSpec) -> list[dict[str, Any]]:
        spec = self.store.site(site.name)
        work = _ReadLogits(
            spec.name, self.head, self.patches, "lens_agreement" in self.metrics
        )
        use = self.execution
        options: dict[str, Any] = {
            "jobs": use.jobs,
            "map": use.map,
            "progress": use.progress,
        }
        parts = list(each_slab(self.store, work, rows=self.rows, **options))
        place = site_columns(self.store, site)
        rows: list[Cells] = []
        for metric in self.metrics:
            values = np.concatenate([part[metric] for part in parts])
            rows.append({"metric": metric} | mean_cells(values[:, 0], self.labels))
            if not self.patches:
                continue
            of_cells = values[:, 1:]
            whole = mean_cells(of_cells.mean(1), self.labels)
            rows.append({"metric": metric, "token": "patches"} | whole)
            found = statistic(
                np.ascontiguousarray(of_cells.T), "mean", self.labels
            ).estimates()
            assert spec.layout is not None and spec.layout.grid is not None
            cols = spec.layout.grid[1]
            rows += [
                {"metric": metric, "row": t // cols, "col": t % cols} | cells_of(found, t)
                for t in range(of_cells.shape[1])
            ]
        return [
            place | (row if row["metric"] == "lens_rank" else as_share(row))
            for row in rows
        ]


@dataclass(frozen=True)
class _ReadLogits:
    """The work on one slab: metric -> (images, 1 + patches), the pooled tokens first; NaN for
    images without a label."""

    site: str
    head: Classifier
    patches: bool
    agreement: bool

    def __call__(self, slab: Slab) -> dict[str, Float]:
        layout = slab.store.site(self.site).layout
        assert layout is not None
        labels = slab.store.samples.label[slab.rows][slab.valid].astype(np.int64)
        output = self._output(slab)
        with_tokens = self.patches or self.head.pooled_kind is None
        tokens = slab.acts(self.site)[slab.valid] if with_tokens else None
        logits = self._logits(slab, self.site, tokens)
        found = [_scores(logits[:, np.newaxis], labels, output)]
        if self.patches:
            assert tokens is not None
            body = tokens[:, layout.n_prefix :]
            parts = [
                _scores(
                    self.head.of_tokens(body[i : i + n]),
                    labels[i : i + n],
                    output[i : i + n],
                )
                for n in (IMAGES_AT_ONCE,)
                for i in range(0, len(body), n)
            ]
            found.append(
                {m: np.concatenate([part[m] for part in parts]) for m in METRICS}
            )
        return {
            metric: np.concatenate([one[metric] for one in found], 1)
            for metric in METRICS
        }

    def _output(self, slab: Slab) -> Integers:
        """(images,) the class that the model predicts."""
        if not self.agreement:
            return np.zeros(int(slab.valid.sum()), np.int64)
        if "logits" in slab.store.sites:
            return slab.vectors("logits")[slab.valid].argmax(1)
        return self._logits(slab, self.head.site).argmax(1)

    def _logits(self, slab: Slab, site: str, tokens: Float32 | None = None) -> Float:
        """(images, classes) of a site's tokens, which are read unless given."""
        kind = self.head.pooled_kind
        layout = slab.store.site(site).layout
        assert layout is not None
        if kind is not None:
            return self.head.of_tokens(slab.pooled(site, kind)[slab.valid])
        return self.head.logits(
            slab.acts(site)[slab.valid] if tokens is None else tokens, layout
        )


def _scores(logits: Float, labels: Integers, output: Integers) -> dict[str, Float]:
    """Metric -> (images, places) of logits (images, places, classes). Raises VitseeError: a logit
    is not finite."""
    if not np.isfinite(logits).all():
        raise VitseeError(
            "the classifier gives logits that are not finite (see vitsee validate)"
        )
    first = logits.argmax(-1)
    known = (labels >= 0)[:, np.newaxis] & (labels < logits.shape[-1])[:, np.newaxis]
    at = np.clip(labels, 0, logits.shape[-1] - 1)[:, np.newaxis, np.newaxis]
    own = np.take_along_axis(logits, np.broadcast_to(at, (*logits.shape[:2], 1)), -1)
    rank = 1 + (logits > own).sum(-1)
    return {
        "lens_top1": np.where(known, first == labels[:, np.newaxis], np.nan),
        "lens_agreement": (first == output[:, np.newaxis]).astype(np.float64),
        "lens_rank": np.where(known, rank, np.nan),
    }


def headline(table: Table) -> list[Answer]:
    """How often the classifier is right on the first and the last block, and from where on nearly
    as often as on the last; without labels, how often it agrees with the model's output."""
    shares = {"lens_top1": "right", "lens_agreement": "as the model's output"}
    metric = next((m for m in shares if m in table["metric"]), None)
    answers = []
    for store, rows in (
        by_store(table, metric=metric, token=None, row=None) if metric else []
    ):
        values = rows["value"].to_numpy()
        i = int((values >= NEARLY * values[-1]).argmax())
        text = f"share of images {shares[str(metric)]}: {first_and_last(rows)}"
        first = f"{rows['site'][i]} is the first with {NEARLY:g} of the last"
        answers.append((store, f"{text}; {first}"))
    return answers


TILES = 7


@styled
def plot(table: Table) -> Figure:
    """One panel per metric over depth, one curve per store with the 95 % interval as a band, and
    dashed what patches say alone; below, where the table has single patches, for each store the
    share of images in which a patch alone has the right class (or the output's), at up to seven
    depths, on one scale of colours."""
    rows = table.frame
    metrics = [metric for metric in METRICS if metric in rows["metric"]]
    cells = rows.filter(pl.col("row").is_not_null())
    mapped = next((m for m in METRICS if m in cells["metric"] and m != "lens_rank"), "")
    stores = cells.filter(metric=mapped).partition_by("store", maintain_order=True)
    # A grid of one cell is no map.
    stores = [own for own in stores if own.select("row", "col").n_unique() > 1]
    shown = [evenly([*own["site"].unique(maintain_order=True)], TILES) for own in stores]
    curves = CurveGrid.of(len(metrics), rows)
    maps = [small_maps(len(sites), 2) for sites in shown]
    figure, parts = stack(curves, *maps)
    pooled = rows.filter(pl.col("row").is_null(), pl.col("token").is_null())
    panels = curves.panels(parts[0], of_metrics(pooled, metrics))
    for axes, metric, own in panels:
        draw_depth_curves(axes, own, among=pooled)
        of_stores = pl.col("store").is_in([*own["store"]])
        _draw_patches(
            axes, rows.filter(of_stores, metric=metric, token="patches"), pooled
        )
        if metric == "lens_rank":
            axes.set_yscale("log")
            axes.set_ylim(0.9, 1.2 * max(2.0, axes.dataLim.y1))
            plain_log_ticks(axes.yaxis)
    curves.finish(panels)
    add_curve_legend(figure, [axes for axes, *_ in panels])
    tops = (own["value"].fill_null(0).to_numpy().max(initial=0) for own in stores)
    top = max(tops, default=0) or 1.0
    for part, grid, own, sites in zip(parts[1:], maps, stores, shown, strict=True):
        who = f"{shorten(own['store'][0], 28)}: {metric_words(mapped)}"
        name_part(part, f"{who}, by patch (n = {count(own)})")
        _draw_maps(grid, part, own, sites, top)
    return figure


def _draw_patches(axes: Axes, rows: pl.DataFrame, among: pl.DataFrame) -> None:
    from vitsee_core.figures.depth_curves import draw_marks

    if len(rows):
        look: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.1}
        draw_marks(axes, rows, among, "value", look)
        axes.plot([], [], color=GREY, **look, label="patches alone")


def _draw_maps(
    grid: PanelGrid, part: Any, rows: pl.DataFrame, sites: list[str], top: Any
) -> None:
    panels = grid.axes(part)
    for axes, site in zip(panels, sites, strict=True):
        own = rows.filter(site=site)
        shape = [largest + 1 for largest in own.select("row", "col").max().row(0)]
        image = axes.imshow(place_values(own, shape), vmin=0, vmax=top, origin="upper")
        map_axes(axes)
        map_title(axes, grid, site_words(site))
    bars_at_ends(grid, panels, image, "share of images")


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Read every block through the model's own classifier.

    The final norm, pooling and linear layer that extract keeps are applied to each block's
    tokens (the logit lens; Vilas et al. 2023): how early the right class has the largest logit,
    how early the model's answer is there, and the label's rank. Nothing is trained. A head that
    a store does not keep (above 16 MB, or of attention pooling) is that of its model, built
    again.

      $ vitsee lens b16.zarr -o lens.csv --png lens.png
      $ vitsee lens b16.zarr deit.zarr --patches --png both.png > both.csv

    --patches: every patch alone through the same norm and classifier, as maps.
    """,
    needs=("sites",),
    reading=(
        "The model's own classifier applied to each block's tokens, as if the model ended "
        "there. A low value does not say that a block knows nothing of the class, only that it "
        "does not write it in the classifier's terms; probes tell the one from the other."
    ),
    source="nostalgebraist 2020; Vilas et al. 2023",
    columns=COLUMNS,
    meanings={"token": "empty: pooled as the model does; patches: mean over patches"},
    metrics=METRICS,
    run=run,
    plot=plot,
    headline=headline,
)
