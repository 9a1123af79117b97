"""Findings about what is lost when tokens or heads are replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.study.findings import estimates as of
from vitsee_core.study.findings.finding import Finding

if TYPE_CHECKING:
    from vitsee_core.study.findings.model_tables import ModelTables

SECTION = "Interventions (the class token replaced halfway; single heads at their mean)"
REPLACED = "arXiv 2604.14433 (there: registers of DINOv2, by accuracy)"
LITTLE = 0.01  # of accuracy


def _kl(f: ModelTables, values: str) -> of.Estimate:
    return of.first(f.replaced("vit", values).filter(metric="kl"))


def _median_loss(f: ModelTables) -> of.Estimate:
    gains = f.importance("vit").filter(metric="top1_difference")
    return of.combined(gains, of.EVERY, lambda values: np.median(-values, axis=0))


FINDINGS = (
    Finding(
        "zero-mean",
        "To replace a token by zero costs more than by its mean.",
        REPLACED,
        "KL of the outputs from the whole model's, class token zero at the output of the block "
        "halfway, less the same with its mean over images",
        "nats",
        ("vit",),
        lambda f: _kl(f, "zero") - _kl(f, "mean"),
    ),
    Finding(
        "zero-other",
        "To replace a token by zero costs more than by that of another image.",
        REPLACED,
        "as `zero-mean`, less the same with the class token of another image",
        "nats",
        ("vit",),
        lambda f: _kl(f, "zero") - _kl(f, "shuffle"),
    ),
    Finding(
        "heads-spare",
        "Most heads can be left out one at a time at little cost.",
        "Michel et al. 2019, Sec. 3.2 (there: language, heads at zero)",
        f"{LITTLE:g} less the median over heads of the accuracy that is lost where one head's "
        "output is its mean over images",
        "accuracy",
        ("vit",),
        lambda f: of.below(LITTLE, _median_loss(f)),
    ),
    Finding(
        "heads-far",
        "Within a block, heads that attend farther are needed more.",
        "Of no paper",
        "rank correlation over heads, within blocks, of KL without the head's output with its mean "
        "attention distance",
        "rank correlation",
        ("vit",),
        lambda f: of.first(f.importance("vit").filter(metric="spearman_kl_within")),
    ),
)
