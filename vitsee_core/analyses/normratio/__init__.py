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
from typing import Annotated, Any, NamedTuple

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
from vitsee_core.tables.columns import SITE, site_columns, with_frame_column
from vitsee_core.tables.headlines import Answer, by_store, extremes, measured
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.replicates import stack_replicates
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
# Bytes for a token of an image: three quantities, and what a statistic takes beside them.
BYTES_PER_TOKEN = 8 * 12
# Statistics are computed of as many tokens at a time as these bytes hold, to stay in the cache.
CACHED_BYTES = 16 << 20


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
            "Sublayers by name, glob or kind (blocks.3.attn, 'blocks.1?.mlp', layer1.0, "
            "attn, mlp); blocks.-1.mlp counts from the end.",
            metavar="SUBLAYER",
            default="every residual sublayer",
        ),
    ] = ("blocks",),
    tokens: Annotated[Sequence[str], tokens_option(TOKENS)] = ("each",),
    execution: Annotated[
        Execution, Offers("images seed jobs memory", dask="slabs")
    ] = DEFAULT,
) -> Table:
    """Return each metric of each store, sublayer and token, or kind of token, one row each.

    The columns are `COLUMNS`. Only the norms have a unit, that of the activations. `token` names a
    prefix token or a kind of token; a cell of the grid has `row` and `col` instead. `low` and
    `high` are the 95 % interval; the notes say how it and `std` are computed. `n_images` is the
    number of images with a value. Numbers are NaN if no image has a value (`value`), or fewer than
    two (the others). The stores may have different images.

    Memory: all images of as many tokens of one sublayer as fit; a sublayer that does not fit is
    read several times.

    Args:
        stores: stores with residual dot products; those without are left out if others have them.

    Raises:
        MissingInput: no store has dot products.
        SiteError: a pattern that matches in no store or tokens that no store has, or a store left
            without any.
        VitseeError: unknown metric, or no valid image among those asked for.
    """
    requested = select_metrics(metrics, METRICS, "normratio")
    selected = choose_sublayers(stores, sites)
    stores = tuple(selected.stores)
    sublayers_by_store = selected.chosen
    _require_tokens(stores, sublayers_by_store, tokens)
    images_by_store = [execution.rows(store) for store in stores]
    blocks: list[dict[str, Any]] = []  # of the table, as columns
    zero_branches: dict[str, dict[str, str]] = {}
    total = sum(
        images.n * len(sublayers)
        for images, sublayers in zip(images_by_store, sublayers_by_store, strict=True)
    )
    with counting(execution.progress, total, SITE_IMAGES) as progress:
        for store, sublayers, images in zip(
            stores, sublayers_by_store, images_by_store, strict=True
        ):
            estimator = SublayerEstimator(store, images, execution)
            zero_counts: dict[str, ZeroCount] = {}
            for sublayer in sublayers:
                places = places_of(sublayer.layout, tokens)
                if places:
                    estimates = estimator.estimate(sublayer, places, requested)
                    zero_counts[sublayer.site] = estimates.zeros
                    cells = site_columns(store, sublayer)
                    cells.update(place_columns(places))
                    for metric, values in estimates.by_metric.items():
                        blocks.append({**cells, "metric": metric, **columns_of(values)})
                progress.advance(images.n)
            zero_branches[store.label] = _report_zeros(store.label, zero_counts)
    notes: dict[str, Any] = {}
    notes["interval"] = {
        metric: METHODS[INTERVALS[METRICS[metric][1]]] for metric in requested
    }
    notes["std"] = METHODS["std"]
    notes["tokens"] = (
        "rows about several tokens: the mean over them of each one's statistic"
    )
    notes["zero_branch"] = {
        label: sites for label, sites in zero_branches.items() if sites
    }
    notes["seed"] = execution.seed
    notes["images"] = {
        store.label: images.describe()
        for store, images in zip(stores, images_by_store, strict=True)
    }
    notes.update(selected.notes())
    layouts = [
        sublayer.layout for sublayers in sublayers_by_store for sublayer in sublayers
    ]
    return Table.concat(blocks, with_frame_column(COLUMNS, layouts), notes)


