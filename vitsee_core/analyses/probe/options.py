"""The options of `vitsee probe`, in groups that are handed on as one object each.

Callers give every option by its own name. `SplitOptions` and `FeatureOptions` are for all probes,
`ClassOptions` only for probes of classes, `ResponseOptions` only for probes of responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from vitsee_core.analyses.probe import responses
from vitsee_core.analyses.probe.settings import (
    PRESETS,
    SEEDS,
    SOLVERS,
    Training,
    parse_intercept,
    parse_l2,
)
from vitsee_core.runtime.options import Option, sites_option, tokens_option
from vitsee_core.runtime.parameters import options_of
from vitsee_core.truth.labels.labelled_rows import (
    ALLOW_SHARED,
    PER_CLASS,
    RANDOM_BASELINE,
    TRAIN_IMAGES,
)
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError
from vitsee_stores.selectors import VECTOR_WORDS


@dataclass(frozen=True)
class SplitOptions:
    """Which images train, which test, and whether some may do both."""

    test_split: Annotated[
        str | None,
        Option(
            "Without TEST: test on images of this split of the data, train on all others.",
            metavar="NAME",
            default="none",
        ),
    ] = None
    holdout: Annotated[
        float | None,
        Option(
            "Without TEST: test on this share of each class, e.g. 0.2.",
            metavar="SHARE",
            above=0,
            below=1,
            default="none",
        ),
    ] = None
    train_images: Annotated[int | None, TRAIN_IMAGES] = None
    allow_shared: Annotated[bool, ALLOW_SHARED] = False


@dataclass(frozen=True)
class ResponseOptions:
    """The responses that are predicted in place of classes, and how predictions are tested."""

    response: Annotated[Path | None, responses.RESPONSE] = None
    response_ids: Annotated[Path | None, responses.RESPONSE_IDS] = None
    folds: Annotated[int | None, responses.FOLDS] = None
    by_column: Annotated[bool, responses.BY_COLUMN] = False


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
            "holdout: chosen on 20 % of each class of the training images, from 2^-10 to 2^19; "
            "loo: by exact leave-one-out; grid: report all of these; or a number, scikit-learn's "
            "alpha. Numbers: repeatable.",
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
            "raghu: 10 shots, mean of all tokens, CNNs at the last stage's grid, l2 held out; "
            "big_vision: standardised, constant column of 100, l2 = 2^10, site pooled. Options "
            "given beside it win.",
            choices=PRESETS,
            default="none",
        ),
    ] = None
    match_last_stage: Annotated[
        bool | None,
        Option(
            "CNNs: flatten patches of p x p cells, the largest p with channels x p^2 at most the "
            "last stage's channels, then average to the last stage's grid.",
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
            "free: not penalised; a number: weight of a penalised constant column of that value.",
            metavar="VALUE",
            parse=parse_intercept,
            default="free; big_vision: 100",
        ),
    ] = None
    solver: Annotated[
        str,
        Option(
            "ridge: closed form, on the CPU in float64; sgd: a linear layer with cross-entropy.",
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
        """Return flag -> value of the options of --solver ridge alone, None if not given."""
        return {
            "--l2": features.l2 or None,
            "--standardise": features.standardise,
            "--intercept": self.intercept,
            "--preset big_vision": self.preset if self.preset == "big_vision" else None,
        }


class ProbedStores(NamedTuple):
    """The stores of a probe.

    Attributes:
        train: store whose images train.
        tests: stores whose images test; without any, a part of `train` tests.
        split: which part that is.
    """

    train: Store
    tests: tuple[Store, ...]
    split: SplitOptions

    @property
    def all(self) -> tuple[Store, ...]:
        """The training store, then the test stores."""
        return (self.train, *self.tests)

    @property
    def n_ways(self) -> int:
        """How many of TEST, --test-split and --holdout were given."""
        has_tests = len(self.tests) > 0
        has_split = self.split.test_split is not None
        has_holdout = self.split.holdout is not None
        return has_tests + has_split + has_holdout
