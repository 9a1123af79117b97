"""How fast is `vitsee cka` and how right, beside packages and the published scheme?

Claims, at the sizes that README gives:
    batch    one batch of 1024 images, 40 x 40 sites, against the published scheme and packages
    repeats  20 repeats of minibatches of 1024 out of 4096 images, against the published scheme
    rate     useful operations of a Gram pass, n (n + 1) p, over this process's GEMM rate
    right    CKA within 1e-5 of float64, features with a large common offset included
in float32.
Made-up activations in a store (float16); the peers get the same values as float32 in RAM, which
favours them. The packages' cost is per pair: they run on a corner of the sites and are scaled,
unless --full. Sides alternate in one process; medians, and medians of the rounds' ratios.

    python benchmarks/cka.py [batch repeats rate right]                 # small sizes
    python benchmarks/cka.py batch rate --sites 40 --dim 384 --images 1024 --corner 8  # p = 75648
    python benchmarks/cka.py batch --sites 40 --dim 384 --images 512 --corner 8
    python benchmarks/cka.py repeats --repeat-sites 2 --distinct 2 --dim 384 --rounds 3 \\
        --repeat-images 4096 --repeat-batch 1024
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import activations
import cka_peers as peers
import numpy as np
import torch
from activations import Activations
from cka_peers import Float64
from common import Result, add_record_option, interleaved, machine, paired_ratio, record
from threadpoolctl import threadpool_info

from vitsee_core.similarity import (
    Estimator,
    GramOptions,
    Hsic,
    Representation,
    centred_alignment,
    hsic,
    summarise,
)
from vitsee_core.similarity.products import GramTile, Workspace, products

PARTS = ("batch", "repeats", "rate", "right")
UNCACHED = GramOptions(use_cache=False, device="cpu")
SEED = 0
THE = {"published scheme": "the published scheme"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--folder", type=Path, help="for the stores; default: /tmp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sites", type=int, default=8, help="of batch and rate")
    parser.add_argument("--images", type=int, default=512, help="of batch and rate")
    parser.add_argument("--dim", type=int, default=96, help="a token; p = 197 times this")
    parser.add_argument(
        "--distinct", type=int, default=8, help="sites with values of their own"
    )
    parser.add_argument(
        "--corner", type=int, default=4, help="sites that the packages compare"
    )
    parser.add_argument("--full", action="store_true", help="the packages on all sites")
    parser.add_argument("--repeat-sites", type=int, default=4)
    parser.add_argument("--repeat-images", type=int, default=1024)
    parser.add_argument("--repeat-batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=20)
    add_record_option(parser)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(
            f"no such part: {', '.join(sorted(unknown))}; choose of {', '.join(PARTS)}"
        )
    parts = args.parts or PARTS
    say_machine()
    with tempfile.TemporaryDirectory(prefix="cka-", dir=args.folder) as name:
        folder = Path(name)
        if "batch" in parts or "rate" in parts:
            made = make(folder, args.images, args.dim, args.sites, args.distinct)
            what = f"{args.sites} x {args.sites} sites of {made.n_features:,} features"
            if "batch" in parts:
                rows = one_batch(
                    made, args.rounds, args.sites if args.full else args.corner
                )
                if args.record:
                    record("cka", f"`vitsee cka`, {what}, {args.images:,} images", rows)
            if "rate" in parts:
                rows = gram_rate(made, args.rounds)
                if args.record:
                    what = f"{args.images:,} images of {made.n_features:,} features"
                    record("gram", f"A Gram pass, {what}", rows)
            del made
        if "repeats" in parts:
            sizes = (args.repeat_images, args.dim, args.repeat_sites, args.distinct)
            made = make(folder, *sizes)
            rows = many_repeats(made, args.repeat_batch, args.repeats, args.rounds)
            if args.record:
                title = f"{args.repeats} repeats of minibatches of {args.repeat_batch:,} out of "
                title += f"{args.repeat_images:,} images, {args.repeat_sites} sites"
                record("cka-repeats", f"{title} of {made.n_features:,} features", rows)
        if "right" in parts:
            offsets(folder)


def say_machine() -> None:
    """The lines that every result depends on."""
    pools = {p["internal_api"]: p["num_threads"] for p in threadpool_info()}
    threads = ", ".join(f"{name} {n}" for name, n in sorted(pools.items()))
    print(machine())
    print(f"numpy {np.__version__}, torch {torch.__version__}; threads: {threads}")
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)


def make(folder: Path, images: int, dim: int, sites: int, distinct: int) -> Activations:
    """Activations in a folder of their own, said."""
    path = Path(tempfile.mkdtemp(dir=folder)) / "made.zarr"
    made = activations.make(path, images, dim, sites, distinct)
    size = sites * images * made.n_features * 2 / 1e9
    print(
        f"\n{sites} sites ({len(made.features)} of different values, each stored by itself), "
        f"{images} images, p = {made.n_features}: {size:.2f} GB of float16",
        flush=True,
    )
    return made


def ours(made: Activations, estimator: Estimator) -> Hsic:
    """From the store to all pairs; no Gram matrix is there yet and none stays."""
    sites = [Representation(made.store, site) for site in made.store.plan.sites]
    return hsic(sites, estimator=estimator, seed=SEED, options=UNCACHED)


def one_batch(made: Activations, rounds: int, corner: int) -> list[Result]:
    """All images as one batch: ours, the published scheme, the packages."""
    n, n_sites = made.store.plan.n_images, made.n_sites
    batch = Estimator("minibatch", batch=n, examples=n, repeats=1)
    found: dict[str, Float64] = {}

    def of_engine() -> Float64:
        h = ours(made, batch)
        return centred_alignment(h.cross, h.rows, h.cols)

    sides: dict[str, Callable[[], object]] = {
        "vitsee": of_engine,
        "published scheme": lambda: peers.alignment(
            peers.published_hsic(made.sites, [None])
        ),
        "cast apart": lambda: cast_seconds(made),
    }
    seconds = interleaved(sides, rounds, found=found)
    table(f"one batch of {n}, {n_sites} x {n_sites} sites", seconds, "vitsee")
    rows = results(seconds, ["published scheme"], ", given float32 in memory")
    print(
        "(cast: the same bytes from float16 to float32 in RAM, of which the scheme is spared)"
    )

    c = min(corner, n_sites)
    some = made.sites[:c]

    def package(name: str) -> Callable[[], float]:
        run, scale = peers.PACKAGES[name]

        def side() -> float:
            seconds, found[name] = run(some)
            return seconds * scale(n_sites, c)

        return side

    there = peers.installed()
    how = "run whole" if c == n_sites else f"scaled from {c} x {c} sites"
    alternate = {"vitsee": sides["vitsee"], **{name: package(name) for name in there}}
    seconds = interleaved(alternate, 1, warmup=0)
    table(f"packages, {how}, once", seconds, "vitsee")
    rows += results(seconds, there, f", {how}, given float32 in memory")
    few = made.sites[: max(c, min(n_sites, len(made.features)))]
    agreement(found, peers.alignment(peers.float64_hsic(few)))
    return rows


def results(
    seconds: Mapping[str, Sequence[float]], others: Sequence[str], more: str
) -> list[Result]:
    """Ours against each of the others."""
    what = f"vitsee, against {{}}{more}"
    return [
        Result.of(what.format(THE.get(other, other)), seconds, "vitsee", other)
        for other in others
    ]


def cast_seconds(made: Activations) -> float:
    """From float16 to float32 into a buffer, all sites."""
    halves = torch.from_numpy(made.features[0]).half()
    buffer = torch.empty_like(halves, dtype=torch.float32)
    began = time.perf_counter()
    for _ in range(made.n_sites):
        buffer.copy_(halves)
    return time.perf_counter() - began


def many_repeats(
    made: Activations, batch: int, repeats: int, rounds: int
) -> list[Result]:
    """Minibatches, drawn anew each repeat: ours from one Gram matrix a site, theirs one a batch."""
    n = made.store.plan.n_images
    examples = n - n % batch
    estimator = Estimator("minibatch", batch=batch, examples=examples, repeats=repeats)
    drawn = draw(n, batch, examples, repeats)
    found: dict[str, Float64] = {}

    def published() -> Float64:
        each = [
            peers.alignment(peers.published_hsic(made.sites, batches))
            for batches in drawn
        ]
        return np.asarray(np.mean(each, 0))

    title = f"{repeats} repeats, batches of {batch} out of {n}, {made.n_sites} sites"
    sides: dict[str, Callable[[], Float64]] = {
        "vitsee": lambda: summarise(ours(made, estimator)).cka,
        "published scheme": published,
    }
    seconds = interleaved(sides, max(1, rounds // 3), warmup=0, found=found)
    table(title, seconds, "vitsee")
    # One repeat in float64, which takes its time.
    h = ours(made, Estimator("minibatch", batch=batch, examples=examples, repeats=1))
    one = {
        "vitsee": centred_alignment(h.cross, h.rows, h.cols),
        "published scheme": peers.alignment(peers.published_hsic(made.sites, drawn[0])),
    }
    exact = np.sum([peers.float64_hsic(made.sites, rows) for rows in drawn[0]], 0)
    agreement(one, peers.alignment(exact))
    off = largest(found["vitsee"], found["published scheme"])
    print(f"over all repeats, vitsee and the scheme differ by at most {off:.1e}")
    return results(seconds, ["published scheme"], ", given float32 in memory")


def draw(n: int, batch: int, examples: int, repeats: int) -> list[list[peers.Rows]]:
    """The batches that the engine draws with SEED: a permutation a repeat, cut."""
    rng = np.random.default_rng(SEED)
    orders = [rng.permutation(n) for _ in range(repeats)]
    return [
        [order[at : at + batch] for at in range(0, examples, batch)] for order in orders
    ]


def gram_rate(made: Activations, rounds: int) -> list[Result]:
    """Useful operations a second of a Gram pass, over the best GEMM's of this process."""
    n, p = made.store.plan.n_images, made.n_features
    site = Representation(made.store, made.store.plan.sites[0]).features
    images = np.arange(n)
    useful, bare = n * (n + 1) * p, made.features[0]

    workspace = Workspace()

    def gram() -> None:
        whole = slice(0, n)
        tile = [GramTile(whole, whole)]
        how = {
            "device": "cpu",
            "memory": 1 << 32,
            "fused": True,
        }  # as for all sites together
        list(products(site, images, tile, workspace=workspace, **how))  # type: ignore[arg-type]

    def read() -> None:
        for strip in site.strips(16384):
            for k in range(made.store.plan.n_slabs):
                strip.read(made.store.plan.rows(k))

    size, square = (
        2048,
        np.random.default_rng(0).normal(size=(2, 2048, 2048)).astype(np.float32),
    )
    a, b = torch.from_numpy(square[0]), torch.from_numpy(square[1])
    sides: dict[str, Callable[[], object]] = {
        "Gram pass": gram,
        "reading alone": read,
        "numpy x @ x.T, in RAM": lambda: np.matmul(bare, bare.T),
        "numpy GEMM": lambda: np.matmul(square[0], square[1]),
        "torch GEMM": lambda: torch.mm(a, b),
    }
    work = dict.fromkeys(sides, useful) | dict.fromkeys(
        ("numpy GEMM", "torch GEMM"), 2 * size**3
    )
    seconds = interleaved(sides, 2 * rounds)
    rates = {k: [work[k] / s / 1e9 for s in spent] for k, spent in seconds.items()}
    best = [
        max(pair) for pair in zip(rates["numpy GEMM"], rates["torch GEMM"], strict=True)
    ]
    print(
        f"\na Gram matrix of {n} images, p = {p}: {useful / 1e9:.1f} G useful operations"
    )
    for name, spent in seconds.items():
        rate = "" if "reading" in name else f"{statistics.median(rates[name]):7.0f} G/s"
        print(f"  {name:40} {1e3 * statistics.median(spent):9.1f} ms {rate}")
    in_memory, what = (
        "numpy x @ x.T, in RAM",
        "Gram pass, reading and casting included, against",
    )
    ratio = paired_ratio(rates["Gram pass"], best)
    print(f"  Gram pass over the best GEMM: {ratio:.2f}")
    medians = statistics.median(rates["Gram pass"]), statistics.median(best)
    rows = [Result(f"{what} the best float32 GEMM", *medians, ratio, "G/s")]
    what = f"{what} numpy's x @ x.T of float32 in memory"
    rows.append(Result.of(what, seconds, "Gram pass", in_memory))
    print(f"  {in_memory} over the Gram pass: {rows[-1].ratio:.2f}")
    return rows


