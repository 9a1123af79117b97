"""How often each kind of 95 % interval contains the truth: simulated samples of known populations.

    python benchmarks/interval_coverage.py           # the table, in some minutes
    python benchmarks/interval_coverage.py --page    # into docs/guide/intervals.md

Two truths: what samples of this size give on average, and the value of the population (where it has
one), which an estimate that depends on the number of images does not reach. `before`: the same of
the intervals that these replaced.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tests.stores import write_labelled
from vitsee_core.analyses import retrieve, similarity, spectrum
from vitsee_core.analyses.spectrum.measures import TwoNearest
from vitsee_core.analyses.spectrum.site_spectra import METRICS as SPECTRUM_METRICS
from vitsee_core.statistics.image_statistics import block_labels
from vitsee_core.statistics.jackknife import (
    block_sums,
    interval,
    largest_t,
    means_without,
    standard_error,
)
from vitsee_core.statistics.medians import pooled_median
from vitsee_core.statistics.moments import Moments, t_quantile
from vitsee_core.statistics.shares import as_share
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.labelled_rows import accuracy_interval

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "intervals.md"
START, END = "<!-- coverage -->", "<!-- end -->"
Array = NDArray[Any]
Ends = tuple[float, float]


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval, and the interval that it had before."""

    value: float
    now: Ends
    before: Ends | None = None


Sample = Callable[[np.random.Generator], Mapping[str, Interval]]


@dataclass(frozen=True)
class Case:
    """sample: one sample's intervals by name; population: name -> value, where it has one; nothing
    is said of the average where `fixed`."""

    n: int
    repeats: int
    sample: Sample
    population: Mapping[str, float] = field(default_factory=dict)
    fixed: bool = False


def symmetric(values: Array) -> Interval:
    """The mean with its t interval."""
    moments = Moments()
    moments.add(values)
    found = moments.summary()
    return Interval(float(found.mean), (float(found.low), float(found.high)))


def share(values: Array) -> Interval:
    """A mean of shares, and its symmetric interval as before."""
    before = symmetric(values)
    moments = Moments()
    moments.add(values)
    cells = as_share(moments.summary().cells())
    return Interval(before.value, (cells["low"], cells["high"]), before.now)


def median(values: Array) -> Interval:
    """Of (images, tokens); before: a delete-a-block jackknife of 20 blocks."""
    medians = pooled_median(values)
    labels = block_labels(len(values), None)
    without = np.array([np.median(values[labels != block]) for block in range(20)])
    _, low, high = interval(medians.value[0], without)
    now = float(medians.low[0]), float(medians.high[0])
    return Interval(float(medians.value[0]), now, (float(low), float(high)))


def median_column(rng: np.random.Generator, n: int, n_columns: int) -> Interval:
    """The median over columns of their correlations with as many predictions."""
    predicted = rng.normal(size=(n, n_columns))
    response = predicted + 2 * rng.normal(size=(n, n_columns))
    labels = block_labels(n, None)

    def value(images: Array) -> float:
        x, y = predicted[images], response[images]
        x, y = x - x.mean(0), y - y.mean(0)
        return float(np.median((x * y).sum(0) / np.sqrt((x * x).sum(0) * (y * y).sum(0))))

    found = value(labels >= 0)
    without = np.array([value(labels != block) for block in range(20)])
    _, low, high = interval(np.array(found), without)
    return Interval(found, (float(low), float(high)))


def accuracy(right: Array) -> Interval:
    value, _, low, high = accuracy_interval(right)
    return Interval(value, (low, high))


def of_rows(table: Table) -> dict[str, Interval]:
    return {
        str(metric): Interval(float(value), (float(low), float(high)))
        for metric, value, low, high in zip(
            *(table[name] for name in ("metric", "value", "low", "high")), strict=True
        )
    }


def features(
    rng: np.random.Generator, n: int, dim: int = 20, classes: int = 4
) -> tuple[Array, Array]:
    """Classes with a channel of their own each, and channels of falling variance."""
    labels = rng.integers(0, classes, n)
    means = 1.5 * np.eye(classes, dim)
    x = (rng.normal(size=(n, dim)) + means[labels]) / np.arange(1, dim + 1) ** 0.5
    return x, labels


