"""Probes of one site: fitted and tested (`Prober`), their right answers counted class by class
(`Tally`), and turned into rows (`Scorer`), in any process (`SiteProbes`); and those of all sites
(`ProbedSites`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.probe.fit import (
    Fitted,
    Task,
    fit,
    fit_sgd,
    probe_concatenated,
    token_bytes,
)
from vitsee_core.analyses.probe.settings import (
    ConcatenatedTokens,
    Draw,
    Random,
    Settings,
    Source,
    Stored,
    Training,
)
from vitsee_core.features import SiteFeatures, check_alike
from vitsee_core.kernels.l2_choice import GRID
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.lanes import one_blas_thread
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.streaming import thread_map
from vitsee_core.statistics.jackknife import Blocks, means_without
from vitsee_core.statistics.moments import Moments
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.statistics.shares import share_interval
from vitsee_core.tables.columns import site_columns
from vitsee_core.tables.replicates import WORD
from vitsee_core.truth.labels.labelled_rows import LabelledRows
from vitsee_core.truth.masks.segments import Examples
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.errors import VitseeError
from vitsee_stores.selectors import Token

if TYPE_CHECKING:
    from vitsee_stores import Store

INTERVAL = (
    "95 % Wilson score interval of the share of test images that are right, training images and "
    "features held fixed; with several seeds its ends are averaged; std is over seeds (n - 1). "
    f"Rows of token `each` (mean over the probes of all patches): {SHARES}"
)

TOP = 5
METRICS = ("top1", "top5")


class Tally:
    """Right answers on the test images, for each draw, l2, token and class.

    Attributes:
        right: (draws, l2s, tokens, metrics, classes).
        share: (draws, l2s, metrics, images), for how many of the tokens from `first` on each image
            is right.
        metrics: `top1` and, with more than five classes, `top5` (with five or fewer it would always
            be 1).
        in_block: (draws, l2s, tokens, metrics, blocks), right answers in each block of test images.
    """

    def __init__(
        self,
        labels: Integers,
        n_classes: int,
        *,
        draws: int,
        l2s: int,
        tokens: int,
        first: int = 0,
        blocks: Integers | None = None,
    ) -> None:
        """labels, blocks: (images,) class and block of each; without `blocks` there is only one."""
        self.labels = labels
        self.n_classes = n_classes
        self.first = first
        self.blocks = np.zeros(len(labels), np.int64) if blocks is None else blocks
        self.metrics = METRICS if n_classes > TOP else METRICS[:1]
        n = len(self.metrics)
        self.right = np.zeros((draws, l2s, tokens, n, n_classes), np.int64)
        n_blocks = int(self.blocks.max(initial=-1)) + 1
        self.in_block = np.zeros((draws, l2s, tokens, n, n_blocks), np.int64)
        self.l2s = np.zeros((draws, l2s, tokens))
        self.failed = np.zeros((draws, l2s, tokens), bool)  # probes without a result
        # Probes that give all images the same scores.
        self.blind = np.zeros((draws, l2s, tokens), bool)
        self.share = np.zeros((draws, l2s, n, len(labels)), np.float32)

    def judged(self, ranks: Integers) -> Mask:
        """Whether each image is right, (l2s, metrics, m), from the number of classes ranked before
        its own, (l2s, m)."""
        most = np.array((1, TOP)[: len(self.metrics)])
        return ranks[:, np.newaxis] < most[:, np.newaxis]

    def count(
        self, draw: int, l2s: slice, token: int, places: Integers, right: Mask
    ) -> None:
        """Count test images `places` (m,), of a draw and token; right: (l2s, metrics, m), see
        `judged`."""
        at, metric, image = np.nonzero(right)
        row = at * len(self.metrics) + metric
        for total, of in ((self.right, self.labels), (self.in_block, self.blocks)):
            n_rows = right.shape[0] * right.shape[1]
            n = total.shape[-1]
            counts = np.bincount(row * n + of[places][image], minlength=n_rows * n)
            total[draw, l2s, token] += counts.reshape(*right.shape[:2], n)
        if token >= self.first:
            self.share[draw, l2s][:, :, places] += right


@dataclass(frozen=True)
class Scorer:
    """Turns tallies into rows of a table."""

    draws: Sequence[Draw]  # of the tally
    test: LabelledRows  # the test images
    classes: Sequence[str]  # names of those that have rows of their own
    blocks: Blocks  # of the test images, as in the tally

    def rows(
        self, tokens: Sequence[Token], tally: Tally, each: bool
    ) -> Iterator[dict[str, Any]]:
        """The rows of one site, for each number of shots and l2: of each token, then, for `each`,
        of their mean."""
        for shots in dict.fromkeys(draw.shots for draw in self.draws):
            own = np.array(
                [d for d, draw in enumerate(self.draws) if draw.shots == shots]
            )
            for i in range(tally.right.shape[1]):
                for t, token in enumerate(tokens):
                    base = {
                        **{"token": token.name, "row": token.row, "col": token.col},
                        **{"shots": shots, "l2": _mean_l2(tally.l2s[own, i, t])},
                    }
                    for row in self._of_probe(tally, own, i, t):
                        yield base | row
                if each:
                    base = {"token": "each", "shots": shots}
                    l2 = tally.l2s[own, i]
                    base["l2"] = _mean_l2(l2) if (l2 == l2.flat[0]).all() else None
                    for m, metric in enumerate(tally.metrics):
                        share = tally.share[own, i, m] / (len(tokens) - tally.first)
                        if tally.failed[own, i, tally.first :].any():
                            share = np.full_like(share, np.nan)
                        without = self.blocks.means_without(
                            share.mean(0, dtype=np.float64)
                        )
                        yield (
                            base | {"metric": metric, WORD: without} | _mean_share(share)
                        )

    def _of_probe(
        self, tally: Tally, own: Integers, i: int, t: int
    ) -> Iterator[dict[str, Any]]:
        right = tally.right[own, i, t]
        failed = tally.failed[own, i, t]
        labels = self.test.labels
        counts = np.bincount(labels, minlength=tally.n_classes)
        in_block = self.blocks.sums(np.ones(len(labels)))
        for m, metric in enumerate(tally.metrics):
            without = means_without(tally.in_block[own, i, t, m].mean(0), in_block)
            scores = self._over_seeds(right[:, m].sum(-1), len(labels), failed, without)
            scores |= {WORD: without * (math.nan if failed.any() else 1)}
            yield {"metric": metric} | scores | self.test.counted()
        for c, name in enumerate(self.classes):
            scores = self._over_seeds(right[:, 0, c], int(counts[c]), failed, None)
            counted = self.test.counted(labels == c)
            yield {"metric": "top1_class", "class": name} | scores | counted

    def _over_seeds(
        self, right: Integers, n: int, failed: Mask, without: Float | None
    ) -> dict[str, Any]:
        """The cells of a share over seeds, from the numbers of right answers among n, one per seed;
        without: (blocks,) their mean share without each block."""
        ends = [
            self.test.ends(right.mean() / max(n, 1), n, int(one), without)
            for one in right
        ]
        low, high = (np.array(column) for column in zip(*ends, strict=True))
        if failed.any():
            return _summary(
                np.full(len(right), math.nan), low * math.nan, high * math.nan, n
            )
        # Equal counts give exactly their mean, without spread.
        scores = _summary(right, low, high, n)
        for name in ("value", "std"):
            scores[name] = scores[name] / n if n else math.nan
        return scores


def _mean_l2(values: Float) -> float | None:
    """The value, or the geometric mean of several; None if there is none."""
    if not np.isfinite(values).all():
        return None
    if (values == values.flat[0]).all():
        return float(values.flat[0])
    return float(np.exp2(np.log2(values).mean()))


def _mean_share(share: Float32) -> dict[str, Any]:
    """The cells of a mean share, from the share of probes that are right about each image, (seeds,
    images)."""
    moments = Moments()
    moments.add(share.T)
    summary = moments.summary()
    n = share.shape[1]
    return _summary(
        summary.mean, *share_interval(summary.mean, summary.std / np.sqrt(n), n), n
    )


def _summary(value: Any, low: Any, high: Any, n: int) -> dict[str, Any]:
    spread = float(value.std(ddof=1)) if len(value) > 1 else math.nan
    ends = {"low": float(low.mean()), "high": float(high.mean())}
    return {"value": float(value.mean()), "std": spread, **ends, "n_images": n}


@dataclass(frozen=True)
class Prober:
    """Fits and tests the probes of a site; the settings are shared by every site."""

    task: Task
    draws: Sequence[Draw]
    test_labels: Integers  # of the labelled test images
    training: Training | None = None  # of SGD, None for ridge
    blocks: Integers | None = None  # (test images,) the jackknife's

    def each(
        self,
        train: Source,
        test: Source,
        what: str,
        first: int = 0,
        done: Callable[[int], object] = lambda n: None,
    ) -> Tally:
        """A probe for every token, as many at a time as fit the memory.

        Args:
            train, test: features of the images.
            what: in words, for errors.
            first: tokens from this one on are averaged in the tally's `share`.
            done: called with the number of finished probes.

        Raises:
            VitseeError: not even one token fits the memory.
        """
        tally = self._tally(train.n_tokens, first)
        size = 8 * train.dim * sum(map(len, self.draws))
        if self.training is None:
            size = token_bytes(self.task, self.draws, train.dim)
        if size > self.task.memory:
            raise VitseeError(
                f"probing {what} takes about {human_bytes(size)} of memory, more than "
                f"{human_bytes(self.task.memory)} (give more with --memory, or use fewer images)"
            )
        with self.threads():
            for part in train.groups(max(1, self.task.memory // size)):
                if self.training is not None:
                    fitted = fit_sgd(train, part, self.draws, self.task, self.training)
                else:
                    fitted = [
                        list(probes) for probes in fit(train, part, self.draws, self.task)
                    ]
                self._test(test, part, fitted, tally)
                done(len(self.draws) * (part.stop - part.start))
        return tally

    def threads(self) -> AbstractContextManager[None]:
        """A context in which ridge probes' products run in the calling thread. Entering takes some
        milliseconds, so callers with many sites hold it for all."""
        if self.training is not None:
            return nullcontext()
        return one_blas_thread()

    def side_by_side(self, train: Source, test: Source, what: str) -> Tally:
        """One probe of all tokens together: by inner products if there are more features than
        images."""
        wide = train.n_tokens * train.dim > max(map(len, self.draws))
        if train.n_tokens > 1 and wide and self.training is None:
            tally = self._tally(1, 0)
            n = len(self.test_labels)
            for d, probe, x in probe_concatenated(train, test, self.draws, self.task, n):
                tally.l2s[d, :, 0], tally.blind[d, :, 0] = probe.l2s, probe.blind
                right = tally.judged(probe.ranks(x, self.test_labels))
                tally.count(d, slice(None), 0, np.arange(n), right)
            return tally
        return self.each(ConcatenatedTokens(train), ConcatenatedTokens(test), what)

    def _tally(self, tokens: int, first: int) -> Tally:
        sizes = {"draws": len(self.draws), "l2s": self.task.n_l2, "tokens": tokens}
        labels = self.test_labels
        n_classes = self.task.n_classes
        return Tally(labels, n_classes, first=first, blocks=self.blocks, **sizes)

    def _test(
        self, test: Source, part: slice, fitted: list[list[Fitted | None]], tally: Tally
    ) -> None:
        pairs = [(d, t) for d, probes in enumerate(fitted) for t in range(len(probes))]
        for d, t in pairs:
            probe = fitted[d][t]
            where = (d, slice(None), part.start + t)
            tally.failed[where] = probe is None
            tally.blind[where] = probe is not None and probe.blind
            tally.l2s[where] = np.nan if probe is None else probe.l2s

        def pieces() -> Iterator[tuple[tuple[int, int], Integers, Float32]]:
            for places, x in test.blocks(part, np.arange(len(self.test_labels))):
                for d, t in pairs:
                    yield (d, t), places, x[:, t]

        def score(
            piece: tuple[tuple[int, int], Integers, Float32],
        ) -> tuple[tuple[int, int], Integers, Mask | None]:
            (d, t), places, x = piece
            if (probe := fitted[d][t]) is None:
                return (d, t), places, None
            ranks = probe.ranks(x.astype(np.float64), self.test_labels[places])
            return (d, t), places, tally.judged(ranks)

        for (d, t), places, right in thread_map(self.task.jobs)(score, pieces()):
            if right is not None:
                tally.count(d, slice(None), part.start + t, places, right)


# A site's features of the training and of the test images; or tokens and channels of random ones.
Item = tuple[SiteFeatures, SiteFeatures] | tuple[int, int]


@dataclass(frozen=True)
class SiteProbes:
    """The rows of a site's probes, or of those of random features, and remarks."""

    prober: Prober
    train: LabelledRows
    test: LabelledRows
    scorer: Scorer
    seed: int

    def __call__(
        self, execution: Execution, item: Item
    ) -> tuple[list[dict[str, Any]], list[str]]:
        task = replace(self.prober.task, jobs=execution.jobs, memory=execution.budget)
        prober = replace(self.prober, task=task)
        first, second = item
        if isinstance(first, int) or isinstance(second, int):
            assert isinstance(first, int) and isinstance(second, int)
            # As many tokens and channels.
            ours, theirs = (
                Random(len(data), first, second, (self.seed, i))
                for i, data in enumerate((self.train, self.test))
            )
            random = prober.side_by_side(ours, theirs, "random features")
            return list(self.scorer.rows([Token("")], random, False)), []
        tokens = first.tokens
        each = first.selection == "each"
        what = f"{first.site.name} ({first.selection})"
        progress = execution.progress
        train, test = (
            Stored(features, data, task.jobs, task.memory)
            for features, data in ((first, self.train), (second, self.test))
        )
        if first.site.layout is not None and first.selection == "all":
            tokens = [Token("all")]
            tally = prober.side_by_side(train, test, what)
            progress.advance(len(prober.draws))
        else:
            skipped = first.n_prefix if each else 0
            tally = prober.each(train, test, what, skipped, progress.advance)
        one_class = len(np.unique(self.train.labels)) == 1
        return list(self.scorer.rows(tokens, tally, each)), _remarks(
            first, tally, task, one_class
        )


