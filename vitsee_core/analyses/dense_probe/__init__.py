"""Dense probes: what do patch tokens know of every pixel?

A linear map per site from a patch token to one score per class, fitted by ridge regression to the
pixels of labelled images: scores of cells are interpolated bilinearly to pixels, and the squared
error is that of every pixel, one-hot, at the class map's own resolution (see `ridge` for the sums
that make this exact in one pass over tokens). A test pixel gets the class with the highest score.
This is the linear segmentation probe of Oquab et al. 2024 (DINOv2) and Siméoni et al. 2025 (DINOv3)
with least squares in place of their SGD on cross-entropy, and without augmentation. Other solvers
learn from patches in memory: see `logistic`, `neighbour_heads` and, for what presets are and are
not, `protocols`.

- `miou`: IoU of each class from counts over the whole set, TP / (TP + FP + FN), and their mean over
  the classes that occur in a label or in a prediction; pixels without a class count nowhere;
- `pixel_accuracy`: the share of pixels that are right;
- `boundary_iou`: as `miou`, of the pixels of each region that are within 2 % of the image's
  diagonal of its boundary (Cheng et al. 2021);
- `iou_class`: the IoU of one class.

Baselines: `majority` gives every pixel the class that is most frequent in training, `position` the
one that is most frequent at its cell; `untrained` is the same probe on another pair of stores. The
l2 is chosen by training images that are held out. Nothing is chosen by looking at test images.

Linear probes do not represent fine-tuning: models rank differently (Kerssies et al. 2024).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.dense_probe.figure import draw_dense
from vitsee_core.analyses.dense_probe.memory import train_from_bank
from vitsee_core.analyses.dense_probe.metrics import MEANS, METHOD, metric_cells
from vitsee_core.analyses.dense_probe.pixels import RESOLUTIONS
from vitsee_core.analyses.dense_probe.protocols import (
    PRESETS,
    RIDGE,
    SOLVERS,
    Solver,
    choose_solver,
    differences,
)
from vitsee_core.analyses.dense_probe.scoring import Counts, HeadKey
from vitsee_core.analyses.dense_probe.shown import show_images
from vitsee_core.analyses.dense_probe.splits import CHOOSING, split_images
from vitsee_core.analyses.dense_probe.work import (
    BASELINES,
    UNTRAINED,
    Part,
    Trained,
    score_heads,
    train_ridge,
)
from vitsee_core.features import check_alike, compared, require_comparable
from vitsee_core.figures.plotting import styled
from vitsee_core.labels.labelled_rows import shared_images
from vitsee_core.labels.options import ALLOW_SHARED, TESTS
from vitsee_core.masks.class_maps import IGNORED, ClassMaps, open_class_maps
from vitsee_core.models.provenance import Provenance
from vitsee_core.patch_maps.views import grid_sites
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import (
    KNOWLEDGE,
    SITES,
    Gather,
    Offers,
    Option,
    metrics_option,
)
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.streaming import Rows
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.headlines import best_layers
from vitsee_core.tables.metrics import asked_for
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_stores import open_store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_stores import SiteSpec, Store

log = logging.getLogger(__name__)

QUESTION = KNOWLEDGE
HELP = """
Probe what patch tokens know of every pixel.

A linear map from a patch token to one score per class, interpolated to the pixels of class maps and
fitted to them by ridge regression: exact least squares at full resolution, of all layers in one
pass over the tokens. Trained on the images of TRAIN that have a class map, tested on those of each
TEST, a store of the same model; nothing is chosen on test images (linear segmentation as in Oquab
et al. 2024 and Siméoni et al. 2025, with least squares in place of SGD and no augmentation).

  $ vitsee dense-probe train.zarr val.zarr --masks ADEChallengeData2016 -o ade.csv --png ade.png
  $ vitsee dense-probe voc.zarr --masks VOC2012 --split VOC2012/ImageSets/Segmentation/val.txt
  $ vitsee dense-probe train.zarr val.zarr --masks cityscapes --per-class --metric miou
  $ vitsee dense-probe coco.zarr --masks panoptic_val2017.json --holdout 0.2 --show 4 --png coco.png
  $ vitsee dense-probe train.zarr val.zarr --masks ADEChallengeData2016 --preset capi
  $ vitsee dense-probe a.zarr b.zarr --masks maps --untrained random-a.zarr \\
      --untrained random-b.zarr

