"""Skip connections, receptive fields and how layers keep place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from vitsee_core.study.findings import estimates as of
from vitsee_core.study.findings.finding import Finding

if TYPE_CHECKING:
    from vitsee_core.study.findings.model_tables import ModelTables

SECTION = "Skip connections, fields and place (Raghu et al. 2021)"
REMOVED = "blocks.3"
POSITIVE = pl.col("value") > 0


def _partition(f: ModelTables) -> of.Estimate:
    without, whole = f.cka("vit-noskip"), f.cka("vit")
    gap = of.within(without, REMOVED) - of.across(without, REMOVED)
    return gap - (of.within(whole, REMOVED) - of.across(whole, REMOVED))


def _fields_rise(f: ModelTables) -> of.Estimate:
    vit = of.share_by_middle(f.radii("vit", "blocks"))
    return vit - of.share_by_middle(f.radii("resnet", "blocks"))


def _branches(f: ModelTables) -> of.Estimate:
    branch, after = f.radii("vit", "*.attn.branch"), f.radii("vit", "*.mid")
    return of.mean(branch, POSITIVE) - of.mean(after, POSITIVE)


def _place(f: ModelTables, model: str) -> of.Estimate:
    return of.own_contrast(f.localised(model, "blocks.-1.out"))


def _all_ratios(f: ModelTables) -> of.Estimate:
    vit, cnn = f.ratios("vit", "patches"), f.ratios("resnet", "patches")
    return of.mean_log(vit, POSITIVE) - of.mean_log(cnn, POSITIVE)


FINDINGS = (
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
        lambda f: of.across(f.cka("vit"), REMOVED) - of.across(f.cka("vit-noskip"), REMOVED),
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
        lambda f: of.first(f.radii("vit", "first")) - of.first(f.radii("resnet", "first")),
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
            of.at_depth(f.single_tokens("vit-gap"), 1) - of.at_depth(f.single_tokens("vit"), 1)
        ),
    ),
)
