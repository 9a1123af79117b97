"""Ridge probes against scikit-learn on the same features: `Ridge` in a loop over l2, and `RidgeCV`
with exact leave-one-out; every layer of a model, and every token of one layer.

    python benchmarks/probe.py                   # 4 layers and 8 tokens of 384 channels
    python benchmarks/probe.py --record          # kept for docs/performance.md
    python benchmarks/probe.py --layers 12 --tokens 196 --dim 768 --train 10000 --classes 1000

Everybody gets features in memory, without a disk; both sides have as many threads (one: two
libraries of BLAS in one process, numpy's and scipy's, wait for each other's threads, which would be
counted against scikit-learn). Both compute in float64.
A claim: `loop` reports test accuracy at each of 20 l2; `cv` chooses one of 30 (`vitsee probe`'s
grid) by leave-one-out and tests it. Random features with a signal for each class.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from common import Result, add_record_option, interleaved, machine, record
from numpy.typing import NDArray
from sklearn.linear_model import Ridge, RidgeCV
from threadpoolctl import threadpool_limits

from vitsee_core.analyses.probe.fit import Task
from vitsee_core.analyses.probe.inputs import Block, Draw
from vitsee_core.analyses.probe.prober import Prober
from vitsee_core.kernels.l2_choice import GRID
from vitsee_core.kernels.ridge import Algebra
from vitsee_core.runtime.machine import memory_bytes

Float32 = NDArray[np.float32]
Integers = NDArray[np.int64]

L2S = tuple(2.0**e for e in range(-8, 12))
SLAB = 256


@dataclass(frozen=True)
class InMemory:
    """A source of features (tokens, images, dim), slab by slab as from a store."""

    x: Float32

    @property
    def n_tokens(self) -> int:
        return len(self.x)

    @property
    def dim(self) -> int:
        return int(self.x.shape[2])

    def groups(self, n_tokens: int) -> list[slice]:
        step = max(1, n_tokens)
        return [slice(a, min(a + step, len(self.x))) for a in range(0, len(self.x), step)]

    def blocks(self, token_slice: slice, indices: Integers) -> Iterator[Block]:
        for start in range(0, len(indices), SLAB):
            rows = indices[start : start + SLAB]
            whole = (
                rows[-1] - rows[0] == len(rows) - 1
            )  # no copy, as of a slab that is read whole
            some = slice(rows[0], rows[-1] + 1) if whole else rows
            yield rows, self.x[token_slice][:, some].swapaxes(0, 1)


@dataclass(frozen=True)
class Data:
    """Features of training and test images, and their classes."""

    x: Float32
    y: Float32
    labels: Integers
    test_labels: Integers
    classes: int


def make(vectors: int, args: argparse.Namespace) -> Data:
    """Random features."""
    rng = np.random.default_rng(0)
    labels, test_labels = (
        rng.integers(0, args.classes, n) for n in (args.train, args.test)
    )
    means = 0.12 * rng.standard_normal((vectors, args.classes, args.dim), np.float32)
    x, y = (
        means[:, own] + rng.standard_normal((vectors, len(own), args.dim), np.float32)
        for own in (labels, test_labels)
    )
    return Data(x, y, labels, test_labels, args.classes)


def ours(
    data: Data, l2s: tuple[float, ...], choose: str, per_call: int, threads: int
) -> NDArray[np.float64]:
    """(vectors, l2s) test accuracies. per_call: vectors that one pass reads: 1 for layers."""
    n = len(data.labels)
    draw = Draw(None, 0, np.arange(n), np.zeros(n, bool))
    memory = memory_bytes() // 4
    task = Task(data.labels, data.classes, Algebra(), l2s, choose, threads, memory)
    prober = Prober(task, [draw], data.test_labels)
    found = []
    with prober.threads():  # as the analysis has it, for all sites
        for start in range(0, len(data.x), per_call):
            some = slice(start, start + per_call)
            tally = prober.each(InMemory(data.x[some]), InMemory(data.y[some]), "these")
            found.append(tally.right[0, :, :, 0].sum(-1).T / len(data.test_labels))
    return np.concatenate(found)


def loop(data: Data) -> NDArray[np.float64]:
    """scikit-learn's Ridge, fitted anew for every l2."""
    targets = 2.0 * np.eye(data.classes)[data.labels] - 1
    out = []
    for x, y in zip(data.x, data.y, strict=True):
        wide, test = x.astype(np.float64), y.astype(np.float64)
        fits = (Ridge(alpha=l2).fit(wide, targets) for l2 in L2S)
        out.append([_accuracy(fit.predict(test), data) for fit in fits])
    return np.array(out)


def cross_validated(data: Data) -> NDArray[np.float64]:
    """scikit-learn's RidgeCV by leave-one-out."""
    targets = 2.0 * np.eye(data.classes)[data.labels] - 1
    out = []
    for x, y in zip(data.x, data.y, strict=True):
        fit = RidgeCV(alphas=GRID).fit(x.astype(np.float64), targets)
        out.append([_accuracy(fit.predict(y.astype(np.float64)), data)])
    return np.array(out)


def _accuracy(scores: NDArray[np.float64], data: Data) -> float:
    return float((scores.argmax(axis=1) == data.test_labels).mean())


def compare(
    name: str, data: Data, per_call: int, rounds: int, threads: int
) -> list[Result]:
    """Lines against the loop, and against RidgeCV."""

    def own_of(l2s: tuple[float, ...], choose: str) -> Callable[[], NDArray[np.float64]]:
        return lambda: ours(data, l2s, choose, per_call, threads)

    rows = []
    claims = {
        f"Ridge over {len(L2S)} l2": (lambda: loop(data), own_of(L2S, "")),
        "RidgeCV": (lambda: cross_validated(data), own_of((), "loo")),
    }
    for claim, (theirs, own) in claims.items():
        kept: dict[str, NDArray[np.float64]] = {}
        seconds = interleaved({"scikit-learn": theirs, "vitsee": own}, rounds, found=kept)
        what = f"probes of {name}, against scikit-learn's {claim}"
        row = Result.of(what, seconds, "vitsee", "scikit-learn")
        gap = float(abs(kept["scikit-learn"] - kept["vitsee"]).max())
        accuracy = float(kept["vitsee"].max())
        times = f"{row.other:9.2f} {row.ours:9.3f} {row.ratio:7.1f}"
        print(f"{name:22} {claim:20} {times}   {gap:.4f}  {accuracy:.3f}")
        rows.append(row)
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (
        ("layers", 4), ("tokens", 8), ("dim", 384), ("train", 10000), ("test", 1000),
        ("classes", 100), ("rounds", 3), ("threads", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    add_record_option(parser)
    args = parser.parse_args()
    print(machine())
    print(
        f"{args.train} training and {args.test} test images, {args.dim} channels, "
        f"{args.classes} classes, {args.threads} threads; medians of {args.rounds} rounds"
    )
    head = ("scikit-learn", "vitsee", "ratio")
    print(f"{'':43} {head[0]:>9} {head[1]:>9} {head[2]:>7}   largest difference, best")
    how = args.rounds, args.threads
    with threadpool_limits(args.threads):
        rows = compare(f"{args.layers} layers", make(args.layers, args), 1, *how)
        tokens = make(args.tokens, args)
        rows += compare(f"{args.tokens} tokens of a layer", tokens, args.tokens, *how)
    print(f"peak RSS {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    if args.record:
        of = f"{args.train:,} images of {args.dim} channels, {args.classes} classes"
        record("probe", f"Ridge probes, {of}, {args.threads} thread on both sides", rows)


if __name__ == "__main__":
    main()
