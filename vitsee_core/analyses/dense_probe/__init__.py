"""Dense probes: what do patch tokens know of every pixel?

A linear map per site from a patch token to one score per class, fitted by ridge regression to the
pixels of labelled images: scores of cells are interpolated bilinearly to pixels, and the squared
error is that of every pixel, one-hot, at the class map's own resolution (see `ridge` for the sums
that make this exact in one pass over tokens). A test pixel gets the class with the highest score.
This is the linear segmentation probe of Oquab et al. 2024 (DINOv2) and Siméoni et al. 2025 (DINOv3)
with least squares in place of their SGD on cross-entropy, and without augmentation. Other solvers
learn from patches in memory, see `bank`, or by SGD, see `sgd`; for what presets are and are not,
see `options`. With `--depth` the same predict metres, see `metrics`.

- `miou`: IoU of each class from counts over the whole set, TP / (TP + FP + FN), and their mean over
  the classes that occur in a label or in a prediction; pixels without a class count nowhere;
- `pixel_accuracy`: the share of pixels that are right;
- `boundary_iou`: as `miou`, of the pixels of each region that are within 2 % of the image's
  diagonal of its boundary (Cheng et al. 2021);
- `iou_class`: the IoU of one class.

Baselines: `majority` gives every pixel the class that is most frequent in training (`mean` the mean
depth), `position` the one that is most frequent at its cell, or the mean there; `untrained` is the
same probe on another pair of stores. The l2 is chosen by training images that are held out. Nothing
is chosen by looking at test images.

Linear probes do not represent fine-tuning: models rank differently (Kerssies et al. 2024).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.dense_probe import options
from vitsee_core.analyses.dense_probe.metrics import (
    METHOD,
    METRICS,
    Depth,
    Segmentation,
    Task,
)
from vitsee_core.analyses.dense_probe.options import CHOOSE, choose_solver, differences
from vitsee_core.analyses.dense_probe.results import (
    PairOfStores,
    Settings,
    pairs,
    pairs_of_untrained,
)
from vitsee_core.declaration import Analysis
from vitsee_core.features import compared
from vitsee_core.features.compared import other_precision
from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import (
    PanelGrid,
    em,
    grow,
    map_axes,
    map_title,
    note_below,
    stack,
)
from vitsee_core.figures.plotting import styled
from vitsee_core.images.embedded_pictures import decode
from vitsee_core.models.provenance import Provenance
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
from vitsee_core.tables.columns import SITE
from vitsee_core.tables.headlines import best_layers
from vitsee_core.tables.metrics import asked_for
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import site_words
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
from vitsee_core.types import pl
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    *(
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
    ),
)
PICTURES = ("photo", "label", "prediction", "error")
TILE = 9.0  # ems
LETTER = 0.56  # ems that a letter of the caption takes


@analysis
def run(
    train: Store,
    *tests: Annotated[Store, TESTS],
    masks: Annotated[Path | Sequence[Path] | None, options.MASKS] = None,
    depth: Annotated[Path | None, options.DEPTH] = None,
    depth_scale: Annotated[float | None, options.DEPTH_SCALE] = None,
    max_depth: Annotated[float | None, options.MAX_DEPTH] = None,
    eigen_crop: Annotated[bool, options.EIGEN_CROP] = False,
    split: Annotated[str | None, options.SPLIT] = None,
    holdout: Annotated[float | None, options.HOLDOUT] = None,
    ignore: Annotated[Sequence[str], options.IGNORE] = (),
    solver: Annotated[str | None, options.SOLVER] = None,
    preset: Annotated[str | None, options.PRESET] = None,
    resolution: Annotated[str | None, options.RESOLUTION] = None,
    l2_relative: Annotated[Sequence[float | str], options.L2_RELATIVE] = (),
    balanced: Annotated[bool, options.BALANCED] = False,
    ks: Annotated[Sequence[int], options.K] = (),
    distance: Annotated[str | None, options.DISTANCE] = None,
    bank: Annotated[int | None, options.BANK] = None,
    steps: Annotated[int | None, options.STEPS] = None,
    metrics: Annotated[
        Sequence[str], metrics_option(METRICS, "all of them", "What is measured.")
    ] = (),
    sites: Annotated[Sequence[str], SITES] = ("blocks",),
    concat: Annotated[int | None, options.CONCAT] = None,
    untrained: Annotated[Sequence[Path], options.UNTRAINED] = (),
    per_class: Annotated[bool, Option("Add iou_class of each class.")] = False,
    show: Annotated[int, options.SHOW] = 0,
    train_images: Annotated[int | None, TRAIN_IMAGES] = None,
    allow_shared: Annotated[bool, ALLOW_SHARED] = False,
    origin: Annotated[Provenance | None, Gather(Provenance, ("data",))] = None,
    execution: Annotated[
        Execution, Offers("images seed device jobs memory", dask="slabs")
    ] = DEFAULT,
) -> Table:
    """One row per site, l2_relative or k, and metric, then those of the baselines.

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
        raise VitseeError(
            "give exactly one of TEST, --split NAME|FILE and --holdout SHARE"
        )
    task = _task(masks, ignore, depth, depth_scale, max_depth, eigen_crop, per_class)
    wanted = asked_for(
        metrics or task.metrics, task.metrics, f"dense-probe of a {task.label}"
    )
    how = choose_solver(
        solver,
        preset,
        task.label,
        l2s=_given_l2(l2_relative),
        ks=ks,
        distance=distance,
        bank=bank,
        resolution=resolution,
        balanced=balanced,
        steps=steps,
    )
    training = training_execution(execution, tests, train_images)
    trained_and_tested = pairs(train, tests, split, holdout, execution, training)
    plain = pairs_of_untrained(untrained, len(tests), split, holdout, execution, training)
    settings = Settings(
        tuple(sites), concat, task, how, tuple(wanted), per_class, eigen_crop
    )
    shared = []
    remarks = []
    for pair in trained_and_tested:
        ours, theirs = (np.flatnonzero(rows.mask & store.valid) for store, rows in pair)
        shared.append(shared_images(pair[0][0], ours, pair[1][0], theirs, allow_shared))
        remarks += shared_ids(pair[0][0], ours, pair[1][0], theirs)
    works = [PairOfStores(*pair, settings) for pair in trained_and_tested]
    controls = [PairOfStores(*pair, settings) for pair in plain]
    with counting(execution.progress, sum(work.n_images for work in (*works, *controls))):
        found = [work.probe(execution) for work in works]
        control = [work.probe(execution) for work in controls]
    rows = [row for one in found for row in one.rows()]
    for one, other in zip(found, control, strict=False):
        rows += other.rows_for(one)
    remarks += [remark for probed in found for remark in probed.remarks()]
    for remark in remarks:
        log.info("%s", remark)
    remarks += other_precision((train, *tests))
    notes: dict[str, Any] = {
        "solver": how.describe(),
        "interval": METHOD,
        "truth": {"source": task.maps.name, **task.maps.rules},
        "seed": execution.seed,
        "train": {
            "store": train.label,
            **works[0].train.counts,
            **found[0].trained.notes,
        },
        "tests": [
            {"store": work.test.store.label, **work.test.counts, "also_in_train": n}
            for work, n in zip(works, shared, strict=True)
        ],
        "compared": compared((train, *tests), "patches"),
        WORD: {one.work.test.store.label: one.blocks.describe() for one in found},
        "remarks": remarks,
    }
    if eigen_crop:
        notes["truth"]["tested"] = "on the crop of Eigen et al. 2014"
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
    among = table.frame.filter(pl.col("metric").is_in(METRICS))
    metrics = [metric for metric in METRICS if metric in among["metric"]]
    shown: Sequence[Mapping[str, Any]] = table.notes.get("shown", ())
    curves = CurveGrid.of(len(metrics), among)
    grids = [PanelGrid(len(PICTURES), TILE, TILE + 2.2, TILE) for _ in shown]
    figure, parts = stack(curves, *grids)
    panels = curves.panels(parts[0], of_metrics(among, metrics))
    for axes, _, rows in panels:
        draw_depth_curves(axes, rows, by=_settings(among), among=among)
        axes.set_ylim(bottom=0)
    curves.finish(panels)
    add_curve_legend(figure, [axes for axes, *_ in panels])
    for part, grid, one in zip(parts[1:], grids, shown, strict=True):
        _draw_shown(part, grid, one)
    if text := _caption(table.notes, float(figure.get_figwidth()) / em()):
        note_below(figure, text)
        grow(figure, em(1.3 * text.count("\n")))
    return figure


