"""The findings of the papers, each as a number above 0 if it holds.

Which third, half or quarter of the layers is meant, and which models are compared, is defined here
and was chosen from the papers' text and not from the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.study.findings import estimates as of
from vitsee_core.study.findings.estimates import Estimate
from vitsee_core.types import pl

if TYPE_CHECKING:
    from vitsee_core.study.findings.model_tables import ModelTables

DEPENDS = "depends on the seed"


@dataclass(frozen=True)
class Finding:
    """A claim of a paper about layers or heads, and the number that tests it.

    Attributes:
        name: the finding's name in tables.
        claim: what the papers say, in a sentence.
        source: the paper, and the section or figure.
        statistic: what is computed, in words.
        unit: unit of the statistic.
        models: the models that are compared (`vit`, `resnet`, `vit-gap`, ...).
        measure: computes the statistic from the models' tables; above 0 where the claim holds.
        section: heading on the page.
    """

    name: str
    claim: str
    source: str
    statistic: str
    unit: str
    models: tuple[str, ...]
    measure: Callable[[ModelTables], Estimate]
    section: str = ""

    def row(
        self, estimate: Estimate | None, second_seed: Estimate | None = None
    ) -> dict[str, Any]:
        """Return the finding's row in a table, column -> value.

        Args:
            estimate: the measured number; None if it could not be measured.
            second_seed: the number with models of another seed; the verdict then depends on the
                seed unless both agree.
        """
        row: dict[str, Any] = {
            "section": self.section,
            "name": self.name,
            "claim": self.claim,
            "source": self.source,
            "statistic": self.statistic,
            "unit": self.unit,
            "models": " ".join(self.models),
        }
        if estimate is None:
            row["verdict"] = "not trained"
            return row
        verdicts = {self._add_numbers(row, estimate, "")}
        if second_seed is not None:
            verdicts.add(self._add_numbers(row, second_seed, "_seed1"))
        row["n_blocks"] = len(estimate.without)
        row["verdict"] = verdicts.pop() if len(verdicts) == 1 else DEPENDS
        return row

    @staticmethod
    def _add_numbers(row: dict[str, Any], estimate: Estimate, suffix: str) -> str:
        """Add an estimate's columns, named with a suffix, to a row; return its verdict."""
        std, low, high = estimate.interval()
        row[f"value{suffix}"] = estimate.value
        row[f"std{suffix}"] = std
        row[f"low{suffix}"] = low
        row[f"high{suffix}"] = high
        return verdict(low, high)


def verdict(low: float, high: float) -> str:
    """Return the verdict on a number that should be above 0, from its interval.

    "holds" if all of the interval is above 0, "does not hold" if all is below, else "undecided".
    """
    if low > 0:
        return "holds"
    if high < 0:
        return "does not hold"
    return "undecided"


# ------------------------------------------------------------------------------ similarity

SIMILARITY = "Similarity of layers and models (Raghu et al. 2021)"


def _mixer(f: ModelTables) -> of.Estimate:
    to_vit = f.cka("mixer", "vit")
    to_cnn = f.cka("mixer", "resnet")
    there = pl.col("value").is_not_null()
    return of.mean(to_vit, there) - of.mean(to_cnn, there)


