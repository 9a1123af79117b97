"""Norm ratio: does a layer pass on what came, or write something new?

Per image, token and sublayer (attention or MLP of a transformer, a residual block of a CNN, token
or channel mixing of a Mixer), from skip z and branch f(z) over channels (Raghu et al. 2021,
section 6):

- `norm_ratio`, `norm_ratio_median`, `norm_ratio_geomean`: mean, median and geometric mean over
  images of |z| / |f(z)| (Figs. 7, E.1). Above 1 the skip dominates. The paper does not say which
  mean; the arithmetic one is inflated by images with a small branch, which the other two reveal.
- `cos_branch`: mean over images of the cosine of z and f(z) (Fig. E.2 by its caption).
- `cos_out`: of z and z + f(z), the sublayer's output (Fig. E.2 by the text).
- `skip_norm`, `branch_norm`: mean over images of |z| and |f(z)|; of all tokens as one vector
  (`flat`) the norms that the code of Walmer et al. 2023 dumps. Not by default.

Images first, then tokens: a row about several tokens has the mean of the tokens' own statistics.
The branch includes a layer scale; the skip of the first block of a CNN's stage is the shortcut's
output; the sum is the one before the activation.

Where f(z) = 0, as in every block of a freshly initialised ResNet, there is no ratio and no
`cos_branch`: such tokens of images are left out, counted and named; `cos_out` is 1 there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.normratio.token_pictures import draw_norm_ratios
from vitsee_core.declaration import Analysis
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import (
    FLOW,
    Offers,
    Option,
    metrics_option,
    tokens_option,
)
from vitsee_core.runtime.progress import SITE_IMAGES, counting
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.statistics.image_statistics import (
    METHODS,
    Estimates,
    Statistic,
    block_labels,
    estimates_of,
    statistic,
)
from vitsee_core.statistics.jackknife import columns_of
from vitsee_core.statistics.skip_branch import (
    TOKENS,
    ReadQuantities,
    StoredSublayer,
    TokenPlace,
    choose_sublayers,
    missing_tokens,
    place_columns,
    places_of,
)
from vitsee_core.tables.columns import SITE, in_time, site_columns
from vitsee_core.tables.headlines import Answer, by_store, extremes, measured
from vitsee_core.tables.metrics import asked_for
from vitsee_core.tables.replicates import stacked
from vitsee_core.tables.results import Table
from vitsee_core.types import Float, Integers, Mask
from vitsee_stores import Store
from vitsee_stores.errors import SiteError
from vitsee_stores.manifest import abbreviate

log = logging.getLogger(__name__)

plot = draw_norm_ratios

# metric -> (quantity of each image, statistic over images)
METRICS = {
    "norm_ratio": ("norm_ratio", "mean"),
    "norm_ratio_median": ("norm_ratio", "median"),
    "norm_ratio_geomean": ("norm_ratio", "geomean"),
    "cos_branch": ("cos_branch", "mean"),
    "cos_out": ("cos_out", "mean"),
    "skip_norm": ("skip_norm", "mean"),
    "branch_norm": ("branch_norm", "mean"),
}
# statistic over images -> the method of its interval
INTERVALS = {"mean": "mean", "median": "median", "geomean": "jackknife"}
DEFAULT_METRICS = tuple(METRICS)[:5]
COLUMNS = (
    *(*SITE, "token", "row", "col", "metric"),
    *("value", "std", "low", "high", "n_images"),
)
# A token of an image: three quantities, and what a statistic takes beside them.
BYTES_A_TOKEN = 8 * 12
PIECE_BYTES = (
    16 << 20
)  # statistics are computed of so many tokens at a time, to stay in cache


@analysis
def run(
    *stores: Store,
    metrics: Annotated[
        Sequence[str],
        metrics_option(
            METRICS,
            "all but the norms",
            "norm_ratio: |z| / |f(z)|, mean over images; _median and _geomean likewise; "
            "cos_branch: cosine of z and f(z); cos_out: of z and z + f(z); skip_norm, "
            "branch_norm: |z|, |f(z)|.",
        ),
    ] = DEFAULT_METRICS,
    sites: Annotated[
        Sequence[str],
        Option(
            "Sublayers by name, glob or kind (blocks.3.attn, 'blocks.1?.mlp', layer1.0, attn, "
            "mlp); blocks.-1.mlp counts from the end.",
            metavar="SUBLAYER",
            default="every residual sublayer",
        ),
    ] = ("blocks",),
    tokens: Annotated[Sequence[str], tokens_option(TOKENS)] = ("each",),
    execution: Annotated[
        Execution, Offers("images seed jobs memory", dask="slabs")
    ] = DEFAULT,
) -> Table:
    """One row per store, metric, sublayer and token, or kind of token.

    Columns: see `COLUMNS`; only the norms have a unit, that of activations; `token` as in a
    `TokenPlace`, with `row` and `col` for a cell; `low`, `high` the 95 % interval and `std`
    as in `image_statistics.METHODS`; `n_images` the images with a value. NaN: no image has a value
    (`value`), or fewer than two (the others). The stores may have different images.

    Memory: all images of as many tokens of one sublayer as fit; a sublayer that does not fit is
    read several times.

    Args:
        stores: with residual dot products; those without are left out where others have them.

    Raises:
        MissingInput: no store has dot products.
        SiteError: a pattern that matches in no store or tokens that no store has, or a store left
            without any.
        VitseeError: unknown metric, or no valid image among those asked for.
    """
    wanted = asked_for(metrics, METRICS, "normratio")
    selected = choose_sublayers(stores, sites)
    stores = tuple(selected.stores)
    plans = selected.chosen
    _check_tokens(stores, plans, tokens)
    chosen = [execution.rows(store) for store in stores]
    blocks: list[dict[str, Any]] = []
    zero: dict[str, dict[str, str]] = {}
    total = sum(r.n * len(plan) for r, plan in zip(chosen, plans, strict=True))
    with counting(execution.progress, total, SITE_IMAGES) as progress:
        for store, plan, picked in zip(stores, plans, chosen, strict=True):
            measure = _Measure(store, picked, execution)
            counts: dict[str, tuple[int, int]] = {}
            for sublayer in plan:
                places = places_of(sublayer.layout, tokens)
                if places:
                    statistics, counts[sublayer.site] = measure(sublayer, places, wanted)
                    at = place_columns(places)
                    blocks += [
                        {
                            **site_columns(store, sublayer),
                            **at,
                            "metric": metric,
                            **columns_of(of),
                        }
                        for metric, of in statistics.items()
                    ]
                progress.advance(picked.n)
            zero[store.label] = _report_zeros(store.label, counts)
    notes = {
        "interval": {metric: METHODS[INTERVALS[METRICS[metric][1]]] for metric in wanted},
        "std": METHODS["std"],
        "tokens": "rows about several tokens: the mean over them of each one's statistic",
        "zero_branch": {label: sites for label, sites in zero.items() if sites},
        "seed": execution.seed,
        "images": {s.label: r.describe() for s, r in zip(stores, chosen, strict=True)},
        **selected.notes(),
    }
    columns = in_time(COLUMNS, [sublayer.layout for plan in plans for sublayer in plan])
    return Table.concat(blocks, columns, notes)


def _check_tokens(
    stores: Sequence[Store],
    plans: Sequence[Sequence[StoredSublayer]],
    words: Sequence[str],
) -> None:
    """Log which tokens are missing where; refuse those that are missing everywhere. Raises
    SiteError: see `run`."""
    for word in words:
        served = [any(places_of(s.layout, [word]) for s in plan) for plan in plans]
        for store, plan in zip(stores, plans, strict=True):
            said = missing_tokens(store.label, plan, word)
            if said is not None and not any(served):
                raise SiteError(said)
            if said is not None:
                log.info("%s: no row for these", said)
    for store, plan in zip(stores, plans, strict=True):
        if not any(places_of(s.layout, words) for s in plan):
            raise SiteError(
                missing_tokens(store.label, plan, words[0])
                or f"no tokens of {store.label} were asked for; give --tokens"
            )


class _Measure:
    def __init__(self, store: Store, rows: Rows, execution: Execution) -> None:
        self.store = store
        self.rows = rows
        self.execution = execution
        self.n = int((rows.mask & store.valid).sum())
        shuffled = store.shuffled
        self.labels = block_labels(self.n, None if shuffled else execution.seed)
        self.tokens_at_once = max(1, execution.budget // (BYTES_A_TOKEN * self.n))

    def __call__(
        self,
        sublayer: StoredSublayer,
        places: Sequence[TokenPlace],
        metrics: Sequence[str],
    ) -> tuple[dict[str, Estimates], tuple[int, int]]:
        """metric -> one entry per place; and how many tokens of images have f(z) = 0, of how
        many."""
        tokens = np.array(sorted({token for place in places for token in place.members}))
        places_of = {
            metric: Places([place.members for place in places]) for metric in metrics
        }
        names = tuple(dict.fromkeys(METRICS[metric][0] for metric in metrics))
        n_zero = 0
        for some in _pieces(tokens, self.tokens_at_once):
            values, zeros = self._read(
                ReadQuantities(sublayer.site, tuple(some.tolist()), names)
            )
            n_zero += zeros
            few_tokens = max(1, PIECE_BYTES // (BYTES_A_TOKEN * self.n))
            for at in _pieces(np.arange(len(some)), few_tokens):
                for metric, places_of_metric in places_of.items():
                    quantity, estimator = METRICS[metric]
                    of = statistic(values[quantity][at], estimator, self.labels)
                    places_of_metric.add(of, some[at])
        estimates = {metric: of.estimates() for metric, of in places_of.items()}
        return estimates, (n_zero, len(tokens) * self.n)

    def _read(self, work: ReadQuantities) -> tuple[dict[str, Float], int]:
        """Quantity -> (tokens, images) of all slabs; and how many f(z) are 0."""
        values = {name: np.empty((len(work.tokens), self.n)) for name in work.names}
        done = n_zero = 0
        jobs = self.execution.jobs
        map = self.execution.map
        for of_names, zeros in each_slab(
            self.store, work, rows=self.rows, jobs=jobs, map=map
        ):
            n_zero += zeros
            for name, of_slab in of_names.items():
                values[name][:, done : done + of_slab.shape[1]] = of_slab
            done += of_slab.shape[1]
        return values, n_zero


def _pieces(items: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


def _report_zeros(label: str, counts: dict[str, tuple[int, int]]) -> dict[str, str]:
    """Name the sublayers with f(z) = 0 on stderr; site -> where, for the sidecar."""
    whole = [site for site, (zero, of) in counts.items() if zero == of]
    part = {site: (zero, of) for site, (zero, of) in counts.items() if 0 < zero < of}
    if whole:
        log.warning(
            "%s: the branch is 0 in every image and token of %s: no norm ratio, no cos_branch",
            label,
            ", ".join(whole),
        )
    if part:
        shown = [
            f"{site} ({zero} of {of} tokens of images)"
            for site, (zero, of) in part.items()
        ]
        log.warning("%s: the branch is 0, and left out, in %s", label, abbreviate(shown))
    return {
        site: f"f(z) = 0 in {zero} of {of} tokens of images"
        for site, (zero, of) in counts.items()
        if zero
    }


def headline(table: Table) -> list[Answer]:
    """Answers that name the sublayers where the skip dominates most and least, by kind of token."""
    answers = []
    for store, rows in by_store(table, metric="norm_ratio", row=None):
        for (token,), own in rows.group_by("token", maintain_order=True):
            low, high = (f"{measured(own, i)} at {own['site'][i]}" for i in extremes(own))
            who = f"{store}, {token}" if token else store
            answers.append((who, f"skip over branch: from {low} to {high}"))
    return answers


class TokenMean:
    """The mean over tokens of their statistics; tokens without a value are left out."""

    def __init__(self) -> None:
        self._parts = 0
        self._sum = 0.0
        self._trace: Float | None = None
        self._traced: Integers | None = None
        self._present: Mask | None = None
        self._jackknife = False
        self._labels: Integers | None = None

    def add(self, of: Statistic, rows: Integers) -> None:
        rows = rows[~np.isnan(of.value[rows])]
        if not len(rows):
            return
        if self._trace is None or self._traced is None or self._present is None:
            self._trace = np.zeros(of.trace.shape[1])
            self._traced = np.zeros(of.trace.shape[1], np.int64)
            self._present = np.zeros(of.present.shape[1], bool)
            self._jackknife = of.jackknife
            self._labels = of.labels
        trace = of.trace[rows]
        there = ~np.isnan(trace)
        self._parts += len(rows)
        # One token after the other from the sum so far, so that pieces of any size give its bits.
        self._sum = float(np.cumsum([self._sum, *of.value[rows]])[-1])
        self._trace = np.concatenate(
            [self._trace[np.newaxis], np.where(there, trace, 0)]
        ).sum(0)
        self._traced += there.sum(0)
        self._present |= of.present[rows].any(0)

    def estimates(self) -> Estimates:
        if self._trace is None or self._traced is None or self._labels is None:
            nothing = np.full(1, np.nan)
            return Estimates(nothing, nothing, nothing, nothing, np.zeros(1, np.int64))
        with np.errstate(invalid="ignore"):
            trace = self._trace / self._traced
        value = np.array([self._sum / self._parts])
        assert self._present is not None
        present = self._present[np.newaxis]
        return estimates_of(
            value, trace[np.newaxis], present, self._jackknife, self._labels
        )


class Places:
    """Estimates of places: one token each, or the mean over several tokens. Tokens come in pieces,
    in their order."""

    def __init__(self, members: Sequence[Sequence[int]]) -> None:
        self._single: dict[int, list[int]] = {}
        for i, of in enumerate(members):
            if len(of) == 1:
                self._single.setdefault(of[0], []).append(i)
        self._several = {
            i: (np.array(of), TokenMean()) for i, of in enumerate(members) if len(of) != 1
        }
        nothing = np.full(len(members), np.nan)
        self._found = Estimates(
            nothing,
            nothing.copy(),
            nothing.copy(),
            nothing.copy(),
            np.zeros(len(members), int),
        )
        self._without: list[Float | None] = [None] * len(members)

    def add(self, of: Statistic, tokens: Integers) -> None:
        """Count the statistic of these tokens, one per row."""
        pairs = [
            (k, i) for k, t in enumerate(tokens.tolist()) for i in self._single.get(t, ())
        ]
        self._put(of.estimates(), [k for k, _ in pairs], [i for _, i in pairs])
        for members, mean in self._several.values():
            mean.add(of, np.flatnonzero(np.isin(tokens, members)))

    def estimates(self) -> Estimates:
        for i, (_, mean) in self._several.items():
            self._put(mean.estimates(), [0], [i])
        return replace(self._found, without=stacked(self._without))

    def _put(self, estimates: Estimates, rows: list[int], places: list[int]) -> None:
        for name in ("value", "std", "low", "high", "n"):
            getattr(self._found, name)[places] = getattr(estimates, name)[rows]
        for row, place in zip(rows, places, strict=True):
            self._without[place] = (
                None if estimates.without is None else estimates.without[row]
            )


ANALYSIS = Analysis(
    module=__name__,
    question=FLOW,
    help="""
    Compare each residual sublayer's skip with its branch.

    A sublayer (attention, MLP, residual block) adds its branch f(z) to its skip z. Where |z| /
    |f(z)| is high the token passes through, where it is low the branch rewrites it (Raghu et al.
    2021, Figs. 7, E.1, E.2). Reads the dot products that extract stores by default, in seconds;
    activations are not needed.

      $ vitsee normratio b16.zarr -o ratio.csv --png ratio.png
      $ vitsee normratio b16.zarr r50.zarr --tokens cls --tokens patches --png both.png > both.csv
      $ vitsee normratio b16.zarr --metric norm_ratio --sites mlp --tokens 0,0 --tokens 2,1

    --tokens each: every token; cls; prefix: every kind of prefix token, registers as their mean;
    patches: the mean over patches (locations of a CNN); all: prefix and patches; flat: all tokens
    of an image as one vector (Walmer et al. 2023).

    The figure shows tokens against sublayers, and means against depth. Of clips patches have a
    column frame, their place in time.
    """,
    needs=("residual",),
    reading=(
        "How much of what leaves each sublayer came through the skip connection, and how much "
        "its branch wrote: above 1 the skip dominates. The class token and the patches of a ViT "
        "change places somewhere in depth."
    ),
    source="Raghu et al. 2021, Figs. 7, E.1, E.2",
    columns=COLUMNS,
    meanings={
        "site": "the sublayer",
        "token": "cls, reg0, registers, patches, flat; empty for a patch",
    },
    metrics=tuple(METRICS),
    run=run,
    plot=plot,
    headline=headline,
)
