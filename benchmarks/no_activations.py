"""What a store without activations still gives: every analysis on it and on one with all tokens.

    python benchmarks/no_activations.py [--record]

The demo's ViT over the same images twice: once with every token of its blocks, once with
`--tokens pooled --grams`. Both keep pooled vectors, attention rows and summaries, residual products
and receptive fields. An analysis that finds the same numbers in both is "equal"; where it says
why it finds none in the second, that is its own line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, about_this_run, add_record_option

import vitsee
from vitsee_core.demo.coco import write_coco
from vitsee_core.demo.davis import write_davis
from vitsee_core.demo.spair import write_spair
from vitsee_core.extraction.plan import total_size

IMAGES, SLAB = 60, 20
LEAN: dict[str, Any] = {"tokens": "pooled", "grams": True}
KEEP: dict[str, Any] = {"attention": "rows", "erf": IMAGES, "slab": SLAB}
# Sums over a slab in another order: float32 of norms, and of means.
CLOSE = 1e-4
Stores = dict[str, Path]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_record_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = try_all(Path(name))
    print(json.dumps(found, indent=1))
    if args.record:
        path = RESULTS / "scale" / "no-activations.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**about_this_run(), **found}, indent=1) + "\n")


def try_all(folder: Path) -> dict[str, Any]:
    """bytes: per image of both stores. rows: [command, verdict, the reason] of each analysis."""
    stores = extract_both(folder, "test", "demo:test", images=IMAGES)
    spair, davis, coco = folder / "spair", folder / "davis", folder / "coco"
    write_spair(spair)
    write_davis(davis)
    write_coco(coco)
    pairs = extract_both(
        folder, "pairs", f"{spair}/JPEGImages", crop_pct=1.0, crop_mode="border"
    )
    videos = extract_both(
        folder, "videos", f"{davis}/JPEGImages/480p", order="dataset", crop_mode="squash"
    )
    scenes = extract_both(folder, "scenes", f"{coco}/val2017", crop_mode="squash")
    heads = extract_both(
        folder, "heads", "demo:test", images=SLAB, sites=("blocks", "heads")
    )
    train = folder / "train.zarr"
    vitsee.extract("demo:vit", "demo:train", train, images=IMAGES, tokens="pooled")
    masks = coco / "annotations" / "instances_val2017.json"
    rows = [tried(name, module, options, stores) for name, module, options in CALLS]
    rows += [
        tried("knn", "knn", {}, stores, before=[train]),
        tried("cka-heads", "cka_heads", {}, heads, after=[heads["whole"]]),
        tried("saliency", "saliency", {"masks": masks}, scenes),
        tried("cluster --masks", "cluster", {"masks": masks}, scenes),
        tried("keypoints", "keypoints", {"pairs": spair}, pairs),
        tried("propagate", "propagate", {"masks": davis}, videos),
    ]
    sizes = {}
    for kind, path in stores.items():
        plan = vitsee.open_store(path).plan
        sizes[kind] = round(total_size(plan).size_bytes / plan.n_images)
    return {"bytes": sizes, "rows": rows}


# Name to show, analysis, keywords.
CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("cka", "cka", {}),
    ("cka --tokens cls", "cka", {"tokens": "cls"}),
    ("cka --tokens patches", "cka", {"tokens": "patches"}),
    ("similarity --tokens mean", "similarity", {"tokens": "mean"}),
    ("attn-dist", "attn_dist", {}),
    ("attn-map --kind aligned", "attn_map", {"kind": "aligned"}),
    ("head-types", "head_types", {}),
    ("erf", "erf", {}),
    ("localize", "localize", {}),
    ("normratio", "normratio", {}),
    ("norms", "norms", {"metrics": ("norm", "norm_median", "outlier_share")}),
    ("norms --metric massive_ratio", "norms", {"metrics": ("massive_ratio",)}),
    ("spatial", "spatial", {}),
    ("cluster", "cluster", {}),
    ("probe", "probe", {"holdout": 0.2}),
    ("probe --tokens each", "probe", {"holdout": 0.2, "tokens": "each"}),
    ("retrieve", "retrieve", {}),
    ("spectrum --tokens cls", "spectrum", {"tokens": "cls"}),
    ("spectrum --tokens patches", "spectrum", {"tokens": "patches"}),
    ("lens", "lens", {}),
    ("lens --patches", "lens", {"patches": True}),
    ("pca", "pca", {}),
    ("weights", "weights", {}),
]


def extract_both(folder: Path, name: str, data: str, **options: Any) -> Stores:
    """The two stores of a data set."""
    kinds: dict[str, dict[str, Any]] = {"whole": {}, "lean": LEAN}
    stores = {}
    for kind, keep in kinds.items():
        stores[kind] = folder / f"{name}-{kind}.zarr"
        vitsee.extract("demo:vit", data, stores[kind], **KEEP, **keep, **options)
    return stores


def tried(
    shown: str,
    name: str,
    options: dict[str, Any],
    stores: Stores,
    before: Sequence[Path] = (),
    after: Sequence[Path] = (),
) -> list[str]:
    """[command, verdict, reason]; with other stores before or after it."""
    run: Callable[..., Any] = getattr(vitsee, name)
    tables = []
    for kind in ("whole", "lean"):
        store = vitsee.open_store(stores[kind], label="store")
        try:
            tables.append(run(*before, store, *after, **options))
        except vitsee.VitseeError as error:
            if kind == "whole":
                raise RuntimeError(
                    f"{shown} refuses a store with everything: {error}"
                ) from error
            return [shown, "no", str(error)]
    return [shown, *compared(*tables)]


def compared(whole: Any, lean: Any) -> tuple[str, str]:
    """Verdict and reason."""
    metrics = [set(table["metric"].tolist()) for table in (whole, lean)]
    if missing := sorted(metrics[0] - metrics[1]):
        return "in part", f"without {', '.join(missing)}"
    a, b = (np.asarray(table["value"], np.float64) for table in (whole, lean))
    if len(a) != len(b):
        return "in part", f"{len(b)} of {len(a)} rows"
    if np.array_equal(a, b, equal_nan=True):
        return "equal", "to the bit"
    gap = float(np.nanmax(np.abs(a - b) / np.maximum(np.abs(a), 1e-12)))
    return ("equal", "to rounding") if gap < CLOSE else ("another estimate", "")


if __name__ == "__main__":
    main()
