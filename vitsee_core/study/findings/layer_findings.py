"""The findings of the papers about the layers of trained models: CKA, attention, skips, fields.

Each is a number above 0 if it holds. Which third, half or quarter of the layers is meant, and which
models are compared, is defined here and was chosen from the papers' text, not from the numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitsee_core.study.findings import estimates
from vitsee_core.study.findings.estimates import Estimate
from vitsee_core.study.findings.finding import Finding
from vitsee_core.types import pl

if TYPE_CHECKING:
    from vitsee_core.study.findings.model_tables import ModelTables


# ------------------------------------------------------------ similarity

SIMILARITY = "Similarity of layers and models (Raghu et al. 2021)"


def _mixer_likeness(tables: ModelTables) -> Estimate:
    """Return how much more an MLP-Mixer resembles the ViT than the ResNet."""
    to_vit = tables.cka("mixer", "vit")
    to_cnn = tables.cka("mixer", "resnet")
    # A pair of layers without variance has no CKA.
    has_value = pl.col("value").is_not_null()
    return estimates.mean(to_vit, has_value) - estimates.mean(to_cnn, has_value)


SIMILARITY_FINDINGS = (
    Finding(
        name="uniform",
        claim="A ViT's lower and higher layers are more alike than a ResNet's.",
        source="Raghu et al. 2021, Sec. 4, Fig. 1",
        statistic=(
            "mean CKA between layers of the lowest and of the highest third of the "
            "depth (block outputs, norms, hidden layers), ViT less ResNet"
        ),
        unit="CKA",
        models=("vit", "resnet"),
        measure=lambda tables: (
            estimates.ends(tables.cka("vit")) - estimates.ends(tables.cka("resnet"))
        ),
    ),
    Finding(
        name="uniform-gap",
        claim="The same of a ViT trained with global average pooling.",
        source="Raghu et al. 2021, Sec. 4, Fig. 1 (there: with a class token)",
        statistic="as `uniform`, of vit-gap less ResNet",
        unit="CKA",
        models=("vit-gap", "resnet"),
        measure=lambda tables: (
            estimates.ends(tables.cka("vit-gap")) - estimates.ends(tables.cka("resnet"))
        ),
    ),
    Finding(
        name="lower-half",
        claim=(
            "The ResNet's lower half resembles the ViT's first quarter more than its "
            "second."
        ),
        source="Raghu et al. 2021, Sec. 4, Figs. 2, B.1",
        statistic=(
            "ResNet layers in the second quarter of the depth: mean CKA with the ViT's "
            "first quarter less that with its second"
        ),
        unit="CKA",
        models=("vit", "resnet"),
        measure=lambda tables: estimates.second_quarter(tables.cka("vit", "resnet")),
    ),
    Finding(
        name="final-third",
        claim=(
            "The ViT's final third is less similar to all ResNet layers than its other "
            "layers are."
        ),
        source="Raghu et al. 2021, Sec. 4, Fig. 2",
        statistic=(
            "mean CKA of all ResNet layers with the ViT's lower two thirds less that "
            "with its last"
        ),
        unit="CKA",
        models=("vit", "resnet"),
        measure=lambda tables: estimates.final_third(tables.cka("vit", "resnet")),
    ),
    Finding(
        name="mixer",
        claim="An MLP-Mixer resembles a ViT more than a ResNet.",
        source="Raghu et al. 2021, App. H, Fig. H.2",
        statistic=(
            "mean CKA of all layers of the mixer with all of the ViT less that with "
            "all of the ResNet"
        ),
        unit="CKA",
        models=("mixer", "vit", "resnet"),
        measure=_mixer_likeness,
    ),
)


# ------------------------------------------------------------ attention

ATTENTION = "Attention (Raghu et al. 2021; Dosovitskiy et al. 2021; Walmer et al. 2023)"


def _repetition(tables: ModelTables, model: str) -> Estimate:
    """Return how much more alike the queries attend in the upper half of a model's blocks."""
    return estimates.rise(tables.heads(model).filter(metric="query_repetition"))


