"""The options of `vitsee probe`, in groups, and the settings of probes that follow from
them.

Callers give every option by its own name. `inputs.SplitOptions` and `FeatureOptions` are
for all probes, `ClassOptions` only for probes of classes, `ResponseOptions` only for
probes of responses. The defaults of probes of classes are those of published protocols:

`raghu`: Raghu et al. 2021, appendix A: 10 images per class, the mean of all tokens, l2
tuned on a held-out part of the training images; CNNs converted to the last stage's grid
and channels. They follow Dosovitskiy et al. 2021 and say nothing of scaling: features are
centred, the intercept is not penalised. Seeds and the held-out share are not given.

`big_vision`: the few-shot evaluation of Dosovitskiy et al. 2021 in its published code
(google-research/big_vision, evaluators/fewshot_lsr.py): standardised features, a constant
column of 100, l2 = 2^10, the pooled vector. With shots 1, 5, 10, 25 and seeds 0 to 2 it is
that protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from vitsee_core.analyses.probe.inputs import HELD_OUT
from vitsee_core.kernels.l2_choice import GRID, HeldOut, LeaveOneOut
from vitsee_core.kernels.ridge import Algebra
from vitsee_core.runtime.options import Option, sites_option, tokens_option
from vitsee_core.runtime.parameters import options_of
from vitsee_core.truth.labels.labelled_rows import (
    PER_CLASS,
    RANDOM_BASELINE,
    word_or_number,
)
from vitsee_stores.errors import VitseeError
from vitsee_stores.selectors import VECTOR_WORDS

PRESETS = ("raghu", "big_vision")
SEEDS = 3
CHOOSERS = ("holdout", "loo")
FREE = "free"
SOLVERS = ("ridge", "sgd")
MOMENTUM = 0.9

L2_WORDS = (*CHOOSERS, "grid")
parse_l2 = partial(
    word_or_number,
    words=L2_WORDS,
    expected=f"a number above 0, {', '.join(L2_WORDS)}",
)
parse_intercept = partial(
    word_or_number, words=(FREE,), expected=f"{FREE} or a number above 0, e.g. 100"
)


@dataclass(frozen=True)
class Training:
    """Settings of stochastic gradient descent.

    Attributes:
        epochs: passes over the training images.
        lr: learning rate for 256 images per step.
        batch: images per step.
        batch_norm: batch-normalise the features.
        device: torch device.
    """

    epochs: int = 20
    lr: float = 0.1
    batch: int = 1024
    batch_norm: bool = False
    device: str = "cpu"

    def describe(self) -> str:
        """Return how the probes are trained, in words for a table's notes."""
        norm = "batch-normalised features" if self.batch_norm else "features as they are"
        return (
            f"SGD on {norm}: {self.epochs} epochs, batches of {self.batch}, "
            f"cross-entropy, momentum {MOMENTUM}, no weight decay, learning rate "
            f"{self.lr:g} x batch / 256 falling to 0 along a cosine"
        )


@dataclass(frozen=True)
class ResponseOptions:
    """The responses that are predicted in place of classes, and how predictions are
    tested."""

    response: Annotated[
        Path | None,
        Option(
            "Predict these responses in place of classes: a store that `vitsee import` "
            "made, or a file (.csv, .tsv or .parquet with a column id; .npy, .npz, .pt, "
            ".safetensors) of a row per image and a column per neuron, voxel or rating. "
            "Repeats: several rows with one id, or an array (repeats, images, columns).",
            metavar="FILE|STORE",
            default="none: classes",
        ),
    ] = None
    response_ids: Annotated[
        Path | None,
        Option(
            "Whose rows the responses are: an id per line, or a table with a column id.",
            metavar="FILE",
            default="the file's column id, else the images of TRAIN in its order",
            only_with=("response",),
        ),
    ] = None
    folds: Annotated[
        int | None,
        Option(
            "--response without TEST, --test-split and --holdout: cross-validate, each "
            "image tested once.",
            metavar="N",
            least=2,
            default="5",
            only_with=("response",),
        ),
    ] = None
    by_column: Annotated[
        bool,
        Option(
            "--response: also a row per column of the responses.", only_with=("response",)
        ),
    ] = False


