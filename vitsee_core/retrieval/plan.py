"""One search with all that decides its numbers: what is read, and what is scored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.replicates import WORD
from vitsee_core.retrieval.features import Features
from vitsee_core.retrieval.precision import (
    Ranked,
    average_precision,
    chance_precision,
    chance_precision_at,
    precision_at,
)
from vitsee_core.retrieval.retrieval_truth import Setting
from vitsee_core.retrieval.rows import Search
from vitsee_core.statistics.image_statistics import block_labels
from vitsee_core.statistics.jackknife import SHARE, Blocks, cut
from vitsee_core.statistics.moments import Moments
from vitsee_core.types import Float, Mask

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec


@dataclass(frozen=True)
class Plan:
    """One search: what is read, and what is scored. read: site -> its features; scored: setting and
    its queries (queries,)."""

    search: Search
    read: dict[str, tuple[SiteSpec, Features]]
    form: str
    at: tuple[int, ...]
    scored: list[tuple[Setting, Mask]]
    blocks: Blocks
    remarks: list[str]

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
        """What of a search is scored.

        Args:
            search: checked.
            chosen: sites of its store.
            tokens: which token stands for an image.
            form: of the average precision.
            at: the K of mp@K.
            seed: deals the queries out to the blocks of the replicates.

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
        text = "\n".join(map(str, (len(search.names), *search.names))).encode()
        labels = block_labels(len(search.names), seed)
        name = hashlib.sha256(text + labels.astype("<i8").tobytes()).hexdigest()[:16]
        blocks = Blocks(labels, labels, name)
        return cls(search, read, form, tuple(dict.fromkeys(at)), scored, blocks, remarks)

    def describe(self) -> dict[str, Any]:
        """For a sidecar."""
        search = self.search
        return {
            "n_queries": len(search.names),
            "queries": search.query_store.label,
            "distractors": [store.label for store in search.distractors],
            **search.about,
        }

    @cached_property
    def chance(self) -> dict[Setting, dict[str, Float]]:
        """Setting -> metric -> (queries,) what is expected in random order."""
        return {setting: self._chance(setting) for setting, _ in self.scored}

    def _chance(self, setting: Setting) -> dict[str, Float]:
        n_right, n = self.search.counts(setting)
        found = {setting.map: chance_precision(n_right, n, self.form, setting.top)}
        return found | {
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
                counts = {"n_queries": int(mask.sum()), "n_images": self.search.n_images}
                yield {"metric": metric, "value": float(values[mask].mean()), **counts}

    def rows(
        self, scores: dict[Setting, dict[str, Float]], per_query: bool
    ) -> Iterator[dict[str, Any]]:
        """One per metric, then one per query; scores: setting -> metric -> (queries,)."""
        for setting, mask in self.scored:
            for metric, values in scores[setting].items():
                yield self._row(metric, values, mask)
        for setting, mask in self.scored if per_query else ():
            values = scores[setting][setting.map]
            metric = setting.map.removeprefix("m")
            for i in np.flatnonzero(mask).tolist():
                about = {"query": self.search.names[i], "n_images": self.search.n_images}
                yield {"metric": metric, "value": float(values[i]), "baseline": "", **about}

    def _row(self, metric: str, values: Float, mask: Mask) -> dict[str, Any]:
        """The mean over the queries in `mask`."""
        moments = Moments()
        moments.add(values[mask])
        found = moments.summary()
        low, high = cut(found.mean, found.low, found.high, SHARE)
        cells = found.cells() | {"low": float(low), "high": float(high)}
        counts = {"n_queries": cells.pop("n_images"), "n_images": self.search.n_images}
        without = self.blocks.means_without(np.where(mask, values, 0.0), mask)
        return {"metric": metric, "baseline": "", WORD: without, **cells, **counts}
