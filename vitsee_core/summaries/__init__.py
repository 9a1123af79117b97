"""Attention and residual summaries, computed on the model's device during extraction."""

from vitsee_core.summaries.activations import (
    SitePass,
    is_by_token,
    largest_magnitude,
    pass_over,
    residual_products,
    take_tokens,
)
from vitsee_core.summaries.attention import AttentionReducer, rollout
from vitsee_core.summaries.summary import AttentionScores, AttentionSummary

__all__ = [
    "AttentionReducer",
    "AttentionScores",
    "AttentionSummary",
    "SitePass",
    "is_by_token",
    "largest_magnitude",
    "pass_over",
    "residual_products",
    "rollout",
    "take_tokens",
]