@dataclass(frozen=True)
class FeatureOptions:
    """Which features are probed, and how large their weights may be."""

    sites: Annotated[Sequence[str], sites_option("blocks; big_vision: pooled")] = ()
    tokens: Annotated[
        Sequence[str],
        tokens_option(
            (*VECTOR_WORDS, "each", "all"),
            "cls where a site has a class token, else mean; raghu: mean-all",
        ),
    ] = ()
    l2: Annotated[
        Sequence[float | str],
        Option(
            "holdout: chosen on 20 % of each class of the training images, from 2^-10 "
            "to 2^19; loo: by exact leave-one-out; grid: report all of these; or a "
            "number, scikit-learn's alpha. Numbers: repeatable.",
            metavar="L2",
            parse=parse_l2,
            default="holdout",
        ),
    ] = ()
    standardise: Annotated[
        bool | None,
        Option(
            "Divide features by their standard deviation over the training images.",
            "--standardise/--no-standardise",
            default="only with big_vision",
        ),
    ] = None


@dataclass(frozen=True)
class ClassOptions:
    """How classes are probed: the protocol, the shots, the solver."""

    preset: Annotated[
        str | None,
        Option(
            "raghu: 10 shots, mean of all tokens, CNNs at the last stage's grid, l2 "
            "held out; big_vision: standardised, constant column of 100, l2 = 2^10, "
            "site pooled. Options given beside it win.",
            choices=PRESETS,
            default="none",
        ),
    ] = None
    match_last_stage: Annotated[
        bool | None,
        Option(
            "CNNs: flatten patches of p x p cells, the largest p with channels x p^2 at "
            "most the last stage's channels, then average to the last stage's grid.",
            "--match-last-stage/--no-match-last-stage",
            default="only with raghu",
        ),
    ] = None
    shots: Annotated[
        Sequence[int],
        Option(
            "Train on K images of each class, small draws within larger ones.",
            metavar="K",
            least=1,
            default="all training images",
        ),
    ] = ()
    seeds: Annotated[
        int | None,
        Option(
            "Draw the shots N times: with --seed, --seed + 1, ...",
            least=1,
            default=str(SEEDS),
        ),
    ] = None
    intercept: Annotated[
        float | str | None,
        Option(
            "free: not penalised; a number: weight of a penalised constant column of "
            "that value.",
            metavar="VALUE",
            parse=parse_intercept,
            default="free; big_vision: 100",
        ),
    ] = None
    solver: Annotated[
        str,
        Option(
            "ridge: closed form, on the CPU in float64; sgd: a linear layer with "
            "cross-entropy.",
            choices=SOLVERS,
        ),
    ] = "ridge"
    batch_norm: Annotated[bool, Option("sgd: batch-normalise the features.")] = False
    epochs: Annotated[
        int | None,
        Option(
            "sgd: passes over the training images.", least=1, default=str(Training.epochs)
        ),
    ] = None
    lr: Annotated[
        float | None,
        Option(
            "sgd: learning rate for 256 images per step, falling to 0 along a cosine.",
            metavar="LR",
            above=0,
            default=str(Training.lr),
        ),
    ] = None
    batch: Annotated[
        int | None, Option("sgd: images a step.", least=2, default=str(Training.batch))
    ] = None
    baselines: Annotated[Sequence[str], RANDOM_BASELINE] = ()
    per_class: Annotated[bool, PER_CLASS] = False

    def refuse_any(self) -> None:
        """Refuse the options that a probe of responses does not have.

        Raises:
            VitseeError: some were given; it names the first.
        """
        options = options_of(type(self))
        for field in fields(self):
            if getattr(self, field.name) == field.default:
                continue
            metadata: Any = options[field.name].metadata
            # A flag such as --standardise/--no-standardise is named by its first half.
            flag = metadata.flag.partition("/")[0]
            if not flag:
                flag = f"--{field.name.replace('_', '-')}"
            raise VitseeError(
                f"{flag} belongs to probes of classes, not to --response; leave it out"
            )

    def sgd_options(self) -> Mapping[str, Any]:
        """Return flag -> value of the options of --solver sgd alone, None if not given."""
        return {
            "--epochs": self.epochs,
            "--lr": self.lr,
            "--batch": self.batch,
            "--batch-norm": self.batch_norm or None,
        }

    def ridge_options(self, features: FeatureOptions) -> Mapping[str, Any]:
        """Return flag -> value of the options of --solver ridge alone, None if not
        given."""
        return {
            "--l2": features.l2 or None,
            "--standardise": features.standardise,
            "--intercept": self.intercept,
            "--preset big_vision": self.preset if self.preset == "big_vision" else None,
        }