Class maps are read as their authors distribute them: PNG files of class numbers below a folder, in
the layouts of Pascal VOC, ADE20K (SceneParsing) and Cityscapes (labelIds), or a COCO file of
panoptic segments, stuff or objects. The value 255, ADE20K's 0 and what Cityscapes does not evaluate
have no class: such pixels neither train nor test.

Baselines in the table: majority (the most frequent class everywhere), position (the most frequent
class at each cell), and untrained with --untrained. Linear probes do not represent fine-tuning
(Kerssies et al. 2024).
"""
MEANING = {
    "store": "the one that tests",
    "class": "with --per-class",
    "l2": "as used",
    "k": "neighbours",
    "high": "95 % interval over blocks of test images",
    "n_images": "test images with a class map",
}
NEEDS = ("grid",)
READING = (
    "How well a probe of one layer's patch tokens, a linear map by default, segments images that "
    "it was not fitted to, against depth; bands are 95 % intervals over test images. What lies "
    "near the dashed lines is known without the image: the most frequent class, everywhere or at "
    "each place."
)
SOURCE = (
    "Oquab et al. 2024 (DINOv2); Siméoni et al. 2025 (DINOv3); Darcet et al. 2025 (CAPI); "
    "Balažević et al. 2023 (Hummingbird); Cheng et al. 2021"
)
headline = partial(
    best_layers,
    units={"miou": "mean IoU", "pixel_accuracy": "of the pixels right", "boundary_iou": "mean IoU"},
)

COLUMNS = (
    *(*SITE, "class", "l2", "k", "metric", "value", "low", "high", "n_images", "baseline"),
)  # fmt: skip
CHOOSE = "holdout"


def parse_l2(text: str) -> str | float:
    """A number above 0, or the word `holdout`.

    Raises:
        VitseeError: neither of them.
    """
    if text == CHOOSE:
        return text
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise VitseeError(f"{text!r}; expected a number above 0 or {CHOOSE}")
    return value


@analysis
def run(
    train: Store,
    *tests: Annotated[Store, TESTS],
    masks: Annotated[
        Path | Sequence[Path],
        Option(
            "Class maps: a folder of PNG files whose paths or names are the images' but for the "
            "ending, the root of VOC, ADE20K or Cityscapes, or a COCO .json file. Repeatable: "
            "splits of one data set.",
            "--masks",
        ),
    ],
    split: Annotated[
        str | None,
        Option(
            "Without TEST: test on images of this split of the data, or on those that this file "
            "lists, and train on all others.",
            metavar="NAME|FILE",
            default="none",
        ),
    ] = None,
    holdout: Annotated[
        float | None,
        Option(
            "Without TEST: test on this share of the images, e.g. 0.2.",
            metavar="SHARE",
            above=0,
            below=1,
            default="none",
        ),
    ] = None,
    ignore: Annotated[
        Sequence[str],
        Option(
            "Further classes that do not count: pixel values, of COCO files names. Repeatable, or "
            "a comma list.",
            metavar="CLASS",
            default="what the layout ignores",
        ),
    ] = (),
    solver: Annotated[
        str | None,
        Option(
            "ridge: exact least squares on pixels; logistic: cross-entropy of each patch's pixels; "
            "knn: votes of the nearest patches' pixels; hummingbird: their shares of classes, "
            "weighted by similarity.",
            choices=SOLVERS,
            default="ridge, or the preset's",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        Option(
            "A published protocol, as near as stored tokens come to it; the sidecar lists the "
            "differences. capi: knn (or logistic) on standardised tokens; hummingbird; dinov3: "
            "logistic (or ridge). Options given beside it win.",
            choices=PRESETS,
            default="none",
        ),
    ] = None,
    resolution: Annotated[
        str | None,
        Option(
            "Which pixels: those of the class map, those of the model's input (the map resampled "
            "by the nearest), or one per patch (its most frequent class).",
            choices=RESOLUTIONS,
            default="label; of presets capi and hummingbird input",
        ),
    ] = None,
    l2: Annotated[
        Sequence[float | str],
        Option(
            f"holdout: of a grid, the least error on {CHOOSING:.0%} of the training images, then "
            "fitted to all; or numbers (of ridge in units of the mean variance of a feature), all "
            "of them reported. Numbers: repeatable.",
            metavar="L2",
            parse=parse_l2,
            default=CHOOSE,
        ),
    ] = (),
    ks: Annotated[
        Sequence[int],
        Option(
            "knn, hummingbird: number of neighbours, all of them reported.",
            "--k",
            least=1,
            default="30; capi: 1, 3, 10, 30",
        ),
    ] = (),
    bank: Annotated[
        int | None,
        Option(
            "logistic, knn, hummingbird: keep about N training patches of each site.",
            metavar="N",
            least=1,
            default="as many as fit into the memory",
        ),
    ] = None,
    metrics: Annotated[
        Sequence[str], metrics_option(MEANS, "all of them", "What is measured.")
    ] = MEANS,
    sites: Annotated[Sequence[str], SITES] = ("blocks",),
    untrained: Annotated[
        Sequence[Path],
        Option(
            "Baseline: the same probe on stores of a model with random weights, in the order of "
            "TRAIN and TEST.",
            metavar="STORE",
            default="none",
        ),
    ] = (),
    per_class: Annotated[bool, Option("Add iou_class of each class.")] = False,
    show: Annotated[
        int,
        Option(
            "Draw the first N test images: image, label, prediction and error of the best layer.",
            metavar="N",
            least=0,
            default="none",
        ),
    ] = 0,
    allow_shared: Annotated[bool, ALLOW_SHARED] = False,
    origin: Annotated[Provenance | None, Gather(Provenance, ("data",))] = None,
    execution: Annotated[
        Execution, Offers("images seed device jobs memory", dask="slabs")
    ] = DEFAULT,
) -> Table:
    """One row per site, l2 or k, and metric, then those of the baselines.

    Columns: `COLUMNS`, `class` only with `per_class`. NaN: no class occurs, or an interval of a
    class that is missing without one of the blocks.

    Memory: a slab of one site's tokens in each thread, and of every site two matrices of channels
    by channels in float64 (ridge), or a bank of patches that fits into half of what is allowed; it
    does not grow with the images.

    Args:
        train: its images with a class map train.
        tests: theirs test, store by store; of the same model.
        untrained: their sites have the names of those probed.
        origin: where the data is now, for the pictures of `show`.

    Raises:
        MissingInput: a site is stored pooled only, no such split, or sizes are not known.
        SiteError: no such site, or none with a grid.
        StoreMismatch: other models, or images that are both trained and tested on.
        VitseeError: no class maps, one that is damaged, of another size or with other values, or
            choices that exclude each other.
    """
    if sum(way is not None for way in (tests or None, split, holdout)) != 1:
        raise VitseeError("give exactly one of TEST, --split NAME|FILE and --holdout SHARE")
    wanted = asked_for(metrics, MEANS, "dense-probe")
    if resolution not in (None, *RESOLUTIONS):
        raise VitseeError(f"no resolution {resolution!r}; expected {', '.join(RESOLUTIONS)}")
    how = choose_solver(
        solver, preset, l2s=_given_l2(l2), ks=ks, bank=bank, resolution=resolution
    )  # fmt: skip
    ignored = [word for item in ignore for word in str(item).split(",") if word]
    maps = open_class_maps(masks, ignored)
    pairs = _pairs(train, tests, split, holdout, execution)
    plain = _pairs_of_untrained(untrained, pairs, split, holdout, execution)
    settings = _Settings(tuple(sites), maps, how, tuple(wanted), per_class)
    shared = [
        shared_images(a, _counted(a, rows), b, _counted(b, others), allow_shared)
        for (a, rows), (b, others) in pairs
    ]
    works = [_Work(*pair, settings) for pair in pairs]
    controls = [_Work(*pair, settings) for pair in plain]
    n_images = sum(work.train.n_images + work.test.n_images for work in (*works, *controls))
    with counting(execution.progress, n_images):
        found = [work.probe(execution) for work in works]
        control = [work.probe(execution) for work in controls]
    rows = [row for one in found for row in one.rows()]
    for one, other in zip(found, control, strict=False):
        rows += other.rows_for(one)
    notes = {
        "solver": how.describe(),
        "interval": METHOD,
        "classes": {"source": maps.name, "n_trained": len(found[0].trained.classes), **maps.rules},
        "seed": execution.seed,
        "train": {"store": train.label, **works[0].train.counts, **found[0].trained.notes},
        "tests": [
            {"store": work.test.store.label, **work.test.counts, "also_in_train": n}
            for work, n in zip(works, shared, strict=True)
        ],
        "compared": compared((train, *tests), "patches"),
        WORD: {one.work.test.store.label: one.blocks.describe() for one in found},
    }
    if preset is not None:
        unlike = differences(how, train, "left_out" in found[0].trained.notes)
        notes["protocol"] = {"preset": preset, "differences": unlike}
    if show:
        data = None if origin is None else origin.data
        notes["shown"] = [shown for one in found for shown in one.shown(show, data)]
    names = [name for name in COLUMNS if name != "class" or per_class]
    return Table.from_rows(rows, names, notes)


@styled
def plot(table: Table) -> Figure:
    """A panel per metric against relative depth, with the 95 % interval as a band and baselines
    dashed; below, if they were asked for, images beside label, prediction and error."""
    return draw_dense(table, MEANS)


Images = tuple["Store", Rows]


def _given_l2(l2: Sequence[float | str]) -> tuple[float, ...]:
    """Those to report; none to choose one."""
    words = [value for value in l2 if isinstance(value, str)]
    if words not in ([], [CHOOSE]) or (words and len(l2) > 1):
        raise VitseeError(f"--l2 {words[0]} chooses the value; give numbers or {CHOOSE} alone")
    numbers = sorted({float(value) for value in l2 if not isinstance(value, str)})
    if numbers and not 0 < numbers[0] <= numbers[-1] < float("inf"):
        raise VitseeError("--l2: expected finite numbers above 0")
    return tuple(numbers)


def _counted(store: Store, rows: Rows) -> Any:
    return np.flatnonzero(rows.mask & store.valid)


def _pairs(
    train: Store,
    tests: Sequence[Store],
    split: str | None,
    holdout: float | None,
    execution: Execution,
) -> list[tuple[Images, Images]]:
    """What trains and what tests, for each store that tests."""
    if not tests:
        ours, theirs = split_images(train, execution, split, holdout)
        return [((train, ours), (train, theirs))]
    require_comparable(train, tests)
    ours = execution.rows(train)
    return [((train, ours), (test, execution.rows(test))) for test in tests]


def _pairs_of_untrained(
    places: Sequence[Path],
    pairs: Sequence[tuple[Images, Images]],
    split: str | None,
    holdout: float | None,
    execution: Execution,
) -> list[tuple[Images, Images]]:
    """The same of the stores of an untrained model."""
    if not places:
        return []
    one = split is not None or holdout is not None
    n = 1 if one else 1 + len(pairs)
    if len(places) != n:
        raise VitseeError(
            f"--untrained was given {len(places)} times; expected {n}: the stores of a model with "
            f"random weights for {'the store' if one else 'TRAIN and each TEST'}, in this order"
        )
    first, *others = [open_store(place) for place in places]
    return _pairs(first, others, split, holdout, execution)


@dataclass(frozen=True)
class _Settings:
    sites: tuple[str, ...]
    maps: ClassMaps
    solver: Solver
    metrics: tuple[str, ...]
    per_class: bool


class _Work:
    """One pair of stores. sites: of the store that trains."""

    def __init__(self, train: Images, test: Images, settings: _Settings) -> None:
        self.settings = settings
        self.sites: list[SiteSpec] = grid_sites(train[0], settings.sites)
        others = [test[0].site(site.name) for site in self.sites]
        more = settings.maps, settings.solver.resolution
        self.train = Part.of(*train, self.sites, *more)
        self.test = Part.of(*test, others, *more)
        for site in self.sites:
            check_alike(self.train.features[site.name], self.test.features[site.name])

    def probe(self, execution: Execution) -> _Found:
        """Train and test."""
        solver, boundary = self.settings.solver, "boundary_iou" in self.settings.metrics
        if solver.name == RIDGE:
            trained = train_ridge(self.train, solver.l2s, execution)
        else:
            trained = train_from_bank(self.train, solver, execution)
        alone = bool(solver.ks)  # neighbours take all threads
        counts, blocks = score_heads(self.test, trained.heads, boundary, execution, not alone)
        return _Found(self, trained, counts, blocks)


@dataclass(frozen=True)
class _Found:
    """What a pair of stores gave."""

    work: _Work
    trained: Trained
    counts: Mapping[HeadKey, Counts]
    blocks: Blocks

    def rows(self) -> Iterator[dict[str, Any]]:
        """Of the model's sites, then of the baselines beside each of them."""
        for site in self.work.sites:
            yield from self._of_site(site)
        several = len(self.work.settings.solver.l2s) > 1
        for site in self.work.sites:
            grid = self.work.test.grids[site.name]
            place = site_columns(self.work.test.store, site)
            for own in self._keys(site):
                # Beside each row that they are compared with.
                of = place | {"k": own.k, "l2": own.l2 if several else None}
                for name in BASELINES:
                    yield from self._cells(HeadKey(grid, baseline=name), of | {"baseline": name})

    def rows_for(self, trained: _Found) -> Iterator[dict[str, Any]]:
        """Of the sites of an untrained model, as a baseline of those of a trained one."""
        known = {site.name: site for site in self.work.sites}
        for site in trained.work.sites:
            if site.name not in known:
                label = self.work.train.store.label
                raise VitseeError(f"{label} lacks the site {site.name}, which is probed")
            yield from self._of_site(
                known[site.name], site_columns(trained.work.test.store, site), UNTRAINED
            )

    def best(self) -> HeadKey:
        """The site, and its l2, with the highest mean IoU."""
        keys = [key for key in self.counts if not key.baseline]
        values = [self._miou(key) for key in keys]
        return keys[int(np.nanargmax(values))]

    def shown(self, n: int, data: str | None) -> list[dict[str, Any]]:
        """The first test images, for the notes."""
        key = self.best()
        return show_images(self.work.test, key, self.trained.heads[key], n, data)

    def _miou(self, key: HeadKey) -> float:
        cells = next(metric_cells(self.counts[key], ["miou"]))
        return float(cells["value"])  # type: ignore[arg-type]

    def _of_site(
        self, site: SiteSpec, place: Mapping[str, Any] | None = None, baseline: str = ""
    ) -> Iterator[dict[str, Any]]:
        place = place or site_columns(self.work.test.store, site)
        for key in self._keys(site):
            yield from self._cells(key, {**place, "baseline": baseline, "l2": key.l2, "k": key.k})

    def _keys(self, site: SiteSpec) -> list[HeadKey]:
        """Of the site's probes."""
        return [key for key in self.trained.heads if key.of == site.name and not key.baseline]

    def _cells(self, key: HeadKey, about: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        names = list(self.work.settings.maps.classes)
        names += [str(k) for k in range(len(names), IGNORED)]
        per_class = names if self.work.settings.per_class else ()
        for cells in metric_cells(self.counts[key], self.work.settings.metrics, per_class):
            yield {**about, **cells, "n_images": self.work.test.n_images}
