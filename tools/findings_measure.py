"""Measures the findings of docs/findings.md on the demo's models: docs/findings.csv.

    python tools/findings_measure.py FOLDER    # for its stores; what is there is not made again
    python tools/findings.py                   # the page

Some ten minutes on two cores and 3 GB of disk. A model that the demo does not
have gives rows without numbers.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from findings import TABLE
from findings_statistics import Estimate, mean
from papers import FINDINGS

from vitsee_core import demo
from vitsee_core.analyses import (
    attn_dist,
    cka,
    cka_heads,
    erf,
    head_types,
    keypoints,
    knn,
    localize,
    normratio,
    probe,
)
from vitsee_core.demo.spair import write_spair
from vitsee_core.extraction.keywords import extract
from vitsee_core.results import Table
from vitsee_core.statistics.jackknife import Blocks, means_without
from vitsee_stores import Store

IMAGES = 1000
TRAIN_IMAGES = 1000
FIELD_IMAGES = 320
SITES = ("blocks", "norms", "hidden")


class Family:
    """Stores and tables of the demo's models, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._kept: dict[tuple[str, ...], Table] = {}

    def store(self, model: str) -> Store:
        """All layers, over the test images."""
        sites = ["blocks", "norms", "head"]
        if model != "resnet":
            sites += ["hidden", "heads"] if model != "mixer" else ["hidden"]
        return self._extract(model, "demo:test", "", images=IMAGES, sites=sites, inputs=True)

    def train(self, model: str) -> Store:
        """Block outputs of the training images."""
        lean = {"attention": "none", "residual": False}
        return self._extract(model, "demo:train", "-train", images=TRAIN_IMAGES, **lean)

    def fields(self, model: str) -> Store:
        """Receptive fields; slabs are the blocks of images of their intervals."""
        kept = {"sites": ["blocks", "residual"], "tokens": "pooled", "attention": "none"}
        n = {"images": FIELD_IMAGES, "erf": FIELD_IMAGES}
        return self._extract(model, "demo:test", "-erf", slab=16, residual=False, **n, **kept)

    def keypoints(self, model: str) -> Table:
        """PCK at 0.1 of every block on the bundled miniature of SPair-71k."""
        clothes = self.folder / "clothes"
        if not clothes.exists():
            write_spair(clothes)
        whole = {"crop_mode": "border", "fill": "black", "crop_pct": 1.0}
        store = self._extract(model, str(clothes / "JPEGImages"), "-clothes", **whole)
        found = keypoints.run(store, pairs=clothes, alphas=(0.1,))
        return found.where(metric="pck@0.1", baseline="")

    def _extract(self, model: str, data: str, suffix: str, **options: Any) -> Store:
        path = self.folder / f"{model}{suffix}.zarr"
        return extract(f"demo:{model}", data, path, **{"slab": 50, **options})

    def _keep(self, key: tuple[str, ...], make: Callable[[], Table]) -> Table:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def cka(self, a: str, b: str | None = None, pairs: str = "all") -> Table:
        """CKA of all layers (of blocks alone: same-depth) of one model, or of two."""
        return self._keep(("cka", a, b or "", pairs), lambda: self._cka(a, b, pairs))

    def _cka(self, a: str, b: str | None, pairs: str) -> Table:
        stores = [self.store(a)] if b is None else [self.store(a), self.store(b)]
        if pairs != "all":
            return cka.run(*stores, sites=("blocks",), pairs=pairs)
        both = {"sites_a": layers(a), "sites_b": layers(b or a)}
        return cka.run(*stores, sites=layers(a)) if b is None else cka.run(*stores, **both)

    def last_cls(self, a: str, b: str) -> Estimate:
        """CKA of the class tokens of the last blocks of two models."""
        found = cka.run(self.store(a), self.store(b), sites=("blocks.-1.out",), tokens="cls")
        return mean(found, found["value"] == found["value"])

    def heads(self, model: str) -> Table:
        """Scores of every head."""
        return head_types.run(self.store(model))

    def cnn_like(self, model: str, cnn: str) -> Table:
        """Groups of heads of the first block against the lower layers of a CNN."""
        return cka_heads.run(self.store(model), self.store(cnn))

    def distances(self, model: str) -> Table:
        """Mean attention distance of every head over that of uniform attention, with replicates."""
        return self._keep(("distances", model), lambda: self._distances(model))

    def _distances(self, model: str) -> Table:
        store = self.store(model)
        found = attn_dist.run(store, metrics="distance_relative")
        distance = np.asarray(store.attention("distance_px")[:], np.float64)
        blocks = Blocks.of(store, np.ones(len(distance), bool), 0)
        sums, counts = blocks.sums(distance), blocks.sums(np.ones(len(distance)))
        of_heads = distance.mean(0).reshape(-1)
        without = means_without(sums, counts).reshape(len(of_heads), -1)
        scale = found["value"].astype(np.float64) / of_heads
        return Table(found.columns, found.notes, without * scale[:, None])

    def ratios(self, model: str, tokens: str) -> Table:
        """Geometric mean norm ratios of a kind of token, every sublayer."""
        return normratio.run(self.store(model), metrics="norm_ratio_geomean", tokens=tokens)

    def localised(self, model: str, site: str) -> Table:
        """CKA of every token of a site with every patch of the input."""
        return localize.run(self.store(model), sites=site)

    def radii(self, model: str, sites: str) -> Table:
        """Radius of half of the effective receptive field."""
        return erf.run(self.fields(model), metrics="radius50_px", sites=sites)

    def single_tokens(self, model: str) -> Table:
        """Accuracy of 10-shot probes of single patch tokens of the last block, their mean."""
        found = probe.run(
            self.train(model), self.store(model), sites="blocks.-1.out", tokens="each", shots=(10,)
        )
        return found.where(metric="top1", token="each")

    def neighbours(self, model: str) -> Table:
        """k-NN accuracy of every block."""
        return knn.run(self.train(model), self.store(model)).where(metric="top1")


def layers(model: str) -> tuple[str, ...]:
    """What is compared by CKA: of a ResNet, norms include the layers inside of its blocks."""
    return SITES[:2] if model == "resnet" else SITES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("error", RuntimeWarning)
    family, there = Family(args.folder), demo.models()
    rows = []
    for finding in FINDINGS:
        missing = [model for model in finding.models if model not in there]
        print(finding.name, "not trained" if missing else "...", flush=True)
        rows.append(finding.row(None if missing else finding.measure(family)))
    columns = [*FINDINGS[0].row(None), "value", "std", "low", "high", "n_blocks"]
    columns = [*(name for name in columns if name != "verdict"), "verdict"]
    Table.from_rows(rows, columns).to_csv(TABLE, force=True)


if __name__ == "__main__":
    main()