def _task(
    masks: Path | Sequence[Path] | None,
    ignore: Sequence[str],
    depth: Path | None,
    scale: float | None,
    max_depth: float | None,
    eigen_crop: bool,
    per_class: bool,
) -> Task:
    """The task, of classes or of depths, with its maps. Raises VitseeError: both, neither, or an
    option of the other."""
    if bool(masks) == (depth is not None):
        raise VitseeError("give exactly one of --masks and --depth")
    if depth is not None:
        for option, given in (("--ignore", ignore), ("--per-class", per_class)):
            if given:
                raise VitseeError(
                    f"{option} belongs to --masks, not to --depth; leave it out"
                )
        return Depth(open_depth_maps(Path(depth), scale, max_depth))
    for option, other in (
        ("--depth-scale", scale),
        ("--max-depth", max_depth),
        ("--eigen-crop", eigen_crop),
    ):
        if other:
            raise VitseeError(
                f"{option} belongs to --depth, not to --masks; leave it out"
            )
    assert masks
    ignored = [word for item in ignore for word in str(item).split(",") if word]
    return Segmentation(open_class_maps(masks, ignored))


def _given_l2(l2: Sequence[float | str]) -> tuple[float, ...]:
    """The l2 values to report; empty if one is to be chosen."""
    words = [value for value in l2 if isinstance(value, str)]
    if words not in ([], [CHOOSE]) or (words and len(l2) > 1):
        raise VitseeError(
            f"--l2-relative {words[0]} chooses the value; give numbers or {CHOOSE} alone"
        )
    numbers = sorted({float(value) for value in l2 if not isinstance(value, str)})
    if numbers and not 0 < numbers[0] <= numbers[-1] < float("inf"):
        raise VitseeError("--l2-relative: expected finite numbers above 0")
    return tuple(numbers)