@dataclass(frozen=True)
class Settings:
    """Settings of all probes of a run.

    Attributes:
        sites: patterns of site names.
        tokens: words for tokens; () for each site's default.
        shots: numbers of training images per class; () for all images.
        seeds: seed of each draw of training images.
        algebra: treatment of the intercept and of feature scales.
        l2s: values to report; () if `choose` decides.
        choose: "holdout", "loo", or "given" where `l2s` are.
        match_last_stage: convert a CNN's sites to its last stage's grid and channels.
    """

    sites: tuple[str, ...]
    tokens: tuple[str, ...]
    shots: tuple[int, ...]
    seeds: tuple[int, ...]
    algebra: Algebra
    l2s: tuple[float, ...]
    choose: str
    match_last_stage: bool

    def describe(self) -> dict[str, str]:
        """Return how the probes are fitted, in words for a table's notes."""
        features = "centred, not scaled"
        if self.algebra.standardise:
            features = "standardised (std over training images + 1e-5)"
        intercept = "not penalised"
        if self.algebra.constant is not None:
            constant = self.algebra.constant
            intercept = f"weight of a constant column of {constant:g}, penalised"
        return {
            "features": features,
            "intercept": intercept,
            "l2": self._l2_in_words(),
        }

    def _l2_in_words(self) -> str:
        """Return how l2 is chosen, in words."""
        if self.l2s:
            return "given"
        grid = f"of 2^-10 to 2^19 ({len(GRID)} values)"
        if self.choose == "loo":
            return f"{LeaveOneOut.method} {grid}, exact"
        return (
            f"{grid}, by {HELD_OUT:.0%} of each class of the training images, held out "
            f"with the probe's seed: {HeldOut.method}; then fitted to all training "
            f"images; with one image a class: {LeaveOneOut.method}"
        )


def choose_settings(
    classes: ClassOptions, features: FeatureOptions, seed: int
) -> Settings:
    """Return the settings of probes of classes: the user's options, the preset's, the
    defaults.

    Args:
        classes: protocol, shots and solver.
        features: sites, tokens, and the penalty of their weights.
        seed: seed of the first draw.

    Raises:
        VitseeError: an unknown word, or choices that exclude each other.
    """
    preset = classes.preset
    if preset not in (None, *PRESETS):
        raise VitseeError(f"no preset {preset!r}; expected {', '.join(PRESETS)}")
    is_raghu = preset == "raghu"
    is_big_vision = preset == "big_vision"

    sites = tuple(features.sites)
    if not sites:
        sites = ("pooled",) if is_big_vision else ("blocks",)
    tokens = tuple(dict.fromkeys(features.tokens))
    if is_raghu and not tokens:
        tokens = ("mean-all",)
    shots = tuple(sorted(set(classes.shots)))
    if is_raghu and not shots:
        shots = (10,)
    if shots and shots[0] < 1:
        raise VitseeError(f"--shots is {shots[0]}; expected at least 1")
    n_seeds = _number_of_seeds(classes.seeds, shots)
    constant = _intercept_constant(classes.intercept, 100.0 if is_big_vision else FREE)
    standardise = features.standardise
    if standardise is None:
        standardise = is_big_vision
    l2 = features.l2
    if is_big_vision and not l2:
        l2 = (1024.0,)
    l2_choice = choose_l2(l2)
    match_last_stage = classes.match_last_stage
    if match_last_stage is None:
        match_last_stage = is_raghu
    return Settings(
        sites=sites,
        tokens=tokens,
        shots=shots,
        seeds=tuple(range(seed, seed + n_seeds)),
        algebra=Algebra(standardise, constant),
        l2s=l2_choice.l2s,
        choose=l2_choice.method,
        match_last_stage=match_last_stage,
    )


