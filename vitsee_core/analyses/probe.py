"""Linear probes: which layer knows the class best?

One linear map per site (or token) from features to one target per class, +1 for an image's own
class and -1 for the others, by ridge regression in closed form; a test image is assigned the class
with the highest score (Raghu et al. 2021, Figs. 11, 13, D.4, F.1 to F.3 and appendix A; Dosovitskiy
et al. 2021, few-shot). Classes are those of the data set, not those seen. By SGD: Walmer et al.
2023, Table 6.

- `top1`: share of test images whose class has the highest score.
- `top5`: share whose class is among the five highest, where there are more than five classes.
- `top1_class`: `top1` of the images of one class.

Equal scores go to the lower class. `value` is the mean over seeds, `std` the standard deviation
over seeds (n - 1; empty with one), `low` and `high` the 95 % interval over test images, its ends
averaged over seeds. Nothing is chosen by looking at the test images.

With masks, segments train and test: the vectors are those of `cluster --masks`, the classes are the
masks' categories, and intervals are over images.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsee_core.answers import best_layers
from vitsee_core.arguments import analysis
from vitsee_core.columns import SITE, site_columns
from vitsee_core.execution import DEFAULT, Execution
from vitsee_core.features import SiteFeatures, check_alike
from vitsee_core.labelled.labelled_rows import (
    LabelledRows,
    check_disjoint,
    check_same_model,
)
from vitsee_core.probing.draws import check_classes, draw_images, split_rows
from vitsee_core.probing.figure import plot
from vitsee_core.probing.fit import Task
from vitsee_core.probing.rows import INTERVAL, Scorer
from vitsee_core.probing.score import Prober
from vitsee_core.probing.settings import Settings, choose_settings, choose_training
from vitsee_core.probing.site_probes import Item, SiteProbes, shape_of_random
from vitsee_core.progress import counting
from vitsee_core.replicates import WORD
from vitsee_core.results import Table
from vitsee_core.segments import Examples, Segmentation, as_segmentation, examples_of
from vitsee_core.statistics.jackknife import Blocks
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_stores import Store

__all__ = ["plot", "run"]

log = logging.getLogger(__name__)

NEEDS = ("sites",)
READING = (
    "The share of test images that a linear map of one layer's tokens classifies right, against "
    "depth; bands are 95 % intervals over test images. It shows what a layer knows of the class, "
    "whether or not the model uses it."
)
SOURCE = (
    "Raghu et al. 2021, Figs. 11, 13, D.4, F.1 to F.3; Dosovitskiy et al. 2021; Walmer et al. "
    "2023, Table 6"
)
in_short = partial(best_layers, units={"top1": "of the images right", "top5": "with it among five"})

BASELINES = ("random",)
COLUMNS = (
    *(*SITE, "token", "row", "col", "class", "shots", "l2"),
    *("metric", "value", "std", "low", "high", "n_images", "baseline"),
)
SEGMENT_COLUMNS = (*COLUMNS[:-1], "n_segments", "baseline")


@analysis
def run(
    train: Store,
    *tests: Store,
    test_split: str | None = None,
    holdout: float | None = None,
    masks: Segmentation | Path | str | Sequence[Path] | None = None,
    preset: str | None = None,
    sites: Sequence[str] = (),
    tokens: Sequence[str] = (),
    match_last_stage: bool | None = None,
    shots: Sequence[int] = (),
    seeds: int | None = None,
    l2: Sequence[float | str] = (),
    standardise: bool | None = None,
    intercept: float | str | None = None,
    solver: str = "ridge",
    batch_norm: bool = False,
    epochs: int | None = None,
    lr: float | None = None,
    batch: int | None = None,
    baselines: Sequence[str] = (),
    per_class: bool = False,
    allow_shared: bool = False,
    execution: Execution = DEFAULT,
) -> Table:
    """One row per site, token, shots, l2 and metric: the accuracy on the test images.

    Columns: see `COLUMNS`. `store` is the test store. `token`, `row`, `col`: what was
    probed, empty for a vector; with `each` one row per token, and one called `each`, the mean over
    the patches' probes (prefix tokens apart, as in Raghu et al. 2021, Fig. 11). `shots` is empty
    for all images. `l2` is the value used, the geometric mean where seeds chose different ones;
    empty for SGD. `class` only with `per_class`; `baseline` is empty in the rows about the
    model. With masks the columns are `SEGMENT_COLUMNS`.
    NaN: SGD diverged, or a class without test images.

    Memory: as many tokens at a time as fit; each byte of a site is read once as far as groups of
    tokens can follow the store's chunks, and the training images that choose l2 fit.

    Args:
        train: its labelled images train.
        tests: their labelled images are classified, store by store; all have activations of the
            same model. Each store's probes are fitted anew.
        test_split: in place of `tests`, images of this split of `train`.
        holdout: in place of `tests`, this share of each class of `train`.
        masks: probe segments in place of images; a `Segmentation`, or the paths of the masks of
            all stores. A held-out share is then one of the images.
        preset: see `settings`; parameters given beside it win.
        sites: names, globs and groups; default `blocks`; with masks those with a grid.
        tokens: one or several words; default `cls` where a site has a class token, else `mean`.
        match_last_stage: bring a CNN's grids and channels to the last stage's; see `last_stage`.
        shots: training images per class, one or several numbers; all images by default.
        seeds: how many draws of them (3): `seed`, `seed` + 1, ...
        l2: numbers or `grid`, of which all are reported, or `holdout` (default) or `loo`.
        standardise: divide features by their standard deviation over the training images.
        intercept: `free` (default), or the value of a penalised constant column.
        solver: `ridge` or `sgd`.
        batch_norm: of SGD: batch-normalise the features.
        epochs: of SGD (20).
        lr: of SGD (0.1), for 256 images per step.
        batch: of SGD (1024), images per step.
        baselines: `random`: standard normal features of the same shape (one draw for each number
            of channels).
        per_class: add the `top1_class` of each class.
        allow_shared: go on where an image is both trained and tested on.
        execution: which images, and what the work may use; see `Execution`.

    Raises:
        MissingInput: no labels, no such split, or a store lacks a site.
        SiteError: a site has no such tokens.
        StoreMismatch: other models, other classes, or images that are both trained and tested on.
        VitseeError: too few images of a class, choices that exclude each other, or too little
            memory.
    """
    seed = execution.seed
    settings = choose_settings(
        preset,
        sites=sites,
        tokens=tokens,
        shots=shots,
        seeds=seeds,
        seed=seed,
        l2=l2,
        standardise=standardise,
        intercept=intercept,
        match_last_stage=match_last_stage,
    )
    training = choose_training(
        solver,
        execution.device,
        sgd={
            **{"--epochs": epochs, "--lr": lr, "--batch": batch},
            "--batch-norm": batch_norm or None,
        },
        ridge={
            **{"--l2": l2 or None, "--standardise": standardise, "--intercept": intercept},
            "--preset big_vision": preset if preset == "big_vision" else None,
        },
    )
    for name in baselines:
        if name not in BASELINES:
            raise VitseeError(f"no baseline {name!r}; expected {', '.join(BASELINES)}")
    works, remarks, shared = [], [], []
    choice = as_segmentation(masks)
    read = [] if choice is None else [(s, s.select(list(settings.sites))) for s in (train, *tests)]
    examples = examples_of(choice, read, execution, test_split)
    for test in tests or (None,):
        ours, theirs = split_rows(
            train, test, test_split=test_split, holdout=holdout, rows=examples.rows, seed=seed
        )
        if test is not None:
            check_same_model(train, test)
            remarks += examples.check_classes(ours, theirs)
        shared.append(check_disjoint(ours, theirs, allow_shared))
        remarks += check_classes(ours, theirs, settings.shots)
        draws = [draw_images(ours, n, s) for n in settings.shots or (None,) for s in settings.seeds]
        task = Task(
            ours.labels,
            ours.n_classes,
            settings.algebra,
            settings.l2s if training is None else (math.nan,),
            settings.choose,
            execution.jobs,
            execution.budget,
        )
        blocks = theirs.jackknife(seed)
        prober = Prober(task, draws, theirs.labels, training, blocks.labels)
        works.append(
            _Work(
                *(prober, examples, ours, theirs, blocks, settings),
                *(per_class, tuple(baselines), seed),
            )
        )
    n_probes = sum(work.n_probes for work in works)
    with counting(execution.progress, n_probes, "probes"), works[0].prober.threads():
        found = [work.rows(execution) for work in works]
    remarks = list(dict.fromkeys([*remarks, *(r for work in works for r in work.remarks)]))
    for remark in remarks:
        log.info("%s", remark)
    notes = {
        "interval": INTERVAL if choice is None else works[0].test.INTERVAL,
        "solver": settings.describe() if training is None else training.describe(),
        "train": {"store": train.label, **works[0].train.describe()},
        "tests": [
            {"store": work.test.store.label, **work.test.describe(), "also_in_train": n}
            for work, n in zip(works, shared, strict=True)
        ],
        "classes": works[0].train.n_classes,
        "shots": list(settings.shots) or "all",
        "seeds": list(settings.seeds),
        "seed": seed,
        "tokens": works[0].words,
        "matched_to_last_stage": works[0].matched,
        WORD: {work.test.store.label: work.blocks.describe() for work in works},
        "remarks": remarks,
    }
    rows = [row for real, _ in found for row in real] + [row for _, some in found for row in some]
    columns = COLUMNS if choice is None else SEGMENT_COLUMNS
    names = [name for name in columns if name != "class" or per_class]
    return Table.from_rows(rows, names, notes)


class _Work:
    """Probes every site, and turns tallies into rows. words: of tokens, by site; matched: sites
    that were brought to the last stage's grid."""

    def __init__(
        self,
        prober: Prober,
        examples: Examples,
        train: LabelledRows,
        test: LabelledRows,
        blocks: Blocks,
        settings: Settings,
        per_class: bool,
        baselines: Sequence[str],
        seed: int,
    ) -> None:
        self.prober, self.examples = prober, examples
        self.train, self.test, self.settings = train, test, settings
        self.blocks = blocks
        self.scorer = Scorer(prober.draws, test, train.classes if per_class else (), blocks)
        self.baselines, self.seed = baselines, seed
        self.words: dict[str, list[str]] = {}
        self.matched: dict[str, str] = {}
        self.remarks: list[str] = []
        self._chosen = list(self._features())  # refuses what is not there

    @property
    def n_probes(self) -> int:
        """How many are fitted."""
        return len(self.prober.draws) * sum(_n_probes(features) for features, _ in self._chosen)

    def rows(self, execution: Execution) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The rows about the model, and those of the baselines."""
        rows: list[dict[str, Any]] = []
        random_rows: list[dict[str, Any]] = []
        shapes = dict.fromkeys(shape_of_random(ours) for ours, _ in self._chosen if self.baselines)
        items: list[Item] = [*self._chosen, *shapes]
        work = SiteProbes(self.prober, self.train, self.test, self.scorer, self.seed)
        found = list(execution.spread(work, items))
        drawn = dict(zip(shapes, found[len(self._chosen) :], strict=True))
        for (features, _), (own, remarks) in zip(self._chosen, found, strict=False):
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
        """What is probed: of the training images and of the test images."""
        train, test = self.train.store, self.test.store
        for site in train.select(list(self.settings.sites)):
            other = test.site(site.name)
            site = train.site(site.name)
            words: Sequence[str | None] = self.settings.tokens or (None,)
            seen: set[str] = set()
            for word in words:
                match = self.settings.match_last_stage
                features = self.examples.features
                ours = features(self.train, site, word, match_last_stage=match)
                theirs = features(self.test, other, word, match_last_stage=match)
                check_alike(ours, theirs)
                # A vector has no tokens to choose from: it is probed once.
                if ours.selection in seen or (site.layout is None and seen):
                    continue
                seen.add(ours.selection)
                self.words.setdefault(site.name, []).append(ours.selection)
                if ours.matching is not None:
                    grid = " x ".join(map(str, ours.matching.grid))
                    self.matched[site.name] = (
                        f"patches of {ours.matching.patch} x {ours.matching.patch} cells "
                        f"flattened to {ours.dim} channels, averaged to {grid} cells"
                    )
                yield ours, theirs


def _n_probes(features: SiteFeatures) -> int:
    return 1 if features.selection == "all" else len(features.tokens)
