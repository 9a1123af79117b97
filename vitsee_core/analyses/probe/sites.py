"""The probes of all sites of a store, site by site in any process, and their rows of
the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitsee_core.analyses.probe.fit import Task
from vitsee_core.analyses.probe.inputs import Draw, Random, Stored
from vitsee_core.analyses.probe.options import Settings
from vitsee_core.analyses.probe.prober import Prober, Tally
from vitsee_core.features import SiteFeatures, check_alike
from vitsee_core.kernels.l2_choice import GRID
from vitsee_core.runtime.execution import Execution
from vitsee_core.statistics.jackknife import Blocks, means_without
from vitsee_core.statistics.moments import Moments
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.statistics.shares import share_interval
from vitsee_core.tables.columns import REPLICATES, site_columns
from vitsee_core.truth.labels.labelled_rows import LabelledRows
from vitsee_core.truth.masks.segments import Examples
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.selectors import Token

if TYPE_CHECKING:
    from vitsee_stores import Store


INTERVAL = (
    "95 % Wilson score interval of the share of test images that are right, training "
    "images and features held fixed; with several seeds its ends are averaged; std is "
    "over seeds (n - 1). Rows of token `each` (mean over the probes of all patches): "
    f"{SHARES}"
)


class RandomShape(NamedTuple):
    """The size of random features that stand in for a site's: tokens, and channels of
    each."""

    n_tokens: int
    dim: int


# The features of the training and of the test images at one site.
SitePair = tuple[SiteFeatures, SiteFeatures]


@dataclass(frozen=True)
class SiteProbes:
    """Computes the rows of a site's probes, or of random features' probes; runs in any
    process."""

    prober: Prober
    train: LabelledRows
    test: LabelledRows
    scorer: Scorer
    seed: int

    def __call__(
        self, execution: Execution, item: SitePair | RandomShape
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the rows of one site or of random features, and remarks about them."""
        # A worker has its own share of threads and memory.
        task = replace(self.prober.task, jobs=execution.jobs, memory=execution.budget)
        prober = replace(self.prober, task=task)
        if isinstance(item, RandomShape):
            return self._random_rows(prober, item), []
        train_features, test_features = item
        tokens = train_features.tokens
        has_mean_row = train_features.selection == "each"
        title = f"{train_features.site.name} ({train_features.selection})"
        progress = execution.progress
        train = Stored(train_features, self.train, task.jobs, task.memory)
        test = Stored(test_features, self.test, task.jobs, task.memory)
        has_tokens = train_features.site.layout is not None
        if has_tokens and train_features.selection == "all":
            tokens = [Token("all")]
            tally = prober.side_by_side(train, test, title)
            progress.advance(len(prober.draws))
        else:
            # The mean `each` is over patches: prefix tokens are left out of it.
            n_skipped = train_features.n_prefix if has_mean_row else 0
            tally = prober.each(train, test, title, n_skipped, progress.advance)
        rows = list(self.scorer.rows(tokens, tally, has_mean_row))
        one_class = len(np.unique(self.train.labels)) == 1
        return rows, _remarks(train_features, tally, task, one_class)

    def _random_rows(self, prober: Prober, shape: RandomShape) -> list[dict[str, Any]]:
        """Return the rows of a probe of normal random numbers with as many tokens and
        channels."""
        n_tokens, dim = shape
        train = Random(len(self.train), n_tokens, dim, (self.seed, 0))
        test = Random(len(self.test), n_tokens, dim, (self.seed, 1))
        tally = prober.side_by_side(train, test, "random features")
        return list(self.scorer.rows([Token("")], tally, False))


def shape_of_random(features: SiteFeatures) -> RandomShape:
    """Return the shape of the random features that a site's probe is compared with.

    For tokens side by side they have as many tokens; otherwise, `each` included, one token.
    """
    n_tokens = len(features.tokens) if features.selection == "all" else 1
    return RandomShape(n_tokens, features.dim)