ATTENTION_FINDINGS = (
    Finding(
        name="local-heads",
        claim="The lowest layers have local heads.",
        source="Raghu et al. 2021, Sec. 5, Fig. 3; Dosovitskiy et al. 2021, Fig. 7 right",
        statistic=(
            "half of uniform attention's distance less the distance of the most local "
            "head of the two lowest blocks"
        ),
        unit="of uniform attention's distance",
        models=("vit",),
        measure=lambda tables: estimates.below(
            0.5, estimates.nearest_head(tables.distances("vit"))
        ),
    ),
    Finding(
        name="local-and-global",
        claim="The lowest layers mix nearer and farther heads more than the highest do.",
        source="Raghu et al. 2021, Sec. 5, Fig. 3",
        statistic=(
            "farthest less nearest head of the two lowest blocks, less the same of the "
            "two highest"
        ),
        unit="of uniform attention's distance",
        models=("vit",),
        measure=lambda tables: estimates.head_range(tables.distances("vit")),
    ),
    Finding(
        name="upper-global",
        claim="The most local heads are in the lowest layers, not in the highest.",
        source="Raghu et al. 2021, Sec. 5, Fig. 3",
        statistic=(
            "the most local head of the two highest blocks less that of the two lowest"
        ),
        unit="of uniform attention's distance",
        models=("vit",),
        measure=lambda tables: estimates.upper_is_global(tables.distances("vit")),
    ),
    Finding(
        name="distance-rises",
        claim="Attention distance increases with depth.",
        source="Dosovitskiy et al. 2021, Sec. 4.5, App. D.6, Figs. 7 right, 10",
        statistic=(
            "mean distance of all heads of the upper half of the blocks less the lower "
            "half's"
        ),
        unit="of uniform attention's distance",
        models=("vit",),
        measure=lambda tables: estimates.rise(tables.distances("vit")),
    ),
    Finding(
        name="little-data",
        claim="With less training data the lower layers do not learn to attend locally.",
        source="Raghu et al. 2021, Sec. 5, Fig. 4",
        statistic=(
            "the most local head of the two lowest blocks, trained on a tenth less "
            "trained on all"
        ),
        unit="of uniform attention's distance",
        models=("vit-10pct", "vit"),
        measure=lambda tables: (
            estimates.nearest_head(tables.distances("vit-10pct"))
            - estimates.nearest_head(tables.distances("vit"))
        ),
    ),
    Finding(
        name="local-heads-cnn",
        claim="The lower ResNet layers resemble the local heads of the first block most.",
        source="Raghu et al. 2021, Sec. 5, Fig. 5",
        statistic=(
            "mean CKA with the ResNet's lower blocks, of the most local group of heads "
            "less the most global"
        ),
        unit="CKA",
        models=("vit", "resnet"),
        measure=lambda tables: estimates.local_less_global(
            tables.cnn_like("vit", "resnet")
        ),
    ),
    Finding(
        name="offset-heads",
        claim=(
            "There are heads that attend locally, to a place beside the query (offset "
            "local heads)."
        ),
        source="Walmer et al. 2023, Sec. 4.2, Figs. 3, 14",
        statistic=(
            "the largest share of a head's attention in 5 x 5 cells around a focus at "
            "least half a cell off the query, less a half"
        ),
        unit="share of attention",
        models=("vit",),
        measure=lambda tables: estimates.above(
            0.5, estimates.offset_focus(tables.heads("vit"))
        ),
    ),
    Finding(
        name="repeating",
        claim=(
            "With labels, queries attend more alike in the later layers than in the "
            "earlier."
        ),
        source="Walmer et al. 2023, Sec. 4.1, Fig. 2",
        statistic=(
            "query_repetition (1: all queries attend to the same keys, 0: "
            "independently), mean of the heads of the upper half of the blocks less "
            "the lower half's"
        ),
        unit="query_repetition",
        models=("vit",),
        measure=lambda tables: _repetition(tables, "vit"),
    ),
    Finding(
        name="repeating-masked",
        claim="The rise of `repeating` is larger with labels than by reconstruction.",
        source="Walmer et al. 2023, Sec. 4.1, Fig. 2",
        statistic="as `repeating`, of vit less vit-masked",
        unit="query_repetition",
        models=("vit", "vit-masked"),
        measure=lambda tables: (
            _repetition(tables, "vit") - _repetition(tables, "vit-masked")
        ),
    ),
    Finding(
        name="order-masked",
        claim=(
            "With labels distance rises further towards the last layers than by "
            "reconstruction."
        ),
        source="Walmer et al. 2023, Sec. 4.3, Fig. 4 right",
        statistic=(
            "mean distance of the heads of the upper half of the blocks less the lower "
            "half's, of vit less vit-masked"
        ),
        unit="of uniform attention's distance",
        models=("vit", "vit-masked"),
        measure=lambda tables: (
            estimates.rise(tables.distances("vit"))
            - estimates.rise(tables.distances("vit-masked"))
        ),
    ),
)


