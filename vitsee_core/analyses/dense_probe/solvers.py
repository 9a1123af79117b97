"""Solvers, published protocols, and in which points a run differs from its protocol.

`capi`: Darcet et al. 2025, with the code they released: images squashed to 224 x 224, features
standardised, k-NN by votes of pixels, with k of 1, 3, 10, 30 and cosine or L2, whichever is better
on a tenth of the training images, or (with `--solver logistic`) logistic regression of each patch's
most frequent label, upsampled to the nearest; scored on the input.

`hummingbird`: Balažević et al. 2023 in the open implementation of Pariza et al.: a bounded memory
of patches, 30 neighbours, temperature 0.02, scored on the input.

`dinov3`: the linear probes of Siméoni et al. 2025 for classes and for depths: a linear map, by
their own optimiser (`sgd`) or in closed form, scores interpolated to the label's own size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitsee_core.analyses.dense_probe.pixels import RESOLUTIONS
from vitsee_core.analyses.dense_probe.work import CHOOSING
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_stores import Store


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


SOLVER_OF = {CAPI: KNN, HUMMINGBIRD: HUMMINGBIRD, DINOV3: SGD}


NEIGHBOURS = 30


CAPI_KS = (1, 3, 10, 30)


COSINE = "cosine"


L2 = "l2"


DISTANCES = (COSINE, L2)


TEMPERATURE = 0.02


RIDGE_GRID = tuple(10.0**e for e in range(-8, 3))  # of l2


LOGISTIC_GRID = tuple(10.0**e for e in range(-6, 2))


CAPI_INPUT = (224, 224)


# of sgd without a preset; images of a step
SGD_STEPS = 1000


BATCH = 16


PROTOCOL_STEPS = {"class": 40_000, "depth": 38_400}


@dataclass(frozen=True)
class Solver:
    """The way in which probes are fitted.

    Attributes:
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
        """Whether logistic regression learns each patch's most frequent label, and every pixel gets
        that of the nearest patch."""
        return self.preset == CAPI

    def describe(self) -> dict[str, Any]:
        """The settings in words, for a sidecar."""
        found: dict[str, Any] = {
            "kind": _KINDS[self.name],
            "resolution": self.resolution,
            "augmentation": "none",
        }
        if self.name in (RIDGE, LOGISTIC):
            grid = f"of {self.grid[0]:g} to {self.grid[-1]:g} ({len(self.grid)} values)"
            how = "squared error" if self.name == RIDGE else "cross-entropy"
            found["l2_relative"] = (
                "given"
                if self.l2s
                else (
                    f"{grid}, by {CHOOSING:.0%} of the training images: least {how} of a "
                    "pixel, then "
                    "fitted to all training images"
                )
            )
            found["penalty"] = _PENALTIES[self.name]
            found["intercept"] = "not penalised"
        if self.balanced:
            found["classes"] = "balanced: weighted by the inverse of their pixels"
        if self.name == SGD:
            found |= {"steps": self.steps, "pixels": "of the input in training"}
        elif self.name != RIDGE:
            scaled = self.name == LOGISTIC or self.standardise
            found["features"] = "standardised over the bank" if scaled else "as they are"
        if self.of_neighbours:
            found["distance"] = " or ".join(self.distances)
        if self.chooses:
            found["k"] = (
                f"of {', '.join(map(str, self.ks))}, by {CHOOSING:.0%} of the training images: the "
                "highest mean IoU, then of all training images"
            )
        return found


_PENALTIES = {
    RIDGE: "l2_relative x pixels x mean variance of a feature is scikit-learn's alpha",
    LOGISTIC: "l2_relative x pixels is 1 / C of scikit-learn; features are standardised",
}