def spectra(rng: np.random.Generator, n: int, folder: Path) -> dict[str, Interval]:
    x, labels = features(rng, n, 64, 10)
    store = write_labelled(
        folder / f"{rng.integers(1 << 60)}.zarr", {"pooled": x}, labels
    )
    metrics = [name for name in SPECTRUM_METRICS if name not in ("twonn", "nc4")]
    return of_rows(spectrum.run(store, sites=["head"], metrics=metrics))


def pairs(rng: np.random.Generator, n: int, folder: Path) -> dict[str, Interval]:
    """A representation and another of the same images, with noise of its own."""
    x, labels = features(rng, n)
    mix = np.random.default_rng(0).normal(size=(20, 16)) / 4
    sites = {"pooled": x, "logits": x @ mix + 0.7 * rng.normal(size=(n, 16))}
    store = write_labelled(folder / f"{rng.integers(1 << 60)}.zarr", sites, labels)
    sides: dict[str, Any] = {
        "sites_a": ["pooled"],
        "sites_b": ["logits"],
        "no_cache": True,
    }
    return of_rows(similarity.run(store, metrics=list(similarity.MEASURES), **sides))


def retrieval(rng: np.random.Generator, n: int, folder: Path) -> dict[str, Interval]:
    """Two layers, one a little better, and their paired difference."""
    labels = rng.integers(0, 4, n)
    x, y = (rng.normal(size=(n, 8)) + far * np.eye(4, 8)[labels] for far in (1.6, 1.4))
    sites = {"pooled": x, "logits": (x + y) / 2}
    store = write_labelled(folder / f"{rng.integers(1 << 60)}.zarr", sites, labels)
    table = retrieve.run(store, sites=["head"], at=(1,), per_query=True)
    table = table.filter(pl.col("baseline").is_null())
    found = {}
    for metric in ("map", "mp@1"):
        one = table.filter(metric=metric, site="pooled")
        half = t_quantile(n - 1) * float(one["std"][0]) / n**0.5
        value = float(one["value"][0])
        now = float(one["low"][0]), float(one["high"][0])
        found[metric] = Interval(value, now, (value - half, value + half))
    rows = [table.filter(metric="map", site=site) for site in ("pooled", "logits")]
    each = [
        table.filter(metric="ap", site=site)["value"] for site in ("pooled", "logits")
    ]
    without = [row.replicates[0] for row in rows if row.replicates is not None]
    value = float(rows[0]["value"][0]) - float(rows[1]["value"][0])
    _, low, high = interval(np.array(value), without[0] - without[1])
    before = symmetric((each[0] - each[1]).astype(float))
    found["difference of map"] = Interval(value, (float(low), float(high)), before.now)
    return found


def best_of(rng: np.random.Generator, n: int) -> dict[str, Interval]:
    """Thirteen equally good layers: the best less the one that its intervals set farthest apart."""
    right = (rng.normal(size=(n, 1)) + rng.normal(size=(n, 13)) > -0.5).astype(float)
    labels = block_labels(n, None)
    without = means_without(
        block_sums(right, labels, 20), block_sums(np.ones(n), labels, 20)
    )
    value = right.mean(0)
    best = int(value.argmax())
    error = standard_error(without[best] - without)
    t = np.divide(value[best] - value, error, out=np.zeros(13), where=error > 0)
    i = int(t.argmax())
    gap, now, before = value[best] - value[i], largest_t(without), t_quantile(19)
    ends = [(float(gap - q * error[i]), float(gap + q * error[i])) for q in (now, before)]
    return {"best layer of 13 less another": Interval(float(gap), *ends)}


def twonn(rng: np.random.Generator, n: int) -> dict[str, Interval]:
    """A cube of four dimensions; before: without a block, neighbours found anew."""
    found = TwoNearest(rng.uniform(size=(n, 4)), labels := block_labels(n, None))
    value, every = found.dimension(np.ones(20, bool)), np.arange(20)
    anew = np.array([found.dimension(every != b) for b in range(labels.max() + 1)])
    now, before = (
        tuple(map(float, interval(np.array(value), replicates)[1:]))
        for replicates in (found.replicates(), anew)
    )
    return {"twonn": Interval(value, now, before)}  # type: ignore[arg-type]