# ------------------------------------------------------------ skips

SKIPS = "Skip connections, fields and place (Raghu et al. 2021)"
REMOVED = "blocks.3"  # the block of vit-noskip that was trained without skips
POSITIVE = pl.col("value") > 0


def _partition(tables: ModelTables) -> Estimate:
    """Return how much more the layers fall into two groups without the skips of a block."""
    cka_without = tables.cka("vit-noskip")
    cka_with = tables.cka("vit")
    gap_without = estimates.within(cka_without, REMOVED)
    gap_without -= estimates.across(cka_without, REMOVED)
    gap_with = estimates.within(cka_with, REMOVED)
    gap_with -= estimates.across(cka_with, REMOVED)
    return gap_without - gap_with


def _field_growth(tables: ModelTables) -> Estimate:
    """Return how much nearer to its last size a ViT's field is at half the depth."""
    vit = estimates.share_by_middle(tables.radii("vit", "blocks"))
    return vit - estimates.share_by_middle(tables.radii("resnet", "blocks"))


def _branch_fields(tables: ModelTables) -> Estimate:
    """Return how much wider the fields of attention's branches are than those behind the skip."""
    branch = tables.radii("vit", "*.attn.branch")
    after = tables.radii("vit", "*.mid")
    return estimates.mean(branch, POSITIVE) - estimates.mean(after, POSITIVE)


def _place(tables: ModelTables, model: str) -> Estimate:
    """Return how much more a last token resembles the pixels in its place than others."""
    return estimates.own_contrast(tables.localised(model, "blocks.-1.out"))


# Raghu et al. 2021, Fig. 7 right: |z| / |f(z)|, the skip over the branch.
def _ratio_contrast(tables: ModelTables) -> Estimate:
    """Return how much more the skips of a ViT carry than those of a ResNet."""
    # A ratio of 0 has no logarithm.
    vit = tables.ratios("vit", "patches")
    cnn = tables.ratios("resnet", "patches")
    return estimates.mean_log(vit, POSITIVE) - estimates.mean_log(cnn, POSITIVE)