def _require_tokens(
    stores: Sequence[Store],
    sublayers_by_store: Sequence[Sequence[StoredSublayer]],
    words: Sequence[str],
) -> None:
    """Refuse tokens that no store has, and log which tokens a store lacks.

    Args:
        stores: with residual dot products.
        sublayers_by_store: the chosen sublayers of each.
        words: the tokens, as `--tokens` names them.

    Raises:
        SiteError: tokens that no store has, or a store without any of the tokens.
    """
    for word in words:
        is_available = any(
            places_of(sublayer.layout, [word])
            for sublayers in sublayers_by_store
            for sublayer in sublayers
        )
        for store, sublayers in zip(stores, sublayers_by_store, strict=True):
            reason = missing_tokens(store.label, sublayers, word)
            if reason is None:
                continue
            if not is_available:
                raise SiteError(reason)
            log.info("%s: no row for these", reason)
    for store, sublayers in zip(stores, sublayers_by_store, strict=True):
        if not any(places_of(sublayer.layout, words) for sublayer in sublayers):
            reason = missing_tokens(store.label, sublayers, words[0])
            raise SiteError(
                reason or f"no tokens of {store.label} were asked for; give --tokens"
            )


class ZeroCount(NamedTuple):
    """How many of the tokens of all images have f(z) = 0."""

    n_zero: int
    n_tokens: int


class SublayerEstimates(NamedTuple):
    """The estimates of one sublayer."""

    by_metric: dict[str, Estimates]  # one entry per place
    zeros: ZeroCount