def cases(folder: Path) -> Iterator[Case]:
    """All, from the plainest on."""

    def rare(rng: np.random.Generator) -> Array:
        return (rng.random(50) < 0.02).astype(float)

    def fractions(rng: np.random.Generator) -> Array:
        return (rng.random(50) < 0.1) * rng.binomial(64, rng.beta(2, 8, 50)) / 64

    yield Case(
        50, 2000, lambda rng: {"mean (norm, distance_px)": symmetric(rng.lognormal(0, 0.5, 50))},
        {"mean (norm, distance_px)": np.exp(0.125)},
    )  # fmt: skip
    alone = "median of one token (norm_ratio_median)"
    together = "median of all patches (norm_median)"
    for n in (20, 100, 1000):

        def medians(rng: np.random.Generator, n: int = n) -> dict[str, Interval]:
            of_image, of_token = rng.normal(size=(n, 1)), rng.normal(size=(n, 16))
            return {
                alone: median(rng.lognormal(0, 1, (n, 1))),
                together: median(np.exp((of_image + of_token) / 2)),
            }

        yield Case(n, 4000, medians, {alone: 1.0, together: 1.0})
    columns = "median of 20 columns (r_median)"
    yield Case(100, 500, lambda rng: {columns: median_column(rng, 100, 20)})
    yield Case(
        100, 2000, lambda rng: {"accuracy (top1)": accuracy(rng.random(100) < 0.9)},
        {"accuracy (top1)": 0.9},
    )  # fmt: skip
    name = "share of 2 % of the images (sink_share, lens_top1)"
    yield Case(50, 2000, lambda rng: {name: share(rare(rng))}, {name: 0.02})
    tokens = "share of 2 % of tokens, of a tenth of the images (outlier_share)"
    yield Case(50, 2000, lambda rng: {tokens: share(fractions(rng))}, {tokens: 0.02})
    yield Case(100, 120, lambda rng: retrieval(rng, 100, folder))
    yield Case(300, 200, lambda rng: twonn(rng, 300), {"twonn": 4.0})
    rng = np.random.default_rng(1)
    large = {name: one.value for name, one in spectra(rng, 20_000, folder).items()}
    yield Case(200, 100, lambda rng: spectra(rng, 200, folder), large)
    large = {name: one.value for name, one in pairs(rng, 1000, folder).items()}
    neighbours = {"mutual_knn", "cknna"}  # of 10 among n: another question for another n
    large = {name: value for name, value in large.items() if name not in neighbours}
    yield Case(100, 50, lambda rng: pairs(rng, 100, folder), large)
    yield Case(
        400,
        300,
        lambda rng: best_of(rng, 400),
        {"best layer of 13 less another": 0.0},
        fixed=True,
    )


def rows_of(case: Case) -> Iterator[str]:
    """Lines of the table."""
    rng, found = np.random.default_rng(0), defaultdict[str, list[Interval]](list)
    for _ in range(case.repeats):
        for name, one in case.sample(rng).items():
            found[name].append(one)
    for name, all_ in found.items():
        known = [one for one in all_ if np.isfinite([one.value, *one.now]).all()]
        if len(known) < case.repeats / 2:
            continue
        average = float(np.mean([one.value for one in known]))
        population = case.population.get(name)
        truth = population if case.fixed and population is not None else average

        def covered(truth: float | None, ends: list[Ends | None]) -> str:
            there = [one for one in ends if one is not None]
            if truth is None or not there:
                return ""
            return f"{100 * np.mean([low <= truth <= high for low, high in there]):.0f} %"

        now, before = [one.now for one in known], [one.before for one in known]
        cells = (
            f"{name} | {case.n} | {case.repeats}",
            "" if case.fixed else covered(truth, [*now]),
            covered(population, [*now]),
            covered(truth, before),
        )
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--page", action="store_true", help="write it into the page")
    args = parser.parse_args()
    logging.disable()
    lines = [
        "| 95 % interval of | n | samples | average of samples | population | before |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder)):
            for line in rows_of(case):
                lines.append(line)
                print(line, flush=True)
    if args.page:
        text = PAGE.read_text()
        before, rest = text.split(START)
        PAGE.write_text(
            f"{before}{START}\n\n" + "\n".join(lines) + f"\n\n{END}{rest.split(END)[1]}"
        )


if __name__ == "__main__":
    main()
