"""Disk space and time of a study, estimated before it begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitsee_core.runtime.machine import human_bytes, may_have_gpu, plural
from vitsee_core.study.catalogue import HALF, WITHIN, SurveyedModel
from vitsee_core.study.recipes import TOKENS, recipe_of
from vitsee_core.study.steps import Plan, Study

# Of what a large matrix product reaches, a network's forward pass with all that is kept of it.
EFFICIENCY = 0.4
BACKWARD = (
    1  # forward passes that a field costs: two, through half of the model on average
)
# Analyses that each cache a Gram matrix of the images for every block, about 4 bytes a pair.
GRAMS = frozenset(("cka", "similarity"))
# Of an analysis, on two cores: its start and its figures, and the tokens that it reads a second.
STEP_SECONDS = 1.5
TOKEN_RATE = 50e6
SPEED_SIDE = 1024  # of the matrix product that is timed


@dataclass(frozen=True)
class Cost:
    """Rough estimates of what a study takes."""

    size_bytes: int  # of all stores, and of what is cached beside them
    seconds: float  # of all passes through models
    analyses: float = 0.0  # seconds of all analyses

    def describe(self, n_models: int, n_images: int) -> str:
        return (
            f"{plural(n_models, 'models')} over {plural(n_images, 'images')}: about "
            f"{human_bytes(self.size_bytes)} on disk, {describe_time(self.seconds)} of extraction "
            f"and {describe_time(self.analyses)} of analyses on this machine"
        )


def describe_time(seconds: float) -> str:
    minutes = seconds / 60
    if minutes < 1:
        return "less than a minute"
    if minutes < 90:
        return f"about {plural(round(minutes), 'minutes')}"
    return f"about {minutes / 60:.1f} hours"


def stores_of(
    study: Study, models: Sequence[SurveyedModel]
) -> tuple[dict[Path, SurveyedModel], dict[Path, int]]:
    """Store -> its model, and its number of images, of a study."""
    places = {
        study.store(m.label, images): (m, images)
        for m in models
        for images in ("", "train")
    }
    return (
        {place: model for place, (model, _) in places.items()},
        {place: study.n_images(images) for place, (_, images) in places.items()},
    )


def cost(
    plan: Plan,
    models: Mapping[Path, SurveyedModel],
    n_images: Mapping[Path, int],
    speed: float,
) -> Cost:
    """The cost of a plan.

    Args:
        plan: its steps.
        models: store that an extraction makes -> its model.
        n_images: store -> how many images it will have.
        speed: floating point operations per second, see `measured_speed`.
    """
    size = seconds = 0.0
    for step in plan.extractions:
        place = step.outputs[0]
        if place not in models:  # a set of images that is written
            continue
        model = models[place]
        words = {*step.words}
        pooled = "pooled" in words
        more = bool({*WITHIN} & words)
        one = model.bytes_pooled if pooled else model.bytes_of_tokens
        one += 3 * model.size[1] * model.size[2] if "--inputs" in words else 0
        one += model.more_bytes if more and not pooled else 0
        cached = {s.command for s in plan.analyses if place in s.inputs} & GRAMS
        size += (
            one * n_images[place]
            + len(cached) * (model.n_blocks + 1) * 4 * n_images[place] ** 2
        )
        passes = float(n_images[place])
        if "--erf" in words:
            n_sites = model.n_fields + (model.more_fields if more else 0)
            n_fields = step.words[step.words.index("--erf") + 1]
            passes += BACKWARD * (int(n_fields) if n_fields.isdecimal() else 0) * n_sites
        seconds += passes * model.flops / (EFFICIENCY * speed)
    analyses = 0.0
    for step in plan.analyses:
        read = [
            (models[p].bytes_of_tokens / HALF, n_images[p])
            for p in step.inputs
            if p in models
        ]
        analyses += STEP_SECONDS
        if TOKENS in recipe_of(step.command).contents:
            analyses += sum(HALF * values * n for values, n in read) / TOKEN_RATE
        if step.command in GRAMS:
            analyses += sum(values * n**2 for values, n in read) / (EFFICIENCY * speed)
    return Cost(int(size), seconds, analyses)


def measured_speed(device: str = "auto") -> float:
    """Floating point operations per second of float32 matrix products, timed for a moment. Raises
    VitseeError: there is no such device."""
    if device == "cpu" or (
        device == "auto" and not may_have_gpu()
    ):  # torch takes seconds to load
        a = np.ones((SPEED_SIDE, SPEED_SIDE), np.float32)
        return _speed(lambda: a @ a)
    import torch

    from vitsee_core.runtime.device import resolve_device

    there = torch.ones(SPEED_SIDE, SPEED_SIDE, device=resolve_device(device))
    return _speed(lambda: (there @ there)[0, 0].item())


def _speed(product: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - start)
    return 2 * SPEED_SIDE**3 / best