def _number_of_seeds(seeds: int | None, shots: Sequence[int]) -> int:
    """Return the number of draws for each number of shots; 1 without shots."""
    if seeds is not None and not shots:
        raise VitseeError(
            "--seeds counts draws of --shots images per class; give --shots too"
        )
    if seeds is not None and seeds < 1:
        raise VitseeError(f"--seeds is {seeds}; expected at least 1")
    if not shots:
        return 1  # all images: nothing is drawn that a seed could change
    return seeds or SEEDS


def _intercept_constant(
    intercept: float | str | None, default: float | str
) -> float | None:
    """Return the value of the penalised constant column; None for a free intercept.

    Args:
        intercept: `FREE` or a number, None if it was not given.
        default: what the preset has in its place.
    """
    value = default if intercept is None else intercept
    if isinstance(value, str):
        if value != FREE:
            raise VitseeError(f"--intercept is {value!r}; expected {FREE} or a number")
        return None
    if not 0 < float(value) < float("inf"):
        raise VitseeError(f"--intercept is {value}; expected {FREE} or a number above 0")
    return float(value)


class L2Choice(NamedTuple):
    """The l2 values to report, and "given"; or () and the method that chooses one."""

    l2s: tuple[float, ...]
    method: str


def choose_l2(values: Sequence[float | str]) -> L2Choice:
    """Return the meaning of the values of --l2: numbers, `grid`, or one of `CHOOSERS`.

    Raises:
        VitseeError: an unknown word, a method beside other values, or numbers that are not
            above 0.
    """
    words = [value for value in values if isinstance(value, str)]
    unknown = [word for word in words if word not in L2_WORDS]
    if unknown:
        raise VitseeError(
            f"--l2 is {unknown[0]!r}; expected a number, grid, {' or '.join(CHOOSERS)}"
        )
    if not values:
        return L2Choice((), "holdout")
    methods = [word for word in words if word in CHOOSERS]
    if methods and len(values) > 1:
        raise VitseeError(
            f"--l2 {methods[0]} chooses the value; give no other --l2 beside it"
        )
    if methods:
        return L2Choice((), methods[0])
    numbers = {float(value) for value in values if not isinstance(value, str)}
    if numbers and not 0 < min(numbers) <= max(numbers) < float("inf"):
        raise VitseeError("--l2: expected finite numbers above 0")
    if "grid" in words:
        numbers |= set(GRID)
    return L2Choice(tuple(sorted(numbers)), "given")


def choose_training(
    classes: ClassOptions, features: FeatureOptions, device: str
) -> Training | None:
    """Return the settings of SGD on a torch device; None for ridge.

    Raises:
        VitseeError: an unknown solver, or options of the other one.
    """
    solver = classes.solver
    if solver not in SOLVERS:
        raise VitseeError(f"no solver {solver!r}; expected {' or '.join(SOLVERS)}")
    sgd_options = classes.sgd_options()
    if solver == "ridge":
        _refuse_options_of("sgd", sgd_options, solver)
        return None
    _refuse_options_of("ridge", classes.ridge_options(features), solver)
    # The flags are the names of `Training`'s fields.
    fields = {}
    for flag, value in sgd_options.items():
        if value is not None:
            fields[flag.removeprefix("--").replace("-", "_")] = value
    return Training(device=device, **fields)


def _refuse_options_of(
    unused_solver: str, options: Mapping[str, Any], solver: str
) -> None:
    """Refuse options, flag -> value, None if not given, of a solver that is not used."""
    for flag, value in options.items():
        if value is not None:
            raise VitseeError(
                f"{flag} belongs to --solver {unused_solver}, not to {solver}; leave it "
                "out"
            )