def shape_of_random(features: SiteFeatures) -> tuple[int, int]:
    """The numbers of tokens and channels of the random features beside these; for `each`, one
    token."""
    return len(features.tokens) if features.selection == "all" else 1, features.dim


def each_selection(
    train: Store,
    sites: Sequence[str],
    tokens: Sequence[str],
    read: Callable[[str, str | None], tuple[SiteFeatures, SiteFeatures]],
) -> Iterator[tuple[SiteFeatures, SiteFeatures]]:
    """The features of the training and of the test images, of every site and kind of tokens, each
    once; a vector has no tokens.

    Args:
        train: whose sites.
        sites: patterns.
        tokens: words, () for each site's default.
        read: returns both features of a site's name and a word.

    Raises:
        StoreMismatch: the test images have other tokens or channels.
    """
    for site in train.select(list(sites)):
        seen: set[str] = set()
        for word in tokens or (None,):
            ours, theirs = read(site.name, word)
            check_alike(ours, theirs)
            if ours.selection not in seen and (ours.site.layout is not None or not seen):
                seen.add(ours.selection)
                yield ours, theirs


def _remarks(
    features: SiteFeatures, tally: Tally, task: Task, one_class: bool
) -> list[str]:
    """One sentence each on SGD that diverged, equal features, and an l2 at an end of the grid.
    one_class: all training images have the same label, so that equal scores say nothing about the
    features."""
    name = features.site.name
    out = []
    if tally.failed.any():
        out.append(
            f"{name}: SGD diverged for {int(tally.failed.sum())} of {tally.failed.size} "
            "probes, which have no value (give a smaller --lr)"
        )
    if tally.blind.any() and not one_class:
        tokens = tally.blind.any((0, 1))
        count = (
            f" of {int(tokens.sum())} of {tokens.size} tokens" if tokens.size > 1 else ""
        )
        which = "" if count or features.site.layout is None else f"{features.selection} "
        out.append(
            f"{name}: the {which}features{count} are the same in all training images; their "
            "probe gives every image the class that most of them have"
        )
    ends = np.isin(tally.l2s, (GRID[0], GRID[-1])) & ~tally.blind
    if ends.any() and not task.l2s:
        out.append(
            f"{name}: the chosen l2 of {int(ends.sum())} of {tally.l2s.size} probes is at an end "
            "of the grid"
        )
    return out


