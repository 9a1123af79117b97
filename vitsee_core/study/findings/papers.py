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
        name, claim: what the papers say.
        source: paper and place.
        statistic: what is computed, in `unit`.
        models: what its stores are of (`vit`, `resnet`, `vit-gap`, ...).
        measure: the number, above 0 where the claim holds.
    """

    name: str
    claim: str
    source: str
    statistic: str
    unit: str
    models: tuple[str, ...]
    measure: Callable[[ModelTables], Estimate]
    section: str = ""  # of the page

    def row(
        self, found: Estimate | None, other: Estimate | None = None
    ) -> dict[str, Any]:
        """The finding's row in a table. found: None where it could not be measured. other: with
        models of another seed; a verdict is given where both agree."""
        text = ("section", "name", "claim", "source", "statistic", "unit")
        row: dict[str, Any] = {name: getattr(self, name) for name in text}
        row["models"] = " ".join(self.models)
        if found is None:
            return row | {"verdict": "not trained"}
        verdicts = set()
        for suffix, estimate in (("", found), ("_seed1", other)):
            if estimate is not None:
                std, low, high = estimate.interval()
                numbers = {"value": estimate.value, "std": std, "low": low, "high": high}
                row |= {f"{name}{suffix}": number for name, number in numbers.items()}
                verdicts.add(verdict(low, high))
        said = verdicts.pop() if len(verdicts) == 1 else DEPENDS
        return row | {"n_blocks": len(found.without), "verdict": said}


def verdict(low: float, high: float) -> str:
    """The verdict on a number that should be above 0, by its interval: "holds" where all of it is,
    "does not hold" where none is, else "undecided"."""
    if low > 0:
        return "holds"
    return "does not hold" if high < 0 else "undecided"


# ------------------------------------------------------------------------------ similarity

SIMILARITY = "Similarity of layers and models (Raghu et al. 2021)"


def _mixer(f: ModelTables) -> of.Estimate:
    to_vit = f.cka("mixer", "vit")
    to_cnn = f.cka("mixer", "resnet")
    there = pl.col("value").is_not_null()
    return of.mean(to_vit, there) - of.mean(to_cnn, there)


_SIMILARITY = (
    Finding(
        "uniform",
        "A ViT's lower and higher layers are more alike than a ResNet's.",
        "Raghu et al. 2021, Sec. 4, Fig. 1",
        "mean CKA between layers of the lowest and of the highest third of the depth (block "
        "outputs, norms, hidden layers), ViT less ResNet",
        "CKA",
        ("vit", "resnet"),
        lambda f: of.ends(f.cka("vit")) - of.ends(f.cka("resnet")),
    ),
    Finding(
        "uniform-gap",
        "The same of a ViT trained with global average pooling.",
        "Raghu et al. 2021, Sec. 4, Fig. 1 (there: with a class token)",
        "as `uniform`, of vit-gap less ResNet",
        "CKA",
        ("vit-gap", "resnet"),
        lambda f: of.ends(f.cka("vit-gap")) - of.ends(f.cka("resnet")),
    ),
    Finding(
        "lower-half",
        "The ResNet's lower half resembles the ViT's first quarter more than its second.",
        "Raghu et al. 2021, Sec. 4, Figs. 2, B.1",
        "ResNet layers in the second quarter of the depth: mean CKA with the ViT's first quarter "
        "less that with its second",
        "CKA",
        ("vit", "resnet"),
        lambda f: of.second_quarter(f.cka("vit", "resnet")),
    ),
    Finding(
        "final-third",
        "The ViT's final third is less similar to all ResNet layers than its other layers are.",
        "Raghu et al. 2021, Sec. 4, Fig. 2",
        "mean CKA of all ResNet layers with the ViT's lower two thirds less that with its last",
        "CKA",
        ("vit", "resnet"),
        lambda f: of.final_third(f.cka("vit", "resnet")),
    ),
    Finding(
        "mixer",
        "An MLP-Mixer resembles a ViT more than a ResNet.",
        "Raghu et al. 2021, App. H, Fig. H.2",
        "mean CKA of all layers of the mixer with all of the ViT less that with all of the ResNet",
        "CKA",
        ("mixer", "vit", "resnet"),
        _mixer,
    ),
)


# ------------------------------------------------------------------------------ attention

ATTENTION = "Attention (Raghu et al. 2021; Dosovitskiy et al. 2021; Walmer et al. 2023)"


def _repetition(f: ModelTables, model: str) -> of.Estimate:
    return of.rise(f.heads(model).filter(metric="query_repetition"))


_ATTENTION = (
    Finding(
        "local-heads",
        "The lowest layers have local heads.",
        "Raghu et al. 2021, Sec. 5, Fig. 3; Dosovitskiy et al. 2021, Fig. 7 right",
        "half of uniform attention's distance less the distance of the most local head of the two "
        "lowest blocks",
        "of uniform attention's distance",
        ("vit",),
        lambda f: of.below(0.5, of.nearest_head(f.distances("vit"))),
    ),
    Finding(
        "local-and-global",
        "The lowest layers mix nearer and farther heads more than the highest do.",
        "Raghu et al. 2021, Sec. 5, Fig. 3",
        "farthest less nearest head of the two lowest blocks, less the same of the two highest",
        "of uniform attention's distance",
        ("vit",),
        lambda f: of.head_range(f.distances("vit")),
    ),
    Finding(
        "upper-global",
        "The most local heads are in the lowest layers, not in the highest.",
        "Raghu et al. 2021, Sec. 5, Fig. 3",
        "the most local head of the two highest blocks less that of the two lowest",
        "of uniform attention's distance",
        ("vit",),
        lambda f: of.upper_is_global(f.distances("vit")),
    ),
    Finding(
        "distance-rises",
        "Attention distance increases with depth.",
        "Dosovitskiy et al. 2021, Sec. 4.5, App. D.6, Figs. 7 right, 10",
        "mean distance of all heads of the upper half of the blocks less the lower half's",
        "of uniform attention's distance",
        ("vit",),
        lambda f: of.rise(f.distances("vit")),
    ),
    Finding(
        "little-data",
        "With less training data the lower layers do not learn to attend locally.",
        "Raghu et al. 2021, Sec. 5, Fig. 4",
        "the most local head of the two lowest blocks, trained on a tenth less trained on all",
        "of uniform attention's distance",
        ("vit-10pct", "vit"),
        lambda f: (
            of.nearest_head(f.distances("vit-10pct"))
            - of.nearest_head(f.distances("vit"))
        ),
    ),
    Finding(
        "local-heads-cnn",
        "The lower ResNet layers resemble the local heads of the first block most.",
        "Raghu et al. 2021, Sec. 5, Fig. 5",
        "mean CKA with the ResNet's lower blocks, of the most local group of heads less the most "
        "global",
        "CKA",
        ("vit", "resnet"),
        lambda f: of.local_less_global(f.cnn_like("vit", "resnet")),
    ),
    Finding(
        "offset-heads",
        "There are heads that attend locally, to a place beside the query (offset local heads).",
        "Walmer et al. 2023, Sec. 4.2, Figs. 3, 14",
        "the largest share of a head's attention in 5 x 5 cells around a focus at least half a "
        "cell off the query, less a half",
        "share of attention",
        ("vit",),
        lambda f: of.above(0.5, of.offset_focus(f.heads("vit"))),
    ),
    Finding(
        "repeating",
        "With labels, queries attend more alike in the later layers than in the earlier.",
        "Walmer et al. 2023, Sec. 4.1, Fig. 2",
        "query_repetition (1: all queries attend to the same keys, 0: independently), mean of the "
        "heads of the upper half of the blocks less the lower half's",
        "query_repetition",
        ("vit",),
        lambda f: _repetition(f, "vit"),
    ),
    Finding(
        "repeating-masked",
        "The rise of `repeating` is larger with labels than by reconstruction.",
        "Walmer et al. 2023, Sec. 4.1, Fig. 2",
        "as `repeating`, of vit less vit-masked",
        "query_repetition",
        ("vit", "vit-masked"),
        lambda f: _repetition(f, "vit") - _repetition(f, "vit-masked"),
    ),
    Finding(
        "order-masked",
        "With labels distance rises further towards the last layers than by reconstruction.",
        "Walmer et al. 2023, Sec. 4.3, Fig. 4 right",
        "mean distance of the heads of the upper half of the blocks less the lower half's, of vit "
        "less vit-masked",
        "of uniform attention's distance",
        ("vit", "vit-masked"),
        lambda f: of.rise(f.distances("vit")) - of.rise(f.distances("vit-masked")),
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
        "skip-cls",
        "In the first half the class token passes through the skips, later it is rewritten.",
        "Raghu et al. 2021, Sec. 6, Figs. 7, E.1",
        "mean log of the class token's norm ratio |z| / |f(z)|, lower less upper half of the "
        "sublayers",
        "log ratio",
        ("vit",),
        lambda f: of.log_fall(f.ratios("vit", "cls")),
    ),
    Finding(
        "skip-patches",
        "Patches are rewritten in the first half and pass through the skips later.",
        "Raghu et al. 2021, Sec. 6, Figs. 7, E.1",
        "mean log of the patches' norm ratio, upper less lower half of the sublayers",
        "log ratio",
        ("vit",),
        lambda f: of.negative(of.log_fall(f.ratios("vit", "patches"))),
    ),
    Finding(
        "skip-vit-cnn",
        "Skips carry more in a ViT than in a ResNet.",
        "Raghu et al. 2021, Sec. 6, Fig. 7 right",
        "mean log norm ratio of the patches over the sublayers of the ViT, less that of the "
        "locations over the blocks of the ResNet",
        "log ratio",
        ("vit", "resnet"),
        _all_ratios,
    ),
    Finding(
        "skip-removed",
        "Trained without the skips of one block, the layers before and after it are less alike.",
        "Raghu et al. 2021, Sec. 6, Fig. 8",
        f"mean CKA between layers before and behind {REMOVED}, of the whole ViT less the one "
        "trained without that block's skips",
        "CKA",
        ("vit", "vit-noskip"),
        lambda f: (
            of.across(f.cka("vit"), REMOVED) - of.across(f.cka("vit-noskip"), REMOVED)
        ),
    ),
    Finding(
        "skip-partition",
        "The layers on each side of it stay alike: the similarity partitions.",
        "Raghu et al. 2021, Sec. 6, Fig. 8",
        f"mean CKA of layers on the same side of {REMOVED} less that across it, trained without "
        "its skips less with them",
        "CKA",
        ("vit", "vit-noskip"),
        _partition,
    ),
    Finding(
        "fields-low",
        "The lowest layers of a ViT see farther than those of a ResNet.",
        "Raghu et al. 2021, Sec. 5, Fig. 6",
        "radius of half of the effective receptive field of the first block, ViT less ResNet "
        "(whose stem alone makes 8 x 8 locations of 32 x 32 pixels)",
        "pixels",
        ("vit", "resnet"),
        lambda f: (
            of.first(f.radii("vit", "first")) - of.first(f.radii("resnet", "first"))
        ),
    ),
    Finding(
        "fields-grow",
        "A ResNet's fields grow gradually, a ViT's are global midway.",
        "Raghu et al. 2021, Sec. 5, Figs. 6, C.1, C.2",
        "radius at the middle of the depth over that at the end, ViT less ResNet",
        "ratio of radii",
        ("vit", "resnet"),
        _fields_rise,
    ),
    Finding(
        "fields-branch",
        "Before the skip is added, attention depends less on the own patch.",
        "Raghu et al. 2021, Sec. 5, App. C, Fig. C.4",
        "radius of half of the effective receptive field, mean over the blocks: attention's "
        "branch less the stream behind it",
        "pixels",
        ("vit",),
        _branches,
    ),
    Finding(
        "place-gap",
        "With a class token, the last patches represent their own place better than with GAP.",
        "Raghu et al. 2021, Sec. 7, Figs. 9, 10",
        "last block: CKA of a patch's token with the pixels in its own place less the mean CKA "
        "with the pixels of other places, mean over tokens, vit less vit-gap",
        "CKA",
        ("vit", "vit-gap"),
        lambda f: _place(f, "vit") - _place(f, "vit-gap"),
    ),
    Finding(
        "place-resnet",
        "The last patches of a ViT represent their own place better than a ResNet's locations.",
        "Raghu et al. 2021, Sec. 7, Fig. 9",
        "as `place-gap`, vit less ResNet, both at the places of the ResNet's last block with more "
        "than one location (of the demo's 2 x 2, of 16 pixels): of the ViT the mean of a place's "
        "tokens",
        "CKA",
        ("vit", "resnet"),
        lambda f: f.equal_places("vit", "resnet"),
    ),
    Finding(
        "single-tokens",
        "Single patches of the last block tell the class worse with a class token than with GAP.",
        "Raghu et al. 2021, Sec. 7, Fig. 11 left",
        "last block: mean top-1 of 10-shot probes of single patches, vit-gap less vit",
        "accuracy",
        ("vit-gap", "vit"),
        lambda f: (
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
        "more-data",
        "With a tenth of the data the lower layers differ less than the upper ones.",
        "Raghu et al. 2021, Sec. 8, Fig. 12",
        "CKA of the same blocks of vit and vit-10pct, mean of the lower less the upper half "
        "(vit and vit-10pct began with the same weights, vit-seed1 with others)",
        "CKA",
        ("vit", "vit-10pct"),
        lambda f: of.lower_less_upper(f.cka("vit", "vit-10pct", "same-depth")),
    ),
    Finding(
        "more-data-seed",
        "More so than another seed on the same data does.",
        "A control of Raghu et al. 2021, Fig. 12, not in the paper",
        "as `more-data`, less the same of vit and vit-seed1",
        "CKA",
        ("vit", "vit-10pct", "vit-seed1"),
        _seeds,
    ),
    Finding(
        "alike-supervision",
        "Like supervision makes like class tokens in the last layer.",
        "Walmer et al. 2023, Sec. 5.1, Fig. 6 left",
        "CKA of the class tokens of the last block of vit and vit-seed1, both trained with labels, "
        "less that of vit and vit-masked",
        "CKA",
        ("vit", "vit-seed1", "vit-masked"),
        lambda f: f.last_cls("vit", "vit-seed1") - f.last_cls("vit", "vit-masked"),
    ),
    Finding(
        "best-classes",
        "For classes the last layer is best.",
        "Walmer et al. 2023, Sec. 6.3, Table 1 (FS)",
        "k-NN top-1 of the last block less that of the best other block",
        "accuracy",
        ("vit",),
        lambda f: of.last_less_best(f.neighbours("vit")),
    ),
    Finding(
        "best-keypoints",
        "For keypoints a layer before the last is best.",
        "Walmer et al. 2023, Sec. 6.2, 6.3, Table 1 (FS)",
        "PCK at 0.1 of the middle block less that of the last, on the bundled miniature of "
        "SPair-71k",
        "share of keypoints",
        ("vit",),
        lambda f: (
            of.at_depth(f.keypoints("vit"), 0.5) - of.at_depth(f.keypoints("vit"), 1)
        ),
    ),
    Finding(
        "best-supervision",
        "By reconstruction the last layer is worse for classes than with labels.",
        "Walmer et al. 2023, Sec. 6.3, Table 1 (FS, MAE)",
        "k-NN top-1 of the last block, vit less vit-masked",
        "accuracy",
        ("vit", "vit-masked"),
        lambda f: (
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
