"""Do the solvers of dense-probe agree on which layer is best? Kendall's tau, in Markdown.

    python tools/solver_agreement.py vit.zarr resnet.zarr --masks sets/VOC2012 --split val.txt

Between the mean IoUs (of depths: minus the RMSEs) of all layers, over all stores together and in
each, by each pair of solvers, with the 95 % interval over blocks of test images.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from vitsee_core.analyses.dense_probe import run
from vitsee_core.statistics.jackknife import interval
from vitsee_core.tables.results import Table
from vitsee_core.types import Float

SOLVERS: dict[str, dict[str, Any]] = {
    "ridge": {"solver": "ridge"},
    "balanced ridge": {"solver": "ridge", "balanced": True},
    "logistic": {"solver": "logistic"},
    "knn": {"solver": "knn"},
    "hummingbird": {"solver": "hummingbird"},
    "sgd": {"solver": "sgd"},
}
OF_DEPTH = ("ridge", "knn", "sgd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stores", nargs="+", type=Path)
    parser.add_argument("--masks", type=Path)
    parser.add_argument("--depth", type=Path)
    parser.add_argument("--split", required=True)
    parser.add_argument("--steps", type=int, default=1000, help="of sgd")
    given = parser.parse_args()
    truth = {"masks": given.masks} if given.masks else {"depth": given.depth}
    metric = "miou" if given.masks else "rmse"
    names = [name for name in SOLVERS if given.masks or name in OF_DEPTH]
    scores: dict[str, list[Float]] = {}
    for name in names:
        more = {"steps": given.steps} if name == "sgd" else {}
        scores[name] = [
            replicated(
                run(store, **truth, **SOLVERS[name], **more, split=given.split,
                    resolution="input", metrics=[metric]),
                metric,
            )
            for store in given.stores
        ]  # fmt: skip
        for store, own in zip(given.stores, scores[name], strict=True):
            print(f"{name}, {store.stem}: {np.round(own[0], 3).tolist()}", flush=True)
    parts = [range(len(given.stores)), *([i] for i in range(len(given.stores)))]
    if len(given.stores) == 1:
        parts = parts[1:]
    layers = [sum(scores[names[0]][i].shape[1] for i in part) for part in parts]
    heads = [", ".join(given.stores[i].stem for i in part) for part in parts]
    heads = [f"{head}: {n} layers" for head, n in zip(heads, layers, strict=True)]
    print(f"\n| solvers | {' | '.join(heads)} |\n|---{'|---' * len(parts)}|")
    for a, b in itertools.combinations(names, 2):
        cells = [
            tau(*(np.concatenate([scores[s][i] for i in part], 1) for s in (a, b)))
            for part in parts
        ]
        print(f"| {a}, {b} | {' | '.join(cells)} |")


def replicated(table: Table, metric: str) -> Float:
    """(1 + blocks, layers): the scores, then those without each block of test images; the higher
    the better."""
    keep = np.array([not name for name in table["baseline"].tolist()])
    assert table.replicates is not None
    found = np.vstack([table["value"][keep].astype(float), table.replicates[keep].T])
    return found if metric == "miou" else -found


def tau(a: Float, b: Float) -> str:
    """Of the scores, with its interval."""
    taus = np.array([kendalltau(x, y).statistic for x, y in zip(a, b, strict=True)])
    _, low, high = interval(taus[0], taus[1:], (-1.0, 1.0))
    return f"{taus[0]:.2f} ({float(low):.2f} to {float(high):.2f})"


if __name__ == "__main__":
    main()
