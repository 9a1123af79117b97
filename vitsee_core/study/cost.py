"""What a study takes of a disk and of time, before it begins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from vitsee_core.machine import counted, human_bytes
from vitsee_core.study.steps import Plan, Study
from vitsee_core.study.surveyed import SurveyedModel

# Of what a large matrix product reaches, a network's forward pass with all that is kept of it.
EFFICIENCY = 0.4
BACKWARD = 1  # forward passes that a field costs: two, through half of the model on average
# Analyses that each cache a Gram matrix of the images for every block, about 4 bytes a pair.
GRAMS = frozenset(("cka", "similarity"))
SPEED_SIDE = 1024  # of the matrix product that is timed


@dataclass(frozen=True)
class Cost:
    """size_bytes: of all stores, and of what is cached beside them. seconds: of all passes through
    models. Both are about right, no more."""

    size_bytes: int
    seconds: float

    def describe(self, n_models: int, n_images: int) -> str:
        """In words."""
        minutes = self.seconds / 60
        if minutes < 1:
            took = "less than a minute"
        elif minutes < 90:
            took = f"about {counted(round(minutes), 'minutes')}"
        else:
            took = f"about {minutes / 60:.1f} hours"
        return (
            f"{counted(n_models, 'models')} over {counted(n_images, 'images')}: about "
            f"{human_bytes(self.size_bytes)} on disk, {took} of extraction on this machine; "
            "analyses come on top"
        )


def cost(study: Study, plan: Plan, models: Sequence[SurveyedModel], speed: float) -> Cost:
    """What the extractions of a plan take.

    Args:
        study: what is asked for.
        plan: its steps.
        models: its models.
        speed: floating point operations a second, see `measured_speed`.
    """
    known = {model.name: model for model in models}
    cached = GRAMS & {step.command for step in plan.analyses}
    size = seconds = 0.0
    for step in plan.extractions:
        model = known[step.words[1]]
        pooled = "pooled" in step.words
        pixels = 3 * model.size[1] * model.size[2] if "--inputs" in step.words else 0
        one = (model.bytes_pooled if pooled else model.bytes_of_tokens) + pixels
        own = step.outputs[0] == study.store(model.label)
        n_images = study.n_images("" if own else "train")
        size += one * n_images
        if own:
            size += len(cached) * (model.n_blocks + 1) * 4 * n_images**2
        passes = float(n_images)
        if "--erf" in step.words:
            n_fields = int(step.words[step.words.index("--erf") + 1])
            passes += BACKWARD * n_fields * model.n_blocks
        seconds += passes * model.flops / (EFFICIENCY * speed)
    return Cost(int(size), seconds)


def measured_speed(device: str = "auto") -> float:
    """Floating point operations a second of single-precision matrix products, timed for a moment.

    Raises:
        VitseeError: there is no such device.
    """
    import torch

    from vitsee_core.device import resolve_device

    place = resolve_device(device)
    a = torch.ones(SPEED_SIDE, SPEED_SIDE, device=place)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * SPEED_SIDE**3 / best