SKIP_FINDINGS = (
    Finding(
        name="skip-cls",
        claim=(
            "In the first half the class token passes through the skips, later it is "
            "rewritten."
        ),
        source="Raghu et al. 2021, Sec. 6, Figs. 7, E.1",
        statistic=(
            "mean log of the class token's norm ratio |z| / |f(z)|, lower less upper "
            "half of the sublayers"
        ),
        unit="log ratio",
        models=("vit",),
        measure=lambda tables: estimates.log_fall(tables.ratios("vit", "cls")),
    ),
    Finding(
        name="skip-patches",
        claim="Patches are rewritten in the first half and pass through the skips later.",
        source="Raghu et al. 2021, Sec. 6, Figs. 7, E.1",
        statistic=(
            "mean log of the patches' norm ratio, upper less lower half of the sublayers"
        ),
        unit="log ratio",
        models=("vit",),
        measure=lambda tables: estimates.negative(
            estimates.log_fall(tables.ratios("vit", "patches"))
        ),
    ),
    Finding(
        name="skip-vit-cnn",
        claim="Skips carry more in a ViT than in a ResNet.",
        source="Raghu et al. 2021, Sec. 6, Fig. 7 right",
        statistic=(
            "mean log norm ratio of the patches over the sublayers of the ViT, less "
            "that of the locations over the blocks of the ResNet"
        ),
        unit="log ratio",
        models=("vit", "resnet"),
        measure=_ratio_contrast,
    ),
    Finding(
        name="skip-removed",
        claim=(
            "Trained without the skips of one block, the layers before and after it "
            "are less alike."
        ),
        source="Raghu et al. 2021, Sec. 6, Fig. 8",
        statistic=(
            f"mean CKA between layers before and behind {REMOVED}, of the whole ViT "
            "less the one trained without that block's skips"
        ),
        unit="CKA",
        models=("vit", "vit-noskip"),
        measure=lambda tables: (
            estimates.across(tables.cka("vit"), REMOVED)
            - estimates.across(tables.cka("vit-noskip"), REMOVED)
        ),
    ),
    Finding(
        name="skip-partition",
        claim="The layers on each side of it stay alike: the similarity partitions.",
        source="Raghu et al. 2021, Sec. 6, Fig. 8",
        statistic=(
            f"mean CKA of layers on the same side of {REMOVED} less that across it, "
            "trained without its skips less with them"
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
            "radius of half of the effective receptive field of the first block, ViT "
            "less ResNet (whose stem alone makes 8 x 8 locations of 32 x 32 pixels)"
        ),
        unit="pixels",
        models=("vit", "resnet"),
        measure=lambda tables: (
            estimates.first(tables.radii("vit", "first"))
            - estimates.first(tables.radii("resnet", "first"))
        ),
    ),
    Finding(
        name="fields-grow",
        claim="A ResNet's fields grow gradually, a ViT's are global midway.",
        source="Raghu et al. 2021, Sec. 5, Figs. 6, C.1, C.2",
        statistic=(
            "radius at the middle of the depth over that at the end, ViT less ResNet"
        ),
        unit="ratio of radii",
        models=("vit", "resnet"),
        measure=_field_growth,
    ),
    Finding(
        name="fields-branch",
        claim="Before the skip is added, attention depends less on the own patch.",
        source="Raghu et al. 2021, Sec. 5, App. C, Fig. C.4",
        statistic=(
            "radius of half of the effective receptive field, mean over the blocks: "
            "attention's branch less the stream behind it"
        ),
        unit="pixels",
        models=("vit",),
        measure=_branch_fields,
    ),
    Finding(
        name="place-gap",
        claim=(
            "With a class token, the last patches represent their own place better "
            "than with GAP."
        ),
        source="Raghu et al. 2021, Sec. 7, Figs. 9, 10",
        statistic=(
            "last block: CKA of a patch's token with the pixels in its own place less "
            "the mean CKA with the pixels of other places, mean over tokens, vit less "
            "vit-gap"
        ),
        unit="CKA",
        models=("vit", "vit-gap"),
        measure=lambda tables: _place(tables, "vit") - _place(tables, "vit-gap"),
    ),
    Finding(
        name="place-resnet",
        claim=(
            "The last patches of a ViT represent their own place better than a "
            "ResNet's locations."
        ),
        source="Raghu et al. 2021, Sec. 7, Fig. 9",
        statistic=(
            "as `place-gap`, vit less ResNet, both at the places of the ResNet's last "
            "block with more than one location (of the demo's 2 x 2, of 16 pixels): of "
            "the ViT the mean of a place's tokens"
        ),
        unit="CKA",
        models=("vit", "resnet"),
        measure=lambda tables: tables.equal_places("vit", "resnet"),
    ),
    Finding(
        name="single-tokens",
        claim=(
            "Single patches of the last block tell the class worse with a class token "
            "than with GAP."
        ),
        source="Raghu et al. 2021, Sec. 7, Fig. 11 left",
        statistic=(
            "last block: mean top-1 of 10-shot probes of single patches, vit-gap less vit"
        ),
        unit="accuracy",
        models=("vit-gap", "vit"),
        measure=lambda tables: (
            estimates.at_depth(tables.single_tokens("vit-gap"), 1)
            - estimates.at_depth(tables.single_tokens("vit"), 1)
        ),
    ),
)
