"""Probe settings: user options, with defaults from published protocols.

`raghu`: Raghu et al. 2021, appendix A: 10 images per class, the mean of all tokens, l2 tuned on a
held-out part of the training images; CNNs converted to the last stage's grid and channels. They
follow Dosovitskiy et al. 2021 and say nothing of scaling: features are centred, the intercept is
not penalised. Seeds and the held-out share are not given.

`big_vision`: the few-shot evaluation of Dosovitskiy et al. 2021 in its published code
(google-research/big_vision, evaluators/fewshot_lsr.py): standardised features, a constant column of
100, l2 = 2^10, the pooled vector. With shots 1, 5, 10, 25 and seeds 0 to 2 it is that protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vitsee_core.analyses.probe.draws import HELD_OUT
from vitsee_core.analyses.probe.sgd import Training
from vitsee_core.kernels.l2_choice import GRID, HeldOut, LeaveOneOut
from vitsee_core.kernels.ridge import Algebra
from vitsee_core.labels.labelled_rows import word_or_number
from vitsee_stores.errors import VitseeError

PRESETS = ("raghu", "big_vision")
SEEDS = 3
CHOOSERS = ("holdout", "loo")
FREE = "free"
SOLVERS = ("ridge", "sgd")


WORDS = (*CHOOSERS, "grid")
parse_l2 = partial(
    word_or_number, words=WORDS, expected=f"a number above 0, {', '.join(WORDS)}"
)  # of --l2
parse_intercept = partial(
    word_or_number, words=(FREE,), expected=f"{FREE} or a number above 0, e.g. 100"
)


@dataclass(frozen=True)
class Settings:
    """Settings of all probes."""

    sites: tuple[str, ...]
    tokens: tuple[str, ...]  # () for each site's default
    shots: tuple[int, ...]  # () for all images
    seeds: tuple[int, ...]
    algebra: Algebra
    l2s: tuple[float, ...]  # values to report; () if `choose` decides
    choose: str
    match_last_stage: bool

    def describe(self) -> dict[str, str]:
        algebra = self.algebra
        features = "standardised (std over training images + 1e-5)" if algebra.standardise else ""
        intercept = "not penalised"
        if algebra.constant is not None:
            intercept = f"weight of a constant column of {algebra.constant:g}, penalised"
        return {
            "features": features or "centred, not scaled",
            "intercept": intercept,
            "l2": self._l2_in_words(),
        }

    def _l2_in_words(self) -> str:
        if self.l2s:
            return "given"
        grid = f"of 2^-10 to 2^19 ({len(GRID)} values)"
        if self.choose == "loo":
            return f"{LeaveOneOut.method} {grid}, exact"
        return (
            f"{grid}, by {HELD_OUT:.0%} of each class of the training images, held out with the "
            f"probe's seed: {HeldOut.method}; then fitted to all training images; with one image "
            f"a class: {LeaveOneOut.method}"
        )


def choose_settings(
    preset: str | None = None,
    *,
    sites: Sequence[str] = (),
    tokens: Sequence[str] = (),
    shots: Sequence[int] = (),
    seeds: int | None = None,
    seed: int = 0,
    l2: Sequence[float | str] = (),
    standardise: bool | None = None,
    intercept: float | str | None = None,
    match_last_stage: bool | None = None,
) -> Settings:
    """The user's options, else the preset's, else the defaults.

    Args:
        tokens: () for each site's default.
        seeds: number of draws.
        seed: of the first draw.
        l2: numbers and `grid`, or one of `CHOOSERS`.
        intercept: `free`, or the value of a penalised constant column.
        match_last_stage: see `features.last_stage`.

    Raises:
        VitseeError: an unknown word, or choices that exclude each other.
    """
    if preset not in (None, *PRESETS):
        raise VitseeError(f"no preset {preset!r}; expected {', '.join(PRESETS)}")
    raghu, big_vision = preset == "raghu", preset == "big_vision"
    shots = tuple(sorted(set(shots))) or ((10,) if raghu else ())
    if shots and shots[0] < 1:
        raise VitseeError(f"--shots is {shots[0]}; expected at least 1")
    if seeds is not None and not shots:
        raise VitseeError("--seeds counts draws of --shots images per class; give --shots too")
    if seeds is not None and seeds < 1:
        raise VitseeError(f"--seeds is {seeds}; expected at least 1")
    first = seed + (seeds or SEEDS if shots else 1)
    if intercept is None:
        intercept = 100.0 if big_vision else FREE
    if isinstance(intercept, str) and intercept != FREE:
        raise VitseeError(f"--intercept is {intercept!r}; expected {FREE} or a number")
    if not isinstance(intercept, str) and not 0 < intercept < float("inf"):
        raise VitseeError(f"--intercept is {intercept}; expected {FREE} or a number above 0")
    l2s, choose = _parse_l2(l2 or ((1024.0,) if big_vision else ()))
    return Settings(
        tuple(sites) or (("pooled",) if big_vision else ("blocks",)),
        tuple(dict.fromkeys(tokens)) or (("mean-all",) if raghu else ()),
        shots,
        tuple(range(seed, first)),
        Algebra(
            big_vision if standardise is None else standardise,
            None if isinstance(intercept, str) else float(intercept),
        ),
        l2s,
        choose,
        raghu if match_last_stage is None else match_last_stage,
    )


def _parse_l2(values: Sequence[float | str]) -> tuple[tuple[float, ...], str]:
    words = [value for value in values if isinstance(value, str)]
    choosers = [word for word in words if word in CHOOSERS]
    if unknown := [word for word in words if word not in WORDS]:
        raise VitseeError(
            f"--l2 is {unknown[0]!r}; expected a number, grid, {' or '.join(CHOOSERS)}"
        )
    if choosers and len(values) > 1:
        raise VitseeError(f"--l2 {choosers[0]} chooses the value; give no other --l2 beside it")
    if choosers or not values:
        return (), choosers[0] if choosers else "holdout"
    numbers = {float(value) for value in values if not isinstance(value, str)}
    if numbers and not 0 < min(numbers) <= max(numbers) < float("inf"):
        raise VitseeError("--l2: expected finite numbers above 0")
    return tuple(sorted(numbers | set(GRID if "grid" in words else ()))), "given"


def choose_training(
    solver: str, device: str, *, sgd: Mapping[str, Any], ridge: Mapping[str, Any]
) -> Training | None:
    """Settings of SGD; None for ridge. sgd, ridge: the options of either alone by name, None if not
    given; those of SGD are `Training`'s fields.

    Raises:
        VitseeError: an unknown solver, or options of the other one.
    """
    if solver not in SOLVERS:
        raise VitseeError(f"no solver {solver!r}; expected {' or '.join(SOLVERS)}")
    other, others = ("ridge", ridge) if solver == "sgd" else ("sgd", sgd)
    if wrong := [name for name, value in others.items() if value is not None]:
        raise VitseeError(f"{wrong[0]} belongs to --solver {other}, not to {solver}; leave it out")
    if solver == "ridge":
        return None
    given = {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in sgd.items()
        if value is not None
    }
    return Training(device=device, **given)