def offsets(folder: Path) -> None:
    """CKA of features with a common offset: float32 without centring is lost there."""
    print(
        "\nlargest error of CKA, 4 sites, 256 images, p = 6304, by the features' common offset"
    )
    for offset in (0.0, 10.0, 300.0):
        made = activations.make(
            folder / f"offset-{offset:.0f}.zarr", 256, 32, 4, 4, offset
        )
        h = ours(made, Estimator("exact"))
        found = {
            "vitsee": centred_alignment(h.cross, h.rows, h.cols),
            "published scheme": peers.alignment(peers.published_hsic(made.sites, [None])),
        }
        print(f"  offset {offset:.0f} standard deviations:")
        agreement(found, peers.alignment(peers.float64_hsic(made.sites)))


def table(title: str, seconds: Mapping[str, Sequence[float]], first: str) -> None:
    """A row a side: median seconds and ratio to the first."""
    rounds = len(next(iter(seconds.values())))
    print(f"\n{title}; medians of {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for name, spent in seconds.items():
        ratio = paired_ratio(spent, seconds[first])
        print(
            f"  {name:40} {statistics.median(spent):9.2f} s  {ratio:8.2f} x", flush=True
        )


def agreement(found: Mapping[str, Float64], exact: Float64) -> None:
    """Largest difference of CKA from float64, over the pairs that both have."""
    for name, value in found.items():
        n = min(len(value), len(exact))
        print(
            f"  {name:40} within {largest(value[:n, :n], exact[:n, :n]):.1e} of float64, {n} x {n}"
        )


def largest(a: Float64, b: Float64) -> float:
    """Largest absolute difference."""
    return float(np.abs(a - b).max())


if __name__ == "__main__":
    main()