def _draw_shown(part: Any, grid: PanelGrid, one: Mapping[str, Any]) -> None:
    right = one.get("right")
    titles = {
        "photo": str(one["image"]),
        "label": "label",
        "prediction": site_words(str(one["site"])),
        "error": "no pixel counts" if right is None else f"{right:.0%} right",
    }
    for axes, kind in zip(grid.axes(part), PICTURES, strict=True):
        if kind in one:
            axes.imshow(decode(one[kind]), interpolation="nearest", origin="upper")
        map_axes(axes)
        map_title(axes, grid, titles[kind])


def _settings(rows: pl.DataFrame) -> list[str]:
    """The columns, among l2_relative and k, in which several rows of one probe differ."""
    probe = [
        name for name in ("store", "site", "metric", "baseline") if name in rows.columns
    ]
    there = [name for name in ("l2_relative", "k") if name in rows.columns]
    values = rows.group_by(probe).agg(pl.col(there).drop_nulls().n_unique())
    return [name for name in there if (values[name] > 1).any()]


def _caption(notes: Mapping[str, Any], width: float) -> str:
    """The text below the figure, for a width in ems: the protocol, and the points in which the run
    differs from it."""
    lines = []
    if protocol := notes.get("protocol"):
        unlike = "; ".join(protocol["differences"])
        lines += wrap(f"after {protocol['preset']}, but: {unlike}", int(width / LETTER))
    if notes.get("shown"):
        lines.append(
            "colours: depth, lighter is farther; red: off by the depth itself; white: no depth"
            if "pixels with a depth" in notes.get("truth", {})
            else "colours: classes; red: wrong pixels; white: pixels without a class"
        )
    return "\n".join(lines)


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Probe what patch tokens know of every pixel.

    A linear map from a patch token to one score per class, interpolated to the pixels of class
    maps and fitted to them by ridge regression: exact least squares at full resolution, of all
    layers in one pass over the tokens. Trained on the images of TRAIN that have a class map,
    tested on those of each TEST, a store of the same model; nothing is chosen on test images
    (linear segmentation as in Oquab et al. 2024 and Siméoni et al. 2025, with least squares in
    place of SGD and no augmentation).

      $ vitsee dense-probe train.zarr val.zarr --masks ADEChallengeData2016 -o ade.csv --png ade.png
      $ vitsee dense-probe voc.zarr --masks VOC2012 --split VOC2012/ImageSets/Segmentation/val.txt
      $ vitsee dense-probe train.zarr val.zarr --masks cityscapes --per-class --metric miou
      $ vitsee dense-probe coco.zarr --masks panoptic_val2017.json --holdout 0.2 --show 4 \\
          --png coco.png
      $ vitsee dense-probe train.zarr val.zarr --masks ADEChallengeData2016 --preset capi
      $ vitsee dense-probe train.zarr test.zarr --depth nyu --eigen-crop -o nyu.csv --png nyu.png
      $ vitsee dense-probe a.zarr b.zarr --masks maps --untrained random-a.zarr \\
          --untrained random-b.zarr

    Class maps are read as their authors distribute them: PNG files of class numbers below a
    folder, in the layouts of Pascal VOC, ADE20K (SceneParsing) and Cityscapes (labelIds), or a
    COCO file of panoptic segments, stuff or objects. The value 255, ADE20K's 0 and what
    Cityscapes does not evaluate have no class: such pixels neither train nor test. With --depth
    in place of --masks the map predicts metres: rmse, abs_rel and a1 per image, averaged.

    Baselines in the table: majority (the most frequent class everywhere; mean: the mean depth),
    position (the most frequent class, or the mean depth, at each cell), and untrained with
    --untrained. Linear probes do not represent fine-tuning (Kerssies et al. 2024).
    """,
    needs=("grid", "images"),
    reading=(
        "How well a probe of one layer's patch tokens, a linear map by default, segments images "
        "that it was not fitted to, or tells their depth in metres, against the layer's depth; "
        "bands are 95 % intervals over test images. What lies near the dashed lines is known "
        "without the image: the most frequent class, or the mean depth, everywhere or at each "
        "place."
    ),
    source=(
        "Oquab et al. 2024 (DINOv2); Siméoni et al. 2025 (DINOv3); Darcet et al. 2025 (CAPI); "
        "Balažević et al. 2023 (Hummingbird); Cheng et al. 2021; Eigen et al. 2014"
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