_SIMILARITY = (
    Finding(
        name="uniform",
        claim="A ViT's lower and higher layers are more alike than a ResNet's.",
        source="Raghu et al. 2021, Sec. 4, Fig. 1",
        statistic=(
            "mean CKA between layers of the lowest and of the highest third of the depth (block "
            "outputs, norms, hidden layers), ViT less ResNet"
        ),
        unit="CKA",
        models=("vit", "resnet"),
        measure=lambda f: of.ends(f.cka("vit")) - of.ends(f.cka("resnet")),
    ),
    Finding(
        name="uniform-gap",
        claim="The same of a ViT trained with global average pooling.",
        source="Raghu et al. 2021, Sec. 4, Fig. 1 (there: with a class token)",
        statistic="as `uniform`, of vit-gap less ResNet",
        unit="CKA",
        models=("vit-gap", "resnet"),
        measure=lambda f: of.ends(f.cka("vit-gap")) - of.ends(f.cka("resnet")),
    ),
    Finding(
        name="lower-half",
        claim="The ResNet's lower half resembles the ViT's first quarter more than its second.",
        source="Raghu et al. 2021, Sec. 4, Figs. 2, B.1",
        statistic=(
            "ResNet layers in the second quarter of the depth: mean CKA with the ViT's first "
            "quarter less that with its second"
        ),
        unit="CKA",
        models=("vit", "resnet"),
        measure=lambda f: of.second_quarter(f.cka("vit", "resnet")),
    ),
    Finding(
        name="final-third",
        claim=(
            "The ViT's final third is less similar to all ResNet layers than its other layers "
            "are."
        ),
        source="Raghu et al. 2021, Sec. 4, Fig. 2",
        statistic=(
            "mean CKA of all ResNet layers with the ViT's lower two thirds less that with its "
            "last"
        ),
        unit="CKA",
        models=("vit", "resnet"),
        measure=lambda f: of.final_third(f.cka("vit", "resnet")),
    ),
    Finding(
        name="mixer",
        claim="An MLP-Mixer resembles a ViT more than a ResNet.",
        source="Raghu et al. 2021, App. H, Fig. H.2",
        statistic=(
            "mean CKA of all layers of the mixer with all of the ViT less that with all of the "
            "ResNet"
        ),
        unit="CKA",
        models=("mixer", "vit", "resnet"),
        measure=_mixer,
    ),
)


# ------------------------------------------------------------------------------ attention

ATTENTION = "Attention (Raghu et al. 2021; Dosovitskiy et al. 2021; Walmer et al. 2023)"


def _repetition(f: ModelTables, model: str) -> of.Estimate:
    return of.rise(f.heads(model).filter(metric="query_repetition"))


