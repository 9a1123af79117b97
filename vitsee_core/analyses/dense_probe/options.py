"""The options of `vitsee dense-probe`, and the solver that follows from them and from its
preset.

Presets are published protocols, as near as stored tokens come to them:

`capi`: Darcet et al. 2025, with the code they released: images squashed to 224 x 224,
features standardised, k-NN by votes of pixels, with k of 1, 3, 10, 30 and cosine or L2,
whichever is better on a tenth of the training images, or (with `--solver logistic`)
logistic regression of each patch's most frequent label, upsampled to the nearest; scored
on the input.

`hummingbird`: Balažević et al. 2023 in the open implementation of Pariza et al.: a bounded
memory of patches, 30 neighbours, temperature 0.02, scored on the input.

`dinov3`: the linear probes of Siméoni et al. 2025 for classes and for depths: a linear
map, by their own optimiser (`sgd`) or in closed form, scores interpolated to the label's
own size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from vitsee_core.analyses.dense_probe.pixels import RESOLUTIONS
from vitsee_core.runtime.options import SITES, Option
from vitsee_core.truth.labels.labelled_rows import word_or_number
from vitsee_core.truth.masks.sources import VOID_OPTION
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    pass


RIDGE = "ridge"
LOGISTIC = "logistic"
KNN = "knn"
HUMMINGBIRD = "hummingbird"
SGD = "sgd"
SOLVERS = (RIDGE, LOGISTIC, KNN, HUMMINGBIRD, SGD)
DEPTH_SOLVERS = (RIDGE, KNN, SGD)

CAPI = "capi"
DINOV3 = "dinov3"
PRESETS = (CAPI, HUMMINGBIRD, DINOV3)
# Preset -> the solvers that it has, its default first.
PRESET_SOLVERS = {
    CAPI: (KNN, LOGISTIC),
    HUMMINGBIRD: (HUMMINGBIRD,),
    DINOV3: (SGD, LOGISTIC, RIDGE),
}
CAPI_INPUT = (224, 224)
CAPI_KS = (1, 3, 10, 30)
N_NEIGHBOURS = 30

COSINE = "cosine"
L2 = "l2"
DISTANCES = (COSINE, L2)
TEMPERATURE = 0.02  # of hummingbird's softmax over cosines

CHOOSE = "holdout"
CHOOSING = 0.1  # share of the training images that chooses l2 or k
RIDGE_GRID = tuple(10.0**e for e in range(-8, 3))  # of l2
LOGISTIC_GRID = tuple(10.0**e for e in range(-6, 2))

BATCH = 16  # images of a step of sgd
SGD_STEPS = 1000  # without a preset
PROTOCOL_STEPS = {"class": 40_000, "depth": 38_400}  # of dinov3
_LAST_N = re.compile(r"last([1-9]\d*)")


def parse_concat(text: str) -> int:
    """Return the number of last sites, e.g. 4 for `last4`.

    Raises:
        VitseeError: another word.
    """
    match = _LAST_N.fullmatch(text)
    if match is None:
        raise VitseeError(f"{text!r}; expected lastN, like last4")
    return int(match[1])


MASKS = Option(
    "Class maps: a folder of PNG files whose paths or names are the images' but for the "
    "ending, the root of VOC, ADE20K or Cityscapes, or a COCO .json file. Repeatable: "
    "splits of one data set.",
    "--masks",
    default="none",
)
DEPTH = Option(
    "Depth maps in place of class maps: a folder of 16-bit PNG files whose paths or "
    "names are the images' but for the ending (of NYU sync_depth_* beside rgb_*), or "
    "nyu_depth_v2_labeled.mat.",
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
    "Test on the part of NYU's images that Eigen et al. 2014 do: rows 45 to 470, "
    "columns 41 to 600.",
    only_with=("depth",),
)
SPLIT = Option(
    "Without TEST: test on images of this split of the data, or on those that this file "
    "lists, and train on all others.",
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
    "Further classes that do not count: pixel values, of COCO files names. Repeatable, "
    "or a comma list.",
    metavar="CLASS",
    default="what the layout ignores",
)
SOLVER = Option(
    "ridge: exact least squares on pixels; logistic: cross-entropy of each patch's "
    "pixels; knn: the nearest patches' pixels; hummingbird: their shares of classes, "
    "weighted by similarity; sgd: the head of DINOv3, by AdamW.",
    choices=SOLVERS,
    default="ridge, or the preset's",
)
PRESET = Option(
    "A published protocol, as near as stored tokens come to it; the sidecar lists the "
    "differences. capi: knn (or logistic) on standardised tokens; hummingbird; dinov3: "
    "sgd (or logistic, ridge), with --depth too. Options given beside it win.",
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
    "The penalty over the number of pixels and the mean variance of a feature (that of "
    f"probe --l2 is over neither). holdout: of a grid, the least error on {CHOOSING:.0%} "
    "of the training images, then fitted to all; or numbers, all of them reported. "
    "Numbers: repeatable.",
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
    default="30; capi: of 1, 3, 10 and 30 the best on "
    f"{CHOOSING:.0%} of the training images",
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
    "Baseline: the same probe on stores of a model with random weights, in the order of "
    "TRAIN and TEST.",
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
    """How probes are fitted, as the user gives it; `Solver` is what follows from it."""

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


@dataclass(frozen=True)
class Solver:
    """The way in which probes are fitted.

    Attributes:
        name: one of `SOLVERS`.
        preset: one of `PRESETS`, or None.
        l2s: the l2_relative values to report; empty to choose one.
        ks: numbers of neighbours.
        bank: patches per site, None for what fits into memory.
        resolution: of the pixels that are scored, and for ridge of those that are fitted.
        distances: between patches.
        chooses: report the k and distance that held-out images choose, not all.
        balanced: all classes weigh alike.
        steps: of sgd.
        target: class or depth.
    """

    name: str
    preset: str | None
    l2s: tuple[float, ...]
    ks: tuple[int, ...]
    bank: int | None
    resolution: str
    distances: tuple[str, ...] = (COSINE,)
    chooses: bool = False
    balanced: bool = False
    steps: int = SGD_STEPS
    target: str = "class"

    @property
    def of_neighbours(self) -> bool:
        """Whether training patches take the place of weights."""
        return self.name in (KNN, HUMMINGBIRD)

    @property
    def grid(self) -> tuple[float, ...]:
        """The l2 values to choose from."""
        return LOGISTIC_GRID if self.name == LOGISTIC else RIDGE_GRID

    @property
    def standardise(self) -> bool:
        """Whether features are standardised before neighbours are searched."""
        return self.preset == CAPI

    @property
    def of_patches(self) -> bool:
        """Whether logistic regression learns each patch's most frequent label, and every
        pixel gets that of the nearest patch."""
        return self.preset == CAPI

    def describe(self) -> dict[str, Any]:
        """Return the settings in words, for a table's notes."""
        words: dict[str, Any] = {
            "kind": _KINDS[self.name],
            "resolution": self.resolution,
            "augmentation": "none",
        }
        if self.name in (RIDGE, LOGISTIC):
            words["l2_relative"] = "given" if self.l2s else self._l2_choice_in_words()
            words["penalty"] = _PENALTIES[self.name]
            words["intercept"] = "not penalised"
        if self.balanced:
            words["classes"] = "balanced: weighted by the inverse of their pixels"
        if self.name == SGD:
            words["steps"] = self.steps
            words["pixels"] = "of the input in training"
        elif self.name != RIDGE:
            is_scaled = self.name == LOGISTIC or self.standardise
            words["features"] = "as they are"
            if is_scaled:
                words["features"] = "standardised over the bank"
        if self.of_neighbours:
            words["distance"] = " or ".join(self.distances)
        if self.chooses:
            words["k"] = (
                f"of {', '.join(map(str, self.ks))}, by {CHOOSING:.0%} of the training "
                "images: the highest mean IoU, then of all training images"
            )
        return words

    def _l2_choice_in_words(self) -> str:
        """Return from which grid l2 is chosen, and how."""
        error = "squared error" if self.name == RIDGE else "cross-entropy"
        return (
            f"of {self.grid[0]:g} to {self.grid[-1]:g} ({len(self.grid)} values), by "
            f"{CHOOSING:.0%} of the training images: least {error} of a pixel, then "
            "fitted to all training images"
        )


