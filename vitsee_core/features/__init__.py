"""Features of images: some tokens of a site, as vectors, as groups of tokens, or as one matrix."""

from vitsee_core.features.compared import compared, model_key, require_comparable
from vitsee_core.features.matrix import FeatureBlock, FeatureMatrix
from vitsee_core.features.reader import (
    Matching,
    SiteFeatures,
    check_alike,
    choose_features,
)

__all__ = [
    "FeatureBlock",
    "FeatureMatrix",
    "Matching",
    "SiteFeatures",
    "check_alike",
    "choose_features",
    "compared",
    "model_key",
    "require_comparable",
]