_ATTENTION = (
    Finding(
        name="local-heads",
        claim="The lowest layers have local heads.",
        source="Raghu et al. 2021, Sec. 5, Fig. 3; Dosovitskiy et al. 2021, Fig. 7 right",
        statistic=(
            "half of uniform attention's distance less the distance of the most local head of the"
            " two lowest blocks"
        ),
        unit="of uniform attention's distance",
        models=("vit",),
        measure=lambda f: of.below(0.5, of.nearest_head(f.distances("vit"))),
    ),
    Finding(
        name="local-and-global",
        claim="The lowest layers mix nearer and farther heads more than the highest do.",
        source="Raghu et al. 2021, Sec. 5, Fig. 3",
        statistic=(
            "farthest less nearest head of the two lowest blocks, less the same of the two "
            "highest"
        ),
        unit="of uniform attention's distance",
        models=("vit",),
        measure=lambda f: of.head_range(f.distances("vit")),
    ),
    Finding(
        name="upper-global",
        claim="The most local heads are in the lowest layers, not in the highest.",
        source="Raghu et al. 2021, Sec. 5, Fig. 3",
        statistic="the most local head of the two highest blocks less that of the two lowest",
        unit="of uniform attention's distance",
        models=("vit",),
        measure=lambda f: of.upper_is_global(f.distances("vit")),
    ),
    Finding(
        name="distance-rises",
        claim="Attention distance increases with depth.",
        source="Dosovitskiy et al. 2021, Sec. 4.5, App. D.6, Figs. 7 right, 10",
        statistic=(
            "mean distance of all heads of the upper half of the blocks less the lower half's"
        ),
        unit="of uniform attention's distance",
        models=("vit",),
        measure=lambda f: of.rise(f.distances("vit")),
    ),
    Finding(
        name="little-data",
        claim="With less training data the lower layers do not learn to attend locally.",
        source="Raghu et al. 2021, Sec. 5, Fig. 4",
        statistic=(
            "the most local head of the two lowest blocks, trained on a tenth less trained on all"
        ),
        unit="of uniform attention's distance",
        models=("vit-10pct", "vit"),
        measure=lambda f: (
            of.nearest_head(f.distances("vit-10pct"))
            - of.nearest_head(f.distances("vit"))
        ),
    ),
    Finding(
        name="local-heads-cnn",
        claim="The lower ResNet layers resemble the local heads of the first block most.",
        source="Raghu et al. 2021, Sec. 5, Fig. 5",
        statistic=(
            "mean CKA with the ResNet's lower blocks, of the most local group of heads less the "
            "most global"
        ),
        unit="CKA",
        models=("vit", "resnet"),
        measure=lambda f: of.local_less_global(f.cnn_like("vit", "resnet")),
    ),
    Finding(
        name="offset-heads",
        claim=(
            "There are heads that attend locally, to a place beside the query (offset local "
            "heads)."
        ),
        source="Walmer et al. 2023, Sec. 4.2, Figs. 3, 14",
        statistic=(
            "the largest share of a head's attention in 5 x 5 cells around a focus at least half "
            "a cell off the query, less a half"
        ),
        unit="share of attention",
        models=("vit",),
        measure=lambda f: of.above(0.5, of.offset_focus(f.heads("vit"))),
    ),
    Finding(
        name="repeating",
        claim="With labels, queries attend more alike in the later layers than in the earlier.",
        source="Walmer et al. 2023, Sec. 4.1, Fig. 2",
        statistic=(
            "query_repetition (1: all queries attend to the same keys, 0: independently), mean of"
            " the heads of the upper half of the blocks less the lower half's"
        ),
        unit="query_repetition",
        models=("vit",),
        measure=lambda f: _repetition(f, "vit"),
    ),
    Finding(
        name="repeating-masked",
        claim="The rise of `repeating` is larger with labels than by reconstruction.",
        source="Walmer et al. 2023, Sec. 4.1, Fig. 2",
        statistic="as `repeating`, of vit less vit-masked",
        unit="query_repetition",
        models=("vit", "vit-masked"),
        measure=lambda f: _repetition(f, "vit") - _repetition(f, "vit-masked"),
    ),
    Finding(
        name="order-masked",
        claim=(
            "With labels distance rises further towards the last layers than by reconstruction."
        ),
        source="Walmer et al. 2023, Sec. 4.3, Fig. 4 right",
        statistic=(
            "mean distance of the heads of the upper half of the blocks less the lower half's, of"
            " vit less vit-masked"
        ),
        unit="of uniform attention's distance",
        models=("vit", "vit-masked"),
        measure=lambda f: (
            of.rise(f.distances("vit")) - of.rise(f.distances("vit-masked"))
        ),
    ),
)


# ------------------------------------------------------------------------------ skips

SKIPS = "Skip connections, fields and place (Raghu et al. 2021)"
REMOVED = "blocks.3"
POSITIVE = pl.col("value") > 0


def _partition(f: ModelTables) -> of.Estimate:
    without = f.cka("vit-noskip")
    whole = f.cka("vit")
    gap = of.within(without, REMOVED) - of.across(without, REMOVED)
    return gap - (of.within(whole, REMOVED) - of.across(whole, REMOVED))


def _fields_rise(f: ModelTables) -> of.Estimate:
    vit = of.share_by_middle(f.radii("vit", "blocks"))
    return vit - of.share_by_middle(f.radii("resnet", "blocks"))


def _branches(f: ModelTables) -> of.Estimate:
    branch = f.radii("vit", "*.attn.branch")
    after = f.radii("vit", "*.mid")
    return of.mean(branch, POSITIVE) - of.mean(after, POSITIVE)


def _place(f: ModelTables, model: str) -> of.Estimate:
    return of.own_contrast(f.localised(model, "blocks.-1.out"))


