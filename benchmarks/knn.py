"""Exact k-nearest-neighbour votes against scikit-learn and torch on the same features.

Sides: our search and vote; scikit-learn's KNeighborsClassifier with the cosine metric; the same
classifier on normalised features with the Euclidean metric, which has the same neighbours and
scikit-learn's fastest kernel; and torch: normalise, mm, topk. All with brute force, k = 20 and
weights exp(cos / 0.07), in memory. Prints seconds, ratios, how many test images get the same class
and how many the same neighbours, and the peak memory of each side in a process of its own.

    python benchmarks/knn.py [--train 20000] [--test 4000] [--dim 384] [--rounds 5] [--threads N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from typing import Any

import numpy as np
import torch
from common import (
    Result,
    add_record_option,
    interleaved,
    machine,
    paired_ratio,
    peak_rss,
    record,
)
from numpy.typing import NDArray
from sklearn.neighbors import KNeighborsClassifier
from threadpoolctl import threadpool_limits
from torch.nn import functional

from vitsee_core.truth.labels.neighbours import nearest

Array = NDArray[Any]

K, TEMPERATURE, CLASSES = 20, 0.07, 100
SLAB = 256
SIDES = ("vitsee", "sklearn cosine", "sklearn euclidean", "torch mm, topk")


def main() -> None:
    """Prints the machine and a row a side."""
    parser = argparse.ArgumentParser(description="k-NN against scikit-learn.")
    parser.add_argument("--train", type=int, default=20_000)
    parser.add_argument("--test", type=int, default=4_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--memory", type=int, default=1 << 30, help="bytes, of our side")
    parser.add_argument(
        "--only", choices=[*SIDES, "nothing"], help="one side, printing nothing"
    )
    add_record_option(parser)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    # Before any work: a new process begins with the peak of the one that starts it.
    more = {} if args.only else peaks()
    with threadpool_limits(args.threads):
        data = make_data(args.train, args.test, args.dim)
        if args.only is not None:
            run_side(args.only, data, args.memory)
            return
        print(
            f"{machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
        )
        print(
            f"{args.train} training, {args.test} test images, {args.dim} channels, k = {K}"
        )
        found: dict[str, tuple[Array, Array]] = {}
        sides = {name: partial(run_side, name, data, args.memory) for name in SIDES}
        seconds = interleaved(sides, args.rounds, found=found)
    for name in SIDES:
        same_class = (found[name][0] == found["vitsee"][0]).mean()
        same = (
            (np.sort(found[name][1], 1) == np.sort(found["vitsee"][1], 1)).all(1).mean()
        )
        print(
            f"{name:18} {statistics.median(seconds[name]):7.2f} s"
            f"  {paired_ratio(seconds[name], seconds['vitsee']):5.2f} x ours"
            f"  same class {same_class:.4%}, same neighbours {same:.4%}"
            f"  {more[name] / 2**20:.0f} MiB above the data"
        )
    if args.record:
        what = f"{args.test} among {args.train} of {args.dim} channels, k = {K}, against"
        rows = [
            Result.of(f"{what} {name}", seconds, "vitsee", name) for name in SIDES[1:]
        ]
        record("knn", "Nearest neighbours by cosine, beside scikit-learn and torch", rows)


def peaks() -> dict[str, int]:
    """Bytes at the peak of each side, in a process of its own, beyond those of the data."""
    peak = {
        name: peak_rss([sys.executable, *sys.argv, "--only", name])
        for name in ("nothing", *SIDES)
    }
    return {name: peak[name] - peak["nothing"] for name in SIDES}


def make_data(n: int, m: int, dim: int) -> tuple[Array, Array, Array]:
    """Training features, their classes, test features: float32, clusters that overlap, beside a
    common offset, as activations have one."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((CLASSES, dim), np.float32)
    labels = rng.integers(0, CLASSES, n + m)
    x = rng.standard_normal((n + m, dim), np.float32)
    for row, label in zip(
        x, labels, strict=True
    ):  # in place: no side hides behind its peak
        row += 0.2 * centres[label] + 1
    return x[:n], labels[:n], x[n:]


def run_side(
    name: str, data: tuple[Array, Array, Array], memory: int
) -> tuple[Array, Array]:
    """(classes, neighbours) of the test images."""
    train, labels, test = data
    if name == "nothing":
        return labels[:0], labels[:0]
    if name == "vitsee":
        found = nearest(
            lambda: (train[i : i + SLAB] for i in range(0, len(train), SLAB)),
            lambda: (test[i : i + SLAB] for i in range(0, len(test), SLAB)),
            (len(test), *train.shape), k=K, device="cpu", memory=memory,
        )  # fmt: skip
        return voted(found.cosines, labels[found.rows]), found.rows
    if name.startswith("torch"):
        units = [functional.normalize(torch.from_numpy(x), dim=1) for x in (test, train)]
        best = torch.mm(units[0], units[1].T).topk(K)
        return voted(
            best.values.numpy(), labels[best.indices.numpy()]
        ), best.indices.numpy()
    metric = name.split()[1]
    if metric == "euclidean":
        train, test = (
            x / np.linalg.norm(x, axis=1, keepdims=True) for x in (train, test)
        )
    model = KNeighborsClassifier(K, metric=metric, algorithm="brute").fit(train, labels)
    distances, rows = model.kneighbors(test)
    cosines = 1 - distances if metric == "cosine" else 1 - distances**2 / 2
    return voted(cosines, labels[rows]), rows


def voted(cosines: Array, classes: Array) -> Array:
    """The class with the most votes, the lower one of equals."""
    votes = np.exp((cosines - cosines[:, :1]) / TEMPERATURE)
    cells = np.arange(len(classes))[:, None] * CLASSES + classes
    sums = np.bincount(cells.ravel(), votes.ravel(), len(classes) * CLASSES)
    return np.asarray(sums.reshape(len(classes), CLASSES).argmax(1))


if __name__ == "__main__":
    main()
