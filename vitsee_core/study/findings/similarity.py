"""Similarity of layers and models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from vitsee_core.study.findings import estimates as of
from vitsee_core.study.findings.finding import Finding

if TYPE_CHECKING:
    from vitsee_core.study.findings.model_tables import ModelTables

SECTION = "Similarity of layers and models (Raghu et al. 2021)"


def _mixer(f: ModelTables) -> of.Estimate:
    to_vit, to_cnn = f.cka("mixer", "vit"), f.cka("mixer", "resnet")
    there = pl.col("value").is_not_null()
    return of.mean(to_vit, there) - of.mean(to_cnn, there)


FINDINGS = (
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
