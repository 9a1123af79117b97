"""Measures of `vitsee similarity` against the code of their authors and scikit-learn's way.

    peers   the same matrices, all pairs of sites: mutual k-NN, CKNNA and unbiased CKA against
            platonic-rep's metrics.py, Procrustes against netrep's LinearMetric, mutual k-NN and
            ridge R^2 against scikit-learn's NearestNeighbors and RidgeCV
    all     all pairs of many sites by every measure of n x n matrices, jackknife intervals included

Ours begins with a store (float16) without Gram matrices; the peers get the same values as float32
in RAM, which favours them. Peers are called pair by pair, as their users do, on a corner of the
sites, and scaled. Sides alternate in one process; medians, and medians of the rounds' ratios.
Values agree but for CKNNA, where platonic-rep adds 1e-6 to the denominator. A peer that cannot be
imported is said: put platonic-rep's metrics.py as `platonic_metrics.py` and the package `netrep` on
PYTHONPATH.

    python benchmarks/similarity.py peers [--images 1000] [--sites 12] [--corner 2] [--rounds 3]
    python benchmarks/similarity.py all --images 2000 --sites 40
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import activations
import numpy as np
import torch
from activations import Activations
from common import Result, add_record_option, interleaved, machine, record

from vitsee_core.analyses.similarity import choose_measures, run
from vitsee_core.analyses.similarity.comparing import compare_all
from vitsee_core.analyses.similarity.gram_reader import grams_of
from vitsee_core.analyses.similarity.measure import Measure
from vitsee_core.similarity import GramOptions, Representation

PARTS = ("peers", "all")
K = 10
QUADRATIC = ("mutual-knn", "cknna", "cka", "rsa", "gulp")
Pair = Callable[[int, int], float]


def main() -> None:
    """Prints the machine, and a line for each measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument(
        "--dim", type=int, default=4, help="of a token; p = 197 times this"
    )
    parser.add_argument("--sites", type=int, default=12)
    parser.add_argument(
        "--corner", type=int, default=2, help="sites that the peers compare"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--measure", action="append", help="of `all`; default: of n x n matrices"
    )
    parser.add_argument(
        "--folder", type=Path, help="for the store; default: the system's"
    )
    add_record_option(parser)
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="similarity-", dir=args.folder) as name:
        sizes = (args.images, args.dim, args.sites, min(args.sites, 8))
        made = activations.make(Path(name) / "made.zarr", *sizes)
        print(
            f"{args.sites} sites, {args.images} images, p = {made.n_features}", flush=True
        )
        if args.part == "all":
            rows = every_pair(made, args.measure or QUADRATIC)
        else:
            rows = against_peers(made, min(args.corner, args.sites), args.rounds)
    if args.record:
        shape = f"{args.sites} x {args.sites} sites of {args.images} images"
        titles = {
            "peers": "Measures of similarity beside others",
            "all": "All pairs of sites",
        }
        record(f"similarity-{args.part}", f"{titles[args.part]}, {shape}", rows)


def every_pair(made: Activations, names: tuple[str, ...]) -> list[Result]:
    """Seconds of the whole command, from a store whose Gram matrices are kept after the first."""
    began = time.perf_counter()
    run(made.store, metrics=["mutual-knn"], images=min(64, len(made.store.samples.id)))
    print(f"warm-up: {time.perf_counter() - began:.1f} s")
    rows = []
    with_grams = ", Gram matrices included"
    for name in names:
        began = time.perf_counter()
        table = run(made.store, metrics=[name])
        seconds = time.perf_counter() - began
        print(
            f"{name:>12}: {seconds:7.1f} s for {len(table)} pairs{with_grams}", flush=True
        )
        rows.append(
            Result(f"{name}, with jackknife{with_grams}", seconds, None, None, "s")
        )
        with_grams = ""
    return rows


def against_peers(made: Activations, corner: int, rounds: int) -> list[Result]:
    """A line for each measure and peer that is there."""
    rows = []
    for name, peer, label in peers(made):
        (measure,) = choose_measures(
            [name], k=K, rdm="pearson", ridge=1e-2, variance=0.99
        )
        rows.append(beside(made, measure, peer, label, corner, rounds))
    return rows