_KINDS = {
    RIDGE: "ridge: least squares on pixels through bilinear interpolation, in float64",
    LOGISTIC: "logistic: cross-entropy of each patch's pixels, L-BFGS in float64",
    KNN: "knn: the nearest patches' pixels, by vote of classes or the mean of depths",
    HUMMINGBIRD: f"hummingbird: shares of the nearest patches, softmax(cosine / {TEMPERATURE:g})",
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
    """Resolve options: the user's, then the preset's, then the defaults; see `Solver`.

    Raises:
        VitseeError: an unknown word, or options that the solver does not have.
    """
    for what, value, known in (
        ("solver", solver, SOLVERS),
        ("preset", preset, PRESETS),
        ("distance", distance, DISTANCES),
        ("resolution", resolution, RESOLUTIONS),
    ):
        if value is not None and value not in known:
            raise VitseeError(f"no {what} {value!r}; expected {', '.join(known)}")
    name = solver or (SOLVER_OF[preset] if preset else RIDGE)
    allowed = {
        CAPI: (KNN, LOGISTIC),
        HUMMINGBIRD: (HUMMINGBIRD,),
        DINOV3: (SGD, LOGISTIC, RIDGE),
    }
    if preset and name not in allowed[preset]:
        raise VitseeError(
            f"--preset {preset} has no --solver {name}; expected {' or '.join(allowed[preset])}"
        )
    of_depth = target == "depth"
    if of_depth:
        if preset not in (None, DINOV3):
            raise VitseeError(
                f"--preset {preset} has no --depth; expected {DINOV3}, or none"
            )
        if name not in DEPTH_SOLVERS:
            raise VitseeError(
                f"--solver {name} has no --depth; expected {' or '.join(DEPTH_SOLVERS)}"
            )
        if resolution == "patch":
            raise VitseeError(
                "--resolution patch has no --depth; expected label or input"
            )
    for option, given, solvers in (
        ("--l2-relative", l2s, (RIDGE, LOGISTIC)),
        ("--k", ks, (KNN, HUMMINGBIRD)),
        ("--distance", distance, (KNN,)),
        ("--bank", bank, (LOGISTIC, KNN, HUMMINGBIRD)),
        ("--balanced", balanced, (RIDGE,)),
        ("--steps", steps, (SGD,)),
    ):
        if given and name not in solvers:
            raise VitseeError(
                f"{option} belongs to --solver {' or '.join(solvers)}, not to {name}; leave it out"
            )
    if balanced and of_depth:
        raise VitseeError("--balanced belongs to classes, not to --depth; leave it out")
    chooses = preset == CAPI and name == KNN and not ks
    neighbours = tuple(sorted(set(ks)))
    if name in (KNN, HUMMINGBIRD) and not neighbours:
        neighbours = CAPI_KS if chooses else (NEIGHBOURS,)
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


def differences(solver: Solver, store: Store, left_out: bool) -> list[str]:
    """Return the points in which a run differs from its preset's protocol.

    left_out: whether the bank lacks some of the training patches.
    """
    points = list(_differences_of_any(solver, store))
    if left_out and solver.name != HUMMINGBIRD:
        points.append(
            "a part of the training patches: memory holds no more (--bank, --memory)"
        )
    return points


def _differences_of_any(solver: Solver, store: Store) -> Iterator[str]:
    """Yield the differences that follow from the solver and from the store's transform."""
    transform = store.manifest.transform
    size = tuple(transform["input_size"][1:])
    mode = str(transform.get("crop_mode"))
    if solver.preset == CAPI:
        if size != CAPI_INPUT:
            yield f"an input of {size[1]} x {size[0]} px, not 224 x 224"
        if mode != "squash" or transform.get("crop_pct") != 1:
            yield f"images are brought to the input by {mode}, not squashed whole"
        if transform.get("interpolation") != "bicubic":
            yield f"images are resized {transform.get('interpolation')}, not bicubic"
        yield "standardised over training patches with a class, not over all"
        if solver.name == KNN:
            if not solver.chooses:
                yield "k and distance as given: none is chosen on held-out images"
            yield "pixels without a class do not vote"
        else:
            yield "l2 from a grid of its own, chosen by cross-entropy, not by mean IoU"
    elif solver.preset == HUMMINGBIRD:
        yield "no augmentation of the memory's images"
        yield "pixels without a class are left out of patches' shares, not counted as class 0"
        yield "classes as predicted: no Hungarian matching"
        if solver.bank is None:
            yield "as many patches as fit into memory, not a given number"
    else:
        yield from _differences_of_dinov3(solver, size, mode)


def _differences_of_dinov3(
    solver: Solver, size: tuple[int, ...], mode: str
) -> Iterator[str]:
    """Yield the differences from the linear probes of Siméoni et al. 2025.

    Args:
        solver: how the probes are fitted.
        size: (height, width) of the model's input.
        mode: how images are brought to it.
    """
    is_depth = solver.target == "depth"
    n_steps = PROTOCOL_STEPS[solver.target]
    if solver.name == SGD:
        if solver.steps != n_steps:
            yield f"{solver.steps:,} steps, not {n_steps:,}; the warm-up is shorter in proportion"
    else:
        method = "L-BFGS" if solver.name == LOGISTIC else "least squares"
        yield (
            f"{method} on fixed tokens, not AdamW over {n_steps:,} steps; no batch norm, no dropout"
        )
    if is_depth and solver.name == RIDGE:
        yield "a linear map to metres, not to 256 bins"
    view = f"one view of {size[1]} x {size[0]} px ({mode})"
    if is_depth:
        yield "no augmentation in training, and no flip in testing"
        yield view
    else:
        yield "no augmentation in training"
        yield f"{view}, no sliding window"
    if solver.name == LOGISTIC:
        yield "in training every pixel has the scores of its patch, not interpolated ones"