def each_selection(
    train: Store,
    sites: Sequence[str],
    tokens: Sequence[str],
    read: Callable[[str, str | None], SitePair],
) -> Iterator[SitePair]:
    """Yield the features of training and test images, for every site and kind of tokens.

    A site without tokens (a vector) is yielded once, as is a kind that two words select.

    Args:
        train: store whose sites are probed.
        sites: patterns of site names.
        tokens: words; () for each site's default.
        read: returns both features for a site's name and a word (None: the site's default).

    Raises:
        StoreMismatch: the test images have other tokens or channels.
    """
    for site in train.select(list(sites)):
        selections: set[str] = set()
        for word in tokens or (None,):
            train_features, test_features = read(site.name, word)
            check_alike(train_features, test_features)
            has_tokens = train_features.site.layout is not None
            if selections and not has_tokens:
                continue
            if train_features.selection not in selections:
                selections.add(train_features.selection)
                yield train_features, test_features


def _remarks(
    features: SiteFeatures, tally: Tally, task: Task, one_class: bool
) -> list[str]:
    """Return a sentence each on SGD that diverged, equal features, and an l2 at a grid's
    end.

    one_class: all training images have the same label, so that equal scores say nothing
    about the features.
    """
    name = features.site.name
    remarks = []
    if tally.failed.any():
        remarks.append(
            f"{name}: SGD diverged for {int(tally.failed.sum())} of {tally.failed.size} "
            "probes, which have no value (give a smaller --lr)"
        )
    if tally.blind.any() and not one_class:
        blind_tokens = tally.blind.any((0, 1))
        count = ""
        which = ""
        if blind_tokens.size > 1:
            count = f" of {int(blind_tokens.sum())} of {blind_tokens.size} tokens"
        elif features.site.layout is not None:
            which = f"{features.selection} "
        remarks.append(
            f"{name}: the {which}features{count} are the same in all training images; "
            "their probe gives every image the class that most of them have"
        )
    # A blind probe's l2 is the largest by its tie rule, which says nothing about the grid.
    at_end = np.isin(tally.l2s, (GRID[0], GRID[-1])) & ~tally.blind
    if at_end.any() and not task.l2s:
        remarks.append(
            f"{name}: the chosen l2 of {int(at_end.sum())} of {tally.l2s.size} probes is "
            "at an end of the grid"
        )
    return remarks


