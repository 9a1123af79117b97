"""A model's own classifier applied to the tokens of one store's sites."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.models.provenance import Classifiers
from vitsee_core.models.weights import Classifier
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.store_selection import sites_of
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.statistics.image_statistics import block_labels, statistic
from vitsee_core.statistics.jackknife import Cells, cells_of, mean_cells
from vitsee_core.statistics.shares import as_share
from vitsee_core.tables.columns import site_columns
from vitsee_core.truth.labels.labelled_rows import why_not_own
from vitsee_core.types import Float, Float32, Integers
from vitsee_stores import Store
from vitsee_stores.errors import NotOffered, SiteError, VitseeError
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Slab


log = logging.getLogger(__name__)

METRICS = ("lens_top1", "lens_agreement", "lens_rank")
LABEL_METRICS = ("lens_top1", "lens_rank")  # those that need labels

# Images whose patches have their logits in memory at a time: in float64 those of 196 patches and
# 1000 classes take 1.6 MB.
IMAGES_AT_ONCE = 4


def select_readable_sites(
    store: Store, patterns: Sequence[str], heads: Classifiers, patches: bool
) -> list[SiteSpec]:
    """Return the selected sites that the store's classifier can read.

    Args:
        store: the store.
        patterns: patterns of site names.
        heads: returns the classifier of a store.
        patches: whether single patches are classified, which needs all tokens.

    Raises:
        MissingInput: the store has no classifier, or not the tokens that it reads.
        NotOffered: the model has none that can be read, or none of its blocks is as wide.
        SiteError: no selected site is as wide.
    """
    head = heads(store)
    if store.plan.clip is not None and store.plan.clip.by_frame:
        raise NotOffered(
            f"the classifier of {store.label} reads one frame, and the store holds clips "
            "frame by frame; expected a store of the frames, extracted as images"
        )
    selected = sites_of(store, patterns)
    readable = _readable_sites(store, head, selected, patches)
    if not readable:
        message = (
            f"the classifier of {store.label} reads {head.pool} of {head.width} "
            f"channels: none of {abbreviate([site.name for site in selected])} has these"
        )
        # With other sites readable, the choice is wrong; otherwise the store cannot be used.
        body_sites = [site for site in store.sites.values() if "head" not in site.groups]
        if _readable_sites(store, head, body_sites, patches):
            raise SiteError(message)
        raise NotOffered(message)
    if len(readable) < len(selected):
        unreadable = [site.name for site in selected if site not in readable]
        log.info("%s: the classifier cannot read %s", store.label, abbreviate(unreadable))
    return readable


def _readable_sites(
    store: Store, head: Classifier, sites: Iterable[SiteSpec], patches: bool
) -> list[SiteSpec]:
    """Return those of some sites that have the tokens and channels that the classifier reads.

    Raises:
        MissingInput: the store does not keep the tokens of such a site.
    """
    readable = []
    for site in sites:
        layout = store.site(site.name).layout
        # Other sites of the head have been through its norm already.
        is_past_norm = "head" in site.groups and site.name != head.site
        if is_past_norm or layout is None or site.dim != head.width:
            continue
        if head.pool == "cls" and layout.cls is None:
            continue
        if patches and layout.grid is None:
            continue
        if patches or head.pooled_kind is None:
            store.acts(site.name)  # raises if only pooled tokens are kept
        readable.append(site)
    return readable


class StoreLens:
    """Computes the table's rows of one store, site by site.

    Attributes:
        store: the store.
        head: its classifier.
        rows: its selected images.
        metrics: the metrics that can be had.
        patches: whether every patch is classified alone, too.
        block_of_image: (images,) the jackknife's block of each image, for intervals.
        remark: why class labels are not used; "" if they are.
        n_classes: number of classes of the classifier.
    """

    def __init__(
        self,
        store: Store,
        head: Classifier,
        rows: Rows,
        execution: Execution,
        metrics: Sequence[str],
        patches: bool,
    ) -> None:
        """Find out which metrics of a store can be had.

        Args:
            store: the store.
            head: its classifier.
            rows: its selected images.
            execution: seed of the jackknife's blocks, threads and progress.
            metrics: the requested metrics; empty for all that can be had.
            patches: whether every patch is classified alone, too, for rows of each patch and
                of their mean.

        Raises:
            VitseeError: a requested metric needs labels, which are missing or not the classes of
                the classifier.
        """
        self.store = store
        self.rows = rows
        self.execution = execution
        self.patches = patches
        self.head = head
        self.n_classes = head.n_classes
        mask = rows.mask & store.valid
        # A shuffled store is in random order already; others are dealt to blocks by the seed.
        block_seed = None if store.shuffled else execution.seed
        self.block_of_image = block_labels(int(mask.sum()), block_seed)
        self.remark = why_not_own(store, mask, self.n_classes)
        if self.remark:
            unavailable = {*metrics} & {*LABEL_METRICS}
            if unavailable:
                names = ", ".join(sorted(unavailable))
                raise VitseeError(f"{self.remark}: no {names}")
            log.info("%s", self.remark)
        available = [*METRICS]
        if self.remark:
            available = [name for name in METRICS if name not in LABEL_METRICS]
        # Agreement needs the model's output: its logits, or the tokens that they are made of.
        if not {"logits", self.head.site} & {*store.sites}:
            available.remove("lens_agreement")
        self.metrics = [name for name in available if name in (metrics or METRICS)]

    def site_rows(self, site: SiteSpec) -> list[dict[str, Any]]:
        """Return the rows of one site."""
        spec = self.store.site(site.name)
        work = _SlabScores(
            site=spec.name,
            head=self.head,
            patches=self.patches,
            agreement="lens_agreement" in self.metrics,
        )
        slabs = each_slab(
            self.store,
            work,
            rows=self.rows,
            jobs=self.execution.jobs,
            map=self.execution.map,
            progress=self.execution.progress,
        )
        scores_of_slabs = list(slabs)
        rows: list[Cells] = []
        for metric in self.metrics:
            # (images, 1 + patches)
            values = np.concatenate([scores[metric] for scores in scores_of_slabs])
            pooled = mean_cells(values[:, 0], self.block_of_image)
            rows.append({"metric": metric, **pooled})
            if self.patches:
                assert spec.layout is not None and spec.layout.grid is not None
                n_columns = spec.layout.grid[1]
                rows += self._patch_rows(metric, values[:, 1:], n_columns)
        site_cells = site_columns(self.store, site)
        site_rows = []
        for row in rows:
            if row["metric"] != "lens_rank":
                # Intervals of shares stay between 0 and 1.
                row = as_share(row)
            site_rows.append({**site_cells, **row})
        return site_rows

    def _patch_rows(self, metric: str, values: Float, n_columns: int) -> list[Cells]:
        """Return the row of the mean over patches, then one of each patch.

        Args:
            metric: one of `METRICS`.
            values: (images, patches).
            n_columns: columns of the token grid.
        """
        mean = mean_cells(values.mean(1), self.block_of_image)
        rows: list[Cells] = [{"metric": metric, "token": "patches", **mean}]
        by_patch = np.ascontiguousarray(values.T)  # (patches, images)
        estimates = statistic(by_patch, "mean", self.block_of_image).estimates()
        for t in range(len(by_patch)):
            row, column = divmod(t, n_columns)
            cells = cells_of(estimates, t)
            rows.append({"metric": metric, "row": row, "col": column, **cells})
        return rows


@dataclass(frozen=True)
class _SlabScores:
    """Scores the images of one slab; runs in any process.

    Attributes:
        site: name of the site.
        head: the classifier.
        patches: whether every patch is scored alone, too.
        agreement: whether scores are compared with the model's output; otherwise `lens_agreement`
            means nothing.
    """

    site: str
    head: Classifier
    patches: bool
    agreement: bool

    def __call__(self, slab: Slab) -> dict[str, Float]:
        """Return metric -> (images, 1 + patches), the pooled tokens first.

        Metrics of the label are NaN for images without one.
        """
        layout = slab.store.site(self.site).layout
        assert layout is not None
        labels = slab.store.samples.label[slab.rows][slab.valid].astype(np.int64)
        output = self._output_classes(slab)
        tokens = None
        if self.patches or self.head.pooled_kind is None:
            tokens = slab.acts(self.site)[slab.valid]
        pooled_logits = self._pooled_logits(slab, self.site, tokens)
        scores = token_scores(pooled_logits[:, np.newaxis], labels, output)
        if not self.patches:
            return scores
        assert tokens is not None
        patch_tokens = tokens[:, layout.n_prefix :]
        batches = []
        # A few images at a time: logits of all patches of a slab take gigabytes.
        for start in range(0, len(patch_tokens), IMAGES_AT_ONCE):
            images = slice(start, start + IMAGES_AT_ONCE)
            logits = self.head.of_tokens(patch_tokens[images])
            batches.append(token_scores(logits, labels[images], output[images]))
        result = {}
        for metric in METRICS:
            patch_scores = np.concatenate([batch[metric] for batch in batches])
            result[metric] = np.concatenate([scores[metric], patch_scores], axis=1)
        return result

    def _output_classes(self, slab: Slab) -> Integers:
        """Return the class that the model predicts for each image, (images,)."""
        if not self.agreement:
            return np.zeros(int(slab.valid.sum()), np.int64)
        if "logits" in slab.store.sites:
            return slab.vectors("logits")[slab.valid].argmax(1)
        return self._pooled_logits(slab, self.head.site).argmax(1)

    def _pooled_logits(
        self, slab: Slab, site: str, tokens: Float32 | None = None
    ) -> Float:
        """Return the logits (images, classes) of a site's tokens, pooled as the model does.

        Args:
            slab: the images.
            site: name of the site.
            tokens: (images, tokens, dim), if they have been read already.
        """
        # Some heads read what stores keep pooled (the class token, a mean): far less to read.
        kind = self.head.pooled_kind
        if kind is not None:
            return self.head.of_tokens(slab.pooled(site, kind)[slab.valid])
        layout = slab.store.site(site).layout
        assert layout is not None
        if tokens is None:
            tokens = slab.acts(site)[slab.valid]
        return self.head.logits(tokens, layout)


def token_scores(logits: Float, labels: Integers, output: Integers) -> dict[str, Float]:
    """Return metric -> (images, tokens) scores.

    Args:
        logits: (images, tokens, classes); the pooled tokens count as one.
        labels: (images,) label of each image; outside of the classes for none.
        output: (images,) class that the model predicts.

    Raises:
        VitseeError: a logit is not finite.
    """
    if not np.isfinite(logits).all():
        raise VitseeError(
            "the classifier gives logits that are not finite (see vitsee validate)"
        )
    n_classes = logits.shape[-1]
    predicted = logits.argmax(-1)  # (images, tokens)
    has_label = ((labels >= 0) & (labels < n_classes))[:, np.newaxis]
    # Images without a label take some class here, and become NaN below.
    label_index = np.clip(labels, 0, n_classes - 1)[:, np.newaxis, np.newaxis]
    label_index = np.broadcast_to(label_index, (*logits.shape[:2], 1))
    label_logit = np.take_along_axis(logits, label_index, -1)
    rank = 1 + (logits > label_logit).sum(-1)  # of equal logits the best rank
    return {
        "lens_top1": np.where(has_label, predicted == labels[:, np.newaxis], np.nan),
        "lens_agreement": (predicted == output[:, np.newaxis]).astype(np.float64),
        "lens_rank": np.where(has_label, rank, np.nan),
    }
