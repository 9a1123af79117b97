"""The findings of the papers, in the order of the page, each a number above 0 if it holds.

Those about the layers of trained models are in `layer_findings`; here are those about training and
interventions. The same holds for them: which half of the layers is meant was chosen from the
papers' text, not from the numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.study.findings import estimates
from vitsee_core.study.findings.estimates import Estimate
from vitsee_core.study.findings.finding import Finding
from vitsee_core.study.findings.layer_findings import (
    ATTENTION,
    ATTENTION_FINDINGS,
    SIMILARITY,
    SIMILARITY_FINDINGS,
    SKIP_FINDINGS,
    SKIPS,
)

if TYPE_CHECKING:
    from vitsee_core.study.findings.model_tables import ModelTables


# ------------------------------------------------------------ training

TRAINING = "Training data, tasks and supervision (Raghu et al. 2021; Walmer et al. 2023)"


def _data_contrast(tables: ModelTables) -> Estimate:
    """Return `more-data` of less data, less that of another seed on the same data."""
    pairs = "same-depth"
    fewer = estimates.lower_less_upper(tables.cka("vit", "vit-10pct", pairs))
    return fewer - estimates.lower_less_upper(tables.cka("vit", "vit-seed1", pairs))


_TRAINING = (
    Finding(
        name="more-data",
        claim="With a tenth of the data the lower layers differ less than the upper ones.",
        source="Raghu et al. 2021, Sec. 8, Fig. 12",
        statistic=(
            "CKA of the same blocks of vit and vit-10pct, mean of the lower less the "
            "upper half (vit and vit-10pct began with the same weights, vit-seed1 with "
            "others)"
        ),
        unit="CKA",
        models=("vit", "vit-10pct"),
        measure=lambda tables: estimates.lower_less_upper(
            tables.cka("vit", "vit-10pct", "same-depth")
        ),
    ),
    Finding(
        name="more-data-seed",
        claim="More so than another seed on the same data does.",
        source="A control of Raghu et al. 2021, Fig. 12, not in the paper",
        statistic="as `more-data`, less the same of vit and vit-seed1",
        unit="CKA",
        models=("vit", "vit-10pct", "vit-seed1"),
        measure=_data_contrast,
    ),
    Finding(
        name="alike-supervision",
        claim="Like supervision makes like class tokens in the last layer.",
        source="Walmer et al. 2023, Sec. 5.1, Fig. 6 left",
        statistic=(
            "CKA of the class tokens of the last block of vit and vit-seed1, both "
            "trained with labels, less that of vit and vit-masked"
        ),
        unit="CKA",
        models=("vit", "vit-seed1", "vit-masked"),
        measure=lambda tables: (
            tables.last_cls("vit", "vit-seed1") - tables.last_cls("vit", "vit-masked")
        ),
    ),
    Finding(
        name="best-classes",
        claim="For classes the last layer is best.",
        source="Walmer et al. 2023, Sec. 6.3, Table 1 (FS)",
        statistic="k-NN top-1 of the last block less that of the best other block",
        unit="accuracy",
        models=("vit",),
        measure=lambda tables: estimates.last_less_best(tables.neighbours("vit")),
    ),
    Finding(
        name="best-keypoints",
        claim="For keypoints a layer before the last is best.",
        source="Walmer et al. 2023, Sec. 6.2, 6.3, Table 1 (FS)",
        statistic=(
            "PCK at 0.1 of the middle block less that of the last, on the bundled "
            "miniature of SPair-71k"
        ),
        unit="share of keypoints",
        models=("vit",),
        measure=lambda tables: (
            estimates.at_depth(tables.keypoints("vit"), 0.5)
            - estimates.at_depth(tables.keypoints("vit"), 1)
        ),
    ),
    Finding(
        name="best-supervision",
        claim="By reconstruction the last layer is worse for classes than with labels.",
        source="Walmer et al. 2023, Sec. 6.3, Table 1 (FS, MAE)",
        statistic="k-NN top-1 of the last block, vit less vit-masked",
        unit="accuracy",
        models=("vit", "vit-masked"),
        measure=lambda tables: (
            estimates.at_depth(tables.neighbours("vit"), 1)
            - estimates.at_depth(tables.neighbours("vit-masked"), 1)
        ),
    ),
)


# ------------------------------------------------------------ interventions

INTERVENTIONS = (
    "Interventions (the class token replaced halfway; single heads at their mean)"
)
REPLACED = "arXiv 2604.14433 (there: registers of DINOv2, by accuracy)"
LITTLE = 0.01  # of accuracy


def _kl(tables: ModelTables, values: str) -> Estimate:
    """Return the KL of the outputs with the class token replaced by "zero", "mean" or "shuffle"."""
    return estimates.first(tables.replaced("vit", values).filter(metric="kl"))


def _median_loss(tables: ModelTables) -> Estimate:
    """Return the median over heads of the accuracy that is lost without a head's output."""
    gains = tables.importance("vit").filter(metric="top1_difference")
    return estimates.combined(
        gains, estimates.ALL_ROWS, lambda values: np.median(-values, axis=0)
    )


_INTERVENTIONS = (
    Finding(
        name="zero-mean",
        claim="To replace a token by zero costs more than by its mean.",
        source=REPLACED,
        statistic=(
            "KL of the outputs from the whole model's, class token zero at the output "
            "of the block halfway, less the same with its mean over images"
        ),
        unit="nats",
        models=("vit",),
        measure=lambda tables: _kl(tables, "zero") - _kl(tables, "mean"),
    ),
    Finding(
        name="zero-other",
        claim="To replace a token by zero costs more than by that of another image.",
        source=REPLACED,
        statistic="as `zero-mean`, less the same with the class token of another image",
        unit="nats",
        models=("vit",),
        measure=lambda tables: _kl(tables, "zero") - _kl(tables, "shuffle"),
    ),
    Finding(
        name="heads-spare",
        claim="Most heads can be left out one at a time at little cost.",
        source="Michel et al. 2019, Sec. 3.2 (there: language, heads at zero)",
        statistic=(
            f"{LITTLE:g} less the median over heads of the accuracy that is lost where "
            "one head's output is its mean over images"
        ),
        unit="accuracy",
        models=("vit",),
        measure=lambda tables: estimates.below(LITTLE, _median_loss(tables)),
    ),
    Finding(
        name="heads-far",
        claim="Within a block, heads that attend farther are needed more.",
        source="Of no paper",
        statistic=(
            "rank correlation over heads, within blocks, of KL without the head's "
            "output with its mean attention distance"
        ),
        unit="rank correlation",
        models=("vit",),
        measure=lambda tables: estimates.first(
            tables.importance("vit").filter(metric="spearman_kl_within")
        ),
    ),
)


# The sections of the page, in its order.
SECTIONS = {
    SIMILARITY: SIMILARITY_FINDINGS,
    ATTENTION: ATTENTION_FINDINGS,
    SKIPS: SKIP_FINDINGS,
    TRAINING: _TRAINING,
    INTERVENTIONS: _INTERVENTIONS,
}
FINDINGS = tuple(
    replace(finding, section=section)
    for section, findings in SECTIONS.items()
    for finding in findings
)