class ProbedSites:
    """Probes every site of one pair of training and test images, and turns tallies into
    rows.

    Attributes:
        words: site name -> the kinds of tokens that are probed there.
        matched: site name -> how its grid was converted to the last stage's.
        remarks: sentences about the results, complete after `rows`.
    """

    def __init__(
        self,
        prober: Prober,
        examples: Examples,
        train: LabelledRows,
        test: LabelledRows,
        stores: Sequence[Store],
        blocks: Blocks,
        settings: Settings,
        per_class: bool,
        baselines: Sequence[str],
        seed: int,
    ) -> None:
        """Find the features of all sites. Raises an error here, before the first fit, if a
        store lacks a site or a token.

        Args:
            prober: fits and tests the probes.
            examples: reads features of images, or of segments.
            train: labelled examples that train.
            test: labelled examples that test.
            stores: all stores of the run, whose sites have to be comparable.
            blocks: jackknife blocks of the test examples.
            settings: choices of the user.
            per_class: add rows for every class.
            baselines: names of the baselines to add.
            seed: seed of the random baseline.
        """
        self.prober = prober
        self.examples = examples
        self.train = train
        self.test = test
        self.settings = settings
        self.stores = stores
        self.blocks = blocks
        named_classes = train.classes if per_class else ()
        self.scorer = Scorer(prober.draws, test, named_classes, blocks)
        self.baselines = baselines
        self.seed = seed
        self.words: dict[str, list[str]] = {}
        self.matched: dict[str, str] = {}
        self.remarks: list[str] = []
        self._pairs = list(self._site_pairs())

    @property
    def n_probes(self) -> int:
        """The number of probes that will be fitted, baselines not counted."""
        n_per_draw = 0
        for features, _ in self._pairs:
            n_per_draw += 1 if features.selection == "all" else len(features.tokens)
        return len(self.prober.draws) * n_per_draw

    def rows(
        self, execution: Execution
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the rows about the model, and those of the baselines."""
        rows: list[dict[str, Any]] = []
        random_rows: list[dict[str, Any]] = []
        # Random features depend on their shape only: one probe serves all sites that share
        # it.
        shapes: list[RandomShape] = []
        if self.baselines:
            shapes = list(dict.fromkeys(shape_of_random(x) for x, _ in self._pairs))
        work = SiteProbes(self.prober, self.train, self.test, self.scorer, self.seed)
        items: list[SitePair | RandomShape] = [*self._pairs, *shapes]
        # In the items' order, whoever works on them: sites, then shapes.
        results = list(execution.spread(work, items))
        site_results = results[: len(self._pairs)]
        random_results = dict(zip(shapes, results[len(self._pairs) :], strict=True))
        for (features, _), (site_rows, remarks) in zip(
            self._pairs, site_results, strict=True
        ):
            self.remarks += remarks
            site_cells = site_columns(self.test.store, features.site)
            for row in site_rows:
                rows.append({**site_cells, **row, "baseline": ""})
            token = "" if features.site.layout is None else features.selection
            for baseline in self.baselines:
                baseline_rows, _ = random_results[shape_of_random(features)]
                for row in baseline_rows:
                    cells = {"token": token, "baseline": baseline}
                    random_rows.append({**site_cells, **row, **cells})
        return rows, random_rows

    def _site_pairs(self) -> Iterator[SitePair]:
        """Yield the features to probe, of the training and of the test images; fills
        `words` and `matched`."""
        for train_features, test_features in each_selection(
            self.train.store, self.settings.sites, self.settings.tokens, self._read_pair
        ):
            name = train_features.site.name
            self.words.setdefault(name, []).append(train_features.selection)
            if train_features.matching is not None:
                grid = " x ".join(map(str, train_features.matching.grid))
                patch = train_features.matching.patch
                dim = train_features.dim
                self.matched[name] = (
                    f"patches of {patch} x {patch} cells flattened to {dim} channels, "
                    f"averaged to {grid} cells"
                )
            yield train_features, test_features

    def _read_pair(self, name: str, word: str | None) -> SitePair:
        """Return a site's features in the training and in the test examples."""
        train_features = self._features(self.train, name, word)
        test_features = self._features(self.test, name, word)
        return train_features, test_features

    def _features(self, data: LabelledRows, name: str, word: str | None) -> SiteFeatures:
        """Return the features of a site that a word selects; None: the site's default."""
        return self.examples.features(
            data,
            data.store.site(name),
            word,
            among=self.stores,
            match_last_stage=self.settings.match_last_stage,
        )


@dataclass(frozen=True)
class Scorer:
    """Turns tallies into rows of a table.

    Attributes:
        draws: the draws of training images, as in the tally.
        test: the labelled test images.
        classes: names of the classes that have rows of their own; () for none.
        blocks: jackknife blocks of the test images, as in the tally.
    """

    draws: Sequence[Draw]
    test: LabelledRows
    classes: Sequence[str]
    blocks: Blocks

    def rows(
        self, tokens: Sequence[Token], tally: Tally, has_mean_row: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of one site, for each number of shots and each l2.

        Args:
            tokens: the probed tokens.
            tally: right answers of their probes.
            has_mean_row: add a row `each` after those of the tokens, the mean over the
                patches' probes.
        """
        for shots in dict.fromkeys(draw.shots for draw in self.draws):
            # The draws with this number of shots differ in their seed only.
            seeds = np.array(
                [d for d, draw in enumerate(self.draws) if draw.shots == shots]
            )
            for i in range(tally.right.shape[1]):
                for t, token in enumerate(tokens):
                    probe = {
                        "token": token.name,
                        "row": token.row,
                        "col": token.col,
                        "shots": shots,
                        "l2": _mean_l2(tally.l2s[seeds, i, t]),
                    }
                    for scores in self._scores_of_probe(tally, seeds, i, t):
                        yield {**probe, **scores}
                if has_mean_row:
                    l2s = tally.l2s[seeds, i]
                    same_l2 = (l2s == l2s.flat[0]).all()
                    mean_probe = {
                        "token": "each",
                        "shots": shots,
                        "l2": _mean_l2(l2s) if same_l2 else None,
                    }
                    for scores in self._scores_of_mean(tally, seeds, i, len(tokens)):
                        yield {**mean_probe, **scores}

    def _scores_of_mean(
        self, tally: Tally, seeds: Integers, i: int, n_tokens: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the scores of the mean over the patches' probes at l2 number i, one per
        metric."""
        n_averaged = n_tokens - tally.first
        failed = tally.failed[seeds, i, tally.first :].any()
        for m, metric in enumerate(tally.metrics):
            share_by_seed = tally.share[seeds, i, m] / n_averaged  # (seeds, images)
            if failed:
                share_by_seed = np.full_like(share_by_seed, np.nan)
            mean_by_image = share_by_seed.mean(0, dtype=np.float64)
            without = self.blocks.means_without(mean_by_image)
            yield {"metric": metric, REPLICATES: without, **_mean_share(share_by_seed)}

    def _scores_of_probe(
        self, tally: Tally, seeds: Integers, i: int, t: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the scores of token t at l2 number i: one per metric, then one per named
        class.

        seeds: numbers of the draws over which the scores are averaged.
        """
        right = tally.right[seeds, i, t]  # (seeds, metrics, classes)
        failed = tally.failed[seeds, i, t]
        labels = self.test.labels
        images_in_block = self.blocks.sums(np.ones(len(labels)))
        for m, metric in enumerate(tally.metrics):
            right_in_block = tally.in_block[seeds, i, t, m].mean(0)  # (blocks,)
            without = means_without(right_in_block, images_in_block)
            scores = self._over_seeds(right[:, m].sum(-1), len(labels), failed, without)
            if failed.any():
                without = without * math.nan  # no value, so no replicates of it
            counts = self.test.counted()
            yield {"metric": metric, **scores, REPLICATES: without, **counts}
        images_in_class = np.bincount(labels, minlength=tally.n_classes)
        for c, name in enumerate(self.classes):
            n_images = int(images_in_class[c])
            scores = self._over_seeds(right[:, 0, c], n_images, failed, None)
            counts = self.test.counted(labels == c)
            yield {"metric": "top1_class", "class": name, **scores, **counts}

    def _over_seeds(
        self, right: Integers, n: int, failed: Mask, without: Float | None
    ) -> dict[str, Any]:
        """Return the cells of a share of right answers: value and std (n - 1) over seeds, low
        and high as the mean of the seeds' intervals.

        Args:
            right: (seeds,) number of right answers among n.
            n: number of images.
            failed: (seeds,) probes without a result; any of them makes all cells NaN.
            without: (blocks,) mean share without each jackknife block.
        """
        mean_share = right.mean() / max(n, 1)
        low = np.zeros(len(right))
        high = np.zeros(len(right))
        for s, n_right in enumerate(right):
            low[s], high[s] = self.test.ends(mean_share, n, int(n_right), without)
        if failed.any():
            missing = np.full(len(right), math.nan)
            return _summary(missing, missing, missing, n)
        # Divided after the summary, not before: equal counts give exactly their mean,
        # without spread.
        scores = _summary(right, low, high, n)
        for name in ("value", "std"):
            scores[name] = scores[name] / n if n else math.nan
        return scores


def _mean_l2(values: Float) -> float | None:
    """Return the geometric mean of some l2 values, exact if they are equal; None if one
    is NaN."""
    if not np.isfinite(values).all():
        return None
    if (values == values.flat[0]).all():
        return float(values.flat[0])
    # The grid of l2 is geometric (2^-10 to 2^19), so is its mean.
    return float(np.exp2(np.log2(values).mean()))


def _mean_share(share_by_seed: Float32) -> dict[str, Any]:
    """Return the cells of a mean share: value and std (n - 1) of the seeds' means over
    images, low and high as the mean of the seeds' intervals.

    share_by_seed: (seeds, images), the share of the patches' probes that are right about
    each image.
    """
    moments = Moments()
    moments.add(share_by_seed.T)
    summary = moments.summary()
    n = share_by_seed.shape[1]
    standard_error = summary.std / np.sqrt(n)
    low, high = share_interval(summary.mean, standard_error, n)
    return _summary(summary.mean, low, high, n)


def _summary(value: Any, low: Any, high: Any, n: int) -> dict[str, Any]:
    """Return mean, standard deviation (n - 1) and mean interval over seeds, of arrays
    (seeds,)."""
    spread = float(value.std(ddof=1)) if len(value) > 1 else math.nan
    return {
        "value": float(value.mean()),
        "std": spread,
        "low": float(low.mean()),
        "high": float(high.mean()),
        "n_images": n,
    }
