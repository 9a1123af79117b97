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

# The share of a large matrix product's speed that a forward pass reaches while its sites are kept.
EFFICIENCY = 0.4
# Forward passes that a receptive field costs: a backward pass takes two, and goes through half of
# the model on average.
BACKWARD = 1
# Analyses that each cache a Gram matrix of the images for every block, about 4 bytes a pair.
GRAMS = frozenset(("cka", "similarity"))
# Measured on two cores: an analysis' start and figures, and the bytes of tokens that it reads a
# second.
STEP_SECONDS = 1.5
TOKEN_RATE = 50e6
# Rows and columns of the matrices whose product is timed: large enough to reach full speed, small
# enough to take milliseconds.
SPEED_SIDE = 1024


@dataclass(frozen=True)
class Cost:
    """Rough estimates of what a study takes.

    Attributes:
        size_bytes: of all stores, and of the Gram matrices that are cached beside them.
        seconds: of all passes through models.
        analyses: seconds of all analyses.
    """

    size_bytes: int
    seconds: float
    analyses: float = 0.0

    def describe(self, n_models: int, n_images: int) -> str:
        """Return the estimates as a line for the log."""
        return (
            f"{plural(n_models, 'models')} over {plural(n_images, 'images')}: about "
            f"{human_bytes(self.size_bytes)} on disk, {describe_time(self.seconds)} of "
            f"extraction and {describe_time(self.analyses)} of analyses on this machine"
        )


def describe_time(seconds: float) -> str:
    """Return a duration in words, as precise as an estimate is."""
    minutes = seconds / 60
    if minutes < 1:
        return "less than a minute"
    if minutes < 90:
        return f"about {plural(round(minutes), 'minutes')}"
    return f"about {minutes / 60:.1f} hours"


def stores_of(
    study: Study, models: Sequence[SurveyedModel]
) -> tuple[dict[Path, SurveyedModel], dict[Path, int]]:
    """Return the model and the number of images of each store that a study can make.

    Returns:
        store -> its model; store -> its number of images.
    """
    model_of_store = {}
    n_images_of_store = {}
    for model in models:
        store = study.store(model.label)
        model_of_store[store] = model
        n_images_of_store[store] = study.n_images()
        train_store = study.store(model.label, "train")
        model_of_store[train_store] = model
        n_images_of_store[train_store] = study.n_images("train")
    return model_of_store, n_images_of_store


def cost(
    plan: Plan,
    models: Mapping[Path, SurveyedModel],
    n_images: Mapping[Path, int],
    speed: float,
) -> Cost:
    """Estimate the cost of a plan.

    Args:
        plan: its steps.
        models: store that an extraction makes -> its model.
        n_images: store -> how many images it will have.
        speed: floating point operations per second, as `measured_speed` returns them.
    """
    size_bytes = 0.0
    extraction_seconds = 0.0
    for step in plan.extractions:
        store = step.outputs[0]
        # The step may write a bundled set of images in place of a store.
        if store not in models:
            continue
        model = models[store]
        words = {*step.words}
        is_pooled = "pooled" in words
        has_more_sites = not words.isdisjoint(WITHIN)
        bytes_per_image = model.bytes_pooled if is_pooled else model.bytes_of_tokens
        if "--inputs" in words:
            # Pixels are kept as the model sees them, a byte for each of three colours.
            bytes_per_image += 3 * model.size[1] * model.size[2]
        if has_more_sites and not is_pooled:
            bytes_per_image += model.more_bytes
        grams = {s.command for s in plan.analyses if store in s.inputs} & GRAMS
        gram_bytes = len(grams) * (model.n_blocks + 1) * 4 * n_images[store] ** 2
        size_bytes += bytes_per_image * n_images[store] + gram_bytes
        passes = float(n_images[store])
        if "--erf" in words:
            # A backward pass for each image and each site that lies on the image.
            n_sites = model.n_fields + (model.more_fields if has_more_sites else 0)
            n_field_images = step.words[step.words.index("--erf") + 1]
            # A number that the user mistyped is refused by extract, not here.
            if n_field_images.isdecimal():
                passes += BACKWARD * int(n_field_images) * n_sites
        extraction_seconds += passes * model.flops / (EFFICIENCY * speed)
    analysis_seconds = 0.0
    for step in plan.analyses:
        # Values of an image's tokens, and the number of images, of each store that is read.
        sizes = [
            (models[path].bytes_of_tokens / HALF, n_images[path])
            for path in step.inputs
            if path in models
        ]
        analysis_seconds += STEP_SECONDS
        if TOKENS in recipe_of(step.command).contents:
            n_bytes = sum(HALF * n_values * n for n_values, n in sizes)
            analysis_seconds += n_bytes / TOKEN_RATE
        if step.command in GRAMS:
            # Half of 2 n^2 values operations: a Gram matrix is symmetric.
            flops = sum(n_values * n**2 for n_values, n in sizes)
            analysis_seconds += flops / (EFFICIENCY * speed)
    return Cost(int(size_bytes), extraction_seconds, analysis_seconds)


def measured_speed(device: str = "auto") -> float:
    """Return the floating point operations per second of float32 matrix products, timed for a
    moment.

    Raises:
        VitseeError: there is no such device.
    """
    # NumPy for the CPU: torch takes seconds to load.
    if device == "cpu" or (device == "auto" and not may_have_gpu()):
        matrix = np.ones((SPEED_SIDE, SPEED_SIDE), np.float32)
        return _time_product(lambda: matrix @ matrix)
    import torch

    from vitsee_core.runtime.device import resolve_device

    on_device = torch.ones(SPEED_SIDE, SPEED_SIDE, device=resolve_device(device))
    # `item` waits for the device, which works on its own time.
    return _time_product(lambda: (on_device @ on_device)[0, 0].item())


def _time_product(product: Callable[[], object]) -> float:
    """Return the speed of a product of two square matrices, in operations per second."""
    seconds = float("inf")
    # The best of three: the first call also starts threads and kernels.
    for _ in range(3):
        start = time.perf_counter()
        product()
        seconds = min(seconds, time.perf_counter() - start)
    return 2 * SPEED_SIDE**3 / seconds