class ProbedSites:
    """Probes every site, and turns tallies into rows. words: of tokens, by site; matched: sites
    converted to the last stage's grid."""

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
        self.prober = prober
        self.examples = examples
        self.train = train
        self.test = test
        self.settings = settings
        self.stores = stores
        self.blocks = blocks
        self.scorer = Scorer(
            prober.draws, test, train.classes if per_class else (), blocks
        )
        self.baselines = baselines
        self.seed = seed
        self.words: dict[str, list[str]] = {}
        self.matched: dict[str, str] = {}
        self.remarks: list[str] = []
        self._chosen = list(self._features())  # raises if something is missing

    @property
    def n_probes(self) -> int:
        per_draw = (1 if x.selection == "all" else len(x.tokens) for x, _ in self._chosen)
        return len(self.prober.draws) * sum(per_draw)

    def rows(
        self, execution: Execution
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The rows about the model, and those of the baselines."""
        rows: list[dict[str, Any]] = []
        random_rows: list[dict[str, Any]] = []
        shapes = dict.fromkeys(
            shape_of_random(ours) for ours, _ in self._chosen if self.baselines
        )
        items: list[Item] = [*self._chosen, *shapes]
        work = SiteProbes(self.prober, self.train, self.test, self.scorer, self.seed)
        results = list(execution.spread(work, items))
        drawn = dict(zip(shapes, results[len(self._chosen) :], strict=True))
        for (features, _), (own, remarks) in zip(self._chosen, results, strict=False):
            self.remarks += remarks
            place = site_columns(self.test.store, features.site)
            rows += [place | row | {"baseline": ""} for row in own]
            mean = "" if features.site.layout is None else features.selection
            for name in self.baselines:
                random, _ = drawn[shape_of_random(features)]
                about = {"token": mean, "baseline": name}
                random_rows += [place | row | about for row in random]
        return rows, random_rows

    def _features(self) -> Iterator[tuple[SiteFeatures, SiteFeatures]]:
        """The probed features of the training and of the test images."""

        def read(name: str, word: str | None) -> tuple[SiteFeatures, SiteFeatures]:
            ours, theirs = (
                self.examples.features(
                    data,
                    data.store.site(name),
                    word,
                    among=self.stores,
                    match_last_stage=self.settings.match_last_stage,
                )
                for data in (self.train, self.test)
            )
            return ours, theirs

        chosen = self.settings.sites, self.settings.tokens
        for ours, theirs in each_selection(self.train.store, *chosen, read):
            name = ours.site.name
            self.words.setdefault(name, []).append(ours.selection)
            if ours.matching is not None:
                grid = " x ".join(map(str, ours.matching.grid))
                patch = ours.matching.patch
                self.matched[name] = (
                    f"patches of {patch} x {patch} cells flattened to {ours.dim} channels, "
                    f"averaged to {grid} cells"
                )
            yield ours, theirs