_PENALTIES = {
    RIDGE: "l2_relative x pixels x mean variance of a feature is scikit-learn's alpha",
    LOGISTIC: "l2_relative x pixels is 1 / C of scikit-learn; features are standardised",
}
_KINDS = {
    RIDGE: "ridge: least squares on pixels through bilinear interpolation, in float64",
    LOGISTIC: "logistic: cross-entropy of each patch's pixels, L-BFGS in float64",
    KNN: "knn: the nearest patches' pixels, by vote of classes or the mean of depths",
    HUMMINGBIRD: (
        f"hummingbird: shares of the nearest patches, softmax(cosine / {TEMPERATURE:g})"
    ),
    SGD: "sgd: batch norm and a 1 x 1 convolution, AdamW in float32 (see `sgd`)",
}


def choose_solver(
    solver: str | None,
    preset: str | None,
    target: str,
    *,
    l2s: Sequence[float],
    ks: Sequence[int],
    distance: str | None,
    bank: int | None,
    resolution: str | None,
    balanced: bool,
    steps: int | None,
) -> Solver:
    """Return the solver that follows from the user's options, else the preset's, else the
    defaults.

    Args:
        solver: one of `SOLVERS`, or None.
        preset: one of `PRESETS`, or None.
        target: "class" or "depth".
        l2s: values of l2_relative to report; () to choose one.
        ks: numbers of neighbours; () for the preset's or `N_NEIGHBOURS`.
        distance: one of `DISTANCES`, or None.
        bank: patches per site; None for what fits into memory.
        resolution: one of `RESOLUTIONS`, or None.
        balanced: weigh pixels so that all classes count alike.
        steps: of sgd, or None.

    Raises:
        VitseeError: an unknown word, or options that the solver does not have.
    """
    _require_known("solver", solver, SOLVERS)
    _require_known("preset", preset, PRESETS)
    _require_known("distance", distance, DISTANCES)
    _require_known("resolution", resolution, RESOLUTIONS)
    name = solver or (PRESET_SOLVERS[preset][0] if preset else RIDGE)
    if preset and name not in PRESET_SOLVERS[preset]:
        expected = " or ".join(PRESET_SOLVERS[preset])
        raise VitseeError(
            f"--preset {preset} has no --solver {name}; expected {expected}"
        )
    if target == "depth":
        _require_depth(name, preset, resolution)
    _require_solver("--l2-relative", l2s, name, (RIDGE, LOGISTIC))
    _require_solver("--k", ks, name, (KNN, HUMMINGBIRD))
    _require_solver("--distance", distance, name, (KNN,))
    _require_solver("--bank", bank, name, (LOGISTIC, KNN, HUMMINGBIRD))
    _require_solver("--balanced", balanced, name, (RIDGE,))
    _require_solver("--steps", steps, name, (SGD,))
    if balanced and target == "depth":
        raise VitseeError("--balanced belongs to classes, not to --depth; leave it out")

    # CAPI reports the best of its k and distances; a k of the user's ends the choice.
    chooses = preset == CAPI and name == KNN and not ks
    neighbours = tuple(sorted(set(ks)))
    if name in (KNN, HUMMINGBIRD) and not neighbours:
        neighbours = CAPI_KS if chooses else (N_NEIGHBOURS,)
    distances: tuple[str, ...] = (COSINE,)
    if distance:
        distances = (distance,)
    elif chooses:
        distances = DISTANCES
    if resolution is None:
        resolution = "input" if preset in (CAPI, HUMMINGBIRD) else "label"
    if not steps:
        steps = PROTOCOL_STEPS[target] if preset == DINOV3 else SGD_STEPS
    return Solver(
        name=name,
        preset=preset,
        l2s=tuple(l2s),
        ks=neighbours,
        bank=bank,
        resolution=resolution,
        distances=distances,
        chooses=chooses,
        balanced=balanced,
        steps=steps,
        target=target,
    )


def _require_known(option: str, word: str | None, words: Sequence[str]) -> None:
    """Refuse a word that an option does not have."""
    if word is not None and word not in words:
        raise VitseeError(f"no {option} {word!r}; expected {', '.join(words)}")


def _require_depth(name: str, preset: str | None, resolution: str | None) -> None:
    """Refuse solvers, presets and resolutions that do not predict depths."""
    if preset not in (None, DINOV3):
        raise VitseeError(f"--preset {preset} has no --depth; expected {DINOV3}, or none")
    if name not in DEPTH_SOLVERS:
        raise VitseeError(
            f"--solver {name} has no --depth; expected {' or '.join(DEPTH_SOLVERS)}"
        )
    if resolution == "patch":
        raise VitseeError("--resolution patch has no --depth; expected label or input")


def _require_solver(flag: str, value: object, name: str, solvers: Sequence[str]) -> None:
    """Refuse an option that was given and that the solver does not have."""
    if value and name not in solvers:
        raise VitseeError(
            f"{flag} belongs to --solver {' or '.join(solvers)}, not to {name}; leave it "
            "out"
        )
