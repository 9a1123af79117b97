"""The options of `vitsee dense-probe`, in groups that are handed on as one object each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from vitsee_core.analyses.dense_probe.pixels import RESOLUTIONS
from vitsee_core.analyses.dense_probe.solvers import (
    DISTANCES,
    PRESETS,
    SOLVERS,
)
from vitsee_core.analyses.dense_probe.work import CHOOSING, parse_concat
from vitsee_core.runtime.options import SITES, Option
from vitsee_core.truth.labels.labelled_rows import word_or_number
from vitsee_core.truth.masks.sources import VOID_OPTION

if TYPE_CHECKING:
    pass


CHOOSE = "holdout"


MASKS = Option(
    "Class maps: a folder of PNG files whose paths or names are the images' but for the ending, "
    "the root of VOC, ADE20K or Cityscapes, or a COCO .json file. Repeatable: splits of one data "
    "set.",
    "--masks",
    default="none",
)
DEPTH = Option(
    "Depth maps in place of class maps: a folder of 16-bit PNG files whose paths or names are the "
    "images' but for the ending (of NYU sync_depth_* beside rgb_*), or nyu_depth_v2_labeled.mat.",
    metavar="DIR|FILE",
    default="none",
)
DEPTH_SCALE = Option(
    "Units of PNG depth maps per metre: 1000 of millimetres, 256 of KITTI.",
    metavar="N",
    above=0,
    default="1000 of sync_depth_*, else to be given",
    only_with=("depth",),
)
MAX_DEPTH = Option(
    "Metres; deeper pixels do not count, and predictions reach no farther.",
    metavar="M",
    above=0,
    default="10 of NYU, else what the files can hold",
    only_with=("depth",),
)
EIGEN_CROP = Option(
    "Test on the part of NYU's images that Eigen et al. 2014 do: rows 45 to 470, columns 41 to "
    "600.",
    only_with=("depth",),
)
SPLIT = Option(
    "Without TEST: test on images of this split of the data, or on those that this file lists, and "
    "train on all others.",
    metavar="NAME|FILE",
    default="none",
)
HOLDOUT = Option(
    "Without TEST: test on this share of the images, e.g. 0.2.",
    metavar="SHARE",
    above=0,
    below=1,
    default="none",
)
IGNORE = Option(
    "Further classes that do not count: pixel values, of COCO files names. Repeatable, or a comma "
    "list.",
    metavar="CLASS",
    default="what the layout ignores",
)
SOLVER = Option(
    "ridge: exact least squares on pixels; logistic: cross-entropy of each patch's pixels; knn: "
    "the nearest patches' pixels; hummingbird: their shares of classes, weighted by similarity; "
    "sgd: the head of DINOv3, by AdamW.",
    choices=SOLVERS,
    default="ridge, or the preset's",
)
PRESET = Option(
    "A published protocol, as near as stored tokens come to it; the sidecar lists the differences. "
    "capi: knn (or logistic) on standardised tokens; hummingbird; dinov3: sgd (or logistic, "
    "ridge), with --depth too. Options given beside it win.",
    choices=PRESETS,
    default="none",
)
RESOLUTION = Option(
    "Which pixels: those of the map, those of the model's input (the map resampled by the "
    "nearest), or one per patch (its most frequent class).",
    choices=RESOLUTIONS,
    default="label; of presets capi and hummingbird input",
)
L2_RELATIVE = Option(
    "The penalty over the number of pixels and the mean variance of a feature (that of probe --l2 "
    f"is over neither). holdout: of a grid, the least error on {CHOOSING:.0%} of the training "
    "images, then fitted to all; or numbers, all of them reported. Numbers: repeatable.",
    metavar="L2",
    parse=partial(
        word_or_number, words=(CHOOSE,), expected=f"a number above 0 or {CHOOSE}"
    ),
    default=CHOOSE,
)
BALANCED = Option("ridge: weigh pixels so that all classes count alike, however rare.")
K = Option(
    "knn, hummingbird: number of neighbours, all of them reported.",
    "--k",
    least=1,
    default=f"30; capi: of 1, 3, 10 and 30 the best on {CHOOSING:.0%} of the training images",
)
DISTANCE = Option(
    "knn: between patches.", choices=DISTANCES, default="cosine; capi: the better"
)
STEPS = Option(
    "sgd: batches of 16 images.",
    metavar="N",
    least=1,
    default="1000; dinov3: 40000, with --depth 38400",
)
BANK = Option(
    "logistic, knn, hummingbird: keep about N training patches of each site.",
    metavar="N",
    least=1,
    default="as many as fit into the memory",
)
CONCAT = Option(
    "Probe the last N of the sites together, their channels side by side, e.g. last4.",
    metavar="lastN",
    parse=parse_concat,
    default="none: each site alone",
)
UNTRAINED = Option(
    "Baseline: the same probe on stores of a model with random weights, in the order of TRAIN and "
    "TEST.",
    metavar="STORE",
    default="none",
)
SHOW = Option(
    "Draw the first N test images: image, label, prediction and error of the best layer.",
    metavar="N",
    least=0,
    default="none",
)


@dataclass(frozen=True)
class TruthOptions:
    """The labels of pixels, and which images test without TEST."""

    masks: Annotated[Path | Sequence[Path] | None, MASKS] = None
    depth: Annotated[Path | None, DEPTH] = None
    depth_scale: Annotated[float | None, DEPTH_SCALE] = None
    max_depth: Annotated[float | None, MAX_DEPTH] = None
    eigen_crop: Annotated[bool, EIGEN_CROP] = False
    split: Annotated[str | None, SPLIT] = None
    holdout: Annotated[float | None, HOLDOUT] = None
    ignore: Annotated[Sequence[str], IGNORE] = ()
    void: Annotated[int | str | None, VOID_OPTION] = None


@dataclass(frozen=True)
class SolverOptions:
    """How probes are fitted, as the user gives it; `solvers.Solver` is what follows from it."""

    solver: Annotated[str | None, SOLVER] = None
    preset: Annotated[str | None, PRESET] = None
    resolution: Annotated[str | None, RESOLUTION] = None
    l2_relative: Annotated[Sequence[float | str], L2_RELATIVE] = ()
    balanced: Annotated[bool, BALANCED] = False
    ks: Annotated[Sequence[int], K] = ()
    distance: Annotated[str | None, DISTANCE] = None
    bank: Annotated[int | None, BANK] = None
    steps: Annotated[int | None, STEPS] = None


@dataclass(frozen=True)
class SiteOptions:
    """Which sites are probed, and the stores of an untrained model beside them."""

    sites: Annotated[Sequence[str], SITES] = ("blocks",)
    concat: Annotated[int | None, CONCAT] = None
    untrained: Annotated[Sequence[Path], UNTRAINED] = ()
