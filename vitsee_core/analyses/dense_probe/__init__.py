"""Dense probes: what do patch tokens know of every pixel?

A linear map per site from a patch token to one score per class, fitted by ridge regression
to the pixels of labelled images: scores of cells are interpolated bilinearly to pixels,
and the squared error is that of every pixel, one-hot, at the class map's own resolution
(see `linear` for the sums that make this exact in one pass over tokens). A test pixel gets
the class with the highest score. This is the linear segmentation probe of Oquab et al.
2024 (DINOv2) and Siméoni et al. 2025 (DINOv3) with least squares in place of their SGD on
cross-entropy, and without augmentation. Other solvers learn from patches in memory, see
`bank`, or by SGD, see `sgd`; for what presets are and are not, see `options`. With
`--depth` the same predict metres, see `metrics`.

- `miou`: IoU of each class from counts over the whole set, TP / (TP + FP + FN), and their
  mean over the classes that occur in a label or in a prediction; pixels without a class
  count nowhere;
- `pixel_accuracy`: the share of pixels that are right;
- `boundary_iou`: as `miou`, of the pixels of each region that are within 2 % of the image's
  diagonal of its boundary (Cheng et al. 2021);
- `iou_class`: the IoU of one class.

Baselines: `majority` gives every pixel the class that is most frequent in training (`mean`
the mean depth), `position` the one that is most frequent at its cell, or the mean there;
`untrained` is the same probe on another pair of stores. The l2 is chosen by training
images that are held out. Nothing is chosen by looking at test images.

Linear probes do not represent fine-tuning: models rank differently (Kerssies et al. 2024).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from vitsee_core.analyses.dense_probe.figure import plot
from vitsee_core.analyses.dense_probe.metrics import (
    METHOD,
    METRICS,
    Depth,
    Segmentation,
    Task,
)
from vitsee_core.analyses.dense_probe.options import (
    CHOOSE,
    SHOW,
    SiteOptions,
    SolverOptions,
    TruthOptions,
    choose_solver,
)
from vitsee_core.analyses.dense_probe.results import (
    PairOfStores,
    Settings,
    TrainedProbes,
    differences,
)
from vitsee_core.analyses.dense_probe.split_images import image_pairs, open_untrained
from vitsee_core.declaration import Analysis
from vitsee_core.features import compared
from vitsee_core.features.compared import other_precision
from vitsee_core.models.provenance import Provenance
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import (
    KNOWLEDGE,
    Fields,
    Gather,
    Offers,
    Option,
    metrics_option,
)
from vitsee_core.runtime.progress import counting
from vitsee_core.tables.columns import REPLICATES, SITE
from vitsee_core.tables.headlines import best_layers
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.labelled_rows import (
    ALLOW_SHARED,
    TESTS,
    TRAIN_IMAGES,
    shared_ids,
    shared_images,
    training_execution,
)
from vitsee_core.truth.masks.class_maps import open_class_maps
from vitsee_core.truth.masks.depth_maps import open_depth_maps
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

__all__ = ["COLUMNS", "plot", "run"]

log = logging.getLogger(__name__)

headline = partial(
    best_layers,
    units={
        "miou": "mean IoU",
        "pixel_accuracy": "of the pixels right",
        "boundary_iou": "mean IoU",
        "rmse": "m RMSE",
        "abs_rel": "of the depth off",
        "a1": "of the pixels within a factor of 1.25",
    },
)

COLUMNS = (
    *SITE,
    "class",
    "l2_relative",
    "k",
    "metric",
    "value",
    "low",
    "high",
    "n_images",
    "baseline",
)


@analysis
def run(
    train: Store,
    *tests: Annotated[Store, TESTS],
    truth: Annotated[TruthOptions, Fields()],
    fitting: Annotated[SolverOptions, Fields()],
    metrics: Annotated[
        Sequence[str], metrics_option(METRICS, "all of them", "What is measured.")
    ] = (),
    features: Annotated[SiteOptions, Fields()],
    per_class: Annotated[bool, Option("Add iou_class of each class.")] = False,
    show: Annotated[int, SHOW] = 0,
    train_images: Annotated[int | None, TRAIN_IMAGES] = None,
    allow_shared: Annotated[bool, ALLOW_SHARED] = False,
    origin: Annotated[Provenance | None, Gather(Provenance, ("data",))] = None,
    execution: Annotated[
        Execution, Offers("images seed device jobs memory", dask="slabs")
    ] = DEFAULT,
) -> Table:
    """Return one row per site, l2_relative or k, and metric, then those of the baselines.

    The columns are `COLUMNS`, `class` only with `per_class`. A value is NaN if no class
    occurs, an interval for a class that is missing without one of the jackknife's blocks.

    Memory does not grow with the images. It holds a slab of one site's tokens in each
    thread, and of every site two matrices of channels by channels in float64 (ridge), or a
    bank of patches that fits into half of what is allowed.

    Args:
        train: store whose images with a class map or depth map train.
        tests: stores whose images test, store by store; all are of the same model.
        truth: the class maps or depth maps, and which part of `train` tests without
            `tests`.
        fitting: how the probes are fitted.
        metrics: some of `METRICS`; () for all of the task.
        features: which sites are probed, and the stores of an untrained model.
        per_class: add rows of each class.
        show: number of test images whose pictures go into the notes.
        train_images: use only this many of the training images.
        allow_shared: let images both train and test.
        origin: where the data is now, for the pictures of `show`.
        execution: images, seed, device, threads and memory.

    Raises:
        MissingInput: a site is stored pooled only, no such split, or sizes are not known.
        SiteError: no such site, or none with a grid.
        StoreMismatch: other models, or images that are both trained and tested on.
        VitseeError: no class maps, one that is damaged, of another size or with other
            values, or choices that exclude each other.

    Examples:
        >>> import vitsee
        >>> table = vitsee.dense_probe(
        ...     "voc.zarr", masks="sets/VOC2012", holdout=0.2, sites="blocks.-1.out"
        ... )
        >>> sorted(set(table["metric"]))
        ['boundary_iou', 'miou', 'pixel_accuracy']
    """
    n_ways_of_testing = (
        (len(tests) > 0) + (truth.split is not None) + (truth.holdout is not None)
    )
    if n_ways_of_testing != 1:
        raise VitseeError(
            "give exactly one of TEST, --split NAME|FILE and --holdout SHARE"
        )
    settings = _choose_settings(truth, fitting, features, metrics, per_class)
    # --images limits the test images; the training store has a limit of its own.
    train_execution = training_execution(execution, tests, train_images)
    find_pairs = partial(
        image_pairs,
        split=truth.split,
        holdout=truth.holdout,
        execution=execution,
        train_execution=train_execution,
    )
    pairs = find_pairs(train, tests)
    untrained_pairs = []
    if features.untrained:
        untrained_train, *untrained_tests = open_untrained(features.untrained, len(tests))
        untrained_pairs = find_pairs(untrained_train, untrained_tests)
    n_shared = []
    remarks = []
    for pair in pairs:
        train_rows = np.flatnonzero(pair.train_rows.mask & pair.train.valid)
        test_rows = np.flatnonzero(pair.test_rows.mask & pair.test.valid)
        n_shared.append(
            shared_images(pair.train, train_rows, pair.test, test_rows, allow_shared)
        )
        remarks += shared_ids(pair.train, train_rows, pair.test, test_rows)

    # All labels are found before the first probe is fitted: what is missing is an error at
    # once.
    works = [PairOfStores(pair, settings) for pair in pairs]
    untrained_works = [PairOfStores(pair, settings) for pair in untrained_pairs]
    n_images = sum(work.n_images for work in works + untrained_works)
    with counting(execution.progress, n_images):
        probes = [work.probe(execution) for work in works]
        untrained_probes = [work.probe(execution) for work in untrained_works]

    # The rows of all models first, then those of the untrained baseline.
    rows: list[dict[str, Any]] = []
    for trained in probes:
        rows += trained.rows()
    if untrained_probes:
        for trained, untrained in zip(probes, untrained_probes, strict=True):
            rows += untrained.rows_for(trained)
    for trained in probes:
        remarks += trained.remarks()
    for remark in remarks:
        log.info("%s", remark)
    remarks += other_precision((train, *tests))
    notes = _notes(
        train,
        tests,
        probes,
        settings,
        n_shared=n_shared,
        remarks=remarks,
        seed=execution.seed,
    )
    if show:
        data = None if origin is None else origin.data
        notes["shown"] = []
        for trained in probes:
            notes["shown"] += trained.example_pictures(show, data)
    names = [name for name in COLUMNS if name != "class" or per_class]
    return Table.from_rows(rows, names, notes)


def _choose_settings(
    truth: TruthOptions,
    fitting: SolverOptions,
    features: SiteOptions,
    metrics: Sequence[str],
    per_class: bool,
) -> Settings:
    """Return the choices of a run, from the user's options, presets and defaults.

    Raises:
        VitseeError: no class maps, an unknown word, or choices that exclude each other.
    """
    task = _open_task(truth, per_class)
    selected_metrics = select_metrics(
        metrics or task.metrics, task.metrics, f"dense-probe of a {task.label}"
    )
    solver = choose_solver(
        fitting.solver,
        fitting.preset,
        task.label,
        l2s=_validate_l2s(fitting.l2_relative),
        ks=fitting.ks,
        distance=fitting.distance,
        bank=fitting.bank,
        resolution=fitting.resolution,
        balanced=fitting.balanced,
        steps=fitting.steps,
    )
    return Settings(
        sites=tuple(features.sites),
        concat=features.concat,
        task=task,
        solver=solver,
        metrics=tuple(selected_metrics),
        per_class=per_class,
        eigen_crop=truth.eigen_crop,
    )


def _notes(
    train: Store,
    tests: Sequence[Store],
    probes: Sequence[TrainedProbes],
    settings: Settings,
    *,
    n_shared: Sequence[int],
    remarks: Sequence[str],
    seed: int,
) -> dict[str, Any]:
    """Return the table's notes on solver, labels and images.

    Args:
        train: store that trains.
        tests: stores that test; () if a part of `train` does.
        probes: the trained probes of each pair of stores.
        settings: the choices of the run.
        n_shared: for each pair of stores the number of images that both train and test.
        remarks: sentences about images and results.
        seed: seed of the run.
    """
    task = settings.task
    solver = settings.solver
    truth_notes: dict[str, Any] = {"source": task.maps.name, **task.maps.rules}
    if settings.eigen_crop:
        truth_notes["tested"] = "on the crop of Eigen et al. 2014"
    test_notes = []
    blocks = {}
    for trained, n in zip(probes, n_shared, strict=True):
        images = trained.work.test
        label = images.store.label
        test_notes.append({"store": label, **images.counts, "also_in_train": n})
        blocks[label] = trained.blocks.describe()
    first = probes[0]
    training_notes = first.trained.notes
    train_counts = first.work.train.counts
    notes: dict[str, Any] = {
        "solver": solver.describe(),
        "interval": METHOD,
        "truth": truth_notes,
        "seed": seed,
        "train": {"store": train.label, **train_counts, **training_notes},
        "tests": test_notes,
        "compared": compared((train, *tests), "patches"),
        REPLICATES: blocks,
        "remarks": list(remarks),
    }
    if solver.preset is not None:
        # The bank notes it where memory holds no more patches.
        lacks_patches = "left_out" in training_notes
        unlike = differences(solver, train, lacks_patches)
        notes["protocol"] = {"preset": solver.preset, "differences": unlike}
    return notes


def _open_task(truth: TruthOptions, per_class: bool) -> Task:
    """Return the task, of classes or of depths, with its maps.

    Raises:
        VitseeError: both, neither, or an option of the other.
    """
    if bool(truth.masks) == (truth.depth is not None):
        raise VitseeError("give exactly one of --masks and --depth")
    if truth.depth is not None:
        mask_options = {
            "--ignore": truth.ignore,
            "--void": truth.void is not None,
            "--per-class": per_class,
        }
        for flag, value in mask_options.items():
            if value:
                raise VitseeError(
                    f"{flag} belongs to --masks, not to --depth; leave it out"
                )
        maps = open_depth_maps(Path(truth.depth), truth.depth_scale, truth.max_depth)
        return Depth(maps)
    depth_options = {
        "--depth-scale": truth.depth_scale,
        "--max-depth": truth.max_depth,
        "--eigen-crop": truth.eigen_crop,
    }
    for flag, value in depth_options.items():
        if value:
            raise VitseeError(f"{flag} belongs to --depth, not to --masks; leave it out")
    assert truth.masks
    ignored = []
    for item in truth.ignore:
        ignored += [word for word in str(item).split(",") if word]
    return Segmentation(open_class_maps(truth.masks, ignored, truth.void))


def _validate_l2s(values: Sequence[float | str]) -> tuple[float, ...]:
    """Return the l2 values to report, ascending; () if one is to be chosen.

    Raises:
        VitseeError: a word beside other values, or numbers that are not above 0.
    """
    words = [value for value in values if isinstance(value, str)]
    if words not in ([], [CHOOSE]) or (words and len(values) > 1):
        raise VitseeError(
            f"--l2-relative {words[0]} chooses the value; give numbers or {CHOOSE} alone"
        )
    numbers = sorted({float(value) for value in values if not isinstance(value, str)})
    if numbers and not 0 < numbers[0] <= numbers[-1] < float("inf"):
        raise VitseeError("--l2-relative: expected finite numbers above 0")
    return tuple(numbers)


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Probe what patch tokens know of every pixel.

    A linear map from a patch token to one score per class, interpolated to the pixels of
    class maps and fitted to them by ridge regression: exact least squares at full
    resolution, of all layers in one pass over the tokens. Trained on the images of TRAIN
    that have a class map, tested on those of each TEST, a store of the same model; nothing
    is chosen on test images (linear segmentation as in Oquab et al. 2024 and Siméoni et
    al. 2025, with least squares in place of SGD and no augmentation).

      $ vitsee dense-probe train.zarr val.zarr --masks ADEChallengeData2016 -o ade.csv --png ade.png
      $ vitsee dense-probe voc.zarr --masks VOC2012 --split VOC2012/ImageSets/Segmentation/val.txt
      $ vitsee dense-probe train.zarr val.zarr --masks cityscapes --per-class --metric miou
      $ vitsee dense-probe coco.zarr --masks panoptic_val2017.json --holdout 0.2 --show 4 \\
          --png coco.png
      $ vitsee dense-probe train.zarr val.zarr --masks ADEChallengeData2016 --preset capi
      $ vitsee dense-probe train.zarr test.zarr --depth nyu --eigen-crop -o nyu.csv --png nyu.png
      $ vitsee dense-probe a.zarr b.zarr --masks maps --untrained random-a.zarr \\
          --untrained random-b.zarr

    Class maps are read as their authors distribute them: PNG files of class numbers below
    a folder, in the layouts of Pascal VOC, ADE20K (SceneParsing) and Cityscapes
    (labelIds), or a COCO file of panoptic segments, stuff or objects. The value 255,
    ADE20K's 0 and what Cityscapes does not evaluate have no class: such pixels neither
    train nor test. With --depth in place of --masks the map predicts metres: rmse, abs_rel
    and a1 per image, averaged.

    Baselines in the table: majority (the most frequent class everywhere; mean: the mean
    depth), position (the most frequent class, or the mean depth, at each cell), and
    untrained with --untrained. Linear probes do not represent fine-tuning (Kerssies et al.
    2024).
    """,
    needs=("grid", "images"),
    reading=(
        "How well a probe of one layer's patch tokens, a linear map by default, "
        "segments images that it was not fitted to, or tells their depth in metres, "
        "against the layer's depth; bands are 95 % intervals over test images. What "
        "lies near the dashed lines is known without the image: the most frequent "
        "class, or the mean depth, everywhere or at each place."
    ),
    source=(
        "Oquab et al. 2024 (DINOv2); Siméoni et al. 2025 (DINOv3); Darcet et al. 2025 "
        "(CAPI); Balažević et al. 2023 (Hummingbird); Cheng et al. 2021; Eigen et al. "
        "2014"
    ),
    columns=COLUMNS,
    meanings={
        "store": "the one that tests",
        "class": "with --per-class",
        "l2_relative": "penalty over the number of pixels and the mean variance of a feature",
        "k": "neighbours",
        "high": "95 % interval over blocks of test images",
        "n_images": "test images with a map",
    },
    metrics=(*METRICS, "iou_class"),
    run=run,
    plot=plot,
    headline=headline,
)