def _all_ratios(f: ModelTables) -> of.Estimate:
    vit = f.ratios("vit", "patches")
    cnn = f.ratios("resnet", "patches")
    return of.mean_log(vit, POSITIVE) - of.mean_log(cnn, POSITIVE)


_SKIPS = (
    Finding(
        name="skip-cls",
        claim=(
            "In the first half the class token passes through the skips, later it is rewritten."
        ),
        source="Raghu et al. 2021, Sec. 6, Figs. 7, E.1",
        statistic=(
            "mean log of the class token's norm ratio |z| / |f(z)|, lower less upper half of the "
            "sublayers"
        ),
        unit="log ratio",
        models=("vit",),
        measure=lambda f: of.log_fall(f.ratios("vit", "cls")),
    ),
    Finding(
        name="skip-patches",
        claim="Patches are rewritten in the first half and pass through the skips later.",
        source="Raghu et al. 2021, Sec. 6, Figs. 7, E.1",
        statistic="mean log of the patches' norm ratio, upper less lower half of the sublayers",
        unit="log ratio",
        models=("vit",),
        measure=lambda f: of.negative(of.log_fall(f.ratios("vit", "patches"))),
    ),
    Finding(
        name="skip-vit-cnn",
        claim="Skips carry more in a ViT than in a ResNet.",
        source="Raghu et al. 2021, Sec. 6, Fig. 7 right",
        statistic=(
            "mean log norm ratio of the patches over the sublayers of the ViT, less that of the "
            "locations over the blocks of the ResNet"
        ),
        unit="log ratio",
        models=("vit", "resnet"),
        measure=_all_ratios,
    ),
    Finding(
        name="skip-removed",
        claim=(
            "Trained without the skips of one block, the layers before and after it are less "
            "alike."
        ),
        source="Raghu et al. 2021, Sec. 6, Fig. 8",
        statistic=(
            f"mean CKA between layers before and behind {REMOVED}, of the whole ViT less the one "
            "trained without that block's skips"
        ),
        unit="CKA",
        models=("vit", "vit-noskip"),
        measure=lambda f: (
            of.across(f.cka("vit"), REMOVED) - of.across(f.cka("vit-noskip"), REMOVED)
        ),
    ),
    Finding(
        name="skip-partition",
        claim="The layers on each side of it stay alike: the similarity partitions.",
        source="Raghu et al. 2021, Sec. 6, Fig. 8",
        statistic=(
            f"mean CKA of layers on the same side of {REMOVED} less that across it, trained "
            "without its skips less with them"
        ),
        unit="CKA",
        models=("vit", "vit-noskip"),
        measure=_partition,
    ),
    Finding(
        name="fields-low",
        claim="The lowest layers of a ViT see farther than those of a ResNet.",
        source="Raghu et al. 2021, Sec. 5, Fig. 6",
        statistic=(
            "radius of half of the effective receptive field of the first block, ViT less ResNet "
            "(whose stem alone makes 8 x 8 locations of 32 x 32 pixels)"
        ),
        unit="pixels",
        models=("vit", "resnet"),
        measure=lambda f: (
            of.first(f.radii("vit", "first")) - of.first(f.radii("resnet", "first"))
        ),
    ),
    Finding(
        name="fields-grow",
        claim="A ResNet's fields grow gradually, a ViT's are global midway.",
        source="Raghu et al. 2021, Sec. 5, Figs. 6, C.1, C.2",
        statistic="radius at the middle of the depth over that at the end, ViT less ResNet",
        unit="ratio of radii",
        models=("vit", "resnet"),
        measure=_fields_rise,
    ),
    Finding(
        name="fields-branch",
        claim="Before the skip is added, attention depends less on the own patch.",
        source="Raghu et al. 2021, Sec. 5, App. C, Fig. C.4",
        statistic=(
            "radius of half of the effective receptive field, mean over the blocks: attention's "
            "branch less the stream behind it"
        ),
        unit="pixels",
        models=("vit",),
        measure=_branches,
    ),
    Finding(
        name="place-gap",
        claim=(
            "With a class token, the last patches represent their own place better than with GAP."
        ),
        source="Raghu et al. 2021, Sec. 7, Figs. 9, 10",
        statistic=(
            "last block: CKA of a patch's token with the pixels in its own place less the mean "
            "CKA with the pixels of other places, mean over tokens, vit less vit-gap"
        ),
        unit="CKA",
        models=("vit", "vit-gap"),
        measure=lambda f: _place(f, "vit") - _place(f, "vit-gap"),
    ),
    Finding(
        name="place-resnet",
        claim=(
            "The last patches of a ViT represent their own place better than a ResNet's "
            "locations."
        ),
        source="Raghu et al. 2021, Sec. 7, Fig. 9",
        statistic=(
            "as `place-gap`, vit less ResNet, both at the places of the ResNet's last block with "
            "more than one location (of the demo's 2 x 2, of 16 pixels): of the ViT the mean of a"
            " place's tokens"
        ),
        unit="CKA",
        models=("vit", "resnet"),
        measure=lambda f: f.equal_places("vit", "resnet"),
    ),
    Finding(
        name="single-tokens",
        claim=(
            "Single patches of the last block tell the class worse with a class token than with "
            "GAP."
        ),
        source="Raghu et al. 2021, Sec. 7, Fig. 11 left",
        statistic=(
            "last block: mean top-1 of 10-shot probes of single patches, vit-gap less vit"
        ),
        unit="accuracy",
        models=("vit-gap", "vit"),
        measure=lambda f: (
            of.at_depth(f.single_tokens("vit-gap"), 1)
            - of.at_depth(f.single_tokens("vit"), 1)
        ),
    ),
)


