"""Measures the findings of docs/findings.md on the demo's models: docs/findings.csv.

    python tools/findings_measure.py FOLDER    # for its stores; what is there is not made again
    python tools/findings_measure.py FOLDER --only uniform     # the others' rows stay
    python tools/findings_measure.py FOLDER --real real-out    # of vitsee demo --real
    python tools/findings.py                   # the page

Some fifteen minutes on two cores and 4 GB of disk. A model that the demo does not
have gives rows without numbers. With --real it is the column of weights of real size instead,
docs/findings-real.csv, in two minutes.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import polars as pl
from findings import REAL_TABLE, TABLE, read_rows

from vitsee_core import demo
from vitsee_core.analyses import effect, head_importance, keypoints
from vitsee_core.demo.spair import write_spair
from vitsee_core.extraction.keywords import extract
from vitsee_core.study.findings.finding import Finding
from vitsee_core.study.findings.model_tables import ModelTables
from vitsee_core.study.findings.papers import FINDINGS
from vitsee_core.study.findings.verdicts import run
from vitsee_core.study.real.making import PHOTOS, WEIGHTS
from vitsee_core.study.real.photographs import PHOTOGRAPHS
from vitsee_core.tables.results import Table
from vitsee_stores import Store

IMAGES = 1000
TRAIN_IMAGES = 1000
FIELD_IMAGES = 320
REAL = {"vit": "vit-saliency", "resnet": "lite0"}
SEEDS = {"vit": "vit-seed1", "vit-seed1": "vit"}
NUMBERS = ("value", "std", "low", "high")


class Family(ModelTables):
    """Stores of the demo's models, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__({}, {})
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def store(self, model: str) -> Store:
        """All layers, over the test images."""
        sites = ["blocks", "norms", "head"]
        if model != "resnet":
            sites += ["hidden", "heads"] if model != "mixer" else ["hidden"]
        return self._extract(
            model, "demo:test", "", images=IMAGES, sites=sites, inputs=True
        )

    def train(self, model: str) -> Store:
        """Block outputs of the training images."""
        lean = {"attention": "none", "residual": False}
        return self._extract(model, "demo:train", "-train", images=TRAIN_IMAGES, **lean)

    def fields(self, model: str) -> Store:
        """Receptive fields; slabs are the blocks of images of their intervals."""
        kept = {"sites": ["blocks", "residual"], "tokens": "pooled", "attention": "none"}
        n = {"images": FIELD_IMAGES, "erf": FIELD_IMAGES}
        return self._extract(
            model, "demo:test", "-erf", slab=16, residual=False, **n, **kept
        )

    def keypoints(self, model: str) -> Table:
        """PCK at 0.1 of every block on the bundled miniature of SPair-71k."""
        clothes = self.folder / "clothes"
        if not clothes.exists():
            write_spair(clothes)
        whole = {"crop_mode": "border", "fill": "black", "crop_pct": 1.0}
        store = self._extract(model, str(clothes / "JPEGImages"), "-clothes", **whole)
        found = keypoints.run(store, pairs=clothes, alphas=(0.1,))
        return found.filter(pl.col("baseline").is_null(), metric="pck@0.1")

    def replaced(self, model: str, values: str) -> Table:
        """Of the class token at the output of the block halfway."""
        whole = self.store(model)
        by = values if values == "zero" else f"{values}:{whole.path}"
        lean = {
            "sites": ["head"],
            "tokens": "pooled",
            "attention": "none",
            "residual": False,
        }
        change = {"images": IMAGES, "replace": [f"cls@depth:0.5={by}"]}
        changed = self._extract(model, "demo:test", f"-cls-{values}", **lean, **change)
        return effect.run(whole, changed, sites=())

    def importance(self, model: str) -> Table:
        return self._computed_once(
            ("heads", model), lambda: head_importance.run(self.store(model))
        )

    def _extract(self, model: str, data: str, suffix: str, **options: Any) -> Store:
        path = self.folder / f"{model}{suffix}.zarr"
        return extract(f"demo:{model}", data, path, **{"slab": 50, **options})


class OtherSeed:
    """A family whose `vit` is `vit-seed1`, and the reverse."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._family, name)
        return lambda *args, **more: method(
            *(SEEDS.get(arg, arg) for arg in args), **more
        )


def needs(finding: Finding) -> set[str]:
    """The models of all its measurements."""
    return {*finding.models, *(SEEDS if "vit" in finding.models else ())}


def of_real_weights(folder: Path, made: Path) -> Table:
    """The findings of the models in `made`, a folder of `vitsee demo --real`. A photograph is a
    slab, so that every interval is over photographs."""
    stores = []
    for role, name in REAL.items():
        sites = [
            "blocks",
            "norms",
            "residual",
            *(["hidden", "heads"] if role == "vit" else []),
        ]
        model, path = f"local-dir:{made / WEIGHTS / name}", folder / f"{role}.zarr"
        options: dict[str, Any] = {
            "slab": 1,
            "erf": len(PHOTOGRAPHS),
            "inputs": True,
            "sites": sites,
        }
        stores.append(extract(model, str(made / PHOTOS), path, **options))
    return run(*stores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--real", type=Path, metavar="FOLDER", help="of vitsee demo --real"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[f.name for f in FINDINGS]
    )
    args = parser.parse_args()
    warnings.simplefilter("error", RuntimeWarning)
    if args.real is not None:
        of_real_weights(args.folder / "real", args.real).to_csv(REAL_TABLE, force=True)
        return
    family, there = Family(args.folder), demo.models()
    rows = []
    before = {row["name"]: row for row in read_rows(TABLE)} if args.only else {}
    for finding in FINDINGS:
        if args.only and finding.name not in args.only:
            rows.append(before[finding.name])
            continue
        missing = needs(finding) - {*there}
        print(finding.name, "not trained" if missing else "...", flush=True)
        if missing:
            rows.append(finding.row(None))
            continue
        other = None
        if "vit" in finding.models:
            other = finding.measure(cast(Family, OtherSeed(family)))
        rows.append(finding.row(finding.measure(family), other))
    numbers = [f"{name}{suffix}" for suffix in ("", "_seed1") for name in NUMBERS]
    columns = [*FINDINGS[0].row(None), *numbers, "n_blocks"]
    columns = [*(name for name in columns if name != "verdict"), "verdict"]
    Table.from_rows(rows, columns).to_csv(TABLE, force=True)


if __name__ == "__main__":
    main()