def beside(
    made: Activations, measure: Measure, peer: Pair, label: str, corner: int, rounds: int
) -> Result:
    """Ours of all pairs, and the peer's of a corner of them, scaled."""
    n, both = made.n_sites, not measure.symmetric
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j and (both or i < j)]
    some = [(i, j) for i, j in pairs if i < corner and j < corner]
    found: dict[str, Any] = {}

    def ours() -> None:
        sites = [Representation(made.store, site) for site in made.store.plan.sites]
        with grams_of(
            sites, None, options=GramOptions(use_cache=False, device="cpu")
        ) as grams:
            done = compare_all(grams, measure, np.array(pairs), intervals=False)
        found["ours"] = dict(zip(pairs, done.values.tolist(), strict=True))

    def theirs() -> float:
        began = time.perf_counter()
        found["theirs"] = {pair: peer(*pair) for pair in some}
        return (time.perf_counter() - began) * len(pairs) / len(some)

    seconds = interleaved({"ours": ours, "theirs": theirs}, rounds)
    apart = max(abs(found["ours"][pair] - found["theirs"][pair]) for pair in some)
    what = f"{measure.name} of {len(pairs)} pairs, against {label}"
    row = Result.of(what, seconds, "ours", "theirs")
    print(
        f"{measure.name:>12}: {row.ours:7.2f} s, {label} {row.other:8.2f} s, {row.ratio:6.1f} "
        f"times as long; values within {apart:.0e}",
        flush=True,
    )
    return row


def peers(made: Activations) -> list[tuple[str, Pair, str]]:
    """(measure, value of two sites by its peer, the peer's name); what is missing is said."""
    found: list[tuple[str, Pair, str]] = []
    if (theirs := _import("platonic_metrics")) is not None:
        unit = [
            torch.nn.functional.normalize(torch.from_numpy(x), dim=-1) for x in made.sites
        ]
        whole = [torch.from_numpy(x) for x in made.sites]
        of = theirs.AlignmentMetrics
        found += [
            (
                "mutual-knn",
                lambda i, j: of.mutual_knn(unit[i], unit[j], topk=K),
                "platonic-rep",
            ),
            ("cknna", lambda i, j: of.cknna(unit[i], unit[j], topk=K), "platonic-rep"),
            ("cka", lambda i, j: of.unbiased_cka(whole[i], whole[j]), "platonic-rep"),
        ]
    if (metrics := _import("netrep.metrics")) is not None:

        def angle(i: int, j: int) -> float:
            metric = metrics.LinearMetric(alpha=1.0, score_method="angular")
            x, y = (made.sites[k].astype(np.float64) for k in (i, j))
            return 1 - 2 / np.pi * float(metric.fit(x, y).score(x, y))

        found.append(("procrustes", angle, "netrep"))
    found += [
        (
            "mutual-knn",
            lambda i, j: by_neighbors(made, i, j),
            "scikit-learn's NearestNeighbors",
        ),
        ("ridge-r2", lambda i, j: by_ridge(made, i, j), "scikit-learn's RidgeCV"),
    ]
    return found


def by_neighbors(made: Activations, i: int, j: int) -> float:
    """Mutual k-NN by brute force, and sets."""
    from sklearn.neighbors import NearestNeighbors

    lists = []
    for x in (made.sites[i], made.sites[j]):
        search = NearestNeighbors(n_neighbors=K, metric="cosine", algorithm="brute").fit(
            x
        )
        lists.append(search.kneighbors(return_distance=False))
    return float(np.mean([len({*a} & {*b}) / K for a, b in zip(*lists, strict=True)]))


def by_ridge(made: Activations, i: int, j: int) -> float:
    """R^2 of site i from site j on left-out images, over the same ridges."""
    from sklearn.linear_model import RidgeCV

    target, source = (made.sites[k].astype(np.float64) for k in (i, j))
    source -= source.mean(0)
    n = len(target)
    alphas = 10.0 ** np.arange(-6, 7) * (source**2).sum() / n
    model = RidgeCV(alphas=alphas, store_cv_results=True).fit(source, target)
    least = model.cv_results_.sum((0, 1)).min()
    total = ((target - target.mean(0)) ** 2).sum() * (n / (n - 1)) ** 2
    return float(1 - least / total)


def _import(name: str) -> Any:
    """A peer, None where it is missing. platonic-rep imports torchaudio for another metric."""
    try:
        importlib.import_module("torchaudio.functional")
    except (ImportError, OSError):
        empty = types.ModuleType("torchaudio.functional")
        empty.edit_distance = None  # type: ignore[attr-defined]
        sys.modules["torchaudio"] = types.ModuleType("torchaudio")
        sys.modules["torchaudio"].functional = empty  # type: ignore[attr-defined]
        sys.modules["torchaudio.functional"] = empty
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"{name} is missing, and left out ({error})")
        return None


if __name__ == "__main__":
    main()