# ------------------------------------------------------------------------------ training

TRAINING = "Training data, tasks and supervision (Raghu et al. 2021; Walmer et al. 2023)"


def _seeds(f: ModelTables) -> of.Estimate:
    pairs = "same-depth"
    fewer = of.lower_less_upper(f.cka("vit", "vit-10pct", pairs))
    return fewer - of.lower_less_upper(f.cka("vit", "vit-seed1", pairs))


_TRAINING = (
    Finding(
        name="more-data",
        claim="With a tenth of the data the lower layers differ less than the upper ones.",
        source="Raghu et al. 2021, Sec. 8, Fig. 12",
        statistic=(
            "CKA of the same blocks of vit and vit-10pct, mean of the lower less the upper half "
            "(vit and vit-10pct began with the same weights, vit-seed1 with others)"
        ),
        unit="CKA",
        models=("vit", "vit-10pct"),
        measure=lambda f: of.lower_less_upper(f.cka("vit", "vit-10pct", "same-depth")),
    ),
    Finding(
        name="more-data-seed",
        claim="More so than another seed on the same data does.",
        source="A control of Raghu et al. 2021, Fig. 12, not in the paper",
        statistic="as `more-data`, less the same of vit and vit-seed1",
        unit="CKA",
        models=("vit", "vit-10pct", "vit-seed1"),
        measure=_seeds,
    ),
    Finding(
        name="alike-supervision",
        claim="Like supervision makes like class tokens in the last layer.",
        source="Walmer et al. 2023, Sec. 5.1, Fig. 6 left",
        statistic=(
            "CKA of the class tokens of the last block of vit and vit-seed1, both trained with "
            "labels, less that of vit and vit-masked"
        ),
        unit="CKA",
        models=("vit", "vit-seed1", "vit-masked"),
        measure=lambda f: (
            f.last_cls("vit", "vit-seed1") - f.last_cls("vit", "vit-masked")
        ),
    ),
    Finding(
        name="best-classes",
        claim="For classes the last layer is best.",
        source="Walmer et al. 2023, Sec. 6.3, Table 1 (FS)",
        statistic="k-NN top-1 of the last block less that of the best other block",
        unit="accuracy",
        models=("vit",),
        measure=lambda f: of.last_less_best(f.neighbours("vit")),
    ),
    Finding(
        name="best-keypoints",
        claim="For keypoints a layer before the last is best.",
        source="Walmer et al. 2023, Sec. 6.2, 6.3, Table 1 (FS)",
        statistic=(
            "PCK at 0.1 of the middle block less that of the last, on the bundled miniature of "
            "SPair-71k"
        ),
        unit="share of keypoints",
        models=("vit",),
        measure=lambda f: (
            of.at_depth(f.keypoints("vit"), 0.5) - of.at_depth(f.keypoints("vit"), 1)
        ),
    ),
    Finding(
        name="best-supervision",
        claim="By reconstruction the last layer is worse for classes than with labels.",
        source="Walmer et al. 2023, Sec. 6.3, Table 1 (FS, MAE)",
        statistic="k-NN top-1 of the last block, vit less vit-masked",
        unit="accuracy",
        models=("vit", "vit-masked"),
        measure=lambda f: (
            of.at_depth(f.neighbours("vit"), 1)
            - of.at_depth(f.neighbours("vit-masked"), 1)
        ),
    ),
)