class SublayerEstimator:
    """Estimates the metrics of the sublayers of a store, over its chosen images.

    Args:
        store: with residual dot products.
        rows: the chosen images.
        execution: resources, and the seed of the jackknife's blocks.
    """

    def __init__(self, store: Store, rows: Rows, execution: Execution) -> None:
        self.store = store
        self.rows = rows
        self.execution = execution
        self.n_images = int((rows.mask & store.valid).sum())
        seed = None if store.shuffled else execution.seed
        self.labels = block_labels(self.n_images, seed)
        self.tokens_at_once = self._n_tokens_in(execution.budget)

    def _n_tokens_in(self, n_bytes: int) -> int:
        """Return of how many tokens these bytes hold all images; at least one."""
        return max(1, n_bytes // (BYTES_PER_TOKEN * self.n_images))

    def estimate(
        self,
        sublayer: StoredSublayer,
        places: Sequence[TokenPlace],
        metrics: Sequence[str],
    ) -> SublayerEstimates:
        """Return the estimates of each metric at each place.

        Args:
            sublayer: of the store.
            places: tokens, or kinds of tokens, whose statistics are averaged.
            metrics: names of `METRICS`.
        """
        tokens = np.array(sorted({token for place in places for token in place.members}))
        members = [place.members for place in places]
        accumulators = {metric: PlaceEstimates(members) for metric in metrics}
        quantities = tuple(dict.fromkeys(METRICS[metric][0] for metric in metrics))
        cached_tokens = self._n_tokens_in(CACHED_BYTES)
        n_zero = 0
        # As many tokens as fit the memory are read at once, of which statistics are computed in
        # pieces that fit the cache.
        for read_tokens in _pieces(tokens, self.tokens_at_once):
            quantity_of_tokens = ReadQuantities(
                sublayer.site, tuple(read_tokens.tolist()), quantities
            )
            values, n_zero_read = self._read_all_slabs(quantity_of_tokens)
            n_zero += n_zero_read
            for piece in _pieces(np.arange(len(read_tokens)), cached_tokens):
                for metric, accumulator in accumulators.items():
                    quantity, over_images = METRICS[metric]
                    token_statistics = statistic(
                        values[quantity][piece], over_images, self.labels
                    )
                    accumulator.add(token_statistics, read_tokens[piece])
        return SublayerEstimates(
            by_metric={
                metric: accumulator.estimates()
                for metric, accumulator in accumulators.items()
            },
            zeros=ZeroCount(n_zero, len(tokens) * self.n_images),
        )

    def _read_all_slabs(self, work: ReadQuantities) -> tuple[dict[str, Float], int]:
        """Return quantity -> (tokens, images) over all slabs, and how many f(z) are 0."""
        values = {
            name: np.empty((len(work.tokens), self.n_images)) for name in work.names
        }
        first_image = 0
        n_zero = 0
        slabs = each_slab(
            self.store,
            work,
            rows=self.rows,
            jobs=self.execution.jobs,
            map=self.execution.map,
        )
        for slab_values, n_zero_slab in slabs:
            n_zero += n_zero_slab
            n_slab_images = 0
            for name, quantity in slab_values.items():  # (tokens, images of the slab)
                n_slab_images = quantity.shape[1]
                values[name][:, first_image : first_image + n_slab_images] = quantity
            first_image += n_slab_images
        return values, n_zero


def _pieces(items: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    """Yield runs of up to `size` items."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


def _report_zeros(label: str, zero_counts: dict[str, ZeroCount]) -> dict[str, str]:
    """Log the sublayers where f(z) = 0, and return them for the notes.

    Args:
        label: of the store.
        zero_counts: site -> tokens of images where f(z) = 0.

    Returns:
        Site -> in how many tokens, for the sites with any.
    """
    always_zero: list[str] = []
    partly_zero: list[str] = []
    notes: dict[str, str] = {}
    for site, count in zero_counts.items():
        if count.n_zero:
            notes[site] = (
                f"f(z) = 0 in {count.n_zero} of {count.n_tokens} tokens of images"
            )
        if count.n_zero == count.n_tokens:
            always_zero.append(site)
        elif count.n_zero:
            partly_zero.append(
                f"{site} ({count.n_zero} of {count.n_tokens} tokens of images)"
            )
    if always_zero:
        log.warning(
            "%s: the branch is 0 in every image and token of %s: no norm ratio, no "
            "cos_branch",
            label,
            ", ".join(always_zero),
        )
    if partly_zero:
        log.warning(
            "%s: the branch is 0, and left out, in %s", label, abbreviate(partly_zero)
        )
    return notes


def headline(table: Table) -> list[Answer]:
    """Return where the skip dominates least and most, for each store and kind of token."""
    answers = []
    for store, rows in by_store(table, metric="norm_ratio", row=None):
        for (token,), token_rows in rows.group_by("token", maintain_order=True):
            lowest, highest = extremes(token_rows)
            low = f"{measured(token_rows, lowest)} at {token_rows['site'][lowest]}"
            high = f"{measured(token_rows, highest)} at {token_rows['site'][highest]}"
            name = f"{store}, {token}" if token else store
            answers.append((name, f"skip over branch: from {low} to {high}"))
    return answers


class TokenMean:
    """Accumulates the mean over tokens of their statistics; tokens without a value are left out."""

    def __init__(self) -> None:
        self._n_tokens = 0
        self._sum = 0.0
        # Arrays over the columns of `Statistic.trace` and `present`, made by the first token.
        self._trace: Float | None = None
        self._n_traced: Integers | None = None
        self._present: Mask | None = None
        self._jackknife = False
        self._labels: Integers | None = None

    def add(self, statistics: Statistic, rows: Integers) -> None:
        """Count the tokens in these rows of the statistics."""
        rows = rows[~np.isnan(statistics.value[rows])]
        if not len(rows):
            return
        if self._trace is None or self._n_traced is None or self._present is None:
            self._trace = np.zeros(statistics.trace.shape[1])
            self._n_traced = np.zeros(statistics.trace.shape[1], np.int64)
            self._present = np.zeros(statistics.present.shape[1], bool)
            self._jackknife = statistics.jackknife
            self._labels = statistics.labels
        trace = statistics.trace[rows]
        has_trace = ~np.isnan(trace)
        self._n_tokens += len(rows)
        # One token after the other from the sum so far, so that pieces of any size give its bits.
        self._sum = float(np.cumsum([self._sum, *statistics.value[rows]])[-1])
        new_traces = np.where(has_trace, trace, 0)
        self._trace = np.concatenate([self._trace[np.newaxis], new_traces]).sum(0)
        self._n_traced += has_trace.sum(0)
        self._present |= statistics.present[rows].any(0)

    def estimates(self) -> Estimates:
        """Return the estimates of the mean, one entry; NaN if no token has a value."""
        if self._trace is None or self._n_traced is None or self._labels is None:
            missing = np.full(1, np.nan)
            return Estimates(missing, missing, missing, missing, np.zeros(1, np.int64))
        assert self._present is not None
        with np.errstate(invalid="ignore"):
            trace = self._trace / self._n_traced
        return estimates_of(
            np.array([self._sum / self._n_tokens]),
            trace[np.newaxis],
            self._present[np.newaxis],
            self._jackknife,
            self._labels,
        )


class PlaceEstimates:
    """Accumulates the estimates of places: one token each, or the mean over several tokens.

    Args:
        members: the tokens of each place. They come in pieces, in their order.
    """

    def __init__(self, members: Sequence[Sequence[int]]) -> None:
        self._single: dict[int, list[int]] = {}  # token -> the places that are this token
        self._several: dict[int, tuple[Integers, TokenMean]] = {}  # place -> its tokens
        for place, tokens in enumerate(members):
            if len(tokens) == 1:
                self._single.setdefault(tokens[0], []).append(place)
            else:
                self._several[place] = (np.array(tokens), TokenMean())
        n_places = len(members)
        self._estimates = Estimates(
            value=np.full(n_places, np.nan),
            std=np.full(n_places, np.nan),
            low=np.full(n_places, np.nan),
            high=np.full(n_places, np.nan),
            n=np.zeros(n_places, int),
        )
        self._without: list[Float | None] = [None] * n_places

    def add(self, statistics: Statistic, tokens: Integers) -> None:
        """Count the statistics of these tokens, one per row."""
        rows: list[int] = []
        places: list[int] = []
        for row, token in enumerate(tokens.tolist()):
            for place in self._single.get(token, ()):
                rows.append(row)
                places.append(place)
        self._put(statistics.estimates(), rows, places)
        for members, mean in self._several.values():
            mean.add(statistics, np.flatnonzero(np.isin(tokens, members)))

    def estimates(self) -> Estimates:
        """Return the estimates, one entry per place, once all tokens are counted."""
        for place, (_, mean) in self._several.items():
            self._put(mean.estimates(), [0], [place])
        return replace(self._estimates, without=stack_replicates(self._without))

    def _put(self, estimates: Estimates, rows: list[int], places: list[int]) -> None:
        """Set the entries of these places from rows of the estimates."""
        for name in ("value", "std", "low", "high", "n"):
            getattr(self._estimates, name)[places] = getattr(estimates, name)[rows]
        for row, place in zip(rows, places, strict=True):
            if estimates.without is None:
                self._without[place] = None
            else:
                self._without[place] = estimates.without[row]


ANALYSIS = Analysis(
    module=__name__,
    question=FLOW,
    help="""
    Compare each residual sublayer's skip with its branch.

    A sublayer (attention, MLP, residual block) adds its branch f(z) to its skip z.
    Where |z| / |f(z)| is high the token passes through, where it is low the branch
    rewrites it (Raghu et al. 2021, Figs. 7, E.1, E.2). Reads the dot products that
    extract stores by default, in seconds; activations are not needed.

      $ vitsee normratio b16.zarr -o ratio.csv --png ratio.png
      $ vitsee normratio b16.zarr r50.zarr --tokens cls --tokens patches --png both.png > both.csv
      $ vitsee normratio b16.zarr --metric norm_ratio --sites mlp --tokens 0,0 --tokens 2,1

    --tokens each: every token; cls; prefix: every kind of prefix token, registers as
    their mean; patches: the mean over patches (locations of a CNN); all: prefix and
    patches; flat: all tokens of an image as one vector (Walmer et al. 2023).

    The figure shows tokens against sublayers, and means against depth. Of clips patches
    have a column frame, their place in time.
    """,
    needs=("residual",),
    reading=(
        "How much of what leaves each sublayer came through the skip connection, and how "
        "much its branch wrote: above 1 the skip dominates. The class token and the "
        "patches of a ViT change places somewhere in depth."
    ),
    source="Raghu et al. 2021, Figs. 7, E.1, E.2",
    columns=COLUMNS,
    meanings={
        "site": "the sublayer",
        "token": "cls, reg0, registers, patches, flat; empty for a patch",
    },
    metrics=tuple(METRICS),
    may_lack_values=True,  # a warning names branches that are 0
    run=run,
    plot=plot,
    headline=headline,
)
