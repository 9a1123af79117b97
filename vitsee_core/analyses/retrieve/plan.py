"""One search with everything that decides its numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.retrieve.features import Features
from vitsee_core.analyses.retrieve.precision import (
    Ranked,
    average_precision,
    chance_precision,
    chance_precision_at,
    precision_at,
)
from vitsee_core.analyses.retrieve.retrieval_truth import Setting
from vitsee_core.analyses.retrieve.rows import Search
from vitsee_core.features import compared
from vitsee_core.statistics.image_statistics import block_labels
from vitsee_core.statistics.jackknife import SHARE, Blocks, cut, interval
from vitsee_core.statistics.moments import Moments
from vitsee_core.statistics.shares import as_share, jackknife_share
from vitsee_core.tables.replicates import WORD
from vitsee_core.types import Float, Mask

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec

Scores = dict[Setting, dict[str, Float]]


@dataclass(frozen=True)
class Plan:
    """One search."""

    search: Search
    read: dict[str, tuple[SiteSpec, Features]]  # site -> its features
    form: str
    at: tuple[int, ...]
    scored: list[tuple[Setting, Mask]]  # setting and its queries (queries,)
    blocks: Blocks
    remarks: list[str]
    metrics: tuple[str, ...] = ()  # of the rows

    @classmethod
    def of(
        cls,
        search: Search,
        chosen: Sequence[SiteSpec],
        tokens: str | None,
        form: str,
        at: Sequence[int],
        seed: int,
    ) -> Plan:
        """Plans a checked search at these sites of its store; see `retrieve.run`. seed: assigns the
        queries to the blocks of the replicates.

        Raises:
            MissingInput: a store lacks a site or its tokens.
            StoreMismatch: it has other channels there.
        """
        remarks = list(search.remarks)
        read = {site.name: (site, Features.of(search, site, tokens)) for site in chosen}
        scored = []
        for setting in search.settings:
            mask = search.scored(setting)
            if mask.any():
                scored.append((setting, mask))
            else:
                remarks.append(f"{setting.map} is left out: no query has a right image for it")
        blocks = search.itself or _of_queries(search.names, seed)
        plan = cls(search, read, form, tuple(dict.fromkeys(at)), scored, blocks, remarks)
        return replace(plan, metrics=tuple(m for own in plan.chance.values() for m in own))

    def only(self, metrics: Sequence[str]) -> Plan:
        """The plan for some of its metrics; settings without any of them are not scored."""
        scored = [one for one in self.scored if {*self.chance[one[0]]} & {*metrics}]
        return replace(self, scored=scored, metrics=tuple(metrics))

    def compared(self, asked: str | None) -> dict[str, Any]:
        """What its stores have in common, for a sidecar; see `features.compared`."""
        words = {name: str(of.images.selection) for name, (_, of) in self.read.items()}
        return compared(self.search.stores, words, asked=asked)

    def describe(self) -> dict[str, Any]:
        search = self.search
        return {
            "n_queries": len(search.names),
            "queries": search.query_store.label,
            "distractors": [store.label for store in search.distractors],
            **search.about,
        }

    @cached_property
    def chance(self) -> dict[Setting, dict[str, Float]]:
        """Setting -> metric -> (queries,) expected in random order."""
        return {setting: self._chance(setting) for setting, _ in self.scored}

    def _chance(self, setting: Setting) -> dict[str, Float]:
        n_right, n = self.search.counts(setting)
        expected = {setting.map: chance_precision(n_right, n, self.form, setting.top)}
        return expected | {
            f"mp@{k}{setting.suffix}": chance_precision_at(n_right, n, k)
            for k in (() if setting.use else self.at)
        }

    def scores(self, setting: Setting, found: Ranked) -> dict[str, Float]:
        """Metric -> (queries,)."""
        values = {setting.map: average_precision(found, self.form, setting.top)}
        return values | {
            f"mp@{k}{setting.suffix}": precision_at(found, k)
            for k in (() if setting.use else self.at)
        }

    def chance_rows(self) -> Iterator[dict[str, Any]]:
        """A row per metric, without intervals."""
        for setting, mask in self.scored:
            for metric, values in self.chance[setting].items():
                if metric not in self.metrics:
                    continue
                counts = {"n_queries": int(mask.sum()), "n_images": self.search.n_images}
                yield {"metric": metric, "value": float(values[mask].mean()), **counts}

    def rows(self, scores: Scores, without: Scores, per_query: bool) -> Iterator[dict[str, Any]]:
        """One per metric, then one per query.

        Args:
            scores: setting -> metric -> (queries,).
            without: the same (blocks, queries) without the images of each block, if the queries are
                the images.
            per_query: whether to add rows per query.
        """
        for setting, mask in self.scored:
            for metric, values in scores[setting].items():
                if metric not in self.metrics:
                    continue
                own = without[setting][metric] if self.search.itself else None
                yield self._row(metric, values, own, mask)
        for setting, mask in self.scored if per_query else ():
            values = scores[setting][setting.map]
            metric = setting.map.removeprefix("m")
            for i in np.flatnonzero(mask).tolist():
                about = {"query": self.search.names[i], "n_images": self.search.n_images}
                yield {"metric": metric, "value": float(values[i]), "baseline": "", **about}

    def _row(self, metric: str, values: Float, without: Float | None, mask: Mask) -> dict[str, Any]:
        """The mean over the queries in `mask`."""
        moments = Moments()
        moments.add(values[mask])
        summary = moments.summary()
        cells: dict[str, Any] = dict(summary.cells())
        is_share = metric.startswith("mp@")
        if without is None:
            replicates = self.blocks.means_without(np.where(mask, values, 0.0), mask)
            ends = cut(summary.mean, summary.low, summary.high, SHARE)
            cells |= as_share(cells) if is_share else _ends(*ends)
        else:
            replicates = self._means_without(without, mask)
            if is_share:
                cells |= _ends(*jackknife_share(cells["value"], replicates, cells["n_images"]))
            else:
                cells |= _ends(*interval(summary.mean, replicates, SHARE)[1:])
        counts = {"n_queries": cells.pop("n_images"), "n_images": self.search.n_images}
        return {"metric": metric, "baseline": "", WORD: replicates, **cells, **counts}

    def _means_without(self, without: Float, mask: Mask) -> Float:
        """(blocks,) means over the queries outside of each block that have a right image there."""
        means = np.full(self.blocks.n, np.nan)
        for b, values in enumerate(without):
            own = values[mask & (self.blocks.labels != b)]
            if (there := ~np.isnan(own)).any():
                means[b] = own[there].mean()
        return means


def _ends(low: Any, high: Any) -> dict[str, float]:
    return {"low": float(low), "high": float(high)}


def _of_queries(names: Sequence[str], seed: int) -> Blocks:
    """The blocks of queries that are not among the images; those stay as they are."""
    text = "\n".join(map(str, (len(names), *names))).encode()
    labels = block_labels(len(names), seed)
    digest = hashlib.sha256(text + labels.astype("<i8").tobytes()).hexdigest()[:16]
    return Blocks(labels, labels, digest)