# ------------------------------------------------------------------------------ interventions

INTERVENTIONS = (
    "Interventions (the class token replaced halfway; single heads at their mean)"
)
REPLACED = "arXiv 2604.14433 (there: registers of DINOv2, by accuracy)"
LITTLE = 0.01  # of accuracy


def _kl(f: ModelTables, values: str) -> of.Estimate:
    return of.first(f.replaced("vit", values).filter(metric="kl"))


def _median_loss(f: ModelTables) -> of.Estimate:
    gains = f.importance("vit").filter(metric="top1_difference")
    return of.combined(gains, of.EVERY, lambda values: np.median(-values, axis=0))


_INTERVENTIONS = (
    Finding(
        name="zero-mean",
        claim="To replace a token by zero costs more than by its mean.",
        source=REPLACED,
        statistic=(
            "KL of the outputs from the whole model's, class token zero at the output of the "
            "block halfway, less the same with its mean over images"
        ),
        unit="nats",
        models=("vit",),
        measure=lambda f: _kl(f, "zero") - _kl(f, "mean"),
    ),
    Finding(
        name="zero-other",
        claim="To replace a token by zero costs more than by that of another image.",
        source=REPLACED,
        statistic="as `zero-mean`, less the same with the class token of another image",
        unit="nats",
        models=("vit",),
        measure=lambda f: _kl(f, "zero") - _kl(f, "shuffle"),
    ),
    Finding(
        name="heads-spare",
        claim="Most heads can be left out one at a time at little cost.",
        source="Michel et al. 2019, Sec. 3.2 (there: language, heads at zero)",
        statistic=(
            f"{LITTLE:g} less the median over heads of the accuracy that is lost where one "
            "head's output is its mean over images"
        ),
        unit="accuracy",
        models=("vit",),
        measure=lambda f: of.below(LITTLE, _median_loss(f)),
    ),
    Finding(
        name="heads-far",
        claim="Within a block, heads that attend farther are needed more.",
        source="Of no paper",
        statistic=(
            "rank correlation over heads, within blocks, of KL without the head's output with its"
            " mean attention distance"
        ),
        unit="rank correlation",
        models=("vit",),
        measure=lambda f: of.first(
            f.importance("vit").filter(metric="spearman_kl_within")
        ),
    ),
)


# The sections of the page, in its order.
SECTIONS = {
    SIMILARITY: _SIMILARITY,
    ATTENTION: _ATTENTION,
    SKIPS: _SKIPS,
    TRAINING: _TRAINING,
    INTERVENTIONS: _INTERVENTIONS,
}
FINDINGS = tuple(
    replace(one, section=name) for name, some in SECTIONS.items() for one in some
)
