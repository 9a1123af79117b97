"""Measured responses to images, and their regression on the features of one site.

Responses are of neurons, voxels or people: one column each, matched to the images of
stores by image ids. One eigendecomposition of a site's training images serves every column
and every l2. The l2 of each column is the one with the least squared error on `HELD_OUT`
of the training images, which were not fitted to; with the chosen ones all training images
are fitted again. Test images choose nothing. How predictions are compared with responses:
`statistics.correlation`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitsee_core.analyses.probe.inputs import HELD_OUT
from vitsee_core.analyses.probe.sites import SitePair
from vitsee_core.features import SiteFeatures
from vitsee_core.kernels.l2_choice import GRID
from vitsee_core.kernels.ridge import Algebra, Factors
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.statistics.correlation import CorrelationSums, mean_of_repeats
from vitsee_core.statistics.jackknife import (
    UNLIMITED,
    Blocks,
    Limits,
    interval_cells,
)
from vitsee_core.tables.columns import site_columns
from vitsee_core.tables.words import CEILING
from vitsee_core.types import Float, Integers, Mask
from vitsee_stores.errors import VitseeError
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Store


log = logging.getLogger(__name__)

# Where the interval of a metric ends.
CORRELATION: Limits = (-1.0, 1.0)
EXPLAINED: Limits = (-np.inf, 1.0)
# Summaries over columns: name -> numpy's function.
SUMMARIES: Mapping[str, Callable[..., Any]] = {"median": np.median, "mean": np.mean}


@dataclass(frozen=True)
class Responses:
    """Measured responses to images.

    Attributes:
        ids: id of each image; None if there are no ids and rows are in the order of a
            store.
        repeats: (repeats, images, columns), NaN for a repeat that is missing.
        columns: name of each column.
        source: name of the file or store, for messages.
    """

    ids: list[str] | None
    repeats: Float
    columns: list[str]
    source: str

    @property
    def mean(self) -> Float:
        """The mean over the finite repeats, (images, columns); NaN where none is finite."""
        return mean_of_repeats(self.repeats)

    def rows_of(self, store: Store) -> Integers:
        """Return the row of each image of a store in these responses, (images,); -1 for
        none.

        Raises:
            VitseeError: none of the store's images has responses; or there are no ids and
                the number of images differs.
        """
        n_rows = self.repeats.shape[1]
        if self.ids is None:
            if n_rows != store.n_images:
                raise VitseeError(
                    f"{self.source} has responses to {n_rows} images, without ids, and "
                    f"{store.label} has {store.n_images} images; expected one row per "
                    "image in its order, or say whose rows they are with --response-ids "
                    "FILE"
                )
            return np.arange(n_rows)
        row_of_id = {image_id: row for row, image_id in enumerate(self.ids)}
        store_ids = store.samples.id.tolist()
        rows = np.array([row_of_id.get(image_id, -1) for image_id in store_ids], np.int64)
        if (rows < 0).all():
            raise VitseeError(
                f"no image of {store.label} has an id of {self.source}: "
                f"{abbreviate(self.ids[:3])} against {abbreviate(store_ids[:3])} (vitsee "
                "export --samples lists them)"
            )
        return rows

    def check(self, rows: Integers, label: str) -> None:
        """Refuse columns that cannot be predicted from some of the images.

        Args:
            rows: rows of these images in the responses.
            label: the store of the images, for messages.

        Raises:
            VitseeError: a column without a number for some image, or the same for all of
                them.
        """
        values = self.mean[rows]
        incomplete = np.flatnonzero(~np.isfinite(values).all(0))
        if len(incomplete):
            column = incomplete[0]
            n_missing = int((~np.isfinite(values[:, column])).sum())
            raise VitseeError(
                f"{self.source}: column {self.columns[column]} has no number for "
                f"{n_missing} of the {len(rows)} images of {label} ({len(incomplete)} "
                "such columns); expected one repeat at least: leave these columns, or "
                "these images, out"
            )
        constant = np.flatnonzero(np.ptp(values, axis=0) == 0)
        if len(constant):
            column = constant[0]
            raise VitseeError(
                f"{self.source}: column {self.columns[column]} is {values[0, column]:g} "
                f"for all {len(rows)} images of {label} ({len(constant)} such columns): "
                "there is nothing to predict; leave them out"
            )


class ImageSplit(NamedTuple):
    """The images of one fit: indices of those that train and of those that test."""

    train: Integers
    test: Integers


class MetricValues(NamedTuple):
    """One metric of all columns.

    Attributes:
        value: (columns,).
        replicates: (blocks, columns), without each block of test images.
        limits: where its interval ends.
    """

    value: Float
    replicates: Float
    limits: Limits


@dataclass(frozen=True)
class ResponseSettings:
    """Choices of the user.

    Attributes:
        sites: patterns of site names.
        tokens: words for tokens; () for the default of each site.
        l2s: values to report, each for all columns; () if it is chosen for each column.
        algebra: whether features are scaled; the intercept is not penalised.
        folds: number of folds of a cross-validation.
        by_column: add the rows of every column.
        allow_shared: let images both train and test.
        seed: seed of every draw of images.
    """

    sites: tuple[str, ...]
    tokens: tuple[str, ...]
    l2s: tuple[float, ...]
    algebra: Algebra
    folds: int
    by_column: bool
    allow_shared: bool
    seed: int


@dataclass(frozen=True)
class ResponseImages:
    """The images of one store that have responses.

    Attributes:
        store: the store.
        mask: (images of the store,) which of them.
        rows: (images,) their rows in the responses.
        n_left_out: number of images that were selected and have no response.
    """

    store: Store
    mask: Mask
    rows: Integers
    n_left_out: int

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)

    @classmethod
    def of(
        cls, store: Store, responses: Responses, execution: Execution
    ) -> ResponseImages:
        """Return the images of a store that were selected, can be read and have responses.

        Raises:
            VitseeError: there are none.
        """
        rows = responses.rows_of(store)
        selected = execution.rows(store).mask & store.valid
        n_selected = int(selected.sum())
        mask = selected & (rows >= 0)
        n_left_out = n_selected - int(mask.sum())
        if not mask.any():
            raise VitseeError(
                f"none of the {n_selected} images chosen of {store.label} has a response "
                f"in {responses.source}; expected ids like {store.samples.id[0]}"
            )
        if n_left_out:
            log.info(
                "%s: %d of the %d images have no response in %s and are left out",
                store.label,
                n_left_out,
                n_selected,
                responses.source,
            )
        return cls(store, mask, rows[mask], n_left_out)


@dataclass(frozen=True)
class ResponseProbe:
    """The probes of one pair of stores, or of one store; called with the features of a
    site.

    Attributes:
        train: images that train.
        test: images that test; the same object if both are of one store.
        sets: the images of each fit.
        y_train: (training images, columns) responses.
        y_test: (test images, columns) responses.
        blocks: jackknife blocks of the test images.
        ceiling: (columns,) reliability of the responses; None without repeats.
        columns: names of the columns.
        settings: choices of the user.
    """

    train: ResponseImages
    test: ResponseImages
    sets: Sequence[ImageSplit]
    y_train: Float
    y_test: Float
    blocks: Blocks
    ceiling: Float | None
    columns: Sequence[str]
    settings: ResponseSettings

    @property
    def n_tested(self) -> int:
        """The number of images that are in a test set."""
        return sum(len(test) for _, test in self.sets)

    @property
    def n_read(self) -> int:
        """The number of images whose features are read at each site."""
        if self.test is self.train:
            return len(self.train)
        return len(self.train) + len(self.test)

    @property
    def usable_ceiling(self) -> Float | None:
        """The reliability of each column, (columns,), NaN where it is not above 0."""
        if self.ceiling is None:
            return None
        return np.where(self.ceiling > 0, self.ceiling, np.nan)

    def __call__(self, execution: Execution, item: SitePair) -> list[dict[str, Any]]:
        """Return the rows of a site, from its features in training and in test images."""
        train_features, test_features = item
        x_train = _feature_matrix(train_features, self.train, execution)
        x_test = x_train
        if self.test is not self.train:
            x_test = _feature_matrix(test_features, self.test, execution)
        execution.progress.advance(self.n_read)
        site_cells = site_columns(self.test.store, train_features.site)
        has_tokens = train_features.site.layout is not None
        site_cells["token"] = str(train_features.selection) if has_tokens else ""
        return [{**site_cells, **row} for row in self.rows(x_train, x_test)]

    def rows(self, x_train: Float, x_test: Float) -> Iterator[dict[str, Any]]:
        """Yield the rows of features, (training images, dim) and (test images, dim)."""
        # Requested l2 (None: chosen for each column) -> the sums and l2 values of each
        # test set.
        sums_of_l2: dict[float | None, list[CorrelationSums]] = {}
        l2s_of_l2: dict[float | None, list[Float]] = {}
        for train, test in self.sets:
            x = x_train[train]
            y = self.y_train[train]
            l2s_of_columns: dict[float | None, Float] = {}
            for given_l2 in self.settings.l2s:
                l2s_of_columns[given_l2] = np.full(y.shape[1], given_l2)
            if not l2s_of_columns:
                l2s_of_columns[None] = self._choose_l2s(x, y)
            factors = Factors.from_targets(x, y, self.settings.algebra)
            coordinates = factors.coordinates(x_test[test])
            y_centred = self.y_test[test] - factors.mean_target
            labels = self.blocks.labels[test]
            for l2, l2s in l2s_of_columns.items():
                # W = diag(1 / (v + l2)) Q'X'Y, with an l2 for each column.
                weights = factors.xty / (factors.values[:, np.newaxis] + l2s)
                predictions = coordinates @ weights
                sums = CorrelationSums.by_block(
                    y_centred, predictions, labels, self.blocks.n
                )
                sums_of_l2.setdefault(l2, []).append(sums)
                l2s_of_l2.setdefault(l2, []).append(l2s)
        for l2, sums_of_sets in sums_of_l2.items():
            yield from self._rows_of_l2(sums_of_sets, np.stack(l2s_of_l2[l2]))
        yield from self._ceiling_rows()

    def _choose_l2s(self, x: Float, y: Float) -> Float:
        """Return the l2 of each column, (columns,), from features and responses that train.

        It has the least squared error on held-out training images; of several the largest.
        """
        rng = np.random.default_rng((self.settings.seed, 1))
        n_held_out = max(1, round(HELD_OUT * len(x)))
        is_held_out = np.zeros(len(x), bool)
        is_held_out[rng.permutation(len(x))[:n_held_out]] = True
        factors = Factors.from_targets(
            x[~is_held_out], y[~is_held_out], self.settings.algebra
        )
        coordinates = factors.coordinates(x[is_held_out])
        least_error = np.full(y.shape[1], np.inf)
        chosen = np.full(y.shape[1], GRID[-1])
        # From the largest down, and only less is better: ties keep the larger l2.
        for l2 in reversed(GRID):
            predictions = factors.scores(coordinates, l2)
            error = np.square(predictions - y[is_held_out]).sum(0)
            is_better = error < least_error
            least_error[is_better] = error[is_better]
            chosen[is_better] = l2
        return chosen

    def _rows_of_l2(
        self, sums_of_sets: Sequence[CorrelationSums], l2s: Float
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of one choice of l2: of each column if asked for, then of all of
        them.

        Args:
            sums_of_sets: sums by block of each test set.
            l2s: (test sets, columns).
        """
        metrics = self._metrics(sums_of_sets)
        counts = {"n_images": self.n_tested, "baseline": ""}
        if self.settings.by_column:
            mean_l2s = _geometric_mean(l2s)
            for name, (value, replicates, limits) in metrics.items():
                for i, column in enumerate(self.columns):
                    yield {
                        **counts,
                        "column": column,
                        "l2": float(mean_l2s[i]),
                        "n_columns": 1,
                        "metric": name,
                        **interval_cells(value[i], replicates[:, i], limits),
                    }
        l2 = float(_geometric_mean(_geometric_mean(l2s)))
        for name, (value, replicates, limits) in metrics.items():
            is_finite = np.isfinite(value)
            for summary_name, summarise in SUMMARIES.items():
                row = {
                    **counts,
                    "l2": l2,
                    "n_columns": int(is_finite.sum()),
                    "metric": f"{name}_{summary_name}",
                }
                if not is_finite.any():
                    yield {**row, "value": np.nan}
                    continue
                summary = summarise(value[is_finite])
                summary_replicates = summarise(replicates[:, is_finite], axis=1)
                yield {**row, **interval_cells(summary, summary_replicates, limits)}

    def _metrics(
        self, sums_of_sets: Sequence[CorrelationSums]
    ) -> dict[str, MetricValues]:
        """Return r and r2 of each column and, with repeats, both over the noise ceiling."""
        r = _mean_over_sets(sums_of_sets, lambda sums: sums.r, CORRELATION)
        r2 = _mean_over_sets(sums_of_sets, lambda sums: sums.r2, EXPLAINED)
        metrics = {"r": r, "r2": r2}
        ceiling = self.usable_ceiling
        if ceiling is not None:
            # A response without noise has r2 = reliability, and r its root. Divided,
            # neither has an upper limit: the ceiling is an estimate.
            root = np.sqrt(ceiling)
            metrics["r_normalised"] = MetricValues(
                r.value / root, r.replicates / root, UNLIMITED
            )
            metrics["r2_normalised"] = MetricValues(
                r2.value / ceiling, r2.replicates / ceiling, UNLIMITED
            )
        return metrics

    def _ceiling_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the noise ceiling, over the columns that have one."""
        if self.ceiling is None:
            return
        usable = self.ceiling[self.ceiling > 0]
        bounds = {"r": np.sqrt(usable), "r2": usable}
        for name, bound in bounds.items():
            for summary_name, summarise in SUMMARIES.items():
                yield {
                    "metric": f"{name}_{summary_name}",
                    "value": float(summarise(bound)) if len(bound) else np.nan,
                    "n_images": self.n_tested,
                    "n_columns": len(bound),
                    "baseline": CEILING,
                }


def _geometric_mean(l2s: Float) -> Float:
    """Return the geometric mean over the first axis; without rounding where all are
    equal."""
    return np.where(np.ptp(l2s, 0) > 0, np.exp(np.log(l2s).mean(0)), l2s[0])


def _mean_over_sets(
    sums_of_sets: Sequence[CorrelationSums],
    score: Callable[[CorrelationSums], Float],
    limits: Limits,
) -> MetricValues:
    """Return the mean score over test sets, and its replicates without each block."""
    values = [score(sums.total()) for sums in sums_of_sets]
    replicates = [score(sums.without()) for sums in sums_of_sets]
    return MetricValues(np.mean(values, axis=0), np.mean(replicates, axis=0), limits)


def _feature_matrix(
    features: SiteFeatures, images: ResponseImages, execution: Execution
) -> Float:
    """Return the features (images, dim) of the images with a response, in the store's
    order."""
    # float64: the matrix, its centred copy, and the copies that are fitted to and held out.
    n_bytes = 8 * 4 * len(images) * features.dim
    if n_bytes > execution.budget:
        raise VitseeError(
            f"{features.site.name}: {len(images)} images of {features.dim} channels take "
            f"{human_bytes(n_bytes)}, {human_bytes(execution.budget)} are allowed; give "
            "--memory, or fewer --images"
        )
    slabs = features.vectors(images.mask, jobs=execution.jobs, memory=execution.budget)
    return np.concatenate([slab.astype(np.float64) for slab in slabs])
